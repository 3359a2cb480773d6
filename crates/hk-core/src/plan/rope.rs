//! Rotary position embedding: what its operators, of several crates, have in common. The device's side is `hk/rope.h`.
//!
//! A head is rotated in pairs of columns `(a, b)` by the angle of its token:
//!
//! ```text
//! out_a = x_a cos_a - x_b sin_a        inverse: out_a = x_a cos_a + x_b sin_b
//! out_b = x_b cos_b + x_a sin_b                 out_b = x_b cos_b - x_a sin_a
//! ```
//!
//! Models differ in which columns are a pair, how wide the tables of cosines and sines are, and which part of a head is
//! rotated; a wrong choice gives plausible numbers. So [`Rope`] spells them out and has no default.
//!
//! Source: Su et al. 2021, "RoFormer", section 3.2.2.

use crate::dtype::{DType, Element, Float, bf16, f16};
use crate::error::{Error, Result};
use crate::global::GlobalLayout;
use crate::index::IndexView;
use crate::launch::Launch;
#[cfg(feature = "registry")]
use crate::registry::{Call, Described, HostCall, Traffic};
use crate::tensor::{Aliasing, NamedOperand, Operand, TensorView, check_overlap};
use bytemuck::{Pod, Zeroable};

/// Which columns are a pair, counted from the first that is rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(i, i + rotary / 2)`: GPT-NeoX, Llama and Qwen in Hugging Face's layout, GPT-OSS.
    Neox,
    /// `(2i, 2i + 1)`: GPT-J, DeepSeek.
    Interleaved,
}

/// How many columns the tables have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeTableWidth {
    /// `rotary / 2`: one entry for each pair.
    Half,
    /// `rotary`: one entry for each column. Those of a pair may differ.
    Full,
}

/// Where in a head the columns that are rotated lie; the others are copied bit by bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeSpan {
    /// `0..rotary`
    First,
    /// `head_dim - rotary..head_dim`: the part without position comes first, as in DeepSeek's heads.
    Last,
}

/// Which way heads are rotated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RopeDirection {
    /// By the angles of the tables.
    #[default]
    Forward,
    /// Back: the transpose of the rotation, which is what its backward pass needs.
    Inverse,
}

/// What the axes of a tensor of heads mean; each stride is free, but that of the columns of a head is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// `[batch, heads, tokens, head_dim]`
    Bhsd,
    /// `[tokens, batch, heads, head_dim]`
    Sbhd,
    /// `[batch, tokens, heads, head_dim]`
    Bshd,
    /// `[tokens, heads, head_dim]`: sequences one after the other.
    Thd,
}

/// How heads are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rope {
    /// Which columns are a pair.
    pub style: RopeStyle,
    /// How many columns the tables have.
    pub table: RopeTableWidth,
    /// Number of columns that are rotated: even, from 2 to all of a head.
    pub rotary: usize,
    /// Where they lie.
    pub span: RopeSpan,
    /// Which way.
    pub direction: RopeDirection,
}

impl Rope {
    /// Checks that heads of `head_dim` columns can be rotated so; `arg` is the tensor of that `shape`.
    ///
    /// # Errors
    /// [`Error::Argument`] for an odd number of columns, or none; [`Error::Shape`] for more than a head has.
    pub fn check(&self, op: &'static str, arg: &'static str, shape: &[usize], head_dim: usize) -> Result<()> {
        if self.rotary == 0 || !self.rotary.is_multiple_of(2) {
            return Err(Error::argument(op, "rotary", self.rotary, "an even number of columns, 2 or more"));
        }
        if self.rotary > head_dim {
            let want = format!("heads of at least {} columns (rotary)", self.rotary);
            return Err(Error::shape(op, arg, shape, want));
        }
        Ok(())
    }

    /// Columns of the tables.
    pub const fn table_width(&self) -> usize {
        match self.table {
            RopeTableWidth::Half => self.rotary / 2,
            RopeTableWidth::Full => self.rotary,
        }
    }
}

/// A type that tables can have beside heads of type `T`: `T` itself and `f32`.
pub trait RopeElement<T: Float>: Element {}

impl<T: Float> RopeElement<T> for T {}
impl RopeElement<bf16> for f32 {}
impl RopeElement<f16> for f32 {}

/// Which position a token has.
#[derive(Debug, Clone, Copy)]
pub enum Positions<'a> {
    /// Its index along the axis of tokens.
    Index,
    /// Its index since its sequence began, for packed tokens: `[sequences + 1]`, sequence `i` is the tokens
    /// `starts[i]..starts[i + 1]`. Tokens of no sequence have no position.
    Sequences(IndexView<'a>),
    /// The same, and what its sequence begins at, `first[sequence]`, is added.
    SequencesFrom {
        /// `[sequences + 1]`
        starts: IndexView<'a>,
        /// `[sequences]`
        first: IndexView<'a>,
    },
    /// This, for each token: `[batch, tokens]`, or `[tokens, batch]` beside [`RopeLayout::Sbhd`], or `[tokens]` for packed
    /// tokens.
    Given(IndexView<'a>),
}

/// Cosines and sines by position, and the positions of tokens.
///
/// A token's row of the tables is its position plus its offset. If there is no such row, the heads of the token, with the
/// columns that are not rotated, become NaN: positions lie on the device, where only the kernel sees them.
#[derive(Debug, Clone, Copy)]
pub struct RopeTables<'a, C: Element> {
    /// `[positions, rotary / 2]` or `[positions, rotary]`, unit stride on the columns.
    pub cos: TensorView<'a, C>,
    /// As `cos`.
    pub sin: TensorView<'a, C>,
    /// Positions of the tokens.
    pub positions: Positions<'a>,
    /// Added to the positions; of the shape of [`Positions::Given`].
    pub offsets: Option<IndexView<'a>>,
}

/// Angles in radians by position, and the positions of tokens; otherwise as [`RopeTables`].
#[derive(Debug, Clone, Copy)]
pub struct RopeAngles<'a, C: Element> {
    /// `[positions, rotary / 2]` or `[positions, rotary]`, unit stride on the columns.
    pub angles: TensorView<'a, C>,
    /// Positions of the tokens.
    pub positions: Positions<'a>,
    /// Added to the positions; of the shape of [`Positions::Given`].
    pub offsets: Option<IndexView<'a>>,
}

/// [`RopeTables`] or [`RopeAngles`], as the wrappers of kernels use them.
#[derive(Debug, Clone, Copy)]
pub struct RopeSource<'a, C: Element> {
    /// Cosines, or angles, by argument name.
    first: (&'static str, TensorView<'a, C>),
    sin: Option<TensorView<'a, C>>,
    positions: Positions<'a>,
    offsets: Option<IndexView<'a>>,
}

impl<'a, C: Element> From<RopeTables<'a, C>> for RopeSource<'a, C> {
    fn from(t: RopeTables<'a, C>) -> Self {
        Self { first: ("cos", t.cos), sin: Some(t.sin), positions: t.positions, offsets: t.offsets }
    }
}

impl<'a, C: Element> From<RopeAngles<'a, C>> for RopeSource<'a, C> {
    fn from(t: RopeAngles<'a, C>) -> Self {
        Self { first: ("angles", t.angles), sin: None, positions: t.positions, offsets: t.offsets }
    }
}

/// `hk::Rope` of `hk/rope.h`: a part of a kernel's parameters.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct RopeParams {
    cos: GlobalLayout,
    sin: GlobalLayout,
    positions: GlobalLayout,
    offsets: GlobalLayout,
    rotary: u32,
    interleaved: u32,
    full: u32,
    inverse: u32,
    table_is_f32: u32,
    positions_kind: u32,
    positions_are_i64: u32,
    offsets_are_i64: u32,
}

crate::params::declared!(RopeParams {
    cos,
    sin,
    positions,
    offsets,
    rotary,
    interleaved,
    full,
    inverse,
    table_is_f32,
    positions_kind,
    positions_are_i64,
    offsets_are_i64,
});

impl<'a, C: Element> RopeSource<'a, C> {
    /// True for [`RopeAngles`].
    pub const fn is_angles(&self) -> bool {
        self.sin.is_none()
    }

    /// Whether both vectors of a pair share their table entries: `hk::RopeInput::Shared`.
    pub fn is_shared(&self, rope: &Rope) -> bool {
        !self.is_angles() && rope.style == RopeStyle::Neox && rope.table == RopeTableWidth::Half
    }

    /// Checks the tables against the rotation, and positions and offsets against the tokens, whose axes are `tokens`: one
    /// axis if they are packed.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Stride`], [`Error::Align`] naming the tensor; [`Error::Argument`] for sequences of tokens
    /// that are not packed.
    pub fn check(&self, op: &'static str, rope: &Rope, tokens: &[usize]) -> Result<()> {
        let width = rope.table_width();
        let (name, first) = &self.first;
        let why = match rope.table {
            RopeTableWidth::Half => "rotary / 2",
            RopeTableWidth::Full => "rotary",
        };
        let [rows, cols] = first.dims(op, name)?;
        if cols != width {
            return Err(Error::shape(op, name, first.shape(), format!("[{rows}, {width}] (columns: {why})")));
        }
        check_table(op, name, first)?;
        if let Some(sin) = &self.sin {
            if sin.shape() != first.shape() {
                let want = format!("{:?} (shape of {name})", first.shape());
                return Err(Error::shape(op, "sin", sin.shape(), want));
            }
            check_table(op, "sin", sin)?;
        }
        let per_token = |arg, view: &IndexView<'a>| {
            if view.shape() != tokens {
                return Err(Error::shape(op, arg, view.shape(), format!("{tokens:?} (the tokens)")));
            }
            view.expect_aligned(op, arg)
        };
        match &self.positions {
            Positions::Index => {}
            Positions::Given(view) => per_token("positions", view)?,
            Positions::Sequences(starts) | Positions::SequencesFrom { starts, .. } => {
                let [_] = tokens else {
                    let want = "packed tokens beside starts of sequences";
                    return Err(Error::argument(op, "positions", format!("tokens {tokens:?}"), want));
                };
                if starts.shape().len() != 1 || starts.shape()[0] == 0 {
                    return Err(Error::shape(op, "positions", starts.shape(), "[sequences + 1]"));
                }
                starts.expect_aligned(op, "positions")?;
            }
        }
        match (&self.positions, &self.offsets) {
            (Positions::SequencesFrom { .. }, Some(_)) => {
                Err(Error::argument(op, "offsets", "given", "nothing beside those of sequences"))
            }
            (Positions::SequencesFrom { starts, first }, None) => {
                let sequences = starts.shape()[0] - 1;
                if first.shape() != [sequences] {
                    return Err(Error::shape(
                        op,
                        "offsets",
                        first.shape(),
                        format!("[{sequences}] (sequences)"),
                    ));
                }
                first.expect_aligned(op, "offsets")
            }
            (_, offsets) => offsets.as_ref().map_or(Ok(()), |view| per_token("offsets", view)),
        }
    }

    /// Checks that an output shares no memory with the tables, positions or offsets.
    ///
    /// # Errors
    /// [`Error::Overlap`].
    pub fn check_disjoint(&self, op: &'static str, arg: &'static str, out: &impl Operand) -> Result<()> {
        self.operands().iter().try_for_each(|&(name, input)| {
            let Some(input) = input else { return Ok(()) };
            check_overlap(op, (name, input), (arg, out), Aliasing::Disjoint)
        })
    }

    /// Tables, positions and offsets, for [`check_aliases`](crate::tensor::check_aliases).
    pub fn operands(&self) -> [NamedOperand<'_>; 4] {
        let (_, positions) = self.positions_by_kind();
        let positions = positions.map(|view| view as &dyn Operand);
        [
            (self.first.0, Some(&self.first.1)),
            ("sin", self.sin.as_ref().map(|sin| sin as &dyn Operand)),
            ("positions", positions),
            ("offsets", self.all_offsets().map(|offsets| offsets as &dyn Operand)),
        ]
    }

    /// `hk::Rope::Positions`, and what it goes by.
    fn positions_by_kind(&self) -> (u32, Option<&IndexView<'a>>) {
        match &self.positions {
            Positions::Index => (0, None),
            Positions::Given(view) => (1, Some(view)),
            Positions::Sequences(starts) => (2, Some(starts)),
            Positions::SequencesFrom { starts, .. } => (3, Some(starts)),
        }
    }

    /// Of tokens or of sequences.
    fn all_offsets(&self) -> Option<&IndexView<'a>> {
        match &self.positions {
            Positions::SequencesFrom { first, .. } => Some(first),
            _ => self.offsets.as_ref(),
        }
    }

    /// Whether vectorized kernels of `columns` columns can serve this: half the rotated columns is a multiple of the vector, and rows
    /// of the tables are aligned to 16 bytes.
    pub fn can_vectorize(&self, rope: &Rope, columns: usize) -> bool {
        let aligned = |t: &TensorView<'a, C>| t.rows_aligned(16);
        (rope.rotary / 2).is_multiple_of(columns)
            && aligned(&self.first.1)
            && self.sin.as_ref().is_none_or(aligned)
    }

    /// The kernel's parameters, after [`check`](Self::check). `tokens_first`: positions and offsets are
    /// `[tokens, batch]`.
    ///
    /// # Errors
    /// As [`Launch::input`].
    pub fn params(&self, launch: &mut Launch<'a>, rope: &Rope, tokens_first: bool) -> Result<RopeParams> {
        let mut integers = |arg, view: Option<&IndexView<'a>>| {
            let Some(view) = view else { return Ok(GlobalLayout::ABSENT) };
            if tokens_first { view.transpose(0, 1)?.input(launch, arg) } else { view.input(launch, arg) }
        };
        let ((positions_kind, positions), offsets) = (self.positions_by_kind(), self.all_offsets());
        Ok(RopeParams {
            positions: integers("positions", positions)?,
            offsets: integers("offsets", offsets)?,
            cos: launch.input(self.first.0, &self.first.1)?,
            sin: launch.optional_input("sin", self.sin.as_ref())?,
            rotary: u32::try_from(rope.rotary).unwrap_or(u32::MAX), // no longer than a head, which is checked
            interleaved: (rope.style == RopeStyle::Interleaved).into(),
            full: (rope.table == RopeTableWidth::Full).into(),
            inverse: (rope.direction == RopeDirection::Inverse).into(),
            table_is_f32: (C::DTYPE == DType::F32).into(),
            positions_kind,
            positions_are_i64: positions.is_some_and(IndexView::is_i64).into(),
            offsets_are_i64: offsets.is_some_and(IndexView::is_i64).into(),
        })
    }
}

/// What the scalar `inverse` of a call says.
///
/// # Errors
/// If the operator has no such scalar.
#[cfg(feature = "registry")]
pub fn direction<V: Described>(call: &Call<V>) -> Result<RopeDirection> {
    Ok(if call.bool("inverse")? { RopeDirection::Inverse } else { RopeDirection::Forward })
}

/// The bytes that a call of an operator with arguments `cos`, `sin` or `angles`, and `positions`, has to move: every tensor
/// once, but of tables only the rows of the positions.
#[cfg(feature = "registry")]
pub fn traffic(call: &HostCall) -> Traffic {
    let mut traffic = Traffic::once(call);
    let integers =
        |name| call.optional(name).map(|t| t.to_f64().iter().map(|&v| v as i64).collect::<Vec<_>>());
    let (positions, offsets) = (integers("positions"), integers("offsets"));
    for table in ["cos", "sin", "angles"].into_iter().filter_map(|name| call.optional(name)) {
        let rows = table.shape()[0];
        let Some(positions) = &positions else { continue };
        let mut read: Vec<_> =
            reference::table_rows(positions, offsets.as_deref(), rows).into_iter().flatten().collect();
        read.sort_unstable();
        read.dedup();
        traffic.read -= (table.bytes().len() / rows.max(1) * (rows - read.len())) as u64;
    }
    traffic
}

fn check_table<C: Element>(op: &'static str, arg: &'static str, table: &TensorView<C>) -> Result<()> {
    table.expect_unit_stride(op, arg)?;
    table.expect_aligned(op, arg, size_of::<C>() as u64)
}

/// Rotation again, in f64 and plain loops: what kernels are measured against.
#[cfg(feature = "registry")]
pub mod reference {
    use super::{Rope, RopeDirection, RopeSpan, RopeStyle, RopeTableWidth};

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
            let each = |f: fn(f64) -> f64| angles.iter().map(|&a| f(a)).collect();
            Self { cos: each(f64::cos), sin: each(f64::sin) }
        }

        /// A head rotated by a row of the tables; NaN without a row.
        ///
        /// # Panics
        /// If the head or a row has too few columns.
        pub fn rotate(&self, x: &[f64], row: Option<usize>, rope: &Rope) -> Vec<f64> {
            let Some(row) = row else { return vec![f64::NAN; x.len()] };
            let width = rope.table_width();
            rotate(x, &self.cos[row * width..][..width], &self.sin[row * width..][..width], rope)
        }
    }

    /// A head rotated by a row of cosines and one of sines.
    ///
    /// # Panics
    /// If the head or a row has too few columns.
    pub fn rotate(x: &[f64], cos: &[f64], sin: &[f64], rope: &Rope) -> Vec<f64> {
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
            let (at_a, at_b) = match rope.table {
                RopeTableWidth::Half => (pair, pair),
                RopeTableWidth::Full => (a, b),
            };
            let (a, b) = (first + a, first + b);
            (y[a], y[b]) = if rope.direction == RopeDirection::Inverse {
                (x[a] * cos[at_a] + x[b] * sin[at_b], x[b] * cos[at_b] - x[a] * sin[at_a])
            } else {
                (x[a] * cos[at_a] - x[b] * sin[at_a], x[b] * cos[at_b] + x[a] * sin[at_b])
            };
        }
        y
    }

    /// The table row of each token: its position plus its offset, if the tables have that many.
    pub fn table_rows(positions: &[i64], offsets: Option<&[i64]>, rows: usize) -> Vec<Option<usize>> {
        let row = |(i, &position): (usize, &i64)| {
            let row = position.checked_add(offsets.map_or(0, |offsets| offsets[i]))?;
            usize::try_from(row).ok().filter(|row| *row < rows)
        };
        positions.iter().enumerate().map(row).collect()
    }

    /// The positions of packed tokens: since their sequence began, and for tokens of no sequence one that no table has.
    pub fn positions_in_sequences(tokens: usize, starts: &[i64]) -> Vec<i64> {
        let position = |token: i64| {
            let of = starts.windows(2).find(|range| range[0] <= token && token < range[1]);
            of.map_or(i64::MIN, |range| token - range[0])
        };
        (0..tokens as i64).map(position).collect()
    }
}
