//! What the f64 references of several families share: tests build this crate with optimisation, and the families without.

use std::cmp::Ordering;

/// `sum_k x[k] y[k]`, and `sum_k |x[k] y[k]|`: the magnitude of which [`Tolerance::Sum`](super::Tolerance::Sum) allows a part.
pub fn dot(x: &[f64], y: &[f64]) -> (f64, f64) {
    // As many sums as fill a vector register.
    const LANES: usize = 8;
    let (mut sums, mut magnitudes) = ([0.0; LANES], [0.0; LANES]);
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x.iter().zip(y) {
        for i in 0..LANES {
            sums[i] += x[i] * y[i];
            magnitudes[i] += (x[i] * y[i]).abs();
        }
    }
    for (i, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        sums[i] += x * y;
        magnitudes[i] += (x * y).abs();
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

/// `values[i] *= scales[i / group]`.
pub fn scale_groups(values: &mut [f64], group: usize, scales: &[f64]) {
    for (values, scale) in values.chunks_mut(group.max(1)).zip(scales) {
        values.iter_mut().for_each(|v| *v *= scale);
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

/// Philox4x32-10: four random words from a counter of 128 bits and a key of 64, low words first.
///
/// ```
/// let words = hk_core::registry::philox([0; 4], 0);
/// assert_eq!(words, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
/// ```
///
/// Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
pub fn philox(counter: [u32; 4], key: u64) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = counter;
    let (mut low, mut high) = (key as u32, (key >> 32) as u32);
    for _ in 0..10 {
        let (x, y) = (u64::from(a) * 0xD251_1F53, u64::from(c) * 0xCD9E_8D57);
        (a, b) = ((y >> 32) as u32 ^ b ^ low, y as u32);
        (c, d) = ((x >> 32) as u32 ^ d ^ high, x as u32);
        low = low.wrapping_add(0x9E37_79B9);
        high = high.wrapping_add(0xBB67_AE85);
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published vectors of Random123.
    #[test]
    fn philox_gives_the_published_words() {
        let zeros = philox([0; 4], 0);
        assert_eq!(zeros, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = philox([u32::MAX; 4], u64::MAX);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let key = 0x299f_31d0_a409_3822;
        let pi = philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], key);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }
}
