//! Rotary embedding and concatenation of heads, and writes to KV caches: what runs before attention.

mod cache;
mod fused_bmm_rope_kv_cache;
mod mla;
mod qk_concat;
mod rope_cat_and_cache_mla;
mod rope_reshape_and_cache;

pub use cache::{CacheElement, HeadElement, KvLayout};
pub(crate) use cache::{
    CacheSizes, Heads as HeadView, Jobs, PART, Strides, check_scale, check_slots, optional, piece,
};
pub use fused_bmm_rope_kv_cache::{Fp8Weight, MlaWeight, Mxfp4Weight, fused_bmm_rope_kv_cache};
pub use mla::{MlaInputs, MlaOutputs};
pub(crate) use qk_concat::HeadsLaunch;
pub use qk_concat::{QkCatInputs, QkOutputs, QkRopeCatInputs, qk_cat, qk_rope_cat};
pub use rope_cat_and_cache_mla::rope_cat_and_cache_mla;
pub use rope_reshape_and_cache::{CacheScales, RopeCacheInputs, RopeCacheOutputs, rope_reshape_and_cache};
