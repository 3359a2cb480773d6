//! Races on LDS within a workgroup, by barrier epochs.
//!
//! Between two barriers the waves of a workgroup run in any order: two of them that access the same byte there race
//! unless both read or both are atomic. An access that its wave has not waited for when it arrives at a barrier may
//! still be in flight after it, so it counts for the next epoch as well. A load to LDS is ordered with other vector
//! memory only: against LDS instructions of its own wave it needs the wait too.
//!
//! An LDS read cannot be told from an atomic one, so waves that signal each other through LDS by plain reads and
//! writes are reported.

use std::collections::{HashMap, VecDeque};

use super::access::Part;
use super::progress::{Progress, Token};
use super::step::Step;
use crate::checks::Check;
use crate::fault::{Access, Space};
use crate::fault::{Finding, Place};

/// One side of a possible race: who, with which bytes of the dword, when.
///
/// Bits: 3:0 bytes, 8:4 wave, 9 carried over a barrier, 10 atomic, 31:11 instruction, 63:32 epoch.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Slot(u64);

const CARRIED: u64 = 1 << 9;
const ATOMIC: u64 = 1 << 10;
/// In place of a wave: the dword is kept byte by byte.
const SPLIT: u64 = 31 << 4;

impl Slot {
    fn new(epoch: u32, index: u32, wave: u32, flags: u64) -> Slot {
        Slot(u64::from(epoch) << 32 | u64::from(index) << 11 & 0xFFFF_F800 | u64::from(wave) << 4 | flags)
    }
    fn bytes(self) -> u64 {
        self.0 & 15
    }
    fn wave(self) -> u64 {
        self.0 & SPLIT
    }
    fn epoch(self) -> u64 {
        self.0 >> 32
    }
    fn place(self, group: [u32; 3]) -> Place {
        Place { index: self.0 as u32 >> 11, workgroup: group, wave: (self.wave() >> 4) as u32 }
    }
}

/// The bits of the bytes of a dword from `first` up to `end`.
fn from_to(first: u64, end: u64) -> u64 {
    (1 << end) - (1 << first)
}

/// What happened to a dword, or to a byte of it: the last access of each kind, and the last one by another wave
/// before that. Whichever wave accesses it next, one of the two is another wave's, if there is any.
#[derive(Clone, Copy, Default)]
struct Cell {
    writes: [Slot; 2],
    reads: [Slot; 2],
}

impl Cell {
    /// An earlier access that races with this one.
    #[inline(always)]
    fn conflict(&self, me: Slot, access: Access) -> Option<Slot> {
        let other =
            |s: &&Slot| s.epoch() == me.epoch() && s.wave() != me.wave() && s.bytes() & me.bytes() != 0;
        let atomic = access == Access::Atomic;
        let write = self.writes.iter().filter(other).find(|s| !(atomic && s.0 & ATOMIC != 0));
        if access == Access::Read {
            return write.copied();
        }
        write.or_else(|| self.reads.iter().find(other)).copied()
    }

    #[inline(always)]
    fn record(&mut self, me: Slot, access: Access) {
        let slots = if access == Access::Read { &mut self.reads } else { &mut self.writes };
        let last = slots[0];
        if last.epoch() == me.epoch() && last.wave() == me.wave() {
            // An atomic does not hide an earlier plain write.
            slots[0] = Slot((me.0 | last.bytes()) & (last.0 | !ATOMIC));
        } else {
            slots[1] = if last.epoch() == me.epoch() { last } else { Slot(0) };
            slots[0] = me;
        }
    }

    /// Whether another wave has accessed other bytes of the dword than this access does.
    #[inline(always)]
    fn uneven(&self, me: Slot) -> bool {
        let all = [self.writes[0], self.writes[1], self.reads[0], self.reads[1]];
        all.iter().any(|s| s.epoch() == me.epoch() && s.wave() != me.wave() && s.bytes() != me.bytes())
    }

    /// One byte of it.
    fn byte(&self, n: usize) -> Cell {
        let pick = |s: Slot| if s.0 >> n & 1 != 0 { Slot(s.0 & !15 | 1) } else { Slot(0) };
        Cell { writes: self.writes.map(pick), reads: self.reads.map(pick) }
    }
}

/// An LDS instruction that its wave has not waited for.
struct Pending {
    token: Token,
    index: u32,
    access: Access,
    dma: bool,
    bytes: u32,
    mask: u64,
    /// First and last byte of all lanes.
    span: [u32; 2],
    address: [u32; 64],
}

/// Operations of one wave kept as pending; the hardware lets at most 63 be outstanding.
const MOST_PENDING: usize = 64;

impl Pending {
    fn lanes(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        (0..64).filter(|lane| self.mask >> lane & 1 != 0).map(|lane| (lane, self.address[lane]))
    }

    /// A lane of `part` and its address that shares a byte with this load to LDS, whose lanes have consecutive addresses.
    fn covers(&self, part: &Part) -> Option<(usize, u64)> {
        let first = self.mask.trailing_zeros();
        let base = u64::from(self.address[first as usize & 63]) - u64::from(first * self.bytes);
        part.lanes().find(|(_, at)| {
            let (start, end) = (at.saturating_sub(base), (at + u64::from(part.bytes)).saturating_sub(base));
            end > 0
                && (start / u64::from(self.bytes)..=(end - 1) / u64::from(self.bytes))
                    .any(|lane| lane < 64 && self.mask >> lane & 1 != 0)
        })
    }
}

/// The LDS of one workgroup.
pub(crate) struct LdsRaces {
    cells: Vec<Cell>,
    split: HashMap<u32, [Cell; 4]>,
    epoch: u32,
    /// Of each wave: LDS instructions, loads to LDS.
    pending: Vec<[VecDeque<Pending>; 2]>,
}

impl LdsRaces {
    pub fn new(waves: usize, lds: usize) -> LdsRaces {
        // A single wave races with its own loads to LDS only.
        let dwords = if waves > 1 { lds.div_ceil(4) } else { 0 };
        LdsRaces {
            cells: vec![Cell::default(); dwords],
            split: HashMap::new(),
            epoch: 1,
            pending: (0..waves).map(|_| Default::default()).collect(),
        }
    }

    /// A memory instruction that is about to be issued.
    pub fn access(&mut self, step: &Step<'_>, progress: &Progress, token: Token) -> Result<(), Box<Finding>> {
        for part in step.accesses.iter().filter(|part| part.space == Space::Lds) {
            self.own(step, progress, part)?;
            self.others(step, part)?;
            self.enqueue(step, part, token);
        }
        Ok(())
    }

    /// Against loads to LDS of the same wave.
    fn own(&mut self, step: &Step<'_>, progress: &Progress, part: &Part) -> Result<(), Box<Finding>> {
        let queues = &mut self.pending[step.w.index as usize];
        for queue in &mut *queues {
            while queue.front().is_some_and(|p| queue.len() >= MOST_PENDING || progress.complete(p.token)) {
                queue.pop_front();
            }
        }
        let queue = &queues[usize::from(!is_dma(part))];
        if queue.is_empty() {
            return Ok(());
        }
        let me = pending(step, part, Token::Lds(0));
        for other in queue.iter().filter(|p| !progress.complete(p.token)) {
            if other.span[1] < me.span[0] || me.span[1] < other.span[0] {
                continue;
            }
            let hit = if other.dma {
                other.covers(part)
            } else {
                let theirs = Part { bytes: other.bytes, mask: other.mask, ..part.clone() };
                let theirs = Part { address: other.address.map(u64::from), ..theirs };
                me.covers(&theirs)
            };
            let Some((lane, address)) = hit else { continue };
            let what = if other.dma {
                format!(
                    "{} bytes that this wave's own load to LDS writes, before an s_waitcnt vmcnt has proven the load \
                     complete",
                    verb(part.access)
                )
            } else {
                format!(
                    "loads to LDS over bytes that this wave's own LDS {} uses, before an {} has proven that complete",
                    other.access,
                    other.token.wait()
                )
            };
            let place = Place { index: other.index, ..step.place() };
            return Err(finding(what, lane, address, place));
        }
        Ok(())
    }

    /// Against the other waves of the workgroup.
    fn others(&mut self, step: &Step<'_>, part: &Part) -> Result<(), Box<Finding>> {
        if self.cells.is_empty() {
            return Ok(());
        }
        let flags = if part.access == Access::Atomic { ATOMIC } else { 0 };
        let me = Slot::new(self.epoch, step.u.index, step.w.index, flags);
        let bytes = u64::from(part.bytes);
        for (lane, address) in part.lanes() {
            let mut at = address;
            while at < address + bytes {
                // The bytes of one dword.
                let (first, end) = (at % 4, (at % 4 + address + bytes - at).min(4));
                let me = Slot(me.0 | from_to(first, end));
                if let Some(other) = self.touch(at / 4, me, part.access, true) {
                    let byte = (me.bytes() & other.bytes()).trailing_zeros();
                    let byte = if other.bytes() == 0 { at } else { at / 4 * 4 + u64::from(byte) };
                    return Err(race(step, part.access, lane, byte, other));
                }
                at += end - first;
            }
        }
        Ok(())
    }

    /// Checks and records an access to one dword.
    #[inline(always)]
    fn touch(&mut self, dword: u64, me: Slot, access: Access, check: bool) -> Option<Slot> {
        let cell = self.cells.get_mut(dword as usize)?;
        // The first access of an epoch; the second slots are never newer than the first ones.
        if cell.writes[0].epoch() != me.epoch() && cell.reads[0].epoch() != me.epoch() {
            let slots = if access == Access::Read { &mut cell.reads } else { &mut cell.writes };
            slots[0] = me;
            return None;
        }
        let split = cell.writes[0].wave() == SPLIT && cell.writes[0].epoch() == me.epoch();
        if split || cell.uneven(me) {
            return self.touch_bytes(dword as u32, me, access, check);
        }
        if check && let Some(other) = cell.conflict(me, access) {
            return Some(other);
        }
        cell.record(me, access);
        None
    }

    #[cold]
    fn touch_bytes(&mut self, dword: u32, me: Slot, access: Access, check: bool) -> Option<Slot> {
        let cell = self.cells.get_mut(dword as usize)?;
        let bytes = if cell.writes[0].wave() == SPLIT && cell.writes[0].epoch() == me.epoch() {
            self.split.entry(dword).or_default()
        } else {
            let bytes = std::array::from_fn(|n| cell.byte(n));
            *cell = Cell { writes: [Slot::new(self.epoch, 0, 31, 0), Slot(0)], reads: [Slot(0); 2] };
            self.split.entry(dword).insert_entry(bytes).into_mut()
        };
        for n in (0..4).filter(|n| me.0 >> n & 1 != 0) {
            let me = Slot(me.0 & !15 | 1);
            if check && let Some(other) = bytes[n].conflict(me, access) {
                return Some(Slot(other.0 & !15 | 1 << n));
            }
            bytes[n].record(me, access);
        }
        None
    }

    fn enqueue(&mut self, step: &Step<'_>, part: &Part, token: Token) {
        self.pending[step.w.index as usize][usize::from(is_dma(part))].push_back(pending(step, part, token));
    }

    /// A barrier opens: what is still in flight belongs to the next epoch too.
    pub fn barrier(&mut self, progress: &[Progress]) {
        self.epoch += 1;
        self.split.clear();
        if self.cells.is_empty() {
            return;
        }
        let mut queues = std::mem::take(&mut self.pending);
        for (wave, (queues, progress)) in queues.iter_mut().zip(progress).enumerate() {
            for p in queues.iter().flatten().filter(|p| !progress.complete(p.token)) {
                let flags = CARRIED | if p.access == Access::Atomic { ATOMIC } else { 0 };
                let me = Slot::new(self.epoch, p.index, wave as u32, flags);
                for (_, address) in p.lanes() {
                    let (mut at, last) = (u64::from(address), u64::from(address) + u64::from(p.bytes));
                    while at < last {
                        let end = (at % 4 + last - at).min(4);
                        self.touch(at / 4, Slot(me.0 | from_to(at % 4, end)), p.access, false);
                        at += end - at % 4;
                    }
                }
            }
        }
        self.pending = queues;
    }
}

/// The LDS side of a load to LDS.
fn is_dma(part: &Part) -> bool {
    part.access == Access::Write && part.register.is_none()
}

fn pending(step: &Step<'_>, part: &Part, token: Token) -> Pending {
    let address = part.address.map(|a| a as u32);
    let span = part.lanes().fold([u32::MAX, 0], |[low, high], (_, a)| {
        [low.min(a as u32), high.max((a as u32).saturating_add(part.bytes - 1))]
    });
    Pending {
        token,
        index: step.u.index,
        access: part.access,
        dma: is_dma(part),
        bytes: part.bytes,
        mask: part.mask,
        span,
        address,
    }
}

fn verb(access: Access) -> &'static str {
    match access {
        Access::Read => "reads",
        Access::Write => "writes",
        Access::Atomic => "updates atomically",
    }
}

fn race(step: &Step<'_>, access: Access, lane: usize, address: u64, other: Slot) -> Box<Finding> {
    let place = other.place(step.e.group.id);
    let inst = step.e.program.inst(place.index);
    let token = inst.and_then(|inst| Progress::default().note(inst));
    let wait = token.map_or("s_waitcnt", Token::wait);
    let kind = inst.map_or("access", |inst| {
        let name = inst.op.info().name;
        let is = |what: &str| name.contains(what);
        match () {
            () if inst.encoding != crate::isa::Encoding::Ds && is("_LOAD") => {
                if inst.flags.lds || is("_LOAD_LDS_") { "load to LDS" } else { "read" }
            }
            () if is("READ") => "read",
            () if is("WRITE") || is("_STORE") => "write",
            () => "atomic",
        }
    });
    let why = if other.0 & CARRIED == 0 {
        "no barrier orders them".to_owned()
    } else {
        format!("that {kind} was not waited for ({wait}) before the barrier between them")
    };
    let what = format!("the {access} of a byte of LDS races with a {kind} by wave {}: {why}", place.wave);
    finding(what, lane, address, place)
}

fn finding(what: String, lane: usize, address: u64, other: Place) -> Box<Finding> {
    Box::new(Finding {
        check: Check::Lds,
        what,
        lane: Some(lane as u32),
        address: Some((Space::Lds, address)),
        other: Some(other),
    })
}
