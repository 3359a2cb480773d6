//! The safe function of `hip/reduce_scatter.hip`.

use crate::kernels::reduce_scatter::Params;
use crate::p2p::{P2pComm, PACKET, THREADS, expect_parts, packets, world_index};
use hk_core::{Aliasing, DType, Float, KernelRef, Result, Stream, TensorView, TensorViewMut, check_overlap};

const OP: &str = "reduce_scatter";

static KERNELS: [[KernelRef<Params>; 4]; 3] =
    kernels_of_worlds!(Params, "reduce_scatter_", ["bf16", "f16", "f32"], [""]);

/// The sum over all ranks, a part on each: with x as `world` parts along its first axis, rank k gets `y[i] = sum_r x_r[k, i]`.
/// [`reduce_scatter_dim`] along axis 0.
///
/// # Errors
/// As [`reduce_scatter_dim`].
pub fn reduce_scatter<T: Float>(
    comm: &mut P2pComm,
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<T>,
) -> Result<()> {
    reduce_scatter_dim(comm, stream, x, y, 0)
}

/// The sum over all ranks, a part on each: with x as `world` parts along axis `dim`, rank k gets part k of `sum_r x_r`.
///
/// | arg | shape                 | dtype                | layout                  |
/// |-----|-----------------------|----------------------|-------------------------|
/// | `x` | `[.., world * n, ..]` | `bf16`, `f16`, `f32` | contiguous, on 16 bytes |
/// | `y` | `[.., n, ..]`         | as `x`               | contiguous, on 16 bytes |
///
/// `stream` is that of `comm`. Every rank calls with the same shape, dtype and `dim`.
///
/// Rounding: as [`all_reduce`](crate::all_reduce()), of whose result y has part k, bit for bit. So with
/// [`all_gather_dim`](crate::all_gather_dim()) after it, it is an all-reduce.
///
/// Sizes: the axes of y from `dim` on are whole packets of 16 bytes; a launch for each [`P2pComm::buffer_bytes`] of x. Returns when they are
/// queued. No elements: no launch.
///
/// # Errors
/// Nothing is queued if there is one. [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride),
/// [`Align`](hk_core::Error::Align): a tensor breaks the table. [`Unsupported`](hk_core::Error::Unsupported): not whole packets.
/// [`Overlap`](hk_core::Error::Overlap): y shares memory with x. [`Argument`](hk_core::Error::Argument): y has no axis `dim`; another stream than
/// the communicator's. [`TooLarge`](hk_core::Error::TooLarge): several rows, as the axes before `dim` count them, of 2^31 packets or more.
/// [`Timeout`](hk_core::Error::Timeout): the communicator is aborted.
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel.
///
/// Source: the first half of a two-shot all-reduce, as in [`all_reduce`](crate::all_reduce()).
pub fn reduce_scatter_dim<T: Float>(
    comm: &mut P2pComm,
    stream: &Stream,
    x: TensorView<T>,
    mut y: TensorViewMut<T>,
    dim: usize,
) -> Result<()> {
    let world = comm.world();
    let parts = expect_parts(OP, ("y", y.shape()), ("x", x.shape()), dim, world)?;
    x.expect_contiguous(OP, "x")?;
    x.expect_aligned(OP, "x", PACKET as u64)?;
    y.expect_contiguous(OP, "y")?;
    y.expect_aligned(OP, "y", PACKET as u64)?;
    comm.expect(OP, stream)?;
    let row = packets(OP, if dim == 0 { "y" } else { "a row of y" }, parts.cols * size_of::<T>())?;
    parts.expect_narrow::<T>(OP, "x")?;
    check_overlap(OP, ("x", &x), ("y", &y), Aliasing::Disjoint)?;
    comm.agree(OP, "y", || format!("{} {:?} along axis {dim}", T::DTYPE, y.shape()))?;
    let all = parts.rows * row;
    if all == 0 {
        return Ok(());
    }
    let dtype = match T::DTYPE {
        DType::Bf16 => 0,
        DType::F16 => 1,
        _ => 2,
    };
    let kernel = stream.kernel(KERNELS[dtype][world_index(world)])?;
    for (first, count) in comm.pieces(all, world * PACKET) {
        let mut launch = stream.launch(OP);
        let (split, at) = parts.split::<T>(world, PACKET, first);
        let params = Params {
            comm: comm.comm(&mut launch)?,
            x: launch.input_address("x", &x)? + at(world * row),
            y: launch.output_address("y", &mut y)? + (first * PACKET) as u64,
            packets: count as u64,
            split,
        };
        // SAFETY: each part of x, and y, hold `count` packets from the first one on, and each staging buffer as many for every part.
        // The kernel ends: it waits for other ranks no longer than the timeout.
        unsafe { launch.run(&kernel, comm.config(count.div_ceil(THREADS)), &params) }?;
    }
    Ok(())
}
