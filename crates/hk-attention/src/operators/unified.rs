//! Registry entry of `unified_attn`.

use super::attention::{
    ALIBI, K_DESCALE, LSE, Q_DESCALE, SCALE, SINK, SOFTCAP, V_DESCALE, WINDOW, descales, float, indices,
    outputs, query_tile, scale, window,
};
use super::common::{LAYOUT, expect_shape, integers, layout, shape};
use super::decode::{CACHE_TILE, CACHED, KEYS_PER_SPLIT, NSPLIT, splits, workspace};
use super::mha::{SHORT, TALL, out_type, with_qkv};
use super::paged::{
    BLOCK_TABLE, CU_SEQLENS_Q, K_CACHE, PagedSequence, Q, SEQ_LENS, V_CACHE, attend_paged, cache_rows,
    cache_sizes, expect_cache_dtypes, expect_heads, expect_one_of, keys_in_pages, paged_sequences,
    paged_traffic, sequences, with_cache,
};
use crate::{
    AttentionElement, AttentionOutputs, PagedElement, PagedKv, Pages, UnifiedInputs, UnifiedOptions,
    UnifiedOutput, unified_attn,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16, f16};

const CACHES: [&str; 2] = ["k_cache", "v_cache"];

pub(super) const OUTPUT: ScalarSpec = ScalarSpec {
    name: "output",
    default: Scalar::Choice("own"),
    choices: &["own", "fp8e4m3", "fp8e4m3fnuz"],
    summary: "type of out: that of q, bf16 for fp8; or fp8",
};

/// Type; sequences, queries of all; heads, columns; caches: type, shapes; pages of a sequence.
macro_rules! case {
    ($label:expr, $dtype:ident $n:literal $tq:literal, $hq:literal $d:literal,
     $cache:ident $k:expr, $v:expr, $pages:literal, [$($name:literal $other:ident $shape:expr),*], [$($scalar:expr),*]) => {
        Case {
            label: $label,
            tensors: &[
                ("q", DType::$dtype, &[$tq, $hq, $d]),
                ("k_cache", DType::$cache, &$k),
                ("v_cache", DType::$cache, &$v),
                ("block_table", DType::I32, &[$n, $pages]),
                ("cu_seqlens_q", DType::I32, &[$n + 1]),
                ("seqused_k", DType::I32, &[$n]),
                $(($name, DType::$other, &$shape),)*
            ],
            scalars: &[$($scalar),*],
        }
    };
}

/// A corner of a dense kernel of fp8 pages: types, columns, tile.
macro_rules! fp8_pages {
    ($dtype:ident $cache:ident $d:literal, $tile:ident) => {
        case!(concat!("dense fp8 pages, columns of ", $d), $dtype 2 90, 4 $d, $cache [24, 16, 2, $d], [24, 16, 2, $d], 9,
            ["sink" F32 [4], "k_descale" F32 [2, 2], "v_descale" F32 [1], "lse" F32 [90, 4]],
            [$tile, ("window", Scalar::Int(50))])
    };
}

const FEW: (&str, Scalar) = ("tile", Scalar::Choice("few"));
const HND: (&str, Scalar) = ("layout", Scalar::Choice("hnd"));
const P3: (&str, Scalar) = ("layout", Scalar::Choice("paged"));
const P4: (&str, Scalar) = ("layout", Scalar::Choice("paged_shuffled"));

pub(super) const UNIFIED_ATTN: Operator = Operator {
    name: "unified_attn",
    family: "hk-attention",
    summary: "out = softmax(scale q k^T) v, causal, over pages that hold the keys of the queries, too",
    args: &[
        Q,
        K_CACHE,
        V_CACHE,
        BLOCK_TABLE,
        CU_SEQLENS_Q,
        ArgSpec { name: "seqused_k", ..SEQ_LENS },
        ALIBI,
        SINK,
        ArgSpec::input("qq_bias", &[DType::F32], 2, "[queries, queries]").optional(),
        Q_DESCALE,
        K_DESCALE,
        V_DESCALE,
        ArgSpec::input("out_scale", &[DType::F32], 1, "[1]")
            .sampled(Sample::Uniform { low: 1.0, high: 2.0 })
            .optional(),
        ArgSpec::output("out", Tolerance::Attention, OUT_OR_FP8, 3, "[total_q, Hq, Dv]"),
        ArgSpec::output("lse", LSE, &[DType::F32], 2, "[total_q, Hq]").optional(),
    ],
    scalars: &[SCALE, WINDOW, SOFTCAP, LAYOUT, OUTPUT, CACHE_TILE, NSPLIT, KEYS_PER_SPLIT],
    kernels: CACHED,
    cases: &[
        case!("Llama-3 8B, 2 x 24 tokens of prompts, pages of 16", Bf16 2 48, 32 128,
            Bf16 [16, 16, 8, 128], [16, 16, 8, 128], 4, [], []),
        case!("GPT-OSS, 3 x 20 tokens, window of 128 keys, fp8 pages", Bf16 3 60, 16 64,
            Fp8E4M3 [30, 2, 4, 16, 16], [30, 2, 1, 64, 16], 10,
            ["sink" F32 [16], "k_descale" F32 [1], "v_descale" F32 [1]], [P4, ("window", Scalar::Int(127))]),
    ],
    bench: BenchSizes::Cases(&[
        case!("GQA 64/8, d128, 4 x 2048 of 8192 tokens, pages of 16", Bf16 4 8192, 64 128,
            Bf16 [2048, 16, 8, 128], [2048, 16, 8, 128], 512, [], []),
        case!("GQA 64/8, d128, 4 x 2048 of 8192 tokens, shuffled pages of 16", Bf16 4 8192, 64 128,
            Bf16 [2048, 8, 16, 16, 8], [2048, 8, 2, 128, 8], 512, [], [P4]),
        case!("GPT-OSS, 4 x 2048 of 8192 tokens, window of 128 keys", Bf16 4 8192, 64 64,
            Bf16 [2048, 16, 8, 64], [2048, 16, 8, 64], 512, ["sink" F32 [64]], [("window", Scalar::Int(127))]),
    ]),
    corners: &[
        case!("bf16, sink, LSE, window", Bf16 2 66, 4 64,
            Bf16 [16, 16, 2, 64], [16, 16, 2, 64], 4, ["sink" F32 [4], "lse" F32 [66, 4]], [("window", Scalar::Int(20))]),
        case!("f16, Hnd, softcap, ALiBi, bias of queries", F16 3 60, 2 40,
            F16 [16, 2, 16, 40], [16, 2, 16, 24], 3,
            ["alibi" F32 [3, 2], "qq_bias" F32 [20, 21], "lse" F32 [60, 2]],
            [HND, ("softcap", Scalar::Float(15.0)), ("scale", Scalar::Float(0.3))]),
        case!("bf16, paged", Bf16 2 20, 3 32, Bf16 [16, 1, 4, 16, 8], [16, 1, 32, 16], 3, [], [P3]),
        case!("f16, paged and shuffled", F16 2 20, 3 32, F16 [16, 1, 4, 16, 8], [16, 1, 2, 32, 8], 3, [], [P4]),
        case!("f32, pages of 3 tokens, too few of them", F32 3 12, 2 20,
            F32 [18, 3, 1, 20], [18, 3, 1, 33], 4, ["lse" F32 [12, 2]], []),
        case!("bf16, pages that the cache does not have, short bias", Bf16 2 20, 2 16,
            Bf16 [9, 16, 1, 16], [9, 16, 1, 16], 6, ["qq_bias" F32 [7, 9], "lse" F32 [20, 2]], [("window", Scalar::Int(40))]),
        case!("bf16, more queries than keys", Bf16 1 70, 2 16,
            Bf16 [16, 16, 1, 16], [16, 16, 1, 16], 2, ["qq_bias" F32 [70, 70], "lse" F32 [70, 2]], []),
        case!("f16, int8 pages, 512 columns", F16 1 10, 2 512,
            I8 [16, 16, 1, 512], [16, 16, 1, 512], 2, [], []),
        case!("bf16, 512 columns", Bf16 1 9, 2 512, Bf16 [16, 16, 1, 512], [16, 16, 1, 512], 3, ["lse" F32 [9, 2]], []),
        case!("f16, columns of 320 and 256", F16 1 9, 2 320, F16 [16, 16, 1, 320], [16, 16, 1, 256], 3, [], []),
        case!("fp8 of gfx950, descales, fp8 output", Fp8E4M3 2 20, 4 32,
            Fp8E4M3 [16, 2, 2, 16, 16], [16, 2, 1, 32, 16], 3,
            ["q_descale" F32 [2, 4], "k_descale" F32 [1], "v_descale" F32 [2, 2], "out_scale" F32 [1]],
            [P4, ("output", Scalar::Choice("fp8e4m3"))]),
        case!("fp8 of gfx942, descales, fp8 output", Fp8E4M3Fnuz 2 20, 4 32,
            Fp8E4M3Fnuz [16, 2, 2, 16, 16], [16, 2, 32, 16], 3,
            ["q_descale" F32 [1], "k_descale" F32 [2, 2], "v_descale" F32 [1], "out_scale" F32 [1]],
            [P3, ("output", Scalar::Choice("fp8e4m3fnuz"))]),
        case!("bf16, int8 pages", Bf16 2 20, 4 64,
            I8 [16, 2, 4, 16, 16], [16, 2, 64, 16], 3, ["k_descale" F32 [1], "v_descale" F32 [2, 2]], [P3]),
        case!("bf16, fp8 pages of gfx950", Bf16 2 20, 4 64,
            Fp8E4M3 [16, 2, 4, 16, 16], [16, 2, 64, 16], 3, ["k_descale" F32 [1]], [P3]),
        case!("f16, fp8 pages of gfx942", F16 2 20, 4 64,
            Fp8E4M3Fnuz [16, 16, 2, 64], [16, 16, 2, 64], 3, ["v_descale" F32 [1]], []),
        case!("bf16, drafts of 4 tokens, 3 splits", Bf16 3 12, 4 64, Bf16 [40, 16, 2, 64], [40, 16, 2, 64], 13,
            ["sink" F32 [4], "lse" F32 [12, 4]], [("nsplit", Scalar::Count(3)), ("window", Scalar::Int(90))]),
        case!("f16, ALiBi, tokens in tiles of few queries, splits of 64 keys", F16 2 30, 6 72,
            F16 [40, 32, 2, 72], [40, 32, 2, 128], 13, ["alibi" F32 [2, 6], "lse" F32 [30, 6]],
            [FEW, ("keys_per_split", Scalar::Count(64))]),
        case!("bf16, fp8 of gfx950 in tiles of few queries", Bf16 2 9, 4 64, Fp8E4M3 [16, 16, 2, 64], [16, 16, 2, 64], 3,
            ["k_descale" F32 [1], "q_descale" F32 [2, 4]], [FEW]),
        fp8_pages!(Bf16 Fp8E4M3 64, TALL),
        fp8_pages!(Bf16 Fp8E4M3 64, SHORT),
        fp8_pages!(Bf16 Fp8E4M3 128, TALL),
        fp8_pages!(Bf16 Fp8E4M3 128, SHORT),
        fp8_pages!(Bf16 Fp8E4M3 256, TALL),
        fp8_pages!(Bf16 Fp8E4M3 256, SHORT),
        fp8_pages!(F16 Fp8E4M3 64, TALL),
        fp8_pages!(F16 Fp8E4M3 64, SHORT),
        fp8_pages!(F16 Fp8E4M3 128, TALL),
        fp8_pages!(F16 Fp8E4M3 128, SHORT),
        fp8_pages!(F16 Fp8E4M3 256, TALL),
        fp8_pages!(F16 Fp8E4M3 256, SHORT),
        fp8_pages!(Bf16 Fp8E4M3Fnuz 64, TALL),
        fp8_pages!(Bf16 Fp8E4M3Fnuz 64, SHORT),
        fp8_pages!(Bf16 Fp8E4M3Fnuz 128, TALL),
        fp8_pages!(Bf16 Fp8E4M3Fnuz 128, SHORT),
        fp8_pages!(Bf16 Fp8E4M3Fnuz 256, TALL),
        fp8_pages!(Bf16 Fp8E4M3Fnuz 256, SHORT),
        fp8_pages!(F16 Fp8E4M3Fnuz 64, TALL),
        fp8_pages!(F16 Fp8E4M3Fnuz 64, SHORT),
        fp8_pages!(F16 Fp8E4M3Fnuz 128, TALL),
        fp8_pages!(F16 Fp8E4M3Fnuz 128, SHORT),
        fp8_pages!(F16 Fp8E4M3Fnuz 256, TALL),
        fp8_pages!(F16 Fp8E4M3Fnuz 256, SHORT),
    ],
    outputs: specs,
    run,
    reference,
    traffic,
};

pub(super) const OUT_OR_FP8: &[DType] =
    &[DType::Bf16, DType::F16, DType::F32, DType::Fp8E4M3, DType::Fp8E4M3Fnuz];

pub(super) fn output<V: Described>(call: &Call<V>) -> Result<DType> {
    Ok(match call.choice("output")? {
        "fp8e4m3" => DType::Fp8E4M3,
        "fp8e4m3fnuz" => DType::Fp8E4M3Fnuz,
        _ => out_type(call.get("q")?.dtype()),
    })
}

fn specs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [total_q, heads, _] = shape(call, "q")?;
    expect_cache_dtypes(call, CACHES, "q")?;
    let sizes = cache_sizes(call, CACHES)?;
    expect_heads(call, CACHES, sizes, 512)?;
    let n = sequences(call, "cu_seqlens_q")?;
    expect_shape(call, "seqused_k", &[n], "sequences of cu_seqlens_q")?;
    let width = call.get("block_table")?.shape()[1];
    expect_shape(call, "block_table", &[n, width], "sequences of cu_seqlens_q")?;
    expect_one_of(call, "alibi", &[&[heads], &[n, heads]])?;
    expect_one_of(call, "sink", &[&[heads]])?;
    expect_one_of(call, "q_descale", &[&[1], &[n, heads]])?;
    expect_one_of(call, "k_descale", &[&[1], &[n, sizes.heads]])?;
    expect_one_of(call, "v_descale", &[&[1], &[n, sizes.heads]])?;
    expect_one_of(call, "out_scale", &[&[1]])?;
    window(call, "window")?;
    splits(call)?;
    let mut specs = vec![("out", TensorSpec::new(output(call)?, [total_q, heads, sizes.dv]))];
    if call.wants("lse") {
        specs.push(("lse", TensorSpec::new(DType::F32, [total_q, heads])));
    }
    Ok(specs)
}

/// Runs `$body` with `$t`, `$c` and `$o` as the types of queries, of a cache and of outputs.
macro_rules! with_cached {
    ($inputs:expr, $t:ident, $c:ident, $o:ident => $body:expr) => {{
        let cache = $inputs.get("k_cache")?.dtype();
        with_qkv!($inputs.get("q")?.dtype(), $t, Own => with_cache!(cache, $t, $c => match output(&$inputs)? {
            DType::Fp8E4M3 => {
                type $o = Fp8E4M3;
                $body
            }
            DType::Fp8E4M3Fnuz => {
                type $o = Fp8E4M3Fnuz;
                $body
            }
            _ => {
                type $o = Own;
                $body
            }
        }))
    }};
}
pub(super) use with_cached;

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, outputs) = call.split();
    with_cached!(inputs, T, C, O => run_typed::<T, C, O>(stream, &inputs, outputs))
}

fn run_typed<T: AttentionElement, C: PagedElement<T>, O: UnifiedOutput<T>>(
    stream: &Stream,
    inputs: &Inputs,
    mut outputs: Outputs,
) -> Result<()> {
    let pages = Pages { block_table: indices(inputs, "block_table")?, layout: layout(inputs)? };
    let tensors = UnifiedInputs::<T, C> {
        q: inputs.view("q")?,
        cache: PagedKv { k_cache: inputs.view("k_cache")?, v_cache: inputs.view("v_cache")?, pages },
        cu_seqlens_q: indices(inputs, "cu_seqlens_q")?,
        seqused_k: indices(inputs, "seqused_k")?,
    };
    let options = UnifiedOptions {
        scale: scale(inputs)?,
        window: window(inputs, "window")?,
        softcap: float(inputs, "softcap")?,
        alibi: inputs.optional_view("alibi")?,
        sink: inputs.optional_view("sink")?,
        qq_bias: inputs.optional_view("qq_bias")?,
        descales: descales(inputs)?,
        out_scale: inputs.optional_view("out_scale")?,
        tile: query_tile(inputs)?,
        splits: splits(inputs)?,
    };
    let sizes = [sequences(inputs, "cu_seqlens_q")?, inputs.get("q")?.shape()[0]];
    let workspace = workspace(stream, inputs, &mut outputs, sizes, options.splits)?;
    let outputs = AttentionOutputs::<O> { out: outputs.take("out")?, lse: outputs.take_optional("lse")? };
    unified_attn(stream, tensors, outputs, workspace, &options)
}

fn host_sequences(call: &HostCall) -> Result<Vec<PagedSequence>> {
    let (sizes, lens) = (cache_sizes(call, CACHES)?, integers(call.get("seqused_k")?));
    let total_q = call.get("q")?.shape()[0];
    paged_sequences(call, "cu_seqlens_q", total_q, |n, _| keys_in_pages(call, sizes, n, lens[n]))
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    specs(&call.spec())?;
    let ([total_q, heads, dqk], sizes) = (shape(call, "q")?, cache_sizes(call, CACHES)?);
    let rows = cache_rows(call, CACHES, layout(call)?, sizes)?;
    let sizes = [heads, sizes.heads, dqk, sizes.dv];
    let (out, lse) = attend_paged(call, sizes, host_sequences(call)?, &rows, &rows, [0, 0])?;
    Ok(outputs(call, (vec![total_q, heads, sizes[3]], out), (vec![total_q, heads], lse)))
}

fn traffic(call: &HostCall) -> Traffic {
    match (cache_sizes(call, CACHES), host_sequences(call)) {
        (Ok(sizes), Ok(sequences)) => {
            paged_traffic(call, &sequences, [&CACHES, &[], &["block_table"]], sizes)
        }
        _ => Traffic::once(call),
    }
}
