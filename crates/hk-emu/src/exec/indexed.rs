//! The modes that change how instructions run: VSKIP, and vector registers named relative to M0.

use super::prep::run_fixed;
use super::{Ctl, Env, Uop};
use crate::fault::Problem;
use crate::isa::{Inst, Op, Operand};
use crate::tables::{Fixup, Post, Prep};
use crate::wave::{M0, TEMP, Wave, mode};

/// Whether VSKIP drops the instruction.
pub(crate) fn skips(w: &Wave, e: &Env<'_>, u: &Uop) -> bool {
    let kept = |inst: &Inst| !inst.is_vector() || matches!(inst.op, Op::BUFFER_WBL2 | Op::BUFFER_INV);
    w.mode & mode::VSKIP != 0 && e.program.inst(u.index).is_some_and(|inst| !kept(inst))
}

/// The destination as an operand number; sources are 0 to 2.
const DESTINATION: usize = 3;

/// Runs an instruction in the mode in which M0 indexes the vector registers of vector ALU instructions: M0[7:0] is
/// added to the number of each operand that M0[15:12] enables.
pub(crate) fn run(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let program = e.program;
    let inst = program.inst(u.index).filter(|inst| inst.is_valu());
    let (Some(inst), true) = (inst, w.mode & mode::GPR_IDX != 0) else {
        // SAFETY: handlers come from the tables of the program's level, which the host was checked to have.
        return unsafe { (u.run)(w, e, u) };
    };
    let (index, enabled) = ((w.s[M0] & 0xFF) as u16, w.s[M0] >> 12 & 0xF);
    let lanes = matches!(inst.op, Op::V_READLANE_B32 | Op::V_READFIRSTLANE_B32);
    if enabled != 0 && (lanes || inst.op.is_mfma() || inst.dpp.is_some() || inst.sdwa.is_some()) {
        return e.fault(Problem::Unsupported { what: "an instruction that takes no indexed registers" });
    }
    let info = inst.op.info();
    let operand = |n: usize| if n == DESTINATION { inst.dst } else { inst.src[n] };
    for n in (0..=DESTINATION).filter(|n| enabled >> n & 1 != 0) {
        let (letter, first, limit) = match operand(n) {
            Operand::Vgpr(first) => ('v', first, program.registers().vgprs),
            Operand::Agpr(first) => ('a', first, program.registers().agprs),
            _ => continue,
        };
        let width = if n == DESTINATION { info.dst } else { info.src[n] };
        let last = u32::from(first) + u32::from(index) + u32::from(width.max(1)) - 1;
        if last >= limit {
            return e.fault(Problem::Register { register: format!("{letter}{last} (indexed)"), limit });
        }
    }
    let moved = |slot: &mut u16, n: usize| {
        if enabled >> n & 1 != 0 && *slot < TEMP && matches!(operand(n), Operand::Vgpr(_) | Operand::Agpr(_))
        {
            *slot += index;
        }
    };
    let mut v = u.clone();
    let [mut a, mut b, mut c] = [v.a, v.b, v.c];
    moved(&mut a, 0);
    moved(&mut b, 1);
    moved(&mut c, if inst.op.accumulates() { DESTINATION } else { 2 });
    [v.a, v.b, v.c] = [a, b, c];
    for (n, slot) in v.hi.iter_mut().enumerate() {
        // The only slot there of `v_pk_mov_b32` is its second source's.
        moved(slot, if inst.op == Op::V_PK_MOV_B32 { 1 } else { n });
    }
    moved(&mut v.d, DESTINATION);
    let Some(fixup) = program.fixups.get(u.fixup as usize) else {
        // SAFETY: as above.
        return unsafe { (v.run)(w, e, &v) };
    };
    let mut fixup: Fixup = fixup.clone();
    for prep in &mut fixup.preps {
        match prep {
            Prep::Splat { .. } => {}
            Prep::Bits { from, to, .. }
            | Prep::High { from, to }
            | Prep::Halves { from, to, .. }
            | Prep::Sub { from, to, .. }
            | Prep::Dpp { from, to } => moved(from, usize::from((*to - TEMP) / 8)),
        }
    }
    for post in &mut fixup.posts {
        match post {
            Post::Float { .. } => {}
            Post::Move { to, .. } | Post::Half { to, .. } | Post::Sdwa { to, .. } => moved(to, DESTINATION),
        }
    }
    run_fixed(w, e, &v, &fixup)
}
