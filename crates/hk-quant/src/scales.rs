//! The safe functions of `hip/scales.hip`.

use crate::kernels::scales::Params;
use crate::launch_tiles::grid;
use hk_core::quant::shuffled_len;
use hk_core::{
    Aliasing, E8M0, Error, GlobalLayout, Kernel, KernelRef, LaunchConfig, Layout, Result, Stream, TensorView,
    TensorViewMut, check_overlap,
};

/// Vectorized, scalar.
static SHUFFLE: [KernelRef<Params>; 2] =
    [Params::kernel("scales_shuffle"), Params::kernel("scales_shuffle_scalar")];
static UNSHUFFLE: [KernelRef<Params>; 2] =
    [Params::kernel("scales_unshuffle"), Params::kernel("scales_unshuffle_scalar")];

/// Checks the scales in both orders. Returns rows, blocks and the length of the shuffled order.
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

/// Blocks of a row per lane, on the vectorized path.
const PIECE: usize = 16;

/// The kernel, vectorized if layouts allow, its grid, and its parameters without the tensors.
fn plan(
    stream: &Stream,
    [vectorized, scalar]: [KernelRef<Params>; 2],
    [rows, blocks, len]: [usize; 3],
    plain: &Layout,
    aligned: bool,
) -> Result<(Kernel<Params>, LaunchConfig, Params)> {
    // Four lanes cover the rows of a strip of 32; `fours` such groups are adjacent in a strip.
    let all_fours = stream.device().info().wave_size as usize / 4;
    let fours = (blocks / PIECE).next_power_of_two().min(all_fours);
    let (kernel, waves) = if aligned && plain.strides()[1] == 1 && blocks.is_multiple_of(PIECE) {
        let strips = rows.div_ceil(256) * 8;
        (vectorized, strips.div_ceil(all_fours / fours) * (blocks / PIECE).div_ceil(fours))
    } else {
        (scalar, (len / 4).div_ceil(64))
    };
    let params = Params {
        plain: GlobalLayout::ABSENT,
        shuffled: GlobalLayout::ABSENT,
        dwords: (len / 4) as u64,
        rows: rows as u32,
        blocks: blocks as u32,
        strip_lanes: fours.ilog2(),
        pad: 0,
    };
    Ok((stream.kernel(kernel)?, grid(stream, waves, 16), params))
}

/// Writes the scales of MX blocks in the order that gfx950's scaled MFMA reads
/// ([`ScaleLayout::Shuffled950`](hk_core::quant::ScaleLayout::Shuffled950)); padding becomes 127 (1.0).
///
/// | arg        | shape            | dtype  | layout                                           |
/// |------------|------------------|--------|--------------------------------------------------|
/// | `plain`    | `[rows, blocks]` | `e8m0` | any strides                                      |
/// | `shuffled` | `[n]`            | `e8m0` | contiguous; `n` is [`shuffled_len(rows, blocks)`](shuffled_len) |
///
/// The tensors may not share memory. Returns when the launch is queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride) if a tensor breaks the table, [`Empty`](Error::Empty) for zero blocks,
/// [`Overlap`](Error::Overlap) if the tensors share memory, [`TooLarge`](Error::TooLarge) beyond 2^32 - 1 rows or blocks,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
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
    let (kernel, config, params) = plan(stream, SHUFFLE, sizes, plain.layout(), aligned)?;
    let mut launch = stream.launch(OP);
    let params = Params {
        plain: launch.input("plain", &plain)?,
        shuffled: launch.output("shuffled", &mut shuffled)?,
        ..params
    };
    // SAFETY: the check gives `shuffled` the bytes of `dwords`, and `plain` is `rows` by `blocks`. The kernel accesses no more
    // than that on any grid, and the vectorized one is chosen only for aligned rows.
    unsafe { launch.run(&kernel, config, &params) }
}

/// Writes shuffled scales of MX blocks ([`ScaleLayout::Shuffled950`](hk_core::quant::ScaleLayout::Shuffled950)) as a matrix: the
/// inverse of [`shuffle_scales`].
///
/// | arg        | shape            | dtype  | layout                                           |
/// |------------|------------------|--------|--------------------------------------------------|
/// | `shuffled` | `[n]`            | `e8m0` | contiguous; `n` is [`shuffled_len(rows, blocks)`](shuffled_len) |
/// | `plain`    | `[rows, blocks]` | `e8m0` | any strides                                      |
///
/// Padding is not read. The tensors may not share memory. Returns when the launch is queued. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride) if a tensor breaks the table, [`Empty`](Error::Empty) for zero blocks,
/// [`Overlap`](Error::Overlap) if the tensors share memory, [`TooLarge`](Error::TooLarge) beyond 2^32 - 1 rows or blocks,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
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
    let (kernel, config, params) = plan(stream, UNSHUFFLE, sizes, plain.layout(), aligned)?;
    let mut launch = stream.launch(OP);
    let params = Params {
        plain: launch.output("plain", &mut plain)?,
        shuffled: launch.input("shuffled", &shuffled)?,
        ..params
    };
    // SAFETY: as in `shuffle_scales`.
    unsafe { launch.run(&kernel, config, &params) }
}
