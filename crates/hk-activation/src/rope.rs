//! The safe functions of `hip/rope.hip` that rotate.

use crate::kernels::rope::Params;
use hk_core::plan::heads::{Heads, HeadsAction, spread};
use hk_core::plan::rope::{Rope, RopeAngles, RopeElement, RopeLayout, RopeSource, RopeSpan, RopeTables};
use hk_core::plan::rows::float_index;
use hk_core::{
    Aliasing, Element, Error, Float, KernelRef, Result, Stream, TensorView, TensorViewMut, check_overlap,
};

/// Parts of a launch, at most: rotated and copied columns of queries and of keys, and values.
pub(crate) const PARTS: usize = 5;

/// Entry points for a dtype: vectorized and scalar, from tables and from angles; and vectorized from tables where both vectors
/// of a lane share their entries.
struct Kernels {
    shared: KernelRef<Params>,
    tables: [KernelRef<Params>; 2],
    angles: [KernelRef<Params>; 2],
}

macro_rules! kernels {
    ($dtype:literal) => {
        Kernels {
            shared: kernels!(@ $dtype, "shared"),
            tables: [kernels!(@ $dtype, "tables"), kernels!(@ $dtype, "tables_scalar")],
            angles: [kernels!(@ $dtype, "angles"), kernels!(@ $dtype, "angles_scalar")],
        }
    };
    (@ $dtype:literal, $variant:literal) => {
        const { Params::kernel(concat!("rope_", $dtype, "_", $variant)) }
    };
}

static KERNELS: [Kernels; 3] = [kernels!("bf16"), kernels!("f16"), kernels!("f32")];

/// Rotary position embedding from tables of cosines and sines.
///
/// For each token and head, and the columns `a` and `b` of a pair ([`RopeStyle`](hk_core::plan::rope::RopeStyle)):
/// `y_a = x_a cos_a - x_b sin_a`, `y_b = x_b cos_b + x_a sin_b`, or the transpose of that ([`Inverse`](hk_core::plan::rope::RopeDirection::Inverse)). Columns that are
/// not rotated ([`Rope::rotary`], [`RopeSpan`]) are copied bit by bit.
///
/// | arg                    | shape                                          | dtype                | layout                     |
/// |------------------------|------------------------------------------------|----------------------|----------------------------|
/// | `x`, `y`               | by [`RopeLayout`]                              | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `cos`, `sin`           | `[positions, rotary / 2]` or `[.., rotary]`    | as `x`, or `f32`     | unit stride on the columns |
/// | `positions`, `offsets` | `[batch, tokens]`, `[tokens, batch]` (`Sbhd`) or `[tokens]` (`Thd`); optional | `i32`, `i64` | any strides |
/// | sequence starts        | `[sequences + 1]`; packed tokens (`Thd`) only  | `i32`, `i64`         | any stride                 |
///
/// Heads have any even number of columns. The table row of a token is its position plus its offset. A token whose row the
/// tables do not have gets heads of NaN, in all columns.
///
/// `f32` arithmetic, one rounding to the type of `y`, to nearest even. Results are batch-invariant: the bits of a head depend
/// on that head and its table row alone. Permuting columns from one style to the other permutes them.
///
/// `y` may be exactly `x` ([`TensorViewMut::alias`]); columns that are not rotated are then not moved. Otherwise `y` shares no
/// memory with an input.
///
/// The vectorized path moves 16 bytes at a time. It needs `rotary / 2` columns, heads and the columns that are not rotated to be
/// multiples of 16 bytes, and all of them and the rows of the tables aligned to 16 bytes.
///
/// Returns when the launch is queued, before it has run. Without tokens or heads, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table or has fewer columns than [`Rope::rotary`], [`Argument`](hk_core::Error::Argument) for an odd [`Rope::rotary`] or
/// sequence starts beside tokens that are not packed, [`Overlap`](hk_core::Error::Overlap) if `y` shares memory with another
/// tensor otherwise than stated, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens or columns,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// # Examples
/// ```
/// use hk_activation::rope_cached;
/// use hk_core::plan::rope::{Positions, Rope, RopeDirection, RopeLayout, RopeSpan, RopeStyle, RopeTableWidth, RopeTables};
/// use hk_core::{Device, Result};
///
/// # fn main() -> Result<()> {
/// # if std::env::var_os("HK_DEVICE").is_none() && hk_activation::OPERATORS[0].kernels[0].images().is_empty() { return Ok(()) }
/// let stream = Device::open_default()?.create_stream()?;
/// // Two tokens of one head of four columns, rotated by 0 and by a right angle.
/// let x = stream.upload(&[1.0f32, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0])?;
/// let (cos, sin) = (stream.upload(&[1.0f32, 1.0, 0.0, 0.0])?, stream.upload(&[0.0f32, 0.0, 1.0, 1.0])?);
/// let mut y = stream.alloc_zeroed::<f32>(8)?;
/// let rope = Rope {
///     style: RopeStyle::Neox,
///     table: RopeTableWidth::Half,
///     rotary: 4,
///     span: RopeSpan::First,
///     direction: RopeDirection::Forward,
/// };
/// let (cos, sin) = (cos.view([2, 2])?, sin.view([2, 2])?);
/// let tables = RopeTables { cos, sin, positions: Positions::Index, offsets: None };
/// rope_cached(&stream, x.view([2, 1, 4])?, tables, y.view_mut([2, 1, 4])?, rope, RopeLayout::Thd)?;
/// assert_eq!(stream.download(&y)?, [1.0, 2.0, 3.0, 4.0, -3.0, -4.0, 1.0, 2.0]);
/// # Ok(()) }
/// ```
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

/// Rotary position embedding from angles in radians; the kernel computes their cosines and sines.
///
/// For each token and head, and the columns `a` and `b` of a pair ([`RopeStyle`](hk_core::plan::rope::RopeStyle)):
/// `y_a = x_a cos(angle_a) - x_b sin(angle_a)`, `y_b = x_b cos(angle_b) + x_a sin(angle_b)`, or the transpose of that
/// ([`Inverse`](hk_core::plan::rope::RopeDirection::Inverse)). Columns that are not rotated ([`Rope::rotary`], [`RopeSpan`]) are copied bit by bit.
///
/// | arg                    | shape                                          | dtype                | layout                     |
/// |------------------------|------------------------------------------------|----------------------|----------------------------|
/// | `x`, `y`               | by [`RopeLayout`]                              | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `angles`               | `[positions, rotary / 2]` or `[.., rotary]`    | as `x`, or `f32`     | unit stride on the columns |
/// | `positions`, `offsets` | `[batch, tokens]`, `[tokens, batch]` (`Sbhd`) or `[tokens]` (`Thd`); optional | `i32`, `i64` | any strides |
/// | sequence starts        | `[sequences + 1]`; packed tokens (`Thd`) only  | `i32`, `i64`         | any stride                 |
///
/// Heads have any even number of columns. The table row of a token is its position plus its offset. A token whose row
/// `angles` does not have gets heads of NaN, in all columns. Angles in `bf16` or `f16` have 8 or 11 significant bits: `f32` is
/// what a model needs beyond a few positions.
///
/// `f32` arithmetic, one rounding to the type of `y`, to nearest even. Cosines and sines are within 9.4e-8 up to 1e5 radians and
/// within 1.2e-7 up to 2^30. A pair with a larger angle, or one that is not finite, becomes NaN. Results are batch-invariant.
///
/// `y` may be exactly `x` ([`TensorViewMut::alias`]); columns that are not rotated are then not moved. Otherwise `y` shares no
/// memory with an input.
///
/// Returns when the launch is queued, before it has run. Without tokens or heads, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table or has fewer columns than [`Rope::rotary`], [`Argument`](hk_core::Error::Argument) for an odd [`Rope::rotary`] or
/// sequence starts beside tokens that are not packed, [`Overlap`](hk_core::Error::Overlap) if `y` shares memory with another
/// tensor otherwise than stated, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens or columns,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2.2.
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

/// The heads that [`rope_qk`] rotates.
#[derive(Debug, Clone, Copy)]
pub struct RopeQkInputs<'a, T: Element> {
    /// The queries, by [`RopeLayout`].
    pub q: TensorView<'a, T>,
    /// The keys: shape of `q` but for the number of heads.
    pub k: TensorView<'a, T>,
}

/// The outputs of [`rope_qk`].
#[derive(Debug)]
pub struct RopeQkOutputs<'a, T: Element> {
    /// Shape of `q`; may be exactly `q`.
    pub q_out: TensorViewMut<'a, T>,
    /// Shape of `k`; may be exactly `k`.
    pub k_out: TensorViewMut<'a, T>,
}

/// Rotary position embedding of queries and keys in one launch, from [`RopeTables`] or [`RopeAngles`].
///
/// For each token and head of `q` and of `k`, and the columns `a` and `b` of a pair
/// ([`RopeStyle`](hk_core::plan::rope::RopeStyle)): `y_a = x_a cos_a - x_b sin_a`, `y_b = x_b cos_b + x_a sin_b`, or the transpose of
/// that ([`Inverse`](hk_core::plan::rope::RopeDirection::Inverse)). Columns that are not rotated ([`Rope::rotary`], [`RopeSpan`]) are copied bit by bit.
///
/// | arg                       | shape                                          | dtype                | layout                     |
/// |---------------------------|------------------------------------------------|----------------------|----------------------------|
/// | `q`, `q_out`              | by [`RopeLayout`]                              | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `k`, `k_out`              | as `q`, any number of heads                    | as `q`               | unit stride on the columns |
/// | `cos`, `sin`; or `angles` | `[positions, rotary / 2]` or `[.., rotary]`    | as `q`, or `f32`     | unit stride on the columns |
/// | `positions`, `offsets`    | `[batch, tokens]`, `[tokens, batch]` (`Sbhd`) or `[tokens]` (`Thd`); optional | `i32`, `i64` | any strides |
/// | sequence starts           | `[sequences + 1]`; packed tokens (`Thd`) only  | `i32`, `i64`         | any stride                 |
///
/// Heads have any even number of columns. The table row of a token is its position plus its offset. A token whose row the
/// tables do not have gets heads of NaN, in all columns.
///
/// `f32` arithmetic, one rounding, to nearest even. Results are batch-invariant, and bitwise identical to those of
/// [`rope_cached`] or [`rope_freqs`] of `q` and of `k`.
///
/// `q_out` may be exactly `q`, and `k_out` exactly `k` ([`TensorViewMut::alias`]). Otherwise outputs share no memory with each
/// other or an input.
///
/// Returns when the launch is queued, before it has run. Without tokens or heads, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table or has fewer columns than [`Rope::rotary`], [`Argument`](hk_core::Error::Argument) for an odd [`Rope::rotary`] or
/// sequence starts beside tokens that are not packed, [`Overlap`](hk_core::Error::Overlap) if an output shares memory with
/// another tensor otherwise than stated, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens or columns,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2.2.
pub fn rope_qk<'a, T: Float, C: RopeElement<T>>(
    stream: &Stream,
    inputs: RopeQkInputs<'a, T>,
    source: impl Into<RopeSource<'a, C>>,
    outputs: RopeQkOutputs<'a, T>,
    rope: Rope,
    layout: RopeLayout,
) -> Result<()> {
    const OP: &str = "rope_qk";
    let source = source.into();
    let q = Rotated::new(OP, ("q", inputs.q), ("q_out", outputs.q_out), &rope, layout)?;
    let k = Rotated::new(OP, ("k", inputs.k), ("k_out", outputs.k_out), &rope, layout)?;
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

/// Heads and their output, checked against each other and against the rotation.
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

    /// The columns that are rotated, and the others.
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

/// The parts of heads, `[batches, tokens, heads, head_dim]` or packed: the columns that are rotated, and the others.
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
    let vectors = source.can_vectorize(rope, vector) && parts.iter().flatten().all(Heads::can_vectorize);
    let kernels = &KERNELS[float_index(T::DTYPE)];
    let kernel = match (source.is_angles(), vectors) {
        (true, _) => kernels.angles[usize::from(!vectors)],
        (false, true) if source.is_shared(rope) => kernels.shared,
        (false, _) => kernels.tables[usize::from(!vectors)],
    };
    let kernel = stream.kernel(kernel)?;
    let mut launch = stream.launch(op);
    let info = stream.device().info();
    let (parts, grid) = spread(&mut launch, op, parts, if vectors { vector } else { 1 }, info)?;
    let params = Params { rope: source.params(&mut launch, rope, tokens_first)?, parts };
    // SAFETY: the kernel reads and writes the columns of each part, whose tensors have one shape, of every token and head;
    // of the tables only rows that it finds to be there, of positions and offsets the tokens, all of which are checked.
    grid.map_or(Ok(()), |grid| unsafe { launch.run(&kernel, grid, &params) })
}
