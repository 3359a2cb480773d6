//! `fused_qkv_split_qk_rope` on the emulated GPUs (and real ones where there are some) against its f64 reference, and
//! against splitting first and rotating then.

mod common;

use common::{Case, Integers, angles, cos_sin, dense, rotation};
use hk_activation::{fused_qkv_split_qk_rope, reference};
use hk_core::rope::reference::Tables;
use hk_core::rope::{
    Positions, Rope, RopeElement, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{Float, Layout, bf16, f16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Tensor, Tolerance, assert_error, kind, proptest::prelude::*,
    proptest::sample::select, widen,
};

/// A case of `rope_cached` for the queries, with key and value heads, and how many columns are around a row of `qkv`.
#[derive(Debug, Clone)]
struct Split {
    queries: Case,
    kv_heads: usize,
    around: usize,
}

/// What the operator gave.
struct Output<T> {
    q: Array<T>,
    k: Array<T>,
    v: Array<T>,
}

impl Split {
    fn heads(&self) -> usize {
        self.queries.heads + 2 * self.kv_heads
    }

    fn width(&self) -> usize {
        self.heads() * self.queries.head_dim
    }

    /// Keys, and values, as a case of their own.
    fn keys(&self) -> Case {
        Case { heads: self.kv_heads, ..self.queries.clone() }
    }

    fn elements<T: Float>(&self) -> Vec<T> {
        Fill::Normal.elements(self.queries.tokens * self.width(), self.queries.seed)
    }

    fn upload<T: Float>(&self, gpu: &Gpu, qkv: &[T]) -> Tensor<T> {
        let shape = [self.queries.tokens, self.width()];
        gpu.upload(qkv, Place::rows(shape, self.width() + self.around).shifted(self.queries.shift))
    }

    /// Runs the operator, each output with strides of its own, and checks that nothing else is touched.
    #[track_caller]
    fn run<T: Float, C: RopeElement<T> + Float>(
        &self,
        gpu: &Gpu,
        qkv: &[T],
        cos: &[C],
        sin: &[C],
    ) -> Output<T> {
        let (case, keys) = (&self.queries, self.keys());
        let inputs = case.upload(gpu, cos, sin);
        let qkv = self.upload(gpu, qkv);
        let mut q = gpu.poisoned(case.place());
        let mut k = gpu.poisoned(keys.place());
        let mut v = gpu.poisoned(Case { strided: !case.strided, ..keys }.place());
        let outputs = (q.view_mut(), k.view_mut(), v.view_mut());
        fused_qkv_split_qk_rope(
            gpu.stream(),
            qkv.view(),
            inputs.tables(),
            outputs.0,
            outputs.1,
            outputs.2,
            case.rope,
        )
        .unwrap();
        gpu.assert_guards(&q);
        gpu.assert_guards(&k);
        gpu.assert_guards(&v);
        gpu.assert_untouched(&qkv);
        inputs.assert_untouched(gpu);
        Output { q: gpu.download(&q), k: gpu.download(&k), v: gpu.download(&v) }
    }

    /// The heads from `first` on.
    fn columns<T: Float>(&self, qkv: &[T], first: usize, heads: usize) -> Vec<T> {
        let dim = self.queries.head_dim;
        qkv.chunks(self.width()).flat_map(|row| row[first * dim..][..heads * dim].to_vec()).collect()
    }
}

fn split(tokens: usize, heads: usize, kv_heads: usize, head_dim: usize, rope: Rope) -> Split {
    Split { queries: dense(tokens, heads, head_dim, rope), kv_heads, around: 0 }
}

/// Each head comes from its own columns: with tables of the identity, numbers that differ by column go where they belong.
#[test]
fn heads_come_from_their_columns() {
    let shapes = [(1, 1, 64), (2, 1, 128), (4, 4, 80), (8, 1, 64), (32, 8, 128), (6, 2, 18)];
    for (q_heads, kv_heads, head_dim) in shapes {
        // A part of the columns, so that the pitch of heads could be mistaken for it.
        for rotary in [head_dim, head_dim / 2 - head_dim / 2 % 2] {
            let s = split(5, q_heads, kv_heads, head_dim, rotation(rotary, RopeStyle::Neox));
            let width = s.width();
            // Up to 254, which bf16 holds exactly.
            let number = |t: usize, c: usize| bf16::from_f32((c % 251 + t) as f32);
            let qkv: Vec<bf16> = (0..5 * width).map(|i| number(i / width, i % width)).collect();
            let n = 5 * rotary / 2;
            let (cos, sin) = (vec![1.0f32; n], vec![0.0f32; n]);
            for gpu in kit::devices() {
                let got = s.run(&gpu, &qkv, &cos, &sin);
                let parts = [
                    (&got.q, 0, q_heads),
                    (&got.k, q_heads, kv_heads),
                    (&got.v, q_heads + kv_heads, kv_heads),
                ];
                for (out, first, heads) in parts {
                    let want: Vec<bf16> = (0..5)
                        .flat_map(|t| {
                            (first * head_dim..(first + heads) * head_dim).map(move |c| number(t, c))
                        })
                        .collect();
                    kit::assert_bits(out, &want);
                }
            }
        }
    }
}

/// Near the f64 reference, and the bits of splitting first and rotating then.
#[track_caller]
fn check<T: Float, C: RopeElement<T> + Float>(s: &Split) {
    let case = &s.queries;
    let qkv: Vec<T> = s.elements();
    let (cos, sin): (Vec<C>, Vec<C>) = case.rounded(&case.tables());
    let tables = Tables { cos: widen(&cos), sin: widen(&sin) };
    let sizes = [case.heads, s.kv_heads, case.head_dim];
    let want = reference::qkv::split_and_rotate(&widen(&qkv), sizes, &tables, &case.rows(), &case.rope);
    for gpu in kit::devices() {
        let got = s.run(&gpu, &qkv, &cos, &sin);
        kit::assert_close(&got.q, &want.q, Tolerance::Elementwise);
        kit::assert_close(&got.k, &want.k, Tolerance::Elementwise);
        kit::assert_bits(&got.v, &s.columns(&qkv, case.heads + s.kv_heads, s.kv_heads));
        kit::assert_bits(&got.q, &common::run(&gpu, case, &s.columns(&qkv, 0, case.heads), &cos, &sin));
        let keys = s.columns(&qkv, case.heads, s.kv_heads);
        kit::assert_bits(&got.k, &common::run(&gpu, &s.keys(), &keys, &cos, &sin));
    }
}

fn splits() -> impl Strategy<Value = Split> {
    let heads = select(&[(1usize, 1usize), (2, 1), (4, 4), (8, 1), (6, 2)][..]);
    (common::case(), heads, select(&[0usize, 8, 5][..])).prop_map(|(case, (heads, kv_heads), around)| {
        // Packed tokens: positions of the first batch.
        let first =
            |i: Option<Integers>| i.map(|i| Integers { values: i.values[..case.tokens].to_vec(), ..i });
        let starts = if case.layout == RopeLayout::Thd { case.starts.clone() } else { None };
        let (given, offsets) = (first(case.given.clone()), first(case.offsets.clone()));
        let queries = Case { layout: RopeLayout::Thd, batches: 1, heads, given, offsets, starts, ..case };
        Split { queries, kv_heads, around }
    })
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn matches_f64_reference(s in splits(), kind in 0usize..4) {
        match kind {
            0 => check::<bf16, bf16>(&s),
            1 => check::<bf16, f32>(&s),
            2 => check::<f16, f32>(&s),
            _ => check::<f32, f32>(&s),
        }
    }
}

/// Numbers of heads and columns that models have.
#[test]
fn shapes_of_models() {
    let heads = [(16, 1), (32, 8), (64, 8), (32, 4), (64, 4)];
    let tokens = if kit::full() { vec![0, 1, 4, 31, 32, 33, 4096] } else { vec![0, 1, 4, 33] };
    for (i, (q_heads, kv_heads)) in heads.into_iter().enumerate() {
        for (j, head_dim) in [64, 80, 128, 256].into_iter().enumerate() {
            let tokens = tokens[(i + j) % tokens.len()];
            let style = if (i + j) % 2 == 0 { RopeStyle::Neox } else { RopeStyle::Interleaved };
            let rotary = if j == 1 { 48 } else { head_dim };
            check::<bf16, f32>(&split(tokens, q_heads, kv_heads, head_dim, rotation(rotary, style)));
        }
    }
}

/// A position out of range poisons queries and keys of its token; values are copied.
#[test]
fn tokens_without_a_row_keep_their_values() {
    let mut s = split(4, 4, 2, 48, Rope { span: RopeSpan::Last, ..rotation(32, RopeStyle::Interleaved) });
    s.queries.given = Some(Integers { values: vec![3, -1, 4, 0], wide: true });
    check::<f16, f16>(&s);
    let qkv: Vec<f16> = s.elements();
    let (cos, sin): (Vec<f16>, Vec<f16>) = s.queries.rounded(&s.queries.tables());
    for gpu in kit::devices() {
        let got = s.run(&gpu, &qkv, &cos, &sin);
        for token in 0..4 {
            let poisoned = token == 1 || token == 2;
            assert!(got.q[token * 4 * 48..][..4 * 48].iter().all(|v| v.is_nan() == poisoned));
            assert!(got.k[token * 2 * 48..][..2 * 48].iter().all(|v| v.is_nan() == poisoned));
            assert!(got.v[token * 2 * 48..][..2 * 48].iter().all(|v| !v.is_nan()));
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let gpu = &kit::devices()[0];
    let (cos, sin) = cos_sin(&angles(3, &rotation(16, RopeStyle::Neox), 1e4));
    let (cos, sin) = (gpu.upload(&cos, [3, 8]), gpu.upload(&sin, [3, 8]));
    let tables = RopeTables { cos: cos.view(), sin: sin.view(), positions: Positions::Index, offsets: None };
    let attempt = |qkv: [usize; 2], q: [usize; 3], k: [usize; 3], v: [usize; 3], rope: Rope| {
        let qkv = gpu.poisoned::<f32>(qkv);
        let (mut q, mut k, mut v) = (gpu.poisoned(q), gpu.poisoned(k), gpu.poisoned(v));
        let outputs = (q.view_mut(), k.view_mut(), v.view_mut());
        let result =
            fused_qkv_split_qk_rope(gpu.stream(), qkv.view(), tables, outputs.0, outputs.1, outputs.2, rope);
        gpu.assert_untouched(&q);
        gpu.assert_untouched(&k);
        gpu.assert_untouched(&v);
        result
    };
    let rope = rotation(16, RopeStyle::Neox);
    let (q, k) = ([3, 4, 16], [3, 2, 16]);
    let is = |result, kind, parts: &[&str]| assert_error(result, kind, parts);
    is(
        attempt([3, 129], q, k, k, rope),
        kind!(Shape),
        &["fused_qkv_split_qk_rope: qkv: shape [3, 129]", "[3, 128]"],
    );
    is(
        attempt([3, 144], [3, 5, 16], k, k, rope),
        kind!(Shape),
        &["q: shape [3, 5, 16]", "a multiple of 2 heads"],
    );
    is(attempt([3, 64], q, [3, 0, 16], [3, 0, 16], rope), kind!(Argument), &["k: no heads"]);
    is(attempt([3, 128], q, [2, 2, 16], k, rope), kind!(Shape), &["k: shape [2, 2, 16]", "[3, 2, 16]"]);
    is(attempt([3, 128], q, [3, 2, 18], k, rope), kind!(Shape), &["k: shape [3, 2, 18]", "[3, 2, 16]"]);
    is(attempt([3, 128], q, k, [3, 4, 16], rope), kind!(Shape), &["v: shape [3, 4, 16]", "[3, 2, 16]"]);
    is(
        attempt([3, 136], [3, 4, 17], [3, 2, 17], [3, 2, 17], rope),
        kind!(Shape),
        &["q: shape [3, 4, 17]", "even"],
    );
    is(attempt([3, 128], q, k, k, Rope { rotary: 18, ..rope }), kind!(Shape), &["q: shape", "at least 18"]);
    is(
        attempt([3, 128], q, k, k, Rope { rotary: 14, ..rope }),
        kind!(Shape),
        &["cos: shape [3, 8]", "[3, 7]"],
    );
    is(attempt([3, 128], q, k, k, Rope { rotary: 15, ..rope }), kind!(Argument), &["rotary: 15"]);
    let full = Rope { table: RopeTableWidth::Full, ..rope };
    is(attempt([3, 128], q, k, k, full), kind!(Shape), &["cos: shape [3, 8]", "[3, 16]"]);
    attempt([0, 128], [0, 4, 16], [0, 2, 16], [0, 2, 16], rope).unwrap();

    // Columns apart, in each tensor in turn; then tensors of another device.
    for (i, arg) in ["qkv", "q", "k", "v"].into_iter().enumerate() {
        let place = |of: usize, shape: &[usize]| {
            let step = 1 + usize::from(i == of);
            let strides: Vec<usize> =
                (0..shape.len()).map(|a| step * shape[a + 1..].iter().product::<usize>()).collect();
            Place::new(Layout::with_strides(shape, &strides).unwrap())
        };
        let qkv = gpu.poisoned::<f32>(place(0, &[3, 128]));
        let outputs = [(1, [3, 4, 16]), (2, [3, 2, 16]), (3, [3, 2, 16])];
        let [mut q, mut k, mut v] = outputs.map(|(of, shape)| gpu.poisoned(place(of, &shape)));
        let (q, k, v) = (q.view_mut(), k.view_mut(), v.view_mut());
        let result = fused_qkv_split_qk_rope(gpu.stream(), qkv.view(), tables, q, k, v, rope);
        is(result, kind!(Stride), &[arg, "unit stride"]);
    }
    let on = |gpu: &Gpu, tables: RopeTables<f32>| {
        let qkv = gpu.poisoned::<f32>([3, 128]);
        let [mut q, mut k, mut v] = [[3, 4, 16], [3, 2, 16], [3, 2, 16]].map(|shape| gpu.poisoned(shape));
        let (q, k, v) = (q.view_mut(), k.view_mut(), v.view_mut());
        fused_qkv_split_qk_rope(gpu.stream(), qkv.view(), tables, q, k, v, rope)
    };
    let five = gpu.upload(&[0i32; 5], [5]);
    let given = RopeTables { positions: Positions::Given(five.view().into()), ..tables };
    is(on(gpu, given), kind!(Shape), &["positions: shape [5]", "[3] (the tokens)"]);
    is(on(&Gpu::open("emu:gfx950"), tables), kind!(DeviceMismatch), &["cos", gpu.spec(), "emu:gfx950"]);
}

/// The outputs overlap neither each other nor an input.
#[test]
fn overlaps_are_refused() {
    let gpu = &kit::devices()[0];
    let rope = rotation(16, RopeStyle::Neox);
    let tables = gpu.upload(&[1.0f32; 24], [3, 8]);
    let source =
        RopeTables { cos: tables.view(), sin: tables.view(), positions: Positions::Index, offsets: None };
    let mut all = gpu.upload(&[1.0f32; 3 * 300], [3, 300]);
    // The first columns of each, in rows of 300: qkv, q, k, v, 128 + 64 + 32 + 32 columns.
    let mut attempt = |at: [usize; 4]| {
        let (mut rest, mut outs, mut from) = (Some(all.view_mut()), Vec::new(), 0);
        let qkv = rest.as_ref().unwrap().alias().slice(1, at[0]..at[0] + 128).unwrap();
        for (at, heads) in [(at[1], 4), (at[2], 2), (at[3], 2)] {
            let (_, tail) = rest.take().unwrap().split_at(1, at - from).unwrap();
            let (out, tail) = tail.split_at(1, heads * 16).unwrap();
            outs.push(out.split_axis(1, 16).unwrap());
            (rest, from) = (Some(tail), at + heads * 16);
        }
        let [q, k, v] = <[_; 3]>::try_from(outs).unwrap();
        fused_qkv_split_qk_rope(gpu.stream(), qkv, source, q, k, v, rope)
    };
    attempt([0, 128, 192, 224]).unwrap();
    assert_error(attempt([0, 127, 192, 224]), kind!(Overlap), &["qkv and q overlap"]);
    assert_error(attempt([66, 0, 64, 200]), kind!(Overlap), &["qkv and k overlap"]);
    assert_error(attempt([100, 0, 64, 98]), kind!(Overlap), &["qkv and v overlap"]);

    let qkv = gpu.upload(&[1.0f32; 3 * 128], [3, 128]);
    for (i, arg) in ["q", "k", "v"].into_iter().enumerate() {
        let [mut q, mut k, mut v] =
            [4, 2, 2].map(|heads| gpu.upload(&vec![1.0f32; 48 * heads], [3, heads, 16]));
        let (q, k, v) = (q.view_mut(), k.view_mut(), v.view_mut());
        let out = [q.alias(), k.alias(), v.alias()][i];
        let table = out.slice(1, 0..1).unwrap().slice(2, 0..8).unwrap().flatten_rows("", "").unwrap();
        let (name, over) = match i {
            1 => ("sin", RopeTables { sin: table, ..source }),
            _ => ("cos", RopeTables { cos: table, ..source }),
        };
        let result = fused_qkv_split_qk_rope(gpu.stream(), qkv.view(), over, q, k, v, rope);
        assert_error(result, kind!(Overlap), &[&format!("{name} and {arg} overlap")]);
    }
}
