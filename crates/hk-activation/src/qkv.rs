//! `fused_qkv_split_qk_rope`, a safe function of `hip/rope.hip`.

use crate::rope::{expect_even, launch, rotated_parts};
use hk_core::plan::heads::{Heads, HeadsAction};
use hk_core::plan::rope::{Rope, RopeElement, RopeSource, RopeTables};
use hk_core::{Aliasing, Element, Error, Float, Result, Stream, TensorView, TensorViewMut, check_overlap};

const OP: &str = "fused_qkv_split_qk_rope";

/// The outputs of [`fused_qkv_split_qk_rope`].
#[derive(Debug)]
pub struct QkvOutputs<'a, T: Element> {
    /// `[tokens, q_heads, head_dim]`: the rotated queries.
    pub q: TensorViewMut<'a, T>,
    /// `[tokens, kv_heads, head_dim]`: the rotated keys.
    pub k: TensorViewMut<'a, T>,
    /// `[tokens, kv_heads, head_dim]`: the values.
    pub v: TensorViewMut<'a, T>,
}

/// Splits the projection of queries, keys and values, and rotates queries and keys from tables of cosines and sines.
///
/// A row of `qkv` has the query heads, then the key heads, then the value heads, of `head_dim` columns each: query head `h`
/// begins at column `h * head_dim`, key head `h` at `(q_heads + h) * head_dim`, value head `h` at
/// `(q_heads + kv_heads + h) * head_dim`. With the columns `a` and `b` of a pair of a query or key head
/// ([`RopeStyle`](hk_core::plan::rope::RopeStyle)): `y_a = x_a cos_a - x_b sin_a`, `y_b = x_b cos_b + x_a sin_b`, or the transpose of
/// that ([`Inverse`](hk_core::plan::rope::RopeDirection::Inverse)). Columns that are not rotated, and values, are copied bit by bit.
///
/// | arg                    | shape                                         | dtype                | layout                               |
/// |------------------------|-----------------------------------------------|----------------------|--------------------------------------|
/// | `qkv`                  | `[tokens, (q_heads + 2 kv_heads) * head_dim]` | `bf16`, `f16`, `f32` | unit stride on the columns           |
/// | `cos`, `sin`           | `[positions, rotary / 2]` or `[.., rotary]`   | as `qkv`, or `f32`   | unit stride on the columns           |
/// | `positions`, `offsets` | `[tokens]`; optional                          | `i32`, `i64`         | any stride                           |
/// | sequence starts        | `[sequences + 1]`; optional                   | `i32`, `i64`         | any stride                           |
/// | `q`                    | `[tokens, q_heads, head_dim]`                 | as `qkv`             | unit stride on the columns of a head |
/// | `k`, `v`               | `[tokens, kv_heads, head_dim]`                | as `qkv`             | unit stride on the columns of a head |
///
/// `head_dim` is even, and `q_heads` a multiple of `kv_heads`. The outputs share no memory with each other or an input. The
/// table row of a token is its position plus its offset. A token whose row the tables do not have gets queries and keys of
/// NaN; its values are copied.
///
/// `f32` arithmetic, one rounding, to nearest even. Results are batch-invariant, and bitwise identical to those of a split
/// followed by [`rope_cached`](crate::rope_cached).
///
/// The vectorized path moves 16 bytes at a time. It needs `rotary / 2` columns, heads and the columns that are not rotated to be
/// multiples of 16 bytes, and all of them and the rows of the tables aligned to 16 bytes.
///
/// Returns when the launch is queued, before it has run. Without tokens, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Argument`](hk_core::Error::Argument) for no key heads or an odd [`Rope::rotary`],
/// [`Overlap`](hk_core::Error::Overlap), [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens or columns,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2.2.
pub fn fused_qkv_split_qk_rope<'a, T: Float, C: RopeElement<T>>(
    stream: &Stream,
    qkv: TensorView<'a, T>,
    tables: RopeTables<'a, C>,
    outputs: QkvOutputs<'a, T>,
    rope: Rope,
) -> Result<()> {
    let QkvOutputs { q, k, v } = outputs;
    let source = RopeSource::from(tables);
    let [tokens, width] = qkv.dims(OP, "qkv")?;
    let [_, q_heads, head_dim] = q.dims(OP, "q")?;
    let [_, kv_heads, _] = k.dims(OP, "k")?;
    if kv_heads == 0 {
        return Err(Error::argument(OP, "k", "no heads", "one or more"));
    }
    if !q_heads.is_multiple_of(kv_heads) {
        let want = format!("a multiple of {kv_heads} heads (k)");
        return Err(Error::shape(OP, "q", q.shape(), want));
    }
    rope.check(OP, "q", q.shape(), head_dim)?;
    expect_even(OP, "q", q.shape(), head_dim)?;
    for (arg, out, heads) in [("q", &q, q_heads), ("k", &k, kv_heads), ("v", &v, kv_heads)] {
        out.expect_shape(OP, arg, [tokens, heads, head_dim])?;
        out.expect_unit_stride(OP, arg)?;
        out.expect_aligned(OP, arg, size_of::<T>() as u64)?;
        check_overlap(OP, ("qkv", &qkv), (arg, out), Aliasing::Disjoint)?;
        source.check_disjoint(OP, arg, out)?;
    }
    // Cannot overflow: the outputs are in memory.
    let [q_end, k_end, v_end] = [q_heads, q_heads + kv_heads, q_heads + 2 * kv_heads].map(|h| h * head_dim);
    if width != v_end {
        let want = format!("[{tokens}, {v_end}] ((heads of q, k and v) * {head_dim})");
        return Err(Error::shape(OP, "qkv", qkv.shape(), want));
    }
    qkv.expect_unit_stride(OP, "qkv")?;
    qkv.expect_aligned(OP, "qkv", size_of::<T>() as u64)?;
    check_overlap(OP, ("q", &q), ("k", &k), Aliasing::Disjoint)?;
    check_overlap(OP, ("q", &q), ("v", &v), Aliasing::Disjoint)?;
    check_overlap(OP, ("k", &k), ("v", &v), Aliasing::Disjoint)?;
    source.check(OP, &rope, &[tokens])?;

    let heads = |columns| qkv.slice(1, columns)?.split_axis(1, head_dim);
    let [q_span, q_rest] = rotated_parts(["qkv", "q"], heads(0..q_end)?, q, head_dim, &rope, false)?;
    let [k_span, k_rest] = rotated_parts(["qkv", "k"], heads(q_end..k_end)?, k, head_dim, &rope, false)?;
    let (from, action) = (heads(k_end..v_end)?, HeadsAction::Copy);
    let v = Heads { arg: "qkv", from, out_arg: "v", to: v, action, poisons: false };
    launch(OP, stream, source, &rope, [q_span, q_rest, k_span, k_rest, Some(v)], false)
}
