//! Sizes whose GEMM, on sm_90a, is by bulk tensor copies: each width of a block, tails of M, N and K, rows with room between them,
//! epilogues. Operands are small integers, whose sums are exact.
//! Elsewhere other kernels answer, of the smaller sizes.

use hk_core::{bf16, f16};
use hk_gemm::{Activation, FloatView, Gemm};
use hk_testkit as kit;

/// M, N, K, and the row stride of `a`.
const SMALL: [[usize; 4]; 5] = [
    [33, 2064, 72, 72],
    [40, 2064, 328, 400],
    [100, 2064, 136, 136],
    [130, 2064, 64, 64],
    [64, 2052, 500, 500],
];
const LARGE: [[usize; 4]; 7] = [
    [128, 6144, 520, 520],
    [250, 6144, 264, 272],
    [512, 4096, 584, 584],
    [512, 6144, 200, 200],
    [100, 28672, 72, 72],
    [513, 6160, 72, 72],
    [1000, 4096, 264, 272],
];

macro_rules! agrees_with_exact_sums {
    ($name:ident, $t:ty) => {
        #[test]
        fn $name() {
            for gpu in kit::devices() {
                let large: &[_] = if gpu.arch().is_amd() { &[] } else { &LARGE };
                for &[m, n, k, stride] in SMALL.iter().chain(large) {
                    let value = |i: usize, of: usize| ((i * of) % 1009 % 9) as i32 - 4;
                    let a: Vec<i32> = (0..m * stride).map(|i| value(i, 7919)).collect();
                    let w: Vec<i32> = (0..n * k).map(|i| value(i, 104729)).collect();
                    let bias: Vec<f32> = (0..n).map(|i| value(i, 31) as f32).collect();
                    let stream = gpu.stream();
                    let halves = |x: &[i32]| x.iter().map(|&x| <$t>::from_f32(x as f32)).collect::<Vec<_>>();
                    let (of_a, of_w) =
                        (stream.upload(&halves(&a)).unwrap(), stream.upload(&halves(&w)).unwrap());
                    let of_bias = stream.upload(&bias).unwrap();
                    let mut y = stream.upload(&vec![f32::NAN; m * n]).unwrap();
                    let rows = of_a.view([m, stride]).unwrap().slice(1, 0..k).unwrap();
                    Gemm::new(rows, of_w.view([n, k]).unwrap())
                        .bias(FloatView::F32(of_bias.view([n]).unwrap()))
                        .activation(Activation::Relu)
                        .run(stream, y.view_mut([m, n]).unwrap())
                        .unwrap();
                    let got = stream.download(&y).unwrap();
                    for (r, got) in got.chunks_exact(n).enumerate() {
                        // Of many rows some, and the last.
                        if m > 130 && r % 29 != 3 && r + 2 < m {
                            continue;
                        }
                        let a = &a[r * stride..][..k];
                        for (c, (&got, w)) in got.iter().zip(w.chunks_exact(k)).enumerate() {
                            let sum: i32 = a.iter().zip(w).map(|(a, w)| a * w).sum();
                            let want = (sum as f32 + bias[c]).max(0.0);
                            assert!(got == want, "{m} x {n} x {k}: y[{r}, {c}] is {got}, expected {want}");
                        }
                    }
                }
            }
        }
    };
}

agrees_with_exact_sums!(bf16_agrees_with_exact_sums, bf16);
agrees_with_exact_sums!(f16_agrees_with_exact_sums, f16);
