//! Feed-forward layers: against f64 at awkward sizes and layouts by every path; laws; errors.

use hk_core::{DType, Layout, bf16, f16};
use hk_gemm::{
    Activation, FfKind, FfOptions, FfPath, Half, Precision, ff_fused_gated, ff_fused_ungated,
    ff_fused_workspace, reference,
};
use hk_testkit::proptest::test_runner::TestRunner;
use hk_testkit::{
    self as kit, Array, Fill, Gpu, HostTensorF64, Place, Tensor, Tolerance, assert_error, devices, kind,
    proptest::prelude::*,
};

hk_testkit::corners_of!(hk_gemm::OPERATORS: ff_fused_gated, ff_fused_ungated);

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
        HostTensorF64::new(vec![self.m, self.k], sums.values).with_magnitudes(sums.magnitudes)
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
        let kind = if self.gated { FfKind::Gated } else { FfKind::Ungated };
        let len = ff_fused_workspace(info, precision, sizes, kind, self.options);
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

/// Lengths that slices, strips, steps and vectors divide and do not; the path is the library's choice.
#[test]
fn awkward_lengths() {
    let lengths =
        [[1, 1, 1], [3, 8, 8], [17, 129, 33], [64, 120, 8], [65, 72, 50], [5, 1032, 200], [129, 40, 96]];
    for (j, sizes) in lengths.into_iter().enumerate() {
        for gated in [false, true] {
            let activation = [Some(Activation::Relu), None, Some(Activation::GeluTanh)][j % 3];
            let case = Case::new(gated, sizes).act(activation);
            if j % 2 == 0 { case.check::<f16>() } else { case.check::<bf16>() }
        }
    }
}

/// Rows with gaps, on 16 bytes or not.
#[test]
fn strides() {
    for path in PATHS {
        let even =
            Case { pads: [[8, 0], [16, 8], [24, 16], [3, 1]], ..Case::new(true, [19, 136, 72]).by(path) };
        even.check::<bf16>();
        Case { gated: false, pads: [[0, 8], [8, 0], [8, 0], [8, 8]], ..even }.check::<bf16>();
    }
    for pads in
        [[[1, 0], [0; 2], [0; 2], [0; 2]], [[0; 2], [0, 1], [0; 2], [0; 2]], [[0; 2], [0; 2], [4, 0], [1, 1]]]
    {
        Case { pads, ..Case::new(true, [9, 72, 40]) }.check::<f16>();
    }
}

/// With the identity for both matrices y is x.
#[test]
fn identity() {
    let n = 264;
    for path in PATHS {
        for m in [5, 30, 64] {
            let case = Case::new(false, [m, n, n]).by(path);
            let mut inputs = case.inputs::<bf16>();
            for w in &mut inputs[1..] {
                *w = (0..n * n).map(|i| bf16::from_f32(if i / n == i % n { 1.0 } else { 0.0 })).collect();
            }
            // A sum that begins with zero is not -0.
            let want: Vec<f64> = inputs[0].iter().map(|x| x.to_f64() + 0.0).collect();
            for gpu in devices() {
                kit::assert_close(&case.run(&gpu, &inputs), &want, Tolerance::Exact);
            }
        }
    }
}

/// Twice x is twice y, exactly, without an activation; the same call gives the same bits; rows do not see each other.
#[test]
fn rows_are_independent() {
    let (k, i) = (136, 88);
    for path in PATHS {
        let case = Case::new(false, [21, k, i]).by(path);
        let inputs = case.inputs::<bf16>();
        for gpu in devices() {
            let y = case.run(&gpu, &inputs);
            kit::assert_bits(&case.run(&gpu, &inputs), &y);
            let mut doubled = inputs.clone();
            doubled[0].iter_mut().for_each(|x| *x = bf16::from_f32(2.0 * x.to_f32()));
            let want: Vec<bf16> = y.iter().map(|y| bf16::from_f32(2.0 * y.to_f32())).collect();
            kit::assert_bits(&case.run(&gpu, &doubled), &want);
            let mut spoilt = inputs.clone();
            spoilt[0][3 * k..4 * k].fill(bf16::NAN);
            spoilt[0][20 * k] = bf16::INFINITY;
            spoilt[2][5] = bf16::NAN;
            let got = case.run(&gpu, &spoilt);
            for row in 0..21 {
                for col in 0..k {
                    let (got, y) = (got[row * k + col], y[row * k + col]);
                    if row == 3 || col == 5 {
                        assert!(got.is_nan(), "{path:?} {row} {col} on {}", gpu.spec());
                    } else if row == 20 {
                        assert!(!got.is_finite(), "{path:?} {row} {col} on {}", gpu.spec());
                    } else {
                        assert_eq!(got.to_bits(), y.to_bits(), "{path:?} {row} {col} on {}", gpu.spec());
                    }
                }
            }
        }
    }
}

#[test]
fn random() {
    let gpus = devices();
    let sizes = (1usize..=80, kit::size(1..=300, &[128]), kit::size(1..=120, &[16, 32]));
    let acts = prop_oneof![
        Just(None),
        Just(Some(Activation::Silu)),
        Just(Some(Activation::Tanh)),
        Just(Some(Activation::Relu6))
    ];
    let pads = [0usize..3, 0usize..3, 0usize..3, 0usize..3];
    let strategy = (sizes, any::<[bool; 2]>(), acts, 0usize..4, pads, 0u64..1000);
    let run = |((m, k, i), [gated, eights], activation, path, pads, seed): (
        _,
        [bool; 2],
        _,
        usize,
        [usize; 4],
        _,
    )| {
        let [k, i] = if eights { [k, i].map(|n: usize| n.next_multiple_of(8)) } else { [k, i] };
        let pads = pads.map(|n| if eights { [8 * n, 8 * (n % 2)] } else { [n, n] });
        let mut case = Case { pads, seed, ..Case::new(gated, [m, k, i]).act(activation) };
        if eights && m <= 64 {
            case.options.path = PATHS.get(path).copied();
        }
        let inputs = case.inputs::<bf16>();
        let want = case.reference(&inputs);
        for gpu in &gpus {
            kit::assert_near(&case.run(gpu, &inputs), &want, TOLERANCE);
        }
        Ok(())
    };
    TestRunner::new(kit::config()).run(&strategy, run).unwrap();
}

#[test]
fn no_rows_and_no_columns() {
    for gpu in devices() {
        for sizes in [[0, 8, 8], [3, 0, 8]] {
            let case = Case::new(true, sizes);
            let inputs = case.inputs::<bf16>();
            gpu.assert_nothing_launched(|| assert!(case.run(&gpu, &inputs).is_empty()));
        }
    }
}

/// The choice: one kernel where its partial sums are small, as for one token; another launch where they are large.
#[test]
fn the_path_follows_from_sizes() {
    let gpu = Gpu::open("emu:gfx942");
    let info = gpu.stream().device().info();
    let len = |sizes, path| {
        ff_fused_workspace(
            info,
            Precision::Bf16,
            sizes,
            FfKind::Gated,
            FfOptions { path, ..FfOptions::default() },
        )
    };
    // Fused: partial sums of y for each slice.
    let [m, k, i] = [1, 4096, 1792];
    assert_eq!(len([m, k, i], Some(FfPath::Fused)), i / 16 * k);
    let large = [64, 4096, 14336];
    assert!(len(large, None) < len(large, Some(FfPath::Fused)) / 4);
    // Whatever it is, it can hold h.
    assert!(len([m, k, i], None) >= i / 2 && len(large, None) >= 64 * 14336 / 2);
}

#[test]
fn errors() {
    let gpu = Gpu::open("emu:gfx942");
    let half = |shape: &[usize]| gpu.poisoned::<bf16>(Place::contiguous(shape));
    let (m, k, i) = (4, 16, 8);
    let (x, w_up, w_down) = (half(&[m, k]), half(&[2 * i, k]), half(&[i, k]));
    let default = FfOptions::default();
    let by = |path| FfOptions { path: Some(path), ..default };
    let full = 4096;
    let bad =
        |[x, w_up, w_down]: [&Tensor<bf16>; 3], y: &mut Tensor<bf16>, len, options, kind, parts: &[&str]| {
            let mut workspace = gpu.poisoned::<f32>([len]);
            gpu.assert_nothing_launched(|| {
                let (y, workspace) = (y.view_mut(), workspace.view_mut());
                let result =
                    ff_fused_gated(gpu.stream(), x.view(), w_up.view(), w_down.view(), y, workspace, options);
                assert_error(result, kind, parts);
            });
            gpu.assert_untouched(y);
        };
    let mut y = half(&[m, k]);
    let turned = |shape: [usize; 2]| {
        let layout = Layout::with_strides(shape, [1, shape[0]]).unwrap();
        gpu.poisoned::<bf16>(Place::new(layout))
    };
    bad([&half(&[k]), &w_up, &w_down], &mut y, full, default, kind!(Shape), &["ff_fused_gated", "x", "[16]"]);
    bad([&x, &half(&[i, k]), &w_down], &mut y, full, default, kind!(Shape), &["w_up", "[16, 16]"]);
    bad([&x, &half(&[2 * i, 8]), &w_down], &mut y, full, default, kind!(Shape), &["w_up", "[16, 16]"]);
    bad([&x, &w_up, &half(&[i, 8])], &mut y, full, default, kind!(Shape), &["w_down", "[8, 16]"]);
    bad([&x, &w_up, &w_down], &mut half(&[m, 8]), full, default, kind!(Shape), &["y", "[4, 16]"]);
    bad([&turned([m, k]), &w_up, &w_down], &mut y, full, default, kind!(Stride), &["x"]);
    bad([&x, &turned([2 * i, k]), &w_down], &mut y, full, default, kind!(Stride), &["w_up"]);
    bad([&x, &w_up, &turned([i, k])], &mut y, full, default, kind!(Stride), &["w_down"]);
    bad([&x, &w_up, &w_down], &mut turned([m, k]), full, default, kind!(Stride), &["y"]);
    bad([&x, &half(&[0, k]), &half(&[0, k])], &mut y, full, default, kind!(Empty), &["w_down", "axis 0"]);
    for (path, needed) in [(FfPath::Fused, "[64]"), (FfPath::Split, "[16]"), (FfPath::Tiles, "[16]")] {
        bad([&x, &w_up, &w_down], &mut y, 15, by(path), kind!(Shape), &["workspace", "[15]", needed]);
    }
    let tall = half(&[65, k]);
    bad(
        [&tall, &w_up, &w_down],
        &mut half(&[65, k]),
        full,
        by(FfPath::Fused),
        kind!(Argument),
        &["path", "Fused", "64 rows"],
    );
    let odd = gpu.poisoned::<bf16>(Place::rows([m, k], k + 1));
    bad(
        [&odd, &w_up, &w_down],
        &mut y,
        full,
        by(FfPath::Split),
        kind!(Argument),
        &["path", "Split", "16 bytes"],
    );

    let mut workspace = gpu.poisoned::<f32>(Place::contiguous([256]).shifted(1));
    let r = ff_fused_gated(
        gpu.stream(),
        x.view(),
        w_up.view(),
        w_down.view(),
        y.view_mut(),
        workspace.view_mut(),
        default,
    );
    assert_error(r, kind!(Align), &["workspace", "16"]);
    let mut table = gpu.poisoned::<f32>([2, 256]);
    let r = ff_fused_gated(
        gpu.stream(),
        x.view(),
        w_up.view(),
        w_down.view(),
        y.view_mut(),
        table.view_mut(),
        default,
    );
    assert_error(r, kind!(Shape), &["workspace", "[2, 256]"]);
    let mut workspace = gpu.poisoned::<f32>([256]);
    let mut both = half(&[m, k]);
    let view = both.view_mut();
    let r = ff_fused_gated(
        gpu.stream(),
        view.alias(),
        w_up.view(),
        w_down.view(),
        view,
        workspace.view_mut(),
        default,
    );
    assert_error(r, kind!(Overlap), &["x", "y"]);
    let far = Gpu::open("emu:gfx950").poisoned::<bf16>([i, k]);
    let r = ff_fused_gated(
        gpu.stream(),
        x.view(),
        w_up.view(),
        far.view(),
        y.view_mut(),
        workspace.view_mut(),
        default,
    );
    assert_error(r, kind!(DeviceMismatch), &["w_down"]);
    let one = gpu.poisoned::<bf16>([1, 1]);
    let long = one.view().broadcast([1 << 31, 1]).unwrap();
    let mut single = half(&[1, 1]);
    let r = ff_fused_ungated(
        gpu.stream(),
        one.view(),
        long,
        long,
        single.view_mut(),
        workspace.view_mut(),
        default,
    );
    assert_error(r, kind!(TooLarge), &["ff_fused_ungated", "w_up", "axis 0"]);
    gpu.assert_untouched(&y);
}
