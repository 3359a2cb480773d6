//! The safe function of `hip/rope.hip` that splits a projection.

use crate::rope::{expect_even, launch, rotated_parts};
use hk_core::heads::{Heads, HeadsAction};
use hk_core::rope::{Rope, RopeElement, RopeSource, RopeTables};
use hk_core::{Aliasing, Error, Float, Result, Stream, TensorView, TensorViewMut, check_overlap};

const OP: &str = "fused_qkv_split_qk_rope";

/// Splits the projection of queries, keys and values, and rotates queries and keys as [`rope_cached`](crate::rope_cached)
/// does; values are copied bit by bit.
///
/// A row of `qkv` has the query heads, then the key heads, then the value heads, each `head_dim` columns whatever part of
/// them is rotated: query head `h` begins at column `h * head_dim`, key head `h` at `(q_heads + h) * head_dim`, value head
/// `h` at `(q_heads + kv_heads + h) * head_dim`.
///
/// | arg                    | shape                                          | dtype                | layout                               |
/// |------------------------|------------------------------------------------|----------------------|--------------------------------------|
/// | `qkv`                  | `[tokens, (q_heads + 2 kv_heads) * head_dim]`  | `bf16`, `f16`, `f32` | unit stride on the columns           |
/// | `q`                    | `[tokens, q_heads, head_dim]`                  | as `qkv`             | unit stride on the columns of a head |
/// | `k`, `v`               | `[tokens, kv_heads, head_dim]`                 | as `qkv`             | the same, of their own               |
/// | tables and positions   | as for [`rope_cached`](crate::rope_cached), packed tokens | | |
///
/// `head_dim` is any even number, and `q_heads` a multiple of `kv_heads`. The outputs share no memory with each other or with
/// an input. What is said of access, rounding and bits at [`rope_cached`](crate::rope_cached) holds here; the results are
/// the same bits as splitting first and rotating then. A token whose position is in no table gets queries and keys of NaN;
/// its values are copied.
///
/// Returns when the launch is queued, before it has run. No tokens: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Argument`](hk_core::Error::Argument) for no key heads or an odd [`Rope::rotary`],
/// [`Overlap`](hk_core::Error::Overlap), [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens or columns,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and launching a kernel can answer. Nothing is written
/// then.
///
/// Source: Su et al. 2021, section 3.2.2.
pub fn fused_qkv_split_qk_rope<'a, T: Float, C: RopeElement<T>>(
    stream: &Stream,
    qkv: TensorView<'a, T>,
    tables: RopeTables<'a, C>,
    q: TensorViewMut<'a, T>,
    k: TensorViewMut<'a, T>,
    v: TensorViewMut<'a, T>,
    rope: Rope,
) -> Result<()> {
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
