//! MX blocks: scales, elements, layouts, axes.

use crate::common::{bytes, f32s};
use hk_core::quant::{BlockRule, BlockScale, MxElement, ScaleLayout, shuffled_index, shuffled_len};
use hk_core::{E8M0, Float, Fp4, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E5M2, Layout, Stream, bf16, f16};
use hk_quant::{
    MxOptions, downcast_to_mxfp, dynamic_mxfp4_quant, shuffle_scales, unshuffle_scales, upcast_from_mxfp,
};
use hk_testkit::{
    self as kit, CallElement, Fill, Gpu, Place, Refusals, RowCase, Tensors, kind, proptest::prelude::*,
};

const MODES: [BlockScale; 3] = [BlockScale::Even, BlockScale::RoundUp, BlockScale::Floor];

/// Blocks of rows by a scalar model: bytes of the elements and of the scales.
fn model(x: &[f32], cols: usize, rule: BlockRule, encode: impl Fn(f32) -> u8) -> (Vec<u8>, Vec<u8>) {
    let (mut q, mut scales) = (Vec::new(), Vec::new());
    for block in x.chunks(cols).flat_map(|row| row.chunks(32)) {
        let finite = block.iter().all(|v| v.is_finite());
        let amax = block.iter().fold(0f32, |a, v| a.max(v.abs()));
        let scale = if finite { rule.scale(amax) } else { E8M0::NAN };
        let exact = |v: f32| (f64::from(v) / f64::from(scale.to_f32())) as f32;
        q.extend(block.iter().map(|&v| if finite { encode(exact(v)) } else { 0 }));
        scales.push(scale.0);
    }
    (q, scales)
}

fn pairs(codes: &[u8]) -> Vec<u8> {
    codes.chunks(2).map(|c| c[0] | c[1] << 4).collect()
}

/// Runs `dynamic_mxfp4_quant` with a scale layout. Returns the bytes of both outputs.
fn quantize<T: Float>(
    gpu: &Gpu,
    c: &RowCase<T>,
    mode: BlockScale,
    scale_layout: ScaleLayout,
) -> (Vec<u8>, Vec<u8>) {
    let blocks = c.cols.div_ceil(32);
    let place = match scale_layout {
        ScaleLayout::RowMajor => Place::contiguous([c.rows, blocks]),
        ScaleLayout::ColMajor => Place::new(Layout::with_strides([c.rows, blocks], [1, c.rows]).unwrap()),
        ScaleLayout::Shuffled950 => Place::contiguous([shuffled_len(c.rows, blocks).unwrap()]),
    };
    let x = gpu.upload(&c.x, c.place(0));
    let (mut q, mut scale) = (gpu.poisoned::<Fp4x2>([c.rows, c.cols / 2]), gpu.poisoned::<E8M0>(place));
    let options = MxOptions { mode, scale_layout };
    dynamic_mxfp4_quant(gpu.stream(), x.view(), q.view_mut(), scale.view_mut(), options).unwrap();
    gpu.assert_guards(&q);
    gpu.assert_guards(&scale);
    (bytes(&gpu.download(&q).data).to_vec(), bytes(&gpu.download(&scale).data).to_vec())
}

fn check<T: Float>(c: &RowCase<T>) {
    let blocks = c.cols.div_ceil(32);
    for gpu in kit::devices() {
        for mode in MODES {
            let encode = |v| Fp4::from_f32(v, Fp4Rounding::NearestEven).to_bits();
            let (codes, scales) = model(&f32s(&c.x), c.cols, BlockRule::fp4(mode, 0), encode);
            let want = (pairs(&codes), scales);
            assert!(
                quantize(&gpu, c, mode, ScaleLayout::RowMajor) == want,
                "{mode:?}, {c:?} on {}",
                gpu.spec()
            );
            assert!(
                quantize(&gpu, c, mode, ScaleLayout::ColMajor) == want,
                "{mode:?}, {c:?} on {}",
                gpu.spec()
            );
            let mut shuffled = vec![127; shuffled_len(c.rows, blocks).unwrap()];
            for (i, s) in want.1.iter().enumerate() {
                shuffled[shuffled_index(i / blocks, i % blocks, blocks)] = *s;
            }
            let got = quantize(&gpu, c, mode, ScaleLayout::Shuffled950);
            assert!(got == (want.0, shuffled), "{mode:?}, {c:?} on {}", gpu.spec());
        }
    }
}

/// With an even number of columns.
fn even<T: Float>(mut c: RowCase<T>) -> RowCase<T> {
    if c.cols % 2 == 1 {
        c = RowCase::new(c.rows, c.cols + 1, c.fill, c.seed, [(c.cols + 5, 1); 4]);
    }
    c
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bytes_are_those_of_the_scalar_model(c in kit::row_case::<bf16>(1..40, 1..=2000), d in kit::row_case::<f32>(1..40, 1..=1000)) {
        check(&even(c));
        check(&even(d));
    }

    #[test]
    fn any_axis(c in kit::row_case::<f16>(1..=70, 1..=300), down in any::<bool>()) {
        let mode = if down { BlockScale::DivFloor } else { BlockScale::RoundUp };
        let c = even(c);
        check_axis::<_, Fp4x2>(&c, mode);
        check_axis::<_, Fp8E4M3>(&c, mode);
        check_axis::<_, Fp8E5M2>(&c, mode);
    }
}

#[test]
fn every_width() {
    for (i, cols) in
        [2, 4, 20, 28, 32, 40, 64, 68, 128, 200, 256, 1536, 2880, 7168, 8194].into_iter().enumerate()
    {
        check(&RowCase::<bf16>::new(3, cols, Fill::Wide, i as u64, [(cols, 0); 4]));
    }
    for rows in [1, 33, 132, 256, 280] {
        check(&RowCase::<f16>::new(rows, 64, Fill::Wide, rows as u64, [(64, 0); 4]));
    }
}

/// Borders of the modes, ties, -0, subnormals, NaN and infinities: a block each.
#[test]
fn special_blocks() {
    let mut x = Vec::new();
    for m in [1.0f32, 1.4999, 1.5, 1.500_000_1, 1.749_999_9, 1.75, 1.9999] {
        for e in [-140, -130, -126, -1, 0, 3, 100, 127] {
            let amax = (f64::from(m) * 2f64.powi(e)) as f32;
            let s = 2f64.powi(e - 2);
            let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.249_999_99, 0.250_000_01];
            let mut block = [0.0f32; 32];
            block[0] = amax;
            for (i, t) in ties.iter().enumerate() {
                block[1 + i] = (t * s) as f32;
                block[20 + i] = (-t * s) as f32;
            }
            block[15] = -0.0;
            block[16] = 1e-45;
            x.extend(block.iter().map(|v| v.clamp(-amax, amax)));
        }
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut block = [1.0f32; 32];
        block[7] = bad;
        x.extend(block);
    }
    x.extend([0.0f32; 32]);
    x.extend([-0.0f32; 32]);
    let rows = x.len() / 32;
    let mut c = RowCase::<f32>::new(rows, 32, Fill::Normal, 1, [(32, 0); 4]);
    c.x = x;
    check(&c);
    for gpu in kit::devices() {
        let (q, s) = quantize(&gpu, &c, BlockScale::Even, ScaleLayout::RowMajor);
        assert_eq!(s[rows - 5..], [255, 255, 255, 0, 0]);
        assert!(q[(rows - 5) * 16..(rows - 1) * 16].iter().all(|b| *b == 0));
        assert!(q[(rows - 1) * 16..].iter().all(|b| *b == 0x88)); // zeros keep their sign
    }
}

/// The error bound of the modes that do not clip; a power-of-two factor moves to the scale; requantizing changes nothing.
#[test]
fn guarantees() {
    let c = RowCase::<f32>::new(20, 96, Fill::Normal, 5, [(96, 0); 4]);
    for gpu in kit::devices() {
        for mode in [BlockScale::Even, BlockScale::RoundUp] {
            let (q, s) = quantize(&gpu, &c, mode, ScaleLayout::RowMajor);
            let mut back = RowCase::<f32>::new(20, 96, Fill::Normal, 5, [(96, 0); 4]);
            for (i, &x) in c.x.iter().enumerate() {
                let scale = f64::from(E8M0(s[i / 32]).to_f32());
                let value = f64::from(Fp4::from_bits(q[i / 2] >> (4 * (i % 2))).to_f32()) * scale;
                let v = f64::from(x).abs() / scale;
                let bound = if v <= 2.0 {
                    0.25
                } else if v <= 4.0 {
                    0.5
                } else {
                    1.0
                };
                assert!((f64::from(x) - value).abs() <= bound * scale, "{x} became {value}");
                back.x[i] = value as f32;
            }
            let (q2, s2) = quantize(&gpu, &back, mode, ScaleLayout::RowMajor);
            for (i, &x) in back.x.iter().enumerate() {
                let scale = E8M0(s2[i / 32]).to_f32();
                assert_eq!(Fp4::from_bits(q2[i / 2] >> (4 * (i % 2))).to_f32() * scale, x);
            }
            let mut scaled = RowCase::<f32>::new(20, 96, Fill::Normal, 5, [(96, 0); 4]);
            scaled.x.iter_mut().for_each(|x| *x *= 32.0);
            let (q3, s3) = quantize(&gpu, &scaled, mode, ScaleLayout::RowMajor);
            assert_eq!(q3, q);
            assert!(s3.iter().zip(&s).all(|(a, b)| *a == b + 5));
        }
    }
}

/// `[outer, length, inner]` to rows along the axis.
fn turned<T: Copy>(x: &[T], [outer, length, inner]: [usize; 3]) -> Vec<T> {
    let place = |i: usize| (i / (length * inner) * length + i % length) * inner + i / length % inner;
    (0..outer * length * inner).map(|i| x[place(i)]).collect()
}

/// Downcast along each axis, contiguous and strided, against the scalar model; and back.
fn check_axis<T: Float, E: MxElement>(c: &RowCase<T>, mode: BlockScale) {
    let (max, mantissa) = E::RANGE;
    let rule = BlockRule::new(mode, max, mantissa, 1);
    let encode = |v: f32| match E::PER_ELEMENT {
        2 => Fp4::from_f32(v, Fp4Rounding::NearestAway).to_bits(),
        _ if mantissa == 3 => Fp8E4M3::from_f32_saturating(v).0,
        _ => Fp8E5M2::from_f32_saturating(v).0,
    };
    let decode = |code: u8| match E::PER_ELEMENT {
        2 => Fp4::from_bits(code).to_f32(),
        _ if mantissa == 3 => Fp8E4M3(code).to_f32(),
        _ => Fp8E5M2(code).to_f32(),
    };
    let per = E::PER_ELEMENT;
    for axis in [0isize, -1] {
        let at = if axis == 0 { 0 } else { 1 };
        let length = c.shape()[at];
        if !length.is_multiple_of(per) {
            continue;
        }
        let around = if at == 0 { [1, c.rows, c.cols] } else { [c.rows, c.cols, 1] };
        let (codes, scales) = model(&f32s(&turned(&c.x, around)), length, rule, encode);
        let mut shape = c.shape();
        shape[at] = length / per;
        let mut blocks = c.shape();
        blocks[at] = length.div_ceil(32);
        let in_rows = |b: &[u8], n: usize| turned(b, if at == 0 { [1, n, c.cols] } else { [c.rows, n, 1] });
        for gpu in kit::devices() {
            let x = gpu.upload(&c.x, c.place(0));
            let (mut q, mut scale) = (gpu.poisoned::<E>(shape), gpu.poisoned::<E8M0>(blocks));
            downcast_to_mxfp(gpu.stream(), x.view(), q.view_mut(), scale.view_mut(), axis, mode).unwrap();
            gpu.assert_guards(&q);
            gpu.assert_guards(&scale);
            let got = in_rows(bytes(&gpu.download(&q).data), shape[at]);
            let got_scales = in_rows(bytes(&gpu.download(&scale).data), blocks[at]);
            assert_eq!(got_scales, scales, "scales, axis {axis}, {c:?}");
            let want = if per == 2 { pairs(&codes) } else { codes.clone() };
            assert_eq!(got, want, "{} along axis {axis}, {c:?} on {}", E::DTYPE, gpu.spec());

            let mut out = gpu.poisoned::<T>(c.place(1));
            upcast_from_mxfp(gpu.stream(), q.view(), scale.view(), out.view_mut(), axis).unwrap();
            gpu.assert_guards(&out);
            let got = turned(&gpu.download(&out).data, around);
            for (i, got) in got.iter().enumerate() {
                let s = scales[i / length * length.div_ceil(32) + i % length / 32];
                let want = T::from_f32(decode(codes[i]) * E8M0(s).to_f32());
                let same = got.to_f32().to_bits() == want.to_f32().to_bits()
                    || (got.to_f32().is_nan() && want.to_f32().is_nan());
                assert!(same, "{got:?}, not {want:?}");
            }
        }
    }
}

/// Every scale with every element value.
#[test]
fn upcast_is_exact() {
    fn run<T: Float, E: MxElement>(q: &[E], decode: impl Fn(usize) -> f32) {
        let n = 32 / E::PER_ELEMENT;
        let rows = q.len() / n;
        for gpu in kit::devices() {
            let all: Vec<E> = (0..256).flat_map(|_| q.to_vec()).collect();
            let scales: Vec<E8M0> = (0..256 * rows).map(|i| E8M0((i / rows) as u8)).collect();
            let (q, s) = (gpu.upload(&all, [256 * rows, n]), gpu.upload(&scales, [256 * rows, 1]));
            let mut out = gpu.poisoned::<T>([256 * rows, 32]);
            upcast_from_mxfp(gpu.stream(), q.view(), s.view(), out.view_mut(), 1).unwrap();
            for (i, got) in gpu.download(&out).iter().enumerate() {
                let want = T::from_f32(decode(i % (rows * 32)) * scales[i / 32].to_f32());
                let same = got.to_f32().to_bits() == want.to_f32().to_bits()
                    || (got.to_f32().is_nan() && want.to_f32().is_nan());
                assert!(same, "element {i}: {got:?}, not {want:?}");
            }
        }
    }
    let fp4: Vec<Fp4x2> = (0..16u8).map(|i| Fp4x2(i | (15 - i) << 4)).collect();
    run::<bf16, _>(&fp4, |i| fp4[i / 2].to_f32()[i % 2]);
    run::<f16, _>(&fp4, |i| fp4[i / 2].to_f32()[i % 2]);
    let e4m3: Vec<Fp8E4M3> = (0..=255).map(Fp8E4M3).collect();
    run::<bf16, _>(&e4m3, |i| e4m3[i].to_f32());
    let e5m2: Vec<Fp8E5M2> = (0..=255).map(Fp8E5M2).collect();
    run::<f16, _>(&e5m2, |i| e5m2[i].to_f32());
}

#[test]
fn scales_are_shuffled_and_back() {
    for (rows, blocks) in [(1, 1), (31, 7), (300, 9), (256, 8), (40, 48), (513, 272)] {
        let plain: Vec<E8M0> = (0..rows * blocks).map(|i| E8M0((i * 7 % 251) as u8)).collect();
        let len = shuffled_len(rows, blocks).unwrap();
        for gpu in kit::devices() {
            let from = gpu.upload(&plain, [rows, blocks]);
            let mut shuffled = gpu.poisoned::<E8M0>([len]);
            shuffle_scales(gpu.stream(), from.view(), shuffled.view_mut()).unwrap();
            gpu.assert_guards(&shuffled);
            let got = gpu.download(&shuffled);
            let mut want = vec![E8M0(127); len];
            for (i, s) in plain.iter().enumerate() {
                want[shuffled_index(i / blocks, i % blocks, blocks)] = *s;
            }
            assert_eq!(got.data, want);
            // Back, column-major.
            let layout = Layout::with_strides([rows, blocks], [1, rows + 1]).unwrap();
            let mut back = gpu.poisoned::<E8M0>(Place::new(layout));
            unshuffle_scales(gpu.stream(), shuffled.view(), back.view_mut()).unwrap();
            gpu.assert_guards(&back);
            assert_eq!(gpu.download(&back).data, plain);
        }
    }
}

/// Shuffled scales begin at any address.
#[test]
fn shuffled_scales_have_any_alignment() {
    let (rows, blocks) = (70, 16);
    let c = RowCase::<bf16>::new(rows, 32 * blocks, Fill::Wide, 3, [(32 * blocks, 0); 4]);
    let len = shuffled_len(rows, blocks).unwrap();
    let options = MxOptions { mode: BlockScale::Even, scale_layout: ScaleLayout::Shuffled950 };
    for gpu in kit::devices() {
        let (_, want) = quantize(&gpu, &c, options.mode, options.scale_layout);
        let (_, plain) = quantize(&gpu, &c, options.mode, ScaleLayout::RowMajor);
        let place = Place::contiguous([len]).shifted(3);
        let x = gpu.upload(&c.x, c.shape());
        let (mut q, mut scale) = (gpu.poisoned::<Fp4x2>([rows, 16 * blocks]), gpu.poisoned::<E8M0>(&place));
        dynamic_mxfp4_quant(gpu.stream(), x.view(), q.view_mut(), scale.view_mut(), options).unwrap();
        gpu.assert_guards(&scale);
        assert_eq!(bytes(&gpu.download(&scale).data), want);
        let from: Vec<E8M0> = plain.iter().map(|b| E8M0(*b)).collect();
        let (from, mut shuffled) = (gpu.upload(&from, [rows, blocks]), gpu.poisoned::<E8M0>(&place));
        shuffle_scales(gpu.stream(), from.view(), shuffled.view_mut()).unwrap();
        gpu.assert_guards(&shuffled);
        assert_eq!(bytes(&gpu.download(&shuffled).data), want);
    }
}

#[test]
fn errors_of_dynamic_mxfp4_quant() {
    let operator = |stream: &Stream, tensors: &mut Tensors, options| {
        let x = tensors.input::<bf16>("x");
        dynamic_mxfp4_quant(stream, x, tensors.output("q"), tensors.output("scale"), options)
    };
    Refusals::new(MxOptions::default(), operator)
        .input::<bf16>("x", [2, 64])
        .output::<Fp4x2>("q", [2, 32])
        .output::<E8M0>("scale", [2, 2])
        .accepts(|_| {})
        .refuses(kind!(Argument), &["dynamic_mxfp4_quant: mode", "DivFloor"], |call| {
            call.options.mode = BlockScale::DivFloor;
        })
        .refuses(kind!(Shape), &["x", "[2, 63]", "even"], |call| call.shape("x", [2, 63]))
        .refuses(kind!(Shape), &["q", "[2, 32]", "[2, 16]"], |call| call.shape("x", [2, 32]))
        .refuses(kind!(Shape), &["scale", "[2, 3]", "[2, 2]"], |call| call.shape("scale", [2, 3]))
        .refuses(kind!(Stride), &["scale", "ColMajor"], |call| {
            call.options.scale_layout = ScaleLayout::ColMajor;
        })
        .refuses(kind!(Shape), &["scale", "[2047]", "[2048]"], |call| {
            call.options.scale_layout = ScaleLayout::Shuffled950;
            call.shape("scale", [2047]);
        })
        .refuses_other_devices();
}

/// The tensors of either direction, `x` of type `T`.
fn mxfp<'f, T: CallElement + Float>(down: bool) -> Refusals<'f, (isize, BlockScale)> {
    let operator = move |stream: &Stream, tensors: &mut Tensors, (axis, mode)| {
        if down {
            let (q, scale) = (tensors.output::<Fp4x2>("q"), tensors.output("scale"));
            downcast_to_mxfp(stream, tensors.input::<T>("x"), q, scale, axis, mode)
        } else {
            let (q, scale) = (tensors.input::<Fp4x2>("q"), tensors.input("scale"));
            upcast_from_mxfp(stream, q, scale, tensors.output::<T>("out"), axis)
        }
    };
    let table = Refusals::new((1, BlockScale::RoundUp), operator);
    if down {
        table.input::<T>("x", [2, 64]).output::<Fp4x2>("q", [2, 32]).output::<E8M0>("scale", [2, 2])
    } else {
        table.input::<Fp4x2>("q", [2, 32]).input::<E8M0>("scale", [2, 2]).output::<T>("out", [2, 64])
    }
}

#[test]
fn errors_of_mxfp() {
    mxfp::<bf16>(true)
        .accepts(|_| {})
        .accepts(|call| call.options.0 = -1)
        .refuses(kind!(Argument), &["downcast_to_mxfp: axis", "2"], |call| call.options.0 = 2)
        .refuses(kind!(Argument), &["axis", "-3"], |call| call.options.0 = -3)
        .refuses(kind!(Argument), &["mode", "Even"], |call| call.options.1 = BlockScale::Even)
        .refuses(kind!(Shape), &["x", "even length of axis 1"], |call| call.shape("x", [2, 63]))
        .refuses(kind!(Shape), &["q", "[2, 32]", "[1, 64]"], |call| call.options.0 = 0)
        .refuses(kind!(Shape), &["scale", "[2, 3]", "[2, 2]"], |call| call.shape("scale", [2, 3]))
        .refuses(kind!(Empty), &["x", "[2, 0]"], |call| call.shape("x", [2, 0]))
        .refuses_other_devices();
    mxfp::<f32>(true).refuses(kind!(DType), &["x", "f32", "bf16, f16"], |_| {});
    mxfp::<bf16>(false)
        .accepts(|_| {})
        .refuses(kind!(Shape), &["upcast_from_mxfp: q", "[2, 32]", "[2, 31]"], |call| {
            call.shape("out", [2, 62])
        })
        .refuses(kind!(Argument), &["upcast_from_mxfp: axis", "2"], |call| call.options.0 = 2)
        .refuses_other_devices();
    mxfp::<f32>(false).refuses(kind!(DType), &["out", "f32", "bf16, f16"], |_| {});
}

#[test]
fn errors_of_shuffled_scales() {
    let shuffle = |stream: &Stream, tensors: &mut Tensors, ()| {
        shuffle_scales(stream, tensors.input("plain"), tensors.output("shuffled"))
    };
    Refusals::new((), shuffle)
        .input::<E8M0>("plain", [2, 2])
        .output::<E8M0>("shuffled", [2048])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["shuffle_scales: shuffled", "[100]", "[2048]"], |call| {
            call.shape("shuffled", [100])
        })
        .refuses(kind!(Empty), &["plain"], |call| call.shape("plain", [2, 0]))
        .refuses(kind!(Stride), &["shuffled"], |call| call.strides("shuffled", [2]))
        .refuses_other_devices()
        .refuses_overlaps();
    let unshuffle = |stream: &Stream, tensors: &mut Tensors, ()| {
        unshuffle_scales(stream, tensors.input("shuffled"), tensors.output("plain"))
    };
    Refusals::new((), unshuffle)
        .input::<E8M0>("shuffled", [2048])
        .output::<E8M0>("plain", [2, 2])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["unshuffle_scales: shuffled", "[100]", "[2048]"], |call| {
            call.shape("shuffled", [100])
        })
        .refuses_other_devices()
        .refuses_overlaps();
}
