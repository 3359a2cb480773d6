//! The safe function of `hip/topk.hip` and `hip/topk_sort.hip`.

use crate::kernels;
use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::{RowProblem, RowVariant, float_index};
use hk_core::{
    Aliasing, CodeObjects, DType, Element, Error, Float, GlobalLayout, LaunchConfig, Result, Rows, Stream,
    TensorView, TensorViewMut, check_overlap, row_kernels,
};

const OP: &str = "topk";

/// Options of [`topk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopkOptions {
    /// Whether the largest elements come first, as by default, or the smallest.
    pub largest: bool,
}

impl Default for TopkOptions {
    fn default() -> Self {
        Self { largest: true }
    }
}

/// A type that indices can have: `i32` and `i64`.
pub trait TopkIndex: Element {}

impl TopkIndex for i32 {}
impl TopkIndex for i64 {}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    values: GlobalLayout,
    indices: GlobalLayout,
    from: u64,
    to: u64,
    from_len: u32,
    to_len: u32,
    k: u32,
    smallest: u32,
    index_is_64: u32,
    pairs: u32,
    batch: u32,
    segments: u32,
    segment: u32,
    list: u32,
}

/// Rows of lists in registers: up to [`LIST_K`] results.
const LISTS: [RowVariant; 4] = [
    RowVariant::vectors(64, 8, 1, 16),
    RowVariant::vectors(128, 16, 1, 16),
    RowVariant::vectors(256, 16, 1, 12),
    RowVariant::elements(256, 16),
];
const LIST_K: usize = 8;

/// Rows that a wave or a block selects from: up to [`SELECT_K`] results.
const SELECT: [RowVariant; 8] = [
    RowVariant::vectors(256, 64, 1, 24),
    RowVariant::vectors(512, 64, 1, 24),
    RowVariant::vectors(1024, 64, 1, 24),
    RowVariant::vectors(4096, 256, 1, 16),
    RowVariant::vectors(SELECT_COLS, 1024, 1, 16),
    RowVariant::elements(1024, 64),
    RowVariant::elements(4096, 256),
    RowVariant::elements(SELECT_COLS, 1024),
];
const SELECT_K: usize = 64;
const SELECT_COLS: usize = 16384;
/// Columns that a wave takes of a row that is split, at least and at most: as many as ranks of one word can tell apart. As
/// many ranks as the former are what a block merges.
const SEGMENT: usize = 4096;
const LONGEST_SEGMENT: usize = 1 << 16;
/// Columns of a wave's tile: longer rows are walked tile by tile where they are many.
const WAVE_TILE: usize = 1024;
/// Columns that a block sorts, and sorted lists that it merges.
const TILE: usize = 2048;
const FAN: usize = 8;
/// Waves that a CU holds.
const WAVES_PER_CU: usize = 16;

static LIST_KERNELS: [[&str; 4]; 3] = row_kernels!(
    "topk",
    ["bf16", "f16", "f32"],
    ["lists_64", "lists_128", "lists_256", "lists_256_elements"]
);
static SELECT_KERNELS: [[&str; 8]; 3] = row_kernels!(
    "topk",
    ["bf16", "f16", "f32"],
    ["256", "512", "1024", "4096", "16384", "1024_elements", "4096_elements", "16384_elements"]
);
/// By vectors, by elements, and the merge.
static SEGMENT_KERNELS: [[&str; 3]; 3] =
    row_kernels!("topk", ["bf16", "f16", "f32"], ["tiles", "tiles_elements", "merge"]);
static SORT_KERNELS: [[&str; 3]; 3] =
    row_kernels!("topk_sort", ["bf16", "f16", "f32"], ["tiles", "tiles_elements", "merge"]);

/// How rows that no single block serves go through the workspace: parts of a row leave lists of ranks, which are merged
/// until one is left.
#[derive(Debug, Clone, Copy)]
struct Split {
    cols: usize,
    k: usize,
    /// Sorts whole tiles rather than selecting from segments.
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
    /// For rows of this length, if they are split or sorted.
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

    /// As [`first`](Self::first), of fewer and longer segments where those of so many rows are more than `waves`.
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

    /// Ranks that a row has in the workspace: two passes' lists, one read while the other is written.
    fn workspace(&self) -> usize {
        let first = self.first();
        if first.count == 1 {
            return 0;
        }
        let second = self.merged(first);
        first.len() + if second.count == 1 { 0 } else { second.len() }
    }
}

/// Length of the workspace that [`topk`] needs for these sizes: 0, so none, up to 16384 columns if `k` is at most 64, and
/// up to 2048 columns.
pub fn topk_workspace(rows: usize, cols: usize, k: usize) -> usize {
    Split::new(cols, k).map_or(0, |split| split.workspace()).saturating_mul(rows)
}

/// The `k` first elements of each row, the largest or the smallest, in order, with their columns.
///
/// | arg         | shape        | dtype                | layout                                                    |
/// |-------------|--------------|----------------------|-----------------------------------------------------------|
/// | `x`         | `[.., cols]` | `bf16`, `f16`, `f32` | unit stride on `cols`, one row stride over the rest       |
/// | `values`    | `[.., k]`    | as `x`               | unit stride on `k`, one row stride over the rest          |
/// | `indices`   | `[.., k]`    | `i32`, `i64`         | unit stride on `k`, one row stride over the rest          |
/// | `workspace` | `[n]`        | `i64`                | contiguous; `n` at least [`topk_workspace`], else left out |
///
/// Any `k` from 1 to `cols`, which is that of `values`. Larger elements come first, or if not `options.largest` smaller
/// ones. Of equal elements the one of the lower column comes first; zeros of both signs are equal. NaNs are equal to each
/// other: above infinity where the largest are wanted, last of all where the smallest are. `values` are the bits that `x`
/// has. Results are exact, so they depend on the row alone.
///
/// Rows are read once, 16 bytes at a time where all begin on a multiple of 16 bytes and are a multiple of 16 bytes long. Up
/// to 64 results are selected, more are sorted: 2048 columns at a time, then merged. What the workspace holds before does
/// not matter, and after it has no meaning. No tensor may share memory with another that is written.
///
/// Returns when the work is queued, before it has run. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for zero columns, [`Argument`](hk_core::Error::Argument) for a `k` of
/// zero or more than `cols`, [`Overlap`](hk_core::Error::Overlap), [`TooLarge`](hk_core::Error::TooLarge) beyond 2^29 - 1
/// columns, 2^32 - 1 rows or as long a workspace, [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and
/// launching a kernel can answer. Nothing is launched then.
pub fn topk<T: Float, I: TopkIndex>(
    stream: &Stream,
    x: TensorView<T>,
    values: TensorViewMut<T>,
    indices: TensorViewMut<I>,
    workspace: Option<TensorViewMut<i64>>,
    options: TopkOptions,
) -> Result<()> {
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
    let needed = topk_workspace(rows, cols, k);
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
        let want = format!("[{needed}] or longer (topk_workspace({rows}, {cols}, {k}))");
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
            smallest: (!options.largest).into(),
            index_is_64: (I::DTYPE == DType::I64).into(),
            segments: 1,
            segment: cols as u32,
            ..Params::zeroed()
        },
    };
    let waves = call.waves();
    match Split::new(cols, k) {
        Some(split) => call.split_rows(&problem, split.first_among(rows, waves), split, workspace),
        // Rows enough that none needs more than a wave.
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
    /// Which of the kernels by dtype.
    dtype: usize,
    x: TensorView<'a, T>,
    values: TensorViewMut<'a, T>,
    indices: TensorViewMut<'a, I>,
    /// What all launches have in common.
    params: Params,
}

impl<T: Float, I: TopkIndex> Call<'_, T, I> {
    /// Waves that fill the device.
    fn waves(&self) -> usize {
        self.stream.device().info().compute_units as usize * WAVES_PER_CU
    }

    /// One launch, each row in one block or part of one.
    fn whole_rows(&mut self, problem: &RowProblem) -> Result<()> {
        let k = self.params.k as usize;
        let wave = self.stream.device().info().wave_size as usize;
        let (plan, pairs) = if k <= LIST_K && self.cols <= LISTS[LISTS.len() - 1].widest {
            (problem.plan(self.stream, &kernels::TOPK, &LISTS, &LIST_KERNELS[self.dtype])?, false)
        } else {
            let plan = problem.plan(self.stream, &kernels::TOPK, &SELECT, &SELECT_KERNELS[self.dtype])?;
            // If few lanes more than k have any elements, the bound that k of their largest give is low, and many elements
            // reach it. Elements go to lanes by vectors.
            let vector = (16 / size_of::<T>()).min(SELECT[plan.variant].widest / wave);
            (plan, self.cols.div_ceil(vector).min(wave) < 2 * k)
        };
        let params = Params { pairs: pairs.into(), batch: plan.batch, ..self.params };
        self.launch(&plan.kernel, plan.config, params, None, None)
    }

    /// A launch for the parts of rows, and one for each merge.
    fn split_rows(
        &mut self,
        problem: &RowProblem,
        mut lists: Lists,
        split: Split,
        workspace: Option<TensorViewMut<i64>>,
    ) -> Result<()> {
        let (objects, names) = if split.sorts {
            (&kernels::TOPK_SORT, &SORT_KERNELS[self.dtype])
        } else {
            (&kernels::TOPK, &SEGMENT_KERNELS[self.dtype])
        };
        let mut params = Params {
            segments: to_u32(lists.count)?,
            segment: to_u32(lists.span)?,
            list: to_u32(lists.list)?,
            ..self.params
        };
        let name = names[usize::from(!problem.by_vectors())];
        let Some(workspace) = workspace.filter(|_| lists.count > 1) else {
            return self.launch_split(objects, name, params, None, None);
        };
        let (mut to, mut from) = workspace.split_at(0, lists.len() * self.rows)?;
        params.to_len = to_u32(lists.len())?;
        self.launch_split(objects, name, params, None, Some(&mut to))?;
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
            self.launch_split(objects, names[2], params, Some(&from), output)?;
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
        objects: &'static CodeObjects,
        name: &'static str,
        params: Params,
        from: Option<&TensorViewMut<i64>>,
        to: Option<&mut TensorViewMut<i64>>,
    ) -> Result<()> {
        let kernel = self.stream.kernel(objects, name)?;
        let units = self.rows.saturating_mul(params.segments as usize);
        let threads = kernel.block()[0] as usize;
        let blocks = self.stream.device().info().blocks_for(units, threads, WAVES_PER_CU);
        self.launch(&kernel, LaunchConfig::grid_1d(blocks), params, from, to)
    }

    fn launch(
        &mut self,
        kernel: &hk_core::Kernel,
        config: LaunchConfig,
        params: Params,
        from: Option<&TensorViewMut<i64>>,
        to: Option<&mut TensorViewMut<i64>>,
    ) -> Result<()> {
        let mut launch = self.stream.launch(OP, kernel);
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
        // `Split` plans; the kernels access no more, whatever the grid and the contents of the workspace; the loader
        // matches `Params` to the kernel.
        unsafe { launch.run(config, &params) }
    }
}

fn to_u32(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::too_large(OP, "workspace", format!("{n} elements"), u32::MAX.into()))
}
