//! The plan of a GEMM: tile, split-K slices, grid, workspace.

use super::check::{Sizes, check_config, check_room};
use super::desc::{Destination, Determinism, GemmDesc, LIMIT};
use super::operands::MX_BLOCK;
use super::prequant::QuantizedSizes;
use super::select::{GemmConfig, GemmTile, Job, STAGE_BYTES, Second};
use super::table::Precision;
use super::table::{Eligible, Family, ScaleKind, Variant};
use hk_core::{DeviceInfo, E8M0, Element, Error, Float, Fp4x2, Result, Stream};

/// Split-K slices that are chosen by default, at most.
pub(crate) const MOST_SPLITS: usize = 32;
/// Slices that blocks add with atomics, at most: each adds to every output.
pub(crate) const MOST_ATOMIC_SPLITS: usize = 16;

/// Outputs of a batch, saturating.
pub(crate) fn outputs([batch, m, n]: [usize; 3]) -> usize {
    batch.saturating_mul(m).saturating_mul(n)
}

/// How a GEMM is launched.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub eligible: Eligible,
    pub config: GemmConfig,
    /// Split-K slices, and bytes of a row in each.
    pub splits: usize,
    pub split_bytes: usize,
    pub m_tiles: usize,
    pub n_tiles: usize,
    /// Columns of a tile.
    pub tile_n: usize,
    pub blocks: usize,
    /// By bulk tensor copies.
    pub bulk: bool,
    /// Slices that meet in the last block of their tile to arrive; `None`: K is whole, or a second launch sums.
    pub meet: Option<Meet>,
}

/// Split-K slices that meet in one launch, in the workspace: accumulators of all slices, then two `f32` for the flag of each block
/// (`hip/include/gemm/split_k.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meet {
    /// `f32`s of a slice: groups of 16 rows, and whole tiles of columns.
    pub slice: usize,
    /// `f32`s of the workspace, a multiple of 4.
    pub len: usize,
}

impl Meet {
    /// Rows of a group, which is stored if it has one in M.
    const ROWS: usize = 16;
    /// Columns at most: groups of a tile are reached by 32-bit offsets.
    const COLUMNS: usize = 1 << 20;

    /// Of batches, M and columns of w, in tiles of so many rows and columns.
    pub fn new([batch, m, n]: [usize; 3], [tile_m, tile_n]: [usize; 2], splits: usize) -> Option<Self> {
        if n > Self::COLUMNS {
            return None;
        }
        let n_tiles = n.div_ceil(tile_n);
        let slice = outputs([batch, m.div_ceil(Self::ROWS), n_tiles]).saturating_mul(Self::ROWS * tile_n);
        let blocks = outputs([batch, m.div_ceil(tile_m), n_tiles]).saturating_mul(splits);
        let flags = blocks.saturating_mul(2).checked_next_multiple_of(4).unwrap_or(usize::MAX);
        Some(Self { slice, len: slice.saturating_mul(splits).saturating_add(flags) })
    }
}

/// The configuration of batch-invariant calls: nothing of it follows from M or the batch.
pub(crate) const fn batch_invariant(vectorized: bool) -> GemmConfig {
    GemmConfig { tile: if vectorized { GemmTile::T64x64 } else { GemmTile::Elements }, splits: 1, group: 8 }
}

impl<A: Element, W: Element> GemmDesc<'_, A, W> {
    /// log2 of how much shorter than a stage a group of K is: `RowLayout::stage_shift` of `hk/pipeline.h`.
    pub fn stage_shift(&self) -> u32 {
        let stage = STAGE_BYTES / size_of::<A>();
        match self.group_scales.block() {
            Some(shape) if shape.k < stage => (stage / shape.k.max(1)).ilog2(),
            _ => 0,
        }
    }

    /// Bytes of so many columns of `a`, as kernels count them: a group shorter than a stage takes a whole stage.
    pub fn bytes(&self, columns: usize) -> usize {
        let (shift, stage) = (self.stage_shift(), STAGE_BYTES / size_of::<A>());
        let columns = match stage >> shift {
            _ if shift == 0 => columns,
            group => (columns / group).saturating_mul(stage).saturating_add(columns % group),
        };
        (columns / Self::PACKED[0]).saturating_mul(size_of::<A>())
    }

    /// Columns of sums: gates and values both.
    pub fn columns(&self, sizes: &Sizes) -> usize {
        if self.gated() { 2 * sizes.n } else { sizes.n }
    }

    /// Sums of a split-K slice.
    pub fn slice(&self, sizes: &Sizes) -> usize {
        outputs([sizes.batch, sizes.m, self.columns(sizes)])
    }

    pub fn plan<Y: Float>(
        &self,
        stream: &Stream,
        to: &mut Destination<Y>,
        sizes: &Sizes,
        workspace: usize,
    ) -> Result<Plan> {
        let &Sizes { batch, m, k, .. } = sizes;
        let eligible = self.eligible()?;
        let columns = self.columns(sizes);
        let vectorized = self.vectorized(sizes);
        let room = workspace / self.slice(sizes).max(1);
        let wanted = if let Destination::Slices(y) = to { Some(y.shape()[0]) } else { None };
        let most = match wanted {
            Some(splits) => splits,
            None if to.atomic() => MOST_ATOMIC_SPLITS,
            None => room.clamp(1, MOST_SPLITS),
        };
        let mut bulk = None;
        let mut config = match self.options {
            super::desc::GemmOptions { config: Some(config), .. } => {
                check_config(self.op, config, &eligible, vectorized)?;
                if !to.atomic() && wanted.is_none() {
                    check_room(self.op, config.splits, self.slice(sizes), workspace)?;
                }
                config
            }
            super::desc::GemmOptions { determinism: Determinism::BatchInvariant, .. } => {
                batch_invariant(vectorized)
            }
            _ => {
                let info = stream.device().info();
                let has_bulk = wanted.is_none() && !to.atomic() && self.has_bulk(sizes);
                let (family, sizes) = (eligible.family, [batch, m, columns, k]);
                let (precision, scales) = (family.precision, family.scales);
                let job = Job { info, precision, scales, sizes, vectorized, most_splits: most, second: None };
                bulk = if has_bulk { job.bulk(&eligible) } else { None };
                bulk.map_or_else(|| job.choose(&eligible), |bulk| bulk.config)
            }
        };
        config.splits = wanted.unwrap_or(config.splits);
        let arch = stream.device().arch();
        let (each, slices) = config.slices(arch, k, eligible.family.precision, self.group_scales.columns());
        let splits = wanted.unwrap_or(slices);
        let slices = batch.saturating_mul(splits);
        let (tile_m, most) = config.tile.shape();
        let tile_n = match (eligible.family.variant, bulk) {
            (_, Some(bulk)) => bulk.width,
            (Variant::Gated, _) => most,
            _ => config.tile.width(stream.device().info(), eligible.family.precision, [slices, m, columns]),
        };
        let (m_tiles, n_tiles) = (m.div_ceil(tile_m), columns.div_ceil(tile_n));
        let blocks = outputs([slices, m_tiles, n_tiles]);
        if blocks > LIMIT {
            return Err(Error::too_large(self.op, self.y, format!("{blocks} tiles"), LIMIT as u64));
        }
        let sums = wanted.is_none() && !to.atomic() && splits > 1;
        let meet = config.tile.meet(stream.device().info(), [batch, m, columns], splits);
        let meet = meet.filter(|meet| sums && meet.len <= workspace);
        Ok(Plan {
            eligible,
            config,
            splits,
            split_bytes: self.bytes(each),
            m_tiles,
            n_tiles,
            tile_n,
            blocks,
            bulk: bulk.is_some(),
            meet,
        })
    }
}

/// A GEMM as [`gemm_workspace`] sees it: `GemmProblem::new(Precision::Bf16, m, n, k)`, and what it has beyond that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmProblem {
    /// Operand types.
    pub precision: Precision,
    /// Independent GEMMs in the call; 1 without a batch.
    pub batch: usize,
    /// Rows of the activations.
    pub m: usize,
    /// Rows of the weights: gates and values both.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
    /// 16-bit activations are quantized to the type of the weights, in groups of so many columns (of mxfp4: any number).
    pub prequant: Option<usize>,
    /// Rows of the weights of a second GEMM of 16-bit floats in the same launch.
    pub second_n: Option<usize>,
}

impl GemmProblem {
    /// One GEMM `[m, k]` by `[n, k]`.
    pub const fn new(precision: Precision, m: usize, n: usize, k: usize) -> Self {
        Self { precision, batch: 1, m, n, k, prequant: None, second_n: None }
    }

    /// So many of them.
    pub const fn batched(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// With activations that are quantized in groups of so many columns.
    pub const fn prequantized(self, columns: usize) -> Self {
        Self { prequant: Some(columns), ..self }
    }

    /// With a second GEMM of 16-bit floats with `n` rows of weights in the same launch.
    pub const fn beside(self, n: usize) -> Self {
        Self { second_n: Some(n), ..self }
    }
}

/// What a split-K slice of two GEMMs in one launch has in the workspace, in `f32`: sums of the first, then those of the second,
/// on 16 bytes.
pub(crate) fn slice_of_two([first, second]: [usize; 2]) -> usize {
    first.checked_next_multiple_of(4).map_or(usize::MAX, |first| first.saturating_add(second))
}

/// Elements of the `f32` workspace with which a GEMM is as fast as it can be: room for the partial sums of the split-K slices
/// that suit the device, on AMD targets with a flag for each block, and for activations that are quantized ahead of the GEMM; 0: it
/// needs none.
///
/// It serves every operator of the precision. Its contents do not matter, also where a captured graph is launched again. A shorter
/// workspace, or none, is legal and only slower: with room for partial sums of M x N alone, a second launch sums them. It is an error
/// where options ask for more split-K slices than it holds, or activations that have to be quantized ahead of the GEMM do not fit.
/// Rows are assumed to begin on 16 bytes.
pub fn gemm_workspace(info: &DeviceInfo, problem: &GemmProblem) -> usize {
    let &GemmProblem { precision, batch, m, n, k, prequant, second_n } = problem;
    if let Some(columns) = prequant {
        // The kernels of quantized operands, and of int8 and fp8 those that quantize in registers.
        let (quantized, precisions): (usize, &[Precision]) = match precision {
            Precision::HalfByFp4 | Precision::Fp4 => {
                (QuantizedSizes::new::<Fp4x2, E8M0>(&[batch, m, k], MX_BLOCK).len(), &[Precision::Fp4])
            }
            _ => {
                let sizes = QuantizedSizes::new::<i8, f32>(&[batch, m, k], columns.max(1));
                (sizes.len(), &[Precision::Fp8, Precision::HalfByByte])
            }
        };
        let slices = |&precision: &Precision| {
            gemm_workspace(info, &GemmProblem { precision, prequant: None, ..*problem })
        };
        return quantized.saturating_add(precisions.iter().map(slices).max().unwrap_or(0));
    }
    let second = second_n.map(|n| Second { precision: Precision::Bf16, n });
    let families = Family::all().filter(|family| {
        family.precision == precision
            && matches!(family.variant, Variant::Beside(_)) == second.is_some()
            && family.variant != Variant::Prequant
    });
    let configs = families.flat_map(|family| {
        let (any, sizes, scales) = (Eligible::new(family), [batch, m, n, k], family.scales);
        let job = Job { info, precision, scales, sizes, vectorized: true, most_splits: MOST_SPLITS, second };
        [any, Eligible { fine_scales: family.scales == ScaleKind::Block, ..any }]
            .map(|eligible| job.choose(&eligible))
    });
    configs.map(|config| room_of(info, config, [batch, m, n], second_n)).max().unwrap_or(0)
}

impl GemmConfig {
    /// Elements of the `f32` workspace with which a GEMM of so many batches, M and rows of weights (gates and values both) takes as few
    /// launches as it can in this configuration. [`gemm_workspace`] is that of the configuration that is chosen by default.
    pub fn workspace(&self, info: &DeviceInfo, sizes: [usize; 3]) -> usize {
        room_of(info, *self, sizes, None)
    }
}

/// `f32`s of the workspace for the split-K slices of a GEMM of batches, M and N, and of a second one in its launch.
pub(crate) fn room_of(
    info: &DeviceInfo,
    config: GemmConfig,
    [batch, m, n]: [usize; 3],
    second: Option<usize>,
) -> usize {
    if config.splits <= 1 {
        return 0;
    }
    let meet = |tile: GemmTile, n| tile.meet(info, [batch, m, n], config.splits).map_or(0, |meet| meet.len);
    let (slice, met) = match second {
        Some(second) => (
            slice_of_two([outputs([1, m, n]), outputs([1, m, second])]),
            meet(config.tile, n).saturating_add(meet(config.tile.beside(), second)),
        ),
        None => (outputs([batch, m, n]), meet(config.tile, n)),
    };
    config.splits.saturating_mul(slice).max(met)
}
