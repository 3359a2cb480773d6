//! The safe functions of `hip/scales.hip`.

use crate::kernels;
use crate::launch_tiles::grid;
use bytemuck::{Pod, Zeroable};
use hk_core::quant::shuffled_len;
use hk_core::{
    Aliasing, E8M0, Error, GlobalLayout, Kernel, LaunchConfig, Layout, Result, Stream, TensorView,
    TensorViewMut, check_overlap,
};
use std::sync::Arc;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    plain: GlobalLayout,
    shuffled: GlobalLayout,
    words: u64,
    rows: u32,
    blocks: u32,
    strip_lanes: u32,
    pad: u32,
}

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

/// Blocks of a row that a lane takes at a time, by vectors.
const PIECE: usize = 16;

/// The kernel, by vectors if the scales can be moved so, its grid and its parameters but for the tensors.
fn plan(
    stream: &Stream,
    [by_vectors, by_elements]: [&'static str; 2],
    [rows, blocks, len]: [usize; 3],
    plain: &Layout,
    aligned: bool,
) -> Result<(Arc<Kernel>, LaunchConfig, Params)> {
    // Four lanes share a strip of 32 rows; so many fours lie side by side in it.
    let all_fours = stream.device().info().wave_size as usize / 4;
    let fours = (blocks / PIECE).next_power_of_two().min(all_fours);
    let (name, waves) = if aligned && plain.strides()[1] == 1 && blocks.is_multiple_of(PIECE) {
        let strips = rows.div_ceil(256) * 8;
        (by_vectors, strips.div_ceil(all_fours / fours) * (blocks / PIECE).div_ceil(fours))
    } else {
        (by_elements, (len / 4).div_ceil(64))
    };
    let params = Params {
        plain: GlobalLayout::ABSENT,
        shuffled: GlobalLayout::ABSENT,
        words: (len / 4) as u64,
        rows: rows as u32,
        blocks: blocks as u32,
        strip_lanes: fours.ilog2(),
        pad: 0,
    };
    Ok((stream.kernel(&kernels::SCALES, name)?, grid(stream, waves, 16), params))
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
/// [`Overlap`](Error::Overlap) if the tensors share memory, [`TooLarge`](Error::TooLarge) beyond 2^32 - 1 rows or
/// blocks,
/// [`DeviceMismatch`](Error::DeviceMismatch), and what loading and launching a kernel can answer.
pub fn shuffle_scales(
    stream: &Stream,
    plain: TensorView<E8M0>,
    mut shuffled: TensorViewMut<E8M0>,
) -> Result<()> {
    const OP: &str = "shuffle_scales";
    let sizes = check(OP, plain.layout(), shuffled.layout())?;
    check_overlap(OP, ("plain", &plain), ("shuffled", &shuffled), Aliasing::Disjoint)?;
    if sizes[0] == 0 {
        return Ok(());
    }
    let aligned = plain.rows_aligned(16) && shuffled.is_aligned(16);
    let names = ["scales_shuffle", "scales_shuffle_elements"];
    let (kernel, config, params) = plan(stream, names, sizes, plain.layout(), aligned)?;
    let mut launch = stream.launch(OP, &kernel);
    let params = Params {
        plain: launch.input("plain", &plain)?,
        shuffled: launch.output("shuffled", &mut shuffled)?,
        ..params
    };
    // SAFETY: the check gives `shuffled` the bytes of `words`, and the kernel accesses `rows` by `blocks` of `plain`, by
    // vectors only what is aligned; the loader matches the parameters to the kernel.
    unsafe { launch.run(config, &params) }
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
    let sizes = check(OP, plain.layout(), shuffled.layout())?;
    check_overlap(OP, ("shuffled", &shuffled), ("plain", &plain), Aliasing::Disjoint)?;
    if sizes[0] == 0 {
        return Ok(());
    }
    let aligned = plain.rows_aligned(16) && shuffled.is_aligned(16);
    let names = ["scales_unshuffle", "scales_unshuffle_elements"];
    let (kernel, config, params) = plan(stream, names, sizes, plain.layout(), aligned)?;
    let mut launch = stream.launch(OP, &kernel);
    let params = Params {
        plain: launch.output("plain", &mut plain)?,
        shuffled: launch.input("shuffled", &shuffled)?,
        ..params
    };
    // SAFETY: as in `shuffle_scales`.
    unsafe { launch.run(config, &params) }
}
