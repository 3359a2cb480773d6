//! Attention of batches of equally long, or of packed sequences.

use super::options::{AttentionElement, AttentionOptions, AttentionOutput, Pages};
use super::plan::Plan;
use super::problem::{Heads, Problem, check_cache_heads, check_heads};
use crate::kv_cache::optional;
use hk_core::{DType, Element, Error, NamedOperand, Operand, Result, Stream, TensorView, TensorViewMut};

/// Queries, keys and values of [`mha`] and [`mha_varlen`].
#[derive(Debug, Clone, Copy)]
pub struct Qkv<'a, T: AttentionElement> {
    /// Queries: `[B, Sq, Hq, Dqk]`, or packed `[total_q, Hq, Dqk]`.
    pub q: TensorView<'a, T>,
    /// Keys: `[B, Sk, Hkv, Dqk]`, or packed `[total_k, Hkv, Dqk]`, or a cache in pages ([`AttentionOptions::pages`]).
    pub k: TensorView<'a, T>,
    /// Values: `[B, Sk, Hkv, Dv]`, or packed `[total_k, Hkv, Dv]`, or a cache in pages.
    pub v: TensorView<'a, T>,
}

/// Starts of packed sequences: `cu_seqlens[n]` is the row of the first token of sequence `n`, `cu_seqlens[sequences]` the number
/// of rows.
#[derive(Debug, Clone, Copy)]
pub struct SequenceStarts<'a> {
    /// Of queries, `[sequences + 1]`.
    pub q: TensorView<'a, i32>,
    /// Of keys and values, `[sequences + 1]`.
    pub k: TensorView<'a, i32>,
}

/// Outputs of attention.
#[derive(Debug)]
pub struct AttentionOutputs<'a, O: Element> {
    /// `[B, Sq, Hq, Dv]`, or packed `[total_q, Hq, Dv]`.
    pub out: TensorViewMut<'a, O>,
    /// Log-sum-exp of the scores, `[B, Hq, Sq]`, or packed `[total_q, Hq]`; `None`: not wanted.
    pub lse: Option<TensorViewMut<'a, f32>>,
}

/// The type of the kernel that serves inputs `T` and outputs `O`: fp8 is widened to 16 bits, exactly.
pub(crate) fn kernel_of<T: AttentionElement, O: Element>() -> DType {
    match (T::DTYPE, O::DTYPE) {
        (DType::F32 | DType::F16 | DType::Bf16, _) => T::DTYPE,
        (_, DType::F16) => DType::F16,
        _ => DType::Bf16,
    }
}

/// Softmax attention of a batch of sequences.
///
/// For each sequence and head `h`, with key head `h / (Hq / Hkv)`, query `i` at key `p = i + Sk - Sq`:
///
/// ```text
/// s_ij = scale (q_i . k_j);  s = softcap tanh(s / softcap);  s -= slope |p - j|;  s += bias_ij;  masked: -inf
/// lse_i = ln(sum_j exp(s_ij) + exp(sink));  out_i = sum_j exp(s_ij - lse_i) v_j
/// ```
///
/// | arg   | shape              | dtype                                           | layout                     |
/// |-------|--------------------|-------------------------------------------------|----------------------------|
/// | `q`   | `[B, Sq, Hq, Dqk]` | `bf16`, `f16`, `f32`, the device's fp8 e4m3     | unit stride on the columns |
/// | `k`   | `[B, Sk, Hkv, Dqk]`| as `q`                                          | unit stride on the columns |
/// | `v`   | `[B, Sk, Hkv, Dv]` | as `q`                                          | unit stride on the columns |
/// | `out` | `[B, Sq, Hq, Dv]`  | as `q`; for fp8 `bf16`, `f16` or `f32`          | unit stride on the columns |
/// | `lse` | `[B, Hq, Sq]`      | `f32`                                           | any strides                |
///
/// `Hq` is a multiple of `Hkv`; `Dqk` and `Dv` are 1 to 256 and may differ. Other strides are free: views of `[B, H, S, D]` are
/// transposed ones. `f32` has products of `f32`. Probabilities are rounded to the type of `v` before they are multiplied by it; fp8 is widened
/// to 16 bits first for options and strides that the fp8 kernel does not serve. All sums are `f32`, and the output is rounded once.
/// Descales are not negative.
///
/// A row without a visible key is 0, its `lse` -inf, or the sink. Keys that no query of a sequence sees are not read. A NaN or
/// infinite value of a key that some queries see may reach other queries of its sequence.
///
/// Returns when the launch is queued, before it has run. Without queries, nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align), [`Empty`](Error::Empty) if a tensor breaks the
/// table, [`Argument`](Error::Argument) for a scale that is 0 or not finite, a softcap that is negative or not finite, a dropout
/// outside [0, 1), [`Unsupported`](Error::Unsupported) for the fp8 of another device, [`Overlap`](Error::Overlap) of outputs,
/// [`TooLarge`](Error::TooLarge) beyond 2^30 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and
/// launching a kernel. Nothing is written then.
///
/// Source: Vaswani et al. 2017, equation 1; Dao et al. 2022, "FlashAttention".
pub fn mha<'a, T: AttentionElement, O: AttentionOutput<T>>(
    stream: &'a Stream,
    inputs: Qkv<'a, T>,
    outputs: AttentionOutputs<'a, O>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: &AttentionOptions<'a, T>,
) -> Result<()> {
    const OP: &str = "mha";
    if options.pages.is_some() {
        return Err(Error::argument(OP, "block_table", "given", "none: mha_varlen has pages"));
    }
    let [batch, sq, sk] = check_batched(OP, &inputs, &outputs)?;
    let problem = problem(OP, stream, inputs, (outputs, workspace), options, [batch, sq, sk], &[])?;
    problem.run_batched(batch, [sq, sk])
}

/// Softmax attention of sequences of different lengths, packed one after the other: [`mha`] of each.
///
/// | arg          | shape                  | dtype                                       | layout                     |
/// |--------------|------------------------|---------------------------------------------|----------------------------|
/// | `q`          | `[total_q, Hq, Dqk]`   | `bf16`, `f16`, `f32`, the device's fp8 e4m3 | unit stride on the columns |
/// | `k`          | `[total_k, Hkv, Dqk]`  | as `q`                                      | unit stride on the columns |
/// | `v`          | `[total_k, Hkv, Dv]`   | as `q`                                      | unit stride on the columns |
/// | `cu_seqlens` | `[sequences + 1]` each | `i32`                                       | contiguous                 |
/// | `out`        | `[total_q, Hq, Dv]`    | as `q`; for fp8 `bf16`, `f16` or `f32`      | unit stride on the columns |
/// | `lse`        | `[total_q, Hq]`        | `f32`                                       | any strides                |
///
/// Sequences may be empty. A bias is `[total_q, total_k]` or `[sequences, Hq, total_q, total_k]`, of which a sequence has the first rows
/// and columns.
///
/// With [`pages`](AttentionOptions::pages), `k` and `v` are caches in any [`KvLayout`](crate::KvLayout). The keys of a sequence are as
/// many as its starts in `cu_seqlens_k` are apart, in the order of its row of the block table; `total_k` stands for the tokens of
/// such a row.
///
/// The starts are on the device and are not trusted: if those of queries do not rise from 0 to `total_q`, all outputs are NaN; if those
/// of a sequence's keys fall, or lie outside `[0, total_k]`, its outputs are NaN. With pages, the outputs of a sequence are NaN whose
/// starts fall or are further apart than `total_k`, and those of queries that see a key of a page that is not in the cache.
///
/// # Errors
/// As [`mha`].
pub fn mha_varlen<'a, T: AttentionElement, O: AttentionOutput<T>>(
    stream: &'a Stream,
    inputs: Qkv<'a, T>,
    cu_seqlens: SequenceStarts<'a>,
    outputs: AttentionOutputs<'a, O>,
    workspace: Option<TensorViewMut<'a, f32>>,
    options: &AttentionOptions<'a, T>,
) -> Result<()> {
    const OP: &str = "mha_varlen";
    let sequences = cu_seqlens.check(OP)?;
    let Some(Pages { block_table, layout }) = options.pages else {
        let [total_q, total_k] = check_packed(OP, &inputs, &outputs)?;
        let (sizes, others) = ([sequences, total_q, total_k], cu_seqlens.operands());
        let mut problem = problem(OP, stream, inputs, (outputs, workspace), options, sizes, &others)?;
        problem.starts(&cu_seqlens, total_k)?;
        return problem.run_packed(sequences, total_q);
    };
    let (Qkv { q, k, v }, AttentionOutputs { mut out, mut lse }) = (inputs, outputs);
    let [total_q, ..] = q.dims::<3>(OP, "q")?;
    let sizes = layout.sizes(OP, T::DTYPE, ("k", k.shape()), ("v", v.shape()))?;
    let [_, pages] = block_table.dims(OP, "block_table")?;
    let heads = check_cache_heads(OP, q.shape(), ["k", "v"], sizes, [256, 256])?;
    let keys = pages.saturating_mul(sizes.tokens);
    out.expect_shape(OP, "out", [total_q, heads.heads, heads.dv])?;
    if let Some(lse) = &lse {
        lse.expect_shape(OP, "lse", [total_q, heads.heads])?;
    }
    let mut problem = Problem::new(OP, stream, kernel_of::<T, O>(), heads);
    let [q_starts, k_starts] = cu_seqlens.operands();
    let others: [NamedOperand; 3] = [q_starts, k_starts, ("block_table", Some(&block_table))];
    disjoint(&problem, Qkv { q, k, v }, &out, [&lse, &workspace], options, &others)?;
    problem.queries("q", &q)?;
    problem.cache(layout, ("k", &k), ("v", &v))?;
    problem.block_table(&block_table, sequences, sizes)?;
    problem.out("out", &mut out)?;
    problem.lse(lse.as_mut())?;
    problem.options(options, sequences, [total_q, keys])?;
    problem.plan(Plan { tiling: options.tiling, workspace });
    problem.cached_starts(&cu_seqlens, keys)?;
    problem.run_packed(sequences, total_q)
}

impl SequenceStarts<'_> {
    /// The number of sequences.
    pub(crate) fn check(&self, op: &'static str) -> Result<usize> {
        let sequences = check_starts(op, "cu_seqlens_q", &self.q)?;
        self.k.expect_shape(op, "cu_seqlens_k", [sequences + 1])?;
        Ok(sequences)
    }

    pub(crate) fn operands(&self) -> [NamedOperand<'_>; 2] {
        [("cu_seqlens_q", Some(&self.q)), ("cu_seqlens_k", Some(&self.k))]
    }
}

/// The number of sequences of starts `[sequences + 1]`.
pub(crate) fn check_starts(op: &'static str, arg: &'static str, starts: &TensorView<i32>) -> Result<usize> {
    let [n] = starts.dims(op, arg)?;
    n.checked_sub(1).ok_or_else(|| Error::shape(op, arg, [n], "[sequences + 1]"))
}

fn heads_of<T: AttentionElement>(op: &'static str, inputs: &Qkv<T>) -> Result<Heads> {
    let Qkv { q, k, v } = inputs;
    check_heads(op, [("q", q.shape()), ("k", k.shape()), ("v", v.shape())], [256, 256])
}

/// Sequences, queries and keys of `[B, S, H, D]`.
pub(super) fn check_batched<T: AttentionElement, O: Element>(
    op: &'static str,
    inputs: &Qkv<T>,
    outputs: &AttentionOutputs<O>,
) -> Result<[usize; 3]> {
    let Qkv { q, k, v } = inputs;
    let [batch, sq, ..] = q.dims::<4>(op, "q")?;
    let [k_batch, sk, kv_heads, _] = k.dims::<4>(op, "k")?;
    let [.., dv] = v.dims::<4>(op, "v")?;
    let heads = heads_of(op, inputs)?;
    if k_batch != batch {
        return Err(Error::shape(op, "k", k.shape(), format!("{batch} sequences (of q)")));
    }
    v.expect_shape(op, "v", [batch, sk, kv_heads, dv])?;
    outputs.out.expect_shape(op, "out", [batch, sq, heads.heads, dv])?;
    if let Some(lse) = &outputs.lse {
        lse.expect_shape(op, "lse", [batch, heads.heads, sq])?;
    }
    Ok([batch, sq, sk])
}

/// Rows of `[total, H, D]`: of queries, of keys.
pub(crate) fn check_packed<T: AttentionElement, O: Element>(
    op: &'static str,
    inputs: &Qkv<T>,
    outputs: &AttentionOutputs<O>,
) -> Result<[usize; 2]> {
    let Qkv { q, k, v } = inputs;
    let [total_q, ..] = q.dims::<3>(op, "q")?;
    let [total_k, kv_heads, _] = k.dims::<3>(op, "k")?;
    let [.., dv] = v.dims::<3>(op, "v")?;
    let heads = heads_of(op, inputs)?;
    v.expect_shape(op, "v", [total_k, kv_heads, dv])?;
    outputs.out.expect_shape(op, "out", [total_q, heads.heads, dv])?;
    if let Some(lse) = &outputs.lse {
        lse.expect_shape(op, "lse", [total_q, heads.heads])?;
    }
    Ok([total_q, total_k])
}

/// What queries, keys, values, outputs and options give of a problem; sequences, queries and keys. `others`: inputs that the outputs
/// may not share memory with, either.
pub(crate) fn problem<'a, T: AttentionElement, O: AttentionOutput<T>>(
    op: &'static str,
    stream: &'a Stream,
    inputs: Qkv<'a, T>,
    (outputs, workspace): (AttentionOutputs<'a, O>, Option<TensorViewMut<'a, f32>>),
    options: &AttentionOptions<'a, T>,
    [sequences, sq, sk]: [usize; 3],
    others: &[NamedOperand],
) -> Result<Problem<'a>> {
    let mut problem = Problem::new(op, stream, kernel_of::<T, O>(), heads_of(op, &inputs)?);
    let AttentionOutputs { mut out, mut lse } = outputs;
    disjoint(&problem, inputs, &out, [&lse, &workspace], options, others)?;
    problem.queries("q", &inputs.q)?;
    problem.fresh(("k", &inputs.k), ("v", &inputs.v))?;
    problem.out("out", &mut out)?;
    problem.lse(lse.as_mut())?;
    problem.options(options, sequences, [sq, sk])?;
    problem.plan(Plan { tiling: options.tiling, workspace });
    Ok(problem)
}

/// Checks that the outputs share no memory with the inputs, or each other.
fn disjoint<'a, T: AttentionElement, O: AttentionOutput<T>>(
    problem: &Problem<'a>,
    Qkv { q, k, v }: Qkv<'a, T>,
    out: &TensorViewMut<'a, O>,
    [lse, workspace]: [&Option<TensorViewMut<'a, f32>>; 2],
    options: &AttentionOptions<'a, T>,
    others: &[NamedOperand],
) -> Result<()> {
    use super::options::Bias;
    let bias = options.bias.as_ref().map(|bias| match bias {
        Bias::F32(bias) => bias as &dyn Operand,
        Bias::Own(bias) => bias,
    });
    let mut inputs: Vec<NamedOperand> = vec![
        ("q", Some(&q)),
        ("k", Some(&k)),
        ("v", Some(&v)),
        ("alibi", optional(&options.alibi)),
        ("sink", optional(&options.sink)),
        ("bias", bias),
        ("q_descale", optional(&options.descales.q)),
        ("k_descale", optional(&options.descales.k)),
        ("v_descale", optional(&options.descales.v)),
    ];
    inputs.extend(others);
    problem
        .disjoint(&inputs, &[("out", Some(out)), ("lse", optional(lse)), ("workspace", optional(workspace))])
}
