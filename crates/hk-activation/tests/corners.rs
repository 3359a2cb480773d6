//! Every kernel on its corner cases: under all sanitizers, and none left out.

use hk_activation::OPERATORS;
use hk_testkit as kit;

#[test]
fn every_kernel_runs() {
    kit::assert_every_kernel_runs(OPERATORS);
}

#[track_caller]
fn check(name: &str) {
    kit::check_corners(OPERATORS.iter().find(|o| o.name == name).expect("an operator of this crate"));
}

#[test]
fn topk_has_no_finding() {
    check("topk");
}
