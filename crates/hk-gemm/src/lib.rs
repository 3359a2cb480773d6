#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod element;
mod gemm;
#[cfg(feature = "registry")]
mod operators;
mod ops;
#[cfg(feature = "registry")]
pub mod reference;

pub use element::{Half, Int8OrFp8, PrequantWeight};
pub use gemm::{
    Accumulate, Activation, Addend, BlockShape, Determinism, FloatView, FuseType, Gemm, GemmConfig,
    GemmOptions, GemmProblem, GemmScales, GemmTile, GemmWeight, MxScaleView, Precision, Prequant,
    PrequantGemm, gemm_workspace,
};
#[cfg(feature = "registry")]
pub use operators::{OPERATORS, choices};
pub use ops::*;
