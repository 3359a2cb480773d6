//! `causal_conv1d_fwd`, `causal_conv1d_update`.

use super::FLOATS;
use crate::causal_conv1d::{ConvOp, ConvShapes, ConvSizes, FWD, UPDATE};
use crate::{
    ConvActivation, ConvInputs, ConvOutputs, ConvUpdateInputs, ConvUpdateOutputs, ConvWeight, kernels,
    reference,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensor, HostTensorF64,
    Inputs, Named, Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Element, Error, Float, Result, Stream, TensorView, TensorViewMut, with_float};

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
        ArgSpec { name: "cache_indices", ..SLOTS },
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
    bench: BenchSizes::Cases(&[
        Case {
            label: "Qwen3-Next, 65536 tokens of 1024 sequences, channels together",
            tensors: &[
                ("x", DType::Bf16, &[65_536, 8192]),
                ("weight", DType::Bf16, &[8192, 4]),
                ("query_start_loc", DType::I32, &[1025]),
                ("cache_indices", DType::I32, &[1024]),
                ("has_initial_state", DType::U8, &[1024]),
                ("conv_states", DType::Bf16, &[1024, 8192, 3]),
            ],
            scalars: &[("layout", Scalar::Choice("channels"))],
        },
        Case {
            label: "Qwen3-Next, 8 x 8192 tokens, tokens together",
            tensors: &[("x", DType::Bf16, &[8, 8192, 8192]), ("weight", DType::Bf16, &[8192, 4])],
            scalars: &[("layout", Scalar::Choice("tokens"))],
        },
    ]),
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
    outputs: |call: &CallSpec| outputs(call, FWD),
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
    reference: |call: &HostCall| reference_of(call, FWD),
    traffic: |call: &HostCall| traffic(call, false),
};

pub(crate) const CAUSAL_CONV1D_UPDATE: Operator = Operator {
    name: "causal_conv1d_update",
    family: "hk-activation",
    summary: "y[b, c] = act(bias[c] + sum_j weight[c, j] * h[b, c, j]), h the last tokens of a sequence, which conv_states keeps",
    args: &[X, WEIGHT, BIAS, ArgSpec { name: "conv_state_indices", ..SLOTS }, STATES, Y],
    scalars: SCALARS,
    kernels: &[&kernels::CONV],
    cases: &[case!("Qwen3-Next, 8 sequences"; "channels" "silu"; x Bf16 [8, 8192] weight Bf16 [8192, 4]
        conv_state_indices I32 [8] conv_states Bf16 [8, 8192, 3])],
    bench: BenchSizes::Tokens { rows: 4096, axis0: &["x", "conv_state_indices", "conv_states"], axis1: &[] },
    corners: &[
        case!("one token"; "channels" "silu"; x Bf16 [8, 1032] weight Bf16 [1032, 4] bias Bf16 [1032]
            conv_states Bf16 [8, 1032, 3] conv_state_indices I32 [8]),
        case!("one token"; "channels" "none"; x F16 [3, 72] weight F32 [72, 3] conv_states F16 [3, 72, 2]),
        case!("two tokens"; "channels" "silu"; x F32 [5, 2, 100] weight F32 [100, 4] conv_states F32 [5, 100, 3]),
        case!("nine tokens"; "tokens" "silu"; x Bf16 [2, 70, 9] weight Bf16 [70, 4] conv_states Bf16 [8, 70, 3]
            conv_state_indices I32 [2]),
        case!("one channel"; "channels" "none"; x F32 [4, 1] weight F32 [1, 2] conv_states F32 [4, 1, 1]),
    ],
    outputs: |call: &CallSpec| outputs(call, UPDATE),
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
    reference: |call: &HostCall| reference_of(call, UPDATE),
    traffic: |call: &HostCall| traffic(call, true),
};

/// Tokens of each packed sequence of an example, and slots of its states.
const TOKENS: usize = 64;
const EXAMPLE_SLOTS: i64 = 8;

const X: ArgSpec =
    ArgSpec::input("x", FLOATS, 3, "[batch, channels, tokens], [channels, tokens], or by layout").ranks(2, 3);
const Y: ArgSpec = ArgSpec::output("y", Tolerance::Reduction, FLOATS, 3, "as x").ranks(2, 3);
const WEIGHT: ArgSpec = ArgSpec::input("weight", FLOATS, 2, "[channels, width]");
const BIAS: ArgSpec = ArgSpec::input("bias", FLOATS, 1, "[channels]").optional();
const SLOTS: ArgSpec = ArgSpec::input("slots", &[DType::I32], 1, "[batch]")
    .sampled(Sample::Distinct { below: EXAMPLE_SLOTS })
    .optional();
const STATES: ArgSpec =
    ArgSpec::updated("conv_states", Tolerance::Exact, FLOATS, 3, "[slots, channels, width - 1]");

const SCALARS: &[ScalarSpec] = &[
    ScalarSpec {
        name: "layout",
        default: Scalar::Choice("tokens"),
        choices: &["tokens", "channels"],
        summary: "the last axis of x and y, if they have both: tokens, or channels",
    },
    ScalarSpec {
        name: "activation",
        default: Scalar::Choice("none"),
        choices: &["none", "silu"],
        summary: "activation after the sum",
    },
];

fn activation<V: Described>(call: &Call<V>) -> Result<ConvActivation> {
    Ok(if call.choice("activation")? == "silu" { ConvActivation::Silu } else { ConvActivation::None })
}

/// The sizes of a call, from shapes and types that fit each other.
fn sizes<V: Described>(call: &Call<V>, op: ConvOp) -> Result<ConvSizes> {
    let x_type = call.get("x")?.dtype();
    let weight_type = if call.get("weight")?.dtype() == DType::F32 { DType::F32 } else { x_type };
    for (arg, want) in [("weight", weight_type), ("bias", weight_type), ("conv_states", x_type)] {
        if let Some(tensor) = call.optional(arg).filter(|tensor| tensor.dtype() != want) {
            return Err(Error::dtype(op.name, arg, tensor.dtype(), want));
        }
    }
    let mut x = call.get("x")?.shape().to_vec();
    if has_channels_last(call, op)? {
        let rank = x.len();
        x.swap(rank - 2, rank - 1);
    }
    let shape = |name| call.optional(name).map(V::shape);
    let shapes = ConvShapes {
        x: &x,
        weight: call.get("weight")?.shape(),
        bias: shape("bias"),
        starts: shape("query_start_loc"),
        slots: shape(op.slots),
        has_initial_state: shape("has_initial_state"),
        states: shape("conv_states"),
    };
    shapes.check(op)
}

/// Whether the last axes of `x` and `y` are tokens, then channels.
fn has_channels_last<V: Described>(call: &Call<V>, op: ConvOp) -> Result<bool> {
    let has_tokens = !op.update || call.get("x")?.shape().len() == 3;
    Ok(has_tokens && call.choice("layout")? == "channels")
}

fn outputs(call: &CallSpec, op: ConvOp) -> Result<Named<TensorSpec>> {
    sizes(call, op)?;
    Ok(vec![("y", call.get("x")?.clone())])
}

/// Every tensor once; of the states only the slots of sequences, read where a sequence continues from its slot.
fn traffic(call: &HostCall, update: bool) -> Traffic {
    let mut traffic = Traffic::once(call);
    if let Some(states) = call.optional("conv_states") {
        let (n_slots, bytes) = (states.shape()[0], states.bytes().len());
        let sequences = match call.optional("query_start_loc") {
            Some(starts) => starts.shape()[0] - 1,
            None => call.get("x").map_or(0, |x| x.shape()[0]),
        };
        let continued = match call.optional("has_initial_state") {
            Some(flags) => flags.to_f64().iter().filter(|&&flag| flag != 0.0).count(),
            None if update => sequences,
            None => 0,
        };
        let slots = |n: usize| (bytes / n_slots.max(1) * n.min(n_slots)) as u64;
        traffic.read -= slots(n_slots) - slots(continued);
        traffic.written -= slots(n_slots) - slots(sequences);
    }
    traffic
}

/// `x` and `y` with channels before tokens, as the safe functions take them.
fn views<'a, T: Element>(
    inputs: &Inputs<'a>,
    outputs: &mut Outputs<'a>,
    op: ConvOp,
) -> Result<(TensorView<'a, T>, TensorViewMut<'a, T>)> {
    let (x, y) = (inputs.view::<T>("x")?, outputs.take::<T>("y")?);
    if !has_channels_last(inputs, op)? {
        return Ok((x, y));
    }
    let rank = x.shape().len();
    Ok((x.transpose(rank - 2, rank - 1)?, y.transpose(rank - 2, rank - 1)?))
}

fn fwd<'a, T: Float, W: ConvWeight<T>>(
    stream: &Stream,
    inputs: Inputs<'a>,
    outputs: &mut Outputs<'a>,
) -> Result<()> {
    let (x, y) = views::<T>(&inputs, outputs, FWD)?;
    let tensors = ConvInputs::<T, W> {
        x,
        weight: inputs.view("weight")?,
        bias: inputs.optional_view("bias")?,
        query_start_loc: inputs.optional_view("query_start_loc")?,
        cache_indices: inputs.optional_view("cache_indices")?,
        has_initial_state: inputs.optional_view("has_initial_state")?,
    };
    let outputs = ConvOutputs { y, conv_states: outputs.take_optional("conv_states")? };
    crate::causal_conv1d_fwd(stream, tensors, outputs, activation(&inputs)?)
}

fn update<'a, T: Float, W: ConvWeight<T>>(
    stream: &Stream,
    inputs: Inputs<'a>,
    outputs: &mut Outputs<'a>,
) -> Result<()> {
    let (x, y) = views::<T>(&inputs, outputs, UPDATE)?;
    let tensors = ConvUpdateInputs::<T, W> {
        x,
        weight: inputs.view("weight")?,
        bias: inputs.optional_view("bias")?,
        conv_state_indices: inputs.optional_view("conv_state_indices")?,
    };
    let outputs = ConvUpdateOutputs { y, conv_states: outputs.take("conv_states")? };
    crate::causal_conv1d_update(stream, tensors, outputs, activation(&inputs)?)
}

/// `y` is untouched for tokens of padding and of no sequence, NaN for sequences out of range.
fn reference_of(call: &HostCall, op: ConvOp) -> Result<Named<HostTensorF64>> {
    let ConvSizes { batch, channels, tokens: all_tokens, width, n_slots, .. } = sizes(call, op)?;
    let integers =
        |name: &str| call.optional(name).map(|t| t.to_f64().iter().map(|&v| v as i64).collect::<Vec<_>>());
    let starts = integers("query_start_loc");
    let (slots, flags) = (integers(op.slots), integers("has_initial_state"));
    expect_determined(op, starts.as_deref(), slots.as_deref(), n_slots)?;
    let last = has_channels_last(call, op)?;
    let at = |b: usize, c: usize, t: usize| {
        let first = if starts.is_some() { 0 } else { b * channels * all_tokens };
        first + if last { t * channels + c } else { c * all_tokens + t }
    };

    let x = call.get("x")?;
    let (x_values, weight) = (x.to_f64(), call.get("weight")?.to_f64());
    // Tokens of no sequence, and of padding ones, are not written.
    let mut y = vec![HostTensorF64::UNTOUCHED; x_values.len()];
    let mut states = call.optional("conv_states").map(HostTensor::to_f64);
    let history_len = channels * (width - 1);
    let bias = call.optional("bias").map(HostTensor::to_f64).unwrap_or_default();
    let silu = activation(call)? == ConvActivation::Silu;
    for b in 0..batch {
        let (from, to) = starts.as_ref().map_or((0, all_tokens as i64), |s| (s[b], s[b + 1]));
        let slot = slots.as_ref().map_or(b as i64, |slots| slots[b]);
        let has_slot = states.is_none() || (0..n_slots as i64).contains(&slot);
        let within = |token: i64| token.clamp(0, all_tokens as i64) as usize;
        let range = within(from)..within(to);
        if range.is_empty() || channels == 0 || (states.is_some() && slot == -1) {
            continue;
        }
        if !has_slot || range != (from as usize..to as usize) {
            (0..channels)
                .flat_map(|c| range.clone().map(move |t| (c, t)))
                .for_each(|(c, t)| y[at(b, c, t)] = f64::NAN);
            continue;
        }
        let tokens: Vec<f64> = (0..channels)
            .flat_map(|c| range.clone().map(move |t| (c, t)))
            .map(|(c, t)| x_values[at(b, c, t)])
            .collect();
        let continues = flags.as_ref().map_or(op.update, |flags| flags[b] != 0);
        let state = slot as usize * history_len..(slot as usize + 1) * history_len;
        let history = match &states {
            Some(states) if continues => states[state.clone()].to_vec(),
            _ => vec![0.0; history_len],
        };
        let out = reference::causal_conv1d(&tokens, &history, &weight, &bias, channels, width, silu);
        for c in 0..channels {
            for (i, t) in range.clone().enumerate() {
                y[at(b, c, t)] = out.y[c * range.len() + i];
            }
        }
        if let Some(states) = &mut states {
            states[state].copy_from_slice(&out.state);
        }
    }
    let mut outputs = vec![("y", HostTensorF64::new(x.shape(), y))];
    if let (Some(values), Some(tensor)) = (states, call.optional("conv_states")) {
        outputs.push(("conv_states", HostTensorF64::new(tensor.shape(), values)));
    }
    Ok(outputs)
}

/// Refuses indices for which more than one result is right.
fn expect_determined(
    ConvOp { name: op, slots: slots_arg, .. }: ConvOp,
    starts: Option<&[i64]>,
    slots: Option<&[i64]>,
    n_slots: usize,
) -> Result<()> {
    if let Some(pair) = starts.and_then(|starts| starts.windows(2).find(|pair| pair[0] > pair[1])) {
        let got = format!("{} before {}", pair[0], pair[1]);
        return Err(Error::argument(op, "query_start_loc", got, "starts that rise, to have one result"));
    }
    let mut used: Vec<_> =
        slots.unwrap_or_default().iter().filter(|slot| (0..n_slots as i64).contains(slot)).collect();
    used.sort_unstable();
    if let Some(pair) = used.windows(2).find(|pair| pair[0] == pair[1]) {
        let got = format!("slot {} twice", pair[0]);
        return Err(Error::argument(op, slots_arg, got, "distinct slots, to have one result"));
    }
    Ok(())
}
