//! The safe functions of `hip/race.hip`.

use crate::args::{
    Cut, check_temperature, disjoint, expect_vector, expect_workspace, outputs_of, rows_layout,
};
use crate::kernels::race::Params;
use crate::{PerRow, Race};
use hk_core::plan::rows::{RowProblem, float_index};
use hk_core::{
    DeviceInfo, Float, GlobalLayout, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut,
    row_kernels,
};

/// The entry points of each dtype: rows of up to 1024 tokens, longer ones; vectorized, then scalar.
static KERNELS: [[KernelRef<Params>; 4]; 3] =
    row_kernels!(Params, "race", ["bf16", "f16", "f32"], ["1024", "4096", "1024_scalar", "4096_scalar"]);

static MERGE: KernelRef<Params> = Params::kernel("race_merge");

/// Longest row of a wave.
const WAVE_COLS: usize = 1024;

/// Threads per block of long rows.
const THREADS: usize = 256;
/// Waves per CU: enough to saturate memory, and enough to saturate the SIMDs. A race prefers few, long segments: the more of a
/// segment a block has seen, the fewer tokens it scores.
const GREEDY_WAVES: usize = 32;
const RANDOM_WAVES: usize = 8;

/// `Mode` of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Greedy = 0,
    Random = 1,
    Mixed = 2,
}

/// Elements (`u8`) of the workspace of [`greedy_sample`], [`random_sample`] and [`mixed_sample`], for `outputs` outputs of
/// rows of `cols` tokens. 0 for rows of up to 8192 tokens. A shorter workspace is [`Error::Shape`](hk_core::Error::Shape).
pub fn race_workspace(info: &DeviceInfo, outputs: usize, cols: usize) -> usize {
    let _ = info; // the same on every device so far
    match Cut::of(cols).segments {
        1 => 0,
        segments => outputs.saturating_mul(segments * 8),
    }
}

/// The most likely token: `ids[b] = argmax_i x[row_index[b], i]`.
///
/// | arg         | shape    | dtype                | layout                                                      |
/// |-------------|----------|----------------------|-------------------------------------------------------------|
/// | `x`         | `[R, V]` | `bf16`, `f16`, `f32` | logits or probabilities; unit stride on `V`, any row stride |
/// | `row_index` | `[B]`    | `i32`                | contiguous; `None`: `B = R`, output `b` is of row `b`       |
/// | `ids`       | `[B]`    | `i32`                | contiguous                                                  |
/// | `workspace` | bytes    | `u8`                 | contiguous, 16-byte aligned, at least [`race_workspace`] |
///
/// Ties go to the smallest index. NaN is skipped; a row of only NaN and -Inf gives 0, and so does a `row_index` out of range. One
/// launch for up to 8192 tokens, two for more. No output may alias another tensor. Returns when the launches are queued. No
/// outputs: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`TooLarge`](hk_core::Error::TooLarge) beyond
/// 2^29 - 1 tokens, [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
pub fn greedy_sample<T: Float>(
    stream: &Stream,
    x: TensorView<T>,
    row_index: Option<TensorView<i32>>,
    ids: TensorViewMut<i32>,
    workspace: TensorViewMut<u8>,
) -> Result<()> {
    let call = Call { op: "greedy_sample", mode: Mode::Greedy, x_name: "x", temperature: 0.0.into() };
    call.run(stream, x, row_index, ids, workspace, Race::default())
}

/// A random token, by an exponential race: `ids[b] = argmax_i softmax(logits[r] / temperature[r])_i / (E_i + 1e-10)` with
/// `r = row_index[b]` and exponential `E_i` of rate one, which samples the softmax without computing its sum.
///
/// | arg                 | shape    | dtype                | layout                                                |
/// |---------------------|----------|----------------------|-------------------------------------------------------|
/// | `logits`            | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride                    |
/// | `temperature`       | `[R]`    | `f32`                | a number, or contiguous                               |
/// | `row_index`         | `[B]`    | `i32`                | contiguous; `None`: `B = R`, output `b` is of row `b` |
/// | `ids`               | `[B]`    | `i32`                | contiguous                                            |
/// | `workspace`         | bytes    | `u8`                 | contiguous, 16-byte aligned, at least [`race_workspace`] |
/// | `race.exponentials` | `[B, V]` | `f32`                | optional; unit stride on `V`, any row stride          |
///
/// Temperatures below 1e-5, and NaN on the device, act as 1e-5. The winner is the largest `logits_i / temperature - ln(E_i + 1e-10)` in
/// f32, ties to the smallest index: two tokens may change places if these are within `1e-6 + 2^-22 max|logits / temperature|`. NaN is
/// skipped, +Inf wins; a row of only NaN and -Inf gives 0, and so does a `row_index` out of range. `E_i` is drawn from `race.seed` and
/// `race.offset` ([`Race`]), or given. One launch for up to 8192 tokens, two for more. No output may alias another tensor. Returns
/// when the launches are queued. No outputs: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`Argument`](hk_core::Error::Argument) for a temperature that is negative or
/// NaN, [`TooLarge`](hk_core::Error::TooLarge) beyond
/// 2^29 - 1 tokens, [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
pub fn random_sample<T: Float>(
    stream: &Stream,
    logits: TensorView<T>,
    temperature: PerRow<f32>,
    row_index: Option<TensorView<i32>>,
    ids: TensorViewMut<i32>,
    workspace: TensorViewMut<u8>,
    race: Race,
) -> Result<()> {
    let call = Call { op: "random_sample", mode: Mode::Random, x_name: "logits", temperature };
    call.run(stream, logits, row_index, ids, workspace, race)
}

/// [`greedy_sample`] for rows whose temperature is zero, [`random_sample`] for others: `ids[b] = argmax_i logits[r, i]`, or
/// `argmax_i softmax(logits[r] / temperature[r])_i / (E_i + 1e-10)`, with `r = row_index[b]` and exponential `E_i` of rate one.
///
/// | arg                 | shape    | dtype                | layout                                                |
/// |---------------------|----------|----------------------|-------------------------------------------------------|
/// | `logits`            | `[R, V]` | `bf16`, `f16`, `f32` | unit stride on `V`, any row stride                    |
/// | `temperature`       | `[R]`    | `f32`                | a number, or contiguous                               |
/// | `row_index`         | `[B]`    | `i32`                | contiguous; `None`: `B = R`, output `b` is of row `b` |
/// | `ids`               | `[B]`    | `i32`                | contiguous                                            |
/// | `workspace`         | bytes    | `u8`                 | contiguous, 16-byte aligned, at least [`race_workspace`] |
/// | `race.exponentials` | `[B, V]` | `f32`                | optional; unit stride on `V`, any row stride          |
///
/// Bitwise identical to the two operators, row by row. Ties go to the smallest index, NaN is skipped; a row of only NaN and -Inf gives 0,
/// and so does a `row_index` out of range. One launch for up to 8192 tokens, two for more. No output may alias another tensor. Returns
/// when the launches are queued. No outputs: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor
/// breaks the table, [`Empty`](hk_core::Error::Empty) for `V = 0`, [`Argument`](hk_core::Error::Argument) for a temperature that is negative or
/// NaN, [`TooLarge`](hk_core::Error::TooLarge) beyond
/// 2^29 - 1 tokens, [`Overlap`](hk_core::Error::Overlap) if an output or the workspace shares memory with another tensor,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
pub fn mixed_sample<T: Float>(
    stream: &Stream,
    logits: TensorView<T>,
    temperature: PerRow<f32>,
    row_index: Option<TensorView<i32>>,
    ids: TensorViewMut<i32>,
    workspace: TensorViewMut<u8>,
    race: Race,
) -> Result<()> {
    let call = Call { op: "mixed_sample", mode: Mode::Mixed, x_name: "logits", temperature };
    call.run(stream, logits, row_index, ids, workspace, race)
}

struct Call<'a> {
    op: &'static str,
    mode: Mode,
    x_name: &'static str,
    temperature: PerRow<'a, f32>,
}

impl Call<'_> {
    fn run<T: Float>(
        self,
        stream: &Stream,
        x: TensorView<T>,
        row_index: Option<TensorView<i32>>,
        mut ids: TensorViewMut<i32>,
        mut workspace: TensorViewMut<u8>,
        race: Race,
    ) -> Result<()> {
        let Self { op, mode, x_name, temperature } = self;
        let [rows, cols] = x.dims(op, x_name)?;
        let mut problem = RowProblem::new(op, x_name, rows, cols, T::DTYPE)?;
        problem.tensor(x_name, &x)?;
        let outputs = outputs_of(op, row_index.as_ref(), rows)?;
        expect_vector(op, "ids", &ids, outputs, "outputs")?;
        check_temperature(op, &temperature, rows)?;
        if let Some(exponentials) = &race.exponentials {
            let shape = [outputs, cols];
            problem.shaped("exponentials", exponentials, &shape, "outputs, columns of logits")?;
        }
        let waves = if mode == Mode::Greedy { GREEDY_WAVES } else { RANDOM_WAVES };
        let cut = Cut::among(cols, outputs, stream.device().info().max_blocks(THREADS, waves));
        let bytes = race_workspace(stream.device().info(), outputs, cols);
        expect_workspace(op, &workspace, bytes, "race_workspace")?;
        let scratch = (cut.segments > 1).then_some(&workspace);
        disjoint(op, (x_name, Some(&x)), ("ids", Some(&ids)))?;
        disjoint(op, ("row_index", row_index.as_ref()), ("ids", Some(&ids)))?;
        disjoint(op, ("temperature", temperature.rows()), ("ids", Some(&ids)))?;
        disjoint(op, ("exponentials", race.exponentials.as_ref()), ("ids", Some(&ids)))?;
        disjoint(op, (x_name, Some(&x)), ("workspace", scratch))?;
        disjoint(op, ("row_index", row_index.as_ref()), ("workspace", scratch))?;
        disjoint(op, ("temperature", temperature.rows()), ("workspace", scratch))?;
        disjoint(op, ("exponentials", race.exponentials.as_ref()), ("workspace", scratch))?;
        disjoint(op, ("ids", Some(&ids)), ("workspace", scratch))?;
        if outputs == 0 {
            return Ok(());
        }

        let by_wave = cols <= WAVE_COLS;
        let variant = usize::from(!by_wave) + 2 * usize::from(!problem.can_vectorize());
        let mut launch = |kernel: KernelRef<Params>, blocks: usize| {
            let kernel = stream.kernel(kernel)?;
            let mut launch = stream.launch(op);
            let params = Params {
                x: launch.input(x_name, &x)?,
                row_index: launch.optional_input("row_index", row_index.as_ref())?,
                temperature: rows_layout(&mut launch, "temperature", Some(&temperature))?,
                exponentials: launch.optional_input("exponentials", race.exponentials.as_ref())?,
                ids: launch.output("ids", &mut ids)?,
                workspace: match cut.segments {
                    1 => GlobalLayout::ABSENT,
                    _ => launch.output("workspace", &mut workspace)?,
                },
                seed: race.seed,
                offset: race.offset,
                temperature_value: temperature.value_or(0.0),
                mode: mode as u32,
                segments: cut.segments as u32,
                segment: cut.segment as u32,
            };
            // SAFETY: the checks above make `x` and `exponentials` `cols` wide, the vectors as long as there are rows or
            // outputs, and the workspace long enough for the winners of all segments. The kernel accesses no more than that,
            // and checks `row_index` itself.
            unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }
        };
        launch(KERNELS[float_index(T::DTYPE)][variant], outputs * cut.segments)?;
        if cut.segments > 1 {
            launch(MERGE, outputs)?;
        }
        Ok(())
    }
}
