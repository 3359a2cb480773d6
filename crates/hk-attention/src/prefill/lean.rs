//! Attention of a batch over keys of different lengths, packed without starts, or in pages.

use super::mha::{AttentionOutputs, Qkv, check_packed, kernel_of, problem};
use super::options::{AttentionElement, AttentionOptions, AttentionOutput, Mask, PagedElement};
use super::problem::{Problem, check_cache_heads};
use super::stream_k::Programs;
use crate::kv_cache::{CacheScales, KvLayout, optional};
use hk_core::{Element, Error, NamedOperand, Result, Stream, TensorView, TensorViewMut};

/// Options of [`lean_atten`] and [`lean_atten_paged`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LeanOptions {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// Query `i` of sequence `n` sees the keys up to `i + kv_lens[n] - Sq`.
    pub causal: bool,
    /// How many blocks share the work.
    pub programs: Programs,
}

/// Softmax attention of `B` sequences of equally many queries over packed keys: `out = softmax(scale q k^T) v` of each sequence.
///
/// | arg         | shape               | dtype                | layout                     |
/// |-------------|---------------------|----------------------|----------------------------|
/// | `q`         | `[B Sq, Hq, Dqk]`   | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `k`         | `[total, Hkv, Dqk]` | as `q`               | unit stride on the columns |
/// | `v`         | `[total, Hkv, Dv]`  | as `q`               | unit stride on the columns |
/// | `kv_lens`   | `[B]`               | `i32`                | contiguous                 |
/// | `out`       | `[B Sq, Hq, Dv]`    | as `q`               | unit stride on the columns |
/// | `lse`       | `[B Sq, Hq]`        | `f32`                | any strides                |
/// | `workspace` | `[n]`               | `f32`                | contiguous, on 16 bytes    |
///
/// The keys of sequence `n` are the `kv_lens[n]` rows behind those of the sequences before it. Heads, columns and rounding are those of
/// [`mha`](crate::mha); a row without a visible key is 0, its `lse` -inf.
///
/// Stream-K: [`Programs`] share all tiles of rows and of keys evenly, however the lengths differ. What several of them have of the
/// same rows goes to the workspace, [`lean_workspace`](crate::lean_workspace) long, and is merged by a second launch in ascending order
/// of keys. The same call gives the same bits on the same device; other sequences in the batch, or another number of programs, may
/// change how sums are rounded.
///
/// `kv_lens` is on the device and is not trusted: if a length is negative, or the rows of a sequence end beyond `total`, outputs of
/// that sequence and of all after it are NaN.
///
/// # Errors
/// As [`mha`](crate::mha); [`Shape`](Error::Shape) if the rows of `q` are no multiple of `B`, or a workspace is too short or missing
/// ([`Programs::Auto`] does without one); [`Argument`](Error::Argument) for a number of programs that is 0 or above 65536.
///
/// Source: Sanovar et al. 2024, "Lean Attention"; Osama et al. 2023, "Stream-K"; Dao et al. 2022, "FlashAttention".
pub fn lean_atten<'a, T: AttentionElement + AttentionOutput<T>>(
    stream: &'a Stream,
    inputs: Qkv<'a, T>,
    kv_lens: TensorView<'a, i32>,
    outputs: AttentionOutputs<'a, T>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: &LeanOptions,
) -> Result<()> {
    const OP: &str = "lean_atten";
    let [rows, total] = check_packed(OP, &inputs, &outputs)?;
    let [batch, sq] = check_batch(OP, rows, inputs.q.shape(), &kv_lens)?;
    let LeanOptions { scale, causal, programs } = *options;
    let mask = Mask { causal, ..Mask::default() };
    let options = AttentionOptions { scale, mask, ..AttentionOptions::default() };
    let others: [NamedOperand; 1] = [("kv_lens", Some(&kv_lens))];
    let mut problem =
        problem(OP, stream, inputs, (outputs, workspace), &options, [batch, sq, total], &others)?;
    problem.consecutive_keys(&kv_lens, [sq, total])?;
    let workspace = problem.take_workspace();
    problem.run_lean(programs, workspace, batch, [sq, total])
}

/// Inputs of [`lean_atten_paged`].
#[derive(Debug, Clone, Copy)]
pub struct LeanPagedInputs<'a, T: Element, C: Element> {
    /// Queries, `[Hq, B Sq, Dqk]`.
    pub q: TensorView<'a, T>,
    /// Keys, `[Hkv, slots, Dqk]`.
    pub k_cache: TensorView<'a, C>,
    /// Values, `[Hkv, slots, Dv]`.
    pub v_cache: TensorView<'a, C>,
    /// Slots of a page.
    pub page: usize,
    /// The pages of all sequences, one after the other: of each key head, `[Hkv, pages]`, or `[1, pages]` of all.
    pub block_table: TensorView<'a, i32>,
    /// `[B]`: keys of each sequence.
    pub kv_lens: TensorView<'a, i32>,
    /// Factors of the cache: `[1]` or `[B, Hkv]`.
    pub scales: CacheScales<'a>,
}

/// [`lean_atten`] over keys in pages, with the heads first.
///
/// | arg                  | shape                                   | dtype                               | layout                     |
/// |----------------------|-----------------------------------------|-------------------------------------|----------------------------|
/// | `q`                  | `[Hq, B Sq, Dqk]`                       | `bf16`, `f16`, `f32`                | unit stride on the columns |
/// | `k_cache`, `v_cache` | `[Hkv, slots, Dqk]`, `[Hkv, slots, Dv]` | as `q`, the device's fp8 e4m3, `i8` | unit stride on the columns |
/// | `block_table`        | `[Hkv, pages]` or `[1, pages]`          | `i32`                               | unit stride on `pages`     |
/// | `kv_lens`            | `[B]`                                   | `i32`                               | contiguous                 |
/// | `out`                | `[Hq, B Sq, Dv]`                        | as `q`                              | unit stride on the columns |
/// | `lse`                | `[Hq, B Sq]`                            | `f32`                               | any strides                |
/// | `workspace`          | `[n]`                                   | `f32`                               | contiguous, on 16 bytes    |
///
/// Key head `h` has the keys of sequence `n` in pages `block_table[h, first..]`, where `first` is the number of pages of the sequences
/// before it, `ceil(kv_lens / page)` each. Page `p` is the slots `p page .. (p + 1) page`. Slots behind the last whole page are no page.
///
/// The work is shared as in [`lean_atten`]; [`lean_paged_workspace`](crate::lean_paged_workspace) says how long the workspace is, which one
/// program does without. Pages of 16, 32, .. slots and rows in whole vectors have the fast kernels.
///
/// What is on the device is not trusted: if a length is negative, or the pages of a sequence end beyond the table, outputs of that
/// sequence and of all after it are NaN; so is what sees a key of a page that is not in the cache.
///
/// # Errors
/// As [`lean_atten`]; [`Argument`](Error::Argument) for pages without slots.
///
/// Source: Sanovar et al. 2024, "Lean Attention"; Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
/// PagedAttention".
pub fn lean_atten_paged<'a, T, C>(
    stream: &'a Stream,
    inputs: LeanPagedInputs<'a, T, C>,
    outputs: AttentionOutputs<'a, T>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: &LeanOptions,
) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T>,
    C: PagedElement<T>,
{
    const OP: &str = "lean_atten_paged";
    let LeanPagedInputs { q, k_cache, v_cache, page, block_table, kv_lens, scales } = inputs;
    let [heads, rows, _] = q.dims(OP, "q")?;
    let [kv_heads, slots, _] = k_cache.dims(OP, "k_cache")?;
    let [.., dv] = v_cache.dims::<3>(OP, "v_cache")?;
    v_cache.expect_shape(OP, "v_cache", [kv_heads, slots, dv])?;
    let AttentionOutputs { out, lse } = outputs;
    out.expect_shape(OP, "out", [heads, rows, dv])?;
    if let Some(lse) = &lse {
        lse.expect_shape(OP, "lse", [heads, rows])?;
    }
    if page == 0 {
        return Err(Error::argument(OP, "page", page, "1 slot or more"));
    }
    let [batch, sq] = check_batch(OP, rows, q.shape(), &kv_lens)?;
    // Rows, then heads; pages, then heads.
    let q = q.transpose(0, 1)?;
    let paged = |cache: TensorView<'a, C>| -> Result<_> {
        cache.slice(1, 0..slots / page * page)?.split_axis(1, page)?.transpose(0, 1)
    };
    let (k, v) = (paged(k_cache)?, paged(v_cache)?);
    let sizes = KvLayout::Hnd.sizes(OP, C::DTYPE, ("k_cache", k.shape()), ("v_cache", v.shape()))?;
    let of = check_cache_heads(OP, q.shape(), ["k_cache", "v_cache"], sizes, [256, 256])?;
    let mut problem = Problem::new(OP, stream, kernel_of::<T, T>(), of);
    problem.disjoint(
        &[
            ("q", Some(&q)),
            ("k_cache", Some(&k_cache)),
            ("v_cache", Some(&v_cache)),
            ("block_table", Some(&block_table)),
            ("kv_lens", Some(&kv_lens)),
            ("k_scale", optional(&scales.k)),
            ("v_scale", optional(&scales.v)),
        ],
        &[("out", Some(&out)), ("lse", optional(&lse)), ("workspace", optional(&workspace))],
    )?;
    problem.queries("q", &q)?;
    problem.cache(KvLayout::Hnd, ("k_cache", &k), ("v_cache", &v))?;
    problem.page_lists(&block_table, sizes)?;
    problem.out("out", &mut out.transpose(0, 1)?)?;
    let mut lse = lse.map(|lse| lse.transpose(0, 1)).transpose()?;
    problem.lse(lse.as_mut())?;
    problem.scale(options.scale)?;
    problem.mask(Mask { causal: options.causal, ..Mask::default() });
    problem.cache_scales(&scales, batch)?;
    let keys = block_table.shape()[1].saturating_mul(page);
    problem.consecutive_keys(&kv_lens, [sq, keys])?;
    problem.run_lean(options.programs, workspace, batch, [sq, keys])
}

/// Sequences of `kv_lens`, and the queries of each of them.
fn check_batch(
    op: &'static str,
    rows: usize,
    shape: &[usize],
    kv_lens: &TensorView<i32>,
) -> Result<[usize; 2]> {
    let [batch] = kv_lens.dims(op, "kv_lens")?;
    if rows.checked_rem(batch).unwrap_or(rows) != 0 {
        let want = format!("a multiple of {batch} rows (sequences of kv_lens)");
        return Err(Error::shape(op, "q", shape, want));
    }
    Ok([batch, rows.checked_div(batch).unwrap_or(0)])
}
