//! The safe functions of `hip/conv.hip`.

use crate::kernels;
use bytemuck::{Pod, Zeroable};
use hk_core::rowwise::float_index;
use hk_core::{
    DType, Element, Error, Float, GlobalLayout, LaunchConfig, NamedOperand, Operand, Result, Stream,
    TensorView, TensorViewMut, bf16, check_aliases, f16,
};

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: GlobalLayout,
    weight: GlobalLayout,
    bias: GlobalLayout,
    y: GlobalLayout,
    states: GlobalLayout,
    starts: GlobalLayout,
    lines: GlobalLayout,
    has_initial: GlobalLayout,
    x_at: [i64; 3],
    y_at: [i64; 3],
    state_at: [i64; 3],
    batch: u32,
    channels: u32,
    tokens: u32,
    run: u32,
    runs: u32,
    width: u32,
    n_lines: u32,
    weight_is_f32: u32,
    silu: u32,
    state_access: u32,
    update: u32,
    pad: u32,
}

/// The same values as `StateAccess` in `hip/conv.hip`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StateAccess {
    Elements = 0,
    Channels = 1,
    Slots = 2,
}

/// What follows the sum of a causal convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConvActivation {
    /// Nothing.
    #[default]
    None,
    /// `y / (1 + exp(-y))`.
    Silu,
}

/// A type that the weights of a convolution can have beside activations of type `T`: `T` itself and `f32`.
pub trait ConvWeight<T: Float>: Float {}

impl<T: Float> ConvWeight<T> for T {}
impl ConvWeight<bf16> for f32 {}
impl ConvWeight<f16> for f32 {}

/// The history of the sequences of a [`causal_conv1d_fwd`]: read where asked for, and replaced by the last tokens.
#[derive(Debug)]
pub struct ConvStates<'a, T: Element> {
    /// `[lines, channels, width - 1]`, any strides.
    pub states: TensorViewMut<'a, T>,
    /// `[batch]`: the line of each sequence. -1: the sequence is padding, neither its results nor a state are written.
    /// Otherwise different ones. Without it, sequence `b` has line `b`.
    pub cache_indices: Option<TensorView<'a, i32>>,
    /// `[batch]`: not 0 where a sequence goes on from its line; others, and without it all, begin with zeros.
    pub has_initial_state: Option<TensorView<'a, u8>>,
}

/// Depthwise causal convolution along the tokens of sequences:
/// `y[c, t] = act(bias[c] + sum_j weight[c, j] * h[c, t - (width - 1) + j])`, where `h` is a sequence behind its history.
///
/// | arg                 | shape                                                     | dtype                | layout                           |
/// |---------------------|-----------------------------------------------------------|----------------------|----------------------------------|
/// | `x`, `y`            | `[batch, channels, tokens]`; packed: `[channels, tokens]` | `bf16`, `f16`, `f32` | unit stride on channels or tokens |
/// | `weight`            | `[channels, width]`, width 2, 3 or 4                      | as `x`, or `f32`     | contiguous                       |
/// | `bias`              | `[channels]`; may be left out                             | as `weight`          | contiguous                       |
/// | `query_start_loc`   | `[batch + 1]`; given if packed                            | `i32`                | contiguous                       |
/// | `states`            | see [`ConvStates`]; may be left out                       | as `x`               | any strides                      |
///
/// Packed sequences lie one after the other along the tokens: sequence `b` from `query_start_loc[b]` to
/// `query_start_loc[b + 1]`, which rise from 0. Without states the history is zeros. A state is the last `width - 1` tokens of
/// `h`, oldest first, bit for bit; a sequence shorter than that keeps the end of its history, and one without tokens changes
/// nothing. Unit stride on channels is the faster layout. 16 bytes are moved at a time where tensors and all strides but the
/// unit one begin on 16 bytes, if the channels are a multiple of 16 bytes, or with unit stride on tokens a multiple of four.
///
/// Arithmetic is `f32`, a fused multiply-add for each `j` from the bias on, with one rounding, to nearest even. A result
/// depends on its tokens alone: calls chained by their states give the bits of one call.
///
/// Indices lie on the device and are checked there: a sequence whose line is out of range, or whose tokens are, becomes NaN
/// where it has tokens, and no state is written. Two sequences with one line: either state may remain.
///
/// Returns when the launch is queued, before it has run. No tokens: nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks the
/// table, [`Argument`](hk_core::Error::Argument) for another width, [`Overlap`](hk_core::Error::Overlap) if `y` or `states`
/// share memory with another tensor, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens, channels or sequences,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and launching a kernel can answer. Nothing is written
/// then.
#[expect(clippy::too_many_arguments, reason = "the tensors of the operator")]
pub fn causal_conv1d_fwd<T: Float, W: ConvWeight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    weight: TensorView<W>,
    bias: Option<TensorView<W>>,
    query_start_loc: Option<TensorView<i32>>,
    states: Option<ConvStates<T>>,
    y: TensorViewMut<T>,
    activation: ConvActivation,
) -> Result<()> {
    const OP: &str = "causal_conv1d_fwd";
    let (batch, axes) = match &query_start_loc {
        None => {
            let [batch, ..] = x.dims::<3>(OP, "x")?;
            (batch, [Some(0), Some(1), Some(2)])
        }
        Some(starts) => {
            x.dims::<2>(OP, "x")?;
            let [n] = starts.dims(OP, "query_start_loc")?;
            let Some(batch) = n.checked_sub(1) else {
                let want = "[batch + 1], at least one element";
                return Err(Error::shape(OP, "query_start_loc", starts.shape(), want));
            };
            (batch, [None, Some(0), Some(1)])
        }
    };
    let (states, cache_indices, has_initial_state) = match states {
        Some(s) => (Some(s.states), s.cache_indices, s.has_initial_state),
        None => (None, None, None),
    };
    let call = Conv { op: OP, batch, axes, lines: "cache_indices", update: false, activation };
    call.run(stream, x, weight, bias, query_start_loc, states, cache_indices, has_initial_state, y)
}

/// [`causal_conv1d_fwd`] of sequences that all go on from their line of `conv_states`, for the few tokens of a decoding step.
///
/// | arg                  | shape                                                  | dtype                | layout                           |
/// |----------------------|--------------------------------------------------------|----------------------|----------------------------------|
/// | `x`, `y`             | `[batch, channels]` or `[batch, channels, tokens]`     | `bf16`, `f16`, `f32` | unit stride on channels or tokens |
/// | `weight`             | `[channels, width]`, width 2, 3 or 4                   | as `x`, or `f32`     | contiguous                       |
/// | `bias`               | `[channels]`; may be left out                          | as `weight`          | contiguous                       |
/// | `conv_state_indices` | `[batch]`; may be left out                             | `i32`                | contiguous                       |
/// | `conv_states`        | `[lines, channels, width - 1]`                         | as `x`               | any strides                      |
///
/// `y` may be exactly `x` ([`TensorViewMut::alias`]). `conv_state_indices` are the `cache_indices` of [`ConvStates`]. Results
/// have the bits that [`causal_conv1d_fwd`] gives.
///
/// # Errors
/// As [`causal_conv1d_fwd`], but that `y` may be `x`.
#[expect(clippy::too_many_arguments, reason = "the tensors of the operator")]
pub fn causal_conv1d_update<T: Float, W: ConvWeight<T>>(
    stream: &Stream,
    x: TensorView<T>,
    weight: TensorView<W>,
    bias: Option<TensorView<W>>,
    conv_state_indices: Option<TensorView<i32>>,
    conv_states: TensorViewMut<T>,
    y: TensorViewMut<T>,
    activation: ConvActivation,
) -> Result<()> {
    const OP: &str = "causal_conv1d_update";
    let axes = match x.shape().len() {
        2 => [Some(0), Some(1), None],
        3 => [Some(0), Some(1), Some(2)],
        _ => return Err(Error::shape(OP, "x", x.shape(), "[batch, channels] or [batch, channels, tokens]")),
    };
    let call =
        Conv { op: OP, batch: x.shape()[0], axes, lines: "conv_state_indices", update: true, activation };
    call.run(stream, x, weight, bias, None, Some(conv_states), conv_state_indices, None, y)
}

/// One of the two operators, as it is called.
struct Conv {
    op: &'static str,
    batch: usize,
    /// Which axes of `x` and `y` are sequences, channels and tokens.
    axes: [Option<usize>; 3],
    /// Name of the argument with the lines.
    lines: &'static str,
    update: bool,
    activation: ConvActivation,
}

/// Tokens that a lane moves at a time where lanes lie along channels, and its run where they lie along tokens: `kAhead` of
/// both in `hip/conv.hip`.
const AHEAD: usize = 4;
const RUN: usize = 8;
/// Channels of a lane that has 16 bytes of tokens of each.
const TILE_CHANNELS: usize = 4;
/// Waves that a CU needs to keep memory busy.
const WAVES_PER_CU: usize = 12;

impl Conv {
    #[expect(clippy::too_many_arguments, reason = "the tensors of the operator")]
    fn run<T: Float, W: ConvWeight<T>>(
        &self,
        stream: &Stream,
        x: TensorView<T>,
        weight: TensorView<W>,
        bias: Option<TensorView<W>>,
        starts: Option<TensorView<i32>>,
        mut states: Option<TensorViewMut<T>>,
        lines: Option<TensorView<i32>>,
        has_initial: Option<TensorView<u8>>,
        mut y: TensorViewMut<T>,
    ) -> Result<()> {
        let op = self.op;
        let axis = |i: usize| self.axes[i].map_or(1, |a| x.shape()[a]);
        let (channels, tokens) = (axis(1), axis(2));
        if y.shape() != x.shape() {
            return Err(Error::shape(op, "y", y.shape(), format!("{:?} (shape of x)", x.shape())));
        }
        let [weights, width] = weight.dims(op, "weight")?;
        if weights != channels {
            let want = format!("[{channels}, width] (channels of x)");
            return Err(Error::shape(op, "weight", weight.shape(), want));
        }
        if !(2..=4).contains(&width) {
            return Err(Error::argument(op, "weight", format!("width {width}"), "a width of 2, 3 or 4"));
        }
        weight.expect_contiguous(op, "weight")?;
        vector(op, "bias", bias.as_ref(), channels, "channels of x")?;
        vector(op, "query_start_loc", starts.as_ref(), self.batch + 1, "one more than sequences")?;
        vector(op, self.lines, lines.as_ref(), self.batch, "sequences")?;
        vector(op, "has_initial_state", has_initial.as_ref(), self.batch, "sequences")?;
        let mut n_lines = 0;
        if let Some(states) = &states {
            let shape = states.shape();
            n_lines = shape.first().copied().unwrap_or(0);
            let enough = lines.is_some() || n_lines >= self.batch;
            if shape != [n_lines, channels, width - 1] || !enough {
                let least = if lines.is_some() { "lines".into() } else { format!("{} or more", self.batch) };
                let want = format!("[{least}, {channels}, {}]", width - 1);
                return Err(Error::shape(op, "conv_states", shape, want));
            }
        }
        let x_at = self.strides(x.shape(), x.strides());
        let y_at = self.strides(y.shape(), y.strides());
        for (arg, at, layout) in [("x", x_at, x.layout()), ("y", y_at, y.layout())] {
            if at[1] != 1 && at[2] != 1 {
                return Err(Error::stride(op, arg, layout, "unit stride on channels or on tokens"));
            }
        }

        let element = size_of::<T>() as u64;
        x.expect_aligned(op, "x", element)?;
        y.expect_aligned(op, "y", element)?;
        weight.expect_aligned(op, "weight", size_of::<W>() as u64)?;
        if let Some(states) = &states {
            states.expect_aligned(op, "conv_states", element)?;
        }
        fn some<O: Operand>(tensor: Option<&O>) -> Option<&dyn Operand> {
            tensor.map(|tensor| tensor as _)
        }
        let inputs: [NamedOperand; 6] = [
            ("x", Some(&x)),
            ("weight", Some(&weight)),
            ("bias", some(bias.as_ref())),
            ("query_start_loc", some(starts.as_ref())),
            (self.lines, some(lines.as_ref())),
            ("has_initial_state", some(has_initial.as_ref())),
        ];
        let y_may_be: &[_] = if self.update { &["x"] } else { &[] };
        let outputs: [(NamedOperand, &[_]); 2] =
            [(("y", Some(&y)), y_may_be), (("conv_states", some(states.as_ref())), &[])];
        check_aliases(op, &inputs, &outputs)?;
        let limit = i32::MAX as usize;
        for (n, what) in [(self.batch, "sequences"), (channels, "channels"), (tokens, "tokens")] {
            if n > limit {
                return Err(Error::too_large(op, "x", format!("{n} {what}"), limit as u64));
            }
        }
        if self.batch == 0 || channels == 0 || tokens == 0 {
            return Ok(());
        }

        // Which way lanes lie, and whether 16 bytes can be moved at a time.
        let v = 16 / size_of::<T>();
        let along_channels = x_at[1] == 1 && (channels > 1 || x_at[2] != 1);
        let batches = if starts.is_some() { 1 } else { self.batch };
        let lengths = [batches, channels, tokens];
        let inner = if along_channels { 1 } else { 2 };
        let whole = |at: &[i64; 3]| {
            let apart = |axis: usize| lengths[axis] <= 1 || (at[axis] as usize).is_multiple_of(v);
            at[inner] == 1 && (0..3).all(|axis| axis == inner || apart(axis))
        };
        let fits = if along_channels {
            channels.is_multiple_of(v)
        } else {
            channels.is_multiple_of(TILE_CHANNELS) && tokens >= v && !self.update
        };
        let vectors = fits
            && (whole(&x_at) && whole(&y_at))
            && (x.is_aligned(16) && y.is_aligned(16) && weight.is_aligned(16))
            && bias.as_ref().is_none_or(|b| b.is_aligned(16));
        let (state_at, state_access) = match &states {
            Some(states) => state_access(states, v),
            None => ([0; 3], StateAccess::Elements),
        };

        let info = stream.device().info();
        let wave = info.wave_size as usize;
        // Waves side by side along channels, or lanes.
        let abreast = match (along_channels, vectors) {
            (true, true) => channels.div_ceil(wave * v),
            (true, false) => channels.div_ceil(wave),
            (false, true) => channels / TILE_CHANNELS,
            (false, false) => channels,
        };
        let run = match (self.update, along_channels) {
            (true, _) => tokens,
            (false, true) => {
                let waves = info.most_blocks(wave, WAVES_PER_CU);
                (batches * tokens * abreast).div_ceil(waves).next_multiple_of(AHEAD).clamp(16, 256)
            }
            (false, false) if vectors => v,
            (false, false) => RUN,
        };
        let runs = tokens.div_ceil(run);
        let items = runs.saturating_mul(abreast).saturating_mul(batches);
        let blocks = if along_channels { items } else { items.div_ceil(wave) };
        let row = float_index(T::DTYPE);
        let column = 2 * usize::from(!along_channels) + usize::from(!vectors);
        let kernel = stream.kernel(&kernels::CONV, KERNELS[row][column])?;
        let mut launch = stream.launch(op, &kernel);
        let params = Params {
            x: launch.input("x", &x)?,
            weight: launch.input("weight", &weight)?,
            bias: launch.optional_input("bias", bias.as_ref())?,
            y: launch.output("y", &mut y)?,
            states: launch.optional_output("conv_states", states.as_mut())?,
            starts: launch.optional_input("query_start_loc", starts.as_ref())?,
            lines: launch.optional_input(self.lines, lines.as_ref())?,
            has_initial: launch.optional_input("has_initial_state", has_initial.as_ref())?,
            x_at,
            y_at,
            state_at,
            batch: self.batch as u32,
            channels: channels as u32,
            tokens: tokens as u32,
            run: run as u32,
            runs: runs as u32,
            width: width as u32,
            n_lines: u32::try_from(n_lines).unwrap_or(u32::MAX),
            weight_is_f32: (W::DTYPE == DType::F32).into(),
            silu: (self.activation == ConvActivation::Silu).into(),
            state_access: state_access as u32,
            update: self.update.into(),
            pad: 0,
        };
        // SAFETY: the checks above give x and y batch sequences of the same channels and tokens, weight and bias that many
        // channels, states those and width - 1 slots, and the other tensors one element a sequence (starts one more). The
        // kernel stays within these, cuts packed sequences to the tokens, and checks lines, whatever the grid and the indices
        // are; the loader matches `Params` to the kernel.
        unsafe { launch.run(LaunchConfig::grid_1d(blocks), &params) }
    }

    /// Strides along sequences, channels and tokens; 1 for an axis of one element.
    fn strides(&self, shape: &[usize], strides: &[usize]) -> [i64; 3] {
        self.axes.map(|axis| match axis {
            Some(a) if shape[a] > 1 => strides[a] as i64,
            _ => 1,
        })
    }
}

/// The entry points: for bf16, f16, f32.
static KERNELS: [[&str; 4]; 3] = hk_core::row_kernels!(
    "conv",
    ["bf16", "f16", "f32"],
    ["channels", "channels_elements", "tokens", "tokens_elements"]
);

/// The strides of a state, and how a lane with `v` channels reaches it.
fn state_access<T: Element>(states: &TensorViewMut<T>, v: usize) -> ([i64; 3], StateAccess) {
    let (shape, strides) = (states.shape(), states.strides());
    let at = [0, 1, 2].map(|i| strides[i] as i64);
    let whole = |axis: usize| shape[axis] <= 1 || strides[axis].is_multiple_of(v);
    let access = if !states.is_aligned(16) || !whole(0) {
        StateAccess::Elements
    } else if strides[1] == 1 && whole(2) {
        StateAccess::Channels
    } else if strides[1] == shape[2] && (shape[2] <= 1 || strides[2] == 1) {
        StateAccess::Slots
    } else {
        StateAccess::Elements
    };
    (at, access)
}

/// Checks an optional tensor of one axis.
fn vector<E: Element>(
    op: &'static str,
    arg: &'static str,
    tensor: Option<&TensorView<E>>,
    len: usize,
    why: &str,
) -> Result<()> {
    let Some(tensor) = tensor else { return Ok(()) };
    if tensor.shape() != [len] {
        return Err(Error::shape(op, arg, tensor.shape(), format!("[{len}] ({why})")));
    }
    tensor.expect_contiguous(op, arg)?;
    tensor.expect_aligned(op, arg, size_of::<E>() as u64)
}
