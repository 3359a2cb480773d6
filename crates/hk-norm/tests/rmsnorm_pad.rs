//! `rmsnorm_pad` and `fused_add_rmsnorm_pad` on the emulated GPUs (and real ones if there are any), against `rmsnorm` and its
//! f64 reference, then zeros.

use crate::common::{dense, with_eps};
use hk_core::{Float, Layout, TensorView, TensorViewMut, bf16, f16};
use hk_norm::{
    FusedAddRmsNormOutputs, FusedAddRmsNormPadOutputs, RmsNormPadOptions, Weight, padded_columns, reference,
};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Refusals, RowCase, Tensor, Tolerance, assert_error, kind,
    proptest::prelude::*, widen,
};

/// The layout of `x`.
#[derive(Debug, Clone, Copy)]
enum Lies {
    InRows,
    /// Columns with this stride.
    Spread(usize),
    /// Column-major.
    Turned,
}

impl Lies {
    fn place<T: Float>(self, c: &RowCase<T>) -> Place {
        let strides = match self {
            Self::InRows => return c.place(0),
            Self::Spread(step) => [c.cols * step + 1, step],
            Self::Turned => [1, c.rows + 2],
        };
        Place::new(Layout::with_strides(c.shape(), strides).unwrap()).shifted(1)
    }
}

fn lies() -> impl Strategy<Value = Lies> {
    prop_oneof![3 => Just(Lies::InRows), 1 => (2usize..=4).prop_map(Lies::Spread), 1 => Just(Lies::Turned)]
}

/// Multiples to pad to.
const PADS: [usize; 7] = [0, 1, 16, 64, 96, 128, 256];

fn padded_place<T: Float>(c: &RowCase<T>, padded: usize, i: usize) -> Place {
    let (stride, aligned) =
        (c.place(i).layout().strides()[0], c.place(i).layout().strides()[0].is_multiple_of(8));
    Place::rows([c.rows, padded], stride.max(padded)).shifted(if aligned { 0 } else { 3 })
}

#[track_caller]
fn padded<T: Float, W: Weight<T>>(
    gpu: &Gpu,
    x: &Tensor<T>,
    w: &Tensor<W>,
    y: Place,
    eps: f32,
    multiple: usize,
) -> Array<T> {
    let mut y = gpu.poisoned(y);
    let options = RmsNormPadOptions { eps, pad_multiple: multiple };
    hk_norm::rmsnorm_pad(gpu.stream(), x.view(), w.view(), y.view_mut(), options).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_untouched(x);
    gpu.download(&y)
}

#[track_caller]
fn fused<T: Float, W: Weight<T>>(
    gpu: &Gpu,
    (x, residual): (&Tensor<T>, &Tensor<T>),
    w: &Tensor<W>,
    (y, out): (Place, Place),
    eps: f32,
    multiple: usize,
) -> (Array<T>, Array<T>) {
    let (mut y, mut out) = (gpu.poisoned(y), gpu.poisoned(out));
    let outputs = FusedAddRmsNormPadOutputs { y: y.view_mut(), residual_out: out.view_mut() };
    let options = RmsNormPadOptions { eps, pad_multiple: multiple };
    hk_norm::fused_add_rmsnorm_pad(gpu.stream(), x.view(), residual.view(), w.view(), outputs, options)
        .unwrap();
    gpu.assert_guards(&y);
    gpu.assert_guards(&out);
    gpu.assert_untouched(x);
    gpu.assert_untouched(residual);
    (gpu.download(&y), gpu.download(&out))
}

/// The first columns are bitwise `rmsnorm`, the others +0; the fused form is near the reference of the unrounded sum, and stores
/// the rounded one.
#[track_caller]
fn check<T: Float, W: Weight<T> + Float>(
    c: &RowCase<T>,
    weight: &[W],
    lies: Lies,
    multiple: usize,
    eps: f32,
) {
    let (cols, n) = (c.cols, padded_columns(c.cols, multiple).unwrap());
    let residual = c.matrix(1);
    let (x64, r64, w64) = (widen(&c.x), widen(&residual), widen(weight));
    let (want, want_sum) = reference::fused_add_rmsnorm_pad::<T>(&x64, &r64, &w64, n, eps);
    for gpu in kit::devices() {
        let (x, w) = (gpu.upload(&c.x, lies.place(c)), gpu.upload(weight, [cols]));
        let y = padded(&gpu, &x, &w, padded_place(c, n, 1), eps, multiple);
        let unpadded =
            crate::common::rmsnorm(&gpu, &gpu.upload(&c.x, c.shape()), &w, c.shape(), with_eps(eps)).y;
        for row in 0..c.rows {
            let (columns, pads) = y.row(row).split_at(cols);
            kit::assert_bits(&Array::new("y", [cols], columns.to_vec()), unpadded.row(row));
            assert!(
                pads.iter().all(|v| bytemuck::bytes_of(v).iter().all(|b| *b == 0)),
                "pads of row {row}: {pads:?}"
            );
        }

        let r = gpu.upload(&residual, c.place(1));
        let (y, sum) = fused(&gpu, (&x, &r), &w, (padded_place(c, n, 2), c.place(3)), eps, multiple);
        kit::assert_close(&sum, &want_sum, Tolerance::Exact);
        kit::assert_close(&y, &want, Tolerance::Reduction);
        for row in y.chunks(n) {
            let pads = &row[cols..];
            assert!(pads.iter().all(|v| bytemuck::bytes_of(v).iter().all(|b| *b == 0)), "{pads:?}");
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_is_rmsnorm_and_zeros(
        c in kit::row_case::<bf16>(1..=40, 1..=18_000), f32_weight: bool, lies in lies(), pad in 0..PADS.len(),
    ) {
        if f32_weight {
            check(&c, &crate::common::f32_weights(&c), lies, PADS[pad], 1e-6);
        } else {
            check(&c, &c.w, lies, PADS[pad], 1e-6);
        }
    }

    #[test]
    fn f16_is_rmsnorm_and_zeros(c in kit::row_case::<f16>(1..=40, 1..=18_000), lies in lies(), pad in 0..PADS.len()) {
        check(&c, &c.w, lies, PADS[pad], 1e-5);
    }

    #[test]
    fn f32_is_rmsnorm_and_zeros(c in kit::row_case::<f32>(1..=40, 1..=18_000), lies in lies(), pad in 0..PADS.len()) {
        check(&c, &c.w, lies, PADS[pad], 1e-5);
    }

    /// Batch invariance: a row's bits depend on neither other rows nor the layout.
    #[test]
    fn a_row_does_not_depend_on_its_surroundings(
        c in kit::row_case::<bf16>(2..=30, 1..=18_000), pick in any::<prop::sample::Index>(), lies in lies(),
    ) {
        let (row, n) = (pick.index(c.rows), c.cols.next_multiple_of(64));
        let residual = c.matrix(1);
        let part = |all: &[bf16]| all[row * c.cols..][..c.cols].to_vec();
        for gpu in kit::devices() {
            let w = gpu.upload(&c.w, [c.cols]);
            let inputs = (&gpu.upload(&c.x, lies.place(&c)), &gpu.upload(&residual, c.place(1)));
            let (all, _) = fused(&gpu, inputs, &w, (padded_place(&c, n, 2), c.place(3)), 1e-6, 64);
            let one = [1, c.cols];
            let inputs = (&gpu.upload(&part(&c.x), one), &gpu.upload(&part(&residual), one));
            let (alone, _) = fused(&gpu, inputs, &w, ([1, n].into(), one.into()), 1e-6, 64);
            kit::assert_bits(&alone, all.row(row));
        }
    }

    /// `residual_out` may alias `residual_in` or `x`.
    #[test]
    fn in_place_is_out_of_place(c in kit::row_case::<f16>(1..=20, 1..=18_000), lies in lies()) {
        let n = c.cols.next_multiple_of(128);
        let residual = c.matrix(1);
        for gpu in kit::devices() {
            let w = gpu.upload(&c.w, [c.cols]);
            let (mut x, mut r) = (gpu.upload(&c.x, lies.place(&c)), gpu.upload(&residual, c.place(1)));
            let places = (padded_place(&c, n, 2), c.place(3));
            let (want, want_sum) = fused(&gpu, (&x, &r), &w, places, 1e-6, 128);
            let mut y = gpu.poisoned::<f16>([c.rows, n]);
            let run = |x: TensorView<f16>, r: TensorView<f16>, y: TensorViewMut<f16>, out: TensorViewMut<f16>| {
                let outputs = FusedAddRmsNormPadOutputs { y, residual_out: out };
                let options = RmsNormPadOptions { eps: 1e-6, pad_multiple: 128 };
                hk_norm::fused_add_rmsnorm_pad(gpu.stream(), x, r, w.view(), outputs, options).unwrap();
            };
            let out = r.view_mut();
            run(x.view(), out.alias(), y.view_mut(), out);
            kit::assert_bits(&gpu.download(&y), &want);
            kit::assert_bits(&gpu.download(&r), &want_sum);
            gpu.assert_guards(&r);
            if matches!(lies, Lies::InRows) {
                gpu.reset(&mut r);
                gpu.reset(&mut y);
                let out = x.view_mut();
                run(out.alias(), r.view(), y.view_mut(), out);
                kit::assert_bits(&gpu.download(&y), &want);
                kit::assert_bits(&gpu.download(&x), &want_sum);
                gpu.assert_guards(&x);
            }
        }
    }
}

/// The widths, multiples and types of the specification; all row counts at full size only.
#[test]
fn every_width_and_multiple() {
    let rows = if kit::full() { &[1, 4, 8, 16, 32, 256, 8192][..] } else { &[1, 4] };
    for (i, cols) in [1, 4, 16, 127, 130, 320, 640, 2880, 7168, 8193].into_iter().enumerate() {
        for (j, multiple) in [0, 16, 64, 128, 256].into_iter().enumerate() {
            for &rows in rows.iter().filter(|&&rows| rows <= 256 || cols <= 2880) {
                match (i + j) % 3 {
                    0 => check_dense::<bf16>(rows, cols, multiple),
                    1 => check_dense::<f16>(rows, cols, multiple),
                    _ => check_dense::<f32>(rows, cols, multiple),
                }
            }
        }
    }
    check_dense::<bf16>(3, 16_400, 256);
}

fn check_dense<T: Float>(rows: usize, cols: usize, multiple: usize) {
    let c: RowCase<T> = dense(rows, cols, Fill::Normal, cols as u64);
    check(&c, &c.w, Lies::InRows, multiple, 1e-5);
}

/// Almost all elements are correctly rounded from the unrounded sum; rounding the sum first gets many of them wrong.
#[test]
fn the_sum_is_not_rounded_before_the_norm() {
    let c: RowCase<bf16> = dense(8, 1000, Fill::Wide, 11);
    let residual = c.matrix(1);
    let (x64, r64, w64) = (widen(&c.x), widen(&residual), widen(&c.w));
    let (unrounded, sum) = reference::fused_add_rmsnorm_pad::<bf16>(&x64, &r64, &w64, 1000, 1e-6);
    let exact_sum: Vec<bf16> = sum.into_iter().map(bf16::from_f64).collect();
    for gpu in kit::devices() {
        let inputs = (&gpu.upload(&c.x, c.shape()), &gpu.upload(&residual, c.shape()));
        let w = gpu.upload(&c.w, [1000]);
        let (y, _) = fused(&gpu, inputs, &w, (c.shape().into(), c.shape().into()), 1e-6, 0);
        kit::assert_rounded(&y, &unrounded, 0.99);
        let rounded = crate::common::with_eps(1e-6);
        let (two_steps, sum) = {
            let (mut y, mut out) = (gpu.poisoned::<bf16>(c.shape()), gpu.poisoned::<bf16>(c.shape()));
            let (xv, rv) = (inputs.0.view(), inputs.1.view());
            let outputs =
                FusedAddRmsNormOutputs { y: y.view_mut(), residual_out: out.view_mut(), rstd: None };
            hk_norm::fused_add_rmsnorm(gpu.stream(), xv, rv, w.view(), outputs, rounded).unwrap();
            (gpu.download(&y), gpu.download(&out))
        };
        kit::assert_bits(&sum, &exact_sum);
        assert!(y.iter().zip(two_steps.iter()).filter(|(a, b)| a != b).count() > y.len() / 20);
    }
}

/// Rows of NaN have pads of zero.
#[test]
fn pads_are_zero_whatever_the_row_holds() {
    for (cols, multiple) in [(100, 128), (104, 128), (5000, 64), (17_000, 256)] {
        let mut c: RowCase<f32> = dense(3, cols, Fill::Normal, 12);
        c.x[cols] = f32::NAN;
        c.x[2 * cols] = f32::INFINITY;
        let n = cols.next_multiple_of(multiple);
        for gpu in kit::devices() {
            let (x, w) = (gpu.upload(&c.x, c.shape()), gpu.upload(&c.w, [cols]));
            let y = padded(&gpu, &x, &w, [3, n].into(), 1e-6, multiple);
            assert!(y.row(1)[..cols].iter().all(|v| v.is_nan()));
            assert!(y.chunks(n).all(|row| row[cols..].iter().all(|v| v.to_bits() == 0)));
        }
    }
}

/// Strided columns, under all sanitizers.
#[test]
fn spread_columns_have_no_finding() {
    for (rows, cols) in [(70, 40), (5, 1000), (3, 4100), (2, 16_500)] {
        let c: RowCase<bf16> = dense(rows, cols, Fill::Normal, 13);
        let n = cols.next_multiple_of(16);
        for gpu in kit::sanitized_devices() {
            for lies in [Lies::Spread(3), Lies::Turned] {
                let (x, w) = (gpu.upload(&c.x, lies.place(&c)), gpu.upload(&c.w, [cols]));
                let r = gpu.upload(&c.x, c.shape());
                padded(&gpu, &x, &w, [rows, n].into(), 1e-6, 16);
                fused(&gpu, (&x, &r), &w, ([rows, n].into(), c.shape().into()), 1e-6, 16);
            }
        }
    }
}

#[test]
fn nothing_is_launched_for_no_rows() {
    for gpu in kit::devices() {
        gpu.stream().take_counters().unwrap();
        let (x, w) = (gpu.upload::<f32>(&[], [0, 8]), gpu.upload(&[1.0f32; 8], [8]));
        padded(&gpu, &x, &w, [0, 16].into(), 1e-6, 16);
        fused(&gpu, (&x, &x), &w, ([0, 16].into(), [0, 8].into()), 1e-6, 16);
        if let Some(counters) = gpu.stream().take_counters().unwrap() {
            assert_eq!(counters.workgroups, 0);
        }
    }
}

const PAD_16: RmsNormPadOptions = RmsNormPadOptions { eps: 1e-6, pad_multiple: 16 };

/// Errors of the tensors that both operators have.
#[track_caller]
fn refuses_common_errors(op: &str, mut table: Refusals<RmsNormPadOptions>) {
    let message = format!(
        "{op}: y: shape [3, 16], expected [3, 32] (rows of x, its columns padded to a multiple of 32)"
    );
    for eps in [-1.0, f32::NAN, f32::INFINITY] {
        table = table.refuses(kind!(Argument), &["eps"], |call| call.options.eps = eps);
    }
    let _ = table
        .accepts(|_| {})
        .accepts(|call| call.strides("x", [1, 3]))
        .refuses(kind!(Shape), &[&message], |call| call.options.pad_multiple = 32)
        .refuses(kind!(Shape), &["y", "[3, 4]"], |call| call.options.pad_multiple = 0)
        .refuses(kind!(Shape), &["y"], |call| call.options.pad_multiple = usize::MAX / 2 + 1)
        .refuses(kind!(Shape), &["weight", "[5]", "[4]"], |call| call.shape("weight", [5]))
        .refuses(kind!(Shape), &["x", "[12]", "2 axes"], |call| call.shape("x", [12]))
        .refuses(kind!(Empty), &["x", "[3, 0]"], |call| call.shape("x", [3, 0]))
        .refuses(kind!(Stride), &["x"], |call| {
            // One column, repeated.
            call.broadcast("x", [3, 4]);
        })
        .refuses(kind!(Stride), &[&format!("{op}: y")], |call| call.strides("y", [1, 3]))
        .refuses(kind!(Stride), &["weight"], |call| call.strides("weight", [2]))
        .refuses_other_devices()
        .refuses_overlaps();
}

#[test]
fn errors_of_rmsnorm_pad() {
    let table = || {
        Refusals::new(PAD_16, |stream, tensors, options| {
            let (x, weight) = (tensors.input::<bf16>("x"), tensors.input::<bf16>("weight"));
            hk_norm::rmsnorm_pad(stream, x, weight, tensors.output("y"), options)
        })
        .input::<bf16>("x", [3, 4])
        .input::<bf16>("weight", [4])
        .output::<bf16>("y", [3, 16])
    };
    refuses_common_errors("rmsnorm_pad", table());
    let _ = table()
        .refuses(kind!(Shape), &["[3, 8]"], |call| {
            call.shape("x", [3, 5]);
            call.shape("weight", [5]);
            call.options.pad_multiple = 4;
        })
        .refuses(kind!(Overlap), &["x and y"], |call| {
            call.options.pad_multiple = 0;
            call.shape("y", [3, 4]);
            call.overlap("x", "y", 0);
        });
}

#[test]
fn errors_of_fused_add_rmsnorm_pad() {
    let table = || {
        Refusals::new(PAD_16, |stream, tensors, options| {
            let (x, residual_in) = (tensors.input::<bf16>("x"), tensors.input::<bf16>("residual_in"));
            let outputs = FusedAddRmsNormPadOutputs {
                y: tensors.output("y"),
                residual_out: tensors.output("residual_out"),
            };
            let weight = tensors.input::<bf16>("weight");
            hk_norm::fused_add_rmsnorm_pad(stream, x, residual_in, weight, outputs, options)
        })
        .input::<bf16>("x", [3, 4])
        .input::<bf16>("residual_in", [3, 4])
        .input::<bf16>("weight", [4])
        .output::<bf16>("y", [3, 16])
        .output::<bf16>("residual_out", [3, 4])
    };
    refuses_common_errors("fused_add_rmsnorm_pad", table());
    let residual = ["fused_add_rmsnorm_pad: residual_in", "[3, 4] (shape of x)"];
    let _ = table()
        .accepts(|call| call.overlap("residual_in", "residual_out", 0))
        .refuses(kind!(Shape), &residual, |call| call.shape("residual_in", [2, 4]))
        .refuses(kind!(Shape), &["residual_out", "[3, 16]"], |call| call.shape("residual_out", [3, 16]))
        .refuses(kind!(Stride), &["residual_in"], |call| call.strides("residual_in", [1, 3]))
        .refuses(kind!(Stride), &["residual_out"], |call| call.strides("residual_out", [1, 3]))
        .refuses(kind!(Overlap), &["residual_in and y"], |call| {
            call.options.pad_multiple = 0;
            call.shape("y", [3, 4]);
            call.overlap("residual_in", "y", 0);
        });
}

#[test]
fn columns_are_padded_to_a_multiple() {
    assert_eq!(padded_columns(2880, 256).unwrap(), 3072);
    assert_eq!(padded_columns(2880, 0).unwrap(), 2880);
    assert_eq!(padded_columns(256, 256).unwrap(), 256);
    assert_eq!(padded_columns(1, usize::MAX).unwrap(), usize::MAX);
    let result = padded_columns(3, usize::MAX - 1);
    assert_eq!(result.unwrap(), usize::MAX - 1);
    let result = padded_columns(usize::MAX, 2);
    assert_error(result.map(drop), kind!(Argument), &["pad_multiple"]);
}
