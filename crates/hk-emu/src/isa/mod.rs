//! The instruction set: opcode table, decoder, disassembler.
//!
//! One table ([`Op`], from `table.rs`) drives all three. It is derived from LLVM and compared with it by a test.

mod coverage;
mod decode;
mod disasm;
mod fidelity;
mod inst;

pub use coverage::{decodes, instance};
pub use decode::{DecodeError, decode};
pub use disasm::{Display, display};
pub use fidelity::{Fidelity, group};
pub(crate) use inst::narrow_bytes;
pub use inst::{Dpp, Flags, Inst, MfmaScale, Operand, Sdwa};

use hk_codeobj::Arch;

/// Instruction encodings. `Vop3b` instructions are `Vop3` ones whose `sdst` field is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the manual's names
pub enum Encoding {
    Sop1,
    Sop2,
    Sopk,
    Sopc,
    Sopp,
    Smem,
    Vop1,
    Vop2,
    Vopc,
    Vop3,
    Vop3p,
    Ds,
    Flat,
    Global,
    Scratch,
    Mubuf,
    Mtbuf,
}

/// What the table says of one opcode.
#[derive(Debug)]
pub struct OpInfo {
    /// LLVM's name in capitals, without `_e32`, `_e64`, `_dpp`, `_sdwa`.
    pub name: &'static str,
    /// The encoding in which the opcode is native; VOP1, VOP2 and VOPC are also promoted to VOP3.
    pub encoding: Encoding,
    /// The opcode's number in that encoding.
    pub opcode: u16,
    targets: u8,
    /// Width in registers of the destination field; 0 where unused.
    pub dst: u8,
    /// Widths in registers of the source fields; 0 where unused or an immediate.
    pub src: [u8; 3],
    kinds: &'static str,
    op_sel: &'static str,
    neg: u8,
}

/// How LLVM prints a constant source, which follows its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConstantKind {
    /// 32 bits of any type; 64 bits that are not a float's.
    B32,
    /// 16-bit float: a literal's low half counts.
    F16,
    /// bf16.
    Bf16,
    /// 16-bit integer: inline floats are f16 bit patterns.
    I16,
    /// Two 16-bit floats.
    Packed,
    /// 32-bit integer: inline floats are f32 bit patterns.
    I32,
    /// 64-bit float: a literal is its high half.
    F64,
}

impl OpInfo {
    /// How a constant in source `i` of a vector ALU instruction reads.
    pub fn constant_kind(&self, i: usize) -> ConstantKind {
        match self.kinds.as_bytes().get(i) {
            Some(b'h') => ConstantKind::F16,
            Some(b's') => ConstantKind::I16,
            Some(b'b') => ConstantKind::Bf16,
            Some(b'p') => ConstantKind::Packed,
            Some(b'i') => ConstantKind::I32,
            Some(b'd') => ConstantKind::F64,
            _ => ConstantKind::B32,
        }
    }

    /// The `op_sel` bits of the VOP3 or VOP3P form in the order of their text; empty where there is no such modifier.
    pub fn op_sel_order(&self) -> &'static str {
        self.op_sel
    }

    /// The `op_sel` bits that the VOP3 form looks at.
    pub fn op_sel_mask(&self) -> u8 {
        self.op_sel.bytes().filter(u8::is_ascii_digit).map(|b| 1 << (b - b'0')).sum()
    }

    /// Sources that take negation and absolute value.
    pub fn negatable(&self) -> u8 {
        self.neg
    }

    /// Whether `arch` has the instruction.
    pub fn exists_on(&self, arch: Arch) -> bool {
        self.targets & target_bit(arch) != 0
    }
}

const fn target_bit(arch: Arch) -> u8 {
    match arch {
        Arch::Gfx942 => GFX942,
        Arch::Gfx950 => GFX950,
        _ => 0,
    }
}

const GFX942: u8 = 1;
const GFX950: u8 = 2;
const BOTH: u8 = GFX942 | GFX950;

macro_rules! isa_table {
    ($($encoding:ident $opcode:literal $name:ident $targets:ident [$d:literal, $a:literal, $b:literal, $c:literal]
        $kinds:literal $op_sel:literal $neg:literal;)*) => {
        /// Every compute instruction of gfx942 and gfx950, by LLVM's name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types, missing_docs)] // the ISA's own names
        #[repr(u16)]
        pub enum Op { $($name),* }

        static OPS: &[OpInfo] = &[$(OpInfo {
            name: stringify!($name),
            encoding: Encoding::$encoding,
            opcode: $opcode,
            targets: $targets,
            dst: $d,
            src: [$a, $b, $c],
            kinds: $kinds,
            op_sel: $op_sel,
            neg: $neg,
        }),*];

        /// Every instruction, in table order.
        pub const ALL_OPS: &[Op] = &[$(Op::$name),*];
    };
}

include!("table.rs");

impl Op {
    /// The table row.
    pub fn info(self) -> &'static OpInfo {
        &OPS[self as usize]
    }

    /// LLVM's mnemonic in lower case, without encoding suffix.
    pub fn mnemonic(self) -> String {
        self.info().name.to_ascii_lowercase()
    }

    /// `v_cmp_*`: writes a lane mask.
    pub fn is_cmp(self) -> bool {
        self.info().encoding == Encoding::Vopc
    }

    /// The third operand is a lane mask: carry in, or the selector of `v_cndmask_b32`.
    pub fn reads_mask(self) -> bool {
        use Op::*;
        matches!(self, V_CNDMASK_B32 | V_ADDC_CO_U32 | V_SUBB_CO_U32 | V_SUBBREV_CO_U32)
    }

    /// Also writes a lane mask (carry out, or the scale flag of `v_div_scale`).
    pub fn writes_mask(self) -> bool {
        use Op::*;
        matches!(
            self,
            V_ADD_CO_U32
                | V_SUB_CO_U32
                | V_SUBREV_CO_U32
                | V_ADDC_CO_U32
                | V_SUBB_CO_U32
                | V_SUBBREV_CO_U32
                | V_DIV_SCALE_F32
                | V_DIV_SCALE_F64
                | V_MAD_U64_U32
                | V_MAD_I64_I32
        )
    }

    /// The destination is an addend too.
    pub fn accumulates(self) -> bool {
        use Op::*;
        matches!(
            self,
            V_FMAC_F32
                | V_FMAC_F64
                | V_MAC_F16
                | V_PK_FMAC_F16
                | V_DOT2C_F32_F16
                | V_DOT2C_F32_BF16
                | V_DOT2C_I32_I16
                | V_DOT4C_I32_I8
                | V_DOT8C_I32_I4
                | V_CVT_PKACCUM_U8_F32
        )
    }

    /// An LDS instruction with two offsets of 8 bits, in elements.
    pub fn has_two_offsets(self) -> bool {
        let name = self.info().name;
        ["DS_READ2", "DS_WRITE2", "DS_WRXCHG2"].iter().any(|prefix| name.starts_with(prefix))
    }

    /// A matrix instruction: MFMA or SMFMAC.
    pub fn is_mfma(self) -> bool {
        let name = self.info().name;
        name.starts_with("V_MFMA") || name.starts_with("V_SMFMAC")
    }

    /// Carries a 32-bit literal as part of its operands (`v_fmamk`, `v_fmaak` and their f16 forms).
    pub(crate) fn has_inner_literal(self) -> bool {
        use Op::*;
        matches!(self, V_FMAMK_F32 | V_FMAAK_F32 | V_MADMK_F16 | V_MADAK_F16)
    }
}
