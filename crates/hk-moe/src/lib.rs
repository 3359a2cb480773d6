#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod args;
mod bitmatrix;
mod lists;
#[cfg(feature = "registry")]
mod operators;
#[cfg(feature = "registry")]
pub mod reference;
mod routing;
mod sum;
mod top1;
mod topk;

pub use bitmatrix::moe_bitmatrix;
pub use lists::{TileLists, moe_align_block_size, moe_align_len, moe_align_workspace};
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use routing::{
    ExptData, Routing, RoutingOptions, moe_block_m, moe_expt_data, moe_max_tiles, moe_routing,
    moe_routing_workspace,
};
pub use sum::moe_sum;
pub use top1::{moe_routing_sigmoid_top1_fused, moe_top1_workspace};
pub use topk::{Choices, Groups, Scores, SlotOrder, Ties, TopkOptions, moe_bitmatrix_shape, moe_topk};
