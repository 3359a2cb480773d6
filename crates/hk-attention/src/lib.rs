#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod cache;
mod fused_bmm_rope_kv_cache;
mod mla;
mod operators;
mod qk_concat;
pub mod reference;
mod rope_cat_and_cache_mla;
mod rope_reshape_and_cache;

pub use cache::{Activation, CacheElement, KvLayout};
pub use fused_bmm_rope_kv_cache::{Fp8Weight, MlaWeight, Mxfp4Weight, fused_bmm_rope_kv_cache};
pub use mla::MlaOutputs;
pub use operators::OPERATORS;
pub use qk_concat::{qk_cat, qk_rope_cat};
pub use rope_cat_and_cache_mla::rope_cat_and_cache_mla;
pub use rope_reshape_and_cache::{CacheScales, RopeCacheOutputs, rope_reshape_and_cache};
