//! `gemm_a16w8_blockscale`: GEMM of 16-bit activations by int8 or fp8 weights with block scales.

use crate::element::{Half, Int8OrFp8};
use crate::gemm::{BlockShape, Gemm, GemmOptions, GemmScales, GemmWeight, Prequant};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut};

/// 16-bit activations, and int8 or fp8 weights with a scale for each block.
#[derive(Debug, Clone, Copy)]
pub struct A16W8Inputs<'a, T: Half, C: Int8OrFp8> {
    /// Activations.
    pub a: TensorView<'a, T>,
    /// Weights.
    pub w: GemmWeight<'a, C>,
    /// Scales of the blocks of `w`.
    pub w_scale: TensorView<'a, f32>,
    /// Rows of `w` and columns that share a scale.
    pub group: BlockShape,
}

/// GEMM of 16-bit activations by int8 or fp8 weights with a scale for each block: `y[m, n] = activation(sum_g w_scale[n /
/// group.n, g] sum_{k in g} q(a)[m, k] w[n, k])`.
///
/// | arg         | shape                        | dtype                | layout                                                        |
/// |-------------|------------------------------|----------------------|---------------------------------------------------------------|
/// | `a`         | `[M, K]`                     | `bf16`, `f16`        | unit stride on `K`, any row stride                            |
/// | `w`         | `[N, K]`                     | [`Int8OrFp8`]        | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `w_scale`   | `[groups of N, groups of K]` | `f32`                | any strides                                                   |
/// | `y`         | `[M, N]`                     | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                            |
/// | `workspace` | `[n]`                        | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace) |
///
/// With [`Prequant::No`], `q(a)` is `a`, and `w` is dequantized to its type, exactly. With [`Prequant::Yes`], each `group.k`
/// columns of a row of `a` are quantized to the type of `w`, as by [`group_quant`](hk_quant::group_quant) (`s = max(max |a|,
/// 1e-10) / qmax`): up to 32 rows on the fly, in registers, if groups are of 128 columns; more of them ahead of the GEMM, into
/// the workspace. Their sums are multiplied by `s`.
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one.
///
/// Sums of 128 columns are scaled into `f32` (of 32, or a group, if a group has fewer than 128); one rounding, to nearest even,
/// to the type of `y`. A NaN or an infinity stays in its row and column of `y`.
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
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`Shape`](hk_core::Error::Shape) also for a workspace without
/// room for quantized activations, where rows of `a` do not begin on 16 bytes, groups are not of 128 columns, or the options
/// ask for tiles of more than 32 rows or batch invariance; [`Argument`](hk_core::Error::Argument) also for a `group.n` or `group.k` that
/// is no power of two; [`TooLarge`](hk_core::Error::TooLarge) for more than some 2^25 groups of fewer than 64 columns;
/// [`Unsupported`](hk_core::Error::Unsupported) for the fp8 that the device's matrix instructions do not take;
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
pub fn gemm_a16w8_blockscale<'a, T: Half, C: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: A16W8Inputs<'a, T, C>,
    prequant: Prequant,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a16w8_blockscale";
    let A16W8Inputs { a, w, w_scale, group } = inputs;
    a.dims::<2>(OP, "a")?;
    let gemm = Gemm::named(OP, a, w).scales(GemmScales::WeightBlocks { w: w_scale, group });
    gemm.options(options).workspace(workspace).prequant(prequant).run(stream, y)
}
