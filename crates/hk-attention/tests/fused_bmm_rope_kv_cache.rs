//! `fused_bmm_rope_kv_cache` on the emulated GPUs (and real ones where there are some): the product, and all else as
//! `rope_cat_and_cache_mla` does it.

mod common;

use common::{DeviceTokens, Order, Tokens, elements};
use hk_attention::{
    CacheElement, Fp8Weight, MlaOutputs, MlaWeight, Mxfp4Weight, fused_bmm_rope_kv_cache, reference,
    rope_cat_and_cache_mla,
};
use hk_core::quant::Quantized;
use hk_core::rope::{Rope, RopeSpan, RopeStyle, RopeTableWidth};
use hk_core::{Arch, Device, E8M0, Element, Fp4, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Layout, Result, Stream, bf16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Tensor, assert_bits, assert_error, kind, proptest::prelude::*,
    proptest::sample::select, widen,
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
    /// With the number that the product is divided by.
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
        inverse: false,
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
                    .map(|c| Fp4x2::new(Fp4::from_code(c[0] as u8), Fp4::from_code(c[1] as u8)))
                    .collect();
                let scales: Vec<E8M0> = common::integers(self.tokens.seed ^ 5, values.len() / 32, 5)
                    .iter()
                    .map(|&e| E8M0(125 + e as u8))
                    .collect();
                let inverse = f64::from(y_scale.map_or(1.0, |s| 1.0 / s));
                let of_w = codes.iter().enumerate().map(|(i, &c)| {
                    f64::from(Fp4::from_code(c as u8).to_f32()) * f64::from(scales[i / 32].to_f32()) * inverse
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

    /// Runs the operator, or with `q_nope` in place of the product the one without.
    #[track_caller]
    fn run<C: CacheElement<T>>(&self, gpu: &Gpu, q: &[T], w: &Weights, product: Option<&[T]>) -> Written<C> {
        let &Self { heads, kv_heads, nope, pe, cols, .. } = self;
        let [n, _, all] = self.tokens.counts;
        let first = self.first.unwrap_or(0);
        // As a view of [tokens, heads, cols].
        let strides = [cols + self.pad, heads * (cols + self.pad), 1];
        let turned = gpu.upload(q, Place::new(Layout::with_strides([heads, n, cols], strides).unwrap()));
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
        let (tables, slots, rope) = (tokens.tables(), tokens.slots(), self.tokens.rope);
        let (q_pe, k_nope, k_pe, stream) = (q_pe.view(), k_nope.view(), k_pe.view(), gpu.stream());
        if product.is_some() {
            let q_nope = q_nope.view();
            rope_cat_and_cache_mla(stream, q_nope, q_pe, k_nope, k_pe, tables, slots, None, outputs, rope)
                .unwrap();
        } else {
            let q = turned.view();
            fused_bmm_rope_kv_cache(
                stream,
                q,
                w.view(),
                q_pe,
                k_nope,
                k_pe,
                tables,
                slots,
                None,
                outputs,
                rope,
            )
            .unwrap();
        }
        gpu.assert_untouched(&turned);
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

    /// The product is near the f64 one, and all else has the bits of the operator without it.
    #[track_caller]
    fn check<C: CacheElement<T>>(&self) {
        for gpu in kit::devices() {
            let q = self.q();
            let (w, of_w, of_q) = self.weights(&gpu, &q);
            let got = self.run::<C>(&gpu, &q, &w, None);
            let (want, magnitudes) =
                reference::bmm(&of_q, &of_w, [self.heads, self.n(), self.nope, self.cols]);
            let width = self.nope + self.pe;
            let mut product = Vec::new();
            for (i, (want, magnitude)) in want.iter().zip(&magnitudes).enumerate() {
                let (row, n) = (i / self.nope, i % self.nope);
                let got = got.q_out[row * width + n];
                product.push(got);
                let position = self.tokens.rows()[row / self.heads];
                if !(0..common::ROWS as i64).contains(&position) {
                    assert!(got.is_nan());
                    continue;
                }
                let bound = 8e-3 * want.abs() + magnitude / 256.0 / (self.cols as f64).sqrt();
                let error = (got.to_f64() - want).abs();
                assert!(
                    error <= bound,
                    "{self:?}: row {row}, output {n}: got {got}, want {want}, bound {bound:e}"
                );
            }
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
    fn bf16_is_the_product_then_the_rest(c in cases(Form::Same)) {
        c.check::<bf16>();
    }

    #[test]
    fn fp8_is_the_product_of_codes(c in cases(Form::Fp8(64)), ocp: bool) {
        if ocp { c.check::<Fp8E4M3>() } else { c.check::<Fp8E4M3Fnuz>() }
    }

    #[test]
    fn mxfp4_is_the_product_of_codes(mut c in cases(Form::Mxfp4(None)), y_scale in prop_oneof![Just(None), Just(Some(0.3))]) {
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

/// An identity copies, by few tokens a wave and by many: the same bits whatever the number of tokens.
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

/// A token's product has the same bits alone and among others.
#[test]
fn a_token_does_not_depend_on_others() {
    for gpu in kit::devices() {
        for form in [Form::Same, Form::Fp8(64), Form::Mxfp4(None)] {
            // More than the tokens of a wave, by many.
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

/// Scales from the least to the largest, with queries that make up for them; one that is NaN, and a query that is infinite.
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
            .map(|(i, &c)| f64::from(Fp4::from_code(c as u8).to_f32()) * scale(i % cols))
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

/// A call whose `input` shares memory with its `output`.
fn overlap(gpu: &Gpu, c: &Case, input: &str, output: &str) -> Result<()> {
    let input_shape = if input == "w" { [2, 32, 64] } else { [2, 3, 64] };
    let shapes = [[3, 2, 48], [5, 1, 16], [23, 1, 48], [3, 2, 16], [3, 2, 32]];
    let names = ["q_out", "k_pe_out", "kv_cache", "q_pe_head", "nope_zeros"];
    let at = names.iter().position(|n| *n == output).unwrap();
    let one = T::from_f32(1.0);
    let x = |shape: [usize; 3]| gpu.upload(&vec![one; shape.iter().product()], shape);
    let (q_nope, w, q_pe, k_nope, k_pe) =
        (x([2, 3, 64]), x([2, 32, 64]), x([3, 2, 16]), x([5, 1, 32]), x([5, 1, 16]));
    let mut memory = gpu.poisoned::<T>([8192]);
    let (from, to) = common::overlapping(memory.view_mut(), &input_shape, &shapes[at]);
    let [mut q_out, mut k_pe_out, mut cache, mut head, mut zeros] =
        shapes.map(|shape| gpu.poisoned::<T>(shape));
    let outputs = MlaOutputs {
        q_out: q_out.view_mut(),
        k_pe_out: k_pe_out.view_mut(),
        kv_cache: cache.view_mut(),
        q_pe_head: Some(head.view_mut()),
        nope_zeros: Some(zeros.view_mut()),
    };
    let outputs = match output {
        "q_out" => MlaOutputs { q_out: to, ..outputs },
        "k_pe_out" => MlaOutputs { k_pe_out: to, ..outputs },
        "kv_cache" => MlaOutputs { kv_cache: to, ..outputs },
        "q_pe_head" => MlaOutputs { q_pe_head: Some(to), ..outputs },
        _ => MlaOutputs { nope_zeros: Some(to), ..outputs },
    };
    let (q, w) = if input == "w" { (q_nope.view(), from) } else { (from, w.view()) };
    let w = MlaWeight::Same(w);
    let tokens = DeviceTokens::<f32>::new(gpu, &c.tokens, 0);
    let (tables, slots, stream) = (tokens.tables(), tokens.slots(), gpu.stream());
    fused_bmm_rope_kv_cache(
        stream,
        q,
        w,
        q_pe.view(),
        k_nope.view(),
        k_pe.view(),
        tables,
        slots,
        None,
        outputs,
        rope(16),
    )
}

/// More columns than fit, of no heads; and tensors of another device.
#[test]
fn too_many_columns_and_other_devices_are_refused() {
    let gpu = &kit::devices()[0];
    let c = Case::new(3, [2, 1, 64, 32, 16], Form::Same, 4);
    let other = Device::open("emu:gfx950").unwrap().create_stream().unwrap();
    let call = |stream: &Stream, cols: usize| {
        let x = |shape: [usize; 3]| gpu.upload(&vec![T::from_f32(1.0); shape.iter().product()], shape);
        let (q_nope, w, q_pe) = (x([0, 3, cols]), x([0, 32, cols]), x([3, 0, 16]));
        let (k_nope, k_pe) = (x([5, 1, 32]), x([5, 1, 16]));
        let (mut q_out, mut k_pe_out) = (gpu.poisoned::<T>([3, 0, 48]), gpu.poisoned::<T>([5, 1, 16]));
        let mut cache = gpu.poisoned::<T>([23, 1, 48]);
        let tokens = DeviceTokens::<f32>::new(gpu, &c.tokens, 0);
        let outputs = MlaOutputs {
            q_out: q_out.view_mut(),
            k_pe_out: k_pe_out.view_mut(),
            kv_cache: cache.view_mut(),
            q_pe_head: None,
            nope_zeros: None,
        };
        let (w, tables, slots) = (MlaWeight::Same(w.view()), tokens.tables(), tokens.slots());
        let (q_nope, q_pe, k_nope, k_pe) = (q_nope.view(), q_pe.view(), k_nope.view(), k_pe.view());
        fused_bmm_rope_kv_cache(stream, q_nope, w, q_pe, k_nope, k_pe, tables, slots, None, outputs, rope(16))
    };
    let stream = gpu.stream();
    call(stream, 64).unwrap();
    let refused = call(stream, (1 << 30) + 1);
    assert_error(refused, kind!(TooLarge), &["q_nope: 1073741825 columns"]);
    assert_error(call(&other, 64), kind!(DeviceMismatch), &["fused_bmm_rope_kv_cache"]);
}

#[test]
fn errors() {
    for gpu in kit::devices() {
        let c = Case::new(3, [2, 1, 64, 32, 16], Form::Same, 4);
        let call = |c: &Case, q_shape: [usize; 3], w: MlaWeight<T>, q_alias: bool| -> Result<()> {
            let q = gpu.upload(&vec![T::from_f32(1.0); q_shape.iter().product()], q_shape);
            let x = |shape: [usize; 3]| gpu.upload(&vec![T::from_f32(1.0); shape.iter().product()], shape);
            let (q_pe, k_nope, k_pe) = (x([3, 2, 16]), x([5, 1, 32]), x([5, 1, 16]));
            let mut q_out = gpu.poisoned::<T>([3, 2, 48]);
            let mut k_pe_out = gpu.poisoned::<T>([5, 1, 16]);
            let mut cache = gpu.poisoned::<T>([23, 1, 48]);
            let tokens = DeviceTokens::<f32>::new(&gpu, &c.tokens, 0);
            let out = q_out.view_mut();
            let q = if q_alias {
                out.alias().slice(2, 0..32).unwrap().transpose(0, 1).unwrap()
            } else {
                q.view()
            };
            let outputs = MlaOutputs {
                q_out: out,
                k_pe_out: k_pe_out.view_mut(),
                kv_cache: cache.view_mut(),
                q_pe_head: None,
                nope_zeros: None,
            };
            let (tables, slots) = (tokens.tables(), tokens.slots());
            let (q_pe, k_nope, k_pe) = (q_pe.view(), k_nope.view(), k_pe.view());
            fused_bmm_rope_kv_cache(
                gpu.stream(),
                q,
                w,
                q_pe,
                k_nope,
                k_pe,
                tables,
                slots,
                None,
                outputs,
                rope(16),
            )
        };
        let same = |shape: [usize; 3]| gpu.upload(&vec![T::from_f32(1.0); shape.iter().product()], shape);
        let w = same([2, 32, 64]);
        call(&c, [2, 3, 64], MlaWeight::Same(w.view()), false).unwrap();
        let result = call(&c, [2, 3, 63], MlaWeight::Same(w.view()), false);
        assert_error(
            result,
            kind!(Shape),
            &["fused_bmm_rope_kv_cache: w: shape [2, 32, 64], expected [2, 32, 63]"],
        );
        let result = call(&c, [3, 2, 64], MlaWeight::Same(w.view()), false);
        assert_error(result, kind!(Shape), &["q_nope: shape [3, 2, 64], expected [2, 3, 64]"]);
        let other = same([2, 31, 64]);
        let result = call(&c, [2, 3, 64], MlaWeight::Same(other.view()), false);
        assert_error(result, kind!(Shape), &["w: shape [2, 31, 64], expected [2, 32, 64]"]);
        let result = call(&c, [2, 3, 0], MlaWeight::Same(w.view()), false);
        assert_error(result, kind!(Empty), &["q_nope: axis 2"]);
        let narrow = same([2, 32, 32]);
        let result = call(&c, [2, 3, 64], MlaWeight::Same(narrow.view()), true);
        assert_error(result, kind!(Overlap), &["q_nope and q_out overlap"]);

        for name in ["q_out", "k_pe_out", "kv_cache", "q_pe_head", "nope_zeros"] {
            for input in ["q_nope", "w"] {
                let says = format!("{input} and {name} overlap");
                assert_error(overlap(&gpu, &c, input, name), kind!(Overlap), &[&says]);
            }
        }
        let (ocp, fnuz) =
            (gpu.upload(&[Fp8E4M3(0); 4096], [2, 32, 64]), gpu.upload(&[Fp8E4M3Fnuz(0); 4096], [2, 32, 64]));
        let (one, two) = (gpu.upload(&[1.0f32], [1]), gpu.upload(&[1.0f32; 2], [2]));
        for group in [0, 32, 96] {
            let weight = MlaWeight::Fp8(Fp8Weight { w: ocp.view(), scale: one.view(), group });
            assert_error(
                call(&c, [2, 3, 64], weight, false),
                kind!(Argument),
                &["group", "a power of two from 64"],
            );
        }
        let weight = MlaWeight::Fp8(Fp8Weight { w: ocp.view(), scale: two.view(), group: 128 });
        assert_error(call(&c, [2, 3, 64], weight, false), kind!(Shape), &["w_scale: shape [2]"]);
        let codes = gpu.upload(&[Fp4x2(0); 2048], [2, 32, 32]);
        let scales = gpu.upload(&[E8M0::ONE; 128], [2, 32, 2]);
        let mx = || MlaWeight::Mxfp4(Mxfp4Weight { w: codes.view(), scales: scales.view(), y_scale: None });
        let result = call(&c, [2, 3, 48], mx(), false);
        assert_error(result, kind!(Shape), &["q_nope", "a multiple of 32 columns"]);
        let result = call(&c, [2, 3, 32], mx(), false);
        assert_error(result, kind!(Shape), &["w: shape [2, 32, 32], expected [2, 32, 16]"]);
        call(&c, [2, 3, 64], mx(), false).unwrap();
        let weight = Mxfp4Weight { w: codes.view(), scales: scales.view(), y_scale: Some(two.view()) };
        let result = call(&c, [2, 3, 64], MlaWeight::Mxfp4(weight), false);
        assert_error(result, kind!(Shape), &["y_scale: shape [2], expected [1]"]);
        let few = gpu.upload(&[E8M0::ONE; 64], [2, 32, 1]);
        let weight = Mxfp4Weight { w: codes.view(), scales: few.view(), y_scale: None };
        let result = call(&c, [2, 3, 64], MlaWeight::Mxfp4(weight), false);
        assert_error(result, kind!(Shape), &["w_scales: shape [2, 32, 1], expected [2, 32, 2]"]);
        let arch = gpu.stream().device().info().arch;
        let foreign = match arch {
            Arch::Gfx942 => MlaWeight::Fp8(Fp8Weight { w: ocp.view(), scale: one.view(), group: 128 }),
            _ => MlaWeight::Fp8Fnuz(Fp8Weight { w: fnuz.view(), scale: one.view(), group: 128 }),
        };
        let weights = format!("weights on {arch}");
        assert_error(call(&c, [2, 3, 64], foreign, false), kind!(Unsupported), &["fp8e4m3", &weights]);
    }
}
