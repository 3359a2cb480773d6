//! Races on global memory between the waves of a launch, and of launches that overlap: on one device or on peers.
//!
//! Every wave has a clock. An access is stamped with it; two accesses to a byte race unless the later wave knows the
//! earlier one's clock, both read, or both are atomic at a scope that reaches from one to the other. A wave learns
//! clocks
//! - of its workgroup, at a barrier: the waves share a cache that keeps their accesses in order, so no wait is needed;
//!   or by loading (at workgroup scope or wider) what a wave of its workgroup has stored so;
//! - of other workgroups as LLVM's memory model for gfx942 and gfx950 has it. Release: `buffer_wbl2` at agent scope, a
//!   wait that proves it, then a store or atomic at agent scope, which carries the clocks to its address. Acquire: a
//!   load or atomic at agent scope from there, a wait that proves it, then `buffer_inv` at agent scope.
//!
//! - of other devices in the same way, with all of it at system scope: `buffer_wbl2 sc0 sc1`, `buffer_inv sc0 sc1`, and stores,
//!   loads and atomics with the bits of system scope. What a workgroup has learned at agent scope, it passes on at system scope.
//!
//! A barrier makes what one wave has released or acquired good for all of its workgroup. A launch knows all launches that ended
//! before it began: whether streams and events order them is another check's business.
//!
//! Each dword keeps its last writer and two of its readers; a write is checked against these. Writers that share a
//! dword are kept by the byte.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use super::access::Part;
use super::progress::{Progress, Token};
use super::step::Step;
use crate::checks::Check;
use crate::fault::{Access, Space};
use crate::fault::{Finding, Place};
use crate::isa::{Encoding, Inst, Op};
use crate::program::Program;
use crate::wave::GroupInfo;

/// How far an access is visible as an atomic one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Scope {
    /// Not atomic.
    Wave,
    Workgroup,
    Agent,
    System,
}

impl Scope {
    /// Of the scope bits of a load, store or cache instruction.
    fn of(inst: &Inst) -> Scope {
        match (inst.flags.sc0, inst.flags.sc1) {
            (true, true) => Scope::System,
            (false, true) => Scope::Agent,
            (true, false) => Scope::Workgroup,
            (false, false) => Scope::Wave,
        }
    }

    fn of_access(inst: &Inst, access: Access) -> Scope {
        match (inst.encoding, access) {
            // Atomics always execute behind the caches of the workgroup; sc0 asks for the old value.
            (_, Access::Atomic) if inst.flags.sc1 => Scope::System,
            (_, Access::Atomic) => Scope::Agent,
            (Encoding::Smem, _) => Scope::Wave,
            _ => Scope::of(inst),
        }
    }
}

/// An instruction of a wave at one time of its clock: one side of a race.
#[derive(Clone, Copy)]
struct Stamp {
    group: u32,
    wave: u32,
    clock: u32,
    index: u32,
    scope: Scope,
    access: Access,
}

/// The number of a stamp, and, in bits 3:0, the bytes of the dword that it covers. 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Slot(u32);

impl Slot {
    /// In place of a writer: the dword is kept byte by byte.
    const SPLIT: Slot = Slot(u32::MAX);
    /// One less than the number in `SPLIT`.
    const LAST_STAMP: usize = (1 << 28) - 2;

    fn stamp(self) -> u32 {
        self.0 >> 4
    }
    fn bytes(self) -> u32 {
        self.0 & 15
    }
    fn meets(self, other: Slot) -> bool {
        self.0 & other.0 & 15 != 0
    }
}

#[derive(Clone, Copy, Default)]
struct Cell {
    writer: Slot,
    readers: [Slot; 2],
}

const PAGE: u64 = 4096;
type Page = [Cell; PAGE as usize / 4];

/// What is known about the memory of a launch.
pub(crate) struct GlobalMemory {
    /// Number 0 is none.
    stamps: Vec<Stamp>,
    groups: Vec<Workgroup>,
    launches: Vec<LaunchOrder>,
    pages: Vec<Box<Page>>,
    numbers: HashMap<u64, u32>,
    /// Pages found last, by their low address bits: page, number.
    recent: [(u64, u32); 64],
    /// Dwords that are kept byte by byte.
    split: HashMap<u64, [Cell; 4]>,
    /// Of addresses that clocks were published at: the log that holds for the value there now.
    locations: HashMap<u64, u32>,
    /// The publications that a value carries, by number. Atomics add to the log of their address.
    logs: Vec<Vec<u32>>,
    publications: Vec<Publication>,
    /// Clocks that reach the waves of one workgroup through an address.
    within: HashMap<(u64, u32), Box<[u32]>>,
}

struct Workgroup {
    id: [u32; 3],
    launch: u32,
}

/// A launch among those that overlap.
struct LaunchOrder {
    device: Option<u32>,
    kernel: String,
    program: Arc<Program>,
    ended: bool,
    /// Those that had ended when it began.
    before: Box<[u32]>,
}

/// What a release makes known.
struct Publication {
    group: u32,
    /// Of its waves, to the device.
    clocks: Box<[u32]>,
    /// The same to all devices, where the release is at system scope.
    system: Option<Box<[u32]>>,
    /// What the wave had learned from other workgroups: logs up to a length.
    learned: Box<[(Source, u32)]>,
}

/// A log that somebody has acquired.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Source {
    log: u32,
    /// At system scope.
    system: bool,
    /// Where.
    device: Option<u32>,
}

impl GlobalMemory {
    pub fn new() -> GlobalMemory {
        let none = Stamp { group: 0, wave: 0, clock: 0, index: 0, scope: Scope::Wave, access: Access::Read };
        GlobalMemory {
            stamps: vec![none],
            groups: vec![],
            launches: vec![],
            pages: vec![],
            numbers: HashMap::new(),
            recent: [(u64::MAX, 0); 64],
            split: HashMap::new(),
            locations: HashMap::new(),
            logs: vec![],
            publications: vec![],
            within: HashMap::new(),
        }
    }

    /// A launch begins. Its number.
    pub fn begin(&mut self, device: Option<u32>, kernel: &str, program: &Arc<Program>) -> u32 {
        let ended = self.launches.iter().enumerate().filter(|(_, launch)| launch.ended);
        let before = ended.map(|(number, _)| number as u32).collect();
        let (kernel, program) = (kernel.to_owned(), program.clone());
        self.launches.push(LaunchOrder { device, kernel, program, ended: false, before });
        self.launches.len() as u32 - 1
    }

    pub fn end(&mut self, launch: u32) {
        self.launches[launch as usize].ended = true;
    }

    fn launch_of(&self, group: u32) -> &LaunchOrder {
        &self.launches[self.groups[group as usize].launch as usize]
    }

    /// The scope at which accesses of two workgroups are atomic to each other.
    fn reach(&self, a: u32, b: u32) -> Scope {
        if a == b {
            Scope::Workgroup
        } else if self.launch_of(a).device == self.launch_of(b).device {
            Scope::Agent
        } else {
            Scope::System
        }
    }

    fn page(&mut self, page: u64) -> &mut Page {
        let recent = &mut self.recent[page as usize % 64];
        if recent.0 != page {
            let number = *self.numbers.entry(page).or_insert_with(|| {
                self.pages.push(Box::new([Cell::default(); PAGE as usize / 4]));
                self.pages.len() as u32 - 1
            });
            *recent = (page, number);
        }
        &mut self.pages[recent.1 as usize]
    }

    /// A number for a stamp; clears all recorded accesses when there are too many.
    fn stamp(&mut self, stamp: Stamp) -> u32 {
        if self.stamps.len() > Slot::LAST_STAMP {
            self.stamps.truncate(1);
            self.pages.clear();
            self.numbers.clear();
            self.recent = [(u64::MAX, 0); 64];
            self.split.clear();
        }
        self.stamps.push(stamp);
        self.stamps.len() as u32 - 1
    }
}

/// Clocks of other workgroups.
#[derive(Default)]
struct Knowledge {
    /// Logs, up to a length.
    sources: BTreeMap<Source, u32>,
    /// Those that are not yet part of `clocks`.
    pending: Vec<(Source, u32)>,
    seen: HashMap<Source, u32>,
    /// By workgroup and wave.
    clocks: HashMap<(u32, u32), u32>,
    /// Launches that something was learned from.
    launches: Vec<u32>,
}

impl Knowledge {
    fn learn(&mut self, source: Source, len: u32) {
        let known = self.sources.entry(source).or_default();
        if *known < len {
            *known = len;
            self.pending.push((source, len));
        }
    }

    fn knows(&mut self, memory: &GlobalMemory, stamp: &Stamp) -> bool {
        while let Some((source, len)) = self.pending.pop() {
            let seen = self.seen.entry(source).or_default();
            let new = *seen as usize..(len as usize).max(*seen as usize);
            *seen = new.end as u32;
            for number in &memory.logs[source.log as usize][new] {
                let publication = &memory.publications[*number as usize];
                let near = memory.launch_of(publication.group).device == source.device;
                let system = publication.system.as_ref().filter(|_| source.system);
                let Some(clocks) = (if near { Some(&publication.clocks) } else { system }) else { continue };
                let launch = memory.groups[publication.group as usize].launch;
                if !self.launches.contains(&launch) {
                    self.launches.push(launch);
                }
                for (wave, clock) in clocks.iter().enumerate() {
                    let known = self.clocks.entry((publication.group, wave as u32)).or_default();
                    *known = (*known).max(*clock);
                }
                self.pending.extend(&publication.learned);
            }
        }
        if self.clocks.get(&(stamp.group, stamp.wave)).is_some_and(|clock| *clock >= stamp.clock) {
            return true;
        }
        let theirs = memory.groups[stamp.group as usize].launch;
        self.launches.iter().any(|known| memory.launches[*known as usize].before.contains(&theirs))
    }
}

struct WaveClocks {
    clock: u32,
    /// What it knows of its workgroup's waves.
    sees: Box<[u32]>,
    /// A write-back that is in flight, its scope, and what it covers.
    writing_back: Option<(Token, Scope, Box<[u32]>)>,
    /// What write-backs have made visible to the agent, and to the system.
    visible: [Option<Box<[u32]>>; 2],
    loaded: Vec<Loaded>,
    learned: Knowledge,
}

/// A log that a wave has loaded the value of.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Loaded {
    source: Source,
    len: u32,
    /// The load that must be complete.
    token: Option<Token>,
}

impl WaveClocks {
    /// Completes the write-back if a wait has proven it.
    fn settle(&mut self, progress: &Progress) {
        if let Some((_, scope, clocks)) = self.writing_back.take_if(|(token, ..)| progress.complete(*token)) {
            if scope == Scope::System {
                self.visible[1] = Some(clocks.clone());
            }
            self.visible[0] = Some(clocks);
        }
    }
}

fn join(a: &mut [u32], b: &[u32]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a = (*a).max(*b);
    }
}

/// A launch among those that overlap.
pub(crate) struct Overlapping {
    memory: Arc<Mutex<GlobalMemory>>,
    number: u32,
}

impl Overlapping {
    pub fn begin(
        memory: Arc<Mutex<GlobalMemory>>,
        device: Option<u32>,
        kernel: &str,
        program: &Arc<Program>,
    ) -> Overlapping {
        let number = memory.lock().unwrap_or_else(PoisonError::into_inner).begin(device, kernel, program);
        Overlapping { memory, number }
    }
}

impl Drop for Overlapping {
    fn drop(&mut self) {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).end(self.number);
    }
}

/// The accesses of one workgroup to global memory.
pub(crate) struct GlobalRaces {
    memory: Arc<Mutex<GlobalMemory>>,
    group: u32,
    device: Option<u32>,
    waves: Vec<WaveClocks>,
    /// What all of its waves have learned.
    learned: Knowledge,
    /// The last stamp of each wave and instruction: clock, number.
    stamps: HashMap<(u32, u32, u8), (u32, u32)>,
}

impl GlobalRaces {
    pub fn new(launch: &Overlapping, group: &GroupInfo, waves: usize) -> GlobalRaces {
        let memory = launch.memory.clone();
        let (number, device) = {
            let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
            memory.groups.push(Workgroup { id: group.id, launch: launch.number });
            let number = memory.groups.len() as u32 - 1;
            (number, memory.launch_of(number).device)
        };
        let wave = || WaveClocks {
            clock: 1,
            sees: vec![0; waves].into(),
            writing_back: None,
            visible: [None, None],
            loaded: vec![],
            learned: Knowledge::default(),
        };
        GlobalRaces {
            memory,
            group: number,
            device,
            waves: (0..waves).map(|_| wave()).collect(),
            // A launch has learned from itself what came before it.
            learned: Knowledge { launches: vec![launch.number], ..Knowledge::default() },
            stamps: HashMap::new(),
        }
    }

    /// A memory instruction that is about to be issued.
    pub fn step(
        &mut self,
        step: &Step<'_>,
        progress: &Progress,
        token: Option<Token>,
    ) -> Result<(), Box<Finding>> {
        match step.inst.op {
            Op::BUFFER_WBL2 if Scope::of(step.inst) >= Scope::Agent => {
                let wave = &mut self.waves[step.w.index as usize];
                wave.settle(progress);
                let mut clocks = wave.sees.clone();
                clocks[step.w.index as usize] = wave.clock;
                let scope = Scope::of(step.inst);
                if let Some(visible) = &wave.visible[usize::from(scope == Scope::System)] {
                    join(&mut clocks, visible);
                }
                wave.writing_back = token.map(|token| (token, scope, clocks));
                wave.clock += 1;
            }
            Op::BUFFER_INV if Scope::of(step.inst) >= Scope::Agent => {
                let wave = &mut self.waves[step.w.index as usize];
                let system = Scope::of(step.inst) == Scope::System;
                wave.loaded.retain(|Loaded { source, len, token }| {
                    let under_way = token.is_some_and(|token| !progress.complete(token));
                    if !under_way {
                        wave.learned.learn(Source { system: source.system && system, ..*source }, *len);
                    }
                    under_way || source.system && !system
                });
            }
            _ => {}
        }
        let shared = self.memory.clone();
        for part in step.accesses.iter().filter(|part| part.space == Space::Global) {
            let memory = &mut *shared.lock().unwrap_or_else(PoisonError::into_inner);
            let scope = Scope::of_access(step.inst, part.access);
            let mut tick = false;
            if scope != Scope::Wave {
                if part.access != Access::Read {
                    tick = self.publish(memory, step, progress, part, scope);
                }
                if part.access == Access::Read || part.access == Access::Atomic && step.inst.flags.sc0 {
                    self.load(memory, step, part, scope, token);
                }
            }
            self.access(memory, step, part, scope)?;
            self.waves[step.w.index as usize].clock += u32::from(tick);
        }
        Ok(())
    }

    /// A store or atomic carries what the wave has released. True if another wave can acquire it.
    fn publish(
        &mut self,
        memory: &mut GlobalMemory,
        step: &Step<'_>,
        progress: &Progress,
        part: &Part,
        scope: Scope,
    ) -> bool {
        let index = step.w.index as usize;
        let alone = self.waves.len() == 1;
        let wave = &mut self.waves[index];
        wave.settle(progress);
        let atomic = part.access == Access::Atomic;
        let [visible, to_all] = &wave.visible;
        let visible = visible.as_ref().filter(|_| scope >= Scope::Agent);
        let publication = visible.map(|clocks| {
            let sources = self.learned.sources.iter().chain(&wave.learned.sources);
            let publication = Publication {
                group: self.group,
                clocks: clocks.clone(),
                system: to_all.clone().filter(|_| scope == Scope::System),
                learned: sources.map(|(source, len)| (*source, *len)).collect(),
            };
            memory.publications.push(publication);
            memory.publications.len() as u32 - 1
        });
        for (_, address) in part.lanes() {
            let log = memory.locations.get(&address).copied();
            // A store replaces the value and what it carried; an atomic adds to it.
            if publication.is_some() && !(atomic && log.is_some()) || !atomic && log.is_some() {
                memory.logs.push(vec![]);
                memory.locations.insert(address, memory.logs.len() as u32 - 1);
            }
            if let (Some(publication), Some(log)) = (publication, memory.locations.get(&address)) {
                memory.logs[*log as usize].push(publication);
            }
        }
        // Flags and locks within the workgroup. Many lanes at once are counters.
        let within = !alone && (!atomic || part.mask.is_power_of_two());
        if within {
            let mut clocks = wave.sees.clone();
            clocks[index] = wave.clock;
            for (_, address) in part.lanes() {
                let known = memory.within.entry((address, self.group)).or_insert_with(|| clocks.clone());
                join(known, &clocks);
            }
        }
        within || publication.is_some()
    }

    /// A load records the clocks that the value carries.
    fn load(
        &mut self,
        memory: &GlobalMemory,
        step: &Step<'_>,
        part: &Part,
        scope: Scope,
        token: Option<Token>,
    ) {
        let wave = &mut self.waves[step.w.index as usize];
        for (_, address) in part.lanes() {
            if !memory.within.is_empty()
                && let Some(clocks) = memory.within.get(&(address, self.group))
            {
                join(&mut wave.sees, clocks);
            }
            if scope >= Scope::Agent
                && let Some(log) = memory.locations.get(&address)
            {
                let len = memory.logs[*log as usize].len() as u32;
                let source = Source { log: *log, system: scope == Scope::System, device: self.device };
                let loaded = Loaded { source, len, token };
                if !wave.loaded.contains(&loaded) {
                    wave.loaded.retain(|other| other.source != source);
                    wave.loaded.push(loaded);
                }
            }
        }
    }

    fn access(
        &mut self,
        memory: &mut GlobalMemory,
        step: &Step<'_>,
        part: &Part,
        scope: Scope,
    ) -> Result<(), Box<Finding>> {
        let (wave, index) = (step.w.index, step.u.index);
        let clock = self.waves[wave as usize].clock;
        let stamp = Stamp { group: self.group, wave, clock, index, scope, access: part.access };
        let entry = self.stamps.entry((wave, index, part.access as u8)).or_insert((0, 0));
        if entry.0 != clock {
            *entry = (clock, memory.stamp(stamp));
        }
        let number = entry.1;
        // The verdict on the stamp that was checked last.
        let mut met = (number, false);
        for (lane, address) in part.lanes() {
            let end = address.wrapping_add(u64::from(part.bytes));
            let mut at = address;
            while at < end {
                let (first, last) = (at % 4, (at % 4 + end - at).min(4));
                let me = Slot(number << 4 | ((1 << last) - (1 << first)) as u32);
                if let Some((other, byte)) = self.dword(memory, at, me, stamp, &mut met) {
                    let lane = (!part.scalar).then_some(lane as u32);
                    return Err(self.race(memory, stamp, lane, at / 4 * 4 + byte, other));
                }
                at += last - first;
            }
        }
        Ok(())
    }

    /// Checks and records an access to one dword; the other side and the byte if they race.
    #[inline(always)]
    fn dword(
        &mut self,
        memory: &mut GlobalMemory,
        address: u64,
        me: Slot,
        stamp: Stamp,
        met: &mut (u32, bool),
    ) -> Option<(u32, u64)> {
        let mut cell = memory.page(address / PAGE)[address as usize % PAGE as usize / 4];
        if cell.writer == Slot::SPLIT {
            return self.bytes(memory, address / 4, me, stamp, met);
        }
        if stamp.access == Access::Read {
            if cell.readers[0].stamp() == me.stamp()
                && cell.readers[0].bytes() | me.bytes() == cell.readers[0].bytes()
            {
                return None;
            }
            if let Some(other) = self.conflict(memory, &cell, me, stamp, met) {
                return Some(other);
            }
            self.read(memory, &mut cell, me, stamp, met);
        } else {
            if let Some(other) = self.conflict(memory, &cell, me, stamp, met) {
                return Some(other);
            }
            let old = cell.writer;
            if old.0 == 0 || old.bytes() & !me.bytes() == 0 {
                cell.writer = me;
            } else {
                let theirs = memory.stamps[old.stamp() as usize];
                let mine =
                    (theirs.group, theirs.wave, theirs.scope) == (stamp.group, stamp.wave, stamp.scope);
                if !mine {
                    let pick = |slot: Slot, n: u32| {
                        if slot.0 >> n & 1 != 0 { Slot(slot.0 & !15 | 1) } else { Slot(0) }
                    };
                    let bytes = std::array::from_fn(|n| Cell {
                        writer: pick(old, n as u32),
                        readers: cell.readers.map(|r| pick(r, n as u32)),
                    });
                    memory.split.insert(address / 4, bytes);
                    memory.page(address / PAGE)[address as usize % PAGE as usize / 4].writer = Slot::SPLIT;
                    return self.bytes(memory, address / 4, me, stamp, met);
                }
                cell.writer = Slot(me.0 | old.bytes());
            }
            // Readers that happen before this write need no more checks: what races with them races with the write.
            for reader in &mut cell.readers {
                if reader.bytes() & !me.bytes() == 0 {
                    *reader = Slot(0);
                }
            }
        }
        memory.page(address / PAGE)[address as usize % PAGE as usize / 4] = cell;
        None
    }

    #[cold]
    fn bytes(
        &mut self,
        memory: &mut GlobalMemory,
        dword: u64,
        me: Slot,
        stamp: Stamp,
        met: &mut (u32, bool),
    ) -> Option<(u32, u64)> {
        let mut cells = memory.split.get(&dword).copied().unwrap_or_default();
        for n in (0..4).filter(|n| me.0 >> n & 1 != 0) {
            let me = Slot(me.0 & !15 | 1);
            let cell = &mut cells[n];
            if let Some((other, _)) = self.conflict(memory, cell, me, stamp, met) {
                return Some((other, n as u64));
            }
            if stamp.access == Access::Read {
                self.read(memory, cell, me, stamp, met);
            } else {
                *cell = Cell { writer: me, readers: [Slot(0); 2] };
            }
        }
        memory.split.insert(dword, cells);
        None
    }

    /// Keeps a reader: in place of one that happens before it, else as the second.
    fn read(
        &mut self,
        memory: &GlobalMemory,
        cell: &mut Cell,
        me: Slot,
        stamp: Stamp,
        met: &mut (u32, bool),
    ) {
        for reader in &mut cell.readers {
            if reader.0 == 0 || reader.stamp() == me.stamp() {
                *reader = Slot(reader.0 | me.0);
                return;
            }
            let theirs = memory.stamps[reader.stamp() as usize];
            if reader.bytes() & !me.bytes() == 0
                && (theirs.group, theirs.scope) == (stamp.group, stamp.scope)
                && self.ordered(memory, reader.stamp(), stamp, met)
            {
                *reader = me;
                return;
            }
        }
        cell.readers[1] = me;
    }

    /// An earlier access that races with this one, and the byte.
    #[inline(always)]
    fn conflict(
        &mut self,
        memory: &GlobalMemory,
        cell: &Cell,
        me: Slot,
        stamp: Stamp,
        met: &mut (u32, bool),
    ) -> Option<(u32, u64)> {
        let readers = if stamp.access == Access::Read { [Slot(0); 2] } else { cell.readers };
        for other in [cell.writer, readers[0], readers[1]] {
            if other.meets(me)
                && other.stamp() != me.stamp()
                && !self.ordered(memory, other.stamp(), stamp, met)
                && !both_atomic(memory, memory.stamps[other.stamp() as usize], stamp)
            {
                return Some((other.stamp(), u64::from((other.0 & me.0 & 15).trailing_zeros())));
            }
        }
        None
    }

    /// Whether the access with that stamp happens before the present one.
    #[inline(always)]
    fn ordered(&mut self, memory: &GlobalMemory, other: u32, stamp: Stamp, met: &mut (u32, bool)) -> bool {
        if met.0 != other {
            *met = (other, self.knows(memory, memory.stamps[other as usize], stamp.wave));
        }
        met.1
    }

    fn knows(&mut self, memory: &GlobalMemory, other: Stamp, wave: u32) -> bool {
        let me = &mut self.waves[wave as usize];
        if other.group == self.group
            && (other.wave == wave || me.sees.get(other.wave as usize).is_some_and(|c| *c >= other.clock))
        {
            return true;
        }
        me.learned.knows(memory, &other) || self.learned.knows(memory, &other)
    }

    /// A barrier of the workgroup opens: every wave learns the clocks of all.
    pub fn barrier(&mut self, progress: &[Progress]) {
        let clocks: Box<[u32]> = self.waves.iter().map(|w| w.clock).collect();
        let mut visible: [Option<Box<[u32]>>; 2] = [None, None];
        let mut loaded: Vec<Loaded> = vec![];
        for (wave, progress) in self.waves.iter_mut().zip(progress) {
            wave.settle(progress);
            for pair in visible.iter_mut().zip(&wave.visible) {
                match pair {
                    (Some(all), Some(its)) => join(all, its),
                    (all @ None, Some(its)) => *all = Some(its.clone()),
                    _ => {}
                }
            }
            for Loaded { source, len, token } in &wave.loaded {
                if token.is_none_or(|token| progress.complete(token)) {
                    loaded.retain(|other| other.source != *source || other.len > *len);
                    loaded.push(Loaded { source: *source, len: *len, token: None });
                }
            }
            for (source, len) in std::mem::take(&mut wave.learned).sources {
                self.learned.learn(source, len);
            }
        }
        for wave in &mut self.waves {
            wave.sees.clone_from(&clocks);
            wave.clock += 1;
            wave.visible.clone_from(&visible);
            for entry in &loaded {
                if !wave.loaded.contains(entry) {
                    wave.loaded.push(*entry);
                }
            }
        }
    }

    fn race(
        &self,
        memory: &GlobalMemory,
        stamp: Stamp,
        lane: Option<u32>,
        address: u64,
        other: u32,
    ) -> Box<Finding> {
        let other = memory.stamps[other as usize];
        let workgroup = memory.groups[other.group as usize].id;
        let [x, y, z] = workgroup;
        let (launch, own_launch) = (memory.launch_of(other.group), memory.launch_of(self.group));
        let foreign = !std::ptr::eq(launch, own_launch);
        let describe = |stamp: &Stamp| match (stamp.access, stamp.scope) {
            (Access::Atomic, _) => "an atomic",
            (Access::Read, Scope::Wave) => "a plain read",
            (Access::Write, Scope::Wave) => "a plain write",
            (Access::Read, Scope::Workgroup) => "a read at workgroup scope",
            (Access::Write, Scope::Workgroup) => "a write at workgroup scope",
            (Access::Read, _) => "an atomic read",
            (Access::Write, _) => "an atomic write",
        };
        let same = other.group == self.group;
        let mut who =
            if same { format!("wave {}", other.wave) } else { format!("workgroup ({x}, {y}, {z})") };
        if foreign {
            let device = launch.device.map_or(String::new(), |device| format!(" on device {device}"));
            let instruction = launch.program.text(other.index);
            who += &format!(" of kernel {}{device} ({instruction}, wave {})", launch.kernel, other.wave);
        }
        let reach = memory.reach(self.group, other.group);
        let (scope, bits) = if reach == Scope::System { ("system", "sc0 sc1") } else { ("agent", "sc1") };
        let me = &self.waves[stamp.wave as usize];
        let why = if same {
            "no barrier orders them".to_owned()
        } else if (stamp.scope >= reach) != (other.scope >= reach) {
            format!("one of them is not atomic at {scope} scope, and nothing orders them")
        } else if !me.loaded.is_empty() {
            format!(
                "this wave has loaded a released value since, but no buffer_inv {bits} behind a wait for that load makes it an \
                 acquire"
            )
        } else if self.learned.sources.is_empty() && me.learned.sources.is_empty() {
            format!(
                "nothing orders the workgroups, as this wave has acquired nothing: that takes a release (buffer_wbl2 {bits}, s_waitcnt vmcnt(0), then an atomic or a store with \
                 {bits}) there and an acquire (an atomic or a load with {bits}, its wait, then buffer_inv {bits}) here"
            )
        } else {
            format!(
                "nothing that this wave has acquired was released behind that access (buffer_wbl2 {bits}, s_waitcnt vmcnt(0), then an \
                 atomic or a store with {bits})"
            )
        };
        let what = format!("{} races with {} by {who}: {why}", describe(&stamp), describe(&other));
        Box::new(Finding {
            check: Check::Global,
            what,
            lane,
            address: Some((Space::Global, address)),
            // A site is of the launch's own program.
            other: (!foreign).then_some(Place { index: other.index, workgroup, wave: other.wave }),
        })
    }
}

/// Atomic accesses that reach each other do not race.
fn both_atomic(memory: &GlobalMemory, a: Stamp, b: Stamp) -> bool {
    let reach = memory.reach(a.group, b.group);
    a.scope >= reach && b.scope >= reach
}
