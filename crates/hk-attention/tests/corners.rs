//! Every kernel on its corner cases.

hk_testkit::corner_tests!(
    hk_attention::OPERATORS: qk_cat, qk_rope_cat, rope_reshape_and_cache, rope_cat_and_cache_mla,
    fused_bmm_rope_kv_cache, mha, mha_varlen, prefill_attn, flash_attn_fwd_prefill, flash_attn_fwd_decode,
    mha_onekernel_bwd, flash_attn_bwd, mha_fused_bwd, hstu_attn, hstu_attn_bwd, lean_atten, lean_atten_paged, unified_attn, pa_decode,
    pod_attn, merge_attn_states, extend_attn, pa_prefill, chunked_pa_prefill, mla_decode_rope, unified_attn_sparse_mla,
    fp8_mqa_logits, pa_mqa_logits, sage_attention, sage_quantize
);
