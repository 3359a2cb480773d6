//! Row-wise kernels: which entry point serves rows of a length, and with how many blocks. The device's side is
//! `hk/rows.h`.
//!
//! An operator's source has one entry point per [`RowVariant`] and element type ([`row_kernels!`](crate::row_kernels)). Its
//! wrapper tells a [`RowProblem`] of every tensor that the kernel touches, and gets a [`RowPlan`]: the variant, the grid,
//! and the rows of a block's batch, a kernel parameter.

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::launch::LaunchConfig;
use crate::layout::Rows;
use crate::module::Kernel;
use crate::params::KernelRef;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};
use bytemuck::Pod;

/// How an entry point spreads rows over lanes.
///
/// The lanes per row fix the order of reductions. They depend on the length of the row alone, so the scalar and the vectorized entry
/// point for a length give bitwise identical results.
#[derive(Debug, Clone, Copy)]
pub struct RowVariant {
    /// Longest row, in columns.
    pub max_cols: usize,
    /// Lanes that share a row: a power of two; more than a wave has are one block. On NVIDIA GPUs a block can have
    /// twice as many (`hk::lanes_per_row`); the host sees only the kernel's own block size.
    pub lanes: usize,
    /// Rows per thread.
    pub rows: usize,
    /// Loads and stores 16-byte vectors of the operator's main input, rather than single elements.
    pub vectorized: bool,
    /// Waves that a CU needs for enough bytes in flight to cover the latency of memory: about 32 KiB. More waves cost
    /// only their launch: blocks are persistent.
    pub waves_per_cu: usize,
}

impl RowVariant {
    /// A vectorized entry point.
    pub const fn vectorized(max_cols: usize, lanes: usize, rows: usize, waves_per_cu: usize) -> Self {
        Self { max_cols, lanes, rows, vectorized: true, waves_per_cu }
    }

    /// A scalar entry point.
    pub const fn scalar(max_cols: usize, lanes: usize) -> Self {
        Self { max_cols, lanes, rows: 1, vectorized: false, waves_per_cu: 8 }
    }

    /// The variant for elements of `dtype`, given `rows` for 2-byte types: wider types take as many bytes (`hk::rows_per_thread`).
    #[must_use]
    pub const fn for_dtype(self, dtype: DType) -> Self {
        let rows = if dtype.size_bytes() > 2 { self.rows.div_ceil(2) } else { self.rows };
        Self { rows, ..self }
    }
}

/// Threads of a block at least, `hk::row_threads`.
const MIN_BLOCK_THREADS: usize = 64;
/// Bytes of a vector access, `hk::kVecBytes`.
const VECTOR_BYTES: usize = 16;

/// Kernels address a block's batch of rows from one base, with offsets below this many bytes: a row is shorter.
pub const WINDOW_BYTES: usize = 1 << 31;

/// The tensors of a row-wise operator: what the choice of a kernel depends on.
#[derive(Debug, Clone)]
pub struct RowProblem {
    op: &'static str,
    rows: usize,
    cols: usize,
    /// Columns that a lane takes at a time.
    vector: usize,
    /// The longest row and the largest row stride of all tensors, in bytes.
    row_bytes: usize,
    stride_bytes: usize,
    /// Rows are whole, aligned vectors in every tensor.
    can_vectorize: bool,
}

impl RowProblem {
    /// `rows` rows of `cols` columns, of which vectorized kernels take 16 bytes of `dtype` per access.
    ///
    /// # Errors
    /// [`Error::Empty`] if `cols` is zero, [`Error::TooLarge`] for a row of 2 GiB of f32 or more; both name `arg`.
    pub fn new(op: &'static str, arg: &'static str, rows: usize, cols: usize, dtype: DType) -> Result<Self> {
        if cols == 0 {
            return Err(Error::empty(op, arg, 1, &[rows, cols]));
        }
        let limit = (WINDOW_BYTES - 1) / size_of::<f32>();
        if cols > limit {
            return Err(Error::too_large(op, arg, format!("{cols} columns"), limit as u64));
        }
        let vector = VECTOR_BYTES / dtype.size_bytes();
        let can_vectorize = cols.is_multiple_of(vector);
        Ok(Self { op, rows, cols, vector, row_bytes: 0, stride_bytes: 0, can_vectorize })
    }

    /// With vectorized kernels whose lanes take `columns` at a time: several accesses, or as many as one access to a shorter tensor
    /// (pairs of fp4) covers.
    pub fn with_vector_width(self, columns: usize) -> Self {
        Self { vector: columns, can_vectorize: self.cols.is_multiple_of(columns), ..self }
    }

    /// Adds a tensor whose rows the kernel walks along with the columns: one element a column, or if it is shorter one for
    /// several (pairs of fp4), or if it is longer more behind the last (padding). A tensor with one axis is one row for all.
    ///
    /// # Errors
    /// [`Error::Stride`] if its leading axes do not collapse to rows, [`Error::Align`] if it is not aligned to its elements.
    pub fn tensor(&mut self, arg: &'static str, tensor: &impl RowTensor) -> Result<()> {
        let RowGeometry { cols, row_stride, element, aligned_to } = tensor.describe(self.op, arg)?;
        let per_column = self.cols.div_ceil(cols.max(1));
        let vector_bytes = (self.vector / per_column.min(self.vector) * element).min(VECTOR_BYTES);
        self.can_vectorize &= aligned_to.is_multiple_of(vector_bytes as u64);
        self.can_vectorize &= cols <= self.cols || cols.is_multiple_of(self.vector);
        self.row_bytes = self.row_bytes.max(cols * element);
        self.stride_bytes = self.stride_bytes.max(row_stride.saturating_mul(element));
        Ok(())
    }

    /// Adds a matrix that the kernel reads on the scalar path, with columns of any stride, from any address
    /// (`hk::StridedCursor`).
    ///
    /// # Errors
    /// [`Error::Stride`] if it has several columns with a stride of zero, [`Error::Align`] if it is not aligned to its elements.
    pub fn strided<T: Element>(&mut self, arg: &'static str, tensor: &TensorView<T>) -> Result<()> {
        if tensor
            .shape()
            .last()
            .zip(tensor.strides().last())
            .is_some_and(|(&n, &stride)| n > 1 && stride == 0)
        {
            return Err(Error::stride(self.op, arg, tensor.layout(), "a stride of columns that is not zero"));
        }
        self.can_vectorize = false;
        tensor.expect_aligned(self.op, arg, size_of::<T>() as u64)
    }

    /// [`tensor`](Self::tensor), with a check of its shape; `why` says where the shape comes from: `shape of x`.
    ///
    /// # Errors
    /// [`Error::Shape`]; as [`tensor`](Self::tensor).
    pub fn shaped(
        &mut self,
        arg: &'static str,
        tensor: &impl RowTensor,
        shape: &[usize],
        why: &str,
    ) -> Result<()> {
        if tensor.axes() != shape {
            return Err(Error::shape(self.op, arg, tensor.axes(), format!("{shape:?} ({why})")));
        }
        self.tensor(arg, tensor)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether vectorized kernels can serve these tensors.
    pub fn can_vectorize(&self) -> bool {
        self.can_vectorize
    }

    /// The kernel for these tensors and its grid. `kernels` are one element type's entry points in the order of `variants`,
    /// in which the vectorized ones, and the scalar ones, go from narrow to wide.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for rows longer than every variant; as [`Stream::kernel`].
    pub fn plan<P: Pod>(
        &self,
        stream: &Stream,
        variants: &[RowVariant],
        kernels: &[KernelRef<P>],
    ) -> Result<RowPlan<P>> {
        let info = stream.device().info();
        // A block of `threads` takes this many rows at a time.
        let threads = |v: &RowVariant| v.lanes.max(MIN_BLOCK_THREADS);
        let batch = |v: &RowVariant| threads(v) / v.lanes * v.rows;
        let fits_window = |batch: usize| {
            let bytes =
                (batch - 1).checked_mul(self.stride_bytes).and_then(|n| n.checked_add(self.row_bytes));
            bytes.is_some_and(|bytes| bytes < WINDOW_BYTES)
        };
        let narrowest =
            |vectors: bool| variants.iter().position(|v| v.vectorized == vectors && self.cols <= v.max_cols);
        let vectors = narrowest(true).filter(|&i| self.can_vectorize && fits_window(batch(&variants[i])));
        let Some(index) = vectors.or_else(|| narrowest(false)) else {
            let what = format!("{} columns", self.cols);
            return Err(Error::unsupported(self.op, what, "no kernel has rows as long"));
        };
        let variant = &variants[index];
        let batch = if fits_window(batch(variant)) { batch(variant) } else { 1 };

        let blocks = info.blocks_for(self.rows.div_ceil(batch), threads(variant), variant.waves_per_cu);
        Ok(RowPlan {
            variant: index,
            kernel: stream.kernel(kernels[index])?,
            config: LaunchConfig::grid_1d(blocks),
            batch: batch as u32,
        })
    }
}

/// A kernel for rows, and how to launch it.
#[derive(Debug)]
pub struct RowPlan<P> {
    /// Which of the variants.
    pub variant: usize,
    /// Its entry point.
    pub kernel: Kernel<P>,
    /// Its grid.
    pub config: LaunchConfig,
    /// Rows that a block takes at a time: a parameter of the kernel.
    pub batch: u32,
}

/// A view of either kind, as rows.
pub trait RowTensor: sealed::Describe {}

struct RowGeometry {
    cols: usize,
    row_stride: usize,
    element: usize,
    /// The largest power of two, up to 16, that the address of every row is a multiple of.
    aligned_to: u64,
}

mod sealed {
    pub trait Describe {
        fn axes(&self) -> &[usize];
        #[expect(private_interfaces, reason = "nobody outside can call or implement it")]
        fn describe(&self, op: &'static str, arg: &'static str) -> crate::Result<super::RowGeometry>;
    }
}

macro_rules! row_tensor {
    ($view:ident) => {
        impl<T: Element> RowTensor for $view<'_, T> {}
        impl<T: Element> sealed::Describe for $view<'_, T> {
            fn axes(&self) -> &[usize] {
                self.shape()
            }

            #[expect(private_interfaces, reason = "nobody outside can call or implement it")]
            fn describe(&self, op: &'static str, arg: &'static str) -> Result<RowGeometry> {
                let Rows { cols, row_stride, .. } = self.rows(op, arg)?;
                let row_stride = if self.shape().len() == 1 { 0 } else { row_stride };
                self.expect_aligned(op, arg, size_of::<T>() as u64)?;
                let aligned_to = [16, 8, 4, 2].into_iter().find(|&a| self.rows_aligned(a)).unwrap_or(1);
                Ok(RowGeometry { cols, row_stride, element: size_of::<T>(), aligned_to })
            }
        }
    };
}

row_tensor!(TensorView);
row_tensor!(TensorViewMut);

/// Where the kernels of a float type are in a table of `row_kernels!("..", ["bf16", "f16", "f32"], ..)`.
pub const fn float_index(dtype: DType) -> usize {
    match dtype {
        DType::Bf16 => 0,
        DType::F16 => 1,
        _ => 2,
    }
}

/// References to row-wise entry points, `op_dtype_variant`: an array per dtype of an array per variant, in the order given.
///
/// `row_kernels!(kernels::softmax::Params, "softmax", ["bf16", "f16"], ["512", "long"])` has `softmax_bf16_512` and
/// `softmax_bf16_long`, then those of f16. A name that no source has does not compile.
#[macro_export]
macro_rules! row_kernels {
    ($params:ty, $op:literal, [$($dtype:literal),+ $(,)?], $variants:tt) => {
        [$($crate::row_kernels!(@dtype $params, $op, $dtype, $variants)),+]
    };
    (@dtype $params:ty, $op:literal, $dtype:literal, [$($variant:literal),+ $(,)?]) => {
        [$(const { <$params>::kernel(concat!($op, "_", $dtype, "_", $variant)) }),+]
    };
}
