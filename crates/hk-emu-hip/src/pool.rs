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
use crate::runtime::{Device, Tag, api, lock, runtime};
use crate::stream::stream;
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
            access: HashMap::new(),
        }
    }

    fn take(&mut self, bytes: u64) {
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
        self.reserved = self.reserved.max(self.used);
        self.reserved_high = self.reserved_high.max(self.reserved);
    }

    /// Keeps up to `hold` bytes of what is free.
    fn trim(&mut self, hold: u64) {
        self.reserved = self.used.max(self.reserved.min(hold));
    }
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
    let addr = memory::malloc(device, bytes)?;
    if bytes > 0 {
        let mut pools = pools();
        pools.blocks.insert(addr, (id, bytes));
        if let Some(pool) = pools.all.get_mut(&id) {
            pool.take(bytes);
        }
    }
    put(ptr, addr)
}

/// Memory was freed: what its pool keeps of it is up to the pool.
pub(crate) fn freed(addr: u64) {
    let mut pools = pools();
    let Some((id, bytes)) = pools.blocks.remove(&addr) else { return };
    if let Some(pool) = pools.all.get_mut(&id) {
        pool.used = pool.used.saturating_sub(bytes);
        pool.trim(pool.threshold);
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
        pools.all.remove(&id);
        pools.current.retain(|_, current| *current != handle);
        Ok(())
    }

    fn hipMemPoolTrimTo(handle: u64, hold: u64) {
        pools().pool(handle)?.trim(hold);
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
                1..=READ_WRITE => pool.access.insert(device.ordinal, access.flags),
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
