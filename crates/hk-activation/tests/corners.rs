//! Every kernel on its corner cases.

hk_testkit::corner_tests!(
    hk_activation::OPERATORS: silu, gelu, gelu_tanh, relu, tanh, rope_cached, rope_freqs, rope_qk, topk
);
