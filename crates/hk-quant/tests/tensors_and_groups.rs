//! The quantizers with one scale for a tensor, those of groups, and the two encodings of fp8.

mod common;

use common::{assert_codes, assert_guarantees, bytes, f32s, per_token};
use hk_core::quant::{BlockRule, BlockScale, GroupSize, Quantized, group_scale};
use hk_core::{Device, E8M0, Float, Fp8E4M3, Fp8E4M3Fnuz, Layout, bf16, f16};
use hk_quant::{
    GroupOptions, GroupScale, downcast_to_static_fp8, fp8_fnuz_to_ocp, fp8_ocp_to_fnuz, group_quant,
    per_tensor_quant_dynamic, per_tensor_quant_static,
};
use hk_testkit::{self as kit, Array, Fill, Gpu, Place, RowCase, assert_error, kind, proptest::prelude::*};

fn static_quant<T: Float, Q: Quantized>(gpu: &Gpu, c: &RowCase<T>, scale: f32, divide: bool) -> Array<Q> {
    let (x, s, mut q) = (gpu.upload(&c.x, c.place(0)), gpu.upload(&[scale], [1]), gpu.poisoned(c.place(1)));
    if divide {
        downcast_to_static_fp8(gpu.stream(), x.view(), s.view(), q.view_mut()).unwrap();
    } else {
        per_tensor_quant_static(gpu.stream(), x.view(), s.view(), q.view_mut()).unwrap();
    }
    gpu.assert_guards(&q);
    gpu.download(&q)
}

fn dynamic<T: Float, Q: Quantized>(gpu: &Gpu, c: &RowCase<T>) -> (Array<Q>, f32) {
    let (x, mut q) = (gpu.upload(&c.x, c.place(0)), gpu.poisoned(c.place(1)));
    let mut scale = gpu.poisoned::<f32>([1]);
    per_tensor_quant_dynamic(gpu.stream(), x.view(), q.view_mut(), scale.view_mut()).unwrap();
    gpu.assert_guards(&q);
    gpu.assert_guards(&scale);
    (gpu.download(&q), gpu.download(&scale)[0])
}

/// The scale is the largest of those of rows that are not zero; static quantization with it gives the same codes.
fn check_dynamic<T: Float, Q: Quantized>(c: &RowCase<T>) {
    for gpu in kit::devices() {
        let (q, scale) = dynamic::<T, Q>(&gpu, c);
        let rows = per_token::<T, Q>(&gpu, &gpu.upload(&c.x, c.shape()), c.shape(), None);
        let zero = |row: usize| {
            !c.x[row * c.cols..(row + 1) * c.cols].iter().any(|x| x.to_f32() != 0.0 && x.to_f32().is_finite())
        };
        let scales = rows.scale.iter().enumerate().filter(|(row, _)| !zero(*row)).map(|(_, s)| *s);
        assert_eq!(scale, scales.reduce(f32::max).unwrap_or(1.0), "{c:?}");
        assert_codes(&q.data, &f32s(&c.x), |_| scale);
        kit::assert_bits(&static_quant::<T, Q>(&gpu, c, scale, false), &q);
    }
}

fn with_values<T: Float>(x: Vec<T>, mut case: RowCase<T>) -> RowCase<T> {
    case.x = x;
    case
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn one_scale_for_a_tensor(c in kit::row_case::<bf16>(1..60, 1..=9000), d in kit::row_case::<f32>(1..60, 1..=5000)) {
        check_dynamic::<_, i8>(&c);
        check_dynamic::<_, Fp8E4M3>(&c);
        check_dynamic::<_, Fp8E4M3Fnuz>(&d);
    }

    /// The scale can be any number, negative ones too.
    #[test]
    fn a_given_scale(c in kit::row_case::<f16>(1..40, 1..=5000), scale in -0.1f32..0.1) {
        for gpu in kit::devices() {
            for s in [scale, f32::INFINITY, 1e-38, -3e38] {
                assert_codes(&static_quant::<_, Fp8E4M3>(&gpu, &c, s, false).data, &f32s(&c.x), |_| s);
                assert_codes(&static_quant::<_, i8>(&gpu, &c, s, false).data, &f32s(&c.x), |_| s);
            }
        }
    }

    /// A true division.
    #[test]
    fn downcast_divides(c in kit::row_case::<f32>(1..40, 1..=3000), scale in 0.001f32..10.0) {
        fn run<Q: Quantized>(c: &RowCase<f32>, scale: f32) {
            for gpu in kit::devices() {
                let q = static_quant::<_, Q>(&gpu, c, scale, true);
                let want: Vec<Q> = c.x.iter().map(|x| Q::from_f32(x / scale)).collect();
                assert_eq!(bytes(&q.data), bytes(&want));
            }
        }
        run::<Fp8E4M3>(&c, scale);
        run::<Fp8E4M3Fnuz>(&c, scale);
    }
}

/// Quotients at ties between codes and beside them, of scales that leave the range of fast division too.
#[test]
fn quotients_round_once() {
    fn run<Q: Quantized>(gpu: &Gpu, scale: f32, code: impl Fn(u8) -> f32) {
        let ties = (0..0x7e).map(|i| (code(i) + code(i + 1)) * 0.5 * scale);
        let near =
            ties.flat_map(|x| (-2..=2).map(move |d| f32::from_bits(x.to_bits().wrapping_add_signed(d))));
        let special = [0.0, 1e-45, 1e-38, 1e9, 3e38, f32::INFINITY, f32::NAN];
        let values: Vec<f32> = near.chain(special).flat_map(|x| [x, -x]).collect();
        let cols = values.len();
        let want: Vec<Q> = values.iter().map(|x| Q::from_f32(x / scale)).collect();
        let case = with_values(values, RowCase::new(1, cols, Fill::Normal, 1, [(cols, 0); 4]));
        assert_eq!(bytes(&static_quant::<_, Q>(gpu, &case, scale, true).data), bytes(&want), "scale {scale}");
    }
    for gpu in kit::devices() {
        for scale in
            [0.0137, 3.3e-5, 1.000_000_1, 0.999_999_94, 7.7e20, 1e-30, 1e-24, 1e24, 1e-38, 2e38, 0.0, -0.25]
        {
            run::<Fp8E4M3>(&gpu, scale, |i| Fp8E4M3(i).to_f32());
            run::<Fp8E4M3Fnuz>(&gpu, scale, |i| Fp8E4M3Fnuz(i).to_f32());
        }
        run::<Fp8E4M3>(&gpu, f32::INFINITY, |i| Fp8E4M3(i).to_f32());
        run::<Fp8E4M3>(&gpu, f32::NAN, |i| Fp8E4M3(i).to_f32());
    }
}

#[test]
fn scales_that_are_no_numbers_do_no_harm() {
    let c = RowCase::<f32>::new(3, 50, Fill::Normal, 1, [(50, 0); 4]);
    for gpu in kit::devices() {
        let q = static_quant::<_, Fp8E4M3>(&gpu, &c, f32::NAN, false);
        assert!(q.iter().all(|q| q.0 == 0x7f));
        let q = static_quant::<_, Fp8E4M3>(&gpu, &c, 0.0, false);
        assert!(q.iter().zip(&c.x).all(|(q, x)| *x == 0.0 || q.to_f32() == 448f32.copysign(*x)));
        // Values around the largest, and -0, in either encoding.
        let values = [239.0, 240.0, 241.0, 300.0, -0.0, 448.0, 449.0, 1e9].repeat(6);
        let edge = with_values(values, RowCase::new(3, 16, Fill::Normal, 1, [(16, 0); 4]));
        let fnuz: Vec<f32> =
            static_quant::<_, Fp8E4M3Fnuz>(&gpu, &edge, 1.0, true).iter().map(|q| q.to_f32()).collect();
        assert_eq!(fnuz[..8], [240.0, 240.0, 240.0, 240.0, 0.0, 240.0, 240.0, 240.0]);
        assert_eq!(fnuz[4].to_bits(), 0);
        let ocp: Vec<f32> =
            static_quant::<_, Fp8E4M3>(&gpu, &edge, 1.0, true).iter().map(|q| q.to_f32()).collect();
        assert_eq!(ocp[..8], [240.0, 240.0, 240.0, 288.0, 0.0, 448.0, 448.0, 448.0]);
        assert_eq!(ocp[4].to_bits(), 1 << 31);
    }
}

#[test]
fn zeros_and_no_rows_have_the_scale_one() {
    for gpu in kit::devices() {
        let zeros = with_values(vec![bf16::ZERO; 600], RowCase::new(3, 200, Fill::Normal, 1, [(200, 0); 4]));
        let (q, scale) = dynamic::<_, Fp8E4M3>(&gpu, &zeros);
        assert_eq!((scale, q.iter().all(|q| q.0 == 0)), (1.0, true));
        let (x, mut q) = (gpu.upload::<bf16>(&[], [0, 200]), gpu.poisoned::<i8>([0, 200]));
        let mut scale = gpu.poisoned::<f32>([1]);
        per_tensor_quant_dynamic(gpu.stream(), x.view(), q.view_mut(), scale.view_mut()).unwrap();
        assert_eq!(gpu.download(&scale)[0], 1.0);
    }
}

fn groups<T: Float, Q: Quantized, S: GroupScale>(
    gpu: &Gpu,
    c: &RowCase<T>,
    options: GroupOptions,
    col_major: bool,
) -> (Array<Q>, Array<S>) {
    let (x, mut q) = (gpu.upload(&c.x, c.place(0)), gpu.poisoned(c.place(1)));
    let n = c.cols.div_ceil(options.group.columns());
    let strides = if col_major { [1, c.rows] } else { [n, 1] };
    let mut scale = gpu.poisoned::<S>(Place::new(Layout::with_strides([c.rows, n], strides).unwrap()));
    group_quant(gpu.stream(), x.view(), q.view_mut(), scale.view_mut(), options).unwrap();
    gpu.assert_guards(&q);
    gpu.assert_guards(&scale);
    (gpu.download(&q), gpu.download(&scale))
}

fn check_groups<T: Float, Q: Quantized>(c: &RowCase<T>, group: GroupSize) {
    let rule = BlockRule::codes(BlockScale::RoundUp, Q::FORMAT, 0);
    let (g, all) = (group.columns(), f32s(&c.x));
    let n = c.cols.div_ceil(g);
    for gpu in kit::devices() {
        for pow2_scale in [false, true] {
            let options = GroupOptions { group, pow2_scale };
            let (q, scale) = groups::<T, Q, f32>(&gpu, c, options, false);
            for row in 0..c.rows {
                for i in 0..n {
                    let range = row * c.cols + i * g..row * c.cols + c.cols.min((i + 1) * g);
                    let (x, s) = (&all[range.clone()], scale[row * n + i]);
                    let amax = x.iter().filter(|v| v.is_finite()).fold(0f32, |a, v| a.max(v.abs()));
                    let want = if pow2_scale {
                        rule.scale(amax.max(1e-10)).to_f32()
                    } else {
                        group_scale(amax, Q::FORMAT)
                    };
                    assert_eq!(s, want, "group {i} of row {row}, {c:?}");
                    assert_codes(&q.data[range.clone()], x, |_| s);
                    if !pow2_scale && x.iter().all(|v| v.is_finite()) {
                        assert_guarantees(&q.data[range], x, s, 1e-10);
                    }
                }
            }
            let (again, turned) = groups::<T, Q, f32>(&gpu, c, options, true);
            kit::assert_bits(&again, &q);
            assert_eq!(turned.data, scale.data);
            if pow2_scale {
                let (again, exponents) = groups::<T, Q, E8M0>(&gpu, c, options, true);
                kit::assert_bits(&again, &q);
                assert!(exponents.iter().zip(&scale.data).all(|(e, s)| e.to_f32() == *s));
            }
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn groups_are_exact(c in kit::row_case::<bf16>(1..30, 1..=3000), d in kit::row_case::<f32>(1..30, 1..=2000)) {
        check_groups::<_, Fp8E4M3>(&c, GroupSize::G128);
        check_groups::<_, i8>(&c, GroupSize::G32);
        check_groups::<_, Fp8E4M3Fnuz>(&d, GroupSize::G64);
    }
}

#[test]
fn widths_of_groups() {
    for cols in [1, 127, 128, 130, 256, 576, 1536, 2880, 7168, 8193, 18432] {
        let c = RowCase::<f16>::new(2, cols, Fill::Wide, cols as u64, [(cols, 0); 4]);
        check_groups::<_, Fp8E4M3>(&c, GroupSize::G128);
        check_groups::<_, Fp8E4M3Fnuz>(&c, GroupSize::G64);
    }
}

/// A group's values change its codes and its scale only; groups of zeros have the least scale.
#[test]
fn groups_are_independent() {
    let options = GroupOptions { group: GroupSize::G64, pow2_scale: false };
    let mut c = RowCase::<bf16>::new(5, 320, Fill::Normal, 2, [(320, 0); 4]);
    for gpu in kit::devices() {
        let (before, scales) = groups::<_, Fp8E4M3, f32>(&gpu, &c, options, false);
        let saved = c.x.clone();
        c.x[2 * 320 + 128..2 * 320 + 192].fill(bf16::ZERO);
        let (after, changed) = groups::<_, Fp8E4M3, f32>(&gpu, &c, options, false);
        c.x = saved;
        let inside = |i: usize| (2 * 320 + 128..2 * 320 + 192).contains(&i);
        assert!((0..1600).all(|i| inside(i) || before[i] == after[i]));
        assert!((0..25).all(|i| i == 12 || scales[i] == changed[i]));
        assert_eq!(changed[12], 1e-10 / 448.0);
    }
}

/// Every code, both ways.
#[test]
fn encodings_of_fp8() {
    let all: Vec<u8> = (0..=255).cycle().take(256 * 9).collect();
    for gpu in kit::devices() {
        // Aligned and not.
        for place in [Place::contiguous([9, 256]), Place::rows([9, 256], 259).shifted(1)] {
            let ocp: Vec<Fp8E4M3> = all.iter().map(|b| Fp8E4M3(*b)).collect();
            let fnuz: Vec<Fp8E4M3Fnuz> = all.iter().map(|b| Fp8E4M3Fnuz(*b)).collect();
            let scales = [0.5f32, 3.0, -1.0];
            let s = gpu.upload(&scales, [3]);

            let (q, mut out) = (gpu.upload(&ocp, &place), gpu.poisoned::<Fp8E4M3Fnuz>(&place));
            let mut s_out = gpu.poisoned::<f32>([3]);
            fp8_ocp_to_fnuz(gpu.stream(), q.view(), s.view(), out.view_mut(), s_out.view_mut()).unwrap();
            gpu.assert_guards(&out);
            assert_eq!(gpu.download(&s_out).data, [1.0, 6.0, -2.0]);
            for (a, b) in ocp.iter().zip(gpu.download(&out).iter()) {
                let same =
                    if a.is_nan() { b.0 == 0x80 } else { b.to_f32() * 2.0 == a.to_f32() && !b.is_nan() };
                assert!(same, "{a:?} became {b:?}");
            }

            let (q, mut out) = (gpu.upload(&fnuz, &place), gpu.poisoned::<Fp8E4M3>(&place));
            let mut in_place = gpu.upload(&scales, [3]);
            let over = in_place.view_mut();
            fp8_fnuz_to_ocp(gpu.stream(), q.view(), over.alias(), out.view_mut(), over).unwrap();
            gpu.assert_guards(&out);
            assert_eq!(gpu.download(&in_place).data, [0.25, 1.5, -0.5]);
            for (a, b) in fnuz.iter().zip(gpu.download(&out).iter()) {
                let want = (a.to_f32() * 2.0).clamp(-448.0, 448.0);
                assert!(if a.is_nan() { b.0 == 0x7f } else { b.to_f32() == want }, "{a:?} became {b:?}");
            }
        }
    }
}

#[test]
fn errors() {
    let gpu = &kit::devices()[0];
    let stream = gpu.stream();
    let x = gpu.upload(&[bf16::ONE; 12], [3, 4]);
    let mut q = gpu.poisoned::<Fp8E4M3>([3, 4]);
    let (one, two) = (gpu.upload(&[1.0f32], [1]), gpu.upload(&[1.0f32; 2], [2]));
    let result = per_tensor_quant_static(stream, x.view(), two.view(), q.view_mut());
    assert_error(result, kind!(Shape), &["per_tensor_quant_static: scale: shape [2], expected [1]"]);
    let mut narrow = gpu.poisoned::<Fp8E4M3>([3, 3]);
    let result = per_tensor_quant_static(stream, x.view(), one.view(), narrow.view_mut());
    assert_error(result, kind!(Shape), &["q", "[3, 3]"]);
    let mut int8 = gpu.poisoned::<i8>([3, 4]);
    let result = downcast_to_static_fp8(stream, x.view(), one.view(), int8.view_mut());
    assert_error(result, kind!(DType), &["downcast_to_static_fp8: q", "i8", "fp8e4m3"]);
    let mut long = gpu.poisoned::<f32>([2]);
    let result = per_tensor_quant_dynamic(stream, x.view(), q.view_mut(), long.view_mut());
    assert_error(result, kind!(Shape), &["scale", "[2]", "[1]"]);
    let empty = gpu.upload::<bf16>(&[], [3, 0]);
    let mut empty_q = gpu.poisoned::<Fp8E4M3>([3, 0]);
    let result = per_tensor_quant_static(stream, empty.view(), one.view(), empty_q.view_mut());
    assert_error(result, kind!(Empty), &["x", "[3, 0]"]);
    let mut shared = gpu.upload(&[1.0f32; 4], [4]);
    let whole = shared.view_mut();
    let (part, first) = (whole.alias(), whole.slice(0, 0..1).unwrap());
    let mut row_q = gpu.poisoned::<Fp8E4M3>([4]);
    let result = per_tensor_quant_dynamic(stream, part, row_q.view_mut(), first);
    assert_error(result, kind!(Overlap), &["x and scale"]);

    let options = GroupOptions { group: GroupSize::G32, pow2_scale: false };
    let mut scale = gpu.poisoned::<f32>([3, 2]);
    let result = group_quant(stream, x.view(), q.view_mut(), scale.view_mut(), options);
    assert_error(result, kind!(Shape), &["group_quant: scale: shape [3, 2], expected [3, 1]"]);
    let wide = gpu.upload(&[bf16::ONE; 192], [3, 64]);
    let mut wide_q = gpu.poisoned::<i8>([3, 64]);
    let spread = Layout::with_strides([3, 2], [8, 3]).unwrap();
    let mut spread = gpu.poisoned::<f32>(Place::new(spread));
    let result = group_quant(stream, wide.view(), wide_q.view_mut(), spread.view_mut(), options);
    assert_error(result, kind!(Stride), &["scale", "unit stride on one axis"]);

    let bytes = gpu.upload(&[Fp8E4M3(0); 8], [2, 4]);
    let mut out = gpu.poisoned::<Fp8E4M3Fnuz>([2, 3]);
    let mut s_out = gpu.poisoned::<f32>([1]);
    let result = fp8_ocp_to_fnuz(stream, bytes.view(), one.view(), out.view_mut(), s_out.view_mut());
    assert_error(result, kind!(Shape), &["fp8_ocp_to_fnuz: out", "[2, 3]", "shape of q"]);
    let mut out = gpu.poisoned::<Fp8E4M3Fnuz>([2, 4]);
    let result = fp8_ocp_to_fnuz(stream, bytes.view(), two.view(), out.view_mut(), s_out.view_mut());
    assert_error(result, kind!(Shape), &["scale_out"]);

    let other = Device::open("emu:gfx950").unwrap().create_stream().unwrap();
    let result = per_tensor_quant_static(&other, x.view(), one.view(), q.view_mut());
    assert_error(result, kind!(DeviceMismatch), &["x"]);
    gpu.assert_untouched(&q);
    gpu.assert_untouched(&out);
}
