//! The tests of the operators, on the emulated GPUs and on real ones where there are some.

mod backward;
mod common;
mod corners;
mod flash_attn_fwd_decode;
mod flash_attn_fwd_prefill;
mod fused_bmm_rope_kv_cache;
mod hstu_attn;
mod lean_atten;
mod lean_atten_paged;
mod logits;
mod merge_attn_states;
mod mha;
mod mla_decode;
mod pa_decode;
mod paged;
mod pod_attn;
mod prefill_attn;
mod qk_concat;
mod registry;
mod rope_cat_and_cache_mla;
mod rope_reshape_and_cache;
mod sage_attention;
