//! The safe function of `hip/sum.hip`.

use crate::args::{MOST_GATES, Vector};
use crate::kernels::sum::Params;
use crate::topk::check_weights;
use hk_core::plan::rows::float_index;
use hk_core::{
    DType, Error, Float, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut, check_aliases,
    row_kernels,
};

/// The entry points of each pair of types, vectorized, then scalar.
static SAME: [[KernelRef<Params>; 2]; 3] = [
    row_kernels!(@dtype Params, "sum", "bf16", ["bf16", "bf16_scalar"]),
    row_kernels!(@dtype Params, "sum", "f16", ["f16", "f16_scalar"]),
    row_kernels!(@dtype Params, "sum", "f32", ["f32", "f32_scalar"]),
];
static WIDE: [[KernelRef<Params>; 2]; 3] =
    row_kernels!(Params, "sum", ["bf16", "f16", "f32"], ["f32", "f32_scalar"]);

/// Threads of a block.
const THREADS: usize = 256;

/// The sum of a token's gates: `y[t] = sum over j of x[places[t, j]] + residual[t]`.
///
/// | arg        | shape      | dtype                | layout                                          |
/// |------------|------------|----------------------|-------------------------------------------------|
/// | `x`        | `[G, H]`   | `bf16`, `f16`, `f32` | unit stride on `H`, any row stride              |
/// | `places`   | `[T, k]`   | `i32`                | optional, contiguous: rows of `x`; `None`: row `t k + j`, and `G = T k` |
/// | `residual` | `[T, H]`   | as `y`               | optional; unit stride on `H`, any row stride    |
/// | `y`        | `[T, H]`   | as `x`, or `f32`     | unit stride on `H`, any row stride              |
///
/// In `f32`, `j` ascending, the residual last, then rounded to nearest even: the same bits for any `T`. A place outside `0..G` adds
/// nothing.
///
/// One launch. `y` may be `residual`, and no output may alias another tensor otherwise. Returns when it is queued. No tokens or
/// columns: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align), [`DType`](Error::DType) if a tensor breaks the table,
/// [`TooLarge`](Error::TooLarge) beyond 2^30 gates or columns, [`Overlap`](Error::Overlap) if `y` shares memory with another tensor,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
pub fn moe_sum<T: Float, Y: Float>(
    stream: &Stream,
    x: TensorView<T>,
    places: Option<TensorView<i32>>,
    residual: Option<TensorView<Y>>,
    y: TensorViewMut<Y>,
) -> Result<()> {
    sum(stream, "moe_sum", SumInputs { x, places, residual, experts: None, shared: false }, y)
}

/// Gates that are left out: `[T, k]` experts, of `0..E`, and the map of experts `[E]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OfExperts<'a> {
    pub ids: TensorView<'a, i32>,
    pub count: usize,
    pub map: Option<TensorView<'a, i32>>,
}

/// Inputs of [`sum`].
pub(crate) struct SumInputs<'a, T: Float, Y: Float> {
    pub x: TensorView<'a, T>,
    pub places: Option<TensorView<'a, i32>>,
    pub residual: Option<TensorView<'a, Y>>,
    /// Gates of no expert are left out.
    pub experts: Option<OfExperts<'a>>,
    /// The last rows of `x` are the tokens' of shared experts.
    pub shared: bool,
}

/// [`moe_sum`], of gates that have an expert, and of shared experts.
pub(crate) fn sum<T: Float, Y: Float>(
    stream: &Stream,
    op: &'static str,
    SumInputs { x, places, residual, experts, shared }: SumInputs<T, Y>,
    y: TensorViewMut<Y>,
) -> Result<()> {
    let mut y = y;
    let [x_rows, cols] = x.dims(op, "x")?;
    let [tokens, y_cols] = y.dims(op, "y")?;
    let gates = if shared { x_rows.saturating_sub(tokens) } else { x_rows };
    if y_cols != cols {
        return Err(Error::shape(op, "y", [tokens, y_cols], format!("[{tokens}, {cols}] (columns of x)")));
    }
    let k = match &places {
        Some(places) => {
            let [rows, k] = places.dims(op, "places")?;
            if rows != tokens {
                return Err(Error::shape(op, "places", [rows, k], format!("[{tokens}, {k}] (rows of y)")));
            }
            places.expect_packed(op, "places")?;
            k
        }
        None if gates == 0 => 0,
        None if tokens > 0 && gates % tokens == 0 => gates / tokens,
        None => {
            let want = format!("a multiple of {tokens} rows (rows of y)");
            return Err(Error::shape(op, "x", [gates, cols], want));
        }
    };
    check_weights::<T, Y>(op, "y")?;
    for (arg, n) in [("x", gates), ("x", cols), ("places", tokens.saturating_mul(k)), ("y", tokens)] {
        if n > MOST_GATES {
            return Err(Error::too_large(op, arg, format!("{n} rows or columns"), MOST_GATES as u64));
        }
    }
    x.expect_unit_stride(op, "x")?;
    x.expect_aligned(op, "x", size_of::<T>() as u64)?;
    y.expect_unit_stride(op, "y")?;
    y.expect_aligned(op, "y", size_of::<Y>() as u64)?;
    if let Some(residual) = &residual {
        residual.expect_shape(op, "residual", [tokens, cols])?;
        residual.expect_unit_stride(op, "residual")?;
        residual.expect_aligned(op, "residual", size_of::<Y>() as u64)?;
    }
    check_aliases(
        op,
        &[
            ("x", Some(&x)),
            ("places", places.as_ref().map(|p| p as _)),
            ("residual", residual.as_ref().map(|r| r as _)),
            ("topk_ids", experts.as_ref().map(|e| &e.ids as _)),
        ],
        &[(("y", Some(&y)), &["residual"])],
    )?;
    if tokens == 0 || cols == 0 {
        return Ok(());
    }
    if let Some(OfExperts { ids, count, map }) = &experts {
        if ids.numel() != tokens.saturating_mul(k) {
            return Err(Error::shape(op, "topk_ids", ids.shape(), format!("[{tokens}, {k}]")));
        }
        ids.expect_packed(op, "topk_ids")?;
        if let Some(map) = map {
            map.expect_vector(op, "expert_map", *count, "experts")?;
        }
    }
    let len = 16 / size_of::<T>();
    let wide = (len * size_of::<Y>()) as u64;
    let vectorized = cols.is_multiple_of(len)
        && x.rows_aligned(16)
        && y.rows_aligned(wide)
        && residual.as_ref().is_none_or(|r| r.rows_aligned(wide));
    let kernels = if Y::DTYPE == DType::F32 { &WIDE } else { &SAME };
    let kernel = stream.kernel(kernels[float_index(T::DTYPE)][usize::from(!vectorized)])?;
    let blocks = cols.div_ceil(THREADS * if vectorized { len } else { 1 });
    let mut launch = stream.launch(op);
    let params = Params {
        x: launch.input("x", &x)?,
        residual: launch.optional_input("residual", residual.as_ref())?,
        y: launch.output("y", &mut y)?,
        places: places.as_ref().map_or(Ok(0), |places| launch.input_address("places", places))?,
        ids: experts.as_ref().map_or(Ok(0), |e| launch.input_address("topk_ids", &e.ids))?,
        expert_map: match experts.as_ref().and_then(|e| e.map.as_ref()) {
            Some(map) => launch.input_address("expert_map", map)?,
            None => 0,
        },
        k: k as u32,
        gates: gates as u32,
        cols: cols as u32,
        blocks: blocks as u32,
        blocks_inverse: u32::MAX / blocks as u32,
        experts: experts.as_ref().map_or(0, |e| e.count) as u32,
        shared: shared.into(),
        pad: 0,
    };
    // SAFETY: the checks above make the tensors as large as they count; the kernel checks places against the rows of `x`.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(tokens * blocks), &params) }
}
