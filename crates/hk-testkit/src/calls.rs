//! Calls of registered operators by name, compared with their references: what `hk run --check` does.

use crate::compare::compare_outputs;
use crate::devices;
use hk_core::Result;
use hk_core::registry::{Call, HostCall, HostTensor, Operator, Scalar};

/// The call of the operator `name` with these tensors and scalars. Every optional output of which `wanted` tells is wanted.
///
/// # Errors
/// As [`Call::set`], [`Call::set_scalar`], [`Call::want`].
///
/// # Panics
/// If there is no such operator.
#[track_caller]
pub fn host_call(
    operators: &'static [Operator],
    name: &str,
    tensors: &[(&str, HostTensor)],
    scalars: &[(&str, Scalar)],
    wanted: &[&str],
) -> Result<HostCall> {
    let operator =
        operators.iter().find(|op| op.name == name).unwrap_or_else(|| panic!("no operator {name}"));
    let mut call: HostCall = Call::new(operator);
    for (name, tensor) in tensors {
        call.set(name, tensor.clone())?;
    }
    for (name, value) in scalars {
        call.set_scalar(name, *value)?;
    }
    wanted.iter().try_for_each(|name| call.want(name))?;
    Ok(call)
}

/// Runs a call on every device and compares each output with the reference.
///
/// # Errors
/// As the operator; as its reference.
///
/// # Panics
/// If a comparison fails, with its report.
#[track_caller]
pub fn check_call(call: &HostCall) -> Result<()> {
    let operator = call.operator();
    for gpu in devices() {
        let outputs = operator.execute(gpu.stream(), call)?;
        for comparison in compare_outputs(operator, call, &outputs)? {
            assert!(comparison.passed(), "{} on {}: {comparison}", operator.name, gpu.spec());
        }
    }
    Ok(())
}
