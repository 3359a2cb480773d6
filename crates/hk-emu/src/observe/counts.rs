//! Detailed counters: coalescing of global accesses, bank conflicts of LDS, bytes touched.

use std::collections::{HashMap, VecDeque};

use hk_codeobj::Arch;

use super::access::Part;
use super::step::Step;
use super::waits;
use crate::costs::Costs;
use crate::counters::{Counters, Details};
use crate::effects::Kind;
use crate::fault::{Access, Space};
use crate::memory::View;

/// Bytes of a line of the vector caches.
const LINE: u64 = 128;

/// What the accesses of a launch, or of one thread's share of it, count.
pub(crate) struct Counts {
    arch: Arch,
    /// By instruction; the bytes of global memory, and `details`.
    sites: Vec<Counters>,
    read: Touched,
    written: Touched,
    /// Lines of one instruction; kept to spare allocations.
    lines: Vec<u64>,
    lines_in_flight: u64,
}

/// A vector memory instruction.
#[derive(Clone, Copy)]
struct Issued {
    /// That it reads; none if it writes.
    lines: u64,
    /// Whatever it reads, perhaps nothing.
    load: bool,
}

/// The vector memory instructions of a wave that may still be in flight.
#[derive(Clone, Default)]
pub(crate) struct Outstanding {
    /// In the order of issue.
    issued: VecDeque<Issued>,
    /// Lines of all of them, and how many are loads.
    lines: u64,
    loads: usize,
    peak: u64,
    /// A matrix instruction has come before.
    multiplied: bool,
    /// Since the last one: the waits that left no load outstanding.
    drains: Vec<u32>,
}

/// The highest count of vmcnt: one more instruction waits.
const VMCNT: usize = 63;

impl Outstanding {
    /// All but the last `n` are complete.
    fn wait(&mut self, n: usize) {
        let done = self.issued.len().saturating_sub(n);
        for Issued { lines, load } in self.issued.drain(..done) {
            self.lines -= lines;
            self.loads -= usize::from(load);
        }
    }

    /// Returns by how much the maximum has grown.
    fn issue(&mut self, issued: Issued) -> u64 {
        self.wait(VMCNT - 1);
        self.issued.push_back(issued);
        self.lines += issued.lines;
        self.loads += usize::from(issued.load);
        let more = self.lines.saturating_sub(self.peak);
        self.peak += more;
        more
    }
}

impl Counts {
    /// For a program of `len` instructions.
    pub fn new(arch: Arch, len: usize) -> Counts {
        let none = Counters { details: Some(Details::default()), ..Counters::default() };
        let (read, written) = (Touched::default(), Touched::default());
        Counts { arch, sites: vec![none; len], read, written, lines: vec![], lines_in_flight: 0 }
    }

    /// Counts what an instruction of a wave is about to access.
    pub fn count(&mut self, step: &Step<'_>, wave: &mut Outstanding) {
        let lines = self.access(step.u.index, step.accesses, step.e.memory);
        match step.effects.kind {
            Kind::Wait => {
                let had = wave.loads;
                wave.wait(waits::counts(step.inst.imm)[0]);
                if wave.multiplied && had > 0 && wave.loads == 0 {
                    wave.drains.push(step.u.index);
                }
            }
            Kind::Vector | Kind::Flat => {
                let load = step.inst.op.info().name.contains("_LOAD");
                self.lines_in_flight += wave.issue(Issued { lines, load });
            }
            Kind::None if step.inst.op.is_mfma() => {
                wave.multiplied = true;
                for index in wave.drains.drain(..) {
                    if let Some(site) = self.sites.get_mut(index as usize) {
                        site.details.get_or_insert_default().drains += 1;
                    }
                }
            }
            _ => {}
        }
    }

    /// Gives the lines that the instruction at `index` loads.
    fn access(&mut self, index: u32, parts: &[Part], memory: &View<'_>) -> u64 {
        if parts.iter().all(|part| part.scalar) {
            return 0;
        }
        let Some(site) = self.sites.get_mut(index as usize) else { return 0 };
        let d = site.details.get_or_insert_default();
        let (mut read, mut written) = (false, false);
        for part in parts.iter().filter(|part| !part.scalar) {
            let lanes = u64::from(part.mask.count_ones());
            let bytes = lanes * u64::from(part.bytes);
            let (reads, writes) = (part.access != Access::Write, part.access != Access::Read);
            let atomics = if reads && writes { lanes } else { 0 };
            match part.space {
                Space::Global => {
                    if reads {
                        site.global_read_bytes += bytes;
                        self.read.mark(part);
                    }
                    if writes {
                        site.global_written_bytes += bytes;
                        self.written.mark(part);
                    }
                    d.global_atomics += atomics;
                    d.wide_bytes += if part.bytes >= 16 { bytes } else { 0 };
                    if memory.has_peers() {
                        let lanes = part.lanes().filter(|(_, address)| memory.is_peer(*address)).count();
                        let bytes = lanes as u64 * u64::from(part.bytes);
                        d.peer_read_bytes += if reads { bytes } else { 0 };
                        d.peer_written_bytes += if writes { bytes } else { 0 };
                        d.peer_wide_bytes += if part.bytes >= 16 { bytes } else { 0 };
                    }
                    read |= reads && !writes;
                    written |= writes && !reads;
                }
                Space::Lds => {
                    d.lds_read_bytes += if reads { bytes } else { 0 };
                    d.lds_written_bytes += if writes { bytes } else { 0 };
                    d.lds_atomics += atomics;
                    let (clocks, phases) = lds_clocks(self.arch, part);
                    d.lds_clocks += clocks;
                    d.lds_conflict_clocks += clocks - phases;
                }
                Space::Private => d.scratch_bytes += bytes,
            }
        }
        // An instruction may access in several parts, but coalesces all of them.
        let of = |access| parts.iter().filter(move |p| p.space == Space::Global && p.access == access);
        let loaded = if read { distinct_lines(&mut self.lines, of(Access::Read)) } else { 0 };
        d.global_read_lines += loaded;
        if written {
            d.global_written_lines += distinct_lines(&mut self.lines, of(Access::Write));
        }
        loaded
    }

    /// Adds what another thread counted of the same launch.
    pub fn merge(&mut self, other: &Counts) {
        for (site, other) in self.sites.iter_mut().zip(&other.sites) {
            *site += *other;
        }
        self.read.merge(&other.read);
        self.written.merge(&other.written);
        self.lines_in_flight += other.lines_in_flight;
    }

    /// What the accesses of the instruction at `index` count.
    pub fn site(&self, index: usize) -> Counters {
        self.sites.get(index).copied().unwrap_or_default()
    }

    /// Those of all instructions, and what belongs to the launch as a whole.
    pub fn details(&self) -> Details {
        let mut sum = Details::default();
        self.sites.iter().filter_map(|site| site.details).for_each(|details| sum += details);
        (sum.distinct_read_bytes, sum.distinct_read_lines) = self.read.count();
        (sum.distinct_written_bytes, sum.distinct_written_lines) = self.written.count();
        sum.lines_in_flight = self.lines_in_flight;
        sum
    }
}

/// How many lines accesses touch, and those, in ascending order.
pub(crate) fn distinct_lines<'a>(lines: &mut Vec<u64>, parts: impl Iterator<Item = &'a Part>) -> u64 {
    lines.clear();
    for part in parts {
        for (_, address) in part.lanes() {
            let (first, last) = (address / LINE, address.wrapping_add(u64::from(part.bytes) - 1) / LINE);
            for line in [first, last] {
                if lines.last() != Some(&line) {
                    lines.push(line);
                }
            }
        }
    }
    lines.sort_unstable();
    lines.dedup();
    lines.len() as u64
}

/// Which bytes of global memory were touched: a bit each, in pages of 64 words.
#[derive(Default)]
struct Touched {
    pages: Vec<[u64; 64]>,
    index: HashMap<u64, usize>,
    /// The page found last.
    last: Option<(u64, usize)>,
}

impl Touched {
    /// The bits of 64 aligned bytes; `word` is their address over 64.
    fn word(&mut self, word: u64) -> &mut u64 {
        let page = word / 64;
        let at = match self.last {
            Some((last, at)) if last == page => at,
            _ => *self.index.entry(page).or_insert_with(|| {
                self.pages.push([0; 64]);
                self.pages.len() - 1
            }),
        };
        self.last = Some((page, at));
        &mut self.pages[at][(word % 64) as usize]
    }

    fn mark(&mut self, part: &Part) {
        for (_, address) in part.lanes() {
            let bit = address % 64;
            // A lane's access is at most 64 bytes: two words.
            let bits = ((1u128 << part.bytes.min(64)) - 1) << bit;
            *self.word(address / 64) |= bits as u64;
            if bits >> 64 != 0 {
                *self.word((address / 64).wrapping_add(1)) |= (bits >> 64) as u64;
            }
        }
    }

    fn merge(&mut self, other: &Touched) {
        for (page, at) in &other.index {
            for (i, bits) in other.pages[*at].iter().enumerate() {
                *self.word(page * 64 + i as u64) |= bits;
            }
        }
    }

    /// Bytes and lines.
    fn count(&self) -> (u64, u64) {
        let bytes = self.pages.iter().flatten().map(|bits| u64::from(bits.count_ones())).sum();
        let lines = self.pages.iter().flat_map(|page| page.chunks((LINE / 64) as usize));
        (bytes, lines.filter(|line| line.iter().any(|bits| *bits != 0)).count() as u64)
    }
}

/// The clocks that an access takes, and the phases among them: what it would take without conflicts.
pub(crate) fn lds_clocks(arch: Arch, part: &Part) -> (u64, u64) {
    let (phases, banks) = Costs::of(arch).lds_phases(part.access, part.bytes);
    let costs = phases.iter().map(|phase| phase_clocks(part, part.mask & phase, banks)).filter(|n| *n > 0);
    costs.fold((0, 0), |(clocks, phases), n| (clocks + n, phases + 1))
}

/// The most dwords on one bank: different ones, since the same dword serves all lanes at once, but each lane's of an
/// atomic.
fn phase_clocks(part: &Part, mask: u64, banks: usize) -> u64 {
    let (mut dwords, mut n) = ([0; 64 * 5], 0);
    let mut rest = mask;
    while rest != 0 {
        let address = part.address[rest.trailing_zeros() as usize];
        rest &= rest - 1;
        for dword in address / 4..=(address + u64::from(part.bytes) - 1) / 4 {
            dwords[n] = dword;
            n += 1;
        }
    }
    let dwords = &mut dwords[..n];
    if part.access != Access::Atomic && dwords.is_sorted_by(|a, b| a < b) {
        // Different as they stand, and on different banks if they are neighbours.
        if dwords.first().zip(dwords.last()).is_some_and(|(a, b)| b - a < banks as u64) {
            return 1;
        }
    } else {
        dwords.sort_unstable();
    }
    let mut on_bank = [0; 64];
    let mut previous = None;
    for dword in dwords {
        if part.access == Access::Atomic || previous != Some(*dword) {
            on_bank[*dword as usize % banks] += 1;
        }
        previous = Some(*dword);
    }
    on_bank.into_iter().max().unwrap_or(0)
}
