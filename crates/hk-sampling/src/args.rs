//! Parameters of the operators, and the checks that they share.

use hk_core::{
    Aliasing, Element, Error, GlobalLayout, Launch, Operand, Result, TensorView, TensorViewMut, check_overlap,
};
use std::fmt::Display;

/// A parameter: one value for all rows, checked on the host, or a tensor of one per row, on the device.
///
/// A tensor has the shape `[R]`, contiguous, and is indexed by the row of `x` that an output uses, not by the output.
/// Values on the device are not checked; each parameter documents what values out of range do.
#[derive(Debug, Clone, Copy)]
pub enum PerRow<'a, T: Element> {
    /// The same for all rows.
    All(T),
    /// One for each row.
    Rows(TensorView<'a, T>),
}

impl<T: Element> From<T> for PerRow<'_, T> {
    fn from(value: T) -> Self {
        Self::All(value)
    }
}

impl<'a, T: Element> From<TensorView<'a, T>> for PerRow<'a, T> {
    fn from(rows: TensorView<'a, T>) -> Self {
        Self::Rows(rows)
    }
}

/// Which row each output samples, and at which temperature. A number converts into it.
#[derive(Debug, Clone, Copy)]
pub struct SampledRows<'a> {
    /// Divides the logits: a number, or `[R]`.
    pub temperature: PerRow<'a, f32>,
    /// The row of each output, `[B]`, contiguous. `None`: output `b` is of row `b`.
    pub row_index: Option<TensorView<'a, i32>>,
}

impl From<f32> for SampledRows<'_> {
    fn from(temperature: f32) -> Self {
        Self { temperature: temperature.into(), row_index: None }
    }
}

impl<'a, T: Element + PartialOrd + Display> PerRow<'a, T> {
    pub(crate) fn rows(&self) -> Option<&TensorView<'a, T>> {
        match self {
            Self::All(_) => None,
            Self::Rows(rows) => Some(rows),
        }
    }

    /// The value for all rows; `none` if there is a tensor.
    pub(crate) fn value_or(&self, none: T) -> T {
        match self {
            Self::All(value) => *value,
            Self::Rows(_) => none,
        }
    }

    fn check(
        &self,
        op: &'static str,
        arg: &'static str,
        rows: usize,
        accepts: impl Fn(&T) -> bool,
        want: &str,
    ) -> Result<()> {
        match self {
            Self::All(value) if !accepts(value) => Err(Error::argument(op, arg, value, want)),
            Self::All(_) => Ok(()),
            Self::Rows(tensor) => expect_vector(op, arg, tensor, rows, "rows"),
        }
    }
}

/// The tokens of a row that can be drawn: those that every filter keeps. `None` keeps all; tokens of probability 0 are never
/// kept.
#[derive(Debug, Clone, Copy, Default)]
pub struct Filters<'a> {
    /// Top-k: a token is kept if fewer than `k` tokens have a larger probability, so that all that tie with the last are
    /// kept. At least 1; on the device, less acts as 1.
    pub k: Option<PerRow<'a, i32>>,
    /// Top-p: a token is kept if the tokens of larger probability have less than `p` together. Above 0, at most 1; on the
    /// device, 0 and less keep the largest only, and more than 1 or NaN keep all.
    pub p: Option<PerRow<'a, f32>>,
    /// Min-p: a token is kept if it has at least `min_p` times the largest probability. From 0 to 1; on the device, less or
    /// NaN keep all, and more acts as 1.
    pub min_p: Option<PerRow<'a, f32>>,
    /// What `p` is a share of.
    pub order: FilterOrder,
}

/// The mass that the `p` of top-p is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FilterOrder {
    /// That of the given probabilities: each filter applies to the whole row.
    #[default]
    Joint,
    /// That of the probabilities after min-p and top-k, renormalized to a sum of one.
    TopKFirst,
}

/// The uniform numbers of a draw.
///
/// Output `b` is drawn with `u = ((word >> 8) + 1) * 2^-24` of the first word of Philox4x32-10 at counter `(offset, b)`
/// with key `seed`: `reference::uniform` (feature `registry`). A caller steps `offset` by one from call to call.
#[derive(Debug, Clone, Copy, Default)]
pub struct Draw<'a> {
    /// Key of the generator.
    pub seed: u64,
    /// Low half of its counter.
    pub offset: u64,
    /// `[B]`, from 0 to 1: replaces the generator.
    pub uniform: Option<TensorView<'a, f32>>,
}

/// The exponential numbers of a race.
///
/// Token `i` of output `b` gets `-ln(u)`, where `u` is made as in [`Draw`] from word `i % 4` of Philox4x32-10 at counter
/// `(offset, b + 2^32 (i / 4))` with key `seed`: `reference::exponential` (feature `registry`).
#[derive(Debug, Clone, Copy, Default)]
pub struct Race<'a> {
    /// Key of the generator.
    pub seed: u64,
    /// Low half of its counter.
    pub offset: u64,
    /// `[B, V]`, finite and not negative: replaces the generator.
    pub exponentials: Option<TensorView<'a, f32>>,
}

/// The outputs of a draw, each `[B]` and contiguous.
#[derive(Debug)]
pub struct Samples<'a> {
    /// The token.
    pub ids: TensorViewMut<'a, i32>,
    /// The sum of the kept probabilities, before renormalization.
    pub mass: Option<TensorViewMut<'a, f32>>,
    /// The number of kept tokens.
    pub count: Option<TensorViewMut<'a, i32>>,
}

impl<'a> From<TensorViewMut<'a, i32>> for Samples<'a> {
    fn from(ids: TensorViewMut<'a, i32>) -> Self {
        Self { ids, mass: None, count: None }
    }
}

impl Filters<'_> {
    pub(crate) fn check(&self, op: &'static str, rows: usize) -> Result<()> {
        if let Some(k) = &self.k {
            k.check(op, "k", rows, |k| *k >= 1, "at least 1")?;
        }
        if let Some(p) = &self.p {
            p.check(op, "p", rows, |p| *p > 0.0 && *p <= 1.0, "more than 0 and at most 1")?;
        }
        if let Some(min_p) = &self.min_p {
            min_p.check(op, "min_p", rows, |p| (0.0..=1.0).contains(p), "from 0 to 1")?;
        }
        Ok(())
    }
}

/// Checks a temperature.
pub(crate) fn check_temperature(op: &'static str, t: &PerRow<'_, f32>, rows: usize) -> Result<()> {
    t.check(op, "temperature", rows, |t| *t >= 0.0, "a number that is not negative")
}

/// Views of either kind.
pub(crate) trait Vector {
    fn expect(&self, op: &'static str, arg: &'static str, len: usize, of: &str) -> Result<()>;
}

macro_rules! vector {
    ($view:ident) => {
        impl<T: Element> Vector for $view<'_, T> {
            fn expect(&self, op: &'static str, arg: &'static str, len: usize, of: &str) -> Result<()> {
                if self.shape() != [len] {
                    return Err(Error::shape(op, arg, self.shape(), format!("[{len}] ({of})")));
                }
                self.expect_contiguous(op, arg)?;
                self.expect_aligned(op, arg, size_of::<T>() as u64)
            }
        }
    };
}
vector!(TensorView);
vector!(TensorViewMut);

/// Checks a contiguous tensor with one axis of `len` elements, one for each of `of`.
pub(crate) fn expect_vector(
    op: &'static str,
    arg: &'static str,
    vector: &impl Vector,
    len: usize,
    of: &str,
) -> Result<()> {
    vector.expect(op, arg, len, of)
}

/// Checks a workspace: at least `bytes` bytes, contiguous, 16-byte aligned.
pub(crate) fn expect_workspace(
    op: &'static str,
    workspace: &TensorViewMut<'_, u8>,
    bytes: usize,
    from: &str,
) -> Result<()> {
    let [len] = workspace.dims(op, "workspace")?;
    if len < bytes {
        return Err(Error::shape(op, "workspace", [len], format!("[{bytes}] or longer ({from})")));
    }
    workspace.expect_contiguous(op, "workspace")?;
    if bytes == 0 { Ok(()) } else { workspace.expect_aligned(op, "workspace", 16) }
}

/// Number of outputs: the length of `row_index`, or the number of rows.
pub(crate) fn outputs_of(
    op: &'static str,
    row_index: Option<&TensorView<'_, i32>>,
    rows: usize,
) -> Result<usize> {
    let Some(index) = row_index else { return Ok(rows) };
    let [outputs] = index.dims(op, "row_index")?;
    expect_vector(op, "row_index", index, outputs, "outputs")?;
    Ok(outputs)
}

/// [`check_overlap`] of optional tensors.
pub(crate) fn disjoint(
    op: &'static str,
    (a_name, a): (&'static str, Option<&impl Operand>),
    (b_name, b): (&'static str, Option<&impl Operand>),
) -> Result<()> {
    match (a, b) {
        (Some(a), Some(b)) => check_overlap(op, (a_name, a), (b_name, b), Aliasing::Disjoint),
        _ => Ok(()),
    }
}

/// The tensor of a parameter for a launch; absent for a value.
pub(crate) fn rows_layout<'a, T: Element + PartialOrd + Display>(
    launch: &mut Launch<'a>,
    arg: &'static str,
    parameter: Option<&PerRow<'a, T>>,
) -> Result<GlobalLayout> {
    launch.optional_input(arg, parameter.and_then(PerRow::rows))
}

/// Longest row for filters: about 65 times the largest vocabulary.
pub(crate) const MOST_TOKENS: usize = (1 << 24) - 1;

/// Longest row that a block keeps in registers.
const WHOLE: usize = 8192;
/// Tokens per tile of a longer row.
const TILE: usize = 4096;
/// Most segments of a row.
const MOST_SEGMENTS: usize = 128;

/// How rows of more than [`WHOLE`] tokens are cut into segments; a shorter row is one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub segments: usize,
    /// Tokens per segment.
    pub segment: usize,
}

impl Cut {
    pub fn of(cols: usize) -> Self {
        let segment = match cols {
            ..=WHOLE => WHOLE,
            _ => cols.div_ceil(MOST_SEGMENTS).next_multiple_of(TILE),
        };
        Self { segments: cols.div_ceil(segment).max(1), segment }
    }

    /// As [`of`](Self::of), with fewer and longer segments if all rows would have more than `most`.
    pub fn among(cols: usize, rows: usize, most: usize) -> Self {
        let Self { segments, segment } = Self::of(cols);
        let segment = segments.div_ceil(most.div_ceil(rows.max(1)).max(1)) * segment;
        Self { segments: cols.div_ceil(segment).max(1), segment }
    }
}

/// Checks the length of rows for filters.
pub(crate) fn check_cols(op: &'static str, arg: &'static str, cols: usize) -> Result<()> {
    if cols > MOST_TOKENS {
        return Err(Error::too_large(op, arg, format!("{cols} columns"), MOST_TOKENS as u64));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_the_row() {
        for cols in
            [1, 8192, 8193, 32_000, 128_256, 256_000, 524_288, 524_289, 1_000_000, MOST_TOKENS, (1 << 29) - 1]
        {
            let Cut { segments, segment } = Cut::of(cols);
            assert!(segment.is_multiple_of(TILE) && (1..=MOST_SEGMENTS).contains(&segments), "{cols}");
            assert!((segments - 1) * segment < cols && cols <= segments * segment, "{cols}");
        }
        assert_eq!(Cut::of(128_256), Cut { segments: 32, segment: 4096 });
        assert_eq!(Cut::of(256_000).segments, 63);
        assert_eq!(Cut::of(8192).segments, 1);
        // Few rows; many rows, with as many segments as there are blocks for; more rows than blocks.
        assert_eq!(Cut::among(128_256, 8, 2432), Cut::of(128_256));
        assert_eq!(Cut::among(128_256, 1000, 2432), Cut { segments: 3, segment: 11 * TILE });
        assert_eq!(Cut::among(128_256, 5000, 2432), Cut { segments: 1, segment: 32 * TILE });
        assert_eq!(Cut::among(100, 5000, 0).segments, 1);
    }
}
