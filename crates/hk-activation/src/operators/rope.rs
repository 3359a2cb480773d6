//! `rope_cached`, `rope_freqs`, `rope_qk`.

use crate::reference;
use crate::{kernels, rope_cached, rope_freqs, rope_qk};
use hk_core::registry::{
    ArgSpec, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named, Operator,
    Sample, Scalar, ScalarSpec, TensorSpec, Tolerance,
};
use hk_core::rope::reference::{Tables, positions_in_sequences, table_rows};
use hk_core::rope::{
    self, Positions, Rope, RopeAngles, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
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

const CORNERS_FREQS: [Case; 7] = [
    corner!("bf16": "x" Bf16 [70, 9, 32], "angles" F32 [70, 16]; "rotary" Scalar::Int(32)),
    corner!("f16, interleaved": "x" F16 [70, 9, 32], "angles" F16 [70, 16];
        "rotary" Scalar::Int(32), "style" INTERLEAVED),
    corner!("f32, full table, the last columns": "x" F32 [70, 9, 48], "angles" F32 [70, 16];
        "rotary" Scalar::Int(16), "table" FULL, "span" LAST),
    corner!("bf16 table, positions beyond it": "x" Bf16 [70, 9, 32], "angles" Bf16 [40, 16], "positions" I64 [70];
        "rotary" Scalar::Int(32), "inverse" Scalar::Bool(true)),
    corner!("bf16, odd halves": "x" Bf16 [70, 9, 20], "angles" F32 [70, 9]; "rotary" Scalar::Int(18)),
    corner!("f16, odd halves, interleaved": "x" F16 [70, 9, 20], "angles" F32 [70, 9];
        "rotary" Scalar::Int(18), "style" INTERLEAVED),
    corner!("f32, odd halves, full table": "x" F32 [70, 9, 10], "angles" F32 [70, 6];
        "rotary" Scalar::Int(6), "table" FULL),
];

const CORNERS_QK: [Case; 3] = [
    corner!("bf16": "q" Bf16 [70, 9, 32], "k" Bf16 [70, 3, 32], "cos" Bf16 [70, 16], "sin" Bf16 [70, 16];
        "rotary" Scalar::Int(32)),
    corner!("a part of the columns, positions beyond the tables":
        "q" F16 [3, 8, 30, 48], "k" F16 [3, 1, 30, 48], "cos" F32 [40, 16], "sin" F32 [40, 16], "positions" I64 [3, 30];
        "rotary" Scalar::Int(32), "style" INTERLEAVED, "span" LAST, "layout" BHSD),
    corner!("by elements": "q" F32 [70, 9, 10], "k" F32 [70, 3, 10], "cos" F32 [70, 3], "sin" F32 [70, 3];
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
        default: Scalar::Int(64),
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
    let rotary = call.int("rotary")?;
    let wrong = |_| Error::argument(call.operator().name, "rotary", rotary, "a number of columns");
    Ok(Rope {
        style: match call.choice("style")? {
            "interleaved" => RopeStyle::Interleaved,
            _ => RopeStyle::Neox,
        },
        table: match call.choice("table")? {
            "full" => RopeTableWidth::Full,
            _ => RopeTableWidth::Half,
        },
        rotary: usize::try_from(rotary).map_err(wrong)?,
        span: match call.choice("span")? {
            "last" => RopeSpan::Last,
            _ => RopeSpan::First,
        },
        inverse: call.bool("inverse")?,
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

fn outputs_one(call: &CallSpec) -> Result<Named<TensorSpec>> {
    rope_of(call)?;
    Ok(vec![("y", call.get("x")?.clone())])
}

fn outputs_qk(call: &CallSpec) -> Result<Named<TensorSpec>> {
    rope_of(call)?;
    Ok(vec![("q_out", call.get("q")?.clone()), ("k_out", call.get("k")?.clone())])
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
        let (q, k) = (inputs.view::<T>("q")?, inputs.view::<T>("k")?);
        let (q_out, k_out) = (outputs.take::<T>("q_out")?, outputs.take::<T>("k_out")?);
        if table_type == DType::F32 {
            rope_qk(stream, q, k, tables::<f32>(&inputs)?, q_out, k_out, rope, layout)
        } else {
            rope_qk(stream, q, k, tables::<T>(&inputs)?, q_out, k_out, rope, layout)
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
    let tokens = match (layout, shape) {
        (RopeLayout::Bhsd, &[batches, _, tokens, _]) => vec![batches, tokens],
        (_, shape) => shape[..shape.len() - 2].to_vec(),
    };
    let (tables, rows) = reference_tables(call, &tokens, layout == RopeLayout::Sbhd)?;
    let values = reference::rope::rope(&x.to_f64(), shape, layout, &tables, &rows, &rope);
    Ok(HostTensorF64::new(shape, values))
}

fn reference_one(call: &HostCall) -> Result<Named<HostTensorF64>> {
    Ok(vec![("y", reference_heads(call, "x")?)])
}

fn reference_qk(call: &HostCall) -> Result<Named<HostTensorF64>> {
    Ok(vec![("q_out", reference_heads(call, "q")?), ("k_out", reference_heads(call, "k")?)])
}
