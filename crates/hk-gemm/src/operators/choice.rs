//! Configurations as `hk inspect` shows them: the same table, checks and cost model as a launch.

use super::{activations, block_shape, dual, options, sizes};
use crate::gemm::check::{check_config, expect_i32_sums};
use crate::gemm::desc::{Determinism, GROUP, VECTOR_GROUP};
use crate::gemm::plan::{MOST_ATOMIC_SPLITS, MOST_SPLITS, batch_invariant, outputs, room_of};
use crate::gemm::prequant::ON_THE_FLY_ROWS;
use crate::gemm::select::{Job, Second};
use crate::gemm::table::{Eligible, Family, GROUPED_ROWS, MxOrder, ScaleKind, Variant};
use crate::{BlockShape, GemmConfig, GemmTile, Precision};
use hk_core::registry::{CallSpec, Choice, Described};
use hk_core::{DType, DeviceInfo, Error, Result};

/// How the partial sums of split-K slices meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SplitK {
    Workspace,
    Atomic,
    /// K is not split.
    Whole,
}

/// What the configurations of a call follow from.
pub(super) struct Problem {
    eligible: Eligible,
    /// Batches, M, rows of w, K.
    sizes: [usize; 4],
    block: Option<BlockShape>,
    split_k: SplitK,
    /// A GEMM of 16-bit floats in the same launch.
    second: Option<Second>,
    /// Name and type of the activations that the kernel reads.
    a: (&'static str, DType),
    /// Of contiguous MX scales.
    order: MxOrder,
}

/// Describes the problem of a call.
pub(super) type Describe = fn(&CallSpec) -> Result<Problem>;

/// The problem of a combination of operands.
fn of(
    call: &CallSpec,
    [a, w]: [DType; 2],
    scales: ScaleKind,
    variant: Variant,
    block: Option<BlockShape>,
) -> Result<Problem> {
    let op = call.operator().name;
    let Some(family) = Family::find(a, w, scales, variant) else {
        return Err(Error::unsupported(op, format!("{a} by {w}"), "no kernel has these operands"));
    };
    if let Some(block) = block {
        block.check(op)?;
    }
    let fine_scales = scales != ScaleKind::Mx && block.is_some_and(|block| block.n < 4);
    let eligible = Eligible { fine_scales, ..Eligible::new(family) };
    let sizes = sizes(call)?;
    let order = order(call, sizes[3]);
    let name = if call.operator().arg("x").is_some() { "x" } else { "a" };
    let a = (name, a);
    Ok(Problem { eligible, sizes, block, split_k: SplitK::Workspace, second: None, a, order })
}

/// The order of the MX scales of a call, if it has any.
fn order(call: &CallSpec, k: usize) -> MxOrder {
    MxOrder::of(call.bool("scales_shuffled").unwrap_or(false), k)
}

fn dtypes(call: &CallSpec) -> Result<[DType; 2]> {
    Ok([activations(call)?.dtype(), call.get("w")?.dtype()])
}

/// No scales, or scales of rows.
pub(super) fn plain(call: &CallSpec, variant: Variant) -> Result<Problem> {
    of(call, dtypes(call)?, ScaleKind::None, variant, None)
}

pub(super) fn block(call: &CallSpec) -> Result<Problem> {
    let block = block_shape(call)?;
    of(call, dtypes(call)?, block.kind(), Variant::Plain, Some(block))
}

/// K is split between groups of 128 columns.
pub(super) fn mx(call: &CallSpec) -> Result<Problem> {
    of(call, dtypes(call)?, ScaleKind::Mx, Variant::Plain, Some(BlockShape::default()))
}

pub(super) fn rows_or_blocks(call: &CallSpec) -> Result<Problem> {
    if call.bool("blocks")? { block(call) } else { plain(call, Variant::Plain) }
}

/// How activations are quantized: by the kernels of `family`, ahead of the GEMM, or not.
fn quantization(call: &CallSpec, prequant: bool, family: Option<&'static Family>) -> Result<Quantization> {
    let ([_, m, _, k], options) = (sizes(call)?, options(call)?);
    let in_registers = |family: &'static Family| {
        vectorized(family.precision, k)
            && match options.config {
                Some(config) => family.kernels.has(config.tile),
                None => m <= ON_THE_FLY_ROWS && options.determinism != Determinism::BatchInvariant,
            }
    };
    Ok(if !prequant || m == 0 || k == 0 {
        Quantization::None
    } else if family.is_some_and(in_registers) {
        Quantization::InRegisters
    } else {
        Quantization::Ahead
    })
}

/// Whether contiguous rows of both operands are multiples of 16 bytes.
fn vectorized(precision: Precision, k: usize) -> bool {
    precision.bytes(k).is_multiple_of(16) && (k * precision.weight_bits() / 8).is_multiple_of(16)
}

enum Quantization {
    None,
    InRegisters,
    Ahead,
}

pub(super) fn half_by_byte(call: &CallSpec, prequant: bool) -> Result<Problem> {
    let ([a, w], block) = (dtypes(call)?, block_shape(call)?);
    // One scale for 128 columns.
    let family = Family::find(a, w, block.kind(), Variant::Prequant).filter(|_| block.k == GROUP);
    let (dtypes, variant) = match quantization(call, prequant, family)? {
        Quantization::None => ([a, w], Variant::Plain),
        Quantization::InRegisters => ([a, w], Variant::Prequant),
        Quantization::Ahead => ([w, w], Variant::Plain),
    };
    of(call, dtypes, block.kind(), variant, Some(block))
}

pub(super) fn half_by_fp4(call: &CallSpec) -> Result<Problem> {
    let [a, w] = dtypes(call)?;
    let family = Family::find(a, w, ScaleKind::Mx, Variant::Prequant);
    let (dtypes, variant) = match quantization(call, call.bool("prequant")?, family)? {
        Quantization::None => ([a, w], Variant::Plain),
        Quantization::InRegisters => ([a, w], Variant::Prequant),
        Quantization::Ahead => ([w, w], Variant::Plain),
    };
    of(call, dtypes, ScaleKind::Mx, variant, Some(BlockShape::default()))
}

pub(super) fn masked(problem: Problem) -> Result<Problem> {
    Ok(Problem { split_k: SplitK::Whole, ..problem })
}

/// With atomics.
pub(super) fn atomic(problem: Problem) -> Result<Problem> {
    Ok(Problem { split_k: SplitK::Atomic, ..problem })
}

/// Rows that choose their matrix: tiles end where groups can.
pub(super) fn contiguous(problem: Problem) -> Result<Problem> {
    let eligible = Eligible { max_rows: GROUPED_ROWS, ..problem.eligible };
    Ok(Problem { eligible, split_k: SplitK::Whole, ..problem })
}

/// Two GEMMs in one launch.
pub(super) fn two(call: &CallSpec) -> Result<Problem> {
    let op = call.operator().name;
    let half = call.get("x_bf16")?.dtype();
    let [m, n, second, k] = dual::sizes(call)?;
    let (name, scales, block) = match call.optional("x_fp8") {
        Some(_) => ("x_fp8", block_shape(call)?.kind(), block_shape(call)?),
        None => ("x_fp4", ScaleKind::Mx, BlockShape::default()),
    };
    let a = call.get(name)?.dtype();
    let Some(family) = Family::find(a, a, scales, Variant::Beside(half)) else {
        return Err(Error::unsupported(op, format!("{a} beside {half}"), "no kernel has these operands"));
    };
    block.check(op)?;
    let fine_scales = scales != ScaleKind::Mx && block.n < 4;
    let precision = if half == DType::F16 { Precision::F16 } else { Precision::Bf16 };
    Ok(Problem {
        eligible: Eligible { fine_scales, ..Eligible::new(family) },
        sizes: [1, m, n, k],
        block: Some(block),
        split_k: SplitK::Workspace,
        second: Some(Second { precision, n: second }),
        a: (name, a),
        order: order(call, k),
    })
}

/// What a GEMM of a launch is computed by.
struct Share {
    tile: GemmTile,
    width: usize,
    /// Pipeline depth.
    stages: usize,
    /// Columns of K of a step of the block.
    at_a_time: usize,
    /// Columns of a split-K slice, and how many slices there are.
    each: usize,
    splits: usize,
    m_tiles: usize,
    blocks: usize,
}

/// The tiles that can compute a GEMM of contiguous operands, each with the split-K that suits it best, and the one that is taken:
/// by the shortest modelled time and the rules of [`GemmConfig`], or because the call asks for it.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape) and [`Argument`](hk_core::Error::Argument) for a call that its operator refuses,
/// [`Unsupported`](hk_core::Error::Unsupported) for operands without kernels, and for other operators.
pub fn choices(call: &CallSpec, info: &DeviceInfo) -> Result<Vec<Choice>> {
    let op = call.operator().name;
    let row = super::rows().find(|row| row.operator.name == op);
    let Some(describe) = row.and_then(|row| row.problem) else {
        return Err(Error::unsupported(op, "its configurations", "only GEMMs of GemmTile have them"));
    };
    let Problem { eligible, sizes, block, split_k, second, a, order } = describe(call)?;
    let [batch, m, n, k] = sizes;
    expect_i32_sums(op, a.0, a.1, k)?;
    let precision = eligible.family.precision;
    let job = Job {
        info,
        precision,
        scales: eligible.family.scales,
        sizes,
        vectorized: k == 0
            || vectorized(precision, k)
                && block.is_none_or(|block| block.k >= VECTOR_GROUP)
                && second.is_none_or(|second| vectorized(second.precision, k)),
        most_splits: match split_k {
            SplitK::Atomic => MOST_ATOMIC_SPLITS,
            SplitK::Workspace => MOST_SPLITS,
            SplitK::Whole => 1,
        },
        second,
    };
    let options = options(call)?;
    let mut bulk = None;
    let chosen = match options.config {
        Some(config) => {
            check_config(op, config, &eligible, job.vectorized)?;
            config
        }
        None if options.determinism == Determinism::BatchInvariant => batch_invariant(job.vectorized),
        None => {
            let in_order = !call.bool("w_shuffled").unwrap_or(false);
            bulk = if in_order && split_k == SplitK::Workspace { job.bulk(&eligible) } else { None };
            bulk.map_or_else(|| job.choose(&eligible), |bulk| bulk.config)
        }
    };
    let mut candidates = job.candidates(&eligible);
    let time = bulk.map_or_else(|| job.time(chosen), |bulk| bulk.time);
    match candidates.iter_mut().find(|(config, _)| config.tile == chosen.tile) {
        Some(candidate) => *candidate = (chosen, time),
        None => candidates.push((chosen, time)),
    }
    let groups = block.map_or(1, |block| block.k.max(1));
    let kernel = |tile| eligible.family.kernels.name(tile, order).unwrap_or("none").to_owned();
    let describe = |(config, time): (GemmConfig, f64)| {
        let bulk = bulk.filter(|bulk| bulk.config.tile == config.tile);
        let shares = job.gemms(config.tile).enumerate().map(|(i, (tile, precision, n))| {
            // Scales are of the first.
            let config = GemmConfig { tile, ..config };
            let (each, splits) = config.slices(info.arch, k, precision, if i == 0 { groups } else { 1 });
            let (tile_m, most) = tile.shape();
            let width = match (eligible.family.variant, bulk) {
                (_, Some(bulk)) => bulk.width,
                (Variant::Gated, _) => most,
                _ => tile.width(info, precision, [batch.saturating_mul(splits), m, n]),
            };
            let (m_tiles, n_tiles) = (m.div_ceil(tile_m), n.div_ceil(width));
            let blocks = outputs([batch, m_tiles, n_tiles]).saturating_mul(splits);
            let scales = if i == 0 { eligible.family.scales } else { ScaleKind::None };
            let pipeline = bulk.map_or_else(
                || tile.pipeline(info.arch, precision, (scales, order), width),
                |bulk| bulk.pipeline(info.arch),
            );
            Share {
                tile,
                width,
                stages: pipeline.stages,
                at_a_time: pipeline.step * 8 / precision.bits(),
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
        // Two GEMMs have slices of their own, whole steps of each, of so many at most.
        let splits = if second.is_some() { config.splits } else { shares[0].splits };
        let workspace = match &second {
            _ if split_k != SplitK::Workspace => 0,
            second => {
                room_of(info, GemmConfig { splits, ..config }, [batch, m, n], second.map(|second| second.n))
            }
        };
        let blocks = shares.iter().map(|share| share.blocks).fold(0, usize::saturating_add);
        let tile_name = |share: &Share| format!("{}x{}", share.tile.shape().0, share.width);
        let values = vec![
            ("tile", of(tile_name)),
            ("kernel", kernel(config.tile) + if bulk.is_some() { "_bulk" } else { "" }),
            ("waves", bulk.map_or_else(|| config.tile.waves(info.arch), |bulk| bulk.waves()).to_string()),
            ("operands", if config.tile.skinny() { "registers" } else { "LDS" }.to_owned()),
            ("K at a time", of(|share| share.at_a_time.to_string())),
            ("stages", of(|share| share.stages.to_string())),
            ("splits", of(|share| share.splits.to_string())),
            ("K of a split", of(|share| share.each.to_string())),
            ("blocks", blocks.to_string()),
            ("group", config.group.clamp(1, shares[0].m_tiles.max(1)).to_string()),
            ("workspace, bytes", workspace.saturating_mul(size_of::<f32>()).to_string()),
            ("modelled us", format!("{:.1}", time / 1000.0)),
        ];
        Choice { values, chosen: config.tile == chosen.tile }
    };
    Ok(candidates.into_iter().map(describe).collect())
}
