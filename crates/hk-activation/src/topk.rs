//! The safe function of `hip/topk.hip` and `hip/topk_sort.hip`.

use crate::kernels::topk::Params;
use bytemuck::Zeroable;
use hk_core::plan::rows::{RowProblem, RowVariant, float_index};
use hk_core::{
    Aliasing, DType, DeviceInfo, Element, Error, Float, Kernel, KernelRef, LaunchConfig, Result, Rows,
    Stream, TensorView, TensorViewMut, check_overlap, row_kernels,
};

const OP: &str = "topk";

/// Which elements [`topk`] selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TopkOrder {
    /// The largest, in falling order.
    #[default]
    Largest,
    /// The smallest, in rising order.
    Smallest,
}

/// The outputs of [`topk`].
#[derive(Debug)]
pub struct TopkOutputs<'a, T: Element, I: Element> {
    /// `[.., k]`: the elements.
    pub values: TensorViewMut<'a, T>,
    /// `[.., k]`: their columns.
    pub indices: TensorViewMut<'a, I>,
}

/// Element type of indices: `i32` or `i64`.
pub trait TopkIndex: Element {}

impl TopkIndex for i32 {}
impl TopkIndex for i64 {}

/// Variants with lists in registers: up to [`LIST_K`] results.
const LISTS: [RowVariant; 4] = [
    RowVariant::vectorized(64, 8, 1, 16),
    RowVariant::vectorized(128, 16, 1, 16),
    RowVariant::vectorized(256, 16, 1, 12),
    RowVariant::scalar(256, 16),
];
const LIST_K: usize = 8;

/// Variants of a row per wave or block: up to [`SELECT_K`] results.
const SELECT: [RowVariant; 8] = [
    RowVariant::vectorized(256, 64, 1, 24),
    RowVariant::vectorized(512, 64, 1, 24),
    RowVariant::vectorized(1024, 64, 1, 24),
    RowVariant::vectorized(4096, 256, 1, 16),
    RowVariant::vectorized(SELECT_COLS, 1024, 1, 16),
    RowVariant::scalar(1024, 64),
    RowVariant::scalar(4096, 256),
    RowVariant::scalar(SELECT_COLS, 1024),
];
const SELECT_K: usize = 64;
const SELECT_COLS: usize = 16384;
/// Fewest and most columns of a wave's segment of a split row; the most is the range of 32-bit ranks. A block merges as many
/// ranks as the fewest.
const SEGMENT: usize = 4096;
const LONGEST_SEGMENT: usize = 1 << 16;
/// Columns of a wave's tile; a wave walks longer rows tile by tile if there are many rows.
const WAVE_TILE: usize = 1024;
/// Columns that a block sorts, and number of sorted lists that it merges.
const TILE: usize = 2048;
const FAN: usize = 8;
/// Waves that a CU holds.
const WAVES_PER_CU: usize = 16;

static LIST_KERNELS: [[KernelRef<Params>; 4]; 3] = row_kernels!(
    Params,
    "topk",
    ["bf16", "f16", "f32"],
    ["lists_64", "lists_128", "lists_256", "lists_256_scalar"]
);
static SELECT_KERNELS: [[KernelRef<Params>; 8]; 3] = row_kernels!(
    Params,
    "topk",
    ["bf16", "f16", "f32"],
    ["256", "512", "1024", "4096", "16384", "1024_scalar", "4096_scalar", "16384_scalar"]
);
/// Vectorized, scalar, and the merge.
static SEGMENT_KERNELS: [[KernelRef<Params>; 3]; 3] =
    row_kernels!(Params, "topk", ["bf16", "f16", "f32"], ["tiles", "tiles_scalar", "merge"]);
static SORT_KERNELS: [[KernelRef<Params>; 3]; 3] =
    row_kernels!(Params, "topk_sort", ["bf16", "f16", "f32"], ["tiles", "tiles_scalar", "merge"]);

/// Split of a row over blocks: each segment leaves a list of ranks in the workspace; lists are merged until one is left.
#[derive(Debug, Clone, Copy)]
struct Split {
    cols: usize,
    k: usize,
    /// Sorts tiles instead of selecting from segments.
    sorts: bool,
}

/// The lists of a row after a pass: each `span` columns have left `list` ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Lists {
    span: usize,
    count: usize,
    list: usize,
}

impl Lists {
    /// Ranks of a row.
    fn len(self) -> usize {
        self.count * self.list
    }
}

impl Split {
    /// The split of rows of this length, if they are split or sorted.
    fn new(cols: usize, k: usize) -> Option<Self> {
        let sorts = k > SELECT_K;
        (sorts || cols > SELECT_COLS).then_some(Self { cols, k, sorts })
    }

    fn lists(&self, span: usize, room: usize) -> Lists {
        Lists { span, count: self.cols.div_ceil(span), list: self.k.min(room) }
    }

    fn first(&self) -> Lists {
        if self.sorts { self.lists(TILE, TILE) } else { self.lists(SEGMENT, SEGMENT) }
    }

    /// As [`first`](Self::first), with fewer and longer segments if there are more of them than `waves`.
    fn first_among(&self, rows: usize, waves: usize) -> Lists {
        if self.sorts {
            return self.first();
        }
        let longest = self.cols / waves.div_ceil(rows) / SEGMENT * SEGMENT;
        self.lists(longest.clamp(SEGMENT, LONGEST_SEGMENT), SEGMENT)
    }

    /// After a merge of those.
    fn merged(&self, lists: Lists) -> Lists {
        if self.sorts {
            self.lists(lists.span.saturating_mul(FAN), lists.list.saturating_mul(FAN))
        } else {
            // Segments of ranks may begin within a list: only how many there are matters.
            Lists { span: 0, count: lists.len().div_ceil(SEGMENT), list: self.k }
        }
    }

    /// Ranks of a row in the workspace, double-buffered: the lists of two passes.
    fn workspace(&self) -> usize {
        let first = self.first();
        if first.count == 1 {
            return 0;
        }
        let second = self.merged(first);
        first.len() + if second.count == 1 { 0 } else { second.len() }
    }
}

/// Elements (`i64`) of the workspace that [`topk`] needs for a tensor of `rows` rows; the same for every device. 0 up to 2048
/// columns, and up to 16384 if `k` is at most 64: no workspace is needed. A shorter one is an error.
pub fn topk_workspace(_info: &DeviceInfo, rows: usize, cols: usize, k: usize) -> usize {
    Split::new(cols, k).map_or(0, |split| split.workspace()).saturating_mul(rows)
}

/// The `k` largest or smallest elements of each row, sorted, with their columns.
///
/// | arg         | shape        | dtype                | layout                                                    |
/// |-------------|--------------|----------------------|-----------------------------------------------------------|
/// | `x`         | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride over the rest       |
/// | `values`    | `[.., k]`    | as `x`               | unit stride on `k`, one row stride over the rest          |
/// | `indices`   | `[.., k]`    | `i32`, `i64`         | unit stride on `k`, one row stride over the rest          |
/// | `workspace` | `[n]`        | `i64`                | contiguous; `n` at least [`topk_workspace`]; `None` if that is 0 |
///
/// `k` is the last axis of `values`, from 1 to `cols`. Equal elements are ordered by column; zeros of both signs are equal. NaNs
/// are equal to each other: above infinity for [`TopkOrder::Largest`], last for [`TopkOrder::Smallest`]. `values` are copied bit
/// by bit. Results are exact, hence batch-invariant.
///
/// Rows are read once; the vectorized path moves 16 bytes at a time and needs rows aligned to 16 bytes that are a multiple of
/// 16 bytes long. Up to 64 elements are selected; more are sorted, 2048 columns at a time, and merged. The workspace need not
/// be initialized, and its contents have no meaning afterwards. A tensor that is written shares no memory with another.
///
/// Returns when the work is queued, before it has run. Without rows, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for zero columns, [`Argument`](hk_core::Error::Argument) for a `k` of
/// zero or more than `cols`, [`Overlap`](hk_core::Error::Overlap), [`TooLarge`](hk_core::Error::TooLarge) beyond 2^29 - 1
/// columns, 2^32 - 1 rows or as long a workspace, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of
/// loading and launching a kernel. Nothing is launched then.
///
/// Source: Batcher 1968, "Sorting networks and their applications" (the bitonic sorts and merges).
pub fn topk<T: Float, I: TopkIndex>(
    stream: &Stream,
    x: TensorView<T>,
    outputs: TopkOutputs<T, I>,
    workspace: Option<TensorViewMut<i64>>,
    order: TopkOrder,
) -> Result<()> {
    let TopkOutputs { values, indices } = outputs;
    let Rows { rows, cols, .. } = x.rows(OP, "x")?;
    let mut problem = RowProblem::new(OP, "x", rows, cols, T::DTYPE)?;
    problem.tensor("x", &x)?;
    let k = values.shape().last().copied().unwrap_or(0);
    let leading = &x.shape()[..x.shape().len() - 1];
    let expect_shape = |arg, shape: &[usize]| {
        let fits = shape.split_last().is_some_and(|(&last, lead)| last == k && lead == leading);
        let want = [leading, &[k]].concat();
        if fits {
            Ok(())
        } else {
            Err(Error::shape(OP, arg, shape, format!("{want:?} (rows of x, k of values)")))
        }
    };
    expect_shape("values", values.shape())?;
    if k == 0 || k > cols {
        return Err(Error::argument(OP, "k", k, format!("1 to {cols} (columns of x)")));
    }
    expect_shape("indices", indices.shape())?;
    values.rows(OP, "values")?;
    indices.rows(OP, "indices")?;
    values.expect_aligned(OP, "values", size_of::<T>() as u64)?;
    indices.expect_aligned(OP, "indices", size_of::<I>() as u64)?;
    check_overlap(OP, ("x", &x), ("values", &values), Aliasing::Disjoint)?;
    check_overlap(OP, ("x", &x), ("indices", &indices), Aliasing::Disjoint)?;
    check_overlap(OP, ("values", &values), ("indices", &indices), Aliasing::Disjoint)?;
    let needed = topk_workspace(stream.device().info(), rows, cols, k);
    if let Some(workspace) = &workspace {
        workspace.dims::<1>(OP, "workspace")?;
        workspace.expect_contiguous(OP, "workspace")?;
        workspace.expect_aligned(OP, "workspace", size_of::<i64>() as u64)?;
        check_overlap(OP, ("x", &x), ("workspace", workspace), Aliasing::Disjoint)?;
        check_overlap(OP, ("values", &values), ("workspace", workspace), Aliasing::Disjoint)?;
        check_overlap(OP, ("indices", &indices), ("workspace", workspace), Aliasing::Disjoint)?;
    }
    let given = workspace.as_ref().map_or(0, |w| w.numel());
    if given < needed {
        let want = format!("[{needed}] or longer (topk_workspace)");
        return Err(Error::shape(OP, "workspace", [given], want));
    }
    if rows == 0 {
        return Ok(());
    }
    let mut call = Call {
        stream,
        rows,
        cols,
        dtype: float_index(T::DTYPE),
        x: x.flatten_rows(OP, "x")?,
        values: values.flatten_rows(OP, "values")?,
        indices: indices.flatten_rows(OP, "indices")?,
        params: Params {
            k: k as u32,
            smallest: (order == TopkOrder::Smallest).into(),
            index_is_64: (I::DTYPE == DType::I64).into(),
            segments: 1,
            segment: cols as u32,
            ..Params::zeroed()
        },
    };
    let waves = call.waves();
    match Split::new(cols, k) {
        Some(split) => call.split_rows(&problem, split.first_among(rows, waves), split, workspace),
        // Enough rows for one wave per row.
        None if cols > WAVE_TILE && rows >= waves => {
            let split = Split { cols, k, sorts: false };
            call.split_rows(&problem, Lists { span: cols, count: 1, list: k }, split, None)
        }
        None => call.whole_rows(&problem),
    }
}

/// A checked call.
struct Call<'a, T, I> {
    stream: &'a Stream,
    rows: usize,
    cols: usize,
    /// Index of the kernels' dtype.
    dtype: usize,
    x: TensorView<'a, T>,
    values: TensorViewMut<'a, T>,
    indices: TensorViewMut<'a, I>,
    /// Parameters common to all launches.
    params: Params,
}

impl<T: Float, I: TopkIndex> Call<'_, T, I> {
    /// Waves that fill the device.
    fn waves(&self) -> usize {
        self.stream.device().info().compute_units as usize * WAVES_PER_CU
    }

    /// One launch, each row in one block or less.
    fn whole_rows(&mut self, problem: &RowProblem) -> Result<()> {
        let k = self.params.k as usize;
        let wave = self.stream.device().info().wave_size as usize;
        let (plan, pairs) = if k <= LIST_K && self.cols <= LISTS[LISTS.len() - 1].max_cols {
            (problem.plan(self.stream, &LISTS, &LIST_KERNELS[self.dtype])?, false)
        } else {
            let plan = problem.plan(self.stream, &SELECT, &SELECT_KERNELS[self.dtype])?;
            // If not many more than k lanes have elements, the k-th of the lanes' maxima is a low bound, and many elements
            // reach it. Lanes have whole vectors.
            let vector = (16 / size_of::<T>()).min(SELECT[plan.variant].max_cols / wave);
            (plan, self.cols.div_ceil(vector).min(wave) < 2 * k)
        };
        let params = Params { pairs: pairs.into(), batch: plan.batch, ..self.params };
        self.launch(&plan.kernel, plan.config, params, None, None)
    }

    /// A launch for the segments of rows, and one for each merge.
    fn split_rows(
        &mut self,
        problem: &RowProblem,
        mut lists: Lists,
        split: Split,
        workspace: Option<TensorViewMut<i64>>,
    ) -> Result<()> {
        let [vectorized, scalar, merge] =
            if split.sorts { SORT_KERNELS[self.dtype] } else { SEGMENT_KERNELS[self.dtype] };
        let mut params = Params {
            segments: to_u32(lists.count)?,
            segment: to_u32(lists.span)?,
            list: to_u32(lists.list)?,
            ..self.params
        };
        let kernel = if problem.can_vectorize() { vectorized } else { scalar };
        let Some(workspace) = workspace.filter(|_| lists.count > 1) else {
            return self.launch_split(kernel, params, None, None);
        };
        let (mut to, mut from) = workspace.split_at(0, lists.len() * self.rows)?;
        params.to_len = to_u32(lists.len())?;
        self.launch_split(kernel, params, None, Some(&mut to))?;
        while lists.count > 1 {
            std::mem::swap(&mut from, &mut to);
            let merged = split.merged(lists);
            params.from_len = to_u32(lists.len())?;
            params.to_len = to_u32(merged.len())?;
            params.list = to_u32(lists.list)?;
            if split.sorts {
                params.segment = to_u32(lists.span)?;
                params.segments = to_u32(lists.len().div_ceil(self.threads()))?;
            } else {
                params.segment = SEGMENT as u32;
                params.segments = to_u32(merged.count)?;
            }
            let output = (merged.count > 1).then_some(&mut to);
            self.launch_split(merge, params, Some(&from), output)?;
            lists = merged;
        }
        Ok(())
    }

    /// Threads of a sort's block.
    fn threads(&self) -> usize {
        TILE / 8
    }

    fn launch_split(
        &mut self,
        kernel: KernelRef<Params>,
        params: Params,
        from: Option<&TensorViewMut<i64>>,
        to: Option<&mut TensorViewMut<i64>>,
    ) -> Result<()> {
        let kernel = self.stream.kernel(kernel)?;
        let units = self.rows.saturating_mul(params.segments as usize);
        let threads = kernel.block()[0] as usize;
        let blocks = self.stream.device().info().blocks_for(units, threads, WAVES_PER_CU);
        self.launch(&kernel, LaunchConfig::grid_1d(blocks), params, from, to)
    }

    fn launch(
        &mut self,
        kernel: &Kernel<Params>,
        config: LaunchConfig,
        params: Params,
        from: Option<&TensorViewMut<i64>>,
        to: Option<&mut TensorViewMut<i64>>,
    ) -> Result<()> {
        let mut launch = self.stream.launch(OP);
        let from = from.map(|t| t.alias());
        let params = Params {
            x: launch.input("x", &self.x)?,
            values: launch.output("values", &mut self.values.reborrow())?,
            indices: launch.output("indices", &mut self.indices.reborrow())?,
            from: launch.optional_input("workspace", from.as_ref())?.data(),
            to: launch.optional_output("workspace", to)?.data(),
            ..params
        };
        // SAFETY: the checks of `topk` make each row of x `cols` long and of the results `k`, and the workspace as long as
        // `Split` plans; the kernels access no more, whatever the grid and the contents of the workspace.
        unsafe { launch.run(kernel, config, &params) }
    }
}

fn to_u32(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::too_large(OP, "workspace", format!("{n} elements"), u32::MAX.into()))
}
