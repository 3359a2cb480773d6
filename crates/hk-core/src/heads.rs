//! Kernels that work head by head: which columns of which tensors a launch rotates or copies, and how they are spread over
//! a grid. The device's side is `hk/heads.h`.

use crate::tensor::{TensorView, TensorViewMut};
use crate::{DeviceInfo, Element, Error, GlobalLayout, Launch, LaunchConfig, Result};
use bytemuck::{Pod, Zeroable};

/// What happens to the columns of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum HeadsAction {
    /// They are copied, bit by bit.
    Copy = 0,
    /// They are rotated.
    Rotate = 1,
    /// They are where they belong: only those of tokens without a table row are written.
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

/// `hk::HeadsPart` of `hk/heads.h`: a part as the kernel takes it.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct HeadsPart {
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

const _: () = assert!(size_of::<HeadsPart>() == 2 * size_of::<GlobalLayout>() + 48);

/// Threads of a block, `hk::kHeadsThreads`.
const THREADS: usize = 256;

/// Waves that a CU needs for enough bytes in flight to cover the latency of memory, about 32 KiB, each lane with four accesses
/// of 16 bytes.
const WAVES_PER_CU: usize = 8;

/// Heads that a group takes of a token, at most: enough that finding the factors of the token is a small part of the work.
const MOST_HEADS: usize = 16;

/// The same where nothing is rotated and blocks come and go, on NVIDIA GPUs: two turns of loads.
const MOST_COPIED_HEADS: usize = 4;

/// Columns and tokens of a launch, at most.
const LIMIT: usize = i32::MAX as usize;

impl<T: Element> Heads<'_, T> {
    /// Whether kernels that move 16 bytes at a time can serve this part.
    pub fn by_vectors(&self) -> bool {
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

/// The parts as the kernel takes them, and its grid; no grid if there is nothing to do. `columns` is how many columns the
/// kernel takes as one vector. All parts have the same batches and tokens.
///
/// # Errors
/// [`Error::TooLarge`] for more than 2^31 - 1 tokens or columns of a head; as [`Launch::input`].
pub fn spread<'a, T: Element, const N: usize>(
    launch: &mut Launch<'a>,
    op: &'static str,
    mut parts: [Option<Heads<'a, T>>; N],
    columns: usize,
    info: &DeviceInfo,
) -> Result<([HeadsPart; N], Option<LaunchConfig>)> {
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
            split.most_heads = MOST_COPIED_HEADS;
        }
    }
    let grid = Split::plan(&mut split, info.most_blocks(THREADS, WAVES_PER_CU), info.arch.is_amd());

    let mut out = [HeadsPart::zeroed(); N];
    for ((out, part), split) in out.iter_mut().zip(&mut parts).zip(split) {
        let Some(part) = part.as_mut().filter(|_| split.blocks() > 0) else { continue };
        let step = split.walkers * split.groups();
        *out = HeadsPart {
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

/// What the kernel divides numbers of 32 bits with by `divisor`, `hk::Quotient`.
fn inverse(divisor: usize) -> u32 {
    u32::MAX / divisor as u32
}

/// How one part is spread.
#[derive(Debug, Clone, Copy, Default)]
struct Split {
    tokens: usize,
    heads: usize,
    slots: usize,
    /// Heads that a group takes of a token, at most.
    most_heads: usize,
    /// Heads that a group takes of a token.
    chunk: usize,
    /// Blocks with the same heads.
    walkers: usize,
}

impl Split {
    fn new(tokens: usize, heads: usize, slots: usize) -> Self {
        Self { tokens, heads, slots, most_heads: MOST_HEADS, chunk: 1, walkers: 0 }
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

    /// Turns of all walkers together.
    fn turns(&self) -> usize {
        self.tokens.div_ceil(self.groups())
    }

    fn blocks(&self) -> usize {
        if self.is_empty() { 0 } else { self.walkers * self.chunks() }
    }

    /// Chooses chunks and walkers, and gives the number of blocks: if they stay, about `most`, all with about as much
    /// to do; else one for each turn, and `most` tells how many keep the GPU busy.
    fn plan(parts: &mut [Self], most: usize, stay: bool) -> usize {
        let mut heads = MOST_HEADS;
        loop {
            for part in parts.iter_mut().filter(|p| !p.is_empty()) {
                // Chunks of one size, as far as that goes.
                part.chunk = part.heads.div_ceil(part.heads.div_ceil(heads.min(part.most_heads)));
            }
            let busy = parts.iter().filter(|p| !p.is_empty());
            let (blocks, work) = busy.fold((0, 0), |(blocks, work), p| {
                let turns = p.turns() * p.chunks();
                (blocks + turns, work + turns * p.chunk)
            });
            // Half of them still keep memory busy, and finding a token's factors for few heads costs more.
            if 2 * blocks < most && heads > 1 {
                heads /= 2;
                continue;
            }
            let budget = work.div_ceil(most.max(1));
            for part in parts.iter_mut().filter(|p| !p.is_empty()) {
                let turns = if stay { (budget / part.chunk).max(1) } else { 1 };
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
    fn few_tokens_are_spread_over_heads_and_many_are_walked_over() {
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
    fn blocks_that_come_and_go_take_one_turn() {
        let mut parts = [Split::new(65536, 32, 8), Split { most_heads: 4, ..Split::new(65536, 8, 8) }];
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
