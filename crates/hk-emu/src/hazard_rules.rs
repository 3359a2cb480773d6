//! Dependencies that the hardware does not check: between the two instructions so many wait states must lie.
//!
//! Every executed instruction is one wait state, `s_nop n` is `n + 1`. [`RULES`] is the whole knowledge: which
//! instruction, which other one after it, what connects them, how many states. A matrix instruction may need more the
//! more passes (of four cycles) it takes.
//!
//! Sources, named in each row: `manual`, the manually inserted wait states and the tables for matrix instructions of
//! AMD's CDNA3 ISA manual (not compared with its text line by line); `llvm`, what LLVM inserts for gfx940 and later, which
//! is the only public source for the columns of gfx950.
//!
//! A matrix instruction waits until the wave's last one has left the unit: that many passes count as states.
//!
//! AMD's hand-written kernels (AITER) suggest that some dependencies need no states after all. Left out, because
//! thousands of places in them do without: VALU writes SGPR or VCC, VALU reads it (LLVM inserts 2 states); SALU writes M0, load
//! to LDS (1). Weaker than LLVM's: `v_permlane` swaps (2), operands of DPP that are not moved (2). Also left out:
//! buffer stores of more than 64 bits whose offset is a scalar register (1 has been reported, compilers insert none),
//! replayed loads with XNACK. Registers of a first instruction are those it encodes, also where M0 moves them.

use crate::isa::{Encoding, Inst, Op, Operand};
use crate::registers::{Reg, RegSet, SGPR, reg, source_width};
use crate::wave::EXEC;

/// What an instruction is in the rules, a bit each.
pub(crate) mod is {
    /// Vector ALU without the matrix instructions.
    pub const VALU: u32 = 1 << 0;
    pub const SALU: u32 = 1 << 1;
    /// Vector memory of every kind, not LDS.
    pub const VMEM: u32 = 1 << 2;
    pub const LDS: u32 = 1 << 3;
    /// Exponential, logarithm, reciprocal, square root, sine.
    pub const TRANS: u32 = 1 << 4;
    /// Vector ALU, matrix instructions too, that is not transcendental.
    pub const NOT_TRANS: u32 = 1 << 5;
    pub const DPP: u32 = 1 << 6;
    /// Writes a part of its destination that is not at its bottom.
    pub const PARTIAL: u32 = 1 << 7;
    pub const DOT: u32 = 1 << 8;
    /// Vector ALU, neither matrix nor dot product.
    pub const PLAIN: u32 = 1 << 9;
    /// Writes a scalar register from the vector ALU.
    pub const WRITES_SCALAR: u32 = 1 << 10;
    /// Takes the number of a lane from a scalar register.
    pub const LANE_SELECT: u32 = 1 << 12;
    /// `v_readlane`, `v_readfirstlane`.
    pub const READLANE: u32 = 1 << 13;
    pub const WRITELANE: u32 = 1 << 14;
    pub const DIV_FMAS: u32 = 1 << 15;
    /// Reads EXECZ or VCCZ as data.
    pub const READS_ZERO: u32 = 1 << 16;
    pub const GETREG: u32 = 1 << 17;
    pub const SETREG: u32 = 1 << 18;
    /// Reads M0 other than as an operand.
    pub const USES_M0: u32 = 1 << 19;
    /// Stores more than 64 bits a lane.
    pub const WIDE_STORE: u32 = 1 << 20;
    /// `v_permlane16_swap`, `v_permlane32_swap`.
    pub const SWAP: u32 = 1 << 21;
    pub const CMPX: u32 = 1 << 22;
    /// `v_fma_f64`, `v_fmac_f64`.
    pub const FMA64: u32 = 1 << 23;
    /// Matrix instructions: f64, f32, all others.
    pub const DGEMM: u32 = 1 << 24;
    pub const SGEMM: u32 = 1 << 25;
    pub const XDL: u32 = 1 << 26;
    pub const MATRIX: u32 = DGEMM | SGEMM | XDL;
    /// Every instruction of the vector ALU.
    pub const VECTOR: u32 = VALU | MATRIX;
    pub const MEMORY: u32 = VMEM | LDS;
}

/// What the rules ask of an instruction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traits {
    pub is: u32,
    /// What an instruction before this one must be for a rule to apply.
    pub after: u32,
    /// Of a matrix instruction: 2, 4, 8, 16.
    pub passes: u8,
    /// Wait states that it is.
    pub states: u8,
    /// States after which no rule looks at it.
    pub longest: u8,
}

impl Traits {
    pub const NONE: Traits = Traits { is: 0, after: 0, passes: 0, states: 1, longest: 0 };

    pub fn of(inst: &Inst, writes: &RegSet) -> Traits {
        use Op::*;
        let (op, name) = (inst.op, inst.op.info().name);
        let scalar = |set: &RegSet| set.iter().any(|r| r >= SGPR && r < SGPR + EXEC as Reg);
        let mut is = 0;
        let mut states = 1;
        let mut passes = 0;
        match inst.encoding {
            Encoding::Sopp if op == S_NOP => states = (inst.imm as u8 & 15) + 1,
            Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopk | Encoding::Sopc | Encoding::Sopp => {
                is |= is::SALU
            }
            Encoding::Smem => {}
            Encoding::Ds => is |= is::LDS,
            Encoding::Flat | Encoding::Global | Encoding::Scratch | Encoding::Mubuf | Encoding::Mtbuf => {
                is |= is::VMEM;
                let free = !matches!(inst.encoding, Encoding::Mubuf | Encoding::Mtbuf)
                    || !matches!(inst.src[2], Operand::Sgpr(_));
                if free && stored(inst).is_some_and(|(_, n)| n > 2) {
                    is |= is::WIDE_STORE;
                }
            }
            _ if op.is_mfma() => {
                is |= if name.ends_with("_F64") {
                    is::DGEMM
                } else if name.ends_with("_F32") && !name.ends_with("_XF32") {
                    is::SGEMM
                } else {
                    is::XDL
                };
                is |= is::NOT_TRANS;
                passes = self::passes(inst);
            }
            _ => {
                is |= is::VALU;
                let trans = ["V_EXP_", "V_LOG_", "V_RCP_", "V_RSQ_", "V_SQRT_", "V_SIN_", "V_COS_"];
                is |= if trans.iter().any(|t| name.starts_with(t)) { is::TRANS } else { is::NOT_TRANS };
                is |= if name.starts_with("V_DOT") { is::DOT } else { is::PLAIN };
                if inst.dpp.is_some() {
                    is |= is::DPP;
                }
                let moved = inst.sdwa.is_some_and(|s| s.dst_sel != 6) && op.info().dst == 1;
                let high = inst.encoding == Encoding::Vop3
                    && op != V_BITOP3_B32
                    && (inst.op_sel & 8 != 0 || name.contains("_SR_") && inst.op_sel & 4 != 0);
                if moved || high || name.starts_with("V_CVT_SCALEF32_SR_PK_FP4") {
                    is |= is::PARTIAL;
                }
                if scalar(writes) || name.starts_with("V_CMPX") {
                    is |= is::WRITES_SCALAR;
                }
                if inst.src.iter().any(|src| matches!(src, Operand::Special(251 | 252))) {
                    is |= is::READS_ZERO;
                }
                match op {
                    V_READLANE_B32 => is |= is::READLANE,
                    V_READFIRSTLANE_B32 => is |= is::READLANE,
                    V_WRITELANE_B32 => is |= is::WRITELANE,
                    V_DIV_FMAS_F32 | V_DIV_FMAS_F64 => is |= is::DIV_FMAS,
                    V_PERMLANE16_SWAP_B32 | V_PERMLANE32_SWAP_B32 => is |= is::SWAP,
                    V_FMA_F64 | V_FMAC_F64 => is |= is::FMA64,
                    _ => {}
                }
                if matches!(op, V_READLANE_B32 | V_WRITELANE_B32) && matches!(inst.src[1], Operand::Sgpr(_)) {
                    is |= is::LANE_SELECT;
                }
                if name.starts_with("V_CMPX") {
                    is |= is::CMPX;
                }
            }
        }
        match op {
            S_GETREG_B32 => is |= is::GETREG,
            S_SETREG_B32 | S_SETREG_IMM32_B32 => is |= is::SETREG,
            S_MOVRELS_B32 | S_MOVRELS_B64 | S_MOVRELD_B32 | S_MOVRELD_B64 | S_SENDMSG | S_SENDMSGHALT
            | DS_READ_ADDTID_B32 | DS_WRITE_ADDTID_B32 => is |= is::USES_M0,
            _ if inst.flags.gds => is |= is::USES_M0,
            _ => {}
        }
        let after =
            RULES.iter().filter(|rule| rule.second & is != 0).fold(0, |after, rule| after | rule.first);
        let longest = RULES
            .iter()
            .filter(|rule| rule.first & is != 0)
            .flat_map(|rule| rule.states.map(|states| states[column(passes)]));
        Traits { is, after, passes, states, longest: longest.max().unwrap_or(0) }
    }
}

/// Where a number of passes stands in [`States`].
pub(crate) fn column(passes: u8) -> usize {
    (passes.max(2).ilog2() - 1) as usize
}

/// Passes of a matrix instruction on the target that has it: LLVM's scheduling model and AMD's matrix calculator.
/// `v_mfma_f64_16x16x4` takes twice as many on gfx950, which its rules know.
fn passes(inst: &Inst) -> u8 {
    let name = inst.op.info().name;
    let eights = name.ends_with("F8F6F4") && (inst.cbsz < 2 || inst.blgp < 2);
    let single = name.ends_with("_F32") && !name.ends_with("_XF32");
    let blocks = ["_2B_", "_4B_"].iter().any(|blocks| name.contains(blocks));
    match () {
        _ if name.starts_with("V_MFMA_F64_16X16") => 8,
        _ if name.starts_with("V_MFMA_F64") => 4,
        _ if name.contains("_4X4X") => 2,
        _ if name.contains("_16X16X") => 4 << u8::from(eights || single || blocks),
        _ => 8 << u8::from(eights || single || blocks),
    }
}

/// The registers of the data that a vector store or atomic takes.
pub(crate) fn stored(inst: &Inst) -> Option<(Reg, usize)> {
    let name = inst.op.info().name;
    if !name.contains("STORE") && !name.contains("ATOMIC") {
        return None;
    }
    let data = if matches!(inst.encoding, Encoding::Mubuf | Encoding::Mtbuf) { 3 } else { 2 };
    Some((reg(inst.src[data])?, source_width(inst, data)))
}

/// The accumulator that a matrix instruction reads.
pub(crate) fn accumulator(inst: &Inst) -> Option<(Reg, usize)> {
    let from = if inst.op.info().name.starts_with("V_SMFMAC") { inst.dst } else { inst.src[2] };
    Some((reg(from)?, inst.op.info().dst.into()))
}

/// What connects two instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Via {
    /// Nothing: the first one being there is enough.
    Nothing,
    /// A vector register that the first writes and the second reads.
    Vector,
    /// ... and the second writes.
    Overwrites,
    /// ... and the second reads or writes.
    Touches,
    /// A scalar register, EXEC aside, that the first writes and the second reads.
    Scalar,
    /// The register that selects a lane.
    Lane,
    /// The register whose lanes the second moves.
    Permuted,
    Exec,
    Vcc,
    /// EXEC or VCC.
    Zero,
    M0,
    /// The same hardware register.
    Hardware,
    /// Stored data of the first that the second overwrites.
    Stored,
    /// The second's accumulator is the first's result, all of it.
    SameAccumulator,
    /// The second's accumulator overlaps the first's result, but is not the same.
    OtherAccumulator,
    /// A, B, indices or scales of the second.
    Multiplicand,
    /// The first's accumulator, which the second overwrites.
    Accumulated,
    /// As `Touches`, the two being different instructions.
    TouchesOther,
    /// As `Vector`, the two being the same instruction, the accumulator aside.
    Chained,
}

/// Wait states: for gfx942 and gfx950, by passes of the first instruction: 2, 4, 8, 16.
pub(crate) type States = [[u8; 4]; 2];

const fn fixed(n: u8) -> States {
    [[n; 4]; 2]
}

const fn by_passes(gfx942: [u8; 4], gfx950: [u8; 4]) -> States {
    [gfx942, gfx950]
}

/// `first` and `second`: one of these bits must be set. `second` follows `first` via `via` after `states`.
pub(crate) struct Rule {
    pub first: u32,
    pub second: u32,
    pub via: Via,
    pub states: States,
    pub what: &'static str,
    pub source: &'static str,
}

const fn rule(
    first: u32,
    second: u32,
    via: Via,
    states: States,
    what: &'static str,
    source: &'static str,
) -> Rule {
    Rule { first, second, via, states, what, source }
}

/// The longest wait, and the longest after anything but a matrix instruction.
pub(crate) const LONGEST: u64 = 20;
pub(crate) const LONGEST_PLAIN: u64 = 5;

#[rustfmt::skip]
pub(crate) static RULES: &[Rule] = &[
    // Scalar registers that the vector ALU writes.
    rule(is::WRITES_SCALAR, is::VMEM, Via::Scalar, fixed(5), "VALU writes SGPR, VMEM reads it", "manual, llvm"),
    rule(is::WRITES_SCALAR, is::LANE_SELECT, Via::Lane, fixed(4), "VALU writes SGPR, lane select", "manual, llvm"),
    rule(is::WRITES_SCALAR, is::DIV_FMAS, Via::Vcc, fixed(4), "VALU writes VCC, v_div_fmas", "manual, llvm"),
    rule(is::WRITES_SCALAR, is::READS_ZERO, Via::Zero, fixed(5), "VALU writes VCC or EXEC, VALU reads VCCZ or EXECZ", "manual"),
    rule(is::WRITES_SCALAR, is::DPP, Via::Exec, fixed(5), "VALU writes EXEC, DPP", "manual, llvm"),
    rule(is::WRITES_SCALAR, is::READLANE | is::WRITELANE, Via::Exec, fixed(4), "VALU writes EXEC, lane access", "manual, llvm"),
    rule(is::WRITES_SCALAR, is::MATRIX, Via::Exec, fixed(4), "VALU writes EXEC, MFMA", "manual, llvm"),
    rule(is::CMPX, is::SWAP, Via::Nothing, fixed(4), "v_cmpx, v_permlane swap", "llvm"),
    // Vector registers that the vector ALU writes.
    rule(is::VECTOR, is::DPP, Via::Permuted, fixed(2), "VALU writes VGPR, DPP reads it", "manual, llvm"),
    rule(is::VECTOR, is::READLANE, Via::Vector, fixed(1), "VALU writes VGPR, v_readlane reads it", "manual, llvm"),
    rule(is::VECTOR, is::SWAP, Via::Vector, fixed(1), "VALU writes VGPR, v_permlane swap", "llvm"),
    rule(is::TRANS, is::NOT_TRANS, Via::Vector, fixed(1), "transcendental result, VALU reads it", "manual, llvm"),
    rule(is::PARTIAL, is::VECTOR, Via::Touches, fixed(1), "VALU writes part of a VGPR, VALU uses it", "manual, llvm"),
    rule(is::DOT, is::VECTOR | is::MEMORY, Via::TouchesOther, fixed(3), "dot product result, another instruction uses it", "llvm"),
    rule(is::DOT, is::DOT, Via::Chained, fixed(3), "dot product result, factor of the next", "llvm"),
    rule(is::WIDE_STORE, is::VECTOR, Via::Stored, fixed(2), "wide store, VALU overwrites its data", "manual, llvm"),
    // Scalar side.
    rule(is::SALU, is::USES_M0, Via::M0, fixed(1), "SALU writes M0, use of M0", "manual, llvm"),
    rule(is::SETREG, is::GETREG | is::SETREG, Via::Hardware, fixed(2), "s_setreg, access to the same register", "manual, llvm"),
    // Matrix instructions after the vector ALU, and after each other.
    rule(is::PLAIN, is::MATRIX, Via::Vector, fixed(2), "VALU writes VGPR, MFMA reads it", "manual, llvm"),
    rule(is::DGEMM, is::FMA64, Via::Nothing, fixed(2), "f64 MFMA, v_fma_f64", "llvm"),
    rule(is::XDL | is::SGEMM, is::MATRIX, Via::SameAccumulator, by_passes([2, 0, 0, 0], [2, 0, 0, 0]), "MFMA result, accumulator of MFMA", "manual, llvm"),
    rule(is::XDL, is::XDL, Via::OtherAccumulator, by_passes([3, 5, 9, 17], [4, 6, 10, 18]), "MFMA result, overlapping accumulator of MFMA", "manual, llvm"),
    rule(is::XDL, is::SGEMM | is::DGEMM, Via::OtherAccumulator, by_passes([3, 5, 9, 17], [3, 6, 10, 18]), "MFMA result, overlapping accumulator of f32 or f64 MFMA", "manual, llvm"),
    rule(is::SGEMM, is::SGEMM | is::DGEMM, Via::OtherAccumulator, by_passes([2, 4, 8, 16], [2, 4, 8, 16]), "f32 MFMA result, overlapping accumulator", "manual, llvm"),
    rule(is::DGEMM, is::SGEMM | is::DGEMM, Via::OtherAccumulator, by_passes([0, 4, 9, 9], [0, 4, 17, 17]), "f64 MFMA result, overlapping accumulator", "manual, llvm"),
    rule(is::XDL, is::MATRIX, Via::Multiplicand, by_passes([5, 7, 11, 19], [5, 8, 12, 20]), "MFMA result, factor of MFMA", "manual, llvm"),
    rule(is::SGEMM, is::MATRIX, Via::Multiplicand, by_passes([4, 6, 10, 18], [4, 6, 10, 18]), "f32 MFMA result, factor of MFMA", "manual, llvm"),
    rule(is::DGEMM, is::MATRIX, Via::Multiplicand, by_passes([0, 6, 11, 11], [0, 6, 19, 19]), "f64 MFMA result, factor of MFMA", "manual, llvm"),
    // Other instructions after matrix instructions.
    rule(is::XDL, is::VALU | is::MEMORY, Via::Vector, by_passes([5, 7, 11, 19], [5, 8, 12, 20]), "MFMA result, read", "manual, llvm"),
    rule(is::SGEMM, is::VALU | is::MEMORY, Via::Vector, by_passes([4, 6, 10, 18], [4, 6, 10, 18]), "f32 MFMA result, read", "manual, llvm"),
    rule(is::DGEMM, is::VALU, Via::Vector, by_passes([0, 6, 11, 11], [0, 6, 19, 19]), "f64 MFMA result, VALU reads it", "manual, llvm"),
    rule(is::DGEMM, is::MEMORY, Via::Vector, by_passes([0, 9, 18, 18], [0, 9, 18, 18]), "f64 MFMA result, memory instruction reads it", "manual, llvm"),
    rule(is::XDL, is::VALU | is::MEMORY, Via::Overwrites, by_passes([5, 7, 11, 19], [5, 8, 12, 20]), "MFMA result, overwritten", "manual, llvm"),
    rule(is::SGEMM, is::VALU | is::MEMORY, Via::Overwrites, by_passes([4, 6, 10, 18], [4, 6, 10, 18]), "f32 MFMA result, overwritten", "manual, llvm"),
    rule(is::DGEMM, is::VALU | is::MEMORY, Via::Overwrites, by_passes([0, 6, 11, 11], [0, 6, 11, 11]), "f64 MFMA result, overwritten", "manual, llvm"),
    rule(is::XDL, is::VALU | is::MEMORY, Via::Accumulated, by_passes([1, 3, 7, 15], [1, 3, 7, 15]), "MFMA accumulator, overwritten", "manual, llvm"),
];
