//! The operators again, in f64 and plain loops: the tests' oracle.
//!
//! Inputs are the values that the kernels read, already rounded to their types; results are not rounded. Tensors are
//! row-major without gaps. Caches are logical: `[slots, heads, columns]`, whatever their layout in memory.

pub mod attention;
pub mod hstu;
pub mod logits;
pub mod mla;
pub mod qk_concat;
pub mod sage;

use crate::KvLayout;
use hk_core::plan::rope::Rope;
use hk_core::plan::rope::reference::rotate;
use hk_core::quant::{BlockRule, BlockScale, QuantFormat, group_scale};
use hk_core::registry::dot;
use hk_core::{Fp4Rounding, Fp4x2};

/// Cosines and sines by position, and the position and slot of each token.
#[derive(Debug, Clone)]
pub struct Tokens<'a> {
    /// How heads are rotated.
    pub rope: Rope,
    /// `[positions, width]`
    pub cos: &'a [f64],
    /// `[positions, width]`
    pub sin: &'a [f64],
    /// Table rows of the tokens that have a position, which may not exist.
    pub positions: &'a [i64],
    /// Slots of the tokens that have one, which may not exist.
    pub slots: &'a [i64],
    /// Slots of the cache.
    pub n_slots: usize,
}

impl Tokens<'_> {
    /// The row of a table for a token: `Ok(None)` if it has no position, `Err` if the tables have none.
    fn row<'t>(&self, table: &'t [f64], token: usize) -> Result<Option<&'t [f64]>, ()> {
        let width = self.rope.table_width();
        let Some(&position) = self.positions.get(token) else { return Ok(None) };
        let position = usize::try_from(position).map_err(|_| ())?;
        let start = position.checked_mul(width).filter(|s| s + width <= table.len()).ok_or(())?;
        Ok(Some(&table[start..start + width]))
    }

    /// A head of a token, rotated if the token has a position; NaN if the tables do not have that.
    pub fn rotate(&self, token: usize, head: &[f64]) -> Vec<f64> {
        match (self.row(self.cos, token), self.row(self.sin, token)) {
            (Ok(Some(cos)), Ok(Some(sin))) => rotate(head, cos, sin, &self.rope),
            (Ok(_), Ok(_)) => head.to_vec(),
            _ => vec![f64::NAN; head.len()],
        }
    }

    /// The largest absolute value of the tables.
    pub fn largest_factor(&self) -> f64 {
        self.cos.iter().chain(self.sin).fold(0.0, |m: f64, x| m.max(x.abs()))
    }

    /// A head of a token, not rotated; NaN if the token has a position that the tables do not have.
    pub fn keep(&self, token: usize, head: &[f64]) -> Vec<f64> {
        if self.has_row(token) { head.to_vec() } else { vec![f64::NAN; head.len()] }
    }

    /// Whether a token has no position, or one within the tables.
    pub fn has_row(&self, token: usize) -> bool {
        self.row(self.cos, token).is_ok()
    }

    /// The slot of a token that is cached.
    pub fn slot(&self, token: usize) -> Option<usize> {
        self.row(self.cos, token).ok()?;
        let slot = usize::try_from(*self.slots.get(token)?).ok()?;
        (slot < self.n_slots).then_some(slot)
    }
}

/// Offset of `[slot, head, column]` in a contiguous cache, in elements.
pub fn element_of(
    layout: KvLayout,
    values: bool,
    piece: usize,
    [block, heads, dim]: [usize; 3],
    [slot, head, col]: [usize; 3],
) -> usize {
    let (b, w) = (slot / block, slot % block);
    match layout {
        KvLayout::Nhd => ((b * block + w) * heads + head) * dim + col,
        KvLayout::Hnd => ((b * heads + head) * block + w) * dim + col,
        KvLayout::Paged | KvLayout::PagedShuffled if !values => {
            (((b * heads + head) * (dim / piece) + col / piece) * block + w) * piece + col % piece
        }
        KvLayout::Paged => ((b * heads + head) * dim + col) * block + w,
        KvLayout::PagedShuffled => {
            (((b * heads + head) * (block / piece) + w / piece) * dim + col) * piece + w % piece
        }
    }
}

/// The values of a row after quantization in groups of columns with a scale each; `round` rounds a value in units of the scale.
pub fn fp8_groups(row: &[f64], group: usize, format: QuantFormat, round: impl Fn(f32) -> f32) -> Vec<f64> {
    let of_group = |part: &[f64]| {
        let finite = part.iter().filter(|x| x.is_finite());
        let scale = group_scale(finite.fold(0.0, |m, x| x.abs().max(m)) as f32, format);
        let inverse = 1.0 / scale;
        part.iter().map(|&x| f64::from(round(x as f32 * inverse)) * f64::from(scale)).collect::<Vec<_>>()
    };
    row.chunks(group).flat_map(of_group).collect()
}

/// The values of a row after quantization to mxfp4: blocks of 32 columns, scales by [`BlockScale::Even`].
pub fn mxfp4_blocks(row: &[f64]) -> Vec<f64> {
    let rule = BlockRule::fp4(BlockScale::Even, 0);
    let of_block = |part: &[f64]| {
        let amax = part.iter().fold(0.0, |m: f64, x| if x.is_nan() { f64::NAN } else { x.abs().max(m) });
        let scale = f64::from(rule.scale(amax as f32).to_f32());
        let quantized =
            |x: f64| Fp4x2::from_f32([(x / scale) as f32, 0.0], Fp4Rounding::NearestEven).to_f32()[0];
        part.iter().map(|&x| f64::from(quantized(x)) * scale).collect::<Vec<_>>()
    };
    row.chunks(32).flat_map(of_block).collect()
}

/// The GEMM `[tokens, heads, nope]` of queries `[heads, tokens, cols]` and weights `[heads, nope, cols]`, and the sums of
/// the magnitudes of its terms.
pub fn bmm(q: &[f64], w: &[f64], [heads, tokens, nope, cols]: [usize; 4]) -> (Vec<f64>, Vec<f64>) {
    let (mut sums, mut magnitudes) = (Vec::new(), Vec::new());
    for (token, head) in (0..tokens).flat_map(|t| (0..heads).map(move |h| (t, h))) {
        let row = &q[(head * tokens + token) * cols..][..cols];
        for n in 0..nope {
            let (sum, magnitude) = dot(row, &w[(head * nope + n) * cols..][..cols]);
            sums.push(sum);
            magnitudes.push(magnitude);
        }
    }
    (sums, magnitudes)
}
