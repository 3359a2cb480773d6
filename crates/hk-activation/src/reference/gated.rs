//! Gates: half of a row activated, times the other half.

use super::{gelu, gelu_tanh, silu};

/// `f(a, b)` for the halves of each row of `2 d` columns.
fn gated(x: &[f64], d: usize, f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    assert!(d > 0 && x.len().is_multiple_of(2 * d), "x is whole rows of two halves of {d} columns");
    let rows = x.chunks_exact(2 * d).map(|row| row.split_at(d));
    rows.flat_map(|(a, b)| a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect::<Vec<_>>()).collect()
}

/// `v` between `-limit` and `limit`, NaN of NaN.
fn within(v: f64, limit: f64) -> f64 {
    if v > limit {
        limit
    } else if v < -limit {
        -limit
    } else {
        v
    }
}

/// `silu(a) * b`; with a `limit` above 0, of `min(a, limit)` and `clamp(b, -limit, limit)`.
///
/// # Panics
/// If `d` is 0 or `x` is not whole rows of `2 d`.
pub fn silu_and_mul(x: &[f64], d: usize, limit: f64) -> Vec<f64> {
    let limit = if limit > 0.0 { limit } else { f64::INFINITY };
    gated(x, d, |a, b| silu(if a > limit { limit } else { a }) * within(b, limit))
}

/// `gelu(a) * b`.
///
/// # Panics
/// As [`silu_and_mul`].
pub fn gelu_and_mul(x: &[f64], d: usize) -> Vec<f64> {
    gated(x, d, |a, b| gelu(a) * b)
}

/// `gelu_tanh(a) * b`.
///
/// # Panics
/// As [`silu_and_mul`].
pub fn gelu_tanh_and_mul(x: &[f64], d: usize) -> Vec<f64> {
    gated(x, d, |a, b| gelu_tanh(a) * b)
}

/// `a / (1 + exp(-1.702 a)) * (b + 1)` of `min(a, 7)` and `clamp(b, -7, 7)`.
///
/// # Panics
/// As [`silu_and_mul`].
pub fn swiglu_oai_and_mul(x: &[f64], d: usize) -> Vec<f64> {
    let limit = 7.0;
    gated(x, d, |a, b| {
        let a = if a > limit { limit } else { a };
        a / (1.0 + (-1.702 * a).exp()) * (within(b, limit) + 1.0)
    })
}
