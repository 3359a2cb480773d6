//! Attention over two sets of keys, from the attention over each.

use crate::kernels::attention::HeadRows;
use crate::kernels::merge_states::Params;
use crate::kv_cache::optional;
use crate::prefill::{AttentionElement, AttentionOutput, AttentionOutputs};
use bytemuck::Zeroable;
use hk_core::{DType, Element, Error, GlobalLayout, LaunchConfig, Result, Stream, TensorView, check_aliases};

/// The attention over a set of keys.
#[derive(Debug, Clone, Copy)]
pub struct AttentionState<'a, T: Element> {
    /// `[tokens, heads, columns]`.
    pub out: TensorView<'a, T>,
    /// Log-sum-exp of the scores, `[tokens, heads]`.
    pub lse: TensorView<'a, f32>,
}

/// Merges the attention over two disjoint sets of keys, such as a prefix that sequences share and what each has of its own:
///
/// ```text
/// M = max(lse_a, lse_b);  w_a = exp(lse_a - M);  w_b = exp(lse_b - M)
/// out = (w_a out_a + w_b out_b) / (w_a + w_b);  lse = M + ln(w_a + w_b)
/// ```
///
/// | arg                     | shape                      | dtype                | layout                     |
/// |-------------------------|----------------------------|----------------------|----------------------------|
/// | `out_a`, `out_b`, `out` | `[tokens, heads, columns]` | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `lse_a`, `lse_b`, `lse` | `[tokens, heads]`          | `f32`                | any strides                |
///
/// A set without keys, `lse` of -inf, weighs nothing, and its values are not used; if both are, `out` is 0 and `lse` -inf. A sink belongs to one
/// of the sets. Sums are `f32`, rounded once. The order of more than two sets decides how sums are rounded.
///
/// Returns when the launch is queued, before it has run. Without tokens, nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align), [`Empty`](Error::Empty) if a tensor breaks the table,
/// [`Overlap`](Error::Overlap) of outputs, [`TooLarge`](Error::TooLarge) beyond 2^32 - 1 tokens, [`DeviceMismatch`](Error::DeviceMismatch), and
/// the errors of loading and launching a kernel. Nothing is written then.
///
/// Source: Milakov and Gimelshein 2018, algorithm 3; Juravsky et al. 2024, "Hydragen".
pub fn merge_attn_states<'a, T: AttentionElement + AttentionOutput<T>>(
    stream: &'a Stream,
    a: AttentionState<'a, T>,
    b: AttentionState<'a, T>,
    outputs: AttentionOutputs<'a, T>,
) -> Result<()> {
    const OP: &str = "merge_attn_states";
    let AttentionOutputs { mut out, mut lse } = outputs;
    let shape @ [tokens, heads, columns] = a.out.dims::<3>(OP, "out_a")?;
    if columns == 0 {
        return Err(Error::empty(OP, "out_a", 2, a.out.shape()));
    }
    b.out.expect_shape(OP, "out_b", shape)?;
    out.expect_shape(OP, "out", shape)?;
    a.lse.expect_shape(OP, "lse_a", [tokens, heads])?;
    b.lse.expect_shape(OP, "lse_b", [tokens, heads])?;
    if let Some(lse) = &lse {
        lse.expect_shape(OP, "lse", [tokens, heads])?;
        lse.expect_aligned(OP, "lse", 4)?;
    }
    for (arg, of) in [("out_a", &a.out), ("out_b", &b.out)] {
        of.expect_unit_stride(OP, arg)?;
        of.expect_aligned(OP, arg, size_of::<T>() as u64)?;
    }
    out.expect_unit_stride(OP, "out")?;
    out.expect_aligned(OP, "out", size_of::<T>() as u64)?;
    for (arg, of) in [("lse_a", &a.lse), ("lse_b", &b.lse)] {
        of.expect_aligned(OP, arg, 4)?;
    }
    let inputs = [
        ("out_a", Some(&a.out as _)),
        ("lse_a", Some(&a.lse as _)),
        ("out_b", Some(&b.out as _)),
        ("lse_b", Some(&b.lse as _)),
    ];
    check_aliases(OP, &inputs, &[(("out", Some(&out)), &[][..]), (("lse", optional(&lse)), &[])])?;
    let too_large = |arg, n: usize| Error::too_large(OP, arg, n, u32::MAX.into());
    let [Ok(n), Ok(n_heads), Ok(n_columns)] = shape.map(u32::try_from) else {
        return Err(too_large("out_a", tokens.max(heads).max(columns)));
    };
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    let mut launch = stream.launch(OP);
    let rows = |layout: GlobalLayout, element: i64| {
        let [_, row, head, _] = layout.strides().map(|s| s * element);
        HeadRows { data: layout.data(), batch: 0, row, head }
    };
    let sums = |layout: GlobalLayout| {
        let [.., row, head] = layout.strides().map(|s| 4 * s);
        HeadRows { data: layout.data(), batch: 0, row, head }
    };
    let element = size_of::<T>() as i64;
    let (of_a, of_b) =
        (rows(launch.input("out_a", &a.out)?, element), rows(launch.input("out_b", &b.out)?, element));
    let of_out = rows(launch.output("out", &mut out)?, element);
    let aligned = |of: &HeadRows| [of.data as i64, of.row, of.head].iter().all(|n| n % 16 == 0);
    let vectorized =
        [&of_a, &of_b, &of_out].into_iter().all(aligned) && (columns * size_of::<T>()).is_multiple_of(16);
    let vectors = columns.div_ceil(16 / size_of::<T>());
    let params = Params {
        a: of_a,
        b: of_b,
        out: of_out,
        lse_a: sums(launch.input("lse_a", &a.lse)?),
        lse_b: sums(launch.input("lse_b", &b.lse)?),
        lse: match &mut lse {
            Some(lse) => sums(launch.output("lse", lse)?),
            None => HeadRows::zeroed(),
        },
        tokens: n,
        heads: n_heads,
        columns: n_columns,
        vectors: vectors as u32,
        vectorized: vectorized.into(),
        pad: 0,
    };
    let kernel = stream.kernel(match T::DTYPE {
        DType::F16 => Params::kernel("merge_states_f16"),
        DType::F32 => Params::kernel("merge_states_f32"),
        _ => Params::kernel("merge_states_bf16"),
    })?;
    let blocks = tokens.saturating_mul(heads).saturating_mul(vectors).div_ceil(256);
    // SAFETY: all tensors have the tokens, heads and columns that the kernel is told of.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }
}
