//! The operators as data, for the `hk` program, the demo and the documentation.

mod rope;
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
    rope::ROPE_CACHED,
    rope::ROPE_FREQS,
    rope::ROPE_QK,
    topk::TOPK,
];

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
