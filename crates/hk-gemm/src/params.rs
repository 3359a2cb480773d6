//! What kernels are given: the structures of `hip/problem.h` and `hip/epilogue.h`, field by field.

use bytemuck::{Pod, Zeroable};
use hk_core::quant::BlockRule;
use hk_core::rowwise::float_index;
use hk_core::{DType, Float, GlobalLayout};

/// Strides of batches and rows, in bytes; 0 for a lone one, which can have any.
pub(crate) fn byte_strides(layout: &GlobalLayout, element: usize) -> [i64; 2] {
    let ([_, batches, rows, _], [_, batch, row, _]) = (layout.shape(), layout.strides());
    [(batches, batch), (rows, row)].map(|(n, stride)| if n > 1 { stride * element as i64 } else { 0 })
}

/// Rows of a block of shuffled weights, and bytes of a row that lie together.
pub(crate) const SHUFFLED_ROWS: usize = 16;
pub(crate) const CHUNK: usize = 16;

/// `Operand` in `hip/problem.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Operand {
    data: u64,
    batch: i64,
    row: i64,
    block: i64,
    spread: u32,
    less: u32,
    rows: u32,
    pad: u32,
}

impl Operand {
    /// `less`: see `RowLayout` in `hk/pipeline.h`.
    pub fn new(layout: &GlobalLayout, element: usize, shuffled: bool, less: u32) -> Self {
        let [batch, row] = byte_strides(layout, element);
        let (row, block, spread) = if shuffled {
            // The rows' stride is their length; a lone block has none.
            let block = SHUFFLED_ROWS as i64 * i64::from(layout.shape()[3]) * element as i64;
            (CHUNK as i64, block, SHUFFLED_ROWS.ilog2())
        } else {
            (row, SHUFFLED_ROWS as i64 * row, 0)
        };
        Self { data: layout.data(), batch, row, block, spread, less, rows: layout.shape()[2], pad: 0 }
    }
}

/// `Grid` in `hip/problem.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Grid {
    pub m_tiles: u32,
    pub n_tiles: u32,
    pub group: u32,
    pub splits: u32,
    pub split_bytes: u32,
    pub k_bytes: u32,
    pub blocks: u32,
    pub pad: u32,
}

/// `Groups` in `hip/problem.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Groups {
    pub data: u64,
    pub kind: u32,
    pub matrices: u32,
}

/// `Epilogue` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Epilogue {
    pub y: u64,
    pub y_batch: i64,
    pub y_row: i64,
    pub y_split: i64,
    pub bias: u64,
    pub bias_batch: i64,
    pub x_scale: u64,
    pub w_scale: u64,
    pub x_scale_batch: i64,
    pub w_scale_batch: i64,
    pub x_scale_step: u32,
    pub w_scale_step: u32,
    pub rows: u32,
    pub cols: u32,
    pub y_type: u32,
    pub bias_type: u32,
    pub store: u32,
    pub activation: u32,
    pub vectors: u32,
    pub pad: u32,
    pub groups: Groups,
}

/// `Epilogue::kNone`.
pub(crate) const NO_ACTIVATION: u32 = 255;

/// `Params` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Params {
    pub x: Operand,
    pub w: Operand,
    pub grid: Grid,
    pub epilogue: Epilogue,
}

/// `BlockScale` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockScale {
    data: u64,
    batch: i64,
    row: u32,
    group: u32,
    row_shift: u32,
    group_shift: u32,
}

impl BlockScale {
    pub fn new(layout: &GlobalLayout, rows: usize, columns: usize) -> Self {
        let [batch, row] = byte_strides(layout, size_of::<f32>());
        // A lone group can have any stride.
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

/// `MxScale` in `hip/mx.h`; zeros: there are none.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct MxScale {
    pub data: u64,
    pub batch: i64,
    pub row: [u32; 3],
    pub block: [u32; 3],
}

/// `MixedParams` in `hip/mx.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct MixedParams {
    pub common: Params,
    pub x_mx: MxScale,
    pub w_mx: MxScale,
    pub w_scale: BlockScale,
    pub rule: BlockRule,
    pub pad: u32,
    pub fusion: Fusion,
}

/// `Term` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Term {
    pub data: u64,
    pub row: i64,
    pub value: f32,
    pub type_: u32,
    pub step: u32,
    pub vectors: u32,
}

/// `Fusion` in `hip/epilogue.h`; zeros: none.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Fusion {
    pub divisor: u64,
    pub a: Term,
    pub b: Term,
    pub rest: u64,
    pub y_head: i64,
    pub rest_row: i64,
    pub rest_head: i64,
    pub cat_row: i64,
    pub cat_head: i64,
    pub cat: u64,
    pub head: u32,
    pub tail: u32,
    pub extra: u32,
    pub cat_type: u32,
    pub kind: u32,
    pub whole: u32,
}

/// `BlockParams` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockParams {
    pub common: Params,
    pub x_scale: BlockScale,
    pub w_scale: BlockScale,
    pub fusion: Fusion,
}

/// `DualParams` in `hip/dual.h`, of codes with scales of blocks and 16-bit floats.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockAndPlain {
    pub first: BlockParams,
    pub second: Params,
}

/// The same, of mxfp4 and 16-bit floats.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct MixedAndPlain {
    pub first: MixedParams,
    pub second: Params,
}

/// `QuantXParams` in `hip/quant_x.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct QuantXParams {
    pub product: Params,
    pub q: u64,
    pub scale: u64,
    pub q_row: i64,
    pub scale_row: i64,
    pub scale_block: i64,
    pub cols: u32,
    pub blocks: u32,
    pub rule: BlockRule,
    pub element: u32,
    pub vectors: u32,
    pub pad: u32,
}

/// `Params` in `hip/reduce.hip`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ReduceParams {
    pub epilogue: Epilogue,
    pub fusion: Fusion,
    pub planes: u64,
    pub split: i64,
    pub batch: i64,
    pub row: i64,
    pub splits: u32,
    pub parts: u32,
    pub batches: u32,
    pub gated: u32,
    pub vectors: u32,
    pub pad: u32,
}

/// Where sums go: strides in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
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

    /// f32 planes of the parts of K, one after the other.
    pub fn planes(data: u64, [rows, columns]: [usize; 2], plane: usize) -> Self {
        Self {
            data,
            batch: (rows * columns) as i64,
            row: columns as i64,
            split: plane as i64,
            type_: float_index(DType::F32) as u32,
            vectors: columns.is_multiple_of(4),
        }
    }
}
