//! Every kernel on its corner cases.

hk_testkit::corner_tests!(hk_moe::OPERATORS: moe_topk, moe_routing, moe_routing_sigmoid_top1_fused, moe_bitmatrix, moe_expt_data, moe_align_block_size, moe_sum);
