//! Concatenation of the columns of heads.

use hk_core::plan::rope::Rope;
use hk_core::plan::rope::reference::Tables;

/// Each head of `first`, `cols[0]` columns, and behind it that of `second`, `cols[1]` columns.
pub fn cat(first: &[f64], second: &[f64], cols: [usize; 2]) -> Vec<f64> {
    let heads = first.chunks_exact(cols[0]).zip(second.chunks_exact(cols[1]));
    heads.flat_map(|(first, second)| first.iter().chain(second)).copied().collect()
}

/// [`cat`] of `nope` and of `pe`, rotated. `sizes` are heads and columns of `nope`, `rows` the table row of each token;
/// the heads of a token without one are NaN.
///
/// # Panics
/// If the tensors are not of these sizes.
pub fn rope_cat(
    nope: &[f64],
    pe: &[f64],
    [heads, cols]: [usize; 2],
    tables: &Tables,
    rows: &[Option<usize>],
    rope: &Rope,
) -> Vec<f64> {
    let row = |head: usize| rows[head / heads];
    let pe = pe.chunks_exact(rope.rotary).enumerate().flat_map(|(i, pe)| tables.rotate(pe, row(i), rope));
    let nope = nope.chunks_exact(cols).enumerate().flat_map(|(i, nope)| match row(i) {
        Some(_) => nope.to_vec(),
        None => vec![f64::NAN; cols],
    });
    cat(&nope.collect::<Vec<_>>(), &pe.collect::<Vec<_>>(), [cols, rope.rotary])
}
