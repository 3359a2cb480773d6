//! exp2, log2, sin and cos in f64, to about 2^-51: so much more than the f32 or f16 that they are rounded to that the
//! result is the correctly rounded one for every f16, and for every f32 but two of exp2 (the tests check them all).
//! Plain multiplications and additions: the same bits on every host, and loops over lanes become vector code.

/// ln(2)^k / k!
const EXP: [f64; 14] = {
    let mut c = [1.0; 14];
    let mut k = 1;
    while k < 14 {
        c[k] = c[k - 1] * std::f64::consts::LN_2 / k as f64;
        k += 1;
    }
    c
};

/// 2^x for results in the range of f32 and well beyond; 0 and infinity outside.
#[inline(always)]
pub(crate) fn exp2(x: f64) -> f64 {
    // Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    let t = if x > 300.0 { 300.0 } else { x };
    let t = if t < -300.0 { -300.0 } else { t };
    let shifted = t + SHIFT;
    let r = t - (shifted - SHIFT);
    let mut p = EXP[13];
    let mut k = 13;
    while k > 0 {
        k -= 1;
        p = p * r + EXP[k];
    }
    let n = shifted.to_bits().wrapping_sub(SHIFT.to_bits());
    p * f64::from_bits(n.wrapping_add(1023) << 52)
}

/// 2 / ln(2) / (2k + 1)
const LOG: [f64; 12] = {
    let mut c = [0.0; 12];
    let mut k = 0;
    while k < 12 {
        c[k] = 2.0 * std::f64::consts::LOG2_E / (2 * k + 1) as f64;
        k += 1;
    }
    c
};

/// log2(x) of a normal number; minus infinity of zeros, NaN of negative numbers.
#[inline(always)]
pub(crate) fn log2(x: f64) -> f64 {
    // x = m * 2^e with m between sqrt(1/2) and sqrt(2).
    const ROOT: u64 = 0x3FE6_A09E_667F_3BCD;
    const ONE: u64 = 0x3FF0_0000_0000_0000;
    let bits = x.to_bits().wrapping_add(ONE - ROOT);
    let e = (bits >> 52) as i32 - 1023;
    let m = f64::from_bits((bits & 0x000F_FFFF_FFFF_FFFF) + ROOT);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut p = LOG[11];
    let mut k = 11;
    while k > 0 {
        k -= 1;
        p = p * z + LOG[k];
    }
    let value = f64::from(e) + s * p;
    let value = if x == f64::INFINITY { x } else { value };
    let value = if x == 0.0 { f64::NEG_INFINITY } else { value };
    if x < 0.0 || x.is_nan() { f64::NAN } else { value }
}

/// A number of turns as the nearest quarter, modulo 4, and the angle from there in radians; exact up to the one product.
fn quarter(x: f64) -> (i32, f64) {
    let turns = x - x.trunc();
    let quarter = (4.0 * turns).round_ties_even();
    (quarter as i32 & 3, (turns - 0.25 * quarter) * std::f64::consts::TAU)
}

/// sin of a number of turns; 0 beyond 256 of them, where the hardware's domain ends.
pub(crate) fn sin_turns(x: f64) -> f64 {
    if !x.is_finite() {
        return f64::NAN;
    }
    match quarter(x) {
        _ if x.abs() > 256.0 => 0.0,
        // Zeros have the sign of their argument.
        (0 | 2, 0.0) => 0.0 * x,
        (0, angle) => libm::sin(angle),
        (1, angle) => libm::cos(angle),
        (2, angle) => -libm::sin(angle),
        (_, angle) => -libm::cos(angle),
    }
}

/// cos of a number of turns; 1 beyond 256 of them.
pub(crate) fn cos_turns(x: f64) -> f64 {
    if !x.is_finite() {
        return f64::NAN;
    }
    match quarter(x) {
        _ if x.abs() > 256.0 => 1.0,
        (1 | 3, 0.0) => 0.0,
        (0, angle) => libm::cos(angle),
        (1, angle) => -libm::sin(angle),
        (2, angle) => -libm::cos(angle),
        (_, angle) => libm::sin(angle),
    }
}

/// The first 1201 bits of 2 / pi behind the binary point, from the first on.
const TWO_OVER_PI: [u64; 19] = [
    0xA2F9_836E_4E44_1529,
    0xFC27_57D1_F534_DDC0,
    0xDB62_9599_3C43_9041,
    0xFE51_63AB_DEBB_C561,
    0xB724_6E3A_424D_D2E0,
    0x0649_2EEA_09D1_921C,
    0xFE1D_EB1C_B129_A73E,
    0xE882_35F5_2EBB_4484,
    0xE99C_7026_B45F_7E41,
    0x3991_D639_8353_39F4,
    0x9C84_5F8B_BDF9_283B,
    0x1FF8_97FF_DE05_980F,
    0xEF2F_118B_5A0A_6D1F,
    0x6D36_7ECF_27CB_09B7,
    0x4F46_3F66_9E5F_EA2D,
    0x7527_BAC7_EBE5_F17B,
    0x3D07_39F7_8A52_92EA,
    0x6BFB_5FB1_1F8D_5D08,
    0x5603_3046_FC7B_0000,
];

/// `v_trig_preop_f64`: 53 bits of 2 / pi that matter for the reduction of `x`, segment `segment`, as a double.
pub(crate) fn two_over_pi(x: u64, segment: u32) -> u64 {
    let exponent = (x >> 52 & 0x7FF) as i32;
    let shift = 53 * segment as i32 + (exponent - 1077).max(0);
    let word = |i: i32| TWO_OVER_PI.get(i as usize).copied().unwrap_or(0);
    let (i, part) = (shift / 64, shift % 64);
    let bits = (u128::from(word(i)) << 64 | u128::from(word(i + 1))) << part >> (128 - 53);
    let scale = -53 - shift + if exponent >= 1968 { 128 } else { 0 };
    super::float::soft_ldexp(bits as f64, scale, super::float::F64, super::float::Round::Nearest).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Ordering;

    #[test]
    fn segments_of_two_over_pi() {
        // Segments are disjoint and add up to the number.
        let part = |x: f64, segment| f64::from_bits(two_over_pi(x.to_bits(), segment));
        assert_eq!(part(1.0, 0) + part(1.0, 1), std::f64::consts::FRAC_2_PI);
        assert!(part(1.0, 1) < part(1.0, 0) * 2f64.powi(-52) && part(1.0, 1) > 0.0);
        // A large argument skips what only contributes whole turns: the product is small and the right fraction.
        let x = 2f64.powi(120);
        let fraction = (0..3).map(|s| (part(x, s) * x) % 4.0).sum::<f64>() % 4.0;
        let angle = fraction * std::f64::consts::FRAC_PI_2;
        assert!((libm::sin(angle) - libm::sin(x)).abs() < 1e-9, "{angle}");
        // The table ends after 1201 bits.
        assert_eq!(part(1.0, 23), 0.0);
        assert_eq!(part(2f64.powi(1000), 31), 0.0);
    }

    /// Numbers below 16 with 124 bits behind the point: what the functions are compared with where f64 cannot tell.
    #[derive(Clone, Copy, PartialEq, PartialOrd)]
    struct Fixed(u128);

    const ONE: Fixed = Fixed(1 << 124);
    const LN_2: Fixed = Fixed(0xB172_17F7_D1CF_79AB_C9E3_B398_03F2_F6AF >> 4);
    const QUARTER_PI: Fixed = Fixed(0xC90F_DAA2_2168_C234_C4C6_628B_80DC_1CD1 >> 4);

    impl Fixed {
        /// A finite number from 0 to below 16 whose bits all fit.
        fn of(x: f64) -> Fixed {
            Fixed((x * 2f64.powi(100)) as u128 * (1 << 24))
        }

        fn times(self, other: Fixed) -> Fixed {
            let parts = |x: u128| (x >> 64, x & u128::from(u64::MAX));
            let ((a, b), (c, d)) = (parts(self.0), parts(other.0));
            // The lowest product counts with its upper half alone.
            let middle = a * d + (b * d >> 64);
            let (m, n) = (parts(middle), parts(b * c));
            let carry = m.1 + n.1 >> 64;
            let high = a * c + m.0 + n.0 + carry;
            let low = middle.wrapping_add(b * c) & u128::from(u64::MAX);
            Fixed(high << 4 | low >> 60)
        }

        fn over(self, n: u128) -> Fixed {
            Fixed(self.0 / n)
        }
    }

    /// 2^r of a fraction.
    fn exp2_of_fraction(r: f64) -> Fixed {
        let x = Fixed::of(r).times(LN_2);
        let (mut sum, mut term) = (ONE, ONE);
        for k in 1..40 {
            term = term.times(x).over(k);
            sum.0 += term.0;
        }
        sum
    }

    /// sin(a) / a and cos(a) of an angle of `eighths` of a turn, up to one eighth.
    fn sin_over_and_cos(eighths: f64) -> (Fixed, Fixed) {
        let a = Fixed::of(eighths).times(QUARTER_PI);
        let square = a.times(a);
        let series = |first: u128| {
            let (mut sum, mut term) = (ONE.0 as i128, ONE);
            for k in 0..16 {
                term = term.times(square).over((2 * k + first) * (2 * k + first + 1));
                sum += if k % 2 == 0 { -(term.0 as i128) } else { term.0 as i128 };
            }
            Fixed(sum as u128)
        };
        (series(2), series(1))
    }

    /// Whether `x` times a power of two, `scale`, is beyond `middle`, both positive; closer than 2^-100 is equal.
    fn beyond(x: Fixed, scale: i32, middle: f64) -> Ordering {
        let exponent = (middle.to_bits() >> 52) as i32 - 1023;
        let distance = scale - exponent;
        // Both as numbers around one.
        let m = Fixed::of(middle * 2f64.powi(-exponent));
        let x = if distance >= 0 {
            x.0.checked_shl(distance as u32).unwrap_or(u128::MAX)
        } else {
            x.0 >> -distance
        };
        if x.abs_diff(m.0) < 1 << 24 { Ordering::Equal } else { x.cmp(&m.0) }
    }

    /// The exact value against a number, for the inputs where f64 is too coarse.
    type Exact = fn(f64, f64) -> Ordering;

    fn exact_exp2(x: f64, middle: f64) -> Ordering {
        beyond(exp2_of_fraction(x - x.floor()), x.floor() as i32, middle)
    }

    /// log2(x) > m where x > 2^m.
    fn exact_log2(x: f64, middle: f64) -> Ordering {
        beyond(exp2_of_fraction(middle - middle.floor()), middle.floor() as i32, x).reverse()
    }

    /// The magnitude of sin or cos; the sign is exact.
    fn exact_circle(turns: f64, middle: f64, cosine: bool) -> Ordering {
        let quarters = ((turns - turns.floor()) * 4.0).round_ties_even();
        let eighths = ((turns - turns.floor() - quarters / 4.0) * 8.0).abs();
        let (sin, cos) = sin_over_and_cos(eighths);
        let order = if (quarters as i32 % 2 == 1) == cosine {
            let exponent = (eighths.to_bits() >> 52) as i32 - 1023;
            let significand = Fixed::of(eighths * 2f64.powi(-exponent));
            beyond(significand.times(QUARTER_PI).times(sin), exponent, middle.abs())
        } else {
            beyond(cos, 0, middle.abs())
        };
        if middle < 0.0 { order.reverse() } else { order }
    }

    /// 1 / sqrt(x) > m where x m^2 < 1: integers decide.
    fn exact_rsq(x: f64, middle: f64) -> Ordering {
        let parts = |x: f64| {
            let zeros = (x.to_bits() | 1 << 52).trailing_zeros().min(52);
            (
                (x.to_bits() & (1 << 52) - 1 | 1 << 52) >> zeros,
                (x.to_bits() >> 52) as i32 - 1075 + zeros as i32,
            )
        };
        let ((a, e), (m, f)) = (parts(x), parts(middle));
        let product = u128::from(a) * u128::from(m) * u128::from(m);
        let top = 127 - product.leading_zeros() as i32 + e + 2 * f;
        // Exactly one, or beside it.
        let one = product.is_power_of_two() && top == 0;
        if one {
            Ordering::Equal
        } else if top < 0 {
            Ordering::Greater
        } else {
            Ordering::Less
        }
    }

    /// Relative error that the f64 results stay below: the series end at 2^-57, the rest is the rounding of a few
    /// operations, at most 2^-53 each.
    const ERROR: f64 = 1.0 / (1u64 << 49) as f64;

    /// How the result `y` is rounded to a smaller format by `round`.
    #[derive(PartialEq)]
    enum Rounding {
        /// As everything within the error is.
        Sure,
        /// As the exact value is, though f64 alone could not tell.
        Close,
        Wrong,
    }

    fn rounding(x: f64, y: f64, round: impl Fn(f64) -> f64, exact: Exact) -> Rounding {
        let (low, high) = (round(y * (1.0 - ERROR)), round(y * (1.0 + ERROR)));
        if low == high || y.is_nan() || y == 0.0 || y.is_infinite() {
            return Rounding::Sure;
        }
        let middle = (low + high) / 2.0;
        let want = match exact(x, middle) {
            Ordering::Less => low.min(high),
            Ordering::Greater => low.max(high),
            Ordering::Equal => round(middle),
        };
        if round(y) == want { Rounding::Close } else { Rounding::Wrong }
    }

    /// The f32 numbers whose result is so close to a tie that the error of f64 takes it to the other side.
    const WRONG: [(&str, &[u32]); 1] = [("exp2", &[0x3B42_9D37, 0xBCF3_A937])];

    /// A name, the function, and its exact values.
    type Function = (&'static str, fn(f64) -> f64, Exact);

    const FUNCTIONS: [Function; 5] = [
        ("exp2", exp2, exact_exp2),
        ("log2", log2, exact_log2),
        ("sin", sin_turns, |x, m| exact_circle(x, m, false)),
        ("cos", cos_turns, |x, m| exact_circle(x, m, true)),
        ("rsq", |x| 1.0 / x.sqrt(), exact_rsq),
    ];

    /// Whether a result is neither a special case nor that of another argument.
    fn interesting(what: &str, x: f64) -> bool {
        match what {
            "exp2" => (1e-9..150.0).contains(&x.abs()),
            "log2" => x > 0.0 && x.is_finite(),
            // Four times the number has half the result.
            "rsq" => (1.0..4.0).contains(&x),
            // Symmetric; below, sin is a multiple of its argument and cos is 1.
            "sin" => (0.5f64.powi(37)..=256.0).contains(&x),
            _ => (0.5f64.powi(16)..=256.0).contains(&x),
        }
    }

    /// Checks the f32 numbers `step` bits apart: for each function how many there are, how many of them are too close to
    /// a tie for f64, and those that are rounded the wrong way.
    fn every_f32(step: usize) -> Vec<(&'static str, u64, u64, Vec<u32>)> {
        let mut found: Vec<_> = FUNCTIONS.iter().map(|(what, ..)| (*what, 0, 0, vec![])).collect();
        for bits in (0..=u32::MAX).step_by(step) {
            let x = f32::from_bits(bits);
            if x.is_subnormal() {
                continue;
            }
            let x = f64::from(x);
            for ((what, f, exact), (_, numbers, close, wrong)) in FUNCTIONS.iter().zip(&mut found) {
                let y = if interesting(what, x) { f(x) } else { continue };
                // Results that are flushed are not rounded.
                if y.abs() >= f64::from(f32::MIN_POSITIVE) {
                    *numbers += 1;
                    match rounding(x, y, |y| f64::from(y as f32), *exact) {
                        Rounding::Sure => {}
                        Rounding::Close => *close += 1,
                        Rounding::Wrong => wrong.push(bits),
                    }
                }
            }
        }
        found
    }

    #[test]
    fn a_sample_of_f32_rounds_correctly() {
        for (what, numbers, _, wrong) in every_f32(1021) {
            assert!(numbers > 10_000, "{what}: {numbers}");
            assert!(wrong.is_empty(), "{what}: {wrong:x?}");
        }
    }

    /// Minutes in a release build: `cargo test --release -p hk-emu --lib every_f32 -- --ignored --nocapture`.
    #[test]
    #[ignore = "takes minutes in a release build"]
    fn every_f32_rounds_correctly_but_for_the_known_ones() {
        for (what, numbers, close, wrong) in every_f32(1) {
            println!(
                "{what}: {numbers} numbers, {close} of them close to a tie, {wrong:x?} rounded the wrong way"
            );
            let known = WRONG.iter().find(|(name, _)| *name == what).map_or(&[][..], |(_, numbers)| numbers);
            assert_eq!(wrong, known, "{what}");
        }
    }

    #[test]
    fn every_f16_rounds_correctly() {
        use super::super::float::{f16_to_f32, f64_to_f16};
        let round = |y: f64| f64::from(f16_to_f32(f64_to_f16(y)));
        for h in 0..0x1_0000 {
            let x = f64::from(f16_to_f32(h));
            for (what, f, exact) in FUNCTIONS.iter().filter(|(what, ..)| interesting(what, x)) {
                assert!(rounding(x, f(x), round, *exact) != Rounding::Wrong, "{what} of {x:e}");
            }
        }
    }

    #[test]
    fn special_cases() {
        assert_eq!(exp2(3.0), 8.0);
        assert_eq!(log2(8.0), 3.0);
        assert_eq!(log2(1.0), 0.0);
        assert_eq!(log2(0.0), f64::NEG_INFINITY);
        assert_eq!(exp2(f64::NEG_INFINITY) as f32, 0.0);
        assert_eq!(exp2(f64::INFINITY) as f32, f32::INFINITY);
        assert!(exp2(f64::NAN).is_nan() && log2(-1.0).is_nan());
        let quarters = |f: fn(f64) -> f64| [0.0, 0.25, 0.5, 0.75, 1.0, -0.25, -0.5, 255.75, 300.0].map(f);
        assert_eq!(quarters(sin_turns), [0.0, 1.0, 0.0, -1.0, 0.0, -1.0, 0.0, -1.0, 0.0]);
        assert_eq!(quarters(cos_turns), [1.0, 0.0, -1.0, 0.0, 1.0, 0.0, -1.0, 0.0, 1.0]);
        assert!(sin_turns(f64::INFINITY).is_nan() && cos_turns(f64::NAN).is_nan());
        // The comparisons with exact values tell neighbours apart.
        for (what, f, exact) in FUNCTIONS {
            for x in [1.1875, 1.625, 3.0078125] {
                let y = f(x);
                let [less, more] = [y - 1e-12, y + 1e-12].map(|m| exact(x, m));
                assert_eq!((less, more), (Ordering::Greater, Ordering::Less), "{what} {x}");
            }
        }
    }
}
