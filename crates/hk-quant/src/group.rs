//! The safe function of `hip/group_quant.hip`.

use crate::kernels::group_quant::Params;
use crate::launch_tiles::{self, Kernels, Spread};
use hk_core::plan::rows::RowProblem;
use hk_core::quant::{BlockRule, BlockScale, GroupSize, Quantized};
use hk_core::{
    Aliasing, DType, E8M0, Element, Error, Float, Result, Rows, Stream, TensorView, TensorViewMut,
    check_overlap,
};

static KERNELS: Kernels<Params> = launch_tiles::kernels!(Params, "group_quant");

/// Scale types of groups: `f32`, or [`E8M0`] for powers of two.
pub trait GroupScale: Element {}

impl GroupScale for f32 {}
impl GroupScale for E8M0 {}

/// How the scale of a group follows from its largest magnitude `amax`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GroupScaleRule {
    /// `amax / qmax`.
    #[default]
    Exact,
    /// The least power of two `s` with `qmax * s >= amax`.
    PowerOfTwo,
}

/// Options of [`group_quant`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupOptions {
    /// Columns that share a scale. Default: 128.
    pub group: GroupSize,
    /// The rule for scales. Default: exact. Scales of [`E8M0`] are always powers of two.
    pub scale_rule: GroupScaleRule,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self { group: GroupSize::G128, scale_rule: GroupScaleRule::Exact }
    }
}

/// Checks the scales `[rows, groups]` of a matrix: row-major or column-major, either way with rows that do not overlap.
pub fn check_scales<S: Element>(
    op: &'static str,
    scale: &TensorViewMut<S>,
    rows: usize,
    groups: usize,
) -> Result<()> {
    if scale.shape() != [rows, groups] {
        let want = format!("[{rows}, {groups}] (rows of x, groups of a row)");
        return Err(Error::shape(op, "scale", scale.shape(), want));
    }
    let unit = |axis: usize| scale.shape()[axis] <= 1 || scale.strides()[axis] == 1;
    if !unit(0) && !unit(1) {
        return Err(Error::stride(op, "scale", scale.layout(), "unit stride on one axis"));
    }
    scale.expect_aligned(op, "scale", size_of::<S>() as u64)
}

/// Quantizes groups of adjacent columns with a scale each: `scale = max |x| / qmax`, `q = round(x / scale)`.
///
/// | arg     | shape            | dtype                          | layout                                              |
/// |---------|------------------|--------------------------------|-----------------------------------------------------|
/// | `x`     | `[.., cols]`     | `bf16`, `f16`, `f32`           | unit stride on `cols`, one row stride over the rest |
/// | `q`     | `[.., cols]`     | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | as `x`                                              |
/// | `scale` | `[rows, groups]` | `f32`, `e8m0`                  | unit stride on either axis: row- or column-major    |
///
/// There are `ceil(cols / group)` groups in a row; the last may be short. `qmax` is 127, 448 or 240. The maximum is over finite
/// elements; below 1e-10, zero too, it counts as 1e-10. The scale is an IEEE quotient, or the least power of two with
/// `qmax * scale >= max`, stored as `f32` ([`GroupScaleRule::PowerOfTwo`]) or as [`E8M0`]. `q` is `x * (1 / scale)`, clamped to `qmax`
/// and rounded to nearest even: infinities saturate, NaN becomes NaN or, in `i8`, 0.
///
/// Batch-invariant: the bits of a group depend on that group alone. No output may alias another tensor. Returns when the launch is
/// queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// the errors of loading and launching a kernel. Nothing is written then.
pub fn group_quant<T: Float, Q: Quantized, S: GroupScale>(
    stream: &Stream,
    x: TensorView<T>,
    mut q: TensorViewMut<Q>,
    mut scale: TensorViewMut<S>,
    options: GroupOptions,
) -> Result<()> {
    const OP: &str = "group_quant";
    let Rows { rows, cols, .. } = x.rows(OP, "x")?;
    let mut problem = RowProblem::new(OP, "x", rows, cols, Q::DTYPE)?;
    problem.tensor("x", &x)?;
    problem.shaped("q", &q, x.shape(), "shape of x")?;
    check_scales(OP, &scale, rows, cols.div_ceil(options.group.columns()))?;
    check_overlap(OP, ("x", &x), ("q", &q), Aliasing::Disjoint)?;
    check_overlap(OP, ("x", &x), ("scale", &scale), Aliasing::Disjoint)?;
    check_overlap(OP, ("q", &q), ("scale", &scale), Aliasing::Disjoint)?;
    if rows == 0 {
        return Ok(());
    }
    let spread = Spread::bytes32(T::DTYPE);
    let plan = spread.plan(&problem, stream, T::DTYPE, &KERNELS)?;
    let scale_is_e8m0 = S::DTYPE == DType::E8M0;
    let mut launch = stream.launch(OP);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        q: launch.output("q", &mut q.reborrow().flatten_rows(OP, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        format: Q::FORMAT,
        pow2: BlockRule::codes(BlockScale::RoundUp, Q::FORMAT, 0),
        power_of_two: (scale_is_e8m0 || options.scale_rule == GroupScaleRule::PowerOfTwo).into(),
        scale_is_e8m0: scale_is_e8m0.into(),
        group: options.group.columns() as u32,
        batch: plan.batch,
        pad: 0,
    };
    // SAFETY: the checks above make every row of x and q `cols` long and give each group of each row a scale. The kernel
    // accesses no more than that on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}
