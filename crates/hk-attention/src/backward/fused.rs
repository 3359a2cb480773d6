//! Gradients of attention by five products.

use super::{Arguments, BackwardInputs, Gradients, Kernels, Schedule, backward, kernel_of, table};
use crate::kernels::backward::Params;
use crate::prefill::{Heads, check_heads};
use crate::{AttentionElement, AttentionOptions, SequenceStarts};
use hk_core::plan::rows::float_index;
use hk_core::{DType, Float, KernelRef, Result, Stream, TensorViewMut};

pub(super) static KERNELS: Kernels = [
    table!("fused_bf16": "64" 64 64, "128" 128 128, "192_128" 192 128, "256" 256 256),
    table!("fused_f16": "64" 64 64, "128" 128 128, "192_128" 192 128, "256" 256 256),
    table!("fused_f32": "64" 64 64, "128" 128 128, "256" 256 256),
];
/// Those that round the sums, by dtype and rows of a tile.
static ROUND: [[(usize, KernelRef<Params>); 2]; 3] = [
    [(64, Params::kernel("backward_dq_bf16_64")), (32, Params::kernel("backward_dq_bf16_32"))],
    [(64, Params::kernel("backward_dq_f16_64")), (32, Params::kernel("backward_dq_f16_32"))],
    [(32, Params::kernel("backward_dq_f32_32")), (16, Params::kernel("backward_dq_f32_16"))],
];

/// The kernel that rounds sums in tiles of so many rows.
pub(super) fn rounding(dtype: DType, tile: usize) -> KernelRef<Params> {
    let [first, second] = ROUND[float_index(dtype)];
    if first.0 == tile { first.1 } else { second.1 }
}

/// In which order blocks of keys add to the gradients of queries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Accumulate {
    /// In the order of the keys: the same call gives the same bits. A block waits for the one before it at each tile of queries.
    #[default]
    Ordered,
    /// In the order in which they arrive: nobody waits, and the last bits of `dq` change from run to run.
    Atomic,
}

/// Elements of the `f32` workspace of [`mha_fused_bwd`]: a number for each row, and gradients of queries in `f32`, in whole tiles.
///
/// # Errors
/// Those of [`mha_fused_bwd`] for heads and columns of `q`, `k` and `v`.
pub fn fused_backward_workspace<T: AttentionElement>(
    inputs: &BackwardInputs<T>,
    cu_seqlens: Option<&SequenceStarts>,
) -> Result<usize> {
    const OP: &str = "mha_fused_bwd";
    let BackwardInputs { q, k, v, .. } = inputs;
    let heads = check_heads(OP, [("q", q.shape()), ("k", k.shape()), ("v", v.shape())], [256, 256])?;
    let (sequences, rows) = match cu_seqlens {
        None => {
            let [batch, sq, ..] = q.dims::<4>(OP, "q")?;
            (batch, batch.saturating_mul(sq))
        }
        Some(starts) => (starts.check(OP)?, q.dims::<3>(OP, "q")?[0]),
    };
    Ok(Layout::new(T::DTYPE, sequences, rows, heads).floats)
}

/// Where what is in the workspace begins, in elements, after the numbers of the rows: turns, then sums.
pub(super) struct Layout {
    /// Tiles of queries of a key head.
    pub tiles: usize,
    /// Rows of a tile.
    pub tile: usize,
    pub turns: usize,
    pub sums: usize,
    pub floats: usize,
}

impl Layout {
    pub(super) fn new(dtype: DType, sequences: usize, rows: usize, heads: Heads) -> Self {
        let tile = kernel_of(&KERNELS, dtype, heads).map_or(16, |(columns, _)| moving_rows(dtype, columns));
        let group = heads.heads / heads.kv_heads.max(1);
        let tiles = (rows.saturating_mul(group) / tile).saturating_add(sequences);
        let all = tiles.saturating_mul(heads.kv_heads);
        let turns = rows.saturating_mul(heads.heads).next_multiple_of(4);
        let sums = turns.saturating_add(all.saturating_add(1).next_multiple_of(4));
        let of_tile = tile * heads.dqk.next_multiple_of(4);
        Self { tiles, tile, turns, sums, floats: sums.saturating_add(all.saturating_mul(of_tile)) }
    }
}

/// `kTileOf` of `hip/backward.h`.
fn moving_rows(dtype: DType, [dqk, dv]: [usize; 2]) -> usize {
    match dtype.size_bytes() * (dqk + dv) {
        0..=640 if dtype.size_bytes() == 2 => 64,
        0..=1024 => 32,
        _ => 16,
    }
}

/// The gradients of [`mha_onekernel_bwd`](crate::mha_onekernel_bwd) by one pass over keys, of five products instead of seven.
///
/// Arguments, layouts and limits are those of [`mha_onekernel_bwd`](crate::mha_onekernel_bwd); the workspace is longer,
/// [`fused_backward_workspace`], and on 16 bytes. Each block has keys, and adds its share to `f32` sums of the gradients of queries, in order or
/// as they come ([`Accumulate`]); a last launch rounds them. `dk` and `dv` are deterministic either way.
///
/// Blocks draw tickets as they start, and wait only for blocks with lower tickets: they end in whatever order they are dispatched.
///
/// Three launches, or four with a sink. Returns when they are queued. No tensor may share memory with an output.
///
/// # Errors
/// As [`mha_onekernel_bwd`](crate::mha_onekernel_bwd); [`Align`](hk_core::Error::Align) for a workspace that is not on 16 bytes.
///
/// Source: Dao et al. 2022, "FlashAttention", algorithm 4.
pub fn mha_fused_bwd<'a, T: AttentionElement + Float>(
    stream: &'a Stream,
    inputs: BackwardInputs<'a, T>,
    cu_seqlens: Option<SequenceStarts<'a>>,
    gradients: Gradients<'a, T>,
    workspace: TensorViewMut<'a, f32>,
    options: &AttentionOptions<'a, T>,
    accumulate: Accumulate,
) -> Result<()> {
    let of: Arguments<'a, T> = (inputs, cu_seqlens, gradients, workspace);
    backward("mha_fused_bwd", stream, of, options, Schedule::OnePass(accumulate))
}
