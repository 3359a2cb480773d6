//! Tests of the crate.

mod common;
#[path = "common/mixed.rs"]
mod mixed;

mod a16w16_a8w8;
mod bulk;
mod choices;
mod corners;
mod dual;
mod empty;
mod errors;
mod ff;
mod fused;
mod gmm;
mod groups;
mod laws;
mod mxfp8;
mod quant_x;
mod quantized;
mod split_k;
