//! The safe functions of `hip/scales.hip`.

use crate::kernels;
use bytemuck::{Pod, Zeroable};
use hk_core::quant::shuffled_len;
use hk_core::{
    Aliasing, E8M0, Error, GlobalLayout, LaunchConfig, Layout, Result, Stream, TensorView, TensorViewMut,
    check_overlap,
};

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    plain: GlobalLayout,
    shuffled: GlobalLayout,
    words: u64,
    rows: u32,
    blocks: u32,
}

/// Threads of a block.
const THREADS: usize = 256;

/// Checks both orders of the scales of a matrix; rows, blocks and the length of the shuffled order.
fn check(op: &'static str, plain: &Layout, shuffled: &Layout) -> Result<[usize; 3]> {
    let [rows, blocks] = plain.dims(op, "plain")?;
    if blocks == 0 {
        return Err(Error::empty(op, "plain", 1, plain.shape()));
    }
    let limit = u32::MAX as usize;
    if rows > limit || blocks > limit {
        return Err(Error::too_large(op, "plain", format!("shape {:?}", plain.shape()), limit as u64));
    }
    let len = shuffled_len(rows, blocks)
        .ok_or_else(|| Error::too_large(op, "plain", format!("shape {:?}", plain.shape()), limit as u64))?;
    if shuffled.shape() != [len] {
        let want = format!("[{len}] (shuffled scales of {rows} rows of {blocks} blocks)");
        return Err(Error::shape(op, "shuffled", shuffled.shape(), want));
    }
    shuffled.expect_contiguous(op, "shuffled")?;
    Ok([rows, blocks, len])
}

fn grid(stream: &Stream, len: usize) -> LaunchConfig {
    let most = stream.device().info().compute_units as usize * 4;
    LaunchConfig::grid_1d((len / 4).div_ceil(THREADS).min(most.max(1)))
}

/// Writes the scales of MX blocks in the order that gfx950's scaled matrix instructions read
/// ([`ScaleLayout::Shuffled950`](hk_core::quant::ScaleLayout::Shuffled950)); padding becomes 127 (1.0).
///
/// | arg        | shape            | dtype  | layout     |
/// |------------|------------------|--------|------------|
/// | `plain`    | `[rows, blocks]` | `e8m0` | any        |
/// | `shuffled` | `[n]`            | `e8m0` | contiguous |
///
/// `n` is [`shuffled_len`]`(rows, blocks)`.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride) if a tensor breaks the table, [`Empty`](Error::Empty) for zero blocks,
/// [`Overlap`](Error::Overlap) if the tensors share memory, [`TooLarge`](Error::TooLarge) beyond 2^32 - 1 rows,
/// [`DeviceMismatch`](Error::DeviceMismatch), and what loading and launching a kernel can answer.
pub fn shuffle_scales(
    stream: &Stream,
    plain: TensorView<E8M0>,
    mut shuffled: TensorViewMut<E8M0>,
) -> Result<()> {
    const OP: &str = "shuffle_scales";
    let [rows, blocks, len] = check(OP, plain.layout(), shuffled.layout())?;
    check_overlap(OP, ("plain", &plain), ("shuffled", &shuffled), Aliasing::Disjoint)?;
    if rows == 0 {
        return Ok(());
    }
    let kernel = stream.kernel(&kernels::SCALES, "scales_shuffle")?;
    let mut launch = stream.launch(OP, &kernel);
    let params = Params {
        plain: launch.input("plain", &plain)?,
        shuffled: launch.output("shuffled", &mut shuffled)?,
        words: (len / 4) as u64,
        rows: rows as u32,
        blocks: blocks as u32,
    };
    // SAFETY: the check gives `shuffled` the bytes of `words`, and the kernel reads `rows` by `blocks` of `plain`; the
    // loader matches the parameters to the kernel.
    unsafe { launch.run(grid(stream, len), &params) }
}

/// The inverse of [`shuffle_scales`]: arguments and errors are the same, with `shuffled` read and `plain` written.
///
/// # Errors
/// As [`shuffle_scales`].
pub fn unshuffle_scales(
    stream: &Stream,
    shuffled: TensorView<E8M0>,
    mut plain: TensorViewMut<E8M0>,
) -> Result<()> {
    const OP: &str = "unshuffle_scales";
    let [rows, blocks, len] = check(OP, plain.layout(), shuffled.layout())?;
    check_overlap(OP, ("shuffled", &shuffled), ("plain", &plain), Aliasing::Disjoint)?;
    if rows == 0 {
        return Ok(());
    }
    let kernel = stream.kernel(&kernels::SCALES, "scales_unshuffle")?;
    let mut launch = stream.launch(OP, &kernel);
    let params = Params {
        plain: launch.output("plain", &mut plain)?,
        shuffled: launch.input("shuffled", &shuffled)?,
        words: (len / 4) as u64,
        rows: rows as u32,
        blocks: blocks as u32,
    };
    // SAFETY: as in `shuffle_scales`.
    unsafe { launch.run(grid(stream, len), &params) }
}

/// Writes 127 to the padding of shuffled scales, whose length the caller has checked.
pub(crate) fn write_padding(
    op: &'static str,
    stream: &Stream,
    shuffled: &mut TensorViewMut<E8M0>,
    rows: usize,
    blocks: usize,
) -> Result<()> {
    let len = shuffled.numel();
    let kernel = stream.kernel(&kernels::SCALES, "scales_pad")?;
    let mut launch = stream.launch(op, &kernel);
    let params = Params {
        plain: GlobalLayout::ABSENT,
        shuffled: launch.output("scale", shuffled)?,
        words: (len / 4) as u64,
        rows: rows as u32,
        blocks: blocks as u32,
    };
    // SAFETY: `shuffled` has the bytes of `words`, and `plain` is not accessed; the loader matches the parameters to the
    // kernel.
    unsafe { launch.run(grid(stream, len), &params) }
}
