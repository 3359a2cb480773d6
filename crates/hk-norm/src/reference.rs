//! f64 references of the operators, in plain loops.
//!
//! Inputs are the values that the kernels read, already rounded to their types; results are not rounded unless the
//! operator says so. Matrices are row-major without gaps.

use crate::{RmsNormOptions, RoundMode};
use hk_core::Float;
use std::iter::repeat_n;

/// Outputs of [`rmsnorm`].
#[derive(Debug, Clone, PartialEq)]
pub struct RmsNorm {
    /// `[rows, cols]`
    pub y: Vec<f64>,
    /// `[rows]`
    pub rstd: Vec<f64>,
}

/// Outputs of [`fused_add_rmsnorm`].
#[derive(Debug, Clone, PartialEq)]
pub struct FusedAddRmsNorm {
    /// `[rows, cols]`
    pub y: Vec<f64>,
    /// `[rows, cols]`, rounded to `T`.
    pub residual_out: Vec<f64>,
    /// `[rows]`
    pub rstd: Vec<f64>,
}

/// `rstd[r] = 1 / sqrt(mean(x[r, :]^2) + eps)`, `y[r, c] = x[r, c] * rstd[r] * (weight[c] + weight_offset)`.
///
/// `T` is the type that the model-sensitive mode rounds `x * rstd` to.
///
/// # Panics
/// If `weight` is empty or `x` is not whole rows of its length.
pub fn rmsnorm<T: Float>(x: &[f64], weight: &[f64], options: RmsNormOptions) -> RmsNorm {
    let cols = weight.len();
    assert!(cols > 0 && x.len().is_multiple_of(cols), "x is whole rows of {cols} columns");
    let offset = f64::from(options.weight_offset.value());
    let mut out = RmsNorm { y: Vec::with_capacity(x.len()), rstd: Vec::with_capacity(x.len() / cols) };
    for row in x.chunks_exact(cols) {
        let mean_sq = row.iter().map(|v| v * v).sum::<f64>() / cols as f64;
        let rstd = 1.0 / (mean_sq + f64::from(options.eps)).sqrt();
        out.rstd.push(rstd);
        for (v, w) in row.iter().zip(weight) {
            let scaled = match options.round_mode {
                RoundMode::F32 => v * rstd,
                RoundMode::ModelSensitive => T::from_f64(v * rstd).to_f64(),
            };
            out.y.push(scaled * (w + offset));
        }
    }
    out
}

/// `residual_out = round(x + residual_in)` to `T`, then [`rmsnorm`] of that.
///
/// # Panics
/// If `residual_in` is not as long as `x`, and as [`rmsnorm`].
pub fn fused_add_rmsnorm<T: Float>(
    x: &[f64],
    residual_in: &[f64],
    weight: &[f64],
    options: RmsNormOptions,
) -> FusedAddRmsNorm {
    assert_eq!(x.len(), residual_in.len(), "x and residual_in have one shape");
    let residual_out: Vec<f64> =
        x.iter().zip(residual_in).map(|(a, b)| T::from_f64(a + b).to_f64()).collect();
    let RmsNorm { y, rstd } = rmsnorm::<T>(&residual_out, weight, options);
    FusedAddRmsNorm { y, residual_out, rstd }
}

/// Outputs of [`layernorm`].
#[derive(Debug, Clone, PartialEq)]
pub struct LayerNorm {
    /// `[rows, cols]`
    pub y: Vec<f64>,
    /// `[rows]`
    pub mean: Vec<f64>,
    /// `[rows]`
    pub rstd: Vec<f64>,
}

/// The weights of [`layernorm`], each `[cols]`, each optional.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerNormWeights<'a> {
    /// Scales the normalized values.
    pub weight: Option<&'a [f64]>,
    /// Added last.
    pub bias: Option<&'a [f64]>,
    /// Added to `x` first.
    pub x_bias: Option<&'a [f64]>,
}

/// `x' = round(x + x_bias)` to `T`, `mean[r] = mean(x'[r, :])`, `rstd[r] = 1 / sqrt(mean((x'[r, :] - mean[r])^2) + eps)`,
/// `y[r, c] = (x'[r, c] - mean[r]) * rstd[r] * weight[c] + bias[c]`.
///
/// # Panics
/// If `x` is not whole rows of `cols`, or a weight is not as long as one.
pub fn layernorm<T: Float>(x: &[f64], cols: usize, weights: LayerNormWeights, eps: f64) -> LayerNorm {
    assert!(cols > 0 && x.len().is_multiple_of(cols), "x is whole rows of {cols} columns");
    let LayerNormWeights { weight, bias, x_bias } = weights;
    let mut out = LayerNorm { y: Vec::with_capacity(x.len()), mean: Vec::new(), rstd: Vec::new() };
    for row in x.chunks_exact(cols) {
        let biased =
            row.iter().enumerate().map(|(c, v)| x_bias.map_or(*v, |b| T::from_f64(v + b[c]).to_f64()));
        let row: Vec<f64> = biased.collect();
        // An infinity has no finite deviations: the mean that they correct is NaN, as the variance is.
        let finite = row.iter().all(|v| v.is_finite());
        let mean = if finite { row.iter().sum::<f64>() / cols as f64 } else { f64::NAN };
        let variance = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / cols as f64;
        let rstd = 1.0 / (variance + eps).sqrt();
        for (c, v) in row.iter().enumerate() {
            out.y.push((v - mean) * rstd * weight.map_or(1.0, |w| w[c]) + bias.map_or(0.0, |b| b[c]));
        }
        out.mean.push(mean);
        out.rstd.push(rstd);
    }
    out
}

/// `residual_out = round(round(x + x_bias) + residual_in)` to `T`, then [`layernorm`] of that without `x_bias`. Returns
/// `residual_out` as well.
///
/// # Panics
/// If `residual_in` is not as long as `x`, and as [`layernorm`].
pub fn fused_add_layernorm<T: Float>(
    x: &[f64],
    residual_in: &[f64],
    cols: usize,
    weights: LayerNormWeights,
    eps: f64,
) -> (LayerNorm, Vec<f64>) {
    assert_eq!(x.len(), residual_in.len(), "x and residual_in have one shape");
    let round = |v: f64| T::from_f64(v).to_f64();
    let biased = |(i, v): (usize, &f64)| weights.x_bias.map_or(*v, |b| round(v + b[i % cols]));
    let sum = x.iter().enumerate().map(biased).zip(residual_in).map(|(x, r)| round(x + r));
    let residual_out: Vec<f64> = sum.collect();
    let norm = layernorm::<T>(&residual_out, cols, LayerNormWeights { x_bias: None, ..weights }, eps);
    (norm, residual_out)
}

/// [`rmsnorm`] of `x` with rows padded by zeros to `padded` columns.
///
/// # Panics
/// If `padded` is less than the length of `weight`, and as [`rmsnorm`].
pub fn rmsnorm_pad(x: &[f64], weight: &[f64], padded: usize, eps: f32) -> Vec<f64> {
    let options = RmsNormOptions { eps, ..Default::default() };
    let y = rmsnorm::<f32>(x, weight, options).y; // nothing is rounded, so the type does not matter
    let pads = padded - weight.len();
    y.chunks_exact(weight.len()).flat_map(|row| row.iter().copied().chain(repeat_n(0.0, pads))).collect()
}

/// [`rmsnorm_pad`] of `x + residual_in`, and that sum rounded to `T`.
///
/// # Panics
/// If `residual_in` is not as long as `x`, and as [`rmsnorm_pad`].
pub fn fused_add_rmsnorm_pad<T: Float>(
    x: &[f64],
    residual_in: &[f64],
    weight: &[f64],
    padded: usize,
    eps: f32,
) -> (Vec<f64>, Vec<f64>) {
    assert_eq!(x.len(), residual_in.len(), "x and residual_in have one shape");
    let sum: Vec<f64> = x.iter().zip(residual_in).map(|(a, b)| a + b).collect();
    let residual_out = sum.iter().map(|&v| T::from_f64(v).to_f64()).collect();
    (rmsnorm_pad(&sum, weight, padded, eps), residual_out)
}
