//! Attention of few queries of each sequence, over caches.

mod launch;
mod pa_decode;
mod splits;

pub(crate) use launch::DecodePlan;
pub use pa_decode::{PaDecodeInputs, PaDecodeOptions, pa_decode};
pub use splits::{DecodeWorkspace, Splits, Tickets, decode_workspace};
