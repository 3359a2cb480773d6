//! How the work of attention is cut into blocks.

use crate::kernels::attention::Params;
use hk_core::{Arch, DType, DeviceInfo, KernelRef, TensorViewMut};

/// Splits of the keys begin at multiples of this.
pub(super) const KEYS_OF_TILE: usize = 64;

/// Rows of the blocks of calls that are small enough to be split, at most.
const ROWS_OF_SPLIT_BLOCKS: usize = 128;

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
        /// The tiles of query rows, where there are two kinds.
        tile: QueryTile,
        /// Keys `[i n, (i + 1) n)` of a sequence are a split; a multiple of 64. `None`: keys are not split. Short sequences beside long ones have
        /// blocks without work, and all rows go through the merge.
        keys_per_split: Option<usize>,
    },
}

/// Rows of a tile: queries by the heads of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryTile {
    /// 128 rows; 64 on sm_90. Two blocks share a CU.
    Short,
    /// 256 rows; 128 on sm_90, and for more than 128 columns of values; 192 on sm_90a, of 16-bit rows of up to 64 columns. Keys and values
    /// are read half as often.
    Tall,
    /// 16 rows, or where sequences have more than that on average, 64 (of more than 128 columns 32). Keys go from memory to registers, and are split as [`Splits`](crate::Splits) says: for single tokens and drafts. Operators
    /// without a cache in pages, and caches that this kernel does not serve, have [`Short`](Self::Short) tiles instead.
    Few,
}

impl Tiling {
    /// The same with this tile.
    pub(crate) fn of_tile(self, tile: QueryTile) -> Self {
        let keys_per_split = match self {
            Self::Auto => None,
            Self::Fixed { keys_per_split, .. } => keys_per_split,
        };
        Self::Fixed { tile, keys_per_split }
    }
}

/// A kernel and the rows of its blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct PromptKernel {
    pub kernel: KernelRef<Params>,
    pub rows: usize,
}

/// The keys that dense kernels have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DenseKeys {
    /// Fresh ones of the kernel's 16-bit type.
    Fresh,
    /// The same in pages, and fresh ones behind.
    Paged,
    /// Pages in fp8, and fresh ones of the 16-bit type behind.
    PagedFp8,
    /// Fresh ones in fp8, as queries.
    Fp8,
}

/// The two tiles of a dense kernel.
pub(super) struct DenseKernel {
    pub tall: PromptKernel,
    pub short: PromptKernel,
}

/// Kernels of one type, narrowest first: most columns of queries and keys, of values.
type Table<K> = &'static [([usize; 2], K)];

macro_rules! general {
    ($type:literal, $($columns:literal $dqk:literal $dv:literal),*) => {
        &[$(([$dqk, $dv], Params::kernel(concat!("prefill_general_", $type, "_", $columns)))),*]
    };
}
macro_rules! hstu {
    ($type:literal) => {
        &[
            ([64, 64], Params::kernel(concat!("hstu_", $type, "_64"))),
            ([128, 128], Params::kernel(concat!("hstu_", $type, "_128"))),
            ([256, 256], Params::kernel(concat!("hstu_", $type, "_256"))),
        ]
    };
}
macro_rules! dense {
    ($type:literal: $($columns:literal $dqk:literal $dv:literal),*) => {
        &[$((
            [$dqk, $dv],
            [
                Params::kernel(concat!("prefill_", $type, "_d", $columns)),
                Params::kernel(concat!("prefill_", $type, "_d", $columns, "_small")),
            ],
        )),*]
    };
    ($type:literal) => {
        dense!($type: "64" 64 64, "128" 128 128, "192_128" 192 128, "256" 256 256)
    };
}

const GENERAL: [Table<KernelRef<Params>>; 3] = [
    general!("bf16", "64" 64 64, "128" 128 128, "192_128" 192 128, "256" 256 256, "320_256" 320 256, "512" 512 512,
        "576_512" 576 512),
    general!("f16", "64" 64 64, "128" 128 128, "192_128" 192 128, "256" 256 256, "320_256" 320 256, "512" 512 512,
        "576_512" 576 512),
    general!("f32", "64" 64 64, "128" 128 128, "192_128" 192 128, "256" 256 256),
];
const HSTU: [Table<KernelRef<Params>>; 3] = [hstu!("bf16"), hstu!("f16"), hstu!("f32")];
const DENSE: [Table<[KernelRef<Params>; 2]>; 2] = [dense!("bf16"), dense!("f16")];
const DENSE_PAGED: [Table<[KernelRef<Params>; 2]>; 2] = [dense!("paged_bf16"), dense!("paged_f16")];
const DENSE_PAGED_FP8: [Table<[KernelRef<Params>; 2]>; 2] = [
    dense!("paged_bf16_fp8": "64" 64 64, "128" 128 128, "256" 256 256),
    dense!("paged_f16_fp8": "64" 64 64, "128" 128 128, "256" 256 256),
];
const DENSE_FP8: Table<[KernelRef<Params>; 2]> =
    dense!("fp8": "128" 128 128, "256_128" 256 128, "256" 256 256);

fn find<K: Copy>(table: Table<K>, [dqk, dv]: [usize; 2]) -> Option<([usize; 2], K)> {
    table.iter().find(|([most_qk, most_v], _)| dqk <= *most_qk && dv <= *most_v).copied()
}

impl PromptKernel {
    /// The kernel that serves everything.
    pub fn general(dtype: DType, hstu: bool, columns: [usize; 2]) -> Option<Self> {
        let table = if hstu { HSTU } else { GENERAL }[match dtype {
            DType::F16 => 1,
            DType::F32 => 2,
            _ => 0,
        }];
        find(table, columns).map(|([_, dv], kernel)| Self { kernel, rows: if dv <= 256 { 128 } else { 64 } })
    }

    /// The kernels of rows in whole vectors, see `hip/prefill_dense.h`.
    pub fn dense(arch: Arch, dtype: DType, keys: DenseKeys, columns: [usize; 2]) -> Option<DenseKernel> {
        let of_type = usize::from(dtype == DType::F16);
        let table = match keys {
            DenseKeys::Fresh => DENSE[of_type],
            DenseKeys::Paged => DENSE_PAGED[of_type],
            DenseKeys::PagedFp8 => DENSE_PAGED_FP8[of_type],
            DenseKeys::Fp8 => DENSE_FP8,
        };
        find(table, columns).map(|([_, dv], [tall, short])| {
            let [rows_of_tall, rows_of_short] = dense_rows(arch, keys, dv);
            DenseKernel {
                tall: Self { kernel: tall, rows: rows_of_tall },
                short: Self { kernel: short, rows: rows_of_short },
            }
        })
    }
}

/// Rows of the tall and the short tiles of dense kernels.
pub(super) fn dense_rows(arch: Arch, keys: DenseKeys, dv: usize) -> [usize; 2] {
    match (arch.is_amd(), dv <= 128, keys) {
        (true, true, _) => [256, 128],
        (true, false, _) | (false, _, DenseKeys::Fp8) => [128, 128],
        (false, ..) => [128, 64],
    }
}

/// How a call is cut, and the memory for its partial results.
pub(crate) struct Plan<'a> {
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
pub(crate) fn floats_per_row(dv: usize) -> usize {
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
            let tiles = rows.div_ceil(ROWS_OF_SPLIT_BLOCKS).max(sequences);
            auto_splits(info, tiles.saturating_mul(kv_heads), keys, usize::MAX).0
        }
        Tiling::Fixed { keys_per_split, .. } => keys_per_split.map_or(1, |n| keys.div_ceil(n.max(1))),
    };
    if splits <= 1 {
        return 0;
    }
    splits.saturating_mul(queries).saturating_mul(heads).saturating_mul(floats_per_row(dv))
}
