//! Products in `f64` and plain loops.

/// A product and, for each output, the sum of its terms' magnitudes, which bounds the error of a sum in `f32`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// `sum_k a[m, k] w[n, k]`, row by row.
    pub values: Vec<f64>,
    /// `sum_k |a[m, k] w[n, k]|`.
    pub magnitudes: Vec<f64>,
}

/// `a w^T` of `a` `[m, k]` and `w` `[n, k]`.
pub fn product(a: &[f64], w: &[f64], k: usize) -> Sums {
    let rows = |v: &[f64]| if k == 0 { 0 } else { v.len() / k };
    let (m, n) = (rows(a), rows(w));
    let mut sums = Sums { values: Vec::with_capacity(m * n), magnitudes: Vec::with_capacity(m * n) };
    for x in a.chunks_exact(k.max(1)) {
        for y in w.chunks_exact(k.max(1)) {
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for (x, y) in x.iter().zip(y) {
                sum += x * y;
                magnitude += (x * y).abs();
            }
            sums.values.push(sum);
            sums.magnitudes.push(magnitude);
        }
    }
    sums
}
