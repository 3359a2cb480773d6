//! `qk_cat`, `qk_rope_cat`.

use super::common::{
    COS, INDICES, OFFSETS, POSITIONS, SIN, STYLE, TABLE, TABLES, expect_dtypes, expect_shape, expect_tables,
    integers, rope_first, tables, with_table,
};
use crate::reference::qk_concat as reference;
use crate::{QkCatInputs, QkOutputs, QkRopeCatInputs, kernels, qk_cat, qk_rope_cat};
use hk_core::plan::rope::reference::{Tables, positions_in_sequences, table_rows};
use hk_core::plan::rope::{self, Rope};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Element, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16, f16, with_float};

/// Inputs of `qk_cat`: dtype, tokens, heads of queries and of keys, columns of both.
macro_rules! cat {
    ($dtype:ident $tokens:literal $q:literal $kv:literal $cols1:literal $cols2:literal) => {
        [
            ("q1", DType::$dtype, &[$tokens, $q, $cols1]),
            ("q2", DType::$dtype, &[$tokens, $q, $cols2]),
            ("k1", DType::$dtype, &[$tokens, $kv, $cols1]),
            ("k2", DType::$dtype, &[$tokens, $kv, $cols2]),
        ]
    };
}

/// Inputs of `qk_rope_cat`: the same, dtype and shape of the tables, and integers.
macro_rules! rope_cat {
    (
        $dtype:ident $tokens:literal $q:literal $kv:literal $cols:literal $rotary:literal,
        $table:ident $rows:literal $width:literal $(, $name:literal $integer:ident $n:literal)*
    ) => {
        [
            ("q_nope", DType::$dtype, &[$tokens, $q, $cols]),
            ("q_pe", DType::$dtype, &[$tokens, $q, $rotary]),
            ("k_nope", DType::$dtype, &[$tokens, $kv, $cols]),
            ("k_pe", DType::$dtype, &[$tokens, $kv, $rotary]),
            ("cos", DType::$table, &[$rows, $width]),
            ("sin", DType::$table, &[$rows, $width]),
            $(($name, DType::$integer, &[$n]),)*
        ]
    };
}

pub(crate) const QK_CAT: Operator = Operator {
    name: "qk_cat",
    family: "hk-attention",
    summary: "q_out = (q1, q2), k_out = (k1, k2) along the columns of each head",
    args: &[
        ArgSpec::input("q1", COPIED, 3, "[tokens, q_heads, cols1]"),
        ArgSpec::input("q2", COPIED, 3, "[tokens, q_heads, cols2]"),
        ArgSpec::input("k1", COPIED, 3, "[tokens, kv_heads, cols1]"),
        ArgSpec::input("k2", COPIED, 3, "[tokens, kv_heads, cols2]"),
        ArgSpec::output("q_out", Tolerance::Exact, COPIED, 3, "[tokens, q_heads, cols1 + cols2]"),
        ArgSpec::output("k_out", Tolerance::Exact, COPIED, 3, "[tokens, kv_heads, cols1 + cols2]"),
    ],
    scalars: &[],
    kernels: &[&kernels::QK_CAT],
    cases: &[
        Case {
            label: "DeepSeek-V3 latent heads, 32 tokens",
            tensors: &[
                ("q1", DType::Bf16, &[32, 16, 512]),
                ("q2", DType::Bf16, &[32, 16, 64]),
                ("k1", DType::Bf16, &[32, 1, 512]),
                ("k2", DType::Bf16, &[32, 1, 64]),
            ],
            scalars: &[],
        },
        Case {
            label: "DeepSeek-V3 heads, 32 tokens",
            tensors: &[
                ("q1", DType::Bf16, &[32, 128, 128]),
                ("q2", DType::Bf16, &[32, 128, 64]),
                ("k1", DType::Bf16, &[32, 128, 128]),
                ("k2", DType::Bf16, &[32, 128, 64]),
            ],
            scalars: &[],
        },
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "DeepSeek-V3, 16384 tokens",
        tensors: &[
            ("q1", DType::Bf16, &[16_384, 32, 512]),
            ("q2", DType::Bf16, &[16_384, 32, 64]),
            ("k1", DType::Bf16, &[16_384, 1, 512]),
            ("k2", DType::Bf16, &[16_384, 1, 64]),
        ],
        scalars: &[],
    }]),
    corners: &[
        Case { label: "16 bits", tensors: &cat!(Bf16 40 9 3 24 16), scalars: &[] },
        Case { label: "8 bits", tensors: &cat!(Fp8E4M3 40 9 3 48 16), scalars: &[] },
        Case { label: "32 bits", tensors: &cat!(F32 40 4 1 4 20), scalars: &[] },
        Case { label: "scalar path of 16 bits", tensors: &cat!(F16 40 9 3 23 3), scalars: &[] },
        Case { label: "scalar path of 8 bits", tensors: &cat!(I8 40 9 3 23 5), scalars: &[] },
        Case { label: "scalar path of 32 bits", tensors: &cat!(I32 40 4 1 5 1), scalars: &[] },
    ],
    outputs: outputs_cat,
    run: run_cat,
    reference: reference_cat,
    traffic: Traffic::once,
};

pub(crate) const QK_ROPE_CAT: Operator = Operator {
    name: "qk_rope_cat",
    summary: "q_out = (q_nope, rotation of q_pe), k_out = (k_nope, rotation of k_pe)",
    args: &[
        ArgSpec::input("q_nope", TABLES, 3, "[tokens, q_heads, cols]"),
        ArgSpec::input("q_pe", TABLES, 3, "[tokens, q_heads, rotary]"),
        ArgSpec::input("k_nope", TABLES, 3, "[tokens, kv_heads, cols]"),
        ArgSpec::input("k_pe", TABLES, 3, "[tokens, kv_heads, rotary]"),
        COS,
        SIN,
        POSITIONS.sampled(Sample::Integers { low: 0, high: 64 }).optional(),
        ArgSpec::input("cu_seqlens", INDICES, 1, "[sequences + 1]")
            .sampled(Sample::Steps { step: 8 })
            .optional(),
        OFFSETS.sampled(Sample::Integers { low: -4, high: 4 }),
        ArgSpec::output("q_out", Tolerance::Elementwise, TABLES, 3, "[tokens, q_heads, cols + rotary]"),
        ArgSpec::output("k_out", Tolerance::Elementwise, TABLES, 3, "[tokens, kv_heads, cols + rotary]"),
    ],
    scalars: &[STYLE, TABLE, INVERSE],
    kernels: &[&kernels::QK_ROPE_CAT],
    cases: &[
        Case {
            label: "DeepSeek-V3 latent heads, 32 tokens",
            tensors: &[
                ("q_nope", DType::Bf16, &[32, 16, 512]),
                ("q_pe", DType::Bf16, &[32, 16, 64]),
                ("k_nope", DType::Bf16, &[32, 1, 512]),
                ("k_pe", DType::Bf16, &[32, 1, 64]),
                ("cos", DType::F32, &[64, 32]),
                ("sin", DType::F32, &[64, 32]),
                ("positions", DType::I64, &[32]),
            ],
            scalars: &[("style", INTERLEAVED)],
        },
        Case {
            label: "DeepSeek-V3 heads, 32 tokens",
            tensors: &[
                ("q_nope", DType::Bf16, &[32, 128, 128]),
                ("q_pe", DType::Bf16, &[32, 128, 64]),
                ("k_nope", DType::Bf16, &[32, 128, 128]),
                ("k_pe", DType::Bf16, &[32, 128, 64]),
                ("cos", DType::F32, &[64, 32]),
                ("sin", DType::F32, &[64, 32]),
                ("positions", DType::I64, &[32]),
            ],
            scalars: &[("style", INTERLEAVED)],
        },
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "DeepSeek-V3, 16384 tokens",
        tensors: &[
            ("q_nope", DType::Bf16, &[16_384, 32, 512]),
            ("q_pe", DType::Bf16, &[16_384, 32, 64]),
            ("k_nope", DType::Bf16, &[16_384, 1, 512]),
            ("k_pe", DType::Bf16, &[16_384, 1, 64]),
            ("cos", DType::F32, &[8192, 32]),
            ("sin", DType::F32, &[8192, 32]),
            ("positions", DType::I64, &[16_384]),
        ],
        scalars: &[],
    }]),
    corners: &[
        Case { label: "bf16", tensors: &rope_cat!(Bf16 40 9 3 24 16, Bf16 40 8), scalars: &[] },
        Case {
            label: "f16, interleaved full tables, inverse",
            tensors: &rope_cat!(F16 40 9 3 24 16, F32 40 16),
            scalars: &[("style", INTERLEAVED), ("table", FULL), ("inverse", Scalar::Bool(true))],
        },
        Case {
            label: "f32, positions beyond the tables",
            tensors: &rope_cat!(F32 40 4 1 4 16, F32 30 8, "positions" I32 40, "offsets" I64 40),
            scalars: &[],
        },
        Case {
            label: "scalar path of bf16, sequences",
            tensors: &rope_cat!(Bf16 40 9 3 127 2, Bf16 8 1, "cu_seqlens" I64 5),
            scalars: &[],
        },
        Case {
            label: "scalar path of f16",
            tensors: &rope_cat!(F16 40 4 1 24 10, F32 40 5, "positions" I64 40),
            scalars: &[("style", INTERLEAVED)],
        },
        Case {
            label: "scalar path of f32",
            tensors: &rope_cat!(F32 40 4 1 5 6, F32 40 6),
            scalars: &[("table", FULL)],
        },
    ],
    outputs: outputs_rope_cat,
    run: run_rope_cat,
    reference: reference_rope_cat,
    traffic: rope::traffic,
    ..QK_CAT
};

const INTERLEAVED: Scalar = Scalar::Choice("interleaved");
const FULL: Scalar = Scalar::Choice("full");

const COPIED: &[DType] = &[
    DType::Bf16,
    DType::F16,
    DType::F32,
    DType::Fp8E4M3,
    DType::Fp8E4M3Fnuz,
    DType::I8,
    DType::U8,
    DType::I16,
    DType::I32,
];
const INVERSE: ScalarSpec = ScalarSpec {
    name: "inverse",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "rotates back, as the backward pass does",
};

/// The rotation that the scalars say.
fn rope_of<V: Described>(call: &Call<V>) -> Result<Rope> {
    Ok(Rope { direction: rope::direction(call)?, ..rope_first(call)? })
}

fn concatenated<V: Described>(
    call: &Call<V>,
    first: &'static str,
    second: &'static str,
) -> Result<TensorSpec> {
    let (first, second) = (call.get(first)?, call.get(second)?);
    let [tokens, heads, cols] = [0, 1, 2].map(|axis| first.shape()[axis]);
    Ok(TensorSpec::new(first.dtype(), [tokens, heads, cols + second.shape()[2]]))
}

/// Checks the shapes and types of queries and keys against each other.
fn expect_heads(call: &CallSpec, [q1, q2, k1, k2]: [&'static str; 4]) -> Result<()> {
    let op = call.operator().name;
    expect_dtypes(call, q1, &[q2, k1, k2])?;
    let shape_of = |name| call.get(name).map(|t: &TensorSpec| t.shape.clone());
    let (q, k) = (shape_of(q1)?, shape_of(k1)?);
    let [tokens, q_heads, kv_heads] = [q[0], q[1], k[1]];
    let cols2 = shape_of(q2)?[2];
    for (name, cols) in [(q1, q[2]), (q2, cols2)] {
        expect_shape(call, name, &[tokens, q_heads, cols], &format!("tokens and heads of {q1}"))?;
        if cols == 0 {
            return Err(Error::empty(op, name, 2, &shape_of(name)?));
        }
    }
    for (name, cols) in [(k1, q[2]), (k2, cols2)] {
        expect_shape(call, name, &[tokens, kv_heads, cols], "tokens and columns of the queries")?;
    }
    if q_heads != 0 && (kv_heads == 0 || !q_heads.is_multiple_of(kv_heads)) {
        return Err(Error::shape(op, q1, &q, format!("a multiple of {kv_heads} heads (of keys)")));
    }
    Ok(())
}

fn outputs_cat(call: &CallSpec) -> Result<Named<TensorSpec>> {
    expect_heads(call, ["q1", "q2", "k1", "k2"])?;
    Ok(vec![("q_out", concatenated(call, "q1", "q2")?), ("k_out", concatenated(call, "k1", "k2")?)])
}

fn outputs_rope_cat(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let (op, rope, q_pe) = (call.operator().name, rope_of(call)?, call.get("q_pe")?);
    rope.check(op, "q_pe", &q_pe.shape, q_pe.shape[2])?;
    if rope.rotary != q_pe.shape[2] {
        return Err(Error::shape(op, "q_pe", &q_pe.shape, format!("{} columns (rotary)", rope.rotary)));
    }
    expect_tables(call, &rope, q_pe.shape[0], "q_pe")?;
    expect_heads(call, ["q_nope", "q_pe", "k_nope", "k_pe"])?;
    Ok(vec![
        ("q_out", concatenated(call, "q_nope", "q_pe")?),
        ("k_out", concatenated(call, "k_nope", "k_pe")?),
    ])
}

fn run_cat(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    fn of<T: Element>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
        let (inputs, mut outputs) = call.split();
        let view = |name| inputs.view::<T>(name);
        let tensors = QkCatInputs { q1: view("q1")?, q2: view("q2")?, k1: view("k1")?, k2: view("k2")? };
        let out = QkOutputs { q_out: outputs.take("q_out")?, k_out: outputs.take("k_out")? };
        qk_cat(stream, tensors, out)
    }
    let (inputs, _) = call.split();
    match inputs.get("q1")?.dtype() {
        DType::F16 => of::<f16>(stream, call),
        DType::F32 => of::<f32>(stream, call),
        DType::Fp8E4M3 => of::<Fp8E4M3>(stream, call),
        DType::Fp8E4M3Fnuz => of::<Fp8E4M3Fnuz>(stream, call),
        DType::I8 => of::<i8>(stream, call),
        DType::U8 => of::<u8>(stream, call),
        DType::I16 => of::<i16>(stream, call),
        DType::I32 => of::<i32>(stream, call),
        _ => of::<bf16>(stream, call),
    }
}

fn run_rope_cat(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let rope = rope_of(&inputs)?;
    let table_type = inputs.get("cos")?.dtype();
    with_float!("qk_rope_cat", "q_nope", inputs.get("q_nope")?.dtype(), T => {
        let out = QkOutputs { q_out: outputs.take("q_out")?, k_out: outputs.take("k_out")? };
        with_table!(table_type, T, R => qk_rope_cat(stream, rope_cat_inputs::<T, R>(&inputs)?, out, rope))
    })
}

fn rope_cat_inputs<'a, T: Element, R: Element>(inputs: &Inputs<'a>) -> Result<QkRopeCatInputs<'a, T, R>> {
    Ok(QkRopeCatInputs {
        q_nope: inputs.view("q_nope")?,
        q_pe: inputs.view("q_pe")?,
        k_nope: inputs.view("k_nope")?,
        k_pe: inputs.view("k_pe")?,
        tables: tables(inputs)?,
    })
}

fn reference_cat(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_cat(&call.spec())?;
    let cat = |first, second| {
        let spec = concatenated(call, first, second)?;
        let (first, second) = (call.get(first)?, call.get(second)?);
        let cols = [first.shape()[2], second.shape()[2]];
        Ok(HostTensorF64::new(spec.shape, reference::cat(&first.to_f64(), &second.to_f64(), cols)))
    };
    Ok(vec![("q_out", cat("q1", "q2")?), ("k_out", cat("k1", "k2")?)])
}

fn reference_rope_cat(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_rope_cat(&call.spec())?;
    let rope = rope_of(call)?;
    let (cos, sin) = (call.get("cos")?, call.get("sin")?);
    let tokens = call.get("q_pe")?.shape()[0];
    let given = |name| call.optional(name).map(integers);
    let positions = given("positions").unwrap_or_else(|| match given("cu_seqlens") {
        Some(starts) => positions_in_sequences(tokens, &starts),
        None => (0..tokens as i64).collect(),
    });
    let rows = table_rows(&positions, given("offsets").as_deref(), cos.shape()[0]);
    let tables = Tables { cos: cos.to_f64(), sin: sin.to_f64() };
    let cat = |nope, pe| {
        let spec = concatenated(call, nope, pe)?;
        let (nope, pe) = (call.get(nope)?, call.get(pe)?);
        let sizes = [nope.shape()[1], nope.shape()[2]];
        let values = reference::rope_cat(&nope.to_f64(), &pe.to_f64(), sizes, &tables, &rows, &rope);
        Ok(HostTensorF64::new(spec.shape, values))
    };
    Ok(vec![("q_out", cat("q_nope", "q_pe")?), ("k_out", cat("k_nope", "k_pe")?)])
}
