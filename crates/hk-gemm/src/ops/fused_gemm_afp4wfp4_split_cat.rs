//! `fused_gemm_afp4wfp4_split_cat`: GEMM of mxfp4 whose columns are split.

use crate::gemm::desc::{Destination, GemmDesc};
use crate::gemm::{FloatView, GemmOptions};
use crate::ops::fused_gemm_a8w8_blockscale_split_cat::SplitCatOutputs;
use crate::ops::fused_gemm_afp4wfp4_mul_add::FusedMxInputs;
use hk_core::{Float, Result, Stream, TensorViewMut};

/// GEMM of mxfp4 whose result, seen as `C` `[M, D, S1 + S2]`, is split into two tensors: `C = activation(sum_k 2^(x_scale[m, k
/// / 32] - 127) x[m, k] 2^(w_scale[n, k / 32] - 127) w[n, k])`, `c1[m, d] = [C[m, d, ..S1], y[m, d]]` and `c2[m, d] = C[m, d,
/// S1..]`. `w` has `N = D (S1 + S2)` rows. It is the up-projection of MLA, of keys and values in one, with the rotated part of
/// the keys.
///
/// | arg         | shape             | dtype                     | layout                                                             |
/// |-------------|-------------------|---------------------------|--------------------------------------------------------------------|
/// | `x`         | `[M, K / 2]`      | [`Fp4x2`](hk_core::Fp4x2) | unit stride on `K`, any row stride                                 |
/// | `w`         | `[N, K / 2]`      | [`Fp4x2`](hk_core::Fp4x2) | likewise, or [`GemmWeight::Shuffled`](crate::GemmWeight::Shuffled) |
/// | `x_scale`   | `[M, K / 32]`     | `e8m0`                    | any strides, or shuffled: [`MxScaleView`](crate::MxScaleView)      |
/// | `w_scale`   | `[N, K / 32]`     | `e8m0`                    | likewise                                                           |
/// | `y`         | `[M, D, S3]`      | `bf16`, `f16`, `f32`      | unit stride on `S3`, others free, also 0                           |
/// | `c1`        | `[M, D, S1 + S3]` | `bf16`, `f16`, `f32`      | unit stride on the last axis                                       |
/// | `c2`        | `[M, D, S2]`      | as `c1`                   | likewise                                                           |
/// | `workspace` | `[n]`             | `f32`                     | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace)      |
///
/// Any `M` and `N`, and multiples of 32 as `K`; without columns of `K` the sums are zero. Rows of `x` and `w` on 16 bytes, and
/// a multiple of 16 bytes long, take the vectorized path, others a much slower scalar one.
///
/// Values and scales are exact; sums are `f32`; one rounding, to nearest even, to the type of `y`. Targets without matrix
/// instructions for mxfp4 (gfx942) give the same but for the order of sums. A scale of 255 makes its block, and what it takes
/// part in, NaN. A NaN or an infinity stays in its row and column of `y`. `y` is rounded to the type of `c1`.
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
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`Shape`](hk_core::Error::Shape) also if `K` is no multiple of
/// 32; [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or 2^31 tiles;
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is written then.
///
/// Source: OCP Microscaling Formats (MX) 1.0, MXFP4.
pub fn fused_gemm_afp4wfp4_split_cat<'a, Y: Float>(
    stream: &Stream,
    inputs: FusedMxInputs<'a>,
    y: impl Into<FloatView<'a>>,
    outputs: SplitCatOutputs<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_afp4wfp4_split_cat";
    let SplitCatOutputs { c1, c2 } = outputs;
    let to = Destination::SplitCat { c1, c2, cat: y.into() };
    GemmDesc { y: "c1", ..inputs.desc(OP, options)? }.run(stream, to, workspace)
}
