#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod operators;
pub mod reference;
mod rope;

pub use operators::OPERATORS;
pub use rope::{rope_cached, rope_freqs, rope_qk};
