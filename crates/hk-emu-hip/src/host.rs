//! The memory of the program itself, by addresses that it gives.
//!
//! A C program can hand over any address. The kernel copies on our behalf (`process_vm_readv` of this very process):
//! unmapped memory is an error and no signal, and no Rust reference to the program's memory exists.

use std::ffi::{c_int, c_long, c_ulong, c_void};

use bytemuck::Pod;

use crate::error::{HipError, Result};

#[repr(C)]
struct IoVec {
    base: *mut c_void,
    len: usize,
}

type Copy = unsafe extern "C" fn(c_int, *const IoVec, c_ulong, *const IoVec, c_ulong, c_ulong) -> isize;

unsafe extern "C" {
    fn process_vm_readv(
        pid: c_int,
        local: *const IoVec,
        locals: c_ulong,
        remote: *const IoVec,
        remotes: c_ulong,
        flags: c_ulong,
    ) -> isize;
    fn process_vm_writev(
        pid: c_int,
        local: *const IoVec,
        locals: c_ulong,
        remote: *const IoVec,
        remotes: c_ulong,
        flags: c_ulong,
    ) -> isize;
}

/// Largest part that is copied in one call, and the size of bounce buffers.
pub(crate) const CHUNK: usize = 1 << 20;
const PAGE: u64 = 4096;

/// Copies between `local`, `len` bytes, and the program's memory at `addr`. False if a part of that is not accessible.
fn transfer(copy: Copy, local: *mut u8, addr: u64, len: usize) -> bool {
    let mut done = 0;
    while done < len {
        let n = CHUNK.min(len - done);
        let Some(at) = addr.checked_add(done as u64) else { return false };
        // SAFETY: inside of the buffer.
        let here = IoVec { base: unsafe { local.add(done) }.cast(), len: n };
        let there = IoVec { base: at as *mut c_void, len: n };
        // SAFETY: `here` is a part of the caller's buffer. The kernel checks the other side.
        let moved = unsafe { copy(std::process::id() as c_int, &here, 1, &there, 1, 0) };
        match usize::try_from(moved) {
            Ok(moved) if moved > 0 => done += moved,
            _ => return false,
        }
    }
    true
}

/// Whether the system allows these calls; seccomp filters of old containers do not.
fn available() -> bool {
    use std::sync::OnceLock;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        let source = 1u8;
        let mut target = 0u8;
        transfer(process_vm_readv, &raw mut target, (&raw const source) as u64, 1)
    })
}

/// Fills `out` from the program's memory at `addr`.
///
/// # Errors
/// `hipErrorInvalidValue` if the bytes are not readable.
pub(crate) fn read(addr: u64, out: &mut [u8]) -> Result {
    if out.is_empty() {
        return Ok(());
    }
    if addr < PAGE {
        return Err(HipError::INVALID_VALUE);
    }
    if available() {
        let readable = transfer(process_vm_readv, out.as_mut_ptr(), addr, out.len());
        return readable.then_some(()).ok_or(HipError::INVALID_VALUE);
    }
    // SAFETY: nothing checks the address here; it is the program's promise, as with any C library.
    unsafe { std::ptr::copy(addr as *const u8, out.as_mut_ptr(), out.len()) };
    Ok(())
}

/// Writes `data` to the program's memory at `addr`.
///
/// # Errors
/// `hipErrorInvalidValue` if the bytes are not writable.
pub(crate) fn write(addr: u64, data: &[u8]) -> Result {
    if data.is_empty() {
        return Ok(());
    }
    if addr < PAGE {
        return Err(HipError::INVALID_VALUE);
    }
    if available() {
        let writable = transfer(process_vm_writev, data.as_ptr().cast_mut(), addr, data.len());
        return writable.then_some(()).ok_or(HipError::INVALID_VALUE);
    }
    // SAFETY: as in `read`.
    unsafe { std::ptr::copy(data.as_ptr(), addr as *mut u8, data.len()) };
    Ok(())
}

/// Backs all pages of a range of the program's memory, as page-locking does. False if the program may not write a part of it, or where
/// the system cannot.
pub(crate) fn populate(addr: u64, bytes: u64) -> bool {
    let start = addr - addr % PAGE;
    let end = addr.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(PAGE));
    let len = end.and_then(|end| usize::try_from(end - start).ok());
    // SAFETY: changes no contents. The kernel checks the range.
    len.is_some_and(|len| unsafe { libc::madvise(start as *mut _, len, libc::MADV_POPULATE_WRITE) } == 0)
}

/// Whether the system has [`populate`]: Linux from 5.14 on.
pub(crate) fn populates() -> bool {
    use std::sync::OnceLock;
    static POPULATES: OnceLock<bool> = OnceLock::new();
    *POPULATES.get_or_init(|| {
        let own = 0u8;
        populate((&raw const own) as u64, 1)
    })
}

/// The value that a pointer argument points to.
///
/// # Errors
/// `hipErrorInvalidValue` for null and unreadable pointers.
pub(crate) fn get<T: Pod>(ptr: *const T) -> Result<T> {
    let mut value = T::zeroed();
    read(ptr as u64, bytemuck::bytes_of_mut(&mut value))?;
    Ok(value)
}

/// Stores a result where a pointer argument points to.
///
/// # Errors
/// `hipErrorInvalidValue` for null and unwritable pointers.
pub(crate) fn put<T: Pod>(ptr: *mut T, value: T) -> Result {
    write(ptr as u64, bytemuck::bytes_of(&value))
}

/// [`put`] unless the pointer is null.
///
/// # Errors
/// `hipErrorInvalidValue` for unwritable pointers.
pub(crate) fn put_if<T: Pod>(ptr: *mut T, value: T) -> Result {
    if ptr.is_null() { Ok(()) } else { put(ptr, value) }
}

/// A C string of at most 64 KiB.
///
/// # Errors
/// `hipErrorInvalidValue` for null and unreadable pointers, longer strings, and text that is not UTF-8.
pub(crate) fn string(ptr: *const std::ffi::c_char) -> Result<String> {
    long_string(ptr, 64 << 10)
}

/// A C string of at most `max` bytes.
///
/// # Errors
/// As those of [`string`].
pub(crate) fn long_string(ptr: *const std::ffi::c_char, max: usize) -> Result<String> {
    let mut addr = ptr as u64;
    let mut bytes = vec![];
    while bytes.len() < max {
        // To the end of the page: the next one need not be mapped.
        let mut part = vec![0; (PAGE - addr % PAGE) as usize];
        read(addr, &mut part)?;
        if let Some(end) = part.iter().position(|b| *b == 0) {
            bytes.extend(&part[..end]);
            return String::from_utf8(bytes).map_err(|_| HipError::INVALID_VALUE);
        }
        addr += part.len() as u64;
        bytes.append(&mut part);
    }
    Err(HipError::INVALID_VALUE)
}

/// Puts a string with its zero byte into a buffer of `len` bytes, cut short where it must be.
///
/// # Errors
/// `hipErrorInvalidValue` if there is no buffer.
pub(crate) fn put_string(ptr: *mut std::ffi::c_char, len: c_int, text: &str) -> Result {
    let room = usize::try_from(len).ok().and_then(|len| len.checked_sub(1)).ok_or(HipError::INVALID_VALUE)?;
    let mut bytes = text.as_bytes()[..text.len().min(room)].to_vec();
    bytes.push(0);
    write(ptr as u64, &bytes)
}

const _: () = assert!(size_of::<c_long>() == 8, "addresses are 64 bits");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wild_addresses_are_errors() {
        let mut byte = [0];
        for addr in [0, 1, 0xdead_beef_0000_0000, 0x1000_0000_0000, u64::MAX] {
            assert_eq!(read(addr, &mut byte), Err(HipError::INVALID_VALUE), "{addr:#x}");
            assert_eq!(write(addr, &[1]), Err(HipError::INVALID_VALUE), "{addr:#x}");
        }
        assert_eq!(string(std::ptr::null()), Err(HipError::INVALID_VALUE));
        // Constants are readable and not writable.
        static CONSTANT: [u8; 4] = *b"hip\0";
        assert_eq!(string(CONSTANT.as_ptr().cast()), Ok("hip".into()));
        assert_eq!(write(CONSTANT.as_ptr() as u64, b"x"), Err(HipError::INVALID_VALUE));
    }

    #[test]
    fn bytes_come_and_go() {
        let source: Vec<u8> = (0..3 * CHUNK + 17).map(|i| (i % 251) as u8).collect();
        let mut target = vec![0u8; source.len()];
        read(source.as_ptr() as u64, &mut target).unwrap();
        assert!(target == source);
        let mut there = vec![0u8; source.len()];
        write(there.as_mut_ptr() as u64, &source).unwrap();
        assert!(there == source);
        let mut name = [1 as std::ffi::c_char; 8];
        put_string(name.as_mut_ptr(), 4, "gfx942").unwrap();
        assert_eq!(string(name.as_ptr()), Ok("gfx".into()));
        assert_eq!(put_string(name.as_mut_ptr(), 0, "gfx942"), Err(HipError::INVALID_VALUE));
    }
}
