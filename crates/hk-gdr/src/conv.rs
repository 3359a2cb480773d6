//! The safe functions of `hip/conv_split.hip`.

use crate::kernels::conv::{Params as ConvParams, Strides};
use crate::kernels::conv_split::Params;
use hk_activation::conv::{ConvCall, ConvOp, PARAMS_BYTES};
use hk_activation::{ConvActivation, ConvWeight};
use hk_core::{
    Element, Error, Float, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut, row_kernels,
};

/// The entry points: for bf16, f16, f32.
static KERNELS: [[KernelRef<Params>; 4]; 3] = row_kernels!(
    Params,
    "conv_split",
    ["bf16", "f16", "f32"],
    ["channels", "channels_scalar", "tokens", "tokens_scalar"]
);

// Both crates have the struct of the same header.
const _: () = assert!(size_of::<ConvParams>() == PARAMS_BYTES);

pub(crate) const FWD: ConvOp =
    ConvOp { name: "causal_conv1d_fwd_split_qkv", slots: "cache_indices", update: false };
pub(crate) const UPDATE: ConvOp =
    ConvOp { name: "causal_conv1d_update_split_qkv", slots: "conv_state_indices", update: true };

/// Tensors of queries, keys and values.
#[derive(Debug)]
pub struct Qkv<'a, T: Element> {
    /// Queries.
    pub q: TensorViewMut<'a, T>,
    /// Keys.
    pub k: TensorViewMut<'a, T>,
    /// Values.
    pub v: TensorViewMut<'a, T>,
}

/// The inputs of [`causal_conv1d_fwd_split_qkv`].
#[derive(Debug, Clone, Copy)]
pub struct ConvSplitInputs<'a, T: Element, W: Element> {
    /// `[channels, T]`: channels of q, then of k, then of v.
    pub x: TensorView<'a, T>,
    /// `[channels, width]`.
    pub weight: TensorView<'a, W>,
    /// `[channels]`; zero if left out.
    pub bias: Option<TensorView<'a, W>>,
    /// `[N + 1]`: the first token of each sequence, then the number of tokens.
    pub query_start_loc: TensorView<'a, i32>,
    /// `[N]`: the slot of each sequence; -1 for padding. Sequence `n` has slot `n` if left out.
    pub cache_indices: Option<TensorView<'a, i32>>,
    /// `[N]`: not 0 where a sequence continues from its slot. Every history is zeros if left out.
    pub has_initial_state: Option<TensorView<'a, u8>>,
}

/// The inputs of [`causal_conv1d_update_split_qkv`].
#[derive(Debug, Clone, Copy)]
pub struct ConvUpdateSplitInputs<'a, T: Element, W: Element> {
    /// `[B, channels]` or `[B, channels, L]`: channels of q, then of k, then of v.
    pub x: TensorView<'a, T>,
    /// `[channels, width]`.
    pub weight: TensorView<'a, W>,
    /// `[channels]`; zero if left out.
    pub bias: Option<TensorView<'a, W>>,
    /// `[B]`: the slot of each sequence; -1 for padding. Sequence `b` has slot `b` if left out.
    pub conv_state_indices: Option<TensorView<'a, i32>>,
}

/// [`causal_conv1d_fwd`](hk_activation::causal_conv1d_fwd) of packed sequences whose channels are those of q, of k, and of v, each to a
/// tensor of its own.
///
/// | arg                 | shape                                      | dtype                | layout                            |
/// |---------------------|--------------------------------------------|----------------------|-----------------------------------|
/// | `x`                 | `[2 key_dim + value_dim, T]`               | `bf16`, `f16`, `f32` | unit stride on channels or tokens |
/// | `q`, `k`            | `[T, key_dim]`                             | as `x`               | unit stride on channels or tokens |
/// | `v`                 | `[T, value_dim]`                           | as `x`               | unit stride on channels or tokens |
/// | `weight`            | `[channels, width]`, width 2, 3 or 4       | as `x`, or `f32`     | contiguous                        |
/// | `bias`              | `[channels]`; optional                     | as `weight`          | contiguous                        |
/// | `query_start_loc`   | `[N + 1]`                                  | `i32`                | contiguous                        |
/// | `cache_indices`     | `[N]`; optional, beside `conv_states`      | `i32`                | contiguous                        |
/// | `has_initial_state` | `[N]`; optional, beside `conv_states`      | `u8`                 | contiguous                        |
/// | `conv_states`       | `[slots, channels, width - 1]`; optional   | as `x`               | any strides                       |
///
/// The vectorized path needs `key_dim` and `value_dim` that are whole 16-byte vectors, or multiples of four if tokens have unit stride. All
/// else, arithmetic, states, and what happens to indices out of range, is as of `causal_conv1d_fwd`, bit for bit. One launch.
///
/// # Errors
/// As `causal_conv1d_fwd`; [`Shape`](Error::Shape) for a `k` that is not as `q`, [`Argument`](Error::Argument) for outputs that have not the
/// channels of `x` together.
pub fn causal_conv1d_fwd_split_qkv<'a, T: Float, W: ConvWeight<T>>(
    stream: &Stream,
    inputs: ConvSplitInputs<'a, T, W>,
    qkv: Qkv<'a, T>,
    conv_states: Option<TensorViewMut<'a, T>>,
    activation: ConvActivation,
) -> Result<()> {
    let ConvSplitInputs { x, weight, bias, query_start_loc, cache_indices, has_initial_state } = inputs;
    let op = FWD.name;
    let channels_first = |arg, y: TensorViewMut<'a, T>| match y.shape().len() {
        2 => y.transpose(0, 1),
        _ => Err(Error::shape(op, arg, y.shape(), "2 axes: [T, channels]")),
    };
    let qkv = Qkv {
        q: channels_first("q", qkv.q)?,
        k: channels_first("k", qkv.k)?,
        v: channels_first("v", qkv.v)?,
    };
    let call = ConvCall {
        op: FWD,
        x,
        weight,
        bias,
        starts: Some(query_start_loc),
        slots: cache_indices,
        has_initial_state,
        activation,
    };
    run(stream, call, qkv, conv_states)
}

/// [`causal_conv1d_update`](hk_activation::causal_conv1d_update) of channels that are those of q, of k, and of v, each to a tensor of its
/// own.
///
/// | arg                  | shape                                                        | dtype                | layout                            |
/// |----------------------|--------------------------------------------------------------|----------------------|-----------------------------------|
/// | `x`                  | `[B, 2 key_dim + value_dim]`, `[B, 2 key_dim + value_dim, L]` | `bf16`, `f16`, `f32` | unit stride on channels or tokens |
/// | `q`, `k`             | as `x`, `key_dim` channels                                   | as `x`               | unit stride on channels or tokens |
/// | `v`                  | as `x`, `value_dim` channels                                 | as `x`               | unit stride on channels or tokens |
/// | `weight`             | `[channels, width]`, width 2, 3 or 4                         | as `x`, or `f32`     | contiguous                        |
/// | `bias`               | `[channels]`; optional                                       | as `weight`          | contiguous                        |
/// | `conv_state_indices` | `[B]`; optional                                              | `i32`                | contiguous                        |
/// | `conv_states`        | `[slots, channels, width - 1]`                               | as `x`               | any strides                       |
///
/// All else is as of `causal_conv1d_update`, bit for bit; no output may be `x`. One launch.
///
/// # Errors
/// As `causal_conv1d_update`; [`Shape`](Error::Shape) for a `k` that is not as `q`, [`Argument`](Error::Argument) for outputs that have not the
/// channels of `x` together.
pub fn causal_conv1d_update_split_qkv<'a, T: Float, W: ConvWeight<T>>(
    stream: &Stream,
    inputs: ConvUpdateSplitInputs<'a, T, W>,
    qkv: Qkv<'a, T>,
    conv_states: TensorViewMut<'a, T>,
    activation: ConvActivation,
) -> Result<()> {
    let ConvUpdateSplitInputs { x, weight, bias, conv_state_indices } = inputs;
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
    run(stream, call, qkv, Some(conv_states))
}

/// `qkv` with channels before tokens.
fn run<'a, T: Float, W: ConvWeight<T>>(
    stream: &Stream,
    call: ConvCall<'a, T, W>,
    qkv: Qkv<'a, T>,
    mut conv_states: Option<TensorViewMut<'a, T>>,
) -> Result<()> {
    let Qkv { mut q, mut k, mut v } = qkv;
    let op = call.op.name;
    if k.shape() != q.shape() {
        return Err(Error::shape(op, "k", k.shape(), format!("{:?} (shape of q)", q.shape())));
    }
    let mut launch = stream.launch(op);
    let outputs = [("q", &q), ("k", &k), ("v", &v)];
    let Some(plan) = call.plan(stream, &mut launch, &outputs, conv_states.as_mut())? else { return Ok(()) };
    let keys = q.shape()[usize::from(call.op.update)];
    let [row, column] = plan.kernel;
    let kernel = stream.kernel(KERNELS[row][column])?;
    let strides = |i: usize| {
        let [outer, channel, inner] = plan.y_at[i];
        Strides { outer, channel, inner }
    };
    let params = Params {
        conv: bytemuck::pod_read_unaligned(plan.params()),
        q: launch.output_address("q", &mut q)?,
        k: launch.output_address("k", &mut k)?,
        v: launch.output_address("v", &mut v)?,
        q_at: strides(0),
        k_at: strides(1),
        v_at: strides(2),
        k_first: keys as u32,
        v_first: 2 * keys as u32,
    };
    // SAFETY: `plan` has checked that q, k and v have the sequences and tokens of x and its channels together; the rest is as in hk-activation,
    // whose header the kernel is.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(plan.blocks), &params) }
}
