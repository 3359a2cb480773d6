//! The safe function of `hip/softmax.hip`.

use crate::{ActivationOutput, kernels};
use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::{RowProblem, RowVariant, float_index};
use hk_core::{
    Aliasing, DType, Error, Float, GlobalLayout, Kernel, LaunchConfig, Result, Rows, Stream, TensorView,
    TensorViewMut, check_overlap, row_kernels,
};

const OP: &str = "softmax";

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    y: GlobalLayout,
    parts: u64,
    y_is_f32: u32,
    batch: u32,
    segments: u32,
    pad: u32,
}

/// The entry points for each dtype that have rows in registers.
const VARIANTS: [RowVariant; 14] = [
    RowVariant::vectors(128, 16, 4, 8),
    RowVariant::vectors(512, 16, 1, 8),
    RowVariant::vectors(1024, 64, 1, 16),
    RowVariant::vectors(2048, 64, 1, 8),
    RowVariant::vectors(4096, 64, 1, 12),
    RowVariant::vectors(8192, 256, 1, 8),
    RowVariant::vectors(16384, 256, 1, 8),
    RowVariant::vectors(WIDEST, 512, 1, 16),
    RowVariant::elements(512, 16),
    RowVariant::elements(2048, 64),
    RowVariant::elements(4096, 64),
    RowVariant::elements(8192, 256),
    RowVariant::elements(16384, 256),
    RowVariant::elements(WIDEST, 512),
];
/// Longest row that stays in registers.
pub(crate) const WIDEST: usize = 32768;
/// Columns of a segment of longer rows, which a block takes, its threads, and how many waves a CU holds.
const SEGMENT: usize = 4096;
const THREADS: usize = 256;
const WAVES_PER_CU: usize = 16;

static KERNELS: [[&str; VARIANTS.len()]; 3] = row_kernels!(
    "softmax",
    ["bf16", "f16", "f32"],
    [
        "128",
        "512",
        "1024",
        "2048",
        "4096",
        "8192",
        "16384",
        "32768",
        "512_elements",
        "2048_elements",
        "4096_elements",
        "8192_elements",
        "16384_elements",
        "32768_elements"
    ]
);
static LONG_KERNELS: [[&str; 4]; 3] =
    row_kernels!("softmax", ["bf16", "f16", "f32"], ["parts", "apply", "parts_elements", "apply_elements"]);

/// Length of the workspace that [`softmax`] needs for this many rows and columns: 0, so none, up to 32768 columns.
pub fn softmax_workspace(rows: usize, cols: usize) -> usize {
    if cols <= WIDEST { 0 } else { rows.saturating_mul(2 * cols.div_ceil(SEGMENT)) }
}

/// Softmax over the last axis: `y = exp(x - m) / sum(exp(x - m))` with `m = max(x)`.
///
/// | arg         | shape        | dtype                | layout                                                      |
/// |-------------|--------------|----------------------|-------------------------------------------------------------|
/// | `x`         | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride over the rest         |
/// | `y`         | `[.., cols]` | as `x`, or `f32`     | likewise                                                    |
/// | `workspace` | `[n]`        | `f32`                | contiguous; `n` at least [`softmax_workspace`], else left out |
///
/// Any number of rows and columns, and any row strides; 16 bytes are moved at a time where all rows begin on a multiple of
/// 16 bytes and are a multiple of 16 bytes long. `y` may be exactly `x` ([`TensorViewMut::alias`]).
///
/// Arithmetic is `f32`, with one rounding to the type of `y`, to nearest even. The bits of a row depend on that row alone:
/// not on the other rows, its place, strides or alignment. A row with a NaN or with positive infinity is all NaN, and so is
/// one of nothing but negative infinities; otherwise negative infinities give 0. Results below 2^-126 may be 0.
///
/// Rows of up to 32768 columns are read once. Longer ones are cut into segments of 4096 columns, which blocks share, and are
/// read twice; what the workspace holds before does not matter, and after it has no meaning.
///
/// Returns when the work is queued, before it has run. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for zero columns, [`Overlap`](hk_core::Error::Overlap) if a tensor
/// that is written shares memory with another otherwise than said, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^29 - 1
/// columns, 2^32 - 1 rows or as long a workspace, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and
/// launching a kernel can answer. Nothing is written then.
pub fn softmax<T: Float, Y: ActivationOutput<T>>(
    stream: &Stream,
    x: TensorView<T>,
    mut y: TensorViewMut<Y>,
    mut workspace: Option<TensorViewMut<f32>>,
) -> Result<()> {
    let Rows { rows, cols, .. } = x.rows(OP, "x")?;
    let mut problem = RowProblem::new(OP, "x", rows, cols, T::DTYPE)?;
    problem.tensor("x", &x)?;
    problem.shaped("y", &y, x.shape(), "shape of x")?;
    check_overlap(OP, ("x", &x), ("y", &y), Aliasing::ExactAliasAllowed)?;
    let needed = softmax_workspace(rows, cols);
    if let Some(workspace) = &workspace {
        workspace.dims::<1>(OP, "workspace")?;
        workspace.expect_contiguous(OP, "workspace")?;
        workspace.expect_aligned(OP, "workspace", 2 * size_of::<f32>() as u64)?;
        check_overlap(OP, ("x", &x), ("workspace", workspace), Aliasing::Disjoint)?;
        check_overlap(OP, ("y", &y), ("workspace", workspace), Aliasing::Disjoint)?;
    }
    let given = workspace.as_ref().map_or(0, |w| w.numel());
    if given < needed {
        let want = format!("[{needed}] or longer (softmax_workspace({rows}, {cols}))");
        return Err(Error::shape(OP, "workspace", [given], want));
    }
    if rows == 0 {
        return Ok(());
    }

    let dtype = float_index(T::DTYPE);
    let x = x.flatten_rows(OP, "x")?;
    let mut y = y.reborrow().flatten_rows(OP, "y")?;
    let mut run = |kernel: &Kernel, config: LaunchConfig, batch: u32, segments: usize| {
        let mut launch = stream.launch(OP, kernel);
        let params = Params {
            x: launch.input("x", &x)?,
            y: launch.output("y", &mut y.reborrow())?,
            parts: launch.optional_output("workspace", workspace.as_mut())?.data(),
            y_is_f32: (Y::DTYPE == DType::F32).into(),
            batch,
            segments: segments as u32,
            pad: 0,
        };
        // SAFETY: the checks above make every row of x and y `cols` long, and the workspace long enough for the parts of
        // `segments` of each row where there are several, which is what the kernels access, whatever the grid; the loader
        // matches `Params` to the kernel.
        unsafe { launch.run(config, &params) }
    };
    if cols <= WIDEST {
        let plan = problem.plan(stream, &kernels::SOFTMAX, &VARIANTS, &KERNELS[dtype])?;
        return run(&plan.kernel, plan.config, plan.batch, 1);
    }
    let segments = cols.div_ceil(SEGMENT);
    let units = rows.saturating_mul(segments);
    let config = LaunchConfig::grid_1d(stream.device().info().blocks_for(units, THREADS, WAVES_PER_CU));
    let names = LONG_KERNELS[dtype];
    let names = if problem.by_vectors() { [names[0], names[1]] } else { [names[2], names[3]] };
    for name in names {
        run(&*stream.kernel(&kernels::SOFTMAX, name)?, config, 1, segments)?;
    }
    Ok(())
}
