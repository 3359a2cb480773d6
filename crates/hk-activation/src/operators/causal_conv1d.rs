//! `causal_conv1d_fwd`, `causal_conv1d_update`.

use super::FLOATS;
use crate::{ConvActivation, ConvStates, kernels, reference};
use hk_core::registry::{
    ArgSpec, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensor, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Element, Result, Stream, TensorView, TensorViewMut, with_float};

macro_rules! case {
    ($label:expr; $layout:literal $act:literal; $($arg:ident $dtype:ident $n:tt)+) => {
        Case {
            label: $label,
            tensors: &[$((stringify!($arg), DType::$dtype, &$n)),+],
            scalars: &[("layout", Scalar::Choice($layout)), ("activation", Scalar::Choice($act))],
        }
    };
}

pub(crate) const CAUSAL_CONV1D_FWD: Operator = Operator {
    name: "causal_conv1d_fwd",
    family: "hk-activation",
    summary: "y[c, t] = act(bias[c] + sum_j weight[c, j] * x[c, t - (width - 1) + j])",
    args: &[
        X,
        WEIGHT,
        BIAS,
        ArgSpec::input("query_start_loc", &[DType::I32], 1, "[batch + 1]")
            .sampled(Sample::Steps { step: TOKENS as i64 })
            .optional(),
        ArgSpec { name: "cache_indices", ..LINES },
        ArgSpec::input("has_initial_state", &[DType::U8], 1, "[batch]")
            .sampled(Sample::Integers { low: 0, high: 2 })
            .optional(),
        STATES.optional(),
        Y,
    ],
    scalars: SCALARS,
    kernels: &[&kernels::CONV],
    cases: &[
        case!("Qwen3-Next, 64 tokens of 4 sequences, packed, channels together"; "channels" "silu";
            x Bf16 [256, 8192] weight Bf16 [8192, 4] query_start_loc I32 [5] cache_indices I32 [4]
            has_initial_state U8 [4] conv_states Bf16 [8, 8192, 3]),
        case!("Qwen3-Next, 128 tokens, tokens together"; "tokens" "silu";
            x Bf16 [1, 8192, 128] weight Bf16 [8192, 4]),
    ],
    corners: &[
        case!("loop"; "channels" "silu"; x Bf16 [2, 150, 520] weight Bf16 [520, 4] bias Bf16 [520]
            conv_states Bf16 [8, 520, 3] cache_indices I32 [2] has_initial_state U8 [2]),
        case!("loop"; "channels" "none"; x F16 [192, 16] weight F32 [16, 3] bias F32 [16] query_start_loc I32 [4]
            conv_states F16 [8, 16, 2] cache_indices I32 [3] has_initial_state U8 [3]),
        case!("loop"; "channels" "silu"; x F32 [3, 37, 12] weight F32 [12, 2] conv_states F32 [3, 12, 1]),
        case!("one by one"; "channels" "silu"; x Bf16 [2, 50, 67] weight Bf16 [67, 2] conv_states Bf16 [8, 67, 1]),
        case!("one by one"; "channels" "none"; x F16 [128, 70] weight F16 [70, 4] query_start_loc I32 [3]),
        case!("one by one"; "channels" "none"; x F32 [1, 21, 66] weight F32 [66, 3] bias F32 [66]),
        case!("tiles of tokens"; "tokens" "silu"; x Bf16 [2, 12, 520] weight Bf16 [12, 4] bias Bf16 [12]
            conv_states Bf16 [8, 12, 3] cache_indices I32 [2] has_initial_state U8 [2]),
        case!("tiles of tokens"; "tokens" "none"; x F16 [16, 192] weight F32 [16, 3] query_start_loc I32 [4]
            conv_states F16 [8, 16, 2] cache_indices I32 [3] has_initial_state U8 [3]),
        case!("tiles of tokens"; "tokens" "silu"; x F32 [1, 8, 268] weight F32 [8, 2] bias F32 [8]),
        case!("tokens"; "tokens" "silu"; x Bf16 [2, 5, 70] weight Bf16 [5, 4] bias Bf16 [5] conv_states Bf16 [8, 5, 3]
            cache_indices I32 [2] has_initial_state U8 [2]),
        case!("tokens"; "tokens" "none"; x F16 [70, 192] weight F32 [70, 3] query_start_loc I32 [4]
            conv_states F16 [8, 70, 2] cache_indices I32 [3] has_initial_state U8 [3]),
        case!("tokens"; "tokens" "silu"; x F32 [1, 67, 33] weight F32 [67, 2]),
    ],
    outputs,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        with_float!("causal_conv1d_fwd", "x", inputs.get("x")?.dtype(), T => {
            if inputs.get("weight")?.dtype() == DType::F32 {
                fwd::<T, f32>(stream, inputs, &mut outputs)
            } else {
                fwd::<T, T>(stream, inputs, &mut outputs)
            }
        })
    },
    reference: |call: &HostCall| reference_of(call, "cache_indices", false),
    traffic: |call: &HostCall| traffic(call, false),
};

pub(crate) const CAUSAL_CONV1D_UPDATE: Operator = Operator {
    name: "causal_conv1d_update",
    family: "hk-activation",
    summary: "y[b, c] = act(bias[c] + sum_j weight[c, j] * h[b, c, j]), h the last tokens of a sequence, which conv_states keeps",
    args: &[X, WEIGHT, BIAS, ArgSpec { name: "conv_state_indices", ..LINES }, STATES, Y],
    scalars: SCALARS,
    kernels: &[&kernels::CONV],
    cases: &[case!("Qwen3-Next, 8 sequences"; "channels" "silu"; x Bf16 [8, 8192] weight Bf16 [8192, 4]
        conv_state_indices I32 [8] conv_states Bf16 [8, 8192, 3])],
    corners: &[
        case!("one token"; "channels" "silu"; x Bf16 [8, 1032] weight Bf16 [1032, 4] bias Bf16 [1032]
            conv_states Bf16 [8, 1032, 3] conv_state_indices I32 [8]),
        case!("one token"; "channels" "none"; x F16 [3, 72] weight F32 [72, 3] conv_states F16 [3, 72, 2]),
        case!("two tokens"; "channels" "silu"; x F32 [5, 2, 100] weight F32 [100, 4] conv_states F32 [5, 100, 3]),
        case!("nine tokens"; "tokens" "silu"; x Bf16 [2, 70, 9] weight Bf16 [70, 4] conv_states Bf16 [8, 70, 3]
            conv_state_indices I32 [2]),
        case!("one channel"; "channels" "none"; x F32 [4, 1] weight F32 [1, 2] conv_states F32 [4, 1, 1]),
    ],
    outputs,
    run: |stream: &Stream, call: &mut DeviceCall| {
        let (inputs, mut outputs) = call.split();
        with_float!("causal_conv1d_update", "x", inputs.get("x")?.dtype(), T => {
            if inputs.get("weight")?.dtype() == DType::F32 {
                update::<T, f32>(stream, inputs, &mut outputs)
            } else {
                update::<T, T>(stream, inputs, &mut outputs)
            }
        })
    },
    reference: |call: &HostCall| reference_of(call, "conv_state_indices", true),
    traffic: |call: &HostCall| traffic(call, true),
};

/// Tokens of each packed sequence of an example, and lines of its states.
const TOKENS: usize = 64;
const EXAMPLE_LINES: i64 = 8;

const X: ArgSpec =
    ArgSpec::input("x", FLOATS, 3, "[batch, channels, tokens], [channels, tokens], or by layout").ranks(2, 3);
const Y: ArgSpec = ArgSpec::output("y", Tolerance::Reduction, FLOATS, 3, "as x").ranks(2, 3);
const WEIGHT: ArgSpec = ArgSpec::input("weight", FLOATS, 2, "[channels, width]");
const BIAS: ArgSpec = ArgSpec::input("bias", FLOATS, 1, "[channels]").optional();
const LINES: ArgSpec = ArgSpec::input("lines", &[DType::I32], 1, "[batch]")
    .sampled(Sample::Distinct { below: EXAMPLE_LINES })
    .optional();
const STATES: ArgSpec =
    ArgSpec::updated("conv_states", Tolerance::Exact, FLOATS, 3, "[lines, channels, width - 1]");

const SCALARS: &[ScalarSpec] = &[
    ScalarSpec {
        name: "layout",
        default: Scalar::Choice("tokens"),
        choices: &["tokens", "channels"],
        summary: "last axis of x and y where they have both: tokens, or channels with the tokens before",
    },
    ScalarSpec {
        name: "activation",
        default: Scalar::Choice("none"),
        choices: &["none", "silu"],
        summary: "what follows the sum",
    },
];

fn channels_last<V: Described>(call: &Call<V>) -> Result<bool> {
    Ok(call.choice("layout")? == "channels")
}

fn activation<V: Described>(call: &Call<V>) -> Result<ConvActivation> {
    Ok(if call.choice("activation")? == "silu" { ConvActivation::Silu } else { ConvActivation::None })
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    Ok(vec![("y", call.get("x")?.clone())])
}

/// Every tensor once, but of the states only lines of sequences, and of these only those are read that sequences go on from.
fn traffic(call: &HostCall, update: bool) -> Traffic {
    let mut traffic = Traffic::once(call);
    if let Some(states) = call.optional("conv_states") {
        let (n_lines, bytes) = (states.shape()[0], states.bytes().len());
        let sequences = match call.optional("query_start_loc") {
            Some(starts) => starts.shape()[0] - 1,
            None => call.get("x").map_or(0, |x| x.shape()[0]),
        };
        let begins = match call.optional("has_initial_state") {
            Some(begins) => begins.to_f64().iter().filter(|&&b| b != 0.0).count(),
            None if update => sequences,
            None => 0,
        };
        let lines = |n: usize| (bytes / n_lines.max(1) * n) as u64;
        traffic.read -= lines(n_lines - begins);
        traffic.written -= lines(n_lines - sequences);
    }
    traffic
}

/// `x` and `y` as the safe functions take them, channels before tokens.
fn views<'a, T: Element>(
    inputs: &Inputs<'a>,
    outputs: &mut Outputs<'a>,
    turn: bool,
) -> Result<(TensorView<'a, T>, TensorViewMut<'a, T>)> {
    let (x, y) = (inputs.view::<T>("x")?, outputs.take::<T>("y")?);
    let rank = x.shape().len();
    if turn { Ok((x.transpose(rank - 2, rank - 1)?, y.transpose(rank - 2, rank - 1)?)) } else { Ok((x, y)) }
}

fn fwd<'a, T: hk_core::Float, W: crate::ConvWeight<T>>(
    stream: &Stream,
    inputs: Inputs<'a>,
    outputs: &mut Outputs<'a>,
) -> Result<()> {
    let (x, y) = views::<T>(&inputs, outputs, channels_last(&inputs)?)?;
    let states = match outputs.take_optional("conv_states")? {
        Some(states) => Some(ConvStates {
            states,
            cache_indices: inputs.optional_view("cache_indices")?,
            has_initial_state: inputs.optional_view("has_initial_state")?,
        }),
        None => None,
    };
    let (weight, bias) = (inputs.view::<W>("weight")?, inputs.optional_view("bias")?);
    let starts = inputs.optional_view("query_start_loc")?;
    crate::causal_conv1d_fwd(stream, x, weight, bias, starts, states, y, activation(&inputs)?)
}

fn update<'a, T: hk_core::Float, W: crate::ConvWeight<T>>(
    stream: &Stream,
    inputs: Inputs<'a>,
    outputs: &mut Outputs<'a>,
) -> Result<()> {
    let turn = channels_last(&inputs)? && inputs.get("x")?.shape().len() == 3;
    let (x, y) = views::<T>(&inputs, outputs, turn)?;
    let states = outputs.take("conv_states")?;
    let (weight, bias) = (inputs.view::<W>("weight")?, inputs.optional_view("bias")?);
    let lines = inputs.optional_view("conv_state_indices")?;
    crate::causal_conv1d_update(stream, x, weight, bias, lines, states, y, activation(&inputs)?)
}

/// Of indices that are in range: examples have no others.
fn reference_of(call: &HostCall, lines: &str, update: bool) -> Result<Named<HostTensorF64>> {
    let x = call.get("x")?;
    let weight = call.get("weight")?;
    let (channels, width) = (weight.shape()[0], weight.shape()[1]);
    let integers =
        |name: &str| call.optional(name).map(|t| t.to_f64().iter().map(|&v| v as usize).collect::<Vec<_>>());
    let (starts, lines) = (integers("query_start_loc"), integers(lines));
    let begins = integers("has_initial_state");
    let x_values = x.to_f64();
    let all_tokens = match (&starts, x.shape().len()) {
        (None, 2) => 1,
        _ => x_values.len() / channels / if starts.is_some() { 1 } else { x.shape()[0] },
    };
    let last = channels_last(call)? && all_tokens > 0;
    let batch = starts.as_ref().map_or_else(|| x.shape()[0], |s| s.len() - 1);
    let at = |b: usize, c: usize, t: usize| {
        let first = if starts.is_some() { 0 } else { b * channels * all_tokens };
        first + if last { t * channels + c } else { c * all_tokens + t }
    };

    let mut y = vec![f64::NAN; x_values.len()];
    let mut states = call.optional("conv_states").map(HostTensor::to_f64);
    let slots = channels * (width - 1);
    let bias = call.optional("bias").map(HostTensor::to_f64).unwrap_or_default();
    let silu = activation(call)? == ConvActivation::Silu;
    for b in 0..batch {
        let range = starts.as_ref().map_or(0..all_tokens, |s| s[b]..s[b + 1]);
        let tokens: Vec<f64> = (0..channels)
            .flat_map(|c| range.clone().map(move |t| (c, t)))
            .map(|(c, t)| x_values[at(b, c, t)])
            .collect();
        let line = lines.as_ref().map_or(b, |lines| lines[b]);
        let goes_on = begins.as_ref().map_or(update, |begins| begins[b] != 0);
        let history = match &states {
            Some(states) if goes_on => states[line * slots..][..slots].to_vec(),
            _ => vec![0.0; slots],
        };
        let out = reference::causal_conv1d(&tokens, &history, &weight.to_f64(), &bias, channels, width, silu);
        for c in 0..channels {
            for (i, t) in range.clone().enumerate() {
                y[at(b, c, t)] = out.y[c * range.len() + i];
            }
        }
        if let Some(states) = states.as_mut().filter(|_| !range.is_empty()) {
            states[line * slots..][..slots].copy_from_slice(&out.state);
        }
    }
    let mut outputs = vec![("y", HostTensorF64::new(x.shape(), y))];
    if let (Some(values), Some(tensor)) = (states, call.optional("conv_states")) {
        outputs.push(("conv_states", HostTensorF64::new(tensor.shape(), values)));
    }
    Ok(outputs)
}
