//! The narrow floating-point formats: the values of their encodings, and rounding to them.

use super::float::NAN32;

/// What the encodings at the top of a format's range mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Top {
    /// Infinity and NaNs, as in IEEE 754.
    Ieee,
    /// All ones is NaN (OCP e4m3).
    OneNan,
    /// All encodings are finite; negative zero is NaN (FNUZ).
    Fnuz,
    /// All encodings are finite (OCP 6-bit and 4-bit formats).
    Finite,
}

/// A floating-point format of at most 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Narrow {
    pub bits: u32,
    /// Bits of the fraction.
    pub fraction: u32,
    pub bias: i32,
    top: Top,
}

/// How the bits below the last place go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To nearest even.
    Nearest,
    /// `random / 2^32` of a last place is added, then the rest is cut.
    Stochastic(u32),
}

impl Narrow {
    pub const F16: Narrow = Narrow { bits: 16, fraction: 10, bias: 15, top: Top::Ieee };
    pub const BF16: Narrow = Narrow { bits: 16, fraction: 7, bias: 127, top: Top::Ieee };
    pub const E4M3_FNUZ: Narrow = Narrow { bits: 8, fraction: 3, bias: 8, top: Top::Fnuz };
    pub const E5M2_FNUZ: Narrow = Narrow { bits: 8, fraction: 2, bias: 16, top: Top::Fnuz };
    pub const E4M3: Narrow = Narrow { bits: 8, fraction: 3, bias: 7, top: Top::OneNan };
    pub const E5M2: Narrow = Narrow { bits: 8, fraction: 2, bias: 15, top: Top::Ieee };
    pub const E2M3: Narrow = Narrow { bits: 6, fraction: 3, bias: 1, top: Top::Finite };
    pub const E3M2: Narrow = Narrow { bits: 6, fraction: 2, bias: 3, top: Top::Finite };
    pub const E2M1: Narrow = Narrow { bits: 4, fraction: 1, bias: 1, top: Top::Finite };

    #[inline(always)]
    const fn sign(self) -> u32 {
        1 << (self.bits - 1)
    }

    /// The code of infinity where there is one, else one past every magnitude.
    #[inline(always)]
    const fn infinity(self) -> u32 {
        match self.top {
            Top::Ieee => self.sign() - (1 << self.fraction),
            _ => self.sign(),
        }
    }

    /// The largest finite code, without sign.
    pub const fn max_code(self) -> u32 {
        match self.top {
            Top::OneNan => self.sign() - 2,
            _ => self.infinity() - 1,
        }
    }

    /// The smallest exponent, that of subnormals too.
    pub const fn emin(self) -> i32 {
        1 - self.bias
    }

    /// The value of the low bits of `code`; what is above them is ignored. NaNs keep their sign and no payload.
    #[inline(always)]
    pub fn decode(self, code: u32) -> f32 {
        let sign = (code & self.sign()) << (32 - self.bits);
        let magnitude = code & (self.sign() - 1);
        let shifted = magnitude << (23 - self.fraction);
        let normal = shifted.wrapping_add(((127 - self.bias) as u32) << 23);
        // A subnormal is what its fraction adds to the smallest normal number: no denormal of the host is touched.
        let least = ((128 - self.bias) as u32) << 23;
        let subnormal = f32::from_bits(shifted.wrapping_add(least)) - f32::from_bits(least);
        let finite = if magnitude >> self.fraction == 0 { subnormal.to_bits() } else { normal };
        let bits = match self.top {
            Top::Ieee if magnitude > self.infinity() => NAN32,
            Top::Ieee if magnitude == self.infinity() => 0x7F80_0000,
            Top::OneNan if magnitude == self.sign() - 1 => NAN32,
            Top::Fnuz if code & (2 * self.sign() - 1) == self.sign() => NAN32,
            _ => finite,
        };
        f32::from_bits(sign | bits)
    }

    /// The code of a number. What is out of range becomes infinity or NaN, whichever the format has, or with `saturate`
    /// and in formats that have neither the largest finite value; there a NaN does too (unverified).
    pub fn encode(self, x: f64, rounding: Rounding, saturate: bool) -> u32 {
        let sign = if x.is_sign_negative() { self.sign() } else { 0 };
        let nan = match (self.top, self.bits) {
            (Top::Ieee, 16) => sign | self.infinity() | 1 << (self.fraction - 1),
            (Top::Ieee | Top::OneNan, _) => sign | (self.sign() - 1),
            (Top::Fnuz, _) => self.sign(),
            (Top::Finite, _) => sign | self.max_code(),
        };
        let overflow = match self.top {
            _ if saturate => sign | self.max_code(),
            Top::Ieee => sign | self.infinity(),
            _ => nan,
        };
        if x.is_nan() {
            return nan;
        }
        if x.is_infinite() {
            return overflow;
        }
        let bits = x.to_bits() & !(1 << 63);
        // Subnormal f64 are far below half of any smallest value; their exponent need not be exact.
        let exponent = (bits >> 52) as i32 - 1023;
        let significand = bits & ((1 << 52) - 1) | u64::from(bits >> 52 != 0) << 52;
        let exponent = exponent.max(-1022);
        let place = exponent.max(self.emin());
        // The value is `significand * 2^(exponent - 52)`, a unit of the last place `2^(place - fraction)`.
        let shift = place - self.fraction as i32 - (exponent - 52);
        let units = match rounding {
            Rounding::Nearest if shift > 62 => 0,
            Rounding::Nearest => {
                let half = (1 << (shift - 1)) - 1 + (significand >> shift & 1);
                (significand + half) >> shift
            }
            Rounding::Stochastic(_) if shift > 95 => 0,
            Rounding::Stochastic(random) => {
                ((u128::from(significand) + (u128::from(random) << shift >> 32)) >> shift) as u64
            }
        };
        // Counted from the smallest subnormal, with the carries of rounding.
        let code = units as u32 + (((place + self.bias - 1) as u32) << self.fraction);
        if code > self.max_code() {
            return overflow;
        }
        if code == 0 && self.top == Top::Fnuz { 0 } else { sign | code }
    }
}

/// The exponent of an E8M0 scale; `None` is NaN. A zero byte is `2^-127`.
pub(crate) fn e8m0(byte: u32) -> Option<i32> {
    let byte = byte & 0xFF;
    (byte != 0xFF).then_some(byte as i32 - 127)
}

/// The next number of the generator that `v_prng_b32` is a step of.
#[inline(always)]
pub(crate) fn prng(x: u32) -> u32 {
    x << 1 ^ if x >> 31 != 0 { 197 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Narrow; 9] = [
        Narrow::F16,
        Narrow::BF16,
        Narrow::E4M3_FNUZ,
        Narrow::E5M2_FNUZ,
        Narrow::E4M3,
        Narrow::E5M2,
        Narrow::E2M3,
        Narrow::E3M2,
        Narrow::E2M1,
    ];

    /// The value of a code by the definition of the format.
    fn value(f: Narrow, code: u32) -> f64 {
        let m = code & ((1 << (f.bits - 1)) - 1);
        let (e, fraction) = ((m >> f.fraction) as i32, f64::from(m & ((1 << f.fraction) - 1)));
        let one = f64::from(1u32 << f.fraction);
        let v = if e == 0 {
            fraction / one * 2f64.powi(1 - f.bias)
        } else {
            (1.0 + fraction / one) * 2f64.powi(e - f.bias)
        };
        if code >> (f.bits - 1) != 0 { -v } else { v }
    }

    /// Every finite value of a format with its code, ascending; one zero.
    fn values(f: Narrow) -> Vec<(f64, u32)> {
        let (max, sign) = (f.max_code(), 1 << (f.bits - 1));
        let negative = (1..=max).rev().map(|c| (value(f, c | sign), c | sign));
        negative.chain((0..=max).map(|c| (value(f, c), c))).collect()
    }

    #[test]
    fn every_code_decodes_by_the_definition() {
        for f in ALL {
            for code in 0..1u32 << f.bits {
                let (m, got) = (code & ((1 << (f.bits - 1)) - 1), f.decode(code));
                let nan = match f.top {
                    Top::Ieee => m > f.infinity(),
                    Top::OneNan => m == 0x7F,
                    Top::Fnuz => code == 0x80,
                    Top::Finite => false,
                };
                if nan {
                    assert!(got.is_nan(), "{f:?} {code:#x}");
                } else if f.top == Top::Ieee && m == f.infinity() {
                    assert_eq!(got, if code == m { f32::INFINITY } else { f32::NEG_INFINITY });
                } else {
                    assert_eq!(f64::from(got).to_bits(), value(f, code).to_bits(), "{f:?} {code:#x}");
                }
                // Bits above the code do not matter.
                if f.bits < 16 {
                    assert_eq!(f.decode(code | 0xDEAD_BEEF << f.bits).to_bits(), got.to_bits());
                }
            }
        }
        assert_eq!(Narrow::E4M3_FNUZ.decode(0x7F), 240.0);
        assert_eq!(Narrow::E5M2_FNUZ.decode(0x7F), 57344.0);
        assert_eq!(Narrow::E4M3.decode(0x7E), 448.0);
        assert_eq!(Narrow::E5M2.decode(0x7B), 57344.0);
        assert_eq!([Narrow::E2M3, Narrow::E3M2].map(|f| f.decode(0x1F)), [7.5, 28.0]);
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6, 7].map(|c| Narrow::E2M1.decode(c)),
            [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        );
    }

    /// The code of the nearest representable value, found by looking at the neighbours of `x` in the list of all.
    fn nearest(f: Narrow, list: &[(f64, u32)], x: f64, saturate: bool) -> u32 {
        let i = list.partition_point(|(v, _)| *v < x);
        let sign = if x < 0.0 || x.is_sign_negative() { 1 << (f.bits - 1) } else { 0 };
        let max = list[list.len() - 1].0;
        // As if the list went on: the next value after the largest is one step further.
        let step = max - list[list.len() - 2].0;
        // Halfway past an odd largest code goes away, past an even one back.
        let limit = max + step / 2.0;
        if x.abs() > limit || x.abs() == limit && f.max_code() & 1 == 1 {
            return match f.top {
                Top::Finite => sign | f.max_code(),
                _ if saturate => sign | f.max_code(),
                Top::Ieee => sign | f.infinity(),
                Top::OneNan => sign | 0x7F,
                Top::Fnuz => 0x80,
            };
        }
        let candidates = [i.saturating_sub(1), i.min(list.len() - 1)].map(|i| list[i]);
        let [p, q] = candidates.map(|(v, _)| (v - x).abs());
        let code =
            if p < q || p == q && candidates[0].1 & 1 == 0 { candidates[0].1 } else { candidates[1].1 };
        // A zero takes the sign of what was rounded, where there are two.
        if code == 0 && f.top != Top::Fnuz { sign } else { code }
    }

    #[test]
    fn encoding_takes_the_nearest_value_around_every_border() {
        for f in ALL.into_iter().filter(|f| f.bits < 16) {
            let list = values(f);
            let mut borders: Vec<f64> =
                list.windows(2).flat_map(|w| [w[0].0, (w[0].0 + w[1].0) / 2.0]).collect();
            let max = list[list.len() - 1].0;
            let step = max - list[list.len() - 2].0;
            borders.extend([max, max + step / 2.0, max + step, 2.0 * max, -max - step / 2.0, -2.0 * max]);
            borders.extend([0.0, -0.0, f64::from(f32::MAX), f64::from(f32::from_bits(1)), 1e-300]);
            for x in borders {
                let b = x as f32;
                assert!(f64::from(b) == x || x == 1e-300);
                // All f32 near the border, and f64 closer to it than any f32.
                let near = (-3i32..=3)
                    .map(|d| f64::from(f32::from_bits((b.to_bits() as i32).wrapping_add(d) as u32)));
                let close = [x * (1.0 + 1e-15), x * (1.0 - 1e-15)];
                for x in near.chain(close).filter(|x| x.is_finite()) {
                    for saturate in [false, true] {
                        assert_eq!(
                            f.encode(x, Rounding::Nearest, saturate),
                            nearest(f, &list, x, saturate),
                            "{f:?} {x:e} saturate {saturate}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn halves_encode_as_the_fast_conversions_do() {
        let mut x = 0x1234_5678u32;
        for i in 0..200_000u32 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Random words, and words whose low bits are at or around a tie.
            let bits = match i % 3 {
                0 => x,
                1 => x & 0xFFFF_E000 | 0x1000 + i % 2,
                _ => x & 0xFFFF_0000 | 0x8000 + i % 2,
            };
            let v = f32::from_bits(bits);
            if v.is_nan() {
                continue;
            }
            let wide = f64::from(v);
            assert_eq!(
                Narrow::F16.encode(wide, Rounding::Nearest, false),
                crate::exec::float::f32_to_f16(v),
                "{bits:#x}"
            );
            assert_eq!(
                Narrow::BF16.encode(wide, Rounding::Nearest, false),
                crate::exec::float::f32_to_bf16(v),
                "{bits:#x}"
            );
        }
    }

    #[test]
    fn infinities_and_nans() {
        for f in ALL {
            let infinite = f.encode(f64::INFINITY, Rounding::Nearest, false);
            match f.top {
                Top::Ieee => assert_eq!(f.decode(infinite), f32::INFINITY),
                Top::Finite => assert_eq!(infinite, f.max_code()),
                _ => assert!(f.decode(infinite).is_nan()),
            }
            assert_eq!(
                f.encode(f64::NEG_INFINITY, Rounding::Nearest, true),
                f.max_code() | 1 << (f.bits - 1)
            );
            for saturate in [false, true] {
                let nan = f.encode(f64::NAN, Rounding::Stochastic(77), saturate);
                assert!(f.decode(nan).is_nan() != (f.top == Top::Finite), "{f:?}");
            }
        }
    }

    #[test]
    fn stochastic_rounding_counts_the_random_numbers_that_round_up() {
        // x lies a fraction p between two values: it goes up for the p * 2^32 largest random numbers, whatever the
        // sign, also between subnormals.
        for f in ALL.into_iter().filter(|f| f.bits < 16) {
            let list = values(f);
            for w in list.windows(2) {
                let ((lo, low), (hi, high)) = (w[0], w[1]);
                for eighths in [0u32, 1, 3, 4, 7] {
                    let x = lo + (hi - lo) * f64::from(eighths) / 8.0;
                    // Towards larger magnitudes for negative numbers.
                    let away = if x < 0.0 { 8 - eighths } else { eighths };
                    let (near, far) = if x < 0.0 { (high, low) } else { (low, high) };
                    let (near, far) = if away == 8 { (far, far) } else { (near, far) };
                    let zero =
                        |c: u32| if c == 0 && x < 0.0 && f.top != Top::Fnuz { 1 << (f.bits - 1) } else { c };
                    let least = (1u64 << 32) - (u64::from(away % 8) << 29);
                    for random in [0, 1, least.wrapping_sub(1) as u32, least as u32, u32::MAX] {
                        let up = u64::from(random) >= least && away % 8 != 0;
                        let want = zero(if up { far } else { near });
                        assert_eq!(
                            f.encode(x, Rounding::Stochastic(random), false),
                            want,
                            "{f:?} {x} {random:#x}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn scales_and_random_numbers() {
        assert_eq!([0, 127, 254, 255].map(e8m0), [Some(-127), Some(0), Some(127), None]);
        assert_eq!([0, 1, 0x8000_0000, 0xFFFF_FFFF].map(prng), [0, 2, 197, 0xFFFF_FFFE ^ 197]);
    }
}
