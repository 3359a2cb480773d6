#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod operators;
pub mod reference;
mod tiles;
mod unary;

pub use operators::OPERATORS;
pub use unary::{ActivationOutput, gelu, gelu_tanh, relu, silu, tanh};
