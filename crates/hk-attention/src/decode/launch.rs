//! The launch of `hip/decode.h`.

use super::splits::{DecodeWorkspace, KEYS_OF_BLOCK, ROWS_OF_BLOCK, Splits, Tickets};
use crate::kernels::attention::{DecodeParams, KeyRows, Params};
use crate::prefill::{
    FP8, MOST_STRIDE, Plan, Problem, QueryTile, Tiling, UNLIMITED, WINDOW_OF_PAGE, floats_per_row,
};
use hk_core::{DType, Error, KernelRef, LaunchConfig, Result, TensorViewMut};

/// By columns, at most: the kernels of caches of the own type and of fp8.
type Table = [(usize, [KernelRef<DecodeParams>; 2]); 3];

macro_rules! kernels {
    ($type:literal $($columns:literal $most:literal),*) => {
        [$((
            $most,
            [
                DecodeParams::kernel(concat!("decode_", $type, "_d", $columns)),
                DecodeParams::kernel(concat!("decode_", $type, "_fp8_d", $columns)),
            ],
        )),*]
    };
}
const BF16: Table = kernels!("bf16" "64" 64, "128" 128, "256" 256);
const F16: Table = kernels!("f16" "64" 64, "128" 128, "256" 256);

/// Keys are split as `splits` says.
pub(crate) struct DecodePlan<'a> {
    pub splits: Splits,
    pub workspace: DecodeWorkspace<'a>,
}

impl<'a> DecodePlan<'a> {
    fn check(&self, op: &'static str) -> Result<()> {
        self.splits.check(op)?;
        let Some(partials) = &self.workspace.partials else { return Ok(()) };
        partials.dims::<1>(op, "workspace")?;
        partials.expect_contiguous(op, "workspace")?;
        partials.expect_aligned(op, "workspace", 16)
    }

    /// The same for kernels of prompts over `keys` keys.
    fn of_prompts(self, keys: usize) -> Plan<'a> {
        let fixed = |keys| Tiling::Fixed { tile: QueryTile::Short, keys_per_split: Some(keys) };
        let tiling = match self.splits {
            Splits::Auto => Tiling::Auto,
            Splits::Count(n) => fixed(keys.div_ceil(n).max(1).next_multiple_of(KEYS_OF_BLOCK)),
            Splits::KeysPerSplit(n) => fixed(n),
        };
        Plan { tiling, workspace: self.workspace.partials }
    }
}

/// A cache that is not in pages: rows of a batch.
pub(crate) struct Contiguous {
    /// Address of the row of each sequence; 0: they are in order.
    pub index: u64,
}

impl<'a> Problem<'a> {
    /// The kernel of few queries that serves the call: 16-bit queries or fp8 ones, a cache of that type or fp8, of rows in whole vectors, in
    /// pages of whole windows.
    pub(crate) fn decode_kernel(&self, contiguous: bool) -> Option<KernelRef<DecodeParams>> {
        let p = &self.params;
        let (scores, cache) = (&p.scores, &p.cache);
        let none = |of: &[u64]| of.iter().all(|data| *data == 0);
        let table = match self.kernel {
            DType::Bf16 => BF16,
            DType::F16 => F16,
            _ => return None,
        };
        let (bytes, of) = match cache.element {
            0 => (2, 0),
            FP8 => (1, 1),
            _ => return None,
        };
        let in_rows = |rows: &KeyRows, columns: u32| {
            let bytes_of_row = i64::from(bytes * columns);
            let aligned = [rows.data as i64, rows.batch, rows.head, rows.token_group, bytes_of_row];
            rows.token_shift == 0
                && rows.column == i64::from(bytes)
                && (rows.token_group <= MOST_STRIDE
                    && (rows.token_group >= bytes_of_row || p.pages.tokens == 1))
                && aligned.iter().all(|n| n % 16 == 0)
        };
        let plain = none(&[p.fresh.k.data, scores.bias.data, scores.mask]) && scores.dropout == 0;
        let pages = contiguous || p.pages.tokens.is_multiple_of(WINDOW_OF_PAGE);
        let rows = in_rows(&cache.k, p.dqk) && in_rows(&cache.v, p.dv);
        if self.is_hstu || !(plain && pages && rows) {
            return None;
        }
        let columns = p.dqk.max(p.dv) as usize;
        table.iter().find(|(most, _)| columns <= *most).map(|(_, kernels)| kernels[of])
    }

    /// Launches kernels on `sequences` of `sq` queries, whose keys, `sk` at most, are in a cache: those of few queries, or of prompts.
    pub(crate) fn decode_batched(
        mut self,
        plan: DecodePlan<'a>,
        sequences: usize,
        sq: usize,
        sk: usize,
    ) -> Result<()> {
        plan.check(self.op)?;
        let (n, queries) = (self.count("q", sequences)?, self.count("q", sq)?);
        if n == 0 || queries == 0 || self.params.heads == 0 {
            return Ok(());
        }
        let s = &mut self.params.sequences;
        (s.n, s.sq) = (n, queries);
        match self.decode_kernel(false) {
            Some(kernel) => {
                self.run_decode(kernel, plan, None, [sequences, sequences.saturating_mul(sq)], sk)
            }
            None => {
                self.plan(plan.of_prompts(sk));
                self.run_batched(sequences, [sq, sk])
            }
        }
    }

    /// `queries`: of all sequences. `keys`: of a sequence, at most.
    fn run_decode(
        mut self,
        kernel: KernelRef<DecodeParams>,
        plan: DecodePlan<'a>,
        contiguous: Option<Contiguous>,
        [sequences, queries]: [usize; 2],
        keys: usize,
    ) -> Result<()> {
        let (op, info) = (self.op, self.stream.device().info());
        let DecodePlan { splits, workspace: DecodeWorkspace { partials, tickets } } = plan;
        let packed = self.params.sequences.q_starts != 0;
        let rows = self.count("q", queries.saturating_mul(self.params.group as usize))? as usize;
        let tiles = if packed {
            rows / ROWS_OF_BLOCK + sequences
        } else {
            let of_one = (rows / sequences.max(1)).div_ceil(ROWS_OF_BLOCK);
            self.params.sequences.tiles_of_one = of_one as u32;
            of_one.saturating_mul(sequences)
        };
        let all_tiles = tiles.saturating_mul(self.params.kv_heads as usize);
        let left = self.params.scores.left;
        let seen = if left == UNLIMITED {
            keys
        } else {
            keys.min(left as usize + queries + WINDOW_OF_PAGE as usize)
        };
        let (rows, per_row) =
            (queries.saturating_mul(self.params.heads as usize), floats_per_row(self.params.dv as usize));
        let got = partials.as_ref().map_or(0, |w: &TensorViewMut<f32>| w.numel());
        let division = splits.divide(info, all_tiles, seen, got / rows.saturating_mul(per_row).max(1));
        let want = rows.saturating_mul(per_row).saturating_mul(division.count);
        if division.count > 1 && got < want {
            let want = format!("[{want}] or longer ({} splits)", division.count);
            return Err(Error::shape(op, "workspace", [got], want));
        }
        let mut params = DecodeParams { all: self.params, tickets: 0, batch_index: 0, in_pages: 1, pad: 0 };
        if let Some(Contiguous { index }) = contiguous {
            (params.in_pages, params.batch_index) = (0, index);
        }
        let too_large = |what: String| Error::too_large(op, "q", what, u32::MAX.into());
        let s = &mut params.all.splits;
        (s.count, s.keys) = (division.count as u32, division.keys as u32);
        params.all.sequences.tiles = u32::try_from(all_tiles)
            .map(|_| tiles as u32)
            .map_err(|_| too_large(format!("{all_tiles} tiles")))?;
        if division.count > 1 {
            s.rows = u32::try_from(rows).map_err(|_| too_large(format!("{rows} rows by heads")))?;
            if let Some(mut partials) = partials {
                s.acc = self.launch.output_address("workspace", &mut partials)?;
                s.sums = s.acc + (4 * division.count * rows * (per_row - 2)) as u64;
            }
            if let Some(tickets) = tickets.filter(|_| division.one_launch) {
                params.tickets = self.launch.output_address("tickets", &mut tickets.view_mut()?)?;
            }
        }
        debug_assert!(all_tiles <= Tickets::CELLS || params.tickets == 0, "a counter for each tile");
        let kernel = self.stream.kernel(kernel)?;
        let merge = match self.kernel {
            DType::F16 => Params::kernel("attention_merge_f16"),
            _ => Params::kernel("attention_merge_bf16"),
        };
        let merge =
            if division.count > 1 && params.tickets == 0 { Some(self.stream.kernel(merge)?) } else { None };
        let blocks = all_tiles.saturating_mul(division.count);
        // SAFETY: the operators have checked rows, heads and columns of each tensor against each other; the kernel clamps lengths,
        // starts and pages, which are on the device, to the sizes of the tensors.
        unsafe { self.launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params)? };
        if let Some(merge) = merge {
            let blocks = rows.div_ceil(256 / (params.all.dv as usize).div_ceil(4));
            // SAFETY: a thread for each four columns of the outputs; the partial results are within the workspace.
            unsafe { self.stream.launch(op).run(&merge, LaunchConfig::grid_1d(blocks), &params.all)? };
        }
        Ok(())
    }
}
