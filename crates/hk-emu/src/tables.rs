//! What instructions need besides their [`Uop`](crate::program::Uop): operand fix-ups, matrix shapes, scaled conversions.

use std::fmt;
use std::str::FromStr;

use crate::exec::narrow::Narrow;

/// How matrix instructions round sums of products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MatrixNumerics {
    /// A fused multiply-add for each k in ascending order, to nearest even.
    #[default]
    Fma,
    /// The published model of gfx942, bit by bit: groups of products truncated at a common exponent. Slow.
    ///
    /// The same rules serve the instructions of gfx950 and sparse ones, of which no model is published (unverified).
    Cdna3Exact,
}

impl MatrixNumerics {
    const ALL: [MatrixNumerics; 2] = [MatrixNumerics::Fma, MatrixNumerics::Cdna3Exact];
}

impl fmt::Display for MatrixNumerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MatrixNumerics::Fma => "fma",
            MatrixNumerics::Cdna3Exact => "cdna3-exact",
        })
    }
}

/// A name that is no [`MatrixNumerics`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("matrix numerics are `fma` or `cdna3-exact`")]
pub struct UnknownNumerics;

impl FromStr for MatrixNumerics {
    type Err = UnknownNumerics;

    fn from_str(name: &str) -> Result<Self, UnknownNumerics> {
        Self::ALL.into_iter().find(|n| n.to_string() == name).ok_or(UnknownNumerics)
    }
}

/// A step before the handler.
#[derive(Clone, Debug)]
pub(crate) enum Prep {
    /// A scalar operand in every lane.
    Splat { code: u16, to: u16 },
    /// `(x & and) ^ xor`: absolute value and negation.
    Bits { from: u16, to: u16, and: u32, xor: u32 },
    /// The high half moved down.
    High { from: u16, to: u16 },
    /// Packed halves: which half goes low, which high, then negation.
    Halves { from: u16, to: u16, low_is_high: bool, high_is_high: bool, xor: u32 },
    /// One byte or word, extended.
    Sub { from: u16, to: u16, sel: u8, sext: bool },
    /// Lanes moved by the program's DPP table.
    Dpp { from: u16, to: u16 },
}

/// A step after the handler: the final register from the temporary.
#[derive(Clone, Debug)]
pub(crate) enum Post {
    /// Output modifier and clamp of a float of `bits` bits (16 packed where `packed`).
    Float {
        temp: u16,
        bits: u8,
        packed: bool,
        omod: u8,
        clamp: bool,
    },
    /// Move to the register: whole, a half of it, or an SDWA part.
    Move {
        temp: u16,
        to: u16,
    },
    /// Low half of the temporary to one half of the register; the other keeps its value.
    Half {
        temp: u16,
        to: u16,
        high: bool,
    },
    Sdwa {
        temp: u16,
        to: u16,
        sel: u8,
        unused: u8,
    },
}

/// What runs around a handler.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fixup {
    pub preps: Vec<Prep>,
    pub posts: Vec<Post>,
    pub dpp: Option<DppTable>,
}

impl Fixup {
    /// One or two scalar registers and their slots, and how many, if they are all.
    pub fn splats(&self) -> Option<([[u16; 2]; 2], usize)> {
        if !self.posts.is_empty() || self.dpp.is_some() || !matches!(self.preps.len(), 1 | 2) {
            return None;
        }
        let mut splats = [[0; 2]; 2];
        for (splat, prep) in splats.iter_mut().zip(&self.preps) {
            match *prep {
                Prep::Splat { code: code @ 0..128, to } => *splat = [code, to],
                _ => return None,
            }
        }
        Some((splats, self.preps.len()))
    }
}

/// A DPP control, resolved to lanes.
#[derive(Clone, Debug)]
pub(crate) struct DppTable {
    pub source: [u8; 64],
    /// Lanes whose source exists.
    pub exists: u64,
    /// Lanes that row_mask and bank_mask let through.
    pub gate: u64,
    pub bound_ctrl: bool,
}

/// The type of the elements of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F64,
    F32,
    /// f32 cut to 10 bits of fraction.
    Xf32,
    I8,
    Float(Narrow),
}

/// One operand of an instruction in registers: `width` rows or columns of all blocks, `k` elements each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    pub element: Element,
    pub width: usize,
    pub k: usize,
    pub per_lane: usize,
    /// The k of each element of each group of lanes.
    pub places: [[u8; 32]; 4],
}

/// A matrix instruction: D (dim x dim) = C + A (dim x k) B (k x dim), in independent blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub dim: usize,
    pub blocks: usize,
    pub a: Packed,
    pub b: Packed,
    pub numerics: MatrixNumerics,
    /// A holds two of each four elements of k; which, says this part of the index register.
    pub sparse: Option<Index>,
    /// Lanes of A that are broadcast: how many, and from which on.
    pub broadcast: Option<(usize, usize)>,
    /// `blgp`: a permutation of the lanes of B, or the signs of f64 operands.
    pub pattern: u8,
    pub constant_c: bool,
    /// Slot and byte of the E8M0 scales of A and B.
    pub scale: Option<[(u16, u8); 2]>,
}

/// Bits of the index register: where those of a lane's first element are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Index {
    pub shift: usize,
}

/// A format that scaled conversions read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    Narrow(Narrow),
}

/// A scaled conversion, from its name `v_cvt_scalef32_[sr_][pk_|pk32_|2xpk16_]to_from`.
///
/// The scale is the exponent field of an f32. Narrowing divides by it and rounds once, widening multiplies by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scaled {
    pub to: Format,
    pub from: Format,
    /// Elements: 1, 2 or 32.
    pub count: u32,
    /// Two vectors of 16 whose elements alternate in the result.
    pub interleaved: bool,
    pub stochastic: bool,
    pub op_sel: u32,
    /// Sources whose sign is changed or dropped.
    pub neg: u8,
    pub abs: u8,
}
