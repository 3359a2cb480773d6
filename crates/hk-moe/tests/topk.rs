//! `moe_topk` against the reference, and its refusals.

use crate::common::{Numbers, logits};
use hk_core::{Float, bf16, f16};
use hk_moe::{
    Choices, Groups, Scores, SlotOrder, Ties, TopkOptions, moe_bitmatrix_shape, moe_topk, reference,
};
use hk_testkit::{self as kit, Gpu, HostTensorF64, Refusals, Tolerance, kind, proptest::prelude::*, widen};

/// Relative error of scores that the operator may have.
const NUDGE: f64 = 2e-6;

/// Runs the operator and compares; returns how many tokens' choices depend on the rounding of scores, which are not compared.
#[track_caller]
fn check<T: Float, W: Float>(
    gpu: &Gpu,
    data: &[T],
    [tokens, experts, k]: [usize; 3],
    stride: usize,
    bias: Option<&[f32]>,
    options: &TopkOptions,
) -> usize {
    let x = gpu.upload_rows(data, [tokens, experts], stride);
    let bias_tensor = bias.map(|bias| gpu.upload(bias, [experts]));
    let (mut weights, mut ids) = (gpu.poisoned::<W>([tokens, k]), gpu.poisoned::<i32>([tokens, k]));
    let mut bits = gpu.poisoned::<i32>(moe_bitmatrix_shape(tokens, experts));
    let out = Choices { weights: weights.view_mut(), ids: ids.view_mut(), bitmatrix: Some(bits.view_mut()) };
    moe_topk(gpu.stream(), x.view(), bias_tensor.as_ref().map(|b| b.view()), out, options).unwrap();

    let wide = widen(data);
    let bias: Option<Vec<f64>> = bias.map(widen);
    let want = reference::moe_topk(&wide, experts, bias.as_deref(), k, options, 0.0);
    let nudged = reference::moe_topk(&wide, experts, bias.as_deref(), k, options, NUDGE);
    let what = format!("{tokens} tokens, {k} of {experts}, {options:?}, {}", gpu.spec());
    let (got_ids, got_weights) = (gpu.download(&ids), gpu.download(&weights));
    let decided = |t: &usize| want.ids[t * k..][..k] == nudged.ids[t * k..][..k];
    let rows: Vec<usize> = (0..tokens).filter(decided).collect();
    let exact = matches!(options.scores, Scores::Logits | Scores::SoftmaxChosen | Scores::Softmax);
    assert!(!exact || rows.len() == tokens, "logits are distinct or equal: {what}");
    for &t in &rows {
        assert_eq!(got_ids.data[t * k..][..k], want.ids[t * k..][..k], "token {t}: {what}");
        let row = HostTensorF64::new([k], want.weights[t * k..][..k].to_vec());
        let got = kit::Array::new(format!("token {t}: {what}"), [k], got_weights.data[t * k..][..k].to_vec());
        kit::assert_near(&got, &row, Tolerance::Elementwise);
    }
    if tokens > 0 {
        let bits_of = reference::moe_bitmatrix_of(&got_ids.data, k, experts);
        assert!(gpu.download(&bits).data == bits_of, "bits: {what}");
    }
    gpu.assert_guards(&weights);
    gpu.assert_guards(&ids);
    gpu.assert_guards(&bits);
    tokens - rows.len()
}

const ALL_SCORES: [Scores; 5] =
    [Scores::Logits, Scores::SoftmaxChosen, Scores::Softmax, Scores::Sigmoid, Scores::SqrtSoftplus];

fn options(bits: u64) -> TopkOptions {
    TopkOptions {
        scores: ALL_SCORES[(bits >> 8) as usize % 5],
        renormalize: bits & 1 != 0,
        scaling: if bits & 2 != 0 { 2.5 } else { 1.0 },
        ties: if bits & 4 != 0 { Ties::LowIndex } else { Ties::HighIndex },
        order: if bits & 8 != 0 { SlotOrder::ByPreference } else { SlotOrder::ByExpert },
        groups: None,
    }
}

fn biases(experts: usize, seed: u64) -> Vec<f32> {
    let mut numbers = Numbers(seed);
    (0..experts).map(|_| (numbers.next() % 1000) as f32 / 2000.0 - 0.25).collect()
}

fn case<T: Float>(gpu: &Gpu, size: [usize; 3], more: usize, seed: u64, all: &TopkOptions) -> usize {
    let data = logits::<T>(size[0] * size[1], seed, true);
    let bias = biases(size[1], seed);
    let scored = matches!(all.scores, Scores::Sigmoid | Scores::SqrtSoftplus);
    let bias = (scored && seed & 16 != 0).then_some(&bias[..]);
    if seed & 32 != 0 {
        check::<T, f32>(gpu, &data, size, size[1] + more, bias, all)
    } else {
        check::<T, T>(gpu, &data, size, size[1] + more, bias, all)
    }
}

fn any_case(gpu: &Gpu, size: [usize; 3], more: usize, seed: u64, all: &TopkOptions) -> usize {
    match seed % 3 {
        0 => case::<bf16>(gpu, size, more, seed, all),
        1 => case::<f16>(gpu, size, more, seed, all),
        _ => case::<f32>(gpu, size, more, seed, all),
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn experts_are_those_of_the_reference(
        tokens in kit::size(0..=70, &[4, 64]), experts in kit::size(1..=1024, &[32, 64, 128, 256, 512]),
        k in kit::size(1..=32, &[4, 8]), more in 0usize..9, seed: u64, bits: u64,
    ) {
        for gpu in kit::devices() {
            let undecided = any_case(&gpu, [tokens, experts, k.min(experts)], more, seed, &options(bits));
            prop_assert!(undecided <= 2 + tokens / 8, "{undecided} of {tokens} tokens");
        }
    }

    #[test]
    fn groups_are_those_of_the_reference(
        tokens in kit::size(1..=40, &[4]), size in kit::size(1..=64, &[16, 32]), groups in 1usize..=16, k in kit::size(1..=32, &[8]),
        spare in 0usize..16, more in 0usize..9, seed: u64, bits: u64,
    ) {
        let groups = groups.min(256 / size);
        let k = k.min(groups * size);
        let kept = (k.div_ceil(size) + spare).min(groups);
        let all = TopkOptions { groups: Some(Groups { groups, kept }), ..options(bits) };
        for gpu in kit::devices() {
            let undecided = any_case(&gpu, [tokens, groups * size, k], more, seed, &all);
            prop_assert!(undecided <= 2 + tokens / 8, "{undecided} of {tokens} tokens");
        }
    }
}

#[test]
fn sizes_at_the_borders() {
    for gpu in kit::devices() {
        for (seed, [tokens, experts, k]) in [
            [1, 1, 1],
            [1, 1024, 32],
            [3, 33, 32],
            [4, 64, 1],
            [5, 65, 8],
            [63, 128, 8],
            [64, 256, 8],
            [65, 257, 9],
            [257, 384, 8],
            [9, 1023, 32],
            [33, 32, 32],
        ]
        .into_iter()
        .enumerate()
        {
            for bits in 0..5 {
                any_case(&gpu, [tokens, experts, k], 0, seed as u64 + bits, &options(bits << 8));
            }
        }
    }
}

#[test]
fn of_equals_the_higher_or_the_lower_are_chosen() {
    for gpu in kit::devices() {
        for experts in [8, 100, 256, 1000] {
            for scores in ALL_SCORES {
                for (ties, first) in [(Ties::HighIndex, experts - 7), (Ties::LowIndex, 0)] {
                    let all = TopkOptions { scores, ties, ..TopkOptions::default() };
                    for value in [0.5, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
                        let x = gpu.upload(&vec![value; 3 * experts], [3, experts]);
                        let (mut w, mut ids) = (gpu.poisoned::<f32>([3, 7]), gpu.poisoned::<i32>([3, 7]));
                        let out = Choices { weights: w.view_mut(), ids: ids.view_mut(), bitmatrix: None };
                        moe_topk(gpu.stream(), x.view(), None, out, &all).unwrap();
                        let want: Vec<i32> = (0..21).map(|i| (first + i % 7) as i32).collect();
                        assert_eq!(gpu.download(&ids).data, want, "{scores:?} {ties:?} of {experts} {value}");
                    }
                }
            }
        }
    }
}

#[test]
fn zeros_and_nans_are_ordered_by_their_signs() {
    let row = [0.0, -f32::NAN, f32::NEG_INFINITY, -0.0, f32::NAN, 1.0, f32::INFINITY, -1.0];
    let all = TopkOptions { order: SlotOrder::ByPreference, ..TopkOptions::default() };
    for gpu in kit::devices() {
        let x = gpu.upload(&row, [1, 8]);
        let (mut w, mut ids) = (gpu.poisoned::<f32>([1, 8]), gpu.poisoned::<i32>([1, 8]));
        let out = Choices { weights: w.view_mut(), ids: ids.view_mut(), bitmatrix: None };
        moe_topk(gpu.stream(), x.view(), None, out, &all).unwrap();
        assert_eq!(gpu.download(&ids).data, [4, 6, 5, 0, 3, 7, 2, 1]);
        assert!(gpu.download(&w).data.iter().all(|w| w.is_nan()));
    }
}

#[test]
fn tokens_do_not_depend_on_each_other() {
    for gpu in kit::devices() {
        let (tokens, experts, k) = (37, 256, 8);
        let data = logits::<f32>(tokens * experts, 3, true);
        let run = |rows: &[usize]| {
            let some: Vec<f32> =
                rows.iter().flat_map(|&t| &data[t * experts..][..experts]).copied().collect();
            let x = gpu.upload(&some, [rows.len(), experts]);
            let bias = gpu.upload(&biases(experts, 1), [experts]);
            let mut w = gpu.poisoned::<f32>([rows.len(), k]);
            let mut ids = gpu.poisoned::<i32>([rows.len(), k]);
            let out = Choices { weights: w.view_mut(), ids: ids.view_mut(), bitmatrix: None };
            let options = TopkOptions::deepseek_v3();
            moe_topk(gpu.stream(), x.view(), Some(bias.view()), out, &options).unwrap();
            let bits = gpu.download(&w).data.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
            (bits, gpu.download(&ids).data)
        };
        let all = run(&(0..tokens).collect::<Vec<_>>());
        let reversed = run(&(0..tokens).rev().collect::<Vec<_>>());
        for t in 0..tokens {
            let there = (tokens - 1 - t) * k;
            assert_eq!(all.0[t * k..][..k], reversed.0[there..][..k]);
            assert_eq!(all.1[t * k..][..k], reversed.1[there..][..k]);
        }
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let groups =
        |groups, kept| TopkOptions { groups: Some(Groups { groups, kept }), ..TopkOptions::default() };
    let sigmoid = TopkOptions { scores: Scores::Sigmoid, ..TopkOptions::default() };
    Refusals::new(sigmoid, |stream, tensors, options| {
        let out = Choices {
            weights: tensors.output::<bf16>("weights"),
            ids: tensors.output("ids"),
            bitmatrix: tensors.optional_output("bitmatrix"),
        };
        moe_topk(stream, tensors.input::<bf16>("logits"), tensors.optional_input("bias"), out, &options)
    })
    .input::<bf16>("logits", [5, 24])
    .input::<f32>("bias", [24])
    .output::<bf16>("weights", [5, 4])
    .output::<i32>("ids", [5, 4])
    .output::<i32>("bitmatrix", [4, 32])
    .accepts(|_| {})
    .accepts(|call| call.options.groups = groups(3, 1).groups)
    .refuses(kind!(Shape), &["moe_topk: weights"], |call| call.shape("weights", [5, 3]))
    .refuses(kind!(Shape), &["moe_topk: ids"], |call| call.shape("ids", [4, 4]))
    .refuses(kind!(Shape), &["moe_topk: bias"], |call| call.shape("bias", [23]))
    .refuses(kind!(Shape), &["moe_topk: bitmatrix"], |call| call.shape("bitmatrix", [4, 5]))
    .refuses(kind!(Argument), &["k: k = 25, expected k from 1 to 24"], |call| {
        call.shape("ids", [5, 25]);
        call.shape("weights", [5, 25]);
    })
    .refuses(kind!(Argument), &["k: k = 0"], |call| call.shape("ids", [5, 0]))
    .refuses(kind!(Argument), &["logits: 1025"], |call| call.shape("logits", [5, 1025]))
    .refuses(kind!(Argument), &["bias: given, with Softmax"], |call| call.options.scores = Scores::Softmax)
    .refuses(kind!(Argument), &["scaling: NaN"], |call| call.options.scaling = f32::NAN)
    .refuses(kind!(Argument), &["groups: 5"], |call| call.options.groups = groups(5, 5).groups)
    .refuses(kind!(Argument), &["groups: 24"], |call| call.options.groups = groups(24, 24).groups)
    .refuses(kind!(Argument), &["kept_groups: 1"], |call| call.options.groups = groups(12, 1).groups)
    .refuses(kind!(Argument), &["kept_groups: 4"], |call| call.options.groups = groups(3, 4).groups)
    .refuses(kind!(Overlap), &["logits", "weights"], |call| call.overlap("logits", "weights", 0))
    .refuses_other_devices();
    Refusals::new((), |stream, tensors, ()| {
        let out = Choices {
            weights: tensors.output::<f16>("weights"),
            ids: tensors.output("ids"),
            bitmatrix: None,
        };
        moe_topk(stream, tensors.input::<bf16>("logits"), None, out, &TopkOptions::default())
    })
    .input::<bf16>("logits", [5, 24])
    .output::<f16>("weights", [5, 4])
    .output::<i32>("ids", [5, 4])
    .refuses(kind!(DType), &["moe_topk: weights: dtype f16", "f32, or bf16"], |_| {});
}
