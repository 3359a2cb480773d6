#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod fused_add_rmsnorm;
mod layernorm;
mod operators;
mod problem;
pub mod reference;
mod rms;
mod rmsnorm;
mod rmsnorm_pad;

pub use fused_add_rmsnorm::fused_add_rmsnorm;
pub use layernorm::{LayerNormVectors, fused_add_layernorm, layernorm};
pub use operators::OPERATORS;
pub use problem::Weight;
pub use rms::{RmsNormOptions, RoundMode, WeightOffset};
pub use rmsnorm::rmsnorm;
pub use rmsnorm_pad::{fused_add_rmsnorm_pad, padded_columns, rmsnorm_pad};
