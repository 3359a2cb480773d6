//! What `hk inspect` says of configurations.

use super::{activations, block_shape, options, sizes};
use crate::a8w8::sealed::MatrixCode;
use crate::a16w16::sealed::Half;
use crate::config::Job;
use crate::fp4::{FP4, FP8};
use crate::mxfp8::MXFP8;
use crate::problem::{GROUP, GROUP_BY_VECTORS, Kernels};
use crate::problem::{MOST_ATOMIC_SPLITS, MOST_SPLITS, outputs};
use crate::quantized::ROWS_ON_THEIR_WAY;
use crate::{BlockShape, GemmTile, Precision};
use hk_core::registry::{CallSpec, Choice, Described};
use hk_core::{DType, DeviceInfo, Error, Fp8E4M3, Fp8E4M3Fnuz, Result, bf16, f16};

/// How parts of K meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parts {
    Planes,
    Added,
    /// There is but one.
    One,
}

/// What an operator multiplies, and with which kernels.
struct Kind {
    precision: Precision,
    kernels: &'static Kernels,
    /// Of scales.
    groups: Option<BlockShape>,
    parts: Parts,
}

/// The constant of a type of 16-bit floats, or of codes.
macro_rules! of_half {
    ($name:expr, $dtype:expr, $constant:ident) => {
        match $dtype {
            DType::Bf16 => Ok(bf16::$constant),
            DType::F16 => Ok(f16::$constant),
            other => Err(Error::dtype($name, "a", other, "bf16, f16")),
        }
    };
}
macro_rules! of_code {
    ($name:expr, $dtype:expr, $constant:ident) => {
        match $dtype {
            DType::I8 => Ok(i8::$constant),
            DType::Fp8E4M3 => Ok(Fp8E4M3::$constant),
            DType::Fp8E4M3Fnuz => Ok(Fp8E4M3Fnuz::$constant),
            other => Err(Error::dtype($name, "a", other, "i8, fp8e4m3fnuz, fp8e4m3")),
        }
    };
}

impl Kind {
    fn of(call: &CallSpec) -> Result<Self> {
        let name = call.operator().name;
        let others = || Error::unsupported(name, "its configurations", "only those of products of GemmTile");
        if call.operator().arg("w").is_none() {
            return Err(others());
        }
        let w = call.get("w")?.dtype();
        let a = activations(call)?.dtype();
        let [_, m, _, _] = sizes(call)?;
        let group = || block_shape(call);
        // Of mxfp4, K is cut between groups of 128.
        let mx = Some(BlockShape::default());
        let with = |precision, kernels, groups| Ok(Self { precision, kernels, groups, parts: Parts::Planes });
        // Few rows are quantized on their way.
        let prequant = name.ends_with("ptgq") || call.bool("prequant").unwrap_or(false);
        let on_their_way = prequant && m <= ROWS_ON_THEIR_WAY;
        let half = usize::from(a == DType::F16);
        let kind = match name {
            "gemm_a16w16"
            | "gemm_a16w16_atomic"
            | "batched_gemm_bf16"
            | "deepgemm_masked"
            | "deepgemm_contiguous" => with(of_half!(name, a, PRECISION)?, of_half!(name, a, KERNELS)?, None),
            "gemm_a16w16_gated" => with(of_half!(name, a, PRECISION)?, of_half!(name, a, GATED)?, None),
            "gemm_a8w8" | "gemm_a8w8_per_token_scale" | "batched_gemm_a8w8" => {
                with(of_code!(name, a, PRECISION)?, of_code!(name, a, KERNELS)?, None)
            }
            "gemm_a8w8_blockscale"
            | "fused_gemm_a8w8_blockscale_mul_add"
            | "fused_gemm_a8w8_blockscale_split_cat" => with(
                of_code!(name, a, PRECISION)?,
                group()?.kernels(of_code!(name, a, BLOCK)?),
                Some(group()?),
            ),
            "deepgemm_masked_a8w8" | "deepgemm_contiguous_a8w8" => {
                let blocks = call.bool("blocks")?;
                let groups = if blocks { Some(group()?) } else { None };
                let kernels = match groups {
                    Some(group) => group.kernels(of_code!(name, a, BLOCK)?),
                    None => of_code!(name, a, KERNELS)?,
                };
                with(of_code!(name, a, PRECISION)?, kernels, groups)
            }
            "gemm_a16w8_blockscale" | "batched_gemm_a8w8_ptgq" => {
                let n = call.int("group_n").unwrap_or(128);
                let group = BlockShape { n: n as usize, k: call.int("group_k")? as usize };
                if on_their_way && group.k == GROUP {
                    with(Precision::HalfByByte, of_code!(name, w, OF_QUANTIZED)?[half], Some(group))
                } else if prequant {
                    with(of_code!(name, w, PRECISION)?, group.kernels(of_code!(name, w, BLOCK)?), Some(group))
                } else {
                    with(
                        Precision::HalfByByte,
                        group.kernels(of_code!(name, w, OF_HALVES)?[half]),
                        Some(group),
                    )
                }
            }
            "gemm_a16wfp4" | "gemm_a16wfp4_atomic" | "batched_gemm_a16wfp4" => {
                if on_their_way {
                    with(Precision::HalfByFp4, of_half!(name, a, TO_FP4)?, mx)
                } else if prequant {
                    with(Precision::Fp4, &FP4, mx)
                } else {
                    with(Precision::HalfByFp4, of_half!(name, a, BY_FP4)?, mx)
                }
            }
            "gemm_afp8wfp8" => with(of_code!(name, a, PRECISION)?, &MXFP8, mx),
            "gemm_a8wfp4" => with(Precision::Fp8ByFp4, &FP8, mx),
            "gemm_afp4wfp4"
            | "batched_gemm_afp4wfp4"
            | "fused_gemm_afp4wfp4_mul_add"
            | "fused_gemm_afp4wfp4_split_cat" => with(Precision::Fp4, &FP4, mx),
            _ => Err(others()),
        }?;
        let parts = match name {
            _ if name.ends_with("_atomic") => Parts::Added,
            _ if name.starts_with("deepgemm") => Parts::One,
            _ => Parts::Planes,
        };
        Ok(Self { parts, ..kind })
    }
}

/// The tiles that can make a product of contiguous operands, each with the parts of K that suit it best, and which is taken: by
/// the shortest modelled time and the rules of [`GemmConfig`](crate::GemmConfig), or because the call says so.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape) and [`Argument`](hk_core::Error::Argument) for a call that is none of its operator,
/// [`DType`](hk_core::Error::DType) for operands of a type that has no such kernels,
/// [`Unsupported`](hk_core::Error::Unsupported) for other operators.
pub fn choices(call: &CallSpec, info: &DeviceInfo) -> Result<Vec<Choice>> {
    let Kind { precision, kernels, groups, parts } = Kind::of(call)?;
    let sizes = sizes(call)?;
    let [batch, m, n, k] = sizes;
    let adds = parts == Parts::Added;
    let fine = groups.is_some_and(|group| group.n < 4);
    let serves = |tile: GemmTile| !kernels.names[tile.index()].is_empty() && (!fine || !tile.skinny());
    let job = Job {
        info,
        precision,
        sizes,
        vectors: precision.bytes(k).is_multiple_of(16)
            && groups.is_none_or(|group| group.k >= GROUP_BY_VECTORS),
        most_splits: match parts {
            Parts::Added => MOST_ATOMIC_SPLITS,
            Parts::Planes => MOST_SPLITS,
            Parts::One => 1,
        },
    };
    let asked = options(call)?.config;
    let chosen = asked.unwrap_or_else(|| job.choose(serves));
    let mut candidates = job.candidates(serves);
    match candidates.iter_mut().find(|(config, _)| config.tile == chosen.tile) {
        Some(candidate) => *candidate = (chosen, job.time(chosen)),
        None => candidates.push((chosen, job.time(chosen))),
    }
    let groups = groups.map_or(1, |group| group.k.max(1));
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
