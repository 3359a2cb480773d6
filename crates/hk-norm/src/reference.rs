//! The operators again, in f64 and plain loops: what the kernels are measured against.
//!
//! Inputs are the values that the kernels read, already rounded to their types; results are not rounded unless the
//! operator says so. Matrices are row-major without gaps.

use crate::{RmsNormOptions, RoundMode};
use hk_core::Float;

/// What [`rmsnorm`] gives.
#[derive(Debug, Clone, PartialEq)]
pub struct RmsNorm {
    /// `[rows, cols]`
    pub y: Vec<f64>,
    /// `[rows]`
    pub rstd: Vec<f64>,
}

/// What [`fused_add_rmsnorm`] gives.
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
