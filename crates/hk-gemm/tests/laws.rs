//! What GEMMs have to do whatever their tiles: identities, scaling, permutation, splits, batches, gates, NaN, empty axes.

use crate::common::{Form, Inputs, Operand, config, devices, tiles};
use crate::for_each_operand;
use hk_core::{Layout, bf16, f16};
use hk_gemm::{
    Accumulate, Activation, GemmConfig, GemmOptions, GemmProblem, GemmTile, batched_gemm_bf16, gemm_a16w16,
    gemm_a16w16_atomic, gemm_workspace, reference,
};
use hk_testkit::{self as kit, Gpu, HostTensorF64, Tolerance};

/// `w` = I gives `a` back.
fn identity<T: Operand>() {
    for &form in T::FORMS.iter().filter(|&&form| form != Form::Gated) {
        let n = 272;
        let mut case = Inputs::<T>::new(form, [2, 20, n, n], 1).unscaled();
        for (i, w) in case.w.iter_mut().enumerate() {
            *w = T::near(if i / n % n == i % n { 1.0 } else { 0.0 });
        }
        // A sum that begins with zero is not -0.
        let want: Vec<f64> = case.a.iter().map(|a| a.value() + 0.0).collect();
        for gpu in devices::<T>() {
            for tile in tiles(form) {
                kit::assert_close(&case.run::<f32>(&gpu, config(tile, 1)), &want, Tolerance::Exact);
            }
            kit::assert_close(&case.run::<bf16>(&gpu, None), &want, Tolerance::Exact);
        }
    }
}

/// Twice the scales, or the operand, is exactly twice the product.
fn powers_of_two<T: Operand>() {
    for &form in T::FORMS.iter().filter(|&&form| form != Form::Gated) {
        let case = Inputs::<T>::new(form, [2, 21, 40, 272], 2);
        let mut scaled = case.clone();
        if T::SCALED {
            scaled.a_scale.iter_mut().for_each(|s| *s *= 8.0);
            scaled.w_scale.iter_mut().for_each(|s| *s *= 0.5);
        } else {
            scaled.a.iter_mut().for_each(|a| *a = T::near(4.0 * a.value() as f32));
        }
        for gpu in devices::<T>() {
            for tile in [GemmTile::T64x64, GemmTile::S32x32, GemmTile::Elements] {
                let want: Vec<f32> = case.run::<f32>(&gpu, config(tile, 2)).iter().map(|y| 4.0 * y).collect();
                kit::assert_bits(&scaled.run::<f32>(&gpu, config(tile, 2)), &want);
            }
        }
    }
}

/// The product of a sum is the sum of the products.
fn sums_of_operands<T: Operand>() {
    let mut case = Inputs::<T>::new(Form::Plain, [1, 21, 40, 272], 3);
    let other = Inputs::<T>::new(Form::Plain, [1, 21, 40, 272], 4);
    // Small integers, whose sums are exact.
    let whole = |x: &T| (x.value() as f32).clamp(-4.0, 4.0).round();
    let (a, b): (Vec<f32>, Vec<f32>) =
        (case.a.iter().map(whole).collect(), other.a.iter().map(whole).collect());
    for gpu in devices::<T>() {
        let mut product = |a: Vec<f32>| {
            case.a = a.into_iter().map(T::near).collect();
            (case.run::<f32>(&gpu, None), case.reference())
        };
        let (x, of_x) = product(a.clone());
        let (y, of_y) = product(b.clone());
        let (sum, _) = product(a.iter().zip(&b).map(|(a, b)| a + b).collect());
        let values = x.iter().zip(&*y).map(|(x, y)| f64::from(*x) + f64::from(*y)).collect();
        let magnitudes = of_x.magnitudes.iter().zip(of_y.magnitudes).map(|(x, y)| 2.0 * (x + y)).collect();
        let want = HostTensorF64::new(of_x.shape, values).with_magnitudes(magnitudes);
        kit::assert_near(&sum, &want, Tolerance::Sum { terms: T::TERMS });
    }
}

/// Rows of `a` and `w` in another order give those of `y`, bit by bit.
fn permutation<T: Operand>() {
    let [m, n, k] = [67, 75, 272];
    let (rows, cols) = (|i: usize| i * 23 % m, |j: usize| j * 31 % n);
    for &form in T::FORMS.iter().filter(|form| matches!(form, Form::Plain)) {
        let case = Inputs::<T>::new(form, [1, m, n, k], 5).biased().activated(Some(Activation::Relu));
        let mut moved = case.clone();
        for i in 0..m {
            moved.a[i * k..][..k].copy_from_slice(&case.a[rows(i) * k..][..k]);
            moved.a_scale[i] = case.a_scale[rows(i)];
        }
        let (bias, moved_bias) = (case.bias.as_ref().unwrap(), moved.bias.as_mut().unwrap());
        for j in 0..n {
            moved.w[j * k..][..k].copy_from_slice(&case.w[cols(j) * k..][..k]);
            moved.w_scale[j] = case.w_scale[cols(j)];
            moved_bias[j] = bias[cols(j)];
        }
        for gpu in devices::<T>() {
            for tile in tiles(form) {
                let y = case.run::<f32>(&gpu, config(tile, 2));
                let want: Vec<f32> = (0..m * n).map(|i| y[rows(i / n) * n + cols(i % n)]).collect();
                kit::assert_bits(&moved.run::<f32>(&gpu, config(tile, 2)), &want);
            }
        }
    }
}

/// The same call gives the same bits, and one in parts what the whole gives, but for the rounding of sums.
fn splits<T: Operand>() {
    for &form in T::FORMS {
        let case = Inputs::<T>::new(form, [2, 18, 40, 6000 / size_of::<T>()], 6);
        let mut want = case.reference();
        for gpu in devices::<T>() {
            for tile in [GemmTile::T64x64, GemmTile::S16x32, GemmTile::Elements] {
                let whole = case.run::<f32>(&gpu, config(tile, 1));
                let parts = case.run::<f32>(&gpu, config(tile, 3));
                kit::assert_bits(&case.run::<f32>(&gpu, config(tile, 3)), &parts);
                want.values = whole.iter().map(|&y| y.into()).collect();
                kit::assert_near(&parts, &want, Tolerance::Sum { terms: T::TERMS });
            }
        }
    }
}

/// A batch is bitwise identical to the same GEMM without the others, given the tile.
fn batches<T: Operand>() {
    let [batch, m, n, k] = [3, 21, 40, 272];
    let case =
        Inputs::<T>::new(Form::Batched, [batch, m, n, k], 7).biased().activated(Some(Activation::Silu));
    for gpu in devices::<T>() {
        for tile in tiles(Form::Batched) {
            let all = case.run::<bf16>(&gpu, config(tile, 2));
            for b in 0..batch {
                let part = |x: &[f32], len: usize| x[b * len..][..len].to_vec();
                let alone = Inputs::<T> {
                    form: Form::Plain,
                    batch: 1,
                    a: case.a[b * m * k..][..m * k].to_vec(),
                    w: case.w[b * n * k..][..n * k].to_vec(),
                    a_scale: part(&case.a_scale, m),
                    w_scale: part(&case.w_scale, n),
                    bias: case.bias.as_ref().map(|bias| part(bias, n)),
                    ..case.clone()
                };
                kit::assert_bits(&alone.run::<bf16>(&gpu, config(tile, 2)), &all[b * m * n..][..m * n]);
            }
        }
    }
}

/// No columns of K: zero, or the bias; no rows or columns of y: nothing.
fn empty_axes<T: Operand>() {
    for &form in T::FORMS {
        let case = Inputs::<T>::new(form, [2, 5, 9, 0], 8).biased();
        for gpu in devices::<T>() {
            let want: Vec<f32> = match &case.bias {
                Some(bias) => (0..case.batch * 5 * 9).map(|i| bias[i / 45 * 9 + i % 9]).collect(),
                None => vec![0.0; 45],
            };
            for config in [
                None,
                config(GemmTile::Elements, 1),
                config(GemmTile::S32x32, 2),
                config(GemmTile::T64x64, 1),
            ] {
                kit::assert_bits(&case.run::<f32>(&gpu, config), &want);
            }
            for [m, n] in [[0, 9], [5, 0], [0, 0]] {
                assert!(Inputs::<T>::new(form, [2, m, n, 32], 8).biased().run::<f32>(&gpu, None).is_empty());
            }
        }
    }
}

for_each_operand!(identity, powers_of_two, sums_of_operands, permutation, splits, batches, empty_axes);

/// Asserts that just these outputs are no finite number.
#[track_caller]
fn assert_not_finite(y: &[f32], n: usize, hit: impl Fn(usize, usize) -> bool) {
    for (i, y) in y.iter().enumerate() {
        assert_eq!(!y.is_finite(), hit(i / n, i % n), "{y} at {}, {}", i / n, i % n);
    }
}

fn stray_values<T: Operand>(bad: &[f32], form: Form) {
    let [m, n, k] = [35, 70, 272];
    for &bad in bad {
        let mut case = Inputs::<T>::new(form, [1, m, n, k], 9);
        case.w.iter_mut().for_each(|w| *w = T::near(w.value().abs() as f32 + 1.0));
        let mut of_w = case.clone();
        // The last elements of the last rows, too: nothing beyond the ends is touched, nor do masked parts count.
        for (row, at) in [(3, 5), (m - 1, k - 1)] {
            case.a[row * k + at] = T::near(bad);
        }
        for (row, at) in [(17, 0), (n - 1, k - 1)] {
            of_w.w[row * k + at] = T::near(bad);
        }
        of_w.a.iter_mut().for_each(|a| *a = T::near(a.value().abs() as f32 + 1.0));
        for gpu in devices::<T>() {
            for tile in tiles(form) {
                assert_not_finite(&case.run::<f32>(&gpu, config(tile, 2)), n, |i, _| i == 3 || i == m - 1);
                assert_not_finite(&of_w.run::<f32>(&gpu, config(tile, 2)), n, |_, j| j == 17 || j == n - 1);
            }
        }
    }
}

#[test]
fn nan_and_infinity_stay_in_their_rows_and_columns() {
    stray_values::<bf16>(&[f32::NAN, f32::INFINITY], Form::Plain);
    stray_values::<f16>(&[f32::NEG_INFINITY], Form::Plain);
    for form in <hk_core::Fp8E4M3 as Operand>::FORMS {
        if *form != Form::Batched {
            stray_values::<hk_core::Fp8E4M3>(&[f32::NAN], *form);
            stray_values::<hk_core::Fp8E4M3Fnuz>(&[f32::NAN], *form);
        }
    }
}

/// Gates whose values are all one: the activation of the plain GEMM. Values whose gates are: the GEMM.
#[test]
fn gates_of_ones() {
    let [m, n, k] = [35, 70, 272];
    for values in [true, false] {
        let mut gated = Inputs::<bf16>::new(Form::Gated, [1, m, n, k], 10);
        gated.a.iter_mut().step_by(k).for_each(|a| *a = bf16::ONE);
        let (from, rest) = if values { (n, 0) } else { (0, n) };
        for (i, w) in gated.w[from * k..][..n * k].iter_mut().enumerate() {
            *w = if i % k == 0 { bf16::ONE } else { bf16::ZERO };
        }
        let activation = values.then_some(Activation::Silu);
        let mut plain = Inputs::<bf16>::new(Form::Plain, [1, m, n, k], 0).activated(activation);
        plain.a = gated.a.clone();
        plain.w = gated.w[rest * k..][..n * k].to_vec();
        let gated = gated.activated(activation);
        for gpu in devices::<bf16>() {
            for tile in tiles(Form::Gated) {
                for splits in [1, 2] {
                    let want = plain.run::<f32>(&gpu, config(tile, splits));
                    kit::assert_bits(&gated.run::<f32>(&gpu, config(tile, splits)), &want);
                }
            }
        }
    }
}

fn atomic(gpu: &Gpu, sizes: [usize; 3], accumulate: bool, config: Option<GemmConfig>) {
    let [m, n, k] = sizes;
    let whole = |x: Vec<f32>| x.into_iter().map(|x: f32| bf16::from_f32(x.round())).collect::<Vec<_>>();
    let (a, w) = (whole(kit::Fill::Normal.elements(m * k, 1)), whole(kit::Fill::Normal.elements(n * k, 2)));
    let before: Vec<f32> = (0..m * n).map(|i| (i % 1000) as f32).collect();
    let mut want = reference::product(&kit::widen(&a), &kit::widen(&w), [1, m, n, k]).values;
    if accumulate {
        want.iter_mut().zip(&before).for_each(|(y, before)| *y += f64::from(*before));
    }
    let (a, w) = (gpu.upload(&a, [m, k]), gpu.upload(&w, [n, k]));
    let mut y = gpu.upload_rows(&before, [m, n], n + 3);
    let options = GemmOptions { config, ..Default::default() };
    gemm_a16w16_atomic(
        gpu.stream(),
        a.view(),
        w.view(),
        y.view_mut(),
        if accumulate { Accumulate::Add } else { Accumulate::Overwrite },
        options,
    )
    .unwrap();
    kit::assert_close(&gpu.download(&y), &want, Tolerance::Exact);
    gpu.assert_guards(&y);
}

/// Sums of integers, which are exact in any order. With `accumulate` a block that ran twice would show: so the order of tiles is a
/// bijection for all these grids.
#[test]
fn every_output_is_added_to_once() {
    for gpu in kit::devices() {
        for (i, [m, n]) in
            [[1, 1], [65, 1], [200, 300], [130, 700], [641, 65], [330, 330]].into_iter().enumerate()
        {
            for (splits, group) in [(1, 1), (2, 3), (3, 2), (1, 64)] {
                let config = Some(GemmConfig { tile: GemmTile::T64x64, splits, group });
                atomic(&gpu, [m, n, 96], (i + splits) % 2 == 0, config);
                let config = Some(GemmConfig { tile: GemmTile::S16x32, splits, group });
                atomic(&gpu, [m.min(70), n, 96], true, config);
            }
        }
        for accumulate in [false, true] {
            atomic(&gpu, [5, 40, 4104], accumulate, None);
            atomic(&gpu, [5, 40, 0], accumulate, None);
            atomic(&gpu, [70, 300, 77], accumulate, None);
            atomic(&gpu, [0, 300, 77], accumulate, None);
        }
    }
}

/// The order of tiles, and hence the bits of an output, does not depend on the grouping.
#[test]
fn groups_change_no_bits() {
    let case = Inputs::<bf16>::new(Form::Plain, [1, 260, 200, 96], 12);
    for gpu in devices::<bf16>() {
        let run =
            |group| case.run::<f32>(&gpu, Some(GemmConfig { tile: GemmTile::T64x64, splits: 2, group }));
        let want = run(1);
        for group in [2, 3, 5, usize::MAX] {
            kit::assert_bits(&run(group), &want);
        }
    }
}

/// The length that `gemm_workspace` gives is of use, and no longer one is.
#[test]
fn the_workspace_is_used() {
    use hk_gemm::Precision;
    for gpu in devices::<bf16>() {
        let info = gpu.stream().device().info();
        assert_eq!(gemm_workspace(info, &GemmProblem::new(Precision::Bf16, 4096, 4096, 4096)), 0);
        for [batch, m, n, k] in [[1, 0, 5, 5], [0; 4], [usize::MAX; 4], [1, usize::MAX, 1, 1]] {
            gemm_workspace(info, &GemmProblem::new(Precision::I8, m, n, k).batched(batch));
        }
        let [m, n, k] = [4, 64, 32768];
        let len = gemm_workspace(info, &GemmProblem::new(Precision::Bf16, m, n, k));
        assert!(len >= 2 * m * n, "{len}");
        let case = Inputs::<bf16>::new(Form::Plain, [1, m, n, k], 13);
        let (a, w) = (gpu.upload(&case.a, [m, k]), gpu.upload(&case.w, [n, k]));
        let run = |len: usize| {
            let (mut y, mut space) = (gpu.poisoned::<f32>([m, n]), gpu.poisoned::<f32>([len]));
            let workspace = Some(space.view_mut());
            gemm_a16w16(
                gpu.stream(),
                a.view(),
                w.view(),
                None,
                y.view_mut(),
                workspace,
                GemmOptions::default(),
            )
            .unwrap();
            kit::assert_near(&gpu.download(&y), &case.reference(), Tolerance::Sum { terms: bf16::TERMS });
            gpu.assert_guards(&space);
            (gpu.download(&y), gpu.download(&space))
        };
        let (y, space) = run(len);
        // It is for whichever GEMM of these sizes needs most. On AMD targets slices meet: of a group of 16 rows each, and two flags.
        let slice = if info.arch.is_amd() { 16 * n } else { m * n };
        let written = space.iter().take_while(|x| !x.is_nan()).count();
        assert!(written >= 2 * slice, "{written} of {len}");
        assert!(space[written..].iter().all(|x| x.is_nan()));
        let (same, longer) = run(3 * len);
        kit::assert_bits(&same, &y);
        assert!(longer[len..].iter().all(|x| x.is_nan()));
        assert!(run(m * n - 1).1.iter().all(|x| x.is_nan()), "too short for two parts");
    }
}

/// Rounded once: halves of the last place to even, and no overflow before the scales.
#[test]
fn results_round_once() {
    let mut case = Inputs::<f16>::new(Form::Plain, [1, 1, 2, 16], 0);
    case.a.fill(f16::ZERO);
    case.w.fill(f16::ZERO);
    // 2048 + 1 is between two f16; 60000 + 5536 - 30000 exceeds the largest f16 before the last addition.
    for (i, (a, w)) in [
        (2048.0, [1.0, 0.0]),
        (1.0, [1.0, 0.0]),
        (60000.0, [0.0, 1.0]),
        (5536.0, [0.0, 1.0]),
        (30000.0, [0.0, -1.0]),
    ]
    .into_iter()
    .enumerate()
    {
        case.a[i] = f16::from_f32(a);
        case.w[i] = f16::from_f32(w[0]);
        case.w[16 + i] = f16::from_f32(w[1]);
    }
    for gpu in devices::<f16>() {
        let y = case.run::<f16>(&gpu, None);
        assert_eq!([y[0].to_f64(), y[1].to_f64()], [2048.0, f16::from_f32(35536.0).to_f64()]);
    }
}

/// One row seen as many, one matrix as many, and strides that have no meaning.
#[test]
fn broadcasts_and_strides_of_lone_rows() {
    let [batch, m, n, k] = [3, 21, 40, 272];
    let case = Inputs::<bf16>::new(Form::Plain, [1, 1, n, k], 14);
    for gpu in devices::<bf16>() {
        let (stream, options) = (gpu.stream(), GemmOptions::default());
        let (a, w) = (gpu.upload(&case.a, [1, k]), gpu.upload(&case.w, [n, k]));
        let one = case.run::<f32>(&gpu, config(GemmTile::S32x32, 1));
        let many = a.view().broadcast([m, k]).unwrap();
        let of_batches = (many.split_axis(0, m).unwrap(), w.view().split_axis(0, n).unwrap());
        let of_batches = of_batches
            .0
            .broadcast([batch, m, k])
            .and_then(|a| Ok((a, of_batches.1.broadcast([batch, n, k])?)));
        let (of_a, of_w) = of_batches.unwrap();
        let mut y = gpu.poisoned::<f32>([batch, m, n]);
        let fixed = GemmOptions { config: config(GemmTile::S32x32, 1), ..options };
        batched_gemm_bf16(stream, of_a, of_w, None, y.view_mut(), None, fixed).unwrap();
        kit::assert_bits(&gpu.download(&y), &one.repeat(batch * m));

        let buffer = stream.upload(&case.a).unwrap();
        let lone = buffer.view_with(Layout::with_strides([1, k], [1 << 60, 1]).unwrap(), 0).unwrap();
        let mut y = gpu.poisoned::<f32>([1, n]);
        for tile in [GemmTile::S32x32, GemmTile::T64x64, GemmTile::Elements] {
            let fixed = GemmOptions { config: config(tile, 1), ..options };
            gemm_a16w16(stream, lone, w.view(), None, y.view_mut(), None, fixed).unwrap();
            kit::assert_bits(&gpu.download(&y), &case.run::<f32>(&gpu, config(tile, 1)));
        }
    }
}
