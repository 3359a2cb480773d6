//! Rotation, concatenation and caching of queries and keys of multi-head latent attention.

use super::cache::{CacheElement, HeadElement, Heads as _};
use super::mla::{Call, MlaInputs, MlaOutputs};
use hk_core::plan::rope::{Rope, RopeElement};
use hk_core::{Result, Stream};

const OP: &str = "rope_cat_and_cache_mla";

/// Rotates the columns of queries and keys that have a position, joins them with those that have none, and writes the keys to
/// their slots of a latent cache: `q_out = [q_nope, rope(q_pe)]`, `k_pe_out = rope(k_pe)`,
/// `kv_cache[slot] = cast([k_nope, rope(k_pe)] / k_scale)`.
///
/// With the columns `a` and `b` of a pair ([`RopeStyle`](hk_core::plan::rope::RopeStyle)): `rope(x)_a = x_a cos_a - x_b sin_a`,
/// `rope(x)_b = x_b cos_b + x_a sin_b`.
///
/// | arg                    | shape                                       | dtype                                | layout                                           |
/// |------------------------|---------------------------------------------|--------------------------------------|--------------------------------------------------|
/// | `q_nope`               | `[tokens, q_heads, nope]`                   | `bf16`, `f16`                        | unit stride on the last axis, other strides free |
/// | `q_pe`                 | `[tokens, q_heads, pe]`                     | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `k_nope`               | `[all, kv_heads, nope]`                     | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `k_pe`                 | `[all, kv_heads, pe]`                       | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `cos`, `sin`           | `[positions, rotary / 2]` or `[.., rotary]` | as `q_nope`, or `f32`                | unit stride on the columns                       |
/// | `positions`, `offsets` | `[tokens]`; optional                        | `i32`, `i64`                         | any stride                                       |
/// | `slot_mapping`         | `[n]`, `tokens <= n <= all`                 | `i32`, `i64`                         | any stride                                       |
/// | `k_scale`              | `[1]` or `[]`; optional                     | `f32`                                |                                                  |
/// | `q_out`                | `[tokens, q_heads, nope + pe]`              | as `q_nope`, fp8 e4m3 of either kind | unit stride on the last axis, other strides free |
/// | `k_pe_out`             | `[all, kv_heads, pe]`                       | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `kv_cache`             | `[slots, kv_heads, nope + pe]`              | as `q_nope`, fp8 e4m3 of either kind | unit stride on the last axis, other strides free |
/// | `q_pe_head`            | `[head_tokens, q_heads, pe]`; optional      | as `q_nope`                          | unit stride on the last axis, other strides free |
/// | `nope_zeros`           | `[head_tokens, q_heads, nope]`; optional    | as `q_nope`                          | unit stride on the last axis, other strides free |
///
/// `q_heads` is a multiple of `kv_heads`. Queries are not scaled. `q_pe_head` is `rope(q_pe)` of the first tokens, and
/// `nope_zeros` is filled with zeros.
///
/// Tokens from the `tokens`-th to the `n`-th are rotated already: their keys are copied bit by bit to `k_pe_out`, and cached
/// as the others. `k_pe_out` is not written from the `n`-th token on.
///
/// Slots and positions are checked on the device. A slot that is negative or beyond the cache is skipped; `q_out` and
/// `k_pe_out` are written all the same. If two tokens have one slot, each element of it comes from either. A token whose
/// position plus offset is no row of the tables gives NaN in all of `q_out` and `k_pe_out` and is not cached.
///
/// `f32` arithmetic. Rotated keys are not rounded before the cache. A scale enters as its reciprocal, rounded once. Conversion
/// to fp8 saturates, rounds to nearest even and keeps NaN. A signalling NaN that is rotated, scaled, or beside rotated columns
/// of its head becomes quiet. Results are batch-invariant: they depend on their token alone.
///
/// `k_pe_out` may be exactly `k_pe`; otherwise tensors that are written share no memory with another.
///
/// Returns when the launch is queued, before it has run. Without anything to write, nothing is launched.
///
/// # Errors
/// [`Error::Shape`](hk_core::Error::Shape), [`Error::Stride`](hk_core::Error::Stride),
/// [`Error::Align`](hk_core::Error::Align) if an argument breaks the table; [`Error::Empty`](hk_core::Error::Empty) for columns
/// of length zero; [`Error::Argument`](hk_core::Error::Argument) for an odd [`Rope::rotary`];
/// [`Error::Overlap`](hk_core::Error::Overlap) for outputs that share memory otherwise than stated;
/// [`Error::TooLarge`](hk_core::Error::TooLarge) beyond 2^32 slots or 2^31 tokens;
/// [`Error::DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
///
/// Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
pub fn rope_cat_and_cache_mla<
    'a,
    T: HeadElement,
    R: RopeElement<T>,
    Q: CacheElement<T>,
    C: CacheElement<T>,
>(
    stream: &Stream,
    inputs: MlaInputs<'a, T, R>,
    outputs: MlaOutputs<'a, T, Q, C>,
    rope: Rope,
) -> Result<()> {
    let (q_nope, call) = (inputs.q_nope, Call::new(inputs, rope));
    let sizes = call.check(OP, &outputs, &[("q_nope", Some(&q_nope))])?;
    let shape = [sizes.tokens, sizes.q_heads, sizes.nope];
    q_nope.check(OP, "q_nope", &shape, "tokens and heads of q_pe, columns of k_nope")?;
    call.prepare(OP, stream, sizes, Some(q_nope), outputs)?.run()
}
