//! Every kernel on its corner cases: none is left out.

use hk_activation::OPERATORS;
use hk_testkit as kit;

#[test]
fn every_kernel_runs() {
    kit::assert_every_kernel_runs(OPERATORS);
}
