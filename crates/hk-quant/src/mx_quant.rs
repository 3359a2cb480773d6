//! The safe functions of `hip/mx_quant.hip`.

use crate::group::check_scales;
use crate::kernels;
use crate::launch_tiles::{self, Spread};
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{BlockRule, BlockScale, MxElement, ScaleLayout, shuffled_len};
use hk_core::rowwise::RowProblem;
use hk_core::{
    Aliasing, DType, E8M0, Error, Float, Fp4x2, GlobalLayout, Result, Rows, Stream, TensorView,
    TensorViewMut, check_overlap,
};

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    q: GlobalLayout,
    scale: GlobalLayout,
    rule: BlockRule,
    element: u32,
    shuffled: u32,
    batch: u32,
}

/// A block a lane.
const SPREAD: Spread = Spread { columns: BLOCK, rows: 1, chunks: 1 };

static MX: [[&str; 4]; 3] = launch_tiles::names!("mx_quant");

/// Columns that share a scale.
pub(crate) const BLOCK: usize = 32;

/// Options of [`dynamic_mxfp4_quant`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MxOptions {
    /// How the scale of a block follows from its largest magnitude; [`BlockScale::DivFloor`] is not served here.
    pub mode: BlockScale,
    /// How the scales lie.
    pub scale_layout: ScaleLayout,
}

/// Quantizes rows to MX fp4: blocks of 32 columns with a power-of-two scale each, `q = round(x / scale)`.
///
/// | arg     | shape             | dtype                | layout                                                          |
/// |---------|-------------------|----------------------|-----------------------------------------------------------------|
/// | `x`     | `[.., cols]`      | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride over the rest; `cols` even |
/// | `q`     | `[.., cols / 2]`  | pairs of fp4         | likewise; the even column in the low half                       |
/// | `scale` | `[rows, blocks]`  | `e8m0`               | row-major or column-major, as the options say                   |
/// |         | `[n]`             |                      | [`ScaleLayout::Shuffled950`], `n` of [`shuffled_len`]           |
///
/// There are `ceil(cols / 32)` blocks in a row, the last of which may be short. Elements are rounded to nearest even and
/// saturate at 6; zeros keep their sign. A block of zeros has the scale code 0 (2^-127). A block with a NaN or an infinity
/// has the scale NaN (255) and zeros. Padding of shuffled scales is written as 127 (1.0). The bytes are the same on every
/// target.
///
/// # Errors
/// [`Shape`](Error::Shape) (an odd number of columns too), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor
/// breaks the table, [`Argument`](Error::Argument) for the mode `DivFloor`, [`Empty`](Error::Empty) for zero columns,
/// [`Overlap`](Error::Overlap) if an output shares memory with another tensor, [`TooLarge`](Error::TooLarge) beyond
/// 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and what loading and launching a kernel
/// can answer. Nothing is written then.
///
/// Source: OCP Microscaling Formats (MX) 1.0; [`BlockScale`] for the modes.
pub fn dynamic_mxfp4_quant<T: Float>(
    stream: &Stream,
    x: TensorView<T>,
    q: TensorViewMut<Fp4x2>,
    scale: TensorViewMut<E8M0>,
    options: MxOptions,
) -> Result<()> {
    const OP: &str = "dynamic_mxfp4_quant";
    if options.mode == BlockScale::DivFloor {
        return Err(Error::argument(OP, "mode", "DivFloor", "Even, RoundUp or Floor"));
    }
    let Rows { rows, cols, .. } = x.rows(OP, "x")?;
    if cols % 2 == 1 {
        return Err(Error::shape(OP, "x", x.shape(), "an even number of columns"));
    }
    let mut problem = RowProblem::new(OP, "x", rows, cols, DType::E8M0)?.in_steps_of(BLOCK);
    problem.tensor("x", &x)?;
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last /= 2;
    }
    problem.shaped("q", &q, &shape, "shape of x, two columns to a byte")?;
    let blocks = cols.div_ceil(BLOCK);
    let shuffled = options.scale_layout == ScaleLayout::Shuffled950;
    if shuffled {
        let want = shuffled_len(rows, blocks)
            .ok_or_else(|| Error::too_large(OP, "x", format!("{rows} rows"), u32::MAX.into()))?;
        if scale.shape() != [want] {
            let why = format!("[{want}] (shuffled scales of {rows} rows of {blocks} blocks)");
            return Err(Error::shape(OP, "scale", scale.shape(), why));
        }
        scale.expect_contiguous(OP, "scale")?;
    } else {
        check_scales(OP, &scale, rows, blocks)?;
        let axis = if options.scale_layout == ScaleLayout::RowMajor { 1 } else { 0 };
        if scale.shape()[axis] > 1 && scale.strides()[axis] != 1 {
            let want = format!("unit stride on axis {axis} ({:?})", options.scale_layout);
            return Err(Error::stride(OP, "scale", scale.layout(), want));
        }
    }
    check_overlap(OP, ("x", &x), ("q", &q), Aliasing::Disjoint)?;
    check_overlap(OP, ("x", &x), ("scale", &scale), Aliasing::Disjoint)?;
    check_overlap(OP, ("q", &q), ("scale", &scale), Aliasing::Disjoint)?;
    if rows == 0 {
        return Ok(());
    }
    let rule = BlockRule::fp4(options.mode, 0);
    launch(OP, stream, &problem, x, q, scale, rule, 0, shuffled)
}

/// Launches the kernel of rows for elements of any kind (`mx::Element`), with scales `[rows, blocks]`.
#[expect(clippy::too_many_arguments, reason = "those of a launch")]
pub(crate) fn launch_rows<T: Float, E: MxElement>(
    op: &'static str,
    stream: &Stream,
    problem: &RowProblem,
    x: TensorView<T>,
    q: TensorViewMut<E>,
    scale: TensorViewMut<E8M0>,
    rule: BlockRule,
    element: u32,
) -> Result<()> {
    launch(op, stream, problem, x, q, scale, rule, element, false)
}

/// The callers have checked that every row of x is as long as those of q say, and that each block of each row has a scale.
#[expect(clippy::too_many_arguments, reason = "those of a launch")]
fn launch<T: Float, E: MxElement>(
    op: &'static str,
    stream: &Stream,
    problem: &RowProblem,
    x: TensorView<T>,
    mut q: TensorViewMut<E>,
    mut scale: TensorViewMut<E8M0>,
    rule: BlockRule,
    element: u32,
    shuffled: bool,
) -> Result<()> {
    let plan = SPREAD.plan(problem, stream, &kernels::MX_QUANT, T::DTYPE, &MX)?;
    let mut launch = stream.launch(op, &plan.kernel);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(op, "x")?)?,
        q: launch.output("q", &mut q.reborrow().flatten_rows(op, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        rule,
        element,
        shuffled: shuffled.into(),
        batch: plan.batch,
    };
    // SAFETY: what the callers have checked is what the kernel accesses, whatever the grid; the loader matches the parameters
    // to the kernel.
    unsafe { launch.run(plan.config, &params) }
}
