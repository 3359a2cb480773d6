//! Damaged calls: the corner cases of an operator with one tensor or scalar changed.

use crate::Gpu;
use crate::compare::compare_outputs;
use hk_core::Error;
use hk_core::registry::{Call, CallSpec, Case, Described, Operator, Scalar, TensorSpec};

/// Asserts that the reference of an operator returns the same errors as the operator, accepts the same calls, and that neither
/// panics. The calls are the first corner cases of up to 2^15 elements a tensor, or the smallest ones, with one tensor left out, of
/// another shape or dtype, or one integer out of range.
///
/// # Panics
/// If only one of them accepts a call, or if their errors differ.
#[track_caller]
pub fn assert_references_refuse_alike(operator: &'static Operator) {
    let gpu = Gpu::open("emu:gfx942");
    let mut wrong = Vec::new();
    // Each is sampled, executed and computed by the reference a hundred times.
    let mut cases: Vec<_> = operator.corners.iter().collect();
    cases.sort_by_key(|case| case.largest().max(1 << 15));
    for case in cases.into_iter().take(4) {
        for (what, spec) in damaged(operator, case) {
            let at = format!("{}, corner `{}` with {what}", operator.name, case.label);
            let call = spec.sample(3).unwrap_or_else(|e| panic!("{at}: {e}"));
            let reference = || call.check_complete().and_then(|()| (operator.reference)(&call).map(drop));
            match operator.execute(gpu.stream(), &call) {
                // What only the device or the layout in memory decides.
                Err(Error::Unsupported { .. } | Error::TooLarge { .. }) => {}
                Err(refused) => match reference() {
                    Ok(()) => wrong.push(format!("{at}: only the operator refuses it: {refused}")),
                    Err(same) if same.to_string() == refused.to_string() => {}
                    Err(other) => {
                        wrong.push(format!("{at}: refused with `{refused}`, by the reference `{other}`"))
                    }
                },
                Ok(outputs) => match compare_outputs(operator, &call, &outputs) {
                    Ok(all) => wrong.extend(all.iter().filter(|c| !c.passed()).map(|c| format!("{at}: {c}"))),
                    Err(e) => wrong.push(format!("{at}: only the reference refuses it: {e}")),
                },
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The damaged calls of a case, and what is changed.
fn damaged(operator: &'static Operator, case: &Case) -> Vec<(String, CallSpec)> {
    let mut calls = Vec::new();
    for arg in operator.args.iter().filter(|arg| arg.role.is_input()) {
        let Some(&(_, dtype, shape)) = case.tensors.iter().find(|(name, ..)| *name == arg.name) else {
            continue;
        };
        calls.push((format!("no `{}`", arg.name), rebuilt(operator, case, arg.name, None)));
        let mut change = |what: String, spec: TensorSpec| {
            calls.push((what, rebuilt(operator, case, arg.name, Some(spec))));
        };
        for axis in 0..shape.len() {
            for n in [0, shape[axis].saturating_sub(1), shape[axis] + 1] {
                let mut shape = shape.to_vec();
                shape[axis] = n;
                change(format!("`{}` of shape {shape:?}", arg.name), TensorSpec::new(dtype, shape));
            }
        }
        for &other in arg.dtypes.iter().filter(|other| **other != dtype) {
            change(format!("`{}` of {other}", arg.name), TensorSpec::new(other, shape));
        }
    }
    for scalar in operator.scalars.iter().filter(|s| matches!(s.default, Scalar::Int(_) | Scalar::Count(_))) {
        for value in [-1, 0, 3, i64::from(u32::MAX), i64::MAX] {
            let mut call = operator.spec(case).expect("a case of the operator");
            // A negative count is refused here.
            if call.set_scalar(scalar.name, Scalar::Int(value)).is_ok() {
                calls.push((format!("{}={value}", scalar.name), call));
            }
        }
    }
    calls
}

/// The call of a case with one tensor replaced or left out.
fn rebuilt(operator: &'static Operator, case: &Case, name: &str, spec: Option<TensorSpec>) -> CallSpec {
    let good = operator.spec(case).expect("a case of the operator");
    let mut call: CallSpec = Call::new(operator);
    for (other, tensor) in good.tensors().filter(|(other, _)| *other != name) {
        call.set(other, tensor.spec()).expect("a tensor of the case");
    }
    if let Some(spec) = spec {
        call.set(name, spec).expect("a dtype and rank of the argument");
    }
    good.wanted().iter().for_each(|name| call.want(name).expect("an output of the case"));
    good.scalars().for_each(|(name, value)| call.set_scalar(name, value).expect("a scalar of the case"));
    call
}
