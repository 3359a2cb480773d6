#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod all_reduce;
mod all_reduce_rmsnorm;
mod meeting;
mod p2p;

pub use all_reduce::{all_reduce, all_reduce_in_place};
pub use all_reduce_rmsnorm::{AllReduceRmsNormOptions, AllReduceRmsNormOutputs, Fp8Rows, all_reduce_rmsnorm};
pub use p2p::{Algorithm, P2pComm, P2pOptions};
