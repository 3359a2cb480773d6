//! The safe functions of `hip/utils.hip`: what results on the device are compared with.

use crate::kernels::utils::Params;
use hk_core::plan::rows::float_index;
use hk_core::{
    Element, Error, Float, KernelRef, LaunchConfig, NamedOperand, Result, Stream, TensorView, TensorViewMut,
    bf16, check_aliases,
};

static TO_FLOAT: KernelRef<Params> = Params::kernel("convert_bf16_f32");
static FROM_FLOAT: KernelRef<Params> = Params::kernel("convert_f32_bf16");
static DIFF: [KernelRef<Params>; 3] =
    [Params::kernel("diff_bf16"), Params::kernel("diff_f16"), Params::kernel("diff_f32")];
static REDUCE: [KernelRef<Params>; 3] =
    [Params::kernel("reduce_bf16"), Params::kernel("reduce_f16"), Params::kernel("reduce_f32")];
static PARTS: KernelRef<Params> = Params::kernel("reduce_parts");

/// Elements of a block, at a time and of a partial result.
const BLOCK: usize = 256 * 8;
const PART: usize = 16384;

/// A launch of one kernel over `n` elements.
struct Pass<'k> {
    op: &'static str,
    kernel: &'k KernelRef<Params>,
    n: usize,
    blocks: usize,
    choice: bool,
}

impl Pass<'_> {
    fn run<'a, A: Element, Y: Element>(
        self,
        stream: &Stream,
        (a_name, a): (&'static str, &TensorView<'a, A>),
        b: Option<&TensorView<'a, A>>,
        (y_name, y): (&'static str, &mut TensorViewMut<'a, Y>),
    ) -> Result<()> {
        let kernel = stream.kernel(*self.kernel)?;
        let vectorized = a.is_aligned(16) && b.is_none_or(|b| b.is_aligned(16)) && y.is_aligned(16);
        let mut launch = stream.launch(self.op);
        let params = Params {
            a: launch.input_address(a_name, a)?,
            b: match b {
                Some(b) => launch.input_address("y", b)?,
                None => 0,
            },
            y: launch.output_address(y_name, y)?,
            n: self.n as u64,
            vectorized: vectorized.into(),
            choice: self.choice.into(),
        };
        // SAFETY: the callers have checked that the tensors have `n` elements, and that there is a partial result for each block.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(self.blocks), &params) }
    }
}

/// Checks a tensor of one axis; gives its length.
fn vector<E: Element>(op: &'static str, arg: &'static str, tensor: &TensorView<E>) -> Result<usize> {
    let [n] = tensor.dims(op, arg)?;
    tensor.expect_contiguous(op, arg)?;
    tensor.expect_aligned(op, arg, size_of::<E>() as u64)?;
    Ok(n)
}

/// One element of `y` for each of `x`, and of `other`.
fn elementwise<'a, A: Element, Y: Element>(
    stream: &Stream,
    op: &'static str,
    kernel: &KernelRef<Params>,
    (x, other): (TensorView<'a, A>, Option<TensorView<'a, A>>),
    (y_name, mut out): (&'static str, TensorViewMut<'a, Y>),
    choice: bool,
) -> Result<()> {
    let n = vector(op, "x", &x)?;
    out.expect_shape(op, y_name, [n])?;
    vector(op, y_name, &out.alias())?;
    let mut inputs: Vec<NamedOperand> = vec![("x", Some(&x))];
    if let Some(other) = &other {
        other.expect_shape(op, "y", [n])?;
        vector(op, "y", other)?;
        inputs.push(("y", Some(other)));
    }
    check_aliases(op, &inputs, &[((y_name, Some(&out)), &[])])?;
    if n == 0 {
        return Ok(());
    }
    let pass = Pass { op, kernel, n, blocks: n.div_ceil(BLOCK), choice };
    pass.run(stream, ("x", &x), other.as_ref(), (y_name, &mut out))
}

/// `y = x`, exactly. Both are `[n]`, contiguous, and share no memory.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) for other tensors, [`Overlap`](Error::Overlap) if they share
/// memory, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
pub fn bf16_to_float<'a>(stream: &Stream, x: TensorView<'a, bf16>, y: TensorViewMut<'a, f32>) -> Result<()> {
    elementwise(stream, "bf16_to_float", &TO_FLOAT, (x, None), ("y", y), false)
}

/// `y = x`, to nearest even: beyond the largest finite value infinity, subnormals are kept, NaN stays NaN. Both are `[n]`, contiguous, and
/// share no memory.
///
/// # Errors
/// As [`bf16_to_float`].
pub fn float_to_bf16<'a>(stream: &Stream, x: TensorView<'a, f32>, y: TensorViewMut<'a, bf16>) -> Result<()> {
    elementwise(stream, "float_to_bf16", &FROM_FLOAT, (x, None), ("y", y), false)
}

/// `diff = |x - y|` in `f32`. All are `[n]`, contiguous; `diff` shares no memory with another.
///
/// # Errors
/// As [`bf16_to_float`].
pub fn abs_diff<'a, T: Float>(
    stream: &Stream,
    x: TensorView<'a, T>,
    y: TensorView<'a, T>,
    diff: TensorViewMut<'a, f32>,
) -> Result<()> {
    let kernel = &DIFF[float_index(T::DTYPE)];
    elementwise(stream, "abs_diff", kernel, (x, Some(y)), ("diff", diff), false)
}

/// `diff = (x - y)^2` in `f32`. All are `[n]`, contiguous; `diff` shares no memory with another.
///
/// # Errors
/// As [`bf16_to_float`].
pub fn squared_diff<'a, T: Float>(
    stream: &Stream,
    x: TensorView<'a, T>,
    y: TensorView<'a, T>,
    diff: TensorViewMut<'a, f32>,
) -> Result<()> {
    let kernel = &DIFF[float_index(T::DTYPE)];
    elementwise(stream, "squared_diff", kernel, (x, Some(y)), ("diff", diff), true)
}

/// Elements (`f32`) of the workspace of [`sum_reduce`] and [`max_reduce`].
pub fn reduce_workspace(n: usize) -> usize {
    n.div_ceil(PART)
}

fn reduction<'a, T: Float>(
    stream: &Stream,
    op: &'static str,
    x: TensorView<'a, T>,
    mut y: TensorViewMut<'a, f32>,
    mut workspace: TensorViewMut<'a, f32>,
    max: bool,
) -> Result<()> {
    let n = vector(op, "x", &x)?;
    y.expect_shape(op, "y", [1])?;
    vector(op, "y", &y.alias())?;
    let parts = reduce_workspace(n);
    if vector(op, "workspace", &workspace.alias())? < parts {
        let want = format!("[{parts}] or longer (reduce_workspace)");
        return Err(Error::shape(op, "workspace", workspace.shape(), want));
    }
    let outputs: [(NamedOperand, &[_]); 2] = [(("y", Some(&y)), &[]), (("workspace", Some(&workspace)), &[])];
    check_aliases(op, &[("x", Some(&x))], &outputs)?;
    if n > 0 {
        let pass = Pass { op, kernel: &REDUCE[float_index(T::DTYPE)], n, blocks: parts, choice: max };
        pass.run(stream, ("x", &x), None, ("workspace", &mut workspace))?;
    }
    let pass = Pass { op, kernel: &PARTS, n: parts, blocks: 1, choice: max };
    pass.run(stream, ("workspace", &workspace.alias()), None, ("y", &mut y))
}

/// The sum of `x`, `[n]`, to `y`, `[1]`, in `f32`, with a workspace of [`reduce_workspace`] elements; all contiguous, sharing no memory. 0 if
/// there is no element. The same length gives the same order of additions. Two launches.
///
/// # Errors
/// As [`bf16_to_float`].
pub fn sum_reduce<'a, T: Float>(
    stream: &Stream,
    x: TensorView<'a, T>,
    y: TensorViewMut<'a, f32>,
    workspace: TensorViewMut<'a, f32>,
) -> Result<()> {
    reduction(stream, "sum_reduce", x, y, workspace, false)
}

/// The largest element of `x`, as [`sum_reduce`] has the sum; NaN if there is one, negative infinity if there is no element.
///
/// # Errors
/// As [`bf16_to_float`].
pub fn max_reduce<'a, T: Float>(
    stream: &Stream,
    x: TensorView<'a, T>,
    y: TensorViewMut<'a, f32>,
    workspace: TensorViewMut<'a, f32>,
) -> Result<()> {
    reduction(stream, "max_reduce", x, y, workspace, true)
}
