//! Arguments, references and traffic that the entries of attention over caches share.

use super::attention::{HostMask, HostRows, QKV, Sequence, attend, mask, packed};
use super::common::{INDICES_32, expect_dtype_of, expect_dtypes, integers, layout};
use crate::KvLayout;
use crate::kv_cache::CacheSizes;
use crate::reference::element_of;
use hk_core::registry::{ArgSpec, Call, Described, HostCall, Sample, TensorSpec, Traffic};
use hk_core::{DType, Error, Result};
use std::collections::BTreeSet;
use std::ops::Range;

/// Types of caches beside that of queries.
const QUANTIZED: &[DType] = &[DType::Fp8E4M3, DType::Fp8E4M3Fnuz, DType::I8];
const CACHE: &[DType] = &[DType::Bf16, DType::F16, DType::F32, DType::Fp8E4M3, DType::Fp8E4M3Fnuz, DType::I8];
/// Types of queries that come with fresh keys and values.
pub(super) const FLOAT: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const F32: &[DType] = &[DType::F32];

pub(super) const Q: ArgSpec = ArgSpec::input("q", QKV, 3, "[total_q, Hq, Dqk]");
pub(super) const K_CACHE: ArgSpec = ArgSpec::input("k_cache", CACHE, 4, "by layout").ranks(4, 5);
pub(super) const V_CACHE: ArgSpec = ArgSpec { name: "v_cache", ..K_CACHE };
pub(super) const POOL: ArgSpec = ArgSpec::input("k_pool", CACHE, 3, "[slots, Hkv, columns]");
/// The first 16 pages of a cache in any order, then the others.
pub(super) const BLOCK_TABLE: ArgSpec = ArgSpec::input("block_table", INDICES_32, 2, "[sequences, pages]")
    .sampled(Sample::Distinct { below: 16 });
pub(super) const CU_SEQLENS_Q: ArgSpec =
    ArgSpec::input("cu_seqlens_q", INDICES_32, 1, "[sequences + 1]").sampled(Sample::StartsOf("q"));
/// Of pages of 16 tokens.
pub(super) const SEQ_LENS: ArgSpec = ArgSpec::input("seq_lens", INDICES_32, 1, "[sequences]")
    .sampled(Sample::LengthsIn { table: "block_table", page: 16 });
pub(super) const K_SCALE: ArgSpec = ArgSpec::input("k_scale", F32, 1, "[1] or [sequences, Hkv]")
    .ranks(1, 2)
    .sampled(Sample::Uniform { low: 0.5, high: 2.0 })
    .optional();
pub(super) const V_SCALE: ArgSpec = ArgSpec { name: "v_scale", ..K_SCALE };

/// Runs `$body` with `$c` as the type of a cache beside queries of type `$t`.
macro_rules! with_cache {
    ($dtype:expr, $t:ty, $c:ident => $body:expr) => {
        match $dtype {
            DType::Fp8E4M3 => {
                type $c = Fp8E4M3;
                $body
            }
            DType::Fp8E4M3Fnuz => {
                type $c = Fp8E4M3Fnuz;
                $body
            }
            DType::I8 => {
                type $c = i8;
                $body
            }
            _ => {
                type $c = $t;
                $body
            }
        }
    };
}
pub(super) use with_cache;

/// Checks the type of a cache.
pub(super) fn expect_cache_dtypes<V: Described>(
    call: &Call<V>,
    [k, v]: [&'static str; 2],
    first: &'static str,
) -> Result<()> {
    expect_dtype_of(call, k, first, QUANTIZED)?;
    expect_dtypes(call, k, &[v])
}

/// The sizes of a cache of a call.
pub(super) fn cache_sizes<V: Described>(call: &Call<V>, [k, v]: [&'static str; 2]) -> Result<CacheSizes> {
    let (op, keys, values) = (call.operator().name, call.get(k)?, call.get(v)?);
    layout(call)?.sizes(op, keys.dtype(), (k, keys.shape()), (v, values.shape()))
}

/// Checks heads and columns of queries against those of a cache.
pub(super) fn expect_heads<V: Described>(
    call: &Call<V>,
    [k, v]: [&'static str; 2],
    sizes: CacheSizes,
    most: usize,
) -> Result<()> {
    let q = call.get("q")?.shape();
    crate::prefill::check_cache_heads(call.operator().name, q, [k, v], sizes, [most, most]).map(drop)
}

/// Checks a tensor that may be of any of some shapes.
pub(super) fn expect_one_of<V: Described>(
    call: &Call<V>,
    name: &'static str,
    shapes: &[&[usize]],
) -> Result<()> {
    match call.optional(name).map(V::shape) {
        Some(got) if !shapes.contains(&got) => {
            Err(Error::shape(call.operator().name, name, got, format!("one of {shapes:?}")))
        }
        _ => Ok(()),
    }
}

/// The number of sequences of starts.
pub(super) fn sequences<V: Described>(call: &Call<V>, name: &'static str) -> Result<usize> {
    let starts = call.get(name)?.shape();
    let wrong = || Error::shape(call.operator().name, name, starts, "[sequences + 1]");
    starts[0].checked_sub(1).ok_or_else(wrong)
}

/// A key of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// In a slot of the cache.
    Cached(usize),
    /// Of a page that the cache does not have.
    Missing,
    /// A row of the keys beside the cache.
    Fresh(usize),
}

/// A sequence of a call whose keys are in a cache, or some of them.
pub(super) struct PagedSequence {
    /// Its index.
    pub n: usize,
    pub queries: Range<usize>,
    /// `None`: its output is NaN.
    pub keys: Option<Vec<Key>>,
}

/// The sequences of a call by the starts of queries; `keys` gives those of a sequence.
pub(super) fn paged_sequences(
    call: &HostCall,
    starts: &'static str,
    total_q: usize,
    mut keys: impl FnMut(usize, &Range<usize>) -> Option<Vec<Key>>,
) -> Result<Vec<PagedSequence>> {
    let starts = integers(call.get(starts)?);
    Ok(match packed(&starts, total_q) {
        None if starts.len() > 1 => vec![PagedSequence { n: 0, queries: 0..total_q, keys: None }],
        None => vec![],
        Some(rows) => {
            let sequence = |(n, queries): (usize, Range<usize>)| {
                let keys = keys(n, &queries);
                PagedSequence { n, queries, keys }
            };
            rows.into_iter().enumerate().map(sequence).collect()
        }
    })
}

/// The first `len` keys of sequence `n` by the block table; `None` if it is too narrow.
pub(super) fn keys_in_pages(call: &HostCall, sizes: CacheSizes, n: usize, len: i64) -> Option<Vec<Key>> {
    let table = call.optional("block_table")?;
    let width = table.shape()[1];
    let len = usize::try_from(len).ok().filter(|len| *len <= width * sizes.tokens)?;
    let pages = integers(table);
    let key = |j: usize| match usize::try_from(pages[n * width + j / sizes.tokens]) {
        Ok(page) if page < sizes.pages => Key::Cached(page * sizes.tokens + j % sizes.tokens),
        _ => Key::Missing,
    };
    Some((0..len).map(key).collect())
}

/// Rows `[slots, heads, columns]` of a cache.
pub(super) fn cache_rows(
    call: &HostCall,
    names: [&'static str; 2],
    layout: KvLayout,
    sizes: CacheSizes,
) -> Result<HostRows> {
    let rows = |name: &'static str, values: bool, columns: usize| -> Result<Vec<f64>> {
        let cache = call.get(name)?;
        let (elements, piece) = (cache.to_f64(), 16 / cache.dtype().size_bytes());
        let of = [sizes.tokens, sizes.heads, columns];
        let at = |i: usize| {
            let (row, col) = (i / columns, i % columns);
            elements[element_of(layout, values, piece, of, [row / sizes.heads, row % sizes.heads, col])]
        };
        Ok((0..elements.len()).map(at).collect())
    };
    Ok(HostRows { k: rows(names[0], false, sizes.dqk)?, v: rows(names[1], true, sizes.dv)? })
}

/// The outputs of attention of these sequences, by rows of `q`.
pub(super) fn attend_paged(
    call: &HostCall,
    heads: [usize; 4],
    sequences: Vec<PagedSequence>,
    cache: &HostRows,
    fresh: &HostRows,
    longest: [usize; 2],
) -> Result<([Vec<f64>; 2], Vec<f64>)> {
    attend_rows(call, heads, &call.get("q")?.to_f64(), sequences, cache, fresh, longest)
}

/// The same for queries `q`.
pub(super) fn attend_rows(
    call: &HostCall,
    heads: [usize; 4],
    q: &[f64],
    sequences: Vec<PagedSequence>,
    cache: &HostRows,
    fresh: &HostRows,
    longest: [usize; 2],
) -> Result<([Vec<f64>; 2], Vec<f64>)> {
    let [_, kv_heads, dqk, dv] = heads;
    let scale = |name: &str, n: usize, head: usize, slot: usize| match call.optional(name) {
        None => 1.0,
        Some(t) if t.shape().len() == 3 => {
            let tokens = t.shape()[2];
            t.to_f64()[(slot / tokens * kv_heads + head) * tokens + slot % tokens]
        }
        Some(t) if t.shape().len() == 2 => t.to_f64()[n * kv_heads + head],
        Some(t) => t.to_f64()[0],
    };
    // Each sequence has rows of its own, in the order of its keys.
    let mut rows = HostRows { k: vec![], v: vec![] };
    let mut count = 0;
    let mut of_call = vec![];
    let mask = HostMask::of(call)?;
    for PagedSequence { n, queries, keys } in sequences {
        let keys = keys.filter(|keys| {
            let sizes = [n, queries.len(), keys.len()];
            queries.is_empty() || mask.as_ref().is_none_or(|mask| mask.of_sequence(sizes).is_some())
        });
        let keys = keys.map(|keys| {
            for key in &keys {
                for (to, columns, values, missing, name) in [
                    (&mut rows.k, dqk, [&cache.k, &fresh.k], f64::NAN, "k_scale"),
                    (&mut rows.v, dv, [&cache.v, &fresh.v], 0.0, "v_scale"),
                ] {
                    let width = kv_heads * columns;
                    match *key {
                        Key::Missing => to.extend(vec![missing; width]),
                        Key::Fresh(row) => to.extend(&values[1][row * width..][..width]),
                        Key::Cached(slot) => {
                            let row = values[0][slot * width..][..width].chunks(columns).enumerate();
                            to.extend(row.flat_map(|(head, values)| {
                                let scale = scale(name, n, head, slot);
                                values.iter().map(move |x| x * scale)
                            }));
                        }
                    }
                }
            }
            count += keys.len();
            (count - keys.len()..count).collect()
        });
        // `attend` counts sequences.
        while of_call.len() < n {
            of_call.push(Sequence { queries: 0..0, keys: Some(vec![]) });
        }
        of_call.push(Sequence { queries, keys });
    }
    attend(call, heads, q, &rows, &of_call, longest)
}

/// The bytes that a call has to move: of caches and fresh keys the rows that queries see, of the table their pages, queries and outputs
/// of these sequences, other tensors whole.
pub(super) fn paged_traffic(
    call: &HostCall,
    sequences: &[PagedSequence],
    [cache, fresh, table]: [&[&'static str]; 3],
    sizes: CacheSizes,
) -> Traffic {
    let mut seen = BTreeSet::new();
    let (mut pages, mut rows) = (0, 0);
    let left = mask(call).ok().and_then(|mask| mask.left);
    for PagedSequence { queries, keys, .. } in sequences {
        rows += queries.len();
        let Some(keys) = keys.as_ref().filter(|_| !queries.is_empty()) else { continue };
        let first = keys.len() as i64 - queries.len() as i64 - left.map_or(i64::MAX >> 1, i64::from);
        let first = (first.max(0) as usize).min(keys.len());
        seen.extend(&keys[first..]);
        let cached = keys.iter().take_while(|key| !matches!(key, Key::Fresh(_))).count();
        if cached > first {
            pages += cached.div_ceil(sizes.tokens) - first / sizes.tokens;
        }
    }
    let bytes = |name: &str| call.optional(name).map_or(0, |t| t.bytes().len() as u64);
    let row = |names: &[&str]| -> u64 {
        let element =
            names.first().and_then(|name| call.optional(name)).map_or(0, |t| t.dtype().size_bytes());
        (sizes.heads * (sizes.dqk + sizes.dv) * element) as u64
    };
    let total = call.optional("q").map_or(0, |q| q.shape()[0]).max(1) as u64;
    let of_rows = |bytes: u64| bytes / total * rows as u64;
    let others = |name: &&str| ![cache, fresh, table, &["q"][..]].concat().contains(name);
    let count = |is: fn(&Key) -> bool| seen.iter().filter(|key| is(key)).count() as u64;
    let read = count(|key| matches!(key, Key::Cached(_))) * row(cache)
        + count(|key| matches!(key, Key::Fresh(_))) * row(fresh)
        + of_rows(bytes("q"))
        + 4 * pages as u64
        + call.tensors().map(|(name, _)| name).filter(others).map(bytes).sum::<u64>();
    let made = (call.operator().outputs)(&call.spec()).unwrap_or_default();
    let written =
        made.iter().map(|(_, spec): &(_, TensorSpec)| of_rows(spec.bytes().unwrap_or(0) as u64)).sum();
    Traffic { read, written }
}
