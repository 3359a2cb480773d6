//! `gemm_a16w16_atomic`: GEMM of 16-bit floats with atomic split-K.

use crate::element::Half;
use crate::gemm::{Accumulate, Gemm, GemmOptions, GemmWeight};
use hk_core::{Result, Stream, TensorView, TensorViewMut};

/// GEMM of 16-bit floats with atomic split-K: `y[m, n] = sum_k a[m, k] w[n, k]`, or `+=` with [`Accumulate::Add`].
///
/// | arg | shape    | dtype         | layout                                |
/// |-----|----------|---------------|---------------------------------------|
/// | `a` | `[M, K]` | `bf16`, `f16` | unit stride on `K`, any row stride    |
/// | `w` | `[N, K]` | as `a`        | likewise, or [`GemmWeight::Shuffled`] |
/// | `y` | `[M, N]` | `f32`         | unit stride on `N`, any row stride    |
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one.
///
/// Sums are `f32`, and so is `y`: nothing is rounded.
///
/// Split-K partial sums are added to `y` with atomics, in any order: calls can differ in their last bits. With one split and
/// [`Accumulate::Overwrite`] nothing is added, and the same call gives the same bits.
///
/// `y` shares no memory with an input. Returns when the work is queued; nothing is launched without rows or columns.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) for a tensor that breaks the table, or a
/// workspace too short for the split-K of the options; [`Overlap`](hk_core::Error::Overlap) for shared memory;
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`Argument`](hk_core::Error::Argument) also for an activation,
/// which partial sums cannot have; [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
pub fn gemm_a16w16_atomic<'a, T: Half>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<GemmWeight<'a, T>>,
    y: TensorViewMut<f32>,
    accumulate: Accumulate,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a16w16_atomic";
    options.expect_no_activation(OP)?;
    a.dims::<2>(OP, "a")?;
    Gemm::named(OP, a, w).options(options).run_atomic(stream, y, accumulate)
}
