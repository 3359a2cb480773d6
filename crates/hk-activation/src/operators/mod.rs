//! The operators as data, for the `hk` program, the demo and the documentation.

mod qkv;
mod rope;

use hk_core::registry::Operator;

/// The operators of this crate.
pub static OPERATORS: &[Operator] =
    &[rope::ROPE_CACHED, rope::ROPE_FREQS, rope::ROPE_QK, qkv::FUSED_QKV_SPLIT_QK_ROPE];
