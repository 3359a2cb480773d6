//! `moe_routing`: `hip/routing.hip`, then `hip/lists.hip`.

use crate::args::Vector;
use crate::kernels::route::Lists;
use crate::kernels::routing::Params;
use crate::lists::{self, SMALL_TOKENS, check_tiles, expect_workspace};
use crate::quantize::RowsToQuantize;
use crate::topk::{TopkOptions, TopkProblem, check_weights};
use bytemuck::Zeroable;
use hk_core::plan::arrive::next_mark;
use hk_core::plan::rows::float_index;
use hk_core::{
    Float, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut, check_aliases, row_kernels,
};

/// The entry points of each dtype, by the experts that they serve.
static SMALL: [[KernelRef<Params>; 2]; 3] =
    row_kernels!(Params, "routing_small", ["bf16", "f16", "f32"], ["256", "1024"]);
static CHOOSE: [[KernelRef<Params>; 2]; 3] =
    row_kernels!(Params, "routing", ["bf16", "f16", "f32"], ["256", "1024"]);

/// Chunks that fill a device, waves of a block, and tokens of a chunk at most, whose gates have ranks of 16 bits.
const CHUNKS: usize = 256;
const WAVES: usize = 16;
const MOST_TOKENS: usize = 1024;

/// Blocks of the first launch, which has them all up to 256 tokens: chunks beyond.
fn blocks_of(tokens: usize) -> usize {
    let of_block = if tokens <= SMALL_TOKENS { WAVES } else { tokens_of_chunk(tokens) };
    tokens.div_ceil(of_block).max(1)
}

/// Elements of the workspace for the flags of those blocks, 8 bytes each.
fn flags_of(tokens: usize) -> usize {
    2 * blocks_of(tokens)
}

fn tokens_of_chunk(tokens: usize) -> usize {
    tokens.div_ceil(CHUNKS).next_multiple_of(WAVES).min(MOST_TOKENS)
}

/// Elements (`i32`) of the workspace of [`moe_routing`].
pub fn moe_routing_workspace(tokens: usize, k: usize, experts: usize) -> usize {
    // Flags of blocks, ids and weights of gates, counts of chunks and of those before.
    let chunks = if tokens <= SMALL_TOKENS { 0 } else { blocks_of(tokens) };
    let gates = tokens.saturating_mul(k).saturating_mul(2);
    gates.saturating_add((2 * chunks).saturating_mul(experts)).saturating_add(flags_of(tokens))
}

/// Rows of a tile that fit the tokens of an expert: 16 up to a mean of 8, which reads weights from memory to registers; 64 up to a mean of
/// 64, 128 beyond, through LDS. Weights that are widened as they are loaded are faster by 16 up to a mean of 32, on NVIDIA's up to 10. By modelled
/// times, that of NVIDIA's by measured ones, `docs/performance.md`.
pub fn moe_block_m(tokens: usize, k: usize, experts: usize) -> usize {
    match mean_rows(tokens, k, experts) {
        0..=8 => 16,
        9..=64 => 64,
        _ => 128,
    }
}

/// Rows of an expert.
pub(crate) fn mean_rows(tokens: usize, k: usize, experts: usize) -> usize {
    tokens.saturating_mul(k) / experts.max(1)
}

/// Tiles at most of `gates` gates of `experts` experts: the length of a map of tiles.
pub fn moe_max_tiles(gates: usize, experts: usize, block_m: usize) -> usize {
    match gates {
        gates if gates <= experts => gates,
        gates => experts.max(1) - 1 + (gates - experts + 1).div_ceil(block_m.max(1)),
    }
}

/// Offsets of experts, and what tiles are of.
#[derive(Debug)]
pub struct ExptData<'a> {
    /// `[E + 1]`: gates of the experts before.
    pub token_offs_raw: TensorViewMut<'a, i32>,
    /// `[E + 1]`: their tiles.
    pub token_offs_pad: TensorViewMut<'a, i32>,
    /// [`moe_max_tiles`] or more: the tile's number in its expert, times 2^16, plus the expert; -1 past the last tile.
    pub block_pid_map: TensorViewMut<'a, i32>,
}

/// How [`moe_routing`] chooses and cuts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoutingOptions {
    /// Experts of a token.
    pub k: usize,
    /// Rows of a tile: 16, 32, 64, 128 or 256; [`moe_block_m`] has one that fits.
    pub block_m: usize,
    /// How they are chosen.
    pub topk: TopkOptions,
}

/// What [`moe_routing`] writes. Gate `t k + j` is expert `j` of token `t`, in ascending order of experts unless
/// [`TopkOptions::order`] says otherwise.
#[derive(Debug)]
pub struct Routing<'a, W: Float> {
    /// `[T k]`: gates by expert, ascending.
    pub gather_indx: TensorViewMut<'a, i32>,
    /// `[T k]`: place of each gate in them.
    pub scatter_indx: TensorViewMut<'a, i32>,
    /// `[T k]`: their weights, in the order of `gather_indx`.
    pub gate_scal: TensorViewMut<'a, W>,
    /// `[E]`: gates of each expert.
    pub expt_hist: TensorViewMut<'a, i32>,
    /// Their offsets and tiles.
    pub expt_data: ExptData<'a>,
}

/// The experts of each gate, `[T k]`, that [`moe_routing`] leaves in its workspace.
pub(crate) fn ids_in<'a>(
    workspace: &TensorViewMut<'a, i32>,
    tokens: usize,
    k: usize,
) -> Result<TensorView<'a, i32>> {
    let flags = flags_of(tokens);
    workspace.alias().slice(0, flags..flags + tokens * k)
}

/// The experts of each token as [`moe_topk`](crate::moe_topk) chooses them, and the gates sorted by expert, without padding.
///
/// | arg                            | shape                 | dtype                 | layout                                     |
/// |--------------------------------|-----------------------|-----------------------|--------------------------------------------|
/// | `logits`                       | `[T, E]`              | `bf16`, `f16`, `f32`  | unit stride on `E`, any row stride         |
/// | `bias`                         | `[E]`                 | `f32`                 | optional, contiguous                       |
/// | `out.gather_indx`              | `[T k]`               | `i32`                 | contiguous                                 |
/// | `out.scatter_indx`             | `[T k]`               | `i32`                 | contiguous                                 |
/// | `out.gate_scal`                | `[T k]`               | as `logits`, or `f32` | contiguous                                 |
/// | `out.expt_hist`                | `[E]`                 | `i32`                 | contiguous                                 |
/// | `out.expt_data.token_offs_raw` | `[E + 1]`             | `i32`                 | contiguous                                 |
/// | `out.expt_data.token_offs_pad` | `[E + 1]`             | `i32`                 | contiguous                                 |
/// | `out.expt_data.block_pid_map`  | `[tiles]`             | `i32`                 | contiguous, at least [`moe_max_tiles`]     |
/// | `workspace`                    | `[W]`                 | `i32`                 | contiguous, at least [`moe_routing_workspace`], on 8 bytes |
///
/// Gate `g`, the `r`-th of expert `e` in ascending order, has the place `p = token_offs_raw[e] + r`: `gather_indx[p] = g`,
/// `scatter_indx[g] = p`, and `gate_scal[p]` is its weight. An expert of `n` gates has `ceil(n / block_m)` tiles. All outputs are
/// written whole; the same input gives the same bits.
///
/// One launch for up to 256 tokens, else two. No output may alias another tensor. Returns when the launches are queued.
///
/// # Errors
/// As [`moe_topk`](crate::moe_topk); [`Argument`](hk_core::Error::Argument) for a `block_m` that is not a power of two from 16 to 256,
/// [`TooLarge`](hk_core::Error::TooLarge) for more than 2^15 tiles of a `block_m`, [`Shape`](hk_core::Error::Shape) for a workspace that is too short.
pub fn moe_routing<T: Float, W: Float>(
    stream: &Stream,
    logits: TensorView<T>,
    bias: Option<TensorView<f32>>,
    out: Routing<W>,
    workspace: TensorViewMut<i32>,
    options: &RoutingOptions,
) -> Result<()> {
    route(stream, logits, bias, None, out, workspace, options, None)
}

/// [`moe_routing`]. With a map, experts that it lacks have no tiles. Of more than 256 tokens the last launch quantizes `rows`, too.
#[expect(clippy::too_many_arguments, reason = "those of the operator, and two of fused_moe")]
pub(crate) fn route<T: Float, W: Float>(
    stream: &Stream,
    logits: TensorView<T>,
    bias: Option<TensorView<f32>>,
    expert_map: Option<TensorView<i32>>,
    out: Routing<W>,
    workspace: TensorViewMut<i32>,
    options: &RoutingOptions,
    rows: Option<RowsToQuantize>,
) -> Result<()> {
    const OP: &str = "moe_routing";
    let &RoutingOptions { k, block_m, topk: ref choice } = options;
    let Routing { mut gather_indx, mut scatter_indx, mut gate_scal, mut expt_hist, expt_data } = out;
    let ExptData { mut token_offs_raw, mut token_offs_pad, mut block_pid_map } = expt_data;
    let mut workspace = workspace;
    let problem = TopkProblem::new(OP, &logits, bias.as_ref(), k, choice)?;
    let (tokens, experts) = (problem.tokens, problem.experts);
    let gates = tokens * k;
    gather_indx.expect_vector(OP, "gather_indx", gates, "gates")?;
    scatter_indx.expect_vector(OP, "scatter_indx", gates, "gates")?;
    gate_scal.expect_vector(OP, "gate_scal", gates, "gates")?;
    check_weights::<T, W>(OP, "gate_scal")?;
    expt_hist.expect_vector(OP, "expt_hist", experts, "experts")?;
    token_offs_raw.expect_vector(OP, "token_offs_raw", experts + 1, "experts, and the end")?;
    token_offs_pad.expect_vector(OP, "token_offs_pad", experts + 1, "experts, and the end")?;
    let tiles = check_tiles(OP, &block_pid_map, gates, experts, block_m)?;
    let scratch = moe_routing_workspace(tokens, k, experts);
    expect_workspace(OP, &workspace, scratch, "moe_routing_workspace")?;
    workspace.expect_aligned(OP, "workspace", 8)?;
    check_aliases(
        OP,
        &[("logits", Some(&logits)), ("bias", bias.as_ref().map(|b| b as _))],
        &[
            (("gather_indx", Some(&gather_indx)), &[]),
            (("scatter_indx", Some(&scatter_indx)), &[]),
            (("gate_scal", Some(&gate_scal)), &[]),
            (("expt_hist", Some(&expt_hist)), &[]),
            (("token_offs_raw", Some(&token_offs_raw)), &[]),
            (("token_offs_pad", Some(&token_offs_pad)), &[]),
            (("block_pid_map", Some(&block_pid_map)), &[]),
            (("workspace", Some(&workspace)), &[]),
        ],
    )?;

    if let Some(map) = &expert_map {
        map.expect_vector(OP, "expert_map", experts, "experts")?;
    }
    let mut launch = stream.launch(OP);
    let blocks = blocks_of(tokens);
    let small = tokens <= SMALL_TOKENS;
    let arrived = launch.output_address("workspace", &mut workspace)?;
    let ids = arrived + 4 * flags_of(tokens) as u64;
    let weights = ids + 4 * gates as u64;
    let partials = weights + 4 * gates as u64;
    let mut topk = problem.params::<T, W>(&mut launch, stream.device().info(), &logits, bias.as_ref())?;
    (topk.ids, topk.weights) = (ids, weights);
    let lists = Lists {
        ids,
        weights,
        sorted: launch.output_address("gather_indx", &mut gather_indx)?,
        places: launch.output_address("scatter_indx", &mut scatter_indx)?,
        sorted_weights: launch.output_address("gate_scal", &mut gate_scal)?,
        tile_map: launch.output_address("block_pid_map", &mut block_pid_map)?,
        counts: launch.output_address("expt_hist", &mut expt_hist)?,
        offsets: launch.output_address("token_offs_raw", &mut token_offs_raw)?,
        tile_offsets: launch.output_address("token_offs_pad", &mut token_offs_pad)?,
        partials: if small { 0 } else { partials },
        before: if small { 0 } else { partials + 4 * (blocks * experts) as u64 },
        arrived,
        mark: next_mark(),
        experts: experts as u32,
        expert_map: match &expert_map {
            Some(map) => launch.input_address("expert_map", map)?,
            None => 0,
        },
        flags: if size_of::<W>() == 4 { lists::WIDE_WEIGHTS } else { 0 }
            | if expert_map.is_some() { lists::LOCAL_TILES } else { 0 },
        gates: gates as u32,
        chunk: (tokens_of_chunk(tokens) * k) as u32,
        chunks: blocks as u32,
        tile_log2: block_m.trailing_zeros(),
        sorted_len: gates as u32,
        tile_map_len: tiles as u32,
        ..Lists::zeroed()
    };
    let kernels = if small { &SMALL } else { &CHOOSE };
    let kernel = stream.kernel(kernels[float_index(T::DTYPE)][problem.kernel()])?;
    let config = LaunchConfig::grid_1d(blocks);
    // SAFETY: the checks above make each tensor as large as the kernels take it to be, and the workspace large enough for ids, weights
    // and the counts of all chunks.
    unsafe { launch.run(&kernel, config, &Params { topk, lists })? };
    if small {
        return Ok(());
    }
    // SAFETY: as above; the kernels check ids, which are of the first launch.
    unsafe { lists::place_chunks(OP, stream, &lists, rows) }
}

/// Offsets of experts in gates and in tiles, from how many gates each has; and what each tile is of.
///
/// | arg                  | shape     | dtype | layout                                 |
/// |----------------------|-----------|-------|----------------------------------------|
/// | `hist`               | `[E]`     | `i32` | contiguous                             |
/// | `out.token_offs_raw` | `[E + 1]` | `i32` | contiguous                             |
/// | `out.token_offs_pad` | `[E + 1]` | `i32` | contiguous                             |
/// | `out.block_pid_map`  | `[tiles]` | `i32` | contiguous, at least [`moe_max_tiles`] |
///
/// `token_offs_raw` are the exclusive sums of `hist`, `token_offs_pad` those of `ceil(hist[e] / block_m)`, and
/// `block_pid_map[token_offs_pad[e] + b] = b 2^16 + e`; -1 past the last tile, and tiles past the end of the map are in none. A count
/// on the device outside `0..=gates` is taken as `gates`; if counts have another sum than `gates`, offsets may wrap.
///
/// One launch. No output may alias another tensor. Returns when it is queued.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks the table,
/// [`Argument`](hk_core::Error::Argument) for more than 1024 experts or a `block_m` that is not a power of two from 16 to 256,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 gates, or 2^15 tiles of a `block_m`, [`Overlap`](hk_core::Error::Overlap) if an output shares
/// memory with another tensor, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
pub fn moe_expt_data(
    stream: &Stream,
    hist: TensorView<i32>,
    out: ExptData,
    gates: usize,
    block_m: usize,
) -> Result<()> {
    const OP: &str = "moe_expt_data";
    let ExptData { mut token_offs_raw, mut token_offs_pad, mut block_pid_map } = out;
    let [experts] = hist.dims(OP, "hist")?;
    crate::args::check_experts(OP, "hist", experts)?;
    hist.expect_packed(OP, "hist")?;
    token_offs_raw.expect_vector(OP, "token_offs_raw", experts + 1, "experts, and the end")?;
    token_offs_pad.expect_vector(OP, "token_offs_pad", experts + 1, "experts, and the end")?;
    let tiles = check_tiles(OP, &block_pid_map, gates, experts, block_m)?;
    check_aliases(
        OP,
        &[("hist", Some(&hist))],
        &[
            (("token_offs_raw", Some(&token_offs_raw)), &[]),
            (("token_offs_pad", Some(&token_offs_pad)), &[]),
            (("block_pid_map", Some(&block_pid_map)), &[]),
        ],
    )?;
    let kernel = stream.kernel(lists::OFFSETS)?;
    let mut launch = stream.launch(OP);
    let params = Lists {
        counts: launch.input_address("hist", &hist)?,
        offsets: launch.output_address("token_offs_raw", &mut token_offs_raw)?,
        tile_offsets: launch.output_address("token_offs_pad", &mut token_offs_pad)?,
        tile_map: launch.output_address("block_pid_map", &mut block_pid_map)?,
        experts: experts as u32,
        gates: gates as u32,
        tile_log2: block_m.trailing_zeros(),
        tile_map_len: tiles as u32,
        ..Lists::zeroed()
    };
    // SAFETY: the checks above make the tensors as long as the kernel takes them to be; it writes no more of the map than its length.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(1), &params) }
}
