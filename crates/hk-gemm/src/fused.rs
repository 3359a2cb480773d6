//! Products and what comes after them in one pass: terms of each output, outputs shared out to two tensors.

use crate::a8w8::{self, MatrixCode};
use crate::fp4::fp4_product;
use crate::problem::{
    After, BlockScales, BlockShape, Blocks, FuseType, GemmOptions, NAMES, Names, Product, To,
};
use crate::views::{Addend, FloatView, MxScaleView, Weight};
use hk_core::{Float, Fp4x2, Result, Stream, TensorView, TensorViewMut};

pub(crate) const OPERANDS: Names = Names { x: "x", x_scale: "x_scale", ..NAMES };
const OF_SPLIT: Names = Names { y: "c1", ..OPERANDS };

/// A product of codes with scales of blocks.
#[expect(clippy::too_many_arguments, reason = "the operators' tensors")]
pub(crate) fn block_product<'a, T: MatrixCode>(
    op: &'static str,
    stream: &Stream,
    x: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    x_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    group: BlockShape,
    options: GemmOptions,
) -> Result<Product<'a, T, T>> {
    x.dims::<2>(op, "x")?;
    let blocks = Blocks::F32(BlockScales { x: x_scale, w: w_scale, group });
    let product = a8w8::product(op, stream, x, w, options)?;
    Ok(Product { names: OPERANDS, kernels: group.kernels(T::BLOCK), blocks, ..product })
}

/// [`gemm_a8w8_blockscale`](crate::gemm_a8w8_blockscale), and two terms: `y = a * g + b` ([`FuseType::ScaleAdd`]) or
/// `y = a * b + g` ([`FuseType::AddProduct`]) of its result `g`, in `f32`, before the one rounding.
///
/// | arg                      | shape           | dtype                | layout                                             |
/// |--------------------------|-----------------|----------------------|----------------------------------------------------|
/// | `x`, `w`, `x_scale`, `w_scale`, `workspace` | as `a`, .. of `gemm_a8w8_blockscale` | |                             |
/// | `a`, `b`                 | `[M, N]`, `[1]` | `bf16`, `f16`, `f32` | unit stride on `N`; or a number: [`Addend`]        |
/// | `y`                      | `[M, N]`        | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                 |
///
/// # Errors
/// As `gemm_a8w8_blockscale`.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_gemm_a8w8_blockscale_mul_add<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    x: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    x_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    group: BlockShape,
    a: impl Into<Addend<'a>>,
    b: impl Into<Addend<'a>>,
    fuse: FuseType,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_a8w8_blockscale_mul_add";
    let product = block_product(OP, stream, x, w, x_scale, w_scale, group, options)?;
    let after = After { terms: Some((fuse, a.into(), b.into())), ..After::default() };
    Product { after, ..product }.run(stream, To::Y(y), workspace)
}

/// [`gemm_afp4wfp4`](crate::gemm_afp4wfp4), and two terms, as of [`fused_gemm_a8w8_blockscale_mul_add`].
///
/// # Errors
/// As `gemm_afp4wfp4`.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_gemm_afp4wfp4_mul_add<'a, Y: Float>(
    stream: &Stream,
    x: TensorView<'a, Fp4x2>,
    w: impl Into<Weight<'a, Fp4x2>>,
    x_scale: impl Into<MxScaleView<'a>>,
    w_scale: impl Into<MxScaleView<'a>>,
    a: impl Into<Addend<'a>>,
    b: impl Into<Addend<'a>>,
    fuse: FuseType,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_afp4wfp4_mul_add";
    x.dims::<2>(OP, "x")?;
    let after = After { terms: Some((fuse, a.into(), b.into())), ..After::default() };
    let product = fp4_product(OP, x, w.into(), x_scale.into(), w_scale.into(), options);
    Product { names: OPERANDS, after, ..product }.run(stream, To::Y(y), workspace)
}

/// [`gemm_a8w8_blockscale`](crate::gemm_a8w8_blockscale) whose result, seen as `C` `[M, D, S1 + S2]`, goes to two tensors:
/// `c1 = [C[.., ..S1], y]` and `c2 = C[.., S1..]`.
///
/// | arg                      | shape             | dtype                | layout                                           |
/// |--------------------------|-------------------|----------------------|--------------------------------------------------|
/// | `x`, `w`, `x_scale`, `w_scale`, `workspace` | as `a`, .. of `gemm_a8w8_blockscale` | |                             |
/// | `y`                      | `[M, D, S3]`      | `bf16`, `f16`, `f32` | unit stride on `S3`, others free, also 0         |
/// | `c1`                     | `[M, D, S1 + S3]` | `bf16`, `f16`, `f32` | unit stride on the last axis                     |
/// | `c2`                     | `[M, D, S2]`      | as `c1`              | likewise                                         |
///
/// `w` has `N = D (S1 + S2)` rows. This is the up-projection of MLA, of keys and values in one, with the keys' rotated part.
///
/// # Errors
/// As `gemm_a8w8_blockscale`.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_gemm_a8w8_blockscale_split_cat<'a, T: MatrixCode, Y: Float>(
    stream: &Stream,
    x: TensorView<'a, T>,
    w: impl Into<Weight<'a, T>>,
    x_scale: TensorView<'a, f32>,
    w_scale: TensorView<'a, f32>,
    group: BlockShape,
    y: impl Into<FloatView<'a>>,
    c1: TensorViewMut<Y>,
    c2: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_a8w8_blockscale_split_cat";
    let product = block_product(OP, stream, x, w, x_scale, w_scale, group, options)?;
    let to = To::Split { y: c1, rest: c2, cat: y.into() };
    Product { names: OF_SPLIT, ..product }.run(stream, to, workspace)
}

/// [`gemm_afp4wfp4`](crate::gemm_afp4wfp4) whose result goes to two tensors, as of
/// [`fused_gemm_a8w8_blockscale_split_cat`].
///
/// # Errors
/// As `gemm_afp4wfp4`.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_gemm_afp4wfp4_split_cat<'a, Y: Float>(
    stream: &Stream,
    x: TensorView<'a, Fp4x2>,
    w: impl Into<Weight<'a, Fp4x2>>,
    x_scale: impl Into<MxScaleView<'a>>,
    w_scale: impl Into<MxScaleView<'a>>,
    y: impl Into<FloatView<'a>>,
    c1: TensorViewMut<Y>,
    c2: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_afp4wfp4_split_cat";
    x.dims::<2>(OP, "x")?;
    let product = fp4_product(OP, x, w.into(), x_scale.into(), w_scale.into(), options);
    let to = To::Split { y: c1, rest: c2, cat: y.into() };
    Product { names: OF_SPLIT, ..product }.run(stream, to, workspace)
}
