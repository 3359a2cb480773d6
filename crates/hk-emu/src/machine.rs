//! The emulated device.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use hk_codeobj::{Arch, Kernel};

use crate::checks::{Check, Checks};
use crate::counters::{Counters, Lines, Profile, Resources};
use crate::exec::Level;
use crate::fault::{Access, Fault};
use crate::launch::{
    BlockOrder, Counted, Dispatch, Host, Launch, Setup, Spare, Threads, check_limits, kernarg, packet,
};
use crate::loader::{LoadError, Module};
use crate::lower::Way;
use crate::memory::{ADDRESSES, Memory, MemoryError, Near, StreamRace, View};
use crate::mutate::{Candidate, Mutant};
use crate::node::Node;
use crate::observe::streams::{Begun, Mark, Order, Touched};
use crate::program::{Program, Registers};
use crate::shared::MemoryHandle;
use crate::tables::MatrixNumerics;
use crate::trace::{Sample, Trace};

/// How a [`Machine`] behaves.
#[derive(Debug, Clone)]
pub struct MachineOptions {
    arch: Arch,
    threads: Option<usize>,
    instruction_budget: Option<u64>,
    skew: Option<u64>,
    paced: bool,
    details: bool,
    blocks: bool,
    allow_misaligned: bool,
    level: Option<Level>,
    kernarg_preload: bool,
    checks: Checks,
    mutant: Option<Mutant>,
    numerics: MatrixNumerics,
    addresses: Range<u64>,
    order: BlockOrder,
    node: Option<(Node, u32)>,
    patience: Duration,
}

impl Default for MachineOptions {
    /// gfx942, a thread per host core, four thousand million instructions per wave, strict alignment.
    fn default() -> Self {
        MachineOptions {
            arch: Arch::Gfx942,
            threads: None,
            instruction_budget: Some(4_000_000_000),
            skew: None,
            paced: false,
            details: false,
            blocks: false,
            allow_misaligned: false,
            level: None,
            kernarg_preload: true,
            checks: Checks::NONE,
            mutant: None,
            numerics: MatrixNumerics::Fma,
            addresses: ADDRESSES,
            order: BlockOrder::default(),
            node: None,
            patience: Duration::from_secs(1),
        }
    }
}

impl MachineOptions {
    /// The target: gfx942 or gfx950.
    #[must_use]
    pub fn arch(mut self, arch: Arch) -> Self {
        self.arch = arch;
        self
    }

    /// Host threads for workgroups; `None` shares the process's, one per core. Never changes a result, unless the order
    /// of workgroups is that of [`BlockOrder::Arrival`].
    #[must_use]
    pub fn threads(mut self, threads: Option<usize>) -> Self {
        self.threads = threads;
        self
    }

    /// Instructions that one wave may execute before the launch is stopped; `None` is no bound.
    #[must_use]
    pub fn instruction_budget(mut self, budget: Option<u64>) -> Self {
        self.instruction_budget = budget;
        self
    }

    /// Modelled clocks that a wave may be ahead of the others of its workgroup when it accesses LDS, or global memory at agent
    /// scope. Changes only the results of kernels with races. `None`: 16, so that waves advance about in step, as on hardware;
    /// 262,144 under [`Check::Lds`] and [`Check::Global`], so that one wave runs up to a barrier before the next one does.
    #[must_use]
    pub fn skew(mut self, clocks: Option<u64>) -> Self {
        self.skew = clocks;
        self
    }

    /// Count what depends on addresses: [`Counters::details`]. Slower.
    #[must_use]
    pub fn details(mut self, on: bool) -> Self {
        self.details = on;
        self
    }

    /// Let [`Machine::profile`] count each workgroup by itself, too: [`Profile::blocks`]. Takes about 300 bytes for each.
    #[must_use]
    pub fn blocks(mut self, on: bool) -> Self {
        self.blocks = on;
        self
    }

    /// Let accesses to global memory and LDS be misaligned, as the hardware does in the mode that HSA sets. Else an
    /// access that is not aligned to its element, at most a dword, is a fault.
    #[must_use]
    pub fn allow_misaligned(mut self, on: bool) -> Self {
        self.allow_misaligned = on;
        self
    }

    /// Enter kernels that preload arguments behind their prologue, as the hardware does (the default); else at the
    /// prologue, as firmware without the feature does. Both give the same results.
    #[must_use]
    pub fn kernarg_preload(mut self, on: bool) -> Self {
        self.kernarg_preload = on;
        self
    }

    /// The sanitizers that launches run under. Slower.
    #[must_use]
    pub fn sanitize(mut self, checks: Checks) -> Self {
        self.checks = checks;
        self
    }

    /// Break an instruction of a kernel, to see whether checks and tests find it.
    #[must_use]
    pub fn mutant(mut self, mutant: Option<Mutant>) -> Self {
        self.mutant = mutant;
        self
    }

    /// How matrix instructions round. What depends on it should name it.
    #[must_use]
    pub fn matrix_numerics(mut self, numerics: MatrixNumerics) -> Self {
        self.numerics = numerics;
        self
    }

    /// The device addresses that [`Machine::alloc`] and modules get, so that devices can have disjoint ones.
    #[must_use]
    pub fn addresses(mut self, range: Range<u64>) -> Self {
        self.addresses = range;
        self
    }

    /// A device of a host with several: [`Node`]. It gets its share of the addresses, runs on the caller's thread unless
    /// [`threads`](Self::threads) asks for more, and its constant counter (`s_memrealtime`) counts the time of the host, which
    /// the node's devices share: a kernel that waits for another device for so long waits as long here.
    ///
    /// `None` if `device` is not below [`Node::MAX_DEVICES`].
    #[must_use]
    pub fn node(mut self, node: &Node, device: u32) -> Option<Self> {
        self.addresses = Node::addresses(device)?;
        self.threads = self.threads.or(Some(1));
        self.node = Some((node.clone(), device));
        Some(self)
    }

    /// Time after which a launch whose waves all wait is reported as a deadlock, if the other launches of its node only wait
    /// as well: until then the host might write, or start another. One second if nothing is said.
    #[must_use]
    pub fn patience(mut self, time: Duration) -> Self {
        self.patience = time;
        self
    }

    /// Whether a wave that only waits for a time of the clock waits as long for the host: what programs see of other work while it
    /// does is then what they see beside a GPU.
    #[must_use]
    pub fn paced(mut self, paced: bool) -> Self {
        self.paced = paced;
        self
    }

    /// In which order workgroups communicate.
    #[must_use]
    pub fn block_order(mut self, order: BlockOrder) -> Self {
        self.order = order;
        self
    }

    /// The host features to use; `None` is the best there are. A level that the host lacks falls back to the best.
    /// Never changes a result.
    #[must_use]
    pub fn level(mut self, level: Option<Level>) -> Self {
        self.level = level;
        self
    }
}

struct Inner {
    options: MachineOptions,
    level: Level,
    memory: Arc<Memory>,
    pool: OnceLock<Option<rayon::ThreadPool>>,
    spare: Spare,
    node: Node,
    device: Option<u32>,
    /// Memories of other devices that kernels can access.
    peers: Mutex<Vec<(u32, Weak<Memory>)>>,
    /// The modelled time, in engine clocks, at the end of the last launch.
    clock: AtomicU64,
    /// Where [`Check::Streams`] is on.
    order: Option<Arc<Mutex<Order>>>,
}

/// An emulated device. Clones are the same device.
///
/// Calls run to their end before they return. What is called on one handle, or on its clones, is in order; for
/// [`Check::Streams`] the work of [`stream`](Machine::stream) handles is ordered by marks only, whatever order the calls
/// happen to come in.
#[derive(Clone)]
pub struct Machine(Arc<Inner>, usize);

/// Why a device has no peer access to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// They are not devices of one [`Node`].
    #[error("the devices are not of one node")]
    OtherNode,
    /// They have the same number.
    #[error("both are device {0} of their node")]
    SameDevice(u32),
}

/// The stream of what the host does itself.
const HOST: usize = 0;

impl Machine {
    /// A device with empty memory.
    pub fn new(options: MachineOptions) -> Machine {
        let level = options.level.filter(|level| level.available()).unwrap_or_else(Level::detect);
        let track = options.checks.has(Check::Uninit);
        let memory = Arc::new(Memory::new(options.addresses.clone(), track));
        let (node, device) = options.node.clone().map_or_else(Default::default, |(n, i)| (n, Some(i)));
        if let Some(device) = device {
            node.add(device, &memory);
        }
        let order = options.checks.has(Check::Streams).then(|| node.order());
        Machine(
            Arc::new(Inner {
                options,
                level,
                memory,
                pool: OnceLock::new(),
                spare: Spare::default(),
                node,
                device,
                peers: Mutex::default(),
                clock: AtomicU64::new(0),
                order,
            }),
            HOST,
        )
    }

    /// The target.
    pub fn arch(&self) -> Arch {
        self.0.options.arch
    }

    /// The number of the device in its [`Node`], if it has one.
    pub fn device(&self) -> Option<u32> {
        self.0.device
    }

    /// Whether kernels of this device could access the memory of `peer`.
    ///
    /// # Errors
    /// Why not.
    pub fn can_access_peer(&self, peer: &Machine) -> Result<(), PeerError> {
        let (Some(own), Some(other)) = (self.0.device, peer.0.device) else {
            return Err(PeerError::OtherNode);
        };
        if !self.0.node.same(&peer.0.node) {
            return Err(PeerError::OtherNode);
        }
        if own == other { Err(PeerError::SameDevice(own)) } else { Ok(()) }
    }

    /// Lets kernels of this device that are launched from now on access the memory that `peer` has at their start. True if they
    /// could already.
    ///
    /// # Errors
    /// As [`can_access_peer`](Self::can_access_peer).
    pub fn enable_peer(&self, peer: &Machine) -> Result<bool, PeerError> {
        self.can_access_peer(peer)?;
        let Some(device) = peer.0.device else { return Err(PeerError::OtherNode) };
        let mut peers = self.peers();
        let memory = Arc::downgrade(&peer.0.memory);
        if peers.iter().any(|(_, known)| known.ptr_eq(&memory)) {
            return Ok(true);
        }
        // A device that was opened again has other memory.
        peers.retain(|(number, _)| *number != device);
        peers.push((device, memory));
        Ok(false)
    }

    /// Takes back [`enable_peer`](Self::enable_peer). False if it was not enabled.
    pub fn disable_peer(&self, peer: &Machine) -> bool {
        let mut peers = self.peers();
        let before = peers.len();
        peers.retain(|(_, memory)| !std::ptr::eq(memory.as_ptr(), Arc::as_ptr(&peer.0.memory)));
        peers.len() < before
    }

    fn peers(&self) -> MutexGuard<'_, Vec<(u32, Weak<Memory>)>> {
        self.0.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How matrix instructions round.
    pub fn numerics(&self) -> MatrixNumerics {
        self.0.options.numerics
    }

    /// Host features in use.
    pub fn level(&self) -> Level {
        self.0.level
    }

    /// Allocates exactly `bytes` bytes at a multiple of `align` (a power of two, at least 256 is given). The memory
    /// holds [`POISON`](crate::POISON); unmapped space surrounds it, and its addresses are never used again.
    ///
    /// # Errors
    /// `Alignment` or `OutOfMemory`.
    pub fn alloc(&self, bytes: u64, align: u64, label: &str) -> Result<u64, MemoryError> {
        self.0.memory.alloc(bytes, align, label)
    }

    /// As [`alloc`](Self::alloc), with zeros, of which the host backs only the pages that are accessed.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed(&self, bytes: u64, align: u64, label: &str) -> Result<u64, MemoryError> {
        self.0.memory.alloc_zeroed(bytes, align, label)
    }

    /// As [`alloc`](Self::alloc), with zeros that other processes can open: [`export`](Self::export). Linux only.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_shared(&self, bytes: u64, align: u64, label: &str) -> Result<u64, MemoryError> {
        self.0.memory.alloc_shared(bytes, align, label)
    }

    /// Moves an allocation of [`alloc`](Self::alloc) to memory that other processes can open; nothing happens if it is such memory. Its
    /// address stays, and all of it is backed from now on. No launch or copy may use it meanwhile: what one writes then is lost.
    ///
    /// # Errors
    /// `NotShared`: no allocation begins there, or it is of the host, of another process or read-only. `OutOfMemory`.
    pub fn share(&self, addr: u64) -> Result<(), MemoryError> {
        self.0.memory.share(addr)
    }

    /// A name of memory of [`alloc_shared`](Self::alloc_shared) or [`share`](Self::share), by which other processes open it as long as it
    /// is not freed.
    ///
    /// # Errors
    /// `NotShared`.
    pub fn export(&self, addr: u64) -> Result<MemoryHandle, MemoryError> {
        self.0.memory.export(addr)
    }

    /// Opens memory of a device of another process of this host, at an address of this device; [`free`](Self::free) closes it. The
    /// memory stays for both until both have freed it. Launches that have it may wait for the other process as for a device of their own
    /// [`Node`]; for a time of the clock only on a device of a node. Checks and reports know only the accesses of their own process.
    ///
    /// # Errors
    /// `Import`: no handle, of this process, freed, or of a process that this one may not access. `OutOfMemory`.
    pub fn import(&self, handle: MemoryHandle) -> Result<u64, MemoryError> {
        self.0.memory.import(handle)
    }

    /// Allocates `bytes` bytes at a given address, of any alignment, inside or outside of the machine's own range:
    /// the device's side of host memory that both sides name by one address. An address freed before may come again.
    ///
    /// # Errors
    /// `Occupied` or `OutOfMemory`.
    pub fn alloc_at(&self, addr: u64, bytes: u64, label: &str) -> Result<(), MemoryError> {
        self.0.memory.alloc_at(addr, bytes, label, true)
    }

    /// [`alloc_at`](Self::alloc_at) for memory that kernels may only read: a write is a fault.
    ///
    /// # Errors
    /// `Occupied` or `OutOfMemory`.
    pub fn alloc_read_only_at(&self, addr: u64, bytes: u64, label: &str) -> Result<(), MemoryError> {
        self.0.memory.alloc_at(addr, bytes, label, false)
    }

    /// Gives the device host memory at its own address: kernels and the host see each other's writes at once. `owner` is kept until it is
    /// freed and the launches that use it have ended.
    ///
    /// # Errors
    /// `Occupied`.
    ///
    /// # Safety
    /// From `start` on there are `bytes` bytes, rounded up to a multiple of 4, for reads and writes as long as `owner` lives. Only
    /// atomics, and what is not Rust, access them meanwhile.
    pub unsafe fn map_host(
        &self,
        start: NonNull<AtomicU32>,
        bytes: u64,
        label: &str,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), MemoryError> {
        // SAFETY: as the caller promises.
        unsafe { self.0.memory.map_host(start, bytes, label, owner) }
    }

    /// Frees an allocation by its first address. Launches that run keep what they use.
    ///
    /// # Errors
    /// `NotAnAllocation`.
    pub fn free(&self, addr: u64) -> Result<(), MemoryError> {
        let begun = self.begin("release");
        let near = begun.as_ref().map(|_| self.0.memory.near(addr));
        self.0.memory.free(addr)?;
        let (Some(begun), Some(near)) = (begun, near) else { return Ok(()) };
        let size = if let Near::Allocation { size, .. } = near { size } else { 0 };
        let mut order = self.order();
        let race = order.as_mut().and_then(|order| order.access(&begun, Access::Write, addr, addr + size));
        if let Some(order) = &mut order {
            order.forget(addr, addr + size);
        }
        match race {
            Some(race) => Err(MemoryError::Race(Box::new(StreamRace { near, ..race }))),
            None => Ok(()),
        }
    }

    /// Copies device memory to the host. The bytes must lie in one allocation.
    ///
    /// # Errors
    /// `Unmapped`.
    pub fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        let begun = self.begin("copy to the host");
        self.0.memory.read(addr, out)?;
        self.used(begun.as_ref(), Access::Read, addr, out.len() as u64).map_err(MemoryError::Race)
    }

    /// Copies from the host to device memory. The bytes must lie in one allocation.
    ///
    /// # Errors
    /// `Unmapped`.
    pub fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError> {
        let begun = self.begin("copy from the host");
        self.0.memory.write(addr, data)?;
        self.used(begun.as_ref(), Access::Write, addr, data.len() as u64).map_err(MemoryError::Race)
    }

    /// Copies inside device memory; the ranges may overlap.
    ///
    /// # Errors
    /// `Unmapped`.
    pub fn copy(&self, dst: u64, src: u64, bytes: u64) -> Result<(), MemoryError> {
        let begun = self.begin("copy");
        self.0.memory.copy(dst, src, bytes)?;
        self.used(begun.as_ref(), Access::Read, src, bytes)
            .and_then(|()| self.used(begun.as_ref(), Access::Write, dst, bytes))
            .map_err(MemoryError::Race)
    }

    /// Exchanges the 8 bytes at `addr`, a multiple of 8, for `value`; gives what they were. Atomic against the kernels' atomics.
    ///
    /// # Errors
    /// `Unmapped` or `Misaligned`.
    pub fn exchange(&self, addr: u64, value: u64) -> Result<u64, MemoryError> {
        let begun = self.begin("exchange by the host");
        let old = self.0.memory.exchange(addr, value)?;
        self.used(begun.as_ref(), Access::Write, addr, 8).map_err(MemoryError::Race)?;
        Ok(old)
    }

    /// Fills `bytes` bytes with repetitions of `pattern`, the last one cut short.
    ///
    /// # Errors
    /// `Unmapped`.
    pub fn fill(&self, addr: u64, pattern: &[u8], bytes: u64) -> Result<(), MemoryError> {
        let begun = self.begin("fill");
        self.0.memory.fill(addr, pattern, bytes)?;
        self.used(begun.as_ref(), Access::Write, addr, bytes).map_err(MemoryError::Race)
    }

    /// Loads a code object: maps and relocates its segments. Kernels are decoded at their first launch.
    ///
    /// # Errors
    /// [`LoadError`]: whatever the bytes, never a panic.
    pub fn load(&self, image: &[u8]) -> Result<Arc<Module>, LoadError> {
        Ok(Arc::new(Module::load(&self.0.memory, self.0.options.arch, image)?))
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// [`Fault`]: what the kernel did wrong, or what the launch asks for and the target lacks. Memory written before stays written.
    pub fn launch(&self, module: &Module, kernel: &str, dispatch: &Dispatch<'_>) -> Result<Counters, Fault> {
        self.launch_with(module, kernel, dispatch, &Host::default())
    }

    /// As [`launch`](Self::launch), for kernels that call the host.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn launch_with(
        &self,
        module: &Module,
        kernel: &str,
        dispatch: &Dispatch<'_>,
        host: &Host<'_>,
    ) -> Result<Counters, Fault> {
        Ok(self.run(module, kernel, dispatch, host, [self.0.options.details, false])?.1.total)
    }

    /// Runs a kernel to its end and counts everything, by source line; with [`MachineOptions::blocks`] by workgroup as well.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn profile(&self, module: &Module, kernel: &str, dispatch: &Dispatch<'_>) -> Result<Profile, Fault> {
        let (kernel, counted) =
            self.run(module, kernel, dispatch, &Host::default(), [true, self.0.options.blocks])?;
        let Counted { total: counters, sites, blocks } = counted;
        let program = self.program(module, kernel);
        let executed = || sites.iter().enumerate().filter(|(_, site)| site.instructions > 0);
        let addresses: Vec<u64> = executed().map(|(i, _)| program.address(i as u32)).collect();
        let mut lines = Lines::default();
        for ((_, site), source) in executed().zip(module.source_lines(&addresses)) {
            let (file, line) = source.map_or((None, 0), |(file, line)| (Some(file), line));
            lines.add((file, line), *site);
        }
        let resources = self.resources(kernel, dispatch);
        let kernel = kernel.name.clone();
        Ok(Profile { kernel, launches: 1, resources, counters, lines: lines.list(), blocks })
    }

    /// Runs some workgroups of a launch on the caller's thread and records what their waves execute. The others do not run,
    /// and memory is left as it was. Without sanitizers and counters.
    ///
    /// # Errors
    /// As [`launch`](Self::launch); [`Fault::Arguments`] for a workgroup that the grid does not have; [`Fault::Budget`] for a
    /// wave that waits for a workgroup that is not among them.
    pub fn trace(
        &self,
        module: &Module,
        kernel: &str,
        dispatch: &Dispatch<'_>,
        sample: Sample<'_>,
    ) -> Result<Trace, Fault> {
        let (kernel, blocks) =
            self.prepared(module, kernel, dispatch, &Host::default(), [false; 2], |launch| {
                launch.trace(sample)
            })?;
        Ok(Trace::new(self.program(module, kernel), self.resources(kernel, dispatch), blocks))
    }

    /// First address and bytes of everything that is allocated, in ascending order; code objects and their data, too.
    pub fn allocations(&self) -> Vec<(u64, u64)> {
        self.0.memory.snapshot().iter().map(|a| (a.base, a.size)).collect()
    }

    fn resources(&self, kernel: &Kernel, dispatch: &Dispatch<'_>) -> Resources {
        let threads = dispatch.block.iter().product();
        let lds_bytes = kernel.lds_bytes + dispatch.dynamic_lds;
        Resources {
            threads,
            vgprs: kernel.vgprs,
            agprs: kernel.agprs,
            sgprs: kernel.sgprs,
            lds_bytes,
            scratch_bytes: kernel.scratch_bytes,
            waves_per_simd: hk_codeobj::occupancy(self.arch(), kernel.total_vgprs, lds_bytes, threads),
            blocks_per_cu: hk_codeobj::workgroups_per_cu(self.arch(), kernel.total_vgprs, lds_bytes, threads),
        }
    }

    /// Runs a kernel and counts, with `details` what depends on addresses, with `blocks` each workgroup.
    fn run<'m>(
        &self,
        module: &'m Module,
        kernel: &str,
        dispatch: &Dispatch<'_>,
        host: &Host<'_>,
        count: [bool; 2],
    ) -> Result<(&'m Kernel, Counted), Fault> {
        self.prepared(module, kernel, dispatch, host, count, |launch| {
            let threads = if launch.parallel() { self.threads() } else { Threads::One };
            launch.run(threads)
        })
    }

    /// Whether a launch asks for no more than the target has, and for a kernel that is there.
    ///
    /// # Errors
    /// [`Fault::UnknownKernel`], [`Fault::Limits`], [`Fault::Arguments`].
    pub fn check(&self, module: &Module, kernel: &str, dispatch: &Dispatch<'_>) -> Result<(), Fault> {
        self.checked(module, kernel, dispatch).map(drop)
    }

    fn checked<'m>(
        &self,
        module: &'m Module,
        kernel: &str,
        dispatch: &Dispatch<'_>,
    ) -> Result<&'m Kernel, Fault> {
        let kernel = module.object.kernel(kernel).ok_or_else(|| Fault::UnknownKernel {
            kernel: kernel.to_owned(),
            available: module.object.kernels.iter().map(|k| k.name.clone()).collect(),
        })?;
        check_limits(self.0.options.arch, kernel, dispatch)?;
        if dispatch.grid.contains(&0) || dispatch.block.contains(&0) {
            return Err(Fault::Arguments {
                kernel: kernel.name.clone(),
                what: format!("grid {:?} of blocks {:?} is empty", dispatch.grid, dispatch.block),
            });
        }
        Ok(kernel)
    }

    /// Checks a launch and lets `go` run it.
    fn prepared<'m, T>(
        &self,
        module: &'m Module,
        kernel: &str,
        dispatch: &Dispatch<'_>,
        host: &Host<'_>,
        [details, blocks]: [bool; 2],
        go: impl FnOnce(Launch<'_>) -> Result<T, Fault>,
    ) -> Result<(&'m Kernel, T), Fault> {
        let kernel = self.checked(module, kernel, dispatch)?;
        let memory = &self.0.memory;
        let arguments = kernarg(kernel, dispatch, host.hidden)?;
        let no_memory =
            |error: MemoryError| Fault::Arguments { kernel: kernel.name.clone(), what: error.to_string() };
        let segment = memory
            .detached(
                arguments.len() as u64,
                u64::from(kernel.kernarg_align).max(16),
                "kernel arguments",
                false,
            )
            .map_err(no_memory)?;
        segment.write_bytes(0, &arguments);
        let lds = kernel.lds_bytes + dispatch.dynamic_lds;
        let packet_segment = memory.detached(64, 64, "dispatch packet", false).map_err(no_memory)?;
        packet_segment.write_bytes(0, &packet(kernel, dispatch, lds, segment.base));

        let program = self.program(module, kernel);
        let peers: Vec<(u32, Arc<Memory>)> =
            self.peers().iter().filter_map(|(device, memory)| Some((*device, memory.upgrade()?))).collect();
        let snapshots: Vec<_> = [memory]
            .into_iter()
            .chain(peers.iter().map(|(_, memory)| memory))
            .map(|m| m.snapshot())
            .collect();
        // Memory at an address of the host is each device's own.
        let own = |i: usize, base| i == 0 || peers.get(i - 1).is_some_and(|(_, memory)| memory.holds(base));
        let mut allocations: Vec<_> = snapshots
            .iter()
            .enumerate()
            .flat_map(|(i, s)| s.iter().map(|a| &**a).filter(move |a| own(i, a.base)))
            .collect();
        allocations.extend([&*segment, &*packet_segment]);
        let processes = allocations.iter().filter_map(|allocation| allocation.process()).collect();
        let view = View::new(allocations, !self.0.options.allow_misaligned)
            .with_peers(peers.iter().map(|(_, memory)| memory));
        let begun =
            self.begin(&format!("launch of {}", kernel.name)).filter(|_| host.checks.has(Check::Streams));
        let touched = begun.is_some().then(Arc::<Mutex<Touched>>::default);
        let setup = Setup {
            module,
            kernel,
            program,
            memory: view,
            budget: self.0.options.instruction_budget.unwrap_or(u64::MAX),
            skew: self.0.options.skew,
            kernarg: &segment,
            packet: &packet_segment,
            spare: &self.0.spare,
            checks: self.0.options.checks & host.checks,
            details,
            blocks,
            running: self.0.node.begin(self.0.device, &kernel.name, self.0.options.patience, processes),
            peers: peers.iter().map(|(device, _)| *device).collect(),
            epoch: self.0.device.map(|_| self.0.node.epoch()),
            paced: self.0.options.paced,
            clock: &self.0.clock,
            touched: touched.clone(),
            order: self.0.options.order,
            interrupt: host.interrupt,
        };
        let result = go(Launch::new(setup, dispatch))?;
        if let Some(touched) = touched {
            let touched = touched.lock().unwrap_or_else(PoisonError::into_inner);
            // The order of one device's streams: other devices' memory is left to the check of global memory.
            let foreign = |at: u64| peers.iter().any(|(_, memory)| memory.holds(at));
            let own = |at: u64| [&segment, &packet_segment].iter().any(|a| a.offset(at, 1).is_some());
            for access in [Access::Read, Access::Write] {
                for (start, end) in
                    touched.runs(access).into_iter().filter(|(start, _)| !own(*start) && !foreign(*start))
                {
                    self.used(begun.as_ref(), access, start, end - start).map_err(Fault::Streams)?;
                }
            }
        }
        Ok((kernel, result))
    }

    /// A handle for work on a new stream, which the host's calls and other streams are not in order with but for marks.
    #[must_use]
    pub fn stream(&self) -> Machine {
        Machine(self.0.clone(), self.order().map_or(HOST, |mut order| order.stream()))
    }

    /// The host's handle: what is called on it happens where the host is.
    #[must_use]
    pub fn host(&self) -> Machine {
        Machine(self.0.clone(), HOST)
    }

    /// An event: everything that happens before the end of this handle's work. Of the host, what it has waited for.
    pub fn mark(&self) -> Mark {
        self.order().map_or_else(Mark::default, |order| order.mark(self.1))
    }

    /// Orders later work on this handle after the mark. Of the host: it has waited for the mark.
    pub fn wait(&self, mark: &Mark) {
        if let Some(mut order) = self.order() {
            order.wait(self.1, mark);
        }
    }

    fn order(&self) -> Option<MutexGuard<'_, Order>> {
        self.0.order.as_ref().map(|order| order.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn begin(&self, name: &str) -> Option<Begun> {
        self.order().map(|mut order| order.begin(self.1, name))
    }

    /// Work has accessed bytes.
    fn used(
        &self,
        begun: Option<&Begun>,
        access: Access,
        addr: u64,
        bytes: u64,
    ) -> Result<(), Box<StreamRace>> {
        let (Some(mut order), Some(begun)) = (self.order(), begun) else { return Ok(()) };
        match order.access(begun, access, addr, addr.saturating_add(bytes)) {
            Some(race) => Err(Box::new(StreamRace { near: self.0.memory.near(race.address), ..race })),
            None => Ok(()),
        }
    }

    /// The instructions of a kernel that would end a launch if they were reached: virtual address, text, reason.
    /// Empty for kernels that run in full; `None` if there is no such kernel.
    pub fn unsupported(&self, module: &Module, kernel: &str) -> Option<Vec<(u64, String, String)>> {
        Some(self.program(module, module.object.kernel(kernel)?).unsupported())
    }

    /// The waits, barriers and memory accesses of a kernel that a [`Mutant`] can break; `None` if there is no such
    /// kernel.
    pub fn candidates(&self, module: &Module, kernel: &str) -> Option<Vec<Candidate>> {
        let program = self.program(module, module.object.kernel(kernel)?);
        let candidate = |(address, mutation, instruction)| Candidate {
            mutant: Mutant { kernel: kernel.to_owned(), address, mutation },
            instruction,
            source: module.source_line(address),
        };
        Some(program.mutations().into_iter().map(candidate).collect())
    }

    fn program(&self, module: &Module, kernel: &Kernel) -> Arc<Program> {
        // Hardware with the preload feature enters behind the prologue that loads the same registers by hand.
        let preloads = kernel.descriptor.kernarg_preload_dwords != 0 && self.0.options.kernarg_preload;
        let entry = kernel.entry_vaddr + if preloads { 256 } else { 0 };
        let mutant = self.0.options.mutant.as_ref().filter(|mutant| mutant.kernel == kernel.name);
        let mutation = mutant.map(|mutant| (mutant.address, mutant.mutation));
        let way = Way { level: self.0.level, numerics: self.0.options.numerics, mutation };
        module.program(&way, entry, Registers::of(kernel))
    }

    fn threads(&self) -> Threads<'_> {
        let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().ok();
        match self.0.options.threads {
            None => Threads::Shared,
            Some(0 | 1) => Threads::One,
            // A machine that cannot have threads of its own runs on the caller's.
            Some(n) => self.0.pool.get_or_init(|| pool(n)).as_ref().map_or(Threads::One, Threads::Pool),
        }
    }
}
