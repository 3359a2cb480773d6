//! Which registers an instruction reads and writes: facts of its encoding, whatever the registers hold.

use crate::hazard_rules::Traits;
use crate::isa::{Encoding, Inst, Op, Operand};
use crate::registers::{Reg, RegSet, SCC, SGPR, destination_width, reg, source_width};
use crate::wave::{EXEC, M0, VCC, Wave, mode};

/// How an instruction takes part in the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    #[default]
    None,
    /// Vector memory, in order.
    Vector,
    /// LDS, in order.
    Lds,
    /// Scalar memory and messages, in any order.
    Scalar,
    /// Either memory: in both counters, in any order.
    Flat,
    /// `s_waitcnt`.
    Wait,
}

impl Kind {
    pub fn of(inst: &Inst) -> Kind {
        match inst.encoding {
            Encoding::Smem => Kind::Scalar,
            Encoding::Ds if inst.flags.gds => Kind::Scalar,
            Encoding::Ds => Kind::Lds,
            Encoding::Flat => Kind::Flat,
            _ if inst.op == Op::BUFFER_INV => Kind::None,
            Encoding::Global | Encoding::Scratch | Encoding::Mubuf | Encoding::Mtbuf => Kind::Vector,
            _ => match inst.op {
                Op::S_SENDMSG | Op::S_SENDMSGHALT => Kind::Scalar,
                Op::S_WAITCNT => Kind::Wait,
                _ => Kind::None,
            },
        }
    }

    /// Whether those of the kind complete as they are issued.
    pub fn ordered(self) -> bool {
        matches!(self, Kind::Vector | Kind::Lds)
    }

    /// The counters that it is in, a bit each.
    pub fn counters(self) -> u8 {
        match self {
            Kind::None | Kind::Wait => 0,
            Kind::Vector => 1,
            Kind::Lds | Kind::Scalar => 2,
            Kind::Flat => 3,
        }
    }
}

/// What an instruction does to registers. Registers that are partly kept (`d16` loads, SDWA `PRESERVE`, lanes that
/// EXEC disables aside) are read as well as written.
#[derive(Clone, Copy, Default)]
pub(crate) struct Effects {
    pub reads: RegSet,
    pub writes: RegSet,
    /// The registers depend on M0 or MODE: [`Effects::now`] tells them.
    pub relative: bool,
    /// How it takes part in the counters of memory operations.
    pub kind: Kind,
    /// What it is in the rules of hazards.
    pub traits: Traits,
}

fn writes_scc(op: Op) -> bool {
    use Op::*;
    let name = op.info().name;
    match op.info().encoding {
        Encoding::Sopc => !matches!(op, S_SETVSKIP | S_SET_GPR_IDX_ON),
        Encoding::Sopk => name.starts_with("S_CMPK") || op == S_ADDK_I32,
        Encoding::Sop2 => {
            let keeps = ["S_CSELECT", "S_BFM", "S_MUL", "S_PACK", "S_CBRANCH", "S_RFE"];
            !keeps.iter().any(|prefix| name.starts_with(prefix))
        }
        Encoding::Sop1 => {
            let sets = ["S_NOT", "S_WQM", "S_BCNT", "S_QUADMASK", "S_ABS_"];
            name.ends_with("EXEC_B64") || sets.iter().any(|prefix| name.starts_with(prefix))
        }
        _ => false,
    }
}

fn reads_scc(op: Op) -> bool {
    use Op::*;
    matches!(
        op,
        S_ADDC_U32
            | S_SUBB_U32
            | S_CSELECT_B32
            | S_CSELECT_B64
            | S_CMOV_B32
            | S_CMOV_B64
            | S_CMOVK_I32
            | S_CBRANCH_SCC0
            | S_CBRANCH_SCC1
    )
}

/// Instructions whose old destination counts.
fn reads_destination(inst: &Inst) -> bool {
    use Op::*;
    let info = inst.op.info();
    let name = info.name;
    inst.op.accumulates()
        || matches!(
            inst.op,
            S_CMOV_B32
                | S_CMOV_B64
                | S_CMOVK_I32
                | S_ADDK_I32
                | S_MULK_I32
                | S_BITSET0_B32
                | S_BITSET0_B64
                | S_BITSET1_B32
                | S_BITSET1_B64
                | V_SWAP_B32
                | V_PERMLANE16_SWAP_B32
                | V_PERMLANE32_SWAP_B32
                | V_WRITELANE_B32
                | V_FMA_MIXLO_F16
                | V_FMA_MIXHI_F16
        )
        || name.starts_with("V_SMFMAC")
        // One half, or one byte or word of the destination is written.
        || name.ends_with("_D16")
        || name.contains("_D16_HI")
        || name.ends_with("_D16_X")
        || name.ends_with("_D16_XYZ")
        || inst.sdwa.is_some_and(|s| s.dst_sel != 6 && s.dst_unused == 2)
        || inst.dpp.is_some()
        || inst.encoding == Encoding::Vop3 && info.op_sel_order().contains('3')
}

impl Effects {
    pub const NONE: Effects = Effects {
        reads: RegSet::EMPTY,
        writes: RegSet::EMPTY,
        relative: false,
        kind: Kind::None,
        traits: Traits::NONE,
    };

    /// The same by slots, for a kernel whose AGPRs begin at slot `first`: those of hand-written kernels may be VGPRs
    /// too.
    pub fn with_agprs_at(self, first: Reg) -> Effects {
        if first == 256 {
            return self;
        }
        Effects { reads: self.reads.with_agprs_at(first), writes: self.writes.with_agprs_at(first), ..self }
    }

    /// Whether the registers depend on the wave's state: [`Effects::now`] tells them.
    #[inline]
    pub fn moves(&self, w: &Wave) -> bool {
        self.relative || w.mode & mode::GPR_IDX != 0
    }

    /// Of an instruction whose registers depend on M0 or MODE, before it runs.
    pub fn now(inst: &Inst, w: &Wave) -> Effects {
        let mut inst = *inst;
        let name = inst.op.info().name;
        if name.contains("MOVREL") {
            let operand = if name.contains("MOVRELS") { &mut inst.src[0] } else { &mut inst.dst };
            if let Operand::Sgpr(code) = operand {
                // Past the last register the instruction faults.
                *code = (usize::from(*code) + (w.s[M0] as usize & 127)).min(EXEC) as u8;
            }
        }
        let vector = matches!(
            inst.encoding,
            Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc | Encoding::Vop3 | Encoding::Vop3p
        );
        if vector && w.mode & mode::GPR_IDX != 0 {
            let [a, b, c, _] = &mut inst.src;
            for (n, operand) in [a, b, c, &mut inst.dst].into_iter().enumerate() {
                if let Operand::Vgpr(first) | Operand::Agpr(first) = operand
                    && w.s[M0] >> (12 + n) & 1 != 0
                {
                    *first = first.saturating_add(w.s[M0] as u8);
                }
            }
        }
        let mut effects = Effects::of(&inst);
        if vector && w.mode & mode::GPR_IDX != 0 {
            effects.reads.insert(SGPR + M0 as Reg, 1);
        }
        // The stack of forks: what a fork does not need keeps its value.
        let depth = (w.mode >> mode::FORKS) as Reg;
        let (exec, entry) = (SGPR + EXEC as Reg, SGPR + 4 * depth);
        match inst.op {
            Op::S_CBRANCH_G_FORK | Op::S_CBRANCH_I_FORK => {
                for set in [&mut effects.reads, &mut effects.writes] {
                    set.insert(exec, 2);
                    set.insert(entry, 4);
                }
            }
            Op::S_CBRANCH_JOIN if depth != 0 => {
                effects.reads.insert(exec, 2);
                effects.reads.insert(entry - 4, 4);
                effects.writes.insert(exec, 2);
            }
            _ => {}
        }
        effects
    }

    /// Of one instruction, as encoded: what `s_movrel` and `s_set_gpr_idx` add is not in it.
    pub fn of(inst: &Inst) -> Effects {
        use Op::*;
        let (mut reads, mut writes) = (RegSet::default(), RegSet::default());
        let op = inst.op;
        for (i, operand) in inst.src.iter().enumerate() {
            match operand {
                Operand::Special(251) => reads.insert(SGPR + VCC as Reg, 2),
                Operand::Special(252) => reads.insert(SGPR + EXEC as Reg, 2),
                Operand::Special(253) => reads.insert(SCC, 1),
                Operand::Special(254) => reads.insert(SGPR + M0 as Reg, 1),
                operand => {
                    if let Some(first) = reg(*operand) {
                        reads.insert(first, source_width(inst, i));
                    }
                }
            }
        }
        if let Some(scale) = &inst.scale {
            for first in scale.src.iter().filter_map(|src| reg(*src)) {
                reads.insert(first, 1);
            }
        }
        if let Some(first) = reg(inst.dst) {
            writes.insert(first, destination_width(inst).max(1));
            if reads_destination(inst) {
                reads.insert(first, destination_width(inst).max(1));
            }
        }
        if let Some(first) = reg(inst.sdst) {
            writes.insert(first, 2);
        }
        if matches!(op, V_SWAP_B32 | V_PERMLANE16_SWAP_B32 | V_PERMLANE32_SWAP_B32)
            && let Some(first) = reg(inst.src[0])
        {
            writes.insert(first, 1);
        }
        let name = op.info().name;
        let exec = SGPR + EXEC as Reg;
        if inst.is_vector() && !op.is_mfma() && !matches!(op, V_READLANE_B32 | V_WRITELANE_B32) {
            reads.insert(exec, 2);
        }
        if name.starts_with("V_CMPX") {
            writes.insert(exec, 2);
        }
        if name.ends_with("EXEC_B64") {
            reads.insert(exec, 2);
            writes.insert(exec, 2);
        }
        match op {
            S_CBRANCH_VCCZ | S_CBRANCH_VCCNZ | V_DIV_FMAS_F32 | V_DIV_FMAS_F64 => {
                reads.insert(SGPR + VCC as Reg, 2);
            }
            S_CBRANCH_EXECZ | S_CBRANCH_EXECNZ => reads.insert(exec, 2),
            S_MOVRELS_B32 | S_MOVRELS_B64 | S_MOVRELD_B32 | S_MOVRELD_B64 | S_SENDMSG | S_SENDMSGHALT => {
                reads.insert(SGPR + M0 as Reg, 1);
            }
            S_SET_GPR_IDX_ON | S_SET_GPR_IDX_IDX | S_SET_GPR_IDX_MODE => {
                reads.insert(SGPR + M0 as Reg, 1);
                writes.insert(SGPR + M0 as Reg, 1);
            }
            DS_APPEND | DS_CONSUME | DS_READ_ADDTID_B32 | DS_WRITE_ADDTID_B32 => {
                reads.insert(SGPR + M0 as Reg, 1);
            }
            _ => {}
        }
        if inst.flags.lds || name.contains("_LOAD_LDS_") || name.starts_with("DS_GWS") {
            reads.insert(SGPR + M0 as Reg, 1);
        }
        if reads_scc(op) {
            reads.insert(SCC, 1);
        }
        if writes_scc(op) {
            writes.insert(SCC, 1);
        }
        let forks = name.ends_with("_FORK") || op == S_CBRANCH_JOIN;
        let relative = forks || name.contains("MOVREL");
        let traits = Traits::of(inst, &writes);
        Effects { reads, writes, relative, kind: Kind::of(inst), traits }
    }
}
