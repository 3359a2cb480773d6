//! Launches: limits, initial state, and the schedule of workgroups and waves.

mod trace;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hk_codeobj::{Arch, Kernel, workgroups_per_cu};

use crate::checks::{Check, Checks};
use crate::counters::Counters;
use crate::exec::{Ctl, Env, Uop, indexed};
use crate::fault::{Access, Fault, Finding, MemoryProblem, Place, Problem, Site, Space};
use crate::isa::Op;
use crate::loader::Module;
use crate::memory::{Allocation, Near, View};
use crate::node::{Running, Wait};
use crate::observe::counts::Counts;
use crate::observe::deadlock::{Circle, Probe};
use crate::observe::step::{Unwatched, Watch};
use crate::observe::streams::Touched;
use crate::observe::{Observer, Overlapping, Subject, Undefined};
use crate::program::{Program, TO_GROUPS};
use crate::schedule::{Next, Schedule, Task, Turn};
use crate::wave::{GroupInfo, Lanes, Poll, Status, Wave, mode};
use crate::words::POISON;

/// What to launch over which grid with which arguments.
#[derive(Debug, Clone, Copy)]
pub struct Dispatch<'a> {
    /// Workgroups in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a workgroup in x, y, z.
    pub block: [u32; 3],
    /// Bytes of LDS beyond the kernel's static ones.
    pub dynamic_lds: u32,
    /// The explicit arguments, laid out as the kernel's metadata says. Hidden arguments are filled in.
    pub args: &'a [u8],
}

/// What the host gives to a launch beyond its arguments.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    /// Hidden arguments by their kind in the code object's note, such as `hidden_hostcall_buffer`. They replace what the
    /// emulator fills in, which is 0 for buffers, heaps and queues.
    pub hidden: &'a [(&'a str, u64)],
    /// Called at `s_sendmsg sendmsg(MSG_INTERRUPT)` on the thread that runs the wave: the wave goes on when it returns, and
    /// so sees what it wrote to the device's memory.
    pub interrupt: Option<&'a (dyn Fn() + Sync)>,
    /// Those of the machine's sanitizers that this launch runs under.
    pub checks: Checks,
}

impl Default for Host<'_> {
    /// Nothing, and all of the machine's sanitizers.
    fn default() -> Self {
        Host { hidden: &[], interrupt: None, checks: Checks::all() }
    }
}

/// In which order the workgroups of a launch communicate through global memory, on more than one host thread: through
/// atomics that return a value or round, and through loads at agent scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BlockOrder {
    /// The order of a single thread: results and counters are deterministic. A workgroup runs in parallel with earlier
    /// ones up to its first such instruction.
    #[default]
    Reproducible,
    /// The order in which host threads arrive: it varies between runs, as on a GPU.
    Arrival,
}

impl std::fmt::Display for BlockOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            BlockOrder::Reproducible => "reproducible",
            BlockOrder::Arrival => "arrival",
        })
    }
}

impl std::str::FromStr for BlockOrder {
    type Err = UnknownOrder;

    fn from_str(name: &str) -> Result<BlockOrder, UnknownOrder> {
        [BlockOrder::Reproducible, BlockOrder::Arrival]
            .into_iter()
            .find(|order| order.to_string() == name)
            .ok_or(UnknownOrder)
    }
}

/// A name that is no [`BlockOrder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected reproducible or arrival")]
pub struct UnknownOrder;

/// Everything about a launch that does not change while it runs.
pub(crate) struct Launch<'a> {
    pub module: &'a Module,
    pub kernel: &'a Kernel,
    pub program: Arc<Program>,
    pub memory: View<'a>,
    pub budget: u64,
    skew: u64,
    pub checks: Checks,
    global: Option<Overlapping>,
    details: bool,
    blocks: bool,
    spare: &'a Spare,
    running: Running<'a>,
    peers: Vec<u32>,
    epoch: Option<Instant>,
    pace: Option<(Instant, u64)>,
    /// The device's modelled time at the end of the launches so far, and where this one begins.
    clock: &'a AtomicU64,
    start: u64,
    touched: Option<Arc<Mutex<Touched>>>,
    order: BlockOrder,
    interrupt: Option<&'a (dyn Fn() + Sync)>,
    grid: [u32; 3],
    block: [u32; 3],
    lds_bytes: usize,
    waves: u32,
    /// Coordinates of the threads of each wave. All workgroups have the same, and kernels may have few instructions.
    thread_ids: Box<[Lanes]>,
    user_sgprs: Vec<u32>,
    scratch_stride: u32,
    /// Workgroups in execution order are taken from here.
    next: AtomicU64,
    total: u64,
    /// Workgroups that the GPU holds at a time, per compute unit and in all; and those that have begun and not ended.
    seats: [u64; 2],
    seated: AtomicU64,
    waiting: Waiting,
    /// The lowest workgroup with a fault, and the fault.
    fault_at: AtomicU64,
    fault: Mutex<Option<(u64, Fault)>>,
    executed: Mutex<Executed>,
}

/// What a workgroup, a host thread or all of them have executed.
#[derive(Default)]
struct Tally {
    /// Workgroups, waves and bytes.
    counters: Counters,
    /// By how much each instruction was executed more often than the one before it.
    rises: Vec<i64>,
    counts: Option<Box<Counts>>,
}

impl Tally {
    fn new(launch: &Launch<'_>) -> Tally {
        let (program, len) = (&launch.program, launch.program.uops.len());
        let counts = launch.details.then(|| Box::new(Counts::new(program.arch, len)));
        Tally { counters: Counters::default(), rises: vec![0; len + 1], counts }
    }

    fn add(&mut self, other: Tally) {
        self.counters += other.counters;
        self.rises.resize(other.rises.len(), 0);
        self.rises.iter_mut().zip(other.rises).for_each(|(sum, n)| *sum += n);
        match (&mut self.counts, other.counts) {
            (Some(sum), Some(counts)) => sum.merge(&counts),
            (sum, counts) => *sum = sum.take().or(counts),
        }
    }

    /// How often each instruction was executed.
    fn executions(&self) -> impl Iterator<Item = u64> {
        self.rises.iter().scan(0, |n, rise| {
            *n += rise;
            Some(*n as u64)
        })
    }

    /// All counts of a program's instructions.
    fn total(&self, program: &Program) -> Counters {
        let mut total = self.counters;
        let mut times = vec![0; program.units.len()];
        program.unit_of.iter().zip(self.executions()).for_each(|(unit, n)| times[*unit as usize] += n);
        program.units.iter().zip(times).for_each(|(unit, n)| total.add_times(unit, n));
        total.details = self.counts.as_ref().map(|counts| counts.details());
        total
    }

    /// The same by instruction, if what depends on addresses is counted.
    fn sites(&self, program: &Program) -> Vec<Counters> {
        let Some(counts) = &self.counts else { return vec![] };
        let executed = (0..program.unit_of.len()).zip(self.executions());
        executed
            .map(|(i, n)| {
                let mut site = counts.site(i);
                site.add_times(program.unit(i as u32), n);
                site
            })
            .collect()
    }
}

/// What the threads of a launch have executed, and each workgroup by its place in the order of dispatch, where those are asked
/// for.
#[derive(Default)]
struct Executed {
    tally: Tally,
    blocks: Vec<(u64, Counters)>,
}

/// What a launch counted.
pub(crate) struct Counted {
    pub total: Counters,
    /// Of each instruction of the program, with details.
    pub sites: Vec<Counters>,
    /// Of each workgroup, in the order of dispatch, where they are asked for.
    pub blocks: Vec<Counters>,
}

/// Whether every running workgroup only waits.
#[derive(Default)]
struct Waiting {
    /// Host threads that run workgroups.
    threads: AtomicU64,
    /// A version of memory, and how many threads hold only workgroups that spin at that version.
    stuck: Mutex<(u64, u64)>,
    /// A thread has reported that.
    deadlock: AtomicBool,
}

/// Wave instructions that a workgroup runs before another one gets its turn.
const SLICE: u64 = 1 << 22;
/// Modelled clocks that a wave may be ahead of the others of its workgroup when it accesses LDS, unless a machine says
/// otherwise: about in step, as waves are that have their SIMDs to themselves.
const SKEW: u64 = 16;
/// The same where races between waves are looked for: far out of step.
const RACING_SKEW: u64 = 1 << 18;
/// Instructions within which a spinning wave returns to the same state, and times it may sleep within them.
const CIRCLE: u64 = 1 << 12;
const CIRCLE_SLEEPS: u32 = 64;
/// Turns in a row that ended in a sleep, for each wave, after which the workgroup yields.
const SLEEPS: usize = 4;
/// Pause of a host thread whose workgroups all sleep.
const SLEEP: Duration = Duration::from_micros(50);
/// Instructions after which a wave's turn is over even if other waves see none of them.
const UNSEEN: u64 = 1 << 16;
/// Bytes of wave state that suspended workgroups of one thread may hold.
const SUSPENDED_BYTES: usize = 512 << 20;
/// The hardware's bounds on private memory (8 MiB per wave); ours on arguments and on the size of a launch.
const MAX_PRIVATE: u64 = 128 << 10;
const MAX_KERNARG: u64 = 64 << 10;
const MAX_WORKGROUPS: u64 = 1 << 40;
/// Private memory per lane of kernels whose stack has no static bound.
const DYNAMIC_STACK: u32 = 16 << 10;

/// Kernel argument segments are allocated in whole cache lines; widened loads may read to their end.
const KERNARG_GRANULE: usize = 64;

/// The kernel argument segment: explicit arguments, then hidden ones by their kind.
pub(crate) fn kernarg(
    kernel: &Kernel,
    dispatch: &Dispatch<'_>,
    hidden: &[(&str, u64)],
) -> Result<Vec<u8>, Fault> {
    let name = || kernel.name.clone();
    if dispatch.args.len() != kernel.explicit_arg_bytes as usize {
        return Err(Fault::Arguments {
            kernel: name(),
            what: format!(
                "{} bytes of arguments were given, the kernel takes {}",
                dispatch.args.len(),
                kernel.explicit_arg_bytes
            ),
        });
    }
    let size = (kernel.kernarg_size as usize).max(dispatch.args.len());
    let mut bytes = vec![0; size.next_multiple_of(KERNARG_GRANULE)];
    bytes[..dispatch.args.len()].copy_from_slice(dispatch.args);
    let dims = 1
        + u64::from(dispatch.grid[1] * dispatch.block[1] > 1 || dispatch.grid[2] * dispatch.block[2] > 1)
        + u64::from(dispatch.grid[2] * dispatch.block[2] > 1);
    for arg in kernel.args.iter().filter(|arg| arg.hidden()) {
        let given = hidden.iter().find(|(kind, _)| *kind == arg.kind).map(|(_, value)| *value);
        let value = given.unwrap_or(match arg.kind.as_str() {
            "hidden_block_count_x" => dispatch.grid[0].into(),
            "hidden_block_count_y" => dispatch.grid[1].into(),
            "hidden_block_count_z" => dispatch.grid[2].into(),
            "hidden_group_size_x" => dispatch.block[0].into(),
            "hidden_group_size_y" => dispatch.block[1].into(),
            "hidden_group_size_z" => dispatch.block[2].into(),
            "hidden_grid_dims" => dims,
            "hidden_dynamic_lds_size" => dispatch.dynamic_lds.into(),
            "hidden_private_base" => crate::exec::flat::PRIVATE_APERTURE.into(),
            "hidden_shared_base" => crate::exec::flat::SHARED_APERTURE.into(),
            // Whole workgroups only: no remainders. Offsets, heaps and queues do not exist.
            _ => 0u64,
        });
        let (at, size) = (arg.offset as usize, (arg.size as usize).min(8));
        let Some(target) = bytes.get_mut(at..at + size) else {
            return Err(Fault::Arguments {
                kernel: name(),
                what: format!("hidden argument {} lies outside the argument segment", arg.kind),
            });
        };
        target.copy_from_slice(&value.to_le_bytes()[..size]);
    }
    Ok(bytes)
}

/// The dispatch packet, as far as kernels read it.
pub(crate) fn packet(kernel: &Kernel, dispatch: &Dispatch<'_>, lds: u32, kernarg: u64) -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
    for i in 0..3 {
        put(4 + 2 * i, &(dispatch.block[i] as u16).to_le_bytes());
        put(12 + 4 * i, &dispatch.grid[i].wrapping_mul(dispatch.block[i]).to_le_bytes());
    }
    put(24, &kernel.scratch_bytes.to_le_bytes());
    put(28, &lds.to_le_bytes());
    put(40, &kernarg.to_le_bytes());
    bytes
}

/// Refuses what the target cannot run.
pub(crate) fn check_limits(arch: Arch, kernel: &Kernel, dispatch: &Dispatch<'_>) -> Result<(), Fault> {
    let limit = |what, requested: u64, limit: u64| {
        if requested > limit {
            Err(Fault::Limits { kernel: kernel.name.clone(), what, requested, limit })
        } else {
            Ok(())
        }
    };
    let threads = dispatch.block.iter().map(|n| u128::from(*n)).product::<u128>();
    let threads = u64::try_from(threads).unwrap_or(u64::MAX);
    let lds = u64::from(kernel.lds_bytes) + u64::from(dispatch.dynamic_lds);
    limit("LDS bytes per workgroup", lds, arch.lds_bytes().into())?;
    limit("threads per workgroup", threads, arch.max_workgroup_threads().into())?;
    limit("threads per workgroup (the kernel's own bound)", threads, kernel.max_threads.into())?;
    for n in dispatch.block {
        limit("threads per workgroup in one dimension", n.into(), 1024)?;
    }
    for (blocks, threads) in dispatch.grid.iter().zip(dispatch.block) {
        limit(
            "threads of the grid in one dimension",
            u64::from(*blocks) * u64::from(threads),
            u32::MAX.into(),
        )?;
    }
    let groups: u128 = dispatch.grid.iter().map(|n| u128::from(*n)).product();
    limit("workgroups", u64::try_from(groups).unwrap_or(u64::MAX), MAX_WORKGROUPS)?;
    limit("private bytes per lane", kernel.scratch_bytes.into(), MAX_PRIVATE)?;
    limit("kernel argument bytes", kernel.kernarg_size.into(), MAX_KERNARG)?;
    limit("vector registers", kernel.total_vgprs.into(), arch.simd_registers().into())?;
    if let Some(required) = kernel.reqd_workgroup_size
        && required != dispatch.block
    {
        return Err(Fault::Arguments {
            kernel: kernel.name.clone(),
            what: format!("launched with blocks of {:?} threads, compiled for {required:?}", dispatch.block),
        });
    }
    if kernel.wave_size != arch.wave_size() {
        return Err(Fault::Limits {
            kernel: kernel.name.clone(),
            what: "lanes of a wave",
            requested: kernel.wave_size.into(),
            limit: arch.wave_size().into(),
        });
    }
    Ok(())
}

/// What a launch is made of.
pub(crate) struct Setup<'a> {
    pub module: &'a Module,
    pub kernel: &'a Kernel,
    pub program: Arc<Program>,
    pub memory: View<'a>,
    pub budget: u64,
    pub skew: Option<u64>,
    pub kernarg: &'a Allocation,
    pub packet: &'a Allocation,
    pub spare: &'a Spare,
    pub checks: Checks,
    /// Count what depends on addresses.
    pub details: bool,
    /// Count each workgroup by itself, too.
    pub blocks: bool,
    /// The launch among those of its node.
    pub running: Running<'a>,
    /// The devices of the node that it has peer access to.
    pub peers: Vec<u32>,
    /// When the constant counter began, where it counts the time of the host.
    pub epoch: Option<Instant>,
    /// Waits for a time of the clock take as long for the host.
    pub paced: bool,
    /// The modelled time of the machine.
    pub clock: &'a AtomicU64,
    /// Where the bytes that are accessed are noted.
    pub touched: Option<Arc<Mutex<Touched>>>,
    pub order: BlockOrder,
    /// What an interrupt of the host does.
    pub interrupt: Option<&'a (dyn Fn() + Sync)>,
}

/// Wave states kept between launches: creating one touches 256 KiB.
#[derive(Default)]
pub(crate) struct Spare(Mutex<Vec<Wave>>);

impl Spare {
    /// Most that are kept.
    const KEPT: usize = 64;
    /// Bytes of private memory that stay with each.
    const KEPT_SCRATCH: usize = 1 << 20;

    fn take(&self) -> Wave {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).pop().unwrap_or_else(Wave::new)
    }

    fn give(&self, waves: impl IntoIterator<Item = Wave>) {
        let mut kept = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let room = Self::KEPT.saturating_sub(kept.len());
        kept.extend(waves.into_iter().take(room).map(|mut wave| {
            // Private memory may be far larger than the registers.
            if wave.scratch.capacity() > Self::KEPT_SCRATCH {
                wave.scratch = Vec::new();
            }
            wave
        }));
    }
}

/// Host threads for workgroups.
pub(crate) enum Threads<'a> {
    /// The caller's.
    One,
    /// Those that the whole process shares.
    Shared,
    /// Those of one machine.
    Pool(&'a rayon::ThreadPool),
}

impl<'a> Launch<'a> {
    pub fn new(setup: Setup<'a>, dispatch: &Dispatch<'_>) -> Launch<'a> {
        let Setup {
            spare,
            module,
            kernel,
            program,
            memory,
            budget,
            skew,
            kernarg,
            packet,
            checks,
            details,
            blocks,
            running,
            peers,
            epoch,
            paced,
            clock,
            touched,
            order,
            interrupt,
        } = setup;
        let global = checks
            .has(Check::Global)
            .then(|| Overlapping::begin(running.global(), running.device(), &kernel.name, &program));
        let races = checks.has(Check::Lds) || checks.has(Check::Global);
        let d = &kernel.descriptor;
        let mut user_sgprs = vec![];
        let mut push64 = |value: u64| user_sgprs.extend([value as u32, (value >> 32) as u32]);
        if d.dispatch_ptr {
            push64(packet.base);
        }
        if d.queue_ptr {
            push64(0);
        }
        if d.kernarg_ptr {
            push64(kernarg.base);
        }
        if d.dispatch_id {
            push64(0);
        }
        let scratch_stride = kernel.scratch_bytes + if kernel.uses_dynamic_stack { DYNAMIC_STACK } else { 0 };
        if d.private_segment_size {
            user_sgprs.push(kernel.scratch_bytes);
        }
        for i in 0..usize::from(d.kernarg_preload_dwords) {
            let at = 4 * (usize::from(d.kernarg_preload_offset) + i);
            let mut word = [0; 4];
            kernarg.read_bytes(at, &mut word);
            user_sgprs.push(u32::from_le_bytes(word));
        }
        user_sgprs.resize(usize::from(d.user_sgprs), 0);
        let threads = dispatch.block.iter().product::<u32>();
        Launch {
            module,
            kernel,
            program,
            memory,
            budget,
            skew: skew.unwrap_or(if races { RACING_SKEW } else { SKEW }),
            checks,
            global,
            details,
            blocks,
            spare,
            running,
            peers,
            epoch,
            pace: paced.then(|| (Instant::now(), clock.load(SeqCst))),
            clock,
            start: clock.load(SeqCst),
            touched,
            order,
            interrupt,
            grid: dispatch.grid,
            block: dispatch.block,
            lds_bytes: (kernel.lds_bytes + dispatch.dynamic_lds) as usize,
            waves: threads.div_ceil(64),
            thread_ids: (0..threads).step_by(64).map(|first| thread_ids(dispatch.block, first)).collect(),
            user_sgprs,
            scratch_stride,
            next: AtomicU64::new(0),
            total: dispatch.grid.iter().map(|n| u64::from(*n)).product(),
            seats: {
                let arch = module.object.arch;
                let lds = kernel.lds_bytes + dispatch.dynamic_lds;
                let each = workgroups_per_cu(arch, kernel.total_vgprs, lds, threads).max(1);
                [each.into(), u64::from(each) * u64::from(arch.compute_units())]
            },
            seated: AtomicU64::new(0),
            waiting: Waiting::default(),
            fault_at: AtomicU64::new(u64::MAX),
            fault: Mutex::new(None),
            executed: Mutex::default(),
        }
    }

    /// Whether several threads may run it.
    pub fn parallel(&self) -> bool {
        // The clocks of global memory are kept in one order.
        self.total > 1 && self.global.is_none()
    }

    /// Suspended workgroups that the host's memory holds.
    fn room(&self) -> usize {
        let wave_bytes = (1 << 18) + Wave::scratch_bytes(self.scratch_stride);
        (SUSPENDED_BYTES / (self.waves as usize * wave_bytes).max(1)).max(2)
    }

    /// The next workgroup, if the GPU has room for it.
    fn claim(&self) -> Option<u64> {
        if self.seated.fetch_add(1, SeqCst) < self.seats[1] {
            let linear = self.next.fetch_add(1, SeqCst);
            if linear < self.total && linear <= self.fault_at.load(Relaxed) {
                return Some(linear);
            }
        }
        self.seated.fetch_sub(1, SeqCst);
        None
    }

    /// Whether workgroups are left to begin.
    fn unclaimed(&self) -> bool {
        let next = self.next.load(SeqCst);
        next < self.total && next <= self.fault_at.load(Relaxed)
    }

    /// What a kernel counts that ends with its first instruction: nothing is executed for it, however large the grid.
    fn empty(&self) -> Option<Counted> {
        let entry = self.program.entry as usize;
        let ends = self.program.inst(entry as u32).is_some_and(|inst| inst.op == Op::S_ENDPGM);
        if !ends || self.details || self.blocks {
            return None;
        }
        self.clock.fetch_max(self.start + u64::from(self.program.uops[entry].clocks), SeqCst);
        let mut tally = Tally::new(self);
        let waves = self.total * u64::from(self.waves);
        (tally.counters.workgroups, tally.counters.waves) = (self.total, waves);
        (tally.rises[entry], tally.rises[entry + 1]) = (waves as i64, -(waves as i64));
        Some(Counted { total: tally.total(&self.program), sites: vec![], blocks: vec![] })
    }

    /// Runs every workgroup.
    pub fn run(self, threads: Threads<'_>) -> Result<Counted, Fault> {
        if let Some(counted) = self.empty() {
            return Ok(counted);
        }
        let n = match threads {
            Threads::One => 1,
            Threads::Shared => rayon::current_num_threads(),
            Threads::Pool(pool) => pool.current_num_threads(),
        };
        let n = n.min(usize::try_from(self.total).unwrap_or(n)).max(1);
        let in_turn = n > 1 && self.program.communicates && self.order == BlockOrder::Reproducible;
        let schedule = in_turn.then(|| Schedule::new(self.total, self.seats[1], self.room()));
        let work = || match &schedule {
            Some(schedule) => Worker::new(&self).run_in_turn(schedule),
            None => Worker::new(&self).run(),
        };
        match threads {
            _ if n == 1 => work(),
            Threads::Pool(pool) => pool.scope(|scope| (0..n).for_each(|_| scope.spawn(|_| work()))),
            _ => rayon::scope(|scope| (0..n).for_each(|_| scope.spawn(|_| work()))),
        }
        let fault = self.fault.into_inner().unwrap_or_else(|e| e.into_inner());
        if let Some((_, fault)) = fault {
            return Err(fault);
        }
        let executed = self.executed.into_inner().unwrap_or_else(|e| e.into_inner());
        let Executed { tally, mut blocks } = executed;
        blocks.sort_unstable_by_key(|(linear, _)| *linear);
        Ok(Counted {
            total: tally.total(&self.program),
            sites: tally.sites(&self.program),
            blocks: blocks.into_iter().map(|(_, counters)| counters).collect(),
        })
    }

    /// Reports a deadlock at the first of the workgroups.
    fn deadlock(&self, groups: VecDeque<Group>) {
        // They may wait for a workgroup that failed; or another thread holds some of those that wait.
        let known = self.waiting.deadlock.load(SeqCst);
        if self.fault_at.load(Relaxed) != u64::MAX && !known {
            return;
        }
        self.waiting.deadlock.store(true, SeqCst);
        let first = groups.into_iter().min_by_key(|group| group.info.linear);
        let Some(Group { info, mut waves, circle: Some((wave, circle)), .. }) = first else { return };
        let Circle { mut finding, index } = circle;
        let at_barrier = waves.iter().filter(|w| w.status == Status::AtBarrier).count();
        if at_barrier != 0 {
            finding.what += &format!("; {at_barrier} waves of its workgroup wait at a barrier");
        }
        if self.next.load(SeqCst) < self.total {
            let [each, all] = self.seats;
            finding.what += &format!(
                "; the launch has {} workgroups, and the GPU holds {all} of them at a time ({each} on each of {} compute \
                 units): the others cannot begin before one of these ends",
                self.total,
                all / each
            );
        }
        finding.what += &self.running.verdict();
        let wave = &mut waves[wave];
        wave.pc = index;
        self.report(info.linear, info.id, wave, Problem::Finding(finding));
    }

    fn report(&self, linear: u64, group: [u32; 3], wave: &Wave, problem: Problem) {
        let program = &self.program;
        let site = self.site(Place { index: wave.pc, workgroup: group, wave: wave.index });
        let fault = match problem {
            Problem::Memory { space, access, address, bytes, lane } => {
                let near = (space == Space::Global).then(|| self.memory_near(access, address, bytes));
                let inside = space == Space::Lds && address + u64::from(bytes) <= self.lds_bytes as u64;
                let local = if inside { MemoryProblem::Misaligned } else { MemoryProblem::OutOfBounds };
                let problem = near.as_ref().map_or(local, |(problem, _)| *problem);
                let near = near.map(|(_, near)| near);
                Fault::Memory { site, problem, access, space, address, bytes, lane, near }
            }
            Problem::Unknown(error) => Fault::UnknownInstruction { site, error },
            Problem::NoSemantics { name, why } => Fault::NoSemantics { site, name, why },
            Problem::Illegal { name, why } => Fault::Illegal { site, name, why },
            Problem::Unsupported { what } => {
                Fault::NoSemantics { site, name: program.mnemonic(wave.pc), why: what }
            }
            Problem::Register { register, limit } => Fault::Register { site, register, limit },
            Problem::RegisterIndex { register, index } => {
                Fault::Register { site, register: format!("{register}{index}"), limit: 102 }
            }
            Problem::HardwareRegister { id } => {
                Fault::NoSemantics { site, name: format!("hardware register {id}"), why: "not emulated" }
            }
            Problem::WildJump { address } => Fault::WildJump { site, address },
            Problem::Trap { id } => Fault::Trap { site, id },
            Problem::Budget { limit } => Fault::Budget { site, limit },
            Problem::Finding(finding) => {
                let Finding { check, what, lane, address, other } = *finding;
                let near = address.filter(|(space, _)| *space == Space::Global);
                let near = near.map(|(_, address)| self.near(address).1);
                Fault::Sanitizer {
                    site,
                    check,
                    what,
                    lane,
                    address,
                    other: other.map(|o| self.site(o)),
                    near: near.map(Box::new),
                }
            }
        };
        let mut slot = self.fault.lock().unwrap_or_else(|e| e.into_inner());
        if slot.as_ref().is_none_or(|(at, _)| linear < *at) {
            *slot = Some((linear, fault));
            self.fault_at.fetch_min(linear, Relaxed);
        }
    }

    fn site(&self, place: Place) -> Box<Site> {
        let pc = self.program.address(place.index);
        Box::new(Site {
            kernel: self.kernel.name.clone(),
            pc,
            instruction: self.program.text(place.index),
            source: self.module.source_line(pc),
            workgroup: place.workgroup,
            wave: place.wave,
        })
    }

    /// What lies near an address, and on which device if that is another one.
    fn near(&self, address: u64) -> (Option<u32>, Near) {
        let own = self.module.memory();
        let other = if own.holds(address) { None } else { self.running.node.near(address) };
        other.map_or_else(|| (None, own.near(address)), |(device, near)| (Some(device), near))
    }

    /// What is wrong with an access to global memory, and what lies near it.
    fn memory_near(&self, access: Access, address: u64, bytes: u32) -> (MemoryProblem, Near) {
        let mut hint = u32::MAX;
        let problem = match self.memory.find(address, bytes.into(), &mut hint) {
            Some((allocation, _)) if !allocation.writable && access != Access::Read => {
                MemoryProblem::ReadOnly
            }
            Some(_) => MemoryProblem::Misaligned,
            None => MemoryProblem::OutOfBounds,
        };
        let (device, near) = self.near(address);
        let foreign = device.is_some_and(|device| !self.peers.contains(&device));
        let problem = match &near {
            Near::Allocation { freed: false, offset, size, .. }
                if foreign && *offset >= 0 && (*offset as u64) < *size =>
            {
                MemoryProblem::NoPeerAccess
            }
            Near::Allocation { freed: true, offset, size, .. }
                if problem == MemoryProblem::OutOfBounds && *offset >= 0 && (*offset as u64) < *size =>
            {
                MemoryProblem::UseAfterFree
            }
            _ => problem,
        };
        (problem, near)
    }
}

/// A workgroup in execution.
struct Group {
    info: GroupInfo,
    waves: Vec<Wave>,
    lds: Vec<u8>,
    observer: Option<Box<Observer>>,
    /// What it has executed; `None`: its thread's tally has that.
    tally: Option<Tally>,
    /// The first wave that waits, if all that can run do.
    circle: Option<(usize, Circle)>,
    /// Its last turn ended because its waves sleep.
    slept: bool,
}

impl Group {
    /// The wave that is named for it where all wait.
    fn wait(&self) -> Option<Wait> {
        let (wave, circle) = self.circle.as_ref()?;
        let address = circle.finding.address.filter(|(space, _)| *space == Space::Global);
        let address = address.map(|(_, address)| address);
        Some(Wait { workgroup: self.info.id, wave: *wave as u32, address })
    }
}

/// How a workgroup's time slice ended.
enum Outcome {
    Finished,
    Suspended,
    /// As `Suspended`; every wave that can run spins.
    Waiting,
    Faulted(usize, Problem),
}

/// When a workgroup may execute instructions that communicate.
trait Order {
    /// Returns when it may; false if the workgroup is abandoned.
    fn turn(&self) -> bool;
}

/// At any time.
struct Free;

impl Order for Free {
    #[inline(always)]
    fn turn(&self) -> bool {
        true
    }
}

/// At its turns.
struct InTurn<'s> {
    schedule: &'s Schedule<Group, (usize, Group, Problem)>,
    linear: u64,
    granted: Cell<bool>,
}

impl Order for InTurn<'_> {
    fn turn(&self) -> bool {
        self.granted.get() || {
            self.granted.set(self.schedule.turn(self.linear));
            self.granted.get()
        }
    }
}

/// Waits for the workgroup's turn before each instruction that communicates.
struct Ordered<'o, O, W> {
    order: &'o O,
    watch: W,
}

impl<O: Order, W: Watch> Watch for Ordered<'_, O, W> {
    const EACH: bool = W::EACH;

    #[inline(always)]
    fn before(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>> {
        if u.visible & TO_GROUPS != 0 && !self.order.turn() {
            // The state is not observed: an earlier workgroup has a fault, or all wait.
            return Err(Box::new(Finding::abandoned()));
        }
        self.watch.before(w, e, u)
    }

    #[inline(always)]
    fn after(&mut self, w: &Wave, e: &Env<'_>, u: &Uop, ctl: Ctl) -> Result<(), Box<Finding>> {
        self.watch.after(w, e, u, ctl)
    }
}

/// One host thread of a launch.
struct Worker<'l, 'a> {
    launch: &'l Launch<'a>,
    tally: Tally,
    /// Of workgroups that have ended, see [`Executed`].
    blocks: Vec<(u64, Counters)>,
    hints: Vec<u32>,
    /// Waves of workgroups that have ended, by workgroup: those of the next one stay where they are.
    spare_groups: Vec<Vec<Wave>>,
    spare_waves: Vec<Wave>,
    spare_lds: Vec<Vec<u8>>,
    /// The latest clock of a wave that has ended.
    latest: u64,
}

impl<'l, 'a> Worker<'l, 'a> {
    fn new(launch: &'l Launch<'a>) -> Worker<'l, 'a> {
        Worker {
            launch,
            tally: Tally::new(launch),
            blocks: vec![],
            hints: vec![0; launch.program.uops.len()],
            spare_groups: vec![],
            spare_waves: vec![],
            spare_lds: vec![],
            latest: 0,
        }
    }

    fn run(mut self) {
        let launch = self.launch;
        let mut suspended: VecDeque<Group> = VecDeque::new();
        let mut room = launch.room();
        let (waiting, node) = (&launch.waiting, launch.running.node);
        waiting.threads.fetch_add(1, SeqCst);
        // Consecutive workgroups that only wait, since which version, and the version that was published.
        let (mut circles, mut since, mut told) = (0, 0, u64::MAX);
        // Consecutive turns that ended in a sleep.
        let mut slept = 0;
        loop {
            // New workgroups go before suspended ones: those wait for something.
            let fresh = if suspended.len() < room { launch.claim() } else { None };
            let mut group = match fresh {
                Some(linear) => self.start(linear),
                None => match suspended.pop_front() {
                    Some(group) => group,
                    None => break,
                },
            };
            if group.info.linear > launch.fault_at.load(Relaxed) {
                continue;
            }
            let turn = launch.global.is_some().then(|| node.turn());
            let version = node.version();
            let mut outcome = Outcome::Suspended;
            if fresh.is_none() {
                outcome = self.advance(&mut group, true, &Free);
            }
            if matches!(outcome, Outcome::Suspended) {
                node.changed();
                outcome = self.advance(&mut group, false, &Free);
            }
            drop(turn);
            if !matches!(outcome, Outcome::Waiting) {
                node.changed();
            }
            slept = if group.slept { slept + 1 } else { 0 };
            match outcome {
                Outcome::Finished => {
                    self.retire(group);
                    launch.seated.fetch_sub(1, SeqCst);
                }
                Outcome::Suspended => {
                    suspended.push_back(group);
                    // All may wait for another device until a time of the clock: that one needs the host's core.
                    if launch.epoch.is_some() && slept >= suspended.len() {
                        std::thread::sleep(SLEEP);
                    }
                }
                Outcome::Faulted(wave, problem) => {
                    if let Some(wave) = group.waves.get(wave) {
                        launch.report(group.info.linear, group.info.id, wave, problem);
                    }
                }
                Outcome::Waiting => {
                    suspended.push_back(group);
                    circles = if since == version { circles + 1 } else { 1 };
                    since = version;
                    if circles < suspended.len() {
                        continue;
                    }
                    if launch.unclaimed() && launch.seated.load(SeqCst) < launch.seats[1] {
                        // They may wait for a workgroup that has not begun for lack of host memory.
                        room = room.saturating_mul(2);
                        continue;
                    }
                    let all = {
                        let mut stuck = waiting.stuck.lock().unwrap_or_else(|e| e.into_inner());
                        if stuck.0 != version {
                            *stuck = (version, 0);
                        }
                        stuck.1 += u64::from(told != version);
                        told = version;
                        stuck.1 >= waiting.threads.load(SeqCst)
                    };
                    let first = suspended.iter().min_by_key(|group| group.info.linear);
                    let wait = first.and_then(Group::wait);
                    if all && wait.is_some_and(|wait| launch.running.stuck(version, wait)) {
                        launch.deadlock(suspended);
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        waiting.threads.fetch_sub(1, SeqCst);
        self.close();
    }

    /// As [`run`](Self::run), with the turns of a schedule that the threads share.
    fn run_in_turn(mut self, schedule: &Schedule<Group, (usize, Group, Problem)>) {
        let launch = self.launch;
        while let Some(Task { linear, group }) = schedule.take() {
            let resumed = group.is_some();
            let mut group = group.unwrap_or_else(|| self.start(linear));
            let order = InTurn { schedule, linear, granted: Cell::new(false) };
            let version = launch.running.node.version();
            let mut outcome = Outcome::Suspended;
            if resumed {
                outcome = self.advance(&mut group, true, &order);
            }
            if matches!(outcome, Outcome::Suspended) {
                outcome = self.advance(&mut group, false, &order);
            }
            let wait = if matches!(outcome, Outcome::Waiting) { group.wait() } else { None };
            if wait.is_none() {
                launch.running.node.changed();
            }
            let turn = match outcome {
                Outcome::Finished => {
                    self.retire(group);
                    Turn::Finished
                }
                Outcome::Suspended => Turn::Suspended(group),
                Outcome::Waiting => Turn::Waiting(group),
                Outcome::Faulted(wave, problem) => Turn::Faulted((wave, group, problem)),
            };
            schedule.end(linear, turn);
            while let Some(next) =
                schedule.settle(|| wait.is_some_and(|wait| launch.running.stuck(version, wait)))
            {
                match next {
                    Next::Continue => {}
                    Next::Report(linear, (wave, group, problem)) => {
                        if let Some(wave) = group.waves.get(wave) {
                            launch.report(linear, group.info.id, wave, problem);
                        }
                    }
                    Next::Stuck => std::thread::sleep(Duration::from_millis(1)),
                    Next::Deadlock(groups) => {
                        launch.next.store(schedule.begun(), SeqCst);
                        launch.deadlock(groups);
                    }
                }
            }
        }
        self.close();
    }

    /// Adds what the thread has executed to the launch's sums.
    fn close(self) {
        let launch = self.launch;
        launch.clock.fetch_max(self.latest, SeqCst);
        launch.spare.give(self.spare_groups.into_iter().flatten().chain(self.spare_waves));
        let mut sum = launch.executed.lock().unwrap_or_else(|e| e.into_inner());
        sum.tally.add(self.tally);
        sum.blocks.extend(self.blocks);
    }

    fn start(&mut self, linear: u64) -> Group {
        let launch = self.launch;
        let [gx, gy] = [u64::from(launch.grid[0]), u64::from(launch.grid[1])];
        let id = [(linear % gx) as u32, (linear / gx % gy) as u32, (linear / gx / gy) as u32];
        let granules = launch.kernel.descriptor.allocated_vgprs.div_ceil(8).saturating_sub(1);
        let info = GroupInfo { id, linear, gpr_alloc: granules << 8, epoch: launch.epoch, pace: launch.pace };
        let mut lds = self.spare_lds.pop().unwrap_or_default();
        lds.clear();
        let poison = POISON.to_le_bytes();
        lds.resize(launch.lds_bytes, 0);
        for chunk in lds.chunks_mut(4) {
            chunk.copy_from_slice(&poison[..chunk.len()]);
        }
        let mut waves = self
            .spare_groups
            .pop()
            .unwrap_or_else(|| (0..launch.waves).map(|_| launch.spare.take()).collect());
        for (wave, index) in waves.iter_mut().zip(0..) {
            launch.initialise(wave, index, id, &Undefined::POISON);
        }
        let mut tally = launch.blocks.then(|| Tally::new(launch));
        let counters = &mut tally.as_mut().unwrap_or(&mut self.tally).counters;
        counters.workgroups += 1;
        counters.waves += u64::from(launch.waves);
        let observer = (launch.details || !launch.checks.is_empty()).then(|| {
            let shadows = if launch.checks.has(Check::Uninit) { launch.waves } else { 0 };
            let shadows = (0..shadows).map(|index| {
                let mut shadow = self.spare_waves.pop().unwrap_or_else(|| launch.spare.take());
                launch.initialise(&mut shadow, index, id, &Undefined::SHADOW);
                shadow
            });
            Box::new(Observer::new(Subject {
                checks: launch.checks,
                program: &launch.program,
                group: &info,
                waves: launch.waves as usize,
                lds: launch.lds_bytes,
                shadows: shadows.collect(),
                global: launch.global.as_ref(),
                touched: launch.touched.as_ref(),
            }))
        });
        Group { info, waves, lds, observer, tally, circle: None, slept: false }
    }

    fn retire(&mut self, group: Group) {
        self.latest = group.waves.iter().map(|w| w.clock).fold(self.latest, u64::max);
        self.spare_groups.push(group.waves);
        self.spare_waves.extend(group.observer.into_iter().flat_map(|observer| observer.into_waves()));
        self.spare_lds.push(group.lds);
        if let Some(tally) = group.tally {
            self.blocks.push((group.info.linear, tally.total(&self.launch.program)));
            self.tally.add(tally);
        }
    }

    /// Runs the waves of a workgroup about in step until all have ended or its time slice is used up; or, to `probe` it, each
    /// wave for a short while, until one does not spin.
    fn advance<O: Order>(&mut self, group: &mut Group, probe: bool, order: &O) -> Outcome {
        let launch = self.launch;
        let program = &*launch.program;
        let tally = group.tally.as_mut().unwrap_or(&mut self.tally);
        let mut env = Env {
            program,
            memory: &launch.memory,
            lds: &mut group.lds,
            group: &group.info,
            interrupt: launch.interrupt,
            rises: &mut tally.rises,
            hints: &mut self.hints,
            read_bytes: 0,
            written_bytes: 0,
            problem: None,
        };
        if let Some(observer) = &mut group.observer {
            observer.counts = tally.counts.take();
        }
        let (mut used, mut sleeps) = (0, 0);
        (group.circle, group.slept) = (None, false);
        let outcome = 'run: loop {
            let Some((next, clock)) = next_turn(&group.waves, launch.skew) else {
                if let Some(observer) = &mut group.observer
                    && let Err((wave, finding)) = observer.barrier(&group.waves)
                {
                    // The barrier, not what follows it.
                    group.waves[wave].pc -= 1;
                    break Outcome::Faulted(wave, Problem::Finding(finding));
                }
                // Ended waves count as arrived.
                let waiting = group.waves.iter_mut().filter(|w| w.status == Status::AtBarrier);
                let waiting: Vec<_> = waiting.collect();
                let Some(last) = waiting.iter().map(|w| w.clock).max() else { break Outcome::Finished };
                for wave in waiting {
                    (wave.status, wave.clock) = (Status::Ready, last);
                }
                continue;
            };
            if probe {
                let until = Until { budget: launch.budget, instructions: CIRCLE, clock: u64::MAX };
                let ready = group.waves.iter_mut().enumerate().filter(|(_, w)| w.status == Status::Ready);
                for (i, wave) in ready {
                    let watch = Probe::new(group.observer.as_deref_mut());
                    let mut probe = Ordered { order, watch };
                    let mut ctl = run_wave(wave, &mut env, &mut probe, until);
                    for _ in 0..CIRCLE_SLEEPS {
                        if ctl == Ctl::Sleep && probe.watch.open() {
                            ctl = run_wave(wave, &mut env, &mut probe, until);
                        }
                    }
                    let Some(circle) = probe.watch.into_circle() else {
                        let stopped = stop(wave, ctl, &mut env);
                        break 'run stopped
                            .map_or(Outcome::Suspended, |problem| Outcome::Faulted(i, problem));
                    };
                    env.problem = None;
                    group.circle.get_or_insert((i, circle));
                }
                break Outcome::Waiting;
            }
            let wave = &mut group.waves[next];
            let before = wave.executed;
            let until = Until { budget: launch.budget, instructions: UNSEEN, clock };
            let ctl = match &mut group.observer {
                None => run_wave(wave, &mut env, &mut Ordered { order, watch: Unwatched }, until),
                Some(observer) => {
                    run_wave(wave, &mut env, &mut Ordered { order, watch: &mut **observer }, until)
                }
            };
            used += wave.executed - before;
            if let Some(problem) = stop(wave, ctl, &mut env) {
                break Outcome::Faulted(next, problem);
            }
            sleeps = if ctl == Ctl::Sleep { sleeps + 1 } else { 0 };
            if used > SLICE || sleeps > SLEEPS * group.waves.len() {
                group.slept = used <= SLICE;
                break Outcome::Suspended;
            }
        };
        if let Some(observer) = &mut group.observer {
            tally.counts = observer.counts.take();
        }
        tally.counters.global_read_bytes += env.read_bytes;
        tally.counters.global_written_bytes += env.written_bytes;
        outcome
    }
}

/// Coordinates of 64 threads of a workgroup, from a thread on: ten bits each.
fn thread_ids([width, height, _]: [u32; 3], first: u32) -> Lanes {
    let mut packed = Lanes::ZERO;
    let (mut x, row) = (first % width, first / width);
    let (mut y, mut z) = (row % height, row / height);
    for lane in 0..64 {
        packed.set(lane, x | y << 10 | z << 20);
        x += 1;
        if x == width {
            (x, y) = (0, y + 1);
        }
        if y == height {
            (y, z) = (0, z + 1);
        }
    }
    packed
}

/// How far a wave may run.
#[derive(Clone, Copy)]
struct Until {
    /// Instructions since it began: more are a fault.
    budget: u64,
    /// Instructions of this turn.
    instructions: u64,
    /// Beyond this clock, no instruction that other waves may see.
    clock: u64,
}

/// The wave that is the furthest behind, and the clock at which it is `skew` ahead of the next one; `None` if all wait or
/// have ended.
fn next_turn(waves: &[Wave], skew: u64) -> Option<(usize, u64)> {
    let (mut first, mut at, mut second) = (None, u64::MAX, u64::MAX);
    for (i, wave) in waves.iter().enumerate().filter(|(_, w)| w.status == Status::Ready) {
        if first.is_none() || wave.clock < at {
            (first, second, at) = (Some(i), at, wave.clock);
        } else {
            second = second.min(wave.clock);
        }
    }
    Some((first?, second.saturating_add(skew)))
}

/// Takes note of why a wave has stopped; the problem of a fault.
fn stop(wave: &mut Wave, ctl: Ctl, env: &mut Env<'_>) -> Option<Problem> {
    match ctl {
        Ctl::Barrier => wave.status = Status::AtBarrier,
        Ctl::End => wave.status = Status::Ended,
        Ctl::Sleep | Ctl::Next | Ctl::Jump | Ctl::Mode => {}
        Ctl::Fault => return Some(env.problem.take().map_or(Problem::Trap { id: 0 }, |p| *p)),
    }
    None
}

/// Runs a wave until it stops for a reason or its turn is over (`Next`).
fn run_wave<W: Watch>(w: &mut Wave, e: &mut Env<'_>, watch: &mut W, until: Until) -> Ctl {
    let until = Until { instructions: until.budget.min(w.executed + until.instructions), ..until };
    loop {
        let ctl = if w.mode & mode::ALTERED == 0 {
            run_mode::<W, false>(w, e, watch, until)
        } else {
            run_mode::<W, true>(w, e, watch, until)
        };
        if ctl != Ctl::Mode {
            return ctl;
        }
    }
}

/// The same until the mode changes. `ALTERED`: instructions are skipped or their registers indexed.
///
/// Not inlined: the loop over instructions keeps its state in registers, whatever surrounds the call.
#[inline(never)]
fn run_mode<W: Watch, const ALTERED: bool>(
    w: &mut Wave,
    e: &mut Env<'_>,
    watch: &mut W,
    until: Until,
) -> Ctl {
    let program = e.program;
    loop {
        let first = w.pc as usize;
        let Some(head) = program.uops.get(first) else {
            return e.fault(Problem::WildJump { address: u64::from(w.pc) });
        };
        if head.visible != 0 && w.clock > until.clock {
            return Ctl::Next;
        }
        let skipped = ALTERED && indexed::skips(w, e, head);
        if !skipped && let Err(finding) = watch.before(w, e, head) {
            return e.fault(Problem::Finding(finding));
        }
        // A run of instructions that nothing has to look at one by one. Until it ends or jumps, w.pc is that of its first one.
        let end = if ALTERED || W::EACH { first + 1 } else { program.run_ends[first] as usize };
        let (mut ctl, mut last) = (Ctl::Next, head);
        for u in &program.uops[first..end] {
            last = u;
            w.executed += 1;
            w.clock += u64::from(u.clocks);
            ctl = match ALTERED {
                _ if skipped => Ctl::Next,
                true => indexed::run(w, e, u),
                // SAFETY: handlers come from the tables of the program's level, which the host was checked to have.
                false => unsafe { (u.run)(w, e, u) },
            };
            if ctl != Ctl::Next {
                break;
            }
        }
        let next = last.index + 1;
        if !skipped {
            e.rises[first] += 1;
            e.rises[next as usize] -= 1;
        }
        if ctl != Ctl::Fault
            && !skipped
            && let Err(finding) = watch.after(w, e, last, ctl)
        {
            w.pc = last.index;
            return e.fault(Problem::Finding(finding));
        }
        match ctl {
            Ctl::Next => w.pc = next,
            // What runs for long jumps.
            Ctl::Jump if w.executed >= until.instructions => {
                let spent = w.executed >= until.budget;
                return if spent { e.fault(Problem::Budget { limit: until.budget }) } else { Ctl::Next };
            }
            Ctl::Jump => {}
            Ctl::Fault => {
                w.pc = last.index;
                return Ctl::Fault;
            }
            stop => {
                if w.executed > until.budget {
                    w.pc = last.index;
                    return e.fault(Problem::Budget { limit: until.budget });
                }
                w.pc = next;
                return stop;
            }
        }
    }
}

impl Launch<'_> {
    /// The state in which the hardware starts a wave, with `undefined` in what it leaves undefined.
    fn initialise(&self, w: &mut Wave, index: u32, id: [u32; 3], undefined: &Undefined) {
        let d = &self.kernel.descriptor;
        for slot in self.program.registers.slots() {
            *w.v_mut(slot) = undefined.vector;
        }
        self.program.place_constants(w);
        w.s = [undefined.scalar; 128];
        w.scc = undefined.scc;
        w.index = index;
        w.executed = 0;
        w.clock = self.start;
        w.poll = Poll::NONE;
        w.status = Status::Ready;
        w.pc = self.program.entry();
        let threads = self.block.iter().product::<u32>();
        let alive = (threads - 64 * index).min(64);
        w.set_exec(if alive == 64 { !0 } else { (1 << alive) - 1 });
        *w.v_mut(0) = self.thread_ids[index as usize];
        let mut s = 0;
        let mut push = |value: u32| {
            w.s[s & 127] = value;
            s += 1;
        };
        for value in &self.user_sgprs {
            push(*value);
        }
        for (enabled, value) in d.workgroup_id.iter().zip(id) {
            if *enabled {
                push(value);
            }
        }
        if d.workgroup_info {
            push(0);
        }
        let mode = u32::from(d.round_f32)
            | u32::from(d.round_f16_f64) << 2
            | u32::from(d.denorm_f32) << 4
            | u32::from(d.denorm_f16_f64) << 6
            | u32::from(d.dx10_clamp) << 8
            | u32::from(d.ieee) << 9
            | u32::from(d.fp16_ovfl) << 23;
        w.set_mode(mode);
        w.scratch.clear();
        if self.scratch_stride != 0 {
            w.scratch.resize(Wave::scratch_bytes(self.scratch_stride), undefined.byte);
        }
        w.scratch_stride = self.scratch_stride;
    }
}
