//! The safe functions of `hip/all_gather.hip`.

use crate::kernels::all_gather::Params;
use crate::p2p::{P2pComm, PACKET, Parts, THREADS, expect_parts, world_index};
use hk_core::{
    Aliasing, Element, Error, KernelRef, Result, Stream, TensorView, TensorViewMut, check_overlap,
};

const OP: &str = "all_gather";

static KERNELS: [[KernelRef<Params>; 4]; 2] =
    kernels_of_worlds!(Params, "all_gather_", ["packets", "bytes"], [""]);

/// The data of all ranks, on every rank: with y as `world` parts along its first axis, `y[r, i] = x_r[i]`. [`all_gather_dim`] along axis 0.
///
/// # Errors
/// As [`all_gather_dim`].
pub fn all_gather<T: Element>(
    comm: &mut P2pComm,
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<T>,
) -> Result<()> {
    all_gather_dim(comm, stream, x, y, 0)
}

/// The data of all ranks, on every rank: with y as `world` parts along axis `dim`, part r is the x of rank r.
///
/// | arg | shape                 | dtype  | layout                                                        |
/// |-----|-----------------------|--------|---------------------------------------------------------------|
/// | `x` | `[.., n, ..]`         | any    | contiguous, on 16 bytes                                       |
/// | `y` | `[.., world * n, ..]` | as `x` | contiguous, on 16 bytes; not `x`, see [`all_gather_in_place`] |
///
/// `stream` is that of `comm`. Every rank calls with the same shape, dtype and `dim`.
///
/// Sizes: any. Where the axes from `dim` on are whole packets of 16 bytes in x, it is read by packets, else by bytes. A launch for each
/// [`P2pComm::buffer_bytes`] of x. Returns when they are queued. No elements: no launch.
///
/// # Errors
/// Nothing is queued if there is one. [`Argument`](Error::Argument): x has no axis `dim`; another stream than the communicator's.
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align): a tensor breaks the table. [`Overlap`](Error::Overlap): y shares
/// memory with x. [`TooLarge`](Error::TooLarge): several rows, as the axes before `dim` count them, of 2^31 packets or more.
/// [`Timeout`](Error::Timeout): the communicator is aborted. [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a
/// kernel.
///
/// Source: the second half of a two-shot all-reduce, as in [`all_reduce`](crate::all_reduce()).
pub fn all_gather_dim<T: Element>(
    comm: &mut P2pComm,
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<T>,
    dim: usize,
) -> Result<()> {
    let parts = expect_parts(OP, ("x", x.shape()), ("y", y.shape()), dim, comm.world())?;
    x.expect_contiguous(OP, "x")?;
    x.expect_aligned(OP, "x", PACKET as u64)?;
    check_overlap(OP, ("x", &x), ("y", &y), Aliasing::Disjoint)?;
    run(comm, stream, Some(x), y, parts, dim)
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
    let parts = Parts { rows: 1, cols: y.numel() / world };
    run(comm, stream, None, y, parts, 0)
}

fn run<T: Element>(
    comm: &P2pComm,
    stream: &Stream,
    x: Option<TensorView<T>>,
    mut y: TensorViewMut<T>,
    parts: Parts,
    dim: usize,
) -> Result<()> {
    y.expect_contiguous(OP, "y")?;
    y.expect_aligned(OP, "y", PACKET as u64)?;
    comm.expect(OP, stream)?;
    parts.expect_narrow::<T>(OP, "y")?;
    comm.agree(OP, "y", || format!("{} {:?} along axis {dim}", T::DTYPE, y.shape()))?;
    let (world, row) = (comm.world(), parts.cols * size_of::<T>());
    let bytes = parts.rows * row;
    if bytes == 0 {
        return Ok(());
    }
    // By the shape alone, which is that of all ranks: they meet in the same blocks.
    let (form, unit) = if row.is_multiple_of(PACKET) { (0, PACKET) } else { (1, 1) };
    let kernel = stream.kernel(KERNELS[form][world_index(world)])?;
    // In place x has the rows of y.
    let x_row = if x.is_some() { row / unit } else { world * row / unit };
    for (first, count) in comm.pieces(bytes / unit, unit) {
        let mut launch = stream.launch(OP);
        let y = launch.output_address("y", &mut y)?;
        let x = match &x {
            Some(x) => launch.input_address("x", x)?,
            None => y + (comm.rank() * row) as u64,
        };
        let (split, at) = parts.split::<T>(world, unit, first);
        let params = Params {
            comm: comm.comm(&mut launch)?,
            x: x + at(x_row),
            y: y + at(world * row / unit),
            units: count as u64,
            x_row: x_row as u64,
            split,
        };
        // SAFETY: x, and each part of y, hold `count` units from the first one on, and each staging buffer at least as many. The
        // kernel ends: it waits for other ranks no longer than the timeout.
        unsafe { launch.run(&kernel, comm.config(count.div_ceil(THREADS)), &params) }?;
    }
    Ok(())
}
