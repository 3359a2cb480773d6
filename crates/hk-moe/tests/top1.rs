//! `moe_routing_sigmoid_top1_fused` against the reference, and its refusals.

use crate::common::Numbers;
use hk_core::{Float, bf16, f16};
use hk_gemm::Half;
use hk_moe::{moe_routing_sigmoid_top1_fused, moe_top1_workspace, reference};
use hk_testkit::{self as kit, Gpu, Refusals, kind, proptest::prelude::*, widen};

/// Multiples of 1/8 up to 1/2, whose sums in `f32` are exact: equal logits are many.
fn eighths<T: Float>(n: usize, seed: u64) -> Vec<T> {
    let mut numbers = Numbers(seed);
    (0..n).map(|_| T::from_f64((numbers.next() % 9) as f64 / 8.0 - 0.5)).collect()
}

struct Problem<T> {
    x: Vec<T>,
    w: Vec<T>,
    size: [usize; 3],
}

impl<T: Half> Problem<T> {
    fn new([tokens, cols, experts]: [usize; 3], seed: u64) -> Self {
        let size = [tokens, cols, experts];
        Self { x: eighths(tokens * cols, seed), w: eighths(cols * experts, seed ^ 1), size }
    }

    /// Ids, and weights, with rows of operands `more` elements apart.
    fn run(&self, gpu: &Gpu, slots: usize, more: usize) -> (Vec<i32>, Vec<f32>) {
        let [tokens, cols, experts] = self.size;
        let x = gpu.upload_rows(&self.x, [tokens, cols], cols + more);
        let w = gpu.upload_rows(&self.w, [cols, experts], experts + more);
        let (mut ids, mut weights) =
            (gpu.poisoned::<i32>([tokens, slots]), gpu.poisoned::<f32>([tokens, slots]));
        let len = moe_top1_workspace(gpu.stream().device().info(), tokens, cols, experts);
        let mut workspace = gpu.poisoned::<i32>([len]);
        moe_routing_sigmoid_top1_fused(
            gpu.stream(),
            x.view(),
            w.view(),
            ids.view_mut(),
            weights.view_mut(),
            workspace.view_mut(),
        )
        .unwrap();
        gpu.assert_guards(&ids);
        gpu.assert_guards(&weights);
        gpu.assert_guards(&workspace);
        (gpu.download(&ids).data, gpu.download(&weights).data)
    }

    #[track_caller]
    fn check(&self, gpu: &Gpu, slots: usize, more: usize) {
        let (ids, weights) = self.run(gpu, slots, more);
        let want = reference::moe_routing_sigmoid_top1_fused(
            &widen(&self.x),
            &widen(&self.w),
            self.size[1],
            slots == 2,
        );
        let what = format!("{:?}, {}", self.size, gpu.spec());
        assert!(ids == want.ids, "ids: {what}");
        for (got, want) in weights.iter().zip(&want.weights) {
            assert!((f64::from(*got) - want).abs() <= 1e-6 * want, "{got}, not {want}: {what}");
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn matches_the_reference(
        tokens in kit::size(1..=70, &[16, 32]), cols in kit::size(1..=1200, &[512, 1024]), experts in kit::size(1..=300, &[16, 128]),
        slots in 1usize..=2, more in 0usize..9, half: bool, seed: u64,
    ) {
        let more = if more % 3 == 0 { 8 * more } else { more };
        for gpu in kit::devices() {
            match half {
                true => Problem::<f16>::new([tokens, cols, experts], seed).check(&gpu, slots, more),
                false => Problem::<bf16>::new([tokens, cols, experts], seed).check(&gpu, slots, more),
            }
        }
    }
}

#[test]
fn a_token_has_the_same_bits_in_any_call() {
    for gpu in kit::devices() {
        // Few tokens: a block for each slice. Many: larger tiles, then all slices in a block.
        let many = Problem::<bf16>::new([10_500, 1032, 24], 3);
        let all = many.run(&gpu, 1, 0);
        for tokens in [1, 33, 5000] {
            let few =
                Problem { x: many.x[..tokens * 1032].to_vec(), w: many.w.clone(), size: [tokens, 1032, 24] };
            let (ids, weights) = few.run(&gpu, 1, 0);
            assert!(ids == all.0[..tokens], "{tokens} tokens on {}", gpu.spec());
            assert!(weights == all.1[..tokens], "{tokens} tokens on {}", gpu.spec());
        }
    }
}

#[test]
fn saturated_and_nan() {
    for gpu in kit::devices() {
        let mut problem =
            Problem::<bf16> { x: vec![bf16::ZERO; 3 * 8], w: vec![bf16::ZERO; 8 * 16], size: [3, 8, 16] };
        // Logits of 40 and 50 have the sigmoid 1; expert 9 is the first of them.
        problem.w[9] = bf16::from_f32(40.0);
        problem.w[11] = bf16::from_f32(50.0);
        problem.w[16 + 13] = bf16::NAN;
        problem.x[0] = bf16::ONE;
        problem.x[8 + 1] = bf16::ONE;
        let (ids, weights) = problem.run(&gpu, 2, 0);
        // Zero times NaN is NaN.
        assert_eq!(ids, [13, 16, 13, 16, 13, 16]);
        assert!(weights.chunks(2).all(|w| w[0].is_nan() && w[1] == 1.0));
        problem.w[16 + 13] = bf16::ZERO;
        let (ids, weights) = problem.run(&gpu, 2, 0);
        assert_eq!(ids, [9, 16, 0, 16, 0, 16]);
        assert_eq!(weights, [1.0, 1.0, 0.5, 1.0, 0.5, 1.0]);
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    const OP: &str = "moe_routing_sigmoid_top1_fused";
    Refusals::new((), |stream, tensors, ()| {
        moe_routing_sigmoid_top1_fused(
            stream,
            tensors.input::<bf16>("x"),
            tensors.input::<bf16>("w"),
            tensors.output("ids"),
            tensors.output("weights"),
            tensors.output("workspace"),
        )
    })
    .input::<bf16>("x", [3, 600])
    .input::<bf16>("w", [600, 5])
    .output::<i32>("ids", [3, 2])
    .output::<f32>("weights", [3, 2])
    .output::<i32>("workspace", [4 + 2 * 16 * 5])
    .accepts(|_| {})
    .refuses(kind!(Shape), &[OP, "w", "[600, 5]"], |call| call.shape("w", [599, 5]))
    .refuses(kind!(Argument), &[OP, "w", "1 to 1024"], |call| call.shape("w", [600, 1025]))
    .refuses(kind!(Argument), &[OP, "w", "1 to 1024"], |call| call.shape("w", [600, 0]))
    .refuses(kind!(Shape), &[OP, "ids", "[3, 1]"], |call| call.shape("ids", [3, 3]))
    .refuses(kind!(Shape), &[OP, "ids", "[3, 1]"], |call| call.shape("ids", [2, 2]))
    .refuses(kind!(Shape), &[OP, "weights"], |call| call.shape("weights", [3, 1]))
    .refuses(kind!(Shape), &[OP, "workspace", "[164] or longer"], |call| call.shape("workspace", [163]))
    .refuses_other_devices();
}
