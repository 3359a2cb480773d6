//! Memory with three extents: pitched allocations, copies and fills.

use std::ffi::c_int;

use crate::abi::{DriverMemcpy3D, Memcpy3D, MemsetParams, PitchedPtr, Size3};
use crate::error::{HipError, Result};
use crate::host::{get, put};
use crate::memory::{fill_now, malloc_rows};
use crate::runtime::api;
use crate::work::{Copy, Fill, Work, copy_now, submit};

/// # Errors
/// `hipErrorInvalidValue` for an extent that is larger than the memory.
fn fill_of(p: PitchedPtr, value: c_int, extent: Size3) -> Result<Fill> {
    let Size3 { x: width, y: height, z: depth } = extent;
    let slice = p.pitch.checked_mul(p.ysize).ok_or(HipError::INVALID_VALUE)?;
    if width > p.pitch || height > p.ysize && depth > 1 {
        return Err(HipError::INVALID_VALUE);
    }
    let value = (value as u32) & 0xff;
    let params =
        MemsetParams { dst: p.ptr, element_size: 1, pad0: 0, height, pitch: p.pitch, value, pad1: 0, width };
    Ok(Fill { params, slice, depth })
}

api! {
    fn hipMalloc3D(result: *mut PitchedPtr, extent: Size3) {
        if result.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        let rows = extent.y.checked_mul(extent.z).ok_or(HipError::OUT_OF_MEMORY)?;
        let (ptr, pitch) = malloc_rows(extent.x, rows)?;
        put(result, PitchedPtr { ptr, pitch, xsize: extent.x, ysize: extent.y })
    }

    fn hipMemcpy3D(p: *const Memcpy3D) { copy_now(Copy::Box(get(p)?)) }
    fn hipMemcpy3DAsync(p: *const Memcpy3D, on: u64) { submit(on, Work::Copy(Copy::Box(get(p)?))) }
    fn hipDrvMemcpy3D(p: *const DriverMemcpy3D) { copy_now(Copy::Driver(get(p)?)) }
    fn hipDrvMemcpy3DAsync(p: *const DriverMemcpy3D, on: u64) { submit(on, Work::Copy(Copy::Driver(get(p)?))) }

    fn hipMemset3D(p: PitchedPtr, value: c_int, extent: Size3) {
        fill_now(fill_of(p, value, extent)?)
    }

    fn hipMemset3DAsync(p: PitchedPtr, value: c_int, extent: Size3, on: u64) {
        submit(on, Work::Fill(fill_of(p, value, extent)?))
    }
}
