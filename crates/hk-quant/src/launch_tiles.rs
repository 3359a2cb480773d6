//! Grids of the kernels that `hip/tiles.h` spreads.

use hk_core::rowwise::{RowPlan, RowProblem, RowVariant};
use hk_core::{CodeObjects, DType, LaunchConfig, Result, Stream};

/// Columns of a tile that a wave takes at a time, at least: by elements; by vectors it can be more.
const TILE: usize = 512;

/// The entry points for a dtype: of rows of up to 128 columns, and of tiles of longer ones.
pub const fn variants(dtype: DType) -> [RowVariant; 4] {
    // 32 bytes a lane.
    let lanes_of_128 = if matches!(dtype, DType::F32) { 16 } else { 8 };
    [
        RowVariant::vectors(128, lanes_of_128, 2, 8),
        RowVariant::vectors(usize::MAX, 64, 1, 16),
        RowVariant::elements(128, lanes_of_128),
        RowVariant::elements(usize::MAX, 64),
    ]
}

/// Names of the entry points of an operator, per dtype.
macro_rules! names {
    ($op:literal) => {
        hk_core::row_kernels!($op, ["bf16", "f16", "f32"], ["128", "long", "128_elements", "long_elements"])
    };
}
pub(crate) use names;

/// [`RowProblem::plan`] for rows of `dtype`, where variants whose rows have all lanes of a wave cut them into tiles: rows that are few and long
/// then are many blocks.
pub fn plan(
    problem: &RowProblem,
    stream: &Stream,
    objects: &'static CodeObjects,
    dtype: DType,
    names: &[[&'static str; 4]; 3],
) -> Result<RowPlan> {
    let variants = variants(dtype);
    let mut plan = problem.plan(stream, objects, &variants, &names[hk_core::rowwise::float_index(dtype)])?;
    let variant = &variants[plan.variant];
    if variant.widest == usize::MAX {
        let tiles = problem.rows().saturating_mul(problem.cols().div_ceil(TILE)).max(1);
        let most = stream.device().info().compute_units as usize * variant.waves_per_cu;
        plan.config = LaunchConfig::grid_1d(tiles.min(most.max(1)));
    }
    Ok(plan)
}
