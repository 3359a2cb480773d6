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

fn codes(n: usize, seed: u64) -> Vec<i8> {
    let mut s = seed | 1;
    (0..n).map(|_| { s ^= s << 13; s ^= s >> 7; s ^= s << 17; ((s >> 11) % 255) as i64 as i8 }).collect()
}

fn check8(m: usize, n: usize, k: usize, tile: GemmTile, splits: usize, block: bool, gn: usize, gk: usize) {
    use hk_core::{Arch, Fp8E4M3, Fp8E4M3Fnuz};
    let (a, w) = (codes(m * k, 3), codes(n * k, 5));
    for gpu in kit::sanitized_devices() {
        let fnuz = gpu.arch() == Arch::Gfx942;
        let dec = |c: i8| -> f64 { if fnuz { f64::from(bytemuck::cast::<u8, Fp8E4M3Fnuz>(c as u8).to_f32()) } else { f64::from(bytemuck::cast::<u8, Fp8E4M3>(c as u8).to_f32()) } };
        for fp8 in [false, true] {
            let clean = |v: &[i8]| -> Vec<i8> { v.iter().map(|&c| if fp8 && (c as u8 & 0x7f == 0x7f || c as u8 == 0x80) { 3 } else { c }).collect() };
            let (a, w) = (clean(&a), clean(&w));
            let val = |v: &[i8]| -> Vec<f64> { v.iter().map(|&c| if fp8 { dec(c) } else { f64::from(c) }).collect() };
            let (gm, ng) = (k.div_ceil(gk), n.div_ceil(gn));
            let (xs, ws): (Vec<f32>, Vec<f32>) = if block { (values::<f32>(m * gm, 7), values::<f32>(ng * gm, 9)) } else { (values(m, 7), values(n, 9)) };
            // scaled operands
            let mut va = val(&a); let mut vw = val(&w);
            for i in 0..m { for j in 0..k { va[i * k + j] *= f64::from(if block { xs[i * gm + j / gk] } else { xs[i] }); } }
            for i in 0..n { for j in 0..k { vw[i * k + j] *= f64::from(if block { ws[i / gn * gm + j / gk] } else { ws[i] }); } }
            let want = reference::product(&va, &vw, k);
            let mut y = gpu.poisoned::<f32>([m, n]);
            let mut wsp = gpu.poisoned::<f32>([splits * m * n]);
            let options = GemmOptions { config: Some(GemmConfig { tile, splits, group: 4 }), ..Default::default() };
            let (txs, tws) = if block { (gpu.upload(&xs, [m, gm]), gpu.upload(&ws, [ng, gm])) } else { (gpu.upload(&xs, [m, 1]), gpu.upload(&ws, [1, n])) };
            macro_rules! go { ($t:ty) => {{
                let conv = |v: &[i8]| -> Vec<$t> { bytemuck::cast_slice(v).to_vec() };
                let (ta, tw) = (gpu.upload(&conv(&a), [m, k]), gpu.upload(&conv(&w), [n, k]));
                if block {
                    gemm_a8w8_blockscale(gpu.stream(), ta.view(), tw.view(), txs.view(), tws.view(), BlockShape { n: gn, k: gk }, None, y.view_mut(), Some(wsp.view_mut()), options).unwrap();
                } else {
                    gemm_a8w8(gpu.stream(), ta.view(), tw.view(), txs.view(), tws.view(), None, y.view_mut(), Some(wsp.view_mut()), options).unwrap();
                }
            }} }
            match (fp8, fnuz) { (false, _) => go!(i8), (true, true) => go!(Fp8E4M3Fnuz), (true, false) => go!(Fp8E4M3) }
            let got = gpu.download(&y);
            let mut worst = 0.0f64;
            for i in 0..m * n {
                let err = (f64::from(got.data[i]) - want.values[i]).abs();
                worst = worst.max(err / (want.magnitudes[i] * 2f64.powi(-18) + 1e-30));
            }
            println!("{} fp8 {fp8} {m}x{n}x{k} {tile:?} {splits} block {block}: {worst}", gpu.spec());
            if worst > 1.0 { println!("BAD"); for i in 0..m * n { if (f64::from(got.data[i]) - want.values[i]).abs() > want.magnitudes[i] * 1e-4 { println!("at {} {}: {} want {}", i / n, i % n, got.data[i], want.values[i]); } } }
        }
    }
}

#[test]
fn small8() {
 check8(64,64,128,GemmTile::T256x128, 1, true, 128,128);
 check8(64,64,256,GemmTile::T256x128, 1, true, 128,128); check8(64,64,256,GemmTile::T64x64, 1, true, 128,128); check8(64,64,192,GemmTile::T64x64, 1, true, 128,128);check8(64,64,400,GemmTile::T64x64, 1, true, 128,128);check8(64,64,512,GemmTile::T64x64, 1, true, 128,128);
    check8(64, 64, 128, GemmTile::T64x64, 1, false, 128, 128);
    check8(70, 200, 400, GemmTile::T128x128, 1, false, 128, 128);
    check8(70, 300, 208, GemmTile::T256x256, 2, false, 128, 128);
    check8(17, 30, 77, GemmTile::Elements, 1, false, 128, 128);
    check8(17, 70, 2064, GemmTile::S32x32, 1, false, 128, 128);
    check8(64, 64, 128, GemmTile::T64x64, 1, true, 128, 128);
    check8(70, 200, 400, GemmTile::T256x128, 1, true, 128, 128);
    check8(300, 150, 1040, GemmTile::T256x128, 2, true, 2, 256);
    check8(17, 30, 277, GemmTile::Elements, 1, true, 8, 128);
    check8(13, 170, 2064, GemmTile::S16x16, 1, true, 128, 128);
    check8(13, 170, 4112, GemmTile::S16x32, 1, true, 4, 256);
    check8(30, 170, 4112, GemmTile::S32x32, 2, true, 16, 128);
    check8(60, 170, 1104, GemmTile::S64x32, 2, true, 16, 128);
}
