//! The safe functions of `hip/layernorm.h`.

use crate::kernels::layernorm::Params;
use crate::problem::{KernelTable, Problem, Weight};
use crate::{FusedAddLayerNormOutputs, LayerNormOutputs};
use hk_core::plan::rows::RowVariant;
use hk_core::{DType, Float, Operand, Result, Stream, TensorView, TensorViewMut, check_aliases};
use std::fmt;

/// The entry points, in the order of `LAYERNORM_ENTRIES` in `hip/layernorm.h`.
static KERNELS: KernelTable<Params, 18> = KernelTable {
    variants: [
        RowVariant::vectorized(64, 8, 4, 8),
        RowVariant::vectorized(128, 16, 4, 8),
        RowVariant::vectorized(256, 16, 2, 8),
        RowVariant::vectorized(512, 16, 1, 8),
        RowVariant::vectorized(1024, 64, 2, 8),
        RowVariant::vectorized(1536, 64, 2, 8),
        RowVariant::vectorized(2048, 64, 1, 8),
        RowVariant::vectorized(4096, 128, 1, 8),
        RowVariant::vectorized(8192, 256, 1, 8),
        RowVariant::vectorized(16384, 512, 1, 8),
        RowVariant::vectorized(usize::MAX, 512, 1, 16),
        RowVariant::scalar(64, 8),
        RowVariant::scalar(512, 16),
        RowVariant::scalar(2048, 64),
        RowVariant::scalar(4096, 128),
        RowVariant::scalar(8192, 256),
        RowVariant::scalar(16384, 512),
        RowVariant::scalar(usize::MAX, 512),
    ],
    kernels: hk_core::row_kernels!(
        Params,
        "layernorm",
        ["bf16", "f16", "f32"],
        [
            "64",
            "128",
            "256",
            "512",
            "1024",
            "1536",
            "2048",
            "4096",
            "8192",
            "16384",
            "long",
            "64_scalar",
            "512_scalar",
            "2048_scalar",
            "4096_scalar",
            "8192_scalar",
            "16384_scalar",
            "long_scalar"
        ]
    ),
};

/// Options of the layer norms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNormOptions {
    /// Added to the variance under the root. Finite, not negative. Default: 1e-5.
    pub eps: f32,
}

impl Default for LayerNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5 }
    }
}

/// The weights of a layer norm, each `[cols]`, contiguous, and optional.
#[derive(Clone, Copy)]
pub struct LayerNormWeights<'a, T, W = T, B = W> {
    /// Scales the normalized values. `None`: 1.
    pub weight: Option<TensorView<'a, W>>,
    /// Added last. `None`: 0.
    pub bias: Option<TensorView<'a, B>>,
    /// Added to `x` first, the sum rounded to the type of `x`: the bias of the preceding linear layer. `None`: 0.
    pub x_bias: Option<TensorView<'a, T>>,
}

impl<T, W, B> Default for LayerNormWeights<'_, T, W, B> {
    fn default() -> Self {
        Self { weight: None, bias: None, x_bias: None }
    }
}

impl<T: Float, W: Weight<T>, B: Weight<T>> fmt::Debug for LayerNormWeights<'_, T, W, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { weight, bias, x_bias } = self;
        f.debug_struct("LayerNormWeights")
            .field("weight", weight)
            .field("bias", bias)
            .field("x_bias", x_bias)
            .finish()
    }
}

/// Layer normalization over the last axis: `y = (x' - mean) * rstd * weight + bias` with `x' = round(x + x_bias)`,
/// `mean = mean(x')`, `rstd = 1 / sqrt(mean((x' - mean)^2) + eps)`.
///
/// | arg              | shape        | dtype                | layout                                                           |
/// |------------------|--------------|----------------------|------------------------------------------------------------------|
/// | `x`, `y`         | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`; the other axes collapse to one row stride |
/// | `weight`, `bias` | `[cols]`     | as `x`, or `f32`     | contiguous; optional: 1, 0                                       |
/// | `x_bias`         | `[cols]`     | as `x`               | contiguous; optional: `x' = x`                                   |
/// | `mean`, `rstd`   | `[rows]`     | `f32`                | contiguous; optional                                             |
///
/// Rounding: arithmetic is `f32`. `y` is rounded once, to nearest even; values out of range become infinite. The variance
/// is the mean square of the deviations, never `E[x^2] - mean^2`, and the deviations correct the mean: rows far from zero
/// keep their digits, and a constant row is exactly its bias.
///
/// Determinism: batch-invariant. The bits of a row depend on the row, the weights and `eps` only, not on the other rows,
/// strides or alignment.
///
/// Special values: a NaN or an infinity makes its row, its `mean` and its `rstd` NaN. A constant row is NaN if `eps` is
/// 0. Squares of deviations overflow above about `1.8e19 / sqrt(cols)`, and the row is its bias then.
///
/// Sizes: any number of rows and columns. The vectorized path (16-byte accesses) needs rows and weights that begin on
/// 16 bytes and are a multiple of 16 bytes long; the scalar path serves all others.
///
/// Aliasing: `y` may be exactly `x` ([`TensorViewMut::alias`]). No other overlap.
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
/// Source: Ba, Kiros and Hinton 2016, "Layer Normalization", eq. 3.
pub fn layernorm<'a, T: Float, W: Weight<T>, B: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    weights: LayerNormWeights<T, W, B>,
    outputs: impl Into<LayerNormOutputs<'a, T>>,
    options: LayerNormOptions,
) -> Result<()> {
    launch(stream, "layernorm", x, None, weights, outputs.into(), options)
}

/// Adds a residual and normalizes the sum over the last axis: `residual_out = round(round(x + x_bias) + residual_in)`,
/// `y = (s - mean) * rstd * weight + bias` with `s = residual_out`, `mean = mean(s)`,
/// `rstd = 1 / sqrt(mean((s - mean)^2) + eps)`.
///
/// | arg                                     | shape        | dtype                | layout                            |
/// |-----------------------------------------|--------------|----------------------|-----------------------------------|
/// | `x`, `residual_in`, `y`, `residual_out` | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`; the other axes collapse to one row stride |
/// | `weight`, `bias`                        | `[cols]`     | as `x`, or `f32`     | contiguous; optional: 1, 0        |
/// | `x_bias`                                | `[cols]`     | as `x`               | contiguous; optional: 0           |
/// | `mean`, `rstd`                          | `[rows]`     | `f32`                | contiguous; optional              |
///
/// Rounding: arithmetic is `f32`. The sum is rounded to the type of `x` *before* it is normalized, so that `y` is bitwise
/// identical to adding, storing and calling [`layernorm`]. `y` is rounded once, to nearest even; values out of range
/// become infinite. The variance is the mean square of the deviations, and the deviations correct the mean.
///
/// Determinism: batch-invariant. The bits of a row depend on the row, the weights and `eps` only.
///
/// Special values: a NaN or an infinity in `residual_out` makes its row of `y`, its `mean` and its `rstd` NaN. A constant
/// row is NaN if `eps` is 0.
///
/// Sizes: any number of rows and columns. The vectorized path (16-byte accesses) needs rows and weights that begin on
/// 16 bytes and are a multiple of 16 bytes long; the scalar path serves all others.
///
/// Aliasing: each of `y` and `residual_out` may be exactly `x` or exactly `residual_in` ([`TensorViewMut::alias`]), but
/// not both the same one. No other overlap.
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
/// Source: Ba, Kiros and Hinton 2016, "Layer Normalization", eq. 3.
pub fn fused_add_layernorm<T: Float, W: Weight<T>, B: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    residual_in: TensorView<T>,
    weights: LayerNormWeights<T, W, B>,
    outputs: FusedAddLayerNormOutputs<T>,
    options: LayerNormOptions,
) -> Result<()> {
    let FusedAddLayerNormOutputs { y, residual_out, mean, rstd } = outputs;
    let residual = Some((residual_in, residual_out));
    let outputs = LayerNormOutputs { y, mean, rstd };
    launch(stream, "fused_add_layernorm", x, residual, weights, outputs, options)
}

/// `residual` is `(residual_in, residual_out)`.
fn launch<T: Float, W: Weight<T>, B: Weight<T>>(
    stream: &Stream,
    op: &'static str,
    x: TensorView<T>,
    residual: Option<(TensorView<T>, TensorViewMut<T>)>,
    weights: LayerNormWeights<T, W, B>,
    outputs: LayerNormOutputs<T>,
    LayerNormOptions { eps }: LayerNormOptions,
) -> Result<()> {
    let (residual_in, mut residual_out) = residual.unzip();
    let LayerNormOutputs { mut y, mut mean, mut rstd } = outputs;
    let LayerNormWeights { weight, bias, x_bias } = weights;
    let mut problem = Problem::new(op, &x)?;
    weight.as_ref().map_or(Ok(()), |v| problem.per_column("weight", v))?;
    bias.as_ref().map_or(Ok(()), |v| problem.per_column("bias", v))?;
    x_bias.as_ref().map_or(Ok(()), |v| problem.per_column("x_bias", v))?;
    problem.eps(eps)?;
    residual_in.as_ref().map_or(Ok(()), |t| problem.like_x("residual_in", t))?;
    problem.like_x("y", &y)?;
    residual_out.as_ref().map_or(Ok(()), |t| problem.like_x("residual_out", t))?;
    problem.per_row("mean", mean.as_ref())?;
    problem.per_row("rstd", rstd.as_ref())?;
    check_aliases(
        op,
        &[
            ("x", Some(&x)),
            ("residual_in", residual_in.as_ref().map(operand)),
            ("weight", weight.as_ref().map(operand)),
            ("bias", bias.as_ref().map(operand)),
            ("x_bias", x_bias.as_ref().map(operand)),
        ],
        &[
            (("y", Some(&y)), &["x", "residual_in"]),
            (("residual_out", residual_out.as_ref().map(operand)), &["x", "residual_in"]),
            (("mean", mean.as_ref().map(operand)), &[]),
            (("rstd", rstd.as_ref().map(operand)), &[]),
        ],
    )?;
    if problem.is_empty() {
        return Ok(());
    }

    let plan = problem.plan(stream, &KERNELS)?;
    let mut launch = stream.launch(op);
    let residual_in = residual_in.map(|t| t.flatten_rows(op, "residual_in")).transpose()?;
    let mut residual_out =
        residual_out.as_mut().map(|t| t.reborrow().flatten_rows(op, "residual_out")).transpose()?;
    let params = Params {
        x: launch.input("x", &x.flatten_rows(op, "x")?)?,
        x_bias: launch.optional_input("x_bias", x_bias.as_ref())?,
        residual_in: launch.optional_input("residual_in", residual_in.as_ref())?,
        weight: launch.optional_input("weight", weight.as_ref())?,
        bias: launch.optional_input("bias", bias.as_ref())?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(op, "y")?)?,
        residual_out: launch.optional_output("residual_out", residual_out.as_mut())?,
        mean: launch.optional_output("mean", mean.as_mut())?,
        rstd: launch.optional_output("rstd", rstd.as_mut())?,
        eps,
        cols: problem.cols() as f32,
        inv_cols: problem.inv_cols(),
        weight_is_f32: (W::DTYPE == DType::F32).into(),
        bias_is_f32: (B::DTYPE == DType::F32).into(),
        batch: plan.batch,
    };
    // SAFETY: the checks above make rows and weights `cols` long, and `mean` and `rstd` as long as there are rows. The kernel
    // accesses no more than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}

fn operand(tensor: &impl Operand) -> &dyn Operand {
    tensor
}
