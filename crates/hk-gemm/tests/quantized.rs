//! GEMMs of quantized weights, mxfp4 and shuffled weights, against the f64 reference and by
//! what has to hold whatever the tiles: sizes, strides, exactness, extreme scales, quantized activations, split-K slices.

use crate::mixed::{By, Case, Kind, Memory, Operand, SUM, config, devices};
use hk_core::{E8M0, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, bf16, f16};
use hk_gemm::{
    A16WFp4Inputs, Accumulate, Activation, BlockShape, GemmOptions, GemmProblem, GemmTile, Precision,
    Prequant, gemm_a16wfp4_atomic, gemm_workspace,
};
use hk_testkit::proptest::test_runner::TestRunner;
use hk_testkit::{self as kit, Gpu, Place, Tolerance, assert_error, kind, proptest::prelude::*};

hk_testkit::corners_of!(hk_gemm::OPERATORS: gemm_a16w8_blockscale, batched_gemm_a8w8_ptgq, gemm_a16wfp4, gemm_a16wfp4_atomic, batched_gemm_a16wfp4, gemm_a8wfp4, gemm_afp4wfp4, batched_gemm_afp4wfp4);

/// A test for each pair of operands that have not one type of at least 8 bits.
macro_rules! for_each_pair {
    ($($name:ident),+ $(,)?) => {
        $(
            mod $name {
                use super::*;
                #[test]
                fn half_by_fp4() {
                    super::$name::<bf16, Fp4x2>();
                    super::$name::<f16, Fp4x2>();
                }
                #[test]
                fn fp8_by_fp4() {
                    super::$name::<Fp8E4M3Fnuz, Fp4x2>();
                    super::$name::<Fp8E4M3, Fp4x2>();
                }
                #[test]
                fn fp4_by_fp4() {
                    super::$name::<Fp4x2, Fp4x2>();
                }
                #[test]
                fn half_by_byte() {
                    super::$name::<bf16, i8>();
                    super::$name::<f16, Fp8E4M3Fnuz>();
                    super::$name::<bf16, Fp8E4M3>();
                }
            }
        )+
    };
}

const ACTIVATIONS: [Option<Activation>; 4] =
    [None, Some(Activation::Relu6), Some(Activation::Silu), Some(Activation::GeluTanh)];

/// With a batch or none, with activations as they are or quantized.
fn forms<X: By<W>, W: Operand>() -> Vec<(Option<usize>, bool)> {
    let batches: &[_] = if X::KIND == Kind::CodeByFp4 { &[None] } else { &[None, Some(2)] };
    let forms = batches.iter().flat_map(|&batch| X::KIND.quantizes().iter().map(move |&q| (batch, q)));
    // Batches by codes are always quantized.
    forms.filter(|form| X::KIND != Kind::HalfByCode || *form != (Some(2), false)).collect()
}

/// Of batches, a tile of each kind: there is nothing new in the others.
fn few(batch: Option<usize>, tile: GemmTile) -> bool {
    batch.is_none() || matches!(tile, GemmTile::T64x64 | GemmTile::S32x32)
}

/// Few rows to many, columns and lengths that tiles and vectors divide and do not; the configuration is the device's choice.
fn sizes<X: By<W>, W: Operand>() {
    let wide = [[16, 32], [48, 96], [80, 160], [192, 384], [256, 512], [576, 512]];
    let odd = [[1, 32], [130, 257], [3, 1], [5, 2]];
    let any = if X::KIND.mx() { &odd[..1] } else { &odd[..] };
    let wide = [&wide[..], any].concat();
    let forms = forms::<X, W>();
    let step = if kit::full() { 1 } else { 3 };
    for (i, m) in [1, 3, 17, 33, 64, 129].into_iter().enumerate() {
        for j in (i % step..wide.len()).step_by(step) {
            let [n, k] = wide[j];
            let (batch, prequant) = forms[(i + j) % forms.len()];
            let activation = ACTIVATIONS[(i + j / 3) % ACTIVATIONS.len()];
            let case =
                Case::<X, W>::new(batch, [m, n, k], prequant, (i * 10 + j) as u64).finished(activation);
            let want = case.reference();
            for gpu in devices::<X, W>() {
                match (i + j) % 3 {
                    0 => case.check::<bf16>(&gpu, None, &want),
                    1 => case.check::<f16>(&gpu, None, &want),
                    _ => case.check::<f32>(&gpu, None, &want),
                }
            }
        }
    }
}

/// A length of K with so many parts, the last of them short.
fn parted<X: By<W>, W: Operand>(tile: GemmTile, splits: usize) -> usize {
    let stretch = match tile {
        GemmTile::S16x16 | GemmTile::S16x16Twice | GemmTile::S16x32 => 2048,
        GemmTile::S32x32 => 1024,
        GemmTile::S64x32 => 512,
        _ => 256,
    };
    let bytes = splits * stretch - stretch / 2 + 16;
    (bytes * X::EACH / size_of::<X>()).next_multiple_of(32)
}

/// Every tile, K in parts that it divides by and not.
fn tiles_and_splits<X: By<W>, W: Operand>() {
    for (i, (batch, prequant)) in forms::<X, W>().into_iter().enumerate() {
        let tiles = Case::<X, W>::new(batch, [1, 1, 32], prequant, 0).tiles();
        for tile in tiles.into_iter().filter(|&tile| few(batch, tile)) {
            for splits in [1, 2, 3, 7] {
                let (m, n) = if tile.shape().0 > 64 { (130, 20) } else { (18, 37) };
                // Large ones in few parts, batches too: there is nothing new in them.
                if splits > 2 && (tile.shape().0 > 64 || batch.is_some()) {
                    continue;
                }
                let activation = ACTIVATIONS[(i + splits) % ACTIVATIONS.len()];
                let k = parted::<X, W>(tile, splits);
                let case = Case::<X, W>::new(batch, [m, n, k], prequant, splits as u64).finished(activation);
                let want = case.reference();
                for gpu in devices::<X, W>() {
                    case.check::<f32>(&gpu, config(tile, splits), &want);
                }
            }
        }
    }
}

/// Rows with padding, on 16 bytes or not; scales with any strides; batches with more between them, or as the second axis.
fn strides<X: By<W>, W: Operand>() {
    let sixteen = |bytes: usize| 16 / bytes;
    let even = Memory {
        x: [2 * sixteen(size_of::<X>()), sixteen(size_of::<X>())],
        w: [sixteen(size_of::<W>()), 2 * sixteen(size_of::<W>())],
        y: [16, 0],
        rows: 2,
        turned_scales: true,
        ..Memory::default()
    };
    let turned = Memory { turned: true, y: [1, 3], turned_scales: false, ..even };
    let odd_x = Memory { x: [1, 0], ..even };
    let odd_w = Memory { w: [0, 1], y: [3, 1], turned: true, ..even };
    for (batch, prequant) in forms::<X, W>() {
        for (memory, tiles) in [
            (even, &[GemmTile::T64x64, GemmTile::S16x32, GemmTile::S64x32, GemmTile::Elements][..]),
            (turned, &[GemmTile::T64x64, GemmTile::S32x32]),
            (odd_x, &[GemmTile::Elements]),
            (odd_w, &[GemmTile::Elements]),
        ] {
            for m in [15, 35] {
                let case = Case::<X, W>::new(batch.map(|_| 3), [m, 39, 256], prequant, 9)
                    .finished(None)
                    .lies(memory);
                let want = case.reference();
                for gpu in devices::<X, W>() {
                    case.check::<bf16>(&gpu, None, &want);
                    for &tile in tiles.iter().filter(|_| m > 32) {
                        case.check::<f32>(&gpu, config(tile, 2), &want);
                    }
                }
            }
        }
    }
}

/// `w` = I gives back what `a` stands for, powers of two in scales scale it, and sums of integers are exact.
fn exact<X: By<W>, W: Operand>() {
    for (batch, prequant) in forms::<X, W>() {
        let [m, n, k] = [20, 160, 160];
        let mut identity = Case::<X, W>::new(batch, [m, n, k], prequant, 1).unscaled();
        let of_w: Vec<f32> = (0..batch.unwrap_or(1) * n * k).map(|i| (i / k % n == i % k).into()).collect();
        identity.w = W::pack(&of_w);
        let x = X::unpack(&identity.x);
        // A sum that begins with zero is not -0. Of quantized ones the scale is rounded once more.
        let x = if prequant { X::quantized(&x, k, 128) } else { x };
        let want: Vec<f64> = x.iter().map(|x| x + 0.0).collect();

        let mut whole = Case::<X, W>::new(batch, [m, 37, 544], prequant, 2).unscaled();
        let round = |x: &[f64]| x.iter().map(|x| x.round() as f32).collect::<Vec<_>>();
        (whole.x, whole.w) = (X::pack(&round(&X::unpack(&whole.x))), W::pack(&round(&W::unpack(&whole.w))));
        let sums = whole.reference().values;

        let random = Case::<X, W>::new(batch, [m, 37, 544], prequant, 3);
        let mut scaled = random.clone();
        scaled.x_scale.iter_mut().for_each(|s| *s *= 2.0);
        scaled.w_scale.iter_mut().for_each(|s| *s *= 0.25);
        scaled.x_mx.iter_mut().for_each(|s| s.0 += 3);
        scaled.w_mx.iter_mut().for_each(|s| s.0 -= 1);
        let by = match X::KIND {
            Kind::HalfByCode => 0.25,
            Kind::Codes => 0.5,
            Kind::Fp4 => 4.0,
            Kind::CodeByFp4 => 1.0,
            _ => 0.5,
        };
        for gpu in devices::<X, W>() {
            for tile in identity.tiles().into_iter().filter(|&tile| few(batch, tile)) {
                // Scales of codes are no powers of two: their products with sums are rounded.
                let rounded = prequant && X::KIND == Kind::HalfByCode;
                if rounded {
                    kit::assert_close(
                        &identity.run::<f32>(&gpu, config(tile, 1)),
                        &want,
                        Tolerance::Sum { terms: 1e-6 },
                    );
                } else {
                    kit::assert_close(&identity.run::<f32>(&gpu, config(tile, 1)), &want, Tolerance::Exact);
                    kit::assert_close(&whole.run::<f32>(&gpu, config(tile, 2)), &sums, Tolerance::Exact);
                }
                if matches!(tile, GemmTile::T64x64 | GemmTile::S32x32 | GemmTile::Elements) {
                    let once: Vec<f32> =
                        random.run::<f32>(&gpu, config(tile, 2)).iter().map(|y| by * y).collect();
                    kit::assert_bits(&scaled.run::<f32>(&gpu, config(tile, 2)), &once);
                }
            }
        }
    }
}

/// Sizes; paddings, and whether x and y, or scales, are turned; form, activation, split-K slices, batch; seed.
type Random = (
    (usize, usize, usize),
    ([usize; 2], [usize; 2], [usize; 2], usize, (bool, bool)),
    (usize, usize, usize, usize),
    u64,
);

fn random<X: By<W>, W: Operand>() {
    let side = || kit::size(1..=150, &[16, 32, 64, 128]);
    let pad = || prop_oneof![3 => Just(0usize), 2 => Just(16), 1 => 1usize..9];
    let two = || (pad(), pad()).prop_map(|(a, b)| [a, b]);
    let pads = (two(), two(), two(), 0usize..3, (any::<bool>(), any::<bool>()));
    let columns = X::KIND.columns();
    let lengths = kit::size(0..=1500 / columns, &[128 / columns, 1024 / columns]);
    let more = (0..4usize, 0..ACTIVATIONS.len(), 1usize..4, 1usize..=3);
    let case = ((side(), side(), lengths), pads, more, any::<u64>().no_shrink());
    let forms = forms::<X, W>();
    let property = |(
        (m, n, k),
        (x, w, y, rows, (turned, turned_scales)),
        (form, activation, splits, b),
        seed,
    ): Random| {
        let (batch, prequant) = forms[form % forms.len()];
        let memory = Memory { x, w, y, rows, turned, turned_scales, ..Memory::default() };
        let case = Case::<X, W>::new(batch.map(|_| b), [m, n, k * columns], prequant, seed)
            .finished(ACTIVATIONS[activation])
            .lies(memory);
        let want = case.reference();
        for gpu in devices::<X, W>() {
            case.check::<bf16>(&gpu, None, &want);
            case.check::<f32>(&gpu, config(GemmTile::Elements, splits), &want);
        }
        Ok(())
    };
    TestRunner::new(proptest::test_runner::Config { cases: kit::config().cases / 2, ..kit::config() })
        .run(&case, property)
        .unwrap_or_else(|e| panic!("{e}"));
}

/// What is no number stays in its row of a, or of w.
fn strays<X: By<W>, W: Operand>() {
    let [m, n, k] = [35, 37, 288];
    let strays: &[f32] =
        if X::DTYPE == hk_core::DType::Bf16 { &[f32::NAN, f32::INFINITY] } else { &[f32::NAN] };
    for (batch, prequant) in forms::<X, W>().into_iter().filter(|form| form.0.is_none()) {
        let case = Case::<X, W>::new(batch, [m, n, k], prequant, 4);
        for &stray in strays.iter().filter(|_| X::EACH == 1) {
            let mut case = case.clone();
            for (row, at) in [(3, 5), (m - 1, k - 1)] {
                case.x[row * k + at] = X::pack(&[stray])[0];
            }
            // Int8 has no NaN: the reference defines the result.
            let want = case.reference();
            assert!(
                want.values.iter().enumerate().all(|(i, y)| y.is_finite() || [3, m - 1].contains(&(i / n)))
            );
            for gpu in devices::<X, W>() {
                for tile in case.tiles().into_iter().filter(|tile| tile.shape().0 < 256) {
                    case.check::<f32>(&gpu, config(tile, 2), &want);
                }
            }
        }
        let mut of_scales = case.clone();
        let mut columns = vec![17, n - 1];
        let mut rows = vec![];
        if !case.w_mx.is_empty() {
            for (j, block) in [(17, 0), (n - 1, k / 32 - 1)] {
                of_scales.w_mx[j * (k / 32) + block] = E8M0::NAN;
            }
        } else {
            columns.clear();
        }
        if !case.x_mx.is_empty() {
            rows = vec![3, m - 1];
            rows.iter().for_each(|i| of_scales.x_mx[i * (k / 32) + 1] = E8M0::NAN);
        }
        let want = of_scales.reference();
        for (i, y) in want.values.iter().enumerate() {
            assert_eq!(y.is_nan(), columns.contains(&(i % n)) || rows.contains(&(i / n)));
        }
        for gpu in devices::<X, W>() {
            for tile in case.tiles().into_iter().filter(|tile| tile.shape().0 < 256) {
                of_scales.check::<f32>(&gpu, config(tile, 2), &want);
            }
        }
    }
}

/// Shuffled weights and scales give the bits of plain ones.
fn shuffled<X: By<W>, W: Operand>() {
    for (batch, prequant) in forms::<X, W>() {
        for (k, more) in [(256, 0), (288, 32 * W::EACH), (64, 64)] {
            let columns = k / W::EACH;
            let more = if (columns + more).is_multiple_of(32) { more } else { more + 16 };
            let plain = Case::<X, W>::new(batch, [35, 48, k], prequant, 5);
            let of_w = Memory { w_shuffled: Some(more), ..Memory::default() };
            let of_both = Memory { scales_shuffled: X::KIND.mx(), ..of_w };
            let of_scales = Memory { w_shuffled: None, ..of_both };
            for gpu in devices::<X, W>() {
                for tile in plain.tiles().into_iter().filter(|&tile| few(batch, tile)) {
                    let want = plain.run::<f32>(&gpu, config(tile, 2));
                    let alone = if more == 0 { &[of_w, of_scales][..] } else { &[] };
                    for &memory in [of_both].iter().chain(alone) {
                        kit::assert_bits(
                            &plain.clone().lies(memory).run::<f32>(&gpu, config(tile, 2)),
                            &want,
                        );
                    }
                }
                let case = plain.clone().lies(of_both);
                case.check::<bf16>(&gpu, None, &case.reference());
            }
        }
    }
}

/// Unsummed split-K slices: they sum to the GEMM, slices beyond K are zero, slice 0 has the bias.
fn slices<X: By<W>, W: Operand>() {
    for (batch, prequant) in forms::<X, W>() {
        let case = Case::<X, W>::new(batch, [18, 37, 1056], prequant, 6).finished(None);
        let case = Case { y_scale: None, ..case };
        let (want, parts) = (case.reference(), 40);
        let shape: Vec<usize> = [parts].into_iter().chain(case.shape()).collect();
        let plane = want.values.len();
        for gpu in devices::<X, W>() {
            for tile in [None, Some(GemmTile::T64x64), Some(GemmTile::S32x32), Some(GemmTile::Elements)] {
                // Which comes after the sum of all parts.
                let activation = Some(Activation::Silu);
                let config = tile.and_then(|tile| config(tile, 1));
                let options = GemmOptions { activation, config, skip_reduce: true, ..GemmOptions::default() };
                let mut y = gpu.poisoned::<f32>(Place::rows(&shape, 37 + 3));
                case.run_to(&gpu, options, case.room(&gpu, None), &mut y).unwrap();
                let got = gpu.download(&y);
                gpu.assert_guards(&y);
                let sums = (0..plane).map(|i| (0..parts).map(|s| got[s * plane + i]).sum::<f32>());
                let sums = kit::Array::new(&*got.label, case.shape(), sums.collect());
                kit::assert_near(&sums, &want, SUM);
                assert!(got[plane * (parts - 1)..].iter().all(|&y| y == 0.0), "{tile:?}");
                let mut y = gpu.poisoned::<bf16>(Place::contiguous(&shape));
                let r = case.run_to(&gpu, options, case.room(&gpu, None), &mut y);
                assert_error(r, kind!(DType), &["y", "bf16", "f32 (skip_reduce)"]);
            }
        }
    }
}

for_each_pair!(sizes, tiles_and_splits, strides, exact, random, strays, shuffled, slices);

#[test]
fn shuffled_weights_of_one_type() {
    shuffled::<bf16, bf16>();
    shuffled::<f16, f16>();
    shuffled::<i8, i8>();
    shuffled::<Fp8E4M3Fnuz, Fp8E4M3Fnuz>();
    shuffled::<Fp8E4M3, Fp8E4M3>();
}

#[test]
fn slices_of_one_type() {
    slices::<bf16, bf16>();
    slices::<i8, i8>();
    slices::<Fp8E4M3, Fp8E4M3>();
}

/// Scales from end to end of their range, with values that keep the products within f32's.
fn extremes<X: By<W>, W: Operand>(of_x: &[u8]) {
    let bytes = [0, 1, 2, 64, 126, 127, 190, 252, 253, 254];
    let [m, n, k] = [of_x.len().max(3), bytes.len() + 6, 96];
    let mut case = Case::<X, W>::new(None, [m, n, k], false, 7).unscaled();
    // One number in each row of w, the least of fp4 beside it.
    let of_w: Vec<f32> = (0..n * k)
        .map(|i| {
            if i % k == i / k {
                -1.0
            } else if i % k == 70 {
                0.5
            } else {
                0.0
            }
        })
        .collect();
    case.w = W::pack(&of_w);
    case.x = X::pack(&(0..m * k).map(|i| if i % 2 == 0 { 1.0 } else { -2.0 }).collect::<Vec<_>>());
    for (j, &byte) in bytes.iter().enumerate() {
        case.w_mx[j * 3..][..3].fill(E8M0(byte));
    }
    for (i, &byte) in of_x.iter().enumerate() {
        case.x_mx[i * 3..][..3].fill(E8M0(byte));
    }
    let mut want = case.reference();
    // A sum of which nothing is left is not -0.
    for y in &mut want.values {
        *y = f64::from(*y as f32) + 0.0;
    }
    for gpu in devices::<X, W>() {
        for tile in case.tiles() {
            for splits in [1, 2] {
                let got = case.run::<f32>(&gpu, config(tile, splits));
                // Of terms beyond the range of f32 the sum depends on the order.
                let far = |i: usize| want.magnitudes[i] > f64::from(f32::MAX);
                let want = want.values.iter().enumerate();
                let want: Vec<f64> = want.map(|(i, &y)| if far(i) { got[i].into() } else { y }).collect();
                kit::assert_close(&got, &want, Tolerance::Exact);
            }
        }
    }
}

#[test]
fn extreme_scales() {
    extremes::<bf16, Fp4x2>(&[]);
    extremes::<f16, Fp4x2>(&[]);
    extremes::<Fp8E4M3Fnuz, Fp4x2>(&[]);
    extremes::<Fp8E4M3, Fp4x2>(&[]);
    extremes::<Fp4x2, Fp4x2>(&[127]);
    extremes::<Fp4x2, Fp4x2>(&[0, 1, 2, 126, 127, 128, 252, 253, 254]);
}

/// Activations quantized in registers are bitwise identical to those quantized ahead of the GEMM, whatever the workspace.
fn quantized<X: By<W>, W: Operand>() {
    for (batch, m, k) in [(None, 20, 288), (Some(2), 32, 256), (None, 70, 544), (Some(2), 70, 288)] {
        let mut case = Case::<X, W>::new(batch, [m, 37, k], true, 8);
        // Blocks of zeros, of the smallest numbers and of ties.
        case.x[..32].fill(X::pack(&[0.0])[0]);
        case.x[32..64].fill(X::pack(&[1e-7])[0]);
        for (i, x) in case.x[64..128].iter_mut().enumerate() {
            *x = X::pack(&[(i % 25) as f32 * 0.25])[0];
        }
        let want = case.reference();
        let without = case.clone().lies(Memory { no_workspace: true, ..Memory::default() });
        let shifted = case.clone().lies(Memory { x: [1, 0], ..Memory::default() });
        for gpu in devices::<X, W>() {
            for tile in [GemmTile::S16x32, GemmTile::S32x32, GemmTile::T64x64] {
                case.check::<f32>(&gpu, config(tile, 1), &want);
            }
            let y = without.run::<f32>(&gpu, None);
            kit::assert_near(&y, &want, SUM);
            if m > 32 {
                kit::assert_bits(&without.run::<f32>(&gpu, config(GemmTile::S32x32, 1)), &y);
            }
            case.check::<bf16>(&gpu, None, &want);
            shifted.check::<f32>(&gpu, None, &want);
            // The scalar path and tiles of more rows quantize ahead of the GEMM: the workspace has to have room.
            let room = if X::KIND == Kind::HalfByFp4 { m * batch.unwrap_or(1) * k / 8 } else { m * k / 4 };
            for (case, config) in [(&shifted, None), (&case, config(GemmTile::T64x64, 1))] {
                let mut y = gpu.poisoned::<f32>(case.place([m, 37], [0, 0], false));
                let r = case.run_to(&gpu, case.options(config), room - 1, &mut y);
                assert_error(
                    r,
                    kind!(Shape),
                    &["workspace", &format!("[{}]", room - 1), "or longer, for quantized a"],
                );
                gpu.assert_untouched(&y);
            }
        }
    }
}

#[test]
fn activations_quantized_in_registers_and_ahead() {
    quantized::<bf16, Fp4x2>();
    quantized::<f16, Fp4x2>();
    quantized::<bf16, i8>();
    quantized::<f16, i8>();
    quantized::<bf16, Fp8E4M3Fnuz>();
    quantized::<f16, Fp8E4M3>();
}

/// Codes themselves: w = I times a power of two shows each of them exactly, whichever way they are made.
#[test]
fn quantized_values_are_the_same_in_registers_and_ahead() {
    let [m, k] = [32, 256];
    let mut case = Case::<bf16, Fp4x2>::new(None, [m, k, k], true, 9).unscaled();
    case.w = Operand::pack(&(0..k * k).map(|i| (i / k == i % k).into()).collect::<Vec<_>>());
    case.x
        .iter_mut()
        .enumerate()
        .for_each(|(i, x)| *x = bf16::from_f32(x.to_f32() * (i as f32 / 700.0).exp2()));
    let want = case.reference();
    for gpu in devices::<bf16, Fp4x2>() {
        for tile in
            [GemmTile::S16x32, GemmTile::S32x32, GemmTile::S64x32, GemmTile::T64x64, GemmTile::Elements]
        {
            kit::assert_close(&case.run::<f32>(&gpu, config(tile, 1)), &want.values, Tolerance::Exact);
        }
    }
}

/// Blocks of other shapes: of few rows of w, which only tiles through LDS serve, and of many columns.
#[test]
fn weights_in_groups_of_any_shape() {
    for (i, (n, k)) in [(1, 128), (2, 256), (4, 128), (64, 1024), (1 << 20, 1 << 30)].into_iter().enumerate()
    {
        let group = BlockShape { n, k };
        for m in [5, 70] {
            let mut case = Case::<bf16, i8>::new(None, [m, 70, 1296], false, i as u64);
            case.group = Some(group);
            case.w_scale = crate::mixed::normal(70usize.div_ceil(n) * 1296usize.div_ceil(k), 3);
            let want = case.reference();
            for gpu in devices::<bf16, i8>() {
                case.check::<f32>(&gpu, None, &want);
                case.check::<f32>(&gpu, config(GemmTile::T64x64, 2), &want);
            }
            if k == 128 {
                let case = Case { prequant: true, ..case };
                let want = case.reference();
                for gpu in devices::<bf16, i8>() {
                    case.check::<f32>(&gpu, None, &want);
                }
            }
        }
    }
}

fn atomic(gpu: &Gpu, [m, n, k]: [usize; 3], prequant: bool, accumulate: bool, tile: Option<GemmTile>) {
    let mut case = Case::<bf16, Fp4x2>::new(None, [m, n, k], prequant, 10).unscaled();
    // Integers that mxfp4 has: sums are exact in any order.
    case.x.iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32().round().clamp(-4.0, 4.0)));
    case.w =
        Operand::pack(&Operand::unpack(&case.w).iter().map(|x: &f64| x.round() as f32).collect::<Vec<_>>());
    let before: Vec<f32> = (0..m * n).map(|i| (i % 1000) as f32).collect();
    let mut want = case.reference().values;
    if accumulate {
        want.iter_mut().zip(&before).for_each(|(y, before)| *y += f64::from(*before));
    }
    let inputs = case.upload(gpu);
    let mut y = gpu.upload_rows(&before, [m, n], n + 3);
    let info = gpu.stream().device().info();
    let mut workspace = gpu.poisoned::<f32>([gemm_workspace(
        info,
        &GemmProblem::new(Precision::HalfByFp4, m, n, k).prequantized(32),
    )]);
    let config = tile.and_then(|tile| config(tile, 3));
    let options = GemmOptions { config, ..GemmOptions::default() };
    let space = Some(workspace.view_mut());
    let (x, w, w_mx, to) = (inputs.x.view(), inputs.weight(), inputs.w_mx(), y.view_mut());
    gemm_a16wfp4_atomic(
        gpu.stream(),
        A16WFp4Inputs { a: x, w, w_scale: w_mx },
        if prequant { Prequant::Yes } else { Prequant::No },
        to,
        if accumulate { Accumulate::Add } else { Accumulate::Overwrite },
        space,
        options,
    )
    .unwrap();
    kit::assert_close(&gpu.download(&y), &want, Tolerance::Exact);
    gpu.assert_guards(&y);
    gpu.assert_guards(&workspace);
}

#[test]
fn slices_added_with_atomics() {
    for gpu in kit::devices() {
        for (prequant, accumulate) in [(false, false), (false, true), (true, false), (true, true)] {
            for tile in [None, Some(GemmTile::S16x32), Some(GemmTile::T64x64), Some(GemmTile::Elements)] {
                atomic(&gpu, [18, 40, 1056], prequant, accumulate, tile);
                atomic(&gpu, [70, 33, 160], prequant, accumulate, tile);
            }
            atomic(&gpu, [5, 40, 0], prequant, accumulate, None);
            atomic(&gpu, [0, 40, 64], prequant, accumulate, None);
        }
    }
}

/// No columns of K: zero, or the bias; no rows or columns: nothing.
fn empty<X: By<W>, W: Operand>() {
    for (batch, prequant) in forms::<X, W>() {
        for sizes in [[5, 9, 0], [40, 9, 0], [0, 9, 32], [5, 0, 32], [0, 0, 0]] {
            let case = Case::<X, W>::new(batch, sizes, prequant, 11).finished(None);
            let want = case.reference().values.iter().map(|&y| y as f32).collect::<Vec<_>>();
            for gpu in devices::<X, W>() {
                for config in [None, config(GemmTile::Elements, 1), config(GemmTile::S32x32, 2)] {
                    kit::assert_bits(&case.run::<f32>(&gpu, config), &want);
                }
            }
        }
    }
}

#[test]
fn empty_axes() {
    empty::<bf16, Fp4x2>();
    empty::<Fp8E4M3, Fp4x2>();
    empty::<Fp4x2, Fp4x2>();
    empty::<f16, i8>();
}
