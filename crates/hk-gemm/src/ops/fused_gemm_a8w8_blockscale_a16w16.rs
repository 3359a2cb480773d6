//! `fused_gemm_a8w8_blockscale_a16w16`: GEMM of fp8 with block scales, and one of 16-bit floats, in one launch.

use crate::element::{Half, Int8OrFp8};
use crate::gemm::desc::{GemmDesc, GroupScales, arg};
use crate::gemm::table::Variant;
use crate::gemm::two::run_two;
use crate::gemm::{BlockShape, FloatView, GemmOptions, GemmWeight};
use hk_core::{Element, Float, Result, Stream, TensorView, TensorViewMut};

/// Operands of a GEMM of fp8 with block scales, and of one of 16-bit floats.
#[derive(Debug, Clone, Copy)]
pub struct DualFp8Inputs<'a, T: Int8OrFp8, H: Half> {
    /// Activations of the first GEMM.
    pub x_fp8: TensorView<'a, T>,
    /// Weights of the first GEMM.
    pub w_fp8: GemmWeight<'a, T>,
    /// Scales of the groups of each row of `x_fp8`.
    pub x_scale: TensorView<'a, f32>,
    /// Scales of the blocks of `w_fp8`.
    pub w_scale: TensorView<'a, f32>,
    /// Rows of `w_fp8` and columns that share a scale.
    pub group: BlockShape,
    /// Activations of the second GEMM, in `bf16` or `f16`.
    pub x_bf16: TensorView<'a, H>,
    /// Weights of the second GEMM.
    pub w_bf16: GemmWeight<'a, H>,
    /// Bias of the first GEMM.
    pub bias1: Option<FloatView<'a>>,
    /// Bias of the second GEMM.
    pub bias2: Option<FloatView<'a>>,
}

/// The outputs of two GEMMs.
#[derive(Debug)]
pub struct DualOutputs<'t, Y1: Element, Y2: Element> {
    /// `[M, N1]`: of the quantized operands.
    pub y1: TensorViewMut<'t, Y1>,
    /// `[M, N2]`: of the 16-bit floats.
    pub y2: TensorViewMut<'t, Y2>,
}

/// Two GEMMs with the same `M` and `K` in one launch: `y1[m, n] = sum_g x_scale[m, g] w_scale[n / group.n, g] sum_{k in g}
/// x_fp8[m, k] w_fp8[n, k] + bias1[n]`, and `y2[m, n] = sum_k x_bf16[m, k] w_bf16[n, k] + bias2[n]`.
///
/// | arg              | shape                         | dtype                | layout                                                        |
/// |------------------|-------------------------------|----------------------|---------------------------------------------------------------|
/// | `x_fp8`          | `[M, K]`                      | [`Int8OrFp8`], fp8   | unit stride on `K`, any row stride                            |
/// | `w_fp8`          | `[N1, K]`                     | as `x_fp8`           | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `x_scale`        | `[M, groups of K]`            | `f32`                | any strides                                                   |
/// | `w_scale`        | `[groups of N1, groups of K]` | `f32`                | any strides                                                   |
/// | `x_bf16`         | `[M, K]`                      | `bf16`, `f16`        | unit stride on `K`, any row stride                            |
/// | `w_bf16`         | `[N2, K]`                     | as `x_bf16`          | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `bias1`, `bias2` | `[N1]`, `[N2]`                | `bf16`, `f16`, `f32` | contiguous; optional                                          |
/// | `y1`, `y2`       | `[M, N1]`, `[M, N2]`          | `bf16`, `f16`, `f32` | unit stride on the last axis, any row stride                  |
/// | `workspace`      | `[n]`                         | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Neither GEMM depends on the other: it is an expert's up-projection with the router, of activations that are there in both
/// types. The options are of both: the tile is that of the first (beside [`T256x128`](crate::GemmTile::T256x128) the second has
/// [`T256x256`](crate::GemmTile::T256x256)), `splits` splits K of both, and with `skip_reduce` `y1` and `y2` are `f32` with the
/// same number of slices as their first axis. Both take the scalar path if the rows of one do not begin on 16 bytes. Each
/// output is bitwise identical to that of its GEMM by itself with the same configuration.
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
/// [`Argument`](hk_core::Error::Argument) for options that do not fit the tensors; [`Argument`](hk_core::Error::Argument) also for an activation;
/// [`Argument`](hk_core::Error::Argument) also for a `group.n` or `group.k` that is no power of two; [`TooLarge`](hk_core::Error::TooLarge) for
/// more than some 2^25 groups of fewer than 64 columns; [`Unsupported`](hk_core::Error::Unsupported) for int8, and the fp8 that the
/// device's matrix instructions do not take; [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 rows, columns or elements of `K`, or
/// 2^31 tiles; [`DeviceMismatch`](hk_core::Error::DeviceMismatch); and what loading and launching a kernel can answer. Nothing is
/// written then.
pub fn fused_gemm_a8w8_blockscale_a16w16<'a, T: Int8OrFp8, H: Half, Y1: Float, Y2: Float>(
    stream: &Stream,
    inputs: DualFp8Inputs<'a, T, H>,
    outputs: DualOutputs<Y1, Y2>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_a8w8_blockscale_a16w16";
    let DualFp8Inputs { x_fp8, w_fp8, x_scale, w_scale, group, x_bf16, w_bf16, bias1, bias2 } = inputs;
    x_fp8.dims::<2>(OP, "x_fp8")?;
    x_bf16.dims::<2>(OP, "x_bf16")?;
    group.check(OP)?;
    let mut first = GemmDesc::new(OP, x_fp8, w_fp8).options(options);
    (first.a.name, first.w.name, first.y) = ("x_fp8", "w_fp8", "y1");
    (first.variant, first.bias) = (Variant::Beside(H::DTYPE), bias1.map(|bias| arg("bias1", bias)));
    let (a, w) = (Some(arg("x_scale", x_scale)), arg("w_scale", w_scale));
    first.group_scales = GroupScales::Block { a, w, shape: group };
    let mut second = GemmDesc::new(OP, x_bf16, w_bf16).options(options);
    (second.a.name, second.w.name, second.y) = ("x_bf16", "w_bf16", "y2");
    second.bias = bias2.map(|bias| arg("bias2", bias));
    run_two(stream, first, second, outputs.y1, outputs.y2, workspace)
}
