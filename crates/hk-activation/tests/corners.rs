//! Every kernel on its corner cases.

hk_testkit::corner_tests!(
    hk_activation::OPERATORS: silu, gelu, gelu_tanh, relu, tanh, silu_and_mul, gelu_and_mul, gelu_tanh_and_mul,
    swiglu_oai_and_mul, fused_mul_add, causal_conv1d_fwd, causal_conv1d_update, rope_cached, rope_freqs, rope_qk,
    fused_qkv_split_qk_rope, softmax, topk
);
