//! What `hk inspect` says of configurations.

use super::{options, sizes};
use crate::GemmTile;
use crate::a8w8::sealed::MatrixCode;
use crate::a16w16::sealed::Half;
use crate::config::Job;
use crate::problem::{MOST_ATOMIC_SPLITS, MOST_SPLITS, outputs};
use hk_core::registry::{CallSpec, Choice, Described};
use hk_core::{DType, DeviceInfo, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, bf16, f16};

/// The tiles that can make a product of contiguous operands, each with the parts of K that suit it best, and which is taken: by
/// the shortest modelled time and the rules of [`GemmConfig`](crate::GemmConfig), or because the call says so.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape) and [`Argument`](hk_core::Error::Argument) for a call that is none of its operator,
/// [`DType`](hk_core::Error::DType) for operands of a type that has no such kernels,
/// [`Unsupported`](hk_core::Error::Unsupported) for other operators.
pub fn choices(call: &CallSpec, info: &DeviceInfo) -> Result<Vec<Choice>> {
    let name = call.operator().name;
    let (gated, block) = (name == "gemm_a16w16_gated", name == "gemm_a8w8_blockscale");
    let adds = name == "gemm_a16w16_atomic";
    let half = |plain, of_gates| if gated { of_gates } else { plain };
    let code = |plain, of_blocks| if block { of_blocks } else { plain };
    let plain =
        ["gemm_a16w16", "gemm_a8w8", "gemm_a8w8_per_token_scale", "batched_gemm_bf16", "batched_gemm_a8w8"];
    if !(gated || block || adds || plain.contains(&name)) {
        return Err(Error::unsupported(
            name,
            "its configurations",
            format!("only those of {}", plain.join(", ")),
        ));
    }
    let (precision, kernels) = match call.get("a")?.dtype() {
        DType::Bf16 => (bf16::PRECISION, half(bf16::KERNELS, bf16::GATED)),
        DType::F16 => (f16::PRECISION, half(f16::KERNELS, f16::GATED)),
        DType::I8 => (i8::PRECISION, code(i8::KERNELS, i8::BLOCK)),
        DType::Fp8E4M3 => (Fp8E4M3::PRECISION, code(Fp8E4M3::KERNELS, Fp8E4M3::BLOCK)),
        DType::Fp8E4M3Fnuz => (Fp8E4M3Fnuz::PRECISION, code(Fp8E4M3Fnuz::KERNELS, Fp8E4M3Fnuz::BLOCK)),
        other => return Err(Error::dtype(name, "a", other, "bf16, f16, i8, fp8e4m3fnuz, fp8e4m3")),
    };
    let sizes = sizes(call)?;
    let [batch, m, n, k] = sizes;
    let fine = block && call.int("group_n")? < 4;
    let serves = |tile: GemmTile| !kernels.names[tile.index()].is_empty() && (!fine || !tile.skinny());
    let job = Job {
        info,
        precision,
        sizes,
        vectors: precision.bytes(k).is_multiple_of(16),
        most_splits: if adds { MOST_ATOMIC_SPLITS } else { MOST_SPLITS },
    };
    let asked = options(call)?.config;
    let chosen = asked.unwrap_or_else(|| job.choose(serves));
    let mut candidates = job.candidates(serves);
    match candidates.iter_mut().find(|(config, _)| config.tile == chosen.tile) {
        Some(candidate) => *candidate = (chosen, job.time(chosen)),
        None => candidates.push((chosen, job.time(chosen))),
    }
    let groups = if block { call.int("group_k")?.max(1) as usize } else { 1 };
    let describe = |(config, time): (crate::GemmConfig, f64)| {
        let (each, splits) = config.parts(k, precision, groups);
        let (m_tiles, n_tiles) = config.tiles(m, n);
        let (tile_m, tile_n) = config.tile.shape();
        let planes = if splits > 1 && !adds { splits.saturating_mul(outputs([batch, m, n])) } else { 0 };
        let blocks = outputs([batch, m_tiles, n_tiles]).saturating_mul(splits);
        let values = vec![
            ("tile", format!("{tile_m}x{tile_n}")),
            ("kernel", kernels.names[config.tile.index()].to_owned()),
            ("waves", config.tile.waves().to_string()),
            ("operands", if config.tile.skinny() { "registers" } else { "LDS" }.to_owned()),
            ("K at a time", (config.tile.stretch() * 8 / precision.bits()).to_string()),
            ("stages", config.tile.stages(info.arch).to_string()),
            ("parts of K", splits.to_string()),
            ("K of a part", each.min(k).to_string()),
            ("blocks", blocks.to_string()),
            ("group", config.group.clamp(1, m_tiles.max(1)).to_string()),
            ("workspace, bytes", planes.saturating_mul(size_of::<f32>()).to_string()),
            ("modelled us", format!("{:.1}", time / 1000.0)),
        ];
        Choice { values, chosen: config.tile == chosen.tile }
    };
    Ok(candidates.into_iter().map(describe).collect())
}
