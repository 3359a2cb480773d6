//! Quantization: quantized types, scales and their layouts. The device's side is `hk/quant.h`.
//!
//! A value `x` is stored as a quantized value `q` of few bits and a scale `s` shared with others, `x ~ q * s`:
//!
//! - linear: `s = amax / qmax` in f32, per tensor, row or group of columns ([`Quantized`], [`linear_scale`]);
//! - MX blocks: `s` is a power of two for 32 elements, a byte ([`BlockScale`], [`BlockRule`]).

use crate::dtype::{E8M0, Element, Fp4, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2};
use bytemuck::{Pod, Zeroable};

mod sealed {
    pub trait Sealed {}
}

/// An element type that linear quantizers write: `i8`, [`Fp8E4M3`], [`Fp8E4M3Fnuz`].
pub trait Quantized: Element + sealed::Sealed {
    /// The type as kernels take it.
    const FORMAT: QuantFormat;

    /// Rounds to nearest even and saturates at `FORMAT.qmax`, infinities too. NaN gives NaN, for `i8` 0.
    fn from_f32(x: f32) -> Self;
    /// The value, exactly.
    fn to_f32(self) -> f32;
}

/// A quantized type of one byte; same values as `hk::QuantType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum QuantType {
    /// -127..=127.
    I8 = 0,
    /// [`Fp8E4M3`].
    Fp8 = 1,
    /// [`Fp8E4M3Fnuz`].
    Fp8Fnuz = 2,
    /// [`Fp8E5M2`].
    Fp8E5M2 = 3,
}

/// The quantized type that a kernel writes, a part of its parameters: `hk::QuantFormat`.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct QuantFormat {
    /// The largest value.
    pub qmax: f32,
    quant_type: u32,
}

crate::params::declared!(QuantFormat { qmax, quant_type });

impl QuantFormat {
    /// The format of a type.
    pub const fn new(quant_type: QuantType) -> Self {
        let qmax = match quant_type {
            QuantType::I8 => 127.0,
            QuantType::Fp8 => 448.0,
            QuantType::Fp8Fnuz => 240.0,
            QuantType::Fp8E5M2 => 57344.0,
        };
        Self { qmax, quant_type: quant_type as u32 }
    }
}

impl sealed::Sealed for i8 {}
impl Quantized for i8 {
    const FORMAT: QuantFormat = QuantFormat::new(QuantType::I8);

    fn from_f32(x: f32) -> Self {
        x.clamp(-127.0, 127.0).round_ties_even() as i8
    }
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

macro_rules! fp8 {
    ($t:ident, $kind:ident) => {
        impl sealed::Sealed for $t {}
        impl Quantized for $t {
            const FORMAT: QuantFormat = QuantFormat::new(QuantType::$kind);

            fn from_f32(x: f32) -> Self {
                Self::from_f32_saturating(x)
            }
            fn to_f32(self) -> f32 {
                $t::to_f32(self)
            }
        }
    };
}
fp8!(Fp8E4M3, Fp8);
fp8!(Fp8E4M3Fnuz, Fp8Fnuz);

/// Runs `$body` with `$t` as the type of a [`Quantized`], or answers that the argument cannot be of another type.
///
/// `with_quantized!("per_token_quant", "q", dtype, Q => per_token_quant::<T, Q>(..))`
#[macro_export]
macro_rules! with_quantized {
    ($op:expr, $arg:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::DType::I8 => {
                type $t = i8;
                $body
            }
            $crate::DType::Fp8E4M3 => {
                type $t = $crate::Fp8E4M3;
                $body
            }
            $crate::DType::Fp8E4M3Fnuz => {
                type $t = $crate::Fp8E4M3Fnuz;
                $body
            }
            other => Err($crate::Error::dtype($op, $arg, other, "i8, fp8e4m3, fp8e4m3fnuz")),
        }
    };
}

/// The scale of a row or a tensor whose largest finite magnitude is `amax`: `amax / qmax`. 1 for zeros; magnitudes below
/// 1e-30 count as 1e-30, so that `1 / s` is finite.
pub fn linear_scale(amax: f32, format: QuantFormat) -> f32 {
    if amax > 0.0 { amax.max(1e-30) / format.qmax } else { 1.0 }
}

/// The scale of a group of columns: magnitudes below 1e-10, zero too, count as 1e-10.
pub fn group_scale(amax: f32, format: QuantFormat) -> f32 {
    amax.max(1e-10) / format.qmax
}

/// How many neighbouring columns share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupSize {
    /// 32.
    G32,
    /// 64.
    G64,
    /// 128: DeepSeek's.
    G128,
}

impl GroupSize {
    /// The number.
    pub const fn columns(self) -> usize {
        match self {
            Self::G32 => 32,
            Self::G64 => 64,
            Self::G128 => 128,
        }
    }
}

/// How the scales of `[rows, groups]` lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleLayout {
    /// A tensor `[rows, groups]` whose rows are contiguous.
    RowMajor,
    /// A tensor `[rows, groups]` whose columns are contiguous: the strides are `[1, n]`.
    ColMajor,
    /// The order in which gfx950's scaled matrix instructions read e8m0 scales: a tensor `[n]` of bytes, see
    /// [`shuffled_len`] and [`shuffled_index`].
    Shuffled950,
}

/// Bytes of the scales of `rows` rows of `groups` blocks in [`ScaleLayout::Shuffled950`]: rows are padded to a multiple of
/// 256, groups of 8. `None` if that overflows.
pub fn shuffled_len(rows: usize, groups: usize) -> Option<usize> {
    rows.checked_next_multiple_of(256)?.checked_mul(groups.checked_next_multiple_of(8)?)
}

/// Where in [`ScaleLayout::Shuffled950`] the scale of a row's group lies.
pub fn shuffled_index(row: usize, group: usize, groups: usize) -> usize {
    let padded = groups.next_multiple_of(8);
    (row / 32) * 32 * padded
        + (group / 8) * 256
        + (group % 4) * 64
        + (row % 16) * 4
        + ((group % 8) / 4) * 2
        + (row % 32) / 16
}

/// How a block's power-of-two scale follows from its largest magnitude `amax = m * 2^e`, `1 <= m < 2`.
///
/// With fp4, whose largest value is 6: the exponent of the scale, and what the largest magnitude becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BlockScale {
    /// `e - 2`, or `e - 1` if `m >= 1.75`: `amax / s` in `[3.5, 7)`, values above 6 clip.
    #[default]
    Even,
    /// The smallest with `6 s >= amax`: `(3, 6]`, nothing clips.
    RoundUp,
    /// `e - 2`, the OCP's own: `[4, 8)`.
    Floor,
    /// `floor(log2(amax / 6))`: `[6, 12)`, clips much.
    DivFloor,
}

/// [`BlockScale`] for one element type as the integers that kernels compute with: `hk::BlockRule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockRule {
    round: u32,
    drop: u32,
    least: u32,
}

crate::params::declared!(BlockRule { round, drop, least });

impl BlockRule {
    /// The rule for elements whose largest value is `max` and which have `mantissa_bits`. Blocks that are not zero have at
    /// least the e8m0 scale `least`.
    pub const fn new(mode: BlockScale, max: f32, mantissa_bits: u32, least: u8) -> Self {
        const MANTISSA: u32 = (1 << 23) - 1;
        let max_exponent = (max.to_bits() >> 23) - 127;
        let max_mantissa = max.to_bits() & MANTISSA;
        let (round, drop) = match mode {
            // Rounds to an element's mantissa and then takes the power of two below.
            BlockScale::Even => (1 << (22 - mantissa_bits), max_exponent),
            BlockScale::RoundUp => (MANTISSA - max_mantissa, max_exponent),
            BlockScale::Floor => (0, max_exponent),
            BlockScale::DivFloor => (MANTISSA + 1 - max_mantissa, max_exponent + 1),
        };
        Self { round, drop, least: least as u32 }
    }

    /// The rule for fp4.
    pub const fn fp4(mode: BlockScale, least: u8) -> Self {
        Self::new(mode, 6.0, 1, least)
    }

    /// The rule for the type of a [`QuantFormat`].
    pub const fn codes(mode: BlockScale, format: QuantFormat, least: u8) -> Self {
        let mantissa_bits = match format.quant_type {
            0 => 6,
            1 | 2 => 3,
            _ => 2,
        };
        Self::new(mode, format.qmax, mantissa_bits, least)
    }

    /// The scale of a block whose largest magnitude is `amax`: NaN if that is not finite, the least scale if it is zero.
    pub const fn scale(self, amax: f32) -> E8M0 {
        let bits = amax.to_bits() & 0x7fff_ffff;
        if bits >= f32::INFINITY.to_bits() {
            return E8M0::NAN;
        }
        let code = ((bits + self.round) >> 23).saturating_sub(self.drop);
        let least = if bits == 0 { 0 } else { self.least };
        E8M0(if code > least { code } else { least } as u8)
    }
}

/// An element of MX blocks: pairs of fp4 ([`Fp4x2`]), [`Fp8E4M3`], [`Fp8E5M2`].
pub trait MxElement: Element + sealed::Sealed {
    /// Values in one element of a tensor.
    const PER_ELEMENT: usize;
    /// Largest value and bits of the mantissa.
    const RANGE: (f32, u32);
    /// The format of a byte; `None` for pairs of fp4.
    const FORMAT: Option<QuantFormat>;
}

impl sealed::Sealed for Fp4x2 {}
impl MxElement for Fp4x2 {
    const PER_ELEMENT: usize = 2;
    const RANGE: (f32, u32) = (Fp4::MAX.to_f32(), 1);
    const FORMAT: Option<QuantFormat> = None;
}

impl MxElement for Fp8E4M3 {
    const PER_ELEMENT: usize = 1;
    const RANGE: (f32, u32) = (448.0, 3);
    const FORMAT: Option<QuantFormat> = Some(QuantFormat::new(QuantType::Fp8));
}

impl sealed::Sealed for Fp8E5M2 {}
impl MxElement for Fp8E5M2 {
    const PER_ELEMENT: usize = 1;
    const RANGE: (f32, u32) = (57344.0, 2);
    const FORMAT: Option<QuantFormat> = Some(QuantFormat::new(QuantType::Fp8E5M2));
}
