//! Scores of an indexer over long contexts: what a compute unit is busy with.

use super::{Facts, both, ratio};
use crate::Result;
use crate::out::Table;
use hk_core::registry::{Call, CallSpec, HostCall, HostTensor, Scalar, TensorSpec};
use hk_core::{Arch, DType};
use hk_emu::Costs;

const KEYS: usize = 8192;
/// Heads and columns: DeepSeek-V3.2.
const HEADS: usize = 64;
const COLUMNS: usize = 128;
/// Queries of a chunk of a prompt: the last ones of the keys.
const QUERIES: usize = 512;

pub const TITLE: &str = "## Scores of an indexer over 8192 keys\n\n\
    64 heads of 128 columns, as of DeepSeek-V3.2: the last 512 tokens of a prompt, and the last tokens of a sequence, its pages in reverse order. Clocks of a\n\
    compute unit in thousands, by unit, of all blocks. `cache`: those in which lanes exchange their bytes with the cache, 64 in a clock. `memory`: those in\n\
    which memory brings the distinct bytes, at a compute unit's share of 8.3 bytes a clock (gfx942) or 13 (gfx950). `products`: matrix clocks over those of\n\
    the products of all queries and the keys that they see. `VALU`: vector-ALU instructions per score of a lane. `matrix`: matrix clocks over those of the\n\
    busiest of matrix, vector and cache; `bound`: over those of the busiest, matrix and packed f32 being one unit.";

const HEADER: [&str; 14] = [
    "queries, pages",
    "kernel",
    ">VGPRs",
    ">waves/SIMD",
    ">scratch",
    ">matrix clocks",
    ">vector",
    ">packed f32",
    ">cache",
    ">memory",
    ">products",
    ">VALU",
    ">matrix",
    ">bound",
];

/// Queries, and tokens of a page; none: rows.
const CASES: [(&str, usize, Option<usize>); 5] = [
    ("512", QUERIES, None),
    ("1, pages of 64 tokens", 1, Some(64)),
    ("4, pages of 64 tokens", 4, Some(64)),
    ("1, pages of 1 token", 1, Some(1)),
    ("4, pages of 1 token", 4, Some(1)),
];

pub fn table() -> Result<Table> {
    let mut table = Table::new(HEADER);
    for (name, queries, page) in CASES {
        let [a, b] = Arch::AMD.map(|arch| Facts::of_call(&call(arch, queries, page)?, "an indexer", arch));
        let (a, b) = (a?.map(|f| cells(&f, queries)), b?.map(|f| cells(&f, queries)));
        table.row([name.to_string()].into_iter().chain((0..HEADER.len() - 1).map(|i| both(&a, &b, i))));
    }
    Ok(table)
}

/// Keys that query `i` of `queries` sees: it and those before it.
fn seen(i: usize, queries: usize) -> usize {
    KEYS - queries + i + 1
}

fn call(arch: Arch, queries: usize, page: Option<usize>) -> Result<HostCall> {
    let fp8 = DType::fp8_of(arch);
    let Some(tokens) = page else {
        let mut call: CallSpec = Call::new(crate::operator("fp8_mqa_logits")?);
        call.set("q", TensorSpec::new(fp8, [queries, HEADS, COLUMNS]))?;
        call.set("k", TensorSpec::new(fp8, [KEYS, COLUMNS]))?;
        call.set("k_scale", TensorSpec::new(DType::F32, [KEYS]))?;
        call.set("weights", TensorSpec::new(DType::F32, [queries, HEADS]))?;
        for name in ["starts", "ends"] {
            call.set(name, TensorSpec::new(DType::I32, [queries]))?;
        }
        let mut call = call.sample(0)?;
        let ends: Vec<i32> = (0..queries).map(|i| seen(i, queries) as i32).collect();
        call.set("starts", HostTensor::new([queries], &vec![0i32; queries])?)?;
        call.set("ends", HostTensor::new([queries], &ends)?)?;
        return Ok(call);
    };
    let pages = KEYS / tokens;
    let mut call: CallSpec = Call::new(crate::operator("pa_mqa_logits")?);
    call.set("q", TensorSpec::new(fp8, [1, queries, HEADS, COLUMNS]))?;
    call.set("k", TensorSpec::new(fp8, [pages, tokens, COLUMNS]))?;
    call.set("k_scale", TensorSpec::new(DType::F32, [pages, tokens]))?;
    call.set("weights", TensorSpec::new(DType::F32, [queries, HEADS]))?;
    call.set("context_lens", TensorSpec::new(DType::I32, [1]))?;
    call.set("block_table", TensorSpec::new(DType::I32, [1, pages]))?;
    call.set_scalar("max_len", Scalar::Count(KEYS as u64))?;
    let mut call = call.sample(0)?;
    let backwards: Vec<i32> = (0..pages as i32).rev().collect();
    call.set("block_table", HostTensor::new([1, pages], &backwards)?)?;
    call.set("context_lens", HostTensor::new([1], &[KEYS as i32])?)?;
    Ok(call)
}

fn cells(facts: &Facts, queries: usize) -> [String; HEADER.len() - 1] {
    let c = &facts.sum;
    let d = c.details.unwrap_or_default();
    let clocks = Costs::of(facts.arch).clocks(c);
    let thousands = |clocks: u64| ratio(clocks, 1000, 1);
    // Of a compute unit and clock, fp8.
    let (flops_of_clock, per_clock) = if facts.arch == Arch::Gfx942 { (4096, 8.3) } else { (8192, 13.0) };
    let scores = (0..queries).map(|i| seen(i, queries) * HEADS).sum::<usize>();
    let memory = ((d.distinct_read_bytes + d.distinct_written_bytes) as f64 / per_clock) as u64;
    let share = |of: u64| ratio(100 * clocks.matrix, of, 0) + " %";
    [
        facts.kernel_names(),
        facts.each(|k| k.resources.vgprs + k.resources.agprs),
        facts.each(|k| k.resources.waves_per_simd),
        facts.each(|k| k.resources.scratch_bytes),
        thousands(clocks.matrix),
        thousands(clocks.vector),
        thousands(clocks.packed_f32),
        thousands(clocks.memory),
        thousands(memory),
        ratio(clocks.matrix, (2 * scores * COLUMNS / flops_of_clock) as u64, 2),
        format!("{:.2}", (c.valu * 64) as f64 / scores as f64),
        share(clocks.busiest()),
        share(clocks.busiest().max(clocks.matrix + clocks.packed_f32)),
    ]
}
