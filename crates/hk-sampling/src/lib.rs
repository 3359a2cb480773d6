#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod operators;
pub mod reference;

pub use operators::OPERATORS;
