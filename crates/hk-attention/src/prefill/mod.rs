//! Attention of prompts.

mod extend;
mod flash;
mod hstu;
mod lean;
pub(crate) mod mha;
pub(crate) mod options;
mod pa_prefill;
pub(crate) mod plan;
mod prefill_attn;
pub(crate) mod problem;
mod stream_k;
mod unified;

#[cfg(feature = "registry")]
pub(crate) use extend::MOST_COLUMNS;
pub use extend::{CustomMask, ExtendInputs, ExtendOptions, extend_attn};
pub use flash::{FlashInputs, FlashOptions, flash_attn_fwd_prefill};
pub use hstu::{HstuOptions, HstuSequences, hstu_attn};
pub use lean::{LeanOptions, lean_atten};
pub use mha::{AttentionOutputs, Qkv, SequenceStarts, mha, mha_varlen};
pub use options::{
    AttentionElement, AttentionOptions, AttentionOutput, Bias, Descales, Dropout, Mask, PagedElement,
    PagedKv, Pages,
};
pub use pa_prefill::{PaPrefillInputs, PaPrefillOptions, chunked_pa_prefill, pa_prefill};
pub use plan::{AttentionProblem, QueryTile, Tiling, attention_workspace};
pub use prefill_attn::{SequenceSpans, prefill_attn};
#[cfg(feature = "registry")]
pub(crate) use problem::check_cache_heads;
pub use stream_k::{Programs, lean_workspace};
pub use unified::{UnifiedInputs, UnifiedOptions, UnifiedOutput, unified_attn};
