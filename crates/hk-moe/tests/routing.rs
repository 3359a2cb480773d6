//! `moe_routing`, `moe_bitmatrix` and `moe_expt_data` against the reference, integers bit for bit, and their refusals.

use crate::common::{Numbers, logits};
use hk_core::{Float, bf16, f16};
use hk_moe::{
    Choices, ExptData, Routing, RoutingOptions, Scores, TopkOptions, moe_bitmatrix, moe_bitmatrix_shape,
    moe_block_m, moe_expt_data, moe_max_tiles, moe_routing, moe_routing_workspace, moe_topk, reference,
};
use hk_testkit::{self as kit, Gpu, Refusals, kind, proptest::prelude::*, widen};

/// The choices of `moe_topk`, which has tests of its own, sorted by the reference, and what `moe_routing` makes of the same logits.
#[track_caller]
fn check<T: Float, W: Float>(
    gpu: &Gpu,
    data: &[T],
    [tokens, experts, k]: [usize; 3],
    block_m: usize,
    more: usize,
    topk: TopkOptions,
) {
    let gates = tokens * k;
    let x = gpu.upload(data, [tokens, experts]);
    let (mut ids, mut weights) = (gpu.poisoned::<i32>([tokens, k]), gpu.poisoned::<W>([tokens, k]));
    let out = Choices { weights: weights.view_mut(), ids: ids.view_mut(), bitmatrix: None };
    moe_topk(gpu.stream(), x.view(), None, out, &topk).unwrap();
    let chosen =
        reference::Chosen { ids: gpu.download(&ids).data, weights: widen(&gpu.download(&weights).data) };

    let tiles = moe_max_tiles(gates, experts, block_m) + more;
    let ints = |n: usize| gpu.poisoned::<i32>([n]);
    let [mut gather, mut scatter, mut hist] = [ints(gates), ints(gates), ints(experts)];
    let [mut raw, mut pad, mut map] = [ints(experts + 1), ints(experts + 1), ints(tiles)];
    let (mut scal, mut workspace) =
        (gpu.poisoned::<W>([gates]), ints(moe_routing_workspace(tokens, k, experts)));
    let out = Routing {
        gather_indx: gather.view_mut(),
        scatter_indx: scatter.view_mut(),
        gate_scal: scal.view_mut(),
        expt_hist: hist.view_mut(),
        expt_data: ExptData {
            token_offs_raw: raw.view_mut(),
            token_offs_pad: pad.view_mut(),
            block_pid_map: map.view_mut(),
        },
    };
    let options = RoutingOptions { k, block_m, topk };
    moe_routing(gpu.stream(), x.view(), None, out, workspace.view_mut(), &options).unwrap();

    let want = reference::moe_sort(&chosen, experts);
    let expt = reference::moe_expt_data(&want.expt_hist, block_m, tiles);
    let what = format!("{tokens} tokens, {k} of {experts}, tiles of {block_m}, {}", gpu.spec());
    let all = [
        ("gather_indx", &gather, &want.gather_indx),
        ("scatter_indx", &scatter, &want.scatter_indx),
        ("expt_hist", &hist, &want.expt_hist),
        ("token_offs_raw", &raw, &expt.token_offs_raw),
        ("token_offs_pad", &pad, &expt.token_offs_pad),
        ("block_pid_map", &map, &expt.block_pid_map),
    ];
    for (name, got, want) in all {
        assert!(gpu.download(got).data == *want, "{name}: {what}");
        gpu.assert_guards(got);
    }
    let bits = |v: &[f64]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert!(bits(&widen(&gpu.download(&scal).data)) == bits(&want.gate_scal), "gate_scal: {what}");
    gpu.assert_guards(&scal);
    gpu.assert_guards(&workspace);
}

fn any_check(gpu: &Gpu, size: [usize; 3], block_m: usize, more: usize, seed: u64) {
    let n = size[0] * size[1];
    let scores = if seed & 4 != 0 { Scores::Sigmoid } else { Scores::SoftmaxChosen };
    let topk = TopkOptions { scores, ..TopkOptions::default() };
    match seed % 4 {
        0 => check::<bf16, bf16>(gpu, &logits(n, seed, true), size, block_m, more, topk),
        1 => check::<bf16, f32>(gpu, &logits(n, seed, true), size, block_m, more, topk),
        2 => check::<f16, f16>(gpu, &logits(n, seed, true), size, block_m, more, topk),
        _ => check::<f32, f32>(gpu, &logits(n, seed, true), size, block_m, more, topk),
    }
}

#[test]
fn sizes_at_the_borders() {
    for gpu in kit::devices() {
        for (seed, [tokens, experts, k]) in [
            [0, 256, 8],
            [1, 1, 1],
            [1, 1024, 32],
            [15, 8, 2],
            [16, 33, 32],
            [17, 32, 4],
            [63, 128, 8],
            [64, 256, 8],
            [65, 257, 9],
            [255, 256, 8],
            [256, 1024, 32],
            [257, 1024, 32],
            [371, 257, 9],
            [1023, 128, 4],
            [4097, 384, 8],
        ]
        .into_iter()
        .enumerate()
        {
            any_check(&gpu, [tokens, experts, k], moe_block_m(tokens, k, experts), 0, seed as u64);
        }
    }
}

#[test]
fn gates_around_two_to_the_sixteenth() {
    for gpu in kit::devices() {
        for (seed, [tokens, experts, k]) in
            [[65_535, 3, 1], [65_536, 8, 1], [65_537, 64, 4]].into_iter().enumerate()
        {
            any_check(&gpu, [tokens, experts, k], 128, 0, seed as u64);
        }
    }
}

#[test]
fn all_tokens_to_one_expert() {
    for gpu in kit::devices() {
        for tokens in [200, 2000] {
            for expert in [0, 77, 255] {
                let data: Vec<bf16> = (0..tokens * 256)
                    .map(|i| bf16::from_f32(if i % 256 == expert { 3.0 } else { -1.0 }))
                    .collect();
                check::<bf16, bf16>(&gpu, &data, [tokens, 256, 1], 64, 5, TopkOptions::default());
            }
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn gates_are_sorted_as_by_the_reference(
        tokens in kit::size(0..=900, &[64, 256]), experts in kit::size(1..=1024, &[64, 128, 256]), k in kit::size(1..=32, &[8]),
        block in 4u32..=8, more in 0usize..40, seed: u64,
    ) {
        for gpu in kit::devices() {
            any_check(&gpu, [tokens, experts, k.min(experts)], 1 << block, more, seed);
        }
    }

    #[test]
    fn bits_are_counted(
        tokens in kit::size(0..=5000, &[32, 64, 1024]), words in 0usize..=32, more in 0usize..70, part in 1usize..=9, seed: u64,
    ) {
        let (rows, part) = (tokens + more, 32 * part);
        let mut numbers = Numbers(seed);
        let bits: Vec<i32> = (0..words * rows).map(|_| (numbers.next() << 16 ^ numbers.next()) as i32).collect();
        for gpu in kit::devices() {
            let x = gpu.upload(&bits, [words, rows]);
            let mut hist = gpu.poisoned::<i32>([32 * words]);
            let mut partials = gpu.poisoned::<i32>([tokens.div_ceil(part), 32 * words]);
            moe_bitmatrix(gpu.stream(), x.view(), hist.view_mut(), partials.view_mut(), tokens, part).unwrap();
            if words == 0 {
                continue;
            }
            let want = reference::moe_bitmatrix(&bits, rows, tokens, part);
            prop_assert!(gpu.download(&hist).data == want.0, "{}", gpu.spec());
            prop_assert!(gpu.download(&partials).data == want.1, "{}", gpu.spec());
            gpu.assert_guards(&hist);
            gpu.assert_guards(&partials);
        }
    }

    #[test]
    fn offsets_follow_from_counts(
        experts in kit::size(1..=1024, &[64, 256]), most in kit::size(1..=500, &[16, 64]), block in 4u32..=8, more in 0usize..40, seed: u64,
    ) {
        let mut numbers = Numbers(seed);
        let hist: Vec<i32> = (0..experts).map(|_| (numbers.next() as usize % most) as i32).collect();
        let (gates, block) = (hist.iter().sum::<i32>() as usize, 1 << block);
        let tiles = moe_max_tiles(gates, experts, block) + more;
        for gpu in kit::devices() {
            let x = gpu.upload(&hist, [experts]);
            let [mut raw, mut pad, mut map] = [experts + 1, experts + 1, tiles].map(|n| gpu.poisoned::<i32>([n]));
            let out = ExptData {
                token_offs_raw: raw.view_mut(),
                token_offs_pad: pad.view_mut(),
                block_pid_map: map.view_mut(),
            };
            moe_expt_data(gpu.stream(), x.view(), out, gates, block).unwrap();
            let want = reference::moe_expt_data(&hist, block, tiles);
            let all = [(&raw, want.token_offs_raw), (&pad, want.token_offs_pad), (&map, want.block_pid_map)];
            for (i, (got, want)) in all.into_iter().enumerate() {
                prop_assert!(gpu.download(got).data == want, "output {i} on {}", gpu.spec());
                gpu.assert_guards(got);
            }
        }
    }
}

#[test]
fn bits_of_a_choice_count_its_gates() {
    for gpu in kit::devices() {
        let (tokens, experts, k) = (1003, 200, 5);
        let x = gpu.upload(&logits::<f32>(tokens * experts, 1, true), [tokens, experts]);
        let (mut w, mut ids) = (gpu.poisoned::<f32>([tokens, k]), gpu.poisoned::<i32>([tokens, k]));
        let [words, rows] = moe_bitmatrix_shape(tokens, experts);
        let mut bits = gpu.poisoned::<i32>([words, rows]);
        let out = Choices { weights: w.view_mut(), ids: ids.view_mut(), bitmatrix: Some(bits.view_mut()) };
        moe_topk(gpu.stream(), x.view(), None, out, &TopkOptions::default()).unwrap();
        let mut hist = gpu.poisoned::<i32>([32 * words]);
        let mut partials = gpu.poisoned::<i32>([tokens.div_ceil(32), 32 * words]);
        let (hist_view, partials_view) = (hist.view_mut(), partials.view_mut());
        moe_bitmatrix(gpu.stream(), bits.view(), hist_view, partials_view, tokens, 32).unwrap();
        let mut want = vec![0; 32 * words];
        gpu.download(&ids).data.iter().for_each(|&id| want[id as usize] += 1);
        assert_eq!(gpu.download(&hist).data, want);
        assert_eq!(want.iter().sum::<i32>() as usize, tokens * k);
    }
}

/// Counts that no routing gives: nothing faults, and nothing is written beside the outputs.
#[test]
fn counts_that_are_wrong_stay_within_the_outputs() {
    for gpu in kit::sanitized_devices() {
        for hist in [vec![-1; 300], vec![i32::MAX; 300], vec![i32::MIN; 1024], vec![1 << 20; 5]] {
            let experts = hist.len();
            let tiles = moe_max_tiles(1 << 18, experts, 16);
            let x = gpu.upload(&hist, [experts]);
            let [mut raw, mut pad, mut map] =
                [experts + 1, experts + 1, tiles].map(|n| gpu.poisoned::<i32>([n]));
            let out = ExptData {
                token_offs_raw: raw.view_mut(),
                token_offs_pad: pad.view_mut(),
                block_pid_map: map.view_mut(),
            };
            moe_expt_data(gpu.stream(), x.view(), out, 1 << 18, 16).unwrap();
            gpu.download(&map);
            for output in [&raw, &pad, &map] {
                gpu.assert_guards(output);
            }
        }
    }
}

/// One launch and two: a graph has the results of the first call each time, though blocks count arrivals in the workspace.
#[test]
fn graphs_replay() {
    const EXPERTS: usize = 40;
    for gpu in kit::devices() {
        for tokens in [70, 300] {
            let options = RoutingOptions { k: 4, block_m: 16, topk: TopkOptions::default() };
            let gates = tokens * options.k;
            let tiles = moe_max_tiles(gates, EXPERTS, options.block_m);
            let x = gpu.upload(&logits::<f32>(tokens * EXPERTS, 5, false), [tokens, EXPERTS]);
            let sizes = [gates, gates, EXPERTS, EXPERTS + 1, EXPERTS + 1, tiles];
            let mut ints = sizes.map(|n| gpu.poisoned::<i32>([n]));
            let mut scal = gpu.poisoned::<f32>([gates]);
            let mut workspace = gpu.poisoned::<i32>([moe_routing_workspace(tokens, options.k, EXPERTS)]);
            let mut route = || {
                let [gather, scatter, hist, raw, pad, map] = ints.each_mut().map(|t| t.view_mut());
                let expt_data = ExptData { token_offs_raw: raw, token_offs_pad: pad, block_pid_map: map };
                let out = Routing {
                    gather_indx: gather,
                    scatter_indx: scatter,
                    gate_scal: scal.view_mut(),
                    expt_hist: hist,
                    expt_data,
                };
                moe_routing(gpu.stream(), x.view(), None, out, workspace.view_mut(), &options)
            };
            route().unwrap();
            let graph = gpu.stream().capture(&mut route).unwrap();
            let all = |ints: &[kit::Tensor<i32>; 6]| ints.each_ref().map(|t| gpu.download(t).data);
            let (want, weights) = (all(&ints), gpu.download(&scal).data);
            for _ in 0..3 {
                // SAFETY: all tensors are alive, and only this thread uses them.
                unsafe { graph.launch(gpu.stream()).unwrap() };
                assert!(all(&ints) == want && gpu.download(&scal).data == weights, "{tokens} tokens");
            }
        }
    }
}

#[test]
fn more_than_one_launch_only_above_256_tokens() {
    assert_eq!(moe_routing_workspace(256, 8, 128), 32 + 2 * 256 * 8);
    assert!(moe_routing_workspace(257, 8, 128) > 32 + 2 * 257 * 8);
    assert_eq!(moe_routing_workspace(usize::MAX, 8, 128), usize::MAX);
    assert_eq!(
        [1, 8, 9, 64, 65, 1 << 20].map(|mean| moe_block_m(32 * mean, 8, 256)),
        [16, 16, 64, 64, 128, 128]
    );
    assert_eq!([moe_block_m(0, 8, 0), moe_block_m(usize::MAX, 8, 8)], [16, 128]);
    assert_eq!(
        [moe_max_tiles(8, 256, 16), moe_max_tiles(256, 256, 16), moe_max_tiles(257, 256, 16)],
        [8, 256, 256]
    );
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let options = RoutingOptions { k: 4, block_m: 16, topk: TopkOptions::default() };
    let tiles = moe_max_tiles(20, 24, 16);
    Refusals::new(options, |stream, tensors, options| {
        let out = Routing {
            gather_indx: tensors.output("gather_indx"),
            scatter_indx: tensors.output("scatter_indx"),
            gate_scal: tensors.output::<bf16>("gate_scal"),
            expt_hist: tensors.output("expt_hist"),
            expt_data: ExptData {
                token_offs_raw: tensors.output("token_offs_raw"),
                token_offs_pad: tensors.output("token_offs_pad"),
                block_pid_map: tensors.output("block_pid_map"),
            },
        };
        let (logits, bias) = (tensors.input::<bf16>("logits"), tensors.optional_input("bias"));
        moe_routing(stream, logits, bias, out, tensors.output("workspace"), &options)
    })
    .input::<bf16>("logits", [5, 24])
    .output::<i32>("gather_indx", [20])
    .output::<i32>("scatter_indx", [20])
    .output::<bf16>("gate_scal", [20])
    .output::<i32>("expt_hist", [24])
    .output::<i32>("token_offs_raw", [25])
    .output::<i32>("token_offs_pad", [25])
    .output::<i32>("block_pid_map", [tiles])
    .output::<i32>("workspace", [moe_routing_workspace(5, 4, 24)])
    .accepts(|_| {})
    .refuses(kind!(Shape), &["moe_routing: gather_indx"], |call| call.shape("gather_indx", [19]))
    .refuses(kind!(Shape), &["moe_routing: scatter_indx"], |call| call.shape("scatter_indx", [21]))
    .refuses(kind!(Shape), &["moe_routing: gate_scal"], |call| call.shape("gate_scal", [5]))
    .refuses(kind!(Shape), &["moe_routing: expt_hist"], |call| call.shape("expt_hist", [25]))
    .refuses(kind!(Shape), &["moe_routing: token_offs_raw"], |call| call.shape("token_offs_raw", [24]))
    .refuses(kind!(Shape), &["moe_routing: token_offs_pad"], |call| call.shape("token_offs_pad", [24]))
    .refuses(kind!(Shape), &["block_pid_map", "moe_max_tiles"], |call| {
        call.shape("block_pid_map", [tiles - 1]);
    })
    .refuses(kind!(Shape), &["workspace", "moe_routing_workspace"], |call| {
        call.shape("workspace", [moe_routing_workspace(5, 4, 24) - 1]);
    })
    .refuses(kind!(Argument), &["k: k = 33"], |call| call.options.k = 33)
    .refuses(kind!(Argument), &["block_m: 48"], |call| call.options.block_m = 48)
    .refuses(kind!(Argument), &["block_m: 0"], |call| call.options.block_m = 0)
    .refuses_other_devices();

    Refusals::new((20, 16), |stream, tensors, (gates, block_m)| {
        let out = ExptData {
            token_offs_raw: tensors.output("token_offs_raw"),
            token_offs_pad: tensors.output("token_offs_pad"),
            block_pid_map: tensors.output("block_pid_map"),
        };
        moe_expt_data(stream, tensors.input("hist"), out, gates, block_m)
    })
    .input::<i32>("hist", [24])
    .output::<i32>("token_offs_raw", [25])
    .output::<i32>("token_offs_pad", [25])
    .output::<i32>("block_pid_map", [20])
    .accepts(|_| {})
    .refuses(kind!(Shape), &["moe_expt_data: token_offs_raw"], |call| call.shape("token_offs_raw", [24]))
    .refuses(kind!(Shape), &["moe_expt_data: token_offs_pad"], |call| call.shape("token_offs_pad", [26]))
    .refuses(kind!(Shape), &["moe_expt_data: block_pid_map"], |call| call.shape("block_pid_map", [19]))
    .refuses(kind!(Argument), &["hist: 1025"], |call| call.shape("hist", [1025]))
    .refuses(kind!(Argument), &["block_m: 17"], |call| call.options.1 = 17)
    .refuses(kind!(TooLarge), &["gates: 524289 gates"], |call| call.options.0 = (1 << 19) + 1)
    .refuses_other_devices();

    Refusals::new((50, 32), |stream, tensors, (tokens, part)| {
        let (hist, partials) = (tensors.output("hist"), tensors.output("partials"));
        moe_bitmatrix(stream, tensors.input("bitmatrix"), hist, partials, tokens, part)
    })
    .input::<i32>("bitmatrix", [2, 64])
    .output::<i32>("hist", [64])
    .output::<i32>("partials", [2, 64])
    .accepts(|_| {})
    .refuses(kind!(Shape), &["moe_bitmatrix: hist"], |call| call.shape("hist", [63]))
    .refuses(kind!(Shape), &["moe_bitmatrix: partials"], |call| call.shape("partials", [1, 64]))
    .refuses(kind!(Argument), &["tokens: 65"], |call| call.options.0 = 65)
    .refuses(kind!(Argument), &["part: 0"], |call| call.options.1 = 0)
    .refuses(kind!(Argument), &["part: 48"], |call| call.options.1 = 48)
    .refuses(kind!(Argument), &["bitmatrix: 33 words"], |call| call.shape("bitmatrix", [33, 64]))
    .refuses(kind!(Overlap), &["bitmatrix", "hist"], |call| call.overlap("bitmatrix", "hist", 64))
    .refuses_other_devices();
}
