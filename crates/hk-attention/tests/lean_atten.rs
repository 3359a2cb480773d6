//! `lean_atten` on the emulated GPUs (and real ones where there are some) against its f64 reference.

use crate::common::attention::{Builder, COLUMNS, HEADS};
use hk_attention::{AttentionOutputs, LeanOptions, Qkv, lean_atten};
use hk_core::registry::Scalar;
use hk_core::{DType, bf16, f16};
use hk_testkit::{self as kit, Fill, Place, Refusals, Tolerance, kind};

fn call(
    dtype: DType,
    [rows, total]: [usize; 2],
    lens: &[i32],
    [heads, kv_heads, dqk, dv]: [usize; 4],
) -> Builder {
    Builder::new("lean_atten")
        .tensor("q", dtype, [rows, heads, dqk])
        .tensor("k", dtype, [total, kv_heads, dqk])
        .tensor("v", dtype, [total, kv_heads, dv])
        .integers("kv_lens", lens)
        .want("lse")
}

/// Ragged keys, none among them, for one and more queries; rows of keys behind the last sequence.
#[test]
fn ragged_keys() {
    const TYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
    let mut n = 0;
    for lens in [&[1, 65, 0, 129][..], &[0], &[300], &[17, 17, 17], &[]] {
        for sq in [1, 2, 33, 130] {
            let ([heads, kv_heads], [dqk, dv]) = (HEADS[n % 4], COLUMNS[n * 2 % 9]);
            let sizes = [sq * lens.len(), lens.iter().sum::<i32>() as usize + n % 2 * 5];
            let scalars =
                [("causal", Scalar::Bool(n % 3 != 0)), ("scale", Scalar::Float([0.0, 0.25][n % 2]))];
            let call = call(TYPES[n % 3], sizes, lens, [heads, kv_heads, dqk, dv]).scalars(&scalars);
            call.check(&format!("{sq} queries, keys {lens:?}, causal: {}", n % 3 != 0), n as u64);
            n += 1;
        }
    }
}

/// More sequences than a wave has lanes.
#[test]
fn many_sequences() {
    let lens: Vec<i32> = (0..100).map(|i| i * 7 % 20).collect();
    let sizes = [200, lens.iter().sum::<i32>() as usize];
    let call = call(DType::Bf16, sizes, &lens, [4, 2, 32, 32]);
    call.scalar("causal", Scalar::Bool(true)).check("100 sequences", 1);
}

/// NaN from the first sequence on whose keys are not there.
#[test]
fn lengths_are_not_trusted() {
    for (lens, total) in [
        ([20, 30, 11], 60),
        ([20, -1, 30], 60),
        ([61, 0, 0], 60),
        ([0, 0, 1], 0),
        ([i32::MAX, i32::MAX, i32::MAX], 60),
        ([10, i32::MIN, 10], 60),
    ] {
        let call = call(DType::Bf16, [9, total], &lens, [4, 2, 32, 16]);
        call.check(&format!("keys {lens:?} of {total}"), 1);
    }
}

/// Programs share the work: of whole tiles, of parts of one, of nothing.
#[test]
fn every_number_of_programs() {
    const TYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
    let mut n = 0;
    for sq in [1, 40, 300] {
        for causal in [false, true] {
            for programs in [1, 3, 7, 304] {
                let ([heads, kv_heads], [dqk, dv]) = (HEADS[n % 4], COLUMNS[n * 2 % 9]);
                let lens = [1, 65, 0, 129];
                let call = call(TYPES[n % 3], [sq * 4, 195], &lens, [heads, kv_heads, dqk, dv]);
                let call = call.scalar("causal", Scalar::Bool(causal));
                let what = format!(
                    "{} of {sq} queries, {heads}/{kv_heads} heads, {dqk} and {dv} columns",
                    TYPES[n % 3]
                );
                let what = format!("{what}, causal: {causal}, {programs} programs");
                call.scalar("programs", Scalar::Count(programs)).check(&what, n as u64);
                n += 1;
            }
        }
    }
}

/// Views of any strides give the bits of contiguous tensors; keys behind the last sequence are not read.
#[test]
fn strided_views() {
    let shapes = [[24, 4, 24], [70, 2, 24], [70, 2, 16], [24, 4, 16]];
    for gpu in kit::devices() {
        let draw = |i: usize| Fill::Normal.elements::<f16>(shapes[i].iter().product(), i as u64);
        let (q, mut k, mut v) = (draw(0), draw(1), draw(2));
        k[60 * 2 * 24..].fill(f16::NAN);
        v[60 * 2 * 16..].fill(f16::NAN);
        let run = |place: &dyn Fn(usize) -> Place, lse: Place| {
            let (q, k, v) = (gpu.upload(&q, place(0)), gpu.upload(&k, place(1)), gpu.upload(&v, place(2)));
            let lens = gpu.upload(&[40, 0, 20], [3]);
            let (mut out, mut lse) = (gpu.poisoned::<f16>(place(3)), gpu.poisoned(lse));
            let inputs = Qkv { q: q.view(), k: k.view(), v: v.view() };
            let outputs = AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) };
            let options = LeanOptions { causal: true, ..LeanOptions::default() };
            lean_atten(gpu.stream(), inputs, lens.view(), outputs, None, &options).unwrap();
            gpu.assert_guards(&out);
            gpu.assert_guards(&lse);
            (gpu.download(&out), gpu.download(&lse))
        };
        let want = run(&|i| shapes[i].into(), [24, 4].into());
        let transposed = hk_core::Layout::with_strides([24, 4], [1, 25]).unwrap();
        let got = run(&|i| Place::rows(shapes[i], 27 + i).shifted(i % 2), Place::new(transposed));
        // Rows that are not whole vectors have another kernel.
        kit::assert_close(&got.0, &kit::widen(&want.0), Tolerance::Attention);
        kit::assert_close(&got.1, &kit::widen(&want.1), Tolerance::Within { rtol: 1e-4, atol: 1e-4 });
    }
}

#[test]
fn bad_calls_are_refused() {
    Refusals::new(None, |stream, tensors, scale| {
        let inputs = Qkv { q: tensors.input::<bf16>("q"), k: tensors.input("k"), v: tensors.input("v") };
        let outputs =
            AttentionOutputs { out: tensors.output::<bf16>("out"), lse: tensors.optional_output("lse") };
        let options = LeanOptions { scale, causal: true, ..LeanOptions::default() };
        lean_atten(stream, inputs, tensors.input("kv_lens"), outputs, None, &options)
    })
    .input::<bf16>("q", [6, 4, 8])
    .input::<bf16>("k", [9, 2, 8])
    .input::<bf16>("v", [9, 2, 6])
    .input::<i32>("kv_lens", [2])
    .output::<bf16>("out", [6, 4, 6])
    .output::<f32>("lse", [6, 4])
    .accepts(|_| {})
    .accepts(|call| call.shape("kv_lens", [3]))
    .refuses(kind!(Shape), &["lean_atten: q: shape [6, 4, 8]", "a multiple of 4 rows"], |call| {
        call.shape("kv_lens", [4]);
    })
    .refuses(kind!(Shape), &["lean_atten: q: shape [6, 4, 8]", "a multiple of 0 rows"], |call| {
        call.shape("kv_lens", [0]);
    })
    .refuses(kind!(Shape), &["lean_atten: v: shape [8, 2, 6]", "[9, 2, 6]"], |call| {
        call.shape("v", [8, 2, 6]);
    })
    .refuses(kind!(Shape), &["lean_atten: k: shape [9, 2, 7]", "8 columns"], |call| {
        call.shape("k", [9, 2, 7]);
    })
    .refuses(kind!(Shape), &["lean_atten: lse: shape [4, 6]"], |call| call.shape("lse", [4, 6]))
    .refuses(kind!(Stride), &["lean_atten: kv_lens", "contiguous"], |call| call.strides("kv_lens", [2]))
    .refuses(kind!(Argument), &["lean_atten: scale: 0"], |call| call.options = Some(0.0))
    .refuses(kind!(Argument), &["lean_atten: scale: NaN"], |call| call.options = Some(f32::NAN))
    .refuses_other_devices()
    .refuses_overlaps();
}
