//! Random test cases, biased towards the borders of kernels.

use crate::Place;
use hk_core::registry::{HostTensor, Sample, TensorSpec};
use hk_core::{DType, Float};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, FileFailurePersistence};
use std::fmt;
use std::ops::{Bound, RangeBounds};

/// How many cases a property is tested with: 16 on the emulator, 128 where there is a GPU; `HK_CASES` overrides.
///
/// Failing seeds go to `<test file>.proptest-regressions` next to the test and are run first from then on.
///
/// # Panics
/// If `HK_CASES` is not a number.
pub fn config() -> Config {
    let cases = match std::env::var("HK_CASES") {
        Ok(n) => n.parse().unwrap_or_else(|_| panic!("HK_CASES: `{n}`, expected a number")),
        Err(_) if crate::gpu::any_hardware() => 128,
        Err(_) => 16,
    };
    Config {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        max_shrink_iters: 200,
        max_shrink_time: 60_000,
        ..Config::default()
    }
}

/// Whether tests run at the full sizes of real models, some of which take minutes on the emulator: `HK_FULL=1`.
pub fn full() -> bool {
    std::env::var_os("HK_FULL").is_some_and(|v| v != "0")
}

/// The first and last number of a range.
///
/// # Panics
/// If it is empty or has no upper end.
fn ends(range: impl RangeBounds<usize>) -> (usize, usize) {
    let first = match range.start_bound() {
        Bound::Included(&n) => n,
        Bound::Excluded(&n) => n + 1,
        Bound::Unbounded => 0,
    };
    let last = match range.end_bound() {
        Bound::Included(&n) => Some(n),
        Bound::Excluded(&n) => n.checked_sub(1),
        Bound::Unbounded => None,
    };
    match last {
        Some(last) if first <= last => (first, last),
        _ => panic!("a range of sizes has a first and a last one"),
    }
}

/// Sizes in a range: small ones, powers of two and `borders` (the widest row of each kernel, say) with both their
/// neighbours, and all others with a uniform logarithm. Shrinks towards the start of the range.
///
/// # Panics
/// If the range is empty or has no upper end.
pub fn size(range: impl RangeBounds<usize>, borders: &[usize]) -> BoxedStrategy<usize> {
    let (first, last) = ends(range);
    let powers = (0..usize::BITS - 1).map(|i| 1usize << i);
    let near = |n: usize| [n.saturating_sub(1), n, n.saturating_add(1)];
    let within = |n: &usize| (first..=last).contains(n);
    // Borders count three times. One sorted list, so that a case shrinks from a border to any smaller size.
    let borders = borders.iter().chain([&last]).flat_map(|&n| [near(n), near(n), near(n)]).flatten();
    let round = powers.take_while(|&n| n <= last).flat_map(near);
    let mut marks: Vec<_> = borders.chain(round).filter(within).chain([first]).collect();
    marks.sort_unstable();
    let small = first..=last.min(first.saturating_add(16));
    let (low, high) = ((first.max(1) as f64).ln(), (last.max(1) as f64).ln());
    // Whole numbers shrink better than fractions.
    let any = (0u32..=10_000).prop_map(move |n| {
        let size = (low + f64::from(n) / 10_000.0 * (high - low)).exp();
        (size.round() as usize).clamp(first, last)
    });
    prop_oneof![3 => small, 5 => select(marks), 2 => any].boxed()
}

/// A stride of rows of `cols` elements: tight, padded by a little, padded to 16 elements, or a slice of rows twice as
/// wide.
pub fn row_stride(cols: usize) -> BoxedStrategy<usize> {
    free_stride().prop_map(move |stride| stride.of(cols)).boxed()
}

/// How the stride of rows follows from their length.
#[derive(Debug, Clone, Copy)]
enum Stride {
    Tight,
    Padded(usize),
    /// Padded to a multiple of 16 elements, plus this many times 16.
    Round(usize),
    Twice,
}

impl Stride {
    fn of(self, cols: usize) -> usize {
        let tight = cols.max(1);
        match self {
            Self::Tight => tight,
            Self::Padded(pad) => tight + pad,
            Self::Round(more) => tight.next_multiple_of(16) + 16 * more,
            Self::Twice => 2 * tight,
        }
    }
}

fn free_stride() -> impl Strategy<Value = Stride> + Clone {
    prop_oneof![
        3 => Just(Stride::Tight),
        2 => (1usize..=9).prop_map(Stride::Padded),
        2 => (0usize..=2).prop_map(Stride::Round),
        1 => Just(Stride::Twice),
    ]
}

/// Distribution of the elements of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Normal with deviation 1.
    Normal,
    /// Normal, scaled by powers of two from 2^-8 to 2^8.
    Wide,
    /// Multiples of 1/8 from -4 to 4: their sums and products are exact in f32.
    Grid,
    /// Mostly zeros of both signs, some ones.
    Zeros,
    /// Around the smallest normal value of the type: subnormals and their neighbours.
    Tiny,
}

impl Fill {
    /// Every kind.
    pub const ALL: [Fill; 5] = [Self::Normal, Self::Wide, Self::Grid, Self::Zeros, Self::Tiny];

    /// `len` elements, the same for the same seed.
    pub fn elements<T: Float>(self, len: usize, seed: u64) -> Vec<T> {
        let draw = |sample, stream: u64| {
            let spec = TensorSpec::new(DType::F32, [len]);
            let tensor = HostTensor::sample(spec, sample, seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            tensor.unwrap_or_else(|e| panic!("{e}")).to_f64()
        };
        let normal = || draw(Sample::Normal { mean: 0.0, deviation: 1.0 }, 1);
        let integers = |low, high| draw(Sample::Integers { low, high }, 2);
        let values: Vec<f64> = match self {
            Self::Normal => normal(),
            Self::Wide => normal().iter().zip(integers(-8, 9)).map(|(x, e)| x * e.exp2()).collect(),
            Self::Grid => integers(-32, 33).iter().map(|n| n / 8.0).collect(),
            Self::Zeros => {
                let zero = |n: &f64| if *n == 7.0 { 1.0 } else { 0.0f64.copysign(n - 3.5) };
                integers(0, 8).iter().map(zero).collect()
            }
            Self::Tiny => {
                let smallest = smallest_normal::<T>();
                normal().iter().zip(integers(-4, 2)).map(|(x, e)| x * e.exp2() * smallest).collect()
            }
        };
        values.into_iter().map(T::from_f64).collect()
    }
}

fn smallest_normal<T: Float>() -> f64 {
    match T::DTYPE {
        DType::F16 => 2f64.powi(-14),
        _ => 2f64.powi(-126),
    }
}

/// An operator's row-wise test case: a matrix, weights for its columns, and places for as many tensors of that shape as
/// it takes.
///
/// The elements follow from a seed; what is shown of a failing case is its shape, its places and that seed.
#[derive(Clone)]
pub struct RowCase<T> {
    /// Number of rows.
    pub rows: usize,
    /// Length of a row.
    pub cols: usize,
    /// Distribution of the elements of the matrix.
    pub fill: Fill,
    /// Seed of the elements.
    pub seed: u64,
    /// The matrix, row-major.
    pub x: Vec<T>,
    /// The weights, normal around 1.
    pub w: Vec<T>,
    places: Vec<(usize, usize)>,
}

impl<T: Float> RowCase<T> {
    /// The case of a seed.
    pub fn new(rows: usize, cols: usize, fill: Fill, seed: u64, places: [(usize, usize); 4]) -> Self {
        let mut case = Self { rows, cols, fill, seed, x: Vec::new(), w: Vec::new(), places: places.into() };
        case.x = case.matrix(0);
        case.w = Fill::Normal
            .elements::<f32>(cols, seed ^ 0x77)
            .iter()
            .map(|w| T::from_f32(1.0 + 0.25 * w))
            .collect();
        case
    }

    /// Another matrix of that shape and kind; number 0 is `x`.
    pub fn matrix(&self, number: u64) -> Vec<T> {
        self.fill.elements(self.rows * self.cols, self.seed.wrapping_add(number << 32))
    }

    /// The shape of the matrix.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    /// Where tensor number `i` of the case lies, `[rows, cols]` with a row stride and an alignment of its own. There are
    /// four; they repeat.
    pub fn place(&self, i: usize) -> Place {
        let (stride, shift) = self.places[i % self.places.len()];
        Place::rows(self.shape(), stride).shifted(shift)
    }
}

impl<T> fmt::Debug for RowCase<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, cols, fill, seed, places, .. } = self;
        write!(f, "{rows} x {cols}, {fill:?}, seed {seed:#x}, (row stride, shift) {places:?}")
    }
}

/// Most elements of a case: the emulator runs it in a fraction of a second.
const MOST_ELEMENTS: usize = 1 << 16;

/// Row-wise cases with `rows` and `cols` in these ranges. Columns lean as [`size`] does; there are fewer rows where rows
/// are long. Half of the places are contiguous and 16-byte aligned, so that vectorized and scalar paths both run.
///
/// # Panics
/// If a range is empty or has no upper end.
pub fn row_case<T: Float>(
    rows: impl RangeBounds<usize>,
    cols: impl RangeBounds<usize>,
) -> BoxedStrategy<RowCase<T>> {
    let (fewest, _) = ends((rows.start_bound().cloned(), rows.end_bound().cloned()));
    let sizes = (size(rows, &[]), size(cols, &[]));
    let fill = prop_oneof![4 => Just(Fill::Normal), 4 => select(&Fill::ALL[..])];
    // Strides on 16 bytes or free ones for the whole case, since one free tensor decides the path for all.
    let aligned = (0usize..=3).prop_map(|more| (Stride::Round(more), 0));
    let shift = prop_oneof![3 => Just(0usize), 1 => 1usize..=9];
    let free = (free_stride(), shift);
    let places = prop_oneof![four(aligned), four(free)];
    // All parts are independent, and made to fit only here: so each shrinks by itself.
    (sizes, fill, any::<u64>().no_shrink(), places)
        .prop_map(move |((rows, cols), fill, seed, places)| {
            let rows = rows.min(MOST_ELEMENTS / cols.max(1)).max(fewest);
            let places = places.map(|(stride, shift)| (stride.of(cols), shift));
            RowCase::new(rows, cols, fill, seed, places)
        })
        .boxed()
}

fn four<S: Strategy + Clone>(one: S) -> [S; 4] {
    [one.clone(), one.clone(), one.clone(), one]
}

/// Special values: NaN, infinities, both zeros, the smallest and largest subnormal, the smallest
/// normal and the largest value, with both signs, and ones.
pub fn special_values<T: Float>() -> Vec<T> {
    let step = match T::DTYPE {
        DType::F16 => 2f64.powi(-24),
        DType::Bf16 => 2f64.powi(-133),
        _ => 2f64.powi(-149),
    };
    let normal = smallest_normal::<T>();
    let largest = match T::DTYPE {
        DType::F16 => 65504.0,
        DType::Bf16 => (2.0 - 2f64.powi(-7)) * 2f64.powi(127),
        _ => f64::from(f32::MAX),
    };
    let positive = [0.0, step, normal - step, normal, 1.0, largest, f64::INFINITY];
    let all = positive.iter().flat_map(|&x| [x, -x]).chain([f64::NAN]);
    all.map(T::from_f64).collect()
}

/// One of [`special_values`].
pub fn special<T: Float>() -> impl Strategy<Value = T> + Clone {
    select(special_values::<T>())
}

/// Any bit pattern of the type, NaN and infinity included.
pub fn any_value<T: Float>() -> impl Strategy<Value = T> + Clone {
    any::<u32>().prop_map(|bits| bytemuck::pod_read_unaligned(&bits.to_le_bytes()[..size_of::<T>()]))
}

/// Finite values of ordinary size: up to `largest`, most of them around 1.
pub fn finite<T: Float>(largest: f64) -> impl Strategy<Value = T> + Clone {
    (-1.0..=1.0, 0.0..=1.0).prop_map(move |(x, spread): (f64, f64)| T::from_f64(x * largest.powf(spread)))
}

/// Multiples of 1/8 from -4 to 4: sums and products of some thousands of them are exact in f32.
pub fn on_grid<T: Float>() -> impl Strategy<Value = T> + Clone {
    (-32i32..=32).prop_map(|n| T::from_f64(f64::from(n) / 8.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_core::{bf16, f16};
    use proptest::strategy::ValueTree;
    use proptest::test_runner::{TestError, TestRunner};
    use std::collections::HashSet;

    fn draw<S: Strategy>(strategy: S, n: usize) -> Vec<S::Value> {
        let mut runner = TestRunner::deterministic();
        (0..n).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
    }

    fn subnormal(x: &bf16) -> bool {
        x.to_f32() != 0.0 && x.to_f32().abs() < bf16::MIN_POSITIVE.to_f32()
    }

    #[test]
    fn sizes_stay_in_range_and_meet_the_borders() {
        let sizes = draw(size(1..=5000, &[300]), 2000);
        assert!(sizes.iter().all(|n| (1..=5000).contains(n)));
        let set: HashSet<_> = sizes.into_iter().collect();
        for want in [1, 2, 7, 8, 9, 64, 65, 127, 128, 129, 299, 300, 301, 4096, 4999, 5000] {
            assert!(set.contains(&want), "{want} is missing");
        }
        assert_eq!(draw(size(3..4, &[]), 5), [3; 5]);
        assert!(draw(size(0..=0, &[]), 5).iter().all(|&n| n == 0));
    }

    #[test]
    fn cases_are_aligned_and_not_and_of_each_kind() {
        let cases = draw(row_case::<bf16>(1..=300, 1..=16384), 300);
        let fast = |c: &RowCase<bf16>| (0..4).all(|i| c.places[i].0.is_multiple_of(8) && c.places[i].1 == 0);
        let n = cases.iter().filter(|c| fast(c)).count();
        assert!((100..250).contains(&n), "{n} of 300 are aligned");
        for c in &cases {
            assert!(c.rows * c.cols <= MOST_ELEMENTS && c.x.len() == c.rows * c.cols && c.w.len() == c.cols);
            assert!(c.places.iter().all(|p| p.0 >= c.cols));
            assert_ne!(c.place(0).layout().numel(), 0);
        }
        for fill in Fill::ALL {
            assert!(cases.iter().any(|c| c.fill == fill), "{fill:?}");
        }
        assert!(cases.iter().any(|c| c.rows > 200) && cases.iter().any(|c| c.cols > 8192));
    }

    #[test]
    fn a_failing_case_shrinks_and_shows_its_seed() {
        let mut runner = TestRunner::new(Config { failure_persistence: None, ..config() });
        let narrow = |c: RowCase<bf16>| {
            prop_assert!(c.cols <= 100);
            Ok(())
        };
        let failure = runner.run(&row_case::<bf16>(1..=50, 1..=5000), narrow).unwrap_err();
        let TestError::Fail(_, c) = failure else { panic!("{failure}") };
        assert!(c.rows == 1 && c.cols <= 129, "{c:?}");
        let shown = format!("{c:?}");
        let seed = format!("seed {:#x}", c.seed);
        assert!(shown.starts_with(&format!("1 x {}, ", c.cols)) && shown.contains(&seed), "{shown}");
    }

    #[test]
    fn elements_follow_from_the_seed() {
        let c = &draw(row_case::<f32>(2..=9, 5..=40), 1)[0];
        let again = RowCase::<f32>::new(c.rows, c.cols, c.fill, c.seed, [(40, 0); 4]);
        assert_eq!(c.x, again.x);
        assert_eq!(c.matrix(0), c.x);
        assert_ne!(Fill::Normal.elements::<f32>(40, 1), Fill::Normal.elements::<f32>(40, 2));
    }

    #[test]
    fn fills_are_what_they_say() {
        let zeros = Fill::Zeros.elements::<f16>(1000, 3);
        assert!(zeros.iter().all(|x| x.to_f32() == 0.0 || x.to_f32() == 1.0));
        assert!(zeros.iter().any(|x| x.to_bits() == 0x8000) && zeros.contains(&f16::ONE));
        let tiny = Fill::Tiny.elements::<bf16>(1000, 3);
        assert!(tiny.iter().any(subnormal) && tiny.iter().any(|x| x.is_normal()));
        let grid = Fill::Grid.elements::<f32>(1000, 3);
        assert!(grid.iter().all(|x| x.abs() <= 4.0 && (8.0 * x).fract() == 0.0));
        let wide = Fill::Wide.elements::<f32>(1000, 3);
        assert!(wide.iter().any(|x| x.abs() > 100.0) && wide.iter().any(|x| x.abs() < 0.01));
    }

    #[test]
    fn special_values_are_there_with_both_signs() {
        let values = special_values::<bf16>();
        assert!(values.iter().any(|x| x.is_nan()) && values.contains(&bf16::NEG_INFINITY));
        assert!(values.contains(&bf16::MIN_POSITIVE) && values.contains(&bf16::MAX));
        assert_eq!(values.iter().filter(|x| subnormal(x)).count(), 4);
        assert!(values.iter().any(|x| x.to_bits() == 0x8000));
        let f16s = special_values::<f16>();
        assert!(f16s.contains(&f16::MAX) && f16s.contains(&f16::MIN_POSITIVE_SUBNORMAL));
        assert!(special_values::<f32>().contains(&f32::from_bits(1)));
        assert!(draw(any_value::<f16>(), 3000).iter().any(|x| x.is_nan()));
        assert!(draw(finite::<bf16>(100.0), 500).iter().all(|x| x.to_f32().abs() <= 100.0));
        assert!(draw(on_grid::<f32>(), 99).iter().all(|x| (8.0 * x).fract() == 0.0));
    }

    #[test]
    fn regressions_are_kept_beside_the_test() {
        assert!(config().failure_persistence.is_some());
    }
}
