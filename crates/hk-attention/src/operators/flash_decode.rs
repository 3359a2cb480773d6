//! Registry entry of `flash_attn_fwd_decode`.

use super::attention::{
    ALIBI, CAUSAL, F32, HostRows, LSE, SCALE, SINK, SOFTCAP, WINDOW_LEFT, WINDOW_RIGHT, float, mask, outputs,
    scale, transposed,
};
use super::common::{
    ACTIVATIONS, CACHED as STORED, COS, FP8, INDICES_32, NARROW, SIN, STYLE, TABLES, expect_dtype_of,
    expect_dtypes, expect_shape, integers, rope_of_pairs, rope_style, rounded, shape, stored,
    with_activation, with_narrow,
};
use super::decode::{CACHED, KEYS_PER_SPLIT, NSPLIT, splits, workspace_of};
use super::mha::joined;
use super::paged::{
    BLOCK_TABLE, K_SCALE, Key, PagedSequence, SEQ_LENS, V_SCALE, attend_rows, expect_heads, expect_one_of,
    paged_traffic,
};
use crate::kv_cache::CacheSizes;
use crate::{
    AppendRotary, AttentionElement, AttentionOutput, AttentionOutputs, AttentionProblem, CacheElement,
    CacheRows, CacheScales, CacheSeqlens, FlashAppend, FlashCache, FlashDecodeInputs, FlashDecodeOptions,
    HeadElement, KvLayout, PagedElement, flash_attn_fwd_decode, kernels,
};
use hk_core::plan::rope::reference::Tables;
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Result, Stream};

const OP: &str = "flash_attn_fwd_decode";
const CACHES: [&str; 2] = ["k_cache", "v_cache"];

const CACHE: ArgSpec = ArgSpec::updated("k_cache", STORED, NARROW, 4, "[rows or pages, S, Hkv, columns]");
const NEW: ArgSpec = ArgSpec::input("k_new", ACTIVATIONS, 4, "[B, Sn, Hkv, columns]").optional();

/// Type; sequences, queries and new tokens of each; heads, key heads, columns.
macro_rules! case {
    ($label:expr, $dtype:ident $n:literal $sq:literal $new:literal, $hq:literal $hkv:literal $d:literal,
     $cache:ident [$rows:literal, $s:literal], [$($name:literal $other:ident $shape:expr),*], [$($scalar:expr),*]) => {
        Case {
            label: $label,
            tensors: &[
                ("q", DType::$dtype, &[$n, $sq, $hq, $d]),
                ("k_cache", DType::$cache, &[$rows, $s, $hkv, $d]),
                ("v_cache", DType::$cache, &[$rows, $s, $hkv, $d]),
                ("cache_seqlens", DType::I32, &[$n]),
                ("k_new", DType::$dtype, &[$n, $new, $hkv, $d]),
                ("v_new", DType::$dtype, &[$n, $new, $hkv, $d]),
                $(($name, DType::$other, &$shape),)*
            ],
            scalars: &[$($scalar),*],
        }
    };
}

const CAUSALLY: (&str, Scalar) = ("causal", Scalar::Bool(true));
const ADVANCE: (&str, Scalar) = ("advance", Scalar::Bool(true));

pub(super) const FLASH_ATTN_FWD_DECODE: Operator = Operator {
    name: OP,
    family: "hk-attention",
    summary: "softmax attention of the last tokens of each sequence over a cache, which rotated new keys and values join before",
    args: &[
        ArgSpec::input("q", ACTIVATIONS, 4, "[B, Sq, Hq, Dqk]"),
        CACHE,
        ArgSpec { name: "v_cache", ..CACHE },
        ArgSpec::updated("cache_seqlens", Tolerance::Exact, INDICES_32, 1, "[B]").sampled(SEQ_LENS.sample),
        BLOCK_TABLE.optional(),
        ArgSpec::input("cache_batch_idx", INDICES_32, 1, "[B]")
            .sampled(Sample::Distinct { below: 6 })
            .optional(),
        NEW,
        ArgSpec { name: "v_new", ..NEW },
        ArgSpec { shape: "[positions, rotary / 2]", ..COS }.optional(),
        ArgSpec { shape: "[positions, rotary / 2]", ..SIN }.optional(),
        ALIBI,
        SINK,
        K_SCALE,
        V_SCALE,
        ArgSpec::output("out", Tolerance::Attention, ACTIVATIONS, 4, "[B, Sq, Hq, Dv]"),
        ArgSpec::output("lse", LSE, F32, 3, "[B, Hq, Sq]").optional(),
        ArgSpec::output("q_rotated", Tolerance::Elementwise, TABLES, 4, "shape of q, with cos").optional(),
        ArgSpec::output(
            "seqlens_out",
            Tolerance::Exact,
            INDICES_32,
            1,
            "[B], with k_new, unless they advance",
        )
        .optional(),
    ],
    scalars: &[
        SCALE,
        CAUSAL,
        WINDOW_LEFT,
        WINDOW_RIGHT,
        SOFTCAP,
        STYLE,
        ScalarSpec {
            name: "advance",
            default: Scalar::Bool(false),
            choices: &[],
            summary: "cache_seqlens grow by the new tokens; else seqlens_out gets the lengths",
        },
        NSPLIT,
        KEYS_PER_SPLIT,
    ],
    kernels: &joined::<21>(CACHED, &[&kernels::PREFILL_BF16, &kernels::PREFILL_F16, &kernels::KV_CACHE_ROWS]),
    cases: &[
        case!("Llama-3 8B, 3 sequences, a token each, pages of 16", Bf16 3 1 1, 32 8 128, Bf16 [96, 16],
            ["block_table" I32 [3, 24], "cos" Bf16 [400, 64], "sin" Bf16 [400, 64], "q_rotated" Bf16 [3, 1, 32, 128]],
            [CAUSALLY, ADVANCE]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Llama-3 8B, 64 tokens, 8192 keys, pages of 16", Bf16 64 1 1, 32 8 128, Bf16 [32768, 16],
            ["block_table" I32 [64, 512], "cos" Bf16 [8200, 64], "sin" Bf16 [8200, 64], "q_rotated" Bf16 [64, 1, 32, 128],
             "seqlens_out" I32 [64]], [CAUSALLY]),
        case!("Llama-3 8B, 16 x 4 speculative tokens, 8192 keys, pages of 16", Bf16 16 4 4, 32 8 128, Bf16 [8192, 16],
            ["block_table" I32 [16, 512], "cos" Bf16 [8200, 64], "sin" Bf16 [8200, 64], "q_rotated" Bf16 [16, 4, 32, 128],
             "seqlens_out" I32 [16]], [CAUSALLY]),
    ]),
    corners: &[
        case!("bf16, rows in order, interleaved, advancing", Bf16 3 2 2, 4 2 64, Bf16 [4, 40],
            ["cos" Bf16 [30, 16], "sin" Bf16 [30, 16], "q_rotated" Bf16 [3, 2, 4, 64], "lse" F32 [3, 4, 2]],
            [CAUSALLY, ADVANCE, ("style", Scalar::Choice("interleaved"))]),
        case!("f16, indexed rows, every option", F16 3 3 1, 4 1 40, F16 [6, 48],
            ["cache_batch_idx" I32 [3], "alibi" F32 [3, 4], "sink" F32 [4], "lse" F32 [3, 4, 3], "seqlens_out" I32 [3]],
            [("window_left", Scalar::Int(6)), ("window_right", Scalar::Int(1)), ("softcap", Scalar::Float(15.0)),
             ("scale", Scalar::Float(0.3))]),
        case!("bf16, pages, splits", Bf16 3 1 1, 6 2 128, Bf16 [48, 16],
            ["block_table" I32 [3, 13], "lse" F32 [3, 6, 1], "seqlens_out" I32 [3]],
            [("keys_per_split", Scalar::Count(64)), CAUSALLY]),
        case!("f16, pages, too short for all", F16 3 3 1, 6 2 64, F16 [9, 16],
            ["block_table" I32 [3, 4], "lse" F32 [3, 6, 3], "seqlens_out" I32 [3]],
            [("nsplit", Scalar::Count(3)), ("window_right", Scalar::Int(0))]),
        case!("bf16, a prompt over rows in order", Bf16 2 40 20, 4 2 64, Bf16 [2, 48],
            ["lse" F32 [2, 4, 40], "seqlens_out" I32 [2]], [CAUSALLY]),
        case!("bf16, scalar, no tables for all positions", Bf16 3 2 2, 2 1 21, Bf16 [3, 30],
            ["cos" Bf16 [14, 5], "sin" Bf16 [14, 5], "q_rotated" Bf16 [3, 2, 2, 21], "lse" F32 [3, 2, 2], "seqlens_out" I32 [3]],
            [CAUSALLY]),
        case!("f16, scalar, indexed rows", F16 2 2 3, 2 1 21, F16 [6, 30],
            ["cache_batch_idx" I32 [2], "cos" F16 [64, 5], "sin" F16 [64, 5], "q_rotated" F16 [2, 2, 2, 21], "seqlens_out" I32 [2]],
            []),
        case!("bf16, fp8 pages of gfx950", Bf16 3 1 1, 4 2 64, Fp8E4M3 [16, 64],
            ["block_table" I32 [3, 5], "k_scale" F32 [1], "v_scale" F32 [1], "cos" Bf16 [90, 32], "sin" Bf16 [90, 32],
             "q_rotated" Bf16 [3, 1, 4, 64], "seqlens_out" I32 [3]], [CAUSALLY]),
        case!("f16, fp8 rows of gfx942", F16 3 1 1, 4 2 64, Fp8E4M3Fnuz [4, 32],
            ["k_scale" F32 [1], "v_scale" F32 [1], "seqlens_out" I32 [3]], []),
    ],
    outputs: specs,
    run,
    reference,
    traffic,
};

/// Sizes of a call: sequences, queries and new keys of each; heads and columns; rows or pages of the cache.
struct Sizes {
    n: usize,
    sq: usize,
    new: usize,
    heads: usize,
    cache: CacheSizes,
}

fn sizes<V: Described>(call: &Call<V>) -> Result<Sizes> {
    let [n, sq, heads, dqk] = shape(call, "q")?;
    let [k, v] = [call.get("k_cache")?, call.get("v_cache")?];
    let cache = KvLayout::Nhd.sizes(OP, k.dtype(), ("k_cache", k.shape()), ("v_cache", v.shape()))?;
    expect_dtype_of(call, "k_cache", "q", FP8)?;
    expect_dtypes(call, "k_cache", &["v_cache"])?;
    expect_heads(call, CACHES, cache, 256)?;
    expect_shape(call, "cache_seqlens", &[n], "sequences of q")?;
    expect_shape(call, "cache_batch_idx", &[n], "sequences of q")?;
    let table = call.optional("block_table").map(V::shape);
    if let Some(&[_, width]) = table {
        expect_shape(call, "block_table", &[n, width], "sequences of q")?;
        if call.optional("cache_batch_idx").is_some() {
            return Err(Error::argument(OP, "cache_batch_idx", "given", "nothing beside block_table"));
        }
    } else if call.optional("cache_batch_idx").is_none() && cache.pages < n {
        return Err(Error::shape(OP, "k_cache", k.shape(), format!("at least {n} rows (sequences of q)")));
    }
    let new = call.optional("k_new").map_or(0, |k| k.shape()[1]);
    let given = |name| call.optional(name).is_some() || call.wants(name);
    let beside = |missing: &'static str, of: &str| {
        Err(Error::argument(OP, missing, "none", format!("one beside {of}")))
    };
    if given("k_new") || given("v_new") {
        if let Some(name) = ["k_new", "v_new"].into_iter().find(|name| !given(name)) {
            return beside(name, "the other");
        }
        expect_dtypes(call, "q", &["k_new", "v_new"])?;
        expect_shape(call, "k_new", &[n, new, cache.heads, dqk], "sequences, heads and columns")?;
        expect_shape(call, "v_new", &[n, new, cache.heads, cache.dv], "sequences, heads and columns")?;
        if call.bool("advance")? == given("seqlens_out") {
            return beside("seqlens_out", "k_new, or advance");
        }
    }
    let rotary = ["cos", "sin", "q_rotated"];
    if let Some(first) = rotary.into_iter().find(|name| given(name)) {
        if let Some(name) = rotary.into_iter().chain(["k_new"]).find(|name| !given(name)) {
            return beside(name, first);
        }
        expect_dtypes(call, "q", &["cos", "sin"])?;
        let cos = call.get("cos")?.shape();
        expect_shape(call, "sin", cos, "shape of cos")?;
        let rope = rope_of_pairs(rope_style(call)?, 2 * cos[1]);
        rope.check(OP, "q", call.get("q")?.shape(), dqk)?;
    }
    expect_one_of(call, "alibi", &[&[heads], &[n, heads]])?;
    expect_one_of(call, "sink", &[&[heads]])?;
    for name in ["k_scale", "v_scale"] {
        expect_one_of(call, name, &[&[1], &[n, cache.heads]])?;
    }
    mask(call)?;
    splits(call)?;
    Ok(Sizes { n, sq, new, heads, cache })
}

fn specs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let Sizes { n, sq, heads, cache, .. } = sizes(call)?;
    let mut specs = vec![("out", TensorSpec::new(call.get("q")?.dtype, [n, sq, heads, cache.dv]))];
    if call.wants("lse") {
        specs.push(("lse", TensorSpec::new(DType::F32, [n, heads, sq])));
    }
    if call.wants("q_rotated") {
        specs.push(("q_rotated", call.get("q")?.clone()));
    }
    if call.wants("seqlens_out") {
        specs.push(("seqlens_out", TensorSpec::new(DType::I32, [n])));
    }
    Ok(specs)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let cache = call.outputs().find(|(name, _)| *name == "k_cache").map(|(_, t)| t.dtype());
    let (inputs, _) = call.split();
    let dtype = inputs.get("q")?.dtype();
    with_activation!(OP, "q", dtype, T => {
        with_narrow!(cache.unwrap_or(dtype), T, C => run_typed::<T, C>(stream, call))
    })
}

fn run_typed<T, C>(stream: &Stream, call: &mut DeviceCall) -> Result<()>
where
    T: AttentionElement + AttentionOutput<T> + HeadElement,
    C: PagedElement<T> + CacheElement<T>,
{
    let (inputs, mut outputs) = call.split();
    let [n, sq, heads, _] = shape(&inputs, "q")?;
    let (k_cache, v_cache) = (outputs.take::<C>("k_cache")?, outputs.take::<C>("v_cache")?);
    let &[_, tokens, kv_heads, dv] = v_cache.shape() else { return Ok(()) };
    let table = inputs.optional_view("block_table")?;
    let rows = match (table, inputs.optional_view("cache_batch_idx")?) {
        (Some(table), _) => CacheRows::Paged(table),
        (None, Some(index)) => CacheRows::Indexed(index),
        (None, None) => CacheRows::InOrder,
    };
    let keys = table.map_or(1, |table| table.shape()[1]).saturating_mul(tokens);
    let options = FlashDecodeOptions {
        scale: scale(&inputs)?,
        mask: mask(&inputs)?,
        softcap: float(&inputs, "softcap")?,
        alibi: inputs.optional_view("alibi")?,
        sink: inputs.optional_view("sink")?,
        scales: CacheScales { k: inputs.optional_view("k_scale")?, v: inputs.optional_view("v_scale")? },
        splits: splits(&inputs)?,
    };
    let problem = AttentionProblem { sequences: n, heads, kv_heads, queries: n.saturating_mul(sq), keys, dv };
    let space = workspace_of(stream, &mut outputs, &problem, options.splits)?;
    let lens = outputs.take("cache_seqlens")?;
    let advances = inputs.bool("advance")? && inputs.optional("k_new").is_some();
    let seqlens = if advances {
        CacheSeqlens::Advanced(lens)
    } else {
        let seqlens_out = outputs.take_optional("seqlens_out")?;
        CacheSeqlens::Kept { cache_seqlens: lens.alias(), seqlens_out }
    };
    let append = match inputs.optional_view("k_new")? {
        None => None,
        Some(k_new) => {
            let rotary = match inputs.optional_view("cos")? {
                None => None,
                Some(cos) => Some(AppendRotary {
                    cos,
                    sin: inputs.view("sin")?,
                    style: rope_style(&inputs)?,
                    q_rotated: outputs.take("q_rotated")?,
                }),
            };
            Some(FlashAppend { k_new, v_new: inputs.view("v_new")?, rotary })
        }
    };
    let out = AttentionOutputs::<T> { out: outputs.take("out")?, lse: outputs.take_optional("lse")? };
    let cache = FlashCache { k_cache, v_cache, rows };
    let inputs = FlashDecodeInputs::<T, C> { q: inputs.view("q")?, cache, seqlens, append };
    flash_attn_fwd_decode(stream, inputs, out, space, &options)
}

/// A call on the host.
struct Host {
    sizes: Sizes,
    lens: Vec<i64>,
    /// Pages of each sequence, of those that it has.
    pages: Vec<Vec<i64>>,
}

impl Host {
    fn of(call: &HostCall) -> Result<Self> {
        let sizes = sizes(call)?;
        let lens = integers(call.get("cache_seqlens")?);
        let pages = match (call.optional("block_table"), call.optional("cache_batch_idx")) {
            (Some(table), _) => {
                let width = table.shape()[1];
                let all = integers(table);
                (0..sizes.n).map(|n| all[n * width..][..width].to_vec()).collect()
            }
            (None, Some(index)) => integers(index).into_iter().map(|row| vec![row]).collect(),
            (None, None) => (0..sizes.n as i64).map(|row| vec![row]).collect(),
        };
        Ok(Self { sizes, lens, pages })
    }

    /// Where a token is, if the sequence has room for it.
    fn slot(&self, n: usize, token: i64) -> Option<Key> {
        let CacheSizes { pages, tokens, .. } = self.sizes.cache;
        let token = usize::try_from(token).ok()?;
        let page = *self.pages[n].get(token / tokens)?;
        let page = usize::try_from(page).ok().filter(|page| *page < pages);
        Some(page.map_or(Key::Missing, |page| Key::Cached(page * tokens + token % tokens)))
    }

    /// The length with the new keys.
    fn total(&self, n: usize) -> i64 {
        let len = self.lens[n];
        if len < 0 { len } else { (len + self.sizes.new as i64).min(i32::MAX.into()) }
    }

    fn sequences(&self) -> Vec<PagedSequence> {
        let sq = self.sizes.sq;
        let sequence = |n: usize| {
            let total = self.total(n);
            let room = (self.pages[n].len() * self.sizes.cache.tokens) as i64;
            let keys =
                (0..=room).contains(&total).then(|| (0..total).filter_map(|t| self.slot(n, t)).collect());
            PagedSequence { n, queries: n * sq..(n + 1) * sq, keys }
        };
        (0..self.sizes.n).map(sequence).collect()
    }
}

/// What new rows are multiplied by: one factor, or those of sequences and heads.
fn reciprocals(call: &HostCall, name: &str) -> Vec<f64> {
    let one = |x: f64| f64::from(1.0 / x as f32);
    call.optional(name).map_or_else(|| vec![1.0], |scale| scale.to_f64().into_iter().map(one).collect())
}

fn reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let host = Host::of(call)?;
    let Sizes { n, sq, new, heads, cache } = host.sizes;
    let CacheSizes { heads: kv_heads, dqk, dv, .. } = cache;
    let (q_type, cache_type) = (call.get("q")?.dtype(), call.get("k_cache")?.dtype());
    let tables = match call.optional("cos") {
        None => None,
        Some(cos) => {
            let rope = rope_of_pairs(rope_style(call)?, 2 * cos.shape()[1]);
            Some((Tables { cos: cos.to_f64(), sin: call.get("sin")?.to_f64() }, cos.shape()[0], rope))
        }
    };
    // Rows [B, rows, heads, columns], rotated.
    let rotated = |values: Vec<f64>, rows: usize, heads: usize| -> Vec<f64> {
        let Some((tables, positions, rope)) = &tables else { return values };
        let head = |(i, head): (usize, &[f64])| {
            let (n, row) = (i / heads / rows, i / heads % rows);
            let at = usize::try_from(host.lens[n] + row as i64).ok().filter(|at| at < positions);
            tables.rotate(head, at, rope)
        };
        values.chunks(dqk).enumerate().flat_map(head).collect()
    };
    let q_rotated = rotated(call.get("q")?.to_f64(), sq, heads);
    let q: Vec<f64> = match tables {
        None => q_rotated.clone(),
        Some(_) => q_rotated.iter().map(|&x| rounded(q_type, x)).collect(),
    };
    let mut rows = HostRows { k: call.get("k_cache")?.to_f64(), v: call.get("v_cache")?.to_f64() };
    // As they are stored, before they are rounded.
    let mut exact = HostRows { k: rows.k.clone(), v: rows.v.clone() };
    if new > 0 {
        let k_new = rotated(call.get("k_new")?.to_f64(), new, kv_heads);
        let v_new = call.get("v_new")?.to_f64();
        for (scale, values, columns, of, of_exact) in [
            (reciprocals(call, "k_scale"), k_new, dqk, &mut rows.k, &mut exact.k),
            (reciprocals(call, "v_scale"), v_new, dv, &mut rows.v, &mut exact.v),
        ] {
            let width = kv_heads * columns;
            for (i, row) in values.chunks(width.max(1)).enumerate().take(n * new) {
                let Some(Key::Cached(slot)) = host
                    .slot(i / new, host.lens[i / new] + (i % new) as i64)
                    .filter(|_| host.lens[i / new] >= 0)
                else {
                    continue;
                };
                for (col, &x) in row.iter().enumerate() {
                    let head = i / new * kv_heads + col / columns;
                    let exact = stored(cache_type, x * scale[if scale.len() == 1 { 0 } else { head }]);
                    of_exact[slot * width + col] = exact;
                    of[slot * width + col] =
                        if ACTIVATIONS.contains(&cache_type) { rounded(cache_type, exact) } else { exact };
                }
            }
        }
    }
    let (out, lse) =
        attend_rows(call, [heads, kv_heads, dqk, dv], &q, host.sequences(), &rows, &rows, [0, 0])?;
    let lse = transposed(&lse, [n, sq, heads]);
    let mut outputs = outputs(call, (vec![n, sq, heads, dv], out), (vec![n, heads, sq], lse));
    let tensor = |name: &'static str, shape: &[usize], values| (name, HostTensorF64::new(shape, values));
    if call.wants("q_rotated") {
        outputs.push(tensor("q_rotated", call.get("q")?.shape(), q_rotated));
    }
    let totals: Vec<f64> = (0..n).map(|n| host.total(n) as f64).collect();
    if call.wants("seqlens_out") {
        outputs.push(tensor("seqlens_out", &[n], totals.clone()));
    }
    outputs.push(tensor("k_cache", call.get("k_cache")?.shape(), exact.k));
    outputs.push(tensor("v_cache", call.get("v_cache")?.shape(), exact.v));
    let lens = if call.bool("advance")? { totals } else { call.get("cache_seqlens")?.to_f64() };
    outputs.push(tensor("cache_seqlens", &[n], lens));
    Ok(outputs)
}

/// Caches are read where queries see them, new rows of them written.
fn traffic(call: &HostCall) -> Traffic {
    let Ok(host) = Host::of(call) else { return Traffic::once(call) };
    let tables = call.optional("block_table").map_or(&[][..], |_| &["block_table"][..]);
    let mut traffic = paged_traffic(call, &host.sequences(), [&CACHES, &[], tables], host.sizes.cache);
    let row = |names: [&'static str; 2]| -> u64 {
        names.iter().filter_map(|name| call.optional(name)).map(|t| t.bytes().len() as u64).sum()
    };
    // Stored in the cache's type.
    let bytes = |name: &'static str| call.get(name).map_or(1, |t| t.dtype().size_bytes() as u64);
    traffic.written += row(["k_new", "v_new"]) / bytes("q") * bytes("k_cache");
    traffic
}
