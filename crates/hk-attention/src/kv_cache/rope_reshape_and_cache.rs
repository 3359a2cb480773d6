//! Rotation of queries and keys, and writing keys and values to a paged cache.

use super::cache::{
    CacheElement, HeadElement, Heads as _, Jobs, KvLayout, PART, Tokens, check_scale, optional, piece,
};
use crate::kernels::cache::Target;
use hk_core::plan::rope::{Rope, RopeElement, RopeSource, RopeTables};
use hk_core::{
    Element, Error, IndexView, NamedOperand, Result, Stream, TensorView, TensorViewMut, check_aliases,
};

const OP: &str = "rope_reshape_and_cache";

/// The inputs of [`rope_reshape_and_cache`].
#[derive(Debug, Clone, Copy)]
pub struct RopeCacheInputs<'a, T: Element, R: Element> {
    /// `[tokens, q_heads, dim]`: the queries.
    pub q: TensorView<'a, T>,
    /// `[all, kv_heads, dim]`: the keys.
    pub k: TensorView<'a, T>,
    /// Shape of `k`: the values.
    pub v: TensorView<'a, T>,
    /// Cosines, sines and positions `[tokens]`.
    pub tables: RopeTables<'a, R>,
    /// `[n]`, `tokens <= n <= all`: the slot of each token.
    pub slot_mapping: IndexView<'a>,
    /// Scales of the caches.
    pub scales: CacheScales<'a>,
}

/// The outputs of [`rope_reshape_and_cache`].
#[derive(Debug)]
pub struct RopeCacheOutputs<'a, T: Element, C: Element> {
    /// `[tokens, q_heads, dim]`: the rotated queries. May be exactly `q`.
    pub q_out: TensorViewMut<'a, T>,
    /// Shape of `k`: the rotated keys of the tokens that have a slot; rows of other tokens are not written. May be exactly
    /// `k`.
    pub k_out: TensorViewMut<'a, T>,
    /// `[tokens, q_heads, dim]`, filled with zeros: where attention accumulates its output.
    pub zeros_out: Option<TensorViewMut<'a, T>>,
    /// The cache of keys, of the shape that the layout says.
    pub key_cache: TensorViewMut<'a, C>,
    /// The cache of values, of the shape that the layout says.
    pub value_cache: TensorViewMut<'a, C>,
}

/// Scales that keys and values are divided by before they are cached: one `f32` each on the device; 1 if left out.
#[derive(Debug, Clone, Copy, Default)]
pub struct CacheScales<'a> {
    /// Scale of the keys, `k_scale`.
    pub k: Option<TensorView<'a, f32>>,
    /// Scale of the values, `v_scale`.
    pub v: Option<TensorView<'a, f32>>,
}

/// Rotates queries and keys, and writes the rotated keys and the values to their slots of a paged KV cache:
/// `q_out = rope(q)`, `k_out = rope(k)`, `key_cache[slot] = cast(rope(k) / k_scale)`,
/// `value_cache[slot] = cast(v / v_scale)`.
///
/// With the columns `a` and `b` of a pair ([`RopeStyle`](hk_core::plan::rope::RopeStyle)): `rope(x)_a = x_a cos_a - x_b sin_a`,
/// `rope(x)_b = x_b cos_b + x_a sin_b`.
///
/// | arg                       | shape                                       | dtype                           | layout                                          |
/// |---------------------------|---------------------------------------------|---------------------------------|-------------------------------------------------|
/// | `q`, `q_out`, `zeros_out` | `[tokens, q_heads, dim]`                    | `bf16`, `f16`                   | unit stride on `dim`, other strides free        |
/// | `k`, `v`, `k_out`         | `[all, kv_heads, dim]`                      | as `q`                          | unit stride on `dim`, other strides free        |
/// | `cos`, `sin`              | `[positions, rotary / 2]` or `[.., rotary]` | as `q`, or `f32`                | unit stride on the columns                      |
/// | `positions`, `offsets`    | `[tokens]`; optional                        | `i32`, `i64`                    | any stride                                      |
/// | `slot_mapping`            | `[n]`, `tokens <= n <= all`                 | `i32`, `i64`                    | any stride                                      |
/// | `k_scale`, `v_scale`      | `[1]` or `[]`; optional                     | `f32`                           |                                                 |
/// | `key_cache`, `value_cache`| by [`KvLayout`]                             | as `q`, fp8 e4m3 of either kind | unit stride on the last axis, other strides free |
///
/// `q_heads` is a multiple of `kv_heads`. `dim` and the block length are free in [`KvLayout::Nhd`] and [`KvLayout::Hnd`]; in
/// the paged layouts `dim`, and in the shuffled one the block length, is a multiple of 16 bytes of the cache's elements.
///
/// Tokens from the `tokens`-th to the `n`-th are rotated already: their keys are copied bit by bit to `k_out`, and cached as
/// the others. `k_out` is not written from the `n`-th token on.
///
/// Slots and positions are checked on the device. A slot that is negative or beyond the cache is skipped; `q_out` and `k_out`
/// are written all the same. If two tokens have one slot, each element of it comes from either. A token whose position plus
/// offset is no row of the tables gives NaN in `q_out` and `k_out` and is not cached.
///
/// `f32` arithmetic. Rotated keys are not rounded before the cache: a cache of the type of `k` without a scale holds the bits of
/// `k_out`, and of `v`. A scale enters as its reciprocal, rounded once. Conversion to fp8 saturates, rounds to nearest even and
/// keeps NaN. A signalling NaN that is rotated, scaled, or beside rotated columns of its head becomes quiet. Results are
/// batch-invariant: they depend on their token alone.
///
/// `q_out` may be exactly `q`, and `k_out` exactly `k`; otherwise tensors that are written share no memory with another.
///
/// Returns when the launch is queued, before it has run. Without anything to write, nothing is launched.
///
/// # Errors
/// [`Error::Shape`], [`Error::Stride`], [`Error::Align`] if an argument breaks the table; [`Error::Empty`] for a `dim` or a
/// block of length zero; [`Error::Argument`] for an odd [`Rope::rotary`]; [`Error::Overlap`] for outputs that share memory
/// otherwise than stated; [`Error::TooLarge`] beyond 2^32 slots or 2^31 tokens; [`Error::DeviceMismatch`], and the errors of
/// loading and launching a kernel. Nothing is written then.
///
/// Sources: Su et al. 2021, "RoFormer", section 3.2.2; Kwon et al. 2023, "Efficient Memory Management for Large Language Model
/// Serving with PagedAttention" (paged caches).
pub fn rope_reshape_and_cache<'a, T: HeadElement, R: RopeElement<T>, C: CacheElement<T>>(
    stream: &Stream,
    inputs: RopeCacheInputs<'a, T, R>,
    outputs: RopeCacheOutputs<'a, T, C>,
    layout: KvLayout,
    rope: Rope,
) -> Result<()> {
    let RopeCacheInputs { q, k, v, tables, slot_mapping, scales } = inputs;
    let RopeCacheOutputs { mut q_out, k_out, mut zeros_out, mut key_cache, mut value_cache } = outputs;
    let [tokens, q_heads, dim] = q.dims(OP, "q")?;
    let [all, kv_heads, _] = k.dims(OP, "k")?;
    if dim == 0 {
        return Err(Error::empty(OP, "q", 2, q.shape()));
    }
    if kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
        let want = format!("a number of heads that is a multiple of those of k ({kv_heads})");
        return Err(Error::shape(OP, "q", q.shape(), want));
    }
    q.check(OP, "q", &[tokens, q_heads, dim], "itself")?;
    k.check(OP, "k", &[all, kv_heads, dim], "dim of q")?;
    v.check(OP, "v", &[all, kv_heads, dim], "shape of k")?;
    rope.check(OP, "q", q.shape(), dim)?;
    let tables = RopeSource::from(tables);
    tables.check(OP, &rope, &[tokens])?;
    check_scale(OP, "k_scale", scales.k.as_ref())?;
    check_scale(OP, "v_scale", scales.v.as_ref())?;
    q_out.check(OP, "q_out", q.shape(), "shape of q")?;
    k_out.check(OP, "k_out", k.shape(), "shape of k")?;
    if let Some(zeros_out) = &zeros_out {
        zeros_out.check(OP, "zeros_out", q.shape(), "shape of q")?;
    }
    layout.check_rank(OP, "key_cache", key_cache.shape())?;
    let [blocks, block] = [key_cache.shape()[0], key_cache.shape()[layout.block_axis()]];
    layout.check_pieces(OP, C::DTYPE, [block, dim])?;
    let shape = [blocks, block, kv_heads, dim];
    key_cache.check(OP, "key_cache", &layout.key_shape::<C>(shape), "the layout, kv_heads and dim")?;
    value_cache.check(OP, "value_cache", &layout.value_shape::<C>(shape), "the layout and key_cache")?;
    if block == 0 {
        return Err(Error::empty(OP, "key_cache", layout.block_axis(), key_cache.shape()));
    }
    let cached = slot_mapping.shape().first().copied().unwrap_or(0);
    let places = Tokens { rotated: tokens, cached, blocks, block };
    places.check(OP, &slot_mapping, all)?;

    let mut inputs: Vec<NamedOperand> = vec![
        ("q", Some(&q)),
        ("k", Some(&k)),
        ("v", Some(&v)),
        ("slot_mapping", Some(&slot_mapping)),
        ("k_scale", optional(&scales.k)),
        ("v_scale", optional(&scales.v)),
    ];
    inputs.extend(tables.operands());
    let outputs: [(NamedOperand, &[&str]); 5] = [
        (("q_out", Some(&q_out)), &["q"]),
        (("k_out", Some(&k_out)), &["k"]),
        (("key_cache", Some(&key_cache)), &[]),
        (("value_cache", Some(&value_cache)), &[]),
        (("zeros_out", optional(&zeros_out)), &[]),
    ];
    check_aliases(OP, &inputs, &outputs)?;

    let key_strides = layout.strides(key_cache.layout(), false, piece::<C>());
    let value_strides = layout.strides(value_cache.layout(), true, piece::<C>());
    let vectors = dim.is_multiple_of(PART)
        && tables.can_vectorize(&rope, PART)
        && [&q, &k, &v].iter().all(|t| t.can_vectorize())
        && [&q_out, &k_out].iter().all(|t| t.can_vectorize())
        && zeros_out.as_ref().is_none_or(|t| t.can_vectorize())
        && key_strides.parts_aligned(&key_cache)
        && value_strides.parts_aligned(&value_cache);
    let mut jobs = Jobs::new(OP, stream, vectors);
    let kernel = jobs.kernel::<T>(stream)?;
    let mut launch = stream.launch(OP);

    let q_target = Target::output::<T>(&launch.output("q_out", &mut q_out)?);
    let q = launch.input("q", &q)?;
    match &mut zeros_out {
        Some(zeros_out) => {
            let zeros = Target::zeros(&launch.output("zeros_out", zeros_out)?);
            jobs.rotate(q, &rope, &[q_target, zeros], false);
        }
        None => jobs.rotate(q, &rope, &[q_target], false),
    }

    let mut k_out = k_out.slice(0, 0..cached)?;
    let k_target = Target::output::<T>(&launch.output("k_out", &mut k_out)?);
    let scale = launch.optional_input("k_scale", scales.k.as_ref())?;
    let keys = launch.output_address("key_cache", &mut key_cache)?;
    let keys = Target::cache::<C>(keys, key_strides, &scale);
    let k = launch.input("k", &k.slice(0, 0..cached)?)?;
    jobs.rotate(k, &rope, &[k_target, keys], matches!(layout, KvLayout::Paged | KvLayout::PagedShuffled));

    let scale = launch.optional_input("v_scale", scales.v.as_ref())?;
    let values = launch.output_address("value_cache", &mut value_cache)?;
    let values = Target::cache::<C>(values, value_strides, &scale);
    let v = launch.input("v", &v.slice(0, 0..cached)?)?;
    if value_strides.is_row_major() {
        jobs.copy(v, &[values]);
    } else {
        jobs.columns::<C>(v, values);
    }
    let common = places.common(&mut launch, &rope, &tables, &slot_mapping)?;
    // SAFETY: the checks above make every tensor of heads as long as the jobs' tokens, heads and columns say, the caches
    // as long as the blocks, heads and columns; the kernel checks positions and slots.
    unsafe { jobs.run(launch, &kernel, common) }
}
