#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod causal_conv1d;
mod gated;
mod mul_add;
#[cfg(feature = "registry")]
mod operators;
mod qkv;
#[cfg(feature = "registry")]
pub mod reference;
mod rope;
mod softmax;
mod tiles;
mod topk;
mod unary;

pub use causal_conv1d::{
    ConvActivation, ConvInputs, ConvOutputs, ConvUpdateInputs, ConvUpdateOutputs, ConvWeight,
    causal_conv1d_fwd, causal_conv1d_update,
};

/// For crates with entry points of their own over the device header `activation/conv.h`.
pub mod conv {
    pub use crate::causal_conv1d::{ConvCall, ConvOp, ConvPlan, ConvShapes, ConvSizes, PARAMS_BYTES};
}

pub use gated::{gelu_and_mul, gelu_tanh_and_mul, silu_and_mul, swiglu_oai_and_mul};
pub use mul_add::{MulAddOperand, fused_mul_add};
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use qkv::{QkvOutputs, fused_qkv_split_qk_rope};
pub use rope::{RopeQkInputs, RopeQkOutputs, rope_cached, rope_freqs, rope_qk};
pub use softmax::{softmax, softmax_workspace};
pub use topk::{TopkIndex, TopkOrder, TopkOutputs, topk, topk_workspace};
pub use unary::*;
