#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod operators;
mod qkv;
pub mod reference;
mod rope;

pub use operators::OPERATORS;
pub use qkv::fused_qkv_split_qk_rope;
pub use rope::{rope_cached, rope_freqs, rope_qk};
