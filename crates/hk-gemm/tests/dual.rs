//! Two GEMMs in one launch: each as it is alone, whatever the other is.

use crate::common::Operand;
use hk_core::{
    DeviceBuffer, E8M0, Element, Float, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, TensorView,
    TensorViewMut, bf16, f16,
};
use hk_gemm::{
    Activation, BlockScaledInputs, BlockShape, DualFp4Inputs, DualFp8Inputs, DualOutputs, FloatView,
    FuseType, FusedMxInputs, GemmConfig, GemmOptions, GemmProblem, GemmTile, Half, Int8OrFp8, MulAdd,
    Precision, fused_gemm_a8w8_blockscale_a16w16, fused_gemm_afp4wfp4_a16w16, fused_gemm_afp4wfp4_mul_add,
    gemm_a8w8_blockscale, gemm_a16w16, gemm_workspace,
};
use hk_testkit::{self as kit, Array, Fill, Gpu, Place, Tensor, assert_error, kind};

hk_testkit::corners_of!(hk_gemm::OPERATORS: fused_gemm_a8w8_blockscale_a16w16, fused_gemm_afp4wfp4_a16w16);

/// Elements beyond a row, and before the first, of activations, weights and outputs.
#[derive(Debug, Clone, Copy, Default)]
struct Pads {
    x: [usize; 2],
    w: [usize; 2],
    y: [usize; 2],
}

/// Sizes, group of scales, options of a case.
#[derive(Debug, Clone, Copy)]
struct Case {
    m: usize,
    n: [usize; 2],
    k: usize,
    group: BlockShape,
    pads: Pads,
    biased: bool,
    config: Option<GemmConfig>,
    /// f32 of the workspace; none: no workspace.
    space: usize,
}

impl Case {
    fn new(m: usize, n: [usize; 2], k: usize, config: Option<GemmConfig>) -> Self {
        let splits = config.map_or(1, |config| config.splits);
        let space = if splits > 1 { splits * ((m * n[0]).next_multiple_of(4) + m * n[1]) } else { 0 };
        Self { m, n, k, group: BlockShape::default(), pads: Pads::default(), biased: true, config, space }
    }

    fn options(&self) -> GemmOptions {
        GemmOptions { config: self.config, ..GemmOptions::default() }
    }

    /// Of the second GEMM.
    fn second(&self) -> GemmOptions {
        let config = self.config.map(|config| GemmConfig {
            tile: if config.tile == GemmTile::T256x128 { GemmTile::T256x256 } else { config.tile },
            ..config
        });
        GemmOptions { config, ..GemmOptions::default() }
    }
}

fn place([rows, cols]: [usize; 2], [pad, shift]: [usize; 2]) -> Place {
    Place::new(Layout::with_strides([rows, cols], [(cols + pad).max(1), 1]).unwrap()).shifted(shift)
}

fn normal<T: Operand>(len: usize, seed: u64) -> Vec<T> {
    let values = Fill::Normal.elements::<f32>(len, seed);
    values.into_iter().map(|x| T::near(T::SPREAD * x)).collect()
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    Fill::Normal.elements::<f32>(len, seed).into_iter().map(|x| (x.abs() * 1e4) as u32 as u8).collect()
}

/// What a device has of a case but the first operands.
struct Rest<H: Element> {
    x: Tensor<H>,
    w: Tensor<H>,
    bias: [Tensor<f32>; 2],
}

impl<H: Half + Operand> Rest<H> {
    fn new(gpu: &Gpu, c: &Case) -> Self {
        let &Case { m, n, k, pads, .. } = c;
        Self {
            x: gpu.upload(&normal::<H>(m * k, 11), place([m, k], pads.x)),
            w: gpu.upload(&normal::<H>(n[1] * k, 12), place([n[1], k], pads.w)),
            bias: [0, 1].map(|i| gpu.upload(&Fill::Normal.elements::<f32>(n[i], 13 + i as u64), [n[i]])),
        }
    }

    fn bias(&self, c: &Case, i: usize) -> Option<FloatView<'_>> {
        c.biased.then(|| self.bias[i].view().into())
    }

    /// The second GEMM alone.
    fn alone<Y: Float>(&self, gpu: &Gpu, c: &Case) -> Array<Y> {
        let mut y = gpu.poisoned(place([c.m, c.n[1]], c.pads.y));
        let mut space = gpu.poisoned::<f32>([c.space]);
        let view = (c.space > 0).then(|| space.view_mut());
        let (x, w, bias) = (self.x.view(), self.w.view(), self.bias(c, 1));
        gemm_a16w16(gpu.stream(), x, w, bias, y.view_mut(), view, c.second()).unwrap();
        gpu.download(&y)
    }

    fn assert_untouched(&self, gpu: &Gpu) {
        gpu.assert_untouched(&self.x);
        gpu.assert_untouched(&self.w);
    }
}

/// The same bits as each alone, and nothing else is written.
fn check<Y1: Float, Y2: Float>(
    gpu: &Gpu,
    c: &Case,
    got: (Tensor<Y1>, Tensor<Y2>),
    want: (Array<Y1>, Array<Y2>),
) {
    let (mut y1, mut y2) = (gpu.download(&got.0), gpu.download(&got.1));
    y1.label = format!("y1 {c:?}: {}", y1.label);
    y2.label = format!("y2 {c:?}: {}", y2.label);
    kit::assert_bits(&y1, &want.0);
    kit::assert_bits(&y2, &want.1);
    gpu.assert_guards(&got.0);
    gpu.assert_guards(&got.1);
}

fn fp8_case<T: Int8OrFp8 + Operand, H: Half + Operand, Y1: Float, Y2: Float>(gpu: &Gpu, c: &Case) {
    let &Case { m, n: [n1, n2], k, group, pads, .. } = c;
    let x = gpu.upload(&normal::<T>(m * k, 1), place([m, k], pads.x));
    let w = gpu.upload(&normal::<T>(n1 * k, 2), place([n1, k], pads.w));
    let (groups, rows) = (k.div_ceil(group.k), n1.div_ceil(group.n));
    let scales = |len, seed| Fill::Normal.elements::<f32>(len, seed).into_iter().map(|s| 0.01 + s.abs());
    let x_scale = gpu.upload(&scales(m * groups, 3).collect::<Vec<_>>(), [m, groups]);
    let w_scale = gpu.upload(&scales(rows * groups, 4).collect::<Vec<_>>(), [rows, groups]);
    let rest = Rest::<H>::new(gpu, c);
    let mut y1 = gpu.poisoned::<Y1>(place([m, n1], pads.y));
    let mut y2 = gpu.poisoned::<Y2>(place([m, n2], pads.y));
    let mut space = gpu.poisoned::<f32>([c.space]);
    fused_gemm_a8w8_blockscale_a16w16(
        gpu.stream(),
        DualFp8Inputs {
            x_fp8: x.view(),
            w_fp8: w.view().into(),
            x_scale: x_scale.view(),
            w_scale: w_scale.view(),
            group,
            x_bf16: rest.x.view(),
            w_bf16: rest.w.view().into(),
            bias1: rest.bias(c, 0),
            bias2: rest.bias(c, 1),
        },
        DualOutputs { y1: y1.view_mut(), y2: y2.view_mut() },
        (c.space > 0).then(|| space.view_mut()),
        c.options(),
    )
    .unwrap_or_else(|e| panic!("{c:?}: {e}"));
    gpu.assert_guards(&space);
    gpu.assert_untouched(&x);
    gpu.assert_untouched(&w);
    rest.assert_untouched(gpu);

    let mut alone = gpu.poisoned::<Y1>(place([m, n1], pads.y));
    let view = (c.space > 0).then(|| space.view_mut());
    let (bias, options) = (rest.bias(c, 0), c.options());
    let (xs, ws) = (x_scale.view(), w_scale.view());
    let y = alone.view_mut();
    gemm_a8w8_blockscale(
        gpu.stream(),
        BlockScaledInputs { a: x.view(), w: w.view().into(), a_scale: xs, w_scale: ws, group },
        bias,
        y,
        view,
        options,
    )
    .unwrap();
    check(gpu, c, (y1, y2), (gpu.download(&alone), rest.alone(gpu, c)));
}

fn fp4_case<H: Half + Operand, Y1: Float, Y2: Float>(gpu: &Gpu, c: &Case) {
    let &Case { m, n: [n1, n2], k, pads, .. } = c;
    let codes = |len, seed| bytes(len, seed).into_iter().map(Fp4x2).collect::<Vec<_>>();
    let x = gpu.upload(&codes(m * k / 2, 1), place([m, k / 2], pads.x));
    let w = gpu.upload(&codes(n1 * k / 2, 2), place([n1, k / 2], pads.w));
    let scales = |len, seed| bytes(len, seed).into_iter().map(|s| E8M0(123 + s % 8)).collect::<Vec<_>>();
    let x_scale = gpu.upload(&scales(m * k / 32, 3), [m, k / 32]);
    let w_scale = gpu.upload(&scales(n1 * k / 32, 4), [n1, k / 32]);
    let rest = Rest::<H>::new(gpu, c);
    let mut y1 = gpu.poisoned::<Y1>(place([m, n1], pads.y));
    let mut y2 = gpu.poisoned::<Y2>(place([m, n2], pads.y));
    let mut space = gpu.poisoned::<f32>([c.space]);
    fused_gemm_afp4wfp4_a16w16(
        gpu.stream(),
        DualFp4Inputs {
            x_fp4: x.view(),
            w_fp4: w.view().into(),
            x_scale: x_scale.view().into(),
            w_scale: w_scale.view().into(),
            x_bf16: rest.x.view(),
            w_bf16: rest.w.view().into(),
            bias1: rest.bias(c, 0),
            bias2: rest.bias(c, 1),
        },
        DualOutputs { y1: y1.view_mut(), y2: y2.view_mut() },
        (c.space > 0).then(|| space.view_mut()),
        c.options(),
    )
    .unwrap_or_else(|e| panic!("{c:?}: {e}"));
    gpu.assert_guards(&space);
    gpu.assert_untouched(&x);
    gpu.assert_untouched(&w);
    rest.assert_untouched(gpu);

    // Alone it has no bias, but a term that is one for each row.
    let mut alone = gpu.poisoned::<Y1>(place([m, n1], pads.y));
    let bias = gpu.download(&rest.bias[0]);
    let rows: Vec<f32> = (0..m * n1).map(|i| if c.biased { bias[i % n1] } else { 0.0 }).collect();
    let rows = gpu.upload(&rows, [m, n1]);
    let view = (c.space > 0).then(|| space.view_mut());
    let (xs, ws, y) = (x_scale.view(), w_scale.view(), alone.view_mut());
    let (one, b, fuse) = (1.0, rows.view(), FuseType::ScaleAdd);
    fused_gemm_afp4wfp4_mul_add(
        gpu.stream(),
        FusedMxInputs { x: x.view(), w: w.view().into(), x_scale: xs.into(), w_scale: ws.into() },
        MulAdd { a: one.into(), b: b.into(), fuse },
        y,
        view,
        c.options(),
    )
    .unwrap();
    check(gpu, c, (y1, y2), (gpu.download(&alone), rest.alone(gpu, c)));
}

const TILES: [GemmTile; 6] = [
    GemmTile::T256x128,
    GemmTile::T64x64,
    GemmTile::Elements,
    GemmTile::S16x32,
    GemmTile::S32x32,
    GemmTile::S64x32,
];

fn config(tile: GemmTile, splits: usize) -> Option<GemmConfig> {
    Some(GemmConfig { tile, splits, group: 3 })
}

/// Runs a case of fp8, whichever the device takes.
fn fp8<H: Half + Operand, Y1: Float, Y2: Float>(gpu: &Gpu, c: &Case) {
    if <Fp8E4M3 as Operand>::served(gpu.arch()) {
        fp8_case::<Fp8E4M3, H, Y1, Y2>(gpu, c);
    } else {
        fp8_case::<Fp8E4M3Fnuz, H, Y1, Y2>(gpu, c);
    }
}

#[test]
fn both_have_the_bits_they_have_alone() {
    for gpu in kit::devices() {
        for (i, tile) in TILES.into_iter().enumerate() {
            let m = [33, 65, 20, 13, 20, 50][i];
            let one = Case::new(m, [70, 35], 288, config(tile, 1));
            let two = Case::new(m, [33, 129], 1056, config(tile, 2));
            fp8::<bf16, bf16, f32>(&gpu, &one);
            fp8::<f16, f16, bf16>(&gpu, &Case { biased: false, ..two });
            fp4_case::<f16, f32, f16>(&gpu, &one);
            // One rounding of the same sums, whatever adds the bias.
            fp4_case::<bf16, bf16, f32>(&gpu, &Case { biased: false, ..two });
        }
    }
}

#[test]
fn strides_and_elements() {
    let apart = Pads { x: [32, 16], w: [64, 48], y: [3, 1] };
    let askew = Pads { x: [1, 3], w: [3, 1], y: [5, 2] };
    for gpu in kit::devices() {
        let case = Case::new(21, [40, 37], 160, config(GemmTile::T64x64, 2));
        fp8::<bf16, f32, bf16>(&gpu, &Case { pads: apart, ..case });
        fp4_case::<bf16, f32, bf16>(&gpu, &Case { pads: apart, ..case });
        // Groups of few columns.
        fp8::<f16, bf16, f32>(&gpu, &Case { pads: apart, group: BlockShape { n: 8, k: 32 }, ..case });
        let by_elements = Case { config: config(GemmTile::Elements, 2), ..case };
        fp8::<bf16, bf16, f32>(&gpu, &Case { group: BlockShape { n: 2, k: 4 }, ..by_elements });
        // The scalar path, by default.
        let case = Case { pads: askew, config: None, space: 0, group: BlockShape { n: 8, k: 256 }, ..case };
        fp8::<bf16, f32, bf16>(&gpu, &case);
        fp4_case::<f16, f32, bf16>(&gpu, &case);
        // Rows of 8-bit codes that are on 16 bytes, beside floats that are as well; but K is odd.
        fp8::<f16, bf16, bf16>(&gpu, &Case::new(5, [9, 3], 77, config(GemmTile::Elements, 1)));
    }
}

/// Sums that are exact, so that neither tiles nor split-K slices matter.
#[test]
fn the_choice_of_the_device() {
    fn exact<T: Int8OrFp8 + Operand>(gpu: &Gpu, [m, n1, n2, k]: [usize; 4], with_space: bool) {
        let whole = |len: usize, seed| -> Vec<f32> {
            Fill::Normal.elements::<f32>(len, seed).into_iter().map(|x| x.round().clamp(-2.0, 2.0)).collect()
        };
        let [x, w, w2] = [whole(m * k, 1), whole(n1 * k, 2), whole(n2 * k, 3)];
        let product = |w: &[f32], n: usize| -> Vec<f32> {
            let dot = |i: usize, j: usize| (0..k).map(|c| x[i * k + c] * w[j * k + c]).sum();
            (0..m * n).map(|i| dot(i / n, i % n)).collect()
        };
        let codes = |v: &[f32]| v.iter().map(|&v| T::near(v)).collect::<Vec<_>>();
        let halves = |v: &[f32]| v.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>();
        let (x8, w8) = (gpu.upload(&codes(&x), [m, k]), gpu.upload(&codes(&w), [n1, k]));
        let (x16, w16) = (gpu.upload(&halves(&x), [m, k]), gpu.upload(&halves(&w2), [n2, k]));
        let groups = k.div_ceil(128);
        let xs = gpu.upload(&vec![1.0f32; m * groups], [m, groups]);
        let ws = gpu.upload(&vec![1.0f32; n1.div_ceil(128) * groups], [n1.div_ceil(128), groups]);
        let info = gpu.stream().device().info();
        let len = gemm_workspace(info, &GemmProblem::new(Precision::Fp8, m, n1, k).beside(n2));
        // On other targets, split-K of the shorter K can be worth its partial sums.
        if gpu.arch().is_amd() || k > 2048 {
            assert_eq!(len > 0, k > 2048, "{m} {n1} {n2} {k}");
        }
        let mut space = gpu.poisoned::<f32>([len]);
        let (mut y1, mut y2) = (gpu.poisoned::<f32>([m, n1]), gpu.poisoned::<f32>([m, n2]));
        let view = (with_space && len > 0).then(|| space.view_mut());
        let (group, options) = (BlockShape::default(), GemmOptions::default());
        let (out1, out2) = (y1.view_mut(), y2.view_mut());
        let (x8, w8, x16, w16) = (x8.view(), w8.view(), x16.view(), w16.view());
        let (xs, ws, stream) = (xs.view(), ws.view(), gpu.stream());
        fused_gemm_a8w8_blockscale_a16w16(
            stream,
            DualFp8Inputs {
                x_fp8: x8,
                w_fp8: w8.into(),
                x_scale: xs,
                w_scale: ws,
                group,
                x_bf16: x16,
                w_bf16: w16.into(),
                bias1: None,
                bias2: None,
            },
            DualOutputs { y1: out1, y2: out2 },
            view,
            options,
        )
        .unwrap();
        kit::assert_bits(&gpu.download(&y1), &product(&w, n1));
        kit::assert_bits(&gpu.download(&y2), &product(&w2, n2));
        gpu.assert_guards(&space);
    }
    for gpu in kit::devices() {
        for (sizes, with_space) in
            [([3, 33, 17, 8192], true), ([3, 33, 17, 8192], false), ([70, 40, 70, 512], true)]
        {
            if <Fp8E4M3 as Operand>::served(gpu.arch()) {
                exact::<Fp8E4M3>(&gpu, sizes, with_space);
            } else {
                exact::<Fp8E4M3Fnuz>(&gpu, sizes, with_space);
            }
        }
    }
}

#[test]
fn without_rows_columns_or_k() {
    for gpu in kit::devices() {
        for n in [[0, 20], [20, 0]] {
            for splits in [1, 2] {
                for tile in [GemmTile::T64x64, GemmTile::S16x32] {
                    let case = Case { biased: false, ..Case::new(7, n, 4096, config(tile, splits)) };
                    fp8::<bf16, f32, f32>(&gpu, &case);
                    fp4_case::<bf16, f32, f32>(&gpu, &case);
                }
            }
        }
        fp8::<bf16, f32, f32>(&gpu, &Case::new(7, [20, 9], 0, None));
        gpu.assert_nothing_launched(|| {
            fp8::<bf16, f32, f32>(&gpu, &Case::new(0, [20, 9], 64, None));
            fp8::<bf16, f32, f32>(&gpu, &Case::new(3, [0, 0], 64, None));
        });
    }
}

/// The first elements of a tensor of one axis, as so many rows.
fn front<T: Element>(view: TensorView<'_, T>, [rows, cols]: [usize; 2]) -> TensorView<'_, T> {
    view.slice(0, 0..rows * cols).unwrap().split_axis(0, cols).unwrap()
}

/// A device's tensors of a call of fp8 of gfx942, all right unless a test says otherwise.
struct Bench {
    gpu: Gpu,
    codes: Tensor<Fp8E4M3Fnuz>,
    scales: Tensor<f32>,
    halves: Tensor<bf16>,
    y1: Tensor<f32>,
    y2: Tensor<f32>,
    space: Tensor<f32>,
    x: [usize; 2],
    w: [usize; 2],
    x_scale: [usize; 2],
    x16: [usize; 2],
    w16: [usize; 2],
    bias: [Option<usize>; 2],
    out: [Vec<usize>; 2],
    with_space: usize,
    options: GemmOptions,
}

const M: usize = 4;
const N: [usize; 2] = [6, 8];
const K: usize = 32;

impl Bench {
    fn new() -> Self {
        let gpu = Gpu::open("emu:gfx942");
        let ones = vec![Fp8E4M3Fnuz::from_f32_saturating(1.0); 1024];
        Self {
            codes: gpu.upload(&ones, [1024]),
            scales: gpu.upload(&[1.0f32; 1024], [1024]),
            halves: gpu.upload(&[bf16::from_f32(1.0); 1024], [1024]),
            y1: gpu.poisoned([256]),
            y2: gpu.poisoned([256]),
            space: gpu.poisoned([1024]),
            gpu,
            x: [M, K],
            w: [N[0], K],
            x_scale: [M, 1],
            x16: [M, K],
            w16: [N[1], K],
            bias: [None, None],
            out: [vec![M, N[0]], vec![M, N[1]]],
            with_space: 0,
            options: GemmOptions::default(),
        }
    }

    fn call(&mut self) -> Result<()> {
        const OP: &str = "test";
        let Self { codes, scales, halves, y1, y2, space, .. } = self;
        let codes = |shape: [usize; 2]| front(codes.view(), shape);
        let halves = |shape: [usize; 2]| front(halves.view(), shape);
        let floats = |shape: [usize; 2]| front(scales.view(), shape);
        let bias = self.bias.map(|n| n.map(|n| scales.view().slice(0, 0..n).unwrap().into()));
        let workspace = (self.with_space > 0)
            .then(|| space.view_mut().reshape_front(OP, "space", [self.with_space]).unwrap());
        fused_gemm_a8w8_blockscale_a16w16(
            self.gpu.stream(),
            DualFp8Inputs {
                x_fp8: codes(self.x),
                w_fp8: codes(self.w).into(),
                x_scale: floats(self.x_scale),
                w_scale: floats([1, 1]),
                group: BlockShape::default(),
                x_bf16: halves(self.x16),
                w_bf16: halves(self.w16).into(),
                bias1: bias[0],
                bias2: bias[1],
            },
            DualOutputs {
                y1: y1.view_mut().reshape_front(OP, "y1", &self.out[0]).unwrap(),
                y2: y2.view_mut().reshape_front(OP, "y2", &self.out[1]).unwrap(),
            },
            workspace,
            self.options,
        )
    }
}

/// That a change to a right call is refused, naming these.
#[track_caller]
fn refused(change: impl FnOnce(&mut Bench), of: fn(&hk_core::Error) -> bool, parts: &[&str]) {
    let mut bench = Bench::new();
    change(&mut bench);
    let result = bench.call();
    let mut all = vec!["fused_gemm_a8w8_blockscale_a16w16"];
    all.extend(parts);
    assert_error(result, of, &all);
    // Nothing is written.
    bench.gpu.assert_untouched(&bench.y1);
    bench.gpu.assert_untouched(&bench.y2);
}

#[test]
fn errors_of_either_gemm() {
    Bench::new().call().unwrap();
    refused(|b| b.w = [N[0], 16], kind!(Shape), &["w_fp8", "[6, 16]", "[N, 32] (K of x_fp8)"]);
    refused(|b| b.w16 = [N[1], 16], kind!(Shape), &["w_bf16", "[8, 16]", "[N, 32] (K of x_bf16)"]);
    refused(|b| b.x16 = [5, K], kind!(Shape), &["x_bf16", "[5, 32]", "[4, 32] (M and K of x_fp8)"]);
    refused(
        |b| (b.x16, b.w16) = ([M, 16], [N[1], 16]),
        kind!(Shape),
        &["x_bf16", "[4, 16]", "[4, 32] (M and K of x_fp8)"],
    );
    refused(|b| b.x_scale = [M, 2], kind!(Shape), &["x_scale", "[4, 2]", "[4, 1]"]);
    refused(|b| b.bias[0] = Some(7), kind!(Shape), &["bias1", "[7]", "[6] (N)"]);
    refused(|b| b.bias[1] = Some(7), kind!(Shape), &["bias2", "[7]", "[8] (N)"]);
    refused(|b| b.out[0] = vec![M, 5], kind!(Shape), &["y1", "[4, 5]", "[4, 6]"]);
    refused(|b| b.out[1] = vec![M, 5], kind!(Shape), &["y2", "[4, 5]", "[4, 8]"]);
}

#[test]
fn errors_of_options() {
    let with = |tile, splits| GemmOptions { config: config(tile, splits), ..GemmOptions::default() };
    refused(
        |b| b.options.activation = Some(Activation::Relu),
        kind!(Argument),
        &["activation", "Relu", "none"],
    );
    refused(|b| b.options = with(GemmTile::T256x256, 1), kind!(Argument), &["tile", "T256x256", "T256x128"]);
    refused(|b| b.options = with(GemmTile::S16x16, 1), kind!(Argument), &["tile", "S16x16", "S16x32"]);
    refused(|b| b.options = with(GemmTile::T64x64, 0), kind!(Argument), &["splits", "1 to 65535"]);
    // Two slices of 4 x 6 and 4 x 8 partial sums.
    let workspace = "[112] or longer (2 splits)";
    refused(|b| b.options = with(GemmTile::T64x64, 2), kind!(Shape), &["workspace", "[0]", workspace]);
    refused(
        |b| (b.options, b.with_space) = (with(GemmTile::T64x64, 2), 111),
        kind!(Shape),
        &["workspace", "[111]", workspace],
    );
    let mut enough = Bench::new();
    (enough.options, enough.with_space) = (with(GemmTile::T64x64, 2), 112);
    enough.call().unwrap();
    refused(
        |b| {
            (b.x, b.w, b.x16, b.w16) = ([M, 30], [N[0], 30], [M, 30], [N[1], 30]);
            b.options = with(GemmTile::T64x64, 1);
        },
        kind!(Argument),
        &["tile", "T64x64", "GemmTile::Elements"],
    );
}

#[test]
fn parts_of_k_that_are_not_summed() {
    let skip = |b: &mut Bench, parts: [usize; 2]| {
        b.options.skip_reduce = true;
        b.out = [vec![parts[0], M, N[0]], vec![parts[1], M, N[1]]];
    };
    refused(|b| skip(b, [2, 3]), kind!(Shape), &["y2", "[3, 4, 8]", "[2, 4, 8] (split-K slices as in y1)"]);
    let mut bench = Bench::new();
    // K of one part; the others are zero.
    skip(&mut bench, [3, 3]);
    bench.bias = [Some(N[0]), None];
    bench.call().unwrap();
    let sums =
        |y: Array<f32>, n: usize| y.data[..3 * M * n].chunks(M * n).map(|p| p.to_vec()).collect::<Vec<_>>();
    let (y1, y2) = (bench.gpu.download(&bench.y1), bench.gpu.download(&bench.y2));
    let [first, second] = [sums(y1, N[0]), sums(y2, N[1])];
    assert_eq!(first, [33.0, 0.0, 0.0].map(|v| vec![v; M * N[0]]));
    assert_eq!(second, [32.0, 0.0, 0.0].map(|v| vec![v; M * N[1]]));
}

#[test]
fn errors_of_types() {
    let gpu = Gpu::open("emu:gfx942");
    fn call<T: Int8OrFp8>(gpu: &Gpu) -> Result<()> {
        let codes = gpu.upload(&[T::zeroed(); 32], [1, 32]);
        let (scale, halves) = (gpu.upload(&[1.0f32], [1, 1]), gpu.upload(&[f16::ONE; 32], [1, 32]));
        let (mut y1, mut y2) = (gpu.poisoned::<f32>([1, 1]), gpu.poisoned::<f32>([1, 1]));
        let (c, s, h, group) = (codes.view(), scale.view(), halves.view(), BlockShape::default());
        let (y1, y2, options) = (y1.view_mut(), y2.view_mut(), GemmOptions::default());
        fused_gemm_a8w8_blockscale_a16w16(
            gpu.stream(),
            DualFp8Inputs {
                x_fp8: c,
                w_fp8: c.into(),
                x_scale: s,
                w_scale: s,
                group,
                x_bf16: h,
                w_bf16: h.into(),
                bias1: None,
                bias2: None,
            },
            DualOutputs { y1, y2 },
            None,
            options,
        )
    }
    assert_error(call::<i8>(&gpu), kind!(Unsupported), &["fused_gemm_a8w8_blockscale_a16w16: i8", "fp8e4m3"]);
    assert_error(call::<Fp8E4M3>(&gpu), kind!(Unsupported), &["fp8e4m3 on gfx942"]);
    call::<Fp8E4M3Fnuz>(&gpu).unwrap();
}

/// A call of zeros, 4 rows each.
fn call_with(
    (stream, codes, halves): (&Stream, &DeviceBuffer<Fp8E4M3Fnuz>, &DeviceBuffer<bf16>),
    scale: TensorView<f32>,
    bias2: Option<FloatView>,
    y1: TensorViewMut<f32>,
    y2: TensorViewMut<f32>,
) -> Result<()> {
    let (code, half) = (codes.view([4, 32])?, halves.view([4, 32])?);
    let (scale1, scale2) = (front(scale, [4, 1]), front(scale, [1, 1]));
    let (y1, y2) = (y1.reshape_front("", "", [4, 4])?, y2.reshape_front("", "", [4, 4])?);
    let (group, options) = (BlockShape::default(), GemmOptions::default());
    fused_gemm_a8w8_blockscale_a16w16(
        stream,
        DualFp8Inputs {
            x_fp8: code,
            w_fp8: code.into(),
            x_scale: scale1,
            w_scale: scale2,
            group,
            x_bf16: half,
            w_bf16: half.into(),
            bias1: None,
            bias2,
        },
        DualOutputs { y1, y2 },
        None,
        options,
    )
}

/// Tensors of one GEMM that share memory with an output of the other.
#[test]
fn aliases_between_the_gemms() {
    let gpu = Gpu::open("emu:gfx942");
    let stream = gpu.stream();
    let mut memory = stream.alloc_zeroed::<f32>(4096).unwrap();
    let codes = stream.alloc_zeroed::<Fp8E4M3Fnuz>(128).unwrap();
    let halves = stream.alloc_zeroed::<bf16>(128).unwrap();
    let operands = (stream, &codes, &halves);
    let (mut low, mut high) = memory.view_mut([4096]).unwrap().split_at(0, 2048).unwrap();
    let ones = stream.alloc_zeroed::<f32>(64).unwrap();
    let (free, of_low) = (ones.view([64]).unwrap(), low.alias());
    call_with(operands, free, None, low.reborrow(), high.reborrow()).unwrap();
    // A bias of the second GEMM in the first one's output; scales of the first one in the second's.
    let bias = of_low.slice(0, 0..4).unwrap();
    let r = call_with(operands, free, Some(bias.into()), low.reborrow(), high.reborrow());
    assert_error(r, kind!(Overlap), &["fused_gemm_a8w8_blockscale_a16w16", "bias2", "y1"]);
    let r = call_with(operands, of_low, None, high.reborrow(), low.reborrow());
    assert_error(r, kind!(Overlap), &["fused_gemm_a8w8_blockscale_a16w16", "x_scale", "y2"]);
}
