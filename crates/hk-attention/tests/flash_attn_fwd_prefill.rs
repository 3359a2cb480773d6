//! `flash_attn_fwd_prefill` on the emulated GPUs (and real ones where there are some) against its f64 reference.

use crate::common::attention::{Builder, COLUMNS, HEADS, MASKS, TYPES, check, masked, operator};
use hk_attention::{
    AttentionOutputs, Dropout, FlashInputs, FlashOptions, FlashRotary, Qkv, SequenceStarts,
    flash_attn_fwd_prefill,
};
use hk_core::plan::rope::RopeStyle;
use hk_core::registry::Scalar;
use hk_core::{DType, Layout, bf16};
use hk_testkit::{self as kit, Place, Refusals, kind};

const OP: &str = "flash_attn_fwd_prefill";

/// Every mask on batched and packed sequences of which all, a part, or nothing is used.
#[test]
fn every_mask_and_part() {
    let mut n = 0;
    for mask in MASKS {
        for packed in [false, true] {
            for used in 0..4 {
                let ([heads, kv_heads], [dqk, dv]) = (HEADS[n % 4], COLUMNS[n * 2 % 7]);
                let dtype = TYPES[n % 5];
                let columns = [heads, kv_heads, dqk, dv];
                let mut call = if packed {
                    Builder::packed(OP, dtype, [&[0, 65, 9], &[12, 70, 40]], columns)
                } else {
                    Builder::dense(OP, dtype, [3, 65, 70, heads, kv_heads, dqk, dv])
                };
                if used & 1 != 0 {
                    call = call.integers("seqused_q", if packed { &[0, 40, 3] } else { &[0, 40, 65] });
                }
                if used & 2 != 0 {
                    call = call.integers("seqused_k", if packed { &[12, 33, 0] } else { &[70, 33, 0] });
                }
                if n % 3 == 1 {
                    call = call.f32("alibi", [3, heads]);
                }
                if n % 4 == 2 {
                    let seed = ("seed", Scalar::Count(n as u64));
                    call = call.scalars(&[("dropout_p", Scalar::Float(0.4)), seed]);
                }
                let what = format!("{dtype} {mask:?}, packed: {packed}, used {used:#b}");
                masked(call.want("lse"), mask).check(&what, n as u64);
                n += 1;
            }
        }
    }
}

/// More packed sequences than a wave has lanes, of which a part is used; in the second half, too many of one.
#[test]
fn many_sequences() {
    let (lens, keys) = ([3; 100], [4; 100]);
    let mut used = [2; 100];
    used[70] = 4;
    let call = Builder::packed(OP, DType::F16, [&lens, &keys], [2, 1, 16, 16]).want("lse");
    call.integers("seqused_q", &used).integers("seqused_k", &[3; 100]).check("100 sequences", 1);
}

/// NaN: of sequences with more used rows than they have, and of wrong starts. Rows of other sequences are left alone: sanitizers know of
/// blocks that write the same.
#[test]
fn lengths_are_not_trusted() {
    let sizes = [2, 1, 16, 16];
    for (q, k) in
        [([21, 5], [9, 9]), ([20, -1], [31, 9]), ([i32::MIN, i32::MAX], [9, 9]), ([5, 5], [i32::MIN, 30])]
    {
        let batched = Builder::dense(OP, DType::Bf16, [2, 20, 30, 2, 1, 16, 16]);
        let packed = Builder::packed(OP, DType::Bf16, [&[20, 20], &[30, 30]], sizes);
        for (call, how) in [(batched, "batched"), (packed, "packed")] {
            let call = call.want("lse").integers("seqused_q", &q).integers("seqused_k", &k).call(1);
            let what = format!("{how}, used {q:?} and {k:?}");
            check(&what, &call);
            for gpu in kit::sanitized_devices() {
                operator(OP).execute(gpu.stream(), &call).unwrap_or_else(|e| panic!("{what}: {e}"));
            }
        }
    }
    // The keys of the next sequence are no keys of this one.
    let next =
        Builder::packed(OP, DType::Bf16, [&[20, 20], &[10, 50]], sizes).integers("seqused_k", &[11, 50]);
    next.check("keys of the next sequence", 2);
    for (q, k) in [([0, 25, 20], [0, 10, 20]), ([0, 10, 20], [0, 25, 20]), ([0, 10, 19], [0, 10, 20])] {
        let b = Builder::new(OP).tensor("q", DType::F16, [20, 2, 16]).tensor("k", DType::F16, [20, 1, 16]);
        let b = b.tensor("v", DType::F16, [20, 1, 16]).want("lse");
        let b = b.integers("cu_seqlens_q", &q).integers("cu_seqlens_k", &k);
        b.integers("seqused_q", &[3, 3]).check(&format!("starts {q:?} and {k:?}"), 3);
    }
}

/// Log-sum-exp of packed sequences `[Hq, total_q]`, of any strides.
#[test]
fn transposed_log_sum_exp() {
    for gpu in kit::devices() {
        let ones = vec![bf16::ONE; 20 * 2 * 8];
        let [q, k, v] = [0, 1, 2].map(|_| gpu.upload(&ones, [20, 2, 8]));
        let starts = gpu.upload(&[0, 5, 20], [3]);
        let run = |place: Place| {
            let (mut out, mut lse) = (gpu.poisoned::<bf16>([20, 2, 8]), gpu.poisoned(place));
            let inputs = FlashInputs {
                qkv: Qkv { q: q.view(), k: k.view(), v: v.view() },
                cu_seqlens: Some(SequenceStarts { q: starts.view(), k: starts.view() }),
                seqused_q: None,
                seqused_k: None,
            };
            let outputs = AttentionOutputs { out: out.view_mut(), lse: Some(lse.view_mut()) };
            flash_attn_fwd_prefill(gpu.stream(), inputs, outputs, None, &FlashOptions::default()).unwrap();
            gpu.assert_guards(&lse);
            gpu.download(&lse)
        };
        let want = run([2, 20].into());
        kit::assert_bits(&run(Place::new(Layout::with_strides([2, 20], [3, 7]).unwrap())), &want);
    }
}

/// Both styles, all columns or a part, on batched and packed sequences, with the positions that they begin at and without.
#[test]
fn rotated_queries_and_keys() {
    let rotated = |call: Builder, dtype, [rows, width]: [usize; 2], n: usize| {
        let style = Scalar::Choice(["neox", "interleaved"][n % 2]);
        let call = call.tensor("cos", dtype, [rows, width]).tensor("sin", dtype, [rows, width]);
        call.want("q_rotated").want("k_rotated").want("lse").scalars(&[("style", style)])
    };
    let mut n = 0;
    for packed in [false, true] {
        for offsets in [None, Some([0, 17, 5]), Some([3, i32::MAX, -1])] {
            for [dqk, width] in [[64, 32], [128, 32], [40, 3]] {
                let ([heads, kv_heads], dtype) = (HEADS[n % 4], TYPES[n % 3]);
                let call = if packed {
                    let columns = [heads, kv_heads, dqk, 32];
                    Builder::packed(OP, dtype, [&[9, 0, 65], &[40, 12, 70]], columns)
                } else {
                    Builder::dense(OP, dtype, [3, 65, 70, heads, kv_heads, dqk, 32])
                };
                let mut call = masked(rotated(call, dtype, [87, width], n), MASKS[n % 7]);
                if let Some(offsets) = offsets {
                    call = call.integers("offsets", &offsets);
                }
                let what = format!("{dtype}, packed: {packed}, offsets {offsets:?}, {width} of {dqk}");
                call.check(&what, n as u64);
                n += 1;
            }
        }
    }
    // Positions beyond the tables, and starts that fall.
    let short = Builder::packed(OP, DType::Bf16, [&[30, 10], &[30, 30]], [2, 1, 16, 16]);
    rotated(short, DType::Bf16, [25, 8], 0).check("tables of 25 rows", 1);
    let b = Builder::new(OP).tensor("q", DType::F16, [20, 2, 16]).tensor("k", DType::F16, [20, 1, 16]);
    let b = b.tensor("v", DType::F16, [20, 1, 16]);
    let b = b.integers("cu_seqlens_q", &[0, 10, 20]).integers("cu_seqlens_k", &[0, 25, 20]);
    rotated(b, DType::F16, [20, 8], 0).integers("offsets", &[1, 2]).check("starts that fall", 2);
}

#[test]
fn bad_calls_are_refused() {
    #[derive(Clone, Default)]
    struct Options {
        packed: bool,
        scale: Option<f32>,
        dropout: f32,
    }
    let table = || {
        Refusals::new(Options::default(), |stream, tensors, options: Options| {
            let starts =
                || SequenceStarts { q: tensors.input("cu_seqlens_q"), k: tensors.input("cu_seqlens_k") };
            let cu_seqlens = options.packed.then(starts);
            let inputs = FlashInputs {
                qkv: Qkv { q: tensors.input::<bf16>("q"), k: tensors.input("k"), v: tensors.input("v") },
                cu_seqlens,
                seqused_q: tensors.optional_input("seqused_q"),
                seqused_k: tensors.optional_input("seqused_k"),
            };
            let flash = FlashOptions {
                scale: options.scale,
                alibi: tensors.optional_input("alibi"),
                dropout: Some(Dropout { p: options.dropout, seed: 1, offset: 0 }),
                ..Default::default()
            };
            let outputs =
                AttentionOutputs { out: tensors.output::<bf16>("out"), lse: tensors.optional_output("lse") };
            let rotary = tensors.optional_input("cos").map(|cos| FlashRotary {
                cos,
                sin: tensors.input("sin"),
                style: RopeStyle::Neox,
                offsets: tensors.optional_input("offsets"),
                q_rotated: tensors.output("q_rotated"),
                k_rotated: tensors.output("k_rotated"),
            });
            flash_attn_fwd_prefill(stream, inputs, outputs, rotary, &flash)
        })
    };
    table()
        .input::<bf16>("q", [2, 3, 4, 8])
        .input::<bf16>("k", [2, 5, 2, 8])
        .input::<bf16>("v", [2, 5, 2, 6])
        .input::<i32>("seqused_q", [2])
        .input::<i32>("seqused_k", [2])
        .input::<f32>("alibi", [2, 4])
        .output::<bf16>("out", [2, 3, 4, 6])
        .output::<f32>("lse", [2, 4, 3])
        .accepts(|_| {})
        .accepts(|call| ["seqused_q", "seqused_k", "alibi", "lse"].iter().for_each(|name| call.without(name)))
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: seqused_q: shape [3]", "[2]"], |call| {
            call.shape("seqused_q", [3]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: seqused_k: shape [1]", "[2]"], |call| {
            call.shape("seqused_k", [1]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: k: shape [3, 5, 2, 8]", "2 sequences"], |call| {
            call.shape("k", [3, 5, 2, 8]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: alibi: shape [2]"], |call| call.shape("alibi", [2]))
        .refuses(kind!(Argument), &["flash_attn_fwd_prefill: scale: 0"], |call| {
            call.options.scale = Some(0.0)
        })
        .refuses(kind!(Argument), &["flash_attn_fwd_prefill: dropout_p: 1"], |call| {
            call.options.dropout = 1.0
        })
        .refuses(kind!(Stride), &["seqused_q", "contiguous"], |call| call.strides("seqused_q", [2]))
        .refuses_other_devices()
        .refuses_overlaps();
    table()
        .input::<bf16>("q", [6, 4, 8])
        .input::<bf16>("k", [9, 2, 8])
        .input::<bf16>("v", [9, 2, 6])
        .input::<i32>("cu_seqlens_q", [3])
        .input::<i32>("cu_seqlens_k", [3])
        .output::<bf16>("out", [6, 4, 6])
        .output::<f32>("lse", [4, 6])
        .accepts(|call| call.options.packed = true)
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: q: shape [6, 4, 8]", "4 axes"], |_| {})
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: lse: shape [6, 4]", "[4, 6]"], |call| {
            call.options.packed = true;
            call.shape("lse", [6, 4]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: cu_seqlens_k: shape [2]", "[3]"], |call| {
            call.options.packed = true;
            call.shape("cu_seqlens_k", [2]);
        })
        .refuses(kind!(Overlap), &["q and out"], |call| {
            call.options.packed = true;
            call.overlap("q", "out", 1);
        })
        .refuses(kind!(DeviceMismatch), &["cu_seqlens_q"], |call| {
            call.options.packed = true;
            call.elsewhere("cu_seqlens_q");
        });
    table()
        .input::<bf16>("q", [2, 3, 4, 8])
        .input::<bf16>("k", [2, 5, 2, 8])
        .input::<bf16>("v", [2, 5, 2, 6])
        .input::<bf16>("cos", [9, 3])
        .input::<bf16>("sin", [9, 3])
        .input::<i32>("offsets", [2])
        .output::<bf16>("out", [2, 3, 4, 6])
        .output::<bf16>("q_rotated", [2, 3, 4, 8])
        .output::<bf16>("k_rotated", [2, 5, 2, 8])
        .accepts(|_| {})
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: q_rotated: shape [2, 5, 2, 8]"], |call| {
            call.shape("q_rotated", [2, 5, 2, 8]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: k_rotated: shape [2, 5, 2, 6]"], |call| {
            call.shape("k_rotated", [2, 5, 2, 6]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: sin: shape [8, 3]", "[9, 3]"], |call| {
            call.shape("sin", [8, 3]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: q: shape [2, 3, 4, 8]", "10 columns"], |call| {
            call.shape("cos", [9, 5]);
            call.shape("sin", [9, 5]);
        })
        .refuses(kind!(Argument), &["flash_attn_fwd_prefill: rotary: 0"], |call| {
            call.shape("cos", [9, 0]);
            call.shape("sin", [9, 0]);
        })
        .refuses(kind!(Shape), &["flash_attn_fwd_prefill: offsets: shape [3]", "[2]"], |call| {
            call.shape("offsets", [3]);
        })
        .refuses(kind!(Stride), &["q_rotated"], |call| call.strides("q_rotated", [192, 64, 16, 2]))
        .refuses_other_devices()
        .refuses_overlaps();
}
