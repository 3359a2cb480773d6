//! References accept the calls that operators accept, with the same results; every tensor and scalar is used or refused.

use hk_core::registry::{HostCall, HostTensor, Scalar};
use hk_quant::OPERATORS;
use hk_testkit::{assert_error, check_call, host_call, kind};

fn tensor<const N: usize>(shape: [usize; N], values: &[f32]) -> HostTensor {
    HostTensor::new(shape, values).unwrap()
}

const SCALING: &str = "scaling";

/// A call of a fused norm of two rows of 64, with further tensors and scalars.
fn fused(name: &str, more: &[(&str, HostTensor)], scalars: &[(&str, Scalar)]) -> HostCall {
    let mut tensors = vec![("x", tensor([2, 64], &[0.5; 128])), ("weight", tensor([64], &[1.0; 64]))];
    tensors.extend(more.iter().cloned());
    host_call(OPERATORS, name, &tensors, scalars, &[]).unwrap()
}

#[test]
fn unused_tensors_and_scalars_are_refused() {
    let name = "fused_rmsnorm_fp8_quant";
    let smooth = ("smooth", tensor([64], &[2.0; 64]));
    let fixed = ("static_scale", tensor([1], &[0.01]));
    let weight2 = ("weight2", tensor([64], &[1.0; 64]));
    let choice = |scaling| (SCALING, Scalar::Choice(scaling));
    let (pow2, group) = (("pow2_scale", Scalar::Bool(true)), ("group_size", Scalar::Int(64)));
    let used = [
        fused(name, std::slice::from_ref(&smooth), &[choice("token")]),
        fused(name, std::slice::from_ref(&fixed), &[choice("tensor")]),
        fused(name, &[], &[choice("group"), pow2, group]),
        fused(name, &[("x2", tensor([2, 64], &[1.0; 128])), weight2.clone()], &[]),
    ];
    for call in &used {
        check_call(call).unwrap();
    }
    let refused = [
        ("smooth", fused(name, std::slice::from_ref(&smooth), &[choice("group")])),
        ("smooth", fused(name, &[smooth, fixed.clone()], &[choice("tensor")])),
        ("static_scale", fused(name, std::slice::from_ref(&fixed), &[choice("token")])),
        ("static_scale", fused(name, std::slice::from_ref(&fixed), &[choice("group")])),
        ("pow2_scale", fused(name, &[], &[choice("token"), pow2])),
        ("pow2_scale", fused(name, std::slice::from_ref(&fixed), &[choice("tensor"), pow2])),
        ("group_size", fused(name, &[], &[choice("token"), group])),
        ("weight2", fused(name, std::slice::from_ref(&weight2), &[])),
        ("weight2", fused("fused_rmsnorm_mxfp4_quant", &[weight2], &[])),
    ];
    for (arg, call) in &refused {
        let message = format!("{}: {arg}: given, expected nothing", call.operator().name);
        assert_error(check_call(call), kind!(Argument), &[&message]);
        assert_error((call.operator().reference)(call).map(drop), kind!(Argument), &[&message]);
    }
}

/// A block with an infinity has the scale NaN and zeros; NaN becomes 0 in int8.
#[test]
fn rows_with_infinities() {
    let mut x = [0.5f32; 128];
    (x[3], x[70]) = (f32::INFINITY, f32::NAN);
    let (x, weight) = (("x", tensor([2, 64], &x)), ("weight", tensor([64], &[1.0; 64])));
    let tensors = [x, weight];
    for mode in ["even", "round_up", "floor"] {
        let mode = [("mode", Scalar::Choice(mode))];
        check_call(&host_call(OPERATORS, "fused_rmsnorm_mxfp4_quant", &tensors, &mode, &[]).unwrap())
            .unwrap();
    }
    for output in ["i8", "fp8e4m3", "fp8e4m3fnuz"] {
        let output = [("output", Scalar::Choice(output))];
        check_call(&host_call(OPERATORS, "fused_rmsnorm_fp8_quant", &tensors, &output, &[]).unwrap())
            .unwrap();
    }
}

/// No choices give no rows.
#[test]
fn topk_of_zero() {
    let ids = HostTensor::new([3, 0], &[] as &[i32]).unwrap();
    for x in [tensor([3, 8], &[1.0; 24]), tensor([3, 0, 8], &[])] {
        let tensors = [("x", x), ("smooth", tensor([2, 8], &[1.0; 16])), ("topk_ids", ids.clone())];
        for order in ["token_major", "choice_major"] {
            let order = [("order", Scalar::Choice(order))];
            check_call(&host_call(OPERATORS, "moe_smoothquant", &tensors, &order, &[]).unwrap()).unwrap();
        }
    }
}

/// Rows of negative ids are untouched, in either order.
#[test]
fn negative_expert_ids() {
    let ids = HostTensor::new([3, 2], &[-1, 0, 1, i32::MIN, 5, -7]).unwrap();
    let smooth = tensor([2, 8], &[0.5; 16]);
    for x in [tensor([3, 8], &[1.5; 24]), tensor([3, 2, 8], &[1.5; 48])] {
        let tensors = [("x", x), ("smooth", smooth.clone()), ("topk_ids", ids.clone())];
        for order in ["token_major", "choice_major"] {
            for output in ["i8", "fp8e4m3"] {
                let scalars = [("order", Scalar::Choice(order)), ("output", Scalar::Choice(output))];
                check_call(&host_call(OPERATORS, "moe_smoothquant", &tensors, &scalars, &[]).unwrap())
                    .unwrap();
            }
        }
    }
}

/// A block with an infinity or a NaN, in the operators without a norm.
#[test]
fn an_infinity_in_every_mx_operator() {
    let mut x = [0.5f32; 128];
    (x[3], x[70]) = (f32::NEG_INFINITY, f32::NAN);
    let call = host_call(OPERATORS, "dynamic_mxfp4_quant", &[("x", tensor([2, 64], &x))], &[], &[]).unwrap();
    check_call(&call).unwrap();
    let x: Vec<_> = x.iter().map(|&v| hk_core::bf16::from_f32(v)).collect();
    let x = HostTensor::new([2, 64], &x).unwrap();
    for element in ["fp4", "fp8e4m3", "fp8e5m2"] {
        let element = [("element", Scalar::Choice(element))];
        let call = host_call(OPERATORS, "downcast_to_mxfp", &[("x", x.clone())], &element, &[]).unwrap();
        check_call(&call).unwrap();
    }
}
