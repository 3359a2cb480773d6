//! The safe function of `hip/group_quant.hip`.

use crate::kernels;
use crate::launch_tiles::{self, Spread};
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{BlockRule, BlockScale, CodeFormat, GroupSize, Quantized};
use hk_core::rowwise::RowProblem;
use hk_core::{
    Aliasing, DType, E8M0, Element, Error, Float, GlobalLayout, Result, Rows, Stream, TensorView,
    TensorViewMut, check_overlap,
};

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    q: GlobalLayout,
    scale: GlobalLayout,
    format: CodeFormat,
    pow2: BlockRule,
    power_of_two: u32,
    scale_is_e8m0: u32,
    group: u32,
    batch: u32,
    pad: u32,
}

static GROUP: [[&str; 4]; 3] = launch_tiles::names!("group_quant");

/// A type of the scales of groups: `f32`, or [`E8M0`] for powers of two.
pub trait GroupScale: Element {}

impl GroupScale for f32 {}
impl GroupScale for E8M0 {}

/// Options of [`group_quant`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupOptions {
    /// Columns that share a scale.
    pub group: GroupSize,
    /// Scales are powers of two, the least with `qmax * s >= amax`. Always so for scales of [`E8M0`].
    pub pow2_scale: bool,
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

/// Quantizes groups of neighbouring columns with a scale each: `scale = max |x| / qmax`, `q = round(x / scale)`.
///
/// | arg     | shape            | dtype                          | layout                                              |
/// |---------|------------------|--------------------------------|-----------------------------------------------------|
/// | `x`     | `[.., cols]`     | `bf16`, `f16`, `f32`           | unit stride on `cols`, one row stride over the rest |
/// | `q`     | `[.., cols]`     | `i8`, `fp8e4m3`, `fp8e4m3fnuz` | likewise                                            |
/// | `scale` | `[rows, groups]` | `f32`, `e8m0`                  | unit stride on either axis: row- or column-major    |
///
/// There are `ceil(cols / group)` groups in a row, the last of which may be short. A maximum below 1e-10, zero too, counts
/// as 1e-10; otherwise scales and codes are as in [`per_token_quant`](crate::per_token_quant). Powers of two are the
/// least with `qmax * s >= amax`, kept as `f32` ([`GroupOptions::pow2_scale`]) or as [`E8M0`].
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Empty`](Error::Empty) for zero columns, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and
/// what loading and launching a kernel can answer. Nothing is written then.
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
    let plan = spread.plan(&problem, stream, &kernels::GROUP_QUANT, T::DTYPE, &GROUP)?;
    let scale_is_e8m0 = S::DTYPE == DType::E8M0;
    let mut launch = stream.launch(OP, &plan.kernel);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        q: launch.output("q", &mut q.reborrow().flatten_rows(OP, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        format: Q::FORMAT,
        pow2: BlockRule::codes(BlockScale::RoundUp, Q::FORMAT, 0),
        power_of_two: (scale_is_e8m0 || options.pow2_scale).into(),
        scale_is_e8m0: scale_is_e8m0.into(),
        group: options.group.columns() as u32,
        batch: plan.batch,
        pad: 0,
    };
    // SAFETY: the checks above make every row of x and q `cols` long and give each group of each row a scale, which is
    // what the kernel accesses, whatever the grid; the loader matches the parameters to the kernel.
    unsafe { launch.run(plan.config, &params) }
}
