//! Row-wise kernels: which entry point serves rows of a length, and with how many blocks. The device's side is
//! `hk/rows.h`.
//!
//! An operator's source has one entry point per [`RowVariant`] and element type ([`row_kernels!`](crate::row_kernels)). Its
//! wrapper tells a [`RowProblem`] of every tensor that the kernel touches, and gets a [`RowPlan`]: the variant, the grid,
//! and the rows that a block takes at a time, which goes into the kernel's parameters.

use crate::tensor::{TensorView, TensorViewMut};
use crate::{CodeObjects, DType, Element, Error, Kernel, LaunchConfig, Result, Rows, Stream};
use std::sync::Arc;

/// How an entry point spreads rows over lanes.
///
/// The lanes of a row fix the order of its reductions. They should depend on the length of the row alone, so that an
/// entry point by elements has the lanes that the ones by vectors have for the same lengths.
#[derive(Debug, Clone, Copy)]
pub struct RowVariant {
    /// Longest row, in columns.
    pub widest: usize,
    /// Lanes that share a row: a power of two; more than a wave has are one block. On NVIDIA GPUs a block can have
    /// twice as many (`hk::row_lanes`), of which the host sees nothing but the size of the block, the kernel's own.
    pub lanes: usize,
    /// Rows that a lane has in hand at a time.
    pub rows: usize,
    /// Works on whole vectors (16 bytes of the operator's main input), rather than on elements.
    pub vectors: bool,
    /// Waves that a CU needs for enough bytes in flight to cover the latency of memory: about 32 KiB. More waves only cost
    /// their launch, since each one loops over rows.
    pub waves_per_cu: usize,
}

impl RowVariant {
    /// An entry point by vectors.
    pub const fn vectors(widest: usize, lanes: usize, rows: usize, waves_per_cu: usize) -> Self {
        Self { widest, lanes, rows, vectors: true, waves_per_cu }
    }

    /// An entry point by elements.
    pub const fn elements(widest: usize, lanes: usize) -> Self {
        Self { widest, lanes, rows: 1, vectors: false, waves_per_cu: 8 }
    }

    /// The variant for elements of `dtype`, where it has `rows` in hand for types of two bytes: as many bytes of wider types,
    /// `hk::rows_in_hand`.
    #[must_use]
    pub const fn in_hand(self, dtype: DType) -> Self {
        let rows = if dtype.size_bytes() > 2 { self.rows.div_ceil(2) } else { self.rows };
        Self { rows, ..self }
    }
}

/// Threads of a block at least, `hk::row_threads`.
const SHORTEST_BLOCK: usize = 64;
/// Bytes of a vector access, `hk::kVecBytes`.
const VECTOR_BYTES: usize = 16;

/// Kernels reach what a block has in hand of a tensor from one base, with offsets below this many bytes: the longest row
/// of a tensor is shorter.
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
    /// Whole vectors, and each on its alignment in every tensor.
    by_vectors: bool,
}

impl RowProblem {
    /// `rows` rows of `cols` columns, of which kernels by vectors take 16 bytes of elements of `dtype` at a time.
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
        let by_vectors = cols.is_multiple_of(vector);
        Ok(Self { op, rows, cols, vector, row_bytes: 0, stride_bytes: 0, by_vectors })
    }

    /// With kernels by vectors whose lanes take `columns` at a time: several accesses side by side, or as many as a shorter
    /// tensor (pairs of fp4) needs for one.
    pub fn in_steps_of(self, columns: usize) -> Self {
        Self { vector: columns, by_vectors: self.cols.is_multiple_of(columns), ..self }
    }

    /// Adds a tensor whose rows the kernel walks along with the columns: one element a column, or if it is shorter one for
    /// several (pairs of fp4), or if it is longer more behind the last (padding). A tensor with one axis is one row for all.
    ///
    /// # Errors
    /// [`Error::Stride`] if its leading axes do not collapse to rows, [`Error::Align`] if it is not aligned to its elements.
    pub fn tensor(&mut self, arg: &'static str, tensor: &impl RowTensor) -> Result<()> {
        let Described { cols, row_stride, element, aligned_to } = tensor.describe(self.op, arg)?;
        let per_column = self.cols.div_ceil(cols.max(1));
        let vector_bytes = (self.vector / per_column.min(self.vector) * element).min(VECTOR_BYTES);
        self.by_vectors &= aligned_to.is_multiple_of(vector_bytes as u64);
        self.by_vectors &= cols <= self.cols || cols.is_multiple_of(self.vector);
        self.row_bytes = self.row_bytes.max(cols * element);
        self.stride_bytes = self.stride_bytes.max(row_stride.saturating_mul(element));
        Ok(())
    }

    /// Adds a matrix that the kernel reads element by element, columns of any stride, from any address
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
        self.by_vectors = false;
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

    /// Whether kernels by vectors can serve these tensors.
    pub fn by_vectors(&self) -> bool {
        self.by_vectors
    }

    /// The kernel for these tensors and its grid. `kernels` are one element type's entry points in the order of `variants`,
    /// in which each kind (by vectors, by elements) goes from narrow to wide.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for rows longer than every variant; as [`Stream::kernel`].
    pub fn plan(
        &self,
        stream: &Stream,
        objects: &'static CodeObjects,
        variants: &[RowVariant],
        kernels: &[&'static str],
    ) -> Result<RowPlan> {
        let info = stream.device().info();
        // A block of `threads` takes this many rows at a time.
        let threads = |v: &RowVariant| v.lanes.max(SHORTEST_BLOCK);
        let batch = |v: &RowVariant| threads(v) / v.lanes * v.rows;
        let fits_window = |batch: usize| {
            let bytes =
                (batch - 1).checked_mul(self.stride_bytes).and_then(|n| n.checked_add(self.row_bytes));
            bytes.is_some_and(|bytes| bytes < WINDOW_BYTES)
        };
        let narrowest =
            |vectors: bool| variants.iter().position(|v| v.vectors == vectors && self.cols <= v.widest);
        let vectors = narrowest(true).filter(|&i| self.by_vectors && fits_window(batch(&variants[i])));
        let Some(index) = vectors.or_else(|| narrowest(false)) else {
            let what = format!("{} columns", self.cols);
            return Err(Error::unsupported(self.op, what, "no kernel has rows as long"));
        };
        let variant = &variants[index];
        let batch = if fits_window(batch(variant)) { batch(variant) } else { 1 };

        let blocks = info.blocks_for(self.rows.div_ceil(batch), threads(variant), variant.waves_per_cu);
        Ok(RowPlan {
            variant: index,
            kernel: stream.kernel(objects, kernels[index])?,
            config: LaunchConfig::grid_1d(blocks),
            batch: batch as u32,
        })
    }
}

/// A kernel for rows, and how to launch it.
#[derive(Debug)]
pub struct RowPlan {
    /// Which of the variants.
    pub variant: usize,
    /// Its entry point.
    pub kernel: Arc<Kernel>,
    /// Its grid.
    pub config: LaunchConfig,
    /// Rows that a block takes at a time: a parameter of the kernel.
    pub batch: u32,
}

/// A view of either kind, as rows.
pub trait RowTensor: sealed::Describe {}

struct Described {
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
        fn describe(&self, op: &'static str, arg: &'static str) -> crate::Result<super::Described>;
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
            fn describe(&self, op: &'static str, arg: &'static str) -> Result<Described> {
                let Rows { cols, row_stride, .. } = self.rows(op, arg)?;
                let row_stride = if self.shape().len() == 1 { 0 } else { row_stride };
                self.expect_aligned(op, arg, size_of::<T>() as u64)?;
                let aligned_to = [16, 8, 4, 2].into_iter().find(|&a| self.rows_aligned(a)).unwrap_or(1);
                Ok(Described { cols, row_stride, element: size_of::<T>(), aligned_to })
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

/// The names of row-wise entry points, `op_dtype_variant`: an array per dtype of an array per variant, in the order given.
///
/// `row_kernels!("softmax", ["bf16", "f16"], ["512", "long"])` is
/// `[["softmax_bf16_512", "softmax_bf16_long"], ["softmax_f16_512", "softmax_f16_long"]]`.
#[macro_export]
macro_rules! row_kernels {
    ($op:literal, [$($dtype:literal),+ $(,)?], $variants:tt) => {
        [$($crate::row_kernels!(@names $op, $dtype, $variants)),+]
    };
    (@names $op:literal, $dtype:literal, [$($variant:literal),+ $(,)?]) => {
        [$(concat!($op, "_", $dtype, "_", $variant)),+]
    };
}
