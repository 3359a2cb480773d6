//! Every kernel on its corner cases.

hk_testkit::corner_tests!(hk_moe::OPERATORS: moe_topk, moe_align_block_size);
