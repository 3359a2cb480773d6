//! `moe_align_block_size` against the reference, bit for bit, and its refusals.

use hk_moe::{TileLists, moe_align_block_size, moe_align_len, moe_align_workspace, reference};
use hk_testkit::{self as kit, Gpu, assert_error, kind, proptest::prelude::*};

/// Ids of a token are random, some of them outside the experts.
fn random_ids(gates: usize, experts: usize, seed: u64) -> Vec<i32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    (0..gates)
        .map(|_| match next() % 32 {
            0 => -1,
            1 => experts as i32,
            2 => i32::MIN,
            _ => (next() % experts) as i32,
        })
        .collect()
}

#[track_caller]
fn check(
    gpu: &Gpu,
    ids: &[i32],
    [tokens, k]: [usize; 2],
    experts: usize,
    block: usize,
    map: Option<&[i32]>,
    more: usize,
) {
    let len = moe_align_len(tokens, k, experts, block) + more;
    let tiles = len.div_ceil(block) + more / 2;
    let topk = gpu.upload(ids, [tokens, k]);
    let expert_map = map.map(|map| gpu.upload(map, [experts]));
    let (mut sorted, mut expert_ids) = (gpu.poisoned::<i32>([len]), gpu.poisoned::<i32>([tiles]));
    let mut padded = gpu.poisoned::<i32>([1]);
    let mut workspace = gpu.poisoned::<i32>([moe_align_workspace(tokens, k, experts)]);
    let out = TileLists {
        sorted_token_ids: sorted.view_mut(),
        expert_ids: expert_ids.view_mut(),
        num_tokens_post_padded: padded.view_mut(),
    };
    let map_view = expert_map.as_ref().map(|map| map.view());
    moe_align_block_size(gpu.stream(), topk.view(), map_view, out, workspace.view_mut(), experts, block)
        .unwrap();
    let want = reference::moe_align_block_size(ids, experts, block, map, len, tiles);
    let what = format!("{tokens} x {k} of {experts}, tiles of {block}, {}", gpu.spec());
    assert_eq!(gpu.download(&padded).data, [want.num_tokens_post_padded], "{what}");
    assert!(gpu.download(&expert_ids).data == want.expert_ids, "expert_ids: {what}");
    assert!(gpu.download(&sorted).data == want.sorted_token_ids, "sorted_token_ids: {what}");
    for output in [&sorted, &expert_ids, &padded, &workspace] {
        gpu.assert_guards(output);
    }
    gpu.assert_untouched(&topk);
}

#[test]
fn sizes_at_the_borders() {
    for gpu in kit::devices() {
        for (tokens, k, experts, block) in [
            (0, 8, 256, 64),
            (1, 1, 1, 16),
            (1, 32, 1024, 256),
            (63, 2, 8, 32),
            (64, 8, 33, 64),
            (65, 4, 128, 16),
            (256, 32, 1023, 16),
            (257, 32, 1024, 16),
            (1023, 9, 257, 128),
            (65_535, 1, 8, 64),
            (65_536, 1, 1024, 16),
            (65_537, 8, 256, 128),
        ] {
            check(&gpu, &random_ids(tokens * k, experts, 5), [tokens, k], experts, block, None, 0);
        }
    }
}

#[test]
fn all_gates_to_one_expert_and_all_dropped() {
    for gpu in kit::devices() {
        for tokens in [200, 2000] {
            for id in [0, 77, 255, -1, 256] {
                check(&gpu, &vec![id; tokens * 2], [tokens, 2], 256, 32, None, 7);
            }
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn any_ids_are_sorted_as_by_the_reference(
        tokens in kit::size(0..=3000, &[64, 256]), k in kit::size(1..=32, &[8]), experts in kit::size(1..=1024, &[64, 128, 256]),
        block in 4u32..=8, mapped: bool, more in 0usize..40, seed: u64,
    ) {
        let ids = random_ids(tokens * k, experts, seed);
        let map: Vec<i32> = (0..experts as i32).map(|e| if e % 3 == 0 { e / 3 } else { -e }).collect();
        for gpu in kit::devices() {
            check(&gpu, &ids, [tokens, k], experts, 1 << block, mapped.then_some(&map[..]), more);
        }
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    for gpu in kit::devices() {
        let call = |k: usize, experts: usize, block: usize, lens: [usize; 5]| {
            let [sorted, tiles, padded, workspace, map] = lens;
            let ids = gpu.upload(&vec![0; 300 * k], [300, k]);
            let map = gpu.upload(&vec![0; map], [map]);
            let [mut sorted, mut tiles, mut padded, mut workspace] =
                [sorted, tiles, padded, workspace].map(|n| gpu.poisoned::<i32>([n]));
            let out = TileLists {
                sorted_token_ids: sorted.view_mut(),
                expert_ids: tiles.view_mut(),
                num_tokens_post_padded: padded.view_mut(),
            };
            let refused = moe_align_block_size(
                gpu.stream(),
                ids.view(),
                Some(map.view()),
                out,
                workspace.view_mut(),
                experts,
                block,
            );
            if refused.is_err() {
                for output in [&sorted, &tiles, &padded, &workspace] {
                    gpu.assert_untouched(output);
                }
            }
            refused
        };
        let len = moe_align_len(300, 2, 8, 16);
        let good = [len, len.div_ceil(16), 1, moe_align_workspace(300, 2, 8), 8];
        call(2, 8, 16, good).unwrap();
        for (k, experts, block, part) in [
            (2, 0, 16, "experts: 0, expected 1 to 1024"),
            (2, 1025, 16, "experts: 1025, expected 1 to 1024"),
            (33, 8, 16, "topk_ids: k = 33"),
            (0, 8, 16, "topk_ids: k = 0"),
            (2, 8, 0, "block_size: 0"),
            (2, 8, 24, "block_size: 24"),
            (2, 8, 512, "block_size: 512"),
        ] {
            assert_error(call(k, experts, block, good), kind!(Argument), &["moe_align_block_size", part]);
        }
        for (i, arg) in
            ["sorted_token_ids", "expert_ids", "num_tokens_post_padded", "workspace", "expert_map"]
                .iter()
                .enumerate()
        {
            let mut short = good;
            short[i] -= 1;
            assert_error(call(2, 8, 16, short), kind!(Shape), &["moe_align_block_size", arg]);
        }
    }
}
