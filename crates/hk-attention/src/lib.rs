#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod operators;
mod qk_concat;
pub mod reference;

pub use operators::OPERATORS;
pub use qk_concat::{qk_cat, qk_rope_cat};
