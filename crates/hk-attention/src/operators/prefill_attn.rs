//! Registry entry of `prefill_attn`.

use super::attention::{CAUSAL, F32, LSE, OUT, Sequence, attend, indices, outputs};
use super::common::{INDICES_32, expect_shape, integers};
use super::mha::{PREFILL, host_rows, sizes, specs};
use crate::{AttentionOutputs, Qkv, SequenceSpans, prefill_attn};
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named, Operator,
    Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream, with_float};

const MAX_LEN: ScalarSpec = ScalarSpec {
    name: "max_len",
    default: Scalar::Count(0),
    choices: &[],
    summary: "tokens of the longest sequence",
};

/// Type; sequences, rows; heads; columns.
macro_rules! prompts {
    ($dtype:ident $n:literal $rows:literal, $hq:literal $hkv:literal, $dqk:literal $dv:literal $(, $name:literal)?) => {
        &[
            ("q", DType::$dtype, &[$rows, $hq, $dqk]),
            ("k", DType::$dtype, &[$rows, $hkv, $dqk]),
            ("v", DType::$dtype, &[$rows, $hkv, $dv]),
            ("start", DType::I32, &[$n]),
            ("len", DType::I32, &[$n]),
            $(($name, DType::F32, &[$rows, $hq]),)?
        ]
    };
}

pub(crate) const PREFILL_ATTN: Operator = Operator {
    name: "prefill_attn",
    family: "hk-attention",
    summary: "out = softmax(q k^T / sqrt(Dqk)) v of sequences that lie anywhere among packed rows",
    args: &[
        ArgSpec::input("q", OUT, 3, "[rows, Hq, Dqk]"),
        ArgSpec::input("k", OUT, 3, "[rows, Hkv, Dqk]"),
        ArgSpec::input("v", OUT, 3, "[rows, Hkv, Dv]"),
        ArgSpec::input("start", INDICES_32, 1, "[sequences]").sampled(Sample::Steps { step: 50 }),
        ArgSpec::input("len", INDICES_32, 1, "[sequences]").sampled(Sample::Integers { low: 30, high: 45 }),
        ArgSpec::output("out", Tolerance::Attention, OUT, 3, "[rows, Hq, Dv]"),
        ArgSpec::output("lse", LSE, F32, 2, "[rows, Hq]").optional(),
    ],
    scalars: &[MAX_LEN, ScalarSpec { default: Scalar::Bool(true), ..CAUSAL }],
    kernels: PREFILL,
    cases: &[Case {
        label: "Llama-3 8B, 3 prompts of up to 44 tokens",
        tensors: prompts!(Bf16 3 150, 32 8, 128 128),
        scalars: &[("max_len", Scalar::Count(44))],
    }],
    bench: BenchSizes::Cases(&[Case {
        label: "Llama-3 8B, 8 prompts of 2048 tokens",
        tensors: prompts!(Bf16 8 16384, 32 8, 128 128),
        scalars: &[("max_len", Scalar::Count(2048))],
    }]),
    corners: &[
        Case {
            label: "bf16, causal",
            tensors: prompts!(Bf16 3 150, 4 2, 64 64, "lse"),
            scalars: &[("max_len", Scalar::Count(64))],
        },
        Case {
            label: "f32, all keys, odd columns",
            tensors: prompts!(F32 2 100, 2 1, 33 17, "lse"),
            scalars: &[("max_len", Scalar::Count(64)), ("causal", Scalar::Bool(false))],
        },
        Case {
            label: "f16, sequences that are too long, or not within the rows",
            tensors: prompts!(F16 6 240, 2 2, 64 64, "lse"),
            scalars: &[("max_len", Scalar::Count(37))],
        },
    ],
    outputs: outputs_of,
    run,
    reference,
    traffic: Traffic::once,
};

fn outputs_of(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let sizes = sizes::<3, _>(call)?;
    let ([rows, heads, _], [k_rows, ..]) = (sizes.q, sizes.k);
    if k_rows != rows {
        return Err(Error::shape(call.operator().name, "k", sizes.k, format!("{rows} rows (of q)")));
    }
    expect_shape(call, "len", call.get("start")?.shape.as_slice(), "shape of start")?;
    specs(call, vec![rows, heads, sizes.dv], vec![rows, heads])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let sequences = SequenceSpans { start: indices(&inputs, "start")?, len: indices(&inputs, "len")? };
    let (max_len, causal) = (inputs.size("max_len")?, inputs.bool("causal")?);
    with_float!("prefill_attn", "q", inputs.get("q")?.dtype(), T => {
        let qkv = Qkv::<T> { q: inputs.view("q")?, k: inputs.view("k")?, v: inputs.view("v")? };
        let out = AttentionOutputs { out: outputs.take::<T>("out")?, lse: outputs.take_optional("lse")? };
        prefill_attn(stream, qkv, sequences, out, max_len, causal)
    })
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_of(&call.spec())?;
    let sizes = sizes::<3, _>(call)?;
    let [rows, heads, _] = sizes.q;
    let most = call.size("max_len")?.min(rows) as i64;
    let sequence = |(&start, &len): (&i64, &i64)| {
        let there = start >= 0 && len >= 0 && start + len <= rows as i64;
        let first = start.max(0);
        let end = (start + len).min(rows as i64).min(first + most).max(first.min(rows as i64));
        let queries = first.min(rows as i64) as usize..end as usize;
        let keys = (there && len <= most).then(|| queries.clone().collect());
        Sequence { queries, keys }
    };
    let (start, len) = (integers(call.get("start")?), integers(call.get("len")?));
    let sequences: Vec<_> = start.iter().zip(&len).map(sequence).collect();
    let q = call.get("q")?.to_f64();
    let (out, lse) = attend(call, sizes.heads(), &q, &host_rows(call)?, &sequences, [rows; 2])?;
    Ok(outputs(call, (vec![rows, heads, sizes.dv], out), (vec![rows, heads], lse)))
}
