//! Attention over latent rows: what a block keeps busy.

use super::{Facts, both, ratio};
use crate::Result;
use crate::out::Table;
use hk_core::registry::{Call, CallSpec, HostCall, HostTensor, Scalar, TensorSpec};
use hk_core::{Arch, DType};
use hk_emu::Costs;

const KEYS: usize = 8192;
/// Columns of queries and keys, and of values: DeepSeek-V3.
const COLUMNS: [usize; 2] = [576, 512];

pub const TITLE: &str = "## A query over 8192 latent rows\n\n\
    One query of `mla_decode_rope`, 576 and 512 columns, its keys in slots in any order. Clocks of a compute unit in thousands, by unit, of all \
    blocks.\n`bytes`: distinct bytes over the rows, queries and outputs. `of nominal`: matrix clocks over those of the products of all heads and \
    keys, without\npadding and without the scores that more than one wave makes. `LDS`: clocks of LDS over what they take without bank \
    conflicts. `drains`: full drains\n(vmcnt(0)) of a wave between matrix instructions.";

const HEADER: [&str; 15] = [
    "heads, rows",
    "kernel",
    ">VGPRs",
    ">LDS bytes",
    ">waves/SIMD",
    ">scratch",
    ">bytes",
    ">by 16",
    ">matrix clocks",
    ">vector",
    ">LDS",
    ">memory",
    ">of nominal",
    ">LDS",
    ">drains",
];

#[derive(Clone, Copy)]
enum Rows {
    Bf16,
    Fp8,
    Packed,
}

pub fn table() -> Result<Table> {
    let mut table = Table::new(HEADER);
    for (rows, name) in [(Rows::Bf16, "bf16"), (Rows::Fp8, "fp8"), (Rows::Packed, "656 bytes")] {
        for heads in [16, 64, 128] {
            let facts = |arch| Facts::of_call(&call(arch, heads, rows)?, "latent rows", arch);
            let [a, b] = Arch::AMD.map(facts);
            let (a, b) = (a?.map(|f| cells(&f, heads)), b?.map(|f| cells(&f, heads)));
            let name = format!("{heads}, {name}");
            table.row([name].into_iter().chain((0..HEADER.len() - 1).map(|i| both(&a, &b, i))));
        }
    }
    Ok(table)
}

fn call(arch: Arch, heads: usize, rows: Rows) -> Result<HostCall> {
    let fp8 = DType::fp8_of(arch);
    let [dqk, _] = COLUMNS;
    let (dtype, columns) = match rows {
        Rows::Bf16 => (DType::Bf16, dqk),
        Rows::Fp8 => (fp8, dqk),
        Rows::Packed => (fp8, 656),
    };
    let mut call: CallSpec = Call::new(crate::operator("mla_decode_rope")?);
    call.set("q", TensorSpec::new(DType::Bf16, [1, heads, dqk]))?;
    call.set("kv_pool", TensorSpec::new(dtype, [KEYS, 1, 1, columns]))?;
    call.set("kv_indptr", TensorSpec::new(DType::I32, [2]))?;
    call.set("kv_indices", TensorSpec::new(DType::I32, [KEYS]))?;
    call.set_scalar("tile", Scalar::Choice(if heads > 16 { "tall" } else { "short" }))?;
    call.set_scalar("nsplit", Scalar::Count(1))?;
    let mut call = call.sample(0)?;
    let backwards: Vec<i32> = (0..KEYS as i32).rev().collect();
    call.set("kv_indices", HostTensor::new([KEYS], &backwards)?)?;
    Ok(call)
}

fn cells(facts: &Facts, heads: usize) -> [String; HEADER.len() - 1] {
    let c = &facts.sum;
    let d = c.details.unwrap_or_default();
    let clocks = Costs::of(facts.arch).clocks(c);
    let thousands = |clocks: u64| ratio(clocks, 1000, 1);
    // Of a compute unit and clock, bf16.
    let flops_of_clock = if facts.arch == Arch::Gfx942 { 2048 } else { 4096 };
    let nominal = 2 * heads * KEYS * COLUMNS.iter().sum::<usize>() / flops_of_clock;
    [
        facts.kernel_names(),
        facts.each(|k| k.resources.vgprs + k.resources.agprs),
        facts.each(|k| k.resources.lds_bytes),
        facts.each(|k| k.resources.waves_per_simd),
        facts.each(|k| k.resources.scratch_bytes),
        ratio(d.distinct_read_bytes + d.distinct_written_bytes, facts.floor, 2),
        format!("{} %", ratio(100 * d.wide_bytes, c.global_read_bytes + c.global_written_bytes, 0)),
        thousands(clocks.matrix),
        thousands(clocks.vector),
        thousands(clocks.lds),
        thousands(clocks.memory),
        ratio(clocks.matrix, nominal as u64, 2),
        ratio(d.lds_clocks, d.lds_clocks - d.lds_conflict_clocks, 2),
        ratio(d.drains, c.waves, 0),
    ]
}
