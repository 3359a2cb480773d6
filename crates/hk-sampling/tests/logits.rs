//! Draws from logits against the f64 reference of the softmax, and their laws.

use crate::common::{GRID_OF_U, Parameters, Problem, random, sampled, upload};
use hk_core::registry::Sample;
use hk_core::{Float, bf16, f16};
use hk_sampling::{Draw, FilterOrder, Filters, reference};
use hk_testkit::{self as kit, Place, proptest::prelude::*};

/// The error of a softmax in f32, relative to its sum.
const EDGE: f64 = 1e-5;

/// Logits whose probabilities differ clearly or not at all, given the precision of f32.
fn logits(cols: usize, seed: u64) -> Vec<f64> {
    random(Sample::Integers { low: -40, high: 25 }, cols, seed).iter().map(|v| v / 8.0).collect()
}

fn check<T: Float>(cols: usize, temperatures: &[f32], seed: usize, us: &[f32], place: Option<Place>) {
    let rows: Vec<_> = (0..temperatures.len()).map(|i| logits(cols, (seed + i) as u64)).collect();
    // A share of the largest between two steps of the logits.
    let listed = |i: usize| Parameters::listed(seed + 17 * i, cols);
    let apart = |p: Parameters| Parameters { min_p: if p.min_p == 1.0 { 0.97 } else { p.min_p }, ..p };
    let parameters = (0..rows.len()).map(|i| apart(listed(i))).collect();
    let mut problem = Problem::<T>::new(&rows, parameters, us);
    for order in [FilterOrder::Joint, FilterOrder::TopKFirst] {
        problem.order = order;
        for gpu in kit::devices() {
            let place = place.clone().unwrap_or_else(|| Place::from([rows.len(), cols]));
            let got = problem.run(&gpu, place, Some(temperatures));
            problem.check(&got, EDGE, |row, r| reference::softmax(row, temperatures[r].into()));
        }
    }
}

const TEMPERATURES: [f32; 6] = [0.0, 1e-6, 0.7, 1.0, 2.0, f32::INFINITY];

#[test]
fn the_listed_sizes() {
    for (i, cols) in [1, 2, 7, 111, 500, 1000, 1023].into_iter().enumerate() {
        check::<f32>(cols, &TEMPERATURES, 10 * i, &GRID_OF_U, None);
        check::<bf16>(cols, &TEMPERATURES, 10 * i + 1, &GRID_OF_U[2..4], None);
        check::<f16>(cols, &TEMPERATURES, 10 * i + 2, &GRID_OF_U[4..6], None);
    }
    for cols in [2000, 4001, 9000, 16_387] {
        check::<f32>(cols, &TEMPERATURES[1..3], cols, &[0.001, 0.6], None);
        check::<bf16>(cols, &TEMPERATURES[2..4], cols + 1, &[0.3, 1.0], None);
        check::<f16>(cols, &[0.0, 0.5], cols + 2, &[0.5], None);
    }
    if kit::full() {
        for cols in [32_000, 128_256, 129_280, 151_936, 201_088, 248_320, 256_000, 600_001] {
            check::<f32>(cols, &TEMPERATURES, cols, &GRID_OF_U[2..4], None);
            check::<bf16>(cols, &TEMPERATURES, cols + 1, &GRID_OF_U[4..5], None);
            check::<f16>(cols, &TEMPERATURES, cols + 2, &GRID_OF_U[6..], None);
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn any_row_matches_reference(
        cols in kit::size(1..=10_000, &[1024, 8192]),
        seed in 0usize..1 << 40,
        t in 0.3f32..3.0,
        pad in 0usize..9,
        shift in 0usize..9,
    ) {
        let place = Place::rows([2, cols], cols + pad).shifted(shift);
        check::<f32>(cols, &[t, 1.0], seed, &[0.2, 0.9], Some(place.clone()));
        check::<bf16>(cols, &[1.0, t], seed, &[0.6], Some(place));
    }

    /// A constant added to all logits, exact in f32, changes only the rounding of exponentials.
    #[test]
    fn logits_are_relative(cols in kit::size(1..=9000, &[1024, 8192]), seed: u64, by in -64i32..64) {
        let row = logits(cols, seed);
        let moved = row.iter().map(|v| v + f64::from(by)).collect();
        let set = Parameters { k: 40, p: 0.9, min_p: 0.01 };
        let problem = Problem::<f32>::new(&[row, moved], vec![set; 2], &[0.3]);
        for gpu in kit::devices() {
            let got = problem.run(&gpu, [2, cols], Some(&[0.8, 0.8]));
            prop_assert_eq!((got.ids[0], got.count[0]), (got.ids[1], got.count[1]));
            prop_assert!((got.mass[0] / got.mass[1] - 1.0).abs() < 1e-6, "{:?}", got.mass);
        }
    }

    /// Batch invariance: a row's outputs depend on neither other rows, nor its position, alignment, or other outputs.
    #[test]
    fn an_output_does_not_depend_on_its_surroundings(
        cols in kit::size(1..=13_000, &[1024, 8192]),
        seed in 0u64..1 << 40,
        at in 0usize..3,
        pad in 0usize..9,
        shift in 0usize..9,
    ) {
        let rows: Vec<_> = (0..3).map(|i| logits(cols, seed + i)).collect();
        let parameters: Vec<_> = (0..3).map(|i| Parameters::listed(seed as usize + 7 * i, cols)).collect();
        let temperatures = [0.8f32, 1.3, 0.4];
        let mut problem = Problem::<bf16>::new(&rows, parameters, &[0.1, 0.8]);
        let mut alone = Problem::<bf16>::new(&[problem.row(at)], vec![problem.parameters[at]], &[0.8]);
        if seed % 2 == 0 {
            (problem.order, alone.order) = (FilterOrder::TopKFirst, FilterOrder::TopKFirst);
        }
        for gpu in kit::devices() {
            let all = problem.run(&gpu, Place::rows([3, cols], cols + pad).shifted(shift), Some(&temperatures));
            let one = alone.run(&gpu, [1, cols], Some(&temperatures[at..=at]));
            let b = 2 * at + 1;
            prop_assert_eq!(one.bits(), (vec![all.ids[b]], vec![all.mass[b].to_bits()], vec![all.count[b]]));
        }
    }
}

/// NaN and -Inf are never drawn; rows without a finite largest logit have no token.
#[test]
fn special_logits() {
    let cols_and_hot = [(3, 1), (1000, 999), (5000, 1024), (9000, 8500)];
    for (cols, hot) in cols_and_hot {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let with = |fill: f64, at: f64| {
            let mut row = vec![fill; cols];
            row[hot] = at;
            row
        };
        let rows = [
            with(nan, 1.0),
            with(-inf, -50.0),
            with(nan, nan),
            with(-inf, -inf),
            with(0.0, inf),
            with(0.0, 60.0),
        ];
        for temperature in [1.0f32, 0.0] {
            let problem = Problem::<bf16>::new(&rows, vec![Parameters::OFF; 6], &[2f32.powi(-24), 1.0]);
            for gpu in kit::devices() {
                let got = problem.run(&gpu, [6, cols], Some(&[temperature; 6]));
                let hot = hot as i32;
                let (ids, mass, count) = (got.ids, got.mass, got.count);
                assert_eq!(ids[..10], [hot, hot, hot, hot, 0, 0, 0, 0, 0, 0]);
                assert_eq!(mass[..10], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
                assert_eq!(count[..10], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]);
                assert!(ids[11] >= hot && mass[10] > 0.999 && mass[10] < 1.001, "{ids:?} {mass:?}");
            }
        }
    }
}

/// The largest finite logits, at any temperature.
#[test]
fn large_logits() {
    for cols in [40, 3000, 9000] {
        for (low, high) in [(-3e38, 3e38), (-3e38, -1e38), (1e38, 3e38), (0.0, 1e30)] {
            let mut row = vec![low; cols];
            row[cols / 3] = high;
            row[cols - 1] = high;
            let problem =
                Problem::<f32>::new(&[row], vec![Parameters::OFF], &[2f32.powi(-24), 0.5, 0.6, 1.0]);
            for temperature in [1e-6, 1.0, 30.0] {
                for gpu in kit::devices() {
                    let got = problem.run(&gpu, [1, cols], Some(&[temperature]));
                    problem.check(&got, EDGE, |row, _| reference::softmax(row, temperature.into()));
                }
            }
        }
    }
}

/// The sample misses the one large logit of a row, next to which the others have no mass, or little.
#[test]
fn a_large_logit_by_itself() {
    let cols = 20_000;
    for at in [1, 4097, 9001, cols - 1] {
        for above in [3.0, 20.0, 75.0, 1e4] {
            let mut row = logits(cols, at as u64);
            row[at] = above;
            let sets = [
                Parameters { p: 0.9, ..Parameters::OFF },
                Parameters { k: 3, ..Parameters::OFF },
                Parameters::OFF,
            ];
            let problem = Problem::<f32>::new(&vec![row; 3], sets.to_vec(), &[0.3, 1.0]);
            for gpu in kit::devices() {
                let got = problem.run(&gpu, [3, cols], Some(&[1.0; 3]));
                problem.check(&got, EDGE, |row, _| reference::softmax(row, 1.0));
            }
        }
    }
}

/// Masked rows, with whole segments without a token to draw; and rows with a few large logits, where the other weights are
/// subnormal.
#[test]
fn masked_rows() {
    let cols = 20_000;
    let (mut masked, mut far) = (vec![f64::NEG_INFINITY; cols], vec![-300.0; cols]);
    for i in 0..100 {
        masked[9000 + 7 * i] = (i % 23) as f64 / 8.0;
        far[9000 + 7 * i] = (i % 19) as f64 / 8.0;
    }
    let sets = [
        Parameters { k: 7, p: 0.7, min_p: 0.01 },
        Parameters { p: 0.9, ..Parameters::OFF },
        Parameters { k: 30, ..Parameters::OFF },
        Parameters { min_p: 0.3, ..Parameters::OFF },
    ];
    let rows: Vec<_> = (0..8).map(|i| if i < 4 { masked.clone() } else { far.clone() }).collect();
    let parameters = (0..8).map(|i| sets[i % 4]).collect();
    let mut problem = Problem::<f32>::new(&rows, parameters, &[2f32.powi(-24), 0.5, 1.0]);
    for order in [FilterOrder::Joint, FilterOrder::TopKFirst] {
        problem.order = order;
        for gpu in kit::devices() {
            let got = problem.run(&gpu, [8, cols], Some(&[1.0; 8]));
            problem.check(&got, EDGE, |row, _| reference::softmax(row, 1.0));
        }
    }
}

/// A temperature of zero takes the first of the largest logits; so does one at which the others underflow.
#[test]
fn zero_is_greedy() {
    for cols in [40, 3000, 9001] {
        let mut row = logits(cols, 5);
        row[cols / 2] = 9.0;
        row[cols - 1] = 9.0;
        for gpu in kit::devices() {
            let x = upload::<f32>(&gpu, std::slice::from_ref(&row));
            for (temperature, count, ids) in [(0.0, 1, vec![cols / 2]), (1e-7, 2, vec![cols / 2, cols - 1])] {
                for offset in 0..4 {
                    let got = sampled(&gpu, 1, cols, |s, w| {
                        let draw = Draw { seed: 1, offset, uniform: None };
                        let filters = Filters::default();
                        hk_sampling::sample_from_logits(
                            gpu.stream(),
                            x.view(),
                            f32::into(temperature),
                            s,
                            w,
                            filters,
                            draw,
                        )
                    });
                    assert!(
                        ids.contains(&(got.ids[0] as usize)) && got.count[0] == count && got.mass[0] == 1.0
                    );
                }
            }
        }
    }
}

/// A disabled filter is the widest parameter.
#[test]
fn absent_filters_keep_all() {
    for cols in [100, 9000] {
        let rows = [logits(cols, 1), logits(cols, 2)];
        for gpu in kit::devices() {
            let x = upload::<f16>(&gpu, &rows);
            let run = |filters: Filters| {
                sampled(&gpu, 2, cols, |s, w| {
                    let draw = Draw { seed: 4, ..Default::default() };
                    hk_sampling::sample_from_logits(gpu.stream(), x.view(), 0.9.into(), s, w, filters, draw)
                })
            };
            let off = run(Filters::default());
            assert_eq!(off.count, [cols as i32; 2]);
            assert!(off.mass.iter().all(|m| (m - 1.0).abs() < 1e-5));
            let wide =
                Filters { k: Some((cols as i32).into()), min_p: Some(0.0.into()), ..Default::default() };
            assert_eq!(run(wide).bits(), off.bits());
        }
    }
}
