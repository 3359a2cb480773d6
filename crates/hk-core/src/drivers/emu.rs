//! The emulator as a device: a worker thread per stream executes its queue in order.

mod clock;

use crate::device::DeviceInfo;
use crate::driver::{Dependency, Dispatch, Driver, Handle};
use crate::error::{Error, Result};
use crate::shared::RAW_BYTES;
use hk_codeobj::Arch;
use hk_emu::Counters;
use hk_emu::{
    BlockOrder, Checks, Fault, Machine, MachineOptions, Mark, MatrixNumerics, MemoryHandle, Module, Node,
    Profile, UnknownCheck, UnknownNumerics, UnknownOrder,
};
use std::alloc::Layout;
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::ptr::NonNull;
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The environment variable with the checks of devices whose string names none.
const HK_SANITIZE: &str = "HK_SANITIZE";
/// The environment variable with the matrix numerics of devices whose string names none.
const HK_MFMA: &str = "HK_MFMA";
/// The environment variable with the order of workgroups of devices whose string names none.
const HK_BLOCK_ORDER: &str = "HK_BLOCK_ORDER";

/// Time after which launches of devices with numbers that only wait are a deadlock: the host may be slow to start the others.
const PATIENCE_OF_NODE: Duration = Duration::from_secs(10);

/// Alignment of allocations, that of the HIP runtime.
const ALIGN: u64 = 256;

pub(super) struct Emu {
    machine: Machine,
    info: DeviceInfo,
    /// Pause before each command.
    delay: Duration,
    /// Profile launches.
    details: bool,
    clock: Option<clock::Model>,
}

impl Emu {
    /// Opens `emu:` + `rest`, where `rest` is a target and its options.
    pub fn open(spec: &str, rest: &str) -> Result<Self> {
        let (target, options) = rest.split_once('?').unwrap_or((rest, ""));
        let wrong = |want: &str| Error::argument(super::OP, "spec", format!("`{spec}`"), want);
        let (target, number) = match target.split_once(':') {
            Some((target, digits)) => (target, Some(super::number(spec, digits)?)),
            None => (target, None),
        };
        let arch: Arch =
            target.parse().ok().filter(|a: &Arch| a.is_amd()).ok_or_else(|| wrong(super::WANT))?;

        let mut machine = MachineOptions::default().arch(arch);
        let (mut delay, mut details) = (Duration::ZERO, false);
        let mut checks = None;
        let mut numerics = None;
        let mut order = None;
        let mut compute_units = arch.compute_units();
        let mut host = None;
        let mut patience = number.map(|_| PATIENCE_OF_NODE);
        let (mut part, mut sampled) = (None, false);
        for option in options.split('&').filter(|o| !o.is_empty()) {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            match key {
                "threads" => {
                    let n = parse(value).filter(|&n| n > 0);
                    machine = machine.threads(Some(n.ok_or_else(|| wrong("threads=N with N > 0"))?));
                }
                "cus" => {
                    let n = parse(value).filter(|&n| n > 0);
                    compute_units = n.ok_or_else(|| wrong("cus=N with N > 0"))?;
                }
                "budget" => {
                    let n = parse(value).ok_or_else(|| wrong("budget=N"))?;
                    machine = machine.instruction_budget(Some(n));
                }
                "details" => {
                    details = parse(value).ok_or_else(|| wrong("details=true or =false"))?;
                }
                "blocks" => {
                    machine = machine.blocks(parse(value).ok_or_else(|| wrong("blocks=true or =false"))?);
                }
                "time" => part = Some(value),
                "sampled" => {
                    sampled = parse(value).ok_or_else(|| wrong("sampled=true or =false"))?;
                }
                "misaligned" => {
                    let on = parse(value).ok_or_else(|| wrong("misaligned=true or =false"))?;
                    machine = machine.allow_misaligned(on);
                }
                "skew" => {
                    let clocks = parse(value).ok_or_else(|| wrong("skew=N"))?;
                    machine = machine.skew(Some(clocks));
                }
                "mfma" => {
                    let named = value.parse().map_err(|_| wrong("mfma=fma or =cdna3-exact"))?;
                    numerics = Some(named);
                }
                "order" => {
                    let named = value.parse().map_err(|_| wrong("order=reproducible or =arrival"))?;
                    order = Some(named);
                }
                "node" => host = Some(value),
                "patience_ms" => {
                    let ms = parse(value).ok_or_else(|| wrong("patience_ms=N"))?;
                    patience = Some(Duration::from_millis(ms));
                }
                "delay_ms" => {
                    delay = Duration::from_millis(parse(value).ok_or_else(|| wrong("delay_ms=N"))?);
                }
                "mutant" => {
                    let mutant = parse(value).ok_or_else(|| wrong("mutant=KERNEL@0xADDRESS:CHANGE"))?;
                    machine = machine.mutant(Some(mutant));
                }
                "sanitize" => {
                    // A plus as well, for lists of devices with commas between them.
                    let names: Result<Checks, UnknownCheck> = value.replace('+', ",").parse();
                    checks = Some(names.map_err(|e| wrong(&format!("sanitize=NAMES: {e}")))?);
                }
                _ => {
                    return Err(wrong(
                        "the options threads, cus, budget, details, blocks, time, sampled, misaligned, skew, sanitize, mfma, order, mutant, \
                         node, patience_ms, delay_ms",
                    ));
                }
            }
        }
        if let Some(number) = number {
            let most = format!("a number below {}", Node::MAX_DEVICES);
            machine =
                machine.node(&node(arch, host.unwrap_or_default()), number).ok_or_else(|| wrong(&most))?;
        } else if host.is_some() {
            return Err(wrong("node=NAME of a device with a number, as emu:gfx942:0"));
        }
        if let Some(time) = patience {
            machine = machine.patience(time);
        }
        let clock = match part {
            Some(part) => Some(clock::Model::new(part, arch, sampled).map_err(|want| wrong(&want))?),
            None if sampled => return Err(wrong("sampled=true with time=PART")),
            None => None,
        };
        let checks = checks.map_or_else(checks_of_environment, Ok)?;
        let numerics = numerics.map_or_else(numerics_of_environment, Ok)?;
        let order = order.map_or_else(order_of_environment, Ok)?;
        let machine = machine.sanitize(checks).matrix_numerics(numerics).block_order(order);
        let info = DeviceInfo {
            spec: spec.into(),
            name: format!("hk-emu, {arch}, mfma {numerics}"),
            arch,
            compute_units,
            wave_size: arch.wave_size(),
            lds_per_workgroup: arch.lds_bytes(),
            max_threads_per_workgroup: arch.max_workgroup_threads(),
            max_grid: [i32::MAX as u32, u16::MAX.into(), u16::MAX.into()],
            total_memory_bytes: if arch == Arch::Gfx950 { 288 << 30 } else { 192 << 30 },
            driver: "emu",
        };
        Ok(Self { machine: Machine::new(machine), info, delay, details, clock })
    }

    fn error(&self, report: impl Display) -> Error {
        Error::Emulator { device: self.info.spec.clone(), report: report.to_string(), fault: None }
    }
}

/// The emulated host of that name whose GPUs are of one target.
fn node(arch: Arch, name: &str) -> Node {
    static NODES: Mutex<BTreeMap<(&str, String), Node>> = Mutex::new(BTreeMap::new());
    lock(&NODES).entry((arch.name(), name.to_owned())).or_default().clone()
}

/// The checks that `HK_SANITIZE` names; none without it.
fn checks_of_environment() -> Result<Checks> {
    let Some(value) = std::env::var_os(HK_SANITIZE) else { return Ok(Checks::NONE) };
    let value = value.to_string_lossy();
    value.parse().map_err(|_: UnknownCheck| {
        let want = format!("all, none, or some of {}, with commas between", Checks::all());
        Error::argument(super::OP, HK_SANITIZE, format!("`{value}`"), want)
    })
}

/// The matrix numerics that `HK_MFMA` names; the default without it.
fn numerics_of_environment() -> Result<MatrixNumerics> {
    let value = std::env::var_os(HK_MFMA).unwrap_or_default();
    let value = value.to_string_lossy();
    if value.is_empty() {
        return Ok(MatrixNumerics::default());
    }
    value.parse().map_err(|_: UnknownNumerics| {
        Error::argument(super::OP, HK_MFMA, format!("`{value}`"), "fma or cdna3-exact")
    })
}

/// The order of workgroups that `HK_BLOCK_ORDER` names; the default without it.
fn order_of_environment() -> Result<BlockOrder> {
    let value = std::env::var_os(HK_BLOCK_ORDER).unwrap_or_default();
    let value = value.to_string_lossy();
    if value.is_empty() {
        return Ok(BlockOrder::default());
    }
    value.parse().map_err(|wrong: UnknownOrder| {
        Error::argument(super::OP, HK_BLOCK_ORDER, format!("`{value}`"), wrong.to_string())
    })
}

fn parse<T: FromStr>(value: &str) -> Option<T> {
    value.parse().ok()
}

struct EmuStream {
    shared: Arc<Shared>,
    /// The device, in order with this stream's work.
    machine: Machine,
    /// The commands captured so far, during a capture.
    captured: Mutex<Option<Vec<Command>>>,
}

/// What a stream shares with its worker.
struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when work comes or the stream is closed.
    work: Condvar,
    /// Signalled when the worker has nothing to do.
    idle: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Each with what the host had waited for when it queued the command.
    commands: VecDeque<(Command, Mark)>,
    /// The worker executes a command that it has taken off the queue.
    busy: bool,
    closed: bool,
    /// The first failure since the last report.
    fault: Option<Error>,
    counters: Counters,
    /// By kernel, in the order of their first launches.
    profiles: Vec<Profile>,
    #[cfg(feature = "time")]
    launches: Vec<crate::Modelled>,
}

#[derive(Clone)]
enum Command {
    Write {
        dst: u64,
        data: Vec<u8>,
    },
    Copy {
        dst: u64,
        src: u64,
        bytes: u64,
    },
    Fill {
        dst: u64,
        pattern: [u8; 8],
        pattern_bytes: usize,
        bytes: u64,
    },
    Launch {
        op: &'static str,
        function: Function,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic_lds: u32,
        args: Vec<u8>,
    },
    Host(Arc<crate::HostWork>),
    Free {
        addr: u64,
    },
    Record(Arc<EmuEvent>),
    Wait(Arc<EmuEvent>, Dependency),
}

#[derive(Default)]
struct EmuEvent {
    done: Mutex<Option<Done>>,
    signal: Condvar,
}

#[derive(Clone)]
struct Done {
    at: Instant,
    /// Where time is modelled.
    modelled: Option<clock::Time>,
    /// The work before the event.
    mark: Mark,
    /// The unreported failure of the stream up to here.
    fault: Option<Error>,
}

#[derive(Clone)]
struct Function {
    module: Arc<Module>,
    name: Arc<str>,
}

/// What the worker needs besides the queue.
struct Worker {
    shared: Arc<Shared>,
    machine: Machine,
    spec: String,
    delay: Duration,
    details: bool,
    clock: Option<clock::Clock>,
}

/// What a command executed.
#[derive(Default)]
struct Executed {
    counters: Counters,
    profile: Option<Profile>,
    #[cfg(feature = "time")]
    launch: Option<crate::Modelled>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EmuStream {
    fn push(&self, command: Command) {
        if let Some(captured) = &mut *lock(&self.captured) {
            captured.push(command);
            return;
        }
        self.queue(command);
    }

    fn queue(&self, command: Command) {
        lock(&self.shared.queue).commands.push_back((command, self.machine.host().mark()));
        self.shared.work.notify_one();
    }

    /// Waits for all commands.
    fn drained(&self) -> MutexGuard<'_, Queue> {
        let queue = lock(&self.shared.queue);
        let busy = |q: &mut Queue| q.busy || !q.commands.is_empty();
        self.shared.idle.wait_while(queue, busy).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all commands and takes the failure.
    fn finish(&self) -> Result<MutexGuard<'_, Queue>> {
        let mut queue = self.drained();
        self.machine.host().wait(&self.machine.mark());
        match queue.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(queue),
        }
    }
}

impl Queue {
    fn add(&mut self, executed: Executed) {
        self.counters += executed.counters;
        #[cfg(feature = "time")]
        self.launches.extend(executed.launch);
        let Some(profile) = executed.profile else { return };
        match self.profiles.iter_mut().find(|p| p.kernel == profile.kernel) {
            Some(sum) => *sum += profile,
            None => self.profiles.push(profile),
        }
    }
}

impl Drop for EmuStream {
    /// The worker completes what is queued and ends.
    fn drop(&mut self) {
        lock(&self.shared.queue).closed = true;
        self.shared.work.notify_one();
    }
}

impl EmuEvent {
    fn complete(&self, mark: Mark, fault: Option<Error>, modelled: Option<clock::Time>) {
        *lock(&self.done) = Some(Done { at: Instant::now(), modelled, mark, fault });
        self.signal.notify_all();
    }

    fn wait(&self) -> Done {
        let mut done = lock(&self.done);
        loop {
            match &*done {
                Some(done) => return done.clone(),
                None => done = self.signal.wait(done).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Worker {
    fn run(mut self) {
        while let Some((command, failed)) = self.next() {
            if !self.delay.is_zero() {
                std::thread::sleep(self.delay);
            }
            let outcome = self.execute(command, failed);
            let mut queue = lock(&self.shared.queue);
            match outcome {
                Ok(executed) => queue.add(executed),
                Err(fault) => queue.fault = queue.fault.take().or(Some(fault)),
            }
            queue.busy = false;
            if queue.commands.is_empty() {
                self.shared.idle.notify_all();
            }
        }
    }

    /// The next command and the failure before it, or `None` at the end.
    fn next(&self) -> Option<(Command, Option<Error>)> {
        let mut queue = lock(&self.shared.queue);
        loop {
            if let Some((command, mark)) = queue.commands.pop_front() {
                queue.busy = true;
                self.machine.wait(&mark);
                return Some((command, queue.fault.clone()));
            }
            if queue.closed {
                return None;
            }
            queue = self.shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn execute(&mut self, command: Command, failed: Option<Error>) -> Result<Executed> {
        let (spec, details) = (&self.spec, self.details);
        let failure = |report: String, fault: Option<Fault>| Error::Emulator {
            device: spec.clone(),
            report,
            fault: fault.map(Box::new),
        };
        let error = |report: &dyn Display| failure(report.to_string(), None);
        match command {
            // Ordering and lifetime hold after failures, too.
            Command::Free { addr } => self.machine.free(addr).map_err(|e| error(&e))?,
            Command::Record(event) => {
                let modelled = self.clock.as_ref().map(clock::Clock::now);
                event.complete(self.machine.mark(), failed, modelled);
            }
            Command::Wait(event, why) => {
                let done = event.wait();
                self.machine.wait(&done.mark);
                if let (Some(clock), Some(at)) = (&mut self.clock, &done.modelled) {
                    clock.wait(at);
                }
                if let (Some(fault), Dependency::Data) = (done.fault, why) {
                    return Err(fault);
                }
            }
            // After a failure kernels and copies are skipped.
            _ if failed.is_some() => {}
            Command::Write { dst, data } => self.machine.write(dst, &data).map_err(|e| error(&e))?,
            Command::Copy { dst, src, bytes } => {
                self.machine.copy(dst, src, bytes).map_err(|e| error(&e))?;
                if let Some(clock) = &mut self.clock {
                    clock.moved(2 * bytes);
                }
            }
            Command::Fill { dst, pattern, pattern_bytes, bytes } => {
                self.machine.fill(dst, &pattern[..pattern_bytes], bytes).map_err(|e| error(&e))?;
                if let Some(clock) = &mut self.clock {
                    clock.moved(bytes);
                }
            }
            Command::Host(work) => work(&Reach { machine: &self.machine, error: &error })?,
            Command::Launch { op, function, grid, block, dynamic_lds, args } => {
                let dispatch = hk_emu::Dispatch { grid, block, dynamic_lds, args: &args };
                let (module, name) = (&function.module, &function.name);
                let mut executed = Executed::default();
                if let Some(clock) = &mut self.clock {
                    clock.launch(&self.machine, module, name, &dispatch, details, &mut executed);
                }
                let profiled = details && self.clock.is_none();
                let launched = if self.clock.as_ref().is_some_and(clock::Clock::sampled) {
                    Ok(())
                } else if profiled {
                    let profile = self.machine.profile(module, name, &dispatch);
                    profile.map(|p| (executed.counters, executed.profile) = (p.counters, Some(p)))
                } else {
                    let counters = self.machine.launch(module, name, &dispatch);
                    counters.map(|counters| executed.counters = counters)
                };
                launched.map_err(|fault| failure(format!("{op}: {fault}"), Some(fault)))?;
                return Ok(executed);
            }
        }
        Ok(Executed::default())
    }
}

/// What work of the host accesses.
struct Reach<'a> {
    machine: &'a Machine,
    error: &'a dyn Fn(&dyn Display) -> Error,
}

impl crate::HostAccess for Reach<'_> {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<()> {
        self.machine.read(addr, out).map_err(|e| (self.error)(&e))
    }

    fn write(&self, addr: u64, data: &[u8]) -> Result<()> {
        self.machine.write(addr, data).map_err(|e| (self.error)(&e))
    }
}

/// Host memory for copies.
fn host_layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, 64).ok()
}

impl Driver for Emu {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn can_access_peer(&self, peer: &dyn Driver) -> Result<std::result::Result<(), String>> {
        let peer = (peer as &dyn Any).downcast_ref::<Emu>();
        Ok(match peer.map(|peer| self.machine.can_access_peer(&peer.machine)) {
            Some(Ok(())) => Ok(()),
            Some(Err(why)) => Err(format!("{why}; emulated peers are opened as {}:N", self.info.spec)),
            None => Err("they are devices of two drivers".into()),
        })
    }

    fn enable_peer_access(&self, peer: &dyn Driver) -> Result<()> {
        let peer = (peer as &dyn Any).downcast_ref::<Emu>();
        match peer.map(|peer| self.machine.enable_peer(&peer.machine)) {
            Some(Err(why)) => Err(self.error(why)),
            _ => Ok(()),
        }
    }

    fn create_stream(&self) -> Result<Handle> {
        let machine = self.machine.stream();
        let shared = Arc::new(Shared { queue: Mutex::default(), work: Condvar::new(), idle: Condvar::new() });
        let worker = Worker {
            shared: Arc::clone(&shared),
            machine: machine.clone(),
            spec: self.info.spec.clone(),
            delay: self.delay,
            details: self.details,
            clock: self.clock.map(clock::Clock::new),
        };
        std::thread::Builder::new()
            .name("hk-emu stream".into())
            .spawn(|| worker.run())
            .map_err(|e| self.error(format_args!("no thread for a stream: {e}")))?;
        Ok(Handle::new(EmuStream { shared, machine, captured: Mutex::default() }))
    }

    fn synchronize(&self, stream: &Handle) -> Result<()> {
        stream.get::<EmuStream>().finish().map(drop)
    }

    fn malloc(&self, _: &Handle, bytes: u64, label: &dyn Display) -> Result<u64> {
        self.machine.alloc(bytes, ALIGN, &label.to_string()).map_err(|e| self.error(e))
    }

    fn malloc_shared(&self, _: &Handle, bytes: u64, label: &dyn Display) -> Result<u64> {
        let label = label.to_string();
        // What other processes can open is for Linux.
        let shared = self.machine.alloc_shared(bytes, ALIGN, &label);
        shared.or_else(|_| self.machine.alloc_zeroed(bytes, ALIGN, &label)).map_err(|e| self.error(e))
    }

    fn export(&self, addr: u64) -> Result<[u8; RAW_BYTES]> {
        self.machine.export(addr).map(MemoryHandle::to_bytes).map_err(|e| self.error(e))
    }

    fn import(&self, handle: &[u8; RAW_BYTES]) -> Result<u64> {
        self.machine.import(MemoryHandle::from_bytes(*handle)).map_err(|e| self.error(e))
    }

    fn free(&self, stream: &Handle, addr: u64) {
        stream.get::<EmuStream>().push(Command::Free { addr });
    }

    fn malloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        let layout =
            host_layout(bytes).ok_or_else(|| self.error(format_args!("{bytes} bytes of host memory")))?;
        // SAFETY: there is at least one byte.
        let host = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) });
        host.ok_or_else(|| self.error(format_args!("not enough memory for {bytes} bytes on the host")))
    }

    unsafe fn free_host(&self, host: NonNull<u8>, bytes: usize) {
        if let Some(layout) = host_layout(bytes) {
            // SAFETY: `malloc_host` gave it for this layout.
            unsafe { std::alloc::dealloc(host.as_ptr(), layout) };
        }
    }

    unsafe fn write_async(&self, stream: &Handle, dst: u64, src: NonNull<u8>, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        self.write(stream, dst, unsafe { std::slice::from_raw_parts(src.as_ptr(), bytes) })
    }

    unsafe fn read_async(&self, stream: &Handle, src: u64, dst: NonNull<u8>, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise; `malloc_host` has initialised the bytes.
        self.read(stream, src, unsafe { std::slice::from_raw_parts_mut(dst.as_ptr(), bytes) })
    }

    fn write(&self, stream: &Handle, dst: u64, src: &[u8]) -> Result<()> {
        stream.get::<EmuStream>().push(Command::Write { dst, data: src.to_vec() });
        Ok(())
    }

    fn read(&self, stream: &Handle, src: u64, dst: &mut [u8]) -> Result<()> {
        let stream = stream.get::<EmuStream>();
        drop(stream.finish()?);
        stream.machine.wait(&self.machine.mark());
        stream.machine.read(src, dst).map_err(|e| self.error(e))?;
        self.machine.wait(&stream.machine.mark());
        Ok(())
    }

    fn copy(&self, stream: &Handle, dst: u64, src: u64, bytes: u64) -> Result<()> {
        stream.get::<EmuStream>().push(Command::Copy { dst, src, bytes });
        Ok(())
    }

    fn fill(&self, stream: &Handle, dst: u64, pattern: &[u8], count: u64) -> Result<()> {
        let pattern_bytes = pattern.len();
        let mut padded = [0; 8];
        padded[..pattern_bytes].copy_from_slice(pattern);
        let bytes = count * pattern_bytes as u64;
        stream.get::<EmuStream>().push(Command::Fill { dst, pattern: padded, pattern_bytes, bytes });
        Ok(())
    }

    fn record(&self, stream: &Handle) -> Result<Handle> {
        let event = Arc::new(EmuEvent::default());
        stream.get::<EmuStream>().push(Command::Record(Arc::clone(&event)));
        Ok(Handle::new(event))
    }

    fn wait(&self, stream: &Handle, event: &Handle, why: Dependency) -> Result<()> {
        let event = Arc::clone(event.get::<Arc<EmuEvent>>());
        stream.get::<EmuStream>().push(Command::Wait(event, why));
        Ok(())
    }

    fn query(&self, event: &Handle) -> Result<bool> {
        let done = lock(&event.get::<Arc<EmuEvent>>().done).clone();
        if let Some(done) = &done {
            self.machine.wait(&done.mark);
        }
        Ok(done.is_some())
    }

    fn synchronize_event(&self, event: &Handle) -> Result<()> {
        let done = event.get::<Arc<EmuEvent>>().wait();
        self.machine.wait(&done.mark);
        done.fault.map_or(Ok(()), Err)
    }

    fn elapsed(&self, from: &Handle, to: &Handle) -> Result<Duration> {
        let [from, to] = [from, to].map(|event| event.get::<Arc<EmuEvent>>().wait());
        let elapsed = match (&from.modelled, &to.modelled) {
            (Some(from), Some(to)) => clock::elapsed(from, to).map_err(|reason| Error::Unsupported {
                op: "Event::elapsed_since",
                what: self.info.spec.clone(),
                reason,
            })?,
            _ => to.at.checked_duration_since(from.at),
        };
        elapsed.ok_or_else(|| {
            Error::argument(
                "Event::elapsed_since",
                "earlier",
                "a later event",
                "an event that is done before",
            )
        })
    }

    fn load_module(&self, name: &str, image: &'static [u8]) -> Result<Handle> {
        let wrong = |e: hk_emu::LoadError| Error::CodeObject { object: name.into(), reason: e.to_string() };
        Ok(Handle::new(self.machine.load(image).map_err(wrong)?))
    }

    fn function(&self, module: &Handle, symbol: &str) -> Result<Handle> {
        let module = Arc::clone(module.get::<Arc<Module>>());
        Ok(Handle::new(Function { module, name: symbol.into() }))
    }

    fn launch(&self, stream: &Handle, function: &Handle, dispatch: &Dispatch) -> Result<()> {
        let &Dispatch { op, grid, block, dynamic_lds, args } = dispatch;
        let function = function.get::<Function>().clone();
        stream.get::<EmuStream>().push(Command::Launch {
            op,
            function,
            grid,
            block,
            dynamic_lds,
            args: args.to_vec(),
        });
        Ok(())
    }

    fn host_work(&self, stream: &Handle, work: Arc<crate::HostWork>) -> Result<()> {
        stream.get::<EmuStream>().push(Command::Host(work));
        Ok(())
    }

    fn begin_capture(&self, stream: &Handle) -> Result<()> {
        *lock(&stream.get::<EmuStream>().captured) = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self, stream: &Handle) -> Result<Handle> {
        Ok(Handle::new(lock(&stream.get::<EmuStream>().captured).take().unwrap_or_default()))
    }

    fn launch_graph(&self, stream: &Handle, graph: &Handle) -> Result<()> {
        let stream = stream.get::<EmuStream>();
        graph.get::<Vec<Command>>().iter().for_each(|command| stream.push(command.clone()));
        Ok(())
    }

    fn take_counters(&self, stream: &Handle) -> Result<Option<Counters>> {
        Ok(Some(std::mem::take(&mut stream.get::<EmuStream>().finish()?.counters)))
    }

    fn take_profiles(&self, stream: &Handle) -> Result<Vec<Profile>> {
        Ok(std::mem::take(&mut stream.get::<EmuStream>().finish()?.profiles))
    }

    #[cfg(feature = "time")]
    fn take_launches(&self, stream: &Handle) -> Result<Vec<crate::Modelled>> {
        Ok(std::mem::take(&mut stream.get::<EmuStream>().finish()?.launches))
    }
}
