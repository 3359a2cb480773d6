//! `topk` on the emulated GPUs (and real ones where there are some) against a stable sort, and its laws. Every result is
//! exact.

use hk_activation::{TopkIndex, TopkOptions, reference, topk_workspace};
use hk_core::{Float, bf16, f16};
use hk_testkit::{self as kit, Array, Fill, Gpu, Place, Tensor, proptest::prelude::*, widen};

const LARGEST: TopkOptions = TopkOptions { largest: true };
const SMALLEST: TopkOptions = TopkOptions { largest: false };

/// What `topk` gave.
#[derive(Debug, PartialEq)]
struct Output<T> {
    values: Array<T>,
    indices: Vec<i64>,
}

/// Runs `topk` with its results in the given places, and checks that nothing else is touched.
#[track_caller]
fn run_at<T: Float, I: TopkIndex + Into<i64>>(
    gpu: &Gpu,
    x: &Tensor<T>,
    values: impl Into<Place>,
    indices: impl Into<Place>,
    options: TopkOptions,
) -> Output<T> {
    let mut values = gpu.poisoned::<T>(values);
    let mut indices = gpu.poisoned::<I>(indices);
    let (rows, cols) = (x.layout().rows("test", "x").unwrap(), *x.layout().shape().last().unwrap());
    let needed = topk_workspace(rows.rows, cols, *values.layout().shape().last().unwrap());
    let mut workspace = (needed > 0).then(|| gpu.poisoned::<i64>([needed]));
    let scratch = workspace.as_mut().map(|w| w.view_mut());
    hk_activation::topk(gpu.stream(), x.view(), values.view_mut(), indices.view_mut(), scratch, options)
        .unwrap();
    gpu.assert_guards(&values);
    gpu.assert_guards(&indices);
    gpu.assert_untouched(x);
    if let Some(workspace) = &workspace {
        gpu.assert_guards(workspace);
    }
    let indices = gpu.download(&indices).iter().map(|&i| i.into()).collect();
    Output { values: gpu.download(&values), indices }
}

/// Runs `topk` on contiguous rows.
#[track_caller]
fn run<T: Float>(gpu: &Gpu, x: &[T], cols: usize, k: usize, options: TopkOptions) -> Output<T> {
    let rows = x.len() / cols;
    run_at::<T, i32>(gpu, &gpu.upload(x, [rows, cols]), [rows, k], [rows, k], options)
}

/// The values have the bits of the elements that the reference picks.
#[track_caller]
fn assert_exact<T: Float>(got: &Output<T>, x: &[T], cols: usize, k: usize, options: TopkOptions, what: &str) {
    let want = reference::topk(&widen(x), cols, k, options.largest).indices;
    for (row, (got_row, want_row)) in got.indices.chunks(k).zip(want.chunks(k)).enumerate() {
        let wrong = got_row.iter().zip(want_row).position(|(&got, &want)| got != want as i64);
        if let Some(place) = wrong {
            let (got, want) = (got_row[place], want_row[place]);
            let value = x[row * cols + want].to_f64();
            panic!("{what}, row {row}, place {place}: column {got}, expected {want} with {value}");
        }
    }
    let values: Vec<T> = want.iter().enumerate().map(|(i, &column)| x[i / k * cols + column]).collect();
    kit::assert_bits(&got.values, &values);
}

/// Rows that selections trip over.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Data {
    /// Distinct values, as far as the type has them, in any order.
    Shuffled,
    Ascending,
    Descending,
    /// Eight values.
    Levels,
    Equal,
    MinusInfinity,
    /// NaNs of any payload, infinities, zeros of both signs, subnormals, some numbers.
    Special,
    /// Mostly zeros of both signs.
    Zeros,
    /// Any bits.
    Any,
    Normal,
}

const DATA: [Data; 10] = [
    Data::Shuffled,
    Data::Ascending,
    Data::Descending,
    Data::Levels,
    Data::Equal,
    Data::MinusInfinity,
    Data::Special,
    Data::Zeros,
    Data::Any,
    Data::Normal,
];

fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn row<T: Float>(data: Data, cols: usize, seed: u64) -> Vec<T> {
    let mut next = random(seed);
    let any = |bits: u64| bytemuck::pod_read_unaligned::<T>(&bits.to_le_bytes()[..size_of::<T>()]);
    let mut row: Vec<T> = match data {
        Data::Ascending | Data::Descending | Data::Shuffled => {
            (0..cols).map(|i| T::from_f64((i as f64 - cols as f64 / 2.0) / 64.0)).collect()
        }
        Data::Levels => (0..cols).map(|_| T::from_f64((next() % 8) as f64 - 4.0)).collect(),
        Data::Equal => vec![T::from_f64(-1.5); cols],
        Data::MinusInfinity => vec![T::from_f64(f64::NEG_INFINITY); cols],
        Data::Special => {
            let values = kit::special_values::<T>();
            let nans = [any(u64::MAX), any(0x7fff_ffff_7fff_7fff), any(0xffc0_ffc1_ffc1_ffc1)];
            let pick = |n: u64| [&values[..], &nans].concat()[n as usize % (values.len() + nans.len())];
            (0..cols).map(|_| pick(next())).collect()
        }
        Data::Zeros => Fill::Zeros.elements(cols, seed),
        Data::Any => (0..cols).map(|_| any(next())).collect(),
        Data::Normal => Fill::Normal.elements(cols, seed),
    };
    match data {
        Data::Descending => row.reverse(),
        Data::Shuffled => (1..cols).for_each(|i| row.swap(i, (next() % (i as u64 + 1)) as usize)),
        _ => {}
    }
    row
}

fn rows<T: Float>(data: Data, rows: usize, cols: usize, seed: u64) -> Vec<T> {
    (0..rows as u64).flat_map(|r| row::<T>(data, cols, seed ^ (r << 40))).collect()
}

/// Columns of the specification that are no larger than a test likes, the borders of every kernel, and one past them.
const COLS: [usize; 30] = [
    1, 2, 3, 8, 16, 32, 64, 65, 72, 100, 127, 128, 136, 250, 256, 257, 264, 512, 513, 520, 1000, 1024, 1025,
    1032, 2048, 2049, 2056, 4096, 4097, 4104,
];
const KS: [usize; 19] = [1, 2, 4, 7, 8, 9, 10, 16, 31, 32, 33, 50, 63, 64, 65, 100, 256, 1024, 2048];

#[derive(Debug, Clone, Copy)]
struct Size {
    rows: usize,
    cols: usize,
    k: usize,
}

/// Sizes of every kernel; rows are fewer where they are long.
fn size(widest: usize) -> impl Strategy<Value = Size> {
    let cols = prop_oneof![
        3 => prop::sample::select(&COLS[..]).prop_map(move |n| n.min(widest)),
        1 => kit::size(1..=widest, &[4096, 16384]),
    ];
    let k = prop_oneof![4 => prop::sample::select(&KS[..]), 1 => kit::size(1..=widest, &[])];
    (1usize..=40, cols, k).prop_map(|(rows, cols, k)| Size {
        rows: rows.min(8192 / cols).max(1),
        cols,
        k: k.min(cols),
    })
}

fn data() -> impl Strategy<Value = Data> {
    prop::sample::select(&DATA[..])
}

fn options() -> impl Strategy<Value = TopkOptions> {
    any::<bool>().prop_map(|largest| TopkOptions { largest })
}

fn matches<T: Float>(
    size: Size,
    data: Data,
    seed: u64,
    options: TopkOptions,
    places: [usize; 3],
    wide: bool,
) {
    let Size { rows: n, cols, k } = size;
    let x = rows::<T>(data, n, cols, seed);
    let [pad, shift, out] = places;
    for gpu in kit::devices() {
        let tensor = gpu.upload(&x, Place::rows([n, cols], cols + pad).shifted(shift));
        let values = Place::rows([n, k], k + out).shifted(out);
        let indices = Place::rows([n, k], k + 2 * out).shifted(shift);
        let got = if wide {
            run_at::<T, i64>(&gpu, &tensor, values, indices, options)
        } else {
            run_at::<T, i32>(&gpu, &tensor, values, indices, options)
        };
        let what = format!("{size:?} of {} {data:?}, {options:?} on {}", T::DTYPE, gpu.spec());
        assert_exact(&got, &x, cols, k, options, &what);
    }
}

/// Row padding, shift of x, gaps of the results: aligned as often as not.
fn places() -> impl Strategy<Value = [usize; 3]> {
    prop_oneof![
        Just([0, 0, 0]),
        (0usize..=2, 0usize..=2).prop_map(|(more, out)| [16 * more, 0, out]),
        [0usize..=9, 0usize..=9, 0usize..=3]
    ]
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_is_exact(size in size(20_000), data in data(), seed: u64, o in options(), places in places(), wide: bool) {
        matches::<bf16>(size, data, seed, o, places, wide);
    }

    #[test]
    fn f16_is_exact(size in size(20_000), data in data(), seed: u64, o in options(), places in places(), wide: bool) {
        matches::<f16>(size, data, seed, o, places, wide);
    }

    #[test]
    fn f32_is_exact(size in size(20_000), data in data(), seed: u64, o in options(), places in places(), wide: bool) {
        matches::<f32>(size, data, seed, o, places, wide);
    }
}

/// Every kernel meets every kind of data.
fn every_kernel_meets_every_data<T: Float>() {
    let sizes = [
        (5, 61, 7),
        (9, 128, 8),
        (5, 256, 5),
        (3, 256, 40),
        (3, 505, 20),
        (2, 1024, 32),
        (2, 1000, 64),
        (1, 4000, 64),
        (1, 9000, 33),
        (1, 16_400, 64),
        (1, 3000, 700),
    ];
    for (n, cols, k) in sizes {
        for (i, data) in DATA.into_iter().enumerate() {
            let size = Size { rows: n, cols, k };
            matches::<T>(size, data, i as u64, if i % 2 == 0 { LARGEST } else { SMALLEST }, [0; 3], false);
        }
        matches::<T>(Size { rows: n, cols, k }, Data::Special, 7, SMALLEST, [0; 3], false);
        matches::<T>(Size { rows: n, cols, k }, Data::Equal, 8, SMALLEST, [0; 3], false);
    }
}

#[test]
fn every_kernel_meets_every_data_bf16() {
    every_kernel_meets_every_data::<bf16>();
}

#[test]
fn every_kernel_meets_every_data_f16() {
    every_kernel_meets_every_data::<f16>();
}

#[test]
fn every_kernel_meets_every_data_f32() {
    every_kernel_meets_every_data::<f32>();
}
