//! `batched_gemm_a8w8_ptgq`: batched GEMM of activations that are quantized per token and group.

use crate::element::{Half, Int8OrFp8};
use crate::gemm::{BlockShape, FloatView, Gemm, GemmOptions, GemmScales, GemmWeight, Prequant};
use hk_core::{Error, Float, Result, Stream, TensorView, TensorViewMut};

/// 16-bit activations to be quantized per token and group, and int8 or fp8 weights with one scale.
#[derive(Debug, Clone, Copy)]
pub struct PtgqInputs<'a, T: Half, C: Int8OrFp8> {
    /// Activations.
    pub a: TensorView<'a, T>,
    /// Columns of `a` that share a scale: a power of two, 128 is the fastest.
    pub group: usize,
    /// Weights.
    pub w: GemmWeight<'a, C>,
    /// Their scale.
    pub w_scale: TensorView<'a, f32>,
}

/// Batched GEMM of 16-bit activations, quantized per token and group, by int8 or fp8 weights with one scale: `y[b, m, n] =
/// activation(w_scale sum_g s[b, m, g] sum_{k in g} q(a)[b, m, k] w[b, n, k] + bias[b, n])`.
///
/// | arg         | shape                         | dtype                | layout                                                        |
/// |-------------|-------------------------------|----------------------|---------------------------------------------------------------|
/// | `a`         | `[batch, M, K]`               | `bf16`, `f16`        | unit stride on `K`, others free                               |
/// | `w`         | `[batch, N, K]`               | [`Int8OrFp8`]        | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `w_scale`   | `[1]`                         | `f32`                |                                                               |
/// | `bias`      | `[batch, N]`, `[batch, 1, N]` | `bf16`, `f16`, `f32` | contiguous; optional                                          |
/// | `y`         | `[batch, M, N]`               | `bf16`, `f16`, `f32` | unit stride on `N`, others free                               |
/// | `workspace` | `[n]`                         | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Each `group` columns of a row of `a` are quantized to the type of `w`, as by [`group_quant`](hk_quant::group_quant) (`s =
/// max(max |a|, 1e-10) / qmax`): up to 32 rows on the fly, in registers, if groups are of 128 columns; more of them ahead of
/// the GEMM, into the workspace.
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one. Tensors with `M` as their first axis are views with their
/// axes exchanged ([`TensorView::transpose`]).
///
/// Sums of 128 columns, or of a group, are scaled into `f32`; one rounding, to nearest even, to the type of `y`. A NaN or an
/// infinity stays in its row and column of `y`.
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
/// ask for tiles of more than 32 rows or batch invariance; [`Argument`](hk_core::Error::Argument) also for a `group` that is no power of
/// two; [`Unsupported`](hk_core::Error::Unsupported) for the fp8 that the device's matrix instructions do not take;
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
pub fn batched_gemm_a8w8_ptgq<'a, T: Half, C: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: PtgqInputs<'a, T, C>,
    bias: Option<FloatView<'a>>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "batched_gemm_a8w8_ptgq";
    let PtgqInputs { a, group, w, w_scale } = inputs;
    let [_, _, k] = a.dims::<3>(OP, "a")?;
    let &[batch, n, _] = w.view().shape() else {
        return Err(Error::shape(OP, "w", w.view().shape(), "[batch, rows, cols]"));
    };
    w_scale.expect_shape(OP, "w_scale", [1])?;
    let group = BlockShape { n: n.max(4).checked_next_power_of_two().unwrap_or(1), k: group };
    group.check(OP)?;
    let w_scale = w_scale.broadcast([batch, n.div_ceil(group.n), k.div_ceil(group.k)])?;
    let gemm = Gemm::named(OP, a, w).scales(GemmScales::WeightBlocks { w: w_scale, group }).bias(bias);
    gemm.options(options).workspace(workspace).prequant(Prequant::Yes).run(stream, y)
}
