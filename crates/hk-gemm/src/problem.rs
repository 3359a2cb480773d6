//! What all products have in common: operands, epilogues, splits of K, launches.

use crate::config::{GemmConfig, GemmTile, Precision, STAGE_BYTES};
use crate::kernels;
use crate::params::{
    BlockParams, BlockScale, Epilogue, Fusion, Grid, Groups, MixedParams, NO_ACTIVATION, Operand, Output,
    Params, ReduceParams,
};
use crate::views::{Addend, FloatView, MX_BLOCK, MxScaleView, Weight};
use bytemuck::Zeroable;
use hk_core::quant::BlockRule;
use hk_core::{
    CodeObjects, DType, DeviceInfo, Element, Error, Float, Launch, LaunchConfig, NamedOperand, Result,
    Stream, TensorView, TensorViewMut, check_aliases,
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
    /// `min(max(x, 0), 6)`.
    Relu6 = 5,
}

/// What a product can be asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GemmOptions {
    /// Applied to sums after the bias.
    pub activation: Option<Activation>,
    /// In place of what suits the sizes and the device; see [`GemmConfig`].
    pub config: Option<GemmConfig>,
    /// `y` has one axis more, the first, of any length `S`, and is of `f32`: K is cut into `S` parts, and `y[s]` is the product
    /// over part `s` (zero where there are more parts than K has columns for), with all scales, the first one with the bias.
    /// No activation.
    pub skip_reduce: bool,
}

impl GemmOptions {
    /// Refuses an activation, which parts of sums cannot have.
    pub(crate) fn expect_no_activation(&self, op: &'static str) -> Result<()> {
        match self.activation {
            None => Ok(()),
            Some(activation) => Err(Error::argument(op, "activation", format!("{activation:?}"), "none")),
        }
    }
}

/// What becomes of sums: `Store` in `hip/epilogue.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    Round = 0,
    Plane = 1,
    Add = 2,
}

/// Where a product goes.
#[expect(clippy::large_enum_variant, reason = "there is one of them at a time")]
pub(crate) enum To<'t, 'a, Y: Float> {
    /// `[.., M, N]`.
    Y(TensorViewMut<'t, Y>),
    /// The same, added to zeros or to what is there, by the blocks.
    Sum { y: TensorViewMut<'t, Y>, accumulate: bool },
    /// `[S, .., M, N]`: of each of S parts of K its own.
    Planes(TensorViewMut<'t, Y>),
    /// Rows of `N = D (S1 + S2)` columns: `[M, D, S1 + S3]`, the last S3 columns from `cat`, and `[M, D, S2]`.
    Split { y: TensorViewMut<'t, Y>, rest: TensorViewMut<'t, Y>, cat: FloatView<'a> },
}

impl<'t, 'a, Y: Float> To<'t, 'a, Y> {
    pub fn y(&mut self) -> &mut TensorViewMut<'t, Y> {
        match self {
            Self::Y(y) | Self::Sum { y, .. } | Self::Planes(y) | Self::Split { y, .. } => y,
        }
    }

    /// Whether blocks add up the parts of K in memory, and need no planes.
    fn adds(&self) -> bool {
        matches!(self, Self::Sum { .. })
    }
}

/// Length of the workspace, in `f32`, with which products of `[batch, m, k]` by `[batch, n, k]` can cut K into as many parts
/// as suit the device, whichever operator it is; 0: none would. `n` counts the rows of `w`, with gates and values both. A
/// shorter workspace, or none, is as good but for speed. Rows that do not begin on 16 bytes are not reckoned with.
pub fn gemm_workspace(info: &DeviceInfo, precision: Precision, [batch, m, n, k]: [usize; 4]) -> usize {
    let splits = |serves: fn(GemmTile) -> bool| {
        GemmConfig::choose(info, precision, [batch, m, n, k], true, MOST_SPLITS, serves).splits
    };
    let plain = splits(|tile| tile != GemmTile::T256x128);
    // Beside the quantization of the activations.
    let once = splits(|tile| !matches!(tile, GemmTile::T256x128 | GemmTile::S16x16Twice));
    // Of groups of few columns.
    let short = splits(|tile| tile == GemmTile::T64x64);
    let splits = match precision {
        Precision::Bf16 | Precision::F16 => {
            let gated =
                splits(|tile| !matches!(tile, GemmTile::T256x128 | GemmTile::S16x16 | GemmTile::S16x16Twice));
            plain.max(once).max(gated)
        }
        Precision::HalfByByte | Precision::HalfByFp4 | Precision::Fp8ByFp4 | Precision::Fp4 => {
            let mixed = splits(|tile| {
                use GemmTile::{S16x16, S16x16Twice, T256x128, T256x256};
                !matches!(tile, T256x256 | T256x128 | S16x16 | S16x16Twice)
            });
            mixed.max(short)
        }
        Precision::I8 | Precision::Fp8 => {
            let block = splits(|tile| {
                !matches!(tile, GemmTile::T256x256 | GemmTile::T128x128 | GemmTile::S16x16Twice)
            });
            // Of few rows of w.
            let fine = splits(|tile| matches!(tile, GemmTile::T256x128 | GemmTile::T64x64));
            plain.max(block).max(fine).max(short)
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

/// Scales of whole rows: `[.., M]` of x, `[.., N]` of w, or one number.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Scales<'a> {
    pub x: Option<TensorView<'a, f32>>,
    pub w: Option<TensorView<'a, f32>>,
}

/// Scales of blocks: of x `[.., M, groups of K]`, of w `[.., groups of N, groups of K]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockScales<'a> {
    pub x: TensorView<'a, f32>,
    pub w: TensorView<'a, f32>,
    pub group: BlockShape,
}

/// Scales of mxfp4, and how x is quantized to it, if it is.
#[derive(Clone, Copy)]
pub(crate) struct MxScales<'a> {
    pub x: Option<MxScaleView<'a>>,
    pub w: MxScaleView<'a>,
    /// Where the scales of 128 columns are words.
    pub by_words: &'static Kernels,
}

/// Scales of products by blocks of K.
#[derive(Clone, Copy)]
pub(crate) enum Blocks<'a> {
    None,
    /// Of both operands.
    F32(BlockScales<'a>),
    /// Of codes that 16-bit floats are multiplied by, or that they are quantized to.
    Weights {
        w: TensorView<'a, f32>,
        group: BlockShape,
    },
    Mx(MxScales<'a>),
}

/// How rows of x choose among matrices w, on the device; `Grouping` in `hip/problem.h`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Grouping<'a> {
    /// Batch b has matrix b.
    Batches,
    /// Likewise, for its first rows, as many as the list says.
    Masked(TensorView<'a, i32>),
    /// Row m has the matrix that the list says, or none.
    Rows(TensorView<'a, i32>),
}

impl<'a> Grouping<'a> {
    fn list(&self) -> Option<&TensorView<'a, i32>> {
        match self {
            Self::Batches => None,
            Self::Masked(list) | Self::Rows(list) => Some(list),
        }
    }
}

/// What comes after the product.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct After<'a> {
    /// A number to divide by.
    pub divisor: Option<TensorView<'a, f32>>,
    /// `a g + b`, or `a b + g`, of the product g.
    pub terms: Option<(FuseType, Addend<'a>, Addend<'a>)>,
}

/// How two terms meet a product `g`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum FuseType {
    /// `a * g + b`.
    ScaleAdd = 1,
    /// `a * b + g`.
    AddProduct = 2,
}

/// `Fusion::Kind::SplitCat` in `hip/epilogue.h`.
const SPLIT_CAT: u32 = 3;

/// What has one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockShape {
    /// Rows of `w`: a power of two.
    pub n: usize,
    /// Columns of `a` and `w`: a power of two. Fewer than 128 are slower, fewer than 16 by far.
    pub k: usize,
}

impl Default for BlockShape {
    /// 128 by 128.
    fn default() -> Self {
        Self { n: 128, k: 128 }
    }
}

/// Columns whose products kernels sum before they scale, but for those of groups of less.
pub(crate) const GROUP: usize = 128;
/// The fewest columns of a group that can be loaded by vectors.
pub(crate) const GROUP_BY_VECTORS: usize = 16;

/// Names of the arguments, for errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    pub x: &'static str,
    pub w: &'static str,
    pub x_scale: &'static str,
    pub w_scale: &'static str,
    pub bias: &'static str,
    pub y: &'static str,
    pub groups: &'static str,
}

/// Those of most operators.
pub(crate) const NAMES: Names =
    Names { x: "a", w: "w", x_scale: "a_scale", w_scale: "w_scale", bias: "bias", y: "y", groups: "groups" };

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
        $crate::problem::gemm_names!($type, $end, $s16x16, "")
    };
    ($type:literal, $end:literal, $s16x16:expr, $twice:expr) => {
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
            $twice,
        ]
    };
}
pub(crate) use gemm_names;

/// A product `[.., M, K]` by `[.., N, K]`.
pub(crate) struct Product<'a, X: Element, W: Element> {
    pub op: &'static str,
    pub names: Names,
    pub kernels: &'static Kernels,
    pub precision: Precision,
    pub x: TensorView<'a, X>,
    pub w: Weight<'a, W>,
    pub scales: Scales<'a>,
    pub blocks: Blocks<'a>,
    pub bias: Option<FloatView<'a>>,
    pub grouping: Grouping<'a>,
    pub after: After<'a>,
    /// Rows of `w` are gates, then values.
    pub gated: bool,
    pub options: GemmOptions,
}

/// Lengths of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    batch: usize,
    /// Matrices of w.
    matrices: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

impl Sizes {
    /// Of an output.
    pub fn outputs(&self) -> usize {
        outputs([self.batch, self.m, self.n])
    }
}

/// A call that nothing is wrong with.
pub(crate) struct Checked<'t, 'a, Y: Float> {
    pub to: To<'t, 'a, Y>,
    pub sizes: Sizes,
    pub plan: Plan,
}

/// How a product is launched.
pub(crate) struct Plan {
    pub config: GemmConfig,
    /// Parts of K, and bytes of a row in each.
    pub splits: usize,
    split_bytes: usize,
    m_tiles: usize,
    n_tiles: usize,
    pub blocks: usize,
}

/// What a kernel that multiplies is given.
pub(crate) enum Given {
    Plain(Params),
    Block(BlockParams),
    Mixed(MixedParams),
}

/// Rows that begin within 2 GiB of a tile's first one can be reached by 32-bit offsets.
pub(crate) const WINDOW_BYTES: usize = 1 << 31;
/// Rows of a tile at most; with matrices that rows choose.
const TILE_ROWS: usize = 256;
pub(crate) const GROUPED_ROWS: usize = 128;
/// The longest row, in bytes, and the most outputs of an axis: kernels count them in 31 bits, with room for a tile.
pub(crate) const LIMIT: usize = (1 << 31) - 4096;

/// Shape of an operand: `[batch, rows, cols]` or `[rows, cols]`.
fn matrix(op: &'static str, arg: &'static str, shape: &[usize], rank: usize) -> Result<[usize; 3]> {
    match (shape, rank) {
        (&[rows, cols], 2) => Ok([1, rows, cols]),
        (&[batch, rows, cols], 3) => Ok([batch, rows, cols]),
        _ => {
            Err(Error::shape(op, arg, shape, if rank == 2 { "[rows, cols]" } else { "[batch, rows, cols]" }))
        }
    }
}

/// Elements in one of a tensor.
pub(crate) const fn packed<T: Element>() -> usize {
    if matches!(T::DTYPE, DType::Fp4x2) { 2 } else { 1 }
}

impl<'a> Blocks<'a> {
    /// Columns, a multiple of which every part of K has.
    fn columns(&self) -> usize {
        match self {
            Self::None => 1,
            Self::F32(BlockScales { group, .. }) | Self::Weights { group, .. } => group.k,
            Self::Mx(_) => GROUP,
        }
    }

    /// What has one scale, if it is not of mxfp4.
    fn group(&self) -> Option<BlockShape> {
        match self {
            Self::F32(BlockScales { group, .. }) | Self::Weights { group, .. } => Some(*group),
            Self::None | Self::Mx(_) => None,
        }
    }
}

impl<'a, X: Element, W: Element> Product<'a, X, W> {
    /// Rank of x.
    fn rank(&self) -> usize {
        self.x.shape().len()
    }

    pub fn sizes(&self) -> Result<Sizes> {
        let (op, names) = (self.op, self.names);
        let (rank, w_shape) = (self.rank().clamp(2, 3), self.w.view().shape());
        let chosen = matches!(self.grouping, Grouping::Rows(_));
        let [batch, m, x_cols] = matrix(op, names.x, self.x.shape(), rank)?;
        let [matrices, w_rows, w_cols] = matrix(op, names.w, w_shape, if chosen { 3 } else { rank })?;
        let [k, w_k] = [x_cols.saturating_mul(packed::<X>()), w_cols.saturating_mul(packed::<W>())];
        let same_k = w_k == k || self.w.shuffled() && w_k > k;
        if !same_k || !chosen && matrices != batch {
            let lead = match (rank, chosen) {
                (2, false) => String::new(),
                (_, true) => "matrices, ".into(),
                _ => format!("{batch}, "),
            };
            let why = if rank == 2 { "K of" } else { "batch and K of" };
            let cols = k / packed::<W>();
            return Err(Error::shape(op, names.w, w_shape, format!("[{lead}N, {cols}] ({why} {})", names.x)));
        }
        if self.gated && w_rows % 2 != 0 {
            return Err(Error::shape(op, names.w, w_shape, "an even number of rows: gates, then values"));
        }
        for (arg, shape) in [(names.x, self.x.shape()), (names.w, w_shape)] {
            let axis = shape.iter().rev().take(2).position(|&n| n > LIMIT / 2);
            if let Some(axis) = axis {
                let what = format!("axis {} of shape {shape:?}", shape.len() - 1 - axis);
                return Err(Error::too_large(op, arg, what, (LIMIT / 2) as u64));
            }
        }
        let n = if self.gated { w_rows / 2 } else { w_rows };
        Ok(Sizes { batch, matrices, m, n, k })
    }

    /// Whether there is a kernel for a tile.
    pub fn serves(&self, tile: GemmTile) -> bool {
        // Kernels whose waves share K read one scale for a lane's rows of w.
        let fine = self.blocks.group().is_some_and(|group| group.n < 4);
        let fits = !matches!(self.grouping, Grouping::Rows(_)) || tile.shape().0 <= GROUPED_ROWS;
        fits && !self.kernels.names[tile.index()].is_empty() && (!fine || !tile.skinny())
    }

    /// Halvings of a stage to what kernels have in it of a group, if that is less: `RowLayout::less` in `hk/pipeline.h`.
    fn less(&self) -> u32 {
        let stage = STAGE_BYTES / size_of::<X>();
        match self.blocks.group() {
            Some(group) if group.k < stage => (stage / group.k.max(1)).ilog2(),
            _ => 0,
        }
    }

    /// Bytes of so many columns of x, as kernels count them: a group of less than a stage is a stage.
    fn bytes(&self, columns: usize) -> usize {
        let (less, stage) = (self.less(), STAGE_BYTES / size_of::<X>());
        let columns = match stage >> less {
            _ if less == 0 => columns,
            group => (columns / group).saturating_mul(stage).saturating_add(columns % group),
        };
        (columns / packed::<X>()).saturating_mul(size_of::<X>())
    }

    /// Whether kernels by vectors can serve the operands.
    pub fn by_vectors(&self, sizes: &Sizes) -> bool {
        let fits = |shape: &[usize], strides: &[usize], rows: usize, element: usize| {
            let row = shape.len() - 2;
            let stride = if shape[row] > 1 { strides[row] } else { 0 };
            rows.saturating_mul(stride).saturating_add(shape[row + 1]).saturating_mul(element) < WINDOW_BYTES
        };
        // Values are reached from the gates' window.
        let w_rows = if self.gated { sizes.n + TILE_ROWS } else { TILE_ROWS };
        let w = self.w.view();
        self.blocks.group().is_none_or(|group| group.k >= GROUP_BY_VECTORS)
            && self.x.rows_aligned(16)
            && w.rows_aligned(16)
            && (sizes.k / packed::<X>() * size_of::<X>()).is_multiple_of(16)
            && (sizes.k / packed::<W>() * size_of::<W>()).is_multiple_of(16)
            && fits(self.x.shape(), self.x.strides(), TILE_ROWS, size_of::<X>())
            && fits(w.shape(), w.strides(), w_rows, size_of::<W>())
    }

    /// Whether kernels by vectors can serve the operands, and how many rows x has.
    pub fn vectors(&self) -> Result<(bool, usize)> {
        let sizes = self.sizes()?;
        Ok((self.by_vectors(&sizes), sizes.m))
    }

    /// Checks everything.
    pub fn check<'t, Y: Float>(
        &self,
        stream: &Stream,
        mut to: To<'t, 'a, Y>,
        workspace: Option<&TensorViewMut<f32>>,
    ) -> Result<Checked<'t, 'a, Y>> {
        let sizes = self.sizes()?;
        if self.options.skip_reduce {
            to = self.planes(to)?;
        }
        self.check_inputs(&sizes)?;
        self.check_output(&mut to, &sizes)?;
        if let Some(workspace) = workspace {
            workspace.dims::<1>(self.op, "workspace")?;
            workspace.expect_contiguous(self.op, "workspace")?;
            workspace.expect_aligned(self.op, "workspace", 16)?;
        }
        self.check_aliases(&mut to, workspace)?;
        let plan = self.plan(stream, &mut to, &sizes, workspace.map_or(0, TensorViewMut::numel))?;
        Ok(Checked { to, sizes, plan })
    }

    /// Checks everything, and launches what makes the output. `workspace`: f32 for the parts of K, if it is to be cut.
    pub fn run<Y: Float>(
        self,
        stream: &Stream,
        to: To<'_, 'a, Y>,
        workspace: Option<TensorViewMut<f32>>,
    ) -> Result<()> {
        let checked = self.check(stream, to, workspace.as_ref())?;
        self.launch(stream, checked, workspace)
    }

    /// Launches what has been checked, with the same workspace.
    pub fn launch<Y: Float>(
        &self,
        stream: &Stream,
        Checked { mut to, sizes, plan }: Checked<'_, 'a, Y>,
        workspace: Option<TensorViewMut<f32>>,
    ) -> Result<()> {
        if sizes.outputs() == 0 || to.y().numel() == 0 {
            return Ok(());
        }
        match (&mut to, workspace.filter(|_| plan.splits > 1)) {
            (To::Sum { accumulate, .. }, _) => {
                let adds = *accumulate || plan.splits > 1;
                if adds && !*accumulate {
                    self.reduce(stream, &mut to, &sizes, None)?;
                }
                self.multiply(
                    stream,
                    &mut to,
                    &sizes,
                    &plan,
                    if adds { Store::Add } else { Store::Round },
                    None,
                )
            }
            (To::Planes(_), _) => self.multiply(stream, &mut to, &sizes, &plan, Store::Plane, None),
            (_, Some(mut planes)) => {
                self.multiply(stream, &mut to, &sizes, &plan, Store::Plane, Some(planes.reborrow()))?;
                self.reduce(stream, &mut to, &sizes, Some((planes, plan.splits)))
            }
            (_, None) => self.multiply(stream, &mut to, &sizes, &plan, Store::Round, None),
        }
    }

    /// The output if parts of K are not summed.
    fn planes<'t, Y: Float>(&self, to: To<'t, 'a, Y>) -> Result<To<'t, 'a, Y>> {
        match to {
            To::Y(y) if !self.gated && self.after.terms.is_none() && self.after.divisor.is_none() => {
                if Y::DTYPE == DType::F32 {
                    Ok(To::Planes(y))
                } else {
                    Err(Error::dtype(self.op, self.names.y, Y::DTYPE, "f32 (skip_reduce)"))
                }
            }
            _ => Err(Error::argument(self.op, "skip_reduce", true, "false: this operator needs whole sums")),
        }
    }

    /// Sums of a part of K: both of gates and of values.
    fn columns(&self, sizes: &Sizes) -> usize {
        if self.gated { 2 * sizes.n } else { sizes.n }
    }

    /// Outputs of a part of K.
    pub fn plane(&self, sizes: &Sizes) -> usize {
        outputs([sizes.batch, sizes.m, self.columns(sizes)])
    }

    fn plan<Y: Float>(
        &self,
        stream: &Stream,
        to: &mut To<Y>,
        sizes: &Sizes,
        workspace: usize,
    ) -> Result<Plan> {
        let &Sizes { batch, m, k, .. } = sizes;
        let columns = self.columns(sizes);
        let vectors = self.by_vectors(sizes);
        let room = workspace / self.plane(sizes).max(1);
        let wanted = if let To::Planes(y) = to { Some(y.shape()[0]) } else { None };
        let most = match wanted {
            Some(splits) => splits,
            None if to.adds() => MOST_ATOMIC_SPLITS,
            None => room.clamp(1, MOST_SPLITS),
        };
        let mut config = match self.options.config {
            Some(config) => self.check_config(
                config,
                vectors,
                self.plane(sizes),
                workspace,
                to.adds() || wanted.is_some(),
            )?,
            None => {
                let info = stream.device().info();
                GemmConfig::choose(info, self.precision, [batch, m, columns, k], vectors, most, |tile| {
                    self.serves(tile)
                })
            }
        };
        config.splits = wanted.unwrap_or(config.splits);
        let arch = stream.device().arch();
        let (each, parts) = config.parts(arch, k, self.precision, self.blocks.columns());
        let splits = wanted.unwrap_or(parts);
        let (m_tiles, n_tiles) = config.tiles(m, columns);
        let blocks = outputs([batch.saturating_mul(splits), m_tiles, n_tiles]);
        if blocks > LIMIT {
            return Err(Error::too_large(self.op, self.names.y, format!("{blocks} tiles"), LIMIT as u64));
        }
        Ok(Plan { config, splits, split_bytes: self.bytes(each), m_tiles, n_tiles, blocks })
    }

    /// The kernels that multiply.
    pub fn kernels(&self, tile: GemmTile, k: usize) -> &'static Kernels {
        match &self.blocks {
            Blocks::Mx(MxScales { x, w, by_words })
                if w.words(k) && x.as_ref().is_none_or(|x| x.words(k)) && tile != GemmTile::Elements =>
            {
                by_words
            }
            _ => self.kernels,
        }
    }

    /// The kernel that multiplies. `planes`: where the sums of parts of K go, if not to the output.
    fn multiply<Y: Float>(
        &self,
        stream: &Stream,
        to: &mut To<'_, 'a, Y>,
        sizes: &Sizes,
        plan: &Plan,
        store: Store,
        mut planes: Option<TensorViewMut<f32>>,
    ) -> Result<()> {
        let tile = plan.config.tile;
        let kernels = self.kernels(tile, sizes.k);
        let objects = if tile.skinny() { kernels.skinny } else { kernels.tiles };
        let kernel = stream.kernel(objects, kernels.names[tile.index()])?;
        let mut launch = stream.launch(self.op, &kernel);
        let given = self.given(&mut launch, to, sizes, plan, store, planes.as_mut())?;
        let grid = LaunchConfig::grid_1d(plan.blocks);
        // SAFETY: the checks make operands, vectors, scales and outputs as long as M, N and K, which the tiles cover and the
        // kernel bounds its accesses by, lists of groups too; planes have room for as many splits; the loader matches the
        // parameters to the kernel.
        unsafe {
            match &given {
                Given::Plain(params) => launch.run(grid, params),
                Given::Block(params) => launch.run(grid, params),
                Given::Mixed(params) => launch.run(grid, params),
            }
        }
    }

    /// The parameters of a kernel that multiplies.
    pub fn given<'l, Y: Float>(
        &self,
        launch: &mut Launch<'l>,
        to: &'l mut To<'_, 'a, Y>,
        sizes: &Sizes,
        plan: &Plan,
        store: Store,
        planes: Option<&'l mut TensorViewMut<'_, f32>>,
    ) -> Result<Given>
    where
        'a: 'l,
    {
        let names = self.names;
        let parts = planes.is_some();
        let (out, fusion) = match planes {
            Some(planes) => {
                let data = launch.output_address("workspace", planes)?;
                let rows = [sizes.m, self.columns(sizes)];
                (Output::planes(data, rows, self.plane(sizes)), Fusion::zeroed())
            }
            None => self.output(launch, to)?,
        };
        let less = self.less();
        let common = Params {
            x: Operand::new(&launch.input(names.x, &self.x)?, size_of::<X>(), false, less),
            w: Operand::new(&launch.input(names.w, self.w.view())?, size_of::<W>(), self.w.shuffled(), less),
            grid: Grid {
                m_tiles: plan.m_tiles as u32,
                n_tiles: plan.n_tiles as u32,
                group: plan.config.group.clamp(1, plan.m_tiles) as u32,
                splits: plan.splits as u32,
                split_bytes: plan.split_bytes as u32,
                k_bytes: self.bytes(sizes.k) as u32,
                blocks: plan.blocks as u32,
                pad: 0,
            },
            epilogue: self.epilogue(launch, sizes, &out, store, [!parts, true])?,
        };
        Ok(match &self.blocks {
            Blocks::None => Given::Plain(common),
            Blocks::F32(BlockScales { x, w, group }) => {
                let bytes = group.k << less;
                let x_scale = BlockScale::new(&launch.input(names.x_scale, x)?, 1, bytes);
                let w_scale = BlockScale::new(&launch.input(names.w_scale, w)?, group.n, bytes);
                Given::Block(BlockParams { common, x_scale, w_scale, fusion })
            }
            Blocks::Weights { w, group } => {
                let bytes = (group.k << less) * size_of::<X>();
                let w_scale = BlockScale::new(&launch.input(names.w_scale, w)?, group.n, bytes);
                Given::Mixed(MixedParams { common, w_scale, fusion, ..MixedParams::zeroed() })
            }
            Blocks::Mx(MxScales { x, w, .. }) => {
                let mut params = MixedParams { common, rule: MX_RULE, fusion, ..MixedParams::zeroed() };
                if let Some(x) = x {
                    params.x_mx = x.params(launch, names.x_scale, sizes.k)?;
                }
                params.w_mx = w.params(launch, names.w_scale, sizes.k)?;
                Given::Mixed(params)
            }
        })
    }

    /// A kernel of `hip/reduce.hip`: sums the planes of as many parts of K; without any, zeros.
    pub fn reduce<Y: Float>(
        &self,
        stream: &Stream,
        to: &mut To<'_, 'a, Y>,
        sizes: &Sizes,
        planes: Option<(TensorViewMut<f32>, usize)>,
    ) -> Result<()> {
        let name = if planes.is_some() { "gemm_reduce" } else { "gemm_zero" };
        let kernel = stream.kernel(&kernels::REDUCE, name)?;
        let mut launch = stream.launch(self.op, &kernel);
        let (from, splits) = match planes {
            Some((mut planes, splits)) => {
                let data = launch.output_address("workspace", &mut planes)?;
                (Output::planes(data, [sizes.m, self.columns(sizes)], self.plane(sizes)), splits)
            }
            None => (Output::planes(0, [0, 0], 0), 0),
        };
        let (out, fusion) = self.output(&mut launch, to)?;
        let parts = sizes.n.div_ceil(REDUCED_PART);
        let params = ReduceParams {
            epilogue: self.epilogue(&mut launch, sizes, &out, Store::Round, [splits > 0, false])?,
            fusion,
            planes: from.data,
            split: from.split,
            batch: from.batch,
            row: from.row,
            splits: splits as u32,
            parts: parts as u32,
            batches: sizes.batch as u32,
            gated: self.gated.into(),
            vectors: from.vectors.into(),
            pad: 0,
        };
        let threads = outputs([sizes.batch, sizes.m, parts]);
        let most = stream.device().info().compute_units as usize * REDUCE_BLOCKS_PER_CU;
        // SAFETY: y and the planes are as long as batch, M and N, which the kernels cover whatever the grid.
        unsafe { launch.run(LaunchConfig::grid_1d(threads.div_ceil(REDUCE_THREADS).min(most)), &params) }
    }

    fn check_output<Y: Float>(&self, to: &mut To<Y>, sizes: &Sizes) -> Result<()> {
        let (op, arg) = (self.op, self.names.y);
        let &Sizes { batch, m, n, .. } = sizes;
        let whole = if self.rank() == 2 { vec![m, n] } else { vec![batch, m, n] };
        match to {
            To::Y(y) | To::Sum { y, .. } => y.expect_shape(op, arg, whole)?,
            To::Planes(y) => match y.shape() {
                [splits, rest @ ..] if *rest == whole[..] && (1..=u16::MAX as usize).contains(splits) => {}
                shape => return Err(Error::shape(op, arg, shape, format!("[parts of K, then {whole:?}]"))),
            },
            To::Split { y, rest, cat } => {
                let fits = match (y.shape(), rest.shape(), cat.shape()) {
                    (&[ym, yd, s13], &[rm, rd, s2], &[cm, cd, s3]) => {
                        [ym, rm, cm] == [m; 3]
                            && yd == rd
                            && rd == cd
                            && s13 >= s3
                            && n == yd * (s13 - s3 + s2)
                    }
                    _ => false,
                };
                if !fits {
                    let want = format!(
                        "[{m}, D, S1 + S3], beside c2 {:?} [{m}, D, S2] and y {:?} [{m}, D, S3], D (S1 + S2) = {n}",
                        rest.shape(),
                        cat.shape()
                    );
                    return Err(Error::shape(op, arg, y.shape(), want));
                }
                cat.expect_rows(op, "y")?;
                rest.expect_unit_stride(op, "c2")?;
                rest.expect_aligned(op, "c2", size_of::<Y>() as u64)?;
            }
        }
        let y = to.y();
        y.expect_unit_stride(op, arg)?;
        y.expect_aligned(op, arg, size_of::<Y>() as u64)
    }

    /// Alignment of operands; bias, scales, terms, lists.
    fn check_inputs(&self, sizes: &Sizes) -> Result<()> {
        let (op, names) = (self.op, self.names);
        self.x.expect_unit_stride(op, names.x)?;
        self.w.view().expect_unit_stride(op, names.w)?;
        self.x.expect_aligned(op, names.x, size_of::<X>() as u64)?;
        self.w.view().expect_aligned(op, names.w, size_of::<W>() as u64)?;
        let [x_lead, w_lead] =
            [sizes.batch, sizes.matrices].map(|n| if self.rank() == 3 { Some(n) } else { None });
        let w_lead = if matches!(self.grouping, Grouping::Rows(_)) { Some(sizes.matrices) } else { w_lead };
        if let Some(x) = &self.scales.x {
            self.check_scale(names.x_scale, x, x_lead, sizes.m, "M")?;
        }
        if let Some(w) = &self.scales.w {
            self.check_scale(names.w_scale, w, w_lead, sizes.n, "N")?;
        }
        match &self.blocks {
            Blocks::None => {}
            Blocks::F32(BlockScales { x, w, group }) => {
                group.check(op)?;
                let groups = sizes.k.div_ceil(group.k);
                self.check_block_scale(names.x_scale, x, x_lead, [sizes.m, groups], "M")?;
                let want = [sizes.n.div_ceil(group.n), groups];
                self.check_block_scale(names.w_scale, w, w_lead, want, "groups of N")?;
            }
            Blocks::Weights { w, group, .. } => {
                group.check(op)?;
                let want = [sizes.n.div_ceil(group.n), sizes.k.div_ceil(group.k)];
                self.check_block_scale(names.w_scale, w, w_lead, want, "groups of N")?;
            }
            Blocks::Mx(MxScales { x, w, .. }) => {
                if !sizes.k.is_multiple_of(MX_BLOCK) {
                    return Err(Error::shape(op, names.x, self.x.shape(), "K a multiple of 32"));
                }
                if let Some(x) = x {
                    x.check(op, names.x_scale, x_lead, [sizes.m, sizes.k])?;
                }
                w.check(op, names.w_scale, w_lead, [sizes.n, sizes.k])?;
            }
        }
        if self.bytes(sizes.k) > LIMIT {
            let groups = self.blocks.columns();
            let most = LIMIT / STAGE_BYTES * groups;
            return Err(Error::too_large(
                op,
                names.x,
                format!("{} columns in groups of {groups}", sizes.k),
                most as u64,
            ));
        }
        if let Some(bias) = &self.bias {
            let n = sizes.n;
            let fits = match (w_lead, bias.shape()) {
                (None, [cols]) => *cols == n,
                (Some(lead), [b, cols] | [b, 1, cols]) => (*b, *cols) == (lead, n),
                _ => false,
            };
            if !fits {
                let want = match w_lead {
                    None => format!("[{n}] (N)"),
                    Some(lead) => format!("[{lead}, {n}] or [{lead}, 1, {n}] (batch and N)"),
                };
                return Err(Error::shape(op, names.bias, bias.shape(), want));
            }
            bias.expect_contiguous(op, names.bias)?;
        }
        if let Some(list) = self.grouping.list() {
            let want = if matches!(self.grouping, Grouping::Masked(_)) { sizes.batch } else { sizes.m };
            list.expect_shape(op, names.groups, [want])?;
            list.expect_contiguous(op, names.groups)?;
            list.expect_aligned(op, names.groups, 4)?;
        }
        if let Some(divisor) = &self.after.divisor {
            divisor.expect_shape(op, "y_scale", [1])?;
            divisor.expect_aligned(op, "y_scale", 4)?;
        }
        if let Some((_, a, b)) = &self.after.terms {
            a.check(op, "a", [sizes.m, sizes.n])?;
            b.check(op, "b", [sizes.m, sizes.n])?;
        }
        Ok(())
    }

    /// One number, or `len`, for each of `lead` batches if there are any.
    fn check_scale(
        &self,
        arg: &'static str,
        view: &TensorView<f32>,
        lead: Option<usize>,
        len: usize,
        letter: &str,
    ) -> Result<()> {
        let shape = view.shape();
        let (batched, rest) = match (lead, shape) {
            (Some(lead), [first, rest @ ..]) => (*first == lead, rest),
            (Some(_), []) => (false, shape),
            (None, _) => (true, shape),
        };
        let fits = match rest {
            [n] => *n == len,
            [a, b] => a * b == len && (*a == 1 || *b == 1),
            _ => false,
        };
        if view.numel() != 1 && !(batched && fits) {
            let batch = lead.map_or(String::new(), |lead| format!("{lead}, "));
            let want =
                format!("[{batch}{len}] ({letter}), [{batch}{len}, 1], [{batch}1, {len}] or one number");
            return Err(Error::shape(self.op, arg, shape, want));
        }
        view.expect_contiguous(self.op, arg)?;
        view.expect_aligned(self.op, arg, 4)
    }

    fn check_block_scale(
        &self,
        arg: &'static str,
        view: &TensorView<f32>,
        lead: Option<usize>,
        want: [usize; 2],
        why: &str,
    ) -> Result<()> {
        let want: Vec<usize> = lead.into_iter().chain(want).collect();
        if view.shape() != want {
            return Err(Error::shape(self.op, arg, view.shape(), format!("{want:?} ({why}, groups of K)")));
        }
        view.expect_aligned(self.op, arg, 4)?;
        let last = want.len() - 2;
        let spread = view.strides()[last..]
            .iter()
            .zip(&want[last..])
            .map(|(s, n)| s.saturating_mul(n.saturating_sub(1)));
        if spread.fold(0, usize::saturating_add) > WINDOW_BYTES / 4 - 1 {
            let what = format!("strides {:?}", view.strides());
            return Err(Error::too_large(self.op, arg, what, (WINDOW_BYTES / 4) as u64));
        }
        Ok(())
    }

    /// All that is read but the terms of `to`.
    pub fn inputs(&self) -> [NamedOperand<'_>; 11] {
        let names = self.names;
        let (block_x, block_w): (Option<&dyn hk_core::Operand>, Option<&dyn hk_core::Operand>) = match &self
            .blocks
        {
            Blocks::None => (None, None),
            Blocks::F32(BlockScales { x, w, .. }) => (Some(x), Some(w)),
            Blocks::Weights { w, .. } => (None, Some(w)),
            Blocks::Mx(MxScales { x, w, .. }) => (erased(x.as_ref().map(MxScaleView::view)), Some(w.view())),
        };
        let terms = self.after.terms.as_ref();
        [
            (names.x, Some(&self.x)),
            (names.w, Some(self.w.view())),
            (names.x_scale, erased(self.scales.x.as_ref())),
            (names.w_scale, erased(self.scales.w.as_ref())),
            (names.x_scale, block_x),
            (names.w_scale, block_w),
            (names.bias, self.bias.as_ref().map(FloatView::operand)),
            (names.groups, erased(self.grouping.list())),
            ("y_scale", erased(self.after.divisor.as_ref())),
            ("a", terms.and_then(|(_, a, _)| a.operand())),
            ("b", terms.and_then(|(_, _, b)| b.operand())),
        ]
    }

    fn check_aliases<Y: Float>(&self, to: &mut To<Y>, workspace: Option<&TensorViewMut<f32>>) -> Result<()> {
        let (cat, rest) = match &*to {
            To::Split { cat, rest, .. } => (Some(*cat), Some(rest.alias())),
            _ => (None, None),
        };
        let mut inputs = self.inputs().to_vec();
        inputs.push(("y", cat.as_ref().map(FloatView::operand)));
        let outputs: [(NamedOperand, &[&'static str]); 3] = [
            ((self.names.y, Some(&*to.y())), &[]),
            (("c2", erased(rest.as_ref())), &[]),
            (("workspace", erased(workspace)), &[]),
        ];
        check_aliases(self.op, &inputs, &outputs)
    }

    pub fn check_config(
        &self,
        config: GemmConfig,
        vectors: bool,
        plane: usize,
        workspace: usize,
        adds: bool,
    ) -> Result<GemmConfig> {
        let op = self.op;
        if config.splits == 0 || config.splits > u16::MAX as usize {
            return Err(Error::argument(op, "splits", config.splits, "1 to 65535"));
        }
        if config.group == 0 {
            return Err(Error::argument(op, "group", config.group, "at least 1"));
        }
        if !vectors && config.tile != GemmTile::Elements {
            let want = "GemmTile::Elements, as rows do not begin on 16 bytes, are no multiple of 16 bytes long, or lie too far apart, \
                        or groups have fewer than 16 columns";
            return Err(Error::argument(op, "tile", format!("{:?}", config.tile), want));
        }
        if !self.serves(config.tile) {
            let served = GemmTile::ALL.into_iter().filter(|&tile| self.serves(tile));
            let want = format!("one of {:?}", served.collect::<Vec<_>>());
            return Err(Error::argument(op, "tile", format!("{:?}", config.tile), want));
        }
        if config.splits > 1 && !adds && plane > 0 && config.splits > workspace / plane {
            let want =
                format!("[{}] or longer ({} splits)", config.splits.saturating_mul(plane), config.splits);
            return Err(Error::shape(op, "workspace", [workspace], want));
        }
        Ok(config)
    }

    /// The output, and what comes after the product.
    fn output<'l, Y: Float>(
        &self,
        launch: &mut Launch<'l>,
        to: &'l mut To<'_, 'a, Y>,
    ) -> Result<(Output, Fusion)>
    where
        'a: 'l,
    {
        let mut fusion = Fusion::zeroed();
        if let Some(divisor) = &self.after.divisor {
            fusion.divisor = launch.input("y_scale", divisor)?.data();
        }
        if let Some((kind, a, b)) = &self.after.terms {
            fusion.kind = *kind as u32;
            fusion.a = a.term(launch, "a")?;
            fusion.b = b.term(launch, "b")?;
        }
        if let To::Split { y, rest, cat } = to {
            let stride = |strides: &[usize], axis: usize| strides[axis] as i64;
            let (y_strides, rest_strides, cat_strides) = (y.strides(), rest.strides(), cat.strides());
            let [head, tail, extra] = [y.shape()[2] - cat.shape()[2], rest.shape()[2], cat.shape()[2]];
            fusion.kind = SPLIT_CAT;
            fusion.y_head = stride(y_strides, 1);
            (fusion.rest_row, fusion.rest_head) = (stride(rest_strides, 0), stride(rest_strides, 1));
            (fusion.cat_row, fusion.cat_head) = (stride(cat_strides, 0), stride(cat_strides, 1));
            [fusion.head, fusion.tail, fusion.extra] = [head as u32, tail as u32, extra as u32];
            fusion.cat_type = cat.type_index();
            let eights = |n: usize| n.is_multiple_of(REDUCED_PART);
            let whole = eights(head) && eights(tail) && y.rows_aligned(16) && rest.rows_aligned(16);
            fusion.whole = (whole && cat.rows_aligned(16)).into();
            let row = stride(y_strides, 0);
            fusion.rest = launch.output("c2", &mut rest.reborrow())?.data();
            fusion.cat = cat.address(launch, "y")?;
            let out = Output::new::<Y>(&launch.output(self.names.y, &mut y.reborrow())?, false);
            return Ok((Output { row, ..out }, fusion));
        }
        // Planes are the first axis, whatever the rank.
        let planes = matches!(to, To::Planes(_));
        let y = to.y();
        let (aligned, first) = (y.rows_aligned(16), y.strides()[0] as i64);
        let out = Output::new::<Y>(&launch.output(self.names.y, &mut y.reborrow())?, aligned);
        Ok((Output { split: if planes { first } else { 0 }, ..out }, fusion))
    }

    fn epilogue<'l>(
        &self,
        launch: &mut Launch<'l>,
        sizes: &Sizes,
        out: &Output,
        store: Store,
        [with_bias, with_scales]: [bool; 2],
    ) -> Result<Epilogue>
    where
        'a: 'l,
    {
        let mut e = Epilogue {
            y: out.data,
            y_batch: out.batch,
            y_row: out.row,
            y_split: out.split,
            rows: sizes.m as u32,
            cols: sizes.n as u32,
            y_type: out.type_,
            store: store as u32,
            activation: self.options.activation.map_or(NO_ACTIVATION, |a| a as u32),
            vectors: out.vectors.into(),
            ..Epilogue::zeroed()
        };
        if let Some(bias) = self.bias.as_ref().filter(|_| with_bias) {
            e.bias = bias.address(launch, self.names.bias)?;
            e.bias_type = bias.type_index();
            e.bias_batch = sizes.n as i64;
        }
        let step = |t: &TensorView<f32>| u32::from(t.numel() != 1);
        if let Some(x) = self.scales.x.as_ref().filter(|_| with_scales) {
            e.x_scale_step = step(x);
            e.x_scale_batch = i64::from(e.x_scale_step) * sizes.m as i64;
            e.x_scale = launch.input(self.names.x_scale, x)?.data();
        }
        if let Some(w) = self.scales.w.as_ref().filter(|_| with_scales) {
            e.w_scale_step = step(w);
            e.w_scale_batch = i64::from(e.w_scale_step) * sizes.n as i64;
            e.w_scale = launch.input(self.names.w_scale, w)?.data();
        }
        let kind = match self.grouping {
            Grouping::Batches => 0,
            Grouping::Masked(_) => 1,
            Grouping::Rows(_) => 2,
        };
        let data = match self.grouping.list() {
            Some(list) => launch.input(self.names.groups, list)?.data(),
            None => 0,
        };
        e.groups = Groups { data, kind, matrices: sizes.matrices as u32 };
        Ok(e)
    }
}

pub(crate) fn erased<T: hk_core::Operand>(operand: Option<&T>) -> Option<&dyn hk_core::Operand> {
    operand.map(|t| t as &dyn hk_core::Operand)
}

impl BlockShape {
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        for (arg, n) in [("group.n", self.n), ("group.k", self.k)] {
            if !n.is_power_of_two() || n > LIMIT {
                return Err(Error::argument(op, arg, n, "a power of two"));
            }
        }
        Ok(())
    }

    /// The kernels: those of groups of 128 columns and more, or of less.
    pub(crate) fn kernels(&self, [most, short]: [&'static Kernels; 2]) -> &'static Kernels {
        if self.k < GROUP { short } else { most }
    }
}

/// How x is quantized to mxfp4.
const MX_RULE: BlockRule = BlockRule::fp4(hk_core::quant::BlockScale::Even, 0);
/// Splits that blocks add up in memory, at most: each adds to every output.
pub(crate) const MOST_ATOMIC_SPLITS: usize = 16;
/// Outputs of a lane, threads of a block, and blocks a CU, of `hip/reduce.hip`.
pub(crate) const REDUCED_PART: usize = 8;
pub(crate) const REDUCE_THREADS: usize = 256;
pub(crate) const REDUCE_BLOCKS_PER_CU: usize = 8;
