//! Feed-forward layers: against f64 at awkward sizes and layouts by every path; laws; errors.

use hk_core::{DType, Error, bf16, f16};
use hk_gemm::{
    Activation, FfOptions, FfPath, Half, Precision, ff_fused_gated, ff_fused_ungated, ff_fused_workspace,
    reference,
};
use hk_testkit::proptest::test_runner::TestRunner;
use hk_testkit::{
    self as kit, Array, Fill, Gpu, HostTensorF64, Place, Tensor, Tolerance, assert_error, devices, kind,
    proptest::prelude::*,
};

const TOLERANCE: Tolerance = Tolerance::Sum { terms: 1.0 / (1u64 << 18) as f64 };

/// A call.
#[derive(Debug, Clone)]
struct Case {
    gated: bool,
    m: usize,
    k: usize,
    i: usize,
    options: FfOptions,
    /// Elements between rows, and before the first, of `x`, `w_up`, `w_down` and `y`.
    pads: [[usize; 2]; 4],
    seed: u64,
}

impl Case {
    fn new(gated: bool, [m, k, i]: [usize; 3]) -> Self {
        Self { gated, m, k, i, options: FfOptions::default(), pads: [[0; 2]; 4], seed: 1 }
    }

    fn by(self, path: FfPath) -> Self {
        Self { options: FfOptions { path: Some(path), ..self.options }, ..self }
    }

    fn act(self, activation: Option<Activation>) -> Self {
        Self { options: FfOptions { activation, ..self.options }, ..self }
    }

    fn up_rows(&self) -> usize {
        if self.gated { 2 * self.i } else { self.i }
    }

    /// `x`, `w_up`, `w_down`.
    fn inputs<T: Half>(&self) -> [Vec<T>; 3] {
        let random = |len, which, scale: f32| {
            let x = Fill::Normal.elements::<f32>(len, self.seed * 11 + which);
            x.into_iter().map(|x| T::from_f32(x * scale)).collect()
        };
        let spread = 1.0 / (self.k as f32).sqrt();
        [
            random(self.m * self.k, 1, 1.0),
            random(self.up_rows() * self.k, 2, spread),
            random(self.i * self.k, 3, 1.0),
        ]
    }

    fn reference<T: Half>(&self, inputs: &[Vec<T>; 3]) -> HostTensorF64 {
        let [x, w_up, w_down] = [0, 1, 2].map(|i| kit::widen(&inputs[i]));
        let sizes = [self.m, self.k, self.i];
        let sums =
            reference::feed_forward(&x, &w_up, &w_down, sizes, self.gated, self.options.activation, T::DTYPE);
        HostTensorF64 { shape: vec![self.m, self.k], values: sums.values, magnitudes: sums.magnitudes }
    }

    fn run<T: Half>(&self, gpu: &Gpu, [x, w_up, w_down]: &[Vec<T>; 3]) -> Array<T> {
        let place =
            |rows, i: usize| Place::rows([rows, self.k], self.k + self.pads[i][0]).shifted(self.pads[i][1]);
        let x = gpu.upload(x, place(self.m, 0));
        let w_up = gpu.upload(w_up, place(self.up_rows(), 1));
        let w_down = gpu.upload(w_down, place(self.i, 2));
        let mut y = gpu.poisoned::<T>(place(self.m, 3));
        let precision = if T::DTYPE == DType::F16 { Precision::F16 } else { Precision::Bf16 };
        let (info, sizes) = (gpu.stream().device().info(), [self.m, self.k, self.i]);
        let len = ff_fused_workspace(info, precision, sizes, self.gated, self.options);
        let mut workspace = gpu.poisoned::<f32>([len]);
        let run = if self.gated { ff_fused_gated } else { ff_fused_ungated };
        let (a, b, c) = (x.view(), w_up.view(), w_down.view());
        run(gpu.stream(), a, b, c, y.view_mut(), workspace.view_mut(), self.options)
            .unwrap_or_else(|e| panic!("{self:?} on {}: {e}", gpu.spec()));
        let mut got = gpu.download(&y);
        got.label = format!("{self:?}: {}", got.label);
        gpu.assert_guards(&y);
        gpu.assert_guards(&workspace);
        got
    }

    fn check<T: Half>(&self) {
        let inputs = self.inputs::<T>();
        let want = self.reference(&inputs);
        for gpu in devices() {
            kit::assert_near(&self.run(&gpu, &inputs), &want, TOLERANCE);
        }
    }
}

const PATHS: [FfPath; 3] = [FfPath::Fused, FfPath::Split, FfPath::Tiles];

#[test]
fn paths_and_rows() {
    for (n, path) in PATHS.into_iter().enumerate() {
        for (j, m) in [1, 16, 17, 33, 64].into_iter().enumerate() {
            for gated in [false, true] {
                // Slices of one chunk, and of some; the last one short.
                let [k, i] = if (j + n) % 2 == 0 { [136, 72] } else { [264, 40] };
                let case = Case::new(gated, [m, k, i]).by(path).act(Some(Activation::Silu));
                if j % 2 == 0 { case.check::<bf16>() } else { case.check::<f16>() }
            }
        }
    }
    // More rows than kernels of few have.
    Case::new(true, [70, 72, 40]).act(Some(Activation::Gelu)).check::<bf16>();
}
