#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod args;
mod bitmatrix;
mod experts;
mod fused;
mod lists;
mod moe_gemm;
mod moe_op;
#[cfg(feature = "registry")]
mod operators;
mod quantize;
#[cfg(feature = "registry")]
pub mod reference;
mod routing;
mod sum;
mod top1;
mod topk;
mod weights;

pub use bitmatrix::moe_bitmatrix;
pub use experts::{
    ExpertGate, ExpertInputs, ExpertRows, ExpertScales, ExpertTile, GateOrder, MaskedRows, RaggedRows,
    SortedRows,
};
pub use fused::{
    FusedMoeInputs, FusedMoeProblem, FusedRouting, FusedScales, FusedWeight, GroupScales, MxActivations,
    SharedExperts, fused_moe, fused_moe_workspace, moe_op_e2e,
};
pub use hk_gemm::{
    Activation, BlockShape, FloatView, GemmWeight, MxScaleView, shuffle_weight, shuffle_weight_host,
};
pub use hk_quant::{downcast_to_mxfp, downcast_to_static_fp8, shuffle_scales, upcast_from_mxfp};
pub use lists::{TileLists, moe_align_block_size, moe_align_len, moe_align_workspace};
pub use moe_gemm::{
    moe_op_gemm_a4w4, moe_op_gemm_a8w4, moe_op_gemm_a8w8, moe_op_gemm_a8w8_blockscale, moe_op_mxfp4,
    moe_op_mxfp4_silu_fused,
};
pub use moe_op::{moe_op, moe_op_gelu, moe_op_masked, moe_op_silu_fused};
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use routing::{
    ExptData, Routing, RoutingOptions, moe_block_m, moe_expt_data, moe_max_tiles, moe_routing,
    moe_routing_workspace,
};
pub use sum::moe_sum;
pub use top1::{moe_routing_sigmoid_top1_fused, moe_top1_workspace};
pub use topk::{Choices, Groups, Scores, SlotOrder, Ties, TopkOptions, moe_bitmatrix_shape, moe_topk};
pub use weights::{join_gates_host, split_gates_host};
