//! `gemm_a8w8_per_token_scale`: GEMM of int8 or fp8 with scales of rows, without bias.

use crate::element::Int8OrFp8;
use crate::gemm::{Gemm, GemmOptions, GemmScales};
use crate::ops::gemm_a8w8::ScaledInputs;
use hk_core::{Float, Result, Stream, TensorViewMut};

/// GEMM of int8 or fp8 with a scale for each row: `y[m, n] = activation(a_scale[m] w_scale[n] sum_k a[m, k] w[n, k])`.
///
/// | arg         | shape                              | dtype                | layout                                                             |
/// |-------------|------------------------------------|----------------------|--------------------------------------------------------------------|
/// | `a`         | `[M, K]`                           | [`Int8OrFp8`]        | unit stride on `K`, any row stride                                 |
/// | `w`         | `[N, K]`                           | as `a`               | likewise, or [`GemmWeight::Shuffled`](crate::GemmWeight::Shuffled) |
/// | `a_scale`   | `[M]`, `[M, 1]`, `[1, M]` or `[1]` | `f32`                | contiguous                                                         |
/// | `w_scale`   | `[N]`, `[N, 1]`, `[1, N]` or `[1]` | `f32`                | contiguous                                                         |
/// | `y`         | `[M, N]`                           | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                                 |
/// | `workspace` | `[n]`                              | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace)      |
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one.
///
/// Sums of int8 are exact, in `i32`, over each split-K slice; of fp8 they are `f32`. Scales, bias and activation are `f32`; one
/// rounding, to nearest even, to the type of `y`. A NaN or an infinity stays in its row and column of `y`.
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
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`Argument`](hk_core::Error::Argument) also for int8 with `K`
/// beyond 131071, whose sums may not fit `i32`; [`Unsupported`](hk_core::Error::Unsupported) for the fp8 that the device's matrix
/// instructions do not take; [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
pub fn gemm_a8w8_per_token_scale<'a, T: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: ScaledInputs<'a, T>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a8w8_per_token_scale";
    let ScaledInputs { a, w, a_scale, w_scale } = inputs;
    a.dims::<2>(OP, "a")?;
    let scales = GemmScales::Rows { a: a_scale, w: w_scale };
    Gemm::named(OP, a, w).scales(scales).options(options).workspace(workspace).run(stream, y)
}
