//! The filters on probabilities and the draws from them, against the f64 reference and their laws.

use crate::common::{
    EXACT, GRID_OF_U, Kind, Output, Parameters, Problem, all_kinds, none, sampled, upload, workspace,
};
use hk_core::registry::Sample;
use hk_core::{Float, bf16, f16};
use hk_sampling::{Draw, FilterOrder, Filters, PerRow, Samples, reference};
use hk_testkit::{self as kit, Gpu, Place, Tolerance, proptest::prelude::*};

/// Rows of all kinds with a parameter set each; all uniform numbers of the grid for each.
fn listed<T: Float>(cols: usize, seed: usize, us: &[f32]) -> Problem<T> {
    let rows = all_kinds(cols, seed as u64);
    let parameters = (0..rows.len()).map(|i| Parameters::listed(seed + 31 * i, cols)).collect();
    Problem::new(&rows, parameters, us)
}

#[track_caller]
fn check_listed<T: Float>(cols: usize, seed: usize, us: &[f32]) {
    let mut problem = listed::<T>(cols, seed, us);
    for order in [FilterOrder::Joint, FilterOrder::TopKFirst] {
        problem.order = order;
        for gpu in kit::devices() {
            let got = problem.run(&gpu, [problem.rows(), cols], None);
            problem.check(&got, EXACT, |row, _| reference::clean(row));
        }
    }
}

/// Sizes of the specification that stay in registers, and the border of each kernel.
#[test]
fn the_listed_sizes_in_registers() {
    for (i, cols) in [1, 2, 7, 111, 500, 1000, 1023, 1024].into_iter().enumerate() {
        check_listed::<f32>(cols, 100 * i, &GRID_OF_U);
        check_listed::<f32>(cols, 100 * i + 1, &GRID_OF_U[..3]);
        check_listed::<bf16>(cols, 100 * i + 7, &GRID_OF_U[3..5]);
        check_listed::<f16>(cols, 100 * i + 8, &GRID_OF_U[5..]);
    }
    for (i, cols) in [1025, 3000, 8192].into_iter().enumerate() {
        check_listed::<f32>(cols, 100 * i + 50, &GRID_OF_U[1..4]);
        check_listed::<bf16>(cols, 100 * i + 51, &GRID_OF_U[3..6]);
        check_listed::<f16>(cols, 100 * i + 52, &GRID_OF_U[4..]);
    }
}

/// Rows cut into segments: few, or with `HK_FULL` all sizes of the specification.
#[test]
fn the_listed_sizes_in_segments() {
    check_listed::<f32>(8193, 1, &GRID_OF_U[2..4]);
    check_listed::<bf16>(16_392, 2, &[0.3]);
    check_listed::<f16>(16_391, 3, &[1.0]);
    check_listed::<f32>(32_000, 4, &[0.7]);
    if kit::full() {
        let sizes = [32_000, 128_256, 129_280, 151_936, 201_088, 248_320, 256_000, 600_001];
        for (i, cols) in sizes.into_iter().enumerate() {
            check_listed::<f32>(cols, 1000 + i, &[GRID_OF_U[i % 7], 0.37]);
            check_listed::<bf16>(cols, 2000 + i, &[GRID_OF_U[(i + 2) % 7]]);
            check_listed::<f16>(cols, 3000 + i, &[GRID_OF_U[(i + 4) % 7]]);
        }
    }
}

/// Segments of several tiles: a vocabulary larger than any model's.
#[test]
fn segments_of_several_tiles() {
    let cols = 525_001;
    let parameters = [Parameters { k: 700, p: 0.6, min_p: 1e-4 }, Parameters { p: 0.5, ..Parameters::OFF }];
    let rows = [Kind::Softmax.row(cols, 3), Kind::Uniform.row(cols, 4)];
    let gpu = &kit::devices()[0];
    let problem = Problem::<f32>::new(&rows, parameters.to_vec(), &[0.4, 1.0]);
    let got = problem.run(gpu, [2, cols], None);
    problem.check(&got, EXACT, |row, _| reference::clean(row));
    let logits = rows.map(|row| row.iter().map(|v| v.max(1e-30).ln()).collect());
    let problem = Problem::<f32>::new(&logits, parameters.to_vec(), &[0.4]);
    let got = problem.run(gpu, [2, cols], Some(&[0.9, 0.0]));
    problem.check(&got, 1e-5, |row, r| reference::softmax(row, [0.9f32, 0.0][r].into()));
}

/// Batches of the specification: no output, one, and many of few rows.
#[test]
fn the_listed_batches() {
    let rows = all_kinds(500, 9);
    let parameters: Vec<_> = (0..rows.len()).map(|i| Parameters::listed(i + 900, 500)).collect();
    for outputs in [0, 1, 8, 19, 99, 989] {
        let mut problem = Problem::<f32>::new(&rows, parameters.clone(), &[]);
        problem.outputs = (0..outputs).map(|b| (b * 7 % rows.len(), (b % 83 + 1) as f32 / 83.0)).collect();
        for gpu in kit::devices() {
            let got = problem.run(&gpu, [rows.len(), 500], None);
            problem.check(&got, EXACT, |row, _| reference::clean(row));
        }
    }
}

/// A matrix of rows of any kinds and layout.
#[derive(Debug, Clone)]
struct Case {
    cols: usize,
    rows: Vec<(usize, usize)>, // kind and seed
    stride: usize,
    shift: usize,
    first: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let cols = prop_oneof![6 => kit::size(1..=1100, &[1024]), 2 => kit::size(1025..=20_000, &[8192, 16_384])];
    let row = (0..Kind::ALL.len(), any::<usize>().no_shrink());
    let place = prop_oneof![Just((0usize, 0usize)), (0usize..=9, 0usize..=9)];
    (cols, prop::collection::vec(row, 1..=4), place, any::<bool>()).prop_map(
        |(cols, rows, (pad, shift), first)| {
            let stride = if pad == 0 { cols.next_multiple_of(8) } else { cols + pad };
            Case { cols, rows, stride, shift, first }
        },
    )
}

impl Case {
    fn problem<T: Float>(&self) -> Problem<T> {
        let rows: Vec<_> =
            self.rows.iter().map(|&(k, seed)| Kind::ALL[k].row(self.cols, seed as u64)).collect();
        let parameters = self.rows.iter().map(|&(_, seed)| Parameters::listed(seed, self.cols)).collect();
        let mut problem = Problem::new(&rows, parameters, &[0.001, 0.37, 1.0]);
        problem.order = if self.first { FilterOrder::TopKFirst } else { FilterOrder::Joint };
        problem
    }

    fn place(&self) -> Place {
        Place::rows([self.rows.len(), self.cols], self.stride).shifted(self.shift)
    }

    #[track_caller]
    fn check<T: Float>(&self) {
        let problem = self.problem::<T>();
        for gpu in kit::devices() {
            let got = problem.run(&gpu, self.place(), None);
            problem.check(&got, EXACT, |row, _| reference::clean(row));
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn f32_matches_reference(c in case()) {
        c.check::<f32>();
    }

    #[test]
    fn bf16_matches_reference(c in case()) {
        c.check::<bf16>();
    }

    #[test]
    fn f16_matches_reference(c in case()) {
        c.check::<f16>();
    }

    /// Batch invariance: a row's outputs depend on neither other rows, nor its position, alignment, or other outputs.
    #[test]
    fn an_output_does_not_depend_on_its_surroundings(c in case(), pick in any::<prop::sample::Index>()) {
        let problem = c.problem::<f32>();
        let b = pick.index(problem.outputs.len());
        let (row, u) = problem.outputs[b];
        let mut alone = Problem::<f32>::new(&[problem.row(row)], vec![problem.parameters[row]], &[u]);
        alone.order = problem.order;
        for gpu in kit::devices() {
            let all = problem.run(&gpu, c.place(), None);
            let one = alone.run(&gpu, [1, c.cols], None);
            prop_assert_eq!((one.ids[0], one.mass[0].to_bits(), one.count[0]), (all.ids[b], all.mass[b].to_bits(), all.count[b]));
        }
    }

    /// Larger k, larger p and smaller min_p never keep less; combined filters keep the intersection.
    #[test]
    fn sets_are_monotone_and_intersect(
        kind in 0..Kind::ALL.len(),
        cols in kit::size(1..=9000, &[1024, 8192]),
        seed: u64,
        mut ks in prop::array::uniform2(1i32..200),
        mut ps in prop::array::uniform2(0.001f32..=1.0),
        mut mins in prop::array::uniform2(0.0f32..=1.0),
    ) {
        ks.sort_unstable();
        ps.sort_by(f32::total_cmp);
        mins.sort_by(|a, b| b.total_cmp(a));
        let off = Parameters::OFF;
        let mut parameters = Vec::new();
        for i in 0..2 {
            parameters.push(Parameters { k: ks[i], ..off });
            parameters.push(Parameters { p: ps[i], ..off });
            parameters.push(Parameters { min_p: mins[i], ..off });
        }
        parameters.push(Parameters { k: ks[0], p: ps[1], min_p: mins[1] });
        parameters.push(Parameters { k: ks[1], p: ps[0], min_p: mins[1] });
        let row = Kind::ALL[kind].row(cols, seed);
        let problem = Problem::<f32>::new(&vec![row; 8], parameters, &[0.6]);
        for gpu in kit::devices() {
            let got = problem.run(&gpu, [8, cols], None);
            let set = |i: usize| (got.count[i], got.mass[i].to_bits());
            for i in 0..3 {
                prop_assert!(got.count[i] <= got.count[i + 3] && got.mass[i] <= got.mass[i + 3]);
            }
            // All sets are prefixes of the tokens by probability: the smallest is the intersection.
            prop_assert_eq!(set(6), set(0).min(set(4)).min(set(5)));
            prop_assert_eq!(set(7), set(3).min(set(1)).min(set(5)));
        }
    }

    /// Permuting tokens permutes the kept set; halving all probabilities changes neither top-k nor min-p.
    #[test]
    fn sets_follow_their_tokens(
        kind in 0..Kind::ALL.len(),
        cols in kit::size(1..=3000, &[1024]),
        seed: u64,
        k in 1i32..50,
        keys in prop::collection::vec(any::<u32>(), 3000),
    ) {
        let row = reference::clean(&Kind::ALL[kind].row(cols, seed));
        let mut order: Vec<usize> = (0..cols).collect();
        order.sort_by_key(|&i| keys[i]);
        let renamed: Vec<f64> = order.iter().map(|&i| row[i]).collect();
        let halved: Vec<f64> = row.iter().map(|v| v / 2.0).collect();
        let set = Parameters { k, min_p: 0.01, ..Parameters::OFF };
        let problem = Problem::<f32>::new(&[row.clone(), renamed, halved], vec![set; 3], &[0.4]);
        for gpu in kit::devices() {
            let got = problem.run(&gpu, [3, cols], None);
            prop_assert_eq!((got.count[0], got.count[0]), (got.count[1], got.count[2]));
            // Halving a subnormal number rounds.
            if kind != Kind::ALL.len() - 1 {
                prop_assert_eq!((got.ids[0], got.mass[0] / 2.0), (got.ids[2], got.mass[2]));
            }
            let y = renormed::<f32>(&gpu, &[problem.row(0), problem.row(1)], PerRow::All(k));
            let back: Vec<f32> = order.iter().map(|&i| y[i]).collect();
            kit::assert_close(&kit::Array::new("renamed", [cols], y[cols..].to_vec()), &kit::widen(&back), Tolerance::Reduction);
        }
    }
}

fn renormed<T: Float>(gpu: &Gpu, rows: &[Vec<f64>], k: PerRow<i32>) -> kit::Array<T> {
    let shape = [rows.len(), rows[0].len()];
    let (probs, mut y) = (upload::<T>(gpu, rows), gpu.poisoned::<T>(shape));
    let bytes = hk_sampling::sampling_workspace(gpu.stream().device().info(), 1, shape[1]);
    let mut scratch = workspace(gpu, bytes);
    let scratch = scratch.view_mut([bytes]).unwrap();
    hk_sampling::top_k_renorm_probs(gpu.stream(), probs.view(), y.view_mut(), scratch, k).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_untouched(&probs);
    gpu.download(&y)
}

/// The sums of AITER's tests, on either side of their borders.
#[test]
fn controlled_borders() {
    let row = |head: &[f64], rest: f64| [head, &vec![rest; 200]].concat();
    let cases = [
        (row(&[0.92], 0.08 / 200.0), Parameters { k: 10, p: 0.9, min_p: -1.0 }, 1),
        (row(&[0.09; 10], 0.1 / 200.0), Parameters { k: 10, p: 1.0, min_p: -1.0 }, 10),
        (row(&[0.50, 0.31, 0.10, 0.05], 0.04 / 200.0), Parameters { k: 100, p: 0.8, min_p: -1.0 }, 2),
        (
            row(&[0.15, 0.15, 0.15, 0.15, 0.15, 0.04, 0.04, 0.04, 0.04, 0.04], 0.0),
            Parameters { k: 5, p: 0.95, min_p: -1.0 },
            5,
        ),
    ];
    let us: Vec<f32> = (1..=50).map(|i| i as f32 / 50.0).collect();
    for (row, parameters, kept) in cases {
        let problem = Problem::<f32>::new(&[row], vec![parameters], &us);
        for gpu in kit::devices() {
            let got = problem.run(&gpu, [1, problem.cols], None);
            assert!(got.count.iter().all(|&n| n == kept), "{:?}", got.count);
            let mut ids = got.ids.clone();
            ids.dedup();
            assert_eq!(ids, (0..kept).collect::<Vec<_>>());
        }
    }
}

/// A number is a tensor of that value; each operator is the joint one with one filter.
#[test]
fn operators_agree() {
    for cols in [300, 2000, 9000] {
        let rows = [Kind::Softmax.row(cols, 1), Kind::Ties.row(cols, 2), Kind::Uniform.row(cols, 3)];
        let draw = Draw { seed: 77, offset: 5, uniform: None };
        for gpu in kit::devices() {
            let (x, stream) = (upload::<f32>(&gpu, &rows), gpu.stream());
            let joint = |filters: Filters| {
                sampled(&gpu, 3, cols, |s, w| {
                    hk_sampling::top_k_top_p_sampling_from_probs(
                        stream,
                        x.view(),
                        none(),
                        s,
                        w,
                        filters,
                        draw,
                    )
                })
            };
            let off = Parameters::OFF;
            let p = joint(Parameters { p: 0.7, ..off }.filters());
            let k = joint(Parameters { k: 20, ..off }.filters());
            let min_p = joint(Parameters { min_p: 0.3, ..off }.filters());
            assert_ne!(p.count, k.count);
            let run = |f: &dyn Fn(Samples, hk_core::TensorViewMut<u8>) -> hk_core::Result<()>| {
                sampled(&gpu, 3, cols, f).bits()
            };
            use hk_sampling::{
                min_p_sampling_from_probs, top_k_sampling_from_probs, top_p_sampling_from_probs,
            };
            let one =
                run(&|s, w| top_p_sampling_from_probs(stream, x.view(), none(), s, w, 0.7.into(), draw));
            assert_eq!(one, p.bits());
            let one = run(&|s, w| top_k_sampling_from_probs(stream, x.view(), none(), s, w, 20.into(), draw));
            assert_eq!(one, k.bits());
            let one =
                run(&|s, w| min_p_sampling_from_probs(stream, x.view(), none(), s, w, 0.3.into(), draw));
            assert_eq!(one, min_p.bits());
            let ps = gpu.upload(&[0.7f32; 3], [3]);
            let one = run(&|s, w| {
                top_p_sampling_from_probs(stream, x.view(), none(), s, w, ps.view().into(), draw)
            });
            assert_eq!(one, p.bits());
            let ks = gpu.upload(&[20i32; 3], [3]);
            let one = run(&|s, w| {
                top_k_sampling_from_probs(stream, x.view(), none(), s, w, ks.view().into(), draw)
            });
            assert_eq!(one, k.bits());
        }
    }
}

/// With equal probabilities the token is the uniform number: the generator is the published one, for each output.
#[test]
fn numbers_are_those_of_philox() {
    let cols = 1000;
    for (seed, offset) in
        [(0, 0), (1, 0), (0, 1), (0x299f_31d0_a409_3822, 0x85a3_08d3_243f_6a88), (u64::MAX, u64::MAX)]
    {
        for gpu in kit::devices() {
            let x = gpu.upload(&vec![1.0f32 / 1024.0; cols], [1, cols]);
            let x = x.view().broadcast([200, cols]).unwrap();
            let draw = Draw { seed, offset, uniform: None };
            let got = sampled(&gpu, 200, cols, |s, w| {
                hk_sampling::top_k_sampling_from_probs(gpu.stream(), x, none(), s, w, i32::MAX.into(), draw)
            });
            for (b, id) in got.ids.iter().enumerate() {
                let want = (reference::uniform(seed, offset, b) * cols as f64).ceil() as i32 - 1;
                assert_eq!(*id, want, "output {b} of seed {seed:#x}, offset {offset:#x}");
            }
        }
    }
}

#[test]
fn streams_repeat_and_differ() {
    for gpu in kit::devices() {
        let x = upload::<bf16>(&gpu, &vec![Kind::Softmax.row(500, 4); 64]);
        let run = |seed, offset| {
            sampled(&gpu, 64, 500, |s, w| {
                let draw = Draw { seed, offset, uniform: None };
                hk_sampling::top_p_sampling_from_probs(
                    gpu.stream(),
                    x.view(),
                    none(),
                    s,
                    w,
                    0.99.into(),
                    draw,
                )
            })
        };
        let first = run(1, 1);
        assert_eq!(first, run(1, 1));
        let differing = |other: &Output| first.ids.iter().zip(&other.ids).filter(|(a, b)| a != b).count();
        for other in [run(1, 2), run(2, 1), run(1, 1 << 32)] {
            assert!(differing(&other) > 32 && first.count == other.count);
        }
    }
}

/// 50,000 draws follow the renormalized probabilities: chi-square over tokens expected at least five times.
#[test]
fn draws_follow_the_probabilities() {
    let (cols, draws) = (120, 50_000);
    let row = Kind::Softmax.row(cols, 21);
    let set = Parameters { k: 60, p: 0.97, min_p: 0.001 };
    let mut first: Option<Vec<i32>> = None;
    for gpu in kit::devices() {
        // Other devices draw the same tokens, for fewer draws.
        let draws = if first.is_some() { 500 } else { draws };
        let x = upload::<f32>(&gpu, std::slice::from_ref(&row));
        let index = gpu.upload(&vec![0i32; draws], [draws]);
        let got = sampled(&gpu, draws, cols, |s, w| {
            let draw = Draw { seed: 2026, offset: 3, uniform: None };
            let index = Some(index.view());
            hk_sampling::top_k_top_p_sampling_from_probs(
                gpu.stream(),
                x.view(),
                index,
                s,
                w,
                set.filters(),
                draw,
            )
        });
        if let Some(first) = &first {
            assert_eq!(got.ids, first[..draws]);
            continue;
        }
        let row: Vec<f64> = row.iter().map(|v| f64::from(*v as f32)).collect();
        let kept = reference::kept(&row, set.reference(FilterOrder::Joint));
        let share = |v: f64| if v >= kept.threshold { v / kept.mass } else { 0.0 };
        let mut counts = vec![0usize; cols];
        got.ids.iter().for_each(|&id| counts[id as usize] += 1);
        let (mut chi, mut bins, mut rest) = (0.0, 0, (0.0, 0.0));
        for (v, n) in row.iter().zip(&counts) {
            let (expected, n) = (share(*v) * draws as f64, *n as f64);
            if expected >= 5.0 {
                chi += (n - expected).powi(2) / expected;
                bins += 1;
            } else {
                rest = (rest.0 + expected, rest.1 + n);
            }
        }
        assert!(rest.1 <= rest.0 + 6.0 * rest.0.sqrt() + 3.0, "{rest:?}");
        // Wilson and Hilferty: 4.75 deviations are one in a million.
        let freedom = f64::from(bins - 1);
        let z = ((chi / freedom).cbrt() - (1.0 - 2.0 / (9.0 * freedom))) / (2.0 / (9.0 * freedom)).sqrt();
        assert!(z.abs() < 4.75 && bins > 20, "chi-square {chi} over {bins} bins, {z} deviations");
        first = Some(got.ids);
    }
}

/// A vocabulary of 131,072 tokens: the draws of top-k differ little from its probabilities.
#[test]
fn draws_of_a_large_vocabulary() {
    let (cols, draws) = if kit::full() { (131_072, 8000) } else { (9000, 300) };
    let row = Kind::Softmax.row(cols, 22);
    for gpu in kit::devices().into_iter().take(1) {
        let x = upload::<f32>(&gpu, std::slice::from_ref(&row));
        let index = gpu.upload(&vec![0i32; draws], [draws]);
        let got = sampled(&gpu, draws, cols, |s, w| {
            let draw = Draw { seed: 7, ..Default::default() };
            hk_sampling::top_k_sampling_from_probs(
                gpu.stream(),
                x.view(),
                Some(index.view()),
                s,
                w,
                50.into(),
                draw,
            )
        });
        let row: Vec<f64> = row.iter().map(|v| f64::from(*v as f32)).collect();
        let kept = reference::kept(&row, reference::Filters { k: Some(50), ..Default::default() });
        let mut counts = vec![0.0; cols];
        got.ids.iter().for_each(|&id| counts[id as usize] += 1.0 / draws as f64);
        let share = |v: f64| if v >= kept.threshold { v / kept.mass } else { 0.0 };
        let variation = row.iter().zip(&counts).map(|(v, n)| (share(*v) - n).abs()).sum::<f64>() / 2.0;
        let most = if kit::full() { 0.05 } else { 0.25 };
        assert!(variation < most, "total variation {variation}");
    }
}

#[test]
fn top_one_is_the_argmax() {
    for (cols, kind) in [(7, Kind::Softmax), (900, Kind::Uniform), (5000, Kind::Peaked), (9001, Kind::OneHot)]
    {
        let row = kind.row(cols, 5);
        for gpu in kit::devices() {
            let problem = Problem::<f32>::new(
                std::slice::from_ref(&row),
                vec![Parameters { k: 1, ..Parameters::OFF }],
                &GRID_OF_U,
            );
            let got = problem.run(&gpu, [1, cols], None);
            let x = upload::<f32>(&gpu, std::slice::from_ref(&row));
            let mut ids = gpu.poisoned::<i32>([1]);
            let bytes = hk_sampling::race_workspace(gpu.stream().device().info(), 1, cols);
            let mut scratch = workspace(&gpu, bytes);
            let scratch = scratch.view_mut([bytes]).unwrap();
            hk_sampling::greedy_sample(gpu.stream(), x.view(), None, ids.view_mut(), scratch).unwrap();
            assert!(got.ids.iter().all(|id| *id == gpu.download(&ids)[0]) && got.count[0] == 1);
        }
    }
}

/// u = 1 draws the last token of positive mass, u = 0 the first; tokens without mass are never drawn.
#[test]
fn the_ends_of_the_interval() {
    for cols in [1usize, 2, 63, 64, 65, 1000, 1024, 1025, 8192, 8193, 16_385] {
        let mut row = vec![0.0; cols];
        let (first, last) = (cols / 3, cols - 1 - cols / 4);
        (first..=last).for_each(|i| row[i] = 1e-3 / (1.0 + (i % 13) as f64));
        let problem =
            Problem::<f32>::new(&[row], vec![Parameters::OFF], &[0.0, 2f32.powi(-24), 1.0, 2.0, f32::NAN]);
        for gpu in kit::devices() {
            let got = problem.run(&gpu, [1, cols], None);
            let (first, last) = (first as i32, last as i32);
            assert_eq!(got.ids, [first, first, last, last, last], "{cols} tokens");
            assert_eq!(got.count[0], last - first + 1);
        }
    }
}

/// Rows without a token to draw give 0 and are not read past; so do row indices out of range, with mass NaN.
#[test]
fn degenerate_rows() {
    for cols in [5, 1024, 3000, 9000] {
        let rows = [Kind::Zeros, Kind::Nan, Kind::OneInfinity, Kind::Softmax].map(|kind| kind.row(cols, 3));
        for gpu in kit::devices() {
            let x = upload::<bf16>(&gpu, &rows);
            let index = gpu.upload(&[0, 1, 2, 3, -1, 4, i32::MAX, i32::MIN], [8]);
            for order in [FilterOrder::Joint, FilterOrder::TopKFirst] {
                let filters = Filters { k: Some(3.into()), p: Some(0.9.into()), order, ..Default::default() };
                let got = sampled(&gpu, 8, cols, |s, w| {
                    let (index, draw) = (Some(index.view()), Draw::default());
                    hk_sampling::top_k_top_p_sampling_from_probs(
                        gpu.stream(),
                        x.view(),
                        index,
                        s,
                        w,
                        filters,
                        draw,
                    )
                });
                assert_eq!(
                    (&got.ids[..3], &got.mass[..3], &got.count[..3]),
                    (&[0; 3][..], &[0.0; 3][..], &[0; 3][..])
                );
                assert!(got.mass[3] > 0.0 && got.count[3] > 0);
                assert_eq!((&got.ids[4..], &got.count[4..]), (&[0; 4][..], &[0; 4][..]));
                assert!(got.mass[4..].iter().all(|m| m.is_nan()), "{:?}", got.mass);
            }
            let y = renormed::<bf16>(&gpu, &rows, 2.into());
            assert!(
                y[..3 * cols].iter().all(|v| *v == bf16::ZERO) && y.row(3).iter().any(|v| *v > bf16::ZERO)
            );
        }
    }
}

/// Results do not depend on the batches that the workspace allows.
#[test]
fn the_workspace_does_not_matter() {
    let (rows, cols) = (5, 9000);
    let x: Vec<Vec<f64>> = (0..rows).map(|i| Kind::Softmax.row(cols, i as u64)).collect();
    for gpu in kit::devices() {
        let x = upload::<f32>(&gpu, &x);
        let run = |bytes: usize| {
            let mut scratch = workspace(&gpu, bytes);
            let mut ids = gpu.poisoned::<i32>([rows]);
            let filters = Parameters { k: 40, p: 0.9, min_p: 0.01 }.filters();
            hk_sampling::top_k_top_p_sampling_from_probs(
                gpu.stream(),
                x.view(),
                None,
                ids.view_mut().into(),
                scratch.view_mut([bytes]).unwrap(),
                filters,
                Draw { seed: 5, ..Default::default() },
            )
            .unwrap();
            gpu.download(&ids).data
        };
        let one = hk_sampling::sampling_workspace(gpu.stream().device().info(), 1, cols);
        let all = run(hk_sampling::sampling_workspace(gpu.stream().device().info(), rows, cols));
        assert_eq!(run(one), all);
        assert_eq!(run(2 * one + 17), all);
    }
}

/// On a device with one CU a block walks over whole rows; results are the same.
#[test]
fn shares_change_nothing() {
    let cols = 5 * 4096 + 100;
    for arch in ["gfx942", "gfx950"] {
        for seed in 0..4 {
            let problem = listed::<f32>(cols, seed, &[0.001, 1.0]);
            let outputs = [format!("emu:{arch}"), format!("emu:{arch}?cus=1")].map(|spec| {
                let got = problem.run(&Gpu::open(&spec), [problem.rows(), cols], None);
                let bits: Vec<u32> = got.mass.iter().map(|m| m.to_bits()).collect();
                (got.ids, bits, got.count)
            });
            assert_eq!(outputs[0], outputs[1], "{arch}, seed {seed}");
        }
    }
}

fn check_renorm<T: Float>(cols: usize, k: i32) {
    let rows: Vec<_> = all_kinds(cols, 6).into_iter().collect();
    let want: Vec<f64> = rows
        .iter()
        .flat_map(|row| {
            let row: Vec<f64> = row.iter().map(|&v| T::from_f64(v).to_f64()).collect();
            let row = reference::clean(&row);
            let kept = reference::kept(&row, reference::Filters { k: Some(k.into()), ..Default::default() });
            reference::renorm(&row, &kept)
        })
        .collect();
    for gpu in kit::devices() {
        let y = renormed::<T>(&gpu, &rows, k.into());
        kit::assert_close(&y, &want, Tolerance::Reduction);
        for (i, kind) in Kind::ALL.iter().enumerate() {
            let sum: f64 = kit::widen(y.row(i)).iter().sum();
            let empty = matches!(kind, Kind::Zeros | Kind::Nan | Kind::OneInfinity | Kind::Tiny);
            let bound = if size_of::<T>() == 4 { 1e-5 } else { 1e-2 };
            assert!(
                empty || (sum - 1.0).abs() <= bound || want[i * cols..][..cols].iter().all(|v| *v == 0.0),
                "{kind:?}: {sum}"
            );
        }
    }
}

#[test]
fn top_k_renorm_matches_reference() {
    for (cols, k) in
        [(1, 1), (7, 3), (500, 50), (1024, 1024), (1025, 10), (5000, 200), (8200, 500), (9001, 1)]
    {
        check_renorm::<f32>(cols, k);
        check_renorm::<bf16>(cols, k);
        check_renorm::<f16>(cols, k);
    }
}

#[test]
fn top_k_renorm_of_a_row_does_not_depend_on_the_others() {
    for cols in [77, 1024, 5000, 9000, 13_001] {
        let rows: Vec<_> = (0..4).map(|i| Kind::ALL[3 * i].row(cols, i as u64)).collect();
        for gpu in kit::devices() {
            let all = renormed::<f32>(&gpu, &rows, 30.into());
            for (i, row) in rows.iter().enumerate() {
                let alone = renormed::<f32>(&gpu, std::slice::from_ref(row), 30.into());
                let among = kit::Array::new("among", [1, cols], all.row(i).to_vec());
                kit::assert_bits(&among, &alone);
            }
        }
    }
}

#[test]
fn top_k_renorm_in_place() {
    for cols in [99, 1024, 3001, 9000] {
        let rows = [Kind::Softmax.row(cols, 1), Kind::Ties.row(cols, 2)];
        for gpu in kit::devices() {
            let want = renormed::<f32>(&gpu, &rows, 30.into());
            let mut x = upload::<f32>(&gpu, &rows);
            let bytes = hk_sampling::sampling_workspace(gpu.stream().device().info(), 2, cols);
            let mut scratch = workspace(&gpu, bytes);
            let y = x.view_mut();
            let scratch = scratch.view_mut([bytes]).unwrap();
            hk_sampling::top_k_renorm_probs(gpu.stream(), y.alias(), y, scratch, 30.into()).unwrap();
            gpu.assert_guards(&x);
            kit::assert_bits(&gpu.download(&x), &want);
        }
    }
}

#[test]
fn nothing_is_launched_for_no_outputs() {
    for gpu in kit::devices() {
        let x = upload::<f32>(&gpu, &[Kind::Softmax.row(9000, 1)]);
        let index = gpu.upload::<i32>(&[], [0]);
        gpu.stream().take_counters().unwrap();
        let got = sampled(&gpu, 0, 9000, |s, w| {
            let (index, draw) = (Some(index.view()), Draw::default());
            hk_sampling::top_p_sampling_from_probs(gpu.stream(), x.view(), index, s, w, 0.5.into(), draw)
        });
        assert!(got.ids.is_empty());
        if let Some(counters) = gpu.stream().take_counters().unwrap() {
            assert_eq!(counters.workgroups, 0);
        }
    }
}

/// A row in registers is read once.
#[test]
fn short_rows_are_read_once() {
    for (cols, waves) in [(1024, 1), (8192, 4)] {
        let rows: Vec<_> = (0..3).map(|i| Kind::Softmax.row(cols, i)).collect();
        for arch in ["gfx942", "gfx950"] {
            let gpu = Gpu::open(&format!("emu:{arch}?details=true"));
            let x = upload::<f32>(&gpu, &rows);
            gpu.stream().take_counters().unwrap();
            sampled(&gpu, 3, cols, |s, w| {
                let filters = Parameters { k: 50, p: 0.9, min_p: 0.01 }.filters();
                hk_sampling::top_k_top_p_sampling_from_probs(
                    gpu.stream(),
                    x.view(),
                    none(),
                    s,
                    w,
                    filters,
                    Draw::default(),
                )
            });
            let counters = gpu.stream().take_counters().unwrap().unwrap();
            assert_eq!(
                (counters.waves, counters.global_read_bytes),
                (3 * waves, 3 * 4 * cols as u64),
                "{arch}"
            );
        }
    }
}

/// Example data exercises every filter: sets above are neither all of one token nor all of all tokens.
#[test]
fn listed_parameters_decide_something() {
    let mut sizes = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let row = Kind::Softmax.row(500, seed);
        let set = Parameters::listed(seed as usize, 500);
        sizes.insert(reference::kept(&row, set.reference(FilterOrder::Joint)).count);
    }
    assert!(sizes.len() > 20, "{sizes:?}");
    let spread = crate::common::random(Sample::Probabilities, 500, 1);
    assert!(spread.iter().all(|v| *v > 0.0));
}

/// A long row is read once, plus 4096 tokens for the guess and the segment that is drawn in; only short lists are written.
#[test]
fn long_rows_are_read_little_more_than_once() {
    let cols = 32_768;
    let gpu = Gpu::open("emu:gfx942");
    let x = upload::<f32>(&gpu, &[Kind::Softmax.row(cols, 1)]);
    let floor = 4 * cols as u64;
    for (set, least, most) in [
        (Parameters::OFF, floor, floor * 3 / 2),
        (Parameters { k: 50, p: 0.9, min_p: 0.01 }, floor, floor * 3 / 2),
        (Parameters { p: 0.9, ..Parameters::OFF }, floor, floor * 2),
    ] {
        gpu.stream().take_counters().unwrap();
        sampled(&gpu, 1, cols, |s, w| {
            hk_sampling::top_k_top_p_sampling_from_probs(
                gpu.stream(),
                x.view(),
                none(),
                s,
                w,
                set.filters(),
                Draw::default(),
            )
        });
        let counters = gpu.stream().take_counters().unwrap().unwrap();
        assert_eq!(counters.workgroups, 1 + 8 + 1, "a guess, 8 segments, the end");
        let (read, written) = (counters.global_read_bytes, counters.global_written_bytes);
        assert!(
            (least..=most).contains(&read) && written < floor / 4,
            "{set:?}: {read} read, {written} written"
        );
    }
}

/// Equal or nearly equal tokens do not conflict in LDS, except for bins of the guess that share a bank.
#[test]
fn equal_tokens_do_not_wait_for_each_other() {
    let cols = 16_384;
    for arch in ["gfx942", "gfx950"] {
        for kind in [Kind::Softmax, Kind::Uniform, Kind::Equal, Kind::Plateaus] {
            let gpu = Gpu::open(&format!("emu:{arch}?details=true"));
            let x = upload::<f32>(&gpu, &[kind.row(cols, 1)]);
            gpu.stream().take_counters().unwrap();
            sampled(&gpu, 1, cols, |s, w| {
                let filters = Parameters { k: 50, p: 0.9, min_p: -1.0 }.filters();
                let draw = Draw::default();
                hk_sampling::top_k_top_p_sampling_from_probs(
                    gpu.stream(),
                    x.view(),
                    none(),
                    s,
                    w,
                    filters,
                    draw,
                )
            });
            let details = gpu.stream().take_counters().unwrap().unwrap().details.unwrap();
            let clocks = details.lds_clocks as f64;
            let ratio = clocks / (clocks - details.lds_conflict_clocks as f64);
            println!("{arch} {kind:?}: {clocks} clocks, {ratio:.2} times the least");
            assert!(ratio < 1.3, "{arch} {kind:?}: {ratio:.2}");
        }
    }
}
