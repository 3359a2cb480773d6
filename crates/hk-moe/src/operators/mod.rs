//! The operators as data, for the `hk` program, the demo and the documentation.

mod align;
mod topk;

use hk_core::DType;
use hk_core::registry::Operator;

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[topk::MOE_TOPK, align::MOE_ALIGN_BLOCK_SIZE];

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
