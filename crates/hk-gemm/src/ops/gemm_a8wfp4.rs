//! `gemm_a8wfp4`: GEMM of fp8 activations by mxfp4 weights.

use crate::element::Int8OrFp8;
use crate::gemm::{Gemm, GemmOptions, GemmScales, GemmWeight, MxScaleView};
use hk_core::{Float, Fp4x2, Result, Stream, TensorView, TensorViewMut};

/// fp8 activations with a scale for each row, and mxfp4 weights.
#[derive(Debug, Clone, Copy)]
pub struct A8WFp4Inputs<'a, T: Int8OrFp8> {
    /// Activations.
    pub a: TensorView<'a, T>,
    /// Weights.
    pub w: GemmWeight<'a, Fp4x2>,
    /// Scales of the rows of `a`.
    pub a_scale: TensorView<'a, f32>,
    /// Scales of 32 columns of `w`.
    pub w_scale: MxScaleView<'a>,
}

/// GEMM of fp8 activations by mxfp4 weights: `y[m, n] = activation(a_scale[m] sum_k a[m, k] 2^(w_scale[n, k / 32] - 127) w[n,
/// k])`.
///
/// | arg         | shape                              | dtype                | layout                                                        |
/// |-------------|------------------------------------|----------------------|---------------------------------------------------------------|
/// | `a`         | `[M, K]`                           | [`Int8OrFp8`], fp8   | unit stride on `K`, any row stride                            |
/// | `w`         | `[N, K / 2]`                       | [`Fp4x2`]            | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `a_scale`   | `[M]`, `[M, 1]`, `[1, M]` or `[1]` | `f32`                | contiguous                                                    |
/// | `w_scale`   | `[N, K / 32]`                      | `e8m0`               | any strides, or shuffled: [`MxScaleView`]                     |
/// | `y`         | `[M, N]`                           | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                            |
/// | `workspace` | `[n]`                              | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Any `M` and `N`, and multiples of 32 as `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and
/// a multiple of 16 bytes long, take the vectorized path, others a much slower scalar one.
///
/// Values and scales of the weights are exact; sums are `f32`; one rounding, to nearest even, to the type of `y`. Targets
/// without matrix instructions for mxfp4 (gfx942) give the same but for the order of sums. A scale of 255 makes its block, and
/// what it takes part in, NaN. A NaN or an infinity stays in its row and column of `y`.
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
/// 32; [`Unsupported`](hk_core::Error::Unsupported) for int8, and the fp8 that the device's matrix instructions do not take;
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
///
/// Source: OCP Microscaling Formats (MX) 1.0, MXFP4.
pub fn gemm_a8wfp4<'a, T: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: A8WFp4Inputs<'a, T>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a8wfp4";
    let A8WFp4Inputs { a, w, a_scale, w_scale } = inputs;
    a.dims::<2>(OP, "a")?;
    let scales = GemmScales::MxWeights { a: Some(a_scale), w: w_scale };
    Gemm::named(OP, a, w).scales(scales).options(options).workspace(workspace).run(stream, y)
}
