//! `rope_cat_and_cache_mla` on the emulated GPUs (and real ones where there are some): bitwise identical to
//! rotation, concatenation and scatter.

use crate::common::{self, DeviceTokens, Order, Stored, Tokens, elements, heads_place, ropes, rotate_f32};
use hk_attention::{CacheElement, HeadElement, MlaInputs, MlaOutputs, rope_cat_and_cache_mla};
use hk_core::plan::rope::{Rope, RopeDirection, RopeElement, RopeSpan, RopeStyle, RopeTableWidth};
use hk_core::{Float, Fp8E4M3, Fp8E4M3Fnuz, bf16, f16};
use hk_testkit::{
    self as kit, Array, Gpu, Refusals, assert_bits, assert_error, kind, proptest::prelude::*,
    proptest::sample::select,
};

#[derive(Debug, Clone)]
struct Case {
    tokens: Tokens,
    q_heads: usize,
    kv_heads: usize,
    nope: usize,
    pe: usize,
    /// Tokens of the optional outputs, if there are any.
    first: Option<usize>,
    scale: Option<f32>,
    pad: usize,
    shift: usize,
}

impl Case {
    fn input<T: Float>(&self, number: u64, tokens: usize, heads: usize, cols: usize) -> Vec<T> {
        elements(tokens * heads * cols, self.tokens.seed ^ number << 20)
    }

    /// Every output is bitwise identical to rotation, concatenation and scatter; all else is untouched.
    #[track_caller]
    fn check<T, R, Q, C>(&self, alias: bool)
    where
        T: HeadElement + Stored,
        R: RopeElement<T> + Float,
        Q: CacheElement<T> + Stored,
        C: CacheElement<T> + Stored,
    {
        kit::devices().iter().for_each(|gpu| self.check_on::<T, R, Q, C>(gpu, alias));
    }

    #[track_caller]
    fn check_on<T, R, Q, C>(&self, gpu: &Gpu, alias: bool)
    where
        T: HeadElement + Stored,
        R: RopeElement<T> + Float,
        Q: CacheElement<T> + Stored,
        C: CacheElement<T> + Stored,
    {
        let &Self { q_heads, kv_heads, nope, pe, pad, shift, .. } = self;
        let [n, cached, all] = self.tokens.counts;
        let first = self.first.unwrap_or(0);
        let place = |tokens, heads, cols| heads_place([tokens, heads, cols], pad, shift);
        let data = [
            self.input::<T>(1, n, q_heads, nope),
            self.input::<T>(2, n, q_heads, pe),
            self.input::<T>(3, all, kv_heads, nope),
            self.input::<T>(4, all, kv_heads, pe),
        ];
        let q_nope = gpu.upload(&data[0], place(n, q_heads, nope));
        let q_pe = gpu.upload(&data[1], place(n, q_heads, pe));
        let k_nope = gpu.upload(&data[2], place(all, kv_heads, nope));
        let mut k_pe = gpu.upload(&data[3], place(all, kv_heads, pe));
        let mut q_out = gpu.poisoned::<Q>(place(n, q_heads, nope + pe));
        let mut k_pe_out = gpu.poisoned::<T>(place(all, kv_heads, pe));
        let mut cache = gpu.poisoned::<C>(place(self.tokens.n_slots, kv_heads, nope + pe));
        let mut head = gpu.poisoned::<T>(place(first, q_heads, pe));
        let mut zeros = gpu.poisoned::<T>(place(first, q_heads, nope));
        let mut want_cache = gpu.download(&cache).data;
        let tokens = DeviceTokens::<R>::new(gpu, &self.tokens, shift);
        let scale = self.scale.map(|s| gpu.upload(&[s], [1]));
        {
            let (k_in, k_out) = if alias {
                let v = k_pe.view_mut();
                (v.alias(), v)
            } else {
                (k_pe.view(), k_pe_out.view_mut())
            };
            let outputs = MlaOutputs {
                q_out: q_out.view_mut(),
                k_pe_out: k_out,
                kv_cache: cache.view_mut(),
                q_pe_head: self.first.map(|_| head.view_mut()),
                nope_zeros: self.first.map(|_| zeros.view_mut()),
            };
            let inputs = MlaInputs {
                q_nope: q_nope.view(),
                q_pe: q_pe.view(),
                k_nope: k_nope.view(),
                k_pe: k_in,
                tables: tokens.tables(),
                slot_mapping: tokens.slots(),
                k_scale: scale.as_ref().map(|s| s.view()),
            };
            rope_cat_and_cache_mla(gpu.stream(), inputs, outputs, self.tokens.rope).unwrap();
        }
        gpu.assert_untouched(&q_nope);
        gpu.assert_untouched(&q_pe);
        gpu.assert_untouched(&k_nope);
        tokens.assert_untouched(gpu);
        gpu.assert_guards(&q_out);
        gpu.assert_guards(&cache);
        gpu.assert_guards(&head);
        gpu.assert_guards(&zeros);
        let k_out = if alias { &k_pe } else { &k_pe_out };
        gpu.assert_guards(k_out);

        let rotated_q = rotate_f32::<T, R>(gpu, &self.tokens, &data[1], [q_heads, pe]);
        let rotated_k = rotate_f32::<T, R>(gpu, &self.tokens, &data[3], [kv_heads, pe]);
        let poisoned: Vec<bool> =
            self.tokens.rows().iter().map(|r| !(0..common::ROWS as i64).contains(r)).collect();
        let mut want = Vec::new();
        for row in 0..n * q_heads {
            let kept = data[0][row * nope..][..nope]
                .iter()
                .map(|x| Q::store(if poisoned[row / q_heads] { f32::NAN } else { x.to_f32() }));
            want.extend(kept.chain(rotated_q[row * pe..][..pe].iter().map(|&x| Q::store(x))));
        }
        assert_bits(&gpu.download(&q_out), &want);
        let rounded = |x: &[f32]| x.iter().map(|&v| T::from_f32(v)).collect::<Vec<T>>();
        if self.first.is_some() {
            assert_bits(&gpu.download(&head), &rounded(&rotated_q[..first * q_heads * pe]));
            assert_bits(&gpu.download(&zeros), &vec![T::from_f32(0.0); first * q_heads * nope]);
        }
        let got = gpu.download(k_out);
        let written = cached * kv_heads * pe;
        assert_bits(
            &Array::new("k_pe_out", [written], got[..written].to_vec()),
            &rounded(&rotated_k[..written]),
        );
        if alias {
            assert_bits(
                &Array::new("k_pe", [got.len() - written], got[written..].to_vec()),
                &data[3][written..],
            );
        } else {
            assert!(got[written..].iter().all(|x| x.to_f64().is_nan()));
        }

        let inverse = self.scale.map(|s| 1.0 / s);
        let scaled = |x: f32| C::store(inverse.map_or(x, |s| x * s));
        for row in 0..cached * kv_heads {
            let Some(slot) = self.tokens.slot(row / kv_heads) else { continue };
            let to = &mut want_cache[(slot * kv_heads + row % kv_heads) * (nope + pe)..][..nope + pe];
            let values = data[2][row * nope..][..nope].iter().map(|x| x.to_f32());
            let values = values.chain(rotated_k[row * pe..][..pe].iter().copied());
            to.iter_mut().zip(values).for_each(|(to, x)| *to = scaled(x));
        }
        assert_bits(&gpu.download(&cache), &want_cache);
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let widths = select(vec![(64usize, 16usize), (128, 64), (512, 64), (127, 2), (48, 16), (24, 6), (8, 16)]);
    let heads = select(vec![(4usize, 1usize), (16, 1), (4, 2), (3, 3)]);
    let counts = (select(vec![1usize, 8, 19]), select(vec![0usize, 3]), select(vec![0usize, 2]));
    let memory = (select(vec![0usize, 0, 8, 5]), select(vec![0usize, 0, 8, 1]));
    let first = prop_oneof![Just(None), (0usize..=8).prop_map(Some)];
    (widths, heads, counts, memory, first, any::<[bool; 2]>(), any::<u64>()).prop_flat_map(
        |((nope, pe), (q_heads, kv_heads), (n, more, rest), (pad, shift), first, [offsets, bad], seed)| {
            ropes(pe).prop_map(move |rope| {
                let counts = [n, n + more, n + more + rest];
                let mut tokens = Tokens::new(counts, rope, 40, Order::Shuffled, seed);
                if bad {
                    tokens = tokens.with_bad_positions();
                }
                if offsets {
                    tokens = tokens.with_offsets();
                }
                let first = first.map(|f: usize| f.min(n));
                Case { tokens, q_heads, kv_heads, nope, pe, first, scale: None, pad, shift }
            })
        },
    )
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_rotate_concat_scatter(c in cases(), f32_table: bool, alias: bool) {
        if f32_table { c.check::<bf16, f32, bf16, bf16>(alias) } else { c.check::<bf16, bf16, bf16, bf16>(alias) }
    }

    #[test]
    fn f16_matches_rotate_concat_scatter(c in cases(), alias: bool) {
        c.check::<f16, f16, f16, f16>(alias);
    }

    #[test]
    fn fp8_is_rounded_once(mut c in cases(), scaled: bool, ocp: bool) {
        c.scale = scaled.then_some(0.013);
        if ocp { c.check::<bf16, bf16, Fp8E4M3, Fp8E4M3>(false) } else { c.check::<f16, f16, f16, Fp8E4M3Fnuz>(false) }
    }

    #[test]
    fn queries_convert_to_fp8_without_the_scale(mut c in cases()) {
        c.scale = Some(4.0);
        c.check::<bf16, bf16, Fp8E4M3Fnuz, bf16>(false);
    }
}

fn deepseek(n: usize, q_heads: usize, slots: usize) -> Case {
    let (style, table) = (RopeStyle::Interleaved, RopeTableWidth::Half);
    let rope = Rope { style, table, rotary: 64, span: RopeSpan::First, direction: RopeDirection::Forward };
    let tokens = Tokens::new([n, n + 1, n + 1], rope, slots, Order::Shuffled, 5);
    Case { tokens, q_heads, kv_heads: 1, nope: 512, pe: 64, first: Some(n), scale: None, pad: 0, shift: 0 }
}

#[test]
fn heads_of_deepseek() {
    let (n, slots) = if kit::full() { (2048, 16384) } else { (8, 64) };
    for q_heads in [16, 32, 64, 128] {
        deepseek(n, q_heads, slots).check::<bf16, bf16, bf16, bf16>(false);
    }
    deepseek(1, 128, slots).check::<bf16, bf16, Fp8E4M3Fnuz, Fp8E4M3Fnuz>(false);
}

#[test]
fn empty_parts() {
    let mut c = deepseek(1, 16, 4);
    c.tokens = Tokens::new([0, 2, 3], c.tokens.rope, 4, Order::Shuffled, 5);
    c.first = Some(0);
    c.check::<bf16, bf16, bf16, bf16>(false);
    c.tokens = Tokens::new([0, 0, 3], c.tokens.rope, 4, Order::Shuffled, 5);
    for gpu in kit::devices() {
        gpu.stream().take_counters().unwrap();
        let launched = |gpu: &Gpu| gpu.stream().take_counters().unwrap().map_or(0, |c| c.workgroups);
        assert_eq!(launched(&gpu), 0);
        c.check_on::<bf16, bf16, bf16, bf16>(&gpu, false);
        assert_eq!(launched(&gpu), 0);
    }
}

#[test]
fn the_sanitizer_finds_nothing() {
    for gpu in kit::sanitized_devices() {
        deepseek(5, 16, 16).check_on::<bf16, bf16, bf16, bf16>(&gpu, true);
    }
}

#[test]
fn errors() {
    let rope = Rope {
        style: RopeStyle::Neox,
        table: RopeTableWidth::Half,
        rotary: 16,
        span: RopeSpan::First,
        direction: RopeDirection::Forward,
    };
    Refusals::new(rope, |stream, tensors, rope| {
        let inputs = common::mla_inputs::<bf16>(tensors);
        rope_cat_and_cache_mla(stream, inputs, common::mla_outputs(tensors), rope)
    })
    .input::<bf16>("q_nope", [3, 4, 32])
    .input::<bf16>("q_pe", [3, 4, 16])
    .input::<bf16>("k_nope", [3, 2, 32])
    .input::<bf16>("k_pe", [3, 2, 16])
    .input::<bf16>("cos", [5, 8])
    .input::<bf16>("sin", [5, 8])
    .input::<i32>("positions", [3])
    .input::<i32>("slot_mapping", [3])
    .input::<f32>("k_scale", [1])
    .output::<bf16>("q_out", [3, 4, 48])
    .output::<bf16>("k_pe_out", [3, 2, 16])
    .output::<bf16>("kv_cache", [9, 2, 48])
    .output::<bf16>("q_pe_head", [3, 4, 16])
    .output::<bf16>("nope_zeros", [3, 4, 32])
    .accepts(|_| {})
    .accepts(|call| call.overlap("k_pe", "k_pe_out", 0))
    .accepts(|call| {
        for name in ["k_scale", "q_pe_head", "nope_zeros"] {
            call.without(name);
        }
    })
    .refuses(
        kind!(Shape),
        &["rope_cat_and_cache_mla: q_nope: shape [3, 4, 31], expected [3, 4, 32]"],
        |call| call.shape("q_nope", [3, 4, 31]),
    )
    .refuses(kind!(Shape), &["k_pe: shape [3, 2, 15], expected [3, 2, 16]"], |call| {
        call.shape("k_pe", [3, 2, 15])
    })
    .refuses(kind!(Shape), &["q_pe", "multiple of those of k_nope (2)"], |call| {
        call.shape("q_pe", [3, 3, 16])
    })
    .refuses(kind!(Empty), &["q_pe: axis 2"], |call| call.shape("q_pe", [3, 4, 0]))
    .refuses(kind!(Empty), &["k_nope: axis 2"], |call| call.shape("k_nope", [3, 2, 0]))
    .refuses(kind!(Shape), &["slot_mapping: shape [2]", "from 3 (tokens of q)"], |call| {
        call.shape("slot_mapping", [2])
    })
    .refuses(kind!(Shape), &["q_out: shape [3, 4, 47], expected [3, 4, 48]"], |call| {
        call.shape("q_out", [3, 4, 47])
    })
    .refuses(kind!(Shape), &["k_pe_out: shape [3, 2, 15]"], |call| call.shape("k_pe_out", [3, 2, 15]))
    .refuses(kind!(Shape), &["kv_cache: shape [9, 2, 49], expected [9, 2, 48]"], |call| {
        call.shape("kv_cache", [9, 2, 49])
    })
    .refuses(kind!(Shape), &["q_pe_head", "at most 3 tokens"], |call| call.shape("q_pe_head", [4, 4, 16]))
    .refuses(kind!(Shape), &["nope_zeros", "as many in q_pe_head"], |call| {
        call.shape("q_pe_head", [2, 4, 16]);
        call.shape("nope_zeros", [1, 4, 32]);
    })
    .refuses(kind!(Argument), &["rotary"], |call| call.options.rotary = 5)
    .refuses(kind!(Shape), &["k_scale: shape [2], expected [1]"], |call| call.shape("k_scale", [2]))
    .refuses(kind!(Stride), &["k_nope: strides"], |call| call.strides("k_nope", [64, 1, 2]))
    .refuses(kind!(Overlap), &["k_pe and k_pe_out overlap"], |call| call.overlap("k_pe", "k_pe_out", 32))
    .refuses_other_devices()
    .refuses_overlaps();
}

/// Columns of one tensor: the output begins in the last column of the input.
#[test]
fn interleaved_columns_may_not_overlap() {
    let gpu = &kit::devices()[0];
    let c = deepseek(3, 16, 9);
    let tokens = DeviceTokens::<bf16>::new(gpu, &c.tokens, 0);
    let x = |shape: [usize; 3]| gpu.upload(&vec![bf16::ONE; shape.iter().product()], shape);
    let (q_pe, k_nope, k_pe) = (x([3, 16, 64]), x([4, 1, 512]), x([4, 1, 64]));
    let (mut k_pe_out, mut cache) = (gpu.poisoned::<bf16>([4, 1, 64]), gpu.poisoned::<bf16>([9, 1, 576]));
    let mut memory = gpu.poisoned::<bf16>([3, 16, 1100]);
    let mut attempt = |at: usize| {
        let whole = memory.view_mut();
        let (q_nope, q_out) = (whole.alias().slice(2, 0..512)?, whole.slice(2, at..at + 576)?);
        let inputs = MlaInputs {
            q_nope,
            q_pe: q_pe.view(),
            k_nope: k_nope.view(),
            k_pe: k_pe.view(),
            tables: tokens.tables(),
            slot_mapping: tokens.slots(),
            k_scale: None,
        };
        let outputs = MlaOutputs {
            q_out,
            k_pe_out: k_pe_out.view_mut(),
            kv_cache: cache.view_mut(),
            q_pe_head: None,
            nope_zeros: None,
        };
        rope_cat_and_cache_mla(gpu.stream(), inputs, outputs, c.tokens.rope)
    };
    assert_error(attempt(511), kind!(Overlap), &["q_nope and q_out overlap"]);
    attempt(512).unwrap();
}
