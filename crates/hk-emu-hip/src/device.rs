//! Devices: initialisation, properties, attributes, contexts.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::atomic::Ordering::Relaxed;

use bytemuck::Zeroable;
use hk_codeobj::Arch;
use hk_emu::Costs;

use crate::abi::{PropertiesR0000, PropertiesR0600};
use crate::capture::forbid_any;
use crate::error::{self, HipError, Result};
use crate::host::{get, put, put_if, put_string, string};
use crate::runtime::{CONTEXTS, Device, Tag, api, call, last_error, lock, runtime, some_device};
use crate::{ipc, memory, pool, queue};

/// HIP 6.4: `10 000 000 * major + 100 000 * minor + patch`.
const VERSION: c_int = 60_400_000;
/// LDS, registers and threads of a compute unit.
const THREADS_PER_CU: i32 = 2048;
const REGISTERS: i32 = 65_536;
/// The largest grid in y and z.
const MAX_GRID_YZ: i32 = 65_536;
const L2_BYTES: i32 = 4 << 20;
const BUS_BITS: i32 = 8192;
const TEXTURE_ALIGN: i32 = 256;
pub(crate) const MAX_PITCH: u64 = i32::MAX as u64;

/// What one part of a target has.
struct Part {
    name: &'static str,
    compute_units: i32,
    clock_khz: i32,
    memory_clock_khz: i32,
    memory_bytes: u64,
    minor: i32,
}

impl Device {
    /// MI300X and MI350X, with the compute units of the part whose time is modelled.
    fn part(&self) -> Part {
        let clock_khz = 1000 * Costs::of(self.arch).engine_mhz as i32;
        let modelled = self.clock.as_ref().map(|clock| clock.part.cus() as i32);
        if self.arch == Arch::Gfx950 {
            Part {
                name: "MI350X",
                compute_units: modelled.unwrap_or(256),
                clock_khz,
                memory_clock_khz: 2_000_000,
                memory_bytes: 288 << 30,
                minor: 5,
            }
        } else {
            Part {
                name: "MI300X",
                compute_units: modelled.unwrap_or(304),
                clock_khz,
                memory_clock_khz: 1_300_000,
                memory_bytes: 192 << 30,
                minor: 4,
            }
        }
    }

    pub fn memory_bytes(&self) -> u64 {
        self.memory.unwrap_or(self.part().memory_bytes)
    }

    /// Bytes that the program can still allocate.
    pub fn free_bytes(&self) -> u64 {
        let left = self.memory_bytes().saturating_sub(self.used.load(Relaxed));
        if self.memory.is_some() { left } else { left.min(memory::available()) }
    }

    pub fn compute_units(&self) -> i32 {
        self.part().compute_units
    }

    /// `10 * major + minor` of the target.
    pub fn version(&self) -> i32 {
        90 + self.part().minor
    }

    fn name(&self) -> String {
        let modelled = self.clock.as_ref().map(|clock| clock.part.name.to_uppercase());
        format!("hk-emu {} ({})", self.arch, modelled.as_deref().unwrap_or(self.part().name))
    }

    fn gcn_arch_name(&self) -> String {
        format!("{}:sramecc+:xnack-", self.arch)
    }

    fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"hk-emu-device-00";
        uuid[15] += self.slot as u8;
        uuid
    }

    fn properties(&self) -> PropertiesR0600 {
        let attribute = |n| self.attribute(n).unwrap_or(0);
        let part = self.part();
        let mut p = PropertiesR0600::zeroed();
        fill(&mut p.name, &self.name());
        p.uuid = self.uuid();
        p.total_global_mem = self.memory_bytes();
        p.shared_mem_per_block = self.arch.lds_bytes().into();
        p.regs_per_block = REGISTERS;
        p.warp_size = attribute(87);
        p.mem_pitch = MAX_PITCH;
        p.max_threads_per_block = attribute(56);
        p.max_threads_dim = [26, 27, 28].map(attribute);
        p.max_grid_size = [29, 30, 31].map(attribute);
        p.clock_rate = part.clock_khz;
        p.total_const_mem = MAX_PITCH;
        p.major = 9;
        p.minor = part.minor;
        p.texture_alignment = TEXTURE_ALIGN as u64;
        p.texture_pitch_alignment = TEXTURE_ALIGN as u64;
        p.multi_processor_count = part.compute_units;
        p.can_map_host_memory = attribute(3);
        p.concurrent_kernels = attribute(8);
        p.pci_bus_id = attribute(67);
        p.unified_addressing = attribute(85);
        p.memory_clock_rate = part.memory_clock_khz;
        p.memory_bus_width = BUS_BITS;
        p.l2_cache_size = L2_BYTES;
        p.max_threads_per_multi_processor = THREADS_PER_CU;
        p.stream_priorities_supported = attribute(78);
        p.shared_mem_per_multiprocessor = self.arch.lds_bytes().into();
        p.regs_per_multiprocessor = REGISTERS;
        p.managed_memory = attribute(24);
        p.concurrent_managed_access = attribute(9);
        p.host_native_atomic_supported = attribute(15);
        p.cooperative_launch = attribute(10);
        p.can_use_host_pointer_for_registered_mem = attribute(4);
        p.shared_mem_per_block_optin = self.arch.lds_bytes().into();
        p.max_blocks_per_multi_processor = attribute(25);
        p.host_register_supported = attribute(90);
        p.memory_pools_supported = attribute(88);
        fill(&mut p.gcn_arch_name, &self.gcn_arch_name());
        p.max_shared_memory_per_multi_processor = self.arch.lds_bytes().into();
        p.clock_instruction_rate = attribute(10_000);
        p.arch = ARCH_FEATURES;
        p
    }

    fn properties_r0000(&self) -> PropertiesR0000 {
        let new = self.properties();
        let mut p = PropertiesR0000::zeroed();
        p.name = new.name;
        p.total_global_mem = new.total_global_mem;
        p.shared_mem_per_block = new.shared_mem_per_block;
        p.regs_per_block = new.regs_per_block;
        p.warp_size = new.warp_size;
        p.max_threads_per_block = new.max_threads_per_block;
        p.max_threads_dim = new.max_threads_dim;
        p.max_grid_size = new.max_grid_size;
        p.clock_rate = new.clock_rate;
        p.memory_clock_rate = new.memory_clock_rate;
        p.memory_bus_width = new.memory_bus_width;
        p.total_const_mem = new.total_const_mem;
        p.major = new.major;
        p.minor = new.minor;
        p.multi_processor_count = new.multi_processor_count;
        p.l2_cache_size = new.l2_cache_size;
        p.max_threads_per_multi_processor = new.max_threads_per_multi_processor;
        p.clock_instruction_rate = new.clock_instruction_rate;
        p.arch = new.arch;
        p.concurrent_kernels = new.concurrent_kernels;
        p.pci_bus_id = new.pci_bus_id;
        p.max_shared_memory_per_multi_processor = new.max_shared_memory_per_multi_processor;
        p.can_map_host_memory = new.can_map_host_memory;
        p.gcn_arch = if self.arch == Arch::Gfx950 { 950 } else { 942 };
        p.gcn_arch_name = new.gcn_arch_name;
        p.mem_pitch = new.mem_pitch;
        p.texture_alignment = new.texture_alignment;
        p.texture_pitch_alignment = new.texture_pitch_alignment;
        p.managed_memory = new.managed_memory;
        p.concurrent_managed_access = new.concurrent_managed_access;
        p.cooperative_launch = new.cooperative_launch;
        p
    }

    /// An attribute by its number in `hipDeviceAttribute_t`, which is the same in HIP 5.2 to 7.
    fn attribute(&self, number: c_int) -> Option<c_int> {
        let part = self.part();
        let int = |bytes: u64| c_int::try_from(bytes).unwrap_or(c_int::MAX);
        Some(match number {
            3 | 4 => 1,                                            // mapped, registered host memory
            5 => part.clock_khz,                                   // ClockRate
            8 | 9 => 1,                        // ConcurrentKernels, ConcurrentManagedAccess
            10 => 1,                           // CooperativeLaunch
            15 => 1,                           // HostNativeAtomicSupported
            19 => L2_BYTES,                    // L2CacheSize
            23 => 9,                           // ComputeCapabilityMajor
            24 => 1,                           // ManagedMemory
            25 => 32,                          // MaxBlocksPerMultiProcessor
            26..=28 | 55 | 56 => 1024,         // MaxBlockDim, MaxThreadsDim, MaxThreadsPerBlock
            29 => c_int::MAX,                  // MaxGridDimX
            30 | 31 => MAX_GRID_YZ,            // MaxGridDimY, Z
            57 => THREADS_PER_CU,              // MaxThreadsPerMultiProcessor
            58 => int(MAX_PITCH),              // MaxPitch
            59 => BUS_BITS,                    // MemoryBusWidth
            60 => part.memory_clock_khz,       // MemoryClockRate
            61 => part.minor,                  // ComputeCapabilityMinor
            63 | 10_015 => part.compute_units, // MultiprocessorCount, physical
            67 => self.slot as c_int + 1,      // PciBusId
            71 | 72 => REGISTERS,              // MaxRegistersPerBlock, per multiprocessor
            74..=76 | 10_002 => int(self.arch.lds_bytes().into()), // shared memory per block, multiprocessor
            78 => 1,                           // StreamPrioritiesSupported
            81 | 82 => TEXTURE_ALIGN,          // TextureAlignment, pitch alignment
            83 => int(MAX_PITCH),              // TotalConstantMemory
            84 => int(self.memory_bytes()),    // TotalGlobalMem
            85 => 1,                           // UnifiedAddressing
            87 => int(self.arch.wave_size().into()), // WarpSize
            88..=90 => 1,                      // MemoryPools, VirtualMemoryManagement, HostRegister
            10_000 | 10_017 => 100_000,        // ClockInstructionRate, WallClockRate
            // What these devices have not: textures, cooperative launches on several devices, ..
            0..=91 | 10_001..=10_017 => 0,
            _ => return None,
        })
    }
}

/// `hipDeviceArch_t`: 32 and 64-bit atomics, double, warp votes, ballot, shuffles, fences and 3-D grids.
const ARCH_FEATURES: u32 = 0x97ff;

fn fill(field: &mut [u8; 256], text: &str) {
    field[..text.len()].copy_from_slice(text.as_bytes());
}

/// `hipLimit_t`.
const STACK: c_int = 0;
const HEAP: c_int = 2;
/// Far more than there are.
const LIMITS: c_int = 0x100;

/// The device of a context handle.
fn context(handle: u64) -> Result<&'static Device> {
    let id = Tag::Context.id(handle).ok_or(HipError::INVALID_CONTEXT)?;
    runtime().devices.get(id as usize).ok_or(HipError::INVALID_CONTEXT)
}

fn context_of(device: &Device) -> u64 {
    Tag::Context.handle(device.ordinal as u64)
}

fn known_device(ordinal: c_int) -> Result<&'static Device> {
    runtime().device(ordinal)
}

fn pci_bus_id(device: &Device) -> String {
    format!("0000:{:02x}:00.0", device.slot + 1)
}

/// Waits for the current device.
fn synchronize() -> Result {
    let device = runtime().current()?;
    queue::synchronize_device(Some(device.ordinal));
    pool::settle();
    device.check()
}

/// The first of the devices that are most like what is wanted; either form of the properties.
macro_rules! choose {
    ($chosen:expr, $wanted:expr, $properties:ident) => {{
        let w = get($wanted)?;
        let likeness = |device: &&Device| {
            let p = device.$properties();
            let alike = [
                p.name == w.name,
                p.gcn_arch_name == w.gcn_arch_name,
                (p.major, p.minor) == (w.major, w.minor),
                p.total_global_mem >= w.total_global_mem,
                p.multi_processor_count >= w.multi_processor_count,
            ];
            alike.into_iter().filter(|alike| *alike).count()
        };
        let best = runtime().devices.iter().rev().max_by_key(likeness);
        put($chosen, best.ok_or(HipError::NO_DEVICE)?.ordinal as c_int)
    }};
}

/// Frees everything that the program made on a device, and clears the failure of a kernel.
fn reset(device: &Device) {
    let runtime = runtime();
    queue::synchronize_device(Some(device.ordinal));
    runtime.events.retain(|event| event.device != device.ordinal);
    runtime.streams.retain(|stream| stream.device != device.ordinal);
    runtime.functions.retain(|function| function.module.device != device.ordinal);
    runtime.modules.retain(|module| module.device != device.ordinal);
    crate::register::unload(device);
    memory::release_all(device);
    ipc::reset(device);
    device.console.reset(&device.machine);
    pool::reset(device);
    device.recover();
}

/// Success for a code whose name or text is not that of an unknown one, and for the unknown error itself.
fn known(code: c_int, string: &CStr, unknown: &CStr) -> Result {
    if string != unknown || code == HipError::UNKNOWN.0 { Ok(()) } else { Err(HipError::INVALID_VALUE) }
}

api! {
    fn hipInit(flags: c_uint) {
        if flags != 0 {
            return Err(HipError::INVALID_VALUE);
        }
        runtime().current().map(drop)
    }

    fn hipChooseDevice(device: *mut c_int, wanted: *const PropertiesR0000) {
        choose!(device, wanted, properties_r0000)
    }
    fn hipChooseDeviceR0000(device: *mut c_int, wanted: *const PropertiesR0000) {
        choose!(device, wanted, properties_r0000)
    }
    fn hipChooseDeviceR0600(device: *mut c_int, wanted: *const PropertiesR0600) {
        choose!(device, wanted, properties)
    }

    fn hipExtGetLinkTypeAndHopCount(a: c_int, b: c_int, link: *mut u32, hops: *mut u32) {
        // `HSA_AMD_LINK_INFO_TYPE_XGMI`: every device has a link to every other.
        const XGMI: u32 = 4;
        if a < 0 || b < 0 || a == b || link.is_null() || hops.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        known_device(a)?;
        known_device(b)?;
        put(link, XGMI)?;
        put(hops, 1)
    }

    fn hipGetDevice(ordinal: *mut c_int) { put(ordinal, runtime().current()?.ordinal as c_int) }

    fn hipSetDevice(ordinal: c_int) {
        runtime().set_current(known_device(ordinal)?);
        Ok(())
    }

    fn hipSetValidDevices(list: *const c_int, len: c_int) {
        if len < 0 || len as usize > runtime().devices.len() {
            return Err(HipError::INVALID_VALUE);
        }
        for i in 0..len as usize {
            known_device(get(list.wrapping_add(i))?)?;
        }
        Ok(())
    }

    fn hipDeviceGet(device: *mut c_int, ordinal: c_int) {
        put(device, known_device(ordinal)?.ordinal as c_int)
    }

    fn hipDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        put_string(name, len, &known_device(device)?.name())
    }

    fn hipDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) { put(uuid, known_device(device)?.uuid()) }

    fn hipDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) {
        put_string(id, len, &pci_bus_id(known_device(device)?))
    }

    fn hipDeviceGetByPCIBusId(device: *mut c_int, id: *const c_char) {
        let id = string(id)?.to_lowercase();
        let found = runtime().devices.iter().find(|d| pci_bus_id(d).ends_with(&id) && id.len() >= 7);
        put(device, found.ok_or(HipError::INVALID_VALUE)?.ordinal as c_int)
    }

    fn hipDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, device: c_int) {
        let version = known_device(device)?.version();
        put(major, version / 10)?;
        put(minor, version % 10)
    }

    fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        let known = known_device(device)?.attribute(attribute);
        put(value, known.ok_or(HipError::INVALID_VALUE)?)
    }

    fn hipDeviceTotalMem(bytes: *mut u64, device: c_int) { put(bytes, known_device(device)?.memory_bytes()) }

    fn hipGetDeviceProperties(properties: *mut PropertiesR0000, device: c_int) {
        put(properties, known_device(device)?.properties_r0000())
    }

    fn hipGetDevicePropertiesR0000(properties: *mut PropertiesR0000, device: c_int) {
        put(properties, known_device(device)?.properties_r0000())
    }

    fn hipGetDevicePropertiesR0600(properties: *mut PropertiesR0600, device: c_int) {
        put(properties, known_device(device)?.properties())
    }

    fn hipDeviceSynchronize() {
        forbid_any(HipError::STREAM_CAPTURE_UNSUPPORTED)?;
        synchronize()
    }

    fn hipDeviceReset() {
        reset(runtime().current()?);
        Ok(())
    }

    fn hipMemGetInfo(free: *mut u64, total: *mut u64) {
        let device = runtime().current()?;
        put_if(free, device.free_bytes())?;
        put_if(total, device.memory_bytes())
    }

    // Hints without effect here.
    fn hipDeviceSetCacheConfig(_config: c_int) { Ok(()) }
    fn hipDeviceGetCacheConfig(config: *mut c_int) { put(config, 0) }
    fn hipDeviceSetSharedMemConfig(config: c_int) {
        if (0..=2).contains(&config) { Ok(()) } else { Err(HipError::INVALID_VALUE) }
    }

    // Banks of four bytes.
    fn hipDeviceGetSharedMemConfig(config: *mut c_int) { put(config, 1) }

    fn hipSetDeviceFlags(flags: c_uint) {
        const MAP_HOST: c_uint = 8;
        const RESIZE_LOCAL: c_uint = 16;
        let device = runtime().current()?;
        let schedule = flags & !(MAP_HOST | RESIZE_LOCAL);
        // Automatic, spin, yield, blocking.
        if !matches!(schedule, 0 | 1 | 2 | 4) {
            return Err(HipError::INVALID_VALUE);
        }
        device.flags.store(schedule, Relaxed);
        Ok(())
    }

    fn hipGetDeviceFlags(flags: *mut c_uint) { put(flags, runtime().current()?.flags.load(Relaxed)) }
    fn hipProfilerStart() { Ok(()) }
    fn hipProfilerStop() { Ok(()) }

    fn hipDeviceGetLimit(value: *mut u64, limit: c_int) {
        if value.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        let device = runtime().current()?;
        match limit {
            STACK => put(value, device.stack_limit.load(Relaxed)),
            HEAP => put(value, device.heap_limit.load(Relaxed)),
            _ => Err(HipError::UNSUPPORTED_LIMIT),
        }
    }

    // Kernels have the stack that their metadata asks for. Their heap is as large as it is at its first use.
    fn hipDeviceSetLimit(limit: c_int, value: u64) {
        // Bytes that a thread can have, as the hardware's registers count them.
        const MAX_STACK: u64 = (128 << 10) - 16;
        let device = runtime().current()?;
        match limit {
            STACK if value <= MAX_STACK => device.stack_limit.store(value, Relaxed),
            HEAP if value <= device.memory_bytes() => device.heap_limit.store(value, Relaxed),
            STACK | HEAP | LIMITS.. => return Err(HipError::INVALID_VALUE),
            _ => return Err(HipError::UNSUPPORTED_LIMIT),
        }
        Ok(())
    }

    fn hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        let (device, peer) = (known_device(device)?, known_device(peer)?);
        put(can, device.machine.can_access_peer(&peer.machine).is_ok().into())
    }

    fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint) {
        let (device, peer) = (runtime().current()?, known_device(peer)?);
        if flags != 0 || peer.ordinal == device.ordinal {
            return Err(HipError::INVALID_VALUE);
        }
        device.machine.enable_peer(&peer.machine).map_err(|_| HipError::PEER_ACCESS_UNSUPPORTED)?;
        let new = lock(&device.peers).insert(peer.ordinal);
        if new { Ok(()) } else { Err(HipError::PEER_ACCESS_ALREADY_ENABLED) }
    }

    fn hipDeviceDisablePeerAccess(peer: c_int) {
        let (device, peer) = (runtime().current()?, known_device(peer)?);
        if !lock(&device.peers).remove(&peer.ordinal) {
            return Err(HipError::PEER_ACCESS_NOT_ENABLED);
        }
        // Work in flight has the access that it had when it was queued.
        queue::synchronize_device(Some(device.ordinal));
        if !pool::is_shared(peer.ordinal, device.ordinal) {
            device.machine.disable_peer(&peer.machine);
        }
        Ok(())
    }

    fn hipDeviceGetP2PAttribute(value: *mut c_int, attribute: c_int, device: c_int, peer: c_int) {
        let (device, peer) = (known_device(device)?, known_device(peer)?);
        if !(0..4).contains(&attribute) || device.ordinal == peer.ordinal {
            return Err(HipError::INVALID_VALUE);
        }
        // Access, and atomics over the link; no rank of performance, no arrays.
        let has = matches!(attribute, 1 | 2) && device.machine.can_access_peer(&peer.machine).is_ok();
        put(value, has.into())
    }

    fn hipCtxCreate(ctx: *mut u64, _flags: c_uint, device: c_int) {
        let device = known_device(device)?;
        put(ctx, context_of(device))?;
        CONTEXTS.with_borrow_mut(|c| c.push(runtime().current().map_or(0, |d| d.ordinal)));
        runtime().set_current(device);
        Ok(())
    }

    fn hipCtxDestroy(ctx: u64) { context(ctx).map(drop) }

    fn hipCtxPushCurrent(ctx: u64) {
        let device = context(ctx)?;
        CONTEXTS.with_borrow_mut(|c| c.push(runtime().current().map_or(0, |d| d.ordinal)));
        runtime().set_current(device);
        Ok(())
    }

    fn hipCtxPopCurrent(ctx: *mut u64) {
        let current = runtime().current()?;
        let below = CONTEXTS.with_borrow_mut(Vec::pop).ok_or(HipError::INVALID_CONTEXT)?;
        put_if(ctx, context_of(current))?;
        runtime().set_current(runtime().device(below as c_int)?);
        Ok(())
    }

    fn hipCtxSetCurrent(ctx: u64) {
        if ctx != 0 {
            runtime().set_current(context(ctx)?);
        }
        Ok(())
    }

    fn hipCtxGetCurrent(ctx: *mut u64) { put(ctx, context_of(runtime().current()?)) }
    fn hipCtxGetDevice(device: *mut c_int) { put(device, runtime().current()?.ordinal as c_int) }

    fn hipCtxGetApiVersion(ctx: u64, version: *mut c_int) {
        if ctx != 0 {
            context(ctx)?;
        }
        put(version, VERSION)
    }

    fn hipCtxSynchronize() { synchronize() }
    fn hipCtxGetFlags(flags: *mut c_uint) { put(flags, 0) }
    fn hipCtxSetCacheConfig(_config: c_int) { Ok(()) }
    fn hipCtxGetCacheConfig(config: *mut c_int) { put(config, 0) }
    fn hipCtxSetSharedMemConfig(_config: c_int) { Ok(()) }
    fn hipCtxGetSharedMemConfig(config: *mut c_int) { put(config, 0) }

    fn hipDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        known_device(device)?;
        put_if(flags, 0)?;
        put_if(active, 1)
    }

    fn hipDevicePrimaryCtxRetain(ctx: *mut u64, device: c_int) { put(ctx, context_of(known_device(device)?)) }
    fn hipDevicePrimaryCtxRelease(device: c_int) { known_device(device).map(drop) }

    fn hipDevicePrimaryCtxReset(device: c_int) {
        reset(known_device(device)?);
        Ok(())
    }

    fn hipDevicePrimaryCtxSetFlags(device: c_int, _flags: c_uint) { known_device(device).map(drop) }

    fn hipDrvGetErrorName(code: c_int, name: *mut u64) {
        put(name, error::name(code).as_ptr() as u64)?;
        known(code, error::name(code), error::name(HipError::UNKNOWN.0))
    }

    fn hipDrvGetErrorString(code: c_int, text: *mut u64) {
        put(text, error::text(code).as_ptr() as u64)?;
        known(code, error::text(code), error::text(HipError::UNKNOWN.0))
    }
}

#[unsafe(no_mangle)]
extern "C" fn hipGetDeviceCount(count: *mut c_int) -> c_int {
    call(|| {
        put(count, runtime().devices.len() as c_int)?;
        some_device()
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipDriverGetVersion(version: *mut c_int) -> c_int {
    call(|| put(version, VERSION))
}

#[unsafe(no_mangle)]
extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> c_int {
    call(|| put(version, VERSION))
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorName(code: c_int) -> *const c_char {
    error::name(code).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorString(code: c_int) -> *const c_char {
    error::text(code).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn hipGetLastError() -> c_int {
    last_error(true)
}

#[unsafe(no_mangle)]
extern "C" fn hipExtGetLastError() -> c_int {
    last_error(true)
}

#[unsafe(no_mangle)]
extern "C" fn hipPeekAtLastError() -> c_int {
    last_error(false)
}

/// Exported functions that need no device, or whose result is no `hipError_t` of the call itself.
pub(crate) const MORE_NAMES: &[&str] = &[
    "hipGetDeviceCount",
    "hipDriverGetVersion",
    "hipRuntimeGetVersion",
    "hipGetErrorName",
    "hipGetErrorString",
    "hipGetLastError",
    "hipExtGetLastError",
    "hipPeekAtLastError",
];
