//! `hk status`: what the registry knows of every operator, or what the emulator does of every instruction, as JSON for
//! `cargo xtask status`.

use crate::{Result, list, out};
use hk_codeobj::Arch;
use hk_core::registry::Operator;
use hk_emu::isa::{self, ALL_OPS};
use serde::Serialize;

/// An operator.
#[derive(Debug, Serialize)]
struct Status {
    name: &'static str,
    family: &'static str,
    summary: &'static str,
    /// Of [`MODULES`].
    module: Option<&'static str>,
    /// Sources that it launches kernels from.
    sources: Vec<&'static str>,
    /// Targets that all of them are compiled for.
    targets: Vec<&'static str>,
    /// Sizes of real models that the demo runs.
    cases: Vec<&'static str>,
}

/// Modules of AITER's Triton kernels that hold operators of other names.
const MODULES: [(&str, &[&str]); 5] = [
    ("cumsum", &["chunk_local_cumsum"]),
    ("l2norm", &["l2norm_bwd"]),
    ("wy_representation", &["chunk_scaled_dot_kkt", "recompute_w_u"]),
    (
        "index",
        &[
            "prepare_lens",
            "prepare_cu_seqlens_from_lens",
            "prepare_position_ids",
            "prepare_sequence_ids",
            "prepare_chunk_offsets",
            "gpu_prepare_chunk_indices",
            "get_max_num_splits",
        ],
    ),
    (
        "gdr_utils",
        &["bf16_to_float", "float_to_bf16", "abs_diff", "squared_diff", "sum_reduce", "max_reduce"],
    ),
];

/// Options of `hk status`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The instructions of the emulator instead of the operators.
    #[arg(long)]
    isa: bool,
}

/// An instruction on one target.
#[derive(Debug, Serialize)]
struct Instruction {
    target: &'static str,
    group: &'static str,
    name: &'static str,
    decoded: bool,
    executed: bool,
    fidelity: String,
    reason: &'static str,
}

/// Prints all operators, or all instructions, as JSON.
pub fn run(args: &Args, operators: &[&'static Operator]) -> Result<()> {
    if args.isa {
        return out::json(&instructions());
    }
    out::json(&operators.iter().map(|o| status(o)).collect::<Vec<_>>())
}

fn instructions() -> Vec<Instruction> {
    let on =
        |arch: Arch| ALL_OPS.iter().filter(move |op| op.info().exists_on(arch)).map(move |op| (arch, *op));
    Arch::AMD
        .into_iter()
        .flat_map(on)
        .map(|(arch, op)| {
            let (fidelity, reason) = op.fidelity(arch);
            Instruction {
                target: arch.name(),
                group: isa::group(op),
                name: op.info().name,
                decoded: isa::decodes(op, arch),
                executed: hk_emu::executes(op, arch).is_ok(),
                fidelity: fidelity.to_string(),
                reason,
            }
        })
        .collect()
}

fn status(operator: &Operator) -> Status {
    Status {
        name: operator.name,
        family: operator.family,
        summary: operator.summary,
        module: MODULES.iter().find(|(_, of)| of.contains(&operator.name)).map(|(module, _)| *module),
        sources: operator.kernels.iter().map(|k| k.name()).collect(),
        targets: list::targets(operator),
        cases: operator.cases.iter().map(|c| c.label).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_hold_operators() {
        let operators = crate::operators();
        for name in MODULES.iter().flat_map(|(_, of)| *of) {
            assert!(operators.iter().any(|op| op.name == *name), "{name}");
        }
    }
}
