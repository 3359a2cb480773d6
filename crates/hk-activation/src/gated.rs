//! The safe functions of `hip/gated.hip`.

use crate::kernels;
use crate::tiles::{KernelTable, Shape, Tiles, kernel_table};
use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::float_index;
use hk_core::{
    Aliasing, Error, Float, GlobalLayout, Result, Stream, TensorView, TensorViewMut, check_overlap,
};

static KERNELS: KernelTable = kernel_table!(&kernels::GATED, "gated");

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    y: GlobalLayout,
    shape: Shape,
    gate: u32,
    y_type: u32,
    limit: f32,
    d: u32,
}

/// The same values as `Gate` in `hip/gated.hip`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    Silu = 0,
    Gelu = 1,
    GeluTanh = 2,
    LimitedSilu = 3,
    SwigluOai = 4,
}

/// What [`swiglu_oai_and_mul`] limits its halves by.
pub(crate) const SWIGLU_OAI_LIMIT: f32 = 7.0;

/// `y[.., c] = silu(x[.., c]) * x[.., d + c]`: the first half of a row is activated, the second one multiplies.
///
/// | arg | shape      | dtype                            | layout                                                   |
/// |-----|------------|----------------------------------|----------------------------------------------------------|
/// | `x` | `[.., 2d]` | `bf16`, `f16`, `f32`             | unit stride on the last axis, one row stride over the rest |
/// | `y` | `[.., d]`  | `bf16`, `f16`, `f32`, any of them | the same, with a stride of its own                        |
///
/// With a `limit` above 0, `a = min(a, limit)` and `b = clamp(b, -limit, limit)` come first, for `a` and `b` the halves; NaN
/// stays NaN. 0 limits nothing.
///
/// Any number of rows, any `d`, odd ones too; 16 bytes are moved at a time where rows of both tensors begin on 16 bytes and
/// `d` is a multiple of the 16-byte vector of `x`. Arithmetic is `f32` with one rounding to the type of `y`, to nearest even,
/// beyond its range to infinity; infinities and NaN as IEEE has it, `silu(-inf)` being NaN.
///
/// Returns when the launch is queued, before it has run. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Empty`](hk_core::Error::Empty) for `d` = 0, [`Argument`](hk_core::Error::Argument) for a `limit` that is
/// negative or NaN, [`Overlap`](hk_core::Error::Overlap) if the tensors share memory,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^28 - 1 columns of `y` or 2^32 - 1 rows,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and launching a kernel can answer. Nothing is written
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

/// `y[.., c] = gelu(x[.., c]) * x[.., d + c]` with [`gelu`](crate::gelu()) by the error function; everything else, except for
/// the limit, as [`silu_and_mul`].
///
/// # Errors
/// As [`silu_and_mul`].
pub fn gelu_and_mul<T: Float, O: Float>(
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<O>,
) -> Result<()> {
    gated("gelu_and_mul", Gate::Gelu, 0.0, stream, x, y)
}

/// `y[.., c] = gelu_tanh(x[.., c]) * x[.., d + c]`; everything else, except for the limit, as [`silu_and_mul`].
///
/// # Errors
/// As [`silu_and_mul`].
pub fn gelu_tanh_and_mul<T: Float, O: Float>(
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<O>,
) -> Result<()> {
    gated("gelu_tanh_and_mul", Gate::GeluTanh, 0.0, stream, x, y)
}

/// The gate of GPT-OSS: `y = a / (1 + exp(-1.702 * a)) * (b + 1)` with `a = min(x[.., c], 7)` and
/// `b = clamp(x[.., d + c], -7, 7)`; everything else, except for the limit, as [`silu_and_mul`].
///
/// # Errors
/// As [`silu_and_mul`].
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
    if rows.cols * size_of::<f32>() >= hk_core::rowwise::WINDOW_BYTES {
        let limit = (hk_core::rowwise::WINDOW_BYTES / 2 / size_of::<f32>() - 1) as u64;
        return Err(Error::too_large(op, "x", format!("{d} columns a half"), limit));
    }
    if rows.rows == 0 {
        return Ok(());
    }

    let (kernel, shape, config) = tiles.plan(stream, &KERNELS)?;
    let mut launch = stream.launch(op, &kernel);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(op, "x")?)?,
        y: launch.output("y", &mut y.flatten_rows(op, "y")?)?,
        shape,
        gate: gate as u32,
        y_type: float_index(O::DTYPE) as u32,
        limit,
        d: d as u32,
    };
    // SAFETY: x has rows of 2 d columns and y as many of d, which is what the kernel accesses, whatever the grid; the loader
    // matches `Params` to the kernel.
    unsafe { launch.run(config, &params) }
}
