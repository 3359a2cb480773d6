//! `rope_cat_and_cache_mla` on the emulated GPUs (and real ones where there are some): it is rotating, joining, scattering.

mod common;

use common::{DeviceTokens, Order, Stored, Tokens, elements, heads_place, ropes, rotate_f32};
use hk_attention::{Activation, CacheElement, MlaOutputs, rope_cat_and_cache_mla};
use hk_core::rope::{Positions, Rope, RopeElement, RopeSpan, RopeStyle, RopeTableWidth, RopeTables};
use hk_core::{Device, Float, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, TensorView, TensorViewMut, bf16, f16};
use hk_testkit::{
    self as kit, Array, Gpu, Place, assert_bits, assert_error, kind, proptest::prelude::*,
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

    /// Everything that is written has the bits of rotating, joining and scattering; all else is untouched.
    #[track_caller]
    fn check<T, R, Q, C>(&self, alias: bool)
    where
        T: Activation + Stored,
        R: RopeElement<T> + Float,
        Q: CacheElement<T> + Stored,
        C: CacheElement<T> + Stored,
    {
        kit::devices().iter().for_each(|gpu| self.check_on::<T, R, Q, C>(gpu, alias));
    }

    #[track_caller]
    fn check_on<T, R, Q, C>(&self, gpu: &Gpu, alias: bool)
    where
        T: Activation + Stored,
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
            let (tables, slots, scale) = (tokens.tables(), tokens.slots(), scale.as_ref().map(|s| s.view()));
            let (q_nope, q_pe, k_nope) = (q_nope.view(), q_pe.view(), k_nope.view());
            let rope = self.tokens.rope;
            rope_cat_and_cache_mla(
                gpu.stream(),
                q_nope,
                q_pe,
                k_nope,
                k_in,
                tables,
                slots,
                scale,
                outputs,
                rope,
            )
            .unwrap();
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
    fn bf16_is_rotating_joining_scattering(c in cases(), f32_table: bool, alias: bool) {
        if f32_table { c.check::<bf16, f32, bf16, bf16>(alias) } else { c.check::<bf16, bf16, bf16, bf16>(alias) }
    }

    #[test]
    fn f16_is_rotating_joining_scattering(c in cases(), alias: bool) {
        c.check::<f16, f16, f16, f16>(alias);
    }

    #[test]
    fn fp8_is_converted_once(mut c in cases(), scaled: bool, ocp: bool) {
        c.scale = scaled.then_some(0.013);
        if ocp { c.check::<bf16, bf16, Fp8E4M3, Fp8E4M3>(false) } else { c.check::<f16, f16, f16, Fp8E4M3Fnuz>(false) }
    }

    #[test]
    fn queries_narrow_without_the_scale(mut c in cases()) {
        c.scale = Some(4.0);
        c.check::<bf16, bf16, Fp8E4M3Fnuz, bf16>(false);
    }
}

fn deepseek(n: usize, q_heads: usize, slots: usize) -> Case {
    let (style, table) = (RopeStyle::Interleaved, RopeTableWidth::Half);
    let rope = Rope { style, table, rotary: 64, span: RopeSpan::First, inverse: false };
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
fn parts_have_no_finding() {
    for gpu in kit::sanitized_devices() {
        deepseek(5, 16, 16).check_on::<bf16, bf16, bf16, bf16>(&gpu, true);
    }
}

#[test]
fn errors() {
    let gpu = &kit::devices()[0];
    let x = |shape: [usize; 3]| gpu.upload(&vec![bf16::ONE; shape.iter().product()], shape);
    let (q_nope, q_pe, k_nope, k_pe) = (x([3, 4, 32]), x([3, 4, 16]), x([3, 2, 32]), x([3, 2, 16]));
    let out = |shape: [usize; 3]| gpu.poisoned::<bf16>(Place::from(shape));
    let (mut q_out, mut k_out, mut cache) = (out([3, 4, 48]), out([3, 2, 16]), out([9, 2, 48]));
    let table = gpu.upload(&[bf16::ONE; 5 * 8], [5, 8]);
    let (two, three) = (gpu.upload(&[0i32; 2], [2]), gpu.upload(&[0i32; 3], [3]));
    let neox = Rope {
        style: RopeStyle::Neox,
        table: RopeTableWidth::Half,
        rotary: 16,
        span: RopeSpan::First,
        inverse: false,
    };
    struct Args<'a> {
        q_nope: TensorView<'a, bf16>,
        q_pe: TensorView<'a, bf16>,
        k_nope: TensorView<'a, bf16>,
        k_pe: TensorView<'a, bf16>,
        slots: TensorView<'a, i32>,
        cos: TensorView<'a, bf16>,
        sin: TensorView<'a, bf16>,
        k_scale: Option<TensorView<'a, f32>>,
        q_out: TensorViewMut<'a, bf16>,
        k_pe_out: TensorViewMut<'a, bf16>,
        kv_cache: TensorViewMut<'a, bf16>,
        q_pe_head: Option<TensorViewMut<'a, bf16>>,
        nope_zeros: Option<TensorViewMut<'a, bf16>>,
        rope: Rope,
    }
    let run = |stream: &Stream, a: Args| -> Result<()> {
        let Args { q_out, k_pe_out, kv_cache, q_pe_head, nope_zeros, .. } = a;
        let outputs = MlaOutputs { q_out, k_pe_out, kv_cache, q_pe_head, nope_zeros };
        let tables = RopeTables {
            cos: a.cos,
            sin: a.sin,
            positions: Positions::Given(three.view().into()),
            offsets: None,
        };
        let (q_nope, q_pe, k_nope, k_pe) = (a.q_nope, a.q_pe, a.k_nope, a.k_pe);
        rope_cat_and_cache_mla(
            stream, q_nope, q_pe, k_nope, k_pe, tables, a.slots, a.k_scale, outputs, a.rope,
        )
    };
    macro_rules! args {
        () => {
            Args {
                q_nope: q_nope.view(),
                q_pe: q_pe.view(),
                k_nope: k_nope.view(),
                k_pe: k_pe.view(),
                slots: three.view(),
                cos: table.view(),
                sin: table.view(),
                k_scale: None,
                q_out: q_out.view_mut(),
                k_pe_out: k_out.view_mut(),
                kv_cache: cache.view_mut(),
                q_pe_head: None,
                nope_zeros: None,
                rope: neox,
            }
        };
    }
    macro_rules! refused {
        ($kind:ident, $says:expr; $($name:ident = $value:expr),*) => {{
            let mut args = args!();
            $(args.$name = $value;)*
            assert_error(run(gpu.stream(), args), kind!($kind), $says);
        }};
    }
    let (wrong_q, wrong_k, three_heads) = (x([3, 4, 31]), x([3, 2, 15]), x([3, 3, 16]));
    refused!(Shape, &["rope_cat_and_cache_mla: q_nope: shape [3, 4, 31], expected [3, 4, 32]"]; q_nope = wrong_q.view());
    refused!(Shape, &["k_pe: shape [3, 2, 15], expected [3, 2, 16]"]; k_pe = wrong_k.view());
    refused!(Shape, &["q_pe", "multiple of those of k_nope (2)"]; q_pe = three_heads.view());
    let (empty_pe, empty_nope) = (x([3, 4, 0]), x([3, 2, 0]));
    refused!(Empty, &["q_pe: axis 2"]; q_pe = empty_pe.view());
    refused!(Empty, &["k_nope: axis 2"]; k_nope = empty_nope.view());
    refused!(Shape, &["slot_mapping: shape [2]", "from 3 (tokens of q)"]; slots = two.view());
    let (mut short, mut narrow, mut wide) = (out([3, 4, 47]), out([3, 2, 15]), out([9, 2, 49]));
    refused!(Shape, &["q_out: shape [3, 4, 47], expected [3, 4, 48]"]; q_out = short.view_mut());
    refused!(Shape, &["k_pe_out: shape [3, 2, 15]"]; k_pe_out = narrow.view_mut());
    refused!(Shape, &["kv_cache: shape [9, 2, 49], expected [9, 2, 48]"]; kv_cache = wide.view_mut());
    let (mut four, mut head, mut zeros) = (out([4, 4, 16]), out([2, 4, 16]), out([1, 4, 32]));
    refused!(Shape, &["q_pe_head", "at most 3 tokens"]; q_pe_head = Some(four.view_mut()));
    refused!(Shape, &["nope_zeros", "as many in q_pe_head"]; q_pe_head = Some(head.view_mut()), nope_zeros = Some(zeros.view_mut()));
    refused!(Argument, &["rotary"]; rope = Rope { rotary: 5, ..neox });
    let scales = gpu.upload(&[1.0f32; 2], [2]);
    refused!(Shape, &["k_scale: shape [2], expected [1]"]; k_scale = Some(scales.view()));
    let turned = gpu.upload(&[bf16::ONE; 3 * 2 * 32], [3, 32, 2]);
    refused!(Stride, &["k_nope: strides"]; k_nope = turned.view().transpose(1, 2).unwrap());
    let mut memory = out([6, 2, 16]);
    let whole = memory.view_mut();
    let (first, later) = (whole.alias().slice(0, 0..3).unwrap(), whole.slice(0, 1..4).unwrap());
    refused!(Overlap, &["k_pe and k_pe_out overlap"]; k_pe = first, k_pe_out = later);
    let mut memory = out([3, 4, 80]);
    let whole = memory.view_mut();
    let (first, later) = (whole.alias().slice(2, 0..32).unwrap(), whole.slice(2, 31..79).unwrap());
    refused!(Overlap, &["q_nope and q_out overlap"]; q_nope = first, q_out = later);

    let outputs = [
        ("q_out", vec![3, 4, 48]),
        ("k_pe_out", vec![3, 2, 16]),
        ("kv_cache", vec![9, 2, 48]),
        ("q_pe_head", vec![3, 4, 16]),
        ("nope_zeros", vec![3, 4, 32]),
    ];
    let inputs = [
        ("q_nope", vec![3, 4, 32]),
        ("q_pe", vec![3, 4, 16]),
        ("k_nope", vec![3, 2, 32]),
        ("k_pe", vec![3, 2, 16]),
        ("cos", vec![5, 8]),
        ("sin", vec![5, 8]),
    ];
    let mut memory = gpu.poisoned::<bf16>([1024]);
    for (input, input_shape) in &inputs {
        for (output, output_shape) in &outputs {
            let (from, to) = common::overlapping(memory.view_mut(), input_shape, output_shape);
            let mut args = args!();
            match *input {
                "q_nope" => args.q_nope = from,
                "q_pe" => args.q_pe = from,
                "k_nope" => args.k_nope = from,
                "k_pe" => args.k_pe = from,
                "cos" => args.cos = from,
                _ => args.sin = from,
            }
            match *output {
                "q_out" => args.q_out = to,
                "k_pe_out" => args.k_pe_out = to,
                "kv_cache" => args.kv_cache = to,
                "q_pe_head" => args.q_pe_head = Some(to),
                _ => args.nope_zeros = Some(to),
            }
            let says = format!("{input} and {output} overlap");
            assert_error(run(gpu.stream(), args), kind!(Overlap), &[&says]);
        }
    }

    let other = Device::open("emu:gfx950").unwrap().create_stream().unwrap();
    assert_error(run(&other, args!()), kind!(DeviceMismatch), &["rope_cat_and_cache_mla"]);
}
