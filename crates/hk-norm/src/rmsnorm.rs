//! The safe function of `hip/rmsnorm.hip`.

use crate::problem::{Problem, Weight};
use crate::rms::{Params, RMSNORM, RmsNormOptions, Scalars};
use hk_core::{Float, Result, Stream, TensorView, TensorViewMut, check_aliases};

const OP: &str = "rmsnorm";

/// RMS normalisation over the last axis:
/// `y = x * rstd * (weight + weight_offset)` with `rstd = 1 / sqrt(mean(x^2) + eps)`.
///
/// | arg      | shape          | dtype                | layout                                                  |
/// |----------|----------------|----------------------|---------------------------------------------------------|
/// | `x`, `y` | `[.., cols]`   | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride each over the rest |
/// | `weight` | `[cols]`       | as `x`, or `f32`     | contiguous                                              |
/// | `rstd`   | `[rows]`       | `f32`                | contiguous; may be left out                             |
///
/// Any number of rows and columns, and any row strides; 16 bytes are moved at a time where all rows and the weights
/// begin on a multiple of 16 bytes and are a multiple of 16 bytes long. `y` may be exactly `x`
/// ([`TensorViewMut::alias`]).
///
/// Arithmetic is `f32`, with one rounding to the type of `y`, to nearest even, beyond its range to infinity;
/// [`RoundMode::ModelSensitive`](crate::RoundMode::ModelSensitive) rounds `x * rstd` as well. The bits of a row depend on
/// that row, the weights and the options alone: not on the other rows, its place, strides or alignment. A NaN makes its
/// row NaN; with an infinity, `rstd` is 0, infinities become NaN and finite values 0. The sum of squares overflows to
/// infinity from values of about `1.8e19 / sqrt(cols)`, and a row of zeros is NaN if `eps` is 0.
///
/// Returns when the launch is queued, before it has run. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for zero columns, [`Argument`](hk_core::Error::Argument) for an
/// `eps` that is negative or not finite, [`Overlap`](hk_core::Error::Overlap) if an output shares memory with another
/// tensor otherwise than said, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and launching a kernel can answer. Nothing is
/// written then.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
pub fn rmsnorm<T: Float, W: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    weight: TensorView<W>,
    mut y: TensorViewMut<T>,
    mut rstd: Option<TensorViewMut<f32>>,
    options: RmsNormOptions,
) -> Result<()> {
    let mut problem = Problem::new(OP, &x)?;
    problem.per_column("weight", &weight)?;
    problem.eps(options.eps)?;
    problem.like_x("y", &y)?;
    problem.per_row("rstd", rstd.as_ref())?;
    check_aliases(
        OP,
        &[("x", Some(&x)), ("weight", Some(&weight))],
        &[(("y", Some(&y)), &["x"]), (("rstd", rstd.as_ref().map(|t| t as _)), &[])],
    )?;
    if problem.is_empty() {
        return Ok(());
    }

    let plan = problem.plan(stream, &RMSNORM)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        weight: launch.input("weight", &weight)?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        rstd: launch.optional_output("rstd", rstd.as_mut())?,
        scalars: Scalars::new::<W>(&problem, &plan, options, false),
    };
    // SAFETY: the checks above make every row of x and y `cols` long and `rstd` as long as there are rows, which is what
    // the kernel accesses, whatever the grid; the loader matches `Params` to the kernel.
    unsafe { launch.run(plan.config, &params) }
}
