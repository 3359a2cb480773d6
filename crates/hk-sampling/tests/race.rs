//! The argmax and the exponential races against the f64 reference, and their laws.

use crate::common::{random, upload, workspace};
use hk_core::registry::Sample;
use hk_core::{Float, TensorView, bf16, f16};
use hk_sampling::{PerRow, Race, race_workspace, reference};
use hk_testkit::{self as kit, Gpu, Place, Tensor, proptest::prelude::*};

const SIZES: [usize; 14] = [1, 2, 7, 111, 500, 1000, 1023, 1024, 1025, 5000, 8192, 8193, 20_000, 40_001];
const MODEL_SIZES: [usize; 7] = [32_000, 128_256, 129_280, 151_936, 201_088, 248_320, 256_000];

fn sizes() -> impl Iterator<Item = usize> {
    let models = if kit::full() { &MODEL_SIZES[..] } else { &[] };
    SIZES.iter().chain(models).copied()
}

#[derive(Clone, Copy)]
enum Op<'a> {
    Greedy,
    Random(PerRow<'a, f32>, Race<'a>),
    Mixed(PerRow<'a, f32>, Race<'a>),
}

#[track_caller]
fn run<T: Float>(gpu: &Gpu, x: &Tensor<T>, row_index: Option<TensorView<i32>>, op: Op) -> Vec<i32> {
    let outputs = row_index.map_or(x.layout().shape()[0], |i| i.shape()[0]);
    let bytes = race_workspace(gpu.stream().device().info(), outputs, x.layout().shape()[1]);
    let mut scratch = workspace(gpu, bytes);
    let scratch = scratch.view_mut([bytes]).unwrap();
    let mut ids = gpu.poisoned::<i32>([outputs]);
    let (stream, out) = (gpu.stream(), ids.view_mut());
    match op {
        Op::Greedy => hk_sampling::greedy_sample(stream, x.view(), row_index, out, scratch),
        Op::Random(t, race) => hk_sampling::random_sample(stream, x.view(), t, row_index, out, scratch, race),
        Op::Mixed(t, race) => hk_sampling::mixed_sample(stream, x.view(), t, row_index, out, scratch, race),
    }
    .unwrap();
    gpu.assert_guards(&ids);
    gpu.assert_untouched(x);
    gpu.download(&ids).data
}

fn normal(cols: usize, seed: u64) -> Vec<f64> {
    random(Sample::Normal { mean: 0.0, deviation: 3.0 }, cols, seed)
}

fn rounded<T: Float>(row: &[f64]) -> Vec<f64> {
    row.iter().map(|&v| T::from_f64(v).to_f64()).collect()
}

fn check_greedy<T: Float>(cols: usize, place: impl Fn(usize) -> Place) {
    let mut rows: Vec<Vec<f64>> = (0..3).map(|i| rounded::<T>(&normal(cols, i))).collect();
    // Ties, NaN and infinities: the largest twice, NaN before it, and rows of one value.
    let mut ties = rows[0].clone();
    (ties[cols / 3], ties[cols - 1], ties[0]) = (99.0, 99.0, f64::NAN);
    rows.push(ties);
    rows.extend([f64::NAN, f64::NEG_INFINITY, f64::INFINITY, -3.0].map(|v| vec![v; cols]));
    let mut last = vec![f64::NEG_INFINITY; cols];
    last[cols - 1] = -60_000.0;
    rows.push(last);
    let want: Vec<i32> = rows.iter().map(|row| reference::argmax(row) as i32).collect();
    for gpu in kit::devices() {
        let x: Vec<T> = rows.iter().flatten().map(|&v| T::from_f64(v)).collect();
        let x = gpu.upload(&x, place(rows.len()));
        assert_eq!(run(&gpu, &x, None, Op::Greedy), want, "{cols} columns");
        let index = gpu.upload(&[3, 8, -1, 9, 0, i32::MAX], [6]);
        let chosen = run(&gpu, &x, Some(index.view()), Op::Greedy);
        assert_eq!(chosen, [want[3], want[8], 0, 0, want[0], 0], "{cols} columns");
    }
}

#[test]
fn greedy_is_the_argmax() {
    for cols in sizes() {
        check_greedy::<bf16>(cols, |rows| Place::from([rows, cols]));
        check_greedy::<f16>(cols, |rows| Place::rows([rows, cols], cols + 3).shifted(1));
        check_greedy::<f32>(cols, |rows| Place::rows([rows, cols], cols.next_multiple_of(4) + 4));
    }
}

/// The token is the host's, or one with a score within the specification's tolerance.
#[track_caller]
fn assert_wins(logits: &[f64], t: f64, exponentials: &[f64], id: i32, what: &str) {
    let scores = reference::race_scores(logits, t, exponentials);
    let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let largest = logits.iter().filter(|l| l.is_finite()).fold(0.0, |m: f64, l| m.max(l.abs() / t.max(1e-5)));
    let off = best - scores[id as usize];
    assert!(off <= 1e-6 + largest * 2f64.powi(-22), "{what}: token {id} is {off:e} behind");
}

fn check_random<T: Float>(cols: usize, seed: u64, place: Place) {
    let temperatures = [1.0f32, 0.7, 2.0, 1e-6];
    let rows: Vec<Vec<f64>> = (0..4).map(|i| rounded::<T>(&normal(cols, seed + i))).collect();
    let numbers: Vec<f32> = (0..4 * cols as u64)
        .map(|i| reference::exponential(seed, 9, i as usize / cols, i as usize % cols) as f32)
        .collect();
    for gpu in kit::devices() {
        let x: Vec<T> = rows.iter().flatten().map(|&v| T::from_f64(v)).collect();
        let (x, t) = (gpu.upload(&x, &place), gpu.upload(&temperatures, [4]));
        let given = gpu.upload(&numbers, Place::rows([4, cols], cols + 1));
        let given = Race { exponentials: Some(given.view()), ..Default::default() };
        let drawn = Race { seed, offset: 9, exponentials: None };
        for race in [given, drawn] {
            let ids = run(&gpu, &x, None, Op::Random(t.view().into(), race));
            for (b, id) in ids.into_iter().enumerate() {
                let e = kit::widen(&numbers[b * cols..][..cols]);
                assert_wins(
                    &rows[b],
                    temperatures[b].into(),
                    &e,
                    id,
                    &format!("row {b} of {cols} {}", T::DTYPE),
                );
            }
        }
    }
}

#[test]
fn random_is_the_host_s_race() {
    for cols in sizes() {
        check_random::<bf16>(cols, 1, Place::from([4, cols]));
        check_random::<f32>(cols, 2, Place::rows([4, cols], cols.next_multiple_of(4)));
    }
    for cols in [111, 1024, 5000, 9000] {
        check_random::<f16>(cols, 3, Place::from([4, cols]));
        check_random::<f32>(cols, 4, Place::rows([4, cols], cols + 5).shifted(2));
        check_random::<bf16>(cols, 5, Place::rows([4, cols], cols + 5).shifted(2));
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn any_row_is_the_host_s_race(cols in kit::size(1..=9000, &[1024, 8192]), seed in 0u64..1 << 50, pad in 0usize..9) {
        check_random::<f32>(cols, seed, Place::rows([4, cols], cols + pad));
    }

    /// Batch invariance: a row's token depends on the row, its output index and its temperature.
    #[test]
    fn a_row_does_not_depend_on_its_surroundings(cols in kit::size(1..=9000, &[1024, 8192]), seed: u64, at in 0usize..6) {
        let rows: Vec<_> = (0..6).map(|i| normal(cols, seed ^ i)).collect();
        for gpu in kit::devices() {
            let race = Race { seed, offset: 1, exponentials: None };
            let all = run(&gpu, &upload::<f32>(&gpu, &rows), None, Op::Random(0.8.into(), race));
            let mut other = rows.clone();
            other.iter_mut().enumerate().filter(|(i, _)| *i != at).for_each(|(i, row)| *row = normal(cols, i as u64));
            let x: Vec<f32> = other.iter().flatten().map(|&v| v as f32).collect();
            let x = gpu.upload(&x, Place::rows([6, cols], cols + 3).shifted(1));
            prop_assert_eq!(run(&gpu, &x, None, Op::Random(0.8.into(), race))[at], all[at]);
        }
    }
}

/// On a device with one CU blocks take longer segments and skip more tokens; results are the same.
#[test]
fn segments_change_nothing() {
    let cols = 5 * 4096 + 100;
    let mut rows: Vec<_> = (0..6).map(|i| normal(cols, i)).collect();
    rows[1].sort_by(f64::total_cmp); // ascending: the best so far is always beaten,
    rows[2].sort_by(|a, b| b.total_cmp(a)); // or never
    rows[3].fill(0.5);
    (rows[4][5000], rows[4][cols - 9]) = (f64::INFINITY, f64::INFINITY);
    rows[5].iter_mut().step_by(3).for_each(|l| *l = f64::NEG_INFINITY);
    // A signalling NaN behind each of the largest.
    let numbers = random(Sample::Uniform { low: 0.01, high: 3.0 }, 6 * cols, 9);
    let exponentials: Vec<f32> = numbers.iter().map(|&e| e as f32).collect();
    check_segments::<bf16>(&rows, &exponentials, bf16::from_bits(0x7f81));
    check_segments::<f16>(&rows, &exponentials, f16::from_bits(0x7c01));
    check_segments::<f32>(&rows, &exponentials, f32::from_bits(0x7f80_0001));
}

#[track_caller]
fn check_segments<T: Float>(rows: &[Vec<f64>], exponentials: &[f32], signalling: T) {
    let cols = rows[0].len();
    let mut values: Vec<T> = rows.iter().flatten().map(|&v| T::from_f64(v)).collect();
    for i in 1..cols {
        if values[i - 1].to_f64() > 9.0 {
            values[i] = signalling;
        }
    }
    for arch in ["gfx942", "gfx950"] {
        let tokens = [format!("emu:{arch}"), format!("emu:{arch}?cus=1")].map(|spec| {
            let gpu = Gpu::open(&spec);
            let x = gpu.upload(&values, [rows.len(), cols]);
            let given = gpu.upload(exponentials, [rows.len(), cols]);
            let mut ids = vec![run(&gpu, &x, None, Op::Greedy)];
            for t in [0.7, 3.0, 1e-5] {
                for exponentials in [None, Some(given.view())] {
                    ids.push(run(
                        &gpu,
                        &x,
                        None,
                        Op::Random(t.into(), Race { seed: 5, offset: 6, exponentials }),
                    ));
                }
            }
            ids
        });
        assert_eq!(tokens[0], tokens[1], "{arch}, {}", T::DTYPE);
    }
}

/// A temperature of zero is greedy in `mixed_sample`, 1e-5 in `random_sample`; all other rows are the same in both.
#[test]
fn mixed_is_greedy_where_the_temperature_is_zero() {
    for cols in [300, 2000, 9000] {
        let rows: Vec<_> = (0..6).map(|i| normal(cols, i)).collect();
        let temperatures = [0.0f32, 1.0, 0.0, -0.0, 5.0, f32::NAN];
        let race = Race { seed: 3, offset: 4, exponentials: None };
        for gpu in kit::devices() {
            let (x, t) = (upload::<bf16>(&gpu, &rows), gpu.upload(&temperatures, [6]));
            let greedy = run(&gpu, &x, None, Op::Greedy);
            let random = run(&gpu, &x, None, Op::Random(t.view().into(), race));
            let mixed = run(&gpu, &x, None, Op::Mixed(t.view().into(), race));
            for (b, t) in temperatures.iter().enumerate() {
                assert_eq!(mixed[b], if *t == 0.0 { greedy[b] } else { random[b] }, "row {b}");
            }
            assert_eq!(run(&gpu, &x, None, Op::Mixed(0.0.into(), race)), greedy);
            let hot = run(&gpu, &x, None, Op::Random(f32::into(1e9), race));
            assert_ne!(hot, greedy);
        }
    }
}

/// NaN and -Inf never win, +Inf does, and row indices out of range give 0.
#[test]
fn special_logits() {
    for cols in [9, 1000, 9000] {
        let mut hidden = vec![f64::NAN; cols];
        hidden[cols - 2] = -5.0;
        let mut masked = vec![f64::NEG_INFINITY; cols];
        masked[cols / 2] = -1000.0;
        let mut infinite = normal(cols, 1);
        infinite[5] = f64::INFINITY;
        let rows = [hidden, masked, infinite, vec![f64::NAN; cols], vec![f64::NEG_INFINITY; cols]];
        for gpu in kit::devices() {
            let x = upload::<f32>(&gpu, &rows);
            let index = gpu.upload(&[0, 1, 2, 3, 4, 5, -1], [7]);
            for op in [Op::Random(1.0.into(), Race::default()), Op::Mixed(0.5.into(), Race::default())] {
                let ids = run(&gpu, &x, Some(index.view()), op);
                assert_eq!(ids, [cols as i32 - 2, cols as i32 / 2, 5, 0, 0, 0, 0]);
            }
        }
    }
}

#[test]
fn streams_repeat_and_differ() {
    for gpu in kit::devices() {
        let x = upload::<f32>(&gpu, &vec![normal(400, 1); 64]);
        let ids = |seed, offset| {
            run(&gpu, &x, None, Op::Random(2.0.into(), Race { seed, offset, exponentials: None }))
        };
        let first = ids(1, 1);
        assert_eq!(first, ids(1, 1));
        for other in [ids(1, 2), ids(2, 1), ids(1 << 32, 1)] {
            assert!(first.iter().zip(&other).filter(|(a, b)| a != b).count() > 32);
        }
    }
}

/// Winners of the race follow the softmax: chi-square over tokens expected at least five times.
#[test]
fn winners_follow_the_softmax() {
    let (cols, draws) = (64, if kit::full() { 50_000 } else { 10_000 });
    let row = normal(cols, 8);
    let want = reference::softmax(&rounded::<f32>(&row), 0.9f32.into());
    let gpu = &kit::devices()[0];
    let x = upload::<f32>(gpu, std::slice::from_ref(&row));
    let index = gpu.upload(&vec![0i32; draws], [draws]);
    let race = Race { seed: 11, offset: 12, exponentials: None };
    let ids = run(gpu, &x, Some(index.view()), Op::Random(0.9.into(), race));
    let mut counts = vec![0.0f64; cols];
    ids.iter().for_each(|&id| counts[id as usize] += 1.0);
    let bins: Vec<_> =
        want.iter().zip(&counts).map(|(p, n)| (p * draws as f64, *n)).filter(|b| b.0 >= 5.0).collect();
    let chi: f64 = bins.iter().map(|(e, n)| (n - e).powi(2) / e).sum();
    let freedom = bins.len() as f64 - 1.0;
    let z = ((chi / freedom).cbrt() - (1.0 - 2.0 / (9.0 * freedom))) / (2.0 / (9.0 * freedom)).sqrt();
    assert!(z.abs() < 4.75 && bins.len() > 20, "chi-square {chi} over {} bins", bins.len());
}

/// More tokens than filters accept: races have no such limit.
#[test]
fn rows_longer_than_filters_take() {
    let (cols, at) = ((1 << 24) + 4099, (1 << 24) + 7);
    let gpu = &kit::devices()[0];
    let mut row = vec![bf16::ZERO; cols];
    row[at] = bf16::from_f32(60.0);
    let x = gpu.upload(&row, [1, cols]);
    assert_eq!(run(gpu, &x, None, Op::Greedy), [at as i32]);
}

#[test]
fn nothing_is_launched_for_no_outputs() {
    for gpu in kit::devices() {
        gpu.stream().take_counters().unwrap();
        assert!(run(&gpu, &gpu.upload::<f32>(&[], [0, 9000]), None, Op::Greedy).is_empty());
        if let Some(counters) = gpu.stream().take_counters().unwrap() {
            assert_eq!(counters.workgroups, 0);
        }
    }
}
