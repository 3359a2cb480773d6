//! `qk_cat` and `qk_rope_cat` on the emulated GPUs (and real ones where there are some) against their f64 references, and
//! against each other.

use hk_attention::{qk_cat, qk_rope_cat, reference::qk_concat as reference};
use hk_core::rope::reference::{Tables, table_rows};
use hk_core::rope::{Positions, Rope, RopeElement, RopeSpan, RopeStyle, RopeTableWidth, RopeTables};
use hk_core::{Element, Float, Fp8E4M3, Layout, bf16, f16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Tensor, Tolerance, assert_error, kind, proptest::prelude::*,
    proptest::sample::select, widen,
};

/// Sizes of a call, and how its tensors lie in memory.
#[derive(Debug, Clone, Copy)]
struct Case {
    tokens: usize,
    q_heads: usize,
    kv_heads: usize,
    cols: [usize; 2],
    /// Heads outermost, gaps between them, elements from an aligned address.
    strided: bool,
    pad: usize,
    shift: usize,
    /// Keys are one head for all.
    broadcast: bool,
    seed: u64,
}

impl Case {
    fn new(tokens: usize, q_heads: usize, kv_heads: usize, cols: [usize; 2]) -> Self {
        Self { tokens, q_heads, kv_heads, cols, strided: false, pad: 0, shift: 0, broadcast: false, seed: 1 }
    }

    fn place(&self, heads: usize, cols: usize) -> Place {
        let pitch = cols + self.pad;
        let strides = if self.strided {
            [pitch, pitch * self.tokens.max(1), 1]
        } else {
            [pitch * heads.max(1), pitch, 1]
        };
        Place::new(Layout::with_strides([self.tokens, heads, cols], strides).unwrap()).shifted(self.shift)
    }

    /// Elements of q1, q2, k1, k2, each head of its own unless keys are broadcast.
    fn elements<T: Element>(&self, draw: impl Fn(usize, u64) -> Vec<T>) -> [Vec<T>; 4] {
        let heads = |n: usize, i: usize| draw(self.tokens * n * self.cols[i], self.seed ^ (2 * n + i) as u64);
        let keys = |i: usize| {
            if !self.broadcast {
                return heads(self.kv_heads, i);
            }
            let one = draw(self.tokens * self.cols[i], self.seed ^ i as u64);
            one.chunks(self.cols[i]).flat_map(|head| head.repeat(self.kv_heads)).collect()
        };
        [heads(self.q_heads, 0), heads(self.q_heads, 1), keys(0), keys(1)]
    }

    /// The keys as they lie in memory: with one head if they are broadcast.
    fn upload<T: Element>(&self, gpu: &Gpu, [q1, q2, k1, k2]: &[Vec<T>; 4]) -> [Tensor<T>; 4] {
        let keys = |k: &[T], i: usize| {
            if !self.broadcast {
                return gpu.upload(k, self.place(self.kv_heads, self.cols[i]));
            }
            let pitch = self.cols[i] + self.pad;
            let layout =
                Layout::with_strides([self.tokens, self.kv_heads, self.cols[i]], [pitch, 0, 1]).unwrap();
            gpu.upload(k, Place::new(layout).shifted(self.shift))
        };
        let queries = |q: &[T], i: usize| gpu.upload(q, self.place(self.q_heads, self.cols[i]));
        [queries(q1, 0), queries(q2, 1), keys(k1, 0), keys(k2, 1)]
    }

    fn outputs<T: Element>(&self, gpu: &Gpu) -> [Tensor<T>; 2] {
        [self.q_heads, self.kv_heads]
            .map(|heads| gpu.poisoned(self.place(heads, self.cols[0] + self.cols[1])))
    }

    #[track_caller]
    fn cat<T: Element>(&self, gpu: &Gpu, elements: &[Vec<T>; 4]) -> [Array<T>; 2] {
        let inputs = self.upload(gpu, elements);
        let [q1, q2, k1, k2] = &inputs;
        let [mut q, mut k] = self.outputs(gpu);
        qk_cat(gpu.stream(), q1.view(), q2.view(), k1.view(), k2.view(), q.view_mut(), k.view_mut()).unwrap();
        inputs.iter().for_each(|t| gpu.assert_untouched(t));
        gpu.assert_guards(&q);
        gpu.assert_guards(&k);
        [gpu.download(&q), gpu.download(&k)]
    }

    #[track_caller]
    fn rope_cat<T: Float, C: RopeElement<T>>(
        &self,
        gpu: &Gpu,
        elements: &[Vec<T>; 4],
        (cos, sin): (&[C], &[C]),
        positions: &[i64],
        rope: Rope,
    ) -> [Array<T>; 2] {
        let inputs = self.upload(gpu, elements);
        let [q1, q2, k1, k2] = &inputs;
        let [mut q, mut k] = self.outputs(gpu);
        let width = rope.table_width();
        let (cos, sin) = (gpu.upload(cos, [ROWS, width]), gpu.upload(sin, [ROWS, width]));
        let positions = gpu.upload(positions, [self.tokens]);
        let positions = Positions::Given(positions.view().into());
        let tables = RopeTables { cos: cos.view(), sin: sin.view(), positions, offsets: None };
        let (q_out, k_out) = (q.view_mut(), k.view_mut());
        qk_rope_cat(gpu.stream(), q1.view(), q2.view(), k1.view(), k2.view(), tables, q_out, k_out, rope)
            .unwrap();
        inputs.iter().for_each(|t| gpu.assert_untouched(t));
        gpu.assert_guards(&q);
        gpu.assert_guards(&k);
        [gpu.download(&q), gpu.download(&k)]
    }
}

/// Rows of the tables.
const ROWS: usize = 12;

fn floats<T: Float>(n: usize, seed: u64) -> Vec<T> {
    Fill::Normal.elements(n, seed)
}

/// Any bit patterns.
fn bits<T: Element>(n: usize, seed: u64) -> Vec<T> {
    let byte = |i: usize| ((seed ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8;
    let bytes: Vec<u8> = (0..n * size_of::<T>()).map(byte).collect();
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn concatenated<T: Element>(first: &[T], second: &[T], cols: [usize; 2]) -> Vec<T> {
    first.chunks(cols[0]).zip(second.chunks(cols[1])).flat_map(|(a, b)| [a, b].concat()).collect()
}

#[track_caller]
fn check_cat<T: Element>(case: &Case, draw: impl Fn(usize, u64) -> Vec<T>) {
    let elements = case.elements(draw);
    for gpu in kit::devices() {
        let [q, k] = case.cat(&gpu, &elements);
        kit::assert_bits(&q, &concatenated(&elements[0], &elements[1], case.cols));
        kit::assert_bits(&k, &concatenated(&elements[2], &elements[3], case.cols));
    }
}

/// Near the reference, the columns without position to the bit, and the same bits as rotating first.
#[track_caller]
fn check_rope<T: Float, C: RopeElement<T> + Float>(case: &Case, style: RopeStyle, table: RopeTableWidth) {
    let inverse = case.seed % 2 == 1;
    let rope = Rope { style, table, rotary: case.cols[1], span: RopeSpan::First, inverse };
    let elements = case.elements(floats::<T>);
    let angles: Vec<f64> = (0..ROWS * rope.table_width()).map(|i| i as f64 * 0.37).collect();
    let tables = Tables::of_angles(&angles);
    let round = |values: &[f64]| values.iter().map(|&v| C::from_f64(v)).collect::<Vec<C>>();
    let (cos, sin) = (round(&tables.cos), round(&tables.sin));
    let tables = Tables { cos: widen(&cos), sin: widen(&sin) };
    // From the one before the first row to the one after the last.
    let positions: Vec<i64> = (0..case.tokens as i64).map(|t| (t * 5 + 3) % 14 - 1).collect();
    let rows = table_rows(&positions, None, ROWS);
    let [q1, q2, k1, k2] = &elements;
    let want = |nope: &[T], pe: &[T], heads| {
        let sizes = [heads, case.cols[0]];
        reference::rope_cat(&widen(nope), &widen(pe), sizes, &tables, &rows, &rope)
    };
    let identity = vec![0i64; case.tokens];
    for gpu in kit::devices() {
        let [q, k] = case.rope_cat(&gpu, &elements, (&cos, &sin), &positions, rope);
        kit::assert_close(&q, &want(q1, q2, case.q_heads), Tolerance::Elementwise);
        kit::assert_close(&k, &want(k1, k2, case.kv_heads), Tolerance::Elementwise);
        let nope = |out: &Array<T>, from: &[T], heads: usize| {
            for (i, (out, from)) in
                out.chunks(case.cols[0] + case.cols[1]).zip(from.chunks(case.cols[0])).enumerate()
            {
                if rows[i / heads].is_some() {
                    assert_eq!(
                        bytemuck::cast_slice::<T, u8>(&out[..case.cols[0]]),
                        bytemuck::cast_slice::<T, u8>(from)
                    );
                }
            }
        };
        nope(&q, q1, case.q_heads);
        nope(&k, k1, case.kv_heads);
        // Without rotation it is a concatenation.
        let n = ROWS * rope.table_width();
        let still = (&*vec![C::from_f64(1.0); n], &*vec![C::from_f64(0.0); n]);
        let [q, k] = case.rope_cat(&gpu, &elements, still, &identity, rope);
        let [q_cat, k_cat] = case.cat(&gpu, &elements);
        kit::assert_bits(&q, &q_cat);
        kit::assert_bits(&k, &k_cat);
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let heads = (select(&[1usize, 3, 4][..]), 1usize..=4);
    let cols = select(&[[128usize, 64], [64, 64], [64, 128], [48, 16], [127, 2], [24, 6], [5, 10]][..]);
    let place = (any::<bool>(), select(&[0usize, 16, 3][..]), select(&[0usize, 0, 1][..]), any::<bool>());
    (0usize..=9, heads, cols, place, 0u64..1 << 40).prop_map(
        |(tokens, (kv_heads, ratio), cols, (strided, pad, shift, broadcast), seed)| {
            let q_heads = kv_heads * ratio;
            Case { tokens, q_heads, kv_heads, cols, strided, pad, shift, broadcast, seed }
        },
    )
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn concatenates_bits(case in cases(), kind in 0usize..4) {
        match kind {
            0 => check_cat(&case, bits::<u8>),
            1 => check_cat(&case, bits::<Fp8E4M3>),
            2 => check_cat(&case, bits::<bf16>),
            _ => check_cat(&case, bits::<i32>),
        }
    }

    #[test]
    fn rotates_what_has_a_position(case in cases(), interleaved: bool, full: bool, kind in 0usize..4) {
        let style = if interleaved { RopeStyle::Interleaved } else { RopeStyle::Neox };
        let table = if full { RopeTableWidth::Full } else { RopeTableWidth::Half };
        match kind {
            0 => check_rope::<bf16, bf16>(&case, style, table),
            1 => check_rope::<bf16, f32>(&case, style, table),
            2 => check_rope::<f16, f16>(&case, style, table),
            _ => check_rope::<f32, f32>(&case, style, table),
        }
    }
}

/// Heads and columns that models have.
#[test]
fn shapes_of_models() {
    let most = if kit::full() { 4096 } else { 16 };
    let cols = [[512, 64], [512, 128], [128, 64], [64, 64], [64, 128], [128, 128], [127, 2]];
    for (i, cols) in cols.into_iter().enumerate() {
        for (j, kv_heads) in [1, 4, 8].into_iter().enumerate() {
            let ratio = [1, 2, 4, 8, 16][(i + j) % 5];
            let tokens = [0, 1, 4, 8, most][(2 * i + j) % 5].min((1 << 21) / (kv_heads * ratio * cols[0]));
            let case = Case::new(tokens, kv_heads * ratio, kv_heads, cols);
            check_cat(&case, floats::<bf16>);
            let style = if j == 0 { RopeStyle::Interleaved } else { RopeStyle::Neox };
            check_rope::<f16, f32>(&case, style, RopeTableWidth::Half);
        }
    }
}

/// A call on zeros of these shapes, whose outputs stay as they were if it is refused.
#[track_caller]
fn attempt(shapes: [[usize; 3]; 6]) -> hk_core::Result<()> {
    let gpu = &kit::devices()[0];
    let [q1, q2, k1, k2, q, k] = shapes.map(|shape| gpu.poisoned::<f32>(shape));
    let (mut q, mut k) = (q, k);
    let result = qk_cat(gpu.stream(), q1.view(), q2.view(), k1.view(), k2.view(), q.view_mut(), k.view_mut());
    if result.is_err() {
        gpu.assert_untouched(&q);
        gpu.assert_untouched(&k);
    }
    result
}

#[test]
fn wrong_shapes_are_refused() {
    let good = [[3, 4, 8], [3, 4, 6], [3, 2, 8], [3, 2, 6], [3, 4, 14], [3, 2, 14]];
    attempt(good).unwrap();
    let wrong = |index: usize, shape: [usize; 3], parts: &[&str]| {
        let mut shapes = good;
        shapes[index] = shape;
        assert_error(attempt(shapes), kind!(Shape), parts);
    };
    wrong(1, [3, 5, 6], &["qk_cat: q2: shape [3, 5, 6]", "[3, 4, 6] (tokens and heads of q1)"]);
    wrong(1, [2, 4, 6], &["q2: shape [2, 4, 6]"]);
    wrong(2, [3, 1, 8], &["k2: shape [3, 2, 6]", "(tokens and heads of k1)"]);
    wrong(4, [3, 4, 15], &["q_out: shape [3, 4, 15]", "[3, 4, 14]"]);
    wrong(5, [3, 2, 13], &["k_out: shape [3, 2, 13]", "[3, 2, 14]"]);
    let of = |kv: usize, tokens: usize, cols: usize| {
        [[3, 4, 8], [3, 4, 6], [tokens, kv, cols], [tokens, kv, 6], [3, 4, 14], [tokens, kv, cols + 6]]
    };
    assert_error(attempt(of(3, 3, 8)), kind!(Shape), &["q1: shape [3, 4, 8]", "a multiple of 3 heads"]);
    assert_error(attempt(of(0, 3, 8)), kind!(Shape), &["q1: shape [3, 4, 8]", "a multiple of 0 heads"]);
    assert_error(attempt(of(2, 2, 8)), kind!(Shape), &["k1: shape [2, 2, 8]", "[3, 2, 8]"]);
    assert_error(attempt(of(2, 3, 7)), kind!(Shape), &["k1: shape [3, 2, 7]", "[3, 2, 8]"]);
    let empty = [[3, 4, 0], [3, 4, 6], [3, 2, 0], [3, 2, 6], [3, 4, 6], [3, 2, 6]];
    assert_error(attempt(empty), kind!(Empty), &["q1: axis 2"]);
    let none = [[0, 4, 8], [0, 4, 6], [0, 2, 8], [0, 2, 6], [0, 4, 14], [0, 2, 14]];
    attempt(none).unwrap();
}

#[test]
fn wrong_types_strides_and_places_are_refused() {
    let gpu = &kit::devices()[0];
    let stream = gpu.stream();
    let wide = gpu.poisoned::<i64>([1, 1, 2]);
    let (mut q, mut k) = (gpu.poisoned::<i64>([1, 1, 4]), gpu.poisoned::<i64>([1, 1, 4]));
    let result =
        qk_cat(stream, wide.view(), wide.view(), wide.view(), wide.view(), q.view_mut(), k.view_mut());
    assert_error(result, kind!(DType), &["qk_cat: q1: dtype i64", "1, 2 or 4 bytes"]);

    let part = gpu.poisoned::<u8>([2, 2, 4]);
    let columns = gpu.poisoned::<u8>(Place::new(Layout::with_strides([2, 2, 4], [1, 2, 4]).unwrap()));
    let (mut q, mut k) = (gpu.poisoned::<u8>([2, 2, 8]), gpu.poisoned::<u8>([2, 2, 8]));
    let result =
        qk_cat(stream, part.view(), columns.view(), part.view(), part.view(), q.view_mut(), k.view_mut());
    assert_error(result, kind!(Stride), &["q2", "unit stride"]);

    // One buffer for an input and an output, and for both outputs.
    let mut buffer = gpu.upload(&[0u8; 96], [2, 2, 24]);
    let view = buffer.view_mut();
    let (k2, q_out) = (view.alias().slice(2, 7..11).unwrap(), view.slice(2, 0..8).unwrap());
    let result = qk_cat(stream, part.view(), part.view(), part.view(), k2, q_out, k.view_mut());
    assert_error(result, kind!(Overlap), &["k2 and q_out overlap", "disjoint"]);
    let (q_out, k_out) = buffer.view_mut().split_at(2, 12).unwrap();
    let (q_out, k_out) = (q_out.slice(2, 0..8).unwrap(), k_out.slice(2, 4..12).unwrap());
    qk_cat(stream, part.view(), part.view(), part.view(), part.view(), q_out, k_out).unwrap();
    gpu.assert_untouched(&q);
    gpu.assert_untouched(&k);
}

#[test]
fn wrong_rotations_are_refused() {
    let gpu = &kit::devices()[0];
    let nope = gpu.upload(&[1.0f32; 24], [3, 2, 4]);
    let (pe, odd) = (gpu.upload(&[1.0f32; 36], [3, 2, 6]), gpu.upload(&[1.0f32; 30], [3, 2, 5]));
    let table = gpu.upload(&[1.0f32; 9], [3, 3]);
    let five = gpu.upload(&[0i32; 5], [5]);
    let style = RopeStyle::Neox;
    let good = Rope { style, table: RopeTableWidth::Half, rotary: 6, span: RopeSpan::First, inverse: false };
    let attempt = |pe: &Tensor<f32>, rope: Rope, positions| {
        let cols = 4 + pe.layout().shape()[2];
        let (mut q, mut k) = (gpu.poisoned::<f32>([3, 2, cols]), gpu.poisoned::<f32>([3, 2, cols]));
        let tables = RopeTables { cos: table.view(), sin: table.view(), positions, offsets: None };
        let (n, pe) = (nope.view(), pe.view());
        let result = qk_rope_cat(gpu.stream(), n, pe, n, pe, tables, q.view_mut(), k.view_mut(), rope);
        if result.is_err() {
            gpu.assert_untouched(&q);
            gpu.assert_untouched(&k);
        }
        result
    };
    let index = Positions::Index;
    attempt(&pe, good, index).unwrap();
    let rotary = |rotary| Rope { rotary, ..good };
    assert_error(
        attempt(&odd, rotary(4), index),
        kind!(Shape),
        &["qk_rope_cat: q_pe: shape [3, 2, 5]", "4 columns (rotary)"],
    );
    assert_error(
        attempt(&pe, rotary(4), index),
        kind!(Shape),
        &["q_pe: shape [3, 2, 6]", "4 columns (rotary)"],
    );
    assert_error(attempt(&pe, rotary(5), index), kind!(Argument), &["rotary: 5"]);
    let full = Rope { table: RopeTableWidth::Full, ..good };
    assert_error(attempt(&pe, full, index), kind!(Shape), &["cos: shape [3, 3]", "[3, 6]"]);
    let given = Positions::Given(five.view().into());
    assert_error(attempt(&pe, good, given), kind!(Shape), &["positions: shape [5]", "[3]"]);
}
