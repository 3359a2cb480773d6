//! Products in `f64` and plain loops.

use crate::Activation;

/// A product and, for each output, the sum of its terms' magnitudes, which bounds the error of a sum in `f32`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// `sum_k a[m, k] w[n, k]`, row by row.
    pub values: Vec<f64>,
    /// `sum_k |a[m, k] w[n, k]|`.
    pub magnitudes: Vec<f64>,
}

/// `a w^T` of `a` `[m, k]` and `w` `[n, k]`.
pub fn product(a: &[f64], w: &[f64], k: usize) -> Sums {
    let rows = |v: &[f64]| if k == 0 { 0 } else { v.len() / k };
    let (m, n) = (rows(a), rows(w));
    let mut sums = Sums { values: Vec::with_capacity(m * n), magnitudes: Vec::with_capacity(m * n) };
    for x in a.chunks_exact(k.max(1)) {
        for y in w.chunks_exact(k.max(1)) {
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for (x, y) in x.iter().zip(y) {
                sum += x * y;
                magnitude += (x * y).abs();
            }
            sums.values.push(sum);
            sums.magnitudes.push(magnitude);
        }
    }
    sums
}

/// The function of an activation, or none.
pub fn activate(activation: Option<Activation>, x: f64) -> f64 {
    match activation {
        None => x,
        Some(Activation::Silu) => x / (1.0 + (-x).exp()),
        Some(Activation::Gelu) => x * (1.0 + libm::erf(x / 2f64.sqrt())) / 2.0,
        Some(Activation::GeluTanh) => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            x * (1.0 + u.tanh()) / 2.0
        }
        Some(Activation::Relu) => x.max(0.0),
        Some(Activation::Tanh) => x.tanh(),
    }
}

/// No activation changes faster than this times its argument.
pub const STEEPEST: f64 = 1.13;
