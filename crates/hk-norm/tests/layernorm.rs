//! `layernorm` and `fused_add_layernorm` on the emulated GPUs (and real ones if there are any), against their f64 reference and
//! laws.

use crate::common::{COLS, dense, f32_weights};
use hk_core::{Float, TensorView, TensorViewMut, bf16, f16};
use hk_norm::{
    FusedAddLayerNormOutputs, LayerNormOptions, LayerNormOutputs, LayerNormWeights, Weight, reference,
};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Refusals, RowCase, Tensor, Tensors, Tolerance, kind,
    proptest::prelude::*, widen,
};

const EPS: f32 = 1e-5;
const OPTIONS: LayerNormOptions = LayerNormOptions { eps: EPS };

/// The weights of a call, on the host.
#[derive(Clone)]
struct Vectors<T, W> {
    weight: Option<Vec<W>>,
    bias: Option<Vec<W>>,
    x_bias: Option<Vec<T>>,
}

impl<T, W> Default for Vectors<T, W> {
    fn default() -> Self {
        Self { weight: None, bias: None, x_bias: None }
    }
}

impl<T: Float, W: Weight<T> + Float> Vectors<T, W> {
    fn without_x_bias(&self) -> Self {
        Self { x_bias: None, ..self.clone() }
    }
}

/// The outputs of a call.
struct Output<T> {
    y: Array<T>,
    residual_out: Option<Array<T>>,
    mean: Array<f32>,
    rstd: Array<f32>,
}

/// Runs `fused_add_layernorm` if there is a residual, else `layernorm`, with outputs in the given places, and checks that
/// nothing else is touched.
#[track_caller]
fn run<T: Float, W: Weight<T> + Float>(
    gpu: &Gpu,
    x: &Tensor<T>,
    residual: Option<&Tensor<T>>,
    vectors: &Vectors<T, W>,
    (y, residual_out): (Place, Place),
    eps: f32,
) -> Output<T> {
    let (mut y, mut out) = (gpu.poisoned(y), gpu.poisoned(residual_out));
    let rows = y.layout().rows("test", "y").unwrap().rows;
    let (mut mean, mut rstd) = (gpu.poisoned([rows]), gpu.poisoned([rows]));
    let weight = vectors.weight.as_ref().map(|v| gpu.upload(v, [v.len()]));
    let bias = vectors.bias.as_ref().map(|v| gpu.upload(v, [v.len()]));
    let x_bias = vectors.x_bias.as_ref().map(|v| gpu.upload(v, [v.len()]));
    let on_device = LayerNormWeights {
        weight: weight.as_ref().map(Tensor::view),
        bias: bias.as_ref().map(Tensor::view),
        x_bias: x_bias.as_ref().map(Tensor::view),
    };
    let (m, r) = (Some(mean.view_mut()), Some(rstd.view_mut()));
    let options = LayerNormOptions { eps };
    match residual {
        Some(residual) => {
            let (xv, rv, yv, ov) = (x.view(), residual.view(), y.view_mut(), out.view_mut());
            let outputs = FusedAddLayerNormOutputs { y: yv, residual_out: ov, mean: m, rstd: r };
            hk_norm::fused_add_layernorm(gpu.stream(), xv, rv, on_device, outputs, options).unwrap();
        }
        None => {
            let outputs = LayerNormOutputs { y: y.view_mut(), mean: m, rstd: r };
            hk_norm::layernorm(gpu.stream(), x.view(), on_device, outputs, options).unwrap();
        }
    }
    gpu.assert_guards(&y);
    gpu.assert_guards(&mean);
    gpu.assert_guards(&rstd);
    gpu.assert_untouched(x);
    match residual {
        Some(residual) => {
            gpu.assert_guards(&out);
            gpu.assert_untouched(residual);
        }
        None => gpu.assert_untouched(&out),
    }
    for vector in [&weight, &bias].into_iter().flatten() {
        gpu.assert_untouched(vector);
    }
    Output {
        y: gpu.download(&y),
        residual_out: residual.map(|_| gpu.download(&out)),
        mean: gpu.download(&mean),
        rstd: gpu.download(&rstd),
    }
}

/// `layernorm` in place, without weights.
fn plain<T: Float>(gpu: &Gpu, x: &[T], shape: [usize; 2], eps: f32) -> Output<T> {
    let none = Vectors::<T, T>::default();
    run(gpu, &gpu.upload(x, shape), None, &none, (shape.into(), shape.into()), eps)
}

/// Each element against the reference: for f32 within the error of the summands and of a mean far from zero, else within the
/// tolerance of reductions.
#[track_caller]
fn assert_near<T: Float>(
    got: &Output<T>,
    want: &reference::LayerNorm,
    bias: Option<&[f64]>,
    weight: Option<&[f64]>,
) {
    let cols = got.y.shape.last().copied().unwrap();
    for (row, (mean, rstd)) in want.mean.iter().zip(&want.rstd).enumerate() {
        let mean_error = (f64::from(got.mean[row]) - mean).abs();
        assert!(mean_error <= 4e-7 * mean.abs() + 1e-6 / rstd, "mean {} for {mean}", got.mean[row]);
        let rstd_error = (f64::from(got.rstd[row]) - rstd).abs();
        assert!(rstd_error <= 2e-6 * rstd, "rstd {} for {rstd}", got.rstd[row]);
    }
    if size_of::<T>() < 4 {
        kit::assert_close(&got.y, &want.y, Tolerance::Reduction);
        return;
    }
    for (i, (y, want_y)) in got.y.iter().zip(&want.y).enumerate() {
        let (row, c) = (i / cols, i % cols);
        let b = bias.map_or(0.0, |b| b[c]);
        let w = weight.map_or(1.0, |w| w[c]);
        let size = (want_y - b).abs() + b.abs();
        let far = 4.0 * 2f64.powi(-23) * want.mean[row].abs() * want.rstd[row] * w.abs();
        let bound = 1e-5 * want_y.abs() + 1e-6 * size.max(1.0) + far;
        let error = (y.to_f64() - want_y).abs();
        assert!(
            error <= bound,
            "[{row}, {c}]: {} for {want_y}, error {error:e}, bound {bound:e}",
            y.to_f64()
        );
    }
}

/// Both operators are near the reference; the fused one is bitwise identical to the two steps.
#[track_caller]
fn check<T: Float, W: Weight<T> + Float>(c: &RowCase<T>, vectors: &Vectors<T, W>, eps: f32) {
    let (x, cols) = (widen(&c.x), c.cols);
    let weight = vectors.weight.as_ref().map(|v| widen(v));
    let bias = vectors.bias.as_ref().map(|v| widen(v));
    let x_bias = vectors.x_bias.as_ref().map(|v| widen(v));
    let on_host = reference::LayerNormWeights {
        weight: weight.as_deref(),
        bias: bias.as_deref(),
        x_bias: x_bias.as_deref(),
    };
    let residual = c.matrix(1);
    let wide_eps = f64::from(eps);
    let want = reference::layernorm::<T>(&x, cols, on_host, wide_eps);
    let (fused_want, sum) =
        reference::fused_add_layernorm::<T>(&x, &widen(&residual), cols, on_host, wide_eps);
    let sum: Vec<T> = sum.into_iter().map(T::from_f64).collect();
    for gpu in kit::devices() {
        let (x, r) = (gpu.upload(&c.x, c.place(0)), gpu.upload(&residual, c.place(1)));
        let places = || (c.place(2), c.place(3));
        let got = run(&gpu, &x, None, vectors, places(), eps);
        assert_near(&got, &want, bias.as_deref(), weight.as_deref());
        let fused = run(&gpu, &x, Some(&r), vectors, places(), eps);
        kit::assert_bits(fused.residual_out.as_ref().unwrap(), &sum);
        assert_near(&fused, &fused_want, bias.as_deref(), weight.as_deref());
        let sum = gpu.upload(&sum, c.shape());
        let steps =
            run(&gpu, &sum, None, &vectors.without_x_bias(), (c.shape().into(), c.shape().into()), eps);
        assert_same(&fused, &steps);
    }
}

#[track_caller]
fn assert_same<T: Float>(got: &Output<T>, want: &Output<T>) {
    kit::assert_bits(&got.y, &want.y);
    kit::assert_bits(&got.mean, &want.mean);
    kit::assert_bits(&got.rstd, &want.rstd);
}

/// Which weights are given, and whether weight and bias are f32.
fn vectors_of<T: Float>(c: &RowCase<T>, which: [bool; 3]) -> Vectors<T, T> {
    let other = |seed| Fill::Normal.elements::<T>(c.cols, c.seed ^ seed);
    Vectors {
        weight: which[0].then(|| c.w.clone()),
        bias: which[1].then(|| other(0xb1a5)),
        x_bias: which[2].then(|| other(0x0b1a5)),
    }
}

#[track_caller]
fn check_either<T: Float>(c: &RowCase<T>, which: [bool; 3], in_f32: bool, eps: f32)
where
    f32: Weight<T>,
{
    let vectors = vectors_of(c, which);
    if in_f32 {
        let bias = vectors.bias.map(|b| b.iter().map(|v| 1.001 * v.to_f32()).collect());
        let weight = vectors.weight.map(|_| f32_weights(c));
        check(c, &Vectors { weight, bias, x_bias: vectors.x_bias }, eps);
    } else {
        check(c, &vectors, eps);
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_reference(
        c in kit::row_case::<bf16>(1..=60, 1..=20_000), which: [bool; 3], in_f32: bool, eps in 1e-6f32..1e-3,
    ) {
        check_either(&c, which, in_f32, eps);
    }

    #[test]
    fn f16_matches_reference(
        c in kit::row_case::<f16>(1..=60, 1..=20_000), which: [bool; 3], in_f32: bool, eps in 1e-6f32..1e-3,
    ) {
        check_either(&c, which, in_f32, eps);
    }

    #[test]
    fn f32_matches_reference(c in kit::row_case::<f32>(1..=60, 1..=20_000), which: [bool; 3], eps in 1e-6f32..1e-3) {
        check(&c, &vectors_of(&c, which), eps);
    }

    /// Batch invariance: a row's bits depend on neither other rows, nor its position, nor the layout.
    #[test]
    fn a_row_does_not_depend_on_its_surroundings(
        c in kit::row_case::<bf16>(2..=40, 1..=20_000),
        pick in any::<prop::sample::Index>(),
        which: [bool; 3],
    ) {
        let row = pick.index(c.rows);
        let (vectors, residual) = (vectors_of(&c, which), c.matrix(1));
        let (x, r) = (&c.x[row * c.cols..][..c.cols], &residual[row * c.cols..][..c.cols]);
        let one = [1, c.cols];
        for gpu in kit::devices() {
            let inputs = (gpu.upload(&c.x, c.place(0)), gpu.upload(&residual, c.place(1)));
            let all = run(&gpu, &inputs.0, Some(&inputs.1), &vectors, (c.place(2), c.place(3)), EPS);
            let inputs = (gpu.upload(x, one), gpu.upload(r, one));
            let alone = run(&gpu, &inputs.0, Some(&inputs.1), &vectors, (one.into(), one.into()), EPS);
            kit::assert_bits(&alone.y, all.y.row(row));
            kit::assert_bits(&alone.mean, &all.mean[row..=row]);
            kit::assert_bits(&alone.rstd, &all.rstd[row..=row]);
        }
    }

    /// Without weights the mean of a row is 0 and its variance var / (var + eps).
    #[test]
    fn rows_have_no_mean_and_unit_variance((rows, cols) in (1usize..=4, 2usize..=5000), seed: u64, eps in 1e-6f32..2.0) {
        let c: RowCase<f32> = dense(rows, cols, Fill::Normal, seed);
        let mean = |row: &[f64]| row.iter().sum::<f64>() / cols as f64;
        let variance = |row: &[f64]| {
            let center = mean(row);
            mean(&row.iter().map(|v| (v - center).powi(2)).collect::<Vec<_>>())
        };
        for gpu in kit::devices() {
            let y = plain(&gpu, &c.x, c.shape(), eps).y;
            for (x, y) in c.x.chunks(cols).zip(y.chunks(cols)) {
                let (x, y) = (widen(x), widen(y));
                prop_assert!(mean(&y).abs() <= 1e-5, "mean {}", mean(&y));
                let (x, y) = (variance(&x), variance(&y));
                let want = x / (x + f64::from(eps));
                prop_assert!((y - want).abs() <= 1e-3, "variance {y} for {want}");
            }
        }
    }

    /// Adding a constant to a row changes nothing beyond f32 rounding of the constant's size.
    #[test]
    fn a_shift_of_the_row_cancels((rows, cols) in (1usize..=3, 2usize..=3000), seed: u64, shift in -64i32..=64) {
        let c: RowCase<f32> = dense(rows, cols, Fill::Grid, seed);
        let shifted: Vec<f32> = c.x.iter().map(|v| v + 16.0 * shift as f32).collect(); // exact
        let rstds = reference::layernorm::<f32>(&widen(&c.x), cols, Default::default(), f64::from(EPS)).rstd;
        for gpu in kit::devices() {
            let (a, b) = (plain(&gpu, &c.x, c.shape(), EPS), plain(&gpu, &shifted, c.shape(), EPS));
            for (i, (a, b)) in a.y.iter().zip(b.y.iter()).enumerate() {
                let rstd = rstds[i / cols];
                let bound = 4.0 * 2f64.powi(-23) * f64::from(16 * shift).abs() * rstd + 2e-6 + 1e-5 * f64::from(a.abs());
                prop_assert!(f64::from((a - b).abs()) <= bound, "{a} and {b}");
            }
        }
    }

    /// Negating x without a bias negates y.
    #[test]
    fn negation_commutes(c in kit::row_case::<f16>(1..=10, 1..=9000), weighted: bool) {
        let minus: Vec<f16> = c.x.iter().map(|v| -*v).collect();
        let vectors = vectors_of(&c, [weighted, false, false]);
        for gpu in kit::devices() {
            let of = |x: &[f16]| run(&gpu, &gpu.upload(x, c.place(0)), None, &vectors, (c.place(1), c.place(2)), EPS);
            let (a, b) = (of(&c.x), of(&minus));
            prop_assert!(a.y.iter().zip(b.y.iter()).all(|(a, b)| a.to_f32() == -b.to_f32()));
            kit::assert_bits(&b.rstd, &a.rstd);
        }
    }

    /// Every permitted alias is bitwise identical to separate tensors.
    #[test]
    fn in_place_is_out_of_place(c in kit::row_case::<bf16>(1..=20, 1..=20_000), which: [bool; 3]) {
        aliases(&c, which);
    }
}

/// `rstd` of a row of f32, from f64.
fn aliases<T: Float>(c: &RowCase<T>, which: [bool; 3]) {
    let residual = c.matrix(1);
    let vectors = vectors_of(c, which);
    for gpu in kit::devices() {
        let mut x = gpu.upload(&c.x, c.place(0));
        let mut r = gpu.upload(&residual, c.place(1));
        let want = run(&gpu, &x, Some(&r), &vectors, (c.place(2), c.place(3)), EPS);
        let want_plain = run(&gpu, &x, None, &vectors, (c.place(2), c.place(3)), EPS);
        let want_out = want.residual_out.as_ref().unwrap();
        let (mut y, mut out) = (gpu.poisoned(c.place(2)), gpu.poisoned(c.place(3)));
        let upload = |v: &Option<Vec<T>>| v.as_ref().map(|v| gpu.upload(v, [v.len()]));
        let [weight, bias, x_bias] = [&vectors.weight, &vectors.bias, &vectors.x_bias].map(upload);
        let on_device = LayerNormWeights::<T, T> {
            weight: weight.as_ref().map(Tensor::view),
            bias: bias.as_ref().map(Tensor::view),
            x_bias: x_bias.as_ref().map(Tensor::view),
        };
        let fused = |x: TensorView<T>, r: TensorView<T>, y: TensorViewMut<T>, out: TensorViewMut<T>| {
            let outputs = FusedAddLayerNormOutputs { y, residual_out: out, mean: None, rstd: None };
            hk_norm::fused_add_layernorm(gpu.stream(), x, r, on_device, outputs, OPTIONS).unwrap();
        };
        macro_rules! expect {
            ($($tensor:ident: $want:expr),+) => {
                $(kit::assert_bits(&gpu.download(&$tensor), $want);)+
                for tensor in [&mut x, &mut r, &mut y, &mut out] {
                    gpu.assert_guards(tensor);
                    gpu.reset(tensor);
                }
            };
        }

        let v = x.view_mut();
        hk_norm::layernorm(gpu.stream(), v.alias(), on_device, v, OPTIONS).unwrap();
        expect!(x: &want_plain.y);
        let v = r.view_mut();
        fused(x.view(), v.alias(), y.view_mut(), v);
        expect!(y: &want.y, r: want_out);
        let v = x.view_mut();
        fused(v.alias(), r.view(), y.view_mut(), v);
        expect!(y: &want.y, x: want_out);
        let v = x.view_mut();
        fused(v.alias(), r.view(), v, out.view_mut());
        expect!(x: &want.y, out: want_out);
        let v = r.view_mut();
        fused(x.view(), v.alias(), v, out.view_mut());
        expect!(r: &want.y, out: want_out);
        let (vx, vr) = (x.view_mut(), r.view_mut());
        fused(vx.alias(), vr.alias(), vx, vr);
        expect!(x: &want.y, r: want_out);
        let (vx, vr) = (x.view_mut(), r.view_mut());
        fused(vx.alias(), vr.alias(), vr, vx);
        expect!(r: &want.y, x: want_out);
    }
}

#[test]
fn in_place_with_long_rows() {
    aliases::<bf16>(&dense(2, 20_480, Fill::Normal, 1), [true, true, true]);
    aliases::<f32>(&dense(2, 16_385, Fill::Normal, 2), [true, false, true]);
}

/// Every width of the specification and every border of a kernel, vectorized and scalar: near the reference, and
/// the same bits either way.
fn every_width<T: Float>() {
    for (i, cols) in COLS.into_iter().enumerate() {
        let c: RowCase<T> = dense([1, 2, 18][i % 3], cols, Fill::Normal, cols as u64);
        let vectors = vectors_of(&c, [true, i % 2 == 0, i % 5 == 0]);
        let on_host = [&vectors.weight, &vectors.bias, &vectors.x_bias].map(|v| v.as_ref().map(|v| widen(v)));
        let [weight, bias, x_bias] = [0, 1, 2].map(|i: usize| on_host[i].as_deref());
        let given = reference::LayerNormWeights { weight, bias, x_bias };
        let want = reference::layernorm::<T>(&widen(&c.x), cols, given, f64::from(EPS));
        let aligned = cols.next_multiple_of(8);
        for gpu in kit::devices() {
            let at = |place: Place| {
                let x = gpu.upload(&c.x, &place);
                run(&gpu, &x, None, &vectors, (place.clone(), place), EPS)
            };
            let got = at(Place::rows(c.shape(), aligned));
            assert_near(&got, &want, bias, weight);
            if size_of::<T>() < 4 && c.rows * cols > 1000 {
                kit::assert_rounded(&got.y, &want.y, 0.99);
            }
            assert_same(&at(Place::rows(c.shape(), aligned + 1).shifted(3)), &got);
        }
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

/// Shapes that other layer norms get wrong, and the row counts of the specification; the largest at full size only.
#[test]
fn odd_and_large_shapes() {
    let mut shapes =
        vec![(359, 1), (1, 359), (128, 2), (1, 89_999), (1, 131_072), (40, 781), (257, 128), (5000, 40)];
    if kit::full() {
        shapes.extend([(1823, 781), (8192, 8192), (16_384, 128), (364_800, 128), (4096, 4096)]);
    }
    for (rows, cols) in shapes {
        let c = dense::<bf16>(rows, cols, Fill::Normal, 3);
        let vectors = vectors_of(&c, [true, true, false]);
        let (w, b) = (widen(vectors.weight.as_ref().unwrap()), widen(vectors.bias.as_ref().unwrap()));
        let given = reference::LayerNormWeights { weight: Some(&w), bias: Some(&b), x_bias: None };
        let want = reference::layernorm::<bf16>(&widen(&c.x), cols, given, f64::from(EPS));
        for gpu in kit::devices() {
            let x = gpu.upload(&c.x, c.shape());
            let got = run(&gpu, &x, None, &vectors, (c.shape().into(), c.shape().into()), EPS);
            assert_near(&got, &want, Some(&b), Some(&w));
        }
    }
    let c = dense::<f32>(1, 131_072, Fill::Normal, 4);
    check(&c, &vectors_of(&c, [true, true, false]), EPS);
}

/// Values far from zero, where E[x^2] - mean^2 has no digit left.
#[test]
fn rows_far_from_zero_keep_their_digits() {
    for cols in [64, 130, 1000, 4096, 20_001] {
        let c = dense::<f32>(3, cols, Fill::Normal, 5);
        let far: Vec<f32> = c.x.iter().map(|v| 1e4 + v).collect();
        let want = reference::layernorm::<f32>(&widen(&far), cols, Default::default(), f64::from(EPS));
        for gpu in kit::devices() {
            let got = plain(&gpu, &far, c.shape(), EPS);
            assert_near(&got, &want, None, None);
            // Tighter than the tolerance: the second mean corrects the first.
            let error = |(y, want): (&f32, &f64)| (f64::from(*y) - want).abs();
            let worst = got.y.iter().zip(&want.y).map(error).fold(0.0, f64::max);
            assert!(worst < 2e-6, "{worst:e} at {cols} columns");
        }
    }
}

/// A constant row is bitwise its bias, for any value and length.
#[test]
fn constant_rows_are_the_bias() {
    for cols in [1, 2, 3, 7, 100, 781, 2880, 4097, 8191, 17_000] {
        for value in [0.0f32, 1.0, -0.1, 3.3333, 1e4, 123_456.7, -7e-30, 2e18] {
            let bias = Fill::Normal.elements::<f32>(cols, 6);
            let vectors = Vectors::<f32, f32> { bias: Some(bias.clone()), ..Default::default() };
            for gpu in kit::devices() {
                let shape = [2, cols];
                let x = gpu.upload(&vec![value; 2 * cols], shape);
                let got = run(&gpu, &x, None, &vectors, (shape.into(), shape.into()), EPS);
                for y in got.y.chunks(cols) {
                    assert!(y == bias, "{value} in {cols} columns");
                }
                assert!(got.mean.iter().all(|m| *m == value), "{:?} for {value}", got.mean.data);
            }
        }
    }
}

/// A NaN or an infinity makes its row NaN, and no other.
#[test]
fn nan_and_infinity_stay_in_their_rows() {
    for cols in [3, 130, 1000, 5000, 17_000] {
        let c: RowCase<bf16> = dense(5, cols, Fill::Normal, 7);
        let mut x = c.x.clone();
        x[cols + 1] = bf16::NAN;
        x[3 * cols + cols / 2] = bf16::INFINITY;
        for gpu in kit::devices() {
            let (got, clean) = (plain(&gpu, &x, c.shape(), EPS), plain(&gpu, &c.x, c.shape(), EPS));
            for row in 0..5 {
                if row == 1 || row == 3 {
                    assert!(got.y.row(row).iter().all(|v| v.is_nan()), "row {row} of {cols}");
                    assert!(got.rstd[row].is_nan());
                } else {
                    assert_eq!(got.y.row(row), clean.y.row(row));
                }
            }
        }
    }
}

#[test]
fn nothing_is_launched_for_no_rows() {
    for gpu in kit::devices() {
        gpu.stream().take_counters().unwrap();
        plain::<f32>(&gpu, &[], [0, 8], EPS);
        let (x, r) = (gpu.upload::<f32>(&[], [0, 8]), gpu.upload::<f32>(&[], [0, 8]));
        let none = Vectors::<f32, f32>::default();
        run(&gpu, &x, Some(&r), &none, ([0, 8].into(), [0, 8].into()), EPS);
        if let Some(counters) = gpu.stream().take_counters().unwrap() {
            assert_eq!(counters.workgroups, 0);
        }
    }
}

/// A row that fits registers is read once, a longer one three times.
#[test]
fn rows_are_read_once() {
    for cols in [1024, 2880, 4096, 8192, 16_384, 16_392] {
        let c = dense::<bf16>(1, cols, Fill::Normal, 8);
        for gpu in kit::devices() {
            let x = gpu.upload(&c.x, c.shape());
            let (w, b) = (gpu.upload(&c.w, [cols]), gpu.upload(&c.w, [cols]));
            let mut y = gpu.poisoned::<bf16>(c.shape());
            gpu.stream().take_counters().unwrap();
            let vectors =
                LayerNormWeights::<_, _> { weight: Some(w.view()), bias: Some(b.view()), x_bias: None };
            hk_norm::layernorm(gpu.stream(), x.view(), vectors, y.view_mut(), OPTIONS).unwrap();
            let Some(counters) = gpu.stream().take_counters().unwrap() else { continue };
            let row = 2 * cols as u64;
            let reads = if cols <= 16_384 { 1 } else { 3 };
            assert_eq!(counters.global_read_bytes, (reads + 2) * row, "{cols} columns on {}", gpu.spec());
            assert_eq!(counters.global_written_bytes, row, "{cols} columns on {}", gpu.spec());
        }
    }
}

/// Each weight, under all sanitizers.
#[test]
fn every_combination_of_vectors_has_no_finding() {
    for cols in [96, 97, 1536] {
        let c = dense::<bf16>(3, cols, Fill::Normal, 9);
        let residual = c.matrix(1);
        for gpu in kit::sanitized_devices() {
            let (x, r) = (gpu.upload(&c.x, c.shape()), gpu.upload(&residual, c.shape()));
            for i in 0..8 {
                let vectors = vectors_of(&c, [i & 1 != 0, i & 2 != 0, i & 4 != 0]);
                run(&gpu, &x, Some(&r), &vectors, (c.shape().into(), c.shape().into()), EPS);
            }
        }
    }
}

/// The weights of a call of bf16.
fn weights<'a>(tensors: &Tensors<'a>) -> LayerNormWeights<'a, bf16, bf16> {
    LayerNormWeights {
        weight: tensors.optional_input("weight"),
        bias: tensors.optional_input("bias"),
        x_bias: tensors.optional_input("x_bias"),
    }
}

/// Errors of the tensors that both operators have.
#[track_caller]
fn refuses_common_errors(op: &str, mut table: Refusals<LayerNormOptions>) {
    for name in ["weight", "bias", "x_bias"] {
        let message = format!("{op}: {name}: shape [5], expected [4] (columns of x)");
        table = table
            .accepts(|call| call.without(name))
            .refuses(kind!(Shape), &[&message], |call| call.shape(name, [5]))
            .refuses(kind!(Stride), &[op, name], |call| call.strides(name, [2]));
    }
    for name in ["mean", "rstd"] {
        table = table
            .accepts(|call| call.without(name))
            .refuses(kind!(Shape), &[name, "[4]", "[3] (rows of x)"], |call| call.shape(name, [4]))
            .refuses(kind!(Stride), &[op, name], |call| call.strides(name, [2]));
    }
    for eps in [-1e-6, f32::NAN, f32::INFINITY] {
        table = table.refuses(kind!(Argument), &["eps", &eps.to_string()], |call| call.options.eps = eps);
    }
    let _ = table
        .accepts(|_| {})
        .accepts(|call| call.overlap("x", "y", 0))
        .refuses(kind!(Shape), &[&format!("{op}: y"), "[3, 3]"], |call| call.shape("y", [3, 3]))
        .refuses(kind!(Stride), &["x"], |call| call.strides("x", [1, 3]))
        .refuses_other_devices()
        .refuses_overlaps();
}

#[test]
fn errors_of_layernorm() {
    let table = || {
        Refusals::new(OPTIONS, |stream, tensors, options| {
            let weights = weights(tensors);
            let outputs = LayerNormOutputs {
                y: tensors.output("y"),
                mean: tensors.optional_output("mean"),
                rstd: tensors.optional_output("rstd"),
            };
            hk_norm::layernorm(stream, tensors.input::<bf16>("x"), weights, outputs, options)
        })
        .input::<bf16>("x", [3, 4])
        .input::<bf16>("weight", [4])
        .input::<bf16>("bias", [4])
        .input::<bf16>("x_bias", [4])
        .output::<bf16>("y", [3, 4])
        .output::<f32>("mean", [3])
        .output::<f32>("rstd", [3])
    };
    refuses_common_errors("layernorm", table());
    let _ = table().refuses(kind!(Empty), &["x", "[3, 0]"], |call| {
        call.shape("x", [3, 0]);
        call.shape("y", [3, 0]);
    });
}

#[test]
fn errors_of_fused_add_layernorm() {
    let table = || {
        Refusals::new(OPTIONS, |stream, tensors, options| {
            let weights = weights(tensors);
            let outputs = FusedAddLayerNormOutputs {
                y: tensors.output("y"),
                residual_out: tensors.output("residual_out"),
                mean: tensors.optional_output("mean"),
                rstd: tensors.optional_output("rstd"),
            };
            let (x, residual_in) = (tensors.input::<bf16>("x"), tensors.input::<bf16>("residual_in"));
            hk_norm::fused_add_layernorm(stream, x, residual_in, weights, outputs, options)
        })
        .input::<bf16>("x", [3, 4])
        .input::<bf16>("residual_in", [3, 4])
        .input::<bf16>("weight", [4])
        .input::<bf16>("bias", [4])
        .input::<bf16>("x_bias", [4])
        .output::<bf16>("y", [3, 4])
        .output::<bf16>("residual_out", [3, 4])
        .output::<f32>("mean", [3])
        .output::<f32>("rstd", [3])
    };
    refuses_common_errors("fused_add_layernorm", table());
    let residual = ["fused_add_layernorm: residual_in", "[2, 4]", "[3, 4] (shape of x)"];
    let _ = table()
        .accepts(|call| call.overlap("residual_in", "residual_out", 0))
        .refuses(kind!(Shape), &residual, |call| call.shape("residual_in", [2, 4]))
        .refuses(kind!(Shape), &["residual_out"], |call| call.shape("residual_out", [3, 3]));
}

/// An output that overlaps a weight, both f32.
#[test]
fn a_mean_on_a_weight_is_refused() {
    let _ = Refusals::new(OPTIONS, |stream, tensors, options| {
        let weights = LayerNormWeights { x_bias: Some(tensors.input("x_bias")), ..Default::default() };
        let outputs =
            LayerNormOutputs { y: tensors.output("y"), mean: Some(tensors.output("mean")), rstd: None };
        hk_norm::layernorm::<f32, f32, f32>(stream, tensors.input("x"), weights, outputs, options)
    })
    .input::<f32>("x", [3, 1])
    .input::<f32>("x_bias", [1])
    .output::<f32>("y", [3, 1])
    .output::<f32>("mean", [3])
    .accepts(|_| {})
    .refuses(kind!(Overlap), &["x_bias and mean"], |call| call.overlap("x_bias", "mean", 0));
}
