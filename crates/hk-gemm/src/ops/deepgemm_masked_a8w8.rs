//! `deepgemm_masked_a8w8`: masked grouped GEMM of int8 or fp8.

use crate::element::Int8OrFp8;
use crate::gemm::desc::{Destination, GemmDesc, Grouping};
use crate::gemm::{Gemm, GemmOptions, GemmScales, GemmWeight};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut};

/// Masked grouped GEMM of int8 or fp8: `y[g, m, n] = activation(scales sum_k a[g, m, k] w[g, n, k])` for `m < masked_m[g]`.
///
/// | arg        | shape                                                                                                                                   | dtype                | layout                                                       |
/// |------------|-----------------------------------------------------------------------------------------------------------------------------------------|----------------------|--------------------------------------------------------------|
/// | `a`        | `[G, Mmax, K]`                                                                                                                          | [`Int8OrFp8`]        | unit stride on `K`, others free                              |
/// | `w`        | `[G, N, K]`                                                                                                                             | as `a`               | likewise, or [`GemmWeight::Shuffled`]                        |
/// | `scales`   | rows: `[G, Mmax]` or `[G, Mmax, 1]`, and `[G, N]` or `[G, N, 1]`; blocks: `[G, Mmax, groups of K]`, and `[G, groups of N, groups of K]` | `f32`                | [`Rows`](GemmScales::Rows) or [`Blocks`](GemmScales::Blocks) |
/// | `masked_m` | `[G]`                                                                                                                                   | `i32`                | contiguous                                                   |
/// | `y`        | `[G, Mmax, N]`                                                                                                                          | `bf16`, `f16`, `f32` | unit stride on `N`, others free                              |
///
/// Rows from `masked_m[g]` on are not written. A number below zero counts as zero, one above `Mmax` as `Mmax`; the host does
/// not read it, and tiles without rows end at once.
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one.
///
/// Sums of int8 are exact, in `i32`, over each split-K slice; of fp8 they are `f32`. Scales, bias and activation are `f32`; one
/// rounding, to nearest even, to the type of `y`. A NaN or an infinity stays in its row and column of `y`. Block scales are
/// applied to sums of 128 columns, or of a shorter group.
///
/// K is not split. Deterministic: the same call gives the same bits. A row is bitwise identical for any `M` and batch under
/// [`Determinism::BatchInvariant`](crate::Determinism::BatchInvariant), or a given [`GemmConfig`](crate::GemmConfig).
///
/// `y` shares no memory with an input. Returns when the work is queued; nothing is launched without rows or columns.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) for a tensor that breaks the table, or a
/// workspace too short for the split-K of the options; [`Overlap`](hk_core::Error::Overlap) for shared memory;
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`Argument`](hk_core::Error::Argument) also for int8 with `K`
/// beyond 131071, whose sums may not fit `i32`; [`Argument`](hk_core::Error::Argument) also for a `group.n` or `group.k` that is no
/// power of two; [`TooLarge`](hk_core::Error::TooLarge) for more than some 2^25 groups of fewer than 64 columns;
/// [`Unsupported`](hk_core::Error::Unsupported) for the fp8 that the device's matrix instructions do not take;
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
///
/// Source: DeepGEMM, masked and contiguous layouts.
pub fn deepgemm_masked_a8w8<'a, T: Int8OrFp8, Y: Float>(
    stream: &Stream,
    a: TensorView<'a, T>,
    w: impl Into<GemmWeight<'a, T>>,
    scales: GemmScales<'a>,
    masked_m: TensorView<'a, i32>,
    y: TensorViewMut<Y>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "deepgemm_masked_a8w8";
    scales.expect_rows_or_blocks(OP)?;
    a.dims::<3>(OP, "a")?;
    let (desc, _) = Gemm::named(OP, a, w).scales(scales).options(options).desc();
    let grouping = Grouping::Masked(masked_m);
    GemmDesc { grouping, ..desc }.run(stream, Destination::Store(y), None)
}
