#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod gating;
#[cfg(feature = "registry")]
mod operators;
mod recurrent;
#[cfg(feature = "registry")]
pub mod reference;
mod sizes;

pub use gating::{GatingInputs, fused_gdn_gating_prefill};
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use recurrent::{
    GateBias, Gates, RearrangedInputs, RecurrentInputs, RecurrentOptions, SigmoidGates, SigmoidInputs,
    Softplus, StateElement, StateLayout, States, fused_rearrange_sigmoid_gdr, fused_recurrent,
    fused_sigmoid_gating_recurrent,
};
