//! Elementwise kernels: selection of the entry point and its tiles. The device side is `hip/tiles.h`.

use crate::kernels::tiles::Shape;
use bytemuck::{Pod, Zeroable};
use hk_core::plan::rows::{RowProblem, float_index};
use hk_core::{
    DType, Element, Error, Kernel, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut,
};

/// Groups of a lane in a tile, `tiles::kGroups`: vectorized, scalar.
const GROUPS: [usize; 2] = [4, 1];
/// Bytes of a vector of the main input, `hk::kVecBytes`.
const VECTOR_BYTES: usize = 16;
/// Units of the rows that contiguous tensors are split into: a multiple of every tile.
const UNITS_WITHOUT_ROWS: usize = 1 << 17;
/// Waves per CU with enough bytes in flight to cover the latency of memory.
const WAVES_PER_CU: usize = 12;

/// The entry points of one source: vectorized and scalar, for bf16, f16 and f32.
pub(crate) type KernelTable<P> = [[KernelRef<P>; 2]; 3];

/// The entry points of an operator: `op_dtype` and `op_dtype_scalar`.
macro_rules! kernel_table {
    ($params:ty, $op:literal) => {
        [
            kernel_table!(@ $params, $op, "bf16"),
            kernel_table!(@ $params, $op, "f16"),
            kernel_table!(@ $params, $op, "f32"),
        ]
    };
    (@ $params:ty, $op:literal, $dtype:literal) => {
        [
            const { <$params>::kernel(concat!($op, "_", $dtype)) },
            const { <$params>::kernel(concat!($op, "_", $dtype, "_scalar")) },
        ]
    };
}
pub(crate) use kernel_table;

/// The tensors of an elementwise operator.
pub(crate) struct Tiles {
    op: &'static str,
    dtype: DType,
    walk: Walk,
}

enum Walk {
    /// Contiguous tensors: the number of elements, and whether every tensor is aligned for whole vectors.
    Flat { numel: usize, can_vectorize: bool },
    /// By rows; the largest row stride and the longest row, in bytes.
    Rows { problem: RowProblem, stride_bytes: usize, row_bytes: usize },
}

impl Tiles {
    /// Contiguous tensors of `numel` elements; the main one is of `dtype`.
    pub fn flat(op: &'static str, dtype: DType, numel: usize) -> Self {
        Self { op, dtype, walk: Walk::Flat { numel, can_vectorize: true } }
    }

    /// Tensors of `rows` rows; `cols` is how many columns the shortest of them has.
    ///
    /// # Errors
    /// As [`RowProblem::new`].
    pub fn rows(op: &'static str, arg: &'static str, rows: usize, cols: usize, dtype: DType) -> Result<Self> {
        let problem = RowProblem::new(op, arg, rows, cols, dtype)?;
        Ok(Self { op, dtype, walk: Walk::Rows { problem, stride_bytes: 0, row_bytes: 0 } })
    }

    /// Adds an input.
    ///
    /// # Errors
    /// As [`RowProblem::tensor`].
    pub fn input<T: Element>(&mut self, arg: &'static str, tensor: &TensorView<T>) -> Result<()> {
        let rows = || tensor.rows(self.op, arg);
        match &mut self.walk {
            Walk::Flat { can_vectorize, .. } => {
                tensor.expect_aligned(self.op, arg, size_of::<T>() as u64)?;
                *can_vectorize &= tensor.is_aligned(vector_bytes::<T>(self.dtype));
                Ok(())
            }
            Walk::Rows { problem, stride_bytes, row_bytes } => {
                let rows = rows()?;
                *stride_bytes = (*stride_bytes).max(rows.row_stride.saturating_mul(size_of::<T>()));
                *row_bytes = (*row_bytes).max(rows.cols * size_of::<T>());
                problem.tensor(arg, tensor)
            }
        }
    }

    /// Adds an output.
    ///
    /// # Errors
    /// As [`RowProblem::tensor`].
    pub fn output<T: Element>(&mut self, arg: &'static str, tensor: &TensorViewMut<T>) -> Result<()> {
        self.input(arg, &tensor.alias())
    }

    /// The kernel, its walk and its grid. There is something to do.
    ///
    /// # Errors
    /// [`Error::TooLarge`] beyond 2^32 - 1 rows, as [`Stream::kernel`].
    pub fn plan<P: Pod>(
        &self,
        stream: &Stream,
        kernels: &KernelTable<P>,
    ) -> Result<(Kernel<P>, Shape, LaunchConfig)> {
        let vector = VECTOR_BYTES / self.dtype.size_bytes();
        let can_vectorize = match &self.walk {
            &Walk::Flat { numel, can_vectorize } => can_vectorize && numel >= vector,
            Walk::Rows { problem, .. } => problem.can_vectorize(),
        };
        let unit = if can_vectorize { vector } else { 1 };
        let info = stream.device().info();
        let wave = info.wave_size as usize;
        let full = wave * GROUPS[usize::from(!can_vectorize)] * vector / unit;

        let mut shape = Shape::zeroed();
        let (rows, units, tile) = match &self.walk {
            &Walk::Flat { numel, .. } => {
                shape.tail = (numel % unit) as u32;
                shape.numel = (numel - numel % unit) as u64;
                ((numel / unit).div_ceil(UNITS_WITHOUT_ROWS), UNITS_WITHOUT_ROWS, full)
            }
            Walk::Rows { problem, stride_bytes, row_bytes } => {
                let units = problem.cols() / unit;
                // Offsets from a tile's first row fit 31 bits, and strides that are multiplied with rows 24.
                let reach =
                    (full.div_ceil(units) + 1).saturating_mul(*stride_bytes).saturating_add(*row_bytes);
                let near = *stride_bytes < 1 << 24 && reach < 1 << 31;
                let within_a_row = if units <= full { units } else { gcd(units, full) };
                (problem.rows(), units, if near { full } else { within_a_row })
            }
        };
        let too_many = || Error::too_large(self.op, "x", format!("{rows} rows"), u32::MAX.into());
        shape.rows = u32::try_from(rows).map_err(|_| too_many())?;
        shape.units = units as u32;
        shape.tile = tile as u32;
        shape.inv_units = (1.0 / units as f64) as f32;
        shape.inverse = u32::MAX / shape.units;

        let all = match self.walk {
            Walk::Flat { numel, .. } => (numel / unit).div_ceil(tile),
            Walk::Rows { .. } => rows.saturating_mul(units).div_ceil(tile),
        };
        let blocks = info.blocks_for(all, wave, WAVES_PER_CU);
        shape.step_rows = (blocks * tile / units) as u32;
        shape.step_units = (blocks * tile % units) as u32;
        let kernel = stream.kernel(kernels[float_index(self.dtype)][usize::from(!can_vectorize)])?;
        Ok((kernel, shape, LaunchConfig::grid_1d(blocks)))
    }
}

/// Bytes of one access of a tensor of `T`, for a vector of the main tensor.
fn vector_bytes<T: Element>(main: DType) -> u64 {
    (VECTOR_BYTES / main.size_bytes() * size_of::<T>()).min(VECTOR_BYTES) as u64
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The first element of a contiguous tensor, all that the kernel needs: axes of a descriptor are below 2^32.
///
/// # Errors
/// As [`TensorView::flatten_rows`].
pub(crate) fn start_of<'a, T: Element>(
    op: &'static str,
    arg: &'static str,
    mut tensor: TensorView<'a, T>,
) -> Result<TensorView<'a, T>> {
    for axis in 0..tensor.shape().len() {
        tensor = tensor.slice(axis, 0..1)?;
    }
    if tensor.shape().is_empty() { Ok(tensor) } else { tensor.flatten_rows(op, arg) }
}

/// [`start_of`] of an output.
///
/// # Errors
/// As [`TensorView::flatten_rows`].
pub(crate) fn start_of_mut<'a, T: Element>(
    op: &'static str,
    arg: &'static str,
    mut tensor: TensorViewMut<'a, T>,
) -> Result<TensorViewMut<'a, T>> {
    for axis in 0..tensor.shape().len() {
        tensor = tensor.slice(axis, 0..1)?;
    }
    if tensor.shape().is_empty() { Ok(tensor) } else { tensor.flatten_rows(op, arg) }
}
