//! Products with mxfp4: pairs of fp4 codes, and a power-of-two scale for each 32 columns of a row.

use crate::a8w8::MatrixCode;
use crate::a16w16::Half;
use crate::config::Precision;
use crate::kernels;
use crate::problem::{After, Blocks, GemmOptions, Grouping, Kernels, MxScales, NAMES, Product, Scales, To};
use crate::quantized::Quantized;
use crate::views::{MX_BLOCK, MxScaleView, Weight};
use hk_core::quant::{BlockScale, ScaleLayout};
use hk_core::{
    DType, DeviceInfo, E8M0, Element, Error, Float, Fp4x2, Result, Stream, TensorView, TensorViewMut,
};
use hk_quant::{MxOptions, dynamic_mxfp4_quant};

pub(crate) static FP4: Kernels = Kernels {
    tiles: &kernels::MX,
    skinny: &kernels::MIXED4,
    names: [
        "",
        "",
        "gemm_afp4wfp4_64x64",
        "gemm_afp4wfp4_64x64_elements",
        "",
        "gemm_afp4wfp4_16x32",
        "gemm_afp4wfp4_32x32",
        "gemm_afp4wfp4_64x32",
        "gemm_afp4wfp4_256x128",
        "",
    ],
};
static FP4_BY_WORDS: Kernels = Kernels {
    names: [
        "",
        "",
        "gemm_afp4wfp4_64x64_words",
        "",
        "",
        "gemm_afp4wfp4_16x32",
        "gemm_afp4wfp4_32x32",
        "gemm_afp4wfp4_64x32",
        "gemm_afp4wfp4_256x128_words",
        "",
    ],
    ..FP4
};
pub(crate) static FP8: Kernels = Kernels {
    names: [
        "",
        "gemm_a8wfp4_128x128",
        "gemm_a8wfp4_64x64",
        "gemm_a8wfp4_64x64_elements",
        "",
        "gemm_a8wfp4_16x32",
        "gemm_a8wfp4_32x32",
        "gemm_a8wfp4_64x32",
        "",
        "",
    ],
    ..FP4
};
static FP8_BY_WORDS: Kernels = Kernels {
    names: [
        "",
        "gemm_a8wfp4_128x128_words",
        "gemm_a8wfp4_64x64_words",
        "",
        "",
        "gemm_a8wfp4_16x32",
        "gemm_a8wfp4_32x32",
        "gemm_a8wfp4_64x32",
        "",
        "",
    ],
    ..FP4
};

/// A product with weights in blocks of 32 columns; all else is for the caller to say.
#[expect(clippy::too_many_arguments, reason = "what differs between the operators")]
pub(crate) fn product<'a, X: Element, W: Element>(
    op: &'static str,
    precision: Precision,
    [kernels, by_words]: [&'static Kernels; 2],
    x: TensorView<'a, X>,
    w: Weight<'a, W>,
    x_scale: Option<MxScaleView<'a>>,
    w_scale: MxScaleView<'a>,
    options: GemmOptions,
) -> Product<'a, X, W> {
    Product {
        op,
        names: NAMES,
        kernels,
        precision,
        x,
        w,
        scales: Scales::default(),
        blocks: Blocks::Mx(MxScales { x: x_scale, w: w_scale, by_words }),
        bias: None,
        grouping: Grouping::Batches,
        after: After::default(),
        gated: false,
        options,
    }
}

pub(crate) fn fp4_product<'a>(
    op: &'static str,
    x: TensorView<'a, Fp4x2>,
    w: Weight<'a, Fp4x2>,
    x_scale: MxScaleView<'a>,
    w_scale: MxScaleView<'a>,
    options: GemmOptions,
) -> Product<'a, Fp4x2, Fp4x2> {
    product(op, Precision::Fp4, [&FP4, &FP4_BY_WORDS], x, w, Some(x_scale), w_scale, options)
}

/// Length of the workspace, in `f32`, for [`gemm_a16wfp4`] with `prequant` to quantize `a` but once, and to cut K into as many
/// parts as suit the device. A shorter one, or none, is as good but for speed, if rows of `a` begin on 16 bytes.
pub fn gemm_a16wfp4_workspace(info: &DeviceInfo, [batch, m, n, k]: [usize; 4]) -> usize {
    let planes = crate::gemm_workspace(info, Precision::Fp4, [batch, m, n, k]);
    Quantized::<Fp4x2, E8M0>::new(&[batch, m, k], MX_BLOCK).len().saturating_add(planes)
}

/// Of 16-bit floats, as they are or quantized.
#[expect(clippy::too_many_arguments, reason = "what differs between the operators")]
fn a16wfp4<'a, T: Half, Y: Float>(
    op: &'static str,
    stream: &Stream,
    a: TensorView<'a, T>,
    w: Weight<'a, Fp4x2>,
    w_scale: MxScaleView<'a>,
    prequant: bool,
    after: After<'a>,
    mut to: To<'_, 'a, Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    mut options: GemmOptions,
) -> Result<()> {
    let of = |kernels, options| Product {
        after,
        ..product(op, Precision::HalfByFp4, [kernels, kernels], a, w, None, w_scale, options)
    };
    if !prequant {
        return of(T::BY_FP4, options).run(stream, to, workspace);
    }
    if a.shape().last().is_some_and(|k| !k.is_multiple_of(MX_BLOCK)) {
        return Err(Error::shape(op, "a", a.shape(), "K a multiple of 32"));
    }
    let quantized = Quantized::<Fp4x2, E8M0>::new(a.shape(), MX_BLOCK);
    let direct = of(T::TO_FP4, options);
    if let Some(config) = quantized.on_their_way(&direct, workspace.as_ref())? {
        options.config = config;
        return of(T::TO_FP4, options).run(stream, to, workspace);
    }
    let (codes, scales, planes) = quantized.places(op, &a, &mut to, workspace)?;
    let (x, x_scale) = (codes.alias(), scales.alias());
    let product = Product { after, ..fp4_product(op, x, w, x_scale.into(), w_scale, options) };
    let checked = product.check(stream, to, Some(&planes))?;
    let options = MxOptions { mode: BlockScale::Even, scale_layout: ScaleLayout::RowMajor };
    quantized
        .each_batch(op, a, codes, scales, |x, q, scale| dynamic_mxfp4_quant(stream, x, q, scale, options))?;
    product.launch(stream, checked, Some(planes))
}

/// Product of 16-bit floats by mxfp4: `y[m, n] = activation(sum_k q(a)[m, k] 2^(w_scale[n, k / 32] - 127) w[n, k])`.
///
/// | arg         | shape         | dtype                | layout                                                        |
/// |-------------|---------------|----------------------|---------------------------------------------------------------|
/// | `a`         | `[M, K]`      | `bf16`, `f16`        | unit stride on `K`, any row stride                            |
/// | `w`         | `[N, K / 2]`  | [`Fp4x2`]            | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight)      |
/// | `w_scale`   | `[N, K / 32]` | [`E8M0`]             | any strides, or shuffled: [`MxScaleView`]                     |
/// | `y`         | `[M, N]`      | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                            |
/// | `workspace` | `[n]`         | `f32`                | contiguous, 16-byte aligned; see [`gemm_a16wfp4_workspace`]   |
///
/// With `prequant`, `q(a)` is `a` quantized to mxfp4, as by [`dynamic_mxfp4_quant`] with [`BlockScale::Even`]: up to 32 rows are
/// quantized on their way to the product, more once, into the workspace. Without, it is `a`. The weights' values and scales are
/// exact; sums are `f32`, with one rounding, to the type of `y`. Targets without matrix instructions for mxfp4 (gfx942) give the
/// same but for the order of sums. A scale of 255 makes NaN of what its block takes part in. All else is as of
/// [`gemm_a16w16`](crate::gemm_a16w16()).
///
/// # Errors
/// As `gemm_a16w16`; [`Shape`](Error::Shape) if `K` is no multiple of 32, or for a workspace without room for the codes of `a`,
/// with `prequant`, if its rows do not begin on 16 bytes or the options ask for tiles of more than 32 rows.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a16wfp4<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, Fp4x2>>,
    w_scale: impl Into<MxScaleView<'a>>,
    prequant: bool,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a16wfp4";
    a.dims::<2>(OP, "a")?;
    let after = After::default();
    a16wfp4(OP, stream, a, w.into(), w_scale.into(), prequant, after, To::Y(y), workspace, options)
}

/// [`gemm_a16wfp4`] whose parts of K are added in memory: `y = ..`, or `+=` if `accumulate`, as
/// [`gemm_a16w16_atomic`](crate::gemm_a16w16_atomic()). The workspace is for the codes of `a`.
///
/// # Errors
/// As [`gemm_a16wfp4`]; [`Argument`](Error::Argument) for an activation, which sums of parts cannot have.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a16wfp4_atomic<'a, T: Half>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, Fp4x2>>,
    w_scale: impl Into<MxScaleView<'a>>,
    prequant: bool,
    y: TensorViewMut<f32>,
    accumulate: bool,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a16wfp4_atomic";
    a.dims::<2>(OP, "a")?;
    options.expect_no_activation(OP)?;
    let (after, to) = (After::default(), To::Sum { y, accumulate });
    a16wfp4(OP, stream, a, w.into(), w_scale.into(), prequant, after, to, workspace, options)
}

/// [`gemm_a16wfp4`] of `batch` independent products: tensors have `batch` as their first axis, shuffled scales `[batch, n]`.
/// `y_scale` `[1]`: the results are divided by it, for outputs that are to become fp8. An output with `M` as its first axis is a
/// view with its axes exchanged ([`TensorView::transpose`]).
///
/// # Errors
/// As [`gemm_a16wfp4`].
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn batched_gemm_a16wfp4<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, Fp4x2>>,
    w_scale: impl Into<MxScaleView<'a>>,
    prequant: bool,
    y_scale: Option<TensorView<'a, f32>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "batched_gemm_a16wfp4";
    a.dims::<3>(OP, "a")?;
    let after = After { divisor: y_scale, ..After::default() };
    a16wfp4(OP, stream, a, w.into(), w_scale.into(), prequant, after, To::Y(y), workspace, options)
}

/// Product of fp8 by mxfp4: `y[m, n] = activation(a_scale[m] sum_k a[m, k] 2^(w_scale[n, k / 32] - 127) w[n, k])`.
///
/// `a` `[M, K]` is of the fp8 that the device's products take ([`MatrixCode`]), with unit stride on `K`; `a_scale` `[M]`, `[M, 1]`
/// or `[1]` of `f32`, contiguous; all else is as of [`gemm_a16wfp4`] without `prequant`; the workspace is as of
/// [`gemm_a16w16`](crate::gemm_a16w16()).
///
/// # Errors
/// As [`gemm_a16wfp4`]; [`Unsupported`](Error::Unsupported) for int8, and the fp8 that the device's products do not take.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_a8wfp4<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<Weight<'a, Fp4x2>>,
    a_scale: TensorView<'a, f32>,
    w_scale: impl Into<MxScaleView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a8wfp4";
    a.dims::<2>(OP, "a")?;
    let arch = stream.device().arch();
    if T::DTYPE == DType::I8 || !T::served(arch) {
        let reason = "products with mxfp4 take fp8e4m3fnuz on gfx942, fp8e4m3 on gfx950 and sm_90";
        return Err(Error::unsupported(OP, format!("{} on {arch}", T::DTYPE), reason));
    }
    let kernels = [&FP8, &FP8_BY_WORDS];
    let product = product(OP, Precision::Fp8ByFp4, kernels, a, w.into(), None, w_scale.into(), options);
    Product { scales: Scales { x: Some(a_scale), w: None }, ..product }.run(stream, To::Y(y), workspace)
}

/// Product of mxfp4 by mxfp4:
/// `y[m, n] = activation(sum_k 2^(a_scale[m, k / 32] - 127) a[m, k] 2^(w_scale[n, k / 32] - 127) w[n, k])`.
///
/// | arg         | shape         | dtype                | layout                                                        |
/// |-------------|---------------|----------------------|---------------------------------------------------------------|
/// | `a`         | `[M, K / 2]`  | [`Fp4x2`]            | unit stride on `K`, any row stride                            |
/// | `w`         | `[N, K / 2]`  | [`Fp4x2`]            | likewise, or a [`ShuffledWeight`](crate::ShuffledWeight)      |
/// | `a_scale`   | `[M, K / 32]` | [`E8M0`]             | any strides, or shuffled: [`MxScaleView`]                     |
/// | `w_scale`   | `[N, K / 32]` | [`E8M0`]             | likewise                                                      |
/// | `y`         | `[M, N]`      | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                            |
/// | `workspace` | `[n]`         | `f32`                | contiguous, 16-byte aligned; see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Sums and rounding are as of [`gemm_a16wfp4`].
///
/// # Errors
/// As [`gemm_a16w16`](crate::gemm_a16w16()); [`Shape`](Error::Shape) if `K` is no multiple of 32.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn gemm_afp4wfp4<'a, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, Fp4x2>,
    w: impl Into<Weight<'a, Fp4x2>>,
    a_scale: impl Into<MxScaleView<'a>>,
    w_scale: impl Into<MxScaleView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_afp4wfp4";
    a.dims::<2>(OP, "a")?;
    fp4_product(OP, a, w.into(), a_scale.into(), w_scale.into(), options).run(stream, To::Y(y), workspace)
}

/// [`gemm_afp4wfp4`] of `batch` independent products: tensors have `batch` as their first axis, shuffled scales `[batch, n]`.
///
/// # Errors
/// As [`gemm_afp4wfp4`].
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn batched_gemm_afp4wfp4<'a, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, Fp4x2>,
    w: impl Into<Weight<'a, Fp4x2>>,
    a_scale: impl Into<MxScaleView<'a>>,
    w_scale: impl Into<MxScaleView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "batched_gemm_afp4wfp4";
    a.dims::<3>(OP, "a")?;
    fp4_product(OP, a, w.into(), a_scale.into(), w_scale.into(), options).run(stream, To::Y(y), workspace)
}
