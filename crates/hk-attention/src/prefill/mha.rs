//! Attention of batches of equally long, or of packed sequences.

use super::options::{AttentionElement, AttentionOptions, AttentionOutput};
use super::plan::Plan;
use super::problem::{Problem, check_heads};
use hk_core::{DType, Error, NamedOperand, Operand, Result, Stream, TensorView, TensorViewMut};

/// Queries, keys and values of [`mha`] and [`mha_varlen`].
#[derive(Debug, Clone, Copy)]
pub struct Qkv<'a, T: AttentionElement> {
    /// Queries: `[B, Sq, Hq, Dqk]`, or packed `[total_q, Hq, Dqk]`.
    pub q: TensorView<'a, T>,
    /// Keys: `[B, Sk, Hkv, Dqk]`, or packed `[total_k, Hkv, Dqk]`.
    pub k: TensorView<'a, T>,
    /// Values: `[B, Sk, Hkv, Dv]`, or packed `[total_k, Hkv, Dv]`.
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
pub struct AttentionOutputs<'a, O: hk_core::Element> {
    /// `[B, Sq, Hq, Dv]`, or packed `[total_q, Hq, Dv]`.
    pub out: TensorViewMut<'a, O>,
    /// Log-sum-exp of the scores, `[B, Hq, Sq]`, or packed `[total_q, Hq]`; `None`: not wanted.
    pub lse: Option<TensorViewMut<'a, f32>>,
}

/// The type of the kernel that serves inputs `T` and outputs `O`: fp8 is widened to 16 bits, exactly.
fn kernel_of<T: AttentionElement, O: AttentionOutput<T>>() -> DType {
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
/// transposed ones. `f32` has products of `f32`. Probabilities are rounded to the type of `v` (fp8: of the output, or `bf16`)
/// before they are multiplied by it; all sums are `f32`, and the output is rounded once.
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
    let (Qkv { q, k, v }, AttentionOutputs { mut out, mut lse }) = (inputs, outputs);
    let [batch, sq, ..] = q.dims::<4>(OP, "q")?;
    let [k_batch, sk, kv_heads, _] = k.dims::<4>(OP, "k")?;
    let [.., dv] = v.dims::<4>(OP, "v")?;
    let heads = check_heads(OP, [("q", q.shape()), ("k", k.shape()), ("v", v.shape())], [256, 256])?;
    if k_batch != batch {
        return Err(Error::shape(OP, "k", k.shape(), format!("{batch} sequences (of q)")));
    }
    v.expect_shape(OP, "v", [batch, sk, kv_heads, dv])?;
    out.expect_shape(OP, "out", [batch, sq, heads.heads, dv])?;
    if let Some(lse) = &lse {
        lse.expect_shape(OP, "lse", [batch, heads.heads, sq])?;
    }
    let mut problem = Problem::new(OP, stream, kernel_of::<T, O>(), heads);
    disjoint(&problem, Qkv { q, k, v }, &out, [&lse, &workspace], options, &[])?;
    problem.queries("q", &q)?;
    problem.fresh(("k", &k), ("v", &v))?;
    problem.out("out", &mut out)?;
    problem.lse(lse.as_mut())?;
    problem.options(options, batch, [sq, sk])?;
    problem.run_batched(batch, [sq, sk], Plan { tiling: options.tiling, workspace })
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
/// Sequences may be empty. A bias is `[total_q, total_k]` or longer than the longest sequence..
///
/// The starts are on the device and are not trusted: if those of queries do not rise from 0 to `total_q`, all outputs are NaN; if those
/// of a sequence's keys fall, or lie outside `[0, total_k]`, its outputs are NaN.
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
    let (Qkv { q, k, v }, AttentionOutputs { mut out, mut lse }) = (inputs, outputs);
    let [total_q, ..] = q.dims::<3>(OP, "q")?;
    let [total_k, kv_heads, _] = k.dims::<3>(OP, "k")?;
    let [.., dv] = v.dims::<3>(OP, "v")?;
    let heads = check_heads(OP, [("q", q.shape()), ("k", k.shape()), ("v", v.shape())], [256, 256])?;
    v.expect_shape(OP, "v", [total_k, kv_heads, dv])?;
    out.expect_shape(OP, "out", [total_q, heads.heads, dv])?;
    if let Some(lse) = &lse {
        lse.expect_shape(OP, "lse", [total_q, heads.heads])?;
    }
    let sequences = check_starts(OP, "cu_seqlens_q", &cu_seqlens.q)?;
    cu_seqlens.k.expect_shape(OP, "cu_seqlens_k", [sequences + 1])?;
    let mut problem = Problem::new(OP, stream, kernel_of::<T, O>(), heads);
    let starts: [NamedOperand; 2] =
        [("cu_seqlens_q", Some(&cu_seqlens.q)), ("cu_seqlens_k", Some(&cu_seqlens.k))];
    disjoint(&problem, Qkv { q, k, v }, &out, [&lse, &workspace], options, &starts)?;
    problem.queries("q", &q)?;
    problem.fresh(("k", &k), ("v", &v))?;
    problem.out("out", &mut out)?;
    problem.lse(lse.as_mut())?;
    problem.options(options, sequences, [total_q, total_k])?;
    let total_k = problem.count("k", total_k)?;
    let (q_starts, k_starts) =
        (problem.indices("cu_seqlens_q", &cu_seqlens.q)?, problem.indices("cu_seqlens_k", &cu_seqlens.k)?);
    let s = &mut problem.params().sequences;
    (s.q_starts, s.k_starts, s.total_k) = (q_starts, k_starts, total_k);
    problem.run_packed(sequences, total_q, total_k as usize, Plan { tiling: options.tiling, workspace })
}

/// The number of sequences of starts `[sequences + 1]`.
pub(super) fn check_starts(op: &'static str, arg: &'static str, starts: &TensorView<i32>) -> Result<usize> {
    let [n] = starts.dims(op, arg)?;
    n.checked_sub(1).ok_or_else(|| Error::shape(op, arg, [n], "[sequences + 1]"))
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
    fn dynamic<V: Operand>(view: &Option<V>) -> Option<&dyn Operand> {
        view.as_ref().map(|v| v as &dyn Operand)
    }
    let bias = options.bias.as_ref().map(|bias| match bias {
        Bias::F32(bias) => bias as &dyn Operand,
        Bias::Own(bias) => bias,
    });
    let mut inputs: Vec<NamedOperand> = vec![
        ("q", Some(&q)),
        ("k", Some(&k)),
        ("v", Some(&v)),
        ("alibi", dynamic(&options.alibi)),
        ("sink", dynamic(&options.sink)),
        ("bias", bias),
        ("q_descale", dynamic(&options.descales.q)),
        ("k_descale", dynamic(&options.descales.k)),
        ("v_descale", dynamic(&options.descales.v)),
    ];
    inputs.extend(others);
    problem.disjoint(&inputs, &[("out", Some(out)), ("lse", dynamic(lse)), ("workspace", dynamic(workspace))])
}
