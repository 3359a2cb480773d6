//! Norms of rows that the library sums: its collective, then a launch of `hip/rmsnorm_rows.hip`.

use super::{Group, RcclComm, ReduceOp};
use crate::kernels::peers::NormParams;
use crate::norm::{Norm, NormOptions, NormOutputs, QuantizedRows, dtype_index};
use hk_core::{
    Aliasing, Element, Error, Float, KernelRef, Result, Stream, TensorView, TensorViewMut, check_aliases,
    check_overlap,
};
use std::ops::Range;

static KERNELS: [KernelRef<NormParams>; 2] =
    [NormParams::kernel("rmsnorm_rows_bf16"), NormParams::kernel("rmsnorm_rows_f16")];

impl RcclComm {
    /// [`all_reduce`](Self::all_reduce), then residual add and RMSNorm in one more launch, with quantization on request:
    /// `sum = sum_r x_r`, `z = sum + residual`, `residual = round(z)`,
    /// `y = z * (weight + weight_offset) / sqrt(mean(z^2) + eps)`, `out = round(y)`, and y in fp8 or mxfp4 ([`QuantizedRows`]).
    ///
    /// | arg               | shape           | dtype         | layout                                    |
    /// |-------------------|-----------------|---------------|-------------------------------------------|
    /// | `x`, `sum`        | `[rows, width]` | `bf16`, `f16` | contiguous, on 16 bytes                   |
    /// | `residual`, `out` | `[rows, cols]`  | as `x`        | contiguous, on 16 bytes                   |
    /// | `weight`          | `[cols]`        | as `x`        | contiguous, on 16 bytes                   |
    /// | `q`, `scale`      |                 |               | [`QuantizedRows`]                         |
    ///
    /// `width` is at least `cols`: the columns beyond are padding, which is summed, and not normalized. `sum` and `out` may be exactly x
    /// ([`TensorViewMut::alias`]). `residual` and `weight` are the same on all ranks; `x` is each rank's own.
    ///
    /// Rounding: `sum` is the library's all-reduce, in the dtype of x. From there on it is that of
    /// [`all_reduce_rmsnorm`](crate::all_reduce_rmsnorm()): z is not rounded before it is normalized, nor y before it is quantized. So where
    /// the sums are the same, as those of integers are, so is everything else, bit for bit.
    ///
    /// Sizes: `cols` and `width` multiples of 8, `cols` up to 16384; any number of rows. No rows: no launch.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and nothing is queued if there is one. [`Align`](Error::Align), [`DType`](Error::DType): a tensor breaks
    /// the table. [`Empty`](Error::Empty): no columns. [`Unsupported`](Error::Unsupported): columns that are no multiple of 8, or more than 16384.
    /// [`Argument`](Error::Argument): `eps` or `weight_offset` out of its domain, a group that is not of the sizes of [`QuantizedRows`], the
    /// mode `DivFloor`, no output.
    ///
    /// Source: as [`all_reduce_rmsnorm`](crate::all_reduce_rmsnorm()).
    pub fn all_reduce_rmsnorm<T: Float, Q: Element>(
        &self,
        stream: &Stream,
        x: TensorView<T>,
        sum: TensorViewMut<T>,
        weight: TensorView<T>,
        outputs: NormOutputs<T, Q>,
        options: NormOptions,
    ) -> Result<()> {
        const OP: &str = "RcclComm::all_reduce_rmsnorm";
        let sums = Sums { op: OP, x, sum, parts: 1 };
        self.normalize(stream, sums, weight, outputs, options)
    }

    /// [`reduce_scatter`](Self::reduce_scatter), then the norm of [`all_reduce_rmsnorm`](Self::all_reduce_rmsnorm): rank k of `world` gets
    /// rows `k * rows` .. `(k + 1) * rows` of what that gives.
    ///
    /// | arg                         | shape                                  |
    /// |-----------------------------|----------------------------------------|
    /// | `x`                         | `[world * rows, width]`                |
    /// | `sum`                       | `[rows, width]`                        |
    /// | `residual`, `out`           | `[rows, cols]`                         |
    /// | `weight`                    | `[cols]`                               |
    /// | `q`, `scale`                | [`QuantizedRows`] of `rows` rows       |
    ///
    /// `sum` may be exactly this rank's part of x, `out` not. `residual` is that of the rank's rows.
    ///
    /// # Errors
    /// As [`all_reduce_rmsnorm`](Self::all_reduce_rmsnorm).
    ///
    /// Source: as [`reduce_scatter_rmsnorm`](crate::reduce_scatter_rmsnorm()).
    pub fn reduce_scatter_rmsnorm<T: Float, Q: Element>(
        &self,
        stream: &Stream,
        x: TensorView<T>,
        sum: TensorViewMut<T>,
        weight: TensorView<T>,
        outputs: NormOutputs<T, Q>,
        options: NormOptions,
    ) -> Result<()> {
        const OP: &str = "RcclComm::reduce_scatter_rmsnorm";
        let sums = Sums { op: OP, x, sum, parts: self.world() };
        self.normalize(stream, sums, weight, outputs, options)
    }

    /// [`reduce_scatter_rmsnorm`](Self::reduce_scatter_rmsnorm), then [`all_gather`](Self::all_gather) of the normalized and quantized rows:
    /// a sequence-parallel layer in one call. All ranks get all rows.
    ///
    /// | arg                         | shape                                          |
    /// |-----------------------------|------------------------------------------------|
    /// | `x`                         | `[world * rows, width]`                        |
    /// | `sum`                       | `[rows, width]`                                |
    /// | `residual`                  | `[rows, cols]`                                 |
    /// | `out`                       | `[world * rows, cols]`                         |
    /// | `weight`                    | `[cols]`                                       |
    /// | `q`, `scale`                | [`QuantizedRows`] of `world * rows` rows       |
    ///
    /// Scales are contiguous here: those of a rank are one piece. `residual` stays split between the ranks.
    ///
    /// # Errors
    /// As [`reduce_scatter_rmsnorm`](Self::reduce_scatter_rmsnorm). [`Stride`](Error::Stride): scales that are not contiguous.
    /// [`Align`](Error::Align): this rank's rows of q are not on 8 bytes (fp8) or 4 (mxfp4).
    ///
    /// Source: as [`reduce_scatter_rmsnorm`](crate::reduce_scatter_rmsnorm()).
    pub fn reduce_scatter_rmsnorm_all_gather<T: Float, Q: Element>(
        &self,
        stream: &Stream,
        x: TensorView<T>,
        sum: TensorViewMut<T>,
        weight: TensorView<T>,
        outputs: NormOutputs<T, Q>,
        options: NormOptions,
    ) -> Result<()> {
        const OP: &str = "RcclComm::reduce_scatter_rmsnorm_all_gather";
        let NormOutputs { residual, mut out, mut quantized } = outputs;
        let [rows, cols] = residual.dims(OP, "residual")?;
        let all = rows.saturating_mul(self.world());
        if let Some(out) = &out {
            out.expect_shape(OP, "out", [all, cols])?;
            out.expect_contiguous(OP, "out")?;
        }
        if let Some(quantized) = &quantized {
            quantized.check(OP, stream.device(), [all, cols])?;
            quantized.expect_gatherable(OP)?;
        }
        let own = self.rank() * rows..(self.rank() + 1) * rows;
        let part = NormOutputs {
            residual,
            out: out.as_mut().map(|out| out.reborrow().slice(0, own.clone())).transpose()?,
            quantized: quantized.as_mut().map(|quantized| quantized.rows(own.clone())).transpose()?,
        };
        let sums = Sums { op: OP, x, sum, parts: self.world() };
        self.normalize(stream, sums, weight, part, options)?;
        let mut group = Group::new();
        if let Some(out) = out {
            self.gather_rows(&mut group, out, &own)?;
        }
        match quantized {
            None => {}
            Some(QuantizedRows::PerToken { q, scale } | QuantizedRows::Groups { q, scale, .. }) => {
                self.gather_rows(&mut group, q, &own)?;
                self.gather_rows(&mut group, scale, &own)?;
            }
            Some(QuantizedRows::Mxfp4 { q, scale, .. }) => {
                self.gather_rows(&mut group, q, &own)?;
                self.gather_rows(&mut group, scale, &own)?;
            }
        }
        group.end()
    }

    /// All ranks get all rows, in place: this rank has its own.
    fn gather_rows<'a, E: Element>(
        &'a self,
        group: &mut Group<'a>,
        all: TensorViewMut<'a, E>,
        own: &Range<usize>,
    ) -> Result<()> {
        group.all_gather(self, all.alias().slice(0, own.clone())?, all)
    }

    fn normalize<T: Float, Q: Element>(
        &self,
        stream: &Stream,
        Sums { op, x, sum, parts }: Sums<T>,
        weight: TensorView<T>,
        outputs: NormOutputs<T, Q>,
        options: NormOptions,
    ) -> Result<()> {
        let kernel = KERNELS[dtype_index::<T>(op)?];
        self.expect_stream(op, stream)?;
        self.shared.expect_alive(op)?;
        let [rows, cols] = outputs.residual.dims(op, "residual")?;
        let [_, width] = sum.dims(op, "sum")?;
        if sum.shape()[0] != rows || width < cols {
            let want = format!("[{rows}, {cols} or more] (residual [{rows}, {cols}])");
            return Err(Error::shape(op, "sum", sum.shape(), want));
        }
        x.expect_shape(op, "x", [rows.saturating_mul(parts), width])?;
        x.expect_contiguous(op, "x")?;
        sum.expect_contiguous(op, "sum")?;
        let part = if parts > 1 { self.rank() * sum.numel() * size_of::<T>() } else { 0 };
        if sum.addr() != x.addr() + part as u64 {
            check_overlap(op, ("x", &x), ("sum", &sum), Aliasing::Disjoint)?;
        }
        check_overlap(op, ("weight", &weight), ("sum", &sum), Aliasing::Disjoint)?;
        let NormOutputs { residual, out, quantized } = &outputs;
        let [q, scale] = quantized.as_ref().map_or([("", None); 2], QuantizedRows::operands);
        let of_x: &[_] = if parts == 1 { &["x"] } else { &[] };
        check_aliases(
            op,
            &[("x", Some(&x))],
            &[
                (("residual", Some(residual)), &[]),
                (("out", out.as_ref().map(|out| out as _)), of_x),
                (q, &[]),
                (scale, &[]),
            ],
        )?;
        let sums = sum.alias().slice(1, 0..cols)?;
        let norm = Norm { op, arg: "sum", x: sums, parts: 1, weight, outputs, options };
        norm.check(stream.device(), false)?;
        let mut group = Group::new();
        if parts == 1 {
            group.all_reduce(self, x, sum, ReduceOp::Sum)?;
        } else {
            group.reduce_scatter(self, x, sum, ReduceOp::Sum)?;
        }
        group.end()?;
        if rows == 0 {
            return Ok(());
        }
        // SAFETY: the arguments are checked; the kernel is that of T.
        unsafe { norm.run_of_sums(stream, kernel, rows) }
    }
}

/// What a collective sums.
struct Sums<'a, T> {
    op: &'static str,
    /// `[parts * rows, width]`.
    x: TensorView<'a, T>,
    /// `[rows, width]`.
    sum: TensorViewMut<'a, T>,
    /// 1, or the number of ranks: each sums its part.
    parts: usize,
}
