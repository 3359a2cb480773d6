//! Every kernel on its corner cases: under all sanitizers, and none left out.

use hk_activation::OPERATORS;
use hk_testkit as kit;

/// Checks the corners of the operator of that name.
fn check(name: &str) {
    let operator = OPERATORS.iter().find(|operator| operator.name == name);
    kit::check_corners(operator.expect("an operator of that name"));
}

#[test]
fn every_kernel_runs() {
    kit::assert_every_kernel_runs(OPERATORS);
}

#[test]
fn rope_cached_has_no_finding() {
    check("rope_cached");
}

#[test]
fn rope_freqs_has_no_finding() {
    check("rope_freqs");
}

#[test]
fn rope_qk_has_no_finding() {
    check("rope_qk");
}

#[test]
fn fused_qkv_split_qk_rope_has_no_finding() {
    check("fused_qkv_split_qk_rope");
}
