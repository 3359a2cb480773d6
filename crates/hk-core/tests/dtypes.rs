//! Every code of every narrow type against the definition of its format, and every rounding border.

use hk_core::{
    DType, E8M0, Float, Fp4, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Fp8E5M2Fnuz, bf16, f16,
};

/// A float format by its definition, evaluated in f64: `(-1)^s * 2^(e - bias) * 1.m`, or `2^(1 - bias) * 0.m` for `e = 0`.
fn value_by_definition(code: u32, exponent_bits: u32, mantissa_bits: u32, bias: i32) -> f64 {
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1u32 << mantissa_bits);
    let exponent = ((code >> mantissa_bits) & ((1 << exponent_bits) - 1)) as i32;
    let sign = if code >> (mantissa_bits + exponent_bits) & 1 == 1 { -1.0 } else { 1.0 };
    match exponent {
        0 => sign * mantissa * 2f64.powi(1 - bias),
        e => sign * (1.0 + mantissa) * 2f64.powi(e - bias),
    }
}

/// The next f32 in either direction, for positive finite `x`.
fn above(x: f32) -> f32 {
    f32::from_bits(x.to_bits() + 1)
}

fn below(x: f32) -> f32 {
    f32::from_bits(x.to_bits() - 1)
}

struct Fp8 {
    mantissa_bits: u32,
    bias: i32,
    /// Largest finite code.
    max: u8,
    nans: Vec<u8>,
    infinity: Option<u8>,
    nan: u8,
    negative_zero: bool,
    decode: fn(u8) -> f32,
    encode: fn(f32) -> u8,
    saturate: fn(f32) -> u8,
}

macro_rules! codec {
    ($t:ident, $($field:ident: $value:expr),*) => {
        Fp8 {
            $($field: $value,)*
            decode: |c| $t(c).to_f32(),
            encode: |x| $t::from_f32(x).0,
            saturate: |x| $t::from_f32_saturating(x).0,
        }
    };
}

fn fp8_formats() -> [Fp8; 4] {
    let with_sign = |codes: &[u8]| codes.iter().flat_map(|&c| [c, c | 0x80]).collect::<Vec<_>>();
    [
        codec!(Fp8E4M3Fnuz, mantissa_bits: 3, bias: 8, max: 0x7f, nans: vec![0x80], infinity: None, nan: 0x80,
            negative_zero: false),
        codec!(Fp8E5M2Fnuz, mantissa_bits: 2, bias: 16, max: 0x7f, nans: vec![0x80], infinity: None, nan: 0x80,
            negative_zero: false),
        codec!(Fp8E4M3, mantissa_bits: 3, bias: 7, max: 0x7e, nans: with_sign(&[0x7f]), infinity: None, nan: 0x7f,
            negative_zero: true),
        codec!(Fp8E5M2, mantissa_bits: 2, bias: 15, max: 0x7b, nans: with_sign(&[0x7d, 0x7e, 0x7f]),
            infinity: Some(0x7c), nan: 0x7f, negative_zero: true),
    ]
}

#[test]
fn fp8_every_encoding_has_its_defined_value_and_round_trips() {
    for f in fp8_formats() {
        for code in 0..=255u8 {
            let got = (f.decode)(code);
            if f.nans.contains(&code) {
                assert!(got.is_nan(), "{code:#x}");
                assert_eq!((f.encode)(got), f.nan);
                assert_eq!((f.saturate)(got), f.nan);
                continue;
            }
            if f.infinity == Some(code & 0x7f) {
                assert_eq!(got, if code < 0x80 { f32::INFINITY } else { f32::NEG_INFINITY });
                assert_eq!((f.encode)(got), code);
                assert_eq!((f.saturate)(got), f.max | code & 0x80);
                continue;
            }
            let want = value_by_definition(code.into(), 7 - f.mantissa_bits, f.mantissa_bits, f.bias);
            assert_eq!(f64::from(got).to_bits(), want.to_bits(), "{code:#x}");
            assert_eq!((f.encode)(got), code, "{code:#x}");
            assert_eq!((f.saturate)(got), code, "{code:#x}");
        }
    }
}

#[test]
fn fp8_rounds_to_nearest_even_at_every_boundary() {
    for f in fp8_formats() {
        for code in 0..f.max {
            // Exact in f32: at most one bit more than the codes have.
            let tie = ((f.decode)(code) + (f.decode)(code + 1)) / 2.0;
            let even = code + code % 2;
            for (x, want) in [(below(tie), code), (tie, even), (above(tie), code + 1)] {
                for encode in [f.encode, f.saturate] {
                    assert_eq!(encode(x), want, "{x:e}");
                    let negative = if want == 0 && !f.negative_zero { 0 } else { want | 0x80 };
                    assert_eq!(encode(-x), negative, "-{x:e}");
                }
            }
        }
    }
}

#[test]
fn fp8_beyond_the_range() {
    for f in fp8_formats() {
        let max = (f.decode)(f.max);
        // Where the next code would begin, were there one: half a step beyond the largest value.
        let step = max - (f.decode)(f.max - 1);
        let border = max + step / 2.0;
        let stays = if f.max % 2 == 0 { border } else { below(border) };
        let over = |negative: bool| match f.infinity {
            Some(infinity) => infinity | if negative { 0x80 } else { 0 },
            None => f.nan,
        };
        assert_eq!((f.encode)(stays), f.max);
        assert_eq!((f.encode)(-stays), f.max | 0x80);
        for x in [above(stays), 2.0 * max, f32::MAX, f32::INFINITY] {
            assert_eq!((f.encode)(x), over(false), "{x:e}");
            assert_eq!((f.encode)(-x), over(true), "-{x:e}");
            assert_eq!((f.saturate)(x), f.max, "{x:e}");
            assert_eq!((f.saturate)(-x), f.max | 0x80, "-{x:e}");
        }
        // Far below the smallest subnormal, f32 subnormals included.
        for x in [1e-10, f32::MIN_POSITIVE, f32::from_bits(1), 0.0] {
            assert_eq!((f.encode)(x), 0, "{x:e}");
            assert_eq!((f.encode)(-x), if f.negative_zero { 0x80 } else { 0 }, "-{x:e}");
        }
        for nan in [0x7f80_0001u32, 0xff80_0001, 0x7fff_ffff, 0xffc0_0000] {
            assert_eq!((f.encode)(f32::from_bits(nan)), f.nan);
            assert_eq!((f.saturate)(f32::from_bits(nan)), f.nan);
        }
    }
}

#[test]
fn fp8_published_limits() {
    assert_eq!(Fp8E4M3Fnuz::MAX.to_f32(), 240.0);
    assert_eq!(Fp8E5M2Fnuz::MAX.to_f32(), 57344.0);
    assert_eq!(Fp8E4M3::MAX.to_f32(), 448.0);
    assert_eq!(Fp8E5M2::MAX.to_f32(), 57344.0);
    assert_eq!([Fp8E4M3Fnuz(1).to_f32(), Fp8E4M3(1).to_f32()], [2f32.powi(-10), 2f32.powi(-9)]);
    assert_eq!([Fp8E4M3Fnuz(8).to_f32(), Fp8E4M3(8).to_f32()], [2f32.powi(-7), 2f32.powi(-6)]);
    // The fnuz value is half of the OCP value, wherever both are numbers.
    for code in (0..=255).filter(|c| ![0x80, 0x7f, 0xff].contains(c)) {
        assert_eq!(2.0 * Fp8E4M3Fnuz(code).to_f32(), Fp8E4M3(code).to_f32());
    }
}

#[test]
fn fp8_monotone_over_all_f32_exponents() {
    for f in fp8_formats() {
        let mut last = 0;
        for bits in (0..0x7f80_0000u32).step_by(0x1_0001) {
            let code = (f.saturate)(f32::from_bits(bits));
            assert!(code >= last && code <= f.max, "{bits:#x}");
            last = code;
        }
        assert_eq!(last, f.max);
    }
}

#[test]
fn fp4_every_encoding_and_rounding_boundary() {
    let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for code in 0..16u8 {
        let want = value_by_definition(code.into(), 2, 1, 1);
        let got = Fp4::from_bits(code).to_f32();
        assert_eq!(f64::from(got).to_bits(), want.to_bits());
        assert_eq!(got.abs(), values[usize::from(code & 7)]);
        for rounding in [Fp4Rounding::NearestEven, Fp4Rounding::NearestAway] {
            assert_eq!(Fp4::from_f32(got, rounding).to_bits(), code);
        }
    }
    let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0];
    let away = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for (i, &tie) in ties.iter().enumerate() {
        for (rounding, at_tie) in [(Fp4Rounding::NearestEven, even[i]), (Fp4Rounding::NearestAway, away[i])] {
            for (x, want) in [(below(tie), values[i]), (tie, at_tie), (above(tie), values[i + 1])] {
                assert_eq!(Fp4::from_f32(x, rounding).to_f32().to_bits(), f32::to_bits(want), "{x}");
                assert_eq!(Fp4::from_f32(-x, rounding).to_f32().to_bits(), f32::to_bits(-want), "-{x}");
            }
        }
    }
    for rounding in [Fp4Rounding::NearestEven, Fp4Rounding::NearestAway] {
        for x in [6.0, 7.0, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!(Fp4::from_f32(x, rounding).to_bits(), 7);
            assert_eq!(Fp4::from_f32(-x, rounding).to_bits(), 15);
        }
        for x in [1e-30, f32::MIN_POSITIVE, f32::from_bits(1)] {
            assert_eq!(Fp4::from_f32(x, rounding).to_bits(), 0);
            assert_eq!(Fp4::from_f32(-x, rounding).to_bits(), 8);
        }
        assert_eq!(Fp4::from_f32(f32::NAN, rounding).to_bits(), 0);
    }
}

#[test]
fn fp4_pairs_have_the_even_index_in_the_low_nibble() {
    for byte in 0..=255u8 {
        let [even, odd] = Fp4x2(byte).unpack();
        assert_eq!((even.to_bits(), odd.to_bits()), (byte & 15, byte >> 4));
        assert_eq!(Fp4x2::new(even, odd), Fp4x2(byte));
        assert_eq!(Fp4x2::from_f32(Fp4x2(byte).to_f32(), Fp4Rounding::NearestEven), Fp4x2(byte));
    }
}

#[test]
fn e8m0_every_encoding() {
    for code in 0..=254u8 {
        let e = i32::from(code) - 127;
        let scale = E8M0(code);
        assert_eq!(f64::from(scale.to_f32()), 2f64.powi(e));
        assert_eq!(scale.exponent(), Some(e));
        assert_eq!(E8M0::from_exponent(e), scale);
        assert_eq!(E8M0::from_f32_exact(scale.to_f32()), Some(scale));
        assert_eq!(E8M0::from_f32_exact(-scale.to_f32()), None);
        assert_eq!(E8M0::from_f32_exact(above(scale.to_f32())), None);
    }
    assert!(E8M0::NAN.to_f32().is_nan());
    assert_eq!((E8M0::NAN.exponent(), E8M0::from_f32_exact(f32::NAN)), (None, Some(E8M0::NAN)));
    assert_eq!((E8M0::from_exponent(-500), E8M0::from_exponent(500)), (E8M0(0), E8M0(254)));
    for x in [0.0, -0.0, f32::INFINITY, f32::MAX, f32::from_bits(1), f32::from_bits(1 << 21)] {
        assert_eq!(E8M0::from_f32_exact(x), None, "{x:e}");
    }
}

/// All codes of a 16-bit float, its rounding borders from f32 and from f64.
fn check_half<T: Float>(exponent_bits: u32, mantissa_bits: u32, new: fn(u16) -> T, code: fn(T) -> u16) {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let infinity = ((1u16 << exponent_bits) - 1) << mantissa_bits;
    for bits in 0..=u16::MAX {
        let x = new(bits);
        if bits & 0x7fff > infinity {
            assert!(x.to_f32().is_nan() && x.to_f64().is_nan());
            assert!(T::from_f32(x.to_f32()).to_f32().is_nan() && T::from_f64(f64::NAN).to_f32().is_nan());
            continue;
        }
        let want = if bits & 0x7fff == infinity {
            if bits >> 15 == 0 { f64::INFINITY } else { f64::NEG_INFINITY }
        } else {
            value_by_definition(bits.into(), exponent_bits, mantissa_bits, bias)
        };
        assert_eq!(x.to_f64().to_bits(), want.to_bits(), "{bits:#x}");
        assert_eq!(f64::from(x.to_f32()).to_bits(), want.to_bits(), "{bits:#x}");
        assert_eq!(code(T::from_f32(x.to_f32())), bits);
        assert_eq!(code(T::from_f64(x.to_f64())), bits);
    }
    for bits in 0..infinity {
        let step = value_by_definition((bits + 1).into(), exponent_bits, mantissa_bits, bias);
        let tie = (new(bits).to_f64() + step) / 2.0;
        let even = bits + bits % 2;
        // Ties are exact in f32. A hair beside one, visible in f64 only, decides too.
        let hair = tie * 2f64.powi(-50);
        let narrow = tie as f32;
        for sign in [0u16, 0x8000] {
            let s = if sign == 0 { 1.0 } else { -1.0 };
            for (x, want) in [(tie - hair, bits), (tie, even), (tie + hair, bits + 1)] {
                assert_eq!(code(T::from_f64(s * x)), want | sign, "{x:e}");
            }
            for (x, want) in [(below(narrow), bits), (narrow, even), (above(narrow), bits + 1)] {
                assert_eq!(code(T::from_f32(s as f32 * x)), want | sign, "{x:e}");
            }
        }
    }
    for x in [f64::MAX, f64::INFINITY] {
        assert_eq!(code(T::from_f64(x)), infinity);
        assert_eq!(code(T::from_f64(-x)), infinity | 0x8000);
    }
    assert_eq!(code(T::from_f64(f64::MIN_POSITIVE)), 0);
    assert_eq!(code(T::from_f64(-f64::MIN_POSITIVE)), 0x8000);
}

#[test]
fn bf16_every_encoding_and_rounding_boundary() {
    check_half(8, 7, bf16::from_bits, bf16::to_bits);
}

#[test]
fn f16_every_encoding_and_rounding_boundary() {
    check_half(5, 10, f16::from_bits, f16::to_bits);
}

#[test]
fn dtypes_have_their_size_and_a_name_that_parses() {
    fn check<T: hk_core::Element>() {
        assert_eq!(T::DTYPE.size_bytes(), size_of::<T>());
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
    check::<i8>();
    check::<i16>();
    check::<i32>();
    check::<i64>();
    check::<u8>();
    check::<u32>();
    check::<Fp8E4M3Fnuz>();
    check::<Fp8E5M2Fnuz>();
    check::<Fp8E4M3>();
    check::<Fp8E5M2>();
    check::<Fp4x2>();
    check::<E8M0>();
    for d in DType::ALL {
        assert_eq!(d.name().parse(), Ok(d));
    }
    assert!("float".parse::<DType>().unwrap_err().to_string().contains("`float`, expected one of f32"));
}
