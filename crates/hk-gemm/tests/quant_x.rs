//! A GEMM beside the quantization of its activations: each is bitwise identical to the operator by itself.

use crate::common::Operand;
use hk_core::quant::{BlockRule, BlockScale, MxElement, ScaleLayout};
use hk_core::{E8M0, Element, Float, Fp4x2, Fp8E4M3, Fp8E5M2, Layout, Result, TensorView, bf16, f16};
use hk_gemm::{
    Activation, GemmConfig, GemmOptions, GemmProblem, GemmTile, Half, Precision, QuantXOptions,
    QuantXOutputs, fused_gemm_a16w16_quant_x, gemm_a16w16, gemm_workspace,
};
use hk_quant::{MxOptions, downcast_to_mxfp, dynamic_mxfp4_quant};
use hk_testkit::{self as kit, Array, Fill, Gpu, Place, Tensor, assert_error, kind};

hk_testkit::corners_of!(hk_gemm::OPERATORS: fused_gemm_a16w16_quant_x);

const OP: &str = "fused_gemm_a16w16_quant_x";

/// Sizes, places and options of a case. Pads: elements beyond a row, and before the first.
#[derive(Debug, Clone, Copy)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    mode: BlockScale,
    x: [usize; 2],
    w: [usize; 2],
    y: [usize; 2],
    q: [usize; 2],
    /// Scales of a row lie apart, those of a block side by side.
    turned: bool,
    activation: Option<Activation>,
    config: Option<GemmConfig>,
    space: usize,
}

impl Case {
    fn new([m, n, k]: [usize; 3], mode: BlockScale, config: Option<GemmConfig>) -> Self {
        let splits = config.map_or(1, |config| config.splits);
        let space = if splits > 1 { splits * m * n } else { 0 };
        let none = [0; 2];
        Self {
            m,
            n,
            k,
            mode,
            x: none,
            w: none,
            y: none,
            q: none,
            turned: false,
            activation: None,
            config,
            space,
        }
    }

    fn options(&self) -> GemmOptions {
        GemmOptions { config: self.config, activation: self.activation, ..GemmOptions::default() }
    }

    fn blocks(&self) -> usize {
        self.k.div_ceil(32)
    }
}

fn place([rows, cols]: [usize; 2], [pad, shift]: [usize; 2]) -> Place {
    Place::new(Layout::with_strides([rows, cols], [(cols + pad).max(1), 1]).unwrap()).shifted(shift)
}

fn config(tile: GemmTile, splits: usize) -> Option<GemmConfig> {
    Some(GemmConfig { tile, splits, group: 2 })
}

/// Random rows whose first blocks are of magnitudes that take every way through a rule.
fn activations<T: Operand + Half>(c: &Case) -> Vec<T> {
    let mut values = Fill::Normal.elements::<f32>(c.m * c.k, 1);
    let of_block = [
        [0.0, -0.0, 0.0, -0.0],
        [1.75, -1.0, 0.25, 0.75],
        [-1.7421875, 1.25, 3e-5, -0.5],
        [448.0, 1e-3, -17.0, 0.0],
        [1.9375, 0.0, -0.03125, 5.0],
        [f32::NAN, 1.0, 2.0, 3.0],
        [1.0, f32::NEG_INFINITY, 2.0, 3.0],
        [f32::MAX, -60000.0, 1.0, 2.0],
        [1e-7, -6e-8, 0.0, 1e-38],
    ];
    for (block, special) in values.chunks_mut(c.k.max(1)).flat_map(|row| row.chunks_mut(32)).zip(of_block) {
        block.fill(0.0);
        block.iter_mut().zip(special).for_each(|(value, special)| *value = special);
    }
    values.into_iter().map(T::near).collect()
}

fn weights<T: Operand>(len: usize) -> Vec<T> {
    Fill::Normal.elements::<f32>(len, 2).into_iter().map(T::near).collect()
}

/// What a block of values becomes.
fn on_host<T: Float, E: MxElement>(x: &[T], k: usize, mode: BlockScale) -> Vec<u8> {
    let (max, mantissa_bits) = E::RANGE;
    let rule = BlockRule::new(mode, max, mantissa_bits, E::FORMAT.is_some().into());
    let amax = |block: &[T]| {
        block.iter().fold(0.0f32, |max, v| {
            let v = v.to_f64() as f32;
            if v.is_finite() { max.max(v.abs()) } else { f32::INFINITY }
        })
    };
    x.chunks(k).flat_map(|row| row.chunks(32)).map(|block| rule.scale(amax(block)).0).collect()
}

/// The quantizer alone, of as many rows on their own.
trait Alone: MxElement {
    fn quantize<T: Half>(gpu: &Gpu, c: &Case, x: TensorView<T>) -> Option<(Array<Self>, Array<E8M0>)>;
}
fn alone<E: MxElement>(
    gpu: &Gpu,
    c: &Case,
    run: impl FnOnce(&mut Tensor<E>, &mut Tensor<E8M0>) -> Result<()>,
) -> Option<(Array<E>, Array<E8M0>)> {
    let mut q = gpu.poisoned([c.m, c.k / E::PER_ELEMENT]);
    let mut scale = gpu.poisoned([c.m, c.blocks()]);
    run(&mut q, &mut scale).unwrap();
    Some((gpu.download(&q), gpu.download(&scale)))
}
impl Alone for Fp4x2 {
    fn quantize<T: Half>(gpu: &Gpu, c: &Case, x: TensorView<T>) -> Option<(Array<Self>, Array<E8M0>)> {
        let options = MxOptions { mode: c.mode, scale_layout: ScaleLayout::RowMajor };
        alone(gpu, c, |q, s| dynamic_mxfp4_quant(gpu.stream(), x, q.view_mut(), s.view_mut(), options))
    }
}
macro_rules! fp8 {
    ($t:ident) => {
        impl Alone for $t {
            fn quantize<T: Half>(
                gpu: &Gpu,
                c: &Case,
                x: TensorView<T>,
            ) -> Option<(Array<Self>, Array<E8M0>)> {
                // No quantizer alone has the other modes.
                if c.mode != BlockScale::RoundUp {
                    return None;
                }
                alone(gpu, c, |q, s| {
                    downcast_to_mxfp(gpu.stream(), x, q.view_mut(), s.view_mut(), -1, c.mode)
                })
            }
        }
    };
}
fp8!(Fp8E4M3);
fp8!(Fp8E5M2);

fn check<T: Half + Operand, Y: Float, E: Alone>(gpu: &Gpu, c: &Case) {
    let &Case { m, n, k, .. } = c;
    let elements = activations::<T>(c);
    let x = gpu.upload(&elements, place([m, k], c.x));
    let w = gpu.upload(&weights::<T>(n * k), place([n, k], c.w));
    let bias = gpu.upload(&Fill::Normal.elements::<f32>(n, 3), [n]);
    let mut y = gpu.poisoned::<Y>(place([m, n], c.y));
    let mut q = gpu.poisoned::<E>(place([m, k / E::PER_ELEMENT], c.q));
    let strides = if c.turned { [2, 2 * m + 3] } else { [c.blocks().max(1), 1] };
    let mut scale =
        gpu.poisoned::<E8M0>(Place::new(Layout::with_strides([m, c.blocks()], strides).unwrap()).shifted(1));
    let mut space = gpu.poisoned::<f32>([c.space]);
    let view = (c.space > 0).then(|| space.view_mut());
    fused_gemm_a16w16_quant_x(
        gpu.stream(),
        x.view(),
        w.view(),
        Some(bias.view().into()),
        QuantXOutputs { y: y.view_mut(), x_quant: q.view_mut(), x_scale: scale.view_mut() },
        view,
        QuantXOptions { mode: c.mode, gemm: c.options() },
    )
    .unwrap_or_else(|e| panic!("{c:?}: {e}"));
    let mut want = gpu.poisoned::<Y>(place([m, n], c.y));
    let view = (c.space > 0).then(|| space.view_mut());
    let (x_view, w_view, of_bias) = (x.view(), w.view(), Some(bias.view().into()));
    gemm_a16w16(gpu.stream(), x_view, w_view, of_bias, want.view_mut(), view, c.options()).unwrap();
    let labelled = |mut array: Array<Y>| {
        array.label = format!("{c:?}: {}", array.label);
        array
    };
    kit::assert_bits(&labelled(gpu.download(&y)), &gpu.download(&want).data);
    let got = (gpu.download(&q), gpu.download(&scale));
    if k > 0 {
        let scales: Vec<u8> = got.1.data.iter().map(|s| s.0).collect();
        assert_eq!(scales, on_host::<T, E>(&elements, k, c.mode), "{c:?}");
        if let Some((q, scale)) = E::quantize(gpu, c, x.view()) {
            kit::assert_bits(&got.0, &q.data);
            kit::assert_bits(&got.1, &scale.data);
        }
    }
    gpu.assert_guards(&y);
    gpu.assert_guards(&q);
    gpu.assert_guards(&scale);
    gpu.assert_guards(&space);
    gpu.assert_untouched(&x);
    gpu.assert_untouched(&w);
}

#[test]
fn each_has_the_bits_it_has_alone() {
    use BlockScale::{Even, Floor, RoundUp};
    for gpu in kit::devices() {
        let wide = |tile, splits| Case::new([65, 70, 320], RoundUp, config(tile, splits));
        check::<bf16, bf16, Fp8E4M3>(&gpu, &wide(GemmTile::T256x256, 1));
        check::<f16, f32, Fp4x2>(&gpu, &Case { mode: Even, ..wide(GemmTile::T128x128, 2) });
        let silu = Some(Activation::Silu);
        check::<bf16, f16, Fp8E5M2>(&gpu, &Case { activation: silu, ..wide(GemmTile::T64x64, 3) });
        check::<f16, bf16, Fp8E4M3>(&gpu, &Case { k: 75, ..wide(GemmTile::Elements, 1) });
        let few = |m, tile, splits| Case::new([m, 40, 2080], RoundUp, config(tile, splits));
        check::<bf16, f32, Fp4x2>(&gpu, &Case { mode: Floor, ..few(13, GemmTile::S16x16, 1) });
        check::<f16, bf16, Fp8E4M3>(&gpu, &few(16, GemmTile::S16x32, 2));
        check::<bf16, bf16, Fp4x2>(&gpu, &few(17, GemmTile::S32x32, 1));
        check::<f16, f16, Fp8E5M2>(&gpu, &few(50, GemmTile::S64x32, 2));
        // Modes of which there is no quantizer alone: scales are those of the host's rule.
        check::<bf16, bf16, Fp8E4M3>(&gpu, &Case { mode: Even, ..few(5, GemmTile::S16x16, 1) });
        check::<f16, bf16, Fp8E5M2>(&gpu, &Case { mode: Floor, ..few(5, GemmTile::S16x16, 1) });
    }
}

#[test]
fn strides_and_short_blocks() {
    for gpu in kit::devices() {
        let case = Case::new([21, 40, 168], BlockScale::RoundUp, None);
        let apart = Case { x: [32, 16], w: [64, 8], y: [3, 1], q: [24, 16], turned: true, ..case };
        check::<bf16, f32, Fp8E4M3>(&gpu, &apart);
        check::<f16, f32, Fp4x2>(&gpu, &apart);
        // Codes that are not on 16 bytes, beside activations that are; and the other way round.
        check::<bf16, bf16, Fp8E4M3>(&gpu, &Case { q: [3, 5], ..case });
        check::<bf16, bf16, Fp4x2>(&gpu, &Case { q: [1, 0], turned: true, ..case });
        check::<f16, bf16, Fp8E5M2>(&gpu, &Case { x: [1, 3], q: [8, 0], ..case });
        // Blocks of one column, and of one pair.
        check::<bf16, bf16, Fp8E4M3>(&gpu, &Case { k: 97, ..case });
        check::<f16, bf16, Fp4x2>(&gpu, &Case { k: 98, m: 3, ..case });
        check::<bf16, bf16, Fp8E4M3>(&gpu, &Case { k: 1, m: 1, n: 1, ..case });
    }
}

/// More blocks than a block of threads has, and a workspace for split-K slices.
#[test]
fn the_choice_of_the_device() {
    for gpu in kit::devices() {
        let [m, n, k] = [20, 24, 4096];
        let info = gpu.stream().device().info();
        let space = gemm_workspace(info, &GemmProblem::new(Precision::Bf16, m, n, k));
        assert!(space > 0);
        check::<bf16, bf16, Fp8E4M3>(
            &gpu,
            &Case { space, ..Case::new([m, n, k], BlockScale::RoundUp, None) },
        );
    }
}

#[test]
fn without_rows_columns_or_k() {
    for gpu in kit::devices() {
        let case = |sizes| Case::new(sizes, BlockScale::RoundUp, None);
        // x is quantized for no outputs at all.
        check::<bf16, f32, Fp8E4M3>(&gpu, &case([7, 0, 64]));
        check::<bf16, f32, Fp4x2>(&gpu, &Case { config: config(GemmTile::S16x32, 2), ..case([7, 0, 64]) });
        check::<bf16, f32, Fp8E4M3>(&gpu, &case([7, 9, 0]));
        gpu.assert_nothing_launched(|| {
            check::<bf16, f32, Fp8E4M3>(&gpu, &case([0, 9, 64]));
            check::<bf16, f32, Fp8E4M3>(&gpu, &case([7, 0, 0]));
        });
    }
}

#[test]
fn parts_of_k_that_are_not_summed() {
    let gpu = Gpu::open("emu:gfx942");
    let mut bench = Bench::new(&gpu);
    bench.options.skip_reduce = true;
    bench.y = vec![3, M, N];
    bench.call().unwrap();
    let y = gpu.download(&bench.of_y);
    // K of one part; the others are zero. The first one has the bias.
    let part = M * N;
    assert_eq!(y.data[..3 * part], [[33.0f32; M * N], [0.0; M * N], [0.0; M * N]].concat());
    let (q, scale) = (gpu.download(&bench.of_q), gpu.download(&bench.of_scale));
    // 256 2^-8 is the largest power of two that does not clip.
    assert!(q.data[..M * K].iter().all(|q| q.to_f32() == 256.0), "{:?}", q.data);
    assert!(scale.data[..M].iter().all(|s| s.0 == 127 - 8), "{:?}", scale.data);
}

const M: usize = 4;
const N: usize = 6;
const K: usize = 32;

/// The tensors of a call of ones, all right unless a test says otherwise.
struct Bench<'g> {
    gpu: &'g Gpu,
    halves: Tensor<bf16>,
    ones: Tensor<f32>,
    of_y: Tensor<f32>,
    of_q: Tensor<Fp8E4M3>,
    of_scale: Tensor<E8M0>,
    x: Vec<usize>,
    w: Vec<usize>,
    bias: usize,
    y: Vec<usize>,
    q: Vec<usize>,
    scale: Vec<usize>,
    mode: BlockScale,
    options: GemmOptions,
}

impl<'g> Bench<'g> {
    fn new(gpu: &'g Gpu) -> Self {
        Self {
            gpu,
            halves: gpu.upload(&[bf16::from_f32(1.0); 256], [256]),
            ones: gpu.upload(&[1.0f32; 64], [64]),
            of_y: gpu.poisoned([256]),
            of_q: gpu.poisoned([256]),
            of_scale: gpu.poisoned([64]),
            x: vec![M, K],
            w: vec![N, K],
            bias: N,
            y: vec![M, N],
            q: vec![M, K],
            scale: vec![M, 1],
            mode: BlockScale::RoundUp,
            options: GemmOptions::default(),
        }
    }

    fn call(&mut self) -> Result<()> {
        let halves = |shape: &[usize]| front(self.halves.view(), shape);
        fused_gemm_a16w16_quant_x(
            self.gpu.stream(),
            halves(&self.x),
            halves(&self.w),
            Some(self.ones.view().slice(0, 0..self.bias).unwrap().into()),
            QuantXOutputs {
                y: self.of_y.view_mut().reshape_front(OP, "y", &self.y).unwrap(),
                x_quant: self.of_q.view_mut().reshape_front(OP, "x_quant", &self.q).unwrap(),
                x_scale: self.of_scale.view_mut().reshape_front(OP, "x_scale", &self.scale).unwrap(),
            },
            None,
            QuantXOptions { mode: self.mode, gemm: self.options },
        )
    }
}

/// The first elements of a tensor of one axis, as matrices.
fn front<'t, T: Element>(view: TensorView<'t, T>, shape: &[usize]) -> TensorView<'t, T> {
    let numel = shape.iter().product();
    let mut view = view.slice(0, 0..numel).unwrap();
    for axis in (1..shape.len()).rev() {
        view = view.split_axis(0, shape[axis]).unwrap();
    }
    view
}

/// That a change to a right call is refused, naming these, and that nothing is written.
#[track_caller]
fn refused(change: impl FnOnce(&mut Bench), of: fn(&hk_core::Error) -> bool, parts: &[&str]) {
    let gpu = Gpu::open("emu:gfx942");
    let mut bench = Bench::new(&gpu);
    change(&mut bench);
    let result = bench.call();
    let mut all = vec![OP];
    all.extend(parts);
    assert_error(result, of, &all);
    gpu.assert_untouched(&bench.of_y);
    gpu.assert_untouched(&bench.of_q);
    gpu.assert_untouched(&bench.of_scale);
}

#[test]
fn errors() {
    let gpu = Gpu::open("emu:gfx942");
    Bench::new(&gpu).call().unwrap();
    refused(|b| b.x = vec![M * K], kind!(Shape), &["x", "[128]"]);
    refused(|b| b.w = vec![N, 16], kind!(Shape), &["w", "[6, 16]", "[N, 32] (K of x)"]);
    refused(|b| b.bias = 7, kind!(Shape), &["bias", "[7]", "[6] (N)"]);
    refused(|b| b.y = vec![M, 7], kind!(Shape), &["y", "[4, 7]", "[4, 6]"]);
    refused(|b| b.q = vec![M, 16], kind!(Shape), &["x_quant", "[4, 16]", "[4, 32]"]);
    refused(|b| b.scale = vec![M, 2], kind!(Shape), &["x_scale", "[4, 2]", "[4, 1]"]);
    refused(
        |b| b.mode = BlockScale::DivFloor,
        kind!(Argument),
        &["mode", "DivFloor", "Even, RoundUp or Floor"],
    );
    let with = |tile, splits| GemmOptions { config: config(tile, splits), ..GemmOptions::default() };
    refused(|b| b.options = with(GemmTile::T256x128, 1), kind!(Argument), &["tile", "T256x128", "T256x256"]);
    refused(|b| b.options = with(GemmTile::T64x64, 0), kind!(Argument), &["splits", "1 to 65535"]);
    refused(|b| b.options = with(GemmTile::T64x64, 2), kind!(Shape), &["workspace", "[0]", "[48] or longer"]);
    refused(
        |b| {
            b.options.skip_reduce = true;
            b.options.activation = Some(Activation::Relu);
            b.y = vec![2, M];
        },
        kind!(Shape),
        &["y", "[2, 4]", "[split-K slices, then [4, 6]]"],
    );
}

#[test]
fn errors_of_pairs_strides_and_aliases() {
    let gpu = Gpu::open("emu:gfx942");
    let stream = gpu.stream();
    let halves = gpu.upload(&[bf16::from_f32(1.0); 9], [3, 3]);
    let mut y = gpu.poisoned::<f32>([3, 3]);
    let mut scale = gpu.poisoned::<E8M0>([3, 1]);
    let mut pairs = gpu.poisoned::<Fp4x2>([3, 1]);
    let (mode, options) = (BlockScale::Even, GemmOptions::default());
    let (x, w) = (halves.view(), halves.view());
    let (q, s) = (pairs.view_mut(), scale.view_mut());
    let r = fused_gemm_a16w16_quant_x(
        stream,
        x,
        w,
        None,
        QuantXOutputs { y: y.view_mut(), x_quant: q, x_scale: s },
        None,
        QuantXOptions { mode, gemm: options },
    );
    assert_error(r, kind!(Shape), &[OP, "x", "[3, 3]", "an even number of columns"]);
    // Codes of a row apart.
    let mut turned = gpu.poisoned::<Fp8E4M3>(Place::new(Layout::with_strides([3, 3], [1, 3]).unwrap()));
    let (q, s) = (turned.view_mut(), scale.view_mut());
    let r = fused_gemm_a16w16_quant_x(
        stream,
        x,
        w,
        None,
        QuantXOutputs { y: y.view_mut(), x_quant: q, x_scale: s },
        None,
        QuantXOptions { mode, gemm: options },
    );
    assert_error(r, kind!(Stride), &[OP, "x_quant"]);
    gpu.assert_untouched(&y);

    // Outputs in memory of others.
    let mut memory = stream.alloc_zeroed::<f32>(256).unwrap();
    let (mut low, mut high) = memory.view_mut([256]).unwrap().split_at(0, 128).unwrap();
    let mut q = gpu.poisoned::<Fp8E4M3>([3, 3]);
    let bias = low.alias().slice(0, 0..3).unwrap();
    let out = low.reborrow().reshape_front(OP, "y", [3, 3]).unwrap();
    let (codes, s) = (q.view_mut(), scale.view_mut());
    let r = fused_gemm_a16w16_quant_x(
        stream,
        x,
        w,
        Some(bias.into()),
        QuantXOutputs { y: out, x_quant: codes, x_scale: s },
        None,
        QuantXOptions { mode, gemm: options },
    );
    assert_error(r, kind!(Overlap), &[OP, "bias", "y"]);
    let codes = low.reborrow().cast::<Fp8E4M3>(OP, "q").unwrap().reshape_front(OP, "q", [3, 3]).unwrap();
    let out = high.reborrow().reshape_front(OP, "y", [3, 3]).unwrap();
    let s = scale.view_mut();
    let r = fused_gemm_a16w16_quant_x(
        stream,
        x,
        w,
        Some(bias.into()),
        QuantXOutputs { y: out, x_quant: codes, x_scale: s },
        None,
        QuantXOptions { mode, gemm: options },
    );
    assert_error(r, kind!(Overlap), &[OP, "bias", "x_quant"]);
    let s = low.reborrow().cast::<E8M0>(OP, "s").unwrap().reshape_front(OP, "s", [3, 1]).unwrap();
    let out = high.reborrow().reshape_front(OP, "y", [3, 3]).unwrap();
    let codes = q.view_mut();
    let r = fused_gemm_a16w16_quant_x(
        stream,
        x,
        w,
        Some(bias.into()),
        QuantXOutputs { y: out, x_quant: codes, x_scale: s },
        None,
        QuantXOptions { mode, gemm: options },
    );
    assert_error(r, kind!(Overlap), &[OP, "bias", "x_scale"]);
}
