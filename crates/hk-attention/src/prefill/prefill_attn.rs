//! Self-attention of prompts that lie anywhere among packed rows.

use super::mha::{AttentionOutputs, Qkv, check_packed, problem};
use super::options::{AttentionElement, AttentionOptions, AttentionOutput, Mask};
use hk_core::{Error, Result, Stream, TensorView};

/// Where sequences lie among packed rows.
#[derive(Debug, Clone, Copy)]
pub struct SequenceSpans<'a> {
    /// Row of the first token of each sequence, `[sequences]`.
    pub start: TensorView<'a, i32>,
    /// Tokens of each sequence, `[sequences]`.
    pub len: TensorView<'a, i32>,
}

/// Self-attention of prompts in packed rows, with scale `1 / sqrt(Dqk)`: `out = softmax(q k^T / sqrt(Dqk)) v` of each sequence.
///
/// | arg            | shape             | dtype                | layout                     |
/// |----------------|-------------------|----------------------|----------------------------|
/// | `q`            | `[rows, Hq, Dqk]` | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `k`            | `[rows, Hkv, Dqk]`| as `q`               | unit stride on the columns |
/// | `v`            | `[rows, Hkv, Dv]` | as `q`               | unit stride on the columns |
/// | `start`, `len` | `[sequences]`     | `i32`                | contiguous                 |
/// | `out`          | `[rows, Hq, Dv]`  | as `q`               | unit stride on the columns |
/// | `lse`          | `[rows, Hq]`      | `f32`                | any strides                |
///
/// `causal`: keys after the query's own place are masked. Heads, columns and rounding are those of [`mha`](crate::mha). Sequences
/// may be empty and in any order, with gaps between them. Rows of no sequence are neither read nor written; if sequences share
/// rows, these have the results of any of them.
///
/// `start` and `len` are on the device and are not trusted: a sequence that is longer than `max_len`, or does not lie within the
/// rows, has outputs of NaN in those of its first `max_len` rows that exist. A `max_len` beyond the longest sequence costs blocks
/// without work.
///
/// # Errors
/// As [`mha`](crate::mha).
///
/// Source: Vaswani et al. 2017, equation 1; Dao et al. 2022, "FlashAttention".
pub fn prefill_attn<'a, T: AttentionElement + AttentionOutput<T>>(
    stream: &'a Stream,
    inputs: Qkv<'a, T>,
    sequences: SequenceSpans<'a>,
    outputs: AttentionOutputs<'a, T>,
    max_len: usize,
    causal: bool,
) -> Result<()> {
    const OP: &str = "prefill_attn";
    let [rows, k_rows] = check_packed(OP, &inputs, &outputs)?;
    if k_rows != rows {
        return Err(Error::shape(OP, "k", inputs.k.shape(), format!("{rows} rows (of q)")));
    }
    let SequenceSpans { start, len } = sequences;
    let [n] = start.dims(OP, "start")?;
    len.expect_shape(OP, "len", [n])?;
    let mask = Mask { causal, ..Mask::default() };
    let options = AttentionOptions { mask, ..AttentionOptions::default() };
    let others: [hk_core::NamedOperand; 2] = [("start", Some(&start)), ("len", Some(&len))];
    let mut problem = problem(OP, stream, inputs, (outputs, None), &options, [n, rows, rows], &others)?;
    problem.spans(&start, &len, rows)?;
    problem.run_batched(n, [max_len.min(rows), 0])
}
