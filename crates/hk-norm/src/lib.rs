#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod fused_add_rmsnorm;
mod layernorm;
#[cfg(feature = "registry")]
mod operators;
mod outputs;
mod problem;
#[cfg(feature = "registry")]
pub mod reference;
mod rms;
mod rmsnorm;
mod rmsnorm_pad;

pub use fused_add_rmsnorm::fused_add_rmsnorm;
pub use layernorm::{LayerNormOptions, LayerNormWeights, fused_add_layernorm, layernorm};
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use outputs::{
    FusedAddLayerNormOutputs, FusedAddRmsNormOutputs, FusedAddRmsNormPadOutputs, LayerNormOutputs,
    RmsNormOutputs,
};
pub use problem::Weight;
pub use rms::{RmsNormOptions, RoundMode, WeightOffset};
pub use rmsnorm::rmsnorm;
pub use rmsnorm_pad::{RmsNormPadOptions, fused_add_rmsnorm_pad, padded_columns, rmsnorm_pad};
