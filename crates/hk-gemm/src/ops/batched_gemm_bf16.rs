//! `batched_gemm_bf16`: batched GEMM of 16-bit floats.

use crate::element::Half;
use crate::gemm::{FloatView, Gemm, GemmOptions, GemmWeight};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut};

/// Batched GEMM of 16-bit floats: `y[b, m, n] = activation(sum_k a[b, m, k] w[b, n, k] + bias[b, n])`.
///
/// | arg         | shape                         | dtype                | layout                                                        |
/// |-------------|-------------------------------|----------------------|---------------------------------------------------------------|
/// | `a`         | `[batch, M, K]`               | `bf16`, `f16`        | unit stride on `K`, others free                               |
/// | `w`         | `[batch, N, K]`               | as `a`               | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `bias`      | `[batch, N]`, `[batch, 1, N]` | `bf16`, `f16`, `f32` | contiguous; optional                                          |
/// | `y`         | `[batch, M, N]`               | `bf16`, `f16`, `f32` | unit stride on `N`, others free                               |
/// | `workspace` | `[n]`                         | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one.
///
/// Sums, bias and activation are `f32`; one rounding, to nearest even, to the type of `y`. A NaN or an infinity stays in its
/// row and column of `y`.
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
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows,
/// columns or elements of `K`, or 2^31 tiles; [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a
/// kernel can answer. Nothing is written then.
pub fn batched_gemm_bf16<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<GemmWeight<'a, T>>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "batched_gemm_bf16";
    a.dims::<3>(OP, "a")?;
    Gemm::named(OP, a, w).bias(bias).options(options).workspace(workspace).run(stream, y)
}
