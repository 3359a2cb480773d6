//! Every kernel on its corner cases.

hk_testkit::corner_tests!(
    hk_norm::OPERATORS: rmsnorm, fused_add_rmsnorm, layernorm, fused_add_layernorm, rmsnorm_pad, fused_add_rmsnorm_pad
);
