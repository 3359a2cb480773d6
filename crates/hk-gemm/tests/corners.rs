//! Every operator and every kernel on corner cases.

use crate::{a16w16_a8w8, dual, ff, fused, gmm, mxfp8, quant_x, quantized};
use hk_gemm::OPERATORS;

#[test]
fn every_operator_is_checked() {
    let checked = [
        a16w16_a8w8::CHECKED,
        dual::CHECKED,
        ff::CHECKED,
        fused::CHECKED,
        gmm::CHECKED,
        mxfp8::CHECKED,
        quant_x::CHECKED,
        quantized::CHECKED,
    ];
    hk_testkit::assert_every_operator_is_checked(OPERATORS, &checked);
}

#[test]
fn every_kernel_runs() {
    hk_testkit::assert_every_kernel_runs(OPERATORS);
}
