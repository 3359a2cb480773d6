//! The safe functions of `hip/all_reduce.hip`.

use crate::kernels::all_reduce::Params;
use crate::p2p::{Algorithm, P2pComm, PACKET, THREADS, packets, world_index};
use hk_core::{Aliasing, DType, Float, KernelRef, Result, Stream, TensorView, TensorViewMut, check_overlap};

const OP: &str = "all_reduce";

static KERNELS: [[KernelRef<Params>; 4]; 6] =
    kernels_of_worlds!(Params, "all_reduce_", ["bf16", "f16", "f32"], ["_one_shot", "_two_shot"]);

/// The sum over all ranks, on every rank: `y[i] = sum_r x_r[i]`.
///
/// | arg | shape  | dtype                | layout                                      |
/// |-----|--------|----------------------|---------------------------------------------|
/// | `x` | any    | `bf16`, `f16`, `f32` | contiguous, on 16 bytes                     |
/// | `y` | as `x` | as `x`               | contiguous, on 16 bytes; may be exactly `x` |
///
/// `stream` is that of `comm`. Every rank calls with the same shape, dtype and algorithm.
///
/// Rounding: sums are `f32`, of ranks 0, 1, .. in this order, and rounded once, to nearest even. So all ranks have the same bits, whatever the
/// algorithm.
///
/// Sizes: whole packets of 16 bytes; a launch for each [`P2pComm::buffer_bytes`]. Returns when they are queued. No elements: no launch.
///
/// # Errors
/// Nothing is queued if there is one. [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride),
/// [`Align`](hk_core::Error::Align): a tensor breaks the table. [`Unsupported`](hk_core::Error::Unsupported): not whole packets.
/// [`Overlap`](hk_core::Error::Overlap): y shares memory with x, and is not exactly x. [`Argument`](hk_core::Error::Argument): another stream than the
/// communicator's. [`Timeout`](hk_core::Error::Timeout): the communicator is aborted.
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel.
///
/// Source: one-shot and two-shot all-reduce as in Thakur et al. 2005, "Optimization of Collective Communication Operations in
/// MPICH" (a flat exchange; reduce-scatter, then all-gather), over memory that all ranks address.
pub fn all_reduce<T: Float>(
    comm: &mut P2pComm,
    stream: &Stream,
    x: TensorView<T>,
    y: TensorViewMut<T>,
    algorithm: Algorithm,
) -> Result<()> {
    y.expect_shape(OP, "y", x.shape())?;
    x.expect_contiguous(OP, "x")?;
    x.expect_aligned(OP, "x", PACKET as u64)?;
    check_overlap(OP, ("x", &x), ("y", &y), Aliasing::ExactAliasAllowed)?;
    run(comm, stream, Some(x), y, algorithm)
}

/// [`all_reduce`] of a tensor to itself.
///
/// # Errors
/// As [`all_reduce`].
pub fn all_reduce_in_place<T: Float>(
    comm: &mut P2pComm,
    stream: &Stream,
    y: TensorViewMut<T>,
    algorithm: Algorithm,
) -> Result<()> {
    run(comm, stream, None, y, algorithm)
}

fn run<T: Float>(
    comm: &P2pComm,
    stream: &Stream,
    x: Option<TensorView<T>>,
    mut y: TensorViewMut<T>,
    algorithm: Algorithm,
) -> Result<()> {
    y.expect_contiguous(OP, "y")?;
    y.expect_aligned(OP, "y", PACKET as u64)?;
    let bytes = y.numel() * size_of::<T>();
    comm.expect(OP, stream)?;
    let total = packets(OP, "y", bytes)?;
    comm.agree(OP, "y", || format!("{} {:?}, {algorithm:?}", T::DTYPE, y.shape()))?;
    if bytes == 0 {
        return Ok(());
    }
    let two_shot = algorithm.two_shot(comm.world(), bytes.min(comm.buffer_bytes()));
    let kernel = stream.kernel(pick(T::DTYPE, comm.world(), two_shot))?;
    let tile = if two_shot { comm.world() * THREADS } else { THREADS };
    for (first, count) in comm.pieces(total, PACKET) {
        let mut launch = stream.launch(OP);
        let y = launch.output_address("y", &mut y)?;
        let x = match &x {
            Some(x) => launch.input_address("x", x)?,
            None => y,
        };
        let at = (first * PACKET) as u64;
        let params = Params { comm: comm.comm(&mut launch)?, x: x + at, y: y + at, packets: count as u64 };
        let config = comm.config(count.div_ceil(tile));
        // SAFETY: x and y hold `count` packets from the first one on, and each staging buffer at least as many. The kernel ends: it
        // waits for other ranks no longer than the timeout.
        unsafe { launch.run(&kernel, config, &params) }?;
    }
    Ok(())
}

fn pick(dtype: DType, world: usize, two_shot: bool) -> KernelRef<Params> {
    let row = match dtype {
        DType::Bf16 => 0,
        DType::F16 => 2,
        _ => 4,
    };
    KERNELS[row + usize::from(two_shot)][world_index(world)]
}
