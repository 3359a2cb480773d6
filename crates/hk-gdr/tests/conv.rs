//! Convolutions to q, k and v: bit for bit those of hk-activation.

use hk_activation::{
    ConvInputs, ConvOutputs, ConvUpdateInputs, ConvUpdateOutputs, causal_conv1d_fwd, causal_conv1d_update,
};
use hk_core::{Float, Layout, bf16};
use hk_gdr::{
    ConvActivation, ConvSplitInputs, ConvUpdateSplitInputs, ConvWeight, Qkv, causal_conv1d_fwd_split_qkv,
    causal_conv1d_update_split_qkv,
};
use hk_testkit::{self as kit, Fill, Place, assert_error, kind, proptest::prelude::*};

/// `[rows, cols]`, transposed in memory if not `plain`, with a gap.
fn place(rows: usize, cols: usize, plain: bool, gap: usize) -> Place {
    let strides = if plain { [cols + gap, 1] } else { [1, rows + gap] };
    Place::new(Layout::with_strides([rows, cols], strides).unwrap())
}

/// The channels from `from` to `to` of `[channels, tokens]`, as `[tokens, channels]`.
fn part<T: Copy>(y: &[T], tokens: usize, from: usize, to: usize) -> Vec<T> {
    (0..tokens).flat_map(|t| (from..to).map(move |c| y[c * tokens + t])).collect()
}

#[derive(Debug, Clone)]
struct Case {
    lengths: Vec<usize>,
    dims: [usize; 2],
    width: usize,
    bias: bool,
    silu: bool,
    x_tokens: bool,
    y_tokens: bool,
    gap: usize,
    seed: u64,
}

#[track_caller]
fn check<T: Float, W: ConvWeight<T>>(case: &Case) {
    let [key, value] = case.dims;
    let (channels, tokens) = (2 * key + value, case.lengths.iter().sum::<usize>());
    let n = case.lengths.len();
    let x: Vec<T> = Fill::Normal.elements(channels * tokens, case.seed);
    let weight: Vec<W> = Fill::Normal.elements(channels * case.width, case.seed ^ 1);
    let bias: Vec<W> = Fill::Normal.elements(channels, case.seed ^ 2);
    let slots = n + 2;
    let states: Vec<T> = Fill::Normal.elements(slots * channels * (case.width - 1), case.seed ^ 3);
    let mut starts = vec![0];
    case.lengths.iter().for_each(|l| starts.push(starts[starts.len() - 1] + *l as i32));
    // One is padding, one out of range if there are several.
    let indices: Vec<i32> = (0..n)
        .map(|i| {
            if i == 2 {
                -1
            } else if i == 3 {
                slots as i32
            } else {
                (slots - 1 - i) as i32
            }
        })
        .collect();
    let flags: Vec<u8> = (0..n).map(|i| u8::from(i % 2 == 0)).collect();
    let act = if case.silu { ConvActivation::Silu } else { ConvActivation::None };
    for gpu in kit::devices() {
        let input = gpu.upload(&x, place(channels, tokens, case.x_tokens, case.gap));
        let (w, b) = (gpu.upload(&weight, [channels, case.width]), gpu.upload(&bias, [channels]));
        let (cu, at, has) =
            (gpu.upload(&starts, [n + 1]), gpu.upload(&indices, [n]), gpu.upload(&flags, [n]));
        let state_shape = [slots, channels, case.width - 1];
        let mut kept = gpu.upload(&states, state_shape);
        let mut y = gpu.poisoned::<T>(place(channels, tokens, case.x_tokens, case.gap));
        let inputs = ConvInputs {
            x: input.view(),
            weight: w.view(),
            bias: case.bias.then(|| b.view()),
            query_start_loc: Some(cu.view()),
            cache_indices: Some(at.view()),
            has_initial_state: Some(has.view()),
        };
        let outputs = ConvOutputs { y: y.view_mut(), conv_states: Some(kept.view_mut()) };
        causal_conv1d_fwd(gpu.stream(), inputs, outputs, act).unwrap();
        let (want, want_states) = (gpu.download(&y).data, gpu.download(&kept).data);

        let mut kept = gpu.upload(&states, state_shape);
        let [mut q, mut k, mut v] =
            [key, key, value].map(|c| gpu.poisoned::<T>(place(tokens, c, !case.y_tokens, case.gap)));
        let inputs = ConvSplitInputs {
            x: input.view(),
            weight: w.view(),
            bias: case.bias.then(|| b.view()),
            query_start_loc: cu.view(),
            cache_indices: Some(at.view()),
            has_initial_state: Some(has.view()),
        };
        let qkv = Qkv { q: q.view_mut(), k: k.view_mut(), v: v.view_mut() };
        causal_conv1d_fwd_split_qkv(gpu.stream(), inputs, qkv, Some(kept.view_mut()), act).unwrap();
        let bits = |x: &[T]| -> Vec<Option<u64>> {
            // Where nothing is written there is poison, which varies with the place.
            x.iter().map(|x| x.to_f64()).map(|x| (!x.is_nan()).then_some(x.to_bits())).collect()
        };
        for (name, tensor, from, to) in
            [("q", &q, 0, key), ("k", &k, key, 2 * key), ("v", &v, 2 * key, channels)]
        {
            let got = gpu.download(tensor).data;
            assert!(
                bits(&got) == bits(&part(&want, tokens, from, to)),
                "{name} of {case:?} on {}",
                gpu.spec()
            );
            gpu.assert_guards(tensor);
        }
        assert!(bits(&gpu.download(&kept).data) == bits(&want_states), "states of {case:?}");
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let lengths = prop::collection::vec(prop_oneof![Just(0usize), 1usize..=5, 6usize..=40], 1..=5);
    let dims =
        prop_oneof![(1usize..=20, 1usize..=20), Just((8, 16)), Just((64, 128)), Just((4, 8)), Just((16, 24))];
    let flags = any::<(bool, bool, bool, bool)>();
    (
        lengths,
        dims,
        2usize..=4,
        flags,
        prop_oneof![Just(0usize), Just(8), 1usize..=5],
        any::<u64>().no_shrink(),
    )
        .prop_map(|(lengths, (key, value), width, (bias, silu, x_tokens, y_tokens), gap, seed)| Case {
            lengths,
            dims: [key, value],
            width,
            bias,
            silu,
            x_tokens,
            y_tokens,
            gap,
            seed,
        })
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn results_are_those_of_the_convolution(case in cases()) {
        check::<bf16, bf16>(&case);
        check::<bf16, f32>(&case);
        check::<f32, f32>(&case);
    }

    /// Updates of one token after the other give the same bits as one call.
    #[test]
    fn updates_chain(n in 1usize..=4, dims in prop_oneof![Just([8usize, 16]), Just([3, 5]), Just([64, 128])], width in 2usize..=4,
        tokens in 1usize..=5, seed in any::<u64>().no_shrink()) {
        let [key, value] = dims;
        let channels = 2 * key + value;
        let x: Vec<bf16> = Fill::Normal.elements(n * channels * tokens, seed);
        let weight: Vec<bf16> = Fill::Normal.elements(channels * width, seed ^ 1);
        let states: Vec<bf16> = Fill::Normal.elements(n * channels * (width - 1), seed ^ 2);
        for gpu in kit::devices() {
            let w = gpu.upload(&weight, [channels, width]);
            let input = gpu.upload(&x, [n, channels, tokens]);
            let mut kept = gpu.upload(&states, [n, channels, width - 1]);
            let mut y = gpu.poisoned::<bf16>([n, channels, tokens]);
            let inputs = ConvUpdateInputs { x: input.view(), weight: w.view(), bias: None, conv_state_indices: None };
            let outputs = ConvUpdateOutputs { y: y.view_mut(), conv_states: kept.view_mut() };
            causal_conv1d_update(gpu.stream(), inputs, outputs, ConvActivation::Silu).unwrap();
            let (want, want_states) = (gpu.download(&y).data, gpu.download(&kept).data);
            let mut kept = gpu.upload(&states, [n, channels, width - 1]);
            for t in 0..tokens {
                let one: Vec<bf16> = (0..n * channels).map(|i| x[i * tokens + t]).collect();
                let input = gpu.upload(&one, [n, channels]);
                let [mut q, mut k, mut v] = [key, key, value].map(|c| gpu.poisoned::<bf16>([n, c]));
                let inputs = ConvUpdateSplitInputs { x: input.view(), weight: w.view(), bias: None, conv_state_indices: None };
                let qkv = Qkv { q: q.view_mut(), k: k.view_mut(), v: v.view_mut() };
                causal_conv1d_update_split_qkv(gpu.stream(), inputs, qkv, kept.view_mut(), ConvActivation::Silu).unwrap();
                let rows = [(&q, 0, key), (&k, key, key), (&v, 2 * key, value)];
                for (tensor, first, own) in rows {
                    let got = gpu.download(tensor).data;
                    for (i, got) in got.iter().enumerate() {
                        let (b, c) = (i / own, first + i % own);
                        prop_assert_eq!(got.to_bits(), want[(b * channels + c) * tokens + t].to_bits());
                    }
                }
            }
            prop_assert!(gpu.download(&kept).data == want_states);
        }
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    for gpu in kit::devices() {
        let call = |[q, k, v]: [usize; 3], width: usize, tokens: usize| {
            let x = gpu.upload(&vec![bf16::ONE; 32 * 6], [32, 6]);
            let w = gpu.upload(&vec![bf16::ONE; 32 * width], [32, width]);
            let starts = gpu.upload(&[0, 6], [2]);
            let [mut q, mut k, mut v] = [q, k, v].map(|c| gpu.poisoned::<bf16>([tokens, c]));
            let inputs = ConvSplitInputs {
                x: x.view(),
                weight: w.view(),
                bias: None,
                query_start_loc: starts.view(),
                cache_indices: None,
                has_initial_state: None,
            };
            let qkv = Qkv { q: q.view_mut(), k: k.view_mut(), v: v.view_mut() };
            let refused = causal_conv1d_fwd_split_qkv(gpu.stream(), inputs, qkv, None, ConvActivation::None);
            if refused.is_err() {
                [&q, &k, &v].into_iter().for_each(|y| gpu.assert_untouched(y));
            }
            refused
        };
        call([8, 8, 16], 4, 6).unwrap();
        let op = "causal_conv1d_fwd_split_qkv";
        assert_error(
            call([8, 7, 17], 4, 6),
            kind!(Shape),
            &[op, "k: shape [7, 6], expected [8, 6] (shape of q)"],
        );
        assert_error(
            call([8, 8, 15], 4, 6),
            kind!(Argument),
            &[op, "[8, 8, 15] channels, expected 32 together"],
        );
        assert_error(call([8, 8, 16], 4, 5), kind!(Shape), &[op, "q: shape [8, 5], expected [8, 6]"]);
        assert_error(call([8, 8, 16], 5, 6), kind!(Argument), &[op, "weight: width 5"]);
    }
}
