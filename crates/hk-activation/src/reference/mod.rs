//! The operators again, in f64 and plain loops: the tests' oracle.
//!
//! Inputs are the values that the kernels read, already rounded to their types; results are not rounded unless the
//! operator says so.

mod conv;
mod gated;
mod mul_add;
pub mod qkv;
pub mod rope;
mod softmax;
mod topk;

pub use crate::operators::unary::reference::*;
pub use conv::{CausalConv1d, causal_conv1d};
pub use gated::{gelu_and_mul, gelu_tanh_and_mul, silu_and_mul, swiglu_oai_and_mul};
pub use mul_add::fused_mul_add;
pub use softmax::softmax;
pub use topk::{Topk, topk};
