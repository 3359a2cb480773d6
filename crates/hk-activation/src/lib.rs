#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod operators;
pub mod reference;
mod rope;
mod tiles;
mod topk;
mod unary;

pub use operators::OPERATORS;
pub use rope::{rope_cached, rope_freqs, rope_qk};
pub use topk::{TopkIndex, TopkOptions, topk, topk_workspace};
pub use unary::{ActivationOutput, gelu, gelu_tanh, relu, silu, tanh};
