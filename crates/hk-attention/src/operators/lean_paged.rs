//! Registry entry of `lean_atten_paged`.

use super::attention::{CAUSAL, F32, HostRows, LSE, SCALE, Sequence, attend, indices, outputs, scale};
use super::common::{INDICES_32, expect_dtypes, expect_shape, integers, shape};
use super::lean::{PROGRAMS, expect_batch, programs};
use super::mha::{joined, specs};
use super::paged::{FLOAT, K_CACHE, K_SCALE, V_SCALE, expect_cache_dtypes, expect_one_of, with_cache};
use crate::kv_cache::CacheSizes;
use crate::prefill::check_cache_heads;
use crate::{
    AttentionElement, AttentionOutput, AttentionOutputs, AttentionProblem, CacheScales, LeanOptions,
    LeanPagedInputs, PagedElement, kernels, lean_atten_paged, lean_paged_workspace,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, with_float};
use std::collections::BTreeSet;

const CACHES: [&str; 2] = ["k_cache", "v_cache"];

const PAGE: ScalarSpec =
    ScalarSpec { name: "page", default: Scalar::Count(16), choices: &[], summary: "slots of a page" };

/// Type; sequences, rows of queries, slots; heads; columns; type of the cache; lists, pages.
macro_rules! case {
    ($label:literal, $dtype:ident $n:literal $tq:literal $slots:literal, $hq:literal $hkv:literal, $dqk:literal $dv:literal,
     $cache:ident [$lists:literal, $pages:literal], [$($name:literal $shape:expr),*], [$($scalar:expr),*]) => {
        Case {
            label: $label,
            tensors: &[
                ("q", DType::$dtype, &[$hq, $tq, $dqk]),
                ("k_cache", DType::$cache, &[$hkv, $slots, $dqk]),
                ("v_cache", DType::$cache, &[$hkv, $slots, $dv]),
                ("block_table", DType::I32, &[$lists, $pages]),
                ("kv_lens", DType::I32, &[$n]),
                $(($name, DType::F32, &$shape),)*
            ],
            scalars: &[$($scalar),*],
        }
    };
}

const CAUSAL_KEYS: (&str, Scalar) = ("causal", Scalar::Bool(true));

const fn count(name: &'static str, n: usize) -> (&'static str, Scalar) {
    (name, Scalar::Count(n as u64))
}

pub(crate) const LEAN_ATTEN_PAGED: Operator = Operator {
    name: "lean_atten_paged",
    family: "hk-attention",
    summary: "lean_atten over keys in pages, with the heads first",
    args: &[
        ArgSpec::input("q", FLOAT, 3, "[Hq, B Sq, Dqk]"),
        ArgSpec { shape: "[Hkv, slots, Dqk]", rank: (3, 3), ..K_CACHE },
        ArgSpec { name: "v_cache", shape: "[Hkv, slots, Dv]", rank: (3, 3), ..K_CACHE },
        ArgSpec::input("block_table", INDICES_32, 2, "[Hkv, pages] or [1, pages]")
            .sampled(Sample::Integers { low: 0, high: 16 }),
        ArgSpec::input("kv_lens", INDICES_32, 1, "[B]")
            .sampled(Sample::LengthsOfAllIn { table: "block_table", page: 16 }),
        ArgSpec { shape: "[1] or [B, Hkv]", ..K_SCALE },
        ArgSpec { shape: "[1] or [B, Hkv]", ..V_SCALE },
        ArgSpec::output("out", Tolerance::Attention, FLOAT, 3, "[Hq, B Sq, Dv]"),
        ArgSpec::output("lse", LSE, F32, 2, "[Hq, B Sq]").optional(),
    ],
    scalars: &[SCALE, CAUSAL, PROGRAMS, PAGE],
    kernels: &joined::<4>(
        &[&kernels::LEAN_GENERAL, &kernels::LEAN_PAGED_BF16],
        &[&kernels::LEAN_PAGED_F16, &kernels::MERGE],
    ),
    cases: &[
        case!("Llama-3 8B, 3 tokens, some 1000 keys each", Bf16 3 3 256, 32 8, 128 128, Bf16 [1, 384], [], []),
        case!("Llama-3 8B, 2 x 4 tokens, fp8", Bf16 2 8 256, 32 8, 128 128, Fp8E4M3Fnuz [1, 48],
            ["k_scale" [1], "v_scale" [1]], [CAUSAL_KEYS]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Llama-3 8B, one token, 262144 keys", Bf16 1 1 262144, 32 8, 128 128, Bf16 [1, 16384], [], []),
        case!("Llama-3 8B, 64 tokens, 4096 keys each", Bf16 64 64 262144, 32 8, 128 128, Bf16 [1, 16384], [], []),
    ]),
    corners: &[
        case!("bf16, 64 columns, a list for each head", Bf16 3 6 256, 4 2, 64 64, Bf16 [2, 24], ["lse" [4, 6]],
            [CAUSAL_KEYS]),
        case!("bf16, 128 columns, 7 programs", Bf16 3 3 256, 8 2, 128 128, Bf16 [1, 40], ["lse" [8, 3]],
            [count("programs", 7), ("scale", Scalar::Float(0.1))]),
        case!("bf16, 256 columns, 3 programs", Bf16 2 2 256, 2 2, 256 192, Bf16 [2, 24], [], [count("programs", 3)]),
        case!("f16, 64 columns, 5 programs", F16 3 9 256, 2 1, 64 48, F16 [1, 24], ["lse" [2, 9]],
            [CAUSAL_KEYS, count("programs", 5)]),
        case!("f16, 128 columns, pages of 64 slots", F16 2 2 1024, 4 2, 128 128, F16 [1, 24], [],
            [count("page", 64), count("programs", 4)]),
        case!("f16, 256 columns", F16 2 2 256, 2 1, 256 256, F16 [1, 24], ["lse" [2, 2]], []),
        case!("bf16, pages of 5 slots: too few of some sequence", Bf16 4 4 80, 2 1, 33 17, Bf16 [1, 12], ["lse" [2, 4]],
            [count("page", 5), count("programs", 4)]),
        case!("bf16, pages that the cache does not have", Bf16 2 2 112, 2 1, 64 64, Bf16 [1, 16], ["lse" [2, 2]],
            [count("programs", 2)]),
        case!("bf16, more than 128 odd columns", Bf16 2 4 256, 2 1, 131 7, Bf16 [1, 16], [], [count("programs", 3)]),
        case!("bf16, int8 pages", Bf16 2 2 256, 4 2, 64 64, I8 [2, 24], ["k_scale" [2, 2], "v_scale" [1]],
            [count("programs", 3)]),
        case!("f16, fp8 pages of gfx950", F16 2 2 256, 4 2, 64 64, Fp8E4M3 [2, 24], ["k_scale" [1], "v_scale" [2, 2]],
            [count("programs", 3)]),
        case!("f16, fp8 pages of gfx942", F16 2 2 256, 4 2, 64 64, Fp8E4M3Fnuz [2, 24], ["k_scale" [1], "v_scale" [2, 2]],
            [count("programs", 3)]),
        case!("f16, more than 128 odd columns", F16 2 4 256, 2 1, 131 7, F16 [1, 16], [], [count("programs", 3)]),
        case!("f32, 5 programs", F32 3 66 256, 4 2, 64 128, F32 [1, 24], ["lse" [4, 66]],
            [CAUSAL_KEYS, count("programs", 5)]),
        case!("f32, 200 columns, one program", F32 2 6 256, 2 1, 200 200, F32 [1, 24], [], [count("programs", 1)]),
    ],
    outputs: outputs_of,
    run,
    reference,
    traffic,
};

/// Heads of queries and of keys, columns; rows, sequences, slots of a page, pages.
struct Sizes {
    heads: [usize; 4],
    rows: usize,
    sequences: usize,
    page: usize,
    pages: usize,
}

fn sizes<V: Described>(call: &Call<V>) -> Result<Sizes> {
    let op = call.operator().name;
    let ([heads, rows, dqk], [kv_heads, slots, k_columns]) = (shape(call, "q")?, shape(call, "k_cache")?);
    let [v_heads, v_slots, dv] = shape(call, "v_cache")?;
    if [v_heads, v_slots] != [kv_heads, slots] {
        let want = format!("[{kv_heads}, {slots}, {dv}] (heads and slots of k_cache)");
        return Err(Error::shape(op, "v_cache", [v_heads, v_slots, dv], want));
    }
    let page = call.size("page")?;
    if page == 0 {
        return Err(Error::argument(op, "page", page, "1 slot or more"));
    }
    let cache = CacheSizes { pages: slots / page, tokens: page, heads: kv_heads, dqk: k_columns, dv };
    check_cache_heads(op, &[rows, heads, dqk], CACHES, cache, [256, 256])?;
    let sequences = expect_batch(call, rows)?;
    Ok(Sizes { heads: [heads, kv_heads, dqk, dv], rows, sequences, page, pages: slots / page })
}

fn outputs_of(call: &CallSpec) -> Result<Named<TensorSpec>> {
    programs(call)?;
    let Sizes { heads: [heads, kv_heads, _, dv], rows, sequences, .. } = sizes(call)?;
    expect_cache_dtypes(call, CACHES, "q")?;
    expect_dtypes(call, "k_cache", &["v_cache"])?;
    let width = call.get("block_table")?.shape[1];
    expect_one_of(call, "block_table", &[&[1, width], &[kv_heads, width]])?;
    expect_shape(call, "kv_lens", &[sequences], "sequences")?;
    for name in ["k_scale", "v_scale"] {
        expect_one_of(call, name, &[&[1], &[sequences, kv_heads]])?;
    }
    specs(call, vec![heads, rows, dv], vec![heads, rows])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, outputs) = call.split();
    let cache = inputs.get("k_cache")?.dtype();
    with_float!("lean_atten_paged", "q", inputs.get("q")?.dtype(), T => with_cache!(cache, T, C => run_typed::<T, C>(stream, &inputs, outputs)))
}

fn run_typed<T, C>(stream: &Stream, inputs: &Inputs, mut outputs: Outputs) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T>,
    C: PagedElement<T>,
{
    let programs = programs(inputs)?;
    let options = LeanOptions { scale: scale(inputs)?, causal: inputs.bool("causal")?, programs };
    let Sizes { heads: [heads, kv_heads, _, dv], rows, sequences, page, .. } = sizes(inputs)?;
    let block_table = indices(inputs, "block_table")?;
    let keys = block_table.shape()[1] * page;
    let problem = AttentionProblem { sequences, heads, kv_heads, queries: rows, keys, dv };
    let len = lean_paged_workspace(stream.device().info(), &problem, programs);
    let workspace = if len == 0 { None } else { Some(outputs.workspace(stream, len)?) };
    let tensors = LeanPagedInputs::<T, C> {
        q: inputs.view("q")?,
        k_cache: inputs.view("k_cache")?,
        v_cache: inputs.view("v_cache")?,
        page,
        block_table,
        kv_lens: indices(inputs, "kv_lens")?,
        scales: CacheScales { k: inputs.optional_view("k_scale")?, v: inputs.optional_view("v_scale")? },
    };
    let out = AttentionOutputs { out: outputs.take::<T>("out")?, lse: outputs.take_optional("lse")? };
    lean_atten_paged(stream, tensors, out, workspace, &options)
}

/// The slots of the keys of each sequence for a key head, `Err` of keys without a page; `None` behind a sequence whose pages are not
/// all in the list.
fn slots_of(call: &HostCall, sizes: &Sizes, head: usize) -> Result<Vec<Option<Vec<Option<usize>>>>> {
    let table = call.get("block_table")?;
    let (width, list) = (table.shape()[1], if table.shape()[0] == 1 { 0 } else { head });
    let all = integers(table);
    let entries = &all[list * width..][..width];
    let mut next = Some(0);
    let of_sequence = |len: &i64| {
        let len = usize::try_from(*len).ok();
        let first = next;
        next =
            first.zip(len).map(|(first, len)| first + len.div_ceil(sizes.page)).filter(|end| *end <= width);
        let (first, len) = (first?, len.filter(|_| next.is_some())?);
        let slot = |j: usize| {
            let page = usize::try_from(entries[first + j / sizes.page]).ok()?;
            (page < sizes.pages).then_some(page * sizes.page + j % sizes.page)
        };
        Some((0..len).map(slot).collect())
    };
    Ok(integers(call.get("kv_lens")?).iter().map(of_sequence).collect())
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    outputs_of(&call.spec())?;
    let sizes = sizes(call)?;
    let Sizes { heads: [heads, kv_heads, dqk, dv], rows, sequences, .. } = sizes;
    let (group, sq) = (heads / kv_heads.max(1), rows.checked_div(sequences).unwrap_or(0));
    let (q, k, v) = (call.get("q")?.to_f64(), call.get("k_cache")?.to_f64(), call.get("v_cache")?.to_f64());
    let slots = call.get("k_cache")?.shape()[1];
    let scale = |name: &str, n: usize, head: usize| match call.optional(name) {
        None => 1.0,
        Some(t) if t.shape().len() == 2 => t.to_f64()[n * kv_heads + head],
        Some(t) => t.to_f64()[0],
    };
    let (mut out, mut lse) = ([vec![], vec![]], vec![]);
    for head in 0..kv_heads {
        // Each sequence has rows of its own, in the order of its keys.
        let mut host = HostRows { k: vec![], v: vec![] };
        let mut of_call = vec![];
        for (n, keys) in slots_of(call, &sizes, head)?.into_iter().enumerate() {
            let first = host.k.len() / dqk;
            let keys = keys.map(|keys| {
                for slot in &keys {
                    for (to, columns, values, missing, name) in
                        [(&mut host.k, dqk, &k, f64::NAN, "k_scale"), (&mut host.v, dv, &v, 0.0, "v_scale")]
                    {
                        match slot {
                            None => to.extend(vec![missing; columns]),
                            Some(slot) => {
                                let row = &values[(head * slots + slot) * columns..][..columns];
                                to.extend(row.iter().map(|x| x * scale(name, n, head)));
                            }
                        }
                    }
                }
                (first..first + keys.len()).collect()
            });
            of_call.push(Sequence { queries: n * sq..(n + 1) * sq, keys });
        }
        // Rows, then heads.
        let at = |row: usize, of: usize| ((head * group + of) * rows + row) * dqk;
        let of_head: Vec<f64> = (0..rows)
            .flat_map(|row| (0..group).flat_map(move |of| at(row, of)..at(row, of) + dqk))
            .map(|i| q[i])
            .collect();
        let (of_out, of_lse) = attend(call, [group, 1, dqk, dv], &of_head, &host, &of_call, [sq, 0])?;
        for of in 0..group {
            let head_of = |row: usize| row * group + of;
            for (out, of_out) in out.iter_mut().zip(&of_out) {
                out.extend((0..rows).flat_map(|row| &of_out[head_of(row) * dv..][..dv]));
            }
            lse.extend((0..rows).map(|row| of_lse[head_of(row)]));
        }
    }
    Ok(outputs(call, (vec![heads, rows, dv], out), (vec![heads, rows], lse)))
}

/// Of the caches the slots of keys.
fn traffic(call: &HostCall) -> Traffic {
    let mut traffic = Traffic::once(call);
    let Ok(sizes) = sizes(call) else { return traffic };
    for name in CACHES {
        let Some(cache) = call.optional(name) else { continue };
        let row = cache.bytes().len() / cache.shape()[..2].iter().product::<usize>().max(1);
        traffic.read -= cache.bytes().len() as u64;
        for head in 0..sizes.heads[1] {
            let Ok(slots) = slots_of(call, &sizes, head) else { continue };
            let seen: BTreeSet<_> = slots.into_iter().flatten().flatten().flatten().collect();
            traffic.read += (seen.len() * row) as u64;
        }
    }
    traffic
}
