//! The safe functions of `hip/lists.hip`.

use crate::args::{MOST_CHOICES, MOST_GATES, Vector, check_choices, check_experts};
use crate::kernels::lists_quantize;
use crate::kernels::route::Lists;
use crate::moe_max_tiles;
use crate::quantize::RowsToQuantize;
use bytemuck::Zeroable;
use hk_core::plan::arrive::next_mark;
use hk_core::{Error, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut, check_aliases};

pub(crate) static OFFSETS: KernelRef<Lists> = Lists::kernel("lists_offsets");
static SMALL: KernelRef<Lists> = Lists::kernel("lists_small");
static COUNT: KernelRef<Lists> = Lists::kernel("lists_count");
static PLACE: KernelRef<Lists> = Lists::kernel("lists_place");

/// Tokens of a call that is one launch, at most.
pub(crate) const SMALL_TOKENS: usize = 256;
/// Gates of a chunk, at least and at most; ranks in a chunk are 16 bits.
const CHUNK: (usize, usize) = (1024, 32_768);
/// Chunks that fill a device.
const CHUNKS: usize = 512;
/// Waves of a block of `lists_quantize`, `kChunkWaves` of the kernels.
const CHUNK_WAVES: usize = 4;

// `ListFlag` of the kernels.
const PADDED: u32 = 1;
pub(crate) const WIDE_WEIGHTS: u32 = 2;
pub(crate) const LOCAL_TILES: u32 = 4;

fn chunk_of(gates: usize) -> usize {
    gates.div_ceil(CHUNKS).next_multiple_of(64).clamp(CHUNK.0, CHUNK.1)
}

/// Slots that [`moe_align_block_size`] needs at least: every gate, and each expert's padding.
pub fn moe_align_len(tokens: usize, k: usize, experts: usize, block_size: usize) -> usize {
    let gates = tokens.saturating_mul(k);
    let padded = gates.saturating_add(experts.saturating_mul(block_size.saturating_sub(1)));
    padded.min(gates.saturating_mul(block_size))
}

/// Elements (`i32`) of the workspace of [`moe_align_block_size`]: 0 up to 256 tokens.
pub fn moe_align_workspace(tokens: usize, k: usize, experts: usize) -> usize {
    let gates = tokens.saturating_mul(k);
    if tokens <= SMALL_TOKENS {
        return 0;
    }
    let chunks = gates.div_ceil(chunk_of(gates));
    // Flags, counts of chunks and of those before, counts of all.
    (2 * chunks).saturating_add((2 * chunks + 1).saturating_mul(experts))
}

/// What [`moe_align_block_size`] writes.
#[derive(Debug)]
pub struct TileLists<'a> {
    /// `[EM]`, [`moe_align_len`] or more: gates by expert, padded to tiles.
    pub sorted_token_ids: TensorViewMut<'a, i32>,
    /// `[ceil(EM / block_size)]` or more: the expert of each tile.
    pub expert_ids: TensorViewMut<'a, i32>,
    /// `[1]`: slots of all tiles together.
    pub num_tokens_post_padded: TensorViewMut<'a, i32>,
}

/// Gates sorted by expert, each expert's padded to whole tiles of `block_size`. Gate `t k + j` is choice `j` of token `t`.
///
/// | arg                          | shape         | dtype | layout                                                    |
/// |------------------------------|---------------|-------|-----------------------------------------------------------|
/// | `topk_ids`                   | `[T, k]`      | `i32` | contiguous                                                |
/// | `expert_map`                 | `[E]`         | `i32` | optional, contiguous: an expert's number on this rank     |
/// | `out.sorted_token_ids`       | `[EM]`        | `i32` | contiguous, at least [`moe_align_len`]                    |
/// | `out.expert_ids`             | `[tiles]`     | `i32` | contiguous, at least `ceil(EM / block_size)`              |
/// | `out.num_tokens_post_padded` | `[1]`         | `i32` | contiguous                                                |
/// | `workspace`                  | `[W]`         | `i32` | contiguous, at least [`moe_align_workspace`], on 8 bytes  |
///
/// With `pad[e] = ceil(count[e] / block_size) block_size` and `base` its exclusive sums, gate `g`, the `r`-th of expert `e` in
/// ascending order, is `sorted_token_ids[base[e] + r]`; all other slots have `T k`. `expert_ids[b]` is the expert of tile `b`, by the
/// map if there is one (negative: -1), and -1 past the last tile. `num_tokens_post_padded` is the sum of `pad`. A gate whose id is
/// outside `0..E` is in no tile. All outputs are written whole; the same input gives the same bits.
///
/// One launch for up to 256 tokens, else two. No output may alias another tensor. Returns when the launches are queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for `experts` outside `1..=1024`, `k` outside `1..=32`, or a `block_size` that is not 16, 32, 64, 128 or
/// 256, [`TooLarge`](Error::TooLarge) beyond 2^30 slots, [`Overlap`](Error::Overlap) if an output or the workspace shares memory with
/// another tensor, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
pub fn moe_align_block_size(
    stream: &Stream,
    topk_ids: TensorView<i32>,
    expert_map: Option<TensorView<i32>>,
    out: TileLists,
    workspace: TensorViewMut<i32>,
    experts: usize,
    block_size: usize,
) -> Result<()> {
    align(stream, topk_ids, expert_map, out, workspace, [experts, block_size], None)
}

/// [`moe_align_block_size`]; of more than 256 tokens the last launch quantizes `rows`, too.
pub(crate) fn align(
    stream: &Stream,
    topk_ids: TensorView<i32>,
    expert_map: Option<TensorView<i32>>,
    out: TileLists,
    workspace: TensorViewMut<i32>,
    [experts, block_size]: [usize; 2],
    rows: Option<RowsToQuantize>,
) -> Result<()> {
    const OP: &str = "moe_align_block_size";
    let TileLists { sorted_token_ids: mut sorted, expert_ids: mut tiles, num_tokens_post_padded: mut padded } =
        out;
    let mut workspace = workspace;
    let [tokens, k] = topk_ids.dims(OP, "topk_ids")?;
    check_experts(OP, "experts", experts)?;
    check_choices(OP, "topk_ids", k, MOST_CHOICES)?;
    check_block(OP, "block_size", block_size)?;
    let needed = moe_align_len(tokens, k, experts, block_size);
    let [len] = sorted.dims(OP, "sorted_token_ids")?;
    for (arg, n) in [("topk_ids", needed), ("sorted_token_ids", len)] {
        if n > MOST_GATES {
            return Err(Error::too_large(OP, arg, format!("{n} slots"), MOST_GATES as u64));
        }
    }
    if len < needed {
        return Err(Error::shape(
            OP,
            "sorted_token_ids",
            [len],
            format!("[{needed}] or longer (moe_align_len)"),
        ));
    }
    let [tiles_len] = tiles.dims(OP, "expert_ids")?;
    let blocks = len.div_ceil(block_size);
    if tiles_len < blocks {
        let want = format!("[{blocks}] or longer (tiles of sorted_token_ids)");
        return Err(Error::shape(OP, "expert_ids", [tiles_len], want));
    }
    if tiles_len > MOST_GATES {
        return Err(Error::too_large(OP, "expert_ids", format!("{tiles_len} tiles"), MOST_GATES as u64));
    }
    padded.expect_shape(OP, "num_tokens_post_padded", [1])?;
    if let Some(map) = &expert_map {
        map.expect_vector(OP, "expert_map", experts, "experts")?;
    }
    let scratch = moe_align_workspace(tokens, k, experts);
    expect_workspace(OP, &workspace, scratch, "moe_align_workspace")?;
    if scratch > 0 {
        workspace.expect_aligned(OP, "workspace", 8)?;
    }
    topk_ids.expect_packed(OP, "topk_ids")?;
    sorted.expect_packed(OP, "sorted_token_ids")?;
    tiles.expect_packed(OP, "expert_ids")?;
    padded.expect_packed(OP, "num_tokens_post_padded")?;
    check_aliases(
        OP,
        &[("topk_ids", Some(&topk_ids)), ("expert_map", expert_map.as_ref().map(|map| map as _))],
        &[
            (("sorted_token_ids", Some(&sorted)), &[]),
            (("expert_ids", Some(&tiles)), &[]),
            (("num_tokens_post_padded", Some(&padded)), &[]),
            (("workspace", Some(&workspace)), &[]),
        ],
    )?;

    let gates = tokens * k;
    let chunk = chunk_of(gates);
    let chunks = gates.div_ceil(chunk);
    let mut launch = stream.launch(OP);
    let scratch = if scratch == 0 { 0 } else { launch.output_address("workspace", &mut workspace)? };
    // Of flags, then of counts.
    let of = |rows: usize| scratch + 8 * chunks as u64 + 4 * (rows * experts) as u64;
    let params = Lists {
        ids: launch.input_address("topk_ids", &topk_ids)?,
        expert_map: match &expert_map {
            Some(map) => launch.input_address("expert_map", map)?,
            None => 0,
        },
        sorted: launch.output_address("sorted_token_ids", &mut sorted)?,
        tile_map: launch.output_address("expert_ids", &mut tiles)?,
        padded_len: launch.output_address("num_tokens_post_padded", &mut padded)?,
        arrived: scratch,
        mark: next_mark(),
        partials: of(0),
        before: of(chunks),
        counts: if scratch == 0 { 0 } else { of(2 * chunks) },
        experts: experts as u32,
        flags: PADDED,
        gates: gates as u32,
        chunk: chunk as u32,
        chunks: chunks as u32,
        tile_log2: block_size.trailing_zeros(),
        sorted_len: len as u32,
        tile_map_len: tiles_len as u32,
        ..Lists::zeroed()
    };
    let (first, blocks) = if scratch == 0 { (SMALL, 1) } else { (COUNT, chunks) };
    let kernel = stream.kernel(first)?;
    // SAFETY: the checks above make `topk_ids` `gates` long, the map and the counts `experts`, `sorted` long enough for every
    // expert's padding, and the workspace for all chunks. The kernels check ids against `experts`.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params)? };
    // SAFETY: as above.
    if scratch == 0 { Ok(()) } else { unsafe { place_chunks(OP, stream, &params, rows) } }
}

/// Queues what comes after the counts of chunks, and the quantization of `rows`.
///
/// # Safety
/// The tensors are as the kernels of `hip/lists.hip` take them to be.
pub(crate) unsafe fn place_chunks(
    op: &'static str,
    stream: &Stream,
    lists: &Lists,
    rows: Option<RowsToQuantize>,
) -> Result<()> {
    let chunks = lists.chunks as usize;
    let Some(rows) = rows else {
        let kernel = stream.kernel(PLACE)?;
        // SAFETY: the caller's.
        return unsafe { stream.launch(op).run(&kernel, LaunchConfig::grid_1d(chunks), lists) };
    };
    let kernel = stream.kernel(rows.kernel)?;
    let config = LaunchConfig::grid_1d(chunks + rows.count.div_ceil(CHUNK_WAVES));
    let params = lists_quantize::Params { lists: *lists, rows: rows.params };
    // SAFETY: the caller's; the tensors of `rows` are as large as they say, see RowsToQuantize.
    unsafe { stream.launch(op).run(&kernel, config, &params) }
}

/// Checks the rows of a tile.
fn check_block(op: &'static str, arg: &'static str, block: usize) -> Result<()> {
    if (16..=256).contains(&block) && block.is_power_of_two() {
        return Ok(());
    }
    Err(Error::argument(op, arg, block, "16, 32, 64, 128 or 256"))
}

/// Checks a map of the tiles of lists that are not padded; returns its length.
pub(crate) fn check_tiles(
    op: &'static str,
    map: &TensorViewMut<i32>,
    gates: usize,
    experts: usize,
    block_m: usize,
) -> Result<usize> {
    check_block(op, "block_m", block_m)?;
    // The tile's number has 15 bits of its word.
    let most = MOST_GATES.min(block_m << 15);
    if gates > most {
        return Err(Error::too_large(
            op,
            "gates",
            format!("{gates} gates in tiles of {block_m}"),
            most as u64,
        ));
    }
    let [tiles] = map.dims(op, "block_pid_map")?;
    let needed = moe_max_tiles(gates, experts, block_m);
    if tiles < needed {
        let want = format!("[{needed}] or longer (moe_max_tiles)");
        return Err(Error::shape(op, "block_pid_map", [tiles], want));
    }
    if tiles > MOST_GATES {
        return Err(Error::too_large(op, "block_pid_map", format!("{tiles} tiles"), MOST_GATES as u64));
    }
    map.expect_packed(op, "block_pid_map")?;
    Ok(tiles)
}

/// Checks a workspace: at least `len` elements.
pub(crate) fn expect_workspace(
    op: &'static str,
    workspace: &TensorViewMut<i32>,
    len: usize,
    from: &str,
) -> Result<()> {
    let [given] = workspace.dims(op, "workspace")?;
    if given < len {
        return Err(Error::shape(op, "workspace", [given], format!("[{len}] or longer ({from})")));
    }
    workspace.expect_packed(op, "workspace")
}
