//! `fp8_mqa_logits` and `pa_mqa_logits` at every length, and their refusals.

use crate::common::attention::Builder;
use hk_attention::{
    DeviceFp8, IndexerPages, MqaLogitsInputs, PagedMqaLogitsInputs, fp8_mqa_logits, pa_mqa_logits,
};
use hk_core::registry::Scalar;
use hk_core::{Arch, DType, Fp8E4M3, Fp8E4M3Fnuz};
use hk_testkit::{self as kit, CallElement, Gpu, Refusals, kind};

const TYPES: [DType; 2] = [DType::Fp8E4M3Fnuz, DType::Fp8E4M3];

/// Ranges that are empty, turned round, or outside the keys; heads and columns of all kinds.
#[test]
fn ranges_of_every_kind() {
    let mut n = 0;
    for (queries, keys) in [(1usize, 1i32), (1, 113), (17, 76), (5, 1024), (33, 65), (3, 0)] {
        for heads in [1, 32, 64, 65] {
            for columns in [16, 64, 128, 208] {
                let ranges: Vec<[i32; 2]> = (0..queries as i32)
                    .map(|i| match i % 5 {
                        0 => [0, keys],
                        1 => [i, i + 20],
                        2 => [7, 3],
                        3 => [-5, i32::MAX],
                        _ => [keys - 1, keys],
                    })
                    .collect();
                let pick = |side: usize| ranges.iter().map(|range| range[side]).collect::<Vec<_>>();
                let clean = n % 3 != 0;
                let dtype = TYPES[n % 2];
                Builder::new("fp8_mqa_logits")
                    .tensor("q", dtype, [queries, heads, columns])
                    .tensor("k", dtype, [keys as usize, columns])
                    .f32("k_scale", [keys as usize])
                    .f32("weights", [queries, heads])
                    .integers("starts", &pick(0))
                    .integers("ends", &pick(1))
                    .scalar("clean", Scalar::Bool(clean))
                    .check(
                        &format!("{queries} x {keys}, {heads} heads of {columns}, clean: {clean}"),
                        n as u64,
                    );
                n += 1;
            }
        }
    }
}

/// Lengths that are shorter than the queries, longer than the table, negative; pages that are not there.
#[test]
fn lengths_and_pages_are_not_trusted() {
    let mut n = 0;
    for tokens in [1, 16, 64] {
        for of_sequence in [1, 2, 4] {
            for lens in [[1, 3, 64], [65, 1000, 0], [-7, i32::MAX, i32::MIN], [2, 1, 129]] {
                let (width, dtype) = (130 / tokens, TYPES[n % 2]);
                let table: Vec<i32> = (0..3 * width as i32)
                    .map(|i| [i * 7 % 12, -1, 12, i % 12][(i % 37 == 5) as usize * (i as usize % 3)])
                    .collect();
                Builder::new("pa_mqa_logits")
                    .tensor("q", dtype, [3, of_sequence, 8, 64])
                    .tensor("k", dtype, [12, tokens, 64])
                    .f32("k_scale", [12, tokens])
                    .f32("weights", [3 * of_sequence, 8])
                    .integers("context_lens", &lens)
                    .scalar("max_len", Scalar::Count(140))
                    .table("block_table", [3, width], &table)
                    .check(&format!("pages of {tokens}, {of_sequence} queries, lengths {lens:?}"), n as u64);
                n += 1;
            }
        }
    }
}

/// No page at all: every key is NaN.
#[test]
fn a_cache_without_pages() {
    for (tokens, dtype) in [(64, TYPES[0]), (16, TYPES[1])] {
        Builder::new("pa_mqa_logits")
            .tensor("q", dtype, [2, 1, 8, 64])
            .tensor("k", dtype, [0, tokens, 64])
            .f32("k_scale", [0, tokens])
            .f32("weights", [2, 8])
            .integers("context_lens", &[40, 0])
            .scalar("max_len", Scalar::Count(70))
            .table("block_table", [2, 3], &[0; 6])
            .check(&format!("pages of {tokens}"), 1);
    }
}

/// Products that are NaN count as 0: of a head whose query is, of all heads of a key that is.
fn not_a_number<F: DeviceFp8 + CallElement>(gpu: &Gpu, one: F, nan: F) {
    let (mut q, mut k) = ([one; 2 * 16], [one; 3 * 16]);
    (q[3], k[16 + 5]) = (nan, nan);
    let (q, k) = (gpu.upload(&q, [1, 2, 16]), gpu.upload(&k, [3, 16]));
    let (k_scale, weights) = (gpu.upload(&[1.0f32; 3], [3]), gpu.upload(&[1.0f32, 2.0], [1, 2]));
    let (starts, ends) = (gpu.upload(&[0i32], [1]), gpu.upload(&[3i32], [1]));
    let mut out = gpu.poisoned::<f32>([1, 3]);
    let inputs = MqaLogitsInputs {
        q: q.view(),
        k: k.view(),
        k_scale: k_scale.view(),
        weights: weights.view(),
        starts: starts.view(),
        ends: ends.view(),
    };
    fp8_mqa_logits(gpu.stream(), inputs, out.view_mut(), true).unwrap();
    assert_eq!(gpu.download(&out).data, [32.0, 0.0, 32.0], "{}", gpu.spec());
}

#[test]
fn products_that_are_nan() {
    for gpu in kit::devices() {
        match gpu.arch() {
            Arch::Gfx942 => {
                not_a_number(&gpu, Fp8E4M3Fnuz::from_f32(1.0), Fp8E4M3Fnuz::from_f32(f32::NAN));
            }
            _ => not_a_number(&gpu, Fp8E4M3::from_f32(1.0), Fp8E4M3::from_f32(f32::NAN)),
        }
    }
}

fn dense_refusals<F: CallElement + DeviceFp8>() {
    Refusals::new((), |stream, tensors, ()| {
        let inputs = MqaLogitsInputs::<F> {
            q: tensors.input("q"),
            k: tensors.input("k"),
            k_scale: tensors.input("k_scale"),
            weights: tensors.input("weights"),
            starts: tensors.input("starts"),
            ends: tensors.input("ends"),
        };
        fp8_mqa_logits(stream, inputs, tensors.output("out"), true)
    })
    .input::<F>("q", [3, 4, 32])
    .input::<F>("k", [7, 32])
    .input::<f32>("k_scale", [7])
    .input::<f32>("weights", [3, 4])
    .input::<i32>("starts", [3])
    .input::<i32>("ends", [3])
    .output::<f32>("out", [3, 7])
    .accepts(|_| {})
    .refuses(kind!(Shape), &["fp8_mqa_logits: q", "a multiple of 16"], |call| {
        call.shape("q", [3, 4, 24]);
        call.shape("k", [7, 24]);
    })
    .refuses(kind!(Shape), &["fp8_mqa_logits: q", "up to 256"], |call| {
        call.shape("q", [3, 4, 272]);
        call.shape("k", [7, 272]);
    })
    .refuses(kind!(Shape), &["fp8_mqa_logits: k", "[7, 32]"], |call| call.shape("k", [7, 48]))
    .refuses(kind!(Shape), &["fp8_mqa_logits: k_scale"], |call| call.shape("k_scale", [3]))
    .refuses(kind!(Shape), &["fp8_mqa_logits: weights"], |call| call.shape("weights", [3, 5]))
    .refuses(kind!(Shape), &["fp8_mqa_logits: starts"], |call| call.shape("starts", [4]))
    .refuses(kind!(Shape), &["fp8_mqa_logits: ends"], |call| call.shape("ends", [2]))
    .refuses(kind!(Shape), &["fp8_mqa_logits: out"], |call| call.shape("out", [3, 8]))
    .refuses(kind!(Stride), &["fp8_mqa_logits: k", "rows on 16 bytes"], |call| call.strides("k", [40, 1]))
    .refuses(kind!(Stride), &["fp8_mqa_logits: k", "8388608 bytes apart"], |call| {
        call.strides("k", [(1 << 23) + 16, 1]);
    })
    .refuses_other_devices();
}

fn paged_refusals<F: CallElement + DeviceFp8>() {
    Refusals::new((), |stream, tensors, ()| {
        let inputs = PagedMqaLogitsInputs::<F> {
            q: tensors.input("q"),
            k: tensors.input("k"),
            k_scale: tensors.input("k_scale"),
            weights: tensors.input("weights"),
            context_lens: tensors.input("context_lens"),
            pages: IndexerPages::Table(tensors.input("block_table")),
        };
        pa_mqa_logits(stream, inputs, tensors.output("out"), false)
    })
    .input::<F>("q", [2, 3, 4, 32])
    .input::<F>("k", [5, 8, 32])
    .input::<f32>("k_scale", [5, 8])
    .input::<f32>("weights", [6, 4])
    .input::<i32>("context_lens", [2])
    .input::<i32>("block_table", [2, 2])
    .output::<f32>("out", [6, 16])
    .accepts(|_| {})
    .refuses(kind!(Shape), &["pa_mqa_logits: k", "[5, 8, 32]"], |call| call.shape("k", [5, 8, 16]))
    .refuses(kind!(Empty), &["pa_mqa_logits: k"], |call| {
        call.shape("k", [5, 0, 32]);
        call.shape("k_scale", [5, 0]);
    })
    .refuses(kind!(Shape), &["pa_mqa_logits: k_scale"], |call| call.shape("k_scale", [5, 7]))
    .refuses(kind!(Shape), &["pa_mqa_logits: weights"], |call| call.shape("weights", [2, 4]))
    .refuses(kind!(Shape), &["pa_mqa_logits: context_lens"], |call| call.shape("context_lens", [3]))
    .refuses(kind!(Shape), &["pa_mqa_logits: block_table"], |call| call.shape("block_table", [3, 2]))
    .refuses(kind!(Shape), &["pa_mqa_logits: out"], |call| call.shape("out", [2, 16]))
    .refuses_other_devices();
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    match kit::devices()[0].arch() {
        Arch::Gfx942 => {
            dense_refusals::<Fp8E4M3Fnuz>();
            paged_refusals::<Fp8E4M3Fnuz>();
        }
        _ => {
            dense_refusals::<Fp8E4M3>();
            paged_refusals::<Fp8E4M3>();
        }
    }
}
