//! What calls cost: launches of a kernel that does nothing, and what comes with them.

#[path = "../tests/common/mod.rs"]
mod common;

use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};

type Ptr = *mut c_void;

#[rustfmt::skip] // prototypes
unsafe extern "C" {
    fn hipModuleLoadData(module: *mut Ptr, image: *const c_void) -> c_int;
    fn hipModuleGetFunction(function: *mut Ptr, module: Ptr, name: *const std::ffi::c_char) -> c_int;
    fn hipModuleLaunchKernel(f: Ptr, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, lds: u32, stream: Ptr, params: *mut Ptr, extra: *mut Ptr) -> c_int;
    fn hipDeviceSynchronize() -> c_int;
    fn hipEventCreateWithFlags(event: *mut Ptr, flags: u32) -> c_int;
    fn hipEventRecord(event: Ptr, stream: Ptr) -> c_int;
    fn hipMalloc(ptr: *mut Ptr, bytes: usize) -> c_int;
    fn hipMemsetAsync(dst: Ptr, value: c_int, bytes: usize, stream: Ptr) -> c_int;
}

/// Calls a function that cannot fail here.
macro_rules! ok {
    ($($call:tt)*) => {
        // SAFETY: pointers are to variables of this program.
        assert_eq!(unsafe { $($call)* }, 0, "{}", stringify!($($call)*))
    };
}

/// Calls between two waits: as many as a program has in flight.
const IN_FLIGHT: u64 = 64;

fn calls(c: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kernels.co");
    common::code_object("kernels.hip", "gfx942", &path);
    let image = std::fs::read(path).unwrap();
    let (mut module, mut function, mut event, mut memory) = (null_mut(), null_mut(), null_mut(), null_mut());
    let name = CString::new("nothing").unwrap();
    ok!(hipModuleLoadData(&mut module, image.as_ptr().cast()));
    ok!(hipModuleGetFunction(&mut function, module, name.as_ptr()));
    ok!(hipEventCreateWithFlags(&mut event, 0));
    ok!(hipMalloc(&mut memory, 4096));
    let launch = || {
        let (params, extra) = (null_mut(), null_mut());
        ok!(hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, null_mut(), params, extra));
    };
    let record = || ok!(hipEventRecord(event, null_mut()));
    let fill = || ok!(hipMemsetAsync(memory, 0, 4096, null_mut()));
    let wait = || ok!(hipDeviceSynchronize());
    // The time of the calls, and not of the waits between them.
    let mut timed = |name: &str, call: &dyn Fn()| {
        c.bench_function(name, |b| {
            b.iter_custom(|n| {
                let mut time = Duration::ZERO;
                for first in (0..n).step_by(IN_FLIGHT as usize) {
                    let start = Instant::now();
                    (first..n.min(first + IN_FLIGHT)).for_each(|_| call());
                    time += start.elapsed();
                    wait();
                }
                time
            });
        });
    };
    timed("launch", &launch);
    timed("launch, event", &|| {
        launch();
        record();
    });
    timed("launch, fill", &|| {
        launch();
        fill();
    });
    c.bench_function("launch and wait", |b| {
        b.iter(|| {
            launch();
            wait();
        });
    });
}

criterion_group!(benches, calls);
criterion_main!(benches);
