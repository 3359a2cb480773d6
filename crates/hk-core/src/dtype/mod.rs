//! Element types: what a tensor can hold, and the exact host conversions of the narrow ones.

mod float;
mod fp8;
mod mx;

pub use float::Float;
pub use fp8::{Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Fp8E5M2Fnuz};
pub use half::{bf16, f16};
pub use mx::{E8M0, Fp4, Fp4Rounding, Fp4x2};

use crate::Arch;
use std::fmt;
use std::str::FromStr;

/// The element type of a tensor, as a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of an IEEE binary32.
    Bf16,
    /// 8-bit signed integer.
    I8,
    /// 16-bit signed integer.
    I16,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// 8-bit unsigned integer.
    U8,
    /// 32-bit unsigned integer.
    U32,
    /// fp8 e4m3 without infinities and negative zero: gfx942's ([`Fp8E4M3Fnuz`]).
    Fp8E4M3Fnuz,
    /// fp8 e5m2 without infinities and negative zero: gfx942's ([`Fp8E5M2Fnuz`]).
    Fp8E5M2Fnuz,
    /// fp8 e4m3 of the OCP: gfx950's ([`Fp8E4M3`]).
    Fp8E4M3,
    /// fp8 e5m2 of the OCP: gfx950's ([`Fp8E5M2`]).
    Fp8E5M2,
    /// Two fp4 e2m1 in a byte ([`Fp4x2`]); shapes count bytes.
    Fp4x2,
    /// A power of two in a byte, the scale of an MX block ([`E8M0`]).
    E8M0,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 15] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U32,
        Self::Fp8E4M3Fnuz,
        Self::Fp8E5M2Fnuz,
        Self::Fp8E4M3,
        Self::Fp8E5M2,
        Self::Fp4x2,
        Self::E8M0,
    ];

    /// Size of one element in bytes ([`DType::Fp4x2`]: 1, of the pair).
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::I8
            | Self::U8
            | Self::Fp8E4M3Fnuz
            | Self::Fp8E5M2Fnuz
            | Self::Fp8E4M3
            | Self::Fp8E5M2
            | Self::Fp4x2
            | Self::E8M0 => 1,
        }
    }

    /// The fp8 e4m3 of a target's matrix instructions.
    pub const fn fp8_of(arch: Arch) -> Self {
        match arch {
            Arch::Gfx942 => Self::Fp8E4M3Fnuz,
            Arch::Gfx950 | Arch::Sm90 | Arch::Sm90a => Self::Fp8E4M3,
        }
    }

    /// Whether this is an fp8 e4m3 that the matrix instructions of a target do not take.
    pub fn is_fp8_of_another(self, arch: Arch) -> bool {
        matches!(self, Self::Fp8E4M3 | Self::Fp8E4M3Fnuz) && self != Self::fp8_of(arch)
    }

    /// Name in lower case, as in messages and in the names of kernels: `bf16`, `fp8e4m3fnuz`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U32 => "u32",
            Self::Fp8E4M3Fnuz => "fp8e4m3fnuz",
            Self::Fp8E5M2Fnuz => "fp8e5m2fnuz",
            Self::Fp8E4M3 => "fp8e4m3",
            Self::Fp8E5M2 => "fp8e5m2",
            Self::Fp4x2 => "fp4e2m1x2",
            Self::E8M0 => "e8m0",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = crate::Error;

    /// Parses what [`DType::name`] gives.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] for any other text.
    fn from_str(s: &str) -> crate::Result<Self> {
        Self::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|d| d.name()).collect();
            crate::Error::argument("DType", "name", format!("`{s}`"), format!("one of {}", names.join(", ")))
        })
    }
}

/// Types that can be the elements of a buffer or a tensor.
///
/// Sealed: the types of [`DType`], one each.
pub trait Element: bytemuck::Pod + Send + Sync + fmt::Debug + PartialEq + sealed::Sealed {
    /// This type as a value.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($t:ty = $d:ident),* $(,)?) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}

elements! {
    f32 = F32, f16 = F16, bf16 = Bf16,
    i8 = I8, i16 = I16, i32 = I32, i64 = I64, u8 = U8, u32 = U32,
    Fp8E4M3Fnuz = Fp8E4M3Fnuz, Fp8E5M2Fnuz = Fp8E5M2Fnuz, Fp8E4M3 = Fp8E4M3, Fp8E5M2 = Fp8E5M2,
    Fp4x2 = Fp4x2, E8M0 = E8M0,
}
