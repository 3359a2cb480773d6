//! How the keys of sequences are split among blocks.

use crate::prefill::{AttentionProblem, floats_per_row};
use hk_core::{Arch, DeviceBuffer, DeviceInfo, Error, Result, Stream, TensorViewMut};

/// Rows of a block: queries by the heads of a group.
pub(super) const ROWS_OF_BLOCK: usize = 16;

/// Those of the blocks for more rows, as far as registers hold their accumulators beside keys, of which pieces have longer steps: on sm_90 one tile.
pub(super) fn rows_of_tall(arch: Arch, columns: usize, in_pieces: bool) -> usize {
    match (arch.is_amd(), columns, in_pieces) {
        (true, ..=128, false) => 64,
        (true, ..=128, true) | (true, _, false) => 32,
        _ => ROWS_OF_BLOCK,
    }
}

/// Splits of equally many keys are multiples of this: a step of each wave of a block.
pub(super) const KEYS_OF_BLOCK: usize = 128;

/// The splits that suit a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitSizes {
    /// Blocks of a CU, for [`Splits::Auto`].
    pub blocks_of_cu: usize,
    /// Fewest keys of a split, of [`Splits::Auto`]; twice as many where a CU has more than one block.
    pub fewest: usize,
    /// Splits of equally many keys are multiples of this.
    pub multiple: usize,
    /// Most splits that the last block to arrive merges: `kMostParts`.
    pub in_one_launch: usize,
}

/// Of `hip/decode.h`: what a block does before and after its keys, and merging more splits, take longer than more loads in flight save.
/// docs/attention.md has the modelled and measured times.
pub(super) fn decode_sizes(arch: Arch) -> SplitSizes {
    let blocks_of_cu = if arch.is_amd() { 1 } else { 2 };
    SplitSizes { blocks_of_cu, fewest: 256, multiple: KEYS_OF_BLOCK, in_one_launch: 128 }
}

/// Splits begin at multiples of this.
const KEYS_OF_SPLIT: usize = 64;

/// Most splits that suit a device.
const MOST_AUTO: usize = 128;

/// Most splits of a sequence.
const MOST_SPLITS: usize = 1 << 16;

/// How the keys of a sequence are split. Blocks have a split each, and leave partial results; these are merged in ascending order. The
/// same call gives the same bits on the same device, whichever block is the last.
///
/// Keys are those that the queries see: with a window, those of the window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Splits {
    /// As many as keep the device busy, up to 128, as far as the workspace has room. The number depends on the whole call and on the
    /// device, so a sequence's bits may depend on what else is in the batch.
    #[default]
    Auto,
    /// At most so many splits, of equally many keys of a sequence, a multiple of 128 (latent rows: 64). Batch-invariant for the same number: a
    /// sequence's bits do not depend on other sequences, nor on the device's CUs.
    Count(usize),
    /// Keys of a split, a multiple of 64. Batch-invariant: a sequence's bits do not depend on other sequences, on the width of the block table,
    /// nor on the device's CUs. Short sequences beside long ones have blocks without work.
    KeysPerSplit(usize),
}

/// Counters of the blocks that have arrived, for merges without a second launch. They are zero between launches: streams whose work may run at
/// the same time need one each.
#[derive(Debug)]
pub struct Tickets(DeviceBuffer<u32>);

impl Tickets {
    /// Tiles of rows that have a counter.
    pub(super) const CELLS: usize = 4096;

    /// 16 KiB on the stream's device.
    ///
    /// # Errors
    /// As [`Stream::alloc_zeroed`].
    pub fn new(stream: &Stream) -> Result<Self> {
        stream.alloc_zeroed(Self::CELLS).map(Self)
    }

    pub(super) fn view_mut(&mut self) -> Result<TensorViewMut<'_, u32>> {
        self.0.view_mut([Self::CELLS])
    }
}

/// Memory for the partial results of splits.
#[derive(Debug, Default)]
pub struct DecodeWorkspace<'a> {
    /// `[n]`, contiguous, on 16 bytes; [`decode_workspace`] says how long. `None`: keys are not split.
    pub partials: Option<TensorViewMut<'a, f32>>,
    /// With counters, the last block of each tile to arrive merges up to 128 splits (latent rows, [`Splits::Auto`]: those of 384 KiB). `None`,
    /// and for more splits or more than 4096 tiles: a second launch does, with the same bits.
    pub tickets: Option<&'a mut Tickets>,
}

/// How a call is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Division {
    pub count: usize,
    /// Keys of a split; 0: equal shares of a sequence's keys.
    pub keys: usize,
    pub one_launch: bool,
}

impl Splits {
    /// Counts the splits of `keys` keys for `tiles` tiles of rows, of all key heads.
    pub(crate) fn count(self, sizes: &SplitSizes, info: &DeviceInfo, tiles: usize, keys: usize) -> usize {
        match self {
            Self::Auto => {
                let of_cu = |blocks: usize, fewest: usize| {
                    let busy = blocks.saturating_mul(info.compute_units as usize) / tiles.max(1);
                    busy.min(keys.div_ceil(fewest))
                };
                of_cu(1, sizes.fewest).max(of_cu(sizes.blocks_of_cu, 2 * sizes.fewest)).clamp(1, MOST_AUTO)
            }
            Self::Count(n) => n.min(keys.div_ceil(sizes.multiple)).max(1),
            Self::KeysPerSplit(n) => keys.div_ceil(n.max(1)).max(1),
        }
    }

    pub(super) fn check(self, op: &'static str) -> Result<()> {
        match self {
            Self::Count(n) if !(1..=MOST_SPLITS).contains(&n) => {
                Err(Error::argument(op, "nsplit", n, format!("1 to {MOST_SPLITS}")))
            }
            Self::KeysPerSplit(n) if n == 0 || !n.is_multiple_of(KEYS_OF_SPLIT) => {
                Err(Error::argument(op, "keys_per_split", n, format!("a multiple of {KEYS_OF_SPLIT}")))
            }
            _ => Ok(()),
        }
    }

    /// The splits of a call with room for `room` of them.
    pub(crate) fn divide(
        self,
        sizes: &SplitSizes,
        info: &DeviceInfo,
        tiles: usize,
        keys: usize,
        room: usize,
    ) -> Division {
        let count = self.count(sizes, info, tiles, keys);
        let count = if self == Self::Auto { count.min(room).max(1) } else { count };
        let keys = if let Self::KeysPerSplit(n) = self { n } else { 0 };
        let one_launch = count <= sizes.in_one_launch && tiles <= Tickets::CELLS;
        Division { count, keys, one_launch }
    }
}

/// Elements of the `f32` workspace of decode operators: room for the partial results of the splits that suit the device, or that are asked
/// for. 0: it needs none.
///
/// [`keys`](AttentionProblem::keys) are those that the longest sequence can have: pages of a row of the block table by their tokens. Without
/// a workspace, or with a shorter one, [`Splits::Auto`] has fewer splits.
pub fn decode_workspace(info: &DeviceInfo, problem: &AttentionProblem, splits: Splits) -> usize {
    let AttentionProblem { sequences, heads, kv_heads, queries, keys, dv } = *problem;
    let rows = queries.saturating_mul(heads / kv_heads.max(1));
    // The tallest blocks have the most splits.
    let of_block = if rows > sequences.saturating_mul(ROWS_OF_BLOCK) {
        rows_of_tall(info.arch, dv, false)
    } else {
        ROWS_OF_BLOCK
    };
    let tiles = rows.div_ceil(of_block).max(sequences).saturating_mul(kv_heads);
    let count = splits.count(&decode_sizes(info.arch), info, tiles, keys);
    if count <= 1 {
        return 0;
    }
    count.saturating_mul(queries).saturating_mul(heads).saturating_mul(floats_per_row(dv))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_core::Device;

    /// One sequence of 128k keys fills the device; 256 sequences are not split.
    #[test]
    fn splits_follow_the_device() {
        let info = Device::open("emu:gfx942").unwrap().info().clone();
        let count =
            |sequences: usize, keys| Splits::Auto.count(&decode_sizes(info.arch), &info, sequences * 8, keys);
        assert_eq!(count(1, 131_072), info.compute_units as usize / 8);
        assert_eq!(count(8, 131_072), info.compute_units as usize / 64);
        assert_eq!(count(256, 1024), 1);
        assert_eq!(count(1, 1024), 4);
        // Two blocks of a CU have 512 keys each; one has 256.
        let mut of_card = info.clone();
        (of_card.arch, of_card.compute_units) = (Arch::Sm90a, 132);
        let count = |keys| Splits::Auto.count(&decode_sizes(of_card.arch), &of_card, 8, keys);
        assert_eq!([1024, 8192, 16384, 131_072].map(count), [4, 16, 32, 33]);
        assert_eq!(Splits::KeysPerSplit(256).count(&decode_sizes(info.arch), &info, 1, 1000), 4);
        assert_eq!(Splits::Count(7).count(&decode_sizes(info.arch), &info, 1, 300), 3);
    }
}
