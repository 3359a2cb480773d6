//! `flash_attn_fwd_decode` on the emulated GPUs (and real ones where there are some): against its f64 reference, and against itself with the
//! cache elsewhere, filled before, and token by token.

use crate::common::attention::MASKS;
use crate::paged::{Cached, Case, Given, ints, maybe, with_options};
use hk_attention::{
    AppendRotary, AttentionOutputs, CacheRows, CacheScales, CacheSeqlens, DecodeWorkspace, FlashAppend,
    FlashCache, FlashDecodeInputs, FlashDecodeOptions, Mask, Qkv, Splits, flash_attn_fwd_decode, mha,
};
use hk_core::plan::rope::RopeStyle;
use hk_core::registry::{Described, HostTensor, Scalar};
use hk_core::{Arch, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16, f16};
use hk_testkit::compare::compare;
use hk_testkit::{
    Fill, Refusals, Tensors, config, devices, kind, proptest::prelude::*, proptest::sample::select,
    sanitized_devices,
};

const OP: &str = "flash_attn_fwd_decode";

/// Where the cache is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rows {
    InOrder,
    Indexed,
    Paged,
}

/// A call with `new` keys of each of a case's sequences, which come last, and `sq` queries. The keys before are in the cache, slots of
/// others hold what spoils results.
fn flash<T: Cached, C: Cached>(case: &Case, [sq, new]: [usize; 2], rows: Rows) -> Given {
    let n = case.lens.len();
    let (heads, [dqk, dv]) = (case.kv_heads * case.group, case.columns);
    let lens: Vec<[usize; 2]> = case.lens.iter().map(|[_, keys]| [new, *keys]).collect();
    let case = Case { lens, ..case.clone() };
    let before = |lens: &[usize; 2]| lens[1] - new;
    let of_queries = Case { lens: case.lens.iter().map(|lens| [sq, lens[1]]).collect(), ..case.clone() };
    let shaped = |tensor: HostTensor, shape: [usize; 4]| {
        HostTensor::new(shape, &tensor.elements::<T>().unwrap()).unwrap()
    };
    let mut tensors = vec![
        ("q", shaped(of_queries.q::<T>(), [n, sq, heads, dqk])),
        ("k_new", shaped(case.packed::<T>(false, true), [n, new, case.kv_heads, dqk])),
        ("v_new", shaped(case.packed::<T>(true, true), [n, new, case.kv_heads, dv])),
        ("cache_seqlens", ints(&case.lens.iter().map(|lens| before(lens) as i32).collect::<Vec<_>>())),
    ];
    if rows == Rows::Paged {
        let [k, v, table] = case.cache::<C>(before);
        tensors.extend([("k_cache", k), ("v_cache", v), ("block_table", table)]);
    } else {
        let most = case.lens.iter().map(|lens| lens[1]).max().unwrap_or(1).max(1) + 3;
        let order = case.permutation(n + 1);
        let place = |n: usize| if rows == Rows::Indexed { order[n] } else { n };
        for (name, values) in [("k_cache", false), ("v_cache", true)] {
            let row = case.kv_heads * case.columns[usize::from(values)];
            let mut cache = vec![C::UNUSED; (n + 1) * most * row];
            for (i, lens) in case.lens.iter().enumerate() {
                let filled = &case.rows::<C>(i, values)[..before(lens) * row];
                cache[place(i) * most * row..][..filled.len()].copy_from_slice(filled);
            }
            let shape = [n + 1, most, case.kv_heads, case.columns[usize::from(values)]];
            tensors.push((name, HostTensor::new(shape, &cache).unwrap()));
        }
        if rows == Rows::Indexed {
            let index: Vec<i32> = (0..n).map(|i| order[i] as i32).collect();
            tensors.push(("cache_batch_idx", ints(&index)));
        }
    }
    Given { op: OP, tensors, scalars: vec![], wanted: vec!["lse", "seqlens_out"] }
}

/// With a rotation of `width` pairs by tables of so many positions.
fn rotated<T: Cached>(mut given: Given, [positions, width]: [usize; 2], interleaved: bool) -> Given {
    for (name, seed) in [("cos", 5), ("sin", 6)] {
        let values: Vec<f32> = Fill::Normal.elements(positions * width, seed);
        let values: Vec<T> = values.into_iter().map(|x| T::of(x.clamp(-1.0, 1.0))).collect();
        given = given.with(name, HostTensor::new([positions, width], &values).unwrap());
    }
    given.wanted.push("q_rotated");
    given.scalar("style", Scalar::Choice(if interleaved { "interleaved" } else { "neox" }))
}

/// Without new keys.
fn kept(mut given: Given) -> Given {
    given.tensors.retain(|(name, _)| !["k_new", "v_new"].contains(name));
    given.wanted.retain(|name| *name != "seqlens_out");
    given
}

fn advancing(mut given: Given) -> Given {
    given.wanted.retain(|name| *name != "seqlens_out");
    given.scalar("advance", Scalar::Bool(true))
}

fn masked(given: Given, (causal, left, right): (bool, i64, i64)) -> Given {
    let given = given.scalar("causal", Scalar::Bool(causal));
    given.scalar("window_left", Scalar::Int(left)).scalar("window_right", Scalar::Int(right))
}

#[derive(Debug, Clone)]
struct Drawn {
    case: Case,
    sizes: [usize; 2],
    rows: Rows,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let columns =
        select(vec![[64, 64], [128, 128], [128, 128], [256, 256], [40, 24], [80, 128], [192, 128], [17, 21]]);
    let heads = (1usize..3, select(vec![1usize, 2, 4, 8, 20]));
    let sizes = (select(vec![1usize, 1, 2, 5, 40]), select(vec![0usize, 1, 1, 3, 20]));
    let keys = prop::collection::vec(select(vec![0usize, 1, 15, 16, 17, 33, 64, 128, 129, 300]), 1..4);
    let rows = select(vec![Rows::InOrder, Rows::Indexed, Rows::Paged, Rows::Paged]);
    let page = select(vec![1usize, 3, 16, 16, 48, 256]);
    (columns, heads, sizes, keys, rows, page, any::<u32>()).prop_map(
        |(columns, (kv_heads, group), (sq, new), keys, rows, page, seed)| {
            let lens: Vec<_> = keys.into_iter().map(|n| [new, n + new]).collect();
            let mut case = Case::new(&lens, [kv_heads, group], columns);
            (case.page, case.seed, case.order) = (page, seed.into(), (seed >> 8).into());
            Drawn { case, sizes: [sq, new], rows }
        },
    )
}

/// Options, masks, splits and rotations by bits.
fn with_all<T: Cached>(Drawn { case, .. }: &Drawn, given: Given, bits: u32, mask: usize) -> Given {
    // Factors by head beside no new keys only.
    let mut given = masked(with_options(case, given, bits & !0x1c0_00fc), MASKS[mask]);
    match bits >> 22 & 3 {
        1 => given = given.scalar("nsplit", Scalar::Count(3)),
        2 => given = given.scalar("keys_per_split", Scalar::Count(128)),
        _ => {}
    }
    let whole = case.columns[0] / 2;
    match bits >> 24 & 3 {
        1 => given = rotated::<T>(given, [360, whole], maybe(bits, 26)),
        2 => {
            given =
                rotated::<T>(given, [360, whole / 2 / 8 * 8 + 8 * usize::from(whole >= 16)], maybe(bits, 26))
        }
        _ => {}
    }
    if given.wanted.contains(&"q_rotated") && given.get("cos").shape()[1] == 0 {
        given = rotated::<T>(given, [360, 1], false);
        given.wanted.pop();
    }
    if maybe(bits, 27) { advancing(given) } else { given }
}

proptest! {
    #![proptest_config(config())]

    /// Rows and pages, options alone and together, rotations, splits; slots that no sequence has spoil nothing.
    #[test]
    fn matches_the_reference(drawn in drawn(), bits in any::<u32>(), mask in 0usize..7) {
        let Drawn { case, sizes, rows } = &drawn;
        if maybe(bits, 28) {
            with_all::<f16>(&drawn, flash::<f16, f16>(case, *sizes, *rows), bits, mask).check();
        } else {
            with_all::<bf16>(&drawn, flash::<bf16, bf16>(case, *sizes, *rows), bits, mask).check();
        }
    }

    /// The fp8 of each device, new keys divided by a scale.
    #[test]
    fn fp8_matches_the_reference(drawn in drawn(), bits in any::<u32>(), mask in 0usize..7) {
        let Drawn { case, sizes, rows } = &drawn;
        for gpu in devices() {
            let of = match (maybe(bits, 28), gpu.arch() == Arch::Gfx942) {
                (true, true) => flash::<f16, Fp8E4M3Fnuz>,
                (true, false) => flash::<f16, Fp8E4M3>,
                (false, true) => flash::<bf16, Fp8E4M3Fnuz>,
                (false, false) => flash::<bf16, Fp8E4M3>,
            };
            let scale = |x: f32| HostTensor::new([1], &[x]).unwrap();
            let given = of(case, *sizes, *rows);
            let given = if maybe(bits, 27) {
                let of_heads = [case.lens.len(), case.kv_heads];
                given.floats("k_scale", &of_heads, 3).floats("v_scale", &of_heads, 4)
            } else {
                given.with("k_scale", scale(0.7)).with("v_scale", scale(1.3))
            };
            with_all::<bf16>(&drawn, given, bits & !0x300_0000, mask).check_on(&gpu);
        }
    }

    /// New keys are as those that were in the cache, which is the same wherever it is.
    #[test]
    fn appended_keys_are_as_cached_ones(drawn in drawn(), mask in 0usize..7) {
        let Drawn { case, sizes: [sq, new], .. } = drawn;
        // Of prompts rows have other kernels than pages.
        let sq = if sq * case.group <= 64 { sq } else { 1 };
        let case = Case { page: 48, columns: case.columns.map(|n: usize| n.next_multiple_of(8)), ..case };
        let after = |rows| kept(flash::<bf16, bf16>(&case, [sq, 0], rows));
        let want = outs(&masked(after(Rows::Paged), MASKS[mask]));
        for rows in [Rows::InOrder, Rows::Indexed, Rows::Paged] {
            prop_assert_eq!(&outs(&masked(after(rows), MASKS[mask])), &want, "{:?}", rows);
            let appended = masked(flash::<bf16, bf16>(&case, [sq, new], rows), MASKS[mask]);
            prop_assert_eq!(&outs(&appended), &want, "{:?} {}", rows, new);
        }
    }
}

/// `out` on each device.
fn outs(given: &Given) -> Vec<HostTensor> {
    let call = given.call();
    let run = |stream: &Stream| {
        let outputs = call.operator().execute(stream, &call).unwrap();
        outputs.into_iter().find(|(name, _)| *name == "out").unwrap().1
    };
    devices().iter().map(|gpu| run(gpu.stream())).collect()
}

/// Factors of the cache by sequence and head, beside no new keys.
#[test]
fn factors_by_head() {
    let case = Case::new(&[[0, 60], [0, 130]], [2, 4], [64, 64]);
    for rows in [Rows::InOrder, Rows::Indexed, Rows::Paged] {
        let given = kept(flash::<bf16, bf16>(&case, [2, 0], rows));
        given.floats("k_scale", &[2, 2], 3).floats("v_scale", &[2, 2], 4).check();
    }
}

/// Sequences whose outputs are NaN, with every sanitizer on, after a comparison with the reference.
fn poisoned(given: &Given) -> Vec<usize> {
    let call = given.call();
    let want = (call.operator().reference)(&call).unwrap();
    let mut all = vec![];
    for gpu in sanitized_devices() {
        for (name, got) in call.operator().execute(gpu.stream(), &call).unwrap() {
            let tolerance = call.operator().arg(name).unwrap().role.output().unwrap();
            let want = &want.iter().find(|(other, _)| *other == name).unwrap().1;
            compare(name, got.dtype(), &got.to_f64(), want, tolerance).assert();
            if name == "out" {
                let (values, n) = (got.to_f64(), got.shape()[0]);
                let nan =
                    |i: &usize| values[i * values.len() / n..][..values.len() / n].iter().all(|x| x.is_nan());
                all.push((0..n).filter(nan).collect::<Vec<_>>());
            }
        }
    }
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    all.swap_remove(0)
}

/// Lengths, pages and rows that are not there.
#[test]
fn what_is_not_there_is_nan() {
    let case = Case::new(&[[2, 42], [2, 30], [2, 20]], [2, 2], [64, 64]);
    for rows in [Rows::InOrder, Rows::Indexed, Rows::Paged] {
        let given = || flash::<bf16, bf16>(&case, [2, 2], rows);
        assert_eq!(poisoned(&given()), [0; 0]);
        let room = if rows == Rows::Paged { given().get("block_table").shape()[1] * 16 } else { 45 };
        for len in [-1, i32::MIN, room as i32 - 1, room as i32, i32::MAX - 1, i32::MAX] {
            let given = given().changed("cache_seqlens", |lens| lens[1] = len);
            assert_eq!(poisoned(&given), [1], "{len} of {rows:?}");
            assert_eq!(poisoned(&advancing(given)), [1], "{len} of {rows:?}");
        }
    }
    for entry in [-1, i32::MIN, 9, i32::MAX] {
        let given = || flash::<bf16, bf16>(&case, [2, 2], Rows::Indexed);
        assert_eq!(poisoned(&given().changed("cache_batch_idx", |index| index[2] = entry)), [2]);
        let given = || flash::<bf16, bf16>(&case, [2, 2], Rows::Paged);
        let width = given().get("block_table").shape()[1];
        // The page of the new keys, and one before it.
        for page in [1, 0] {
            let entry = if entry == 9 { 1 << 20 } else { entry };
            assert_eq!(poisoned(&given().changed("block_table", |table| table[width + page] = entry)), [1]);
        }
        assert_eq!(poisoned(&given().changed("block_table", |table| table[width + 2] = entry)), [0; 0]);
    }
    // Tables of fewer positions than a sequence has.
    let short = rotated::<bf16>(flash::<bf16, bf16>(&case, [2, 2], Rows::Paged), [40, 32], false);
    assert_eq!(poisoned(&short), [0]);
}

/// Token by token, a cache that grows has the rows of a causal prompt.
#[test]
fn decoding_is_as_a_prompt() {
    let (tokens, heads, kv_heads, d) = (37, 8, 2, 128);
    let elements = |n: usize, seed| -> Vec<bf16> { Fill::Normal.elements(n, seed) };
    let q = elements(2 * tokens * heads * d, 1);
    let [k, v] = [2, 3].map(|seed| elements(2 * tokens * kv_heads * d, seed));
    for gpu in &devices() {
        let stream = gpu.stream();
        let of = |values: &[bf16], heads| gpu.upload(values, [2, tokens, heads, d]);
        let (q_all, k_all, v_all) = (of(&q, heads), of(&k, kv_heads), of(&v, kv_heads));
        let mut want = gpu.poisoned::<bf16>([2, tokens, heads, d]);
        let qkv = Qkv { q: q_all.view(), k: k_all.view(), v: v_all.view() };
        let outputs = AttentionOutputs { out: want.view_mut(), lse: None };
        let options = hk_attention::AttentionOptions { mask: Mask::CAUSAL, ..Default::default() };
        mha(stream, qkv, outputs, None, &options).unwrap();
        let want = gpu.download(&want).data;

        let mut caches = [(); 2].map(|()| gpu.poisoned::<bf16>([2, 48, kv_heads, d]));
        let mut lens = gpu.upload(&[0i32; 2], [2]);
        let mut out = gpu.poisoned::<bf16>([2, 1, heads, d]);
        let rows = |values: &[bf16], heads: usize, at: usize| {
            let row = heads * d;
            let all: Vec<_> =
                (0..2).flat_map(|n| values[(n * tokens + at) * row..][..row].to_vec()).collect();
            gpu.upload(&all, [2, 1, heads, d])
        };
        for at in 0..tokens {
            let (q, k, v) = (rows(&q, heads, at), rows(&k, kv_heads, at), rows(&v, kv_heads, at));
            let [k_cache, v_cache] = &mut caches;
            let inputs = FlashDecodeInputs::<bf16, bf16> {
                q: q.view(),
                cache: FlashCache {
                    k_cache: k_cache.view_mut(),
                    v_cache: v_cache.view_mut(),
                    rows: CacheRows::InOrder,
                },
                seqlens: CacheSeqlens::Advanced(lens.view_mut()),
                append: Some(FlashAppend { k_new: k.view(), v_new: v.view(), rotary: None }),
            };
            let outputs = AttentionOutputs { out: out.view_mut(), lse: None };
            let options = FlashDecodeOptions { mask: Mask::CAUSAL, ..Default::default() };
            flash_attn_fwd_decode(stream, inputs, outputs, DecodeWorkspace::default(), &options).unwrap();
            let got = gpu.download(&out).data;
            for (n, got) in got.chunks(heads * d).enumerate() {
                let want = &want[(n * tokens + at) * heads * d..][..heads * d];
                for (x, y) in got.iter().zip(want) {
                    let (x, y) = (x.to_f32(), y.to_f32());
                    assert!(
                        (x - y).abs() <= 1e-2 + 1e-2 * y.abs(),
                        "token {at} of {n}: {x} {y} on {}",
                        gpu.spec()
                    );
                }
            }
        }
        assert_eq!(gpu.download(&lens).data, [tokens as i32; 2]);
    }
}

/// A graph appends where the sequences are when it is launched, and not beyond the cache.
#[test]
fn graphs_append_where_sequences_are() {
    let (heads, kv_heads, d) = (4, 2, 64);
    for gpu in &devices() {
        let stream = gpu.stream();
        let ones = |n: usize| vec![bf16::ONE; n];
        let q = gpu.upload(&ones(2 * heads * d), [2, 1, heads, d]);
        let [k, v] = [1, 2].map(|_| gpu.upload(&ones(2 * kv_heads * d), [2, 1, kv_heads, d]));
        // The second sequence has two keys.
        let row = kv_heads * d;
        let cached = [vec![bf16::NAN; 4 * row], ones(2 * row), vec![bf16::NAN; 2 * row]].concat();
        let mut caches = [(); 2].map(|()| gpu.upload(&cached, [2, 4, kv_heads, d]));
        let mut lens = gpu.upload(&[0i32, 2], [2]);
        let mut out = gpu.poisoned::<bf16>([2, 1, heads, d]);
        let mut lse = gpu.poisoned::<f32>([2, heads, 1]);
        let mut call = || {
            let [k_cache, v_cache] = &mut caches;
            let rows = CacheRows::InOrder;
            let inputs = FlashDecodeInputs::<bf16, bf16> {
                q: q.view(),
                cache: FlashCache { k_cache: k_cache.view_mut(), v_cache: v_cache.view_mut(), rows },
                seqlens: CacheSeqlens::Advanced(lens.view_mut()),
                append: Some(FlashAppend { k_new: k.view(), v_new: v.view(), rotary: None }),
            };
            let outputs = AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) };
            let options = FlashDecodeOptions { scale: Some(1.0 / 64.0), ..Default::default() };
            flash_attn_fwd_decode(stream, inputs, outputs, DecodeWorkspace::default(), &options)
        };
        // Kernels are loaded before the capture: keys 0 and 2.
        call().unwrap();
        let graph = stream.capture(&mut call).unwrap();
        for step in 2..=4 {
            // SAFETY: all tensors are alive, and only this thread uses them.
            unsafe { graph.launch(stream).unwrap() };
            assert_eq!(gpu.download(&lens).data, [step, step + 2]);
            // All scores are 1: the sum of as many exponentials as there are keys.
            for (n, sums) in gpu.download(&lse).data.chunks(heads).enumerate() {
                let keys = step + 2 * n as i32;
                let want = 1.0 + (keys as f32).ln();
                let right = |lse: &f32| if keys > 4 { lse.is_nan() } else { (lse - want).abs() < 1e-4 };
                assert!(sums.iter().all(right), "{sums:?} of {keys} keys on {}", gpu.spec());
            }
        }
    }
}

#[derive(Clone)]
struct Options {
    rows: Rows,
    advance: bool,
    softcap: f32,
    splits: Splits,
}

fn call(stream: &Stream, tensors: &mut Tensors, options: Options) -> Result<()> {
    let Options { rows, advance, softcap, splits } = options;
    let rows = match rows {
        Rows::InOrder => CacheRows::InOrder,
        Rows::Indexed => CacheRows::Indexed(tensors.input("cache_batch_idx")),
        Rows::Paged => CacheRows::Paged(tensors.input("block_table")),
    };
    let seqlens = if advance {
        CacheSeqlens::Advanced(tensors.output("cache_seqlens"))
    } else {
        let seqlens_out = tensors.optional_output("seqlens_out");
        CacheSeqlens::Kept { cache_seqlens: tensors.input("cache_seqlens"), seqlens_out }
    };
    let rotary = tensors.optional_input("cos").map(|cos| AppendRotary {
        cos,
        sin: tensors.input("sin"),
        style: RopeStyle::Neox,
        q_rotated: tensors.output("q_rotated"),
    });
    let append = tensors.optional_input("k_new").map(|k_new| FlashAppend {
        k_new,
        v_new: tensors.input("v_new"),
        rotary,
    });
    let cache = FlashCache { k_cache: tensors.output("k_cache"), v_cache: tensors.output("v_cache"), rows };
    let inputs = FlashDecodeInputs::<bf16, bf16> { q: tensors.input("q"), cache, seqlens, append };
    let options = FlashDecodeOptions {
        softcap,
        splits,
        sink: tensors.optional_input("sink"),
        scales: CacheScales { k: tensors.optional_input("k_scale"), v: None },
        ..Default::default()
    };
    let outputs = AttentionOutputs { out: tensors.output("out"), lse: tensors.optional_output("lse") };
    let workspace = DecodeWorkspace { partials: tensors.optional_output("workspace"), tickets: None };
    flash_attn_fwd_decode(stream, inputs, outputs, workspace, &options)
}

#[test]
fn bad_calls_are_refused() {
    let options = Options { rows: Rows::Paged, advance: false, softcap: 0.0, splits: Splits::Auto };
    let table = |options: &Options| {
        Refusals::new(options.clone(), call)
            .input::<bf16>("q", [2, 3, 4, 16])
            .output::<bf16>("k_cache", [5, 16, 2, 16])
            .output::<bf16>("v_cache", [5, 16, 2, 8])
            .output::<bf16>("out", [2, 3, 4, 8])
            .output::<f32>("lse", [2, 4, 3])
            .output::<f32>("workspace", [4096])
    };
    let appending = |options: &Options| {
        table(options)
            .input::<i32>("cache_seqlens", [2])
            .input::<bf16>("k_new", [2, 2, 2, 16])
            .input::<bf16>("v_new", [2, 2, 2, 8])
            .input::<bf16>("cos", [9, 4])
            .input::<bf16>("sin", [9, 4])
            .output::<bf16>("q_rotated", [2, 3, 4, 16])
            .output::<i32>("seqlens_out", [2])
    };
    appending(&options)
        .input::<i32>("block_table", [2, 3])
        .accepts(|_| {})
        .accepts(|call| call.without("lse"))
        .refuses(
            kind!(Shape),
            &["flash_attn_fwd_decode: k_cache: shape [5, 16, 2, 8]", "16 columns"],
            |call| {
                call.shape("k_cache", [5, 16, 2, 8]);
            },
        )
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: out: shape [2, 3, 4, 16]"], |call| {
            call.shape("out", [2, 3, 4, 16]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: lse: shape [2, 3, 4]"], |call| {
            call.shape("lse", [2, 3, 4]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: block_table: shape [3, 3]", "[2, 3]"], |call| {
            call.shape("block_table", [3, 3]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: k_new: shape [2, 2, 1, 16]"], |call| {
            call.shape("k_new", [2, 2, 1, 16]);
        })
        .refuses(
            kind!(Shape),
            &["flash_attn_fwd_decode: v_new: shape [2, 3, 2, 8]", "[2, 2, 2, 8]"],
            |call| {
                call.shape("v_new", [2, 3, 2, 8]);
            },
        )
        .refuses(kind!(Stride), &["flash_attn_fwd_decode: k_new", "one stride"], |call| {
            call.strides("k_new", [80, 32, 16, 1]);
        })
        .refuses(kind!(Stride), &["flash_attn_fwd_decode: q:", "one stride"], |call| {
            call.strides("q", [256, 64, 16, 1]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: q_rotated: shape [2, 3, 4, 8]"], |call| {
            call.shape("q_rotated", [2, 3, 4, 8]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: sin: shape [8, 4]", "[9, 4]"], |call| {
            call.shape("sin", [8, 4]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: q: shape [2, 3, 4, 16]", "18 columns"], |call| {
            call.shape("cos", [9, 9]);
            call.shape("sin", [9, 9]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: seqlens_out: shape [3]", "[2]"], |call| {
            call.shape("seqlens_out", [3]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: cache_seqlens: shape [1]", "[2]"], |call| {
            call.shape("cache_seqlens", [1]);
        })
        .refuses(kind!(Argument), &["flash_attn_fwd_decode: seqlens_out: none", "k_new"], |call| {
            call.without("seqlens_out");
        })
        .refuses(kind!(Argument), &["flash_attn_fwd_decode: softcap: -1"], |call| call.options.softcap = -1.0)
        .refuses(kind!(Argument), &["flash_attn_fwd_decode: nsplit: 0"], |call| {
            call.options.splits = Splits::Count(0);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: workspace: shape [8]"], |call| {
            call.options.splits = Splits::KeysPerSplit(64);
            call.shape("block_table", [2, 9]);
            call.shape("workspace", [8]);
        })
        .refuses_other_devices()
        .refuses_overlaps();
    // Factors of tokens are none to divide by.
    appending(&options)
        .input::<i32>("block_table", [2, 3])
        .input::<f32>("k_scale", [2, 2])
        .accepts(|_| {})
        .refuses(
            kind!(Shape),
            &["flash_attn_fwd_decode: k_scale: shape [5, 2, 16]", "[1] or [2, 2]", "k_new"],
            |call| call.shape("k_scale", [5, 2, 16]),
        )
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: k_scale: shape [3]", "[1]"], |call| {
            call.shape("k_scale", [3]);
        });
    table(&Options { rows: Rows::Indexed, ..options.clone() })
        .input::<i32>("cache_seqlens", [2])
        .input::<i32>("cache_batch_idx", [2])
        .input::<f32>("k_scale", [2, 2])
        .input::<f32>("sink", [4])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: cache_batch_idx: shape [3]", "[2]"], |call| {
            call.shape("cache_batch_idx", [3]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_decode: sink: shape [2]"], |call| call.shape("sink", [2]))
        .refuses_other_devices()
        .refuses_overlaps();
    table(&Options { rows: Rows::InOrder, advance: true, ..options })
        .output::<i32>("cache_seqlens", [2])
        .input::<bf16>("k_new", [2, 2, 2, 16])
        .input::<bf16>("v_new", [2, 2, 2, 8])
        .accepts(|_| {})
        .refuses(
            kind!(Shape),
            &["flash_attn_fwd_decode: k_cache: shape [1, 16, 2, 16]", "at least 2 rows"],
            |call| {
                call.shape("k_cache", [1, 16, 2, 16]);
                call.shape("v_cache", [1, 16, 2, 8]);
            },
        )
        .refuses_other_devices()
        .refuses_overlaps();
}

/// The last query of a prompt, which has more rows than the kernel of few queries takes, is as that query alone.
#[test]
fn the_last_row_of_a_prompt() {
    let case = Case::new(&[[40, 90]], [2, 4], [64, 64]);
    let prompt =
        kept(flash::<bf16, bf16>(&case, [40, 0], Rows::InOrder)).scalar("causal", Scalar::Bool(true));
    let last = {
        let q = prompt.get("q").elements::<bf16>().unwrap();
        let alone = HostTensor::new([1, 1, 8, 64], &q[39 * 8 * 64..]).unwrap();
        prompt.clone().with("q", alone)
    };
    for (prompt, last) in outs(&prompt).iter().zip(outs(&last)) {
        let (prompt, last) = (prompt.to_f64(), last.to_f64());
        for (x, y) in prompt[39 * 8 * 64..].iter().zip(&last) {
            assert!((x - y).abs() <= 1e-2 + 1e-2 * x.abs(), "{x} {y}");
        }
    }
}
