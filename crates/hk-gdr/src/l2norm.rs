//! The safe functions of `hip/l2norm.hip`.

use crate::kernels::l2norm::Params;
use hk_core::plan::rows::{RowProblem, RowVariant, float_index};
use hk_core::{
    Element, Error, Float, GlobalLayout, KernelRef, Result, Rows, Stream, TensorView, TensorViewMut,
    check_aliases, row_kernels,
};

/// The entry points of each dtype.
const VARIANTS: [RowVariant; 6] = [
    RowVariant::vectorized(128, 16, 4, 8),
    RowVariant::vectorized(512, 16, 1, 8),
    RowVariant::vectorized(8192, 256, 1, 8),
    RowVariant::vectorized(usize::MAX, 256, 1, 16),
    RowVariant::scalar(512, 16),
    RowVariant::scalar(usize::MAX, 256),
];

static FORWARD: [[KernelRef<Params>; VARIANTS.len()]; 3] = row_kernels!(
    Params,
    "l2norm",
    ["bf16", "f16", "f32"],
    ["128", "512", "8192", "long", "512_scalar", "long_scalar"]
);
static BACKWARD: [[KernelRef<Params>; VARIANTS.len()]; 3] = row_kernels!(
    Params,
    "l2norm_bwd",
    ["bf16", "f16", "f32"],
    ["128", "512", "8192", "long", "512_scalar", "long_scalar"]
);

/// Rows over their 2-norm: `y = x rstd`, `rstd = 1 / sqrt(sum(x^2) + eps)`, over the last axis.
///
/// | arg      | shape        | dtype                | layout                                                           |
/// |----------|--------------|----------------------|------------------------------------------------------------------|
/// | `x`, `y` | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`; the other axes collapse to one row stride |
/// | `rstd`   | `[rows]`     | `f32`                | contiguous; optional                                             |
///
/// `f32` arithmetic, one rounding, to nearest even. Batch-invariant. A row of zeros is zeros, with `rstd = 1 / sqrt(eps)`. The sum of
/// squares overflows for values above about `1.8e19 / sqrt(cols)`. The vectorized path needs rows that begin on 16 bytes and are a multiple of
/// 16 bytes long. `y` may be exactly `x`. Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table, [`Empty`](Error::Empty)
/// without columns, [`Argument`](Error::Argument) for an `eps` that is negative or not finite, [`Overlap`](Error::Overlap) if an output
/// shares memory with another tensor otherwise than stated, [`TooLarge`](Error::TooLarge) beyond 2^29 - 1 columns or 2^32 - 1 rows,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
pub fn l2norm<'a, T: Float>(
    stream: &Stream,
    x: TensorView<'a, T>,
    mut y: TensorViewMut<'a, T>,
    mut rstd: Option<TensorViewMut<'a, f32>>,
    eps: f32,
) -> Result<()> {
    const OP: &str = "l2norm";
    let Rows { rows, cols, .. } = x.rows(OP, "x")?;
    let mut problem = RowProblem::new(OP, "x", rows, cols, T::DTYPE)?;
    problem.tensor("x", &x)?;
    problem.shaped("y", &y, x.shape(), "shape of x")?;
    if let Some(rstd) = &rstd {
        expect_roots(OP, &rstd.alias(), rows)?;
    }
    if !(eps >= 0.0 && eps.is_finite()) {
        return Err(Error::argument(OP, "eps", eps, "finite and not negative"));
    }
    check_aliases(
        OP,
        &[("x", Some(&x))],
        &[(("y", Some(&y)), &["x"]), (("rstd", rstd.as_ref().map(|t| t as _)), &[])],
    )?;
    if rows == 0 {
        return Ok(());
    }
    let plan =
        problem.plan(stream, &VARIANTS.map(|v| v.for_dtype(T::DTYPE)), &FORWARD[float_index(T::DTYPE)])?;
    let mut launch = stream.launch(OP);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        dy: GlobalLayout::ABSENT,
        out: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        rstd: launch.optional_output("rstd", rstd.as_mut())?,
        eps,
        batch: plan.batch,
    };
    // SAFETY: the checks above make every row of x and y `cols` long, and `rstd` as long as there are rows, which is what the kernel
    // accesses on any grid.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}

/// The gradient of [`l2norm`] from its results: `dx = rstd (dy - y sum(dy y))`.
///
/// | arg             | shape        | dtype                | layout                                                           |
/// |-----------------|--------------|----------------------|------------------------------------------------------------------|
/// | `y`, `dy`, `dx` | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`; the other axes collapse to one row stride |
/// | `rstd`          | `[rows]`     | `f32`                | contiguous                                                       |
///
/// `f32` arithmetic, one rounding. The formula is exact for the `y` of `f32`; a rounded `y` errs by its rounding. `dx` may be exactly `dy`
/// or `y`. All else is as of [`l2norm`].
///
/// # Errors
/// As [`l2norm`].
pub fn l2norm_bwd<'a, T: Float>(
    stream: &Stream,
    y: TensorView<'a, T>,
    rstd: TensorView<'a, f32>,
    dy: TensorView<'a, T>,
    mut dx: TensorViewMut<'a, T>,
) -> Result<()> {
    const OP: &str = "l2norm_bwd";
    let Rows { rows, cols, .. } = y.rows(OP, "y")?;
    let mut problem = RowProblem::new(OP, "y", rows, cols, T::DTYPE)?;
    problem.tensor("y", &y)?;
    problem.shaped("dy", &dy, y.shape(), "shape of y")?;
    problem.shaped("dx", &dx, y.shape(), "shape of y")?;
    expect_roots(OP, &rstd, rows)?;
    let inputs: [(&'static str, Option<&dyn hk_core::Operand>); 3] =
        [("y", Some(&y)), ("rstd", Some(&rstd)), ("dy", Some(&dy))];
    check_aliases(OP, &inputs, &[(("dx", Some(&dx)), &["y", "dy"])])?;
    if rows == 0 {
        return Ok(());
    }
    let plan =
        problem.plan(stream, &VARIANTS.map(|v| v.for_dtype(T::DTYPE)), &BACKWARD[float_index(T::DTYPE)])?;
    let mut launch = stream.launch(OP);
    let params = Params {
        x: launch.input("y", &y.flatten_rows(OP, "y")?)?,
        dy: launch.input("dy", &dy.flatten_rows(OP, "dy")?)?,
        out: launch.output("dx", &mut dx.reborrow().flatten_rows(OP, "dx")?)?,
        rstd: launch.input("rstd", &rstd)?,
        eps: 0.0,
        batch: plan.batch,
    };
    // SAFETY: as in `l2norm`.
    unsafe { launch.run(&plan.kernel, plan.config, &params) }
}

fn expect_roots<E: Element>(op: &'static str, rstd: &TensorView<E>, rows: usize) -> Result<()> {
    rstd.expect_shape(op, "rstd", [rows])?;
    rstd.expect_contiguous(op, "rstd")?;
    rstd.expect_aligned(op, "rstd", size_of::<E>() as u64)
}
