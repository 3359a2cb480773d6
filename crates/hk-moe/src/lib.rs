#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod args;
mod lists;
#[cfg(feature = "registry")]
mod operators;
#[cfg(feature = "registry")]
pub mod reference;
mod topk;

pub use lists::{TileLists, moe_align_block_size, moe_align_len, moe_align_workspace};
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use topk::{Choices, Groups, Scores, SlotOrder, Ties, TopkOptions, moe_bitmatrix_shape, moe_topk};
