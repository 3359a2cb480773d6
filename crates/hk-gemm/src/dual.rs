//! Two products of the same M and K that have nothing else in common, in one launch: one of codes, one of 16-bit floats.

use crate::a8w8::MatrixCode;
use crate::a16w16::{self, Half};
use crate::config::{GemmConfig, GemmTile, Job, Precision, Second};
use crate::fp4::fp4_product;
use crate::fused::block_product;
use crate::params::{BlockAndPlain, MixedAndPlain};
use crate::problem::{
    BlockShape, Blocks, Checked, GemmOptions, Given, MOST_SPLITS, NAMES, Names, Product, Store, To, erased,
    outputs,
};
use crate::views::{FloatView, MxScaleView, Weight};
use hk_core::{
    DType, DeviceInfo, Element, Error, Float, Fp4x2, LaunchConfig, NamedOperand, Result, Stream, TensorView,
    TensorViewMut, check_aliases,
};

const OF_FP8: Names = Names { x: "x_fp8", w: "w_fp8", x_scale: "x_scale", bias: "bias1", y: "y1", ..NAMES };
const OF_FP4: Names = Names { x: "x_fp4", w: "w_fp4", ..OF_FP8 };
const OF_HALVES: Names = Names { x: "x_bf16", w: "w_bf16", bias: "bias2", y: "y2", ..NAMES };

/// Tiles of the first product for which there are kernels.
const fn served(tile: GemmTile) -> bool {
    !matches!(tile, GemmTile::T256x256 | GemmTile::T128x128 | GemmTile::S16x16 | GemmTile::S16x16Twice)
}

/// What a part of K has in the workspace, in `f32`: sums of the first product, then those of the second, on 16 bytes.
pub(crate) fn plane([first, second]: [usize; 2]) -> usize {
    first.checked_next_multiple_of(4).map_or(usize::MAX, |first| first.saturating_add(second))
}

/// Length of the workspace, in `f32`, with which [`fused_gemm_a8w8_blockscale_a16w16`] (`precision` of its codes:
/// [`Precision::Fp8`]) and [`fused_gemm_afp4wfp4_a16w16`] ([`Precision::Fp4`]) can cut K into as many parts as suit the
/// device; 0: none would. A shorter workspace, or none, is as good but for speed. Rows that do not begin on 16 bytes are not
/// reckoned with.
pub fn fused_gemm_a16w16_workspace(
    info: &DeviceInfo,
    precision: Precision,
    [m, n1, n2, k]: [usize; 4],
) -> usize {
    let second = Some(Second { precision: Precision::Bf16, n: n2 });
    let job = Job { info, precision, sizes: [1, m, n1, k], vectors: true, most_splits: MOST_SPLITS, second };
    let splits = |serves: fn(GemmTile) -> bool| job.choose(serves).splits;
    // Of few rows of w with one scale there are no kernels whose waves share K.
    let splits = splits(served).max(splits(|tile| served(tile) && !tile.skinny()));
    let plane = plane([outputs([1, m, n1]), outputs([1, m, n2])]);
    if splits > 1 { splits.saturating_mul(plane) } else { 0 }
}

/// Checks both products, and launches them. The first one's options are of both.
fn run<'a, X: Element, W: Element, H: Half, Y1: Float, Y2: Float>(
    stream: &Stream,
    mut first: Product<'a, X, W>,
    mut second: Product<'a, H, H>,
    y1: TensorViewMut<Y1>,
    y2: TensorViewMut<Y2>,
    workspace: Option<TensorViewMut<f32>>,
) -> Result<()> {
    const WORKSPACE: &str = "workspace";
    let op = first.op;
    let options = first.options;
    options.expect_no_activation(op)?;
    let sizes = [first.sizes()?, second.sizes()?];
    let [(m, k), of_second] = sizes.map(|sizes| (sizes.m, sizes.k));
    if of_second != (m, k) {
        let want = format!("[{m}, {k}] (M and K of {})", first.names.x);
        return Err(Error::shape(op, second.names.x, second.x.shape(), want));
    }
    if let Some(workspace) = &workspace {
        workspace.dims::<1>(op, WORKSPACE)?;
        workspace.expect_contiguous(op, WORKSPACE)?;
        workspace.expect_aligned(op, WORKSPACE, 16)?;
    }
    let inputs: Vec<NamedOperand> = first.inputs().into_iter().chain(second.inputs()).collect();
    let made: [(NamedOperand, &[&'static str]); 3] = [
        ((first.names.y, Some(&y1)), &[]),
        ((second.names.y, Some(&y2)), &[]),
        ((WORKSPACE, erased(workspace.as_ref())), &[]),
    ];
    check_aliases(op, &inputs, &made)?;

    // One configuration for both.
    let vectors = first.by_vectors(&sizes[0]) && second.by_vectors(&sizes[1]);
    let planes = [first.plane(&sizes[0]), second.plane(&sizes[1])];
    let space = workspace.as_ref().map_or(0, TensorViewMut::numel);
    let room = space / plane(planes).max(1);
    // Parts that are not summed are as many as y1 and y2 have.
    let whole = options.skip_reduce;
    let config = match options.config {
        Some(config) => first.check_config(config, vectors, plane(planes), space, whole)?,
        None => {
            let job = Job {
                info: stream.device().info(),
                precision: first.precision,
                sizes: [1, m, sizes[0].n, k],
                vectors,
                most_splits: if whole { 1 } else { room.clamp(1, MOST_SPLITS) },
                second: Some(Second { precision: second.precision, n: sizes[1].n }),
            };
            job.choose(|tile| first.serves(tile))
        }
    };
    let of = |tile: GemmTile, outputs: usize| {
        let splits = if whole || outputs == 0 { 1 } else { config.splits };
        GemmOptions { config: Some(GemmConfig { tile, splits, ..config }), ..options }
    };
    (first.options, second.options) =
        (of(config.tile, sizes[0].outputs()), of(config.tile.beside(), sizes[1].outputs()));
    let (mut planes1, mut planes2) = match workspace.filter(|_| !whole && config.splits > 1) {
        Some(workspace) => {
            let of_first = config.splits.saturating_mul(planes[0].next_multiple_of(4));
            let (first, second) = workspace.split_at(0, of_first)?;
            (Some(first), Some(second))
        }
        None => (None, None),
    };
    let mut checked1 = first.check(stream, To::Y(y1), planes1.as_ref())?;
    let mut checked2 = second.check(stream, To::Y(y2), planes2.as_ref())?;
    if whole && checked1.plan.splits != checked2.plan.splits {
        let want = format!("[{}, {m}, {}] (parts of K as in y1)", checked1.plan.splits, sizes[1].n);
        return Err(Error::shape(op, second.names.y, checked2.to.y().shape(), want));
    }
    let blocks = checked1.plan.blocks + checked2.plan.blocks;
    if u32::try_from(blocks).is_err() {
        return Err(Error::too_large(op, first.names.y, format!("{blocks} tiles"), u32::MAX.into()));
    }
    if blocks == 0 {
        return Ok(());
    }

    let (parts1, parts2) = (sums(&checked1, &mut planes1), sums(&checked2, &mut planes2));
    let kernels = first.kernels(config.tile, k);
    let objects = if config.tile.skinny() { kernels.skinny } else { kernels.tiles };
    let kernel = stream.kernel(objects, kernels.names[config.tile.index()])?;
    let mut launch = stream.launch(op, &kernel);
    let Checked { to, sizes: of_y, plan } = &mut checked1;
    let given1 = first.given(&mut launch, to, of_y, plan, parts1, planes1.as_mut())?;
    let Checked { to, sizes: of_y, plan } = &mut checked2;
    let given2 = second.given(&mut launch, to, of_y, plan, parts2, planes2.as_mut())?;
    let grid = LaunchConfig::grid_1d(blocks);
    // SAFETY: as for each product alone: the checks make its tensors as long as its tiles cover, and the blocks are as many as
    // both products have tiles.
    unsafe {
        match (given1, given2) {
            (Given::Block(first), Given::Plain(second)) => launch.run(grid, &BlockAndPlain { first, second }),
            (Given::Mixed(first), Given::Plain(second)) => launch.run(grid, &MixedAndPlain { first, second }),
            _ => Err(Error::unsupported(op, "its operands", "codes, beside 16-bit floats")),
        }?;
    }
    if let Some(planes) = planes1 {
        first.reduce(stream, &mut checked1.to, &checked1.sizes, Some((planes, checked1.plan.splits)))?;
    }
    if let Some(planes) = planes2 {
        second.reduce(stream, &mut checked2.to, &checked2.sizes, Some((planes, checked2.plan.splits)))?;
    }
    Ok(())
}

/// What becomes of a product's sums; its planes, if it has any.
pub(crate) fn sums<Y: Float>(checked: &Checked<Y>, planes: &mut Option<TensorViewMut<f32>>) -> Store {
    if matches!(checked.to, To::Planes(_)) {
        return Store::Plane;
    }
    if checked.plan.splits == 1 || checked.sizes.outputs() == 0 {
        *planes = None;
    }
    if planes.is_some() { Store::Plane } else { Store::Round }
}

/// The second product.
fn halves<'a, H: Half>(
    op: &'static str,
    x: TensorView<'a, H>,
    w: impl Into<Weight<'a, H>>,
    bias: Option<FloatView<'a>>,
    options: GemmOptions,
) -> Product<'a, H, H> {
    Product { names: OF_HALVES, bias, ..a16w16::product(op, x, w, false, options) }
}

/// Two products with the same `M` and `K`, in one launch: `y1` as of [`gemm_a8w8_blockscale`](crate::gemm_a8w8_blockscale),
/// `y2` as of [`gemm_a16w16`](crate::gemm_a16w16()).
///
/// `y1[m, n] = sum_g x_scale[m, g] w_scale[n / group.n, g] sum_{k in g} x_fp8[m, k] w_fp8[n, k] + bias1[n]`, and
/// `y2[m, n] = sum_k x_bf16[m, k] w_bf16[n, k] + bias2[n]`. Neither depends on the other: it is an expert's up-projection with
/// the router's gates, of activations that are there in both types.
///
/// | arg               | shape                        | dtype                | layout                                                 |
/// |-------------------|------------------------------|----------------------|--------------------------------------------------------|
/// | `x_fp8`           | `[M, K]`                     | [`MatrixCode`], fp8  | unit stride on `K`, any row stride                     |
/// | `w_fp8`           | `[N1, K]`                    | as `x_fp8`           | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight) |
/// | `x_scale`         | `[M, groups of K]`           | `f32`                | any strides                                            |
/// | `w_scale`         | `[groups of N1, groups of K]`| `f32`                | any strides                                            |
/// | `x_bf16`          | `[M, K]`                     | `bf16`, `f16`        | as `x_fp8`                                             |
/// | `w_bf16`          | `[N2, K]`                    | as `x_bf16`          | as `w_fp8`                                             |
/// | `bias1`, `bias2`  | `[N1]`, `[N2]`               | `bf16`, `f16`, `f32` | contiguous                                             |
/// | `y1`, `y2`        | `[M, N1]`, `[M, N2]`         | `bf16`, `f16`, `f32` | unit stride on the last axis, any row stride           |
/// | `workspace`       | `[n]`                        | `f32`                | contiguous, 16-byte aligned; see [`fused_gemm_a16w16_workspace`] |
///
/// The options are of both products: the tile is that of the first (with [`GemmTile::T256x128`], the second has
/// [`GemmTile::T256x256`]), `splits` cuts K of both, and with `skip_reduce` `y1` and `y2` are of `f32` and have the same number
/// of parts as their first axis. By elements go both if the rows of one do not begin on 16 bytes. Each product has the
/// bits that it has alone with such a configuration.
///
/// # Errors
/// As `gemm_a8w8_blockscale` and `gemm_a16w16`, of either product; [`Overlap`](Error::Overlap) also between tensors of the two;
/// [`Argument`](Error::Argument) for an activation, and for tiles of which there are no kernels;
/// [`Unsupported`](Error::Unsupported) for int8.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_gemm_a8w8_blockscale_a16w16<'a, T: MatrixCode, H: Half, Y1: Float, Y2: Float>(
    stream: &Stream,
    x_fp8: TensorView<'a, T>,
    w_fp8: impl Into<Weight<'a, T>>,
    x_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    group: BlockShape,
    x_bf16: TensorView<'a, H>,
    w_bf16: impl Into<Weight<'a, H>>,
    bias1: Option<FloatView<'a>>,
    bias2: Option<FloatView<'a>>,
    y1: TensorViewMut<Y1>,
    y2: TensorViewMut<Y2>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_a8w8_blockscale_a16w16";
    if T::DTYPE == DType::I8 {
        let reason = "products beside 16-bit floats take fp8e4m3fnuz on gfx942, fp8e4m3 on gfx950 and sm_90";
        return Err(Error::unsupported(OP, T::DTYPE.to_string(), reason));
    }
    x_fp8.dims::<2>(OP, OF_FP8.x)?;
    x_bf16.dims::<2>(OP, OF_HALVES.x)?;
    let product = block_product(OP, stream, x_fp8, w_fp8, x_scale, w_scale, group, options)?;
    let first = Product { names: OF_FP8, kernels: group.kernels(H::BESIDE_FP8), bias: bias1, ..product };
    let second = halves(OP, x_bf16, w_bf16, bias2, options);
    run(stream, first, second, y1, y2, workspace)
}

/// Two products with the same `M` and `K`, in one launch: `y1` as of [`gemm_afp4wfp4`](crate::gemm_afp4wfp4), with a bias, `y2` as
/// of [`gemm_a16w16`](crate::gemm_a16w16()).
///
/// | arg               | shape                        | dtype                | layout                                                 |
/// |-------------------|------------------------------|----------------------|--------------------------------------------------------|
/// | `x_fp4`           | `[M, K / 2]`                 | [`Fp4x2`]            | unit stride on `K`, any row stride                     |
/// | `w_fp4`           | `[N1, K / 2]`                | [`Fp4x2`]            | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight) |
/// | `x_scale`         | `[M, K / 32]`                | [`E8M0`](hk_core::E8M0) | any strides, or shuffled: [`MxScaleView`]           |
/// | `w_scale`         | `[N1, K / 32]`               | [`E8M0`](hk_core::E8M0) | likewise                                            |
/// | others            | as of [`fused_gemm_a8w8_blockscale_a16w16`] |       |                                                        |
///
/// All else is as of [`fused_gemm_a8w8_blockscale_a16w16`].
///
/// # Errors
/// As `gemm_afp4wfp4` and `gemm_a16w16`, of either product, and as [`fused_gemm_a8w8_blockscale_a16w16`].
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_gemm_afp4wfp4_a16w16<'a, H: Half, Y1: Float, Y2: Float>(
    stream: &Stream,
    x_fp4: TensorView<'a, Fp4x2>,
    w_fp4: impl Into<Weight<'a, Fp4x2>>,
    x_scale: impl Into<MxScaleView<'a>>,
    w_scale: impl Into<MxScaleView<'a>>,
    x_bf16: TensorView<'a, H>,
    w_bf16: impl Into<Weight<'a, H>>,
    bias1: Option<FloatView<'a>>,
    bias2: Option<FloatView<'a>>,
    y1: TensorViewMut<Y1>,
    y2: TensorViewMut<Y2>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_afp4wfp4_a16w16";
    x_fp4.dims::<2>(OP, OF_FP4.x)?;
    x_bf16.dims::<2>(OP, OF_HALVES.x)?;
    let mut product = fp4_product(OP, x_fp4, w_fp4.into(), x_scale.into(), w_scale.into(), options);
    let [kernels, by_words] = H::BESIDE_FP4;
    if let Blocks::Mx(scales) = &mut product.blocks {
        scales.by_words = by_words;
    }
    let first = Product { names: OF_FP4, kernels, bias: bias1, ..product };
    let second = halves(OP, x_bf16, w_bf16, bias2, options);
    run(stream, first, second, y1, y2, workspace)
}
