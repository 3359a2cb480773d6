//! `fused_recurrent`, `fused_sigmoid_gating_recurrent`, `fused_rearrange_sigmoid_gdr`.

use crate::recurrent::packed_columns;
use crate::reference::{Head, Token, log_decay, sigmoid};
use crate::sizes::{Shapes, Sizes};
use crate::{
    GateBias, Gates, RearrangedInputs, RecurrentInputs, RecurrentOptions, SigmoidGates, SigmoidInputs,
    Softplus, StateElement, StateLayout, States, kernels,
};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensor, HostTensorF64,
    Inputs, Named, Operator, Outputs, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Result, Stream, bf16, with_float};

pub(super) const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
pub(super) const F32: &[DType] = &[DType::F32];
const I32: &[DType] = &[DType::I32];
pub(super) const STATE: &[DType] = &[DType::F32, DType::Bf16];

/// Keys with a norm of about one: otherwise states grow.
pub(super) const KEYS: Sample = Sample::Normal { mean: 0.0, deviation: 0.1 };
pub(super) const LOG_DECAYS: Sample = Sample::Uniform { low: -1.0, high: 0.0 };
/// Replaced by that of the call.
pub(super) const ANY: Tolerance = Tolerance::Reduction;

pub(super) const Q: ArgSpec =
    ArgSpec::input("q", FLOATS, 4, "[B, T, k_heads, K], or [T, k_heads, K] if packed").ranks(3, 4);
pub(super) const V: ArgSpec =
    ArgSpec::input("v", FLOATS, 4, "[B, T, v_heads, V], or [T, v_heads, V] if packed").ranks(3, 4);
pub(super) const POOL: ArgSpec =
    ArgSpec::updated("state_pool", ANY, STATE, 4, "[slots, v_heads, K, V], or V, K by layout");
pub(super) const INDICES: ArgSpec = ArgSpec::input("state_indices", I32, 1, "[N] or [N, states]")
    .ranks(1, 2)
    .sampled(Sample::Distinct { below: EXAMPLE_SLOTS });
pub(super) const CU_SEQLENS: ArgSpec =
    ArgSpec::input("cu_seqlens", I32, 1, "[N + 1]").sampled(Sample::StartsOf("q")).optional();
/// Slots of an example's pool, at least.
const EXAMPLE_SLOTS: i64 = 8;
/// Outputs that are states.
const STATES: [&str; 2] = ["state_pool", "final_state"];

pub(super) const SCALE: ScalarSpec = ScalarSpec {
    name: "scale",
    default: Scalar::Float(0.0),
    choices: &[],
    summary: "factor of the output; 0: K^(-1/2)",
};
pub(super) const L2NORM: ScalarSpec = ScalarSpec {
    name: "qk_l2norm",
    default: Scalar::Bool(false),
    choices: &[],
    summary: "q and k are divided by their norms",
};
pub(super) const LAYOUT: ScalarSpec = ScalarSpec {
    name: "layout",
    default: Scalar::Choice("kv"),
    choices: &["kv", "vk"],
    summary: "the last axes of states",
};

macro_rules! case {
    ($label:expr; $($scalar:ident = $value:expr),*; $($arg:ident $dtype:ident $n:tt)+) => {
        Case {
            label: $label,
            tensors: &[$((stringify!($arg), DType::$dtype, &$n)),+],
            scalars: &[$((stringify!($scalar), $value)),*],
        }
    };
}
pub(super) use case;

pub(super) const VK: Scalar = Scalar::Choice("vk");
pub(super) const ON: Scalar = Scalar::Bool(true);

pub(crate) const FUSED_RECURRENT: Operator = Operator {
    name: "fused_recurrent",
    family: "hk-gdr",
    summary: "S = S~ + k d^T, d = beta (v - S~^T k), o = scale S^T q, S~ = exp(g) exp(gk) exp(gv) S, token by token",
    args: &[
        Q.sampled(KEYS),
        ArgSpec { name: "k", shape: "as q", ..Q.sampled(KEYS) },
        V,
        ArgSpec::input("g", F32, 3, "[.., v_heads]").ranks(2, 3).sampled(LOG_DECAYS).optional(),
        ArgSpec::input("gk", F32, 4, "[.., v_heads, K]").ranks(3, 4).sampled(LOG_DECAYS).optional(),
        ArgSpec::input("gv", F32, 4, "[.., v_heads, V]").ranks(3, 4).sampled(LOG_DECAYS).optional(),
        ArgSpec::input("beta", F32, 3, "[.., v_heads] or [.., v_heads, V]")
            .ranks(2, 4)
            .sampled(Sample::Uniform { low: 0.0, high: 1.0 })
            .optional(),
        ArgSpec::input("initial_state", STATE, 4, "[N, v_heads, K, V], or V, K by layout").optional(),
        POOL.optional(),
        INDICES.optional(),
        ArgSpec::input("num_accepted_tokens", I32, 1, "[N]")
            .sampled(Sample::Integers { low: 1, high: 3 })
            .optional(),
        CU_SEQLENS,
        ArgSpec::output("o", ANY, FLOATS, 4, "as v").ranks(3, 4),
        ArgSpec::output("final_state", ANY, STATE, 4, "as initial_state").optional(),
    ],
    scalars: &[SCALE, L2NORM, LAYOUT],
    kernels: &[&kernels::RECURRENT],
    cases: &[
        case!("Qwen3-Next, 8 sequences, one token each"; qk_l2norm = ON; q Bf16 [8, 1, 16, 128] k Bf16 [8, 1, 16, 128]
            v Bf16 [8, 1, 32, 128] g F32 [8, 1, 32] beta F32 [8, 1, 32] state_pool F32 [8, 32, 128, 128] state_indices I32 [8]),
        case!("Qwen3-Next at TP8, 4 sequences, bf16 states, rows of k"; qk_l2norm = ON, layout = VK;
            q Bf16 [4, 1, 2, 128] k Bf16 [4, 1, 2, 128] v Bf16 [4, 1, 4, 128] g F32 [4, 1, 4] beta F32 [4, 1, 4]
            state_pool Bf16 [8, 4, 128, 128] state_indices I32 [4]),
        case!("Kimi Linear at TP8, 2 sequences, 3 tokens, gates by channel"; qk_l2norm = ON; q Bf16 [2, 3, 4, 128] k Bf16 [2, 3, 4, 128]
            v Bf16 [2, 3, 4, 128] gk F32 [2, 3, 4, 128] beta F32 [2, 3, 4] state_pool F32 [8, 4, 128, 128]
            state_indices I32 [2, 3] num_accepted_tokens I32 [2]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 1 sequence"; qk_l2norm = ON; q Bf16 [1, 1, 16, 128] k Bf16 [1, 1, 16, 128] v Bf16 [1, 1, 32, 128]
            g F32 [1, 1, 32] beta F32 [1, 1, 32] state_pool F32 [8, 32, 128, 128] state_indices I32 [1]),
        case!("Qwen3-Next, 8 sequences"; qk_l2norm = ON; q Bf16 [8, 1, 16, 128] k Bf16 [8, 1, 16, 128] v Bf16 [8, 1, 32, 128]
            g F32 [8, 1, 32] beta F32 [8, 1, 32] state_pool F32 [8, 32, 128, 128] state_indices I32 [8]),
        case!("Qwen3-Next, 64 sequences"; qk_l2norm = ON; q Bf16 [64, 1, 16, 128] k Bf16 [64, 1, 16, 128] v Bf16 [64, 1, 32, 128]
            g F32 [64, 1, 32] beta F32 [64, 1, 32] initial_state F32 [64, 32, 128, 128] final_state F32 [64, 32, 128, 128]),
        case!("Qwen3-Next, 256 sequences"; qk_l2norm = ON; q Bf16 [256, 1, 16, 128] k Bf16 [256, 1, 16, 128]
            v Bf16 [256, 1, 32, 128] g F32 [256, 1, 32] beta F32 [256, 1, 32]
            initial_state F32 [256, 32, 128, 128] final_state F32 [256, 32, 128, 128]),
        case!("Qwen3-Next, 256 sequences, bf16 states"; qk_l2norm = ON; q Bf16 [256, 1, 16, 128] k Bf16 [256, 1, 16, 128]
            v Bf16 [256, 1, 32, 128] g F32 [256, 1, 32] beta F32 [256, 1, 32]
            initial_state Bf16 [256, 32, 128, 128] final_state Bf16 [256, 32, 128, 128]),
    ]),
    corners: &[
        // For each element type, layout and size: f32 states, then those of bf16.
        case!("rows of v, 128"; ; q Bf16 [2, 3, 1, 72] k Bf16 [2, 3, 1, 72] v Bf16 [2, 3, 2, 40] g F32 [2, 3, 2] beta F32 [2, 3, 2]
            initial_state F32 [2, 2, 72, 40] final_state F32 [2, 2, 72, 40]),
        case!("rows of v, 256"; qk_l2norm = ON; q Bf16 [9, 1, 136] k Bf16 [9, 1, 136] v Bf16 [9, 2, 24] gk F32 [9, 2, 136]
            cu_seqlens I32 [4] initial_state F32 [3, 2, 136, 24] final_state F32 [3, 2, 136, 24]),
        case!("rows of k, 128"; layout = VK, scale = Scalar::Float(0.7); q Bf16 [2, 2, 1, 128] k Bf16 [2, 2, 1, 128] v Bf16 [2, 2, 1, 16]
            gv F32 [2, 2, 1, 16] state_pool F32 [8, 1, 16, 128] state_indices I32 [2, 2] num_accepted_tokens I32 [2]),
        case!("rows of k, 256"; layout = VK; q Bf16 [1, 2, 1, 256] k Bf16 [1, 2, 1, 256] v Bf16 [1, 2, 1, 8] beta F32 [1, 2, 1, 8]
            state_pool F32 [8, 1, 8, 256] state_indices I32 [1]),
        case!("by elements"; ; q Bf16 [2, 2, 1, 61] k Bf16 [2, 2, 1, 61] v Bf16 [2, 2, 2, 35] g F32 [2, 2, 2] beta F32 [2, 2, 2]
            initial_state F32 [2, 2, 61, 35] final_state F32 [2, 2, 61, 35]),
        case!("rows of v, 128"; ; q Bf16 [1, 3, 1, 128] k Bf16 [1, 3, 1, 128] v Bf16 [1, 3, 1, 72] g F32 [1, 3, 1]
            initial_state Bf16 [1, 1, 128, 72] final_state Bf16 [1, 1, 128, 72]),
        case!("rows of v, 256"; ; q Bf16 [1, 2, 1, 144] k Bf16 [1, 2, 1, 144] v Bf16 [1, 2, 1, 40] g F32 [1, 2, 1]
            state_pool Bf16 [8, 1, 144, 40] state_indices I32 [1, 2]),
        case!("rows of k, 128"; layout = VK; q Bf16 [1, 2, 1, 64] k Bf16 [1, 2, 1, 64] v Bf16 [1, 2, 1, 40] g F32 [1, 2, 1]
            gk F32 [1, 2, 1, 64] initial_state Bf16 [1, 1, 40, 64] final_state Bf16 [1, 1, 40, 64]),
        case!("rows of k, 256"; layout = VK; q Bf16 [1, 2, 1, 200] k Bf16 [1, 2, 1, 200] v Bf16 [1, 2, 1, 16] g F32 [1, 2, 1]
            initial_state Bf16 [1, 1, 16, 200] final_state Bf16 [1, 1, 16, 200]),
        case!("by elements"; layout = VK; q Bf16 [1, 2, 1, 130] k Bf16 [1, 2, 1, 130] v Bf16 [1, 2, 1, 9] gk F32 [1, 2, 1, 130]
            gv F32 [1, 2, 1, 9] beta F32 [1, 2, 1, 9] initial_state Bf16 [1, 1, 9, 130] final_state Bf16 [1, 1, 9, 130]),
        case!("rows of v, 128"; ; q F16 [1, 2, 1, 16] k F16 [1, 2, 1, 16] v F16 [1, 2, 3, 16] gv F32 [1, 2, 3, 16]
            beta F32 [1, 2, 3, 16] initial_state F32 [1, 3, 16, 16]),
        case!("rows of v, 256"; ; q F16 [1, 2, 1, 256] k F16 [1, 2, 1, 256] v F16 [1, 2, 1, 40] final_state F32 [1, 1, 256, 40]),
        case!("rows of k, 128"; layout = VK; q F16 [1, 2, 1, 128] k F16 [1, 2, 1, 128] v F16 [1, 2, 1, 32]
            final_state F32 [1, 1, 32, 128]),
        case!("rows of k, 256"; layout = VK; q F16 [1, 1, 1, 192] k F16 [1, 1, 1, 192] v F16 [1, 1, 1, 24]
            initial_state F32 [1, 1, 24, 192]),
        case!("by elements"; ; q F16 [1, 2, 1, 7] k F16 [1, 2, 1, 7] v F16 [1, 2, 1, 5] initial_state F32 [1, 1, 7, 5]),
        case!("rows of v, 128"; ; q F16 [1, 2, 1, 32] k F16 [1, 2, 1, 32] v F16 [1, 2, 1, 128] initial_state Bf16 [1, 1, 32, 128]
            final_state Bf16 [1, 1, 32, 128]),
        case!("rows of v, 256"; ; q F16 [1, 1, 1, 136] k F16 [1, 1, 1, 136] v F16 [1, 1, 1, 8] initial_state Bf16 [1, 1, 136, 8]),
        case!("rows of k, 128"; layout = VK; q F16 [1, 2, 1, 72] k F16 [1, 2, 1, 72] v F16 [1, 2, 1, 8] initial_state Bf16 [1, 1, 8, 72]),
        case!("rows of k, 256"; layout = VK; q F16 [1, 1, 1, 256] k F16 [1, 1, 1, 256] v F16 [1, 1, 1, 8]
            initial_state Bf16 [1, 1, 8, 256]),
        case!("by elements"; ; q F16 [1, 2, 1, 5] k F16 [1, 2, 1, 5] v F16 [1, 2, 1, 3] initial_state Bf16 [1, 1, 5, 3]),
        case!("rows of v, 128"; ; q F32 [1, 2, 1, 100] k F32 [1, 2, 1, 100] v F32 [1, 2, 1, 60] g F32 [1, 2, 1]
            gk F32 [1, 2, 1, 100] initial_state F32 [1, 1, 100, 60] final_state F32 [1, 1, 100, 60]),
        case!("rows of v, 256"; ; q F32 [1, 2, 1, 140] k F32 [1, 2, 1, 140] v F32 [1, 2, 1, 12] initial_state F32 [1, 1, 140, 12]),
        case!("rows of k, 128"; layout = VK; q F32 [1, 2, 1, 60] k F32 [1, 2, 1, 60] v F32 [1, 2, 1, 36] gv F32 [1, 2, 1, 36]
            initial_state F32 [1, 1, 36, 60] final_state F32 [1, 1, 36, 60]),
        case!("rows of k, 256"; layout = VK; q F32 [1, 1, 1, 244] k F32 [1, 1, 1, 244] v F32 [1, 1, 1, 4]
            initial_state F32 [1, 1, 4, 244]),
        case!("by elements"; ; q F32 [1, 2, 1, 1] k F32 [1, 2, 1, 1] v F32 [1, 2, 1, 1] initial_state F32 [1, 1, 1, 1]),
        case!("by elements"; ; q F32 [1, 2, 1, 8] k F32 [1, 2, 1, 8] v F32 [1, 2, 1, 8] initial_state Bf16 [1, 1, 8, 8]),
    ],
    outputs,
    run: |stream, call| {
        let dtype = states_dtype(call);
        let (inputs, outputs) = call.split();
        with_float!("fused_recurrent", "q", inputs.get("q")?.dtype(), T => {
            if dtype == DType::Bf16 {
                run::<T, bf16>(stream, inputs, outputs)
            } else {
                run::<T, f32>(stream, inputs, outputs)
            }
        })
    },
    reference: |call| recurrence(call, &gates_of(call)?),
    traffic,
};

const A: ArgSpec = ArgSpec::input("a", FLOATS, 3, "[.., v_heads] or [.., v_heads, K]").ranks(2, 4);
const B: ArgSpec = ArgSpec::input("b", FLOATS, 3, "[.., v_heads]").ranks(2, 3);
pub(super) const A_LOG: ArgSpec =
    ArgSpec::input("A_log", F32, 1, "[v_heads]").sampled(Sample::Uniform { low: -2.0, high: 1.0 });
const DT_BIAS: ArgSpec = ArgSpec::input("dt_bias", FLOATS, 1, "[v_heads] or [v_heads, K]").ranks(1, 2);
pub(super) const SOFTPLUS_BETA: ScalarSpec = ScalarSpec {
    name: "softplus_beta",
    default: Scalar::Float(1.0),
    choices: &[],
    summary: "softplus(x) = ln(1 + exp(beta x)) / beta",
};
pub(super) const SOFTPLUS_THRESHOLD: ScalarSpec = ScalarSpec {
    name: "softplus_threshold",
    default: Scalar::Float(20.0),
    choices: &[],
    summary: "softplus(x) = x where beta x is above it",
};
pub(super) const fn size(name: &'static str, default: u64, summary: &'static str) -> ScalarSpec {
    ScalarSpec { name, default: Scalar::Count(default), choices: &[], summary }
}
pub(super) const INITIAL: ArgSpec =
    ArgSpec::input("initial_state", STATE, 4, "[N, v_heads, K, V], or V, K by layout").optional();
const ACCEPTED: ArgSpec = ArgSpec::input("num_accepted_tokens", I32, 1, "[N]")
    .sampled(Sample::Integers { low: 1, high: 3 })
    .optional();
pub(super) const O: ArgSpec = ArgSpec::output("o", ANY, FLOATS, 4, "as v").ranks(3, 4);
pub(super) const LAST: ArgSpec = ArgSpec::output("final_state", ANY, STATE, 4, "as initial_state").optional();

pub(crate) const FUSED_SIGMOID_GATING_RECURRENT: Operator = Operator {
    name: "fused_sigmoid_gating_recurrent",
    family: "hk-gdr",
    summary: "fused_recurrent with g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)",
    args: &[
        A_LOG,
        A,
        DT_BIAS,
        Q.sampled(KEYS),
        ArgSpec { name: "k", shape: "as q", ..Q.sampled(KEYS) },
        V,
        B,
        INITIAL,
        POOL.optional(),
        INDICES.optional(),
        ACCEPTED,
        CU_SEQLENS,
        O,
        LAST,
    ],
    scalars: &[SCALE, L2NORM, LAYOUT, SOFTPLUS_BETA, SOFTPLUS_THRESHOLD],
    kernels: &[&kernels::RECURRENT],
    cases: &[
        case!("Qwen3-Next, 8 sequences, one token each"; qk_l2norm = ON; A_log F32 [32] a Bf16 [8, 1, 32] dt_bias F32 [32]
            q Bf16 [8, 1, 16, 128] k Bf16 [8, 1, 16, 128] v Bf16 [8, 1, 32, 128] b Bf16 [8, 1, 32]
            state_pool F32 [8, 32, 128, 128] state_indices I32 [8]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 64 sequences"; qk_l2norm = ON; A_log F32 [32] a Bf16 [64, 1, 32] dt_bias F32 [32]
            q Bf16 [64, 1, 16, 128] k Bf16 [64, 1, 16, 128] v Bf16 [64, 1, 32, 128] b Bf16 [64, 1, 32]
            initial_state F32 [64, 32, 128, 128] final_state F32 [64, 32, 128, 128]),
    ]),
    corners: &[
        case!("rows of v"; softplus_beta = Scalar::Float(0.5), softplus_threshold = Scalar::Float(0.25); A_log F32 [4] a Bf16 [2, 3, 4]
            dt_bias Bf16 [4] q Bf16 [2, 3, 2, 64] k Bf16 [2, 3, 2, 64] v Bf16 [2, 3, 4, 40] b Bf16 [2, 3, 4]
            state_pool F32 [8, 4, 64, 40] state_indices I32 [2]),
        case!("rows of k, gates by channel"; layout = VK, qk_l2norm = ON; A_log F32 [2] a F16 [9, 2, 64] dt_bias F32 [2, 64]
            q F16 [9, 1, 64] k F16 [9, 1, 64] v F16 [9, 2, 40] b F16 [9, 2] cu_seqlens I32 [4]
            initial_state F32 [3, 2, 40, 64] final_state F32 [3, 2, 40, 64]),
        case!("by elements, gates by channel"; scale = Scalar::Float(0.7); A_log F32 [2] a F32 [1, 3, 2, 9] dt_bias F32 [2, 9] q F32 [1, 3, 1, 9]
            k F32 [1, 3, 1, 9] v F32 [1, 3, 2, 5] b F32 [1, 3, 2] state_pool Bf16 [8, 2, 9, 5] state_indices I32 [1, 3]
            num_accepted_tokens I32 [1]),
        case!("gates by channel"; ; A_log F32 [2] a Bf16 [1, 2, 2, 16] dt_bias Bf16 [2, 16] q Bf16 [1, 2, 1, 16]
            k Bf16 [1, 2, 1, 16] v Bf16 [1, 2, 2, 8] b Bf16 [1, 2, 2] initial_state F32 [1, 2, 16, 8]),
    ],
    outputs,
    run: run_with_gates,
    reference: |call| recurrence(call, &computed_gates(call, sizes(call)?.v_heads)?),
    traffic,
};

pub(crate) const FUSED_REARRANGE_SIGMOID_GDR: Operator = Operator {
    name: "fused_rearrange_sigmoid_gdr",
    family: "hk-gdr",
    summary: "fused_sigmoid_gating_recurrent with q, k and v side by side",
    args: &[
        A_LOG,
        A,
        DT_BIAS,
        ArgSpec::input("qkv", FLOATS, 3, "[B, T, 2 k_heads K + v_heads V], or [T, ..] if packed")
            .ranks(2, 3)
            .sampled(KEYS),
        B,
        INITIAL,
        POOL.optional(),
        INDICES.optional(),
        ACCEPTED,
        ArgSpec { sample: Sample::StartsOf("qkv"), ..CU_SEQLENS },
        O,
        LAST,
    ],
    scalars: &[
        SCALE,
        L2NORM,
        LAYOUT,
        SOFTPLUS_BETA,
        SOFTPLUS_THRESHOLD,
        size("k_heads", 16, "heads of keys"),
        size("k_dim", 128, "elements of a key"),
        size("v_dim", 128, "elements of a value"),
    ],
    kernels: &[&kernels::RECURRENT],
    cases: &[
        case!("Qwen3-Next, 4 sequences, three speculative tokens each"; qk_l2norm = ON, layout = VK; A_log F32 [32] a Bf16 [4, 3, 32]
            dt_bias F32 [32] qkv Bf16 [4, 3, 8192] b Bf16 [4, 3, 32] state_pool F32 [12, 32, 128, 128] state_indices I32 [4, 3]
            num_accepted_tokens I32 [4]),
    ],
    bench: BenchSizes::Cases(&[
        case!("Qwen3-Next, 64 sequences"; qk_l2norm = ON, layout = VK; A_log F32 [32] a Bf16 [64, 1, 32] dt_bias F32 [32]
            qkv Bf16 [64, 1, 8192] b Bf16 [64, 1, 32] initial_state F32 [64, 32, 128, 128]
            final_state F32 [64, 32, 128, 128]),
    ]),
    corners: &[
        case!("rows of k"; layout = VK, k_heads = Scalar::Count(2), k_dim = Scalar::Count(64), v_dim = Scalar::Count(40);
            A_log F32 [4] a Bf16 [2, 3, 4] dt_bias Bf16 [4] qkv Bf16 [2, 3, 416] b Bf16 [2, 3, 4] state_pool F32 [8, 4, 40, 64]
            state_indices I32 [2, 3] num_accepted_tokens I32 [2]),
        case!("packed, by elements"; qk_l2norm = ON, scale = Scalar::Float(0.7), softplus_beta = Scalar::Float(2.0),
            softplus_threshold = Scalar::Float(0.25), k_heads = Scalar::Count(1), k_dim = Scalar::Count(9), v_dim = Scalar::Count(5);
            A_log F32 [2] a F32 [9, 2, 9] dt_bias F32 [2, 9] qkv F32 [9, 28] b F32 [9, 2] cu_seqlens I32 [4]
            initial_state F32 [3, 2, 9, 5] final_state F32 [3, 2, 9, 5]),
    ],
    outputs,
    run: run_with_gates,
    reference: |call| recurrence(call, &computed_gates(call, sizes(call)?.v_heads)?),
    traffic,
};

pub(super) fn layout<D: Described>(call: &Call<D>) -> Result<StateLayout> {
    Ok(if call.choice("layout")? == "vk" { StateLayout::Vk } else { StateLayout::Kv })
}

pub(super) fn state_dtype<D: Described>(call: &Call<D>) -> DType {
    let given = ["initial_state", "state_pool"].into_iter().find_map(|name| call.optional(name));
    given.map_or(DType::F32, D::dtype)
}

pub(super) fn scale<D: Described>(call: &Call<D>) -> Result<Option<f32>> {
    let scale = call.float("scale")? as f32;
    Ok((scale != 0.0).then_some(scale))
}

/// The shapes of q, k and v; of a call that has them side by side, from its scalars and `b`.
fn qkv_shapes<D: Described>(call: &Call<D>) -> Result<[Vec<usize>; 3]> {
    let Some(qkv) = call.optional("qkv") else {
        return Ok([call.get("q")?, call.get("k")?, call.get("v")?].map(|t| t.shape().to_vec()));
    };
    let op = call.operator().name;
    let packed = call.optional("cu_seqlens").is_some();
    let [k_heads, k_dim, v_dim] = [call.size("k_heads")?, call.size("k_dim")?, call.size("v_dim")?];
    let v_heads = call.get("b")?.shape().last().copied().unwrap_or(0);
    packed_columns(op, qkv.shape(), packed, [k_heads, v_heads], [k_dim, v_dim])?;
    let rows = &qkv.shape()[..qkv.shape().len() - 1];
    let shape = |heads, dim| [rows, &[heads, dim]].concat();
    Ok([shape(k_heads, k_dim), shape(k_heads, k_dim), shape(v_heads, v_dim)])
}

/// The name of the tensor whose type is that of all operands.
fn first<D: Described>(call: &Call<D>) -> &'static str {
    if call.operator().arg("qkv").is_some() { "qkv" } else { "q" }
}

/// The sizes of a call, from shapes and types that fit each other.
fn sizes<D: Described>(call: &Call<D>) -> Result<Sizes> {
    let op = call.operator().name;
    let of = first(call);
    let dtype = call.get(of)?.dtype();
    for arg in ["k", "v", "a", "b"] {
        if let Some(got) = call.optional(arg).map(D::dtype).filter(|got| *got != dtype) {
            return Err(Error::dtype(op, arg, got, format!("{dtype} (dtype of {of})")));
        }
    }
    if let Some(got) = call.optional("dt_bias").map(D::dtype).filter(|got| ![dtype, DType::F32].contains(got))
    {
        return Err(Error::dtype(op, "dt_bias", got, format!("{dtype} (dtype of {of}) or f32")));
    }
    let [q, k, v] = qkv_shapes(call)?;
    let shape = |name| call.optional(name).map(D::shape);
    let shapes = Shapes {
        op,
        names: None,
        layout: layout(call)?,
        q: &q,
        k: &k,
        v: &v,
        cu_seqlens: shape("cu_seqlens"),
        g: shape("g"),
        gk: shape("gk"),
        gv: shape("gv"),
        beta: shape("beta"),
        a: shape("a"),
        b: shape("b"),
        a_log: shape("A_log"),
        dt_bias: shape("dt_bias"),
        initial_state: shape("initial_state"),
        state_pool: shape("state_pool"),
        state_indices: shape("state_indices"),
        num_accepted_tokens: shape("num_accepted_tokens"),
    };
    let sizes = shapes.check()?;
    if let Some(scale) = scale(call)?
        && !(scale > 0.0 && scale.is_finite())
    {
        return Err(Error::argument(op, "scale", scale, "positive and finite"));
    }
    if call.optional("a").is_some() {
        softplus(call)?.check(op)?;
    }
    Ok(sizes)
}

pub(super) fn softplus<D: Described>(call: &Call<D>) -> Result<Softplus> {
    let [beta, threshold] = [call.float("softplus_beta")?, call.float("softplus_threshold")?];
    Ok(Softplus { beta: beta as f32, threshold: threshold as f32 })
}

/// Where states come from and go to, of a call on a device.
pub(super) fn states<'a, S: StateElement>(
    inputs: &Inputs<'a>,
    outputs: &mut Outputs<'a>,
) -> Result<States<'a, S>> {
    Ok(match outputs.take_optional::<S>("state_pool")? {
        Some(pool) => States::Pool {
            pool,
            indices: inputs.view("state_indices")?,
            accepted: inputs.optional_view("num_accepted_tokens")?,
        },
        None => States::Dense {
            initial: inputs.optional_view("initial_state")?,
            last: outputs.take_optional("final_state")?,
        },
    })
}

fn options(inputs: &Inputs) -> Result<RecurrentOptions> {
    Ok(RecurrentOptions {
        scale: scale(inputs)?,
        qk_l2norm: inputs.bool("qk_l2norm")?,
        layout: layout(inputs)?,
    })
}

/// Calls an operator with gates that are computed.
fn run_sigmoid<'a, T: Float, D: GateBias<T>, S: StateElement>(
    stream: &Stream,
    inputs: Inputs<'a>,
    mut outputs: Outputs<'a>,
) -> Result<()> {
    let gates = SigmoidGates::<T, D> {
        a: inputs.view("a")?,
        b: inputs.view("b")?,
        a_log: inputs.view("A_log")?,
        dt_bias: inputs.view("dt_bias")?,
        softplus: softplus(&inputs)?,
    };
    let cu_seqlens = inputs.optional_view("cu_seqlens")?;
    let states = states::<S>(&inputs, &mut outputs)?;
    let (o, options) = (outputs.take("o")?, options(&inputs)?);
    if inputs.operator().name == "fused_rearrange_sigmoid_gdr" {
        let [k_heads, k_dim, v_dim] = [inputs.size("k_heads")?, inputs.size("k_dim")?, inputs.size("v_dim")?];
        let qkv = inputs.view("qkv")?;
        let tensors = RearrangedInputs { qkv, gates, cu_seqlens, k_heads, k_dim, v_dim };
        return crate::fused_rearrange_sigmoid_gdr(stream, tensors, states, o, options);
    }
    let tensors =
        SigmoidInputs { q: inputs.view("q")?, k: inputs.view("k")?, v: inputs.view("v")?, gates, cu_seqlens };
    crate::fused_sigmoid_gating_recurrent(stream, tensors, states, o, options)
}

fn run_with_gates(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let of_states = states_dtype(call);
    let op = call.operator();
    let (inputs, outputs) = call.split();
    let dtype = inputs.get(first(&inputs))?.dtype();
    let f32_bias = inputs.get("dt_bias")?.dtype() == DType::F32;
    with_float!(op.name, "q", dtype, T => match (f32_bias, of_states) {
        (false, DType::Bf16) => run_sigmoid::<T, T, bf16>(stream, inputs, outputs),
        (false, _) => run_sigmoid::<T, T, f32>(stream, inputs, outputs),
        (true, DType::Bf16) => run_sigmoid::<T, f32, bf16>(stream, inputs, outputs),
        (true, _) => run_sigmoid::<T, f32, f32>(stream, inputs, outputs),
    })
}

/// The element type of the states of a call.
pub(super) fn states_dtype(call: &mut DeviceCall) -> DType {
    let given = call.outputs().find(|(name, _)| STATES.contains(name)).map(|(_, t)| t.dtype());
    given.unwrap_or_else(|| state_dtype(&call.split().0))
}

fn run<'a, T: Float, S: StateElement>(
    stream: &Stream,
    inputs: Inputs<'a>,
    mut outputs: Outputs<'a>,
) -> Result<()> {
    let states = states::<S>(&inputs, &mut outputs)?;
    let tensors = RecurrentInputs::<T> {
        q: inputs.view("q")?,
        k: inputs.view("k")?,
        v: inputs.view("v")?,
        gates: Gates {
            g: inputs.optional_view("g")?,
            gk: inputs.optional_view("gk")?,
            gv: inputs.optional_view("gv")?,
            beta: inputs.optional_view("beta")?,
        },
        cu_seqlens: inputs.optional_view("cu_seqlens")?,
    };
    crate::fused_recurrent(stream, tensors, states, outputs.take("o")?, options(&inputs)?)
}

/// The gates of all tokens and value heads, in f64.
pub(super) struct HostGates {
    pub g: Option<Vec<f64>>,
    pub gk: Option<Vec<f64>>,
    pub gv: Option<Vec<f64>>,
    pub beta: Option<Vec<f64>>,
}

pub(super) fn gates_of(call: &HostCall) -> Result<HostGates> {
    sizes(call)?;
    let values = |name| call.optional(name).map(HostTensor::to_f64);
    Ok(HostGates { g: values("g"), gk: values("gk"), gv: values("gv"), beta: values("beta") })
}

/// The gates of a call that computes them.
pub(super) fn computed_gates(call: &HostCall, v_heads: usize) -> Result<HostGates> {
    let Softplus { beta, threshold } = softplus(call)?;
    let [a, b] = [call.get("a")?.to_f64(), call.get("b")?.to_f64()];
    let [a_log, dt_bias] = [call.get("A_log")?.to_f64(), call.get("dt_bias")?.to_f64()];
    let width = dt_bias.len() / v_heads;
    let g = a.iter().enumerate().map(|(i, a)| {
        let head = i / width % v_heads;
        let x = a + dt_bias[head * width + i % width];
        log_decay(x, a_log[head], beta.into(), threshold.into())
    });
    let g = Some(g.collect());
    let beta = Some(b.iter().map(|b| sigmoid(*b)).collect());
    Ok(if call.get("dt_bias")?.shape().len() == 2 {
        HostGates { g: None, gk: g, gv: None, beta }
    } else {
        HostGates { g, gk: None, gv: None, beta }
    })
}

/// q, k and v, each contiguous.
fn qkv_values(call: &HostCall, sizes: &Sizes) -> Result<[Vec<f64>; 3]> {
    let Some(qkv) = call.optional("qkv") else {
        return Ok([call.get("q")?.to_f64(), call.get("k")?.to_f64(), call.get("v")?.to_f64()]);
    };
    let (keys, values) = (sizes.k_heads * sizes.k_dim, sizes.v_heads * sizes.v_dim);
    let all = qkv.to_f64();
    let part = |from: usize, to: usize| {
        all.chunks(2 * keys + values).flat_map(|row| row[from..to].to_vec()).collect()
    };
    Ok([part(0, keys), part(keys, 2 * keys), part(2 * keys, 2 * keys + values)])
}

/// The integers of a tensor.
pub(super) fn integers(call: &HostCall, name: &str) -> Option<Vec<i64>> {
    Some(call.optional(name)?.to_f64().iter().map(|&v| v as i64).collect())
}

pub(super) fn recurrence(call: &HostCall, gates: &HostGates) -> Result<Named<HostTensorF64>> {
    let sizes = sizes(call)?;
    let Sizes { tokens, k_heads, v_heads, k_dim, v_dim, .. } = sizes;
    let layout = layout(call)?;
    let [q, k, v] = qkv_values(call, &sizes)?;
    let starts = integers(call, "cu_seqlens");
    let slots = integers(call, "state_indices");
    let accepted = integers(call, "num_accepted_tokens");
    let pooled = call.optional("state_pool").is_some();
    let mut states = call.optional("state_pool").map(HostTensor::to_f64);
    let initial = call.optional("initial_state").map(HostTensor::to_f64);
    let size = v_heads * k_dim * v_dim;
    expect_determined(call, &sizes, slots.as_deref(), accepted.as_deref())?;
    let mut last = vec![HostTensorF64::UNTOUCHED; sizes.sequences * size];
    let mut o = vec![HostTensorF64::UNTOUCHED; v.len()];
    let scale = scale(call)?.map_or(1.0 / (k_dim as f64).sqrt(), f64::from);
    let head = Head { k_dim, v_dim, scale, l2norm: call.bool("qk_l2norm")? };
    for n in 0..sizes.sequences {
        let (from, to) = starts.as_ref().map_or((0, tokens as i64), |s| (s[n], s[n + 1]));
        let within = |t: i64| t.clamp(0, tokens as i64) as usize;
        let first = within(from);
        let length = within(to).saturating_sub(first);
        let row = if starts.is_some() { first } else { n * tokens };
        let bad = from < 0 || to < from || to > tokens as i64;
        let slots_of = |slots: &'_ [i64]| slots[n * sizes.slot_cols..][..sizes.slot_cols].to_vec();
        let slots = slots.as_deref().map(slots_of);
        let column = accepted.as_ref().map_or(0, |a| a[n] - 1);
        let beyond = |slot: &i64| *slot >= sizes.n_slots as i64;
        let poison = bad
            || slots.as_ref().is_some_and(|slots| {
                !(0..slots.len() as i64).contains(&column)
                    || beyond(&slots[column as usize])
                    || (sizes.each_token
                        && (length > slots.len() || slots[..length.min(slots.len())].iter().any(beyond)))
            });
        if poison {
            o[row * v_heads * v_dim..][..length * v_heads * v_dim].fill(f64::NAN);
            continue;
        }
        let start = match (&states, &initial, &slots) {
            (Some(pool), _, Some(slots)) if slots[column as usize] >= 0 => {
                pool[slots[column as usize] as usize * size..][..size].to_vec()
            }
            (None, Some(initial), _) => initial[n * size..][..size].to_vec(),
            _ => vec![0.0; size],
        };
        for h in 0..v_heads {
            let stored = &start[h * k_dim * v_dim..][..k_dim * v_dim];
            let mut state = match layout {
                StateLayout::Kv => stored.to_vec(),
                StateLayout::Vk => transposed(stored, v_dim, k_dim),
            };
            let keep = |to: &mut [f64], slot: usize, state: &[f64]| {
                let stored = match layout {
                    StateLayout::Kv => state.to_vec(),
                    StateLayout::Vk => transposed(state, k_dim, v_dim),
                };
                to[slot * size + h * k_dim * v_dim..][..k_dim * v_dim].copy_from_slice(&stored);
            };
            for t in 0..length {
                let at = (row + t) * v_heads + h;
                let key = ((row + t) * k_heads + h / (v_heads / k_heads)) * k_dim;
                let part = |values: &'_ Option<Vec<f64>>, dim: usize| {
                    values.as_ref().map_or(vec![], |values| values[at * dim..][..dim].to_vec())
                };
                let beta = part(&gates.beta, if sizes.beta_of_v { v_dim } else { 1 });
                let token = Token {
                    q: &q[key..][..k_dim],
                    k: &k[key..][..k_dim],
                    v: &v[at * v_dim..][..v_dim],
                    g: gates.g.as_ref().map_or(0.0, |g| g[at]),
                    gk: &part(&gates.gk, k_dim),
                    gv: &part(&gates.gv, v_dim),
                    beta: if beta.is_empty() { &[1.0] } else { &beta },
                };
                o[at * v_dim..][..v_dim].copy_from_slice(&head.step(&mut state, &token));
                if let (true, Some(pool), Some(slots)) = (sizes.each_token, &mut states, &slots)
                    && slots[t] >= 0
                {
                    keep(pool, slots[t] as usize, &state);
                }
            }
            match (&mut states, &slots) {
                (Some(pool), Some(slots)) if !sizes.each_token && slots[0] >= 0 && length > 0 => {
                    keep(pool, slots[0] as usize, &state);
                }
                (None, _) => keep(&mut last, n, &state),
                _ => {}
            }
        }
    }
    let tensor = |shape: &[usize], dtype: DType, values: Vec<f64>| HostTensorF64 {
        tolerance: Some(tolerance(dtype, &values)),
        ..HostTensorF64::new(shape, values)
    };
    let mut outputs = Vec::new();
    if let (true, Some(pool), Some(spec)) = (pooled, states, call.optional("state_pool")) {
        outputs.push(("state_pool", tensor(spec.shape(), spec.dtype(), pool)));
    }
    let [_, _, v] = qkv_shapes(call)?;
    outputs.push(("o", tensor(&v, call.get(first(call))?.dtype(), o)));
    if call.wants("final_state") {
        let shape = [&[sizes.sequences], &sizes.state(layout)[..]].concat();
        outputs.push(("final_state", tensor(&shape, state_dtype(call), last)));
    }
    Ok(outputs)
}

/// One rounding to the type, and the errors of f32 sums relative to the size of all elements.
pub(super) fn tolerance(dtype: DType, values: &[f64]) -> Tolerance {
    let finite = values.iter().filter(|v| v.is_finite());
    let (n, squares) = finite.fold((0.0, 0.0), |(n, sum), v| (n + 1.0, sum + v * v));
    let rms = if n > 0.0 { f64::sqrt(squares / n) } else { 0.0 };
    let rtol = match dtype {
        DType::Bf16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => 2e-6,
    };
    let subnormal = if dtype == DType::F16 { 6e-8 } else { 0.0 };
    Tolerance::Within { rtol, atol: 2e-5 * rms + subnormal + f64::from(f32::MIN_POSITIVE) }
}

pub(super) fn transposed(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// Two sequences must not write one slot, nor one read what another writes.
pub(super) fn expect_determined(
    call: &HostCall,
    sizes: &Sizes,
    slots: Option<&[i64]>,
    accepted: Option<&[i64]>,
) -> Result<()> {
    let Some(slots) = slots else { return Ok(()) };
    let _ = accepted;
    let mut seen = std::collections::HashMap::new();
    for (i, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        let n = i / sizes.slot_cols;
        if *seen.entry(slot).or_insert(n) != n {
            let got = format!("slot {slot} of two sequences");
            return Err(Error::argument(
                call.operator().name,
                "state_indices",
                got,
                "slots of one sequence each",
            ));
        }
    }
    Ok(())
}

pub(super) fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let sizes = sizes(call)?;
    let [_, _, v] = qkv_shapes(call)?;
    let mut made = vec![("o", TensorSpec::new(call.get(first(call))?.dtype, v))];
    if call.wants("final_state") {
        if call.optional("state_pool").is_some() {
            let op = call.operator().name;
            return Err(Error::argument(op, "final_state", "asked for", "nothing beside state_pool"));
        }
        let shape = [&[sizes.sequences], &sizes.state(layout(call)?)[..]].concat();
        made.push(("final_state", TensorSpec::new(state_dtype(call), shape)));
    }
    Ok(made)
}

/// Every tensor once; of states only those of sequences.
fn traffic(call: &HostCall) -> Traffic {
    let mut traffic = Traffic::once(call);
    if let (Some(pool), Some(slots)) = (call.optional("state_pool"), integers(call, "state_indices")) {
        let bytes = pool.bytes().len() as u64;
        let slot = bytes / (pool.shape()[0] as u64).max(1);
        let sequences = call.get("state_indices").map_or(0, |t| t.shape()[0]) as u64;
        let written = slots.iter().filter(|slot| **slot >= 0).count() as u64;
        traffic.read = traffic.read - bytes + slot * sequences.min(written);
        traffic.written = traffic.written - bytes + slot * written;
    }
    traffic
}
