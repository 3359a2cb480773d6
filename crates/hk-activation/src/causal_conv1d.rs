//! The safe functions of `hip/conv.hip`, and what those of other entry points over `activation/conv.h` share with them: depthwise causal convolution.

use crate::kernels::conv::{Params, Strides};
use bytemuck::Zeroable;
use hk_core::plan::rows::float_index;
use hk_core::{
    DType, Element, Error, Float, GlobalLayout, KernelRef, Launch, LaunchConfig, NamedOperand, Operand,
    Result, Stream, TensorView, TensorViewMut, bf16, check_aliases, f16,
};

/// The same values as `StateAccess` in `hip/include/activation/conv.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StateAccess {
    Scalar = 0,
    Channels = 1,
    Taps = 2,
}

/// Activation of a causal convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConvActivation {
    /// Nothing.
    #[default]
    None,
    /// `y / (1 + exp(-y))`.
    Silu,
}

/// Element type of weights for a convolution of `T`: `T` itself or `f32`.
pub trait ConvWeight<T: Float>: Float {}

impl<T: Float> ConvWeight<T> for T {}
impl ConvWeight<bf16> for f32 {}
impl ConvWeight<f16> for f32 {}

/// The inputs of [`causal_conv1d_fwd`].
#[derive(Debug, Clone, Copy)]
pub struct ConvInputs<'a, T: Element, W: Element> {
    /// `[batch, channels, tokens]`; packed sequences: `[channels, tokens]`.
    pub x: TensorView<'a, T>,
    /// `[channels, width]`.
    pub weight: TensorView<'a, W>,
    /// `[channels]`; zero if left out.
    pub bias: Option<TensorView<'a, W>>,
    /// `[batch + 1]`: the first token of each packed sequence, then the number of tokens. Given if `x` is packed.
    pub query_start_loc: Option<TensorView<'a, i32>>,
    /// `[batch]`: the slot of each sequence in [`ConvOutputs::conv_states`]; -1 for a padding sequence. Sequence `b` has
    /// slot `b` if left out.
    pub cache_indices: Option<TensorView<'a, i32>>,
    /// `[batch]`: not 0 where a sequence continues from its slot of [`ConvOutputs::conv_states`]. Every history is zeros if
    /// left out.
    pub has_initial_state: Option<TensorView<'a, u8>>,
}

impl<'a, T: Element, W: Element> ConvInputs<'a, T, W> {
    /// Without bias; sequences are neither packed nor have states.
    pub fn new(x: TensorView<'a, T>, weight: TensorView<'a, W>) -> Self {
        Self { x, weight, bias: None, query_start_loc: None, cache_indices: None, has_initial_state: None }
    }
}

/// The outputs of [`causal_conv1d_fwd`]; made by `into()` from `y` alone.
#[derive(Debug)]
pub struct ConvOutputs<'a, T: Element> {
    /// Shape of `x`.
    pub y: TensorViewMut<'a, T>,
    /// `[slots, channels, width - 1]`: the states, updated in place.
    pub conv_states: Option<TensorViewMut<'a, T>>,
}

impl<'a, T: Element> From<TensorViewMut<'a, T>> for ConvOutputs<'a, T> {
    fn from(y: TensorViewMut<'a, T>) -> Self {
        Self { y, conv_states: None }
    }
}

/// The inputs of [`causal_conv1d_update`].
#[derive(Debug, Clone, Copy)]
pub struct ConvUpdateInputs<'a, T: Element, W: Element> {
    /// `[batch, channels]` or `[batch, channels, tokens]`.
    pub x: TensorView<'a, T>,
    /// `[channels, width]`.
    pub weight: TensorView<'a, W>,
    /// `[channels]`; zero if left out.
    pub bias: Option<TensorView<'a, W>>,
    /// `[batch]`: the slot of each sequence in [`ConvUpdateOutputs::conv_states`]; -1 for a padding sequence. Sequence `b`
    /// has slot `b` if left out.
    pub conv_state_indices: Option<TensorView<'a, i32>>,
}

impl<'a, T: Element, W: Element> ConvUpdateInputs<'a, T, W> {
    /// Without bias and slots.
    pub fn new(x: TensorView<'a, T>, weight: TensorView<'a, W>) -> Self {
        Self { x, weight, bias: None, conv_state_indices: None }
    }
}

/// The outputs of [`causal_conv1d_update`].
#[derive(Debug)]
pub struct ConvUpdateOutputs<'a, T: Element> {
    /// Shape of `x`; may be exactly `x`.
    pub y: TensorViewMut<'a, T>,
    /// `[slots, channels, width - 1]`: the states, updated in place.
    pub conv_states: TensorViewMut<'a, T>,
}

/// Depthwise causal convolution along the tokens of sequences:
/// `y[c, t] = act(bias[c] + sum_j weight[c, j] * h[c, t - (width - 1) + j])`. `h` is the history of a sequence followed by its
/// tokens `x`.
///
/// | arg                 | shape                                                     | dtype                | layout                            |
/// |---------------------|-----------------------------------------------------------|----------------------|-----------------------------------|
/// | `x`, `y`            | `[batch, channels, tokens]`; packed: `[channels, tokens]` | `bf16`, `f16`, `f32` | unit stride on channels or tokens |
/// | `weight`            | `[channels, width]`, width 2, 3 or 4                      | as `x`, or `f32`     | contiguous                        |
/// | `bias`              | `[channels]`; optional                                    | as `weight`          | contiguous                        |
/// | `query_start_loc`   | `[batch + 1]`; given if packed                            | `i32`                | contiguous                        |
/// | `cache_indices`     | `[batch]`; optional, beside `conv_states`                 | `i32`                | contiguous                        |
/// | `has_initial_state` | `[batch]`; optional, beside `conv_states`                 | `u8`                 | contiguous                        |
/// | `conv_states`       | `[slots, channels, width - 1]`; optional                  | as `x`               | any strides                       |
///
/// Packed sequences are adjacent along the tokens: sequence `b` is the tokens `query_start_loc[b]..query_start_loc[b + 1]`,
/// which rise from 0. The history of a sequence is its slot of `conv_states` where `has_initial_state` is not 0, else zeros.
/// Its slot becomes the last `width - 1` tokens of `h`, oldest first, bit for bit. A sequence shorter than that keeps the end
/// of its history; one without tokens leaves its slot unchanged.
///
/// `f32` arithmetic: one fused multiply-add for each `j`, starting from the bias, and one rounding, to nearest even. Results
/// are batch-invariant: a result depends on the tokens of its sequence alone. Calls chained by their states are bitwise
/// identical to one call.
///
/// Indices are checked on the device. Slot -1 is padding: neither `y` nor a state is written. A sequence whose slot or whose
/// tokens are out of range becomes NaN where it has tokens, and no state is written. If two sequences have one slot, the state
/// of either may remain.
///
/// The vectorized path moves 16 bytes at a time. It needs tensors, and all their strides but the unit one, aligned to 16 bytes,
/// and a number of channels that is a multiple of 16 bytes, or of four if tokens have unit stride. Unit stride on channels is
/// faster. `y` and `conv_states` share no memory with another tensor.
///
/// Returns when the launch is queued, before it has run. Without tokens, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks the
/// table, [`Argument`](hk_core::Error::Argument) for another width, or `cache_indices` or `has_initial_state` without
/// `conv_states`, [`Overlap`](hk_core::Error::Overlap) if `y` or `conv_states` share memory with another tensor,
/// [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens, channels or sequences,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: Gu & Dao 2023, "Mamba", section 3.4 (the convolution before the selective scan).
pub fn causal_conv1d_fwd<'a, T: Float, W: ConvWeight<T>>(
    stream: &Stream,
    inputs: ConvInputs<'a, T, W>,
    outputs: impl Into<ConvOutputs<'a, T>>,
    activation: ConvActivation,
) -> Result<()> {
    let ConvInputs { x, weight, bias, query_start_loc, cache_indices, has_initial_state } = inputs;
    let ConvOutputs { y, conv_states } = outputs.into();
    let call = ConvCall {
        op: FWD,
        x,
        weight,
        bias,
        starts: query_start_loc,
        slots: cache_indices,
        has_initial_state,
        activation,
    };
    call.run(stream, y, conv_states)
}

/// Depthwise causal convolution of the few tokens of a decoding step, each sequence continuing from its state:
/// `y[b, c, t] = act(bias[c] + sum_j weight[c, j] * h[b, c, t - (width - 1) + j])`. `h` is the slot of a sequence followed by
/// its tokens `x`.
///
/// | arg                  | shape                                              | dtype                | layout                            |
/// |----------------------|----------------------------------------------------|----------------------|-----------------------------------|
/// | `x`, `y`             | `[batch, channels]` or `[batch, channels, tokens]` | `bf16`, `f16`, `f32` | unit stride on channels or tokens |
/// | `weight`             | `[channels, width]`, width 2, 3 or 4               | as `x`, or `f32`     | contiguous                        |
/// | `bias`               | `[channels]`; optional                             | as `weight`          | contiguous                        |
/// | `conv_state_indices` | `[batch]`; optional                                | `i32`                | contiguous                        |
/// | `conv_states`        | `[slots, channels, width - 1]`                     | as `x`               | any strides                       |
///
/// The slot of a sequence becomes the last `width - 1` tokens of `h`, oldest first, bit for bit. `y` may be exactly `x`
/// ([`TensorViewMut::alias`]); otherwise `y` and `conv_states` share no memory with another tensor.
///
/// `f32` arithmetic: one fused multiply-add for each `j`, starting from the bias, and one rounding, to nearest even. Results
/// are batch-invariant and bitwise identical to those of [`causal_conv1d_fwd`] with `has_initial_state` set.
///
/// Indices are checked on the device. Slot -1 is padding: neither `y` nor a state is written. A sequence whose slot is out of
/// range becomes NaN, and no state is written. If two sequences have one slot, the state of either may remain.
///
/// Returns when the launch is queued, before it has run. Without tokens, nothing is launched.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks the
/// table, [`Argument`](hk_core::Error::Argument) for another width, [`Overlap`](hk_core::Error::Overlap) if tensors share
/// memory otherwise than stated, [`TooLarge`](hk_core::Error::TooLarge) beyond 2^31 - 1 tokens, channels or sequences,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written
/// then.
///
/// Source: Gu & Dao 2023, "Mamba", section 3.4 (the convolution before the selective scan).
pub fn causal_conv1d_update<'a, T: Float, W: ConvWeight<T>>(
    stream: &Stream,
    inputs: ConvUpdateInputs<'a, T, W>,
    outputs: ConvUpdateOutputs<'a, T>,
    activation: ConvActivation,
) -> Result<()> {
    let ConvUpdateInputs { x, weight, bias, conv_state_indices } = inputs;
    let ConvUpdateOutputs { y, conv_states } = outputs;
    let call = ConvCall {
        op: UPDATE,
        x,
        weight,
        bias,
        starts: None,
        slots: conv_state_indices,
        has_initial_state: None,
        activation,
    };
    call.run(stream, y, Some(conv_states))
}

/// An operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOp {
    /// Its name.
    pub name: &'static str,
    /// Name of the argument with the slots of sequences.
    pub slots: &'static str,
    /// Every sequence continues from its slot.
    pub update: bool,
}

pub(crate) const FWD: ConvOp = ConvOp { name: "causal_conv1d_fwd", slots: "cache_indices", update: false };
pub(crate) const UPDATE: ConvOp =
    ConvOp { name: "causal_conv1d_update", slots: "conv_state_indices", update: true };

/// The shapes of a call, with channels before tokens.
#[derive(Debug)]
pub struct ConvShapes<'s> {
    /// `[batch, channels, tokens]`, of an update also `[batch, channels]`; packed: `[channels, tokens]`.
    pub x: &'s [usize],
    /// `[channels, width]`.
    pub weight: &'s [usize],
    /// `[channels]`.
    pub bias: Option<&'s [usize]>,
    /// Starts of packed sequences.
    pub starts: Option<&'s [usize]>,
    /// Slots of sequences.
    pub slots: Option<&'s [usize]>,
    /// Which sequences continue from their slots.
    pub has_initial_state: Option<&'s [usize]>,
    /// `[slots, channels, width - 1]`.
    pub states: Option<&'s [usize]>,
}

/// Sizes of a call.
#[derive(Debug, Clone, Copy)]
pub struct ConvSizes {
    /// Sequences.
    pub batch: usize,
    /// Channels.
    pub channels: usize,
    /// Tokens of a sequence, or of all packed sequences.
    pub tokens: usize,
    /// Taps of a channel.
    pub width: usize,
    /// Slots of the states.
    pub n_slots: usize,
    /// Axes of `x` and `y`: sequences, channels, tokens.
    axes: [Option<usize>; 3],
}

impl ConvShapes<'_> {
    /// Checks the shapes against each other.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Argument`], naming the tensor.
    pub fn check(&self, ConvOp { name: op, slots: slots_arg, update }: ConvOp) -> Result<ConvSizes> {
        let Self { x, weight, bias, starts, slots, has_initial_state, states } = *self;
        let (batch, axes) = match (update, starts, x) {
            (true, _, &[batch, _]) => (batch, [Some(0), Some(1), None]),
            (true, _, &[batch, _, _]) | (false, None, &[batch, _, _]) => (batch, [Some(0), Some(1), Some(2)]),
            (true, ..) => {
                return Err(Error::shape(op, "x", x, "[batch, channels] or [batch, channels, tokens]"));
            }
            (false, None, _) => return Err(Error::shape(op, "x", x, "3 axes: [batch, channels, tokens]")),
            (false, Some(&[n]), &[_, _]) if n > 0 => (n - 1, [None, Some(0), Some(1)]),
            (false, Some(_), &[_, _]) => {
                let want = "[batch + 1], at least one element";
                return Err(Error::shape(op, "query_start_loc", starts.unwrap_or_default(), want));
            }
            (false, Some(_), _) => {
                return Err(Error::shape(
                    op,
                    "x",
                    x,
                    "2 axes: [channels, tokens] (packed by query_start_loc)",
                ));
            }
        };
        let axis = |i: usize| axes[i].map_or(1, |a| x[a]);
        let (channels, tokens) = (axis(1), axis(2));
        let &[weights, width] = weight else {
            return Err(Error::shape(op, "weight", weight, "2 axes: [channels, width]"));
        };
        if weights != channels {
            return Err(Error::shape(op, "weight", weight, format!("[{channels}, width] (channels of x)")));
        }
        if !(2..=4).contains(&width) {
            return Err(Error::argument(op, "weight", format!("width {width}"), "a width of 2, 3 or 4"));
        }
        let vectors = [
            ("bias", bias, channels, "channels of x"),
            (slots_arg, slots, batch, "sequences"),
            ("has_initial_state", has_initial_state, batch, "sequences"),
        ];
        for (arg, shape, len, why) in vectors {
            if let Some(shape) = shape.filter(|shape| *shape != [len]) {
                return Err(Error::shape(op, arg, shape, format!("[{len}] ({why})")));
            }
        }
        let Some(states) = states else {
            for (arg, given) in [(slots_arg, slots), ("has_initial_state", has_initial_state)] {
                if given.is_some() {
                    return Err(Error::argument(op, arg, "given", "nothing without conv_states"));
                }
            }
            return Ok(ConvSizes { batch, channels, tokens, width, n_slots: 0, axes });
        };
        let n_slots = states.first().copied().unwrap_or(0);
        let enough = slots.is_some() || n_slots >= batch;
        if states != [n_slots, channels, width - 1] || !enough {
            let least = if slots.is_some() { "slots".into() } else { format!("{batch} or more") };
            let want = format!("[{least}, {channels}, {}]", width - 1);
            return Err(Error::shape(op, "conv_states", states, want));
        }
        Ok(ConvSizes { batch, channels, tokens, width, n_slots, axes })
    }
}

impl ConvSizes {
    /// Strides along sequences, channels and tokens; 1 for an axis of one element.
    fn strides(&self, shape: &[usize], strides: &[usize]) -> Strides {
        let [outer, channel, inner] = self.axes.map(|axis| match axis {
            Some(a) if shape[a] > 1 => strides[a] as i64,
            _ => 1,
        });
        Strides { outer, channel, inner }
    }
}

/// A convolution whose results go to one tensor or, by ranges of channels, to several: what the operators of this crate and those with entry
/// points of their own (`activation/conv.h`) share.
#[derive(Debug)]
pub struct ConvCall<'a, T: Element, W: Element> {
    /// The operator.
    pub op: ConvOp,
    /// `[batch, channels, tokens]`, of an update also `[batch, channels]`; packed: `[channels, tokens]`.
    pub x: TensorView<'a, T>,
    /// `[channels, width]`.
    pub weight: TensorView<'a, W>,
    /// `[channels]`.
    pub bias: Option<TensorView<'a, W>>,
    /// Starts of packed sequences.
    pub starts: Option<TensorView<'a, i32>>,
    /// Slots of sequences.
    pub slots: Option<TensorView<'a, i32>>,
    /// Which sequences continue from their slots.
    pub has_initial_state: Option<TensorView<'a, u8>>,
    /// After the sum.
    pub activation: ConvActivation,
}

/// How a [`ConvCall`] is to be launched.
#[derive(Debug)]
pub struct ConvPlan {
    params: Params,
    /// Strides of each tensor of results: outer, channel, inner.
    pub y_at: Vec<[i64; 3]>,
    /// Element type (bf16, f16, f32) and entry point (`channels`, `channels_scalar`, `tokens`, `tokens_scalar`).
    pub kernel: [usize; 2],
    /// Blocks.
    pub blocks: usize,
}

/// Bytes of `conv::Params` of `activation/conv.h`.
pub const PARAMS_BYTES: usize = size_of::<Params>();

impl ConvPlan {
    /// The `conv::Params` of `activation/conv.h`, [`PARAMS_BYTES`] long, without the tensor of results.
    pub fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.params)
    }
}

/// Tokens that a lane prefetches at a time if lanes are along channels (`kAhead`), and tokens of its run if lanes are along
/// tokens, in `hip/include/activation/conv.h`.
const AHEAD: usize = 4;
const RUN: usize = 8;
/// Channels of a lane that has 16 bytes of tokens of each.
const TILE_CHANNELS: usize = 4;
/// Waves that a CU needs to keep memory busy.
const WAVES_PER_CU: usize = 12;

impl<'a, T: Float, W: ConvWeight<T>> ConvCall<'a, T, W> {
    /// Checks the call, whose results go to `ys`: the channels of the first, of the next, and so on, all shaped as `x` but for the
    /// channels. `None` if there is nothing to do.
    ///
    /// # Errors
    /// As [`causal_conv1d_fwd`], naming the tensors of `ys`.
    pub fn plan<'l>(
        &self,
        stream: &Stream,
        launch: &mut Launch<'l>,
        ys: &[(&'static str, &TensorViewMut<'a, T>)],
        states: Option<&mut TensorViewMut<'a, T>>,
    ) -> Result<Option<ConvPlan>>
    where
        'a: 'l,
    {
        let Self { op: which, x, weight, bias, starts, slots, has_initial_state, activation } = self;
        let ConvOp { name: op, slots: slots_arg, update } = *which;
        let shapes = ConvShapes {
            x: x.shape(),
            weight: weight.shape(),
            bias: bias.as_ref().map(|t| t.shape()),
            starts: starts.as_ref().map(|t| t.shape()),
            slots: slots.as_ref().map(|t| t.shape()),
            has_initial_state: has_initial_state.as_ref().map(|t| t.shape()),
            states: states.as_ref().map(|t| t.shape()),
        };
        let sizes = shapes.check(*which)?;
        let ConvSizes { batch, channels, tokens, width, n_slots, axes } = sizes;
        let channel_axis = axes[1].unwrap_or(0);
        let mut own_channels = Vec::new();
        for (arg, y) in ys {
            // One tensor has all channels.
            let own =
                if ys.len() == 1 { channels } else { y.shape().get(channel_axis).copied().unwrap_or(0) };
            let mut want = x.shape().to_vec();
            want[channel_axis] = own;
            if y.shape() != want {
                let why = if ys.len() == 1 { "shape of x" } else { "shape of x, with its own channels" };
                return Err(Error::shape(op, arg, y.shape(), format!("{want:?} ({why})")));
            }
            own_channels.push(own);
        }
        if own_channels.iter().sum::<usize>() != channels {
            let got = format!("{own_channels:?} channels");
            return Err(Error::argument(op, ys[0].0, got, format!("{channels} together (channels of x)")));
        }
        weight.expect_contiguous(op, "weight")?;
        expect_vector(op, "bias", bias.as_ref())?;
        expect_vector(op, "query_start_loc", starts.as_ref())?;
        expect_vector(op, slots_arg, slots.as_ref())?;
        expect_vector(op, "has_initial_state", has_initial_state.as_ref())?;
        let x_at = sizes.strides(x.shape(), x.strides());
        let y_at: Vec<Strides> = ys.iter().map(|(_, y)| sizes.strides(y.shape(), y.strides())).collect();
        let layouts = ys.iter().zip(&y_at).map(|((arg, y), at)| (*arg, *at, y.layout()));
        for (arg, at, layout) in [("x", x_at, x.layout())].into_iter().chain(layouts) {
            if at.channel != 1 && at.inner != 1 {
                return Err(Error::stride(op, arg, layout, "unit stride on channels or on tokens"));
            }
        }

        let element = size_of::<T>() as u64;
        x.expect_aligned(op, "x", element)?;
        for (arg, y) in ys {
            y.expect_aligned(op, arg, element)?;
        }
        weight.expect_aligned(op, "weight", size_of::<W>() as u64)?;
        if let Some(states) = &states {
            states.expect_aligned(op, "conv_states", element)?;
        }
        fn some<O: Operand>(tensor: Option<&O>) -> Option<&dyn Operand> {
            tensor.map(|tensor| tensor as _)
        }
        let inputs: [NamedOperand; 6] = [
            ("x", Some(x)),
            ("weight", Some(weight)),
            ("bias", some(bias.as_ref())),
            ("query_start_loc", some(starts.as_ref())),
            (slots_arg, some(slots.as_ref())),
            ("has_initial_state", some(has_initial_state.as_ref())),
        ];
        let y_may_be: &[_] = if update && ys.len() == 1 { &["x"] } else { &[] };
        let mut outputs: Vec<(NamedOperand, &[_])> = Vec::new();
        for (arg, y) in ys {
            outputs.push(((arg, Some(*y)), y_may_be));
        }
        outputs.push((("conv_states", some(states.as_deref())), &[]));
        check_aliases(op, &inputs, &outputs)?;
        let limit = i32::MAX as usize;
        for (n, what) in [(batch, "sequences"), (channels, "channels"), (tokens, "tokens")] {
            if n > limit {
                return Err(Error::too_large(op, "x", format!("{n} {what}"), limit as u64));
            }
        }
        if batch == 0 || channels == 0 || tokens == 0 {
            return Ok(None);
        }

        // Whether lanes are along channels or tokens, and whether the vectorized path serves the tensors.
        let v = 16 / size_of::<T>();
        let along_channels = x_at.channel == 1 && (channels > 1 || x_at.inner != 1);
        let batches = if starts.is_some() { 1 } else { batch };
        let lengths = [batches, channels, tokens];
        let inner = if along_channels { 1 } else { 2 };
        let whole = |at: &Strides| {
            let at = [at.outer, at.channel, at.inner];
            let apart = |axis: usize| lengths[axis] <= 1 || (at[axis] as usize).is_multiple_of(v);
            at[inner] == 1 && (0..3).all(|axis| axis == inner || apart(axis))
        };
        // The channels of a lane go to one tensor.
        let lane_channels = if along_channels { v } else { TILE_CHANNELS };
        let fits = own_channels.iter().all(|own| own.is_multiple_of(lane_channels))
            && (along_channels || (tokens >= v && !update));
        let vectors = fits
            && (whole(&x_at) && y_at.iter().all(whole))
            && (x.is_aligned(16) && ys.iter().all(|(_, y)| y.is_aligned(16)) && weight.is_aligned(16))
            && bias.as_ref().is_none_or(|b| b.is_aligned(16));
        let (state_at, state_access) = match &states {
            Some(states) => state_access(states, v),
            None => (Strides::zeroed(), StateAccess::Scalar),
        };

        let info = stream.device().info();
        let wave = info.wave_size as usize;
        // Waves, or lanes, along channels.
        let along = match (along_channels, vectors) {
            (true, true) => channels.div_ceil(wave * v),
            (true, false) => channels.div_ceil(wave),
            (false, true) => channels / TILE_CHANNELS,
            (false, false) => channels,
        };
        let run = match (update, along_channels) {
            (true, _) => tokens,
            (false, true) => {
                let waves = info.max_blocks(wave, WAVES_PER_CU);
                (batches * tokens * along).div_ceil(waves).next_multiple_of(AHEAD).clamp(16, 256)
            }
            (false, false) if vectors => v,
            (false, false) => RUN,
        };
        let runs = tokens.div_ceil(run);
        let items = runs.saturating_mul(along).saturating_mul(batches);
        let blocks = if along_channels { items } else { items.div_ceil(wave) };
        let kernel = [float_index(T::DTYPE), 2 * usize::from(!along_channels) + usize::from(!vectors)];
        let params = Params {
            x: launch.input("x", x)?,
            weight: launch.input("weight", weight)?,
            bias: launch.optional_input("bias", bias.as_ref())?,
            y: GlobalLayout::ABSENT,
            states: launch.optional_output("conv_states", states)?,
            starts: launch.optional_input("query_start_loc", starts.as_ref())?,
            slots: launch.optional_input(slots_arg, slots.as_ref())?,
            has_initial: launch.optional_input("has_initial_state", has_initial_state.as_ref())?,
            x_at,
            y_at: Strides::zeroed(),
            state_at,
            batch: batch as u32,
            channels: channels as u32,
            tokens: tokens as u32,
            run: run as u32,
            runs: runs as u32,
            width: width as u32,
            n_slots: u32::try_from(n_slots).unwrap_or(u32::MAX),
            weight_is_f32: (W::DTYPE == DType::F32).into(),
            silu: (*activation == ConvActivation::Silu).into(),
            state_access: state_access as u32,
            update: update.into(),
            pad: 0,
        };
        let y_at = y_at.iter().map(|at| [at.outer, at.channel, at.inner]).collect();
        Ok(Some(ConvPlan { params, y_at, kernel, blocks }))
    }

    fn run(
        self,
        stream: &Stream,
        mut y: TensorViewMut<'a, T>,
        mut states: Option<TensorViewMut<'a, T>>,
    ) -> Result<()> {
        let mut launch = stream.launch(self.op.name);
        let plan = self.plan(stream, &mut launch, &[("y", &y)], states.as_mut())?;
        let Some(ConvPlan { params, y_at, kernel: [row, column], blocks }) = plan else { return Ok(()) };
        let kernel = stream.kernel(KERNELS[row][column])?;
        let [outer, channel, inner] = y_at[0];
        let y_at = Strides { outer, channel, inner };
        let params = Params { y: launch.output("y", &mut y)?, y_at, ..params };
        // SAFETY: `plan` gives x and y batch sequences of the same channels and tokens, weight and bias that many
        // channels, states those and width - 1 taps, and the other tensors one element a sequence (starts one more). The
        // kernel stays within these, clamps packed sequences to the tokens, and checks slots, whatever the grid and the
        // indices are.
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }
    }
}

/// The entry points: for bf16, f16, f32.
static KERNELS: [[KernelRef<Params>; 4]; 3] = hk_core::row_kernels!(
    Params,
    "conv",
    ["bf16", "f16", "f32"],
    ["channels", "channels_scalar", "tokens", "tokens_scalar"]
);

/// The strides of a state, and how a lane with `v` channels accesses it.
fn state_access<T: Element>(states: &TensorViewMut<T>, v: usize) -> (Strides, StateAccess) {
    let (shape, strides) = (states.shape(), states.strides());
    let [outer, channel, inner] = [0, 1, 2].map(|i| strides[i] as i64);
    let at = Strides { outer, channel, inner };
    let whole = |axis: usize| shape[axis] <= 1 || strides[axis].is_multiple_of(v);
    let access = if !states.is_aligned(16) || !whole(0) {
        StateAccess::Scalar
    } else if strides[1] == 1 && whole(2) {
        StateAccess::Channels
    } else if strides[1] == shape[2] && (shape[2] <= 1 || strides[2] == 1) {
        StateAccess::Taps
    } else {
        StateAccess::Scalar
    };
    (at, access)
}

/// Checks the layout of an optional tensor of one axis.
fn expect_vector<E: Element>(
    op: &'static str,
    arg: &'static str,
    tensor: Option<&TensorView<E>>,
) -> Result<()> {
    let Some(tensor) = tensor else { return Ok(()) };
    tensor.expect_contiguous(op, arg)?;
    tensor.expect_aligned(op, arg, size_of::<E>() as u64)
}
