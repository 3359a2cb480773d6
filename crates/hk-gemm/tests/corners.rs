//! Every kernel on its corner cases.

hk_testkit::corner_tests!(
    hk_gemm::OPERATORS: gemm_a16w16, gemm_a16w16_atomic, gemm_a16w16_gated, batched_gemm_bf16, gemm_a8w8,
    gemm_a8w8_per_token_scale, gemm_a8w8_blockscale, batched_gemm_a8w8, ff_fused_gated, ff_fused_ungated, gmm,
    ptgmm, nptgmm
);
