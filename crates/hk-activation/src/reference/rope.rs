//! Rotary position embedding.

use hk_core::plan::rope::reference::Tables;
use hk_core::plan::rope::{Rope, RopeLayout};

/// For each head and pair of its columns `a`, `b`, with the entries of the token's table row:
/// `y_a = x_a cos_a - x_b sin_a`, `y_b = x_b cos_b + x_a sin_b`; other columns are as they were, and heads of tokens
/// without a row are NaN. `rows` are those of the tokens, in the order of the axes of `x`.
///
/// # Panics
/// If `shape` has not the axes of `layout`, or `x`, the tables or `rows` are shorter than it takes.
pub fn rope(
    x: &[f64],
    shape: &[usize],
    layout: RopeLayout,
    tables: &Tables,
    rows: &[Option<usize>],
    rope: &Rope,
) -> Vec<f64> {
    let head_dim = shape[shape.len() - 1];
    // Index of the token of head `i`.
    let token = |i: usize| match layout {
        RopeLayout::Thd => i / shape[1],
        RopeLayout::Sbhd | RopeLayout::Bshd => i / shape[2],
        RopeLayout::Bhsd => i / (shape[1] * shape[2]) * shape[2] + i % shape[2],
    };
    let heads = x.chunks_exact(head_dim).enumerate();
    heads.flat_map(|(i, head)| tables.rotate(head, rows[token(i)], rope)).collect()
}
