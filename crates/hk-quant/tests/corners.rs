//! Every kernel on its corner cases.

hk_testkit::corner_tests!(
    hk_quant::OPERATORS: per_token_quant, smoothquant, moe_smoothquant, per_tensor_quant_static,
    per_tensor_quant_dynamic, downcast_to_static_fp8, group_quant, dynamic_mxfp4_quant, downcast_to_mxfp,
    upcast_from_mxfp, shuffle_scales, unshuffle_scales, fp8_ocp_to_fnuz, fp8_fnuz_to_ocp,
    fused_rmsnorm_fp8_quant, fused_rmsnorm_mxfp4_quant
);
