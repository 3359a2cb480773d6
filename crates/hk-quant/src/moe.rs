//! The safe function of `hip/moe_smoothquant.hip`.

use crate::Smooth;
use crate::kernels::moe_smoothquant::Params;
use hk_core::plan::rows::{RowProblem, RowVariant, float_index};
use hk_core::quant::Quantized;
use hk_core::{
    Aliasing, DType, Error, Float, KernelRef, Result, Rows, Stream, TensorView, TensorViewMut, check_overlap,
};

const VARIANTS: [RowVariant; 5] = [
    RowVariant::vectorized(2048, 64, 1, 12),
    RowVariant::vectorized(8192, 256, 1, 12),
    RowVariant::vectorized(usize::MAX, 256, 1, 16),
    RowVariant::scalar(2048, 64),
    RowVariant::scalar(usize::MAX, 256),
];

static KERNELS: [[KernelRef<Params>; 5]; 3] = hk_core::row_kernels!(
    Params,
    "moe_smoothquant",
    ["bf16", "f16", "f32"],
    ["2048", "8192", "long", "2048_scalar", "long_scalar"]
);

/// Order of the output rows: one per token and choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoeOrder {
    /// Row `t * topk + j` is choice `j` of token `t`.
    TokenMajor,
    /// Row `j * tokens + t`.
    ChoiceMajor,
}

/// SmoothQuant of each token for each of its experts: `z = x[t] * smooth[topk_ids[t, j]]`, `scale = max |z| / qmax`,
/// `q = round(z / scale)`.
///
/// | arg        | shape                                    | dtype                          | layout                                |
/// |------------|------------------------------------------|--------------------------------|---------------------------------------|
/// | `x`        | `[tokens, cols]`, `[tokens, topk, cols]` | `bf16`, `f16`, `f32`           | unit stride on `cols`, one row stride |
/// | `smooth`   | `[experts, cols]`                        | as `x`, or `f32`               | unit stride on `cols`                 |
/// | `topk_ids` | `[tokens, topk]`                         | `i32`                          | unit stride on `topk`                 |
/// | `q`        | `[tokens * topk, cols]`                  | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | unit stride on `cols`                 |
/// | `scale`    | `[tokens * topk]`                        | `f32`                          | contiguous                            |
///
/// `x` has a row per token, or one per choice. `order` is the order of the rows of `q` and `scale`. A negative id leaves its row
/// untouched; an id of `experts` or more makes the scale NaN and `q` 0.
///
/// `z` is rounded to `f32`. `qmax` is 127, 448 or 240, and the maximum is over finite `z`. A row of zeros has the scale 1; a maximum
/// below 1e-30 counts as 1e-30. The scale is an IEEE quotient. `q` is `z * (1 / scale)`, clamped to `qmax` and rounded to nearest
/// even: infinities saturate, NaN becomes NaN or, in `i8`, 0. No output may alias another tensor. Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns or experts, [`Overlap`](Error::Overlap) if an output shares memory with another
/// tensor, [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch),
/// and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Xiao et al. 2023, "SmoothQuant".
pub fn moe_smoothquant<T: Float, W: Smooth<T>, Q: Quantized>(
    stream: &Stream,
    x: TensorView<T>,
    smooth: TensorView<W>,
    topk_ids: TensorView<i32>,
    mut q: TensorViewMut<Q>,
    mut scale: TensorViewMut<f32>,
    order: MoeOrder,
) -> Result<()> {
    const OP: &str = "moe_smoothquant";
    let [tokens, topk] = topk_ids.dims(OP, "topk_ids")?;
    let Rows { cols, .. } = x.rows(OP, "x")?;
    let x_by_choice = x.shape().len() == 3;
    let want: &[usize] = if x_by_choice { &[tokens, topk, cols] } else { &[tokens, cols] };
    let mut problem = RowProblem::new(OP, "x", tokens, cols, Q::DTYPE)?;
    problem.shaped("x", &x, want, "tokens and choices of topk_ids")?;
    let [experts, _] = smooth.dims(OP, "smooth")?;
    if experts == 0 {
        return Err(Error::empty(OP, "smooth", 0, smooth.shape()));
    }
    problem.shaped("smooth", &smooth, &[experts, cols], "experts, columns of x")?;
    topk_ids.expect_unit_stride(OP, "topk_ids")?;
    topk_ids.expect_aligned(OP, "topk_ids", 4)?;
    let rows = tokens
        .checked_mul(topk)
        .filter(|&n| n <= u32::MAX as usize)
        .ok_or_else(|| Error::too_large(OP, "topk_ids", format!("{tokens} x {topk}"), u32::MAX.into()))?;
    problem.shaped("q", &q, &[rows, cols], "choices of all tokens, columns of x")?;
    if scale.shape() != [rows] {
        return Err(Error::shape(OP, "scale", scale.shape(), format!("[{rows}] (choices of all tokens)")));
    }
    scale.expect_contiguous(OP, "scale")?;
    scale.expect_aligned(OP, "scale", 4)?;
    check_overlap(OP, ("x", &x), ("q", &q), Aliasing::Disjoint)?;
    check_overlap(OP, ("x", &x), ("scale", &scale), Aliasing::Disjoint)?;
    check_overlap(OP, ("smooth", &smooth), ("q", &q), Aliasing::Disjoint)?;
    check_overlap(OP, ("smooth", &smooth), ("scale", &scale), Aliasing::Disjoint)?;
    check_overlap(OP, ("topk_ids", &topk_ids), ("q", &q), Aliasing::Disjoint)?;
    check_overlap(OP, ("topk_ids", &topk_ids), ("scale", &scale), Aliasing::Disjoint)?;
    check_overlap(OP, ("q", &q), ("scale", &scale), Aliasing::Disjoint)?;
    if rows == 0 {
        return Ok(());
    }
    let plan = problem.plan(stream, &VARIANTS, &KERNELS[float_index(T::DTYPE)])?;
    let mut launch = stream.launch(OP);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        smooth: launch.input("smooth", &smooth)?,
        ids: launch.input("topk_ids", &topk_ids)?,
        q: launch.output("q", &mut q)?,
        scale: launch.output("scale", &mut scale)?,
        format: Q::FORMAT,
        smooth_is_f32: (W::DTYPE == DType::F32).into(),
        choice_major: (order == MoeOrder::ChoiceMajor).into(),
        x_by_choice: x_by_choice.into(),
        pad: 0,
    };
    // SAFETY: the checks above make rows of x, smooth and q `cols` long, and give x, q and scale a row per token or choice. The
    // kernel accesses no more than that on any grid; it checks ids against the rows of smooth.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}
