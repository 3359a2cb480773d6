//! `rmsnorm` on the emulated GPUs (and real ones if there are any), against its f64 reference and its laws.

use crate::common::{COLS, assert_rstd, assert_same, dense, options, rmsnorm, with_eps};
use hk_core::{DType, Float, bf16, f16};
use hk_norm::{RmsNormOptions, RmsNormOutputs, RoundMode, Weight, WeightOffset, reference};
use hk_testkit::{
    self as kit, Fill, Place, Refusals, RowCase, Tolerance, assert_error, floats, kind, proptest::prelude::*,
    widen,
};

/// The result is near the reference, and exactly the formula for the given `rstd`.
#[track_caller]
fn check<T: Float, W: Weight<T> + Float>(c: &RowCase<T>, weight: &[W], options: RmsNormOptions) {
    let (x, w) = (widen(&c.x), widen(weight));
    let want = reference::rmsnorm::<T>(&x, &w, crate::common::rounding_once(options));
    for gpu in kit::devices() {
        let (x, weight_tensor) = (gpu.upload(&c.x, c.place(0)), gpu.upload(weight, [c.cols]));
        let got = rmsnorm(&gpu, &x, &weight_tensor, c.place(1), options);
        assert_rstd(&got.rstd, &want.rstd);
        kit::assert_within_ulps(&got.y, &crate::common::compose(&c.x, weight, &got.rstd, options), 0);
        if options.round_mode == RoundMode::F32 {
            kit::assert_close(&got.y, &want.y, Tolerance::Reduction);
        }
    }
}

#[track_caller]
fn check_either_weight<T: Float>(c: &RowCase<T>, f32_weight: bool, options: RmsNormOptions)
where
    f32: Weight<T>,
{
    if f32_weight {
        check(c, &crate::common::f32_weights(c), options);
    } else {
        check(c, &c.w, options);
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_reference(c in kit::row_case::<bf16>(1..=80, 1..=20_000), f32_weight: bool, o in options()) {
        check_either_weight(&c, f32_weight, o);
    }

    #[test]
    fn f16_matches_reference(c in kit::row_case::<f16>(1..=80, 1..=20_000), f32_weight: bool, o in options()) {
        check_either_weight(&c, f32_weight, o);
    }

    #[test]
    fn f32_matches_reference(c in kit::row_case::<f32>(1..=80, 1..=20_000), o in options()) {
        check(&c, &c.w, o);
    }

    /// Batch invariance: a row's bits depend on neither other rows, nor its position, nor the layout.
    #[test]
    fn a_row_does_not_depend_on_its_surroundings(
        c in kit::row_case::<bf16>(2..=40, 1..=20_000),
        pick in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        o in options(),
    ) {
        let row = pick.index(c.rows);
        let x = &c.x[row * c.cols..][..c.cols];
        let mut moved = c.matrix(1);
        let place = at.index(c.rows);
        moved[place * c.cols..][..c.cols].copy_from_slice(x);
        for gpu in kit::devices() {
            let weight = gpu.upload(&c.w, [c.cols]);
            let all = rmsnorm(&gpu, &gpu.upload(&c.x, c.place(0)), &weight, c.place(1), o);
            let alone = rmsnorm(&gpu, &gpu.upload(x, [1, c.cols]), &weight, [1, c.cols], o);
            let among = rmsnorm(&gpu, &gpu.upload(&moved, c.shape()), &weight, c.shape(), o);
            prop_assert_eq!(bytemuck::cast_slice::<_, u16>(alone.y.row(0)), bytemuck::cast_slice::<_, u16>(all.y.row(row)));
            prop_assert_eq!(bytemuck::cast_slice::<_, u16>(alone.y.row(0)), bytemuck::cast_slice::<_, u16>(among.y.row(place)));
            prop_assert_eq!(alone.rstd[0].to_bits(), all.rstd[row].to_bits());
            prop_assert_eq!(alone.rstd[0].to_bits(), among.rstd[place].to_bits());
        }
    }

    /// Permuting columns and weights permutes the result, up to the order of the sum.
    #[test]
    fn columns_commute(
        (rows, cols) in (1usize..=4, 1usize..=600),
        seed: u64,
        keys in prop::collection::vec(any::<u32>(), 600),
    ) {
        let c: RowCase<f16> = dense(rows, cols, Fill::Normal, seed);
        let mut order: Vec<usize> = (0..cols).collect();
        order.sort_by_key(|&i| keys[i]);
        let permute = |row: &[f16]| order.iter().map(|&i| row[i]).collect::<Vec<_>>();
        let px: Vec<f16> = c.x.chunks(cols).flat_map(permute).collect();
        for gpu in kit::devices() {
            let run = |x: &[f16], w: &[f16]| {
                rmsnorm(&gpu, &gpu.upload(x, c.shape()), &gpu.upload(w, [cols]), c.shape(), with_eps(1e-6)).y
            };
            let want: Vec<f16> = run(&c.x, &c.w).data.chunks(cols).flat_map(permute).collect();
            kit::assert_close(&run(&px, &permute(&c.w)), &widen(&want), Tolerance::Reduction);
        }
    }

    /// With eps = 0, x and 2^k x give bitwise the same y, and rstd scales by 2^-k.
    #[test]
    fn powers_of_two_in_x_cancel(
        (rows, cols) in (1usize..=5, 1usize..=3000),
        seed: u64,
        k in -6i32..=8,
        mode in prop_oneof![Just(RoundMode::F32), Just(RoundMode::ModelSensitive)],
    ) {
        let o = RmsNormOptions { eps: 0.0, round_mode: mode, ..Default::default() };
        powers_of_two_cancel::<bf16>(&dense(rows, cols, Fill::Grid, seed), k, o)?;
        powers_of_two_cancel::<f16>(&dense(rows, cols, Fill::Grid, seed), k, o)?;
        powers_of_two_cancel::<f32>(&dense(rows, cols, Fill::Grid, seed), k, o)?;
    }

    /// Doubling the weights doubles y exactly.
    #[test]
    fn doubled_weights_double_the_result((rows, cols) in (1usize..=5, 1usize..=3000), seed: u64) {
        doubled_weights::<bf16>(&dense(rows, cols, Fill::Grid, seed));
        doubled_weights::<f16>(&dense(rows, cols, Fill::Grid, seed));
        doubled_weights::<f32>(&dense(rows, cols, Fill::Grid, seed));
    }

    /// With weights of one, mean(y^2) = ms / (ms + eps).
    #[test]
    fn the_mean_square_is_near_one((rows, cols) in (1usize..=4, 1usize..=5000), seed: u64, eps in 1e-6f32..2.0) {
        let c: RowCase<f32> = dense(rows, cols, Fill::Normal, seed);
        let mean_sq = |row: &[f32]| widen(row).iter().map(|v| v * v).sum::<f64>() / cols as f64;
        for gpu in kit::devices() {
            let ones = gpu.upload(&vec![1.0f32; cols], [cols]);
            let y = rmsnorm(&gpu, &gpu.upload(&c.x, c.shape()), &ones, c.shape(), with_eps(eps)).y;
            for (x, y) in c.x.chunks(cols).zip(y.chunks(cols)) {
                let ms = mean_sq(x);
                let want = ms / (ms + f64::from(eps));
                prop_assert!((mean_sq(y) - want).abs() <= 1e-5 * want, "{} for {want}", mean_sq(y));
            }
        }
    }

    /// In place is bitwise identical to out of place.
    #[test]
    fn in_place_is_out_of_place(c in kit::row_case::<bf16>(1..=20, 1..=20_000), o in options()) {
        for gpu in kit::devices() {
            let weight = gpu.upload(&c.w, [c.cols]);
            let mut x = gpu.upload(&c.x, c.place(0));
            let want = rmsnorm(&gpu, &x, &weight, c.place(1), o);
            let y = x.view_mut();
            hk_norm::rmsnorm(gpu.stream(), y.alias(), weight.view(), y, o).unwrap();
            kit::assert_bits(&gpu.download(&x), &want.y);
            gpu.assert_guards(&x);
        }
    }
}

fn powers_of_two_cancel<T: Float>(c: &RowCase<T>, k: i32, o: RmsNormOptions) -> Result<(), TestCaseError> {
    let factor = 2f32.powi(k);
    let scaled: Vec<T> = c.x.iter().map(|v| T::from_f32(v.to_f32() * factor)).collect();
    for gpu in kit::devices() {
        let weight = gpu.upload(&c.w, [c.cols]);
        let run = |x: &[T]| rmsnorm(&gpu, &gpu.upload(x, c.shape()), &weight, c.shape(), o);
        let (plain, scaled) = (run(&c.x), run(&scaled));
        kit::assert_bits(&scaled.y, &plain.y);
        for (s, p) in scaled.rstd.iter().zip(plain.rstd.iter()) {
            prop_assert_eq!((s * factor).to_bits(), p.to_bits());
        }
    }
    Ok(())
}

fn doubled_weights<T: Float>(c: &RowCase<T>) {
    let weight: Vec<T> = Fill::Grid.elements(c.cols, c.seed ^ 1);
    let double = |v: &T| T::from_f32(2.0 * v.to_f32());
    let doubled: Vec<T> = weight.iter().map(double).collect();
    for gpu in kit::devices() {
        let x = gpu.upload(&c.x, c.shape());
        let run = |w: &[T]| rmsnorm(&gpu, &x, &gpu.upload(w, [c.cols]), c.shape(), with_eps(1e-6)).y;
        let want: Vec<T> = run(&weight).iter().map(double).collect();
        kit::assert_bits(&run(&doubled), &want);
    }
}

/// A zero keeps its sign, vectorized and scalar.
fn zeros_keep_their_sign<T: Float>() {
    for cols in [16, 17] {
        let x: Vec<T> = (0..cols).map(|i| T::from_f32([-0.0, 0.0, -1.0, 2.0][i % 4])).collect();
        for gpu in kit::devices() {
            let weight = gpu.upload(&vec![T::from_f32(1.0); cols], [cols]);
            let y = rmsnorm(&gpu, &gpu.upload(&x, [1, cols]), &weight, [1, cols], with_eps(1e-6)).y;
            for (x, y) in x.iter().zip(y.iter()).filter(|(x, _)| x.to_f64() == 0.0) {
                assert_eq!(y.to_f64().to_bits(), x.to_f64().to_bits(), "{} on {}", T::DTYPE, gpu.spec());
            }
        }
    }
}

#[test]
fn a_zero_keeps_its_sign() {
    zeros_keep_their_sign::<bf16>();
    zeros_keep_their_sign::<f16>();
    zeros_keep_their_sign::<f32>();
}

/// Every width of the specification and every border of a kernel, vectorized and scalar: near the reference, and
/// the same bits either way.
fn every_width<T: Float>() {
    for (i, cols) in COLS.into_iter().enumerate() {
        let rows = [1, 3, 18][i % 3];
        let c: RowCase<T> = dense(rows, cols, Fill::Normal, cols as u64);
        let want = reference::rmsnorm::<T>(&widen(&c.x), &widen(&c.w), with_eps(1e-6));
        let aligned = cols.next_multiple_of(8);
        for gpu in kit::devices() {
            let weight = gpu.upload(&c.w, [cols]);
            let run = |place: Place| {
                let x = gpu.upload(&c.x, &place);
                rmsnorm(&gpu, &x, &weight, &place, with_eps(1e-6))
            };
            let vectors = run(Place::rows(c.shape(), aligned));
            kit::assert_close(&vectors.y, &want.y, Tolerance::Reduction);
            if T::DTYPE != DType::F32 && rows * cols > 1000 {
                kit::assert_rounded(&vectors.y, &want.y, 0.99);
            }
            assert_rstd(&vectors.rstd, &want.rstd);
            assert_same(&run(Place::rows(c.shape(), aligned + 1).shifted(3)), &vectors);
        }
    }
}

#[test]
fn every_width_of_bf16() {
    every_width::<bf16>();
}

#[test]
fn every_width_of_f16() {
    every_width::<f16>();
}

#[test]
fn every_width_of_f32() {
    every_width::<f32>();
}

/// Long rows, which are read twice.
#[test]
fn very_long_rows() {
    for (rows, cols) in [(2, 31_744), (1, 65_536), (1, 65_537)] {
        check(&dense::<bf16>(rows, cols, Fill::Normal, 1), &floats::<bf16>(&vec![1.5; cols]), with_eps(1e-6));
    }
}

/// Row counts of the specification at narrow rows; more rows than blocks, so that blocks loop.
#[test]
fn many_rows() {
    for (rows, cols) in [(2, 128), (7, 128), (31, 64), (64, 512), (257, 128), (4096, 128), (16_384, 64)] {
        check(
            &dense::<bf16>(rows, cols, Fill::Normal, 2),
            &floats::<bf16>(&vec![0.75; cols]),
            with_eps(1e-6),
        );
    }
    let c = dense::<f32>(9000, 12, Fill::Wide, 3);
    check(&c, &c.w, with_eps(1e-6));
    let c = dense::<f16>(5000, 1032, Fill::Normal, 4);
    check(&c, &c.w, with_eps(1e-6));
}

/// The largest row count of the specification. (Without guards: the emulator finds an access past a buffer.)
#[test]
fn the_most_rows() {
    let (rows, cols) = (364_800, 128);
    let x: Vec<bf16> = (0..rows * cols).map(|i| bf16::from_f32((i % 251) as f32 * 0.03125 - 3.9)).collect();
    let weight: Vec<bf16> = (0..cols).map(|i| bf16::from_f32(0.5 + i as f32 / 128.0)).collect();
    for gpu in kit::devices() {
        let stream = gpu.stream();
        let (x_buffer, weight_buffer) = (stream.upload(&x).unwrap(), stream.upload(&weight).unwrap());
        let mut y = stream.alloc_zeroed::<bf16>(x.len()).unwrap();
        let (x_view, w_view) = (x_buffer.view([rows, cols]).unwrap(), weight_buffer.view([cols]).unwrap());
        let y_view = y.view_mut([rows, cols]).unwrap();
        hk_norm::rmsnorm(stream, x_view, w_view, y_view, with_eps(1e-6)).unwrap();
        let y = stream.download(&y).unwrap();
        // Rows repeat every 251; the first ones against the reference, the others against those.
        let period = 251 * cols;
        let want = reference::rmsnorm::<bf16>(&widen(&x[..period]), &widen(&weight), with_eps(1e-6));
        let first = kit::Array::new("the first rows", [251, cols], y[..period].to_vec());
        kit::assert_close(&first, &want.y, Tolerance::Reduction);
        for (i, part) in y.chunks(period).enumerate() {
            assert!(*part == y[..part.len()], "rows from {} on differ from the first ones", i * 251);
        }
    }
}

#[test]
fn the_same_input_gives_the_same_bits() {
    let c = dense::<bf16>(33, 4096, Fill::Wide, 5);
    for gpu in kit::devices() {
        let (x, weight) = (gpu.upload(&c.x, c.shape()), gpu.upload(&c.w, [c.cols]));
        let first = rmsnorm(&gpu, &x, &weight, c.shape(), with_eps(1e-6));
        for _ in 0..3 {
            assert_same(&rmsnorm(&gpu, &x, &weight, c.shape(), with_eps(1e-6)), &first);
        }
    }
}

#[test]
fn leading_axes_collapse() {
    let c = dense::<f16>(6, 40, Fill::Normal, 6);
    let want = reference::rmsnorm::<f16>(&widen(&c.x), &widen(&c.w), with_eps(1e-6)).y;
    for gpu in kit::devices() {
        let weight = gpu.upload(&c.w, [40]);
        for shape in [vec![2, 3, 40], vec![1, 2, 1, 3, 40]] {
            let x = gpu.upload(&c.x, Place::rows(&shape, 48));
            let y = rmsnorm(&gpu, &x, &weight, Place::rows(&shape, 41), with_eps(1e-6)).y;
            kit::assert_close(&y, &want, Tolerance::Reduction);
        }
        let row = gpu.upload(&c.x[..40], [40]);
        let y = rmsnorm(&gpu, &row, &weight, [40], with_eps(1e-6)).y;
        kit::assert_close(&y, &want[..40], Tolerance::Reduction);
    }
}

/// One row, broadcast to many.
#[test]
fn a_broadcast_row_is_normalised_many_times() {
    let c = dense::<bf16>(1, 256, Fill::Normal, 7);
    for gpu in kit::devices() {
        let weight = gpu.upload(&c.w, [256]);
        let one = rmsnorm(&gpu, &gpu.upload(&c.x, [1, 256]), &weight, [1, 256], with_eps(1e-6));
        let x = gpu.upload(&c.x, [1, 256]);
        let mut y = gpu.poisoned::<bf16>([5, 256]);
        let repeated = x.view().broadcast([5, 256]).unwrap();
        hk_norm::rmsnorm(gpu.stream(), repeated, weight.view(), y.view_mut(), with_eps(1e-6)).unwrap();
        kit::assert_bits(&gpu.download(&y), &one.y.repeat(5));
    }
}

/// Column ranges of one wide matrix: the output is interleaved with the rows of the input.
#[test]
fn interleaved_slices_of_one_buffer() {
    let c = dense::<bf16>(5, 64, Fill::Normal, 8);
    for gpu in kit::devices() {
        let weight = gpu.upload(&c.w, [64]);
        let want = rmsnorm(&gpu, &gpu.upload(&c.x, c.shape()), &weight, c.shape(), with_eps(1e-6));
        let wide: Vec<bf16> = c.x.chunks(64).flat_map(|row| [row, &[bf16::ZERO; 64]].concat()).collect();
        let mut both = gpu.upload(&wide, [5, 128]);
        let (x, y) = both.view_mut().split_at(1, 64).unwrap();
        hk_norm::rmsnorm(gpu.stream(), x.alias(), weight.view(), y, with_eps(1e-6)).unwrap();
        let both = gpu.download(&both);
        for (row, want) in both.chunks(128).zip(want.y.chunks(64)) {
            assert_eq!(row[64..], *want);
        }
        assert!(both.chunks(128).zip(c.x.chunks(64)).all(|(row, x)| row[..64] == *x));
    }
}

#[test]
fn nothing_is_launched_for_no_rows() {
    for gpu in kit::devices() {
        let weight = gpu.upload(&[bf16::ONE; 8], [8]);
        gpu.stream().take_counters().unwrap();
        rmsnorm(&gpu, &gpu.upload::<bf16>(&[], [0, 8]), &weight, [0, 8], with_eps(1e-6));
        rmsnorm(&gpu, &gpu.upload::<bf16>(&[], [3, 0, 8]), &weight, [3, 0, 8], with_eps(1e-6));
        if let Some(counters) = gpu.stream().take_counters().unwrap() {
            assert_eq!(counters.workgroups, 0);
        }
    }
}

/// A NaN makes its row NaN; an infinity makes rstd 0: itself becomes NaN, the rest of its row 0. Other rows are unaffected.
#[test]
fn nan_and_infinity_stay_in_their_rows() {
    fn run<T: Float>(cols: usize) {
        let c: RowCase<T> = dense(9, cols, Fill::Normal, 9);
        let mut x = c.x.clone();
        let mut put = |row: usize, at: usize, value: f32| x[row * cols + at % cols] = T::from_f32(value);
        put(1, 5, f32::NAN);
        put(3, cols - 1, f32::INFINITY);
        put(5, 0, f32::NEG_INFINITY);
        put(7, 0, f32::INFINITY);
        put(7, cols / 2, f32::NAN);
        for gpu in kit::devices() {
            let weight = gpu.upload(&c.w, [cols]);
            let clean = rmsnorm(&gpu, &gpu.upload(&c.x, c.shape()), &weight, c.shape(), with_eps(1e-6));
            let got = rmsnorm(&gpu, &gpu.upload(&x, c.shape()), &weight, c.shape(), with_eps(1e-6));
            for row in 0..9 {
                let y = widen(got.y.row(row));
                match row {
                    1 | 7 => assert!(y.iter().all(|v| v.is_nan()) && got.rstd[row].is_nan(), "row {row}"),
                    3 | 5 => {
                        let infinite = if row == 3 { cols - 1 } else { 0 };
                        let ok = |(i, v): (usize, &f64)| if i == infinite { v.is_nan() } else { *v == 0.0 };
                        assert!(y.iter().enumerate().all(ok) && got.rstd[row] == 0.0, "row {row}");
                    }
                    _ => assert_eq!(y, widen(clean.y.row(row))),
                }
            }
        }
    }
    for cols in [3, 130, 1000, 5000] {
        run::<bf16>(cols);
        run::<f16>(cols);
        run::<f32>(cols);
    }
}

/// A NaN weight of any payload makes its column NaN.
#[test]
fn nan_weights_of_any_payload_give_nan() {
    let payloads = [0x7fff_ffff, 0x7f80_0001, 0x7fc0_0000, 0xffff_ffff, 0xff80_0001, 0x7fff_8000];
    let weight: Vec<f32> = payloads.iter().map(|&b| f32::from_bits(b)).chain([1.0, 2.0]).collect();
    for gpu in kit::devices() {
        let w = gpu.upload(&weight, [8]);
        let y = rmsnorm(&gpu, &gpu.upload(&[bf16::ONE; 8], [1, 8]), &w, [1, 8], with_eps(1e-6)).y;
        let nan: Vec<bool> = y.iter().map(|v| v.is_nan()).collect();
        assert_eq!(nan, [true, true, true, true, true, true, false, false], "{:?}", y.data);
    }
}

#[test]
fn the_ends_of_the_range() {
    for gpu in kit::devices() {
        let run = |x: f32, cols: usize, eps: f32| {
            let weight = gpu.upload(&vec![1.0f32; cols], [cols]);
            let x = gpu.upload(&vec![x; cols], [1, cols]);
            let out = rmsnorm(&gpu, &x, &weight, [1, cols], with_eps(eps));
            (out.y[0], out.rstd[0])
        };
        // The sum of squares overflows: rstd is 0.
        assert_eq!(run(1e20, 64, 1e-6), (0.0, 0.0));
        let near_the_end = run(1e18, 64, 1e-6).0;
        assert!((near_the_end - 1.0).abs() <= 4.0 * f32::EPSILON, "{near_the_end}");
        // Zeros: 0 with eps, NaN without.
        assert_eq!(run(0.0, 64, 1e-6).0, 0.0);
        assert!(run(0.0, 64, 0.0).0.is_nan());
        // A subnormal mean square is not flushed to zero.
        let (y, rstd) = run(1e-20, 64, 0.0);
        assert!((y - 1.0).abs() < 1e-3 && (rstd / 1e20 - 1.0).abs() < 1e-3, "{y} {rstd:e}");
        // Subnormal values with weights: not flushed. An error of 1 ulp in rstd = 1 is lost in their rounding, one of 2 ulp,
        // which `rsqrt` may have on an NVIDIA GPU, may be a unit.
        let units = run(f32::from_bits(0x0040_0000), 64, 1.0).0.to_bits().abs_diff(0x0040_0000);
        assert!(units <= u32::from(gpu.spec().starts_with("cuda")), "{units} units");

        // Results beyond f16 are infinite, not the largest value.
        let weight = gpu.upload(&[70_000.0f32; 8], [8]);
        let y = rmsnorm(&gpu, &gpu.upload(&[-f16::ONE; 8], [1, 8]), &weight, [1, 8], with_eps(0.0)).y;
        assert!(y.iter().all(|v| *v == f16::NEG_INFINITY), "{:?}", y.data);
    }
}

/// A row that fits registers is read once, a longer one twice; weights are read once per block.
#[test]
fn rows_are_read_once() {
    for cols in [1024, 1536, 2048, 2880, 4096, 5120, 7168, 8192, 16_384, 16_392, 65_536] {
        let c = dense::<bf16>(1, cols, Fill::Normal, 10);
        for gpu in kit::devices() {
            let (x, weight) = (gpu.upload(&c.x, c.shape()), gpu.upload(&c.w, [cols]));
            let mut y = gpu.poisoned::<bf16>(c.shape());
            gpu.stream().take_counters().unwrap();
            hk_norm::rmsnorm(gpu.stream(), x.view(), weight.view(), y.view_mut(), with_eps(1e-6)).unwrap();
            let Some(counters) = gpu.stream().take_counters().unwrap() else { continue };
            let row = 2 * cols as u64;
            let reads = if cols <= 16_384 { 1 } else { 2 };
            assert_eq!(counters.global_read_bytes, reads * row + row, "{cols} columns on {}", gpu.spec());
            assert_eq!(counters.global_written_bytes, row, "{cols} columns on {}", gpu.spec());
        }
    }
}

/// Counters follow from the shape: every cache line is accessed once, by full accesses, weights once per wave.
#[test]
fn counted_facts_follow_from_the_shape() {
    // A wave per row of 1024 to 4096 columns.
    for (rows, cols) in [(3, 1024), (5, 2048), (2, 4096)] {
        let c = dense::<bf16>(rows, cols, Fill::Normal, 12);
        for arch in ["gfx942", "gfx950"] {
            let gpu = kit::Gpu::open(&format!("emu:{arch}?details=true"));
            let (x, weight) = (gpu.upload(&c.x, c.shape()), gpu.upload(&c.w, [cols]));
            let mut y = gpu.poisoned::<bf16>(c.shape());
            hk_norm::rmsnorm(gpu.stream(), x.view(), weight.view(), y.view_mut(), with_eps(1e-6)).unwrap();
            let counters = gpu.stream().take_counters().unwrap().unwrap();
            let details = counters.details.unwrap();
            let (rows, row_lines) = (rows as u64, 2 * cols as u64 / 128);
            let what = format!("{rows} rows of {cols} on {arch}");
            assert_eq!((counters.waves, counters.transcendental), (rows, rows), "{what}");
            assert_eq!(details.global_read_lines, 2 * rows * row_lines, "{what}");
            assert_eq!(details.distinct_read_lines, (rows + 1) * row_lines, "{what}");
            assert_eq!(details.distinct_read_bytes, 128 * (rows + 1) * row_lines, "{what}");
            assert_eq!(details.global_written_lines, rows * row_lines, "{what}");
            assert_eq!(details.distinct_written_lines, rows * row_lines, "{what}");
            assert_eq!((details.lds_clocks, details.scratch_bytes, counters.barriers), (0, 0, 0), "{what}");
        }
    }
}

/// Rows of several waves are reduced through LDS without bank conflicts.
#[test]
fn sums_of_long_rows_have_no_bank_conflict() {
    let c = dense::<bf16>(1, 8192, Fill::Normal, 13);
    for gpu in kit::sanitized_devices() {
        let (x, weight) = (gpu.upload(&c.x, c.shape()), gpu.upload(&c.w, [c.cols]));
        gpu.stream().take_counters().unwrap();
        rmsnorm(&gpu, &x, &weight, c.shape(), with_eps(1e-6));
        let details = gpu.stream().take_counters().unwrap().unwrap().details.unwrap();
        assert!(details.lds_clocks > 0, "{}", gpu.spec());
        assert_eq!(details.lds_conflict_clocks, 0, "{}", gpu.spec());
    }
}

/// `rmsnorm` of rows of bf16.
fn refusals<'f>() -> Refusals<'f, RmsNormOptions> {
    Refusals::new(RmsNormOptions::default(), |stream, tensors, options| {
        let (x, weight) = (tensors.input::<bf16>("x"), tensors.input::<bf16>("weight"));
        let outputs = RmsNormOutputs { y: tensors.output("y"), rstd: tensors.optional_output("rstd") };
        hk_norm::rmsnorm(stream, x, weight, outputs, options)
    })
    .input::<bf16>("x", [3, 4])
    .input::<bf16>("weight", [4])
    .output::<bf16>("y", [3, 4])
    .output::<f32>("rstd", [3])
}

#[test]
fn errors() {
    let message = "rmsnorm: weight: shape [3], expected [4] (columns of x)";
    let mut table = refusals()
        .accepts(|_| {})
        .accepts(|call| call.without("rstd"))
        .accepts(|call| call.overlap("x", "y", 0))
        .refuses(kind!(Shape), &[message], |call| call.shape("weight", [3]))
        .refuses(kind!(Shape), &["y", "[2, 4]"], |call| call.shape("y", [2, 4]))
        .refuses(kind!(Shape), &["y", "[12]"], |call| call.shape("y", [12]))
        .refuses(kind!(Shape), &["x"], |call| call.shape("x", []))
        .refuses(kind!(Shape), &["rstd", "[4]", "[3] (rows of x)"], |call| call.shape("rstd", [4]))
        .refuses(kind!(Empty), &["x", "[3, 0]"], |call| {
            call.shape("x", [3, 0]);
            call.shape("y", [3, 0]);
        })
        .refuses(kind!(Stride), &["x"], |call| call.strides("x", [1, 3]))
        .refuses(kind!(Stride), &["weight"], |call| call.strides("weight", [2]))
        .refuses(kind!(Stride), &["rmsnorm: rstd"], |call| call.strides("rstd", [2]))
        .refuses(kind!(Stride), &["x"], |call| {
            // Leading axes that do not collapse to one row stride.
            call.shape("x", [2, 2, 4]);
            call.strides("x", [100, 8, 1]);
            call.shape("y", [2, 2, 4]);
        })
        .refuses(kind!(DeviceMismatch), &["x", "emu:gfx942", "emu:gfx950"], |call| call.elsewhere("x"))
        .refuses_other_devices()
        .refuses_overlaps();
    for eps in [-1e-6, -0.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let parts = ["rmsnorm: eps", &eps.to_string()];
        table = table.refuses(kind!(Argument), &parts, |call| call.options.eps = eps);
    }
}

#[test]
fn rstd_over_another_tensor_is_refused() {
    let gpu = &kit::devices()[0];
    let (stream, d) = (gpu.stream(), RmsNormOptions::default());
    let (x, w) = (gpu.upload(&[1.0f32; 4], [4, 1]), gpu.upload(&[1.0f32], [1]));
    let (mut y, mut shared) = (gpu.poisoned::<f32>([4, 1]), gpu.upload(&[1.0f32; 4], [4]));
    let rstd = shared.view_mut();
    let first = rstd.alias().slice(0, 2..3).unwrap();
    let outputs = RmsNormOutputs { y: y.view_mut(), rstd: Some(rstd) };
    let result = hk_norm::rmsnorm(stream, x.view(), first, outputs, d);
    assert_error(result, kind!(Overlap), &["weight and rstd"]);
    let rstd = shared.view_mut();
    let column = rstd.alias().broadcast([1, 4]).unwrap().transpose(0, 1).unwrap();
    let outputs = RmsNormOutputs { y: y.view_mut(), rstd: Some(rstd) };
    let result = hk_norm::rmsnorm(stream, column, w.view(), outputs, d);
    assert_error(result, kind!(Overlap), &["x and rstd"]);
    gpu.assert_untouched(&y);
    gpu.assert_untouched(&shared);
}

#[test]
fn gemma_weights_are_offset_by_one() {
    let c = dense::<bf16>(3, 96, Fill::Normal, 11);
    let o = RmsNormOptions { weight_offset: WeightOffset::One, ..Default::default() };
    let plain: Vec<f32> = c.w.iter().map(|w| 1.0 + w.to_f32()).collect();
    for gpu in kit::devices() {
        let x = gpu.upload(&c.x, c.shape());
        let offset = rmsnorm(&gpu, &x, &gpu.upload(&c.w, [96]), c.shape(), o);
        assert_same(&offset, &rmsnorm(&gpu, &x, &gpu.upload(&plain, [96]), c.shape(), with_eps(1e-6)));
    }
}
