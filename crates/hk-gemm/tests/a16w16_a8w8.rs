//! Every kernel at awkward sizes, strides and alignments against the f64 reference, on the emulated GPUs (and real ones where
//! there are some).

use crate::common::{Form, Inputs, Operand, Pads, config, devices, tiles};
use crate::for_each_operand;
use hk_core::{bf16, f16};
use hk_gemm::{Activation, BlockShape, GemmTile};
use hk_testkit::proptest::test_runner::TestRunner;
use hk_testkit::{self as kit, Tolerance, proptest::prelude::*};

hk_testkit::corners_of!(hk_gemm::OPERATORS: gemm_a16w16, gemm_a16w16_atomic, gemm_a16w16_gated, batched_gemm_bf16, gemm_a8w8, gemm_a8w8_per_token_scale, gemm_a8w8_blockscale, batched_gemm_a8w8);

const ACTIVATIONS: [Option<Activation>; 6] = [
    None,
    Some(Activation::Silu),
    Some(Activation::Gelu),
    Some(Activation::GeluTanh),
    Some(Activation::Relu),
    Some(Activation::Tanh),
];

/// Few rows to many, columns and lengths that tiles and vectors divide and do not; the configuration is the device's choice.
fn sizes<T: Operand>() {
    let wide = [[1, 32], [16, 32], [48, 96], [80, 160], [130, 257], [192, 384], [256, 512], [576, 512]];
    let mut all = vec![[1, 1, 1], [3, 5, 2]];
    for m in [1, 3, 17, 33, 64, 129] {
        all.extend(wide.map(|[n, k]| [m, n, k]));
    }
    for (i, [m, n, k]) in all.into_iter().enumerate() {
        let form = T::FORMS[i % T::FORMS.len()];
        let activation = ACTIVATIONS[i % ACTIVATIONS.len()];
        let case = Inputs::<T>::new(form, [2, m, n, k], i as u64).biased().activated(activation);
        let want = case.reference();
        for gpu in devices::<T>() {
            match i % 3 {
                0 => case.check::<bf16>(&gpu, None, &want),
                1 => case.check::<f16>(&gpu, None, &want),
                _ => case.check::<f32>(&gpu, None, &want),
            }
        }
    }
}

/// Every tile of every form, K in parts that it divides by and not.
fn tiles_and_splits<T: Operand>() {
    for &form in T::FORMS {
        // Lengths of K are in bytes.
        for (bytes, splits) in [(2032, 1), (2032, 2), (4144, 3), (14416, 7)] {
            let case = Inputs::<T>::new(form, [2, 18, 70, bytes / size_of::<T>()], 5).biased();
            let want = case.reference();
            for gpu in devices::<T>() {
                for tile in tiles(form) {
                    // The largest tiles are the slowest to emulate.
                    if splits != 3 || tile.shape().0 < 128 {
                        case.check::<f32>(&gpu, config(tile, splits), &want);
                    }
                }
            }
        }
    }
}

/// Rows with padding, on 16 bytes or not; batches with more between them.
fn strides<T: Operand>() {
    let sixteen = 16 / size_of::<T>();
    let even = Pads { a: [16, 0], w: [sixteen, sixteen], y: [16, 0], rows: 2 };
    let odd = Pads { a: [1, 0], w: [0, 1], y: [3, 1], rows: 1 };
    let y_odd = Pads { y: [1, 3], ..even };
    for &form in T::FORMS {
        for (pads, tiles) in [
            (even, vec![GemmTile::T64x64, GemmTile::S16x32, GemmTile::S64x32, GemmTile::Elements]),
            (y_odd, vec![GemmTile::T64x64, GemmTile::S32x32]),
            (odd, vec![GemmTile::Elements]),
        ] {
            let case = Inputs::<T>::new(form, [3, 35, 67, 144], 9).biased().padded(pads);
            let want = case.reference();
            for gpu in devices::<T>() {
                case.check::<bf16>(&gpu, None, &want);
                for &tile in &tiles {
                    case.check::<bf16>(&gpu, config(tile, 1), &want);
                    case.check::<f32>(&gpu, config(tile, 2), &want);
                }
            }
        }
    }
}

/// Sums of integers are exact, in any order.
fn integers_are_exact<T: Operand>() {
    for &form in T::FORMS {
        let mut case = Inputs::<T>::new(form, [2, 33, 67, 1040], 3).unscaled();
        let whole = |x: &mut T| *x = T::near(x.value().round() as f32);
        case.a.iter_mut().for_each(whole);
        case.w.iter_mut().for_each(whole);
        let want = case.reference().values;
        for gpu in devices::<T>() {
            for tile in tiles(form) {
                for splits in [1, 3] {
                    kit::assert_close(&case.run::<f32>(&gpu, config(tile, splits)), &want, Tolerance::Exact);
                }
            }
        }
    }
}

fn random<T: Operand>() {
    let side = || kit::size(1..=200, &[16, 32, 64, 128]);
    let sizes = (1usize..=3, side(), side(), kit::size(0..=2100, &[128, 1024]));
    let pad = || prop_oneof![3 => Just(0usize), 2 => Just(16), 1 => 1usize..9];
    let pads = ([pad(), pad()], [pad(), pad()], [pad(), pad()], 0usize..3);
    let more = (0..T::FORMS.len(), 0..ACTIVATIONS.len(), any::<bool>(), prop_oneof![Just(1usize), 1usize..5]);
    let case = (sizes, pads, more, any::<u64>().no_shrink());
    let property = |((batch, m, n, k), (a, w, y, rows), (form, activation, biased, splits), seed)| {
        let case = Inputs::<T>::new(T::FORMS[form], [batch, m, n, k], seed)
            .activated(ACTIVATIONS[activation])
            .padded(Pads { a, w, y, rows });
        let case = if biased { case.biased() } else { case };
        let want = case.reference();
        for gpu in devices::<T>() {
            case.check::<bf16>(&gpu, None, &want);
            case.check::<f32>(&gpu, config(GemmTile::Elements, splits), &want);
        }
        Ok(())
    };
    TestRunner::new(kit::config()).run(&case, property).unwrap_or_else(|e| panic!("{e}"));
}

for_each_operand!(sizes, tiles_and_splits, strides, integers_are_exact, random);

/// The longest sum of the largest codes still fits.
#[test]
fn the_longest_sum_of_int8() {
    for (k, tile) in [(131_071, GemmTile::Elements), (131_056, GemmTile::S16x16), (131_056, GemmTile::T64x64)]
    {
        let mut case = Inputs::<i8>::new(Form::Plain, [1, 2, 3, k], 0).unscaled();
        case.a.fill(-128);
        case.w.fill(-128);
        case.w[k..2 * k].fill(127);
        let want = case.reference().values;
        for gpu in devices::<i8>() {
            kit::assert_close(&case.run::<f32>(&gpu, config(tile, 1)), &want, Tolerance::Exact);
        }
    }
}

/// Blocks of 16 x 16 by so few columns that each SM of a large GPU has one or two, and by more.
#[test]
fn few_blocks_and_many() {
    for n in [70, 6000] {
        for (k, splits) in [(520, 1), (1032, 2)] {
            let case = Inputs::<bf16>::new(Form::Plain, [1, 5, n, k], n as u64);
            let want = case.reference();
            for gpu in devices::<bf16>() {
                for tile in [GemmTile::S16x16, GemmTile::S16x16Twice] {
                    case.check::<bf16>(&gpu, config(tile, splits), &want);
                }
                case.check::<bf16>(&gpu, None, &want);
            }
        }
    }
}

/// Groups of few rows of `w`, which only tiles through LDS serve, and of many columns.
#[test]
fn groups_of_any_shape() {
    for (i, group) in [(1, 128), (2, 256), (4, 128), (64, 1024), (1 << 20, 1 << 30)].into_iter().enumerate() {
        let form = Form::Block(BlockShape { n: group.0, k: group.1 });
        for m in [5, 70] {
            let case = Inputs::<i8>::new(form, [1, m, 70, 1296], i as u64);
            let want = case.reference();
            for gpu in devices::<i8>() {
                case.check::<f32>(&gpu, None, &want);
                case.check::<f32>(&gpu, config(GemmTile::T256x128, 2), &want);
                case.check::<f32>(&gpu, config(GemmTile::T128x128, 1), &want);
            }
        }
    }
}
