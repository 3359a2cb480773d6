//! `per_tensor_quant_static`, `per_tensor_quant_dynamic` and `downcast_to_static_fp8`.

use super::{OUTPUT, Q, SCALE, X, round};
use crate::{kernels, reference};
use hk_core::quant::Quantized;
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator,
    Sample, Scalar, ScalarSpec, TensorSpec, Traffic,
};
use hk_core::{DType, Result, Stream, with_float, with_quantized};

pub(crate) const PER_TENSOR_QUANT_STATIC: Operator = Operator {
    name: "per_tensor_quant_static",
    family: "hk-quant",
    summary: "q = round(x * (1 / scale))",
    args: &[X, GIVEN_SCALE, Q],
    scalars: &[OUTPUT],
    kernels: &[&kernels::PER_TENSOR_QUANT],
    cases: &[
        Case {
            label: "Llama-3 8B, 128 tokens",
            tensors: &[("x", DType::Bf16, &[128, 4096]), ("scale", DType::F32, &[1])],
            scalars: &[],
        },
        Case {
            label: "Llama-3 8B FFN, 32 tokens",
            tensors: &[("x", DType::Bf16, &[32, 14336]), ("scale", DType::F32, &[1])],
            scalars: &[],
        },
    ],
    bench: BenchSizes::Cases(&[
        Case {
            label: "4096 x 4096",
            tensors: &[("x", DType::Bf16, &[4096, 4096]), ("scale", DType::F32, &[1])],
            scalars: &[("output", Scalar::Choice("fp8e4m3"))],
        },
        Case {
            label: "51200 x 8192",
            tensors: &[("x", DType::Bf16, &[51200, 8192]), ("scale", DType::F32, &[1])],
            scalars: &[("output", Scalar::Choice("fp8e4m3"))],
        },
    ]),
    corners: CORNERS_STATIC,
    outputs: outputs_static,
    run: run_static,
    reference: reference_static,
    traffic: Traffic::once,
};

pub(crate) const PER_TENSOR_QUANT_DYNAMIC: Operator = Operator {
    name: "per_tensor_quant_dynamic",
    family: "hk-quant",
    summary: "scale = max |x| / qmax, q = round(x * (1 / scale))",
    args: &[X, Q, ArgSpec { shape: "[1]", ..SCALE }],
    scalars: &[OUTPUT],
    kernels: &[&kernels::PER_TENSOR_QUANT],
    cases: &[
        Case { label: "Llama-3 8B, 128 tokens", tensors: &[("x", DType::Bf16, &[128, 4096])], scalars: &[] },
        Case { label: "DeepSeek-V3, 64 tokens", tensors: &[("x", DType::Bf16, &[64, 7168])], scalars: &[] },
    ],
    bench: BenchSizes::Rows {
        shapes: &[[4096, 7168], [51_200, 8192]],
        matrices: &["x"],
        vectors: &[],
        scalars: &[("output", Scalar::Choice("fp8e4m3"))],
    },
    corners: CORNERS_DYNAMIC,
    outputs: outputs_dynamic,
    run: run_dynamic,
    reference: reference_dynamic,
    traffic,
};

pub(crate) const DOWNCAST_TO_STATIC_FP8: Operator = Operator {
    name: "downcast_to_static_fp8",
    family: "hk-quant",
    summary: "q = round(x / scale)",
    args: &[X, GIVEN_SCALE, Q],
    scalars: &[ScalarSpec { choices: &["fp8e4m3", "fp8e4m3fnuz"], ..OUTPUT }],
    kernels: &[&kernels::PER_TENSOR_QUANT],
    cases: &[Case {
        label: "GPT-OSS experts, 32 x 8 tokens",
        tensors: &[("x", DType::Bf16, &[32, 8, 2880]), ("scale", DType::F32, &[1])],
        scalars: &[],
    }],
    bench: BenchSizes::Cases(&[
        Case {
            label: "4096 x 4096",
            tensors: &[("x", DType::Bf16, &[4096, 4096]), ("scale", DType::F32, &[1])],
            scalars: &[("output", Scalar::Choice("fp8e4m3"))],
        },
        Case {
            label: "51200 x 8192",
            tensors: &[("x", DType::Bf16, &[51200, 8192]), ("scale", DType::F32, &[1])],
            scalars: &[("output", Scalar::Choice("fp8e4m3"))],
        },
    ]),
    corners: CORNERS_FP8,
    outputs: outputs_static,
    run: run_downcast,
    reference: reference_static,
    traffic: Traffic::once,
};

const GIVEN_SCALE: ArgSpec =
    ArgSpec::input("scale", &[DType::F32], 1, "[1]").sampled(Sample::Uniform { low: 0.005, high: 0.02 });

tile_corners!(CORNERS_STATIC, [("scale", DType::F32, &[1])]:
    Bf16 [("output", Scalar::Choice("i8"))],
    F16 [("output", Scalar::Choice("fp8e4m3"))],
    F32 [("output", Scalar::Choice("fp8e4m3fnuz"))]);
tile_corners!(CORNERS_DYNAMIC, []:
    Bf16 [("output", Scalar::Choice("fp8e4m3"))],
    F16 [("output", Scalar::Choice("fp8e4m3fnuz"))],
    F32 [("output", Scalar::Choice("i8"))]);
tile_corners!(CORNERS_FP8, [("scale", DType::F32, &[1])]:
    Bf16 [("output", Scalar::Choice("fp8e4m3"))],
    F16 [("output", Scalar::Choice("fp8e4m3fnuz"))]);

fn outputs_static(call: &CallSpec) -> Result<Named<TensorSpec>> {
    Ok(vec![("q", TensorSpec::new(call.choice("output")?.parse()?, call.get("x")?.shape()))])
}

fn outputs_dynamic(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let mut outputs = outputs_static(call)?;
    outputs.push(("scale", TensorSpec::new(DType::F32, [1])));
    Ok(outputs)
}

/// The input is read twice: for the maximum, and to quantize.
fn traffic(call: &HostCall) -> Traffic {
    let once = Traffic::once(call);
    Traffic { read: 2 * once.read, ..once }
}

/// Calls a safe function with a static scale.
macro_rules! run_with_scale {
    ($function:ident, $name:literal, $stream:expr, $call:expr) => {{
        let (inputs, mut outputs) = $call.split();
        let dtype = inputs.choice("output")?.parse()?;
        with_float!($name, "x", inputs.get("x")?.dtype(), T => {
            with_quantized!($name, "q", dtype, Q => {
                let (x, scale) = (inputs.view::<T>("x")?, inputs.view("scale")?);
                crate::$function($stream, x, scale, outputs.take::<Q>("q")?)
            })
        })
    }};
}

fn run_static(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    run_with_scale!(per_tensor_quant_static, "per_tensor_quant_static", stream, call)
}

fn run_downcast(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    run_with_scale!(downcast_to_static_fp8, "downcast_to_static_fp8", stream, call)
}

fn run_dynamic(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let dtype = inputs.choice("output")?.parse()?;
    with_float!("per_tensor_quant_dynamic", "x", inputs.get("x")?.dtype(), T => {
        with_quantized!("per_tensor_quant_dynamic", "q", dtype, Q => {
            let (q, scale) = (outputs.take::<Q>("q")?, outputs.take("scale")?);
            crate::per_tensor_quant_dynamic(stream, inputs.view::<T>("x")?, q, scale)
        })
    })
}

fn reference_static(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (x, scale) = (call.get("x")?, call.get("scale")?.to_f64());
    with_quantized!("per_tensor_quant_static", "q", call.choice("output")?.parse()?, Q => {
        let values = reference::static_quant(&x.to_f64(), scale[0], round::<Q>);
        Ok(vec![("q", HostTensorF64::new(x.shape(), values))])
    })
}

fn reference_dynamic(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let x = call.get("x")?;
    let all = x.to_f64();
    with_quantized!("per_tensor_quant_dynamic", "q", call.choice("output")?.parse()?, Q => {
        let out = reference::per_token_quant(&all, all.len().max(1), None, Q::FORMAT, round::<Q>);
        let scale = out.scale.first().copied().unwrap_or(1.0);
        Ok(vec![
            ("q", HostTensorF64::new(x.shape(), out.q)),
            ("scale", HostTensorF64::new([1], vec![scale])),
        ])
    })
}
