//! The element and scale types of MX block formats: fp4 e2m1 and e8m0.

use bytemuck::{Pod, Zeroable};
use std::fmt;

/// fp4 e2m1, one value in the low four bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign. No NaN, no infinity.
///
/// Not an element type: tensors hold pairs, [`Fp4x2`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Fp4(u8);

/// What a value halfway between two fp4 values rounds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fp4Rounding {
    /// The even one, as gfx950's conversion instructions do: 0.25 -> 0, 0.75 -> 1, 2.5 -> 2, 5 -> 4.
    #[default]
    NearestEven,
    /// The larger magnitude: 0.25 -> 0.5, 0.75 -> 1, 2.5 -> 3, 5 -> 6.
    NearestAway,
}

/// Magnitudes of the bits 0..=7.
const FP4_VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

impl Fp4 {
    /// The largest value, 6.
    pub const MAX: Self = Self(7);

    /// The value of the four low bits of `bits`; the upper four are ignored.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 0xf)
    }

    /// The four bits, 0..=15.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Rounds to nearest and saturates at 6. The sign is kept even for results of zero; NaN gives +0, since the
    /// format has none (a block with a NaN carries it in its scale).
    pub const fn from_f32(x: f32, rounding: Fp4Rounding) -> Self {
        if x.is_nan() {
            return Self(0);
        }
        let sign = ((x.to_bits() >> 28) & 8) as u8;
        let magnitude = f32::from_bits(x.to_bits() & 0x7fff_ffff);
        // Every midpoint between neighbours is exact in f32, so the comparisons decide without rounding.
        let mut code = 0u8;
        while code < 7 {
            let midpoint = (FP4_VALUES[code as usize] + FP4_VALUES[code as usize + 1]) / 2.0;
            let up_on_tie = matches!(rounding, Fp4Rounding::NearestAway) || code % 2 == 1;
            if magnitude < midpoint || (magnitude == midpoint && !up_on_tie) {
                break;
            }
            code += 1;
        }
        Self(sign | code)
    }

    /// The value, exactly.
    pub const fn to_f32(self) -> f32 {
        let v = FP4_VALUES[(self.0 & 7) as usize];
        if self.0 >= 8 { -v } else { v }
    }
}

impl fmt::Debug for Fp4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_f32())
    }
}

/// Two [`Fp4`] in a byte; the element with the even index is in the low half.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct Fp4x2(
    /// Both, the element with the even index in the low half.
    pub u8,
);

impl Fp4x2 {
    /// Packs the elements with the even and the odd index.
    pub const fn new(even: Fp4, odd: Fp4) -> Self {
        Self(even.to_bits() | odd.to_bits() << 4)
    }

    /// The elements, the one with the even index first.
    pub const fn unpack(self) -> [Fp4; 2] {
        [Fp4::from_bits(self.0), Fp4::from_bits(self.0 >> 4)]
    }

    /// Converts two values, the one with the even index first; see [`Fp4::from_f32`].
    pub const fn from_f32(pair: [f32; 2], rounding: Fp4Rounding) -> Self {
        Self::new(Fp4::from_f32(pair[0], rounding), Fp4::from_f32(pair[1], rounding))
    }

    /// Both values, exactly.
    pub const fn to_f32(self) -> [f32; 2] {
        let [even, odd] = self.unpack();
        [even.to_f32(), odd.to_f32()]
    }
}

impl fmt::Debug for Fp4x2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ({:#04x})", self.unpack(), self.0)
    }
}

/// The scale of an MX block: `2^(code - 127)`, code 255 is NaN. No zero, no sign.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct E8M0(
    /// The bits.
    pub u8,
);

impl E8M0 {
    /// The scale 1.
    pub const ONE: Self = Self(127);
    /// Not a number.
    pub const NAN: Self = Self(255);

    /// `2^e`, with `e` clamped to -127..=127.
    pub const fn from_exponent(e: i32) -> Self {
        let e = if e < -127 {
            -127
        } else if e > 127 {
            127
        } else {
            e
        };
        Self((e + 127) as u8)
    }

    /// The exponent of the power of two, `None` for NaN.
    pub const fn exponent(self) -> Option<i32> {
        if self.0 == 255 { None } else { Some(self.0 as i32 - 127) }
    }

    /// The code of a power of two between 2^-127 and 2^127, or of NaN; `None` for any other value.
    pub const fn from_f32_exact(x: f32) -> Option<Self> {
        if x.is_nan() {
            return Some(Self::NAN);
        }
        let bits = x.to_bits();
        if bits == 1 << 22 {
            Some(Self(0)) // 2^-127 is subnormal in f32
        } else if bits & 0x807f_ffff == 0 && bits != 0 && bits < 255 << 23 {
            Some(Self((bits >> 23) as u8))
        } else {
            None
        }
    }

    /// The value, exactly (2^-127 is an f32 subnormal).
    pub const fn to_f32(self) -> f32 {
        match self.0 {
            0 => f32::from_bits(1 << 22),
            255 => f32::NAN,
            code => f32::from_bits((code as u32) << 23),
        }
    }
}

impl fmt::Debug for E8M0 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exponent() {
            Some(e) => write!(f, "2^{e}"),
            None => f.write_str("NaN"),
        }
    }
}
