//! Decode GEMMs of experts: what a CU keeps in flight, and how few bytes they read.

use super::{both, profiles, ratio};
use crate::out::Table;
use crate::{Failure, Result};
use hk_core::registry::{Call, CallSpec, HostTensor, Scalar, TensorSpec};
use hk_core::{Arch, DType, Profile};

pub const TITLE: &str = "## Decode GEMMs of experts\n\n\
    Both GEMMs of the layers of DeepSeek-V3 (fp8 by 128 x 128 blocks), Qwen3 235B (bf16) and GPT-OSS 120B (bf16 by mxfp4), by two of the experts that\n\
    have rows, at full width: one row each, as of one token, and as many as of 64 tokens on average. `bytes`: distinct bytes over those of\n\
    weights, scales, activations and outputs. `in flight`: lines of 128 bytes that the loads of all resident waves of a compute unit have outstanding\n\
    at most. `drains`: full drains (vmcnt(0)) of a wave.";

const HEADER: [&str; 10] = [
    "GEMM",
    "rows of an expert",
    "kernel",
    ">bytes",
    ">by 16",
    ">VGPRs",
    ">waves/SIMD",
    ">scratch",
    ">in flight",
    ">drains",
];

/// Experts of a call.
const EXPERTS: usize = 2;
/// Waves of the persistent blocks of a CU, two of eight.
const PERSISTENT_WAVES: u64 = 16;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Weights {
    Bf16,
    Blocks,
    Mxfp4,
}

/// A GEMM: its rows of w and columns.
struct Gemm {
    name: &'static str,
    weights: Weights,
    gated: bool,
    w: [usize; 2],
    /// Rows of an expert, of 64 tokens.
    rows: usize,
}

const GEMMS: [Gemm; 6] = [
    Gemm { name: "DeepSeek-V3 up", weights: Weights::Blocks, gated: true, w: [4096, 7168], rows: 2 },
    Gemm { name: "DeepSeek-V3 down", weights: Weights::Blocks, gated: false, w: [7168, 2048], rows: 2 },
    Gemm { name: "Qwen3 235B up", weights: Weights::Bf16, gated: true, w: [3072, 4096], rows: 4 },
    Gemm { name: "Qwen3 235B down", weights: Weights::Bf16, gated: false, w: [4096, 1536], rows: 4 },
    Gemm { name: "GPT-OSS 120B up", weights: Weights::Mxfp4, gated: true, w: [5760, 2880], rows: 2 },
    Gemm { name: "GPT-OSS 120B down", weights: Weights::Mxfp4, gated: false, w: [2880, 2880], rows: 2 },
];

pub fn table() -> Result<Table> {
    let mut table = Table::new(HEADER);
    for gemm in &GEMMS {
        for rows in [1, gemm.rows] {
            let [a, b] = Arch::AMD.map(|arch| cells(gemm, rows, arch));
            let (a, b) = (Some(a?), Some(b?));
            let name = if rows == 1 { gemm.name } else { "" };
            let cells = (0..HEADER.len() - 2).map(|i| both(&a, &b, i));
            table.row([name.to_string(), rows.to_string()].into_iter().chain(cells));
        }
    }
    Ok(table)
}

fn cells(gemm: &Gemm, rows: usize, arch: Arch) -> Result<[String; HEADER.len() - 2]> {
    let &Gemm { name, weights, gated, w: [n, k], .. } = gemm;
    let op = match (weights, gated) {
        (Weights::Mxfp4, true) => "moe_op_mxfp4_silu_fused",
        (Weights::Mxfp4, false) => "moe_op_mxfp4",
        (_, true) => "moe_op_silu_fused",
        (_, false) => "moe_op",
    };
    let mut call: CallSpec = Call::new(crate::operator(op)?);
    let tokens = EXPERTS * rows;
    let (a, w, packed) = match weights {
        Weights::Bf16 => (DType::Bf16, DType::Bf16, 1),
        Weights::Blocks => (DType::fp8_of(arch), DType::fp8_of(arch), 1),
        Weights::Mxfp4 => (DType::Bf16, DType::Fp4x2, 2),
    };
    let mut floor = [
        tokens * k * a.size_bytes(),
        EXPERTS * n * k / packed * w.size_bytes(),
        tokens * if gated { n / 2 } else { n } * DType::Bf16.size_bytes(),
    ]
    .iter()
    .sum::<usize>();
    call.set("a", TensorSpec::new(a, [tokens, k]))?;
    call.set("w", TensorSpec::new(w, [EXPERTS, n, k / packed]))?;
    let groups = k.div_ceil(128);
    match weights {
        Weights::Bf16 => {}
        Weights::Blocks => {
            call.set("a_scale", TensorSpec::new(DType::F32, [tokens, groups]))?;
            call.set("w_scale", TensorSpec::new(DType::F32, [EXPERTS, n.div_ceil(128), groups]))?;
            floor += 4 * (tokens + EXPERTS * n.div_ceil(128)) * groups;
        }
        Weights::Mxfp4 => {
            call.set("w_mx", TensorSpec::new(DType::E8M0, [EXPERTS, n, k / 32]))?;
            floor += EXPERTS * n * k / 32;
        }
    }
    call.set("topk_ids", TensorSpec::new(DType::I32, [tokens, 1]))?;
    call.set_scalar("block_size", Scalar::Count(16))?;
    let mut call = call.sample(0)?;
    let ids: Vec<i32> = (0..tokens).map(|t| (t % EXPERTS) as i32).collect();
    call.set("topk_ids", HostTensor::new([tokens, 1], &ids)?)?;
    let counted = profiles(&call, name, &format!("emu:{arch}?details=true"))?;
    // The lists are kernels of their own.
    let of_experts = |profile: &Profile| profile.kernel.starts_with("experts_");
    let Some(profile) = counted.into_iter().flatten().find(of_experts) else {
        return Err(Failure::new(format!("{op}: no kernel of experts on {arch}")));
    };
    let (c, r) = (&profile.counters, &profile.resources);
    let d = c.details.unwrap_or_default();
    let resident = PERSISTENT_WAVES.min(u64::from(4 * r.waves_per_simd / 8 * 8));
    Ok([
        format!("`{}`", profile.kernel),
        ratio(d.distinct_read_bytes + d.distinct_written_bytes, floor as u64, 3),
        format!("{} %", ratio(100 * d.wide_bytes, c.global_read_bytes + c.global_written_bytes, 1)),
        (r.vgprs + r.agprs).to_string(),
        r.waves_per_simd.to_string(),
        r.scratch_bytes.to_string(),
        ratio(d.lines_in_flight * resident, c.waves, 0),
        ratio(d.drains, c.waves, 1),
    ])
}
