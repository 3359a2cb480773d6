//! `rmsnorm` and `fused_add_rmsnorm` into wider rows: the same kernels with another output.

use crate::problem::{Problem, Weight};
use crate::rms::{FUSED_ADD_RMSNORM, FusedAddParams, Params, RMSNORM, RmsNormOptions, Scalars};
use hk_core::{Error, Float, GlobalLayout, Result, Stream, TensorView, TensorViewMut, check_aliases};

/// The columns of the padded output: `cols`, or if `pad_multiple` is not 0 the next multiple of it.
///
/// # Errors
/// [`Argument`](Error::Argument) if that is no `usize`.
pub fn padded_columns(cols: usize, pad_multiple: usize) -> Result<usize> {
    if pad_multiple == 0 {
        return Ok(cols);
    }
    cols.checked_next_multiple_of(pad_multiple).ok_or_else(|| {
        let want = format!("a multiple within usize from {cols} on");
        Error::argument("padded_columns", "pad_multiple", pad_multiple, want)
    })
}

/// [`rmsnorm`](crate::rmsnorm()) with its rows padded by zeros: `y[.., ..cols] = x * rstd * weight`, `y[.., cols..] = 0`,
/// with `rstd = 1 / sqrt(mean(x^2) + eps)`, the mean over the `cols` columns of `x`.
///
/// | arg      | shape            | dtype                | layout                              |
/// |----------|------------------|----------------------|-------------------------------------|
/// | `x`      | `[rows, cols]`   | `bf16`, `f16`, `f32` | any strides, but none of 0 on `cols` |
/// | `weight` | `[cols]`         | as `x`, or `f32`     | contiguous                          |
/// | `y`      | `[rows, padded]` | as `x`               | unit stride on `padded`             |
///
/// `padded` is [`padded_columns`]`(cols, pad_multiple)`. The first `cols` columns have the bits of
/// [`rmsnorm`](crate::rmsnorm()), the others are +0 whatever the row holds. Columns of `x` that do not follow each other are
/// read one by one, each from a line of its own: a transposed `x` is served, not fast. `y` must not share memory with `x`.
///
/// Returns when the launch is queued, before it has run. No rows: nothing is launched.
///
/// # Errors
/// As [`rmsnorm`](crate::rmsnorm()), and [`Argument`](Error::Argument) if `padded` is no `usize`.
pub fn rmsnorm_pad<T: Float, W: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    weight: TensorView<W>,
    mut y: TensorViewMut<T>,
    eps: f32,
    pad_multiple: usize,
) -> Result<()> {
    const OP: &str = "rmsnorm_pad";
    let mut problem = Problem::strided(OP, &x)?;
    problem.per_column("weight", &weight)?;
    problem.eps(eps)?;
    padded_y(OP, &mut problem, &x, &y, pad_multiple)?;
    check_aliases(OP, &[("x", Some(&x)), ("weight", Some(&weight))], &[(("y", Some(&y)), &[])])?;
    if problem.is_empty() {
        return Ok(());
    }

    let plan = problem.plan(stream, &RMSNORM)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let params = Params {
        x: launch.input("x", &flattened(x))?,
        weight: launch.input("weight", &weight)?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        rstd: GlobalLayout::ABSENT,
        scalars: Scalars::new::<W>(&problem, &plan, options(eps), false),
    };
    // SAFETY: the checks above make every row of x `cols` long and every row of y at least that, which is what the kernel
    // accesses, whatever the grid; the loader matches `Params` to the kernel.
    unsafe { launch.run(plan.config, &params) }
}

/// Adds a residual, normalises the sum and pads its rows by zeros: `s = x + residual_in`, `residual_out = round(s)`,
/// `y[.., ..cols] = s * rstd * weight`, `y[.., cols..] = 0`, with `rstd = 1 / sqrt(mean(s^2) + eps)`.
///
/// | arg                           | shape            | dtype                | layout                               |
/// |-------------------------------|------------------|----------------------|--------------------------------------|
/// | `x`                           | `[rows, cols]`   | `bf16`, `f16`, `f32` | any strides, but none of 0 on `cols` |
/// | `residual_in`, `residual_out` | `[rows, cols]`   | as `x`               | unit stride on `cols`                |
/// | `weight`                      | `[cols]`         | as `x`, or `f32`     | contiguous                           |
/// | `y`                           | `[rows, padded]` | as `x`               | unit stride on `padded`              |
///
/// Other than in [`fused_add_rmsnorm`](crate::fused_add_rmsnorm()) the norm is that of the *unrounded* sum: it is nearer to
/// the true one, and has not the bits of adding, storing and normalising. `residual_out` may be exactly `x` or exactly
/// `residual_in`; `y` must not share memory with any other. For the rest see [`rmsnorm_pad`].
///
/// # Errors
/// As [`rmsnorm_pad`].
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_add_rmsnorm_pad<T: Float, W: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    residual_in: TensorView<T>,
    weight: TensorView<W>,
    mut y: TensorViewMut<T>,
    mut residual_out: TensorViewMut<T>,
    eps: f32,
    pad_multiple: usize,
) -> Result<()> {
    const OP: &str = "fused_add_rmsnorm_pad";
    let mut problem = Problem::strided(OP, &x)?;
    problem.per_column("weight", &weight)?;
    problem.eps(eps)?;
    problem.like_x("residual_in", &residual_in)?;
    problem.like_x("residual_out", &residual_out)?;
    padded_y(OP, &mut problem, &x, &y, pad_multiple)?;
    check_aliases(
        OP,
        &[("x", Some(&x)), ("residual_in", Some(&residual_in)), ("weight", Some(&weight))],
        &[(("y", Some(&y)), &[]), (("residual_out", Some(&residual_out)), &["x", "residual_in"])],
    )?;
    if problem.is_empty() {
        return Ok(());
    }

    let plan = problem.plan(stream, &FUSED_ADD_RMSNORM)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let params = FusedAddParams {
        x: launch.input("x", &flattened(x))?,
        residual_in: launch.input("residual_in", &residual_in.flatten_rows(OP, "residual_in")?)?,
        weight: launch.input("weight", &weight)?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        residual_out: launch
            .output("residual_out", &mut residual_out.reborrow().flatten_rows(OP, "residual_out")?)?,
        rstd: GlobalLayout::ABSENT,
        scalars: Scalars::new::<W>(&problem, &plan, options(eps), false),
    };
    // SAFETY: the checks above make every row of the three matrices `cols` long and every row of y at least that, which is
    // what the kernel accesses, whatever the grid; the loader matches `Params` to the kernel.
    unsafe { launch.run(plan.config, &params) }
}

fn options(eps: f32) -> RmsNormOptions {
    RmsNormOptions { eps, ..Default::default() }
}

/// With the row stride that kernels expect of a single row, unless its columns are apart.
fn flattened<T: Float>(x: TensorView<T>) -> TensorView<T> {
    x.flatten_rows("", "x").unwrap_or(x)
}

/// Checks the padded output.
fn padded_y<T: Float>(
    op: &'static str,
    problem: &mut Problem,
    x: &TensorView<T>,
    y: &TensorViewMut<T>,
    pad_multiple: usize,
) -> Result<()> {
    let [rows, cols] = x.dims(op, "x")?;
    let padded = padded_columns(cols, pad_multiple).map_err(|_| {
        let want = format!("a multiple within usize from {cols} on");
        Error::argument(op, "pad_multiple", pad_multiple, want)
    })?;
    let why = format!("rows of x, its columns padded to a multiple of {pad_multiple}");
    problem.shaped("y", y, &[rows, padded], &why)
}
