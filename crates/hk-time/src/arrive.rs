//! Workgroups that meet in the last one to arrive: a trace of that one.
//!
//! They count arrivals with an atomic addition, or each sets a flag to a number of the launch and looks at those of all. A sampled
//! workgroup runs again with memory as the others leave it: the counter one short of the end, or all flags set. Nobody waits, so that
//! nothing else of the others is needed; what they have stored is read from where it is, with whatever it holds.

use hk_emu::{BlockTrace, LaneAtomic, Machine, Operation, Trace, Unit, WaveTrace};

/// Workgroups that meet, at most.
const MOST: u64 = 256;
/// Instructions of waves that are executed to find how many they are.
const BUDGET: usize = 200_000_000;

/// The trace of the last one of the workgroups that meet with `base`, and how many these are; `None` if it meets none. `run` traces a
/// workgroup of a launch of `total`.
pub(crate) fn last_to_arrive(
    machine: &Machine,
    trace: &Trace,
    base: &BlockTrace,
    total: u64,
    run: impl Fn(u64) -> Option<BlockTrace>,
) -> Option<(BlockTrace, u64)> {
    let (wave, atomic) = base.waves.iter().find_map(|wave| Some((wave, wave.atomics.first()?)))?;
    if atomic.new != atomic.old.wrapping_add(1) {
        return with_flags(machine, trace, base, (wave, atomic), &run);
    }
    let work = executed(base);
    let bytes = atomic.bytes as usize;
    let with = |arrived: u64| {
        let value = atomic.old.wrapping_add(arrived).to_le_bytes();
        with_memory(machine, atomic.address, &value[..bytes], || run(base.linear))
    };
    let most = MOST.min(total).min((BUDGET / work.max(1)) as u64);
    for arrived in 1..most {
        let block = with(arrived)?;
        if executed(&block) == work {
            continue;
        }
        // A counter of work gives each value another task.
        let last = executed(&block) > work && executed(&with(arrived + 1)?) == work;
        return last.then_some((block, arrived + 1));
    }
    None
}

/// Instructions of all waves.
fn executed(block: &BlockTrace) -> usize {
    block.waves.iter().map(|wave| wave.steps.len()).sum()
}

/// Runs with other bytes at an address.
fn with_memory<T>(
    machine: &Machine,
    address: u64,
    bytes: &[u8],
    run: impl FnOnce() -> Option<T>,
) -> Option<T> {
    let mut before = vec![0; bytes.len()];
    machine.read(address, &mut before).ok()?;
    machine.write(address, bytes).ok()?;
    let result = run();
    machine.write(address, &before).ok()?;
    result
}

/// With all flags set that the wave looks at behind its atomic.
fn with_flags(
    machine: &Machine,
    trace: &Trace,
    base: &BlockTrace,
    (wave, atomic): (&WaveTrace, &LaneAtomic),
    run: impl Fn(u64) -> Option<BlockTrace>,
) -> Option<(BlockTrace, u64)> {
    let (mut lanes, mut lines) = (0, vec![]);
    let facts = |step: &u32| &trace.instructions[*step as usize];
    let mut traffic = wave.traffic.iter();
    for (at, facts) in wave.steps.iter().map(facts).enumerate() {
        if at > atomic.step && facts.unit == Unit::Barrier {
            break;
        }
        let Some(touched) = facts.unit.is_memory().then(|| traffic.next()).flatten() else { continue };
        let flags = facts.unit == Unit::VectorMemory && facts.operation == Some(Operation::Load);
        if at > atomic.step && flags && facts.lane_bytes == atomic.bytes {
            lanes += u64::from(touched.lanes);
            lines.extend_from_slice(wave.lines_of(touched));
        }
    }
    let (first, last) = (*lines.iter().min()? * 128, *lines.iter().max()? * 128 + 128);
    if !(first..last).contains(&atomic.address) {
        return None;
    }
    let allocations = machine.allocations();
    let (start, size) = allocations.into_iter().find(|(a, n)| (*a..a + n).contains(&atomic.address))?;
    let (first, last) = (first.max(start), last.min(start + size));
    let flag = &atomic.new.to_le_bytes()[..atomic.bytes as usize];
    let all: Vec<u8> = flag.iter().copied().cycle().take((last - first) as usize).collect();
    let block = with_memory(machine, first, &all, || run(base.linear))?;
    (executed(&block) > executed(base)).then_some((block, lanes))
}
