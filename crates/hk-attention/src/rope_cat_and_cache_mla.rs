//! Rotation, concatenation and caching of the parts of queries and keys of multi-head latent attention.

use crate::cache::{Activation, CacheElement, Heads as _};
use crate::mla::{Inputs, MlaOutputs};
use hk_core::rope::{Rope, RopeElement, RopeTables};
use hk_core::{IndexView, Result, Stream, TensorView};

const OP: &str = "rope_cat_and_cache_mla";

/// Rotates the parts of queries and keys that have a position, joins them with the parts that have none, and writes the
/// keys to their slots of a latent cache: `q_out = [q_nope, rope(q_pe)]`, `k_pe_out = rope(k_pe)`,
/// `kv_cache[slot] = cast([k_nope, rope(k_pe)] / k_scale)`.
///
/// | arg                | shape                        | dtype                      | layout                          |
/// |--------------------|------------------------------|----------------------------|---------------------------------|
/// | `q_nope`, `q_pe`   | `[tokens, q_heads, nope]`, `[tokens, q_heads, pe]` | `bf16`, `f16` | unit stride on the columns, all others free |
/// | `k_nope`, `k_pe`   | `[all, kv_heads, nope]`, `[all, kv_heads, pe]` | as `q_nope` | as `q_nope`                |
/// | `tables`           | see [`RopeTables`]; positions `[tokens]` | as `q_nope`, or `f32` | unit stride on the columns |
/// | `slot_mapping`     | `[n]`, `tokens <= n <= all`  | `i32`, `i64`               | any stride                      |
/// | `k_scale`          | `[1]` or `[]`                | `f32`                      | may be left out: 1              |
/// | `q_out`            | `[tokens, q_heads, nope + pe]` | as `q_nope`, fp8 e4m3 of either kind | as `q_nope`         |
/// | `k_pe_out`         | `[all, kv_heads, pe]`        | as `q_nope`                | as `q_nope`; may be exactly `k_pe` |
/// | `kv_cache`         | `[slots, kv_heads, nope + pe]` | as `q_nope`, fp8 e4m3 of either kind | as `q_nope`         |
/// | `q_pe_head`, `nope_zeros` | `[first, q_heads, pe]`, `[first, q_heads, nope]` | as `q_nope` | as `q_nope`; may be left out |
///
/// `q_heads` is a multiple of `kv_heads`. Queries are not scaled. `q_pe_head` is `rope(q_pe)` of the first tokens, and
/// `nope_zeros` is filled with zeros. What is said of [`rope_reshape_and_cache`](crate::rope_reshape_and_cache()) about
/// tokens without a position, slots, positions beyond the tables, rounding and NaN holds here; of a token whose position the
/// tables do not have, all of `q_out` becomes NaN.
///
/// Returns when the launch is queued, before it has run. Nothing to write: nothing is launched.
///
/// # Errors
/// As [`rope_reshape_and_cache`](crate::rope_reshape_and_cache()).
///
/// Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn rope_cat_and_cache_mla<
    'a,
    T: Activation,
    R: RopeElement<T>,
    Q: CacheElement<T>,
    C: CacheElement<T>,
>(
    stream: &Stream,
    q_nope: TensorView<'a, T>,
    q_pe: TensorView<'a, T>,
    k_nope: TensorView<'a, T>,
    k_pe: TensorView<'a, T>,
    tables: RopeTables<'a, R>,
    slot_mapping: impl Into<IndexView<'a>>,
    k_scale: Option<TensorView<'a, f32>>,
    outputs: MlaOutputs<'a, T, Q, C>,
    rope: Rope,
) -> Result<()> {
    let slot_mapping = slot_mapping.into();
    let inputs = Inputs { q_pe, k_nope, k_pe, tables: tables.into(), slot_mapping, k_scale, rope };
    let sizes = inputs.check(OP, &outputs, &[("q_nope", Some(&q_nope))])?;
    let shape = [sizes.tokens, sizes.q_heads, sizes.nope];
    q_nope.check(OP, "q_nope", &shape, "tokens and heads of q_pe, columns of k_nope")?;
    inputs.run(OP, stream, sizes, Some(q_nope), outputs)
}
