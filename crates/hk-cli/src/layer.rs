//! One decoder layer of Llama-3 8B on a prompt, in bf16 and with fp8 GEMMs, and sampling; the layer on a token each of some sequences, whose
//! keys are in a paged cache; the latent attention of DeepSeek-V3 on such tokens; a linear-attention layer of Qwen3-Next on a prompt, then
//! token by token; layers of experts of DeepSeek-V3 and GPT-OSS: each operator works on what the ones before it gave. Weights, logits and cached tokens are example data.

use crate::demo::{Row, measure};
use crate::{Failure, Result, operator};
use hk_core::DType::{self, Bf16, E8M0, F32, Fp4x2, I32, I64};
use hk_core::registry::{Call, Described as _, HostCall, HostTensor, Sample, Scalar, TensorSpec};
use hk_core::{Arch, Device, bf16};
use std::collections::HashMap;

/// Tokens of the prompt.
const TOKENS: usize = 128;
/// Sequences of which a token is sampled.
const SAMPLED: usize = 16;
const HIDDEN: usize = 4096;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const FFN: usize = 14336;
const VOCAB: usize = 128_256;
/// Base of the rotation's wavelengths.
const ROPE_BASE: f64 = 500_000.0;
/// Positions of the tables, and slots of the cache.
const CONTEXT: usize = 256;
const BLOCK: usize = 16;

/// Sequences of the decode step, one token each; tokens of each in the cache, with room for one more.
const BATCH: usize = 8;
const CACHED: i32 = 1024;
const PAGES: usize = (CACHED as usize + BLOCK) / BLOCK;
const POSITIONS: usize = 1152;

/// Sequences of latent attention, one token each; the heads of one of eight ranks.
const DECODED: usize = 4;
const LATENT_HEADS: usize = 16;
const NOPE: usize = 128;
const LATENT: usize = 512;
const PE: usize = 64;

/// Tokens of the prompt of linear attention, and those after it, one by one; the heads of one of eight ranks, of HEAD_DIM elements.
const PROMPT: usize = 256;
const NEXT: usize = 8;
const LINEAR_HIDDEN: usize = 2048;
const LINEAR_KEYS: usize = 2;
const LINEAR_VALUES: usize = 4;
/// Channels of q, k and v.
const CHANNELS: usize = (2 * LINEAR_KEYS + LINEAR_VALUES) * HEAD_DIM;

/// The 32 experts of rank 2 of eight, in order: the matrix of each of all experts, or -1.
const RANK: [i32; 256] = {
    let mut map = [-1; 256];
    let mut i = 0;
    while i < 32 {
        map[2 * 32 + i] = i as i32;
        i += 1;
    }
    map
};

/// Heads of q, k and v, one after the other.
const QKV: usize = (HEADS + 2 * KV_HEADS) * HEAD_DIM;

/// Where an input comes from.
enum From {
    /// Example data as the operator describes it.
    Sample(DType, &'static [usize]),
    /// Weights of a GEMM: normal, such that outputs are about as large as inputs.
    Weights(&'static [usize]),
    /// The same, quantized to the fp8 that the device's GEMMs take, and a scale for each row.
    Quantized(&'static [usize]),
    Scales(&'static [usize]),
    /// The same in mxfp4, and the scale of 32 columns of each row.
    Mxfp4(&'static [usize]),
    MxScales(&'static [usize]),
    /// Cosines or sines of the rotation of so many columns.
    Rotation(fn(f64) -> f64, usize),
    /// The same of heads, in bf16, of more positions.
    HeadRotation(fn(f64) -> f64),
    Integers(&'static [i32]),
    /// 0, 1, ..
    Consecutive(usize),
    /// An output of an earlier step, by the name that the step gave it.
    Step(&'static str),
    /// The same in another shape.
    Reshaped(&'static str, &'static [usize]),
    /// As many of its rows as the shape has, from one on.
    Rows(&'static str, usize, &'static [usize]),
    /// Example data that several steps have alike, by number.
    Shared(u64, DType, &'static [usize]),
    /// Columns of each row from one on, in this shape.
    Columns(&'static str, usize, &'static [usize]),
    /// None: an optional output that the step is to give.
    Wanted,
}

/// One operator.
pub struct Step {
    label: &'static str,
    operator: &'static str,
    inputs: &'static [(&'static str, From)],
    scalars: &'static [(&'static str, Scalar)],
    /// Outputs that later steps use: their argument, and the name they get.
    keep: &'static [(&'static str, &'static str)],
}

/// To the fp8 that the device's GEMMs take.
const FP8: (&str, Scalar) = ("output", Scalar::Choice("fp8"));

/// A GEMM in bf16.
macro_rules! gemm {
    ($label:literal: $a:expr, [$n:expr, $k:expr] => $y:literal) => {
        gemm!("gemm_a16w16", &[]; $label: $a, [$n, $k] => $y)
    };
    ($operator:literal, $scalars:expr; $label:literal: $a:expr, [$n:expr, $k:expr] => $y:literal) => {
        Step {
            label: $label,
            operator: $operator,
            inputs: &[("a", $a), ("w", From::Weights(&[$n, $k]))],
            scalars: $scalars,
            keep: &[("y", $y)],
        }
    };
}

/// A norm of the sum of both inputs, which is the next residual.
macro_rules! norm {
    ($label:literal: $x:expr, $residual:expr => $y:literal, $sum:literal) => {
        Step {
            label: $label,
            operator: "fused_add_rmsnorm",
            inputs: &[("x", $x), ("residual_in", $residual), ("weight", From::Sample(Bf16, &[HIDDEN]))],
            scalars: &[("eps", Scalar::Float(1e-5))],
            keep: &[("y", $y), ("residual_out", $sum)],
        }
    };
}

/// The heads of "qkv", rotated.
macro_rules! split {
    ($label:literal) => {
        Step {
            label: $label,
            operator: "fused_qkv_split_qk_rope",
            inputs: &[("qkv", From::Step("qkv")), ("cos", COS), ("sin", SIN)],
            scalars: &[("rotary", Scalar::Int(HEAD_DIM as i64))],
            keep: &[("q", "q"), ("k", "k"), ("v", "v")],
        }
    };
}

/// Attention of "q", "k", "v".
macro_rules! attention {
    ($label:literal) => {
        Step {
            label: $label,
            operator: "mha",
            inputs: &[
                ("q", From::Reshaped("q", &[1, TOKENS, HEADS, HEAD_DIM])),
                ("k", From::Reshaped("k", &[1, TOKENS, KV_HEADS, HEAD_DIM])),
                ("v", From::Reshaped("v", &[1, TOKENS, KV_HEADS, HEAD_DIM])),
            ],
            scalars: &[("causal", Scalar::Bool(true))],
            keep: &[("out", "attention")],
        }
    };
}

/// A quantization to fp8, by tokens.
macro_rules! quantization {
    ($label:literal: $x:expr => $q:literal, $scale:literal) => {
        Step {
            label: $label,
            operator: "per_token_quant",
            inputs: &[("x", $x)],
            scalars: &[FP8],
            keep: &[("q", $q), ("scale", $scale)],
        }
    };
}

/// A GEMM in fp8.
macro_rules! gemm_fp8 {
    ($label:literal: $a:literal, $scale:literal, [$n:expr, $k:expr] => $y:literal) => {
        Step {
            label: $label,
            operator: "gemm_a8w8",
            inputs: &[
                ("a", From::Step($a)),
                ("w", From::Quantized(&[$n, $k])),
                ("a_scale", From::Step($scale)),
                ("w_scale", From::Scales(&[$n])),
            ],
            scalars: &[],
            keep: &[("y", $y)],
        }
    };
}

const COS: From = From::Rotation(f64::cos, HEAD_DIM);
const SIN: From = From::Rotation(f64::sin, HEAD_DIM);
/// What attention gives, a row for each token.
const ATTENTION: From = From::Reshaped("attention", &[TOKENS, HEADS * HEAD_DIM]);
const TOKEN: From = From::Sample(Bf16, &[BATCH, HIDDEN]);
const INPUT: From = From::Sample(Bf16, &[TOKENS, HIDDEN]);

/// Operators of which each works on what the ones before it gave.
pub struct Layer {
    pub title: &'static str,
    pub steps: &'static [&'static [Step]],
    /// Its references take long.
    pub large: bool,
}

/// The layers of the demo.
pub static LAYERS: [Layer; 4] = [
    Layer {
        title: "A Llama-3 8B decoder layer, a prompt of 128 tokens, its GEMMs in bf16 and in fp8; the layer on a token of 8 \
                sequences over a paged cache of 1024 each; sampling.",
        steps: &[LLAMA],
        large: true,
    },
    Layer {
        title: "Latent attention of DeepSeek-V3 on a token of 4 sequences, the heads of one of eight ranks.",
        steps: &[LATENT_ATTENTION],
        large: false,
    },
    Layer {
        title: "A linear-attention layer of Qwen3-Next, the heads of one of eight ranks: a prompt of 256 tokens, then 8 tokens \
                one by one.",
        steps: LINEAR,
        large: false,
    },
    // One after the other: each has gigabytes of weights.
    Layer {
        title: "Experts of DeepSeek-V3 in fp8 by blocks, 8 of 256 for each of 8 tokens, on one of eight ranks: 32 experts and the \
                shared one. Then those of GPT-OSS 120B in mxfp4, 4 of 128 for each of 4 tokens.",
        steps: &[DEEPSEEK_EXPERTS, GPT_OSS_EXPERTS],
        large: false,
    },
];

const LLAMA: &[Step] = &[
    norm!("norm before attention": INPUT, INPUT => "normed", "residual"),
    gemm!("q, k, v": From::Step("normed"), [QKV, HIDDEN] => "qkv"),
    split!("split of q, k, v; rotation"),
    Step {
        // No query: keys come rotated from the step before, and are only stored.
        label: "write to the paged cache",
        operator: "rope_reshape_and_cache",
        inputs: &[
            ("q", From::Sample(Bf16, &[0, HEADS, HEAD_DIM])),
            ("k", From::Step("k")),
            ("v", From::Step("v")),
            ("cos", COS),
            ("sin", SIN),
            ("positions", From::Sample(I64, &[0])),
            ("slot_mapping", From::Sample(I64, &[TOKENS])),
            ("key_cache", From::Sample(Bf16, &[CONTEXT / BLOCK, BLOCK, KV_HEADS, HEAD_DIM])),
            ("value_cache", From::Sample(Bf16, &[CONTEXT / BLOCK, BLOCK, KV_HEADS, HEAD_DIM])),
        ],
        scalars: &[],
        keep: &[],
    },
    attention!("attention, causal"),
    gemm!("output of attention": ATTENTION, [HIDDEN, HEADS * HEAD_DIM] => "attended"),
    norm!("norm before the feed-forward part": From::Step("attended"), From::Step("residual") => "ffn_normed", "ffn_residual"),
    gemm!(
        "gemm_a16w16_gated", &[("activation", Scalar::Choice("silu"))];
        "gate, up": From::Step("ffn_normed"), [2 * FFN, HIDDEN] => "gated"
    ),
    gemm!("down": From::Step("gated"), [HIDDEN, FFN] => "y"),
    norm!("residual, norm of the next layer": From::Step("y"), From::Step("ffn_residual") => "next_normed", "next_residual"),
    quantization!("fp8: quantization for q, k, v": From::Step("normed") => "normed8", "normed_scale"),
    gemm_fp8!("fp8: q, k, v": "normed8", "normed_scale", [QKV, HIDDEN] => "qkv"),
    split!("fp8: split of q, k, v; rotation"),
    attention!("fp8: attention, causal"),
    quantization!("fp8: quantization for the output": ATTENTION => "attention8", "attention_scale"),
    gemm_fp8!("fp8: output of attention": "attention8", "attention_scale", [HIDDEN, HEADS * HEAD_DIM] => "attended"),
    norm!("fp8: norm before the feed-forward part": From::Step("attended"), From::Step("residual") => "ffn_normed", "ffn_residual"),
    quantization!("fp8: quantization for gate, up": From::Step("ffn_normed") => "ffn8", "ffn_scale"),
    gemm_fp8!("fp8: gate, up": "ffn8", "ffn_scale", [2 * FFN, HIDDEN] => "gate_up"),
    Step {
        label: "fp8: gate",
        operator: "silu_and_mul",
        inputs: &[("x", From::Step("gate_up"))],
        scalars: &[],
        keep: &[("y", "gated")],
    },
    quantization!("fp8: quantization for down": From::Step("gated") => "gated8", "gated_scale"),
    gemm_fp8!("fp8: down": "gated8", "gated_scale", [HIDDEN, FFN] => "y"),
    norm!("fp8: residual, norm of the next layer": From::Step("y"), From::Step("ffn_residual") => "next_normed", "next_residual"),
    norm!("decode: norm before attention": TOKEN, TOKEN => "normed", "residual"),
    gemm!("decode: q, k, v": From::Step("normed"), [QKV, HIDDEN] => "qkv"),
    Step {
        label: "decode: rotation, append to the paged cache, attention over 1025 keys",
        operator: "flash_attn_fwd_decode",
        inputs: &[
            ("q", From::Columns("qkv", 0, &[BATCH, 1, HEADS, HEAD_DIM])),
            ("k_new", From::Columns("qkv", HEADS * HEAD_DIM, &[BATCH, 1, KV_HEADS, HEAD_DIM])),
            ("v_new", From::Columns("qkv", (HEADS + KV_HEADS) * HEAD_DIM, &[BATCH, 1, KV_HEADS, HEAD_DIM])),
            ("cos", From::HeadRotation(f64::cos)),
            ("sin", From::HeadRotation(f64::sin)),
            ("q_rotated", From::Wanted),
            ("k_cache", From::Sample(Bf16, &[BATCH * PAGES, BLOCK, KV_HEADS, HEAD_DIM])),
            ("v_cache", From::Sample(Bf16, &[BATCH * PAGES, BLOCK, KV_HEADS, HEAD_DIM])),
            ("block_table", From::Sample(I32, &[BATCH, PAGES])),
            ("cache_seqlens", From::Integers(&[CACHED; BATCH])),
        ],
        scalars: &[("causal", Scalar::Bool(true)), ("advance", Scalar::Bool(true))],
        keep: &[("out", "attention")],
    },
    gemm!("decode: output of attention": From::Reshaped("attention", &[BATCH, HEADS * HEAD_DIM]), [HIDDEN, HEADS * HEAD_DIM] => "attended"),
    norm!("decode: norm before the feed-forward part": From::Step("attended"), From::Step("residual") => "ffn_normed", "ffn_residual"),
    gemm!(
        "gemm_a16w16_gated", &[("activation", Scalar::Choice("silu"))];
        "decode: gate, up": From::Step("ffn_normed"), [2 * FFN, HIDDEN] => "gated"
    ),
    gemm!("decode: down": From::Step("gated"), [HIDDEN, FFN] => "y"),
    norm!("decode: residual, norm of the next layer": From::Step("y"), From::Step("ffn_residual") => "next_normed", "next_residual"),
    Step {
        label: "softmax of the logits",
        operator: "softmax",
        inputs: &[("x", From::Sample(F32, &[SAMPLED, VOCAB]))],
        scalars: &[],
        keep: &[("y", "probs")],
    },
    Step {
        label: "top-p sampling",
        operator: "top_p_sampling_from_probs",
        inputs: &[("probs", From::Step("probs"))],
        scalars: &[("p", Scalar::Float(0.9)), ("seed", Scalar::Int(42))],
        keep: &[],
    },
];

const LATENT_ATTENTION: &[Step] = &[
    Step {
        label: "absorbed queries, write to the latent cache",
        operator: "fused_bmm_rope_kv_cache",
        inputs: &[
            ("q_nope", From::Sample(Bf16, &[LATENT_HEADS, DECODED, NOPE])),
            ("w", From::Weights(&[LATENT_HEADS, LATENT, NOPE])),
            ("q_pe", From::Sample(Bf16, &[DECODED, LATENT_HEADS, PE])),
            ("k_nope", From::Sample(Bf16, &[DECODED, 1, LATENT])),
            ("k_pe", From::Sample(Bf16, &[DECODED, 1, PE])),
            ("cos", From::Rotation(f64::cos, PE)),
            ("sin", From::Rotation(f64::sin, PE)),
            ("positions", From::Integers(&[59, 63, 55, 75])),
            // The last slot of each sequence.
            ("slot_mapping", From::Integers(&[59, 123, 179, 255])),
            ("kv_cache", From::Sample(Bf16, &[CONTEXT, 1, LATENT + PE])),
        ],
        scalars: &[("style", Scalar::Choice("interleaved"))],
        keep: &[("q_out", "latent_q"), ("kv_cache", "latent_cache")],
    },
    Step {
        label: "attention, a token of 4 sequences",
        operator: "mla_decode_rope",
        inputs: &[
            ("q", From::Step("latent_q")),
            ("kv_pool", From::Reshaped("latent_cache", &[CONTEXT, 1, 1, LATENT + PE])),
            ("kv_indptr", From::Integers(&[0, 60, 124, 180, 256])),
            ("kv_indices", From::Consecutive(CONTEXT)),
        ],
        // Of the heads before absorption, with the factor that goes with longer contexts left out.
        scalars: &[("scale", Scalar::Float(0.072_168_78))],
        keep: &[],
    },
];

/// The tokens, the weights of the convolution, and what the gates are made from.
const LINEAR_INPUT: From = From::Shared(4, Bf16, &[PROMPT + NEXT, LINEAR_HIDDEN]);
const CONV_WEIGHT: From = From::Shared(1, Bf16, &[CHANNELS, 4]);
const A_LOG: From = From::Shared(2, F32, &[LINEAR_VALUES]);
const DT_BIAS: From = From::Shared(3, Bf16, &[LINEAR_VALUES]);
/// Scalars of the convolution.
const CONV: &[(&str, Scalar)] =
    &[("key_dim", Scalar::Count((LINEAR_KEYS * HEAD_DIM) as u64)), ("activation", Scalar::Choice("silu"))];

/// The token after so many others of those after the prompt.
macro_rules! decode {
    ($i:literal) => {
        [
            Step {
                label: concat!("token ", $i, ": convolution"),
                operator: "causal_conv1d_update_split_qkv",
                inputs: &[
                    ("x", From::Rows("linear_qkv", PROMPT + $i, &[1, CHANNELS])),
                    ("weight", CONV_WEIGHT),
                    ("conv_states", From::Step("conv_states")),
                ],
                scalars: CONV,
                keep: &[("q", "next_q"), ("k", "next_k"), ("v", "next_v"), ("conv_states", "conv_states")],
            },
            Step {
                label: concat!("token ", $i, ": gated delta rule"),
                operator: "fused_sigmoid_gating_recurrent",
                inputs: &[
                    ("A_log", A_LOG),
                    ("a", From::Rows("linear_a", PROMPT + $i, &[1, 1, LINEAR_VALUES])),
                    ("dt_bias", DT_BIAS),
                    ("q", From::Reshaped("next_q", &[1, 1, LINEAR_KEYS, HEAD_DIM])),
                    ("k", From::Reshaped("next_k", &[1, 1, LINEAR_KEYS, HEAD_DIM])),
                    ("v", From::Reshaped("next_v", &[1, 1, LINEAR_VALUES, HEAD_DIM])),
                    ("b", From::Rows("linear_b", PROMPT + $i, &[1, 1, LINEAR_VALUES])),
                    ("state_pool", From::Step("delta_states")),
                    ("state_indices", From::Integers(&[0])),
                ],
                scalars: &[("qk_l2norm", Scalar::Bool(true))],
                keep: &[("state_pool", "delta_states")],
            },
        ]
    };
}

const LINEAR: &[&[Step]] = &[
    &[
        gemm!("all tokens: projections": LINEAR_INPUT,
            [CHANNELS + LINEAR_VALUES * HEAD_DIM, LINEAR_HIDDEN] => "mixed_qkvz"),
        gemm!("all tokens: projections of gates": LINEAR_INPUT,
            [2 * LINEAR_VALUES, LINEAR_HIDDEN] => "mixed_ba"),
        Step {
            label: "all tokens: split of projections",
            operator: "fused_qkvzba_split",
            inputs: &[("mixed_qkvz", From::Step("mixed_qkvz")), ("mixed_ba", From::Step("mixed_ba"))],
            scalars: &[
                ("k_heads", Scalar::Count(LINEAR_KEYS as u64)),
                ("v_heads", Scalar::Count(LINEAR_VALUES as u64)),
                ("k_dim", Scalar::Count(HEAD_DIM as u64)),
                ("v_dim", Scalar::Count(HEAD_DIM as u64)),
            ],
            keep: &[("qkv", "linear_qkv"), ("a", "linear_a"), ("b", "linear_b")],
        },
        Step {
            label: "prompt: convolution",
            operator: "causal_conv1d_fwd_split_qkv",
            inputs: &[
                ("x", From::Rows("linear_qkv", 0, &[PROMPT, CHANNELS])),
                ("weight", CONV_WEIGHT),
                ("query_start_loc", From::Integers(&[0, PROMPT as i32])),
                ("conv_states", From::Sample(Bf16, &[1, CHANNELS, 3])),
            ],
            scalars: CONV,
            keep: &[("q", "prompt_q"), ("k", "prompt_k"), ("v", "prompt_v"), ("conv_states", "conv_states")],
        },
        Step {
            label: "prompt: gates",
            operator: "fused_gdn_gating_prefill",
            inputs: &[
                ("A_log", A_LOG),
                ("a", From::Rows("linear_a", 0, &[PROMPT, LINEAR_VALUES])),
                ("b", From::Rows("linear_b", 0, &[PROMPT, LINEAR_VALUES])),
                ("dt_bias", DT_BIAS),
            ],
            scalars: &[],
            keep: &[("g", "g"), ("beta", "beta")],
        },
        Step {
            label: "prompt: gated delta rule",
            operator: "chunk_gated_delta_rule",
            inputs: &[
                ("q", From::Reshaped("prompt_q", &[1, PROMPT, LINEAR_KEYS, HEAD_DIM])),
                ("k", From::Reshaped("prompt_k", &[1, PROMPT, LINEAR_KEYS, HEAD_DIM])),
                ("v", From::Reshaped("prompt_v", &[1, PROMPT, LINEAR_VALUES, HEAD_DIM])),
                ("g", From::Reshaped("g", &[1, PROMPT, LINEAR_VALUES])),
                ("beta", From::Reshaped("beta", &[1, PROMPT, LINEAR_VALUES])),
                ("state_pool", From::Sample(F32, &[1, LINEAR_VALUES, HEAD_DIM, HEAD_DIM])),
                ("state_indices", From::Integers(&[0])),
            ],
            scalars: &[("qk_l2norm", Scalar::Bool(true))],
            keep: &[("o", "prompt_o"), ("state_pool", "delta_states")],
        },
        Step {
            label: "prompt: norm of heads",
            operator: "rmsnorm",
            inputs: &[
                ("x", From::Reshaped("prompt_o", &[PROMPT * LINEAR_VALUES, HEAD_DIM])),
                ("weight", From::Sample(Bf16, &[HEAD_DIM])),
            ],
            scalars: &[("eps", Scalar::Float(1e-6))],
            keep: &[("y", "prompt_normed")],
        },
        gemm!("prompt: output": From::Reshaped("prompt_normed", &[PROMPT, LINEAR_VALUES * HEAD_DIM]),
            [LINEAR_HIDDEN, LINEAR_VALUES * HEAD_DIM] => "prompt_y"),
    ],
    &decode!(0),
    &decode!(1),
    &decode!(2),
    &decode!(3),
    &decode!(4),
    &decode!(5),
    &decode!(6),
    &decode!(7),
];

/// Norm, logits, and the experts that they choose.
macro_rules! experts {
    ($model:literal: [$tokens:expr, $hidden:expr], $experts:expr; $inputs:expr, $scalars:expr) => {
        &[
            Step {
                label: concat!($model, ": norm"),
                operator: "rmsnorm",
                inputs: &[
                    ("x", From::Sample(Bf16, &[$tokens, $hidden])),
                    ("weight", From::Sample(Bf16, &[$hidden])),
                ],
                scalars: &[("eps", Scalar::Float(1e-6))],
                keep: &[("y", "routed")],
            },
            Step {
                label: concat!($model, ": logits"),
                operator: "gemm_a16w16",
                inputs: &[("a", From::Step("routed")), ("w", From::Weights(&[$experts, $hidden]))],
                scalars: &[],
                keep: &[("y", "logits")],
            },
            Step {
                label: concat!($model, ": experts"),
                operator: "fused_moe",
                inputs: &$inputs,
                scalars: &$scalars,
                keep: &[],
            },
        ]
    };
}

const DEEPSEEK_EXPERTS: &[Step] = {
    const H: usize = 7168;
    const E: usize = 256;
    const LOCAL: usize = 32;
    const I: usize = 2048;
    experts!(
        "DeepSeek-V3": [8, H], E;
        [
            ("x", From::Step("routed")),
            ("logits", From::Step("logits")),
            ("bias", From::Sample(F32, &[E])),
            ("expert_map", From::Integers(&RANK)),
            ("w1", From::Quantized(&[LOCAL, 2 * I, H])),
            ("w2", From::Quantized(&[LOCAL, H, I])),
            ("w1_scale", From::Scales(&[LOCAL, 2 * I / 128, H / 128])),
            ("w2_scale", From::Scales(&[LOCAL, H / 128, I / 128])),
            ("shared_w1", From::Quantized(&[1, 2 * I, H])),
            ("shared_w2", From::Quantized(&[1, H, I])),
            ("shared_w1_scale", From::Scales(&[1, 2 * I / 128, H / 128])),
            ("shared_w2_scale", From::Scales(&[1, H / 128, I / 128])),
        ],
        [
            ("k", Scalar::Count(8)),
            ("scores", Scalar::Choice("sigmoid")),
            ("renormalize", Scalar::Bool(true)),
            ("scaling", Scalar::Float(2.5)),
            ("groups", Scalar::Count(8)),
            ("kept_groups", Scalar::Count(4)),
        ]
    )
};

const GPT_OSS_EXPERTS: &[Step] = {
    const H: usize = 2880;
    const E: usize = 128;
    const I: usize = 2880;
    experts!(
        "GPT-OSS": [4, H], E;
        [
            ("x", From::Step("routed")),
            ("logits", From::Step("logits")),
            ("w1", From::Mxfp4(&[E, 2 * I, H / 2])),
            ("w2", From::Mxfp4(&[E, H, I / 2])),
            ("w1_scale", From::MxScales(&[E, 2 * I, H / 32])),
            ("w2_scale", From::MxScales(&[E, H, I / 32])),
            ("w1_bias", From::Sample(F32, &[E, 2 * I])),
            ("w2_bias", From::Sample(F32, &[E, H])),
        ],
        [
            ("k", Scalar::Count(4)),
            ("gate", Scalar::Choice("swiglu_oai")),
            ("activations", Scalar::Choice("half")),
        ]
    )
};

/// Runs the steps on each device and shows each row; a step after one that failed on that device is left out.
///
/// # Errors
/// If a step is not a call of its operator.
pub fn run(steps: &[&[Step]], devices: &[String], show: impl Fn(&Row)) -> Result<Vec<Row>> {
    let mut kept: Vec<Option<HashMap<&str, HostTensor>>> =
        devices.iter().map(|_| Some(HashMap::new())).collect();
    let mut rows = vec![];
    for (i, step) in steps.iter().copied().flatten().enumerate() {
        for (device, kept) in devices.iter().zip(&mut kept) {
            let Some(tensors) = kept else { continue };
            let call = call(step, i as u64, tensors, device)?;
            let (row, outputs) = measure(&call, step.label, device);
            for (argument, name) in step.keep {
                let output = outputs.iter().find(|(n, _)| n == argument);
                tensors.extend(output.map(|(_, tensor)| (*name, tensor.clone())));
            }
            if outputs.is_empty() {
                *kept = None;
            }
            show(&row);
            rows.push(row);
        }
    }
    Ok(rows)
}

fn call(step: &Step, number: u64, kept: &HashMap<&str, HostTensor>, device: &str) -> Result<HostCall> {
    let operator = operator(step.operator)?;
    // A device that cannot be opened fails in the step itself.
    let fp8 = DType::fp8_of(Device::open(device).map_or(Arch::Gfx950, |d| d.arch()));
    let step_output = |name: &str| {
        let missing = || Failure::new(format!("{}: no step gives `{name}`", step.operator));
        kept.get(name).ok_or_else(missing)
    };
    let mut call = Call::new(operator);
    for (i, (name, from)) in step.inputs.iter().enumerate() {
        let seed = number << 8 | i as u64;
        let tensor = match from {
            From::Sample(dtype, shape) | From::Shared(_, dtype, shape) => {
                let seed = if let From::Shared(number, ..) = from { *number } else { seed };
                let sample = operator.arg(name).map(|arg| arg.sample);
                let missing = || Failure::new(format!("{}: no argument `{name}`", step.operator));
                HostTensor::sample(TensorSpec::new(*dtype, *shape), sample.ok_or_else(missing)?, seed)?
            }
            From::Weights(shape) => repeated(TensorSpec::new(Bf16, *shape), normal(1.0 / 64.0), seed)?,
            From::Quantized(shape) => repeated(TensorSpec::new(fp8, *shape), normal(32.0), seed)?,
            From::Mxfp4(shape) => repeated(TensorSpec::new(Fp4x2, *shape), normal(2.0), seed)?,
            From::MxScales(shape) => {
                let sample = Sample::Uniform { low: 0.004, high: 0.03 };
                repeated(TensorSpec::new(E8M0, *shape), sample, seed)?
            }
            From::Scales(shape) => {
                let sample = Sample::Uniform { low: 0.3e-3, high: 0.6e-3 };
                HostTensor::sample(TensorSpec::new(F32, *shape), sample, seed)?
            }
            From::Rotation(f, columns) => {
                let values: Vec<f32> = rotation(*f, *columns, CONTEXT).map(|x| x as f32).collect();
                HostTensor::new([CONTEXT, columns / 2], &values)?
            }
            From::HeadRotation(f) => {
                let values: Vec<bf16> = rotation(*f, HEAD_DIM, POSITIONS).map(bf16::from_f64).collect();
                HostTensor::new([POSITIONS, HEAD_DIM / 2], &values)?
            }
            From::Integers(values) => HostTensor::new([values.len()], values)?,
            From::Consecutive(n) => HostTensor::new([*n], &(0..*n as i32).collect::<Vec<_>>())?,
            From::Step(name) => step_output(name)?.clone(),
            From::Reshaped(name, shape) => {
                let tensor = step_output(name)?;
                let spec = TensorSpec::new(tensor.dtype(), *shape);
                HostTensor::from_bytes(spec, tensor.bytes().to_vec())?
            }
            From::Rows(name, first, shape) => {
                let tensor = step_output(name)?;
                let spec = TensorSpec::new(tensor.dtype(), *shape);
                let rows = tensor.shape()[0].max(1);
                let (row, of_row) =
                    (tensor.bytes().len() / rows, tensor.shape()[1..].iter().product::<usize>());
                let end = first + shape.iter().product::<usize>() / of_row.max(1);
                let bytes = tensor.bytes().get(first * row..end * row);
                let missing = || Failure::new(format!("{}: no rows {first}.. of `{name}`", step.operator));
                HostTensor::from_bytes(spec, bytes.ok_or_else(missing)?.to_vec())?
            }
            From::Columns(name, first, shape) => {
                let tensor = step_output(name)?;
                let spec = TensorSpec::new(tensor.dtype(), *shape);
                let (rows, element) = (shape[0], tensor.dtype().size_bytes());
                let (row, len) = (tensor.bytes().len() / rows, spec.bytes()? / rows);
                let part = tensor.bytes().chunks(row).flat_map(|row| &row[first * element..][..len]);
                let bytes = part.copied().collect();
                HostTensor::from_bytes(spec, bytes)?
            }
            From::Wanted => {
                call.want(name)?;
                continue;
            }
        };
        call.set(name, tensor)?;
    }
    for (name, value) in step.scalars {
        let of_device = (*name, *value) == FP8;
        call.set_scalar(name, if of_device { Scalar::Choice(fp8.name()) } else { *value })?;
    }
    Ok(call)
}

/// `f` of the angle of each position and pair of columns.
fn rotation(f: fn(f64) -> f64, columns: usize, positions: usize) -> impl Iterator<Item = f64> {
    let pairs = columns / 2;
    let of_pair = move |i: usize| ROPE_BASE.powf(-(i as f64) / pairs as f64);
    (0..positions * pairs).map(move |i| f((i / pairs) as f64 * of_pair(i % pairs)))
}

const fn normal(deviation: f32) -> Sample {
    Sample::Normal { mean: 0.0, deviation }
}

/// Values of a sample, the same ones again after a prime number of them: some hundreds of millions take long to make, and no two rows
/// or columns of a matrix are alike.
fn repeated(spec: TensorSpec, sample: Sample, seed: u64) -> Result<HostTensor> {
    const PERIOD: usize = 1_048_583;
    let some = HostTensor::sample(TensorSpec::new(spec.dtype, [PERIOD]), sample, seed)?;
    let n = spec.bytes()?;
    let mut bytes = Vec::with_capacity(n);
    while bytes.len() < n {
        let left = some.bytes().len().min(n - bytes.len());
        bytes.extend_from_slice(&some.bytes()[..left]);
    }
    Ok(HostTensor::from_bytes(spec, bytes)?)
}
