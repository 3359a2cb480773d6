//! Every kernel on its corner cases.

hk_testkit::corner_tests!(
    hk_gemm::OPERATORS: gemm_a16w16, gemm_a16w16_atomic, gemm_a16w16_gated, batched_gemm_bf16, gemm_a8w8,
    gemm_a8w8_per_token_scale, gemm_a8w8_blockscale, batched_gemm_a8w8, gemm_a16w8_blockscale,
    batched_gemm_a8w8_ptgq, gemm_a16wfp4, gemm_a16wfp4_atomic, batched_gemm_a16wfp4, gemm_a8wfp4, gemm_afp4wfp4,
    gemm_afp8wfp8,
    batched_gemm_afp4wfp4, fused_gemm_a16w16_quant_x, fused_gemm_a8w8_blockscale_a16w16, fused_gemm_a8w8_blockscale_mul_add,
    fused_gemm_a8w8_blockscale_split_cat, fused_gemm_afp4wfp4_a16w16, fused_gemm_afp4wfp4_mul_add,
    fused_gemm_afp4wfp4_split_cat, deepgemm_masked, deepgemm_masked_a8w8,
    deepgemm_contiguous, deepgemm_contiguous_a8w8, shuffle_weight, unshuffle_weight, ff_fused_gated,
    ff_fused_ungated, gmm, ptgmm, nptgmm
);
