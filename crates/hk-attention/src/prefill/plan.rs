//! How the work of attention is cut into blocks.

use super::problem::rows_of_block;
use hk_core::{DeviceInfo, TensorViewMut};

/// Splits of the keys begin at multiples of this.
pub(super) const KEYS_OF_TILE: usize = 64;

/// Fewest keys of a split that is worth its partial results.
const FEWEST_KEYS: usize = 256;

/// How the work is cut. Rows of queries are tiles of blocks; the keys of a tile can be split among several blocks, whose partial results
/// a second launch merges, in a fixed order. The same call gives the same bits on the same device, however it is cut.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tiling {
    /// Keys are split where that keeps more CUs busy, as far as the workspace has room. The number of splits depends on the whole call and on
    /// the device, so a sequence's bits may depend on what else is in the batch.
    #[default]
    Auto,
    /// Batch-invariant: a sequence's bits do not depend on other sequences, the batch size or the device's CUs.
    Fixed {
        /// Keys `[i n, (i + 1) n)` of a sequence are a split; a multiple of 64. `None`: keys are not split. Short sequences beside long ones have
        /// blocks without work, and all rows go through the merge.
        keys_per_split: Option<usize>,
    },
}

/// How a call is cut, and the memory for its partial results.
pub(super) struct Plan<'a> {
    pub tiling: Tiling,
    pub workspace: Option<TensorViewMut<'a, f32>>,
}

/// The sizes that the workspace of attention follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionProblem {
    /// Sequences.
    pub sequences: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Queries of all sequences.
    pub queries: usize,
    /// Keys of the longest sequence.
    pub keys: usize,
    /// Columns of values.
    pub dv: usize,
}

/// The number of splits and their keys, for blocks that walk through `keys` keys, given room for so many splits.
pub(super) fn auto_splits(info: &DeviceInfo, blocks: usize, keys: usize, room: usize) -> (usize, usize) {
    let wanted = (info.compute_units as usize / blocks.max(1)).min(keys / FEWEST_KEYS).min(room);
    if wanted <= 1 {
        return (1, keys);
    }
    let keys_per_split = keys.div_ceil(wanted).next_multiple_of(KEYS_OF_TILE);
    (keys.div_ceil(keys_per_split), keys_per_split)
}

/// `f32` of a split, for each row of a head.
pub(super) fn floats_per_row(dv: usize) -> usize {
    dv.next_multiple_of(4) + 2
}

/// Elements of the `f32` workspace with which attention is as fast as it can be: room for the partial results of the splits of the keys that
/// suit the device ([`Tiling::Auto`]), or that are asked for. 0: it needs none.
///
/// Without a workspace, or with a shorter one, [`Tiling::Auto`] has fewer splits; [`Tiling::Fixed`] needs what it asks for.
pub fn attention_workspace(info: &DeviceInfo, problem: &AttentionProblem, tiling: Tiling) -> usize {
    let AttentionProblem { sequences, heads, kv_heads, queries, keys, dv } = *problem;
    let rows = queries.saturating_mul(heads / kv_heads.max(1));
    let splits = match tiling {
        Tiling::Auto => {
            let tiles = rows.div_ceil(rows_of_block(dv)).max(sequences);
            auto_splits(info, tiles.saturating_mul(kv_heads), keys, usize::MAX).0
        }
        Tiling::Fixed { keys_per_split } => keys_per_split.map_or(1, |n| keys.div_ceil(n.max(1))),
    };
    if splits <= 1 {
        return 0;
    }
    splits.saturating_mul(queries).saturating_mul(heads).saturating_mul(floats_per_row(dv))
}
