//! Advice about managed memory, which changes nothing here and can be read back.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex, MutexGuard};

use crate::error::{HipError, Result};
use crate::host::{get, put};
use crate::memory::is_managed;
use crate::runtime::{api, lock, runtime};
use crate::stream::stream;

const INVALID: HipError = HipError::INVALID_VALUE;
/// `hipCpuDeviceId` and `hipInvalidDeviceId`.
const CPU: c_int = -1;
const NOWHERE: c_int = -2;

/// `hipMemRangeCoherencyMode`.
const FINE: c_int = 0;
const COARSE: c_int = 1;

#[derive(Clone)]
struct Advice {
    read_mostly: bool,
    preferred: c_int,
    accessed_by: Vec<c_int>,
    prefetched: c_int,
    coherency: c_int,
}

impl Default for Advice {
    fn default() -> Advice {
        Advice {
            read_mostly: false,
            preferred: NOWHERE,
            accessed_by: vec![],
            prefetched: NOWHERE,
            coherency: FINE,
        }
    }
}

/// By the first address of the memory.
fn advice() -> MutexGuard<'static, HashMap<u64, Advice>> {
    static ADVICE: LazyLock<Mutex<HashMap<u64, Advice>>> = LazyLock::new(Mutex::default);
    lock(&ADVICE)
}

/// Memory was freed.
pub(crate) fn freed(base: u64) {
    advice().remove(&base);
}

fn place(device: c_int) -> Result {
    if device == CPU { Ok(()) } else { runtime().device(device).map(drop) }
}

/// The first address of managed memory that has so many bytes from `ptr` on.
fn range(ptr: u64, bytes: u64) -> Result<u64> {
    if ptr == 0 || bytes == 0 {
        return Err(INVALID);
    }
    is_managed(ptr, bytes).ok_or(INVALID)
}

fn range_attribute(data: u64, size: u64, attribute: c_int, base: u64) -> Result {
    let advice = advice().get(&base).cloned().unwrap_or_default();
    let value = match attribute {
        1 => c_int::from(advice.read_mostly),
        2 => advice.preferred,
        4 => advice.prefetched,
        100 => advice.coherency,
        3 => {
            if size == 0 || !size.is_multiple_of(4) {
                return Err(INVALID);
            }
            // All of them, then none.
            for i in 0..size / 4 {
                let device = advice.accessed_by.get(i as usize).copied().unwrap_or(NOWHERE);
                put((data + 4 * i) as *mut c_int, device)?;
            }
            return Ok(());
        }
        _ => return Err(INVALID),
    };
    if size == 4 { put(data as *mut c_int, value) } else { Err(INVALID) }
}

api! {
    fn hipMemAdvise(ptr: u64, bytes: u64, advise: c_int, device: c_int) {
        let base = range(ptr, bytes)?;
        if matches!(advise, 3 | 5 | 6) {
            place(device)?;
        }
        let mut all = advice();
        let advice = all.entry(base).or_default();
        match advise {
            1 | 2 => advice.read_mostly = advise == 1,
            3 => advice.preferred = device,
            4 => advice.preferred = NOWHERE,
            5 if advice.accessed_by.contains(&device) => {}
            5 => advice.accessed_by.push(device),
            6 => advice.accessed_by.retain(|d| *d != device),
            100 => advice.coherency = COARSE,
            101 => advice.coherency = FINE,
            _ => return Err(INVALID),
        }
        Ok(())
    }

    fn hipMemPrefetchAsync(ptr: u64, bytes: u64, device: c_int, on: u64) {
        let base = range(ptr, bytes)?;
        place(device)?;
        stream(on)?;
        advice().entry(base).or_default().prefetched = device;
        Ok(())
    }

    fn hipMemRangeGetAttribute(data: u64, size: u64, attribute: c_int, ptr: u64, bytes: u64) {
        if data == 0 || size == 0 {
            return Err(INVALID);
        }
        range_attribute(data, size, attribute, range(ptr, bytes)?)
    }

    fn hipMemRangeGetAttributes(
        data: *const u64,
        sizes: *const u64,
        attributes: *const c_int,
        count: u64,
        ptr: u64,
        bytes: u64,
    ) {
        if data.is_null() || sizes.is_null() || attributes.is_null() || count == 0 {
            return Err(INVALID);
        }
        let base = range(ptr, bytes)?;
        for i in 0..usize::try_from(count).map_err(|_| INVALID)? {
            let (to, size) = (get(data.wrapping_add(i))?, get(sizes.wrapping_add(i))?);
            if to == 0 {
                return Err(INVALID);
            }
            range_attribute(to, size, get(attributes.wrapping_add(i))?, base)?;
        }
        Ok(())
    }
}
