//! Memory pools: allocations in the order of streams, and what is counted of them.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex, MutexGuard};

use bytemuck::{Pod, Zeroable};

use crate::abi::MemPoolProps;
use crate::capture;
use crate::error::{HipError, Result};
use crate::host::{get, put};
use crate::memory::{self, GraphMemory};
use crate::queue;
use crate::runtime::{Device, Tag, api, lock, runtime};
use crate::stream::{StreamRef, stream};
use crate::work::Work;

const INVALID: HipError = HipError::INVALID_VALUE;

/// `hipMemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Access {
    location_type: c_int,
    location_id: c_int,
    flags: c_int,
}

/// `hipMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Location {
    location_type: c_int,
    id: c_int,
}

const ON_DEVICE: c_int = 1;
const READ_WRITE: c_int = 3;

struct Pool {
    device: usize,
    /// Bytes that it may have; 0 is no limit.
    max: u64,
    /// The three `hipMemPoolReuse*`.
    reuse: [c_int; 3],
    threshold: u64,
    reserved: u64,
    reserved_high: u64,
    used: u64,
    used_high: u64,
    free: Vec<Free>,
    /// What other devices may do, by their ordinals.
    access: HashMap<usize, c_int>,
}

impl Pool {
    fn new(device: usize, max: u64) -> Pool {
        Pool {
            device,
            max,
            reuse: [1; 3],
            threshold: 0,
            reserved: 0,
            reserved_high: 0,
            used: 0,
            used_high: 0,
            free: vec![],
            access: HashMap::new(),
        }
    }

    /// Bytes are allocated: of free ones, or new.
    fn take(&mut self, bytes: u64, new: bool) {
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
        self.reserved += if new { bytes } else { 0 };
        self.reserved_high = self.reserved_high.max(self.reserved);
    }

    /// What a stream can use again: what was freed in its order, and what other streams have done with, as far as the pool
    /// allows that.
    fn again(&mut self, bytes: u64, on: StreamRef) -> Option<u64> {
        let [follow_events, opportunistic, _] = self.reuse;
        let fits = |free: &Free| {
            let (own, done) = (free.stream == on.id, || queue::is_done(free.ticket));
            let later = || follow_events != 0 && queue::follows(on, free.ticket);
            free.bytes == bytes && (own || later() || opportunistic != 0 && done())
        };
        let at = self.free.iter().position(fits)?;
        Some(self.free.remove(at).addr)
    }

    /// Takes free memory out of a pool that has more than `hold` bytes; not what work in flight may use.
    fn trim(&mut self, hold: u64) -> Vec<u64> {
        let mut gone = vec![];
        self.free.retain(|free| {
            let keep = self.reserved <= hold || !queue::is_done(free.ticket);
            if !keep {
                self.reserved -= free.bytes;
                gone.push(free.addr);
            }
            keep
        });
        gone
    }
}

/// Memory that was freed in the order of a stream, and is still the pool's.
struct Free {
    addr: u64,
    bytes: u64,
    stream: u64,
    /// The last command of the stream that may use it.
    ticket: u64,
}

#[derive(Default)]
struct Pools {
    /// A device's own pool has its ordinal for a number, the others those behind.
    all: HashMap<u64, Pool>,
    /// The current pools of devices that have another one than their own.
    current: HashMap<usize, u64>,
    /// Pool and size of each allocation.
    blocks: HashMap<u64, (u64, u64)>,
    made: u64,
}

/// Numbers from here on are those of pools that the program made.
const FIRST_OWN: u64 = 1 << 16;

fn pools() -> MutexGuard<'static, Pools> {
    static POOLS: LazyLock<Mutex<Pools>> = LazyLock::new(Mutex::default);
    lock(&POOLS)
}

impl Pools {
    fn is_free(&self, addr: u64) -> bool {
        self.all.values().any(|pool| pool.free.iter().any(|free| free.addr == addr))
    }

    fn id(&mut self, handle: u64) -> Result<u64> {
        let id = Tag::Pool.id(handle).ok_or(INVALID)?;
        if id < runtime().devices.len() as u64 {
            self.all.entry(id).or_insert_with(|| Pool::new(id as usize, 0));
        }
        if self.all.contains_key(&id) { Ok(id) } else { Err(INVALID) }
    }

    fn pool(&mut self, handle: u64) -> Result<&mut Pool> {
        let id = self.id(handle)?;
        self.all.get_mut(&id).ok_or(INVALID)
    }

    fn current(&self, device: &Device) -> u64 {
        self.current.get(&device.ordinal).copied().unwrap_or_else(|| Tag::Pool.handle(device.ordinal as u64))
    }
}

/// Memory of a pool, in the order of a stream.
fn allocate(ptr: *mut u64, bytes: u64, pool: u64, on: u64) -> Result {
    put(ptr, 0)?;
    let on = stream(on).map_err(|_| HipError::INVALID_HANDLE)?;
    let (device, id) = {
        let mut pools = pools();
        let id = pools.id(pool)?;
        let pool = pools.pool(pool)?;
        if pool.max != 0 && bytes > pool.max - pool.used.min(pool.max) {
            return Err(HipError::OUT_OF_MEMORY);
        }
        (runtime().device(pool.device as c_int)?, id)
    };
    if bytes > 0 && capture::captures(on)? {
        let memory = GraphMemory::captured(device, bytes)?;
        put(ptr, memory.params.ptr)?;
        return capture::add(on, Work::Alloc(memory)).map(drop);
    }
    device.check()?;
    let again = pools().all.get_mut(&id).and_then(|pool| pool.again(bytes, on));
    let addr = match again {
        Some(addr) => addr,
        None => memory::malloc(device, bytes)?,
    };
    if bytes > 0 {
        let mut pools = pools();
        pools.blocks.insert(addr, (id, bytes));
        if let Some(pool) = pools.all.get_mut(&id) {
            pool.take(bytes, again.is_none());
        }
    }
    put(ptr, addr)
}

/// Gives memory back to its pool in the order of a stream. False for memory that is of no pool.
///
/// # Errors
/// `hipErrorInvalidValue` for what is free already.
pub(crate) fn free(addr: u64, on: StreamRef) -> Result<bool> {
    let ticket = queue::last(on);
    {
        let mut pools = pools();
        let Some((id, bytes)) = pools.blocks.remove(&addr) else {
            return if pools.is_free(addr) { Err(INVALID) } else { Ok(false) };
        };
        // That of a pool that was destroyed.
        let Some(pool) = pools.all.get_mut(&id) else { return Ok(false) };
        pool.used -= bytes;
        pool.free.push(Free { addr, bytes, stream: on.id, ticket });
    }
    settle();
    Ok(true)
}

/// Whether a device may access pools of another one.
pub(crate) fn is_shared(owner: usize, device: usize) -> bool {
    pools().all.values().any(|pool| pool.device == owner && pool.access.contains_key(&device))
}

/// Whether memory is free in a pool.
pub(crate) fn is_free(addr: u64) -> bool {
    pools().is_free(addr)
}

/// Releases what pools have above their thresholds.
pub(crate) fn settle() {
    let gone = pools().all.values_mut().flat_map(|pool| pool.trim(pool.threshold)).collect();
    release(gone);
}

fn release(addresses: Vec<u64>) {
    for addr in addresses {
        // The program may have reset the device.
        let _ = memory::free(addr);
    }
}

/// Memory was freed, and not in the order of a stream.
pub(crate) fn freed(addr: u64) {
    let mut pools = pools();
    let Some((id, bytes)) = pools.blocks.remove(&addr) else { return };
    if let Some(pool) = pools.all.get_mut(&id) {
        pool.used -= bytes;
        pool.reserved -= bytes;
    }
}

/// Everything on a device is gone.
pub(crate) fn reset(device: &Device) {
    let mut pools = pools();
    let Pools { all, blocks, .. } = &mut *pools;
    blocks.retain(|_, (id, _)| all.get(id).is_some_and(|pool| pool.device != device.ordinal));
    for pool in all.values_mut().filter(|pool| pool.device == device.ordinal) {
        pool.free.clear();
        (pool.used, pool.reserved) = (0, 0);
    }
}

/// The size of an attribute's value in the program, and the value.
fn attribute(pool: &Pool, number: c_int) -> Option<(bool, u64)> {
    Some(match number {
        1..=3 => (false, pool.reuse[number as usize - 1] as u64),
        4 => (true, pool.threshold),
        5 => (true, pool.reserved),
        6 => (true, pool.reserved_high),
        7 => (true, pool.used),
        8 => (true, pool.used_high),
        _ => return None,
    })
}

api! {
    fn hipDeviceGetDefaultMemPool(pool: *mut u64, device: c_int) {
        if pool.is_null() {
            return Err(INVALID);
        }
        put(pool, Tag::Pool.handle(runtime().device(device)?.ordinal as u64))
    }

    fn hipDeviceGetMemPool(pool: *mut u64, device: c_int) {
        if pool.is_null() {
            return Err(INVALID);
        }
        let device = runtime().device(device).map_err(|_| INVALID)?;
        put(pool, pools().current(device))
    }

    fn hipDeviceSetMemPool(device: c_int, handle: u64) {
        let mut pools = pools();
        let owner = pools.pool(handle)?.device;
        let device = runtime().device(device).map_err(|_| INVALID)?;
        if owner != device.ordinal {
            return Err(HipError::INVALID_DEVICE);
        }
        pools.current.insert(owner, handle);
        Ok(())
    }

    fn hipMemPoolCreate(handle: *mut u64, props: *const MemPoolProps) {
        const PINNED: c_int = 1;
        if handle.is_null() {
            return Err(INVALID);
        }
        let props = get(props)?;
        if props.allocation_type != PINNED || props.location_type != ON_DEVICE {
            return Err(INVALID);
        }
        let device = runtime().device(props.location_id).map_err(|_| INVALID)?;
        let mut pools = pools();
        let id = FIRST_OWN + pools.made;
        pools.made += 1;
        pools.all.insert(id, Pool::new(device.ordinal, props.max_size));
        put(handle, Tag::Pool.handle(id))
    }

    fn hipMemPoolDestroy(handle: u64) {
        let mut pools = pools();
        let id = pools.id(handle)?;
        if id < FIRST_OWN {
            return Err(INVALID);
        }
        let pool = pools.all.remove(&id);
        pools.current.retain(|_, current| *current != handle);
        drop(pools);
        let Some(pool) = pool else { return Ok(()) };
        pool.free.iter().for_each(|free| queue::wait(free.ticket));
        release(pool.free.iter().map(|free| free.addr).collect());
        Ok(())
    }

    fn hipMemPoolTrimTo(handle: u64, hold: u64) {
        let gone = pools().pool(handle)?.trim(hold);
        release(gone);
        Ok(())
    }

    fn hipMemPoolGetAttribute(handle: u64, number: c_int, value: u64) {
        let (wide, found) = attribute(pools().pool(handle)?, number).ok_or(INVALID)?;
        if wide { put(value as *mut u64, found) } else { put(value as *mut c_int, found as c_int) }
    }

    fn hipMemPoolSetAttribute(handle: u64, number: c_int, value: u64) {
        let mut pools = pools();
        let pool = pools.pool(handle)?;
        match number {
            1..=3 => pool.reuse[number as usize - 1] = get(value as *const c_int)?,
            4 => pool.threshold = get(value as *const u64)?,
            // High-water marks go down to what is current.
            6 | 8 if get(value as *const u64)? != 0 => return Err(INVALID),
            6 => pool.reserved_high = pool.reserved,
            8 => pool.used_high = pool.used,
            _ => return Err(INVALID),
        }
        Ok(())
    }

    fn hipMemPoolSetAccess(handle: u64, list: *const Access, count: u64) {
        let mut pools = pools();
        let pool = pools.pool(handle)?;
        if list.is_null() {
            return Err(INVALID);
        }
        if count > runtime().devices.len() as u64 {
            return Err(HipError::INVALID_DEVICE);
        }
        for i in 0..count as usize {
            let access = get(list.wrapping_add(i))?;
            if access.location_type != ON_DEVICE {
                return Err(INVALID);
            }
            let device = runtime().device(access.location_id).map_err(|_| HipError::INVALID_DEVICE)?;
            match access.flags {
                0 => return Err(HipError::INVALID_DEVICE),
                1..=READ_WRITE => {
                    // Kernels there access the memory of the pool's device, and not of the pool alone.
                    if let Some(owner) = runtime().devices.get(pool.device).filter(|o| o.ordinal != device.ordinal) {
                        let peer = device.machine.enable_peer(&owner.machine);
                        peer.map_err(|_| HipError::PEER_ACCESS_UNSUPPORTED)?;
                    }
                    pool.access.insert(device.ordinal, access.flags)
                }
                _ => return Err(INVALID),
            };
        }
        Ok(())
    }

    fn hipMemPoolGetAccess(flags: *mut c_int, handle: u64, location: *const Location) {
        let mut pools = pools();
        let pool = pools.pool(handle)?;
        let location = get(location)?;
        if flags.is_null() || location.location_type != ON_DEVICE {
            return Err(INVALID);
        }
        let device = runtime().device(location.id).map_err(|_| INVALID)?.ordinal;
        let own = if device == pool.device { READ_WRITE } else { 0 };
        put(flags, pool.access.get(&device).copied().unwrap_or(own))
    }

    fn hipMallocAsync(ptr: *mut u64, bytes: u64, on: u64) {
        if ptr.is_null() {
            return Err(INVALID);
        }
        let pool = pools().current(stream(on).map_err(|_| HipError::INVALID_HANDLE)?.device);
        allocate(ptr, bytes, pool, on)
    }

    fn hipMallocFromPoolAsync(ptr: *mut u64, bytes: u64, pool: u64, on: u64) { allocate(ptr, bytes, pool, on) }
}
