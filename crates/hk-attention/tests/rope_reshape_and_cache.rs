//! `rope_reshape_and_cache` on the emulated GPUs (and real ones where there are some): bitwise identical to
//! rotation and scatter.

use crate::common::{
    DeviceTokens, Order, Stored, Tokens, elements, heads_place, ropes, rotate_f32, rotate_f64,
};
use hk_attention::{
    CacheElement, CacheScales, HeadElement, KvLayout, RopeCacheInputs, RopeCacheOutputs, reference,
    rope_reshape_and_cache,
};
use hk_core::plan::rope::{
    Positions, Rope, RopeDirection, RopeElement, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{Element, Float, Fp8E4M3, Fp8E4M3Fnuz, Layout, TensorView, bf16, f16};
use hk_testkit::{
    self as kit, Array, Gpu, Place, Refusals, Tolerance, assert_bits, assert_close, assert_rounded, kind,
    proptest::prelude::*, proptest::sample::select,
};

const LAYOUTS: [KvLayout; 4] = [KvLayout::Nhd, KvLayout::Hnd, KvLayout::Paged, KvLayout::PagedShuffled];

#[derive(Debug, Clone)]
struct Case {
    tokens: Tokens,
    q_heads: usize,
    kv_heads: usize,
    dim: usize,
    layout: KvLayout,
    blocks: usize,
    block: usize,
    /// Divides keys and values.
    scales: Option<[f32; 2]>,
    zeros: bool,
    /// Elements between rows, and before the first.
    pad: usize,
    shift: usize,
    /// Elements after each block of the caches.
    cache_pad: usize,
    /// The inputs are one token's of a case with this many.
    only: Option<(usize, usize)>,
}

/// What a run writes.
struct Written<T: Element, C: Element> {
    q_out: Array<T>,
    k_out: Array<T>,
    keys: Array<C>,
    values: Array<C>,
    /// What the caches held before.
    before: [Array<C>; 2],
}

impl Case {
    fn q<T: Float>(&self) -> Vec<T> {
        self.drawn(self.tokens.counts[0], self.q_heads, self.tokens.seed)
    }

    fn k<T: Float>(&self, number: u64) -> Vec<T> {
        self.drawn(self.tokens.counts[2], self.kv_heads, self.tokens.seed ^ number << 20)
    }

    fn drawn<T: Float>(&self, tokens: usize, heads: usize, seed: u64) -> Vec<T> {
        let row = heads * self.dim;
        match self.only {
            Some((token, of)) => elements(of * row, seed)[token * row..][..row].to_vec(),
            None => elements(tokens * row, seed),
        }
    }

    fn shapes(&self) -> ([usize; 3], [usize; 3]) {
        let [rotated, _, all] = self.tokens.counts;
        ([rotated, self.q_heads, self.dim], [all, self.kv_heads, self.dim])
    }

    fn cache_place(&self, shape: &[usize]) -> Place {
        let mut strides = Layout::contiguous(shape).unwrap().strides().to_vec();
        strides[0] += self.cache_pad;
        Place::new(Layout::with_strides(shape, strides).unwrap())
    }

    /// Runs the operator, in place if `alias`, and checks that nothing else is touched.
    #[track_caller]
    fn run<T: HeadElement, R: RopeElement<T> + Float, C: CacheElement<T>>(
        &self,
        gpu: &Gpu,
        alias: bool,
    ) -> Written<T, C> {
        let (q_shape, k_shape) = self.shapes();
        let place = |shape| heads_place(shape, self.pad, self.shift);
        let mut q = gpu.upload(&self.q::<T>(), place(q_shape));
        let mut k = gpu.upload(&self.k::<T>(1), place(k_shape));
        let v = gpu.upload(&self.k::<T>(2), place(k_shape));
        let mut q_out = gpu.poisoned::<T>(place(q_shape));
        let mut k_out = gpu.poisoned::<T>(place(k_shape));
        let mut zeros = gpu.poisoned::<T>(place(q_shape));
        let sizes = [self.blocks, self.block, self.kv_heads, self.dim];
        let mut keys = gpu.poisoned::<C>(self.cache_place(&self.layout.key_shape::<C>(sizes)));
        let mut values = gpu.poisoned::<C>(self.cache_place(&self.layout.value_shape::<C>(sizes)));
        let before = [gpu.download(&keys), gpu.download(&values)];
        let tokens = DeviceTokens::<R>::new(gpu, &self.tokens, self.shift);
        let scales = self.scales.map(|s| s.map(|s| gpu.upload(&[s], [1])));
        let scale = |i: usize| scales.as_ref().map(|s| s[i].view());
        {
            let (qv, q_outv) = if alias {
                let v = q.view_mut();
                (v.alias(), v)
            } else {
                (q.view(), q_out.view_mut())
            };
            let (kv, k_outv) = if alias {
                let v = k.view_mut();
                (v.alias(), v)
            } else {
                (k.view(), k_out.view_mut())
            };
            let outputs = RopeCacheOutputs {
                q_out: q_outv,
                k_out: k_outv,
                zeros_out: self.zeros.then(|| zeros.view_mut()),
                key_cache: keys.view_mut(),
                value_cache: values.view_mut(),
            };
            let inputs = RopeCacheInputs {
                q: qv,
                k: kv,
                v: v.view(),
                tables: tokens.tables(),
                slot_mapping: tokens.slots(),
                scales: CacheScales { k: scale(0), v: scale(1) },
            };
            rope_reshape_and_cache(gpu.stream(), inputs, outputs, self.layout, self.tokens.rope).unwrap();
        }
        gpu.assert_guards(&keys);
        gpu.assert_guards(&values);
        gpu.assert_untouched(&v);
        tokens.assert_untouched(gpu);
        if self.zeros {
            gpu.assert_guards(&zeros);
            assert_bits(&gpu.download(&zeros), &vec![T::from_f32(0.0); q_shape.iter().product()]);
        } else {
            gpu.assert_untouched(&zeros);
        }
        let (q_out, k_out) = if alias { (&q, &k) } else { (&q_out, &k_out) };
        gpu.assert_guards(q_out);
        gpu.assert_guards(k_out);
        if !alias {
            gpu.assert_untouched(&q);
            gpu.assert_untouched(&k);
        }
        Written {
            q_out: gpu.download(q_out),
            k_out: gpu.download(k_out),
            keys: gpu.download(&keys),
            values: gpu.download(&values),
            before,
        }
    }

    /// Every output is bitwise identical to rotation and scatter; all else is untouched.
    #[track_caller]
    fn check<T: HeadElement + Stored, R: RopeElement<T> + Float, C: CacheElement<T> + Stored>(&self) {
        let [_, cached, all] = self.tokens.counts;
        let (heads, dim) = (self.kv_heads, self.dim);
        for gpu in kit::devices() {
            let got = self.run::<T, R, C>(&gpu, false);
            let q = self.q::<T>();
            let (k, v) = (self.k::<T>(1), self.k::<T>(2));
            let rotated_q = rotate_f32::<T, R>(&gpu, &self.tokens, &q, [self.q_heads, dim]);
            let rotated_k = rotate_f32::<T, R>(&gpu, &self.tokens, &k, [heads, dim]);
            let rounded = |x: &[f32]| x.iter().map(|&v| T::from_f32(v)).collect::<Vec<T>>();
            assert_bits(&got.q_out, &rounded(&rotated_q));
            let written = cached * heads * dim;
            let k_out = Array::new("k_out", [written], got.k_out[..written].to_vec());
            assert_bits(&k_out, &rounded(&rotated_k[..written]));

            let want_q = rotate_f64::<T, R>(&self.tokens, &q, [self.q_heads, dim]);
            // The bound's absolute part is that of elements around 1; some here are larger.
            let largest = q.iter().filter(|x| !x.to_f64().is_nan()).fold(1.0, |m, x| x.to_f64().abs().max(m));
            let (rtol, atol) = Tolerance::Elementwise.bounds(T::DTYPE);
            assert_close(&got.q_out, &want_q, Tolerance::Within { rtol, atol: atol * largest });
            assert_rounded(&got.q_out, &want_q, 0.99);

            let piece = 16 / size_of::<C>();
            let at = |values, place| {
                reference::element_of(self.layout, values, piece, [self.block, heads, dim], place)
            };
            let [mut keys, mut values] = got.before.clone().map(|b| b.data);
            let inverse = self.scales.map(|s| s.map(|s| 1.0 / s));
            let scaled = |x: f32, i: usize| C::store(inverse.map_or(x, |s| x * s[i]));
            for token in 0..cached {
                let Some(slot) = self.tokens.slot(token) else { continue };
                for (head, col) in (0..heads).flat_map(|h| (0..dim).map(move |c| (h, c))) {
                    let from = (token * heads + head) * dim + col;
                    keys[at(false, [slot, head, col])] = scaled(rotated_k[from], 0);
                    values[at(true, [slot, head, col])] = scaled(v[from].to_f32(), 1);
                }
            }
            assert_bits(&got.keys, &keys);
            assert_bits(&got.values, &values);
            if C::DTYPE == T::DTYPE && self.scales.is_none() {
                // The caches hold k_out and v.
                for token in (0..cached).filter(|&t| self.tokens.slot(t).is_some()) {
                    let slot = self.tokens.slot(token).unwrap();
                    for (head, col) in (0..heads).flat_map(|h| (0..dim).map(move |c| (h, c))) {
                        let from = (token * heads + head) * dim + col;
                        let (key, value) =
                            (got.keys[at(false, [slot, head, col])], got.values[at(true, [slot, head, col])]);
                        assert_eq!(bytemuck::bytes_of(&key), bytemuck::bytes_of(&got.k_out[from]));
                        assert_eq!(bytemuck::bytes_of(&value), bytemuck::bytes_of(&v[from]));
                    }
                }
            }
            assert_eq!(got.k_out.len(), all * heads * dim);
            // k_out of tokens without a slot is what it was: poison is NaN.
            assert!(got.k_out[written..].iter().all(|x| x.to_f64().is_nan()));
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let dims = select(vec![64usize, 80, 128, 256, 16, 48, 96, 24, 2, 22]);
    let heads = select(vec![(4, 1), (8, 2), (3, 3), (16, 1), (6, 2), (32, 8)]);
    let counts = (select(vec![1usize, 8, 31]), select(vec![0usize, 3]), select(vec![0usize, 2]));
    let memory = (select(vec![0usize, 0, 8, 5]), select(vec![0usize, 0, 8, 1]), select(vec![0usize, 16]));
    let options = (any::<[bool; 4]>(), select(&LAYOUTS[..]), select(vec![1usize, 16, 32, 64, 128, 5]));
    (dims, heads, counts, memory, options, any::<u64>()).prop_flat_map(
        |(
            dim,
            (q_heads, kv_heads),
            (n, more, rest),
            (pad, shift, cache_pad),
            (flags, layout, block),
            seed,
        )| {
            let [runs, offsets, bad, zeros] = flags;
            // What the layouts need: whole pieces of 16 bytes, of 16 elements if they are fp8.
            let paged = matches!(layout, KvLayout::Paged | KvLayout::PagedShuffled);
            let dim = if paged { dim.next_multiple_of(16) } else { dim };
            let block = if layout == KvLayout::PagedShuffled { block.next_multiple_of(16) } else { block };
            let blocks = (n + more + 20).div_ceil(block);
            ropes(dim).prop_map(move |rope| {
                let order = if runs { Order::Runs } else { Order::Shuffled };
                let counts = [n, n + more, n + more + rest];
                let mut tokens = Tokens::new(counts, rope, blocks * block, order, seed);
                if bad {
                    tokens = tokens.with_bad_positions();
                }
                if offsets {
                    tokens = tokens.with_offsets();
                }
                let scales = None;
                Case {
                    tokens,
                    q_heads,
                    kv_heads,
                    dim,
                    layout,
                    blocks,
                    block,
                    scales,
                    zeros,
                    pad,
                    shift,
                    cache_pad,
                    only: None,
                }
            })
        },
    )
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_rotate_scatter(c in cases(), f32_table: bool) {
        if f32_table { c.check::<bf16, f32, bf16>() } else { c.check::<bf16, bf16, bf16>() }
    }

    #[test]
    fn f16_matches_rotate_scatter(c in cases(), f32_table: bool) {
        if f32_table { c.check::<f16, f32, f16>() } else { c.check::<f16, f16, f16>() }
    }

    #[test]
    fn fp8_caches_hold_what_is_scaled(mut c in cases(), ocp: bool, scaled: bool) {
        c.scales = scaled.then_some([0.013, 0.4]);
        if ocp { c.check::<bf16, bf16, Fp8E4M3>() } else { c.check::<f16, f16, Fp8E4M3Fnuz>() }
    }

    #[test]
    fn a_scale_divides_in_any_type(mut c in cases()) {
        c.scales = Some([3.0, 0.1]);
        c.check::<bf16, bf16, bf16>();
    }

    #[test]
    fn in_place_is_out_of_place(c in cases()) {
        for gpu in kit::devices() {
            let (apart, alias) = (c.run::<bf16, bf16, bf16>(&gpu, false), c.run::<bf16, bf16, bf16>(&gpu, true));
            assert_bits(&alias.q_out, &apart.q_out);
            // Rows of tokens without a slot are poison in one, and k itself in the other.
            let written = c.tokens.counts[1] * c.kv_heads * c.dim;
            assert_bits(&Array::new("k_out", [written], alias.k_out[..written].to_vec()), &apart.k_out[..written]);
            assert_bits(&Array::new("k", [alias.k_out.len() - written], alias.k_out[written..].to_vec()), &c.k::<bf16>(1)[written..]);
            assert_bits(&alias.keys, &apart.keys);
            assert_bits(&alias.values, &apart.values);
        }
    }
}

fn rope(rotary: usize, style: RopeStyle) -> Rope {
    Rope {
        style,
        table: RopeTableWidth::Half,
        rotary,
        span: RopeSpan::First,
        direction: RopeDirection::Forward,
    }
}

/// A case of `[q_heads, kv_heads, dim]`, `[blocks, block]`.
fn case(
    counts: [usize; 3],
    [q_heads, kv_heads, dim]: [usize; 3],
    [blocks, block]: [usize; 2],
    layout: KvLayout,
    order: Order,
) -> Case {
    let tokens = Tokens::new(counts, rope(dim, RopeStyle::Neox), blocks * block, order, 42);
    Case {
        tokens,
        q_heads,
        kv_heads,
        dim,
        layout,
        blocks,
        block,
        scales: None,
        zeros: false,
        pad: 0,
        shift: 0,
        cache_pad: 0,
        only: None,
    }
}

/// Heads of real models, in each layout.
#[test]
fn heads_of_models() {
    let n = if kit::full() { 2048 } else { 19 };
    for (i, heads) in [[32, 8, 128], [64, 8, 128], [32, 4, 128], [128, 8, 64], [16, 1, 256], [8, 8, 80]]
        .into_iter()
        .enumerate()
    {
        let layout = LAYOUTS[i % 4];
        let mut c = case([n, n + 3, n + 3], heads, [n.div_ceil(16) + 2, 16], layout, Order::Runs);
        c.check::<bf16, bf16, bf16>();
        c.scales = Some([0.02, 0.02]);
        c.tokens.rope.style = RopeStyle::Interleaved;
        c.check::<bf16, bf16, Fp8E4M3Fnuz>();
    }
}

/// More tokens than there are waves, so that waves take several tasks; groups of tokens at each place of a window.
#[test]
fn many_tokens() {
    for (layout, order) in [
        (KvLayout::Paged, Order::Runs),
        (KvLayout::PagedShuffled, Order::Runs),
        (KvLayout::Nhd, Order::Shuffled),
    ] {
        let n = if kit::full() { 20_000 } else { 1500 };
        let c = case([n, n, n], [2, 2, 16], [n.div_ceil(32) + 6, 32], layout, order);
        c.check::<bf16, bf16, bf16>();
        c.check::<bf16, bf16, Fp8E4M3>();
    }
}

/// Caches in every layout decode to the same values.
#[test]
fn layouts_hold_the_same() {
    for gpu in kit::devices() {
        let mut decoded: Vec<Vec<[u8; 2]>> = Vec::new();
        for layout in LAYOUTS {
            let c = case([40, 40, 40], [4, 2, 64], [4, 32], layout, Order::Runs);
            let got = c.run::<f16, f16, Fp8E4M3Fnuz>(&gpu, false);
            let sizes = [c.block, c.kv_heads, c.dim];
            let mut logical = Vec::new();
            for slot in (0..40).filter_map(|t| c.tokens.slot(t)) {
                for (head, col) in (0..2).flat_map(|h| (0..64).map(move |col| (h, col))) {
                    let at = |values| reference::element_of(layout, values, 16, sizes, [slot, head, col]);
                    logical.push([got.keys[at(false)].0, got.values[at(true)].0]);
                }
            }
            assert_eq!(logical.len(), 40 * 2 * 64);
            decoded.push(logical);
        }
        assert!(decoded.iter().all(|d| *d == decoded[0]));
    }
}

/// Groups of tokens and single ones, under all sanitizers.
#[test]
fn the_sanitizer_finds_nothing_in_groups() {
    for gpu in kit::sanitized_devices() {
        for layout in LAYOUTS {
            for order in [Order::Runs, Order::Shuffled] {
                let c = case([37, 40, 41], [2, 2, 32], [3, 32], layout, order);
                c.run::<bf16, bf16, bf16>(&gpu, false);
                c.run::<f16, f16, Fp8E4M3Fnuz>(&gpu, true);
            }
        }
    }
}

/// With angles of zero everything is copied.
#[test]
fn position_zero_is_the_identity() {
    for gpu in kit::devices() {
        let mut c = case([9, 9, 9], [4, 2, 64], [1, 16], KvLayout::Nhd, Order::Runs);
        c.tokens.positions.fill(0);
        let got = c.run::<bf16, bf16, bf16>(&gpu, false);
        assert_bits(&got.q_out, &c.q::<bf16>());
        assert_bits(&got.k_out, &c.k::<bf16>(1));
    }
}

/// Two tokens with one slot: each element comes from either.
#[test]
fn one_of_two_tokens_with_one_slot_wins() {
    for gpu in kit::devices() {
        for layout in LAYOUTS {
            let mut c = case([8, 8, 8], [2, 2, 32], [1, 16], layout, Order::Runs);
            c.tokens.slots = vec![3, 3, 9, 9, 9, 1, 2, 3];
            let got = c.run::<bf16, bf16, bf16>(&gpu, false);
            let (v, sizes) = (c.k::<bf16>(2), [16, 2, 32]);
            for slot in [3, 9, 1, 2] {
                for (head, col) in (0..2).flat_map(|h| (0..32).map(move |col| (h, col))) {
                    let from: Vec<usize> = (0..8)
                        .filter(|&t| c.tokens.slots[t] == slot)
                        .map(|t| (t * 2 + head) * 32 + col)
                        .collect();
                    let at =
                        |values| reference::element_of(layout, values, 8, sizes, [slot as usize, head, col]);
                    assert!(from.iter().any(|&i| got.keys[at(false)].to_bits() == got.k_out[i].to_bits()));
                    assert!(from.iter().any(|&i| got.values[at(true)].to_bits() == v[i].to_bits()));
                }
            }
        }
    }
}

/// No index value leads outside the cache or the tables.
#[test]
fn wild_indices_are_harmless() {
    for layout in LAYOUTS {
        let mut c = case([12, 12, 12], [2, 2, 32], [2, 16], layout, Order::Runs);
        c.tokens.wide = true;
        let wild = [
            i64::MIN,
            i64::MAX,
            -1,
            32,
            33,
            1 << 32,
            (1 << 32) + 5,
            -32,
            i64::MIN + 1,
            u32::MAX as i64,
            0,
            31,
        ];
        c.tokens.slots = wild.to_vec();
        c.check::<bf16, bf16, bf16>();
        c.tokens.slots = (0..12).collect();
        c.tokens.positions = wild.iter().map(|&w| if w == 32 || w == 33 { w + 100 } else { w }).collect();
        c.check::<bf16, bf16, bf16>();
        // 32-bit positions and offsets are added in 64 bits: in 32 bits these sums are rows of the tables.
        let (low, high) = (i64::from(i32::MIN), i64::from(i32::MAX));
        c.tokens.wide = false;
        c.tokens.positions = vec![low, high, low, high, 0, 1, low, high, 2, 3, low, high];
        c.tokens.offsets = Some(vec![low, high, low + 3, high, 0, 1, low + 1, 7, 2, 3, low + 2, high]);
        c.check::<bf16, bf16, bf16>();
    }
}

/// NaN and infinities in k and v: NaN stays NaN in every type, infinities saturate in fp8.
#[test]
fn special_values_reach_the_cache() {
    for gpu in kit::devices() {
        let mut values = kit::special_values::<bf16>();
        values.resize(16, bf16::ONE);
        let (q, k) = (gpu.upload(&values, [1, 1, 16]), gpu.upload(&values, [1, 1, 16]));
        let v = gpu.upload(&values, [1, 1, 16]);
        let (cos, sin) = (gpu.upload(&[1.0f32; 8], [1, 8]), gpu.upload(&[0.0f32; 8], [1, 8]));
        let (position, slot) = (gpu.upload(&[0i32], [1]), gpu.upload(&[0i32], [1]));
        fn run<C: CacheElement<bf16> + Stored>(
            gpu: &Gpu,
            [q, k, v]: [TensorView<bf16>; 3],
            tables: RopeTables<f32>,
            slot: TensorView<i32>,
        ) -> Array<C> {
            let (mut q_out, mut k_out) = (gpu.poisoned([1, 1, 16]), gpu.poisoned([1, 1, 16]));
            let (mut keys, mut cache) = (gpu.poisoned::<C>([1, 1, 1, 16]), gpu.poisoned::<C>([1, 1, 1, 16]));
            let outputs = RopeCacheOutputs {
                q_out: q_out.view_mut(),
                k_out: k_out.view_mut(),
                zeros_out: None,
                key_cache: keys.view_mut(),
                value_cache: cache.view_mut(),
            };
            let (scales, rope) = (CacheScales::default(), rope(16, RopeStyle::Neox));
            let inputs = RopeCacheInputs { q, k, v, tables, slot_mapping: slot.into(), scales };
            rope_reshape_and_cache(gpu.stream(), inputs, outputs, KvLayout::Nhd, rope).unwrap();
            gpu.download(&cache)
        }
        let tables = || RopeTables {
            cos: cos.view(),
            sin: sin.view(),
            positions: Positions::Given(position.view().into()),
            offsets: None,
        };
        let inputs = || [q.view(), k.view(), v.view()];
        assert_bits(&run::<bf16>(&gpu, inputs(), tables(), slot.view()), &values);
        let ocp = run::<Fp8E4M3>(&gpu, inputs(), tables(), slot.view());
        assert_bits(&ocp, &values.iter().map(|v| Fp8E4M3::store(v.to_f32())).collect::<Vec<_>>());
        let fnuz = run::<Fp8E4M3Fnuz>(&gpu, inputs(), tables(), slot.view());
        assert_bits(&fnuz, &values.iter().map(|v| Fp8E4M3Fnuz::store(v.to_f32())).collect::<Vec<_>>());
    }
}

/// No queries but keys to copy; no tokens at all.
#[test]
fn empty_parts() {
    case([0, 3, 5], [4, 2, 64], [1, 16], KvLayout::Paged, Order::Runs).check::<bf16, bf16, bf16>();
    let c = case([0, 0, 2], [4, 2, 64], [1, 16], KvLayout::Nhd, Order::Runs);
    for gpu in kit::devices() {
        gpu.stream().take_counters().unwrap();
        c.run::<bf16, bf16, bf16>(&gpu, false);
        if let Some(counters) = gpu.stream().take_counters().unwrap() {
            assert_eq!(counters.workgroups, 0);
        }
    }
    // A cache without blocks takes nothing.
    case([3, 3, 3], [4, 2, 64], [0, 16], KvLayout::Hnd, Order::Runs).check::<bf16, bf16, bf16>();
}

/// Batch-invariant: a token's rows are bitwise identical alone and among others, however many share a wave.
#[test]
fn tokens_are_batch_invariant() {
    for gpu in kit::devices() {
        for layout in LAYOUTS {
            let c = case([40, 40, 40], [4, 2, 64], [4, 16], layout, Order::Runs);
            let all = c.run::<bf16, bf16, Fp8E4M3Fnuz>(&gpu, false);
            for token in [0, 17, 39] {
                let mut one = c.clone();
                one.tokens.counts = [1, 1, 1];
                one.tokens.positions = vec![c.tokens.positions[token]];
                one.tokens.slots = vec![c.tokens.slots[token]];
                one.only = Some((token, 40));
                let alone = one.run::<bf16, bf16, Fp8E4M3Fnuz>(&gpu, false);
                let of = |n: usize| token * n * 64..(token + 1) * n * 64;
                assert_bits(&alone.q_out, &all.q_out[of(4)]);
                assert_bits(&alone.k_out, &all.k_out[of(2)]);
                let sizes = [c.block, 2, 64];
                let slot = c.tokens.slot(token).unwrap();
                for (head, col) in (0..2).flat_map(|h| (0..64).map(move |col| (h, col))) {
                    let at = |values| reference::element_of(layout, values, 16, sizes, [slot, head, col]);
                    assert_eq!(alone.keys[at(false)].0, all.keys[at(false)].0);
                    assert_eq!(alone.values[at(true)].0, all.values[at(true)].0);
                }
            }
        }
    }
}

/// Blocks of a cache more than 4 GiB apart, in bytes and in elements; a token goes to each.
#[test]
fn caches_beyond_4_gib() {
    if !kit::full() {
        return; // the emulator fills all memory that it allocates
    }
    for gpu in kit::devices() {
        let stride = (1 << 32) + 512;
        let c = case([2, 2, 2], [2, 1, 16], [2, 16], KvLayout::Nhd, Order::Runs);
        // SAFETY: of what is read, the second block, all is written: by the operator, or with zeros.
        let mut memory = unsafe { gpu.stream().alloc_uninit::<Fp8E4M3Fnuz>(stride + 512).unwrap() };
        let place = Layout::with_strides([2, 16, 1, 16], [stride, 16, 16, 1]).unwrap();
        let mut tokens = c.tokens.clone();
        tokens.slots = vec![3, 16 + 5];
        tokens.positions = vec![0, 0]; // an identity
        let tokens = DeviceTokens::<bf16>::new(&gpu, &tokens, 0);
        let (q, k, v) = (c.q::<bf16>(), c.k::<bf16>(1), c.k::<bf16>(2));
        let (q, k, v) = (gpu.upload(&q, [2, 2, 16]), gpu.upload(&k, [2, 1, 16]), gpu.upload(&v, [2, 1, 16]));
        let mut values = gpu.poisoned::<Fp8E4M3Fnuz>([2, 16, 1, 16]);
        let (mut q_out, mut k_out) = (gpu.poisoned::<bf16>([2, 2, 16]), gpu.poisoned::<bf16>([2, 1, 16]));
        let outputs = RopeCacheOutputs {
            q_out: q_out.view_mut(),
            k_out: k_out.view_mut(),
            zeros_out: None,
            key_cache: memory.view_mut_with(place, 0).unwrap(),
            value_cache: values.view_mut(),
        };
        let inputs = RopeCacheInputs {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            tables: tokens.tables(),
            slot_mapping: tokens.slots(),
            scales: CacheScales::default(),
        };
        rope_reshape_and_cache(gpu.stream(), inputs, outputs, c.layout, c.tokens.rope).unwrap();
        let codes = gpu.stream().download(&memory).unwrap();
        for (token, at) in [3 * 16, stride + 5 * 16].into_iter().enumerate() {
            let want: Vec<_> = c.k::<bf16>(1)[token * 16..][..16]
                .iter()
                .map(|x| Fp8E4M3Fnuz::from_f32_saturating(x.to_f32()).0)
                .collect();
            assert_eq!(codes[at..at + 16].iter().map(|c| c.0).collect::<Vec<_>>(), want);
        }
        // Where it would be if slots were counted in 32 bits.
        assert_ne!(codes[512 + 5 * 16..][..16], codes[stride + 5 * 16..][..16]);
    }
}

/// Each input is read once, each output written once.
#[test]
fn bytes_are_moved_once() {
    for layout in LAYOUTS {
        let c = case([32, 32, 32], [8, 2, 128], [4, 16], layout, Order::Runs);
        for gpu in kit::devices() {
            gpu.stream().take_counters().unwrap();
            c.run::<bf16, bf16, bf16>(&gpu, false);
            let Some(counters) = gpu.stream().take_counters().unwrap() else { continue };
            let (q, k) = (32 * 8 * 128 * 2, 32 * 2 * 128 * 2);
            assert_eq!(counters.global_written_bytes, q + 3 * k, "{layout:?} on {}", gpu.spec());
        }
    }
}

#[test]
fn errors() {
    let call = (KvLayout::Nhd, rope(32, RopeStyle::Neox));
    Refusals::new(call, |stream, tensors, (layout, rope)| {
        let inputs = RopeCacheInputs {
            q: tensors.input::<bf16>("q"),
            k: tensors.input("k"),
            v: tensors.input("v"),
            tables: RopeTables {
                cos: tensors.input::<bf16>("cos"),
                sin: tensors.input("sin"),
                positions: Positions::Given(tensors.input::<i32>("positions").into()),
                offsets: None,
            },
            slot_mapping: tensors.input::<i32>("slot_mapping").into(),
            scales: CacheScales {
                k: tensors.optional_input("k_scale"),
                v: tensors.optional_input("v_scale"),
            },
        };
        let outputs = RopeCacheOutputs {
            q_out: tensors.output("q_out"),
            k_out: tensors.output("k_out"),
            zeros_out: tensors.optional_output("zeros_out"),
            key_cache: tensors.output::<bf16>("key_cache"),
            value_cache: tensors.output("value_cache"),
        };
        rope_reshape_and_cache(stream, inputs, outputs, layout, rope)
    })
    .input::<bf16>("q", [4, 4, 32])
    .input::<bf16>("k", [4, 2, 32])
    .input::<bf16>("v", [4, 2, 32])
    .input::<bf16>("cos", [5, 16])
    .input::<bf16>("sin", [5, 16])
    .input::<i32>("positions", [4])
    .input::<i32>("slot_mapping", [4])
    .input::<f32>("k_scale", [1])
    .input::<f32>("v_scale", [1])
    .output::<bf16>("q_out", [4, 4, 32])
    .output::<bf16>("k_out", [4, 2, 32])
    .output::<bf16>("zeros_out", [4, 4, 32])
    .output::<bf16>("key_cache", [2, 16, 2, 32])
    .output::<bf16>("value_cache", [2, 16, 2, 32])
    .accepts(|_| {})
    .accepts(|call| {
        for name in ["k_scale", "v_scale", "zeros_out"] {
            call.without(name);
        }
    })
    // Heads.
    .refuses(
        kind!(Shape),
        &["rope_reshape_and_cache: q", "[4, 3, 32]", "multiple of those of k (2)"],
        |call| call.shape("q", [4, 3, 32]),
    )
    .refuses(kind!(Shape), &["k: shape [4, 2, 16], expected [4, 2, 32] (dim of q)"], |call| {
        call.shape("k", [4, 2, 16])
    })
    .refuses(kind!(Shape), &["v: shape [5, 2, 32], expected [4, 2, 32] (shape of k)"], |call| {
        call.shape("v", [5, 2, 32])
    })
    .refuses(kind!(Shape), &["q", "multiple of those of k (0)"], |call| call.shape("k", [4, 0, 32]))
    .refuses(kind!(Empty), &["q: axis 2 has length zero"], |call| {
        call.shape("q", [4, 4, 0]);
        call.shape("k", [4, 2, 0]);
        call.shape("v", [4, 2, 0]);
    })
    .refuses(kind!(Shape), &["q_out: shape [3, 4, 32]", "shape of q"], |call| call.shape("q_out", [3, 4, 32]))
    .refuses(kind!(Shape), &["k_out: shape [3, 4, 32]", "shape of k"], |call| call.shape("k_out", [3, 4, 32]))
    .refuses(kind!(Stride), &["k: strides"], |call| call.strides("k", [64, 1, 2]))
    // Tokens.
    .refuses(kind!(Shape), &["slot_mapping: shape [3]", "from 4 (tokens of q) to 4 (tokens of k)"], |call| {
        call.shape("slot_mapping", [3])
    })
    .refuses(kind!(Shape), &["slot_mapping: shape [5]"], |call| call.shape("slot_mapping", [5]))
    .refuses(kind!(Shape), &["slot_mapping: shape [4, 1], expected [tokens]"], |call| {
        call.shape("slot_mapping", [4, 1])
    })
    .refuses(kind!(Shape), &["positions: shape [3]"], |call| call.shape("positions", [3]))
    // Rotation.
    .refuses(kind!(Argument), &["rotary: 3, expected an even number"], |call| call.options.1.rotary = 3)
    .refuses(kind!(Shape), &["q", "at least 34 columns (rotary)"], |call| call.options.1.rotary = 34)
    .refuses(kind!(Shape), &["cos: shape [5, 16], expected [5, 8]"], |call| call.options.1.rotary = 16)
    // Caches.
    .refuses(kind!(Shape), &["key_cache", "5 axes, for Paged"], |call| call.options.0 = KvLayout::Paged)
    .refuses(kind!(Shape), &["key_cache", "4 axes, for Nhd"], |call| {
        call.shape("key_cache", [2, 2, 4, 16, 8])
    })
    .refuses(kind!(Shape), &["value_cache", "[2, 2, 32, 16]"], |call| {
        call.shape("key_cache", [2, 2, 4, 16, 8]);
        call.options.0 = KvLayout::Paged;
    })
    .refuses(kind!(Shape), &["value_cache: shape [3, 16, 2, 32], expected [2, 16, 2, 32]"], |call| {
        call.shape("value_cache", [3, 16, 2, 32])
    })
    .refuses(kind!(Shape), &["key_cache: shape [2, 16, 1, 32]", "kv_heads"], |call| {
        call.shape("key_cache", [2, 16, 1, 32])
    })
    .refuses(kind!(Shape), &["a dim that is a multiple of 8 (Paged of bf16)"], |call| {
        for name in ["q", "k", "v", "q_out", "k_out", "zeros_out"] {
            call.shape(name, [4, 2, 12]);
        }
        call.shape("cos", [5, 6]);
        call.shape("sin", [5, 6]);
        call.shape("key_cache", [2, 2, 1, 16, 8]);
        call.options = (KvLayout::Paged, rope(12, RopeStyle::Neox));
    })
    .refuses(kind!(Shape), &["blocks of a multiple of 8 tokens (PagedShuffled of bf16)"], |call| {
        call.shape("key_cache", [2, 2, 4, 12, 8]);
        call.options.0 = KvLayout::PagedShuffled;
    })
    .refuses(kind!(Empty), &["key_cache: axis 1"], |call| {
        call.shape("key_cache", [2, 0, 2, 32]);
        call.shape("value_cache", [2, 0, 2, 32]);
    })
    .refuses(kind!(Stride), &["key_cache: strides"], |call| call.strides("key_cache", [4096, 128, 64, 2]))
    .refuses(kind!(Shape), &["v_scale: shape [2], expected [1]"], |call| call.shape("v_scale", [2]))
    // Memory that is shared.
    .accepts(|call| call.overlap("q", "q_out", 0))
    .refuses(kind!(Overlap), &["v and k_out overlap"], |call| call.overlap("v", "k_out", 128))
    .refuses(kind!(Overlap), &["k and k_out overlap"], |call| call.overlap("k", "k_out", 128))
    .refuses_other_devices()
    .refuses_overlaps();
}
