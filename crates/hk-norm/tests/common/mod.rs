//! Cases, calls and comparisons that the tests share.

use hk_core::{Element, Float};
use hk_norm::{RmsNormOptions, RmsNormOutputs, RoundMode, Weight, WeightOffset};
use hk_testkit::{self as kit, Array, Fill, Gpu, Place, RowCase, Tensor, proptest::prelude::*};

/// Columns that the specification lists, the borders of every kernel, and one past them.
pub const COLS: [usize; 39] = [
    1, 2, 4, 8, 10, 64, 65, 72, 127, 128, 130, 136, 256, 264, 512, 513, 520, 576, 1024, 1032, 1245, 1536,
    1544, 2048, 2056, 2880, 3072, 3080, 4096, 4104, 5120, 6144, 6152, 7168, 8192, 8193, 8200, 16_384, 16_392,
];

/// Options, `eps` not zero.
pub fn options() -> impl Strategy<Value = RmsNormOptions> {
    let eps = prop_oneof![3 => Just(1e-6), 2 => Just(1e-5), 1 => Just(0.5)];
    let offset = prop_oneof![Just(WeightOffset::Zero), Just(WeightOffset::One)];
    let mode = prop_oneof![Just(RoundMode::F32), Just(RoundMode::ModelSensitive)];
    (eps, offset, mode).prop_map(|(eps, weight_offset, round_mode)| RmsNormOptions {
        eps,
        weight_offset,
        round_mode,
    })
}

/// The options with one rounding.
pub fn rounding_once(options: RmsNormOptions) -> RmsNormOptions {
    RmsNormOptions { round_mode: RoundMode::F32, ..options }
}

/// The default options with this `eps`.
pub fn with_eps(eps: f32) -> RmsNormOptions {
    RmsNormOptions { eps, ..RmsNormOptions::default() }
}

/// Weights in f32 for a case, not representable in the narrower types.
pub fn f32_weights<T>(case: &RowCase<T>) -> Vec<f32> {
    Fill::Normal.elements::<f32>(case.cols, case.seed ^ 0xf32).iter().map(|w| 1.0 + 0.25 * w).collect()
}

/// A case of ordinary values, rows tight.
pub fn dense<T: Float>(rows: usize, cols: usize, fill: Fill, seed: u64) -> RowCase<T> {
    RowCase::new(rows, cols, fill, seed, [(cols, 0); 4])
}

/// The `y` that kernels compute from `rstd`, operation by operation in f32.
pub fn compose<T: Float, W: Weight<T> + Float>(
    s: &[T],
    weight: &[W],
    rstd: &[f32],
    options: RmsNormOptions,
) -> Vec<T> {
    let offset = options.weight_offset.value();
    let rows = s.chunks_exact(weight.len()).zip(rstd);
    rows.flat_map(|(row, &rstd)| {
        row.iter().zip(weight).map(move |(s, w)| {
            let mut scaled = s.to_f32() * rstd;
            if options.round_mode == RoundMode::ModelSensitive {
                scaled = T::from_f32(scaled).to_f32();
            }
            T::from_f32(scaled * (w.to_f32() + offset))
        })
    })
    .collect()
}

/// The outputs of a call.
#[derive(Debug, PartialEq)]
pub struct Output<T> {
    pub y: Array<T>,
    pub rstd: Array<f32>,
}

/// Runs `rmsnorm` with `y` in the given place. Asserts that nothing else is written.
#[track_caller]
pub fn rmsnorm<T: Float, W: Weight<T>>(
    gpu: &Gpu,
    x: &Tensor<T>,
    weight: &Tensor<W>,
    y: impl Into<Place>,
    options: RmsNormOptions,
) -> Output<T> {
    let mut y = gpu.poisoned(y);
    let rows = y.layout().rows("test", "y").unwrap().rows;
    let mut rstd = gpu.poisoned([rows]);
    let outputs = RmsNormOutputs { y: y.view_mut(), rstd: Some(rstd.view_mut()) };
    hk_norm::rmsnorm(gpu.stream(), x.view(), weight.view(), outputs, options).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_guards(&rstd);
    gpu.assert_untouched(x);
    gpu.assert_untouched(weight);
    Output { y: gpu.download(&y), rstd: gpu.download(&rstd) }
}

/// Asserts the same bits, NaNs included.
#[track_caller]
pub fn assert_same<T: Element>(got: &Output<T>, want: &Output<T>) {
    kit::assert_bits(&got.y, &want.y);
    kit::assert_bits(&got.rstd, &want.rstd);
}

/// Asserts that every `rstd` is within 1e-6 of the reference, relatively.
#[track_caller]
pub fn assert_rstd(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= 1e-6 * want.abs(), "rstd of row {i}: {got:e}, reference {want:e}");
    }
}
