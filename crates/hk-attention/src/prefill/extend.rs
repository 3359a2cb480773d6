//! Attention of new tokens over a pool of cached ones and themselves.

use super::mha::{AttentionOutputs, check_starts, kernel_of};
use super::options::{AttentionElement, AttentionOutput, Mask, PagedElement};
use super::problem::{Problem, check_cache_heads};
use crate::kv_cache::{CacheScales, CacheSizes, KvLayout, optional};
use hk_core::{Element, Result, Stream, TensorView};

/// Most columns of queries and keys, and of values.
pub(crate) const MOST_COLUMNS: [usize; 2] = [576, 512];

/// Inputs of [`extend_attn`].
#[derive(Debug, Clone, Copy)]
pub struct ExtendInputs<'a, T: Element, C: Element> {
    /// Queries of the new tokens, `[total_q, Hq, Dqk]`.
    pub q: TensorView<'a, T>,
    /// Their keys, `[total_q, Hkv, Dqk]`.
    pub k_ext: TensorView<'a, T>,
    /// Their values, `[total_q, Hkv, Dv]`.
    pub v_ext: TensorView<'a, T>,
    /// Keys of cached tokens, `[slots, Hkv, Dqk]`.
    pub k_pool: TensorView<'a, C>,
    /// Their values, `[slots, Hkv, Dv]`.
    pub v_pool: TensorView<'a, C>,
    /// `[sequences + 1]`: the rows of `q` at which sequences begin, and their number.
    pub qo_indptr: TensorView<'a, i32>,
    /// `[sequences + 1]`: the entries of `kv_indices` at which the prefixes of sequences begin, and the end of the last.
    pub kv_indptr: TensorView<'a, i32>,
    /// Slots of the tokens of prefixes.
    pub kv_indices: TensorView<'a, i32>,
}

/// Which keys the queries of [`extend_attn`] see, query by query.
#[derive(Debug, Clone, Copy)]
pub struct CustomMask<'a> {
    /// For each sequence `[new, prefix + new]` bytes, row-major: 0 is masked.
    pub mask: TensorView<'a, u8>,
    /// `[sequences + 1]`: the bytes at which the masks of sequences begin. The last entry is not read.
    pub indptr: TensorView<'a, i32>,
    /// The keys of prefixes are visible, whatever the mask says.
    pub skip_prefix: bool,
}

/// Options of [`extend_attn`].
#[derive(Debug, Clone, Copy, Default)]
pub struct ExtendOptions<'a> {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// New tokens after the query's own are masked.
    pub causal: bool,
    /// `c > 0`: scores become `c tanh(s / c)`. 0: they do not.
    pub softcap: f32,
    /// Masks keys, beside `causal`.
    pub custom_mask: Option<CustomMask<'a>>,
    /// Factors of the pools: `[1]` or `[sequences, Hkv]`.
    pub scales: CacheScales<'a>,
}

/// Attention of new tokens of packed sequences. The keys of a sequence are those of its prefix, which are rows of a pool, then those of
/// the new tokens.
///
/// ```text
/// s_ij = scale (q_i . k_j);  s = softcap tanh(s / softcap);  masked, by causality or custom mask: -inf
/// lse_i = ln(sum_j exp(s_ij));  out_i = sum_j exp(s_ij - lse_i) v_j
/// ```
///
/// | arg                      | shape                   | dtype                                       | layout                     |
/// |--------------------------|-------------------------|---------------------------------------------|----------------------------|
/// | `q`                      | `[total_q, Hq, Dqk]`    | `bf16`, `f16`, `f32`                        | unit stride on the columns |
/// | `k_ext`, `v_ext`         | `[total_q, Hkv, Dqk]`, `[total_q, Hkv, Dv]` | as `q`                  | unit stride on the columns |
/// | `k_pool`, `v_pool`       | `[slots, Hkv, Dqk]`, `[slots, Hkv, Dv]` | as `q`, the device's fp8 e4m3, `i8` | unit stride on the columns |
/// | `qo_indptr`, `kv_indptr` | `[sequences + 1]`       | `i32`                                       | contiguous                 |
/// | `kv_indices`             | `[indices]`             | `i32`                                       | contiguous                 |
/// | `custom_mask`            | `[bytes]`               | `u8`                                        | contiguous                 |
/// | `mask_indptr`            | `[sequences + 1]`       | `i32`                                       | contiguous                 |
/// | `out`                    | `[total_q, Hq, Dv]`     | as `q`                                      | unit stride on the columns |
/// | `lse`                    | `[total_q, Hq]`         | `f32`                                       | any strides                |
///
/// `Hq` is a multiple of `Hkv`; `Dqk` is 1 to 576 and `Dv` 1 to 512 (`f32`: 256), and they may differ. In the absorbed form of MLA, 576 and
/// 512, values are views of the first columns of keys. Prefixes and sequences may be empty. Rounding, rows without a visible key, and NaN of keys
/// that some queries see are as in [`mha`](fn@crate::mha); keys that only the custom mask hides count as seen.
///
/// What is on the device is not trusted. If `qo_indptr` does not rise from 0 to `total_q`, all outputs are NaN. A sequence whose
/// `kv_indptr` falls or lies outside `kv_indices`, or whose mask lies outside `custom_mask`, has outputs of NaN. So has a query
/// that sees a key whose slot is not in the pool (by causality: a custom mask hides it).
///
/// The bits of a sequence depend on neither its slots nor the other sequences.
///
/// Returns when the launch is queued, before it has run. Without queries, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align), [`Empty`](hk_core::Error::Empty)
/// if a tensor breaks the table, [`Argument`](hk_core::Error::Argument) for a scale that is 0 or not finite, a softcap that is negative or
/// not finite, [`Unsupported`](hk_core::Error::Unsupported) for the fp8 of another device and for columns that no kernel has,
/// [`Overlap`](hk_core::Error::Overlap) of outputs, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 - 1 rows (of `q`, by heads of a
/// group) or indices, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
///
/// Source: Dao et al. 2022, "FlashAttention".
pub fn extend_attn<'a, T, C>(
    stream: &'a Stream,
    inputs: ExtendInputs<'a, T, C>,
    outputs: AttentionOutputs<'a, T>,
    options: &ExtendOptions<'a>,
) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T>,
    C: PagedElement<T>,
{
    const OP: &str = "extend_attn";
    let ExtendInputs { q, k_ext, v_ext, k_pool, v_pool, qo_indptr, kv_indptr, kv_indices } = inputs;
    let AttentionOutputs { mut out, mut lse } = outputs;
    let [total_q, hq, dqk] = q.dims(OP, "q")?;
    let [slots, kv_heads, pool_dqk] = k_pool.dims(OP, "k_pool")?;
    let [.., dv] = v_pool.dims::<3>(OP, "v_pool")?;
    v_pool.expect_shape(OP, "v_pool", [slots, kv_heads, dv])?;
    let sizes = CacheSizes { pages: slots, tokens: 1, heads: kv_heads, dqk: pool_dqk, dv };
    let heads = check_cache_heads(OP, q.shape(), ["k_pool", "v_pool"], sizes, MOST_COLUMNS)?;
    k_ext.expect_shape(OP, "k_ext", [total_q, kv_heads, dqk])?;
    v_ext.expect_shape(OP, "v_ext", [total_q, kv_heads, dv])?;
    out.expect_shape(OP, "out", [total_q, hq, dv])?;
    if let Some(lse) = &lse {
        lse.expect_shape(OP, "lse", [total_q, hq])?;
    }
    let sequences = check_starts(OP, "qo_indptr", &qo_indptr)?;
    kv_indptr.expect_shape(OP, "kv_indptr", [sequences + 1])?;
    kv_indices.dims::<1>(OP, "kv_indices")?;
    let (mask, mask_indptr) = options.custom_mask.map(|m| (m.mask, m.indptr)).unzip();
    let mut problem = Problem::new(OP, stream, kernel_of::<T, T>(), heads);
    problem.disjoint(
        &[
            ("q", Some(&q)),
            ("k_ext", Some(&k_ext)),
            ("v_ext", Some(&v_ext)),
            ("k_pool", Some(&k_pool)),
            ("v_pool", Some(&v_pool)),
            ("qo_indptr", Some(&qo_indptr)),
            ("kv_indptr", Some(&kv_indptr)),
            ("kv_indices", Some(&kv_indices)),
            ("custom_mask", optional(&mask)),
            ("mask_indptr", optional(&mask_indptr)),
            ("k_scale", optional(&options.scales.k)),
            ("v_scale", optional(&options.scales.v)),
        ],
        &[("out", Some(&out)), ("lse", optional(&lse))],
    )?;
    problem.queries("q", &q)?;
    problem.fresh(("k_ext", &k_ext), ("v_ext", &v_ext))?;
    let page = |pool: TensorView<'a, C>| pool.split_axis(0, 1);
    let (k_pool, v_pool) = (page(k_pool)?, page(v_pool)?);
    problem.cache(KvLayout::Nhd, ("k_pool", &k_pool), ("v_pool", &v_pool))?;
    problem.page_list(("kv_indptr", &kv_indptr), ("kv_indices", &kv_indices), sizes)?;
    problem.out("out", &mut out)?;
    problem.lse(lse.as_mut())?;
    problem.scale(options.scale)?;
    problem.softcap(options.softcap)?;
    problem.mask(Mask { causal: options.causal, left: None, right: None });
    problem.custom_mask(options.custom_mask.as_ref(), sequences)?;
    problem.cache_scales(&options.scales, sequences)?;
    let (starts, total_k) = (problem.indices("qo_indptr", &qo_indptr)?, problem.count("q", total_q)?);
    let s = &mut problem.params().sequences;
    (s.q_starts, s.k_starts, s.total_k) = (starts, starts, total_k);
    problem.run_packed(sequences, total_q)
}
