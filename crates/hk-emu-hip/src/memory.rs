//! Memory: allocation, copies, fills, and what is known of a pointer.
//!
//! Device memory lives in the emulator; the program cannot follow its addresses. Host memory that the API allocates is the memory of
//! every device at the same address. So is memory that the program registers, whole words of it that it may write; it is looked for
//! before each launch, since the program may have given it back. Of other registered memory, devices have an allocation at its address:
//! its contents go over before a launch, and what the launch changed comes back after it.

use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_uint};
use std::ops::Bound::{Excluded, Unbounded};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use bytemuck::Zeroable;
use hk_emu::MemoryError;

use crate::abi::{
    DriverMemcpy3D, MemAllocNodeParams, Memcpy2D, PointerAttributes, Side2D, Side3D, memory_type,
};
use crate::capture::{captures, forbid_synchronous, forbid_unsafe};
pub(crate) use crate::device::MAX_PITCH;
use crate::error::{HipError, Result};
use crate::host::{self, CHUNK, get, put, put_if};
use crate::runtime::{Device, Runtime, api, lock, runtime, say};
use crate::sanitize::{self, Leak};
use crate::stream::stream;
use crate::work::{Copy, Fill, Work, now, submit};
use crate::{managed, pool, queue, virtual_memory, work};

/// Alignment of device memory, and of the rows of pitched memory.
const ALIGN: u64 = 256;
const HOST_ALIGN: usize = 4096;

/// Memory that a pointer can name.
#[derive(Clone)]
pub(crate) struct Block {
    pub size: u64,
    /// Ordinal of the device that was current when it was made, or [`OF_THE_PROGRAM`].
    pub device: usize,
    pub kind: Kind,
    pub flags: c_uint,
}

/// The owner of the program's managed variables: they last as long as its code, whatever is reset.
pub(crate) const OF_THE_PROGRAM: usize = usize::MAX;

#[derive(Clone)]
pub(crate) enum Kind {
    Device,
    /// Of an allocation node: it goes with the last graph that has the node, or when it is freed after that.
    Graph,
    /// A variable of the module with this handle.
    Global(u64),
    /// Of another process.
    Opened,
    /// Page-locked.
    Host(Arc<HostMemory>),
    Managed(Arc<HostMemory>),
    /// A managed variable; programs cannot free it.
    ManagedGlobal(Arc<HostMemory>),
    /// Memory of the program's own.
    Registered(Registration),
    /// A mapping of physical memory, which [`virtual_memory`] keeps.
    Virtual,
}

/// How devices have registered host memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Registration {
    /// The host's own pages.
    InPlace,
    /// A copy while a kernel runs.
    Copied,
    /// A copy that kernels may only read, of what the program may not write.
    ReadOnly,
    /// Not at all: the program has given it back and not unregistered it.
    Gone,
}

impl Kind {
    /// Whether the host has it at its address, too.
    fn on_host(&self) -> bool {
        matches!(self, Kind::Registered(_) | Kind::Virtual) || self.host_memory().is_some()
    }

    fn host_memory(&self) -> Option<&Arc<HostMemory>> {
        match self {
            Kind::Host(memory) | Kind::Managed(memory) | Kind::ManagedGlobal(memory) => Some(memory),
            Kind::Device
            | Kind::Graph
            | Kind::Global(_)
            | Kind::Opened
            | Kind::Registered(_)
            | Kind::Virtual => None,
        }
    }
}

/// Host memory that was freed. Programs that allocate the same again and again get it without page faults.
struct Freed {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: owned memory that nothing refers to.
unsafe impl Send for Freed {}

static FREED: Mutex<Vec<Freed>> = Mutex::new(vec![]);
/// The most that is kept.
const FREED_BYTES: usize = 16 << 20;

/// Zeroed host memory.
pub(crate) struct HostMemory {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: owned memory that nothing in this crate refers to but by its address.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    fn new(bytes: u64) -> Option<HostMemory> {
        // Whole words, which are what devices access.
        let bytes = usize::try_from(bytes).ok()?.max(1).checked_next_multiple_of(4)?;
        let layout = Layout::from_size_align(bytes, HOST_ALIGN).ok()?;
        let mut freed = lock(&FREED);
        if let Some(i) = freed.iter().position(|old| old.layout == layout) {
            let old = freed.swap_remove(i);
            drop(freed);
            // SAFETY: memory of this layout that nobody else has.
            unsafe { old.start.write_bytes(0, bytes) };
            return Some(HostMemory { start: old.start, layout });
        }
        drop(freed);
        // SAFETY: the size is not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        (!start.is_null()).then_some(HostMemory { start, layout })
    }

    /// Makes it memory of a device.
    fn map(
        self: &Arc<Self>,
        device: &Device,
        bytes: u64,
        label: &str,
    ) -> std::result::Result<(), MemoryError> {
        let none = || MemoryError::OutOfMemory { bytes, label: label.to_owned() };
        let start = NonNull::new(self.start.cast::<AtomicU32>()).ok_or_else(none)?;
        // SAFETY: whole words, aligned to a page; they live as long as `self`. Nothing in this crate refers to them but by address.
        unsafe { device.machine.map_host(start, bytes, label, self.clone()) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let size = self.layout.size();
        let mut freed = lock(&FREED);
        if size <= FREED_BYTES
            && freed.iter().map(|old| old.layout.size()).sum::<usize>() <= FREED_BYTES - size
        {
            return freed.push(Freed { start: self.start, layout: self.layout });
        }
        drop(freed);
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.start, self.layout) }
    }
}

/// Bytes of memory that the machine can still give.
pub(crate) fn available() -> u64 {
    let field = |text: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    std::fs::read_to_string("/proc/meminfo").ok().and_then(|t| field(&t)).map_or(u64::MAX, |kb| kb << 10)
}

/// Sizes from here on are compared with the host's memory, which may be needed: the system would end the process instead of
/// refusing.
const LARGE: u64 = 16 << 20;

pub(crate) fn check_room(device: &Device, bytes: u64) -> Result {
    let left = device.memory_bytes().saturating_sub(device.used.load(Relaxed));
    let fits = bytes <= left && (bytes < LARGE || device.memory.is_some() || bytes < available());
    fits.then_some(()).ok_or(HipError::OUT_OF_MEMORY)
}

/// The block that holds `addr`, with its first address.
fn find(blocks: &BTreeMap<u64, Block>, addr: u64) -> Option<(u64, &Block)> {
    let (base, block) = blocks.range(..=addr).next_back()?;
    (addr - base < block.size.max(1)).then_some((*base, block))
}

fn lookup(addr: u64) -> Option<(u64, Block)> {
    let block = find(&lock(&runtime().blocks), addr).map(|(base, block)| (base, block.clone()));
    block.or_else(|| virtual_memory::block(addr))
}

/// Device memory, filled with poison.
pub(crate) fn malloc(device: &Device, bytes: u64) -> Result<u64> {
    malloc_as(device, bytes, Kind::Device)
}

fn malloc_as(device: &Device, bytes: u64, kind: Kind) -> Result<u64> {
    device.check()?;
    if bytes == 0 {
        return Ok(0);
    }
    check_room(device, bytes)?;
    let out_of_memory = |_| HipError::OUT_OF_MEMORY;
    let addr = device.machine.alloc(bytes, ALIGN, "hipMalloc").map_err(out_of_memory)?;
    device.used.fetch_add(bytes, Relaxed);
    let block = Block { size: bytes, device: device.ordinal, kind, flags: 0 };
    lock(&runtime().blocks).insert(addr, block);
    sanitize::options().allocated(addr);
    Ok(addr)
}

/// Host memory that devices reach by the same address.
fn malloc_host(bytes: u64, flags: c_uint, managed: bool) -> Result<u64> {
    let device = runtime().current()?;
    device.check()?;
    if bytes == 0 {
        return Ok(0);
    }
    let (kind, label): (fn(_) -> Kind, _) =
        if managed { (Kind::Managed, "hipMallocManaged") } else { (Kind::Host, "hipHostMalloc") };
    Ok(new_host(device, device.ordinal, bytes, flags, kind, label)?.start as u64)
}

fn new_host(
    device: &Device,
    owner: usize,
    bytes: u64,
    flags: c_uint,
    kind: impl FnOnce(Arc<HostMemory>) -> Kind,
    label: &str,
) -> Result<Arc<HostMemory>> {
    check_room(device, bytes)?;
    let memory = Arc::new(HostMemory::new(bytes).ok_or(HipError::OUT_OF_MEMORY)?);
    let block = Block { size: bytes, device: owner, kind: kind(memory.clone()), flags };
    map_host(runtime(), memory.start as u64, block, label)?;
    Ok(memory)
}

/// The memory of a managed variable.
pub(crate) struct ManagedGlobal {
    memory: Arc<HostMemory>,
    pub size: u64,
}

impl ManagedGlobal {
    /// Zeroed memory for all devices; `owner` as in [`Block`].
    ///
    /// # Errors
    /// `hipErrorOutOfMemory`.
    pub fn new(device: &Device, owner: usize, size: u64) -> Result<ManagedGlobal> {
        const ATTACH_GLOBAL: c_uint = 1;
        let memory = new_host(device, owner, size, ATTACH_GLOBAL, Kind::ManagedGlobal, "__managed__")?;
        Ok(ManagedGlobal { memory, size })
    }

    pub fn addr(&self) -> u64 {
        self.memory.start as u64
    }
}

impl Drop for ManagedGlobal {
    fn drop(&mut self) {
        // The address is not used again while `memory` lives, so a block there is this one.
        if let Some(block) = lock(&runtime().blocks).remove(&self.addr()) {
            release(runtime(), self.addr(), &block);
        }
    }
}

fn map_host(runtime: &Runtime, addr: u64, block: Block, label: &str) -> Result {
    for (i, device) in runtime.devices.iter().enumerate() {
        let mapped = match (&block.kind, NonNull::new(addr as *mut AtomicU32)) {
            (Kind::Registered(Registration::InPlace), Some(start)) => {
                // SAFETY: pages that are there for reads and writes, from a word on, and nothing in this crate refers to them but by
                // address. The program promises to keep them until it unregisters them; `Mapped::enter` looks before each launch.
                unsafe { device.machine.map_host(start, block.size, label, Arc::new(())) }
            }
            (Kind::Registered(Registration::ReadOnly), _) => {
                device.machine.alloc_read_only_at(addr, block.size, label)
            }
            _ => match block.kind.host_memory() {
                Some(memory) => memory.map(device, block.size, label),
                None => device.machine.alloc_at(addr, block.size, label),
            },
        };
        if mapped.is_err() {
            for earlier in &runtime.devices[..i] {
                let _ = earlier.machine.free(addr);
            }
            return Err(HipError::OUT_OF_MEMORY);
        }
    }
    lock(&runtime.blocks).insert(addr, block);
    sanitize::options().allocated(addr);
    Ok(())
}

/// Memory that the program has to free and has not.
pub(crate) fn live() -> Vec<Leak> {
    let leak = |(&address, block): (&u64, &Block)| {
        let kind = match block.kind {
            Kind::Device => "hipMalloc",
            Kind::Host(_) => "hipHostMalloc",
            Kind::Managed(_) => "hipMallocManaged",
            _ => return None,
        };
        Some(Leak { address, bytes: block.size, kind, device: block.device })
    };
    lock(&runtime().blocks).iter().filter_map(leak).collect()
}

/// Releases what begins at `addr`.
pub(crate) fn free(addr: u64) -> Result {
    if addr == 0 {
        return Ok(());
    }
    if pool::is_free(addr) {
        return Err(HipError::INVALID_VALUE);
    }
    let runtime = runtime();
    let mut blocks = lock(&runtime.blocks);
    match blocks.get(&addr) {
        Some(Block { kind: Kind::Device | Kind::Host(_) | Kind::Managed(_), .. }) => {}
        Some(Block { kind: Kind::Graph, .. }) => {
            drop(blocks);
            return GraphMemory::leave(addr);
        }
        _ => return Err(HipError::INVALID_VALUE),
    }
    if let Some(block) = blocks.remove(&addr) {
        release(runtime, addr, &block);
        drop(blocks);
        pool::freed(addr);
        managed::freed(addr, block.size);
        return runtime.devices.get(block.device).map_or(Ok(()), Device::check);
    }
    Ok(())
}

fn release(runtime: &Runtime, addr: u64, block: &Block) {
    match block.kind {
        Kind::Device | Kind::Graph => {
            if let Some(device) = runtime.devices.get(block.device) {
                let _ = device.machine.free(addr);
                device.used.fetch_sub(block.size, Relaxed);
            }
        }
        Kind::Host(_) | Kind::Managed(_) | Kind::ManagedGlobal(_) | Kind::Registered(_) => {
            for device in runtime.devices.iter() {
                let _ = device.machine.free(addr);
            }
        }
        Kind::Opened => {
            if let Some(device) = runtime.devices.get(block.device) {
                let _ = device.machine.free(addr);
            }
        }
        Kind::Global(_) | Kind::Virtual => {}
    }
}

/// Removes everything that was made on a device.
pub(crate) fn release_all(device: &Device) {
    let runtime = runtime();
    lock(&runtime.blocks).retain(|addr, block| {
        let keep = block.device != device.ordinal;
        if !keep {
            release(runtime, *addr, block);
        }
        keep
    });
}

/// Memory of an allocation node.
pub(crate) struct GraphMemory {
    device: usize,
    /// What the program asked for, and the address.
    pub params: MemAllocNodeParams,
}

/// Memory of graphs by its address.
#[derive(Default)]
struct GraphBlock {
    memory: Weak<GraphMemory>,
    /// A launch has allocated it, and nothing has freed it since.
    live: Option<Arc<GraphMemory>>,
    /// A node frees it.
    freed_by_node: bool,
}

static GRAPH_MEMORY: LazyLock<Mutex<HashMap<u64, GraphBlock>>> = LazyLock::new(Mutex::default);

impl GraphMemory {
    /// # Errors
    /// `hipErrorOutOfMemory`.
    pub fn new(device: &Device, mut params: MemAllocNodeParams) -> Result<Arc<GraphMemory>> {
        params.ptr = malloc_as(device, params.bytes, Kind::Graph)?;
        let memory = Arc::new(GraphMemory { device: device.ordinal, params });
        let block = GraphBlock { memory: Arc::downgrade(&memory), live: None, freed_by_node: false };
        lock(&GRAPH_MEMORY).insert(params.ptr, block);
        Ok(memory)
    }

    /// Memory for `hipMallocAsync` on a stream that is captured.
    pub fn captured(device: &Device, bytes: u64) -> Result<Arc<GraphMemory>> {
        let mut params = MemAllocNodeParams::zeroed();
        (params.pool.allocation_type, params.pool.location_type) = (1, 1);
        (params.pool.location_id, params.bytes) = (device.ordinal as i32, bytes);
        GraphMemory::new(device, params)
    }

    fn usage(&self) -> Option<&'static GraphUse> {
        runtime().devices.get(self.device).map(|device| &device.graph_use)
    }

    /// A launch allocates it.
    pub fn enter(memory: &Arc<GraphMemory>) {
        if let Some(block) = lock(&GRAPH_MEMORY).get_mut(&memory.params.ptr)
            && block.live.replace(memory.clone()).is_none()
            && let Some(usage) = memory.usage()
        {
            usage.add(memory.params.bytes);
        }
    }

    /// It is freed: by a node, or by the program.
    fn leave(addr: u64) -> Result {
        let live = lock(&GRAPH_MEMORY).get_mut(&addr).and_then(|block| block.live.take());
        let memory = live.ok_or(HipError::INVALID_VALUE)?;
        if let Some(usage) = memory.usage() {
            usage.used.fetch_sub(memory.params.bytes, Relaxed);
        }
        Ok(())
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        let addr = self.params.ptr;
        lock(&GRAPH_MEMORY).remove(&addr);
        let mut blocks = lock(&runtime().blocks);
        if matches!(blocks.get(&addr), Some(Block { kind: Kind::Graph, .. }))
            && let Some(block) = blocks.remove(&addr)
        {
            release(runtime(), addr, &block);
        }
    }
}

/// Lets a node free memory of a graph.
///
/// # Errors
/// `hipErrorInvalidValue` for other memory, and if another node frees it.
pub(crate) fn claim_free(addr: u64) -> Result {
    let mut all = lock(&GRAPH_MEMORY);
    let block = all.get_mut(&addr).filter(|block| block.memory.strong_count() > 0 && !block.freed_by_node);
    block.ok_or(HipError::INVALID_VALUE)?.freed_by_node = true;
    Ok(())
}

/// Bytes of a device that graphs have allocated: `hipGraphMemAttributeType`.
#[derive(Default)]
pub(crate) struct GraphUse {
    used: AtomicU64,
    used_high: AtomicU64,
    reserved: AtomicU64,
    reserved_high: AtomicU64,
}

impl GraphUse {
    fn add(&self, bytes: u64) {
        let used = self.used.fetch_add(bytes, Relaxed) + bytes;
        self.used_high.fetch_max(used, Relaxed);
        let reserved = self.reserved.fetch_max(used, Relaxed).max(used);
        self.reserved_high.fetch_max(reserved, Relaxed);
    }

    pub fn get(&self, attribute: c_int) -> Option<u64> {
        let counter = match attribute {
            0 => &self.used,
            1 => &self.used_high,
            2 => &self.reserved,
            3 => &self.reserved_high,
            _ => return None,
        };
        Some(counter.load(Relaxed))
    }

    /// Sets a high-water mark to what is current.
    pub fn reset(&self, attribute: c_int) {
        match attribute {
            1 => self.used_high.store(self.used.load(Relaxed), Relaxed),
            3 => self.reserved_high.store(self.reserved.load(Relaxed), Relaxed),
            _ => {}
        }
    }

    /// Gives back what is reserved and not used.
    pub fn trim(&self) {
        self.reserved.store(self.used.load(Relaxed), Relaxed);
    }
}

/// # Errors
/// `error` for an address that is in no allocation.
pub(crate) fn known(addr: u64, error: HipError) -> Result {
    if is_known(addr) { Ok(()) } else { Err(error) }
}

/// Whether memory is of the runtime, registered, or of a module.
pub(crate) fn is_known(addr: u64) -> bool {
    lookup(addr).is_some()
}

/// The device whose memory has an address.
pub(crate) fn device_of(addr: u64) -> Option<&'static Device> {
    let (_, block) = lookup(addr)?;
    runtime().devices.get(block.device).filter(|_| !block.kind.on_host())
}

/// First address and size of the memory that has this address.
pub(crate) fn allocation(addr: u64) -> Option<(u64, u64)> {
    lookup(addr).map(|(base, block)| (base, block.size))
}

/// Whether managed memory has so many bytes from `ptr` on; `None` if no memory has.
pub(crate) fn is_managed(ptr: u64, bytes: u64) -> Option<bool> {
    let (base, block) = lookup(ptr)?;
    let managed = matches!(block.kind, Kind::Managed(_) | Kind::ManagedGlobal(_));
    (bytes <= block.size - (ptr - base)).then_some(managed)
}

/// Whether memory is a device's, and not mapped host memory.
pub(crate) fn is_device(addr: u64) -> bool {
    lookup(addr).is_some_and(|(_, block)| !block.kind.on_host())
}

/// Makes a module's variable known as memory.
pub(crate) fn add_global(device: &Device, module: u64, addr: u64, size: u64) {
    let block = Block { size, device: device.ordinal, kind: Kind::Global(module), flags: 0 };
    lock(&runtime().blocks).insert(addr, block);
}

pub(crate) fn remove_globals(module: u64) {
    lock(&runtime().blocks).retain(|_, block| !matches!(block.kind, Kind::Global(m) if m == module));
}

/// First address and device of memory that other processes can have: what `hipMalloc` and its like gave.
pub(crate) fn shareable(ptr: u64) -> Option<(u64, &'static Device)> {
    let (base, block) = lookup(ptr).filter(|(_, block)| matches!(block.kind, Kind::Device))?;
    Some((base, runtime().devices.get(block.device)?))
}

/// Makes memory of another process known, which a device has at this address; its size.
pub(crate) fn add_opened(device: &Device, base: u64) -> Result<u64> {
    let all = device.machine.allocations();
    let (_, size) = *all.iter().find(|(addr, _)| *addr == base).ok_or(HipError::INVALID_DEVICE_POINTER)?;
    let block = Block { size, device: device.ordinal, kind: Kind::Opened, flags: 0 };
    lock(&runtime().blocks).insert(base, block);
    Ok(size)
}

/// Closes memory of another process.
pub(crate) fn close(base: u64) {
    if let Some(block) = lock(&runtime().blocks).remove(&base) {
        release(runtime(), base, &block);
    }
}

/// Copies of registered host memory while a kernel may use it.
pub(crate) struct Mapped {
    /// Address, and the contents before the launch.
    parts: Vec<(u64, Vec<u8>)>,
}

impl Mapped {
    /// Looks whether registered host memory is still there, and gives the device the contents of what it has no other way to. `None` if
    /// there is none of that. Memory that is gone is no longer the devices' memory: a kernel that accesses it faults.
    pub fn enter(device: &Device) -> Option<Mapped> {
        let runtime = runtime();
        let mut parts = vec![];
        for (&addr, block) in lock(&runtime.blocks).iter_mut() {
            let Kind::Registered(how) = block.kind else { continue };
            let there = match how {
                Registration::InPlace => host::populate(addr, block.size),
                Registration::Copied | Registration::ReadOnly => {
                    let mut contents = vec![0; block.size as usize];
                    let there = host::read(addr, &mut contents).is_ok();
                    if there && device.machine.write(addr, &contents).is_ok() && how == Registration::Copied {
                        parts.push((addr, contents));
                    }
                    there
                }
                Registration::Gone => true,
            };
            if !there {
                say!("registered host memory at {addr:#x} is no longer there");
                release(runtime, addr, block);
                block.kind = Kind::Registered(Registration::Gone);
            }
        }
        if parts.is_empty() { None } else { Some(Mapped { parts }) }
    }

    /// Copies back the bytes that the launch has changed, and no others: the program may have written next to them.
    pub fn leave(self, device: &Device) {
        for (addr, before) in &self.parts {
            let mut after = vec![0; before.len()];
            if device.machine.read(*addr, &mut after).is_err() {
                continue;
            }
            let pages = after.chunks(PAGE).zip(before.chunks(PAGE)).enumerate();
            let gone = pages
                .filter(|(_, (a, b))| a != b)
                .any(|(i, (after, before))| write_changes(*addr + (i * PAGE) as u64, after, before).is_err());
            if gone {
                say!("registered host memory at {addr:#x} is no longer there");
            }
        }
    }
}

const PAGE: usize = 4096;

/// Writes the runs of bytes that differ.
fn write_changes(addr: u64, after: &[u8], before: &[u8]) -> Result {
    let mut at = 0;
    while at < after.len() {
        let run = |from: usize, same: bool| {
            after[from..].iter().zip(&before[from..]).take_while(|(a, b)| (a == b) == same).count()
        };
        let start = at + run(at, true);
        let end = start + run(start, false);
        host::write(addr + start as u64, &after[start..end])?;
        at = end;
    }
    Ok(())
}

/// Where the bytes of a copy lie.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    Device(&'static Device),
    Host,
}

/// Finds the bytes from `addr` on. Memory that the runtime knows is checked for its size.
fn side(addr: u64, bytes: u64) -> Result<Side> {
    if addr == 0 || addr.checked_add(bytes).is_none() {
        return Err(HipError::INVALID_VALUE);
    }
    let runtime = runtime();
    if let Some((base, block)) = lookup(addr) {
        if bytes > block.size - (addr - base)
            && !(matches!(block.kind, Kind::Virtual) && virtual_memory::is_mapped(addr, bytes))
        {
            say!(
                "{bytes} bytes at {addr:#x} pass the end of an allocation of {} bytes at {base:#x}",
                block.size
            );
            return Err(HipError::INVALID_VALUE);
        }
        if block.kind.on_host() {
            return Ok(Side::Host);
        }
        let device = runtime.devices.get(block.device).ok_or(HipError::INVALID_VALUE)?;
        device.check()?;
        return Ok(Side::Device(device));
    }
    if Runtime::is_device_address(addr) {
        let ordinal = Runtime::device_of_address(addr);
        if let Some(device) = runtime.devices.get(ordinal)
            && let Err(error) = device.machine.read(addr, &mut [0])
        {
            say!("{error}");
        }
        return Err(HipError::INVALID_VALUE);
    }
    Ok(Side::Host)
}

const HOST_TO_HOST: c_int = 0;
const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const DEVICE_TO_DEVICE: c_int = 3;
const DEFAULT: c_int = 4;
const DEVICE_TO_DEVICE_NO_CU: c_int = 1024;

/// Both sides of a copy. As on hardware the addresses decide, but a direction that names a device wants one.
pub(crate) fn sides(dst: (u64, u64), src: (u64, u64), kind: c_int) -> Result<(Side, Side)> {
    let to_device = match kind {
        HOST_TO_HOST | DEVICE_TO_HOST | DEFAULT => false,
        HOST_TO_DEVICE | DEVICE_TO_DEVICE | DEVICE_TO_DEVICE_NO_CU => true,
        _ => return Err(HipError::INVALID_MEMCPY_DIRECTION),
    };
    let from_device = matches!(kind, DEVICE_TO_HOST | DEVICE_TO_DEVICE | DEVICE_TO_DEVICE_NO_CU);
    let (d, s) = (side(dst.0, dst.1)?, side(src.0, src.1)?);
    for (side, addr, wanted) in [(d, dst.0, to_device), (s, src.0, from_device)] {
        // Mapped host memory is the device's as well.
        if wanted && matches!(side, Side::Host) && lookup(addr).is_none() {
            return Err(HipError::INVALID_VALUE);
        }
    }
    Ok((d, s))
}

/// Copies bytes whose places are known.
pub(crate) fn transfer((d, dst): (Side, u64), (s, src): (Side, u64), bytes: u64) -> Result {
    let gone = |_| HipError::INVALID_VALUE;
    if let (Side::Device(to), Side::Device(from)) = (d, s)
        && to.ordinal == from.ordinal
    {
        return to.machine.copy(dst, src, bytes).map_err(gone);
    }
    let mut buffer = vec![0; CHUNK.min(usize::try_from(bytes).unwrap_or(CHUNK))];
    let mut done = 0;
    while done < bytes {
        let n = (buffer.len() as u64).min(bytes - done);
        let part = &mut buffer[..n as usize];
        match s {
            Side::Device(from) => from.machine.read(src + done, part).map_err(gone)?,
            Side::Host => host::read(src + done, part)?,
        }
        match d {
            Side::Device(to) => to.machine.write(dst + done, part).map_err(gone)?,
            Side::Host => host::write(dst + done, part)?,
        }
        done += n;
    }
    Ok(())
}

pub(crate) fn copy(dst: u64, src: u64, bytes: u64, kind: c_int) -> Result {
    if bytes == 0 {
        return Ok(());
    }
    let (d, s) = sides((dst, bytes), (src, bytes), kind)?;
    transfer((d, dst), (s, src), bytes)
}

/// A copy that the call waits for.
fn copy_now(dst: u64, src: u64, bytes: u64, kind: c_int) -> Result {
    if bytes == 0 {
        return forbid_synchronous();
    }
    work::copy_now(Copy::Linear { dst, src, bytes, kind })
}

fn copy_on(on: u64, dst: u64, src: u64, bytes: u64, kind: c_int) -> Result {
    if bytes == 0 {
        return stream(on).map(drop);
    }
    submit(on, Work::Copy(Copy::Linear { dst, src, bytes, kind }))
}

/// The copy that a `hip_Memcpy2D` describes.
fn rows_by(parameters: *const Memcpy2D) -> Result<Copy> {
    let p = get(parameters)?;
    let side = |side: Side2D| Side3D {
        x_in_bytes: side.x_in_bytes,
        y: side.y,
        z: 0,
        lod: 0,
        memory_type: side.memory_type,
        pad: 0,
        host: side.host,
        device: side.device,
        array: side.array,
        pitch: side.pitch,
        height: 0,
    };
    let (dst, src) = (side(p.dst), side(p.src));
    if p.width_in_bytes > p.dst.pitch.min(p.src.pitch) && p.height > 1 {
        return Err(HipError::INVALID_PITCH_VALUE);
    }
    Ok(Copy::Driver(DriverMemcpy3D {
        src,
        dst,
        width_in_bytes: p.width_in_bytes,
        height: p.height,
        depth: 1,
    }))
}

/// Repeats `pattern` in memory that the runtime knows.
pub(crate) fn fill(dst: u64, pattern: &[u8], count: u64) -> Result {
    if count == 0 {
        return Ok(());
    }
    let bytes = count.checked_mul(pattern.len() as u64).ok_or(HipError::INVALID_VALUE)?;
    if !dst.is_multiple_of(pattern.len() as u64) {
        return Err(HipError::INVALID_VALUE);
    }
    match side(dst, bytes)? {
        Side::Device(device) => device.machine.fill(dst, pattern, bytes).map_err(|_| HipError::INVALID_VALUE),
        Side::Host if lookup(dst).is_none() => Err(HipError::INVALID_VALUE),
        Side::Host => {
            let block = pattern.repeat(CHUNK / pattern.len());
            let mut done = 0;
            while done < bytes {
                let n = (block.len() as u64).min(bytes - done);
                host::write(dst + done, &block[..n as usize])?;
                done += n;
            }
            Ok(())
        }
    }
}

/// # Errors
/// As those of a fill of so many bytes.
pub(crate) fn check_fill(dst: u64, bytes: u64) -> Result {
    match side(dst, bytes)? {
        Side::Host if lookup(dst).is_none() => Err(HipError::INVALID_VALUE),
        _ => Ok(()),
    }
}

/// A fill that the call waits for, unless it is of device memory: the host cannot see that.
pub(crate) fn fill_now(fill: Fill) -> Result {
    forbid_synchronous()?;
    let dst = fill.params.dst;
    if !dst.is_multiple_of(fill.params.element_size.into()) {
        return Err(HipError::INVALID_VALUE);
    }
    if is_device(dst) { submit(0, Work::Fill(fill)) } else { now(|| fill.run()) }
}

fn fill_on(on: u64, dst: u64, value: u32, element: u32, count: u64) -> Result {
    if !dst.is_multiple_of(element.into()) {
        return Err(HipError::INVALID_VALUE);
    }
    if count == 0 {
        return stream(on).map(drop);
    }
    submit(on, Work::Fill(Fill::linear(dst, value, element, count)))
}

/// Rows of bytes.
fn byte_rows(dst: u64, pitch: u64, value: c_int, width: u64, height: u64) -> Result<Fill> {
    if width > pitch && height > 0 {
        return Err(HipError::INVALID_PITCH_VALUE);
    }
    Ok(Fill::rows(dst, pitch, (value as u32) & 0xff, 1, width, height))
}

/// Rows of device memory: their address and pitch.
pub(crate) fn malloc_rows(width: u64, height: u64) -> Result<(u64, u64)> {
    forbid_unsafe()?;
    let pitch = width.checked_next_multiple_of(ALIGN).filter(|p| *p <= MAX_PITCH);
    let pitch = pitch.ok_or(HipError::INVALID_VALUE)?;
    let bytes = pitch.checked_mul(height).ok_or(HipError::OUT_OF_MEMORY)?;
    Ok((malloc(runtime().current()?, bytes)?, pitch))
}

fn malloc_pitch(ptr: *mut u64, pitch: *mut u64, width: u64, height: u64) -> Result {
    put(ptr, 0)?;
    put(pitch, 0)?;
    let (addr, rows) = malloc_rows(width, height)?;
    put(pitch, rows)?;
    put(ptr, addr)
}

/// What `hipPointerGetAttributes` says.
fn attributes(ptr: u64) -> PointerAttributes {
    let mut a = PointerAttributes::zeroed();
    let Some((_, block)) = lookup(ptr) else {
        a.memory_type = memory_type::UNREGISTERED;
        a.device = -2; // hipInvalidDeviceId
        return a;
    };
    a.memory_type = match block.kind {
        Kind::Device | Kind::Graph | Kind::Global(_) | Kind::Opened | Kind::Virtual => memory_type::DEVICE,
        Kind::Host(_) | Kind::Registered(_) => memory_type::HOST,
        Kind::Managed(_) | Kind::ManagedGlobal(_) => memory_type::MANAGED,
    };
    a.device = i32::try_from(block.device).unwrap_or(0);
    a.device_pointer = ptr;
    a.host_pointer = if a.memory_type == memory_type::DEVICE { 0 } else { ptr };
    a.is_managed = (a.memory_type == memory_type::MANAGED).into();
    a.allocation_flags = block.flags;
    a
}

/// `HIP_POINTER_ATTRIBUTE_HOST_POINTER`.
const HOST_POINTER: c_int = 4;

/// One `hipPointer_attribute`, to wherever its type has room.
fn pointer_attribute(data: u64, attribute: c_int, ptr: u64) -> Result {
    let a = attributes(ptr);
    let (base, block) = lookup(ptr).ok_or(HipError::INVALID_VALUE)?;
    match attribute {
        2 => put(data as *mut i32, a.memory_type),
        3 => put(data as *mut u64, a.device_pointer),
        HOST_POINTER if a.host_pointer == 0 => Err(HipError::INVALID_VALUE),
        HOST_POINTER => put(data as *mut u64, a.host_pointer),
        7 => put(data as *mut u64, base), // a number for each allocation: addresses are unique
        8 => put(data as *mut u8, a.is_managed as u8),
        9 => put(data as *mut i32, a.device),
        11 => put(data as *mut u64, base),
        12 => put(data as *mut u64, block.size),
        13 => put(data as *mut u8, 1),
        1 | 5 | 6 | 10 | 14..=17 => Err(HipError::NOT_SUPPORTED),
        _ => Err(HipError::INVALID_VALUE),
    }
}

fn malloc_to(ptr: *mut u64, bytes: u64) -> Result {
    forbid_unsafe()?;
    put(ptr, 0)?;
    put(ptr, malloc(runtime().current()?, bytes)?)
}

/// Frees memory when the work that may use it is done.
fn free_now(ptr: u64) -> Result {
    forbid_unsafe()?;
    if let Some((_, block)) = lookup(ptr) {
        queue::synchronize_device((!block.kind.on_host()).then_some(block.device));
    }
    free(ptr)
}

fn malloc_host_to(ptr: *mut u64, bytes: u64, flags: c_uint, managed: bool) -> Result {
    put(ptr, 0)?;
    put(ptr, malloc_host(bytes, flags, managed)?)
}

/// All flags of `hipHostMalloc`: portable, mapped, write-combined, NUMA, coherent or not, uncached.
const HOST_FLAGS: c_uint = 0x7 | 0x1000_0000 | 0x2000_0000 | COHERENCE;
const COHERENCE: c_uint = 0x4000_0000 | 0x8000_0000;
/// All flags of `hipHostRegister`: portable, mapped, of I/O, read-only; uncached.
const REGISTER_FLAGS: c_uint = 0xf | 0x8000_0000;

fn host_malloc(ptr: *mut u64, bytes: u64, flags: c_uint) -> Result {
    forbid_unsafe()?;
    if flags & !HOST_FLAGS != 0 || flags & COHERENCE == COHERENCE {
        return Err(HipError::INVALID_VALUE);
    }
    malloc_host_to(ptr, bytes, flags, false)
}

api! {
    fn hipMalloc(ptr: *mut u64, bytes: u64) { malloc_to(ptr, bytes) }

    fn hipExtMallocWithFlags(ptr: *mut u64, bytes: u64, flags: c_uint) {
        // Fine-grained, uncached, contiguous: all memory is. A signal has eight bytes.
        const SIGNAL: c_uint = 2;
        if flags > 4 || flags == SIGNAL && bytes != 8 {
            return Err(HipError::INVALID_VALUE);
        }
        malloc_to(ptr, bytes)
    }

    fn hipFree(ptr: u64) { free_now(ptr) }

    fn hipFreeAsync(ptr: u64, on: u64) {
        let stream = stream(on)?;
        if ptr == 0 {
            return Err(HipError::INVALID_VALUE);
        }
        if captures(stream)? || !pool::free(ptr, stream)? {
            return submit(on, Work::Free(ptr));
        }
        Ok(())
    }

    fn hipMallocPitch(ptr: *mut u64, pitch: *mut u64, width: u64, height: u64) {
        malloc_pitch(ptr, pitch, width, height)
    }

    fn hipMemAllocPitch(ptr: *mut u64, pitch: *mut u64, width: u64, height: u64, _element: c_uint) {
        malloc_pitch(ptr, pitch, width, height)
    }

    fn hipHostMalloc(ptr: *mut u64, bytes: u64, flags: c_uint) { host_malloc(ptr, bytes, flags) }
    fn hipHostAlloc(ptr: *mut u64, bytes: u64, flags: c_uint) { host_malloc(ptr, bytes, flags) }
    fn hipExtHostAlloc(ptr: *mut u64, bytes: u64, flags: c_uint) { host_malloc(ptr, bytes, flags) }
    fn hipMallocHost(ptr: *mut u64, bytes: u64) { host_malloc(ptr, bytes, 0) }
    fn hipMemAllocHost(ptr: *mut u64, bytes: u64) { host_malloc(ptr, bytes, 0) }
    fn hipHostFree(ptr: u64) { free_now(ptr) }
    fn hipFreeHost(ptr: u64) { free_now(ptr) }

    fn hipMallocManaged(ptr: *mut u64, bytes: u64, flags: c_uint) {
        if bytes == 0 || !matches!(flags, 1 | 2) {
            return Err(HipError::INVALID_VALUE);
        }
        malloc_host_to(ptr, bytes, flags, true)
    }

    fn hipHostRegister(ptr: u64, bytes: u64, flags: c_uint) {
        forbid_unsafe()?;
        if ptr == 0 || bytes == 0 || bytes > u64::MAX - ptr || flags & !REGISTER_FLAGS != 0 {
            return Err(HipError::INVALID_VALUE);
        }
        // All of it must be there, at least for reading.
        let mut part = vec![0; CHUNK];
        let mut done = 0;
        while done < bytes {
            let n = (part.len() as u64).min(bytes - done);
            host::read(ptr + done, &mut part[..n as usize])?;
            done += n;
        }
        let runtime = runtime();
        let device = runtime.current()?;
        let taken = {
            let mut blocks = lock(&runtime.blocks);
            // What was registered there before may be gone: as in ROCm, the last one counts.
            if matches!(blocks.get(&ptr), Some(Block { kind: Kind::Registered(_), .. }))
                && let Some(block) = blocks.remove(&ptr)
            {
                release(runtime, ptr, &block);
            }
            let inside = blocks.range((Excluded(ptr), Unbounded)).next().is_some_and(|(b, _)| *b < ptr + bytes);
            inside || find(&blocks, ptr).is_some() || virtual_memory::overlaps(ptr, bytes)
        };
        if taken {
            return Err(HipError::HOST_MEMORY_ALREADY_REGISTERED);
        }
        // Devices access whole words.
        let how = match host::populate(ptr, bytes) {
            true if ptr.is_multiple_of(4) => Registration::InPlace,
            false if host::populates() => Registration::ReadOnly,
            _ => Registration::Copied,
        };
        let block = Block { size: bytes, device: device.ordinal, kind: Kind::Registered(how), flags };
        map_host(runtime, ptr, block, "hipHostRegister")
    }

    fn hipHostUnregister(ptr: u64) {
        forbid_unsafe()?;
        if ptr == 0 {
            return Err(HipError::INVALID_VALUE);
        }
        let runtime = runtime();
        let mut blocks = lock(&runtime.blocks);
        match blocks.get(&ptr) {
            Some(Block { kind: Kind::Registered(_), .. }) => {}
            _ => return Err(HipError::HOST_MEMORY_NOT_REGISTERED),
        }
        drop(blocks);
        queue::synchronize_device(None);
        blocks = lock(&runtime.blocks);
        if let Some(block) = blocks.remove(&ptr) {
            release(runtime, ptr, &block);
        }
        Ok(())
    }

    fn hipHostGetDevicePointer(ptr: *mut u64, host: u64, flags: c_uint) {
        let (_, block) = lookup(host).ok_or(HipError::INVALID_VALUE)?;
        if flags != 0 || !block.kind.on_host() {
            return Err(HipError::INVALID_VALUE);
        }
        put(ptr, host)
    }

    fn hipHostGetFlags(flags: *mut c_uint, host: u64) {
        let (_, block) = lookup(host).ok_or(HipError::INVALID_VALUE)?;
        if !matches!(block.kind, Kind::Host(_) | Kind::Registered(_)) {
            return Err(HipError::INVALID_VALUE);
        }
        put(flags, block.flags)
    }

    fn hipMemcpy(dst: u64, src: u64, bytes: u64, kind: c_int) { copy_now(dst, src, bytes, kind) }

    fn hipMemcpyAsync(dst: u64, src: u64, bytes: u64, kind: c_int, on: u64) {
        copy_on(on, dst, src, bytes, kind)
    }

    fn hipMemcpyWithStream(dst: u64, src: u64, bytes: u64, kind: c_int, on: u64) {
        copy_on(on, dst, src, bytes, kind)
    }

    fn hipMemcpyHtoD(dst: u64, src: u64, bytes: u64) { copy_now(dst, src, bytes, HOST_TO_DEVICE) }
    fn hipMemcpyDtoH(dst: u64, src: u64, bytes: u64) { copy_now(dst, src, bytes, DEVICE_TO_HOST) }
    fn hipMemcpyDtoD(dst: u64, src: u64, bytes: u64) { copy_now(dst, src, bytes, DEVICE_TO_DEVICE) }

    fn hipMemcpyHtoDAsync(dst: u64, src: u64, bytes: u64, on: u64) {
        copy_on(on, dst, src, bytes, HOST_TO_DEVICE)
    }

    fn hipMemcpyDtoHAsync(dst: u64, src: u64, bytes: u64, on: u64) {
        copy_on(on, dst, src, bytes, DEVICE_TO_HOST)
    }

    fn hipMemcpyDtoDAsync(dst: u64, src: u64, bytes: u64, on: u64) {
        copy_on(on, dst, src, bytes, DEVICE_TO_DEVICE)
    }

    fn hipMemcpyPeer(dst: u64, dst_device: c_int, src: u64, src_device: c_int, bytes: u64) {
        runtime().device(dst_device)?;
        runtime().device(src_device)?;
        forbid_synchronous()?;
        // The host cannot see device memory, and does not wait.
        if is_device(dst) && is_device(src) {
            return copy_on(0, dst, src, bytes, DEVICE_TO_DEVICE);
        }
        copy_now(dst, src, bytes, DEVICE_TO_DEVICE)
    }

    fn hipMemcpyPeerAsync(dst: u64, dst_device: c_int, src: u64, src_device: c_int, bytes: u64, on: u64) {
        stream(on)?;
        runtime().device(dst_device)?;
        runtime().device(src_device)?;
        copy_on(on, dst, src, bytes, DEVICE_TO_DEVICE)
    }

    fn hipMemcpy2D(
        dst: u64,
        dst_pitch: u64,
        src: u64,
        src_pitch: u64,
        width: u64,
        height: u64,
        kind: c_int,
    ) {
        work::copy_now(Copy::rows((dst, dst_pitch), (src, src_pitch), width, height, kind))
    }

    fn hipMemcpy2DAsync(
        dst: u64,
        dst_pitch: u64,
        src: u64,
        src_pitch: u64,
        width: u64,
        height: u64,
        kind: c_int,
        on: u64,
    ) {
        submit(on, Work::Copy(Copy::rows((dst, dst_pitch), (src, src_pitch), width, height, kind)))
    }

    fn hipMemcpyParam2D(parameters: *const Memcpy2D) { work::copy_now(rows_by(parameters)?) }
    fn hipDrvMemcpy2DUnaligned(parameters: *const Memcpy2D) { work::copy_now(rows_by(parameters)?) }

    fn hipMemcpyParam2DAsync(parameters: *const Memcpy2D, on: u64) {
        submit(on, Work::Copy(rows_by(parameters)?))
    }

    fn hipMemset(dst: u64, value: c_int, bytes: u64) { fill_now(Fill::linear(dst, (value as u32) & 0xff, 1, bytes)) }
    fn hipMemsetD8(dst: u64, value: u8, count: u64) { fill_now(Fill::linear(dst, value.into(), 1, count)) }
    fn hipMemsetD16(dst: u64, value: u16, count: u64) { fill_now(Fill::linear(dst, value.into(), 2, count)) }
    fn hipMemsetD32(dst: u64, value: c_int, count: u64) { fill_now(Fill::linear(dst, value as u32, 4, count)) }

    fn hipMemsetAsync(dst: u64, value: c_int, bytes: u64, on: u64) {
        fill_on(on, dst, (value as u32) & 0xff, 1, bytes)
    }

    fn hipMemsetD8Async(dst: u64, value: u8, count: u64, on: u64) { fill_on(on, dst, value.into(), 1, count) }
    fn hipMemsetD16Async(dst: u64, value: u16, count: u64, on: u64) { fill_on(on, dst, value.into(), 2, count) }
    fn hipMemsetD32Async(dst: u64, value: c_int, count: u64, on: u64) { fill_on(on, dst, value as u32, 4, count) }

    fn hipMemset2D(dst: u64, pitch: u64, value: c_int, width: u64, height: u64) {
        fill_now(byte_rows(dst, pitch, value, width, height)?)
    }

    fn hipMemset2DAsync(dst: u64, pitch: u64, value: c_int, width: u64, height: u64, on: u64) {
        submit(on, Work::Fill(byte_rows(dst, pitch, value, width, height)?))
    }

    fn hipPointerGetAttributes(result: *mut PointerAttributes, ptr: u64) {
        if ptr == 0 {
            return Err(HipError::INVALID_VALUE);
        }
        put(result, attributes(ptr))
    }

    fn hipPointerGetAttribute(data: u64, attribute: c_int, ptr: u64) { pointer_attribute(data, attribute, ptr) }

    fn hipDrvPointerGetAttributes(count: c_uint, list: *const c_int, data: *const u64, ptr: u64) {
        for i in 0..count as usize {
            let (target, attribute) = (get(data.wrapping_add(i))?, get(list.wrapping_add(i))?);
            // One that the memory has not is null here, and no error.
            match attribute {
                HOST_POINTER => put(target as *mut u64, attributes(ptr).host_pointer)?,
                _ => pointer_attribute(target, attribute, ptr)?,
            }
        }
        if count == 0 { Err(HipError::INVALID_VALUE) } else { Ok(()) }
    }

    fn hipMemGetAddressRange(base: *mut u64, size: *mut u64, ptr: u64) {
        let (first, block) = lookup(ptr).ok_or(HipError::NOT_FOUND)?;
        put_if(base, first)?;
        put_if(size, block.size)
    }

    fn hipMemPtrGetInfo(ptr: u64, size: *mut u64) {
        let (_, block) = lookup(ptr).ok_or(HipError::INVALID_VALUE)?;
        put(size, block.size)
    }

    fn hipStreamAttachMemAsync(on: u64, ptr: u64, bytes: u64, _flags: c_uint) {
        stream(on)?;
        side(ptr, bytes).map(drop)
    }
}
