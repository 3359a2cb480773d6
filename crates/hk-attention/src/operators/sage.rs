//! Registry entries of `sage_attention` and `sage_quantize`.

use super::attention::{
    CAUSAL, F32, OUT, QUERY_TILE, SCALE, Sequence, WINDOW_LEFT, WINDOW_RIGHT, attend, mask, outputs,
    query_tile, scale, transposed,
};
use super::common::FP8;
use super::mha::{SHORT, Sizes, TALL, dense, host_rows, sizes, specs};
use crate::prefill::MOST_COLUMNS_OF_SAGE;
use crate::reference::sage;
use crate::{
    AttentionOutputs, DeviceFp8, Qkv, SageOptions, SageProblem, SageQuantizedMut, kernels, sage_attention,
    sage_quantize, sage_quantize_workspace, sage_workspace,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, with_float};

const SMOOTH_K: ScalarSpec = ScalarSpec {
    name: "smooth_k",
    default: Scalar::Bool(true),
    choices: &[],
    summary: "the mean of keys is subtracted before they are quantized",
};
const SMOOTH_Q: ScalarSpec = ScalarSpec {
    name: "smooth_q",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "the mean of each block of queries is subtracted before they are quantized, its scores are added in f32",
};
const SAGE_TILE: ScalarSpec =
    ScalarSpec { summary: "tiles of query rows; the bits are the same", ..QUERY_TILE };
const ROUGH: (&str, Scalar) = ("smooth_k", Scalar::Bool(false));
const SMOOTH_Q_ON: (&str, Scalar) = ("smooth_q", Scalar::Bool(true));
const CAUSAL_ON: (&str, Scalar) = ("causal", Scalar::Bool(true));

/// A score of normal operands in int8, `scale = 1 / sqrt(Dqk)`, is off by 0.0133 on average: six times that for rows of few keys, whose
/// errors do not average out. Three times would be exceeded by one of 1400 rows of a single key.
const LSE: Tolerance = Tolerance::Within { rtol: 1e-2, atol: 8e-2 };

macro_rules! case {
    ($label:expr, $tensors:expr $(, $scalar:expr)*) => {
        Case { label: $label, tensors: $tensors, scalars: &[$($scalar),*] }
    };
}

pub(crate) const SAGE_ATTENTION: Operator = Operator {
    name: "sage_attention",
    family: "hk-attention",
    summary: "out = softmax(scale q k^T) v by int8 products of q and k less its mean, fp8 products of probabilities and v",
    args: &[
        ArgSpec::input("q", OUT, 4, "[B, Sq, Hq, Dqk]"),
        ArgSpec::input("k", OUT, 4, "[B, Sk, Hkv, Dqk]"),
        ArgSpec::input("v", OUT, 4, "[B, Sk, Hkv, Dv]"),
        ArgSpec::output("out", Tolerance::AttentionFp8, OUT, 4, "[B, Sq, Hq, Dv]"),
        ArgSpec::output("lse", LSE, F32, 3, "[B, Hq, Sq]").optional(),
    ],
    scalars: &[SCALE, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, SMOOTH_K, SMOOTH_Q, SAGE_TILE],
    kernels: &[&kernels::PREFILL_SAGE, &kernels::SAGE_QUANT],
    cases: &[
        case!("Llama-3 8B, 128 tokens", dense!(Bf16 1 128 128, 32 8, 128 128), CAUSAL_ON),
        case!("CogVideoX heads, 200 tokens", dense!(Bf16 1 200 200, 8 8, 64 64)),
    ],
    bench: BenchSizes::Cases(&[
        case!("GQA 64/8, d128, 8192 tokens", dense!(Bf16 1 8192 8192, 64 8, 128 128)),
        case!("GQA 64/8, d128, 8192 tokens, causal", dense!(Bf16 1 8192 8192, 64 8, 128 128), CAUSAL_ON),
    ]),
    corners: &[
        case!(
            "bf16, tall, causal",
            dense!(Bf16 2 150 200, 4 2, 128 128, "lse" F32 [2, 4, 150]),
            TALL,
            CAUSAL_ON
        ),
        case!(
            "bf16, short, window",
            dense!(Bf16 1 65 190, 2 2, 64 80, "lse" F32 [1, 2, 65]),
            SHORT,
            ("window_left", Scalar::Int(70)),
            ("window_right", Scalar::Int(20))
        ),
        case!("f16, short, odd columns", dense!(F16 1 70 150, 2 1, 37 45, "lse" F32 [1, 2, 70]), SHORT),
        case!("f16, tall, not smooth", dense!(F16 1 140 90, 2 1, 48 40), TALL, ROUGH),
        case!(
            "f32, short, blocks of queries, scale",
            dense!(F32 1 300 40, 1 1, 16 128, "lse" F32 [1, 1, 300]),
            SHORT,
            ("scale", Scalar::Float(-0.2))
        ),
        case!(
            "f32, tall, chunks of keys, not smooth",
            dense!(F32 1 9 530, 2 2, 80 24, "lse" F32 [1, 2, 9]),
            TALL,
            ROUGH
        ),
        case!(
            "bf16, tall, smooth q, blocks of queries, causal",
            dense!(Bf16 1 270 140, 2 1, 128 128, "lse" F32 [1, 2, 270]),
            TALL,
            CAUSAL_ON,
            SMOOTH_Q_ON
        ),
        case!(
            "f16, short, smooth q alone, odd columns",
            dense!(F16 1 70 150, 2 1, 37 45, "lse" F32 [1, 2, 70]),
            SHORT,
            ROUGH,
            SMOOTH_Q_ON
        ),
        case!("f32, short, smooth q", dense!(F32 1 20 300, 2 2, 128 64), SHORT, SMOOTH_Q_ON),
        case!("f16, tall, smooth q", dense!(F16 1 130 140, 4 2, 64 64), TALL, SMOOTH_Q_ON),
    ],
    outputs: outputs_of,
    run,
    reference,
    traffic: Traffic::once,
};

/// Sequences, and what [`sizes`] checks.
fn checked<V: Described>(call: &Call<V>) -> Result<(SageProblem, Sizes<4>)> {
    let op = call.operator().name;
    let all = sizes::<4, _>(call)?;
    let ([sequences, queries, heads, dqk], [k_sequences, keys, kv_heads, _], dv) = (all.q, all.k, all.dv);
    for (name, columns) in [("q", dqk), ("v", dv)] {
        if columns > MOST_COLUMNS_OF_SAGE {
            let want = format!("at most {MOST_COLUMNS_OF_SAGE} columns");
            return Err(Error::shape(op, name, call.get(name)?.shape(), want));
        }
    }
    if k_sequences != sequences {
        return Err(Error::shape(op, "k", all.k, format!("{sequences} sequences (of q)")));
    }
    Ok((SageProblem { sequences, heads, kv_heads, queries, keys, dqk, dv }, all))
}

fn outputs_of(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let (SageProblem { sequences, heads, queries, dv, .. }, _) = checked(call)?;
    specs(call, vec![sequences, queries, heads, dv], vec![sequences, heads, queries])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (problem, _) = checked(&inputs)?;
    let options = SageOptions {
        scale: scale(&inputs)?,
        mask: mask(&inputs)?,
        smooth_k: inputs.bool("smooth_k")?,
        smooth_q: inputs.bool("smooth_q")?,
        tile: query_tile(&inputs)?,
    };
    with_float!("sage_attention", "q", inputs.get("q")?.dtype(), T => {
        let qkv = Qkv::<T> { q: inputs.view("q")?, k: inputs.view("k")?, v: inputs.view("v")? };
        let out = AttentionOutputs { out: outputs.take::<T>("out")?, lse: outputs.take_optional("lse")? };
        let workspace = outputs.workspace(stream, sage_workspace(&problem, options.smooth_q))?;
        sage_attention(stream, qkv, out, workspace, &options)
    })
}

/// Exact attention of what is not quantized.
fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_of(&call.spec())?;
    let (SageProblem { sequences, heads, queries, keys, dv, .. }, all) = checked(call)?;
    let sequence = |n: usize| Sequence {
        queries: n * queries..(n + 1) * queries,
        keys: Some((n * keys..(n + 1) * keys).collect()),
    };
    let of: Vec<_> = (0..sequences).map(sequence).collect();
    let q = call.get("q")?.to_f64();
    let (out, lse) = attend(call, all.heads(), &q, &host_rows(call)?, &of, [queries, keys])?;
    let lse = transposed(&lse, [sequences, queries, heads]);
    let shapes = (vec![sequences, queries, heads, dv], vec![sequences, heads, queries]);
    Ok(outputs(call, (shapes.0, out), (shapes.1, lse)))
}

const FP8_TYPE: ScalarSpec = ScalarSpec {
    name: "fp8",
    default: Scalar::Choice("fp8e4m3fnuz"),
    choices: &["fp8e4m3fnuz", "fp8e4m3"],
    summary: "type of v8: that of the device",
};
const OCP: (&str, Scalar) = ("fp8", Scalar::Choice("fp8e4m3"));
const I8: &[DType] = &[DType::I8];

pub(crate) const SAGE_QUANTIZE: Operator = Operator {
    name: "sage_quantize",
    summary: "q8, k8 in int8 by blocks of rows, k less its mean; v8 in fp8 by columns: what sage_attention multiplies",
    args: &[
        ArgSpec::input("q", OUT, 4, "[B, Sq, Hq, Dqk]"),
        ArgSpec::input("k", OUT, 4, "[B, Sk, Hkv, Dqk]"),
        ArgSpec::input("v", OUT, 4, "[B, Sk, Hkv, Dv]"),
        ArgSpec::output("q8", Tolerance::Neighbour, I8, 4, "[B, Sq, Hq, Dqk in 16s]"),
        ArgSpec::output("q_scale", Tolerance::Reduction, F32, 3, "[B, Hq, ceil(Sq / 256)]"),
        ArgSpec::output("k8", Tolerance::Neighbour, I8, 4, "[B, Sk, Hkv, Dqk in 16s]"),
        ArgSpec::output("k_scale", Tolerance::Reduction, F32, 3, "[B, Hkv, ceil(Sk / 128)]"),
        ArgSpec::output("v8", Tolerance::Neighbour, FP8, 4, "[B, Sk, Hkv, Dv in 16s]"),
        ArgSpec::output("v_scale", Tolerance::Reduction, F32, 3, "[B, Hkv, Dv in 16s]"),
        ArgSpec::output("lse_shift", Tolerance::Within { rtol: 1e-4, atol: 1e-5 }, F32, 3, "[B, Hq, Sq]")
            .optional(),
        ArgSpec::output(
            "q_shift",
            Tolerance::Within { rtol: 1e-4, atol: 1e-5 },
            F32,
            4,
            "[B, Hq, ceil(Sq / 256), Sk in 128s]",
        )
        .optional(),
    ],
    scalars: &[SCALE, SMOOTH_K, FP8_TYPE],
    kernels: &[&kernels::SAGE_QUANT],
    cases: &[
        case!("Llama-3 8B, 512 tokens", dense!(Bf16 1 512 512, 32 8, 128 128)),
        case!("the same in OCP fp8", dense!(Bf16 1 512 512, 32 8, 128 128), OCP),
    ],
    bench: BenchSizes::Cases(&[case!(
        "GQA 64/8, d128, 8192 tokens",
        dense!(Bf16 1 8192 8192, 64 8, 128 128)
    )]),
    corners: &[
        case!("bf16", dense!(Bf16 2 300 600, 4 2, 128 128, "lse_shift" F32 [2, 4, 300])),
        case!("bf16, OCP, odd columns", dense!(Bf16 1 9 130, 2 1, 45 37, "lse_shift" F32 [1, 2, 9]), OCP),
        case!("f16, not smooth", dense!(F16 1 33 140, 2 2, 64 24), ROUGH),
        case!("f16, OCP", dense!(F16 1 257 129, 1 1, 16 80), OCP, ("scale", Scalar::Float(-0.3))),
        case!("f32", dense!(F32 1 260 520, 2 1, 24 128, "lse_shift" F32 [1, 2, 260])),
        case!("f32, OCP", dense!(F32 2 3 5, 2 1, 7 100), OCP, ROUGH),
        case!("bf16, smooth q", dense!(Bf16 2 300 140, 2 1, 128 128, "q_shift" F32 [2, 2, 2, 256])),
        case!(
            "f16, smooth q alone",
            dense!(F16 1 9 130, 2 1, 45 37, "q_shift" F32 [1, 2, 1, 256]),
            OCP,
            ROUGH
        ),
        case!(
            "f32, smooth q",
            dense!(F32 1 260 128, 2 2, 16 24, "lse_shift" F32 [1, 2, 260], "q_shift" F32 [1, 2, 2, 128])
        ),
    ],
    outputs: outputs_of_quantize,
    run: run_quantize,
    reference: reference_quantize,
    ..SAGE_ATTENTION
};

fn fp8<V: Described>(call: &Call<V>) -> Result<DType> {
    Ok(if call.choice("fp8")? == "fp8e4m3" { DType::Fp8E4M3 } else { DType::Fp8E4M3Fnuz })
}

fn outputs_of_quantize(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let (problem, _) = checked(call)?;
    let ([q, k, v], [q_scale, k_scale, v_scale]) = (problem.rows(), problem.scales());
    let factors = |shape: [usize; 3]| TensorSpec::new(DType::F32, shape);
    let mut all = vec![
        ("q8", TensorSpec::new(DType::I8, q)),
        ("q_scale", factors(q_scale)),
        ("k8", TensorSpec::new(DType::I8, k)),
        ("k_scale", factors(k_scale)),
        ("v8", TensorSpec::new(fp8(call)?, v)),
        ("v_scale", factors(v_scale)),
    ];
    if call.wants("lse_shift") {
        if !call.bool("smooth_k")? {
            let op = call.operator().name;
            return Err(Error::argument(op, "lse_shift", "given", "none without smooth_k"));
        }
        all.push(("lse_shift", factors([problem.sequences, problem.heads, problem.queries])));
    }
    if call.wants("q_shift") {
        all.push(("q_shift", TensorSpec::new(DType::F32, problem.query_shifts())));
    }
    Ok(all)
}

fn run_quantize(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    let (dtype, of) = (inputs.get("q")?.dtype(), fp8(&inputs)?);
    with_float!("sage_quantize", "q", dtype, T => match of {
        DType::Fp8E4M3 => run_quantize_as::<T, Fp8E4M3>(stream, call),
        _ => run_quantize_as::<T, Fp8E4M3Fnuz>(stream, call),
    })
}

fn run_quantize_as<T, F>(stream: &Stream, call: &mut DeviceCall) -> Result<()>
where
    T: Float + crate::AttentionElement,
    F: DeviceFp8,
{
    let (inputs, mut outputs) = call.split();
    let (problem, _) = checked(&inputs)?;
    let qkv = Qkv::<T> { q: inputs.view("q")?, k: inputs.view("k")?, v: inputs.view("v")? };
    let quantized = SageQuantizedMut::<F> {
        q8: outputs.take("q8")?,
        q_scale: outputs.take("q_scale")?,
        k8: outputs.take("k8")?,
        k_scale: outputs.take("k_scale")?,
        v8: outputs.take("v8")?,
        v_scale: outputs.take("v_scale")?,
        lse_shift: outputs.take_optional("lse_shift")?,
        q_shift: outputs.take_optional("q_shift")?,
    };
    let workspace = outputs.workspace(stream, sage_quantize_workspace(&problem))?;
    sage_quantize(stream, qkv, quantized, workspace, scale(&inputs)?, inputs.bool("smooth_k")?)
}

fn reference_quantize(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let specs = outputs_of_quantize(&call.spec())?;
    let (problem, _) = checked(call)?;
    let of = sage::Inputs {
        q: &call.get("q")?.to_f64(),
        k: &call.get("k")?.to_f64(),
        v: &call.get("v")?.to_f64(),
        scale: scale(call)?.map_or(1.0 / (problem.dqk as f64).sqrt(), f64::from),
        smooth_k: call.bool("smooth_k")?,
        smooth_q: call.wants("q_shift"),
    };
    let mut got = sage::quantize(&problem, &of, fp8(call)?);
    let named = |(name, spec): (&'static str, TensorSpec)| {
        let values = match name {
            "q8" => &mut got.q8,
            "q_scale" => &mut got.q_scale,
            "k8" => &mut got.k8,
            "k_scale" => &mut got.k_scale,
            "v8" => &mut got.v8,
            "v_scale" => &mut got.v_scale,
            "lse_shift" => &mut got.lse_shift,
            _ => &mut got.q_shift,
        };
        (name, HostTensorF64::new(spec.shape, std::mem::take(values)))
    };
    Ok(specs.into_iter().map(named).collect())
}
