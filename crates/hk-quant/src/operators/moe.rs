//! `moe_smoothquant`.

use super::{FLOATS, OUTPUT, Q, SCALE, X, round};
use crate::{MoeOrder, kernels, reference};
use hk_core::quant::Quantized;
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Traffic,
};
use hk_core::{DType, Result, Stream, with_float, with_quantized};

pub(crate) const MOE_SMOOTHQUANT: Operator = Operator {
    name: "moe_smoothquant",
    family: "hk-quant",
    summary: "smoothquant of x[t] * smooth[topk_ids[t, j]] for each choice j of token t",
    args: &[
        ArgSpec { shape: "[tokens, cols] or [tokens, topk, cols]", rank: (2, 3), ..X },
        ArgSpec::input("smooth", FLOATS, 2, "[experts, cols]")
            .sampled(Sample::Uniform { low: 0.25, high: 4.0 }),
        ArgSpec::input("topk_ids", &[DType::I32], 2, "[tokens, topk]")
            .sampled(Sample::Integers { low: 0, high: 9 }),
        ArgSpec { shape: "[tokens * topk, cols]", rank: (2, 2), ..Q },
        ArgSpec { shape: "[tokens * topk]", ..SCALE },
    ],
    scalars: &[
        ScalarSpec { default: Scalar::Choice("i8"), ..OUTPUT },
        ScalarSpec {
            name: "order",
            default: Scalar::Choice("token_major"),
            choices: &["token_major", "choice_major"],
            summary: "order of the rows",
        },
    ],
    kernels: &[&kernels::MOE_SMOOTHQUANT],
    cases: &[
        Case {
            label: "Qwen3 30B-A3B, 32 tokens, 8 of 8 experts",
            tensors: &[
                ("x", DType::Bf16, &[32, 2048]),
                ("smooth", DType::F32, &[9, 2048]),
                ("topk_ids", DType::I32, &[32, 8]),
            ],
            scalars: &[],
        },
        Case {
            label: "DeepSeek-V3, 8 tokens, 8 experts",
            tensors: &[
                ("x", DType::Bf16, &[8, 7168]),
                ("smooth", DType::F32, &[9, 7168]),
                ("topk_ids", DType::I32, &[8, 8]),
            ],
            scalars: &[],
        },
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "Qwen3 30B-A3B, 65536 tokens, 8 of 128 experts",
        tensors: &[
            ("x", DType::Bf16, &[65_536, 2048]),
            ("smooth", DType::F32, &[128, 2048]),
            ("topk_ids", DType::I32, &[65_536, 8]),
        ],
        scalars: &[],
    }]),
    corners: CORNERS,
    outputs,
    run,
    reference: reference_moe,
    traffic,
};

/// Cases for each entry point. Experts 5 to 8 do not exist.
macro_rules! corners {
    ($($dtype:ident $factor:ident [$($scalars:tt)*]),+) => {
        &[$(
            corners!(@case $dtype $factor [$($scalars)*] 14 2048 [14, 2048]),
            corners!(@case $dtype $factor [$($scalars)*] 4 4096 [4, 3, 4096]),
            corners!(@case $dtype $factor [$($scalars)*] 5 8208 [5, 8208]),
            corners!(@case $dtype $factor [$($scalars)*] 10 131 [10, 3, 131]),
            corners!(@case $dtype $factor [$($scalars)*] 4 4099 [4, 4099])
        ),+]
    };
    (@case $dtype:ident $factor:ident [$($scalars:tt)*] $tokens:literal $cols:literal [$($x:literal),+]) => {
        Case {
            label: concat!($tokens, " tokens of ", $cols),
            tensors: &[
                ("x", DType::$dtype, &[$($x),+]),
                ("smooth", DType::$factor, &[5, $cols]),
                ("topk_ids", DType::I32, &[$tokens, 3]),
            ],
            scalars: &[$($scalars)*],
        }
    };
}
static CORNERS: &[Case] = corners!(
    Bf16 F32 [],
    F16 F16 [("order", Scalar::Choice("choice_major"))],
    F32 F32 [("output", Scalar::Choice("fp8e4m3"))]
);

fn order<V: Described>(call: &Call<V>) -> Result<MoeOrder> {
    Ok(if call.choice("order")? == "choice_major" { MoeOrder::ChoiceMajor } else { MoeOrder::TokenMajor })
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let cols = call.get("x")?.shape.last().copied().unwrap_or(0);
    let rows = call.get("topk_ids")?.shape.iter().product::<usize>();
    let dtype = call.choice("output")?.parse()?;
    Ok(vec![("q", TensorSpec::new(dtype, [rows, cols])), ("scale", TensorSpec::new(DType::F32, [rows]))])
}

/// The factors of the chosen experts are read once.
fn traffic(call: &HostCall) -> Traffic {
    let once = Traffic::once(call);
    let (Ok(smooth), Ok(ids)) = (call.get("smooth"), call.get("topk_ids")) else { return once };
    let experts = smooth.shape().first().copied().unwrap_or(0) as i64;
    let ids = ids.to_f64().into_iter().map(|id| id as i64).filter(|id| (0..experts).contains(id));
    let chosen = ids.collect::<std::collections::BTreeSet<_>>().len() as u64;
    let all = smooth.bytes().len() as u64;
    Traffic { read: once.read - all + all / experts.max(1) as u64 * chosen, ..once }
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (dtype, order) = (inputs.choice("output")?.parse()?, order(&inputs)?);
    let smooth_type = inputs.get("smooth")?.dtype();
    let ids = inputs.view("topk_ids")?;
    with_float!("moe_smoothquant", "x", inputs.get("x")?.dtype(), T => {
        with_quantized!("moe_smoothquant", "q", dtype, Q => {
            let (q, scale) = (outputs.take::<Q>("q")?, outputs.take("scale")?);
            let x = inputs.view::<T>("x")?;
            if smooth_type == DType::F32 {
                crate::moe_smoothquant(stream, x, inputs.view::<f32>("smooth")?, ids, q, scale, order)
            } else {
                crate::moe_smoothquant(stream, x, inputs.view::<T>("smooth")?, ids, q, scale, order)
            }
        })
    })
}

fn reference_moe(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let (x, smooth, ids) = (call.get("x")?, call.get("smooth")?, call.get("topk_ids")?);
    let topk = ids.shape().last().copied().unwrap_or(1);
    let cols = smooth.shape().last().copied().unwrap_or(1);
    let ids: Vec<i64> = ids.to_f64().iter().map(|&id| id as i64).collect();
    with_quantized!("moe_smoothquant", "q", call.choice("output")?.parse()?, Q => {
        let smooth = smooth.to_f64();
        let experts = reference::Experts { smooth: &smooth, topk_ids: &ids, topk, order: order(call)? };
        let out = reference::moe_smoothquant(&x.to_f64(), cols, experts, Q::FORMAT, round::<Q>);
        Ok(vec![
            ("q", HostTensorF64::new([ids.len(), cols], out.q)),
            ("scale", HostTensorF64::new([ids.len()], out.scale)),
        ])
    })
}
