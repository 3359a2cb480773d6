//! `fp8_mqa_logits`, `pa_mqa_logits`.

use super::attention::{F32, indices};
use super::common::{FP8, INDICES_32, expect_dtypes, expect_shape, integers, shape};
use crate::reference::logits::score;
use crate::{
    DeviceFp8, IndexerPages, MqaLogitsInputs, PagedMqaLogitsInputs, fp8_mqa_logits, kernels, pa_mqa_logits,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream};

const CLEAN: ScalarSpec = ScalarSpec {
    name: "clean",
    default: Scalar::Bool(true),
    choices: &[],
    summary: "cells that are not seen become -inf",
};
const DIRTY: (&str, Scalar) = ("clean", Scalar::Bool(false));
const K_SCALE: ArgSpec =
    ArgSpec::input("k_scale", F32, 1, "[Sk]").sampled(Sample::Uniform { low: 0.01, high: 0.1 });
/// Products are exact, sums of heads are not.
const OUT: Tolerance = Tolerance::Sum { terms: 1e-5 };

/// Type; queries, heads, columns, keys.
macro_rules! dense {
    ($dtype:ident $sq:literal $h:literal $d:literal, $sk:literal) => {
        &[
            ("q", DType::$dtype, &[$sq, $h, $d]),
            ("k", DType::$dtype, &[$sk, $d]),
            ("k_scale", DType::F32, &[$sk]),
            ("weights", DType::F32, &[$sq, $h]),
            ("starts", DType::I32, &[$sq]),
            ("ends", DType::I32, &[$sq]),
        ]
    };
}

macro_rules! case {
    ($label:expr, $tensors:expr $(, $scalar:expr)*) => {
        Case { label: $label, tensors: $tensors, scalars: &[$($scalar),*] }
    };
}

pub(crate) const FP8_MQA_LOGITS: Operator = Operator {
    name: "fp8_mqa_logits",
    family: "hk-attention",
    summary: "out[i, j] = k_scale[j] sum over h of weights[i, h] max(q[i, h] . k[j], 0) in ranges of keys",
    args: &[
        ArgSpec::input("q", FP8, 3, "[Sq, H, D]"),
        ArgSpec::input("k", FP8, 2, "[Sk, D]"),
        K_SCALE,
        ArgSpec::input("weights", F32, 2, "[Sq, H]"),
        ArgSpec::input("starts", INDICES_32, 1, "[Sq]").sampled(Sample::Integers { low: -3, high: 40 }),
        ArgSpec::input("ends", INDICES_32, 1, "[Sq]").sampled(Sample::Integers { low: 20, high: 1200 }),
        ArgSpec::output("out", OUT, F32, 2, "[Sq, Sk]"),
    ],
    scalars: &[CLEAN],
    kernels: &[&kernels::LOGITS],
    cases: &[
        case!("DeepSeek-V3.2, 16 queries, 500 keys", dense!(Fp8E4M3Fnuz 16 64 128, 500)),
        case!("the same in OCP fp8", dense!(Fp8E4M3 16 64 128, 500)),
    ],
    bench: BenchSizes::Cases(&[case!(
        "DeepSeek-V3.2, 4096 queries, 8192 keys",
        dense!(Fp8E4M3 4096 64 128, 8192)
    )]),
    corners: &[
        case!("64 columns", dense!(Fp8E4M3Fnuz 17 32 64, 76)),
        case!("64 columns, OCP", dense!(Fp8E4M3 3 5 16, 1200), DIRTY),
        case!("128 columns", dense!(Fp8E4M3Fnuz 9 64 128, 130), DIRTY),
        case!("128 columns, OCP, 100 heads", dense!(Fp8E4M3 5 100 96, 113)),
        case!("256 columns, 70 heads", dense!(Fp8E4M3Fnuz 6 70 256, 70)),
        case!("256 columns, OCP", dense!(Fp8E4M3 6 33 240, 70)),
    ],
    outputs: outputs_dense,
    run: run_dense,
    reference: reference_dense,
    traffic: Traffic::once,
};

/// Queries, heads, columns, keys.
fn sizes<V: Described>(call: &Call<V>) -> Result<[usize; 4]> {
    let [queries, heads, columns] = shape::<3, V>(call, "q")?;
    expect_dtypes(call, "q", &["k"])?;
    let keys = call.get("k")?.shape()[0];
    columns_fit(call, columns)?;
    expect_shape(call, "k", &[keys, columns], "columns of q")?;
    expect_shape(call, "k_scale", &[keys], "rows of k")?;
    expect_shape(call, "weights", &[queries, heads], "rows and heads of q")?;
    expect_shape(call, "starts", &[queries], "rows of q")?;
    expect_shape(call, "ends", &[queries], "rows of q")?;
    Ok([queries, heads, columns, keys])
}

fn columns_fit<V: Described>(call: &Call<V>, columns: usize) -> Result<()> {
    if (16..=256).contains(&columns) && columns.is_multiple_of(16) {
        return Ok(());
    }
    let q = call.get("q")?.shape();
    Err(Error::shape(call.operator().name, "q", q, "a multiple of 16 columns, up to 256"))
}

fn outputs_dense(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [queries, _, _, keys] = sizes(call)?;
    Ok(vec![("out", TensorSpec::new(DType::F32, [queries, keys]))])
}

fn run_dense(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    match inputs.get("q")?.dtype() {
        DType::Fp8E4M3 => run_dense_as::<Fp8E4M3>(stream, call),
        _ => run_dense_as::<Fp8E4M3Fnuz>(stream, call),
    }
}

fn run_dense_as<F: DeviceFp8>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let of = MqaLogitsInputs::<F> {
        q: inputs.view("q")?,
        k: inputs.view("k")?,
        k_scale: inputs.view("k_scale")?,
        weights: inputs.view("weights")?,
        starts: inputs.view("starts")?,
        ends: inputs.view("ends")?,
    };
    fp8_mqa_logits(stream, of, outputs.take("out")?, inputs.bool("clean")?)
}

/// Cells: what `key(query, j)` gives, or what is not seen.
fn cells(
    call: &HostCall,
    [queries, heads, columns, keys]: [usize; 4],
    cell: impl Fn(usize, usize, &[f64], &[f64]) -> Option<[f64; 2]>,
) -> Result<Named<HostTensorF64>> {
    let (q, weights) = (call.get("q")?.to_f64(), call.get("weights")?.to_f64());
    let hidden = if call.bool("clean")? { f64::NEG_INFINITY } else { HostTensorF64::UNTOUCHED };
    let (mut values, mut magnitudes) = (vec![hidden; queries * keys], vec![0.0; queries * keys]);
    // Of calls beyond the limit of the reference, some queries.
    let of_query = 2 * (keys * heads * columns) as u64;
    let most = usize::try_from(call.reference_limit() / of_query.max(1)).unwrap_or(usize::MAX).max(1);
    let step = queries.div_ceil(most).max(1);
    for i in 0..queries {
        if !(queries - 1 - i).is_multiple_of(step) {
            values[i * keys..(i + 1) * keys].fill(HostTensorF64::UNTOUCHED);
            continue;
        }
        let query = &q[i * heads * columns..(i + 1) * heads * columns];
        for j in 0..keys {
            if let Some(of) = cell(i, j, query, &weights[i * heads..(i + 1) * heads]) {
                [values[i * keys + j], magnitudes[i * keys + j]] = of;
            }
        }
    }
    Ok(vec![("out", HostTensorF64::new([queries, keys], values).with_magnitudes(magnitudes))])
}

fn reference_dense(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let all @ [_, _, columns, _] = sizes(call)?;
    let (k, k_scale) = (call.get("k")?.to_f64(), call.get("k_scale")?.to_f64());
    let (starts, ends) = (integers(call.get("starts")?), integers(call.get("ends")?));
    cells(call, all, |i, j, query, weights| {
        let seen = (starts[i]..ends[i]).contains(&(j as i64));
        seen.then(|| score(query, weights, &k[j * columns..(j + 1) * columns], k_scale[j]))
    })
}

/// Type; sequences, queries, heads, columns; pages, tokens; width of the table, longest.
macro_rules! paged {
    ($dtype:ident $b:literal $n:literal $h:literal $d:literal, $pages:literal $tokens:literal, $width:literal $len:literal) => {
        &[
            ("q", DType::$dtype, &[$b, $n, $h, $d]),
            ("k", DType::$dtype, &[$pages, $tokens, $d]),
            ("k_scale", DType::F32, &[$pages, $tokens]),
            ("weights", DType::F32, &[$b * $n, $h]),
            ("context_lens", DType::I32, &[$b]),
            ("block_table", DType::I32, &[$b, $width]),
        ]
    };
}

macro_rules! lists {
    ($dtype:ident $b:literal $n:literal $h:literal $d:literal, $pages:literal $tokens:literal, $width:literal $len:literal) => {
        &[
            ("q", DType::$dtype, &[$b, $n, $h, $d]),
            ("k", DType::$dtype, &[$pages, $tokens, $d]),
            ("k_scale", DType::F32, &[$pages, $tokens]),
            ("weights", DType::F32, &[$b * $n, $h]),
            ("context_lens", DType::I32, &[$b]),
            ("kv_indptr", DType::I32, &[$b + 1]),
            ("kv_indices", DType::I32, &[$width]),
        ]
    };
}

const fn max_len(keys: u64) -> (&'static str, Scalar) {
    ("max_len", Scalar::Count(keys))
}

pub(crate) const PA_MQA_LOGITS: Operator = Operator {
    name: "pa_mqa_logits",
    summary: "the same of the last tokens of sequences, over keys in pages",
    args: &[
        ArgSpec::input("q", FP8, 4, "[B, n, H, D]"),
        ArgSpec::input("k", FP8, 3, "[pages, tokens, D]"),
        ArgSpec { name: "k_scale", ..ArgSpec::input("k_scale", F32, 2, "[pages, tokens]") }
            .sampled(Sample::Uniform { low: 0.01, high: 0.1 }),
        ArgSpec::input("weights", F32, 2, "[B n, H]"),
        ArgSpec::input("context_lens", INDICES_32, 1, "[B]").sampled(Sample::Integers { low: 0, high: 200 }),
        // One of 41 pages is not there.
        ArgSpec::input("block_table", INDICES_32, 2, "[B, width]")
            .sampled(Sample::Integers { low: 0, high: 41 })
            .optional(),
        ArgSpec::input("kv_indptr", INDICES_32, 1, "[B + 1]").sampled(Sample::Steps { step: 90 }).optional(),
        ArgSpec::input("kv_indices", INDICES_32, 1, "[n]")
            .sampled(Sample::Integers { low: 0, high: 41 })
            .optional(),
        ArgSpec::output("out", OUT, F32, 2, "[B n, max_len]"),
    ],
    scalars: &[
        CLEAN,
        ScalarSpec { name: "max_len", default: Scalar::Count(200), choices: &[], summary: "columns of out" },
    ],
    cases: &[
        case!(
            "DeepSeek-V3.2, 2 sequences, pages of 64",
            paged!(Fp8E4M3Fnuz 2 1 64 128, 40 64, 4 200),
            max_len(200)
        ),
        case!("the same in OCP fp8", paged!(Fp8E4M3 2 1 64 128, 40 64, 4 200), max_len(200)),
    ],
    bench: BenchSizes::Cases(&[case!(
        "DeepSeek-V3.2, 32 sequences, pages of 64",
        paged!(Fp8E4M3 32 1 64 128, 8192 64, 256 16384),
        max_len(16384)
    )]),
    corners: &[
        case!("64 columns, tokens", lists!(Fp8E4M3Fnuz 3 2 32 64, 40 1, 270 100), max_len(150)),
        case!("64 columns, OCP", paged!(Fp8E4M3 3 4 7 48, 40 16, 12 180), max_len(180), DIRTY),
        case!("128 columns, tokens", lists!(Fp8E4M3Fnuz 2 1 30 96, 40 1, 180 90), max_len(75)),
        case!("64 columns, pages of 32", paged!(Fp8E4M3Fnuz 2 2 20 64, 40 32, 6 180), max_len(170)),
        case!("64 columns, OCP, pages of 32", paged!(Fp8E4M3 2 2 20 64, 40 32, 6 180), max_len(170)),
        case!("256 columns, pages of 64", paged!(Fp8E4M3Fnuz 1 2 40 256, 40 64, 3 180), max_len(180)),
        case!("256 columns, OCP, pages of 64", paged!(Fp8E4M3 1 2 66 240, 40 64, 3 180), max_len(180)),
        case!("128 columns, OCP, pages of 64", paged!(Fp8E4M3 2 3 64 128, 40 64, 3 180), max_len(180)),
        case!("128 columns, short table", paged!(Fp8E4M3Fnuz 2 3 64 128, 40 64, 2 180), max_len(190)),
        case!(
            "128 columns, OCP, 90 heads, tokens",
            lists!(Fp8E4M3 2 1 90 128, 40 1, 180 90),
            max_len(64),
            DIRTY
        ),
        case!("256 columns", paged!(Fp8E4M3Fnuz 2 1 40 256, 40 16, 13 200), max_len(200)),
        case!("256 columns, OCP", paged!(Fp8E4M3 1 2 65 144, 40 16, 13 200), max_len(199)),
    ],
    outputs: outputs_paged,
    run: run_paged,
    reference: reference_paged,
    ..FP8_MQA_LOGITS
};

/// Sequences, queries of each, heads, columns, keys.
fn paged_sizes<V: Described>(call: &Call<V>) -> Result<[usize; 5]> {
    let op = call.operator().name;
    let [sequences, n, heads, columns] = shape::<4, V>(call, "q")?;
    expect_dtypes(call, "q", &["k"])?;
    columns_fit(call, columns)?;
    let [pages, tokens, _] = shape::<3, V>(call, "k")?;
    if tokens == 0 {
        return Err(Error::empty(op, "k", 1, call.get("k")?.shape()));
    }
    expect_shape(call, "k", &[pages, tokens, columns], "columns of q")?;
    expect_shape(call, "k_scale", &[pages, tokens], "pages of k")?;
    expect_shape(call, "weights", &[sequences * n, heads], "rows and heads of q")?;
    expect_shape(call, "context_lens", &[sequences], "sequences of q")?;
    let given = |name: &'static str| call.optional(name).map(Described::shape);
    match (given("block_table"), given("kv_indptr"), given("kv_indices")) {
        (Some(table), None, None) => {
            expect_shape(call, "block_table", &[sequences, table[1]], "sequences of q")?;
        }
        (None, Some(_), Some(_)) => expect_shape(call, "kv_indptr", &[sequences + 1], "sequences of q")?,
        _ => {
            return Err(Error::argument(op, "block_table", "both or none", "a table, or indptr and indices"));
        }
    }
    let keys = call.size("max_len")?;
    if keys > crate::logits::MOST {
        let most = crate::logits::MOST as u64;
        return Err(Error::too_large(op, "out", format!("{keys} columns"), most));
    }
    Ok([sequences, n, heads, columns, keys])
}

fn outputs_paged(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [sequences, n, _, _, keys] = paged_sizes(call)?;
    Ok(vec![("out", TensorSpec::new(DType::F32, [sequences * n, keys]))])
}

fn run_paged(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, _) = call.split();
    match inputs.get("q")?.dtype() {
        DType::Fp8E4M3 => run_paged_as::<Fp8E4M3>(stream, call),
        _ => run_paged_as::<Fp8E4M3Fnuz>(stream, call),
    }
}

fn run_paged_as<F: DeviceFp8>(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    paged_sizes(&inputs)?;
    let pages = match inputs.optional_view("block_table")? {
        Some(table) => IndexerPages::Table(table),
        None => IndexerPages::Lists {
            indptr: indices(&inputs, "kv_indptr")?,
            indices: indices(&inputs, "kv_indices")?,
        },
    };
    let of = PagedMqaLogitsInputs::<F> {
        q: inputs.view("q")?,
        k: inputs.view("k")?,
        k_scale: inputs.view("k_scale")?,
        weights: inputs.view("weights")?,
        context_lens: inputs.view("context_lens")?,
        pages,
    };
    pa_mqa_logits(stream, of, outputs.take("out")?, inputs.bool("clean")?)
}

fn reference_paged(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let [sequences, n, heads, columns, keys] = paged_sizes(call)?;
    let [pages, tokens, _] = shape::<3, _>(call, "k")?;
    let (k, k_scale) = (call.get("k")?.to_f64(), call.get("k_scale")?.to_f64());
    let lens = integers(call.get("context_lens")?);
    let list = |name: &'static str| call.optional(name).map(integers);
    let (table, indptr, indices) = (list("block_table"), list("kv_indptr"), list("kv_indices"));
    // The page of a key, if the table has one.
    let entry = |b: usize, page: usize| -> Option<i64> {
        if let Some(table) = &table {
            let width = table.len() / sequences;
            return (page < width).then(|| table[b * width + page]);
        }
        let at = usize::try_from(indptr.as_ref()?[b]).ok()? + page;
        indices.as_ref()?.get(at).copied()
    };
    cells(call, [sequences * n, heads, columns, keys], |i, j, query, weights| {
        let (b, r) = (i / n, i % n);
        if j as i64 > lens[b] - n as i64 + r as i64 {
            return None;
        }
        let page =
            entry(b, j / tokens).and_then(|page| usize::try_from(page).ok()).filter(|page| *page < pages);
        let Some(page) = page else { return Some([f64::NAN, 0.0]) };
        let row = page * tokens + j % tokens;
        Some(score(query, weights, &k[row * columns..(row + 1) * columns], k_scale[row]))
    })
}
