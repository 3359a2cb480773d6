//! The safe functions of `hip/rows.hip` and `hip/segments.hip`.

use crate::args::{
    Cut, check_cols, check_temperature, disjoint, expect_vector, expect_workspace, outputs_of, rows_layout,
};
use crate::{Draw, FilterOrder, Filters, PerRow, Samples, kernels};
use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::{RowProblem, float_index};
use hk_core::{
    Aliasing, CodeObjects, Float, GlobalLayout, LaunchConfig, Operand, Result, Stream, TensorView,
    TensorViewMut, check_overlap, row_kernels,
};

/// The entry points of each dtype for rows that stay in registers: up to 1024 tokens, up to 8192; both again by elements.
const ROWS: [[&str; 4]; 3] =
    row_kernels!("sample_rows", ["bf16", "f16", "f32"], ["1024", "8192", "1024_elements", "8192_elements"]);

/// The launches for longer rows, in order: `[launch][dtype][by elements]`.
const SEGMENTS: [[[&str; 2]; 3]; 4] = [
    [
        ["sample_guess_bf16", "sample_guess_bf16_elements"],
        ["sample_guess_f16", "sample_guess_f16_elements"],
        ["sample_guess_f32", "sample_guess_f32_elements"],
    ],
    [
        ["sample_walk_bf16", "sample_walk_bf16_elements"],
        ["sample_walk_f16", "sample_walk_f16_elements"],
        ["sample_walk_f32", "sample_walk_f32_elements"],
    ],
    [
        ["sample_finish_bf16", "sample_finish_bf16_elements"],
        ["sample_finish_f16", "sample_finish_f16_elements"],
        ["sample_finish_f32", "sample_finish_f32_elements"],
    ],
    [
        ["sample_renorm_bf16", "sample_renorm_bf16_elements"],
        ["sample_renorm_f16", "sample_renorm_f16_elements"],
        ["sample_renorm_f32", "sample_renorm_f32_elements"],
    ],
];
const GUESS: usize = 0;
const WALK: usize = 1;
const FINISH: usize = 2;
const RENORM: usize = 3;
/// Threads of the blocks that walk over rows, and how many waves of these keep a CU busy.
const WALK_THREADS: usize = 128;
const WALK_WAVES: usize = 8;

/// Longest row that a wave takes.
const WAVE_COLS: usize = 1024;
/// Rows of a launch for long rows, as [`sampling_workspace`] makes room for: enough to fill a GPU.
const ROWS_AT_A_TIME: usize = 256;
/// `RowState` and `Segment` of `hip/segments.hip`, in bytes.
const ROW_BYTES: usize = 32;
const SEGMENT_BYTES: usize = 32;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    row_index: GlobalLayout,
    temperature: GlobalLayout,
    k: GlobalLayout,
    p: GlobalLayout,
    min_p: GlobalLayout,
    uniform: GlobalLayout,
    ids: GlobalLayout,
    mass: GlobalLayout,
    count: GlobalLayout,
    y: GlobalLayout,
    workspace: GlobalLayout,
    seed: u64,
    offset: u64,
    k_value: i32,
    p_value: f32,
    min_p_value: f32,
    temperature_value: f32,
    logits: u32,
    top_k_first: u32,
    first: u32,
    outputs: u32,
    segments: u32,
    segment: u32,
    share: u32,
    _unused: u32,
}

/// Bytes of workspace for one output.
fn bytes_per_output(cols: usize) -> usize {
    let Cut { segments, segment } = Cut::of(cols);
    match segments {
        1 => 0,
        _ => (ROW_BYTES + segments * (SEGMENT_BYTES + segment * 4)).next_multiple_of(16),
    }
}

/// Bytes of workspace that the operators with filters need for this many outputs of rows of this many tokens: none for
/// rows of up to 8192; for longer ones 4 bytes a token and some, for up to 256 outputs.
///
/// Any workspace serves that is `sampling_workspace(1, cols)` or longer: the outputs are worked off in turns of as many as
/// it has room for, each of its own launches. Results do not depend on it. 256 outputs fill a GPU: fewer leave compute
/// units idle in the last steps, which have one block an output.
pub fn sampling_workspace(outputs: usize, cols: usize) -> usize {
    outputs.min(ROWS_AT_A_TIME).saturating_mul(bytes_per_output(cols))
}

/// Keeps the `k` most likely tokens of each row and makes them sum to one:
/// `y[r, i] = probs[r, i] / max(mass, 1e-8)` if token `i` is kept, else 0, with `mass` the sum of the kept ones.
///
/// | arg          | shape    | dtype                | layout                                                          |
/// |--------------|----------|----------------------|-----------------------------------------------------------------|
/// | `probs`, `y` | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row strides; `y` may be exactly `probs` |
/// | `workspace`  | bytes    | `u8`                 | contiguous, on 16 bytes, [`sampling_workspace`] long            |
/// | `k`          | `[R]`    | `i32`                | a number, or contiguous                                         |
///
/// Tokens that tie with the `k`-th are all kept ([`Filters::k`]). Probabilities that are NaN, negative or infinite count
/// as 0, and so does a whole row with +Inf in it. Sums are exact to about 2^-45, and the result is rounded once.
///
/// # Errors
/// As [`top_k_top_p_sampling_from_probs`].
pub fn top_k_renorm_probs<T: Float>(
    stream: &Stream,
    probs: TensorView<T>,
    y: TensorViewMut<T>,
    workspace: TensorViewMut<u8>,
    k: PerRow<i32>,
) -> Result<()> {
    let mut call = Call::new("top_k_renorm_probs", "probs", probs, None, workspace);
    call.filters.k = Some(k);
    call.y = Some(y);
    call.run(stream)
}

/// Draws a token from those that top-p keeps ([`Filters::p`]).
///
/// As [`top_k_top_p_sampling_from_probs`] with top-p alone.
///
/// # Errors
/// As [`top_k_top_p_sampling_from_probs`].
pub fn top_p_sampling_from_probs<T: Float>(
    stream: &Stream,
    probs: TensorView<T>,
    row_index: Option<TensorView<i32>>,
    samples: Samples,
    workspace: TensorViewMut<u8>,
    p: PerRow<f32>,
    draw: Draw,
) -> Result<()> {
    let mut call = Call::new("top_p_sampling_from_probs", "probs", probs, row_index, workspace);
    call.filters.p = Some(p);
    call.drawing(samples, draw).run(stream)
}

/// Draws a token from those that top-k keeps ([`Filters::k`]).
///
/// As [`top_k_top_p_sampling_from_probs`] with top-k alone.
///
/// # Errors
/// As [`top_k_top_p_sampling_from_probs`].
pub fn top_k_sampling_from_probs<T: Float>(
    stream: &Stream,
    probs: TensorView<T>,
    row_index: Option<TensorView<i32>>,
    samples: Samples,
    workspace: TensorViewMut<u8>,
    k: PerRow<i32>,
    draw: Draw,
) -> Result<()> {
    let mut call = Call::new("top_k_sampling_from_probs", "probs", probs, row_index, workspace);
    call.filters.k = Some(k);
    call.drawing(samples, draw).run(stream)
}

/// Draws a token from those that min-p keeps ([`Filters::min_p`]).
///
/// As [`top_k_top_p_sampling_from_probs`] with min-p alone.
///
/// # Errors
/// As [`top_k_top_p_sampling_from_probs`].
pub fn min_p_sampling_from_probs<T: Float>(
    stream: &Stream,
    probs: TensorView<T>,
    row_index: Option<TensorView<i32>>,
    samples: Samples,
    workspace: TensorViewMut<u8>,
    min_p: PerRow<f32>,
    draw: Draw,
) -> Result<()> {
    let mut call = Call::new("min_p_sampling_from_probs", "probs", probs, row_index, workspace);
    call.filters.min_p = Some(min_p);
    call.drawing(samples, draw).run(stream)
}

/// Draws a token from those that all of `filters` keep:
/// `ids[b]` is the smallest kept `i` with `sum{P_j : j <= i, kept} >= u * mass`, where `P` is row `row_index[b]` of `probs`,
/// `mass` the sum of its kept tokens and `u` the number in (0, 1] that [`Draw`] has for `b`.
///
/// | arg                    | shape    | dtype                | layout                                                         |
/// |------------------------|----------|----------------------|----------------------------------------------------------------|
/// | `probs`                | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride                             |
/// | `row_index`            | `[B]`    | `i32`                | contiguous; may be left out: `B = R`, output `b` is of row `b` |
/// | `samples`: `ids`       | `[B]`    | `i32`                | contiguous                                                     |
/// | `mass`                 | `[B]`    | `f32`                | contiguous; may be left out                                    |
/// | `count`                | `[B]`    | `i32`                | contiguous; may be left out                                    |
/// | `workspace`            | bytes    | `u8`                 | contiguous, on 16 bytes, [`sampling_workspace`] long           |
/// | `filters`: `k`         | `[R]`    | `i32`                | a number, or contiguous                                        |
/// | `p`, `min_p`           | `[R]`    | `f32`                | a number, or contiguous                                        |
/// | `draw`: `uniform`      | `[B]`    | `f32`                | contiguous; may be left out                                    |
///
/// Rows need not sum to one: `p` is compared with the mass as it is (or with its share of what top-k and min-p keep:
/// [`FilterOrder`]), and the draw is in proportion. Probabilities that are NaN or negative count as 0. A row without
/// positive mass, or with +Inf in it, gives id 0, mass 0 and count 0; a `row_index` out of range id 0, mass NaN and
/// count 0.
///
/// The result depends on the row, the parameters, `u` and nothing else: not on the other rows, strides, alignment, the
/// workspace's length or the device. Masses are exact to about 2^-45 of themselves, so that the kept set is what the formulas
/// say of the given numbers, but where a mass is that near to `p`. The work depends on the length of the row; if that is
/// beyond 8192 tokens, also on whether a sample of it tells where the threshold is, which a row that does not sum to one makes
/// impossible for top-p. One launch for up to 8192 tokens, three for more, for each turn of [`sampling_workspace`]. Returns when
/// they are queued. No outputs: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`Argument`](hk_core::Error::Argument) for a parameter
/// out of range on the host, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^24 - 1 tokens,
/// [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and launching a kernel can answer. Nothing is
/// written then.
///
/// Sources: top-p Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration"; min-p Nguyen et al. 2024,
/// "Turning Up the Heat"; the generator Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
pub fn top_k_top_p_sampling_from_probs<T: Float>(
    stream: &Stream,
    probs: TensorView<T>,
    row_index: Option<TensorView<i32>>,
    samples: Samples,
    workspace: TensorViewMut<u8>,
    filters: Filters,
    draw: Draw,
) -> Result<()> {
    let mut call = Call::new("top_k_top_p_sampling_from_probs", "probs", probs, row_index, workspace);
    call.filters = filters;
    call.drawing(samples, draw).run(stream)
}

/// Draws a token of `softmax(logits / temperature)` from those that all of `filters` keep:
/// [`top_k_top_p_sampling_from_probs`] of that softmax, which is nowhere written.
///
/// | arg           | shape    | dtype                | layout                             |
/// |---------------|----------|----------------------|------------------------------------|
/// | `logits`      | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride |
/// | `temperature` | `[R]`    | `f32`                | a number, or contiguous            |
///
/// and the others as there. Exponentials are f32, their sums within 2^-22 of themselves, and `mass` is the share that the filters
/// keep. A temperature of zero keeps the largest logit alone, the first if there are several, with mass 1 and count 1; other
/// temperatures below 1e-5, and on the device NaN, act as 1e-5. NaN and -Inf have no probability; a row of nothing else, or
/// with +Inf in it, gives id 0, mass 0 and count 0.
///
/// # Errors
/// As [`top_k_top_p_sampling_from_probs`]; [`Argument`](hk_core::Error::Argument) for a temperature that is negative or NaN.
#[expect(clippy::too_many_arguments, reason = "the operator's tensors")]
pub fn sample_from_logits<T: Float>(
    stream: &Stream,
    logits: TensorView<T>,
    temperature: PerRow<f32>,
    row_index: Option<TensorView<i32>>,
    samples: Samples,
    workspace: TensorViewMut<u8>,
    filters: Filters,
    draw: Draw,
) -> Result<()> {
    let mut call = Call::new("sample_from_logits", "logits", logits, row_index, workspace);
    call.temperature = Some(temperature);
    call.filters = filters;
    call.drawing(samples, draw).run(stream)
}

/// An operator with filters: all of them are one kernel, or one sequence of kernels.
struct Call<'a, T: Float> {
    op: &'static str,
    x_name: &'static str,
    x: TensorView<'a, T>,
    /// There is one: `x` are logits.
    temperature: Option<PerRow<'a, f32>>,
    row_index: Option<TensorView<'a, i32>>,
    filters: Filters<'a>,
    draw: Draw<'a>,
    samples: Option<Samples<'a>>,
    y: Option<TensorViewMut<'a, T>>,
    workspace: TensorViewMut<'a, u8>,
}

impl<'a, T: Float> Call<'a, T> {
    fn new(
        op: &'static str,
        x_name: &'static str,
        x: TensorView<'a, T>,
        row_index: Option<TensorView<'a, i32>>,
        workspace: TensorViewMut<'a, u8>,
    ) -> Self {
        let (filters, draw) = (Filters::default(), Draw::default());
        Self { op, x_name, x, temperature: None, row_index, filters, draw, samples: None, y: None, workspace }
    }

    fn drawing(mut self, samples: Samples<'a>, draw: Draw<'a>) -> Self {
        (self.samples, self.draw) = (Some(samples), draw);
        self
    }

    fn run(mut self, stream: &Stream) -> Result<()> {
        let op = self.op;
        let [rows, cols] = self.x.dims(op, self.x_name)?;
        let mut problem = RowProblem::new(op, self.x_name, rows, cols, T::DTYPE)?;
        check_cols(op, self.x_name, cols)?;
        problem.tensor(self.x_name, &self.x)?;
        let outputs = outputs_of(op, self.row_index.as_ref(), rows)?;
        self.filters.check(op, rows)?;
        if let Some(temperature) = &self.temperature {
            check_temperature(op, temperature, rows)?;
        }
        if let Some(uniform) = &self.draw.uniform {
            expect_vector(op, "uniform", uniform, outputs, "outputs")?;
        }
        let cut = Cut::of(cols);
        let needed = outputs.min(1) * bytes_per_output(cols);
        expect_workspace(op, &self.workspace, needed, "sampling_workspace")?;
        if let Some(y) = &self.y {
            problem.shaped("y", y, self.x.shape(), "shape of probs")?;
            check_overlap(op, (self.x_name, &self.x), ("y", y), Aliasing::ExactAliasAllowed)?;
            self.disjoint_from_inputs("y", y, false)?;
        }
        if let Some(Samples { ids, mass, count }) = &self.samples {
            expect_vector(op, "ids", ids, outputs, "outputs")?;
            self.disjoint_from_inputs("ids", ids, true)?;
            if let Some(mass) = mass {
                expect_vector(op, "mass", mass, outputs, "outputs")?;
                self.disjoint_from_inputs("mass", mass, true)?;
                check_overlap(op, ("ids", ids), ("mass", mass), Aliasing::Disjoint)?;
            }
            if let Some(count) = count {
                expect_vector(op, "count", count, outputs, "outputs")?;
                self.disjoint_from_inputs("count", count, true)?;
                check_overlap(op, ("ids", ids), ("count", count), Aliasing::Disjoint)?;
                disjoint(op, ("mass", mass.as_ref()), ("count", Some(count)))?;
            }
        }
        if cut.segments > 1 {
            let workspace = &self.workspace;
            self.disjoint_from_inputs("workspace", workspace, true)?;
            disjoint(op, ("y", self.y.as_ref()), ("workspace", Some(workspace)))?;
            if let Some(Samples { ids, mass, count }) = &self.samples {
                check_overlap(op, ("ids", ids), ("workspace", workspace), Aliasing::Disjoint)?;
                disjoint(op, ("mass", mass.as_ref()), ("workspace", Some(workspace)))?;
                disjoint(op, ("count", count.as_ref()), ("workspace", Some(workspace)))?;
            }
        }
        if outputs == 0 {
            return Ok(());
        }

        let (dtype, elements) = (float_index(T::DTYPE), usize::from(!problem.by_vectors()));
        let turn = Turn { first: 0, outputs, share: 1 };
        if cut.segments == 1 {
            let kernel = ROWS[dtype][usize::from(cols > WAVE_COLS) + 2 * elements];
            return self.launch(stream, &kernels::ROWS, kernel, outputs, cut, turn);
        }
        let most_blocks = stream.device().info().most_blocks(WALK_THREADS, WALK_WAVES);
        let at_a_time = self.workspace.numel() / bytes_per_output(cols);
        for first in (0..outputs).step_by(at_a_time) {
            let outputs = at_a_time.min(outputs - first);
            // Segments of a block: as few as there are blocks for.
            let share = cut.segments.div_ceil((most_blocks / outputs).max(1));
            let turn = Turn { first, outputs, share };
            let renorm = self.y.is_some();
            let mut launch = |which: usize, blocks| {
                self.launch(stream, &kernels::SEGMENTS, SEGMENTS[which][dtype][elements], blocks, cut, turn)
            };
            launch(GUESS, outputs)?;
            launch(WALK, outputs * cut.segments.div_ceil(share))?;
            launch(FINISH, outputs)?;
            if renorm {
                launch(RENORM, outputs * cut.segments)?;
            }
        }
        Ok(())
    }

    /// Checks that an output shares no memory with an input.
    fn disjoint_from_inputs(&self, name: &'static str, output: &impl Operand, x_too: bool) -> Result<()> {
        let (op, output) = (self.op, (name, Some(output)));
        let Filters { k, p, min_p, .. } = &self.filters;
        if x_too {
            disjoint(op, (self.x_name, Some(&self.x)), output)?;
        }
        disjoint(op, ("temperature", self.temperature.as_ref().and_then(PerRow::rows)), output)?;
        disjoint(op, ("row_index", self.row_index.as_ref()), output)?;
        disjoint(op, ("k", k.as_ref().and_then(PerRow::rows)), output)?;
        disjoint(op, ("p", p.as_ref().and_then(PerRow::rows)), output)?;
        disjoint(op, ("min_p", min_p.as_ref().and_then(PerRow::rows)), output)?;
        disjoint(op, ("uniform", self.draw.uniform.as_ref()), output)
    }

    fn launch(
        &mut self,
        stream: &Stream,
        objects: &'static CodeObjects,
        kernel: &'static str,
        blocks: usize,
        cut: Cut,
        turn: Turn,
    ) -> Result<()> {
        let kernel = stream.kernel(objects, kernel)?;
        let mut launch = stream.launch(self.op, &kernel);
        let Filters { k, p, min_p, order } = &self.filters;
        let (mut ids, mut mass, mut count) = (None, None, None);
        if let Some(samples) = &mut self.samples {
            ids = Some(&mut samples.ids);
            (mass, count) = (samples.mass.as_mut(), samples.count.as_mut());
        }
        let params = Params {
            x: launch.input(self.x_name, &self.x)?,
            row_index: launch.optional_input("row_index", self.row_index.as_ref())?,
            temperature: rows_layout(&mut launch, "temperature", self.temperature.as_ref())?,
            k: rows_layout(&mut launch, "k", k.as_ref())?,
            p: rows_layout(&mut launch, "p", p.as_ref())?,
            min_p: rows_layout(&mut launch, "min_p", min_p.as_ref())?,
            uniform: launch.optional_input("uniform", self.draw.uniform.as_ref())?,
            ids: launch.optional_output("ids", ids)?,
            mass: launch.optional_output("mass", mass)?,
            count: launch.optional_output("count", count)?,
            y: launch.optional_output("y", self.y.as_mut())?,
            workspace: match cut.segments {
                1 => GlobalLayout::ABSENT,
                _ => launch.output("workspace", &mut self.workspace)?,
            },
            seed: self.draw.seed,
            offset: self.draw.offset,
            // Values that switch a filter off.
            k_value: k.as_ref().map_or(i32::MAX, |k| k.value_or(i32::MAX)),
            p_value: p.as_ref().map_or(f32::NAN, |p| p.value_or(f32::NAN)),
            min_p_value: min_p.as_ref().map_or(f32::NAN, |p| p.value_or(f32::NAN)),
            temperature_value: self.temperature.as_ref().map_or(1.0, |t| t.value_or(1.0)),
            logits: self.temperature.is_some().into(),
            top_k_first: (*order == FilterOrder::TopKFirst).into(),
            first: turn.first as u32,
            outputs: turn.outputs as u32,
            segments: cut.segments as u32,
            segment: cut.segment as u32,
            share: turn.share as u32,
            _unused: 0,
        };
        // SAFETY: `run` has checked that `x` and `y` have the columns that the kernel walks, the vectors as many elements
        // as there are rows or outputs, and the workspace room for the outputs of this turn; the kernel checks `row_index`
        // itself. The loader matches `Params` to the kernel.
        unsafe { launch.run(LaunchConfig::grid_1d(blocks), &params) }
    }
}

/// The outputs of one launch.
#[derive(Debug, Clone, Copy)]
struct Turn {
    first: usize,
    outputs: usize,
    /// Segments of a block that walks.
    share: usize,
}
