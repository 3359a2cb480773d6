//! GEMMs of mxfp8 against the f64 reference, and by what has to hold whatever the tiles.

use crate::mixed::{By, Case, Memory, SUM, config, devices};
use hk_core::{E8M0, Fp8E4M3, Fp8E4M3Fnuz, bf16, f16};
use hk_gemm::{Activation, GemmOptions, GemmTile};
use hk_testkit::proptest::test_runner::TestRunner;
use hk_testkit::{self as kit, Place, Tolerance, proptest::prelude::*};

hk_testkit::corners_of!(hk_gemm::OPERATORS: gemm_afp8wfp8);

/// A test for each fp8.
macro_rules! for_both {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use super::*;
            #[test]
            fn fnuz() {
                super::$name::<Fp8E4M3Fnuz>();
            }
            #[test]
            fn ocp() {
                super::$name::<Fp8E4M3>();
            }
        }
    )+};
}

fn active<T: By<T>>(case: Case<T, T>, activation: Option<Activation>) -> Case<T, T> {
    Case { activation, ..case }
}

/// Few rows to many, columns and lengths that tiles and packed scales divide or not; the default configuration.
fn sizes<T: By<T>>() {
    let wide = [[1, 32], [16, 32], [48, 96], [80, 160], [192, 384], [256, 512]];
    for (i, m) in [1, 3, 17, 33, 64, 129].into_iter().enumerate() {
        for (j, [n, k]) in wide.into_iter().enumerate().filter(|(j, _)| kit::full() || (i + j) % 2 == 0) {
            let activation = [None, Some(Activation::Relu6), Some(Activation::Silu)][(i + j) % 3];
            let case = active(Case::<T, T>::mxfp8([m, n, k], (10 * i + j) as u64), activation);
            let want = case.reference();
            for gpu in devices::<T, T>() {
                match (i + j / 2) % 3 {
                    0 => case.check::<bf16>(&gpu, None, &want),
                    1 => case.check::<f16>(&gpu, None, &want),
                    _ => case.check::<f32>(&gpu, None, &want),
                }
            }
        }
    }
}

/// Every tile, K in parts that it divides by and not, scales in words and not.
fn tiles_and_splits<T: By<T>>() {
    for (k, splits) in [(96, 1), (512, 2), (928, 2), (1696, 3)] {
        let case = Case::<T, T>::mxfp8([70, 37, k], k as u64);
        let want = case.reference();
        for tile in case.tiles() {
            for gpu in devices::<T, T>() {
                case.check::<f32>(&gpu, config(tile, splits), &want);
            }
        }
    }
}

/// Rows with padding, on 16 bytes or not; scales with any strides.
fn strides<T: By<T>>() {
    let even = Memory { x: [32, 16], w: [16, 32], y: [16, 0], turned_scales: true, ..Memory::default() };
    let odd = Memory { x: [1, 0], y: [3, 1], ..even };
    for memory in [even, odd] {
        let case = Case::<T, T>::mxfp8([35, 39, 256], 9).lies(memory);
        let want = case.reference();
        for gpu in devices::<T, T>() {
            case.check::<bf16>(&gpu, None, &want);
            for tile in
                case.tiles().into_iter().filter(|&tile| memory.x[0] == 32 || tile == GemmTile::Elements)
            {
                case.check::<f32>(&gpu, config(tile, 2), &want);
            }
        }
    }
}

/// Sums of integers are exact with scales that are powers of two, whatever the tile; powers of two in scales scale them.
fn exact<T: By<T>>() {
    let mut case = Case::<T, T>::mxfp8([20, 37, 544], 2);
    let round = |x: &[f64]| x.iter().map(|x| x.round() as f32).collect::<Vec<_>>();
    (case.x, case.w) = (T::pack(&round(&T::unpack(&case.x))), T::pack(&round(&T::unpack(&case.w))));
    for (i, s) in case.x_mx.iter_mut().enumerate() {
        *s = E8M0::from_exponent((i * 7 % 5) as i32 - 2);
    }
    for (i, s) in case.w_mx.iter_mut().enumerate() {
        *s = E8M0::from_exponent((i * 5 % 3) as i32 - 1);
    }
    let mut scaled = case.clone();
    scaled.x_mx.iter_mut().for_each(|s| s.0 += 90);
    scaled.w_mx.iter_mut().for_each(|s| s.0 -= 95);
    let want = case.reference().values;
    let of_scaled: Vec<f64> = want.iter().map(|y| y / 32.0).collect();
    for gpu in devices::<T, T>() {
        for tile in case.tiles() {
            for splits in [1, 2] {
                kit::assert_close(&case.run::<f32>(&gpu, config(tile, splits)), &want, Tolerance::Exact);
            }
            kit::assert_close(&scaled.run::<f32>(&gpu, config(tile, 1)), &of_scaled, Tolerance::Exact);
        }
    }
}

/// Scales from end to end of their range: all pairs of some, with blocks of the largest, the least and no numbers.
fn extremes<T: By<T>>() {
    let bytes = [0, 1, 2, 63, 64, 126, 127, 128, 190, 191, 252, 253, 254];
    let [m, n, k] = [bytes.len(), bytes.len() + 4, 160];
    for (seed, [of_x, of_w]) in
        [[1.0, 1.0], [f32::MAX, f32::MAX], [2.0, 0.0], [0.0625, 0.03125]].into_iter().enumerate()
    {
        let mut case = Case::<T, T>::mxfp8([m, n, k], seed as u64);
        // One number in a row of w: so a sum has one term, and one rounding.
        case.x = T::pack(&(0..m * k).map(|i| if i % 3 == 0 { -of_x } else { of_x }).collect::<Vec<_>>());
        case.w =
            T::pack(&(0..n * k).map(|i| if i % k == i / k * 7 % k { of_w } else { 0.0 }).collect::<Vec<_>>());
        for (i, &byte) in bytes.iter().enumerate() {
            case.x_mx[i * 5..][..5].fill(E8M0(byte));
            case.w_mx[i * 5..][..5].fill(E8M0(byte));
        }
        let want: Vec<f64> = case.reference().values.iter().map(|&y| f64::from(y as f32) + 0.0).collect();
        for gpu in devices::<T, T>() {
            for tile in case.tiles() {
                kit::assert_close(&case.run::<f32>(&gpu, config(tile, 1)), &want, Tolerance::Exact);
            }
        }
    }
}

/// What is no number stays in its row of a, or of w.
fn strays<T: By<T>>() {
    let [m, n, k] = [35, 37, 288];
    let case = Case::<T, T>::mxfp8([m, n, k], 4);
    let mut of_codes = case.clone();
    for at in [3 * k + 5, m * k - 1] {
        of_codes.x[at] = T::pack(&[f32::NAN])[0];
    }
    let mut of_scales = case;
    for (j, block) in [(17, 0), (n - 1, k / 32 - 1)] {
        of_scales.w_mx[j * (k / 32) + block] = E8M0::NAN;
    }
    // Whatever the numbers are.
    of_scales.x_mx[3 * (k / 32) + 1] = E8M0::NAN;
    of_scales.x[3 * k..4 * k].fill(T::pack(&[0.0])[0]);
    for (case, rows, columns) in [(&of_codes, &[3, m - 1][..], &[][..]), (&of_scales, &[3], &[17, n - 1])] {
        let want = case.reference();
        for (i, y) in want.values.iter().enumerate() {
            assert_eq!(y.is_nan(), columns.contains(&(i % n)) || rows.contains(&(i / n)));
        }
        for gpu in devices::<T, T>() {
            for tile in case.tiles() {
                case.check::<f32>(&gpu, config(tile, 2), &want);
            }
        }
    }
}

/// Shuffled weights and scales give the bits of plain ones.
fn shuffled<T: By<T>>() {
    for (k, more) in [(256, 0), (288, 32)] {
        let plain = Case::<T, T>::mxfp8([35, 48, k], 5);
        let of_w = Memory { w_shuffled: Some(more), ..Memory::default() };
        let of_both = Memory { scales_shuffled: true, ..of_w };
        for gpu in devices::<T, T>() {
            for tile in plain.tiles() {
                let want = plain.run::<f32>(&gpu, config(tile, 2));
                for memory in [of_w, of_both, Memory { w_shuffled: None, ..of_both }] {
                    kit::assert_bits(&plain.clone().lies(memory).run::<f32>(&gpu, config(tile, 2)), &want);
                }
            }
        }
    }
}

/// Unsummed split-K slices: they sum to the GEMM, slices beyond K are zero.
fn slices<T: By<T>>() {
    let case = Case::<T, T>::mxfp8([18, 37, 1056], 6);
    let (want, parts, plane) = (case.reference(), 12, 18 * 37);
    for gpu in devices::<T, T>() {
        for tile in [GemmTile::T64x64, GemmTile::S32x32, GemmTile::Elements] {
            let options =
                GemmOptions { config: config(tile, 1), skip_reduce: true, ..GemmOptions::default() };
            let mut y = gpu.poisoned::<f32>(Place::rows([parts, 18, 37], 37 + 3));
            case.run_to(&gpu, options, 0, &mut y).unwrap();
            let got = gpu.download(&y);
            gpu.assert_guards(&y);
            let sums = (0..plane).map(|i| (0..parts).map(|s| got[s * plane + i]).sum::<f32>());
            kit::assert_near(&kit::Array::new(&*got.label, case.shape(), sums.collect()), &want, SUM);
            assert!(got[plane * (parts - 1)..].iter().all(|&y| y == 0.0), "{tile:?}");
        }
    }
}

fn random<T: By<T>>() {
    let side = || kit::size(1..=150, &[16, 32, 64, 128]);
    let pad = || prop_oneof![3 => Just(0usize), 2 => Just(16), 1 => 1usize..9];
    let two = || (pad(), pad()).prop_map(|(a, b)| [a, b]);
    let case = (
        side(),
        side(),
        kit::size(0..=40, &[4, 32]),
        (two(), two(), two(), any::<bool>()),
        any::<u64>().no_shrink(),
    );
    let property = |(m, n, blocks, (x, w, y, turned_scales), seed)| {
        let memory = Memory { x, w, y, turned_scales, ..Memory::default() };
        let case = Case::<T, T>::mxfp8([m, n, 32 * blocks], seed).lies(memory);
        let want = case.reference();
        for gpu in devices::<T, T>() {
            case.check::<bf16>(&gpu, None, &want);
            case.check::<f32>(&gpu, config(GemmTile::Elements, 2), &want);
        }
        Ok(())
    };
    TestRunner::new(proptest::test_runner::Config { cases: kit::config().cases / 2, ..kit::config() })
        .run(&case, property)
        .unwrap_or_else(|e| panic!("{e}"));
}

/// No columns of K: zero; no rows or columns: nothing.
fn empty_axes<T: By<T>>() {
    for sizes in [[5, 9, 0], [40, 9, 0], [0, 9, 32], [5, 0, 32]] {
        let case = Case::<T, T>::mxfp8(sizes, 11);
        let want = vec![0.0f32; sizes[0] * sizes[1]];
        for gpu in devices::<T, T>() {
            for config in [None, config(GemmTile::Elements, 1), config(GemmTile::S32x32, 2)] {
                kit::assert_bits(&case.run::<f32>(&gpu, config), &want);
            }
        }
    }
}

for_both!(sizes, tiles_and_splits, strides, exact, extremes, strays, shuffled, slices, random, empty_axes);
