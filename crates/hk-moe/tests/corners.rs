//! Every kernel on its corner cases.

hk_testkit::corner_tests!(hk_moe::OPERATORS: moe_topk, moe_routing, moe_routing_sigmoid_top1_fused, moe_bitmatrix, moe_expt_data, moe_align_block_size, moe_sum, moe_op, moe_op_gelu, moe_op_silu_fused, moe_op_mxfp4, moe_op_mxfp4_silu_fused,
    moe_op_gemm_a8w8, moe_op_gemm_a8w8_blockscale, moe_op_gemm_a8w4, moe_op_gemm_a4w4, moe_op_e2e, fused_moe);
