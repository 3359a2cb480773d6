//! `moe_topk`.

use super::FLOATS;
use crate::topk::check_options;
use crate::{Choices, Groups, Scores, SlotOrder, Ties, TopkOptions, kernels, moe_bitmatrix_shape, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Result, Stream, with_float};

const OP: &str = "moe_topk";

pub(super) const LOGITS: ArgSpec =
    ArgSpec::input("logits", FLOATS, 2, "[T, E]").sampled(Sample::Normal { mean: 0.0, deviation: 2.0 });
pub(super) const BIAS: ArgSpec = ArgSpec::input("bias", &[DType::F32], 1, "[E]")
    .optional()
    .sampled(Sample::Uniform { low: -0.25, high: 0.25 });

macro_rules! scalar {
    ($name:literal, $default:expr, $summary:literal $(, [$($choice:literal),+])?) => {
        ScalarSpec { name: $name, default: $default, choices: &[$($($choice),+)?], summary: $summary }
    };
}

/// Scalars of what [`options`] gives, and `k`.
pub(super) const SCALARS: &[ScalarSpec] = &[
    scalar!("k", Scalar::Count(8), "experts of a token, up to 32"),
    scalar!(
        "scores",
        Scalar::Choice("softmax_chosen"),
        "scores: logits; with weights that are their softmax over the chosen; over all; sigmoid; sqrt(ln(1 + exp(x)))",
        ["logits", "softmax_chosen", "softmax", "sigmoid", "sqrt_softplus"]
    ),
    scalar!("renormalize", Scalar::Bool(false), "divides weights by their sum"),
    scalar!("scaling", Scalar::Float(1.0), "multiplies the weights"),
    scalar!("ties", Scalar::Choice("high"), "which of equals is chosen, by its index", ["high", "low"]),
    scalar!("order", Scalar::Choice("expert"), "order of a token's experts", ["expert", "preference"]),
    scalar!("groups", Scalar::Count(1), "groups of experts, up to 16"),
    scalar!("kept_groups", Scalar::Count(1), "groups that are chosen from"),
    scalar!("weights_dtype", Scalar::Choice("as_logits"), "type of the weights", ["as_logits", "f32"]),
];

/// As DeepSeek-V3 routes.
pub(super) const DEEPSEEK: &[(&str, Scalar)] = &[
    ("scores", Scalar::Choice("sigmoid")),
    ("renormalize", Scalar::Bool(true)),
    ("scaling", Scalar::Float(2.5)),
    ("ties", Scalar::Choice("low")),
    ("order", Scalar::Choice("preference")),
    ("groups", Scalar::Count(8)),
    ("kept_groups", Scalar::Count(4)),
    ("weights_dtype", Scalar::Choice("f32")),
];

const fn deepseek(label: &'static str, tensors: &'static [(&'static str, DType, &'static [usize])]) -> Case {
    Case { label, tensors, scalars: DEEPSEEK }
}

pub(crate) const MOE_TOPK: Operator = Operator {
    name: OP,
    family: "hk-moe",
    summary: "the k experts of each token by their scores, with weights and bits",
    args: &[
        LOGITS,
        BIAS,
        ArgSpec::output("weights", Tolerance::Elementwise, FLOATS, 2, "[T, k]"),
        ArgSpec::output("ids", Tolerance::Exact, &[DType::I32], 2, "[T, k]"),
        ArgSpec::output("bitmatrix", Tolerance::Exact, &[DType::I32], 2, "[words, T up to 32]").optional(),
    ],
    scalars: SCALARS,
    kernels: &[&kernels::TOPK],
    cases: &[
        deepseek(
            "DeepSeek-V3, 64 tokens",
            &[("logits", DType::F32, &[64, 256]), ("bias", DType::F32, &[256])],
        ),
        Case {
            label: "Qwen3 235B, 4096 tokens",
            tensors: &[("logits", DType::Bf16, &[4096, 128])],
            scalars: &[("scores", Scalar::Choice("softmax")), ("renormalize", Scalar::Bool(true))],
        },
        Case {
            label: "GPT-OSS 120B, 1024 tokens",
            tensors: &[("logits", DType::Bf16, &[1024, 128])],
            scalars: &[("k", Scalar::Count(4))],
        },
    ],
    bench: BenchSizes::Cases(&[
        deepseek(
            "DeepSeek-V3, 128 tokens",
            &[("logits", DType::F32, &[128, 256]), ("bias", DType::F32, &[256])],
        ),
        deepseek(
            "DeepSeek-V3, 16384 tokens",
            &[("logits", DType::F32, &[16_384, 256]), ("bias", DType::F32, &[256])],
        ),
        Case {
            label: "Qwen3 235B, 16384 tokens",
            tensors: &[("logits", DType::Bf16, &[16_384, 128])],
            scalars: &[("scores", Scalar::Choice("softmax")), ("renormalize", Scalar::Bool(true))],
        },
        Case {
            label: "GPT-OSS 120B, 16384 tokens",
            tensors: &[("logits", DType::Bf16, &[16_384, 128])],
            scalars: &[("k", Scalar::Count(4))],
        },
    ]),
    corners: &[
        deepseek("groups", &[("logits", DType::F32, &[9, 72]), ("bias", DType::F32, &[72])]),
        Case {
            label: "f16, square roots, with bits",
            tensors: &[
                ("logits", DType::F16, &[7, 129]),
                ("bias", DType::F32, &[129]),
                ("bitmatrix", DType::I32, &[8, 32]),
            ],
            scalars: &[("scores", Scalar::Choice("sqrt_softplus")), ("k", Scalar::Count(32))],
        },
        Case { label: "bf16", tensors: &[("logits", DType::Bf16, &[5, 256])], scalars: &[] },
        Case {
            label: "bf16, many experts",
            tensors: &[("logits", DType::Bf16, &[5, 1024]), ("bitmatrix", DType::I32, &[32, 32])],
            scalars: &[("scores", Scalar::Choice("softmax")), ("renormalize", Scalar::Bool(true))],
        },
        Case {
            label: "f16, many experts",
            tensors: &[("logits", DType::F16, &[5, 257])],
            scalars: &[("scores", Scalar::Choice("logits"))],
        },
        Case {
            label: "f32, many experts",
            tensors: &[("logits", DType::F32, &[5, 512]), ("bias", DType::F32, &[512])],
            scalars: &[("scores", Scalar::Choice("sigmoid"))],
        },
    ],
    outputs,
    run,
    reference: reference_topk,
    traffic: Traffic::once,
};

/// Shape of the tokens' choices, where they are as the operator takes them.
pub(super) fn checked<V: Described>(call: &Call<V>) -> Result<[usize; 3]> {
    let op = call.operator().name;
    let &[tokens, experts] = call.get("logits")?.shape() else {
        return Err(Error::shape(op, "logits", call.get("logits")?.shape(), "[T, E]"));
    };
    let k = call.size("k")?;
    let bias = call.optional("bias");
    check_options(op, experts, k, bias.is_some(), &options(call)?)?;
    if let Some(bias) = bias.filter(|bias| bias.shape() != [experts]) {
        return Err(Error::shape(op, "bias", bias.shape(), format!("[{experts}]")));
    }
    Ok([tokens, experts, k])
}

pub(super) fn options<V: Described>(call: &Call<V>) -> Result<TopkOptions> {
    Ok(TopkOptions {
        ties: if call.choice("ties")? == "low" { Ties::LowIndex } else { Ties::HighIndex },
        order: match call.choice("order")? {
            "preference" => SlotOrder::ByPreference,
            _ => SlotOrder::ByExpert,
        },
        ..choice_options(call)?
    })
}

/// What decides on the experts of a token and their weights, where neither ties nor their order are the caller's.
pub(super) fn choice_options<V: Described>(call: &Call<V>) -> Result<TopkOptions> {
    let (groups, kept) = (call.size("groups")?, call.size("kept_groups")?);
    Ok(TopkOptions {
        scores: match call.choice("scores")? {
            "logits" => Scores::Logits,
            "softmax" => Scores::Softmax,
            "sigmoid" => Scores::Sigmoid,
            "sqrt_softplus" => Scores::SqrtSoftplus,
            _ => Scores::SoftmaxChosen,
        },
        renormalize: call.bool("renormalize")?,
        scaling: call.float("scaling")? as f32,
        groups: ((groups, kept) != (1, 1)).then_some(Groups { groups, kept }),
        ..TopkOptions::default()
    })
}

pub(super) fn weights_dtype<V: Described>(call: &Call<V>) -> Result<DType> {
    Ok(if call.choice("weights_dtype")? == "f32" { DType::F32 } else { call.get("logits")?.dtype() })
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [tokens, experts, k] = checked(call)?;
    let mut all = vec![
        ("weights", TensorSpec::new(weights_dtype(call)?, [tokens, k])),
        ("ids", TensorSpec::new(DType::I32, [tokens, k])),
    ];
    if call.wants("bitmatrix") {
        all.push(("bitmatrix", TensorSpec::new(DType::I32, moe_bitmatrix_shape(tokens, experts))));
    }
    Ok(all)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    let (dtype, weights) = (inputs.get("logits")?.dtype(), weights_dtype(&inputs)?);
    with_float!(OP, "logits", dtype, T => match weights {
        DType::F32 => run_as::<T, f32>(stream, call),
        _ => run_as::<T, T>(stream, call),
    })
}

fn run_as<T: Float, W: Float>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let out = Choices::<W> {
        weights: outputs.take("weights")?,
        ids: outputs.take("ids")?,
        bitmatrix: outputs.take_optional("bitmatrix")?,
    };
    let (logits, bias) = (inputs.view::<T>("logits")?, inputs.optional_view("bias")?);
    crate::moe_topk(stream, logits, bias, out, &options(&inputs)?)
}

fn reference_topk(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let [tokens, experts, k] = checked(call)?;
    let bias = call.optional("bias").map(|bias| bias.to_f64());
    let logits = call.get("logits")?.to_f64();
    let want = reference::moe_topk(&logits, experts, bias.as_deref(), k, &options(call)?, 0.0);
    let host =
        |shape: [usize; 2], v: &[i32]| HostTensorF64::new(shape, v.iter().map(|&v| f64::from(v)).collect());
    let bits = reference::moe_bitmatrix_of(&want.ids, k, experts);
    let mut all = vec![
        ("weights", HostTensorF64::new([tokens, k], want.weights)),
        ("ids", host([tokens, k], &want.ids)),
    ];
    if call.wants("bitmatrix") {
        all.push(("bitmatrix", host(moe_bitmatrix_shape(tokens, experts), &bits)));
    }
    Ok(all)
}
