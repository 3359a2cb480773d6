#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod backward;
mod decode;
mod kv_cache;
mod logits;
mod mla;
#[cfg(feature = "registry")]
mod operators;
mod prefill;
#[cfg(feature = "registry")]
pub mod reference;

pub use backward::*;
pub use decode::*;
pub use kv_cache::*;
pub use logits::*;
pub use mla::*;
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use prefill::*;
