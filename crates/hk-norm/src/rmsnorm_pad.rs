//! `rmsnorm` and `fused_add_rmsnorm` with padded output rows: the kernels of the unpadded operators.

use crate::FusedAddRmsNormPadOutputs;
use crate::kernels::rms::Scalars;
use crate::kernels::{fused_add_rmsnorm, rmsnorm};
use crate::problem::{Problem, Weight};
use crate::rms::{FUSED_ADD_RMSNORM, RMSNORM, RmsNormOptions};
use hk_core::{Error, Float, GlobalLayout, Result, Stream, TensorView, TensorViewMut, check_aliases};

/// Options of the padded RMS norms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormPadOptions {
    /// Added to the mean square under the root. Finite, not negative. Default: 1e-6.
    pub eps: f32,
    /// The columns of `y` are a multiple of this. Default: 0, no padding.
    pub pad_multiple: usize,
}

impl Default for RmsNormPadOptions {
    fn default() -> Self {
        Self { eps: 1e-6, pad_multiple: 0 }
    }
}

/// The columns of a padded output: the least multiple of `pad_multiple` that is not below `cols`; `cols` if
/// `pad_multiple` is 0.
///
/// # Errors
/// [`Argument`](Error::Argument) if the result exceeds `usize`.
pub fn padded_columns(cols: usize, pad_multiple: usize) -> Result<usize> {
    padded("padded_columns", cols, pad_multiple)
}

/// [`padded_columns`], with the operator that the error names.
pub(crate) fn padded(op: &'static str, cols: usize, pad_multiple: usize) -> Result<usize> {
    if pad_multiple == 0 {
        return Ok(cols);
    }
    cols.checked_next_multiple_of(pad_multiple).ok_or_else(|| {
        let want = format!("a multiple within usize from {cols} on");
        Error::argument(op, "pad_multiple", pad_multiple, want)
    })
}

/// RMS normalization with rows padded by zeros: `y[.., ..cols] = x * rstd * weight`, `y[.., cols..] = 0`,
/// `rstd = 1 / sqrt(mean(x^2) + eps)`, the mean over the `cols` columns of `x`.
///
/// | arg      | shape            | dtype                | layout                                |
/// |----------|------------------|----------------------|---------------------------------------|
/// | `x`      | `[rows, cols]`   | `bf16`, `f16`, `f32` | any strides, except 0 on `cols`       |
/// | `weight` | `[cols]`         | as `x`, or `f32`     | contiguous                            |
/// | `y`      | `[rows, padded]` | as `x`               | unit stride on `padded`               |
///
/// `padded` is [`padded_columns`]`(cols, options.pad_multiple)`.
///
/// Rounding: arithmetic is `f32`, `y` is rounded once, to nearest even. The first `cols` columns are bitwise identical to
/// [`rmsnorm`](crate::rmsnorm()); the padding is +0, whatever the row holds. Batch-invariant.
///
/// Sizes: any number of rows and columns. Where columns of `x` have no unit stride they are read one by one, uncoalesced: a
/// transposed `x` works but is slow.
///
/// Aliasing: none. `y` must not share memory with an input.
///
/// Returns when the launch is queued. No rows: no launch.
///
/// # Errors
/// Nothing is written if there is one.
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align): a tensor
/// breaks the table. [`Empty`](hk_core::Error::Empty): no columns. [`Argument`](hk_core::Error::Argument): `eps` is
/// negative or not finite, or the padded length exceeds `usize`. [`Overlap`](hk_core::Error::Overlap): an output shares memory with another tensor.
/// [`TooLarge`](hk_core::Error::TooLarge): over 2^29 - 1 columns or 2^32 - 1 rows.
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
pub fn rmsnorm_pad<T: Float, W: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    weight: TensorView<W>,
    mut y: TensorViewMut<T>,
    options: RmsNormPadOptions,
) -> Result<()> {
    const OP: &str = "rmsnorm_pad";
    let mut problem = Problem::strided(OP, &x)?;
    problem.per_column("weight", &weight)?;
    problem.eps(options.eps)?;
    padded_y(OP, &mut problem, &x, &y, options.pad_multiple)?;
    check_aliases(OP, &[("x", Some(&x)), ("weight", Some(&weight))], &[(("y", Some(&y)), &[])])?;
    if problem.is_empty() {
        return Ok(());
    }

    let plan = problem.plan(stream, &RMSNORM)?;
    let mut launch = stream.launch(OP);
    let params = rmsnorm::Params {
        x: launch.input("x", &flattened(x))?,
        weight: launch.input("weight", &weight)?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        rstd: GlobalLayout::ABSENT,
        scalars: Scalars::new::<W>(&problem, plan.batch, unpadded(options), false),
    };
    // SAFETY: the checks above make every row of x `cols` long and every row of y at least that. The kernel accesses no more
    // than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}

/// Adds a residual, normalizes the sum and pads its rows by zeros: `residual_out = round(s)` with `s = x + residual_in`,
/// `y[.., ..cols] = s * rstd * weight`, `y[.., cols..] = 0`, `rstd = 1 / sqrt(mean(s^2) + eps)`.
///
/// | arg                           | shape            | dtype                | layout                          |
/// |-------------------------------|------------------|----------------------|---------------------------------|
/// | `x`                           | `[rows, cols]`   | `bf16`, `f16`, `f32` | any strides, except 0 on `cols` |
/// | `residual_in`, `residual_out` | `[rows, cols]`   | as `x`               | unit stride on `cols`           |
/// | `weight`                      | `[cols]`         | as `x`, or `f32`     | contiguous                      |
/// | `y`                           | `[rows, padded]` | as `x`               | unit stride on `padded`         |
///
/// `padded` is [`padded_columns`]`(cols, options.pad_multiple)`.
///
/// Rounding: arithmetic is `f32`, `y` and `residual_out` are rounded once, to nearest even. Unlike
/// [`fused_add_rmsnorm`](crate::fused_add_rmsnorm()) it normalizes the *unrounded* sum, which is more accurate and not
/// bitwise identical to adding, storing and normalizing. The padding is +0. Batch-invariant.
///
/// Sizes: any number of rows and columns. Where columns of `x` have no unit stride they are read one by one, uncoalesced.
///
/// Aliasing: `residual_out` may be exactly `x` or exactly `residual_in` ([`TensorViewMut::alias`]). No other overlap.
///
/// Returns when the launch is queued. No rows: no launch.
///
/// # Errors
/// Nothing is written if there is one.
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align): a tensor
/// breaks the table. [`Empty`](hk_core::Error::Empty): no columns. [`Argument`](hk_core::Error::Argument): `eps` is
/// negative or not finite, or the padded length exceeds `usize`. [`Overlap`](hk_core::Error::Overlap): an output shares memory with another tensor.
/// [`TooLarge`](hk_core::Error::TooLarge): over 2^29 - 1 columns or 2^32 - 1 rows.
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
pub fn fused_add_rmsnorm_pad<T: Float, W: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    residual_in: TensorView<T>,
    weight: TensorView<W>,
    outputs: FusedAddRmsNormPadOutputs<T>,
    options: RmsNormPadOptions,
) -> Result<()> {
    const OP: &str = "fused_add_rmsnorm_pad";
    let FusedAddRmsNormPadOutputs { mut y, mut residual_out } = outputs;
    let mut problem = Problem::strided(OP, &x)?;
    problem.per_column("weight", &weight)?;
    problem.eps(options.eps)?;
    problem.like_x("residual_in", &residual_in)?;
    problem.like_x("residual_out", &residual_out)?;
    padded_y(OP, &mut problem, &x, &y, options.pad_multiple)?;
    check_aliases(
        OP,
        &[("x", Some(&x)), ("residual_in", Some(&residual_in)), ("weight", Some(&weight))],
        &[(("y", Some(&y)), &[]), (("residual_out", Some(&residual_out)), &["x", "residual_in"])],
    )?;
    if problem.is_empty() {
        return Ok(());
    }

    let plan = problem.plan(stream, &FUSED_ADD_RMSNORM)?;
    let mut launch = stream.launch(OP);
    let params = fused_add_rmsnorm::Params {
        x: launch.input("x", &flattened(x))?,
        residual_in: launch.input("residual_in", &residual_in.flatten_rows(OP, "residual_in")?)?,
        weight: launch.input("weight", &weight)?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        residual_out: launch
            .output("residual_out", &mut residual_out.reborrow().flatten_rows(OP, "residual_out")?)?,
        rstd: GlobalLayout::ABSENT,
        scalars: Scalars::new::<W>(&problem, plan.batch, unpadded(options), false),
    };
    // SAFETY: the checks above make every row of the three matrices `cols` long and every row of y at least that. The kernel
    // accesses no more than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}

/// The options of the unpadded operator.
fn unpadded(options: RmsNormPadOptions) -> RmsNormOptions {
    RmsNormOptions { eps: options.eps, ..Default::default() }
}

/// `x` with the row stride that kernels expect of a single row; as is if its columns have no unit stride.
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
    let padded = padded(op, cols, pad_multiple)?;
    let why = format!("rows of x, its columns padded to a multiple of {pad_multiple}");
    problem.shaped("y", y, &[rows, padded], &why)
}
