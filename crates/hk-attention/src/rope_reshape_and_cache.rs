//! Rotation of queries and keys, and writing keys and values to a paged cache.

use crate::cache::{
    Activation, CacheElement, Heads as _, Jobs, KvLayout, PART, Target, Tokens, check_scale, optional, piece,
};
use hk_core::rope::{Rope, RopeElement, RopeSource, RopeTables};
use hk_core::{
    Element, Error, IndexView, NamedOperand, Result, Stream, TensorView, TensorViewMut, check_aliases,
};

const OP: &str = "rope_reshape_and_cache";

/// The outputs of [`rope_reshape_and_cache`].
#[derive(Debug)]
pub struct RopeCacheOutputs<'a, T: Element, C: Element> {
    /// `[tokens, q_heads, dim]`: the rotated queries. May be exactly `q`.
    pub q_out: TensorViewMut<'a, T>,
    /// Shape of `k`: the rotated keys of the tokens that have a slot; rows of other tokens are left alone. May be exactly
    /// `k`.
    pub k_out: TensorViewMut<'a, T>,
    /// `[tokens, q_heads, dim]`, filled with zeros: where attention accumulates its output.
    pub zeros_out: Option<TensorViewMut<'a, T>>,
    /// The cache of keys, of the shape that the layout says.
    pub key_cache: TensorViewMut<'a, C>,
    /// The cache of values, of the shape that the layout says.
    pub value_cache: TensorViewMut<'a, C>,
}

/// What values in a cache are divided by: one `f32` each on the device, 1 if left out.
#[derive(Debug, Clone, Copy, Default)]
pub struct CacheScales<'a> {
    /// Of keys.
    pub k: Option<TensorView<'a, f32>>,
    /// Of values.
    pub v: Option<TensorView<'a, f32>>,
}

/// Rotates queries and keys, and writes the rotated keys and the values to their slots of a paged cache:
/// `q_out = rope(q)`, `k_out = rope(k)`, `key_cache[slot] = cast(rope(k) / k_scale)`,
/// `value_cache[slot] = cast(v / v_scale)`.
///
/// | arg                | shape                        | dtype                      | layout                          |
/// |--------------------|------------------------------|----------------------------|---------------------------------|
/// | `q`, `q_out`, `zeros_out` | `[tokens, q_heads, dim]` | `bf16`, `f16`            | unit stride on `dim`, all others free |
/// | `k`, `v`, `k_out`  | `[all, kv_heads, dim]`       | as `q`                     | as `q`                          |
/// | `tables`           | see [`RopeTables`]; positions `[tokens]` | as `q`, or `f32` | unit stride on the columns      |
/// | `slot_mapping`     | `[n]`, `tokens <= n <= all`  | `i32`, `i64`               | any stride                      |
/// | scales             | `[1]` or `[]`                | `f32`                      |                                 |
/// | caches             | see [`KvLayout`]             | as `q`, fp8 e4m3 of either kind | unit stride on the last axis, all others free |
///
/// `q_heads` is a multiple of `kv_heads`. Any number of tokens and heads, any `dim`, blocks of any length; in the paged
/// layouts `dim`, and in the shuffled one the length of a block, is a multiple of 16 bytes of the cache's elements.
///
/// Tokens from the `tokens`-th to the `n`-th are rotated already: their keys are copied to `k_out` bit by bit, and written
/// to the cache as the others. `k_out` from the `n`-th token on is left alone.
///
/// A slot that is negative, or beyond the cache, is skipped; `q_out` and `k_out` are written all the same. Of two tokens with
/// one slot either may win, each element for itself. A token whose position the tables do not have gives rows of NaN in
/// `q_out` and `k_out` and is not written to the cache.
///
/// Arithmetic is `f32`. Rotated keys are not rounded before the cache: a cache of the type of `k` without a scale holds the
/// bits of `k_out`, and the bits of `v`. A scale enters as its reciprocal, rounded once. Conversion to fp8 saturates,
/// rounds to nearest even and keeps NaN. A signalling NaN that is rotated, scaled, or beside rotated columns of its head
/// becomes quiet.
///
/// Returns when the launch is queued, before it has run. Nothing to write: nothing is launched.
///
/// # Errors
/// [`Error::Shape`], [`Error::Stride`], [`Error::Align`] if an argument breaks the table; [`Error::Empty`] for a `dim` or a
/// block of length zero; [`Error::Argument`] for a rotation that is none; [`Error::Overlap`] for outputs that share memory
/// with anything else than stated; [`Error::TooLarge`] beyond 2^32 slots or 2^31 tokens.
///
/// Sources: Su et al. 2021 (the rotation); Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving
/// with PagedAttention" (paged caches).
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn rope_reshape_and_cache<'a, T: Activation, R: RopeElement<T>, C: CacheElement<T>>(
    stream: &Stream,
    q: TensorView<'a, T>,
    k: TensorView<'a, T>,
    v: TensorView<'a, T>,
    tables: RopeTables<'a, R>,
    slot_mapping: impl Into<IndexView<'a>>,
    scales: CacheScales<'a>,
    outputs: RopeCacheOutputs<'a, T, C>,
    layout: KvLayout,
    rope: Rope,
) -> Result<()> {
    let RopeCacheOutputs { mut q_out, k_out, mut zeros_out, mut key_cache, mut value_cache } = outputs;
    let slot_mapping = slot_mapping.into();
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
    let [blocks, block] = cache_blocks(&key_cache, layout)?;
    check_pieces::<C>(layout, block, dim)?;
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
        && tables.by_vectors(&rope, PART)
        && [&q, &k, &v].iter().all(|t| t.by_vectors())
        && [&q_out, &k_out].iter().all(|t| t.by_vectors())
        && zeros_out.as_ref().is_none_or(|t| t.by_vectors())
        && key_strides.parts_aligned(&key_cache)
        && value_strides.parts_aligned(&value_cache);
    let mut jobs = Jobs::new(OP, stream, vectors);
    let kernel = jobs.kernel::<T>(stream)?;
    let mut launch = stream.launch(OP, &kernel);

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
    if value_strides.by_rows() {
        jobs.copy(v, &[values]);
    } else {
        jobs.columns::<C>(v, values);
    }
    let common = places.common(&mut launch, &rope, &tables, &slot_mapping)?;
    // SAFETY: the checks above make every tensor of heads as long as the jobs' tokens, heads and columns say, the caches
    // as long as the blocks, heads and columns; the kernel checks positions and slots, and the loader its parameters.
    unsafe { jobs.run(launch, common) }
}

/// Blocks of a cache of keys, and tokens of one.
fn cache_blocks<C: Element>(keys: &TensorViewMut<C>, layout: KvLayout) -> Result<[usize; 2]> {
    let rank = match layout {
        KvLayout::Nhd | KvLayout::Hnd => 4,
        KvLayout::Paged | KvLayout::PagedShuffled => 5,
    };
    if keys.shape().len() != rank {
        return Err(Error::shape(OP, "key_cache", keys.shape(), format!("{rank} axes, for {layout:?}")));
    }
    Ok([keys.shape()[0], keys.shape()[layout.block_axis()]])
}

/// Checks that heads, and in the shuffled layout blocks, are whole pieces of 16 bytes.
fn check_pieces<C: Element>(layout: KvLayout, block: usize, dim: usize) -> Result<()> {
    let piece = piece::<C>();
    if matches!(layout, KvLayout::Paged | KvLayout::PagedShuffled) && !dim.is_multiple_of(piece) {
        let want = format!("a dim that is a multiple of {piece} ({layout:?} of {})", C::DTYPE);
        return Err(Error::shape(OP, "k", [dim], want));
    }
    if layout == KvLayout::PagedShuffled && !block.is_multiple_of(piece) {
        let want = format!("blocks of a multiple of {piece} tokens ({layout:?} of {})", C::DTYPE);
        return Err(Error::shape(OP, "key_cache", [block], want));
    }
    Ok(())
}
