//! `topk` on the emulated GPUs (and real ones where there are some) against a stable sort, and its laws. Every result is
//! exact.

use hk_activation::{TopkIndex, TopkOrder, TopkOutputs, reference, topk_workspace};
use hk_core::{Float, bf16, f16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Refusals, Tensor, kind, proptest::prelude::*,
    proptest::sample::select, widen,
};

const LARGEST: TopkOrder = TopkOrder::Largest;
const SMALLEST: TopkOrder = TopkOrder::Smallest;

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
    order: TopkOrder,
) -> Output<T> {
    let mut values = gpu.poisoned::<T>(values);
    let mut indices = gpu.poisoned::<I>(indices);
    let (rows, cols) = (x.layout().rows("test", "x").unwrap(), *x.layout().shape().last().unwrap());
    let needed = topk_workspace(
        gpu.stream().device().info(),
        rows.rows,
        cols,
        *values.layout().shape().last().unwrap(),
    );
    let mut workspace = (needed > 0).then(|| gpu.poisoned::<i64>([needed]));
    let scratch = workspace.as_mut().map(|w| w.view_mut());
    let outputs = TopkOutputs { values: values.view_mut(), indices: indices.view_mut() };
    hk_activation::topk(gpu.stream(), x.view(), outputs, scratch, order).unwrap();
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
fn run<T: Float>(gpu: &Gpu, x: &[T], cols: usize, k: usize, order: TopkOrder) -> Output<T> {
    let rows = x.len() / cols;
    run_at::<T, i32>(gpu, &gpu.upload(x, [rows, cols]), [rows, k], [rows, k], order)
}

/// The values are bitwise those of the elements that the reference picks.
#[track_caller]
fn assert_exact<T: Float>(got: &Output<T>, x: &[T], cols: usize, k: usize, order: TopkOrder, what: &str) {
    let want = reference::topk(&widen(x), cols, k, order == LARGEST).indices;
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

/// Hard rows for a selection.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Data {
    /// Distinct values, as far as the type has them, in any order.
    Shuffled,
    Ascending,
    Descending,
    /// Eight values.
    Levels,
    /// Rising and falling in runs of up to 700 equals.
    Runs,
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

const DATA: [Data; 11] = [
    Data::Shuffled,
    Data::Ascending,
    Data::Descending,
    Data::Levels,
    Data::Runs,
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
        Data::Runs => {
            let mut row = Vec::with_capacity(cols);
            while row.len() < cols {
                let step = row.len() as f64 / 512.0 * if seed.is_multiple_of(2) { 1.0 } else { -1.0 };
                let value = T::from_f64(step.round() + (next() % 2) as f64);
                row.resize((row.len() + 1 + (next() % 700) as usize).min(cols), value);
            }
            row
        }
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

/// Columns of the specification of a size fit for a test, the borders of every kernel, and one past them.
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

fn orders() -> impl Strategy<Value = TopkOrder> {
    select(&[LARGEST, SMALLEST][..])
}

fn matches<T: Float>(size: Size, data: Data, seed: u64, order: TopkOrder, places: [usize; 3], wide: bool) {
    matches_on::<T>(&kit::devices(), size, data, seed, order, places, wide);
}

fn matches_on<T: Float>(
    gpus: &[Gpu],
    size: Size,
    data: Data,
    seed: u64,
    order: TopkOrder,
    places: [usize; 3],
    wide: bool,
) {
    let Size { rows: n, cols, k } = size;
    let x = rows::<T>(data, n, cols, seed);
    let [pad, shift, out] = places;
    for gpu in gpus {
        let tensor = gpu.upload(&x, Place::rows([n, cols], cols + pad).shifted(shift));
        let values = Place::rows([n, k], k + out).shifted(out);
        let indices = Place::rows([n, k], k + 2 * out).shifted(shift);
        let got = if wide {
            run_at::<T, i64>(gpu, &tensor, values, indices, order)
        } else {
            run_at::<T, i32>(gpu, &tensor, values, indices, order)
        };
        let what = format!("{size:?} of {} {data:?}, {order:?} on {}", T::DTYPE, gpu.spec());
        assert_exact(&got, &x, cols, k, order, &what);
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
    fn bf16_is_exact(size in size(20_000), data in data(), seed: u64, o in orders(), places in places(), wide: bool) {
        matches::<bf16>(size, data, seed, o, places, wide);
    }

    #[test]
    fn f16_is_exact(size in size(20_000), data in data(), seed: u64, o in orders(), places in places(), wide: bool) {
        matches::<f16>(size, data, seed, o, places, wide);
    }

    #[test]
    fn f32_is_exact(size in size(20_000), data in data(), seed: u64, o in orders(), places in places(), wide: bool) {
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

/// On a device with few CUs, waves walk whole rows or long segments tile by tile.
fn many_rows<T: Float>() {
    let gpus = ["gfx942", "gfx950"].map(|arch| Gpu::open(&format!("emu:{arch}?cus=1")));
    for (i, data) in DATA.into_iter().enumerate() {
        for (j, k) in [1, 31, 32, 33, 64].into_iter().enumerate() {
            let size = Size { rows: 17, cols: [1025, 2048, 4999][(i + j) % 3], k };
            let order = if (i + j) % 2 == 0 { LARGEST } else { SMALLEST };
            matches_on::<T>(&gpus, size, data, i as u64, order, [0, j % 2, 0], false);
        }
    }
    for (data, k) in [(Data::Ascending, 64), (Data::Shuffled, 20), (Data::Special, 32), (Data::Normal, 50)] {
        matches_on::<T>(&gpus, Size { rows: 17, cols: 65_600, k }, data, 3, LARGEST, [0; 3], false);
    }
}

#[test]
fn many_rows_bf16() {
    many_rows::<bf16>();
}

#[test]
fn many_rows_f32() {
    many_rows::<f32>();
}

/// A wave that walks tiles fills its list in the middle of a run of equals, whose lower columns are still to come.
#[test]
fn equals_across_a_full_list_are_in_order_of_columns() {
    for cols in [17_001, 17_480, 19_999] {
        for k in [1, 5, 6, 7, 31, 32, 33, 63, 64] {
            matches::<bf16>(Size { rows: 1, cols, k }, Data::Descending, 0, SMALLEST, [0; 3], false);
            matches::<bf16>(Size { rows: 1, cols, k }, Data::Ascending, 0, LARGEST, [0; 3], false);
            matches::<f32>(Size { rows: 1, cols, k }, Data::Runs, 0, LARGEST, [0; 3], false);
            matches::<bf16>(Size { rows: 1, cols, k }, Data::Runs, 1, SMALLEST, [0; 3], false);
        }
    }
}

/// Sizes of the specification; at full sizes also its largest.
#[test]
fn sizes_of_the_specification_are_exact() {
    let full = kit::full();
    let wide: &[usize] = if full { &[8193, 32_768, 128_256, 151_936, 201_088] } else { &[8193, 17_000] };
    let cols = [1, 2, 16, 100, 127, 128, 256, 1024, 1025, 4096].iter().chain(wide);
    for (i, &cols) in cols.enumerate() {
        for (j, k) in [1, 2, 4, 8, 10, 32, 50, 64, 100, 256, 1024, 2048, cols].into_iter().enumerate() {
            if k > cols || (!full && cols > 2048 && (i + j) % 3 != 0) {
                continue;
            }
            let rows = if full && cols <= 1024 && (i + j) % 4 == 0 { [1335, 4096][j / 2 % 2] } else { 1 };
            let data = if (i + j) % 2 == 0 { Data::Shuffled } else { Data::Levels };
            matches::<f32>(Size { rows, cols, k }, data, 3, LARGEST, [0; 3], false);
            matches::<bf16>(Size { rows, cols, k }, Data::Normal, 4, LARGEST, [0; 3], false);
        }
    }
}

proptest! {
    #![proptest_config(kit::config())]

    /// Columns are distinct and in range, values are what x has there, none that is left out precedes one that is not, and
    /// one result more leaves the others as they are.
    #[test]
    fn laws(size in size(5000), data in data(), seed: u64, o in orders()) {
        let Size { rows: n, cols, k } = size;
        let x = rows::<bf16>(data, n, cols, seed);
        for gpu in kit::devices() {
            let got = run(&gpu, &x, cols, k, o);
            let more = run(&gpu, &x, cols, (k + 1).min(cols), o);
            for row in 0..n {
                let x = &x[row * cols..][..cols];
                let columns = &got.indices[row * k..][..k];
                let mut taken = vec![false; cols];
                for (place, &column) in columns.iter().enumerate() {
                    prop_assert!((0..cols as i64).contains(&column) && !taken[column as usize], "{columns:?}");
                    taken[column as usize] = true;
                    prop_assert_eq!(got.values.row(row)[place].to_bits(), x[column as usize].to_bits());
                }
                let last = x[columns[k - 1] as usize].to_f64();
                let left_out = (0..cols).filter(|&c| !taken[c]).map(|c| x[c].to_f64());
                // Of a comparison with NaN only what the order says of numbers is checked here.
                let precedes = |v: f64| if o == LARGEST { v > last } else { v < last };
                prop_assert!(left_out.into_iter().all(|v| !precedes(v)));
                let width = (k + 1).min(cols);
                prop_assert_eq!(columns, &more.indices[row * width..][..k]);
            }
        }
    }

    /// Batch-invariant: the results of a row do not depend on other rows.
    #[test]
    fn a_row_does_not_depend_on_its_surroundings(
        size in size(5000),
        data in data(),
        seed: u64,
        pick in any::<prop::sample::Index>(),
    ) {
        let Size { rows: n, cols, k } = size;
        let x = rows::<f32>(data, n, cols, seed);
        let turned: Vec<f32> = x.chunks(cols).rev().flatten().copied().collect();
        let row = pick.index(n);
        for gpu in kit::devices() {
            let all = run(&gpu, &x, cols, k, LARGEST);
            let alone = run(&gpu, &x[row * cols..][..cols], cols, k, LARGEST);
            let moved = run(&gpu, &turned, cols, k, LARGEST);
            let there = n - 1 - row;
            prop_assert_eq!(&all.indices[row * k..][..k], &alone.indices[..]);
            prop_assert_eq!(&all.indices[row * k..][..k], &moved.indices[there * k..][..k]);
            kit::assert_bits(&alone.values, all.values.row(row));
        }
    }
}

#[test]
fn leading_axes_collapse_and_rows_repeat() {
    let x = rows::<f16>(Data::Normal, 6, 40, 5);
    for gpu in kit::devices() {
        let want = run(&gpu, &x, 40, 9, LARGEST);
        let tensor = gpu.upload(&x, Place::rows([2, 3, 40], 48));
        let got = run_at::<_, i32>(&gpu, &tensor, Place::rows([2, 3, 9], 11), [2, 3, 9], LARGEST);
        assert_eq!(got.indices, want.indices);
        let row = run_at::<_, i64>(&gpu, &gpu.upload(&x[..40], [40]), [9], [9], LARGEST);
        assert_eq!(row.indices, want.indices[..9]);

        let one = gpu.upload(&x[..40], [1, 40]);
        let (mut values, mut indices) = (gpu.poisoned::<f16>([5, 9]), gpu.poisoned::<i32>([5, 9]));
        let repeated = one.view().broadcast([5, 40]).unwrap();
        let outputs = TopkOutputs { values: values.view_mut(), indices: indices.view_mut() };
        hk_activation::topk(gpu.stream(), repeated, outputs, None, LARGEST).unwrap();
        let first: Vec<i32> = want.indices[..9].iter().map(|&i| i as i32).collect();
        assert_eq!(*gpu.download(&indices), first.repeat(5));
    }
}

#[test]
fn nothing_is_launched_for_no_rows() {
    for gpu in kit::devices() {
        for shape in [vec![0, 8], vec![3, 0, 8]] {
            let x = gpu.upload::<bf16>(&[], Place::contiguous(&shape));
            let mut results = shape.clone();
            *results.last_mut().unwrap() = 3;
            let results = Place::contiguous(&results);
            gpu.assert_nothing_launched(|| {
                run_at::<_, i32>(&gpu, &x, results.clone(), results, LARGEST);
            });
        }
    }
}

#[test]
fn workspaces_are_for_long_rows_and_many_results() {
    let gpu = &kit::devices()[0];
    let info = gpu.stream().device().info();
    for (cols, k) in [(1, 1), (16_384, 64), (16_384, 1), (2048, 2048), (100, 65)] {
        assert_eq!(topk_workspace(info, 7, cols, k), 0, "{k} of {cols}");
    }
    // 32 segments leave 50 ranks each, 63 tiles 100 and then 8 groups of these 100 again.
    assert_eq!(topk_workspace(info, 2, 128_256, 50), 2 * 32 * 50);
    assert_eq!(topk_workspace(info, 2, 128_256, 100), 2 * (63 + 8) * 100);
    assert_eq!(topk_workspace(info, 1, 4000, 4000), 2 * 2048);
    assert_eq!(topk_workspace(info, usize::MAX, 128_256, 50), usize::MAX);
}

/// Counted, for one row in every wave.
fn counted<T: Float>(arch: &str, data: Data, cols: usize, k: usize) -> (u64, u64, u64) {
    let gpu = Gpu::open(&format!("emu:{arch}?details=true"));
    let x = rows::<T>(data, 64, cols, 11);
    gpu.stream().take_counters().unwrap();
    run(&gpu, &x, cols, k, LARGEST);
    let counters = gpu.stream().take_counters().unwrap().unwrap();
    let details = counters.details.unwrap();
    let read = (64 * cols * size_of::<T>()) as u64;
    assert_eq!(details.distinct_read_bytes, read, "{k} of {cols} on {arch}");
    assert_eq!(details.distinct_written_bytes, (64 * k * (size_of::<T>() + 4)) as u64);
    (counters.valu / 64, counters.instructions / 64, counters.waves)
}

/// A wave selects from a row of 1024 columns in less than 350 vector instructions, and from 1 to 64 results cost less than
/// twice as much.
#[test]
fn selection_takes_few_instructions() {
    for arch in ["gfx942", "gfx950"] {
        let mut table = Vec::new();
        for k in [1, 8, 10, 32, 33, 50, 64] {
            let (bf16, all_bf16, waves) = counted::<bf16>(arch, Data::Normal, 1024, k);
            let (f32, all_f32, _) = counted::<f32>(arch, Data::Normal, 1024, k);
            assert_eq!(waves, 64);
            table.push((k, bf16, f32));
            println!("{arch}: {k} of 1024: bf16 {bf16} of {all_bf16} instructions, f32 {f32} of {all_f32}");
        }
        let (_, bf16, f32) = table[3];
        assert!(bf16 < 350 && f32 < 350, "{arch}: {table:?}");
        for of in [|t: &(usize, u64, u64)| t.1, |t: &(usize, u64, u64)| t.2] {
            let (low, high) = (table.iter().map(of).min().unwrap(), table.iter().map(of).max().unwrap());
            assert!(high <= 2 * low, "{arch}: {table:?}");
        }
    }
}

/// Sorted rows cost more, within a bound.
#[test]
fn rows_in_order_take_bounded_instructions() {
    for data in DATA {
        let (bf16, ..) = counted::<bf16>("gfx942", data, 1024, 32);
        let (f32, ..) = counted::<f32>("gfx942", data, 1024, 32);
        println!("32 of 1024, {data:?}: bf16 {bf16} vector instructions, f32 {f32}");
        assert!(bf16 <= 640 && f32 <= 800, "{data:?}: {bf16}, {f32}");
    }
}

/// Short rows share a wave: eight of 64 columns, four of up to 256.
#[test]
fn short_rows_share_a_wave() {
    for (cols, waves) in [(32, 8), (64, 8), (128, 16), (256, 16)] {
        let (valu, _, got) = counted::<f32>("gfx942", Data::Normal, cols, 8);
        println!("8 of {cols}, f32: {valu} vector instructions a row");
        assert_eq!(got, waves, "{cols} columns");
        let (valu, _, got) = counted::<bf16>("gfx942", Data::Normal, cols, 8);
        println!("8 of {cols}, bf16: {valu} vector instructions a row");
        assert_eq!(got, waves, "{cols} columns");
    }
}

/// The `k` largest of a tensor of this shape. With a workspace of so many elements.
fn refusals<'f>([rows, cols]: [usize; 2], k: usize, workspace: Option<usize>) -> Refusals<'f, ()> {
    let table = Refusals::new((), |stream, tensors, ()| {
        let x = tensors.input::<bf16>("x");
        let (values, indices) = (tensors.output::<bf16>("values"), tensors.output::<i32>("indices"));
        let workspace = tensors.optional_output::<i64>("workspace");
        hk_activation::topk(stream, x, TopkOutputs { values, indices }, workspace, LARGEST)
    });
    let table = table
        .input::<bf16>("x", [rows, cols])
        .output::<bf16>("values", [rows, k])
        .output::<i32>("indices", [rows, k]);
    match workspace {
        Some(n) => table.output::<i64>("workspace", [n]),
        None => table,
    }
}

#[test]
fn errors() {
    for k in [0, 5] {
        let says = format!("topk: k: {k}, expected 1 to 4 (columns of x)");
        refusals([3, 4], k, None).refuses(kind!(Argument), &[&says], |_| {});
    }
    refusals([3, 4], 2, None)
        .accepts(|_| {})
        .refuses(kind!(Empty), &["topk: x", "[3, 0]"], |call| call.shape("x", [3, 0]))
        .refuses(
            kind!(Shape),
            &["topk: values: shape [2, 2], expected [3, 2] (rows of x, k of values)"],
            |call| call.shape("values", [2, 2]),
        )
        .refuses(kind!(Shape), &["topk: indices: shape [3, 3], expected [3, 2]"], |call| {
            call.shape("indices", [3, 3])
        })
        .refuses(kind!(Shape), &["indices", "[6]"], |call| call.shape("indices", [6]))
        .refuses(kind!(Shape), &["topk: x"], |call| call.shape("x", []))
        .refuses(kind!(Stride), &["topk: x"], |call| call.strides("x", [1, 3]))
        .refuses(kind!(Stride), &["topk: values"], |call| call.strides("values", [4, 2]))
        .refuses(kind!(Stride), &["topk: indices"], |call| call.strides("indices", [4, 2]))
        .refuses(kind!(Overlap), &["x and values"], |call| call.overlap("x", "values", 0))
        .refuses(kind!(TooLarge), &["topk: x: 536870912 columns", "536870911"], |call| {
            call.shape("x", [0, 1 << 29])
        })
        .refuses(kind!(DeviceMismatch), &["x", "emu:gfx942", "emu:gfx950"], |call| call.elsewhere("x"))
        .refuses_other_devices()
        .refuses_overlaps();
    // A row that is split needs a workspace.
    refusals([1, 3000], 100, Some(200))
        .accepts(|_| {})
        .refuses(
            kind!(Shape),
            &["topk: workspace: shape [0], expected [200] or longer (topk_workspace)"],
            |call| call.without("workspace"),
        )
        .refuses(kind!(Shape), &["topk: workspace: shape [199]"], |call| call.shape("workspace", [199]))
        .refuses(kind!(Shape), &["topk: workspace"], |call| call.shape("workspace", [20, 20]))
        .refuses(kind!(Stride), &["topk: workspace"], |call| call.strides("workspace", [2]))
        .refuses_other_devices();
}
