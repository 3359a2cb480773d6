//! References of the operators, in plain loops.
//!
//! Inputs are the values that the kernels read, already rounded to their types. Scales are defined by f32 operations, which
//! these functions repeat: results are exact, except quantized values within a rounding error of a tie.

pub use crate::fused_rmsnorm::reference::{NormedRows, normed_rows};
use crate::{GroupScaleRule, MoeOrder};
use hk_core::quant::{
    BlockRule, BlockScale, QuantFormat, group_scale, linear_scale, shuffled_index, shuffled_len,
};
use hk_core::registry::HostTensorF64;
use hk_core::{E8M0, Fp4, Fp4Rounding};

/// Quantized values, as f64, and scales.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantization {
    /// Quantized values.
    pub q: Vec<f64>,
    /// Scales.
    pub scale: Vec<f64>,
}

/// The largest finite magnitude; 0 if there is none.
pub fn finite_max(x: &[f64]) -> f64 {
    x.iter().filter(|v| v.is_finite()).fold(0.0, |max, v| max.max(v.abs()))
}

/// The quantized value nearest to `x / scale`; infinities saturate, NaN stays. `round` rounds to the quantized type.
pub fn quantize(x: f64, scale: f64, round: fn(f32) -> f64) -> f64 {
    round((x / scale) as f32)
}

/// [`per_token_quant`](crate::per_token_quant) of the rows of `x`.
pub fn per_token_quant(
    x: &[f64],
    cols: usize,
    scale_ub: Option<f32>,
    format: QuantFormat,
    round: fn(f32) -> f64,
) -> Quantization {
    let mut out = Quantization { q: Vec::new(), scale: Vec::new() };
    for row in x.chunks_exact(cols) {
        let mut amax = finite_max(row) as f32;
        if let Some(bound) = scale_ub.filter(|b| *b > 0.0) {
            amax = amax.min(bound);
        }
        let scale = f64::from(linear_scale(amax, format));
        out.q.extend(row.iter().map(|&v| quantize(v, scale, round)));
        out.scale.push(scale);
    }
    out
}

/// [`smoothquant`](crate::smoothquant) of the rows of `x`; the products are rounded to f32.
pub fn smoothquant(x: &[f64], smooth: &[f64], format: QuantFormat, round: fn(f32) -> f64) -> Quantization {
    let z: Vec<f64> =
        x.iter().zip(smooth.iter().cycle()).map(|(x, s)| f64::from(*x as f32 * *s as f32)).collect();
    per_token_quant(&z, smooth.len(), None, format, round)
}

/// [`per_tensor_quant_static`](crate::per_tensor_quant_static) and
/// [`downcast_to_static_fp8`](crate::downcast_to_static_fp8).
pub fn static_quant(x: &[f64], scale: f64, round: fn(f32) -> f64) -> Vec<f64> {
    x.iter().map(|&v| quantize(v, scale, round)).collect()
}

/// [`group_quant`](crate::group_quant) of the rows of `x`.
pub fn group_quant(
    x: &[f64],
    cols: usize,
    group: usize,
    rule: GroupScaleRule,
    format: QuantFormat,
    round: fn(f32) -> f64,
) -> Quantization {
    let pow2 = BlockRule::codes(BlockScale::RoundUp, format, 0);
    let mut out = Quantization { q: Vec::new(), scale: Vec::new() };
    for group in x.chunks_exact(cols).flat_map(|row| row.chunks(group)) {
        let amax = finite_max(group) as f32;
        let scale = match rule {
            GroupScaleRule::Exact => group_scale(amax, format),
            GroupScaleRule::PowerOfTwo => pow2.scale(amax.max(1e-10)).to_f32(),
        };
        let scale = f64::from(scale);
        out.q.extend(group.iter().map(|&v| quantize(v, scale, round)));
        out.scale.push(scale);
    }
    out
}

/// MX blocks of 32 along the rows of `x`.
pub fn mx_quant(x: &[f64], cols: usize, rule: BlockRule, round: impl Fn(f32) -> f64) -> Quantization {
    let mut out = Quantization { q: Vec::new(), scale: Vec::new() };
    for block in x.chunks_exact(cols).flat_map(|row| row.chunks(32)) {
        let bad = block.iter().any(|v| !v.is_finite());
        let scale = if bad { E8M0::NAN } else { rule.scale(finite_max(block) as f32) };
        let value = f64::from(scale.to_f32());
        // The quotient is exact in f32, except far below the smallest element.
        out.q.extend(block.iter().map(|&v| if bad { 0.0 } else { round((v / value) as f32) }));
        out.scale.push(value);
    }
    out
}

/// Rounds a float to fp4.
pub fn fp4(rounding: Fp4Rounding) -> impl Fn(f32) -> f64 {
    move |x| f64::from(Fp4::from_f32(x, rounding).to_f32())
}

/// Scales of `[rows, blocks]` in the shuffled order of gfx950, padded with 1.
pub fn shuffle_scales(plain: &[f64], rows: usize, blocks: usize) -> Vec<f64> {
    let mut shuffled = vec![1.0; shuffled_len(rows, blocks).unwrap_or(0)];
    for (i, &scale) in plain.iter().enumerate() {
        shuffled[shuffled_index(i / blocks, i % blocks, blocks)] = scale;
    }
    shuffled
}

/// The inverse of [`shuffle_scales`].
pub fn unshuffle_scales(shuffled: &[f64], rows: usize, blocks: usize) -> Vec<f64> {
    (0..rows * blocks).map(|i| shuffled[shuffled_index(i / blocks, i % blocks, blocks)]).collect()
}

/// The experts of [`moe_smoothquant`].
#[derive(Debug, Clone, Copy)]
pub struct Experts<'a> {
    /// `[experts, cols]`: the factors.
    pub smooth: &'a [f64],
    /// `[tokens, topk]`.
    pub topk_ids: &'a [i64],
    /// Choices per token.
    pub topk: usize,
    /// Order of the output rows.
    pub order: MoeOrder,
}

/// [`moe_smoothquant`](crate::moe_smoothquant); `x` has a row per token or one per choice. Rows of negative ids are
/// [`HostTensorF64::UNTOUCHED`].
pub fn moe_smoothquant(
    x: &[f64],
    cols: usize,
    experts: Experts,
    format: QuantFormat,
    round: fn(f32) -> f64,
) -> Quantization {
    let Experts { smooth, topk_ids: ids, topk, order } = experts;
    let tokens = ids.len().checked_div(topk).unwrap_or(0);
    let by_choice = x.len() == ids.len() * cols && topk > 1;
    let mut out = Quantization {
        q: vec![HostTensorF64::UNTOUCHED; ids.len() * cols],
        scale: vec![HostTensorF64::UNTOUCHED; ids.len()],
    };
    for (i, &id) in ids.iter().enumerate() {
        let Ok(id) = usize::try_from(id) else { continue };
        let row = match order {
            MoeOrder::TokenMajor => i,
            MoeOrder::ChoiceMajor => i % topk * tokens + i / topk,
        };
        let from = if by_choice { i } else { i / topk } * cols;
        let one = match smooth.chunks_exact(cols).nth(id) {
            Some(factors) => smoothquant(&x[from..from + cols], factors, format, round),
            None => Quantization { q: vec![0.0; cols], scale: vec![f64::NAN] },
        };
        out.q[row * cols..(row + 1) * cols].copy_from_slice(&one.q);
        out.scale[row] = one.scale[0];
    }
    out
}

/// [`fp8_ocp_to_fnuz`](crate::fp8_ocp_to_fnuz) with the factor 0.5, and back with 2: values and scales. `largest` is the largest
/// value of the result's type.
pub fn fp8_convert(q: &[f64], scale: &[f64], factor: f64, largest: f64) -> (Vec<f64>, Vec<f64>) {
    // FNUZ has no negative zero: adding 0 makes it positive. `clamp` keeps NaN.
    let values = q.iter().map(|v| (v * factor + 0.0).clamp(-largest, largest)).collect();
    (values, scale.iter().map(|s| f64::from((s / factor) as f32)).collect())
}

/// `[outer, length, inner]` transposed to `[outer, inner, length]`.
pub fn axis_last(x: &[f64], [outer, length, inner]: [usize; 3]) -> Vec<f64> {
    let place = |i: usize| (i / (length * inner) * length + i % length) * inner + i / length % inner;
    (0..outer * length * inner).map(|i| x[place(i)]).collect()
}

/// [`upcast_from_mxfp`](crate::upcast_from_mxfp) of rows of element values and scales; not rounded.
pub fn upcast_from_mxfp(q: &[f64], scale: &[f64], cols: usize) -> Vec<f64> {
    let blocks = cols.div_ceil(32);
    (0..q.len()).map(|i| q[i] * scale[i / cols * blocks + i % cols / 32]).collect()
}
