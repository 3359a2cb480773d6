//! Registry entry of `extend_attn`.

use super::attention::{CAUSAL, HostRows, LSE, SCALE, SOFTCAP, float, indices, outputs, scale};
use super::common::{INDICES_32, expect_dtypes, expect_shape, integers, shape};
use super::mha::GENERAL;
use super::paged::{
    FLOAT, K_SCALE, Key, POOL, PagedSequence, Q, V_SCALE, attend_paged, cache_rows, expect_cache_dtypes,
    expect_one_of, paged_sequences, paged_traffic, sequences, with_cache,
};
use crate::kv_cache::CacheSizes;
use crate::prefill::{MOST_COLUMNS, check_cache_heads};
use crate::{
    AttentionElement, AttentionOutput, AttentionOutputs, CacheScales, CustomMask, ExtendInputs,
    ExtendOptions, KvLayout, PagedElement, extend_attn,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, with_float};

const POOLS: [&str; 2] = ["k_pool", "v_pool"];

const SKIP_PREFIX_MASK: ScalarSpec = ScalarSpec {
    name: "skip_prefix_mask",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "cached keys are visible whatever custom_mask says",
};

/// Type; sequences, queries of all; heads, columns; pools: type, slots; entries of the prefixes.
macro_rules! case {
    ($label:literal, $dtype:ident $n:literal $tq:literal, $hq:literal $hkv:literal, $dqk:literal $dv:literal,
     $pool:ident $slots:literal $indices:literal, [$($name:literal $other:ident $shape:expr),*], [$($scalar:expr),*]) => {
        Case {
            label: $label,
            tensors: &[
                ("q", DType::$dtype, &[$tq, $hq, $dqk]),
                ("k_ext", DType::$dtype, &[$tq, $hkv, $dqk]),
                ("v_ext", DType::$dtype, &[$tq, $hkv, $dv]),
                ("k_pool", DType::$pool, &[$slots, $hkv, $dqk]),
                ("v_pool", DType::$pool, &[$slots, $hkv, $dv]),
                ("qo_indptr", DType::I32, &[$n + 1]),
                ("kv_indptr", DType::I32, &[$n + 1]),
                ("kv_indices", DType::I32, &[$indices]),
                $(($name, DType::$other, &$shape),)*
            ],
            scalars: &[$($scalar),*],
        }
    };
}

const DENSE: (&str, Scalar) = ("causal", Scalar::Bool(false));

pub(super) const EXTEND_ATTN: Operator = Operator {
    name: "extend_attn",
    family: "hk-attention",
    summary: "out = softmax(scale q k^T) v, over keys in slots of a pool and those of the queries",
    args: &[
        ArgSpec { dtypes: FLOAT, ..Q },
        ArgSpec::input("k_ext", FLOAT, 3, "[total_q, Hkv, Dqk]"),
        ArgSpec::input("v_ext", FLOAT, 3, "[total_q, Hkv, Dv]"),
        POOL,
        ArgSpec { name: "v_pool", ..POOL },
        ArgSpec::input("qo_indptr", INDICES_32, 1, "[sequences + 1]").sampled(Sample::StartsOf("q")),
        ArgSpec::input("kv_indptr", INDICES_32, 1, "[sequences + 1]").sampled(Sample::StartsOf("kv_indices")),
        ArgSpec::input("kv_indices", INDICES_32, 1, "[indices]").sampled(Sample::Distinct { below: 64 }),
        ArgSpec::input("custom_mask", &[DType::U8], 1, "[bytes]")
            .sampled(Sample::Integers { low: 0, high: 2 })
            .optional(),
        ArgSpec::input("mask_indptr", INDICES_32, 1, "[sequences + 1]")
            .sampled(Sample::StartsOf("custom_mask"))
            .optional(),
        K_SCALE,
        V_SCALE,
        ArgSpec::output("out", Tolerance::Attention, FLOAT, 3, "[total_q, Hq, Dv]"),
        ArgSpec::output("lse", LSE, &[DType::F32], 2, "[total_q, Hq]").optional(),
    ],
    scalars: &[SCALE, ScalarSpec { default: Scalar::Bool(true), ..CAUSAL }, SOFTCAP, SKIP_PREFIX_MASK],
    kernels: GENERAL,
    cases: &[
        case!("Llama-3 8B, 2 x 24 tokens after 40", Bf16 2 48, 32 8, 128 128, Bf16 128 80, [], []),
        case!("DeepSeek-V3 heads, 2 x 20 tokens after 30", Bf16 2 40, 8 8, 192 128, Bf16 64 60, [], []),
        case!("DeepSeek-V3 latent heads, 2 x 6 tokens after 30", Bf16 2 12, 16 1, 576 512, Bf16 64 60, [], []),
    ],
    bench: BenchSizes::Cases(&[
        case!("GQA 32/8, d128, 4 x 2048 tokens after 6144", Bf16 4 8192, 32 8, 128 128, Bf16 24576 24576, [], []),
        case!("DeepSeek-V3, 16 of 128 heads, 4 x 1024 tokens after 3072", Bf16 4 4096, 16 16, 192 128, Bf16 12288 12288,
            [], []),
    ]),
    corners: &[
        case!("bf16, LSE, softcap", Bf16 2 66, 4 2, 64 64, Bf16 64 60, ["lse" F32 [66, 4]], [("softcap", Scalar::Float(15.0))]),
        case!("f16, odd columns, all keys", F16 2 40, 2 1, 18 13, F16 64 33, ["lse" F32 [40, 2]],
            [DENSE, ("scale", Scalar::Float(0.3))]),
        case!("bf16, custom mask", Bf16 2 20, 2 1, 16 16, Bf16 64 30,
            ["custom_mask" U8 [500], "mask_indptr" I32 [3], "lse" F32 [20, 2]], []),
        case!("f32, custom mask of new tokens, short of bytes", F32 2 20, 2 1, 16 16, F32 64 30,
            ["custom_mask" U8 [499], "mask_indptr" I32 [3], "lse" F32 [20, 2]],
            [DENSE, ("skip_prefix_mask", Scalar::Bool(true))]),
        case!("bf16, slots that the pool does not have", Bf16 2 33, 2 1, 17 17, Bf16 40 70, ["lse" F32 [33, 2]], []),
        case!("bf16, columns of 288 and 256", Bf16 1 9, 2 1, 288 256, Bf16 64 10, [], []),
        case!("bf16, absorbed MLA, custom mask", Bf16 2 20, 4 1, 576 512, Bf16 64 30,
            ["custom_mask" U8 [500], "mask_indptr" I32 [3], "lse" F32 [20, 4]], []),
        case!("f16, absorbed MLA, int8 pool", F16 1 9, 16 1, 576 512, I8 64 40,
            ["k_scale" F32 [1], "v_scale" F32 [1, 1]], []),
        case!("f16, columns of 192 and 128, int8 pool", F16 1 20, 2 2, 192 128, I8 64 20,
            ["k_scale" F32 [1], "v_scale" F32 [1, 2]], []),
        case!("bf16, fp8 pool of gfx950", Bf16 2 20, 4 2, 64 64, Fp8E4M3 64 40, ["k_scale" F32 [2, 2]], []),
        case!("bf16, fp8 pool of gfx942", Bf16 2 20, 4 2, 64 64, Fp8E4M3Fnuz 64 40, ["v_scale" F32 [1]], []),
    ],
    outputs: specs,
    run,
    reference,
    traffic,
};

fn sizes<V: Described>(call: &Call<V>) -> Result<CacheSizes> {
    let ([slots, heads, dqk], [.., dv]) = (shape::<3, V>(call, "k_pool")?, shape::<3, V>(call, "v_pool")?);
    Ok(CacheSizes { pages: slots, tokens: 1, heads, dqk, dv })
}

fn specs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let op = call.operator().name;
    let ([total_q, heads, dqk], sizes) = (shape(call, "q")?, sizes(call)?);
    expect_dtypes(call, "q", &["k_ext", "v_ext"])?;
    expect_cache_dtypes(call, POOLS, "q")?;
    expect_shape(call, "v_pool", &[sizes.pages, sizes.heads, sizes.dv], "slots and heads of k_pool")?;
    check_cache_heads(op, call.get("q")?.shape(), POOLS, sizes, MOST_COLUMNS)?;
    expect_shape(call, "k_ext", &[total_q, sizes.heads, dqk], "rows of q, heads and columns of k_pool")?;
    expect_shape(call, "v_ext", &[total_q, sizes.heads, sizes.dv], "rows of q, heads and columns of v_pool")?;
    let n = sequences(call, "qo_indptr")?;
    expect_shape(call, "kv_indptr", &[n + 1], "shape of qo_indptr")?;
    expect_shape(call, "mask_indptr", &[n + 1], "shape of qo_indptr")?;
    if call.optional("custom_mask").is_some() != call.optional("mask_indptr").is_some() {
        return Err(Error::argument(
            op,
            "custom_mask",
            "one of two",
            "both of custom_mask and mask_indptr, or neither",
        ));
    }
    expect_one_of(call, "k_scale", &[&[1], &[n, sizes.heads]])?;
    expect_one_of(call, "v_scale", &[&[1], &[n, sizes.heads]])?;
    let mut specs = vec![("out", TensorSpec::new(call.get("q")?.dtype, [total_q, heads, sizes.dv]))];
    if call.wants("lse") {
        specs.push(("lse", TensorSpec::new(DType::F32, [total_q, heads])));
    }
    Ok(specs)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, outputs) = call.split();
    let cache = inputs.get("k_pool")?.dtype();
    with_float!("extend_attn", "q", inputs.get("q")?.dtype(), T => with_cache!(cache, T, C => run_typed::<T, C>(stream, &inputs, outputs)))
}

fn run_typed<T, C>(stream: &Stream, inputs: &Inputs, mut outputs: Outputs) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T>,
    C: PagedElement<T>,
{
    let tensors = ExtendInputs::<T, C> {
        q: inputs.view("q")?,
        k_ext: inputs.view("k_ext")?,
        v_ext: inputs.view("v_ext")?,
        k_pool: inputs.view("k_pool")?,
        v_pool: inputs.view("v_pool")?,
        qo_indptr: indices(inputs, "qo_indptr")?,
        kv_indptr: indices(inputs, "kv_indptr")?,
        kv_indices: indices(inputs, "kv_indices")?,
    };
    let custom_mask = match (inputs.optional_view("custom_mask")?, inputs.optional_view("mask_indptr")?) {
        (Some(mask), Some(indptr)) => {
            Some(CustomMask { mask, indptr, skip_prefix: inputs.bool("skip_prefix_mask")? })
        }
        _ => None,
    };
    let options = ExtendOptions {
        scale: scale(inputs)?,
        causal: inputs.bool("causal")?,
        softcap: float(inputs, "softcap")?,
        custom_mask,
        scales: CacheScales { k: inputs.optional_view("k_scale")?, v: inputs.optional_view("v_scale")? },
    };
    let outputs = AttentionOutputs::<T> { out: outputs.take("out")?, lse: outputs.take_optional("lse")? };
    extend_attn(stream, tensors, outputs, &options)
}

fn host_sequences(call: &HostCall) -> Result<Vec<PagedSequence>> {
    let slots = sizes(call)?.pages;
    let (starts, entries) = (integers(call.get("kv_indptr")?), integers(call.get("kv_indices")?));
    let total_q = call.get("q")?.shape()[0];
    paged_sequences(call, "qo_indptr", total_q, |n, queries| {
        let [start, end] = [starts[n], starts[n + 1]].map(usize::try_from);
        let prefix = entries.get(start.ok()?..end.ok()?)?;
        let cached = prefix.iter().map(|&slot| match usize::try_from(slot) {
            Ok(slot) if slot < slots => Key::Cached(slot),
            _ => Key::Missing,
        });
        Some(cached.chain(queries.clone().map(Key::Fresh)).collect())
    })
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    specs(&call.spec())?;
    let ([total_q, heads, dqk], sizes) = (shape(call, "q")?, sizes(call)?);
    let cache = cache_rows(call, POOLS, KvLayout::Nhd, sizes)?;
    let fresh = HostRows { k: call.get("k_ext")?.to_f64(), v: call.get("v_ext")?.to_f64() };
    let sizes = [heads, sizes.heads, dqk, sizes.dv];
    let (out, lse) = attend_paged(call, sizes, host_sequences(call)?, &cache, &fresh, [0, 0])?;
    Ok(outputs(call, (vec![total_q, heads, sizes[3]], out), (vec![total_q, heads], lse)))
}

fn traffic(call: &HostCall) -> Traffic {
    match (sizes(call), host_sequences(call)) {
        (Ok(sizes), Ok(sequences)) => {
            paged_traffic(call, &sequences, [&POOLS, &["k_ext", "v_ext"], &["kv_indices"]], sizes)
        }
        _ => Traffic::once(call),
    }
}
