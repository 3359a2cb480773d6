//! Gradients of attention: `mha_onekernel_bwd`, `flash_attn_bwd`, `mha_fused_bwd`.

use super::attention::{
    ALIBI, CAUSAL, DROPOUT_P, F32, OFFSET, OUT, SCALE, SEED, SINK, SOFTCAP, Sequence, WINDOW_LEFT,
    WINDOW_RIGHT, dropout, float, indices, keys_of, mask, options, packed, scale, transposed,
};
use super::common::{INDICES_32, expect_dtypes, expect_shape, integers};
use super::mha::{Sizes, expect_options, sizes};
use crate::reference::attention::{Attention, Dropout as HostDropout, Gradients as HostGradients, Results};
use crate::{
    Accumulate, AttentionElement, BackwardInputs, BackwardSchedule, Dropout, Gradients, SequenceStarts,
    backward_workspace, flash_attn_bwd, fused_backward_workspace, kernels, mha_fused_bwd, mha_onekernel_bwd,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{CodeObjects, DType, Error, Float, Result, Stream, with_float};

const CAUSAL_ON: (&str, Scalar) = ("causal", Scalar::Bool(true));
const DROPOUT: [(&str, Scalar); 3] =
    [("dropout_p", Scalar::Float(0.2)), ("seed", Scalar::Count(7)), ("offset", Scalar::Count(1 << 33))];

/// Sequences, queries, keys; heads; columns. Probabilities of some 150 keys have a sum of about 1 with the values of `lse`.
macro_rules! dense {
    ($dtype:ident $b:literal $sq:literal $sk:literal, $hq:literal $hkv:literal, $dqk:literal $dv:literal
     $(, $name:literal $other:ident $shape:expr)*) => {
        &[
            ("q", DType::$dtype, &[$b, $sq, $hq, $dqk]),
            ("k", DType::$dtype, &[$b, $sk, $hkv, $dqk]),
            ("v", DType::$dtype, &[$b, $sk, $hkv, $dv]),
            ("out", DType::$dtype, &[$b, $sq, $hq, $dv]),
            ("lse", DType::F32, &[$b, $hq, $sq]),
            ("dout", DType::$dtype, &[$b, $sq, $hq, $dv]),
            $(($name, DType::$other, &$shape),)*
        ]
    };
}

/// The same, packed: sequences, rows of all; heads; columns.
macro_rules! in_rows {
    ($dtype:ident $n:literal $tq:literal $tk:literal, $hq:literal $hkv:literal, $dqk:literal $dv:literal
     $(, $name:literal $other:ident $shape:expr)*) => {
        &[
            ("q", DType::$dtype, &[$tq, $hq, $dqk]),
            ("k", DType::$dtype, &[$tk, $hkv, $dqk]),
            ("v", DType::$dtype, &[$tk, $hkv, $dv]),
            ("out", DType::$dtype, &[$tq, $hq, $dv]),
            ("lse", DType::F32, &[$tq, $hq]),
            ("dout", DType::$dtype, &[$tq, $hq, $dv]),
            ("cu_seqlens_q", DType::I32, &[$n + 1]),
            ("cu_seqlens_k", DType::I32, &[$n + 1]),
            $(($name, DType::$other, &$shape),)*
        ]
    };
}

macro_rules! corner {
    ($label:literal, $tensors:expr $(, $scalar:expr)*) => {
        Case { label: $label, tensors: $tensors, scalars: &[$($scalar),*] }
    };
}

/// Corner cases of each kernel and option, and others behind them.
macro_rules! with_corners {
    ($($other:expr),* $(,)?) => {
        &[
            corner!(
                "bf16, 64 columns, causal, sink",
                dense!(Bf16 2 70 150, 4 2, 64 64, "sink" F32 [4]),
                CAUSAL_ON
            ),
            corner!(
                "bf16, 128 columns, softcap",
                dense!(Bf16 1 90 140, 2 1, 128 120),
                ("softcap", Scalar::Float(3.0))
            ),
            corner!(
                "bf16, packed, dropout",
                in_rows!(Bf16 3 120 144, 4 2, 40 40),
                DROPOUT[0],
                DROPOUT[1],
                DROPOUT[2]
            ),
            corner!(
                "bf16, 192 and 128 columns, ALiBi",
                dense!(Bf16 1 70 80, 2 2, 192 128, "alibi" F32 [2]),
                CAUSAL_ON
            ),
            corner!(
                "bf16, 256 columns, window",
                dense!(Bf16 1 100 90, 2 1, 256 256),
                ("window_left", Scalar::Int(20)),
                ("window_right", Scalar::Int(5))
            ),
            corner!("bf16, 128 columns, whole tiles", dense!(Bf16 1 128 130, 1 1, 128 128)),
            corner!("f16, 64 columns, odd", dense!(F16 1 33 50, 3 1, 39 17)),
            corner!("f16, 128 columns, packed", in_rows!(F16 3 120 144, 2 2, 128 128, "sink" F32 [2]), CAUSAL_ON),
            corner!("f16, 192 and 128 columns", dense!(F16 1 40 70, 2 2, 160 96), ("scale", Scalar::Float(0.09))),
            corner!("f16, 256 columns", dense!(F16 1 40 70, 2 2, 200 256), CAUSAL_ON),
            corner!(
                "f32, 64 columns, dropout",
                dense!(F32 2 40 70, 4 2, 64 64, "alibi" F32 [2, 4]),
                DROPOUT[0],
                DROPOUT[1],
                DROPOUT[2],
                ("softcap", Scalar::Float(5.0))
            ),
            corner!("f32, 128 columns", dense!(F32 1 60 60, 2 1, 128 128), CAUSAL_ON),
            corner!("f32, 256 columns", dense!(F32 1 40 40, 2 1, 256 256), CAUSAL_ON),
            $($other,)*
        ]
    };
}

const SOURCES: &[&CodeObjects] =
    &[&kernels::BACKWARD_BF16, &kernels::BACKWARD_F16, &kernels::BACKWARD_F32, &kernels::BACKWARD_DELTA];

pub(crate) const MHA_ONEKERNEL_BWD: Operator = Operator {
    name: "mha_onekernel_bwd",
    family: "hk-attention",
    summary: "gradients of mha and mha_varlen, of keys and of queries in one launch",
    args: &[
        ArgSpec::input("q", OUT, 4, "[B, Sq, Hq, Dqk] or [total_q, Hq, Dqk]").ranks(3, 4),
        ArgSpec::input("k", OUT, 4, "[B, Sk, Hkv, Dqk] or [total_k, Hkv, Dqk]").ranks(3, 4),
        ArgSpec::input("v", OUT, 4, "[B, Sk, Hkv, Dv] or [total_k, Hkv, Dv]").ranks(3, 4),
        ArgSpec::input("out", OUT, 4, "[B, Sq, Hq, Dv] or [total_q, Hq, Dv]")
            .ranks(3, 4)
            .sampled(Sample::Normal { mean: 0.0, deviation: 0.1 }),
        ArgSpec::input("lse", F32, 3, "[B, Hq, Sq] or [total_q, Hq]")
            .ranks(2, 3)
            .sampled(Sample::Normal { mean: 5.5, deviation: 0.2 }),
        ArgSpec::input("dout", OUT, 4, "as out").ranks(3, 4),
        ArgSpec::input("cu_seqlens_q", INDICES_32, 1, "[sequences + 1]")
            .sampled(Sample::Steps { step: 40 })
            .optional(),
        ArgSpec::input("cu_seqlens_k", INDICES_32, 1, "[sequences + 1]")
            .sampled(Sample::Steps { step: 48 })
            .optional(),
        ALIBI,
        SINK,
        ArgSpec::output("dq", Tolerance::Gradient, OUT, 4, "as q").ranks(3, 4),
        ArgSpec::output("dk", Tolerance::Gradient, OUT, 4, "as k").ranks(3, 4),
        ArgSpec::output("dv", Tolerance::Gradient, OUT, 4, "as v").ranks(3, 4),
        ArgSpec::output("dsink", Tolerance::Gradient, F32, 1, "[Hq]").optional(),
    ],
    scalars: SCALARS,
    kernels: SOURCES,
    cases: &[
        corner!("Llama-3 8B, 160 tokens", dense!(Bf16 1 160 160, 8 2, 128 128), CAUSAL_ON),
        corner!("DeepSeek-V3 heads, 130 tokens", dense!(Bf16 1 130 130, 2 2, 192 128), CAUSAL_ON),
    ],
    bench: BenchSizes::Cases(&[
        corner!("GQA 64/8, d128, 8192 tokens, causal", dense!(Bf16 1 8192 8192, 64 8, 128 128), CAUSAL_ON),
        corner!("MHA 16, d128, 4096 tokens", dense!(Bf16 4 4096 4096, 16 16, 128 128)),
        corner!("GQA 64/8, d64, 8192 tokens, causal", dense!(Bf16 1 8192 8192, 64 8, 64 64), CAUSAL_ON),
    ]),
    corners: with_corners![],
    outputs,
    run,
    reference,
    traffic: Traffic::once,
};

pub(crate) const FLASH_ATTN_BWD: Operator = Operator {
    name: "flash_attn_bwd",
    summary: "gradients of mha and mha_varlen by a schedule of choice",
    scalars: FLASH_SCALARS,
    cases: &[corner!("Llama-3 8B, 130 tokens", dense!(Bf16 1 130 130, 4 1, 128 128), CAUSAL_ON)],
    bench: BenchSizes::Cases(&[corner!(
        "GQA 64/8, d128, 8192 tokens, causal",
        dense!(Bf16 1 8192 8192, 64 8, 128 128),
        CAUSAL_ON
    )]),
    corners: &[
        corner!("bf16, split", dense!(Bf16 2 70 150, 4 2, 64 64, "sink" F32 [4], "alibi" F32 [4]), CAUSAL_ON),
        corner!(
            "f16, packed, split",
            in_rows!(F16 3 120 144, 2 2, 64 64),
            DROPOUT[0],
            DROPOUT[1],
            DROPOUT[2]
        ),
        corner!(
            "f32, fused",
            dense!(F32 1 40 70, 4 2, 64 64),
            ("schedule", Scalar::Choice("fused")),
            ("softcap", Scalar::Float(4.0)),
            ("window_left", Scalar::Int(9)),
            ("window_right", Scalar::Int(3)),
            ("scale", Scalar::Float(0.3))
        ),
    ],
    ..MHA_ONEKERNEL_BWD
};

pub(crate) const MHA_FUSED_BWD: Operator = Operator {
    name: "mha_fused_bwd",
    summary: "gradients of mha and mha_varlen by five products, in one pass over keys",
    scalars: FUSED_SCALARS,
    kernels: &[
        &kernels::BACKWARD_FUSED_BF16,
        &kernels::BACKWARD_FUSED_F16,
        &kernels::BACKWARD_FUSED_F32,
        &kernels::BACKWARD_DELTA,
    ],
    bench: BenchSizes::Cases(&[
        corner!("GQA 64/8, d128, 8192 tokens, causal", dense!(Bf16 1 8192 8192, 64 8, 128 128), CAUSAL_ON),
        corner!(
            "GQA 64/8, d128, 8192 tokens, causal, atomic",
            dense!(Bf16 1 8192 8192, 64 8, 128 128),
            CAUSAL_ON,
            ("dq_sums", Scalar::Choice("atomic"))
        ),
        corner!("MHA 16, d128, 4096 tokens", dense!(Bf16 4 4096 4096, 16 16, 128 128)),
    ]),
    corners: with_corners![
        corner!(
            "bf16, 128 columns, softcap, atomic",
            dense!(Bf16 1 90 140, 2 1, 128 120),
            ("softcap", Scalar::Float(3.0)),
            ("dq_sums", Scalar::Choice("atomic"))
        ),
        corner!("f32, 64 columns", dense!(F32 2 40 70, 4 2, 64 64, "alibi" F32 [2, 4])),
    ],
    ..MHA_ONEKERNEL_BWD
};

const SCALARS: &[ScalarSpec] = &[SCALE, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, DROPOUT_P, SEED, OFFSET];
const SCHEDULE: ScalarSpec = ScalarSpec {
    name: "schedule",
    default: Scalar::Choice("split"),
    choices: &["split", "fused"],
    summary: "launches of keys and of queries, or one of both; the bits are the same",
};
const FLASH_SCALARS: &[ScalarSpec] =
    &[SCALE, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, DROPOUT_P, SEED, OFFSET, SCHEDULE];

const DQ_SUMS: ScalarSpec = ScalarSpec {
    name: "dq_sums",
    default: Scalar::Choice("ordered"),
    choices: &["ordered", "atomic"],
    summary: "blocks of keys add to dq in their order, or as they come: then its last bits change from run to run",
};
const FUSED_SCALARS: &[ScalarSpec] =
    &[SCALE, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, DROPOUT_P, SEED, OFFSET, DQ_SUMS];

/// Sequences, and rows of queries and keys: of each, or of all.
struct Problem {
    sequences: usize,
    rows: [usize; 2],
    heads: [usize; 4],
    packed: bool,
}

fn problem<V: Described>(call: &Call<V>) -> Result<Problem> {
    let op = call.operator().name;
    let q = call.get("q")?.shape();
    let starts = call.optional("cu_seqlens_q").map(Described::shape);
    let problem = match (starts, q.len()) {
        (Some(starts), 3) => {
            let Sizes { q, k, dv } = sizes::<3, _>(call)?;
            let Some(sequences) = starts[0].checked_sub(1) else {
                return Err(Error::shape(op, "cu_seqlens_q", starts, "[sequences + 1]"));
            };
            expect_shape(call, "cu_seqlens_k", starts, "shape of cu_seqlens_q")?;
            Problem { sequences, rows: [q[0], k[0]], heads: [q[1], k[1], q[2], dv], packed: true }
        }
        (None, 4) => {
            let Sizes { q, k, dv } = sizes::<4, _>(call)?;
            if q[0] != k[0] {
                return Err(Error::shape(op, "k", k, format!("{} sequences (of q)", q[0])));
            }
            if call.optional("cu_seqlens_k").is_some() {
                return Err(Error::argument(op, "cu_seqlens_k", "given", "none without cu_seqlens_q"));
            }
            Problem { sequences: q[0], rows: [q[1], k[1]], heads: [q[2], k[2], q[3], dv], packed: false }
        }
        (starts, _) => {
            let want = if starts.is_some() { "[total_q, Hq, Dqk]" } else { "[B, Sq, Hq, Dqk]" };
            return Err(Error::shape(op, "q", q, want));
        }
    };
    let Problem { sequences, rows, heads: [heads, _, _, dv], packed } = problem;
    if heads == 0 {
        return Err(Error::empty(op, "q", q.len() - 2, q));
    }
    expect_dtypes(call, "q", &["out", "dout"])?;
    let mut of_out = q.to_vec();
    of_out[q.len() - 1] = dv;
    expect_shape(call, "out", &of_out, "queries by columns of v")?;
    expect_shape(call, "dout", &of_out, "queries by columns of v")?;
    let lse = if packed { vec![rows[0], heads] } else { vec![sequences, heads, rows[0]] };
    expect_shape(call, "lse", &lse, "rows of q by heads")?;
    expect_options(call, sequences, problem.heads, rows)?;
    Ok(problem)
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let Problem { heads: [heads, ..], .. } = problem(call)?;
    let like = |name: &'static str| {
        Ok::<_, Error>(TensorSpec::new(call.get(name)?.dtype(), call.get(name)?.shape()))
    };
    let mut all = vec![("dq", like("q")?), ("dk", like("k")?), ("dv", like("v")?)];
    if call.optional("sink").is_some() {
        all.push(("dsink", TensorSpec::new(DType::F32, [heads])));
    }
    Ok(all)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    problem(&inputs)?;
    let dtype = inputs.get("q")?.dtype();
    with_float!(inputs.operator().name, "q", dtype, T => run_as::<T>(stream, call))
}

fn run_as<T: Float + AttentionElement>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let Problem { sequences, rows: [sq, _], heads: [heads, ..], packed } = problem(&inputs)?;
    let starts = match packed {
        true => Some(SequenceStarts {
            q: indices(&inputs, "cu_seqlens_q")?,
            k: indices(&inputs, "cu_seqlens_k")?,
        }),
        false => None,
    };
    let of = BackwardInputs::<T> {
        q: inputs.view("q")?,
        k: inputs.view("k")?,
        v: inputs.view("v")?,
        out: inputs.view("out")?,
        lse: inputs.view("lse")?,
        dout: inputs.view("dout")?,
    };
    let gradients = Gradients::<T> {
        dq: outputs.take("dq")?,
        dk: outputs.take("dk")?,
        dv: outputs.take("dv")?,
        dsink: outputs.take_optional("dsink")?,
    };
    let fused = inputs.operator().name == MHA_FUSED_BWD.name;
    let len = match fused {
        true => fused_backward_workspace(&of, starts.as_ref())?,
        false => backward_workspace(if packed { sq } else { sequences * sq }, heads),
    };
    let workspace = outputs.workspace(stream, len)?;
    let options = options(&inputs)?;
    if fused {
        let accumulate = match inputs.choice("dq_sums")? {
            "atomic" => Accumulate::Atomic,
            _ => Accumulate::Ordered,
        };
        return mha_fused_bwd(stream, of, starts, gradients, workspace, &options, accumulate);
    }
    if inputs.operator().name == MHA_ONEKERNEL_BWD.name {
        return mha_onekernel_bwd(stream, of, starts, gradients, workspace, &options);
    }
    let schedule = match inputs.choice("schedule")? {
        "fused" => BackwardSchedule::Fused,
        _ => BackwardSchedule::Split,
    };
    flash_attn_bwd(stream, of, starts, gradients, workspace, &options, schedule)
}

fn host_sequences(call: &HostCall, problem: &Problem) -> Result<Vec<Sequence>> {
    let Problem { sequences, rows: [sq, sk], packed: is_packed, .. } = *problem;
    if !is_packed {
        let of = |n: usize| Sequence {
            queries: n * sq..(n + 1) * sq,
            keys: Some((n * sk..(n + 1) * sk).collect()),
        };
        return Ok((0..sequences).map(of).collect());
    }
    let (q_starts, k_starts) = (integers(call.get("cu_seqlens_q")?), integers(call.get("cu_seqlens_k")?));
    Ok(match packed(&q_starts, sq) {
        None => vec![Sequence { queries: 0..sq, keys: None }],
        Some(rows) => (rows.into_iter().enumerate())
            .map(|(n, queries)| Sequence { queries, keys: keys_of(&k_starts, n, sk) })
            .collect(),
    })
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let problem = problem(call)?;
    let Problem { sequences, rows: [sq, sk], heads: [heads, kv_heads, dqk, dv], packed } = problem;
    let values = |name: &'static str| call.get(name).map(|t| t.to_f64());
    let (q, k, v, out, dout) = (values("q")?, values("k")?, values("v")?, values("out")?, values("dout")?);
    let lse = values("lse")?;
    let lse = if packed { lse } else { transposed(&lse, [sequences, heads, sq]) };
    let (alibi, sink) =
        (call.optional("alibi").map(|t| t.to_f64()), call.optional("sink").map(|t| t.to_f64()));
    let mask = mask(call)?;
    let mut all = HostGradients {
        dq: vec![HostTensorF64::UNTOUCHED; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
        dsink: vec![0.0; heads],
    };
    let all_sequences = host_sequences(call, &problem)?;
    let keys: usize = all_sequences.iter().filter_map(|s| s.keys.as_ref()).map(Vec::len).sum();
    // Of calls beyond the limit of the reference, gradients of some queries and keys.
    let of_rows = 4 * ((keys + q.len() / (heads * dqk)) * heads * (dqk + dv)) as u64;
    let most = usize::try_from(call.reference_limit() / of_rows.max(1)).unwrap_or(usize::MAX).max(1);
    for (n, Sequence { queries, keys }) in all_sequences.iter().enumerate() {
        let of = |width: usize| queries.start * heads * width..queries.end * heads * width;
        let Some(keys) = keys else {
            all.dq[of(dqk)].fill(f64::NAN);
            all.dk.fill(f64::NAN);
            all.dv.fill(f64::NAN);
            continue;
        };
        let first = keys.first().map_or(0, |row| row * kv_heads);
        let of_keys = |width: usize| first * width..(first + keys.len() * kv_heads) * width;
        let longest = queries.len().max(keys.len());
        let step = longest.div_ceil(most).max(1);
        let only = |i: usize| (longest - 1 - i).is_multiple_of(step);
        let attention = Attention {
            heads,
            kv_heads,
            dqk,
            dv,
            scale: scale(call)?.map_or(1.0 / (dqk as f64).sqrt(), f64::from),
            softcap: float(call, "softcap")?.into(),
            causal: mask.causal,
            window: [mask.left, mask.right].map(|keys| keys.map(|n| n as usize)),
            alibi: alibi.as_ref().map(|a| if a.len() == heads { &a[..] } else { &a[n * heads..][..heads] }),
            sink: sink.as_deref(),
            dropout: dropout(call)?.map(|Dropout { p, seed, offset }| HostDropout {
                p: p.into(),
                seed,
                offset,
                batch: n,
                longest: [sq, sk],
            }),
            only: Some(&only),
            ..Attention::default()
        };
        let results = Results { out: &out[of(dv)], lse: &lse[of(1)], dout: &dout[of(dv)] };
        let got = attention.backward(&q[of(dqk)], &k[of_keys(dqk)], &v[of_keys(dv)], &results, &only);
        let copy = |to: &mut [f64], from: &[f64], width: usize| {
            for (i, (to, from)) in to.chunks_mut(width).zip(from.chunks(width)).enumerate() {
                match only(i) {
                    true => to.copy_from_slice(from),
                    false => to.fill(HostTensorF64::UNTOUCHED),
                }
            }
        };
        copy(&mut all.dq[of(dqk)], &got.dq, heads * dqk);
        copy(&mut all.dk[of_keys(dqk)], &got.dk, kv_heads * dqk);
        copy(&mut all.dv[of_keys(dv)], &got.dv, kv_heads * dv);
        all.dsink.iter_mut().zip(&got.dsink).for_each(|(sum, of)| *sum += of);
    }
    let host =
        |name: &'static str, values| Ok::<_, Error>(HostTensorF64::new(call.get(name)?.shape(), values));
    let mut named = vec![("dq", host("q", all.dq)?), ("dk", host("k", all.dk)?), ("dv", host("v", all.dv)?)];
    if sink.is_some() {
        named.push(("dsink", HostTensorF64::new([heads], all.dsink)));
    }
    Ok(named)
}
