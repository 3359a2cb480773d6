//! The GEMM of the README, `tests/hip/gemm.hip`, against f64.

use super::{Random, streams};
use crate::common;
use bytemuck::{Pod, Zeroable};
use hk_core::{CodeObjects, GlobalLayout, KernelRef, LaunchConfig, Layout, Stream, bf16};
use std::sync::LazyLock;

static GEMM: LazyLock<&'static CodeObjects> = LazyLock::new(|| common::compile("gemm"));

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    x: GlobalLayout,
    w: GlobalLayout,
    y: GlobalLayout,
}

/// A matrix whose rows are `stride` apart, between `before` elements and as many that belong to nobody.
struct Matrix {
    data: Vec<bf16>,
    rows: usize,
    cols: usize,
    stride: usize,
}

const GUARD: usize = 64;

impl Matrix {
    fn new(rows: usize, cols: usize, padding: usize, mut value: impl FnMut() -> f32) -> Matrix {
        let stride = cols + padding;
        let data = (0..rows * stride + 2 * GUARD).map(|_| bf16::from_f32(value())).collect();
        Matrix { data, rows, cols, stride }
    }

    fn layout(&self) -> Layout {
        Layout::with_strides([self.rows, self.cols], [self.stride, 1]).unwrap()
    }

    fn row(&self, row: usize) -> impl Iterator<Item = f64> {
        self.data[GUARD + row * self.stride..][..self.cols].iter().map(|v| v.to_f64())
    }
}

fn gemm(stream: &Stream, x: &Matrix, w: &Matrix, y: &mut Matrix) {
    let [x_buffer, w_buffer] = [x, w].map(|t| stream.upload(&t.data).unwrap());
    let mut y_buffer = stream.upload(&y.data).unwrap();
    let kernel = stream.kernel(KernelRef::new(*GEMM, "gemm_bf16")).unwrap();
    let mut launch = stream.launch("gemm");
    let params = Params {
        x: launch.input("x", &x_buffer.view_with(x.layout(), GUARD).unwrap()).unwrap(),
        w: launch.input("w", &w_buffer.view_with(w.layout(), GUARD).unwrap()).unwrap(),
        y: launch.output("y", &mut y_buffer.view_mut_with(y.layout(), GUARD).unwrap()).unwrap(),
    };
    let tiles = y.rows.div_ceil(128) * y.cols.div_ceil(128);
    // SAFETY: the parameters are the kernel's; rows are on 16 bytes, and there is a block for each tile.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(tiles), &params) }.unwrap();
    y.data = stream.download(&y_buffer).unwrap();
}

#[test]
fn gemm_matches_f64() {
    for stream in streams() {
        for (m, n, k, padding, whole) in
            [(1, 8, 8, 0, true), (129, 136, 200, 8, false), (64, 264, 96, 0, true), (200, 128, 32, 24, false)]
        {
            let mut random = Random(7);
            let mut value = || if whole { random.below(9) as f32 - 4.0 } else { random.unit() as f32 - 0.5 };
            let (x, w) = (Matrix::new(m, k, padding, &mut value), Matrix::new(n, k, 0, &mut value));
            let mut y = Matrix::new(m, n, padding, || -77.0);
            gemm(&stream, &x, &w, &mut y);
            for row in 0..m {
                for (col, got) in y.row(row).enumerate() {
                    let products = x.row(row).zip(w.row(col)).map(|(x, w)| x * w);
                    let (want, magnitude) = products.fold((0.0, 0.0), |s, p| (s.0 + p, s.1 + p.abs()));
                    // At most half a unit in the last place of bf16, and the sums' f32.
                    let bound =
                        want.abs() * 2f64.powi(-8) + if whole { 0.0 } else { magnitude * 2f64.powi(-18) };
                    assert!(
                        (got - want).abs() <= bound,
                        "y[{row}, {col}] of {m} x {n} x {k}: {got}, not {want}"
                    );
                }
            }
            // What is not of y is as it was.
            let of_y = |i: usize| i >= GUARD && (i - GUARD) / y.stride < m && (i - GUARD) % y.stride < n;
            let touched = (0..y.data.len()).filter(|&i| !of_y(i)).find(|&i| y.data[i].to_f32() != -77.0);
            assert_eq!(touched, None, "{m} x {n} x {k}");
        }
    }
}

#[test]
fn the_document_has_the_kernel() {
    let document = include_str!("../../../../docs/device-library.md");
    assert!(document.contains(concat!("```cpp\n", include_str!("../hip/gemm.hip"), "```\n")));
}
