//! One compute unit: its waves issue in order, and wait for registers, counters, units and memory.
//!
//! Every unit is a server: `start = max(ready, free); free = start + cost`. A wave whose next instruction waits for a
//! register or a counter takes no unit meanwhile. Times are in engine clocks.

use std::collections::{HashMap, HashSet, VecDeque};

use hk_codeobj::Arch;
use hk_emu::{Operation, Traffic, Unit};

use crate::constants::{C, Values};
use crate::parts::Part;
use crate::path::{Step, WavePath};

/// What of the device's shared levels a compute unit sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Level {
    /// Of a line that is not in L1, in ns.
    pub latency: f64,
    /// Of the compute units, those that ask at the same time.
    pub asking: f64,
    /// Lines that L2 asks the memory-side cache for, for each line that L1 asks L2 for.
    pub mall: f64,
    /// Lines that HBM gives, for each line that L1 asks L2 for.
    pub hbm: f64,
}

/// The buffers of a launch by their first line, and the level that each is in.
#[derive(Debug, Clone, Default)]
pub struct Levels(pub Vec<(u64, Level)>);

impl Levels {
    fn of(&self, line: u64, default: Level) -> Level {
        let after = self.0.partition_point(|(first, _)| *first <= line);
        if after == 0 { default } else { self.0[after - 1].1 }
    }
}

/// The machine at one clock, as one compute unit sees it. Rates are per clock, latencies in clocks.
#[derive(Debug, Clone)]
pub struct View {
    mhz: f64,
    wave_start: f64,
    fill_lines: usize,
    fill_port: f64,
    /// Bytes of L2, of the memory-side cache and of HBM.
    shared: [f64; 3],
    l2_latency: f64,
    /// Lines of this compute unit's share of L2.
    l2_lines: usize,
    l1_latency: f64,
    l1_return: f64,
    address: f64,
    store_port: f64,
    store_latency: f64,
    atomic: f64,
    lds_latency: f64,
    lds_read_port: f64,
    lds_write_port: f64,
    vector_latency: f64,
    matrix_latency: f64,
    scalar_latency: f64,
    scalar_hit: f64,
    internal: f64,
    branch: f64,
    barrier: f64,
    fetch_miss: f64,
    /// From an XCD to where all of them meet.
    meeting: f64,
    /// Latency of what no buffer holds: arguments and code.
    other: Level,
}

impl View {
    /// `busy`: compute units that work at the same time.
    pub fn new(part: &Part, values: &Values, mhz: f64, busy: u32) -> View {
        let v = |c| values.get(c);
        let clocks = |ns: f64| ns * mhz / 1000.0;
        let gfx950 = part.arch == Arch::Gfx950;
        let busy = f64::from(busy.clamp(1, part.cus()));
        let per_xcd = (busy / f64::from(part.xcds)).ceil();
        let share = |gb: f64| gb * 1000.0 / mhz / busy;
        View {
            mhz,
            wave_start: v(C::WaveStart),
            fill_lines: (v(if gfx950 { C::FillGfx950 } else { C::FillGfx942 }) / 128.0).max(1.0) as usize,
            fill_port: v(C::FillPort),
            shared: [
                part.l2_clk.value * v(C::L2Reach) / per_xcd,
                share(part.mall.value * v(C::MallReach)),
                share(part.hbm_reached(values)),
            ],
            l2_latency: v(C::L2Latency),
            l2_lines: (part.l2_bytes.value / 128.0 / per_xcd) as usize,
            l1_latency: v(C::L1Latency),
            l1_return: v(C::L1Return),
            address: v(C::AddressLanes),
            store_port: v(C::StorePort),
            store_latency: clocks(v(C::StoreLatency)),
            atomic: v(C::AtomicClocks),
            lds_latency: v(C::LdsLatency),
            lds_read_port: v(if gfx950 { C::LdsPortGfx950 } else { C::LdsPortGfx942 }),
            lds_write_port: v(C::LdsPortGfx942),
            vector_latency: v(C::VectorLatency),
            matrix_latency: v(C::MatrixLatency),
            scalar_latency: v(C::ScalarLatency),
            scalar_hit: v(C::ScalarHit),
            internal: v(C::InternalClocks),
            branch: v(C::BranchClocks),
            barrier: v(C::BarrierClocks),
            fetch_miss: clocks(v(C::FetchMiss)),
            meeting: clocks(v(C::MallLatency)),
            other: Level { latency: v(C::MallLatency), asking: 1.0, mall: 1.0, hbm: 0.0 },
        }
    }

    fn clocks(&self, ns: f64) -> f64 {
        ns * self.mhz / 1000.0
    }
}

/// Units of a compute unit, and its shares of what it has in common with others.
pub const UNITS: [&str; 9] = ["matrix", "VALU", "LDS", "address", "L1", "L1 fill", "L2", "MALL", "HBM"];
const MATRIX: usize = 0;
const VECTOR: usize = 1;
const LDS: usize = 2;
const ADDRESS: usize = 3;
const L1_RETURN: usize = 4;
const FILL: usize = 5;
const SHARED: usize = 6;

/// Clocks that each of [`UNITS`] was busy in a run, the iterations that are left out included.
pub type Busy = [f64; UNITS.len()];

/// Why a wave does not issue: it waits for vmcnt, for lgkmcnt, for the result of an earlier instruction, for the matrix or
/// the vector pipe, for the other waves at a barrier, for its code, or for room in a counter.
pub const STALLS: [&str; 8] = ["vmcnt", "lgkmcnt", "result", "matrix", "VALU", "barrier", "fetch", "counter"];
const ON_VM: usize = 0;
const ON_LGKM: usize = 1;
const ON_RESULT: usize = 2;
const ON_MATRIX: usize = 3;
const ON_VECTOR: usize = 4;
const ON_BARRIER: usize = 5;
const ON_FETCH: usize = 6;
const ON_COUNTER: usize = 7;

/// Wave clocks of an instruction: those that it issues for, and of each of [`STALLS`].
pub type Spent = [f64; 1 + STALLS.len()];

/// Clocks of a wave at one instruction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slice {
    /// The wave, counted over all workgroups of the compute unit.
    pub wave: usize,
    /// The instruction, as an index of the trace's.
    pub step: u32,
    /// Clocks.
    pub start: f64,
    /// Clocks.
    pub end: f64,
    /// Of [`STALLS`]; `None`: it issues.
    pub stall: Option<usize>,
}

/// What a run notes of every instruction, on demand.
#[derive(Debug, Clone, Default)]
pub struct Record {
    /// By instruction.
    pub spent: Vec<Spent>,
    /// In the order of the replay, without the iterations that are left out.
    pub slices: Vec<Slice>,
    /// Busy clocks of the units, every [`WINDOW`] clocks.
    pub units: Vec<(f64, Busy)>,
}

/// Clocks between two points of [`Record::units`].
pub const WINDOW: f64 = 256.0;

impl Record {
    fn note(&mut self, slice: Slice) {
        let at = slice.step as usize;
        if self.spent.len() <= at {
            self.spent.resize(at + 1, [0.0; 1 + STALLS.len()]);
        }
        self.spent[at][slice.stall.map_or(0, |reason| 1 + reason)] += slice.end - slice.start;
        self.slices.push(slice);
    }

    /// Adds what has been spent since `then` so many times.
    fn repeat(&mut self, then: &[Spent], times: f64) {
        for (i, now) in self.spent.iter_mut().enumerate() {
            let before = then.get(i).copied().unwrap_or_default();
            now.iter_mut().zip(before).for_each(|(now, before)| *now += (*now - before) * times);
        }
    }
}

/// What a run took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Run {
    /// Clocks until the last wave has ended: the next workgroup may start.
    pub end: f64,
    /// Clocks until its stores have arrived.
    pub drained: f64,
    /// Clocks of the units.
    pub busy: Busy,
}

/// Registers: VGPRs, AGPRs, scalar ones, SCC.
const REGISTERS: usize = 512 + 128 + 64;

struct Wave<'a> {
    path: &'a WavePath,
    index: usize,
    group: usize,
    simd: usize,
    at: usize,
    memory: usize,
    ready: f64,
    priority: u32,
    registers: Vec<f64>,
    accumulators: Vec<f64>,
    vm: VecDeque<f64>,
    lgkm: VecDeque<f64>,
    at_barrier: bool,
    ended: bool,
}

/// L1: 4 sets of 64 lines, the one used longest ago replaced.
struct L1 {
    tags: [[u64; 64]; 4],
    used: [[u32; 64]; 4],
    filled: Vec<[f64; 64]>,
    now: u32,
}

impl L1 {
    fn new() -> L1 {
        L1 { tags: [[!0; 64]; 4], used: [[0; 64]; 4], filled: vec![[0.0; 64]; 4], now: 0 }
    }

    /// When a line that it holds has come.
    fn find(&mut self, line: u64) -> Option<f64> {
        let set = (line & 3) as usize;
        self.now += 1;
        let way = self.tags[set].iter().position(|tag| *tag == line)?;
        self.used[set][way] = self.now;
        Some(self.filled[set][way])
    }

    fn insert(&mut self, line: u64, filled: f64) {
        let set = (line & 3) as usize;
        let oldest = (0..64).min_by_key(|way| self.used[set][*way]).unwrap_or(0);
        (self.tags[set][oldest], self.used[set][oldest], self.filled[set][oldest]) = (line, self.now, filled);
    }
}

/// A compute unit in a run.
struct Cu<'a> {
    view: &'a View,
    levels: &'a Levels,
    l1: L1,
    /// Lines that L2 has since this compute unit asked for them, oldest first.
    l2: HashSet<u64>,
    asked: VecDeque<u64>,
    /// Arrivals of lines in flight, in order.
    flight: VecDeque<f64>,
    arrival: f64,
    vector: [f64; 4],
    matrix: [f64; 4],
    lds: f64,
    lds_ports: [f64; 2],
    address: f64,
    l1_free: f64,
    fill: f64,
    store: f64,
    shared: [f64; 3],
    scalar: f64,
    /// When lines of code have come.
    code: HashMap<u64, f64>,
    /// And those of the scalar cache.
    scalars: HashMap<u64, f64>,
    /// L2 has what memory does not have yet.
    dirty: bool,
    drained: f64,
    busy: Busy,
    record: Option<&'a mut Record>,
}

/// Replays workgroups that a compute unit holds at the same time.
pub fn run(
    view: &View,
    levels: &Levels,
    steps: &[Step],
    groups: &[&[WavePath]],
    record: Option<&mut Record>,
) -> Run {
    let mut waves: Vec<Wave<'_>> = vec![];
    for (group, paths) in groups.iter().enumerate() {
        for path in paths.iter() {
            let i = waves.len();
            waves.push(Wave {
                path,
                index: i,
                group,
                simd: i % 4,
                at: 0,
                memory: 0,
                ready: view.wave_start * (i + 1) as f64,
                priority: 0,
                registers: vec![0.0; REGISTERS],
                accumulators: vec![0.0; REGISTERS],
                vm: VecDeque::new(),
                lgkm: VecDeque::new(),
                at_barrier: false,
                ended: path.trace.steps.is_empty(),
            });
        }
    }
    let mut cu = Cu {
        view,
        levels,
        l1: L1::new(),
        l2: HashSet::new(),
        asked: VecDeque::new(),
        flight: VecDeque::new(),
        arrival: 0.0,
        vector: [0.0; 4],
        matrix: [0.0; 4],
        lds: 0.0,
        lds_ports: [0.0; 2],
        address: 0.0,
        l1_free: 0.0,
        fill: 0.0,
        store: 0.0,
        shared: [0.0; 3],
        scalar: 0.0,
        code: HashMap::new(),
        scalars: HashMap::new(),
        dirty: false,
        drained: 0.0,
        busy: [0.0; UNITS.len()],
        record,
    };
    let mut spent_then: Vec<Spent> = vec![];
    // The cut of a workgroup is that of its first wave.
    let (mut skipped, mut marks, mut skipped_busy) =
        (0.0_f64, vec![(0.0, Busy::default()); groups.len()], Busy::default());
    let mut end = 0.0_f64;
    loop {
        let next = (0..waves.len()).filter(|i| !waves[*i].ended && !waves[*i].at_barrier).min_by(|a, b| {
            let (a, b) = (&waves[*a], &waves[*b]);
            a.ready.total_cmp(&b.ready).then(b.priority.cmp(&a.priority))
        });
        let Some(next) = next else {
            // All that are left wait at barriers.
            let mut opened = false;
            for group in 0..groups.len() {
                let last = waves
                    .iter()
                    .filter(|w| w.group == group && w.at_barrier)
                    .map(|w| w.ready)
                    .reduce(f64::max);
                for wave in waves.iter_mut().filter(|w| w.group == group && w.at_barrier) {
                    opened = true;
                    cu.open(wave, last.unwrap_or(wave.ready) + view.barrier);
                }
            }
            if opened { continue } else { break }
        };
        let wave = &mut waves[next];
        if let Some(cut) = &wave.path.cut
            && next % groups[wave.group].len() == 0
        {
            if wave.at == cut.timed[0] && marks[wave.group].0 == 0.0 {
                marks[wave.group] = (wave.ready, cu.busy);
                if let (0, Some(record)) = (wave.group, &cu.record) {
                    spent_then.clone_from(&record.spent);
                }
            } else if wave.at == cut.timed[1] && marks[wave.group].0 > 0.0 {
                let (then, busy) = marks[wave.group];
                if wave.group == 0 {
                    skipped = (wave.ready - then) * cut.times;
                    skipped_busy = std::array::from_fn(|i| (cu.busy[i] - busy[i]) * cut.times);
                    if let Some(record) = &mut cu.record {
                        record.repeat(&spent_then, cut.times);
                    }
                }
                marks[wave.group].0 = -1.0;
            }
        }
        let arrived = cu.step(wave, steps);
        if wave.ended {
            end = end.max(wave.ready);
        }
        if arrived {
            let group = wave.group;
            let mut members = waves.iter().filter(|w| w.group == group && !w.ended);
            if members.all(|w| w.at_barrier) {
                let members = || waves.iter().filter(|w| w.group == group && w.at_barrier);
                let last = members().map(|w| w.ready).fold(0.0, f64::max);
                for wave in waves.iter_mut().filter(|w| w.group == group && w.at_barrier) {
                    cu.open(wave, last + view.barrier);
                }
            }
        }
    }
    let busy = std::array::from_fn(|i| cu.busy[i] + skipped_busy[i]);
    Run { end: end + skipped, drained: end.max(cu.drained) + skipped, busy }
}

impl Cu<'_> {
    fn note(&mut self, w: &Wave<'_>, at: usize, [start, end]: [f64; 2], stall: Option<usize>) {
        let (busy, step) = (self.busy, w.path.trace.steps.get(at).copied());
        if let (Some(record), Some(step)) = (&mut self.record, step)
            && end > start
        {
            record.note(Slice { wave: w.index, step, start, end, stall });
            if record.units.last().is_none_or(|(last, _)| start >= last + WINDOW) {
                record.units.push((start, busy));
            }
        }
    }

    /// Lets a wave go on behind a barrier.
    fn open(&mut self, w: &mut Wave<'_>, at: f64) {
        w.at_barrier = false;
        self.note(w, w.at.saturating_sub(1), [w.ready, at], Some(ON_BARRIER));
        w.ready = at;
    }

    /// One instruction of a wave, or a move of its time to when the instruction can start. True if it arrived at a
    /// barrier or ended.
    fn step(&mut self, w: &mut Wave<'_>, steps: &[Step]) -> bool {
        let v = self.view;
        let Some(step) = w.path.trace.steps.get(w.at).and_then(|i| steps.get(*i as usize)) else {
            w.ended = true;
            return true;
        };
        let facts = &step.facts;
        // The first wave that comes to a line of code fetches it; those behind it wait for it to come.
        let fetched = *self.code.entry(facts.address / 64).or_insert(w.ready + v.fetch_miss);
        let (mut start, mut why) = (w.ready, 0);
        let mut until = |at: f64, reason: usize| {
            if at > start {
                (start, why) = (at, reason);
            }
        };
        until(fetched, ON_FETCH);
        for r in &step.plain_reads {
            for at in r.clone() {
                until(w.registers[usize::from(at) % REGISTERS], ON_RESULT);
            }
        }
        for r in &step.accumulates {
            for at in r.clone() {
                until(w.accumulators[usize::from(at) % REGISTERS], ON_RESULT);
            }
        }
        match facts.unit {
            Unit::Matrix => {
                until(self.matrix[w.simd], ON_MATRIX);
                if facts.alone {
                    until(self.vector[w.simd], ON_VECTOR);
                }
            }
            Unit::Vector | Unit::Transcendental => {
                until(self.vector[w.simd], ON_VECTOR);
                if facts.alone {
                    until(self.matrix[w.simd], ON_MATRIX);
                }
            }
            Unit::Wait => {
                until(wait(&mut w.vm, facts.wait[0], 0.0), ON_VM);
                until(wait(&mut w.lgkm, facts.wait[1], 0.0), ON_LGKM);
            }
            _ => {}
        }
        if facts.counted[0] && w.vm.len() >= 63 {
            until(w.vm.pop_front().unwrap_or(0.0), ON_COUNTER);
        }
        if facts.counted[1] && w.lgkm.len() >= 15 {
            until(w.lgkm.pop_front().unwrap_or(0.0), ON_COUNTER);
        }
        if start > w.ready {
            // Others may use the units until then.
            self.note(w, w.at, [w.ready, start], Some(why));
            w.ready = start;
            return false;
        }
        let mut result = start + v.vector_latency;
        let mut accumulated = 0.0;
        let clocks = f64::from(facts.clocks);
        w.ready = start + 4.0;
        match facts.unit {
            Unit::Matrix => {
                self.matrix[w.simd] = start + clocks;
                self.busy[MATRIX] += clocks / 4.0;
                if facts.alone {
                    self.vector[w.simd] = start + clocks;
                }
                accumulated = start + clocks;
                result = accumulated + v.matrix_latency;
            }
            Unit::Vector | Unit::Transcendental => {
                self.vector[w.simd] = start + clocks;
                self.busy[VECTOR] += clocks / 4.0;
                if facts.alone {
                    self.matrix[w.simd] = start + clocks;
                }
                w.ready = start + clocks;
                result = start + clocks.max(v.vector_latency);
            }
            Unit::Scalar => result = start + v.scalar_latency,
            Unit::Branch => {
                let taken = w
                    .path
                    .trace
                    .steps
                    .get(w.at + 1)
                    .is_some_and(|next| *next != w.path.trace.steps[w.at] + 1);
                w.ready = start + v.internal + if taken { v.branch } else { 0.0 };
            }
            Unit::Sleep | Unit::Nop => w.ready = start + clocks,
            Unit::Priority => w.priority = facts.wait[0],
            Unit::Wait | Unit::Internal => w.ready = start + v.internal,
            Unit::WriteBack => {
                // Behind the wave's stores: what L2 has of them goes to where all XCDs see it.
                let stored = w.vm.back().copied().unwrap_or(0.0).max(start);
                let taken = if std::mem::take(&mut self.dirty) { v.meeting } else { v.clocks(v.l2_latency) };
                w.vm.push_back(stored + taken);
                w.ready = start + v.internal;
            }
            Unit::Invalidate => {
                self.l1 = L1::new();
                w.ready = start + v.internal;
            }
            Unit::Barrier => w.at_barrier = true,
            Unit::End => w.ended = true,
            Unit::Lds | Unit::VectorMemory | Unit::ScalarMemory => {
                let traffic = w.path.trace.traffic.get(w.memory).cloned().unwrap_or_default();
                let lines = w.path.trace.lines_of(&traffic);
                w.memory += 1;
                let done = match facts.unit {
                    Unit::Lds => self.lds(w.simd, start, facts.operation, &traffic),
                    Unit::ScalarMemory => self.scalar(start, lines),
                    _ => self.vector_memory([w.group, w.simd], start, facts.operation, &traffic, lines),
                };
                // In order: a counter falls when all before it have.
                if facts.counted[0] {
                    let last = w.vm.back().copied().unwrap_or(0.0);
                    w.vm.push_back(if facts.ordered { done.max(last) } else { done });
                }
                if facts.counted[1] {
                    let last = w.lgkm.back().copied().unwrap_or(0.0);
                    w.lgkm.push_back(done.max(last));
                }
                self.note(w, w.at, [start, w.ready], None);
                w.at += 1;
                return false;
            }
        }
        self.note(w, w.at, [start, w.ready], None);
        for r in &facts.writes {
            for at in r.clone() {
                w.registers[usize::from(at) % REGISTERS] = result;
                w.accumulators[usize::from(at) % REGISTERS] =
                    if accumulated > 0.0 { accumulated } else { result };
            }
        }
        w.at += 1;
        w.at_barrier || w.ended
    }

    fn lds(&mut self, simd: usize, at: f64, operation: Option<Operation>, traffic: &Traffic) -> f64 {
        let v = self.view;
        let store = operation != Some(Operation::Load);
        let bytes = f64::from(traffic.lds_bytes);
        let port = if store { (bytes + 256.0) / v.lds_write_port } else { bytes / v.lds_read_port };
        let banks = f64::from(traffic.lds_clocks);
        let start = at.max(self.lds).max(self.lds_ports[simd % 2]);
        self.lds = start + banks;
        self.lds_ports[simd % 2] = start + port;
        self.busy[LDS] += banks.max(port / 2.0);
        start + v.lds_latency + banks.max(port)
    }

    fn scalar(&mut self, at: f64, lines: &[u64]) -> f64 {
        let v = self.view;
        let start = at.max(self.scalar);
        self.scalar = start + 4.0;
        let hit = start + v.scalar_hit;
        let mut done = hit;
        for line in lines {
            // The first wave that asks for a line fetches it; those behind it wait for it to come.
            let latency = v.clocks(self.levels.of(*line, v.other).latency);
            done = done.max(*self.scalars.entry(*line).or_insert(hit + latency));
        }
        done
    }

    /// A line through L2 and what is behind it. Gives the time at which it has arrived in L1.
    fn line(&mut self, line: u64, at: f64, mut level: Level) -> f64 {
        let v = self.view;
        if !self.l2.insert(line) {
            // L1 has lost it, L2 has not.
            level = Level { latency: v.l2_latency, asking: 1.0, mall: 0.0, hbm: 0.0 };
        } else {
            self.asked.push_back(line);
            if self.asked.len() > v.l2_lines
                && let Some(oldest) = self.asked.pop_front()
            {
                self.l2.remove(&oldest);
            }
        }
        let mut start = at.max(self.fill);
        while self.flight.front().is_some_and(|done| *done <= start) {
            self.flight.pop_front();
        }
        if self.flight.len() >= v.fill_lines
            && let Some(done) = self.flight.pop_front()
        {
            self.busy[FILL] += done - start;
            start = start.max(done);
        }
        self.fill = start + 128.0 / v.fill_port;
        self.busy[FILL] += 128.0 / v.fill_port;
        let mut served = start;
        for (i, share) in [level.asking, level.mall, level.hbm].into_iter().enumerate() {
            served = served.max(self.shared(i, start, 128.0 * share));
        }
        // Lines come back in the order in which they were asked for.
        self.arrival = self.arrival.max(served + v.clocks(level.latency));
        self.flight.push_back(self.arrival);
        self.l1.insert(line, self.arrival);
        self.arrival
    }

    /// Bytes through a shared level: 0 is L2, 1 the memory-side cache, 2 HBM. Gives when they are through.
    fn shared(&mut self, level: usize, at: f64, bytes: f64) -> f64 {
        let cost = bytes / self.view.shared[level];
        self.shared[level] = self.shared[level].max(at) + cost;
        self.busy[SHARED + level] += cost;
        self.shared[level]
    }

    fn vector_memory(
        &mut self,
        [group, simd]: [usize; 2],
        at: f64,
        operation: Option<Operation>,
        traffic: &Traffic,
        lines: &[u64],
    ) -> f64 {
        let v = self.view;
        let addresses = f64::from(traffic.lanes) / v.address;
        let start = at.max(self.address);
        self.address = start + addresses;
        self.busy[ADDRESS] += addresses;
        let bytes = f64::from(traffic.bytes);
        let first = lines.first().map_or(v.other, |line| self.levels.of(*line, v.other));
        match operation {
            Some(Operation::Load) => {
                let mut arrived = start;
                let tags = self.l1_free.max(start);
                for (i, line) in lines.iter().enumerate() {
                    let at = tags + i as f64;
                    // Workgroups side by side are replays of one: what they read is not the same.
                    let tag = *line | (group as u64) << 57;
                    let come = match self.l1.find(tag) {
                        Some(filled) => filled.max(at),
                        None => self.line(tag, at, first),
                    };
                    arrived = arrived.max(come);
                }
                let cost = (lines.len() as f64).max(bytes / v.l1_return);
                // A line that finds no room holds up what comes behind it.
                self.l1_free = (tags + cost).max(self.fill);
                self.busy[L1_RETURN] += cost;
                let mut done = arrived.max(tags + cost) + v.l1_latency;
                if traffic.lds_bytes != 0 {
                    // To LDS: its time is taken when the data comes, which no access of a wave waits for before then.
                    let banks = f64::from(traffic.lds_clocks);
                    let port = (f64::from(traffic.lds_bytes) + 256.0) / v.lds_write_port;
                    self.lds = self.lds.max(start) + banks;
                    self.lds_ports[simd % 2] = self.lds_ports[simd % 2].max(start) + port;
                    self.busy[LDS] += banks.max(port / 2.0);
                    done += banks.max(port);
                }
                done
            }
            Some(operation) => {
                let atomic = operation == Operation::Atomic;
                let cost = if atomic { f64::from(traffic.lanes) * v.atomic } else { bytes / v.store_port };
                self.store = self.store.max(start) + cost;
                let mut sent = self.store;
                let lines = lines.len() as f64;
                // L2 takes 64 bytes a clock and channel, half of what it gives, and joins parts of a line before they leave it.
                // Sums leave it once, whoever adds to them.
                let (taken, written) = if atomic {
                    (lines * 128.0, lines * 128.0 * first.hbm)
                } else {
                    (bytes.max(lines * 64.0), bytes)
                };
                for (i, bytes) in [2.0 * taken, 0.0, written].into_iter().enumerate() {
                    sent = sent.max(self.shared(i, start, bytes));
                }
                let done = sent + v.store_latency;
                self.drained = self.drained.max(done);
                if atomic {
                    // Its answer comes from where all XCDs see it.
                    return done.max(sent + v.meeting);
                }
                self.dirty = true;
                done
            }
            None => start,
        }
    }
}

/// Until at most `n` are outstanding.
fn wait(queue: &mut VecDeque<f64>, n: u32, at: f64) -> f64 {
    let mut start = at;
    while queue.len() > n as usize {
        start = start.max(queue.pop_front().unwrap_or(0.0));
    }
    start
}
