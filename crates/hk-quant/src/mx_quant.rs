//! The safe functions of `hip/mx_quant.hip`.

use crate::group::check_scales;
use crate::kernels::mx_quant::Params;
use crate::launch_tiles::{self, Kernels, Spread};
use hk_core::plan::rows::RowProblem;
use hk_core::quant::{BlockRule, BlockScale, MxElement, ScaleLayout, shuffled_len};
use hk_core::{
    Aliasing, DType, E8M0, Error, Float, Fp4x2, Result, Rows, Stream, TensorView, TensorViewMut,
    check_overlap,
};

/// A block per lane.
const SPREAD: Spread = Spread { columns: BLOCK, rows: 1, chunks: 1 };

static KERNELS: Kernels<Params> = launch_tiles::kernels!(Params, "mx_quant");

/// Columns per scale.
pub(crate) const BLOCK: usize = 32;

/// Options of [`dynamic_mxfp4_quant`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MxOptions {
    /// Rule of the scale from the block's largest magnitude: `Even`, `RoundUp` or `Floor`. Default: `Even`.
    pub mode: BlockScale,
    /// Layout of the scales. Default: row-major.
    pub scale_layout: ScaleLayout,
}

impl Default for MxOptions {
    fn default() -> Self {
        Self { mode: BlockScale::Even, scale_layout: ScaleLayout::RowMajor }
    }
}

/// Quantizes rows to MX fp4: blocks of 32 columns with a power-of-two scale each, `q = round(x / scale)`.
///
/// | arg     | shape            | dtype                | layout                                                           |
/// |---------|------------------|----------------------|------------------------------------------------------------------|
/// | `x`     | `[.., cols]`     | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride over the rest; `cols` even |
/// | `q`     | `[.., cols / 2]` | pairs of fp4         | as `x`; the even column in the low nibble                        |
/// | `scale` | `[rows, blocks]` | `e8m0`               | row-major or column-major, as `options.scale_layout` says        |
/// |         | `[n]`            |                      | [`ScaleLayout::Shuffled950`], `n` from [`shuffled_len`]          |
///
/// There are `ceil(cols / 32)` blocks in a row; the last may be short. `options.mode` derives the scale from the largest magnitude of
/// the block. Elements round to nearest even and saturate at 6; zeros keep their sign. A block of zeros has the scale byte 0 (2^-127).
/// A block with a NaN or an infinity has the scale NaN (255) and zeros. Padding of shuffled scales is 127 (1.0). The bytes are the
/// same on every target.
///
/// Batch-invariant: the bytes of a block depend on that block alone. No output may alias another tensor. Returns when the launch is
/// queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape) (an odd number of columns too), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor
/// breaks the table, [`Argument`](Error::Argument) for the mode `DivFloor`, [`Empty`](Error::Empty) for zero columns,
/// [`Overlap`](Error::Overlap) if an output shares memory with another tensor, [`TooLarge`](Error::TooLarge) beyond
/// 2^29 - 1 columns or 2^32 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a
/// kernel. Nothing is written then.
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
    let mut problem = RowProblem::new(OP, "x", rows, cols, DType::E8M0)?.with_vector_width(BLOCK);
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
    let format = MxFormat { rule: BlockRule::fp4(options.mode, 0), element: 0, shuffled };
    launch(OP, stream, &problem, x, q, scale, format)
}

/// How blocks are quantized.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MxFormat {
    pub rule: BlockRule,
    /// `mx::Element` of `hip/mx.h`.
    pub element: u32,
    /// Whether scales are in the order of [`ScaleLayout::Shuffled950`].
    pub shuffled: bool,
}

/// Launches the kernel along the last axis. The callers have checked that rows of x and q have the same number of columns, and
/// that each block of each row has a scale.
pub(crate) fn launch<T: Float, E: MxElement>(
    op: &'static str,
    stream: &Stream,
    problem: &RowProblem,
    x: TensorView<T>,
    mut q: TensorViewMut<E>,
    mut scale: TensorViewMut<E8M0>,
    format: MxFormat,
) -> Result<()> {
    let plan = SPREAD.plan(problem, stream, T::DTYPE, &KERNELS)?;
    let mut launch = stream.launch(op);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(op, "x")?)?,
        q: launch.output("q", &mut q.reborrow().flatten_rows(op, "q")?)?,
        scale: launch.output("scale", &mut scale)?,
        rule: format.rule,
        element: format.element,
        shuffled: format.shuffled.into(),
        batch: plan.batch,
    };
    // SAFETY: the kernel accesses no more than the callers have checked, on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}
