//! `ff_fused_gated`, `ff_fused_ungated`: feed-forward layers, two GEMMs and the activation between them.

use crate::element::Half;
use crate::gemm::check::WINDOW_BYTES;
use crate::gemm::desc::{Destination, GemmDesc, LIMIT, arg};
use crate::gemm::launch::{REDUCE, REDUCE_BLOCKS_PER_CU, REDUCE_THREADS, REDUCED_PART};
use crate::gemm::params::{Epilogue, Fusion, NO_ACTIVATION, ReduceParams};
use crate::gemm::plan::outputs;
use crate::gemm::table::Variant;
use crate::gemm::{Activation, GemmOptions, GemmProblem, Precision, gemm_workspace};
use crate::kernels::ff::Params;
use crate::ops::gmm::{GroupedGemm, GroupedOptions};
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::{
    DType, DeviceInfo, Error, KernelRef, LaunchConfig, NamedOperand, Result, Stream, TensorView,
    TensorViewMut, check_aliases,
};

/// Whether a feed-forward layer has gates: `w_up` of `2 I` rows, or of `I`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FfKind {
    /// [`ff_fused_gated`].
    Gated,
    /// [`ff_fused_ungated`].
    Ungated,
}

/// How a feed-forward layer is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FfPath {
    /// One kernel for both GEMMs, whose blocks have a slice of the intermediate columns each, and one that sums their partial
    /// sums of `y`. Up to 64 rows.
    Fused,
    /// The first GEMM, then a decode GEMM with `w_down`, whose rows are split among blocks. Up to 64 rows.
    Split,
    /// The first GEMM, then one of large tiles with `w_down`. Any rows, strides and alignment.
    Tiles,
}

/// Options of a feed-forward layer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct FfOptions {
    /// Of the gates, or without gates of all sums of the first GEMM.
    pub activation: Option<Activation>,
    /// In place of what suits the sizes and the device: up to 64 rows [`FfPath::Fused`] unless its partial sums of `y` take longer to
    /// write and to read than another launch does; for more rows, or rows not on 16 bytes, [`FfPath::Tiles`].
    pub path: Option<FfPath>,
}

/// Entry points for up to 16, 32 and 64 rows.
struct Kernels {
    gated: [KernelRef<Params>; 3],
    plain: [KernelRef<Params>; 3],
    down: [KernelRef<Params>; 3],
}

macro_rules! kernels {
    ($type:literal) => {
        Kernels {
            gated: kernels!("ff_", $type, ["_16_gated", "_32_gated", "_64_gated"]),
            plain: kernels!("ff_", $type, ["_16", "_32", "_64"]),
            down: kernels!("ff_down_", $type, ["_16", "_32", "_64"]),
        }
    };
    ($op:literal, $type:literal, [$($rows:literal),+]) => { [$(Params::kernel(concat!($op, $type, $rows))),+] };
}

static BF16: Kernels = kernels!("bf16");
static F16: Kernels = kernels!("f16");

const fn kernels(precision: Precision) -> &'static Kernels {
    if matches!(precision, Precision::F16) { &F16 } else { &BF16 }
}

/// Which of them.
const fn index(rows: usize) -> usize {
    match rows {
        0..=16 => 0,
        17..=32 => 1,
        _ => 2,
    }
}

/// The most rows of kernels that are not made of tiles.
const MOST_ROWS: usize = 64;
/// `kTileCols`, `kSlice` and `kChunk` in `hip/ff.hip`.
const N_TILE: usize = 128;
const SLICE: usize = 192;
const fn chunk(gated: bool) -> usize {
    if gated { 16 } else { 32 }
}
/// Rows of `w_down` that a block of `ff_down` has at least: what its waves have in flight.
const MIN_DOWN_ROWS: usize = 256;

/// Time of one more launch, and bytes of memory traffic in the same time, of a CU (MI300X: 4 us, 17 bytes a ns).
const LAUNCH_BYTES: f64 = 4000.0 * 17.0;

/// How the intermediate columns are split among blocks.
#[derive(Clone, Copy)]
struct Slices {
    /// Columns of a slice, but perhaps the last.
    width: usize,
    count: usize,
}

impl Slices {
    /// Of so many columns each, `all` columns.
    fn of(width: usize, all: usize) -> Self {
        Self { width, count: all.div_ceil(width) }
    }
}

/// Rows, columns of `x` and `y`, and of `h`.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    m: usize,
    k: usize,
    i: usize,
}

impl Sizes {
    /// Of the kernel of both GEMMs: columns of `h` of a block.
    fn fused_slices(&self, info: &DeviceInfo, gated: bool) -> Slices {
        let chunk = chunk(gated);
        let chunks = self.i.div_ceil(chunk);
        let each = chunks.div_ceil(info.compute_units.max(1) as usize).clamp(1, SLICE / chunk) * chunk;
        Slices::of(each, self.i)
    }

    fn n_tiles(&self) -> usize {
        self.k.div_ceil(N_TILE)
    }

    /// Of the second GEMM: as many as give each CU a block, at least one.
    fn down_slices(&self, info: &DeviceInfo) -> Slices {
        let wanted = (info.compute_units as usize).div_ceil(self.n_tiles().max(1));
        let each = self.i.div_ceil(wanted).next_multiple_of(32).max(MIN_DOWN_ROWS);
        Slices::of(each, self.i.max(1))
    }

    fn partial(&self) -> usize {
        outputs([1, self.m, self.k])
    }

    /// Columns from a row of `h` to the next: rows are on 16 bytes.
    fn h_row(&self) -> usize {
        self.i.next_multiple_of(8)
    }

    /// `f32`s that `h` takes of the workspace; what follows is on 16 bytes.
    fn h_len(&self) -> usize {
        outputs([1, self.m, self.h_row()]).div_ceil(2).next_multiple_of(4)
    }

    /// The path for operands of the vectorized path.
    fn choose(&self, info: &DeviceInfo, gated: bool) -> FfPath {
        if self.m > MOST_ROWS {
            return FfPath::Tiles;
        }
        let cus = f64::from(info.compute_units.max(1));
        let (slices, down) = (self.fused_slices(info, gated).count, self.down_slices(info).count);
        // Written once and read once.
        let traffic = |n: usize| 8.0 * n as f64 * self.partial() as f64;
        let weights = 2.0 * self.k as f64 * self.i as f64 * if gated { 3.0 } else { 2.0 };
        // With fewer blocks than CUs, only these read.
        let idle = weights * (cus / slices.max(1) as f64 - 1.0).max(0.0);
        let others = if down > 1 { traffic(down) } else { 0.0 };
        let fused = traffic(slices) + idle;
        if fused - others <= LAUNCH_BYTES * cus { FfPath::Fused } else { FfPath::Split }
    }

    /// The shortest workspace of a path.
    fn needed(&self, info: &DeviceInfo, path: FfPath, gated: bool) -> usize {
        match path {
            FfPath::Fused => self.fused_slices(info, gated).count.saturating_mul(self.partial()),
            FfPath::Split => match self.down_slices(info).count {
                1 => self.h_len(),
                slices => self.h_len().saturating_add(slices.saturating_mul(self.partial())),
            },
            FfPath::Tiles => self.h_len(),
        }
    }
}

/// Length of the workspace, in `f32`, of [`ff_fused_gated`] or [`ff_fused_ungated`], for `x` `[M, K]` and `w_down` `[I, K]`, whatever
/// the layouts.
pub fn ff_fused_workspace(
    info: &DeviceInfo,
    precision: Precision,
    [m, k, i]: [usize; 3],
    kind: FfKind,
    options: FfOptions,
) -> usize {
    let gated = kind == FfKind::Gated;
    let sizes = Sizes { m, k, i };
    let path = options.path.unwrap_or(sizes.choose(info, gated));
    // Split-K slices of the first GEMM come after h.
    let n = if gated { i.saturating_mul(2) } else { i };
    let up = gemm_workspace(info, &GemmProblem::new(precision, m, n, k));
    let of_tiles = sizes.h_len().saturating_add(up);
    match path {
        FfPath::Fused if options.path.is_some() => sizes.needed(info, path, gated),
        _ => sizes.needed(info, path, gated).max(of_tiles),
    }
}

/// Feed-forward layer with gates: `h[m, i] = activation(sum_k x[m, k] w_up[i, k]) * sum_k x[m, k] w_up[I + i, k]`, rounded to the
/// type of `x`, and `y[m, k] = sum_i h[m, i] w_down[i, k]`.
///
/// | arg         | shape      | dtype         | layout                                          |
/// |-------------|------------|---------------|-------------------------------------------------|
/// | `x`         | `[M, K]`   | `bf16`, `f16` | unit stride on `K`, any row stride              |
/// | `w_up`      | `[2 I, K]` | as `x`        | likewise: rows of gates, then of values         |
/// | `w_down`    | `[I, K]`   | as `x`        | likewise                                        |
/// | `y`         | `[M, K]`   | as `x`        | likewise                                        |
/// | `workspace` | `[n]`      | `f32`         | contiguous, 16-byte aligned; see [`ff_fused_workspace`] |
///
/// Any `M`, `K` and `I`. Rows on 16 bytes, `K` and `I` multiples of 8, are moved 16 bytes at a time; others go element by element,
/// much slower. `w_down` is the transpose of what checkpoints have, `[K, I]`.
///
/// Sums are `f32`, and so are activation and gate; `h` and `y` are rounded once each. `y` need not be zero before. Parts of `y` are
/// summed in their order: the same call gives the same bits.
///
/// Returns when the work is queued, before it has run. No rows or no columns of `x`: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, or the workspace is too short, [`Empty`](hk_core::Error::Empty) if `I` is zero,
/// [`Overlap`](hk_core::Error::Overlap) if `y` or the workspace shares memory with another tensor,
/// [`Argument`](hk_core::Error::Argument) for a path that does not serve the rows or their layout,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 along an axis, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what
/// loading and launching a kernel can answer. Nothing is written then.
///
/// Source: Shazeer 2020, GLU Variants Improve Transformer.
pub fn ff_fused_gated<T: Half>(
    stream: &Stream,
    x: TensorView<T>,
    w_up: TensorView<T>,
    w_down: TensorView<T>,
    y: TensorViewMut<T>,
    workspace: TensorViewMut<f32>,
    options: FfOptions,
) -> Result<()> {
    FeedForward { op: "ff_fused_gated", gated: true, x, w_up, w_down, options }.run(stream, y, workspace)
}

/// [`ff_fused_gated`] without gates: `h[m, i] = activation(sum_k x[m, k] w_up[i, k])`, with `w_up` `[I, K]`.
///
/// # Errors
/// As [`ff_fused_gated`].
pub fn ff_fused_ungated<T: Half>(
    stream: &Stream,
    x: TensorView<T>,
    w_up: TensorView<T>,
    w_down: TensorView<T>,
    y: TensorViewMut<T>,
    workspace: TensorViewMut<f32>,
    options: FfOptions,
) -> Result<()> {
    FeedForward { op: "ff_fused_ungated", gated: false, x, w_up, w_down, options }.run(stream, y, workspace)
}

struct FeedForward<'a, T: Half> {
    op: &'static str,
    gated: bool,
    x: TensorView<'a, T>,
    w_up: TensorView<'a, T>,
    w_down: TensorView<'a, T>,
    options: FfOptions,
}

impl<T: Half> FeedForward<'_, T> {
    fn run(self, stream: &Stream, mut y: TensorViewMut<T>, mut workspace: TensorViewMut<f32>) -> Result<()> {
        let (op, info) = (self.op, stream.device().info());
        let sizes = self.check(stream, &y, &workspace)?;
        let Sizes { m, k, i } = sizes;
        if m == 0 || k == 0 {
            return Ok(());
        }
        let vectors = self.can_vectorize(&sizes);
        let few = vectors && m <= MOST_ROWS;
        let path = match self.options.path {
            Some(path @ (FfPath::Fused | FfPath::Split)) if !few => {
                let want =
                    "FfPath::Tiles: more than 64 rows, rows not on 16 bytes, or lengths no multiples of 8";
                return Err(Error::argument(op, "path", format!("{path:?}"), want));
            }
            Some(path) => path,
            None if few => sizes.choose(info, self.gated),
            None => FfPath::Tiles,
        };
        let needed = sizes.needed(info, path, self.gated);
        if workspace.numel() < needed {
            let want = format!("[{needed}] or longer ({path:?})");
            return Err(Error::shape(op, "workspace", workspace.shape(), want));
        }
        if path == FfPath::Fused {
            let slices = sizes.fused_slices(info, self.gated);
            self.fused(stream, &sizes, slices, &mut workspace)?;
            return self.sum(stream, &sizes, slices.count, &mut y, workspace);
        }

        let (h, mut rest) = workspace.split_at(0, sizes.h_len())?;
        let mut h = h.cast::<T>(op, "workspace")?.slice(0, 0..m * sizes.h_row())?;
        h = h.split_axis(0, sizes.h_row())?.slice(1, 0..i)?;
        let options = GemmOptions { activation: self.options.activation, ..GemmOptions::default() };
        let mut up = GemmDesc::new(op, self.x, self.w_up).options(options);
        (up.a, up.w.name, up.y) = (arg("x", self.x), "w_up", "workspace");
        up.variant = if self.gated { Variant::Gated } else { Variant::Plain };
        let room = (rest.numel() > 0).then(|| rest.reborrow());
        up.run(stream, Destination::Store(h.reborrow()), room)?;
        if path == FfPath::Tiles {
            let rhs = self.w_down.split_axis(0, i)?;
            let names = ["workspace", "w_down", "y"];
            let options = GroupedOptions::default();
            return GroupedGemm { op, names, lhs: h.alias(), rhs, sizes: None, bias: None, options }
                .run(stream, y);
        }
        let slices = sizes.down_slices(info);
        self.down(stream, &sizes, &h, slices, &mut y, &mut rest)?;
        if slices.count > 1 { self.sum(stream, &sizes, slices.count, &mut y, rest) } else { Ok(()) }
    }

    fn check(&self, stream: &Stream, y: &TensorViewMut<T>, workspace: &TensorViewMut<f32>) -> Result<Sizes> {
        let Self { op, gated, x, w_up, w_down, .. } = self;
        let [m, k] = x.dims(op, "x")?;
        let [i, _] = w_down.dims(op, "w_down")?;
        w_down.expect_shape(op, "w_down", [i, k])?;
        w_up.expect_shape(op, "w_up", [if *gated { 2 * i } else { i }, k])?;
        y.expect_shape(op, "y", [m, k])?;
        workspace.dims::<1>(op, "workspace")?;
        for (arg, view) in [("x", x), ("w_up", w_up), ("w_down", w_down)] {
            view.expect_unit_stride(op, arg)?;
            view.expect_aligned(op, arg, size_of::<T>() as u64)?;
            if let Some(axis) = view.shape().iter().position(|&n| n > LIMIT / 2) {
                let what = format!("axis {axis} of shape {:?}", view.shape());
                return Err(Error::too_large(op, arg, what, (LIMIT / 2) as u64));
            }
        }
        y.expect_unit_stride(op, "y")?;
        y.expect_aligned(op, "y", size_of::<T>() as u64)?;
        workspace.expect_contiguous(op, "workspace")?;
        workspace.expect_aligned(op, "workspace", 16)?;
        if i == 0 {
            return Err(Error::empty(op, "w_down", 0, w_down.shape()));
        }
        let inputs: [NamedOperand; 3] = [("x", Some(x)), ("w_up", Some(w_up)), ("w_down", Some(w_down))];
        check_aliases(op, &inputs, &[(("y", Some(y)), &[]), (("workspace", Some(workspace)), &[])])?;
        // Before the first of the launches.
        let devices = [
            ("x", x.device()),
            ("w_up", w_up.device()),
            ("w_down", w_down.device()),
            ("y", y.device()),
            ("workspace", workspace.device()),
        ];
        for (arg, device) in devices {
            if device != stream.device() {
                let (got, want) = (device.spec().to_owned(), stream.device().spec().to_owned());
                return Err(Error::DeviceMismatch { op, arg, got, want });
            }
        }
        Ok(Sizes { m, k, i })
    }

    /// Whether all rows are on 16 bytes, and within windows.
    fn can_vectorize(&self, sizes: &Sizes) -> bool {
        let reach = |view: &TensorView<T>| {
            let row = if view.shape()[0] > 1 { view.strides()[0] } else { 0 };
            let rows = (view.shape()[0] + SLICE).saturating_mul(row);
            rows.saturating_add(sizes.k).saturating_mul(size_of::<T>())
        };
        [&self.x, &self.w_up, &self.w_down]
            .iter()
            .all(|view| view.rows_aligned(16) && reach(view) < WINDOW_BYTES)
            && sizes.k.is_multiple_of(8)
            && sizes.i.is_multiple_of(8)
    }

    /// Bytes from a row to the next.
    fn row(view: &TensorView<T>) -> i64 {
        if view.shape()[0] > 1 { (view.strides()[0] * size_of::<T>()) as i64 } else { 0 }
    }

    fn params(&self, sizes: &Sizes) -> Params {
        Params {
            x_row: Self::row(&self.x),
            up_row: Self::row(&self.w_up),
            down_row: Self::row(&self.w_down),
            y_row: sizes.k as i64,
            y_split: sizes.partial() as i64,
            rows: sizes.m as u32,
            width: sizes.k as u32,
            columns: sizes.i as u32,
            n_tiles: sizes.n_tiles() as u32,
            activation: self.options.activation.map_or(NO_ACTIVATION, |a| a as u32),
            y_type: float_index(DType::F32) as u32,
            vectors: 1,
            ..Params::zeroed()
        }
    }

    /// Both GEMMs, to partial sums.
    fn fused(
        &self,
        stream: &Stream,
        sizes: &Sizes,
        slices: Slices,
        partials: &mut TensorViewMut<f32>,
    ) -> Result<()> {
        let kernels = kernels(T::PRECISION);
        let kernels = if self.gated { &kernels.gated } else { &kernels.plain };
        let kernel = stream.kernel(kernels[index(sizes.m)])?;
        let mut launch = stream.launch(self.op);
        let params = Params {
            x: launch.input("x", &self.x)?.data(),
            w_up: launch.input("w_up", &self.w_up)?.data(),
            w_down: launch.input("w_down", &self.w_down)?.data(),
            y: launch.output_address("workspace", &mut partials.reborrow())?,
            slice: slices.width as u32,
            ..self.params(sizes)
        };
        // SAFETY: the checks make the tensors as long as M, K and I, which the kernel bounds its accesses by; there is a partial sum for
        // each block; the loader matches the parameters to the kernel.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(slices.count), &params) }
    }

    /// The second GEMM: to partial sums, or to `y` if there is one slice.
    fn down(
        &self,
        stream: &Stream,
        sizes: &Sizes,
        h: &TensorViewMut<T>,
        slices: Slices,
        y: &mut TensorViewMut<T>,
        partials: &mut TensorViewMut<f32>,
    ) -> Result<()> {
        let kernel = stream.kernel(kernels(T::PRECISION).down[index(sizes.m)])?;
        let mut launch = stream.launch(self.op);
        let mut params = Params {
            w_down: launch.input("w_down", &self.w_down)?.data(),
            h: launch.input("workspace", &h.alias())?.data(),
            h_row: (sizes.h_row() * size_of::<T>()) as i64,
            slice: slices.width as u32,
            ..self.params(sizes)
        };
        if slices.count > 1 {
            params.y = launch.output_address("workspace", &mut partials.reborrow())?;
        } else {
            params.y_row = y.strides()[0] as i64;
            params.vectors = y.rows_aligned(16).into();
            params.y_type = float_index(T::DTYPE) as u32;
            params.y = launch.output_address("y", &mut y.reborrow())?;
        }
        // SAFETY: as of `fused`; h has as many rows and columns; there is a partial sum for each slice.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(slices.count * sizes.n_tiles()), &params) }
    }

    /// `y` from its partial sums.
    fn sum(
        &self,
        stream: &Stream,
        sizes: &Sizes,
        count: usize,
        y: &mut TensorViewMut<T>,
        mut partials: TensorViewMut<f32>,
    ) -> Result<()> {
        let kernel = stream.kernel(REDUCE)?;
        let mut launch = stream.launch(self.op);
        let (y_row, vectors) = (y.strides()[0] as i64, y.rows_aligned(16).into());
        let parts = sizes.k.div_ceil(REDUCED_PART);
        let params = ReduceParams {
            epilogue: Epilogue {
                y: launch.output_address("y", &mut y.reborrow())?,
                y_row,
                rows: sizes.m as u32,
                cols: sizes.k as u32,
                y_type: float_index(T::DTYPE) as u32,
                activation: NO_ACTIVATION,
                vectors,
                ..Epilogue::zeroed()
            },
            fusion: Fusion::zeroed(),
            partials: launch.output_address("workspace", &mut partials)?,
            split: sizes.partial() as i64,
            batch: 0,
            row: sizes.k as i64,
            splits: count as u32,
            parts: parts as u32,
            batches: 1,
            gated: 0,
            vectors: 1,
            pad: 0,
        };
        let most = stream.device().info().compute_units as usize * REDUCE_BLOCKS_PER_CU;
        let blocks = outputs([1, sizes.m, parts]).div_ceil(REDUCE_THREADS).min(most);
        // SAFETY: y and the partials are as long as M and K, which the kernel covers whatever the grid.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }
    }
}
