//! `mha` and `mha_varlen` on the emulated GPUs (and real ones where there are some) against their f64 reference, and the laws
//! of attention.

use crate::common::attention::{
    Builder, CAUSAL, COLUMNS, HEADS, LENGTHS, MASKS, Sizes, TYPES, masked, starts,
};
use hk_attention::{
    AttentionElement, AttentionOptions, AttentionOutput, AttentionOutputs, AttentionProblem, Bias, Descales,
    Dropout, Mask, Qkv, QueryTile, SequenceStarts, Tiling, attention_workspace, mha, mha_varlen,
};
use hk_core::registry::Scalar;
use hk_core::{Arch, DType, Element, Float, Fp8E4M3, Fp8E4M3Fnuz, Layout, TensorView, bf16, f16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Refusals, Tensor, Tolerance, kind, proptest::prelude::*,
    proptest::sample::select,
};
use std::f64::consts::SQRT_2;
use std::ops::Range;

const OPERATORS: [&str; 2] = ["mha", "mha_varlen"];

/// Queries, keys and values of a batch.
#[derive(Clone)]
struct Dense<T> {
    sizes: Sizes,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
}

/// Where the tensors of a call lie.
struct Places {
    q: Place,
    k: Place,
    v: Place,
    out: Place,
    lse: Place,
}

impl<T: Float + AttentionElement + AttentionOutput<T>> Dense<T> {
    fn new(sizes: Sizes, seed: u64) -> Self {
        let [b, sq, sk, heads, kv_heads, dqk, dv] = sizes;
        let draw = |n, seed| Fill::Normal.elements(n, seed);
        Self {
            sizes,
            q: draw(b * sq * heads * dqk, seed ^ 1),
            k: draw(b * sk * kv_heads * dqk, seed ^ 2),
            v: draw(b * sk * kv_heads * dv, seed ^ 3),
        }
    }

    fn shapes(&self) -> [[usize; 4]; 4] {
        let [b, sq, sk, heads, kv_heads, dqk, dv] = self.sizes;
        [[b, sq, heads, dqk], [b, sk, kv_heads, dqk], [b, sk, kv_heads, dv], [b, sq, heads, dv]]
    }

    fn contiguous(&self) -> Places {
        let [q, k, v, out] = self.shapes().map(Place::from);
        let [b, sq, _, heads, ..] = self.sizes;
        Places { q, k, v, out, lse: [b, heads, sq].into() }
    }

    #[track_caller]
    fn run_at(&self, gpu: &Gpu, places: Places, options: &AttentionOptions<T>) -> (Array<T>, Array<f32>) {
        let Places { q, k, v, out, lse } = places;
        let (q, k, v) = (gpu.upload(&self.q, q), gpu.upload(&self.k, k), gpu.upload(&self.v, v));
        let (mut out, mut lse) = (gpu.poisoned::<T>(out), gpu.poisoned(lse));
        let qkv = Qkv { q: q.view(), k: k.view(), v: v.view() };
        let outputs = AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) };
        let [sequences, sq, keys, heads, kv_heads, _, dv] = self.sizes;
        let problem = AttentionProblem { sequences, heads, kv_heads, queries: sequences * sq, keys, dv };
        let len = attention_workspace(gpu.stream().device().info(), &problem, options.tiling);
        let mut workspace = gpu.poisoned::<f32>([len]);
        mha(gpu.stream(), qkv, outputs, Some(workspace.view_mut()), options).unwrap();
        gpu.assert_guards(&workspace);
        [&q, &k, &v].into_iter().for_each(|t| gpu.assert_untouched(t));
        gpu.assert_guards(&out);
        gpu.assert_guards(&lse);
        (gpu.download(&out), gpu.download(&lse))
    }

    #[track_caller]
    fn run(&self, gpu: &Gpu, options: &AttentionOptions<T>) -> (Array<T>, Array<f32>) {
        self.run_at(gpu, self.contiguous(), options)
    }

    /// The same with other rows of keys and values: `row` gives the old one of a new one, `rows` of them.
    fn with_keys(&self, rows: usize, heads: usize, of: impl Fn(usize, usize) -> (usize, usize)) -> Self {
        let [b, _, sk, _, kv_heads, dqk, dv] = self.sizes;
        let gather = |x: &[T], cols: usize| {
            let mut y = vec![];
            for (n, row, head) in
                (0..b).flat_map(|n| (0..rows).flat_map(move |r| (0..heads).map(move |h| (n, r, h))))
            {
                let (row, head) = of(row, head);
                y.extend_from_slice(&x[((n * sk + row) * kv_heads + head) * cols..][..cols]);
            }
            y
        };
        let mut new = self.clone();
        (new.k, new.v) = (gather(&self.k, dqk), gather(&self.v, dv));
        (new.sizes[2], new.sizes[4]) = (rows, heads);
        new
    }
}

fn mask<T: Element>(causal: bool, left: Option<u32>, right: Option<u32>) -> AttentionOptions<'static, T> {
    AttentionOptions { mask: Mask { causal, left, right }, ..Default::default() }
}

/// Two queries over three keys, six digits for each option.
#[test]
fn golden_values() {
    let data = Dense {
        sizes: [1, 2, 3, 1, 1, 2, 1],
        q: vec![1.0f32, 0.0, 0.0, 2.0],
        k: vec![1.0, 0.0, 0.0, 1.0, 1.0, 1.0],
        v: vec![1.0, 2.0, 4.0],
    };
    for gpu in kit::devices() {
        let (sink, slope) = (gpu.upload(&[0.5f32], [1]), gpu.upload(&[0.5f32], [1]));
        let causal = mask(true, None, None);
        for (name, options, out, lse) in [
            ("full", mask(false, None, None), [2.401112, 2.783233], [1.620621, 2.222080]),
            ("causal", causal, [1.330238, 2.783233], [1.107940, 2.222080]),
            ("itself", mask(true, Some(0), None), [2.0, 4.0], [0.0, SQRT_2]),
            ("and one before", mask(true, Some(1), None), [1.330238, 3.0], [1.107940, 2.107361]),
            (
                "sink",
                AttentionOptions { sink: Some(sink.view()), ..causal },
                [0.861291, 2.361285],
                [1.542622, 2.386487],
            ),
            (
                "softcap",
                AttentionOptions { softcap: 1.0, ..causal },
                [1.352319, 2.658843],
                [1.043217, 1.768560],
            ),
            (
                "alibi",
                AttentionOptions { alibi: Some(slope.view()), ..causal },
                [1.448408, 3.126532],
                [0.802053, 1.942467],
            ),
        ] {
            println!("{name} on {}", gpu.spec());
            let got = data.run(&gpu, &options);
            let six_digits = Tolerance::Within { rtol: 0.0, atol: 2e-6 };
            kit::assert_close(&got.0, &out, six_digits);
            kit::assert_close(&got.1, &lse, six_digits);
        }
    }
}

/// All lengths with all masks; heads, columns, types, sink, softcap and ALiBi change from case to case, so that each meets each
/// length, and nearly each mask.
#[test]
fn every_length_and_mask() {
    let mut n = 0;
    for [sq, sk] in LENGTHS {
        for mask in MASKS {
            let large = sq * sk > 129 * 129;
            let [heads, kv_heads] = HEADS[if large { n % 2 } else { n % HEADS.len() }];
            let [dqk, dv] = COLUMNS[if large { n % 4 } else { n % COLUMNS.len() }];
            let b = if large || heads > 8 { 1 } else { 1 + n % 3 };
            let dtype = TYPES[n % TYPES.len()];
            let sizes = [b, sq, sk, heads, kv_heads, dqk, dv];
            let mut call = masked(Builder::dense("mha", dtype, sizes), mask).want("lse");
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
            call.check(&format!("{dtype} {sizes:?} {mask:?} options {:#b}", bits & 7), n as u64);
            n += 1;
        }
    }
}

/// Packed sequences, some of them empty, with as many keys as queries, more, and none.
#[test]
fn every_mask_of_packed_sequences() {
    const QUERIES: [usize; 6] = [1, 0, 3, 17, 65, 129];
    let keys = [QUERIES, [4, 9, 40, 17, 70, 200], [0; 6], [0, 5, 0, 30, 1, 64]];
    for (n, (keys, mask)) in keys.iter().flat_map(|k| MASKS.map(|m| (k, m))).enumerate() {
        let [heads, kv_heads] = HEADS[n % 4];
        let [dqk, dv] = COLUMNS[n * 2 % 7];
        let dtype = TYPES[n % TYPES.len()];
        let mut call =
            Builder::packed("mha_varlen", dtype, [&QUERIES, keys], [heads, kv_heads, dqk, dv]).want("lse");
        if n % 3 == 0 {
            call = call.f32("sink", [heads]).f32("alibi", [6, heads]);
        }
        masked(call, mask).check(&format!("{dtype} keys {keys:?} {mask:?}"), n as u64);
    }
}

/// More sequences than a wave has lanes.
#[test]
fn many_sequences() {
    let lens = |most: usize| (0..150).map(|i| i * 7 % most).collect::<Vec<_>>();
    for (dtype, [heads, kv_heads]) in [(DType::Bf16, [1, 1]), (DType::F16, [12, 2])] {
        let call = Builder::packed("mha_varlen", dtype, [&lens(5), &lens(9)], [heads, kv_heads, 16, 16]);
        call.want("lse").scalars(&[CAUSAL]).check(&format!("{heads} heads"), 1);
    }
    // One with many tiles behind many empty ones, and a start that falls there.
    let mut lens = vec![0; 129];
    lens[127] = 300;
    let call = || Builder::packed("mha_varlen", DType::Bf16, [&lens, &lens], [2, 2, 32, 32]).want("lse");
    call().scalars(&[CAUSAL]).check("the last but one is long", 2);
    let mut falling = starts(&lens);
    falling[127] = 1;
    falling[126] = 2;
    call().integers("cu_seqlens_q", &falling).check("a start that falls", 3);
}

/// Without sequences, queries or heads nothing is launched.
#[test]
fn nothing_to_do() {
    for (n, sizes) in
        [[0, 4, 4, 2, 1, 16, 16], [2, 0, 4, 2, 1, 16, 16], [2, 4, 4, 0, 1, 16, 16], [2, 4, 4, 0, 0, 16, 16]]
            .into_iter()
            .enumerate()
    {
        let data = Dense::<bf16>::new(sizes, n as u64);
        for gpu in kit::devices() {
            gpu.assert_nothing_launched(|| drop(data.run(&gpu, &AttentionOptions::default())));
        }
    }
    for (lens, heads) in [([&[][..], &[]], [2, 1]), ([&[0, 0], &[3, 4]], [2, 1]), ([&[2], &[3]], [0, 0])] {
        let call = Builder::packed("mha_varlen", DType::F16, lens, [heads[0], heads[1], 16, 16]);
        call.want("lse").check(&format!("{lens:?}"), 1);
    }
    // Of a sequence without keys the outputs are 0 and -inf, or the sink.
    let empty = |dtype| Builder::dense("mha", dtype, [2, 5, 0, 4, 2, 24, 40]).want("lse");
    empty(DType::Bf16).check("no keys", 1);
    empty(DType::F32).f32("sink", [4]).check("no keys and a sink", 1);
}

/// An option, or a value of it: its name, and how a call gets it.
type Give = fn(Builder, Sizes) -> Builder;

/// Those that one call can have together.
const OPTIONS: &[(&str, Give)] = &[
    ("causal", |b, _| b.scalars(&[CAUSAL])),
    ("window_left", |b, _| b.scalar("window_left", Scalar::Int(9))),
    ("window_right", |b, _| b.scalar("window_right", Scalar::Int(2))),
    ("softcap", |b, _| b.scalar("softcap", Scalar::Float(2.0))),
    ("scale", |b, _| b.scalar("scale", Scalar::Float(-0.4))),
    ("alibi", |b, [n, _, _, heads, ..]| b.f32("alibi", [n, heads])),
    ("bias", |b, [_, sq, sk, ..]| b.f32("bias", [sq, sk])),
    ("sink", |b, [_, _, _, heads, ..]| b.f32("sink", [heads])),
    ("dropout", |b, _| {
        let scalars = [("seed", Scalar::Count(77)), ("offset", Scalar::Count(u64::MAX - 5))];
        b.scalar("dropout_p", Scalar::Float(0.3)).scalars(&scalars)
    }),
    ("q_descale", |b, [n, _, _, heads, ..]| b.f32("q_descale", [n, heads])),
    ("k_descale", |b, [n, _, _, _, kv_heads, ..]| b.f32("k_descale", [n, kv_heads])),
    ("v_descale", |b, [n, _, _, _, kv_heads, ..]| b.f32("v_descale", [n, kv_heads])),
];

/// `n` sequences of `sq` and `sk` rows, or packed ones of as many in all.
fn call_of(name: &str, dtype: DType, sizes: Sizes) -> (Builder, Sizes) {
    let [n, sq, sk, heads, kv_heads, dqk, dv] = sizes;
    if name == "mha" {
        return (Builder::dense(name, dtype, sizes), sizes);
    }
    // Lengths that differ by sequence, with the same sum.
    let lens = |len: usize| -> Vec<usize> {
        (0..n)
            .map(|i| match n {
                1 => len,
                _ if i == 0 => len / 2,
                _ if i == 1 => len + len.div_ceil(2),
                _ => len,
            })
            .collect()
    };
    let packed = Builder::packed(name, dtype, [&lens(sq), &lens(sk)], [heads, kv_heads, dqk, dv]);
    (packed, [n, n * sq, n * sk, heads, kv_heads, dqk, dv])
}

#[test]
fn every_pair_of_options() {
    let sizes = [2, 19, 41, 4, 2, 24, 16];
    let mut seed = 0;
    for (i, (one, give_one)) in OPTIONS.iter().enumerate() {
        for (other, give_other) in &OPTIONS[i..] {
            let (name, dtype) = (OPERATORS[seed % 2], TYPES[seed % 3]);
            let (call, sizes) = call_of(name, dtype, sizes);
            let call = give_other(give_one(call, sizes), sizes).want("lse");
            call.check(&format!("{name} of {dtype}, {one} and {other}"), seed as u64);
            seed += 1;
        }
    }
}

/// Biases of either type, with any axes broadcast; slopes and factors that sequences share.
#[test]
fn options_of_every_shape() {
    let sizes @ [n, sq, sk, heads, ..] = [2, 19, 41, 4, 2, 24, 16];
    let call = |name, dtype| call_of(name, dtype, sizes).0.want("lse");
    for (i, shape) in
        [[n, heads, sq, sk], [1, heads, sq, sk], [n, 1, sq, sk], [n, heads, 1, sk], [1, 1, 1, sk]]
            .into_iter()
            .enumerate()
    {
        for (dtype, bias) in [
            (DType::Bf16, DType::F32),
            (DType::Bf16, DType::Bf16),
            (DType::F16, DType::F16),
            (DType::F32, DType::F32),
        ] {
            let what = format!("bias {shape:?} of {bias} beside {dtype}");
            call("mha", dtype).tensor("bias", bias, shape).check(&what, i as u64);
        }
    }
    let biased = call("mha_varlen", DType::F16).f32("bias", [n, heads, 1, n * sk]);
    biased.check("bias by head of packed sequences", 3);
    for name in OPERATORS {
        let call = call(name, DType::Bf16).f32("alibi", [heads]).f32("q_descale", [1]).f32("k_descale", [1]);
        call.f32("v_descale", [1]).check(&format!("{name}, shared factors"), 4);
    }
}

/// Two keys whose weights add up to more than 1 and whose values cancel out: the error is that of the terms.
#[test]
fn terms_that_cancel_out() {
    let sizes = [1, 126, 2, 3, 3, 1, 63];
    let (call, _) = call_of("mha", DType::Bf16, sizes);
    let with = |call, option: &str| {
        let (_, give) = OPTIONS.iter().find(|(name, _)| *name == option).unwrap();
        give(call, sizes)
    };
    let call = with(with(call, "dropout"), "v_descale");
    call.check("mha of bf16, dropout and v_descale", 863_615_193_566);
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let rows = || kit::size(0..=140, &[31, 32, 33, 127, 128, 129]);
    let heads = (1usize..=3, select(&[1usize, 2, 3, 7][..]));
    let columns = || kit::size(1..=256, &[64, 128, 192]);
    (1usize..=3, rows(), rows(), heads, columns(), columns())
        .prop_map(|(n, sq, sk, (kv, group), dqk, dv)| [n, sq, sk, kv * group, kv, dqk, dv])
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn any_sizes_and_options(
        sizes in sizes(),
        // About three options.
        chosen in prop::collection::vec(0usize..16, OPTIONS.len()),
        (name, dtype) in (select(&OPERATORS[..]), select(&TYPES[..])),
        seed in 0u64..1 << 40,
    ) {
        let (call, sizes) = call_of(name, dtype, sizes);
        let chosen: Vec<_> = OPTIONS.iter().zip(chosen).filter(|(_, n)| n % 4 == 3).map(|(o, _)| o).collect();
        let names: Vec<_> = chosen.iter().map(|(name, _)| *name).collect();
        let call = chosen.iter().fold(call, |call, (_, give)| give(call, sizes));
        call.want("lse").check(&format!("{name} of {dtype}, {sizes:?}, {names:?}"), seed);
    }

    /// Views of any strides and alignment give the bits of contiguous tensors, and nothing between their elements is
    /// read or written.
    #[test]
    fn strided_views(
        sizes in sizes(),
        heads_outside: [bool; 5],
        pad in prop::array::uniform5(select(&[0usize, 8, 16, 3][..])),
        shift in prop::array::uniform5(select(&[0usize, 0, 8, 1][..])),
        kind in 0usize..3,
        seed in 0u64..1 << 40,
    ) {
        let layout = Strides { heads_outside, pad, shift };
        match kind {
            0 => check_strides::<bf16>(sizes, layout, seed),
            1 => check_strides::<f16>(sizes, layout, seed),
            _ => check_strides::<f32>(sizes, layout, seed),
        }
    }
}

/// Of q, k, v, out and lse.
struct Strides {
    heads_outside: [bool; 5],
    pad: [usize; 5],
    shift: [usize; 5],
}

impl Strides {
    /// `[B, rows, heads, columns]`; gaps behind columns, heads and rows.
    fn place(&self, i: usize, [b, rows, heads, columns]: [usize; 4]) -> Place {
        let pitch = columns + self.pad[i];
        let [inner, outer] = if self.heads_outside[i] { [rows, heads] } else { [heads, rows] };
        let [near, far] = [pitch, pitch * inner.max(1) + self.pad[i]];
        let batch = far * outer.max(1) + self.pad[i];
        let [row, head] = if self.heads_outside[i] { [near, far] } else { [far, near] };
        let layout = Layout::with_strides([b, rows, heads, columns], [batch, row, head, 1]).unwrap();
        Place::new(layout).shifted(self.shift[i])
    }

    /// `[B, heads, rows]`.
    fn lse(&self, [b, heads, rows]: [usize; 3]) -> Place {
        let [inner, outer] = if self.heads_outside[4] { [heads, rows] } else { [rows, heads] };
        let pitch = inner.max(1) + self.pad[4];
        let [row, head] = if self.heads_outside[4] { [pitch, 1] } else { [1, pitch] };
        let layout = Layout::with_strides([b, heads, rows], [pitch * outer.max(1), head, row]).unwrap();
        Place::new(layout).shifted(self.shift[4])
    }
}

fn check_strides<T>(sizes: Sizes, strides: Strides, seed: u64)
where
    T: Float + AttentionElement + AttentionOutput<T>,
{
    let data = Dense::<T>::new(sizes, seed);
    let [b, sq, _, heads, ..] = sizes;
    for gpu in kit::devices() {
        let options = mask(seed.is_multiple_of(2), None, None);
        let want = data.run(&gpu, &options);
        let [q, k, v, out] = data.shapes();
        let places = Places {
            q: strides.place(0, q),
            k: strides.place(1, k),
            v: strides.place(2, v),
            out: strides.place(3, out),
            lse: strides.lse([b, heads, sq]),
        };
        // Rows that are not whole vectors have another kernel.
        let got = data.run_at(&gpu, places, &options);
        kit::assert_close(&got.0, &kit::widen(&want.0), Tolerance::Attention);
        kit::assert_close(&got.1, &kit::widen(&want.1), Tolerance::Within { rtol: 1e-4, atol: 1e-4 });
    }
}

/// A sequence alone has the bits that it has beside longer ones, which have more splits.
#[test]
fn fixed_tiling_is_batch_invariant() {
    fn check<T: Float + AttentionElement + AttentionOutput<T>>(columns: usize) {
        for gpu in kit::devices() {
            let sink = gpu.upload(&[0.5f32, -1.0], [2]);
            for (tile, keys_per_split) in
                [(QueryTile::Short, Some(64)), (QueryTile::Tall, Some(128)), (QueryTile::Tall, None)]
            {
                let tiling = Tiling::Fixed { tile, keys_per_split };
                let options =
                    AttentionOptions { tiling, sink: Some(sink.view()), ..mask(true, Some(150), None) };
                // Sequences with 50, 310 and 200 keys.
                let (q, k) = ([0, 70, 370, 375], [0, 50, 360, 560]);
                let data = Dense::<T>::new([1, 375, 560, 2, 1, columns, columns], 5);
                let got = Packed::new(&gpu, &data, [&q, &k]).run(&gpu, &options, false);
                for n in 0..3 {
                    let [rows, keys] = [&q, &k].map(|starts| starts[n] as usize..starts[n + 1] as usize);
                    let part = |x: &[T], rows: &Range<usize>, width: usize| {
                        x[rows.start * width..rows.end * width].to_vec()
                    };
                    let alone = Dense {
                        sizes: [1, rows.len(), keys.len(), 2, 1, columns, columns],
                        q: part(&data.q, &rows, 2 * columns),
                        k: part(&data.k, &keys, columns),
                        v: part(&data.v, &keys, columns),
                    };
                    let starts = [[0, rows.len() as i32], [0, keys.len() as i32]];
                    let alone = Packed::new(&gpu, &alone, [&starts[0], &starts[1]]);
                    let alone = alone.run(&gpu, &options, false);
                    kit::assert_bits(&alone.0, &part(&got.0.data, &rows, 2 * columns));
                    kit::assert_bits(&alone.1, &got.1.data[rows.start * 2..rows.end * 2]);
                }
            }
        }
    }
    check::<bf16>(64);
    check::<f16>(40);
    // Not whole vectors: the general kernels.
    check::<f16>(33);
}

/// However the keys are split, rows are rounded relative to another maximum, and no more.
#[test]
fn splits_change_little() {
    let data = Dense::<f32>::new([2, 40, 700, 4, 2, 24, 24], 9);
    let half = Dense::<bf16>::new([2, 40, 700, 4, 2, 64, 64], 9);
    for gpu in kit::devices() {
        let (want, lse) = data.run(&gpu, &mask(true, None, None));
        let (of_half, _) = half.run(&gpu, &mask(true, None, None));
        for tile in [QueryTile::Short, QueryTile::Tall] {
            for keys in [64, 256, 704] {
                let tiling = Tiling::Fixed { tile, keys_per_split: Some(keys) };
                let got = data.run(&gpu, &AttentionOptions { tiling, ..mask(true, None, None) });
                kit::assert_close(&got.0, &kit::widen(&want), Tolerance::Within { rtol: 1e-5, atol: 2e-6 });
                kit::assert_close(&got.1, &kit::widen(&lse), Tolerance::Within { rtol: 1e-6, atol: 2e-6 });
                let got = half.run(&gpu, &AttentionOptions { tiling, ..mask(true, None, None) });
                kit::assert_close(&got.0, &kit::widen(&of_half), Tolerance::Attention);
            }
        }
    }
}

/// A workspace that has no room for the splits that are asked for, and splits that are not whole tiles.
#[test]
fn splits_are_refused() {
    let gpu = &kit::devices()[0];
    let data = Dense::<bf16>::new([1, 4, 200, 1, 1, 16, 16], 3);
    let [q, k, v] = [(&data.q, 4), (&data.k, 200), (&data.v, 200)].map(|(x, n)| gpu.upload(x, [1, n, 1, 16]));
    let mut out = gpu.poisoned::<bf16>([1, 4, 1, 16]);
    let mut short = gpu.poisoned::<f32>([4 * 18 * 4 - 1]);
    let mut run = |keys, workspace| {
        let tiling = Tiling::Fixed { tile: QueryTile::Short, keys_per_split: Some(keys) };
        let qkv = Qkv { q: q.view(), k: k.view(), v: v.view() };
        let outputs = AttentionOutputs { out: out.view_mut(), lse: None };
        mha(gpu.stream(), qkv, outputs, workspace, &AttentionOptions { tiling, ..Default::default() })
    };
    gpu.assert_nothing_launched(|| {
        kit::assert_error(run(64, None), kind!(Shape), &["mha", "workspace", "[0]", "[288]", "4 splits"]);
        kit::assert_error(
            run(64, Some(short.view_mut())),
            kind!(Shape),
            &["mha", "workspace", "[287]", "[288]"],
        );
        for keys in [0, 65] {
            kit::assert_error(run(keys, None), kind!(Argument), &["mha", "keys_per_split", "multiple of 64"]);
        }
    });
}

/// Packed sequences on a device: `[rows, heads, columns]`.
struct Packed<T: Element> {
    q: Tensor<T>,
    k: Tensor<T>,
    v: Tensor<T>,
    starts: [Tensor<i32>; 2],
}

impl<T: Float + AttentionElement + AttentionOutput<T>> Packed<T> {
    /// Sequences of a batch one after the other.
    fn new(gpu: &Gpu, data: &Dense<T>, starts: [&[i32]; 2]) -> Self {
        let [q, k, v] = [0, 1, 2].map(|i| {
            let [b, rows, heads, columns] = data.shapes()[i];
            [b * rows, heads, columns]
        });
        Self {
            q: gpu.upload(&data.q, q),
            k: gpu.upload(&data.k, k),
            v: gpu.upload(&data.v, v),
            starts: starts.map(|s| gpu.upload(s, [s.len()])),
        }
    }

    /// Log-sum-exp as `[total_q, Hq]`, or as a view of `[Hq, total_q]`.
    #[track_caller]
    fn run(&self, gpu: &Gpu, options: &AttentionOptions<T>, transposed: bool) -> (Array<T>, Array<f32>) {
        let [rows, heads] = [self.q.layout().shape()[0], self.q.layout().shape()[1]];
        let mut out = gpu.poisoned([rows, heads, self.v.layout().shape()[2]]);
        let strides = if transposed { [1, rows.max(1)] } else { [heads.max(1), 1] };
        let mut lse = gpu.poisoned(Place::new(Layout::with_strides([rows, heads], strides).unwrap()));
        let [q, k] = &self.starts;
        let [keys, kv_heads, dv] = [0, 1, 2].map(|axis| self.v.layout().shape()[axis]);
        let problem = AttentionProblem {
            sequences: q.layout().shape()[0].saturating_sub(1),
            heads,
            kv_heads,
            queries: rows,
            keys,
            dv,
        };
        let len = attention_workspace(gpu.stream().device().info(), &problem, options.tiling);
        let mut workspace = gpu.poisoned::<f32>([len]);
        mha_varlen(
            gpu.stream(),
            Qkv { q: self.q.view(), k: self.k.view(), v: self.v.view() },
            SequenceStarts { q: q.view(), k: k.view() },
            AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) },
            Some(workspace.view_mut()),
            options,
        )
        .unwrap();
        gpu.assert_guards(&workspace);
        gpu.assert_guards(&out);
        gpu.assert_guards(&lse);
        (gpu.download(&out), gpu.download(&lse))
    }
}

/// A batch is the same as its sequences packed, and as each alone; log-sum-exp may be transposed.
#[test]
fn batched_packed_and_single_sequences_agree() {
    let data = Dense::<bf16>::new([3, 40, 70, 4, 2, 32, 32], 5);
    let [b, sq, sk, heads, kv_heads, dqk, dv] = data.sizes;
    for gpu in kit::devices() {
        for options in [mask(false, None, None), mask(true, None, None)] {
            let (out, lse) = data.run(&gpu, &options);
            let starts = [sq, sk].map(|len| starts(&[len; 3]));
            let packed = Packed::new(&gpu, &data, [&starts[0], &starts[1]]);
            let (packed_out, packed_lse) = packed.run(&gpu, &options, false);
            kit::assert_bits(&packed_out, &out);
            kit::assert_bits(&packed.run(&gpu, &options, true).1, &packed_lse);
            let of = |n: usize, head: usize, i: usize| lse[(n * heads + head) * sq + i];
            let rows = (0..b * sq * heads).map(|at| of(at / (sq * heads), at % heads, at / heads % sq));
            kit::assert_bits(&packed_lse, &rows.collect::<Vec<_>>());
            for n in 0..b {
                let part = |x: &[bf16], width: usize| x[n * width..(n + 1) * width].to_vec();
                let one = Dense {
                    sizes: [1, sq, sk, heads, kv_heads, dqk, dv],
                    q: part(&data.q, sq * heads * dqk),
                    k: part(&data.k, sk * kv_heads * dqk),
                    v: part(&data.v, sk * kv_heads * dv),
                };
                kit::assert_bits(&one.run(&gpu, &options).0, &part(&out, sq * heads * dv));
            }
        }
    }
}

/// The same call gives the same bits; heads that share keys give those of heads with keys of their own; permuted key heads
/// permute the outputs.
#[test]
fn groups_of_heads() {
    let data = Dense::<f16>::new([2, 30, 50, 6, 3, 40, 24], 8);
    let [b, sq, _, heads, kv_heads, dqk, dv] = data.sizes;
    let group = heads / kv_heads;
    let repeated = data.with_keys(50, heads, |row, head| (row, head / group));
    let turn = |head: usize| (head + 1) % kv_heads;
    let mut permuted = data.with_keys(50, kv_heads, |row, head| (row, turn(head)));
    // Heads of a group move with their keys.
    let moved = |head: usize| turn(head / group) * group + head % group;
    let rows = |x: &[f16], columns: usize| -> Vec<f16> {
        let head = |at: usize| &x[(at / heads * heads + moved(at % heads)) * columns..][..columns];
        (0..b * sq * heads).flat_map(|at| head(at).to_vec()).collect()
    };
    permuted.q = rows(&data.q, dqk);
    for gpu in kit::devices() {
        for options in [mask(true, None, None), mask(false, None, None)] {
            let (out, lse) = data.run(&gpu, &options);
            for again in [&data, &repeated] {
                let (other_out, other_lse) = again.run(&gpu, &options);
                kit::assert_bits(&other_out, &out);
                kit::assert_bits(&other_lse, &lse);
            }
            kit::assert_bits(&permuted.run(&gpu, &options).0, &rows(&out, dv));
        }
    }
}

/// Causal: without the last queries and as many keys, the other rows have the same bits.
#[test]
fn later_tokens_have_no_effect() {
    let data = Dense::<bf16>::new([1, 150, 170, 2, 1, 64, 64], 3);
    for gpu in kit::devices() {
        let options = mask(true, None, None);
        let (all, _) = data.run(&gpu, &options);
        for dropped in [1, 31, 130] {
            let (sq, sk) = (150 - dropped, 170 - dropped);
            let mut fewer = data.with_keys(sk, 1, |row, head| (row, head));
            fewer.q.truncate(sq * 2 * 64);
            fewer.sizes[1] = sq;
            kit::assert_bits(&fewer.run(&gpu, &options).0, &all[..sq * 2 * 64]);
        }
    }
}

/// Values of keys that no row sees have no effect, be they NaN; neither have windows that are as wide as the sequence, nor a sink of
/// -inf.
#[test]
fn what_is_not_seen_has_no_effect() {
    let data = Dense::<bf16>::new([2, 3, 100, 4, 2, 64, 64], 4);
    let [b, sq, sk, heads, kv_heads, columns, _] = data.sizes;
    let row = kv_heads * columns;
    let mut poisoned = data.clone();
    for n in 0..b {
        // The first query sees keys from 97 - 5 on.
        poisoned.k[n * sk * row..(n * sk + 92) * row].fill(bf16::NAN);
        poisoned.v[n * sk * row..(n * sk + 92) * row].fill(bf16::NAN);
    }
    // Packed: the rows before the first sequence and behind the last one.
    let ends = [10, 40, 90];
    let mut outside = data.clone();
    for rows in [0..10, 90..2 * sk] {
        outside.k[rows.start * row..rows.end * row].fill(bf16::NAN);
        outside.v[rows.start * row..rows.end * row].fill(bf16::NAN);
    }
    for gpu in kit::devices() {
        let near = mask(false, Some(5), None);
        let (want, got) = (data.run(&gpu, &near), poisoned.run(&gpu, &near));
        kit::assert_bits(&got.0, &want.0);
        kit::assert_bits(&got.1, &want.1);

        let packed =
            |data| Packed::new(&gpu, data, [&[0, 3, 6], &ends]).run(&gpu, &mask(true, None, None), false);
        let (want, got) = (packed(&data), packed(&outside));
        kit::assert_bits(&got.0, &want.0);
        kit::assert_bits(&got.1, &want.1);

        let want = data.run(&gpu, &mask(false, None, None));
        let no_sink = gpu.upload(&vec![f32::NEG_INFINITY; heads], [heads]);
        for options in [
            mask(false, Some(sk as u32), Some((sk + sq) as u32)),
            mask(false, Some(u32::MAX), Some(u32::MAX)),
            AttentionOptions { sink: Some(no_sink.view()), ..Default::default() },
        ] {
            let got = data.run(&gpu, &options);
            kit::assert_bits(&got.0, &want.0);
            kit::assert_bits(&got.1, &want.1);
        }
    }
}

/// NaN in a query makes the output and log-sum-exp of its row NaN, and those of no other.
#[test]
fn nan_in_a_query() {
    let data = Dense::<bf16>::new([1, 40, 70, 2, 1, 32, 32], 10);
    let mut poisoned = data.clone();
    let bad = 17 * 2 + 1;
    poisoned.q[bad * 32 + 5] = bf16::NAN;
    for gpu in kit::devices() {
        let sink = gpu.upload(&[0.5f32, 1.0], [2]);
        for options in
            [mask(true, None, None), AttentionOptions { sink: Some(sink.view()), ..Default::default() }]
        {
            let (mut want, mut lse) = data.run(&gpu, &options);
            let got = poisoned.run(&gpu, &options);
            want.data[bad * 32..(bad + 1) * 32].fill(bf16::NAN);
            lse.data[40 + 17] = f32::NAN;
            kit::assert_within_ulps(&got.0, &want, 0);
            kit::assert_within_ulps(&got.1, &lse, 0);
        }
    }
}

/// A constant added to all scores leaves the outputs, and moves log-sum-exp by as much.
#[test]
fn constants_of_scores_cancel() {
    let scale = 0.125f32;
    let without = Dense::<f32>::new([1, 20, 45, 2, 1, 32, 32], 6);
    let one_more = |x: &[f32], value: f32| -> Vec<f32> {
        x.chunks(32).flat_map(|row| [row, &[value]].concat()).collect()
    };
    let mut with = without.clone();
    (with.q, with.k, with.sizes[5]) = (one_more(&without.q, 1.0), one_more(&without.k, 24.0), 33);
    for gpu in kit::devices() {
        let options = AttentionOptions { scale: Some(scale), ..mask(true, None, None) };
        let (want, lse) = without.run(&gpu, &options);
        let (got, moved) = with.run(&gpu, &options);
        kit::assert_close(&got, &kit::widen(&want), Tolerance::Attention);
        let by = f64::from(scale) * 24.0;
        let lse: Vec<f64> = lse.iter().map(|x| f64::from(*x) + by).collect();
        kit::assert_close(&moved, &lse, Tolerance::Within { rtol: 1e-5, atol: 1e-5 });
    }
}

/// Outputs lie between the least and the largest value; equal values are kept, less the share of the sink.
#[test]
fn outputs_are_averages() {
    let data = Dense::<f32>::new([1, 33, 60, 2, 1, 16, 8], 7);
    let mut ones = data.clone();
    ones.v.fill(1.0);
    for gpu in kit::devices() {
        let causal = mask(true, None, None);
        let (out, _) = data.run(&gpu, &causal);
        for (at, y) in out.iter().enumerate() {
            let (i, column) = (at / (2 * 8), at % 8);
            let seen = (0..=i + 27).map(|j| data.v[j * 8 + column]);
            let (low, high) = seen.fold((f32::MAX, f32::MIN), |(l, h), v| (l.min(v), h.max(v)));
            assert!((low - 1e-5..=high + 1e-5).contains(y), "{y} of [{low}, {high}] on {}", gpu.spec());
        }
        let (out, _) = ones.run(&gpu, &causal);
        kit::assert_close(&out, &vec![1.0; out.len()], Tolerance::Within { rtol: 0.0, atol: 2e-6 });
        let sink = gpu.upload(&[1.5f32, -0.5], [2]);
        let (out, lse) = ones.run(&gpu, &AttentionOptions { sink: Some(sink.view()), ..causal });
        let share = |at: usize| {
            let (i, head) = (at / 16, at / 8 % 2);
            1.0 - (f64::from([1.5f32, -0.5][head]) - f64::from(lse[head * 33 + i])).exp()
        };
        let want: Vec<f64> = (0..out.len()).map(share).collect();
        kit::assert_close(&out, &want, Tolerance::Within { rtol: 0.0, atol: 5e-6 });
    }
}

/// Rows that are more than 2 GiB from the first, with `HK_FULL=1`; otherwise as far as is quick.
#[test]
fn rows_far_apart() {
    let stride = if kit::full() { (1 << 30) + 8 } else { (1 << 21) + 8 };
    let data = Dense::<bf16>::new([1, 3, 3, 1, 1, 32, 32], 9);
    for gpu in kit::devices() {
        let options = mask(true, None, None);
        let want = data.run(&gpu, &options);
        // The last row is 2 strides of 2 bytes away.
        let far = || Layout::with_strides([1, 3, 1, 32], [3 * stride, stride, 32, 1]).unwrap();
        let stream = gpu.stream();
        let mut wide = stream.alloc_zeroed::<bf16>(2 * stride + 3 * 32).unwrap();
        let near = || Place::from(data.shapes()[0]);
        // A window of the own place alone copies values: that is how the far rows get theirs.
        let (q, k) = (gpu.upload(&data.q, near()), gpu.upload(&data.k, near()));
        let own = mask(true, Some(0), None);
        for (i, from) in [&data.q, &data.k, &data.v].into_iter().enumerate() {
            let v = gpu.upload(from, near());
            let out = wide.view_mut_with(far(), 32 * i).unwrap();
            let qkv = Qkv { q: q.view(), k: k.view(), v: v.view() };
            mha(stream, qkv, AttentionOutputs { out, lse: None }, None, &own).unwrap();
        }
        let view = |i: usize| wide.view_with(far(), 32 * i).unwrap();
        let mut out = gpu.poisoned(near());
        let qkv = Qkv { q: view(0), k: view(1), v: view(2) };
        mha(stream, qkv, AttentionOutputs { out: out.view_mut(), lse: None }, None, &options).unwrap();
        kit::assert_bits(&gpu.download(&out), &want.0);
    }
}

/// The starts are on the device: those that fall, or end elsewhere, give NaN.
#[test]
fn starts_are_not_trusted() {
    let call = |q: &[i32], k: &[i32]| {
        let b = Builder::new("mha_varlen").tensor("q", DType::Bf16, [20, 4, 16]);
        let b = b.tensor("k", DType::Bf16, [30, 2, 16]).tensor("v", DType::Bf16, [30, 2, 16]);
        b.integers("cu_seqlens_q", q).integers("cu_seqlens_k", k).want("lse").scalars(&[CAUSAL])
    };
    for (q, k) in [
        // Of queries: all outputs.
        ([0, 9, 5, 20], [0, 10, 20, 30]),
        ([0, 5, 9, 19], [0, 10, 20, 30]),
        ([0, 5, 9, 21], [0, 10, 20, 30]),
        ([1, 5, 9, 20], [0, 10, 20, 30]),
        ([-1, 5, 9, 20], [0, 10, 20, 30]),
        ([0, i32::MIN, 9, 20], [0, 10, 20, 30]),
        ([0, i32::MAX, i32::MAX, 20], [0, 10, 20, 30]),
        // Of keys: outputs of these sequences.
        ([0, 5, 9, 20], [0, 20, 10, 30]),
        ([0, 5, 9, 20], [0, 10, 20, 31]),
        ([0, 5, 9, 20], [-1, 10, 20, 25]),
        ([0, 5, 9, 20], [i32::MIN, i32::MAX, 20, 30]),
        // In order, if not from the first to the last row.
        ([0, 5, 9, 20], [3, 10, 10, 25]),
    ] {
        call(&q, &k).check(&format!("starts {q:?} and {k:?}"), 2);
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Options {
    mask: Mask,
    scale: Option<f32>,
    softcap: f32,
    dropout: f32,
    own_bias: bool,
}

fn dense_refusals<'f, T>() -> Refusals<'f, Options>
where
    T: kit::CallElement + AttentionElement + AttentionOutput<T>,
{
    Refusals::new(Options::default(), |stream, tensors, options: Options| {
        let bias = if options.own_bias {
            tensors.optional_input::<T>("bias").map(Bias::Own)
        } else {
            tensors.optional_input::<f32>("bias").map(Bias::F32)
        };
        let attention = AttentionOptions {
            scale: options.scale,
            mask: options.mask,
            softcap: options.softcap,
            alibi: tensors.optional_input("alibi"),
            bias,
            sink: tensors.optional_input("sink"),
            dropout: Some(Dropout { p: options.dropout, seed: 1, offset: 2 }),
            descales: Descales {
                q: tensors.optional_input("q_descale"),
                k: tensors.optional_input("k_descale"),
                v: tensors.optional_input("v_descale"),
            },
            tiling: Tiling::Auto,
            pages: None,
        };
        let qkv = Qkv { q: tensors.input::<T>("q"), k: tensors.input("k"), v: tensors.input("v") };
        let outputs =
            AttentionOutputs { out: tensors.output::<T>("out"), lse: tensors.optional_output("lse") };
        mha(stream, qkv, outputs, None, &attention)
    })
    .input::<T>("q", [2, 3, 4, 8])
    .input::<T>("k", [2, 5, 2, 8])
    .input::<T>("v", [2, 5, 2, 6])
    .input::<f32>("alibi", [2, 4])
    .input::<f32>("bias", [3, 5])
    .input::<f32>("sink", [4])
    .input::<f32>("q_descale", [2, 4])
    .input::<f32>("k_descale", [2, 2])
    .input::<f32>("v_descale", [1])
    .output::<T>("out", [2, 3, 4, 6])
    .output::<f32>("lse", [2, 4, 3])
}

#[test]
fn bad_batches_are_refused() {
    dense_refusals::<bf16>()
        .accepts(|_| {})
        .accepts(|call| ["alibi", "bias", "sink", "q_descale", "lse"].iter().for_each(|n| call.without(n)))
        .accepts(|call| call.shape("bias", [1, 4, 1, 5]))
        .accepts(|call| call.shape("alibi", [4]))
        .accepts(|call| {
            call.shape("bias", [2, 4, 3, 5]);
            call.dtype("bias", DType::Bf16);
            call.options.own_bias = true;
        })
        .refuses(kind!(Shape), &["mha: q: shape [2, 3, 8]", "4"], |call| call.shape("q", [2, 3, 8]))
        .refuses(kind!(Shape), &["mha: k: shape [1, 5, 2, 8]", "2 sequences"], |call| {
            call.shape("k", [1, 5, 2, 8]);
        })
        .refuses(kind!(Shape), &["mha: k: shape [2, 5, 2, 9]", "8 columns (of q)"], |call| {
            call.shape("k", [2, 5, 2, 9]);
        })
        .refuses(kind!(Shape), &["mha: v: shape [2, 4, 2, 6]", "[2, 5, 2, 6]"], |call| {
            call.shape("v", [2, 4, 2, 6]);
        })
        .refuses(kind!(Shape), &["mha: v: shape [2, 5, 1, 6]", "2 heads (of k)"], |call| {
            call.shape("v", [2, 5, 1, 6]);
        })
        .refuses(kind!(Shape), &["mha: q: shape [2, 3, 4, 8]", "a multiple of 3 heads (of k)"], |call| {
            call.shape("k", [2, 5, 3, 8]);
            call.shape("v", [2, 5, 3, 6]);
        })
        .refuses(kind!(Shape), &["mha: q: shape [2, 3, 4, 8]", "a multiple of 0 heads"], |call| {
            call.shape("k", [2, 5, 0, 8]);
            call.shape("v", [2, 5, 0, 6]);
        })
        .refuses(kind!(Empty), &["mha: v: axis 3"], |call| {
            call.shape("v", [2, 5, 2, 0]);
            call.shape("out", [2, 3, 4, 0]);
        })
        .refuses(kind!(Shape), &["mha: q: shape [2, 3, 4, 257]", "at most 256 columns"], |call| {
            call.shape("q", [2, 3, 4, 257]);
            call.shape("k", [2, 5, 2, 257]);
        })
        .refuses(kind!(Shape), &["mha: out: shape [2, 3, 4, 8]", "[2, 3, 4, 6]"], |call| {
            call.shape("out", [2, 3, 4, 8]);
        })
        .refuses(kind!(Shape), &["mha: lse: shape [2, 3, 4]", "[2, 4, 3]"], |call| {
            call.shape("lse", [2, 3, 4]);
        })
        .refuses(kind!(Shape), &["mha: alibi: shape [3]", "[4] or [2, 4]"], |call| call.shape("alibi", [3]))
        .refuses(kind!(Shape), &["mha: alibi: shape [3, 4]"], |call| call.shape("alibi", [3, 4]))
        .refuses(kind!(Shape), &["mha: sink: shape [2]", "[4]"], |call| call.shape("sink", [2]))
        .refuses(kind!(Shape), &["mha: bias: shape [3, 4]", "[3, 5]"], |call| call.shape("bias", [3, 4]))
        .refuses(kind!(Shape), &["mha: bias: shape [3, 3, 5]"], |call| call.shape("bias", [3, 3, 5]))
        .refuses(kind!(Shape), &["mha: bias: shape [2, 2, 3, 5]", "[2, 4, 3, 5]"], |call| {
            call.shape("bias", [2, 2, 3, 5]);
        })
        .refuses(kind!(Shape), &["mha: bias: shape [2, 4, 3, 1]"], |call| call.shape("bias", [2, 4, 3, 1]))
        .refuses(kind!(Shape), &["mha: q_descale: shape [4]", "[2, 4]", "[1]"], |call| {
            call.shape("q_descale", [4]);
        })
        .refuses(kind!(Shape), &["mha: k_descale: shape [2, 4]", "[2, 2]"], |call| {
            call.shape("k_descale", [2, 4]);
        })
        .refuses(kind!(Shape), &["mha: v_descale: shape [2]"], |call| call.shape("v_descale", [2]))
        .refuses(kind!(Stride), &["mha: k", "unit stride"], |call| call.strides("k", [80, 16, 1, 2]))
        .refuses(kind!(Stride), &["mha: out", "unit stride"], |call| call.strides("out", [72, 24, 1, 4]))
        .refuses(kind!(Argument), &["mha: scale: 0"], |call| call.options.scale = Some(0.0))
        .refuses(kind!(Argument), &["mha: scale: NaN"], |call| call.options.scale = Some(f32::NAN))
        .refuses(kind!(Argument), &["mha: scale: inf"], |call| call.options.scale = Some(f32::INFINITY))
        .refuses(kind!(Argument), &["mha: softcap: -1"], |call| call.options.softcap = -1.0)
        .refuses(kind!(Argument), &["mha: softcap: NaN"], |call| call.options.softcap = f32::NAN)
        .refuses(kind!(Argument), &["mha: dropout_p: 1", "[0, 1)"], |call| call.options.dropout = 1.0)
        .refuses(kind!(Argument), &["mha: dropout_p: -0.1"], |call| call.options.dropout = -0.1)
        .refuses(kind!(Argument), &["mha: dropout_p: NaN"], |call| call.options.dropout = f32::NAN)
        .refuses_other_devices()
        .refuses_overlaps();
    // The first device has one of the two.
    let other = if kit::devices()[0].arch() == Arch::Gfx942 { DType::Fp8E4M3 } else { DType::Fp8E4M3Fnuz };
    let says = format!("q of {other}");
    let parts = [&*says, "its fp8 is"];
    if other == DType::Fp8E4M3 {
        fp8_refusals::<Fp8E4M3>().refuses(kind!(Unsupported), &parts, |_| {});
    } else {
        fp8_refusals::<Fp8E4M3Fnuz>().refuses(kind!(Unsupported), &parts, |_| {});
    }
}

fn fp8_refusals<'f, T>() -> Refusals<'f, ()>
where
    T: kit::CallElement + AttentionElement,
    bf16: AttentionOutput<T>,
{
    Refusals::new((), |stream, tensors, ()| {
        let qkv = Qkv { q: tensors.input::<T>("q"), k: tensors.input("k"), v: tensors.input("v") };
        let outputs = AttentionOutputs { out: tensors.output::<bf16>("out"), lse: None };
        mha(stream, qkv, outputs, None, &AttentionOptions::default())
    })
    .input::<T>("q", [1, 3, 1, 8])
    .input::<T>("k", [1, 5, 1, 8])
    .input::<T>("v", [1, 5, 1, 8])
    .output::<bf16>("out", [1, 3, 1, 8])
}

#[test]
fn bad_packed_sequences_are_refused() {
    Refusals::new((), |stream, tensors, ()| {
        let qkv = Qkv { q: tensors.input::<f16>("q"), k: tensors.input("k"), v: tensors.input("v") };
        let starts = SequenceStarts { q: tensors.input("cu_seqlens_q"), k: tensors.input("cu_seqlens_k") };
        let outputs =
            AttentionOutputs { out: tensors.output::<f16>("out"), lse: tensors.optional_output("lse") };
        mha_varlen(stream, qkv, starts, outputs, None, &AttentionOptions::default())
    })
    .input::<f16>("q", [6, 4, 8])
    .input::<f16>("k", [9, 2, 8])
    .input::<f16>("v", [9, 2, 6])
    .input::<i32>("cu_seqlens_q", [3])
    .input::<i32>("cu_seqlens_k", [3])
    .output::<f16>("out", [6, 4, 6])
    .output::<f32>("lse", [6, 4])
    .accepts(|_| {})
    .accepts(|call| call.without("lse"))
    .refuses(kind!(Shape), &["mha_varlen: v: shape [8, 2, 6]", "[9, 2, 6]"], |call| {
        call.shape("v", [8, 2, 6]);
    })
    .refuses(kind!(Shape), &["mha_varlen: cu_seqlens_k: shape [4]", "[3]"], |call| {
        call.shape("cu_seqlens_k", [4]);
    })
    .refuses(kind!(Shape), &["mha_varlen: cu_seqlens_q: shape [0]", "[sequences + 1]"], |call| {
        call.shape("cu_seqlens_q", [0]);
    })
    .refuses(kind!(Shape), &["mha_varlen: lse: shape [4, 6]", "[6, 4]"], |call| call.shape("lse", [4, 6]))
    .refuses(kind!(Shape), &["mha_varlen: out: shape [6, 4, 8]"], |call| call.shape("out", [6, 4, 8]))
    .refuses(kind!(Stride), &["mha_varlen: cu_seqlens_q", "contiguous"], |call| {
        call.strides("cu_seqlens_q", [2]);
    })
    .refuses_other_devices()
    .refuses_overlaps();
}

/// What the safe functions cannot be given.
#[test]
fn windows_below_minus_one_are_refused() {
    for name in OPERATORS {
        for window in ["window_left", "window_right"] {
            let (call, _) = call_of(name, DType::Bf16, [1, 3, 5, 1, 1, 8, 8]);
            let call = call.scalar(window, Scalar::Int(-2)).call(1);
            let result = call.operator().execute(kit::devices()[0].stream(), &call).map(drop);
            kit::assert_error(result, kind!(Argument), &[name, window, "-2", "-1 (all keys)"]);
        }
    }
}

/// fp8 has outputs of any wider type.
#[test]
fn outputs_of_fp8() {
    fn run<T: Element + AttentionElement, O: Float + AttentionOutput<T>>(
        gpu: &Gpu,
        data: &[TensorView<T>; 3],
    ) -> Array<O> {
        let mut out = gpu.poisoned::<O>([1, 33, 2, 32]);
        let qkv = Qkv { q: data[0], k: data[1], v: data[2] };
        let outputs = AttentionOutputs { out: out.view_mut(), lse: None };
        mha(gpu.stream(), qkv, outputs, None, &mask(true, None, None)).unwrap();
        gpu.assert_guards(&out);
        gpu.download(&out)
    }
    fn check<T: AttentionElement>(gpu: &Gpu, store: fn(f32) -> T, widen: fn(T) -> f32)
    where
        bf16: AttentionOutput<T>,
        f16: AttentionOutput<T>,
        f32: AttentionOutput<T>,
    {
        let values = |n: usize, seed: u64| -> Vec<T> {
            Fill::Normal.elements::<f32>(n, seed).into_iter().map(store).collect()
        };
        let of = |seed| values(33 * 2 * 32, seed);
        let data = [of(1), of(2), of(3)];
        let tensors = [0, 1, 2].map(|i| gpu.upload(&data[i], [1, 33, 2, 32]));
        let views = [0, 1, 2].map(|i| tensors[i].view());
        let [q, k, v] = data.map(|x| x.into_iter().map(widen).map(f16::from_f32).collect::<Vec<_>>());
        let wide = Dense { sizes: [1, 33, 33, 2, 2, 32, 32], q, k, v };
        // f16 holds fp8 exactly.
        let (want, _) = wide.run(gpu, &mask(true, None, None));
        let want = kit::widen(&want);
        let f16_out = run::<T, f16>(gpu, &views);
        kit::assert_close(&f16_out, &want, Tolerance::AttentionFp8);
        // The same sums, rounded to each type.
        let f32_out = run::<T, f32>(gpu, &views);
        kit::assert_bits(&f16_out, &f32_out.iter().map(|&y| f16::from_f32(y)).collect::<Vec<_>>());
        let bf16_out = run::<T, bf16>(gpu, &views);
        kit::assert_bits(&bf16_out, &f32_out.iter().map(|&y| bf16::from_f32(y)).collect::<Vec<_>>());
    }
    for gpu in kit::devices() {
        if gpu.arch() == Arch::Gfx942 {
            check(&gpu, Fp8E4M3Fnuz::from_f32_saturating, Fp8E4M3Fnuz::to_f32);
        } else {
            check(&gpu, Fp8E4M3::from_f32_saturating, Fp8E4M3::to_f32);
        }
    }
}
