//! `hk status`: what the registry knows of every operator, as JSON for `cargo xtask status`.

use crate::{Result, list, out};
use hk_core::registry::Operator;
use serde::Serialize;

/// An operator.
#[derive(Debug, Serialize)]
struct Status {
    name: &'static str,
    family: &'static str,
    summary: &'static str,
    /// Sources that it launches kernels from.
    sources: Vec<&'static str>,
    /// Targets that all of them are compiled for.
    targets: Vec<&'static str>,
    /// Sizes of real models that the demo runs.
    cases: Vec<&'static str>,
}

/// Prints all operators as JSON.
pub fn run(operators: &[&'static Operator]) -> Result<()> {
    out::json(&operators.iter().map(|o| status(o)).collect::<Vec<_>>())
}

fn status(operator: &Operator) -> Status {
    Status {
        name: operator.name,
        family: operator.family,
        summary: operator.summary,
        sources: operator.kernels.iter().map(|k| k.name()).collect(),
        targets: list::targets(operator),
        cases: operator.cases.iter().map(|c| c.label).collect(),
    }
}
