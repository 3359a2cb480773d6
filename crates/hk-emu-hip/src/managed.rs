//! Advice about managed memory, which changes nothing here and can be read back.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex, MutexGuard};

use crate::error::{HipError, Result};
use crate::host::{get, put};
use crate::memory::{allocation, is_managed};
use crate::runtime::{api, lock, runtime};
use crate::stream::stream;

const INVALID: HipError = HipError::INVALID_VALUE;
/// `hipCpuDeviceId` and `hipInvalidDeviceId`.
const CPU: c_int = -1;
const NOWHERE: c_int = -2;

/// `hipMemRangeCoherencyMode`.
const FINE: c_int = 0;
const COARSE: c_int = 1;
const INDETERMINATE: c_int = 2;

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

/// Ranges of memory with the same advice: their ends and it, by first address.
#[derive(Default)]
struct Ranges(BTreeMap<u64, (u64, Advice)>);

impl Ranges {
    /// Makes a range begin at an address that lies in one.
    fn cut(&mut self, at: u64) {
        if let Some((_, (end, advice))) = self.0.range_mut(..at).next_back()
            && *end > at
        {
            let rest = (*end, advice.clone());
            *end = at;
            self.0.insert(at, rest);
        }
    }

    /// What is known of `start..end`, in ranges without gaps.
    fn parts(&mut self, start: u64, end: u64) -> impl Iterator<Item = &mut Advice> {
        self.cut(start);
        self.cut(end);
        let known: Vec<_> = self.0.range(start..end).map(|(start, (end, _))| (*start, *end)).collect();
        let mut at = start;
        for (next, behind) in known.into_iter().chain([(end, end)]) {
            if at < next {
                self.0.insert(at, (next, Advice::default()));
            }
            at = behind;
        }
        self.0.range_mut(start..end).map(|(_, (_, advice))| advice)
    }
}

fn ranges() -> MutexGuard<'static, Ranges> {
    static RANGES: LazyLock<Mutex<Ranges>> = LazyLock::new(Mutex::default);
    lock(&RANGES)
}

/// Memory was freed.
pub(crate) fn freed(base: u64, bytes: u64) {
    let mut ranges = ranges();
    if !ranges.0.is_empty() {
        ranges.0.retain(|start, _| !(base..base + bytes).contains(start));
    }
}

fn place(device: c_int) -> Result {
    if device == CPU { Ok(()) } else { runtime().device(device).map(drop) }
}

/// The pages of managed memory that has so many bytes from `ptr` on, and not those of other memory.
fn pages(ptr: u64, bytes: u64) -> Result<(u64, u64)> {
    const PAGE: u64 = 4096;
    if ptr == 0 || bytes == 0 || is_managed(ptr, bytes) != Some(true) {
        return Err(INVALID);
    }
    let (base, size) = allocation(ptr).ok_or(INVALID)?;
    Ok(((ptr - ptr % PAGE).max(base), (ptr + bytes).next_multiple_of(PAGE).min(base + size)))
}

/// An attribute of a range; where its parts differ, what says that they have none in common.
fn range_attribute(data: u64, size: u64, attribute: c_int, ptr: u64, bytes: u64) -> Result {
    const COHERENCY: c_int = 100;
    if attribute == COHERENCY && size == 4 && is_managed(ptr, bytes) == Some(false) {
        return put(data as *mut c_int, COARSE);
    }
    let (start, end) = pages(ptr, bytes)?;
    let mut ranges = ranges();
    let parts: Vec<&Advice> = ranges.parts(start, end).map(|advice| &*advice).collect();
    let common = |value: fn(&Advice) -> c_int, mixed: c_int| {
        let first = parts.first().map_or(mixed, |advice| value(advice));
        if parts.iter().all(|advice| value(advice) == first) { first } else { mixed }
    };
    let value = match attribute {
        1 => common(|advice| c_int::from(advice.read_mostly), 0),
        2 => common(|advice| advice.preferred, NOWHERE),
        4 => common(|advice| advice.prefetched, NOWHERE),
        COHERENCY => common(|advice| advice.coherency, INDETERMINATE),
        3 => {
            if size == 0 || !size.is_multiple_of(4) {
                return Err(INVALID);
            }
            let first = parts.first().map_or(&[][..], |advice| &advice.accessed_by);
            let mut devices = first.iter().filter(|d| parts.iter().all(|a| a.accessed_by.contains(d)));
            // All of them, then none.
            for i in 0..size / 4 {
                put((data + 4 * i) as *mut c_int, devices.next().copied().unwrap_or(NOWHERE))?;
            }
            return Ok(());
        }
        _ => return Err(INVALID),
    };
    if size == 4 { put(data as *mut c_int, value) } else { Err(INVALID) }
}

api! {
    fn hipMemAdvise(ptr: u64, bytes: u64, advise: c_int, device: c_int) {
        let (start, end) = pages(ptr, bytes)?;
        if matches!(advise, 3 | 5 | 6) {
            place(device)?;
        }
        if !matches!(advise, 1..=6 | 100 | 101) {
            return Err(INVALID);
        }
        for advice in ranges().parts(start, end) {
            match advise {
                1 | 2 => advice.read_mostly = advise == 1,
                3 => advice.preferred = device,
                4 => advice.preferred = NOWHERE,
                5 if !advice.accessed_by.contains(&device) => advice.accessed_by.push(device),
                6 => advice.accessed_by.retain(|d| *d != device),
                100 => advice.coherency = COARSE,
                101 => advice.coherency = FINE,
                _ => {}
            }
        }
        Ok(())
    }

    fn hipMemPrefetchAsync(ptr: u64, bytes: u64, device: c_int, on: u64) {
        let (start, end) = pages(ptr, bytes)?;
        place(device)?;
        stream(on)?;
        ranges().parts(start, end).for_each(|advice| advice.prefetched = device);
        Ok(())
    }

    fn hipMemRangeGetAttribute(data: u64, size: u64, attribute: c_int, ptr: u64, bytes: u64) {
        if data == 0 || size == 0 {
            return Err(INVALID);
        }
        range_attribute(data, size, attribute, ptr, bytes)
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
        pages(ptr, bytes)?;
        for i in 0..usize::try_from(count).map_err(|_| INVALID)? {
            let (to, size) = (get(data.wrapping_add(i))?, get(sizes.wrapping_add(i))?);
            if to == 0 {
                return Err(INVALID);
            }
            range_attribute(to, size, get(attributes.wrapping_add(i))?, ptr, bytes)?;
        }
        Ok(())
    }
}
