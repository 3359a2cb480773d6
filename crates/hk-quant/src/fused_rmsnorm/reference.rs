//! References of this module's operators, in f64 and plain loops.

use hk_core::Float;

/// The norm before the quantizer; only `residual_out` is rounded.
#[derive(Debug, Clone, PartialEq)]
pub struct NormedRows {
    /// `[rows, cols]`
    pub y: Vec<f64>,
    /// `[rows, cols]`, rounded to `T`.
    pub residual_out: Vec<f64>,
}

/// `s = x + residual_in`, `residual_out = round(s)` to `T`, `y = s / sqrt(mean(s^2) + eps) * weight`.
///
/// # Panics
/// If `weight` is empty, `x` is not whole rows of its length, or `residual_in` has another length than `x`.
pub fn normed_rows<T: Float>(x: &[f64], residual_in: Option<&[f64]>, weight: &[f64], eps: f32) -> NormedRows {
    let cols = weight.len();
    assert!(cols > 0 && x.len().is_multiple_of(cols), "x is whole rows of {cols} columns");
    let s: Vec<f64> = match residual_in {
        Some(residual) => {
            assert_eq!(x.len(), residual.len(), "x and residual_in have one shape");
            x.iter().zip(residual).map(|(a, b)| a + b).collect()
        }
        None => x.to_vec(),
    };
    let mut y = Vec::with_capacity(s.len());
    for row in s.chunks_exact(cols) {
        let mean_sq = row.iter().map(|v| v * v).sum::<f64>() / cols as f64;
        let rstd = 1.0 / (mean_sq + f64::from(eps)).sqrt();
        y.extend(row.iter().zip(weight).map(|(v, w)| v * rstd * w));
    }
    NormedRows { y, residual_out: s.iter().map(|&v| T::from_f64(v).to_f64()).collect() }
}
