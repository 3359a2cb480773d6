//! Activation functions of one argument.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// `x / (1 + exp(-x))`.
pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// `x * erfc(-x / sqrt(2)) / 2`.
pub fn gelu(x: f64) -> f64 {
    x * (0.5 * libm::erfc(-x * FRAC_1_SQRT_2))
}

/// `x * (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) * (x + 0.044715 * x^3)`, without its cancellation.
pub fn gelu_tanh(x: f64) -> f64 {
    let u = (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x);
    x / (1.0 + (-2.0 * u).exp())
}

/// `max(x, 0)`, NaN of NaN.
pub fn relu(x: f64) -> f64 {
    if x < 0.0 { 0.0 } else { x }
}

/// `tanh(x)`.
pub fn tanh(x: f64) -> f64 {
    x.tanh()
}
