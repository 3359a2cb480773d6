//! Every kernel on its corner cases.

hk_testkit::corner_tests!(hk_gdr::OPERATORS: fused_recurrent, fused_sigmoid_gating_recurrent, fused_rearrange_sigmoid_gdr,
    fused_gdn_gating_prefill);
