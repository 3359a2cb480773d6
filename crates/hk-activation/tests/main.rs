//! The tests of the operators, on the emulated GPUs and on real ones where there are some.

mod causal_conv1d;
mod common;
mod corners;
mod far;
mod gated;
mod mul_add;
mod qkv;
mod registry;
mod rope;
mod softmax;
mod topk;
mod unary;
