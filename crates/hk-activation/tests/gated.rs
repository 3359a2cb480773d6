//! The gates on the emulated GPUs (and real ones where there are some) against f64 and their laws.

use hk_activation::{
    ActivationOutput, gelu, gelu_and_mul, gelu_tanh, gelu_tanh_and_mul, reference, silu, silu_and_mul,
    swiglu_oai_and_mul,
};
use hk_core::{DType, Float, Layout, Result, Stream, TensorView, TensorViewMut, bf16, f16};
use hk_testkit::{self as kit, Array, Fill, Gpu, Place, Refusals, Tensor, kind, proptest::prelude::*, widen};

type Call<T, O> = fn(&Stream, TensorView<T>, TensorViewMut<O>) -> Result<()>;
type Exact = fn(&[f64], usize) -> Vec<f64>;

/// The gates, with silu limited and not.
fn gates<T: Float, O: Float>() -> [(Call<T, O>, Exact); 5] {
    [
        (|s, x, y| silu_and_mul(s, x, y, 0.0), |x, d| reference::silu_and_mul(x, d, 0.0)),
        (|s, x, y| silu_and_mul(s, x, y, 1.5), |x, d| reference::silu_and_mul(x, d, 1.5)),
        (gelu_and_mul::<T, O>, reference::gelu_and_mul),
        (gelu_tanh_and_mul::<T, O>, reference::gelu_tanh_and_mul),
        (swiglu_oai_and_mul::<T, O>, reference::swiglu_oai_and_mul),
    ]
}

/// The result at the given place; nothing else is written.
#[track_caller]
fn run<T: Float, O: Float>(gpu: &Gpu, f: Call<T, O>, x: &Tensor<T>, y: impl Into<Place>) -> Array<O> {
    let mut y = gpu.poisoned(y);
    f(gpu.stream(), x.view(), y.view_mut()).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_untouched(x);
    gpu.download(&y)
}

/// Elementwise; the absolute term scales with the second half, as the error of the first half does.
#[track_caller]
fn assert_gated<O: Float>(got: &Array<O>, want: &[f64], x: &[f64], d: usize) {
    let rtol = match O::DTYPE {
        DType::Bf16 => 8e-3,
        DType::F16 => 1e-3,
        _ => 4e-6,
    };
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let b = x[i / d * 2 * d + d + i % d];
        let rounded = O::from_f64(*want).to_f64();
        let got = got.to_f64();
        let same = got == rounded || (got.is_nan() && want.is_nan());
        let bound = rtol * want.abs() + 1e-6 * b.abs().max(1.0);
        assert!(same || (got - want).abs() <= bound, "[{}, {}]: {got:e}, not {want:e}", i / d, i % d);
    }
    assert_eq!(got.len(), want.len());
}

fn check<T: Float, O: Float>(x: &[T], rows: usize, d: usize, from: &Place, to: &Place, which: usize) {
    assert_eq!(x.len(), rows * 2 * d);
    let (f, exact) = gates::<T, O>()[which];
    let values = widen(x);
    let want = exact(&values, d);
    for gpu in kit::devices() {
        let got = run(&gpu, f, &gpu.upload(x, from), to);
        assert_gated(&got, &want, &values, d);
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_reference(c in kit::row_case::<bf16>(1..=60, 1..=3000), which in 0usize..5) {
        random::<bf16, bf16>(&c, which);
    }

    #[test]
    fn bf16_to_f32_matches_reference(c in kit::row_case::<bf16>(1..=60, 1..=3000), which in 0usize..5) {
        random::<bf16, f32>(&c, which);
    }

    #[test]
    fn f16_matches_reference(c in kit::row_case::<f16>(1..=60, 1..=3000), which in 0usize..5) {
        random::<f16, bf16>(&c, which);
    }

    #[test]
    fn f32_matches_reference(c in kit::row_case::<f32>(1..=60, 1..=3000), which in 0usize..5) {
        random::<f32, f16>(&c, which);
    }

    /// Batch-invariant: a row is bitwise identical whatever the other rows and the strides are.
    #[test]
    fn a_row_does_not_depend_on_its_surroundings(
        c in kit::row_case::<f16>(2..=40, 1..=3000),
        pick in any::<prop::sample::Index>(),
        which in 0usize..5,
    ) {
        let d = c.cols;
        let x = [c.matrix(0), c.matrix(1)].concat();
        let row = pick.index(c.rows);
        for gpu in kit::devices() {
            let (f, _) = gates::<f16, f32>()[which];
            let all = run(&gpu, f, &gpu.upload(&x, [c.rows, 2 * d]), c.place(1));
            let alone = run(&gpu, f, &gpu.upload(&x[row * 2 * d..][..2 * d], [1, 2 * d]), [1, d]);
            kit::assert_bits(&alone, all.row(row));
        }
    }
}

/// Rows of two halves of `c.cols` columns, with as many columns between rows as the case has.
fn random<T: Float, O: Float>(c: &kit::RowCase<T>, which: usize) {
    let x = [c.matrix(0), c.matrix(1)].concat();
    let stride = c.place(0).layout().strides()[0] + c.cols;
    let from = Place::rows([c.rows, 2 * c.cols], stride);
    check::<T, O>(&x, c.rows, c.cols, &from, &c.place(1), which);
}

/// Every `d` of the specification, with odd ones and ones that cross tiles, vectorized and scalar.
#[test]
fn every_width() {
    let full = [5760, 8193, 12288, 14336, 18432, 25600, 28672];
    let widths = [1, 2, 7, 8, 32, 64, 127, 128, 130, 250, 384, 512, 768, 1536, 2048, 2056, 2880];
    let widths = widths.iter().chain(if kit::full() { &full[..] } else { &full[1..2] });
    for (i, &d) in widths.enumerate() {
        let rows = [1, 4, 31][i % 3].min((40_000 / d).max(1));
        fn both<T: Float, O: Float>(rows: usize, d: usize, which: usize) {
            let x = Fill::Wide.elements::<T>(rows * 2 * d, d as u64);
            check::<T, O>(&x, rows, d, &[rows, 2 * d].into(), &[rows, d].into(), which);
            let from = Place::rows([rows, 2 * d], 2 * d + 1).shifted(1);
            check::<T, O>(&x, rows, d, &from, &[rows, d].into(), which);
        }
        both::<bf16, bf16>(rows, d, i % 5);
        both::<f16, f32>(rows, d, (i + 1) % 5);
        both::<f32, f32>(rows, d, (i + 2) % 5);
    }
}

/// Every pair of types.
#[test]
fn every_type() {
    fn from<T: Float>() {
        for d in [24, 9] {
            let x = Fill::Normal.elements::<T>(5 * 2 * d, 3);
            for which in 0..5 {
                check::<T, bf16>(&x, 5, d, &[5, 2 * d].into(), &[5, d].into(), which);
                check::<T, f16>(&x, 5, d, &[5, 2 * d].into(), &[5, d].into(), which);
                check::<T, f32>(&x, 5, d, &[5, 2 * d].into(), &[5, d].into(), which);
            }
        }
    }
    from::<bf16>();
    from::<f16>();
    from::<f32>();
}

#[test]
fn many_rows() {
    let rows = if kit::full() { 65536 } else { 3000 };
    for which in [0, 2] {
        let x = Fill::Normal.elements::<bf16>(rows * 256, 5);
        check::<bf16, bf16>(&x, rows, 128, &[rows, 256].into(), &[rows, 128].into(), which);
    }
}

#[test]
fn leading_axes_collapse() {
    let x = Fill::Normal.elements::<f16>(3 * 7 * 32, 6);
    for gpu in kit::devices() {
        let values = widen(&x);
        let want = reference::gelu_and_mul(&values, 16);
        let tensor = gpu.upload(&x, Place::rows([1, 3, 7, 32], 40));
        let got = run(&gpu, gelu_and_mul::<f16, f16>, &tensor, Place::rows([1, 3, 7, 16], 17));
        assert_gated(&got, &want, &values, 16);
    }
}

/// A second half of ones gives the activation bitwise, zeros give zeros, powers of two scale exactly.
#[test]
fn laws() {
    fn check<T: Float + ActivationOutput<T>>() {
        let d = 1024;
        let a = Fill::Wide.elements::<T>(d, 8);
        let with = |b: f32| [a.clone(), vec![T::from_f32(b); d]].concat();
        for gpu in kit::devices() {
            let silu_gate: Call<T, T> = |s, x, y| silu_and_mul(s, x, y, 0.0);
            let pairs: [(Call<T, T>, Call<T, T>); 3] = [
                (silu_gate, silu::<T, T>),
                (gelu_and_mul::<T, T>, gelu::<T, T>),
                (gelu_tanh_and_mul::<T, T>, gelu_tanh::<T, T>),
            ];
            for (gate, unary) in pairs {
                let times = |b: f32| run(&gpu, gate, &gpu.upload(&with(b), [1, 2 * d]), [1, d]);
                let want = run(&gpu, unary, &gpu.upload(&a, [1, d]), [1, d]);
                kit::assert_bits(&times(1.0), &want);
                let halved: Vec<T> = want.iter().map(|v| T::from_f32(v.to_f32() * -4.0)).collect();
                let normal = |v: &T| v.to_f32().abs() > 1e-3;
                for ((got, want), one) in times(-4.0).iter().zip(&halved).zip(want.iter()) {
                    assert!(!normal(one) || got == want, "{got:?}, not {want:?}");
                }
                assert!(times(0.0).iter().all(|v| v.to_f32() == 0.0));
            }
        }
    }
    check::<bf16>();
    check::<f16>();
    check::<f32>();
}

/// NaN and infinities in either half, with limits and without.
#[test]
fn special_values() {
    // Half of the smallest subnormal is zero, and times infinity NaN.
    let mut values = kit::special_values::<f32>();
    values.retain(|v| *v == 0.0 || !v.is_subnormal());
    let n = values.len();
    let a: Vec<f32> = values.iter().flat_map(|&v| vec![v; n]).collect();
    let x = [a, values.repeat(n)].concat();
    for which in 0..5 {
        check::<f32, f32>(&x, 1, n * n, &[1, 2 * n * n].into(), &[1, n * n].into(), which);
    }
    for gpu in kit::devices() {
        let x = gpu.upload(&[f32::NAN, 9.0, 2.0, 1.0, f32::NAN, -9.0], [1, 6]);
        let limited: Call<f32, f32> = |s, x, y| silu_and_mul(s, x, y, 3.0);
        let y = run(&gpu, limited, &x, [1, 3]);
        assert!(y[0].is_nan() && y[1].is_nan(), "{:?}", y.data);
        assert!((f64::from(y[2]) + 3.0 * reference::silu(2.0)).abs() < 1e-5, "{:?}", y.data);
        let swiglu =
            run(&gpu, swiglu_oai_and_mul::<f32, f32>, &gpu.upload(&[100.0f32, -50.0], [1, 2]), [1, 1]);
        assert!((swiglu[0] + 6.0 * 7.0).abs() < 1e-3, "{}", swiglu[0]);
    }
}

/// Rows so far apart that a tile has no more than one.
#[test]
fn rows_far_apart() {
    for (rows, d, stride) in [(3, 16, 1 << 23), (2, 2056, (1 << 23) + 8), (3, 5, (1 << 23) + 1)] {
        let x = Fill::Normal.elements::<bf16>(rows * 2 * d, 7);
        for gpu in kit::devices() {
            let stream = gpu.stream();
            let mut wide = stream.alloc_zeroed::<bf16>((rows - 1) * stride + 2 * d).unwrap();
            let layout = Layout::with_strides([rows, 2 * d], [stride, 1]).unwrap();
            // relu moves the rows there.
            let positive: Vec<bf16> = x.iter().map(|v| bf16::from_f32(v.to_f32().abs())).collect();
            let near = gpu.upload(&positive, [rows, 2 * d]);
            hk_activation::relu(stream, near.view(), wide.view_mut_with(layout, 0).unwrap()).unwrap();
            let mut y = gpu.poisoned::<bf16>([rows, d]);
            gelu_and_mul(stream, wide.view_with(layout, 0).unwrap(), y.view_mut()).unwrap();
            gpu.assert_guards(&y);
            let values = widen(&positive);
            assert_gated(&gpu.download(&y), &reference::gelu_and_mul(&values, d), &values, d);
        }
    }
}

/// Counted: each 128-byte line is accessed once, by few waves, for narrow and for long rows.
#[test]
fn rows_are_moved_once() {
    for (rows, d) in [(2048, 128), (16, 8192), (24, 2880)] {
        let x = vec![bf16::ONE; rows * 2 * d];
        for arch in ["gfx942", "gfx950"] {
            let gpu = Gpu::open(&format!("emu:{arch}?details=true"));
            let (x, mut y) = (gpu.upload(&x, [rows, 2 * d]), gpu.poisoned::<bf16>([rows, d]));
            gpu.stream().take_counters().unwrap();
            silu_and_mul(gpu.stream(), x.view(), y.view_mut(), 0.0).unwrap();
            let counters = gpu.stream().take_counters().unwrap().unwrap();
            let details = counters.details.unwrap();
            let lines = (2 * rows * d / 128) as u64;
            let what = format!("{rows} rows of {d} on {arch}");
            assert_eq!(
                (details.distinct_read_lines, details.distinct_written_lines),
                (2 * lines, lines),
                "{what}"
            );
            if d % 512 == 0 || 512 % d == 0 {
                assert_eq!(
                    (details.global_read_lines, details.global_written_lines),
                    (2 * lines, lines),
                    "{what}"
                );
            }
            assert_eq!(
                (counters.waves, details.scratch_bytes),
                ((rows * d).div_ceil(2048) as u64, 0),
                "{what}"
            );
        }
    }
}

#[test]
fn nothing_is_launched_for_no_rows() {
    for gpu in kit::devices() {
        gpu.assert_nothing_launched(|| {
            run(&gpu, gelu_and_mul::<bf16, bf16>, &gpu.upload::<bf16>(&[], [0, 8]), [0, 4]);
        });
    }
}

#[test]
fn errors() {
    let mut table = Refusals::new(0.0f32, |stream, tensors, limit| {
        silu_and_mul(stream, tensors.input::<bf16>("x"), tensors.output::<bf16>("y"), limit)
    })
    .input::<bf16>("x", [3, 8])
    .output::<bf16>("y", [3, 4])
    .accepts(|_| {})
    .refuses(
        kind!(Shape),
        &["silu_and_mul: x: shape [3, 7], expected an even last axis, two halves"],
        |call| call.shape("x", [3, 7]),
    )
    .refuses(kind!(Shape), &["y: shape [3, 8], expected [3, 4] (half the columns of x)"], |call| {
        call.shape("y", [3, 8])
    })
    .refuses(kind!(Empty), &["silu_and_mul: x"], |call| {
        call.shape("x", [3, 0]);
        call.shape("y", [3, 0]);
    })
    .refuses(kind!(Shape), &["x"], |call| call.shape("x", []))
    .refuses(kind!(Stride), &["x"], |call| call.strides("x", [1, 3]))
    .refuses(kind!(Stride), &["y"], |call| call.strides("y", [1, 3]))
    .refuses(kind!(Overlap), &["x and y"], |call| call.overlap("x", "y", 0))
    .refuses(kind!(TooLarge), &["silu_and_mul: x: 268435456 columns a half", "268435455"], |call| {
        call.shape("x", [0, 1 << 29]);
        call.shape("y", [0, 1 << 28]);
    })
    .refuses_other_devices()
    .refuses_overlaps();
    for limit in [-1.0, f32::NAN, f32::NEG_INFINITY] {
        let says = ["silu_and_mul: limit", &limit.to_string()];
        table = table.refuses(kind!(Argument), &says, |call| call.options = limit);
    }
}
