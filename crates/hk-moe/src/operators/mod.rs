//! The operators as data, for the `hk` program, the demo and the documentation.

mod align;
mod experts;
mod fused;
mod mlp;
mod routing;
mod sum;
mod top1;
mod topk;

use hk_core::DType;
use hk_core::registry::{HostTensorF64, Operator};

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    topk::MOE_TOPK,
    routing::MOE_ROUTING,
    top1::MOE_ROUTING_SIGMOID_TOP1_FUSED,
    routing::MOE_BITMATRIX,
    routing::MOE_EXPT_DATA,
    align::MOE_ALIGN_BLOCK_SIZE,
    sum::MOE_SUM,
    experts::MOE_OP,
    experts::MOE_OP_GELU,
    experts::MOE_OP_SILU_FUSED,
    experts::MOE_OP_MXFP4,
    experts::MOE_OP_MXFP4_SILU_FUSED,
    experts::MOE_OP_GEMM_A8W8,
    experts::MOE_OP_GEMM_A8W8_BLOCKSCALE,
    experts::MOE_OP_GEMM_A8W4,
    experts::MOE_OP_GEMM_A4W4,
    fused::MOE_OP_E2E,
    fused::FUSED_MOE,
];

const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const I32: &[DType] = &[DType::I32];

/// A vector of integers.
fn ints(v: &[i32]) -> HostTensorF64 {
    HostTensorF64::new([v.len()], v.iter().map(|&v| f64::from(v)).collect())
}
