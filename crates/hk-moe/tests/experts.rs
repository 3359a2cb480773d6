//! The expert GEMMs: what the registry's cases do not show. Lists of any origin, masked rows, bits, refusals.

use crate::common::Numbers;
use hk_core::{Profile, bf16};
use hk_moe::reference::{self, EXPERT_TERMS, ExpertProblem};
use hk_moe::{
    ExpertInputs, ExpertScales, ExpertTile, MaskedRows, SortedRows, TileLists, moe_align_block_size,
    moe_align_len, moe_align_workspace, moe_op, moe_op_e2e, moe_op_masked, moe_op_silu_fused,
};
use hk_testkit::{
    self as kit, Gpu, HostTensorF64, Refusals, Tensor, Tolerance, kind, proptest::prelude::*, widen,
};

const TOLERANCE: Tolerance = Tolerance::Sum { terms: EXPERT_TERMS };

fn values(n: usize, seed: u64) -> Vec<bf16> {
    let mut numbers = Numbers(seed ^ 0x77);
    (0..n).map(|_| bf16::from_f32((numbers.next() % 512) as f32 / 128.0 - 2.0)).collect()
}

fn ids(gates: usize, experts: usize, seed: u64) -> Vec<i32> {
    let mut numbers = Numbers(seed);
    (0..gates).map(|_| (numbers.next() % (experts as u64 + 2)) as i32 - 1).collect()
}

/// The lists of [`moe_align_block_size`] on a device.
struct Lists {
    sorted: Tensor<i32>,
    tiles: Tensor<i32>,
    padded: Tensor<i32>,
    ids: Tensor<i32>,
    block: usize,
    experts: usize,
}

impl Lists {
    fn new(
        gpu: &Gpu,
        all: &[i32],
        [tokens, k, experts]: [usize; 3],
        block: usize,
        map: Option<&[i32]>,
    ) -> Self {
        let len = moe_align_len(tokens, k, experts, block);
        let ids = gpu.upload(all, [tokens, k]);
        let mut sorted = gpu.poisoned::<i32>([len]);
        let mut tiles = gpu.poisoned::<i32>([len.div_ceil(block)]);
        let mut padded = gpu.poisoned::<i32>([1]);
        let mut workspace = gpu.poisoned::<i32>([moe_align_workspace(tokens, k, experts)]);
        let map = map.map(|map| gpu.upload(map, [experts]));
        let out = TileLists {
            sorted_token_ids: sorted.view_mut(),
            expert_ids: tiles.view_mut(),
            num_tokens_post_padded: padded.view_mut(),
        };
        let map = map.as_ref().map(|map| map.view());
        moe_align_block_size(gpu.stream(), ids.view(), map, out, workspace.view_mut(), experts, block)
            .unwrap();
        Self { sorted, tiles, padded, ids, block, experts }
    }

    fn view(&self) -> SortedRows<'_> {
        SortedRows {
            sorted_token_ids: self.sorted.view(),
            expert_ids: self.tiles.view(),
            num_tokens_post_padded: self.padded.view(),
            block_size: self.block,
            topk_ids: Some((self.ids.view(), self.experts)),
        }
    }
}

fn plain<'a>(a: &'a [f64], w: &'a [f64], k: usize, w_rows: usize) -> ExpertProblem<'a> {
    ExpertProblem {
        a,
        w,
        k,
        w_rows,
        bias: None,
        weights: None,
        weight_first: true,
        gate: None,
        activation: None,
        round: None,
    }
}

proptest! {
    #![proptest_config(kit::config())]

    /// Experts that are on another rank, gates of no expert, tiles of all sizes, rows with padding between them.
    #[test]
    fn outputs_are_those_of_the_reference(
        tokens in kit::size(1..=90, &[16, 64]), k in 1usize..=4, experts in 1usize..=9, chunks in kit::size(1..=40, &[8, 16]),
        n in kit::size(1..=150, &[32, 64]), block in 4u32..=8, mapped: bool, of_gates: bool, weighted: bool, more in 0usize..4, seed: u64,
    ) {
        let (gates, cols) = (tokens * k, 8 * chunks);
        let all = ids(gates, experts, seed);
        let map: Vec<i32> = (0..experts as i32).map(|e| if e % 3 == 1 { -1 } else { e / 2 }).collect();
        let local = if mapped { experts.div_ceil(2) } else { experts };
        let expert_of = |id: i32| {
            let id = usize::try_from(id).ok().filter(|&id| id < experts)?;
            if mapped { usize::try_from(map[id]).ok() } else { Some(id) }
        };
        let a_rows = if of_gates { gates } else { tokens };
        let (x, matrices) = (values(a_rows * cols, seed), values(local * n * cols, seed + 1));
        let scale: Vec<f32> = (0..gates).map(|g| (g % 7) as f32 * 0.25 - 0.5).collect();
        let rows: Vec<_> = all.iter().enumerate().map(|(g, &id)| Some((if of_gates { g } else { g / k }, expert_of(id)?))).collect();
        let (x64, w64, s64) = (widen(&x), widen(&matrices), widen(&scale));
        let weights = weighted.then_some(&s64[..]);
        let (want, magnitudes) = reference::expert_gemm(&ExpertProblem { weights, ..plain(&x64, &w64, cols, n) }, &rows);
        let want = HostTensorF64::new([gates, n], want).with_magnitudes(magnitudes);
        for gpu in kit::devices() {
            let lists = Lists::new(&gpu, &all, [tokens, k, experts], 1 << block, mapped.then_some(&map[..]));
            let a = gpu.upload_rows(&x, [a_rows, cols], cols + 8 * more);
            let w = gpu.upload(&matrices, [local, n, cols]);
            let of_gate = gpu.upload(&scale, [tokens, k]);
            let mut y = gpu.poisoned_rows::<f32>([gates, n], n + more);
            let weights = weighted.then(|| of_gate.view().into());
            let inputs = ExpertInputs { weights, ..ExpertInputs::new(a.view(), w.view()) };
            moe_op(gpu.stream(), inputs, lists.view(), y.view_mut(), None).unwrap();
            kit::assert_near(&gpu.download(&y), &want, TOLERANCE);
            gpu.assert_guards(&y);
        }
    }

    #[test]
    fn masked_rows_are_those_of_the_reference(
        experts in 1usize..=6, rows in kit::size(1..=140, &[16, 64, 128]), chunks in kit::size(1..=40, &[8]), n in kit::size(1..=90, &[64]),
        seed: u64,
    ) {
        let cols = 8 * chunks;
        let mut numbers = Numbers(seed);
        // Some counts are none.
        let counts: Vec<i32> = (0..experts).map(|_| (numbers.next() % (rows as u64 + 8)) as i32 - 4).collect();
        let (x, matrices) = (values(experts * rows * cols, seed), values(experts * n * cols, seed + 1));
        let (x64, w64) = (widen(&x), widen(&matrices));
        let all: Vec<_> = (0..experts * rows).map(|i| Some((i, i / rows))).collect();
        let (want, magnitudes) = reference::expert_gemm(&plain(&x64, &w64, cols, n), &all);
        for gpu in kit::devices() {
            let a = gpu.upload(&x, [experts, rows, cols]);
            let w = gpu.upload(&matrices, [experts, n, cols]);
            let counts_there = gpu.upload(&counts, [experts]);
            let mut y = gpu.upload(&vec![0.25f32; experts * rows * n], [experts, rows, n]);
            moe_op_masked(gpu.stream(), ExpertInputs::new(a.view(), w.view()), MaskedRows { counts: counts_there.view() }, y.view_mut(), None, None)
                .unwrap();
            // Rows past the counts stay as they were.
            let computed = |i: usize| ((i / n % rows) as i32) < counts[i / n / rows];
            let expected = (0..want.len()).map(|i| if computed(i) { want[i] } else { 0.25 }).collect();
            let bounds = (0..want.len()).map(|i| if computed(i) { magnitudes[i] } else { 0.0 }).collect();
            kit::assert_near(&gpu.download(&y), &HostTensorF64::new([experts, rows, n], expected).with_magnitudes(bounds), TOLERANCE);
            gpu.assert_guards(&y);
        }
    }
}

#[test]
fn gathered_rows_and_block_sizes_change_no_bit() {
    let (tokens, k, experts, n, cols) = (40, 3, 4, 96, 264);
    let all = ids(tokens * k, experts, 3);
    let (x, matrices) = (values(tokens * cols, 4), values(experts * n * cols, 5));
    let gathered: Vec<bf16> = (0..tokens * k).flat_map(|g| &x[g / k * cols..][..cols]).copied().collect();
    for gpu in kit::devices() {
        let w = gpu.upload(&matrices, [experts, n, cols]);
        let (tokens_first, gates) =
            (gpu.upload(&x, [tokens, cols]), gpu.upload(&gathered, [tokens * k, cols]));
        let run = |a: &Tensor<bf16>, block, tile| {
            let lists = Lists::new(&gpu, &all, [tokens, k, experts], block, None);
            let mut y = gpu.poisoned::<bf16>([tokens * k, n / 2]);
            let inputs = ExpertInputs::new(a.view(), w.view());
            moe_op_silu_fused(gpu.stream(), inputs, lists.view(), y.view_mut(), tile).unwrap();
            gpu.download(&y)
        };
        for (block, tile) in [(16, ExpertTile::T16x32), (64, ExpertTile::T64x64), (128, ExpertTile::T128x128)]
        {
            let first = run(&tokens_first, block, Some(tile));
            kit::assert_bits(&run(&gates, block, Some(tile)), &first.data);
            // Larger list tiles, the same kernel.
            kit::assert_bits(&run(&gates, 256, Some(tile)), &first.data);
        }
    }
}

#[test]
fn experts_without_gates_are_not_read_and_no_nan_comes_of_them() {
    let (tokens, experts, n, cols) = (50, 8, 64, 128);
    let all: Vec<i32> = (0..tokens as i32).map(|t| if t % 2 == 0 { 1 } else { 6 }).collect();
    let x = values(tokens * cols, 4);
    let mut matrices = values(experts * n * cols, 5);
    for (i, v) in matrices.iter_mut().enumerate() {
        if i / (n * cols) != 1 && i / (n * cols) != 6 {
            *v = bf16::NAN;
        }
    }
    for gpu in kit::devices() {
        let (a, w) = (gpu.upload(&x, [tokens, cols]), gpu.upload(&matrices, [experts, n, cols]));
        for block in [16, 64, 128, 256] {
            let lists = Lists::new(&gpu, &all, [tokens, 1, experts], block, None);
            let mut y = gpu.poisoned::<f32>([tokens, n]);
            moe_op(gpu.stream(), ExpertInputs::new(a.view(), w.view()), lists.view(), y.view_mut(), None)
                .unwrap();
            assert!(gpu.download(&y).data.iter().all(|v| v.is_finite()));
        }
    }
}

/// Lists that no routing wrote: nothing out of bounds, nothing that does not end.
#[test]
fn lists_are_not_trusted() {
    let (tokens, k, experts, n, cols, block) = (20, 2, 3, 48, 64, 64);
    let len = moe_align_len(tokens, k, experts, block);
    let (x, matrices) = (values(tokens * cols, 4), values(experts * n * cols, 5));
    for gpu in kit::sanitized_devices() {
        let (a, w) = (gpu.upload(&x, [tokens, cols]), gpu.upload(&matrices, [experts, n, cols]));
        for (gate, tile, padded) in
            [(i32::MAX, 1, 512), (-7, 2, i32::MAX), (39, -5, -1), (40, i32::MAX, 128), (0, i32::MIN, 1 << 20)]
        {
            let sorted = gpu.upload(&vec![gate; len], [len]);
            let tiles = gpu.upload(&vec![tile; len.div_ceil(block)], [len.div_ceil(block)]);
            let (padded, ids) =
                (gpu.upload(&[padded], [1]), gpu.upload(&vec![gate; tokens * k], [tokens, k]));
            let mut y = gpu.poisoned::<f32>([tokens * k, n]);
            let rows = SortedRows {
                sorted_token_ids: sorted.view(),
                expert_ids: tiles.view(),
                num_tokens_post_padded: padded.view(),
                block_size: block,
                topk_ids: Some((ids.view(), experts)),
            };
            // A gate that is listed many times is written many times, by blocks that race.
            if gate == 0 || gate == 39 {
                continue;
            }
            moe_op(gpu.stream(), ExpertInputs::new(a.view(), w.view()), rows, y.view_mut(), None).unwrap();
            gpu.stream().synchronize().unwrap();
            gpu.assert_guards(&y);
        }
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let refusals = |block: usize, tile: Option<ExpertTile>| {
        Refusals::new((), move |stream, tensors, ()| {
            let rows = SortedRows {
                sorted_token_ids: tensors.input("sorted_token_ids"),
                expert_ids: tensors.input("expert_ids"),
                num_tokens_post_padded: tensors.input("num_tokens_post_padded"),
                block_size: block,
                topk_ids: Some((tensors.input("topk_ids"), 4)),
            };
            let inputs = ExpertInputs {
                bias: tensors.optional_input::<f32>("bias").map(Into::into),
                weights: tensors.optional_input::<f32>("topk_weights").map(Into::into),
                ..ExpertInputs::new(tensors.input::<bf16>("a"), tensors.input::<bf16>("w"))
            };
            moe_op(stream, inputs, rows, tensors.output::<bf16>("y"), tile)
        })
        .input::<bf16>("a", [6, 64])
        .input::<bf16>("w", [4, 32, 64])
        .input::<f32>("bias", [4, 32])
        .input::<f32>("topk_weights", [6, 2])
        .input::<i32>("sorted_token_ids", [256])
        .input::<i32>("expert_ids", [16])
        .input::<i32>("num_tokens_post_padded", [1])
        .input::<i32>("topk_ids", [6, 2])
        .output::<bf16>("y", [12, 32])
    };
    refusals(64, None)
        .accepts(|_| {})
        .accepts(|call| call.without("bias"))
        .refuses(kind!(Shape), &["moe_op: w", "K of a"], |call| call.shape("w", [4, 32, 72]))
        .refuses(kind!(Shape), &["moe_op: a", "16 bytes"], |call| {
            call.shape("a", [6, 60]);
            call.shape("w", [4, 32, 60]);
        })
        .refuses(kind!(Shape), &["moe_op: y"], |call| call.shape("y", [12, 31]))
        .refuses(kind!(Shape), &["moe_op: y", "a multiple of 6"], |call| call.shape("y", [13, 32]))
        .refuses(kind!(Shape), &["moe_op: bias"], |call| call.shape("bias", [4, 31]))
        .refuses(kind!(Shape), &["moe_op: topk_weights"], |call| call.shape("topk_weights", [6, 3]))
        .refuses(kind!(Shape), &["moe_op: topk_ids"], |call| call.shape("topk_ids", [5, 2]))
        .refuses(kind!(Shape), &["moe_op: sorted_token_ids"], |call| call.shape("sorted_token_ids", [63]))
        .refuses(kind!(Shape), &["moe_op: expert_ids"], |call| call.shape("expert_ids", [3]))
        .refuses(kind!(Shape), &["moe_op: num_tokens_post_padded"], |call| {
            call.shape("num_tokens_post_padded", [2])
        })
        .refuses_overlaps()
        .refuses_other_devices();
    refusals(24, None).refuses(kind!(Argument), &["moe_op: block_size: 24"], |_| {});
    refusals(64, Some(ExpertTile::T128x128)).refuses(
        kind!(Argument),
        &["moe_op: tile", "list tiles of 64"],
        |_| {},
    );
}

/// Weights that are widened as they are loaded have no kernel of 128 x 256.
#[test]
fn a_tile_without_a_kernel_is_refused() {
    Refusals::new((), |stream, tensors, ()| {
        let rows = SortedRows {
            sorted_token_ids: tensors.input("sorted_token_ids"),
            expert_ids: tensors.input("expert_ids"),
            num_tokens_post_padded: tensors.input("num_tokens_post_padded"),
            block_size: 256,
            topk_ids: None,
        };
        let inputs = ExpertInputs {
            scales: ExpertScales::Rows { a: None, w: tensors.input("w_scale") },
            ..ExpertInputs::new(tensors.input::<bf16>("a"), tensors.input::<i8>("w"))
        };
        moe_op(stream, inputs, rows, tensors.output::<bf16>("y"), Some(ExpertTile::T128x256))
    })
    .input::<bf16>("a", [6, 64])
    .input::<i8>("w", [4, 32, 64])
    .input::<f32>("w_scale", [4, 32])
    .input::<i32>("sorted_token_ids", [256])
    .input::<i32>("expert_ids", [16])
    .input::<i32>("num_tokens_post_padded", [1])
    .output::<bf16>("y", [12, 32])
    .refuses(kind!(Argument), &["moe_op: tile: T128x256", "T128x128, T64x64"], |_| {});
}

/// On a device of one CU, the few blocks of 16 x 32 take many tiles each: the same bits as on a whole device.
#[test]
fn blocks_that_take_many_tiles_change_no_bit() {
    let (tokens, k, experts, n, cols) = (60, 2, 5, 200, 1032);
    let all = ids(tokens * k, experts, 8);
    let (x, matrices) = (values(tokens * cols, 9), values(experts * n * cols, 10));
    let run = |gpu: &Gpu| {
        let (a, w) = (gpu.upload(&x, [tokens, cols]), gpu.upload(&matrices, [experts, n, cols]));
        let lists = Lists::new(gpu, &all, [tokens, k, experts], 16, None);
        let unlisted = SortedRows { topk_ids: None, ..lists.view() };
        [lists.view(), unlisted].map(|rows| {
            let mut y = gpu.upload(&vec![0.0f32; tokens * k * n], [tokens * k, n]);
            moe_op(gpu.stream(), ExpertInputs::new(a.view(), w.view()), rows, y.view_mut(), None).unwrap();
            gpu.download(&y).data
        })
    };
    for arch in ["gfx942", "gfx950"] {
        let [want, others] = run(&Gpu::open(&format!("emu:{arch}")));
        assert!(
            want == others && want.iter().any(|&v| v != 0.0),
            "rows of no expert are zero, or as they were"
        );
        let small = Gpu::open(&format!("emu:{arch}?cus=1&sanitize=all&details=true"));
        assert!(run(&small) == [want.clone(), want], "{arch}");
    }
}

/// Both GEMMs of a layer leave `h` and `y` in memory, and no partial sums.
#[test]
fn both_gemms_of_a_layer_write_nothing_else() {
    let (tokens, k, experts, inner, cols) = (20, 2, 4, 64, 256);
    let (gates, all) = (tokens * k, (0..40).map(|g| g % experts as i32).collect::<Vec<_>>());
    let (x, w1, w2) =
        (values(tokens * cols, 4), values(experts * 2 * inner * cols, 5), values(experts * cols * inner, 6));
    for gpu in ["emu:gfx942?details=true", "emu:gfx950?details=true"].map(Gpu::open) {
        let w1 = gpu.upload(&w1, [experts, 2 * inner, cols]);
        let (x, w2) = (gpu.upload(&x, [tokens, cols]), gpu.upload(&w2, [experts, cols, inner]));
        for block in [16, 64, 128] {
            let lists = Lists::new(&gpu, &all, [tokens, k, experts], block, None);
            let mut h = gpu.poisoned::<bf16>([gates, inner]);
            let mut y = gpu.poisoned::<f32>([gates, cols]);
            let w = [w1.view().into(), w2.view().into()];
            gpu.stream().take_profiles().unwrap();
            moe_op_e2e(gpu.stream(), x.view(), w, None, lists.view(), h.view_mut(), y.view_mut()).unwrap();
            let profiles = gpu.stream().take_profiles().unwrap();
            let launches: u64 = profiles.iter().map(|profile| profile.launches).sum();
            let details = |profile: &Profile| profile.counters.details.unwrap_or_default();
            let written: u64 = profiles.iter().map(|p| details(p).distinct_written_bytes).sum();
            assert_eq!((launches, written), (2, (gates * (2 * inner + 4 * cols)) as u64), "rows of {block}");
        }
    }
}
