//! The safe function of `hip/softmax.hip`.

use crate::ActivationOutput;
use crate::kernels::softmax::Params;
use hk_core::plan::rows::{RowProblem, RowVariant, float_index};
use hk_core::{
    Aliasing, DType, DeviceInfo, Error, Float, Kernel, KernelRef, LaunchConfig, Result, Rows, Stream,
    TensorView, TensorViewMut, check_overlap, row_kernels,
};

const OP: &str = "softmax";

/// The entry points of each dtype that hold rows in registers.
const VARIANTS: [RowVariant; 14] = [
    RowVariant::vectorized(128, 16, 4, 8),
    RowVariant::vectorized(512, 16, 1, 8),
    RowVariant::vectorized(1024, 64, 1, 16),
    RowVariant::vectorized(2048, 64, 1, 8),
    RowVariant::vectorized(4096, 64, 1, 12),
    RowVariant::vectorized(8192, 256, 1, 8),
    RowVariant::vectorized(16384, 256, 1, 8),
    RowVariant::vectorized(WIDEST, 512, 1, 16),
    RowVariant::scalar(512, 16),
    RowVariant::scalar(2048, 64),
    RowVariant::scalar(4096, 64),
    RowVariant::scalar(8192, 256),
    RowVariant::scalar(16384, 256),
    RowVariant::scalar(WIDEST, 512),
];
/// Longest row that stays in registers.
pub(crate) const WIDEST: usize = 32768;
/// Columns of a segment of longer rows (one per block), threads of its block, and waves per CU.
const SEGMENT: usize = 4096;
const THREADS: usize = 256;
const WAVES_PER_CU: usize = 16;

static KERNELS: [[KernelRef<Params>; VARIANTS.len()]; 3] = row_kernels!(
    Params,
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
        "512_scalar",
        "2048_scalar",
        "4096_scalar",
        "8192_scalar",
        "16384_scalar",
        "32768_scalar"
    ]
);
static LONG_KERNELS: [[KernelRef<Params>; 4]; 3] = row_kernels!(
    Params,
    "softmax",
    ["bf16", "f16", "f32"],
    ["parts", "apply", "parts_scalar", "apply_scalar"]
);

/// Elements (`f32`) of the workspace that [`softmax`] needs for a tensor of `rows` rows; the same for every device. 0 up to
/// 32768 columns: no workspace is needed. A shorter one is an error.
pub fn softmax_workspace(_info: &DeviceInfo, rows: usize, cols: usize) -> usize {
    if cols <= WIDEST { 0 } else { rows.saturating_mul(2 * cols.div_ceil(SEGMENT)) }
}

/// Softmax over the last axis: `y = exp(x - m) / sum(exp(x - m))` with `m = max(x)`.
///
/// | arg         | shape        | dtype                | layout                                                      |
/// |-------------|--------------|----------------------|-------------------------------------------------------------|
/// | `x`         | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride over the rest         |
/// | `y`         | `[.., cols]` | as `x`, or `f32`     | unit stride on `cols`, one row stride over the rest         |
/// | `workspace` | `[n]`        | `f32`                | contiguous; `n` at least [`softmax_workspace`]; `None` if that is 0 |
///
/// Any number of rows and columns, and any row strides. The vectorized path moves 16 bytes at a time; it needs rows aligned to
/// 16 bytes that are a multiple of 16 bytes long. `y` may be exactly `x` ([`TensorViewMut::alias`]); otherwise tensors that are
/// written share no memory with another.
///
/// `f32` arithmetic, one rounding to the type of `y`, to nearest even. Results are batch-invariant: the bits of a row depend on
/// that row alone, not on other rows, strides or alignment. A row with a NaN or positive infinity is all NaN, and so is a row of
/// negative infinities; otherwise negative infinities give 0. Results below 2^-126 may be 0.
///
/// Rows of up to 32768 columns are read once. Longer rows are split into segments of 4096 columns over blocks, and read twice.
/// The workspace need not be initialized, and its contents have no meaning afterwards.
///
/// Returns when the work is queued, before it has run. Without rows, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for zero columns, [`Overlap`](hk_core::Error::Overlap) if a tensor
/// that is written shares memory with another otherwise than stated, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^29 - 1
/// columns, 2^32 - 1 rows or as long a workspace, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of
/// loading and launching a kernel. Nothing is written then.
///
/// Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 2 (safe softmax).
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
    let needed = softmax_workspace(stream.device().info(), rows, cols);
    if let Some(workspace) = &workspace {
        workspace.dims::<1>(OP, "workspace")?;
        workspace.expect_contiguous(OP, "workspace")?;
        workspace.expect_aligned(OP, "workspace", 2 * size_of::<f32>() as u64)?;
        check_overlap(OP, ("x", &x), ("workspace", workspace), Aliasing::Disjoint)?;
        check_overlap(OP, ("y", &y), ("workspace", workspace), Aliasing::Disjoint)?;
    }
    let given = workspace.as_ref().map_or(0, |w| w.numel());
    if given < needed {
        let want = format!("[{needed}] or longer (softmax_workspace)");
        return Err(Error::shape(OP, "workspace", [given], want));
    }
    if rows == 0 {
        return Ok(());
    }

    let dtype = float_index(T::DTYPE);
    let x = x.flatten_rows(OP, "x")?;
    let mut y = y.reborrow().flatten_rows(OP, "y")?;
    let mut run = |kernel: &Kernel<Params>, config: LaunchConfig, batch: u32, segments: usize| {
        let mut launch = stream.launch(OP);
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
        // `segments` of each row where there are several, which is what the kernels access, whatever the grid.
        unsafe { launch.run(kernel, config, &params) }
    };
    if cols <= WIDEST {
        let plan = problem.plan(stream, &VARIANTS, &KERNELS[dtype])?;
        return run(&plan.kernel, plan.config, plan.batch, 1);
    }
    let segments = cols.div_ceil(SEGMENT);
    let units = rows.saturating_mul(segments);
    let config = LaunchConfig::grid_1d(stream.device().info().blocks_for(units, THREADS, WAVES_PER_CU));
    let [parts, apply, parts_scalar, apply_scalar] = LONG_KERNELS[dtype];
    let kernels = if problem.can_vectorize() { [parts, apply] } else { [parts_scalar, apply_scalar] };
    for kernel in kernels {
        run(&stream.kernel(kernel)?, config, 1, segments)?;
    }
    Ok(())
}
