//! The activations on their corner cases, under all sanitizers.

use hk_activation::OPERATORS;
use hk_testkit as kit;

#[test]
fn unary_operators_have_no_finding() {
    for name in ["silu", "gelu", "gelu_tanh", "relu", "tanh"] {
        kit::check_corners(OPERATORS.iter().find(|o| o.name == name).expect("an operator of this crate"));
    }
}
