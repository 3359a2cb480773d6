//! `fused_moe`, `moe_op_e2e`.

use super::experts::{case, gate};
use super::topk::choice_options;
use super::{I32, experts, topk};
use crate::reference::{self, EXPERT_TERMS, ExpertProblem};
use crate::{
    Activation, ExpertGate, FloatView, FusedMoeInputs, FusedMoeProblem, FusedRouting, FusedScales,
    FusedWeight, GateOrder, GemmWeight, MxActivations, MxScaleView, fused_moe, fused_moe_workspace, kernels,
};
use hk_core::quant::{BlockRule, BlockScale, Quantized, group_scale, linear_scale};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Fp4Rounding, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16, f16};
use hk_gemm::Half;

const OP: &str = "fused_moe";
const HALVES: &[DType] = &[DType::Bf16, DType::F16];
const FLOATS: &[DType] = super::FLOATS;
const WEIGHTS: &[DType] =
    &[DType::Bf16, DType::F16, DType::I8, DType::Fp8E4M3Fnuz, DType::Fp8E4M3, DType::Fp4x2];
const SMALL: Sample = Sample::Normal { mean: 0.0, deviation: 0.5 };
/// Of scales, e8m0 or f32.
const SCALE: Sample = Sample::Uniform { low: 0.05, high: 0.3 };

const X: ArgSpec = ArgSpec::input("x", HALVES, 2, "[T, H]").sampled(SMALL);
const IDS: ArgSpec = ArgSpec::input("topk_ids", I32, 2, "[T, k]").sampled(Sample::RowsOf("w1"));
const TOPK_WEIGHTS: ArgSpec = ArgSpec::input("topk_weights", &[DType::F32], 2, "[T, k]")
    .sampled(Sample::Uniform { low: 0.0, high: 1.0 })
    .optional();

const fn scale(name: &'static str) -> ArgSpec {
    const SHAPE: &str = "[E, N], [E], [1], [E, N / 128, K / 128], of mxfp4 [E, N, K / 32]";
    ArgSpec::input(name, &[DType::F32, DType::E8M0], 1, SHAPE).ranks(1, 3).optional().sampled(SCALE)
}

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
        ArgSpec::input("residual", HALVES, 2, "[T, H]").optional(),
        ArgSpec::output("y", Tolerance::Sum { terms: EXPERT_TERMS }, HALVES, 2, "[T, H]"),
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
    ],
    kernels: &[
        &kernels::EXPERTS,
        &kernels::EXPERTS_A8W8,
        &kernels::EXPERTS_FP4,
        &kernels::ROUTING,
        &kernels::LISTS,
        &kernels::SUM,
    ],
    cases: &[
        case!("Qwen3 30B of narrow experts, 64 tokens", x: Bf16 [64, 512], w1: Bf16 [16, 256, 512], w2: Bf16 [16, 512, 128], logits: F32 [64, 16]; chosen(4)),
        case!("DeepSeek-V3, fp8 blocks, 2 local experts of 256, an eighth of each, 8 tokens", x: Bf16 [8, 7168], w1: Fp8E4M3Fnuz [2, 512, 7168], w2: Fp8E4M3Fnuz [2, 7168, 256], w1_scale: F32 [2, 4, 56], w2_scale: F32 [2, 56, 2], logits: F32 [8, 256], bias: F32 [256], expert_map: I32 [256], residual: Bf16 [8, 7168]; ("scores", Scalar::Choice("sigmoid")), ("renormalize", Scalar::Bool(true)), ("scaling", Scalar::Float(2.5)), ("groups", Scalar::Count(8)), ("kept_groups", Scalar::Count(4))),
        case!("DeepSeek-V3, fp8 blocks, 2 local experts of 256, an eighth of each, 8 tokens (OCP)", x: Bf16 [8, 7168], w1: Fp8E4M3 [2, 512, 7168], w2: Fp8E4M3 [2, 7168, 256], w1_scale: F32 [2, 4, 56], w2_scale: F32 [2, 56, 2], logits: F32 [8, 256], bias: F32 [256], expert_map: I32 [256], residual: Bf16 [8, 7168]; ("scores", Scalar::Choice("sigmoid")), ("renormalize", Scalar::Bool(true)), ("scaling", Scalar::Float(2.5)), ("groups", Scalar::Count(8)), ("kept_groups", Scalar::Count(4))),
        case!("GPT-OSS 120B, mxfp4, 2 local experts of 128, half of each, 8 tokens", x: Bf16 [8, 2880], w1: Fp4x2 [2, 2880, 1440], w2: Fp4x2 [2, 2880, 720], w1_scale: E8M0 [2, 2880, 90], w2_scale: E8M0 [2, 2880, 45], w1_bias: F32 [2, 2880], w2_bias: F32 [2, 2880], logits: F32 [8, 128], expert_map: I32 [128]; chosen(4), gate("swiglu_oai"), activations("half")),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3 235B, EP8, 64 tokens", x: Bf16 [64, 4096], w1: Bf16 [16, 3072, 4096], w2: Bf16 [16, 4096, 1536], logits: F32 [64, 16]),
        case!("Qwen3 235B, EP8, 4096 tokens", x: Bf16 [4096, 4096], w1: Bf16 [16, 3072, 4096], w2: Bf16 [16, 4096, 1536], logits: F32 [4096, 16]),
        case!("DeepSeek-V3, EP8, fp8 blocks, 64 tokens", x: Bf16 [64, 7168], w1: Fp8E4M3 [32, 4096, 7168], w2: Fp8E4M3 [32, 7168, 2048], w1_scale: F32 [32, 32, 56], w2_scale: F32 [32, 56, 16], logits: F32 [64, 32]),
        case!("DeepSeek-V3, EP8, fp8 blocks, 4096 tokens", x: Bf16 [4096, 7168], w1: Fp8E4M3 [32, 4096, 7168], w2: Fp8E4M3 [32, 7168, 2048], w1_scale: F32 [32, 32, 56], w2_scale: F32 [32, 56, 16], logits: F32 [4096, 32]),
        case!("GPT-OSS 120B, mxfp4, 128 tokens", x: Bf16 [128, 2880], w1: Fp4x2 [128, 5760, 1440], w2: Fp4x2 [128, 2880, 1440], w1_scale: E8M0 [128, 5760, 90], w2_scale: E8M0 [128, 2880, 90], w1_bias: F32 [128, 5760], w2_bias: F32 [128, 2880], logits: F32 [128, 128]; chosen(4), gate("swiglu_oai"), activations("half")),
    ]),
    corners: &[
        case!("bf16", x: Bf16 [20, 64], w1: Bf16 [6, 80, 64], w2: Bf16 [6, 64, 40], logits: F32 [20, 6]; chosen(2)),
        case!("bf16, groups, bias, residual", x: Bf16 [20, 64], w1: Bf16 [8, 80, 64], w2: Bf16 [8, 64, 40], logits: Bf16 [20, 8], bias: F32 [8], residual: Bf16 [20, 64]; chosen(2), ("scores", Scalar::Choice("sigmoid")), ("renormalize", Scalar::Bool(true)), ("scaling", Scalar::Float(2.5)), ("groups", Scalar::Count(4)), ("kept_groups", Scalar::Count(2))),
        case!("f16, expert map, biases, three launches of routing", x: F16 [300, 40], w1: F16 [2, 64, 40], w2: F16 [2, 40, 32], w1_bias: F16 [2, 64], w2_bias: F32 [2, 40], logits: F16 [300, 6], expert_map: I32 [6]; chosen(2), gate("swiglu_oai")),
        case!("bf16, chosen, expert map", x: Bf16 [20, 64], w1: Bf16 [4, 80, 64], w2: Bf16 [4, 64, 40], topk_ids: I32 [20, 3], topk_weights: F32 [20, 3], expert_map: I32 [5]; gate("gelu")),
        case!("i8, rows", x: Bf16 [20, 64], w1: I8 [6, 96, 64], w2: I8 [6, 64, 48], w1_scale: F32 [6, 96], w2_scale: F32 [6], logits: F32 [20, 6]; chosen(2)),
        case!("fp8, rows", x: Bf16 [20, 64], w1: Fp8E4M3Fnuz [6, 96, 64], w2: Fp8E4M3Fnuz [6, 64, 48], w1_scale: F32 [6, 96], w2_scale: F32 [6, 64], topk_ids: I32 [20, 2], topk_weights: F32 [20, 2]),
        case!("fp8, rows (OCP)", x: Bf16 [20, 64], w1: Fp8E4M3 [6, 96, 64], w2: Fp8E4M3 [6, 64, 48], w1_scale: F32 [6, 96], w2_scale: F32 [6, 64], topk_ids: I32 [20, 2], topk_weights: F32 [20, 2]),
        case!("fp8, blocks", x: F16 [20, 160], w1: Fp8E4M3Fnuz [4, 288, 160], w2: Fp8E4M3Fnuz [4, 160, 144], w1_scale: F32 [4, 3, 2], w2_scale: F32 [4, 2, 2], logits: F32 [20, 4]; chosen(2), gate("silu_pairs")),
        case!("fp8, blocks (OCP)", x: F16 [20, 160], w1: Fp8E4M3 [4, 288, 160], w2: Fp8E4M3 [4, 160, 144], w1_scale: F32 [4, 3, 2], w2_scale: F32 [4, 2, 2], logits: F32 [20, 4]; chosen(2), gate("silu_pairs")),
        case!("mxfp4", x: Bf16 [20, 64], w1: Fp4x2 [4, 128, 32], w2: Fp4x2 [4, 64, 32], w1_scale: E8M0 [4, 128, 2], w2_scale: E8M0 [4, 64, 2], logits: F32 [20, 4]; chosen(2)),
        case!("mxfp4 by fp8", x: Bf16 [20, 64], w1: Fp4x2 [4, 128, 32], w2: Fp4x2 [4, 64, 32], w1_scale: E8M0 [4, 128, 2], w2_scale: E8M0 [4, 64, 2], w1_bias: Bf16 [4, 128], logits: F32 [20, 4]; chosen(2), gate("swiglu_oai"), activations("fp8")),
        case!("mxfp4 by bf16", x: Bf16 [20, 64], w1: Fp4x2 [4, 128, 32], w2: Fp4x2 [4, 64, 32], w1_scale: E8M0 [4, 128, 2], w2_scale: E8M0 [4, 64, 2], logits: F32 [20, 4]; chosen(2), activations("half")),
    ],
    outputs,
    run,
    reference: reference_fused,
    traffic: Traffic::once,
};

/// What a call's activations become.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Half,
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
}

fn sizes<V: Described>(call: &Call<V>) -> Result<Sizes> {
    let (x, w1, w2) = (call.get("x")?, call.get("w1")?, call.get("w2")?);
    let [tokens, hidden] = [x.shape()[0], x.shape()[1]];
    let packed = if w1.dtype() == DType::Fp4x2 { 2 } else { 1 };
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
    for (name, want) in
        [("w1_bias", [local, rows]), ("w2_bias", [local, hidden]), ("residual", [tokens, hidden])]
    {
        if let Some(t) = call.optional(name)
            && (t.shape() != want || name == "residual" && t.dtype() != x.dtype())
        {
            return Err(Error::shape(OP, "w1_bias", t.shape(), format!("{want:?}: {name}")));
        }
    }
    let kind = kind(call, [local, rows, hidden, inner])?;
    Ok(Sizes { problem: FusedMoeProblem { tokens, k, experts, hidden, inner }, local, kind })
}

fn kind<V: Described>(call: &Call<V>, [local, rows, hidden, inner]: [usize; 4]) -> Result<Kind> {
    let w = call.get("w1")?.dtype();
    let named = call.choice("activations")?;
    let refuse = |what: &str| Err(Error::argument(OP, "w1_scale", what, "scales that fit the weights"));
    if named != "auto" && w != DType::Fp4x2 {
        return Err(Error::argument(OP, "activations", named, "auto, unless weights are mxfp4"));
    }
    let (first, second) = (call.optional("w1_scale"), call.optional("w2_scale"));
    if matches!(w, DType::Bf16 | DType::F16) {
        let same = w == call.get("x")?.dtype();
        return if first.is_none() && second.is_none() && same { Ok(Kind::Half) } else { refuse("given") };
    }
    let (Some(first), Some(second)) = (first, second) else { return refuse("none") };
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
    let Sizes { problem, .. } = sizes(call)?;
    Ok(vec![("y", TensorSpec::new(call.get("x")?.dtype(), [problem.tokens, problem.hidden]))])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    match (inputs.get("x")?.dtype(), inputs.get("w1")?.dtype()) {
        (DType::Bf16, DType::Bf16) => run_as::<bf16, bf16>(stream, call),
        (DType::Bf16, w) => run_quantized::<bf16>(stream, call, w),
        (_, DType::F16) => run_as::<f16, f16>(stream, call),
        (_, w) => run_quantized::<f16>(stream, call, w),
    }
}

fn run_quantized<T: Half>(stream: &Stream, call: &mut DeviceCall, w: DType) -> Result<()> {
    match w {
        DType::I8 => run_as::<T, i8>(stream, call),
        DType::Fp8E4M3 => run_as::<T, Fp8E4M3>(stream, call),
        DType::Fp8E4M3Fnuz => run_as::<T, Fp8E4M3Fnuz>(stream, call),
        DType::Fp4x2 => run_as::<T, hk_core::Fp4x2>(stream, call),
        other => Err(Error::dtype(OP, "w1", other, "the type of x, i8, fp8, mxfp4")),
    }
}

fn float<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<Option<FloatView<'a>>> {
    experts::float(inputs, name)
}

fn run_as<T: Half, W: FusedWeight<T>>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let Sizes { problem, kind, .. } = sizes(&inputs)?;
    let scales = match kind {
        Kind::Half => FusedScales::None,
        Kind::Rows => FusedScales::Rows { w1: inputs.view("w1_scale")?, w2: inputs.view("w2_scale")? },
        Kind::Blocks => FusedScales::Blocks { w1: inputs.view("w1_scale")?, w2: inputs.view("w2_scale")? },
        mx => FusedScales::Mx {
            w1: MxScaleView::Rows(inputs.view("w1_scale")?),
            w2: MxScaleView::Rows(inputs.view("w2_scale")?),
            activations: match mx {
                Kind::MxHalf => MxActivations::Half,
                Kind::MxFp8 => MxActivations::Fp8,
                _ => MxActivations::Fp4,
            },
        },
    };
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
    let all = FusedMoeInputs::<T, W> {
        x: inputs.view("x")?,
        w1: GemmWeight::Rows(inputs.view("w1")?),
        w2: GemmWeight::Rows(inputs.view("w2")?),
        scales,
        w1_bias: float(&inputs, "w1_bias")?,
        w2_bias: float(&inputs, "w2_bias")?,
        gate: gate_of(&inputs)?,
        routing,
        expert_map: inputs.optional_view("expert_map")?,
        residual: inputs.optional_view("residual")?,
    };
    let workspace = outputs.workspace(stream, fused_moe_workspace(&problem, None))?;
    fused_moe(stream, all, outputs.take("y")?, workspace)
}

/// Values that a quantization of rows of `cols` gives.
fn quantized(kind: Kind, w: DType, x: &[f64], cols: usize) -> Vec<f64> {
    fn linear<C: Quantized>(x: &[f64], columns: usize, cols: usize, rows: bool) -> Vec<f64> {
        let group = |group: &[f64]| {
            let amax = hk_quant::reference::finite_max(group) as f32;
            let scale = if rows { linear_scale(amax, C::FORMAT) } else { group_scale(amax, C::FORMAT) };
            let code =
                move |&x: &f64| f64::from(C::from_f32(x as f32 * (1.0 / scale)).to_f32()) * f64::from(scale);
            group.iter().map(code).collect::<Vec<_>>()
        };
        x.chunks_exact(cols).flat_map(|row| row.chunks(columns)).flat_map(group).collect()
    }
    let of = |columns: usize, rows: bool| match w {
        DType::I8 => linear::<i8>(x, columns, cols, rows),
        DType::Fp8E4M3Fnuz => linear::<Fp8E4M3Fnuz>(x, columns, cols, rows),
        _ => linear::<Fp8E4M3>(x, columns, cols, rows),
    };
    match kind {
        Kind::Half | Kind::MxHalf => x.to_vec(),
        Kind::Rows => of(cols, true),
        Kind::Blocks => of(128, false),
        Kind::MxFp8 => of(cols, true),
        Kind::MxFp4 => {
            let encode = hk_quant::reference::fp4(Fp4Rounding::NearestEven);
            let out = hk_quant::reference::mx_quant(x, cols, BlockRule::fp4(BlockScale::Even, 0), encode);
            let blocks = cols.div_ceil(32);
            out.q.iter().enumerate().map(|(i, q)| q * out.scale[i / cols * blocks + i % cols / 32]).collect()
        }
    }
}

/// A value's distance to the next of its type, at most.
fn step(kind: Kind, w: DType, x: f64, largest: f64) -> f64 {
    match kind {
        Kind::Half | Kind::MxHalf => 0.0,
        Kind::Rows | Kind::Blocks if w == DType::I8 => largest / 127.0,
        Kind::MxFp4 => x.abs() / 2.0 + largest / 4.0,
        _ => x.abs() / 8.0 + largest / 240.0 / 64.0,
    }
}

/// Weights `[local, n, k]` as what they stand for.
fn weights(call: &HostCall, name: &'static str, scale: &'static str, [n, k]: [usize; 2]) -> Result<Vec<f64>> {
    let w = call.get(name)?.to_f64();
    let Some(tensor) = call.optional(scale) else { return Ok(w) };
    let scales = tensor.to_f64();
    let shape = tensor.shape().to_vec();
    let at = |i: usize| {
        let (e, row, col) = (i / (n * k), i / k % n, i % k);
        match shape[..] {
            [_, rows, groups] if tensor.dtype() == DType::E8M0 => (e * rows + row) * groups + col / 32,
            [_, rows, groups] => (e * rows + row / 128) * groups + col / 128,
            [_, _] => e * n + row,
            [1] => 0,
            _ => e,
        }
    };
    Ok(w.into_iter().enumerate().map(|(i, v)| v * scales[at(i)]).collect())
}

fn reference_fused(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let Sizes { problem, local, kind } = sizes(call)?;
    let FusedMoeProblem { tokens, k, experts, hidden, inner } = problem;
    let dtype = call.get("x")?.dtype();
    let of_w = match call.get("w1")?.dtype() {
        // The emulated targets have both encodings; the choice is the device's, and the wider step bounds either.
        DType::Fp4x2 => DType::Fp8E4M3Fnuz,
        w => w,
    };
    let round = |x: f64| match dtype {
        DType::F16 => <f16 as Float>::from_f64(x).to_f64(),
        _ => <bf16 as Float>::from_f64(x).to_f64(),
    };
    let optional = |name| call.optional(name).map(|t| t.to_f64());
    let (ids, gate_weights) = match optional("logits") {
        Some(logits) => {
            let chosen = reference::moe_topk(
                &logits,
                experts,
                optional("bias").as_deref(),
                k,
                &choice_options(call)?,
                0.0,
            );
            (chosen.ids, chosen.weights)
        }
        None => (call.get("topk_ids")?.elements::<i32>()?, optional("topk_weights").unwrap_or_default()),
    };
    let map = call.optional("expert_map").map(|map| map.elements::<i32>()).transpose()?;
    let matrix = |id: i32| {
        let id = usize::try_from(id).ok().filter(|&id| id < experts)?;
        let matrix = map.as_ref().map_or(id as i32, |map| map[id]);
        usize::try_from(matrix).ok().filter(|&m| m < local)
    };
    let x = call.get("x")?.to_f64();
    let a = quantized(kind, of_w, &x, hidden);
    let w1 = weights(call, "w1", "w1_scale", [2 * inner, hidden])?;
    let w2 = weights(call, "w2", "w2_scale", [hidden, inner])?;
    let (w1_bias, w2_bias) = (optional("w1_bias"), optional("w2_bias"));
    let up = ExpertProblem {
        a: &a,
        w: &w1,
        k: hidden,
        w_rows: 2 * inner,
        bias: w1_bias.as_deref(),
        weights: None,
        weight_first: false,
        gate: Some(gate_of(call)?),
        activation: None,
        round: None,
    };
    // Another rounding of the activations to fp8, of the other encoding, is as far off as a step.
    let unsure_kind = kind == Kind::MxFp8;
    let residual = optional("residual");
    let (mut y, mut magnitudes) = (vec![], vec![]);
    for token in 0..tokens {
        let mut total = vec![0.0; hidden];
        let mut reach = vec![0.0; hidden];
        for slot in 0..k {
            let gate = token * k + slot;
            let Some(expert) = matrix(ids[gate]) else { continue };
            let (h, mut of_h) = reference::expert_gemm(&up, &[Some((token, expert))]);
            if unsure_kind {
                let row = &x[token * hidden..][..hidden];
                let largest = hk_quant::reference::finite_max(row);
                let w = &w1[expert * 2 * inner * hidden..];
                let off = |n: usize| -> f64 {
                    row.iter()
                        .zip(&w[n * hidden..])
                        .map(|(&x, &w)| step(kind, of_w, x, largest) * w.abs())
                        .sum()
                };
                // Gates are at most as steep as 1.13, and values up to as large as the limit.
                let widest = (0..2 * inner).map(off).fold(0.0, f64::max);
                of_h.iter_mut().for_each(|m| *m += 20.0 * widest / EXPERT_TERMS);
            }
            let low: Vec<f64> = h.iter().zip(&of_h).map(|(h, m)| round(h - EXPERT_TERMS * m)).collect();
            let high: Vec<f64> = h.iter().zip(&of_h).map(|(h, m)| round(h + EXPERT_TERMS * m)).collect();
            let h: Vec<f64> = h.into_iter().map(round).collect();
            let largest = hk_quant::reference::finite_max(&high).max(hk_quant::reference::finite_max(&low));
            let exact = low == high;
            let q = quantized(kind, of_w, &h, inner);
            let off: Vec<f64> = (0..inner)
                .map(|i| {
                    let moved = high[i] - low[i];
                    if exact { 0.0 } else { moved + step(kind, of_w, h[i].abs() + moved, largest) }
                })
                .collect();
            let weight = gate_weights[gate];
            for col in 0..hidden {
                let w = &w2[(expert * hidden + col) * inner..][..inner];
                let bias = w2_bias.as_ref().map_or(0.0, |bias| bias[expert * hidden + col]);
                let mut sum = bias;
                let mut magnitude = bias.abs();
                let mut unsure = 0.0;
                for i in 0..inner {
                    sum += q[i] * w[i];
                    magnitude += (q[i] * w[i]).abs();
                    unsure += off[i] * w[i].abs();
                }
                let rounded =
                    (sum * weight).abs() * if dtype == DType::F16 { 1.0 / 1024.0 } else { 1.0 / 128.0 };
                total[col] += sum * weight;
                reach[col] += weight.abs() * (magnitude + unsure / EXPERT_TERMS) + rounded / EXPERT_TERMS;
            }
        }
        for col in 0..hidden {
            let added = residual.as_ref().map_or(0.0, |r| r[token * hidden + col]);
            y.push(total[col] + added);
            magnitudes.push(reach[col] + added.abs());
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
