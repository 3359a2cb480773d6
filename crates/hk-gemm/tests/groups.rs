//! Scales of groups of few columns, of any power of two, against the f64 reference and exactly.

use crate::mixed::{By, Case, Kind, Memory, Operand, config, devices};
use hk_core::{Fp8E4M3, Fp8E4M3Fnuz, bf16, f16};
use hk_gemm::{BlockShape, GemmTile};
use hk_testkit::proptest::test_runner::TestRunner;
use hk_testkit::{self as kit, Tolerance, proptest::prelude::*};

/// A test for pairs of operands with scales of groups.
macro_rules! for_each_pair {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use super::*;
            #[test]
            fn int8() {
                super::$name::<i8, i8>();
            }
            #[test]
            fn fp8() {
                super::$name::<Fp8E4M3Fnuz, Fp8E4M3Fnuz>();
                super::$name::<Fp8E4M3, Fp8E4M3>();
            }
            #[test]
            fn half_by_byte() {
                super::$name::<bf16, i8>();
                super::$name::<f16, Fp8E4M3Fnuz>();
                super::$name::<bf16, Fp8E4M3>();
            }
        }
    )+};
}

fn case<X: By<W>, W: Operand>(sizes: [usize; 3], [n, k]: [usize; 2], seed: u64) -> Case<X, W> {
    Case::new(None, sizes, false, seed).grouped(BlockShape { n, k })
}

/// Tiles that serve groups of so many columns, of rows on 16 bytes.
fn tiles(columns: usize) -> &'static [GemmTile] {
    if columns < 16 { &[GemmTile::Elements] } else { &[GemmTile::T64x64, GemmTile::Elements] }
}

/// All numbers of columns, with short last groups; K in parts.
fn shapes<X: By<W>, W: Operand>() {
    for (i, k) in [1usize, 2, 4, 8, 16, 32, 64].into_iter().enumerate() {
        let n = 1usize << (i * 3 % 8);
        for (m, columns, splits) in [(5, 272, 2), (70, 160, 1), (17, 75, 3)] {
            let case = case::<X, W>([m, 37 + i, columns.max(k)], [n, k], i as u64);
            let want = case.reference();
            for gpu in devices::<X, W>() {
                case.check::<bf16>(&gpu, None, &want);
                for &tile in tiles(k).iter().filter(|&&tile| columns % 16 == 0 || tile == GemmTile::Elements)
                {
                    case.check::<f32>(&gpu, config(tile, splits), &want);
                }
            }
        }
    }
}

/// Integers and powers of two: each product meets the scales of its own group, and no other.
fn exact<X: By<W>, W: Operand>() {
    for k in [1, 4, 8, 16, 32, 64] {
        for columns in [272, 61] {
            let mut case = case::<X, W>([20, 37, columns], [8, k], 3);
            let round = |x: Vec<f64>| x.iter().map(|x| x.round() as f32).collect::<Vec<_>>();
            (case.x, case.w) = (X::pack(&round(X::unpack(&case.x))), W::pack(&round(W::unpack(&case.w))));
            let powers = |s: &mut Vec<f32>| {
                s.iter_mut().enumerate().for_each(|(i, s)| *s = ((i * 7 % 5) as f32 - 2.0).exp2());
            };
            powers(&mut case.x_scale);
            powers(&mut case.w_scale);
            let want = case.reference().values;
            for gpu in devices::<X, W>() {
                for &tile in tiles(k).iter().filter(|&&tile| columns == 272 || tile == GemmTile::Elements) {
                    kit::assert_close(&case.run::<f32>(&gpu, config(tile, 2)), &want, Tolerance::Exact);
                }
            }
        }
    }
}

/// What is no number, among codes or scales, stays in its row of a, or of w.
fn strays<X: By<W>, W: Operand>() {
    let [m, n, columns] = [20usize, 37, 144];
    for k in [4usize, 16, 32, 64] {
        let groups = columns.div_ceil(k);
        let mut case = case::<X, W>([m, n, columns], [1, k], 4);
        case.w_scale[17 * groups + 1] = f32::NAN;
        case.w_scale[n * groups - 1] = f32::INFINITY;
        if X::KIND == Kind::Codes {
            case.x_scale[3 * groups] = f32::NAN;
        }
        case.x[5 * columns + 70] = X::pack(&[f32::NAN])[0];
        let want = case.reference();
        for gpu in devices::<X, W>() {
            for &tile in tiles(k) {
                let got = case.run::<f32>(&gpu, config(tile, 2));
                for (i, (y, want)) in got.iter().zip(&want.values).enumerate() {
                    assert_eq!(y.is_finite(), want.is_finite(), "{} at {i}: {y}, {want}", got.label);
                }
            }
        }
    }
}

/// Rows with padding, on 16 bytes or not; scales with any strides; shuffled weights, which give the bits of plain ones.
fn memory<X: By<W>, W: Operand>() {
    let sixteen = |bytes: usize| 16 / bytes;
    let even = Memory {
        x: [2 * sixteen(size_of::<X>()), sixteen(size_of::<X>())],
        w: [sixteen(size_of::<W>()), 0],
        y: [3, 1],
        turned_scales: true,
        ..Memory::default()
    };
    let odd = Memory { x: [1, 0], w: [0, 1], ..even };
    for k in [2, 8, 16, 32, 64] {
        let plain = case::<X, W>([20, 48, 160], [8, k], 5);
        let want = plain.reference();
        for gpu in devices::<X, W>() {
            plain.clone().lies(odd).check::<f32>(&gpu, None, &want);
            for &tile in tiles(k) {
                let bits = plain.run::<f32>(&gpu, config(tile, 2));
                for memory in [even, Memory { w_shuffled: Some(32), ..even }] {
                    kit::assert_bits(&plain.clone().lies(memory).run::<f32>(&gpu, config(tile, 2)), &bits);
                }
            }
        }
    }
}

fn random<X: By<W>, W: Operand>() {
    let side = || kit::size(1..=100, &[16, 32, 64]);
    let pad = || prop_oneof![3 => Just(0usize), 2 => Just(16), 1 => 1usize..9];
    let two = || (pad(), pad()).prop_map(|(a, b)| [a, b]);
    let sizes = (side(), side(), kit::size(0..=700, &[16, 64]));
    let case_of = (sizes, 0u32..8, 0u32..10, (two(), two(), any::<bool>()), any::<u64>().no_shrink());
    let property = |((m, n, columns), rows, k, (x, w, turned_scales), seed)| {
        let memory = Memory { x, w, turned_scales, ..Memory::default() };
        let case = case::<X, W>([m, n, columns], [1usize << rows, 1usize << k], seed).lies(memory);
        let want = case.reference();
        for gpu in devices::<X, W>() {
            case.check::<bf16>(&gpu, None, &want);
        }
        Ok(())
    };
    TestRunner::new(proptest::test_runner::Config { cases: kit::config().cases / 2, ..kit::config() })
        .run(&case_of, property)
        .unwrap_or_else(|e| panic!("{e}"));
}

for_each_pair!(shapes, exact, strays, memory, random);

/// Activations that are quantized in groups of any length, with weights in as long groups, or with one scale.
fn quantized<X: By<W>, W: Operand>(groups: [usize; 3]) {
    for (i, k) in groups.into_iter().enumerate() {
        let columns = [96, 272, 300][i];
        let mut group = case::<X, W>([20, 37, columns], [1usize << i, k], i as u64);
        group.prequant = true;
        let mut batched = Case::<X, W>::new(Some(2), [35, 20, columns], true, i as u64).finished(None);
        batched.quantized = k;
        for case in [&mut group, &mut batched] {
            // A group of zeros, a number beyond all others, and what is none.
            case.x[..k.min(64)].fill(X::pack(&[0.0])[0]);
            case.x[columns + 3] = X::pack(&[1e4])[0];
            case.x[2 * columns + 7] = X::pack(&[f32::INFINITY])[0];
            let want = case.reference();
            for gpu in devices::<X, W>() {
                case.check::<f32>(&gpu, None, &want);
                case.check::<bf16>(&gpu, config(GemmTile::Elements, 2), &want);
            }
        }
    }
}

#[test]
fn activations_quantized_in_groups() {
    quantized::<bf16, i8>([1, 32, 256]);
    quantized::<f16, Fp8E4M3Fnuz>([8, 64, 1024]);
    quantized::<bf16, Fp8E4M3>([16, 32, 512]);
}
