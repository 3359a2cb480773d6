//! `fused_gemm_a8w8_blockscale_split_cat`: GEMM of int8 or fp8 with block scales, whose columns are split.

use crate::element::Int8OrFp8;
use crate::gemm::desc::{Destination, GemmDesc};
use crate::gemm::{FloatView, GemmOptions};
use crate::ops::fused_gemm_a8w8_blockscale_mul_add::FusedBlockInputs;
use hk_core::{Element, Float, Result, Stream, TensorViewMut};

/// The outputs of a GEMM whose columns are split.
#[derive(Debug)]
pub struct SplitCatOutputs<'t, Y: Element> {
    /// `[M, D, S1 + S3]`: the first `S1` columns of each head, and `y`.
    pub c1: TensorViewMut<'t, Y>,
    /// `[M, D, S2]`: the other columns of each head.
    pub c2: TensorViewMut<'t, Y>,
}

/// GEMM of int8 or fp8 with block scales whose result, seen as `C` `[M, D, S1 + S2]`, is split into two tensors: `C =
/// activation(sum_g x_scale[m, g] w_scale[n / group.n, g] sum_{k in g} x[m, k] w[n, k])`, `c1[m, d] = [C[m, d, ..S1], y[m, d]]`
/// and `c2[m, d] = C[m, d, S1..]`. `w` has `N = D (S1 + S2)` rows. It is the up-projection of MLA, of keys and values in one,
/// with the rotated part of the keys.
///
/// | arg         | shape                        | dtype                | layout                                                             |
/// |-------------|------------------------------|----------------------|--------------------------------------------------------------------|
/// | `x`         | `[M, K]`                     | [`Int8OrFp8`]        | unit stride on `K`, any row stride                                 |
/// | `w`         | `[N, K]`                     | as `x`               | likewise, or [`GemmWeight::Shuffled`](crate::GemmWeight::Shuffled) |
/// | `x_scale`   | `[M, groups of K]`           | `f32`                | any strides                                                        |
/// | `w_scale`   | `[groups of N, groups of K]` | `f32`                | any strides                                                        |
/// | `y`         | `[M, D, S3]`                 | `bf16`, `f16`, `f32` | unit stride on `S3`, others free, also 0                           |
/// | `c1`        | `[M, D, S1 + S3]`            | `bf16`, `f16`, `f32` | unit stride on the last axis                                       |
/// | `c2`        | `[M, D, S2]`                 | as `c1`              | likewise                                                           |
/// | `workspace` | `[n]`                        | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace)      |
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `x` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one.
///
/// Sums over 128 columns (of int8 in `i32`) are scaled into an `f32` sum; one rounding, to nearest even, to the type of `y`.
/// Groups of fewer than 128 columns are summed and scaled 64 columns, or a group, at a time, by 64 x 64 tiles; groups of fewer
/// than 16 columns take the scalar path. The last groups may be short. Transposed scales are a view with its axes exchanged
/// ([`TensorView::transpose`](hk_core::TensorView::transpose)). A NaN or an infinity stays in its row and column of `y`. `y` is
/// rounded to the type of `c1`.
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
/// beyond 131071, whose sums may not fit `i32`; [`Argument`](hk_core::Error::Argument) also for a `group.n` or `group.k` that is no
/// power of two; [`TooLarge`](hk_core::Error::TooLarge) for more than some 2^25 groups of fewer than 64 columns;
/// [`Unsupported`](hk_core::Error::Unsupported) for the fp8 that the device's matrix instructions do not take;
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
pub fn fused_gemm_a8w8_blockscale_split_cat<'a, T: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: FusedBlockInputs<'a, T>,
    y: impl Into<FloatView<'a>>,
    outputs: SplitCatOutputs<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_a8w8_blockscale_split_cat";
    let SplitCatOutputs { c1, c2 } = outputs;
    let to = Destination::SplitCat { c1, c2, cat: y.into() };
    GemmDesc { y: "c1", ..inputs.desc(OP, options)? }.run(stream, to, workspace)
}
