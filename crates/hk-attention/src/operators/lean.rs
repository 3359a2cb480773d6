//! Registry entry of `lean_atten`.

use super::attention::{CAUSAL, F32, LSE, OUT, SCALE, Sequence, attend, indices, outputs, scale};
use super::common::{INDICES_32, integers, shape};
use super::mha::{host_rows, sizes, specs};
use crate::{
    AttentionOutputs, AttentionProblem, LeanOptions, Programs, Qkv, kernels, lean_atten, lean_workspace,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{CodeObjects, DType, Error, Result, Stream, with_float};

/// The sources of stream-K, and of blocks of a tile each.
const KERNELS: &[&CodeObjects] = &[
    &kernels::LEAN_BF16,
    &kernels::LEAN_F16,
    &kernels::LEAN_GENERAL,
    &kernels::MERGE,
    &kernels::PREFILL_BF16,
    &kernels::PREFILL_F16,
    &kernels::PREFILL_GENERAL_BF16,
    &kernels::PREFILL_GENERAL_F16,
    &kernels::PREFILL_GENERAL_F32,
];

const CAUSAL_KEYS: (&str, Scalar) = ("causal", Scalar::Bool(true));

pub(super) const PROGRAMS: ScalarSpec = ScalarSpec {
    name: "programs",
    default: Scalar::Count(0),
    choices: &[],
    summary: "blocks that share the work; 0: as suits the call and the device",
};

/// Type; sequences, rows of queries, of keys; heads; columns.
macro_rules! ragged {
    ($dtype:ident $n:literal $tq:literal $tk:literal, $hq:literal $hkv:literal, $dqk:literal $dv:literal $(, $name:literal)?) => {
        &[
            ("q", DType::$dtype, &[$tq, $hq, $dqk]),
            ("k", DType::$dtype, &[$tk, $hkv, $dqk]),
            ("v", DType::$dtype, &[$tk, $hkv, $dv]),
            ("kv_lens", DType::I32, &[$n]),
            $(($name, DType::F32, &[$tq, $hq]),)?
        ]
    };
}

pub(crate) const LEAN_ATTEN: Operator = Operator {
    name: "lean_atten",
    family: "hk-attention",
    summary: "out = softmax(scale q k^T) v of sequences with as many queries each, and packed keys",
    args: &[
        ArgSpec::input("q", OUT, 3, "[B Sq, Hq, Dqk]"),
        ArgSpec::input("k", OUT, 3, "[total, Hkv, Dqk]"),
        ArgSpec::input("v", OUT, 3, "[total, Hkv, Dv]"),
        ArgSpec::input("kv_lens", INDICES_32, 1, "[B]").sampled(Sample::LengthsOf("k")),
        ArgSpec::output("out", Tolerance::Attention, OUT, 3, "[B Sq, Hq, Dv]"),
        ArgSpec::output("lse", LSE, F32, 2, "[B Sq, Hq]").optional(),
    ],
    scalars: &[SCALE, CAUSAL, PROGRAMS],
    kernels: KERNELS,
    cases: &[
        Case {
            label: "Llama-3 8B, 3 sequences of 16 tokens, 180 keys",
            tensors: ragged!(Bf16 3 48 180, 32 8, 128 128),
            scalars: &[CAUSAL_KEYS],
        },
        Case {
            label: "Llama-3 8B, 3 tokens, 5000 keys",
            tensors: ragged!(Bf16 3 3 5000, 32 8, 128 128),
            scalars: &[],
        },
    ],
    bench: BenchSizes::Cases(&[
        Case {
            label: "Llama-3 8B, one token, 131072 keys",
            tensors: ragged!(Bf16 1 1 131072, 32 8, 128 128),
            scalars: &[],
        },
        Case {
            label: "Llama-3 8B, 4 x 512 tokens, 8192 keys, causal",
            tensors: ragged!(Bf16 4 2048 32768, 32 8, 128 128),
            scalars: &[CAUSAL_KEYS],
        },
    ]),
    corners: &[
        Case {
            label: "bf16, causal",
            tensors: ragged!(Bf16 3 96 180, 4 2, 64 64, "lse"),
            scalars: &[CAUSAL_KEYS],
        },
        Case {
            label: "f16, scale, one query",
            tensors: ragged!(F16 2 2 120, 4 1, 128 96, "lse"),
            scalars: &[("scale", Scalar::Float(0.3))],
        },
        Case { label: "f32", tensors: ragged!(F32 4 24 75, 2 2, 20 20, "lse"), scalars: &[] },
        Case {
            label: "bf16, 64 columns, 4 programs",
            tensors: ragged!(Bf16 3 9 180, 4 2, 64 64, "lse"),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(4))],
        },
        Case {
            label: "bf16, 64 columns, tall, 5 programs",
            tensors: ragged!(Bf16 2 150 400, 4 2, 64 48, "lse"),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(5))],
        },
        Case {
            label: "bf16, 128 columns, 7 programs",
            tensors: ragged!(Bf16 3 6 180, 8 2, 128 128, "lse"),
            scalars: &[("programs", Scalar::Count(7))],
        },
        Case {
            label: "bf16, 128 columns, tall, 3 programs",
            tensors: ragged!(Bf16 2 140 200, 2 1, 128 128),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(3))],
        },
        Case {
            label: "bf16, columns of 192 and 128, 40 programs",
            tensors: ragged!(Bf16 2 6 120, 2 1, 192 128, "lse"),
            scalars: &[("programs", Scalar::Count(40))],
        },
        Case {
            label: "bf16, columns of 192 and 128, tall, 2 programs",
            tensors: ragged!(Bf16 2 270 120, 1 1, 192 128),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(2))],
        },
        Case {
            label: "bf16, 256 columns, 3 programs",
            tensors: ragged!(Bf16 2 12 120, 2 1, 256 256, "lse"),
            scalars: &[("programs", Scalar::Count(3))],
        },
        Case {
            label: "bf16, odd columns, 4 programs",
            tensors: ragged!(Bf16 2 6 120, 2 1, 33 17, "lse"),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(4))],
        },
        Case {
            label: "bf16, more than 128 odd columns, 3 programs",
            tensors: ragged!(Bf16 2 6 120, 2 1, 131 7, "lse"),
            scalars: &[("programs", Scalar::Count(3))],
        },
        Case {
            label: "f16, 64 columns, 4 programs",
            tensors: ragged!(F16 3 9 180, 4 2, 64 64, "lse"),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(4))],
        },
        Case {
            label: "f16, 64 columns, tall, 5 programs",
            tensors: ragged!(F16 2 150 400, 4 2, 64 48, "lse"),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(5))],
        },
        Case {
            label: "f16, 128 columns, 7 programs",
            tensors: ragged!(F16 3 6 180, 8 2, 128 128, "lse"),
            scalars: &[("programs", Scalar::Count(7))],
        },
        Case {
            label: "f16, 128 columns, tall, 3 programs",
            tensors: ragged!(F16 2 140 200, 2 1, 128 128),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(3))],
        },
        Case {
            label: "f16, columns of 192 and 128, 40 programs",
            tensors: ragged!(F16 2 6 120, 2 1, 192 128, "lse"),
            scalars: &[("programs", Scalar::Count(40))],
        },
        Case {
            label: "f16, columns of 192 and 128, tall, 2 programs",
            tensors: ragged!(F16 2 270 120, 1 1, 192 128),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(2))],
        },
        Case {
            label: "f16, 256 columns, 3 programs",
            tensors: ragged!(F16 2 12 120, 2 1, 256 256, "lse"),
            scalars: &[("programs", Scalar::Count(3))],
        },
        Case {
            label: "f16, odd columns, 4 programs",
            tensors: ragged!(F16 2 6 120, 2 1, 33 17, "lse"),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(4))],
        },
        Case {
            label: "f16, more than 128 odd columns, 3 programs",
            tensors: ragged!(F16 2 6 120, 2 1, 131 7, "lse"),
            scalars: &[("programs", Scalar::Count(3))],
        },
        Case {
            label: "f32, 5 programs",
            tensors: ragged!(F32 3 66 180, 4 2, 64 128, "lse"),
            scalars: &[CAUSAL_KEYS, ("programs", Scalar::Count(5))],
        },
        Case {
            label: "f32, 200 columns, one program",
            tensors: ragged!(F32 2 6 120, 2 1, 200 200, "lse"),
            scalars: &[("programs", Scalar::Count(1))],
        },
    ],
    outputs: outputs_of,
    run,
    reference,
    traffic: Traffic::once,
};

pub(super) fn programs<V: Described>(call: &Call<V>) -> Result<Programs> {
    match call.size("programs")? {
        0 => Ok(Programs::Auto),
        programs if programs <= 65536 => Ok(Programs::Count(programs)),
        programs => Err(Error::argument(call.operator().name, "programs", programs, "at most 65536")),
    }
}

/// The number of sequences, by which rows of queries divide.
pub(super) fn expect_batch<V: Described>(call: &Call<V>, rows: usize) -> Result<usize> {
    let [batch] = shape(call, "kv_lens")?;
    if rows.checked_rem(batch).unwrap_or(rows) != 0 {
        let want = format!("a multiple of {batch} rows (sequences of kv_lens)");
        return Err(Error::shape(call.operator().name, "q", call.get("q")?.shape(), want));
    }
    Ok(batch)
}

fn outputs_of(call: &CallSpec) -> Result<Named<TensorSpec>> {
    programs(call)?;
    let sizes = sizes::<3, _>(call)?;
    let [rows, heads, _] = sizes.q;
    expect_batch(call, rows)?;
    specs(call, vec![rows, heads, sizes.dv], vec![rows, heads])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let lens = indices(&inputs, "kv_lens")?;
    let programs = programs(&inputs)?;
    let options = LeanOptions { scale: scale(&inputs)?, causal: inputs.bool("causal")?, programs };
    let sizes = sizes::<3, _>(&inputs)?;
    let ([queries, heads, _], [keys, kv_heads, _]) = (sizes.q, sizes.k);
    let problem = AttentionProblem { sequences: lens.numel(), heads, kv_heads, queries, keys, dv: sizes.dv };
    let len = lean_workspace(stream.device().info(), &problem, programs);
    let workspace = if len == 0 { None } else { Some(outputs.workspace(stream, len)?) };
    with_float!("lean_atten", "q", inputs.get("q")?.dtype(), T => {
        let qkv = Qkv::<T> { q: inputs.view("q")?, k: inputs.view("k")?, v: inputs.view("v")? };
        let out = AttentionOutputs { out: outputs.take::<T>("out")?, lse: outputs.take_optional("lse")? };
        lean_atten(stream, qkv, lens, out, workspace, &options)
    })
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_of(&call.spec())?;
    let sizes = sizes::<3, _>(call)?;
    let ([rows, heads, _], [total, ..]) = (sizes.q, sizes.k);
    let lens = integers(call.get("kv_lens")?);
    let sq = rows.checked_div(lens.len()).unwrap_or(0);
    // `None` behind a sequence whose keys are not there.
    let mut next = Some(0);
    let sequence = |(n, &len): (usize, &i64)| {
        let end = next.zip(usize::try_from(len).ok()).map(|(start, len)| start + len);
        let keys = next.zip(end.filter(|end| *end <= total)).map(|(start, end)| (start..end).collect());
        next = end.filter(|_| keys.is_some());
        Sequence { queries: n * sq..(n + 1) * sq, keys }
    };
    let sequences: Vec<_> = lens.iter().enumerate().map(sequence).collect();
    let q = call.get("q")?.to_f64();
    let (out, lse) = attend(call, sizes.heads(), &q, &host_rows(call)?, &sequences, [sq, total])?;
    Ok(outputs(call, (vec![rows, heads, sizes.dv], out), (vec![rows, heads], lse)))
}
