//! `gemm_a16wfp4_atomic`: GEMM of 16-bit activations by mxfp4 weights with atomic split-K.

use crate::element::Half;
use crate::gemm::{Accumulate, Gemm, GemmOptions, GemmScales, Prequant};
use crate::ops::gemm_a16wfp4::A16WFp4Inputs;
use hk_core::{Result, Stream, TensorViewMut};

/// GEMM of 16-bit activations by mxfp4 weights with atomic split-K: `y[m, n] = sum_k q(a)[m, k] 2^(w_scale[n, k / 32] - 127)
/// w[n, k]`, or `+=` with [`Accumulate::Add`].
///
/// | arg         | shape         | dtype                     | layout                                                             |
/// |-------------|---------------|---------------------------|--------------------------------------------------------------------|
/// | `a`         | `[M, K]`      | `bf16`, `f16`             | unit stride on `K`, any row stride                                 |
/// | `w`         | `[N, K / 2]`  | [`Fp4x2`](hk_core::Fp4x2) | likewise, or [`GemmWeight::Shuffled`](crate::GemmWeight::Shuffled) |
/// | `w_scale`   | `[N, K / 32]` | `e8m0`                    | any strides, or shuffled: [`MxScaleView`](crate::MxScaleView)      |
/// | `y`         | `[M, N]`      | `f32`                     | unit stride on `N`, any row stride                                 |
/// | `workspace` | `[n]`         | `f32`                     | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace)      |
///
/// With [`Prequant::Yes`], `q(a)` is `a` quantized to mxfp4, as by [`dynamic_mxfp4_quant`](hk_quant::dynamic_mxfp4_quant) with
/// [`BlockScale::Even`](hk_core::quant::BlockScale::Even): up to 32 rows on the fly, in registers; more of them ahead of the
/// GEMM, into the workspace. With [`Prequant::No`] it is `a`. The workspace is for quantized activations alone.
///
/// Any `M` and `N`, and multiples of 32 as `K`; without columns of `K` the sums are zero. Rows of `a` and `w` on 16 bytes, and
/// a multiple of 16 bytes long, take the vectorized path, others a much slower scalar one.
///
/// Sums are `f32`, and so is `y`: nothing is rounded.
///
/// Split-K partial sums are added to `y` with atomics, in any order: calls can differ in their last bits. With one split and
/// [`Accumulate::Overwrite`] nothing is added, and the same call gives the same bits.
///
/// Outputs and `workspace` share no memory with each other or with an input. Returns when the work is queued; nothing is
/// launched without rows or columns.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) for a tensor that breaks the table, or a
/// workspace too short for the split-K of the options; [`Overlap`](hk_core::Error::Overlap) for shared memory;
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`Argument`](hk_core::Error::Argument) also for an activation,
/// which partial sums cannot have; [`Shape`](hk_core::Error::Shape) also if `K` is no multiple of 32, or for a workspace without room
/// for quantized activations, where rows of `a` do not begin on 16 bytes or the options ask for tiles of more than 32 rows or
/// batch invariance; [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
///
/// Source: OCP Microscaling Formats (MX) 1.0, MXFP4.
pub fn gemm_a16wfp4_atomic<'a, T: Half>(
    stream: &Stream,
    inputs: A16WFp4Inputs<'a, T>,
    prequant: Prequant,
    y: TensorViewMut<f32>,
    accumulate: Accumulate,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "gemm_a16wfp4_atomic";
    let A16WFp4Inputs { a, w, w_scale } = inputs;
    options.expect_no_activation(OP)?;
    a.dims::<2>(OP, "a")?;
    let gemm = Gemm::named(OP, a, w).scales(GemmScales::MxWeights { a: None, w: w_scale });
    gemm.options(options).workspace(workspace).prequant(prequant).run_atomic(stream, y, accumulate)
}
