//! The functions of the API, called as C programs call them.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::common::code_object;

type Ptr = *mut c_void;

#[rustfmt::skip] // prototypes
unsafe extern "C" {
    fn hipInit(flags: u32) -> c_int;
    fn hipSetDevice(device: c_int) -> c_int;
    fn hipGetDevice(device: *mut c_int) -> c_int;
    fn hipDeviceReset() -> c_int;
    fn hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> c_int;
    fn hipDeviceEnablePeerAccess(peer: c_int, flags: u32) -> c_int;
    fn hipDeviceDisablePeerAccess(peer: c_int) -> c_int;
    fn hipDeviceGetP2PAttribute(value: *mut c_int, attribute: c_int, device: c_int, peer: c_int) -> c_int;
    fn hipDeviceSynchronize() -> c_int;
    fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
    fn hipGetDevicePropertiesR0600(properties: Ptr, device: c_int) -> c_int;
    fn hipGetDeviceProperties(properties: Ptr, device: c_int) -> c_int;
    fn hipGetErrorName(code: c_int) -> *const c_char;
    fn hipGetLastError() -> c_int;
    fn hipPeekAtLastError() -> c_int;
    fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> c_int;
    fn hipMalloc(ptr: *mut Ptr, bytes: usize) -> c_int;
    fn hipFree(ptr: Ptr) -> c_int;
    fn hipHostMalloc(ptr: *mut Ptr, bytes: usize, flags: u32) -> c_int;
    fn hipHostFree(ptr: Ptr) -> c_int;
    fn hipHostRegister(ptr: Ptr, bytes: usize, flags: u32) -> c_int;
    fn hipHostUnregister(ptr: Ptr) -> c_int;
    fn hipHostGetFlags(flags: *mut u32, host: Ptr) -> c_int;
    fn hipHostGetDevicePointer(device: *mut Ptr, host: Ptr, flags: u32) -> c_int;
    fn hipMemcpy(dst: Ptr, src: *const c_void, bytes: usize, kind: c_int) -> c_int;
    fn hipMemcpy2D(dst: Ptr, dp: usize, src: *const c_void, sp: usize, w: usize, h: usize, kind: c_int) -> c_int;
    fn hipMemset(dst: Ptr, value: c_int, bytes: usize) -> c_int;
    fn hipMemsetAsync(dst: Ptr, value: c_int, bytes: usize, stream: Ptr) -> c_int;
    fn hipMemsetD16(dst: Ptr, value: u16, count: usize) -> c_int;
    fn hipMemsetD32(dst: Ptr, value: c_int, count: usize) -> c_int;
    fn hipPointerGetAttributes(attributes: *mut Attributes, ptr: *const c_void) -> c_int;
    fn hipMemGetAddressRange(base: *mut Ptr, size: *mut usize, ptr: Ptr) -> c_int;
    fn hipStreamCreate(stream: *mut Ptr) -> c_int;
    fn hipStreamCreateWithFlags(stream: *mut Ptr, flags: u32) -> c_int;
    fn hipStreamDestroy(stream: Ptr) -> c_int;
    fn hipStreamSynchronize(stream: Ptr) -> c_int;
    fn hipStreamQuery(stream: Ptr) -> c_int;
    fn hipStreamWaitEvent(stream: Ptr, event: Ptr, flags: u32) -> c_int;
    fn hipStreamAddCallback(stream: Ptr, f: extern "C" fn(Ptr, c_int, Ptr), data: Ptr, flags: u32) -> c_int;
    fn hipEventCreateWithFlags(event: *mut Ptr, flags: u32) -> c_int;
    fn hipEventRecord(event: Ptr, stream: Ptr) -> c_int;
    fn hipEventSynchronize(event: Ptr) -> c_int;
    fn hipEventQuery(event: Ptr) -> c_int;
    fn hipEventElapsedTime(ms: *mut f32, start: Ptr, stop: Ptr) -> c_int;
    fn hipEventDestroy(event: Ptr) -> c_int;
    fn hipMallocManaged(ptr: *mut Ptr, bytes: usize, flags: u32) -> c_int;
    fn hipMemAdvise(ptr: Ptr, bytes: usize, advice: c_int, device: c_int) -> c_int;
    fn hipMemPrefetchAsync(ptr: Ptr, bytes: usize, device: c_int, stream: Ptr) -> c_int;
    fn hipMemRangeGetAttribute(data: Ptr, size: usize, attribute: c_int, ptr: Ptr, bytes: usize) -> c_int;
    fn hipDeviceGetLimit(value: *mut usize, limit: c_int) -> c_int;
    fn hipDeviceSetLimit(limit: c_int, value: usize) -> c_int;
    fn hipDeviceGetDefaultMemPool(pool: *mut Ptr, device: c_int) -> c_int;
    fn hipDeviceGetMemPool(pool: *mut Ptr, device: c_int) -> c_int;
    fn hipDeviceSetMemPool(device: c_int, pool: Ptr) -> c_int;
    fn hipMemPoolCreate(pool: *mut Ptr, props: *const PoolProps) -> c_int;
    fn hipMemPoolDestroy(pool: Ptr) -> c_int;
    fn hipMemPoolTrimTo(pool: Ptr, bytes: usize) -> c_int;
    fn hipMemPoolGetAttribute(pool: Ptr, attribute: c_int, value: Ptr) -> c_int;
    fn hipMemPoolSetAttribute(pool: Ptr, attribute: c_int, value: Ptr) -> c_int;
    fn hipMallocFromPoolAsync(ptr: *mut Ptr, bytes: usize, pool: Ptr, stream: Ptr) -> c_int;
    fn hipFreeAsync(ptr: Ptr, stream: Ptr) -> c_int;
    fn hipMemcpy3D(parameters: *const Copy3D) -> c_int;
    fn hipIpcGetMemHandle(handle: *mut IpcHandle, ptr: Ptr) -> c_int;
    fn hipIpcOpenMemHandle(ptr: *mut Ptr, handle: IpcHandle, flags: u32) -> c_int;
    fn hipIpcCloseMemHandle(ptr: Ptr) -> c_int;
    fn hipIpcGetEventHandle(handle: *mut IpcHandle, event: Ptr) -> c_int;
    fn hipIpcOpenEventHandle(event: *mut Ptr, handle: IpcHandle) -> c_int;
    fn hipModuleLoad(module: *mut Ptr, path: *const c_char) -> c_int;
    fn hipModuleLoadData(module: *mut Ptr, image: *const c_void) -> c_int;
    fn hipModuleUnload(module: Ptr) -> c_int;
    fn hipModuleGetFunction(function: *mut Ptr, module: Ptr, name: *const c_char) -> c_int;
    fn hipModuleGetGlobal(ptr: *mut Ptr, bytes: *mut usize, module: Ptr, name: *const c_char) -> c_int;
    fn hipFuncGetAttribute(value: *mut c_int, attribute: c_int, function: Ptr) -> c_int;
    fn hipModuleLaunchKernel(f: Ptr, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, lds: u32, stream: Ptr, params: *mut Ptr, extra: *mut Ptr) -> c_int;
    fn hipExtModuleLaunchKernel(f: Ptr, x: u32, y: u32, z: u32, bx: u32, by: u32, bz: u32, lds: usize, stream: Ptr, params: *mut Ptr, extra: *mut Ptr, start: Ptr, stop: Ptr, flags: u32) -> c_int;
    fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(n: *mut c_int, f: Ptr, block: c_int, lds: usize) -> c_int;
    fn hipModuleOccupancyMaxPotentialBlockSize(grid: *mut c_int, block: *mut c_int, f: Ptr, lds: usize, limit: c_int) -> c_int;
}

/// `hipPointerAttribute_t`.
#[repr(C)]
#[derive(Debug, PartialEq)]
struct Attributes {
    kind: c_int,
    device: c_int,
    device_pointer: usize,
    host_pointer: usize,
    managed: c_int,
    flags: u32,
}

/// `hipMemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PoolProps {
    allocation: c_int,
    handles: c_int,
    location: [c_int; 2],
    security: Ptr,
    max_size: usize,
    reserved: [u8; 56],
}

/// `hipIpcMemHandle_t`, `hipIpcEventHandle_t`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
struct IpcHandle([u8; 64]);

/// `hipMemcpy3DParms`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Copy3D {
    src_array: Ptr,
    src_pos: [usize; 3],
    src: [usize; 4],
    dst_array: Ptr,
    dst_pos: [usize; 3],
    dst: [usize; 4],
    extent: [usize; 3],
    kind: c_int,
}

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const INVALID_CONFIGURATION: c_int = 9;
const INVALID_PITCH: c_int = 12;
const INVALID_DIRECTION: c_int = 21;
const INVALID_DEVICE: c_int = 101;
const INVALID_IMAGE: c_int = 200;
const NO_BINARY: c_int = 209;
const UNSUPPORTED_LIMIT: c_int = 215;
const FILE_NOT_FOUND: c_int = 301;
const INVALID_HANDLE: c_int = 400;
const NOT_FOUND: c_int = 500;
const NOT_READY: c_int = 600;
const ILLEGAL_ADDRESS: c_int = 700;
const TIME_OUT: c_int = 702;
const PEER_ACCESS_ALREADY_ENABLED: c_int = 704;
const PEER_ACCESS_NOT_ENABLED: c_int = 705;
const DESTROYED: c_int = 709;
const ALREADY_REGISTERED: c_int = 712;
const NOT_REGISTERED: c_int = 713;
const LAUNCH_FAILURE: c_int = 719;

/// Calls a function and compares its code.
macro_rules! want {
    ($code:expr, $($call:tt)*) => {{
        // SAFETY: pointers are to variables of the test, or wrong on purpose; the library checks them.
        let code = unsafe { $($call)* };
        assert_eq!(code, $code, "{}", stringify!($($call)*));
    }};
}

macro_rules! ok {
    ($($call:tt)*) => { want!(SUCCESS, $($call)*) };
}

fn image(target: &str) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kernels.co");
    code_object("kernels.hip", target, &path);
    std::fs::read(path).unwrap()
}

static IMAGE: LazyLock<Vec<u8>> = LazyLock::new(|| image("gfx942"));

fn module() -> Ptr {
    let mut module = null_mut();
    ok!(hipModuleLoadData(&mut module, IMAGE.as_ptr().cast()));
    module
}

fn function(module: Ptr, name: &str) -> Ptr {
    let (mut function, name) = (null_mut(), CString::new(name).unwrap());
    ok!(hipModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

fn malloc(bytes: usize) -> Ptr {
    let mut ptr = null_mut();
    ok!(hipMalloc(&mut ptr, bytes));
    ptr
}

fn upload<T>(data: &[T]) -> Ptr {
    let ptr = malloc(size_of_val(data));
    ok!(hipMemcpy(ptr, data.as_ptr().cast(), size_of_val(data), 1));
    ptr
}

fn download<T: Copy + Default>(ptr: Ptr, n: usize) -> Vec<T> {
    let mut data = vec![T::default(); n];
    ok!(hipMemcpy(data.as_mut_ptr().cast(), ptr, n * size_of::<T>(), 2));
    data
}

/// Launches with arguments by pointers.
fn launch(f: Ptr, blocks: u32, threads: u32, lds: u32, params: &mut [Ptr]) -> c_int {
    // SAFETY: the pointers are to arguments of the right type.
    unsafe {
        hipModuleLaunchKernel(
            f,
            blocks,
            1,
            1,
            threads,
            1,
            1,
            lds,
            null_mut(),
            params.as_mut_ptr(),
            null_mut(),
        )
    }
}

fn address<T>(value: &mut T) -> Ptr {
    (&raw mut *value).cast()
}

/// Runs the ignored test `name` in a process of its own; gives what it prints to stderr.
fn child(name: &str, devices: &str) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", &format!("api::{name}"), "--ignored", "--nocapture"]).env("HK_EMU_ARCH", devices);
    let output = child.output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("1 passed"), "no test `{name}`");
    text(&output.stderr)
}

#[test]
fn devices_and_errors() {
    ok!(hipInit(0));
    want!(INVALID_VALUE, hipInit(1));
    let (mut device, mut value) = (-1, -1);
    ok!(hipGetDevice(&mut device));
    assert_eq!(device, 0);
    for wrong in [-1, 1, c_int::MAX] {
        want!(INVALID_DEVICE, hipSetDevice(wrong));
    }
    // SAFETY: no arguments.
    unsafe {
        assert_eq!((hipPeekAtLastError(), hipGetLastError()), (INVALID_DEVICE, INVALID_DEVICE));
        assert_eq!((hipPeekAtLastError(), hipGetLastError()), (SUCCESS, SUCCESS));
    }
    for (attribute, want) in
        [(23, 9), (61, 4), (87, 64), (63, 304), (56, 1024), (74, 65_536), (10_002, 65_536)]
    {
        ok!(hipDeviceGetAttribute(&mut value, attribute, 0));
        assert_eq!(value, want, "attribute {attribute}");
    }
    want!(INVALID_VALUE, hipDeviceGetAttribute(&mut value, 5000, 0));
    want!(INVALID_VALUE, hipDeviceGetAttribute(null_mut(), 87, 0));
    want!(INVALID_DEVICE, hipDeviceGetAttribute(&mut value, 87, 1));
    // SAFETY: takes any integer, gives C strings.
    let name = |code| unsafe { CStr::from_ptr(hipGetErrorName(code)) }.to_str().unwrap();
    assert_eq!((name(0), name(700), name(4711)), ("hipSuccess", "hipErrorIllegalAddress", "hipErrorUnknown"));
}

#[test]
fn properties_have_the_published_layouts() {
    let text = |bytes: &[u8]| CStr::from_bytes_until_nul(bytes).unwrap().to_str().unwrap().to_owned();
    let int = |bytes: &[u8], at: usize| i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let long = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let (mut new, mut old) = ([0xaau8; 1480], [0xaau8; 800]);
    ok!(hipGetDevicePropertiesR0600(new.as_mut_ptr().cast(), 0));
    ok!(hipGetDeviceProperties(old.as_mut_ptr().cast(), 0));
    assert_eq!((&new[1472..], &old[792..]), (&[0xaa; 8][..], &[0xaa; 8][..]));
    assert_eq!(
        (text(&new[1160..]), text(&old[396..])),
        ("gfx942:sramecc+:xnack-".into(), text(&new[1160..]))
    );
    assert_eq!((text(&new), text(&old)), ("hk-emu gfx942 (MI300X)".into(), text(&new)));
    assert_eq!((long(&new, 288), long(&old, 256)), (192 << 30, 192 << 30)); // totalGlobalMem
    assert_eq!((int(&new, 308), int(&old, 276)), (64, 64)); // warpSize
    assert_eq!((int(&new, 360), int(&new, 364)), (9, 4)); // major, minor
    assert_eq!((int(&new, 388), int(&old, 336)), (304, 304)); // multiProcessorCount
    want!(INVALID_VALUE, hipGetDevicePropertiesR0600(null_mut(), 0));
    want!(INVALID_DEVICE, hipGetDevicePropertiesR0600(new.as_mut_ptr().cast(), 7));
}

#[test]
fn device_memory() {
    let mut ptr = null_mut();
    ok!(hipMalloc(&mut ptr, 0));
    assert!(ptr.is_null());
    want!(INVALID_VALUE, hipMalloc(null_mut(), 16));
    for huge in [usize::MAX, 1 << 60, 200 << 30] {
        want!(OUT_OF_MEMORY, hipMalloc(&mut ptr, huge));
    }
    let data: Vec<u32> = (0..1000).collect();
    let (a, b) = (upload(&data), malloc(4000));
    assert_eq!(a as usize % 256, 0);
    ok!(hipMemcpy(b, a, 4000, 3));
    assert_eq!(download::<u32>(b, 1000), data);
    ok!(hipMemset(b, 0xff, 3));
    ok!(hipMemsetD16(b.wrapping_byte_add(4), 0x1234, 3));
    ok!(hipMemsetD32(b.wrapping_byte_add(12), -2, 2));
    assert_eq!(download::<u32>(b, 6), [0x00ff_ffff, 0x1234_1234, 0x1234, u32::MAX - 1, u32::MAX - 1, 5]);

    // Wrong sizes, places, directions.
    let mut host = vec![0u32; 1001];
    want!(INVALID_VALUE, hipMemcpy(host.as_mut_ptr().cast(), a, 4004, 2));
    want!(INVALID_VALUE, hipMemcpy(host.as_mut_ptr().cast(), a.wrapping_byte_add(4), 4000, 4));
    want!(INVALID_VALUE, hipMemcpy(a, host.as_ptr().cast(), usize::MAX, 1));
    want!(INVALID_VALUE, hipMemcpy(null_mut(), a, 4, 4));
    want!(INVALID_VALUE, hipMemcpy(a, null(), 4, 4));
    want!(INVALID_VALUE, hipMemcpy(host.as_mut_ptr().cast(), host.as_ptr().cast(), 4, 1));
    want!(INVALID_DIRECTION, hipMemcpy(a, host.as_ptr().cast(), 4, 9));
    want!(INVALID_VALUE, hipMemcpy(a, 0x3_0000_0000usize as *const c_void, 4, 1)); // nothing is mapped there
    want!(INVALID_VALUE, hipMemcpy(0x1fff_0000_0000usize as Ptr, host.as_ptr().cast(), 4, 4)); // nor there
    want!(INVALID_VALUE, hipMemset(b, 0, 4001));
    want!(INVALID_VALUE, hipMemset(host.as_mut_ptr().cast(), 0, 4));
    want!(INVALID_VALUE, hipMemsetD32(b, 0, usize::MAX / 2));
    ok!(hipMemcpy(null_mut(), null(), 0, 4));

    // What is known of pointers.
    let inside = a.wrapping_byte_add(100);
    let mut attributes =
        Attributes { kind: -1, device: -1, device_pointer: 0, host_pointer: 1, managed: 1, flags: 1 };
    ok!(hipPointerGetAttributes(&mut attributes, inside));
    let want = Attributes {
        kind: 2,
        device: 0,
        device_pointer: inside as usize,
        host_pointer: 0,
        managed: 0,
        flags: 0,
    };
    assert_eq!(attributes, want);
    ok!(hipPointerGetAttributes(&mut attributes, host.as_ptr().cast()));
    assert_eq!((attributes.kind, attributes.device), (0, -2));
    let (mut base, mut size) = (null_mut(), 0);
    ok!(hipMemGetAddressRange(&mut base, &mut size, inside));
    assert_eq!((base, size), (a, 4000));

    ok!(hipFree(null_mut()));
    want!(INVALID_VALUE, hipFree(inside));
    want!(INVALID_VALUE, hipFree(host.as_mut_ptr().cast()));
    ok!(hipFree(a));
    want!(INVALID_VALUE, hipFree(a));
    want!(INVALID_VALUE, hipMemcpy(host.as_mut_ptr().cast(), a, 4, 4));
    want!(NOT_FOUND, hipMemGetAddressRange(&mut base, &mut size, a));
    ok!(hipFree(b));
}

#[test]
fn rows_of_memory() {
    let host: Vec<u8> = (0..60).collect();
    let device = malloc(64);
    ok!(hipMemset(device, 0, 64));
    ok!(hipMemcpy2D(device, 16, host.as_ptr().cast(), 10, 7, 4, 1));
    let got = download::<u8>(device, 64);
    for (i, byte) in got.iter().enumerate() {
        let (row, column) = (i / 16, i % 16);
        assert_eq!(*byte, if column < 7 { (10 * row + column) as u8 } else { 0 }, "byte {i}");
    }
    want!(INVALID_PITCH, hipMemcpy2D(device, 6, host.as_ptr().cast(), 10, 7, 4, 1));
    want!(INVALID_VALUE, hipMemcpy2D(device, 16, host.as_ptr().cast(), 10, 7, 5, 1));
    want!(INVALID_VALUE, hipMemcpy2D(device, usize::MAX, host.as_ptr().cast(), 10, 7, 5, 1));
    ok!(hipMemcpy2D(device, 16, host.as_ptr().cast(), 10, 7, 0, 1));
    ok!(hipFree(device));
}

#[test]
fn boxes_of_memory() {
    // A 3 x 2 x 2 part of 4 x 3 x 2 bytes, to rows of 8 bytes.
    let host: Vec<u8> = (0..24).collect();
    let device = malloc(48);
    ok!(hipMemset(device, 0, 48));
    let copy = Copy3D {
        src_array: null_mut(),
        src_pos: [1, 1, 0],
        src: [host.as_ptr() as usize, 4, 4, 3],
        dst_array: null_mut(),
        dst_pos: [2, 0, 0],
        dst: [device as usize, 8, 8, 3],
        extent: [3, 2, 2],
        kind: 1,
    };
    ok!(hipMemcpy3D(&copy));
    let got = download::<u8>(device, 48);
    for (i, byte) in got.iter().enumerate() {
        let [x, y, z] = [i % 8, i / 8 % 3, i / 24];
        let want = if (2..5).contains(&x) && y < 2 { (x - 1) + 4 * (y + 1) + 12 * z } else { 0 };
        assert_eq!(usize::from(*byte), want, "byte {i}");
    }
    want!(INVALID_VALUE, hipMemcpy3D(&Copy3D { src_pos: [2, 1, 0], ..copy })); // past the row
    want!(INVALID_VALUE, hipMemcpy3D(&Copy3D { dst_pos: [2, 2, 0], ..copy })); // past the memory
    want!(INVALID_VALUE, hipMemcpy3D(&Copy3D { dst: [0, 8, 8, 3], ..copy }));
    want!(INVALID_PITCH, hipMemcpy3D(&Copy3D { dst: [device as usize, 8, 9, 3], ..copy }));
    want!(INVALID_DIRECTION, hipMemcpy3D(&Copy3D { kind: 9, ..copy }));
    want!(INVALID_VALUE, hipMemcpy3D(null()));
    ok!(hipMemcpy3D(&Copy3D { extent: [3, 0, 2], ..copy }));
    ok!(hipFree(device));
}

#[test]
fn pools_and_limits() {
    let attribute = |pool, number| {
        let mut value = 0u64;
        ok!(hipMemPoolGetAttribute(pool, number, address(&mut value)));
        value
    };
    let (mut own, mut pool) = (null_mut(), null_mut());
    ok!(hipDeviceGetDefaultMemPool(&mut own, 0));
    want!(INVALID_DEVICE, hipDeviceGetDefaultMemPool(&mut own, 1));
    let props = PoolProps {
        allocation: 1,
        handles: 0,
        location: [1, 0],
        security: null_mut(),
        max_size: 4096,
        reserved: [0; 56],
    };
    for wrong in [PoolProps { allocation: 0, ..props }, PoolProps { location: [1, 7], ..props }] {
        want!(INVALID_VALUE, hipMemPoolCreate(&mut pool, &wrong));
    }
    ok!(hipMemPoolCreate(&mut pool, &props));
    ok!(hipDeviceSetMemPool(0, pool));
    let mut current = null_mut();
    ok!(hipDeviceGetMemPool(&mut current, 0));
    assert_eq!(current, pool);
    let (mut a, mut b) = (null_mut(), null_mut());
    ok!(hipMallocFromPoolAsync(&mut a, 3000, pool, null_mut()));
    want!(OUT_OF_MEMORY, hipMallocFromPoolAsync(&mut b, 2000, pool, null_mut()));
    assert_eq!([5, 6, 7, 8].map(|n| attribute(pool, n)), [3000; 4]);
    let mut hold = 3500u64;
    ok!(hipMemPoolSetAttribute(pool, 4, address(&mut hold)));
    ok!(hipFreeAsync(a, null_mut()));
    want!(INVALID_VALUE, hipFreeAsync(a, null_mut()));
    want!(INVALID_VALUE, hipFree(a));
    assert_eq!([5, 6, 7, 8].map(|n| attribute(pool, n)), [3000, 3000, 0, 3000]);
    ok!(hipMallocFromPoolAsync(&mut b, 3000, pool, null_mut()));
    assert_eq!((a, attribute(pool, 7)), (b, 3000), "the pool has memory of this size");
    ok!(hipFreeAsync(b, null_mut()));
    ok!(hipMemPoolTrimTo(pool, 10));
    want!(INVALID_VALUE, hipMemPoolSetAttribute(pool, 8, address(&mut hold)));
    want!(INVALID_VALUE, hipMemPoolGetAttribute(pool, 9, address(&mut hold)));
    assert_eq!([5, 1].map(|n| attribute(pool, n)), [0, 1]);
    want!(INVALID_VALUE, hipMemPoolDestroy(own));
    ok!(hipMemPoolDestroy(pool));
    want!(INVALID_VALUE, hipMemPoolDestroy(pool));
    ok!(hipDeviceGetMemPool(&mut current, 0));
    assert_eq!(current, own);

    let mut limit = 0;
    ok!(hipDeviceSetLimit(0, 4096));
    ok!(hipDeviceGetLimit(&mut limit, 0));
    assert_eq!(limit, 4096);
    want!(INVALID_VALUE, hipDeviceSetLimit(0, 1 << 20));
    for other in [-1, 1, 3] {
        want!(UNSUPPORTED_LIMIT, hipDeviceSetLimit(other, 1));
    }
}

#[test]
fn advice_about_managed_memory() {
    let mut managed = null_mut();
    ok!(hipMallocManaged(&mut managed, 4096, 1));
    let attribute = |number| {
        let mut value = [7i32; 2];
        let size = if number == 3 { 8 } else { 4 };
        ok!(hipMemRangeGetAttribute(address(&mut value), size, number, managed, 4096));
        value
    };
    assert_eq!([1, 2, 3, 4].map(&attribute), [[0, 7], [-2, 7], [-2, -2], [-2, 7]]);
    for (advice, device) in [(1, 0), (3, -1), (5, 0)] {
        ok!(hipMemAdvise(managed, 4096, advice, device));
    }
    ok!(hipMemPrefetchAsync(managed, 4096, 0, null_mut()));
    assert_eq!([1, 2, 3, 4].map(&attribute), [[1, 7], [-1, 7], [0, -2], [0, 7]]);
    let mut value = 0;
    want!(INVALID_VALUE, hipMemAdvise(managed, 4097, 1, 0));
    want!(INVALID_DEVICE, hipMemAdvise(managed, 4096, 3, 9));
    want!(INVALID_VALUE, hipMemAdvise(managed, 4096, 9, 0));
    want!(INVALID_VALUE, hipMemRangeGetAttribute(address(&mut value), 3, 1, managed, 4096));
    want!(INVALID_VALUE, hipMemRangeGetAttribute(null_mut(), 4, 1, managed, 4096));
    let device = malloc(64);
    want!(INVALID_VALUE, hipMemAdvise(device, 64, 1, 0));
    ok!(hipFree(device));
    ok!(hipFree(managed));
}

#[test]
fn kernels_use_host_memory() {
    let module = module();
    let poke = function(module, "poke");
    let mut host = null_mut();
    ok!(hipHostMalloc(&mut host, 10_000, 0));
    let mut on_device = null_mut();
    ok!(hipHostGetDevicePointer(&mut on_device, host, 0));
    let mut own = vec![7i32; 100];
    let start: Ptr = own.as_mut_ptr().cast();
    ok!(hipHostRegister(start, 400, 0));
    want!(ALREADY_REGISTERED, hipHostRegister(start.wrapping_byte_add(4), 4, 0));
    want!(ALREADY_REGISTERED, hipHostRegister(start.wrapping_byte_sub(4), 8, 0));
    ok!(hipHostRegister(start, 400, 0)); // again, as in ROCm
    for (at, what) in
        [(on_device.wrapping_byte_add(8000), "allocated"), (start.wrapping_byte_add(40), "registered")]
    {
        let mut at = at;
        assert_eq!(launch(poke, 1, 64, 0, &mut [address(&mut at)]), SUCCESS);
        ok!(hipDeviceSynchronize());
        // SAFETY: inside of memory that is alive.
        assert_eq!(unsafe { at.cast::<i32>().read() }, 42, "{what}");
    }
    assert_eq!((own[9], own[10], own[11]), (7, 42, 7));
    let mut attributes =
        Attributes { kind: -1, device: -1, device_pointer: 0, host_pointer: 1, managed: 1, flags: 1 };
    ok!(hipPointerGetAttributes(&mut attributes, host));
    assert_eq!((attributes.kind, attributes.host_pointer), (1, host as usize));
    // A kernel and the host wait for each other's writes.
    let answer = function(module, "answer");
    for (mut at, what) in [(on_device, "allocated"), (start, "registered")] {
        // SAFETY: the first word of memory that is alive; the kernel accesses it by atomics as well.
        let word = unsafe { std::sync::atomic::AtomicI32::from_ptr(at.cast()) };
        word.store(0, Relaxed);
        assert_eq!(launch(answer, 1, 1, 0, &mut [address(&mut at)]), SUCCESS);
        let began = std::time::Instant::now();
        while word.load(Relaxed) != 1 && began.elapsed().as_secs() < 60 {
            std::thread::yield_now();
        }
        assert_eq!(word.load(Relaxed), 1, "the kernel has written: {what}");
        word.store(2, Relaxed);
        ok!(hipDeviceSynchronize());
        assert_eq!(word.load(Relaxed), 3, "the kernel has seen it: {what}");
    }
    ok!(hipHostUnregister(start));
    // What does not begin with a word is copied.
    ok!(hipHostRegister(start.wrapping_byte_add(2), 398, 0));
    let mut at = start.wrapping_byte_add(80);
    assert_eq!(launch(poke, 1, 64, 0, &mut [address(&mut at)]), SUCCESS);
    ok!(hipDeviceSynchronize());
    // SAFETY: inside of memory that is alive.
    assert_eq!([19, 20, 21].map(|i| unsafe { start.cast::<i32>().add(i).read() }), [7, 42, 7]);
    ok!(hipHostUnregister(start.wrapping_byte_add(2)));
    want!(NOT_REGISTERED, hipHostUnregister(start));
    want!(NOT_REGISTERED, hipHostUnregister(host));
    want!(INVALID_VALUE, hipFree(start));
    ok!(hipHostFree(host));
    want!(INVALID_VALUE, hipHostFree(host));
    want!(INVALID_VALUE, hipHostMalloc(&mut host, 16, 0x100));
    ok!(hipModuleUnload(module));
}

const PAGE: usize = 4096;
const READ_ONLY: u32 = 8;

/// A page of zeros with a page on both sides, so that nothing else is mapped there once it is given back.
fn page() -> Ptr {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    let pages = unsafe { libc::mmap(null_mut(), 3 * PAGE, protection, flags, -1, 0) };
    assert_ne!(pages, libc::MAP_FAILED);
    pages.wrapping_byte_add(PAGE)
}

fn protect(page: Ptr, protection: c_int) {
    // SAFETY: a page of the test's own, to which it has no references.
    assert_eq!(unsafe { libc::mprotect(page, PAGE, protection) }, 0);
}

#[test]
fn registered_memory_may_be_for_reads_only() {
    let log = child("child_registers_for_reads_only", "gfx942");
    assert!(log.contains("read-only write of 4 bytes") && log.contains("\"hipHostRegister\""), "{log}");
}

#[test]
#[ignore = "a child process"]
fn child_registers_for_reads_only() {
    let (module, at, mut on_device) = (module(), page(), malloc(4));
    // SAFETY: a page that is mapped, for reads at least.
    let word = || unsafe { at.cast::<i32>().read_volatile() };
    // As on AMD's devices the flag changes nothing: where the program may write, so may kernels.
    let mut flags = 0;
    ok!(hipHostRegister(at, PAGE, READ_ONLY));
    ok!(hipHostGetFlags(&mut flags, at));
    assert_eq!(flags, READ_ONLY);
    assert_eq!(launch(function(module, "poke"), 1, 1, 0, &mut [address(&mut at.clone())]), SUCCESS);
    ok!(hipDeviceSynchronize());
    assert_eq!(word(), 42);
    ok!(hipHostUnregister(at));

    // What the program itself may only read is for reads by kernels, too, by any flags.
    protect(at, libc::PROT_READ);
    for flags in [0, READ_ONLY] {
        ok!(hipHostRegister(at, PAGE, flags));
        ok!(hipMemset(on_device, 0, 4));
        let mut params = [address(&mut on_device), address(&mut at.clone())];
        assert_eq!(launch(function(module, "peek"), 1, 1, 0, &mut params), SUCCESS);
        assert_eq!(download::<i32>(on_device, 1), [42]);
        want!(INVALID_VALUE, hipMemcpy(at, on_device, 4, 2));
        ok!(hipHostUnregister(at));
    }
    protect(at, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the page may be written again.
    unsafe { at.cast::<i32>().write(7) };
    protect(at, libc::PROT_READ);
    ok!(hipHostRegister(at, PAGE, READ_ONLY));
    assert_eq!(launch(function(module, "poke"), 1, 1, 0, &mut [address(&mut at.clone())]), SUCCESS);
    want!(ILLEGAL_ADDRESS, hipDeviceSynchronize());
    assert_eq!(word(), 7);
}

#[test]
fn a_kernel_that_uses_registered_memory_that_is_gone_faults() {
    let log = child("child_gives_registered_memory_back", "gfx942*2");
    let count = |text: &str| log.matches(text).count();
    assert_eq!(count("use-after-free write of 4 bytes"), 4, "{log}");
    assert_eq!(count("freed allocation \"hipHostRegister\""), 4, "{log}");
    assert_eq!(count("is no longer there"), 4, "{log}");
}

#[test]
#[ignore = "a child process"]
fn child_gives_registered_memory_back() {
    // In place, and copied because it does not begin with a word or may not be written.
    for (what, offset) in [("unregistered", 0), ("unmapped", 0), ("unmapped", 2), ("unmapped, read-only", 0)]
    {
        let (module, page) = (module(), page());
        let start = page.wrapping_byte_add(offset);
        if what.ends_with("read-only") {
            protect(page, libc::PROT_READ);
        }
        ok!(hipHostRegister(start, 400, 0));
        if what == "unregistered" {
            ok!(hipHostUnregister(start));
        } else {
            // SAFETY: the test has no references to it.
            assert_eq!(unsafe { libc::munmap(page, PAGE) }, 0);
            let mut word = 0;
            want!(INVALID_VALUE, hipMemcpy(address(&mut word), start, 4, 0));
        }
        // Other kernels run; the memory is gone for good.
        for _ in 0..2 {
            assert_eq!(launch(function(module, "nothing"), 1, 1, 0, &mut []), SUCCESS);
            ok!(hipDeviceSynchronize());
        }
        let mut at = page.wrapping_byte_add(8);
        assert_eq!(launch(function(module, "poke"), 1, 1, 0, &mut [address(&mut at)]), SUCCESS, "{what}");
        want!(ILLEGAL_ADDRESS, hipDeviceSynchronize());
        ok!(hipDeviceReset());
        want!(NOT_REGISTERED, hipHostUnregister(start));
    }
    // A program may unregister what it has given back, and register it again once it is there.
    let (module, page) = (module(), page());
    ok!(hipHostRegister(page, PAGE, 0));
    protect(page, libc::PROT_NONE);
    assert_eq!(launch(function(module, "nothing"), 1, 1, 0, &mut []), SUCCESS);
    ok!(hipDeviceSynchronize());
    ok!(hipHostUnregister(page));
    want!(INVALID_VALUE, hipHostRegister(page, PAGE, 0));
    protect(page, libc::PROT_READ | libc::PROT_WRITE);
    ok!(hipHostRegister(page, PAGE, 0));
    assert_eq!(launch(function(module, "poke"), 1, 1, 0, &mut [address(&mut page.clone())]), SUCCESS);
    ok!(hipDeviceSynchronize());
    // SAFETY: the test's page.
    assert_eq!(unsafe { page.cast::<i32>().read_volatile() }, 42);
    ok!(hipHostUnregister(page));
}

extern "C" fn callback(stream: Ptr, status: c_int, data: Ptr) {
    // SAFETY: the test passes a pair.
    unsafe { *data.cast::<(usize, c_int)>() = (stream as usize, status) };
}

#[test]
fn streams_and_events() {
    let (mut stream, mut start, mut stop, mut untimed) = (null_mut(), null_mut(), null_mut(), null_mut());
    ok!(hipStreamCreate(&mut stream));
    ok!(hipEventCreateWithFlags(&mut start, 0));
    ok!(hipEventCreateWithFlags(&mut stop, 1));
    ok!(hipEventCreateWithFlags(&mut untimed, 2));
    want!(INVALID_VALUE, hipEventCreateWithFlags(&mut untimed.clone(), 0x100));
    let mut ms = 0.0;
    want!(INVALID_HANDLE, hipEventElapsedTime(&mut ms, start, stop)); // not recorded
    ok!(hipEventRecord(start, stream));
    std::thread::sleep(std::time::Duration::from_millis(2));
    ok!(hipEventRecord(stop, null_mut()));
    ok!(hipEventRecord(untimed, stream));
    ok!(hipEventSynchronize(stop));
    ok!(hipEventElapsedTime(&mut ms, start, stop));
    assert!((2.0..1000.0).contains(&ms), "{ms} ms");
    ok!(hipEventElapsedTime(&mut ms, stop, start));
    assert!(ms < -1.9, "{ms} ms");
    ok!(hipEventElapsedTime(&mut ms, stop, stop));
    assert_eq!(ms, 0.0);
    want!(INVALID_HANDLE, hipEventElapsedTime(&mut ms, start, untimed));
    want!(INVALID_VALUE, hipEventElapsedTime(null_mut(), start, stop));
    ok!(hipStreamWaitEvent(stream, start, 0));
    for special in [0usize, 1, 2] {
        ok!(hipStreamSynchronize(special as Ptr));
        want!(INVALID_HANDLE, hipStreamDestroy(special as Ptr));
    }
    let mut told = (0usize, -1);
    ok!(hipStreamAddCallback(stream, callback, address(&mut told), 0));
    ok!(hipStreamSynchronize(stream));
    assert_eq!(told, (stream as usize, SUCCESS));

    // Handles of another type, and of the past.
    want!(DESTROYED, hipStreamSynchronize(start));
    want!(INVALID_HANDLE, hipEventRecord(stream, stream));
    want!(DESTROYED, hipEventRecord(start, stop));
    ok!(hipEventDestroy(start));
    want!(DESTROYED, hipEventDestroy(start));
    want!(INVALID_HANDLE, hipEventSynchronize(start));
    want!(INVALID_HANDLE, hipEventDestroy(null_mut()));
    ok!(hipStreamDestroy(stream));
    want!(DESTROYED, hipStreamDestroy(stream));
    want!(DESTROYED, hipStreamQuery(stream));
    want!(DESTROYED, hipEventRecord(stop, stream));
    ok!(hipEventDestroy(stop));
    ok!(hipEventDestroy(untimed));
}

/// Waits until the test opens the gate.
extern "C" fn gate(_stream: Ptr, _status: c_int, open: Ptr) {
    // SAFETY: the test passes one, and waits for the stream.
    let open = unsafe { &*open.cast::<AtomicBool>() };
    while !open.load(Relaxed) {
        std::thread::yield_now();
    }
}

#[test]
fn work_is_in_flight() {
    const NON_BLOCKING: u32 = 1;
    let (mut event, mut memory) = (null_mut(), null_mut());
    let [mut first, mut second, mut third, mut blocking] = [null_mut(); 4];
    for stream in [&mut first, &mut second, &mut third] {
        ok!(hipStreamCreateWithFlags(stream, NON_BLOCKING));
    }
    ok!(hipStreamCreate(&mut blocking));
    ok!(hipEventCreateWithFlags(&mut event, 0));
    ok!(hipMalloc(&mut memory, 8));
    let mut open = AtomicBool::new(false);
    ok!(hipStreamAddCallback(first, gate, address(&mut open), 0));
    ok!(hipEventRecord(event, first));
    want!(NOT_READY, hipStreamQuery(first));
    want!(NOT_READY, hipEventQuery(event));
    want!(NOT_READY, hipEventElapsedTime(&mut 0.0, event, event));
    let mut never = null_mut();
    ok!(hipEventCreateWithFlags(&mut never, 0));
    want!(INVALID_HANDLE, hipEventElapsedTime(&mut 0.0, event, never));
    ok!(hipEventDestroy(never));
    // A stream that waits for the event, and one that does not.
    ok!(hipStreamWaitEvent(second, event, 0));
    ok!(hipMemsetAsync(memory, 1, 4, second));
    ok!(hipMemsetAsync(memory.wrapping_byte_add(4), 2, 4, third));
    want!(NOT_READY, hipStreamQuery(second));
    ok!(hipStreamSynchronize(third));
    ok!(hipStreamQuery(third));
    open.store(true, Relaxed);
    ok!(hipStreamSynchronize(second));
    ok!(hipEventQuery(event));
    ok!(hipStreamQuery(first));
    assert_eq!(download::<u8>(memory, 8), [1, 1, 1, 1, 2, 2, 2, 2]);
    // The null stream is in order with blocking streams.
    open.store(false, Relaxed);
    ok!(hipStreamAddCallback(blocking, gate, address(&mut open), 0));
    ok!(hipMemset(memory, 3, 8));
    want!(NOT_READY, hipStreamQuery(null_mut()));
    ok!(hipStreamQuery(first));
    open.store(true, Relaxed);
    assert_eq!(download::<u8>(memory, 8), [3; 8]);
    ok!(hipStreamQuery(blocking));
    for stream in [first, second, third, blocking] {
        ok!(hipStreamDestroy(stream));
    }
    ok!(hipEventDestroy(event));
    ok!(hipFree(memory));
}

const INVALID_CONTEXT: c_int = 201;
const LAZY: u32 = 1;
const INTERPROCESS: u32 = 4 | 2;

/// A handle for a process to come, and in it.
fn handle_in(name: &str) -> IpcHandle {
    let text = std::env::var(name).unwrap();
    IpcHandle(std::array::from_fn(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()))
}

fn handle_out(IpcHandle(bytes): IpcHandle) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn memory_and_events_of_two_processes() {
    let none = IpcHandle([0; 64]);
    let (memory, [mut first, mut second, mut event]) = (upload(&[1i32, 2, 3, 4]), [none; 3]);
    want!(INVALID_VALUE, hipIpcGetMemHandle(null_mut(), memory));
    want!(INVALID_VALUE, hipIpcGetMemHandle(&mut first, null_mut()));
    want!(INVALID_VALUE, hipIpcGetMemHandle(&mut first, memory.wrapping_byte_add(16)));
    ok!(hipIpcGetMemHandle(&mut first, memory));
    ok!(hipIpcGetMemHandle(&mut second, memory.wrapping_byte_add(8)));
    assert_ne!(first, second);
    assert_eq!(download::<i32>(memory, 4), [1, 2, 3, 4]);
    let mut own = null_mut();
    want!(INVALID_CONTEXT, hipIpcOpenMemHandle(&mut own, first, LAZY));
    want!(INVALID_VALUE, hipIpcOpenMemHandle(&mut own, first, 0));
    want!(INVALID_VALUE, hipIpcOpenMemHandle(&mut own, none, LAZY));
    want!(INVALID_VALUE, hipIpcCloseMemHandle(memory));

    let (mut stream, [mut shared, mut private]) = (null_mut(), [null_mut(); 2]);
    ok!(hipStreamCreate(&mut stream));
    want!(INVALID_VALUE, hipEventCreateWithFlags(&mut shared, 4));
    ok!(hipEventCreateWithFlags(&mut shared, INTERPROCESS));
    ok!(hipEventCreateWithFlags(&mut private, 2));
    want!(INVALID_VALUE, hipIpcGetEventHandle(null_mut(), shared));
    want!(INVALID_VALUE, hipIpcGetEventHandle(&mut event, null_mut()));
    want!(INVALID_CONFIGURATION, hipIpcGetEventHandle(&mut event, private));
    ok!(hipIpcGetEventHandle(&mut event, shared));
    want!(INVALID_CONTEXT, hipIpcOpenEventHandle(&mut own, event));
    want!(INVALID_VALUE, hipIpcOpenEventHandle(&mut own, first));

    // The other process finds work of this one in flight: until it has said so.
    let mut open = AtomicBool::new(false);
    ok!(hipStreamAddCallback(stream, gate, address(&mut open), 0));
    ok!(hipEventRecord(shared, stream));
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "api::child_opens_memory_and_events", "--ignored", "--nocapture"]);
    child.env("FIRST", handle_out(first)).env("SECOND", handle_out(second)).env("EVENT", handle_out(event));
    let mut child = child.env("HK_EMU_ARCH", "gfx950").stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let found = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("in flight")));
    open.store(true, Relaxed);
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    assert!(found.is_some() && child.wait().unwrap().success(), "{rest:?}");
    assert_eq!(download::<i32>(memory, 4), [42, 2, 3, 42]);
    ok!(hipEventSynchronize(shared)); // as the other process has recorded it
    for event in [shared, private] {
        ok!(hipEventDestroy(event));
    }
    ok!(hipStreamDestroy(stream));
    ok!(hipFree(memory));
}

#[test]
#[ignore = "a process for the test above"]
fn child_opens_memory_and_events() {
    let (mut event, [mut first, mut second, mut again]) = (null_mut(), [null_mut(); 3]);
    ok!(hipIpcOpenEventHandle(&mut event, handle_in("EVENT")));
    want!(NOT_READY, hipEventQuery(event));
    ok!(hipStreamWaitEvent(null_mut(), event, 0));
    want!(NOT_READY, hipStreamQuery(null_mut()));
    println!("in flight");
    ok!(hipStreamSynchronize(null_mut()));
    ok!(hipEventQuery(event));

    ok!(hipIpcOpenMemHandle(&mut first, handle_in("FIRST"), LAZY));
    ok!(hipIpcOpenMemHandle(&mut second, handle_in("SECOND"), LAZY));
    ok!(hipIpcOpenMemHandle(&mut again, handle_in("FIRST"), LAZY));
    assert_eq!((first.wrapping_byte_add(8), first), (second, again));
    assert_eq!(download::<i32>(first, 4), [1, 2, 3, 4]);
    want!(INVALID_VALUE, hipFree(first));
    let image = image("gfx950");
    let mut module = null_mut();
    ok!(hipModuleLoadData(&mut module, image.as_ptr().cast()));
    let poke = function(module, "poke");
    let mut last = second.wrapping_byte_add(4);
    for at in [&mut first, &mut last] {
        assert_eq!(launch(poke, 1, 1, 0, &mut [address(at)]), SUCCESS);
    }
    ok!(hipEventRecord(event, null_mut()));
    ok!(hipEventSynchronize(event));
    for at in [first, second] {
        ok!(hipIpcCloseMemHandle(at));
        assert_eq!(download::<i32>(again, 1), [42]);
    }
    ok!(hipIpcCloseMemHandle(again));
    want!(INVALID_VALUE, hipIpcCloseMemHandle(again));
    want!(INVALID_VALUE, hipMemcpy(address(&mut [0i32]), again, 4, 2));
    ok!(hipEventDestroy(event));
}

#[test]
fn the_size_of_memory_is_an_option() {
    child("child_has_little_memory", "gfx942?memory=1G");
    // More than the host has: what is not written costs nothing.
    child("child_has_much_memory", "gfx950?memory=900G");
}

#[test]
#[ignore = "a child process"]
fn child_has_little_memory() {
    let info = || {
        let (mut free, mut total) = (0, 0);
        ok!(hipMemGetInfo(&mut free, &mut total));
        (free, total)
    };
    assert_eq!(info(), (1 << 30, 1 << 30));
    let big = malloc(600 << 20);
    assert_eq!(info(), (424 << 20, 1 << 30));
    want!(OUT_OF_MEMORY, hipMalloc(&mut null_mut(), 425 << 20));
    want!(OUT_OF_MEMORY, hipMallocManaged(&mut null_mut(), 2 << 30, 1));
    // The process goes on.
    let rest = malloc(424 << 20);
    assert_eq!(info().0, 0);
    want!(OUT_OF_MEMORY, hipMalloc(&mut null_mut(), 1));
    ok!(hipMemset(rest, 7, 4));
    assert_eq!(download::<u8>(rest, 4), [7; 4]);
    ok!(hipFree(big));
    assert_eq!(info().0, 600 << 20);
    ok!(hipFree(malloc(600 << 20)));
}

#[test]
#[ignore = "a child process"]
fn child_has_much_memory() {
    const BYTES: usize = 800 << 30;
    let all = malloc(BYTES);
    let last = all.wrapping_byte_add(BYTES - 8);
    ok!(hipMemset(last, 1, 4));
    assert_eq!(download::<u32>(last, 2), [0x0101_0101, 0xfffa_fffa]);
    want!(OUT_OF_MEMORY, hipMalloc(&mut null_mut(), 101 << 30));
    ok!(hipFree(all));
}

#[test]
fn modules() {
    let mut module = null_mut();
    want!(INVALID_VALUE, hipModuleLoadData(&mut module, null()));
    want!(INVALID_VALUE, hipModuleLoadData(null_mut(), IMAGE.as_ptr().cast()));
    want!(INVALID_IMAGE, hipModuleLoadData(&mut module, [0u8; 128].as_ptr().cast()));
    want!(INVALID_IMAGE, hipModuleLoadData(&mut module, 0x3_0000_0000usize as *const c_void));
    want!(NO_BINARY, hipModuleLoadData(&mut module, image("gfx950").as_ptr().cast()));
    want!(FILE_NOT_FOUND, hipModuleLoad(&mut module, c"/no/such/file".as_ptr()));
    want!(INVALID_VALUE, hipModuleLoad(&mut module, null()));
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = CString::new(file.path().to_str().unwrap()).unwrap();
    for len in [0, 3, 64, IMAGE.len() / 2] {
        std::fs::write(file.path(), &IMAGE[..len]).unwrap();
        want!(INVALID_IMAGE, hipModuleLoad(&mut module, path.as_ptr()));
        assert!(module.is_null());
    }
    std::fs::write(file.path(), &*IMAGE).unwrap();
    ok!(hipModuleLoad(&mut module, path.as_ptr()));

    let f = function(module, "saxpy");
    assert_eq!(function(module, "saxpy"), f);
    let mut other = null_mut();
    want!(NOT_FOUND, hipModuleGetFunction(&mut other, module, c"sax".as_ptr()));
    want!(INVALID_VALUE, hipModuleGetFunction(&mut other, module, c"".as_ptr()));
    want!(INVALID_VALUE, hipModuleGetFunction(&mut other, module, null()));
    want!(INVALID_HANDLE, hipModuleGetFunction(&mut other, f, c"saxpy".as_ptr()));
    let (mut ptr, mut bytes) = (null_mut(), 0);
    ok!(hipModuleGetGlobal(&mut ptr, &mut bytes, module, c"offset".as_ptr()));
    assert_eq!((bytes, download::<f32>(ptr, 2)), (8, vec![0.0, 100.0]));
    want!(NOT_FOUND, hipModuleGetGlobal(&mut ptr, &mut bytes, module, c"saxpy".as_ptr()));
    want!(INVALID_VALUE, hipFree(ptr));

    let mut value = 0;
    ok!(hipFuncGetAttribute(&mut value, 0, f));
    assert_eq!(value, 1024);
    ok!(hipFuncGetAttribute(&mut value, 8, f));
    assert_eq!(value, 65_536);
    want!(INVALID_VALUE, hipFuncGetAttribute(&mut value, 77, f));
    let (mut blocks, mut size) = (0, 0);
    // Few registers: all 32 wave slots, then what the LDS has room for.
    for (threads, lds, want) in
        [(64, 0, 32), (65, 0, 16), (256, 0, 8), (1024, 0, 2), (64, 32_768, 2), (64, 65_537, 0)]
    {
        ok!(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, f, threads, lds));
        assert_eq!(blocks, want, "{threads} threads, {lds} bytes");
    }
    want!(INVALID_VALUE, hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, f, 0, 0));
    ok!(hipModuleOccupancyMaxPotentialBlockSize(&mut blocks, &mut size, f, 0, 0));
    assert_eq!((blocks, size), (2 * 304, 1024));
    ok!(hipModuleOccupancyMaxPotentialBlockSize(&mut blocks, &mut size, f, 0, 100));
    assert_eq!((blocks, size), (32 * 304, 64));
    ok!(hipModuleOccupancyMaxPotentialBlockSize(&mut blocks, &mut size, f, 0, 10));
    assert_eq!((blocks, size), (32 * 304, 10));

    ok!(hipModuleUnload(module));
    want!(NOT_FOUND, hipModuleUnload(module));
    want!(INVALID_HANDLE, hipFuncGetAttribute(&mut value, 0, f));
    want!(INVALID_HANDLE, hipModuleLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, null_mut(), null_mut(), null_mut()));
    want!(INVALID_VALUE, hipMemcpy(address(&mut value), ptr, 4, 2));
}

#[test]
fn managed_variables_of_modules() {
    let variable = |module, name: &CStr| {
        let (mut ptr, mut bytes) = (null_mut(), 0);
        ok!(hipModuleGetGlobal(&mut ptr, &mut bytes, module, name.as_ptr()));
        (ptr, bytes)
    };
    let (first, second) = (module(), module());
    let ((count, bytes), (other, _)) = (variable(first, c"count"), variable(second, c"count"));
    let (sums, sums_bytes) = variable(first, c"sums");
    assert_eq!((bytes, sums_bytes), (4, 800));
    // The host reads and writes them by their address.
    let (at, at_other) = (count.cast::<i32>(), other.cast::<i32>());
    // SAFETY: managed memory of a loaded module.
    unsafe {
        assert_eq!((at.read(), at_other.read()), (10, 10));
        at.write(20);
    }
    let mut old = upload(&[0i32; 2]);
    for launches in 1..=2 {
        assert_eq!(launch(function(first, "managed"), 1, 1, 0, &mut [address(&mut old)]), SUCCESS);
        ok!(hipDeviceSynchronize());
        // The initial value of `entry` is the address of table[2].
        assert_eq!(download::<i32>(old, 2), [19 + launches, 3]);
    }
    // SAFETY: as above.
    unsafe { assert_eq!((at.read(), at_other.read(), sums.cast::<f64>().add(99).read()), (22, 10, 1.0)) };
    assert_eq!(download::<i32>(count, 1), [22]);
    let mut attributes =
        Attributes { kind: -1, device: -1, device_pointer: 0, host_pointer: 0, managed: 0, flags: 0 };
    ok!(hipPointerGetAttributes(&mut attributes, sums));
    let addr = sums as usize;
    let want =
        Attributes { kind: 3, device: 0, device_pointer: addr, host_pointer: addr, managed: 1, flags: 1 };
    assert_eq!(attributes, want);

    want!(INVALID_VALUE, hipFree(count));
    let (mut base, mut size) = (null_mut(), 0);
    ok!(hipMemGetAddressRange(&mut base, &mut size, count));
    ok!(hipModuleUnload(first));
    want!(NOT_FOUND, hipMemGetAddressRange(&mut base, &mut size, count));
    ok!(hipMemGetAddressRange(&mut base, &mut size, other));
    ok!(hipModuleUnload(second));
    ok!(hipFree(old));
}

#[test]
fn launches() {
    let module = module();
    let (reverse, nothing, only_64) =
        (function(module, "reverse"), function(module, "nothing"), function(module, "only_64"));
    let mut data = upload(&(0..128).collect::<Vec<i32>>());
    assert_eq!(launch(reverse, 1, 128, 512, &mut [address(&mut data)]), SUCCESS);
    assert_eq!(download::<i32>(data, 128), (0..128).rev().collect::<Vec<_>>());
    assert_eq!(launch(nothing, 3, 64, 0, &mut []), SUCCESS);
    want!(SUCCESS, hipModuleLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, 2 as Ptr, null_mut(), null_mut()));

    // A structure with its padding; and too short a one.
    let mut buffer = [data, null_mut()];
    let mut size = 16usize;
    let mut extra = [1 as Ptr, buffer.as_mut_ptr().cast(), 2 as Ptr, address(&mut size), 3 as Ptr];
    let by_extra = |extra: &mut [Ptr]| {
        // SAFETY: as the API wants it, or wrong on purpose.
        unsafe {
            hipModuleLaunchKernel(
                reverse,
                1,
                1,
                1,
                128,
                1,
                1,
                512,
                null_mut(),
                null_mut(),
                extra.as_mut_ptr(),
            )
        }
    };
    assert_eq!(by_extra(&mut extra), SUCCESS);
    assert_eq!(download::<i32>(data, 128), (0..128).collect::<Vec<_>>());
    let mut short = 4usize;
    extra[3] = address(&mut short);
    assert_eq!(by_extra(&mut extra), INVALID_VALUE);
    extra[0] = 9 as Ptr;
    assert_eq!(by_extra(&mut extra), INVALID_VALUE);
    assert_eq!(by_extra(&mut [3 as Ptr, null_mut()]), INVALID_VALUE);

    // The grid in threads, with events around.
    let (mut start, mut stop, mut ms) = (null_mut(), null_mut(), 0.0);
    ok!(hipEventCreateWithFlags(&mut start, 0));
    ok!(hipEventCreateWithFlags(&mut stop, 0));
    let mut params = [address(&mut data)];
    let p = params.as_mut_ptr();
    ok!(hipExtModuleLaunchKernel(
        reverse,
        128,
        1,
        1,
        128,
        1,
        1,
        512,
        null_mut(),
        p,
        null_mut(),
        start,
        stop,
        0
    ));
    assert_eq!(download::<i32>(data, 128)[0], 127);
    ok!(hipEventElapsedTime(&mut ms, start, stop));
    assert!(ms > 0.0);
    want!(
        INVALID_VALUE,
        hipExtModuleLaunchKernel(
            reverse,
            100,
            1,
            1,
            64,
            1,
            1,
            512,
            null_mut(),
            p,
            null_mut(),
            start,
            stop,
            0
        )
    );
    let mut many = extra;
    want!(
        INVALID_VALUE,
        hipModuleLaunchKernel(reverse, 1, 1, 1, 64, 1, 1, 0, null_mut(), p, many.as_mut_ptr())
    );
    want!(
        INVALID_VALUE,
        hipModuleLaunchKernel(reverse, 1, 1, 1, 64, 1, 1, 0, null_mut(), null_mut(), null_mut())
    );

    for (grid, block, lds, want) in [
        ([0, 1, 1], [64, 1, 1], 0, INVALID_VALUE),
        ([1, 1, 1], [64, 0, 1], 0, INVALID_CONFIGURATION),
        ([1, 1, 1], [1025, 1, 1], 0, INVALID_VALUE),
        ([1, 1, 1], [1 << 16, 1 << 16, 1], 0, INVALID_VALUE),
        ([1, 1, 1], [65, 1, 1], 0, LAUNCH_FAILURE),
        ([1, 1, 1], [64, 1, 1], 65_537, INVALID_VALUE),
        ([u32::MAX, u32::MAX, u32::MAX], [64, 1, 1], 0, INVALID_VALUE),
    ] {
        let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
        want!(want, hipModuleLaunchKernel(only_64, gx, gy, gz, bx, by, bz, lds, null_mut(), p, null_mut()));
    }
    want!(DESTROYED, hipModuleLaunchKernel(only_64, 1, 1, 1, 64, 1, 1, 0, module, p, null_mut()));
    want!(INVALID_HANDLE, hipModuleLaunchKernel(null_mut(), 1, 1, 1, 64, 1, 1, 0, null_mut(), p, null_mut()));
    ok!(hipDeviceSynchronize()); // none of these spoils the device
    ok!(hipFree(data));
    ok!(hipModuleUnload(module));
}

#[test]
fn a_fault_stays_until_the_device_is_reset() {
    let log = child("child_faults", "gfx942?budget=100000");
    assert!(
        log.contains(
            "stream 0: out-of-bounds write of 4 bytes at 0x10 of global memory by lane 0: kernel poke"
        ),
        "{log}"
    );
    assert!(log.contains("use-after-free write") && log.contains("freed allocation \"hipMalloc\""), "{log}");
    assert!(log.contains("kernel trap") && log.contains("instruction budget of 100000"), "{log}");
}

#[test]
#[ignore = "a child process"]
fn child_faults() {
    let faults: [(&str, c_int); 4] =
        [("null", ILLEGAL_ADDRESS), ("freed", ILLEGAL_ADDRESS), ("trap", LAUNCH_FAILURE), ("spin", TIME_OUT)];
    for (what, code) in faults {
        let module = module();
        let kept = malloc(16);
        ok!(hipMemset(kept, 0, 16));
        let (name, mut at) = match what {
            "null" => ("poke", 0x10 as Ptr),
            "freed" => {
                let freed = malloc(16);
                ok!(hipFree(freed));
                ("poke", freed)
            }
            "trap" => ("trap", null_mut()),
            _ => ("spin", kept),
        };
        // The launch itself is right; what uses the device later is told.
        assert_eq!(launch(function(module, name), 1, 64, 0, &mut [address(&mut at)]), SUCCESS);
        let mut word = 0u32;
        want!(code, hipDeviceSynchronize());
        want!(code, hipStreamSynchronize(null_mut()));
        want!(code, hipMemcpy(address(&mut word), kept, 4, 2));
        want!(code, hipMalloc(&mut null_mut(), 4));
        assert_eq!(launch(function(module, "nothing"), 1, 64, 0, &mut []), code);
        // SAFETY: no arguments.
        assert_eq!(unsafe { hipGetLastError() }, code);
        want!(code, hipDeviceSynchronize());
        ok!(hipDeviceReset());
        ok!(hipDeviceSynchronize());
        want!(NOT_FOUND, hipModuleUnload(module));
        want!(INVALID_VALUE, hipFree(kept));
        let (mut free, mut total) = (0, 0);
        ok!(hipMemGetInfo(&mut free, &mut total));
        assert!(free > 0 && free <= total && total == 192 << 30);
    }
}

#[test]
fn devices_are_apart() {
    child("child_has_two_devices", "gfx942,gfx950");
}

#[test]
#[ignore = "a child process"]
fn child_has_two_devices() {
    let data: Vec<i32> = (0..64).collect();
    let first = upload(&data);
    let module_942 = module();
    let reverse_942 = function(module_942, "reverse");
    ok!(hipSetDevice(1));
    let mut second = malloc(256);
    ok!(hipMemcpy(second, first, 256, 4)); // across devices
    let image = image("gfx950");
    let mut module = null_mut();
    want!(NO_BINARY, hipModuleLoadData(&mut module, IMAGE.as_ptr().cast()));
    ok!(hipModuleLoadData(&mut module, image.as_ptr().cast()));
    let mut params = [address(&mut second)];
    assert_eq!(launch(reverse_942, 1, 64, 256, &mut params), INVALID_DEVICE);
    assert_eq!(launch(function(module, "reverse"), 1, 64, 256, &mut params), SUCCESS);
    assert_eq!(download::<i32>(second, 64), data.iter().rev().copied().collect::<Vec<_>>());
    assert_eq!(download::<i32>(first, 64), data);
    let mut attributes =
        Attributes { kind: -1, device: -1, device_pointer: 0, host_pointer: 1, managed: 1, flags: 1 };
    ok!(hipPointerGetAttributes(&mut attributes, second));
    assert_eq!(attributes.device, 1);

    // Without peer access a kernel cannot reach the other device's memory; its own device is unharmed by that.
    let mut far = first;
    assert_eq!(launch(function(module, "poke"), 1, 64, 0, &mut [address(&mut far)]), SUCCESS);
    want!(ILLEGAL_ADDRESS, hipDeviceSynchronize());
    ok!(hipSetDevice(0));
    ok!(hipDeviceSynchronize());
    assert_eq!(download::<i32>(first, 64), data);
    // With it, it does.
    let [mut can, mut atomics] = [-1; 2];
    ok!(hipDeviceCanAccessPeer(&mut can, 1, 0));
    ok!(hipDeviceGetP2PAttribute(&mut atomics, 2, 1, 0));
    assert_eq!((can, atomics), (1, 1));
    ok!(hipDeviceCanAccessPeer(&mut can, 1, 1));
    assert_eq!(can, 0);
    ok!(hipSetDevice(1));
    ok!(hipDeviceReset());
    let mut module = null_mut();
    ok!(hipModuleLoadData(&mut module, image.as_ptr().cast()));
    want!(INVALID_VALUE, hipDeviceEnablePeerAccess(1, 0));
    want!(PEER_ACCESS_NOT_ENABLED, hipDeviceDisablePeerAccess(0));
    ok!(hipDeviceEnablePeerAccess(0, 0));
    want!(PEER_ACCESS_ALREADY_ENABLED, hipDeviceEnablePeerAccess(0, 0));
    assert_eq!(launch(function(module, "poke"), 1, 64, 0, &mut [address(&mut far)]), SUCCESS);
    ok!(hipDeviceSynchronize());
    assert_eq!(download::<i32>(first, 64)[0], 42);
    ok!(hipDeviceDisablePeerAccess(0));
    ok!(hipSetDevice(0));
    // Streams and events belong to a device.
    let (mut stream, mut event) = (null_mut(), null_mut());
    ok!(hipStreamCreate(&mut stream));
    ok!(hipSetDevice(1));
    ok!(hipDeviceReset());
    ok!(hipEventCreateWithFlags(&mut event, 0));
    want!(INVALID_HANDLE, hipEventRecord(event, stream));
    want!(
        INVALID_DEVICE,
        hipModuleLaunchKernel(
            reverse_942,
            1,
            1,
            1,
            64,
            1,
            1,
            256,
            null_mut(),
            params.as_mut_ptr(),
            null_mut()
        )
    );
}
