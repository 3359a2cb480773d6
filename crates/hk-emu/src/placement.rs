//! List scheduling: what each compute unit has to do when the workgroups of a launch are dispatched in order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hk_codeobj::Arch;

/// Chiplets of a part, each with a dispatcher and an equal share of the compute units: MI300X to MI355X.
pub(crate) const XCDS: u32 = 8;

/// The workgroups of a launch on the compute units of a part, by the clocks of each workgroup's busiest unit
/// ([`Clocks::busiest`](crate::Clocks::busiest)).
///
/// - Workgroup `i` goes to XCD `i mod 8`, whatever the others have left to do, as the hardware dispatches.
/// - The workgroups of an XCD begin in order. Each takes the slot that is free first, of as many on each compute unit as workgroups
///   are resident; at the start, each compute unit gets one before any gets a second.
/// - The residents of a compute unit share its units evenly, and no clock of one is hidden by another's: two of 100 clocks end
///   after 200. So a compute unit is busy for the sum of its workgroups.
///
/// Latency, caches and the rate of the dispatcher are not modelled: these clocks compare ways to cut and to order the same work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    clocks: Vec<u64>,
}

impl Placement {
    /// Places workgroups in the order of dispatch. `blocks_per_cu`: residents of a compute unit,
    /// [`Resources::blocks_per_cu`](crate::Resources::blocks_per_cu); 0 counts as 1.
    pub fn new(arch: Arch, blocks_per_cu: u32, blocks: impl IntoIterator<Item = u64>) -> Placement {
        Placement::on([XCDS, arch.compute_units() / XCDS, blocks_per_cu.max(1)], blocks)
    }

    /// On so many XCDs of so many compute units of so many slots.
    fn on([xcds, cus, slots]: [u32; 3], blocks: impl IntoIterator<Item = u64>) -> Placement {
        // Slots by when they are free, in clocks of a workgroup. They advance alike on all compute units: all are taken until no
        // workgroup is left to begin.
        let slots = || (0..slots).flat_map(|slot| (0..cus).map(move |cu| Reverse((0, slot, cu))));
        let mut free: Vec<BinaryHeap<_>> = (0..xcds).map(|_| slots().collect()).collect();
        let mut clocks = vec![0; (xcds * cus) as usize];
        let mut xcd = 0;
        for block in blocks {
            if let Some(mut first) = free[xcd].peek_mut() {
                let Reverse((at, _, cu)) = &mut *first;
                *at += block;
                clocks[xcd * cus as usize + *cu as usize] += block;
            }
            xcd = (xcd + 1) % free.len();
        }
        Placement { clocks }
    }

    /// Clocks of the compute unit that has most to do: what the launch takes at least.
    pub fn busiest(&self) -> u64 {
        self.clocks.iter().copied().max().unwrap_or(0)
    }

    /// Clocks of a compute unit, on average over all of the part.
    pub fn mean(&self) -> f64 {
        self.clocks.iter().sum::<u64>() as f64 / self.clocks.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reproducible clocks of workgroups.
    fn random(n: usize, seed: u64) -> Vec<u64> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 33
        };
        (0..n).map(|_| 1 + next() % 1000).collect()
    }

    #[test]
    fn one_unit_does_everything_and_as_many_as_workgroups_do_one_each() {
        for seed in 0..20 {
            let blocks = random(40, seed);
            let (sum, most) = (blocks.iter().sum::<u64>(), *blocks.iter().max().unwrap());
            for slots in 1..5 {
                let one = Placement::on([1, 1, slots], blocks.clone());
                assert_eq!((one.busiest(), one.mean()), (sum, sum as f64));
                for units in [[1, 40, slots], [8, 5, slots], [4, 10, slots]] {
                    let each = Placement::on(units, blocks.clone());
                    assert_eq!((each.busiest(), each.mean()), (most, sum as f64 / 40.0), "{units:?}");
                }
            }
        }
    }

    /// Graham's bound of list scheduling, of which the mean and the longest workgroup are lower ones.
    #[test]
    fn the_busiest_unit_is_within_the_bounds() {
        for seed in 0..50 {
            let blocks = random(10 + 7 * seed as usize, seed);
            let most = *blocks.iter().max().unwrap() as f64;
            let placed = Placement::on([1, 9, 1], blocks);
            let (busiest, mean) = (placed.busiest() as f64, placed.mean());
            assert!(busiest >= mean.max(most) && busiest <= mean + most * 8.0 / 9.0, "{placed:?}");
        }
    }

    #[test]
    fn heavy_workgroups_first_are_better_than_last() {
        let (light, heavy) = ([10; 12], [60; 2]);
        let first = Placement::on([1, 4, 1], heavy.into_iter().chain(light));
        let last = Placement::on([1, 4, 1], light.into_iter().chain(heavy));
        assert_eq!((first.clocks, last.clocks), (vec![60; 4], vec![90, 90, 30, 30]));
    }

    #[test]
    fn a_slot_that_is_free_first_gets_the_next_workgroup() {
        // By hand: two units of two slots. The third and fourth are second residents; the fifth follows the shortest.
        let placed = Placement::on([1, 2, 2], [50, 30, 10, 40, 7]);
        assert_eq!(placed.clocks, [50 + 10 + 7, 30 + 40]);
        // With one slot each the third and the fourth follow the second, the fifth the first.
        let placed = Placement::on([1, 2, 1], [50, 30, 10, 40, 7]);
        assert_eq!(placed.clocks, [50 + 7, 30 + 10 + 40]);
    }

    /// A workgroup does not go to another XCD, although its own is behind.
    #[test]
    fn xcds_take_turns() {
        let placed = Placement::on([2, 1, 1], [100, 1, 100, 1, 100]);
        assert_eq!(placed.clocks, [300, 2]);
        let part = Placement::new(Arch::Gfx942, 2, vec![5; 304 + 1]);
        assert_eq!((part.clocks.len(), part.busiest(), part.clocks[1]), (304, 10, 5));
        assert_eq!(Placement::new(Arch::Gfx950, 0, []).mean(), 0.0);
    }
}
