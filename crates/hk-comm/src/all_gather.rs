//! The safe functions of `hip/all_gather.hip`.

use crate::kernels::all_gather::Params;
use crate::p2p::{P2pComm, PACKET, THREADS, expect_parts, world_index};
use hk_core::{
    Aliasing, Element, Error, KernelRef, Result, Stream, TensorView, TensorViewMut, check_overlap,
};

const OP: &str = "all_gather";

static KERNELS: [[KernelRef<Params>; 4]; 2] =
    kernels_of_worlds!(Params, "all_gather_", ["packets", "bytes"], [""]);

/// The data of all ranks, on every rank: with y as `world` parts along its first axis, `y[r, i] = x_r[i]`.
///
/// | arg | shape             | dtype  | layout                                                       |
/// |-----|-------------------|--------|--------------------------------------------------------------|
/// | `x` | `[n, ..]`         | any    | contiguous, on 16 bytes                                      |
/// | `y` | `[world * n, ..]` | as `x` | contiguous, on 16 bytes; not `x`, see [`all_gather_in_place`] |
///
/// `stream` is that of `comm`. Every rank calls with the same shape and dtype.
///
/// Sizes: any. An x of whole packets of 16 bytes is read by packets, another one by bytes. A launch for each
/// [`P2pComm::buffer_bytes`] of x. Returns when they are queued. No elements: no launch.
///
/// # Errors
/// Nothing is queued if there is one. [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align): a tensor breaks the
/// table. [`Overlap`](Error::Overlap): y shares memory with x. [`Argument`](Error::Argument): another stream than the communicator's.
/// [`Timeout`](Error::Timeout): the communicator is aborted. [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and
/// launching a kernel.
///
/// Source: the second half of a two-shot all-reduce, as in [`all_reduce`](crate::all_reduce()).
pub fn all_gather<T: Element>(
    comm: &mut P2pComm,
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<T>,
) -> Result<()> {
    expect_parts(OP, ("x", x.shape()), ("y", y.shape()), comm.world())?;
    x.expect_contiguous(OP, "x")?;
    x.expect_aligned(OP, "x", PACKET as u64)?;
    check_overlap(OP, ("x", &x), ("y", &y), Aliasing::Disjoint)?;
    run(comm, stream, Some(x), y)
}

/// [`all_gather`] of the own part of y: part r of rank r.
///
/// # Errors
/// As [`all_gather`]. [`Shape`](Error::Shape): the first axis of y is no multiple of the ranks.
pub fn all_gather_in_place<T: Element>(
    comm: &mut P2pComm,
    stream: &Stream,
    y: TensorViewMut<T>,
) -> Result<()> {
    let world = comm.world();
    if y.shape().first().is_none_or(|n| !n.is_multiple_of(world)) {
        return Err(Error::shape(OP, "y", y.shape(), format!("an axis that is split into {world} parts")));
    }
    run(comm, stream, None, y)
}

fn run<T: Element>(
    comm: &P2pComm,
    stream: &Stream,
    x: Option<TensorView<T>>,
    mut y: TensorViewMut<T>,
) -> Result<()> {
    y.expect_contiguous(OP, "y")?;
    y.expect_aligned(OP, "y", PACKET as u64)?;
    comm.expect(OP, stream)?;
    comm.agree(OP, "y", || format!("{} {:?}", T::DTYPE, y.shape()))?;
    let bytes = y.numel() * size_of::<T>() / comm.world();
    if bytes == 0 {
        return Ok(());
    }
    // By the size alone, which is that of all ranks: they meet in the same blocks.
    let (row, unit) = if bytes.is_multiple_of(PACKET) { (0, PACKET) } else { (1, 1) };
    let kernel = stream.kernel(KERNELS[row][world_index(comm.world())])?;
    for (first, count) in comm.pieces(bytes / unit, unit) {
        let mut launch = stream.launch(OP);
        let at = (first * unit) as u64;
        let y = launch.output_address("y", &mut y)?;
        let x = match &x {
            Some(x) => launch.input_address("x", x)?,
            None => y + (comm.rank() * bytes) as u64,
        };
        let params = Params {
            comm: comm.comm(&mut launch)?,
            x: x + at,
            y: y + at,
            units: count as u64,
            part: (bytes / unit) as u64,
        };
        // SAFETY: x, and each part of y, hold `count` units from the first one on, and each staging buffer at least as many. The
        // kernel ends: it waits for other ranks no longer than the timeout.
        unsafe { launch.run(&kernel, comm.config(count.div_ceil(THREADS)), &params) }?;
    }
    Ok(())
}
