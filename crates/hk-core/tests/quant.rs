//! The device's conversions against the host's: every code, every tie and its neighbours, every bf16.
#![cfg(feature = "emu")]

use crate::common;
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{
    BlockRule, BlockScale, QuantFormat, QuantType, Quantized, group_scale, linear_scale, shuffled_index,
    shuffled_len,
};
use hk_core::{
    Arch, CodeObjects, Device, E8M0, Element, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2,
    GlobalLayout, KernelRef, LaunchConfig, Stream,
};
use std::sync::LazyLock;

static QUANT: LazyLock<&'static CodeObjects> = LazyLock::new(|| common::compile("quant"));

/// The parameters of the kernels in `tests/hip/quant.hip`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    x: GlobalLayout,
    y: GlobalLayout,
    format: QuantFormat,
    rule: BlockRule,
    pad: u32,
}

const I8: QuantFormat = QuantFormat::new(QuantType::I8);
const FP8: QuantFormat = QuantFormat::new(QuantType::Fp8);
const FNUZ: QuantFormat = QuantFormat::new(QuantType::Fp8Fnuz);
const E5M2: QuantFormat = QuantFormat::new(QuantType::Fp8E5M2);
const RULE: BlockRule = BlockRule::fp4(BlockScale::Even, 0);

fn streams() -> impl Iterator<Item = Stream> {
    Arch::AMD.iter().map(|a| Device::open(&format!("emu:{a}")).unwrap().create_stream().unwrap())
}

/// Runs a kernel whose threads make `made` elements each of `taken`.
fn run<X: Element, Y: Element>(
    stream: &Stream,
    symbol: &str,
    x: &[X],
    (taken, made): (usize, usize),
    format: QuantFormat,
    rule: BlockRule,
) -> Vec<Y> {
    let threads = x.len().div_ceil(taken).next_multiple_of(64);
    let mut padded = x.to_vec();
    padded.resize(threads * taken, X::zeroed());
    let x_buffer = stream.upload(&padded).unwrap();
    let mut y = stream.alloc_zeroed::<Y>(threads * made).unwrap();
    let kernel = stream.kernel(KernelRef::new(*QUANT, common::leak(symbol.to_owned()))).unwrap();
    let mut launch = stream.launch("quant");
    let x_view = launch.input("x", &x_buffer.view([padded.len()]).unwrap()).unwrap();
    let y_view = launch.output("y", &mut y.view_mut([threads * made]).unwrap()).unwrap();
    let params = Params { x: x_view, y: y_view, format, rule, pad: 0 };
    // SAFETY: the parameters are the kernel's, and both tensors have what its threads access.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(threads / 64), &params) }.unwrap();
    let mut y = stream.download(&y).unwrap();
    y.truncate(x.len() * made / taken);
    y
}

/// Every bf16; every value of a format and every tie between two, with the f32 next to it on both sides; powers of two;
/// all with both signs.
fn inputs(values: impl IntoIterator<Item = f32>) -> Vec<f32> {
    let mut sorted: Vec<f32> = values.into_iter().filter(|v| v.is_finite() && *v >= 0.0).collect();
    sorted.sort_by(f32::total_cmp);
    let ties: Vec<f32> = sorted.windows(2).map(|w| (w[0] + w[1]) / 2.0).collect();
    let beyond = sorted.last().map_or(0.0, |last| 2.0 * last - ties.last().copied().unwrap_or(0.0));
    let powers = (1..255u32).flat_map(|e| [e << 23, (e << 23) | 0x40_0000, (e << 23) | 0x20_0000]);
    let points = sorted.iter().chain(&ties).chain([&beyond]).map(|v| v.to_bits()).chain(powers);
    let near = points.flat_map(|b| [b.saturating_sub(1), b, b + 1]);
    let bf16s = (0..0x8000u32).map(|b| b << 16);
    let nans = [0x7f80_0001, 0x7fff_ffff, 0x7fc0_0000, 1, 0x7f_ffff];
    near.chain(bf16s).chain(nans).flat_map(|b| [b, b | 1 << 31]).map(f32::from_bits).collect()
}

#[test]
fn quantized_values_match_the_host() {
    fn check<Q: Element>(format: QuantFormat, encode: fn(f32) -> u8, decode: fn(u8) -> f32) {
        let x = inputs((0..=255).map(decode));
        let want: Vec<u8> = x.iter().map(|&x| encode(x)).collect();
        for stream in streams() {
            let words: Vec<u32> = run(&stream, "quant_encode", &x, (4, 1), format, RULE);
            let got: &[u8] = bytemuck::cast_slice(&words);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let at = format!("{:e} ({:#x}) to {}", x[i], x[i].to_bits(), Q::DTYPE);
                assert_eq!(got, want, "{at} on {}", stream.device().spec());
            }
            let all: Vec<u8> = (0..=255).collect();
            let words: &[u32] = bytemuck::cast_slice(&all);
            let got: Vec<f32> = run(&stream, "quant_decode", words, (1, 4), format, RULE);
            for (code, got) in (0..=255u8).zip(got) {
                let want = decode(code);
                let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(same, "{code:#x} of {}: {got}, not {want}", Q::DTYPE);
            }
        }
    }
    check::<i8>(I8, |x| i8::from_f32(x) as u8, |c| f32::from(c as i8));
    check::<Fp8E4M3>(FP8, |x| <Fp8E4M3 as Quantized>::from_f32(x).0, |c| Fp8E4M3(c).to_f32());
    check::<Fp8E4M3Fnuz>(FNUZ, |x| <Fp8E4M3Fnuz as Quantized>::from_f32(x).0, |c| Fp8E4M3Fnuz(c).to_f32());
    check::<Fp8E5M2>(E5M2, |x| Fp8E5M2::from_f32_saturating(x).0, |c| Fp8E5M2(c).to_f32());
}

#[test]
fn fp4_quantized_values_match_the_host() {
    let values = (0..8).map(|c| hk_core::Fp4::from_bits(c).to_f32());
    let mut x = inputs(values);
    x.retain(|x| !x.is_nan());
    x.resize(x.len().next_multiple_of(8), 0.0);
    for stream in streams() {
        for (symbol, rounding) in [
            ("quant_encode_fp4_even", Fp4Rounding::NearestEven),
            ("quant_encode_fp4_away", Fp4Rounding::NearestAway),
        ] {
            let words: Vec<u32> = run(&stream, symbol, &x, (8, 1), I8, RULE);
            let got: &[Fp4x2] = bytemuck::cast_slice(&words);
            for (pair, got) in x.chunks_exact(2).zip(got) {
                let want = Fp4x2::from_f32([pair[0], pair[1]], rounding);
                assert_eq!(*got, want, "{pair:?}, {rounding:?} on {}", stream.device().spec());
            }
        }
        let all: Vec<u8> = (0..=255).collect();
        let got: Vec<f32> =
            run(&stream, "quant_decode_fp4", bytemuck::cast_slice::<_, u32>(&all), (1, 8), I8, RULE);
        for (code, got) in all.iter().zip(got.chunks_exact(2)) {
            let want = Fp4x2(*code).to_f32();
            assert_eq!([got[0].to_bits(), got[1].to_bits()], want.map(f32::to_bits), "{code:#x}");
        }
    }
}

/// Rounding without codes gives what the codes stand for; bf16 holds a quarter of every value of every scale.
#[test]
fn fp4_values_match_their_encodings() {
    let mut x = inputs((0..8).map(|c| hk_core::Fp4::from_bits(c).to_f32()));
    x.retain(|x| !x.is_nan());
    x.resize(x.len().next_multiple_of(8), 0.0);
    let all: Vec<u8> = (0..=255).collect();
    for stream in streams() {
        let got: Vec<f32> = run(&stream, "quant_round_fp4", &x, (8, 8), I8, RULE);
        for (pair, got) in x.chunks_exact(2).zip(got.chunks_exact(2)) {
            let want = Fp4x2::from_f32([pair[0], pair[1]], Fp4Rounding::NearestEven).to_f32();
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(got), bits(&want), "{pair:?} on {}", stream.device().spec());
        }
        for scale in 0..=255u8 {
            let rule = BlockRule::new(BlockScale::Even, 6.0, 1, scale);
            let words = bytemuck::cast_slice::<_, u32>(&all);
            let got: Vec<f32> = run(&stream, "quant_decode_fp4_block", words, (4, 32), I8, rule);
            for (code, got) in all.iter().zip(got.chunks_exact(2)) {
                for (got, value) in got.iter().zip(Fp4x2(*code).to_f32()) {
                    let want = f64::from(value) * (f64::from(scale) - 129.0).exp2();
                    let same = if scale == 255 { got.is_nan() } else { f64::from(*got) == want };
                    assert!(same, "{value} by scale {scale}: {got:e} on {}", stream.device().spec());
                }
            }
        }
    }
}

/// Whether `2^(code - 127) * max >= amax`, exactly.
fn covers(code: i32, max: f64, amax: f64) -> bool {
    2f64.powi(code - 127) * max >= amax
}

#[test]
fn block_scales_follow_their_definitions() {
    let mut x = inputs([6.0, 240.0, 448.0, 57344.0, 127.0, 1.75, 1.9375, 1.875]);
    x.truncate(x.len() / 3 * 3);
    let elements = [(6.0f64, 1, 2), (448.0, 3, 8), (240.0, 3, 7), (57344.0, 2, 15)];
    for (max, mantissa, max_exponent) in elements {
        for mode in [BlockScale::Even, BlockScale::RoundUp, BlockScale::Floor, BlockScale::DivFloor] {
            for least in [0, 1] {
                let rule = BlockRule::new(mode, max as f32, mantissa, least);
                for &v in x.iter().filter(|v| v.is_finite()) {
                    let amax = f64::from(v.abs());
                    let scale = rule.scale(v);
                    if amax == 0.0 {
                        assert_eq!(scale, E8M0(0));
                        continue;
                    }
                    let e = (v.abs().max(f32::MIN_POSITIVE).to_bits() >> 23) as i32 - 127;
                    let m = amax / 2f64.powi(e);
                    let exponent = match mode {
                        // Up at the middle between the largest mantissa and 2.
                        BlockScale::Even => {
                            e - max_exponent + i32::from(m >= 2.0 - 2f64.powi(-1 - mantissa as i32))
                        }
                        BlockScale::RoundUp => {
                            (0..=254).find(|&b| covers(b, max, amax)).map_or(0, |b| b - 127)
                        }
                        BlockScale::Floor => e - max_exponent,
                        BlockScale::DivFloor => (0..=254)
                            .rev()
                            .find(|&b| 2f64.powi(b - 127) * max <= amax)
                            .map_or(-127, |b| b - 127),
                    };
                    let want = (exponent + 127).clamp(i32::from(least), 254) as u8;
                    assert_eq!(scale, E8M0(want), "{v:e}, {mode:?}, largest {max}");
                }
                assert_eq!(rule.scale(f32::NAN), E8M0::NAN);
                assert_eq!(rule.scale(f32::NEG_INFINITY), E8M0::NAN);
                for stream in streams() {
                    let got: Vec<f32> = run(&stream, "quant_block_scale", &x, (1, 3), I8, rule);
                    for (x, got) in x.iter().zip(got.chunks_exact(3)) {
                        let want = rule.scale(*x);
                        assert_eq!(got[0], f32::from(want.0), "{x:e}, {mode:?}");
                        assert!(
                            got[1] == want.to_f32() || (got[1].is_nan() && want == E8M0::NAN),
                            "{want:?}"
                        );
                        assert!(
                            want == E8M0::NAN || f64::from(got[1]) * f64::from(got[2]) == 1.0,
                            "{want:?}"
                        );
                    }
                }
            }
        }
    }
    assert_eq!(E8M0(0).to_f32(), 2f32.powi(-127));
}

#[test]
fn largest_magnitudes_and_linear_scales_match_the_host() {
    let mut x = inputs([0.0, 1e-30, 1e-10, 127.0]);
    x.truncate(x.len() / 2 * 2);
    for stream in streams() {
        for format in [I8, FP8, FNUZ] {
            let got: Vec<f32> = run(&stream, "quant_linear_scale", &x, (2, 4), format, RULE);
            for (pair, got) in x.chunks_exact(2).zip(got.chunks_exact(4)) {
                let finite = pair.iter().filter(|v| v.is_finite());
                let amax = finite.fold(0f32, |a, v| a.max(v.abs()));
                let scale = linear_scale(amax, format);
                let want = [amax, scale, 1.0 / scale, group_scale(amax, format)];
                assert_eq!(got, want, "{pair:?} on {}", stream.device().spec());
            }
        }
    }
}

#[test]
fn shuffled_scales_lie_one_to_one() {
    for (rows, groups) in [(1, 1), (33, 9), (256, 8), (300, 45)] {
        let len = shuffled_len(rows, groups).unwrap();
        assert_eq!(len, rows.next_multiple_of(256) * groups.next_multiple_of(8));
        let mut seen = vec![false; len];
        for row in 0..rows.next_multiple_of(256) {
            for group in 0..groups.next_multiple_of(8) {
                let at = shuffled_index(row, group, groups);
                assert!(!std::mem::replace(&mut seen[at], true), "({row}, {group}) lies on another");
            }
        }
    }
    assert_eq!(shuffled_index(17, 5, 8), 64 + 4 + 2 + 1);
    assert_eq!(shuffled_len(usize::MAX, 1), None);
}
