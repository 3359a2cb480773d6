//! Registry entry of `pod_attn`.

use super::attention::{
    F32, HostRows, LSE, SCALE, Sequence, WINDOW, attend, indices, keys_of, packed, scale, window,
};
use super::common::{LAYOUT, expect_dtypes, expect_shape, integers, layout, shape};
use super::decode::{KERNELS as DECODE, KEYS_PER_SPLIT, NSPLIT, splits, workspace_of};
use super::mha::joined;
use super::paged::{
    BLOCK_TABLE, FLOAT, K_CACHE, PagedSequence, SEQ_LENS, V_CACHE, attend_rows, cache_rows, cache_sizes,
    expect_cache_dtypes, keys_in_pages, paged_traffic, sequences, with_cache,
};
use crate::prefill::{check_cache_heads, check_heads};
use crate::{
    AttentionElement, AttentionOutput, AttentionOutputs, AttentionProblem, PaDecodeInputs, PagedElement,
    PagedKv, Pages, PodDecode, PodOptions, PodPrefill, Qkv, SequenceStarts, kernels, pod_attn,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16, f16};

const OP: &str = "pod_attn";
const CACHES: [&str; 2] = ["k_cache", "v_cache"];

const Q_PREFILL: ArgSpec = ArgSpec::input("q_prefill", FLOAT, 3, "[total_q, Hq, Dqk]");
const CU_SEQLENS_Q: ArgSpec = ArgSpec::input("cu_seqlens_q", &[DType::I32], 1, "[sequences + 1]")
    .sampled(Sample::StartsOf("q_prefill"));
const OUT_PREFILL: ArgSpec =
    ArgSpec::output("out_prefill", Tolerance::Attention, FLOAT, 3, "[total_q, Hq, Dv]");
const LSE_PREFILL: ArgSpec = ArgSpec::output("lse_prefill", LSE, F32, 2, "[total_q, Hq]").optional();
const PREFILL_BLOCKS: ScalarSpec = ScalarSpec {
    name: "prefill_blocks",
    default: Scalar::Count(0),
    choices: &[],
    summary: "blocks of prompts for each decode_blocks of single tokens; both 0: in proportion to their numbers",
};

/// Type; sequences, queries and keys of all prompts; single tokens; heads, key heads, columns; cache: type, shape; pages of a sequence.
macro_rules! case {
    ($label:expr, $dtype:ident $n:literal $tq:literal $tk:literal, $tokens:literal, $hq:literal $hkv:literal $d:literal,
     $cache:ident $k:expr, $pages:literal, [$($name:literal $other:ident $shape:expr),*], [$($scalar:expr),*]) => {
        Case {
            label: $label,
            tensors: &[
                ("q_prefill", DType::$dtype, &[$tq, $hq, $d]),
                ("k_prefill", DType::$dtype, &[$tk, $hkv, $d]),
                ("v_prefill", DType::$dtype, &[$tk, $hkv, $d]),
                ("cu_seqlens_q", DType::I32, &[$n + 1]),
                ("cu_seqlens_k", DType::I32, &[$n + 1]),
                ("q_decode", DType::$dtype, &[$tokens, $hq, $d]),
                ("k_cache", DType::$cache, &$k),
                ("v_cache", DType::$cache, &$k),
                ("block_table", DType::I32, &[$tokens, $pages]),
                ("seq_lens", DType::I32, &[$tokens]),
                $(($name, DType::$other, &$shape),)*
            ],
            scalars: &[$($scalar),*],
        }
    };
}

/// A corner of a kernel: type, columns.
macro_rules! both {
    ($dtype:ident $d:literal) => {
        case!(concat!("columns of ", $d), $dtype 2 300 330, 3, 4 2 $d, $dtype [40, 16, 2, $d], 13,
            ["lse_prefill" F32 [300, 4], "lse_decode" F32 [3, 4]], [("keys_per_split", Scalar::Count(64))])
    };
}

const HND: (&str, Scalar) = ("layout", Scalar::Choice("hnd"));

pub(super) const POD_ATTN: Operator = Operator {
    name: OP,
    family: "hk-attention",
    summary: "causal mha_varlen of prompts and pa_decode of other sequences in one launch",
    args: &[
        Q_PREFILL,
        ArgSpec { name: "k_prefill", shape: "[total_k, Hkv, Dqk]", ..Q_PREFILL },
        ArgSpec { name: "v_prefill", shape: "[total_k, Hkv, Dv]", ..Q_PREFILL },
        CU_SEQLENS_Q,
        ArgSpec { name: "cu_seqlens_k", sample: Sample::StartsOf("k_prefill"), ..CU_SEQLENS_Q },
        ArgSpec { name: "q_decode", shape: "[N, Hq, Dqk]", ..Q_PREFILL },
        K_CACHE,
        V_CACHE,
        BLOCK_TABLE,
        SEQ_LENS,
        OUT_PREFILL,
        LSE_PREFILL,
        ArgSpec { name: "out_decode", shape: "[N, Hq, Dv]", ..OUT_PREFILL },
        ArgSpec { name: "lse_decode", shape: "[N, Hq]", ..LSE_PREFILL },
    ],
    scalars: &[
        SCALE,
        WINDOW,
        LAYOUT,
        PREFILL_BLOCKS,
        ScalarSpec {
            name: "decode_blocks",
            summary: "blocks of single tokens for each prefill_blocks of prompts",
            ..PREFILL_BLOCKS
        },
        NSPLIT,
        KEYS_PER_SPLIT,
    ],
    kernels: &joined::<18>(
        DECODE,
        &[&kernels::PREFILL_BF16, &kernels::PREFILL_F16, &kernels::POD_BF16, &kernels::POD_F16],
    ),
    cases: &[case!("Llama-3 8B, a prompt of 128 tokens beside 4 single ones", Bf16 1 128 128, 4, 32 8 128,
        Bf16 [160, 16, 8, 128], 16, [], [])],
    bench: BenchSizes::Cases(&[
        case!("Llama-3 8B, a prompt of 8192 tokens beside 64 tokens over 8192 keys", Bf16 1 8192 8192, 64, 32 8 128,
            Bf16 [32768, 16, 8, 128], 512, [], []),
    ]),
    corners: &[
        both!(Bf16 64),
        both!(Bf16 128),
        both!(F16 64),
        both!(F16 128),
        case!("bf16, one kind after the other, window", Bf16 3 190 190, 3, 4 1 80, Bf16 [40, 16, 1, 80], 6,
            ["lse_decode" F32 [3, 4]],
            [("prefill_blocks", Scalar::Count(1)), ("window", Scalar::Int(40)), ("scale", Scalar::Float(0.2))]),
        case!("f16, mixed by a given ratio, tens of splits", F16 2 140 150, 2, 2 1 64,
            F16 [300, 16, 1, 64], 150, ["lse_prefill" F32 [140, 2]],
            [("prefill_blocks", Scalar::Count(2)), ("decode_blocks", Scalar::Count(3)), ("nsplit", Scalar::Count(40))]),
        case!("bf16, two launches: 256 columns, Hnd", Bf16 2 40 50, 2, 2 1 256, Bf16 [16, 1, 16, 256], 4, [], [HND]),
        case!("f16, two launches: 20 columns", F16 2 40 50, 2, 2 1 20, F16 [16, 16, 1, 20], 4,
            ["lse_prefill" F32 [40, 2], "lse_decode" F32 [2, 2]], []),
        case!("f32, two launches", F32 2 20 20, 2, 2 1 16, F32 [16, 16, 1, 16], 4, [], []),
        case!("bf16, fp8 pages of gfx950", Bf16 2 40 50, 2, 2 1 64, Fp8E4M3 [16, 16, 1, 64], 4, [], []),
        case!("f16, fp8 pages of gfx942", F16 2 40 50, 2, 2 1 64, Fp8E4M3Fnuz [16, 16, 1, 64], 4, [], []),
        case!("bf16, starts that do not end with the rows", Bf16 2 91 96, 2, 2 2 64, Bf16 [9, 16, 2, 64], 4,
            ["lse_prefill" F32 [91, 2], "lse_decode" F32 [2, 2]], []),
    ],
    outputs: specs,
    run,
    reference,
    traffic,
};

/// Heads and columns of both halves.
struct Sizes {
    prompts: usize,
    prefill: [usize; 4],
    decode: [usize; 4],
}

fn sizes<V: Described>(call: &Call<V>) -> Result<Sizes> {
    let [_, heads, dqk] = shape(call, "q_prefill")?;
    let ([total_k, kv_heads, _], [_, _, dv]) = (shape(call, "k_prefill")?, shape(call, "v_prefill")?);
    expect_dtypes(call, "q_prefill", &["k_prefill", "v_prefill", "q_decode"])?;
    expect_shape(call, "v_prefill", &[total_k, kv_heads, dv], "keys and heads of k_prefill")?;
    let [q, k, v] =
        ["q_prefill", "k_prefill", "v_prefill"].map(|name| call.get(name).map(|t| (name, t.shape())));
    check_heads(OP, [q?, k?, v?], [256, 256])?;
    let prompts = sequences(call, "cu_seqlens_q")?;
    expect_shape(call, "cu_seqlens_k", &[prompts + 1], "shape of cu_seqlens_q")?;
    let [n, heads_decode, dqk_decode] = shape(call, "q_decode")?;
    expect_cache_dtypes(call, CACHES, "q_decode")?;
    let cache = cache_sizes(call, CACHES)?;
    check_cache_heads(OP, call.get("q_decode")?.shape(), CACHES, cache, [256, 256])?;
    expect_shape(call, "seq_lens", &[n], "sequences of q_decode")?;
    let width = call.get("block_table")?.shape()[1];
    expect_shape(call, "block_table", &[n, width], "sequences of q_decode")?;
    window(call, "window")?;
    splits(call)?;
    ratio(call)?;
    let decode = [heads_decode, cache.heads, dqk_decode, cache.dv];
    Ok(Sizes { prompts, prefill: [heads, kv_heads, dqk, dv], decode })
}

fn ratio<V: Described>(call: &Call<V>) -> Result<Option<[u16; 2]>> {
    let of = |name: &'static str| {
        let n = call.count(name)?;
        u16::try_from(n).map_err(|_| Error::argument(OP, name, n, "at most 65535"))
    };
    let ratio = [of("prefill_blocks")?, of("decode_blocks")?];
    Ok(Some(ratio).filter(|ratio| *ratio != [0, 0]))
}

fn specs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let dtype = call.get("q_prefill")?.dtype;
    let spec = |(name, shape): (&'static str, Vec<usize>)| {
        let is_out = name.starts_with("out");
        let spec = TensorSpec::new(if is_out { dtype } else { DType::F32 }, shape);
        (is_out || call.wants(name)).then_some((name, spec))
    };
    Ok(shapes(call)?.into_iter().filter_map(spec).collect())
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, outputs) = call.split();
    let cache = inputs.get("k_cache")?.dtype();
    match inputs.get("q_prefill")?.dtype() {
        DType::F16 => with_cache!(cache, f16, C => run_typed::<f16, C>(stream, &inputs, outputs)),
        DType::F32 => with_cache!(cache, f32, C => run_typed::<f32, C>(stream, &inputs, outputs)),
        _ => with_cache!(cache, bf16, C => run_typed::<bf16, C>(stream, &inputs, outputs)),
    }
}

fn run_typed<T: AttentionElement + AttentionOutput<T>, C: PagedElement<T>>(
    stream: &Stream,
    inputs: &Inputs,
    mut outputs: Outputs,
) -> Result<()> {
    let qkv =
        Qkv::<T> { q: inputs.view("q_prefill")?, k: inputs.view("k_prefill")?, v: inputs.view("v_prefill")? };
    let starts = SequenceStarts { q: indices(inputs, "cu_seqlens_q")?, k: indices(inputs, "cu_seqlens_k")? };
    let pages = Pages { block_table: indices(inputs, "block_table")?, layout: layout(inputs)? };
    let tensors = PaDecodeInputs::<T, C> {
        q: inputs.view("q_decode")?,
        cache: PagedKv { k_cache: inputs.view("k_cache")?, v_cache: inputs.view("v_cache")?, pages },
        seq_lens: indices(inputs, "seq_lens")?,
    };
    let ([n, heads, _], sizes) = (shape(inputs, "q_decode")?, cache_sizes(inputs, CACHES)?);
    let keys = inputs.get("block_table")?.shape()[1].saturating_mul(sizes.tokens);
    let problem =
        AttentionProblem { sequences: n, heads, kv_heads: sizes.heads, queries: n, keys, dv: sizes.dv };
    let options = PodOptions {
        scale: scale(inputs)?,
        window: window(inputs, "window")?,
        splits: splits(inputs)?,
        ratio: ratio(inputs)?,
    };
    let workspace = workspace_of(stream, &mut outputs, &problem, options.splits)?;
    let mut of = |out, lse| -> Result<_> {
        Ok(AttentionOutputs::<T> { out: outputs.take(out)?, lse: outputs.take_optional(lse)? })
    };
    let prefill = PodPrefill { qkv, cu_seqlens: starts, outputs: of("out_prefill", "lse_prefill")? };
    let decode = PodDecode { inputs: tensors, outputs: of("out_decode", "lse_decode")?, workspace };
    pod_attn(stream, prefill, decode, &options)
}

fn single_tokens(call: &HostCall) -> Result<Vec<PagedSequence>> {
    let (sizes, lens) = (cache_sizes(call, CACHES)?, integers(call.get("seq_lens")?));
    let sequence = |(n, len): (usize, i64)| {
        let keys = keys_in_pages(call, sizes, n, len);
        PagedSequence { n, queries: n..n + 1, keys }
    };
    Ok(lens.into_iter().enumerate().map(sequence).collect())
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let Sizes { prompts, prefill, decode } = sizes(call)?;
    let ([total_q, ..], [total_k, ..]) =
        (shape::<3, _>(call, "q_prefill")?, shape::<3, _>(call, "k_prefill")?);
    let values = |name: &'static str| call.get(name).map(|t| t.to_f64());
    let starts = ["cu_seqlens_q", "cu_seqlens_k"].map(|name| call.get(name).map(integers));
    let [starts_q, starts_k] = starts;
    let (starts_q, starts_k) = (starts_q?, starts_k?);
    let of_prompts = match packed(&starts_q, total_q) {
        None if prompts == 0 => vec![],
        None => vec![Sequence { queries: 0..total_q, keys: None }],
        Some(rows) => {
            let sequence = |(n, queries)| Sequence { queries, keys: keys_of(&starts_k, n, total_k) };
            rows.into_iter().enumerate().map(sequence).collect()
        }
    };
    let rows = HostRows { k: values("k_prefill")?, v: values("v_prefill")? };
    let (prompts, prompts_lse) = attend(call, prefill, &values("q_prefill")?, &rows, &of_prompts, [0, 0])?;
    let cache = cache_rows(call, CACHES, layout(call)?, cache_sizes(call, CACHES)?)?;
    let (tokens, tokens_lse) =
        attend_rows(call, decode, &values("q_decode")?, single_tokens(call)?, &cache, &cache, [0, 0])?;
    let values = [prompts, [prompts_lse, vec![]], tokens, [tokens_lse, vec![]]];
    let all = shapes(call)?.into_iter().zip(values);
    let wanted = all.filter(|((name, _), _)| name.starts_with("out") || call.wants(name));
    let tensor = |shape, [values, magnitudes]: [Vec<f64>; 2]| {
        HostTensorF64::new(shape, values).with_magnitudes(magnitudes)
    };
    Ok(wanted.map(|((name, shape), values)| (name, tensor(shape, values))).collect())
}

/// Shapes of outputs and log-sum-exps, whether they are wanted or not.
fn shapes<V: Described>(call: &Call<V>) -> Result<Vec<(&'static str, Vec<usize>)>> {
    let Sizes { prefill, decode, .. } = sizes(call)?;
    let mut all = vec![];
    for (q, out, lse, [.., dv]) in [
        ("q_prefill", "out_prefill", "lse_prefill", prefill),
        ("q_decode", "out_decode", "lse_decode", decode),
    ] {
        let [rows, heads, _] = shape(call, q)?;
        all.extend([(out, vec![rows, heads, dv]), (lse, vec![rows, heads])]);
    }
    Ok(all)
}

fn traffic(call: &HostCall) -> Traffic {
    match (cache_sizes(call, CACHES), single_tokens(call)) {
        (Ok(sizes), Ok(sequences)) => {
            let read = paged_traffic(call, &sequences, [&CACHES, &[], &["block_table"]], sizes).read;
            Traffic { read, ..Traffic::once(call) }
        }
        _ => Traffic::once(call),
    }
}
