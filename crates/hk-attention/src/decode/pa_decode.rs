//! Attention of a token of each sequence over a paged cache.

use super::launch::DecodePlan;
use super::splits::{DecodeWorkspace, Splits};
use crate::kv_cache::{CacheScales, optional};
use crate::prefill::{
    AttentionElement, AttentionOutputs, Mask, PagedElement, PagedKv, Problem, UnifiedOutput,
    check_cache_heads, kernel_of,
};
use hk_core::{Element, Result, Stream, TensorView};

/// Inputs of [`pa_decode`].
#[derive(Debug, Clone, Copy)]
pub struct PaDecodeInputs<'a, T: Element, C: Element> {
    /// Queries `[N, Hq, Dqk]`, of the last token of each sequence.
    pub q: TensorView<'a, T>,
    /// Keys and values of all tokens, the last one included.
    pub cache: PagedKv<'a, C>,
    /// `[N]`: keys of each sequence.
    pub seq_lens: TensorView<'a, i32>,
}

/// Options of [`pa_decode`].
#[derive(Debug, Clone, Copy, Default)]
pub struct PaDecodeOptions<'a> {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// Keys before the last one that are seen; `None`: all.
    pub window: Option<u32>,
    /// `c > 0`: scores become `c tanh(s / c)`. 0: they do not.
    pub softcap: f32,
    /// Slopes `[Hq]` or `[N, Hq]`.
    pub alibi: Option<TensorView<'a, f32>>,
    /// A logit `[Hq]` of no value for each head, which is not scaled.
    pub sink: Option<TensorView<'a, f32>>,
    /// Factors of the cache: `[1]` or `[N, Hkv]`; or of fp8 and int8 caches of each token, `[pages, Hkv, tokens]`, both.
    pub scales: CacheScales<'a>,
    /// `[1]`: outputs are divided by it before they are rounded.
    pub out_scale: Option<TensorView<'a, f32>>,
    /// How keys are split among blocks.
    pub splits: Splits,
}

/// Attention of the last token of each sequence over a paged cache that has its key and value, too. With `L = seq_lens[n]`:
///
/// ```text
/// s_j = scale (q . k_j);  s = softcap tanh(s / softcap);  s -= slope (L - 1 - j)
/// masked, where j < L - 1 - window: -inf
/// lse = ln(sum_j exp(s_j) + exp(sink));  out = sum_j exp(s_j - lse) v_j / out_scale
/// ```
///
/// | arg                  | shape                            | dtype                                                       | layout                       |
/// |----------------------|----------------------------------|-------------------------------------------------------------|------------------------------|
/// | `q`                  | `[N, Hq, Dqk]`                   | `bf16`, `f16`, `f32`, the device's fp8 e4m3                 | unit stride on the columns   |
/// | `k_cache`, `v_cache` | by [`KvLayout`](crate::KvLayout) | as `q`, the device's fp8 e4m3, `i8`                         | unit stride on the last axis |
/// | `block_table`        | `[N, pages]`                     | `i32`                                                       | unit stride on `pages`       |
/// | `seq_lens`           | `[N]`                            | `i32`                                                       | contiguous                   |
/// | `out`                | `[N, Hq, Dv]`                    | as `q`, or the device's fp8; for fp8 `bf16`, `f16` or `f32` | unit stride on the columns   |
/// | `lse`                | `[N, Hq]`                        | `f32`                                                       | any strides                  |
/// | `workspace`          | `[n]`                            | `f32`                                                       | contiguous, on 16 bytes      |
///
/// `Hq` is a multiple of `Hkv`; `Dqk` and `Dv` are 1 to 256 and may differ. Pages have any number of tokens. Rounding is as in
/// [`mha`](fn@crate::mha). A sequence without keys has outputs of 0 and an `lse` of -inf, or the sink.
///
/// Each byte of the keys that are seen is read once, 16 bytes of a lane at a time, for `bf16`, `f16`, fp8 and int8 caches with up to 64 heads
/// of a group (32 of more than 128 columns, and of pieces up to 128; of wider pieces, and on sm_90, 16); for 16-bit and fp8 caches with up to 128 heads: in layouts `Nhd` and `Hnd` with pages of a multiple of 16 tokens, rows on 16 bytes; in `Paged` and `PagedShuffled` with pages of
/// a multiple of 8 tokens, of bytes 16. Other caches are served by the kernel of prompts. Factors of tokens go with the first two layouts alone, and
/// are in rows on 16 bytes; probabilities times the factor of a value are rounded to 16
/// bits, and the sum of probabilities is that of the ones without. [`Splits`] says how keys are split among blocks, and what results depend on.
///
/// What is on the device is not trusted. A sequence whose length is negative or more than the tokens of its row of `block_table` has
/// outputs of NaN. So has one that sees a key of a page that is not in the cache. Table entries and pages that are not seen are not read.
/// The bits of a sequence do not depend on its pages.
///
/// Returns when the launch is queued, before it has run. Without sequences, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align),
/// [`Empty`](hk_core::Error::Empty) if a tensor breaks the table, also if the workspace is too short for the splits that are asked for;
/// [`Argument`](hk_core::Error::Argument) for a scale that is 0 or not finite, a softcap that is negative or not finite, and splits that are
/// none, [`Unsupported`](hk_core::Error::Unsupported) for the fp8 of another device and for factors of tokens of other caches, [`Overlap`](hk_core::Error::Overlap) of outputs,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 - 1 rows or pages, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of
/// loading and launching a kernel. Nothing is written then.
///
/// Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention"; Dao et al. 2023,
/// "Flash-Decoding for long-context inference".
pub fn pa_decode<'a, T: AttentionElement, C: PagedElement<T>, O: UnifiedOutput<T>>(
    stream: &'a Stream,
    inputs: PaDecodeInputs<'a, T, C>,
    outputs: AttentionOutputs<'a, O>,
    workspace: DecodeWorkspace<'a>,
    options: &PaDecodeOptions<'a>,
) -> Result<()> {
    let (problem, sizes) = prepare("pa_decode", stream, inputs, outputs, &workspace, options)?;
    let plan = DecodePlan { splits: options.splits, workspace };
    let [sequences, keys] = sizes;
    problem.decode_batched(plan, sequences, [1, keys], false)
}

/// What a call gives of a problem; sequences, and keys of the longest one.
pub(super) fn prepare<'a, T: AttentionElement, C: PagedElement<T>, O: UnifiedOutput<T>>(
    op: &'static str,
    stream: &'a Stream,
    inputs: PaDecodeInputs<'a, T, C>,
    outputs: AttentionOutputs<'a, O>,
    workspace: &DecodeWorkspace<'a>,
    options: &PaDecodeOptions<'a>,
) -> Result<(Problem<'a>, [usize; 2])> {
    let PaDecodeInputs { q, cache: PagedKv { k_cache, v_cache, pages }, seq_lens } = inputs;
    let AttentionOutputs { mut out, mut lse } = outputs;
    let [sequences, ..] = q.dims::<3>(op, "q")?;
    let (k, v) = (("k_cache", k_cache.shape()), ("v_cache", v_cache.shape()));
    let sizes = pages.layout.sizes(op, C::DTYPE, k, v)?;
    let heads = check_cache_heads(op, q.shape(), ["k_cache", "v_cache"], sizes, [256, 256])?;
    out.expect_shape(op, "out", [sequences, heads.heads, heads.dv])?;
    if let Some(lse) = &lse {
        lse.expect_shape(op, "lse", [sequences, heads.heads])?;
    }
    seq_lens.expect_shape(op, "seq_lens", [sequences])?;
    let [_, width] = pages.block_table.dims(op, "block_table")?;
    let mut problem = Problem::new(op, stream, kernel_of::<T, O>(), heads);
    problem.disjoint(
        &[
            ("q", Some(&q)),
            ("k_cache", Some(&k_cache)),
            ("v_cache", Some(&v_cache)),
            ("block_table", Some(&pages.block_table)),
            ("seq_lens", Some(&seq_lens)),
            ("alibi", optional(&options.alibi)),
            ("sink", optional(&options.sink)),
            ("k_scale", optional(&options.scales.k)),
            ("v_scale", optional(&options.scales.v)),
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
    problem.cache_or_token_scales(&options.scales, sequences, sizes)?;
    problem.out_scale(options.out_scale)?;
    problem.single_queries("seq_lens", &seq_lens)?;
    Ok((problem, [sequences, width.saturating_mul(sizes.tokens)]))
}
