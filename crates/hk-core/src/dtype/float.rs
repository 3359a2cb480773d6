//! The float types that operators compute with.

use super::{Element, bf16, f16};

/// `f32`, `f16` and `bf16`: the element types with an IEEE-like format.
pub trait Float: Element {
    /// The value, exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest even.
    fn from_f32(x: f32) -> Self;
    /// The value, exactly.
    fn to_f64(self) -> f64;
    /// Rounds once, to nearest even.
    fn from_f64(x: f64) -> Self;
}

impl Float for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn from_f64(x: f64) -> Self {
        x as f32
    }
}

impl Float for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    fn to_f64(self) -> f64 {
        f64::from(f16::to_f32(self))
    }
    fn from_f64(x: f64) -> Self {
        f16::from_f32(round_to_odd(x))
    }
}

impl Float for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    fn to_f64(self) -> f64 {
        f64::from(bf16::to_f32(self))
    }
    fn from_f64(x: f64) -> Self {
        bf16::from_f32(round_to_odd(x))
    }
}

/// `x` in f32, where an inexact result is the neighbour with the odd significand.
///
/// With two spare bits or more, rounding that to nearest gives what rounding `x` once would give: the odd bit
/// keeps an inexact value off every midpoint (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded
/// sums").
fn round_to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if nearest.is_nan() || f64::from(nearest) == x {
        return nearest;
    }
    let bits = nearest.to_bits();
    let towards_zero = if f64::from(nearest).abs() > x.abs() { bits - 1 } else { bits };
    f32::from_bits(towards_zero | 1)
}
