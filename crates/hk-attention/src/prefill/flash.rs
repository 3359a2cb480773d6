//! Attention of prompts behind the interface of FlashAttention 2.

use super::mha::{AttentionOutputs, Qkv, SequenceStarts, check_batched, check_packed, problem};
use super::options::{AttentionElement, AttentionOptions, AttentionOutput, Descales, Dropout, Mask};
use crate::kv_cache::{HeadsLaunch, optional};
use hk_core::plan::heads::{Heads, HeadsAction};
use hk_core::plan::rope::{
    Positions, Rope, RopeDirection, RopeSource, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{
    DType, Error, NamedOperand, Operand, Result, Stream, TensorView, TensorViewMut, check_aliases,
};

const OP: &str = "flash_attn_fwd_prefill";

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

/// Rotation of the first columns of queries and keys by their positions: row `i` of a sequence, of queries as of keys, is at
/// `offset + i`. See [`hk_core::plan::rope`].
#[derive(Debug)]
pub struct FlashRotary<'a, T: AttentionElement> {
    /// Cosines, `[positions, rotary / 2]`, unit stride on the columns.
    pub cos: TensorView<'a, T>,
    /// Sines, as `cos`.
    pub sin: TensorView<'a, T>,
    /// Which columns are a pair.
    pub style: RopeStyle,
    /// Position of the first row of each sequence, `[sequences]`; `None`: 0.
    pub offsets: Option<TensorView<'a, i32>>,
    /// The rotated queries, of the shape of `q`.
    pub q_rotated: TensorViewMut<'a, T>,
    /// The rotated keys, of the shape of `k`.
    pub k_rotated: TensorViewMut<'a, T>,
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
/// | `cos`, `sin`             | `[positions, rotary / 2]`                  | as `q`                                      | unit stride on the columns |
/// | `offsets`                | `[sequences]`                              | `i32`                                       | any stride                 |
/// | `out`                    | `[B, Sq, Hq, Dv]` or `[total_q, Hq, Dv]`   | as `q`; for fp8 `bf16`, `f16` or `f32`      | unit stride on the columns |
/// | `lse`                    | `[B, Hq, Sq]` or `[Hq, total_q]`           | `f32`                                       | any strides                |
/// | `q_rotated`, `k_rotated` | as `q`, as `k`                             | as `q`                                      | unit stride on the columns |
///
/// The function is that of [`mha`](crate::mha) and, with `cu_seqlens`, of [`mha_varlen`](crate::mha_varlen), on the first
/// `seqused_q[n]` queries and `seqused_k[n]` keys of sequence `n`. The other queries and keys are not read, their outputs not written.
/// `lse` of packed sequences has the heads first.
///
/// With `rotary`, queries and keys are rotated first, in two launches, in `f32` with one rounding, and the scores are those of
/// `q_rotated` and `k_rotated`. All rows of a sequence are rotated, used or not. A row whose position is not in the tables becomes NaN,
/// and so do outputs that see it. `fp8` is not rotated.
///
/// Starts and lengths are on the device and are not trusted: with more used queries or keys than a sequence has, or starts of its
/// keys that fall or lie outside the rows, its outputs are NaN; if starts of queries do not rise from 0 to `total_q`, all are.
///
/// # Errors
/// As [`mha`](crate::mha); with `rotary` as [`qk_rope_cat`](crate::qk_rope_cat), and [`DType`](Error::DType) for `fp8`.
///
/// Source: Dao 2023, "FlashAttention-2"; Su et al. 2021, "RoFormer", section 3.2.2.
pub fn flash_attn_fwd_prefill<'a, T: AttentionElement, O: AttentionOutput<T>>(
    stream: &'a Stream,
    inputs: FlashInputs<'a, T>,
    outputs: AttentionOutputs<'a, O>,
    rotary: Option<FlashRotary<'a, T>>,
    options: &FlashOptions<'a>,
) -> Result<()> {
    let FlashInputs { mut qkv, cu_seqlens, seqused_q, seqused_k } = inputs;
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
    let rotation = match rotary {
        None => None,
        Some(rotary) => {
            let (rotated, rotation) = rotary.check(stream, qkv, &outputs, cu_seqlens, sequences)?;
            qkv = rotated;
            Some(rotation)
        }
    };
    let mut problem = problem(OP, stream, qkv, (outputs, None), &options, [sequences, sq, sk], &others)?;
    for (i, (arg, lens)) in used.iter().enumerate() {
        if let Some(lens) = lens {
            let lens = problem.indices(arg, lens)?;
            let s = &mut problem.params().sequences;
            *[&mut s.q_lens, &mut s.k_lens][i] = lens;
        }
    }
    if let Some(starts) = &cu_seqlens {
        problem.starts(starts, sk)?;
    }
    if let Some([q, k]) = rotation {
        q.run()?;
        k.run()?;
    }
    match cu_seqlens {
        None => problem.run_batched(sequences, [sq, sk]),
        Some(_) => problem.run_packed(sequences, sq),
    }
}

impl<'a, T: AttentionElement> FlashRotary<'a, T> {
    /// The queries, keys and values to attend to, and the launches that rotate queries and keys.
    fn check<O: AttentionOutput<T>>(
        self,
        stream: &'a Stream,
        Qkv { q, k, v }: Qkv<'a, T>,
        outputs: &AttentionOutputs<'a, O>,
        cu_seqlens: Option<SequenceStarts<'a>>,
        sequences: usize,
    ) -> Result<(Qkv<'a, T>, [HeadsLaunch<'a>; 2])> {
        let Self { cos, sin, style, offsets, q_rotated, k_rotated } = self;
        if !matches!(T::DTYPE, DType::Bf16 | DType::F16 | DType::F32) {
            return Err(Error::dtype(OP, "q", T::DTYPE, "bf16, f16 or f32 to rotate"));
        }
        q_rotated.expect_shape(OP, "q_rotated", q.shape())?;
        k_rotated.expect_shape(OP, "k_rotated", k.shape())?;
        if let Some(offsets) = &offsets {
            offsets.expect_shape(OP, "offsets", [sequences])?;
        }
        let starts = cu_seqlens.map(|SequenceStarts { q, k }| [q, k]);
        let mut inputs: Vec<NamedOperand> = vec![
            ("q", Some(&q)),
            ("k", Some(&k)),
            ("v", Some(&v)),
            ("cos", Some(&cos)),
            ("sin", Some(&sin)),
            ("offsets", optional(&offsets)),
        ];
        inputs.extend(cu_seqlens.iter().flat_map(SequenceStarts::operands));
        let written: [NamedOperand; 4] = [
            ("out", Some(&outputs.out)),
            ("lse", optional(&outputs.lse)),
            ("q_rotated", Some(&q_rotated)),
            ("k_rotated", Some(&k_rotated)),
        ];
        check_aliases(OP, &inputs, &written.map(|output| (output, &[][..])))?;

        let [_, width] = cos.dims(OP, "cos")?;
        let rope = Rope {
            style,
            table: RopeTableWidth::Half,
            rotary: width.saturating_mul(2),
            span: RopeSpan::First,
            direction: RopeDirection::Forward,
        };
        let rotated = Qkv { q: q_rotated.alias(), k: k_rotated.alias(), v };
        let rotation = |i: usize, names, from: TensorView<'a, T>, to: TensorViewMut<'a, T>| {
            let (positions, offsets) = match (starts, offsets) {
                (None, None) => (Positions::Index, None),
                (None, Some(offsets)) => {
                    let by_token = offsets.split_axis(0, 1)?.broadcast([sequences, from.shape()[1]])?;
                    (Positions::Index, Some(by_token.into()))
                }
                (Some(starts), None) => (Positions::Sequences(starts[i].into()), None),
                (Some(starts), Some(first)) => {
                    let starts = starts[i].into();
                    (Positions::SequencesFrom { starts, first: first.into() }, None)
                }
            };
            let source = RopeSource::from(RopeTables { cos, sin, positions, offsets });
            rotation(stream, names, from, to, &rope, &source)
        };
        let q = rotation(0, ["q", "q_rotated"], q, q_rotated)?;
        let k = rotation(1, ["k", "k_rotated"], k, k_rotated)?;
        Ok((rotated, [q, k]))
    }
}

/// The launch that rotates queries or keys.
fn rotation<'a, T: AttentionElement>(
    stream: &'a Stream,
    [arg, out_arg]: [&'static str; 2],
    from: TensorView<'a, T>,
    to: TensorViewMut<'a, T>,
    rope: &Rope,
    source: &RopeSource<'a, T>,
) -> Result<HeadsLaunch<'a>> {
    let shape = from.shape();
    let (axis, columns) = (shape.len() - 1, shape[shape.len() - 1]);
    rope.check(OP, arg, shape, columns)?;
    source.check(OP, rope, &shape[..axis - 1])?;
    from.expect_unit_stride(OP, arg)?;
    to.expect_unit_stride(OP, out_arg)?;
    from.expect_aligned(OP, arg, size_of::<T>() as u64)?;
    to.expect_aligned(OP, out_arg, size_of::<T>() as u64)?;
    let part = |from, to, action| Heads { arg, from, out_arg, to, action, poisons: true };
    let (first, others) = to.split_at(axis, rope.rotary)?;
    let rotated = part(from.slice(axis, 0..rope.rotary)?, first, HeadsAction::Rotate);
    let copied = part(from.slice(axis, rope.rotary..columns)?, others, HeadsAction::Copy);
    let parts = [Some(rotated), (rope.rotary < columns).then_some(copied), None, None];
    HeadsLaunch::new(stream, OP, parts, rope, source)
}
