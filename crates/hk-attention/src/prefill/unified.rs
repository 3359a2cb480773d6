//! Attention over a paged cache that has the keys and values of the queries, too.

use super::mha::{AttentionOutputs, check_starts, kernel_of};
use super::options::{AttentionElement, AttentionOutput, Descales, Mask, PagedElement, PagedKv};
use super::plan::QueryTile;
use super::problem::{Problem, check_cache_heads};
use crate::decode::{DecodePlan, DecodeWorkspace, Splits};
use crate::kv_cache::optional;
use hk_core::{Element, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, TensorView, bf16, f16};

/// Element type of outputs of [`unified_attn`] for queries of type `T`: those of [`AttentionOutput`], or the device's fp8 e4m3.
pub trait UnifiedOutput<T: AttentionElement>: Element {}

impl<T: AttentionElement, O: AttentionOutput<T>> UnifiedOutput<T> for O {}
macro_rules! quantized_outputs {
    ($($t:ty),*) => {$(
        impl UnifiedOutput<$t> for Fp8E4M3 {}
        impl UnifiedOutput<$t> for Fp8E4M3Fnuz {}
    )*};
}
quantized_outputs!(bf16, f16, f32, Fp8E4M3, Fp8E4M3Fnuz);

/// Inputs of [`unified_attn`].
#[derive(Debug, Clone, Copy)]
pub struct UnifiedInputs<'a, T: Element, C: Element> {
    /// Queries `[total_q, Hq, Dqk]`.
    pub q: TensorView<'a, T>,
    /// Keys and values.
    pub cache: PagedKv<'a, C>,
    /// `[sequences + 1]`: the rows of `q` at which sequences begin, and their number.
    pub cu_seqlens_q: TensorView<'a, i32>,
    /// `[sequences]`: keys of each sequence, of which the last belong to its queries.
    pub seqused_k: TensorView<'a, i32>,
}

/// Options of [`unified_attn`].
#[derive(Debug, Clone, Copy, Default)]
pub struct UnifiedOptions<'a> {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// Keys before the query's own place that it sees; `None`: all.
    pub window: Option<u32>,
    /// `c > 0`: scores become `c tanh(s / c)`. 0: they do not.
    pub softcap: f32,
    /// Slopes `[Hq]` or `[sequences, Hq]`.
    pub alibi: Option<TensorView<'a, f32>>,
    /// A logit `[Hq]` of no value for each head, which is not scaled.
    pub sink: Option<TensorView<'a, f32>>,
    /// `[queries, queries]`, at least as many as the longest sequence has: added to the score of query `i` and the key of query `j` of
    /// each sequence, as for trees of drafts.
    pub qq_bias: Option<TensorView<'a, f32>>,
    /// Factors of quantized tensors.
    pub descales: Descales<'a>,
    /// `[1]`: outputs are divided by it before they are rounded.
    pub out_scale: Option<TensorView<'a, f32>>,
    /// Tiles of query rows of this height. `None`: what suits the whole call and the device: [`QueryTile::Few`] where sequences have few
    /// queries on average, and for single tokens beside longer sequences.
    pub tile: Option<QueryTile>,
    /// How the keys of tiles of few queries are split among blocks, and those of other tiles that are given.
    pub splits: Splits,
}

/// Causal attention of packed sequences over a paged cache: prompts, parts of prompts and single tokens in one batch. The keys and
/// values of the queries are in the cache, too: query `i` of `Sq` stands at key `p = i + seqused_k - Sq` of its sequence.
///
/// ```text
/// s_ij = scale (q_i . k_j);  s = softcap tanh(s / softcap);  s -= slope |p - j|;  s += qq_bias[i, j + Sq - seqused_k]
/// masked, where j > p or j < p - window: -inf
/// lse_i = ln(sum_j exp(s_ij) + exp(sink));  out_i = sum_j exp(s_ij - lse_i) v_j / out_scale
/// ```
///
/// | arg                          | shape                 | dtype                                                 | layout                     |
/// |------------------------------|-----------------------|-------------------------------------------------------|----------------------------|
/// | `q`                          | `[total_q, Hq, Dqk]`  | `bf16`, `f16`, `f32`, the device's fp8 e4m3           | unit stride on the columns |
/// | `k_cache`, `v_cache`         | by [`KvLayout`](crate::KvLayout) | as `q`, the device's fp8 e4m3, `i8`| unit stride on the last axis |
/// | `block_table`                | `[sequences, pages]`  | `i32`                                                 | unit stride on `pages`     |
/// | `cu_seqlens_q`               | `[sequences + 1]`     | `i32`                                                 | contiguous                 |
/// | `seqused_k`                  | `[sequences]`         | `i32`                                                 | contiguous                 |
/// | `out`                        | `[total_q, Hq, Dv]`   | as `q`, or the device's fp8; for fp8 `bf16`, `f16` or `f32` | unit stride on the columns |
/// | `lse`                        | `[total_q, Hq]`       | `f32`                                                 | any strides                |
/// | `workspace`                  | `[n]`                 | `f32`                                                 | contiguous, on 16 bytes    |
///
/// `Hq` is a multiple of `Hkv`; `Dqk` and `Dv` are 1 to 512 (`f32`: 256) and may differ. Pages have any number of tokens; other strides are
/// free: a pool `[Hkv, slots, D]` is [`KvLayout::Hnd`](crate::KvLayout::Hnd) of a view. Rounding, rows without a visible key, and NaN of keys that
/// some queries see are as in [`mha`](fn@crate::mha).
///
/// What is on the device is not trusted. If `cu_seqlens_q` does not rise from 0 to `total_q`, all outputs are NaN. A sequence whose
/// `seqused_k` is negative or more than the tokens of its row of `block_table` has outputs of NaN. So has a query that sees a key of
/// a page that is not in the cache, or one without an entry in `qq_bias`. Queries before key 0 see no key. Table entries and pages that
/// no query sees are not read.
///
/// The bits of a sequence do not depend on its pages; with `tile`, and splits that are not [`Splits::Auto`], they do not depend on the other
/// sequences, either.
///
/// Returns when the launch is queued, before it has run. Without queries, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align),
/// [`Empty`](hk_core::Error::Empty) if a tensor breaks the table, also if the workspace is too short for the splits that are asked for;
/// [`Argument`](hk_core::Error::Argument) for a scale that is 0 or not finite, a softcap that is negative or not finite, and splits that are none, [`Unsupported`](hk_core::Error::Unsupported) for the fp8 of another device and for
/// `f32` beyond 256 columns, [`Overlap`](hk_core::Error::Overlap) of outputs, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 - 1 rows (of `q`, by heads of a group) or pages,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention"; Dao et al. 2022,
/// "FlashAttention".
pub fn unified_attn<'a, T: AttentionElement, C: PagedElement<T>, O: UnifiedOutput<T>>(
    stream: &'a Stream,
    inputs: UnifiedInputs<'a, T, C>,
    outputs: AttentionOutputs<'a, O>,
    workspace: DecodeWorkspace<'a>,
    options: &UnifiedOptions<'a>,
) -> Result<()> {
    const OP: &str = "unified_attn";
    let UnifiedInputs { q, cache: PagedKv { k_cache, v_cache, pages }, cu_seqlens_q, seqused_k } = inputs;
    let AttentionOutputs { mut out, mut lse } = outputs;
    let [total_q, ..] = q.dims::<3>(OP, "q")?;
    let (k, v) = (("k_cache", k_cache.shape()), ("v_cache", v_cache.shape()));
    let sizes = pages.layout.sizes(OP, C::DTYPE, k, v)?;
    let heads = check_cache_heads(OP, q.shape(), ["k_cache", "v_cache"], sizes, [512, 512])?;
    out.expect_shape(OP, "out", [total_q, heads.heads, heads.dv])?;
    if let Some(lse) = &lse {
        lse.expect_shape(OP, "lse", [total_q, heads.heads])?;
    }
    let sequences = check_starts(OP, "cu_seqlens_q", &cu_seqlens_q)?;
    seqused_k.expect_shape(OP, "seqused_k", [sequences])?;
    let mut problem = Problem::new(OP, stream, kernel_of::<T, O>(), heads);
    problem.disjoint(
        &[
            ("q", Some(&q)),
            ("k_cache", Some(&k_cache)),
            ("v_cache", Some(&v_cache)),
            ("block_table", Some(&pages.block_table)),
            ("cu_seqlens_q", Some(&cu_seqlens_q)),
            ("seqused_k", Some(&seqused_k)),
            ("alibi", optional(&options.alibi)),
            ("sink", optional(&options.sink)),
            ("qq_bias", optional(&options.qq_bias)),
            ("q_descale", optional(&options.descales.q)),
            ("k_descale", optional(&options.descales.k)),
            ("v_descale", optional(&options.descales.v)),
            ("out_scale", optional(&options.out_scale)),
        ],
        &[("out", Some(&out)), ("lse", optional(&lse)), ("workspace", optional(&workspace.partials))],
    )?;
    problem.queries("q", &q)?;
    problem.cache(pages.layout, ("k_cache", &k_cache), ("v_cache", &v_cache))?;
    problem.block_table(&pages.block_table, sequences, sizes)?;
    problem.out("out", &mut out)?;
    problem.lse(lse.as_mut())?;
    problem.scale(options.scale)?;
    problem.softcap(options.softcap)?;
    problem.mask(Mask { causal: true, left: options.window, right: None });
    problem.alibi(options.alibi, sequences)?;
    problem.sink(options.sink)?;
    problem.qq_bias(options.qq_bias)?;
    problem.descales(&options.descales, sequences)?;
    problem.out_scale(options.out_scale)?;
    let (q_starts, total_lens) =
        (problem.indices("cu_seqlens_q", &cu_seqlens_q)?, problem.indices("seqused_k", &seqused_k)?);
    let s = &mut problem.params().sequences;
    (s.q_starts, s.total_lens) = (q_starts, total_lens);
    let plan = DecodePlan { splits: options.splits, workspace };
    let keys = pages.block_table.shape()[1].saturating_mul(sizes.tokens);
    problem.decode_packed(plan, options.tile, sequences, [total_q, keys])
}
