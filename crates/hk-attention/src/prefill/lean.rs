//! Attention of a batch over keys of different lengths, packed without starts.

use super::mha::{AttentionOutputs, Qkv, check_packed, problem};
use super::options::{AttentionElement, AttentionOptions, AttentionOutput, Mask};
use super::stream_k::Programs;
use hk_core::{Error, NamedOperand, Result, Stream, TensorView, TensorViewMut};

/// Options of [`lean_atten`].
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
    let [batch] = kv_lens.dims(OP, "kv_lens")?;
    if rows.checked_rem(batch).unwrap_or(rows) != 0 {
        let want = format!("a multiple of {batch} rows (sequences of kv_lens)");
        return Err(Error::shape(OP, "q", inputs.q.shape(), want));
    }
    let sq = rows.checked_div(batch).unwrap_or(0);
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
