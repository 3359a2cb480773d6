//! Every kernel on its corner cases: under all sanitizers, and none left out.

use hk_norm::OPERATORS;
use hk_testkit as kit;

#[test]
fn every_kernel_runs() {
    kit::assert_every_kernel_runs(OPERATORS);
}

#[test]
fn rmsnorm_has_no_finding() {
    kit::check_corners(&OPERATORS[0]);
}

#[test]
fn fused_add_rmsnorm_has_no_finding() {
    kit::check_corners(&OPERATORS[1]);
}
