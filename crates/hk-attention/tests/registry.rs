//! The operators as data: errors, defaults and references of calls that are not those of the cases.

use hk_attention::OPERATORS;
use hk_core::DType;
use hk_core::registry::{Operator, Scalar, TensorSpec};
use hk_testkit::{assert_error, assert_references_refuse_alike, kind};

fn operator(name: &str) -> &'static Operator {
    OPERATORS.iter().find(|op| op.name == name).unwrap()
}

#[test]
fn references_refuse_what_operators_refuse() {
    // All operators, so that one run names every difference.
    let refused = OPERATORS
        .iter()
        .filter_map(|op| std::panic::catch_unwind(|| assert_references_refuse_alike(op)).err());
    let all: Vec<_> = refused.map(|e| e.downcast_ref::<String>().cloned().unwrap_or_default()).collect();
    assert!(all.is_empty(), "{}", all.join("\n"));
}

/// Not taken as 0.
#[test]
fn negative_counts_are_refused() {
    for (name, scalar) in [("rope_cat_and_cache_mla", "head_tokens"), ("fused_bmm_rope_kv_cache", "group")] {
        let op = operator(name);
        let mut call = op.spec(&op.corners[0]).unwrap();
        assert_error(call.set_scalar(scalar, Scalar::Int(-1)), kind!(Argument), &[name, scalar, "-1"]);
        assert_error(call.parse_scalar(scalar, "-1"), kind!(Argument), &[name, scalar, "-1"]);
    }
}

/// The input that differs, not the output that would have its type.
#[test]
fn another_dtype_is_told_of_the_input() {
    for (name, arg, first) in [
        ("qk_cat", "k1", "q1"),
        ("qk_rope_cat", "k_nope", "q_nope"),
        ("rope_reshape_and_cache", "k", "q"),
        ("rope_cat_and_cache_mla", "k_pe", "q_pe"),
    ] {
        let op = operator(name);
        let mut call = op.spec(&op.corners[0]).unwrap();
        let shape = call.get(arg).unwrap().shape.clone();
        call.set(arg, TensorSpec::new(DType::F16, shape)).unwrap();
        let says = format!("{name}: {arg}: dtype f16, expected bf16 (dtype of {first})");
        assert_error((op.outputs)(&call).map(drop), kind!(DType), &[&says]);
    }
}
