//! The operators as data, for the `hk` program, the demo and the documentation.

mod qk_concat;

use hk_core::registry::Operator;

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[qk_concat::QK_CAT, qk_concat::QK_ROPE_CAT];
