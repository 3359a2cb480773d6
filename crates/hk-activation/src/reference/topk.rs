//! Top-k.

use hk_core::registry::ranked;

/// What [`topk`] gives, `[rows, k]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Topk {
    /// The elements.
    pub values: Vec<f64>,
    /// Their columns.
    pub indices: Vec<usize>,
}

/// The `k` first elements of each row by a stable sort: larger ones first, or smaller ones if not `largest`; equal ones by
/// column. Zeros of both signs are equal, NaNs too: above infinity if `largest`, else last.
///
/// # Panics
/// If `cols` is zero, `k` is more, or `x` is not whole rows.
pub fn topk(x: &[f64], cols: usize, k: usize, largest: bool) -> Topk {
    assert!(cols > 0 && k <= cols && x.len().is_multiple_of(cols), "x is whole rows of {cols} columns");
    let mut out = Topk { values: Vec::new(), indices: Vec::new() };
    for row in x.chunks_exact(cols) {
        let order = ranked(row, largest);
        out.values.extend(order[..k].iter().map(|&i| row[i]));
        out.indices.extend_from_slice(&order[..k]);
    }
    out
}
