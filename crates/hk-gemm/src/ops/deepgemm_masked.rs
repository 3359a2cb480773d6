//! `deepgemm_masked`: masked grouped GEMM of 16-bit floats.

use crate::element::Half;
use crate::gemm::desc::{Destination, GemmDesc, Grouping};
use crate::gemm::{Gemm, GemmOptions, GemmWeight};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut};

/// Masked grouped GEMM of 16-bit floats: `y[g, m, n] = activation(sum_k a[g, m, k] w[g, n, k])` for `m < masked_m[g]`.
///
/// | arg        | shape          | dtype                | layout                                |
/// |------------|----------------|----------------------|---------------------------------------|
/// | `a`        | `[G, Mmax, K]` | `bf16`, `f16`        | unit stride on `K`, others free       |
/// | `w`        | `[G, N, K]`    | as `a`               | likewise, or [`GemmWeight::Shuffled`] |
/// | `masked_m` | `[G]`          | `i32`                | contiguous                            |
/// | `y`        | `[G, Mmax, N]` | `bf16`, `f16`, `f32` | unit stride on `N`, others free       |
///
/// Rows from `masked_m[g]` on are not written. A number below zero counts as zero, one above `Mmax` as `Mmax`; the host does
/// not read it, and tiles without rows end at once.
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one.
///
/// Sums and activation are `f32`; one rounding, to nearest even, to the type of `y`. A NaN or an infinity stays in its row and
/// column of `y`.
///
/// K is not split. Deterministic: the same call gives the same bits. A row is bitwise identical for any `M` and batch under
/// [`Determinism::BatchInvariant`](crate::Determinism::BatchInvariant), or a given [`GemmConfig`](crate::GemmConfig).
///
/// `y` shares no memory with an input. Returns when the work is queued; nothing is launched without rows or columns.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) for a tensor that breaks the table, or a
/// workspace too short for the split-K of the options; [`Overlap`](hk_core::Error::Overlap) for shared memory;
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows,
/// columns or elements of `K`, or 2^31 tiles; [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a
/// kernel can answer. Nothing is written then.
///
/// Source: DeepGEMM, masked and contiguous layouts.
pub fn deepgemm_masked<'a, T: Half, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<GemmWeight<'a, T>>,
    masked_m: TensorView<'a, i32>,
    y: TensorViewMut<Y>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "deepgemm_masked";
    a.dims::<3>(OP, "a")?;
    let (desc, _) = Gemm::named(OP, a, w).options(options).desc();
    let grouping = Grouping::Masked(masked_m);
    GemmDesc { grouping, ..desc }.run(stream, Destination::Store(y), None)
}
