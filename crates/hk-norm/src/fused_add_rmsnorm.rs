//! The safe function of `hip/fused_add_rmsnorm.h`.

use crate::FusedAddRmsNormOutputs;
use crate::kernels::fused_add_rmsnorm::Params;
use crate::kernels::rms::Scalars;
use crate::problem::{Problem, Weight};
use crate::rms::{FUSED_ADD_RMSNORM, RmsNormOptions};
use hk_core::{Float, Result, Stream, TensorView, check_aliases};

const OP: &str = "fused_add_rmsnorm";

/// Adds a residual and normalizes the sum over the last axis: `residual_out = round(x + residual_in)`,
/// `y = residual_out * rstd * (weight + weight_offset)`, `rstd = 1 / sqrt(mean(residual_out^2) + eps)`.
///
/// | arg                                     | shape        | dtype                | layout                            |
/// |-----------------------------------------|--------------|----------------------|-----------------------------------|
/// | `x`, `residual_in`, `y`, `residual_out` | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`; the other axes collapse to one row stride |
/// | `weight`                                | `[cols]`     | as `x`, or `f32`     | contiguous                        |
/// | `rstd`                                  | `[rows]`     | `f32`                | contiguous; optional              |
///
/// Rounding: arithmetic is `f32`. The sum is rounded to the type of `x` *before* it is normalized, so that `y` is bitwise
/// identical to adding, storing and calling [`rmsnorm`](crate::rmsnorm()). `y` is rounded once, to nearest even; values
/// out of range become infinite. [`RoundMode::ModelSensitive`](crate::RoundMode::ModelSensitive) rounds
/// `residual_out * rstd` too.
///
/// Determinism: batch-invariant. The bits of a row depend on the row, the weights and the options only.
///
/// Special values: a NaN in `residual_out` makes its row NaN. An infinity makes `rstd` 0, itself NaN and finite values 0.
/// A row of zeros is NaN if `eps` is 0.
///
/// Sizes: any number of rows and columns. The vectorized path (16-byte accesses) needs rows and weights that begin on
/// 16 bytes and are a multiple of 16 bytes long; the scalar path serves all others.
///
/// Aliasing: each of `y` and `residual_out` may be exactly `x` or exactly `residual_in`
/// ([`TensorViewMut::alias`](hk_core::TensorViewMut::alias)), but not both the same one. No other overlap.
///
/// Returns when the launch is queued. No rows: no launch.
///
/// # Errors
/// Nothing is written if there is one.
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align): a tensor
/// breaks the table. [`Empty`](hk_core::Error::Empty): no columns. [`Argument`](hk_core::Error::Argument): `eps` is
/// negative or not finite. [`Overlap`](hk_core::Error::Overlap): an output shares memory with another tensor.
/// [`TooLarge`](hk_core::Error::TooLarge): over 2^29 - 1 columns or 2^32 - 1 rows.
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
pub fn fused_add_rmsnorm<T: Float, W: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    residual_in: TensorView<T>,
    weight: TensorView<W>,
    outputs: FusedAddRmsNormOutputs<T>,
    options: RmsNormOptions,
) -> Result<()> {
    let FusedAddRmsNormOutputs { mut y, mut residual_out, mut rstd } = outputs;
    let mut problem = Problem::new(OP, &x)?;
    problem.per_column("weight", &weight)?;
    problem.eps(options.eps)?;
    problem.like_x("residual_in", &residual_in)?;
    problem.like_x("y", &y)?;
    problem.like_x("residual_out", &residual_out)?;
    problem.per_row("rstd", rstd.as_ref())?;
    check_aliases(
        OP,
        &[("x", Some(&x)), ("residual_in", Some(&residual_in)), ("weight", Some(&weight))],
        &[
            (("y", Some(&y)), &["x", "residual_in"]),
            (("residual_out", Some(&residual_out)), &["x", "residual_in"]),
            (("rstd", rstd.as_ref().map(|t| t as _)), &[]),
        ],
    )?;
    if problem.is_empty() {
        return Ok(());
    }

    let plan = problem.plan(stream, &FUSED_ADD_RMSNORM)?;
    let mut launch = stream.launch(OP);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        residual_in: launch.input("residual_in", &residual_in.flatten_rows(OP, "residual_in")?)?,
        weight: launch.input("weight", &weight)?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        residual_out: launch
            .output("residual_out", &mut residual_out.reborrow().flatten_rows(OP, "residual_out")?)?,
        rstd: launch.optional_output("rstd", rstd.as_mut())?,
        scalars: Scalars::new::<W>(&problem, plan.batch, options, true),
    };
    // SAFETY: the checks above make every row of the four matrices `cols` long and `rstd` as long as there are rows. The
    // kernel accesses no more than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}
