//! Functions by name.

use std::ffi::{CString, c_char, c_int, c_void};

use crate::error::{HipError, Result};
use crate::host::{put, put_if, string};
use crate::runtime::api;

unsafe extern "C" {
    fn dladdr(addr: *const c_void, info: *mut Info) -> c_int;
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// `Dl_info`.
#[repr(C)]
struct Info {
    path: *const c_char,
    base: *const c_void,
    name: *const c_char,
    addr: *const c_void,
}

/// Address of an exported function of this very library, whatever else the process has loaded.
fn find(name: &str) -> Option<u64> {
    const NOW: c_int = 2;
    const NO_LOAD: c_int = 4;
    let name = CString::new(name).ok()?;
    let mut info = Info {
        path: std::ptr::null(),
        base: std::ptr::null(),
        name: std::ptr::null(),
        addr: std::ptr::null(),
    };
    let here = crate::device::hipInit as *const c_void;
    // SAFETY: `info` is valid for the write; the path it gets is the loader's own string. The library is loaded, and
    // stays so.
    let addr = unsafe {
        if dladdr(here, &mut info) == 0 {
            return None;
        }
        let library = dlopen(info.path, NOW | NO_LOAD);
        if library.is_null() {
            return None;
        }
        dlsym(library, name.as_ptr())
    };
    (!addr.is_null()).then_some(addr as u64)
}

/// The version of HIP, `100 * major + minor`, since which a plain name means the new structure.
const NEW_PROPERTIES: c_int = 600;

fn find_to(name: *const c_char, addr: *mut u64, version: c_int, status: *mut c_int) -> Result {
    const FOUND: c_int = 0;
    const NOT_FOUND: c_int = 1;
    let name = string(name)?;
    put(addr, 0)?;
    let name = match name.as_str() {
        "hipGetDeviceProperties" if version >= NEW_PROPERTIES => "hipGetDevicePropertiesR0600",
        other => other,
    };
    let found = find(name).filter(|_| name.starts_with("hip"));
    put_if(status, if found.is_some() { FOUND } else { NOT_FOUND })?;
    put(addr, found.ok_or(HipError::INVALID_VALUE)?)
}

api! {
    fn hipGetProcAddress(name: *const c_char, addr: *mut u64, version: c_int, _flags: u64, status: *mut c_int) {
        find_to(name, addr, version, status)
    }

    fn hipGetDriverEntryPoint(name: *const c_char, addr: *mut u64, _flags: u64, status: *mut c_int) {
        find_to(name, addr, NEW_PROPERTIES, status)
    }
}
