//! The gates and the multiply-add on their corner cases, under all sanitizers.

use hk_activation::OPERATORS;
use hk_testkit as kit;

#[test]
fn gates_have_no_finding() {
    for name in ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swiglu_oai_and_mul"] {
        kit::check_corners(OPERATORS.iter().find(|o| o.name == name).expect("an operator of this crate"));
    }
}

#[test]
fn fused_mul_add_has_no_finding() {
    kit::check_corners(
        OPERATORS.iter().find(|o| o.name == "fused_mul_add").expect("an operator of this crate"),
    );
}
