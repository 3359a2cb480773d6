//! Attention of whole prompts: what the CU that has most to do is busy for.

use super::{both, profiles};
use crate::out::Table;
use crate::{Failure, Result};
use hk_core::registry::{Call, CallSpec, Scalar, TensorSpec};
use hk_core::{Arch, DType, Profile};
use hk_emu::{Costs, Placement};

pub const TITLE: &str = "## The busiest CU of `mha`\n\n\
    Causal prompts, bf16, 8 heads, 128 columns. A block takes the clocks of its busiest unit, as the emulator counts them. Blocks are placed \
    in\nthe order of dispatch: on the XCDs in turn, within an XCD in the slot that is free first; residents of a CU share its units. A launch \
    begins\nwhen the one before it has ended. `busiest`: thousands of clocks of the CU that has most to do. `of mean`: over the mean of all \
    CUs. `of one\nsplit`: over those without splits of the keys. Of 1 x 1024 all blocks are counted; of 16 x 8192 the 32 of one sequence and \
    head, whose counts\nstand for those of the 127 others in the order of the whole launch.";

const HEADER: [&str; 6] = ["prompts", "kernels", ">blocks", ">busiest", ">of mean", ">of one split"];
const HEADS: usize = 8;

pub fn table() -> Result<Table> {
    let mut table = Table::new(HEADER);
    let [a, b] = Arch::AMD.map(rows);
    for (a, b) in a?.into_iter().zip(b?) {
        let (label, a, b) = (a.0, Some(a.1), Some(b.1));
        table.row([label.to_string()].into_iter().chain((0..HEADER.len() - 1).map(|i| both(&a, &b, i))));
    }
    Ok(table)
}

/// The rows of a target: prompts, and the cells.
fn rows(arch: Arch) -> Result<[(&'static str, [String; HEADER.len() - 1]); 3]> {
    let placed = |profile: &Profile| Launch::new(arch, profile, clocks(arch, profile));
    let split: Vec<_> = counted(arch, [1, 1024, HEADS], "auto")?.iter().map(placed).collect();
    let whole: Vec<_> = counted(arch, [1, 1024, HEADS], "short")?.iter().map(placed).collect();
    let one = counted(arch, [1, 8192, 1], "tall")?;
    let many = one.iter().map(|p| Launch::new(arch, p, repeated(&clocks(arch, p), 16 * HEADS)));
    let busiest = busiest(&whole);
    Ok([
        ("1 x 1024, splits of the keys", cells(&split, Some(busiest))),
        ("1 x 1024, one split", cells(&whole, Some(busiest))),
        ("16 x 8192", cells(&many.collect::<Vec<_>>(), None)),
    ])
}

/// What the kernels of prompts of so many sequences, tokens and heads count, each launched once, block by block.
fn counted(arch: Arch, [sequences, tokens, heads]: [usize; 3], tile: &'static str) -> Result<Vec<Profile>> {
    let mut call: CallSpec = Call::new(crate::operator("mha")?);
    for name in ["q", "k", "v"] {
        call.set(name, TensorSpec::new(DType::Bf16, [sequences, tokens, heads, 128]))?;
    }
    call.set_scalar("causal", Scalar::Bool(true))?;
    call.set_scalar("tile", Scalar::Choice(tile))?;
    let served = profiles(&call.sample(0)?, "prompts", &format!("emu:{arch}?details=true&blocks=true"))?;
    served.ok_or_else(|| Failure::new(format!("mha: no kernel for prompts on {arch}")))
}

/// Clocks of each block, in the order of dispatch.
fn clocks(arch: Arch, profile: &Profile) -> Vec<u64> {
    profile.blocks.iter().map(|block| Costs::of(arch).clocks(block).busiest()).collect()
}

/// The blocks of a launch of so many times the sequences and heads, from those of one: tasks are heads, in each the sequences, in each
/// the tiles; see `find_work` of
/// `crates/hk-attention/hip/problem.h`.
fn repeated(one: &[u64], times: usize) -> Vec<u64> {
    let mut tiles = vec![0; one.len()];
    one.iter().enumerate().for_each(|(block, clocks)| tiles[task(block, one.len())] = *clocks);
    let blocks = one.len() * times;
    (0..blocks).map(|block| tiles[task(block, blocks) % one.len()]).collect()
}

/// The task of a block: those of an XCD are adjacent, as `hk::xcd_remap` makes them.
fn task(block: usize, blocks: usize) -> usize {
    const XCDS: usize = 8;
    let xcd = block % XCDS;
    block / XCDS + xcd * (blocks / XCDS) + xcd.min(blocks % XCDS)
}

/// A launch on the CUs of a part.
struct Launch {
    kernel: String,
    blocks: usize,
    placed: Placement,
}

impl Launch {
    fn new(arch: Arch, profile: &Profile, blocks: Vec<u64>) -> Self {
        let (kernel, count) = (profile.kernel.clone(), blocks.len());
        Self { kernel, blocks: count, placed: Placement::new(arch, profile.resources.blocks_per_cu, blocks) }
    }
}

/// Clocks of consecutive launches.
fn busiest(launches: &[Launch]) -> u64 {
    launches.iter().map(|launch| launch.placed.busiest()).sum()
}

fn cells(launches: &[Launch], of_one_split: Option<u64>) -> [String; HEADER.len() - 1] {
    let each = |text: fn(&Launch) -> String| launches.iter().map(text).collect::<Vec<_>>().join(", ");
    let clocks = busiest(launches) as f64;
    let mean: f64 = launches.iter().map(|launch| launch.placed.mean()).sum();
    [
        each(|launch| format!("`{}`", launch.kernel)),
        each(|launch| launch.blocks.to_string()),
        format!("{:.1}", clocks / 1000.0),
        format!("{:.2}", clocks / mean),
        of_one_split.map_or("-".into(), |one| format!("{:.2}", clocks / one as f64)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of several sequences and heads, every one counted, are those of one in this order; heavy tiles come first.
    #[test]
    fn sequences_and_heads_have_the_same_blocks() {
        for arch in Arch::AMD {
            let of = |sequences, heads| {
                let profiles = counted(arch, [sequences, 1024, heads], "tall").unwrap();
                assert_eq!(profiles.len(), 1);
                clocks(arch, &profiles[0])
            };
            let one = of(1, 1);
            let mut heavy_first = one.clone();
            heavy_first.sort_unstable_by(|a, b| b.cmp(a));
            assert_eq!((one.len(), &one), (4, &heavy_first));
            assert!(one[0] > 3 * one[3], "{one:?}");
            let all = of(3, 5);
            assert_eq!(all, repeated(&one, 3 * 5), "{arch}");
            assert_ne!(all, one.repeat(15), "the blocks of an XCD have adjacent tasks");
        }
    }

    #[test]
    fn few_blocks_are_split_and_many_are_balanced() {
        for arch in Arch::AMD {
            let [split, whole, many] = rows(arch).unwrap().map(|(_, cells)| cells);
            let number = |cell: &str| cell.parse::<f64>().unwrap();
            assert!(split[0].contains("merge") && !whole[0].contains("merge"), "{split:?} {whole:?}");
            assert!(number(&split[4]) <= 0.6, "the merge included, {split:?}");
            assert_eq!((&*whole[1], &*whole[4]), ("64", "1.00"));
            assert_eq!(many[1], (16 * HEADS * 32).to_string());
            assert!(number(&many[3]) <= 1.05, "{many:?}");
        }
    }
}
