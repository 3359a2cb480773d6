//! The safe function of `hip/fused_add_rmsnorm.hip`.

use crate::kernels;
use crate::rms::{KernelTable, Problem, RmsNormOptions, Scalars, Weight, kernel_table};
use bytemuck::{Pod, Zeroable};
use hk_core::{Aliasing, Float, GlobalLayout, Result, Stream, TensorView, TensorViewMut, check_overlap};

const OP: &str = "fused_add_rmsnorm";

static KERNELS: KernelTable = kernel_table!(&kernels::FUSED_ADD_RMSNORM, "fused_add_rmsnorm");

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    residual_in: GlobalLayout,
    weight: GlobalLayout,
    y: GlobalLayout,
    residual_out: GlobalLayout,
    rstd: GlobalLayout,
    scalars: Scalars,
}

/// Adds a residual and normalises the sum over the last axis: `s = round(x + residual_in)`, `residual_out = s`,
/// `y = rmsnorm(s)`.
///
/// | arg                                     | shape        | dtype                | layout                            |
/// |-----------------------------------------|--------------|----------------------|-----------------------------------|
/// | `x`, `residual_in`, `y`, `residual_out` | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride each over the rest |
/// | `weight`                                | `[cols]`     | as `x`, or `f32`     | contiguous                        |
/// | `rstd`                                  | `[rows]`     | `f32`                | contiguous; may be left out       |
///
/// The norm is that of the *rounded* sum, so that the result has the bits of adding, storing, and calling
/// [`rmsnorm`](crate::rmsnorm()); everything said there about sizes, strides, rounding, invariance and special values
/// holds here. Each of `y` and `residual_out` may be exactly `x` or exactly `residual_in`, but they may not share
/// memory with each other.
///
/// Returns when the launch is queued, before it has run. No rows: nothing is launched.
///
/// # Errors
/// As [`rmsnorm`](crate::rmsnorm()).
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn fused_add_rmsnorm<T: Float, W: Weight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    residual_in: TensorView<T>,
    weight: TensorView<W>,
    mut y: TensorViewMut<T>,
    mut residual_out: TensorViewMut<T>,
    mut rstd: Option<TensorViewMut<f32>>,
    options: RmsNormOptions,
) -> Result<()> {
    let mut problem = Problem::new(OP, &x, &weight, options)?;
    problem.like_x("residual_in", &residual_in)?;
    problem.like_x("y", &y)?;
    problem.like_x("residual_out", &residual_out)?;
    for (name, output) in [("y", &y), ("residual_out", &residual_out)] {
        check_overlap(OP, ("x", &x), (name, output), Aliasing::ExactAliasAllowed)?;
        check_overlap(OP, ("residual_in", &residual_in), (name, output), Aliasing::ExactAliasAllowed)?;
        check_overlap(OP, ("weight", &weight), (name, output), Aliasing::Disjoint)?;
    }
    check_overlap(OP, ("y", &y), ("residual_out", &residual_out), Aliasing::Disjoint)?;
    if let Some(rstd) = &rstd {
        problem.per_row("rstd", rstd)?;
        check_overlap(OP, ("x", &x), ("rstd", rstd), Aliasing::Disjoint)?;
        check_overlap(OP, ("residual_in", &residual_in), ("rstd", rstd), Aliasing::Disjoint)?;
        check_overlap(OP, ("weight", &weight), ("rstd", rstd), Aliasing::Disjoint)?;
        check_overlap(OP, ("y", &y), ("rstd", rstd), Aliasing::Disjoint)?;
        check_overlap(OP, ("residual_out", &residual_out), ("rstd", rstd), Aliasing::Disjoint)?;
    }
    if problem.is_empty() {
        return Ok(());
    }

    let (plan, scalars) = problem.plan(stream, &KERNELS, T::DTYPE)?;
    let mut launch = stream.launch(OP, &plan.kernel);
    let params = Params {
        x: launch.input("x", &x.flatten_rows(OP, "x")?)?,
        residual_in: launch.input("residual_in", &residual_in.flatten_rows(OP, "residual_in")?)?,
        weight: launch.input("weight", &weight)?,
        y: launch.output("y", &mut y.reborrow().flatten_rows(OP, "y")?)?,
        residual_out: launch
            .output("residual_out", &mut residual_out.reborrow().flatten_rows(OP, "residual_out")?)?,
        rstd: launch.optional_output("rstd", rstd.as_mut())?,
        scalars,
    };
    // SAFETY: the checks above make every row of the four matrices `cols` long and `rstd` as long as there are rows,
    // which is what the kernel accesses, whatever the grid; the loader matches `Params` to the kernel.
    unsafe { launch.run(plan.config, &params) }
}
