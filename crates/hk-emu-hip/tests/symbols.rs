//! Every exported function: that it is there, and that no argument makes it crash.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::process::Command;

use crate::common::library;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

fn supported() -> Vec<&'static str> {
    hk_emu_hip::supported().into_iter().flat_map(|(_, names)| names).collect()
}

pub(crate) fn open() -> *mut c_void {
    const NOW: c_int = 2;
    let path = CString::new(library().to_str().unwrap()).unwrap();
    // SAFETY: loads a library of this workspace.
    let handle = unsafe { dlopen(path.as_ptr(), NOW) };
    assert!(!handle.is_null());
    handle
}

pub(crate) fn find(library: *mut c_void, name: &str) -> *mut c_void {
    let c_name = CString::new(name).unwrap();
    // SAFETY: a library that is open, and a C string.
    unsafe { dlsym(library, c_name.as_ptr()) }
}

#[test]
fn every_name_is_exported_once() {
    let names = [supported(), hk_emu_hip::unsupported()].concat();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    let library = open();
    for name in names {
        assert!(!find(library, name).is_null(), "{name}");
    }
    assert!(find(library, "hipNoSuchFunction").is_null());
}

#[test]
fn functions_are_found_by_name() {
    type GetProcAddress = extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;
    let library = open();
    // SAFETY: this function has this type.
    let get: GetProcAddress = unsafe { std::mem::transmute(find(library, "hipGetProcAddress")) };
    let cases = [
        ("hipMalloc", 602, "hipMalloc"),
        ("hipGetDeviceProperties", 500, "hipGetDeviceProperties"),
        ("hipGetDeviceProperties", 602, "hipGetDevicePropertiesR0600"),
    ];
    let (mut addr, mut status) = (std::ptr::null_mut(), -1);
    for (name, version, want) in cases {
        let name = CString::new(name).unwrap();
        assert_eq!(get(name.as_ptr(), &mut addr, version, 0, &mut status), 0);
        assert_eq!((addr, status), (find(library, want), 0), "{name:?} of {version}");
    }
    for name in [c"hipNoSuchFunction", c"malloc", c""] {
        assert_eq!(get(name.as_ptr(), &mut addr, 602, 0, &mut status), 1);
        assert_eq!((addr.is_null(), status), (true, 1), "{name:?}");
    }
}

/// Functions as the test calls them: integer registers and stack slots are the same for all.
pub(crate) type Function = unsafe extern "C" fn(
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
) -> usize;

/// What is given for every argument. The last stands for the address of a buffer.
const PATTERNS: [usize; 7] = [0, 1, 3, 0x1000_0000_1000, 0x5200_0000_0000_0001, usize::MAX, usize::MAX / 2];
const BUFFER: usize = PATTERNS[6];

/// Functions that take code: they call what they get.
const CALLBACKS: [&str; 4] =
    ["hipStreamAddCallback", "hipStreamAddCallback_spt", "hipLaunchHostFunc", "hipLaunchHostFunc_spt"];
/// Returns a structure, through a pointer that the caller passes.
const RETURNS_STRUCTURE: &str = "hipCreateChannelDesc";

#[test]
fn no_argument_makes_a_function_crash() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([
        "--exact",
        "symbols::child_calls_everything",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    let output = child.env("HK_EMU_ARCH", "gfx942,gfx950").output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    let last = log.lines().rev().find(|line| line.starts_with("calling "));
    assert!(output.status.success(), "{}, last {last:?}\n{log}", output.status);
    let calls = log.lines().filter(|line| line.starts_with("calling ")).count();
    let names = supported().len() + hk_emu_hip::unsupported().len();
    assert_eq!(calls, names * PATTERNS.len() - CALLBACKS.len() * (PATTERNS.len() - 1) - PATTERNS.len());
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
#[ignore = "a child process"]
fn child_calls_everything() {
    let library = open();
    let mut buffer = vec![0u64; 1 << 16];
    for pattern in PATTERNS {
        for name in [supported(), hk_emu_hip::unsupported()].concat() {
            if name == RETURNS_STRUCTURE || pattern != 0 && CALLBACKS.contains(&name) {
                continue;
            }
            let value = if pattern == BUFFER { buffer.as_mut_ptr() as usize } else { pattern };
            eprintln!("calling {name} with {value:#x}");
            // SAFETY: not at all, in general: this is what the test is about. The buffer is larger than any structure.
            let result = unsafe {
                let function: Function = std::mem::transmute(find(library, name));
                function(
                    value, value, value, value, value, value, value, value, value, value, value, value,
                    value, value,
                )
            };
            buffer.fill(0);
            let code = result as u32;
            if hk_emu_hip::unsupported().contains(&name) {
                // Some check their arguments first.
                assert!(matches!(code, 801 | 11 | 1 | 17 | 400), "{name}: {code}");
            }
            // The names of all codes are known.
            if name.starts_with("hipMem") || name.starts_with("hipModule") {
                // SAFETY: takes any integer and gives a C string.
                let text = unsafe {
                    let name_of: extern "C" fn(u32) -> *const c_char =
                        std::mem::transmute(find(library, "hipGetErrorName"));
                    CStr::from_ptr(name_of(code))
                };
                let text = text.to_str().unwrap();
                assert!(text == "hipSuccess" || text.starts_with("hipError"), "{name}: {code}");
                assert_ne!(text, "hipErrorUnknown", "{name}: {code}");
            }
        }
    }
}

#[test]
fn the_readme_lists_what_is_supported() {
    let mut table = String::from("<!-- What `supported` gives; a test compares. -->\n");
    for (title, names) in hk_emu_hip::supported() {
        let mut names: Vec<_> = names.into_iter().filter(|n| !n.starts_with("_Z")).collect();
        names.sort_unstable();
        let list = names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
        table += &format!("\n**{title}**: {list}\n");
    }
    table += "<!-- end -->";
    let readme = include_str!("../README.md");
    assert!(readme.contains(&table), "README.md should have:\n{table}");
}
