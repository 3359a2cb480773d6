//! How far a result may be from its reference.

use crate::DType;

/// How far a result may be from the f64 reference of the same, already rounded inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Tolerance {
    /// The same bits.
    Exact,
    /// Elementwise arithmetic.
    Elementwise,
    /// A reduction along a row, then elementwise arithmetic.
    Reduction,
    /// The nearest element, or the one next to it: quantized values, where a value may fall to either side of a tie.
    Neighbour,
    /// `|got - want| <= rtol |want| + atol`, whatever the type.
    Within {
        /// Relative to the reference.
        rtol: f64,
        /// Absolute.
        atol: f64,
    },
    /// A sum in `f32`, rounded once: `|got - want| <= rtol |want| + terms magnitude + atol`, where `rtol` and `atol` are the
    /// rounding to the result's type, and the magnitude is the sum of the absolute terms ([`HostTensorF64::magnitudes`](super::HostTensorF64::magnitudes)).
    Sum {
        /// Error of the sum, relative to its magnitude.
        terms: f64,
    },
    /// A sum of values whose weights are rounded to the result's type first: the output of attention,
    /// `|got - want| <= rtol |want| + atol max(magnitude, 1)`, where the magnitude is the sum of the absolute terms
    /// ([`HostTensorF64::magnitudes`](super::HostTensorF64::magnitudes)): above 1 with large values, their factors, or dropout.
    /// Beside the bounds of each element, the error's norm is bounded relative to that of the reference ([`norm`](Tolerance::norm)).
    Attention,
    /// The same with weights in fp8 e4m3.
    AttentionFp8,
    /// Gradients of attention: sums of products of values that are rounded to the result's type. Their norm is bounded, too.
    Gradient,
}

impl Tolerance {
    /// What the 2-norm of the errors may be, relative to that of the reference, over all elements that are finite; `None`: anything. Where all
    /// terms of a result cancel, it is relative to their magnitude.
    pub const fn norm(self, dtype: DType) -> Option<f64> {
        match (self, dtype) {
            (Self::Attention, DType::Bf16) => Some(5e-3),
            (Self::Attention, DType::F16) => Some(1e-3),
            (Self::Attention, DType::F32) => Some(1e-5),
            (Self::Gradient, DType::Bf16) => Some(1e-2),
            (Self::Gradient, DType::F16) => Some(3e-3),
            (Self::Gradient, DType::F32) => Some(1e-4),
            (Self::Attention, DType::Fp8E4M3 | DType::Fp8E4M3Fnuz) | (Self::AttentionFp8, _) => Some(6e-2),
            _ => None,
        }
    }

    /// `(rtol, atol)` for a result of this type: `|got - want| <= rtol |want| + atol`, for [`Tolerance::Sum`] without the error
    /// of the sum, for attention with a magnitude up to 1. Zero for [`Tolerance::Exact`], and for types other than `f32`, `f16` and
    /// `bf16` in the classes of arithmetic.
    pub const fn bounds(self, dtype: DType) -> (f64, f64) {
        match (self, dtype) {
            (Self::Within { rtol, atol }, _) => (rtol, atol),
            // The step from a value to the next, at most, and the step at zero.
            (Self::Neighbour, DType::Fp8E4M3) => (1.0 / 8.0, 1.0 / 512.0),
            (Self::Neighbour, DType::Fp8E4M3Fnuz) => (1.0 / 8.0, 1.0 / 1024.0),
            (Self::Neighbour, DType::Fp8E5M2) => (1.0 / 4.0, 1.0 / 65536.0),
            (Self::Neighbour, DType::Fp8E5M2Fnuz) => (1.0 / 4.0, 1.0 / 131072.0),
            (Self::Neighbour, DType::Fp4x2) => (0.5, 0.5),
            (Self::Neighbour, DType::E8M0) => (1.0, 0.0),
            (Self::Neighbour, DType::Bf16) => (1.0 / 128.0, 0.0),
            (Self::Neighbour, DType::F16) => (1.0 / 1024.0, 0.0),
            (Self::Neighbour, DType::F32) => (f32::EPSILON as f64, 0.0),
            (Self::Neighbour, _) => (0.0, 1.0),
            (Self::Elementwise, DType::Bf16) => (8e-3, 1e-6),
            (Self::Elementwise, DType::F16) => (1e-3, 1e-6),
            (Self::Elementwise, DType::F32) => (4e-6, 1e-6),
            (Self::Reduction, DType::Bf16) => (8e-3, 1e-5),
            (Self::Reduction, DType::F16) => (1e-3, 1e-5),
            (Self::Reduction, DType::F32) => (1e-5, 1e-6),
            (Self::Attention, DType::Bf16) => (1e-2, 1e-2),
            (Self::Attention, DType::F16) => (2e-3, 2e-3),
            (Self::Attention, DType::F32) => (1e-4, 2e-5),
            // That of bf16, and half a step.
            (Self::Attention, DType::Fp8E4M3 | DType::Fp8E4M3Fnuz) => {
                (1.0 / 16.0 + 1e-2, 1e-2 + 1.0 / 1024.0)
            }
            (Self::AttentionFp8, _) => (1.5e-1, 1.5e-1),
            (Self::Gradient, DType::Bf16) => (2.5e-2, 2.5e-2),
            (Self::Gradient, DType::F16) => (5e-3, 5e-3),
            (Self::Gradient, DType::F32) => (1e-3, 1e-4),
            // Half a step; of f32 a few, for the arithmetic after the sum.
            (Self::Sum { .. }, DType::Bf16) => (1.0 / 256.0, f32::MIN_POSITIVE as f64),
            (Self::Sum { .. }, DType::F16) => (1.0 / 2048.0, 1.0 / 33_554_432.0),
            (Self::Sum { .. }, DType::F32) => (2.0 * f32::EPSILON as f64, f32::MIN_POSITIVE as f64),
            _ => (0.0, 0.0),
        }
    }
}
