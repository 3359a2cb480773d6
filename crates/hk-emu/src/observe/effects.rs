//! Which registers an instruction reads and writes: facts of its encoding, whatever the registers hold.

use super::hazards::Traits;
use super::waits::Kind;
use crate::isa::{Encoding, Inst, Op, Operand};
use crate::wave::{EXEC, M0, VCC, Wave, mode};

/// A register of a wave as a number: VGPRs from 0, AGPRs from 256, scalar registers by code from 512, then SCC.
pub(crate) type Reg = u16;

/// The first scalar register.
pub(crate) const SGPR: Reg = 512;
pub(crate) const SCC: Reg = SGPR + 128;
const WORDS: usize = (SCC as usize + 64) / 64;

/// The name of a register in assembly.
pub(crate) fn name(reg: Reg) -> String {
    match reg {
        0..256 => format!("v{reg}"),
        256..SGPR => format!("a{}", reg - 256),
        SCC => "scc".to_owned(),
        _ => match usize::from(reg - SGPR) {
            code @ 0..=101 => format!("s{code}"),
            102 | 103 => "flat_scratch".to_owned(),
            104 | 105 => "xnack_mask".to_owned(),
            VCC | 107 => "vcc".to_owned(),
            M0 => "m0".to_owned(),
            EXEC | 127 => "exec".to_owned(),
            code => format!("ttmp{}", code - 108),
        },
    }
}

/// A set of registers.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RegSet([u64; WORDS]);

impl RegSet {
    pub const EMPTY: RegSet = RegSet([0; WORDS]);

    pub fn insert(&mut self, first: Reg, count: usize) {
        for reg in usize::from(first)..(usize::from(first) + count).min(64 * WORDS) {
            self.0[reg / 64] |= 1 << (reg % 64);
        }
    }

    pub fn contains(&self, reg: Reg) -> bool {
        self.0[usize::from(reg) / 64] >> (reg % 64) & 1 != 0
    }

    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    /// The set with AGPRs from `first` on.
    fn with_agprs_at(&self, first: Reg) -> RegSet {
        let mut set = RegSet::default();
        for reg in self.iter() {
            set.insert(if (256..SGPR).contains(&reg) { reg - 256 + first } else { reg }, 1);
        }
        set
    }

    pub fn union(&self, other: &RegSet) -> RegSet {
        RegSet(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    pub fn intersection(&self, other: &RegSet) -> RegSet {
        RegSet(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }

    pub fn difference(&self, other: &RegSet) -> RegSet {
        RegSet(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    pub fn meets(&self, other: &RegSet) -> bool {
        self.0.iter().zip(other.0).any(|(a, b)| a & b != 0)
    }

    pub fn iter(&self) -> impl Iterator<Item = Reg> + '_ {
        self.0.iter().enumerate().flat_map(|(i, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                (rest != 0).then(|| {
                    let bit = rest.trailing_zeros();
                    rest &= rest - 1;
                    (64 * i) as Reg + bit as Reg
                })
            })
        })
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

/// The first register of an operand.
pub(crate) fn reg(operand: Operand) -> Option<Reg> {
    Some(match operand {
        Operand::Vgpr(n) => n.into(),
        Operand::Agpr(n) => 256 + Reg::from(n),
        Operand::Sgpr(code) => SGPR + Reg::from(code),
        _ => return None,
    })
}

/// Registers that source `i` of an instruction spans.
pub(crate) fn source_width(inst: &Inst, i: usize) -> usize {
    let info = inst.op.info();
    let table = usize::from(info.src.get(i).copied().unwrap_or(0)).max(1);
    match inst.encoding {
        Encoding::Smem if i == 2 => info.dst.into(),
        Encoding::Smem if i == 1 => 1,
        Encoding::Flat | Encoding::Global | Encoding::Scratch => match i {
            0 if inst.src[1] != Operand::None || inst.encoding == Encoding::Scratch => 1,
            0 => 2,
            1 if inst.encoding == Encoding::Scratch => 1,
            1 => 2,
            _ => info.src[1].into(),
        },
        Encoding::Mubuf | Encoding::Mtbuf => match i {
            0 => usize::from(inst.flags.offen) + usize::from(inst.flags.idxen),
            1 => 4,
            2 => 1,
            _ => info.dst.into(),
        },
        Encoding::Vop3p if inst.op.is_mfma() => match i {
            2 if info.name.starts_with("V_SMFMAC") => 1,
            2 => info.dst.into(),
            _ if info.name.ends_with("F8F6F4") => match if i == 0 { inst.cbsz } else { inst.blgp } {
                0 | 1 => 8,
                2 | 3 => 6,
                _ => 4,
            },
            _ => table,
        },
        _ if i == 2 && inst.op.reads_mask() || inst.op == Op::S_CBRANCH_I_FORK => 2,
        _ => table,
    }
}

/// Registers that the destination spans.
pub(crate) fn destination_width(inst: &Inst) -> usize {
    let info = inst.op.info();
    let data = match inst.encoding {
        Encoding::Flat | Encoding::Global | Encoding::Scratch if info.dst == 0 => info.src[1],
        _ => info.dst,
    };
    let swaps = info.name.contains("CMPSWAP");
    if inst.op.is_cmp() { 2 } else { usize::from(data) >> u32::from(swaps) }
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
                if let Operand::Vgpr(first) = operand
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
