//! What the collectives with a norm share: options, outputs, and the parameters of `hip/norm_row.h`.

use crate::kernels::hk::RmsScalars;
use crate::kernels::peers::{Comm, NormParams};
use crate::p2p::{P2pComm, PACKET, THREADS};
use bytemuck::Zeroable;
use hk_core::quant::{BlockRule, BlockScale};
use hk_core::{
    DType, Device, E8M0, Element, Error, Float, Fp4x2, KernelRef, Launch, LaunchConfig, NamedOperand, Result,
    Stream, TensorView, TensorViewMut, check_aliases,
};
use std::ops::Range;

/// Packets of a row that a thread holds: `kHeld` of `hip/norm_row.h`.
const HELD: usize = 4;
/// Columns of a block of mxfp4.
const BLOCK: usize = 32;
/// Columns of a lane: the smallest group.
const LANE: usize = 8;

/// Options of the norms that follow a sum over ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormOptions {
    /// Added to the mean square under the root. Positive and finite. Default: 1e-6.
    pub eps: f32,
    /// Added to each weight: 1 for weights that are stored as `weight - 1`, as in Gemma. Finite. Default: 0.
    pub weight_offset: f32,
}

impl Default for NormOptions {
    fn default() -> Self {
        Self { eps: 1e-6, weight_offset: 0.0 }
    }
}

/// The normalized rows y, quantized from `f32`. The rules and the bytes are those of hk-quant for the same y.
pub enum QuantizedRows<'a, Q> {
    /// fp8 with a scale per row: `scale = max |y| / fp8_max`, 1 for zeros; `q = fp8(y * (1 / scale))`.
    PerToken {
        /// `[rows, cols]`, the fp8 e4m3 of the target; contiguous, on 8 bytes.
        q: TensorViewMut<'a, Q>,
        /// `[rows]`, contiguous.
        scale: TensorViewMut<'a, f32>,
    },
    /// fp8 with a scale per group of adjacent columns, of which the last may be short: `scale = max(max |y|, 1e-10) / fp8_max`.
    Groups {
        /// As per token.
        q: TensorViewMut<'a, Q>,
        /// `[rows, ceil(cols / group)]`, any strides.
        scale: TensorViewMut<'a, f32>,
        /// Columns per group: 8, 16, 32, 64, 128, 256 or 512, a lane's eight columns times a power of two within a wave. On NVIDIA GPUs, whose
        /// waves have 32 lanes, up to 256.
        group: usize,
    },
    /// MX fp4: a power of two per block of 32 columns, of which the last may be short. A block with a NaN or an infinity has the scale
    /// NaN and zeros.
    Mxfp4 {
        /// `[rows, cols / 2]`, the even column in the low nibble; contiguous, on 4 bytes.
        q: TensorViewMut<'a, Fp4x2>,
        /// `[rows, ceil(cols / 32)]`, any strides.
        scale: TensorViewMut<'a, E8M0>,
        /// The rule of the scales: `Even`, `RoundUp` or `Floor`.
        mode: BlockScale,
    },
}

/// Outputs of the norms that follow a sum over ranks: at least one of `out` and `quantized`.
pub struct NormOutputs<'a, T, Q> {
    /// The sum with the residual: the residual before the call, their sum after it. `[rows, cols]`.
    pub residual: TensorViewMut<'a, T>,
    /// `[rows, cols]`, the normalized rows.
    pub out: Option<TensorViewMut<'a, T>>,
    /// The same, quantized.
    pub quantized: Option<QuantizedRows<'a, Q>>,
}

impl<Q: Element> QuantizedRows<'_, Q> {
    pub(crate) fn check(&self, op: &'static str, device: &Device, [rows, cols]: [usize; 2]) -> Result<()> {
        let fp8 = DType::fp8_of(device.arch());
        match self {
            Self::PerToken { q, .. } | Self::Groups { q, .. } => {
                if Q::DTYPE != fp8 {
                    return Err(Error::dtype(op, "q", Q::DTYPE, format!("{fp8}, that of the device")));
                }
                q.expect_shape(op, "q", [rows, cols])?;
                q.expect_contiguous(op, "q")?;
                q.expect_aligned(op, "q", LANE as u64)?;
            }
            Self::Mxfp4 { q, mode, .. } => {
                if *mode == BlockScale::DivFloor {
                    return Err(Error::argument(op, "mode", "DivFloor", "Even, RoundUp or Floor"));
                }
                q.expect_shape(op, "q", [rows, cols / 2])?;
                q.expect_contiguous(op, "q")?;
                q.expect_aligned(op, "q", LANE as u64 / 2)?;
            }
        }
        match self {
            Self::PerToken { scale, .. } => {
                scale.expect_shape(op, "scale", [rows])?;
                scale.expect_contiguous(op, "scale")
            }
            Self::Groups { scale, group, .. } => {
                let most = LANE * device.info().wave_size as usize;
                if !(group.is_power_of_two() && (LANE..=most).contains(group)) {
                    let want = format!("a power of two, {LANE} to {most}");
                    return Err(Error::argument(op, "group", group, want));
                }
                scale.expect_shape(op, "scale", [rows, cols.div_ceil(*group)])
            }
            Self::Mxfp4 { scale, .. } => scale.expect_shape(op, "scale", [rows, cols.div_ceil(BLOCK)]),
        }
    }

    /// The scales of a range of rows are one piece.
    pub(crate) fn expect_gatherable(&self, op: &'static str) -> Result<()> {
        match self {
            Self::PerToken { scale, .. } | Self::Groups { scale, .. } => scale.expect_contiguous(op, "scale"),
            Self::Mxfp4 { scale, .. } => scale.expect_contiguous(op, "scale"),
        }
    }

    /// A range of the rows.
    pub(crate) fn rows(&mut self, rows: Range<usize>) -> Result<QuantizedRows<'_, Q>> {
        Ok(match self {
            Self::PerToken { q, scale } => QuantizedRows::PerToken {
                q: q.reborrow().slice(0, rows.clone())?,
                scale: scale.reborrow().slice(0, rows)?,
            },
            Self::Groups { q, scale, group } => QuantizedRows::Groups {
                q: q.reborrow().slice(0, rows.clone())?,
                scale: scale.reborrow().slice(0, rows)?,
                group: *group,
            },
            Self::Mxfp4 { q, scale, mode } => QuantizedRows::Mxfp4 {
                q: q.reborrow().slice(0, rows.clone())?,
                scale: scale.reborrow().slice(0, rows)?,
                mode: *mode,
            },
        })
    }

    pub(crate) fn operands(&self) -> [NamedOperand<'_>; 2] {
        match self {
            Self::PerToken { q, scale } | Self::Groups { q, scale, .. } => {
                [("q", Some(q)), ("scale", Some(scale))]
            }
            Self::Mxfp4 { q, scale, .. } => [("q", Some(q)), ("scale", Some(scale))],
        }
    }
}

/// A norm of rows that are summed over ranks.
pub(crate) struct Norm<'a, T, Q> {
    pub op: &'static str,
    /// What x is called there.
    pub arg: &'static str,
    /// `[parts * rows, cols]`.
    pub x: TensorView<'a, T>,
    /// 1, or the number of ranks: each normalizes the rows of its part.
    pub parts: usize,
    pub weight: TensorView<'a, T>,
    pub outputs: NormOutputs<'a, T, Q>,
    pub options: NormOptions,
}

/// Index of a dtype in the kernel tables.
pub(crate) fn dtype_index<T: Float>(op: &'static str) -> Result<usize> {
    match T::DTYPE {
        DType::Bf16 => Ok(0),
        DType::F16 => Ok(1),
        other => Err(Error::dtype(op, "x", other, "bf16 or f16")),
    }
}

impl<'a, T: Float, Q: Element> Norm<'a, T, Q> {
    /// Checks the tensors and options; gives the rows and columns of a part.
    pub fn check(&self, device: &Device, out_may_be_x: bool) -> Result<[usize; 2]> {
        let Self { op, arg, x, weight, outputs, .. } = self;
        let (op, arg) = (*op, *arg);
        let NormOutputs { residual, out, quantized } = outputs;
        let NormOptions { eps, weight_offset } = self.options;
        let [_, cols] = x.dims(op, arg)?;
        let [rows, _] = residual.dims(op, "residual")?;
        let packet = PACKET as u64;
        residual.expect_shape(op, "residual", [rows, cols])?;
        crate::p2p::expect_parts(op, ("residual", residual.shape()), (arg, x.shape()), 0, self.parts)?;
        weight.expect_shape(op, "weight", [cols])?;
        weight.expect_contiguous(op, "weight")?;
        weight.expect_aligned(op, "weight", packet)?;
        x.expect_unit_stride(op, arg)?;
        x.expect_aligned(op, arg, packet)?;
        for (name, tensor) in [("residual", Some(residual)), ("out", out.as_ref())] {
            let Some(tensor) = tensor else { continue };
            tensor.expect_shape(op, name, [rows, cols])?;
            tensor.expect_contiguous(op, name)?;
            tensor.expect_aligned(op, name, packet)?;
        }
        if let Some(quantized) = quantized {
            quantized.check(op, device, [rows, cols])?;
        }
        if out.is_none() && quantized.is_none() {
            return Err(Error::argument(op, "outputs", "neither out nor quantized", "at least one of them"));
        }
        if !(eps > 0.0 && eps.is_finite()) {
            return Err(Error::argument(op, "eps", eps, "positive and finite"));
        }
        if !weight_offset.is_finite() {
            return Err(Error::argument(op, "weight_offset", weight_offset, "finite"));
        }
        if cols == 0 {
            return Err(Error::empty(op, arg, 1, x.shape()));
        }
        let row_bytes = cols * size_of::<T>();
        let most = HELD * THREADS * PACKET;
        if !row_bytes.is_multiple_of(PACKET) || row_bytes > most {
            let (packet, most) = (PACKET / size_of::<T>(), most / size_of::<T>());
            let reason = format!("cols is a multiple of {packet}, up to {most}");
            return Err(Error::unsupported(op, format!("cols = {cols}"), reason));
        }
        self.x_row()?;
        u32::try_from(rows)
            .map_err(|_| Error::too_large(op, arg, format!("{rows} rows"), u32::MAX.into()))?;
        let [q, scale] = quantized.as_ref().map_or([("", None); 2], QuantizedRows::operands);
        let of_x: &[_] = if out_may_be_x { &[arg] } else { &[] };
        check_aliases(
            op,
            &[(arg, Some(x)), ("weight", Some(weight))],
            &[
                (("residual", Some(residual)), &[]),
                (("out", out.as_ref().map(|t| t as _)), of_x),
                (q, &[]),
                (scale, &[]),
            ],
        )?;
        Ok([rows, cols])
    }

    /// Bytes between rows of x.
    fn x_row(&self) -> Result<usize> {
        let bytes = self.x.strides()[0] * size_of::<T>();
        if self.x.shape()[0] > 1 && !bytes.is_multiple_of(PACKET) {
            return Err(Error::stride(self.op, self.arg, self.x.layout(), format!("rows on {PACKET} bytes")));
        }
        Ok(bytes)
    }

    /// The communicator is that of the stream, and its buffers hold a row of each part.
    pub fn expect_buffers(&self, comm: &P2pComm, stream: &Stream) -> Result<()> {
        comm.expect(self.op, stream)?;
        let bytes = self.parts * self.weight.numel() * size_of::<T>();
        if bytes > comm.buffer_bytes() {
            let what = format!("{bytes} bytes of a row of {} ranks", self.parts);
            return Err(Error::too_large(self.op, self.arg, what, comm.buffer_bytes() as u64));
        }
        Ok(())
    }

    /// Queues the launches that sum the rows and normalize them.
    ///
    /// # Safety
    /// [`check`](Self::check) gave `[rows, cols]`, [`expect_buffers`](Self::expect_buffers) nothing, and the kernel is one of the communicator's world
    /// and of T whose x has `parts` parts.
    pub unsafe fn run(
        mut self,
        comm: &P2pComm,
        stream: &Stream,
        kernel: KernelRef<NormParams>,
        [rows, cols]: [usize; 2],
    ) -> Result<()> {
        let kernel = stream.kernel(kernel)?;
        for (first, count) in comm.pieces(rows, self.parts * cols * size_of::<T>()) {
            let mut launch = stream.launch(self.op);
            let of_ranks = comm.comm(&mut launch)?;
            let params = self.params(&mut launch, of_ranks, first, count)?;
            // SAFETY: `check` has made each matrix `rows` rows of whole packets, those of x `x_row` apart, or as many values, of which `count` are left
            // from `first` on, and the vectors as long as its axes; each staging buffer holds `count` rows of every part. The kernel ends: it
            // waits for other ranks no longer than the timeout.
            unsafe { launch.run(&kernel, comm.config(count), &params) }?;
        }
        Ok(())
    }

    /// Queues the launch that normalizes rows which are summed already.
    ///
    /// # Safety
    /// [`check`](Self::check) gave as many rows, x is one part, and the kernel is the one of `hip/rmsnorm_rows.hip` of T.
    pub unsafe fn run_of_sums(
        mut self,
        stream: &Stream,
        kernel: KernelRef<NormParams>,
        rows: usize,
    ) -> Result<()> {
        let kernel = stream.kernel(kernel)?;
        let mut launch = stream.launch(self.op);
        let params = self.params(&mut launch, Comm::zeroed(), 0, rows)?;
        let most = 4 * stream.device().info().compute_units as usize;
        // SAFETY: as in `run`; this kernel has no part in a communicator.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(rows.clamp(1, most)), &params) }
    }

    /// The parameters for rows `first`, first + 1, .. of each part.
    fn params<'l>(
        &mut self,
        launch: &mut Launch<'l>,
        comm: Comm,
        first: usize,
        count: usize,
    ) -> Result<NormParams>
    where
        'a: 'l,
    {
        let NormOptions { eps, weight_offset } = self.options;
        let x_row = self.x_row()?;
        let at = |row_bytes: usize| (first * row_bytes) as u64;
        let NormOutputs { residual, out, quantized } = &mut self.outputs;
        let [rows, cols] = residual.dims(self.op, "residual")?;
        let row_bytes = cols * size_of::<T>();
        let residual = launch.output_address("residual", residual)? + at(row_bytes);
        let mut params = NormParams {
            comm,
            x: launch.input_address(self.arg, &self.x)? + at(x_row),
            x_row: (x_row / PACKET) as u64,
            x_part: (rows * (x_row / PACKET)) as u64,
            residual,
            weight: launch.input_address("weight", &self.weight)?,
            residual_out: residual,
            out: match out {
                Some(out) => launch.output_address("out", out)? + at(row_bytes),
                None => 0,
            },
            q: 0,
            scale: 0,
            scale_row: 0,
            scale_group: 0,
            quantized: 0,
            group_shift: 0,
            rule: BlockRule::fp4(BlockScale::Even, 0),
            norm: RmsScalars {
                eps,
                inv_cols: (1.0 / cols as f64) as f32,
                // Adding 0 would turn a weight of -0 into 0.
                weight_offset: if weight_offset == 0.0 { -0.0 } else { weight_offset },
                weight_is_f32: 0,
            },
            rows: count as u32,
            packets: (row_bytes / PACKET) as u32,
            unused: 0,
        };
        match quantized {
            None => {}
            Some(QuantizedRows::PerToken { q, scale }) => {
                params.quantized = 1;
                params.scale_row = 1;
                params.q = launch.output_address("q", q)? + at(cols);
                params.scale = launch.output_address("scale", scale)? + at(size_of::<f32>());
            }
            Some(QuantizedRows::Groups { q, scale, group }) => {
                params.quantized = 2;
                params.group_shift = (*group / LANE).ilog2();
                params.q = launch.output_address("q", q)? + at(cols);
                let [row, group] = strides(scale);
                (params.scale_row, params.scale_group) = (row as i64, group as i64);
                params.scale = launch.output_address("scale", scale)? + at(row * size_of::<f32>());
            }
            Some(QuantizedRows::Mxfp4 { q, scale, mode }) => {
                params.quantized = 3;
                params.rule = BlockRule::fp4(*mode, 0);
                params.q = launch.output_address("q", q)? + at(cols / 2);
                let [row, block] = strides(scale);
                (params.scale_row, params.scale_group) = (row as i64, block as i64);
                params.scale = launch.output_address("scale", scale)? + at(row);
            }
        }
        Ok(params)
    }
}

fn strides<S: Element>(scale: &TensorViewMut<S>) -> [usize; 2] {
    [scale.strides()[0], scale.strides()[1]]
}
