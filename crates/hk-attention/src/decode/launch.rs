//! The launch of `hip/decode.h`.

use super::splits::{
    DecodeWorkspace, Division, KEYS_OF_BLOCK, ROWS_OF_BLOCK, Splits, decode_sizes, rows_of_tall,
};
use crate::kernels::attention::{DecodeParams, KeyRows, KeysValues, Pages, Params};
use crate::prefill::{
    FP8, I8, MOST_STRIDE, Merge, Plan, Problem, QueryTile, Tiling, UNLIMITED, WINDOW_OF_PAGE, floats_per_row,
};
use bytemuck::Zeroable;
use hk_core::{DType, Error, KernelRef, LaunchConfig, Result, TensorViewMut};

/// By columns, at most.
type Table = [(usize, Kernels); 3];

/// The kernels of a type, by cache.
#[derive(Clone, Copy)]
struct Kernels {
    /// Of 16 rows: for the own type, for fp8 and for int8, for these two with factors of tokens, and for all three in pieces of 16 bytes.
    short: [KernelRef<DecodeParams>; 8],
    /// Of more rows, which share the keys, in the same order; pieces of 256 columns have none.
    tall: &'static [KernelRef<DecodeParams>],
}

/// Place of the first kernel of pieces.
const IN_PIECES: usize = 5;

macro_rules! kernels {
    ($type:literal $($columns:literal $most:literal $rows:literal $($pieces:literal)?),*) => {
        [$((
            $most,
            Kernels {
                short: [
                    DecodeParams::kernel(concat!("decode_", $type, "_d", $columns)),
                    DecodeParams::kernel(concat!("decode_", $type, "_fp8_d", $columns)),
                    DecodeParams::kernel(concat!("decode_", $type, "_i8_d", $columns)),
                    DecodeParams::kernel(concat!("decode_", $type, "_fp8_scaled_d", $columns)),
                    DecodeParams::kernel(concat!("decode_", $type, "_i8_scaled_d", $columns)),
                    DecodeParams::kernel(concat!("decode_", $type, "_pieces_d", $columns)),
                    DecodeParams::kernel(concat!("decode_", $type, "_fp8_pieces_d", $columns)),
                    DecodeParams::kernel(concat!("decode_", $type, "_i8_pieces_d", $columns)),
                ],
                tall: &[
                    DecodeParams::kernel(concat!("decode_", $type, "_d", $columns, "_rows", $rows)),
                    DecodeParams::kernel(concat!("decode_", $type, "_fp8_d", $columns, "_rows", $rows)),
                    DecodeParams::kernel(concat!("decode_", $type, "_i8_d", $columns, "_rows", $rows)),
                    DecodeParams::kernel(concat!("decode_", $type, "_fp8_scaled_d", $columns, "_rows", $rows)),
                    DecodeParams::kernel(concat!("decode_", $type, "_i8_scaled_d", $columns, "_rows", $rows)),
                    $(
                        DecodeParams::kernel(concat!("decode_", $type, "_pieces_d", $columns, "_rows", $pieces)),
                        DecodeParams::kernel(concat!("decode_", $type, "_fp8_pieces_d", $columns, "_rows", $pieces)),
                        DecodeParams::kernel(concat!("decode_", $type, "_i8_pieces_d", $columns, "_rows", $pieces)),
                    )?
                ],
            },
        )),*]
    };
}
const BF16: Table = kernels!("bf16" "64" 64 "64" "32", "128" 128 "64" "32", "256" 256 "32");
const F16: Table = kernels!("f16" "64" 64 "64" "32", "128" 128 "64" "32", "256" 256 "32");

/// A kernel and the rows of its blocks.
#[derive(Clone, Copy)]
pub(super) struct DecodeKernel {
    kernel: KernelRef<DecodeParams>,
    rows: usize,
}

/// Rows of a sequence and key head beyond which prompts' kernels read fewer keys.
const MOST_ROWS_OF_FEW: usize = 64;

/// Keys are split as `splits` says.
pub(crate) struct DecodePlan<'a> {
    pub splits: Splits,
    pub workspace: DecodeWorkspace<'a>,
}

impl<'a> DecodePlan<'a> {
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

/// A launch of the kernel of few queries, and that of the merge.
pub(super) struct DecodeLaunch<'a> {
    pub params: DecodeParams,
    pub blocks: usize,
    pub merge: Option<Merge<'a>>,
}

/// Which of the sequences a launch serves.
#[derive(Clone, Copy, PartialEq)]
enum Of {
    All,
    /// Those of one query.
    Single,
}

impl<'a> Problem<'a> {
    pub(crate) fn check_plan(&mut self, plan: &mut DecodePlan<'a>) -> Result<()> {
        plan.splits.check(self.op)?;
        let Some(partials) = &mut plan.workspace.partials else { return Ok(()) };
        partials.dims::<1>(self.op, "workspace")?;
        partials.expect_contiguous(self.op, "workspace")?;
        partials.expect_aligned(self.op, "workspace", 16)?;
        // Also if it is not used.
        self.launch.output_address("workspace", partials).map(drop)
    }

    /// The kernel of few queries that serves the call: 16-bit queries or fp8 ones, a cache of that type, fp8 or int8, of rows in whole vectors, in
    /// pages of whole windows. `rows`: those of a sequence and key head. `keys_beside`: other sequences have some.
    pub(super) fn decode_kernel(&self, rows: usize, keys_beside: bool) -> Option<DecodeKernel> {
        let p = &self.params;
        let (scores, cache) = (&p.scores, &p.cache);
        let none = |of: &[u64]| of.iter().all(|data| *data == 0);
        let table = match self.kernel {
            DType::Bf16 => BF16,
            DType::F16 => F16,
            _ => return None,
        };
        let (bytes, element) = match cache.element {
            0 => (2, 0),
            FP8 => (1, 1),
            I8 => (1, 2),
            _ => return None,
        };
        let plain = none(&[scores.bias.data, scores.mask]) && scores.dropout == 0;
        let cached = keys_beside || p.fresh.k.data == 0;
        if self.is_hstu || !(plain && cached) {
            return None;
        }
        let of = match (self.in_rows(bytes), self.token_scales, element) {
            (true, false, of) => of,
            (true, true, 1 | 2) => 2 + element,
            (false, false, of) if self.in_pieces(bytes) => IN_PIECES + of,
            _ => return None,
        };
        let columns = p.dqk.max(p.dv) as usize;
        let (_, Kernels { short, tall }) = table.iter().find(|(most, _)| columns <= *most)?;
        let of_tall = rows_of_tall(self.stream.device().arch(), columns, of >= IN_PIECES);
        let is_tall = rows > ROWS_OF_BLOCK && of_tall > ROWS_OF_BLOCK;
        Some(match tall.get(of).filter(|_| is_tall) {
            Some(kernel) => DecodeKernel { kernel: *kernel, rows: of_tall },
            None => DecodeKernel { kernel: short[of], rows: ROWS_OF_BLOCK },
        })
    }

    /// The cache has rows of columns, on 16 bytes, in pages of whole windows.
    pub(super) fn in_rows(&self, bytes: u32) -> bool {
        let p = &self.params;
        let rows = |rows: &KeyRows, columns: u32| {
            let bytes_of_row = i64::from(bytes * columns);
            let aligned = [rows.data as i64, rows.batch, rows.head, rows.token_group, bytes_of_row];
            let walks = (bytes_of_row..=MOST_STRIDE).contains(&rows.token_group);
            rows.token_shift == 0
                && rows.column == i64::from(bytes)
                && walks
                && aligned.iter().all(|n| n % 16 == 0)
        };
        let pages = p.pages.tokens.is_multiple_of(WINDOW_OF_PAGE) || p.pages.width == 1;
        pages && rows(&p.cache.k, p.dqk) && rows(&p.cache.v, p.dv)
    }

    /// The cache has pieces of 16 bytes, of columns of K and of tokens of V, in pages of whole pieces.
    fn in_pieces(&self, bytes: u32) -> bool {
        let p = &self.params;
        let (k, v, tokens, element) = (&p.cache.k, &p.cache.v, p.pages.tokens, i64::from(bytes));
        let of_piece = 16 / bytes;
        let within = |n: u32, stride: i64| stride >= 0 && i64::from(n).saturating_mul(stride) < 1 << 31;
        let keys = k.column == element
            && k.column_shift == of_piece.ilog2()
            && (k.token_shift, k.token_group) == (0, 16)
            && within(p.dqk / of_piece, k.column_group);
        // Tokens of a column are neighbours, or those of a piece.
        let contiguous = v.token_shift == 31;
        let pieces = v.token_shift == of_piece.ilog2() && within(tokens / of_piece, v.token_group);
        let runs = v.token == element && (contiguous || pieces);
        let values = runs && v.column != element && within(p.dv, v.column);
        let [keys_at, values_at] =
            [k, v].map(|rows| [rows.data as i64, rows.batch, rows.head, rows.token_group]);
        let mut aligned = keys_at.into_iter().chain(values_at).chain([k.column_group, v.column]);
        p.pages.n_pages != 0
            && tokens.is_multiple_of(of_piece)
            && within(tokens, 16)
            && keys
            && values
            && aligned.all(|n| n % 16 == 0)
    }

    /// Launches kernels on `sequences` of `sq` queries, whose keys, `sk` at most, are in a cache: those of few queries, or of prompts.
    /// `by_sequence`: the cache is not in pages, and has a row for each sequence.
    pub(crate) fn decode_batched(
        mut self,
        mut plan: DecodePlan<'a>,
        sequences: usize,
        [sq, sk]: [usize; 2],
        by_sequence: bool,
    ) -> Result<()> {
        self.check_plan(&mut plan)?;
        let (n, queries) = (self.count("q", sequences)?, self.count("q", sq)?);
        if n == 0 || queries == 0 || self.params.heads == 0 {
            return self.run_first();
        }
        let s = &mut self.params.sequences;
        (s.n, s.sq) = (n, queries);
        let rows = sq.saturating_mul(self.params.group as usize);
        // Kernels of prompts have no factors of tokens.
        let few =
            rows <= MOST_ROWS_OF_FEW || self.token_scales || (sq == 1 && (by_sequence || !self.is_dense()));
        match self.decode_kernel(rows, false).filter(|_| few) {
            Some(kernel) => {
                let queries = sequences.saturating_mul(sq);
                self.run_decode(kernel, plan, Of::All, [sequences, queries, sk], by_sequence)
            }
            None if self.token_scales => {
                let why =
                    "caches of fp8 or int8 in rows on 16 bytes, pages of 16, 32, .. tokens, 16-bit queries";
                Err(Error::unsupported(self.op, "factors of tokens beside these tensors", why))
            }
            None => {
                if by_sequence {
                    self.cache_as_rows();
                }
                self.plan(plan.of_prompts(sk));
                self.run_batched(sequences, [sq, sk])
            }
        }
    }

    /// Of a cache with a row for each sequence: its keys are those of a batch, of which a part is used.
    fn cache_as_rows(&mut self) {
        let p = &mut self.params;
        let mut rows = std::mem::replace(&mut p.cache, KeysValues::zeroed());
        for rows in [&mut rows.k, &mut rows.v] {
            (rows.token, rows.token_group, rows.token_shift) = (rows.token_group, 0, 31);
        }
        p.fresh = rows;
        p.pages = Pages::zeroed();
        p.sequences.k_lens = std::mem::take(&mut p.sequences.total_lens);
    }

    /// Launches kernels on sequences of packed queries, `total_q` in all, whose keys, `sk` at most, are in a cache, and maybe those of their
    /// queries beside it. Short sequences have the kernel of few queries, where the call as a whole says so; single tokens beside longer
    /// sequences have it, too. A given tile is that of all.
    pub(crate) fn decode_packed(
        mut self,
        mut plan: DecodePlan<'a>,
        tile: Option<QueryTile>,
        sequences: usize,
        [total_q, sk]: [usize; 2],
    ) -> Result<()> {
        self.check_plan(&mut plan)?;
        let (n, total) = (self.count("cu_seqlens_q", sequences)?, self.count("q", total_q)?);
        if n == 0 || total == 0 || self.params.heads == 0 {
            return Ok(());
        }
        let keys_beside = self.params.fresh.k.data != 0;
        let s = &mut self.params.sequences;
        (s.n, s.total_q) = (n, total);
        if !keys_beside {
            s.total_k = u32::try_from(sk).unwrap_or(u32::MAX);
        }
        let group = self.params.group as usize;
        let of_tile = (ROWS_OF_BLOCK / group).max(1);
        let few =
            tile == Some(QueryTile::Few) || (tile.is_none() && total_q <= sequences.saturating_mul(of_tile));
        let single = tile.is_none() && sequences > 1 && (!keys_beside || self.params.single_cached != 0);
        let of_all = few && !keys_beside;
        // Of sequences that are as long as each other. Over int8 blocks of more rows have other bits, and may not follow from the batch.
        let queries = if of_all && self.params.cache.element != I8 { total_q.div_ceil(sequences) } else { 1 };
        match self.decode_kernel(queries.saturating_mul(group), keys_beside && single) {
            Some(kernel) if of_all => {
                return self.run_decode(kernel, plan, Of::All, [sequences, total_q, sk], false);
            }
            Some(kernel) if single => {
                self.run_decode(kernel, plan, Of::Single, [sequences, sequences, sk], false)?;
                self.params.skip_single = 1;
                self.tile(tile);
            }
            _ => {
                let mut plan = plan.of_prompts(sk);
                if let Some(tile) = tile {
                    plan.tiling = plan.tiling.of_tile(tile);
                }
                self.plan(plan);
            }
        }
        self.run_packed(sequences, total_q)
    }

    /// As [`decode_launch`](Self::decode_launch), and launches it.
    fn run_decode(
        &mut self,
        DecodeKernel { kernel, rows }: DecodeKernel,
        plan: DecodePlan<'a>,
        of: Of,
        sizes: [usize; 3],
        by_sequence: bool,
    ) -> Result<()> {
        let DecodeLaunch { params, blocks, merge } =
            self.decode_launch(rows, plan, of, sizes, by_sequence)?;
        let kernel = self.stream.kernel(kernel)?;
        self.run_first()?;
        // SAFETY: the operators have checked rows, heads and columns of each tensor against each other, and this problem's launch has
        // been given them; the kernel clamps lengths, starts and pages, which are on the device, to the sizes of the tensors.
        unsafe { self.stream.launch(self.op).run(&kernel, LaunchConfig::grid_1d(blocks), &params)? };
        merge.map_or(Ok(()), |merge| merge.run(&params.all))
    }

    /// The launch over a token of each sequence, if the kernel serves it.
    pub(super) fn single_tokens(
        &mut self,
        mut plan: DecodePlan<'a>,
        [sequences, keys]: [usize; 2],
    ) -> Result<DecodeLaunch<'a>> {
        self.check_plan(&mut plan)?;
        let s = &mut self.params.sequences;
        (s.n, s.sq) = (sequences as u32, 1);
        self.decode_launch(ROWS_OF_BLOCK, plan, Of::All, [sequences, sequences, keys], false)
    }

    /// Sets the splits of `all`, of so many `rows`, queries by heads, and their memory. The address of the counters; 0: a second launch
    /// merges.
    pub(crate) fn divide_keys(
        &mut self,
        all: &mut Params,
        division: Division,
        rows: usize,
        workspace: DecodeWorkspace<'a>,
    ) -> Result<u64> {
        let s = &mut all.splits;
        (s.count, s.keys) = (division.count as u32, division.keys as u32);
        if division.count <= 1 {
            return Ok(0);
        }
        let op = self.op;
        let DecodeWorkspace { partials, tickets } = workspace;
        let per_row = floats_per_row(all.dv as usize);
        let got = partials.as_ref().map_or(0, |w: &TensorViewMut<f32>| w.numel());
        let want = rows.saturating_mul(per_row).saturating_mul(division.count);
        if got < want {
            let want = format!("[{want}] or longer ({} splits)", division.count);
            return Err(Error::shape(op, "workspace", [got], want));
        }
        let too_large = |_| Error::too_large(op, "q", format!("{rows} rows by heads"), u32::MAX.into());
        s.rows = u32::try_from(rows).map_err(too_large)?;
        if let Some(mut partials) = partials {
            s.acc = self.launch.output_address("workspace", &mut partials)?;
            s.sums = s.acc + (4 * division.count * rows * (per_row - 2)) as u64;
        }
        match tickets.filter(|_| division.one_launch) {
            Some(tickets) => self.launch.output_address("tickets", &mut tickets.view_mut()?),
            None => Ok(0),
        }
    }

    /// Of blocks of `of_block` rows. Sizes: sequences, their queries, and keys of a sequence, at most.
    fn decode_launch(
        &mut self,
        of_block: usize,
        plan: DecodePlan<'a>,
        of: Of,
        [sequences, queries, keys]: [usize; 3],
        by_sequence: bool,
    ) -> Result<DecodeLaunch<'a>> {
        let (op, info) = (self.op, self.stream.device().info());
        let DecodePlan { splits, workspace: DecodeWorkspace { partials, tickets } } = plan;
        let mut all = self.params;
        let rows = self.count("q", queries.saturating_mul(all.group as usize))? as usize;
        let tiles = if all.sequences.q_starts != 0 && of == Of::All {
            rows / of_block + sequences
        } else {
            let of_one = (rows / sequences.max(1)).div_ceil(of_block);
            all.sequences.tiles_of_one = of_one as u32;
            of_one.saturating_mul(sequences)
        };
        if of == Of::Single {
            all.sequences.sq = 1;
        }
        let all_tiles = tiles.saturating_mul(all.kv_heads as usize);
        let left = all.scores.left;
        // Of windows that begin anywhere in a page.
        let of_window = (left as usize).saturating_add(queries).saturating_add(WINDOW_OF_PAGE as usize);
        let seen = if left == UNLIMITED { keys } else { keys.min(of_window) };
        let rows = queries.saturating_mul(all.heads as usize);
        let per_row = floats_per_row(all.dv as usize);
        let got = partials.as_ref().map_or(0, |w: &TensorViewMut<f32>| w.numel());
        // Partial results of single tokens are by sequence: only the kernel itself merges them.
        let alone = of == Of::Single && tickets.is_none();
        let room = if alone { 1 } else { got / rows.saturating_mul(per_row).max(1) };
        let mut division = splits.divide(&decode_sizes(info.arch), info, all_tiles, seen, room);
        if of == Of::Single && !division.one_launch {
            division = Splits::Count(1).divide(&decode_sizes(info.arch), info, all_tiles, seen, 1);
        }
        if u32::try_from(all_tiles).is_err() {
            return Err(Error::too_large(op, "q", format!("{all_tiles} tiles"), u32::MAX.into()));
        }
        all.sequences.tiles = tiles as u32;
        let workspace = DecodeWorkspace { partials, tickets };
        let counters = self.divide_keys(&mut all, division, rows, workspace)?;
        let params = DecodeParams {
            all,
            tickets: counters,
            only_single: (of == Of::Single).into(),
            by_sequence: by_sequence.into(),
        };
        let merge = if division.count > 1 && counters == 0 { Some(self.merge()?) } else { None };
        Ok(DecodeLaunch { params, blocks: all_tiles.saturating_mul(division.count), merge })
    }
}
