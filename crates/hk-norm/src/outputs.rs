//! The outputs of the norms.

use hk_core::{Float, TensorViewMut};

/// Outputs of [`rmsnorm`](crate::rmsnorm()). A single `y` converts into them.
#[derive(Debug)]
pub struct RmsNormOutputs<'a, T: Float> {
    /// The normalized rows, `[.., cols]`.
    pub y: TensorViewMut<'a, T>,
    /// `1 / sqrt(mean(x^2) + eps)` of each row, `[rows]`, contiguous. `None`: not written.
    pub rstd: Option<TensorViewMut<'a, f32>>,
}

impl<'a, T: Float> From<TensorViewMut<'a, T>> for RmsNormOutputs<'a, T> {
    fn from(y: TensorViewMut<'a, T>) -> Self {
        Self { y, rstd: None }
    }
}

/// Outputs of [`fused_add_rmsnorm`](crate::fused_add_rmsnorm()).
#[derive(Debug)]
pub struct FusedAddRmsNormOutputs<'a, T: Float> {
    /// The normalized rows, `[.., cols]`.
    pub y: TensorViewMut<'a, T>,
    /// The rounded sum, `[.., cols]`.
    pub residual_out: TensorViewMut<'a, T>,
    /// `1 / sqrt(mean(residual_out^2) + eps)` of each row, `[rows]`, contiguous. `None`: not written.
    pub rstd: Option<TensorViewMut<'a, f32>>,
}

/// Outputs of [`fused_add_rmsnorm_pad`](crate::fused_add_rmsnorm_pad()).
#[derive(Debug)]
pub struct FusedAddRmsNormPadOutputs<'a, T: Float> {
    /// The normalized rows with their padding, `[rows, padded]`.
    pub y: TensorViewMut<'a, T>,
    /// The rounded sum, `[rows, cols]`.
    pub residual_out: TensorViewMut<'a, T>,
}

/// Outputs of [`layernorm`](crate::layernorm()). A single `y` converts into them.
#[derive(Debug)]
pub struct LayerNormOutputs<'a, T: Float> {
    /// The normalized rows, `[.., cols]`.
    pub y: TensorViewMut<'a, T>,
    /// The mean of each row, `[rows]`, contiguous. `None`: not written.
    pub mean: Option<TensorViewMut<'a, f32>>,
    /// `1 / sqrt(var + eps)` of each row, `[rows]`, contiguous. `None`: not written.
    pub rstd: Option<TensorViewMut<'a, f32>>,
}

impl<'a, T: Float> From<TensorViewMut<'a, T>> for LayerNormOutputs<'a, T> {
    fn from(y: TensorViewMut<'a, T>) -> Self {
        Self { y, mean: None, rstd: None }
    }
}

/// Outputs of [`fused_add_layernorm`](crate::fused_add_layernorm()).
#[derive(Debug)]
pub struct FusedAddLayerNormOutputs<'a, T: Float> {
    /// The normalized rows, `[.., cols]`.
    pub y: TensorViewMut<'a, T>,
    /// The rounded sum, `[.., cols]`.
    pub residual_out: TensorViewMut<'a, T>,
    /// The mean of each row of `residual_out`, `[rows]`, contiguous. `None`: not written.
    pub mean: Option<TensorViewMut<'a, f32>>,
    /// `1 / sqrt(var + eps)` of each row of `residual_out`, `[rows]`, contiguous. `None`: not written.
    pub rstd: Option<TensorViewMut<'a, f32>>,
}
