//! `fused_qkv_split_qk_rope` on the emulated GPUs (and real ones where there are some) against its f64 reference, and
//! against a split followed by a rotation.

use crate::common;
use hk_activation::{QkvOutputs, fused_qkv_split_qk_rope, reference};
use hk_core::plan::rope::reference::Tables;
use hk_core::plan::rope::{
    Positions, Rope, RopeElement, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{Float, bf16, f16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Refusals, Tensor, Tolerance, assert_error, kind,
    proptest::prelude::*,
    proptest::sample::select,
    rope::{Integers, RopeCase, rope_case, rotation, rounded},
    widen,
};

/// A case of `rope_cached` for the queries, with key and value heads, and how many columns are around a row of `qkv`.
#[derive(Debug, Clone)]
struct Split {
    queries: RopeCase,
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
    fn keys(&self) -> RopeCase {
        RopeCase { heads: self.kv_heads, ..self.queries.clone() }
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
        let mut v = gpu.poisoned(RopeCase { strided: !case.strided, ..keys }.place());
        let outputs = QkvOutputs { q: q.view_mut(), k: k.view_mut(), v: v.view_mut() };
        fused_qkv_split_qk_rope(gpu.stream(), qkv.view(), inputs.tables(), outputs, case.rope).unwrap();
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
    Split { queries: RopeCase::dense(tokens, heads, head_dim, rope), kv_heads, around: 0 }
}

/// Each head comes from its own columns: with identity tables, columns of distinct numbers are where they belong.
#[test]
fn heads_come_from_their_columns() {
    let shapes = [(1, 1, 64), (2, 1, 128), (4, 4, 80), (8, 1, 64), (32, 8, 128), (6, 2, 18)];
    for (q_heads, kv_heads, head_dim) in shapes {
        // Fewer columns than a head has: the two could be mistaken for each other.
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

/// Close to the f64 reference, and bitwise identical to a split followed by a rotation.
#[track_caller]
fn check<T: Float, C: RopeElement<T> + Float>(s: &Split) {
    let case = &s.queries;
    let qkv: Vec<T> = s.elements();
    let (cos, sin): (Vec<C>, Vec<C>) = rounded(&case.tables());
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
    (rope_case(), heads, select(&[0usize, 8, 5][..])).prop_map(|(case, (heads, kv_heads), around)| {
        // Packed tokens: positions of the first batch.
        let first =
            |i: Option<Integers>| i.map(|i| Integers { values: i.values[..case.tokens].to_vec(), ..i });
        let starts = if case.layout == RopeLayout::Thd { case.starts.clone() } else { None };
        let (given, offsets) = (first(case.given.clone()), first(case.offsets.clone()));
        let queries = RopeCase { layout: RopeLayout::Thd, batches: 1, heads, given, offsets, starts, ..case };
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
    let (cos, sin): (Vec<f16>, Vec<f16>) = rounded(&s.queries.tables());
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
    let rope = rotation(16, RopeStyle::Neox);
    Refusals::new(rope, |stream, tensors, rope| {
        let tables = RopeTables {
            cos: tensors.input::<f32>("cos"),
            sin: tensors.input("sin"),
            positions: Positions::Given(tensors.input::<i32>("positions").into()),
            offsets: None,
        };
        let qkv = tensors.input::<f32>("qkv");
        let outputs = QkvOutputs { q: tensors.output("q"), k: tensors.output("k"), v: tensors.output("v") };
        fused_qkv_split_qk_rope(stream, qkv, tables, outputs, rope)
    })
    .input::<f32>("qkv", [3, 128])
    .input::<f32>("cos", [3, 8])
    .input::<f32>("sin", [3, 8])
    .input::<i32>("positions", [3])
    .output::<f32>("q", [3, 4, 16])
    .output::<f32>("k", [3, 2, 16])
    .output::<f32>("v", [3, 2, 16])
    .accepts(|_| {})
    .accepts(|call| {
        call.shape("qkv", [0, 128]);
        call.shape("positions", [0]);
        call.shape("q", [0, 4, 16]);
        call.shape("k", [0, 2, 16]);
        call.shape("v", [0, 2, 16]);
    })
    .refuses(kind!(Shape), &["fused_qkv_split_qk_rope: qkv: shape [3, 129]", "[3, 128]"], |call| {
        call.shape("qkv", [3, 129])
    })
    .refuses(kind!(Shape), &["q: shape [3, 5, 16]", "a multiple of 2 heads"], |call| {
        call.shape("qkv", [3, 144]);
        call.shape("q", [3, 5, 16]);
    })
    .refuses(kind!(Argument), &["k: no heads"], |call| {
        call.shape("qkv", [3, 64]);
        call.shape("k", [3, 0, 16]);
        call.shape("v", [3, 0, 16]);
    })
    .refuses(kind!(Shape), &["k: shape [2, 2, 16]", "[3, 2, 16]"], |call| call.shape("k", [2, 2, 16]))
    .refuses(kind!(Shape), &["k: shape [3, 2, 18]", "[3, 2, 16]"], |call| call.shape("k", [3, 2, 18]))
    .refuses(kind!(Shape), &["v: shape [3, 4, 16]", "[3, 2, 16]"], |call| call.shape("v", [3, 4, 16]))
    .refuses(kind!(Shape), &["q: shape [3, 4, 17]", "even"], |call| {
        call.shape("qkv", [3, 136]);
        call.shape("q", [3, 4, 17]);
        call.shape("k", [3, 2, 17]);
        call.shape("v", [3, 2, 17]);
    })
    .refuses(kind!(Shape), &["q: shape", "at least 18"], |call| call.options.rotary = 18)
    .refuses(kind!(Shape), &["cos: shape [3, 8]", "[3, 7]"], |call| call.options.rotary = 14)
    .refuses(kind!(Argument), &["rotary: 15"], |call| call.options.rotary = 15)
    .refuses(kind!(Shape), &["cos: shape [3, 8]", "[3, 16]"], |call| {
        call.options.table = RopeTableWidth::Full
    })
    .refuses(kind!(Shape), &["positions: shape [5]", "[3] (the tokens)"], |call| call.shape("positions", [5]))
    .refuses(kind!(Stride), &["qkv", "unit stride"], |call| call.strides("qkv", [256, 2]))
    .refuses(kind!(Stride), &["q", "unit stride"], |call| call.strides("q", [128, 32, 2]))
    .refuses(kind!(Stride), &["k", "unit stride"], |call| call.strides("k", [64, 32, 2]))
    .refuses(kind!(Stride), &["v", "unit stride"], |call| call.strides("v", [64, 32, 2]))
    .refuses(kind!(DeviceMismatch), &["cos", "emu:gfx942", "emu:gfx950"], |call| call.elsewhere("cos"))
    .refuses_other_devices()
    .refuses_overlaps();
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
        fused_qkv_split_qk_rope(gpu.stream(), qkv, source, QkvOutputs { q, k, v }, rope)
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
        let result = fused_qkv_split_qk_rope(gpu.stream(), qkv.view(), over, QkvOutputs { q, k, v }, rope);
        assert_error(result, kind!(Overlap), &[&format!("{name} and {arg} overlap")]);
    }
}
