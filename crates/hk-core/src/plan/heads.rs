//! Per-head kernels: which columns of which tensors a launch rotates or copies, and the grid. The device's side is `hk/heads.h`.

use crate::device::DeviceInfo;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::global::GlobalLayout;
use crate::launch::{Launch, LaunchConfig};
use crate::tensor::{TensorView, TensorViewMut};
use bytemuck::{Pod, Zeroable};

/// What happens to the columns of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum HeadsAction {
    /// They are copied, bit by bit.
    Copy = 0,
    /// They are rotated.
    Rotate = 1,
    /// They stay in place: only heads of tokens without a table row are written.
    Leave = 2,
}

/// A range of columns of the heads of one tensor, with `[batches, tokens, heads, columns]` or, packed,
/// `[tokens, heads, columns]`: a part of a launch.
#[derive(Debug)]
pub struct Heads<'a, T: Element> {
    /// Name of the input.
    pub arg: &'static str,
    /// Where the columns come from.
    pub from: TensorView<'a, T>,
    /// Name of the output.
    pub out_arg: &'static str,
    /// Where they go, of the same shape.
    pub to: TensorViewMut<'a, T>,
    /// What happens to them.
    pub action: HeadsAction,
    /// Heads of tokens without a table row become NaN.
    pub poisons: bool,
}

/// `hk::HeadsParams` of `hk/heads.h`: a part as the kernel takes it.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct HeadsParams {
    from: GlobalLayout,
    to: GlobalLayout,
    action: u32,
    poisons: u32,
    blocks: u32,
    groups: u32,
    lanes: u32,
    chunk: u32,
    chunks: u32,
    batch_step: u32,
    token_step: u32,
    inverse_lanes: u32,
    inverse_chunks: u32,
    inverse_tokens: u32,
}

crate::params::declared!(HeadsParams {
    from,
    to,
    action,
    poisons,
    blocks,
    groups,
    lanes,
    chunk,
    chunks,
    batch_step,
    token_step,
    inverse_lanes,
    inverse_chunks,
    inverse_tokens,
});

/// Threads of a block, `hk::kHeadsThreads`.
const THREADS: usize = 256;

/// Waves per CU that cover the latency of memory: about 32 KiB in flight, four 16-byte accesses per lane.
const WAVES_PER_CU: usize = 8;

/// Heads per group and token, at most: enough to amortise loading the token's factors.
const MAX_HEADS: usize = 16;

/// The same for copies on NVIDIA GPUs, where blocks are not persistent: two rounds of loads.
const MAX_COPIED_HEADS: usize = 4;

/// Columns and tokens of a launch, at most.
const LIMIT: usize = i32::MAX as usize;

impl<T: Element> Heads<'_, T> {
    /// Whether vectorized kernels (16 bytes per access) can serve this part.
    pub fn can_vectorize(&self) -> bool {
        let bytes = self.columns() * size_of::<T>();
        bytes.is_multiple_of(16) && self.from.rows_aligned(16) && self.to.rows_aligned(16)
    }

    fn columns(&self) -> usize {
        self.from.shape().last().copied().unwrap_or(0)
    }

    /// (batches, tokens, heads)
    fn sizes(&self) -> (usize, usize, usize) {
        match *self.from.shape() {
            [batches, tokens, heads, _] => (batches, tokens, heads),
            [tokens, heads, _] => (1, tokens, heads),
            _ => (0, 0, 0),
        }
    }
}

/// The kernel's parts and its grid; no grid if there is nothing to do. `columns` is the vector width of the kernel in columns. All parts have the same batches and tokens.
///
/// # Errors
/// [`Error::TooLarge`] for more than 2^31 - 1 tokens or columns of a head; as [`Launch::input`].
pub fn spread<'a, T: Element, const N: usize>(
    launch: &mut Launch<'a>,
    op: &'static str,
    mut parts: [Option<Heads<'a, T>>; N],
    columns: usize,
    info: &DeviceInfo,
) -> Result<([HeadsParams; N], Option<LaunchConfig>)> {
    let mut split = [Split::default(); N];
    let mut tokens_of_batch = 1;
    for (split, part) in split.iter_mut().zip(&parts) {
        let Some(part) = part else { continue };
        let (batches, tokens, heads) = part.sizes();
        let all = batches.saturating_mul(tokens);
        if all > LIMIT || part.columns() > LIMIT {
            let what = format!("shape {:?}", part.from.shape());
            return Err(Error::too_large(op, part.arg, what, LIMIT as u64));
        }
        tokens_of_batch = tokens.max(1);
        *split = Split::new(all, heads, part.columns().div_ceil(2 * columns));
        if !info.arch.is_amd() && part.action != HeadsAction::Rotate {
            split.max_heads = MAX_COPIED_HEADS;
        }
    }
    let grid = Split::plan(&mut split, info.max_blocks(THREADS, WAVES_PER_CU), info.arch.is_amd());

    let mut out = [HeadsParams::zeroed(); N];
    for ((out, part), split) in out.iter_mut().zip(&mut parts).zip(split) {
        let Some(part) = part.as_mut().filter(|_| split.blocks() > 0) else { continue };
        let step = split.walkers * split.groups();
        *out = HeadsParams {
            from: launch.input(part.arg, &part.from)?,
            to: launch.output(part.out_arg, &mut part.to)?,
            action: part.action as u32,
            poisons: part.poisons.into(),
            blocks: split.blocks() as u32,
            groups: split.groups() as u32,
            lanes: split.lanes() as u32,
            chunk: split.chunk as u32,
            chunks: split.chunks() as u32,
            batch_step: (step / tokens_of_batch) as u32,
            token_step: (step % tokens_of_batch) as u32,
            inverse_lanes: inverse(split.lanes()),
            inverse_chunks: inverse(split.chunks()),
            inverse_tokens: inverse(tokens_of_batch),
        };
    }
    Ok((out, (grid > 0).then(|| LaunchConfig::grid_1d(grid))))
}

/// The inverse for division by `divisor` in the kernel, `hk::DivMod`.
fn inverse(divisor: usize) -> u32 {
    u32::MAX / divisor as u32
}

/// The share of the grid of one part.
#[derive(Debug, Clone, Copy, Default)]
struct Split {
    tokens: usize,
    heads: usize,
    slots: usize,
    /// Heads per group and token, at most.
    max_heads: usize,
    /// Heads per group and token.
    chunk: usize,
    /// Blocks with the same heads.
    walkers: usize,
}

impl Split {
    fn new(tokens: usize, heads: usize, slots: usize) -> Self {
        Self { tokens, heads, slots, max_heads: MAX_HEADS, chunk: 1, walkers: 0 }
    }

    fn is_empty(&self) -> bool {
        self.tokens == 0 || self.heads == 0 || self.slots == 0
    }

    fn lanes(&self) -> usize {
        self.slots.min(THREADS)
    }

    fn groups(&self) -> usize {
        THREADS / self.lanes()
    }

    fn chunks(&self) -> usize {
        self.heads.div_ceil(self.chunk)
    }

    /// Iterations over tokens of all blocks with the same heads.
    fn turns(&self) -> usize {
        self.tokens.div_ceil(self.groups())
    }

    fn blocks(&self) -> usize {
        if self.is_empty() { 0 } else { self.walkers * self.chunks() }
    }

    /// Chooses chunks and walkers, and returns the number of blocks: persistent, about `most` with equal work; else one per iteration,
    /// and `most` is how many saturate the GPU.
    fn plan(parts: &mut [Self], most: usize, persistent: bool) -> usize {
        let mut heads = MAX_HEADS;
        loop {
            for part in parts.iter_mut().filter(|p| !p.is_empty()) {
                // Chunks of about equal size.
                part.chunk = part.heads.div_ceil(part.heads.div_ceil(heads.min(part.max_heads)));
            }
            let busy = parts.iter().filter(|p| !p.is_empty());
            let (blocks, work) = busy.fold((0, 0), |(blocks, work), p| {
                let turns = p.turns() * p.chunks();
                (blocks + turns, work + turns * p.chunk)
            });
            // Half of them still saturate memory, and loading a token's factors for few heads costs more.
            if 2 * blocks < most && heads > 1 {
                heads /= 2;
                continue;
            }
            let budget = work.div_ceil(most.max(1));
            for part in parts.iter_mut().filter(|p| !p.is_empty()) {
                let turns = if persistent { (budget / part.chunk).max(1) } else { 1 };
                part.walkers = part.turns().div_ceil(turns);
            }
            return parts.iter().map(Self::blocks).sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan<const N: usize>(mut parts: [Split; N]) -> ([Split; N], usize) {
        let blocks = Split::plan(&mut parts, 304 * 2, true);
        (parts, blocks)
    }

    #[test]
    fn few_tokens_split_over_heads_and_many_over_persistent_blocks() {
        // Llama-3 8B in bf16, one token: each head by itself.
        let ([q, k], blocks) = plan([Split::new(1, 32, 8), Split::new(1, 8, 8)]);
        assert_eq!((q.chunk, k.chunk, blocks), (1, 1, 40));
        // 65536 tokens: two blocks a CU, keys with a fifth of them, and table rows found once for many heads.
        let ([q, k], blocks) = plan([Split::new(65536, 32, 8), Split::new(65536, 8, 8)]);
        assert_eq!((q.chunk, k.chunk), (16, 8));
        assert!((500..=700).contains(&blocks), "{blocks}");
        assert!((4 * k.blocks()).abs_diff(q.blocks()) < 50, "{q:?} {k:?}");
    }

    #[test]
    fn non_persistent_blocks_take_one_iteration() {
        let mut parts = [Split::new(65536, 32, 8), Split { max_heads: 4, ..Split::new(65536, 8, 8) }];
        let blocks = Split::plan(&mut parts, 2112, false);
        assert_eq!((parts[0].chunk, parts[1].chunk), (16, 4));
        assert_eq!(blocks, 65536 / 32 * (2 + 2));
    }

    #[test]
    fn nothing_to_do_takes_no_blocks() {
        assert_eq!(plan([Split::new(0, 32, 8), Split::default()]).1, 0);
        let ([q, k], blocks) = plan([Split::new(5, 0, 8), Split::new(5, 3, 1000)]);
        assert_eq!((q.blocks(), k.blocks(), blocks), (0, 15, 15));
    }
}
