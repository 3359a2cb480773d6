#![doc = include_str!("../README.md")]

hk_core::include_kernels!();

mod args;
#[cfg(feature = "registry")]
mod operators;
mod race;
#[cfg(feature = "registry")]
pub mod reference;
mod sample;

pub use args::{Draw, FilterOrder, Filters, PerRow, Race, SampledRows, Samples};
#[cfg(feature = "registry")]
pub use operators::OPERATORS;
pub use race::{greedy_sample, mixed_sample, race_workspace, random_sample};
pub use sample::{
    min_p_sampling_from_probs, sample_from_logits, sampling_workspace, top_k_renorm_probs,
    top_k_sampling_from_probs, top_k_top_p_sampling_from_probs, top_p_sampling_from_probs,
};
