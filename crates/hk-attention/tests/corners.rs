//! Every kernel on its corner cases: under all sanitizers, and none left out.

hk_testkit::corner_tests!(
    hk_attention::OPERATORS: rope_reshape_and_cache, rope_cat_and_cache_mla, fused_bmm_rope_kv_cache
);
