//! Wild arguments and damaged code objects: any answer will do, a crash will not.

use std::ffi::{c_int, c_void};
use std::process::Command;
use std::ptr::null_mut;

use crate::common::code_object;
use crate::symbols::{Function, find, open};

unsafe extern "C" {
    fn mmap(addr: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, at: i64) -> *mut c_void;
    fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int;
}

/// Calls with wild arguments, and damaged code objects.
const CALLS: usize = 10_000;
const IMAGES: usize = 1_000;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) as usize
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.next() % list.len()]
    }
}

/// Memory between pages that cannot be accessed: what runs past its end is an error, and not the end of the test.
fn guarded(bytes: usize) -> &'static mut [u64] {
    const PAGE: usize = 4096;
    let (none, both, private) = (0, 3, 0x22);
    // SAFETY: new memory, which stays.
    unsafe {
        let start = mmap(null_mut(), bytes + 2 * PAGE, none, private, -1, 0);
        let inside = start.wrapping_byte_add(PAGE);
        assert_eq!(mprotect(inside, bytes, both), 0);
        std::slice::from_raw_parts_mut(inside.cast(), bytes / 8)
    }
}

/// Runs the ignored test of that name in a process of its own.
fn child(name: &str, devices: &str) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]).env("HK_EMU_ARCH", devices);
    let output = child.output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    let tail = &log.lines().rev().take(20).collect::<Vec<_>>();
    assert!(output.status.success(), "{}, last {tail:#?}", output.status);
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "no test `{name}`");
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn wild_calls_do_not_crash() {
    child("fuzz::child_makes_wild_calls", "gfx942,gfx950");
}

#[test]
fn damaged_code_objects_do_not_crash() {
    child("fuzz::child_loads_damaged_code", "gfx942?threads=1&budget=10000");
}

/// What functions call that they are given, and the file that one writes.
fn is_left_out(name: &str) -> bool {
    let parts = ["HostFunc", "Callback", "HostNode", "UserObject", "AddNode", "NodeSetParams", "DotPrint"];
    parts.iter().any(|part| name.contains(part)) || name == "hipCreateChannelDesc"
}

#[test]
#[ignore = "a child process"]
fn child_makes_wild_calls() {
    let library = open();
    let buffer = guarded(1 << 20);
    let start = buffer.as_ptr() as usize;
    let names: Vec<_> = hk_emu_hip::supported().into_iter().flat_map(|(_, names)| names).collect();
    let names: Vec<_> =
        names.into_iter().chain(hk_emu_hip::unsupported()).filter(|name| !is_left_out(name)).collect();
    let mut random = Random(0x2a);
    let value = |random: &mut Random| match random.next() % 8 {
        0 => 0,
        1 => random.next() % 8,
        2 => random.of(&[16, 64, 100, 255, 256, 4096, 65_536, 1 << 20]),
        3 => random.of(&[usize::MAX, usize::MAX / 2, 1 << 31, 1 << 32, 1 << 40, -1i32 as u32 as usize]),
        // Handles, addresses of a device, addresses of nothing.
        4 => ((0x50 + random.next() % 12) << 56) | (random.next() % 40),
        5 => 0x1000_0000_0000 + ((random.next() % 16) << 24) + random.next() % 1024,
        6 => random.of(&[1, 0x1000, 0x0800_0000_0000_0000, 0x1fff_0000_0000, 0xdead_beef_0000]),
        _ => start + 8 * (random.next() % ((1 << 17) - 512)),
    };
    for call in 0..CALLS {
        for _ in 0..64 {
            let at = random.next() % buffer.len();
            buffer[at] = value(&mut random) as u64;
        }
        let name = random.of(&names);
        let args: [usize; 14] = std::array::from_fn(|_| value(&mut random));
        eprintln!("call {call}: {name} {args:x?}");
        // SAFETY: not at all, in general: this is what the test is about. Addresses are of the buffer or of nothing.
        unsafe {
            let function: Function = std::mem::transmute(find(library, name));
            let [a, b, c, d, e, f, g, h, i, j, k, l, m, n] = args;
            function(a, b, c, d, e, f, g, h, i, j, k, l, m, n);
        }
    }
}

#[test]
#[ignore = "a child process"]
fn child_loads_damaged_code() {
    let library = open();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kernels.co");
    code_object("kernels.hip", "gfx942", &path);
    let image = std::fs::read(path).unwrap();
    // SAFETY: functions of the library, whose arguments are integers and pointers.
    let [load, unload, get, launch, reset, synchronize] = [
        "hipModuleLoadData",
        "hipModuleUnload",
        "hipModuleGetFunction",
        "hipModuleLaunchKernel",
        "hipDeviceReset",
        "hipDeviceSynchronize",
    ]
    .map(|name| unsafe { std::mem::transmute::<*mut c_void, Function>(find(library, name)) });
    // SAFETY: pointers are to variables of this test, or to the image.
    let call = |function: Function, args: &[usize]| unsafe {
        let a = |i: usize| args.get(i).copied().unwrap_or(0);
        function(a(0), a(1), a(2), a(3), a(4), a(5), a(6), a(7), a(8), a(9), a(10), a(11), a(12), a(13))
            as c_int
    };
    let names: Vec<String> = {
        let text = String::from_utf8_lossy(&image);
        let source = std::fs::read_to_string(crate::common::source("kernels.hip")).unwrap();
        let words = source.split(|c: char| !c.is_alphanumeric() && c != '_');
        let mut names: Vec<_> =
            words.filter(|w| text.contains(&format!("{w}.kd"))).map(str::to_owned).collect();
        names.sort();
        names.dedup();
        names
    };
    assert!(!names.is_empty());
    let buffer = guarded(image.len().next_multiple_of(4096));
    let mut random = Random(7);
    let (mut loaded, mut launched) = (0, 0);
    for n in 0..IMAGES {
        let mut damaged = image.clone();
        for _ in 0..1 + random.next() % 8 {
            let at = random.next() % damaged.len();
            damaged[at] = random.of(&[0, 1, 0x7f, 0x80, 0xff, random.0 as u8]);
        }
        if random.next().is_multiple_of(8) {
            let keep = random.next() % damaged.len();
            damaged[keep..].fill(0);
        }
        bytemuck::cast_slice_mut::<u64, u8>(buffer)[..damaged.len()].copy_from_slice(&damaged);
        eprintln!("image {n}");
        let mut module = 0usize;
        if call(load, &[(&raw mut module) as usize, buffer.as_ptr() as usize]) != 0 {
            continue;
        }
        loaded += 1;
        for name in &names {
            let (mut function, name) = (0usize, std::ffi::CString::new(name.as_str()).unwrap());
            if call(get, &[(&raw mut function) as usize, module, name.as_ptr() as usize]) != 0 {
                continue;
            }
            // More arguments than any of these kernels has.
            let values = [0x1000_0200_0000usize; 64];
            let params: Vec<usize> = values.iter().map(|value| std::ptr::from_ref(value) as usize).collect();
            call(launch, &[function, 2, 1, 1, 64, 1, 1, 0, 0, params.as_ptr() as usize, 0]);
            call(synchronize, &[]);
            launched += 1;
        }
        call(unload, &[module]);
        call(reset, &[]);
    }
    assert!(loaded > IMAGES / 10 && launched > IMAGES / 10, "{loaded} loaded, {launched} launched");
}
