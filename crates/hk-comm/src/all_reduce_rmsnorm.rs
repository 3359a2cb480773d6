//! The safe function of `hip/all_reduce_rmsnorm.hip`.

use crate::kernels::peers::NormParams;
use crate::norm::{Norm, NormOptions, NormOutputs, dtype_index};
use crate::p2p::{Algorithm, P2pComm, world_index};
use hk_core::{Element, Float, KernelRef, Result, Stream, TensorView};

const OP: &str = "all_reduce_rmsnorm";

static KERNELS: [[KernelRef<NormParams>; 4]; 4] =
    kernels_of_worlds!(NormParams, "all_reduce_rmsnorm_", ["bf16", "f16"], ["_one_shot", "_two_shot"]);

/// All-reduce, residual add and RMSNorm in one launch, with quantization on request:
/// `a = round(sum_r x_r)`, `z = a + residual`, `residual = round(z)`,
/// `y = z * (weight + weight_offset) / sqrt(mean(z^2) + eps)`, `out = round(y)`, and y in fp8 or mxfp4 ([`QuantizedRows`](crate::QuantizedRows)).
///
/// | arg               | shape          | dtype                         | layout                                  |
/// |-------------------|----------------|-------------------------------|-----------------------------------------|
/// | `x`               | `[rows, cols]` | `bf16`, `f16`                 | unit stride on `cols`, rows on 16 bytes |
/// | `residual`, `out` | `[rows, cols]` | as `x`                        | contiguous, on 16 bytes                 |
/// | `weight`          | `[cols]`       | as `x`                        | contiguous, on 16 bytes                 |
/// | `q`, `scale`      |                |                               | [`QuantizedRows`](crate::QuantizedRows) |
///
/// `residual` and `weight` are the same on all ranks; `x` is each rank's own. `stream` is that of `comm`. Every rank calls with the same
/// shape, dtype and options.
///
/// Rounding: `a` is the result of [`all_reduce`](crate::all_reduce()). z is *not* rounded before it is normalized, nor y before it is
/// quantized, so that the bits do not depend on the algorithm. All ranks have the same bits. They are those of
/// [`all_reduce`](crate::all_reduce()) followed by `fused_rmsnorm_fp8_quant` or `fused_rmsnorm_mxfp4_quant` of hk-quant but for the order
/// in which a row's squares are summed.
///
/// Sizes: `cols` a multiple of 8, up to 16384; any number of rows: a launch for each [`P2pComm::buffer_bytes`] of whole rows. `out` may be
/// exactly `x` ([`TensorViewMut::alias`](hk_core::TensorViewMut::alias)). Returns when they are queued. No rows: no launch.
///
/// # Errors
/// Nothing is queued if there is one. [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align), [`DType`](hk_core::Error::DType):
/// a tensor breaks the table. [`Empty`](hk_core::Error::Empty): no columns. [`Unsupported`](hk_core::Error::Unsupported): columns that are no
/// multiple of 8, or more than 16384. [`Argument`](hk_core::Error::Argument): `eps` or `weight_offset` out of its domain, a group that is not of the
/// sizes of [`QuantizedRows`](crate::QuantizedRows), the mode `DivFloor`, no output, another stream than the communicator's. [`Overlap`](hk_core::Error::Overlap): an output shares memory with another tensor.
/// [`TooLarge`](hk_core::Error::TooLarge): a row is more than the communicator's buffers hold. [`Timeout`](hk_core::Error::Timeout): the
/// communicator is aborted. [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4, of the sum that tensor parallelism leaves to be made
/// (Shoeybi et al. 2019, "Megatron-LM").
pub fn all_reduce_rmsnorm<T: Float, Q: Element>(
    comm: &mut P2pComm,
    stream: &Stream,
    x: TensorView<T>,
    weight: TensorView<T>,
    outputs: NormOutputs<T, Q>,
    options: NormOptions,
    algorithm: Algorithm,
) -> Result<()> {
    let dtype = dtype_index::<T>(OP)?;
    let norm = Norm { op: OP, arg: "x", x, parts: 1, weight, outputs, options };
    let [rows, cols] = norm.check(stream.device(), true)?;
    norm.expect_buffers(comm, stream)?;
    comm.agree(OP, "x", || format!("{} [{rows}, {cols}], {options:?}, {algorithm:?}", T::DTYPE))?;
    if rows == 0 {
        return Ok(());
    }
    let bytes = rows * cols * size_of::<T>();
    let two_shot = algorithm.two_shot(comm.world(), bytes.min(comm.buffer_bytes()));
    let kernel = KERNELS[2 * dtype + usize::from(two_shot)][world_index(comm.world())];
    // SAFETY: the arguments are checked; the kernel is that of T and the world, and sums rows of all ranks.
    unsafe { norm.run(comm, stream, kernel, [rows, cols]) }
}
