//! The operators as data, for the `hk` program, the demo and the documentation.

mod align;

use hk_core::registry::Operator;

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[align::MOE_ALIGN_BLOCK_SIZE];
