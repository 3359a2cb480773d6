//! Every kernel on its corner cases: under all sanitizers, and none left out.

use hk_attention::OPERATORS;
use hk_testkit as kit;

#[track_caller]
fn check(name: &str) {
    kit::check_corners(OPERATORS.iter().find(|o| o.name == name).expect("an operator"));
}

#[test]
fn every_kernel_runs() {
    kit::assert_every_kernel_runs(OPERATORS);
}

#[test]
fn rope_reshape_and_cache_has_no_finding() {
    check("rope_reshape_and_cache");
}

#[test]
fn rope_cat_and_cache_mla_has_no_finding() {
    check("rope_cat_and_cache_mla");
}
