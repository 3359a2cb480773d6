//! The safe function of `hip/rmsnorm.h`.

use crate::RmsNormOutputs;
use crate::kernels::rms::Scalars;
use crate::kernels::rmsnorm::Params;
use crate::problem::{Problem, Weight};
use crate::rms::{RMSNORM, RmsNormOptions};
use hk_core::{Float, Result, Stream, TensorView, check_aliases};

const OP: &str = "rmsnorm";

/// RMS normalization over the last axis: `y = x * rstd * (weight + weight_offset)`, `rstd = 1 / sqrt(mean(x^2) + eps)`.
///
/// | arg      | shape       | dtype                | layout                                                           |
/// |----------|-------------|----------------------|------------------------------------------------------------------|
/// | `x`, `y` | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`; the other axes collapse to one row stride |
/// | `weight` | `[cols]`    | as `x`, or `f32`     | contiguous                                                       |
/// | `rstd`   | `[rows]`    | `f32`                | contiguous; optional                                             |
///
/// Rounding: arithmetic is `f32`. `y` is rounded once, to nearest even; values out of range become infinite.
/// [`RoundMode::ModelSensitive`](crate::RoundMode::ModelSensitive) rounds `x * rstd` too.
///
/// Determinism: batch-invariant. The bits of a row depend on the row, the weights and the options only, not on the other
/// rows, strides or alignment.
///
/// Special values: a NaN makes its row NaN. An infinity makes `rstd` 0, itself NaN and finite values 0. The sum of
/// squares overflows for values above about `1.8e19 / sqrt(cols)`. A row of zeros is NaN if `eps` is 0.
///
/// Sizes: any number of rows and columns. The vectorized path (16-byte accesses) needs rows and weights that begin on
/// 16 bytes and are a multiple of 16 bytes long; the scalar path serves all others.
///
/// Aliasing: `y` may be exactly `x` ([`TensorViewMut::alias`](hk_core::TensorViewMut::alias)). No other overlap.
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
pub fn rmsnorm<'a, T: Float, W: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    weight: TensorView<W>,
    outputs: impl Into<RmsNormOutputs<'a, T>>,
    options: RmsNormOptions,
) -> Result<()> {
    let RmsNormOutputs { mut y, mut rstd } = outputs.into();
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
    let mut launch = stream.launch(OP);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        weight: launch.input("weight", &weight)?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        rstd: launch.optional_output("rstd", rstd.as_mut())?,
        scalars: Scalars::new::<W>(&problem, plan.batch, options, false),
    };
    // SAFETY: the checks above make every row of x and y `cols` long and `rstd` as long as there are rows. The kernel
    // accesses no more than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}
