//! The safe function of `hip/reduce_scatter_rmsnorm.hip`.

use crate::kernels::peers::NormParams;
use crate::norm::{Norm, NormOptions, NormOutputs, dtype_index};
use crate::p2p::{P2pComm, world_index};
use hk_core::{Element, Float, KernelRef, Result, Stream, TensorView};

const OP: &str = "reduce_scatter_rmsnorm";

static KERNELS: [[KernelRef<NormParams>; 4]; 2] =
    kernels_of_worlds!(NormParams, "reduce_scatter_rmsnorm_", ["bf16", "f16"], [""]);

/// [`all_reduce_rmsnorm`](crate::all_reduce_rmsnorm()) of each rank's part of the rows: rank k of `world` gets rows
/// `k * rows` .. `(k + 1) * rows` of what that gives, bit for bit.
///
/// | arg               | shape                  | dtype                         | layout                                  |
/// |-------------------|------------------------|-------------------------------|-----------------------------------------|
/// | `x`               | `[world * rows, cols]` | `bf16`, `f16`                 | unit stride on `cols`, rows on 16 bytes |
/// | `residual`, `out` | `[rows, cols]`         | as `x`                        | contiguous, on 16 bytes                 |
/// | `weight`          | `[cols]`               | as `x`                        | contiguous, on 16 bytes                 |
/// | `q`, `scale`      |                        |                               | [`QuantizedRows`](crate::QuantizedRows) of `rows` rows |
///
/// The sequence-parallel form of a layer: between two GEMMs each rank has a part of the rows. [`all_gather`](crate::all_gather()) of `out`,
/// or of `q` and the scales, gives all rows to all ranks. `weight` is the same on all ranks; `residual` is that of the rank's rows.
/// `stream` is that of `comm`. Every rank calls with the same shape, dtype and options.
///
/// Sizes: `cols` a multiple of 8, up to 16384; any number of rows: a launch for each [`P2pComm::buffer_bytes`] of x in whole rows of all
/// ranks. Returns when they are queued. No rows: no launch.
///
/// # Errors
/// As [`all_reduce_rmsnorm`](crate::all_reduce_rmsnorm()); no output may share memory with x ([`Overlap`](hk_core::Error::Overlap)), and
/// [`TooLarge`](hk_core::Error::TooLarge): a row of each rank is more than the communicator's buffers hold.
///
/// Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
pub fn reduce_scatter_rmsnorm<T: Float, Q: Element>(
    comm: &mut P2pComm,
    stream: &Stream,
    x: TensorView<T>,
    weight: TensorView<T>,
    outputs: NormOutputs<T, Q>,
    options: NormOptions,
) -> Result<()> {
    let dtype = dtype_index::<T>(OP)?;
    let world = comm.world();
    let norm = Norm { op: OP, arg: "x", x, parts: world, weight, outputs, options };
    let [rows, cols] = norm.check(stream.device(), false)?;
    norm.expect_buffers(comm, stream)?;
    comm.agree(OP, "x", || format!("{} [{rows}, {cols}], {options:?}", T::DTYPE))?;
    if rows == 0 {
        return Ok(());
    }
    // SAFETY: the arguments are checked; the kernel is that of T and the world, and sums a part of the rows.
    unsafe { norm.run(comm, stream, KERNELS[dtype][world_index(world)], [rows, cols]) }
}
