//! `fused_gemm_afp4wfp4_mul_add`: GEMM of mxfp4, and a multiply-add.

use crate::gemm::desc::{Destination, Fusions, GemmDesc, GroupScales, arg};
use crate::gemm::{GemmOptions, GemmWeight, MxScaleView};
use crate::ops::fused_gemm_a8w8_blockscale_mul_add::MulAdd;
use hk_core::{Float, Fp4x2, Result, Stream, TensorView, TensorViewMut};

/// Operands of a fused GEMM of mxfp4.
#[derive(Debug, Clone, Copy)]
pub struct FusedMxInputs<'a> {
    /// Activations.
    pub x: TensorView<'a, Fp4x2>,
    /// Weights.
    pub w: GemmWeight<'a, Fp4x2>,
    /// Scales of 32 columns of `x`.
    pub x_scale: MxScaleView<'a>,
    /// Scales of 32 columns of `w`.
    pub w_scale: MxScaleView<'a>,
}

impl<'a> FusedMxInputs<'a> {
    pub(crate) fn desc(self, op: &'static str, options: GemmOptions) -> Result<GemmDesc<'a, Fp4x2, Fp4x2>> {
        let Self { x, w, x_scale, w_scale } = self;
        x.dims::<2>(op, "x")?;
        let group_scales = GroupScales::Mx { a: Some(arg("x_scale", x_scale)), w: arg("w_scale", w_scale) };
        Ok(GemmDesc { a: arg("x", x), group_scales, ..GemmDesc::new(op, x, w).options(options) })
    }
}

/// GEMM of mxfp4, fused with a multiply-add: `g` is `activation(sum_k 2^(x_scale[m, k / 32] - 127) x[m, k] 2^(w_scale[n, k /
/// 32] - 127) w[n, k])`, and `y = a * g + b` ([`FuseType::ScaleAdd`](crate::FuseType::ScaleAdd)) or `y = a * b + g`
/// ([`FuseType::AddProduct`](crate::FuseType::AddProduct)).
///
/// | arg         | shape           | dtype                | layout                                                             |
/// |-------------|-----------------|----------------------|--------------------------------------------------------------------|
/// | `x`         | `[M, K / 2]`    | [`Fp4x2`]            | unit stride on `K`, any row stride                                 |
/// | `w`         | `[N, K / 2]`    | [`Fp4x2`]            | likewise, or [`GemmWeight::Shuffled`](crate::GemmWeight::Shuffled) |
/// | `x_scale`   | `[M, K / 32]`   | `e8m0`               | any strides, or shuffled: [`MxScaleView`](crate::MxScaleView)      |
/// | `w_scale`   | `[N, K / 32]`   | `e8m0`               | likewise                                                           |
/// | `a`, `b`    | `[M, N]`, `[1]` | `bf16`, `f16`, `f32` | unit stride on `N`; or a number: [`Addend`](crate::Addend)         |
/// | `y`         | `[M, N]`        | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                                 |
/// | `workspace` | `[n]`           | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace)      |
///
/// Any `M` and `N`, and multiples of 32 as `K`; without columns of `K` the sums are zero. Rows of `x` and `w` on 16 bytes, and
/// a multiple of 16 bytes long, take the vectorized path, others a much slower scalar one.
///
/// Values and scales are exact; sums are `f32`; one rounding, to nearest even, to the type of `y`. Targets without matrix
/// instructions for mxfp4 (gfx942) give the same but for the order of sums. A scale of 255 makes its block, and what it takes
/// part in, NaN. A NaN or an infinity stays in its row and column of `y`. The multiply-add is part of the `f32` epilogue,
/// before the one rounding.
///
/// Deterministic: the same call gives the same bits. A row is bitwise identical for any `M` and batch under
/// [`Determinism::BatchInvariant`](crate::Determinism::BatchInvariant), or a given [`GemmConfig`](crate::GemmConfig).
///
/// Outputs and `workspace` share no memory with each other or with an input. Returns when the work is queued; nothing is
/// launched without rows or columns.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) for a tensor that breaks the table, or a
/// workspace too short for the split-K of the options; [`Overlap`](hk_core::Error::Overlap) for shared memory;
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`Shape`](hk_core::Error::Shape) also if `K` is no multiple of
/// 32; [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
///
/// Source: OCP Microscaling Formats (MX) 1.0, MXFP4.
pub fn fused_gemm_afp4wfp4_mul_add<'a, Y: Float>(
    stream: &Stream,
    inputs: FusedMxInputs<'a>,
    terms: MulAdd<'a>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_afp4wfp4_mul_add";
    let MulAdd { a, b, fuse } = terms;
    let fusions = Fusions { mul_add: Some((fuse, a, b)), ..Fusions::default() };
    GemmDesc { fusions, ..inputs.desc(OP, options)? }.run(stream, Destination::Store(y), workspace)
}
