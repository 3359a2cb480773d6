//! `softmax` on the emulated GPUs (and real ones where there are some) against its f64 reference and its laws.

use hk_activation::{ActivationOutput, reference, softmax_workspace};
use hk_core::{DType, Float, bf16, f16};
use hk_testkit::{
    self as kit, Array, Fill, Gpu, Place, Refusals, RowCase, Tensor, Tolerance, assert_error, kind,
    proptest::prelude::*, widen,
};
use std::collections::HashMap;

/// Runs `softmax` with `y` in the given place, and checks that nothing else is touched.
#[track_caller]
fn softmax<T: Float, Y: ActivationOutput<T>>(gpu: &Gpu, x: &Tensor<T>, y: impl Into<Place>) -> Array<Y> {
    let mut y = gpu.poisoned::<Y>(y);
    let rows = x.layout().rows("test", "x").unwrap();
    let needed = softmax_workspace(gpu.stream().device().info(), rows.rows, rows.cols);
    let mut workspace = (needed > 0).then(|| gpu.poisoned::<f32>([needed]));
    let scratch = workspace.as_mut().map(|w| w.view_mut());
    hk_activation::softmax(gpu.stream(), x.view(), y.view_mut(), scratch).unwrap();
    gpu.assert_guards(&y);
    gpu.assert_untouched(x);
    if let Some(workspace) = &workspace {
        gpu.assert_guards(workspace);
    }
    gpu.download(&y)
}

/// Runs `softmax` on contiguous rows.
#[track_caller]
fn dense<T: Float>(gpu: &Gpu, x: &[T], cols: usize) -> Array<T> {
    softmax(gpu, &gpu.upload(x, [x.len() / cols, cols]), [x.len() / cols, cols])
}

/// Elementwise for bf16 and f16; of f32, 1e-5 relatively and 1e-7.
fn tolerance(dtype: DType) -> Tolerance {
    if dtype == DType::F32 { Tolerance::Within { rtol: 1e-5, atol: 1e-7 } } else { Tolerance::Elementwise }
}

fn check<T: Float, Y: ActivationOutput<T>>(c: &RowCase<T>) {
    let want = reference::softmax(&widen(&c.x), c.cols);
    for gpu in kit::devices() {
        let y = softmax::<T, Y>(&gpu, &gpu.upload(&c.x, c.place(0)), c.place(1));
        kit::assert_close(&y, &want, tolerance(Y::DTYPE));
        if Y::DTYPE != DType::F32 {
            let (same, of) = rounded(&y, &want);
            assert!(same + 1 + of / 100 >= of, "{same} of {of} are rounded right: {c:?} on {}", gpu.spec());
        }
    }
}

/// How many results are the reference rounded once, and of how many that are not close to the least there are. Elements with
/// the same reference are one result: a row may be of equal values.
fn rounded<T: Float>(got: &[T], want: &[f64]) -> (usize, usize) {
    let pairs = got.iter().zip(want).filter(|(_, want)| **want >= 1e-30);
    let results: HashMap<_, _> = pairs.map(|(got, want)| (want.to_bits(), got.to_f64())).collect();
    let right = |(&want, &got): (&u64, &f64)| got == T::from_f64(f64::from_bits(want)).to_f64();
    (results.iter().filter(|&result| right(result)).count(), results.len())
}

/// Rows of normal values, with tight bounds.
fn case<T: Float>(rows: usize, cols: usize, seed: u64) -> RowCase<T> {
    RowCase::new(rows, cols, Fill::Normal, seed, [(cols, 0); 4])
}

proptest! {
    #![proptest_config(kit::config())]

    #[test]
    fn bf16_matches_reference(c in kit::row_case::<bf16>(1..=80, 1..=40_000), f32_out: bool) {
        if f32_out { check::<bf16, f32>(&c) } else { check::<bf16, bf16>(&c) }
    }

    #[test]
    fn f16_matches_reference(c in kit::row_case::<f16>(1..=80, 1..=40_000), f32_out: bool) {
        if f32_out { check::<f16, f32>(&c) } else { check::<f16, f16>(&c) }
    }

    #[test]
    fn f32_matches_reference(c in kit::row_case::<f32>(1..=80, 1..=40_000)) {
        check::<f32, f32>(&c);
    }

    /// Batch-invariant: a row is bitwise identical whatever the other rows and the strides are.
    #[test]
    fn a_row_does_not_depend_on_its_surroundings(
        c in kit::row_case::<f32>(2..=40, 1..=40_000),
        pick in any::<prop::sample::Index>(),
    ) {
        let row = pick.index(c.rows);
        let x = &c.x[row * c.cols..][..c.cols];
        let mut moved = c.matrix(1);
        let place = c.rows - 1 - row;
        moved[place * c.cols..][..c.cols].copy_from_slice(x);
        for gpu in kit::devices() {
            let all = softmax::<f32, f32>(&gpu, &gpu.upload(&c.x, c.place(0)), c.place(1));
            let alone = dense(&gpu, x, c.cols);
            let among = dense(&gpu, &moved, c.cols);
            kit::assert_bits(&alone, all.row(row));
            kit::assert_bits(&alone, among.row(place));
        }
    }

    /// The sum of a row is 1, no element is below 0 or above 1, and larger elements do not get less.
    #[test]
    fn rows_are_distributions(c in kit::row_case::<f32>(1..=20, 1..=40_000)) {
        for gpu in kit::devices() {
            let y = dense(&gpu, &c.x, c.cols);
            for (x, y) in c.x.chunks(c.cols).zip(y.chunks(c.cols)) {
                let sum: f64 = widen(y).iter().sum();
                prop_assert!((sum - 1.0).abs() <= 1e-5, "{sum}");
                prop_assert!(y.iter().all(|v| (0.0..=1.0).contains(v)));
                let mut order: Vec<usize> = (0..c.cols).collect();
                order.sort_by(|&a, &b| x[a].total_cmp(&x[b]));
                for pair in order.windows(2) {
                    let (a, b) = (pair[0], pair[1]);
                    prop_assert!(y[a] <= y[b], "{} gives {}, {} gives {}", x[a], y[a], x[b], y[b]);
                    prop_assert!(x[a] != x[b] || y[a].to_bits() == y[b].to_bits());
                }
            }
        }
    }

    /// Adding a constant exactly leaves the result bitwise identical.
    #[test]
    fn shifts_cancel((rows, cols) in (1usize..=5, 1usize..=3000), seed: u64, shift in -64i32..=64) {
        let c: RowCase<f32> = RowCase::new(rows, cols, Fill::Grid, seed, [(cols, 0); 4]);
        let shifted: Vec<f32> = c.x.iter().map(|v| v + 8.0 * shift as f32).collect();
        for gpu in kit::devices() {
            kit::assert_bits(&dense(&gpu, &shifted, cols), &dense(&gpu, &c.x, cols));
        }
    }
}

/// Columns of the specification, the borders of every kernel, and one past them; its largest rows at full sizes.
#[test]
fn sizes_of_the_specification_match() {
    let rows_and_cols = [
        (1, 1),
        (128, 1),
        (359, 1),
        (1, 359),
        (9, 781),
        (33, 127),
        (65, 128),
        (33, 130),
        (0, 8),
        (7, 1024),
        (7, 4096),
        (5, 120),
        (3, 512),
        (3, 513),
        (3, 520),
        (2, 1032),
        (2, 2048),
        (2, 2056),
        (2, 4104),
        (1, 8192),
        (3, 8193),
        (1, 8200),
        (1, 16_384),
        (1, 16_392),
        (1, 32_768),
        (1, 32_767),
        (1, 32_769),
        (1, 32_776),
        (1, 89_999),
    ];
    let full = [
        (1823, 781),
        (4096, 127),
        (4096, 128),
        (4096, 8192),
        (8192, 8192),
        (1, 131_072),
        (4, 128_256),
        (4, 151_936),
        (4, 201_088),
        (65_536, 128),
    ];
    for &(rows, cols) in rows_and_cols.iter().chain(if kit::full() { &full[..] } else { &[] }) {
        check::<bf16, bf16>(&case(rows, cols, 1));
        if rows * cols > 1 << 21 {
            continue;
        }
        check::<f16, f32>(&case(rows, cols, 2));
        check::<f32, f32>(&case(rows, cols, 3));
    }
}

/// In-place results are bitwise identical.
#[test]
fn results_may_lie_on_the_input() {
    fn run<T: Float>(rows: usize, cols: usize) {
        let c: RowCase<T> = case(rows, cols, 4);
        for gpu in kit::devices() {
            let want = dense(&gpu, &c.x, cols);
            let mut x = gpu.upload(&c.x, Place::rows([rows, cols], cols + 3));
            let mut workspace =
                gpu.poisoned::<f32>([softmax_workspace(gpu.stream().device().info(), rows, cols)]);
            let y = x.view_mut();
            hk_activation::softmax(gpu.stream(), y.alias(), y, Some(workspace.view_mut())).unwrap();
            kit::assert_bits(&gpu.download(&x), &want);
            gpu.assert_guards(&x);
        }
    }
    for (rows, cols) in [(9, 100), (3, 1000), (2, 5000), (2, 40_001)] {
        run::<bf16>(rows, cols);
        run::<f32>(rows, cols);
    }
}

/// Row lengths of every kernel, vectorized and scalar.
const KERNEL_COLS: [usize; 12] = [3, 128, 130, 512, 1024, 2048, 4000, 4001, 8192, 16_001, 32_000, 40_960];

#[test]
fn nan_and_infinity_stay_in_their_rows() {
    fn run<T: Float>(cols: usize) {
        let c: RowCase<T> = case(9, cols, 5);
        let mut x = c.x.clone();
        let mut put = |row: usize, at: usize, v: f32| x[row * cols + at % cols] = T::from_f32(v);
        put(1, cols / 2, f32::NAN);
        put(3, cols - 1, f32::INFINITY);
        put(5, 0, f32::NEG_INFINITY);
        put(5, cols - 1, f32::NEG_INFINITY);
        (0..cols).for_each(|i| put(7, i, f32::NEG_INFINITY));
        put(8, 0, f32::INFINITY);
        put(8, 1, f32::NAN);
        let want = reference::softmax(&widen(&x), cols);
        for gpu in kit::devices() {
            let clean = dense(&gpu, &c.x, cols);
            let y = dense(&gpu, &x, cols);
            for row in 0..9 {
                let got = widen(y.row(row));
                match row {
                    1 | 3 | 7 | 8 => assert!(got.iter().all(|v| v.is_nan()), "row {row} of {cols}"),
                    5 => {
                        assert!(got[0] == 0.0 && got[cols - 1] == 0.0);
                        let label = format!("a row with negative infinities, {cols} columns");
                        let y = Array::new(label, [1, cols], y.row(row).to_vec());
                        kit::assert_close(&y, &want[row * cols..][..cols], tolerance(T::DTYPE));
                    }
                    _ => kit::assert_bits(&Array::new("clean", [cols], y.row(row).to_vec()), clean.row(row)),
                }
            }
        }
    }
    for cols in KERNEL_COLS {
        run::<bf16>(cols);
        run::<f32>(cols);
    }
}

/// Whole lanes, waves and segments of negative infinity before and after the numbers, as causal masks make them.
#[test]
fn masked_rows_match() {
    for cols in KERNEL_COLS {
        let mut x = case::<f32>(4, cols, 6).x;
        for (row, (first, last)) in
            [(0, 1), (cols / 2, cols), (cols - 1, cols), (cols / 3, cols / 2 + 1)].iter().enumerate()
        {
            for (i, v) in x[row * cols..][..cols].iter_mut().enumerate() {
                if !(*first..*last).contains(&i) {
                    *v = f32::NEG_INFINITY;
                }
            }
        }
        let want = reference::softmax(&widen(&x), cols);
        for gpu in kit::devices() {
            let y = dense(&gpu, &x, cols);
            kit::assert_close(&y, &want, tolerance(DType::F32));
            assert!(y.iter().zip(&x).all(|(y, x)| x.is_finite() || *y == 0.0), "{cols} columns");
            assert_eq!(y[0], 1.0);
        }
    }
}

#[test]
fn the_ends_of_the_range() {
    for gpu in kit::devices() {
        // One column is 1, equal ones share.
        assert_eq!(*dense(&gpu, &[-3.5f32, 1e38, -1e38], 1), [1.0; 3]);
        assert_eq!(*dense(&gpu, &[7.0f32; 64], 64), [1.0 / 64.0; 64]);
        // Differences beyond the range of f32.
        assert_eq!(*dense(&gpu, &[f32::MAX, f32::MIN, f32::MAX], 3), [0.5, 0.0, 0.5]);
        assert_eq!(*dense(&gpu, &[f32::MIN, f32::NEG_INFINITY], 2), [1.0, 0.0]);
        // Large offsets cost no accuracy.
        let got = dense(&gpu, &[4096.0f32, 4095.0, 4094.5], 3);
        let want = reference::softmax(&[0.0, -1.0, -1.5], 3);
        kit::assert_close(&got, &want, tolerance(DType::F32));
    }
}

#[test]
fn leading_axes_collapse_and_rows_repeat() {
    let c: RowCase<f16> = case(6, 40, 7);
    for gpu in kit::devices() {
        let want = dense(&gpu, &c.x, 40);
        let tensor = gpu.upload(&c.x, Place::rows([2, 3, 40], 48));
        let y: Array<f16> = softmax(&gpu, &tensor, Place::rows([2, 3, 40], 41));
        assert_eq!(y.data, want.data);
        let row: Array<f16> = softmax(&gpu, &gpu.upload(&c.x[..40], [40]), [40]);
        assert_eq!(row.data, want.data[..40]);

        let one = gpu.upload(&c.x[..40], [1, 40]);
        let mut y = gpu.poisoned::<f16>([5, 40]);
        let repeated = one.view().broadcast([5, 40]).unwrap();
        hk_activation::softmax(gpu.stream(), repeated, y.view_mut(), None).unwrap();
        assert_eq!(gpu.download(&y).data, want.data[..40].repeat(5));
    }
}

#[test]
fn nothing_is_launched_for_no_rows() {
    for gpu in kit::devices() {
        for shape in [vec![0, 8], vec![3, 0, 8], vec![0, 50_000]] {
            let x = gpu.upload(&[], Place::contiguous(&shape));
            gpu.assert_nothing_launched(|| {
                softmax::<bf16, f32>(&gpu, &x, Place::contiguous(&shape));
            });
        }
    }
}

/// Counted: every 128-byte line is accessed once, coalesced; lines of long rows are read twice.
#[test]
fn counted_facts_follow_from_the_shape() {
    for (rows, cols, waves, reads) in [
        (640, 128, 40, 1),
        (16, 512, 4, 1),
        (3, 1024, 3, 1),
        (2, 4096, 2, 1),
        (1, 8192, 4, 1),
        (2, 32_768, 16, 1),
        (1, 40_960, 80, 2),
    ] {
        let c: RowCase<bf16> = case(rows, cols, 8);
        for arch in ["gfx942", "gfx950"] {
            let gpu = Gpu::open(&format!("emu:{arch}?details=true"));
            gpu.stream().take_counters().unwrap();
            dense(&gpu, &c.x, cols);
            let counters = gpu.stream().take_counters().unwrap().unwrap();
            let details = counters.details.unwrap();
            let what = format!("{rows} rows of {cols} on {arch}");
            let bytes = (2 * rows * cols) as u64;
            println!(
                "{what}: {} waves, {} vector instructions a 128-byte line of y",
                counters.waves,
                counters.valu as f64 / (bytes / 128) as f64
            );
            assert_eq!(counters.waves, waves, "{what}");
            let parts = if reads == 1 { 0 } else { 8 * rows as u64 * cols.div_ceil(4096) as u64 };
            assert_eq!(
                details.distinct_read_bytes,
                if reads == 1 { bytes } else { 2 * bytes + parts },
                "{what}"
            );
            assert_eq!(details.distinct_written_bytes, bytes + parts, "{what}");
            assert_eq!((details.lds_conflict_clocks, details.scratch_bytes), (0, 0), "{what}");
        }
    }
}

/// Calls on this shape. With a workspace of so many elements.
fn refusals<'f>(shape: [usize; 2], workspace: Option<usize>) -> Refusals<'f, ()> {
    let table = Refusals::new((), |stream, tensors, ()| {
        let (x, y) = (tensors.input::<bf16>("x"), tensors.output::<bf16>("y"));
        hk_activation::softmax(stream, x, y, tensors.optional_output::<f32>("workspace"))
    });
    let table = table.input::<bf16>("x", shape).output::<bf16>("y", shape);
    match workspace {
        Some(n) => table.output::<f32>("workspace", [n]),
        None => table,
    }
}

#[test]
fn errors() {
    refusals([3, 4], None)
        .accepts(|_| {})
        .accepts(|call| call.overlap("x", "y", 0))
        .refuses(kind!(Shape), &["softmax: y: shape [2, 4], expected [3, 4] (shape of x)"], |call| {
            call.shape("y", [2, 4])
        })
        .refuses(kind!(Shape), &["softmax: x"], |call| call.shape("x", []))
        .refuses(kind!(Empty), &["softmax: x", "[3, 0]"], |call| {
            call.shape("x", [3, 0]);
            call.shape("y", [3, 0]);
        })
        .refuses(kind!(Stride), &["softmax: x"], |call| call.strides("x", [1, 3]))
        .refuses(kind!(Stride), &["softmax: y"], |call| call.strides("y", [8, 2]))
        .refuses(kind!(TooLarge), &["softmax: x: 536870912 columns", "536870911"], |call| {
            call.shape("x", [0, 1 << 29])
        })
        .refuses(kind!(DeviceMismatch), &["x", "emu:gfx942", "emu:gfx950"], |call| call.elsewhere("x"))
        .refuses_other_devices()
        .refuses_overlaps();
    // Rows beyond 32768 columns need a workspace.
    refusals([1, 40_000], Some(20))
        .accepts(|_| {})
        .refuses(
            kind!(Shape),
            &["softmax: workspace: shape [0], expected [20] or longer (softmax_workspace)"],
            |call| call.without("workspace"),
        )
        .refuses(kind!(Shape), &["softmax: workspace: shape [19]"], |call| call.shape("workspace", [19]))
        .refuses(kind!(Shape), &["softmax: workspace"], |call| call.shape("workspace", [5, 5]))
        .refuses(kind!(Stride), &["softmax: workspace"], |call| call.strides("workspace", [2]))
        .refuses(kind!(Align), &["softmax: workspace", "8 bytes"], |call| {
            call.place("workspace", Place::contiguous([20]).shifted(1))
        })
        .refuses_other_devices();
}

/// The workspace may not be read as the input: it would change below it.
#[test]
fn a_workspace_over_the_input_is_refused() {
    let gpu = &kit::devices()[0];
    let mut shared = gpu.upload(&vec![1.0f32; 40_000], [40_000]);
    let mut y = gpu.poisoned::<f32>([40_000]);
    let scratch = shared.view_mut();
    let result = hk_activation::softmax(gpu.stream(), scratch.alias(), y.view_mut(), Some(scratch));
    assert_error(result, kind!(Overlap), &["x and workspace"]);
    gpu.assert_untouched(&shared);
    gpu.assert_untouched(&y);
}
