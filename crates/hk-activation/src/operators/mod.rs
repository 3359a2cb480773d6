//! The operators as data, for the `hk` program, the demo and the documentation.

mod causal_conv1d;
mod gated;
mod mul_add;
mod qkv;
mod rope;
mod softmax;
mod topk;
mod unary;

use hk_core::DType;
use hk_core::registry::Operator;

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    unary::SILU,
    unary::GELU,
    unary::GELU_TANH,
    unary::RELU,
    unary::TANH,
    gated::SILU_AND_MUL,
    gated::GELU_AND_MUL,
    gated::GELU_TANH_AND_MUL,
    gated::SWIGLU_OAI_AND_MUL,
    mul_add::FUSED_MUL_ADD,
    causal_conv1d::CAUSAL_CONV1D_FWD,
    causal_conv1d::CAUSAL_CONV1D_UPDATE,
    rope::ROPE_CACHED,
    rope::ROPE_FREQS,
    rope::ROPE_QK,
    qkv::FUSED_QKV_SPLIT_QK_ROPE,
    softmax::SOFTMAX,
    topk::TOPK,
];

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
