//! What all products have in common: operands, epilogues, splits of K, launches.

use crate::config::{GemmConfig, GemmTile, Job, Precision};
use crate::kernels;
use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::float_index;
use hk_core::{
    CodeObjects, DeviceInfo, Element, Error, Float, GlobalLayout, Launch, LaunchConfig, NamedOperand, Result,
    Stream, TensorView, TensorViewMut, bf16, check_aliases, f16,
};

/// A function of sums, in `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu = 0,
    /// `x (1 + erf(x / sqrt 2)) / 2`.
    Gelu = 1,
    /// `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`.
    GeluTanh = 2,
    /// `max(x, 0)`.
    Relu = 3,
    /// `tanh(x)`.
    Tanh = 4,
}

/// A tensor of any float type.
#[derive(Debug, Clone, Copy)]
pub enum FloatView<'a> {
    /// Of `bf16`.
    Bf16(TensorView<'a, bf16>),
    /// Of `f16`.
    F16(TensorView<'a, f16>),
    /// Of `f32`.
    F32(TensorView<'a, f32>),
}

impl<'a> From<TensorView<'a, bf16>> for FloatView<'a> {
    fn from(view: TensorView<'a, bf16>) -> Self {
        Self::Bf16(view)
    }
}
impl<'a> From<TensorView<'a, f16>> for FloatView<'a> {
    fn from(view: TensorView<'a, f16>) -> Self {
        Self::F16(view)
    }
}
impl<'a> From<TensorView<'a, f32>> for FloatView<'a> {
    fn from(view: TensorView<'a, f32>) -> Self {
        Self::F32(view)
    }
}

/// What a product can be asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GemmOptions {
    /// Applied to sums after the bias.
    pub activation: Option<Activation>,
    /// In place of what suits the sizes and the device; see [`GemmConfig`].
    pub config: Option<GemmConfig>,
}

/// `Operand` in `hip/problem.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Operand {
    data: u64,
    batch: i64,
    row: i64,
    rows: u32,
    pad: u32,
}

impl Operand {
    fn new(layout: &GlobalLayout, element: usize) -> Self {
        let [batch, row] = byte_strides(layout, element);
        Self { data: layout.data(), batch, row, rows: layout.shape()[2], pad: 0 }
    }
}

/// Strides of batches and rows, in bytes; 0 for a lone one, which can have any.
fn byte_strides(layout: &GlobalLayout, element: usize) -> [i64; 2] {
    let ([_, batches, rows, _], [_, batch, row, _]) = (layout.shape(), layout.strides());
    [(batches, batch), (rows, row)].map(|(n, stride)| if n > 1 { stride * element as i64 } else { 0 })
}

/// `Grid` in `hip/problem.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Grid {
    m_tiles: u32,
    n_tiles: u32,
    group: u32,
    splits: u32,
    split_bytes: u32,
    k_bytes: u32,
    blocks: u32,
    pad: u32,
}

/// `Epilogue` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Epilogue {
    y: u64,
    y_batch: i64,
    y_row: i64,
    y_split: i64,
    bias: u64,
    bias_batch: i64,
    x_scale: u64,
    w_scale: u64,
    x_scale_batch: i64,
    w_scale_batch: i64,
    x_scale_step: u32,
    w_scale_step: u32,
    rows: u32,
    cols: u32,
    y_type: u32,
    bias_type: u32,
    store: u32,
    activation: u32,
    vectors: u32,
    pad: u32,
}

/// `Epilogue::kNone`.
const NO_ACTIVATION: u32 = 255;

/// `Params` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: Operand,
    w: Operand,
    grid: Grid,
    epilogue: Epilogue,
}

/// `Params` in `hip/reduce.hip`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ReduceParams {
    epilogue: Epilogue,
    planes: u64,
    split: i64,
    batch: i64,
    row: i64,
    splits: u32,
    parts: u32,
    batches: u32,
    gated: u32,
}

/// What becomes of sums: `Store` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    Round = 0,
    Plane = 1,
    Add = 2,
    /// Added to zeros.
    ZeroAndAdd,
}

impl Store {
    /// Whether blocks add up the parts of K in memory, and need no planes.
    fn adds(self) -> bool {
        matches!(self, Self::Add | Self::ZeroAndAdd)
    }
}

/// Length of the workspace, in `f32`, with which products of `[batch, m, k]` by `[batch, n, k]` can cut K into as many parts
/// as suit the device, whichever operator it is; 0: none would. `n` counts the rows of `w`, with gates and values both. A
/// shorter workspace, or none, is as good but for speed. Rows that do not begin on 16 bytes are not reckoned with.
pub fn gemm_workspace(info: &DeviceInfo, precision: Precision, [batch, m, n, k]: [usize; 4]) -> usize {
    let splits = |serves: fn(GemmTile) -> bool| {
        let job = Job { info, precision, sizes: [batch, m, n, k], vectors: true, most_splits: MOST_SPLITS };
        job.choose(serves).splits
    };
    let plain = splits(|tile| tile != GemmTile::T256x128);
    let splits = match precision {
        Precision::Bf16 | Precision::F16 => {
            let gated = splits(|tile| !matches!(tile, GemmTile::T256x128 | GemmTile::S16x16));
            plain.max(gated)
        }
        Precision::I8 | Precision::Fp8 => {
            let block = splits(|tile| !matches!(tile, GemmTile::T256x256 | GemmTile::T128x128));
            // Of few rows of w.
            let fine = splits(|tile| matches!(tile, GemmTile::T256x128 | GemmTile::T64x64));
            plain.max(block).max(fine)
        }
    };
    if splits > 1 { splits.saturating_mul(outputs([batch, m, n])) } else { 0 }
}

/// Outputs of a batch, or as many as can be counted.
pub(crate) fn outputs([batch, m, n]: [usize; 3]) -> usize {
    batch.saturating_mul(m).saturating_mul(n)
}

/// Parts of K that products are cut into of their own accord, at most.
pub(crate) const MOST_SPLITS: usize = 32;

/// Scales of both operands: `[.., M]` and `[.., N]`, or one number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales<'a> {
    pub x: TensorView<'a, f32>,
    pub w: TensorView<'a, f32>,
}

/// Scales of blocks: of x `[.., M, groups of K]`, of w `[.., groups of N, groups of K]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockScales<'a> {
    pub x: TensorView<'a, f32>,
    pub w: TensorView<'a, f32>,
    pub group: BlockShape,
}

/// What has one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockShape {
    /// Rows of `w`: a power of two.
    pub n: usize,
    /// Columns of `a` and `w`: 128, or a larger power of two.
    pub k: usize,
}

impl Default for BlockShape {
    /// 128 by 128.
    fn default() -> Self {
        Self { n: 128, k: 128 }
    }
}

/// Columns whose products kernels sum before they scale.
const GROUP: usize = 128;

/// `BlockScale` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct BlockScale {
    data: u64,
    batch: i64,
    row: u32,
    group: u32,
    row_shift: u32,
    group_shift: u32,
}

impl BlockScale {
    fn new(layout: &GlobalLayout, rows: usize, columns: usize) -> Self {
        let [batch, row] = byte_strides(layout, size_of::<f32>());
        // A lone group can have any stride.
        let group = if layout.shape()[3] > 1 { layout.strides()[3] * size_of::<f32>() as i64 } else { 0 };
        Self {
            data: layout.data(),
            batch,
            row: row as u32,
            group: group as u32,
            row_shift: rows.trailing_zeros(),
            group_shift: columns.trailing_zeros(),
        }
    }
}

/// `BlockParams` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct BlockParams {
    common: Params,
    x_scale: BlockScale,
    w_scale: BlockScale,
}

/// Names of the arguments, for errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    pub x: &'static str,
    pub w: &'static str,
    pub x_scale: &'static str,
    pub w_scale: &'static str,
}

/// `a` and `w`.
pub(crate) const NAMES: Names = Names { x: "a", w: "w", x_scale: "a_scale", w_scale: "w_scale" };

/// The entry points of products of one type.
pub struct Kernels {
    /// Of tiles that go through LDS, and of those that do not.
    pub tiles: &'static CodeObjects,
    pub skinny: &'static CodeObjects,
    /// For each [`GemmTile`]; empty: there is none.
    pub names: [&'static str; GemmTile::COUNT],
}

/// The names of one type's entry points: `gemm_bf16_256x256`, and with an end: `gemm_bf16_256x256_gated`.
macro_rules! gemm_names {
    ($type:literal, $end:literal, $s16x16:expr) => {
        [
            concat!("gemm_", $type, "_256x256", $end),
            concat!("gemm_", $type, "_128x128", $end),
            concat!("gemm_", $type, "_64x64", $end),
            concat!("gemm_", $type, "_64x64", $end, "_elements"),
            $s16x16,
            concat!("gemm_", $type, "_16x32", $end),
            concat!("gemm_", $type, "_32x32", $end),
            concat!("gemm_", $type, "_64x32", $end),
            "",
        ]
    };
}
pub(crate) use gemm_names;

/// A product `[batch,] M, K` by `[batch,] N, K`.
pub(crate) struct Product<'a, X: Element, W: Element> {
    pub op: &'static str,
    pub names: Names,
    pub kernels: &'static Kernels,
    pub precision: Precision,
    pub x: TensorView<'a, X>,
    pub w: TensorView<'a, W>,
    pub scales: Option<Scales<'a>>,
    pub block: Option<BlockScales<'a>>,
    pub bias: Option<FloatView<'a>>,
    /// Rows of `w` are gates, then values.
    pub gated: bool,
    pub options: GemmOptions,
}

/// Lengths of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

/// Rows that begin within 2 GiB of a tile's first one can be reached by 32-bit offsets.
const WINDOW_BYTES: usize = 1 << 31;
/// Rows of a tile at most.
const TILE_ROWS: usize = 256;
/// The longest row, in bytes, and the most outputs of an axis: kernels count them in 31 bits, with room for a tile.
const LIMIT: usize = (1 << 31) - 4096;

/// Shape and layout of an operand or output: `[batch, rows, cols]` or `[rows, cols]` with unit stride on columns.
fn matrix(op: &'static str, arg: &'static str, shape: &[usize], rank: usize) -> Result<[usize; 3]> {
    match (shape, rank) {
        (&[rows, cols], 2) => Ok([1, rows, cols]),
        (&[batch, rows, cols], 3) => Ok([batch, rows, cols]),
        _ => {
            Err(Error::shape(op, arg, shape, if rank == 2 { "[rows, cols]" } else { "[batch, rows, cols]" }))
        }
    }
}

impl<'a, X: Element, W: Element> Product<'a, X, W> {
    fn sizes(&self) -> Result<Sizes> {
        let (op, names) = (self.op, self.names);
        let rank = self.x.shape().len().clamp(2, 3);
        let [batch, m, k] = matrix(op, names.x, self.x.shape(), rank)?;
        let [w_batch, w_rows, w_k] = matrix(op, names.w, self.w.shape(), rank)?;
        if (w_batch, w_k) != (batch, k) {
            let want = if rank == 2 {
                format!("[N, {k}] (K of {})", names.x)
            } else {
                format!("[{batch}, N, {k}] (batch and K of {})", names.x)
            };
            return Err(Error::shape(op, names.w, self.w.shape(), want));
        }
        if self.gated && w_rows % 2 != 0 {
            return Err(Error::shape(
                op,
                names.w,
                self.w.shape(),
                "an even number of rows: gates, then values",
            ));
        }
        for (arg, shape) in [(names.x, self.x.shape()), (names.w, self.w.shape())] {
            let axis = shape.iter().rev().take(2).position(|&n| n > LIMIT / 2);
            if let Some(axis) = axis {
                let what = format!("axis {} of shape {shape:?}", shape.len() - 1 - axis);
                return Err(Error::too_large(op, arg, what, (LIMIT / 2) as u64));
            }
        }
        let n = if self.gated { w_rows / 2 } else { w_rows };
        Ok(Sizes { batch, m, n, k })
    }

    /// Whether there is a kernel for a tile.
    fn serves(&self, tile: GemmTile) -> bool {
        // Kernels whose waves share K read one scale for a lane's rows of w.
        let fine = self.block.as_ref().is_some_and(|b| b.group.n < 4);

        !self.kernels.names[tile.index()].is_empty() && (!fine || !tile.skinny())
    }

    /// Whether kernels by vectors can serve the operands.
    fn by_vectors(&self, sizes: &Sizes) -> bool {
        let fits = |shape: &[usize], strides: &[usize], rows: usize, element: usize| {
            let row = shape.len() - 2;
            let stride = if shape[row] > 1 { strides[row] } else { 0 };
            rows.saturating_mul(stride).saturating_add(sizes.k).saturating_mul(element) < WINDOW_BYTES
        };
        // Values are reached from the gates' window.
        let w_rows = if self.gated { sizes.n + TILE_ROWS } else { TILE_ROWS };
        self.x.rows_aligned(16)
            && self.w.rows_aligned(16)
            && (sizes.k * size_of::<X>()).is_multiple_of(16)
            && fits(self.x.shape(), self.x.strides(), TILE_ROWS, size_of::<X>())
            && fits(self.w.shape(), self.w.strides(), w_rows, size_of::<W>())
    }

    /// Checks everything, and launches what makes `y`. `planes`: f32 for the parts of K, if it is to be cut.
    pub fn run<Y: Float>(
        self,
        stream: &Stream,
        mut y: TensorViewMut<Y>,
        mut workspace: Option<TensorViewMut<f32>>,
        mut store: Store,
    ) -> Result<()> {
        let (op, names) = (self.op, self.names);
        let sizes = self.sizes()?;
        let Sizes { batch, m, n, k } = sizes;
        let rank = self.x.shape().len();
        self.x.expect_unit_stride(op, names.x)?;
        self.w.expect_unit_stride(op, names.w)?;
        self.x.expect_aligned(op, names.x, size_of::<X>() as u64)?;
        self.w.expect_aligned(op, names.w, size_of::<W>() as u64)?;
        let want: &[usize] = if rank == 2 { &[m, n] } else { &[batch, m, n] };
        y.expect_shape(op, "y", want)?;
        y.expect_unit_stride(op, "y")?;
        y.expect_aligned(op, "y", size_of::<Y>() as u64)?;
        self.check_vectors(rank, &sizes)?;
        if let Some(workspace) = &workspace {
            workspace.dims::<1>(op, "workspace")?;
            workspace.expect_contiguous(op, "workspace")?;
            workspace.expect_aligned(op, "workspace", 16)?;
        }
        self.check_aliases(&y, workspace.as_ref())?;
        if batch == 0 || m == 0 || n == 0 {
            return Ok(());
        }

        let vectors = self.by_vectors(&sizes);
        let aligned = y.rows_aligned(16);
        let columns = if self.gated { 2 * n } else { n };
        let plane = outputs([batch, m, columns]);
        let room = workspace.as_ref().map_or(0, |w| w.numel() / plane.max(1));
        let info = stream.device().info();
        let most = if store.adds() { MOST_ATOMIC_SPLITS } else { room.clamp(1, MOST_SPLITS) };
        let config = match self.options.config {
            Some(config) => self.check_config(config, vectors, plane, room, store)?,
            None => {
                let (precision, sizes) = (self.precision, [batch, m, columns, k]);
                Job { info, precision, sizes, vectors, most_splits: most }.choose(|tile| self.serves(tile))
            }
        };
        let (each, splits) = config.parts(k, self.precision, self.block.as_ref().map_or(1, |b| b.group.k));
        let (m_tiles, n_tiles) = config.tiles(m, columns);
        let blocks = (batch as u64).saturating_mul(m_tiles as u64).saturating_mul(n_tiles as u64);
        let blocks = blocks.saturating_mul(splits as u64);
        if blocks > LIMIT as u64 {
            return Err(Error::too_large(op, "y", format!("{blocks} tiles"), LIMIT as u64));
        }

        if store == Store::ZeroAndAdd {
            store = if splits > 1 { Store::Add } else { Store::Round };
            if splits > 1 {
                let kernel = stream.kernel(&kernels::REDUCE, "gemm_zero")?;
                let mut launch = stream.launch(op, &kernel);
                let out = Output::new::<Y>(&launch.output("y", &mut y.reborrow())?, aligned);
                let epilogue = self.epilogue(&mut launch, &sizes, &out, Store::Round, false)?;
                self.launch_reduce(stream, launch, epilogue, &sizes, None)?;
            }
        }
        let split = splits > 1 && store != Store::Add;
        let objects = if config.tile.skinny() { self.kernels.skinny } else { self.kernels.tiles };
        let kernel = stream.kernel(objects, self.kernels.names[config.tile.index()])?;
        let mut launch = stream.launch(op, &kernel);
        let out = match (&mut workspace, split) {
            (Some(planes), true) => {
                let data = launch.output_address("workspace", &mut planes.reborrow())?;
                let row = columns as i64;
                let [batch, split] = [row * m as i64, plane as i64];
                Output {
                    data,
                    batch,
                    row,
                    split,
                    type_: float_index(hk_core::DType::F32),
                    vectors: columns % 8 == 0,
                }
            }
            _ => Output::new::<Y>(&launch.output("y", &mut y.reborrow())?, aligned),
        };
        let params = Params {
            x: Operand::new(&launch.input(names.x, &self.x)?, size_of::<X>()),
            w: Operand::new(&launch.input(names.w, &self.w)?, size_of::<W>()),
            grid: Grid {
                m_tiles: m_tiles as u32,
                n_tiles: n_tiles as u32,
                group: config.group.clamp(1, m_tiles) as u32,
                splits: splits as u32,
                split_bytes: (each * size_of::<X>()) as u32,
                k_bytes: (k * size_of::<X>()) as u32,
                blocks: blocks as u32,
                pad: 0,
            },
            epilogue: self.epilogue(
                &mut launch,
                &sizes,
                &out,
                if split { Store::Plane } else { store },
                true,
            )?,
        };
        let grid = LaunchConfig::grid_1d(blocks as usize);
        // SAFETY: the checks make operands, vectors, scales and outputs as long as M, N and K, which the tiles cover and the
        // kernel bounds its accesses by; planes have room for as many splits; the loader matches the parameters to the kernel.
        unsafe {
            match &self.block {
                None => launch.run(grid, &params)?,
                Some(BlockScales { x, w, group }) => {
                    let x_scale = BlockScale::new(&launch.input(names.x_scale, x)?, 1, group.k);
                    let w_scale = BlockScale::new(&launch.input(names.w_scale, w)?, group.n, group.k);
                    launch.run(grid, &BlockParams { common: params, x_scale, w_scale })?;
                }
            }
        }
        if !split {
            return Ok(());
        }
        let kernel = stream.kernel(&kernels::REDUCE, "gemm_reduce")?;
        let mut launch = stream.launch(op, &kernel);
        if let Some(planes) = &mut workspace {
            launch.output_address("workspace", &mut planes.reborrow())?;
        }
        let to = Output::new::<Y>(&launch.output("y", &mut y.reborrow())?, aligned);
        let epilogue = self.epilogue(&mut launch, &sizes, &to, store, false)?;
        self.launch_reduce(stream, launch, epilogue, &sizes, Some((&out, splits)))
    }

    /// A kernel of `hip/reduce.hip`.
    fn launch_reduce(
        &self,
        stream: &Stream,
        launch: Launch,
        epilogue: Epilogue,
        sizes: &Sizes,
        planes: Option<(&Output, usize)>,
    ) -> Result<()> {
        let info = stream.device().info();
        let parts = sizes.n.div_ceil(REDUCED_PART);
        let (data, strides, splits) = match planes {
            Some((out, splits)) => (out.data, [out.split, out.batch, out.row], splits),
            None => (0, [0; 3], 0),
        };
        let params = ReduceParams {
            epilogue,
            planes: data,
            split: strides[0],
            batch: strides[1],
            row: strides[2],
            splits: splits as u32,
            parts: parts as u32,
            batches: sizes.batch as u32,
            gated: self.gated.into(),
        };
        let threads = outputs([sizes.batch, sizes.m, parts]);
        let most = info.compute_units as usize * REDUCE_BLOCKS_PER_CU;
        // SAFETY: y and the planes are as long as batch, M and N, which the kernels cover whatever the grid.
        unsafe { launch.run(LaunchConfig::grid_1d(threads.div_ceil(REDUCE_THREADS).min(most)), &params) }
    }

    /// Bias and scales: shape, stride, alignment.
    fn check_vectors(&self, rank: usize, sizes: &Sizes) -> Result<()> {
        let op = self.op;
        let check = |arg, view: &TensorView<f32>, len: usize, letter: &str| {
            let shape = view.shape();
            let lead = rank - 2;
            let batched = shape.len() > lead && shape[..lead].iter().all(|&b| b == sizes.batch);
            let rest = if batched { &shape[lead..] } else { shape };
            let fits = match rest {
                [n] => *n == len,
                [a, b] => a * b == len && (*a == 1 || *b == 1),
                _ => false,
            };
            if view.numel() != 1 && !(batched && fits) {
                let batch = if lead == 1 { format!("{}, ", sizes.batch) } else { String::new() };
                let want =
                    format!("[{batch}{len}] ({letter}), [{batch}{len}, 1], [{batch}1, {len}] or one number");
                return Err(Error::shape(op, arg, shape, want));
            }
            view.expect_contiguous(op, arg)?;
            view.expect_aligned(op, arg, 4)
        };
        if let Some(Scales { x, w }) = &self.scales {
            check(self.names.x_scale, x, sizes.m, "M")?;
            check(self.names.w_scale, w, sizes.n, "N")?;
        }
        if let Some(BlockScales { x, w, group }) = &self.block {
            if !group.n.is_power_of_two() || group.n > LIMIT {
                return Err(Error::argument(op, "group.n", group.n, "a power of two"));
            }
            if !group.k.is_power_of_two() || !(GROUP..=LIMIT).contains(&group.k) {
                return Err(Error::argument(
                    op,
                    "group.k",
                    group.k,
                    format!("a power of two from {GROUP} on"),
                ));
            }
            let groups = sizes.k.div_ceil(group.k);
            let check = |arg, view: &TensorView<f32>, rows: usize, why: &str| {
                let want: &[usize] = if rank == 2 { &[rows, groups] } else { &[sizes.batch, rows, groups] };
                if view.shape() != want {
                    return Err(Error::shape(
                        op,
                        arg,
                        view.shape(),
                        format!("{want:?} ({why}, groups of K)"),
                    ));
                }
                view.expect_aligned(op, arg, 4)?;
                let spread = view.strides()[rank - 2..]
                    .iter()
                    .zip(&want[rank - 2..])
                    .map(|(s, n)| s.saturating_mul(n.saturating_sub(1)));
                if spread.fold(0, usize::saturating_add) > WINDOW_BYTES / 4 - 1 {
                    return Err(Error::too_large(
                        op,
                        arg,
                        format!("strides {:?}", view.strides()),
                        (WINDOW_BYTES / 4) as u64,
                    ));
                }
                Ok(())
            };
            check(self.names.x_scale, x, sizes.m, "M")?;
            check(self.names.w_scale, w, sizes.n.div_ceil(group.n), "groups of N")?;
        }
        if let Some(bias) = &self.bias {
            bias.check(op, rank, sizes.batch, sizes.n)?;
        }
        Ok(())
    }

    fn check_aliases<Y: Element>(
        &self,
        y: &TensorViewMut<Y>,
        workspace: Option<&TensorViewMut<f32>>,
    ) -> Result<()> {
        let bias = self.bias.as_ref().map(FloatView::operand);
        let (x_scale, w_scale) = match &self.scales {
            Some(Scales { x, w }) => (Some(x as &dyn hk_core::Operand), Some(w as &dyn hk_core::Operand)),
            None => match &self.block {
                Some(b) => (Some(&b.x as &dyn hk_core::Operand), Some(&b.w as &dyn hk_core::Operand)),
                None => (None, None),
            },
        };
        let inputs: [NamedOperand; 5] = [
            (self.names.x, Some(&self.x)),
            (self.names.w, Some(&self.w)),
            (self.names.x_scale, x_scale),
            (self.names.w_scale, w_scale),
            ("bias", bias),
        ];
        let workspace = workspace.map(|w| w as &dyn hk_core::Operand);
        check_aliases(self.op, &inputs, &[(("y", Some(y)), &[]), (("workspace", workspace), &[])])
    }

    fn check_config(
        &self,
        config: GemmConfig,
        vectors: bool,
        plane: usize,
        room: usize,
        store: Store,
    ) -> Result<GemmConfig> {
        let op = self.op;
        if config.splits == 0 || config.splits > u16::MAX as usize {
            return Err(Error::argument(op, "splits", config.splits, "1 to 65535"));
        }
        if config.group == 0 {
            return Err(Error::argument(op, "group", config.group, "at least 1"));
        }
        if !vectors && config.tile != GemmTile::Elements {
            let want = "GemmTile::Elements, as rows do not begin on 16 bytes, are no multiple of 16 bytes long, or lie too far apart";
            return Err(Error::argument(op, "tile", format!("{:?}", config.tile), want));
        }
        if !self.serves(config.tile) {
            let served = GemmTile::ALL.into_iter().filter(|&tile| self.serves(tile));
            let want = format!("one of {:?}", served.collect::<Vec<_>>());
            return Err(Error::argument(op, "tile", format!("{:?}", config.tile), want));
        }
        if config.splits > 1 && !store.adds() && config.splits > room {
            let want =
                format!("[{}] or longer ({} splits)", config.splits.saturating_mul(plane), config.splits);
            return Err(Error::shape(op, "workspace", [room * plane], want));
        }
        Ok(config)
    }

    fn epilogue(
        &self,
        launch: &mut Launch<'a>,
        sizes: &Sizes,
        out: &Output,
        store: Store,
        with_scales: bool,
    ) -> Result<Epilogue> {
        let (bias, bias_type, bias_batch) = match &self.bias {
            Some(bias) => bias.params(launch)?,
            None => (0, 0, 0),
        };
        let mut e = Epilogue {
            y: out.data,
            y_batch: out.batch,
            y_row: out.row,
            y_split: out.split,
            bias,
            bias_batch,
            x_scale: 0,
            w_scale: 0,
            x_scale_batch: 0,
            w_scale_batch: 0,
            x_scale_step: 0,
            w_scale_step: 0,
            rows: sizes.m as u32,
            cols: sizes.n as u32,
            y_type: out.type_ as u32,
            bias_type,
            store: store as u32,
            activation: self.options.activation.map_or(NO_ACTIVATION, |a| a as u32),
            vectors: out.vectors.into(),
            pad: 0,
        };
        if let Some(Scales { x, w }) = self.scales.as_ref().filter(|_| with_scales) {
            let step = |t: &TensorView<f32>| u32::from(t.numel() != 1);
            e.x_scale_step = step(x);
            e.w_scale_step = step(w);
            e.x_scale_batch = i64::from(e.x_scale_step) * sizes.m as i64;
            e.w_scale_batch = i64::from(e.w_scale_step) * sizes.n as i64;
            e.x_scale = launch.input(self.names.x_scale, x)?.data();
            e.w_scale = launch.input(self.names.w_scale, w)?.data();
        }
        Ok(e)
    }
}

/// Splits that blocks add up in memory, at most: each adds to every output.
pub(crate) const MOST_ATOMIC_SPLITS: usize = 16;
/// Outputs of a lane, threads of a block, and blocks a CU, of `hip/reduce.hip`.
const REDUCED_PART: usize = 8;
const REDUCE_THREADS: usize = 256;
const REDUCE_BLOCKS_PER_CU: usize = 8;

/// Where sums go.
struct Output {
    data: u64,
    batch: i64,
    row: i64,
    split: i64,
    type_: usize,
    vectors: bool,
}

impl Output {
    fn new<Y: Float>(layout: &GlobalLayout, vectors: bool) -> Self {
        let [_, batch, row, _] = layout.strides();
        Self { data: layout.data(), batch, row, split: 0, type_: float_index(Y::DTYPE), vectors }
    }
}

impl<'a> FloatView<'a> {
    fn operand(&self) -> &dyn hk_core::Operand {
        match self {
            Self::Bf16(view) => view,
            Self::F16(view) => view,
            Self::F32(view) => view,
        }
    }

    fn check(&self, op: &'static str, rank: usize, batch: usize, n: usize) -> Result<()> {
        fn check<T: Element>(
            op: &'static str,
            view: &TensorView<T>,
            rank: usize,
            batch: usize,
            n: usize,
        ) -> Result<()> {
            let fits = match (rank, view.shape()) {
                (2, [cols]) => *cols == n,
                (3, [b, cols] | [b, 1, cols]) => (*b, *cols) == (batch, n),
                _ => false,
            };
            if !fits {
                let want = if rank == 2 {
                    format!("[{n}] (N)")
                } else {
                    format!("[{batch}, {n}] or [{batch}, 1, {n}] (batch and N)")
                };
                return Err(Error::shape(op, "bias", view.shape(), want));
            }
            view.expect_contiguous(op, "bias")?;
            view.expect_aligned(op, "bias", size_of::<T>() as u64)
        }
        match self {
            Self::Bf16(view) => check(op, view, rank, batch, n),
            Self::F16(view) => check(op, view, rank, batch, n),
            Self::F32(view) => check(op, view, rank, batch, n),
        }
    }

    /// Address, type, and elements of a batch.
    fn params(&self, launch: &mut Launch<'a>) -> Result<(u64, u32, i64)> {
        fn params<'a, T: Float>(
            launch: &mut Launch<'a>,
            view: &TensorView<'a, T>,
        ) -> Result<(u64, u32, i64)> {
            let cols = view.shape().last().map_or(0, |&n| n as i64);
            Ok((launch.input("bias", view)?.data(), float_index(T::DTYPE) as u32, cols))
        }
        match self {
            Self::Bf16(view) => params(launch, view),
            Self::F16(view) => params(launch, view),
            Self::F32(view) => params(launch, view),
        }
    }
}
