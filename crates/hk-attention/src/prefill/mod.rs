//! Attention of prompts.

mod mha;
mod options;
mod problem;

pub use mha::{AttentionOutputs, Qkv, SequenceStarts, mha, mha_varlen};
pub use options::{AttentionElement, AttentionOptions, AttentionOutput, Bias, Descales, Dropout, Mask};
