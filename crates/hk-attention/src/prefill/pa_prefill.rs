//! Attention of new tokens, over a paged cache of the tokens before them and over themselves.

use super::mha::{check_starts, kernel_of};
use super::options::{AttentionElement, AttentionOutput, Mask, PagedElement, PagedKv};
use super::plan::QueryTile;
use super::problem::{Problem, check_cache_heads};
use crate::decode::{DecodePlan, DecodeWorkspace, Splits};
use crate::kv_cache::{CacheScales, optional};
use hk_core::{Element, Result, Stream, TensorView, TensorViewMut};

/// Inputs of [`pa_prefill`] and [`chunked_pa_prefill`].
#[derive(Debug, Clone, Copy)]
pub struct PaPrefillInputs<'a, T: Element, C: Element> {
    /// Queries of the new tokens, `[total_q, Hq, Dqk]`.
    pub q: TensorView<'a, T>,
    /// Their keys, `[total_q, Hkv, Dqk]`.
    pub k: TensorView<'a, T>,
    /// Their values, `[total_q, Hkv, Dv]`.
    pub v: TensorView<'a, T>,
    /// Keys and values of the context.
    pub cache: PagedKv<'a, C>,
    /// `[sequences + 1]`: the rows of `q` at which sequences begin, and their number.
    pub cu_seqlens_q: TensorView<'a, i32>,
    /// `[sequences]`: tokens of each sequence, context and new ones.
    pub seq_lens: TensorView<'a, i32>,
}

/// Options of [`pa_prefill`] and [`chunked_pa_prefill`].
#[derive(Debug, Clone, Copy, Default)]
pub struct PaPrefillOptions<'a> {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// Keys before the query's own place that it sees; `None`: all.
    pub window: Option<u32>,
    /// Slopes `[Hq]` or `[sequences, Hq]`.
    pub alibi: Option<TensorView<'a, f32>>,
    /// Factors of the cache: `[1]` or `[sequences, Hkv]`.
    pub scales: CacheScales<'a>,
    /// Batch-invariant: tiles of query rows of this height. `None`: what suits the whole call and the device.
    pub tile: Option<QueryTile>,
}

/// Causal attention of the new tokens of packed sequences. The first `seq_lens - new` keys of a sequence are those of the cache, the
/// others those of its new tokens, `k` and `v`. New token `i` stands at key `p = i + seq_lens - new`.
///
/// ```text
/// s_ij = scale (q_i . k_j) - slope |p - j|;  masked, where j > p or j < p - window: -inf
/// out_i = sum_j softmax(s_i)_j v_j
/// ```
///
/// | arg                  | shape                                       | dtype                               | layout                       |
/// |----------------------|---------------------------------------------|-------------------------------------|------------------------------|
/// | `q`                  | `[total_q, Hq, Dqk]`                        | `bf16`, `f16`, `f32`                | unit stride on the columns   |
/// | `k`, `v`             | `[total_q, Hkv, Dqk]`, `[total_q, Hkv, Dv]` | as `q`                              | unit stride on the columns   |
/// | `k_cache`, `v_cache` | by [`KvLayout`](crate::KvLayout)            | as `q`, the device's fp8 e4m3, `i8` | unit stride on the last axis |
/// | `block_table`        | `[sequences, pages]`                        | `i32`                               | unit stride on `pages`       |
/// | `cu_seqlens_q`       | `[sequences + 1]`                           | `i32`                               | contiguous                   |
/// | `seq_lens`           | `[sequences]`                               | `i32`                               | contiguous                   |
/// | `out`                | `[total_q, Hq, Dv]`                         | as `q`                              | unit stride on the columns   |
///
/// `Hq` is a multiple of `Hkv`; `Dqk` and `Dv` are 1 to 256 and may differ. With `skip_decode`, the outputs of sequences of one new token are
/// not written. Sequences may have no new tokens, and no context. The cache behind the context is not read. Rounding and NaN of keys
/// that some queries see are as in [`mha`](fn@crate::mha).
///
/// What is on the device is not trusted. If `cu_seqlens_q` does not rise from 0 to `total_q`, all outputs are NaN. A sequence whose
/// `seq_lens` is less than its new tokens, or whose context is more than the tokens of its row of `block_table`, has outputs of NaN. So
/// has a query that sees a key of a page that is not in the cache.
///
/// The bits of a sequence do not depend on its pages; with `tile` they do not depend on the other sequences, either.
///
/// Returns when the launch is queued, before it has run. Without queries, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align),
/// [`Empty`](hk_core::Error::Empty) if a tensor breaks the table, [`Argument`](hk_core::Error::Argument) for a scale that is 0 or not finite,
/// [`Unsupported`](hk_core::Error::Unsupported) for the fp8 of another device, [`Overlap`](hk_core::Error::Overlap) of outputs,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 - 1 rows (of `q`, by heads of a group) or pages, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of
/// loading and launching a kernel. Nothing is written then.
///
/// Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention"; Dao et al. 2022,
/// "FlashAttention".
pub fn pa_prefill<'a, T, C>(
    stream: &'a Stream,
    inputs: PaPrefillInputs<'a, T, C>,
    out: TensorViewMut<'a, T>,
    options: &PaPrefillOptions<'a>,
    skip_decode: bool,
) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T>,
    C: PagedElement<T>,
{
    let single = if skip_decode { Single::Skipped } else { Single::AsOthers };
    run("pa_prefill", stream, inputs, (out, DecodeWorkspace::default()), options, single)
}

/// [`pa_prefill`] of a batch in which sequences of one new token are decoded: all their keys are in the cache, that of the new token
/// included, and their rows of `k` and `v` are not read.
///
/// Without a tile, single tokens have the kernel of [`pa_decode`](crate::pa_decode), in a launch of its own, where the cache suits it. With
/// counters in the workspace it splits their keys as [`Splits::Auto`] says; the workspace is that of
/// [`decode_workspace`](crate::decode_workspace) for a query of each sequence.
///
/// # Errors
/// As [`pa_prefill`].
pub fn chunked_pa_prefill<'a, T, C>(
    stream: &'a Stream,
    inputs: PaPrefillInputs<'a, T, C>,
    out: TensorViewMut<'a, T>,
    workspace: DecodeWorkspace<'a>,
    options: &PaPrefillOptions<'a>,
) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T>,
    C: PagedElement<T>,
{
    run("chunked_pa_prefill", stream, inputs, (out, workspace), options, Single::Cached)
}

/// How sequences of one new token are served.
#[derive(Clone, Copy, PartialEq)]
enum Single {
    AsOthers,
    Skipped,
    Cached,
}

fn run<'a, T: AttentionElement, C: PagedElement<T>>(
    op: &'static str,
    stream: &'a Stream,
    inputs: PaPrefillInputs<'a, T, C>,
    (mut out, workspace): (TensorViewMut<'a, T>, DecodeWorkspace<'a>),
    options: &PaPrefillOptions<'a>,
    single: Single,
) -> Result<()> {
    let PaPrefillInputs { q, k, v, cache: PagedKv { k_cache, v_cache, pages }, cu_seqlens_q, seq_lens } =
        inputs;
    let [total_q, ..] = q.dims::<3>(op, "q")?;
    let caches = (("k_cache", k_cache.shape()), ("v_cache", v_cache.shape()));
    let sizes = pages.layout.sizes(op, C::DTYPE, caches.0, caches.1)?;
    let heads = check_cache_heads(op, q.shape(), ["k_cache", "v_cache"], sizes, [256, 256])?;
    k.expect_shape(op, "k", [total_q, heads.kv_heads, heads.dqk])?;
    v.expect_shape(op, "v", [total_q, heads.kv_heads, heads.dv])?;
    out.expect_shape(op, "out", [total_q, heads.heads, heads.dv])?;
    let sequences = check_starts(op, "cu_seqlens_q", &cu_seqlens_q)?;
    seq_lens.expect_shape(op, "seq_lens", [sequences])?;
    let mut problem = Problem::new(op, stream, kernel_of::<T, T>(), heads);
    problem.disjoint(
        &[
            ("q", Some(&q)),
            ("k", Some(&k)),
            ("v", Some(&v)),
            ("k_cache", Some(&k_cache)),
            ("v_cache", Some(&v_cache)),
            ("block_table", Some(&pages.block_table)),
            ("cu_seqlens_q", Some(&cu_seqlens_q)),
            ("seq_lens", Some(&seq_lens)),
            ("alibi", optional(&options.alibi)),
            ("k_scale", optional(&options.scales.k)),
            ("v_scale", optional(&options.scales.v)),
        ],
        &[("out", Some(&out)), ("workspace", optional(&workspace.partials))],
    )?;
    problem.queries("q", &q)?;
    problem.fresh(("k", &k), ("v", &v))?;
    problem.cache(pages.layout, ("k_cache", &k_cache), ("v_cache", &v_cache))?;
    problem.block_table(&pages.block_table, sequences, sizes)?;
    problem.out("out", &mut out)?;
    problem.scale(options.scale)?;
    problem.mask(Mask { causal: true, left: options.window, right: None });
    problem.alibi(options.alibi, sequences)?;
    problem.cache_scales(&options.scales, sequences)?;
    let (starts, total_lens) =
        (problem.indices("cu_seqlens_q", &cu_seqlens_q)?, problem.indices("seq_lens", &seq_lens)?);
    let total_k = problem.count("q", total_q)?;
    let params = problem.params();
    params.skip_single = (single == Single::Skipped).into();
    params.single_cached = (single == Single::Cached).into();
    let s = &mut params.sequences;
    (s.q_starts, s.k_starts, s.total_k, s.total_lens) = (starts, starts, total_k, total_lens);
    if single != Single::Cached {
        problem.tile(options.tile);
        return problem.run_packed(sequences, total_q);
    }
    let plan = DecodePlan { splits: Splits::Auto, workspace };
    let keys = pages.block_table.shape()[1].saturating_mul(sizes.tokens);
    problem.decode_packed(plan, options.tile, sequences, [total_q, keys])
}
