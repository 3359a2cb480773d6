#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod a16w16;
mod a8w8;
mod config;
mod fp4;
mod gmm;
mod operators;
mod params;
mod problem;
pub mod reference;
mod views;

pub use a8w8::{MatrixCode, batched_gemm_a8w8, gemm_a8w8, gemm_a8w8_blockscale, gemm_a8w8_per_token_scale};
pub use a16w16::{Half, batched_gemm_bf16, gemm_a16w16, gemm_a16w16_atomic, gemm_a16w16_gated};
pub use config::{GemmConfig, GemmTile, Precision};
pub use fp4::{
    batched_gemm_a16wfp4, batched_gemm_afp4wfp4, gemm_a8wfp4, gemm_a16wfp4, gemm_a16wfp4_atomic,
    gemm_a16wfp4_workspace, gemm_afp4wfp4,
};
pub use gmm::{GroupedOptions, GroupedTile, gmm, nptgmm, ptgmm};
pub use operators::{OPERATORS, choices};
pub use problem::{Activation, BlockShape, FuseType, GemmOptions, gemm_workspace};
pub use views::{Addend, FloatView, MxScaleView, ShuffledWeight, Weight};
