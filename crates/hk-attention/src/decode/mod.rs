//! Attention of few queries of each sequence, over caches.

mod flash;
mod launch;
mod merge_states;
mod pa_decode;
mod pod;
mod splits;

pub use flash::{
    AppendRotary, CacheRows, CacheSeqlens, FlashAppend, FlashCache, FlashDecodeInputs, FlashDecodeOptions,
    flash_attn_fwd_decode,
};
pub(crate) use launch::DecodePlan;
pub use merge_states::{AttentionState, merge_attn_states};
pub use pa_decode::{PaDecodeInputs, PaDecodeOptions, pa_decode};
pub use pod::{PodDecode, PodOptions, PodPrefill, pod_attn};
pub(crate) use splits::SplitSizes;
pub use splits::{DecodeWorkspace, Splits, Tickets, decode_workspace};
