//! The index helpers.

use super::recurrent::{case, size};
use crate::index::{check_chunk, check_tokens, sequences};
use crate::{Index, kernels, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream};

const INTEGERS: &[DType] = &[DType::I32, DType::I64];
const I32: &[DType] = &[DType::I32];

const SOURCES: &[&hk_core::CodeObjects] = &[&kernels::INDEX];
/// Tokens of the sequences of an example.
const TOKENS: i64 = 1000;
const CU: ArgSpec =
    ArgSpec::input("cu_seqlens", INTEGERS, 1, "[N + 1]").sampled(Sample::Starts { rows: TOKENS });
const CHUNK: ScalarSpec = size("chunk_size", 64, "tokens of a chunk, a power of two");

const fn result(name: &'static str, rank: usize, shape: &'static str) -> ArgSpec {
    ArgSpec::output(name, Tolerance::Exact, INTEGERS, rank, shape)
}

/// An operator of this family.
const fn helper(
    name: &'static str,
    summary: &'static str,
    args: &'static [ArgSpec],
    scalars: &'static [ScalarSpec],
    [cases, bench, corners]: [&'static [Case]; 3],
) -> Operator {
    Operator {
        name,
        family: "hk-gdr",
        summary,
        args,
        scalars,
        kernels: SOURCES,
        cases,
        bench: BenchSizes::Cases(bench),
        corners,
        outputs,
        run,
        reference: reference_of,
        traffic: Traffic::once,
    }
}

const MANY: &[Case] = &[case!("4096 sequences"; ; cu_seqlens I32 [4097])];
const STARTS: &[Case] = &[case!("256 sequences"; ; cu_seqlens I32 [257])];
const CORNERS: &[Case] = &[
    case!("several passes"; ; cu_seqlens I32 [1301]),
    case!("32 bits"; ; cu_seqlens I32 [8]),
    case!("64 bits"; ; cu_seqlens I64 [40]),
    case!("no sequence"; ; cu_seqlens I64 [1]),
];
const CHUNKS: &[Case] = &[
    case!("several passes"; chunk_size = Scalar::Count(16); cu_seqlens I32 [1301]),
    case!("32 bits"; ; cu_seqlens I32 [8]),
    case!("64 bits"; chunk_size = Scalar::Count(1); cu_seqlens I64 [40]),
    case!("no sequence"; ; cu_seqlens I64 [1]),
];

pub(crate) const PREPARE_LENS: Operator = helper(
    "prepare_lens",
    "lens[n] = cu_seqlens[n + 1] - cu_seqlens[n]",
    &[CU, result("lens", 1, "[N]")],
    &[],
    [STARTS, MANY, CORNERS],
);

pub(crate) const PREPARE_CU_SEQLENS_FROM_LENS: Operator = helper(
    "prepare_cu_seqlens_from_lens",
    "0, and the sums of lens up to each",
    &[
        ArgSpec::input("lens", INTEGERS, 1, "[N]").sampled(Sample::Integers { low: -2, high: 300 }),
        result("cu_seqlens", 1, "[N + 1]"),
    ],
    &[],
    [
        &[case!("256 sequences"; ; lens I32 [256])],
        &[case!("4096 sequences"; ; lens I32 [4096])],
        &[
            case!("several passes"; ; lens I32 [1300]),
            case!("64 bits"; ; lens I64 [7]),
            case!("none"; ; lens I32 [0]),
        ],
    ],
);

pub(crate) const PREPARE_POSITION_IDS: Operator = helper(
    "prepare_position_ids",
    "of each token its place in its sequence",
    &[CU, result("position_ids", 1, "[tokens]")],
    &[size("tokens", TOKENS as u64, "tokens of all sequences")],
    [
        STARTS,
        MANY,
        &[
            case!("32 bits"; ; cu_seqlens I32 [8]),
            case!("64 bits"; tokens = Scalar::Count(700); cu_seqlens I64 [40]),
            case!("empty sequences"; tokens = Scalar::Count(1000); cu_seqlens I32 [1301]),
        ],
    ],
);

pub(crate) const PREPARE_SEQUENCE_IDS: Operator = Operator {
    name: "prepare_sequence_ids",
    summary: "of each token the number of its sequence",
    args: &[CU, result("sequence_ids", 1, "[tokens]")],
    ..PREPARE_POSITION_IDS
};

pub(crate) const PREPARE_CHUNK_OFFSETS: Operator = helper(
    "prepare_chunk_offsets",
    "0, and the sums of ceil(length / chunk_size) up to each sequence",
    &[CU, result("offsets", 1, "[N + 1]")],
    &[CHUNK],
    [STARTS, MANY, CHUNKS],
);

pub(crate) const GPU_PREPARE_CHUNK_INDICES: Operator = helper(
    "gpu_prepare_chunk_indices",
    "(sequence, chunk of the sequence) of every chunk in order, then (-1, -1)",
    &[CU, result("indices", 2, "[capacity, 2]"), ArgSpec::output("count", Tolerance::Exact, I32, 1, "[1]")],
    &[CHUNK, size("capacity", 400, "rows of the result")],
    [
        STARTS,
        MANY,
        &[
            case!("several passes"; chunk_size = Scalar::Count(16), capacity = Scalar::Count(1500); cu_seqlens I32 [1301]),
            case!("32 bits"; ; cu_seqlens I32 [8]),
            case!("64 bits, too few rows"; chunk_size = Scalar::Count(1); cu_seqlens I64 [40]),
            case!("no sequence"; ; cu_seqlens I64 [1]),
        ],
    ],
);

pub(crate) const GET_MAX_NUM_SPLITS: Operator = helper(
    "get_max_num_splits",
    "ceil(longest sequence / chunk_size)",
    &[CU, result("splits", 1, "[1]")],
    &[CHUNK],
    [STARTS, MANY, CHUNKS],
);

/// Checks a call; gives the shapes of its outputs.
fn shapes<D: Described>(call: &Call<D>) -> Result<Vec<(&'static str, Vec<usize>)>> {
    let op = call.operator().name;
    let given = call.operator().args[0].name;
    let input = call.get(given)?.shape();
    let chunk = |call: &Call<D>| check_chunk(op, call.size("chunk_size")?);
    let n = |arg| sequences(op, arg, input);
    Ok(match op {
        "prepare_lens" => vec![("lens", vec![n(given)?])],
        "prepare_cu_seqlens_from_lens" => vec![("cu_seqlens", vec![n(given)? + 1])],
        "prepare_position_ids" | "prepare_sequence_ids" => {
            let tokens = call.size("tokens")?;
            check_tokens(op, input, tokens)?;
            vec![(call.operator().args[1].name, vec![tokens])]
        }
        "prepare_chunk_offsets" => {
            chunk(call)?;
            vec![("offsets", vec![n(given)? + 1])]
        }
        "gpu_prepare_chunk_indices" => {
            chunk(call)?;
            n(given)?;
            let capacity = call.size("capacity")?;
            let limit = i32::MAX as usize;
            if capacity > limit {
                return Err(Error::too_large(op, "indices", format!("{capacity} rows"), limit as u64));
            }
            vec![("indices", vec![capacity, 2]), ("count", vec![1])]
        }
        _ => {
            chunk(call)?;
            n(given)?;
            vec![("splits", vec![1])]
        }
    })
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let dtype = call.get(call.operator().args[0].name)?.dtype;
    let spec =
        |(name, shape)| (name, TensorSpec::new(if name == "count" { DType::I32 } else { dtype }, shape));
    Ok(shapes(call)?.into_iter().map(spec).collect())
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let given = call.operator().args[0].name;
    let dtype = call.split().0.get(given)?.dtype();
    if dtype == DType::I64 { typed::<i64>(stream, call) } else { typed::<i32>(stream, call) }
}

fn typed<I: Index>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let op = call.operator();
    let (inputs, mut outputs) = call.split();
    let input = inputs.view::<I>(op.args[0].name)?;
    let made = outputs.take::<I>(op.args[1].name)?;
    let chunk = || inputs.size("chunk_size");
    match op.name {
        "prepare_lens" => crate::prepare_lens(stream, input, made),
        "prepare_cu_seqlens_from_lens" => crate::prepare_cu_seqlens_from_lens(stream, input, made),
        "prepare_position_ids" => crate::prepare_position_ids(stream, input, made),
        "prepare_sequence_ids" => crate::prepare_sequence_ids(stream, input, made),
        "prepare_chunk_offsets" => crate::prepare_chunk_offsets(stream, input, made, chunk()?),
        "gpu_prepare_chunk_indices" => {
            crate::gpu_prepare_chunk_indices(stream, input, made, outputs.take("count")?, chunk()?)
        }
        _ => crate::get_max_num_splits(stream, input, made, chunk()?),
    }
}

fn reference_of(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let shapes = shapes(call)?;
    let op = call.operator();
    let input: Vec<i64> = call.get(op.args[0].name)?.to_f64().iter().map(|v| *v as i64).collect();
    let chunk = || call.size("chunk_size");
    let values: Vec<Vec<i64>> = match op.name {
        "prepare_lens" => vec![reference::prepare_lens(&input)],
        "prepare_cu_seqlens_from_lens" => vec![reference::prepare_cu_seqlens_from_lens(&input)],
        "prepare_position_ids" => vec![reference::position_ids(&input, call.size("tokens")?)],
        "prepare_sequence_ids" => vec![reference::sequence_ids(&input, call.size("tokens")?)],
        "prepare_chunk_offsets" => vec![reference::chunk_offsets(&input, chunk()?)],
        "gpu_prepare_chunk_indices" => {
            let capacity = call.size("capacity")?;
            let all = reference::chunk_offsets(&input, chunk()?).last().copied().unwrap_or(0) as u64;
            let count = if all <= capacity as u64 { all as i64 } else { -1 };
            let mut flat = reference::chunk_indices(&input, chunk()?, capacity).concat();
            flat.resize(2 * capacity, -1);
            vec![flat, vec![count]]
        }
        _ => {
            let chunks = reference::chunk_offsets(&input, chunk()?);
            vec![vec![reference::prepare_lens(&chunks).into_iter().max().unwrap_or(0)]]
        }
    };
    let narrow = call.get(op.args[0].name)?.dtype() == DType::I32;
    let number = |v: &i64| if narrow { f64::from(*v as i32) } else { *v as f64 };
    let host = |((name, shape), values): ((_, Vec<usize>), Vec<i64>)| {
        (name, HostTensorF64::new(shape, values.iter().map(number).collect()))
    };
    Ok(shapes.into_iter().zip(values).map(host).collect())
}
