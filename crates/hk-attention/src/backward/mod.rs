//! Gradients of attention: `hip/backward.h`, `hip/backward_delta.hip`.

mod fused;
mod hstu;

pub use fused::{Accumulate, fused_backward_workspace, mha_fused_bwd};
pub use hstu::{HstuGradientInputs, HstuGradients, hstu_attn_bwd};

use crate::kernels::attention::{HeadRows, Sequences};
use crate::kernels::{backward::Params, delta};
use crate::kv_cache::optional;
use crate::prefill::{Heads, Problem, check_heads};
use crate::{AttentionElement, AttentionOptions, SequenceStarts, Tiling};
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::{
    DType, Element, Error, Float, Kernel, KernelRef, LaunchConfig, NamedOperand, Result, Stream, TensorView,
    TensorViewMut,
};

/// The entry points of each dtype, by the most columns of queries and keys, and of values.
type Kernels = [&'static [([usize; 2], KernelRef<Params>)]; 3];

macro_rules! table {
    ($dtype:literal: $($columns:literal $dqk:literal $dv:literal),*) => {
        &[$(([$dqk, $dv], Params::kernel(concat!("backward_", $dtype, "_", $columns)))),*]
    };
}
use fused::{Layout, rounding};
use table;

static KERNELS: Kernels = [
    table!("bf16": "64" 64 64, "128" 128 128, "192_128" 192 128, "256" 256 256),
    table!("f16": "64" 64 64, "128" 128 128, "192_128" 192 128, "256" 256 256),
    table!("f32": "64" 64 64, "128" 128 128, "256" 256 256),
];
static DELTA: [KernelRef<delta::Params>; 3] = [
    delta::Params::kernel("backward_delta_bf16"),
    delta::Params::kernel("backward_delta_f16"),
    delta::Params::kernel("backward_delta_f32"),
];
static SINKS: KernelRef<delta::Params> = delta::Params::kernel("backward_sinks");

/// Threads of a block, and lanes of a row, of `hip/backward_delta.hip`.
const THREADS: usize = 256;
const LANES: usize = 4;

/// What gradients of attention are made of: inputs and results of the forward pass, and the gradient of its output.
#[derive(Debug, Clone, Copy)]
pub struct BackwardInputs<'a, T: AttentionElement> {
    /// Queries: `[B, Sq, Hq, Dqk]`, or packed `[total_q, Hq, Dqk]`.
    pub q: TensorView<'a, T>,
    /// Keys: `[B, Sk, Hkv, Dqk]`, or packed `[total_k, Hkv, Dqk]`.
    pub k: TensorView<'a, T>,
    /// Values: `[B, Sk, Hkv, Dv]`, or packed `[total_k, Hkv, Dv]`.
    pub v: TensorView<'a, T>,
    /// The output, `[B, Sq, Hq, Dv]`, or packed `[total_q, Hq, Dv]`.
    pub out: TensorView<'a, T>,
    /// Log-sum-exp of the scores, `[B, Hq, Sq]`, or packed `[total_q, Hq]`.
    pub lse: TensorView<'a, f32>,
    /// The gradient of the output.
    pub dout: TensorView<'a, T>,
}

/// Gradients of attention, of the shapes of what they are gradients of. All elements are written.
#[derive(Debug)]
pub struct Gradients<'a, T: AttentionElement> {
    /// Of queries.
    pub dq: TensorViewMut<'a, T>,
    /// Of keys.
    pub dk: TensorViewMut<'a, T>,
    /// Of values.
    pub dv: TensorViewMut<'a, T>,
    /// Of sinks, `[Hq]`: with [`AttentionOptions::sink`], and only then.
    pub dsink: Option<TensorViewMut<'a, f32>>,
}

/// How gradients are computed. The bits do not depend on it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BackwardSchedule {
    /// A launch for keys and values, then one for queries.
    Split,
    /// One launch whose blocks have keys or queries.
    #[default]
    Fused,
}

/// Elements of the `f32` workspace of the gradients of attention: one for each row of queries and head.
pub fn backward_workspace(rows: usize, heads: usize) -> usize {
    rows.saturating_mul(heads)
}

/// Gradients of [`mha`](crate::mha), or with `cu_seqlens` of [`mha_varlen`](crate::mha_varlen).
///
/// With the scores `s` and `lse` of the forward pass, `x = scale (q_i . k_j)`, and `keep` of dropout:
///
/// ```text
/// delta_i = dout_i . out_i;  p_ij = exp(s_ij - lse_i);  d_ij = keep_ij / (1 - dropout) (dout_i . v_j)
/// ds_ij = p_ij (d_ij - delta_i) (1 - tanh(x / softcap)^2)
/// dq_i = scale sum_j ds_ij k_j;  dk_j = scale sum_i ds_ij q_i;  dv_j = sum_i keep_ij / (1 - dropout) p_ij dout_i
/// dsink = -sum_i exp(sink - lse_i) delta_i
/// ```
///
/// | arg           | shape                                              | dtype                | layout                     |
/// |---------------|----------------------------------------------------|----------------------|----------------------------|
/// | `q`, `dq`     | `[B, Sq, Hq, Dqk]`, or packed `[total_q, Hq, Dqk]` | `bf16`, `f16`, `f32` | unit stride on the columns |
/// | `k`, `dk`     | `[B, Sk, Hkv, Dqk]`, `[total_k, Hkv, Dqk]`         | as `q`               | unit stride on the columns |
/// | `v`, `dv`     | `[B, Sk, Hkv, Dv]`, `[total_k, Hkv, Dv]`           | as `q`               | unit stride on the columns |
/// | `out`, `dout` | `[B, Sq, Hq, Dv]`, `[total_q, Hq, Dv]`             | as `q`               | unit stride on the columns |
/// | `lse`         | `[B, Hq, Sq]`, `[total_q, Hq]`                     | `f32`                | any strides                |
/// | `cu_seqlens`  | `[sequences + 1]` each                             | `i32`                | contiguous                 |
/// | `dsink`       | `[Hq]`                                             | `f32`                | contiguous                 |
/// | `workspace`   | [`backward_workspace`] or more                     | `f32`                | contiguous                 |
///
/// `Dqk` and `Dv` are 1 to 256 and may differ. The gradients of keys and values are sums over the query heads of their group. Sums are `f32`;
/// `p` and `ds` are rounded to the type of the inputs before they are multiplied; results are rounded once. No atomics: the same call gives the
/// same bits, and those of a sequence do not depend on others. Rows that see no key, `lse` of -inf, have a gradient of 0, as keys that no row
/// sees.
///
/// Starts are on the device and are not trusted: where those of [`mha_varlen`](crate::mha_varlen) make NaN, gradients are NaN.
///
/// Two launches, or three with a sink. Returns when they are queued. No tensor may share memory with an output.
///
/// # Errors
/// As [`mha`](crate::mha); [`Argument`](Error::Argument) for options that gradients do not have (`bias`, descales, pages, a tiling), and for a
/// sink without `dsink` or the other way round; [`Shape`](Error::Shape) for a workspace that is too short. Nothing is written then.
///
/// Source: Dao et al. 2022, "FlashAttention", algorithm 4.
pub fn mha_onekernel_bwd<'a, T: AttentionElement + Float>(
    stream: &'a Stream,
    inputs: BackwardInputs<'a, T>,
    cu_seqlens: Option<SequenceStarts<'a>>,
    gradients: Gradients<'a, T>,
    workspace: TensorViewMut<'a, f32>,
    options: &AttentionOptions<'a, T>,
) -> Result<()> {
    let of = (inputs, cu_seqlens, gradients, workspace);
    backward("mha_onekernel_bwd", stream, of, options, Schedule::TwoPasses(BackwardSchedule::Fused))
}

/// The same gradients by a schedule of choice.
///
/// Arguments and errors are those of [`mha_onekernel_bwd`]. [`Split`](BackwardSchedule::Split) has a launch more.
pub fn flash_attn_bwd<'a, T: AttentionElement + Float>(
    stream: &'a Stream,
    inputs: BackwardInputs<'a, T>,
    cu_seqlens: Option<SequenceStarts<'a>>,
    gradients: Gradients<'a, T>,
    workspace: TensorViewMut<'a, f32>,
    options: &AttentionOptions<'a, T>,
    schedule: BackwardSchedule,
) -> Result<()> {
    let of = (inputs, cu_seqlens, gradients, workspace);
    backward("flash_attn_bwd", stream, of, options, Schedule::TwoPasses(schedule))
}

/// The main launches.
#[derive(Debug, Clone, Copy)]
enum Schedule {
    TwoPasses(BackwardSchedule),
    OnePass(Accumulate),
}

type Arguments<'a, T> =
    (BackwardInputs<'a, T>, Option<SequenceStarts<'a>>, Gradients<'a, T>, TensorViewMut<'a, f32>);

/// Sequences, and rows of queries and keys: of each, or if they are packed of all.
#[derive(Clone, Copy)]
struct Sizes {
    sequences: usize,
    sq: usize,
    sk: usize,
    packed: bool,
}

impl Sizes {
    fn rows(&self) -> usize {
        if self.packed { self.sq } else { self.sequences * self.sq }
    }

    /// How `rows` rows of queries or keys, `group` each, are cut in tiles.
    fn sequences(&self, starts: u64, rows: usize, group: usize, tile: usize) -> Option<Sequences> {
        let all = rows.checked_mul(group).filter(|n| *n < 1 << 30)?;
        let tiles_of_one = if self.packed { 0 } else { all.div_ceil(tile) };
        let tiles = if self.packed {
            all / tile + self.sequences
        } else {
            tiles_of_one.checked_mul(self.sequences)?
        };
        Some(Sequences {
            q_starts: starts,
            n: self.sequences as u32,
            sq: rows as u32,
            total_q: rows as u32,
            tiles: u32::try_from(tiles).ok().filter(|n| *n < 1 << 30)?,
            tiles_of_one: tiles_of_one as u32,
            ..Sequences::zeroed()
        })
    }
}

fn check_sizes<T: AttentionElement>(
    op: &'static str,
    inputs: &BackwardInputs<T>,
    cu_seqlens: Option<&SequenceStarts>,
    gradients: &Gradients<T>,
) -> Result<(Sizes, Heads)> {
    let BackwardInputs { q, k, v, out, lse, dout } = inputs;
    let heads = check_heads(op, [("q", q.shape()), ("k", k.shape()), ("v", v.shape())], [256, 256])?;
    let sizes = match cu_seqlens {
        None => {
            let [batch, sq, ..] = q.dims::<4>(op, "q")?;
            let [_, sk, ..] = k.dims::<4>(op, "k")?;
            k.expect_shape(op, "k", [batch, sk, heads.kv_heads, heads.dqk])?;
            v.expect_shape(op, "v", [batch, sk, heads.kv_heads, heads.dv])?;
            lse.expect_shape(op, "lse", [batch, heads.heads, sq])?;
            Sizes { sequences: batch, sq, sk, packed: false }
        }
        Some(starts) => {
            let [total_q, ..] = q.dims::<3>(op, "q")?;
            let [total_k, ..] = k.dims::<3>(op, "k")?;
            v.expect_shape(op, "v", [total_k, heads.kv_heads, heads.dv])?;
            lse.expect_shape(op, "lse", [total_q, heads.heads])?;
            Sizes { sequences: starts.check(op)?, sq: total_q, sk: total_k, packed: true }
        }
    };
    let mut of_out = q.shape().to_vec();
    if let Some(columns) = of_out.last_mut() {
        *columns = heads.dv;
    }
    out.expect_shape(op, "out", &of_out)?;
    dout.expect_shape(op, "dout", &of_out)?;
    gradients.dq.expect_shape(op, "dq", q.shape())?;
    gradients.dk.expect_shape(op, "dk", k.shape())?;
    gradients.dv.expect_shape(op, "dv", v.shape())?;
    Ok((sizes, heads))
}

/// Refuses options that gradients do not have.
fn check_options<T: AttentionElement>(
    op: &'static str,
    options: &AttentionOptions<T>,
    dsink: bool,
) -> Result<()> {
    let descales = &options.descales;
    let refused = [
        ("bias", options.bias.is_some()),
        ("q_descale", descales.q.is_some()),
        ("k_descale", descales.k.is_some()),
        ("v_descale", descales.v.is_some()),
        ("block_table", options.pages.is_some()),
        ("tiling", options.tiling != Tiling::Auto),
    ];
    if let Some((arg, _)) = refused.iter().find(|(_, given)| *given) {
        return Err(Error::argument(op, arg, "given", "none: there are no gradients with it"));
    }
    if options.sink.is_some() == dsink {
        return Ok(());
    }
    let (got, want) =
        if dsink { ("given", "none without a sink") } else { ("none", "given, as the sink is") };
    Err(Error::argument(op, "dsink", got, want))
}

fn backward<'a, T: AttentionElement + Float>(
    op: &'static str,
    stream: &'a Stream,
    (inputs, cu_seqlens, gradients, workspace): Arguments<'a, T>,
    options: &AttentionOptions<'a, T>,
    schedule: Schedule,
) -> Result<()> {
    let (sizes, heads) = check_sizes(op, &inputs, cu_seqlens.as_ref(), &gradients)?;
    check_options(op, options, gradients.dsink.is_some())?;
    let BackwardInputs { q, k, v, out, lse, dout } = inputs;
    let Gradients { mut dq, mut dk, mut dv, mut dsink } = gradients;
    let mut workspace = workspace;
    if heads.heads == 0 {
        return Err(Error::empty(op, "q", q.shape().len() - 2, q.shape()));
    }
    let mut problem = Problem::new(op, stream, T::DTYPE, heads);
    let mut operands: Vec<NamedOperand> = vec![
        ("q", Some(&q)),
        ("k", Some(&k)),
        ("v", Some(&v)),
        ("out", Some(&out)),
        ("lse", Some(&lse)),
        ("dout", Some(&dout)),
        ("alibi", optional(&options.alibi)),
        ("sink", optional(&options.sink)),
    ];
    if let Some(starts) = &cu_seqlens {
        operands.extend(starts.operands());
    }
    problem.disjoint(
        &operands,
        &[
            ("dq", Some(&dq)),
            ("dk", Some(&dk)),
            ("dv", Some(&dv)),
            ("dsink", optional(&dsink)),
            ("workspace", Some(&workspace)),
        ],
    )?;
    let [given] = workspace.dims(op, "workspace")?;
    let numbers = backward_workspace(sizes.rows(), heads.heads);
    let layout = match schedule {
        Schedule::TwoPasses(_) => None,
        Schedule::OnePass(_) => Some(Layout::new(T::DTYPE, sizes.sequences, sizes.rows(), heads)),
    };
    let (needed, query, align) = match &layout {
        None => (numbers, "backward_workspace", 4),
        Some(layout) => (layout.floats, "fused_backward_workspace", 16),
    };
    if given < needed {
        return Err(Error::shape(op, "workspace", [given], format!("[{needed}] or longer ({query})")));
    }
    workspace.expect_contiguous(op, "workspace")?;
    workspace.expect_aligned(op, "workspace", align)?;
    if let Some(dsink) = &dsink {
        dsink.expect_shape(op, "dsink", [heads.heads])?;
        dsink.expect_contiguous(op, "dsink")?;
        dsink.expect_aligned(op, "dsink", 4)?;
    }

    problem.queries("q", &q)?;
    problem.fresh(("k", &k), ("v", &v))?;
    lse.expect_aligned(op, "lse", 4)?;
    problem.params.lse = Problem::lse_rows(&problem.launch.input("lse", &lse)?, sizes.packed);
    problem.options(options, sizes.sequences, [sizes.sq, sizes.sk])?;
    if let Some(starts) = &cu_seqlens {
        problem.starts(starts, sizes.sk)?;
    }
    let out = rows_in(&mut problem, "out", &out)?;
    let dout = rows_in(&mut problem, "dout", &dout)?;
    let mut params = Params { dout, ..Params::zeroed() };
    params.dq = rows_out(&mut problem, "dq", &mut dq)?;
    params.dk = rows_out(&mut problem, "dk", &mut dk)?;
    params.dv = rows_out(&mut problem, "dv", &mut dv)?;
    params.delta = problem.launch.output_address("workspace", &mut workspace)?;
    let dsink = match &mut dsink {
        Some(dsink) => problem.launch.output_address("dsink", dsink)?,
        None => 0,
    };
    let vector = problem.vector();
    let vectorized = |rows: &HeadRows| Problem::vectorized::<T>(rows, vector, heads.dv);
    params.dout_vectorized = vectorized(&dout);
    vectorize_outputs::<T>(&mut params, heads, if layout.is_some() { 4 } else { vector });
    if let (Some(layout), Schedule::OnePass(accumulate)) = (&layout, schedule) {
        params.turns = params.delta + 4 * layout.turns as u64;
        params.dq_sums = params.delta + 4 * layout.sums as u64;
        params.dq_tiles = layout.tiles as u32;
        params.ordered = u32::from(accumulate == Accumulate::Ordered);
    }

    let kernels = if layout.is_some() { &fused::KERNELS } else { &KERNELS };
    let main = Blocks::new(&mut problem, &mut params, &sizes, heads, kernels, layout.as_ref())?;
    let zeros = layout.as_ref().map_or(0, |layout| (layout.floats - layout.turns) / 4);
    let zeros_count = u32::try_from(zeros).map_err(|_| {
        Error::too_large(op, "workspace", format!("{needed} elements"), u64::from(u32::MAX) * 4)
    })?;
    let of_rows = delta::Params {
        out,
        dout,
        lse: problem.params.lse,
        delta: params.delta,
        sink: problem.params.scores.sink,
        dsink,
        rows: sizes.rows() as u32,
        of_sequence: if sizes.packed { u32::MAX } else { sizes.sq.max(1) as u32 },
        of_sequence_inverse: if sizes.packed { 1 } else { u32::MAX / sizes.sq.max(1) as u32 },
        heads: heads.heads as u32,
        heads_inverse: u32::MAX / heads.heads.max(1) as u32,
        dv: heads.dv as u32,
        vectorized: vectorized(&out) & vectorized(&dout),
        zeros: params.turns,
        zeros_count,
    };
    if numbers > u32::MAX as usize - THREADS {
        return Err(Error::too_large(op, "q", format!("{numbers} rows by heads"), u32::MAX.into()));
    }
    let deltas = stream.kernel(DELTA[float_index(T::DTYPE)])?;
    let sinks = if dsink != 0 { Some(stream.kernel(SINKS)?) } else { None };
    // SAFETY: the checks above make all tensors as large as they count, and the workspace has a float for each row and head, and what is
    // cleared.
    unsafe {
        if needed > 0 {
            let blocks = numbers.div_ceil(THREADS / LANES).max(1);
            stream.launch(op).run(&deltas, LaunchConfig::grid_1d(blocks), &of_rows)?;
        }
        if let Some(sinks) = sinks {
            stream.launch(op).run(&sinks, LaunchConfig::grid_1d(heads.heads), &of_rows)?;
        }
    }
    main.run(problem, params, schedule)
}

/// The launches of the main kernel.
struct Blocks {
    kernel: Kernel<Params>,
    of_keys: usize,
    of_queries: usize,
    /// Of one pass: rounds the sums.
    rounding: Option<Kernel<Params>>,
}

impl Blocks {
    /// Completes the parameters.
    fn new(
        problem: &mut Problem,
        params: &mut Params,
        sizes: &Sizes,
        heads: Heads,
        kernels: &Kernels,
        one_pass: Option<&Layout>,
    ) -> Result<Self> {
        let (op, stream, dtype) = (problem.op, problem.stream, problem.kernel);
        let (columns, kernel) = kernel_of(kernels, dtype, heads).ok_or_else(|| {
            Error::unsupported(op, format!("{} columns", heads.dqk), "no kernel is that wide")
        })?;
        let amd = stream.device().info().arch.is_amd();
        let [keys, queries] = rows_of_blocks(amd, dtype, columns[1]);
        let queries = one_pass.map_or(queries, |layout| layout.tile);
        let group = heads.heads / heads.kv_heads;
        let too_large = |arg, n: usize| Error::too_large(op, arg, format!("{n} rows"), (1 << 30) - 1);
        let given = problem.params.sequences;
        let of_queries = sizes
            .sequences(given.q_starts, sizes.sq, group, queries)
            .ok_or_else(|| too_large("q", sizes.sq.saturating_mul(group)))?;
        let by_keys =
            sizes.sequences(given.k_starts, sizes.sk, 1, keys).ok_or_else(|| too_large("k", sizes.sk))?;
        problem.params.sequences = Sequences {
            k_starts: given.k_starts,
            sk: sizes.sk as u32,
            total_k: sizes.sk as u32,
            ..of_queries
        };
        problem.params.splits.count = 1;
        (params.all, params.by_keys) = (problem.params, by_keys);
        let blocks = |of: &Sequences| of.tiles as usize * heads.kv_heads;
        params.key_blocks = blocks(&by_keys) as u32;
        let kernel = stream.kernel(kernel)?;
        let rounding = match one_pass {
            None => None,
            Some(layout) => Some(stream.kernel(rounding(dtype, layout.tile))?),
        };
        Ok(Self { kernel, of_keys: blocks(&by_keys), of_queries: blocks(&of_queries), rounding })
    }

    fn run(self, problem: Problem, params: Params, schedule: Schedule) -> Result<()> {
        let Self { kernel, of_keys, of_queries, rounding } = self;
        let queries_alone = Params { key_blocks: 0, ..params };
        let launches: &[(&Kernel<Params>, usize, &Params)] = match (&rounding, schedule) {
            (Some(rounding), _) => &[(&kernel, of_keys, &params), (rounding, of_queries, &params)],
            (None, Schedule::TwoPasses(BackwardSchedule::Split)) => {
                &[(&kernel, of_keys, &params), (&kernel, of_queries, &queries_alone)]
            }
            (None, _) => &[(&kernel, of_keys + of_queries, &params)],
        };
        for (kernel, blocks, params) in launches.iter().filter(|(_, blocks, _)| *blocks > 0) {
            let config = LaunchConfig::grid_1d(*blocks);
            // SAFETY: the operators have checked rows, heads and columns of each tensor against each other; the kernels clamp starts, which
            // are on the device, to the rows of the tensors.
            unsafe { problem.stream.launch(problem.op).run(kernel, config, *params)? };
        }
        Ok(())
    }
}

/// Which stores of gradients are of whole vectors; those of queries, of `of_dq` columns.
fn vectorize_outputs<T: Element>(params: &mut Params, heads: Heads, of_dq: usize) {
    let vector = 16 / size_of::<T>();
    params.dq_vectorized = Problem::vectorized::<T>(&params.dq, of_dq, heads.dqk);
    params.keys_vectorized = Problem::vectorized::<T>(&params.dk, vector, heads.dqk)
        & Problem::vectorized::<T>(&params.dv, vector, heads.dv);
}

/// The narrowest kernel for so many columns, and what it is made for.
fn kernel_of(kernels: &Kernels, dtype: DType, heads: Heads) -> Option<([usize; 2], KernelRef<Params>)> {
    let fits = |[dqk, dv]: [usize; 2]| heads.dqk <= dqk && heads.dv <= dv;
    kernels[float_index(dtype)].iter().find(|(columns, _)| fits(*columns)).copied()
}

fn rows_in<'a, T: Element>(
    problem: &mut Problem<'a>,
    arg: &'static str,
    view: &TensorView<'a, T>,
) -> Result<HeadRows> {
    view.expect_unit_stride(problem.op, arg)?;
    view.expect_aligned(problem.op, arg, size_of::<T>() as u64)?;
    Ok(Problem::rows::<T>(&problem.launch.input(arg, view)?))
}

/// Rows of blocks of keys and of queries, `kRows` of `hip/backward.h`.
fn rows_of_blocks(amd: bool, dtype: DType, dv: usize) -> [usize; 2] {
    let wide = amd && dv * dtype.size_bytes() >= 512;
    [if wide { 64 } else { 128 }, if wide && dtype.size_bytes() != 2 { 64 } else { 128 }]
}

fn rows_out<'a, 't: 'a, T: Element>(
    problem: &mut Problem<'a>,
    arg: &'static str,
    view: &mut TensorViewMut<'t, T>,
) -> Result<HeadRows> {
    view.expect_unit_stride(problem.op, arg)?;
    view.expect_aligned(problem.op, arg, size_of::<T>() as u64)?;
    Ok(Problem::rows::<T>(&problem.launch.output(arg, view)?))
}
