//! Attention of prompts over caches, on the emulated GPUs (and real ones where there are some): against the f64 references, and
//! the operators against each other.

use crate::common::integers;
use hk_attention::{
    AttentionOutputs, CacheScales, CustomMask, DecodeWorkspace, Descales, ExtendInputs, ExtendOptions,
    KvLayout, OPERATORS, PaPrefillInputs, PaPrefillOptions, PagedKv, Pages, RopeCacheInputs,
    RopeCacheOutputs, Splits, UnifiedInputs, UnifiedOptions, chunked_pa_prefill, extend_attn, pa_prefill,
    reference::element_of, rope_reshape_and_cache, unified_attn,
};
use hk_core::plan::rope::{Positions, Rope, RopeDirection, RopeSpan, RopeStyle, RopeTableWidth, RopeTables};
use hk_core::registry::{Described, HostCall, HostTensor, Scalar};
use hk_core::{Arch, Element, Float, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, bf16, f16};
use hk_testkit::compare::{compare, compare_outputs};
use hk_testkit::{
    Call, CallElement, Fill, Gpu, Place, Refusals, Tensors, assert_bits, check_call, config, devices, full,
    host_call, kind, proptest::prelude::*, proptest::sample::select, sanitized_devices,
};

pub const LAYOUTS: [(&str, KvLayout); 4] = [
    ("nhd", KvLayout::Nhd),
    ("hnd", KvLayout::Hnd),
    ("paged", KvLayout::Paged),
    ("paged_shuffled", KvLayout::PagedShuffled),
];

/// An element of a cache.
pub trait Cached: Element {
    /// What slots hold that no sequence has.
    const UNUSED: Self;
    /// Of the elements, whose products have the size of normal ones.
    const SCALE: f32 = 1.0;
    fn of(x: f32) -> Self;
}

macro_rules! cached {
    ($($t:ty: $unused:expr, $of:expr;)*) => {$(
        impl Cached for $t {
            const UNUSED: Self = $unused;
            fn of(x: f32) -> Self {
                $of(x)
            }
        }
    )*};
}

cached! {
    bf16: bf16::NAN, <bf16 as Float>::from_f32;
    f16: f16::NAN, <f16 as Float>::from_f32;
    f32: f32::NAN, |x| x;
    Fp8E4M3: Fp8E4M3::NAN, Fp8E4M3::from_f32_saturating;
    Fp8E4M3Fnuz: Fp8E4M3Fnuz::NAN, Fp8E4M3Fnuz::from_f32_saturating;
}

impl Cached for i8 {
    const UNUSED: Self = Self::MAX;
    const SCALE: f32 = 1.0 / 32.0;
    fn of(x: f32) -> Self {
        (x / Self::SCALE) as Self
    }
}

/// Sequences whose keys are in pages, in slots, or packed.
#[derive(Debug, Clone)]
pub struct Case {
    /// Queries and keys of each sequence.
    pub lens: Vec<[usize; 2]>,
    pub kv_heads: usize,
    pub group: usize,
    /// Of queries and keys, of values.
    pub columns: [usize; 2],
    pub layout: (&'static str, KvLayout),
    pub page: usize,
    pub seed: u64,
    /// Which pages sequences have.
    pub order: u64,
}

impl Case {
    pub fn new(lens: &[[usize; 2]], [kv_heads, group]: [usize; 2], columns: [usize; 2]) -> Self {
        Self {
            lens: lens.to_vec(),
            kv_heads,
            group,
            columns,
            layout: LAYOUTS[0],
            page: 16,
            seed: 1,
            order: 2,
        }
    }

    /// The dense kernel serves it in 16 bits.
    pub fn is_dense(&self) -> bool {
        let rows = matches!(self.layout.1, KvLayout::Nhd | KvLayout::Hnd);
        rows && self.page.is_multiple_of(16) && self.columns.iter().all(|n| n.is_multiple_of(8))
    }

    pub fn total(&self, of: usize) -> usize {
        self.lens.iter().map(|lens| lens[of]).sum()
    }

    /// Elements `[rows, heads, columns]` of sequence `n`, the same whichever others there are.
    pub fn drawn<T: Cached>(&self, n: usize, what: u64, len: usize) -> Vec<T> {
        let seed = self.seed.wrapping_mul(31).wrapping_add(what) ^ (n as u64) << 20;
        Fill::Normal.elements::<f32>(len, seed).into_iter().map(T::of).collect()
    }

    pub fn q<T: Cached>(&self) -> HostTensor {
        let row = self.kv_heads * self.group * self.columns[0];
        let of = |(n, lens): (usize, &[usize; 2])| self.drawn::<T>(n, 0, lens[0] * row);
        let all: Vec<T> = self.lens.iter().enumerate().flat_map(of).collect();
        HostTensor::new([self.total(0), self.kv_heads * self.group, self.columns[0]], &all).unwrap()
    }

    /// Keys or values of a sequence.
    pub fn rows<T: Cached>(&self, n: usize, values: bool) -> Vec<T> {
        let row = self.kv_heads * self.columns[usize::from(values)];
        self.drawn(n, 1 + u64::from(values), self.lens[n][1] * row)
    }

    /// Keys or values of all sequences: all of them, or of their queries only.
    pub fn packed<T: Cached>(&self, values: bool, fresh: bool) -> HostTensor {
        let row = self.kv_heads * self.columns[usize::from(values)];
        let of = |n: usize| {
            let [queries, keys] = self.lens[n];
            let first = if fresh { keys - queries } else { 0 };
            self.rows::<T>(n, values)[first * row..].to_vec()
        };
        let all: Vec<T> = (0..self.lens.len()).flat_map(of).collect();
        let shape = [all.len() / row, self.kv_heads, self.columns[usize::from(values)]];
        HostTensor::new(shape, &all).unwrap()
    }

    pub fn starts(&self, of: impl Fn(&[usize; 2]) -> usize) -> HostTensor {
        let mut starts = vec![0i32];
        self.lens.iter().for_each(|lens| starts.push(starts[starts.len() - 1] + of(lens) as i32));
        ints(&starts)
    }

    /// A permutation of the first numbers.
    pub fn permutation(&self, n: usize) -> Vec<usize> {
        let mut left: Vec<usize> = (0..n).collect();
        integers(self.order, n, 1 << 30).into_iter().map(|at| left.swap_remove(at % left.len())).collect()
    }

    /// Caches and the block table; the first `used` keys of sequences are in them, all other slots hold what spoils results.
    pub fn cache<C: Cached>(&self, used: impl Fn(&[usize; 2]) -> usize) -> [HostTensor; 3] {
        let pages_of = |lens: &[usize; 2]| lens[1].div_ceil(self.page);
        let width = self.lens.iter().map(pages_of).max().unwrap_or(0) + 1;
        let count = self.lens.iter().map(pages_of).sum::<usize>() + 2;
        let pages = self.permutation(count);
        let mut next = pages.into_iter();
        let mut table = vec![i32::MIN; self.lens.len() * width];
        let sizes = [count, self.page, self.kv_heads];
        let piece = 16 / size_of::<C>();
        let shapes = [
            self.layout.1.key_shape::<C>([sizes[0], sizes[1], sizes[2], self.columns[0]]),
            self.layout.1.value_shape::<C>([sizes[0], sizes[1], sizes[2], self.columns[1]]),
        ];
        let mut caches = shapes.clone().map(|shape| vec![C::UNUSED; shape.iter().product()]);
        for (n, lens) in self.lens.iter().enumerate() {
            for p in 0..pages_of(lens) {
                table[n * width + p] = next.next().unwrap() as i32;
            }
            for (values, cache) in caches.iter_mut().enumerate() {
                let columns = self.columns[values];
                let rows = self.rows::<C>(n, values == 1);
                for (i, x) in rows.into_iter().take(used(lens) * self.kv_heads * columns).enumerate() {
                    let (row, col) = (i / columns, i % columns);
                    let (key, head) = (row / self.kv_heads, row % self.kv_heads);
                    let slot = table[n * width + key / self.page] as usize * self.page + key % self.page;
                    let of = [self.page, self.kv_heads, columns];
                    cache[element_of(self.layout.1, values == 1, piece, of, [slot, head, col])] = x;
                }
            }
        }
        let [k, v] = shapes;
        [
            HostTensor::new(k, &caches[0]).unwrap(),
            HostTensor::new(v, &caches[1]).unwrap(),
            HostTensor::new([self.lens.len(), width], &table).unwrap(),
        ]
    }

    pub fn layout(&self) -> (&'static str, Scalar) {
        ("layout", Scalar::Choice(self.layout.0))
    }

    pub fn unified<T: Cached, C: Cached>(&self) -> Given {
        let [k, v, table] = self.cache::<C>(|lens| lens[1]);
        let lens: Vec<i32> = self.lens.iter().map(|lens| lens[1] as i32).collect();
        let tensors = vec![
            ("q", self.q::<T>()),
            ("k_cache", k),
            ("v_cache", v),
            ("block_table", table),
            ("cu_seqlens_q", self.starts(|lens| lens[0])),
            ("seqused_k", ints(&lens)),
        ];
        Given { op: "unified_attn", tensors, scalars: vec![self.layout()], wanted: vec!["lse"] }
    }

    pub fn varlen<T: Cached>(&self, paged: bool) -> Given {
        let mut tensors = vec![
            ("q", self.q::<T>()),
            ("cu_seqlens_q", self.starts(|lens| lens[0])),
            ("cu_seqlens_k", self.starts(|lens| lens[1])),
        ];
        if paged {
            let [k, v, table] = self.cache::<T>(|lens| lens[1]);
            tensors.extend([("k", k), ("v", v), ("block_table", table)]);
        } else {
            tensors.extend([("k", self.packed::<T>(false, false)), ("v", self.packed::<T>(true, false))]);
        }
        let causal = ("causal", Scalar::Bool(true));
        Given { op: "mha_varlen", tensors, scalars: vec![self.layout(), causal], wanted: vec!["lse"] }
    }

    pub fn prefill<T: Cached, C: Cached>(&self, op: &'static str) -> Given {
        let single = |lens: &[usize; 2]| op == "chunked_pa_prefill" && lens[0] == 1;
        let [k, v, table] = self.cache::<C>(|lens| if single(lens) { lens[1] } else { lens[1] - lens[0] });
        let lens: Vec<i32> = self.lens.iter().map(|lens| lens[1] as i32).collect();
        let mut fresh = [false, true].map(|values| self.packed::<T>(values, true));
        // Keys of single tokens come from the cache.
        for tensor in &mut fresh {
            let row = tensor.shape()[1..].iter().product::<usize>();
            let mut elements = tensor.elements::<T>().unwrap();
            let mut at = 0;
            for lens in &self.lens {
                if single(lens) {
                    elements[at * row..][..row].fill(T::UNUSED);
                }
                at += lens[0];
            }
            *tensor = HostTensor::new(tensor.shape(), &elements).unwrap();
        }
        let [fresh_k, fresh_v] = fresh;
        let tensors = vec![
            ("q", self.q::<T>()),
            ("k", fresh_k),
            ("v", fresh_v),
            ("k_cache", k),
            ("v_cache", v),
            ("block_table", table),
            ("cu_seqlens_q", self.starts(|lens| lens[0])),
            ("seq_lens", ints(&lens)),
        ];
        Given { op, tensors, scalars: vec![self.layout()], wanted: vec![] }
    }

    /// The last token of each sequence.
    pub fn decode<T: Cached, C: Cached>(&self) -> Given {
        let given = self.unified::<T, C>();
        let names = [("seqused_k", "seq_lens"), ("q", "q"), ("k_cache", "k_cache"), ("v_cache", "v_cache")];
        let names = names.into_iter().chain([("block_table", "block_table")]);
        let tensors = names.map(|(from, to)| (to, given.get(from).clone())).collect();
        let given = Given { op: "pa_decode", tensors, ..given };
        if C::SCALE == 1.0 {
            return given;
        }
        let scale = || HostTensor::new([1], &[C::SCALE]).unwrap();
        given.with("k_scale", scale()).with("v_scale", scale())
    }

    pub fn extend<T: Cached, C: Cached>(&self) -> Given {
        let slots = self.total(1) + 3;
        let order = self.permutation(slots);
        let (mut pools, mut list) = (vec![], vec![]);
        for values in [false, true] {
            let row = self.kv_heads * self.columns[usize::from(values)];
            let mut pool = vec![C::UNUSED; slots * row];
            let mut next = order.iter();
            list = vec![];
            for (n, lens) in self.lens.iter().enumerate() {
                let rows = self.rows::<C>(n, values);
                for key in rows.chunks(row).take(lens[1] - lens[0]) {
                    let slot = *next.next().unwrap();
                    pool[slot * row..][..row].copy_from_slice(key);
                    list.push(slot as i32);
                }
            }
            let shape = [slots, self.kv_heads, self.columns[usize::from(values)]];
            pools.push(HostTensor::new(shape, &pool).unwrap());
        }
        let v_pool = pools.pop().unwrap();
        let tensors = vec![
            ("q", self.q::<T>()),
            ("k_ext", self.packed::<T>(false, true)),
            ("v_ext", self.packed::<T>(true, true)),
            ("k_pool", pools.pop().unwrap()),
            ("v_pool", v_pool),
            ("qo_indptr", self.starts(|lens| lens[0])),
            ("kv_indptr", self.starts(|lens| lens[1] - lens[0])),
            ("kv_indices", ints(&list)),
        ];
        Given { op: "extend_attn", tensors, scalars: vec![], wanted: vec!["lse"] }
    }
}

pub fn ints(values: &[i32]) -> HostTensor {
    HostTensor::new([values.len()], values).unwrap()
}

/// A call in the making.
#[derive(Debug, Clone)]
pub struct Given {
    pub op: &'static str,
    pub tensors: Vec<(&'static str, HostTensor)>,
    pub scalars: Vec<(&'static str, Scalar)>,
    pub wanted: Vec<&'static str>,
}

impl Given {
    pub fn with(mut self, name: &'static str, tensor: HostTensor) -> Self {
        self.tensors.retain(|(other, _)| *other != name);
        self.tensors.push((name, tensor));
        self
    }

    pub fn floats(self, name: &'static str, shape: &[usize], seed: u64) -> Self {
        let values: Vec<f32> = Fill::Normal.elements(shape.iter().product(), seed);
        let values: Vec<f32> = values.into_iter().map(|x| 0.3 + 0.1 * x.abs()).collect();
        self.with(name, HostTensor::new(shape, &values).unwrap())
    }

    pub fn scalar(mut self, name: &'static str, value: Scalar) -> Self {
        self.scalars.push((name, value));
        self
    }

    /// By the kernels of prompts.
    pub fn of_prompts(self) -> Self {
        self.scalar("tile", Scalar::Choice("short"))
    }

    /// By the general kernel: with an option that changes nothing.
    pub fn generally(self) -> Self {
        let heads = self.get("q").shape()[1];
        self.with("alibi", HostTensor::new([heads], &vec![0f32; heads]).unwrap())
    }

    pub fn get(&self, name: &str) -> &HostTensor {
        &self.tensors.iter().find(|(other, _)| *other == name).unwrap().1
    }

    /// With integers changed.
    pub fn changed(self, name: &'static str, change: impl FnOnce(&mut [i32])) -> Self {
        let tensor = self.get(name);
        let (shape, mut values) = (tensor.shape().to_vec(), tensor.elements::<i32>().unwrap());
        change(&mut values);
        self.with(name, HostTensor::new(shape, &values).unwrap())
    }

    pub fn call(&self) -> HostCall {
        host_call(OPERATORS, self.op, &self.tensors, &self.scalars, &self.wanted).unwrap()
    }

    #[track_caller]
    pub fn check(&self) {
        check_call(&self.call()).unwrap();
    }

    /// The same on one device, for types that others do not have.
    #[track_caller]
    pub fn check_on(&self, gpu: &Gpu) {
        let call = self.call();
        let outputs = call.operator().execute(gpu.stream(), &call).unwrap();
        for comparison in compare_outputs(call.operator(), &call, &outputs).unwrap() {
            assert!(comparison.passed(), "{} on {}: {comparison}", self.op, gpu.spec());
        }
    }

    /// `out` on each device.
    #[track_caller]
    pub fn outs(&self) -> Vec<HostTensor> {
        let call = self.call();
        let run = |stream: &Stream| call.operator().execute(stream, &call).unwrap().swap_remove(0).1;
        devices().iter().map(|gpu| run(gpu.stream())).collect()
    }

    /// Rows of `out` that are NaN, with every sanitizer on, after a comparison with the reference.
    #[track_caller]
    pub fn poisoned_rows(&self) -> Vec<usize> {
        let call = self.call();
        let want = (call.operator().reference)(&call).unwrap();
        let mut all = vec![];
        for gpu in sanitized_devices() {
            for (name, got) in call.operator().execute(gpu.stream(), &call).unwrap() {
                let tolerance = call.operator().arg(name).unwrap().role.output().unwrap();
                let want = &want.iter().find(|(other, _)| *other == name).unwrap().1;
                compare(name, got.dtype(), &got.to_f64(), want, tolerance).assert();
                if name == "out" {
                    let row = got.shape()[1] * got.shape()[2];
                    let is_nan = |row: &[f64]| row.iter().all(|x| x.is_nan());
                    let rows = got.to_f64();
                    let nan = rows.chunks(row).enumerate().filter(|(_, row)| is_nan(row));
                    all.push(nan.map(|(i, _)| i).collect::<Vec<_>>());
                }
            }
        }
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
        all.swap_remove(0)
    }
}

/// Lengths of queries and keys that lean to the borders of tiles.
fn lens() -> impl Strategy<Value = Vec<[usize; 2]>> {
    let queries = select(vec![0usize, 1, 2, 3, 5, 17, 65, 129]);
    let context = select(vec![0usize, 1, 3, 15, 16, 17, 31, 33, 64, 65, 100]);
    prop::collection::vec((queries, context).prop_map(|(q, before)| [q, q + before]), 1..4)
}

fn cases() -> impl Strategy<Value = Case> {
    let heads = (1usize..3, select(vec![1usize, 2, 3, 6, 8]));
    let columns = select(vec![
        [16, 16],
        [32, 32],
        [40, 24],
        [64, 64],
        [18, 13],
        [1, 3],
        [17, 17],
        [80, 128],
        [192, 128],
    ]);
    let pages = (select(LAYOUTS.to_vec()), select(vec![1usize, 3, 16, 64, 128]));
    (lens(), heads, columns, pages, any::<u32>(), any::<u32>()).prop_map(
        |(lens, (kv_heads, group), mut columns, (layout, mut page), seed, order)| {
            // Pieces of 16 bytes, the largest of 16 elements.
            if matches!(layout.1, KvLayout::Paged | KvLayout::PagedShuffled) {
                columns = columns.map(|n: usize| n.next_multiple_of(16));
            }
            if layout.1 == KvLayout::PagedShuffled {
                page = page.next_multiple_of(16);
            }
            // Plain loops take their time.
            let pairs: usize = lens.iter().map(|[q, k]| q * k).sum();
            if pairs * kv_heads * group * (columns[0] + columns[1]) > 2_000_000 {
                columns = [16, 32];
            }
            let (seed, order) = (seed.into(), order.into());
            Case { lens, kv_heads, group, columns, layout, page, seed, order }
        },
    )
}

/// Which of an operator's options a call has, and its types: bits.
pub fn maybe(bits: u32, bit: u32) -> bool {
    bits >> bit & 1 == 1
}

/// With options by bits; names that the operator lacks are left out.
pub fn with_options(case: &Case, mut given: Given, bits: u32) -> Given {
    let (n, heads) = (case.lens.len(), case.kv_heads * case.group);
    let operator = OPERATORS.iter().find(|op| op.name == given.op).unwrap();
    let tensors: [(&'static str, Vec<usize>); 8] = [
        ("alibi", if maybe(bits, 10) { vec![heads] } else { vec![n, heads] }),
        ("sink", vec![heads]),
        ("qq_bias", vec![130, 131]),
        ("q_descale", if maybe(bits, 11) { vec![1] } else { vec![n, heads] }),
        ("k_descale", if maybe(bits, 12) { vec![1] } else { vec![n, case.kv_heads] }),
        ("v_descale", if maybe(bits, 13) { vec![1] } else { vec![n, case.kv_heads] }),
        ("k_scale", if maybe(bits, 12) { vec![1] } else { vec![n, case.kv_heads] }),
        ("v_scale", if maybe(bits, 13) { vec![1] } else { vec![n, case.kv_heads] }),
    ];
    for (i, (name, shape)) in tensors.into_iter().enumerate() {
        let has = given.tensors.iter().any(|(given, _)| *given == name);
        if maybe(bits, i as u32) && operator.arg(name).is_some() && !has {
            given = given.floats(name, &shape, case.seed ^ i as u64);
        }
    }
    let window = [0, 7, 40, 127][(bits >> 14 & 3) as usize];
    let scalars = [
        ("window", Scalar::Int(window)),
        ("softcap", Scalar::Float(3.0)),
        ("scale", Scalar::Float(0.25)),
        ("causal", Scalar::Bool(false)),
        ("skip_decode", Scalar::Bool(true)),
    ];
    for (i, (name, value)) in scalars.into_iter().enumerate() {
        if maybe(bits, 16 + i as u32) && operator.scalars.iter().any(|s| s.name == name) {
            given = given.scalar(name, value);
        }
    }
    if given.op == "extend_attn" && maybe(bits, 22) {
        let masks = case.starts(|lens| lens[0] * lens[1]);
        let bytes = *masks.elements::<i32>().unwrap().last().unwrap() as usize;
        let bytes: Vec<u8> = integers(case.seed, bytes, 3).into_iter().map(|x| x as u8).collect();
        given = given
            .with("mask_indptr", masks)
            .with("custom_mask", HostTensor::new([bytes.len()], &bytes).unwrap())
            .scalar("skip_prefix_mask", Scalar::Bool(maybe(bits, 23)));
    }
    given
}

/// The operators with queries of type `T`, and a cache of `C`.
fn given<T: Cached, C: Cached>(case: &Case, op: usize) -> Given {
    let (given, scales) = match op {
        0 => (case.unified::<T, C>(), ["k_descale", "v_descale"]),
        1 => (case.extend::<T, C>(), ["k_scale", "v_scale"]),
        2 => (case.prefill::<T, C>("pa_prefill"), ["k_scale", "v_scale"]),
        _ => (case.prefill::<T, C>("chunked_pa_prefill"), ["k_scale", "v_scale"]),
    };
    if C::SCALE == 1.0 {
        return given;
    }
    let scale = || HostTensor::new([1], &[C::SCALE]).unwrap();
    given.with(scales[0], scale()).with(scales[1], scale())
}

proptest! {
    #![proptest_config(config())]

    /// Options alone and together, types of queries and caches, layouts; slots that no sequence has spoil nothing.
    #[test]
    fn matches_the_reference(case in cases(), bits in any::<u32>()) {
        for op in 0..4 {
            // Another set of options for each.
            let bits = bits.rotate_left(7 * op as u32);
            let of = match bits >> 26 & 7 {
                0 => given::<f16, f16>,
                1 => given::<f16, i8>,
                2 => given::<f32, f32>,
                3 => given::<f32, i8>,
                4 => given::<bf16, i8>,
                _ => given::<bf16, bf16>,
            };
            with_options(&case, of(&case, op), bits).check();
        }
    }

    /// The fp8 of each device.
    #[test]
    fn fp8_matches_the_reference(case in cases(), bits in any::<u32>()) {
        for gpu in devices() {
            let fnuz = gpu.arch() == Arch::Gfx942;
            let output = Scalar::Choice(if fnuz { "fp8e4m3fnuz" } else { "fp8e4m3" });
            for op in 0..4 {
                let bits = bits.rotate_left(5 * op as u32);
                let of = match (op == 0 && maybe(bits, 28), fnuz) {
                    (true, true) => given::<Fp8E4M3Fnuz, Fp8E4M3Fnuz>,
                    (true, false) => given::<Fp8E4M3, Fp8E4M3>,
                    (false, true) => given::<bf16, Fp8E4M3Fnuz>,
                    (false, false) => given::<f16, Fp8E4M3>,
                };
                let mut given = with_options(&case, of(&case, op), bits);
                if op == 0 && maybe(bits, 29) {
                    given = given.scalar("output", output);
                    if maybe(bits, 30) {
                        given = given.with("out_scale", HostTensor::new([1], &[1.7f32]).unwrap());
                    }
                }
                given.check_on(&gpu);
            }
        }
    }

    #[test]
    fn pages_in_any_order_are_the_same(case in cases(), order in any::<u32>()) {
        let other = Case { order: order.into(), ..case.clone() };
        for op in 0..4 {
            prop_assert_eq!(given::<bf16, bf16>(&case, op).outs(), given::<bf16, bf16>(&other, op).outs());
        }
        prop_assert_eq!(case.varlen::<bf16>(true).outs(), other.varlen::<bf16>(true).outs());
    }

    /// Tiles of keys begin alike.
    #[test]
    fn pages_are_as_packed_keys(case in cases()) {
        let packed = || case.varlen::<f16>(false);
        let paged = || [case.varlen::<f16>(true), case.unified::<f16, f16>().of_prompts()];
        if case.is_dense() {
            let want = packed().outs();
            for paged in paged() {
                prop_assert_eq!(&paged.outs(), &want);
            }
        }
        let want = packed().generally().outs();
        for paged in paged() {
            prop_assert_eq!(&paged.generally().outs(), &want);
        }
    }
}

/// Where the context is whole tiles of keys, keys beside the cache are in the tiles in which they are among all.
#[test]
fn fresh_keys_are_as_those_of_a_cache() {
    for (layout, page) in [(LAYOUTS[0], 1), (LAYOUTS[2], 16), (LAYOUTS[3], 64)] {
        // Single tokens over pieces have a kernel of their own.
        let few = if page == 1 { [1, 65] } else { [2, 66] };
        let lens = [[20, 84], few, [33, 33], [0, 64], [3, 35]];
        let case = Case { layout, page, ..Case::new(&lens, [2, 3], [32, 64]) };
        let want = case.unified::<bf16, bf16>().outs();
        assert_eq!(case.prefill::<bf16, bf16>("pa_prefill").outs(), want, "{layout:?}");
        assert_eq!(case.prefill::<bf16, bf16>("chunked_pa_prefill").outs(), want, "{layout:?}");
        assert_eq!(
            case.extend::<bf16, bf16>().scalar("causal", Scalar::Bool(true)).outs(),
            want,
            "{layout:?}"
        );
    }
}

/// Sequences alone have the bits that they have in a batch, with a window, too.
#[test]
fn a_sequence_is_the_same_in_any_batch() {
    let lens = [[3, 70], [1, 33], [140, 150], [0, 9], [17, 130]];
    for group in [1, 2, 3] {
        let case = Case::new(&lens, [2, group], [64, 48]);
        for op in 0..4 {
            let run = |case: &Case| -> Vec<Vec<bf16>> {
                let mut given = given::<bf16, bf16>(case, op);
                if op != 1 {
                    given = given.scalar("window", Scalar::Int(29)).of_prompts();
                }
                given.outs().iter().map(|t| t.elements().unwrap()).collect()
            };
            let all = run(&case);
            let row = 2 * group * 48;
            let mut at = 0;
            for (n, &[queries, keys]) in lens.iter().enumerate() {
                // The elements of a sequence follow from its place.
                let mut alone = vec![[0, 0]; n];
                alone.push([queries, keys]);
                let alone = Case { lens: alone, order: 9, ..case.clone() };
                for (got, all) in run(&alone).iter().zip(&all) {
                    assert_eq!(got[..], all[at * row..][..queries * row], "sequence {n}, {op}");
                }
                at += queries;
            }
        }
    }
}

/// Single tokens beside prompts have a launch of their own, drafts tiles of few queries.
#[test]
fn single_tokens_and_drafts() {
    let mixed = [[1, 200], [40, 90], [1, 33], [0, 0], [1, 700], [3, 3]];
    let drafts = [[4, 200], [1, 1], [0, 9], [3, 700]];
    for (heads, columns) in [([2, 8], [64, 64]), ([1, 20], [128, 128]), ([2, 3], [40, 256])] {
        for lens in [&mixed[..], &drafts, &mixed[..1]] {
            let case = Case { page: 32, ..Case::new(lens, heads, columns) };
            case.unified::<bf16, bf16>().check();
            case.unified::<f16, f16>().scalar("window", Scalar::Int(70)).check();
            given::<bf16, bf16>(&case, 3).check();
            let few = case.unified::<bf16, bf16>().scalar("tile", Scalar::Choice("few"));
            few.clone().floats("alibi", &[lens.len(), heads[0] * heads[1]], 5).check();
            few.scalar("keys_per_split", Scalar::Count(64)).check();
        }
    }
}

/// A tile with a number of keys, or of splits, is batch-invariant.
#[test]
fn splits_of_few_queries_are_the_same_in_any_batch() {
    let lens = [[3, 300], [1, 33], [5, 1000], [0, 9], [2, 129]];
    for (group, splits) in [(3, ("keys_per_split", 128)), (3, ("nsplit", 3)), (8, ("keys_per_split", 128))] {
        let case = Case::new(&lens, [2, group], [128, 64]);
        let run = |case: &Case| -> Vec<Vec<bf16>> {
            // Groups of 8: some batches have more than 16 rows of a sequence.
            let of = if group == 3 { Case::unified::<bf16, bf16> } else { Case::unified::<bf16, i8> };
            let given = of(case).scalar("tile", Scalar::Choice("few"));
            let given = given.scalar(splits.0, Scalar::Count(splits.1));
            given.outs().iter().map(|t| t.elements().unwrap()).collect()
        };
        let (all, row) = (run(&case), 2 * group * 64);
        let mut at = 0;
        for (n, &[queries, keys]) in lens.iter().enumerate() {
            let mut alone = vec![[0, 0]; n];
            alone.push([queries, keys]);
            let alone = Case { lens: alone, order: 9, ..case.clone() };
            for (got, all) in run(&alone).iter().zip(&all) {
                assert_eq!(got[..], all[at * row..][..queries * row], "sequence {n}, {splits:?}");
            }
            at += queries;
        }
    }
}

#[test]
fn large_pages_and_wide_heads() {
    for (layout, page) in [(LAYOUTS[0], 1024), (LAYOUTS[1], 1024), (LAYOUTS[2], 1024), (LAYOUTS[3], 1024)] {
        Case { layout, page, ..Case::new(&[[5, 40], [2, 2]], [1, 2], [16, 32]) }
            .unified::<bf16, bf16>()
            .check();
    }
    Case::new(&[[5, 40]], [1, 2], [512, 512]).unified::<f16, f16>().check();
    given::<bf16, i8>(&Case::new(&[[5, 40]], [1, 2], [288, 256]), 1).check();
    // More heads than rows of a tile.
    Case::new(&[[2, 9], [1, 4]], [1, 150], [8, 8]).unified::<bf16, bf16>().check();
}

/// Mixed lengths, contexts at the borders of pages and tiles, prefixes of none and one.
#[test]
fn lengths_of_prompts_and_decoding() {
    let mixed = [[1, 1], [5, 18], [129, 463], [0, 0]];
    for (heads, columns, page) in [([1, 8], 64, 16), ([8, 1], 128, 64), ([1, 6], 16, 3)] {
        let case = Case { page, ..Case::new(&mixed, heads, [columns, columns]) };
        case.unified::<bf16, bf16>().check();
        case.unified::<bf16, bf16>().scalar("window", Scalar::Int(255)).check();
    }
    let new = [1, 3, 17, 65, 129, 0];
    for (i, context) in [0, 1, 63, 64, 65].into_iter().enumerate() {
        let lens: Vec<_> =
            (0..4).map(|n| new[(i + n) % 6]).map(|queries| [queries, queries + context]).collect();
        let page = [8, 16, 32][i % 3];
        let case = Case { page, layout: LAYOUTS[2], ..Case::new(&lens, [1, 2], [48, 32]) };
        case.prefill::<bf16, bf16>("pa_prefill").check();
        given::<f16, i8>(&case, 3).check();
    }
    for (lens, heads) in [
        (vec![[512, 512]; 2], [2, 2]),
        (vec![[333, 443]; 2], [5, 1]),
        (vec![[1, 2]; 2], [4, 1]),
        (vec![[1, 1], [0, 65], [17, 17]], [2, 1]),
    ] {
        Case::new(&lens, heads, [16, 16]).extend::<bf16, bf16>().check();
    }
}

/// A custom mask of the keys that causality leaves, and a tree of tokens below it.
#[test]
fn masks_of_triangles_are_causal() {
    let case = Case::new(&[[40, 73], [1, 1], [0, 9], [130, 130]], [1, 3], [32, 32]);
    let masked = |sees: fn(usize, usize) -> bool, causal: bool| {
        let bytes = case.lens.iter().flat_map(|&[queries, keys]| {
            let at = move |i: usize| u8::from(sees(i / keys + keys - queries, i % keys));
            (0..queries * keys).map(at)
        });
        let bytes: Vec<u8> = bytes.collect();
        case.extend::<bf16, bf16>()
            .with("custom_mask", HostTensor::new([bytes.len()], &bytes).unwrap())
            .with("mask_indptr", case.starts(|lens| lens[0] * lens[1]))
            .scalar("causal", Scalar::Bool(causal))
    };
    let causal = case.extend::<bf16, bf16>().outs();
    assert_eq!(masked(|place, key| key <= place, false).outs(), causal);
    assert_eq!(masked(|_, _| true, true).outs(), causal);
    // Each token has one parent.
    let tree = masked(|place, key| key == place || place / 2 == key || key % 7 == 3 && key < place, false);
    tree.check();
    assert_ne!(tree.outs(), causal);
}

/// The rows of queries that a mistake on the device makes NaN, and no other.
#[test]
fn queries_that_see_what_is_not_there_are_nan() {
    // Rows 0..20 and 20..50; keys 0..36 and 0..40, in pages of 16.
    let case = Case::new(&[[20, 36], [30, 40]], [2, 2], [32, 32]);
    let unified = || case.unified::<bf16, bf16>();
    // Of the second sequence, page 1 has keys 16 to 31, seen from row 6 on, page 2 those from 32 on, seen from row 22 on.
    let outside = |page: usize, entry: i32| move |table: &mut [i32]| table[4 + page] = entry;
    assert_eq!(unified().poisoned_rows(), [0; 0]);
    assert_eq!(
        unified().changed("block_table", outside(1, -1)).poisoned_rows(),
        (26..50).collect::<Vec<_>>()
    );
    assert_eq!(unified().changed("block_table", outside(2, 8)).poisoned_rows(), (42..50).collect::<Vec<_>>());
    let window = |given: Given| given.scalar("window", Scalar::Int(3));
    // Keys 16 to 31 are seen by rows 6 to 24.
    let given = window(unified().changed("block_table", outside(1, i32::MAX)));
    assert_eq!(given.poisoned_rows(), (26..45).collect::<Vec<_>>());
    for len in [-1, i32::MIN, 65, i32::MAX] {
        assert_eq!(
            unified().changed("seqused_k", |lens| lens[1] = len).poisoned_rows(),
            (20..50).collect::<Vec<_>>()
        );
    }
    // Queries before the first key see none.
    assert_eq!(unified().changed("seqused_k", |lens| lens[1] = 7).poisoned_rows(), [0; 0]);
    let all: Vec<usize> = (0..50).collect();
    for starts in [[1, 20, 50], [0, 60, 50], [0, -1, 50], [0, 20, 49], [0, 20, i32::MAX], [i32::MIN, 20, 50]]
    {
        let bad = |of: &mut [i32]| of.copy_from_slice(&starts);
        assert_eq!(unified().changed("cu_seqlens_q", bad).poisoned_rows(), all, "{starts:?}");
        assert_eq!(
            case.prefill::<bf16, bf16>("chunked_pa_prefill").changed("cu_seqlens_q", bad).poisoned_rows(),
            all
        );
        assert_eq!(case.extend::<bf16, bf16>().changed("qo_indptr", bad).poisoned_rows(), all, "{starts:?}");
    }
    // A bias of queries that has 9 rows and 12 columns: rows 9 on lack it.
    let short = unified().floats("qq_bias", &[9, 12], 3);
    assert_eq!(short.poisoned_rows(), (9..20).chain(29..50).collect::<Vec<_>>());
    let narrow = unified().floats("qq_bias", &[30, 12], 3);
    assert_eq!(narrow.poisoned_rows(), (12..20).chain(32..50).collect::<Vec<_>>());

    // Contexts of 16 and 10 keys.
    let prefill = || case.prefill::<bf16, bf16>("pa_prefill");
    let second: Vec<usize> = (20..50).collect();
    assert_eq!(prefill().poisoned_rows(), [0; 0]);
    for len in [29, -5, 30 + 65, i32::MAX, i32::MIN] {
        assert_eq!(prefill().changed("seq_lens", |lens| lens[1] = len).poisoned_rows(), second, "{len}");
    }
    assert_eq!(prefill().changed("block_table", outside(0, 99)).poisoned_rows(), second);
    // Pages behind the context are not read.
    assert_eq!(prefill().changed("block_table", outside(1, 99)).poisoned_rows(), [0; 0]);
    let given = window(prefill().changed("block_table", outside(0, 99)));
    assert_eq!(given.poisoned_rows(), [20, 21, 22]);

    // Prefixes are entries 0 to 15 and 16 to 25.
    let extend = || case.extend::<bf16, bf16>();
    assert_eq!(extend().poisoned_rows(), [0; 0]);
    for (starts, rows) in [
        ([0, 16, 27], &second),
        ([0, 16, 15], &second),
        ([0, 16, i32::MIN], &second),
        ([0, -1, 26], &all),
        ([0, 27, 28], &all),
    ] {
        let bad = extend().changed("kv_indptr", |of| of.copy_from_slice(&starts));
        assert_eq!(bad.poisoned_rows(), *rows, "{starts:?}");
    }
    assert_eq!(extend().changed("kv_indices", |of| of[20] = 79).poisoned_rows(), second);
    let masked = |starts: [i32; 3], bytes: usize| {
        let mask = HostTensor::new([bytes], &vec![1u8; bytes]).unwrap();
        extend().with("custom_mask", mask).with("mask_indptr", ints(&starts)).poisoned_rows()
    };
    let bytes = 20 * 36 + 30 * 40;
    assert_eq!(masked([0, 720, 0], bytes), [0; 0]);
    assert_eq!(masked([0, 721, 0], bytes), second);
    assert_eq!(masked([0, -1, 0], bytes), second);
    assert_eq!(masked([0, i32::MAX, 0], bytes), second);
    assert_eq!(masked([0, 0, 0], 0), all);

    let varlen = || case.varlen::<bf16>(true);
    assert_eq!(varlen().poisoned_rows(), [0; 0]);
    assert_eq!(varlen().changed("block_table", outside(1, 8)).poisoned_rows(), (26..50).collect::<Vec<_>>());
    assert_eq!(varlen().changed("cu_seqlens_k", |of| of[2] = 35).poisoned_rows(), second);
    assert_eq!(varlen().changed("cu_seqlens_k", |of| of[2] = 36 + 65).poisoned_rows(), second);
}

/// Pages of fp8, and fresh keys of 16 bits behind them: every kernel, tall and short, with factors of the cache; columns in no whole
/// vectors have the general one.
#[test]
fn pages_of_fp8_have_dense_kernels() {
    for (columns, page) in
        [([64, 64], 16), ([128, 128], 48), ([256, 256], 16), ([112, 80], 32), ([40, 72], 64)]
    {
        for lens in [vec![[33, 150], [1, 70], [0, 9]], vec![[300, 350]]] {
            let case = Case { page, ..Case::new(&lens, [1, 2], columns) };
            for gpu in devices() {
                for op in [0, 2] {
                    let of = if gpu.arch() == Arch::Gfx942 {
                        [given::<bf16, Fp8E4M3Fnuz>, given::<f16, Fp8E4M3Fnuz>]
                    } else {
                        [given::<bf16, Fp8E4M3>, given::<f16, Fp8E4M3>]
                    };
                    let scales = [["k_descale", "v_descale"], ["k_scale", "v_scale"]][op / 2];
                    for given in of {
                        let given = given(&case, op).scalar("window", Scalar::Int(60));
                        let scales = scales.map(|name| (name, lens.len()));
                        scales
                            .into_iter()
                            .fold(given, |g, (name, n)| g.floats(name, &[n, 1], 7))
                            .check_on(&gpu);
                    }
                }
            }
        }
    }
}

/// Keys that no query of the call sees may hold anything, those of the window's first page and tile, too.
#[test]
fn keys_before_the_window_are_not_read() {
    for (columns, group, queries, keys, window) in
        [(64, 1, 40, 200, 29), (128, 4, 70, 333, 100), (128, 1, 300, 700, 77), (192, 2, 150, 300, 5)]
    {
        let case = Case::new(&[[queries, keys]], [1, group], [columns, 64]);
        for general in [false, true] {
            let given = |unseen: bool| {
                let given = case.unified::<bf16, bf16>().scalar("window", Scalar::Int(window as i64));
                let table = given.get("block_table").elements::<i32>().unwrap();
                let cleared = |given: Given, name: &'static str, columns: usize| {
                    let cache = given.get(name);
                    let (shape, mut values) = (cache.shape().to_vec(), cache.elements::<bf16>().unwrap());
                    for key in 0..keys - queries - window {
                        let slot = table[key / 16] as usize * 16 + key % 16;
                        values[slot * columns..][..columns].fill(bf16::NAN);
                    }
                    given.with(name, HostTensor::new(shape, &values).unwrap())
                };
                let given =
                    if unseen { cleared(cleared(given, "k_cache", columns), "v_cache", 64) } else { given };
                if general { given.generally() } else { given }
            };
            assert_eq!(given(true).outs(), given(false).outs(), "{columns} {queries} {keys} {window}");
            given(true).check();
        }
    }
}

/// A table without columns, pools and caches without slots.
#[test]
fn nothing_is_cached() {
    let case = Case::new(&[[4, 4], [2, 2]], [1, 2], [16, 16]);
    let empty = |given: Given| given.with("block_table", HostTensor::new([2, 0], &[0i32; 0]).unwrap());
    assert_eq!(empty(case.unified::<bf16, bf16>()).poisoned_rows(), [0, 1, 2, 3, 4, 5]);
    let none = empty(case.unified::<bf16, bf16>()).changed("seqused_k", |lens| lens.fill(0));
    assert_eq!(none.poisoned_rows(), [0; 0]);
    assert_eq!(empty(case.varlen::<bf16>(true)).poisoned_rows(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(empty(case.prefill::<bf16, bf16>("pa_prefill")).poisoned_rows(), [0; 0]);
    assert_eq!(case.extend::<bf16, bf16>().poisoned_rows(), [0; 0]);
    let pool = || HostTensor::new([0, 1, 16], &[bf16::ONE; 0]).unwrap();
    let without = case.extend::<bf16, bf16>().with("k_pool", pool()).with("v_pool", pool());
    assert_eq!(without.poisoned_rows(), [0; 0]);
    let cache = || HostTensor::new([0, 16, 1, 16], &[bf16::ONE; 0]).unwrap();
    let without = case.unified::<bf16, bf16>().with("k_cache", cache()).with("v_cache", cache());
    assert_eq!(without.poisoned_rows(), [0, 1, 2, 3, 4, 5]);
    let without = case.varlen::<bf16>(false).with("k", pool()).with("v", pool());
    assert_eq!(without.poisoned_rows(), [0, 1, 2, 3, 4, 5]);
    let nothing = Case::new(&[], [1, 2], [16, 16]);
    for op in 0..4 {
        given::<bf16, bf16>(&nothing, op).check();
    }
}

/// Any strides: a pool with heads outside, rows with gaps, a table within a wider one.
#[test]
fn strided_views_are_the_same() {
    let case = Case::new(&[[20, 36], [3, 40]], [2, 2], [32, 32]);
    let given = case.unified::<bf16, bf16>().generally();
    for (gpu, want) in devices().iter().zip(given.outs()) {
        let elements = |name: &str| given.get(name).elements::<bf16>().unwrap();
        let integers = |name: &str| given.get(name).elements::<i32>().unwrap();
        let [pages, tokens, heads, columns] = given.get("k_cache").shape().try_into().unwrap();
        // [Hkv, slots, columns], seen as pages of tokens.
        let slots = pages * tokens;
        let pool = |name: &str| {
            let cache = elements(name);
            let at = |i: usize| {
                let (head, slot, col) = (i / (slots * columns), i / columns % slots, i % columns);
                cache[(slot * heads + head) * columns + col]
            };
            (0..cache.len()).map(at).collect::<Vec<_>>()
        };
        let place = [heads, slots, columns];
        let (k, v) = (gpu.upload(&pool("k_cache"), place), gpu.upload(&pool("v_cache"), place));
        let width = given.get("block_table").shape()[1];
        let table = gpu.upload_rows(&integers("block_table"), [2, width], width + 5);
        let (starts, lens) =
            (gpu.upload(&integers("cu_seqlens_q"), [3]), gpu.upload(&integers("seqused_k"), [2]));
        let strided = |shape: [usize; 3]| {
            let strides = [shape[1] * (shape[2] + 3) + 1, shape[2] + 3, 1];
            Place::new(Layout::with_strides(shape, strides).unwrap()).shifted(1)
        };
        let q = gpu.upload(&elements("q"), strided([23, 4, columns]));
        let mut out = gpu.poisoned::<bf16>(strided([23, 4, columns]));
        let mut lse = gpu.poisoned::<f32>([4, 23]);
        let layout = KvLayout::Hnd;
        let inputs = UnifiedInputs {
            q: q.view(),
            cache: PagedKv {
                k_cache: k.view().split_axis(1, tokens).unwrap().transpose(0, 1).unwrap(),
                v_cache: v.view().split_axis(1, tokens).unwrap().transpose(0, 1).unwrap(),
                pages: Pages { block_table: table.view(), layout },
            },
            cu_seqlens_q: starts.view(),
            seqused_k: lens.view(),
        };
        let outputs =
            AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut().transpose(0, 1).unwrap()) };
        unified_attn(gpu.stream(), inputs, outputs, DecodeWorkspace::default(), &UnifiedOptions::default())
            .unwrap();
        assert_bits(&gpu.download(&out), &want.elements::<bf16>().unwrap());
        gpu.assert_guards(&out);
        gpu.assert_guards(&lse);
        assert!(gpu.download(&lse).data.iter().all(|x| x.is_finite()));
        gpu.assert_untouched(&k);
        gpu.assert_untouched(&q);
    }
}

/// What `rope_reshape_and_cache` writes is what is read, from pages more than 4 GiB apart, too.
#[test]
fn caches_that_are_written_are_read() {
    let case = Case::new(&[[4, 20]], [1, 2], [16, 16]);
    // The emulator fills all memory that it allocates.
    let far = if full() { (1 << 31) + 256 } else { 256 };
    for (gpu, want) in devices().iter().zip(case.unified::<bf16, bf16>().outs()) {
        let stream = gpu.stream();
        // SAFETY: of what is read, 16 slots and 4 of the other page, all is written.
        let mut keys = unsafe { stream.alloc_uninit::<bf16>(far + 256).unwrap() };
        let pages = || Layout::with_strides([2, 16, 1, 16], [far, 16, 16, 1]).unwrap();
        let mut values = gpu.poisoned::<bf16>([2, 16, 1, 16]);
        let [k, v] = [false, true].map(|values| gpu.upload(&case.rows::<bf16>(0, values), [20, 1, 16]));
        let mut unused = [(); 2].map(|()| gpu.poisoned::<bf16>([20, 1, 16]));
        let [q_out, k_out] = &mut unused;
        // Angles of 0; page 1, then page 0.
        let (cos, sin) = (gpu.upload(&[bf16::ONE; 8], [1, 8]), gpu.upload(&[bf16::ZERO; 8], [1, 8]));
        let positions = gpu.upload(&[0i32; 20], [20]);
        let slots: Vec<i64> = (16..32).chain(0..4).collect();
        let slots = gpu.upload(&slots, [20]);
        let positions = Positions::Given(positions.view().into());
        let inputs = RopeCacheInputs {
            q: k.view(),
            k: k.view(),
            v: v.view(),
            tables: RopeTables { cos: cos.view(), sin: sin.view(), positions, offsets: None },
            slot_mapping: slots.view().into(),
            scales: CacheScales::default(),
        };
        let outputs = RopeCacheOutputs {
            q_out: q_out.view_mut(),
            k_out: k_out.view_mut(),
            zeros_out: None,
            key_cache: keys.view_mut_with(pages(), 0).unwrap(),
            value_cache: values.view_mut(),
        };
        let (style, table) = (RopeStyle::Neox, RopeTableWidth::Half);
        let (span, direction) = (RopeSpan::First, RopeDirection::Forward);
        let rope = Rope { style, table, rotary: 16, span, direction };
        rope_reshape_and_cache(stream, inputs, outputs, KvLayout::Nhd, rope).unwrap();

        let q = gpu.upload(&case.q::<bf16>().elements::<bf16>().unwrap(), [4, 2, 16]);
        let block_table = gpu.upload(&[1i32, 0], [1, 2]);
        let (starts, lens) = (gpu.upload(&[0i32, 4], [2]), gpu.upload(&[20i32], [1]));
        let mut out = gpu.poisoned::<bf16>([4, 2, 16]);
        let inputs = UnifiedInputs {
            q: q.view(),
            cache: PagedKv {
                k_cache: keys.view_with(pages(), 0).unwrap(),
                v_cache: values.view(),
                pages: Pages { block_table: block_table.view(), layout: KvLayout::Nhd },
            },
            cu_seqlens_q: starts.view(),
            seqused_k: lens.view(),
        };
        let outputs = AttentionOutputs { out: out.view_mut(), lse: None };
        unified_attn(stream, inputs, outputs, DecodeWorkspace::default(), &UnifiedOptions::default())
            .unwrap();
        assert_bits(&gpu.download(&out), &want.elements::<bf16>().unwrap());
    }
}

/// `skip_decode` leaves the rows of single tokens as they are.
#[test]
fn single_tokens_are_left_alone() {
    let case = Case::new(&[[1, 5], [3, 9], [1, 1]], [1, 2], [16, 16]);
    let given = case.prefill::<bf16, bf16>("pa_prefill").scalar("skip_decode", Scalar::Bool(true));
    given.check();
    let call = given.call();
    for gpu in devices() {
        let outs = [0x11, 0x22]
            .map(|fill| call.operator().execute_filled(gpu.stream(), &call, fill).unwrap().swap_remove(0).1);
        let row = 2 * 16 * 2;
        for (out, fill) in outs.iter().zip([0x11, 0x22]) {
            assert!(out.bytes()[..row].iter().chain(&out.bytes()[4 * row..]).all(|b| *b == fill));
        }
        assert_eq!(outs[0].bytes()[row..4 * row], outs[1].bytes()[row..4 * row]);
    }
}

#[test]
fn traffic_is_of_the_keys_that_are_read() {
    let traffic = |given: &Given| {
        let call = given.call();
        (call.operator().traffic)(&call)
    };
    let case = Case { page: 16, ..Case::new(&[[2, 100], [0, 50]], [2, 2], [16, 32]) };
    let row = 2 * (16 + 32) * 2;
    // Queries, starts and lengths.
    let rest = 2 * 4 * 16 * 2 + 4 * 3 + 4 * 2;
    let all = traffic(&case.unified::<bf16, bf16>());
    assert_eq!(all.read, 100 * row + 7 * 4 + rest);
    assert_eq!(all.written, 2 * 4 * (32 * 2 + 4));
    // Keys 98 - 7 to 99, of pages 5 and 6.
    let some = traffic(&case.unified::<bf16, bf16>().scalar("window", Scalar::Int(7)));
    assert_eq!(some.read, 9 * row + 2 * 4 + rest);
    let fresh = traffic(&case.prefill::<bf16, bf16>("pa_prefill"));
    assert_eq!(fresh.read, 100 * row + 7 * 4 + rest);
}

/// Column-major values are loaded four tokens at a time: as many instructions as of rows.
#[test]
fn columns_of_pages_are_loaded_as_vectors() {
    let case = Case::new(&[[128, 256]], [1, 1], [128, 128]);
    for gpu in devices() {
        let loads = LAYOUTS.map(|layout| {
            let call = Case { layout, ..case.clone() }.unified::<bf16, bf16>().generally().call();
            gpu.stream().take_counters().unwrap();
            call.operator().execute(gpu.stream(), &call).unwrap();
            gpu.stream().take_counters().unwrap().map(|counters| counters.vmem_loads)
        });
        assert!(loads.iter().all(|n| *n == loads[0]), "{loads:?} on {}", gpu.spec());
    }
}

type Options = (KvLayout, Option<f32>, f32);
const OPTIONS: Options = (KvLayout::Nhd, None, 0.0);

fn pages<'a, C: CallElement>(tensors: &Tensors<'a>, layout: KvLayout) -> PagedKv<'a, C> {
    let pages = Pages { block_table: tensors.input("block_table"), layout };
    PagedKv { k_cache: tensors.input("k_cache"), v_cache: tensors.input("v_cache"), pages }
}

fn call_unified(stream: &Stream, tensors: &mut Tensors, (layout, scale, softcap): Options) -> Result<()> {
    let inputs = UnifiedInputs::<bf16, bf16> {
        q: tensors.input("q"),
        cache: pages(tensors, layout),
        cu_seqlens_q: tensors.input("cu_seqlens_q"),
        seqused_k: tensors.input("seqused_k"),
    };
    let options = UnifiedOptions {
        scale,
        softcap,
        alibi: tensors.optional_input("alibi"),
        sink: tensors.optional_input("sink"),
        qq_bias: tensors.optional_input("qq_bias"),
        descales: Descales {
            q: tensors.optional_input("q_descale"),
            k: tensors.optional_input("k_descale"),
            v: tensors.optional_input("v_descale"),
        },
        out_scale: tensors.optional_input("out_scale"),
        window: None,
        tile: None,
        splits: Splits::Auto,
    };
    let outputs =
        AttentionOutputs::<bf16> { out: tensors.output("out"), lse: tensors.optional_output("lse") };
    let workspace = DecodeWorkspace { partials: tensors.optional_output("workspace"), tickets: None };
    unified_attn(stream, inputs, outputs, workspace, &options)
}

#[test]
fn errors_of_unified_attn() {
    let layout = |layout: KvLayout| move |call: &mut Call<Options>| call.options.0 = layout;
    Refusals::new(OPTIONS, call_unified)
        .input::<bf16>("q", [6, 4, 32])
        .input::<bf16>("k_cache", [5, 8, 2, 32])
        .input::<bf16>("v_cache", [5, 8, 2, 16])
        .input::<i32>("block_table", [2, 3])
        .input::<i32>("cu_seqlens_q", [3])
        .input::<i32>("seqused_k", [2])
        .input::<f32>("alibi", [4])
        .input::<f32>("sink", [4])
        .input::<f32>("qq_bias", [4, 4])
        .input::<f32>("q_descale", [2, 4])
        .input::<f32>("k_descale", [1])
        .input::<f32>("v_descale", [2, 2])
        .input::<f32>("out_scale", [1])
        .output::<bf16>("out", [6, 4, 16])
        .output::<f32>("lse", [6, 4])
        .output::<f32>("workspace", [1000])
        .accepts(|_| {})
        .refuses(kind!(Stride), &["workspace"], |c| c.strides("workspace", [2]))
        .refuses(kind!(Shape), &["q: shape [6, 3, 32]", "multiple of 2"], |c| c.shape("q", [6, 3, 32]))
        .refuses(kind!(Shape), &["k_cache", "of q"], |c| c.shape("q", [6, 4, 33]))
        .refuses(kind!(Shape), &["q", "512 columns"], |c| {
            c.shape("q", [6, 4, 520]);
            c.shape("k_cache", [5, 8, 2, 520]);
        })
        .refuses(kind!(Shape), &["v_cache: shape [5, 8, 1, 16]"], |c| c.shape("v_cache", [5, 8, 1, 16]))
        .refuses(kind!(Empty), &["k_cache"], |c| c.shape("k_cache", [5, 0, 2, 32]))
        .refuses(kind!(Empty), &["v_cache"], |c| c.shape("v_cache", [5, 8, 2, 0]))
        .refuses(kind!(Shape), &["k_cache", "5 axes, for Paged"], layout(KvLayout::Paged))
        .refuses(kind!(Shape), &["k_cache", "multiple of 8 tokens"], |c| {
            c.options.0 = KvLayout::PagedShuffled;
            c.shape("k_cache", [5, 2, 4, 12, 8]);
            c.shape("v_cache", [5, 2, 1, 16, 8]);
        })
        .refuses(kind!(Shape), &["k_cache"], |c| {
            c.options.0 = KvLayout::Paged;
            c.shape("k_cache", [5, 2, 8, 8, 4]);
        })
        .refuses(kind!(Shape), &["block_table", "2 sequences"], |c| c.shape("block_table", [3, 3]))
        .refuses(kind!(Stride), &["block_table"], |c| c.strides("block_table", [1, 2]))
        .refuses(kind!(Stride), &["k_cache"], |c| c.strides("k_cache", [512, 64, 32, 2]))
        .refuses(kind!(Stride), &["q"], |c| c.strides("q", [256, 64, 2]))
        .refuses(kind!(Stride), &["out"], |c| c.strides("out", [128, 32, 2]))
        .refuses(kind!(Shape), &["cu_seqlens_q", "sequences + 1"], |c| c.shape("cu_seqlens_q", [0]))
        .refuses(kind!(Shape), &["seqused_k"], |c| c.shape("seqused_k", [3]))
        .refuses(kind!(Stride), &["seqused_k"], |c| c.strides("seqused_k", [2]))
        .refuses(kind!(Shape), &["alibi"], |c| c.shape("alibi", [2]))
        .refuses(kind!(Shape), &["sink"], |c| c.shape("sink", [2]))
        .refuses(kind!(Stride), &["qq_bias"], |c| c.strides("qq_bias", [8, 2]))
        .refuses(kind!(Shape), &["q_descale"], |c| c.shape("q_descale", [2, 2]))
        .refuses(kind!(Shape), &["k_descale"], |c| c.shape("k_descale", [2]))
        .refuses(kind!(Shape), &["v_descale"], |c| c.shape("v_descale", [2, 4]))
        .refuses(kind!(Shape), &["out_scale"], |c| c.shape("out_scale", [2]))
        .refuses(kind!(Shape), &["out: shape [6, 4, 32]"], |c| c.shape("out", [6, 4, 32]))
        .refuses(kind!(Shape), &["lse"], |c| c.shape("lse", [4, 6]))
        .refuses(kind!(Argument), &["scale"], |c| c.options.1 = Some(0.0))
        .refuses(kind!(Argument), &["scale"], |c| c.options.1 = Some(f32::NAN))
        .refuses(kind!(Argument), &["softcap"], |c| c.options.2 = -1.0)
        .refuses_overlaps()
        .refuses_other_devices();
}

#[test]
fn errors_of_extend_attn() {
    Refusals::new(OPTIONS, |stream, tensors, (_, scale, softcap)| {
        let inputs = ExtendInputs::<bf16, bf16> {
            q: tensors.input("q"),
            k_ext: tensors.input("k_ext"),
            v_ext: tensors.input("v_ext"),
            k_pool: tensors.input("k_pool"),
            v_pool: tensors.input("v_pool"),
            qo_indptr: tensors.input("qo_indptr"),
            kv_indptr: tensors.input("kv_indptr"),
            kv_indices: tensors.input("kv_indices"),
        };
        let mask = tensors.input("custom_mask");
        let custom_mask = Some(CustomMask { mask, indptr: tensors.input("mask_indptr"), skip_prefix: false });
        let scales =
            CacheScales { k: tensors.optional_input("k_scale"), v: tensors.optional_input("v_scale") };
        let options = ExtendOptions { scale, causal: true, softcap, custom_mask, scales };
        let outputs =
            AttentionOutputs::<bf16> { out: tensors.output("out"), lse: tensors.optional_output("lse") };
        extend_attn(stream, inputs, outputs, &options)
    })
    .input::<bf16>("q", [6, 4, 32])
    .input::<bf16>("k_ext", [6, 2, 32])
    .input::<bf16>("v_ext", [6, 2, 16])
    .input::<bf16>("k_pool", [9, 2, 32])
    .input::<bf16>("v_pool", [9, 2, 16])
    .input::<i32>("qo_indptr", [3])
    .input::<i32>("kv_indptr", [3])
    .input::<i32>("kv_indices", [7])
    .input::<u8>("custom_mask", [20])
    .input::<i32>("mask_indptr", [3])
    .input::<f32>("k_scale", [1])
    .input::<f32>("v_scale", [2, 2])
    .output::<bf16>("out", [6, 4, 16])
    .output::<f32>("lse", [6, 4])
    .accepts(|_| {})
    .refuses(kind!(Shape), &["q", "576 columns"], |c| {
        c.shape("q", [6, 4, 577]);
        c.shape("k_pool", [9, 2, 577]);
    })
    .refuses(kind!(Shape), &["multiple of 2"], |c| c.shape("q", [6, 3, 32]))
    .refuses(kind!(Shape), &["k_pool"], |c| c.shape("k_pool", [9, 2, 33]))
    .refuses(kind!(Shape), &["v_pool"], |c| c.shape("v_pool", [8, 2, 16]))
    .refuses(kind!(Shape), &["k_ext"], |c| c.shape("k_ext", [5, 2, 32]))
    .refuses(kind!(Shape), &["v_ext"], |c| c.shape("v_ext", [6, 2, 32]))
    .refuses(kind!(Shape), &["qo_indptr"], |c| c.shape("qo_indptr", [0]))
    .refuses(kind!(Shape), &["kv_indptr"], |c| c.shape("kv_indptr", [2]))
    .refuses(kind!(Stride), &["kv_indices"], |c| c.strides("kv_indices", [2]))
    .refuses(kind!(Stride), &["custom_mask"], |c| c.strides("custom_mask", [2]))
    .refuses(kind!(Shape), &["mask_indptr"], |c| c.shape("mask_indptr", [4]))
    .refuses(kind!(Shape), &["k_scale"], |c| c.shape("k_scale", [2]))
    .refuses(kind!(Shape), &["v_scale"], |c| c.shape("v_scale", [3, 2]))
    .refuses(kind!(Shape), &["out"], |c| c.shape("out", [6, 4, 32]))
    .refuses(kind!(Shape), &["lse"], |c| c.shape("lse", [4, 6]))
    .refuses(kind!(Argument), &["scale"], |c| c.options.1 = Some(f32::INFINITY))
    .refuses(kind!(Argument), &["softcap"], |c| c.options.2 = f32::NAN)
    .refuses_overlaps()
    .refuses_other_devices();
}

#[test]
fn errors_of_pa_prefill() {
    for chunked in [false, true] {
        Refusals::new(OPTIONS, |stream, tensors, (layout, scale, _)| {
            let inputs = PaPrefillInputs::<bf16, bf16> {
                q: tensors.input("q"),
                k: tensors.input("k"),
                v: tensors.input("v"),
                cache: pages(tensors, layout),
                cu_seqlens_q: tensors.input("cu_seqlens_q"),
                seq_lens: tensors.input("seq_lens"),
            };
            let scales =
                CacheScales { k: tensors.optional_input("k_scale"), v: tensors.optional_input("v_scale") };
            let options = PaPrefillOptions {
                scale,
                window: None,
                alibi: tensors.optional_input("alibi"),
                scales,
                tile: None,
            };
            let out = tensors.output("out");
            if chunked {
                chunked_pa_prefill(stream, inputs, out, DecodeWorkspace::default(), &options)
            } else {
                pa_prefill(stream, inputs, out, &options, false)
            }
        })
        .input::<bf16>("q", [6, 4, 32])
        .input::<bf16>("k", [6, 2, 32])
        .input::<bf16>("v", [6, 2, 16])
        .input::<bf16>("k_cache", [5, 8, 2, 32])
        .input::<bf16>("v_cache", [5, 8, 2, 16])
        .input::<i32>("block_table", [2, 3])
        .input::<i32>("cu_seqlens_q", [3])
        .input::<i32>("seq_lens", [2])
        .input::<f32>("alibi", [2, 4])
        .input::<f32>("k_scale", [2, 2])
        .input::<f32>("v_scale", [1])
        .output::<bf16>("out", [6, 4, 16])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["multiple of 2"], |c| c.shape("q", [6, 3, 32]))
        .refuses(kind!(Shape), &["q", "256 columns"], |c| {
            c.shape("q", [6, 4, 288]);
            c.shape("k_cache", [5, 8, 2, 288]);
        })
        .refuses(kind!(Shape), &["k: shape"], |c| c.shape("k", [6, 1, 32]))
        .refuses(kind!(Shape), &["v: shape"], |c| c.shape("v", [5, 2, 16]))
        .refuses(kind!(Shape), &["v_cache"], |c| c.shape("v_cache", [5, 7, 2, 16]))
        .refuses(kind!(Shape), &["block_table"], |c| c.shape("block_table", [1, 3]))
        .refuses(kind!(Shape), &["cu_seqlens_q"], |c| c.shape("cu_seqlens_q", [0]))
        .refuses(kind!(Shape), &["seq_lens"], |c| c.shape("seq_lens", [1]))
        .refuses(kind!(Shape), &["alibi"], |c| c.shape("alibi", [4, 2]))
        .refuses(kind!(Shape), &["k_scale"], |c| c.shape("k_scale", [2, 4]))
        .refuses(kind!(Shape), &["v_scale"], |c| c.shape("v_scale", [2]))
        .refuses(kind!(Shape), &["out"], |c| c.shape("out", [6, 2, 16]))
        .refuses(kind!(Argument), &["scale"], |c| c.options.1 = Some(0.0))
        .refuses_overlaps()
        .refuses_other_devices();
    }
}
