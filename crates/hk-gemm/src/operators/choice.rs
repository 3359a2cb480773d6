//! What `hk inspect` says of configurations.

use super::{activations, block_shape, dual, options, sizes};
use crate::a8w8::sealed::MatrixCode;
use crate::a16w16::sealed::Half;
use crate::config::{Job, Second};
use crate::dual::plane;
use crate::fp4::{FP4, FP8};
use crate::mxfp8::MXFP8;
use crate::problem::{
    GROUP, GROUP_BY_VECTORS, GROUPED_ROWS, Kernels, MOST_ATOMIC_SPLITS, MOST_SPLITS, outputs,
};
use crate::quantized::ROWS_ON_THEIR_WAY;
use crate::{BlockShape, GemmConfig, GemmTile, Precision};
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
    /// Batches, M, rows of w, K.
    sizes: [usize; 4],
    /// Of a tile.
    most_rows: usize,
    /// Of scales.
    groups: Option<BlockShape>,
    parts: Parts,
    /// A product of 16-bit floats in the same launch.
    second: Option<Second>,
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
        if call.operator().arg("w_bf16").is_some() {
            return Self::of_two(call);
        }
        let others = || Error::unsupported(name, "its configurations", "only those of products of GemmTile");
        if call.operator().arg("w").is_none() {
            return Err(others());
        }
        let w = call.get("w")?.dtype();
        let a = activations(call)?.dtype();
        // Rows that choose their matrix have one axis, which tiles cut where groups end.
        let chosen = name.starts_with("deepgemm_contiguous");
        let sizes = match (activations(call)?.shape(), call.get("w")?.shape()) {
            (&[m, k], &[_, n, of_w]) if chosen && k == of_w => [1, m, n, k],
            _ => sizes(call)?,
        };
        let m = sizes[1];
        let group = || block_shape(call);
        // Of mxfp4, K is cut between groups of 128.
        let mx = Some(BlockShape::default());
        let with = |precision, kernels, groups| {
            let most_rows = if chosen { GROUPED_ROWS } else { usize::MAX };
            Ok(Self { precision, kernels, sizes, most_rows, groups, parts: Parts::Planes, second: None })
        };
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
            "fused_gemm_a16w16_quant_x" => {
                with(of_half!(name, a, PRECISION)?, of_half!(name, a, QUANT_X)?, None)
            }
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
                let group = group()?;
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

    /// Two products in one launch.
    fn of_two(call: &CallSpec) -> Result<Self> {
        let name = call.operator().name;
        let half = call.get("x_bf16")?.dtype();
        let [m, n, second, k] = dual::sizes(call)?;
        let (precision, kernels, groups) = match call.optional("x_fp8") {
            Some(x) => {
                let groups = block_shape(call)?;
                let kernels = groups.kernels(of_half!(name, half, BESIDE_FP8)?);
                (of_code!(name, x.dtype(), PRECISION)?, kernels, groups)
            }
            None => (Precision::Fp4, of_half!(name, half, BESIDE_FP4)?[0], BlockShape::default()),
        };
        Ok(Self {
            precision,
            kernels,
            sizes: [1, m, n, k],
            most_rows: usize::MAX,
            groups: Some(groups),
            parts: Parts::Planes,
            second: Some(Second { precision: of_half!(name, half, PRECISION)?, n: second }),
        })
    }
}

/// What a product of a launch is made by.
struct Share {
    tile: GemmTile,
    /// Columns of K.
    at_a_time: usize,
    /// Columns of a part of K, and how many parts there are.
    each: usize,
    splits: usize,
    m_tiles: usize,
    blocks: usize,
}

/// The tiles that can make a product of contiguous operands, each with the parts of K that suit it best, and which is taken: by
/// the shortest modelled time and the rules of [`GemmConfig`], or because the call says so.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape) and [`Argument`](hk_core::Error::Argument) for a call that is none of its operator,
/// [`DType`](hk_core::Error::DType) for operands of a type that has no such kernels,
/// [`Unsupported`](hk_core::Error::Unsupported) for other operators.
pub fn choices(call: &CallSpec, info: &DeviceInfo) -> Result<Vec<Choice>> {
    let Kind { precision, kernels, sizes, most_rows, groups, parts, second } = Kind::of(call)?;
    let [batch, m, n, k] = sizes;
    let adds = parts == Parts::Added;
    let fine = groups.is_some_and(|group| group.n < 4);
    let serves = |tile: GemmTile| {
        let fits = tile.shape().0 <= most_rows && (!fine || !tile.skinny());
        fits && !kernels.names[tile.index()].is_empty()
    };
    let job = Job {
        info,
        precision,
        sizes,
        vectors: precision.bytes(k).is_multiple_of(16)
            && groups.is_none_or(|group| group.k >= GROUP_BY_VECTORS)
            && second.is_none_or(|second| second.precision.bytes(k).is_multiple_of(16)),
        most_splits: match parts {
            Parts::Added => MOST_ATOMIC_SPLITS,
            Parts::Planes => MOST_SPLITS,
            Parts::One => 1,
        },
        second,
    };
    let asked = options(call)?.config;
    let chosen = asked.unwrap_or_else(|| job.choose(serves));
    let mut candidates = job.candidates(serves);
    match candidates.iter_mut().find(|(config, _)| config.tile == chosen.tile) {
        Some(candidate) => *candidate = (chosen, job.time(chosen)),
        None => candidates.push((chosen, job.time(chosen))),
    }
    let groups = groups.map_or(1, |group| group.k.max(1));
    let describe = |(config, time): (GemmConfig, f64)| {
        let shares = job.products(config.tile).enumerate().map(|(i, (tile, precision, n))| {
            // Scales are of the first.
            let config = GemmConfig { tile, ..config };
            let (each, splits) = config.parts(info.arch, k, precision, if i == 0 { groups } else { 1 });
            let (m_tiles, n_tiles) = config.tiles(m, n);
            let blocks = outputs([batch, m_tiles, n_tiles]).saturating_mul(splits);
            Share {
                tile,
                at_a_time: tile.stretch(info.arch) * 8 / precision.bits(),
                each: each.min(k),
                splits,
                m_tiles,
                blocks,
            }
        });
        let shares: Vec<Share> = shares.collect();
        let of = |value: fn(&Share) -> String| {
            let mut values: Vec<_> = shares.iter().map(value).collect();
            values.dedup();
            values.join(", ")
        };
        let splits = shares[0].splits;
        let planes = match &second {
            _ if adds => 0,
            None if splits > 1 => splits.saturating_mul(outputs([batch, m, n])),
            Some(second) if config.splits > 1 => {
                config.splits.saturating_mul(plane([outputs([1, m, n]), outputs([1, m, second.n])]))
            }
            _ => 0,
        };
        let blocks = shares.iter().map(|share| share.blocks).fold(0, usize::saturating_add);
        let tile_name = |share: &Share| {
            let (m, n) = share.tile.shape();
            format!("{m}x{n}")
        };
        let values = vec![
            ("tile", of(tile_name)),
            ("kernel", kernels.names[config.tile.index()].to_owned()),
            ("waves", config.tile.waves(info.arch).to_string()),
            ("operands", if config.tile.skinny() { "registers" } else { "LDS" }.to_owned()),
            ("K at a time", of(|share| share.at_a_time.to_string())),
            ("stages", config.tile.stages(info.arch).to_string()),
            ("parts of K", of(|share| share.splits.to_string())),
            ("K of a part", of(|share| share.each.to_string())),
            ("blocks", blocks.to_string()),
            ("group", config.group.clamp(1, shares[0].m_tiles.max(1)).to_string()),
            ("workspace, bytes", planes.saturating_mul(size_of::<f32>()).to_string()),
            ("modelled us", format!("{:.1}", time / 1000.0)),
        ];
        Choice { values, chosen: config.tile == chosen.tile }
    };
    Ok(candidates.into_iter().map(describe).collect())
}
