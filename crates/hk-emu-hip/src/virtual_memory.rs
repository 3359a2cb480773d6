//! Virtual memory management: address space, physical memory, and mappings of one to the other.
//!
//! Physical memory is a file in the host's memory, so that it can be at several addresses. A mapping is at its address for the host as
//! well, and for those devices that the program gives access. Access to read is access to write, too: neither the host nor a device
//! could be stopped from writing by an error.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use bytemuck::{Pod, Zeroable};

use crate::error::{HipError, Result};
use crate::host::{get, put};
use crate::memory::{self, Block, Kind};
use crate::queue;
use crate::runtime::{Device, Tag, api, lock, runtime};

const INVALID: HipError = HipError::INVALID_VALUE;

/// Bytes of a page, of which everything is a multiple, and those of a large one.
const GRANULARITY: u64 = 4096;
const RECOMMENDED: u64 = 2 << 20;

/// What the system calls files of physical memory.
const NAME: &CStr = c"hipMemCreate";

const PINNED: c_int = 1;
const ON_DEVICE: c_int = 1;
const FILE_DESCRIPTOR: c_int = 1;

/// `hipMemAccessFlags`.
const READ: c_int = 1;
const READ_WRITE: c_int = 3;

/// `hipMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Location {
    kind: c_int,
    id: c_int,
}

impl Location {
    fn device(self) -> Result<&'static Device> {
        let ordinal = usize::try_from(self.id).ok().filter(|_| self.kind == ON_DEVICE).ok_or(INVALID)?;
        runtime().devices.get(ordinal).ok_or(INVALID)
    }
}

/// `hipMemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Access {
    location: Location,
    flags: c_int,
}

/// `hipMemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Properties {
    kind: c_int,
    handle_kind: c_int,
    location: Location,
    win32: u64,
    compression: u8,
    rdma: u8,
    usage: u16,
    pad: u32,
}

impl Properties {
    fn device(&self) -> Result<&'static Device> {
        if self.kind == PINNED { self.location.device() } else { Err(INVALID) }
    }
}

/// Physical memory. It goes with its handle and the last mapping.
struct Physical {
    file: File,
    bytes: u64,
    properties: Properties,
    device: &'static Device,
}

impl Physical {
    fn new(bytes: u64, properties: Properties) -> Result<Physical> {
        let device = properties.device()?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(INVALID);
        }
        memory::check_room(device, bytes)?;
        // SAFETY: a C string.
        let descriptor = unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(HipError::OUT_OF_MEMORY);
        }
        // SAFETY: new, and nobody else's.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(bytes).map_err(|_| HipError::OUT_OF_MEMORY)?;
        Ok(Physical::of(file, bytes, properties, device))
    }

    fn of(file: File, bytes: u64, properties: Properties, device: &'static Device) -> Physical {
        device.used.fetch_add(bytes, Relaxed);
        Physical { file, bytes, properties, device }
    }

    /// That of a descriptor, which another process may have made.
    fn import(descriptor: c_int) -> Result<Physical> {
        let path = format!("/proc/self/fd/{descriptor}");
        let name = std::fs::read_link(&path).map_err(|_| INVALID)?;
        if !name.to_string_lossy().starts_with(&format!("/memfd:{}", NAME.to_string_lossy())) {
            return Err(INVALID);
        }
        let file = File::options().read(true).write(true).open(path).map_err(|_| INVALID)?;
        let bytes = file.metadata().map_err(|_| INVALID)?.len();
        let device = runtime().current()?;
        let location = Location { kind: ON_DEVICE, id: device.ordinal as c_int };
        let made =
            Properties { kind: PINNED, handle_kind: FILE_DESCRIPTOR, location, ..Properties::zeroed() };
        Ok(Physical::of(file, bytes, made, device))
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        self.device.used.fetch_sub(self.bytes, Relaxed);
    }
}

/// Address space that nothing else of the process uses.
struct Span {
    base: u64,
    bytes: u64,
}

impl Span {
    fn new(bytes: u64, align: u64) -> Result<Span> {
        let out = HipError::OUT_OF_MEMORY;
        let align = align.max(GRANULARITY).checked_next_power_of_two().ok_or(out)?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(out);
        }
        // Room for an aligned part; the rest goes back.
        let length =
            bytes.checked_add(align - GRANULARITY).and_then(|n| usize::try_from(n).ok()).ok_or(out)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new address space, wherever the system has some.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(out);
        }
        let first = start as u64;
        let base = first.next_multiple_of(align);
        for (from, to) in [(first, base), (base + bytes, first + length as u64)] {
            if from < to {
                // SAFETY: parts of that space, which nothing uses.
                unsafe { libc::munmap(from as *mut c_void, (to - from) as usize) };
            }
        }
        Ok(Span { base, bytes })
    }

    fn holds(&self, addr: u64, bytes: u64) -> bool {
        let end = addr.checked_add(bytes);
        addr >= self.base && end.is_some_and(|end| end <= self.base + self.bytes)
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nothing is mapped there any more.
        unsafe { libc::munmap(self.base as *mut c_void, self.bytes as usize) };
    }
}

/// Physical memory at an address.
struct Mapping {
    base: u64,
    bytes: u64,
    /// Of its physical memory.
    handle: u64,
    span: Arc<Span>,
    /// What devices may do, by ordinal. Those that are not there may do nothing.
    access: BTreeMap<usize, c_int>,
}

impl Mapping {
    fn new(span: &Arc<Span>, base: u64, bytes: u64, handle: u64, physical: &Physical) -> Result<Mapping> {
        let (shared, file) = (libc::MAP_SHARED | libc::MAP_FIXED, physical.file.as_raw_fd());
        // SAFETY: inside of space that is ours, where nothing is mapped.
        let at = unsafe { libc::mmap(base as *mut c_void, bytes as usize, libc::PROT_NONE, shared, file, 0) };
        if at == libc::MAP_FAILED {
            return Err(HipError::OUT_OF_MEMORY);
        }
        Ok(Mapping { base, bytes, handle, span: span.clone(), access: BTreeMap::new() })
    }

    fn set_access(&mut self, device: &Device, flags: c_int) -> Result {
        let had = self.access.contains_key(&device.ordinal);
        if flags == 0 {
            self.access.remove(&device.ordinal);
        } else {
            self.access.insert(device.ordinal, flags);
        }
        let protection =
            if self.access.is_empty() { libc::PROT_NONE } else { libc::PROT_READ | libc::PROT_WRITE };
        if had && flags == 0 {
            device.machine.free(self.base).map_err(|_| INVALID)?;
        }
        // SAFETY: the mapping is ours, and no device accesses what the host may not.
        if unsafe { libc::mprotect(self.base as *mut c_void, self.bytes as usize, protection) } != 0 {
            return Err(HipError::OPERATING_SYSTEM);
        }
        if !had && flags != 0 {
            let start = NonNull::new(self.base as *mut AtomicU32).ok_or(INVALID)?;
            let owner: Arc<dyn Any + Send + Sync> = self.span.clone();
            // SAFETY: whole pages that are mapped until the device has them no more, at addresses that stay ours. Nothing in this crate
            // refers to them but by address.
            let mapped = unsafe { device.machine.map_host(start, self.bytes, "hipMemMap", owner) };
            mapped.map_err(|_| HipError::OUT_OF_MEMORY)?;
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        for device in self.access.keys().filter_map(|ordinal| runtime().devices.get(*ordinal)) {
            let _ = device.machine.free(self.base);
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the mapping is ours, and the space stays so.
        unsafe {
            libc::mmap(self.base as *mut c_void, self.bytes as usize, libc::PROT_NONE, flags, -1, 0);
        }
    }
}

/// What the program has.
#[derive(Default)]
struct State {
    /// Physical memory by handle, and references of the program to it: none for what only mappings have.
    physical: BTreeMap<u64, (Arc<Physical>, u64)>,
    /// The number of the last handle.
    handles: u64,
    spans: BTreeMap<u64, Arc<Span>>,
    mappings: BTreeMap<u64, Mapping>,
}

fn state() -> MutexGuard<'static, State> {
    static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
    lock(&STATE)
}

impl State {
    fn create(&mut self, physical: Physical) -> u64 {
        self.handles += 1;
        let handle = Tag::Physical.handle(self.handles);
        self.physical.insert(handle, (Arc::new(physical), 1));
        handle
    }

    fn physical(&self, handle: u64) -> Result<&Arc<Physical>> {
        let (physical, references) = self.physical.get(&handle).ok_or(INVALID)?;
        if *references > 0 { Ok(physical) } else { Err(INVALID) }
    }

    /// Forgets handles that neither the program nor a mapping has.
    fn tidy(&mut self) {
        let mapped: BTreeSet<u64> = self.mappings.values().map(|mapping| mapping.handle).collect();
        self.physical.retain(|handle, (_, references)| *references > 0 || mapped.contains(handle));
    }

    fn mapping(&self, addr: u64) -> Result<&Mapping> {
        let (_, mapping) = self.mappings.range(..=addr).next_back().ok_or(INVALID)?;
        if addr - mapping.base < mapping.bytes { Ok(mapping) } else { Err(INVALID) }
    }

    /// The mappings that hold a range, without gaps.
    fn holding(&self, addr: u64, bytes: u64) -> Result<Vec<&Mapping>> {
        let end = addr.checked_add(bytes).filter(|_| bytes > 0).ok_or(INVALID)?;
        let (mut at, mut found) = (addr, vec![]);
        while at < end {
            let mapping = self.mapping(at)?;
            found.push(mapping);
            at = mapping.base + mapping.bytes;
        }
        Ok(found)
    }

    /// The addresses of the mappings that a range is made of: whole ones, without gaps.
    fn whole(&self, addr: u64, bytes: u64) -> Result<Vec<u64>> {
        let mappings = self.holding(addr, bytes)?;
        let sum: u64 = mappings.iter().map(|mapping| mapping.bytes).sum();
        // They adjoin and hold the range: with its size, they are it.
        if sum == bytes { Ok(mappings.iter().map(|mapping| mapping.base).collect()) } else { Err(INVALID) }
    }

    fn overlaps(&self, addr: u64, bytes: u64) -> bool {
        let before = self.mappings.range(..addr.saturating_add(bytes)).next_back();
        before.is_some_and(|(base, mapping)| base + mapping.bytes > addr)
    }

    fn map(&mut self, addr: u64, bytes: u64, offset: u64, handle: u64) -> Result {
        let physical = self.physical(handle)?.clone();
        let span = self.spans.range(..=addr).next_back().map(|(_, span)| span).ok_or(INVALID)?;
        let pages = bytes > 0 && [addr, bytes].iter().all(|n| n.is_multiple_of(GRANULARITY));
        // As in ROCm, memory is mapped from its start on.
        if !pages || offset != 0 || bytes > physical.bytes || !span.holds(addr, bytes) {
            return Err(INVALID);
        }
        if self.overlaps(addr, bytes) {
            return Err(INVALID);
        }
        let mapping = Mapping::new(span, addr, bytes, handle, &physical)?;
        self.mappings.insert(addr, mapping);
        Ok(())
    }

    fn block(&self, addr: u64) -> Result<(u64, Block)> {
        let mapping = self.mapping(addr)?;
        let (physical, _) = self.physical.get(&mapping.handle).ok_or(INVALID)?;
        let device = physical.device.ordinal;
        Ok((mapping.base, Block { size: mapping.bytes, device, kind: Kind::Virtual, flags: 0 }))
    }
}

/// The mapping that holds an address, as memory that a pointer names, and its first address.
pub(crate) fn block(addr: u64) -> Option<(u64, Block)> {
    state().block(addr).ok()
}

/// Whether mappings hold all of a range.
pub(crate) fn is_mapped(addr: u64, bytes: u64) -> bool {
    state().holding(addr, bytes).is_ok()
}

/// Whether a mapping holds some of a range.
pub(crate) fn overlaps(addr: u64, bytes: u64) -> bool {
    state().overlaps(addr, bytes)
}

/// `hipMemExportToShareableHandle`: a descriptor of the file.
fn export(to: *mut c_int, handle: u64, kind: c_int, flags: u64) -> Result {
    if to.is_null() || kind != FILE_DESCRIPTOR || flags != 0 {
        return Err(INVALID);
    }
    let state = state();
    let physical = state.physical(handle)?;
    if physical.properties.handle_kind != FILE_DESCRIPTOR {
        return Err(INVALID);
    }
    let copy = physical.file.try_clone().map_err(|_| HipError::OPERATING_SYSTEM)?;
    put(to, copy.into_raw_fd())
}

api! {
    fn hipMemGetAllocationGranularity(bytes: *mut u64, properties: *const Properties, option: c_int) {
        get(properties)?.device()?;
        match option {
            0 => put(bytes, GRANULARITY),
            1 => put(bytes, RECOMMENDED),
            _ => Err(INVALID),
        }
    }

    fn hipMemAddressReserve(ptr: *mut u64, bytes: u64, align: u64, _hint: u64, flags: u64) {
        if flags != 0 {
            return Err(INVALID);
        }
        put(ptr, 0)?;
        let span = Span::new(bytes, align)?;
        put(ptr, span.base)?;
        state().spans.insert(span.base, Arc::new(span));
        Ok(())
    }

    fn hipMemAddressFree(ptr: u64, bytes: u64) {
        let mut state = state();
        let span = state.spans.get(&ptr).filter(|span| span.bytes == bytes).ok_or(INVALID)?;
        if state.mappings.range(ptr..ptr + span.bytes).next().is_some() {
            return Err(INVALID);
        }
        state.spans.remove(&ptr);
        Ok(())
    }

    fn hipMemCreate(handle: *mut u64, bytes: u64, properties: *const Properties, flags: u64) {
        if flags != 0 {
            return Err(INVALID);
        }
        put(handle, 0)?;
        let physical = Physical::new(bytes, get(properties)?)?;
        put(handle, state().create(physical))
    }

    fn hipMemRelease(handle: u64) {
        let mut state = state();
        let (_, references) = state.physical.get_mut(&handle).ok_or(INVALID)?;
        *references = references.checked_sub(1).ok_or(INVALID)?;
        state.tidy();
        Ok(())
    }

    fn hipMemRetainAllocationHandle(handle: *mut u64, addr: u64) {
        put(handle, 0)?;
        let mut state = state();
        let own = state.mapping(addr)?.handle;
        let (_, references) = state.physical.get_mut(&own).ok_or(INVALID)?;
        *references += 1;
        put(handle, own)
    }

    fn hipMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64) {
        put(properties, state().physical(handle)?.properties)
    }

    fn hipMemMap(ptr: u64, bytes: u64, offset: u64, handle: u64, flags: u64) {
        if flags != 0 {
            return Err(INVALID);
        }
        state().map(ptr, bytes, offset, handle)
    }

    fn hipMemUnmap(ptr: u64, bytes: u64) {
        queue::synchronize_device(None);
        let mut state = state();
        for base in state.whole(ptr, bytes)? {
            state.mappings.remove(&base);
        }
        state.tidy();
        Ok(())
    }

    fn hipMemSetAccess(ptr: u64, bytes: u64, list: *const Access, count: u64) {
        if count == 0 || count > runtime().devices.len() as u64 {
            return Err(INVALID);
        }
        let mut wanted = vec![];
        for i in 0..count as usize {
            let access = get(list.wrapping_add(i))?;
            if !matches!(access.flags, 0 | READ | READ_WRITE) {
                return Err(INVALID);
            }
            wanted.push((access.location.device()?, access.flags));
        }
        // Work in flight may use what is taken away.
        if wanted.iter().any(|(_, flags)| *flags == 0) {
            queue::synchronize_device(None);
        }
        let mut state = state();
        for base in state.whole(ptr, bytes)? {
            let mapping = state.mappings.get_mut(&base).ok_or(INVALID)?;
            for (device, flags) in &wanted {
                mapping.set_access(device, *flags)?;
            }
        }
        Ok(())
    }

    fn hipMemGetAccess(flags: *mut u64, location: *const Location, ptr: u64) {
        let device = get(location)?.device()?;
        let state = state();
        let may = state.mapping(ptr)?.access.get(&device.ordinal).copied().unwrap_or_default();
        put(flags, may as u64)
    }

    fn hipMemExportToShareableHandle(to: *mut c_int, handle: u64, kind: c_int, flags: u64) {
        export(to, handle, kind, flags)
    }

    fn hipMemImportFromShareableHandle(handle: *mut u64, descriptor: u64, kind: c_int) {
        put(handle, 0)?;
        match kind {
            FILE_DESCRIPTOR => {}
            2 | 4 => return Err(HipError::NOT_SUPPORTED), // those of Windows
            _ => return Err(INVALID),
        }
        let descriptor = c_int::try_from(descriptor).ok().filter(|fd| *fd > 0).ok_or(INVALID)?;
        put(handle, state().create(Physical::import(descriptor)?))
    }
}
