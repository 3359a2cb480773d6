//! `per_token_quant`, `smoothquant` and `moe_smoothquant`.

use crate::common::{COLS, Output, assert_guarantees, assert_quantized, bytes, f32s, per_token, smooth};
use hk_core::quant::{Quantized, linear_scale};
use hk_core::{Float, Fp8E4M3, Fp8E4M3Fnuz, Stream, bf16, f16};
use hk_quant::{MoeOrder, PerTokenOptions, moe_smoothquant, per_token_quant};
use hk_testkit::{
    self as kit, Fill, Gpu, Place, Refusals, RowCase, Tensor, Tensors, kind, proptest::prelude::*,
};

fn dense<T: Float>(rows: usize, cols: usize, fill: Fill, seed: u64) -> RowCase<T> {
    RowCase::new(rows, cols, fill, seed, [(cols, 0); 4])
}

/// Scales and quantized rows, bitwise: all operations are IEEE ones.
#[track_caller]
fn check_rows<Q: Quantized>(got: &Output<Q>, z: &[f32], cols: usize, scale_ub: Option<f32>) {
    for ((q, z), &scale) in got.q.data.chunks(cols).zip(z.chunks(cols)).zip(&got.scale.data) {
        let finite = z.iter().filter(|v| v.is_finite());
        let mut amax = finite.fold(0f32, |a, v| a.max(v.abs()));
        if let Some(bound) = scale_ub.filter(|b| *b > 0.0) {
            amax = amax.min(bound);
        }
        assert_eq!(scale, linear_scale(amax, Q::FORMAT));
        assert_quantized(q, z, |_| scale);
        if scale_ub.is_none() && z.iter().all(|v| v.is_finite()) {
            assert_guarantees(q, z, scale, 1e-30);
        }
    }
}

fn check_case<T: Float, Q: Quantized>(c: &RowCase<T>, scale_ub: Option<f32>) {
    for gpu in kit::devices() {
        let x = gpu.upload(&c.x, c.place(0));
        let got = per_token::<T, Q>(&gpu, &x, c.place(1), scale_ub);
        check_rows(&got, &f32s(&c.x), c.cols, scale_ub);
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_is_exact(c in kit::row_case::<bf16>(1..40, 1..=9000), bound in prop::option::of(-0.5f32..3.0)) {
        check_case::<_, i8>(&c, bound);
        check_case::<_, Fp8E4M3>(&c, bound);
    }

    #[test]
    fn f16_and_f32_are_exact(c in kit::row_case::<f16>(1..40, 1..=5000), d in kit::row_case::<f32>(1..40, 1..=5000)) {
        check_case::<_, Fp8E4M3Fnuz>(&c, None);
        check_case::<_, Fp8E4M3Fnuz>(&d, None);
    }

    /// smooth multiplies in f32; factors are zero, negative, small and large.
    #[test]
    fn smoothquant_is_exact(c in kit::row_case::<bf16>(1..20, 1..=9000)) {
        let mut w = Fill::Wide.elements::<f32>(c.cols, c.seed ^ 7);
        w.iter_mut().step_by(5).for_each(|w| *w = 0.0);
        let z: Vec<f32> = c.x.iter().zip(w.iter().cycle()).map(|(x, w)| x.to_f32() * w).collect();
        for gpu in kit::devices() {
            let (x, factors) = (gpu.upload(&c.x, c.place(0)), gpu.upload(&w, [c.cols]));
            let got = smooth::<_, _, i8>(&gpu, &x, &factors, c.place(1));
            check_rows(&got, &z, c.cols, None);
        }
    }
}

/// The widths of the specification, and one past each kernel's.
#[test]
fn every_width() {
    for (i, cols) in COLS.into_iter().enumerate() {
        let rows = if kit::full() { 193 } else { 2 };
        check_case::<bf16, i8>(&dense(rows, cols, Fill::Wide, i as u64), None);
        check_case::<f16, Fp8E4M3>(&dense(rows, cols, Fill::Normal, i as u64), None);
    }
    for cols in [32768, 32784, 33001] {
        check_case::<f32, Fp8E4M3Fnuz>(&dense(1, cols, Fill::Normal, 3), None);
        check_case::<bf16, i8>(&dense(1, cols, Fill::Wide, 3), None);
    }
    if kit::full() {
        for rows in [1, 2, 10, 32, 193, 4096, 16384] {
            check_case::<bf16, Fp8E4M3>(&dense(rows, 400, Fill::Wide, 3), None);
        }
    }
}

/// One row each of zeros, tiny, constant, an outlier, NaN, infinities.
#[test]
fn special_rows() {
    fn run<Q: Quantized>(nan: u8) {
        let cols = 40;
        let tiny = 1e-38f32;
        let mut x = vec![1.0f32; 7 * cols];
        x[..cols].fill(0.0);
        x[0] = -0.0;
        x[cols..2 * cols].fill(tiny);
        x[3 * cols + 7] = 1e4;
        x[4 * cols + 9] = f32::NAN;
        x[5 * cols + 1] = f32::INFINITY;
        x[5 * cols + 2] = f32::NEG_INFINITY;
        x[6 * cols..].fill(f32::NAN);
        for gpu in kit::devices() {
            let got = per_token::<f32, Q>(&gpu, &gpu.upload(&x, [7, cols]), [7, cols], None);
            check_rows(&got, &x, cols, None);
            let (q, qmax) = (&got.q.data, Q::FORMAT.qmax);
            assert_eq!(got.scale[0], 1.0);
            assert!(q[..cols].iter().all(|q| q.to_f32() == 0.0));
            assert_eq!(got.scale[1], 1e-30 / qmax);
            assert!(q[2 * cols..3 * cols].iter().all(|q| q.to_f32() == qmax));
            // NaN and infinities change neither the scale nor other elements.
            assert_eq!((got.scale[4], got.scale[5], got.scale[6]), (1.0 / qmax, 1.0 / qmax, 1.0));
            assert_eq!(bytes(&q[4 * cols + 9..4 * cols + 10]), [nan]);
            assert_eq!(q[5 * cols + 1].to_f32(), qmax);
            assert_eq!(q[5 * cols + 2].to_f32(), -qmax);
            assert_eq!(q[5 * cols].to_f32(), qmax);
            assert!(bytes(&q[6 * cols..]).iter().all(|b| *b == nan));
        }
    }
    run::<i8>(0);
    run::<Fp8E4M3>(0x7f);
    run::<Fp8E4M3Fnuz>(0x80);
}

/// A power-of-two factor moves to the scale; requantizing changes nothing.
#[test]
fn scaling_and_requantizing() {
    fn run<Q: Quantized>() {
        let c = dense::<f32>(5, 300, Fill::Normal, 4);
        for gpu in kit::devices() {
            let once = per_token::<f32, Q>(&gpu, &gpu.upload(&c.x, c.shape()), c.shape(), None);
            for k in [-20, 3, 40] {
                let factor = 2f32.powi(k);
                let x: Vec<f32> = c.x.iter().map(|x| x * factor).collect();
                let scaled = per_token::<f32, Q>(&gpu, &gpu.upload(&x, c.shape()), c.shape(), None);
                kit::assert_bits(&scaled.q, &once.q);
                assert!(scaled.scale.iter().zip(&once.scale.data).all(|(a, b)| *a == b * factor));
            }
            let back: Vec<f32> =
                once.q.iter().enumerate().map(|(i, q)| q.to_f32() * once.scale[i / 300]).collect();
            let again = per_token::<f32, Q>(&gpu, &gpu.upload(&back, c.shape()), c.shape(), None);
            kit::assert_bits(&again.q, &once.q);
        }
    }
    run::<i8>();
    run::<Fp8E4M3>();
    run::<Fp8E4M3Fnuz>();
}

/// Batch invariance: the bits of a row depend on neither other rows, nor its position, strides or the access path.
#[test]
fn rows_are_independent() {
    for cols in [100, 128, 512, 2048, 2880, 7168] {
        let c = dense::<bf16>(37, cols, Fill::Wide, 5);
        for gpu in kit::devices() {
            let all = per_token::<bf16, Fp8E4M3>(&gpu, &gpu.upload(&c.x, c.shape()), c.shape(), None);
            let odd = gpu.upload(&c.x, Place::rows(c.shape(), cols + 3).shifted(1));
            per_token::<bf16, Fp8E4M3>(&gpu, &odd, Place::rows(c.shape(), cols + 5), None).assert_same(&all);
            for row in [0, 17, 36] {
                let x = gpu.upload(&c.x[row * cols..(row + 1) * cols], [1, cols]);
                let one = per_token::<bf16, Fp8E4M3>(&gpu, &x, [1, cols], None);
                assert_eq!(bytes(&one.q.data), bytes(&all.q.data[row * cols..(row + 1) * cols]));
                assert_eq!(one.scale[0], all.scale[row]);
            }
        }
    }
}

#[test]
fn factors_of_one_change_nothing_and_may_have_the_type_of_x() {
    let c = dense::<f16>(9, 1025, Fill::Wide, 6);
    for gpu in kit::devices() {
        let x = gpu.upload(&c.x, c.shape());
        let plain = per_token::<f16, i8>(&gpu, &x, c.shape(), None);
        smooth::<_, f32, i8>(&gpu, &x, &gpu.upload(&[1.0; 1025], [1025]), c.shape()).assert_same(&plain);
        let ones = gpu.upload(&[f16::ONE; 1025], [1025]);
        smooth::<_, f16, i8>(&gpu, &x, &ones, c.shape()).assert_same(&plain);
    }
}

/// A row that fits registers is read once, a longer one twice.
#[test]
fn rows_are_read_once() {
    for cols in [128, 512, 1536, 4096, 7168, 8192, 28672, 32768, 32784] {
        let c = dense::<bf16>(1, cols, Fill::Normal, 7);
        for gpu in kit::devices() {
            let x = gpu.upload(&c.x, c.shape());
            gpu.stream().take_counters().unwrap();
            per_token::<bf16, i8>(&gpu, &x, c.shape(), None);
            let Some(counters) = gpu.stream().take_counters().unwrap() else { continue };
            let reads = if cols <= 32768 { 1 } else { 2 };
            assert_eq!(counters.global_read_bytes, reads * 2 * cols as u64, "{cols} columns");
            assert_eq!(counters.global_written_bytes, cols as u64 + 4, "{cols} columns");
        }
    }
}

fn moe<Q: Quantized>(
    gpu: &Gpu,
    x: &Tensor<bf16>,
    factors: &Tensor<f32>,
    ids: &[i32],
    topk: usize,
    order: MoeOrder,
) -> (Tensor<Q>, Tensor<f32>) {
    let cols = factors.layout().shape()[1];
    let ids = gpu.upload(ids, [ids.len() / topk, topk]);
    let rows = ids.layout().numel();
    let (mut q, mut scale) = (gpu.poisoned([rows, cols]), gpu.poisoned([rows]));
    let (views, out) = ((x.view(), factors.view(), ids.view()), q.view_mut());
    moe_smoothquant(gpu.stream(), views.0, views.1, views.2, out, scale.view_mut(), order).unwrap();
    gpu.assert_guards(&q);
    gpu.assert_guards(&scale);
    (q, scale)
}

#[test]
fn experts_are_gathered_single_calls() {
    for (cols, topk, experts) in [(127, 1, 3), (1024, 5, 3), (2064, 3, 1), (8193, 3, 3), (8208, 2, 128)] {
        let tokens = 4;
        let c = dense::<bf16>(tokens * topk, cols, Fill::Wide, 8);
        let w = Fill::Wide.elements::<f32>(experts * cols, 9);
        let ids: Vec<i32> = (0..tokens * topk).map(|i| (i * 7 % (experts + 1)) as i32).collect();
        let single = |gpu: &Gpu, from: usize, id: usize| {
            let x = gpu.upload(&c.x[from * cols..(from + 1) * cols], [1, cols]);
            smooth::<_, _, i8>(gpu, &x, &gpu.upload(&w[id * cols..(id + 1) * cols], [cols]), [1, cols])
        };
        for gpu in kit::devices() {
            let factors = gpu.upload(&w, [experts, cols]);
            let by_token = gpu.upload(&c.x[..tokens * cols], [tokens, cols]);
            let by_choice = gpu.upload(&c.x, [tokens, topk, cols]);
            for order in [MoeOrder::TokenMajor, MoeOrder::ChoiceMajor] {
                for (x, choices) in [(&by_token, 1), (&by_choice, topk)] {
                    let (q, scale) = moe::<i8>(&gpu, x, &factors, &ids, topk, order);
                    let (q, scale) = (gpu.download(&q), gpu.download(&scale));
                    for (i, &id) in ids.iter().enumerate() {
                        let (t, j) = (i / topk, i % topk);
                        let row = if order == MoeOrder::TokenMajor { i } else { j * tokens + t };
                        let got = &q.data[row * cols..(row + 1) * cols];
                        if id as usize == experts {
                            assert!(scale[row].is_nan() && got.iter().all(|q| *q == 0), "row {row}");
                            continue;
                        }
                        let from = if choices == 1 { t } else { i };
                        let want = single(&gpu, from, id as usize);
                        assert_eq!((got, scale[row]), (&want.q.data[..], want.scale[0]), "row {row}");
                    }
                }
            }
        }
    }
}

/// A negative id leaves its row untouched; one beyond the experts, up to `i32::MAX`, makes it NaN and zeros.
#[test]
fn ids_out_of_range() {
    let cols = 200;
    let c = dense::<bf16>(3, cols, Fill::Normal, 10);
    for gpu in kit::devices() {
        let (x, factors) = (gpu.upload(&c.x, c.shape()), gpu.upload(&vec![1.0; 2 * cols], [2, cols]));
        let ids = [-1, 0, i32::MAX, i32::MIN, 1, 2];
        let (q, scale) = moe::<Fp8E4M3>(&gpu, &x, &factors, &ids, 2, MoeOrder::TokenMajor);
        let (blank_q, blank_scale) = (gpu.poisoned::<Fp8E4M3>([6, cols]), gpu.poisoned::<f32>([6]));
        let (q, scale) = (gpu.download(&q), gpu.download(&scale));
        let (blank_q, blank_scale) = (gpu.download(&blank_q), gpu.download(&blank_scale));
        for row in [0, 3] {
            let range = row * cols..(row + 1) * cols;
            assert_eq!(bytes(&q.data[range.clone()]), bytes(&blank_q.data[range]));
            assert_eq!(scale[row].to_bits(), blank_scale[row].to_bits());
        }
        for row in [2, 5] {
            assert!(scale[row] != scale[row] && scale[row].to_bits() != blank_scale[row].to_bits());
            assert!(bytes(&q.data[row * cols..(row + 1) * cols]).iter().all(|b| *b == 0));
        }
        assert!(scale[1] > 0.0 && scale[4] > 0.0);
    }
}

#[test]
fn errors_of_per_token_quant() {
    let operator = |stream: &Stream, tensors: &mut Tensors, ()| {
        let options = PerTokenOptions { scale_ub: tensors.optional_input("scale_ub") };
        let x = tensors.input::<f32>("x");
        per_token_quant(stream, x, tensors.output::<i8>("q"), tensors.output("scale"), options)
    };
    Refusals::new((), operator)
        .input::<f32>("x", [3, 4])
        .input::<f32>("scale_ub", [1])
        .output::<i8>("q", [3, 4])
        .output::<f32>("scale", [3])
        .accepts(|_| {})
        .accepts(|call| call.without("scale_ub"))
        .accepts(|call| call.shape("scale", [3, 1]))
        // No rows: nothing is launched.
        .accepts(|call| {
            call.shape("x", [0, 4]);
            call.shape("q", [0, 4]);
            call.shape("scale", [0]);
        })
        .refuses(kind!(Shape), &["per_token_quant: scale: shape [2], expected [3] (rows of x)"], |call| {
            call.shape("scale", [2])
        })
        .refuses(kind!(Shape), &["per_token_quant: q", "[3, 5]", "shape of x"], |call| {
            call.shape("q", [3, 5])
        })
        .refuses(kind!(Shape), &["scale_ub", "[2]", "[1]"], |call| call.shape("scale_ub", [2]))
        .refuses(kind!(Empty), &["x", "[3, 0]"], |call| {
            call.shape("x", [3, 0]);
            call.shape("q", [3, 0]);
        })
        .refuses(kind!(Stride), &["x"], |call| call.strides("x", [1, 3]))
        .refuses(kind!(Stride), &["q"], |call| call.strides("q", [1, 3]))
        .refuses(kind!(Stride), &["scale"], |call| call.strides("scale", [2]))
        .refuses_other_devices()
        .refuses_overlaps();
}

#[test]
fn errors_of_smoothquant() {
    let operator = |stream: &Stream, tensors: &mut Tensors, ()| {
        let (x, smooth) = (tensors.input::<f32>("x"), tensors.input::<f32>("smooth"));
        hk_quant::smoothquant(stream, x, smooth, tensors.output::<i8>("q"), tensors.output("scale"))
    };
    Refusals::new((), operator)
        .input::<f32>("x", [3, 4])
        .input::<f32>("smooth", [4])
        .output::<i8>("q", [3, 4])
        .output::<f32>("scale", [3])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["smoothquant: smooth: shape [3], expected [4] (columns of x)"], |call| {
            call.shape("smooth", [3])
        })
        .refuses(kind!(Shape), &["smoothquant: q", "[3, 5]"], |call| call.shape("q", [3, 5]))
        .refuses(kind!(Shape), &["smoothquant: scale", "[2]"], |call| call.shape("scale", [2]))
        .refuses(kind!(Stride), &["smooth"], |call| call.strides("smooth", [2]))
        .refuses_other_devices()
        .refuses_overlaps();
}

#[test]
fn errors_of_moe_smoothquant() {
    let operator = |stream: &Stream, tensors: &mut Tensors, ()| {
        let (x, smooth) = (tensors.input::<f32>("x"), tensors.input::<f32>("smooth"));
        let (q, scale) = (tensors.output::<i8>("q"), tensors.output("scale"));
        moe_smoothquant(stream, x, smooth, tensors.input("topk_ids"), q, scale, MoeOrder::TokenMajor)
    };
    Refusals::new((), operator)
        .input::<f32>("x", [3, 4])
        .input::<f32>("smooth", [2, 4])
        .input::<i32>("topk_ids", [3, 1])
        .output::<i8>("q", [3, 4])
        .output::<f32>("scale", [3])
        .accepts(|_| {})
        .accepts(|call| call.shape("x", [3, 1, 4]))
        .refuses(kind!(Empty), &["smooth", "[0, 4]"], |call| call.shape("smooth", [0, 4]))
        .refuses(kind!(Shape), &["smooth", "[2, 5]"], |call| call.shape("smooth", [2, 5]))
        .refuses(kind!(Shape), &["x", "[3, 4]", "topk_ids"], |call| call.shape("topk_ids", [2, 1]))
        .refuses(kind!(Shape), &["q", "[3, 4]", "[6, 4]"], |call| call.shape("topk_ids", [3, 2]))
        .refuses(kind!(Shape), &["moe_smoothquant: scale", "[4]", "[3]"], |call| call.shape("scale", [4]))
        .refuses(kind!(Stride), &["topk_ids"], |call| {
            call.shape("topk_ids", [3, 2]);
            call.strides("topk_ids", [1, 3]);
        })
        .refuses_other_devices()
        .refuses_overlaps();
}
