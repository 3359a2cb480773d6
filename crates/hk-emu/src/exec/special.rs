//! exp2 and log2 in f64, to about 2^-51: far more than the f32 or f16 that they are rounded to needs, so that the
//! rounded result is the correctly rounded one but for isolated near-ties. Plain multiplications and additions: the
//! same bits on every host, and loops over lanes become vector code.

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
    0x5603_0000_0000_0000,
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

    #[test]
    fn rounds_like_an_exact_library() {
        let mut bits = 1u32;
        for _ in 0..2_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            if x.is_subnormal() {
                continue;
            }
            let wide = f64::from(x);
            let same = |ours: f64, theirs: f64, what: &str| {
                let (a, b) = (ours as f32, theirs as f32);
                assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{what}({x:e}): {a:e} {b:e}");
                assert!(
                    b.is_nan() || b.is_infinite() || b == 0.0 || ((ours - theirs) / theirs).abs() < 1e-15,
                    "{what}({x:e})"
                );
            };
            same(exp2(wide), libm::exp2(wide), "exp2");
            same(log2(wide), libm::log2(wide), "log2");
        }
        assert_eq!(exp2(3.0), 8.0);
        assert_eq!(log2(8.0), 3.0);
        assert_eq!(log2(1.0), 0.0);
        assert_eq!(log2(0.0), f64::NEG_INFINITY);
        assert_eq!(exp2(f64::NEG_INFINITY) as f32, 0.0);
        assert_eq!(exp2(f64::INFINITY) as f32, f32::INFINITY);
        assert!(exp2(f64::NAN).is_nan() && log2(-1.0).is_nan());
    }
}
