//! `causal_conv1d_fwd_split_qkv`, `causal_conv1d_update_split_qkv`.

use super::recurrent::{case, size};
use crate::conv::{FWD, UPDATE};
use crate::{ConvSplitInputs, ConvUpdateSplitInputs, Qkv, kernels};
use hk_activation::conv::{ConvOp, ConvShapes, ConvSizes};
use hk_activation::{ConvActivation, ConvWeight, reference};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensor, HostTensorF64,
    Named, Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Element, Error, Float, Result, Stream, TensorView, TensorViewMut, with_float};

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const I32: &[DType] = &[DType::I32];
const EXAMPLE_SLOTS: i64 = 8;
/// Tokens of each sequence of an example.
const TOKENS: i64 = 64;

const WEIGHT: ArgSpec = ArgSpec::input("weight", FLOATS, 2, "[channels, width]");
const BIAS: ArgSpec = ArgSpec::input("bias", FLOATS, 1, "[channels]").optional();
const SLOTS: ArgSpec = ArgSpec::input("cache_indices", I32, 1, "[N]")
    .sampled(Sample::Distinct { below: EXAMPLE_SLOTS })
    .optional();
const STATES: ArgSpec =
    ArgSpec::updated("conv_states", Tolerance::Exact, FLOATS, 3, "[slots, channels, width - 1]");

const fn result(name: &'static str, shape: &'static str) -> ArgSpec {
    ArgSpec::output(name, Tolerance::Reduction, FLOATS, 2, shape).ranks(2, 3)
}

const KEY_DIM: ScalarSpec = size("key_dim", 2048, "channels of q, and of k");
const LAYOUT: ScalarSpec = ScalarSpec {
    name: "layout",
    default: Scalar::Choice("channels"),
    choices: &["channels", "tokens"],
    summary: "the last axis of x: channels, or tokens",
};
const OUT_LAYOUT: ScalarSpec =
    ScalarSpec { name: "out_layout", summary: "the last axis of q, k and v: channels, or tokens", ..LAYOUT };
const ACTIVATION: ScalarSpec = ScalarSpec {
    name: "activation",
    default: Scalar::Choice("none"),
    choices: &["none", "silu"],
    summary: "activation after the sum",
};

const SILU: Scalar = Scalar::Choice("silu");
const TOKENS_LAST: Scalar = Scalar::Choice("tokens");

pub(crate) const CAUSAL_CONV1D_FWD_SPLIT_QKV: Operator = Operator {
    name: "causal_conv1d_fwd_split_qkv",
    family: "hk-gdr",
    summary: "causal_conv1d_fwd of packed sequences, its channels to q, k and v",
    args: &[
        ArgSpec::input("x", FLOATS, 2, "[T, channels], or [channels, T] by layout"),
        WEIGHT,
        BIAS,
        ArgSpec::input("query_start_loc", I32, 1, "[N + 1]").sampled(Sample::Steps { step: TOKENS }),
        SLOTS,
        ArgSpec::input("has_initial_state", &[DType::U8], 1, "[N]")
            .sampled(Sample::Integers { low: 0, high: 2 })
            .optional(),
        STATES.optional(),
        result("q", "[T, key_dim], or [key_dim, T] by out_layout"),
        result("k", "as q"),
        result("v", "[T, value_dim], or [value_dim, T]"),
    ],
    scalars: &[KEY_DIM, LAYOUT, OUT_LAYOUT, ACTIVATION],
    kernels: &[&kernels::CONV_SPLIT],
    cases: &[
        case!("Qwen3-Next, 64 tokens of 4 sequences"; activation = SILU; x Bf16 [256, 8192] weight Bf16 [8192, 4]
        query_start_loc I32 [5] cache_indices I32 [4] has_initial_state U8 [4] conv_states Bf16 [8, 8192, 3]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 8192 tokens of 128 sequences"; activation = SILU; x Bf16 [8192, 8192]
        weight Bf16 [8192, 4] query_start_loc I32 [129]),
    ]),
    corners: &[
        case!("channels"; activation = SILU, key_dim = Scalar::Count(24); x Bf16 [192, 80] weight Bf16 [80, 4] bias Bf16 [80]
            query_start_loc I32 [4] cache_indices I32 [3] has_initial_state U8 [3] conv_states Bf16 [8, 80, 3]),
        case!("channels"; key_dim = Scalar::Count(8); x F16 [128, 24] weight F32 [24, 3] query_start_loc I32 [3]
            conv_states F16 [2, 24, 2]),
        case!("channels"; key_dim = Scalar::Count(4); x F32 [128, 20] weight F32 [20, 2] query_start_loc I32 [3]),
        case!("channels one by one"; key_dim = Scalar::Count(3); x Bf16 [128, 11] weight Bf16 [11, 4] query_start_loc I32 [3]
            conv_states Bf16 [8, 11, 3] cache_indices I32 [2] has_initial_state U8 [2]),
        case!("channels one by one"; key_dim = Scalar::Count(33); x F16 [64, 70] weight F16 [70, 2] query_start_loc I32 [2]),
        case!("channels one by one"; key_dim = Scalar::Count(1); x F32 [64, 3] weight F32 [3, 3] query_start_loc I32 [2]),
        case!("tiles of tokens"; activation = SILU, layout = TOKENS_LAST, out_layout = TOKENS_LAST, key_dim = Scalar::Count(4);
            x Bf16 [20, 192] weight Bf16 [20, 4] bias Bf16 [20] query_start_loc I32 [4] conv_states Bf16 [8, 20, 3]
            cache_indices I32 [3] has_initial_state U8 [3]),
        case!("tiles of tokens"; layout = TOKENS_LAST, out_layout = TOKENS_LAST, key_dim = Scalar::Count(8); x F16 [20, 64]
            weight F16 [20, 3] query_start_loc I32 [2]),
        case!("tiles of tokens"; layout = TOKENS_LAST, out_layout = TOKENS_LAST, key_dim = Scalar::Count(4); x F32 [12, 64]
            weight F32 [12, 2] query_start_loc I32 [2]),
        case!("tokens to channels"; layout = TOKENS_LAST, key_dim = Scalar::Count(4); x Bf16 [20, 192] weight Bf16 [20, 4]
            query_start_loc I32 [4]),
        case!("tokens to channels"; layout = TOKENS_LAST, key_dim = Scalar::Count(3); x F16 [10, 64] weight F16 [10, 3]
            query_start_loc I32 [2]),
        case!("channels to tokens"; out_layout = TOKENS_LAST, key_dim = Scalar::Count(8); x Bf16 [64, 24] weight Bf16 [24, 4]
            query_start_loc I32 [2]),
    ],
    outputs: |call| outputs(call, FWD),
    run: |stream, call| run(stream, call, FWD),
    reference: |call| reference_of(call, FWD),
    traffic: |call| traffic(call, FWD),
};

pub(crate) const CAUSAL_CONV1D_UPDATE_SPLIT_QKV: Operator = Operator {
    name: "causal_conv1d_update_split_qkv",
    family: "hk-gdr",
    summary: "causal_conv1d_update, its channels to q, k and v",
    args: &[
        ArgSpec::input("x", FLOATS, 3, "[B, channels], [B, L, channels], or [B, channels, L] by layout")
            .ranks(2, 3),
        WEIGHT,
        BIAS,
        ArgSpec { name: "conv_state_indices", ..SLOTS },
        STATES,
        result("q", "as x, key_dim channels"),
        result("k", "as x, key_dim channels"),
        result("v", "as x, the other channels"),
    ],
    scalars: &[KEY_DIM, LAYOUT, ACTIVATION],
    kernels: &[&kernels::CONV_SPLIT],
    cases: &[case!("Qwen3-Next, 8 sequences"; activation = SILU; x Bf16 [8, 8192] weight Bf16 [8192, 4]
        conv_state_indices I32 [8] conv_states Bf16 [8, 8192, 3])],
    bench: BenchSizes::Cases(&[case!("Qwen3-Next, 256 sequences"; activation = SILU; x Bf16 [256, 8192]
        weight Bf16 [8192, 4] conv_states Bf16 [256, 8192, 3])]),
    corners: &[
        case!("one token"; activation = SILU, key_dim = Scalar::Count(24); x Bf16 [5, 80] weight Bf16 [80, 4] bias Bf16 [80]
            conv_states Bf16 [8, 80, 3] conv_state_indices I32 [5]),
        case!("two tokens"; key_dim = Scalar::Count(8); x F16 [2, 2, 24] weight F32 [24, 3] conv_states F16 [2, 24, 2]),
        case!("one by one"; key_dim = Scalar::Count(3); x F32 [3, 11] weight F32 [11, 2] conv_states F32 [3, 11, 1]),
        case!("tokens last"; layout = TOKENS_LAST, key_dim = Scalar::Count(8); x Bf16 [2, 24, 5] weight Bf16 [24, 4]
            conv_states Bf16 [8, 24, 3] conv_state_indices I32 [2]),
        case!("tokens last"; layout = TOKENS_LAST, key_dim = Scalar::Count(4); x F32 [2, 12, 3] weight F32 [12, 4]
            conv_states F32 [2, 12, 3]),
    ],
    outputs: |call| outputs(call, UPDATE),
    run: |stream, call| run(stream, call, UPDATE),
    reference: |call| reference_of(call, UPDATE),
    traffic: |call| traffic(call, UPDATE),
};

/// Whether the last axes of x are tokens, then channels.
fn channels_last<V: Described>(call: &Call<V>, op: ConvOp) -> Result<bool> {
    let has_tokens = !op.update || call.get("x")?.shape().len() == 3;
    Ok(has_tokens && call.choice("layout")? == "channels")
}

/// The sizes of a call, and the channels of q.
fn sizes<V: Described>(call: &Call<V>, op: ConvOp) -> Result<(ConvSizes, usize)> {
    let x_type = call.get("x")?.dtype();
    let weight_type = if call.get("weight")?.dtype() == DType::F32 { DType::F32 } else { x_type };
    for (arg, want) in [("weight", weight_type), ("bias", weight_type), ("conv_states", x_type)] {
        if let Some(tensor) = call.optional(arg).filter(|tensor| tensor.dtype() != want) {
            return Err(Error::dtype(op.name, arg, tensor.dtype(), want));
        }
    }
    let mut x = call.get("x")?.shape().to_vec();
    if channels_last(call, op)? {
        let rank = x.len();
        x.swap(rank - 2, rank - 1);
    }
    if !op.update {
        call.get("query_start_loc")?;
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
    let sizes = shapes.check(op)?;
    let keys = call.size("key_dim")?;
    if 2 * keys > sizes.channels {
        let want = format!("at most half of the {} channels of x", sizes.channels);
        return Err(Error::argument(op.name, "key_dim", keys, want));
    }
    Ok((sizes, keys))
}

/// Whether the last axis of q, k and v is that of tokens.
fn out_tokens<V: Described>(call: &Call<V>) -> Result<bool> {
    Ok(call.choice("out_layout")? == "tokens")
}

fn outputs(call: &CallSpec, op: ConvOp) -> Result<Named<TensorSpec>> {
    let (sizes, keys) = sizes(call, op)?;
    let x = call.get("x")?;
    let part = |channels: usize| {
        let shape = match (op.update, x.shape.len(), channels_last(call, op)?) {
            (false, ..) if out_tokens(call)? => vec![channels, sizes.tokens],
            (false, ..) => vec![sizes.tokens, channels],
            (true, 2, _) => vec![sizes.batch, channels],
            (true, _, true) => vec![sizes.batch, sizes.tokens, channels],
            (true, _, false) => vec![sizes.batch, channels, sizes.tokens],
        };
        Ok(TensorSpec::new(x.dtype, shape))
    };
    Ok(vec![("q", part(keys)?), ("k", part(keys)?), ("v", part(sizes.channels - 2 * keys)?)])
}

fn run(stream: &Stream, call: &mut DeviceCall, op: ConvOp) -> Result<()> {
    let (dtype, f32_weight) = {
        let (inputs, _) = call.split();
        (inputs.get("x")?.dtype(), inputs.get("weight")?.dtype() == DType::F32)
    };
    with_float!(op.name, "x", dtype, T => {
        if f32_weight { typed::<T, f32>(stream, call, op) } else { typed::<T, T>(stream, call, op) }
    })
}

fn typed<T: Float, W: ConvWeight<T>>(stream: &Stream, call: &mut DeviceCall, op: ConvOp) -> Result<()> {
    fn exchanged<E: Element>(x: TensorView<E>) -> Result<TensorView<E>> {
        let rank = x.shape().len();
        x.transpose(rank - 2, rank - 1)
    }
    let (inputs, mut outputs) = call.split();
    let last = channels_last::<hk_core::registry::DynTensor>(&inputs, op)?;
    let x = inputs.view::<T>("x")?;
    let x = if last { exchanged(x)? } else { x };
    let (weight, bias) = (inputs.view::<W>("weight")?, inputs.optional_view("bias")?);
    let activation = activation::<hk_core::registry::DynTensor>(&inputs)?;
    let states = outputs.take_optional("conv_states")?;
    let mut take = |name| -> Result<TensorViewMut<T>> {
        let y = outputs.take::<T>(name)?;
        let rank = y.shape().len();
        let turn = if op.update { last } else { out_tokens::<hk_core::registry::DynTensor>(&inputs)? };
        if turn { y.transpose(rank - 2, rank - 1) } else { Ok(y) }
    };
    let qkv = Qkv { q: take("q")?, k: take("k")?, v: take("v")? };
    if op.update {
        let conv_state_indices = inputs.optional_view("conv_state_indices")?;
        let tensors = ConvUpdateSplitInputs { x, weight, bias, conv_state_indices };
        let missing = || Error::argument(op.name, "conv_states", "no tensor", "a tensor");
        let states = states.ok_or_else(missing)?;
        return crate::causal_conv1d_update_split_qkv(stream, tensors, qkv, states, activation);
    }
    let tensors = ConvSplitInputs {
        x,
        weight,
        bias,
        query_start_loc: inputs.view("query_start_loc")?,
        cache_indices: inputs.optional_view("cache_indices")?,
        has_initial_state: inputs.optional_view("has_initial_state")?,
    };
    crate::causal_conv1d_fwd_split_qkv(stream, tensors, qkv, states, activation)
}

fn activation<V: Described>(call: &Call<V>) -> Result<ConvActivation> {
    Ok(if call.choice("activation")? == "silu" { ConvActivation::Silu } else { ConvActivation::None })
}

fn reference_of(call: &HostCall, op: ConvOp) -> Result<Named<HostTensorF64>> {
    let (ConvSizes { batch, channels, tokens: all, width, n_slots, .. }, keys) = sizes(call, op)?;
    let integers =
        |name: &str| call.optional(name).map(|t| t.to_f64().iter().map(|v| *v as i64).collect::<Vec<_>>());
    let starts = integers("query_start_loc");
    let (slots, flags) = (integers(op.slots), integers("has_initial_state"));
    if let Some(slots) = &slots {
        let mut seen: Vec<i64> = slots.iter().copied().filter(|slot| *slot >= 0).collect();
        seen.sort_unstable();
        if let Some(pair) = seen.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::argument(
                op.name,
                op.slots,
                format!("slot {} twice", pair[0]),
                "distinct slots",
            ));
        }
    }
    let last = channels_last(call, op)?;
    let x = call.get("x")?.to_f64();
    let weight = call.get("weight")?.to_f64();
    let bias = call.optional("bias").map(HostTensor::to_f64).unwrap_or_default();
    let silu = activation(call)? == ConvActivation::Silu;
    let history = channels * (width - 1);
    let mut states = call.optional("conv_states").map(HostTensor::to_f64);
    // Results by sequence (or packed), token, channel.
    let mut y = vec![HostTensorF64::UNTOUCHED; x.len()];
    let at = |row: usize, c: usize, t: usize| {
        let first = row * all * channels;
        first + if last { t * channels + c } else { c * all + t }
    };
    for b in 0..batch {
        let (from, to) = starts.as_ref().map_or((0, all as i64), |s| (s[b], s[b + 1]));
        let row = if starts.is_some() { 0 } else { b };
        let slot = slots.as_ref().map_or(b as i64, |slots| slots[b]);
        let within = |t: i64| t.clamp(0, all as i64) as usize;
        let range = within(from)..within(to).max(within(from));
        let skip = states.is_some() && slot == -1;
        if range.is_empty() || skip {
            continue;
        }
        let there = states.is_none() || (0..n_slots as i64).contains(&slot);
        let whole = from >= 0 && from <= to && to <= all as i64;
        if !there || !whole {
            range
                .clone()
                .for_each(|t| (0..channels).for_each(|c| y[(row * all + t) * channels + c] = f64::NAN));
            continue;
        }
        let own: Vec<f64> = (0..channels)
            .flat_map(|c| range.clone().map(move |t| (c, t)))
            .map(|(c, t)| x[at(row, c, t)])
            .collect();
        let continues = states.is_some() && flags.as_ref().map_or(op.update, |flags| flags[b] != 0);
        let before = match &states {
            Some(states) if continues => states[slot as usize * history..][..history].to_vec(),
            _ => vec![0.0; history],
        };
        let want = reference::causal_conv1d(&own, &before, &weight, &bias, channels, width, silu);
        for (i, (c, t)) in (0..channels).flat_map(|c| range.clone().map(move |t| (c, t))).enumerate() {
            y[(row * all + t) * channels + c] = want.y[i];
        }
        if let Some(states) = &mut states {
            states[slot as usize * history..][..history].copy_from_slice(&want.state);
        }
    }
    let mut made = Vec::new();
    if let (Some(states), Some(spec)) = (states, call.optional("conv_states")) {
        made.push(("conv_states", HostTensorF64::new(spec.shape(), states)));
    }
    let mut first = 0;
    for (name, spec) in outputs(&call.spec(), op)? {
        let own = if name == "v" { channels - 2 * keys } else { keys };
        let channels_first = if op.update { !last && spec.shape.len() == 3 } else { out_tokens(call)? };
        let rows = y.chunks((all * channels).max(1));
        let values = rows.flat_map(|row| {
            let element = move |i: usize| {
                let (t, c) = if channels_first { (i % all, i / all) } else { (i / own, i % own) };
                row[t * channels + first + c]
            };
            (0..all * own).map(element).collect::<Vec<_>>()
        });
        made.push((name, HostTensorF64::new(spec.shape, values.collect())));
        first += own;
    }
    Ok(made)
}

/// Every tensor once; of the states only the slots of sequences, read where a sequence continues from its slot.
fn traffic(call: &HostCall, op: ConvOp) -> Traffic {
    let mut traffic = Traffic::once(call);
    if let Some(states) = call.optional("conv_states") {
        let (n_slots, bytes) = (states.shape()[0].max(1), states.bytes().len());
        let sequences = match call.optional("query_start_loc") {
            Some(starts) => starts.shape()[0] - 1,
            None => call.get("x").map_or(0, |x| x.shape()[0]),
        };
        let continued = match call.optional("has_initial_state") {
            Some(flags) => flags.to_f64().iter().filter(|flag| **flag != 0.0).count(),
            None if op.update => sequences,
            None => 0,
        };
        let slots = |n: usize| (bytes / n_slots * n.min(n_slots)) as u64;
        traffic.read -= slots(n_slots) - slots(continued);
        traffic.written -= slots(n_slots) - slots(sequences);
    }
    traffic
}
