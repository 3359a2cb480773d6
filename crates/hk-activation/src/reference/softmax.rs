//! Softmax.

/// `exp(x - max) / sum(exp(x - max))` for each row.
///
/// # Panics
/// If `cols` is zero or `x` is not whole rows.
pub fn softmax(x: &[f64], cols: usize) -> Vec<f64> {
    assert!(cols > 0 && x.len().is_multiple_of(cols), "x is whole rows of {cols} columns");
    let rows = x.chunks_exact(cols).flat_map(|row| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
        row.iter().map(move |v| (v - max).exp() / sum)
    });
    rows.collect()
}
