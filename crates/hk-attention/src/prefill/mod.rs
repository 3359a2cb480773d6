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
mod sage;
mod stream_k;
mod unified;

#[cfg(feature = "registry")]
pub(crate) use extend::MOST_COLUMNS;
pub use extend::{CustomMask, ExtendInputs, ExtendOptions, extend_attn};
pub use flash::{FlashInputs, FlashOptions, FlashRotary, flash_attn_fwd_prefill};
pub use hstu::{HstuOptions, HstuSequences, hstu_attn};
pub use lean::{LeanOptions, LeanPagedInputs, lean_atten, lean_atten_paged};
pub use mha::{AttentionOutputs, Qkv, SequenceStarts, mha, mha_varlen};
pub(crate) use mha::{check_packed, kernel_of, problem as packed_problem};
pub use options::{
    AttentionElement, AttentionOptions, AttentionOutput, Bias, Descales, DeviceFp8, Dropout, Mask,
    PagedElement, PagedKv, Pages,
};
pub(crate) use options::{UNLIMITED, check_fp8};
pub use pa_prefill::{PaPrefillInputs, PaPrefillOptions, chunked_pa_prefill, pa_prefill};
pub use plan::{AttentionProblem, QueryTile, Tiling, attention_workspace};
pub(crate) use plan::{Plan, floats_per_row};
pub use prefill_attn::{SequenceSpans, prefill_attn};
pub(crate) use problem::{
    FP8, Heads, I8, MOST_STRIDE, Merge, Problem, WINDOW_OF_PAGE, check_cache_heads, check_heads,
};
#[cfg(feature = "registry")]
pub(crate) use sage::MOST_COLUMNS as MOST_COLUMNS_OF_SAGE;
pub use sage::{
    SageOptions, SageProblem, SageQuantized, SageQuantizedMut, sage_attention, sage_attention_quantized,
    sage_quantize, sage_quantize_workspace, sage_workspace,
};
pub use stream_k::{Programs, lean_paged_workspace, lean_workspace};
pub use unified::{UnifiedInputs, UnifiedOptions, UnifiedOutput, unified_attn};
