//! Every kernel on its corner cases: under all sanitizers, and none left out.

use hk_norm::OPERATORS;
use hk_testkit as kit;

#[test]
fn every_kernel_runs() {
    kit::assert_every_kernel_runs(OPERATORS);
}

macro_rules! no_finding {
    ($($test:ident: $index:literal),+ $(,)?) => {$(
        #[test]
        fn $test() {
            kit::check_corners(&OPERATORS[$index]);
        }
    )+};
}
no_finding! {
    rmsnorm_has_no_finding: 0,
    fused_add_rmsnorm_has_no_finding: 1,
    layernorm_has_no_finding: 2,
    fused_add_layernorm_has_no_finding: 3,
    rmsnorm_pad_has_no_finding: 4,
    fused_add_rmsnorm_pad_has_no_finding: 5,
}
