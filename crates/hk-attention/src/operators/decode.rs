//! What the entries of decode operators share, and that of `pa_decode`.

use super::attention::{
    ALIBI, LSE, QUERY_TILE, SCALE, SINK, SOFTCAP, WINDOW, float, indices, outputs, scale, window,
};
use super::common::{LAYOUT, expect_shape, integers, layout, shape};
use super::mha::{GENERAL, PAGED, joined, with_qkv};
use super::paged::{
    BLOCK_TABLE, K_CACHE, K_SCALE, PagedSequence, Q, SEQ_LENS, V_CACHE, V_SCALE, attend_paged, cache_rows,
    cache_sizes, expect_cache_dtypes, expect_heads, expect_one_of, keys_in_pages, paged_traffic, with_cache,
};
use super::unified::{OUT_OR_FP8, OUTPUT, output, with_cached};
use crate::kv_cache::CacheSizes;
use crate::{
    AttentionElement, AttentionOutputs, AttentionProblem, CacheScales, DecodeWorkspace, KvLayout,
    PaDecodeInputs, PaDecodeOptions, PagedElement, PagedKv, Pages, Splits, Tickets, UnifiedOutput,
    decode_workspace, kernels, pa_decode,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{CodeObjects, DType, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16, f16};

/// Tiles of query rows of operators over caches.
pub(super) const CACHE_TILE: ScalarSpec =
    ScalarSpec { choices: &["auto", "short", "tall", "few"], ..QUERY_TILE };

/// Of few queries, and the merge of splits.
const DECODE: &[&CodeObjects] = &[
    &kernels::DECODE_BF16,
    &kernels::DECODE_BF16_FP8,
    &kernels::DECODE_BF16_FP8_SCALED,
    &kernels::DECODE_BF16_I8,
    &kernels::DECODE_BF16_I8_SCALED,
    &kernels::DECODE_F16,
    &kernels::DECODE_F16_FP8,
    &kernels::DECODE_F16_FP8_SCALED,
    &kernels::DECODE_F16_I8,
    &kernels::DECODE_F16_I8_SCALED,
    &kernels::MERGE,
];

/// The sources of the kernels that decode.
pub(super) const KERNELS: &[&CodeObjects] = &joined::<14>(GENERAL, DECODE);

/// The same, and of those for prompts over pages.
pub(super) const CACHED: &[&CodeObjects] = &joined::<18>(PAGED, DECODE);

const CACHES: [&str; 2] = ["k_cache", "v_cache"];
const SCALE_SHAPES: &str = "[1], [N, Hkv] or [pages, Hkv, tokens]";

pub(super) const NSPLIT: ScalarSpec = ScalarSpec {
    name: "nsplit",
    default: Scalar::Count(0),
    choices: &[],
    summary: "splits of the keys of a sequence, at most; 0: as suits the call and the device",
};
pub(super) const KEYS_PER_SPLIT: ScalarSpec = ScalarSpec {
    name: "keys_per_split",
    default: Scalar::Count(0),
    choices: &[],
    summary: "keys of a split, a multiple of 64; 0: by nsplit",
};

/// How keys are split.
pub(super) fn splits<V: Described>(call: &Call<V>) -> Result<Splits> {
    let (op, n, keys) = (call.operator().name, call.size("nsplit")?, call.size("keys_per_split")?);
    match (n, keys) {
        (0, 0) => Ok(Splits::Auto),
        (1..=65536, 0) => Ok(Splits::Count(n)),
        (0, keys) if keys.is_multiple_of(64) => Ok(Splits::KeysPerSplit(keys)),
        (0, keys) => Err(Error::argument(op, "keys_per_split", keys, "a multiple of 64")),
        (_, 0) => Err(Error::argument(op, "nsplit", n, "at most 65536")),
        _ => Err(Error::argument(op, "keys_per_split", keys, "0 beside nsplit")),
    }
}

/// The workspace that suits the call, of so many sequences and queries.
pub(super) fn workspace<'a>(
    stream: &Stream,
    inputs: &Inputs,
    outputs: &mut Outputs<'a>,
    [sequences, queries]: [usize; 2],
    splits: Splits,
) -> Result<DecodeWorkspace<'a>> {
    let (sizes, [_, heads, _]) = (cache_sizes(inputs, CACHES)?, shape(inputs, "q")?);
    let keys = inputs.get("block_table")?.shape()[1].saturating_mul(sizes.tokens);
    let problem = AttentionProblem { sequences, heads, kv_heads: sizes.heads, queries, keys, dv: sizes.dv };
    workspace_of(stream, outputs, &problem, splits)
}

pub(super) fn workspace_of<'a>(
    stream: &Stream,
    outputs: &mut Outputs<'a>,
    problem: &AttentionProblem,
    splits: Splits,
) -> Result<DecodeWorkspace<'a>> {
    with_workspace(stream, outputs, decode_workspace(stream.device().info(), problem, splits))
}

/// Of so many elements, and counters.
pub(super) fn with_workspace<'a>(
    stream: &Stream,
    outputs: &mut Outputs<'a>,
    len: usize,
) -> Result<DecodeWorkspace<'a>> {
    if len == 0 {
        return Ok(DecodeWorkspace::default());
    }
    let tickets = outputs.kept(|| Tickets::new(stream))?;
    Ok(DecodeWorkspace { partials: Some(outputs.workspace(stream, len)?), tickets: Some(tickets) })
}

/// Type; sequences; heads, columns; caches: type, shapes; pages of a sequence.
macro_rules! case {
    ($label:expr, $dtype:ident $n:literal, $hq:literal $d:literal,
     $cache:ident $k:expr, $v:expr, $pages:literal, [$($name:literal $other:ident $shape:expr),*], [$($scalar:expr),*]) => {
        Case {
            label: $label,
            tensors: &[
                ("q", DType::$dtype, &[$n, $hq, $d]),
                ("k_cache", DType::$cache, &$k),
                ("v_cache", DType::$cache, &$v),
                ("block_table", DType::I32, &[$n, $pages]),
                ("seq_lens", DType::I32, &[$n]),
                $(($name, DType::$other, &$shape),)*
            ],
            scalars: &[$($scalar),*],
        }
    };
}

/// A corner of a kernel of few queries: types, columns; of three heads of a group, or of 20, which is more than 16 rows.
macro_rules! pages {
    ($dtype:ident $cache:ident $d:literal) => { pages!("pages", 6 2, $dtype $cache $d) };
    (20 heads $dtype:ident $cache:ident $d:literal) => { pages!("20 heads", 20 1, $dtype $cache $d) };
    ($label:literal, $hq:literal $hkv:literal, $dtype:ident $cache:ident $d:literal) => {
        case!(concat!($label, ", columns of ", $d), $dtype 3, $hq $d, $cache [40, 16, $hkv, $d], [40, 16, $hkv, $d], 13,
            ["sink" F32 [$hq], "k_scale" F32 [3, $hkv], "v_scale" F32 [1], "lse" F32 [3, $hq]],
            [("keys_per_split", Scalar::Count(64))])
    };
}

/// As `pages`, with factors of tokens.
macro_rules! scaled {
    ($dtype:ident $cache:ident $d:literal) => { scaled!("factors of tokens", 6 2, $dtype $cache $d) };
    (20 heads $dtype:ident $cache:ident $d:literal) => {
        scaled!("20 heads, factors of tokens", 20 1, $dtype $cache $d)
    };
    ($label:literal, $hq:literal $hkv:literal, $dtype:ident $cache:ident $d:literal) => {
        case!(concat!($label, ", columns of ", $d), $dtype 3, $hq $d, $cache [40, 16, $hkv, $d], [40, 16, $hkv, $d], 13,
            ["k_scale" F32 [40, $hkv, 16], "v_scale" F32 [40, $hkv, 16], "lse" F32 [3, $hq]],
            [("keys_per_split", Scalar::Count(64))])
    };
}

/// As `pages`, in pieces of so many elements.
macro_rules! pieces {
    ($dtype:ident $cache:ident $piece:literal $d:literal) => { pieces!("pieces", 6 2, $dtype $cache $piece $d) };
    (20 heads $dtype:ident $cache:ident $piece:literal $d:literal) => {
        pieces!("20 heads, pieces", 20 1, $dtype $cache $piece $d)
    };
    ($label:literal, $hq:literal $hkv:literal, $dtype:ident $cache:ident $piece:literal $d:literal) => {
        case!(concat!($label, ", columns of ", $d), $dtype 3, $hq $d,
            $cache [40, $hkv, $d / $piece, 16, $piece], [40, $hkv, $d, 16], 13,
            ["sink" F32 [$hq], "k_scale" F32 [3, $hkv], "v_scale" F32 [1], "lse" F32 [3, $hq]],
            [P3, ("keys_per_split", Scalar::Count(64))])
    };
}

const HND: (&str, Scalar) = ("layout", Scalar::Choice("hnd"));
const P3: (&str, Scalar) = ("layout", Scalar::Choice("paged"));
const P4: (&str, Scalar) = ("layout", Scalar::Choice("paged_shuffled"));
const WINDOW_OF_50: (&str, Scalar) = ("window", Scalar::Int(50));

pub(super) const PA_DECODE: Operator = Operator {
    name: "pa_decode",
    family: "hk-attention",
    summary: "out = softmax(scale q k^T) v of the last token of each sequence, over pages that hold its key, too",
    args: &[
        ArgSpec { shape: "[N, Hq, Dqk]", ..Q },
        K_CACHE,
        V_CACHE,
        BLOCK_TABLE,
        SEQ_LENS,
        ALIBI,
        SINK,
        ArgSpec { shape: SCALE_SHAPES, ..K_SCALE }.ranks(1, 3),
        ArgSpec { shape: SCALE_SHAPES, ..V_SCALE }.ranks(1, 3),
        ArgSpec::input("out_scale", &[DType::F32], 1, "[1]")
            .sampled(Sample::Uniform { low: 1.0, high: 2.0 })
            .optional(),
        ArgSpec::output("out", Tolerance::Attention, OUT_OR_FP8, 3, "[N, Hq, Dv]"),
        ArgSpec::output("lse", LSE, &[DType::F32], 2, "[N, Hq]").optional(),
    ],
    scalars: &[SCALE, WINDOW, SOFTCAP, LAYOUT, OUTPUT, NSPLIT, KEYS_PER_SPLIT],
    kernels: KERNELS,
    cases: &[
        case!("Llama-3 8B, 4 tokens, pages of 16", Bf16 4, 32 128,
            Bf16 [160, 16, 8, 128], [160, 16, 8, 128], 40, [], []),
        case!("GPT-OSS, 3 tokens, window of 128 keys, fp8 pages of 64", Bf16 3, 64 64,
            Fp8E4M3 [30, 8, 64, 64], [30, 8, 64, 64], 10,
            ["sink" F32 [64], "k_scale" F32 [1], "v_scale" F32 [1]], [HND, ("window", Scalar::Int(127))]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Llama-3 8B, 1 token, 131072 keys, pages of 16", Bf16 1, 32 128,
            Bf16 [8192, 16, 8, 128], [8192, 16, 8, 128], 8192, [], []),
        case!("Llama-3 8B, 1 token, 8192 keys, pages of 16", Bf16 1, 32 128,
            Bf16 [512, 16, 8, 128], [512, 16, 8, 128], 512, [], []),
        case!("Llama-3 8B, 16 tokens, 8192 keys, pages of 16", Bf16 16, 32 128,
            Bf16 [8192, 16, 8, 128], [8192, 16, 8, 128], 512, [], []),
        case!("Llama-3 8B, 16 tokens, 131072 keys, pages of 16", Bf16 16, 32 128,
            Bf16 [131072, 16, 8, 128], [131072, 16, 8, 128], 8192, [], []),
        case!("Llama-3 8B, 256 tokens, 8192 keys, pages of 16", Bf16 256, 32 128,
            Bf16 [131072, 16, 8, 128], [131072, 16, 8, 128], 512, [], []),
        case!("Llama-3 8B, 64 tokens, 8192 keys, pages of 16", Bf16 64, 32 128,
            Bf16 [32768, 16, 8, 128], [32768, 16, 8, 128], 512, [], []),
        case!("Llama-3 70B, 64 tokens, 8192 keys, pages of 64", Bf16 64, 64 128,
            Bf16 [8192, 64, 8, 128], [8192, 64, 8, 128], 128, [], []),
        case!("Llama-3 8B, 256 tokens, 1024 keys, pages of 16", Bf16 256, 32 128,
            Bf16 [16384, 16, 8, 128], [16384, 16, 8, 128], 64, [], []),
    ]),
    corners: &[
        pages!(Bf16 Bf16 64),
        pages!(Bf16 Bf16 128),
        pages!(Bf16 Bf16 256),
        pages!(F16 F16 64),
        pages!(F16 F16 128),
        pages!(F16 F16 256),
        pages!(Bf16 Fp8E4M3 64),
        pages!(Bf16 Fp8E4M3 128),
        pages!(Bf16 Fp8E4M3 256),
        pages!(F16 Fp8E4M3 64),
        pages!(F16 Fp8E4M3 128),
        pages!(F16 Fp8E4M3 256),
        pages!(Bf16 Fp8E4M3Fnuz 64),
        pages!(Bf16 Fp8E4M3Fnuz 128),
        pages!(Bf16 Fp8E4M3Fnuz 256),
        pages!(F16 Fp8E4M3Fnuz 64),
        pages!(F16 Fp8E4M3Fnuz 128),
        pages!(F16 Fp8E4M3Fnuz 256),
        pages!(Bf16 I8 64),
        pages!(Bf16 I8 128),
        pages!(Bf16 I8 256),
        pages!(F16 I8 64),
        pages!(F16 I8 128),
        pages!(F16 I8 256),
        pages!(20 heads Bf16 Bf16 64),
        pages!(20 heads Bf16 Bf16 128),
        pages!(20 heads Bf16 Bf16 256),
        pages!(20 heads F16 F16 64),
        pages!(20 heads F16 F16 128),
        pages!(20 heads F16 F16 256),
        pages!(20 heads Bf16 Fp8E4M3 64),
        pages!(20 heads Bf16 Fp8E4M3 128),
        pages!(20 heads Bf16 Fp8E4M3 256),
        pages!(20 heads F16 Fp8E4M3 64),
        pages!(20 heads F16 Fp8E4M3 128),
        pages!(20 heads F16 Fp8E4M3 256),
        pages!(20 heads Bf16 Fp8E4M3Fnuz 64),
        pages!(20 heads Bf16 Fp8E4M3Fnuz 128),
        pages!(20 heads Bf16 Fp8E4M3Fnuz 256),
        pages!(20 heads F16 Fp8E4M3Fnuz 64),
        pages!(20 heads F16 Fp8E4M3Fnuz 128),
        pages!(20 heads F16 Fp8E4M3Fnuz 256),
        pages!(20 heads Bf16 I8 64),
        pages!(20 heads Bf16 I8 128),
        pages!(20 heads Bf16 I8 256),
        pages!(20 heads F16 I8 64),
        pages!(20 heads F16 I8 128),
        pages!(20 heads F16 I8 256),
        scaled!(Bf16 I8 64),
        scaled!(Bf16 I8 128),
        scaled!(Bf16 I8 256),
        scaled!(F16 I8 64),
        scaled!(F16 I8 128),
        scaled!(F16 I8 256),
        scaled!(Bf16 Fp8E4M3 64),
        scaled!(Bf16 Fp8E4M3 128),
        scaled!(Bf16 Fp8E4M3 256),
        scaled!(F16 Fp8E4M3 64),
        scaled!(F16 Fp8E4M3 128),
        scaled!(F16 Fp8E4M3 256),
        scaled!(Bf16 Fp8E4M3Fnuz 64),
        scaled!(Bf16 Fp8E4M3Fnuz 128),
        scaled!(Bf16 Fp8E4M3Fnuz 256),
        scaled!(F16 Fp8E4M3Fnuz 64),
        scaled!(F16 Fp8E4M3Fnuz 128),
        scaled!(F16 Fp8E4M3Fnuz 256),
        pieces!(Bf16 Bf16 8 64),
        pieces!(Bf16 Bf16 8 128),
        pieces!(Bf16 Bf16 8 256),
        pieces!(F16 F16 8 64),
        pieces!(F16 F16 8 128),
        pieces!(F16 F16 8 256),
        pieces!(Bf16 I8 16 64),
        pieces!(Bf16 I8 16 128),
        pieces!(Bf16 I8 16 256),
        pieces!(F16 I8 16 64),
        pieces!(F16 I8 16 128),
        pieces!(F16 I8 16 256),
        pieces!(Bf16 Fp8E4M3 16 64),
        pieces!(Bf16 Fp8E4M3 16 128),
        pieces!(Bf16 Fp8E4M3 16 256),
        pieces!(F16 Fp8E4M3 16 64),
        pieces!(F16 Fp8E4M3 16 128),
        pieces!(F16 Fp8E4M3 16 256),
        pieces!(Bf16 Fp8E4M3Fnuz 16 64),
        pieces!(Bf16 Fp8E4M3Fnuz 16 128),
        pieces!(Bf16 Fp8E4M3Fnuz 16 256),
        pieces!(F16 Fp8E4M3Fnuz 16 64),
        pieces!(F16 Fp8E4M3Fnuz 16 128),
        pieces!(F16 Fp8E4M3Fnuz 16 256),
        case!("f16, pieces of bytes, shuffled, pages of 32, ALiBi, window", F16 3, 2 80,
            I8 [20, 2, 5, 32, 16], [20, 2, 2, 48, 16], 6,
            ["alibi" F32 [2], "lse" F32 [3, 2]], [P4, WINDOW_OF_50]),
        case!("bf16, pieces, pages of 8 tokens that the cache does not have", Bf16 3, 2 72,
            Bf16 [9, 1, 9, 8, 8], [9, 1, 40, 8], 4, ["lse" F32 [3, 2]], [P3]),
        case!("bf16, more splits than one launch has", Bf16 1, 2 64, Bf16 [600, 16, 1, 64], [600, 16, 1, 64], 600,
            ["lse" F32 [1, 2]], [("keys_per_split", Scalar::Count(64))]),
        case!("f16, tens of splits, 128 and 72 columns", F16 2, 4 128, F16 [300, 16, 1, 128], [300, 16, 1, 72], 150,
            ["lse" F32 [2, 4]], [("keys_per_split", Scalar::Count(64))]),
        case!("f16, Hnd, softcap, ALiBi, window", F16 3, 2 40, F16 [40, 2, 16, 40], [40, 2, 16, 24], 13,
            ["alibi" F32 [3, 2], "lse" F32 [3, 2]],
            [HND, WINDOW_OF_50, ("softcap", Scalar::Float(15.0)), ("scale", Scalar::Float(0.3))]),
        case!("bf16, pages of 64, a group of 20 heads, 3 splits", Bf16 3, 20 80,
            Bf16 [16, 64, 1, 80], [16, 64, 1, 80], 8, ["lse" F32 [3, 20]], [("nsplit", Scalar::Count(3))]),
        case!("bf16, pages that the cache does not have", Bf16 3, 2 64, Bf16 [9, 16, 1, 64], [9, 16, 1, 64], 4,
            ["lse" F32 [3, 2]], [WINDOW_OF_50]),
        case!("bf16, paged", Bf16 2, 3 32, Bf16 [16, 1, 4, 16, 8], [16, 1, 32, 16], 3, [], [P3]),
        case!("f16, paged and shuffled", F16 2, 3 32, F16 [16, 1, 4, 16, 8], [16, 1, 2, 32, 8], 3, [], [P4]),
        case!("bf16, pages of 8 tokens, too few of them", Bf16 3, 2 20, Bf16 [18, 8, 1, 20], [18, 8, 1, 33], 4,
            ["lse" F32 [3, 2]], [("nsplit", Scalar::Count(2))]),
        case!("f32", F32 3, 2 20, F32 [18, 16, 1, 20], [18, 16, 1, 33], 6, ["lse" F32 [3, 2]],
            [("keys_per_split", Scalar::Count(64))]),
        case!("bf16, int8 pages of 24", Bf16 2, 4 64, I8 [16, 24, 2, 64], [16, 24, 2, 64], 3,
            ["k_scale" F32 [1], "v_scale" F32 [2, 2]], []),
        case!("fp8 of gfx950, fp8 output", Fp8E4M3 2, 4 32, Fp8E4M3 [16, 16, 2, 32], [16, 16, 2, 32], 3,
            ["k_scale" F32 [1], "out_scale" F32 [1]], [("output", Scalar::Choice("fp8e4m3"))]),
        case!("fp8 of gfx942, fp8 output", Fp8E4M3Fnuz 2, 4 32, Fp8E4M3Fnuz [16, 16, 2, 32], [16, 16, 2, 32], 3,
            ["v_scale" F32 [1], "out_scale" F32 [1]], [("output", Scalar::Choice("fp8e4m3fnuz"))]),
        scaled!(20 heads Bf16 I8 64),
        scaled!(20 heads Bf16 I8 128),
        scaled!(20 heads Bf16 I8 256),
        scaled!(20 heads F16 I8 64),
        scaled!(20 heads F16 I8 128),
        scaled!(20 heads F16 I8 256),
        scaled!(20 heads Bf16 Fp8E4M3 64),
        scaled!(20 heads Bf16 Fp8E4M3 128),
        scaled!(20 heads Bf16 Fp8E4M3 256),
        scaled!(20 heads F16 Fp8E4M3 64),
        scaled!(20 heads F16 Fp8E4M3 128),
        scaled!(20 heads F16 Fp8E4M3 256),
        scaled!(20 heads Bf16 Fp8E4M3Fnuz 64),
        scaled!(20 heads Bf16 Fp8E4M3Fnuz 128),
        scaled!(20 heads Bf16 Fp8E4M3Fnuz 256),
        scaled!(20 heads F16 Fp8E4M3Fnuz 64),
        scaled!(20 heads F16 Fp8E4M3Fnuz 128),
        scaled!(20 heads F16 Fp8E4M3Fnuz 256),
        pieces!(20 heads Bf16 Bf16 8 64),
        pieces!(20 heads Bf16 Bf16 8 128),
        pieces!(20 heads F16 F16 8 64),
        pieces!(20 heads F16 F16 8 128),
        pieces!(20 heads Bf16 I8 16 64),
        pieces!(20 heads Bf16 I8 16 128),
        pieces!(20 heads F16 I8 16 64),
        pieces!(20 heads F16 I8 16 128),
        pieces!(20 heads Bf16 Fp8E4M3 16 64),
        pieces!(20 heads Bf16 Fp8E4M3 16 128),
        pieces!(20 heads F16 Fp8E4M3 16 64),
        pieces!(20 heads F16 Fp8E4M3 16 128),
        pieces!(20 heads Bf16 Fp8E4M3Fnuz 16 64),
        pieces!(20 heads Bf16 Fp8E4M3Fnuz 16 128),
        pieces!(20 heads F16 Fp8E4M3Fnuz 16 64),
        pieces!(20 heads F16 Fp8E4M3Fnuz 16 128),
    ],
    outputs: specs,
    run,
    reference,
    traffic,
};

fn specs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let [n, heads, _] = shape(call, "q")?;
    expect_cache_dtypes(call, CACHES, "q")?;
    let sizes = cache_sizes(call, CACHES)?;
    expect_heads(call, CACHES, sizes, 256)?;
    expect_shape(call, "seq_lens", &[n], "sequences of q")?;
    let width = call.get("block_table")?.shape()[1];
    expect_shape(call, "block_table", &[n, width], "sequences of q")?;
    expect_one_of(call, "alibi", &[&[heads], &[n, heads]])?;
    expect_one_of(call, "sink", &[&[heads]])?;
    expect_scales(call, sizes, n)?;
    expect_one_of(call, "out_scale", &[&[1]])?;
    window(call, "window")?;
    splits(call)?;
    let mut specs = vec![("out", TensorSpec::new(output(call)?, [n, heads, sizes.dv]))];
    if call.wants("lse") {
        specs.push(("lse", TensorSpec::new(DType::F32, [n, heads])));
    }
    Ok(specs)
}

/// Factors of the cache: `[1]` or by sequence and head, or both of tokens.
fn expect_scales(call: &CallSpec, sizes: CacheSizes, n: usize) -> Result<()> {
    let scales = ["k_scale", "v_scale"];
    if scales.iter().all(|name| call.optional(name).is_none_or(|s| s.shape.len() != 3)) {
        return scales.iter().try_for_each(|name| expect_one_of(call, name, &[&[1], &[n, sizes.heads]]));
    }
    let shape = [sizes.pages, sizes.heads, sizes.tokens];
    for name in scales {
        match call.optional(name) {
            Some(_) => expect_one_of(call, name, &[&shape])?,
            None => {
                return Err(Error::shape(
                    "pa_decode",
                    name,
                    [0; 0],
                    format!("{shape:?} (factors of tokens, of both)"),
                ));
            }
        }
    }
    let (q, cache) = (call.get("q")?.dtype, call.get("k_cache")?.dtype);
    let columns = [sizes.dqk, sizes.dv];
    let served = q != DType::F32
        && matches!(cache, DType::Fp8E4M3 | DType::Fp8E4M3Fnuz | DType::I8)
        && matches!(layout(call)?, KvLayout::Nhd | KvLayout::Hnd)
        && sizes.tokens.is_multiple_of(16)
        && columns.iter().all(|n| n.is_multiple_of(16));
    if served {
        return Ok(());
    }
    let why = "caches of fp8 or int8 in rows on 16 bytes, pages of 16, 32, .. tokens, 16-bit queries";
    Err(Error::unsupported("pa_decode", "factors of tokens beside these tensors", why))
}

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
    let tensors = PaDecodeInputs::<T, C> {
        q: inputs.view("q")?,
        cache: PagedKv { k_cache: inputs.view("k_cache")?, v_cache: inputs.view("v_cache")?, pages },
        seq_lens: indices(inputs, "seq_lens")?,
    };
    let options = PaDecodeOptions {
        scale: scale(inputs)?,
        window: window(inputs, "window")?,
        softcap: float(inputs, "softcap")?,
        alibi: inputs.optional_view("alibi")?,
        sink: inputs.optional_view("sink")?,
        scales: CacheScales { k: inputs.optional_view("k_scale")?, v: inputs.optional_view("v_scale")? },
        out_scale: inputs.optional_view("out_scale")?,
        splits: splits(inputs)?,
    };
    let sequences = inputs.get("q")?.shape()[0];
    let space = workspace(stream, inputs, &mut outputs, [sequences; 2], options.splits)?;
    let outputs = AttentionOutputs::<O> { out: outputs.take("out")?, lse: outputs.take_optional("lse")? };
    pa_decode(stream, tensors, outputs, space, &options)
}

fn host_sequences(call: &HostCall) -> Result<Vec<PagedSequence>> {
    let (sizes, lens) = (cache_sizes(call, CACHES)?, integers(call.get("seq_lens")?));
    let sequence = |(n, len): (usize, i64)| {
        let keys = keys_in_pages(call, sizes, n, len);
        PagedSequence { n, queries: n..n + 1, keys }
    };
    Ok(lens.into_iter().enumerate().map(sequence).collect())
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    specs(&call.spec())?;
    let ([n, heads, dqk], sizes) = (shape(call, "q")?, cache_sizes(call, CACHES)?);
    let rows = cache_rows(call, CACHES, layout(call)?, sizes)?;
    let sizes = [heads, sizes.heads, dqk, sizes.dv];
    let (out, lse) = attend_paged(call, sizes, host_sequences(call)?, &rows, &rows, [0, 0])?;
    Ok(outputs(call, (vec![n, heads, sizes[3]], out), (vec![n, heads], lse)))
}

fn traffic(call: &HostCall) -> Traffic {
    match (cache_sizes(call, CACHES), host_sequences(call)) {
        (Ok(sizes), Ok(sequences)) => {
            paged_traffic(call, &sequences, [&CACHES, &[], &["block_table"]], sizes)
        }
        _ => Traffic::once(call),
    }
}
