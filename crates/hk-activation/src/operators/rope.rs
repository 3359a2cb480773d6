//! `rope_cached`, `rope_freqs`, `rope_qk`.

use crate::reference;
use crate::rope::expect_even;
use crate::{RopeQkInputs, RopeQkOutputs, kernels, rope_cached, rope_freqs, rope_qk};
use hk_core::plan::rope::reference::{Tables, positions_in_sequences, table_rows};
use hk_core::plan::rope::{
    self, Positions, Rope, RopeAngles, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables, direction,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance,
};
use hk_core::{DType, Element, Error, IndexView, Result, Stream, with_float};

pub(crate) const ROPE_CACHED: Operator = Operator {
    name: "rope_cached",
    family: "hk-activation",
    summary: "(y_a, y_b) = (x_a cos - x_b sin, x_b cos + x_a sin) for the pairs of columns of each head",
    args: &[X, COS, SIN, POSITIONS, STARTS, OFFSETS, Y],
    scalars: SCALARS,
    kernels: &[&kernels::ROPE],
    cases: &[
        Case {
            label: "Llama-3 8B queries, 256 tokens",
            tensors: &[
                ("x", DType::Bf16, &[256, 32, 128]),
                ("cos", DType::F32, &[256, 64]),
                ("sin", DType::F32, &[256, 64]),
            ],
            scalars: &[("rotary", Scalar::Int(128))],
        },
        Case {
            label: "DeepSeek-V3 queries, 32 tokens",
            tensors: &[
                ("x", DType::Bf16, &[32, 128, 192]),
                ("cos", DType::F32, &[64, 32]),
                ("sin", DType::F32, &[64, 32]),
                ("positions", DType::I64, &[32]),
            ],
            scalars: &[
                ("rotary", Scalar::Int(64)),
                ("style", Scalar::Choice("interleaved")),
                ("span", Scalar::Choice("last")),
            ],
        },
        Case {
            label: "4 batches of 32 heads of 128 tokens, head by head",
            tensors: &[
                ("x", DType::Bf16, &[4, 32, 128, 128]),
                ("cos", DType::Bf16, &[128, 64]),
                ("sin", DType::Bf16, &[128, 64]),
            ],
            scalars: &[("rotary", Scalar::Int(128)), ("layout", Scalar::Choice("bhsd"))],
        },
    ],
    bench: BenchSizes::Cases(&[
        Case {
            label: "4 x 32 x 1024 x 128",
            tensors: &[
                ("x", DType::Bf16, &[4, 32, 1024, 128]),
                ("cos", DType::Bf16, &[1024, 64]),
                ("sin", DType::Bf16, &[1024, 64]),
            ],
            scalars: &[("rotary", Scalar::Int(128)), ("layout", Scalar::Choice("bhsd"))],
        },
        Case {
            label: "8 x 32 x 2048 x 128",
            tensors: &[
                ("x", DType::Bf16, &[8, 32, 2048, 128]),
                ("cos", DType::Bf16, &[2048, 64]),
                ("sin", DType::Bf16, &[2048, 64]),
            ],
            scalars: &[("rotary", Scalar::Int(128)), ("layout", Scalar::Choice("bhsd"))],
        },
        Case {
            label: "16 x 32 x 4096 x 128",
            tensors: &[
                ("x", DType::Bf16, &[16, 32, 4096, 128]),
                ("cos", DType::Bf16, &[4096, 64]),
                ("sin", DType::Bf16, &[4096, 64]),
            ],
            scalars: &[("rotary", Scalar::Int(128)), ("layout", Scalar::Choice("bhsd"))],
        },
    ]),
    corners: &CORNERS_CACHED,
    outputs: outputs_one,
    run: run_cached,
    reference: reference_one,
    traffic: rope::traffic,
};

pub(crate) const ROPE_FREQS: Operator = Operator {
    name: "rope_freqs",
    summary: "rope_cached with the cosines and sines of given angles",
    args: &[X, ANGLES, POSITIONS, STARTS, OFFSETS, Y],
    cases: &[
        Case {
            label: "Llama-3 8B queries, 256 tokens",
            tensors: &[("x", DType::Bf16, &[256, 32, 128]), ("angles", DType::F32, &[256, 64])],
            scalars: &[("rotary", Scalar::Int(128))],
        },
        Case {
            label: "GPT-OSS queries, 128 tokens",
            tensors: &[("x", DType::Bf16, &[128, 64, 64]), ("angles", DType::F32, &[128, 32])],
            scalars: &[("rotary", Scalar::Int(64))],
        },
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "Llama-3 8B queries, 65536 tokens",
        tensors: &[("x", DType::Bf16, &[65_536, 32, 128]), ("angles", DType::F32, &[65_536, 64])],
        scalars: &[("rotary", Scalar::Int(128))],
    }]),
    corners: &CORNERS_FREQS,
    run: run_freqs,
    ..ROPE_CACHED
};

pub(crate) const ROPE_QK: Operator = Operator {
    name: "rope_qk",
    summary: "rope_cached of queries and of keys, in one launch",
    args: &[
        ArgSpec { name: "q", ..X },
        ArgSpec { name: "k", ..X },
        COS,
        SIN,
        POSITIONS,
        STARTS,
        OFFSETS,
        ArgSpec { name: "q_out", ..Y },
        ArgSpec { name: "k_out", ..Y },
    ],
    cases: &[
        Case {
            label: "Llama-3 8B, 256 tokens",
            tensors: &[
                ("q", DType::Bf16, &[256, 32, 128]),
                ("k", DType::Bf16, &[256, 8, 128]),
                ("cos", DType::F32, &[64, 64]),
                ("sin", DType::F32, &[64, 64]),
                ("positions", DType::I64, &[256]),
            ],
            scalars: &[("rotary", Scalar::Int(128))],
        },
        Case {
            label: "GPT-OSS, 256 tokens",
            tensors: &[
                ("q", DType::Bf16, &[256, 64, 64]),
                ("k", DType::Bf16, &[256, 8, 64]),
                ("cos", DType::F32, &[64, 32]),
                ("sin", DType::F32, &[64, 32]),
                ("positions", DType::I64, &[256]),
            ],
            scalars: &[("rotary", Scalar::Int(64))],
        },
        Case {
            label: "Llama-3 8B, 16 tokens decoded",
            tensors: &[
                ("q", DType::Bf16, &[16, 32, 128]),
                ("k", DType::Bf16, &[16, 8, 128]),
                ("cos", DType::F32, &[64, 64]),
                ("sin", DType::F32, &[64, 64]),
                ("positions", DType::I64, &[16]),
            ],
            scalars: &[("rotary", Scalar::Int(128))],
        },
    ],
    bench: BenchSizes::Cases(&[Case {
        label: "Llama-3 8B, 65536 tokens",
        tensors: &[
            ("q", DType::Bf16, &[65_536, 32, 128]),
            ("k", DType::Bf16, &[65_536, 8, 128]),
            ("cos", DType::F32, &[8192, 64]),
            ("sin", DType::F32, &[8192, 64]),
            ("positions", DType::I64, &[65_536]),
        ],
        scalars: &[("rotary", Scalar::Int(128))],
    }]),
    corners: &CORNERS_QK,
    outputs: outputs_qk,
    run: run_qk,
    reference: reference_qk,
    ..ROPE_CACHED
};

/// A corner: dtypes of heads and tables, tensors by name, scalars by name.
macro_rules! corner {
    ($label:literal: $($name:literal $dtype:ident $shape:expr),+; $($scalar:literal $value:expr),*) => {
        Case {
            label: $label,
            tensors: &[$(($name, DType::$dtype, &$shape)),+],
            scalars: &[$(($scalar, $value)),*],
        }
    };
}

pub(super) use corner;

pub(super) const INTERLEAVED: Scalar = Scalar::Choice("interleaved");
pub(super) const LAST: Scalar = Scalar::Choice("last");
pub(super) const FULL: Scalar = Scalar::Choice("full");
const BHSD: Scalar = Scalar::Choice("bhsd");
const SBHD: Scalar = Scalar::Choice("sbhd");
const BSHD: Scalar = Scalar::Choice("bshd");

const CORNERS_CACHED: [Case; 14] = [
    corner!("bf16": "x" Bf16 [70, 9, 32], "cos" Bf16 [70, 16], "sin" Bf16 [70, 16]; "rotary" Scalar::Int(32)),
    corner!("f16, interleaved": "x" F16 [70, 9, 32], "cos" F16 [70, 16], "sin" F16 [70, 16];
        "rotary" Scalar::Int(32), "style" INTERLEAVED),
    corner!("f32, inverse": "x" F32 [70, 9, 16], "cos" F32 [70, 8], "sin" F32 [70, 8];
        "rotary" Scalar::Int(16), "inverse" Scalar::Bool(true)),
    corner!("f16, tables of f32": "x" F16 [70, 9, 32], "cos" F32 [70, 16], "sin" F32 [70, 16]; "rotary" Scalar::Int(32)),
    corner!("f32, full tables": "x" F32 [70, 9, 16], "cos" F32 [70, 16], "sin" F32 [70, 16];
        "rotary" Scalar::Int(16), "table" FULL),
    corner!("full tables, the last columns, positions beyond them":
        "x" Bf16 [3, 30, 5, 48], "cos" F32 [40, 16], "sin" F32 [40, 16], "positions" I32 [3, 30];
        "rotary" Scalar::Int(16), "table" FULL, "span" LAST, "layout" BSHD),
    corner!("interleaved full tables, inverse, offsets":
        "x" F16 [3, 5, 30, 48], "cos" F32 [70, 32], "sin" F32 [70, 32], "positions" I64 [3, 30], "offsets" I32 [3, 30];
        "rotary" Scalar::Int(32), "table" FULL, "style" INTERLEAVED, "inverse" Scalar::Bool(true), "layout" BHSD),
    corner!("sequences": "x" Bf16 [70, 1, 64], "cos" Bf16 [20, 32], "sin" Bf16 [20, 32], "cu_seqlens" I32 [9];
        "rotary" Scalar::Int(64)),
    corner!("bf16, odd halves": "x" Bf16 [70, 9, 20], "cos" Bf16 [70, 9], "sin" Bf16 [70, 9]; "rotary" Scalar::Int(18)),
    corner!("f16, odd halves, interleaved": "x" F16 [70, 9, 20], "cos" F16 [70, 9], "sin" F16 [70, 9];
        "rotary" Scalar::Int(18), "style" INTERLEAVED),
    corner!("f32, odd halves, full tables": "x" F32 [40, 2, 9, 10], "cos" F32 [40, 6], "sin" F32 [40, 6];
        "rotary" Scalar::Int(6), "table" FULL, "layout" SBHD),
    corner!("a few columns, interleaved full tables": "x" Bf16 [70, 3, 6], "cos" F32 [70, 2], "sin" F32 [70, 2];
        "rotary" Scalar::Int(2), "table" FULL, "style" INTERLEAVED, "span" LAST, "inverse" Scalar::Bool(true)),
    corner!("heads longer than a block": "x" F32 [4, 2, 2100], "cos" F32 [3, 1040], "sin" F32 [3, 1040];
        "rotary" Scalar::Int(2080)),
    corner!("elements of heads longer than a block": "x" F32 [4, 2, 610], "cos" F32 [3, 301], "sin" F32 [3, 301];
        "rotary" Scalar::Int(602)),
];

const CORNERS_FREQS: [Case; 9] = [
    corner!("bf16": "x" Bf16 [70, 9, 32], "angles" F32 [70, 16]; "rotary" Scalar::Int(32)),
    corner!("f16, interleaved": "x" F16 [70, 9, 32], "angles" F16 [70, 16];
        "rotary" Scalar::Int(32), "style" INTERLEAVED),
    corner!("f32, full table, the last columns": "x" F32 [70, 9, 48], "angles" F32 [70, 16];
        "rotary" Scalar::Int(16), "table" FULL, "span" LAST),
    corner!("bf16 table, positions beyond it": "x" Bf16 [70, 9, 32], "angles" Bf16 [40, 16], "positions" I64 [70];
        "rotary" Scalar::Int(32), "inverse" Scalar::Bool(true)),
    corner!("offsets": "x" Bf16 [9, 2, 32], "angles" F32 [70, 16], "positions" I32 [9], "offsets" I32 [9];
        "rotary" Scalar::Int(32)),
    corner!("sequences": "x" F16 [9, 2, 32], "angles" F32 [70, 16], "cu_seqlens" I32 [3]; "rotary" Scalar::Int(32)),
    corner!("bf16, odd halves": "x" Bf16 [70, 9, 20], "angles" F32 [70, 9]; "rotary" Scalar::Int(18)),
    corner!("f16, odd halves, interleaved": "x" F16 [70, 9, 20], "angles" F32 [70, 9];
        "rotary" Scalar::Int(18), "style" INTERLEAVED),
    corner!("f32, odd halves, full table": "x" F32 [70, 9, 10], "angles" F32 [70, 6];
        "rotary" Scalar::Int(6), "table" FULL),
];

const CORNERS_QK: [Case; 5] = [
    corner!("bf16": "q" Bf16 [70, 9, 32], "k" Bf16 [70, 3, 32], "cos" Bf16 [70, 16], "sin" Bf16 [70, 16];
        "rotary" Scalar::Int(32)),
    corner!("offsets": "q" Bf16 [9, 4, 32], "k" Bf16 [9, 2, 32], "cos" F32 [70, 16], "sin" F32 [70, 16],
        "positions" I32 [9], "offsets" I32 [9]; "rotary" Scalar::Int(32)),
    corner!("sequences": "q" F16 [9, 4, 32], "k" F16 [9, 2, 32], "cos" F32 [70, 16], "sin" F32 [70, 16], "cu_seqlens" I32 [3];
        "rotary" Scalar::Int(32)),
    corner!("a part of the columns, positions beyond the tables":
        "q" F16 [3, 8, 30, 48], "k" F16 [3, 1, 30, 48], "cos" F32 [40, 16], "sin" F32 [40, 16], "positions" I64 [3, 30];
        "rotary" Scalar::Int(32), "style" INTERLEAVED, "span" LAST, "layout" BHSD),
    corner!("scalar path": "q" F32 [70, 9, 10], "k" F32 [70, 3, 10], "cos" F32 [70, 3], "sin" F32 [70, 3];
        "rotary" Scalar::Int(6)),
];

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const INTEGERS: &[DType] = &[DType::I32, DType::I64];

const X: ArgSpec = ArgSpec::input("x", FLOATS, 3, "as `layout` says, heads last but one").ranks(3, 4);
const Y: ArgSpec =
    ArgSpec { name: "y", ..ArgSpec::output("y", Tolerance::Elementwise, FLOATS, 3, "as x").ranks(3, 4) };
pub(super) const COS: ArgSpec = ArgSpec::input("cos", FLOATS, 2, "[positions, rotary / 2 or rotary]")
    .sampled(Sample::Uniform { low: -1.0, high: 1.0 });
pub(super) const SIN: ArgSpec = ArgSpec { name: "sin", ..COS };
const ANGLES: ArgSpec = ArgSpec { name: "angles", ..COS }.sampled(Sample::Uniform { low: -1e3, high: 1e3 });
pub(super) const POSITIONS: ArgSpec = ArgSpec::input("positions", INTEGERS, 1, "the tokens of x")
    .ranks(1, 2)
    .sampled(Sample::Integers { low: 0, high: 64 })
    .optional();
pub(super) const STARTS: ArgSpec = ArgSpec::input("cu_seqlens", INTEGERS, 1, "[sequences + 1]")
    .sampled(Sample::Steps { step: 8 })
    .optional();
pub(super) const OFFSETS: ArgSpec =
    ArgSpec { name: "offsets", ..POSITIONS }.sampled(Sample::Integers { low: -4, high: 4 });

pub(super) const ROPE_SCALARS: [ScalarSpec; 5] = [
    ScalarSpec {
        name: "style",
        default: Scalar::Choice("neox"),
        choices: &["neox", "interleaved"],
        summary: "pairs of columns (i, i + rotary / 2) or (2i, 2i + 1)",
    },
    ScalarSpec {
        name: "table",
        default: Scalar::Choice("half"),
        choices: &["half", "full"],
        summary: "tables of rotary / 2 columns, one for each pair, or of rotary columns",
    },
    ScalarSpec {
        name: "rotary",
        default: Scalar::Count(64),
        choices: &[],
        summary: "columns of a head that are rotated",
    },
    ScalarSpec {
        name: "span",
        default: Scalar::Choice("first"),
        choices: &["first", "last"],
        summary: "which columns those are",
    },
    ScalarSpec {
        name: "inverse",
        default: Scalar::Bool(false),
        choices: &[],
        summary: "rotates back, as the backward pass does",
    },
];

const SCALARS: &[ScalarSpec] = &{
    let [style, table, rotary, span, inverse] = ROPE_SCALARS;
    let layout = ScalarSpec {
        name: "layout",
        default: Scalar::Choice("thd"),
        choices: &["thd", "bshd", "sbhd", "bhsd"],
        summary: "axes of x: t or s tokens, b batches, h heads, d columns",
    };
    [style, table, rotary, span, inverse, layout]
};

/// The rotation that the scalars say.
pub(super) fn rope_of<V: Described>(call: &Call<V>) -> Result<Rope> {
    Ok(Rope {
        style: match call.choice("style")? {
            "interleaved" => RopeStyle::Interleaved,
            _ => RopeStyle::Neox,
        },
        table: match call.choice("table")? {
            "full" => RopeTableWidth::Full,
            _ => RopeTableWidth::Half,
        },
        rotary: call.size("rotary")?,
        span: match call.choice("span")? {
            "last" => RopeSpan::Last,
            _ => RopeSpan::First,
        },
        direction: direction(call)?,
    })
}

fn layout_of<V: Described>(call: &Call<V>) -> Result<RopeLayout> {
    Ok(match call.choice("layout")? {
        "bshd" => RopeLayout::Bshd,
        "sbhd" => RopeLayout::Sbhd,
        "bhsd" => RopeLayout::Bhsd,
        _ => RopeLayout::Thd,
    })
}

fn integers<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<Option<IndexView<'a>>> {
    match inputs.optional(name).map(Described::dtype) {
        None => Ok(None),
        Some(DType::I64) => Ok(inputs.optional_view::<i64>(name)?.map(IndexView::from)),
        Some(_) => Ok(inputs.optional_view::<i32>(name)?.map(IndexView::from)),
    }
}

fn positions<'a>(inputs: &Inputs<'a>) -> Result<Positions<'a>> {
    match (integers(inputs, "positions")?, integers(inputs, "cu_seqlens")?) {
        (None, None) => Ok(Positions::Index),
        (Some(given), None) => Ok(Positions::Given(given)),
        (None, Some(starts)) => Ok(Positions::Sequences(starts)),
        (Some(_), Some(_)) => {
            Err(Error::argument(inputs.operator().name, "cu_seqlens", "given", "nothing beside positions"))
        }
    }
}

pub(super) fn tables<'a, C: Element>(inputs: &Inputs<'a>) -> Result<RopeTables<'a, C>> {
    Ok(RopeTables {
        cos: inputs.view("cos")?,
        sin: inputs.view("sin")?,
        positions: positions(inputs)?,
        offsets: integers(inputs, "offsets")?,
    })
}

/// Checks heads against the rotation, and tables, positions and offsets against both.
fn expect_heads(call: &CallSpec, arg: &'static str) -> Result<()> {
    let (op, rope, layout, shape) =
        (call.operator().name, rope_of(call)?, layout_of(call)?, &call.get(arg)?.shape);
    let rank = if layout == RopeLayout::Thd { 3 } else { 4 };
    if shape.len() != rank {
        return Err(Error::shape(op, arg, shape, format!("{rank} axes")));
    }
    let head_dim = shape[rank - 1];
    rope.check(op, arg, shape, head_dim)?;
    expect_even(op, arg, shape, head_dim)?;
    expect_tables(call, &rope, &tokens_of(layout, shape), call.get(arg)?.dtype)
}

/// The axes of positions.
fn tokens_of(layout: RopeLayout, shape: &[usize]) -> Vec<usize> {
    match (layout, shape) {
        (RopeLayout::Bhsd, &[batches, _, tokens, _]) => vec![batches, tokens],
        (_, shape) => shape[..shape.len() - 2].to_vec(),
    }
}

/// Checks the tables against the rotation, and positions, offsets and sequence starts against the tokens.
pub(super) fn expect_tables(call: &CallSpec, rope: &Rope, tokens: &[usize], heads: DType) -> Result<()> {
    let (op, width) = (call.operator().name, rope.table_width());
    let first = if call.operator().arg("angles").is_some() { "angles" } else { "cos" };
    let table = call.get(first)?;
    if table.dtype != heads && table.dtype != DType::F32 {
        return Err(Error::dtype(op, first, table.dtype, heads));
    }
    if table.shape[1] != width {
        let want = format!("[{}, {width}] (columns: rotary)", table.shape[0]);
        return Err(Error::shape(op, first, &table.shape, want));
    }
    if first == "cos" {
        let sin = call.get("sin")?;
        if sin.dtype != table.dtype {
            return Err(Error::dtype(op, "sin", sin.dtype, format!("{} (dtype of cos)", table.dtype)));
        }
        if sin.shape != table.shape {
            return Err(Error::shape(op, "sin", &sin.shape, format!("{:?} (shape of cos)", table.shape)));
        }
    }
    for arg in ["positions", "offsets"] {
        if let Some(given) = call.optional(arg).filter(|given| given.shape != tokens) {
            return Err(Error::shape(op, arg, &given.shape, format!("{tokens:?} (the tokens)")));
        }
    }
    let Some(starts) = call.optional("cu_seqlens") else { return Ok(()) };
    if call.optional("positions").is_some() {
        return Err(Error::argument(op, "cu_seqlens", "given", "nothing beside positions"));
    }
    if tokens.len() != 1 {
        return Err(Error::argument(op, "cu_seqlens", format!("tokens {tokens:?}"), "packed tokens"));
    }
    if starts.shape[0] == 0 {
        return Err(Error::shape(op, "cu_seqlens", &starts.shape, "[sequences + 1]"));
    }
    Ok(())
}

fn outputs_one(call: &CallSpec) -> Result<Named<TensorSpec>> {
    expect_heads(call, "x")?;
    Ok(vec![("y", call.get("x")?.clone())])
}

fn outputs_qk(call: &CallSpec) -> Result<Named<TensorSpec>> {
    expect_heads(call, "q")?;
    let (op, q, k) = (call.operator().name, call.get("q")?, call.get("k")?);
    if k.dtype != q.dtype {
        return Err(Error::dtype(op, "k", k.dtype, format!("{} (dtype of q)", q.dtype)));
    }
    let mut want = q.shape.clone();
    let heads = match layout_of(call)? {
        RopeLayout::Bhsd | RopeLayout::Thd => 1,
        RopeLayout::Sbhd | RopeLayout::Bshd => 2,
    };
    want[heads] = k.shape.get(heads).copied().unwrap_or(0);
    if k.shape != want {
        return Err(Error::shape(op, "k", &k.shape, format!("{want:?} (q, but for the heads)")));
    }
    Ok(vec![("q_out", q.clone()), ("k_out", k.clone())])
}

fn run_cached(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (rope, layout) = (rope_of(&inputs)?, layout_of(&inputs)?);
    let table_type = inputs.get("cos")?.dtype();
    with_float!("rope_cached", "x", inputs.get("x")?.dtype(), T => {
        let (x, y) = (inputs.view::<T>("x")?, outputs.take::<T>("y")?);
        if table_type == DType::F32 {
            rope_cached(stream, x, tables::<f32>(&inputs)?, y, rope, layout)
        } else {
            rope_cached(stream, x, tables::<T>(&inputs)?, y, rope, layout)
        }
    })
}

fn run_freqs(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    fn angles<'a, C: Element>(inputs: &Inputs<'a>) -> Result<RopeAngles<'a, C>> {
        let (positions, offsets) = (positions(inputs)?, integers(inputs, "offsets")?);
        Ok(RopeAngles { angles: inputs.view("angles")?, positions, offsets })
    }
    let (inputs, mut outputs) = call.split();
    let (rope, layout) = (rope_of(&inputs)?, layout_of(&inputs)?);
    let table_type = inputs.get("angles")?.dtype();
    with_float!("rope_freqs", "x", inputs.get("x")?.dtype(), T => {
        let (x, y) = (inputs.view::<T>("x")?, outputs.take::<T>("y")?);
        if table_type == DType::F32 {
            rope_freqs(stream, x, angles::<f32>(&inputs)?, y, rope, layout)
        } else {
            rope_freqs(stream, x, angles::<T>(&inputs)?, y, rope, layout)
        }
    })
}

fn run_qk(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let (rope, layout) = (rope_of(&inputs)?, layout_of(&inputs)?);
    let table_type = inputs.get("cos")?.dtype();
    with_float!("rope_qk", "q", inputs.get("q")?.dtype(), T => {
        let heads = RopeQkInputs { q: inputs.view::<T>("q")?, k: inputs.view("k")? };
        let out = RopeQkOutputs { q_out: outputs.take("q_out")?, k_out: outputs.take("k_out")? };
        if table_type == DType::F32 {
            rope_qk(stream, heads, tables::<f32>(&inputs)?, out, rope, layout)
        } else {
            rope_qk(stream, heads, tables::<T>(&inputs)?, out, rope, layout)
        }
    })
}

/// The tables, and the row of each token; `tokens` are their axes, the axis of positions and the other one.
pub(super) fn reference_tables(
    call: &HostCall,
    tokens: &[usize],
    tokens_first: bool,
) -> Result<(Tables, Vec<Option<usize>>)> {
    let (table, rows) = match call.optional("angles") {
        Some(angles) => (Tables::of_angles(&angles.to_f64()), angles.shape()[0]),
        None => {
            let (cos, sin) = (call.get("cos")?, call.get("sin")?);
            (Tables { cos: cos.to_f64(), sin: sin.to_f64() }, cos.shape()[0])
        }
    };
    let given = |name| call.optional(name).map(|t| t.to_f64().iter().map(|&v| v as i64).collect::<Vec<_>>());
    let all = tokens.iter().product::<usize>();
    let index = |i: usize| match *tokens {
        [tokens, batches] if tokens_first => i / batches.max(1) % tokens.max(1),
        [_, tokens] => i % tokens.max(1),
        _ => i,
    };
    let positions = match (given("positions"), given("cu_seqlens")) {
        (Some(positions), _) => positions,
        (_, Some(starts)) => positions_in_sequences(all, &starts),
        _ => (0..all).map(|i| index(i) as i64).collect(),
    };
    Ok((table, table_rows(&positions, given("offsets").as_deref(), rows)))
}

fn reference_heads(call: &HostCall, x: &'static str) -> Result<HostTensorF64> {
    let (rope, layout, x) = (rope_of(call)?, layout_of(call)?, call.get(x)?);
    let shape = x.shape();
    let tokens = tokens_of(layout, shape);
    let (tables, rows) = reference_tables(call, &tokens, layout == RopeLayout::Sbhd)?;
    let values = reference::rope::rope(&x.to_f64(), shape, layout, &tables, &rows, &rope);
    Ok(HostTensorF64::new(shape, values))
}

fn reference_one(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_one(&call.spec())?;
    Ok(vec![("y", reference_heads(call, "x")?)])
}

fn reference_qk(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_qk(&call.spec())?;
    Ok(vec![("q_out", reference_heads(call, "q")?), ("k_out", reference_heads(call, "k")?)])
}
