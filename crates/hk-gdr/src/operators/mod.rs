//! The operators as data, for the `hk` program, the demo and the documentation.

mod gating;
mod recurrent;

use hk_core::registry::Operator;

/// The operators of this crate.
pub static OPERATORS: &[Operator] = &[
    recurrent::FUSED_RECURRENT,
    recurrent::FUSED_SIGMOID_GATING_RECURRENT,
    recurrent::FUSED_REARRANGE_SIGMOID_GDR,
    gating::FUSED_GDN_GATING_PREFILL,
];
