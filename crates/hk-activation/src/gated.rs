//! The safe functions of `hip/gated.hip`.

use crate::kernels::gated::Params;
use crate::tiles::{KernelTable, Tiles, kernel_table};
use hk_core::plan::rows::float_index;
use hk_core::{Aliasing, Error, Float, Result, Stream, TensorView, TensorViewMut, check_overlap};

static KERNELS: KernelTable<Params> = kernel_table!(Params, "gated");

/// The same values as `Gate` in `hip/gated.hip`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    Silu = 0,
    Gelu = 1,
    GeluTanh = 2,
    LimitedSilu = 3,
    SwigluOai = 4,
}

/// The limit of [`swiglu_oai_and_mul`].
pub(crate) const SWIGLU_OAI_LIMIT: f32 = 7.0;

/// SwiGLU: `y[.., c] = silu(x[.., c]) * x[.., d + c]`, `silu(a) = a / (1 + exp(-a))`.
///
/// | arg | shape      | dtype                           | layout                                                     |
/// |-----|------------|---------------------------------|------------------------------------------------------------|
/// | `x` | `[.., 2d]` | `bf16`, `f16`, `f32`            | unit stride on the last axis, one row stride over the rest |
/// | `y` | `[.., d]`  | `bf16`, `f16`, `f32`, any       | unit stride on the last axis, one row stride over the rest |
///
/// With a `limit` above 0, `a = min(a, limit)` and `b = clamp(b, -limit, limit)` of the two halves `a` and `b` come first, where
/// NaN stays NaN. A limit of 0 is none. `silu(-inf)` is NaN.
///
/// `f32` arithmetic, one rounding to the type of `y`, to nearest even, to infinity beyond its range; infinities and NaN as in
/// IEEE 754. Results are batch-invariant. `x` and `y` share no memory.
///
/// Any number of rows, any `d`. The vectorized path moves 16 bytes at a time; it needs rows of both tensors aligned to 16 bytes
/// and `d` a multiple of the 16-byte vector of `x`.
///
/// Returns when the launch is queued, before it has run. Without rows, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Empty`](hk_core::Error::Empty) for `d` = 0,
/// [`Argument`](hk_core::Error::Argument) for a `limit` that is negative or NaN, [`Overlap`](hk_core::Error::Overlap) if the tensors share memory,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^28 - 1 columns of `y` or 2^32 - 1 rows,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: Shazeer 2020, "GLU Variants Improve Transformer".
pub fn silu_and_mul<T: Float, O: Float>(
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<O>,
    limit: f32,
) -> Result<()> {
    const OP: &str = "silu_and_mul";
    if limit.is_nan() || limit < 0.0 {
        return Err(Error::argument(OP, "limit", limit, "a number that is not negative; 0 for no limit"));
    }
    let gate = if limit > 0.0 { Gate::LimitedSilu } else { Gate::Silu };
    gated(OP, gate, limit, stream, x, y)
}

/// GeGLU: `y[.., c] = gelu(x[.., c]) * x[.., d + c]`, `gelu(a) = a * (1 + erf(a / sqrt(2))) / 2`.
///
/// | arg | shape      | dtype                           | layout                                                     |
/// |-----|------------|---------------------------------|------------------------------------------------------------|
/// | `x` | `[.., 2d]` | `bf16`, `f16`, `f32`            | unit stride on the last axis, one row stride over the rest |
/// | `y` | `[.., d]`  | `bf16`, `f16`, `f32`, any       | unit stride on the last axis, one row stride over the rest |
///
/// `f32` arithmetic, one rounding to the type of `y`, to nearest even, to infinity beyond its range; infinities and NaN as in
/// IEEE 754. Results are batch-invariant. `x` and `y` share no memory.
///
/// Any number of rows, any `d`. The vectorized path moves 16 bytes at a time; it needs rows of both tensors aligned to 16 bytes
/// and `d` a multiple of the 16-byte vector of `x`.
///
/// Returns when the launch is queued, before it has run. Without rows, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Empty`](hk_core::Error::Empty) for `d` = 0, [`Overlap`](hk_core::Error::Overlap) if the tensors share memory,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^28 - 1 columns of `y` or 2^32 - 1 rows,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: Shazeer 2020, "GLU Variants Improve Transformer".
pub fn gelu_and_mul<T: Float, O: Float>(
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<O>,
) -> Result<()> {
    gated("gelu_and_mul", Gate::Gelu, 0.0, stream, x, y)
}

/// GeGLU by tanh: `y[.., c] = gelu_tanh(x[.., c]) * x[.., d + c]`, `gelu_tanh(a) = a * (1 + tanh(u)) / 2` with
/// `u = sqrt(2 / pi) * (a + 0.044715 * a^3)`.
///
/// | arg | shape      | dtype                           | layout                                                     |
/// |-----|------------|---------------------------------|------------------------------------------------------------|
/// | `x` | `[.., 2d]` | `bf16`, `f16`, `f32`            | unit stride on the last axis, one row stride over the rest |
/// | `y` | `[.., d]`  | `bf16`, `f16`, `f32`, any       | unit stride on the last axis, one row stride over the rest |
///
/// `f32` arithmetic, one rounding to the type of `y`, to nearest even, to infinity beyond its range; infinities and NaN as in
/// IEEE 754. Results are batch-invariant. `x` and `y` share no memory.
///
/// Any number of rows, any `d`. The vectorized path moves 16 bytes at a time; it needs rows of both tensors aligned to 16 bytes
/// and `d` a multiple of the 16-byte vector of `x`.
///
/// Returns when the launch is queued, before it has run. Without rows, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Empty`](hk_core::Error::Empty) for `d` = 0, [`Overlap`](hk_core::Error::Overlap) if the tensors share memory,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^28 - 1 columns of `y` or 2^32 - 1 rows,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: Shazeer 2020, "GLU Variants Improve Transformer".
pub fn gelu_tanh_and_mul<T: Float, O: Float>(
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<O>,
) -> Result<()> {
    gated("gelu_tanh_and_mul", Gate::GeluTanh, 0.0, stream, x, y)
}

/// The gate of GPT-OSS: `y = a / (1 + exp(-1.702 * a)) * (b + 1)` with `a = min(x[.., c], 7)` and
/// `b = clamp(x[.., d + c], -7, 7)`.
///
/// | arg | shape      | dtype                           | layout                                                     |
/// |-----|------------|---------------------------------|------------------------------------------------------------|
/// | `x` | `[.., 2d]` | `bf16`, `f16`, `f32`            | unit stride on the last axis, one row stride over the rest |
/// | `y` | `[.., d]`  | `bf16`, `f16`, `f32`, any       | unit stride on the last axis, one row stride over the rest |
///
/// `f32` arithmetic, one rounding to the type of `y`, to nearest even, to infinity beyond its range; infinities and NaN as in
/// IEEE 754. Results are batch-invariant. `x` and `y` share no memory.
///
/// Any number of rows, any `d`. The vectorized path moves 16 bytes at a time; it needs rows of both tensors aligned to 16 bytes
/// and `d` a multiple of the 16-byte vector of `x`.
///
/// Returns when the launch is queued, before it has run. Without rows, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Empty`](hk_core::Error::Empty) for `d` = 0, [`Overlap`](hk_core::Error::Overlap) if the tensors share memory,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^28 - 1 columns of `y` or 2^32 - 1 rows,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: the model code of GPT-OSS.
pub fn swiglu_oai_and_mul<T: Float, O: Float>(
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<O>,
) -> Result<()> {
    gated("swiglu_oai_and_mul", Gate::SwigluOai, SWIGLU_OAI_LIMIT, stream, x, y)
}

fn gated<T: Float, O: Float>(
    op: &'static str,
    gate: Gate,
    limit: f32,
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<O>,
) -> Result<()> {
    let rows = x.rows(op, "x")?;
    if !rows.cols.is_multiple_of(2) {
        return Err(Error::shape(op, "x", x.shape(), "an even last axis, two halves"));
    }
    let d = rows.cols / 2;
    let mut tiles = Tiles::rows(op, "x", rows.rows, d, T::DTYPE)?;
    let mut want = x.shape().to_vec();
    want.pop();
    want.push(d);
    if y.shape() != want {
        return Err(Error::shape(op, "y", y.shape(), format!("{want:?} (half the columns of x)")));
    }
    tiles.input("x", &x)?;
    tiles.output("y", &y)?;
    check_overlap(op, ("x", &x), ("y", &y), Aliasing::Disjoint)?;
    if rows.cols * size_of::<f32>() >= hk_core::plan::rows::WINDOW_BYTES {
        let limit = (hk_core::plan::rows::WINDOW_BYTES / 2 / size_of::<f32>() - 1) as u64;
        return Err(Error::too_large(op, "x", format!("{d} columns a half"), limit));
    }
    if rows.rows == 0 {
        return Ok(());
    }

    let (kernel, shape, config) = tiles.plan(stream, &KERNELS)?;
    let mut launch = stream.launch(op);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(op, "x")?)?,
        y: launch.output("y", &mut y.flatten_rows(op, "y")?)?,
        shape,
        gate: gate as u32,
        y_type: float_index(O::DTYPE) as u32,
        limit,
        d: d as u32,
    };
    // SAFETY: x has rows of 2 d columns and y as many of d, which is what the kernel accesses, whatever the grid.
    unsafe { launch.run(&kernel, config, &params) }
}
