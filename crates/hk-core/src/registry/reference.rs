//! Inner loops of several families' f64 references: tests build this crate with optimisation, and the families without.

use std::cmp::Ordering;

/// `sum_k x[k] y[k]`, and `sum_k |x[k] y[k]|`: the magnitude of which [`Tolerance::Sum`](super::Tolerance::Sum) allows a part.
pub fn dot(x: &[f64], y: &[f64]) -> (f64, f64) {
    // As many sums as fill a vector register.
    const LANES: usize = 8;
    let (mut sums, mut magnitudes) = ([0.0; LANES], [0.0; LANES]);
    for (x, y) in x.chunks(LANES).zip(y.chunks(LANES)) {
        for (i, (x, y)) in x.iter().zip(y).enumerate() {
            sums[i] += x * y;
            magnitudes[i] += (x * y).abs();
        }
    }
    (sums.iter().sum(), magnitudes.iter().sum())
}

/// `sums[j] += x row[j]`, and `magnitudes[j] += |x row[j]|`.
pub fn axpy(x: f64, row: &[f64], sums: &mut [f64], magnitudes: &mut [f64]) {
    for ((y, sum), magnitude) in row.iter().zip(sums).zip(magnitudes) {
        *sum += x * y;
        *magnitude += (x * y).abs();
    }
}

/// The columns of a row by their elements: the largest first, or the smallest if not `largest`; equal elements by column.
///
/// Zeros of both signs are equal, NaNs too: above infinity if `largest`, else last.
pub fn ranked(row: &[f64], largest: bool) -> Vec<usize> {
    let before = |a: f64, b: f64| match (a.is_nan(), b.is_nan()) {
        (true, true) => Ordering::Equal,
        (a_is_nan, b_is_nan) if a_is_nan != b_is_nan && a_is_nan == largest => Ordering::Less,
        (a_is_nan, b_is_nan) if a_is_nan != b_is_nan => Ordering::Greater,
        // -0 == 0
        _ if largest => b.partial_cmp(&a).unwrap_or(Ordering::Equal),
        _ => a.partial_cmp(&b).unwrap_or(Ordering::Equal),
    };
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| before(row[a], row[b]));
    order
}
