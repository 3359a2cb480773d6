//! Attention of prompts behind the interface of FlashAttention 2.

use super::mha::{AttentionOutputs, Qkv, SequenceStarts, check_batched, check_packed, problem};
use super::options::{AttentionElement, AttentionOptions, AttentionOutput, Descales, Dropout, Mask};
use hk_core::{NamedOperand, Operand, Result, Stream, TensorView};

/// Inputs of [`flash_attn_fwd_prefill`].
#[derive(Debug, Clone, Copy)]
pub struct FlashInputs<'a, T: AttentionElement> {
    /// Queries, keys and values: `[B, S, H, D]`, or with `cu_seqlens` packed.
    pub qkv: Qkv<'a, T>,
    /// Starts of packed sequences.
    pub cu_seqlens: Option<SequenceStarts<'a>>,
    /// Queries of each sequence that are used, `[sequences]`; `None`: all.
    pub seqused_q: Option<TensorView<'a, i32>>,
    /// Keys of each sequence that are used, `[sequences]`; `None`: all.
    pub seqused_k: Option<TensorView<'a, i32>>,
}

/// Options of [`flash_attn_fwd_prefill`], as those of [`mha`](crate::mha).
#[derive(Debug, Clone, Copy, Default)]
pub struct FlashOptions<'a> {
    /// Factor of the products; `None`: `1 / sqrt(Dqk)`.
    pub scale: Option<f32>,
    /// Which keys a query sees; places count among the used rows.
    pub mask: Mask,
    /// Slopes `[Hq]` or `[sequences, Hq]`.
    pub alibi: Option<TensorView<'a, f32>>,
    /// Dropout of probabilities.
    pub dropout: Option<Dropout>,
    /// Factors of quantized tensors.
    pub descales: Descales<'a>,
}

/// Softmax attention of batches or of packed sequences, of which a part may be used.
///
/// | arg                      | shape                                      | dtype                                       | layout                     |
/// |--------------------------|--------------------------------------------|---------------------------------------------|----------------------------|
/// | `q`                      | `[B, Sq, Hq, Dqk]` or `[total_q, Hq, Dqk]` | `bf16`, `f16`, `f32`, the device's fp8 e4m3 | unit stride on the columns |
/// | `k`                      | `[B, Sk, Hkv, Dqk]` or `[total_k, Hkv, Dqk]` | as `q`                                    | unit stride on the columns |
/// | `v`                      | `[B, Sk, Hkv, Dv]` or `[total_k, Hkv, Dv]` | as `q`                                      | unit stride on the columns |
/// | `cu_seqlens`             | `[sequences + 1]` each                     | `i32`                                       | contiguous                 |
/// | `seqused_q`, `seqused_k` | `[sequences]`                              | `i32`                                       | contiguous                 |
/// | `out`                    | `[B, Sq, Hq, Dv]` or `[total_q, Hq, Dv]`   | as `q`; for fp8 `bf16`, `f16` or `f32`      | unit stride on the columns |
/// | `lse`                    | `[B, Hq, Sq]` or `[Hq, total_q]`           | `f32`                                       | any strides                |
///
/// The function is that of [`mha`](crate::mha) and, with `cu_seqlens`, of [`mha_varlen`](crate::mha_varlen), on the first
/// `seqused_q[n]` queries and `seqused_k[n]` keys of sequence `n`. The other queries and keys are not read, their outputs not written.
/// `lse` of packed sequences has the heads first. Queries and keys are rotated before the call, if at all.
///
/// Starts and lengths are on the device and are not trusted: with more used queries or keys than a sequence has, or starts of its
/// keys that fall or lie outside the rows, its outputs are NaN; if starts of queries do not rise from 0 to `total_q`, all are.
///
/// # Errors
/// As [`mha`](crate::mha).
///
/// Source: Dao 2023, "FlashAttention-2".
pub fn flash_attn_fwd_prefill<'a, T: AttentionElement, O: AttentionOutput<T>>(
    stream: &'a Stream,
    inputs: FlashInputs<'a, T>,
    outputs: AttentionOutputs<'a, O>,
    options: &FlashOptions<'a>,
) -> Result<()> {
    const OP: &str = "flash_attn_fwd_prefill";
    let FlashInputs { qkv, cu_seqlens, seqused_q, seqused_k } = inputs;
    let AttentionOutputs { out, mut lse } = outputs;
    if cu_seqlens.is_some()
        && let Some(heads_first) = lse
    {
        let [rows, heads, _] = qkv.q.dims(OP, "q")?;
        heads_first.expect_shape(OP, "lse", [heads, rows])?;
        lse = Some(heads_first.transpose(0, 1)?);
    }
    let outputs = AttentionOutputs { out, lse };
    let [sequences, sq, sk] = match &cu_seqlens {
        None => check_batched(OP, &qkv, &outputs)?,
        Some(starts) => {
            let [sq, sk] = check_packed(OP, &qkv, &outputs)?;
            [starts.check(OP)?, sq, sk]
        }
    };
    let used: [(&'static str, _); 2] = [("seqused_q", seqused_q), ("seqused_k", seqused_k)];
    for (arg, lens) in &used {
        if let Some(lens) = lens {
            lens.expect_shape(OP, arg, [sequences])?;
        }
    }
    let FlashOptions { scale, mask, alibi, dropout, descales } = *options;
    let options = AttentionOptions { scale, mask, alibi, dropout, descales, ..AttentionOptions::default() };
    let mut others: Vec<NamedOperand> =
        used.iter().map(|(arg, lens)| (*arg, lens.as_ref().map(|v| v as &dyn Operand))).collect();
    if let Some(starts) = &cu_seqlens {
        others.extend(starts.operands());
    }
    let mut problem = problem(OP, stream, qkv, (outputs, None), &options, [sequences, sq, sk], &others)?;
    for (i, (arg, lens)) in used.iter().enumerate() {
        if let Some(lens) = lens {
            let lens = problem.indices(arg, lens)?;
            let s = &mut problem.params().sequences;
            *[&mut s.q_lens, &mut s.k_lens][i] = lens;
        }
    }
    match &cu_seqlens {
        None => problem.run_batched(sequences, [sq, sk]),
        Some(starts) => {
            problem.starts(starts, sk)?;
            problem.run_packed(sequences, sq)
        }
    }
}
