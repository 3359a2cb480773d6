//! `mla_decode_rope` and `unified_attn_sparse_mla` on the emulated GPUs (and real ones where there are some) against their f64 references,
//! and their laws.

use crate::common::attention::{Builder, check, starts};
use crate::common::integers;
use hk_attention::{
    AttentionOutputs, CosSin, DecodeWorkspace, LatentKeys, MlaDecodeInputs, MlaDecodeOutputs, MlaOptions,
    MlaRope, QueryTile, SparseMlaInputs, Splits, Tickets, mla_decode_rope, unified_attn_sparse_mla,
};
use hk_core::plan::rope::RopeStyle;
use hk_core::registry::{Described as _, HostTensor, Scalar};
use hk_core::{DType, DeviceBuffer, Result, bf16};
use hk_testkit::{self as kit, Fill, Gpu, Place, Refusals, Tensor, kind};
use proptest::prelude::*;
use proptest::sample::select;

const DECODE: &str = "mla_decode_rope";
const SPARSE: &str = "unified_attn_sparse_mla";

const C256: (&str, Scalar) = ("columns", Scalar::Count(256));

/// Slots `0..n` in any order.
fn shuffled(n: usize, seed: u64) -> Vec<i32> {
    let mut free: Vec<i32> = (0..n as i32).collect();
    integers(seed, n, 1 << 30).into_iter().map(|at| free.swap_remove(at % free.len())).collect()
}

/// Sequences in slots, of these queries and keys.
fn in_slots(
    dtype: DType,
    [heads, columns]: [usize; 2],
    queries: Option<&[usize]>,
    keys: &[usize],
) -> Builder {
    let (all, total) = (keys.iter().sum::<usize>(), queries.map_or(keys.len(), |q| q.iter().sum()));
    let call = Builder::new(DECODE)
        .tensor("q", dtype, [total, heads, columns])
        .tensor("kv_pool", dtype, [all + 3, 1, 1, columns])
        .integers("kv_indptr", &starts(keys))
        .integers("kv_indices", &shuffled(all + 3, 7)[..all])
        .want("lse");
    match queries {
        Some(queries) => call.integers("cu_seqlens_q", &starts(queries)),
        None => call,
    }
}

/// Lengths around the tiles, none among them.
#[test]
fn every_length() {
    for (n, heads) in [(0, 16), (1, 20), (2, 3)] {
        let keys: &[usize] = &[0, 1, 31, 32, 33, 63, 64, 65, 2, 97];
        let dtype = [DType::Bf16, DType::F16][n % 2];
        in_slots(dtype, [heads, 576], None, keys).check(&format!("{dtype}, {heads} heads"), n as u64);
    }
}

/// One to eight queries of a sequence, more of them than keys among them.
#[test]
fn few_queries() {
    for heads in [2, 16, 40] {
        let call = in_slots(DType::Bf16, [heads, 320], Some(&[1, 0, 8, 3, 5, 2]), &[9, 4, 70, 1, 33, 0]);
        call.scalar("columns", C256.1).check(&format!("{heads} heads"), 3);
    }
}

/// More sequences than a wave has lanes.
#[test]
fn many_sequences() {
    let call = in_slots(DType::F16, [2, 256], Some(&[2; 70]), &[5; 70]);
    call.scalar("columns", C256.1).check("70 sequences", 1);
}

#[test]
fn pages_of_any_size() {
    for (tokens, lens) in [(1, [3, 0]), (16, [33, 16]), (64, [65, 128]), (5, [24, 11])] {
        let call = Builder::new(DECODE)
            .tensor("q", DType::Bf16, [2, 16, 576])
            .tensor("kv_pool", DType::Bf16, [11, tokens, 1, 576])
            .tensor("block_table", DType::I32, [2, 5])
            .integers("seq_lens", &lens)
            .want("lse");
        let mut call = call.call(2);
        let table = HostTensor::new([2, 5], &shuffled(11, 5)[..10]).unwrap();
        call.set("block_table", table).unwrap();
        check(&format!("pages of {tokens}"), &call);
    }
}

/// Lengths beyond the table, slots beyond the pool, starts in disorder: NaN where documented.
#[test]
fn tables_are_not_trusted() {
    let call = |indptr: &[i32], starts: &[i32]| {
        let mut slots = shuffled(100, 3);
        (slots[10], slots[75]) = (100, i32::MIN);
        Builder::new(DECODE)
            .tensor("q", DType::Bf16, [6, 4, 320])
            .tensor("kv_pool", DType::Bf16, [100, 1, 1, 320])
            .integers("kv_indptr", indptr)
            .integers("kv_indices", &slots[..90])
            .integers("cu_seqlens_q", starts)
            .scalar("columns", C256.1)
            .want("lse")
    };
    for indptr in [[0, 30, 60, 90], [0, 30, 60, 91], [20, 10, 40, 80], [-5, 9, i32::MAX, i32::MIN]] {
        call(&indptr, &[0, 2, 4, 6]).check(&format!("slots {indptr:?}"), 1);
    }
    for starts in [[0, 2, 1, 6], [1, 2, 4, 6], [0, 2, 4, 7], [0, i32::MAX, 0, 6]] {
        call(&[0, 30, 60, 90], &starts).check(&format!("queries {starts:?}"), 2);
    }
    // Sequence 1 is longer than its pages.
    let pages = Builder::new(DECODE)
        .tensor("q", DType::F16, [3, 16, 576])
        .tensor("kv_pool", DType::F16, [16, 16, 1, 576])
        .tensor("block_table", DType::I32, [3, 2]);
    pages.integers("seq_lens", &[20, 33, -1]).want("lse").check("lengths", 3);
}

/// Lists of slots, of which some are none and some are not in the cache.
#[test]
fn sparse_lists() {
    for (heads, columns, c, topk) in
        [(16, 576, 512, 78), (8, 320, 256, 64), (128, 576, 512, 33), (32, 300, 256, 65)]
    {
        let mut lists: Vec<i32> =
            integers(heads as u64, 4 * topk, 48).iter().map(|&i| i as i32 - 1).collect();
        lists[topk..2 * topk].fill(-1);
        lists[3 * topk - 1] = 48;
        let mut call = Builder::new(SPARSE)
            .tensor("q", DType::Bf16, [4, heads, columns])
            .tensor("kv_cache", DType::Bf16, [3, 16, 1, columns])
            .tensor("topk_indices", DType::I32, [4, topk])
            .scalar("columns", Scalar::Count(c))
            .want("lse")
            .call(5);
        call.set("topk_indices", HostTensor::new([4, topk], &lists[..]).unwrap()).unwrap();
        check(&format!("{heads} heads, {topk} of 48 slots"), &call);
    }
}

/// Factors of the pool that are negative, zero or NaN, which the host cannot know.
#[test]
fn factors_of_any_sign() {
    for factor in [-0.5f32, 0.0, f32::NAN] {
        for softcap in [0.0, 2.0] {
            let mut call = in_slots(DType::F16, [3, 320], None, &[70, 0, 9])
                .scalar("columns", C256.1)
                .scalar("softcap", Scalar::Float(softcap))
                .f32("kv_scale", [1])
                .call(5);
            call.set("kv_scale", HostTensor::new([1], &[factor]).unwrap()).unwrap();
            check(&format!("a factor of {factor}, softcap {softcap}"), &call);
        }
    }
}

/// How latent rows are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stored {
    Own,
    Fp8,
    Packed,
}

#[derive(Debug, Clone)]
struct Case {
    dtype: DType,
    stored: Stored,
    heads: usize,
    c: usize,
    r: usize,
    /// Queries and keys of each sequence.
    lens: Vec<[usize; 2]>,
    /// Tokens of a page, in tables of pages rather than lists of slots.
    page: Option<usize>,
    /// Columns that rotate: then each sequence has one query.
    rotary: Option<usize>,
    tile: &'static str,
    keys_per_split: u64,
    /// Of options.
    bits: u32,
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (
        select(&[DType::Bf16, DType::F16][..]),
        select(&[Stored::Own, Stored::Own, Stored::Fp8, Stored::Fp8, Stored::Packed][..]),
        prop_oneof![Just(16), Just(64), Just(128), 1usize..130],
        select(&[256usize, 512][..]),
        prop_oneof![Just(64), Just(0), (0usize..9).prop_map(|n| 8 * n), 0usize..129],
    );
    let lens = prop::collection::vec((0usize..9, prop_oneof![0usize..140, 62usize..67]), 0..4);
    let how = (
        prop::option::of(select(&[1usize, 16, 64, 7][..])),
        prop::option::weighted(0.3, 0usize..65),
        select(&["auto", "short", "tall"][..]),
        select(&[0u64, 64, 128][..]),
        any::<u32>(),
    );
    (sizes, lens, how).prop_map(
        |((dtype, stored, heads, c, r), lens, (page, half, tile, keys_per_split, bits))| {
            let packed = stored == Stored::Packed;
            let (dtype, c, r) = if packed { (DType::Bf16, 512, 64) } else { (dtype, c, r) };
            let rotary = half.map(|half| 2 * half.min(r / 2));
            let lens = lens.into_iter().map(|(q, k)| [if rotary.is_some() { 1 } else { q }, k]).collect();
            Case { dtype, stored, heads, c, r, lens, page, rotary, tile, keys_per_split, bits }
        },
    )
}

impl Case {
    fn option(&self, bit: u32) -> bool {
        self.bits >> bit & 1 == 1
    }

    /// Type and columns of rows on a device whose fp8 is FNUZ or not.
    fn rows(&self, fnuz: bool) -> (DType, usize) {
        let fp8 = if fnuz { DType::Fp8E4M3Fnuz } else { DType::Fp8E4M3 };
        match self.stored {
            Stored::Own => (self.dtype, self.c + self.r),
            Stored::Fp8 => (fp8, self.c + self.r),
            Stored::Packed => (fp8, 656),
        }
    }

    /// A call of queries that have lists of slots of their own, some of none, as long as the keys of the first sequence.
    fn sparse(&self, fnuz: bool) -> hk_core::registry::HostCall {
        let (of_pool, columns) = self.rows(fnuz);
        let (tokens, seed) = (self.page.unwrap_or(5), self.bits.into());
        let (pages, topk) = (64usize.div_ceil(tokens), self.lens.first().map_or(0, |n| n[1]));
        let total_q = self.lens.len().min(3);
        let none = |slot: i64| if slot < 0 { -1 } else { slot as i32 };
        let lists: Vec<i32> =
            integers(seed, total_q * topk, 75).iter().map(|&i| none(i as i64 % 75 - 11)).collect();
        let mut builder = Builder::new(SPARSE)
            .tensor("q", self.dtype, [total_q, self.heads, self.c + self.r])
            .tensor("kv_cache", of_pool, [pages, tokens, 1, columns])
            .tensor("topk_indices", DType::I32, [total_q, topk])
            .scalar("columns", Scalar::Count(self.c as u64))
            .scalar("keys_per_split", Scalar::Count(self.keys_per_split))
            .scalar("tile", Scalar::Choice(self.tile))
            .want("lse");
        if self.option(1) {
            builder = builder.scalar("softcap", Scalar::Float(3.0));
        }
        if self.stored != Stored::Own && self.option(4) {
            builder = builder.f32("kv_scale", [1]);
        }
        let mut call = builder.call(seed);
        call.set("topk_indices", HostTensor::new([total_q, topk], &lists[..]).unwrap()).unwrap();
        if self.stored == Stored::Packed {
            let pool = packed(call.get("kv_cache").unwrap(), seed);
            call.set("kv_cache", pool).unwrap();
        }
        call
    }

    /// A call on a device whose fp8 is FNUZ or not.
    fn call(&self, fnuz: bool) -> hk_core::registry::HostCall {
        let (of_pool, columns) = self.rows(fnuz);
        let [queries, keys] = [0, 1].map(|i| self.lens.iter().map(|n| n[i]).collect::<Vec<usize>>());
        let (n, total_q) = (self.lens.len(), queries.iter().sum::<usize>());
        let tokens = self.page.unwrap_or(1 + self.option(0) as usize * 4);
        let pages_of = |keys: usize| keys.div_ceil(tokens);
        let width = keys.iter().map(|&n| pages_of(n)).max().unwrap_or(0) + 1;
        let pages = if self.page.is_some() { n * width } else { pages_of(keys.iter().sum()) } + 2;
        let mut builder = Builder::new(DECODE)
            .tensor("q", self.dtype, [total_q, self.heads, self.c + self.r])
            .tensor("kv_pool", of_pool, [pages, tokens, 1, columns])
            .scalar("columns", Scalar::Count(self.c as u64))
            .scalar("keys_per_split", Scalar::Count(self.keys_per_split))
            .scalar("tile", Scalar::Choice(self.tile))
            .want("lse");
        if self.option(1) {
            builder = builder.scalar("softcap", Scalar::Float(3.0));
        }
        if self.option(2) {
            builder = builder.scalar("scale", Scalar::Float(if self.option(3) { -0.05 } else { 0.02 }));
        }
        if self.stored != Stored::Own && self.option(4) {
            builder = builder.f32("kv_scale", [1]);
        }
        if let Some(rotary) = self.rotary {
            let of_table = if self.option(5) { DType::F32 } else { self.dtype };
            let style = if self.option(6) { "interleaved" } else { "neox" };
            builder = builder
                .tensor("cos_sin", of_table, [64, rotary])
                .tensor("positions", DType::I32, [n])
                .scalar("style", Scalar::Choice(style))
                .want("k_pe_out");
        } else {
            builder = builder.integers("cu_seqlens_q", &starts(&queries));
        }
        let seed = self.bits.into();
        let mut call = if self.page.is_some() {
            let lens: Vec<i32> = keys.iter().map(|&n| n as i32).collect();
            let builder = builder.tensor("block_table", DType::I32, [n, width]);
            let mut call = builder.integers("seq_lens", &lens).call(seed);
            let table = HostTensor::new([n, width], &shuffled(pages, seed)[..n * width]).unwrap();
            call.set("block_table", table).unwrap();
            call
        } else {
            let slots = &shuffled(pages * tokens, seed)[..keys.iter().sum()];
            builder.integers("kv_indptr", &starts(&keys)).integers("kv_indices", slots).call(seed)
        };
        if self.stored == Stored::Packed {
            let pool = packed(call.get("kv_pool").unwrap(), seed);
            call.set("kv_pool", pool).unwrap();
        }
        call
    }
}

/// Packed rows with the values of `rows`, and factors and columns beside them of natural size.
fn packed(rows: &HostTensor, seed: u64) -> HostTensor {
    let mut bytes = rows.bytes().to_vec();
    let n = bytes.len() / 656;
    let pe: Vec<bf16> = Fill::Normal.elements(n * 64, seed);
    for ((row, scales), pe) in
        bytes.chunks_mut(656).zip(integers(seed, n * 4, 100).chunks(4)).zip(pe.chunks(64))
    {
        for (to, scale) in row[512..528].chunks_mut(4).zip(scales) {
            to.copy_from_slice(&(0.5 + *scale as f32 / 200.0).to_le_bytes());
        }
        row[528..].copy_from_slice(bytemuck::cast_slice(pe));
    }
    HostTensor::from_bytes(rows.spec(), bytes).unwrap()
}

proptest! {
    #![proptest_config(kit::config())]

    /// Types, columns, heads, lengths, lists and pages, rotations and options.
    #[test]
    fn matches_the_reference(case in cases()) {
        let fnuz: &[bool] = match case.stored {
            Stored::Own => &[false],
            _ => &[false, true],
        };
        for &fnuz in fnuz {
            check(&format!("{case:?}"), &case.call(fnuz));
            check(&format!("{case:?}, lists"), &case.sparse(fnuz));
        }
    }
}

/// Lengths around the tiles and the turns of the waves over rows of bytes, with rotations of the last keys and without.
#[test]
fn every_length_of_bytes() {
    let sizes = [
        (Stored::Fp8, DType::Bf16, 512, 64),
        (Stored::Fp8, DType::F16, 512, 48),
        (Stored::Fp8, DType::F16, 256, 64),
        (Stored::Fp8, DType::Bf16, 256, 0),
        (Stored::Packed, DType::Bf16, 512, 64),
    ];
    for (n, (stored, dtype, c, r)) in sizes.into_iter().enumerate() {
        for rotary in [None, Some(r / 2)] {
            let case = Case {
                dtype,
                stored,
                heads: 16 - n,
                c,
                r,
                lens: [0, 1, 15, 16, 17, 63, 64, 65, 80, 129].map(|keys| [1, keys]).into(),
                page: None,
                rotary,
                tile: "short",
                keys_per_split: 0,
                bits: n as u32,
            };
            check(&format!("{case:?}"), &case.call(true));
        }
    }
}

/// Scales of packed rows: a NaN whose payload is all ones, an infinity, and one whose products with odd elements lie halfway between
/// two numbers of bf16.
#[test]
fn scales_of_packed_rows() {
    for (scale, heads, fnuz) in [f32::from_bits(0x7fff_ffff), f32::INFINITY, 273.0 / 256.0]
        .into_iter()
        .flat_map(|scale| [(16, false), (40, true)].map(|(heads, fnuz)| (scale, heads, fnuz)))
    {
        let case = Case {
            dtype: DType::Bf16,
            stored: Stored::Packed,
            heads,
            c: 512,
            r: 64,
            lens: vec![[2, 70], [1, 33]],
            page: None,
            rotary: None,
            tile: "auto",
            keys_per_split: 0,
            bits: 0,
        };
        let mut call = case.call(fnuz);
        let pool = call.get("kv_pool").unwrap();
        let (spec, mut bytes) = (pool.spec(), pool.bytes().to_vec());
        // A scale of the row of sequence 0's key 5; a tie is one of all rows.
        let slot = shuffled(103, 0)[5] as usize;
        for (i, row) in bytes.chunks_mut(656).enumerate() {
            if scale.abs() < f32::INFINITY || i == slot {
                row[516..520].copy_from_slice(&scale.to_le_bytes());
            }
        }
        call.set("kv_pool", HostTensor::from_bytes(spec, bytes).unwrap()).unwrap();
        check(&format!("a scale of {scale}, {heads} heads"), &call);
    }
}

/// A batch for the laws: rows of the pool that no sequence has are NaN.
struct Batch {
    heads: usize,
    keys: Vec<usize>,
    q: Vec<bf16>,
    /// The keys of all sequences, one after the other.
    rows: Vec<bf16>,
}

const COLUMNS: usize = 576;

impl Batch {
    fn new(heads: usize, keys: &[usize]) -> Self {
        let all: usize = keys.iter().sum();
        Self {
            heads,
            keys: keys.to_vec(),
            q: Fill::Normal.elements(keys.len() * heads * COLUMNS, 1),
            rows: Fill::Normal.elements(all * COLUMNS, 2),
        }
    }

    /// The pool, with key `j` in slot `slots[j]` of `n`.
    fn pool(&self, slots: &[i32], n: usize) -> Vec<bf16> {
        let mut pool = vec![bf16::NAN; n * COLUMNS];
        for (row, slot) in self.rows.chunks(COLUMNS).zip(slots) {
            pool[*slot as usize * COLUMNS..][..COLUMNS].copy_from_slice(row);
        }
        pool
    }

    /// Outputs and log-sum-exp, with key `j` in slot `slots[j]` of `n`.
    fn run(&self, gpu: &Gpu, slots: &[i32], n: usize, how: How, tickets: Option<&mut Tickets>) -> Results {
        let mut memory = Memory::new(gpu, self.keys.len(), self.heads);
        let longest = self.keys.iter().max().copied();
        memory.call(gpu, self.upload(gpu, slots, n).inputs(), how, longest, tickets).unwrap();
        memory.results(gpu)
    }

    fn upload(&self, gpu: &Gpu, slots: &[i32], n: usize) -> Uploaded {
        let batch = self.keys.len();
        Uploaded {
            q: gpu.upload(&self.q, [batch, self.heads, COLUMNS]),
            pool: gpu.upload(&self.pool(slots, n), [n, 1, 1, COLUMNS]),
            indptr: gpu.upload(&starts(&self.keys), [batch + 1]),
            indices: gpu.upload(slots, [slots.len()]),
        }
    }
}

/// A batch on a device, its keys in slots.
struct Uploaded {
    q: Tensor<bf16>,
    pool: Tensor<bf16>,
    indptr: Tensor<i32>,
    indices: Tensor<i32>,
}

impl Uploaded {
    fn inputs(&self) -> MlaDecodeInputs<'_, bf16, bf16> {
        MlaDecodeInputs {
            q: self.q.view(),
            kv_pool: self.pool.view(),
            kv_scale: None,
            keys: LatentKeys::Slots { kv_indptr: self.indptr.view(), kv_indices: self.indices.view() },
            cu_seqlens_q: None,
            rope: None,
        }
    }
}

type Results = (Vec<bf16>, Vec<f32>);
type How = (QueryTile, Splits);

/// What a call writes.
struct Memory {
    out: Tensor<bf16>,
    lse: Tensor<f32>,
    partials: Tensor<f32>,
}

impl Memory {
    fn new(gpu: &Gpu, batch: usize, heads: usize) -> Self {
        Self {
            out: gpu.poisoned(Place::rows([batch, heads, 512], 520)),
            lse: gpu.poisoned([batch, heads]),
            partials: gpu.poisoned([133 * batch * heads * 514]),
        }
    }

    fn call(
        &mut self,
        gpu: &Gpu,
        inputs: MlaDecodeInputs<bf16, bf16>,
        (tile, splits): How,
        longest: Option<usize>,
        tickets: Option<&mut Tickets>,
    ) -> Result<()> {
        let options = MlaOptions { tile: Some(tile), splits, longest, ..Default::default() };
        let Self { out, lse, partials } = self;
        let outputs = MlaDecodeOutputs { out: out.view_mut(), lse: Some(lse.view_mut()), k_pe_out: None };
        let workspace = DecodeWorkspace { partials: Some(partials.view_mut()), tickets };
        mla_decode_rope(gpu.stream(), inputs, outputs, workspace, &options)
    }

    fn results(&self, gpu: &Gpu) -> Results {
        gpu.assert_guards(&self.out);
        gpu.assert_guards(&self.lse);
        (gpu.download(&self.out).to_vec(), gpu.download(&self.lse).to_vec())
    }
}

#[track_caller]
fn assert_bits<T: bytemuck::NoUninit>(got: &[T], want: &[T]) {
    assert_eq!(bytemuck::cast_slice::<T, u8>(got), bytemuck::cast_slice::<T, u8>(want));
}

#[track_caller]
fn assert_same(got: &Results, want: &Results) {
    assert_bits(&got.0, &want.0);
    assert_bits(&got.1, &want.1);
}

const ONE: Splits = Splits::Count(1);

/// The same bits wherever keys lie; a sequence alone has the bits that it has in a batch.
#[test]
fn slots_and_batches_do_not_matter() {
    for gpu in kit::devices() {
        for (tile, heads) in [(QueryTile::Short, 16), (QueryTile::Tall, 20)] {
            for splits in [ONE, Splits::KeysPerSplit(64), Splits::Count(2)] {
                let (batch, how) = (Batch::new(heads, &[70, 0, 130]), (tile, splits));
                let want = batch.run(&gpu, &shuffled(200, 1), 200, how, None);
                assert_same(&batch.run(&gpu, &shuffled(230, 2)[..200], 230, how, None), &want);
                let alone = Batch {
                    heads,
                    keys: vec![130],
                    q: batch.q[2 * heads * COLUMNS..].to_vec(),
                    rows: batch.rows[70 * COLUMNS..].to_vec(),
                };
                let (out, lse) = alone.run(&gpu, &shuffled(130, 3), 130, how, None);
                assert_bits(&out, &want.0[2 * heads * 512..]);
                assert_bits(&lse, &want.1[2 * heads..]);
                assert!(want.1[heads..2 * heads].iter().all(|lse| *lse == f32::NEG_INFINITY));
                assert!(want.0[heads * 512..2 * heads * 512].iter().all(|x| x.to_f32() == 0.0));
            }
        }
    }
}

/// The last block to arrive merges to the bits of a second launch, and leaves its counters at zero: of a few splits, and of 128, as many
/// as one launch merges. 133 take a second one, as do five of 64 rows of `Auto`.
#[test]
fn one_launch_has_the_bits_of_two() {
    for (tile, heads, keys) in [
        (QueryTile::Short, 20, vec![700, 0, 129, 64]),
        (QueryTile::Tall, 70, vec![1030, 1]),
        (QueryTile::Short, 3, vec![2048, 65]),
        (QueryTile::Short, 2, vec![8192, 65]),
        (QueryTile::Short, 2, vec![8449]),
    ] {
        let batch = Batch::new(heads, &keys);
        let slots = shuffled(keys.iter().sum::<usize>(), 5);
        for gpu in kit::devices() {
            let mut tickets = Tickets::new(gpu.stream()).unwrap();
            for splits in
                [Splits::Count(3), Splits::KeysPerSplit(64), Splits::KeysPerSplit(192), Splits::Auto]
            {
                let two = batch.run(&gpu, &slots, slots.len(), (tile, splits), None);
                for _ in 0..2 {
                    let one = batch.run(&gpu, &slots, slots.len(), (tile, splits), Some(&mut tickets));
                    assert_same(&one, &two);
                }
            }
        }
    }
}

/// A call of three sequences in splits of 64 keys.
fn paged(
    gpu: &Gpu,
    memory: &mut Memory,
    (q, pool, block_table): (&Tensor<bf16>, &Tensor<bf16>, &Tensor<i32>),
    lens: &DeviceBuffer<i32>,
    tickets: Option<&mut Tickets>,
) -> Result<()> {
    let inputs = MlaDecodeInputs {
        q: q.view(),
        kv_pool: pool.view(),
        kv_scale: None,
        keys: LatentKeys::Pages { block_table: block_table.view(), seq_lens: lens.view([3])? },
        cu_seqlens_q: None,
        rope: None,
    };
    memory.call(gpu, inputs, (QueryTile::Short, Splits::KeysPerSplit(64)), None, tickets)
}

/// A graph has the bits of a call with the lengths that are on the device when it is launched; those beyond the block table are NaN.
#[test]
fn graphs_follow_the_lengths() {
    let (batch, tokens, width) = (Batch::new(5, &[256; 3]), 16, 16);
    let table = shuffled(3 * width, 6);
    for gpu in &kit::devices() {
        let stream = gpu.stream();
        let q = gpu.upload(&batch.q, [3, 5, COLUMNS]);
        let pool = gpu.upload(&batch.rows, [3 * width, tokens, 1, COLUMNS]);
        let block_table = gpu.upload(&table, [3, width]);
        let mut lens = stream.upload(&[1i32; 3]).unwrap();
        let (mut memory, mut tickets) = (Memory::new(gpu, 3, 5), Tickets::new(stream).unwrap());
        let tensors = (&q, &pool, &block_table);
        paged(gpu, &mut memory, tensors, &lens, Some(&mut tickets)).unwrap();
        let graph = stream.capture(|| paged(gpu, &mut memory, tensors, &lens, Some(&mut tickets))).unwrap();
        for of in [[256, 40, 129], [1, 0, 64], [129, 40, 1], [257, 40, -1]] {
            stream.copy(&stream.upload(&of).unwrap(), &mut lens).unwrap();
            // SAFETY: all tensors are alive, and only this thread uses them.
            unsafe { graph.launch(stream).unwrap() };
            let mut other = Memory::new(gpu, 3, 5);
            paged(gpu, &mut other, tensors, &stream.upload(&of).unwrap(), None).unwrap();
            let got = memory.results(gpu);
            assert_same(&got, &other.results(gpu));
            for (rows, len) in got.1.chunks(5).zip(of) {
                assert!(rows.iter().all(|lse| lse.is_nan() != (0..=256).contains(&len)), "{of:?}");
            }
        }
    }
}

/// Splits change results within the tolerance of merged splits alone.
#[test]
fn splits_agree() {
    for gpu in kit::devices() {
        let batch = Batch::new(16, &[200, 5, 129]);
        let slots = shuffled(340, 4);
        let (want, _) = batch.run(&gpu, &slots[..334], 340, (QueryTile::Short, ONE), None);
        let others = [
            (QueryTile::Short, Splits::KeysPerSplit(64)),
            (QueryTile::Short, Splits::KeysPerSplit(128)),
            (QueryTile::Tall, Splits::Count(4)),
            (QueryTile::Short, Splits::Auto),
        ];
        for how in others {
            let (got, _) = batch.run(&gpu, &slots[..334], 340, how, None);
            let square = |x: f32| f64::from(x * x);
            let norm: f64 = want.iter().map(|x| square(x.to_f32())).sum();
            let away: f64 = want.iter().zip(&got).map(|(a, b)| square(a.to_f32() - b.to_f32())).sum();
            assert!((away / norm).sqrt() < 4e-3, "{how:?}: {}", (away / norm).sqrt());
        }
    }
}

/// Rotated columns of the last keys are stored once, whatever heads and splits: bytes stored with them less those without.
#[test]
fn last_keys_are_stored_once() {
    const ROTARY: usize = 64;
    let keys = [130, 64, 1];
    for arch in ["gfx942", "gfx950"] {
        let gpu = Gpu::open(&format!("emu:{arch}"));
        let slots = shuffled(195, 4);
        let table = gpu.upload(&Fill::Normal.elements::<f32>(8 * ROTARY, 3), [8, ROTARY]);
        let positions = gpu.upload(&[5, 0, 7], [3]);
        for (tile, heads) in [(QueryTile::Short, 16), (QueryTile::Short, 40), (QueryTile::Tall, 128)] {
            for splits in [ONE, Splits::KeysPerSplit(64)] {
                let batch = Batch::new(heads, &keys).upload(&gpu, &slots, 195);
                let stored = |rotated: Option<&mut Tensor<bf16>>| {
                    let mut memory = Memory::new(&gpu, 3, heads);
                    let rope = MlaRope {
                        cos_sin: CosSin::F32(table.view()),
                        positions: positions.view(),
                        style: RopeStyle::Neox,
                    };
                    let inputs = MlaDecodeInputs { rope: Some(rope), ..batch.inputs() };
                    let outputs = MlaDecodeOutputs {
                        out: memory.out.view_mut(),
                        lse: Some(memory.lse.view_mut()),
                        k_pe_out: rotated.map(Tensor::view_mut),
                    };
                    let options =
                        MlaOptions { tile: Some(tile), splits, longest: Some(130), ..Default::default() };
                    let workspace =
                        DecodeWorkspace { partials: Some(memory.partials.view_mut()), tickets: None };
                    gpu.stream().take_counters().unwrap();
                    mla_decode_rope(gpu.stream(), inputs, outputs, workspace, &options).unwrap();
                    gpu.stream().take_counters().unwrap().unwrap().global_written_bytes
                };
                let mut rotated = gpu.poisoned::<bf16>([3, ROTARY]);
                let bytes = stored(Some(&mut rotated)) - stored(None);
                assert_eq!(bytes, 3 * ROTARY as u64 * 2, "{heads} heads, {splits:?}, {arch}");
                gpu.assert_guards(&rotated);
            }
        }
    }
}

#[test]
fn bad_calls_are_refused() {
    #[derive(Clone, Default)]
    struct Options {
        softcap: f32,
        scale: Option<f32>,
        splits: Splits,
    }
    Refusals::new(Options::default(), |stream, tensors, options: Options| {
        let inputs = MlaDecodeInputs {
            q: tensors.input::<bf16>("q"),
            kv_pool: tensors.input::<bf16>("kv_pool"),
            kv_scale: tensors.optional_input("kv_scale"),
            keys: LatentKeys::Slots {
                kv_indptr: tensors.input("kv_indptr"),
                kv_indices: tensors.input("kv_indices"),
            },
            cu_seqlens_q: tensors.optional_input("cu_seqlens_q"),
            rope: None,
        };
        let outputs = MlaDecodeOutputs {
            out: tensors.output::<bf16>("out"),
            lse: tensors.optional_output("lse"),
            k_pe_out: None,
        };
        let Options { softcap, scale, splits } = options;
        let options = MlaOptions { softcap, scale, longest: None, tile: None, splits };
        let workspace = DecodeWorkspace { partials: tensors.optional_output("workspace"), tickets: None };
        mla_decode_rope(stream, inputs, outputs, workspace, &options)
    })
    .input::<bf16>("q", [2, 4, 576])
    .input::<bf16>("kv_pool", [100, 1, 1, 576])
    .input::<f32>("kv_scale", [1])
    .input::<i32>("kv_indptr", [3])
    .input::<i32>("kv_indices", [90])
    .input::<i32>("cu_seqlens_q", [3])
    .output::<bf16>("out", [2, 4, 512])
    .output::<f32>("lse", [2, 4])
    .output::<f32>("workspace", [2 * 2 * 4 * 514])
    .accepts(|_| {})
    .accepts(|call| ["cu_seqlens_q", "kv_scale", "lse"].iter().for_each(|name| call.without(name)))
    .refuses(kind!(Shape), &["kv_pool", "576"], |call| call.shape("kv_pool", [100, 1, 1, 570]))
    .refuses(kind!(Shape), &["kv_pool", "576"], |call| call.shape("kv_pool", [100, 1, 2, 576]))
    .refuses(kind!(Unsupported), &["400"], |call| call.shape("out", [2, 4, 400]))
    .refuses(kind!(Shape), &["lse"], |call| call.shape("lse", [2, 5]))
    .refuses(kind!(Shape), &["kv_scale"], |call| call.shape("kv_scale", [2]))
    .refuses(kind!(Shape), &["kv_indptr"], |call| call.shape("kv_indptr", [4]))
    .accepts(|call| call.options.splits = Splits::Count(2))
    .refuses(kind!(Shape), &["workspace: shape [8223]", "8224"], |call| {
        call.options.splits = Splits::KeysPerSplit(64);
        call.shape("workspace", [8223]);
    })
    .refuses(kind!(Stride), &["workspace"], |call| call.strides("workspace", [2]))
    .refuses(kind!(Argument), &["keys_per_split"], |call| call.options.splits = Splits::KeysPerSplit(63))
    .refuses(kind!(Argument), &["nsplit"], |call| call.options.splits = Splits::Count(0))
    .refuses(kind!(Argument), &["scale"], |call| call.options.scale = Some(f32::NAN))
    .refuses(kind!(Argument), &["softcap"], |call| call.options.softcap = -1.0)
    .refuses_other_devices()
    .refuses_overlaps();
}

/// A list of another query's length.
#[test]
fn bad_lists_are_refused() {
    for gpu in kit::devices() {
        let (q, cache) = (gpu.poisoned::<bf16>([2, 4, 576]), gpu.poisoned::<bf16>([4, 16, 1, 576]));
        let lists = gpu.upload(&[0; 24], [3, 8]);
        let mut out = gpu.poisoned::<bf16>([2, 4, 512]);
        let inputs = SparseMlaInputs {
            q: q.view(),
            kv_cache: cache.view(),
            kv_scale: None,
            topk_indices: lists.view(),
        };
        let outputs = AttentionOutputs { out: out.view_mut(), lse: None };
        let space = DecodeWorkspace::default();
        let refused = unified_attn_sparse_mla(gpu.stream(), inputs, outputs, space, &MlaOptions::default());
        kit::assert_error(refused, kind!(Shape), &["topk_indices", "[3, 8]"]);
    }
}
