//! Every kernel on its corner cases.

hk_testkit::corner_tests!(
    hk_sampling::OPERATORS: greedy_sample, random_sample, mixed_sample, top_k_renorm_probs,
    top_p_sampling_from_probs, top_k_sampling_from_probs, min_p_sampling_from_probs,
    top_k_top_p_sampling_from_probs, sample_from_logits
);
