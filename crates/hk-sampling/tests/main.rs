//! The tests of the samplers: one program, a module per file.

mod common;
mod corners;
mod errors;
mod filters;
mod logits;
mod race;
