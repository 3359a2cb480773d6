//! `fused_mul_add`.

use super::{FLOATS, Y_DTYPE, y_as_x, y_dtype};
use crate::{MulAddOperand, kernels, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream, with_float};

macro_rules! case {
    ($label:literal; $x:ident $y:literal $n:tt $($arg:ident $dtype:ident $m:tt)*) => {
        Case {
            label: $label,
            tensors: &[("x", DType::$x, &$n), $((stringify!($arg), DType::$dtype, &$m)),*],
            scalars: &[("y_dtype", Scalar::Choice($y)), ("a_value", Scalar::Float(-1.5)), ("b_value", Scalar::Float(0.25))],
        }
    };
}

pub(crate) const FUSED_MUL_ADD: Operator = Operator {
    name: "fused_mul_add",
    family: "hk-activation",
    summary: "y = a * x + b",
    args: &[
        ArgSpec::input("x", FLOATS, 2, "any").ranks(1, 5),
        ArgSpec::input("a", FLOATS, 2, "as x, or [1]").ranks(1, 5).optional(),
        ArgSpec::input("b", FLOATS, 2, "as x, or [1]").ranks(1, 5).optional(),
        ArgSpec::output("y", Tolerance::Elementwise, FLOATS, 2, "as x").ranks(1, 5),
    ],
    scalars: &[
        Y_DTYPE,
        ScalarSpec {
            name: "a_value",
            default: Scalar::Float(1.0),
            choices: &[],
            summary: "a where no tensor is given",
        },
        ScalarSpec {
            name: "b_value",
            default: Scalar::Float(0.0),
            choices: &[],
            summary: "b where no tensor is given",
        },
    ],
    kernels: &[&kernels::MUL_ADD],
    cases: &[
        case!("DeepSeek-V3, 32 tokens, tensor and tensor"; Bf16 "as_x" [32, 7168] a Bf16 [32, 7168] b Bf16 [32, 7168]),
        case!("DeepSeek-V3, 64 tokens, number of the device and tensor"; Bf16 "as_x" [64, 7168] a F32 [1] b Bf16 [64, 7168]),
    ],
    bench: BenchSizes::rows(&[[20_480, 7168]], &["x", "a", "b"], &[]),
    corners: &[
        case!("loop"; Bf16 "as_x" [40, 1024] a Bf16 [40, 1024] b Bf16 [40, 1024]),
        case!("loop"; F16 "as_x" [40, 1024] a F32 [40, 1024] b Bf16 [1]),
        case!("loop"; F32 "as_x" [20, 1024] a Bf16 [20, 1024] b F16 [20, 1024]),
        case!("numbers of the host"; Bf16 "f32" [1001]),
        case!("with a tail"; F16 "bf16" [3, 7, 5] a F16 [1] b F32 [3, 7, 5]),
        case!("with a tail"; F32 "f16" [1, 1, 1, 1, 7] a F32 [1, 1, 1, 1, 7]),
        case!("short"; Bf16 "as_x" [7] a F32 [1] b F32 [1]),
        case!("short"; F16 "f32" [1] a F32 [1] b Bf16 [1]),
        case!("short"; F32 "bf16" [3] a F16 [3] b F16 [3]),
    ],
    outputs,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        let (a, b) = (operand(&inputs, "a", "a_value")?, operand(&inputs, "b", "b_value")?);
        with_float!("fused_mul_add", "x", inputs.get("x")?.dtype(), T => {
            with_float!("fused_mul_add", "y", y_dtype(&inputs)?, O => {
                crate::fused_mul_add(stream, inputs.view::<T>("x")?, a, b, outputs.take::<O>("y")?)
            })
        })
    },
    reference: |call: &HostCall| {
        outputs(&call.spec())?;
        let x = call.get("x")?;
        let values = |name: &str, number: &str| match call.optional(name) {
            Some(tensor) => Ok(tensor.to_f64()),
            None => call.float(number).map(|v| vec![f64::from(v as f32)]),
        };
        let (a, b) = (values("a", "a_value")?, values("b", "b_value")?);
        let values = reference::fused_mul_add(&x.to_f64(), &a, &b);
        Ok(vec![("y", HostTensorF64::new(x.shape(), values))])
    },
    traffic: Traffic::once,
};

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let numel = |t: &TensorSpec| t.shape.iter().product::<usize>();
    let n = numel(call.get("x")?);
    for arg in ["a", "b"] {
        if let Some(tensor) = call.optional(arg).filter(|t| ![1, n].contains(&numel(t))) {
            let want = format!("1 element or {n} (those of x)");
            return Err(Error::shape("fused_mul_add", arg, &tensor.shape, want));
        }
    }
    y_as_x(call)
}

fn operand<'a>(inputs: &Inputs<'a>, name: &'static str, number: &str) -> Result<MulAddOperand<'a>> {
    let Some(tensor) = inputs.optional(name) else { return Ok((inputs.float(number)? as f32).into()) };
    match tensor.dtype() {
        DType::Bf16 => inputs.view(name).map(MulAddOperand::Bf16),
        DType::F16 => inputs.view(name).map(MulAddOperand::F16),
        DType::F32 => inputs.view(name).map(MulAddOperand::F32),
        other => Err(Error::dtype("fused_mul_add", name, other, "bf16, f16, f32")),
    }
}
