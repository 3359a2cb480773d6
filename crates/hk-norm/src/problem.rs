//! What the wrappers of all norms share: tensor checks and kernel selection.

use bytemuck::Pod;
use hk_core::plan::rows::{RowPlan, RowProblem, RowTensor, RowVariant, float_index};
use hk_core::{DType, Element, Error, Float, KernelRef, Result, Rows, Stream, TensorView, bf16, f16};

/// Weight types for activations of type `T`: `T` itself and `f32`.
pub trait Weight<T: Float>: Element {}

impl<T: Float> Weight<T> for T {}
impl Weight<bf16> for f32 {}
impl Weight<f16> for f32 {}

/// The entry points of one source, for bf16, f16 and f32, in the order of `variants`. `variants` hold the rows per thread of
/// 16-bit types.
pub(crate) struct KernelTable<P, const N: usize> {
    pub variants: [RowVariant; N],
    pub kernels: [[KernelRef<P>; N]; 3],
}

/// An operator's tensors, checked against `x`.
pub(crate) struct Problem<'a> {
    op: &'static str,
    shape: &'a [usize],
    rows: RowProblem,
    dtype: DType,
}

impl<'a> Problem<'a> {
    /// Checks `x`. Its leading axes collapse to rows.
    pub fn new<T: Float>(op: &'static str, x: &'a TensorView<T>) -> Result<Self> {
        let Rows { rows, cols, .. } = x.rows(op, "x")?;
        let mut rows = RowProblem::new(op, "x", rows, cols, T::DTYPE)?;
        rows.tensor("x", x)?;
        Ok(Self { op, shape: x.shape(), rows, dtype: T::DTYPE })
    }

    /// Checks a 2-D `x` of any column stride.
    pub fn strided<T: Float>(op: &'static str, x: &'a TensorView<T>) -> Result<Self> {
        let [rows, cols] = x.dims(op, "x")?;
        let mut rows = RowProblem::new(op, "x", rows, cols, T::DTYPE)?;
        match x.rows(op, "x") {
            Ok(_) => rows.tensor("x", x)?,
            Err(_) => rows.strided("x", x)?,
        }
        Ok(Self { op, shape: x.shape(), rows, dtype: T::DTYPE })
    }

    /// Checks `eps`.
    pub fn eps(&self, eps: f32) -> Result<()> {
        if eps.is_finite() && eps >= 0.0 {
            return Ok(());
        }
        Err(Error::argument(self.op, "eps", eps, "a finite number that is not negative"))
    }

    /// Checks a vector of one element per column, such as the weights.
    pub fn per_column<W: Element>(&mut self, arg: &'static str, vector: &TensorView<W>) -> Result<()> {
        let [length] = vector.dims(self.op, arg)?;
        let cols = self.rows.cols();
        if length != cols {
            return Err(Error::shape(self.op, arg, vector.shape(), format!("[{cols}] (columns of x)")));
        }
        vector.expect_contiguous(self.op, arg)?;
        self.rows.tensor(arg, vector)
    }

    /// Checks a tensor of the shape of `x`.
    pub fn like_x(&mut self, arg: &'static str, tensor: &impl RowTensor) -> Result<()> {
        self.rows.shaped(arg, tensor, self.shape, "shape of x")
    }

    /// Checks a tensor against `shape`.
    pub fn shaped(
        &mut self,
        arg: &'static str,
        tensor: &impl RowTensor,
        shape: &[usize],
        why: &str,
    ) -> Result<()> {
        self.rows.shaped(arg, tensor, shape, why)
    }

    /// Checks an optional output of one value per row.
    pub fn per_row(&self, arg: &'static str, tensor: Option<&hk_core::TensorViewMut<f32>>) -> Result<()> {
        let Some(tensor) = tensor else { return Ok(()) };
        let rows = self.rows.rows();
        if tensor.shape() != [rows] {
            return Err(Error::shape(self.op, arg, tensor.shape(), format!("[{rows}] (rows of x)")));
        }
        tensor.expect_contiguous(self.op, arg)?;
        tensor.expect_aligned(self.op, arg, size_of::<f32>() as u64)
    }

    /// True if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.rows() == 0
    }

    /// Columns of a row.
    pub fn cols(&self) -> usize {
        self.rows.cols()
    }

    /// `1 / cols`.
    pub fn inv_cols(&self) -> f32 {
        (1.0 / self.rows.cols() as f64) as f32
    }

    /// Selects the kernel and its grid.
    pub fn plan<P: Pod, const N: usize>(
        &self,
        stream: &Stream,
        table: &KernelTable<P, N>,
    ) -> Result<RowPlan<P>> {
        let kernels = &table.kernels[float_index(self.dtype)];
        let variants = table.variants.map(|v| v.for_dtype(self.dtype));
        self.rows.plan(stream, &variants, kernels)
    }
}
