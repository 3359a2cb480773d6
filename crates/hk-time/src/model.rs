//! A launch: which workgroups are alike, what they share, and how they are placed.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use hk_emu::{
    BlockTrace, Dispatch, Fault, Instruction, Machine, Module, Operation, Sample, Traffic, Unit, WaveTrace,
};

use crate::arrive::last_to_arrive;

use crate::constants::{C, Values};
use crate::cu::{self, Busy, Level, Levels, Record, Run, UNITS, View};
use crate::parts::Part;
use crate::path::{Step, WavePath, paths};

/// Vector loads of a wave that tell which data its workgroup reads.
const FIRST_LOADS: usize = 24;
/// The most of them, where the first ones do not read what most bytes come from.
const MOST_LOADS: usize = 384;
/// Launches of more workgroups are told from their first ones.
const MOST_TOLD: u64 = 4096;

/// Workgroups that are replayed where they may do different amounts of work, besides the first and the last one, and the ratio
/// that spreads them.
const SPREAD: u64 = 9;
const GOLDEN: f64 = 0.618_033_988_749_895;

/// Why a launch is not modelled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TimeError {
    /// The emulator ended it.
    #[error(transparent)]
    Fault(#[from] Box<Fault>),
    /// The kernel is for another target than the part.
    #[error("the part {part} runs {target}, the code object is for {object}")]
    Target {
        /// The part.
        part: &'static str,
        /// Its target.
        target: hk_codeobj::Arch,
        /// That of the code object.
        object: hk_codeobj::Arch,
    },
    /// It does something that the model has no notion of.
    #[error("not modelled: {0}")]
    NotModelled(String),
}

/// A buffer of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Its first address.
    pub base: u64,
    /// Bytes.
    pub bytes: u64,
}

/// How to model a launch.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// The memory-side cache holds the operands when the launch begins.
    pub warm: bool,
    /// Replay every iteration of every loop.
    pub exact: bool,
    /// Workgroups may do different amounts of work: more of them are replayed, and of those that meet the last one to arrive.
    pub uneven: bool,
    /// Bytes that another launch before it fills, whose time is part of the measured one.
    pub filled: f64,
}

/// Shares of a buffer in a round.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Share {
    /// Of the workgroups, those that read what none has read in an earlier round.
    new: f64,
    /// Lines that leave the memory-side cache, and HBM, for each that L1 asks for.
    mall: f64,
    hbm: f64,
}

/// Workgroups that run at the same time.
#[derive(Debug, Clone, PartialEq)]
struct Round {
    /// Rounds like this one.
    times: f64,
    workgroups: u64,
    /// Of a compute unit.
    groups: usize,
    shares: Vec<Share>,
}

/// A launch that has been traced: its time can be computed for any constants.
pub struct Traced {
    part: &'static Part,
    /// The program; its workgroups are in `kinds`.
    program: hk_emu::Trace,
    steps: Vec<Step>,
    /// Workgroups of each kind that was traced.
    kinds: Vec<Vec<WavePath>>,
    /// Shares of the kinds among the workgroups, where these do different amounts of work.
    shares: Vec<f64>,
    /// Of the workgroups, those that go on with what others have written, and the buffers in which they find it.
    met: Option<(f64, Vec<bool>)>,
    buffers: Vec<Buffer>,
    rounds: Vec<Round>,
    workgroups: u64,
    filled: f64,
    /// Workgroups that were replayed.
    pub sampled: usize,
}

/// The modelled time of a launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Modelled microseconds.
    pub us: f64,
    /// What limits it: one of [`UNITS`], `latency` where no unit is busy for half of the time, `dispatch` where launch and
    /// end take more than half of it.
    pub bound: &'static str,
    /// Share of the time that each of [`UNITS`] is busy, on compute units that work.
    pub busy: Busy,
    /// Engine clock, MHz.
    pub mhz: f64,
}

/// Traces a launch.
///
/// # Errors
/// [`TimeError`].
pub fn trace(
    part: &'static Part,
    machine: &Machine,
    module: &Module,
    kernel: &str,
    dispatch: &Dispatch<'_>,
    buffers: &[Buffer],
    options: Options,
) -> Result<Traced, TimeError> {
    if machine.arch() != part.arch {
        return Err(TimeError::Target { part: part.name, target: part.arch, object: machine.arch() });
    }
    let fault = |fault| TimeError::Fault(Box::new(fault));
    let total: u64 = dispatch.grid.iter().map(|n| u64::from(*n)).product();
    let told: Vec<u64> = (0..total.min(MOST_TOLD)).collect();
    let tell = |loads: usize| {
        let mut first = vec![];
        // In pieces: a trace of all of them would hold as many wave states.
        for blocks in told.chunks(256) {
            let sample = Sample { blocks, loads: Some(loads) };
            let trace = machine.trace(module, kernel, dispatch, sample).map_err(fault)?;
            first.extend(trace.blocks.iter().map(|block| signature(block, &trace, buffers)));
        }
        if first.iter().all(Option::is_none) {
            // None of them reads: all do the work.
            first.iter_mut().for_each(|signature| *signature = Some(vec![0; buffers.len()]));
        }
        Ok::<_, TimeError>(first)
    };
    let mut first = tell(FIRST_LOADS)?;
    // Slices of one tile: the first one prepares what the others wait for.
    let slices = u64::from(dispatch.grid[2]);
    let tile = total / slices;
    // Some workgroups have nothing to do, and end at once.
    let mut chosen = vec![first.iter().position(Option::is_some).unwrap_or(0) as u64];
    if slices > 1 && !options.uneven {
        chosen.push(tile);
    } else if options.uneven {
        let live = |i: &u64| first.get(*i as usize).is_none_or(Option::is_some);
        let spread = |i: u64| ((i as f64 * GOLDEN).fract() * total as f64) as u64;
        chosen = (0..SPREAD).map(spread).chain([0, total - 1]).filter(live).collect();
        chosen.truncate(total as usize);
    }
    let mut trace =
        machine.trace(module, kernel, dispatch, Sample { blocks: &chosen, loads: None }).map_err(fault)?;
    let read: Vec<Vec<f64>> = trace.blocks.iter().map(|block| read_bytes(block, &trace, buffers)).collect();
    let most = read.iter().max_by(|a, b| a.iter().sum::<f64>().total_cmp(&b.iter().sum()));
    let (steps, occupancy) =
        (trace.instructions.iter().map(Step::new).collect(), trace.resources.blocks_per_cu);
    let mut blocks = std::mem::take(&mut trace.blocks);
    let mut shares = vec![];
    let mut met = None;
    if options.uneven {
        let base = blocks.first().cloned();
        (blocks, shares) = classes(blocks);
        let one = |linear: u64| {
            let sample = Sample { blocks: &[linear], loads: None };
            Some(machine.trace(module, kernel, dispatch, sample).ok()?.blocks.swap_remove(0))
        };
        if let Some((last, together)) =
            base.and_then(|base| last_to_arrive(machine, &trace, &base, total, one))
        {
            let share = 1.0 / together as f64;
            met = Some((share, exchanged(&last, &trace, buffers)));
            shares.iter_mut().for_each(|of_kind| *of_kind *= 1.0 - share);
            shares.push(share);
            blocks.push(last);
        }
    }
    let kinds = blocks.into_iter().map(|block| paths(block, &trace.instructions, options.exact)).collect();
    // What most bytes come from must be among what the first loads read.
    let bytes = most.map_or(&[][..], |b| b);
    let largest = (0..bytes.len()).max_by(|a, b| bytes[*a].total_cmp(&bytes[*b]));
    let mut loads = FIRST_LOADS;
    while let Some(largest) = largest
        && loads < MOST_LOADS
        && first.iter().flatten().all(|signature| signature[largest] == 0)
    {
        loads *= 4;
        first = tell(loads)?;
    }
    let rounds = rounds(part, &first, bytes, total, occupancy.max(1), options);
    Ok(Traced {
        part,
        program: trace,
        steps,
        kinds,
        shares,
        buffers: buffers.to_vec(),
        rounds,
        workgroups: total,
        filled: options.filled,
        sampled: chosen.len() + usize::from(met.is_some()),
        met,
    })
}

/// The buffers that a workgroup reads behind its own stores to them, which others store to as well.
fn exchanged(block: &BlockTrace, trace: &hk_emu::Trace, buffers: &[Buffer]) -> Vec<bool> {
    let mut of = [vec![false; buffers.len()], vec![false; buffers.len()]];
    for (wave, facts, traffic) in accesses(block, trace).filter(|(_, f, _)| f.unit == Unit::VectorMemory) {
        let of = &mut of[usize::from(facts.operation == Some(Operation::Load))];
        for line in wave.lines_of(traffic) {
            if let Some(i) = buffer_of(*line, buffers) {
                of[i] = true;
            }
        }
    }
    let [stored, loaded] = of;
    stored.into_iter().zip(loaded).map(|(stored, loaded)| stored && loaded).collect()
}

/// Workgroups by the instructions that they execute, one of each kind, with shares. The last two of the sample are the ends of the
/// launch, of which only the work counts, not the share.
fn classes(blocks: Vec<BlockTrace>) -> (Vec<BlockTrace>, Vec<f64>) {
    let spread = blocks.len().saturating_sub(2).max(1);
    let work = |b: &BlockTrace| b.waves.iter().map(|w| w.steps.len()).sum::<usize>() as f64;
    let mut kinds: Vec<(BlockTrace, f64)> = vec![];
    for (i, block) in blocks.into_iter().enumerate() {
        let share = if i < spread { 1.0 / spread as f64 } else { 0.0 };
        match kinds.iter_mut().find(|(kind, _)| (work(kind) / work(&block).max(1.0) - 1.0).abs() < 0.02) {
            Some((_, sum)) => *sum += share,
            None => kinds.push((block, share)),
        }
    }
    kinds.into_iter().unzip()
}

/// Which lines of each buffer a workgroup reads first; 0: none. `None` for a workgroup without vector loads.
type Signature = Option<Vec<u64>>;

fn signature(block: &BlockTrace, trace: &hk_emu::Trace, buffers: &[Buffer]) -> Signature {
    let mut lines: Vec<Vec<u64>> = vec![vec![]; buffers.len()];
    let mut loads = false;
    for (wave, _, traffic) in accesses(block, trace).filter(|(_, f, _)| f.unit == Unit::VectorMemory) {
        loads = true;
        for line in wave.lines_of(traffic) {
            if let Some(i) = buffer_of(*line, buffers) {
                lines[i].push(*line);
            }
        }
    }
    let hash = |mut lines: Vec<u64>| {
        lines.sort_unstable();
        lines.dedup();
        let mut hasher = DefaultHasher::new();
        lines.hash(&mut hasher);
        if lines.is_empty() { 0 } else { hasher.finish() | 1 }
    };
    loads.then(|| lines.into_iter().map(hash).collect())
}

/// The memory instructions of a workgroup, wave by wave.
fn accesses<'t>(
    block: &'t BlockTrace,
    trace: &'t hk_emu::Trace,
) -> impl Iterator<Item = (&'t WaveTrace, &'t Instruction, &'t Traffic)> {
    block.waves.iter().flat_map(|wave| {
        let facts =
            wave.steps.iter().map(|i| &trace.instructions[*i as usize]).filter(|f| f.unit.is_memory());
        facts.zip(&wave.traffic).map(move |(facts, traffic)| (wave, facts, traffic))
    })
}

fn buffer_of(line: u64, buffers: &[Buffer]) -> Option<usize> {
    let address = line * 128;
    buffers.iter().position(|b| b.base <= address + 127 && address < b.base + b.bytes)
}

/// Bytes of different lines of each buffer that a workgroup reads.
fn read_bytes(block: &BlockTrace, trace: &hk_emu::Trace, buffers: &[Buffer]) -> Vec<f64> {
    let mut lines: Vec<HashSet<u64>> = vec![HashSet::new(); buffers.len()];
    for (wave, _, traffic) in accesses(block, trace).filter(|(_, f, _)| f.operation == Some(Operation::Load))
    {
        for line in wave.lines_of(traffic) {
            if let Some(i) = buffer_of(*line, buffers) {
                lines[i].insert(*line);
            }
        }
    }
    lines.iter().map(|lines| 128.0 * lines.len() as f64).collect()
}

/// Places workgroups: round robin over the XCDs, each of which fills its compute units in order. Those that end at once
/// take no place.
fn rounds(
    part: &Part,
    first: &[Signature],
    bytes: &[f64],
    total: u64,
    occupancy: u32,
    options: Options,
) -> Vec<Round> {
    let slots = (part.cus_per_xcd * occupancy) as usize;
    let mut queues: Vec<Vec<Option<&Vec<u64>>>> = vec![vec![]; part.xcds as usize];
    for i in 0..total {
        let queue = &mut queues[(i % u64::from(part.xcds)) as usize];
        match first.get(i as usize) {
            Some(Some(signature)) => queue.push(Some(signature)),
            Some(None) => {}
            None => queue.push(None),
        }
    }
    let n = queues.iter().map(|queue| queue.len().div_ceil(slots)).max().unwrap_or(0);
    let mut seen: Vec<HashSet<u64>> = vec![HashSet::new(); bytes.len()];
    let mut list: Vec<Round> = vec![];
    for round in 0..n {
        let mut members: Vec<(usize, &Vec<u64>)> = vec![];
        let mut workgroups = 0;
        for (xcd, queue) in queues.iter().enumerate() {
            let here = queue.iter().skip(round * slots).take(slots);
            workgroups += here.len() as u64;
            members.extend(here.flatten().map(|signature| (xcd, *signature)));
        }
        let shares = if members.is_empty() {
            list.last().map_or(vec![], |last: &Round| last.shares.clone())
        } else {
            let (mut shares, new): (Vec<Share>, Vec<HashSet<u64>>) =
                (0..bytes.len()).map(|buffer| share(buffer, &members, &seen[buffer], options.warm)).unzip();
            // What no first load reads is shared as what most bytes come from.
            let told = |b: &usize| members.iter().any(|(_, s)| s[*b] != 0);
            let most = (0..bytes.len()).filter(told).max_by(|a, b| bytes[*a].total_cmp(&bytes[*b]));
            for b in 0..bytes.len() {
                if let Some(most) = most
                    && !told(&b)
                    && bytes[b] > 0.0
                {
                    shares[b] = shares[most];
                }
            }
            // What has been read stays in the memory-side cache while all of it fits.
            for (seen, new) in seen.iter_mut().zip(new) {
                seen.extend(new);
            }
            let footprint: f64 = seen.iter().zip(bytes).map(|(s, b)| s.len() as f64 * b).sum();
            if footprint > part.mall_bytes.value {
                seen.iter_mut().for_each(HashSet::clear);
            }
            shares
        };
        let groups = workgroups.div_ceil(u64::from(part.cus())).max(1) as usize;
        // All but the first and the last round are taken together.
        match list.last_mut() {
            Some(last) if round >= 2 && round + 1 < n => {
                for (sum, share) in last.shares.iter_mut().zip(shares) {
                    let mean = |a: f64, b: f64| (a * last.times + b) / (last.times + 1.0);
                    *sum = Share {
                        new: mean(sum.new, share.new),
                        mall: mean(sum.mall, share.mall),
                        hbm: mean(sum.hbm, share.hbm),
                    };
                }
                last.times += 1.0;
            }
            _ => list.push(Round { times: 1.0, workgroups, groups, shares }),
        }
    }
    list
}

/// How workgroups of a round share a buffer, and what of it none has read in an earlier round.
fn share(
    buffer: usize,
    members: &[(usize, &Vec<u64>)],
    seen: &HashSet<u64>,
    warm: bool,
) -> (Share, HashSet<u64>) {
    let used: Vec<(usize, u64)> =
        members.iter().map(|(xcd, s)| (*xcd, s[buffer])).filter(|(_, s)| *s != 0).collect();
    let requests = used.len().max(1) as f64;
    let by_xcd: HashSet<(usize, u64)> = used.iter().copied().collect();
    let new: HashSet<u64> = used.iter().map(|(_, s)| *s).filter(|s| !seen.contains(s)).collect();
    let readers = used.iter().filter(|(_, s)| new.contains(s)).count() as f64;
    let cold = if warm { 0.0 } else { 1.0 };
    let share = Share {
        new: cold * readers / requests,
        mall: by_xcd.len() as f64 / requests,
        hbm: cold * new.len() as f64 / requests,
    };
    (share, new)
}

impl Traced {
    /// Computes the time.
    pub fn time(&self, values: &Values) -> Prediction {
        let peak = self.part.clock_mhz(values);
        let mut prediction = self.at(values, peak);
        // Lower clocks raise the matrix duty a little, since memory is as fast as before.
        for _ in 0..2 {
            let working = self.workgroups.min(u64::from(self.part.cus())) as f64 / f64::from(self.part.cus());
            let duty = prediction.busy[0] * working;
            let mhz = self.part.clock_at(duty, values);
            if (mhz / prediction.mhz - 1.0).abs() < 0.01 {
                break;
            }
            prediction = self.at(values, mhz);
        }
        prediction
    }

    /// Time of the launch that fills memory first.
    fn fill(&self, values: &Values) -> f64 {
        if self.filled == 0.0 {
            return 0.0;
        }
        self.part.stream_us(self.filled, values)
    }

    /// Replays a round: the slowest kind of workgroup, where the others wait for it or end sooner. Where workgroups do different
    /// amounts of work, the next ones take the places of those that end: rounds but the last take the mean of the kinds.
    fn replay(
        &self,
        round: &Round,
        values: &Values,
        mhz: f64,
        mut record: Option<&mut Record>,
    ) -> Option<Run> {
        let cus = round.workgroups.min(u64::from(self.part.cus())) as u32;
        let view = View::new(self.part, values, mhz, cus);
        let level = |share: &Share| Level {
            latency: share.new * values.get(C::HbmLatency) + (1.0 - share.new) * values.get(C::MallLatency),
            asking: 1.0,
            mall: share.mall,
            hbm: share.hbm,
        };
        // Other XCDs have written it in this launch: it is in the memory-side cache, and most compute units do not ask.
        let met = |i: usize| {
            let (share, _) = self.met.as_ref().filter(|(_, buffers)| buffers[i])?;
            Some(Level { latency: values.get(C::MallLatency), asking: *share, mall: *share, hbm: 0.0 })
        };
        let levels = self.buffers.iter().zip(&round.shares).enumerate();
        let levels = levels.map(|(i, (b, share))| (b.base / 128, met(i).unwrap_or_else(|| level(share))));
        let levels = Levels(levels.collect());
        let mut slowest: Option<Run> = None;
        let mut mean = Run::default();
        for (i, kind) in self.kinds.iter().enumerate() {
            let mut groups: Vec<&[WavePath]> = vec![kind; round.groups];
            if self.met.is_some() && i + 1 == self.kinds.len() {
                // Beside one that goes on with what others have written there are others.
                groups[1..].fill(&self.kinds[0]);
            }
            let mut noted = record.as_ref().map(|_| Record::default());
            let run = cu::run(&view, &levels, &self.steps, &groups, noted.as_mut());
            if let Some(share) = self.shares.get(i) {
                mean.end += share * run.end;
                mean.drained += share * run.drained;
                mean.busy.iter_mut().zip(run.busy).for_each(|(sum, busy)| *sum += share * busy);
            }
            if slowest.is_none_or(|slowest| run.end >= slowest.end) {
                slowest = Some(run);
                if let (Some(record), Some(noted)) = (record.as_deref_mut(), noted) {
                    *record = noted;
                }
            }
        }
        let last = self.rounds.last().is_some_and(|last| std::ptr::eq(last, round));
        if self.shares.is_empty() || last { slowest } else { Some(mean) }
    }

    /// What the instructions of a compute unit wait for in each round, with how often that round passes, at the clock of
    /// `prediction`.
    pub fn records(&self, values: &Values, prediction: &Prediction) -> Vec<(f64, Record)> {
        let record = |round: &Round| {
            let mut record = Record::default();
            self.replay(round, values, prediction.mhz, Some(&mut record));
            (round.times, record)
        };
        self.rounds.iter().map(record).collect()
    }

    /// The program whose instructions the records name.
    pub fn program(&self) -> &hk_emu::Trace {
        &self.program
    }

    /// Workgroups of the launch.
    pub fn workgroups(&self) -> u64 {
        self.workgroups
    }

    /// Instructions, LDS clocks and requests to L2 of the launch, from the sampled workgroups.
    pub(crate) fn counts(&self) -> Vec<(&'static str, f64)> {
        const NAMES: [&str; 13] = [
            "SQ_WAVES",
            "SQ_INSTS_VALU",
            "SQ_INSTS_MFMA",
            "SQ_INSTS_SALU",
            "SQ_INSTS_SMEM",
            "SQ_INSTS_LDS",
            "SQ_INSTS_VMEM_RD",
            "SQ_INSTS_VMEM_WR",
            "SQ_INSTS_BRANCH",
            "SQ_LDS_BANK_CONFLICT",
            "TCC_REQ",
            "TCC_HIT",
            "TCC_MISS",
        ];
        let mut n = [0.0; NAMES.len()];
        for (i, kind) in self.kinds.iter().enumerate() {
            let share = self.shares.get(i).copied().unwrap_or(1.0 / self.kinds.len() as f64);
            let times = share * self.workgroups as f64;
            for wave in kind {
                n[0] += times;
                let mut traffic = wave.trace.traffic.iter();
                for (at, step) in wave.trace.steps.iter().enumerate() {
                    let facts = &self.steps[*step as usize].facts;
                    let cut = wave.cut.filter(|cut| (cut.timed[0]..cut.timed[1]).contains(&at));
                    let times = times * (1.0 + cut.map_or(0.0, |cut| cut.times));
                    let load = facts.operation == Some(Operation::Load);
                    let counted: &[usize] = match facts.unit {
                        Unit::Vector | Unit::Transcendental => &[1],
                        Unit::Matrix => &[1, 2],
                        Unit::Scalar => &[3],
                        Unit::ScalarMemory => &[4],
                        Unit::Lds => &[5],
                        Unit::VectorMemory if load => &[6],
                        Unit::VectorMemory => &[7],
                        Unit::Branch => &[8],
                        _ => &[],
                    };
                    counted.iter().for_each(|i| n[*i] += times);
                    let Some(touched) = facts.unit.is_memory().then(|| traffic.next()).flatten() else {
                        continue;
                    };
                    n[9] += times * f64::from(touched.lds_conflicts);
                    if facts.unit == Unit::VectorMemory {
                        let lines = wave.trace.lines_of(touched);
                        let share = lines.first().map_or(1.0, |line| self.missed(*line));
                        n[10] += times * lines.len() as f64;
                        n[12] += times * lines.len() as f64 * if load { share } else { 1.0 };
                    }
                }
            }
        }
        n[11] = n[10] - n[12];
        NAMES.into_iter().zip(n).collect()
    }

    /// Of the requests for a line of this buffer, those that L2 passes on, over all rounds.
    fn missed(&self, line: u64) -> f64 {
        let Some(buffer) = buffer_of(line, &self.buffers) else { return 1.0 };
        let sum = |f: fn(&Share) -> f64| {
            self.rounds.iter().map(|r| r.times * r.shares.get(buffer).map_or(1.0, f)).sum::<f64>()
        };
        sum(|share| share.mall) / sum(|_| 1.0).max(1.0)
    }

    /// The part.
    pub fn part(&self) -> &'static Part {
        self.part
    }

    fn at(&self, values: &Values, mhz: f64) -> Prediction {
        let (mut clocks, mut drain) = (0.0, 0.0);
        let mut busy = [0.0; UNITS.len()];
        for round in &self.rounds {
            let Some(run) = self.replay(round, values, mhz, None) else { continue };
            clocks += run.end * round.times;
            drain = run.drained - run.end;
            busy.iter_mut().zip(run.busy).for_each(|(sum, clocks)| *sum += clocks * round.times);
        }
        let total = clocks + drain;
        busy.iter_mut().for_each(|b| *b /= total.max(1.0));
        let running = total / mhz;
        let us = values.get(C::Launch) + running + self.fill(values);
        let most = (0..UNITS.len()).max_by(|a, b| busy[*a].total_cmp(&busy[*b])).unwrap_or(0);
        let bound = match busy[most] {
            _ if running < us / 2.0 => "dispatch",
            share if share < 0.5 => "latency",
            _ => UNITS[most],
        };
        Prediction { us, bound, busy, mhz }
    }
}
