//! Shapes and strides.

use crate::error::{Error, Result};
use std::fmt;
use std::ops::Range;

/// Where the elements of a tensor lie: a shape and a stride per axis, in elements, up to five axes.
///
/// The element with index `i` is at `sum(i[k] * strides[k])` elements from the first. Strides are not negative; a
/// stride of zero repeats an axis ([`Layout::broadcast`]). A layout whose furthest element, or whose number of
/// elements, does not fit an `i64` cannot be made.
///
/// ```
/// # use hk_core::Layout;
/// # fn main() -> hk_core::Result<()> {
/// let l = Layout::contiguous([128, 4096])?;
/// assert_eq!(l.strides(), [4096, 1]);
/// let (columns, offset) = l.slice(1, 1024..2048)?;
/// assert_eq!((columns.shape(), columns.strides(), offset), (&[128, 1024][..], &[4096, 1][..], 1024));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    rank: usize,
    // Axes from `rank` on hold 0: the derived comparisons see them.
    shape: [usize; Layout::MAX_RANK],
    strides: [usize; Layout::MAX_RANK],
}

/// A tensor as a matrix of rows: see [`Layout::rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Number of rows, the product of the leading axes.
    pub rows: usize,
    /// Length of a row, the last axis.
    pub cols: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
}

impl Layout {
    /// The largest number of axes.
    pub const MAX_RANK: usize = 5;

    /// Row-major without gaps: the last axis has stride 1.
    ///
    /// # Errors
    /// [`Error::Shape`] beyond [`Layout::MAX_RANK`] axes, [`Error::TooLarge`] beyond `i64::MAX` elements.
    pub fn contiguous(shape: impl AsRef<[usize]>) -> Result<Self> {
        let shape = shape.as_ref();
        let mut strides = [0; Self::MAX_RANK];
        let mut next: usize = 1;
        for (i, &n) in shape.iter().enumerate().rev() {
            if let Some(s) = strides.get_mut(i) {
                *s = next;
            }
            next = next.saturating_mul(n.max(1));
        }
        Self::with_strides(shape, &strides[..shape.len().min(Self::MAX_RANK)])
    }

    /// Any strides, in elements.
    ///
    /// # Errors
    /// [`Error::Shape`] beyond [`Layout::MAX_RANK`] axes or if `strides` has another length than `shape`,
    /// [`Error::TooLarge`] if the number of elements or the furthest element exceeds `i64::MAX`.
    pub fn with_strides(shape: impl AsRef<[usize]>, strides: impl AsRef<[usize]>) -> Result<Self> {
        let (shape, strides) = (shape.as_ref(), strides.as_ref());
        if shape.len() > Self::MAX_RANK {
            return Err(Error::shape("Layout", "shape", shape, "at most 5 axes"));
        }
        if strides.len() != shape.len() {
            let want = format!("{} strides, one per axis of {shape:?}", shape.len());
            return Err(Error::shape("Layout", "strides", strides, want));
        }
        let mut layout = Self { rank: shape.len(), shape: [0; 5], strides: [0; 5] };
        layout.shape[..shape.len()].copy_from_slice(shape);
        layout.strides[..shape.len()].copy_from_slice(strides);

        let limit = i64::MAX as usize;
        let numel = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        // A product with a factor of zero can overflow before the zero.
        let numel = if shape.contains(&0) { Some(0) } else { numel };
        let last = shape
            .iter()
            .zip(strides)
            .try_fold(0usize, |end, (&n, &s)| end.checked_add(n.saturating_sub(1).checked_mul(s)?));
        match (numel, last) {
            (Some(0), _) => Ok(layout),
            (Some(n), Some(last)) if n <= limit && last < limit => Ok(layout),
            _ => {
                let what = format!("shape {shape:?} with strides {strides:?}");
                Err(Error::too_large("Layout", "shape", what, limit as u64))
            }
        }
    }

    /// Number of axes.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Length of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Stride of each axis, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// Number of elements; 1 for rank 0.
    pub fn numel(&self) -> usize {
        if self.shape().contains(&0) { 0 } else { self.shape().iter().product() }
    }

    /// True if there is no element.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Elements from the first to just past the furthest one: what a buffer must hold. 0 if there is none.
    pub fn span(&self) -> usize {
        if self.is_empty() { 0 } else { self.axes().map(|(n, s)| (n - 1) * s).sum::<usize>() + 1 }
    }

    /// True if the elements follow each other row-major without gaps. Strides of axes of length 1 do not matter.
    pub fn is_contiguous(&self) -> bool {
        let mut next = 1;
        self.is_empty()
            || self.axes().rev().filter(|a| a.0 != 1).all(|(n, s)| {
                let fits = s == next;
                next *= n;
                fits
            })
    }

    /// The part of `axis` in `range`, and the offset of its first element. The offset of an empty part is 0.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such axis, or the range does not lie in it.
    pub fn slice(&self, axis: usize, range: Range<usize>) -> Result<(Self, usize)> {
        let length = self.axis("slice", axis)?;
        if range.start > range.end || range.end > length {
            let want = format!("a range within 0..{length} (axis {axis} of {:?})", self.shape());
            return Err(Error::argument("slice", "range", format!("{range:?}"), want));
        }
        let mut part = *self;
        part.shape[axis] = range.len();
        let offset = if part.is_empty() { 0 } else { range.start * self.strides[axis] };
        Ok((part, offset))
    }

    /// Exchanges two axes.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such axis.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Self> {
        self.axis("transpose", a)?;
        self.axis("transpose", b)?;
        let mut swapped = *self;
        swapped.shape.swap(a, b);
        swapped.strides.swap(a, b);
        Ok(swapped)
    }

    /// Splits an axis in two: indices of the outer one count groups of `inner` elements. It makes heads of the columns of a
    /// projection.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such axis, or its length is not a multiple of `inner`; [`Error::Shape`] beyond five
    /// axes.
    pub fn split_axis(&self, axis: usize, inner: usize) -> Result<Self> {
        let length = self.axis("split_axis", axis)?;
        if inner == 0 || !length.is_multiple_of(inner) {
            let want = format!("a divisor of {length} (axis {axis} of {:?})", self.shape());
            return Err(Error::argument("split_axis", "inner", inner, want));
        }
        let (mut shape, mut strides) = (self.shape().to_vec(), self.strides().to_vec());
        shape.splice(axis..=axis, [length / inner, inner]);
        let stride = strides[axis];
        // An empty tensor, or a single group, takes any stride.
        strides.splice(axis..=axis, [stride.saturating_mul(inner), stride]);
        Self::with_strides(shape, strides)
    }

    /// Merges an axis with the next one, of which it has to step over exactly what that covers: what undoes
    /// [`split_axis`](Self::split_axis). It makes tokens of batches and rows.
    ///
    /// # Errors
    /// [`Error::Stride`] if there are gaps between them, [`Error::Argument`] if there are no such axes.
    pub fn merge_axes(&self, op: &'static str, arg: &'static str, axis: usize) -> Result<Self> {
        let (outer, inner) = (self.axis(op, axis)?, self.axis(op, axis + 1)?);
        let (mut shape, mut strides) = (self.shape().to_vec(), self.strides().to_vec());
        let stride = if inner == 1 { strides[axis] } else { strides[axis + 1] };
        let covers = strides[axis + 1].checked_mul(inner) == Some(strides[axis]);
        if outer > 1 && inner > 1 && !covers && !self.is_empty() {
            let want = format!("one stride for axes {axis} and {} together", axis + 1);
            return Err(Error::stride(op, arg, self, want));
        }
        shape.splice(axis..=axis + 1, [outer.saturating_mul(inner)]);
        strides.splice(axis..=axis + 1, [stride]);
        Self::with_strides(shape, strides)
    }

    /// Repeats axes of length 1, and adds leading ones, up to `shape`: the usual broadcasting rule, with strides of
    /// zero.
    ///
    /// # Errors
    /// [`Error::Shape`] if an axis is neither 1 nor the wanted length, or `shape` has fewer axes;
    /// [`Error::TooLarge`] as [`Layout::with_strides`].
    pub fn broadcast(&self, shape: impl AsRef<[usize]>) -> Result<Self> {
        let shape = shape.as_ref();
        let mismatch = || Error::shape("broadcast", "layout", self.shape(), format!("to fit {shape:?}"));
        let lead = shape.len().checked_sub(self.rank).ok_or_else(mismatch)?;
        if shape.len() > Self::MAX_RANK {
            return Err(Error::shape("broadcast", "shape", shape, "at most 5 axes"));
        }
        let mut strides = [0; Self::MAX_RANK];
        for (i, (n, s)) in self.axes().enumerate() {
            strides[lead + i] = match shape[lead + i] {
                want if want == n => s,
                _ if n == 1 => 0,
                _ => return Err(mismatch()),
            };
        }
        Self::with_strides(shape, &strides[..shape.len()])
    }

    /// The layout as rows along the last axis. The leading axes collapse to one: they need a single row stride, and the
    /// last axis unit stride. Axes of length 1 are free; a single row has
    /// `row_stride = cols`.
    ///
    /// # Errors
    /// [`Error::Shape`] for rank 0, [`Error::Stride`] otherwise; both name `op` and `arg`.
    pub fn rows(&self, op: &'static str, arg: &'static str) -> Result<Rows> {
        let Some((&cols, leading)) = self.shape().split_last() else {
            return Err(Error::shape(op, arg, self.shape(), "at least one axis"));
        };
        self.expect_unit_stride(op, arg)?;
        if self.is_empty() {
            let rows = if leading.contains(&0) { 0 } else { leading.iter().product() };
            return Ok(Rows { rows, cols, row_stride: cols });
        }
        // From the innermost leading axis outwards: each must step over exactly what the inner ones cover.
        let mut rows = Rows { rows: 1, cols, row_stride: cols };
        for (n, s) in self.axes().take(leading.len()).rev().filter(|a| a.0 != 1) {
            if rows.rows == 1 {
                rows.row_stride = s;
            } else if s != rows.rows * rows.row_stride {
                return Err(Error::stride(op, arg, self, "leading axes with one uniform row stride"));
            }
            rows.rows *= n;
        }
        Ok(rows)
    }

    /// Checks that the last axis has stride 1 (or at most one element).
    ///
    /// # Errors
    /// [`Error::Stride`], naming `op` and `arg`.
    pub fn expect_unit_stride(&self, op: &'static str, arg: &'static str) -> Result<()> {
        match self.axes().next_back() {
            Some((n, s)) if n > 1 && s != 1 => {
                Err(Error::stride(op, arg, self, "unit stride on the last axis"))
            }
            _ => Ok(()),
        }
    }

    /// Checks [`Layout::is_contiguous`].
    ///
    /// # Errors
    /// [`Error::Stride`], naming `op` and `arg`.
    pub fn expect_contiguous(&self, op: &'static str, arg: &'static str) -> Result<()> {
        if self.is_contiguous() {
            return Ok(());
        }
        Err(Error::stride(op, arg, self, "contiguous elements"))
    }

    /// The lengths of the axes, if there are `N`.
    ///
    /// # Errors
    /// [`Error::Shape`], naming `op` and `arg`.
    pub fn dims<const N: usize>(&self, op: &'static str, arg: &'static str) -> Result<[usize; N]> {
        self.shape().try_into().map_err(|_| Error::shape(op, arg, self.shape(), format!("{N} axes")))
    }

    /// Checks the shape.
    ///
    /// # Errors
    /// [`Error::Shape`], naming `op` and `arg`.
    pub fn expect_shape(&self, op: &'static str, arg: &'static str, want: impl AsRef<[usize]>) -> Result<()> {
        let want = want.as_ref();
        if self.shape() == want {
            return Ok(());
        }
        Err(Error::shape(op, arg, self.shape(), format!("{want:?}")))
    }

    /// True if two different indices can lead to one element, as after [`Layout::broadcast`].
    ///
    /// Exact, but for interleavings that no tensor library produces: those are called overlapping where the search would be
    /// long.
    pub fn overlaps_itself(&self) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut axes: Vec<_> = self.axes().filter(|a| a.0 > 1).map(|(n, s)| (s as i128, n as i128)).collect();
        axes.sort_unstable_by_key(|a| std::cmp::Reverse(a.0));
        // Nested axes: each stride exceeds the extent of the smaller ones, as in every view of a contiguous tensor.
        let mut reach = 0;
        if axes.iter().rev().all(|&(s, n)| {
            let nested = s > reach;
            reach += s * (n - 1);
            nested
        }) {
            return false;
        }
        // Otherwise: do two indices that first differ in axis k lead to one element? The differences in later axes range
        // over -(n-1)..=n-1, shifted to start at 0.
        (0..axes.len()).any(|k| {
            let (s, n) = axes[k];
            let rest = &axes[k + 1..];
            let target = rest.iter().map(|&(s, n)| s * (n - 1)).sum::<i128>() - s;
            let mut terms = vec![Term { stride: s, max: n - 2 }];
            terms.extend(rest.iter().map(|&(s, n)| Term { stride: s, max: 2 * (n - 1) }));
            reachable(terms, target)
        })
    }

    fn axis(&self, op: &'static str, axis: usize) -> Result<usize> {
        self.shape()
            .get(axis)
            .copied()
            .ok_or_else(|| Error::argument(op, "axis", axis, format!("an axis of shape {:?}", self.shape())))
    }

    /// Length and stride of each axis.
    fn axes(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> + ExactSizeIterator {
        (0..self.rank).map(|i| (self.shape[i], self.strides[i]))
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} with strides {:?}", self.shape(), self.strides())
    }
}

/// A layout at an address, in bytes, for the overlap test.
#[derive(Clone, Copy)]
pub struct Extent<'a> {
    pub addr: u64,
    pub element_bytes: usize,
    pub layout: &'a Layout,
}

impl Extent<'_> {
    fn bytes(&self) -> Range<u64> {
        self.addr..self.addr + (self.layout.span() * self.element_bytes) as u64
    }

    /// True if some byte belongs to an element of both. As exact as [`Layout::overlaps_itself`].
    pub fn intersects(&self, other: &Self) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        if a.is_empty() || b.is_empty() || a.end <= b.start || b.end <= a.start {
            return false;
        }
        // addr_a + sum(i s) + byte == addr_b + sum(j t) + byte': with j counted down from its maximum, every term
        // is positive and the whole is one bounded sum.
        let mut terms = Vec::with_capacity(2 * Layout::MAX_RANK + 2);
        let mut target = i128::from(other.addr) - i128::from(self.addr);
        for (extent, subtracted) in [(self, false), (other, true)] {
            let element = extent.element_bytes;
            let axes = extent.layout.axes().map(move |(n, s)| (n, s * element));
            for (n, stride) in axes.chain([(element, 1)]) {
                let (stride, max) = (stride as i128, n as i128 - 1);
                terms.push(Term { stride, max });
                if subtracted {
                    target += stride * max;
                }
            }
        }
        reachable(terms, target)
    }
}

#[derive(Clone, Copy)]
struct Term {
    stride: i128,
    max: i128,
}

/// Is `target` a sum of `stride * t` with `0 <= t <= max` for each term?
///
/// Depth-first search from the largest stride down. The extent of the smaller terms leaves few candidates for each `t`: the
/// nested strides of real tensors take a few steps. A search beyond a fixed number of steps answers yes.
fn reachable(mut terms: Vec<Term>, target: i128) -> bool {
    terms.retain(|t| t.max > 0 && t.stride > 0);
    terms.sort_unstable_by_key(|t| std::cmp::Reverse(t.stride));
    terms.dedup_by(|next, kept| {
        let same = next.stride == kept.stride;
        if same {
            kept.max += next.max;
        }
        same
    });
    // For the terms from i on: their extent and their greatest common divisor.
    let mut tails = vec![(0, 0); terms.len() + 1];
    for (i, t) in terms.iter().enumerate().rev() {
        let (reach, divisor) = tails[i + 1];
        tails[i] = (reach + t.stride * t.max, gcd(t.stride, divisor));
    }
    let mut steps = 20_000;
    search(&terms, &tails, target, &mut steps)
}

fn search(terms: &[Term], tails: &[(i128, i128)], target: i128, steps: &mut u32) -> bool {
    let (reach, divisor) = tails[0];
    if target == 0 {
        return true;
    }
    if target < 0 || target > reach || target % divisor != 0 {
        return false;
    }
    let Term { stride, max } = terms[0];
    let least = (target - tails[1].0 + stride - 1).div_euclid(stride).max(0);
    let most = (target / stride).min(max);
    for t in (least..=most).rev() {
        match steps.checked_sub(1) {
            Some(left) => *steps = left,
            None => return true,
        }
        if search(&terms[1..], &tails[1..], target - t * stride, steps) {
            return true;
        }
    }
    false
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn bytes(e: &Extent) -> HashSet<u64> {
        let first = vec![e.addr];
        let addrs = e.layout.axes().fold(first, |addrs, (n, s)| {
            addrs.iter().flat_map(|&a| (0..n).map(move |i| a + (i * s * e.element_bytes) as u64)).collect()
        });
        addrs.iter().flat_map(|&a| a..a + e.element_bytes as u64).collect()
    }

    fn extent() -> impl Strategy<Value = (u64, usize, Layout)> {
        let axes = prop::collection::vec((0usize..5, 0usize..12), 0..4);
        (0u64..60, 0u32..4, axes).prop_map(|(addr, size, axes)| {
            let (shape, strides): (Vec<_>, Vec<_>) = axes.into_iter().unzip();
            (addr, 1 << size, Layout::with_strides(shape, strides).unwrap())
        })
    }

    proptest! {
        #[test]
        fn extents_intersect_where_their_bytes_do(a in extent(), b in extent()) {
            let a = Extent { addr: a.0, element_bytes: a.1, layout: &a.2 };
            let b = Extent { addr: b.0, element_bytes: b.1, layout: &b.2 };
            let meet = !bytes(&a).is_disjoint(&bytes(&b));
            prop_assert_eq!(a.intersects(&b), meet);
            prop_assert_eq!(b.intersects(&a), meet);
        }
    }

    proptest! {
        #[test]
        fn merged_axes_split_again(n in 1usize..5, inner in 1usize..5, stride in 1usize..9, head in 1usize..4) {
            let whole = Layout::with_strides([n * inner, head], [stride * head, 1]).unwrap();
            let split = whole.split_axis(0, inner).unwrap();
            let merged = split.merge_axes("op", "x", 0).unwrap();
            prop_assert_eq!(merged.shape(), whole.shape());
            let at = |layout: &Layout, i: usize| if layout.shape()[0] > 1 { i * layout.strides()[0] } else { 0 };
            prop_assert_eq!(at(&merged, n * inner - 1), at(&whole, n * inner - 1));
            let gaps = Layout::with_strides([n + 1, inner + 1], [inner + 2, 1]).unwrap();
            let refused = matches!(gaps.merge_axes("op", "x", 0), Err(Error::Stride { .. }));
            prop_assert!(refused);
        }
    }

    #[test]
    fn column_ranges_of_one_large_matrix_are_decided_quickly() {
        // DeepSeek-V3's fused projection: columns 0..1536 and 1536..2112 of 2112.
        let wide = Layout::with_strides([1 << 20, 1536], [2112, 1]).unwrap();
        let narrow = Layout::with_strides([1 << 20, 576], [2112, 1]).unwrap();
        let at = |addr, layout| Extent { addr, element_bytes: 2, layout };
        assert!(!at(0, &wide).intersects(&at(2 * 1536, &narrow)));
        assert!(at(0, &wide).intersects(&at(2 * 1535, &narrow)));
        // One row down is still the same column range.
        assert!(!at(2 * 2112, &wide).intersects(&at(2 * 1536, &narrow)));
    }
}
