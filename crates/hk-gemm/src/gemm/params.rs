//! Kernel arguments, generated from `hip/include/gemm/args.h`, and how they follow from tensors.

use super::launch::Store;
pub use crate::kernels::gemm::{
    BlockParams, BlockScale, BulkParams, DualParamsBlockParams as BlockAndPlain,
    DualParamsMixedParams as MixedAndPlain, Epilogue, Fusion, Grid, Groups, MixedParams, MxScale, Operand,
    Params, QuantXParams, SplitK, Term,
};
use crate::kernels::hk::RowLayout;
pub use crate::kernels::reduce::Params as ReduceParams;
use hk_core::plan::rows::float_index;
use hk_core::{DType, Float, GlobalLayout};

/// Strides of batches and rows, in bytes; 0 for a single one, whose stride is arbitrary.
pub(crate) fn byte_strides(layout: &GlobalLayout, element: usize) -> [i64; 2] {
    let ([_, batches, rows, _], [_, batch, row, _]) = (layout.shape(), layout.strides());
    [(batches, batch), (rows, row)].map(|(n, stride)| if n > 1 { stride * element as i64 } else { 0 })
}

/// Rows of a block of shuffled weights, and bytes of a row's chunk.
pub(crate) const SHUFFLED_ROWS: usize = 16;
pub(crate) const CHUNK: usize = 16;

impl Operand {
    /// `stage_shift`: see `RowLayout` of `hk/pipeline.h`.
    pub fn new(layout: &GlobalLayout, element: usize, shuffled: bool, stage_shift: u32) -> Self {
        let [batch, row] = byte_strides(layout, element);
        let (row, block, chunk_shift) = if shuffled {
            // Rows are contiguous, whatever the stride of a single one is.
            let block = SHUFFLED_ROWS as i64 * i64::from(layout.shape()[3]) * element as i64;
            (CHUNK as i64, block, SHUFFLED_ROWS.ilog2())
        } else {
            (row, SHUFFLED_ROWS as i64 * row, 0)
        };
        let rows = RowLayout { row, block, chunk_shift, stage_shift };
        Self { data: layout.data(), batch, layout: rows, rows: layout.shape()[2], pad: 0 }
    }
}

/// `Epilogue::kNone`.
pub(crate) const NO_ACTIVATION: u32 = 255;

impl Epilogue {
    /// Whether nothing but scales is applied to sums, and rows of y are whole vectors within the window of a tile:
    /// `hip/include/gemm/epilogue/plain_store.h`.
    pub fn is_plain(&self, fusion: &Fusion) -> bool {
        /// Elements; a tile has 256 rows.
        const LONGEST_ROW: i64 = 1 << 20;
        let whole = self.vectors != 0 && self.cols.is_multiple_of(8) && self.y_row <= LONGEST_ROW;
        let fused = fusion.divisor != 0 || fusion.kind != 0;
        let applied = match self.store {
            s if s == Store::Round as u32 => fused || self.activation != NO_ACTIVATION,
            s => s != Store::Slice as u32,
        };
        whole && !applied && self.bias == 0 && self.groups.kind == 0
    }
}

impl BlockScale {
    pub fn new(layout: &GlobalLayout, rows: usize, columns: usize) -> Self {
        let [batch, row] = byte_strides(layout, size_of::<f32>());
        // The stride of a single group is arbitrary.
        let group = if layout.shape()[3] > 1 { layout.strides()[3] * size_of::<f32>() as i64 } else { 0 };
        Self {
            data: layout.data(),
            batch,
            row: row as u32,
            group: group as u32,
            row_shift: rows.trailing_zeros(),
            group_shift: columns.trailing_zeros(),
        }
    }
}

/// Where sums are stored: strides in elements.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub data: u64,
    pub batch: i64,
    pub row: i64,
    pub split: i64,
    pub type_: u32,
    pub vectors: bool,
}

impl Output {
    pub fn new<Y: Float>(layout: &GlobalLayout, vectors: bool) -> Self {
        let [_, batch, row, _] = layout.strides();
        Self { data: layout.data(), batch, row, split: 0, type_: float_index(Y::DTYPE) as u32, vectors }
    }

    /// f32 partial sums of split-K slices, one after the other.
    pub fn slices(data: u64, [rows, columns]: [usize; 2], slice: usize) -> Self {
        Self {
            data,
            batch: (rows * columns) as i64,
            row: columns as i64,
            split: slice as i64,
            type_: float_index(DType::F32) as u32,
            vectors: columns.is_multiple_of(4),
        }
    }
}
