//! `downcast_to_mxfp` and `upcast_from_mxfp`: the safe functions of `hip/mxfp.hip`, and of `hip/mx_quant.hip` along the last
//! axis.

use crate::kernels::mxfp::{Params, Strides};
use crate::launch_tiles::{grid, tiles};
use crate::mx_quant::{BLOCK, MxFormat, launch};
use bytemuck::Zeroable;
use hk_core::plan::rows::RowProblem;
use hk_core::quant::{BlockRule, BlockScale, MxElement};
use hk_core::{
    Aliasing, DType, E8M0, Element, Error, Float, GlobalLayout, KernelRef, LaunchConfig, Layout, Result,
    Stream, TensorView, TensorViewMut, check_overlap,
};

/// Columns per lane where rows are 16-byte aligned.
const COLUMNS: usize = 8;

/// Columns per lane and tile of `up_rows` in `hip/mxfp.hip`.
const LANE_COLUMNS: usize = 32;

/// bf16, f16; of each, [`COLUMNS`] columns per lane, one.
static DOWN: [[KernelRef<Params>; 2]; 2] = [
    [Params::kernel("mxfp_down_bf16_8"), Params::kernel("mxfp_down_bf16_1")],
    [Params::kernel("mxfp_down_f16_8"), Params::kernel("mxfp_down_f16_1")],
];
static UP: [[KernelRef<Params>; 2]; 2] = [
    [Params::kernel("mxfp_up_bf16_8"), Params::kernel("mxfp_up_bf16_1")],
    [Params::kernel("mxfp_up_f16_8"), Params::kernel("mxfp_up_f16_1")],
];
/// Along the last axis: bf16, f16; of each, vectorized, scalar.
static UP_ROWS: [[KernelRef<Params>; 2]; 2] = [
    [Params::kernel("mxfp_up_bf16_long"), Params::kernel("mxfp_up_bf16_long_scalar")],
    [Params::kernel("mxfp_up_f16_long"), Params::kernel("mxfp_up_f16_long_scalar")],
];

/// `mx::Element` of `hip/mx.h`.
fn element_kind<E: MxElement>(away: bool) -> u32 {
    match E::DTYPE {
        DType::Fp4x2 => u32::from(away),
        DType::Fp8E4M3 => 2,
        _ => 3,
    }
}

/// A tensor as `[outer, length, inner]`.
#[derive(Debug, Clone, Copy)]
struct Collapsed {
    outer: usize,
    length: usize,
    inner: usize,
    at: Strides,
}

impl Collapsed {
    fn new(op: &'static str, arg: &'static str, layout: &Layout, axis: usize) -> Result<Self> {
        // Axes of length 1 have any stride; the others collapse into one.
        let one = |range: std::ops::Range<usize>| -> Result<(usize, usize)> {
            let (mut len, mut stride) = (1, 0);
            for i in range.rev() {
                let (n, s) = (layout.shape()[i], layout.strides()[i]);
                if n == 1 {
                    continue;
                }
                if len == 1 {
                    stride = s;
                } else if s != len * stride {
                    let want = "one stride over the axes before `axis`, and one over those after it";
                    return Err(Error::stride(op, arg, layout, want));
                }
                len *= n;
            }
            Ok((len, stride))
        };
        let (outer, outer_stride) = one(0..axis)?;
        let (inner, inner_stride) = one(axis + 1..layout.rank())?;
        let at = Strides {
            outer: outer_stride as i64,
            along: layout.strides()[axis] as i64,
            inner: if inner == 1 { 1 } else { inner_stride as i64 },
        };
        Ok(Self { outer, length: layout.shape()[axis], inner, at })
    }

    /// Whether rows of elements of `bytes` have unit stride and are aligned to `to` bytes.
    fn rows_aligned(&self, to: usize, addr: u64, bytes: usize) -> bool {
        let steps = [(self.outer, self.at.outer), (self.length, self.at.along)];
        self.at.inner == 1
            && addr.is_multiple_of(to as u64)
            && steps.iter().all(|&(n, step)| n == 1 || (step as usize * bytes).is_multiple_of(to))
    }
}

/// Checks the shapes of a tensor, its elements and its scales. Returns the axis.
fn check<T: Float, E: MxElement>(
    op: &'static str,
    (x_name, x): (&'static str, &Layout),
    q: &Layout,
    scale: &Layout,
    axis: isize,
) -> Result<usize> {
    if T::DTYPE == DType::F32 {
        return Err(Error::dtype(op, x_name, T::DTYPE, "bf16, f16"));
    }
    let rank = x.rank();
    let resolved = if axis < 0 { axis + rank as isize } else { axis };
    let Some(at) = usize::try_from(resolved).ok().filter(|&a| a < rank) else {
        return Err(Error::argument(op, "axis", axis, format!("an axis of {x_name}, which has {rank}")));
    };
    let length = x.shape()[at];
    if length == 0 {
        return Err(Error::empty(op, x_name, at, x.shape()));
    }
    if length > i32::MAX as usize {
        return Err(Error::too_large(op, x_name, format!("{length} along the axis"), i32::MAX as u64));
    }
    if !length.is_multiple_of(E::PER_ELEMENT) {
        return Err(Error::shape(op, x_name, x.shape(), format!("an even length of axis {at}")));
    }
    let mut want = x.shape().to_vec();
    want[at] = length / E::PER_ELEMENT;
    if q.shape() != want {
        let why = format!("{want:?} (elements of {x_name})");
        return Err(Error::shape(op, "q", q.shape(), why));
    }
    want[at] = length.div_ceil(BLOCK);
    if scale.shape() != want {
        let why = format!("{want:?} (blocks of 32 of {x_name})");
        return Err(Error::shape(op, "scale", scale.shape(), why));
    }
    Ok(at)
}

/// A launch of the kernels along any axis.
struct Blocks {
    x: Collapsed,
    q: Collapsed,
    scale: Collapsed,
    /// Columns per lane.
    columns: usize,
    units: u32,
}

impl Blocks {
    fn new(
        op: &'static str,
        x_name: &'static str,
        x: (&Layout, u64),
        q: (&Layout, u64),
        scale: (&Layout, u64),
        axis: usize,
    ) -> Result<Self> {
        let (x_addr, q_addr, scale_addr) = (x.1, q.1, scale.1);
        let x = Collapsed::new(op, x_name, x.0, axis)?;
        let q = Collapsed::new(op, "q", q.0, axis)?;
        let scale = Collapsed::new(op, "scale", scale.0, axis)?;
        let full = x.length.is_multiple_of(BLOCK) && x.inner.is_multiple_of(2 * COLUMNS);
        let aligned = x.rows_aligned(16, x_addr, 2)
            && q.rows_aligned(16, q_addr, 1)
            && scale.rows_aligned(8, scale_addr, 1);
        let columns = if full && aligned { COLUMNS } else { 1 };
        let units = x.outer.saturating_mul(scale.length).saturating_mul(x.inner / columns);
        let units = u32::try_from(units)
            .map_err(|_| Error::too_large(op, x_name, format!("{units} blocks"), u32::MAX.into()))?;
        Ok(Self { x, q, scale, columns, units })
    }

    fn config(&self, stream: &Stream) -> LaunchConfig {
        let wave = stream.device().info().wave_size as usize;
        grid(stream, (self.units as usize).div_ceil(wave), 8)
    }

    fn params(&self, rule: BlockRule, element: u32, [x, q, scale]: [GlobalLayout; 3]) -> Params {
        Params {
            x,
            q,
            scale,
            x_at: self.x.at,
            q_at: self.q.at,
            scale_at: self.scale.at,
            rule,
            element,
            length: self.x.length as u32,
            inner: self.x.inner as u32,
            blocks: self.scale.length as u32,
            units: self.units,
        }
    }
}

/// Quantizes a tensor to MX blocks of 32 along an axis: `q = round(x / scale)`, `scale` a power of two.
///
/// | arg     | shape                                   | dtype                              | layout                                                       |
/// |---------|-----------------------------------------|------------------------------------|--------------------------------------------------------------|
/// | `x`     | any; up to 4 axes unless `axis` is last | `bf16`, `f16`                      | one stride over the axes before `axis`, one over those after |
/// | `q`     | as `x`; half of `axis` if fp4           | pairs of fp4, `fp8e4m3`, `fp8e5m2` | as `x`; the even element in the low nibble                   |
/// | `scale` | as `x`; `ceil(length / 32)` on `axis`   | `e8m0`                             | as `x`                                                       |
///
/// A negative `axis` counts from the end. `mode` is [`BlockScale::RoundUp`], which never clips, or [`BlockScale::DivFloor`]. Elements
/// round to nearest, ties of fp4 away from zero, ties of fp8 to even, and saturate. A block of zeros has the scale byte 0, others at
/// least 1; a block with a NaN or an infinity has the scale NaN (255) and zeros. fp8 is the OCP's; the bytes are the same on every
/// target.
///
/// The bytes of a block depend on that block alone. No output may alias another tensor. Returns when the launch is queued. No elements:
/// nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape) (an odd length with fp4 too), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor
/// breaks the table, [`DType`](Error::DType) for `f32`, [`Argument`](Error::Argument) for an invalid `axis` or another `mode`,
/// [`Empty`](Error::Empty) for an axis of length 0, [`Overlap`](Error::Overlap) if an output shares memory with another
/// tensor, [`TooLarge`](Error::TooLarge) beyond 2^31 - 1 elements along the axis or 2^32 - 1 blocks,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: OCP Microscaling Formats (MX) 1.0.
pub fn downcast_to_mxfp<T: Float, E: MxElement>(
    stream: &Stream,
    x: TensorView<T>,
    mut q: TensorViewMut<E>,
    mut scale: TensorViewMut<E8M0>,
    axis: isize,
    mode: BlockScale,
) -> Result<()> {
    const OP: &str = "downcast_to_mxfp";
    if !matches!(mode, BlockScale::RoundUp | BlockScale::DivFloor) {
        return Err(Error::argument(OP, "mode", format!("{mode:?}"), "RoundUp or DivFloor"));
    }
    let at = check::<T, E>(OP, ("x", x.layout()), q.layout(), scale.layout(), axis)?;
    x.expect_aligned(OP, "x", size_of::<T>() as u64)?;
    check_overlap(OP, ("x", &x), ("q", &q), Aliasing::Disjoint)?;
    check_overlap(OP, ("x", &x), ("scale", &scale), Aliasing::Disjoint)?;
    check_overlap(OP, ("q", &q), ("scale", &scale), Aliasing::Disjoint)?;
    if x.numel() == 0 {
        return Ok(());
    }
    let (max, mantissa_bits) = E::RANGE;
    let rule = BlockRule::new(mode, max, mantissa_bits, 1);
    let element = element_kind::<E>(true);

    let rows = (x.rows(OP, "x"), q.rows(OP, "q"), scale.rows(OP, "scale"));
    if let (true, (Ok(rows), Ok(_), Ok(_))) = (at + 1 == x.shape().len(), rows) {
        let mut problem =
            RowProblem::new(OP, "x", rows.rows, rows.cols, E8M0::DTYPE)?.with_vector_width(BLOCK);
        problem.tensor("x", &x)?;
        problem.tensor("q", &q)?;
        let scale = scale.flatten_rows(OP, "scale")?;
        return launch(OP, stream, &problem, x, q, scale, MxFormat { rule, element, shuffled: false });
    }
    let blocks = Blocks::new(
        OP,
        "x",
        (x.layout(), x.addr()),
        (q.layout(), q.addr()),
        (scale.layout(), scale.addr()),
        at,
    )?;
    let kernel = DOWN[usize::from(T::DTYPE != DType::Bf16)][usize::from(blocks.columns != COLUMNS)];
    let kernel = stream.kernel(kernel)?;
    let mut launch = stream.launch(OP);
    let tensors = [launch.input("x", &x)?, launch.output("q", &mut q)?, launch.output("scale", &mut scale)?];
    // SAFETY: the checks above make x, q and scale of one shape except along the axis, where q has the elements and scale the
    // blocks of x. The kernel accesses no more than that on any grid, with the strides of each.
    unsafe { launch.run(&kernel, blocks.config(stream), &blocks.params(rule, element, tensors)) }
}

/// Dequantizes MX blocks of 32 along an axis: `out = round(q * scale)`, rounded once, to nearest even.
///
/// | arg     | shape                                   | dtype                              | layout                                                       |
/// |---------|-----------------------------------------|------------------------------------|--------------------------------------------------------------|
/// | `q`     | as `out`; half of `axis` if fp4         | pairs of fp4, `fp8e4m3`, `fp8e5m2` | as `out`; the even element in the low nibble                 |
/// | `scale` | as `out`; `ceil(length / 32)` on `axis` | `e8m0`                             | as `out`                                                     |
/// | `out`   | any; up to 4 axes unless `axis` is last | `bf16`, `f16`                      | one stride over the axes before `axis`, one over those after |
///
/// A negative `axis` counts from the end. The scale byte 0 is 2^-127, 255 is NaN. NaN and infinities of fp8 stay; values beyond the
/// range of `out` become infinities. `out` may not alias an input. Returns when the launch is queued. No elements: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape) (an odd length with fp4 too), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor
/// breaks the table, [`DType`](Error::DType) for `f32`, [`Argument`](Error::Argument) for an invalid `axis`,
/// [`Empty`](Error::Empty) for an axis of length 0, [`Overlap`](Error::Overlap) if an output shares memory with another
/// tensor, [`TooLarge`](Error::TooLarge) beyond 2^31 - 1 elements along the axis or 2^32 - 1 blocks,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: OCP Microscaling Formats (MX) 1.0.
pub fn upcast_from_mxfp<T: Float, E: MxElement>(
    stream: &Stream,
    q: TensorView<E>,
    scale: TensorView<E8M0>,
    mut out: TensorViewMut<T>,
    axis: isize,
) -> Result<()> {
    const OP: &str = "upcast_from_mxfp";
    let at = check::<T, E>(OP, ("out", out.layout()), q.layout(), scale.layout(), axis)?;
    out.expect_aligned(OP, "out", size_of::<T>() as u64)?;
    check_overlap(OP, ("q", &q), ("out", &out), Aliasing::Disjoint)?;
    check_overlap(OP, ("scale", &scale), ("out", &out), Aliasing::Disjoint)?;
    if out.numel() == 0 {
        return Ok(());
    }
    let element = element_kind::<E>(false);
    let rule = BlockRule::fp4(BlockScale::Even, 0); // not used
    let dtype = usize::from(T::DTYPE != DType::Bf16);

    let rows = (out.rows(OP, "out"), q.rows(OP, "q"), scale.rows(OP, "scale"));
    if let (true, (Ok(rows), Ok(_), Ok(scales))) = (at + 1 == out.shape().len(), rows) {
        let mut problem =
            RowProblem::new(OP, "out", rows.rows, rows.cols, E8M0::DTYPE)?.with_vector_width(BLOCK);
        problem.tensor("out", &out)?;
        problem.tensor("q", &q)?;
        let kernel = stream.kernel(UP_ROWS[dtype][usize::from(!problem.can_vectorize())])?;
        let wave = stream.device().info().wave_size as usize;
        let grid = grid(stream, tiles(&problem, wave * LANE_COLUMNS), 16);
        let mut launch = stream.launch(OP);
        let at = Strides { outer: scales.row_stride as i64, along: 1, inner: 0 };
        let params = Params {
            x: launch.output("out", &mut out.reborrow().flatten_rows(OP, "out")?)?,
            q: launch.input("q", &q.flatten_rows(OP, "q")?)?,
            scale: launch.input("scale", &scale.flatten_rows(OP, "scale")?)?,
            x_at: Strides::zeroed(),
            q_at: Strides::zeroed(),
            scale_at: at,
            rule,
            element,
            length: rows.cols as u32,
            inner: 1,
            blocks: scales.cols as u32,
            units: 0,
        };
        // SAFETY: the checks above make every row of out `length` long, give q its elements, and each block of each row a
        // scale. The kernel accesses no more than that on any grid.
        return unsafe { launch.run(&kernel, grid, &params) };
    }
    let blocks = Blocks::new(
        OP,
        "out",
        (out.layout(), out.addr()),
        (q.layout(), q.addr()),
        (scale.layout(), scale.addr()),
        at,
    )?;
    let kernel = stream.kernel(UP[dtype][usize::from(blocks.columns != COLUMNS)])?;
    let mut launch = stream.launch(OP);
    let tensors = [launch.output("out", &mut out)?, launch.input("q", &q)?, launch.input("scale", &scale)?];
    // SAFETY: as in `downcast_to_mxfp`.
    unsafe { launch.run(&kernel, blocks.config(stream), &blocks.params(rule, element, tensors)) }
}
