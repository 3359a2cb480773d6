//! Gradients of attention over long sequences: what their main launch keeps busy.

use super::{both, profiles, ratio};
use crate::out::Table;
use crate::{Failure, Result};
use hk_core::registry::{Call, CallSpec, HostCall, Scalar, TensorSpec};
use hk_core::{Arch, DType};
use hk_emu::Costs;

/// Queries and keys.
const ROWS: usize = 2048;
/// Columns of queries and keys, and of values.
const COLUMNS: [[usize; 2]; 4] = [[64, 64], [128, 128], [192, 128], [256, 256]];

pub const TITLE: &str = "## Gradients of 2048 queries and keys\n\n\
    One head without a mask, bf16: the launch of the main kernel alone. Clocks of a compute unit in thousands, by unit. `products`: matrix clocks over\n\
    those of the five products that gradients need. `matrix`: their clocks over those of the busiest unit. `of matrix`: clocks of LDS over those of\n\
    the matrix units. `LDS`: clocks of LDS over what they take without bank conflicts. `VALU`: vector-ALU instructions per score of a lane.";

const HEADER: [&str; 14] = [
    "operator",
    "kernel",
    ">VGPRs",
    ">LDS bytes",
    ">scratch",
    ">matrix clocks",
    ">vector",
    ">exp",
    ">LDS",
    ">products",
    ">matrix",
    ">of matrix",
    ">LDS",
    ">VALU",
];

pub fn table() -> Result<Table> {
    let mut table = Table::new(HEADER);
    for columns in COLUMNS {
        for (name, operator, sums) in [
            ("`mha_fused_bwd`", "mha_fused_bwd", Some("ordered")),
            ("`mha_fused_bwd`, atomic", "mha_fused_bwd", Some("atomic")),
            ("`mha_onekernel_bwd`", "mha_onekernel_bwd", None),
        ] {
            let [a, b] = Arch::AMD.map(|arch| cells(operator, sums, columns, arch));
            let (a, b) = (Some(a?), Some(b?));
            table.row([name.to_string()].into_iter().chain((0..HEADER.len() - 1).map(|i| both(&a, &b, i))));
        }
    }
    Ok(table)
}

fn call(operator: &str, sums: Option<&'static str>, [dqk, dv]: [usize; 2]) -> Result<HostCall> {
    let mut call: CallSpec = Call::new(crate::operator(operator)?);
    for (name, columns) in [("q", dqk), ("k", dqk), ("v", dv), ("out", dv), ("dout", dv)] {
        call.set(name, TensorSpec::new(DType::Bf16, [1, ROWS, 1, columns]))?;
    }
    call.set("lse", TensorSpec::new(DType::F32, [1, 1, ROWS]))?;
    if let Some(sums) = sums {
        call.set_scalar("dq_sums", Scalar::Choice(sums))?;
    }
    Ok(call.sample(0)?)
}

fn cells(
    operator: &str,
    sums: Option<&'static str>,
    columns: [usize; 2],
    arch: Arch,
) -> Result<[String; HEADER.len() - 1]> {
    let call = call(operator, sums, columns)?;
    let served = profiles(&call, "gradients", &format!("emu:{arch}?details=true"))?;
    let main = |kernel: &str| !kernel.starts_with("backward_delta") && !kernel.starts_with("backward_dq");
    let found = served.into_iter().flatten().find(|profile| main(&profile.kernel));
    let profile = found.ok_or_else(|| Failure::new(format!("{operator}: no kernel on {arch}")))?;
    let (c, resources) = (&profile.counters, &profile.resources);
    let d = c.details.unwrap_or_default();
    let clocks = Costs::of(arch).clocks(c);
    let thousands = |clocks: u64| ratio(clocks, 1000, 1);
    // Multiplications and additions of a clock of a compute unit's matrix units.
    let rate = if arch == Arch::Gfx942 { 2048 } else { 4096 };
    let needed = (2 * ROWS * ROWS * (3 * columns[0] + 2 * columns[1]) / rate) as u64;
    Ok([
        format!("`{}`", profile.kernel),
        (resources.vgprs + resources.agprs).to_string(),
        resources.lds_bytes.to_string(),
        resources.scratch_bytes.to_string(),
        thousands(clocks.matrix),
        thousands(clocks.vector),
        thousands(clocks.transcendental),
        thousands(clocks.lds),
        ratio(clocks.matrix, needed, 2),
        format!("{} %", ratio(100 * clocks.matrix, clocks.busiest(), 0)),
        format!("{} %", ratio(100 * clocks.lds, clocks.matrix, 0)),
        ratio(d.lds_clocks, d.lds_clocks - d.lds_conflict_clocks, 2),
        ratio(64 * c.valu, (ROWS * ROWS) as u64, 2),
    ])
}
