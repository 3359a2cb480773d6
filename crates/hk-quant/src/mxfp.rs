//! `downcast_to_mxfp` and `upcast_from_mxfp`: the safe functions of `hip/mxfp.hip`, and of `hip/mx_quant.hip` along the last
//! axis.

use crate::kernels;
use crate::launch_tiles::{grid, tiles};
use crate::mx_quant::{BLOCK, launch_rows};
use bytemuck::{Pod, Zeroable};
use hk_core::quant::{BlockRule, BlockScale, MxElement};
use hk_core::rowwise::RowProblem;
use hk_core::{
    Aliasing, DType, E8M0, Element, Error, Float, GlobalLayout, LaunchConfig, Layout, Result, Stream,
    TensorView, TensorViewMut, check_overlap,
};

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Strides {
    outer: i64,
    along: i64,
    inner: i64,
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    q: GlobalLayout,
    scale: GlobalLayout,
    x_at: Strides,
    q_at: Strides,
    scale_at: Strides,
    rule: BlockRule,
    element: u32,
    length: u32,
    inner: u32,
    blocks: u32,
    units: u32,
}

/// Columns of a block that a lane has where rows are on 16 bytes; another lane has their neighbours.
const COLUMNS: usize = 8;

/// Columns of a lane's part of a tile of `up_rows`.
const LANE_COLUMNS: usize = 32;

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
        // Axes of length 1 are free; the others have to follow each other.
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

    /// Whether each row, of elements of `bytes` each, begins on a multiple of `to` bytes, its elements side by side.
    fn rows_on(&self, to: usize, addr: u64, bytes: usize) -> bool {
        let steps = [(self.outer, self.at.outer), (self.length, self.at.along)];
        self.at.inner == 1
            && addr.is_multiple_of(to as u64)
            && steps.iter().all(|&(n, step)| n == 1 || (step as usize * bytes).is_multiple_of(to))
    }
}

/// Checks the shapes of a tensor, its elements and its scales; the axis.
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

/// What the kernels along any axis are launched with.
struct Blocks {
    x: Collapsed,
    q: Collapsed,
    scale: Collapsed,
    /// Columns of a block that a lane has.
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
        let whole = x.length.is_multiple_of(BLOCK) && x.inner.is_multiple_of(2 * COLUMNS);
        let aligned = x.rows_on(16, x_addr, 2) && q.rows_on(16, q_addr, 1) && scale.rows_on(8, scale_addr, 1);
        let columns = if whole && aligned { COLUMNS } else { 1 };
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
/// | arg     | shape                              | dtype                                | layout                          |
/// |---------|------------------------------------|--------------------------------------|---------------------------------|
/// | `x`     | any, at most 4 axes unless `axis` is the last | `bf16`, `f16`             | one stride over the axes before `axis`, one over those after |
/// | `q`     | as `x`, half of `axis` if pairs    | pairs of fp4, `fp8e4m3`, `fp8e5m2`   | likewise                        |
/// | `scale` | as `x`, `ceil(length / 32)` on `axis` | `e8m0`                            | likewise                        |
///
/// `axis` counts from the end if negative. `mode` is [`BlockScale::RoundUp`], which never clips, or
/// [`BlockScale::DivFloor`]. Ties of fp4 go away from zero, those of fp8 to even; what lies beyond the largest value
/// saturates. A block of zeros has the code 0, others have at least 1; a block with a NaN or an infinity has the scale
/// NaN (255) and zeros. fp8 is the OCP's, on every target, and the bytes are the same on each.
///
/// # Errors
/// [`Shape`](Error::Shape) (an odd length with fp4 too), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor
/// breaks the table, [`DType`](Error::DType) for `f32`, [`Argument`](Error::Argument) for an axis that is none and for
/// other modes, [`Empty`](Error::Empty) for an axis without length, [`Overlap`](Error::Overlap) if an output shares memory
/// with another tensor, [`TooLarge`](Error::TooLarge) beyond 2^32 - 1 blocks, [`DeviceMismatch`](Error::DeviceMismatch), and
/// what loading and launching a kernel can answer. Nothing is written then.
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
        let mut problem = RowProblem::new(OP, "x", rows.rows, rows.cols, E8M0::DTYPE)?.in_steps_of(BLOCK);
        problem.tensor("x", &x)?;
        problem.tensor("q", &q)?;
        let scale = scale.flatten_rows(OP, "scale")?;
        return launch_rows(OP, stream, &problem, x, q, scale, rule, element);
    }
    let blocks = Blocks::new(
        OP,
        "x",
        (x.layout(), x.addr()),
        (q.layout(), q.addr()),
        (scale.layout(), scale.addr()),
        at,
    )?;
    let names = match (T::DTYPE, blocks.columns) {
        (DType::Bf16, COLUMNS) => "mxfp_down_bf16_8",
        (DType::Bf16, _) => "mxfp_down_bf16_1",
        (_, COLUMNS) => "mxfp_down_f16_8",
        _ => "mxfp_down_f16_1",
    };
    let kernel = stream.kernel(&kernels::MXFP, names)?;
    let mut launch = stream.launch(OP, &kernel);
    let tensors = [launch.input("x", &x)?, launch.output("q", &mut q)?, launch.output("scale", &mut scale)?];
    // SAFETY: the checks above make x, q and scale of one shape but along the axis, where they are as long as the kernel
    // takes them for; it goes through them by the strides of their own. The loader matches the parameters to the kernel.
    unsafe { launch.run(blocks.config(stream), &blocks.params(rule, element, tensors)) }
}

/// The values of MX blocks: `out = round(q * scale)`, rounded once, to nearest even.
///
/// | arg     | shape                                 | dtype                              | layout                            |
/// |---------|---------------------------------------|------------------------------------|-----------------------------------|
/// | `q`     | as `out`, half of `axis` if pairs     | pairs of fp4, `fp8e4m3`, `fp8e5m2` | as in [`downcast_to_mxfp`]        |
/// | `scale` | as `out`, `ceil(length / 32)` on `axis` | `e8m0`                           | likewise                          |
/// | `out`   | any, at most 4 axes unless `axis` is the last | `bf16`, `f16`              | likewise                          |
///
/// The scale code 0 is 2^-127, 255 NaN. NaN and infinities of fp8 stay; what lies beyond the largest value of `out` becomes
/// infinity.
///
/// # Errors
/// As [`downcast_to_mxfp`].
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
    let is_bf16 = T::DTYPE == DType::Bf16;

    let rows = (out.rows(OP, "out"), q.rows(OP, "q"), scale.rows(OP, "scale"));
    if let (true, (Ok(rows), Ok(_), Ok(scales))) = (at + 1 == out.shape().len(), rows) {
        let mut problem = RowProblem::new(OP, "out", rows.rows, rows.cols, E8M0::DTYPE)?.in_steps_of(BLOCK);
        problem.tensor("out", &out)?;
        problem.tensor("q", &q)?;
        let name = match (problem.by_vectors(), is_bf16) {
            (true, true) => "mxfp_up_bf16_long",
            (true, false) => "mxfp_up_f16_long",
            (false, true) => "mxfp_up_bf16_long_elements",
            (false, false) => "mxfp_up_f16_long_elements",
        };
        let kernel = stream.kernel(&kernels::MXFP, name)?;
        let wave = stream.device().info().wave_size as usize;
        let grid = grid(stream, tiles(&problem, wave * LANE_COLUMNS), 16);
        let mut launch = stream.launch(OP, &kernel);
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
        // SAFETY: the checks above make every row of out `length` long, of q as long as its elements, and give each block
        // of each row a scale, which is what the kernel accesses, whatever the grid; the loader matches the parameters.
        return unsafe { launch.run(grid, &params) };
    }
    let blocks = Blocks::new(
        OP,
        "out",
        (out.layout(), out.addr()),
        (q.layout(), q.addr()),
        (scale.layout(), scale.addr()),
        at,
    )?;
    let name = match (is_bf16, blocks.columns) {
        (true, COLUMNS) => "mxfp_up_bf16_8",
        (true, _) => "mxfp_up_bf16_1",
        (false, COLUMNS) => "mxfp_up_f16_8",
        _ => "mxfp_up_f16_1",
    };
    let kernel = stream.kernel(&kernels::MXFP, name)?;
    let mut launch = stream.launch(OP, &kernel);
    let tensors = [launch.output("out", &mut out)?, launch.input("q", &q)?, launch.input("scale", &scale)?];
    // SAFETY: as in `downcast_to_mxfp`.
    unsafe { launch.run(blocks.config(stream), &blocks.params(rule, element, tensors)) }
}
