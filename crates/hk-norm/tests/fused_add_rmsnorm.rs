//! `fused_add_rmsnorm` on the emulated GPUs (and real ones if there are any), against an addition and `rmsnorm`.

use crate::common::{COLS, Output, dense, options, rmsnorm, with_eps};
use hk_core::{Float, Stream, TensorView, TensorViewMut, bf16, f16};
use hk_norm::{FusedAddRmsNormOutputs, RmsNormOptions, Weight, reference};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Refusals, RowCase, Tensor, Tensors, Tolerance, kind,
    proptest::prelude::*, widen,
};

/// Runs the operator with outputs in the given places, and checks that nothing else is touched.
#[track_caller]
fn fused<T: Float, W: Weight<T>>(
    gpu: &Gpu,
    (x, residual): (&Tensor<T>, &Tensor<T>),
    weight: &Tensor<W>,
    (y, residual_out): (Place, Place),
    o: RmsNormOptions,
) -> (Output<T>, Array<T>) {
    let (mut y, mut out) = (gpu.poisoned(y), gpu.poisoned(residual_out));
    let mut rstd = gpu.poisoned([y.layout().rows("test", "y").unwrap().rows]);
    let (xv, rv, wv) = (x.view(), residual.view(), weight.view());
    let outputs =
        FusedAddRmsNormOutputs { y: y.view_mut(), residual_out: out.view_mut(), rstd: Some(rstd.view_mut()) };
    hk_norm::fused_add_rmsnorm(gpu.stream(), xv, rv, wv, outputs, o).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_guards(&out);
    gpu.assert_guards(&rstd);
    gpu.assert_untouched(x);
    gpu.assert_untouched(residual);
    gpu.assert_untouched(weight);
    (Output { y: gpu.download(&y), rstd: gpu.download(&rstd) }, gpu.download(&out))
}

/// The sum, rounded to the type.
fn add<T: Float>(x: &[T], residual: &[T]) -> Vec<T> {
    x.iter().zip(residual).map(|(a, b)| T::from_f32(a.to_f32() + b.to_f32())).collect()
}

/// Bitwise identical to the two steps; near the f64 reference.
#[track_caller]
fn check<T: Float, W: Weight<T> + Float>(c: &RowCase<T>, weight: &[W], o: RmsNormOptions) {
    let residual = c.matrix(1);
    let sum = add(&c.x, &residual);
    let once = crate::common::rounding_once(o);
    let want = reference::fused_add_rmsnorm::<T>(&widen(&c.x), &widen(&residual), &widen(weight), once);
    for gpu in kit::devices() {
        let inputs = (&gpu.upload(&c.x, c.place(0)), &gpu.upload(&residual, c.place(1)));
        let weight = gpu.upload(weight, [c.cols]);
        let (got, out) = fused(&gpu, inputs, &weight, (c.place(2), c.place(3)), o);
        kit::assert_bits(&out, &sum);
        kit::assert_close(&out, &want.residual_out, Tolerance::Exact);
        let steps = rmsnorm(&gpu, &gpu.upload(&sum, c.shape()), &weight, c.shape(), o);
        crate::common::assert_same(&got, &steps);
        if o == once {
            kit::assert_close(&got.y, &want.y, Tolerance::Reduction);
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_is_the_two_steps(c in kit::row_case::<bf16>(1..=60, 1..=20_000), f32_weight: bool, o in options()) {
        if f32_weight { check(&c, &crate::common::f32_weights(&c), o) } else { check(&c, &c.w, o) }
    }

    #[test]
    fn f16_is_the_two_steps(c in kit::row_case::<f16>(1..=60, 1..=20_000), f32_weight: bool, o in options()) {
        if f32_weight { check(&c, &crate::common::f32_weights(&c), o) } else { check(&c, &c.w, o) }
    }

    #[test]
    fn f32_is_the_two_steps(c in kit::row_case::<f32>(1..=60, 1..=20_000), o in options()) {
        check(&c, &c.w, o);
    }

    /// Batch invariance: a row's bits depend on neither other rows nor the layout.
    #[test]
    fn a_row_does_not_depend_on_its_surroundings(
        c in kit::row_case::<f16>(2..=30, 1..=20_000),
        pick in any::<prop::sample::Index>(),
        o in options(),
    ) {
        let (row, n) = (pick.index(c.rows), c.cols);
        let residual = c.matrix(1);
        for gpu in kit::devices() {
            let weight = gpu.upload(&c.w, [n]);
            let inputs = (&gpu.upload(&c.x, c.place(0)), &gpu.upload(&residual, c.place(1)));
            let (all, _) = fused(&gpu, inputs, &weight, (c.place(2), c.place(3)), o);
            let (x, r) = (&c.x[row * n..][..n], &residual[row * n..][..n]);
            let inputs = (&gpu.upload(x, [1, n]), &gpu.upload(r, [1, n]));
            let (alone, _) = fused(&gpu, inputs, &weight, ([1, n].into(), [1, n].into()), o);
            prop_assert_eq!(bytemuck::cast_slice::<_, u16>(alone.y.row(0)), bytemuck::cast_slice::<_, u16>(all.y.row(row)));
            prop_assert_eq!(alone.rstd[0].to_bits(), all.rstd[row].to_bits());
        }
    }

    /// Every permitted alias is bitwise identical to separate tensors.
    #[test]
    fn in_place_is_out_of_place(c in kit::row_case::<bf16>(1..=20, 1..=20_000), o in options()) {
        aliases(&c, o);
    }
}

fn aliases<T: Float>(c: &RowCase<T>, o: RmsNormOptions) {
    let residual = c.matrix(1);
    for gpu in kit::devices() {
        let weight = gpu.upload(&c.w, [c.cols]);
        let mut x = gpu.upload(&c.x, c.place(0));
        let mut r = gpu.upload(&residual, c.place(1));
        let (want, want_out) = fused(&gpu, (&x, &r), &weight, (c.place(2), c.place(3)), o);
        let (mut y, mut out) = (gpu.poisoned(c.place(2)), gpu.poisoned(c.place(3)));
        let run = |x: TensorView<T>, r: TensorView<T>, y: TensorViewMut<T>, out: TensorViewMut<T>| {
            let outputs = FusedAddRmsNormOutputs { y, residual_out: out, rstd: None };
            hk_norm::fused_add_rmsnorm(gpu.stream(), x, r, weight.view(), outputs, o).unwrap();
        };
        macro_rules! expect {
            ($y:ident, $out:ident) => {
                kit::assert_bits(&gpu.download(&$y), &want.y);
                kit::assert_bits(&gpu.download(&$out), &want_out);
                for tensor in [&mut x, &mut r, &mut y, &mut out] {
                    gpu.assert_guards(tensor);
                    gpu.reset(tensor);
                }
            };
        }

        let v = r.view_mut();
        run(x.view(), v.alias(), y.view_mut(), v); // residual_out = residual_in: a decoder layer
        expect!(y, r);
        let v = x.view_mut();
        run(v.alias(), r.view(), y.view_mut(), v);
        expect!(y, x);
        let v = x.view_mut();
        run(v.alias(), r.view(), v, out.view_mut());
        expect!(x, out);
        let v = r.view_mut();
        run(x.view(), v.alias(), v, out.view_mut());
        expect!(r, out);
        let (vx, vr) = (x.view_mut(), r.view_mut());
        run(vx.alias(), vr.alias(), vx, vr); // y = x, residual_out = residual_in
        expect!(x, r);
        let (vx, vr) = (x.view_mut(), r.view_mut());
        run(vx.alias(), vr.alias(), vr, vx); // and the other way round
        expect!(r, x);
    }
}

/// Rows that are read twice.
#[test]
fn in_place_with_long_rows() {
    aliases::<bf16>(&dense(2, 20_480, Fill::Normal, 1), with_eps(1e-6));
    aliases::<f32>(&dense(2, 16_385, Fill::Normal, 2), with_eps(1e-6));
}

fn every_width<T: Float>() {
    for (i, cols) in COLS.into_iter().enumerate() {
        let c: RowCase<T> = dense([2, 5, 17][i % 3], cols, Fill::Normal, cols as u64);
        check(&c, &c.w, with_eps(1e-6));
        let aligned = cols.next_multiple_of(8);
        let c = RowCase::<T>::new(2, cols, Fill::Wide, 3, [8, 0, 16, 24].map(|more| (aligned + more, 0)));
        check(&c, &c.w, with_eps(1e-6));
    }
}

#[test]
fn every_width_of_bf16() {
    every_width::<bf16>();
}

#[test]
fn every_width_of_f16() {
    every_width::<f16>();
}

#[test]
fn every_width_of_f32() {
    every_width::<f32>();
}

#[test]
fn many_rows() {
    for (rows, cols) in [(257, 128), (4096, 128), (4500, 40)] {
        let c = dense::<bf16>(rows, cols, Fill::Normal, 4);
        check(&c, &c.w, with_eps(1e-6));
    }
}

/// x + (-x): zero rows, which give zero as long as eps is not.
#[test]
fn cancellation_gives_zero() {
    for cols in [128, 1000, 4096] {
        let c = dense::<bf16>(3, cols, Fill::Wide, 5);
        let minus: Vec<bf16> = c.x.iter().map(|v| -*v).collect();
        for gpu in kit::devices() {
            let inputs = (&gpu.upload(&c.x, c.shape()), &gpu.upload(&minus, c.shape()));
            let weight = gpu.upload(&c.w, [cols]);
            let (got, out) =
                fused(&gpu, inputs, &weight, (c.shape().into(), c.shape().into()), with_eps(1e-6));
            assert!(got.y.iter().chain(out.iter()).all(|v| v.to_f32() == 0.0));
            assert!(got.rstd.iter().all(|r| (r - 1000.0).abs() < 0.01));
        }
    }
}

/// A sum beyond the range of the type is infinite in residual_out, and the norm is that of the infinity.
#[test]
fn sums_round_to_infinity() {
    let x = [60_000.0, 1.0, 2.0, 3.0].map(f16::from_f32);
    for gpu in kit::devices() {
        let inputs = (&gpu.upload(&x, [1, 4]), &gpu.upload(&x, [1, 4]));
        let weight = gpu.upload(&[f16::ONE; 4], [4]);
        let (got, out) = fused(&gpu, inputs, &weight, ([1, 4].into(), [1, 4].into()), with_eps(1e-6));
        assert_eq!(*out, [f16::INFINITY, f16::from_f32(2.0), f16::from_f32(4.0), f16::from_f32(6.0)]);
        assert!(got.y[0].is_nan() && got.y[1..].iter().all(|v| v.to_f32() == 0.0) && got.rstd[0] == 0.0);
    }
}

#[test]
fn nothing_is_launched_for_no_rows() {
    for gpu in kit::devices() {
        let (x, r) = (gpu.upload::<f32>(&[], [0, 8]), gpu.upload::<f32>(&[], [0, 8]));
        let weight = gpu.upload(&[1.0f32; 8], [8]);
        gpu.stream().take_counters().unwrap();
        fused(&gpu, (&x, &r), &weight, ([0, 8].into(), [0, 8].into()), with_eps(1e-6));
        if let Some(counters) = gpu.stream().take_counters().unwrap() {
            assert_eq!(counters.workgroups, 0);
        }
    }
}

/// Both inputs are read once while a row fits registers, and each output is written once.
#[test]
fn rows_are_read_once() {
    for cols in [1024, 2880, 4096, 7168, 16_384] {
        let c = dense::<bf16>(1, cols, Fill::Normal, 6);
        for gpu in kit::devices() {
            let (x, r) = (gpu.upload(&c.x, c.shape()), gpu.upload(&c.matrix(1), c.shape()));
            let weight = gpu.upload(&c.w, [cols]);
            let (mut y, mut out) = (gpu.poisoned::<bf16>(c.shape()), gpu.poisoned::<bf16>(c.shape()));
            gpu.stream().take_counters().unwrap();
            let outputs =
                FusedAddRmsNormOutputs { y: y.view_mut(), residual_out: out.view_mut(), rstd: None };
            let (xv, rv, wv) = (x.view(), r.view(), weight.view());
            hk_norm::fused_add_rmsnorm(gpu.stream(), xv, rv, wv, outputs, with_eps(1e-6)).unwrap();
            let Some(counters) = gpu.stream().take_counters().unwrap() else { continue };
            let row = 2 * cols as u64;
            assert_eq!(counters.global_read_bytes, 3 * row, "{cols} columns on {}", gpu.spec());
            assert_eq!(counters.global_written_bytes, 2 * row, "{cols} columns on {}", gpu.spec());
        }
    }
}

#[test]
fn errors() {
    let operator = |stream: &Stream, tensors: &mut Tensors, options: RmsNormOptions| {
        let (x, residual_in) = (tensors.input::<bf16>("x"), tensors.input::<bf16>("residual_in"));
        let outputs = FusedAddRmsNormOutputs {
            y: tensors.output("y"),
            residual_out: tensors.output("residual_out"),
            rstd: tensors.optional_output("rstd"),
        };
        hk_norm::fused_add_rmsnorm(stream, x, residual_in, tensors.input::<bf16>("weight"), outputs, options)
    };
    let mut table = Refusals::new(RmsNormOptions::default(), operator)
        .input::<bf16>("x", [3, 4])
        .input::<bf16>("residual_in", [3, 4])
        .input::<bf16>("weight", [4])
        .output::<bf16>("y", [3, 4])
        .output::<bf16>("residual_out", [3, 4])
        .output::<f32>("rstd", [3])
        .accepts(|_| {})
        .accepts(|call| call.without("rstd"))
        .accepts(|call| call.overlap("residual_in", "y", 0))
        .refuses(kind!(Shape), &["fused_add_rmsnorm: residual_in", "[2, 4]", "[3, 4] (shape of x)"], |call| {
            call.shape("residual_in", [2, 4])
        })
        .refuses(kind!(Shape), &["weight", "[5]", "[4] (columns of x)"], |call| call.shape("weight", [5]))
        .refuses(kind!(Shape), &["y"], |call| call.shape("y", [3, 3]))
        .refuses(kind!(Shape), &["residual_out"], |call| call.shape("residual_out", [3, 3]))
        .refuses(kind!(Shape), &["rstd", "[4]"], |call| call.shape("rstd", [4]))
        .refuses(kind!(Empty), &["x"], |call| {
            for name in ["x", "residual_in", "y", "residual_out"] {
                call.shape(name, [3, 0]);
            }
        })
        .refuses(kind!(Stride), &["residual_in"], |call| call.strides("residual_in", [1, 3]))
        .refuses(kind!(Stride), &["weight"], |call| call.strides("weight", [3]))
        .refuses(kind!(Stride), &["rstd"], |call| call.strides("rstd", [2]))
        .refuses_other_devices()
        .refuses_overlaps();
    for eps in [-1.0, f32::NAN, f32::INFINITY] {
        table = table.refuses(kind!(Argument), &["eps"], |call| call.options.eps = eps);
    }
}
