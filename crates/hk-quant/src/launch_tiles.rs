//! Kernel selection and grids of the kernels of `hip/tiles.h`.

use bytemuck::Pod;
use hk_core::plan::rows::{RowPlan, RowProblem, RowVariant, float_index};
use hk_core::{
    Aliasing, DType, Element, KernelRef, LaunchConfig, Result, Rows, Stream, TensorView, TensorViewMut,
    check_overlap,
};

/// Rows of up to this many columns share a wave; longer ones are cut into tiles.
const NARROW: usize = 128;

/// The entry points of an operator: by dtype (bf16, f16, f32), those of [`Spread::variants`].
pub type Kernels<P> = [[KernelRef<P>; 4]; 3];

/// How the entry points of a dtype map rows to lanes.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// Columns per lane and chunk.
    pub columns: usize,
    /// Narrow rows per thread, on the vectorized path.
    pub rows: usize,
    /// Chunks per lane and tile, on the vectorized path. The scalar path has one.
    pub chunks: usize,
}

impl Spread {
    /// Two chunks of 32 bytes per lane: `quant::kChunk` of `hip/tiles.h`.
    pub const fn bytes32(dtype: DType) -> Self {
        Self { columns: 32 / dtype.size_bytes(), rows: 2, chunks: 2 }
    }

    /// Vectorized, then scalar; of each, narrow rows, then tiles.
    const fn variants(self) -> [RowVariant; 4] {
        let lanes = NARROW / self.columns;
        [
            RowVariant::vectorized(NARROW, lanes, self.rows, 8),
            RowVariant::vectorized(usize::MAX, 64, 1, 16),
            RowVariant::scalar(NARROW, lanes),
            RowVariant::scalar(usize::MAX, 64),
        ]
    }

    /// [`RowProblem::plan`] for rows of `dtype`. Rows that are cut into tiles have a grid of tiles, so that few long rows
    /// are many blocks.
    pub fn plan<P: Pod>(
        self,
        problem: &RowProblem,
        stream: &Stream,
        dtype: DType,
        kernels: &Kernels<P>,
    ) -> Result<RowPlan<P>> {
        let variants = self.variants();
        let mut plan = problem.plan(stream, &variants, &kernels[float_index(dtype)])?;
        let variant = &variants[plan.variant];
        if variant.max_cols == usize::MAX {
            let chunks = if variant.vectorized { self.chunks } else { 1 };
            let wave = stream.device().info().wave_size as usize;
            let tiles = tiles(problem, wave * self.columns * chunks);
            plan.config = grid(stream, tiles, variant.waves_per_cu);
        }
        Ok(plan)
    }
}

/// Number of tiles of `columns` columns.
pub fn tiles(problem: &RowProblem, columns: usize) -> usize {
    problem.rows().saturating_mul(problem.cols().div_ceil(columns))
}

/// A grid of one-wave blocks for `tiles`, by [`blocks_for`](hk_core::DeviceInfo::blocks_for).
pub fn grid(stream: &Stream, tiles: usize, waves_per_cu: usize) -> LaunchConfig {
    let info = stream.device().info();
    let wave = info.wave_size as usize;
    LaunchConfig::grid_1d(info.blocks_for(tiles, wave, waves_per_cu))
}

/// The [`Kernels`] of an operator.
macro_rules! kernels {
    ($params:ty, $op:literal) => {
        hk_core::row_kernels!(
            $params,
            $op,
            ["bf16", "f16", "f32"],
            ["128", "long", "128_scalar", "long_scalar"]
        )
    };
}
pub(crate) use kernels;

/// The row problem of an elementwise operator: a tensor and its output of the same shape. Long rows that are contiguous in both
/// become one row, so that only one tile is partial.
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
        // Unless that row is too long for the kernels.
        if let Ok(mut one) = RowProblem::new(op, from_name, 1, from.numel(), B::DTYPE) {
            let (from, to) = (from.flatten(op, from_name)?, to.flatten(op, to_name)?);
            one.tensor(from_name, &from)?;
            one.tensor(to_name, &to)?;
            return Ok((one, from, to));
        }
    }
    Ok((problem, from, to))
}
