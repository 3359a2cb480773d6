//! Scores of an indexer.

use hk_core::registry::dot;

/// `sum_h weights[h] max(q[h] . k, 0) scale` of a query `[H, D]` and a key `[D]`, and the sum of the magnitudes of its terms.
pub fn score(q: &[f64], weights: &[f64], k: &[f64], scale: f64) -> [f64; 2] {
    let (mut sum, mut magnitude) = (0.0, 0.0);
    for (head, weight) in q.chunks(k.len()).zip(weights) {
        let (product, terms) = dot(head, k);
        sum += weight * product.max(0.0);
        magnitude += weight.abs() * terms;
    }
    [sum * scale, magnitude * scale.abs()]
}
