//! What the drivers of GPUs share: CUDA and HIP number their errors alike, and report them alike.

use crate::driver::Dispatch;
use crate::error::{Error, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::fmt::Display;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub(super) const SUCCESS: c_int = 0;
pub(super) const OUT_OF_MEMORY: c_int = 2;
pub(super) const NO_DEVICE: c_int = 100;
pub(super) const NOT_READY: c_int = 600;
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const EVENT_DEFAULT: c_uint = 0;
pub(super) const HOST_PORTABLE: c_uint = 1;
/// Calls that cannot be captured fail on this thread only.
pub(super) const CAPTURE_THREAD_LOCAL: c_int = 1;

/// `Ok` for success, else the code with the name that `name` finds for it: a static string, or null.
pub(super) fn check(
    call: &'static str,
    code: c_int,
    name: impl FnOnce(c_int) -> *const c_char,
    context: impl FnOnce() -> String,
) -> Result<()> {
    if code == SUCCESS {
        return Ok(());
    }
    let name = name(code);
    let name = if name.is_null() {
        "unknown".into()
    } else {
        // SAFETY: a static string of the driver.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    };
    Err(Error::Driver { call, code, name, context: format!(": {}", context()) })
}

/// Text in a buffer that was zeroed before it was written, all but its last byte.
pub(super) fn text(buffer: &[c_char; 256]) -> String {
    // SAFETY: the last byte is zero.
    unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_string_lossy().into_owned()
}

/// A kernel's name as the driver takes it.
pub(super) fn symbol_name(symbol: &str) -> Result<CString> {
    CString::new(symbol).map_err(|_| {
        let reason = "a kernel's name with a zero byte".into();
        Error::CodeObject { object: symbol.into(), reason }
    })
}

/// What a failed allocation says.
pub(super) fn allocation(code: c_int, label: &dyn Display, bytes: u64, spec: &str) -> String {
    let why = if code == OUT_OF_MEMORY { "not enough memory for " } else { "" };
    format!("{why}{label}, {bytes} bytes on {spec}")
}

/// What a failed launch says.
pub(super) fn launch(dispatch: &Dispatch, kernel: &str, dynamic_lds: u32) -> String {
    let &Dispatch { op, grid, block, .. } = dispatch;
    format!("{op}: kernel {kernel}, grid {grid:?}, block {block:?}, {dynamic_lds} bytes of dynamic LDS")
}

/// Page-locked memory that `alloc` gives, zeroed. `check` makes an error of a code.
pub(super) fn zeroed_host(
    bytes: usize,
    spec: &str,
    alloc: impl FnOnce(&mut *mut std::ffi::c_void) -> c_int,
    check: impl Fn(c_int, &dyn Fn() -> String) -> Result<()>,
) -> Result<NonNull<u8>> {
    let context = || format!("{bytes} bytes of page-locked memory for {spec}");
    let mut host = std::ptr::null_mut();
    check(alloc(&mut host), &context)?;
    let Some(host) = NonNull::new(host.cast::<u8>()) else {
        check(OUT_OF_MEMORY, &context)?;
        unreachable!("an error code is an error");
    };
    // SAFETY: the allocation has these bytes.
    unsafe { host.write_bytes(0, bytes) };
    Ok(host)
}

/// Takes an address off a list; whether it was there.
pub(super) fn take(addresses: &Mutex<Vec<u64>>, addr: u64) -> bool {
    let mut addresses = addresses.lock().unwrap_or_else(PoisonError::into_inner);
    let at = addresses.iter().position(|known| *known == addr);
    at.map(|at| addresses.swap_remove(at)).is_some()
}

/// What a driver measured between two events, in milliseconds.
pub(super) fn elapsed(ms: f32) -> Result<Duration> {
    Duration::try_from_secs_f64(f64::from(ms) / 1e3).map_err(|_| {
        Error::argument("Event::elapsed_since", "earlier", format!("{ms} ms"), "an event that is done before")
    })
}
