//! The operators as data, for the `hk` program, the demo and the documentation.

mod recurrent;

use hk_core::registry::Operator;

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[recurrent::FUSED_RECURRENT];
