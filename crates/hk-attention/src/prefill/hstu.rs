//! Attention without softmax, of generative recommenders.

use super::mha::{AttentionOutputs, Qkv, check_packed, problem};
use super::options::{AttentionElement, AttentionOptions, AttentionOutput, UNLIMITED};
use super::problem::Problem;
use crate::kernels::attention::Hstu;
use crate::kv_cache::optional;
use hk_core::{Error, NamedOperand, Result, Stream, TensorView, TensorViewMut};

/// The sequences of [`hstu_attn`].
#[derive(Debug, Clone, Copy)]
pub struct HstuSequences<'a> {
    /// Row of the first token of each sequence, and the number of rows, `[sequences + 1]`.
    pub seq_offsets: TensorView<'a, i32>,
    /// Tokens at the end of each sequence that are targets, `[sequences]`; `None`: none.
    pub num_targets: Option<TensorView<'a, i32>>,
}

/// Options of [`hstu_attn`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HstuOptions {
    /// Factor of the products.
    pub alpha: f32,
    /// Divisor of the activations: the tokens of the longest sequence, which the caller decides.
    pub max_len: usize,
    /// Tokens see those before them only.
    pub causal: bool,
    /// Tokens see others at most this far away; 0: at any distance.
    pub max_attn_len: usize,
    /// Tokens at the start of each sequence that see all tokens but targets.
    pub contextual_len: usize,
}

impl HstuSequences<'_> {
    /// The number of sequences.
    pub(crate) fn check(&self, op: &'static str) -> Result<usize> {
        let [n] = self.seq_offsets.dims(op, "seq_offsets")?;
        let n = n.checked_sub(1).ok_or_else(|| Error::shape(op, "seq_offsets", [n], "[sequences + 1]"))?;
        if let Some(targets) = &self.num_targets {
            targets.expect_shape(op, "num_targets", [n])?;
        }
        Ok(n)
    }
}

impl<'a> Problem<'a> {
    /// Packed sequences, which are queries and keys, and what they see of each other.
    pub(crate) fn hstu_sequences(
        &mut self,
        sequences: &HstuSequences<'a>,
        options: &HstuOptions,
    ) -> Result<()> {
        let HstuOptions { alpha, max_len, causal, max_attn_len, contextual_len } = *options;
        let starts = self.indices("seq_offsets", &sequences.seq_offsets)?;
        let targets = match &sequences.num_targets {
            Some(targets) => self.indices("num_targets", targets)?,
            None => 0,
        };
        let tokens = |n: usize| n.min(UNLIMITED as usize) as u32;
        self.hstu(Hstu {
            targets,
            causal: causal.into(),
            reach: tokens(max_attn_len),
            contextual: tokens(contextual_len),
            inverse_longest: (1.0 / max_len as f64) as f32,
        });
        self.params.scores.scale = alpha;
        (self.params.sequences.q_starts, self.params.sequences.k_starts) = (starts, starts);
        Ok(())
    }
}

impl HstuOptions {
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        if !self.alpha.is_finite() {
            return Err(Error::argument(op, "alpha", self.alpha, "a finite number"));
        }
        if self.max_len == 0 {
            return Err(Error::argument(op, "max_len", self.max_len, "1 or more"));
        }
        Ok(())
    }
}

/// Pointwise attention of packed sequences, `out_i = sum_j silu(alpha q_i . k_j) / max_len v_j` over the tokens `j` that `i` sees.
///
/// | arg           | shape             | dtype                | layout                     |
/// |---------------|-------------------|----------------------|----------------------------|
/// | `q`, `k`      | `[rows, H, Dqk]`  | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `v`           | `[rows, H, Dv]`   | as `q`               | unit stride on the columns |
/// | `seq_offsets` | `[sequences + 1]` | `i32`                | contiguous                 |
/// | `num_targets` | `[sequences]`     | `i32`                | contiguous                 |
/// | `out`         | `[rows, H, Dv]`   | as `q`               | unit stride on the columns |
///
/// `Dqk` and `Dv` are 1 to 256. Which tokens of a sequence of `L` see each other, with `c = contextual_len` and `n` targets:
///
/// ```text
/// limit = L - n, or L - n - c + 1 if c > 0;  id(t) = min(t, limit), or min(max(t - c + 1, 0), limit)
/// d = id(i) - id(j), without causal |d|
/// i sees j if (i = j or d > 0) and (max_attn_len = 0 or d <= max_attn_len), or if c > 0 and id(i) = 0 and id(j) < limit
/// ```
///
/// So targets do not see each other. Activations are rounded to the type of `v` before they are multiplied by it; all sums are `f32`,
/// and the output is rounded once. A NaN or infinite value may reach any token of its sequence.
///
/// Offsets and targets are on the device and are not trusted: if the offsets do not rise from 0 to `rows`, all outputs are NaN; if the
/// targets of a sequence are negative or more than its tokens, its outputs are.
///
/// Returns when the launch is queued, before it has run. Without tokens, nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align), [`Empty`](Error::Empty) if a tensor breaks the
/// table, [`Argument`](Error::Argument) for an `alpha` that is not finite or a `max_len` of 0, [`Overlap`](Error::Overlap) of the
/// output, [`TooLarge`](Error::TooLarge) beyond 2^30 - 1 rows, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading
/// and launching a kernel. Nothing is written then.
///
/// Source: Zhai et al. 2024, "Actions Speak Louder than Words" (HSTU), equation 2.
pub fn hstu_attn<'a, T: AttentionElement + AttentionOutput<T>>(
    stream: &'a Stream,
    inputs: Qkv<'a, T>,
    sequences: HstuSequences<'a>,
    out: TensorViewMut<'a, T>,
    options: HstuOptions,
) -> Result<()> {
    const OP: &str = "hstu_attn";
    let outputs = AttentionOutputs { out, lse: None };
    let [rows, _] = check_packed(OP, &inputs, &outputs)?;
    inputs.k.expect_shape(OP, "k", inputs.q.shape())?;
    let n = sequences.check(OP)?;
    options.check(OP)?;
    let others: [NamedOperand; 2] =
        [("seq_offsets", Some(&sequences.seq_offsets)), ("num_targets", optional(&sequences.num_targets))];
    let scores = AttentionOptions::default();
    let mut problem = problem(OP, stream, inputs, (outputs, None), &scores, [n, rows, rows], &others)?;
    problem.hstu_sequences(&sequences, &options)?;
    problem.params.sequences.total_k = problem.count("k", rows)?;
    problem.run_packed(n, rows)
}
