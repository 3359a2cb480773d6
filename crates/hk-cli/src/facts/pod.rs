//! Prompts beside single tokens: what one launch keeps busy.

use super::{Facts, ratio};
use crate::out::Table;
use crate::{Failure, Result};
use hk_core::registry::{Call, CallSpec, HostCall, HostTensor, Scalar, TensorSpec};
use hk_core::{Arch, DType};
use hk_emu::Costs;

/// Query heads of the one key head.
const GROUP: usize = 8;
const COLUMNS: usize = 128;
const PAGE: usize = 16;
const PROMPT: usize = 1024;
const TOKENS: usize = 2;
/// Of each token.
const KEYS: usize = 4096;

pub const TITLE: &str = "## A prompt beside single tokens\n\n\
    A causal prompt of 1024 tokens, and 2 tokens over 4096 keys each in pages of 16: 8 query heads of one key head, d = 128, bf16.\n\
    Clocks of a compute unit in thousands, by unit, of all blocks; `memory`: those in which it brings the distinct bytes, at a compute\n\
    unit's share of 8.3 bytes a clock (gfx942) or 13 (gfx950); `at least`: those of the busiest unit. Launches that follow each other take\n\
    the sum of theirs; in one launch the busiest unit of both bounds.";

pub fn table() -> Result<Table> {
    let header =
        ["target", "launch", ">blocks", ">VGPRs", ">matrix", ">vector", ">LDS", ">memory", ">at least"];
    let mut table = Table::new(header);
    for arch in Arch::AMD {
        let mut apart = 0;
        for (name, call) in [("prompt", prompt()?), ("tokens", tokens()?), ("both", both()?)] {
            let facts = Facts::of_call(&call, name, arch)?;
            let facts = facts.ok_or_else(|| Failure::new(format!("{name}: nothing ran on {arch}")))?;
            let clocks = Costs::of(arch).clocks(&facts.sum);
            let d = facts.sum.details.unwrap_or_default();
            let per_clock = if arch == Arch::Gfx942 { 8.3 } else { 13.0 };
            let memory = ((d.distinct_read_bytes + d.distinct_written_bytes) as f64 / per_clock) as u64;
            let thousands = |clocks: u64| ratio(clocks, 1000, 0);
            let busiest = clocks.busiest().max(memory);
            let least = if name == "both" {
                format!("{}, apart {}", thousands(busiest), thousands(apart))
            } else {
                thousands(busiest)
            };
            apart += busiest;
            table.row([
                arch.to_string(),
                name.into(),
                facts.sum.workgroups.to_string(),
                facts.each(|k| k.resources.vgprs + k.resources.agprs),
                thousands(clocks.matrix),
                thousands(clocks.vector),
                thousands(clocks.lds),
                thousands(memory),
                least,
            ]);
        }
    }
    Ok(table)
}

fn set_prompt(call: &mut CallSpec, [q, k, v]: [&str; 3]) -> Result<()> {
    call.set(q, TensorSpec::new(DType::Bf16, [PROMPT, GROUP, COLUMNS]))?;
    for name in [k, v] {
        call.set(name, TensorSpec::new(DType::Bf16, [PROMPT, 1, COLUMNS]))?;
    }
    for name in ["cu_seqlens_q", "cu_seqlens_k"] {
        call.set(name, TensorSpec::new(DType::I32, [2]))?;
    }
    Ok(())
}

fn set_tokens(call: &mut CallSpec, q: &str) -> Result<()> {
    let pages = TOKENS * KEYS / PAGE;
    call.set(q, TensorSpec::new(DType::Bf16, [TOKENS, GROUP, COLUMNS]))?;
    for name in ["k_cache", "v_cache"] {
        call.set(name, TensorSpec::new(DType::Bf16, [pages, PAGE, 1, COLUMNS]))?;
    }
    call.set("block_table", TensorSpec::new(DType::I32, [TOKENS, pages / TOKENS]))?;
    call.set("seq_lens", TensorSpec::new(DType::I32, [TOKENS]))?;
    call.set_scalar("nsplit", Scalar::Count(2))?;
    Ok(())
}

/// All keys of all pages.
fn filled(mut call: HostCall) -> Result<HostCall> {
    let pages = TOKENS * KEYS / PAGE;
    let table: Vec<i32> = (0..pages as i32).rev().collect();
    call.set("block_table", HostTensor::new([TOKENS, pages / TOKENS], &table)?)?;
    call.set("seq_lens", HostTensor::new([TOKENS], &[KEYS as i32; TOKENS])?)?;
    Ok(call)
}

fn prompt() -> Result<HostCall> {
    let mut call: CallSpec = Call::new(crate::operator("mha_varlen")?);
    set_prompt(&mut call, ["q", "k", "v"])?;
    call.set_scalar("causal", Scalar::Bool(true))?;
    call.set_scalar("tile", Scalar::Choice("short"))?;
    started(call.sample(0)?)
}

/// One sequence.
fn started(mut call: HostCall) -> Result<HostCall> {
    for name in ["cu_seqlens_q", "cu_seqlens_k"] {
        call.set(name, HostTensor::new([2], &[0, PROMPT as i32])?)?;
    }
    Ok(call)
}

fn tokens() -> Result<HostCall> {
    let mut call: CallSpec = Call::new(crate::operator("pa_decode")?);
    set_tokens(&mut call, "q")?;
    filled(call.sample(0)?)
}

fn both() -> Result<HostCall> {
    let mut call: CallSpec = Call::new(crate::operator("pod_attn")?);
    set_prompt(&mut call, ["q_prefill", "k_prefill", "v_prefill"])?;
    set_tokens(&mut call, "q_decode")?;
    started(filled(call.sample(0)?)?)
}
