//! Registers of a wave by number, and which ones an operand spans.

use crate::isa::{Encoding, Inst, Op, Operand};
use crate::wave::{EXEC, M0, VCC};

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
    pub fn with_agprs_at(&self, first: Reg) -> RegSet {
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
