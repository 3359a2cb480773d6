//! Per-tensor and group quantizers, and conversions between the encodings of fp8.

use crate::common::{assert_guarantees, assert_quantized, bytes, f32s, per_token};
use hk_core::quant::{BlockRule, BlockScale, GroupSize, Quantized, group_scale};
use hk_core::{
    E8M0, Float, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, TensorView, TensorViewMut, bf16, f16,
};
use hk_quant::{
    GroupOptions, GroupScale, GroupScaleRule, downcast_to_static_fp8, fp8_fnuz_to_ocp, fp8_ocp_to_fnuz,
    group_quant, per_tensor_quant_dynamic, per_tensor_quant_static,
};
use hk_testkit::{
    self as kit, Array, CallElement, Fill, Gpu, Place, Refusals, RowCase, Tensors, kind, proptest::prelude::*,
};

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

/// The scale is the largest per-token scale of nonzero rows; static quantization with it gives the same `q`.
fn check_dynamic<T: Float, Q: Quantized>(c: &RowCase<T>) {
    for gpu in kit::devices() {
        let (q, scale) = dynamic::<T, Q>(&gpu, c);
        let rows = per_token::<T, Q>(&gpu, &gpu.upload(&c.x, c.shape()), c.shape(), None);
        let zero = |row: usize| {
            !c.x[row * c.cols..(row + 1) * c.cols].iter().any(|x| x.to_f32() != 0.0 && x.to_f32().is_finite())
        };
        let scales = rows.scale.iter().enumerate().filter(|(row, _)| !zero(*row)).map(|(_, s)| *s);
        assert_eq!(scale, scales.reduce(f32::max).unwrap_or(1.0), "{c:?}");
        assert_quantized(&q.data, &f32s(&c.x), |_| scale);
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
                assert_quantized(&static_quant::<_, Fp8E4M3>(&gpu, &c, s, false).data, &f32s(&c.x), |_| s);
                assert_quantized(&static_quant::<_, i8>(&gpu, &c, s, false).data, &f32s(&c.x), |_| s);
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

/// Quotients at and beside ties, also with scales beyond the range of fast division.
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
fn nan_and_infinite_scales() {
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
        for scale_rule in [GroupScaleRule::Exact, GroupScaleRule::PowerOfTwo] {
            let options = GroupOptions { group, scale_rule };
            let (q, scale) = groups::<T, Q, f32>(&gpu, c, options, false);
            for row in 0..c.rows {
                for i in 0..n {
                    let range = row * c.cols + i * g..row * c.cols + c.cols.min((i + 1) * g);
                    let (x, s) = (&all[range.clone()], scale[row * n + i]);
                    let amax = x.iter().filter(|v| v.is_finite()).fold(0f32, |a, v| a.max(v.abs()));
                    let want = if scale_rule == GroupScaleRule::PowerOfTwo {
                        rule.scale(amax.max(1e-10)).to_f32()
                    } else {
                        group_scale(amax, Q::FORMAT)
                    };
                    assert_eq!(s, want, "group {i} of row {row}, {c:?}");
                    assert_quantized(&q.data[range.clone()], x, |_| s);
                    if scale_rule == GroupScaleRule::Exact && x.iter().all(|v| v.is_finite()) {
                        assert_guarantees(&q.data[range], x, s, 1e-10);
                    }
                }
            }
            let (again, turned) = groups::<T, Q, f32>(&gpu, c, options, true);
            kit::assert_bits(&again, &q);
            assert_eq!(turned.data, scale.data);
            if scale_rule == GroupScaleRule::PowerOfTwo {
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

/// The values of a group change only its own output; groups of zeros have the least scale.
#[test]
fn groups_are_independent() {
    let options = GroupOptions { group: GroupSize::G64, scale_rule: GroupScaleRule::Exact };
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

/// Every byte, both ways.
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
fn errors_of_static_scales() {
    type Operator<Q> = fn(&Stream, TensorView<f32>, TensorView<f32>, TensorViewMut<Q>) -> Result<()>;
    fn table<Q: CallElement + Quantized>(operator: Operator<Q>) -> Refusals<'static, ()> {
        let run = move |stream: &Stream, tensors: &mut Tensors, ()| {
            operator(stream, tensors.input("x"), tensors.input("scale"), tensors.output("q"))
        };
        Refusals::new((), run).input::<f32>("x", [3, 4]).input::<f32>("scale", [1]).output::<Q>("q", [3, 4])
    }
    let operators: [(&str, Operator<Fp8E4M3>); 2] = [
        ("per_tensor_quant_static", per_tensor_quant_static),
        ("downcast_to_static_fp8", downcast_to_static_fp8),
    ];
    for (name, operator) in operators {
        table(operator)
            .accepts(|_| {})
            .refuses(kind!(Shape), &[&format!("{name}: scale: shape [2], expected [1]")], |call| {
                call.shape("scale", [2])
            })
            .refuses(kind!(Shape), &[name, "q", "[3, 3]"], |call| call.shape("q", [3, 3]))
            .refuses(kind!(Empty), &[name, "x", "[3, 0]"], |call| {
                call.shape("x", [3, 0]);
                call.shape("q", [3, 0]);
            })
            .refuses(kind!(Stride), &[name, "x"], |call| call.strides("x", [1, 3]))
            .refuses_other_devices()
            .refuses_overlaps();
    }
    table::<i8>(downcast_to_static_fp8).refuses(
        kind!(DType),
        &["downcast_to_static_fp8: q", "i8", "fp8e4m3"],
        |_| {},
    );
}

#[test]
fn errors_of_dynamic_scales() {
    let operator = |stream: &Stream, tensors: &mut Tensors, ()| {
        let x = tensors.input::<f32>("x");
        per_tensor_quant_dynamic(stream, x, tensors.output::<Fp8E4M3>("q"), tensors.output("scale"))
    };
    Refusals::new((), operator)
        .input::<f32>("x", [3, 4])
        .output::<Fp8E4M3>("q", [3, 4])
        .output::<f32>("scale", [1])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["per_tensor_quant_dynamic: scale", "[2]", "[1]"], |call| {
            call.shape("scale", [2])
        })
        .refuses(kind!(Shape), &["q", "[3, 3]"], |call| call.shape("q", [3, 3]))
        .refuses_other_devices()
        .refuses_overlaps();
}

#[test]
fn errors_of_group_quant() {
    let operator = |stream: &Stream, tensors: &mut Tensors, options| {
        let x = tensors.input::<f32>("x");
        group_quant(stream, x, tensors.output::<i8>("q"), tensors.output::<f32>("scale"), options)
    };
    let options = GroupOptions { group: GroupSize::G32, scale_rule: GroupScaleRule::Exact };
    Refusals::new(options, operator)
        .input::<f32>("x", [3, 64])
        .output::<i8>("q", [3, 64])
        .output::<f32>("scale", [3, 2])
        .accepts(|_| {})
        .accepts(|call| call.strides("scale", [1, 3]))
        .refuses(kind!(Shape), &["group_quant: scale: shape [3, 2], expected [3, 1]"], |call| {
            call.shape("x", [3, 4]);
            call.shape("q", [3, 4]);
        })
        .refuses(kind!(Shape), &["group_quant: scale: shape [3, 2], expected [3, 1]"], |call| {
            call.options.group = GroupSize::G64;
        })
        .refuses(kind!(Shape), &["q", "[3, 63]"], |call| call.shape("q", [3, 63]))
        .refuses(kind!(Stride), &["scale", "unit stride on one axis"], |call| call.strides("scale", [8, 3]))
        .refuses_other_devices()
        .refuses_overlaps();
}

#[test]
fn errors_of_fp8_conversions() {
    let operator = |stream: &Stream, tensors: &mut Tensors, ()| {
        let (q, scale) = (tensors.input("q"), tensors.input("scale"));
        fp8_ocp_to_fnuz(stream, q, scale, tensors.output("out"), tensors.output("scale_out"))
    };
    Refusals::new((), operator)
        .input::<Fp8E4M3>("q", [2, 4])
        .input::<f32>("scale", [2])
        .output::<Fp8E4M3Fnuz>("out", [2, 4])
        .output::<f32>("scale_out", [2])
        .accepts(|_| {})
        .accepts(|call| call.overlap("scale", "scale_out", 0))
        .refuses(kind!(Shape), &["fp8_ocp_to_fnuz: out", "[2, 3]", "shape of q"], |call| {
            call.shape("out", [2, 3])
        })
        .refuses(kind!(Shape), &["scale_out"], |call| call.shape("scale_out", [1]))
        .refuses(kind!(Stride), &["scale"], |call| call.strides("scale", [2]))
        .refuses(kind!(Stride), &["scale_out"], |call| call.strides("scale_out", [2]))
        .refuses_other_devices()
        .refuses_overlaps();
}
