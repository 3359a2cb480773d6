//! The safe functions of `hip/qk_cat.hip` and `hip/qk_rope_cat.hip`.

use crate::kernels::{qk_cat as cat, qk_rope_cat as rope_cat};
use hk_core::plan::heads::{Heads, HeadsAction, spread};
use hk_core::plan::rope::{Rope, RopeElement, RopeSource, RopeTables};
use hk_core::plan::rows::float_index;
use hk_core::{
    Aliasing, Element, Error, Float, Kernel, KernelRef, Launch, LaunchConfig, Operand, Result, Stream,
    TensorView, TensorViewMut, check_overlap,
};

/// The entry points of `hip/qk_cat.hip`: by bytes of an element; vectorized, scalar.
const CAT: [[KernelRef<cat::Params>; 2]; 3] = [
    [cat::Params::kernel("qk_cat_8"), cat::Params::kernel("qk_cat_8_scalar")],
    [cat::Params::kernel("qk_cat_16"), cat::Params::kernel("qk_cat_16_scalar")],
    [cat::Params::kernel("qk_cat_32"), cat::Params::kernel("qk_cat_32_scalar")],
];

/// The entry points of `hip/qk_rope_cat.hip`: for bf16, f16 and f32; vectorized, scalar.
const ROPE_CAT: [[KernelRef<rope_cat::Params>; 2]; 3] = [
    [rope_cat::Params::kernel("qk_rope_cat_bf16"), rope_cat::Params::kernel("qk_rope_cat_bf16_scalar")],
    [rope_cat::Params::kernel("qk_rope_cat_f16"), rope_cat::Params::kernel("qk_rope_cat_f16_scalar")],
    [rope_cat::Params::kernel("qk_rope_cat_f32"), rope_cat::Params::kernel("qk_rope_cat_f32_scalar")],
];

/// The inputs of [`qk_cat`].
#[derive(Debug, Clone, Copy)]
pub struct QkCatInputs<'a, T: Element> {
    /// `[tokens, q_heads, cols1]`.
    pub q1: TensorView<'a, T>,
    /// `[tokens, q_heads, cols2]`.
    pub q2: TensorView<'a, T>,
    /// `[tokens, kv_heads, cols1]`.
    pub k1: TensorView<'a, T>,
    /// `[tokens, kv_heads, cols2]`.
    pub k2: TensorView<'a, T>,
}

/// The inputs of [`qk_rope_cat`].
#[derive(Debug, Clone, Copy)]
pub struct QkRopeCatInputs<'a, T: Element, C: Element> {
    /// `[tokens, q_heads, cols]`: columns of queries without position.
    pub q_nope: TensorView<'a, T>,
    /// `[tokens, q_heads, rotary]`: columns of queries to rotate.
    pub q_pe: TensorView<'a, T>,
    /// `[tokens, kv_heads, cols]`: columns of keys without position.
    pub k_nope: TensorView<'a, T>,
    /// `[tokens, kv_heads, rotary]`: columns of keys to rotate.
    pub k_pe: TensorView<'a, T>,
    /// Cosines, sines and positions `[tokens]`.
    pub tables: RopeTables<'a, C>,
}

/// The outputs of [`qk_cat`] and [`qk_rope_cat`].
#[derive(Debug)]
pub struct QkOutputs<'a, T: Element> {
    /// `[tokens, q_heads, columns of both inputs]`.
    pub q_out: TensorViewMut<'a, T>,
    /// `[tokens, kv_heads, columns of both inputs]`.
    pub k_out: TensorViewMut<'a, T>,
}

/// Concatenates columns of heads, of queries and keys in one launch: `q_out = (q1, q2)`, `k_out = (k1, k2)` along the last
/// axis, bit by bit.
///
/// | arg     | shape                               | dtype                       | layout                     |
/// |---------|-------------------------------------|-----------------------------|----------------------------|
/// | `q1`    | `[tokens, q_heads, cols1]`          | any type of 1, 2 or 4 bytes | unit stride on the columns |
/// | `q2`    | `[tokens, q_heads, cols2]`          | as `q1`                     | unit stride on the columns |
/// | `k1`    | `[tokens, kv_heads, cols1]`         | as `q1`                     | unit stride on the columns |
/// | `k2`    | `[tokens, kv_heads, cols2]`         | as `q1`                     | unit stride on the columns |
/// | `q_out` | `[tokens, q_heads, cols1 + cols2]`  | as `q1`                     | unit stride on the columns |
/// | `k_out` | `[tokens, kv_heads, cols1 + cols2]` | as `q1`                     | unit stride on the columns |
///
/// `q_heads` is a multiple of `kv_heads`. Strides of tokens and heads are free. Inputs may be broadcast
/// ([`Layout::broadcast`](hk_core::Layout::broadcast)), such as one key shared by all heads. The outputs share no memory with
/// each other or an input.
///
/// The vectorized path moves 16 bytes at a time. It needs the columns of each tensor aligned to 16 bytes and a multiple of
/// 16 bytes long.
///
/// Returns when the launch is queued, before it has run. Without tokens, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Empty`](hk_core::Error::Empty) for inputs without columns, [`DType`](hk_core::Error::DType) for elements of 8
/// bytes, [`Overlap`](hk_core::Error::Overlap), [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens or columns,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: DeepSeek-AI 2024, "DeepSeek-V2", equations 17 and 18.
pub fn qk_cat<'a, T: Element>(
    stream: &Stream,
    inputs: QkCatInputs<'a, T>,
    outputs: QkOutputs<'a, T>,
) -> Result<()> {
    const OP: &str = "qk_cat";
    let kernels = match size_of::<T>() {
        1 => CAT[0],
        2 => CAT[1],
        4 => CAT[2],
        _ => return Err(Error::dtype(OP, "q1", T::DTYPE, "a type of 1, 2 or 4 bytes")),
    };
    let (QkCatInputs { q1, q2, k1, k2 }, QkOutputs { q_out, k_out }) = (inputs, outputs);
    let q = Concat::new(OP, [("q1", q1), ("q2", q2)], ("q_out", q_out))?;
    let k = Concat::new(OP, [("k1", k1), ("k2", k2)], ("k_out", k_out))?;
    let parts = concat(OP, q, k, HeadsAction::Copy, |_, _| Ok(()))?;
    let vectors = parts.iter().flatten().all(Heads::can_vectorize);
    let kernel = stream.kernel(kernels[usize::from(!vectors)])?;
    let mut launch = stream.launch(OP);
    let columns = if vectors { 16 / size_of::<T>() } else { 1 };
    let (parts, grid) = spread(&mut launch, OP, parts, columns, stream.device().info())?;
    // SAFETY: the kernel reads and writes the columns of each part, whose tensors have one shape.
    grid.map_or(Ok(()), |grid| unsafe { launch.run(&kernel, grid, &cat::Params { parts }) })
}

/// Concatenates the columns of heads without position and the rotated ones, of queries and keys in one launch:
/// `q_out = (q_nope, rope(q_pe))`, `k_out = (k_nope, rope(k_pe))` along the last axis.
///
/// For each token and head, and the columns `a` and `b` of a pair ([`RopeStyle`](hk_core::plan::rope::RopeStyle)) of `pe`:
/// `out_a = x_a cos_a - x_b sin_a`, `out_b = x_b cos_b + x_a sin_b`, or the transpose of that ([`Inverse`](hk_core::plan::rope::RopeDirection::Inverse)).
///
/// | arg                    | shape                                       | dtype                 | layout                     |
/// |------------------------|---------------------------------------------|-----------------------|----------------------------|
/// | `q_nope`               | `[tokens, q_heads, cols]`                   | `bf16`, `f16`, `f32`  | unit stride on the columns |
/// | `q_pe`                 | `[tokens, q_heads, rotary]`                 | as `q_nope`           | unit stride on the columns |
/// | `k_nope`               | `[tokens, kv_heads, cols]`                  | as `q_nope`           | unit stride on the columns |
/// | `k_pe`                 | `[tokens, kv_heads, rotary]`                | as `q_nope`           | unit stride on the columns |
/// | `cos`, `sin`           | `[positions, rotary / 2]` or `[.., rotary]` | as `q_nope`, or `f32` | unit stride on the columns |
/// | `positions`, `offsets` | `[tokens]`; optional                        | `i32`, `i64`          | any stride                 |
/// | sequence starts        | `[sequences + 1]`; optional                 | `i32`, `i64`          | any stride                 |
/// | `q_out`                | `[tokens, q_heads, cols + rotary]`          | as `q_nope`           | unit stride on the columns |
/// | `k_out`                | `[tokens, kv_heads, cols + rotary]`         | as `q_nope`           | unit stride on the columns |
///
/// `q_heads` is a multiple of `kv_heads`. Strides of tokens and heads are free; inputs may be broadcast. The outputs share no
/// memory with each other or an input. [`Rope::span`] has no meaning here.
///
/// Columns without position are copied bit by bit. The others are rotated in `f32` and rounded once, to nearest even. A token
/// whose position plus offset is no row of the tables gets heads of NaN, in all columns.
///
/// The vectorized path moves 16 bytes at a time. It needs `rotary / 2` columns and `cols` to be multiples of 16 bytes, and all
/// columns and rows of the tables aligned to 16 bytes.
///
/// Returns when the launch is queued, before it has run. Without tokens, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table or [`Rope::rotary`] is not the number of columns of `q_pe`, [`Argument`](hk_core::Error::Argument) if that is odd,
/// [`Empty`](hk_core::Error::Empty) for inputs without columns, [`Overlap`](hk_core::Error::Overlap),
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens or columns,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: DeepSeek-AI 2024, "DeepSeek-V2", equations 14 to 18; Su et al. 2021, "RoFormer", section 3.2.2.
pub fn qk_rope_cat<'a, T: Float, C: RopeElement<T>>(
    stream: &Stream,
    inputs: QkRopeCatInputs<'a, T, C>,
    outputs: QkOutputs<'a, T>,
    rope: Rope,
) -> Result<()> {
    const OP: &str = "qk_rope_cat";
    let QkRopeCatInputs { q_nope, q_pe, k_nope, k_pe, tables } = inputs;
    let QkOutputs { q_out, k_out } = outputs;
    let source = RopeSource::from(tables);
    let [tokens, _, columns] = q_pe.dims(OP, "q_pe")?;
    rope.check(OP, "q_pe", q_pe.shape(), columns)?;
    if rope.rotary != columns {
        return Err(Error::shape(OP, "q_pe", q_pe.shape(), format!("{} columns (rotary)", rope.rotary)));
    }
    source.check(OP, &rope, &[tokens])?;
    let q = Concat::new(OP, [("q_nope", q_nope), ("q_pe", q_pe)], ("q_out", q_out))?;
    let k = Concat::new(OP, [("k_nope", k_nope), ("k_pe", k_pe)], ("k_out", k_out))?;
    let parts = concat(OP, q, k, HeadsAction::Rotate, |arg, out| source.check_disjoint(OP, arg, out))?;

    HeadsLaunch::new(stream, OP, parts, &rope, &source)?.run()
}

/// A launch that rotates or copies columns of heads, whose arguments are checked.
pub(crate) struct HeadsLaunch<'a> {
    launch: Launch<'a>,
    kernel: Kernel<rope_cat::Params>,
    params: rope_cat::Params,
    grid: Option<LaunchConfig>,
}

impl<'a> HeadsLaunch<'a> {
    /// All parts have the same tokens, for which the source is checked; those that are rotated have `rope.rotary` columns.
    pub fn new<T: Element, C: Element>(
        stream: &'a Stream,
        op: &'static str,
        parts: [Option<Heads<'a, T>>; 4],
        rope: &Rope,
        source: &RopeSource<'a, C>,
    ) -> Result<Self> {
        let vector = 16 / size_of::<T>();
        let vectors = source.can_vectorize(rope, vector) && parts.iter().flatten().all(Heads::can_vectorize);
        let kernel = stream.kernel(ROPE_CAT[float_index(T::DTYPE)][usize::from(!vectors)])?;
        let mut launch = stream.launch(op);
        let info = stream.device().info();
        let (parts, grid) = spread(&mut launch, op, parts, if vectors { vector } else { 1 }, info)?;
        let params = rope_cat::Params { rope: source.params(&mut launch, rope, false)?, parts };
        Ok(Self { launch, kernel, params, grid })
    }

    pub fn run(self) -> Result<()> {
        let Self { launch, kernel, params, grid } = self;
        // SAFETY: the kernel reads and writes the columns of each part, whose tensors have one shape; of the tables only rows
        // that it finds to be there, of positions and offsets those of the tokens, or of their sequences, all of which are checked.
        grid.map_or(Ok(()), |grid| unsafe { launch.run(&kernel, grid, &params) })
    }
}

/// Two inputs and their output, checked against each other.
struct Concat<'a, T: Element> {
    from: [(&'static str, TensorView<'a, T>); 2],
    out: (&'static str, TensorViewMut<'a, T>),
}

impl<'a, T: Element> Concat<'a, T> {
    fn new(
        op: &'static str,
        from: [(&'static str, TensorView<'a, T>); 2],
        out: (&'static str, TensorViewMut<'a, T>),
    ) -> Result<Self> {
        let mut columns = [0; 2];
        let [(first, _), _] = from;
        let [tokens, heads, _] = from[0].1.dims(op, first)?;
        for ((arg, view), columns) in from.iter().zip(&mut columns) {
            let [_, _, cols] = view.dims(op, arg)?;
            if view.shape()[..2] != [tokens, heads] {
                let want = format!("[{tokens}, {heads}, {cols}] (tokens and heads of {first})");
                return Err(Error::shape(op, arg, view.shape(), want));
            }
            if cols == 0 {
                return Err(Error::empty(op, arg, 2, view.shape()));
            }
            view.expect_unit_stride(op, arg)?;
            view.expect_aligned(op, arg, size_of::<T>() as u64)?;
            *columns = cols;
        }
        let want = [tokens, heads, columns[0].saturating_add(columns[1])];
        out.1.expect_shape(op, out.0, want)?;
        out.1.expect_unit_stride(op, out.0)?;
        out.1.expect_aligned(op, out.0, size_of::<T>() as u64)?;
        Ok(Self { from, out })
    }

    /// Tokens, heads, columns of the two inputs.
    fn sizes(&self) -> [usize; 4] {
        let [first, second] = [self.from[0].1.shape(), self.from[1].1.shape()];
        [first[0], first[1], first[2], second[2]]
    }

    fn check_disjoint(&self, op: &'static str, out: (&'static str, &impl Operand)) -> Result<()> {
        self.from.iter().try_for_each(|(arg, view)| check_overlap(op, (arg, view), out, Aliasing::Disjoint))
    }

    fn parts(self, second: HeadsAction) -> Result<[Heads<'a, T>; 2]> {
        let [_, _, columns, _] = self.sizes();
        let [(arg1, from1), (arg2, from2)] = self.from;
        let (out_arg, out) = self.out;
        let (to1, to2) = out.split_at(2, columns)?;
        let poisons = second == HeadsAction::Rotate;
        let part = |arg, from, to, action| Heads { arg, from, out_arg, to, action, poisons };
        Ok([part(arg1, from1, to1, HeadsAction::Copy), part(arg2, from2, to2, second)])
    }
}

/// The parts of queries and keys, checked against each other; `check` checks each output.
fn concat<'a, T: Element>(
    op: &'static str,
    q: Concat<'a, T>,
    k: Concat<'a, T>,
    second: HeadsAction,
    check: impl Fn(&'static str, &TensorViewMut<'a, T>) -> Result<()>,
) -> Result<[Option<Heads<'a, T>>; 4]> {
    let ([tokens, q_heads, cols1, cols2], [_, kv_heads, _, _]) = (q.sizes(), k.sizes());
    for ((arg, view), cols) in k.from.iter().zip([cols1, cols2]) {
        view.expect_shape(op, arg, [tokens, kv_heads, cols])?;
    }
    // Without key heads there are no query heads.
    if q_heads != 0 && (kv_heads == 0 || !q_heads.is_multiple_of(kv_heads)) {
        let (arg, view) = &q.from[0];
        return Err(Error::shape(op, arg, view.shape(), format!("a multiple of {kv_heads} heads (of keys)")));
    }
    for (arg, out) in [(q.out.0, &q.out.1), (k.out.0, &k.out.1)] {
        q.check_disjoint(op, (arg, out))?;
        k.check_disjoint(op, (arg, out))?;
        check(arg, out)?;
    }
    check_overlap(op, (q.out.0, &q.out.1), (k.out.0, &k.out.1), Aliasing::Disjoint)?;
    let ([q1, q2], [k1, k2]) = (q.parts(second)?, k.parts(second)?);
    Ok([Some(q1), Some(q2), Some(k1), Some(k2)])
}
