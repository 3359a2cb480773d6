//! Every exported function: that it is there, that the README names it, and that no argument makes it crash.

use crate::programs::built;
use libloading::os::unix::Library;
use std::ffi::c_int;

#[test]
fn every_name_is_exported_and_documented() {
    let names = hk_emu_rccl::supported();
    let want = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let readme = include_str!("../README.md");
    assert!(readme.contains(&want), "the README has not this list:\n{want}");
    // SAFETY: a library of this workspace.
    let library = unsafe { Library::new(built("libhk_emu_rccl.so")) }.unwrap();
    for name in names {
        // SAFETY: not called.
        assert!(unsafe { library.get::<extern "C" fn()>(name) }.is_ok(), "{name}");
    }
}

#[test]
fn null_and_nonsense_are_error_codes() {
    // SAFETY: a library of this workspace.
    let library = unsafe { Library::new(built("libhk_emu_rccl.so")) }.unwrap();
    for name in hk_emu_rccl::supported() {
        type Any = extern "C" fn(usize, usize, usize, usize, usize, usize, usize, usize) -> c_int;
        // Those take the id by value, or nothing.
        let by_value = ["ncclCommInitRank", "ncclCommInitRankConfig"].contains(&name);
        let nothing = ["ncclGroupStart", "ncclGetErrorString", "ncclGetLastError"].contains(&name);
        if by_value || nothing {
            continue;
        }
        // SAFETY: integers and pointers go in registers, and further ones do not matter.
        let function = unsafe { library.get::<Any>(name) }.unwrap();
        let code = function(0, 0, 0, 0, 0, 0, 0, 0);
        let want = if name == "ncclGroupEnd" { 5 } else { 4 };
        assert_eq!(code, want, "{name}");
    }
}
