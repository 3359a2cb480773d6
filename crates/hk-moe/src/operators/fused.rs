//! `fused_moe`, `moe_op_e2e`.

use super::experts::{case, gate};
use super::mlp::{Gate, Mlp, Sums, Weights, quantized};
use super::topk::choice_options;
use super::{I32, experts, topk};
use crate::reference::{self, EXPERT_TERMS, ExpertProblem};
use crate::{
    Activation, ExpertGate, FloatView, FusedMoeInputs, FusedMoeProblem, FusedRouting, FusedScales,
    FusedWeight, GateOrder, GemmWeight, GroupScales, MxActivations, MxScaleView, SharedExperts, fused_moe,
    fused_moe_workspace, kernels,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16, f16};
use hk_gemm::Half;
use std::collections::HashSet;

const OP: &str = "fused_moe";
const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const FLOATS: &[DType] = super::FLOATS;
const WEIGHTS: &[DType] =
    &[DType::Bf16, DType::F16, DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3, DType::Fp4x2, DType::U8];
const SMALL: Sample = Sample::Normal { mean: 0.0, deviation: 0.5 };
/// Of scales, e8m0 or f32.
const SCALE: Sample = Sample::Uniform { low: 0.05, high: 0.3 };

const X: ArgSpec = ArgSpec::input("x", HALVES, 2, "[T, H]").sampled(SMALL);
const IDS: ArgSpec = ArgSpec::input("topk_ids", I32, 2, "[T, k]").sampled(Sample::RowsOf("w1"));
const TOPK_WEIGHTS: ArgSpec = ArgSpec::input("topk_weights", &[DType::F32], 2, "[T, k]")
    .sampled(Sample::Uniform { low: 0.0, high: 1.0 })
    .optional();

const fn scale(name: &'static str) -> ArgSpec {
    const SHAPE: &str =
        "[E, N], [E], [1], [E, N / 128, K / 128], of mxfp4 [E, N, K / 32], of u8 [E, N, groups]";
    ArgSpec::input(name, &[DType::F32, DType::E8M0, DType::Bf16, DType::F16], 1, SHAPE)
        .ranks(1, 3)
        .optional()
        .sampled(SCALE)
}

const fn zero(name: &'static str) -> ArgSpec {
    ArgSpec::input(name, &[DType::U8], 3, "[E, N, groups], int4 [E, N / 2, groups]")
        .optional()
        .sampled(Sample::Integers { low: 0, high: 256 })
}

const Y_DTYPE: ScalarSpec = ScalarSpec {
    name: "y_dtype",
    default: Scalar::Choice("auto"),
    choices: &["auto", "f32"],
    summary: "type of y; auto: as x. f32: partial sums of a rank, not rounded",
};
const GATE: ScalarSpec = ScalarSpec {
    name: "gate",
    default: Scalar::Choice("silu"),
    choices: &["silu", "silu_pairs", "swiglu_oai", "gelu"],
    summary: "function of gate and value; pairs and OAI: they are neighbours in w1, else halves",
};
const ACTIVATIONS: ScalarSpec = ScalarSpec {
    name: "activations",
    default: Scalar::Choice("auto"),
    choices: &["auto", "half", "fp8", "fp4"],
    summary: "type of activations by mxfp4 weights; auto: fp4",
};

const fn activations(name: &'static str) -> (&'static str, Scalar) {
    ("activations", Scalar::Choice(name))
}
const fn chosen(k: u64) -> (&'static str, Scalar) {
    ("k", Scalar::Count(k))
}

/// Layers of whole models: DeepSeek-V3 and Qwen3 235B on a rank of EP8, GPT-OSS 120B.
macro_rules! deepseek_v3 {
    ($tokens:literal) => {
        case!(concat!("DeepSeek-V3, EP8, fp8 blocks, T = ", $tokens), x: Bf16 [$tokens, 7168], w1: Fp8E4M3 [32, 4096, 7168], w2: Fp8E4M3 [32, 7168, 2048], w1_scale: F32 [32, 32, 56], w2_scale: F32 [32, 56, 16], logits: F32 [$tokens, 32], shared_w1: Fp8E4M3 [1, 4096, 7168], shared_w2: Fp8E4M3 [1, 7168, 2048], shared_w1_scale: F32 [1, 32, 56], shared_w2_scale: F32 [1, 56, 16]; chosen(8))
    };
}
macro_rules! qwen3 {
    ($tokens:literal) => {
        case!(concat!("Qwen3 235B, EP8, T = ", $tokens), x: Bf16 [$tokens, 4096], w1: Bf16 [16, 3072, 4096], w2: Bf16 [16, 4096, 1536], logits: F32 [$tokens, 16]; chosen(8))
    };
}
macro_rules! qwen3_fp8 {
    ($tokens:literal) => {
        case!(concat!("Qwen3 235B, EP8, fp8 blocks, T = ", $tokens), x: Bf16 [$tokens, 4096], w1: Fp8E4M3 [16, 3072, 4096], w2: Fp8E4M3 [16, 4096, 1536], w1_scale: F32 [16, 24, 32], w2_scale: F32 [16, 32, 12], logits: F32 [$tokens, 16]; chosen(8))
    };
}
macro_rules! gpt_oss {
    ($tokens:literal) => {
        case!(concat!("GPT-OSS 120B, mxfp4, T = ", $tokens), x: Bf16 [$tokens, 2880], w1: Fp4x2 [128, 5760, 1440], w2: Fp4x2 [128, 2880, 1440], w1_scale: E8M0 [128, 5760, 90], w2_scale: E8M0 [128, 2880, 90], w1_bias: F32 [128, 5760], w2_bias: F32 [128, 2880], logits: F32 [$tokens, 128]; chosen(4), gate("swiglu_oai"), activations("half"))
    };
}

pub(crate) const FUSED_MOE: Operator = Operator {
    name: OP,
    family: "hk-moe",
    summary: "a mixture-of-experts layer: routing, gated GEMM, GEMM, sum over the experts of each token",
    args: &[
        X,
        ArgSpec::input("w1", WEIGHTS, 3, "[E, 2 I, H]").sampled(SMALL),
        ArgSpec::input("w2", WEIGHTS, 3, "[E, H, I]").sampled(SMALL),
        scale("w1_scale"),
        scale("w2_scale"),
        ArgSpec::input("w1_bias", FLOATS, 2, "[E, 2 I]").optional(),
        ArgSpec::input("w2_bias", FLOATS, 2, "[E, H]").optional(),
        ArgSpec::input("logits", FLOATS, 2, "[T, all experts]").optional(),
        ArgSpec { optional: true, ..topk::BIAS },
        ArgSpec { optional: true, ..IDS },
        TOPK_WEIGHTS,
        ArgSpec::input("expert_map", I32, 1, "[all experts]")
            .optional()
            .sampled(Sample::Integers { low: -1, high: 2 }),
        zero("w1_zero"),
        zero("w2_zero"),
        ArgSpec::input("shared_w1", WEIGHTS, 3, "[1, 2 S, H]").optional().sampled(SMALL),
        ArgSpec::input("shared_w2", WEIGHTS, 3, "[1, H, S]").optional().sampled(SMALL),
        scale("shared_w1_scale"),
        scale("shared_w2_scale"),
        ArgSpec::input("residual", FLOATS, 2, "[T, H]").optional(),
        ArgSpec::output("y", Tolerance::Sum { terms: EXPERT_TERMS }, FLOATS, 2, "[T, H]"),
    ],
    scalars: &[
        topk::SCALARS[0],
        topk::SCALARS[1],
        topk::SCALARS[2],
        topk::SCALARS[3],
        topk::SCALARS[6],
        topk::SCALARS[7],
        GATE,
        ACTIVATIONS,
        Y_DTYPE,
    ],
    kernels: &[
        &kernels::EXPERTS,
        &kernels::EXPERTS_A8W8,
        &kernels::EXPERTS_A16W8,
        &kernels::EXPERTS_FP4,
        &kernels::ROUTING,
        &kernels::LISTS,
        &kernels::LISTS_QUANTIZE,
        &kernels::SUM,
    ],
    cases: &[
        case!("Qwen3 30B of narrow experts, 64 tokens", x: Bf16 [64, 512], w1: Bf16 [16, 256, 512], w2: Bf16 [16, 512, 128], logits: F32 [64, 16]; chosen(4)),
        case!("DeepSeek-V3, fp8 blocks, 2 local experts of 256, an eighth of each, 8 tokens", x: Bf16 [8, 7168], w1: Fp8E4M3Fnuz [2, 512, 7168], w2: Fp8E4M3Fnuz [2, 7168, 256], w1_scale: F32 [2, 4, 56], w2_scale: F32 [2, 56, 2], logits: F32 [8, 256], bias: F32 [256], expert_map: I32 [256], residual: Bf16 [8, 7168]; ("scores", Scalar::Choice("sigmoid")), ("renormalize", Scalar::Bool(true)), ("scaling", Scalar::Float(2.5)), ("groups", Scalar::Count(8)), ("kept_groups", Scalar::Count(4))),
        case!("DeepSeek-V3, fp8 blocks, 2 local experts of 256, an eighth of each, 8 tokens (OCP)", x: Bf16 [8, 7168], w1: Fp8E4M3 [2, 512, 7168], w2: Fp8E4M3 [2, 7168, 256], w1_scale: F32 [2, 4, 56], w2_scale: F32 [2, 56, 2], logits: F32 [8, 256], bias: F32 [256], expert_map: I32 [256], residual: Bf16 [8, 7168]; ("scores", Scalar::Choice("sigmoid")), ("renormalize", Scalar::Bool(true)), ("scaling", Scalar::Float(2.5)), ("groups", Scalar::Count(8)), ("kept_groups", Scalar::Count(4))),
        case!("GPT-OSS 120B, mxfp4, 2 local experts of 128, half of each, 8 tokens", x: Bf16 [8, 2880], w1: Fp4x2 [2, 2880, 1440], w2: Fp4x2 [2, 2880, 720], w1_scale: E8M0 [2, 2880, 90], w2_scale: E8M0 [2, 2880, 45], w1_bias: F32 [2, 2880], w2_bias: F32 [2, 2880], logits: F32 [8, 128], expert_map: I32 [128]; chosen(4), gate("swiglu_oai"), activations("half")),
    ],
    // A rank of EP8 has the gates of its own experts alone, from the tokens of all ranks: as many as if each of its own tokens had all
    // of its choices there.
    bench: BenchSizes::Cases(&[
        deepseek_v3!(1),
        deepseek_v3!(16),
        deepseek_v3!(64),
        deepseek_v3!(256),
        deepseek_v3!(1024),
        deepseek_v3!(4096),
        deepseek_v3!(16384),
        qwen3!(1),
        qwen3!(16),
        qwen3!(64),
        qwen3!(256),
        qwen3!(1024),
        qwen3!(4096),
        qwen3!(16384),
        qwen3_fp8!(1),
        qwen3_fp8!(16),
        qwen3_fp8!(64),
        qwen3_fp8!(256),
        qwen3_fp8!(1024),
        qwen3_fp8!(4096),
        gpt_oss!(1),
        gpt_oss!(16),
        gpt_oss!(64),
        gpt_oss!(256),
        gpt_oss!(1024),
        gpt_oss!(4096),
        gpt_oss!(16384),
    ]),
    corners: &[
        case!("bf16", x: Bf16 [20, 64], w1: Bf16 [6, 80, 64], w2: Bf16 [6, 64, 40], logits: F32 [20, 6]; chosen(2)),
        case!("bf16, groups, bias, residual", x: Bf16 [20, 64], w1: Bf16 [8, 80, 64], w2: Bf16 [8, 64, 40], logits: Bf16 [20, 8], bias: F32 [8], residual: Bf16 [20, 64]; chosen(2), ("scores", Scalar::Choice("sigmoid")), ("renormalize", Scalar::Bool(true)), ("scaling", Scalar::Float(2.5)), ("groups", Scalar::Count(4)), ("kept_groups", Scalar::Count(2))),
        case!("f16, expert map, biases, two launches of routing", x: F16 [300, 40], w1: F16 [2, 64, 40], w2: F16 [2, 40, 32], w1_bias: F16 [2, 64], w2_bias: F32 [2, 40], logits: F16 [300, 6], expert_map: I32 [6]; chosen(2), gate("swiglu_oai")),
        case!("bf16, chosen, expert map", x: Bf16 [20, 64], w1: Bf16 [4, 80, 64], w2: Bf16 [4, 64, 40], topk_ids: I32 [20, 3], topk_weights: F32 [20, 3], expert_map: I32 [5]; gate("gelu")),
        case!("i8, rows", x: Bf16 [20, 64], w1: I8 [6, 96, 64], w2: I8 [6, 64, 48], w1_scale: F32 [6, 96], w2_scale: F32 [6], logits: F32 [20, 6]; chosen(2)),
        case!("fp8, rows", x: Bf16 [20, 64], w1: Fp8E4M3Fnuz [6, 96, 64], w2: Fp8E4M3Fnuz [6, 64, 48], w1_scale: F32 [6, 96], w2_scale: F32 [6, 64], topk_ids: I32 [20, 2], topk_weights: F32 [20, 2]),
        case!("fp8, rows (OCP)", x: Bf16 [20, 64], w1: Fp8E4M3 [6, 96, 64], w2: Fp8E4M3 [6, 64, 48], w1_scale: F32 [6, 96], w2_scale: F32 [6, 64], topk_ids: I32 [20, 2], topk_weights: F32 [20, 2]),
        case!("fp8, blocks", x: F16 [20, 160], w1: Fp8E4M3Fnuz [4, 288, 160], w2: Fp8E4M3Fnuz [4, 160, 144], w1_scale: F32 [4, 3, 2], w2_scale: F32 [4, 2, 2], logits: F32 [20, 4]; chosen(2), gate("silu_pairs")),
        case!("fp8, blocks (OCP)", x: F16 [20, 160], w1: Fp8E4M3 [4, 288, 160], w2: Fp8E4M3 [4, 160, 144], w1_scale: F32 [4, 3, 2], w2_scale: F32 [4, 2, 2], logits: F32 [20, 4]; chosen(2), gate("silu_pairs")),
        case!("mxfp4", x: Bf16 [20, 64], w1: Fp4x2 [4, 128, 32], w2: Fp4x2 [4, 64, 32], w1_scale: E8M0 [4, 128, 2], w2_scale: E8M0 [4, 64, 2], logits: F32 [20, 4]; chosen(2)),
        case!("mxfp4 by fp8", x: Bf16 [20, 64], w1: Fp4x2 [4, 128, 32], w2: Fp4x2 [4, 64, 32], w1_scale: E8M0 [4, 128, 2], w2_scale: E8M0 [4, 64, 2], w1_bias: Bf16 [4, 128], logits: F32 [20, 4]; chosen(2), gate("swiglu_oai"), activations("fp8")),
        case!("mxfp4 by bf16", x: Bf16 [20, 64], w1: Fp4x2 [4, 128, 32], w2: Fp4x2 [4, 64, 32], w1_scale: E8M0 [4, 128, 2], w2_scale: E8M0 [4, 64, 2], logits: F32 [20, 4]; chosen(2), activations("half")),
        case!("bf16 by groups of u4, zero points, shared experts", x: Bf16 [20, 64], w1: U8 [4, 128, 32], w2: U8 [4, 64, 32], w1_scale: F32 [4, 128, 2], w2_scale: F32 [4, 64, 2], w1_zero: U8 [4, 64, 2], w2_zero: U8 [4, 32, 2], logits: F32 [20, 4], shared_w1: U8 [1, 64, 32], shared_w2: U8 [1, 64, 16], shared_w1_scale: F32 [1, 64, 2], shared_w2_scale: F32 [1, 64, 1]; chosen(2)),
        case!("f16 by groups of u8", x: F16 [20, 64], w1: U8 [4, 128, 64], w2: U8 [4, 64, 64], w1_scale: F16 [4, 128, 1], w2_scale: F16 [4, 64, 1], logits: F32 [20, 4]; chosen(2)),
        case!("bf16, shared experts, partial sums", x: Bf16 [20, 64], w1: Bf16 [2, 80, 64], w2: Bf16 [2, 64, 40], logits: F32 [20, 6], expert_map: I32 [6], shared_w1: Bf16 [1, 48, 64], shared_w2: Bf16 [1, 64, 24], residual: F32 [20, 64]; chosen(2), ("y_dtype", Scalar::Choice("f32"))),
        case!("i8, rows, shared experts, two launches of routing", x: Bf16 [270, 64], w1: I8 [6, 96, 64], w2: I8 [6, 64, 48], w1_scale: F32 [6, 96], w2_scale: F32 [6], logits: F32 [270, 6], shared_w1: I8 [1, 64, 64], shared_w2: I8 [1, 64, 32], shared_w1_scale: F32 [1, 64], shared_w2_scale: F32 [1]; chosen(2)),
        case!("fp8, blocks, shared experts, two launches of routing", x: F16 [260, 160], w1: Fp8E4M3Fnuz [3, 288, 160], w2: Fp8E4M3Fnuz [3, 160, 144], w1_scale: F32 [3, 3, 2], w2_scale: F32 [3, 2, 2], topk_ids: I32 [260, 1], topk_weights: F32 [260, 1], shared_w1: Fp8E4M3Fnuz [1, 64, 160], shared_w2: Fp8E4M3Fnuz [1, 160, 32], shared_w1_scale: F32 [1, 1, 2], shared_w2_scale: F32 [1, 2, 1]),
        case!("fp8, blocks, shared experts, two launches of routing (OCP)", x: F16 [260, 160], w1: Fp8E4M3 [3, 288, 160], w2: Fp8E4M3 [3, 160, 144], w1_scale: F32 [3, 3, 2], w2_scale: F32 [3, 2, 2], topk_ids: I32 [260, 1], topk_weights: F32 [260, 1], shared_w1: Fp8E4M3 [1, 64, 160], shared_w2: Fp8E4M3 [1, 160, 32], shared_w1_scale: F32 [1, 1, 2], shared_w2_scale: F32 [1, 2, 1]),
        case!("i8, blocks, two launches of routing", x: Bf16 [258, 160], w1: I8 [3, 64, 160], w2: I8 [3, 160, 32], w1_scale: F32 [3, 1, 2], w2_scale: F32 [3, 2, 1], logits: F32 [258, 3]; chosen(1)),
        case!("f16, i8, rows, two launches of routing", x: F16 [258, 64], w1: I8 [3, 64, 64], w2: I8 [3, 64, 32], w1_scale: F32 [3, 64], w2_scale: F32 [3], logits: F32 [258, 3]; chosen(1)),
        case!("f16, mxfp4, two launches of routing", x: F16 [257, 64], w1: Fp4x2 [3, 64, 32], w2: Fp4x2 [3, 64, 16], w1_scale: E8M0 [3, 64, 2], w2_scale: E8M0 [3, 64, 1], logits: F32 [257, 3]; chosen(1)),
        case!("mxfp4, shared experts, two launches of routing", x: Bf16 [260, 64], w1: Fp4x2 [4, 128, 32], w2: Fp4x2 [4, 64, 32], w1_scale: E8M0 [4, 128, 2], w2_scale: E8M0 [4, 64, 2], logits: F32 [260, 4], shared_w1: Fp4x2 [1, 64, 32], shared_w2: Fp4x2 [1, 64, 16], shared_w1_scale: E8M0 [1, 64, 2], shared_w2_scale: E8M0 [1, 64, 1]; chosen(1)),
    ],
    outputs,
    run,
    reference: reference_fused,
    traffic,
};

/// What a call's activations become.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Half,
    /// Weights in groups, of 32 columns or more.
    Groups,
    Rows,
    Blocks,
    MxHalf,
    MxFp8,
    MxFp4,
}

struct Sizes {
    problem: FusedMoeProblem,
    local: usize,
    kind: Kind,
    y: DType,
}

fn sizes<V: Described>(call: &Call<V>) -> Result<Sizes> {
    let (x, w1, w2) = (call.get("x")?, call.get("w1")?, call.get("w2")?);
    let [tokens, hidden] = [x.shape()[0], x.shape()[1]];
    // int4 weights are those whose rows are half as long.
    let int4 = w1.dtype() == DType::U8 && w1.shape()[2] * 2 == hidden;
    let packed = if w1.dtype() == DType::Fp4x2 || int4 { 2 } else { 1 };
    let (local, rows) = (w1.shape()[0], w1.shape()[1]);
    let inner = rows / 2;
    let element = w1.dtype().size_bytes();
    let on_16 =
        |columns: usize| columns.is_multiple_of(packed) && (columns / packed * element).is_multiple_of(16);
    if w1.shape()[2] * packed != hidden
        || rows % 2 != 0
        || !on_16(hidden)
        || !on_16(inner)
        || hidden == 0
        || inner == 0
    {
        return Err(Error::shape(OP, "w1", w1.shape(), format!("[E, 2 I, {hidden}] in 16-byte chunks")));
    }
    if w2.shape() != [local, hidden, inner / packed] || w2.dtype() != w1.dtype() {
        return Err(Error::shape(
            OP,
            "w2",
            w2.shape(),
            format!("[{local}, {hidden}, {}] as w1", inner / packed),
        ));
    }
    let map = call.optional("expert_map");
    let all = map.map_or(local, |map| map.shape()[0]);
    let given = |name| call.optional(name).is_some();
    let bad = |arg, what: String, want: &str| Err(Error::argument(OP, arg, what, want));
    let (experts, k) =
        match (call.optional("logits"), call.optional("topk_ids"), call.optional("topk_weights")) {
            (Some(logits), None, None) => {
                if logits.shape() != [tokens, all] {
                    return Err(Error::shape(OP, "logits", logits.shape(), format!("[{tokens}, {all}]")));
                }
                (all, call.size("k")?)
            }
            (None, Some(ids), Some(weights)) => {
                if ids.shape()[0] != tokens || weights.shape() != ids.shape() || given("bias") {
                    return bad(
                        "topk_ids",
                        format!("{:?}", ids.shape()),
                        "[T, k] with topk_weights, without bias",
                    );
                }
                (all, ids.shape()[1])
            }
            _ => return bad("logits", "given".into(), "logits, or topk_ids and topk_weights"),
        };
    if !(1..=1024).contains(&experts)
        || !(1..=experts.clamp(1, 32)).contains(&k) && given("logits")
        || !(1..=32).contains(&k)
    {
        return bad("k", k.to_string(), "1 to 32, and no more than the experts");
    }
    if let Some(logits) = call.optional("logits") {
        let bias = call.optional("bias");
        if bias.is_some_and(|b| b.shape() != [experts]) || !FLOATS.contains(&logits.dtype()) {
            return bad("bias", "another shape".into(), "[all experts]");
        }
        crate::topk::check_options(OP, experts, k, bias.is_some(), &choice_options(call)?)?;
    }
    let y = if call.choice("y_dtype")? == "f32" { DType::F32 } else { x.dtype() };
    for (name, want) in
        [("w1_bias", [local, rows]), ("w2_bias", [local, hidden]), ("residual", [tokens, hidden])]
    {
        if let Some(t) = call.optional(name)
            && (t.shape() != want || name == "residual" && t.dtype() != y)
        {
            return Err(Error::shape(OP, "w1_bias", t.shape(), format!("{want:?}: {name}")));
        }
    }
    let kind = kind(call, ["w1_scale", "w2_scale"], [local, rows, hidden, inner])?;
    let zeros = [("w1_zero", rows, hidden), ("w2_zero", hidden, inner)];
    for (name, n, k) in zeros {
        let Some(zero) = call.optional(name) else { continue };
        let of = |groups: usize| [local, n / if int4 { 2 } else { 1 }, k / groups];
        let fits = kind == Kind::Groups && n.is_multiple_of(2);
        if !fits || zero.shape() != of(group(call, "w1_scale", hidden)?) {
            return Err(Error::shape(OP, "w1_zero", zero.shape(), format!("{name} of groups")));
        }
    }
    let shared = match (call.optional("shared_w1"), call.optional("shared_w2")) {
        (None, None) => 0,
        (Some(a), Some(b)) => {
            let shared = a.shape()[1] / 2;
            let same = a.dtype() == w1.dtype() && b.dtype() == w1.dtype();
            let fits =
                a.shape() == [1, 2 * shared, hidden / packed] && b.shape() == [1, hidden, shared / packed];
            if !same || !fits || shared == 0 || !on_16(shared) {
                return Err(Error::shape(OP, "shared_w1", a.shape(), format!("[1, 2 S, {hidden}] as w1")));
            }
            let of_shared =
                self::kind(call, ["shared_w1_scale", "shared_w2_scale"], [1, 2 * shared, hidden, shared])?;
            let grouped = kind != Kind::Groups
                || group(call, "shared_w1_scale", hidden)? == group(call, "w1_scale", hidden)?;
            if of_shared != kind || !grouped {
                return bad("shared_w1_scale", "another kind".into(), "scales of the kind of w1's");
            }
            shared
        }
        _ => return bad("shared_w1", "given".into(), "shared_w1 and shared_w2, or neither"),
    };
    Ok(Sizes { problem: FusedMoeProblem { tokens, k, experts, hidden, inner, shared }, local, kind, y })
}

/// Columns that share a scale.
fn group<V: Described>(call: &Call<V>, scale: &'static str, k: usize) -> Result<usize> {
    Ok(k / call.get(scale)?.shape().last().copied().unwrap_or(1).max(1))
}

fn kind<V: Described>(
    call: &Call<V>,
    scales: [&'static str; 2],
    [local, rows, hidden, inner]: [usize; 4],
) -> Result<Kind> {
    let w = call.get("w1")?.dtype();
    let named = call.choice("activations")?;
    let refuse = |what: &str| Err(Error::argument(OP, "w1_scale", what, "scales that fit the weights"));
    if named != "auto" && w != DType::Fp4x2 {
        return Err(Error::argument(OP, "activations", named, "auto, unless weights are mxfp4"));
    }
    let (first, second) = (call.optional(scales[0]), call.optional(scales[1]));
    if matches!(w, DType::Bf16 | DType::F16) {
        let same = w == call.get("x")?.dtype();
        return if first.is_none() && second.is_none() && same { Ok(Kind::Half) } else { refuse("given") };
    }
    let (Some(first), Some(second)) = (first, second) else { return refuse("none") };
    if w == DType::U8 {
        let group = group(call, scales[0], hidden)?;
        let of = |scale: &V, n: usize, k: usize| {
            let same = scale.dtype() == DType::F32 || call.get("x").is_ok_and(|x| x.dtype() == scale.dtype());
            scale.shape() == [local, n, k / group] && k.is_multiple_of(group) && same
        };
        let fits =
            group.is_power_of_two() && group >= 32 && of(first, rows, hidden) && of(second, hidden, inner);
        return if fits { Ok(Kind::Groups) } else { refuse("scales of other groups") };
    }
    let of = |scale: &V, n: usize, k: usize| match (w, scale.shape()) {
        (DType::Fp4x2, shape) => shape == [local, n, k / 32] && scale.dtype() == DType::E8M0,
        (_, shape @ [_, _, _]) => {
            shape == [local, n.div_ceil(128), k.div_ceil(128)] && scale.dtype() == DType::F32
        }
        (_, shape) => {
            (shape == [local, n] || shape == [local] || shape == [1]) && scale.dtype() == DType::F32
        }
    };
    if !of(first, rows, hidden)
        || !of(second, hidden, inner)
        || (first.shape().len() == 3) != (second.shape().len() == 3)
    {
        return refuse("scales of other shapes");
    }
    if w == DType::Fp4x2 {
        if hidden % 32 != 0 || inner % 32 != 0 {
            return refuse("blocks that do not fit");
        }
        return Ok(match named {
            "half" => Kind::MxHalf,
            "fp8" => Kind::MxFp8,
            _ => Kind::MxFp4,
        });
    }
    Ok(if first.shape().len() == 3 { Kind::Blocks } else { Kind::Rows })
}

fn gate_of<V: Described>(call: &Call<V>) -> Result<ExpertGate> {
    Ok(match call.choice("gate")? {
        "silu_pairs" => ExpertGate::silu(GateOrder::Pairs),
        "swiglu_oai" => ExpertGate::swiglu_oai(),
        "gelu" => ExpertGate { activation: Activation::Gelu, ..ExpertGate::silu(GateOrder::Halves) },
        _ => ExpertGate::silu(GateOrder::Halves),
    })
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let Sizes { problem, y, .. } = sizes(call)?;
    Ok(vec![("y", TensorSpec::new(y, [problem.tokens, problem.hidden]))])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    let y = sizes(&inputs)?.y;
    match inputs.get("x")?.dtype() {
        DType::Bf16 if y == DType::F32 => run_of::<bf16, f32>(stream, call),
        DType::Bf16 => run_of::<bf16, bf16>(stream, call),
        _ if y == DType::F32 => run_of::<f16, f32>(stream, call),
        _ => run_of::<f16, f16>(stream, call),
    }
}

fn run_of<T: Half + FusedWeight<T>, Y: Float>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    match call.split().0.get("w1")?.dtype() {
        DType::I8 => run_as::<T, i8, Y>(stream, call),
        DType::U8 => run_as::<T, u8, Y>(stream, call),
        DType::Fp8E4M3 => run_as::<T, Fp8E4M3, Y>(stream, call),
        DType::Fp8E4M3Fnuz => run_as::<T, Fp8E4M3Fnuz, Y>(stream, call),
        DType::Fp4x2 => run_as::<T, hk_core::Fp4x2, Y>(stream, call),
        w if w == T::DTYPE => run_as::<T, T, Y>(stream, call),
        other => Err(Error::dtype(OP, "w1", other, "the type of x, i8, fp8, mxfp4, u8")),
    }
}

fn float<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<Option<FloatView<'a>>> {
    experts::float(inputs, name)
}

fn scales_of<'a>(
    inputs: &Inputs<'a>,
    kind: Kind,
    hidden: usize,
    [w1, w2]: [&'static str; 2],
    zeros: Option<[&'static str; 2]>,
) -> Result<FusedScales<'a>> {
    Ok(match kind {
        Kind::Half => FusedScales::None,
        Kind::Groups => {
            let of = |i: usize| -> Result<GroupScales<'a>> {
                let name = [w1, w2][i];
                let scale = float(inputs, name)?.ok_or_else(|| Error::argument(OP, name, "none", "given"))?;
                let zero = zeros.map(|names| inputs.optional_view(names[i])).transpose()?.flatten();
                Ok(GroupScales { scale, zero })
            };
            let bits = if inputs.get("w1")?.shape()[2] == hidden { 8 } else { 4 };
            FusedScales::Groups { bits, group: group(inputs, w1, hidden)?, w1: of(0)?, w2: of(1)? }
        }
        Kind::Rows => FusedScales::Rows { w1: inputs.view(w1)?, w2: inputs.view(w2)? },
        Kind::Blocks => FusedScales::Blocks { w1: inputs.view(w1)?, w2: inputs.view(w2)? },
        mx => FusedScales::Mx {
            w1: MxScaleView::Rows(inputs.view(w1)?),
            w2: MxScaleView::Rows(inputs.view(w2)?),
            activations: match mx {
                Kind::MxHalf => MxActivations::Half,
                Kind::MxFp8 => MxActivations::Fp8,
                _ => MxActivations::Fp4,
            },
        },
    })
}

fn run_as<T: Half, W: FusedWeight<T>, Y: Float>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let Sizes { problem, kind, .. } = sizes(&inputs)?;
    let hidden = problem.hidden;
    let shared = if problem.shared == 0 {
        None
    } else {
        let names = ["shared_w1_scale", "shared_w2_scale"];
        Some(SharedExperts {
            w1: GemmWeight::Rows(inputs.view("shared_w1")?),
            w2: GemmWeight::Rows(inputs.view("shared_w2")?),
            scales: scales_of(&inputs, kind, hidden, names, None)?,
        })
    };
    let scales = scales_of(&inputs, kind, hidden, ["w1_scale", "w2_scale"], Some(["w1_zero", "w2_zero"]))?;
    let routing = match float(&inputs, "logits")? {
        Some(logits) => FusedRouting::Logits {
            logits,
            bias: inputs.optional_view("bias")?,
            k: problem.k,
            topk: choice_options(&inputs)?,
        },
        None => FusedRouting::Chosen {
            ids: inputs.view("topk_ids")?,
            weights: inputs.view("topk_weights")?,
            experts: problem.experts,
        },
    };
    let all = FusedMoeInputs::<T, W, Y> {
        x: inputs.view("x")?,
        w1: GemmWeight::Rows(inputs.view("w1")?),
        w2: GemmWeight::Rows(inputs.view("w2")?),
        scales,
        w1_bias: float(&inputs, "w1_bias")?,
        w2_bias: float(&inputs, "w2_bias")?,
        gate: gate_of(&inputs)?,
        routing,
        expert_map: inputs.optional_view("expert_map")?,
        shared,
        residual: inputs.optional_view("residual")?,
    };
    let workspace = outputs.workspace(stream, fused_moe_workspace(&problem, None))?;
    fused_moe(stream, all, outputs.take("y")?, workspace)
}

/// The experts that a call's tokens choose, and their weights.
fn choices(call: &HostCall, experts: usize, k: usize) -> Result<(Vec<i32>, Vec<f64>)> {
    let optional = |name| call.optional(name).map(|t| t.to_f64());
    let Some(logits) = optional("logits") else {
        let ids = call.get("topk_ids")?.elements::<i32>()?;
        return Ok((ids, optional("topk_weights").unwrap_or_default()));
    };
    let bias = optional("bias");
    let chosen = reference::moe_topk(&logits, experts, bias.as_deref(), k, &choice_options(call)?, 0.0);
    Ok((chosen.ids, chosen.weights))
}

/// The gates of a call, in their order: those of experts of other ranks, and of ids outside the experts, have none.
fn gates(call: &HostCall, sizes: &Sizes) -> Result<Vec<Option<Gate>>> {
    let FusedMoeProblem { experts, k, .. } = sizes.problem;
    let (ids, weights) = choices(call, experts, k)?;
    let map = call.optional("expert_map").map(|map| map.elements::<i32>()).transpose()?;
    let matrix = |id: i32| {
        let id = usize::try_from(id).ok().filter(|&id| id < experts)?;
        let matrix = map.as_ref().map_or(id as i32, |map| map[id]);
        usize::try_from(matrix).ok().filter(|&m| m < sizes.local)
    };
    let gate = |(at, (&id, &weight)): (usize, (&i32, &f64))| {
        Some(Gate { token: at / k, expert: matrix(id)?, weight })
    };
    Ok(ids.iter().zip(&weights).enumerate().map(gate).collect())
}

/// Weights, scales and biases of experts that no token chooses are not read.
fn traffic(call: &HostCall) -> Traffic {
    let mut traffic = Traffic::once(call);
    let Ok(sizes) = sizes(call) else { return traffic };
    let Ok(gates) = gates(call, &sizes) else { return traffic };
    let chosen: HashSet<usize> = gates.iter().flatten().map(|gate| gate.expert).collect();
    let idle = sizes.local - chosen.len();
    let of_experts =
        ["w1", "w2", "w1_scale", "w2_scale", "w1_zero", "w2_zero", "w1_bias", "w2_bias"].into_iter();
    let of_experts = of_experts.filter_map(|name| call.optional(name));
    for tensor in of_experts.filter(|tensor| tensor.shape()[0] == sizes.local) {
        traffic.read -= (tensor.bytes().len() / sizes.local * idle) as u64;
    }
    traffic
}

fn reference_fused(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let sizes = sizes(call)?;
    let FusedMoeProblem { tokens, k, hidden, inner, shared, .. } = sizes.problem;
    let dtype = call.get("x")?.dtype();
    let of_w = match call.get("w1")?.dtype() {
        // The emulated targets have both encodings; the choice is the device's, and the wider step bounds either.
        DType::Fp4x2 => DType::Fp8E4M3Fnuz,
        w => w,
    };
    let optional = |name| call.optional(name).map(|t| t.to_f64());
    let gates = gates(call, &sizes)?;
    let x = call.get("x")?.to_f64();
    let a = quantized(sizes.kind, of_w, &x, hidden);
    let (w1_bias, w2_bias) = (optional("w1_bias"), optional("w2_bias"));
    let mlp = Mlp {
        kind: sizes.kind,
        of_w,
        dtype,
        x: &x,
        a: &a,
        gate: gate_of(call)?,
        w1: Weights::new(call, ["w1", "w1_scale", "w1_zero"], [2 * inner, hidden])?,
        w2: Weights::new(call, ["w2", "w2_scale", "w2_zero"], [hidden, inner])?,
        w1_bias: w1_bias.as_deref(),
        w2_bias: w2_bias.as_deref(),
    };
    let present: Vec<Gate> = gates.iter().flatten().copied().collect();
    let mut of_gates = mlp.outputs(&present)?.into_iter();
    let mut of_shared = if shared == 0 {
        vec![].into_iter()
    } else {
        let w1 = Weights::new(call, ["shared_w1", "shared_w1_scale", ""], [2 * shared, hidden])?;
        let w2 = Weights::new(call, ["shared_w2", "shared_w2_scale", ""], [hidden, shared])?;
        let all: Vec<_> = (0..tokens).map(|token| Gate { token, expert: 0, weight: 1.0 }).collect();
        Mlp { w1, w2, w1_bias: None, w2_bias: None, ..mlp }.outputs(&all)?.into_iter()
    };
    let mut y = optional("residual").unwrap_or_else(|| vec![0.0; tokens * hidden]);
    let mut magnitudes: Vec<f64> = y.iter().map(|residual| residual.abs()).collect();
    for (token, gates) in gates.chunks(k).enumerate() {
        let terms = of_gates.by_ref().take(gates.iter().flatten().count()).chain(of_shared.next());
        for Sums { values, reach } in terms {
            let at = token * hidden;
            y[at..][..hidden].iter_mut().zip(values).for_each(|(y, v)| *y += v);
            magnitudes[at..][..hidden].iter_mut().zip(reach).for_each(|(m, v)| *m += v);
        }
    }
    Ok(vec![("y", HostTensorF64::new([tokens, hidden], y).with_magnitudes(magnitudes))])
}

const E2E: &str = "moe_op_e2e";

pub(crate) const MOE_OP_E2E: Operator = Operator {
    name: E2E,
    summary: "y[g] = topk_weights[g] (silu(gate) value) w2[expert of g]^T, of gates and values by w1; lists included",
    args: &[
        X,
        ArgSpec::input("w1", HALVES, 3, "[E, 2 I, K]").sampled(SMALL),
        ArgSpec::input("w2", HALVES, 3, "[E, K, I]").sampled(SMALL),
        IDS,
        TOPK_WEIGHTS,
        ArgSpec::output("y", Tolerance::Sum { terms: EXPERT_TERMS }, FLOATS, 2, "[T k, K]"),
    ],
    scalars: &[experts::BLOCK, experts::Y_DTYPE],
    kernels: &[&kernels::EXPERTS, &kernels::LISTS],
    cases: &[
        case!("8 experts, 64 tokens", x: Bf16 [64, 512], w1: Bf16 [8, 256, 512], w2: Bf16 [8, 512, 128], topk_ids: I32 [64, 2]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3 235B, EP8, 16 tokens", x: Bf16 [16, 4096], w1: Bf16 [16, 3072, 4096], w2: Bf16 [16, 4096, 1536], topk_ids: I32 [16, 8]; ("block_size", Scalar::Count(16))),
    ]),
    corners: &[
        case!("bf16", x: Bf16 [20, 64], w1: Bf16 [4, 80, 64], w2: Bf16 [4, 64, 40], topk_ids: I32 [20, 2], topk_weights: F32 [20, 2]),
        case!("f16, 16 rows", x: F16 [9, 1056], w1: F16 [4, 1616, 1056], w2: F16 [4, 1056, 808], topk_ids: I32 [3, 3]; ("block_size", Scalar::Count(16)), ("y_dtype", Scalar::Choice("f32"))),
    ],
    outputs: |call| {
        let [tokens, k, ..] = e2e_sizes(call)?;
        let dtype = call.choice("y_dtype")?.parse()?;
        Ok(vec![("y", TensorSpec::new(dtype, [tokens * k, call.get("x")?.shape()[1]]))])
    },
    run: |stream, call| {
        let (inputs, _) = call.split();
        let y = inputs.choice("y_dtype")?.parse()?;
        match inputs.get("x")?.dtype() {
            DType::F16 => hk_core::with_float!(E2E, "y", y, Y => run_e2e::<f16, Y>(stream, call)),
            _ => hk_core::with_float!(E2E, "y", y, Y => run_e2e::<bf16, Y>(stream, call)),
        }
    },
    reference: reference_e2e,
    traffic: Traffic::once,
    ..FUSED_MOE
};

/// Tokens, k, rows of x, experts, inner width.
fn e2e_sizes<V: Described>(call: &Call<V>) -> Result<[usize; 5]> {
    let (x, w1, w2, ids) = (call.get("x")?, call.get("w1")?, call.get("w2")?, call.get("topk_ids")?.shape());
    let ([tokens, k], [rows, hidden]) = ([ids[0], ids[1]], [x.shape()[0], x.shape()[1]]);
    let (experts, inner) = (w1.shape()[0], w1.shape()[1] / 2);
    let widths = [hidden, inner].iter().all(|n| *n > 0 && n.is_multiple_of(8));
    if w1.shape() != [experts, 2 * inner, hidden]
        || w1.dtype() != x.dtype()
        || !widths
        || !(1..=1024).contains(&experts)
    {
        return Err(Error::shape(E2E, "w1", w1.shape(), format!("[E, 2 I, {hidden}] as x, multiples of 8")));
    }
    if w2.shape() != [experts, hidden, inner] || w2.dtype() != x.dtype() {
        return Err(Error::shape(E2E, "w2", w2.shape(), format!("[{experts}, {hidden}, {inner}] as x")));
    }
    if !(1..=32).contains(&k) || rows != tokens && rows != tokens * k {
        return Err(Error::shape(E2E, "topk_ids", ids, "[T, k], k from 1 to 32, T or T k rows of x"));
    }
    if call.optional("topk_weights").is_some_and(|w| w.shape() != ids) {
        return Err(Error::shape(E2E, "topk_weights", ids, "as topk_ids"));
    }
    let block = call.size("block_size")?;
    if !(16..=256).contains(&block) || !block.is_power_of_two() {
        return Err(Error::argument(E2E, "block_size", block, "16, 32, 64, 128 or 256"));
    }
    Ok([tokens, k, rows, experts, inner])
}

fn run_e2e<T: Half, Y: Float>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let [tokens, k, _, experts, inner] = e2e_sizes(&inputs)?;
    let block = inputs.size("block_size")?;
    let of = [tokens, k, experts, block];
    // The lists, then on 16 bytes h.
    let len = experts::sorted_len(of).next_multiple_of(4);
    let words = (tokens * k * inner * size_of::<T>()).div_ceil(4);
    let (lists, h) = outputs.workspace::<i32>(stream, len + words)?.split_at(0, len)?;
    let rows = experts::sorted(stream, &inputs, lists, of)?;
    let h = h.cast::<T>(E2E, "h")?.reshape_front(E2E, "h", [tokens * k, inner])?;
    let w = [GemmWeight::Rows(inputs.view("w1")?), GemmWeight::Rows(inputs.view("w2")?)];
    let weights = inputs.optional_view("topk_weights")?;
    crate::moe_op_e2e(stream, inputs.view::<T>("x")?, w, weights, rows, h, outputs.take::<Y>("y")?)
}

fn reference_e2e(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let [tokens, k, x_rows, experts, inner] = e2e_sizes(call)?;
    let (x, w1, w2) = (call.get("x")?, call.get("w1")?.to_f64(), call.get("w2")?.to_f64());
    let (dtype, hidden) = (x.dtype(), x.shape()[1]);
    let x = x.to_f64();
    let round = |x: f64| match dtype {
        DType::F16 => <f16 as Float>::from_f64(x).to_f64(),
        _ => <bf16 as Float>::from_f64(x).to_f64(),
    };
    let ids = call.get("topk_ids")?.elements::<i32>()?;
    let weights = call.optional("topk_weights").map(|w| w.to_f64());
    let per_token = if x_rows == ids.len() { 1 } else { k };
    let up = ExpertProblem {
        a: &x,
        w: &w1,
        k: hidden,
        w_rows: 2 * inner,
        bias: None,
        weights: None,
        weight_first: false,
        gate: Some(ExpertGate::silu(GateOrder::Halves)),
        activation: None,
        round: None,
    };
    let (mut y, mut magnitudes) = (vec![0.0; tokens * k * hidden], vec![0.0; tokens * k * hidden]);
    for (gate, &id) in ids.iter().enumerate() {
        let Some(expert) = usize::try_from(id).ok().filter(|&id| id < experts) else { continue };
        let (h, of_h) = reference::expert_gemm(&up, &[Some((gate / per_token, expert))]);
        let weight = weights.as_ref().map_or(1.0, |w| w[gate]);
        for col in 0..hidden {
            let w = &w2[(expert * hidden + col) * inner..][..inner];
            let at = gate * hidden + col;
            for i in 0..inner {
                let reach = EXPERT_TERMS * of_h[i];
                let off = (round(h[i] + reach) - round(h[i] - reach)) / EXPERT_TERMS;
                y[at] += round(h[i]) * w[i] * weight;
                magnitudes[at] += ((round(h[i]) * w[i]).abs() + off * w[i].abs()) * weight.abs();
            }
        }
    }
    Ok(vec![("y", HostTensorF64::new([tokens * k, hidden], y).with_magnitudes(magnitudes))])
}
