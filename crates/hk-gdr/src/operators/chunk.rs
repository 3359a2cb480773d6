//! `recompute_w_u`, `wy_representation`, `chunk_delta_h`, `chunk_o`, `chunk_gated_delta_rule`.

use super::recurrent::{
    ANY, CU_SEQLENS, F32, FLOATS, INDICES, INITIAL, KEYS, L2NORM, LAST, LAYOUT, LOG_DECAYS, O, ON, POOL, Q,
    SCALE, V, VK, case, expect_determined, gates_of, integers, layout, recurrence, scale, size, state_dtype,
    states, states_dtype, transposed,
};
use crate::chunk::{ChunkShapes, ChunkSizes};
use crate::reference::ChunkHead;
use crate::sizes::Sizes;
use crate::{
    ChunkInputs, ChunkOptions, ChunkOutputInputs, ChunkOutputOptions, DeltaInputs, DeltaOptions,
    DeltaOutputs, GateBase, RecomputeInputs, StateElement, StateLayout, WyInputs, WyOutputs, kernels,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, HostCall, HostTensor, HostTensorF64, Inputs, Named,
    Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Result, Stream, bf16, with_float};

const C16: Scalar = Scalar::Count(16);
const C32: Scalar = Scalar::Count(32);
const TWO: Scalar = Scalar::Choice("2");

const CHUNK: ScalarSpec = size("chunk_size", 64, "tokens of a chunk: 16, 32 or 64");
const BASE: ScalarSpec = ScalarSpec {
    name: "base",
    default: Scalar::Choice("e"),
    choices: &["e", "2"],
    summary: "base of the logarithms g",
};
const H_LAYOUT: ScalarSpec = ScalarSpec {
    name: "h_layout",
    default: Scalar::Choice("kv"),
    choices: &["kv", "vk"],
    summary: "the last axes of h",
};
const K: ArgSpec =
    ArgSpec { name: "k", shape: "[B, T, k_heads, K], or [T, k_heads, K] if packed", ..Q.sampled(KEYS) };
const STARTS: ArgSpec = ArgSpec { sample: Sample::StartsOf("k"), ..CU_SEQLENS };
const BETA: ArgSpec = ArgSpec::input("beta", F32, 3, "[.., v_heads]")
    .ranks(2, 3)
    .sampled(Sample::Uniform { low: 0.0, high: 1.0 });
/// Logarithms of decays of tokens.
const G: ArgSpec = ArgSpec::input("g", F32, 3, "[.., v_heads]").ranks(2, 3).sampled(LOG_DECAYS).optional();
/// Of rows of states.
const GK: ArgSpec =
    ArgSpec::input("gk", F32, 4, "[.., v_heads, K]").ranks(3, 4).sampled(LOG_DECAYS).optional();
const GK_SUMS: ArgSpec = ArgSpec { sample: Sample::Uniform { low: -2.0, high: 0.0 }, ..GK };
/// Their sums.
const SUMS: ArgSpec = ArgSpec { sample: Sample::Uniform { low: -2.0, high: 0.0 }, ..G };
const W: ArgSpec = ArgSpec::output("w", ANY, FLOATS, 4, "[.., v_heads, K]").ranks(3, 4);
const H: &str = "[B, chunks, v_heads, K, V], packed [chunks, v_heads, K, V], or V, K by h_layout";

pub(crate) const RECOMPUTE_W_U: Operator = Operator {
    name: "recompute_w_u",
    family: "hk-gdr",
    summary: "w = X diag(beta exp(G)) K, u = X diag(beta) V of each chunk",
    args: &[
        K,
        V,
        BETA,
        ArgSpec::input("x", FLOATS, 4, "[.., v_heads, C]")
            .ranks(3, 4)
            .sampled(Sample::Normal { mean: 0.0, deviation: 0.2 }),
        SUMS,
        STARTS,
        W,
        ArgSpec::output("u", ANY, FLOATS, 4, "as v").ranks(3, 4),
    ],
    scalars: &[BASE],
    kernels: &[&kernels::PREPARE_BF16, &kernels::PREPARE_F16, &kernels::PREPARE_F32],
    cases: &[
        case!("Qwen3-Next, 256 tokens"; ; k Bf16 [1, 256, 16, 128] v Bf16 [1, 256, 32, 128] beta F32 [1, 256, 32]
        x Bf16 [1, 256, 32, 64] g F32 [1, 256, 32]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 8192 tokens"; ; k Bf16 [1, 8192, 16, 128] v Bf16 [1, 8192, 32, 128] beta F32 [1, 8192, 32]
            x Bf16 [1, 8192, 32, 64] g F32 [1, 8192, 32]),
    ]),
    corners: &[
        case!("64"; base = TWO; k Bf16 [2, 70, 1, 72] v Bf16 [2, 70, 2, 136] beta F32 [2, 70, 2] x Bf16 [2, 70, 2, 64] g F32 [2, 70, 2]),
        case!("32, packed, by elements"; ; k Bf16 [100, 2, 61] v Bf16 [100, 2, 35] beta F32 [100, 2] x Bf16 [100, 2, 32]
            g F32 [100, 2] cu_seqlens I32 [4]),
        case!("16"; ; k F16 [1, 17, 1, 128] v F16 [1, 17, 1, 16] beta F32 [1, 17, 1] x F16 [1, 17, 1, 16]),
        case!("64 by elements"; ; k F16 [1, 65, 1, 3] v F16 [1, 65, 1, 9] beta F32 [1, 65, 1] x F16 [1, 65, 1, 64] g F32 [1, 65, 1]),
        case!("64"; ; k F32 [1, 66, 1, 100] v F32 [1, 66, 1, 20] beta F32 [1, 66, 1] x F32 [1, 66, 1, 64] g F32 [1, 66, 1]),
        case!("32 by elements"; ; k F32 [1, 33, 1, 3] v F32 [1, 33, 1, 5] beta F32 [1, 33, 1] x F32 [1, 33, 1, 32]),
    ],
    outputs: |call| wy_outputs(call, &["w", "u"]),
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        with_float!("recompute_w_u", "k", inputs.get("k")?.dtype(), T => {
            let tensors = RecomputeInputs::<T> {
                k: inputs.view("k")?,
                v: inputs.view("v")?,
                beta: inputs.view("beta")?,
                x: inputs.view("x")?,
                g: inputs.optional_view("g")?,
                cu_seqlens: inputs.optional_view("cu_seqlens")?,
                base: base(&inputs)?,
            };
            crate::recompute_w_u(stream, tensors, outputs.take("w")?, outputs.take("u")?)
        })
    },
    reference: wy_reference,
    traffic: Traffic::once,
};

pub(crate) const WY_REPRESENTATION: Operator = Operator {
    name: "wy_representation",
    family: "hk-gdr",
    summary: "recompute_w_u of the inverse of I + chunk_scaled_dot_kkt, from the logarithms of decays, in one launch",
    args: &[
        K,
        V,
        G,
        GK,
        BETA,
        STARTS,
        ArgSpec::output("sums", Tolerance::Sum { terms: 1e-6 }, F32, 3, "as g, or as gk").ranks(2, 4),
        W,
        ArgSpec::output("u", ANY, FLOATS, 4, "as v").ranks(3, 4),
        ArgSpec::output("kg", ANY, FLOATS, 4, "as w, beside gk").ranks(3, 4).optional(),
    ],
    scalars: &[CHUNK],
    kernels: &[&kernels::PREPARE_BF16, &kernels::PREPARE_F16, &kernels::PREPARE_F32],
    cases: &[
        case!("Qwen3-Next, 256 tokens"; ; k Bf16 [1, 256, 16, 128] v Bf16 [1, 256, 32, 128] g F32 [1, 256, 32]
        beta F32 [1, 256, 32]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 8192 tokens"; ; k Bf16 [1, 8192, 16, 128] v Bf16 [1, 8192, 32, 128] g F32 [1, 8192, 32]
            beta F32 [1, 8192, 32]),
    ]),
    corners: &[
        case!("64"; ; k Bf16 [2, 70, 1, 72] v Bf16 [2, 70, 2, 136] g F32 [2, 70, 2] beta F32 [2, 70, 2]),
        case!("32, packed, by elements"; chunk_size = C32; k Bf16 [100, 2, 61] v Bf16 [100, 2, 35] g F32 [100, 2] beta F32 [100, 2]
            cu_seqlens I32 [4]),
        case!("16"; chunk_size = C16; k F16 [1, 17, 1, 128] v F16 [1, 17, 1, 16] beta F32 [1, 17, 1]),
        case!("64 by elements"; ; k F16 [1, 65, 1, 3] v F16 [1, 65, 1, 9] g F32 [1, 65, 1] beta F32 [1, 65, 1]),
        case!("64"; ; k F32 [1, 66, 1, 100] v F32 [1, 66, 1, 20] g F32 [1, 66, 1] beta F32 [1, 66, 1]),
        case!("32 by elements"; chunk_size = C32; k F32 [1, 33, 1, 3] v F32 [1, 33, 1, 5] beta F32 [1, 33, 1]),
        case!("64, gates of rows"; ; k Bf16 [1, 70, 1, 72] v Bf16 [1, 70, 2, 40] gk F32 [1, 70, 2, 72] beta F32 [1, 70, 2]
            kg Bf16 [1, 70, 2, 72]),
        case!("32, gates of rows, packed"; chunk_size = C32; k F32 [50, 1, 20] v F32 [50, 1, 12] gk F32 [50, 1, 20] beta F32 [50, 1]
            cu_seqlens I32 [4] kg F32 [50, 1, 20]),
    ],
    outputs: |call| {
        let channels = call.optional("gk").is_some();
        if call.wants("kg") != channels {
            let got = if channels { "no tensor" } else { "given" };
            let want = if channels { "a tensor beside gk" } else { "nothing without gk" };
            return Err(Error::argument(call.operator().name, "kg", got, want));
        }
        wy_outputs(call, if channels { &["sums", "w", "u", "kg"] } else { &["sums", "w", "u"] })
    },
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        with_float!("wy_representation", "k", inputs.get("k")?.dtype(), T => {
            let tensors = WyInputs::<T> {
                k: inputs.view("k")?,
                v: inputs.view("v")?,
                g: inputs.optional_view("g")?,
                gk: inputs.optional_view("gk")?,
                beta: inputs.view("beta")?,
                cu_seqlens: inputs.optional_view("cu_seqlens")?,
            };
            let made = WyOutputs {
                sums: outputs.take("sums")?,
                w: outputs.take("w")?,
                u: outputs.take("u")?,
                kg: outputs.take_optional("kg")?,
            };
            crate::wy_representation(stream, tensors, made, inputs.size("chunk_size")?)
        })
    },
    reference: wy_reference,
    traffic: Traffic::once,
};

pub(crate) const CHUNK_DELTA_H: Operator = Operator {
    name: "chunk_delta_h",
    family: "hk-gdr",
    summary: "v_new = u - w H, H' = exp(G_last) H + K^T diag(exp(G_last - G)) v_new, chunk by chunk",
    args: &[
        K,
        ArgSpec::input("w", FLOATS, 4, "[.., v_heads, K]")
            .ranks(3, 4)
            .sampled(Sample::Normal { mean: 0.0, deviation: 0.03 }),
        ArgSpec::input("u", FLOATS, 4, "[.., v_heads, V]").ranks(3, 4),
        SUMS,
        GK_SUMS,
        INITIAL,
        POOL.optional(),
        INDICES.optional(),
        STARTS,
        ArgSpec::output("h", ANY, FLOATS, 5, H).ranks(4, 5).optional(),
        ArgSpec::output("v_new", ANY, FLOATS, 4, "as u").ranks(3, 4).optional(),
        LAST,
    ],
    scalars: &[CHUNK, BASE, LAYOUT, H_LAYOUT],
    kernels: &[&kernels::STATES_BF16, &kernels::STATES_F16, &kernels::STATES_F32],
    cases: &[
        case!("Qwen3-Next, 256 tokens"; h_layout = VK; k Bf16 [1, 256, 16, 128] w Bf16 [1, 256, 32, 128] u Bf16 [1, 256, 32, 128]
        g F32 [1, 256, 32] h Bf16 [1, 4, 32, 128, 128] v_new Bf16 [1, 256, 32, 128] final_state F32 [1, 32, 128, 128]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 8192 tokens"; h_layout = VK; k Bf16 [1, 8192, 16, 128] w Bf16 [1, 8192, 32, 128]
            u Bf16 [1, 8192, 32, 128] g F32 [1, 8192, 32] h Bf16 [1, 128, 32, 128, 128] v_new Bf16 [1, 8192, 32, 128]
            final_state F32 [1, 32, 128, 128]),
    ]),
    corners: &[
        case!("128"; base = TWO; k Bf16 [2, 70, 1, 72] w Bf16 [2, 70, 2, 72] u Bf16 [2, 70, 2, 24] g F32 [2, 70, 2]
            initial_state F32 [2, 2, 72, 24] h Bf16 [2, 2, 2, 72, 24] v_new Bf16 [2, 70, 2, 24] final_state F32 [2, 2, 72, 24]),
        case!("256, packed"; chunk_size = C32, layout = VK, h_layout = VK; k Bf16 [100, 1, 136] w Bf16 [100, 1, 136] u Bf16 [100, 1, 40]
            g F32 [100, 1] state_pool Bf16 [8, 1, 40, 136] state_indices I32 [3] cu_seqlens I32 [4] h Bf16 [6, 1, 40, 136]
            v_new Bf16 [100, 1, 40]),
        case!("by elements"; chunk_size = C16; k Bf16 [1, 20, 1, 61] w Bf16 [1, 20, 1, 61] u Bf16 [1, 20, 1, 35] g F32 [1, 20, 1]
            initial_state Bf16 [1, 1, 61, 35] h Bf16 [1, 2, 1, 61, 35] final_state Bf16 [1, 1, 61, 35]),
        case!("128"; ; k F16 [1, 65, 1, 128] w F16 [1, 65, 1, 128] u F16 [1, 65, 1, 16] v_new F16 [1, 65, 1, 16]),
        case!("256"; ; k F16 [1, 10, 1, 256] w F16 [1, 10, 2, 256] u F16 [1, 10, 2, 8] g F32 [1, 10, 2]
            initial_state F32 [1, 2, 256, 8] h F16 [1, 1, 2, 256, 8] final_state F32 [1, 2, 256, 8]),
        case!("by elements"; h_layout = VK; k F16 [1, 70, 1, 9] w F16 [1, 70, 1, 9] u F16 [1, 70, 1, 5] h F16 [1, 2, 1, 5, 9]
            v_new F16 [1, 70, 1, 5]),
        case!("128"; ; k F32 [1, 66, 1, 100] w F32 [1, 66, 1, 100] u F32 [1, 66, 1, 20] g F32 [1, 66, 1]
            initial_state F32 [1, 1, 100, 20] h F32 [1, 2, 1, 100, 20] v_new F32 [1, 66, 1, 20] final_state F32 [1, 1, 100, 20]),
        case!("256"; h_layout = VK; k F32 [1, 17, 1, 200] w F32 [1, 17, 1, 200] u F32 [1, 17, 1, 4] h F32 [1, 1, 1, 4, 200]
            final_state F32 [1, 1, 200, 4]),
        case!("128, gates of rows"; h_layout = VK; k Bf16 [1, 70, 2, 72] w Bf16 [1, 70, 2, 72] u Bf16 [1, 70, 2, 24] gk F32 [1, 70, 2, 72]
            initial_state F32 [1, 2, 72, 24] h Bf16 [1, 2, 2, 24, 72] v_new Bf16 [1, 70, 2, 24] final_state F32 [1, 2, 72, 24]),
        case!("256, gates of rows"; ; k Bf16 [1, 70, 1, 136] w Bf16 [1, 70, 1, 136] u Bf16 [1, 70, 1, 24] gk F32 [1, 70, 1, 136]
            initial_state F32 [1, 1, 136, 24] final_state F32 [1, 1, 136, 24]),
        case!("256, gates of rows"; ; k F16 [1, 70, 1, 136] w F16 [1, 70, 1, 136] u F16 [1, 70, 1, 24] gk F32 [1, 70, 1, 136]
            initial_state F32 [1, 1, 136, 24] final_state F32 [1, 1, 136, 24]),
        case!("256, gates of rows"; ; k F32 [1, 70, 1, 136] w F32 [1, 70, 1, 136] u F32 [1, 70, 1, 24] gk F32 [1, 70, 1, 136]
            initial_state F32 [1, 1, 136, 24] final_state F32 [1, 1, 136, 24]),
        case!("by elements"; chunk_size = C32; k F32 [1, 33, 1, 3] w F32 [1, 33, 1, 3] u F32 [1, 33, 1, 5] v_new F32 [1, 33, 1, 5]),
    ],
    outputs: |call| {
        let sizes = sizes(call)?;
        let dtype = call.get("k")?.dtype;
        let mut made = Vec::new();
        if call.wants("h") {
            made.push(("h", TensorSpec::new(dtype, sizes.snapshots(h_layout(call)?))));
        }
        if call.wants("v_new") {
            made.push(("v_new", call.get("u")?.clone()));
        }
        made.extend(final_state(call, &sizes)?);
        Ok(made)
    },
    run: |stream, call| {
        let of_states = states_dtype(call);
        let (inputs, outputs) = call.split();
        with_float!("chunk_delta_h", "k", inputs.get("k")?.dtype(), T => {
            if of_states == DType::Bf16 {
                run_states::<T, bf16>(stream, inputs, outputs)
            } else {
                run_states::<T, f32>(stream, inputs, outputs)
            }
        })
    },
    reference: states_reference,
    traffic: Traffic::once,
};

pub(crate) const CHUNK_O: Operator = Operator {
    name: "chunk_o",
    family: "hk-gdr",
    summary: "o_i = scale (exp(G_i) H^T q_i + sum_{j <= i} exp(G_i - G_j) (q_i k_j) v_new_j)",
    args: &[
        Q.sampled(KEYS),
        ArgSpec { shape: "as q", ..K },
        ArgSpec::input("v_new", FLOATS, 4, "[.., v_heads, V]").ranks(3, 4),
        ArgSpec::input("h", FLOATS, 5, H).ranks(4, 5).sampled(KEYS),
        SUMS,
        GK_SUMS,
        STARTS,
        ArgSpec { shape: "as v_new", ..O },
    ],
    scalars: &[SCALE, CHUNK, BASE, H_LAYOUT],
    kernels: &[&kernels::OUTPUTS],
    cases: &[
        case!("Qwen3-Next, 256 tokens"; h_layout = VK; q Bf16 [1, 256, 16, 128] k Bf16 [1, 256, 16, 128]
        v_new Bf16 [1, 256, 32, 128] h Bf16 [1, 4, 32, 128, 128] g F32 [1, 256, 32]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 8192 tokens"; h_layout = VK; q Bf16 [1, 8192, 16, 128] k Bf16 [1, 8192, 16, 128]
            v_new Bf16 [1, 8192, 32, 128] h Bf16 [1, 128, 32, 128, 128] g F32 [1, 8192, 32]),
    ]),
    corners: &[
        case!("64"; base = TWO, scale = Scalar::Float(0.7); q Bf16 [2, 70, 1, 72] k Bf16 [2, 70, 1, 72] v_new Bf16 [2, 70, 2, 136]
            h Bf16 [2, 2, 2, 72, 136] g F32 [2, 70, 2]),
        case!("32, packed, by elements"; chunk_size = C32, h_layout = VK; q Bf16 [100, 2, 61] k Bf16 [100, 2, 61] v_new Bf16 [100, 2, 35]
            h Bf16 [6, 2, 35, 61] g F32 [100, 2] cu_seqlens I32 [4]),
        case!("16"; chunk_size = C16, h_layout = VK; q F16 [1, 17, 1, 128] k F16 [1, 17, 1, 128] v_new F16 [1, 17, 1, 16]
            h F16 [1, 2, 1, 16, 128]),
        case!("64 by elements"; ; q F16 [1, 65, 1, 3] k F16 [1, 65, 1, 3] v_new F16 [1, 65, 1, 9] h F16 [1, 2, 1, 3, 9] g F32 [1, 65, 1]),
        case!("64"; ; q F32 [1, 66, 1, 100] k F32 [1, 66, 1, 100] v_new F32 [1, 66, 1, 20] h F32 [1, 2, 1, 100, 20] g F32 [1, 66, 1]),
        case!("64, gates of rows"; h_layout = VK; q Bf16 [1, 70, 1, 72] k Bf16 [1, 70, 1, 72] v_new Bf16 [1, 70, 2, 40]
            h Bf16 [1, 2, 2, 40, 72] gk F32 [1, 70, 2, 72]),
        case!("32 by elements"; chunk_size = C32, h_layout = VK; q F32 [1, 33, 1, 3] k F32 [1, 33, 1, 3] v_new F32 [1, 33, 1, 5]
            h F32 [1, 2, 1, 5, 3]),
        // So many chunks, most of them without tokens, that waves have whole ones.
        case!("64, many sequences"; h_layout = VK; q Bf16 [70, 1, 72] k Bf16 [70, 1, 72] v_new Bf16 [70, 1, 24]
            h Bf16 [641, 1, 24, 72] g F32 [70, 1] cu_seqlens I32 [641]),
        case!("64, many sequences"; ; q F16 [70, 1, 40] k F16 [70, 1, 40] v_new F16 [70, 1, 8] h F16 [641, 1, 40, 8]
            g F32 [70, 1] cu_seqlens I32 [641]),
    ],
    outputs: |call| {
        sizes(call)?;
        Ok(vec![("o", call.get("v_new")?.clone())])
    },
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        with_float!("chunk_o", "q", inputs.get("q")?.dtype(), T => {
            let tensors = ChunkOutputInputs::<T> {
                q: inputs.view("q")?,
                k: inputs.view("k")?,
                v_new: inputs.view("v_new")?,
                h: inputs.view("h")?,
                g: inputs.optional_view("g")?,
                gk: inputs.optional_view("gk")?,
                cu_seqlens: inputs.optional_view("cu_seqlens")?,
                base: base(&inputs)?,
            };
            let options = ChunkOutputOptions {
                scale: scale(&inputs)?,
                chunk_size: inputs.size("chunk_size")?,
                h_layout: h_layout(&inputs)?,
            };
            crate::chunk_o(stream, tensors, outputs.take("o")?, options)
        })
    },
    reference: outputs_reference,
    traffic: Traffic::once,
};

pub(crate) const CHUNK_GATED_DELTA_RULE: Operator = Operator {
    name: "chunk_gated_delta_rule",
    family: "hk-gdr",
    summary: "fused_recurrent of whole prompts, in chunks: wy_representation, chunk_delta_h, chunk_o",
    args: &[
        Q.sampled(KEYS),
        ArgSpec { shape: "as q", ..K },
        V,
        G,
        GK,
        BETA,
        INITIAL,
        POOL.optional(),
        INDICES.optional(),
        STARTS,
        O,
        LAST,
    ],
    scalars: &[SCALE, L2NORM, LAYOUT, CHUNK],
    kernels: &[
        &kernels::PREPARE_BF16,
        &kernels::PREPARE_F16,
        &kernels::PREPARE_F32,
        &kernels::STATES_BF16,
        &kernels::STATES_F16,
        &kernels::STATES_F32,
        &kernels::OUTPUTS,
    ],
    cases: &[
        case!("Qwen3-Next, 256 tokens"; qk_l2norm = ON; q Bf16 [1, 256, 16, 128] k Bf16 [1, 256, 16, 128] v Bf16 [1, 256, 32, 128]
            g F32 [1, 256, 32] beta F32 [1, 256, 32] final_state F32 [1, 32, 128, 128]),
        case!("Kimi Linear at TP8, 256 tokens, gates of rows"; qk_l2norm = ON; q Bf16 [1, 256, 4, 128] k Bf16 [1, 256, 4, 128]
            v Bf16 [1, 256, 4, 128] gk F32 [1, 256, 4, 128] beta F32 [1, 256, 4] final_state F32 [1, 4, 128, 128]),
        case!("Qwen3-Next at TP8, 5 packed sequences"; qk_l2norm = ON; q Bf16 [600, 2, 128] k Bf16 [600, 2, 128] v Bf16 [600, 4, 128]
            g F32 [600, 4] beta F32 [600, 4] state_pool F32 [8, 4, 128, 128] state_indices I32 [5] cu_seqlens I32 [6]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 1024 tokens"; qk_l2norm = ON; q Bf16 [1, 1024, 16, 128] k Bf16 [1, 1024, 16, 128] v Bf16 [1, 1024, 32, 128]
            g F32 [1, 1024, 32] beta F32 [1, 1024, 32] final_state F32 [1, 32, 128, 128]),
        case!("Qwen3-Next, 8192 tokens"; qk_l2norm = ON; q Bf16 [1, 8192, 16, 128] k Bf16 [1, 8192, 16, 128] v Bf16 [1, 8192, 32, 128]
            g F32 [1, 8192, 32] beta F32 [1, 8192, 32] final_state F32 [1, 32, 128, 128]),
        case!("Qwen3-Next, 65536 tokens"; qk_l2norm = ON; q Bf16 [1, 65_536, 16, 128] k Bf16 [1, 65_536, 16, 128]
            v Bf16 [1, 65_536, 32, 128] g F32 [1, 65_536, 32] beta F32 [1, 65_536, 32] final_state F32 [1, 32, 128, 128]),
        case!("Kimi Linear, 8192 tokens, gates of rows"; qk_l2norm = ON; q Bf16 [1, 8192, 32, 128] k Bf16 [1, 8192, 32, 128]
            v Bf16 [1, 8192, 32, 128] gk F32 [1, 8192, 32, 128] beta F32 [1, 8192, 32] final_state F32 [1, 32, 128, 128]),
        case!("Qwen3-Next, 4 sequences of 2048 tokens"; qk_l2norm = ON; q Bf16 [4, 2048, 16, 128] k Bf16 [4, 2048, 16, 128]
            v Bf16 [4, 2048, 32, 128] g F32 [4, 2048, 32] beta F32 [4, 2048, 32] final_state F32 [4, 32, 128, 128]),
    ]),
    corners: &[
        case!("64"; qk_l2norm = ON; q Bf16 [2, 70, 1, 72] k Bf16 [2, 70, 1, 72] v Bf16 [2, 70, 2, 136] g F32 [2, 70, 2]
            beta F32 [2, 70, 2] initial_state F32 [2, 2, 72, 136] final_state F32 [2, 2, 72, 136]),
        case!("32, packed, rows of k"; chunk_size = C32, layout = VK, scale = Scalar::Float(0.7); q Bf16 [100, 2, 136] k Bf16 [100, 2, 136]
            v Bf16 [100, 2, 40] g F32 [100, 2] beta F32 [100, 2] state_pool Bf16 [8, 2, 40, 136] state_indices I32 [3] cu_seqlens I32 [4]),
        case!("16, by elements"; chunk_size = C16, qk_l2norm = ON; q Bf16 [1, 20, 1, 61] k Bf16 [1, 20, 1, 61] v Bf16 [1, 20, 1, 35]
            g F32 [1, 20, 1] beta F32 [1, 20, 1] initial_state Bf16 [1, 1, 61, 35] final_state Bf16 [1, 1, 61, 35]),
        case!("64"; ; q F16 [1, 65, 1, 128] k F16 [1, 65, 1, 128] v F16 [1, 65, 1, 16] beta F32 [1, 65, 1] final_state F32 [1, 1, 128, 16]),
        case!("64"; ; q F32 [1, 66, 1, 100] k F32 [1, 66, 1, 100] v F32 [1, 66, 1, 20] g F32 [1, 66, 1] beta F32 [1, 66, 1]
            initial_state F32 [1, 1, 100, 20]),
        case!("64, gates of rows"; qk_l2norm = ON; q Bf16 [2, 70, 1, 72] k Bf16 [2, 70, 1, 72] v Bf16 [2, 70, 2, 40] gk F32 [2, 70, 2, 72]
            beta F32 [2, 70, 2] initial_state F32 [2, 2, 72, 40] final_state F32 [2, 2, 72, 40]),
        case!("32, gates of rows, packed, by elements"; chunk_size = C32; q Bf16 [100, 1, 61] k Bf16 [100, 1, 61] v Bf16 [100, 1, 35]
            gk F32 [100, 1, 61] beta F32 [100, 1] cu_seqlens I32 [4] final_state F32 [3, 1, 61, 35]),
        case!("64, gates of rows"; ; q F16 [1, 65, 1, 128] k F16 [1, 65, 1, 128] v F16 [1, 65, 1, 16] gk F32 [1, 65, 1, 128] beta F32 [1, 65, 1]),
        case!("16, gates of rows, by elements"; chunk_size = C16; q F16 [1, 20, 1, 9] k F16 [1, 20, 1, 9] v F16 [1, 20, 1, 5]
            gk F32 [1, 20, 1, 9] beta F32 [1, 20, 1]),
        case!("64, gates of rows"; ; q F32 [1, 66, 1, 100] k F32 [1, 66, 1, 100] v F32 [1, 66, 1, 20] gk F32 [1, 66, 1, 100]
            beta F32 [1, 66, 1] final_state F32 [1, 1, 100, 20]),
        case!("64, gates of rows, by elements"; ; q F32 [1, 40, 1, 7] k F32 [1, 40, 1, 7] v F32 [1, 40, 1, 5] gk F32 [1, 40, 1, 7]
            beta F32 [1, 40, 1]),
    ],
    outputs: |call| {
        let sizes = sizes(call)?;
        let mut made = vec![("o", call.get("v")?.clone())];
        made.extend(final_state(call, &sizes)?);
        Ok(made)
    },
    run: |stream, call| {
        let of_states = states_dtype(call);
        let (inputs, outputs) = call.split();
        with_float!("chunk_gated_delta_rule", "q", inputs.get("q")?.dtype(), T => {
            if of_states == DType::Bf16 {
                run_chunks::<T, bf16>(stream, inputs, outputs)
            } else {
                run_chunks::<T, f32>(stream, inputs, outputs)
            }
        })
    },
    reference: |call| {
        sizes(call)?;
        let of = call.get("q")?.dtype();
        let chunked = recurrence(call, &gates_of(call)?)?.into_iter();
        Ok(chunked.map(|(name, tensor)| (name, bounded(of, tensor))).collect())
    },
    traffic: Traffic::once,
};

fn base<D: Described>(call: &Call<D>) -> Result<GateBase> {
    Ok(if call.choice("base")? == "2" { GateBase::Two } else { GateBase::Natural })
}

fn h_layout<D: Described>(call: &Call<D>) -> Result<StateLayout> {
    Ok(if call.choice("h_layout")? == "vk" { StateLayout::Vk } else { StateLayout::Kv })
}

fn has(call: &Call<impl Described>, scalar: &str) -> bool {
    call.operator().scalars.iter().any(|spec| spec.name == scalar)
}

/// The name of the tensor of values.
fn values_name(call: &Call<impl Described>) -> &'static str {
    ["v", "v_new", "u"].into_iter().find(|name| call.optional(name).is_some()).unwrap_or("v")
}

/// The sizes of a call, from shapes and types that fit each other.
fn sizes<D: Described>(call: &Call<D>) -> Result<ChunkSizes> {
    let op = call.operator().name;
    let (of, k) = (if call.optional("q").is_some() { "q" } else { "k" }, call.get("k")?);
    let dtype = call.get(of)?.dtype();
    for arg in ["k", "v", "w", "u", "x", "v_new", "h"] {
        if let Some(got) = call.optional(arg).map(D::dtype).filter(|got| *got != dtype) {
            return Err(Error::dtype(op, arg, got, format!("{dtype} (dtype of {of})")));
        }
    }
    let shape = |name| call.optional(name).map(D::shape);
    let v = values_name(call);
    let x = shape("x");
    let shapes = ChunkShapes {
        op,
        chunk_size: match x {
            Some(x) => x.last().copied().unwrap_or(0),
            None => call.size("chunk_size")?,
        },
        layout: if has(call, "layout") { layout(call)? } else { StateLayout::Kv },
        h_layout: if has(call, "h_layout") { h_layout(call)? } else { StateLayout::Kv },
        q: shape("q"),
        k: k.shape(),
        v: (v, call.get(v)?.shape()),
        w: shape("w"),
        x,
        g: shape("g"),
        gk: shape("gk"),
        beta: shape("beta"),
        h: shape("h"),
        cu_seqlens: shape("cu_seqlens"),
        initial_state: shape("initial_state"),
        state_pool: shape("state_pool"),
        state_indices: shape("state_indices"),
        num_accepted_tokens: None,
    };
    let sizes = shapes.check()?;
    if has(call, "scale")
        && let Some(scale) = scale(call)?
        && !(scale > 0.0 && scale.is_finite())
    {
        return Err(Error::argument(op, "scale", scale, "positive and finite"));
    }
    Ok(sizes)
}

fn wy_outputs(call: &CallSpec, names: &[&'static str]) -> Result<Named<TensorSpec>> {
    let sizes = sizes(call)?;
    let dtype = call.get("k")?.dtype;
    let made = |name: &&'static str| {
        let spec = match *name {
            "sums" => TensorSpec::new(DType::F32, sums_shape(call, &sizes)),
            "w" | "kg" => TensorSpec::new(dtype, sizes.of_heads(&[sizes.all.k_dim])),
            _ => TensorSpec::new(dtype, sizes.of_heads(&[sizes.all.v_dim])),
        };
        (*name, spec)
    };
    Ok(names.iter().map(made).collect())
}

/// The shape of sums of gates.
fn sums_shape<D: Described>(call: &Call<D>, sizes: &ChunkSizes) -> Vec<usize> {
    if call.optional("gk").is_some() { sizes.of_heads(&[sizes.all.k_dim]) } else { sizes.of_heads(&[]) }
}

fn final_state(call: &CallSpec, sizes: &ChunkSizes) -> Result<Option<(&'static str, TensorSpec)>> {
    if !call.wants("final_state") {
        return Ok(None);
    }
    if call.optional("state_pool").is_some() {
        let op = call.operator().name;
        return Err(Error::argument(op, "final_state", "asked for", "nothing beside state_pool"));
    }
    let shape = [&[sizes.all.sequences], &sizes.all.state(layout(call)?)[..]].concat();
    Ok(Some(("final_state", TensorSpec::new(state_dtype(call), shape))))
}

fn run_states<'a, T: Float, S: StateElement>(
    stream: &Stream,
    inputs: Inputs<'a>,
    mut outputs: Outputs<'a>,
) -> Result<()> {
    let states = states::<S>(&inputs, &mut outputs)?;
    let tensors = DeltaInputs::<T> {
        k: inputs.view("k")?,
        w: inputs.view("w")?,
        u: inputs.view("u")?,
        g: inputs.optional_view("g")?,
        gk: inputs.optional_view("gk")?,
        cu_seqlens: inputs.optional_view("cu_seqlens")?,
        base: base(&inputs)?,
    };
    let made = DeltaOutputs { h: outputs.take_optional("h")?, v_new: outputs.take_optional("v_new")? };
    let options = DeltaOptions {
        chunk_size: inputs.size("chunk_size")?,
        layout: layout(&inputs)?,
        h_layout: h_layout(&inputs)?,
    };
    crate::chunk_delta_h(stream, tensors, states, made, options)
}

fn run_chunks<'a, T: Float, S: StateElement>(
    stream: &Stream,
    inputs: Inputs<'a>,
    mut outputs: Outputs<'a>,
) -> Result<()> {
    let states = states::<S>(&inputs, &mut outputs)?;
    let tensors = ChunkInputs::<T> {
        q: inputs.view("q")?,
        k: inputs.view("k")?,
        v: inputs.view("v")?,
        g: inputs.optional_view("g")?,
        gk: inputs.optional_view("gk")?,
        beta: inputs.view("beta")?,
        cu_seqlens: inputs.optional_view("cu_seqlens")?,
    };
    let options = ChunkOptions {
        scale: scale(&inputs)?,
        qk_l2norm: inputs.bool("qk_l2norm")?,
        chunk_size: inputs.size("chunk_size")?,
        layout: layout(&inputs)?,
    };
    let workspace = outputs.workspace(stream, tensors.workspace_bytes(options)?)?;
    crate::chunk_gated_delta_rule(stream, tensors, states, workspace, outputs.take("o")?, options)
}

/// With what products in chunks may err by, of operands of a type: relative to an element, to its row, and to the size of all.
pub(super) fn bounded(dtype: DType, tensor: HostTensorF64) -> HostTensorF64 {
    let rms = |values: &[f64]| {
        let finite = values.iter().filter(|v| v.is_finite());
        let (n, squares) = finite.fold((0.0, 0.0), |(n, sum), v| (n + 1.0, sum + v * v));
        if n > 0.0 { f64::sqrt(squares / n) } else { 0.0 }
    };
    let (rtol, terms) = match dtype {
        DType::Bf16 => (1.0 / 64.0, 3e-2),
        DType::F16 => (1.0 / 512.0, 4e-3),
        _ => (1e-5, 1e-5),
    };
    let all = rms(&tensor.values);
    let of_row = |row: &[f64]| {
        let size = all.max(rms(row)) + 1e-7 / terms;
        row.iter()
            .map(|v| size + rtol / terms * if v.is_finite() { v.abs() } else { 0.0 })
            .collect::<Vec<_>>()
    };
    let columns = tensor.shape.last().map_or(1, |n| *n).max(1);
    let magnitudes = tensor.values.chunks(columns).flat_map(of_row).collect();
    HostTensorF64 { tolerance: Some(Tolerance::Sum { terms }), ..tensor.with_magnitudes(magnitudes) }
}

/// A sequence of a call: its first token among all, its tokens, its first chunk, and whether something of it is out of range.
struct HostSequence {
    first: usize,
    tokens: usize,
    chunk: usize,
    poison: bool,
}

fn sequences(call: &HostCall, sizes: &ChunkSizes) -> Vec<HostSequence> {
    let all = sizes.all.tokens as i64;
    let starts = integers(call, "cu_seqlens");
    let of = |n: usize| match &starts {
        None => HostSequence {
            first: n * sizes.all.tokens,
            tokens: sizes.all.tokens,
            chunk: n * sizes.chunks,
            poison: false,
        },
        Some(s) => {
            let first = s[n].clamp(0, all);
            let tokens = s[n + 1].clamp(first, all) - first;
            let poison = s[n] < 0 || s[n + 1] < s[n] || s[n + 1] > all;
            let first = first as usize;
            HostSequence { first, tokens: tokens as usize, chunk: first / sizes.chunk_size + n, poison }
        }
    };
    (0..sizes.all.sequences).map(of).collect()
}

/// The tensors of a call, as rows of heads.
struct HostRows {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    w: Vec<f64>,
    /// Logarithms, to base e.
    g: Option<Vec<f64>>,
    /// Of channels.
    gk: Vec<f64>,
    beta: Vec<f64>,
    sizes: ChunkSizes,
}

impl HostRows {
    fn new(call: &HostCall, sizes: ChunkSizes) -> Result<Self> {
        let values = |name| call.optional(name).map_or(vec![], HostTensor::to_f64);
        let ln = if has(call, "base") && call.choice("base")? == "2" { std::f64::consts::LN_2 } else { 1.0 };
        let g = call.optional("g").map(|g| g.to_f64().iter().map(|g| g * ln).collect());
        let v = call.get(values_name(call))?.to_f64();
        let gk = values("gk");
        Ok(Self { q: values("q"), k: values("k"), v, w: values("w"), g, gk, beta: values("beta"), sizes })
    }

    /// The chunk of tokens `first ..` of a value head; its decays from the sums of gates, which are those of the call or, of gates by
    /// token, made here.
    fn head(&self, head: usize, first: usize, tokens: usize, by_token: bool) -> ChunkHead<'_> {
        let Sizes { k_heads, v_heads, k_dim, v_dim, .. } = self.sizes.all;
        let k_head = head / (v_heads / k_heads);
        fn rows(of: &[f64], at: impl Fn(usize) -> usize, dim: usize, tokens: usize) -> Vec<&[f64]> {
            (0..tokens).filter(|_| !of.is_empty()).map(|t| &of[at(t) * dim..][..dim]).collect()
        }
        let value = |t: usize| (first + t) * v_heads + head;
        let key = |t: usize| (first + t) * k_heads + k_head;
        let mut sum = 0.0;
        let mut gate = |t: usize| {
            let g = self.g.as_ref().map_or(0.0, |g| g[value(t)]);
            sum = if by_token { sum + if g < -150.0 { -150.0 } else { g } } else { g };
            sum.exp()
        };
        let mut sums = vec![0.0; k_dim];
        let mut channels = |t: usize| {
            for (sum, g) in sums.iter_mut().zip(&self.gk[value(t) * k_dim..][..k_dim]) {
                *sum = if by_token { *sum + g } else { *g };
            }
            sums.iter().map(|sum: &f64| sum.exp()).collect()
        };
        ChunkHead {
            channels: (0..tokens).filter(|_| !self.gk.is_empty()).map(&mut channels).collect(),
            q: rows(&self.q, key, k_dim, tokens),
            k: rows(&self.k, key, k_dim, tokens),
            v: rows(&self.v, value, v_dim, tokens),
            w: rows(&self.w, value, k_dim, tokens),
            decay: (0..tokens).map(&mut gate).collect(),
            beta: (0..tokens).filter(|_| !self.beta.is_empty()).map(|t| self.beta[value(t)]).collect(),
        }
    }
}

fn chunks_of(sequence: &HostSequence, chunk_size: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
    let (first, tokens) = (sequence.first, sequence.tokens);
    (0..tokens).step_by(chunk_size).map(move |at| (first + at, chunk_size.min(tokens - at)))
}

fn named(
    name: &'static str,
    shape: Vec<usize>,
    dtype: DType,
    values: Vec<f64>,
) -> (&'static str, HostTensorF64) {
    (name, bounded(dtype, HostTensorF64::new(shape, values)))
}

fn wy_reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let sizes = sizes(call)?;
    let Sizes { v_heads, k_dim, v_dim, .. } = sizes.all;
    let rows = HostRows::new(call, sizes)?;
    let x = call.optional("x").map(HostTensor::to_f64);
    let untouched = |dim: usize| vec![HostTensorF64::UNTOUCHED; rows.beta.len() * dim];
    let channels = if rows.gk.is_empty() { 1 } else { k_dim };
    let (mut w, mut u, mut sums) = (untouched(k_dim), untouched(v_dim), untouched(channels));
    let mut kg = untouched(k_dim);
    let mut size = vec![0.0; sums.len()];
    for sequence in sequences(call, &sizes) {
        for (first, tokens) in chunks_of(&sequence, sizes.chunk_size) {
            for head in 0..v_heads {
                let of = rows.head(head, first, tokens, x.is_none());
                let at = |t: usize| (first + t) * v_heads + head;
                let (of_w, of_u) = match &x {
                    None => of.wy(&of.inverse(), tokens),
                    Some(x) => {
                        let x: Vec<f64> = (0..tokens)
                            .flat_map(|t| x[at(t) * sizes.chunk_size..][..sizes.chunk_size].to_vec())
                            .collect();
                        of.wy(&x, sizes.chunk_size)
                    }
                };
                for t in 0..tokens {
                    let put = |to: &mut [f64], from: &[f64]| {
                        let to = &mut to[at(t) * from.len()..][..from.len()];
                        to.copy_from_slice(from);
                        if sequence.poison {
                            to.fill(f64::NAN);
                        }
                    };
                    put(&mut w, &of_w[t]);
                    put(&mut u, &of_u[t]);
                    for d in 0..channels {
                        let at = at(t) * channels + d;
                        sums[at] = of.channels.get(t).map_or(of.decay[t], |decays| decays[d]).ln();
                        size[at] = sums[at].abs();
                    }
                    if let (Some(own), Some(last)) = (of.channels.get(t), of.channels.last()) {
                        let decayed: Vec<f64> = (0..k_dim).map(|d| of.k[t][d] * last[d] / own[d]).collect();
                        kg[at(t) * k_dim..][..k_dim].copy_from_slice(&decayed);
                    }
                }
            }
        }
    }
    let dtype = call.get("k")?.dtype();
    let mut made = Vec::new();
    if x.is_none() {
        made.push(("sums", HostTensorF64::new(sums_shape(call, &sizes), sums).with_magnitudes(size)));
    }
    made.push(named("w", sizes.of_heads(&[k_dim]), dtype, w));
    made.push(named("u", sizes.of_heads(&[v_dim]), dtype, u));
    if x.is_none() && !rows.gk.is_empty() {
        made.push(named("kg", sizes.of_heads(&[k_dim]), dtype, kg));
    }
    Ok(made)
}

fn states_reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let sizes = sizes(call)?;
    let Sizes { v_heads, k_dim, v_dim, .. } = sizes.all;
    let rows = HostRows::new(call, sizes)?;
    let (of_states, of_h) = (layout(call)?, h_layout(call)?);
    let slots = integers(call, "state_indices");
    expect_determined(call, &sizes.all, slots.as_deref(), None)?;
    let mut pool = call.optional("state_pool").map(HostTensor::to_f64);
    let initial = call.optional("initial_state").map(HostTensor::to_f64);
    let (state_len, all) = (k_dim * v_dim, v_heads * k_dim * v_dim);
    let mut v_new = vec![HostTensorF64::UNTOUCHED; rows.v.len()];
    let mut h = vec![HostTensorF64::UNTOUCHED; sizes.snapshots(of_h).iter().product()];
    let mut last = vec![HostTensorF64::UNTOUCHED; sizes.all.sequences * all];
    let stored = |state: &[f64], layout| match layout {
        StateLayout::Kv => state.to_vec(),
        StateLayout::Vk => transposed(state, k_dim, v_dim),
    };
    for (n, sequence) in sequences(call, &sizes).iter().enumerate() {
        let slot = slots.as_ref().map_or(n as i64, |slots| slots[n]);
        let poison = sequence.poison || (pool.is_some() && slot >= sizes.all.n_slots as i64);
        for head in 0..v_heads {
            let from = pool.as_ref().or(initial.as_ref()).filter(|_| slot >= 0 && !poison);
            let mut state = from.map_or(vec![0.0; state_len], |states| {
                let state = &states[slot as usize * all + head * state_len..][..state_len];
                match of_states {
                    StateLayout::Kv => state.to_vec(),
                    StateLayout::Vk => transposed(state, v_dim, k_dim),
                }
            });
            if poison {
                state.fill(f64::NAN);
            }
            for (c, (first, tokens)) in chunks_of(sequence, sizes.chunk_size).enumerate() {
                let at = ((sequence.chunk + c) * v_heads + head) * state_len;
                h[at..][..state_len].copy_from_slice(&stored(&state, of_h));
                let new = rows.head(head, first, tokens, false).states(&mut state);
                for (t, new) in new.iter().enumerate() {
                    v_new[((first + t) * v_heads + head) * v_dim..][..v_dim].copy_from_slice(new);
                }
            }
            if poison {
                continue;
            }
            let state = stored(&state, of_states);
            match &mut pool {
                Some(pool) if slot >= 0 && sequence.tokens > 0 => {
                    pool[slot as usize * all + head * state_len..][..state_len].copy_from_slice(&state);
                }
                None => last[n * all + head * state_len..][..state_len].copy_from_slice(&state),
                _ => {}
            }
        }
    }
    let dtype = call.get("k")?.dtype();
    let mut made = Vec::new();
    if let (Some(pool), Some(spec)) = (pool, call.optional("state_pool")) {
        made.push(named("state_pool", spec.shape().to_vec(), dtype, pool));
    }
    if call.wants("h") {
        made.push(named("h", sizes.snapshots(of_h), dtype, h));
    }
    if call.wants("v_new") {
        made.push(named("v_new", sizes.of_heads(&[v_dim]), dtype, v_new));
    }
    if call.wants("final_state") {
        let shape = [&[sizes.all.sequences], &sizes.all.state(of_states)[..]].concat();
        made.push(named("final_state", shape, dtype, last));
    }
    Ok(made)
}

fn outputs_reference(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let sizes = sizes(call)?;
    let Sizes { v_heads, k_dim, v_dim, .. } = sizes.all;
    let rows = HostRows::new(call, sizes)?;
    let h = call.get("h")?.to_f64();
    let of_h = h_layout(call)?;
    let scale = scale(call)?.map_or(1.0 / (k_dim as f64).sqrt(), f64::from);
    let mut o = vec![HostTensorF64::UNTOUCHED; rows.v.len()];
    for sequence in sequences(call, &sizes) {
        for (c, (first, tokens)) in chunks_of(&sequence, sizes.chunk_size).enumerate() {
            for head in 0..v_heads {
                let stored = &h[((sequence.chunk + c) * v_heads + head) * k_dim * v_dim..][..k_dim * v_dim];
                let state = match of_h {
                    StateLayout::Kv => stored.to_vec(),
                    StateLayout::Vk => transposed(stored, v_dim, k_dim),
                };
                let made = rows.head(head, first, tokens, false).outputs(&state, scale);
                for (t, made) in made.iter().enumerate() {
                    let to = &mut o[((first + t) * v_heads + head) * v_dim..][..v_dim];
                    to.copy_from_slice(made);
                    if sequence.poison {
                        to.fill(f64::NAN);
                    }
                }
            }
        }
    }
    Ok(vec![named("o", sizes.of_heads(&[v_dim]), call.get("q")?.dtype(), o)])
}
