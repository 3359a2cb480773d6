//! Reads of uninitialized data: every wave has a shadow wave whose undefined registers and memory hold other bits.
//!
//! Both execute every instruction. Where the two differ, the value depends on something undefined: that is harmless
//! until it decides an address, a branch, the lanes that run, or bytes of global memory. Instructions need no rules
//! for that, except those that map different operands to one result: comparisons, minima and maxima, saturating
//! conversions. Their results differ wherever their operands do.
//!
//! Global memory has no second state. It keeps a bit for each unwritten byte, in which the shadow's loads differ, and
//! a store of different values is a finding.

use super::access::{Nature, Part};
use super::step::Step;
use crate::checks::Check;
use crate::exec::prep::dpp_source;
use crate::exec::{Ctl, Env, indexed, smem};
use crate::fault::{Access, Problem, Space};
use crate::fault::{Finding, Place};
use crate::isa::{Encoding, Inst, Operand};
use crate::memory::View;
use crate::program::Program;
use crate::registers;
use crate::registers::{RegSet, SGPR};
use crate::wave::{CHUNK, Lanes, M0, Wave};
use crate::words::POISON;

/// What undefined dwords of a shadow wave hold, alternating: the complement of [`POISON`], which is a NaN; a huge float.
const SHADOW_POISON: [u32; 2] = [!POISON, 0x7A55_7A55];

/// What a wave starts with where the hardware defines nothing.
pub(crate) struct Undefined {
    pub vector: Lanes,
    pub scalar: u32,
    pub scc: bool,
    /// Of private memory.
    pub byte: u8,
}

impl Undefined {
    pub const POISON: Undefined =
        Undefined { vector: Lanes([[POISON; CHUNK]; 4]), scalar: POISON, scc: false, byte: 0xFA };
    /// For shadow waves.
    pub const SHADOW: Undefined = Undefined {
        vector: {
            let [even, odd] = SHADOW_POISON;
            let mut chunk = [even; CHUNK];
            let mut l = 1;
            while l < CHUNK {
                chunk[l] = odd;
                l += 2;
            }
            Lanes([chunk; 4])
        },
        scalar: SHADOW_POISON[0],
        scc: true,
        byte: 0x05,
    };
}

/// What the bytes of the word at `address` differ in between a wave and its shadow wave where they were never written.
fn difference(address: u64) -> u32 {
    POISON ^ SHADOW_POISON[(address / 4 % 2) as usize]
}

/// The shadow waves of a workgroup.
pub(crate) struct Uninit {
    shadows: Vec<Wave>,
    lds: Vec<u8>,
    hints: Vec<u32>,
    histories: Vec<History>,
    /// Lanes whose operands differ, where the instruction may hide it.
    differing: u64,
}

/// The last instructions of a wave.
#[derive(Clone)]
struct History {
    indices: Vec<u32>,
    count: usize,
}

impl History {
    /// How many it knows, a power of two.
    const LENGTH: usize = 1 << 12;

    fn push(&mut self, index: u32) {
        self.indices[self.count % Self::LENGTH] = index;
        self.count += 1;
    }

    /// The last instruction that wrote `register`, but for the newest entry if that is `now`.
    fn writer(&self, program: &Program, register: u16, now: u32) -> Option<u32> {
        let known = self.count.min(Self::LENGTH);
        let mut indices = (1..=known).map(|back| self.indices[(self.count - back) % Self::LENGTH]);
        let skipped = indices.next().filter(|index| *index != now);
        skipped.into_iter().chain(indices).find(|index| program.effects(*index).writes.contains(register))
    }

    /// Whether it goes back to the start of the wave.
    fn is_complete(&self) -> bool {
        self.count <= Self::LENGTH
    }
}

impl Uninit {
    /// `shadows` are in their first state, undefined registers holding [`SHADOW_POISON`].
    pub fn new(shadows: Vec<Wave>, lds: usize, instructions: usize) -> Uninit {
        let lds = (0..lds).map(|i| SHADOW_POISON[i / 4 % 2].to_le_bytes()[i % 4]).collect();
        let history = History { indices: vec![0; History::LENGTH], count: 0 };
        let histories = vec![history; shadows.len()];
        Uninit { shadows, lds, hints: vec![0; instructions], histories, differing: 0 }
    }

    pub fn into_waves(self) -> Vec<Wave> {
        self.shadows
    }

    /// Checks the operands that decide an address, a branch or EXEC, before the instruction runs.
    pub fn before(
        &mut self,
        step: &Step<'_>,
        shadow_accesses: &mut super::Accesses,
    ) -> Result<(), Box<Finding>> {
        let Step { w, e, u, inst, accesses, .. } = *step;
        let Some(shadow) = self.shadows.get(w.index as usize) else { return Ok(()) };
        if !is_memory(inst) {
            self.differing = if Nature::of(inst.op).hides { differing_lanes(inst, w, shadow) } else { 0 };
            return Ok(());
        }
        self.differing = 0;
        shadow_accesses.of(inst, u, shadow, e);
        let parts = shadow_accesses.parts();
        for (i, part) in accesses.iter().enumerate() {
            let other = parts.get(i).filter(|o| o.space == part.space && o.mask == part.mask);
            let lane = match other {
                Some(other) => part.lanes().find(|(l, at)| other.address[*l] != *at).map(|(l, _)| l),
                None => Some(0),
            };
            if let Some(lane) = lane {
                let what = "the address depends on a value that was never written".to_owned();
                return Err(self.finding(step, what, (!part.scalar).then_some(lane), None));
            }
        }
        if parts.len() != accesses.len() {
            let what = "the range check depends on a value that was never written".to_owned();
            return Err(self.finding(step, what, None, None));
        }
        for part in accesses.iter().filter(|part| part.space == Space::Global) {
            self.global(step, part)?;
        }
        Ok(())
    }

    /// A store to global memory must not depend on anything undefined, nor an atomic find anything undefined there.
    fn global(&self, step: &Step<'_>, part: &Part) -> Result<(), Box<Finding>> {
        let memory = step.e.memory;
        let Some(shadow) = self.shadows.get(step.w.index as usize) else { return Ok(()) };
        if part.access == Access::Read {
            return Ok(());
        }
        let high = Nature::of(step.inst.op).high;
        let alike = part.register.is_some_and(|register| {
            let mut registers = register..register + part.bytes.div_ceil(4) as u16;
            !part.scalar && registers.all(|n| step.w.v(n) == shadow.v(n))
        });
        if let (true, Access::Write, Some((start, bytes))) = (alike, part.access, part.span())
            && let Some((allocation, offset)) = memory.find(start, bytes, &mut 0)
        {
            allocation.mark_written(offset, bytes as usize);
            return Ok(());
        }
        let mut hint = 0;
        for (lane, address) in part.lanes() {
            if let (false, Some(register)) = (alike, part.register) {
                let stored = |w: &Wave, n: u32| {
                    let word = match register {
                        register if part.scalar => w.s[(register - SGPR + n as u16) as usize & 127],
                        register => w.lane(register + n as u16, lane),
                    };
                    match part.bytes {
                        1 | 2 => (if high { word >> 16 } else { word }) & ((1 << (8 * part.bytes)) - 1),
                        _ => word,
                    }
                };
                for n in 0..part.bytes.div_ceil(4) {
                    let register = register + n as u16;
                    if stored(step.w, n) != stored(shadow, n) && !self.is_padding(step, register, lane) {
                        let what = format!(
                            "{} holds a value that depends on what was never written, and goes to global memory",
                            registers::name(register)
                        );
                        let mut finding =
                            self.finding(step, what, (!part.scalar).then_some(lane), Some(register));
                        finding.address = Some((Space::Global, address));
                        return Err(finding);
                    }
                }
            }
            let Some((allocation, offset)) = memory.find(address, part.bytes.into(), &mut hint) else {
                continue;
            };
            if part.access == Access::Atomic && allocation.unwritten(offset, part.bytes as usize) != 0 {
                let what = "an atomic on global memory that was never written".to_owned();
                let mut finding = self.finding(step, what, Some(lane), None);
                finding.address = Some((Space::Global, address));
                return Err(finding);
            }
            if alike {
                allocation.mark_written(offset, part.bytes as usize);
                continue;
            }
            for n in 0..part.bytes as usize / 4 {
                // Padding stays unwritten where it is copied to.
                if part.register.is_none_or(|r| !self.is_padding(step, r + n as u16, lane)) {
                    allocation.mark_written(offset + 4 * n, 4);
                }
            }
            allocation.mark_written(offset + part.bytes as usize / 4 * 4, part.bytes as usize % 4);
        }
        Ok(())
    }

    /// Whether a register holds untouched undefined bits straight from private memory. Unoptimised code copies structs
    /// through it, with their padding.
    fn is_padding(&self, step: &Step<'_>, register: u16, lane: usize) -> bool {
        let (w, program) = (step.w, step.e.program);
        if register >= SGPR || w.lane(register, lane) != u32::from_le_bytes([Undefined::POISON.byte; 4]) {
            return false;
        }
        let history = self.histories.get(w.index as usize);
        history
            .and_then(|history| history.writer(program, register, u32::MAX))
            .and_then(|index| program.inst(index))
            .is_some_and(|inst| matches!(inst.encoding, Encoding::Flat | Encoding::Scratch))
    }

    /// Executes on the shadow wave what the wave has executed.
    pub fn after(&mut self, step: &Step<'_>, ctl: Ctl) -> Result<(), Box<Finding>> {
        let Step { w, e, u, inst, accesses, .. } = *step;
        let Some(mut shadow) = self.shadows.get_mut(w.index as usize) else { return Ok(()) };
        (shadow.executed, shadow.clock) = (w.executed, w.clock);
        let copies = takes_results(inst, accesses);
        let mut shadow_ctl = ctl;
        if !copies || inst.encoding == Encoding::Flat && accesses.iter().any(|p| p.space != Space::Global) {
            // Lanes of FLAT that go to global memory are copied below.
            let global = accesses.iter().filter(|p| copies && p.space == Space::Global);
            let global = global.fold(0, |mask, part| mask | part.mask);
            let exec = shadow.exec();
            shadow.set_exec(exec & !global);
            let mut env = Env {
                program: e.program,
                memory: e.memory,
                lds: &mut self.lds,
                group: e.group,
                // The wave itself interrupts the host.
                interrupt: None,
                rises: &mut [],
                hints: &mut self.hints,
                read_bytes: 0,
                written_bytes: 0,
                problem: None,
            };
            shadow.pc = u.index;
            // In whatever mode the wave is.
            shadow_ctl = indexed::run(shadow, &mut env, u);
            if global != 0 {
                shadow.set_exec(exec);
            }
            if let (Ctl::Fault, Some(problem)) = (shadow_ctl, env.problem) {
                let what = match *problem {
                    Problem::WildJump { .. } => "the jump depends on a value that was never written",
                    _ => "whether the instruction is legal depends on a value that was never written",
                };
                return Err(self.finding(step, what.to_owned(), None, None));
            }
            shadow = match self.shadows.get_mut(w.index as usize) {
                Some(shadow) => shadow,
                None => return Ok(()),
            };
        }
        if copies {
            copy_results(step, shadow, &mut self.lds);
        }
        if self.differing != 0 {
            tell_apart(step, shadow, self.differing);
        }
        if let Some(history) = self.histories.get_mut(w.index as usize) {
            history.push(u.index);
        }
        let what = if shadow_ctl != ctl || ctl == Ctl::Jump && shadow.pc != w.pc {
            "the branch depends on a value that was never written"
        } else if shadow.exec() != w.exec() {
            "the lanes that run next depend on a value that was never written"
        } else if shadow.mode != w.mode {
            "MODE depends on a value that was never written"
        } else {
            return Ok(());
        };
        Err(self.finding(step, what.to_owned(), None, None))
    }

    /// A finding; its other side is the instruction that wrote `register`, or else the first operand that differs.
    fn finding(
        &self,
        step: &Step<'_>,
        what: String,
        lane: Option<usize>,
        register: Option<u16>,
    ) -> Box<Finding> {
        let w = step.w;
        let history = self.histories.get(w.index as usize);
        let register = register.or_else(|| {
            let shadow = self.shadows.get(w.index as usize)?;
            let reads = if is_memory(step.inst) { addressing(step) } else { step.effects.reads };
            reads.iter().find(|r| differs(w, shadow, *r, lane))
        });
        let writer = register.zip(history).and_then(|(r, h)| h.writer(step.e.program, r, step.u.index));
        let never = writer.is_none() && history.is_some_and(History::is_complete);
        let what = match register {
            Some(r) if never && !what.starts_with(&registers::name(r)) => {
                format!("{what}: {} has no value yet", registers::name(r))
            }
            Some(r) if !what.starts_with(&registers::name(r)) => {
                format!("{what}, through {}", registers::name(r))
            }
            _ => what,
        };
        let place = |index| Place { index, workgroup: step.e.group.id, wave: w.index };
        Box::new(Finding {
            check: Check::Uninit,
            what,
            lane: lane.map(|l| l as u32),
            address: None,
            other: writer.map(place),
        })
    }
}

/// The active lanes in which a source differs in a bit that counts; all lanes for a scalar one.
fn differing_lanes(inst: &Inst, w: &Wave, shadow: &Wave) -> u64 {
    let name = inst.op.info().name;
    let half = name.ends_with("16") && !name.starts_with("V_PK_") || name.ends_with("F32_F16");
    let mut lanes = 0;
    for (i, operand) in inst.src.iter().enumerate() {
        let Some(first) = registers::reg(*operand) else { continue };
        let bits = match &inst.sdwa {
            Some(sdwa) if i < 2 => match sdwa.src_sel[i] {
                sel @ 0..=3 => 0xFF << (8 * sel),
                sel @ 4..=5 => 0xFFFF << (16 * (sel - 4)),
                _ => !0,
            },
            _ if half && inst.op_sel >> i & 1 != 0 => 0xFFFF_0000,
            _ if half => 0xFFFF,
            _ => !0u32,
        };
        for register in first..first + registers::source_width(inst, i) as u16 {
            if register >= SGPR {
                let code = usize::from(register - SGPR) & 127;
                lanes |= if (w.s[code] ^ shadow.s[code]) & bits != 0 { !0 } else { 0 };
                continue;
            }
            for lane in 0..64 {
                let from = match &inst.dpp {
                    Some(dpp) if i == 0 => dpp_source(lane, dpp.ctrl).filter(|l| w.exec() >> l & 1 != 0),
                    _ => Some(lane),
                };
                let differs =
                    from.is_some_and(|l| (w.lane(register, l) ^ shadow.lane(register, l)) & bits != 0);
                lanes |= u64::from(differs) << lane;
            }
        }
    }
    if inst.dst == Operand::None || matches!(inst.encoding, Encoding::Sop2) {
        lanes
    } else {
        lanes & w.exec()
    }
}

/// Makes the result of the shadow wave differ in `lanes`.
fn tell_apart(step: &Step<'_>, shadow: &mut Wave, lanes: u64) {
    let Step { w, inst, .. } = *step;
    match (inst.dst, inst.encoding) {
        (Operand::Sgpr(code), Encoding::Vopc | Encoding::Vop3) if inst.op.is_cmp() => {
            let code = usize::from(code);
            shadow.set_s64(code, w.s64(code) ^ lanes);
            if inst.op.info().name.starts_with("V_CMPX") {
                shadow.set_exec(w.exec() ^ lanes);
            }
        }
        (Operand::Sgpr(code), _) => shadow.s[usize::from(code) & 127] = !w.s[usize::from(code) & 127],
        (Operand::None, _) => shadow.scc = !w.scc,
        (dst, _) => {
            let Some(register) = registers::reg(dst).filter(|r| *r < SGPR) else { return };
            for lane in (0..64).filter(|lane| lanes >> lane & 1 != 0) {
                let value = w.lane(register, lane);
                if shadow.lane(register, lane) == value {
                    shadow.set_lane(register, lane, value ^ POISON);
                }
            }
        }
    }
}

/// The registers that make up the address of a memory instruction.
fn addressing(step: &Step<'_>) -> RegSet {
    let inst = step.inst;
    let mut set = RegSet::default();
    let operands = match inst.encoding {
        Encoding::Ds => 0..1,
        Encoding::Mubuf | Encoding::Mtbuf => 0..3,
        _ => 0..2,
    };
    for i in operands {
        if let Some(first) = registers::reg(inst.src[i]) {
            set.insert(first, registers::source_width(inst, i));
        }
    }
    if step.effects.reads.contains(SGPR + M0 as u16) {
        set.insert(SGPR + M0 as u16, 1);
    }
    set
}

/// Whether a register differs between a wave and its shadow wave, in `lane` or in any active lane.
fn differs(w: &Wave, shadow: &Wave, register: u16, lane: Option<usize>) -> bool {
    match register {
        0..SGPR => match lane {
            Some(lane) => w.lane(register, lane) != shadow.lane(register, lane),
            None => {
                (0..64).any(|l| w.exec() >> l & 1 != 0 && w.lane(register, l) != shadow.lane(register, l))
            }
        },
        registers::SCC => w.scc != shadow.scc,
        register => {
            let code = usize::from(register - SGPR) & 127;
            w.s[code] != shadow.s[code]
        }
    }
}

fn is_memory(inst: &Inst) -> bool {
    use Encoding::*;
    matches!(inst.encoding, Smem | Ds | Flat | Global | Scratch | Mubuf | Mtbuf)
}

/// Whether the shadow wave takes the results of the wave instead of executing: accesses to global memory, and the clock.
fn takes_results(inst: &Inst, accesses: &[Part]) -> bool {
    match inst.encoding {
        Encoding::Smem | Encoding::Global | Encoding::Mubuf | Encoding::Mtbuf => true,
        Encoding::Flat => accesses.iter().any(|part| part.space == Space::Global) || accesses.is_empty(),
        _ => false,
    }
}

/// The bytes of a widened scalar load that were not written or lie beyond the allocation.
fn beyond_tail(memory: &View<'_>, address: u64, bytes: usize) -> u64 {
    smem::tail(memory, address, bytes).map_or(0, |(allocation, offset, inside)| {
        allocation.unwritten(offset, inside) | !0 << inside & !(!0 << bytes)
    })
}

/// Copies to the shadow wave what the wave has loaded, other bits where memory was not written.
fn copy_results(step: &Step<'_>, shadow: &mut Wave, lds: &mut [u8]) {
    let Step { w, e, inst, effects, accesses, .. } = *step;
    let exec = match inst.encoding {
        Encoding::Flat => accesses.iter().filter(|p| p.space == Space::Global).fold(0, |m, p| m | p.mask),
        _ => w.exec(),
    };
    for register in effects.writes.iter() {
        match register {
            0..SGPR => {
                let from = *w.v(register);
                for k in 0..4 {
                    shadow.set_chunk(register, k, Wave::exec_chunk(exec, k), from.0[k]);
                }
            }
            registers::SCC => shadow.scc = w.scc,
            register => {
                shadow.s[usize::from(register - SGPR) & 127] = w.s[usize::from(register - SGPR) & 127]
            }
        }
    }
    let dma = accesses.iter().find(|p| p.space == Space::Lds && p.register.is_none());
    if let Some(to) = dma {
        for (_, at) in to.lanes() {
            let range = at as usize..at as usize + to.bytes as usize;
            if let (Some(to), Some(from)) = (lds.get_mut(range.clone()), e.lds.get(range)) {
                to.copy_from_slice(from);
            }
        }
    }
    let high = Nature::of(inst.op).high;
    for part in accesses.iter().filter(|p| p.space == Space::Global && p.access == Access::Read) {
        if let Some((start, bytes)) = part.span()
            && let Some((allocation, offset)) = e.memory.find(start, bytes, &mut 0)
            && allocation.is_written(offset, bytes as usize)
        {
            continue;
        }
        let mut hint = 0;
        for (lane, address) in part.lanes() {
            let unwritten = match e.memory.find(address, part.bytes.into(), &mut hint) {
                Some((allocation, offset)) => allocation.unwritten(offset, part.bytes as usize),
                None if part.scalar => beyond_tail(e.memory, address, part.bytes as usize),
                None => 0,
            };
            if unwritten == 0 {
                continue;
            }
            for byte in (0..part.bytes).filter(|byte| unwritten >> byte & 1 != 0) {
                let at = address + u64::from(byte);
                let bits = difference(at) >> (8 * (at % 4)) & 0xFF;
                match (part.register, dma) {
                    (Some(register), _) if part.scalar => {
                        let code = usize::from(register - SGPR) + byte as usize / 4;
                        shadow.s[code & 127] ^= bits << (8 * (byte % 4));
                    }
                    (Some(register), _) => {
                        let register = register + (byte / 4) as u16;
                        let shift = 8 * (byte % 4) + if high && part.bytes < 4 { 16 } else { 0 };
                        let value = shadow.lane(register, lane) ^ bits << shift;
                        shadow.set_lane(register, lane, value);
                    }
                    (None, Some(to)) => {
                        if let Some(x) = lds.get_mut(to.address[lane] as usize + byte as usize) {
                            *x ^= bits as u8;
                        }
                    }
                    (None, None) => {}
                }
            }
        }
    }
}
