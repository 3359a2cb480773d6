//! A decoded instruction.

use super::{Encoding, Op};

/// One operand as encoded, before any register is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// The field is unused.
    None,
    /// Vector register, the first of the operand.
    Vgpr(u8),
    /// Accumulation register, the first of the operand.
    Agpr(u8),
    /// Scalar register by its code 0..=127: s0-s101, 102 flat_scratch, 104 xnack_mask, 106 vcc, 108 ttmp0, 124 m0, 126 exec.
    Sgpr(u8),
    /// Inline constant by its code: 128 is 0, 129..=192 are 1..=64, 193..=208 are -1..=-16, 240..=248 are floats.
    Inline(u8),
    /// 32-bit literal that follows the instruction.
    Literal(u32),
    /// Other scalar source by its code: 235..=238 apertures, 251 vccz, 252 execz, 253 scc, 254 lds_direct.
    Special(u8),
    /// Immediate field of the instruction (SMEM offset), sign-extended.
    Imm(i32),
}

/// Data-parallel-primitive modifier of VOP1, VOP2 and VOPC: src0 comes from another lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dpp {
    /// Nine-bit control: which lane.
    pub ctrl: u16,
    /// Rows of 16 lanes that are written.
    pub row_mask: u8,
    /// Banks of 4 lanes in each row that are written.
    pub bank_mask: u8,
    /// A lane without source reads 0; else it is not written.
    pub bound_ctrl: bool,
}

/// Sub-dword-addressing modifier of VOP1, VOP2 and VOPC. Selectors: 0..=3 byte, 4..=5 word, 6 dword.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sdwa {
    /// Part of the destination that is written.
    pub dst_sel: u8,
    /// Rest of the destination: 0 zero, 1 sign, 2 preserve.
    pub dst_unused: u8,
    /// Part of each source.
    pub src_sel: [u8; 2],
    /// Sign-extend that part.
    pub sext: [bool; 2],
}

/// Scale operands of a scaled MFMA (gfx950), one E8M0 byte per 32 elements of K and row or column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MfmaScale {
    /// Registers that hold the scales of A and B.
    pub src: [Operand; 2],
    /// Byte of each that holds: `op_sel` is bit 0, `op_sel_hi` bit 1.
    pub byte: [u8; 2],
}

/// One-bit fields of memory instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags {
    /// Scope bit 0; of an atomic: returns the old value. `glc` of scalar memory.
    pub sc0: bool,
    /// Scope bit 1.
    pub sc1: bool,
    /// Non-temporal.
    pub nt: bool,
    /// Buffer access: VGPR offset.
    pub offen: bool,
    /// Buffer access: VGPR index.
    pub idxen: bool,
    /// Loads go to LDS (MUBUF); `s_load` etc. never.
    pub lds: bool,
    /// Global data share (DS).
    pub gds: bool,
    /// Scalar memory: bit `nv`.
    pub nv: bool,
    /// Scalar memory: both an SGPR and an immediate offset.
    pub soffset: bool,
    /// Typed buffer access: data format in bits 3:0, number format in bits 6:4.
    pub format: u8,
}

/// A decoded instruction: fields resolved to operands, nothing interpreted yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inst {
    /// Which instruction.
    pub op: Op,
    /// The encoding it came in (`Vop3` for a promoted VOP1, VOP2, VOPC).
    pub encoding: Encoding,
    /// Length in bytes with literal, DPP or SDWA word, scale prefix.
    pub size: u8,
    /// Destination: VALU, SALU, load or returned value; `None` for stores and compares. The mask of a compare.
    pub dst: Operand,
    /// Second destination: carry out (VCC is written out where implied).
    pub sdst: Operand,
    /// Sources.
    /// - SALU, VALU: in order; a mask that is read is `src[2]`, written out where it is VCC.
    /// - SMEM: base, offset (SGPR or `Imm`), stored data.
    /// - DS: address, data0, data1.
    /// - FLAT, GLOBAL, SCRATCH: vector address, scalar address, data.
    /// - MUBUF, MTBUF: vector address, resource, scalar offset, data.
    /// - MFMA: A, B, C. SMFMAC: A, B, index.
    pub src: [Operand; 4],
    /// 16-bit immediate of SOPK and SOPP, zero-extended; byte offset of a memory instruction; `offset0 | offset1 << 8` of DS.
    pub imm: i32,
    /// Negate source i.
    pub neg: u8,
    /// Packed: negate the high half of source i. Else: absolute value of source i.
    pub abs: u8,
    /// Packed: half that feeds the low result. VOP3: half of a 16-bit source, bit 3 the destination.
    pub op_sel: u8,
    /// Packed: half that feeds the high result.
    pub op_sel_hi: u8,
    /// Clamp the result.
    pub clamp: bool,
    /// Output modifier: 1 times 2, 2 times 4, 3 divided by 2.
    pub omod: u8,
    /// DPP word.
    pub dpp: Option<Dpp>,
    /// SDWA word.
    pub sdwa: Option<Sdwa>,
    /// MFMA: A broadcast size or format of A.
    pub cbsz: u8,
    /// MFMA: A broadcast block.
    pub abid: u8,
    /// MFMA: B pattern, negation (f64) or format of B.
    pub blgp: u8,
    /// Scale prefix of a scaled MFMA.
    pub scale: Option<MfmaScale>,
    /// Memory instruction bits.
    pub flags: Flags,
}

impl Inst {
    /// A vector-ALU instruction, matrix instructions among them.
    pub fn is_valu(&self) -> bool {
        use Encoding::*;
        matches!(self.encoding, Vop1 | Vop2 | Vopc | Vop3 | Vop3p)
    }

    /// An instruction that works on lanes: vector ALU, vector memory, LDS.
    pub fn is_vector(&self) -> bool {
        use Encoding::*;
        !matches!(self.encoding, Sop1 | Sop2 | Sopk | Sopc | Sopp | Smem)
    }

    /// An instruction with every field at rest.
    pub(crate) fn new(op: Op, encoding: Encoding, size: u8) -> Inst {
        Inst {
            op,
            encoding,
            size,
            dst: Operand::None,
            sdst: Operand::None,
            src: [Operand::None; 4],
            imm: 0,
            neg: 0,
            abs: 0,
            op_sel: 0,
            op_sel_hi: 0,
            clamp: false,
            omod: 0,
            dpp: None,
            sdwa: None,
            cbsz: 0,
            abid: 0,
            blgp: 0,
            scale: None,
            flags: Flags::default(),
        }
    }
}

/// Bytes of an access narrower than a dword, by its name.
pub(crate) fn narrow_bytes(name: &str) -> Option<u32> {
    if name.contains("_TR_") {
        return None;
    }
    let name = name.trim_end_matches("_HI").trim_end_matches("_D16");
    match name.rsplit('_').next()? {
        "UBYTE" | "SBYTE" | "BYTE" | "U8" | "I8" | "B8" => Some(1),
        "USHORT" | "SSHORT" | "SHORT" | "U16" | "I16" | "B16" => Some(2),
        _ => None,
    }
}

impl Inst {
    /// Bytes of an element of what a memory instruction accesses, a dword at most; `None` if it accesses nothing.
    pub(crate) fn element_bytes(&self) -> Option<u8> {
        let name = self.op.info().name;
        let touches = match self.encoding {
            Encoding::Ds => self.src[0] != Operand::None && self.op != Op::DS_SWIZZLE_B32,
            _ => ["ATOMIC", "_LOAD", "_STORE"].iter().any(|part| name.contains(part)),
        };
        touches.then(|| narrow_bytes(name).map_or(4, |bytes| bytes as u8))
    }
}
