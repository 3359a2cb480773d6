//! Attention of prompts.

mod mha;
mod options;
mod plan;
mod problem;

pub use mha::{AttentionOutputs, Qkv, SequenceStarts, mha, mha_varlen};
pub use options::{AttentionElement, AttentionOptions, AttentionOutput, Bias, Descales, Dropout, Mask};
pub use plan::{AttentionProblem, QueryTile, Tiling, attention_workspace};
