#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

#[cfg(feature = "registry")]
mod operators;
mod recurrent;
#[cfg(feature = "registry")]
pub mod reference;
mod sizes;

#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use recurrent::{
    Gates, RecurrentInputs, RecurrentOptions, StateElement, StateLayout, States, fused_recurrent,
};
