//! First.
use hk_core::{Float, bf16, f16};
use hk_gemm::*;
use hk_testkit::{self as kit};

fn values<T: Float>(n: usize, seed: u64) -> Vec<T> {
    let mut s = seed | 1;
    (0..n).map(|_| { s ^= s << 13; s ^= s >> 7; s ^= s << 17; T::from_f64(((s >> 11) as f64 / (1u64 << 53) as f64) * 2.0 - 1.0) }).collect()
}

fn check<T: Half>(m: usize, n: usize, k: usize, tile: GemmTile, splits: usize) {
    let (a, w) = (values::<T>(m * k, 3), values::<T>(n * k, 5));
    let want = reference::product(&kit::widen(&a), &kit::widen(&w), k);
    for gpu in kit::sanitized_devices() {
        let (ta, tw) = (gpu.upload(&a, [m, k]), gpu.upload(&w, [n, k]));
        let mut y = gpu.poisoned::<f32>([m, n]);
        let mut ws = gpu.poisoned::<f32>([splits * m * n]);
        let options = GemmOptions { config: Some(GemmConfig { tile, splits, group: 4 }), ..Default::default() };
        gemm_a16w16(gpu.stream(), ta.view(), tw.view(), None, y.view_mut(), Some(ws.view_mut()), options).unwrap();
        let got = gpu.download(&y);
        let mut worst = 0.0f64;
        for i in 0..m * n {
            let err = (f64::from(got.data[i]) - want.values[i]).abs();
            worst = worst.max(err / (want.magnitudes[i] * 2f64.powi(-18) + 1e-30));
        }
        println!("{} {m}x{n}x{k} {tile:?} {splits}: {worst}", gpu.spec());
        assert!(worst <= 1.0);
        gpu.assert_guards(&y);
    }
}

#[test]
fn small() {
    for tile in [GemmTile::T64x64, GemmTile::T128x128, GemmTile::T256x256] {
        check::<bf16>(64, 64, 32, tile, 1);
        check::<bf16>(70, 200, 200, tile, 1);
        check::<f16>(300, 130, 344, tile, 3);
    }
    check::<bf16>(16, 32, 4096, GemmTile::S16x16, 1);
    check::<bf16>(13, 50, 1032, GemmTile::S16x16, 1);
    check::<f16>(20, 70, 2056, GemmTile::S16x32, 2);
    check::<bf16>(32, 70, 1000, GemmTile::S32x32, 1);
    check::<bf16>(61, 70, 1000, GemmTile::S64x32, 3);
    check::<bf16>(1, 1, 1, GemmTile::Elements, 1);
    check::<bf16>(3, 5, 2, GemmTile::Elements, 1);
    check::<f16>(130, 67, 257, GemmTile::Elements, 2);
}
