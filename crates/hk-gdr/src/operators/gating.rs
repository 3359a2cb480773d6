//! `fused_gdn_gating_prefill`.

use super::recurrent::{A_LOG, SOFTPLUS_BETA, SOFTPLUS_THRESHOLD, case, computed_gates, softplus};
use crate::gating::check_gating;
use crate::{GateBias, GatingInputs, kernels};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostTensorF64, Named, Operator, Scalar,
    TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Result, Stream, with_float};

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const F32: &[DType] = &[DType::F32];
/// A sum in f32 of terms of up to about 60 is the argument of an exponential.
const GATE: Tolerance = Tolerance::Within { rtol: 2e-5, atol: 1e-37 };

pub(crate) const FUSED_GDN_GATING_PREFILL: Operator = Operator {
    name: "fused_gdn_gating_prefill",
    family: "hk-gdr",
    summary: "g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)",
    args: &[
        A_LOG,
        ArgSpec::input("a", FLOATS, 2, "[.., v_heads]").ranks(1, 3),
        ArgSpec::input("b", FLOATS, 2, "as a").ranks(1, 3),
        ArgSpec::input("dt_bias", FLOATS, 1, "[v_heads]"),
        ArgSpec::output("g", GATE, F32, 2, "as a").ranks(1, 3),
        ArgSpec::output("beta", GATE, F32, 2, "as a").ranks(1, 3),
    ],
    scalars: &[SOFTPLUS_BETA, SOFTPLUS_THRESHOLD],
    kernels: &[&kernels::GATING],
    cases: &[
        case!("Qwen3-Next, 512 tokens"; ; A_log F32 [32] a Bf16 [512, 32] b Bf16 [512, 32] dt_bias F32 [32]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 65536 tokens"; ; A_log F32 [32] a Bf16 [65_536, 32] b Bf16 [65_536, 32] dt_bias F32 [32]),
    ]),
    corners: &[
        case!("vectors"; softplus_beta = Scalar::Float(2.0), softplus_threshold = Scalar::Float(0.25); A_log F32 [24] a Bf16 [90, 24]
            b Bf16 [90, 24] dt_bias Bf16 [24]),
        case!("elements"; ; A_log F32 [3] a Bf16 [50, 3] b Bf16 [50, 3] dt_bias F32 [3]),
        case!("vectors"; ; A_log F32 [8] a F16 [2, 3, 8] b F16 [2, 3, 8] dt_bias F32 [8]),
        case!("elements"; ; A_log F32 [5] a F16 [7, 5] b F16 [7, 5] dt_bias F16 [5]),
        case!("vectors"; ; A_log F32 [4] a F32 [70, 4] b F32 [70, 4] dt_bias F32 [4]),
        case!("elements"; ; A_log F32 [1] a F32 [9, 1] b F32 [9, 1] dt_bias F32 [1]),
    ],
    outputs,
    run,
    reference: |call| {
        outputs(&call.spec())?;
        let gates = computed_gates(call, call.get("a")?.shape().last().copied().unwrap_or(1))?;
        let shape = call.get("a")?.shape();
        let host = |values: Option<Vec<f64>>| HostTensorF64::new(shape, values.unwrap_or_default());
        Ok(vec![("g", host(gates.g)), ("beta", host(gates.beta))])
    },
    traffic: Traffic::once,
};

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let op = call.operator().name;
    let a = call.get("a")?;
    let dtype = a.dtype;
    if let Some(got) = call.optional("b").map(|b| b.dtype).filter(|got| *got != dtype) {
        return Err(Error::dtype(op, "b", got, format!("{dtype} (dtype of a)")));
    }
    let got = call.get("dt_bias")?.dtype;
    if got != dtype && got != DType::F32 {
        return Err(Error::dtype(op, "dt_bias", got, format!("{dtype} (dtype of a) or f32")));
    }
    let shape = |name| -> Result<&[usize]> { Ok(Described::shape(call.get(name)?)) };
    check_gating(&a.shape, shape("b")?, shape("A_log")?, shape("dt_bias")?, softplus(call)?)?;
    let spec = TensorSpec::new(DType::F32, a.shape.clone());
    Ok(vec![("g", spec.clone()), ("beta", spec)])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    fn typed<T: Float, D: GateBias<T>>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
        let (inputs, mut outputs) = call.split();
        let tensors = GatingInputs::<T, D> {
            a_log: inputs.view("A_log")?,
            a: inputs.view("a")?,
            b: inputs.view("b")?,
            dt_bias: inputs.view("dt_bias")?,
            softplus: softplus::<hk_core::registry::DynTensor>(&inputs)?,
        };
        crate::fused_gdn_gating_prefill(stream, tensors, outputs.take("g")?, outputs.take("beta")?)
    }
    let inputs: &Call<_> = &call.split().0;
    let (dtype, bias) = (inputs.get("a")?.dtype(), inputs.get("dt_bias")?.dtype());
    with_float!("fused_gdn_gating_prefill", "a", dtype, T => {
        if bias == DType::F32 { typed::<T, f32>(stream, call) } else { typed::<T, T>(stream, call) }
    })
}
