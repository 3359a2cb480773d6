//! `fused_gemm_afp4wfp4_a16w16`: GEMM of mxfp4, and one of 16-bit floats, in one launch.

use crate::element::Half;
use crate::gemm::desc::{GemmDesc, GroupScales, arg};
use crate::gemm::table::Variant;
use crate::gemm::two::run_two;
use crate::gemm::{FloatView, GemmOptions, GemmWeight, MxScaleView};
use crate::ops::fused_gemm_a8w8_blockscale_a16w16::DualOutputs;
use hk_core::{Float, Fp4x2, Result, Stream, TensorView, TensorViewMut};

/// Operands of a GEMM of mxfp4, and of one of 16-bit floats.
#[derive(Debug, Clone, Copy)]
pub struct DualFp4Inputs<'a, H: Half> {
    /// Activations of the first GEMM.
    pub x_fp4: TensorView<'a, Fp4x2>,
    /// Weights of the first GEMM.
    pub w_fp4: GemmWeight<'a, Fp4x2>,
    /// Scales of 32 columns of `x_fp4`.
    pub x_scale: MxScaleView<'a>,
    /// Scales of 32 columns of `w_fp4`.
    pub w_scale: MxScaleView<'a>,
    /// Activations of the second GEMM, in `bf16` or `f16`.
    pub x_bf16: TensorView<'a, H>,
    /// Weights of the second GEMM.
    pub w_bf16: GemmWeight<'a, H>,
    /// Bias of the first GEMM.
    pub bias1: Option<FloatView<'a>>,
    /// Bias of the second GEMM.
    pub bias2: Option<FloatView<'a>>,
}

/// Two GEMMs with the same `M` and `K` in one launch: `y1[m, n] = sum_k 2^(x_scale[m, k / 32] - 127) x_fp4[m, k] 2^(w_scale[n,
/// k / 32] - 127) w_fp4[n, k] + bias1[n]`, and `y2[m, n] = sum_k x_bf16[m, k] w_bf16[n, k] + bias2[n]`.
///
/// | arg              | shape                | dtype                | layout                                                        |
/// |------------------|----------------------|----------------------|---------------------------------------------------------------|
/// | `x_fp4`          | `[M, K / 2]`         | [`Fp4x2`]            | unit stride on `K`, any row stride                            |
/// | `w_fp4`          | `[N1, K / 2]`        | [`Fp4x2`]            | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `x_scale`        | `[M, K / 32]`        | `e8m0`               | any strides, or shuffled: [`MxScaleView`]                     |
/// | `w_scale`        | `[N1, K / 32]`       | `e8m0`               | likewise                                                      |
/// | `x_bf16`         | `[M, K]`             | `bf16`, `f16`        | unit stride on `K`, any row stride                            |
/// | `w_bf16`         | `[N2, K]`            | as `x_bf16`          | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `bias1`, `bias2` | `[N1]`, `[N2]`       | `bf16`, `f16`, `f32` | contiguous; optional                                          |
/// | `y1`, `y2`       | `[M, N1]`, `[M, N2]` | `bf16`, `f16`, `f32` | unit stride on the last axis, any row stride                  |
/// | `workspace`      | `[n]`                | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Neither GEMM depends on the other: it is an expert's up-projection with the router, of activations that are there in both
/// types. The options are of both: the tile is that of the first (beside [`T256x128`](crate::GemmTile::T256x128) the second has
/// [`T256x256`](crate::GemmTile::T256x256)), `splits` splits K of both, and with `skip_reduce` `y1` and `y2` are `f32` with the
/// same number of slices as their first axis. Both take the scalar path if the rows of one do not begin on 16 bytes. Each
/// output is bitwise identical to that of its GEMM by itself with the same configuration.
///
/// Values and scales are exact; sums are `f32`; one rounding, to nearest even, to the type of `y`. Targets without matrix
/// instructions for mxfp4 (gfx942) give the same but for the order of sums. A scale of 255 makes its block, and what it takes
/// part in, NaN. A NaN or an infinity stays in its row and column of `y`.
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
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`Argument`](hk_core::Error::Argument) also for an activation;
/// [`Shape`](hk_core::Error::Shape) also if `K` is no multiple of 32; [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or
/// elements of `K`, or 2^31 tiles; [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can
/// answer. Nothing is written then.
///
/// Source: OCP Microscaling Formats (MX) 1.0, MXFP4.
pub fn fused_gemm_afp4wfp4_a16w16<'a, H: Half, Y1: Float, Y2: Float>(
    stream: &Stream,
    inputs: DualFp4Inputs<'a, H>,
    outputs: DualOutputs<Y1, Y2>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_afp4wfp4_a16w16";
    let DualFp4Inputs { x_fp4, w_fp4, x_scale, w_scale, x_bf16, w_bf16, bias1, bias2 } = inputs;
    x_fp4.dims::<2>(OP, "x_fp4")?;
    x_bf16.dims::<2>(OP, "x_bf16")?;
    let mut first = GemmDesc::new(OP, x_fp4, w_fp4).options(options);
    (first.a.name, first.w.name, first.y) = ("x_fp4", "w_fp4", "y1");
    (first.variant, first.bias) = (Variant::Beside(H::DTYPE), bias1.map(|bias| arg("bias1", bias)));
    first.group_scales = GroupScales::Mx { a: Some(arg("x_scale", x_scale)), w: arg("w_scale", w_scale) };
    let mut second = GemmDesc::new(OP, x_bf16, w_bf16).options(options);
    (second.a.name, second.w.name, second.y) = ("x_bf16", "w_bf16", "y2");
    second.bias = bias2.map(|bias| arg("bias2", bias));
    run_two(stream, first, second, outputs.y1, outputs.y2, workspace)
}
