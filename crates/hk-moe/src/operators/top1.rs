//! `moe_routing_sigmoid_top1_fused`.

use crate::{kernels, moe_top1_workspace, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream, bf16, f16};
use hk_gemm::Half;

const OP: &str = "moe_routing_sigmoid_top1_fused";
const SMALL: Sample = Sample::Integers { low: -1, high: 2 };
const HALVES: &[DType] = &[DType::Bf16, DType::F16];

macro_rules! case {
    ($label:literal, $dtype:ident $tokens:literal x $cols:literal x $experts:literal $(, shared $shared:literal)?) => {
        Case {
            label: $label,
            tensors: &[("x", DType::$dtype, &[$tokens, $cols]), ("w", DType::$dtype, &[$cols, $experts])],
            scalars: &[$(("shared_expert", Scalar::Bool($shared)))?],
        }
    };
}

pub(crate) const MOE_ROUTING_SIGMOID_TOP1_FUSED: Operator = Operator {
    name: OP,
    family: "hk-moe",
    summary: "the best expert of each token, argmax of sigmoid(x w), logits included",
    args: &[
        // Sums of small integers are exact: what is chosen does not depend on their order.
        ArgSpec::input("x", HALVES, 2, "[T, H]").sampled(SMALL),
        ArgSpec::input("w", HALVES, 2, "[H, E]").sampled(SMALL),
        ArgSpec::output("ids", Tolerance::Exact, &[DType::I32], 2, "[T, 1 or 2]"),
        ArgSpec::output(
            "weights",
            Tolerance::Within { rtol: 1e-5, atol: 1e-7 },
            &[DType::F32],
            2,
            "[T, 1 or 2]",
        ),
    ],
    scalars: &[ScalarSpec {
        name: "shared_expert",
        default: Scalar::Bool(false),
        choices: &[],
        summary: "a second slot: expert E, weight 1",
    }],
    kernels: &[&kernels::TOP1],
    cases: &[
        case!("Llama 4 Scout, 64 tokens", Bf16 64 x 5120 x 16, shared true),
        case!("Llama 4 Maverick, 16 tokens", Bf16 16 x 5120 x 128, shared true),
        case!("Llama 4 Maverick, 512 tokens", Bf16 512 x 5120 x 128, shared true),
    ],
    bench: BenchSizes::Cases(&[
        case!("Llama 4 Maverick, 1 token", Bf16 1 x 5120 x 128, shared true),
        case!("Llama 4 Maverick, 128 tokens", Bf16 128 x 5120 x 128, shared true),
        case!("Llama 4 Maverick, 16384 tokens", Bf16 16384 x 5120 x 128, shared true),
        case!("Llama 4 Scout, 16384 tokens", Bf16 16384 x 5120 x 16, shared true),
    ]),
    corners: &[
        case!("bf16", Bf16 19 x 1096 x 136),
        case!("bf16, large tiles", Bf16 10001 x 520 x 8, shared true),
        case!("bf16, any alignment", Bf16 18 x 515 x 130, shared true),
        case!("f16", F16 5 x 1528 x 40, shared true),
        case!("f16, large tiles", F16 9729 x 16 x 264),
        case!("f16, any alignment", F16 35 x 7 x 3),
    ],
    outputs,
    run,
    reference: reference_top1,
    traffic: Traffic::once,
};

/// Tokens, columns, experts, slots.
fn sizes<V: Described>(call: &Call<V>) -> Result<[usize; 4]> {
    let (x, w) = (call.get("x")?, call.get("w")?);
    let ([tokens, cols], [rows, experts]) = ([x.shape()[0], x.shape()[1]], [w.shape()[0], w.shape()[1]]);
    if rows != cols {
        return Err(Error::shape(OP, "w", w.shape(), format!("[{cols}, E] (columns of x)")));
    }
    if w.dtype() != x.dtype() {
        return Err(Error::dtype(OP, "w", w.dtype(), format!("{} as x", x.dtype())));
    }
    crate::args::check_experts(OP, "w", experts)?;
    Ok([tokens, cols, experts, 1 + usize::from(call.bool("shared_expert")?)])
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [tokens, _, _, slots] = sizes(call)?;
    Ok(vec![
        ("ids", TensorSpec::new(DType::I32, [tokens, slots])),
        ("weights", TensorSpec::new(DType::F32, [tokens, slots])),
    ])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    match inputs.get("x")?.dtype() {
        DType::Bf16 => run_as::<bf16>(stream, call),
        DType::F16 => run_as::<f16>(stream, call),
        other => Err(Error::dtype(OP, "x", other, "bf16, f16")),
    }
}

fn run_as<T: Half>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let [tokens, cols, experts, _] = sizes(&inputs)?;
    let len = moe_top1_workspace(stream.device().info(), tokens, cols, experts);
    let workspace = outputs.workspace(stream, len)?;
    crate::moe_routing_sigmoid_top1_fused(
        stream,
        inputs.view::<T>("x")?,
        inputs.view::<T>("w")?,
        outputs.take("ids")?,
        outputs.take("weights")?,
        workspace,
    )
}

fn reference_top1(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let [tokens, cols, _, slots] = sizes(call)?;
    let want = reference::moe_routing_sigmoid_top1_fused(
        &call.get("x")?.to_f64(),
        &call.get("w")?.to_f64(),
        cols,
        slots == 2,
    );
    let ids = want.ids.iter().map(|&id| f64::from(id)).collect();
    let host = |values| HostTensorF64::new([tokens, slots], values);
    Ok(vec![("ids", host(ids)), ("weights", host(want.weights))])
}
