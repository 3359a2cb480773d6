//! `fused_qkv_split_qk_rope`.

use super::rope::{
    COS, FULL, INTERLEAVED, LAST, OFFSETS, POSITIONS, ROPE_SCALARS, SIN, STARTS, corner, expect_tables,
    reference_tables, rope_of, tables,
};
use crate::reference::qkv::split_and_rotate;
use crate::rope::expect_even;
use crate::{QkvOutputs, fused_qkv_split_qk_rope, kernels};
use hk_core::plan::rope;
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Scalar, ScalarSpec, TensorSpec, Tolerance,
};
use hk_core::{DType, Error, Result, Stream, with_float};

pub(crate) const FUSED_QKV_SPLIT_QK_ROPE: Operator = Operator {
    name: "fused_qkv_split_qk_rope",
    family: "hk-activation",
    summary: "q, k, v = the heads of qkv; q and k rotated as by rope_cached",
    args: &[QKV, COS, SIN, POSITIONS, STARTS, OFFSETS, Q, K, V],
    scalars: SCALARS,
    kernels: &[&kernels::ROPE],
    cases: &[
        Case {
            label: "Llama-3 8B, 256 tokens",
            tensors: &[
                ("qkv", DType::Bf16, &[256, 6144]),
                ("cos", DType::F32, &[64, 64]),
                ("sin", DType::F32, &[64, 64]),
                ("positions", DType::I64, &[256]),
            ],
            scalars: &[("rotary", Scalar::Int(128))],
        },
        Case {
            label: "GPT-OSS, 256 tokens",
            tensors: &[
                ("qkv", DType::Bf16, &[256, 5120]),
                ("cos", DType::F32, &[64, 32]),
                ("sin", DType::F32, &[64, 32]),
                ("positions", DType::I64, &[256]),
            ],
            scalars: &[
                ("q_heads", Scalar::Int(64)),
                ("head_dim", Scalar::Int(64)),
                ("rotary", Scalar::Int(64)),
            ],
        },
        Case {
            label: "Qwen3 30B-A3B, 16 tokens decoded",
            tensors: &[
                ("qkv", DType::Bf16, &[16, 5120]),
                ("cos", DType::F32, &[64, 64]),
                ("sin", DType::F32, &[64, 64]),
                ("positions", DType::I64, &[16]),
            ],
            scalars: &[("kv_heads", Scalar::Int(4)), ("rotary", Scalar::Int(128))],
        },
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "Llama-3 8B, 65536 tokens",
        tensors: &[
            ("qkv", DType::Bf16, &[65_536, 6144]),
            ("cos", DType::F32, &[8192, 64]),
            ("sin", DType::F32, &[8192, 64]),
            ("positions", DType::I64, &[65_536]),
        ],
        scalars: &[
            ("q_heads", Scalar::Int(32)),
            ("kv_heads", Scalar::Int(8)),
            ("head_dim", Scalar::Int(128)),
            ("rotary", Scalar::Int(128)),
        ],
    }]),
    corners: &[
        corner!("bf16": "qkv" Bf16 [70, 320], "cos" Bf16 [70, 16], "sin" Bf16 [70, 16];
            "q_heads" Scalar::Int(6), "kv_heads" Scalar::Int(2), "head_dim" Scalar::Int(32), "rotary" Scalar::Int(32)),
        corner!("a part of the columns, positions beyond the tables":
            "qkv" F16 [70, 288], "cos" F32 [40, 32], "sin" F32 [40, 32], "positions" I32 [70], "offsets" I64 [70];
            "q_heads" Scalar::Int(4), "kv_heads" Scalar::Int(1), "head_dim" Scalar::Int(48), "rotary" Scalar::Int(32),
            "table" FULL, "span" LAST, "style" INTERLEAVED),
        corner!("scalar path": "qkv" F32 [70, 40], "cos" F32 [70, 3], "sin" F32 [70, 3], "cu_seqlens" I64 [10];
            "q_heads" Scalar::Int(2), "kv_heads" Scalar::Int(1), "head_dim" Scalar::Int(10), "rotary" Scalar::Int(6)),
    ],
    outputs,
    run,
    reference,
    traffic: rope::traffic,
};

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const QKV: ArgSpec = ArgSpec::input("qkv", FLOATS, 2, "[tokens, (q_heads + 2 kv_heads) * head_dim]");
const Q: ArgSpec = ArgSpec::output("q", Tolerance::Elementwise, FLOATS, 3, "[tokens, q_heads, head_dim]");
const K: ArgSpec = ArgSpec::output("k", Tolerance::Elementwise, FLOATS, 3, "[tokens, kv_heads, head_dim]");
const V: ArgSpec = ArgSpec::output("v", Tolerance::Exact, FLOATS, 3, "[tokens, kv_heads, head_dim]");

const SCALARS: &[ScalarSpec] = &{
    let [style, table, rotary, span, inverse] = ROPE_SCALARS;
    [style, table, rotary, span, inverse, Q_HEADS, KV_HEADS, HEAD_DIM]
};

const Q_HEADS: ScalarSpec = ScalarSpec {
    name: "q_heads",
    default: Scalar::Count(32),
    choices: &[],
    summary: "query heads of a row of qkv",
};
const KV_HEADS: ScalarSpec = ScalarSpec {
    name: "kv_heads",
    default: Scalar::Count(8),
    summary: "key heads, and value heads",
    ..Q_HEADS
};
const HEAD_DIM: ScalarSpec =
    ScalarSpec { name: "head_dim", default: Scalar::Count(128), summary: "columns of a head", ..Q_HEADS };

/// Query heads, key heads, columns of a head.
fn sizes<V: Described>(call: &Call<V>) -> Result<[usize; 3]> {
    Ok([call.size("q_heads")?, call.size("kv_heads")?, call.size("head_dim")?])
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let (op, rope) = (call.operator().name, rope_of(call)?);
    let ([q_heads, kv_heads, head_dim], qkv) = (sizes(call)?, call.get("qkv")?);
    let &[tokens, width] = &qkv.shape[..] else {
        return Err(Error::shape(op, "qkv", &qkv.shape, "2 axes"));
    };
    if kv_heads == 0 {
        return Err(Error::argument(op, "kv_heads", kv_heads, "one or more"));
    }
    if !q_heads.is_multiple_of(kv_heads) {
        return Err(Error::argument(op, "q_heads", q_heads, format!("a multiple of kv_heads ({kv_heads})")));
    }
    let columns = q_heads.saturating_add(2 * kv_heads).saturating_mul(head_dim);
    if width != columns {
        let want = format!("[{tokens}, {columns}] ((heads of q, k and v) * {head_dim})");
        return Err(Error::shape(op, "qkv", &qkv.shape, want));
    }
    let q = [tokens, q_heads, head_dim];
    rope.check(op, "q", &q, head_dim)?;
    expect_even(op, "q", &q, head_dim)?;
    expect_tables(call, &rope, &[tokens], qkv.dtype)?;
    let of = |heads| TensorSpec::new(qkv.dtype, [tokens, heads, head_dim]);
    Ok(vec![("q", of(q_heads)), ("k", of(kv_heads)), ("v", of(kv_heads))])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let rope = rope_of(&inputs)?;
    let table_type = inputs.get("cos")?.dtype();
    with_float!("fused_qkv_split_qk_rope", "qkv", inputs.get("qkv")?.dtype(), T => {
        let qkv = inputs.view::<T>("qkv")?;
        let out = QkvOutputs { q: outputs.take("q")?, k: outputs.take("k")?, v: outputs.take("v")? };
        if table_type == DType::F32 {
            fused_qkv_split_qk_rope(stream, qkv, tables::<f32>(&inputs)?, out, rope)
        } else {
            fused_qkv_split_qk_rope(stream, qkv, tables::<T>(&inputs)?, out, rope)
        }
    })
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs(&call.spec())?;
    let (rope, sizes, qkv) = (rope_of(call)?, sizes(call)?, call.get("qkv")?);
    let [q_heads, kv_heads, head_dim] = sizes;
    let tokens = qkv.shape()[0];
    let (tables, rows) = reference_tables(call, &[tokens], false)?;
    let split = split_and_rotate(&qkv.to_f64(), sizes, &tables, &rows, &rope);
    let of = |heads, values| HostTensorF64::new([tokens, heads, head_dim], values);
    Ok(vec![("q", of(q_heads, split.q)), ("k", of(kv_heads, split.k)), ("v", of(kv_heads, split.v))])
}
