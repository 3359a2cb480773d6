//! Attention of prompts.

mod flash;
mod hstu;
mod lean;
mod mha;
mod options;
mod plan;
mod prefill_attn;
mod problem;

pub use flash::{FlashInputs, FlashOptions, flash_attn_fwd_prefill};
pub use hstu::{HstuOptions, HstuSequences, hstu_attn};
pub use lean::lean_atten;
pub use mha::{AttentionOutputs, Qkv, SequenceStarts, mha, mha_varlen};
pub use options::{AttentionElement, AttentionOptions, AttentionOutput, Bias, Descales, Dropout, Mask};
pub use plan::{AttentionProblem, QueryTile, Tiling, attention_workspace};
pub use prefill_attn::{SequenceSpans, prefill_attn};
