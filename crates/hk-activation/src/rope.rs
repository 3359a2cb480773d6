//! The safe functions of `hip/rope.hip` that rotate.

use crate::kernels;
use bytemuck::{Pod, Zeroable};
use hk_core::heads::{Heads, HeadsAction, HeadsPart, spread};
use hk_core::rope::{
    Rope, RopeAngles, RopeElement, RopeLayout, RopeParams, RopeSource, RopeSpan, RopeTables,
};
use hk_core::rowwise::float_index;
use hk_core::{Aliasing, Element, Error, Float, Result, Stream, TensorView, TensorViewMut, check_overlap};

/// Parts of a launch, at most: those of queries that are rotated and that are not, the same of keys, and values.
pub(crate) const PARTS: usize = 5;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    rope: RopeParams,
    parts: [HeadsPart; PARTS],
}

/// Entry points for a dtype: by vectors and by elements, from tables and from angles; by vectors from tables of which both
/// vectors of a lane have the same entries.
struct Names {
    shared: &'static str,
    tables: [&'static str; 2],
    angles: [&'static str; 2],
}

macro_rules! names {
    ($dtype:literal) => {
        Names {
            shared: concat!("rope_", $dtype, "_shared"),
            tables: [concat!("rope_", $dtype, "_tables"), concat!("rope_", $dtype, "_tables_elements")],
            angles: [concat!("rope_", $dtype, "_angles"), concat!("rope_", $dtype, "_angles_elements")],
        }
    };
}

static NAMES: [Names; 3] = [names!("bf16"), names!("f16"), names!("f32")];

/// Rotates heads by the angles of their tokens, whose cosines and sines come from tables.
///
/// For each token and head, with the columns `a` and `b` of a pair ([`RopeStyle`](hk_core::rope::RopeStyle)):
/// `y_a = x_a cos_a - x_b sin_a`, `y_b = x_b cos_b + x_a sin_b`; or the transpose of that ([`Rope::inverse`]). Columns that
/// are not rotated ([`Rope::rotary`], [`RopeSpan`]) are copied bit by bit.
///
/// | arg                         | shape                                   | dtype                | layout                                  |
/// |-----------------------------|-----------------------------------------|----------------------|-----------------------------------------|
/// | `x`, `y`                    | what [`RopeLayout`] says                | `bf16`, `f16`, `f32` | unit stride on the columns of a head    |
/// | `cos`, `sin`                | `[positions, rotary / 2]` or `[.., rotary]` | as `x`, or `f32` | unit stride on the columns              |
/// | `positions`, `offsets`      | that of the tokens; may be left out     | `i32`, `i64`         | any strides                             |
/// | starts of sequences         | `[sequences + 1]`, for packed tokens    | `i32`, `i64`         | any stride                              |
///
/// Heads of any even number of columns; 16 bytes are moved at a time where the two columns of a pair are a multiple of 16
/// bytes apart (`rotary / 2` columns, in either style), heads and the part that is not rotated are a multiple of 16 bytes
/// long, and all of them and the rows of the tables begin on 16 bytes. `y` may be exactly `x` ([`TensorViewMut::alias`]); what
/// is not rotated is then left alone.
///
/// A token's table row is its position plus its offset. Tokens whose row is not one of the tables get heads of NaN, in all
/// their columns. Arithmetic is `f32`, with one rounding to the type of `y`, to nearest even. The bits of a head depend on
/// that head and its table row alone, and permuting columns from one style to the other permutes them.
///
/// Returns when the launch is queued, before it has run. No tokens or no heads: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table or has fewer columns than are to be rotated, [`Argument`](hk_core::Error::Argument) for an odd
/// [`Rope::rotary`] or starts of sequences beside tokens that are not packed, [`Overlap`](hk_core::Error::Overlap) if `y`
/// shares memory with another tensor otherwise than said, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens or
/// columns, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and launching a kernel can answer. Nothing is
/// written then.
///
/// Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2.2.
pub fn rope_cached<T: Float, C: RopeElement<T>>(
    stream: &Stream,
    x: TensorView<T>,
    tables: RopeTables<C>,
    y: TensorViewMut<T>,
    rope: Rope,
    layout: RopeLayout,
) -> Result<()> {
    rope_one("rope_cached", stream, x, tables.into(), y, rope, layout)
}

/// As [`rope_cached`], with the angles themselves, in radians: the kernel finds their cosines and sines, each within 9.4e-8 up
/// to 1e5 radians and within 1.2e-7 up to 2^30; heads that are rotated by larger angles, or angles that are not finite, become
/// NaN in the columns of such a pair.
///
/// | arg      | shape                                       | dtype            | layout                     |
/// |----------|---------------------------------------------|------------------|----------------------------|
/// | `angles` | `[positions, rotary / 2]` or `[.., rotary]` | as `x`, or `f32` | unit stride on the columns |
///
/// Angles in bf16 or f16 are exact to 8 or 11 bits only: `f32` is what a model needs beyond a few positions.
///
/// # Errors
/// As [`rope_cached`].
///
/// Source: Su et al. 2021, section 3.2.2.
pub fn rope_freqs<T: Float, C: RopeElement<T>>(
    stream: &Stream,
    x: TensorView<T>,
    angles: RopeAngles<C>,
    y: TensorViewMut<T>,
    rope: Rope,
    layout: RopeLayout,
) -> Result<()> {
    rope_one("rope_freqs", stream, x, angles.into(), y, rope, layout)
}

/// Rotates queries and keys in one launch: [`rope_cached`] (given [`RopeTables`]) or [`rope_freqs`] (given [`RopeAngles`])
/// of `q` and of `k`, which may have different numbers of heads.
///
/// `q_out` may be exactly `q`, and `k_out` exactly `k`.
///
/// # Errors
/// As [`rope_cached`]; [`Shape`](hk_core::Error::Shape) too if `k` differs from `q` in more than its heads.
///
/// Source: Su et al. 2021, section 3.2.2.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn rope_qk<'a, T: Float, C: RopeElement<T>>(
    stream: &Stream,
    q: TensorView<'a, T>,
    k: TensorView<'a, T>,
    source: impl Into<RopeSource<'a, C>>,
    q_out: TensorViewMut<'a, T>,
    k_out: TensorViewMut<'a, T>,
    rope: Rope,
    layout: RopeLayout,
) -> Result<()> {
    const OP: &str = "rope_qk";
    let source = source.into();
    let q = Rotated::new(OP, ("q", q), ("q_out", q_out), &rope, layout)?;
    let k = Rotated::new(OP, ("k", k), ("k_out", k_out), &rope, layout)?;
    let want = q.shape_with_heads_of(&k);
    if k.x.shape() != want {
        return Err(Error::shape(OP, "k", k.x.shape(), format!("{want:?} (q, but for the heads)")));
    }
    source.check(OP, &rope, &q.tokens())?;
    check_overlap(OP, ("k", &k.x), ("q_out", &q.y), Aliasing::Disjoint)?;
    check_overlap(OP, ("q", &q.x), ("k_out", &k.y), Aliasing::Disjoint)?;
    check_overlap(OP, ("q_out", &q.y), ("k_out", &k.y), Aliasing::Disjoint)?;
    source.check_disjoint(OP, "q_out", &q.y)?;
    source.check_disjoint(OP, "k_out", &k.y)?;
    let ([q_span, q_rest], [k_span, k_rest]) = (q.parts(&rope)?, k.parts(&rope)?);
    launch(OP, stream, source, &rope, [q_span, q_rest, k_span, k_rest, None], layout == RopeLayout::Sbhd)
}

fn rope_one<'a, T: Float, C: RopeElement<T>>(
    op: &'static str,
    stream: &Stream,
    x: TensorView<'a, T>,
    source: RopeSource<'a, C>,
    y: TensorViewMut<'a, T>,
    rope: Rope,
    layout: RopeLayout,
) -> Result<()> {
    let tensor = Rotated::new(op, ("x", x), ("y", y), &rope, layout)?;
    source.check(op, &rope, &tensor.tokens())?;
    source.check_disjoint(op, "y", &tensor.y)?;
    let [span, rest] = tensor.parts(&rope)?;
    launch(op, stream, source, &rope, [span, rest, None, None, None], layout == RopeLayout::Sbhd)
}

/// Heads and where they go, checked against each other and against the rotation.
struct Rotated<'a, T: Element> {
    names: [&'static str; 2],
    x: TensorView<'a, T>,
    y: TensorViewMut<'a, T>,
    layout: RopeLayout,
    head_dim: usize,
}

impl<'a, T: Float> Rotated<'a, T> {
    fn new(
        op: &'static str,
        (x_name, x): (&'static str, TensorView<'a, T>),
        (y_name, y): (&'static str, TensorViewMut<'a, T>),
        rope: &Rope,
        layout: RopeLayout,
    ) -> Result<Self> {
        let head_dim = match layout {
            RopeLayout::Thd => x.dims::<3>(op, x_name)?[2],
            RopeLayout::Bhsd | RopeLayout::Sbhd | RopeLayout::Bshd => x.dims::<4>(op, x_name)?[3],
        };
        rope.check(op, x_name, x.shape(), head_dim)?;
        expect_even(op, x_name, x.shape(), head_dim)?;
        if y.shape() != x.shape() {
            return Err(Error::shape(op, y_name, y.shape(), format!("{:?} (shape of {x_name})", x.shape())));
        }
        x.expect_unit_stride(op, x_name)?;
        y.expect_unit_stride(op, y_name)?;
        x.expect_aligned(op, x_name, size_of::<T>() as u64)?;
        y.expect_aligned(op, y_name, size_of::<T>() as u64)?;
        check_overlap(op, (x_name, &x), (y_name, &y), Aliasing::ExactAliasAllowed)?;
        Ok(Self { names: [x_name, y_name], x, y, layout, head_dim })
    }

    /// The shape that positions have.
    fn tokens(&self) -> Vec<usize> {
        match (self.layout, self.x.shape()) {
            (RopeLayout::Bhsd, &[batches, _, tokens, ..]) => vec![batches, tokens],
            (RopeLayout::Thd, &[tokens, ..]) => vec![tokens],
            (_, shape) => shape[..2].to_vec(),
        }
    }

    /// The shape with another number of heads.
    fn shape_with_heads_of(&self, other: &Self) -> Vec<usize> {
        let axis = match self.layout {
            RopeLayout::Bhsd | RopeLayout::Thd => 1,
            RopeLayout::Sbhd | RopeLayout::Bshd => 2,
        };
        let mut shape = self.x.shape().to_vec();
        shape[axis] = other.x.shape()[axis];
        shape
    }

    /// What is rotated and what is not.
    fn parts(self, rope: &Rope) -> Result<[Option<Heads<'a, T>>; 2]> {
        let Self { names, x, y, layout, head_dim } = self;
        let in_place = x.addr() == y.addr() && x.layout() == y.layout();
        let (x, y) = match layout {
            RopeLayout::Bhsd => (x.transpose(1, 2)?, y.transpose(1, 2)?),
            RopeLayout::Sbhd => (x.transpose(0, 1)?, y.transpose(0, 1)?),
            RopeLayout::Bshd | RopeLayout::Thd => (x, y),
        };
        rotated_parts(names, x, y, head_dim, rope, in_place)
    }
}

/// Checks that heads have an even number of columns.
pub(crate) fn expect_even(
    op: &'static str,
    arg: &'static str,
    shape: &[usize],
    head_dim: usize,
) -> Result<()> {
    if head_dim.is_multiple_of(2) {
        return Ok(());
    }
    Err(Error::shape(op, arg, shape, "heads of an even number of columns"))
}

/// The parts of heads, `[batches, tokens, heads, head_dim]` or packed: what is rotated and what is not.
pub(crate) fn rotated_parts<'a, T: Float>(
    [arg, out_arg]: [&'static str; 2],
    from: TensorView<'a, T>,
    to: TensorViewMut<'a, T>,
    head_dim: usize,
    rope: &Rope,
    in_place: bool,
) -> Result<[Option<Heads<'a, T>>; 2]> {
    let columns = from.shape().len() - 1;
    let begin = match rope.span {
        RopeSpan::First => rope.rotary,
        RopeSpan::Last => head_dim - rope.rotary,
    };
    let (before, after) = to.split_at(columns, begin)?;
    let first = rope.span == RopeSpan::First;
    let parts = [(first, 0..begin, before), (!first, begin..head_dim, after)].map(|(rotates, range, to)| {
        let action = match (rotates, in_place) {
            (true, _) => HeadsAction::Rotate,
            (false, true) => HeadsAction::Leave,
            (false, false) => HeadsAction::Copy,
        };
        let from = from.slice(columns, range.clone())?;
        Ok((!range.is_empty()).then_some(Heads { arg, from, out_arg, to, action, poisons: true }))
    });
    let [first, second] = parts;
    Ok([first?, second?])
}

/// Launches the kernel over these parts.
pub(crate) fn launch<'a, T: Float, C: RopeElement<T>>(
    op: &'static str,
    stream: &Stream,
    source: RopeSource<'a, C>,
    rope: &Rope,
    parts: [Option<Heads<'a, T>>; PARTS],
    tokens_first: bool,
) -> Result<()> {
    let vector = 16 / size_of::<T>();
    let vectors = source.by_vectors(rope, vector) && parts.iter().flatten().all(Heads::by_vectors);
    let names = &NAMES[float_index(T::DTYPE)];
    let name = match (source.is_angles(), vectors) {
        (true, _) => names.angles[usize::from(!vectors)],
        (false, true) if source.is_shared(rope) => names.shared,
        (false, _) => names.tables[usize::from(!vectors)],
    };
    let kernel = stream.kernel(&kernels::ROPE, name)?;
    let mut launch = stream.launch(op, &kernel);
    let info = stream.device().info();
    let (parts, grid) = spread(&mut launch, op, parts, if vectors { vector } else { 1 }, info)?;
    let params = Params { rope: source.params(&mut launch, rope, tokens_first)?, parts };
    // SAFETY: the kernel reads and writes the columns of each part, whose tensors have one shape, of every token and head;
    // of the tables only rows that it finds to be there, of positions and offsets the tokens, all of which are checked.
    // The loader matches `Params` to the kernel.
    grid.map_or(Ok(()), |grid| unsafe { launch.run(grid, &params) })
}
