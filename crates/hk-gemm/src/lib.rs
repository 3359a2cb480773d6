#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod a16w16;
mod a16w8;
mod a8w8;
mod config;
mod deepgemm;
mod dual;
mod ff;
mod fp4;
mod fused;
mod gmm;
mod mxfp8;
mod operators;
mod params;
mod problem;
mod quant_x;
mod quantized;
pub mod reference;
mod shuffle;
mod views;

pub use a8w8::{MatrixCode, batched_gemm_a8w8, gemm_a8w8, gemm_a8w8_blockscale, gemm_a8w8_per_token_scale};
pub use a16w8::{batched_gemm_a8w8_ptgq, gemm_a16w8_blockscale, gemm_a16w8_workspace};
pub use a16w16::{Half, batched_gemm_bf16, gemm_a16w16, gemm_a16w16_atomic, gemm_a16w16_gated};
pub use config::{GemmConfig, GemmTile, Precision};
pub use deepgemm::{
    GroupedScales, deepgemm_contiguous, deepgemm_contiguous_a8w8, deepgemm_masked, deepgemm_masked_a8w8,
};
pub use dual::{fused_gemm_a8w8_blockscale_a16w16, fused_gemm_a16w16_workspace, fused_gemm_afp4wfp4_a16w16};
pub use ff::{FfOptions, FfPath, ff_fused_gated, ff_fused_ungated, ff_fused_workspace};
pub use fp4::{
    batched_gemm_a16wfp4, batched_gemm_afp4wfp4, gemm_a8wfp4, gemm_a16wfp4, gemm_a16wfp4_atomic,
    gemm_a16wfp4_workspace, gemm_afp4wfp4,
};
pub use fused::{
    fused_gemm_a8w8_blockscale_mul_add, fused_gemm_a8w8_blockscale_split_cat, fused_gemm_afp4wfp4_mul_add,
    fused_gemm_afp4wfp4_split_cat,
};
pub use gmm::{GroupedOptions, GroupedTile, gmm, nptgmm, ptgmm};
pub use mxfp8::gemm_afp8wfp8;
pub use operators::{OPERATORS, choices};
pub use problem::{Activation, BlockShape, FuseType, GemmOptions, gemm_workspace};
pub use quant_x::fused_gemm_a16w16_quant_x;
pub use shuffle::{shuffle_weight, shuffle_weight_host, unshuffle_weight, unshuffle_weight_host};
pub use views::{Addend, FloatView, MxScaleView, ShuffledWeight, Weight};
