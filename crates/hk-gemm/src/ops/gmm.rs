//! `gmm`, `ptgmm`, `nptgmm`: GEMMs of groups of rows whose sizes are on the device.

use crate::element::Half;
use crate::gemm::check::WINDOW_BYTES;
use crate::gemm::desc::LIMIT;
use crate::gemm::{Accumulate, Precision};
use crate::kernels::gemm::{GroupSizes, GroupedParams as Params, Strided};
use hk_core::{
    DeviceInfo, Element, Error, IndexView, KernelRef, LaunchConfig, NamedOperand, Result, Stream, TensorView,
    TensorViewMut, check_aliases,
};

/// The tile of outputs that a block of [`gmm`], [`ptgmm`] or [`nptgmm`] computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupedTile {
    /// 256 x 256 by eight waves: a block fills a CU.
    T256x256,
    /// 128 x 128 by four waves: two blocks a CU.
    T128x128,
    /// 64 x 64 by four waves: four blocks a CU.
    T64x64,
    /// 32 x 128 by two waves: groups of few rows. Only `gmm` has it.
    T32x128,
    /// 64 x 64 with scalar loads: any strides and alignment.
    Elements,
}

impl GroupedTile {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::T256x256, Self::T128x128, Self::T64x64, Self::T32x128, Self::Elements];

    /// Rows and columns of outputs.
    pub const fn shape(self) -> (usize, usize) {
        match self {
            Self::T256x256 => (256, 256),
            Self::T128x128 => (128, 128),
            Self::T64x64 | Self::Elements => (64, 64),
            Self::T32x128 => (32, 128),
        }
    }

    /// Blocks that a CU holds.
    const fn per_cu(self) -> usize {
        match self {
            Self::T256x256 => 1,
            Self::T128x128 => 2,
            Self::T32x128 => 3,
            Self::T64x64 | Self::Elements => 4,
        }
    }

    /// The largest that gives each CU as many blocks as it holds, of `groups` outputs of `m` by `n`; the smallest if none does. On
    /// sm_90 256 x 256 does not fit the registers.
    fn choose(info: &DeviceInfo, groups: usize, m: usize, n: usize, serves: impl Fn(Self) -> bool) -> Self {
        let fills = |tile: &Self| {
            let (rows, cols) = tile.shape();
            let tiles = groups.saturating_mul(m.div_ceil(rows)).saturating_mul(n.div_ceil(cols));
            let fits = info.arch.is_amd() || *tile != Self::T256x256;
            fits && serves(*tile) && tiles >= info.compute_units as usize * tile.per_cu()
        };
        [Self::T256x256, Self::T128x128].into_iter().find(fills).unwrap_or(Self::T64x64)
    }
}

/// Options of a grouped GEMM.
///
/// Without a tile: the largest that fills the device if all groups are as large as their average; for averages of up to 32 rows
/// the one of 32. Operands whose layout the others do not serve take [`GroupedTile::Elements`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupedOptions {
    /// The tile.
    pub tile: Option<GroupedTile>,
    /// Blocks that are launched, and take tiles in turn; by default as many as the device holds. [`nptgmm`] has one for each tile.
    pub grid: Option<usize>,
}

/// The kernels for a type and layout of operands, by tile.
type Kernels = &'static [(GroupedTile, KernelRef<Params>)];

macro_rules! kernels {
    ($op:literal, $type:literal, $layout:literal, [$($tile:ident: $shape:literal),+]) => {
        &[
            $((GroupedTile::$tile, const { Params::kernel(concat!($op, $type, "_", $shape, "_", $layout)) }),)+
            (GroupedTile::Elements, const { Params::kernel(concat!($op, $type, "_scalar")) }),
        ]
    };
}
macro_rules! gmm {
    ($type:literal, $layout:literal) => {
        kernels!(
            "gmm_",
            $type,
            $layout,
            [T256x256: "256x256", T128x128: "128x128", T64x64: "64x64", T32x128: "32x128"]
        )
    };
}
macro_rules! tgmm {
    ($type:literal) => {
        [
            kernels!("tgmm_", $type, "mk", [T256x256: "256x256", T128x128: "128x128", T64x64: "64x64"]),
            kernels!("tgmm_", $type, "km", [T128x128: "128x128", T64x64: "64x64"]),
        ]
    };
}

/// Of `hip/gmm.hip`: bf16, then f16; `rhs` with N contiguous, or K.
static GMM: [[Kernels; 2]; 2] =
    [[gmm!("bf16", "kn"), gmm!("bf16", "nk")], [gmm!("f16", "kn"), gmm!("f16", "nk")]];
/// Of `hip/tgmm.hip`: bf16, then f16; `lhs` with K contiguous, or M.
static TGMM: [[Kernels; 2]; 2] = [tgmm!("bf16"), tgmm!("f16")];

const fn type_index(precision: Precision) -> usize {
    matches!(precision, Precision::F16) as usize
}

/// Rows of a tile, columns of K in a stage, at most: what offsets of 32 bits have to reach.
const TILE_ROWS: usize = 256;
const STAGE_COLUMNS: usize = 32;
/// Bytes of an element.
const BYTES: usize = 2;

/// An operand as kernels see it: groups, rows that become rows or columns of the output, columns of K. Strides in elements; of
/// an axis of length one 0.
#[derive(Debug, Clone, Copy)]
struct Side {
    addr: u64,
    lens: [usize; 3],
    strides: [usize; 3],
}

impl Side {
    /// `axes`: those of the tensor that are groups, rows and columns of K.
    fn new<T: Half>(view: &TensorView<T>, axes: [Option<usize>; 3]) -> Self {
        let len = |axis: Option<usize>| axis.map_or(1, |i| view.shape()[i]);
        let stride =
            |axis: Option<usize>| axis.filter(|&i| view.shape()[i] > 1).map_or(0, |i| view.strides()[i]);
        Self { addr: view.addr(), lens: axes.map(len), strides: axes.map(stride) }
    }

    fn on(&self, bytes: usize, strides: [usize; 2]) -> bool {
        self.addr.is_multiple_of(bytes as u64) && strides.iter().all(|s| (s * BYTES).is_multiple_of(bytes))
    }

    /// Whether the vectorized path loads rows: `OperandLayout::Rows`.
    fn rows(&self) -> bool {
        let ([_, _, columns], [group, row, step]) = (self.lens, self.strides);
        let reach = row.saturating_mul(TILE_ROWS).saturating_add(columns).saturating_mul(BYTES);
        (step == 1 || columns == 1)
            && (columns * BYTES).is_multiple_of(16)
            && self.on(16, [group, row])
            && reach < WINDOW_BYTES
    }

    /// Whether it loads columns of K: `OperandLayout::Across`.
    fn across(&self) -> bool {
        let ([_, rows, columns], [group, row, step]) = (self.lens, self.strides);
        // Columns past the last one are told by where they begin.
        let apart = columns <= 1 || step >= rows;
        let reach = step.saturating_add(rows).saturating_mul(STAGE_COLUMNS * BYTES);
        (row == 1 || rows == 1)
            && rows.is_multiple_of(8 / BYTES)
            && apart
            && self.on(8, [group, step])
            && reach < WINDOW_BYTES
    }

    fn params(&self, data: u64) -> Strided {
        let [_, rows, columns] = self.lens;
        let bytes = |stride: usize| (stride * BYTES) as i64;
        let [group, row, step] = self.strides.map(bytes);
        // See `across`.
        let step = if columns == 1 { bytes(rows.next_multiple_of(8 / BYTES)) } else { step };
        Strided { data, group, row, step, rows: rows as u32, pad: 0 }
    }
}

/// Checks that axes can be counted by kernels.
fn check_lengths<T: Half>(op: &'static str, arg: &'static str, view: &TensorView<T>) -> Result<()> {
    let Some(axis) = view.shape().iter().position(|&n| n > LIMIT / 2) else { return Ok(()) };
    let what = format!("axis {axis} of shape {:?}", view.shape());
    Err(Error::too_large(op, arg, what, (LIMIT / 2) as u64))
}

/// Checks the sizes of `groups` groups, if it is known how many there are to be, and gives their number.
fn check_sizes(op: &'static str, sizes: &IndexView, groups: Option<usize>) -> Result<usize> {
    let &[count] = sizes.shape() else {
        return Err(Error::shape(op, "group_sizes", sizes.shape(), "[G]"));
    };
    if groups.is_some_and(|groups| groups != count) {
        let want = format!("[{}] (G of rhs)", groups.unwrap_or_default());
        return Err(Error::shape(op, "group_sizes", sizes.shape(), want));
    }
    match sizes {
        IndexView::I32(view) => view.expect_contiguous(op, "group_sizes")?,
        IndexView::I64(view) => view.expect_contiguous(op, "group_sizes")?,
    }
    sizes.expect_aligned(op, "group_sizes")?;
    Ok(count)
}

/// What both forms have in common once shapes are checked.
struct Plan {
    op: &'static str,
    tile: GroupedTile,
    /// Blocks.
    grid: usize,
    n_tiles: usize,
}

impl Plan {
    /// `serves`: which tiles the layouts permit, and there are kernels of. `outputs`: columns of an output. `tiles`: tasks at most,
    /// given tile and tiles of N.
    fn new(
        op: &'static str,
        info: &DeviceInfo,
        options: GroupedOptions,
        serves: impl Fn(GroupedTile) -> bool,
        choice: GroupedTile,
        cols: usize,
        tasks: impl Fn(usize, usize) -> usize,
    ) -> Result<Self> {
        let tile = match options.tile {
            Some(tile) if !serves(tile) => {
                let served = GroupedTile::ALL.into_iter().filter(|&tile| serves(tile)).collect::<Vec<_>>();
                let want = format!("one of {served:?}, which serve the operands' layouts");
                return Err(Error::argument(op, "tile", format!("{tile:?}"), want));
            }
            Some(tile) => tile,
            None if serves(choice) => choice,
            None => GroupedTile::Elements,
        };
        let (m, n) = tile.shape();
        let n_tiles = cols.div_ceil(n);
        let tasks = tasks(m, n_tiles);
        let grid = match options.grid {
            Some(0) => return Err(Error::argument(op, "grid", 0, "at least one block")),
            Some(grid) => grid,
            None => tasks.min(info.compute_units as usize * tile.per_cu()),
        };
        // Blocks count on by the grid, past the last task.
        if tasks.saturating_add(grid) > LIMIT {
            return Err(Error::too_large(op, "out", format!("{tasks} tiles by {grid} blocks"), LIMIT as u64));
        }
        Ok(Self { op, tile, grid: grid.max(1), n_tiles })
    }

    /// Tiles of M that are walked together: as in `GemmConfig`.
    fn span(&self) -> u32 {
        (2048 / self.tile.shape().0) as u32
    }

    /// The kernel of the tile.
    fn kernel(&self, kernels: Kernels) -> Result<KernelRef<Params>> {
        let found = kernels.iter().find(|(tile, _)| *tile == self.tile);
        let none =
            || Error::argument(self.op, "tile", format!("{:?}", self.tile), "a tile that has a kernel");
        found.map(|(_, kernel)| *kernel).ok_or_else(none)
    }
}

/// `lhs rhs + bias`, by groups or, without sizes, of all rows.
pub(crate) struct GroupedGemm<'a, T: Half> {
    pub op: &'static str,
    /// Of `lhs`, `rhs` and `out`, for errors.
    pub names: [&'static str; 3],
    pub lhs: TensorView<'a, T>,
    /// `[G, K, N]`.
    pub rhs: TensorView<'a, T>,
    pub sizes: Option<IndexView<'a>>,
    pub bias: Option<TensorView<'a, T>>,
    pub options: GroupedOptions,
}

impl<'a, T: Half> GroupedGemm<'a, T> {
    pub fn run(self, stream: &Stream, mut out: TensorViewMut<T>) -> Result<()> {
        let Self { op, names: [lhs_name, rhs_name, out_name], lhs, rhs, sizes, bias, options } = self;
        let [m, k] = lhs.dims(op, lhs_name)?;
        let [groups, rhs_k, n] = rhs.dims(op, rhs_name)?;
        if rhs_k != k {
            return Err(Error::shape(op, rhs_name, rhs.shape(), format!("[G, {k}, N] (K of {lhs_name})")));
        }
        if let Some(sizes) = &sizes {
            check_sizes(op, sizes, Some(groups))?;
        }
        if let Some(bias) = &bias {
            bias.expect_shape(op, "bias", [groups, n])?;
            bias.expect_contiguous(op, "bias")?;
            bias.expect_aligned(op, "bias", BYTES as u64)?;
        }
        out.expect_shape(op, out_name, [m, n])?;
        out.expect_unit_stride(op, out_name)?;
        for (arg, view) in [(lhs_name, &lhs), (rhs_name, &rhs)] {
            view.expect_aligned(op, arg, BYTES as u64)?;
            check_lengths(op, arg, view)?;
        }
        out.expect_aligned(op, out_name, BYTES as u64)?;
        let inputs: [NamedOperand; 4] = [
            (lhs_name, Some(&lhs)),
            (rhs_name, Some(&rhs)),
            ("group_sizes", sizes.as_ref().map(|s| s as &dyn hk_core::Operand)),
            ("bias", bias.as_ref().map(|b| b as &dyn hk_core::Operand)),
        ];
        check_aliases(op, &inputs, &[((out_name, Some(&out)), &[])])?;
        if let Some(axis) = rhs.shape().iter().position(|&n| n == 0) {
            return Err(Error::empty(op, rhs_name, axis, rhs.shape()));
        }
        if m == 0 {
            return Ok(());
        }

        let (x, w) =
            (Side::new(&lhs, [None, Some(0), Some(1)]), Side::new(&rhs, [Some(0), Some(2), Some(1)]));
        let k_contiguous = w.rows();
        let vectors = x.rows() && (k_contiguous || w.across());
        let info = stream.device().info();
        let average = m.div_ceil(groups);
        let choice = if average <= 32 {
            GroupedTile::T32x128
        } else {
            GroupedTile::choose(info, groups, average, n, |_| true)
        };
        let plan = Plan::new(
            op,
            info,
            options,
            |tile| vectors || tile == GroupedTile::Elements,
            choice,
            n,
            // Each group ends with a tile that may not be full; none has more tiles than rows.
            |rows, n_tiles| (m.div_ceil(rows) + (groups - 1).min(m - 1)).saturating_mul(n_tiles),
        )?;
        let (y_row, aligned) = (out.strides()[0] as i64, out.rows_aligned(16));
        let kernels = GMM[type_index(T::PRECISION)][usize::from(k_contiguous)];
        let kernel = stream.kernel(plan.kernel(kernels)?)?;
        let mut launch = stream.launch(op);
        let params = Params {
            a: x.params(launch.input(lhs_name, &lhs)?.data()),
            w: w.params(launch.input(rhs_name, &rhs)?.data()),
            groups: GroupSizes {
                sizes: match &sizes {
                    Some(sizes) => sizes.input(&mut launch, "group_sizes")?.data(),
                    None => 0,
                },
                count: groups as u32,
                rows: m as u32,
                wide: sizes.is_some_and(|s| s.is_i64()).into(),
                pad: 0,
            },
            y: launch.output_address(out_name, &mut out.reborrow())?,
            y_group: 0,
            y_row,
            bias: launch.optional_input("bias", bias.as_ref())?.data(),
            row_sums: 0,
            rows: m as u32,
            cols: n as u32,
            columns: k as u32,
            n_tiles: plan.n_tiles as u32,
            span: plan.span(),
            vectors: aligned.into(),
            accumulate: 0,
            pad: 0,
        };
        // SAFETY: the checks make operands, bias and output as long as M, N, K and the number of groups, which the kernel bounds
        // its accesses by whatever the sizes are.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(plan.grid), &params) }
    }
}

/// Products of groups of rows, each by a matrix of its own: `out[m, n] = sum_k lhs[m, k] rhs[g, k, n] + bias[g, n]` for the
/// rows `m` of group `g`.
///
/// | arg           | shape       | dtype         | layout                                                    |
/// |---------------|-------------|---------------|-----------------------------------------------------------|
/// | `lhs`         | `[M, K]`    | `bf16`, `f16` | any strides; fast: rows as below                          |
/// | `rhs`         | `[G, K, N]` | as `lhs`      | any strides; fast: `K` or `N` contiguous, as below        |
/// | `group_sizes` | `[G]`       | `i32`, `i64`  | contiguous                                                |
/// | `bias`        | `[G, N]`    | as `lhs`      | contiguous                                                |
/// | `out`         | `[M, N]`    | as `lhs`      | unit stride on `N`, any row stride                        |
///
/// Group `g` has the `group_sizes[g]` rows that follow those of the groups before it; a negative size is zero, and groups end
/// with row `M`. The host does not read the sizes. Rows of no group are not touched. A tensor `[G, N, K]` with rows of `K`
/// is `rhs` transposed: `rhs.transpose(1, 2)?`.
///
/// Fast, 8 or 16 bytes at a time: rows of `lhs` on 16 bytes, `K` contiguous and a multiple of 8; of `rhs` the same, or `N` contiguous
/// and a multiple of 4, rows on 8 bytes. Other layouts go element by element, much slower.
///
/// Sums and bias are `f32`; there is one rounding. The same call gives the same bits; a row has the same bits whatever the other
/// groups are, given the tile.
///
/// Returns when the work is queued, before it has run. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks
/// the table, [`Empty`](hk_core::Error::Empty) if `G`, `K` or `N` is zero, [`Overlap`](hk_core::Error::Overlap) if `out` shares
/// memory with another tensor, [`Argument`](hk_core::Error::Argument) for a tile that does not serve the layouts, or a grid of
/// zero, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^30 along an axis, or 2^31 tiles and blocks,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and launching a kernel can answer. Nothing is
/// written then.
///
/// Source: Gale et al. 2022, MegaBlocks (grouped products of a mixture of experts).
pub fn gmm<'a, T: Half>(
    stream: &Stream,
    lhs: TensorView<'a, T>,
    rhs: TensorView<'a, T>,
    group_sizes: impl Into<IndexView<'a>>,
    bias: Option<TensorView<'a, T>>,
    out: TensorViewMut<T>,
    options: GroupedOptions,
) -> Result<()> {
    let sizes = Some(group_sizes.into());
    GroupedGemm { op: "gmm", names: ["lhs", "rhs", "out"], lhs, rhs, sizes, bias, options }.run(stream, out)
}

/// The outputs of [`ptgmm`] and [`nptgmm`]; from `out` alone with `.into()`.
#[derive(Debug)]
pub struct TgmmOutputs<'t, T: Element> {
    /// `[G, K, N]`.
    pub out: TensorViewMut<'t, T>,
    /// `[G, K]`: sums of the columns of `lhs`.
    pub bias_grad: Option<TensorViewMut<'t, f32>>,
}

impl<'t, T: Element> From<TensorViewMut<'t, T>> for TgmmOutputs<'t, T> {
    fn from(out: TensorViewMut<'t, T>) -> Self {
        Self { out, bias_grad: None }
    }
}

/// Products over the rows of each group: `out[g, k, n] = sum over the rows m of group g of lhs[k, m] rhs[m, n]`, or `+=` if
/// `accumulate`.
///
/// | arg           | shape       | dtype         | layout                                                      |
/// |---------------|-------------|---------------|-------------------------------------------------------------|
/// | `lhs`         | `[K, M]`    | `bf16`, `f16` | any strides; fast: `K` or `M` contiguous, as below          |
/// | `rhs`         | `[M, N]`    | as `lhs`      | any strides; fast: `N` contiguous, as below                 |
/// | `group_sizes` | `[G]`       | `i32`, `i64`  | contiguous                                                  |
/// | `out`         | `[G, K, N]` | as `lhs`      | unit stride on `N`, others free                             |
/// | `bias_grad`   | `[G, K]`    | `f32`         | contiguous                                                  |
///
/// Groups as of [`gmm`]. With `bias_grad`: `bias_grad[g, k] = sum over the rows m of group g of lhs[k, m]`, never accumulated.
/// A group without rows has zeros, in `out` unless `accumulate`, and in `bias_grad`; so have all if `M` is zero.
///
/// Fast, 8 bytes at a time: `K` of `lhs` and `N` of `rhs` contiguous and multiples of 4, on 8 bytes; or `M` of `lhs` contiguous
/// and a multiple of 8, rows on 16 bytes. A matrix `[M, K]` with rows of `K` is `lhs` transposed: `lhs.transpose(0, 1)?`. Other
/// layouts go element by element, much slower.
///
/// Sums are `f32`; what was in `out` is added in `f32`, and there is one rounding. The grid is persistent: as many blocks as the
/// device holds, or as the options say, take tiles in turn. The same call gives the same bits, those of [`nptgmm`] with the
/// same tile.
///
/// # Errors
/// As [`gmm`]; `bias_grad` is disjoint from all others too.
pub fn ptgmm<'a, 't, T: Half>(
    stream: &Stream,
    lhs: TensorView<'a, T>,
    rhs: TensorView<'a, T>,
    group_sizes: impl Into<IndexView<'a>>,
    outputs: impl Into<TgmmOutputs<'t, T>>,
    accumulate: Accumulate,
    options: GroupedOptions,
) -> Result<()> {
    tgmm("ptgmm", stream, [lhs, rhs], group_sizes.into(), outputs.into(), accumulate, options)
}

/// [`ptgmm`] with one block for each tile of `out`: the grid is not persistent, and the options have none.
///
/// # Errors
/// As [`ptgmm`]; [`Argument`](hk_core::Error::Argument) for a grid.
pub fn nptgmm<'a, 't, T: Half>(
    stream: &Stream,
    lhs: TensorView<'a, T>,
    rhs: TensorView<'a, T>,
    group_sizes: impl Into<IndexView<'a>>,
    outputs: impl Into<TgmmOutputs<'t, T>>,
    accumulate: Accumulate,
    options: GroupedOptions,
) -> Result<()> {
    tgmm("nptgmm", stream, [lhs, rhs], group_sizes.into(), outputs.into(), accumulate, options)
}

fn tgmm<'a, T: Half>(
    op: &'static str,
    stream: &Stream,
    [lhs, rhs]: [TensorView<'a, T>; 2],
    sizes: IndexView<'a>,
    TgmmOutputs { mut out, mut bias_grad }: TgmmOutputs<T>,
    accumulate: Accumulate,
    options: GroupedOptions,
) -> Result<()> {
    let persistent = op == "ptgmm";
    let [k, m] = lhs.dims(op, "lhs")?;
    let [rhs_m, n] = rhs.dims(op, "rhs")?;
    if rhs_m != m {
        return Err(Error::shape(op, "rhs", rhs.shape(), format!("[{m}, N] (M of lhs)")));
    }
    let groups = check_sizes(op, &sizes, None)?;
    out.expect_shape(op, "out", [groups, k, n])?;
    out.expect_unit_stride(op, "out")?;
    for (arg, view) in [("lhs", &lhs), ("rhs", &rhs)] {
        view.expect_aligned(op, arg, BYTES as u64)?;
        check_lengths(op, arg, view)?;
    }
    out.expect_aligned(op, "out", BYTES as u64)?;
    if let Some(sums) = &bias_grad {
        sums.expect_shape(op, "bias_grad", [groups, k])?;
        sums.expect_contiguous(op, "bias_grad")?;
        sums.expect_aligned(op, "bias_grad", 4)?;
    }
    let inputs: [NamedOperand; 3] = [("lhs", Some(&lhs)), ("rhs", Some(&rhs)), ("group_sizes", Some(&sizes))];
    let sums = bias_grad.as_ref().map(|b| b as &dyn hk_core::Operand);
    check_aliases(op, &inputs, &[(("out", Some(&out)), &[]), (("bias_grad", sums), &[])])?;
    if let Some(axis) = out.shape().iter().position(|&n| n == 0) {
        return Err(Error::empty(op, "out", axis, out.shape()));
    }
    if let (false, Some(grid)) = (persistent, options.grid) {
        return Err(Error::argument(op, "grid", grid, "none: there is a block for each tile"));
    }

    let (x, w) = (Side::new(&lhs, [None, Some(0), Some(1)]), Side::new(&rhs, [None, Some(1), Some(0)]));
    let m_contiguous = !x.across() && x.rows();
    let vectors = w.across() && (m_contiguous || x.across());
    let kernels = TGMM[type_index(T::PRECISION)][usize::from(m_contiguous)];
    let info = stream.device().info();
    let tasks = |rows, n_tiles| groups.saturating_mul(k.div_ceil(rows)).saturating_mul(n_tiles);
    let serves = |tile: GroupedTile| {
        tile == GroupedTile::Elements || vectors && kernels.iter().any(|(of, _)| *of == tile)
    };
    let choice = GroupedTile::choose(info, groups, k, n, serves);
    let mut plan = Plan::new(op, info, options, serves, choice, n, tasks)?;
    if !persistent {
        plan.grid = tasks(plan.tile.shape().0, plan.n_tiles);
    }
    let kernel = stream.kernel(plan.kernel(kernels)?)?;
    let mut launch = stream.launch(op);
    let ([y_group, y_row], aligned) = ([0, 1].map(|axis| out.strides()[axis] as i64), out.rows_aligned(16));
    let params = Params {
        a: x.params(launch.input("lhs", &lhs)?.data()),
        w: w.params(launch.input("rhs", &rhs)?.data()),
        groups: GroupSizes {
            sizes: sizes.input(&mut launch, "group_sizes")?.data(),
            count: groups as u32,
            rows: m as u32,
            wide: sizes.is_i64().into(),
            pad: 0,
        },
        y: launch.output_address("out", &mut out.reborrow())?,
        y_group,
        y_row,
        bias: 0,
        row_sums: match &mut bias_grad {
            Some(sums) => launch.output_address("bias_grad", &mut sums.reborrow())?,
            None => 0,
        },
        rows: k as u32,
        cols: n as u32,
        columns: 0,
        n_tiles: plan.n_tiles as u32,
        span: plan.span(),
        vectors: aligned.into(),
        accumulate: (accumulate == Accumulate::Add).into(),
        pad: 0,
    };
    // SAFETY: as of `gmm`.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(plan.grid), &params) }
}
