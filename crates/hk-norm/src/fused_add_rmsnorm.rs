//! The safe function of `hip/fused_add_rmsnorm.hip`.

use crate::problem::{Problem, Weight};
use crate::rms::{FUSED_ADD_RMSNORM, FusedAddParams, RmsNormOptions, Scalars};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut, check_aliases};

const OP: &str = "fused_add_rmsnorm";

/// Adds a residual and normalises the sum over the last axis: `s = round(x + residual_in)`, `residual_out = s`,
/// `y = rmsnorm(s)`.
///
/// | arg                                     | shape        | dtype                | layout                            |
/// |-----------------------------------------|--------------|----------------------|-----------------------------------|
/// | `x`, `residual_in`, `y`, `residual_out` | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride each over the rest |
/// | `weight`                                | `[cols]`     | as `x`, or `f32`     | contiguous                        |
/// | `rstd`                                  | `[rows]`     | `f32`                | contiguous; may be left out       |
///
/// The norm is that of the *rounded* sum, so that the result has the bits of adding, storing, and calling
/// [`rmsnorm`](crate::rmsnorm()); everything said there about sizes, strides, rounding, invariance and special values
/// holds here. Each of `y` and `residual_out` may be exactly `x` or exactly `residual_in`, but they may not share
/// memory with each other.
///
/// Returns when the launch is queued, before it has run. No rows: nothing is launched.
///
/// # Errors
/// As [`rmsnorm`](crate::rmsnorm()).
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_add_rmsnorm<T: Float, W: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    residual_in: TensorView<T>,
    weight: TensorView<W>,
    mut y: TensorViewMut<T>,
    mut residual_out: TensorViewMut<T>,
    mut rstd: Option<TensorViewMut<f32>>,
    options: RmsNormOptions,
) -> Result<()> {
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
    let mut launch = stream.launch(OP, &plan.kernel);
    let params = FusedAddParams {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        residual_in: launch.input("residual_in", &residual_in.flatten_rows(OP, "residual_in")?)?,
        weight: launch.input("weight", &weight)?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        residual_out: launch
            .output("residual_out", &mut residual_out.reborrow().flatten_rows(OP, "residual_out")?)?,
        rstd: launch.optional_output("rstd", rstd.as_mut())?,
        scalars: Scalars::new::<W>(&problem, &plan, options, true),
    };
    // SAFETY: the checks above make every row of the four matrices `cols` long and `rstd` as long as there are rows,
    // which is what the kernel accesses, whatever the grid; the loader matches `Params` to the kernel.
    unsafe { launch.run(plan.config, &params) }
}
