//! Split of a fused projection.

use super::rope::rope;
use hk_core::plan::rope::reference::Tables;
use hk_core::plan::rope::{Rope, RopeLayout};

/// What [`split_and_rotate`] gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Qkv {
    /// `[tokens, q_heads, head_dim]`
    pub q: Vec<f64>,
    /// `[tokens, kv_heads, head_dim]`
    pub k: Vec<f64>,
    /// `[tokens, kv_heads, head_dim]`
    pub v: Vec<f64>,
}

/// The query, key and value heads of each row, in that order; of queries and keys, [`rope`].
///
/// # Panics
/// If `qkv` is not whole rows; as [`rope`].
pub fn split_and_rotate(
    qkv: &[f64],
    [q_heads, kv_heads, head_dim]: [usize; 3],
    tables: &Tables,
    rows: &[Option<usize>],
    rotation: &Rope,
) -> Qkv {
    let width = (q_heads + 2 * kv_heads) * head_dim;
    assert!(qkv.len().is_multiple_of(width), "rows of {width} columns");
    let columns = |first: usize, heads: usize| -> Vec<f64> {
        qkv.chunks_exact(width)
            .flat_map(|row| &row[first * head_dim..][..heads * head_dim])
            .copied()
            .collect()
    };
    let rotated = |first, heads| {
        let shape = [rows.len(), heads, head_dim];
        rope(&columns(first, heads), &shape, RopeLayout::Thd, tables, rows, rotation)
    };
    Qkv { q: rotated(0, q_heads), k: rotated(q_heads, kv_heads), v: columns(q_heads + kv_heads, kv_heads) }
}
