//! Tests of the crate.

mod common;
#[path = "common/mixed.rs"]
mod mixed;

mod choices;
mod codes;
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
mod products;
mod quant_x;
