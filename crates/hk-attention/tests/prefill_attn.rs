//! `prefill_attn` on the emulated GPUs (and real ones where there are some) against its f64 reference, and against `mha`.

use crate::common::attention::{Builder, COLUMNS, HEADS};
use hk_attention::{AttentionOptions, AttentionOutputs, Mask, Qkv, SequenceSpans, mha, prefill_attn};
use hk_core::registry::Scalar;
use hk_core::{DType, TensorView, bf16, f16};
use hk_testkit::{self as kit, Fill, Place, Refusals, Tensor, kind};
use std::ops::Range;

fn call(dtype: DType, rows: usize, [heads, kv_heads, dqk, dv]: [usize; 4]) -> Builder {
    Builder::new("prefill_attn")
        .tensor("q", dtype, [rows, heads, dqk])
        .tensor("k", dtype, [rows, kv_heads, dqk])
        .tensor("v", dtype, [rows, kv_heads, dv])
        .want("lse")
}

/// Sequences in any order, with gaps, empty ones among them; without sequences or rows; far too large a `max_len`.
#[test]
fn sequences_lie_anywhere() {
    const TYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
    let cases: [(usize, &[i32], &[i32], u64); 8] = [
        (240, &[205, 0, 40, 100, 171], &[35, 33, 0, 65, 1], 65),
        (200, &[3], &[129], 129),
        (200, &[60, 0], &[140, 60], u32::MAX as u64),
        (17, &[0, 0, 17], &[17, 0, 0], 17),
        (3, &[2, 1, 0], &[1, 1, 1], 1),
        (9, &[], &[], 5),
        (0, &[0, 0], &[0, 0], 5),
        (9, &[0], &[9], 0),
    ];
    for (n, (rows, start, len, max_len)) in cases.into_iter().enumerate() {
        for causal in [true, false] {
            let ([heads, kv_heads], [dqk, dv]) = (HEADS[n % 4], COLUMNS[(3 * n + usize::from(causal)) % 9]);
            let call = call(TYPES[n % 3], rows, [heads, kv_heads, dqk, dv]);
            let scalars = [("max_len", Scalar::Count(max_len)), ("causal", Scalar::Bool(causal))];
            let call = call.integers("start", start).integers("len", len).scalars(&scalars);
            call.check(
                &format!("{rows} rows, starts {start:?}, lengths {len:?}, causal: {causal}"),
                n as u64,
            );
        }
    }
}

/// NaN in the rows of sequences that are not all there, or longer than `max_len`.
#[test]
fn places_are_not_trusted() {
    for (n, (start, len)) in [
        ([0, 30], [20, 31]),
        ([0, 60], [20, 1]),
        ([-4, 30], [20, 10]),
        ([0, 30], [21, 3]),
        ([0, 30], [20, -1]),
        ([i32::MAX, 30], [i32::MAX, 10]),
        ([i32::MIN, i32::MAX], [i32::MAX, i32::MIN]),
        ([i32::MIN, 59], [i32::MIN, i32::MAX]),
    ]
    .into_iter()
    .enumerate()
    {
        let call = call(DType::Bf16, 60, [4, 2, 32, 32]).integers("start", &start).integers("len", &len);
        let call = call.scalar("max_len", Scalar::Count(20));
        call.check(&format!("starts {start:?}, lengths {len:?}"), n as u64);
    }
}

/// These rows, as a batch of one sequence.
fn part_of<'a>(x: &'a Tensor<f16>, rows: &Range<usize>) -> TensorView<'a, f16> {
    x.view().slice(0, rows.clone()).unwrap().split_axis(0, rows.len()).unwrap()
}

/// The bits of `mha` on each sequence; rows outside are neither read nor written.
#[test]
fn equals_mha() {
    const SHAPES: [[usize; 3]; 2] = [[90, 4, 40], [90, 2, 40]];
    for gpu in kit::devices() {
        let draw = |i: usize, seed| Fill::Normal.elements::<f16>(SHAPES[i].iter().product(), seed);
        let (mut q, mut k, mut v) = (draw(0, 1), draw(1, 2), draw(1, 3));
        // Of the gap between the sequences.
        for (x, heads) in [(&mut q, 4), (&mut k, 2), (&mut v, 2)] {
            x[30 * heads * 40..50 * heads * 40].fill(f16::NAN);
        }
        let place = |i: usize| Place::rows(SHAPES[i], 43).shifted(1);
        let (q, k, v) = (gpu.upload(&q, place(0)), gpu.upload(&k, place(1)), gpu.upload(&v, place(1)));
        let (start, len) = (gpu.upload(&[50, 0], [2]), gpu.upload(&[40, 30], [2]));
        let mut out = gpu.poisoned::<f16>(place(0));
        let spans = SequenceSpans { start: start.view(), len: len.view() };
        let inputs = Qkv { q: q.view(), k: k.view(), v: v.view() };
        let outputs = AttentionOutputs { out: out.view_mut(), lse: None };
        prefill_attn(gpu.stream(), inputs, spans, outputs, 50, true).unwrap();
        gpu.assert_guards(&out);
        let got = gpu.download(&out);
        for rows in [0..30, 50..90] {
            let shape = [1, rows.len(), 4, 40];
            let mut one = gpu.poisoned::<f16>(shape);
            let inputs = Qkv { q: part_of(&q, &rows), k: part_of(&k, &rows), v: part_of(&v, &rows) };
            let outputs = AttentionOutputs { out: one.view_mut(), lse: None };
            let options = AttentionOptions { mask: Mask::CAUSAL, ..Default::default() };
            mha(gpu.stream(), inputs, outputs, None, &options).unwrap();
            kit::assert_bits(&gpu.download(&one), &got[rows.start * 160..rows.end * 160]);
        }
        // What was there before is NaN.
        assert!(got[30 * 160..50 * 160].iter().all(|x| x.to_f32().is_nan()));
    }
}

#[test]
fn bad_calls_are_refused() {
    Refusals::new((), |stream, tensors, ()| {
        let inputs = Qkv { q: tensors.input::<bf16>("q"), k: tensors.input("k"), v: tensors.input("v") };
        let spans = SequenceSpans { start: tensors.input("start"), len: tensors.input("len") };
        let outputs =
            AttentionOutputs { out: tensors.output::<bf16>("out"), lse: tensors.optional_output("lse") };
        prefill_attn(stream, inputs, spans, outputs, 3, true)
    })
    .input::<bf16>("q", [7, 4, 8])
    .input::<bf16>("k", [7, 2, 8])
    .input::<bf16>("v", [7, 2, 6])
    .input::<i32>("start", [2])
    .input::<i32>("len", [2])
    .output::<bf16>("out", [7, 4, 6])
    .output::<f32>("lse", [7, 4])
    .accepts(|_| {})
    .accepts(|call| call.without("lse"))
    .refuses(kind!(Shape), &["prefill_attn: k: shape [6, 2, 8]", "7 rows (of q)"], |call| {
        call.shape("k", [6, 2, 8]);
        call.shape("v", [6, 2, 6]);
    })
    .refuses(kind!(Shape), &["prefill_attn: v: shape [6, 2, 6]", "[7, 2, 6]"], |call| {
        call.shape("v", [6, 2, 6]);
    })
    .refuses(kind!(Shape), &["prefill_attn: len: shape [3]", "[2]"], |call| call.shape("len", [3]))
    .refuses(kind!(Shape), &["prefill_attn: start: shape [1, 2]"], |call| call.shape("start", [1, 2]))
    .refuses(kind!(Stride), &["prefill_attn: len", "contiguous"], |call| call.strides("len", [2]))
    .refuses(kind!(Shape), &["prefill_attn: out: shape [7, 4, 8]"], |call| call.shape("out", [7, 4, 8]))
    .refuses(kind!(Shape), &["prefill_attn: lse: shape [4, 7]"], |call| call.shape("lse", [4, 7]))
    .refuses(kind!(Shape), &["prefill_attn: q", "a multiple of 3 heads"], |call| {
        call.shape("k", [7, 3, 8]);
        call.shape("v", [7, 3, 6]);
    })
    .refuses_other_devices()
    .refuses_overlaps();
}
