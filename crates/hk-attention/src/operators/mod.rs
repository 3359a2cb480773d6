//! The operators as data, for the `hk` program, the demo and the documentation.

mod attention;
mod backward;
mod common;
mod decode;
mod extend;
mod flash;
mod flash_decode;
mod fused_bmm_rope_kv_cache;
mod hstu;
mod latent;
mod lean;
mod lean_paged;
mod logits;
mod merge_states;
mod mha;
mod mla;
mod pa_prefill;
mod paged;
mod pod;
mod prefill_attn;
mod qk_concat;
mod rope_cat_and_cache_mla;
mod rope_reshape_and_cache;
mod sage;
mod unified;

use hk_core::registry::Operator;

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    qk_concat::QK_CAT,
    qk_concat::QK_ROPE_CAT,
    rope_reshape_and_cache::ROPE_RESHAPE_AND_CACHE,
    rope_cat_and_cache_mla::ROPE_CAT_AND_CACHE_MLA,
    fused_bmm_rope_kv_cache::FUSED_BMM_ROPE_KV_CACHE,
    mha::MHA,
    mha::MHA_VARLEN,
    prefill_attn::PREFILL_ATTN,
    flash::FLASH_ATTN_FWD_PREFILL,
    backward::MHA_ONEKERNEL_BWD,
    backward::FLASH_ATTN_BWD,
    backward::MHA_FUSED_BWD,
    flash_decode::FLASH_ATTN_FWD_DECODE,
    hstu::HSTU_ATTN,
    hstu::HSTU_ATTN_BWD,
    lean::LEAN_ATTEN,
    lean_paged::LEAN_ATTEN_PAGED,
    unified::UNIFIED_ATTN,
    decode::PA_DECODE,
    pod::POD_ATTN,
    merge_states::MERGE_ATTN_STATES,
    extend::EXTEND_ATTN,
    pa_prefill::PA_PREFILL,
    pa_prefill::CHUNKED_PA_PREFILL,
    latent::MLA_DECODE_ROPE,
    latent::UNIFIED_ATTN_SPARSE_MLA,
    logits::FP8_MQA_LOGITS,
    logits::PA_MQA_LOGITS,
    sage::SAGE_ATTENTION,
    sage::SAGE_QUANTIZE,
];
