//! The operators as data, for the `hk` program, the demo and the documentation.

mod rope;
mod topk;
mod gated;
mod mul_add;
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
    rope::ROPE_CACHED,
    rope::ROPE_FREQS,
    rope::ROPE_QK,
    topk::TOPK,
    gated::SILU_AND_MUL,
    gated::GELU_AND_MUL,
    gated::GELU_TANH_AND_MUL,
    gated::SWIGLU_OAI_AND_MUL,
    mul_add::FUSED_MUL_ADD,
];

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
