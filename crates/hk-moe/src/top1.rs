//! The safe function of `hip/top1.hip`.

use crate::args::{MOST_GATES, Vector, check_experts};
use crate::kernels::top1::Params;
use crate::lists::expect_workspace;
use hk_core::plan::arrive::next_mark;
use hk_core::plan::rows::float_index;
use hk_core::{
    DeviceInfo, Error, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut, check_aliases,
    row_kernels,
};
use hk_gemm::Half;

/// The entry points of each dtype: 16 tokens of a tile, 32, 16 in views of any alignment.
static KERNELS: [[KernelRef<Params>; 3]; 2] =
    row_kernels!(Params, "top1", ["bf16", "f16"], ["16", "32", "scalar"]);

/// `H` of a slice, `kSlice` of the kernel.
const SLICE: usize = 512;
/// Elements of `H` at most: offsets in a slice of `x` have 32 bits.
const MOST_COLS: usize = 1 << 30;

/// How tokens and `H` are cut for a device.
struct Plan {
    /// Tokens of a tile.
    tile: usize,
    tiles: usize,
    slices: usize,
    /// A block for each slice.
    split: bool,
}

impl Plan {
    fn new(info: &DeviceInfo, tokens: usize, cols: usize, vectorized: bool) -> Self {
        let (slices, units) = (cols.div_ceil(SLICE).max(1), info.compute_units as usize);
        // Small tiles until their slices fill the device twice.
        let tile = if vectorized && tokens.div_ceil(16) * slices > 2 * units { 32 } else { 16 };
        let tiles = tokens.div_ceil(tile);
        Self { tile, tiles, slices, split: slices > 1 && tiles < units }
    }

    fn flags(&self) -> usize {
        if self.split { 2 * self.tiles * self.slices } else { 0 }
    }

    fn partials(&self, experts: usize) -> usize {
        if self.split {
            self.tiles.saturating_mul(self.slices * self.tile).saturating_mul(experts)
        } else {
            0
        }
    }
}

/// Elements (`i32`) of the workspace of [`moe_routing_sigmoid_top1_fused`].
pub fn moe_top1_workspace(info: &DeviceInfo, tokens: usize, cols: usize, experts: usize) -> usize {
    let len = |vectorized| {
        let plan = Plan::new(info, tokens, cols, vectorized);
        plan.flags() + plan.partials(experts)
    };
    len(false).max(len(true))
}

/// The best expert of each token, `argmax_e sigmoid(x w)[e]`, and that sigmoid.
///
/// | arg         | shape    | dtype         | layout                                                  |
/// |-------------|----------|---------------|---------------------------------------------------------|
/// | `x`         | `[T, H]` | `bf16`, `f16` | unit stride on `H`, any row stride                      |
/// | `w`         | `[H, E]` | as `x`        | unit stride on `E`, any row stride                      |
/// | `ids`       | `[T, s]` | `i32`         | contiguous; `s` is 1, or 2 with a shared expert         |
/// | `weights`   | `[T, s]` | `f32`         | contiguous                                              |
/// | `workspace` | `[W]`    | `i32`         | contiguous, at least [`moe_top1_workspace`], on 8 bytes |
///
/// Logits are summed up in `f32`, and not rounded. Of equal sigmoids, saturated ones, too, the lowest expert is taken; a NaN is above
/// all numbers, and is the weight then. Slot 1 is the shared expert: `ids[t, 1] = E`, `weights[t, 1] = 1`. A token's results are the same
/// bits in any call.
///
/// One launch. No output may alias another tensor. Returns when it is queued. No tokens: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for more than 1024 experts, [`TooLarge`](Error::TooLarge) beyond 2^30 tokens or columns,
/// [`Overlap`](Error::Overlap) if an output shares memory with another tensor, [`DeviceMismatch`](Error::DeviceMismatch), and the
/// errors of loading and launching a kernel. Nothing is written then.
pub fn moe_routing_sigmoid_top1_fused<T: Half>(
    stream: &Stream,
    x: TensorView<T>,
    w: TensorView<T>,
    ids: TensorViewMut<i32>,
    weights: TensorViewMut<f32>,
    workspace: TensorViewMut<i32>,
) -> Result<()> {
    const OP: &str = "moe_routing_sigmoid_top1_fused";
    let (mut ids, mut weights, mut workspace) = (ids, weights, workspace);
    let [tokens, cols] = x.dims(OP, "x")?;
    let [rows, experts] = w.dims(OP, "w")?;
    if rows != cols {
        return Err(Error::shape(OP, "w", [rows, experts], format!("[{cols}, {experts}] (columns of x)")));
    }
    check_experts(OP, "w", experts)?;
    let [ids_rows, slots] = ids.dims(OP, "ids")?;
    if ids_rows != tokens || !(1..=2).contains(&slots) {
        let want = format!("[{tokens}, 1], or [{tokens}, 2] with a shared expert");
        return Err(Error::shape(OP, "ids", [ids_rows, slots], want));
    }
    weights.expect_shape(OP, "weights", [tokens, slots])?;
    for (arg, n, most) in [("x", tokens, MOST_GATES), ("x", cols, MOST_COLS)] {
        if n > most {
            return Err(Error::too_large(OP, arg, format!("{n} rows or columns"), most as u64));
        }
    }
    for (arg, operand) in [("x", &x), ("w", &w)] {
        operand.expect_unit_stride(OP, arg)?;
        operand.expect_aligned(OP, arg, size_of::<T>() as u64)?;
    }
    ids.expect_packed(OP, "ids")?;
    weights.expect_packed(OP, "weights")?;
    let info = stream.device().info();
    expect_workspace(OP, &workspace, moe_top1_workspace(info, tokens, cols, experts), "moe_top1_workspace")?;
    workspace.expect_aligned(OP, "workspace", 8)?;
    check_aliases(
        OP,
        &[("x", Some(&x)), ("w", Some(&w))],
        &[
            (("ids", Some(&ids)), &[]),
            (("weights", Some(&weights)), &[]),
            (("workspace", Some(&workspace)), &[]),
        ],
    )?;
    if tokens == 0 {
        return Ok(());
    }
    let row_bytes = |view: &TensorView<T>| view.strides()[0].saturating_mul(size_of::<T>());
    // A tile of `x` and a slice of `w` lie in windows of 2^31 bytes.
    let near = |bytes: usize, rows: usize| bytes <= (1 << 30) / rows;
    let vectorized = cols.is_multiple_of(8)
        && experts.is_multiple_of(8)
        && x.rows_aligned(16)
        && w.rows_aligned(16)
        && near(row_bytes(&x), 32)
        && near(row_bytes(&w), SLICE + 8);
    let plan = Plan::new(info, tokens, cols, vectorized);
    let variant = match (vectorized, plan.tile) {
        (false, _) => 2,
        (true, 16) => 0,
        (true, _) => 1,
    };
    let kernel = stream.kernel(KERNELS[float_index(T::DTYPE)][variant])?;
    let mut launch = stream.launch(OP);
    let scratch = launch.output_address("workspace", &mut workspace)?;
    let params = Params {
        x: launch.input_address("x", &x)?,
        w: launch.input_address("w", &w)?,
        ids: launch.output_address("ids", &mut ids)?,
        weights: launch.output_address("weights", &mut weights)?,
        x_row: row_bytes(&x) as i64,
        w_row: row_bytes(&w) as i64,
        partials: if plan.split { scratch + 4 * plan.flags() as u64 } else { 0 },
        arrived: scratch,
        mark: next_mark(),
        tokens: tokens as u32,
        width: cols as u32,
        experts: experts as u32,
        slots: slots as u32,
        slices: plan.slices as u32,
        pad: 0,
    };
    let blocks = plan.tiles * if plan.split { plan.slices } else { 1 };
    // SAFETY: the checks above make the tensors as large as they count, and the workspace as large as the plan; views that are not in
    // reach of 32-bit offsets are read with 64 bits.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }
}
