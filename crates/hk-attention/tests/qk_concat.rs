//! `qk_cat` and `qk_rope_cat` on the emulated GPUs (and real ones where there are some) against their f64 references, and
//! against each other.

use hk_attention::reference::qk_concat as reference;
use hk_attention::{QkCatInputs, QkOutputs, QkRopeCatInputs, qk_cat, qk_rope_cat};
use hk_core::plan::rope::reference::{Tables, table_rows};
use hk_core::plan::rope::{
    Positions, Rope, RopeDirection, RopeElement, RopeSpan, RopeStyle, RopeTableWidth, RopeTables,
};
use hk_core::{Element, Float, Fp8E4M3, Layout, bf16, f16};
use hk_testkit::{
    self as kit, Array, Call, Fill, Gpu, Place, Refusals, Tensor, Tolerance, kind,
    proptest::prelude::*,
    proptest::sample::select,
    rope::{angles, rounded},
    widen,
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
        qk_cat(
            gpu.stream(),
            QkCatInputs { q1: q1.view(), q2: q2.view(), k1: k1.view(), k2: k2.view() },
            QkOutputs { q_out: q.view_mut(), k_out: k.view_mut() },
        )
        .unwrap();
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
        let heads = QkRopeCatInputs {
            q_nope: q1.view(),
            q_pe: q2.view(),
            k_nope: k1.view(),
            k_pe: k2.view(),
            tables,
        };
        let outputs = QkOutputs { q_out: q.view_mut(), k_out: k.view_mut() };
        qk_rope_cat(gpu.stream(), heads, outputs, rope).unwrap();
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

/// Close to the reference; columns without position bitwise; bitwise identical to a rotation followed by a concatenation.
#[track_caller]
fn check_rope<T: Float, C: RopeElement<T> + Float>(case: &Case, style: RopeStyle, table: RopeTableWidth) {
    let direction = [RopeDirection::Forward, RopeDirection::Inverse][(case.seed % 2) as usize];
    let rope = Rope { style, table, rotary: case.cols[1], span: RopeSpan::First, direction };
    let elements = case.elements(floats::<T>);
    let (cos, sin) = rounded::<C>(&Tables::of_angles(&angles(ROWS, &rope, 1e4)));
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

#[test]
fn wrong_shapes_types_and_places_are_refused() {
    Refusals::new((), |stream, tensors, ()| {
        let inputs = QkCatInputs {
            q1: tensors.input::<f32>("q1"),
            q2: tensors.input("q2"),
            k1: tensors.input("k1"),
            k2: tensors.input("k2"),
        };
        qk_cat(stream, inputs, QkOutputs { q_out: tensors.output("q_out"), k_out: tensors.output("k_out") })
    })
    .input::<f32>("q1", [3, 4, 8])
    .input::<f32>("q2", [3, 4, 6])
    .input::<f32>("k1", [3, 2, 8])
    .input::<f32>("k2", [3, 2, 6])
    .output::<f32>("q_out", [3, 4, 14])
    .output::<f32>("k_out", [3, 2, 14])
    .accepts(|_| {})
    .accepts(|call| {
        for (name, shape) in [("q1", [0, 4, 8]), ("q2", [0, 4, 6]), ("k1", [0, 2, 8]), ("k2", [0, 2, 6])] {
            call.shape(name, shape);
        }
        call.shape("q_out", [0, 4, 14]);
        call.shape("k_out", [0, 2, 14]);
    })
    .refuses(kind!(Shape), &["qk_cat: q2: shape [3, 5, 6]", "[3, 4, 6] (tokens and heads of q1)"], |call| {
        call.shape("q2", [3, 5, 6])
    })
    .refuses(kind!(Shape), &["q2: shape [2, 4, 6]"], |call| call.shape("q2", [2, 4, 6]))
    .refuses(kind!(Shape), &["k2: shape [3, 2, 6]", "(tokens and heads of k1)"], |call| {
        call.shape("k1", [3, 1, 8])
    })
    .refuses(kind!(Shape), &["q_out: shape [3, 4, 15]", "[3, 4, 14]"], |call| call.shape("q_out", [3, 4, 15]))
    .refuses(kind!(Shape), &["k_out: shape [3, 2, 13]", "[3, 2, 14]"], |call| call.shape("k_out", [3, 2, 13]))
    .refuses(kind!(Shape), &["q1: shape [3, 4, 8]", "a multiple of 3 heads"], |call| keys(call, [3, 3, 8]))
    .refuses(kind!(Shape), &["q1: shape [3, 4, 8]", "a multiple of 0 heads"], |call| keys(call, [3, 0, 8]))
    .refuses(kind!(Shape), &["k1: shape [2, 2, 8]", "[3, 2, 8]"], |call| keys(call, [2, 2, 8]))
    .refuses(kind!(Shape), &["k1: shape [3, 2, 7]", "[3, 2, 8]"], |call| keys(call, [3, 2, 7]))
    .refuses(kind!(Empty), &["q1: axis 2"], |call| {
        call.shape("q1", [3, 4, 0]);
        call.shape("q_out", [3, 4, 6]);
        keys(call, [3, 2, 0]);
    })
    .refuses(kind!(Stride), &["q2", "unit stride"], |call| call.strides("q2", [1, 3, 12]))
    .refuses(kind!(Overlap), &["k2 and q_out overlap", "disjoint"], |call| call.overlap("k2", "q_out", 7))
    .accepts(|call| call.overlap("k2", "q_out", 36))
    .refuses_other_devices()
    .refuses_overlaps();

    Refusals::new((), |stream, tensors, ()| {
        let x = tensors.input::<i64>("x");
        let inputs = QkCatInputs { q1: x, q2: x, k1: x, k2: x };
        qk_cat(stream, inputs, QkOutputs { q_out: tensors.output("q_out"), k_out: tensors.output("k_out") })
    })
    .input::<i64>("x", [1, 1, 2])
    .output::<i64>("q_out", [1, 1, 4])
    .output::<i64>("k_out", [1, 1, 4])
    .refuses(kind!(DType), &["qk_cat: q1: dtype i64", "1, 2 or 4 bytes"], |_| {});
}

/// Other sizes of the keys: tokens, heads, and columns of `k1`.
fn keys(call: &mut Call<()>, [tokens, heads, cols]: [usize; 3]) {
    call.shape("k1", [tokens, heads, cols]);
    call.shape("k2", [tokens, heads, 6]);
    call.shape("k_out", [tokens, heads, cols + 6]);
}

/// The columns of both outputs interleave in one buffer.
#[test]
fn outputs_may_be_columns_of_one_tensor() {
    let gpu = &kit::devices()[0];
    let part = gpu.upload(&[1u8; 16], [2, 2, 4]);
    let mut buffer = gpu.upload(&[0u8; 96], [2, 2, 24]);
    let (q_out, k_out) = buffer.view_mut().split_at(2, 12).unwrap();
    let (q_out, k_out) = (q_out.slice(2, 0..8).unwrap(), k_out.slice(2, 4..12).unwrap());
    let inputs = QkCatInputs { q1: part.view(), q2: part.view(), k1: part.view(), k2: part.view() };
    qk_cat(gpu.stream(), inputs, QkOutputs { q_out, k_out }).unwrap();
    let written: Vec<u8> = (0..24).map(|col| u8::from(!(8..16).contains(&col))).collect();
    assert_eq!(gpu.download(&buffer).data, written.repeat(4));
}

#[test]
fn wrong_rotations_are_refused() {
    let rope = Rope {
        style: RopeStyle::Neox,
        table: RopeTableWidth::Half,
        rotary: 6,
        span: RopeSpan::First,
        direction: RopeDirection::Forward,
    };
    Refusals::new(rope, |stream, tensors, rope| {
        let tables = RopeTables {
            cos: tensors.input::<f32>("cos"),
            sin: tensors.input("sin"),
            positions: tensors
                .optional_input::<i32>("positions")
                .map_or(Positions::Index, |p| Positions::Given(p.into())),
            offsets: None,
        };
        let inputs = QkRopeCatInputs {
            q_nope: tensors.input::<f32>("q_nope"),
            q_pe: tensors.input("q_pe"),
            k_nope: tensors.input("k_nope"),
            k_pe: tensors.input("k_pe"),
            tables,
        };
        let outputs = QkOutputs { q_out: tensors.output("q_out"), k_out: tensors.output("k_out") };
        qk_rope_cat(stream, inputs, outputs, rope)
    })
    .input::<f32>("q_nope", [3, 2, 4])
    .input::<f32>("q_pe", [3, 2, 6])
    .input::<f32>("k_nope", [3, 2, 4])
    .input::<f32>("k_pe", [3, 2, 6])
    .input::<f32>("cos", [3, 3])
    .input::<f32>("sin", [3, 3])
    .input::<i32>("positions", [3])
    .output::<f32>("q_out", [3, 2, 10])
    .output::<f32>("k_out", [3, 2, 10])
    .accepts(|_| {})
    .accepts(|call| call.without("positions"))
    .refuses(kind!(Shape), &["qk_rope_cat: q_pe: shape [3, 2, 5]", "4 columns (rotary)"], |call| {
        for pe in ["q_pe", "k_pe"] {
            call.shape(pe, [3, 2, 5]);
        }
        for out in ["q_out", "k_out"] {
            call.shape(out, [3, 2, 9]);
        }
        call.options.rotary = 4;
    })
    .refuses(kind!(Shape), &["q_pe: shape [3, 2, 6]", "4 columns (rotary)"], |call| call.options.rotary = 4)
    .refuses(kind!(Argument), &["rotary: 5"], |call| call.options.rotary = 5)
    .refuses(kind!(Shape), &["cos: shape [3, 3]", "[3, 6]"], |call| call.options.table = RopeTableWidth::Full)
    .refuses(kind!(Shape), &["positions: shape [5]", "[3]"], |call| call.shape("positions", [5]))
    .refuses_other_devices()
    .refuses_overlaps();
}
