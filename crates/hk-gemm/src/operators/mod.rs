//! The operators as data.

use hk_core::registry::Operator;

/// All operators.
pub const OPERATORS: &[&Operator] = &[];
