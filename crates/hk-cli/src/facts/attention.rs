//! Attention of a tile of queries over many keys: what a block keeps busy.

use super::{Facts, both, ratio};
use crate::Result;
use crate::out::Table;
use hk_core::registry::{Call, CallSpec, HostCall, HostTensor, Scalar, TensorSpec};
use hk_core::{Arch, DType};
use hk_emu::Costs;

const KEYS: usize = 8192;
/// A multiple of the queries of every block.
const QUERIES: usize = 256;
/// Columns of queries and keys, and of values.
const COLUMNS: [[usize; 2]; 4] = [[64, 64], [128, 128], [192, 128], [256, 256]];
/// Tokens of a page.
const PAGE: usize = 16;

pub const TITLE: &str = "## A tile of queries over 8192 keys\n\n\
    256 queries of one head, bf16, by the kernel of tall tiles: `mha` without a mask, and `unified_attn`, whose keys are in pages of 16 tokens.\nClocks of a compute unit in thousands, by unit; \
    `exp` are those of\nvector issue for exponentials and the like. `matrix`: their clocks over those of the busiest unit. \
    `bound`: over the sum of matrix,\ntranscendental and packed f32 clocks, which never overlap within a SIMD of gfx942. \
    `LDS`: clocks of LDS over what they take without\nbank conflicts. `VALU`: vector-ALU instructions per score of a lane. \
    `drains`: full drains (vmcnt(0)) of a wave between matrix instructions.";

const HEADER: [&str; 16] = [
    "columns",
    "kernel",
    ">queries of a block",
    ">VGPRs",
    ">LDS bytes",
    ">waves/SIMD",
    ">scratch",
    ">matrix clocks",
    ">vector",
    ">exp",
    ">LDS",
    ">memory",
    ">matrix",
    ">bound",
    ">LDS",
    ">VALU, drains",
];

pub fn table() -> Result<Table> {
    let mut table = Table::new(HEADER);
    let mut row = |name: String, call: &dyn Fn(Arch) -> Result<HostCall>| -> Result<()> {
        let [a, b] = Arch::AMD.map(|arch| Facts::of_call(&call(arch)?, "a tile", arch));
        let (a, b) = (a?.map(|f| cells(&f)), b?.map(|f| cells(&f)));
        table.row([name].into_iter().chain((0..HEADER.len() - 1).map(|i| both(&a, &b, i))));
        Ok(())
    };
    for columns in COLUMNS {
        let [dqk, dv] = columns;
        let name = if dqk == dv { dqk.to_string() } else { format!("{dqk}, {dv}") };
        row(name, &|_| fresh(DType::Bf16, columns))?;
    }
    row("128, pages".into(), &|_| paged(DType::Bf16))?;
    row("128, pages of fp8".into(), &|arch| paged(DType::fp8_of(arch)))?;
    for columns in [[128, 128], [256, 256]] {
        row(format!("{}, all fp8", columns[0]), &|arch| fresh(DType::fp8_of(arch), columns))?;
    }
    Ok(table)
}

fn fresh(dtype: DType, [dqk, dv]: [usize; 2]) -> Result<HostCall> {
    let mut call: CallSpec = Call::new(crate::operator("mha")?);
    for (name, rows, columns) in [("q", QUERIES, dqk), ("k", KEYS, dqk), ("v", KEYS, dv)] {
        call.set(name, TensorSpec::new(dtype, [1, rows, 1, columns]))?;
    }
    call.set_scalar("tile", Scalar::Choice("tall"))?;
    Ok(call.sample(0)?)
}

fn paged(cache: DType) -> Result<HostCall> {
    let mut call: CallSpec = Call::new(crate::operator("unified_attn")?);
    let pages = KEYS / PAGE;
    call.set("q", TensorSpec::new(DType::Bf16, [QUERIES, 1, 128]))?;
    for name in ["k_cache", "v_cache"] {
        call.set(name, TensorSpec::new(cache, [pages, PAGE, 1, 128]))?;
    }
    call.set("block_table", TensorSpec::new(DType::I32, [1, pages]))?;
    call.set("cu_seqlens_q", TensorSpec::new(DType::I32, [2]))?;
    call.set("seqused_k", TensorSpec::new(DType::I32, [1]))?;
    call.set_scalar("tile", Scalar::Choice("tall"))?;
    let mut call = call.sample(0)?;
    let backwards: Vec<i32> = (0..pages as i32).rev().collect();
    call.set("block_table", HostTensor::new([1, pages], &backwards)?)?;
    call.set("seqused_k", HostTensor::new([1], &[KEYS as i32])?)?;
    Ok(call)
}

fn cells(facts: &Facts) -> [String; HEADER.len() - 1] {
    let c = &facts.sum;
    let d = c.details.unwrap_or_default();
    let clocks = Costs::of(facts.arch).clocks(c);
    let thousands = |clocks: u64| ratio(clocks, 1000, 1);
    [
        facts.kernel_names(),
        ratio(32 * c.waves, c.workgroups, 0),
        facts.each(|k| k.resources.vgprs + k.resources.agprs),
        facts.each(|k| k.resources.lds_bytes),
        facts.each(|k| k.resources.waves_per_simd),
        facts.each(|k| k.resources.scratch_bytes),
        thousands(clocks.matrix),
        thousands(clocks.vector),
        thousands(clocks.transcendental),
        thousands(clocks.lds),
        thousands(clocks.memory),
        format!("{} %", ratio(100 * clocks.matrix, clocks.busiest(), 0)),
        format!("{:.0} %", 100.0 * clocks.matrix_bound()),
        ratio(d.lds_clocks, d.lds_clocks - d.lds_conflict_clocks, 2),
        format!("{}, {}", ratio(64 * c.valu, (QUERIES * KEYS) as u64, 2), ratio(d.drains, c.waves, 0)),
    ]
}
