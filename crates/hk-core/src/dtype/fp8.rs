//! The four fp8 formats: sign, exponent, mantissa in a byte.

use bytemuck::{Pod, Zeroable};

/// What distinguishes the formats.
struct Format {
    mantissa_bits: u32,
    bias: i32,
    /// Bits of the largest finite value, without the sign.
    max: u8,
    /// Code of a finite value beyond the range, sign removed: infinity where there is one, else NaN.
    overflow: u8,
    /// The NaN that conversions produce.
    nan: u8,
    /// Finite, one NaN (0x80), no negative zero, no infinity.
    fnuz: bool,
}

impl Format {
    const fn encode(&self, x: f32, saturate: bool) -> u8 {
        const F32_MANTISSA: u32 = 23;
        const F32_INFINITY: u32 = 0xff << F32_MANTISSA;
        let sign = ((x.to_bits() >> 24) & 0x80) as u8;
        let magnitude = x.to_bits() & 0x7fff_ffff;
        if magnitude > F32_INFINITY {
            return self.nan;
        }
        let exponent = (magnitude >> F32_MANTISSA) as i32 - 127 + self.bias;
        let code = if exponent > 0 {
            // Rebiased, exponent and mantissa are one integer whose upper bits are the code; the carry of the
            // rounding goes into the exponent as it should.
            let rebiased = ((exponent as u64) << F32_MANTISSA) | (magnitude & 0x7f_ffff) as u64;
            round_shift(rebiased, F32_MANTISSA - self.mantissa_bits)
        } else {
            // Subnormal in the target. f32 subnormals (no implicit one) are far below and give 0 either way.
            let significand = (magnitude & 0x7f_ffff) as u64 | 1 << F32_MANTISSA;
            round_shift(significand, F32_MANTISSA - self.mantissa_bits + (1 - exponent) as u32)
        };
        let code = if code <= self.max as u64 {
            code as u8
        } else if saturate {
            self.max
        } else if self.overflow == 0x80 {
            return self.nan;
        } else {
            self.overflow
        };
        if self.fnuz && code == 0 { 0 } else { sign | code }
    }

    const fn decode(&self, bits: u8) -> f32 {
        let magnitude = bits & 0x7f;
        if (self.fnuz && bits == 0x80) || (!self.fnuz && magnitude > self.max) {
            if self.overflow == magnitude && self.overflow != self.nan {
                return if bits >= 0x80 { f32::NEG_INFINITY } else { f32::INFINITY };
            }
            return f32::NAN;
        }
        let exponent = (magnitude >> self.mantissa_bits) as i32;
        let mantissa = (magnitude & ((1 << self.mantissa_bits) - 1)) as i32;
        let value = if exponent == 0 {
            mantissa as f32 * pow2(1 - self.bias - self.mantissa_bits as i32)
        } else {
            (mantissa + (1 << self.mantissa_bits)) as f32
                * pow2(exponent - self.bias - self.mantissa_bits as i32)
        };
        if bits >= 0x80 { -value } else { value }
    }
}

/// `value / 2^shift`, rounded to nearest even.
const fn round_shift(value: u64, shift: u32) -> u64 {
    if shift > 25 {
        return 0; // below a quarter of the smallest subnormal
    }
    let half = 1 << (shift - 1);
    let odd = (value >> shift) & 1;
    (value + half - 1 + odd) >> shift
}

/// `2^e` for normal `e`.
const fn pow2(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

macro_rules! fp8 {
    ($(#[$doc:meta])* $name:ident, $format:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name(
            /// The bits.
            pub u8,
        );

        impl $name {
            const FORMAT: Format = $format;
            /// The largest finite value.
            pub const MAX: Self = Self(Self::FORMAT.max);
            /// The not-a-number that conversions produce.
            pub const NAN: Self = Self(Self::FORMAT.nan);

            /// Rounds to nearest even. NaN gives [`Self::NAN`]; what rounds beyond the range gives infinity
            /// where the format has one, else [`Self::NAN`].
            pub const fn from_f32(x: f32) -> Self {
                Self(Self::FORMAT.encode(x, false))
            }

            /// Rounds to nearest even and saturates: what lies beyond the range, infinities included, gives
            /// the largest finite value of its sign. NaN stays [`Self::NAN`]. The rule of every quantiser.
            pub const fn from_f32_saturating(x: f32) -> Self {
                Self(Self::FORMAT.encode(x, true))
            }

            /// The value, exactly.
            pub const fn to_f32(self) -> f32 {
                Self::FORMAT.decode(self.0)
            }

            /// True for every NaN.
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{:?} ({:#04x})", self.to_f32(), self.0)
            }
        }
    };
}

fp8!(
    /// fp8 e4m3 "FNUZ": bias 8, largest value 240, smallest subnormal 2^-10, one NaN (0x80), no infinity and no
    /// negative zero. gfx942's own.
    Fp8E4M3Fnuz,
    Format { mantissa_bits: 3, bias: 8, max: 0x7f, overflow: 0x80, nan: 0x80, fnuz: true }
);
fp8!(
    /// fp8 e5m2 "FNUZ": bias 16, largest value 57344, smallest subnormal 2^-17, one NaN (0x80), no infinity and
    /// no negative zero. gfx942's own.
    Fp8E5M2Fnuz,
    Format { mantissa_bits: 2, bias: 16, max: 0x7f, overflow: 0x80, nan: 0x80, fnuz: true }
);
fp8!(
    /// fp8 e4m3 of the OCP ("fn"): bias 7, largest value 448, smallest subnormal 2^-9, NaN 0x7f and 0xff, no
    /// infinity. gfx950's own.
    Fp8E4M3,
    Format { mantissa_bits: 3, bias: 7, max: 0x7e, overflow: 0x80, nan: 0x7f, fnuz: false }
);
fp8!(
    /// fp8 e5m2 of the OCP: bias 15, largest value 57344, smallest subnormal 2^-16, infinities 0x7c and 0xfc,
    /// NaN 0x7d..=0x7f with either sign. gfx950's own.
    Fp8E5M2,
    Format { mantissa_bits: 2, bias: 15, max: 0x7b, overflow: 0x7c, nan: 0x7f, fnuz: false }
);
