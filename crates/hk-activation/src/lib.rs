#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod operators;
pub mod reference;
mod topk;

pub use operators::OPERATORS;
pub use topk::{TopkIndex, TopkOptions, topk, topk_workspace};
