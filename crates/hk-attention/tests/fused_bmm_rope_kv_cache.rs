//! `fused_bmm_rope_kv_cache` on the emulated GPUs (and real ones where there are some): the GEMM against f64, all else
//! against `rope_cat_and_cache_mla`.

use crate::common::{self, DeviceTokens, Order, Tokens, elements};
use hk_attention::{
    CacheElement, Fp8Weight, MlaInputs, MlaOutputs, MlaWeight, Mxfp4Weight, fused_bmm_rope_kv_cache,
    reference, rope_cat_and_cache_mla,
};
use hk_core::plan::rope::{Rope, RopeDirection, RopeSpan, RopeStyle, RopeTableWidth};
use hk_core::quant::Quantized;
use hk_core::{Arch, E8M0, Element, Fp4, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Layout, bf16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, HostTensorF64, Place, Refusals, Tensor, Tolerance, assert_bits,
    assert_error, compare::compare, kind, proptest::prelude::*, proptest::sample::select, widen,
};

type T = bf16;

/// Weights on a device, and their values.
enum Weights {
    Same(Tensor<T>),
    Fp8(Tensor<Fp8E4M3>, Tensor<f32>, usize),
    Fnuz(Tensor<Fp8E4M3Fnuz>, Tensor<f32>, usize),
    Mxfp4(Tensor<Fp4x2>, Tensor<E8M0>, Option<Tensor<f32>>),
}

impl Weights {
    fn view(&self) -> MlaWeight<'_, T> {
        match self {
            Self::Same(w) => MlaWeight::Same(w.view()),
            Self::Fp8(w, s, group) => {
                MlaWeight::Fp8(Fp8Weight { w: w.view(), scale: s.view(), group: *group })
            }
            Self::Fnuz(w, s, group) => {
                MlaWeight::Fp8Fnuz(Fp8Weight { w: w.view(), scale: s.view(), group: *group })
            }
            Self::Mxfp4(w, scales, y_scale) => MlaWeight::Mxfp4(Mxfp4Weight {
                w: w.view(),
                scales: scales.view(),
                y_scale: y_scale.as_ref().map(|s| s.view()),
            }),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Same,
    /// With groups of so many columns.
    Fp8(usize),
    /// With the scale that divides the result, if any.
    Mxfp4(Option<f32>),
}

#[derive(Debug, Clone)]
struct Case {
    tokens: Tokens,
    heads: usize,
    kv_heads: usize,
    cols: usize,
    nope: usize,
    pe: usize,
    form: Form,
    first: Option<usize>,
    /// Elements after each row of q_nope and w.
    pad: usize,
    k_seed: u64,
}

/// What a call writes.
struct Written<C: Element> {
    q_out: Array<T>,
    k_pe_out: Array<T>,
    cache: Array<C>,
}

fn rope(rotary: usize) -> Rope {
    Rope {
        style: RopeStyle::Interleaved,
        table: RopeTableWidth::Half,
        rotary,
        span: RopeSpan::First,
        direction: RopeDirection::Forward,
    }
}

impl Case {
    fn new(n: usize, [heads, kv_heads, cols, nope, pe]: [usize; 5], form: Form, seed: u64) -> Self {
        let tokens = Tokens::new([n, n + 1, n + 2], rope(pe), 20 + n, Order::Shuffled, seed);
        Self { tokens, heads, kv_heads, cols, nope, pe, form, first: None, pad: 0, k_seed: seed }
    }

    fn n(&self) -> usize {
        self.tokens.counts[0]
    }

    fn place(&self, shape: [usize; 3]) -> Place {
        Place::rows(shape, shape[2] + self.pad)
    }

    fn q(&self) -> Vec<T> {
        Fill::Normal.elements(self.heads * self.n() * self.cols, self.tokens.seed ^ 0x51)
    }

    /// Weights and the values that they stand for; those of queries too.
    fn weights(&self, gpu: &Gpu, q: &[T]) -> (Weights, Vec<f64>, Vec<f64>) {
        let shape = [self.heads, self.nope, self.cols];
        let values: Vec<f32> = Fill::Normal.elements(shape.iter().product(), self.tokens.seed ^ 0x77);
        let place = self.place(shape);
        let q = widen(q);
        match self.form {
            Form::Same => {
                let w: Vec<T> = values.iter().map(|&x| T::from_f32(x)).collect();
                (Weights::Same(gpu.upload(&w, place)), widen(&w), q)
            }
            Form::Fp8(group) => {
                let scale = 0.75;
                let s = gpu.upload(&[scale], [1]);
                macro_rules! fp8 {
                    ($f:ident, $variant:ident) => {{
                        let w: Vec<$f> = values.iter().map(|&x| $f::from_f32_saturating(x)).collect();
                        let of_w = w.iter().map(|x| f64::from(x.to_f32()) * f64::from(scale)).collect();
                        let round = |x| $f::from_f32_saturating(x).to_f32();
                        let rows = q.chunks(self.cols);
                        let of_q =
                            rows.flat_map(|r| reference::fp8_groups(r, group, $f::FORMAT, round)).collect();
                        (Weights::$variant(gpu.upload(&w, place), s, group), of_w, of_q)
                    }};
                }
                match gpu.stream().device().info().arch {
                    Arch::Gfx942 => fp8!(Fp8E4M3Fnuz, Fnuz),
                    _ => fp8!(Fp8E4M3, Fp8),
                }
            }
            Form::Mxfp4(y_scale) => {
                let codes = common::integers(self.tokens.seed, values.len(), 16);
                let w: Vec<Fp4x2> = codes
                    .chunks(2)
                    .map(|c| Fp4x2::new(Fp4::from_bits(c[0] as u8), Fp4::from_bits(c[1] as u8)))
                    .collect();
                let scales: Vec<E8M0> = common::integers(self.tokens.seed ^ 5, values.len() / 32, 5)
                    .iter()
                    .map(|&e| E8M0(125 + e as u8))
                    .collect();
                let inverse = f64::from(y_scale.map_or(1.0, |s| 1.0 / s));
                let of_w = codes.iter().enumerate().map(|(i, &c)| {
                    f64::from(Fp4::from_bits(c as u8).to_f32()) * f64::from(scales[i / 32].to_f32()) * inverse
                });
                let of_q = q.chunks(self.cols).flat_map(reference::mxfp4_blocks).collect();
                let of_w = of_w.collect();
                let w = gpu.upload(&w, self.place([self.heads, self.nope, self.cols / 2]));
                let scales = gpu.upload(&scales, [self.heads, self.nope, self.cols / 32]);
                let y_scale = y_scale.map(|s| gpu.upload(&[s], [1]));
                (Weights::Mxfp4(w, scales, y_scale), of_w, of_q)
            }
        }
    }

    /// Runs the operator, or with `q_nope_out` the one without a GEMM.
    #[track_caller]
    fn run<C: CacheElement<T>>(&self, gpu: &Gpu, q: &[T], w: &Weights, product: Option<&[T]>) -> Written<C> {
        let &Self { heads, kv_heads, nope, pe, cols, .. } = self;
        let [n, _, all] = self.tokens.counts;
        let first = self.first.unwrap_or(0);
        // As a view of [tokens, heads, cols].
        let strides = [cols + self.pad, heads * (cols + self.pad), 1];
        let transposed = gpu.upload(q, Place::new(Layout::with_strides([heads, n, cols], strides).unwrap()));
        let q_nope = gpu.upload(product.unwrap_or(&[]), [product.map_or(0, |_| n), heads, nope]);
        let q_pe = gpu.upload(&elements::<T>(n * heads * pe, self.tokens.seed ^ 2), [n, heads, pe]);
        let k_nope =
            gpu.upload(&elements::<T>(all * kv_heads * nope, self.k_seed ^ 3), [all, kv_heads, nope]);
        let k_pe = gpu.upload(&elements::<T>(all * kv_heads * pe, self.k_seed ^ 4), [all, kv_heads, pe]);
        let mut q_out = gpu.poisoned::<T>([n, heads, nope + pe]);
        let mut k_pe_out = gpu.poisoned::<T>([all, kv_heads, pe]);
        let mut cache = gpu.poisoned::<C>([self.tokens.n_slots, kv_heads, nope + pe]);
        let mut head = gpu.poisoned::<T>([first, heads, pe]);
        let mut zeros = gpu.poisoned::<T>([first, heads, nope]);
        let tokens = DeviceTokens::<f32>::new(gpu, &self.tokens, 0);
        let outputs = MlaOutputs {
            q_out: q_out.view_mut(),
            k_pe_out: k_pe_out.view_mut(),
            kv_cache: cache.view_mut(),
            q_pe_head: self.first.map(|_| head.view_mut()),
            nope_zeros: self.first.map(|_| zeros.view_mut()),
        };
        let (stream, rope) = (gpu.stream(), self.tokens.rope);
        let inputs = MlaInputs {
            q_nope: if product.is_some() { q_nope.view() } else { transposed.view() },
            q_pe: q_pe.view(),
            k_nope: k_nope.view(),
            k_pe: k_pe.view(),
            tables: tokens.tables(),
            slot_mapping: tokens.slots(),
            k_scale: None,
        };
        if product.is_some() {
            rope_cat_and_cache_mla(stream, inputs, outputs, rope).unwrap();
        } else {
            fused_bmm_rope_kv_cache(stream, inputs, w.view(), outputs, rope).unwrap();
        }
        gpu.assert_untouched(&transposed);
        gpu.assert_guards(&q_out);
        gpu.assert_guards(&cache);
        if self.first.is_some() {
            assert_bits(&gpu.download(&zeros), &vec![T::from_f32(0.0); first * heads * nope]);
            gpu.assert_guards(&zeros);
        }
        Written {
            q_out: gpu.download(&q_out),
            k_pe_out: gpu.download(&k_pe_out),
            cache: gpu.download(&cache),
        }
    }

    /// The GEMM is close to its f64 reference; all else is bitwise identical to `rope_cat_and_cache_mla`.
    #[track_caller]
    fn check<C: CacheElement<T>>(&self) {
        for gpu in kit::devices() {
            let q = self.q();
            let (w, of_w, of_q) = self.weights(&gpu, &q);
            let got = self.run::<C>(&gpu, &q, &w, None);
            let (mut want, magnitudes) =
                reference::bmm(&of_q, &of_w, [self.heads, self.n(), self.nope, self.cols]);
            for (row, want) in want.chunks_mut(self.nope).enumerate() {
                if !(0..common::ROWS as i64).contains(&self.tokens.rows()[row / self.heads]) {
                    want.fill(f64::NAN);
                }
            }
            let rows = got.q_out.chunks(self.nope + self.pe);
            let product: Vec<T> = rows.flat_map(|row| &row[..self.nope]).copied().collect();
            let shape = vec![self.n(), self.heads, self.nope];
            let want = HostTensorF64::new(shape, want).with_magnitudes(magnitudes);
            let terms = if self.form == Form::Same { -18 } else { -16 };
            let tolerance = Tolerance::Sum { terms: 2f64.powi(terms) };
            compare(format!("q_nope_out of {self:?}"), T::DTYPE, &widen(&product), &want, tolerance).assert();
            let unfused = self.run::<C>(&gpu, &q, &w, Some(&product));
            assert_bits(&got.q_out, &unfused.q_out);
            assert_bits(&got.k_pe_out, &unfused.k_pe_out);
            assert_bits(&got.cache, &unfused.cache);
        }
    }
}

fn cases(form: Form) -> impl Strategy<Value = Case> {
    let step = if matches!(form, Form::Mxfp4(_)) { 32 } else { 1 };
    let cols = select(vec![128usize, 64, 192, 37, 8, 144]).prop_map(move |c: usize| c.next_multiple_of(step));
    let sizes =
        (select(vec![1usize, 2, 17]), select(vec![1usize, 3]), cols, select(vec![64usize, 40, 21, 72]));
    let more =
        (select(vec![16usize, 6]), select(vec![0usize, 0, 8, 16, 1]), prop_oneof![Just(None), Just(Some(1))]);
    (sizes, more, any::<bool>(), any::<u64>()).prop_map(
        move |((n, heads, cols, nope), (pe, pad, first), bad, seed)| {
            let mut c = Case::new(n, [heads, 1, cols, nope, pe], form, seed);
            if bad {
                c.tokens = c.tokens.with_bad_positions();
            }
            Case { pad, first, ..c }
        },
    )
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_reference(c in cases(Form::Same)) {
        c.check::<bf16>();
    }

    #[test]
    fn fp8_matches_reference(c in cases(Form::Fp8(64)), ocp: bool) {
        if ocp { c.check::<Fp8E4M3>() } else { c.check::<Fp8E4M3Fnuz>() }
    }

    #[test]
    fn mxfp4_matches_reference(mut c in cases(Form::Mxfp4(None)), y_scale in prop_oneof![Just(None), Just(Some(0.3))]) {
        c.form = Form::Mxfp4(y_scale);
        c.check::<bf16>();
    }
}

#[test]
fn heads_of_deepseek() {
    let tokens: &[usize] = if kit::full() { &[1, 2, 31, 32, 33, 2048] } else { &[1, 33] };
    for (&n, form) in
        tokens.iter().zip([Form::Same, Form::Fp8(128), Form::Mxfp4(Some(7.0))].into_iter().cycle())
    {
        let heads = if kit::full() { 16 } else { 2 };
        Case::new(n, [heads, 1, 128, 512, 64], form, 3).check::<bf16>();
    }
}

/// Identity weights copy, in tiles of few and of many tokens.
#[test]
fn an_identity_copies() {
    for gpu in kit::devices() {
        for (n, heads) in [(3, 2), (20, 320)] {
            let c = Case::new(n, [heads, 1, 64, 64, 16], Form::Same, 8);
            let q = c.q();
            let mut w = vec![T::from_f32(0.0); heads * 64 * 64];
            (0..heads * 64).for_each(|row| w[row * 64 + row % 64] = T::from_f32(1.0));
            let w = Weights::Same(gpu.upload(&w, [heads, 64, 64]));
            let got = c.run::<bf16>(&gpu, &q, &w, None);
            for (token, head) in (0..n).flat_map(|t| (0..heads).map(move |h| (t, h))) {
                assert_eq!(
                    got.q_out[(token * heads + head) * 80..][..64],
                    q[(head * n + token) * 64..][..64]
                );
            }
        }
    }
}

/// Results are batch-invariant.
#[test]
fn tokens_are_batch_invariant() {
    for gpu in kit::devices() {
        for form in [Form::Same, Form::Fp8(64), Form::Mxfp4(None)] {
            // Many more than the tokens of a wave.
            let cols = if form == Form::Mxfp4(None) { 96 } else { 72 };
            let c = Case::new(37, [304, 1, cols, 64, 16], form, 21);
            let q = c.q();
            let (w, ..) = c.weights(&gpu, &q);
            let all = c.run::<bf16>(&gpu, &q, &w, None);
            let mut one = c.clone();
            one.tokens.counts = [1, 1, 1];
            one.tokens.positions.truncate(1);
            one.tokens.slots.truncate(1);
            one.tokens.positions[0] = c.tokens.positions[35];
            let mine: Vec<T> = (0..304).flat_map(|h| q[(h * 37 + 35) * cols..][..cols].to_vec()).collect();
            let alone = one.run::<bf16>(&gpu, &mine, &w, None);
            for head in 0..304 {
                let of_all = &all.q_out[(35 * 304 + head) * 80..][..64];
                assert_eq!(of_all, &alone.q_out[head * 80..][..64], "{form:?}");
            }
        }
    }
}

/// Scales from the least to the largest, with queries that compensate; a NaN scale, and an infinite query.
#[test]
fn mxfp4_scales_have_their_whole_range() {
    let exponents = [0u8, 1, 2, 64, 126, 127, 128, 192, 252, 253, 254];
    let (tokens, nope, cols) = (3, 64, 32 * exponents.len());
    for gpu in kit::devices() {
        let c = Case::new(tokens, [1, 1, cols, nope, 16], Form::Mxfp4(None), 6);
        let scale = |col: usize| (f64::from(exponents[col / 32]) - 127.0).exp2();
        let mut q: Vec<T> = c
            .q()
            .iter()
            .enumerate()
            .map(|(i, x)| T::from_f64(x.to_f64() * scale(i % cols).recip().min(124f64.exp2())))
            .collect();
        let (Weights::Mxfp4(w, ..), ..) = c.weights(&gpu, &q) else { unreachable!() };
        let codes = common::integers(c.tokens.seed, nope * cols, 16);
        let mut scales: Vec<E8M0> = (0..nope).flat_map(|_| exponents.map(E8M0)).collect();
        let of_w: Vec<f64> = codes
            .iter()
            .enumerate()
            .map(|(i, &c)| f64::from(Fp4::from_bits(c as u8).to_f32()) * scale(i % cols))
            .collect();
        let of_q: Vec<f64> = widen(&q).chunks(cols).flat_map(reference::mxfp4_blocks).collect();
        let (want, magnitudes) = reference::bmm(&of_q, &of_w, [1, tokens, nope, cols]);
        scales[5 * exponents.len() + 3] = E8M0(255);
        q[cols + 40] = T::INFINITY;
        let weights = Weights::Mxfp4(w, gpu.upload(&scales, [1, nope, exponents.len()]), None);
        let got = c.run::<bf16>(&gpu, &q, &weights, None);
        for (i, (want, magnitude)) in want.iter().zip(&magnitudes).enumerate() {
            let (token, n) = (i / nope, i % nope);
            let got = got.q_out[token * (nope + 16) + n];
            if token == 1 || n == 5 {
                assert!(got.is_nan(), "token {token}, output {n}: {got} on {}", gpu.spec());
                continue;
            }
            let error = (got.to_f64() - want).abs();
            let bound = 8e-3 * want.abs() + magnitude / 65536.0;
            assert!(error <= bound, "token {token}, output {n}: {got}, want {want} on {}", gpu.spec());
        }
    }
}

/// Queries of zero give zero, in groups whose scale is the least one; keys do not touch queries.
#[test]
fn zero_queries_give_zero() {
    for gpu in kit::devices() {
        for form in [Form::Same, Form::Fp8(128), Form::Mxfp4(None)] {
            let mut c = Case::new(3, [2, 1, 128, 64, 16], form, 4);
            let (w, ..) = c.weights(&gpu, &c.q());
            let zero = c.run::<bf16>(&gpu, &vec![T::from_f32(0.0); 2 * 3 * 128], &w, None);
            assert!((0..6).all(|row| zero.q_out[row * 80..][..64].iter().all(|x| x.to_f32() == 0.0)));
            let before = c.run::<bf16>(&gpu, &c.q(), &w, None);
            c.k_seed += 1;
            let after = c.run::<bf16>(&gpu, &c.q(), &w, None);
            assert_bits(&after.q_out, &before.q_out);
            assert_ne!(
                bytemuck::cast_slice::<_, u16>(&after.cache),
                bytemuck::cast_slice::<_, u16>(&before.cache)
            );
        }
    }
}

/// The weights of a refused call.
#[derive(Clone, Copy)]
enum Refused {
    Same,
    /// With groups of so many columns.
    Fp8(usize),
    Mxfp4,
}

/// Calls for 3 tokens of 2 heads; `cols` are the columns of `q_nope`.
fn refusals<'f>(form: Refused, cols: usize) -> Refusals<'f, Refused> {
    let table = Refusals::new(form, |stream, tensors, form| {
        let w = match form {
            Refused::Same => MlaWeight::Same(tensors.input::<T>("w")),
            Refused::Fp8(group) => {
                MlaWeight::Fp8(Fp8Weight { w: tensors.input("w"), scale: tensors.input("w_scale"), group })
            }
            Refused::Mxfp4 => MlaWeight::Mxfp4(Mxfp4Weight {
                w: tensors.input("w"),
                scales: tensors.input("w_scales"),
                y_scale: tensors.optional_input("y_scale"),
            }),
        };
        let inputs = common::mla_inputs::<T>(tensors);
        fused_bmm_rope_kv_cache(stream, inputs, w, common::mla_outputs(tensors), rope(16))
    })
    .input::<T>("q_nope", [2, 3, cols])
    .input::<T>("q_pe", [3, 2, 16])
    .input::<T>("k_nope", [5, 1, 32])
    .input::<T>("k_pe", [5, 1, 16])
    .input::<T>("cos", [50, 8])
    .input::<T>("sin", [50, 8])
    .input::<i32>("positions", [3])
    .input::<i32>("slot_mapping", [4])
    .input::<f32>("k_scale", [1])
    .output::<T>("q_out", [3, 2, 48])
    .output::<T>("k_pe_out", [5, 1, 16])
    .output::<T>("kv_cache", [23, 1, 48])
    .output::<T>("q_pe_head", [3, 2, 16])
    .output::<T>("nope_zeros", [3, 2, 32]);
    match form {
        Refused::Same => table.input::<T>("w", [2, 32, cols]),
        Refused::Fp8(_) => table.input::<Fp8E4M3>("w", [2, 32, cols]).input::<f32>("w_scale", [1]),
        Refused::Mxfp4 => table
            .input::<Fp4x2>("w", [2, 32, cols / 2])
            .input::<E8M0>("w_scales", [2, 32, cols / 32])
            .input::<f32>("y_scale", [1]),
    }
}

#[test]
fn errors() {
    refusals(Refused::Same, 64)
        .accepts(|_| {})
        .refuses(
            kind!(Shape),
            &["fused_bmm_rope_kv_cache: w: shape [2, 32, 64], expected [2, 32, 63]"],
            |call| call.shape("q_nope", [2, 3, 63]),
        )
        .refuses(kind!(Shape), &["q_nope: shape [3, 2, 64], expected [2, 3, 64]"], |call| {
            call.shape("q_nope", [3, 2, 64])
        })
        .refuses(kind!(Shape), &["w: shape [2, 31, 64], expected [2, 32, 64]"], |call| {
            call.shape("w", [2, 31, 64])
        })
        .refuses(kind!(Empty), &["q_nope: axis 2"], |call| call.shape("q_nope", [2, 3, 0]))
        .refuses(kind!(Overlap), &["q_nope and q_out overlap"], |call| call.overlap("q_nope", "q_out", 0))
        .refuses(kind!(TooLarge), &["q_nope: 1073741825 columns"], |call| {
            let cols = (1 << 30) + 1;
            for (name, shape) in [
                ("q_nope", [0, 3, cols]),
                ("w", [0, 32, cols]),
                ("q_pe", [3, 0, 16]),
                ("q_out", [3, 0, 48]),
                ("q_pe_head", [3, 0, 16]),
                ("nope_zeros", [3, 0, 32]),
            ] {
                call.shape(name, shape);
            }
        })
        .refuses_other_devices()
        .refuses_overlaps();
    for group in [0, 32, 96] {
        let says = ["group", "a power of two from 64"];
        refusals(Refused::Fp8(group), 64).refuses(kind!(Argument), &says, |_| {});
    }
    refusals(Refused::Fp8(128), 64)
        .refuses(kind!(Shape), &["w_scale: shape [2]"], |call| call.shape("w_scale", [2]));
    refusals(Refused::Mxfp4, 64)
        .accepts(|_| {})
        .accepts(|call| call.without("y_scale"))
        .refuses(kind!(Shape), &["q_nope", "a multiple of 32 columns"], |call| {
            call.shape("q_nope", [2, 3, 48])
        })
        .refuses(kind!(Shape), &["w: shape [2, 32, 32], expected [2, 32, 16]"], |call| {
            call.shape("q_nope", [2, 3, 32])
        })
        .refuses(kind!(Shape), &["y_scale: shape [2], expected [1]"], |call| call.shape("y_scale", [2]))
        .refuses(kind!(Shape), &["w_scales: shape [2, 32, 1], expected [2, 32, 2]"], |call| {
            call.shape("w_scales", [2, 32, 1])
        })
        .refuses_other_devices();
}

/// Weights in the fp8 of the other generation.
#[test]
fn foreign_fp8_is_refused() {
    for gpu in kit::devices() {
        let c = Case::new(3, [2, 1, 64, 32, 16], Form::Same, 4);
        let (ocp, fnuz) =
            (gpu.upload(&[Fp8E4M3(0); 4096], [2, 32, 64]), gpu.upload(&[Fp8E4M3Fnuz(0); 4096], [2, 32, 64]));
        let one = gpu.upload(&[1.0f32], [1]);
        let arch = gpu.stream().device().info().arch;
        let foreign = match arch {
            Arch::Gfx942 => MlaWeight::Fp8(Fp8Weight { w: ocp.view(), scale: one.view(), group: 128 }),
            _ => MlaWeight::Fp8Fnuz(Fp8Weight { w: fnuz.view(), scale: one.view(), group: 128 }),
        };
        let x = |shape: [usize; 3]| gpu.upload(&vec![T::from_f32(1.0); shape.iter().product()], shape);
        let (q_nope, q_pe, k_nope, k_pe) = (x([2, 3, 64]), x([3, 2, 16]), x([5, 1, 32]), x([5, 1, 16]));
        let [mut q_out, mut k_pe_out, mut cache] =
            [[3, 2, 48], [5, 1, 16], [23, 1, 48]].map(|shape| gpu.poisoned::<T>(shape));
        let tokens = DeviceTokens::<T>::new(&gpu, &c.tokens, 0);
        let inputs = MlaInputs {
            q_nope: q_nope.view(),
            q_pe: q_pe.view(),
            k_nope: k_nope.view(),
            k_pe: k_pe.view(),
            tables: tokens.tables(),
            slot_mapping: tokens.slots(),
            k_scale: None,
        };
        let outputs = MlaOutputs {
            q_out: q_out.view_mut(),
            k_pe_out: k_pe_out.view_mut(),
            kv_cache: cache.view_mut(),
            q_pe_head: None,
            nope_zeros: None,
        };
        let refused = fused_bmm_rope_kv_cache(gpu.stream(), inputs, foreign, outputs, rope(16));
        let weights = format!("weights on {arch}");
        assert_error(refused, kind!(Unsupported), &["fp8e4m3", &weights]);
        for written in [&q_out, &k_pe_out, &cache] {
            gpu.assert_untouched(written);
        }
    }
}
