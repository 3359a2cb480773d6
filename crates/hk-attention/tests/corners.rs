//! Every kernel on its corner cases: under all sanitizers, and none left out.

use hk_attention::OPERATORS;
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
fn qk_cat_has_no_finding() {
    check("qk_cat");
}

#[test]
fn qk_rope_cat_has_no_finding() {
    check("qk_rope_cat");
}
