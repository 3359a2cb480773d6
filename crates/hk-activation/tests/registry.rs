//! The operators as data: errors and references of calls that are not those of the cases.

use hk_activation::OPERATORS;
use hk_core::registry::{HostTensor, Operator, Scalar, TensorSpec};
use hk_core::{DType, bf16};
use hk_testkit::compare::compare_outputs;
use hk_testkit::{self as kit, assert_error, assert_references_refuse_alike, kind};

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

/// They have no meaning without states.
#[test]
fn slots_and_flags_without_states_are_refused() {
    let op = operator("causal_conv1d_fwd");
    for (name, dtype) in [("cache_indices", DType::I32), ("has_initial_state", DType::U8)] {
        let mut call = op.spec(&op.cases[1]).unwrap(); // without states
        call.set(name, TensorSpec::new(dtype, [1])).unwrap();
        let call = call.sample(1).unwrap();
        for gpu in kit::devices() {
            let refused = op.execute(gpu.stream(), &call).map(drop);
            assert_error(refused, kind!(Argument), &[name, "without conv_states"]);
        }
        assert_error((op.reference)(&call).map(drop), kind!(Argument), &[name, "without conv_states"]);
    }
}

#[test]
fn another_dtype_is_told_of_the_input() {
    let op = operator("rope_qk");
    let mut call = op.spec(&op.corners[0]).unwrap();
    let shape = call.get("k").unwrap().shape.clone();
    call.set("k", TensorSpec::new(DType::F16, shape)).unwrap();
    let says = "rope_qk: k: dtype f16, expected bf16 (dtype of q)";
    assert_error((op.outputs)(&call).map(drop), kind!(DType), &[says]);
}

#[test]
fn a_negative_count_is_told_by_name() {
    let op = operator("fused_qkv_split_qk_rope");
    let mut call = op.spec(&op.corners[0]).unwrap();
    call.set_scalar("kv_heads", Scalar::Int(i64::MAX)).unwrap();
    assert_error((op.outputs)(&call).map(drop), kind!(Argument), &["kv_heads: 9223372036854775807"]);
}

/// Padding, slots and sequences out of range, and no sequences: `--check` takes what the operators give.
#[test]
fn convolutions_of_any_indices_match_their_reference() {
    let host = |v: &[i32]| HostTensor::new([v.len()], v).unwrap();
    let (channels, tokens) = (16, 24);
    for (starts, slots) in [
        (vec![0, 8, 16, 24], vec![-1, 2, 0]),
        (vec![0, 8, 16, 24], vec![3, 4, 1]),
        (vec![0, 8, 16, 24], vec![i32::MIN, 0, i32::MAX]),
        (vec![0, 8, 16, 40], vec![0, 1, 2]),
        (vec![-3, 8, 16, 24], vec![0, 1, 2]),
        (vec![2, 2, 5, 20], vec![0, 1, 2]),
        (vec![0], vec![]),
    ] {
        for layout in ["tokens", "channels"] {
            let op = operator("causal_conv1d_fwd");
            let x = if layout == "tokens" { [channels, tokens] } else { [tokens, channels] };
            let mut call = hk_core::registry::Call::new(op);
            call.set_scalar("layout", Scalar::Choice(layout)).unwrap();
            for (name, dtype, shape) in [
                ("x", DType::Bf16, &x[..]),
                ("weight", DType::Bf16, &[channels, 4]),
                ("query_start_loc", DType::I32, &[starts.len()]),
                ("cache_indices", DType::I32, &[slots.len()]),
                ("conv_states", DType::Bf16, &[4, channels, 3]),
            ] {
                call.set(name, TensorSpec::new(dtype, shape)).unwrap();
            }
            let mut call = call.sample(7).unwrap();
            call.set("query_start_loc", host(&starts)).unwrap();
            call.set("cache_indices", host(&slots)).unwrap();
            for gpu in kit::devices() {
                let outputs = op.execute(gpu.stream(), &call).unwrap();
                let compared = compare_outputs(op, &call, &outputs).unwrap();
                compared.iter().for_each(|c| assert!(c.passed(), "{starts:?}, {slots:?}, {layout}: {c}"));
                let skipped = slots.iter().position(|slot| *slot == -1);
                if let (Some(0), "channels") = (skipped, layout) {
                    // Padding keeps what `y` held: NaN, which the reference says, too.
                    let y = outputs.iter().find(|(name, _)| *name == "y").unwrap();
                    let elements = y.1.elements::<bf16>().unwrap();
                    assert!(elements[..8 * channels].iter().all(|v| v.to_bits() == 0xffff));
                }
            }
        }
    }
    // More than one result is right.
    let op = operator("causal_conv1d_fwd");
    let mut call = op.example(&op.corners[0], 1).unwrap();
    call.set("cache_indices", host(&[5, 5])).unwrap();
    assert_error((op.reference)(&call).map(drop), kind!(Argument), &["cache_indices", "slot 5 twice"]);
}
