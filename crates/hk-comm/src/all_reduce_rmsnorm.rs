//! The safe function of `hip/all_reduce_rmsnorm.hip`.

use crate::kernels::all_reduce_rmsnorm::Params;
use crate::p2p::{Algorithm, P2pComm, PACKET, THREADS, world_index};
use hk_core::{
    DType, Element, Error, Float, KernelRef, Result, Stream, TensorView, TensorViewMut, check_aliases,
};

const OP: &str = "all_reduce_rmsnorm";
/// Packets of a row that a thread holds: `kHeld` of `hip/all_reduce_rmsnorm.hip`.
const HELD: usize = 4;

static KERNELS: [[KernelRef<Params>; 4]; 4] =
    kernels_of_worlds!(Params, "all_reduce_rmsnorm_", ["bf16", "f16"]);

/// Options of [`all_reduce_rmsnorm`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AllReduceRmsNormOptions {
    /// Added to the mean square under the root. Positive and finite. Default: 1e-6.
    pub eps: f32,
    /// Added to each weight: 1 for weights that are stored as `weight - 1`, as in Gemma. Finite. Default: 0.
    pub weight_offset: f32,
    /// How the sum moves its data. Default: by size.
    pub algorithm: Algorithm,
}

impl Default for AllReduceRmsNormOptions {
    fn default() -> Self {
        Self { eps: 1e-6, weight_offset: 0.0, algorithm: Algorithm::Auto }
    }
}

/// The rows in fp8 with a scale per row.
pub struct Fp8Rows<'a, Q> {
    /// `[rows, cols]`, the fp8 e4m3 of the target: `q = fp8(y / scale)`.
    pub q: TensorViewMut<'a, Q>,
    /// `[rows]`: `amax |y| / fp8_max`, of the unrounded y; 1 for a row of zeros.
    pub scale: TensorViewMut<'a, f32>,
}

/// Outputs of [`all_reduce_rmsnorm`]: at least one of `out` and `fp8`.
pub struct AllReduceRmsNormOutputs<'a, T, Q> {
    /// The sum with the residual: `residual` before the call, `residual_out` after it.
    pub residual: TensorViewMut<'a, T>,
    /// `[rows, cols]`, the normalized rows.
    pub out: Option<TensorViewMut<'a, T>>,
    /// The same, quantized.
    pub fp8: Option<Fp8Rows<'a, Q>>,
}

/// All-reduce, residual add and RMSNorm in one launch, with per-token quantization to fp8 on request:
/// `a = round(sum_r x_r)`, `z = a + residual`, `residual = round(z)`,
/// `y = z * (weight + weight_offset) / sqrt(mean(z^2) + eps)`, `out = round(y)`, `q = fp8(y / scale)`.
///
/// | arg                    | shape          | dtype                         | layout                  |
/// |------------------------|----------------|-------------------------------|-------------------------|
/// | `x`, `residual`, `out` | `[rows, cols]` | `bf16`, `f16`                 | contiguous, on 16 bytes |
/// | `weight`               | `[cols]`       | as `x`                        | contiguous, on 16 bytes |
/// | `q`                    | `[rows, cols]` | fp8 e4m3 of the target        | contiguous, on 16 bytes |
/// | `scale`                | `[rows]`       | `f32`                         | contiguous              |
///
/// `residual` and `weight` are the same on all ranks; `x` is each rank's own. `stream` is that of `comm`. Every rank calls with the same
/// shape, dtype and options.
///
/// Rounding: `a` is the result of [`all_reduce`](crate::all_reduce()). z is *not* rounded before it is normalized, so that the bits do
/// not depend on the algorithm. All ranks have the same bits.
///
/// Sizes: `cols` a multiple of 8, up to 16384; any number of rows, up to [`P2pComm::buffer_bytes`] in all. `out` may be exactly `x`
/// ([`TensorViewMut::alias`]). Returns when the launch is queued. No rows: no launch.
///
/// # Errors
/// Nothing is queued if there is one. [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align), [`DType`](Error::DType):
/// a tensor breaks the table. [`Empty`](Error::Empty): no columns. [`Unsupported`](Error::Unsupported): columns that are no
/// multiple of 8, or more than 16384. [`Argument`](Error::Argument): `eps` or `weight_offset` out of its domain, no
/// output, another stream than the communicator's. [`Overlap`](Error::Overlap): an output shares memory with another tensor.
/// [`TooLarge`](Error::TooLarge): more than the communicator's buffers hold. [`Timeout`](Error::Timeout): the
/// communicator is aborted. [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel.
///
/// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4, of the sum that tensor parallelism leaves to be made
/// (Shoeybi et al. 2019, "Megatron-LM").
pub fn all_reduce_rmsnorm<T: Float, Q: Element>(
    comm: &mut P2pComm,
    stream: &Stream,
    x: TensorView<T>,
    weight: TensorView<T>,
    outputs: AllReduceRmsNormOutputs<T, Q>,
    options: AllReduceRmsNormOptions,
) -> Result<()> {
    let AllReduceRmsNormOutputs { mut residual, mut out, mut fp8 } = outputs;
    let AllReduceRmsNormOptions { eps, weight_offset, algorithm } = options;
    let row = match T::DTYPE {
        DType::Bf16 => 0,
        DType::F16 => 2,
        other => return Err(Error::dtype(OP, "x", other, "bf16 or f16")),
    };
    let [rows, cols] = x.dims(OP, "x")?;
    residual.expect_shape(OP, "residual", [rows, cols])?;
    weight.expect_shape(OP, "weight", [cols])?;
    let packet = PACKET as u64;
    x.expect_contiguous(OP, "x")?;
    x.expect_aligned(OP, "x", packet)?;
    residual.expect_contiguous(OP, "residual")?;
    residual.expect_aligned(OP, "residual", packet)?;
    weight.expect_contiguous(OP, "weight")?;
    weight.expect_aligned(OP, "weight", packet)?;
    if let Some(out) = &out {
        out.expect_shape(OP, "out", [rows, cols])?;
        out.expect_contiguous(OP, "out")?;
        out.expect_aligned(OP, "out", packet)?;
    }
    if let Some(Fp8Rows { q, scale }) = &fp8 {
        let native = DType::fp8_of(stream.device().arch());
        if Q::DTYPE != native {
            return Err(Error::dtype(OP, "q", Q::DTYPE, format!("{native}, that of the device")));
        }
        q.expect_shape(OP, "q", [rows, cols])?;
        q.expect_contiguous(OP, "q")?;
        q.expect_aligned(OP, "q", packet)?;
        scale.expect_shape(OP, "scale", [rows])?;
        scale.expect_contiguous(OP, "scale")?;
    }
    if out.is_none() && fp8.is_none() {
        return Err(Error::argument(OP, "outputs", "neither out nor fp8", "at least one of them"));
    }
    if !(eps > 0.0 && eps.is_finite()) {
        return Err(Error::argument(OP, "eps", eps, "positive and finite"));
    }
    if !weight_offset.is_finite() {
        return Err(Error::argument(OP, "weight_offset", weight_offset, "finite"));
    }
    if cols == 0 {
        return Err(Error::empty(OP, "x", 1, x.shape()));
    }
    let row_bytes = cols * size_of::<T>();
    let most = HELD * THREADS * PACKET;
    if !row_bytes.is_multiple_of(PACKET) || row_bytes > most {
        let reason =
            format!("cols is a multiple of {}, up to {}", PACKET / size_of::<T>(), most / size_of::<T>());
        return Err(Error::unsupported(OP, format!("cols = {cols}"), reason));
    }
    comm.expect(OP, stream, "x", rows * row_bytes)?;
    let q = fp8.as_ref().map(|f| &f.q as _);
    let scale = fp8.as_ref().map(|f| &f.scale as _);
    check_aliases(
        OP,
        &[("x", Some(&x)), ("weight", Some(&weight))],
        &[
            (("residual", Some(&residual)), &[]),
            (("out", out.as_ref().map(|t| t as _)), &["x"]),
            (("q", q), &[]),
            (("scale", scale), &[]),
        ],
    )?;
    comm.agree(OP, "x", || format!("{} [{rows}, {cols}], {options:?}", T::DTYPE))?;
    if rows == 0 {
        return Ok(());
    }
    let count = u32::try_from(rows)
        .map_err(|_| Error::too_large(OP, "x", format!("{rows} rows"), u32::MAX.into()))?;
    let two_shot = algorithm.two_shot(comm.world(), rows * row_bytes);
    let kernel = stream.kernel(KERNELS[row + usize::from(two_shot)][world_index(comm.world())])?;
    let mut launch = stream.launch(OP);
    let residual = launch.output_address("residual", &mut residual)?;
    let params = Params {
        comm: comm.comm(&mut launch)?,
        x: launch.input_address("x", &x)?,
        residual,
        weight: launch.input_address("weight", &weight)?,
        residual_out: residual,
        out: out.as_mut().map_or(Ok(0), |out| launch.output_address("out", out))?,
        q: fp8.as_mut().map_or(Ok(0), |fp8| launch.output_address("q", &mut fp8.q))?,
        scale: fp8.as_mut().map_or(Ok(0), |fp8| launch.output_address("scale", &mut fp8.scale))?,
        rows: count,
        packets: (row_bytes / PACKET) as u32,
        cols: cols as f32,
        eps,
        weight_offset,
        unused: 0,
    };
    // SAFETY: the checks above make each matrix `rows` rows of `packets` packets, or as many values, and the vectors as long as
    // its axes; each staging buffer holds the matrix. The kernel ends: it waits for other ranks no longer than the timeout.
    unsafe { launch.run(&kernel, comm.config(), &params) }
}
