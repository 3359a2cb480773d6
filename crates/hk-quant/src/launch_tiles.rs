//! Grids of the kernels that `hip/tiles.h` spreads.

use hk_core::rowwise::{RowPlan, RowProblem, RowVariant};
use hk_core::{
    Aliasing, CodeObjects, DType, Element, LaunchConfig, Result, Rows, Stream, TensorView, TensorViewMut,
    check_overlap,
};

/// Rows of up to this many columns go side by side in a wave; longer ones are cut into tiles.
const NARROW: usize = 128;

/// How the entry points of a dtype spread rows: by vectors, then by elements; of each, narrow rows, then tiles.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// Columns that a lane takes side by side.
    pub columns: usize,
    /// Narrow rows that a lane has in hand, by vectors.
    pub rows: usize,
    /// How often a lane takes its columns in a tile, by vectors. By elements it is once.
    pub chunks: usize,
}

impl Spread {
    /// 32 bytes a lane, twice: `quant::kChunk` of `hip/tiles.h`.
    pub const fn bytes32(dtype: DType) -> Self {
        Self { columns: 32 / dtype.size_bytes(), rows: 2, chunks: 2 }
    }

    const fn variants(self) -> [RowVariant; 4] {
        let lanes = NARROW / self.columns;
        [
            RowVariant::vectors(NARROW, lanes, self.rows, 8),
            RowVariant::vectors(usize::MAX, 64, 1, 16),
            RowVariant::elements(NARROW, lanes),
            RowVariant::elements(usize::MAX, 64),
        ]
    }

    /// [`RowProblem::plan`] for rows of `dtype`, with a grid of tiles where rows are cut: those that are few and long are
    /// many blocks.
    pub fn plan(
        self,
        problem: &RowProblem,
        stream: &Stream,
        objects: &'static CodeObjects,
        dtype: DType,
        names: &[[&'static str; 4]; 3],
    ) -> Result<RowPlan> {
        let variants = self.variants();
        let mut plan =
            problem.plan(stream, objects, &variants, &names[hk_core::rowwise::float_index(dtype)])?;
        let variant = &variants[plan.variant];
        if variant.widest == usize::MAX {
            let chunks = if variant.vectors { self.chunks } else { 1 };
            let wave = stream.device().info().wave_size as usize;
            let tiles = tiles(problem, wave * self.columns * chunks);
            plan.config = grid(stream, tiles, variant.waves_per_cu);
        }
        Ok(plan)
    }
}

/// How many tiles of `columns` columns there are.
pub fn tiles(problem: &RowProblem, columns: usize) -> usize {
    problem.rows().saturating_mul(problem.cols().div_ceil(columns))
}

/// Waves for tiles, by [`blocks_for`](hk_core::DeviceInfo::blocks_for).
pub fn grid(stream: &Stream, tiles: usize, waves_per_cu: usize) -> LaunchConfig {
    let info = stream.device().info();
    let wave = info.wave_size as usize;
    LaunchConfig::grid_1d(info.blocks_for(tiles, wave, waves_per_cu))
}

/// Names of the entry points of an operator, per dtype.
macro_rules! names {
    ($op:literal) => {
        hk_core::row_kernels!($op, ["bf16", "f16", "f32"], ["128", "long", "128_elements", "long_elements"])
    };
}
pub(crate) use names;

/// Where each element is worked on alone: the rows of a tensor and of the output, which has its shape. Rows without gaps in
/// either are one row, so that only its last tile is not full; narrow ones stay.
pub fn elementwise<'a, 'b, A: Element, B: Element>(
    op: &'static str,
    (from_name, from): (&'static str, TensorView<'a, A>),
    (to_name, to): (&'static str, TensorViewMut<'b, B>),
) -> Result<(RowProblem, TensorView<'a, A>, TensorViewMut<'b, B>)> {
    let Rows { rows, cols, .. } = from.rows(op, from_name)?;
    let mut problem = RowProblem::new(op, from_name, rows, cols, B::DTYPE)?;
    problem.tensor(from_name, &from)?;
    problem.shaped(to_name, &to, from.shape(), &format!("shape of {from_name}"))?;
    check_overlap(op, (from_name, &from), (to_name, &to), Aliasing::Disjoint)?;
    let (from, to) = (from.flatten_rows(op, from_name)?, to.flatten_rows(op, to_name)?);
    if cols > NARROW && rows > 1 && from.layout().is_contiguous() && to.layout().is_contiguous() {
        // A row too long for kernels stays many.
        if let Ok(mut one) = RowProblem::new(op, from_name, 1, from.numel(), B::DTYPE) {
            let (from, to) = (from.flatten(op, from_name)?, to.flatten(op, to_name)?);
            one.tensor(from_name, &from)?;
            one.tensor(to_name, &to)?;
            return Ok((one, from, to));
        }
    }
    Ok((problem, from, to))
}
