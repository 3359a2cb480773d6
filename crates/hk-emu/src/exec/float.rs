//! Floating-point arithmetic that the host does not offer: other rounding modes, small formats, fixed NaN rules.

/// Rounding modes in MODE's numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    Nearest,
    Up,
    Down,
    Zero,
}

impl Round {
    pub fn from_bits(bits: u32) -> Round {
        match bits & 3 {
            0 => Round::Nearest,
            1 => Round::Up,
            2 => Round::Down,
            _ => Round::Zero,
        }
    }
}

/// A binary format no wider than f64: precision with the hidden bit, smallest and largest exponent of a normal number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    pub precision: i32,
    pub emin: i32,
    pub emax: i32,
}

pub(crate) const F16: Format = Format { precision: 11, emin: -14, emax: 15 };
pub(crate) const F32: Format = Format { precision: 24, emin: -126, emax: 127 };
pub(crate) const F64: Format = Format { precision: 53, emin: -1022, emax: 1023 };

pub(crate) const NAN32: u32 = 0x7FC0_0000;
pub(crate) const NAN64: u64 = 0x7FF8_0000_0000_0000;
pub(crate) const NAN16: u32 = 0x7E00;

/// `m * 2^e` with a sign, exact except that bit 0 of `m` is set when something smaller was dropped.
#[derive(Clone, Copy)]
struct Wide {
    negative: bool,
    m: u128,
    e: i32,
}

impl Wide {
    fn of(x: f64) -> Wide {
        let bits = x.to_bits();
        let (exponent, fraction) = ((bits >> 52 & 0x7FF) as i32, bits & ((1 << 52) - 1));
        let m = if exponent == 0 { fraction } else { fraction | 1 << 52 };
        Wide { negative: x.is_sign_negative(), m: u128::from(m), e: exponent.max(1) - 1075 }
    }

    /// Exponent of the leading bit.
    fn top(&self) -> i32 {
        self.e + 127 - self.m.leading_zeros() as i32
    }

    /// Shifts right, keeping what falls out as a sticky bit.
    fn shift_right(self, n: i32) -> Wide {
        let m = if n <= 0 {
            self.m << -n
        } else if n > 127 {
            u128::from(self.m != 0)
        } else {
            self.m >> n | u128::from(self.m << (128 - n) != 0)
        };
        Wide { m, e: self.e + n, ..self }
    }

    fn add(self, other: Wide, round: Round) -> Wide {
        if self.m == 0 || other.m == 0 {
            return match (self.m == 0, other.m == 0) {
                (true, true) => {
                    let negative =
                        if self.negative == other.negative { self.negative } else { round == Round::Down };
                    Wide { negative, m: 0, e: 0 }
                }
                (true, false) => other,
                _ => self,
            };
        }
        let (big, small) = if self.top() >= other.top() { (self, other) } else { (other, self) };
        // The leading bit of the larger one goes to bit 125: the sum fits, and both keep at least 19 bits of room
        // below 106-bit products, so that a sticky bit only ever stands for less than a rounding unit.
        let unit = big.top() - 125;
        let (big, small) = (big.shift_right(unit - big.e), small.shift_right(unit - small.e));
        if big.negative == small.negative {
            return Wide { m: big.m + small.m, ..big };
        }
        if big.m == small.m {
            return Wide { negative: round == Round::Down, m: 0, e: 0 };
        }
        if big.m > small.m {
            Wide { m: big.m - small.m, ..big }
        } else {
            Wide { m: small.m - big.m, ..small }
        }
    }

    fn round(self, format: Format, round: Round) -> f64 {
        let sign = if self.negative { -1.0 } else { 1.0 };
        if self.m == 0 {
            return 0.0 * sign;
        }
        // The unit in the last place of the result.
        let ulp = (self.top() - (format.precision - 1)).max(format.emin - (format.precision - 1));
        let shift = ulp - self.e;
        let (kept, rest, half) = if shift <= 0 {
            // Nothing is dropped: few bits, all above the unit.
            (self.m << -shift, 0, 1)
        } else if shift > 127 {
            (0, 1, 2)
        } else {
            (self.m >> shift, self.m & ((1 << shift) - 1), 1 << (shift - 1))
        };
        let up = match round {
            Round::Nearest => rest > half || rest == half && kept & 1 != 0,
            Round::Up => rest != 0 && !self.negative,
            Round::Down => rest != 0 && self.negative,
            Round::Zero => false,
        };
        let kept = kept + u128::from(up);
        let limit = format.emax + 1;
        if kept != 0 && ulp + 127 - kept.leading_zeros() as i32 >= limit {
            let away = match round {
                Round::Nearest => true,
                Round::Up => !self.negative,
                Round::Down => self.negative,
                Round::Zero => false,
            };
            return if away { f64::INFINITY * sign } else { max_finite(format) * sign };
        }
        // At most 53 bits times a power of two in range: exact, in two steps because 2^ulp may be subnormal.
        scale_exact(kept as u64, ulp) * sign
    }
}

fn scale_exact(m: u64, e: i32) -> f64 {
    let x = m as f64;
    if e < -1000 { x * power_of_two(-1000) * power_of_two(e + 1000) } else { x * power_of_two(e) }
}

/// 2^e as f64; `e` within -1074..=1023.
fn power_of_two(e: i32) -> f64 {
    if e >= -1022 { f64::from_bits(((e + 1023) as u64) << 52) } else { f64::from_bits(1 << (e + 1074)) }
}

pub(crate) fn max_finite(format: Format) -> f64 {
    let ones = (1u64 << format.precision) - 1;
    ones as f64 * power_of_two(format.emax - format.precision + 1)
}

/// `a * b + c` of finite or infinite numbers, rounded once to `format`. NaNs are the caller's.
pub(crate) fn soft_fma(a: f64, b: f64, c: f64, format: Format, round: Round) -> f64 {
    soft_scaled_fma(a, b, c, 0, format, round)
}

/// `(a * b + c) * 2^n`, rounded once.
pub(crate) fn soft_scaled_fma(a: f64, b: f64, c: f64, n: i32, format: Format, round: Round) -> f64 {
    if !(a.is_finite() && b.is_finite()) {
        return a * b + c;
    }
    if !c.is_finite() {
        return c;
    }
    let (x, y) = (Wide::of(a), Wide::of(b));
    let product = Wide { negative: x.negative != y.negative, m: x.m * y.m, e: x.e + y.e };
    let sum = product.add(Wide::of(c), round);
    Wide { e: sum.e + n, ..sum }.round(format, round)
}

pub(crate) fn soft_mul(a: f64, b: f64, format: Format, round: Round) -> f64 {
    if !(a.is_finite() && b.is_finite()) {
        return a * b;
    }
    let (x, y) = (Wide::of(a), Wide::of(b));
    Wide { negative: x.negative != y.negative, m: x.m * y.m, e: x.e + y.e }.round(format, round)
}

pub(crate) fn soft_add(a: f64, b: f64, format: Format, round: Round) -> f64 {
    if !(a.is_finite() && b.is_finite()) {
        return a + b;
    }
    Wide::of(a).add(Wide::of(b), round).round(format, round)
}

/// `x` rounded to `format`.
pub(crate) fn soft_round(x: f64, format: Format, round: Round) -> f64 {
    if !x.is_finite() { x } else { Wide::of(x).round(format, round) }
}

/// `x * 2^n` rounded once to `format`.
pub(crate) fn soft_ldexp(x: f64, n: i32, format: Format, round: Round) -> f64 {
    if !x.is_finite() {
        return x;
    }
    let wide = Wide::of(x);
    // Beyond +-5000 every finite number overflows or vanishes.
    Wide { e: wide.e + n.clamp(-5000, 5000), ..wide }.round(format, round)
}

/// An integer rounded to `format`.
pub(crate) fn soft_from_int(x: i64, format: Format, round: Round) -> f64 {
    Wide { negative: x < 0, m: u128::from(x.unsigned_abs()), e: 0 }.round(format, round)
}

/// The sum in f64, rounded to odd: the last bit is set if the sum is inexact, so that a second rounding to a format
/// of at most 51 bits is a single rounding of the exact sum.
#[inline(always)]
pub(crate) fn add_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let high = sum - a;
    let error = (a - (sum - high)) + (b - high);
    let bits = sum.to_bits();
    // The sum was rounded away from zero if the error points back.
    let away = (error.to_bits() ^ bits) >> 63;
    let inexact = error != 0.0;
    let truncated = bits.wrapping_sub(if inexact { away } else { 0 });
    let odd = truncated | u64::from(inexact);
    f64::from_bits(if sum.is_finite() { odd } else { bits })
}

/// f32 fused multiply-add without the host's instruction.
#[inline(always)]
pub(crate) fn fma32(a: f32, b: f32, c: f32) -> f32 {
    // The product of two 24-bit numbers is exact in f64.
    add_odd(f64::from(a) * f64::from(b), f64::from(c)) as f32
}

/// A denormal becomes a zero of its sign.
#[inline(always)]
pub(crate) fn flush32(x: u32) -> u32 {
    if x & 0x7F80_0000 == 0 { x & 0x8000_0000 } else { x }
}

#[inline(always)]
pub(crate) fn flush64(x: u64) -> u64 {
    if x & 0x7FF0_0000_0000_0000 == 0 { x & 1 << 63 } else { x }
}

#[inline(always)]
pub(crate) fn flush16(x: u32) -> u32 {
    if x & 0x7C00 == 0 { x & 0x8000 } else { x }
}

#[inline(always)]
pub(crate) fn is_nan32(x: u32) -> bool {
    x & 0x7FFF_FFFF > 0x7F80_0000
}

#[inline(always)]
pub(crate) fn is_snan32(x: u32) -> bool {
    is_nan32(x) && x & 0x0040_0000 == 0
}

#[inline(always)]
pub(crate) fn is_nan64(x: u64) -> bool {
    x & !(1 << 63) > 0x7FF0_0000_0000_0000
}

#[inline(always)]
pub(crate) fn is_snan64(x: u64) -> bool {
    is_nan64(x) && x & 0x0008_0000_0000_0000 == 0
}

#[inline(always)]
pub(crate) fn is_nan16(x: u32) -> bool {
    x & 0x7FFF > 0x7C00
}

pub(crate) const QUIET32: u32 = 0x0040_0000;
pub(crate) const QUIET64: u64 = 0x0008_0000_0000_0000;
pub(crate) const QUIET16: u32 = 0x0200;

/// The NaN that an operation on these operands gives: the first NaN, quiet, else the default one.
#[inline(always)]
pub(crate) fn nan32(operands: &[u32]) -> u32 {
    operands.iter().find(|x| is_nan32(**x)).map_or(NAN32, |x| x | QUIET32)
}

#[inline(always)]
pub(crate) fn nan64(operands: &[u64]) -> u64 {
    operands.iter().find(|x| is_nan64(**x)).map_or(NAN64, |x| x | QUIET64)
}

#[inline(always)]
pub(crate) fn nan16(operands: &[u32]) -> u32 {
    operands.iter().find(|x| is_nan16(**x)).map_or(NAN16, |x| x & 0xFFFF | QUIET16)
}

/// The f32 of an f16; exact, NaNs keep sign and payload and become quiet.
#[inline(always)]
pub(crate) fn f16_to_f32(h: u32) -> f32 {
    let sign = (h & 0x8000) << 16;
    let magnitude = h & 0x7FFF;
    // Scaling by 2^112 moves the exponent bias and normalises subnormals in one exact multiplication.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
    let bits = if magnitude >= 0x7C00 { (magnitude << 13) | 0x7F80_0000 } else { scaled.to_bits() };
    let quiet = if magnitude > 0x7C00 { QUIET32 } else { 0 };
    f32::from_bits(sign | bits | quiet)
}

/// An f32 rounded to f16, to nearest even. NaNs become quiet.
#[inline(always)]
pub(crate) fn f32_to_f16(x: f32) -> u32 {
    let bits = x.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    // Normal results: rebias, add half a unit less one plus the last kept bit.
    let normal = magnitude.wrapping_add(0xC800_0FFF).wrapping_add(magnitude >> 13 & 1) >> 13;
    // Subnormal results: adding 0.5 puts the last place of f16 subnormals at the last place of f32.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3F00_0000);
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let large = if magnitude > 0x7F80_0000 { 0x7C00 | QUIET16 | magnitude >> 13 & 0x3FF } else { 0x7C00 };
    sign | if magnitude >= 0x477F_F000 { large } else { finite }
}

/// An f64 rounded once to f16, to nearest even.
#[inline(always)]
pub(crate) fn f64_to_f16(x: f64) -> u32 {
    // To odd in f32 first, then to nearest: one rounding of the exact value.
    let near = x as f32;
    let back = f64::from(near);
    let bits = near.to_bits();
    let inexact = back != x && x.is_finite() && near.is_finite();
    let away = back.abs() > x.abs();
    let odd = bits.wrapping_sub(u32::from(inexact && away)) | u32::from(inexact);
    f32_to_f16(f32::from_bits(odd))
}

/// An f64 that is a value of f16 (or NaN) as bits.
pub(crate) fn exact_f16(x: f64) -> u32 {
    f32_to_f16(x as f32)
}

/// The f32 of a bf16.
#[inline(always)]
pub(crate) fn bf16_to_f32(h: u32) -> f32 {
    f32::from_bits(h << 16)
}

/// An f32 rounded to bf16, to nearest even. NaNs become quiet.
#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    if is_nan32(bits) { (bits | QUIET32) >> 16 } else { bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16 }
}

/// The number to compare for order with -0 < +0, as the hardware's min and max do. Not for NaNs.
#[inline(always)]
pub(crate) fn order32(x: u32) -> i32 {
    let x = x as i32;
    x ^ ((x >> 31) as u32 >> 1) as i32
}

#[inline(always)]
pub(crate) fn order64(x: u64) -> i64 {
    let x = x as i64;
    x ^ ((x >> 63) as u64 >> 1) as i64
}

#[inline(always)]
pub(crate) fn order16(x: u32) -> i32 {
    let x = i32::from(x as u16 as i16);
    x ^ (x >> 31 & 0x7FFF)
}

/// The result if it is one flush allows.
pub(crate) fn class32(x: u32) -> u32 {
    let negative = x >> 31 != 0;
    let (exponent, fraction) = (x >> 23 & 0xFF, x & 0x7F_FFFF);
    class(negative, exponent == 0xFF, exponent == 0, fraction == 0, x & QUIET32 != 0)
}

pub(crate) fn class64(x: u64) -> u32 {
    let (exponent, fraction) = (x >> 52 & 0x7FF, x & ((1 << 52) - 1));
    class(x >> 63 != 0, exponent == 0x7FF, exponent == 0, fraction == 0, x & QUIET64 != 0)
}

pub(crate) fn class16(x: u32) -> u32 {
    let (exponent, fraction) = (x >> 10 & 0x1F, x & 0x3FF);
    class(x & 0x8000 != 0, exponent == 0x1F, exponent == 0, fraction == 0, x & QUIET16 != 0)
}

/// One bit of the class mask: sNaN qNaN -inf -normal -denormal -0 +0 +denormal +normal +inf.
fn class(negative: bool, top: bool, bottom: bool, zero: bool, quiet: bool) -> u32 {
    1 << match (top, bottom, zero, negative) {
        (true, _, false, _) => u32::from(quiet),
        (true, _, true, true) => 2,
        (true, _, true, false) => 9,
        (_, false, _, true) => 3,
        (_, false, _, false) => 8,
        (_, true, false, true) => 4,
        (_, true, false, false) => 7,
        (_, true, true, true) => 5,
        (_, true, true, false) => 6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<f32> {
        let mut bits =
            vec![0, 1, 2, 0x7F_FFFF, 0x80_0000, 0x3F80_0000, 0x3F7F_FFFF, 0x7F7F_FFFF, 0x7F80_0000];
        let mut x = 0x1234_5678u32;
        for _ in 0..200 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bits.push(x & 0x7FFF_FFFF);
            bits.push(x & 0x07FF_FFFF | 0x3C00_0000);
        }
        bits.into_iter().flat_map(|b| [f32::from_bits(b), f32::from_bits(b | 1 << 31)]).collect()
    }

    #[test]
    fn software_arithmetic_equals_the_host_to_nearest() {
        let samples = samples();
        for (i, a) in samples.iter().enumerate() {
            for b in &samples {
                let c = samples[(i * 31 + 7) % samples.len()];
                let (x, y, z) = (f64::from(*a), f64::from(*b), f64::from(c));
                let same = |soft: f64, host: f32| {
                    assert!(
                        soft.is_nan() && host.is_nan() || (soft as f32).to_bits() == host.to_bits(),
                        "{a:e} {b:e} {c:e}: {soft:e} {host:e}"
                    );
                };
                same(soft_add(x, y, F32, Round::Nearest), a + b);
                same(soft_mul(x, y, F32, Round::Nearest), a * b);
                same(soft_fma(x, y, z, F32, Round::Nearest), a.mul_add(*b, c));
                same(f64::from(fma32(*a, *b, c)), a.mul_add(*b, c));
                let (p, q) = (x * 1.000_000_1 + 1e-9, y * 0.999_999_7);
                let (soft, host) = (soft_fma(p, q, z, F64, Round::Nearest), p.mul_add(q, z));
                assert!(
                    soft.is_nan() && host.is_nan() || soft.to_bits() == host.to_bits(),
                    "{p:e} {q:e} {z:e}"
                );
                assert!(libm::fma(p, q, z).to_bits() == host.to_bits() || host.is_nan());
            }
        }
    }

    #[test]
    fn directed_rounding_brackets_the_exact_sum() {
        for (a, b) in [(1.0, 1e-30), (1.0, -1e-30), (-1.0, 1e-30), (3.0e38, 3.0e38), (1e-45, 1e-46)] {
            let exact = a + b;
            let up = soft_add(a, b, F32, Round::Up);
            let down = soft_add(a, b, F32, Round::Down);
            let zero = soft_add(a, b, F32, Round::Zero);
            assert!(down <= exact && exact <= up && down < up, "{a} {b}");
            assert_eq!(zero, if exact > 0.0 { down } else { up });
        }
        assert!(soft_add(1.0, -1.0, F32, Round::Down).is_sign_negative());
        assert!(soft_add(1.0, -1.0, F32, Round::Nearest).is_sign_positive());
    }

    #[test]
    fn every_f16_survives_the_round_trip_and_every_midpoint_ties_to_even() {
        for h in 0..0x8000u32 {
            let x = f16_to_f32(h);
            if h > 0x7C00 {
                assert_eq!(f32_to_f16(x), h | QUIET16);
                continue;
            }
            assert_eq!(f32_to_f16(x), h);
            assert_eq!(f32_to_f16(-x), h | 0x8000);
            // Independent: the definition.
            let (e, f) = ((h >> 10) as i32, f64::from(h & 0x3FF));
            let want = if e == 0 { f * 2f64.powi(-24) } else { (1024.0 + f) * 2f64.powi(e - 25) };
            if h < 0x7C00 {
                assert_eq!(f64::from(x), want);
                let next = if h + 1 == 0x7C00 { 65536.0 } else { f64::from(f16_to_f32(h + 1)) };
                let middle = (want + next) / 2.0;
                let even = if h & 1 == 0 { h } else { h + 1 };
                assert_eq!(f32_to_f16(middle as f32), even);
                assert_eq!(f64_to_f16(middle), even);
                assert_eq!(f64_to_f16(middle * (1.0 + 1e-15)), h + 1);
                assert_eq!(f64_to_f16(middle * (1.0 - 1e-15)), h);
            }
        }
    }
}
