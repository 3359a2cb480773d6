//! The safe functions of `hip/layernorm.hip`.

use crate::kernels;
use crate::problem::{KernelTable, Problem, Weight};
use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::RowVariant;
use hk_core::{
    DType, Float, GlobalLayout, Operand, Result, Stream, TensorView, TensorViewMut, check_aliases,
};
use std::fmt;

static KERNELS: KernelTable<18> = KernelTable {
    objects: &kernels::LAYERNORM,
    variants: [
        RowVariant::vectors(64, 8, 4, 8),
        RowVariant::vectors(128, 16, 4, 8),
        RowVariant::vectors(256, 16, 2, 8),
        RowVariant::vectors(512, 16, 1, 8),
        RowVariant::vectors(1024, 64, 2, 8),
        RowVariant::vectors(1536, 64, 2, 8),
        RowVariant::vectors(2048, 64, 1, 8),
        RowVariant::vectors(4096, 128, 1, 8),
        RowVariant::vectors(8192, 256, 1, 8),
        RowVariant::vectors(16384, 512, 1, 8),
        RowVariant::vectors(usize::MAX, 512, 1, 16),
        RowVariant::elements(64, 8),
        RowVariant::elements(512, 16),
        RowVariant::elements(2048, 64),
        RowVariant::elements(4096, 128),
        RowVariant::elements(8192, 256),
        RowVariant::elements(16384, 512),
        RowVariant::elements(usize::MAX, 512),
    ],
    names: hk_core::row_kernels!(
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
            "64_elements",
            "512_elements",
            "2048_elements",
            "4096_elements",
            "8192_elements",
            "16384_elements",
            "long_elements"
        ]
    ),
};

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    x_bias: GlobalLayout,
    residual_in: GlobalLayout,
    weight: GlobalLayout,
    bias: GlobalLayout,
    y: GlobalLayout,
    residual_out: GlobalLayout,
    mean: GlobalLayout,
    rstd: GlobalLayout,
    eps: f32,
    cols: f32,
    inv_cols: f32,
    weight_is_f32: u32,
    bias_is_f32: u32,
    batch: u32,
}

/// The vectors that a layer norm applies along the columns, each `[cols]`, contiguous, and optional.
#[derive(Clone, Copy)]
pub struct LayerNormVectors<'a, T, W = T, B = W> {
    /// Multiplies the normalised values.
    pub weight: Option<TensorView<'a, W>>,
    /// Added last.
    pub bias: Option<TensorView<'a, B>>,
    /// Added to `x` first, and the sum rounded: the bias of the linear layer before.
    pub x_bias: Option<TensorView<'a, T>>,
}

impl<T, W, B> Default for LayerNormVectors<'_, T, W, B> {
    fn default() -> Self {
        Self { weight: None, bias: None, x_bias: None }
    }
}

impl<T: Float, W: Weight<T>, B: Weight<T>> fmt::Debug for LayerNormVectors<'_, T, W, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { weight, bias, x_bias } = self;
        f.debug_struct("LayerNormVectors")
            .field("weight", weight)
            .field("bias", bias)
            .field("x_bias", x_bias)
            .finish()
    }
}

/// Layer normalisation over the last axis: `y = (x' - mean) * rstd * weight + bias` with `x' = round(x + x_bias)`,
/// `mean = mean(x')`, `rstd = 1 / sqrt(mean((x' - mean)^2) + eps)`.
///
/// | arg              | shape        | dtype                | layout                                                   |
/// |------------------|--------------|----------------------|----------------------------------------------------------|
/// | `x`, `y`         | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride each over the rest |
/// | `weight`, `bias` | `[cols]`     | as `x`, or `f32`     | contiguous; may be left out: 1, 0                        |
/// | `x_bias`         | `[cols]`     | as `x`               | contiguous; may be left out: `x' = x`                    |
/// | `mean`, `rstd`   | `[rows]`     | `f32`                | contiguous; may be left out                              |
///
/// Any number of rows and columns, and any row strides; 16 bytes are moved at a time where all rows and vectors begin on a
/// multiple of 16 bytes and are a multiple of 16 bytes long. `y` may be exactly `x` ([`TensorViewMut::alias`]).
///
/// Arithmetic is `f32`, with one rounding to the type of `y`, to nearest even, beyond its range to infinity. The variance is
/// that of the distances from the mean, and the mean is taken again of these: rows far from zero lose nothing, and a row
/// of one value gives the bias exactly. The bits of a row depend on that row, the vectors and `eps` alone: not on the other
/// rows, its place, strides or alignment. A row with a NaN or an infinity is NaN, and so is one of one value if `eps` is 0;
/// squares of distances overflow from about `1.8e19 / sqrt(cols)`, which makes the row its bias.
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
/// Source: Ba, Kiros and Hinton 2016, "Layer Normalization", eq. 3.
pub fn layernorm<T: Float, W: Weight<T>, B: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    vectors: LayerNormVectors<T, W, B>,
    y: TensorViewMut<T>,
    mean: Option<TensorViewMut<f32>>,
    rstd: Option<TensorViewMut<f32>>,
    eps: f32,
) -> Result<()> {
    launch(stream, "layernorm", x, None, vectors, y, mean, rstd, eps)
}

/// Adds a residual and normalises the sum over the last axis: `s = round(x' + residual_in)`, `residual_out = s`,
/// `y = (s - mean(s)) * rstd(s) * weight + bias`, with `x' = round(x + x_bias)`.
///
/// | arg                                     | shape        | dtype                | layout                            |
/// |-----------------------------------------|--------------|----------------------|-----------------------------------|
/// | `x`, `residual_in`, `y`, `residual_out` | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride each over the rest |
/// | `weight`, `bias`                        | `[cols]`     | as `x`, or `f32`     | contiguous; may be left out: 1, 0 |
/// | `x_bias`                                | `[cols]`     | as `x`               | contiguous; may be left out       |
/// | `mean`, `rstd`                          | `[rows]`     | `f32`                | contiguous; may be left out       |
///
/// The norm is that of the *rounded* sum, so that the result has the bits of adding, storing, and calling [`layernorm`];
/// everything said there about sizes, strides, rounding, invariance and special values holds here. Each of `y` and
/// `residual_out` may be exactly `x` or exactly `residual_in`, but they may not share memory with each other.
///
/// Returns when the launch is queued, before it has run. No rows: nothing is launched.
///
/// # Errors
/// As [`layernorm`].
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_add_layernorm<T: Float, W: Weight<T>, B: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    residual_in: TensorView<T>,
    vectors: LayerNormVectors<T, W, B>,
    y: TensorViewMut<T>,
    residual_out: TensorViewMut<T>,
    mean: Option<TensorViewMut<f32>>,
    rstd: Option<TensorViewMut<f32>>,
    eps: f32,
) -> Result<()> {
    let residual = Some((residual_in, residual_out));
    launch(stream, "fused_add_layernorm", x, residual, vectors, y, mean, rstd, eps)
}

#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
fn launch<T: Float, W: Weight<T>, B: Weight<T>>(
    stream: &Stream,
    op: &'static str,
    x: TensorView<T>,
    residual: Option<(TensorView<T>, TensorViewMut<T>)>,
    vectors: LayerNormVectors<T, W, B>,
    mut y: TensorViewMut<T>,
    mut mean: Option<TensorViewMut<f32>>,
    mut rstd: Option<TensorViewMut<f32>>,
    eps: f32,
) -> Result<()> {
    let (residual_in, mut residual_out) = residual.unzip();
    let LayerNormVectors { weight, bias, x_bias } = vectors;
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
    let mut launch = stream.launch(op, &plan.kernel);
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
    // SAFETY: the checks above make every row of the matrices `cols` long, the vectors too, and `mean` and `rstd` as long as
    // there are rows, which is what the kernel accesses, whatever the grid; the loader matches `Params` to the kernel.
    unsafe { launch.run(plan.config, &params) }
}

fn operand(tensor: &impl Operand) -> &dyn Operand {
    tensor
}
