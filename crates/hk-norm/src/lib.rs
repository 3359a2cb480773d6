#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod fused_add_rmsnorm;
mod operators;
pub mod reference;
mod rms;
mod rmsnorm;

pub use fused_add_rmsnorm::fused_add_rmsnorm;
pub use operators::OPERATORS;
pub use rms::{RmsNormOptions, RoundMode, Weight, WeightOffset};
pub use rmsnorm::rmsnorm;
