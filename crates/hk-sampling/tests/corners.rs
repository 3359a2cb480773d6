//! Every kernel on its corner cases: under all sanitizers, and none left out.

use hk_sampling::OPERATORS;
use hk_testkit as kit;

#[test]
fn every_kernel_runs() {
    kit::assert_every_kernel_runs(OPERATORS);
}

#[track_caller]
fn check(name: &str) {
    kit::check_corners(OPERATORS.iter().find(|op| op.name == name).expect("an operator of this crate"));
}

#[test]
fn greedy_sample_has_no_finding() {
    check("greedy_sample");
}

#[test]
fn random_sample_has_no_finding() {
    check("random_sample");
}

#[test]
fn mixed_sample_has_no_finding() {
    check("mixed_sample");
}

#[test]
fn top_k_renorm_probs_has_no_finding() {
    check("top_k_renorm_probs");
}

#[test]
fn top_p_sampling_from_probs_has_no_finding() {
    check("top_p_sampling_from_probs");
}

#[test]
fn top_k_sampling_from_probs_has_no_finding() {
    check("top_k_sampling_from_probs");
}

#[test]
fn min_p_sampling_from_probs_has_no_finding() {
    check("min_p_sampling_from_probs");
}

#[test]
fn top_k_top_p_sampling_from_probs_has_no_finding() {
    check("top_k_top_p_sampling_from_probs");
}

#[test]
fn sample_from_logits_has_no_finding() {
    check("sample_from_logits");
}
