//! `gemm_a8w8_blockscale`: GEMM of int8 or fp8 with block scales.

use crate::element::Int8OrFp8;
use crate::gemm::{BlockShape, FloatView, Gemm, GemmOptions, GemmScales, GemmWeight};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut};

/// Operands with a scale for each block.
#[derive(Debug, Clone, Copy)]
pub struct BlockScaledInputs<'a, T: Int8OrFp8> {
    /// Activations.
    pub a: TensorView<'a, T>,
    /// Weights.
    pub w: GemmWeight<'a, T>,
    /// Scales of the groups of each row of `a`.
    pub a_scale: TensorView<'a, f32>,
    /// Scales of the blocks of `w`.
    pub w_scale: TensorView<'a, f32>,
    /// Rows of `w` and columns that share a scale.
    pub group: BlockShape,
}

/// GEMM of int8 or fp8 with a scale for each block: `y[m, n] = activation(sum_g a_scale[m, g] w_scale[n / group.n, g] sum_{k in
/// g} a[m, k] w[n, k] + bias[n])`, where group `g` of `K` is columns `group.k g` to `group.k (g + 1)`.
///
/// | arg         | shape                        | dtype                | layout                                                        |
/// |-------------|------------------------------|----------------------|---------------------------------------------------------------|
/// | `a`         | `[M, K]`                     | [`Int8OrFp8`]        | unit stride on `K`, any row stride                            |
/// | `w`         | `[N, K]`                     | as `a`               | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `a_scale`   | `[M, groups of K]`           | `f32`                | any strides                                                   |
/// | `w_scale`   | `[groups of N, groups of K]` | `f32`                | any strides                                                   |
/// | `bias`      | `[N]`                        | `bf16`, `f16`, `f32` | contiguous; optional                                          |
/// | `y`         | `[M, N]`                     | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                            |
/// | `workspace` | `[n]`                        | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one.
///
/// Sums over 128 columns (of int8 in `i32`) are scaled into an `f32` sum; one rounding, to nearest even, to the type of `y`.
/// Groups of fewer than 128 columns are summed and scaled 64 columns, or a group, at a time, by 64 x 64 tiles; groups of fewer
/// than 16 columns take the scalar path. The last groups may be short. Transposed scales are a view with its axes exchanged
/// ([`TensorView::transpose`](hk_core::TensorView::transpose)). A NaN or an infinity stays in its row and column of `y`.
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
pub fn gemm_a8w8_blockscale<'a, T: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: BlockScaledInputs<'a, T>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a8w8_blockscale";
    let BlockScaledInputs { a, w, a_scale, w_scale, group } = inputs;
    a.dims::<2>(OP, "a")?;
    let scales = GemmScales::Blocks { a: a_scale, w: w_scale, group };
    Gemm::named(OP, a, w).scales(scales).bias(bias).options(options).workspace(workspace).run(stream, y)
}
