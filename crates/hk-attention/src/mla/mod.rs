//! Attention over latent rows: absorbed MLA.

use crate::decode::{DecodePlan, SplitSizes};
use crate::kernels::mla::Params;
use crate::kv_cache::{CacheSizes, KvLayout, optional};
use crate::prefill::floats_per_row;
use crate::prefill::mha::check_starts;
use crate::prefill::problem::{FP8, Heads, Problem};
use crate::{AttentionOutputs, AttentionProblem, DecodeWorkspace, Mask, QueryTile, Splits};
use bytemuck::Zeroable;
use hk_core::plan::rope::RopeStyle;
use hk_core::{
    Arch, DType, DeviceInfo, Element, Error, Fp8E4M3, Fp8E4M3Fnuz, KernelRef, LaunchConfig, NamedOperand,
    Result, Stream, TensorView, TensorViewMut, bf16, f16,
};

/// Element type of queries, latent rows and outputs.
pub trait LatentElement: Element {}

impl LatentElement for bf16 {}
impl LatentElement for f16 {}

/// Element type of latent rows for queries of type `T`: `T` itself, or the device's fp8 e4m3.
pub trait LatentPool<T: LatentElement>: Element {}

impl LatentPool<bf16> for bf16 {}
impl LatentPool<f16> for f16 {}
impl LatentPool<bf16> for Fp8E4M3 {}
impl LatentPool<f16> for Fp8E4M3 {}
impl LatentPool<bf16> for Fp8E4M3Fnuz {}
impl LatentPool<f16> for Fp8E4M3Fnuz {}

/// Bytes of a latent row of DeepSeek-V3.2: 512 columns of fp8 e4m3, their four `f32` factors, each of 128 columns, and 64 columns of `bf16`,
/// little-endian.
pub const PACKED_LATENT_BYTES: usize = 656;

/// Which rows of a pool are the keys of a sequence.
#[derive(Debug, Clone, Copy)]
pub enum LatentKeys<'a> {
    /// Entries `[kv_indptr[n], kv_indptr[n + 1])` of `kv_indices`: slots, `page * tokens + token`.
    Slots {
        /// `[sequences + 1]`.
        kv_indptr: TensorView<'a, i32>,
        /// `[entries]`.
        kv_indices: TensorView<'a, i32>,
    },
    /// The first `seq_lens[n]` tokens of the pages `block_table[n, ..]`.
    Pages {
        /// `[sequences, pages]`.
        block_table: TensorView<'a, i32>,
        /// `[sequences]`.
        seq_lens: TensorView<'a, i32>,
    },
}

/// A table of cosines and sines: `[positions, rotary]`, the cosines of all pairs, then their sines.
#[derive(Debug, Clone, Copy)]
pub enum CosSin<'a, T: Element> {
    /// In `f32`.
    F32(TensorView<'a, f32>),
    /// In the type of queries.
    Own(TensorView<'a, T>),
}

/// Rotation of the last `R` columns, of which those from `rotary` on stay: of each query, and of the last key of its sequence. Other
/// keys are rotated already.
#[derive(Debug, Clone, Copy)]
pub struct MlaRope<'a, T: Element> {
    /// Cosines and sines.
    pub cos_sin: CosSin<'a, T>,
    /// `[total_q]`: the row of the table for each sequence, of one query.
    pub positions: TensorView<'a, i32>,
    /// Which columns are pairs.
    pub style: RopeStyle,
}

/// Outputs of [`mla_decode_rope`].
#[derive(Debug)]
pub struct MlaDecodeOutputs<'a, T: Element> {
    /// `[total_q, Hq, C]`.
    pub out: TensorViewMut<'a, T>,
    /// Log-sum-exp `[total_q, Hq]`.
    pub lse: Option<TensorViewMut<'a, f32>>,
    /// With [`MlaRope`]: the rotated columns of the last key of each sequence, `[total_q, R]`. The pool stays as it is.
    pub k_pe_out: Option<TensorViewMut<'a, T>>,
}

/// Inputs of [`mla_decode_rope`].
#[derive(Debug, Clone, Copy)]
pub struct MlaDecodeInputs<'a, T: Element, C: Element> {
    /// Queries `[total_q, Hq, C + R]`, with the up-projection of keys absorbed.
    pub q: TensorView<'a, T>,
    /// Latent rows `[pages, tokens, 1, C + R]`, or `[pages, tokens, 1, 656]`, see [`PACKED_LATENT_BYTES`].
    pub kv_pool: TensorView<'a, C>,
    /// `[1]`: a factor of all elements of the pool; `None`: 1.
    pub kv_scale: Option<TensorView<'a, f32>>,
    /// The rows of each sequence.
    pub keys: LatentKeys<'a>,
    /// `[sequences + 1]`: the rows of `q` at which sequences begin, and their number. `None`: each row is a sequence.
    pub cu_seqlens_q: Option<TensorView<'a, i32>>,
    /// Rotates queries and last keys; not with `cu_seqlens_q`.
    pub rope: Option<MlaRope<'a, T>>,
}

/// Options of [`mla_decode_rope`] and [`unified_attn_sparse_mla`].
#[derive(Debug, Clone, Copy, Default)]
pub struct MlaOptions {
    /// Factor of the products; `None`: `1 / sqrt(C + R)`. Absorbed queries usually need that of the head before absorption.
    pub scale: Option<f32>,
    /// `c > 0`: scores become `c tanh(s / c)`. 0: they do not.
    pub softcap: f32,
    /// Keys of the longest sequence, for splits that suit: longer ones are right, too. `None`: as many as a sequence can have.
    pub longest: Option<usize>,
    /// Rows of a block, queries by heads: 16 ([`QueryTile::Short`]) or 64 ([`QueryTile::Tall`]). `None`: 64 if a sequence has more than 16 on
    /// average, and on Hopper GPUs for latent rows of the type of queries that are read by 16 bytes.
    pub tile: Option<QueryTile>,
    /// How keys are split among blocks. With `tile`, or one query to a sequence, what [`Splits`] says of batch invariance holds.
    pub splits: Splits,
}

/// Elements of the `f32` workspace of [`mla_decode_rope`] and [`unified_attn_sparse_mla`]: room for the partial results of the splits that suit
/// the device, or that are asked for. 0: they need none.
///
/// There is one key head; [`keys`](AttentionProblem::keys) are those that the longest sequence can have. Without a workspace, or with a shorter
/// one, [`Splits::Auto`] has fewer splits.
pub fn mla_workspace(info: &DeviceInfo, problem: &AttentionProblem, options: &MlaOptions) -> usize {
    let AttentionProblem { sequences, heads, queries, keys, dv, .. } = *problem;
    let rows = queries.saturating_mul(heads);
    let tiles = rows.div_ceil(rows_of_block(options.tile, rows, sequences)).max(sequences);
    let count = options.splits.count(&SPLITS, info, tiles, keys);
    if count <= 1 { 0 } else { count.saturating_mul(rows).saturating_mul(floats_per_row(dv)) }
}

/// Of `hip/mla.h`: a block fills a CU.
const SPLITS: SplitSizes = SplitSizes { blocks_of_cu: 1, fewest: 256, multiple: 64, in_one_launch: 128 };

/// Most bytes of a tile's partial results that [`Splits::Auto`] has one CU read again to merge them: the blocks of a second launch share more.
const MOST_BYTES_OF_AUTO: usize = 384 << 10;

/// Rows of a block, of so many `rows` in all.
pub(crate) fn rows_of_block(tile: Option<QueryTile>, rows: usize, sequences: usize) -> usize {
    let tall = match tile {
        Some(tile) => tile == QueryTile::Tall,
        None => rows.div_ceil(sequences.max(1)) > 16,
    };
    if tall { 64 } else { 16 }
}

/// Attention of single tokens, or a few of each sequence, over latent rows (MLA with absorbed projections): all heads share the keys,
/// and the value of a key is the first `C` columns of its row. Query `i` of `Sq` stands at key `p = i + keys - Sq` of its sequence.
/// Queries and keys come rotated, or the call has [`MlaRope`]: then queries are rotated and rounded, as is the last key.
///
/// ```text
/// s_ij = scale (q_i . row_j);  s = softcap tanh(s / softcap);  masked, where j > p: -inf
/// lse_i = ln(sum_j exp(s_ij));  out_i = sum_j exp(s_ij - lse_i) row_j[..C]
/// ```
///
/// | arg                       | shape                       | dtype         | layout                     |
/// |---------------------------|-----------------------------|---------------|----------------------------|
/// | `q`                       | `[total_q, Hq, C + R]`      | `bf16`, `f16` | unit stride on the columns |
/// | `kv_pool`                 | `[pages, tokens, 1, C + R]` | as `q`, the device's fp8 e4m3 | unit stride on the columns |
/// |                           | `[pages, tokens, 1, 656]`   | fp8 e4m3      | the same, on 16 bytes      |
/// | `kv_scale`                | `[1]`                       | `f32`         |                            |
/// | `kv_indptr`, `kv_indices` | `[sequences + 1]`, `[n]`    | `i32`         | contiguous                 |
/// | `block_table`, `seq_lens` | `[sequences, pages]`, `[sequences]` | `i32` | unit stride on the last axis |
/// | `cu_seqlens_q`            | `[sequences + 1]`           | `i32`         | contiguous                 |
/// | `cos_sin`                 | `[positions, rotary]`       | as `q`, `f32` | unit stride on the columns |
/// | `positions`               | `[total_q]`                 | `i32`         | contiguous                 |
/// | `out`                     | `[total_q, Hq, C]`          | as `q`        | unit stride on the columns |
/// | `lse`                     | `[total_q, Hq]`             | `f32`         | any strides                |
/// | `k_pe_out`                | `[total_q, R]`              | as `q`        | unit stride on the columns |
/// | `workspace`               | `[n]`                       | `f32`         | contiguous, on 16 bytes    |
///
/// `C` is 256 or 512, `R` 0 to 128; pages have any number of tokens. Rows on 16 bytes with `R` at most 64, a multiple of 8 (of fp8: 16), are
/// read by 16 bytes; others column by column. fp8 is widened exactly, or, where AMD targets read it by 16 bytes for 16 rows, multiplied by queries
/// that are sums of terms of fp8 (error at most 2^-17 of a row's largest magnitude, of `f16` 2^-22); `kv_scale` is a factor of scores, outputs and `k_pe_out`: a rotated key is rounded before. Rows of
/// 656 bytes, beside queries in `bf16` on 16 bytes, are packed ([`PACKED_LATENT_BYTES`]): in blocks of 16 rows factors, NaN if they are not finite, are those of sums of scores and of probabilities, which are rounded with them; in blocks of 64 an element times its factor is rounded to `bf16`, on gfx942 to NaN from 2^112 on. Scores and sums are `f32`; probabilities are rounded to the type of `q`, outputs once. A query
/// without a visible key gives 0, its `lse` is -inf. Without a workspace ([`mla_workspace`]) there is one split.
///
/// Lengths, slots and pages are on the device and are not trusted. Outputs are NaN: of queries that see a slot or page that the pool does
/// not have; of sequences whose lengths are negative or beyond the table; of all rows if `cu_seqlens_q` does not rise from 0 to `total_q`.
/// A position that the table lacks makes NaN of the rotated columns, and so of the outputs. Rows of `k_pe_out` of sequences without
/// keys or with wrong lengths stay as they are; that of a slot that the pool lacks is NaN.
/// A NaN in a row makes NaN of the queries that see it, and may of others of its sequence.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align), [`Empty`](Error::Empty) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for a scale that is 0 or not finite, a softcap that is negative or not finite, splits that are none or
/// of keys that are no multiple of 64, and for `cu_seqlens_q` beside a rotation or `k_pe_out` without one, [`Unsupported`](Error::Unsupported) for other `C` and `R`,
/// [`Overlap`](Error::Overlap) of outputs, [`TooLarge`](Error::TooLarge) beyond 2^30 - 1 rows (of `q`, by heads) or slots,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
pub fn mla_decode_rope<'a, T: LatentElement, C: LatentPool<T>>(
    stream: &'a Stream,
    inputs: MlaDecodeInputs<'a, T, C>,
    outputs: MlaDecodeOutputs<'a, T>,
    workspace: DecodeWorkspace<'a>,
    options: &MlaOptions,
) -> Result<()> {
    const OP: &str = "mla_decode_rope";
    let MlaDecodeInputs { q, kv_pool, kv_scale, keys, cu_seqlens_q, rope } = inputs;
    let MlaDecodeOutputs { mut out, mut lse, mut k_pe_out } = outputs;
    let sizes = check_latent(OP, "kv_pool", &q, &kv_pool, (&out, &lse))?;
    let total_q = q.shape()[0];
    let sequences = match &cu_seqlens_q {
        Some(starts) => check_starts(OP, "cu_seqlens_q", starts)?,
        None => total_q,
    };
    if rope.is_some() && cu_seqlens_q.is_some() {
        return Err(Error::argument(OP, "cu_seqlens_q", "given", "nothing beside a rotation"));
    }
    if let Some(MlaRope { positions, .. }) = &rope {
        positions.expect_shape(OP, "positions", [total_q])?;
    }
    if rope.is_none() && k_pe_out.is_some() {
        return Err(Error::argument(OP, "k_pe_out", "given", "nothing without a rotation"));
    }
    let (own, f32_table, positions) = match &rope {
        Some(MlaRope { cos_sin: CosSin::Own(table), positions, .. }) => (Some(table), None, Some(positions)),
        Some(MlaRope { cos_sin: CosSin::F32(table), positions, .. }) => (None, Some(table), Some(positions)),
        None => (None, None, None),
    };
    let mut problem = Problem::new(OP, stream, T::DTYPE, sizes.heads);
    let operands: [NamedOperand; 2] = match &keys {
        LatentKeys::Slots { kv_indptr, kv_indices } => {
            kv_indptr.expect_shape(OP, "kv_indptr", [sequences + 1])?;
            kv_indices.dims::<1>(OP, "kv_indices")?;
            [("kv_indptr", Some(kv_indptr)), ("kv_indices", Some(kv_indices))]
        }
        LatentKeys::Pages { block_table, seq_lens } => {
            seq_lens.expect_shape(OP, "seq_lens", [sequences])?;
            [("block_table", Some(block_table)), ("seq_lens", Some(seq_lens))]
        }
    };
    problem.disjoint(
        &[
            ("q", Some(&q)),
            ("kv_pool", Some(&kv_pool)),
            ("kv_scale", optional(&kv_scale)),
            operands[0],
            operands[1],
            ("cu_seqlens_q", optional(&cu_seqlens_q)),
            ("cos_sin", own.map(|table| table as _)),
            ("cos_sin", f32_table.map(|table| table as _)),
            ("positions", positions.map(|positions| positions as _)),
        ],
        &[
            ("out", Some(&out)),
            ("lse", optional(&lse)),
            ("k_pe_out", optional(&k_pe_out)),
            ("workspace", optional(&workspace.partials)),
        ],
    )?;
    problem.queries("q", &q)?;
    problem.latent_rows("kv_pool", &kv_pool, kv_scale, sizes.heads.dv)?;
    let (slot_tokens, most) = match &keys {
        LatentKeys::Slots { kv_indptr, kv_indices } => {
            let of = CacheSizes { pages: sizes.slots, tokens: 1, ..sizes.cache };
            problem.page_list(("kv_indptr", kv_indptr), ("kv_indices", kv_indices), of)?;
            (sizes.cache.tokens, kv_indices.numel())
        }
        LatentKeys::Pages { block_table, seq_lens } => {
            problem.block_table(block_table, sequences, sizes.cache)?;
            let lens = problem.indices("seq_lens", seq_lens)?;
            problem.params().sequences.total_lens = lens;
            (1, block_table.shape()[1].saturating_mul(sizes.cache.tokens))
        }
    };
    if let Some(starts) = &cu_seqlens_q {
        let starts = problem.indices("cu_seqlens_q", starts)?;
        problem.params().sequences.q_starts = starts;
    }
    problem.out("out", &mut out)?;
    problem.lse(lse.as_mut())?;
    let most = options.longest.unwrap_or(most).min(most);
    let mut params = Params { slot_tokens: problem.count("kv_pool", slot_tokens)?, ..Params::zeroed() };
    if let Some(rope) = &rope {
        problem.rotation(&mut params, rope, k_pe_out.as_mut())?;
    }
    launch(problem, workspace, options, [sequences, total_q, most], params)
}

/// Inputs of [`unified_attn_sparse_mla`].
#[derive(Debug, Clone, Copy)]
pub struct SparseMlaInputs<'a, T: Element, C: Element> {
    /// Queries `[total_q, Hq, C + R]`, with the up-projection of keys absorbed.
    pub q: TensorView<'a, T>,
    /// Latent rows `[pages, tokens, 1, C + R]`, or `[pages, tokens, 1, 656]`, see [`PACKED_LATENT_BYTES`].
    pub kv_cache: TensorView<'a, C>,
    /// `[1]`: a factor of all elements of the cache; `None`: 1.
    pub kv_scale: Option<TensorView<'a, f32>>,
    /// `[total_q, topk]`: the slots, `page * tokens + token`, of the keys of each query; -1: none.
    pub topk_indices: TensorView<'a, i32>,
}

/// Attention of each query over latent rows of its own: those of its list. As [`mla_decode_rope`], without causality.
///
/// ```text
/// s_ij = scale (q_i . row_j);  s = softcap tanh(s / softcap)     j of topk_indices[i, ..] other than -1
/// lse_i = ln(sum_j exp(s_ij));  out_i = sum_j exp(s_ij - lse_i) row_j[..C]
/// ```
///
/// | arg            | shape                       | dtype         | layout                       |
/// |----------------|-----------------------------|---------------|------------------------------|
/// | `q`            | `[total_q, Hq, C + R]`      | `bf16`, `f16` | unit stride on the columns   |
/// | `kv_cache`     | `[pages, tokens, 1, C + R]` | as `q`, the device's fp8 e4m3 | unit stride on the columns |
/// |                | `[pages, tokens, 1, 656]`   | fp8 e4m3      | the same, on 16 bytes        |
/// | `kv_scale`     | `[1]`                       | `f32`         |                              |
/// | `topk_indices` | `[total_q, topk]`           | `i32`         | unit stride on the last axis |
/// | `out`          | `[total_q, Hq, C]`          | as `q`        | unit stride on the columns   |
/// | `lse`          | `[total_q, Hq]`             | `f32`         | any strides                  |
/// | `workspace`    | `[n]`                       | `f32`         | contiguous, on 16 bytes      |
///
/// Slots come in any order; one that is listed twice counts twice. Outputs of a query are NaN if its list has a slot that the pool does
/// not have, other than -1. A query without keys gives 0, its `lse` is -inf. Columns, rounding and the workspace are those of
/// [`mla_decode_rope`].
///
/// # Errors
/// As [`mla_decode_rope`].
///
/// Source: DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 2.
pub fn unified_attn_sparse_mla<'a, T: LatentElement, C: LatentPool<T>>(
    stream: &'a Stream,
    inputs: SparseMlaInputs<'a, T, C>,
    outputs: AttentionOutputs<'a, T>,
    workspace: DecodeWorkspace<'a>,
    options: &MlaOptions,
) -> Result<()> {
    const OP: &str = "unified_attn_sparse_mla";
    let SparseMlaInputs { q, kv_cache, kv_scale, topk_indices } = inputs;
    let AttentionOutputs { mut out, mut lse } = outputs;
    let sizes = check_latent(OP, "kv_cache", &q, &kv_cache, (&out, &lse))?;
    let total_q = q.shape()[0];
    let [rows, topk] = topk_indices.dims(OP, "topk_indices")?;
    topk_indices.expect_shape(OP, "topk_indices", [total_q, topk])?;
    let mut problem = Problem::new(OP, stream, T::DTYPE, sizes.heads);
    problem.disjoint(
        &[
            ("q", Some(&q)),
            ("kv_cache", Some(&kv_cache)),
            ("kv_scale", optional(&kv_scale)),
            ("topk_indices", Some(&topk_indices)),
        ],
        &[("out", Some(&out)), ("lse", optional(&lse)), ("workspace", optional(&workspace.partials))],
    )?;
    problem.queries("q", &q)?;
    problem.latent_rows("kv_cache", &kv_cache, kv_scale, sizes.heads.dv)?;
    let of = CacheSizes { pages: sizes.slots, tokens: 1, ..sizes.cache };
    problem.table("topk_indices", &topk_indices, of)?;
    problem.out("out", &mut out)?;
    problem.lse(lse.as_mut())?;
    let slot_tokens = problem.count("kv_cache", sizes.cache.tokens)?;
    let params = Params { slot_tokens, listed: 1, ..Params::zeroed() };
    launch(problem, workspace, options, [rows, total_q, topk], params)
}

/// The sizes of a call.
struct Sizes {
    heads: Heads,
    cache: CacheSizes,
    slots: usize,
}

/// Checks shapes of queries, latent rows and outputs.
fn check_latent<T: Element, C: Element>(
    op: &'static str,
    pool_arg: &'static str,
    q: &TensorView<T>,
    pool: &TensorView<C>,
    (out, lse): (&TensorViewMut<T>, &Option<TensorViewMut<f32>>),
) -> Result<Sizes> {
    let [_, _, dv] = out.dims(op, "out")?;
    let (heads, cache) = check_columns(op, q.shape(), (pool_arg, pool.shape(), T::DTYPE, C::DTYPE), dv)?;
    let [total_q, hq, _] = q.dims(op, "q")?;
    out.expect_shape(op, "out", [total_q, hq, dv])?;
    if let Some(lse) = lse {
        lse.expect_shape(op, "lse", [total_q, hq])?;
    }
    let slots = cache.pages.saturating_mul(cache.tokens);
    Ok(Sizes { heads, cache, slots })
}

/// Checks the columns of queries and of latent rows.
pub(crate) fn check_columns(
    op: &'static str,
    q: &[usize],
    (pool_arg, pool, of_q, of_pool): (&'static str, &[usize], DType, DType),
    dv: usize,
) -> Result<(Heads, CacheSizes)> {
    let &[_, hq, dqk] = q else { return Err(Error::shape(op, "q", q, "3 axes")) };
    let &[pages, tokens, kv_heads, columns] = pool else {
        return Err(Error::shape(op, pool_arg, pool, "4 axes"));
    };
    let packed = of_pool != of_q && columns == PACKED_LATENT_BYTES;
    if kv_heads != 1 || (columns != dqk && !packed) {
        let want = format!("[pages, tokens, 1, {dqk}] (columns of q)");
        return Err(Error::shape(op, pool_arg, pool, want));
    }
    if packed && (of_q != DType::Bf16 || [dqk, dv] != [576, 512]) {
        let what = format!("{dqk} columns of keys and {dv} of values in {of_q} beside packed latent rows");
        return Err(Error::unsupported(op, what, "packed rows have 576 and 512, in bf16"));
    }
    if tokens == 0 {
        return Err(Error::empty(op, pool_arg, 1, pool));
    }
    if ![256, 512].contains(&dv) || !(dv..=dv + 128).contains(&dqk) {
        let what = format!("{dqk} columns of keys and {dv} of values");
        return Err(Error::unsupported(op, what, "values have 256 or 512, keys up to 128 more"));
    }
    Ok((Heads { heads: hq, kv_heads: 1, dqk, dv }, CacheSizes { pages, tokens, heads: 1, dqk, dv }))
}

/// `attention::ElementType` of packed rows, whose kernels do not ask.
const PACKED: u32 = u32::MAX;

/// How rows are read: `Rows` of `hip/mla.h`.
#[derive(Clone, Copy)]
enum Rows {
    Vectors,
    Any,
    Fp8,
    Packed,
}

macro_rules! kernels {
    ($($name:literal),*) => {
        [$([concat!("mla_", $name, "_16"), concat!("mla_", $name, "_64")]),*]
    };
}
/// By type, columns of values and [`Rows`]; blocks of 16 and 64 rows.
const KERNELS: [[[[&str; 2]; 3]; 2]; 2] = [
    [
        kernels!("bf16_256", "bf16_256_any", "bf16_256_fp8"),
        kernels!("bf16_512", "bf16_512_any", "bf16_512_fp8"),
    ],
    [kernels!("f16_256", "f16_256_any", "f16_256_fp8"), kernels!("f16_512", "f16_512_any", "f16_512_fp8")],
];
const PACKED_KERNELS: [&str; 2] = kernels!("bf16_512_scaled")[0];

fn launch<'a>(
    mut problem: Problem<'a>,
    workspace: DecodeWorkspace<'a>,
    options: &MlaOptions,
    [sequences, total_q, keys]: [usize; 3],
    params: Params,
) -> Result<()> {
    let op = problem.op;
    problem.scale(options.scale)?;
    problem.softcap(options.softcap)?;
    problem.mask(Mask { causal: true, left: None, right: None });
    let mut plan = DecodePlan { splits: options.splits, workspace };
    problem.check_plan(&mut plan)?;
    let (n, total) = (problem.count("q", sequences)?, problem.count("q", total_q)?);
    if n == 0 || total == 0 || problem.params.heads == 0 {
        return Ok(());
    }
    let packed = problem.params.sequences.q_starts != 0;
    if !packed {
        problem.queries_of_each(1);
    }
    let mut all = problem.params;
    let rows = problem.count("q", total_q.saturating_mul(all.heads as usize))? as usize;
    let stored = rows_of(&all);
    let by_warpgroups = problem.stream.device().info().arch == Arch::Sm90a && matches!(stored, Rows::Vectors);
    let tile = options.tile.or(by_warpgroups.then_some(QueryTile::Tall));
    let of_block = rows_of_block(tile, rows, sequences);
    let tiles_of_one = (all.heads as usize).div_ceil(of_block);
    let tiles = if packed { rows / of_block + sequences } else { tiles_of_one.saturating_mul(sequences) };
    let s = &mut all.sequences;
    (s.n, s.total_q, s.sq) = (n, total, 1);
    s.tiles_of_one = if packed { 0 } else { tiles_of_one as u32 };
    s.tiles = u32::try_from(tiles)
        .map_err(|_| Error::too_large(op, "q", format!("{tiles} tiles"), u32::MAX.into()))?;
    let room = plan.workspace.partials.as_ref().map_or(0, |w| w.numel())
        / rows.saturating_mul(floats_per_row(all.dv as usize));
    let in_one_launch = if plan.splits == Splits::Auto {
        let bytes_of_split = 4 * of_block.min(rows.div_ceil(sequences)) * floats_per_row(all.dv as usize);
        MOST_BYTES_OF_AUTO / bytes_of_split
    } else {
        SPLITS.in_one_launch
    };
    let sizes = SplitSizes { in_one_launch, ..SPLITS };
    let division = plan.splits.divide(&sizes, problem.stream.device().info(), tiles, keys, room);
    let tickets = problem.divide_keys(&mut all, division, rows, plan.workspace)?;
    let tall = usize::from(of_block == 64);
    let kernel: KernelRef<Params> = Params::kernel(match stored {
        Rows::Packed => PACKED_KERNELS[tall],
        rows => {
            let of_type = usize::from(problem.kernel == DType::F16);
            KERNELS[of_type][usize::from(all.dv == 512)][rows as usize][tall]
        }
    });
    let kernel = problem.stream.kernel(kernel)?;
    let merge = if division.count > 1 && tickets == 0 { Some(problem.merge()?) } else { None };
    let params = Params { attention: all, slot_inverse: u32::MAX / params.slot_tokens, tickets, ..params };
    let blocks = LaunchConfig::grid_1d(tiles.saturating_mul(division.count));
    // SAFETY: the operators have checked rows, heads and columns of each tensor against each other, and this problem's launch has been
    // given them; the kernel clamps lengths, starts and slots, which are on the device, to the sizes of the tensors.
    unsafe { problem.launch.run(&kernel, blocks, &params)? };
    merge.map_or(Ok(()), |merge| merge.run(&params.attention))
}

fn rows_of(p: &crate::kernels::attention::Params) -> Rows {
    let k = &p.cache.k;
    let narrow = p.q_vectorized == 1 && p.dqk - p.dv <= 64;
    let on_16_bytes = [k.data as i64, k.batch, k.token_group].iter().all(|n| n % 16 == 0);
    match p.cache.element {
        PACKED => Rows::Packed,
        0 if narrow && p.cache.vectorized == 1 => Rows::Vectors,
        FP8 if narrow && on_16_bytes && p.dqk.is_multiple_of(16) => Rows::Fp8,
        _ => Rows::Any,
    }
}

impl<'a> Problem<'a> {
    /// Latent rows `[pages, tokens, 1, columns]`; values are their first `dv` columns.
    fn latent_rows<C: Element>(
        &mut self,
        arg: &'static str,
        rows: &TensorView<'a, C>,
        scale: Option<TensorView<'a, f32>>,
        dv: usize,
    ) -> Result<()> {
        let op = self.op;
        let values = rows.slice(3, 0..dv)?;
        self.cache(KvLayout::Nhd, (arg, rows), (arg, &values))?;
        if rows.shape()[3] == PACKED_LATENT_BYTES {
            self.params().cache.element = PACKED;
            if !rows.rows_aligned(16) {
                return Err(Error::stride(op, arg, rows.layout(), "rows on 16 bytes"));
            }
            if self.params().q_vectorized == 0 {
                let want = "rows on 16 bytes beside packed latent rows";
                return Err(Error::argument(op, "q", "rows at other addresses", want));
            }
        }
        if let Some(scale) = &scale {
            scale.expect_shape(op, "kv_scale", [1])?;
            let (address, ..) = self.by_head("kv_scale", Some(*scale), [1, 1])?;
            self.params().cache.k.descale = address;
        }
        Ok(())
    }

    fn rotation<'t: 'a, T: Element>(
        &mut self,
        params: &mut Params,
        rope: &MlaRope<'a, T>,
        k_pe_out: Option<&mut TensorViewMut<'t, T>>,
    ) -> Result<()> {
        fn table<'a, R: Element>(
            of: &mut Problem<'a>,
            params: &mut Params,
            table: &TensorView<'a, R>,
        ) -> Result<()> {
            let op = of.op;
            let [positions, rotary] = table.dims(op, "cos_sin")?;
            let most = (of.params().dqk - of.params().dv) as usize;
            if rotary > most || !rotary.is_multiple_of(2) {
                let want = format!("an even number of columns, at most {most}");
                return Err(Error::shape(op, "cos_sin", table.shape(), want));
            }
            table.expect_unit_stride(op, "cos_sin")?;
            table.expect_aligned(op, "cos_sin", size_of::<R>() as u64)?;
            params.n_positions = of.count("cos_sin", positions)?;
            params.rotary = rotary as u32;
            let layout = of.launch.input("cos_sin", table)?;
            // Without rows it is there: each that is needed is missing.
            params.cos_sin = layout.data().max(4);
            params.cos_sin_row = layout.strides()[2] * size_of::<R>() as i64;
            params.table_is_f32 = u32::from(R::DTYPE == DType::F32);
            Ok(())
        }
        match &rope.cos_sin {
            CosSin::F32(of) => table(self, params, of)?,
            CosSin::Own(of) => table(self, params, of)?,
        }
        let op = self.op;
        params.interleaved = u32::from(rope.style == RopeStyle::Interleaved);
        let [rows] = rope.positions.dims(op, "positions")?;
        params.positions = self.indices("positions", &rope.positions)?;
        if let Some(out) = k_pe_out {
            let columns = (self.params().dqk - self.params().dv) as usize;
            out.expect_shape(op, "k_pe_out", [rows, columns])?;
            out.expect_unit_stride(op, "k_pe_out")?;
            out.expect_aligned(op, "k_pe_out", size_of::<T>() as u64)?;
            let layout = self.launch.output("k_pe_out", out)?;
            params.k_pe_out = layout.data();
            params.k_pe_out_row = layout.strides()[2] * size_of::<T>() as i64;
        }
        Ok(())
    }
}
