//! Every kernel on its corner cases.

hk_testkit::corner_tests!(hk_gdr::OPERATORS: fused_recurrent, fused_sigmoid_gating_recurrent, fused_rearrange_sigmoid_gdr,
    fused_gdn_gating_prefill, fused_qkvzba_split, causal_conv1d_update_split_qkv, causal_conv1d_fwd_split_qkv, l2norm, l2norm_bwd, chunk_local_cumsum, chunk_scaled_dot_kkt, fused_cumsum_kkt, solve_tril, recompute_w_u, wy_representation,
    chunk_delta_h, chunk_o, chunk_gated_delta_rule, prepare_lens,
    prepare_cu_seqlens_from_lens, prepare_position_ids, prepare_sequence_ids, prepare_chunk_offsets,
    gpu_prepare_chunk_indices, get_max_num_splits, bf16_to_float, float_to_bf16, abs_diff, squared_diff, sum_reduce, max_reduce);
