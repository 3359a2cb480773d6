//! `mha_onekernel_bwd`, `flash_attn_bwd` and `mha_fused_bwd` against their f64 reference, after a forward pass, against differences, and the laws of
//! gradients.

use crate::common::attention::Builder;
use crate::common::attention::{COLUMNS, HEADS, LENGTHS, MASKS, Sizes, masked};
use hk_attention::reference::attention::{Attention, Dropout as HostDropout, Results};
use hk_attention::{
    Accumulate, AttentionElement, AttentionOptions, AttentionOutput, AttentionOutputs, BackwardInputs,
    BackwardSchedule, Bias, Descales, Dropout, Gradients, Mask, Qkv, QueryTile, SequenceStarts, Tiling,
    backward_workspace, flash_attn_bwd, mha, mha_fused_bwd, mha_onekernel_bwd,
};
use hk_core::registry::{Described, HostCall, HostTensor, Scalar};
use hk_core::{DType, Element, Float, bf16, f16};
use hk_testkit::{self as kit, Array, Fill, Gpu, Refusals, Tolerance, kind, widen};

const OPERATORS: [&str; 3] = ["mha_onekernel_bwd", "flash_attn_bwd", "mha_fused_bwd"];
const TYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

/// A call with results of a forward pass beside `q`, `k` and `v`.
fn dense(name: &str, dtype: DType, sizes: Sizes) -> Builder {
    let [b, sq, _, heads, _, _, dv] = sizes;
    Builder::dense(name, dtype, sizes)
        .tensor("out", dtype, [b, sq, heads, dv])
        .tensor("dout", dtype, [b, sq, heads, dv])
        .f32("lse", [b, heads, sq])
}

fn packed(name: &str, dtype: DType, lens: [&[usize]; 2], columns: [usize; 4]) -> Builder {
    let (total, [heads, _, _, dv]) = (lens[0].iter().sum::<usize>(), columns);
    Builder::packed(name, dtype, lens, columns)
        .tensor("out", dtype, [total, heads, dv])
        .tensor("dout", dtype, [total, heads, dv])
        .f32("lse", [total, heads])
}

/// All lengths with all masks; heads, columns, types, sink, softcap, ALiBi and dropout change from case to case.
#[test]
fn every_length_and_mask() {
    let mut n = 0;
    for [sq, sk] in LENGTHS {
        for mask in MASKS {
            let large = sq * sk > 129 * 129;
            if large && n % 3 != 0 {
                n += 1;
                continue;
            }
            let [heads, kv_heads] = HEADS[if large { n % 2 } else { n % HEADS.len() }];
            let [dqk, dv] = COLUMNS[if large { n % 4 } else { n % COLUMNS.len() }];
            let b = if large || heads > 8 { 1 } else { 1 + n % 3 };
            let (name, dtype) = (OPERATORS[n % OPERATORS.len()], TYPES[n % TYPES.len()]);
            let sizes = [b, sq, sk, heads, kv_heads, dqk, dv];
            let mut call = masked(dense(name, dtype, sizes), mask);
            let bits = n * 5 / 3;
            if bits & 1 != 0 {
                call = call.f32("sink", [heads]);
            }
            if bits & 2 != 0 {
                call = call.scalar("softcap", Scalar::Float(30.0));
            }
            if bits & 4 != 0 {
                call = call.f32("alibi", [heads]);
            }
            if bits & 8 != 0 {
                call = call.scalar("dropout_p", Scalar::Float(0.2)).scalar("seed", Scalar::Count(n as u64));
            }
            call.check(&format!("{name}: {dtype} {sizes:?} {mask:?} options {:#b}", bits & 15), n as u64);
            n += 1;
        }
    }
}

#[test]
fn every_mask_of_packed_sequences() {
    let lens: [&[usize]; 3] = [&[1, 0, 3, 17, 65, 129], &[4, 2, 3, 30, 65, 130], &[0, 5, 0, 9, 1, 64]];
    for (n, mask) in MASKS.into_iter().enumerate() {
        for (i, k_lens) in lens.into_iter().enumerate() {
            let dtype = TYPES[(n + i) % 3];
            let call =
                packed(OPERATORS[n % OPERATORS.len()], dtype, [lens[0], k_lens], [6, 2, 40 + 8 * n, 40]);
            masked(call, mask).check(&format!("{dtype} {mask:?}, keys {k_lens:?}"), n as u64);
        }
    }
}

#[test]
fn nothing_to_do() {
    for sizes in [[0, 3, 5, 2, 1, 8, 8], [2, 0, 5, 2, 1, 8, 8], [2, 3, 0, 2, 1, 8, 8], [1, 0, 0, 2, 1, 8, 8]]
    {
        for name in OPERATORS {
            let call = dense(name, DType::Bf16, sizes).f32("sink", [2]);
            call.check(&format!("{name} of {sizes:?}"), 1);
        }
    }
    packed(OPERATORS[0], DType::F16, [&[], &[]], [2, 1, 8, 8]).check("no sequences", 1);
}

/// Starts that fall, or lie outside: as the documentation says, NaN.
#[test]
fn starts_are_not_trusted() {
    let call = packed(OPERATORS[1], DType::Bf16, [&[4, 6], &[5, 7]], [2, 1, 16, 16]);
    call.integers("cu_seqlens_q", &[0, 11, 10]).integers("cu_seqlens_k", &[0, 5, 12]).check_nan("dq");
    let call = packed(OPERATORS[1], DType::Bf16, [&[4, 6], &[5, 7]], [2, 1, 16, 16]);
    call.integers("cu_seqlens_k", &[0, 13, 12]).check_nan("dk");
}

trait CheckNan {
    fn check_nan(self, output: &str);
}

impl CheckNan for Builder {
    #[track_caller]
    fn check_nan(self, output: &str) {
        let call = self.call(5);
        for gpu in kit::devices() {
            let outputs = call.operator().execute(gpu.stream(), &call).unwrap();
            let (_, got) = outputs.iter().find(|(name, _)| *name == output).unwrap();
            assert!(got.to_f64().iter().all(|x| x.is_nan()), "{output} on {}", gpu.spec());
        }
    }
}

/// A problem, and what it is run with.
struct Whole<T> {
    sizes: Sizes,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    dout: Vec<T>,
    sink: Vec<f32>,
}

/// Results of a forward and a backward pass.
struct All<T: Element> {
    out: Array<T>,
    lse: Array<f32>,
    dq: Array<T>,
    dk: Array<T>,
    dv: Array<T>,
    dsink: Array<f32>,
}

impl<T: Float + AttentionElement + AttentionOutput<T>> Whole<T> {
    fn new(sizes: Sizes, seed: u64) -> Self {
        let [b, sq, sk, heads, kv_heads, dqk, dv] = sizes;
        let draw = |n, seed| Fill::Normal.elements(n, seed);
        Self {
            sizes,
            q: draw(b * sq * heads * dqk, seed ^ 1),
            k: draw(b * sk * kv_heads * dqk, seed ^ 2),
            v: draw(b * sk * kv_heads * dv, seed ^ 3),
            dout: draw(b * sq * heads * dv, seed ^ 4),
            sink: Fill::Normal.elements(heads, seed ^ 5),
        }
    }

    #[track_caller]
    fn run(&self, gpu: &Gpu, options: &AttentionOptions<T>, schedule: BackwardSchedule) -> All<T> {
        let [b, sq, sk, heads, kv_heads, dqk, dv] = self.sizes;
        let (q, k) = (gpu.upload(&self.q, [b, sq, heads, dqk]), gpu.upload(&self.k, [b, sk, kv_heads, dqk]));
        let (v, dout) =
            (gpu.upload(&self.v, [b, sk, kv_heads, dv]), gpu.upload(&self.dout, [b, sq, heads, dv]));
        let sink = gpu.upload(&self.sink, [heads]);
        let options = AttentionOptions { sink: Some(sink.view()), ..*options };
        let (mut out, mut lse) = (gpu.poisoned::<T>([b, sq, heads, dv]), gpu.poisoned([b, heads, sq]));
        let qkv = Qkv { q: q.view(), k: k.view(), v: v.view() };
        let outputs = AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) };
        mha(gpu.stream(), qkv, outputs, None, &options).unwrap();
        let (mut dq, mut dk) =
            (gpu.poisoned::<T>([b, sq, heads, dqk]), gpu.poisoned::<T>([b, sk, kv_heads, dqk]));
        let (mut d_v, mut dsink) = (gpu.poisoned::<T>([b, sk, kv_heads, dv]), gpu.poisoned::<f32>([heads]));
        let mut workspace = gpu.poisoned::<f32>([backward_workspace(b * sq, heads)]);
        let inputs = BackwardInputs {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            out: out.view(),
            lse: lse.view(),
            dout: dout.view(),
        };
        let gradients = Gradients {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: d_v.view_mut(),
            dsink: Some(dsink.view_mut()),
        };
        flash_attn_bwd(gpu.stream(), inputs, None, gradients, workspace.view_mut(), &options, schedule)
            .unwrap();
        gpu.assert_guards(&workspace);
        [&dq, &dk, &d_v].into_iter().for_each(|t| gpu.assert_guards(t));
        All {
            out: gpu.download(&out),
            lse: gpu.download(&lse),
            dq: gpu.download(&dq),
            dk: gpu.download(&dk),
            dv: gpu.download(&d_v),
            dsink: gpu.download(&dsink),
        }
    }

    /// The reference of one sequence, from queries, keys and values alone.
    fn attention<'a>(&self, sink: &'a [f64], options: &AttentionOptions<T>) -> Attention<'a> {
        let [_, sq, sk, heads, kv_heads, dqk, dv] = self.sizes;
        Attention {
            heads,
            kv_heads,
            dqk,
            dv,
            scale: 1.0 / (dqk as f64).sqrt(),
            softcap: options.softcap.into(),
            causal: options.mask.causal,
            window: [options.mask.left, options.mask.right].map(|keys| keys.map(|n| n as usize)),
            sink: Some(sink),
            dropout: options.dropout.map(|Dropout { p, seed, offset }| HostDropout {
                p: p.into(),
                seed,
                offset,
                batch: 0,
                longest: [sq, sk],
            }),
            ..Attention::default()
        }
    }
}

/// A forward and a backward pass in sequence have the gradients of the f64 passes: with dropout, both have one mask.
#[track_caller]
fn after_forward<T: Float + AttentionElement + AttentionOutput<T>>(
    sizes: Sizes,
    options: &AttentionOptions<T>,
    seed: u64,
) {
    let whole = Whole::<T>::new(sizes, seed);
    let sink = widen(&whole.sink);
    let attention = whole.attention(&sink, options);
    let (q, k, v, dout) = (widen(&whole.q), widen(&whole.k), widen(&whole.v), widen(&whole.dout));
    let (out, lse) = attention.run(&q, &k, &v);
    let want = attention.backward(&q, &k, &v, &Results { out: &out, lse: &lse, dout: &dout }, &|_| true);
    for gpu in kit::devices() {
        println!("{} {sizes:?} on {}", T::DTYPE, gpu.spec());
        let got = whole.run(&gpu, options, BackwardSchedule::Split);
        kit::assert_close(&got.dq, &want.dq, Tolerance::Gradient);
        kit::assert_close(&got.dk, &want.dk, Tolerance::Gradient);
        kit::assert_close(&got.dv, &want.dv, Tolerance::Gradient);
        // Sums over all rows of rounded outputs.
        let of_rows = Tolerance::Within { rtol: 5e-2, atol: 5e-2 };
        kit::assert_close(
            &got.dsink,
            &want.dsink,
            if T::DTYPE == DType::F32 { Tolerance::Gradient } else { of_rows },
        );
        // The other schedule: the same bits.
        let fused = whole.run(&gpu, options, BackwardSchedule::Fused);
        kit::assert_bits(&fused.dq, &got.dq.data);
        kit::assert_bits(&fused.dk, &got.dk.data);
        kit::assert_bits(&fused.dv, &got.dv.data);
        kit::assert_bits(&fused.dsink, &got.dsink.data);
        assert_eq!(got.out.data.len(), out.len());
        assert_eq!(got.lse.data.len(), lse.len());
    }
}

#[test]
fn forward_and_backward() {
    fn of<T: Element>() -> [AttentionOptions<'static, T>; 3] {
        let dropout = Some(Dropout { p: 0.2, seed: 11, offset: 3 });
        let window = Mask { causal: false, left: Some(30), right: Some(7) };
        [
            AttentionOptions { mask: Mask::CAUSAL, ..Default::default() },
            AttentionOptions { dropout, softcap: 8.0, ..Default::default() },
            AttentionOptions { mask: window, ..Default::default() },
        ]
    }
    let [causal, dropped, window] = of::<bf16>();
    after_forward([1, 150, 150, 4, 2, 128, 128], &causal, 1);
    after_forward([1, 65, 129, 4, 1, 64, 64], &dropped, 2);
    after_forward([1, 129, 129, 2, 2, 192, 128], &window, 3);
    let [causal, dropped, window] = of::<f16>();
    after_forward([1, 70, 90, 3, 1, 256, 256], &causal, 4);
    after_forward([1, 65, 129, 2, 2, 80, 40], &dropped, 5);
    after_forward([1, 130, 130, 2, 1, 64, 64], &window, 6);
    let [causal, dropped, window] = of::<f32>();
    after_forward([1, 60, 60, 4, 2, 64, 64], &causal, 7);
    after_forward([1, 40, 70, 2, 1, 128, 128], &dropped, 8);
    after_forward([1, 33, 40, 2, 2, 256, 200], &window, 9);
}

/// The f64 reference itself, against central differences of the f64 forward pass in random directions.
#[test]
fn the_reference_is_the_derivative() {
    let draw = |n: usize, seed: u64| widen(&Fill::Normal.elements::<f32>(n, seed));
    for (case, (softcap, causal, p)) in
        [(0.0, false, 0.0), (2.0, true, 0.0), (0.0, true, 0.3), (5.0, false, 0.1)].into_iter().enumerate()
    {
        let [sq, sk, heads, kv_heads, dqk, dv] = [5, 7, 4, 2, 6, 3];
        let (alibi, sink) = ([0.1, 0.2, 0.3, 0.05], draw(heads, 9));
        let of = Attention {
            heads,
            kv_heads,
            dqk,
            dv,
            scale: 0.4,
            softcap,
            causal,
            alibi: Some(&alibi),
            sink: Some(&sink),
            dropout: (p > 0.0).then_some(HostDropout { p, seed: 3, offset: 0, batch: 0, longest: [sq, sk] }),
            ..Attention::default()
        };
        let (q, k, v) =
            (draw(sq * heads * dqk, 1), draw(sk * kv_heads * dqk, 2), draw(sk * kv_heads * dv, 3));
        let dout = draw(sq * heads * dv, 4);
        let (out, lse) = of.run(&q, &k, &v);
        let got = of.backward(&q, &k, &v, &Results { out: &out, lse: &lse, dout: &dout }, &|_| true);
        let loss = |sink: &[f64], q: &[f64], k: &[f64], v: &[f64]| -> f64 {
            Attention { sink: Some(sink), ..of }.run(q, k, v).0.iter().zip(&dout).map(|(y, dy)| y * dy).sum()
        };
        let moved = |x: &[f64], direction: &[f64], h: f64| -> Vec<f64> {
            x.iter().zip(direction).map(|(x, d)| x + h * d).collect()
        };
        let along = |gradient: &[f64], direction: &[f64]| -> f64 {
            gradient.iter().zip(direction).map(|(g, d)| g * d).sum()
        };
        for seed in 10..30 {
            let h = 1e-4;
            let difference = |of: &dyn Fn(f64) -> f64| (of(h) - of(-h)) / (2.0 * h);
            let (dq, dk, dv) = (draw(q.len(), seed), draw(k.len(), seed + 50), draw(v.len(), seed + 100));
            let ds = draw(heads, seed + 150);
            for (what, is, want) in [
                ("dq", along(&got.dq, &dq), difference(&|h| loss(&sink, &moved(&q, &dq, h), &k, &v))),
                ("dk", along(&got.dk, &dk), difference(&|h| loss(&sink, &q, &moved(&k, &dk, h), &v))),
                ("dv", along(&got.dv, &dv), difference(&|h| loss(&sink, &q, &k, &moved(&v, &dv, h)))),
                ("dsink", along(&got.dsink, &ds), difference(&|h| loss(&moved(&sink, &ds, h), &q, &k, &v))),
            ] {
                assert!(
                    (is - want).abs() <= 1e-6 * (1.0 + want.abs()),
                    "{what}, case {case}: {is}, not {want}"
                );
            }
        }
    }
}

/// The gradients of a sequence are the same bits alone, in a batch, and packed among others.
#[test]
fn batches_change_no_bit() {
    for (seed, dtype) in TYPES.into_iter().enumerate().chain([(3, DType::Bf16)]) {
        let name = if seed == 0 { OPERATORS[0] } else { "mha_fused_bwd" };
        let [heads, kv_heads, dqk, dv] = [4, 2, 64, 48];
        let lens = [[70, 90], [33, 40], [5, 5]];
        let (q_lens, k_lens) = (lens.map(|[sq, _]| sq), lens.map(|[_, sk]| sk));
        let causal = |b: Builder| b.scalar("causal", Scalar::Bool(true));
        let all =
            causal(packed(name, dtype, [&q_lens, &k_lens], [heads, kv_heads, dqk, dv])).call(seed as u64);
        let rows = |call: &HostCall, name: &'static str, from: usize, n: usize, width: usize| -> Vec<u8> {
            let bytes = width * dtype.size_bytes();
            call.get(name).unwrap().bytes()[from * bytes..(from + n) * bytes].to_vec()
        };
        for gpu in kit::devices() {
            let whole = all.operator().execute(gpu.stream(), &all).unwrap();
            let mut first = [0, 0];
            for (n, [sq, sk]) in lens.into_iter().enumerate() {
                let mut alone =
                    causal(packed(name, dtype, [&[sq], &[sk]], [heads, kv_heads, dqk, dv])).call(1);
                for (name, from, n, width) in [
                    ("q", first[0], sq, heads * dqk),
                    ("k", first[1], sk, kv_heads * dqk),
                    ("v", first[1], sk, kv_heads * dv),
                    ("out", first[0], sq, heads * dv),
                    ("dout", first[0], sq, heads * dv),
                ] {
                    let spec = alone.get(name).unwrap().spec();
                    let tensor = HostTensor::from_bytes(spec, rows(&all, name, from, n, width)).unwrap();
                    alone.set(name, tensor).unwrap();
                }
                let lse = all.get("lse").unwrap().bytes()[first[0] * heads * 4..(first[0] + sq) * heads * 4]
                    .to_vec();
                let spec = alone.get("lse").unwrap().spec();
                alone.set("lse", HostTensor::from_bytes(spec, lse).unwrap()).unwrap();
                let single = alone.operator().execute(gpu.stream(), &alone).unwrap();
                for ((name, of_all), (_, got)) in whole.iter().zip(&single) {
                    let (from, width) = match *name {
                        "dq" => (first[0], heads * dqk),
                        "dk" => (first[1], kv_heads * dqk),
                        _ => (first[1], kv_heads * dv),
                    };
                    let want = &of_all.bytes()[from * width * dtype.size_bytes()..][..got.bytes().len()];
                    assert!(got.bytes() == want, "{name} of sequence {n}, {dtype} on {}", gpu.spec());
                }
                first = [first[0] + sq, first[1] + sk];
            }
        }
    }
}

/// Sums of queries in order have the same bits, and end, in whatever order blocks run.
#[test]
fn ordered_sums_have_the_same_bits() {
    let causal = |b: Builder| b.scalar("causal", Scalar::Bool(true));
    let calls = [
        causal(dense("mha_fused_bwd", DType::Bf16, [1, 150, 500, 2, 1, 64, 64])).call(1),
        packed("mha_fused_bwd", DType::F16, [&[40, 90], &[300, 260]], [2, 2, 64, 64])
            .scalar("window_left", Scalar::Int(150))
            .call(2),
        dense("mha_fused_bwd", DType::F32, [1, 40, 300, 2, 1, 64, 64]).call(3),
    ];
    for call in &calls {
        for arch in ["gfx942", "gfx950"] {
            let of = |options: &str| {
                let gpu = Gpu::open(&format!("emu:{arch}{options}"));
                let outputs = call.operator().execute(gpu.stream(), call).unwrap();
                outputs.iter().map(|(_, t)| t.bytes().to_vec()).collect::<Vec<_>>()
            };
            let want = of("");
            for _ in 0..3 {
                assert!(of("?order=arrival&threads=4") == want, "{} on {arch}", call.operator().name);
            }
        }
    }
}

/// What no query sees has no effect, and rows that see no key have no gradient.
#[test]
fn rows_without_keys() {
    for name in OPERATORS {
        // Five queries of two keys: the first three see none.
        let mut call =
            dense(name, DType::Bf16, [1, 5, 2, 2, 1, 16, 16]).scalar("causal", Scalar::Bool(true)).call(3);
        let lse: Vec<f32> = (0..10).map(|i| if i % 5 < 3 { f32::NEG_INFINITY } else { 0.5 }).collect();
        call.set("lse", HostTensor::new([1, 2, 5], &lse).unwrap()).unwrap();
        crate::common::attention::check(name, &call);
        for gpu in kit::devices() {
            let got = call.operator().execute(gpu.stream(), &call).unwrap();
            assert!(got[0].1.to_f64()[..3 * 2 * 16].iter().all(|x| *x == 0.0), "{name} on {}", gpu.spec());
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Options {
    with: Option<&'static str>,
    packed: bool,
    one_pass: bool,
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let refusals = |more: bool| {
        let all = Refusals::new(Options::default(), |stream, tensors, options: Options| {
            let extra = options.with.map(|_| tensors.input::<f32>("extra"));
            let with = |name| if options.with == Some(name) { extra } else { None };
            let attention = AttentionOptions {
                alibi: tensors.optional_input("alibi"),
                sink: tensors.optional_input("sink"),
                bias: with("bias").map(Bias::F32),
                descales: Descales { q: with("q_descale"), k: with("k_descale"), v: with("v_descale") },
                tiling: match options.with {
                    Some("tiling") => Tiling::Fixed { tile: QueryTile::Tall, keys_per_split: None },
                    _ => Tiling::Auto,
                },
                ..Default::default()
            };
            let starts = match options.packed {
                true => Some(SequenceStarts {
                    q: tensors.input("cu_seqlens_q"),
                    k: tensors.input("cu_seqlens_k"),
                }),
                false => None,
            };
            let inputs = BackwardInputs {
                q: tensors.input::<bf16>("q"),
                k: tensors.input("k"),
                v: tensors.input("v"),
                out: tensors.input("out"),
                lse: tensors.input("lse"),
                dout: tensors.input("dout"),
            };
            let gradients = Gradients {
                dq: tensors.output("dq"),
                dk: tensors.output("dk"),
                dv: tensors.output("dv"),
                dsink: tensors.optional_output("dsink"),
            };
            let workspace = tensors.output("workspace");
            if options.one_pass {
                let order = Accumulate::Ordered;
                return mha_fused_bwd(stream, inputs, starts, gradients, workspace, &attention, order);
            }
            mha_onekernel_bwd(stream, inputs, starts, gradients, workspace, &attention)
        })
        .input::<bf16>("q", [2, 3, 4, 8])
        .input::<bf16>("k", [2, 5, 2, 8])
        .input::<bf16>("v", [2, 5, 2, 6])
        .input::<bf16>("out", [2, 3, 4, 6])
        .input::<f32>("lse", [2, 4, 3])
        .input::<bf16>("dout", [2, 3, 4, 6])
        .input::<f32>("alibi", [2, 4])
        .input::<f32>("sink", [4])
        .output::<bf16>("dq", [2, 3, 4, 8])
        .output::<bf16>("dk", [2, 5, 2, 8])
        .output::<bf16>("dv", [2, 5, 2, 6])
        .output::<f32>("dsink", [4])
        .output::<f32>("workspace", [24]);
        match more {
            true => {
                let starts = all.input::<i32>("cu_seqlens_q", [3]).input::<i32>("cu_seqlens_k", [3]);
                starts.input::<f32>("extra", [1])
            }
            false => all,
        }
    };
    let op = "mha_onekernel_bwd";
    refusals(false)
        .accepts(|_| {})
        .accepts(|call| ["alibi", "sink", "dsink"].iter().for_each(|n| call.without(n)))
        .refuses(kind!(Shape), &[op, "k", "8 columns (of q)"], |call| call.shape("k", [2, 5, 2, 9]))
        .refuses(kind!(Shape), &[op, "k", "[2, 5, 2, 8]"], |call| call.shape("k", [1, 5, 2, 8]))
        .refuses(kind!(Shape), &[op, "v", "[2, 5, 2, 6]"], |call| call.shape("v", [2, 4, 2, 6]))
        .refuses(kind!(Shape), &[op, "out: shape [2, 3, 4, 8]"], |call| call.shape("out", [2, 3, 4, 8]))
        .refuses(kind!(Shape), &[op, "dout: shape [2, 3, 2, 6]"], |call| call.shape("dout", [2, 3, 2, 6]))
        // That of packed sequences.
        .refuses(kind!(Shape), &[op, "lse: shape [2, 3, 4]", "[2, 4, 3]"], |call| {
            call.shape("lse", [2, 3, 4])
        })
        .refuses(kind!(Shape), &[op, "dq"], |call| call.shape("dq", [2, 3, 4, 6]))
        .refuses(kind!(Shape), &[op, "dk"], |call| call.shape("dk", [2, 5, 4, 8]))
        .refuses(kind!(Shape), &[op, "dv"], |call| call.shape("dv", [2, 5, 2, 8]))
        .refuses(kind!(Shape), &[op, "dsink"], |call| call.shape("dsink", [2]))
        .refuses(kind!(Argument), &[op, "dsink: none"], |call| call.without("dsink"))
        .refuses(kind!(Argument), &[op, "dsink: given"], |call| call.without("sink"))
        .refuses(kind!(Shape), &[op, "workspace", "[24] or longer"], |call| call.shape("workspace", [23]))
        .refuses(kind!(Shape), &["mha_fused_bwd: workspace", "fused_backward_workspace"], |call| {
            call.options.one_pass = true;
        })
        .refuses(kind!(Empty), &[op, "q"], |call| {
            call.shape("q", [2, 3, 0, 8]);
            call.shape("dq", [2, 3, 0, 8]);
            call.shape("out", [2, 3, 0, 6]);
            call.shape("dout", [2, 3, 0, 6]);
            call.shape("lse", [2, 0, 3]);
        })
        .refuses(kind!(Stride), &[op, "dout", "unit stride"], |call| call.strides("dout", [72, 24, 1, 4]))
        .refuses(kind!(Stride), &[op, "dk", "unit stride"], |call| call.strides("dk", [80, 16, 1, 2]))
        .refuses_other_devices()
        .refuses_overlaps();
    refusals(true)
        .refuses(kind!(Argument), &[op, "bias: given"], |call| call.options.with = Some("bias"))
        .refuses(kind!(Argument), &[op, "q_descale: given"], |call| call.options.with = Some("q_descale"))
        .refuses(kind!(Argument), &[op, "k_descale: given"], |call| call.options.with = Some("k_descale"))
        .refuses(kind!(Argument), &[op, "v_descale: given"], |call| call.options.with = Some("v_descale"))
        .refuses(kind!(Argument), &[op, "tiling: given"], |call| call.options.with = Some("tiling"))
        .refuses(kind!(Shape), &[op, "q"], |call| call.options.packed = true);
}
