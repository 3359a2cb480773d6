//! Registry entries of `pa_prefill` and `chunked_pa_prefill`.

use super::attention::{
    ALIBI, HostRows, QUERY_TILE, SCALE, WINDOW, indices, outputs, query_tile, scale, window,
};
use super::common::{LAYOUT, expect_dtypes, expect_shape, integers, layout, shape};
use super::decode::{CACHED, workspace};
use super::mha::{PAGED, TALL};
use super::paged::{
    BLOCK_TABLE, CU_SEQLENS_Q, FLOAT, K_CACHE, K_SCALE, Key, PagedSequence, Q, SEQ_LENS, V_CACHE, V_SCALE,
    attend_paged, cache_rows, cache_sizes, expect_cache_dtypes, expect_heads, expect_one_of, keys_in_pages,
    paged_sequences, paged_traffic, sequences, with_cache,
};
use crate::{
    AttentionElement, AttentionOutput, CacheScales, PaPrefillInputs, PaPrefillOptions, PagedElement, PagedKv,
    Pages, Splits, chunked_pa_prefill, pa_prefill,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, with_float};

const CACHES: [&str; 2] = ["k_cache", "v_cache"];
const CHUNKED: &str = "chunked_pa_prefill";

const SKIP_DECODE: ScalarSpec = ScalarSpec {
    name: "skip_decode",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "outputs of sequences of one new token are not written",
};

/// Type; sequences, queries of all; heads, columns; caches: type, shapes; pages of a sequence.
macro_rules! case {
    ($label:literal, $dtype:ident $n:literal $tq:literal, $hq:literal $hkv:literal $d:literal,
     $cache:ident $k:expr, $v:expr, $pages:literal, [$($name:literal $other:ident $shape:expr),*], [$($scalar:expr),*]) => {
        Case {
            label: $label,
            tensors: &[
                ("q", DType::$dtype, &[$tq, $hq, $d]),
                ("k", DType::$dtype, &[$tq, $hkv, $d]),
                ("v", DType::$dtype, &[$tq, $hkv, $d]),
                ("k_cache", DType::$cache, &$k),
                ("v_cache", DType::$cache, &$v),
                ("block_table", DType::I32, &[$n, $pages]),
                ("cu_seqlens_q", DType::I32, &[$n + 1]),
                ("seq_lens", DType::I32, &[$n]),
                $(($name, DType::$other, &$shape),)*
            ],
            scalars: &[("layout", Scalar::Choice("paged")), $($scalar),*],
        }
    };
}

const SKIP: (&str, Scalar) = ("skip_decode", Scalar::Bool(true));
const NHD: (&str, Scalar) = ("layout", Scalar::Choice("nhd"));
const P4: (&str, Scalar) = ("layout", Scalar::Choice("paged_shuffled"));

const CASES: &[Case] = &[case!("Llama-3 8B, 2 x 24 tokens, context in pages of 16", Bf16 2 48, 32 8 128,
    Bf16 [16, 8, 16, 16, 8], [16, 8, 128, 16], 4, [], [])];

const BENCH: &[Case] = &[
    case!("GQA 32/8, d128, 4 x 2048 of 8192 tokens", Bf16 4 8192, 32 8 128,
        Bf16 [2048, 8, 16, 16, 8], [2048, 8, 128, 16], 512, [], []),
    case!("GQA 32/8, d128, 4 x 2048 of 8192 tokens, pages of rows", Bf16 4 8192, 32 8 128,
        Bf16 [2048, 16, 8, 128], [2048, 16, 8, 128], 512, [], [NHD]),
    case!("GQA 32/8, d128, 4 x 2048 of 8192 tokens, window of 1024", Bf16 4 8192, 32 8 128,
        Bf16 [2048, 8, 16, 16, 8], [2048, 8, 128, 16], 512, [], [("window", Scalar::Int(1023))]),
];

pub(super) const PA_PREFILL: Operator = Operator {
    name: "pa_prefill",
    family: "hk-attention",
    summary: "out = softmax(scale q k^T) v, causal, over a context in pages and the keys of the queries",
    args: &[
        ArgSpec { dtypes: FLOAT, ..Q },
        ArgSpec::input("k", FLOAT, 3, "[total_q, Hkv, Dqk]"),
        ArgSpec::input("v", FLOAT, 3, "[total_q, Hkv, Dv]"),
        K_CACHE,
        V_CACHE,
        BLOCK_TABLE,
        CU_SEQLENS_Q,
        SEQ_LENS,
        ALIBI,
        K_SCALE,
        V_SCALE,
        ArgSpec::output("out", Tolerance::Attention, FLOAT, 3, "[total_q, Hq, Dv]"),
    ],
    scalars: &[SCALE, WINDOW, LAYOUT, SKIP_DECODE, QUERY_TILE],
    kernels: PAGED,
    cases: CASES,
    bench: BenchSizes::Cases(BENCH),
    corners: &[
        case!("bf16", Bf16 2 40, 4 2 64, Bf16 [16, 2, 8, 16, 8], [16, 2, 64, 16], 4, [], []),
        case!("bf16, pages of rows, tall tiles", Bf16 2 90, 4 2 128, Bf16 [24, 16, 2, 128], [24, 16, 2, 128], 9, [], [NHD, TALL]),
        case!("f16, ALiBi, window", F16 3 60, 2 1 40, F16 [16, 1, 5, 16, 8], [16, 1, 40, 16], 4,
            ["alibi" F32 [2]], [("window", Scalar::Int(25)), ("scale", Scalar::Float(0.3))]),
        case!("bf16, one new token each is skipped", Bf16 3 3, 2 1 32, Bf16 [16, 1, 4, 16, 8], [16, 1, 32, 16], 2, [], [SKIP]),
        case!("f32, shuffled pages", F32 2 20, 2 2 32, F32 [16, 2, 8, 16, 4], [16, 2, 4, 32, 4], 3,
            ["alibi" F32 [2, 2]], [P4]),
        case!("bf16, pages of 8 tokens: too few of some sequence", Bf16 4 40, 2 1 32,
            Bf16 [16, 1, 4, 8, 8], [16, 1, 32, 8], 4, [], []),
        case!("bf16, pages that the cache does not have, more new tokens than all", Bf16 3 60, 2 1 16,
            Bf16 [7, 16, 1, 16], [7, 16, 1, 16], 2, [], [NHD]),
        case!("bf16, int8 pages", Bf16 2 30, 2 2 64, I8 [16, 2, 4, 16, 16], [16, 2, 64, 16], 3,
            ["k_scale" F32 [1], "v_scale" F32 [2, 2]], []),
        case!("f16, fp8 pages of gfx950", F16 2 30, 2 2 64, Fp8E4M3 [16, 2, 4, 16, 16], [16, 2, 64, 16], 3,
            ["k_scale" F32 [2, 2]], []),
        case!("f16, fp8 pages of gfx942", F16 2 30, 2 2 64, Fp8E4M3Fnuz [16, 2, 4, 16, 16], [16, 2, 64, 16], 3,
            ["v_scale" F32 [1]], []),
    ],
    outputs: specs,
    run,
    reference,
    traffic,
};

pub(super) const CHUNKED_PA_PREFILL: Operator = Operator {
    name: CHUNKED,
    summary: "pa_prefill; sequences of one new token have all their keys in pages",
    scalars: &[SCALE, WINDOW, LAYOUT, QUERY_TILE],
    kernels: CACHED,
    corners: &[
        case!("bf16", Bf16 2 40, 4 2 64, Bf16 [16, 2, 8, 16, 8], [16, 2, 64, 16], 4, [], []),
        case!("bf16, pages of rows, tall tiles", Bf16 2 90, 4 2 128, Bf16 [24, 16, 2, 128], [24, 16, 2, 128], 9, [], [NHD, TALL]),
        case!("bf16, one new token each", Bf16 3 3, 6 2 32, Bf16 [16, 2, 4, 16, 8], [16, 2, 32, 16], 4,
            ["alibi" F32 [3, 6]], [("window", Scalar::Int(25)), ("scale", Scalar::Float(0.3))]),
        case!("bf16, pages of rows, one new token each", Bf16 3 3, 6 2 64, Bf16 [40, 16, 2, 64], [40, 16, 2, 64], 13,
            ["alibi" F32 [3, 6]], [NHD, ("window", Scalar::Int(90))]),
        case!("bf16, int8 pages, one new token each", Bf16 2 2, 2 2 64, I8 [16, 2, 4, 16, 16], [16, 2, 64, 16], 3,
            ["k_scale" F32 [1], "v_scale" F32 [2, 2]], []),
        case!("f16, shuffled fp8 pages of gfx950", F16 2 3, 2 2 64, Fp8E4M3 [16, 2, 4, 16, 16], [16, 2, 1, 64, 16], 3,
            ["k_scale" F32 [2, 2]], [P4]),
        case!("f16, fp8 pages of gfx942", F16 2 3, 2 2 64, Fp8E4M3Fnuz [16, 2, 4, 16, 16], [16, 2, 64, 16], 3,
            ["v_scale" F32 [1]], []),
        case!("f32, pages of 8 tokens: too few of some sequence", F32 4 4, 2 1 32,
            F32 [16, 1, 8, 8, 4], [16, 1, 32, 8], 4, [], []),
    ],
    ..PA_PREFILL
};

fn specs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [total_q, heads, dqk] = shape(call, "q")?;
    expect_dtypes(call, "q", &["k", "v"])?;
    expect_cache_dtypes(call, CACHES, "q")?;
    let sizes = cache_sizes(call, CACHES)?;
    expect_heads(call, CACHES, sizes, 256)?;
    expect_shape(call, "k", &[total_q, sizes.heads, dqk], "rows of q, heads and columns of k_cache")?;
    expect_shape(call, "v", &[total_q, sizes.heads, sizes.dv], "rows of q, heads and columns of v_cache")?;
    let n = sequences(call, "cu_seqlens_q")?;
    expect_shape(call, "seq_lens", &[n], "sequences of cu_seqlens_q")?;
    let width = call.get("block_table")?.shape[1];
    expect_shape(call, "block_table", &[n, width], "sequences of cu_seqlens_q")?;
    expect_one_of(call, "alibi", &[&[heads], &[n, heads]])?;
    expect_one_of(call, "k_scale", &[&[1], &[n, sizes.heads]])?;
    expect_one_of(call, "v_scale", &[&[1], &[n, sizes.heads]])?;
    window(call, "window")?;
    Ok(vec![("out", TensorSpec::new(call.get("q")?.dtype, [total_q, heads, sizes.dv]))])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, outputs) = call.split();
    let cache = inputs.get("k_cache")?.dtype();
    with_float!(inputs.operator().name, "q", inputs.get("q")?.dtype(), T => with_cache!(cache, T, C => run_typed::<T, C>(stream, &inputs, outputs)))
}

fn run_typed<T, C>(stream: &Stream, inputs: &Inputs, mut outputs: Outputs) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T>,
    C: PagedElement<T>,
{
    let pages = Pages { block_table: indices(inputs, "block_table")?, layout: layout(inputs)? };
    let tensors = PaPrefillInputs::<T, C> {
        q: inputs.view("q")?,
        k: inputs.view("k")?,
        v: inputs.view("v")?,
        cache: PagedKv { k_cache: inputs.view("k_cache")?, v_cache: inputs.view("v_cache")?, pages },
        cu_seqlens_q: indices(inputs, "cu_seqlens_q")?,
        seq_lens: indices(inputs, "seq_lens")?,
    };
    let options = PaPrefillOptions {
        scale: scale(inputs)?,
        window: window(inputs, "window")?,
        alibi: inputs.optional_view("alibi")?,
        scales: CacheScales { k: inputs.optional_view("k_scale")?, v: inputs.optional_view("v_scale")? },
        tile: query_tile(inputs)?,
    };
    let out = outputs.take("out")?;
    if inputs.operator().name == CHUNKED {
        let singles = sequences(inputs, "cu_seqlens_q")?;
        let workspace = workspace(stream, inputs, &mut outputs, [singles; 2], Splits::Auto)?;
        return chunked_pa_prefill(stream, tensors, out, workspace, &options);
    }
    pa_prefill(stream, tensors, out, &options, inputs.bool("skip_decode")?)
}

fn host_sequences(call: &HostCall) -> Result<Vec<PagedSequence>> {
    let (sizes, lens) = (cache_sizes(call, CACHES)?, integers(call.get("seq_lens")?));
    let chunked = call.operator().name == CHUNKED;
    let skip = !chunked && call.bool("skip_decode")?;
    let mut sequences = paged_sequences(call, "cu_seqlens_q", call.get("q")?.shape()[0], |n, queries| {
        let fresh = if chunked && queries.len() == 1 { 0..0 } else { queries.clone() };
        let mut keys = keys_in_pages(call, sizes, n, lens[n] - fresh.len() as i64)?;
        keys.extend(fresh.map(Key::Fresh));
        Some(keys)
    })?;
    let rows = integers(call.get("cu_seqlens_q")?);
    let invalid = super::attention::packed(&rows, call.get("q")?.shape()[0]).is_none();
    sequences.retain(|sequence| invalid || !skip || sequence.queries.len() != 1);
    Ok(sequences)
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    specs(&call.spec())?;
    let ([total_q, heads, dqk], sizes) = (shape(call, "q")?, cache_sizes(call, CACHES)?);
    let cache = cache_rows(call, CACHES, layout(call)?, sizes)?;
    let fresh = HostRows { k: call.get("k")?.to_f64(), v: call.get("v")?.to_f64() };
    let sizes = [heads, sizes.heads, dqk, sizes.dv];
    let (out, _) = attend_paged(call, sizes, host_sequences(call)?, &cache, &fresh, [0, 0])?;
    Ok(outputs(call, (vec![total_q, heads, sizes[3]], out), (vec![], vec![])))
}

fn traffic(call: &HostCall) -> Traffic {
    match (cache_sizes(call, CACHES), host_sequences(call)) {
        (Ok(sizes), Ok(sequences)) => {
            paged_traffic(call, &sequences, [&CACHES, &["k", "v"], &["block_table"]], sizes)
        }
        _ => Traffic::once(call),
    }
}
