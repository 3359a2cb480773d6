//! `fused_gemm_a8w8_blockscale_mul_add`: GEMM of int8 or fp8 with block scales, and a multiply-add.

use crate::element::Int8OrFp8;
use crate::gemm::desc::{Destination, Fusions, GemmDesc, GroupScales, arg};
use crate::gemm::{Addend, BlockShape, FuseType, GemmOptions, GemmWeight};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut};

/// Operands of a fused GEMM with a scale for each block.
#[derive(Debug, Clone, Copy)]
pub struct FusedBlockInputs<'a, T: Int8OrFp8> {
    /// Activations.
    pub x: TensorView<'a, T>,
    /// Weights.
    pub w: GemmWeight<'a, T>,
    /// Scales of the groups of each row of `x`.
    pub x_scale: TensorView<'a, f32>,
    /// Scales of the blocks of `w`.
    pub w_scale: TensorView<'a, f32>,
    /// Rows of `w` and columns that share a scale.
    pub group: BlockShape,
}

impl<'a, T: Int8OrFp8> FusedBlockInputs<'a, T> {
    pub(crate) fn desc(self, op: &'static str, options: GemmOptions) -> Result<GemmDesc<'a, T, T>> {
        let Self { x, w, x_scale, w_scale, group } = self;
        x.dims::<2>(op, "x")?;
        let (a, w_scale) = (Some(arg("x_scale", x_scale)), arg("w_scale", w_scale));
        let group_scales = GroupScales::Block { a, w: w_scale, shape: group };
        Ok(GemmDesc { a: arg("x", x), group_scales, ..GemmDesc::new(op, x, w).options(options) })
    }
}

/// The terms of a fused multiply-add: [`FuseType`] says how they meet the result of the GEMM.
#[derive(Debug, Clone, Copy)]
pub struct MulAdd<'a> {
    /// `[M, N]`, or one number.
    pub a: Addend<'a>,
    /// `[M, N]`, or one number.
    pub b: Addend<'a>,
    /// Their place.
    pub fuse: FuseType,
}

/// GEMM of int8 or fp8 with block scales, fused with a multiply-add: `g` is `activation(sum_g x_scale[m, g] w_scale[n /
/// group.n, g] sum_{k in g} x[m, k] w[n, k])`, and `y = a * g + b` ([`FuseType::ScaleAdd`]) or `y = a * b + g`
/// ([`FuseType::AddProduct`]).
///
/// | arg         | shape                        | dtype                | layout                                                        |
/// |-------------|------------------------------|----------------------|---------------------------------------------------------------|
/// | `x`         | `[M, K]`                     | [`Int8OrFp8`]        | unit stride on `K`, any row stride                            |
/// | `w`         | `[N, K]`                     | as `x`               | likewise, or [`GemmWeight::Shuffled`]                         |
/// | `x_scale`   | `[M, groups of K]`           | `f32`                | any strides                                                   |
/// | `w_scale`   | `[groups of N, groups of K]` | `f32`                | any strides                                                   |
/// | `a`, `b`    | `[M, N]`, `[1]`              | `bf16`, `f16`, `f32` | unit stride on `N`; or a number: [`Addend`]                   |
/// | `y`         | `[M, N]`                     | `bf16`, `f16`, `f32` | unit stride on `N`, any row stride                            |
/// | `workspace` | `[n]`                        | `f32`                | contiguous, 16-byte aligned; optional, see [`gemm_workspace`](crate::gemm_workspace) |
///
/// Any `M`, `N` and `K`; without columns of `K` the sums are zero. Rows of `x` and `w` on 16 bytes, and a multiple of 16 bytes
/// long, take the vectorized path, others a much slower scalar one.
///
/// Sums over 128 columns (of int8 in `i32`) are scaled into an `f32` sum; one rounding, to nearest even, to the type of `y`.
/// Groups of fewer than 128 columns are summed and scaled 64 columns, or a group, at a time, by 64 x 64 tiles; groups of fewer
/// than 16 columns take the scalar path. The last groups may be short. Transposed scales are a view with its axes exchanged
/// ([`TensorView::transpose`](hk_core::TensorView::transpose)). A NaN or an infinity stays in its row and column of `y`. The
/// multiply-add is part of the `f32` epilogue, before the one rounding.
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
pub fn fused_gemm_a8w8_blockscale_mul_add<'a, T: Int8OrFp8, Y: Float>(
    stream: &Stream,
    inputs: FusedBlockInputs<'a, T>,
    terms: MulAdd<'a>,
    y: TensorViewMut<Y>,
    workspace: Option<TensorViewMut<f32>>,
    options: GemmOptions,
) -> Result<()> {
    const OP: &str = "fused_gemm_a8w8_blockscale_mul_add";
    let MulAdd { a, b, fuse } = terms;
    let fusions = Fusions { mul_add: Some((fuse, a, b)), ..Fusions::default() };
    GemmDesc { fusions, ..inputs.desc(OP, options)? }.run(stream, Destination::Store(y), workspace)
}
