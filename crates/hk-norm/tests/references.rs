//! References accept the calls that operators accept, with the same results.

use hk_core::registry::{HostTensor, Scalar};
use hk_norm::OPERATORS;
use hk_testkit::{assert_error, check_call, host_call, kind};

fn tensor(shape: [usize; 2], values: &[f32]) -> HostTensor {
    HostTensor::new(shape, values).unwrap()
}

/// The mean of a row with an infinity is NaN, as its deviations are.
#[test]
fn a_mean_of_an_infinity_is_nan() {
    let x = [1.0, f32::INFINITY, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0, f32::NEG_INFINITY, 0.0, 0.0, f32::INFINITY];
    let residual = ("residual_in", tensor([3, 4], &[0.5; 12]));
    for (name, tensors) in [
        ("layernorm", vec![("x", tensor([3, 4], &x))]),
        ("fused_add_layernorm", vec![("x", tensor([3, 4], &x)), residual]),
    ] {
        let call = host_call(OPERATORS, name, &tensors, &[], &["mean", "rstd"]).unwrap();
        check_call(&call).unwrap();
        let outputs = (call.operator().reference)(&call).unwrap();
        let (_, mean) = outputs.iter().find(|(name, _)| *name == "mean").unwrap();
        assert!(mean.values[0].is_nan() && mean.values[1] >= 2.5 && mean.values[2].is_nan(), "{mean:?}");
    }
}

/// No rows need no memory, for any padding.
#[test]
fn no_rows_with_any_padding() {
    let weight = ("weight", HostTensor::new([4], &[1.0f32; 4]).unwrap());
    let empty = |name| (name, tensor([0, 4], &[]));
    for (name, tensors) in [
        ("rmsnorm_pad", vec![empty("x"), weight.clone()]),
        ("fused_add_rmsnorm_pad", vec![empty("x"), empty("residual_in"), weight]),
    ] {
        let call = |multiple| {
            let scalars = [("pad_multiple", Scalar::Int(multiple))];
            host_call(OPERATORS, name, &tensors, &scalars, &[]).unwrap()
        };
        check_call(&call(u32::MAX.into())).unwrap();
        let huge = call(1_000_000_000_000);
        let parts = [name, "pad_multiple: 1000000000000", "less than 2^32"];
        assert_error(check_call(&huge), kind!(Argument), &parts);
        assert_error((huge.operator().reference)(&huge).map(drop), kind!(Argument), &parts);
    }
}

/// Errors name the operator that was called.
#[test]
fn a_negative_multiple_is_refused_by_the_operator() {
    let tensors = [("x", tensor([1, 4], &[1.0; 4])), ("weight", HostTensor::new([4], &[1.0f32; 4]).unwrap())];
    let call = host_call(OPERATORS, "rmsnorm_pad", &tensors, &[("pad_multiple", Scalar::Int(-1))], &[]);
    let message = "rmsnorm_pad: pad_multiple: -1, expected an integer, 0 or more";
    assert_error(call.map(drop), kind!(Argument), &[message]);
}
