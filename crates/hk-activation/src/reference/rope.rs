//! Rotary position embedding.

use hk_core::rope::{Rope, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth};

/// Cosines and sines, row-major with [`Rope::table_width`] columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Tables {
    /// `cos`
    pub cos: Vec<f64>,
    /// `sin`
    pub sin: Vec<f64>,
}

impl Tables {
    /// Of angles.
    pub fn of_angles(angles: &[f64]) -> Self {
        Self { cos: angles.iter().map(|a| a.cos()).collect(), sin: angles.iter().map(|a| a.sin()).collect() }
    }
}

/// The table row of each token: its position plus its offset, if there is such a row.
pub fn table_rows(positions: &[i64], offsets: Option<&[i64]>, rows: usize) -> Vec<Option<usize>> {
    let row = |(i, &position): (usize, &i64)| {
        let row = position.checked_add(offsets.map_or(0, |offsets| offsets[i]))?;
        usize::try_from(row).ok().filter(|row| *row < rows)
    };
    positions.iter().enumerate().map(row).collect()
}

/// The positions of packed tokens: since their sequence began, and for tokens of no sequence one that is in no table.
pub fn positions_in_sequences(tokens: usize, starts: &[i64]) -> Vec<i64> {
    let position = |token: i64| {
        let mut ranges = starts.windows(2);
        let of = ranges.find(|range| range[0] <= token && token < range[1]);
        of.map_or(i64::MIN, |range| token - range[0])
    };
    (0..tokens as i64).map(position).collect()
}

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
    // Number of the token of head `i`.
    let token = |i: usize| match layout {
        RopeLayout::Thd => i / shape[1],
        RopeLayout::Sbhd | RopeLayout::Bshd => i / shape[2],
        RopeLayout::Bhsd => i / (shape[1] * shape[2]) * shape[2] + i % shape[2],
    };
    let heads = x.chunks_exact(head_dim).enumerate();
    heads
        .flat_map(|(i, head)| match rows[token(i)] {
            Some(row) => rotate(head, tables, row, rope),
            None => vec![f64::NAN; head_dim],
        })
        .collect()
}

/// One head.
fn rotate(x: &[f64], tables: &Tables, row: usize, rope: &Rope) -> Vec<f64> {
    let first = match rope.span {
        RopeSpan::First => 0,
        RopeSpan::Last => x.len() - rope.rotary,
    };
    let mut y = x.to_vec();
    for pair in 0..rope.rotary / 2 {
        let (a, b) = match rope.style {
            RopeStyle::Neox => (pair, pair + rope.rotary / 2),
            RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
        };
        let (entry_a, entry_b) = match rope.table {
            RopeTableWidth::Half => (pair, pair),
            RopeTableWidth::Full => (a, b),
        };
        let entry = |table: &[f64], i: usize| table[row * rope.table_width() + i];
        let (cos_a, sin_a) = (entry(&tables.cos, entry_a), entry(&tables.sin, entry_a));
        let (cos_b, sin_b) = (entry(&tables.cos, entry_b), entry(&tables.sin, entry_b));
        let (a, b) = (first + a, first + b);
        (y[a], y[b]) = if rope.inverse {
            (x[a] * cos_a + x[b] * sin_b, x[b] * cos_b - x[a] * sin_a)
        } else {
            (x[a] * cos_a - x[b] * sin_a, x[b] * cos_b + x[a] * sin_b)
        };
    }
    y
}
