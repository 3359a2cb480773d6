//! The safe functions of `hip/rows.hip` and `hip/segments.hip`.

use crate::args::{
    Cut, check_cols, check_temperature, disjoint, expect_vector, expect_workspace, outputs_of, rows_layout,
};
use crate::kernels::sampling::Params;
use crate::{Draw, FilterOrder, Filters, PerRow, SampledRows, Samples};
use hk_core::plan::rows::{RowProblem, float_index};
use hk_core::{
    Aliasing, DeviceInfo, Float, GlobalLayout, KernelRef, LaunchConfig, Operand, Result, Stream, TensorView,
    TensorViewMut, check_overlap, row_kernels,
};

/// The entry points of each dtype for rows that stay in registers: up to 1024 tokens, up to 8192; vectorized, then scalar.
static ROWS: [[KernelRef<Params>; 4]; 3] = row_kernels!(
    Params,
    "sample_rows",
    ["bf16", "f16", "f32"],
    ["1024", "8192", "1024_scalar", "8192_scalar"]
);

/// A launch of longer rows, by dtype; of each, vectorized, scalar.
type Launches = [[KernelRef<Params>; 2]; 3];

macro_rules! launches {
    ($name:literal) => {
        [
            [Params::kernel(concat!($name, "_bf16")), Params::kernel(concat!($name, "_bf16_scalar"))],
            [Params::kernel(concat!($name, "_f16")), Params::kernel(concat!($name, "_f16_scalar"))],
            [Params::kernel(concat!($name, "_f32")), Params::kernel(concat!($name, "_f32_scalar"))],
        ]
    };
}

/// The launches of longer rows, in order.
struct Segments {
    guess: Launches,
    walk: Launches,
    finish: Launches,
    renorm: Launches,
}

static SEGMENTS: Segments = Segments {
    guess: launches!("sample_guess"),
    walk: launches!("sample_walk"),
    finish: launches!("sample_finish"),
    renorm: launches!("sample_renorm"),
};
/// Threads per block of `walk`, and the waves that saturate a CU.
const WALK_THREADS: usize = 128;
const WALK_WAVES: usize = 8;

/// Longest row of a wave.
const WAVE_COLS: usize = 1024;
/// Rows of a launch for long rows, as [`sampling_workspace`] makes room for: enough to fill a GPU.
const ROWS_AT_A_TIME: usize = 256;
/// `RowState` and `Segment` of `hip/segments.hip`, in bytes.
const ROW_BYTES: usize = 32;
const SEGMENT_BYTES: usize = 32;

/// Bytes of workspace for one output.
fn bytes_per_output(cols: usize) -> usize {
    let Cut { segments, segment } = Cut::of(cols);
    match segments {
        1 => 0,
        _ => (ROW_BYTES + segments * (SEGMENT_BYTES + segment * 4)).next_multiple_of(16),
    }
}

/// Elements (`u8`) of the workspace of the operators with filters, for `outputs` outputs of rows of `cols` tokens. 0 for rows
/// of up to 8192 tokens; about 4 bytes per token for longer ones, for up to 256 outputs.
///
/// A shorter workspace is legal down to that of one output: outputs run in batches of as many as fit, with launches of
/// their own. Results do not depend on it. Below that it is [`Error::Shape`](hk_core::Error::Shape). Fewer than 256 outputs
/// in a batch leave CUs idle in the last kernels, which have one block per output.
pub fn sampling_workspace(info: &DeviceInfo, outputs: usize, cols: usize) -> usize {
    let _ = info; // the same on every device so far
    outputs.min(ROWS_AT_A_TIME).saturating_mul(bytes_per_output(cols))
}

/// Keeps the `k` most likely tokens of each row and renormalizes them: `y[r, i] = probs[r, i] / max(mass, 1e-8)` if token `i` is kept,
/// else 0, with `mass` the sum of the kept ones.
///
/// | arg         | shape    | dtype                | layout                                  |
/// |-------------|----------|----------------------|-----------------------------------------|
/// | `probs`     | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride      |
/// | `y`         | `[R, V]` | as `probs`           | likewise; may alias `probs` exactly     |
/// | `workspace` | bytes    | `u8`                 | contiguous, 16-byte aligned; [`sampling_workspace`] |
/// | `k`         | `[R]`    | `i32`                | a number, or contiguous                 |
///
/// Tokens that tie with the `k`-th are all kept ([`Filters::k`]). NaN, negative and infinite probabilities count as 0, and so does a
/// whole row with +Inf in it. Sums have a relative error of at most 2^-45, and the result is rounded once. Batch-invariant. Returns when
/// the launches are queued: one for up to 8192 tokens, else four per batch of [`sampling_workspace`]. No rows: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`Argument`](hk_core::Error::Argument) for a parameter
/// out of range on the host, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^24 - 1 tokens,
/// [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
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

/// Draws a token from those that top-p keeps: `ids[b]` is the smallest kept `i` with
/// `sum{P_j : j <= i, kept} >= u * mass`, where `P` is row `row_index[b]` of `probs`.
///
/// | arg                 | shape    | dtype                | layout                                                |
/// |---------------------|----------|----------------------|-------------------------------------------------------|
/// | `probs`             | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride                    |
/// | `row_index`         | `[B]`    | `i32`                | contiguous; `None`: `B = R`, output `b` is of row `b` |
/// | `samples.ids`       | `[B]`    | `i32`                | contiguous                                            |
/// | `samples.mass`      | `[B]`    | `f32`                | contiguous; optional: the kept mass                   |
/// | `samples.count`     | `[B]`    | `i32`                | contiguous; optional: the number of kept tokens       |
/// | `workspace`         | bytes    | `u8`                 | contiguous, 16-byte aligned; [`sampling_workspace`] |
/// | `p`                 | `[R]`    | `f32`                | a number, or contiguous                               |
/// | `draw.uniform`      | `[B]`    | `f32`                | contiguous; optional: replaces the generator          |
///
/// Token `i` is kept if `sum{P_j : P_j > P_i} < p` and `P_i > 0` ([`Filters::p`]). `u` is the number in (0, 1] that [`Draw`] has for output `b`, and `mass` the sum of the kept tokens.
///
/// Rows need not sum to one: NaN and negative probabilities count as 0. A row without positive mass, or with +Inf in it, gives id 0,
/// mass 0 and count 0; a `row_index` out of range gives id 0, mass NaN and count 0. Batch-invariant and deterministic: the result
/// depends on the row, the parameters and `u` alone, not on other rows, strides, alignment, the length of the workspace or the device.
/// Masses have a relative error of at most 2^-45. No output may alias another tensor. Returns when the launches are queued: one for
/// up to 8192 tokens, else three per batch of [`sampling_workspace`]. No outputs: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`Argument`](hk_core::Error::Argument) for a parameter
/// out of range on the host, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^24 - 1 tokens,
/// [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
///
/// Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
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

/// Draws a token from those that top-k keeps: `ids[b]` is the smallest kept `i` with
/// `sum{P_j : j <= i, kept} >= u * mass`, where `P` is row `row_index[b]` of `probs`.
///
/// | arg                 | shape    | dtype                | layout                                                |
/// |---------------------|----------|----------------------|-------------------------------------------------------|
/// | `probs`             | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride                    |
/// | `row_index`         | `[B]`    | `i32`                | contiguous; `None`: `B = R`, output `b` is of row `b` |
/// | `samples.ids`       | `[B]`    | `i32`                | contiguous                                            |
/// | `samples.mass`      | `[B]`    | `f32`                | contiguous; optional: the kept mass                   |
/// | `samples.count`     | `[B]`    | `i32`                | contiguous; optional: the number of kept tokens       |
/// | `workspace`         | bytes    | `u8`                 | contiguous, 16-byte aligned; [`sampling_workspace`] |
/// | `k`                 | `[R]`    | `i32`                | a number, or contiguous                               |
/// | `draw.uniform`      | `[B]`    | `f32`                | contiguous; optional: replaces the generator          |
///
/// Token `i` is kept if fewer than `k` tokens are more likely and `P_i > 0`: all that tie with the `k`-th are kept ([`Filters::k`]). `u` is the number in (0, 1] that [`Draw`] has for output `b`, and `mass` the sum of the kept tokens.
///
/// Rows need not sum to one: NaN and negative probabilities count as 0. A row without positive mass, or with +Inf in it, gives id 0,
/// mass 0 and count 0; a `row_index` out of range gives id 0, mass NaN and count 0. Batch-invariant and deterministic: the result
/// depends on the row, the parameters and `u` alone, not on other rows, strides, alignment, the length of the workspace or the device.
/// Masses have a relative error of at most 2^-45. No output may alias another tensor. Returns when the launches are queued: one for
/// up to 8192 tokens, else three per batch of [`sampling_workspace`]. No outputs: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`Argument`](hk_core::Error::Argument) for a parameter
/// out of range on the host, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^24 - 1 tokens,
/// [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
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

/// Draws a token from those that min-p keeps: `ids[b]` is the smallest kept `i` with
/// `sum{P_j : j <= i, kept} >= u * mass`, where `P` is row `row_index[b]` of `probs`.
///
/// | arg                 | shape    | dtype                | layout                                                |
/// |---------------------|----------|----------------------|-------------------------------------------------------|
/// | `probs`             | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride                    |
/// | `row_index`         | `[B]`    | `i32`                | contiguous; `None`: `B = R`, output `b` is of row `b` |
/// | `samples.ids`       | `[B]`    | `i32`                | contiguous                                            |
/// | `samples.mass`      | `[B]`    | `f32`                | contiguous; optional: the kept mass                   |
/// | `samples.count`     | `[B]`    | `i32`                | contiguous; optional: the number of kept tokens       |
/// | `workspace`         | bytes    | `u8`                 | contiguous, 16-byte aligned; [`sampling_workspace`] |
/// | `min_p`             | `[R]`    | `f32`                | a number, or contiguous                               |
/// | `draw.uniform`      | `[B]`    | `f32`                | contiguous; optional: replaces the generator          |
///
/// Token `i` is kept if `P_i >= min_p * max_j P_j` and `P_i > 0` ([`Filters::min_p`]). `u` is the number in (0, 1] that [`Draw`] has for output `b`, and `mass` the sum of the kept tokens.
///
/// Rows need not sum to one: NaN and negative probabilities count as 0. A row without positive mass, or with +Inf in it, gives id 0,
/// mass 0 and count 0; a `row_index` out of range gives id 0, mass NaN and count 0. Batch-invariant and deterministic: the result
/// depends on the row, the parameters and `u` alone, not on other rows, strides, alignment, the length of the workspace or the device.
/// Masses have a relative error of at most 2^-45. No output may alias another tensor. Returns when the launches are queued: one for
/// up to 8192 tokens, else three per batch of [`sampling_workspace`]. No outputs: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`Argument`](hk_core::Error::Argument) for a parameter
/// out of range on the host, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^24 - 1 tokens,
/// [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
///
/// Source: Nguyen et al. 2024, "Turning Up the Heat".
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

/// Draws a token from those that all of `filters` keep: `ids[b]` is the smallest kept `i` with
/// `sum{P_j : j <= i, kept} >= u * mass`, where `P` is row `row_index[b]` of `probs`.
///
/// | arg                 | shape    | dtype                | layout                                                |
/// |---------------------|----------|----------------------|-------------------------------------------------------|
/// | `probs`             | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride                    |
/// | `row_index`         | `[B]`    | `i32`                | contiguous; `None`: `B = R`, output `b` is of row `b` |
/// | `samples.ids`       | `[B]`    | `i32`                | contiguous                                            |
/// | `samples.mass`      | `[B]`    | `f32`                | contiguous; optional: the kept mass                   |
/// | `samples.count`     | `[B]`    | `i32`                | contiguous; optional: the number of kept tokens       |
/// | `workspace`         | bytes    | `u8`                 | contiguous, 16-byte aligned; [`sampling_workspace`] |
/// | `filters.k`         | `[R]`    | `i32`                | a number, or contiguous; `None`: off                  |
/// | `filters.p`         | `[R]`    | `f32`                | a number, or contiguous; `None`: off                  |
/// | `filters.min_p`     | `[R]`    | `f32`                | a number, or contiguous; `None`: off                  |
/// | `draw.uniform`      | `[B]`    | `f32`                | contiguous; optional: replaces the generator          |
///
/// Token `i` is kept if fewer than `k` tokens are more likely, the more likely ones have less than `p` together,
/// `P_i >= min_p * max_j P_j`, and `P_i > 0` ([`Filters`]). `p` is compared with the mass as it is, or with the share of what top-k and
/// min-p keep ([`FilterOrder`]). `u` is the number in (0, 1] that [`Draw`] has for output `b`, and `mass` the sum of the kept tokens. The work depends on the length of the row and, beyond 8192 tokens, on whether
/// a sample predicts the threshold.
///
/// Rows need not sum to one: NaN and negative probabilities count as 0. A row without positive mass, or with +Inf in it, gives id 0,
/// mass 0 and count 0; a `row_index` out of range gives id 0, mass NaN and count 0. Batch-invariant and deterministic: the result
/// depends on the row, the parameters and `u` alone, not on other rows, strides, alignment, the length of the workspace or the device.
/// Masses have a relative error of at most 2^-45. No output may alias another tensor. Returns when the launches are queued: one for
/// up to 8192 tokens, else three per batch of [`sampling_workspace`]. No outputs: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`Argument`](hk_core::Error::Argument) for a parameter
/// out of range on the host, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^24 - 1 tokens,
/// [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
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

/// Draws a token of `P = softmax(logits / temperature)` from those that all of `filters` keep: `ids[b]` is the smallest kept `i` with
/// `sum{P_j : j <= i, kept} >= u * mass`. `P` is not materialized.
///
/// | arg                | shape    | dtype                | layout                                                |
/// |--------------------|----------|----------------------|-------------------------------------------------------|
/// | `logits`           | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride                    |
/// | `rows.temperature` | `[R]`    | `f32`                | a number, or contiguous                               |
/// | `rows.row_index`   | `[B]`    | `i32`                | contiguous; `None`: `B = R`, output `b` is of row `b` |
/// | `samples.ids`      | `[B]`    | `i32`                | contiguous                                            |
/// | `samples.mass`     | `[B]`    | `f32`                | contiguous; optional: the kept share of the mass      |
/// | `samples.count`    | `[B]`    | `i32`                | contiguous; optional: the number of kept tokens       |
/// | `workspace`        | bytes    | `u8`                 | contiguous, 16-byte aligned; [`sampling_workspace`] |
/// | `filters.k`        | `[R]`    | `i32`                | a number, or contiguous; `None`: off                  |
/// | `filters.p`        | `[R]`    | `f32`                | a number, or contiguous; `None`: off                  |
/// | `filters.min_p`    | `[R]`    | `f32`                | a number, or contiguous; `None`: off                  |
/// | `draw.uniform`     | `[B]`    | `f32`                | contiguous; optional: replaces the generator          |
///
/// Filters are those of [`top_k_top_p_sampling_from_probs`] on `P`; `u` is the number in (0, 1] that [`Draw`] has for output `b`.
/// Exponentials are f32, and their sums have a relative error of at most 2^-22. A temperature of zero keeps the first of the largest
/// logits, with mass 1 and count 1; other temperatures below 1e-5, and NaN on the device, act as 1e-5. NaN and -Inf have probability 0;
/// a row of nothing else, or with +Inf in it, gives id 0, mass 0 and count 0; a `row_index` out of range gives id 0, mass NaN and
/// count 0.
///
/// Batch-invariant and deterministic: the result depends on the row, the parameters and `u` alone. No output may alias another
/// tensor. Returns when the launches are queued: one for up to 8192 tokens, else three per batch of [`sampling_workspace`]. No
/// outputs: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`Argument`](hk_core::Error::Argument) for a parameter
/// out of range on the host, a temperature that is negative or NaN too, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^24 - 1 tokens,
/// [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
///
/// Sources: top-p Holtzman et al. 2020; min-p Nguyen et al. 2024; the generator Salmon et al. 2011.
pub fn sample_from_logits<T: Float>(
    stream: &Stream,
    logits: TensorView<T>,
    rows: SampledRows,
    samples: Samples,
    workspace: TensorViewMut<u8>,
    filters: Filters,
    draw: Draw,
) -> Result<()> {
    let SampledRows { temperature, row_index } = rows;
    let mut call = Call::new("sample_from_logits", "logits", logits, row_index, workspace);
    call.temperature = Some(temperature);
    call.filters = filters;
    call.drawing(samples, draw).run(stream)
}

/// A call of an operator with filters: one kernel, or one sequence of kernels, serves all.
struct Call<'a, T: Float> {
    op: &'static str,
    x_name: &'static str,
    x: TensorView<'a, T>,
    /// `Some`: `x` is logits.
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

        let (dtype, scalar) = (float_index(T::DTYPE), usize::from(!problem.can_vectorize()));
        let batch = Batch { first: 0, outputs, share: 1 };
        if cut.segments == 1 {
            let kernel = ROWS[dtype][usize::from(cols > WAVE_COLS) + 2 * scalar];
            return self.launch(stream, kernel, outputs, cut, batch);
        }
        let max_blocks = stream.device().info().max_blocks(WALK_THREADS, WALK_WAVES);
        let at_a_time = self.workspace.numel() / bytes_per_output(cols);
        for first in (0..outputs).step_by(at_a_time) {
            let outputs = at_a_time.min(outputs - first);
            // Segments per block: as few as the device has blocks for.
            let share = cut.segments.div_ceil((max_blocks / outputs).max(1));
            let batch = Batch { first, outputs, share };
            let renorm = self.y.is_some();
            let mut launch =
                |kernels: &Launches, blocks| self.launch(stream, kernels[dtype][scalar], blocks, cut, batch);
            launch(&SEGMENTS.guess, outputs)?;
            launch(&SEGMENTS.walk, outputs * cut.segments.div_ceil(share))?;
            launch(&SEGMENTS.finish, outputs)?;
            if renorm {
                launch(&SEGMENTS.renorm, outputs * cut.segments)?;
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
        kernel: KernelRef<Params>,
        blocks: usize,
        cut: Cut,
        batch: Batch,
    ) -> Result<()> {
        let kernel = stream.kernel(kernel)?;
        let mut launch = stream.launch(self.op);
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
            // Values that disable a filter.
            k_value: k.as_ref().map_or(i32::MAX, |k| k.value_or(i32::MAX)) as u32,
            p_value: p.as_ref().map_or(f32::NAN, |p| p.value_or(f32::NAN)),
            min_p_value: min_p.as_ref().map_or(f32::NAN, |p| p.value_or(f32::NAN)),
            temperature_value: self.temperature.as_ref().map_or(1.0, |t| t.value_or(1.0)),
            logits: self.temperature.is_some().into(),
            top_k_first: (*order == FilterOrder::TopKFirst).into(),
            first: batch.first as u32,
            outputs: batch.outputs as u32,
            segments: cut.segments as u32,
            segment: cut.segment as u32,
            share: batch.share as u32,
            unused: 0,
        };
        // SAFETY: `run` has checked the columns of `x` and `y`, that vectors have as many elements as there are rows or outputs,
        // and that the workspace has room for the outputs of this batch. The kernel accesses no more than that, and checks
        // `row_index` itself.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }
    }
}

/// The outputs of one sequence of launches.
#[derive(Debug, Clone, Copy)]
struct Batch {
    first: usize,
    outputs: usize,
    /// Segments per block of `walk`.
    share: usize,
}
