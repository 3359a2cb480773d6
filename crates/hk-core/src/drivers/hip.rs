//! AMD GPUs through the HIP runtime's module API.
//!
//! The only module with foreign calls. Streams, events and modules are objects that release themselves; the current
//! device, which HIP keeps per thread, is set before every call that depends on it.

use super::gpu::{
    self, CAPTURE_THREAD_LOCAL, EVENT_DEFAULT, HOST_PORTABLE, NO_DEVICE, NOT_READY, STREAM_NON_BLOCKING,
    SUCCESS,
};
use crate::device::DeviceInfo;
use crate::driver::{Dependency, Dispatch, Driver, Handle};
use crate::error::{Error, Result};
use crate::shared::RAW_BYTES;
use hk_codeobj::Arch;
use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt::Display;
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The calls of the runtime that this driver makes, linked through `hip-runtime-sys`.
///
/// That crate declares `hipError_t` as a Rust enum, and a code that it does not list would be an invalid value of it
/// the moment a call returns. The declarations here are the same but for the code, which is the integer it is in C.
mod sys {
    pub use hip_runtime_sys::{
        hipDevice_t, hipDeviceptr_t, hipEvent_t, hipFunction_t, hipGraph_t, hipGraphExec_t, hipModule_t,
        hipStream_t,
    };
    use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

    pub const INVALID_DEVICE: c_int = 101;
    pub const PEER_ACCESS_ALREADY_ENABLED: c_int = 704;
    /// Of `hipExtMallocWithFlags`: fine-grained, and not kept in caches.
    pub const MALLOC_UNCACHED: c_uint = 3;
    /// Of `hipIpcOpenMemHandle`: with peer access to the device of the memory.
    pub const IPC_LAZY_PEER_ACCESS: c_uint = 1;
    pub const LAUNCH_PARAM_BUFFER_POINTER: usize = 1;
    pub const LAUNCH_PARAM_BUFFER_SIZE: usize = 2;
    pub const LAUNCH_PARAM_END: usize = 3;

    /// `hipIpcMemHandle_t`.
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub struct IpcHandle(pub [u8; 64]);

    unsafe extern "C" {
        pub fn hipInit(flags: c_uint) -> c_int;
        pub fn hipGetDeviceCount(count: *mut c_int) -> c_int;
        pub fn hipDeviceGet(device: *mut hipDevice_t, ordinal: c_int) -> c_int;
        pub fn hipDeviceGetName(name: *mut c_char, len: c_int, device: hipDevice_t) -> c_int;
        pub fn hipDeviceTotalMem(bytes: *mut usize, device: hipDevice_t) -> c_int;
        pub fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, ordinal: c_int) -> c_int;
        /// The structure's layout depends on the runtime's version: bytes here.
        pub fn hipGetDeviceProperties(properties: *mut c_void, ordinal: c_int) -> c_int;
        pub fn hipSetDevice(ordinal: c_int) -> c_int;
        pub fn hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> c_int;
        pub fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint) -> c_int;
        pub fn hipGetErrorName(code: c_int) -> *const c_char;

        pub fn hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: c_uint) -> c_int;
        pub fn hipStreamDestroy(stream: hipStream_t) -> c_int;
        pub fn hipStreamSynchronize(stream: hipStream_t) -> c_int;
        pub fn hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint) -> c_int;

        pub fn hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint) -> c_int;
        pub fn hipEventDestroy(event: hipEvent_t) -> c_int;
        pub fn hipEventRecord(event: hipEvent_t, stream: hipStream_t) -> c_int;
        pub fn hipEventQuery(event: hipEvent_t) -> c_int;
        pub fn hipEventSynchronize(event: hipEvent_t) -> c_int;
        pub fn hipEventElapsedTime(ms: *mut f32, start: hipEvent_t, stop: hipEvent_t) -> c_int;

        pub fn hipMalloc(address: *mut *mut c_void, bytes: usize) -> c_int;
        pub fn hipExtMallocWithFlags(address: *mut *mut c_void, bytes: usize, flags: c_uint) -> c_int;
        pub fn hipIpcGetMemHandle(handle: *mut IpcHandle, address: *mut c_void) -> c_int;
        pub fn hipIpcOpenMemHandle(address: *mut *mut c_void, handle: IpcHandle, flags: c_uint) -> c_int;
        pub fn hipIpcCloseMemHandle(address: *mut c_void) -> c_int;
        pub fn hipFree(address: *mut c_void) -> c_int;
        pub fn hipMallocAsync(address: *mut *mut c_void, bytes: usize, stream: hipStream_t) -> c_int;
        pub fn hipFreeAsync(address: *mut c_void, stream: hipStream_t) -> c_int;
        pub fn hipHostMalloc(host: *mut *mut c_void, bytes: usize, flags: c_uint) -> c_int;
        pub fn hipHostFree(host: *mut c_void) -> c_int;
        pub fn hipMemcpyHtoDAsync(
            dst: hipDeviceptr_t,
            src: *mut c_void,
            bytes: usize,
            stream: hipStream_t,
        ) -> c_int;
        pub fn hipMemcpyDtoHAsync(
            dst: *mut c_void,
            src: hipDeviceptr_t,
            bytes: usize,
            stream: hipStream_t,
        ) -> c_int;
        pub fn hipMemcpyDtoDAsync(
            dst: hipDeviceptr_t,
            src: hipDeviceptr_t,
            bytes: usize,
            stream: hipStream_t,
        ) -> c_int;
        pub fn hipMemsetD8Async(dst: hipDeviceptr_t, value: u8, count: usize, stream: hipStream_t) -> c_int;
        pub fn hipMemsetD16Async(dst: hipDeviceptr_t, value: u16, count: usize, stream: hipStream_t)
        -> c_int;
        pub fn hipMemsetD32Async(
            dst: hipDeviceptr_t,
            value: c_int,
            count: usize,
            stream: hipStream_t,
        ) -> c_int;

        pub fn hipModuleLoadData(module: *mut hipModule_t, image: *const c_void) -> c_int;
        pub fn hipModuleUnload(module: hipModule_t) -> c_int;
        pub fn hipModuleGetFunction(
            function: *mut hipFunction_t,
            module: hipModule_t,
            name: *const c_char,
        ) -> c_int;
        pub fn hipModuleLaunchKernel(
            function: hipFunction_t,
            grid_x: c_uint,
            grid_y: c_uint,
            grid_z: c_uint,
            block_x: c_uint,
            block_y: c_uint,
            block_z: c_uint,
            dynamic_lds: c_uint,
            stream: hipStream_t,
            params: *mut *mut c_void,
            extra: *mut *mut c_void,
        ) -> c_int;

        pub fn hipStreamBeginCapture(stream: hipStream_t, mode: c_int) -> c_int;
        pub fn hipStreamEndCapture(stream: hipStream_t, graph: *mut hipGraph_t) -> c_int;
        pub fn hipGraphInstantiateWithFlags(
            exec: *mut hipGraphExec_t,
            graph: hipGraph_t,
            flags: c_ulonglong,
        ) -> c_int;
        pub fn hipGraphDestroy(graph: hipGraph_t) -> c_int;
        pub fn hipGraphExecDestroy(exec: hipGraphExec_t) -> c_int;
        pub fn hipGraphLaunch(exec: hipGraphExec_t, stream: hipStream_t) -> c_int;
    }
}

use hip_runtime_sys::hipDeviceAttribute_t as Attribute;

pub(super) struct Hip {
    ordinal: c_int,
    info: DeviceInfo,
    /// The device has stream-ordered allocation.
    pools: bool,
    /// What `malloc_shared` gave: no memory of a pool.
    shared: Mutex<Vec<u64>>,
    /// What `import` gave.
    imported: Mutex<Vec<u64>>,
}

/// A foreign object and how it is released. The runtime's handles may be used from any thread.
struct Owned<T: Copy> {
    raw: T,
    ordinal: c_int,
    release: unsafe extern "C" fn(T) -> c_int,
}

// SAFETY: a handle is a pointer that only the runtime dereferences, and the runtime serialises its own calls.
unsafe impl<T: Copy> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T: Copy> Sync for Owned<T> {}

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: `raw` came from the matching create call and nothing else releases it. The runtime completes queued
        // work on its own. A failure leaves nothing to be done.
        unsafe {
            sys::hipSetDevice(self.ordinal);
            (self.release)(self.raw);
        }
    }
}

type Stream = Owned<sys::hipStream_t>;
type Event = Owned<sys::hipEvent_t>;
type Module = std::sync::Arc<Owned<sys::hipModule_t>>;
type GraphExec = Owned<sys::hipGraphExec_t>;

struct Function {
    raw: sys::hipFunction_t,
    name: String,
    /// Keeps the code loaded.
    _module: Module,
}

// SAFETY: as for `Owned`: a pointer that only the runtime dereferences.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// `Ok` for success, else the code with its name.
fn check(call: &'static str, code: c_int, context: impl FnOnce() -> String) -> Result<()> {
    // SAFETY: takes any integer.
    gpu::check(call, code, |code| unsafe { sys::hipGetErrorName(code) }, context)
}

/// Number of AMD GPUs that the runtime sees.
pub(super) fn device_count() -> Result<u32> {
    // SAFETY: plain calls; `count` is valid for the write.
    let (count, code) = unsafe {
        let init = sys::hipInit(0);
        let mut count = 0;
        let code = sys::hipGetDeviceCount(&mut count);
        (count, if code == SUCCESS { init } else { code })
    };
    match code {
        // What the runtime says without a GPU, or without the kernel driver.
        NO_DEVICE | sys::INVALID_DEVICE => Ok(0),
        _ => check("hipGetDeviceCount", code, || "looking for AMD GPUs".into()).map(|()| count.max(0) as u32),
    }
}

impl Hip {
    pub fn open(spec: &str, ordinal: u32) -> Result<Self> {
        let no_device = |reason: String| Error::NoDevice { spec: spec.into(), reason };
        let count = device_count()?;
        if count == 0 {
            let reason = "no AMD GPU: the HIP runtime finds none (is the amdgpu driver loaded, and /dev/kfd \
                          accessible?); HK_DEVICE=emu:gfx942 selects the emulator";
            return Err(no_device(reason.into()));
        }
        if ordinal >= count {
            return Err(no_device(format!("no such AMD GPU, there are {count}")));
        }
        let ordinal = ordinal as c_int; // below a count that was a c_int
        let arch = read_arch(spec, ordinal)?;
        let attribute = |attribute| read_attribute(spec, ordinal, attribute);
        let mut name = [0; 256];
        let mut memory = 0;
        // SAFETY: the pointers are valid for the writes, and the name's length is given.
        unsafe {
            let mut device = std::mem::zeroed();
            check("hipDeviceGet", sys::hipDeviceGet(&mut device, ordinal), || spec.into())?;
            let code = sys::hipDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device);
            check("hipDeviceGetName", code, || spec.into())?;
            check("hipDeviceTotalMem", sys::hipDeviceTotalMem(&mut memory, device), || spec.into())?;
        }
        let info = DeviceInfo {
            spec: spec.into(),
            name: gpu::text(&name),
            arch,
            compute_units: attribute(Attribute::hipDeviceAttributeMultiprocessorCount)?,
            wave_size: attribute(Attribute::hipDeviceAttributeWarpSize)?,
            lds_per_workgroup: attribute(Attribute::hipDeviceAttributeMaxSharedMemoryPerBlock)?,
            max_threads_per_workgroup: attribute(Attribute::hipDeviceAttributeMaxThreadsPerBlock)?,
            max_grid: [
                attribute(Attribute::hipDeviceAttributeMaxGridDimX)?,
                attribute(Attribute::hipDeviceAttributeMaxGridDimY)?,
                attribute(Attribute::hipDeviceAttributeMaxGridDimZ)?,
            ],
            total_memory_bytes: memory as u64,
            driver: "hip",
        };
        let pools = read_attribute(spec, ordinal, Attribute::hipDeviceAttributeMemoryPoolsSupported);
        Ok(Self {
            ordinal,
            info,
            pools: pools.is_ok_and(|p| p != 0),
            shared: Mutex::default(),
            imported: Mutex::default(),
        })
    }

    /// Makes the device current on this thread.
    fn bind(&self) -> Result<()> {
        // SAFETY: a plain call.
        check("hipSetDevice", unsafe { sys::hipSetDevice(self.ordinal) }, || self.info.spec.clone())
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        check(call, code, || self.info.spec.clone())
    }

    fn create_event(&self) -> Result<Event> {
        self.bind()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for the write.
        let code = unsafe { sys::hipEventCreateWithFlags(&mut raw, EVENT_DEFAULT) };
        self.check("hipEventCreateWithFlags", code)?;
        Ok(Owned { raw, ordinal: self.ordinal, release: sys::hipEventDestroy })
    }
}

fn read_attribute(spec: &str, ordinal: c_int, attribute: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: `value` is valid for the write.
    let code = unsafe { sys::hipDeviceGetAttribute(&mut value, attribute as c_int, ordinal) };
    check("hipDeviceGetAttribute", code, || format!("{attribute:?} of {spec}"))?;
    Ok(value.max(0) as u32)
}

/// The target of a GPU.
///
/// Its name, `gfx942:sramecc+:xnack-`, is only in the properties structure, whose layout changes between versions of
/// the runtime. So it is searched for in the bytes, in a block several times as large as any version of the structure.
/// Should it not be there, the version attributes decide: 9.4 and 9.5 are gfx942 and gfx950.
fn read_arch(spec: &str, ordinal: c_int) -> Result<Arch> {
    let mut properties = [0u64; 2048];
    // SAFETY: the block is 16 KiB, aligned, and initialised; no version of the structure has a tenth of that.
    let code = unsafe { sys::hipGetDeviceProperties(properties.as_mut_ptr().cast(), ordinal) };
    let bytes: &[u8] = bytemuck::cast_slice(&properties);
    if code == SUCCESS
        && let Some(name) = find_arch_name(bytes)
    {
        let supported = name.parse().ok().filter(|a: &Arch| a.is_amd());
        return supported.ok_or_else(|| unsupported(spec, &name));
    }
    let major = read_attribute(spec, ordinal, Attribute::hipDeviceAttributeComputeCapabilityMajor)?;
    let minor = read_attribute(spec, ordinal, Attribute::hipDeviceAttributeComputeCapabilityMinor)?;
    match (major, minor) {
        (9, 4) => Ok(Arch::Gfx942),
        (9, 5) => Ok(Arch::Gfx950),
        _ => Err(unsupported(spec, &format!("version {major}.{minor}"))),
    }
}

fn unsupported(spec: &str, got: &str) -> Error {
    let supported: Vec<_> = Arch::AMD.iter().map(|a| a.name()).collect();
    let reason = format!("the GPU is {got}; there are kernels for {}", supported.join(" and "));
    Error::NoDevice { spec: spec.into(), reason }
}

/// The first `gfx` with digits (and letters, as in gfx90a) behind it.
fn find_arch_name(bytes: &[u8]) -> Option<String> {
    let starts = bytes.windows(4).enumerate().filter(|(_, w)| w.starts_with(b"gfx") && w[3].is_ascii_digit());
    let (start, _) = starts.into_iter().next()?;
    let name = bytes[start..].iter().take_while(|b| b.is_ascii_alphanumeric());
    Some(name.map(|&b| char::from(b)).collect())
}

fn pointer(addr: u64) -> sys::hipDeviceptr_t {
    addr as usize as sys::hipDeviceptr_t
}

impl Driver for Hip {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn can_access_peer(&self, peer: &dyn Driver) -> Result<std::result::Result<(), String>> {
        let Some(peer) = (peer as &dyn Any).downcast_ref::<Hip>() else {
            return Ok(Err("they are devices of two drivers".into()));
        };
        let mut can = 0;
        // SAFETY: `can` is valid for the write.
        let code = unsafe { sys::hipDeviceCanAccessPeer(&mut can, self.ordinal, peer.ordinal) };
        self.check("hipDeviceCanAccessPeer", code)?;
        Ok(if can != 0 { Ok(()) } else { Err("the GPUs have no peer access to each other".into()) })
    }

    fn enable_peer_access(&self, peer: &dyn Driver) -> Result<()> {
        let Some(peer) = (peer as &dyn Any).downcast_ref::<Hip>() else { return Ok(()) };
        self.bind()?;
        // SAFETY: a plain call.
        match unsafe { sys::hipDeviceEnablePeerAccess(peer.ordinal, 0) } {
            sys::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.check("hipDeviceEnablePeerAccess", code),
        }
    }

    fn create_stream(&self) -> Result<Handle> {
        self.bind()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for the write.
        let code = unsafe { sys::hipStreamCreateWithFlags(&mut raw, STREAM_NON_BLOCKING) };
        self.check("hipStreamCreateWithFlags", code)?;
        Ok(Handle::new(Owned { raw, ordinal: self.ordinal, release: sys::hipStreamDestroy }))
    }

    fn synchronize(&self, stream: &Handle) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream is alive.
        let code = unsafe { sys::hipStreamSynchronize(stream.get::<Stream>().raw) };
        self.check("hipStreamSynchronize", code)
    }

    fn malloc(&self, stream: &Handle, bytes: u64, label: &dyn Display) -> Result<u64> {
        self.bind()?;
        let mut address: *mut c_void = null_mut();
        let (call, code) = if self.pools {
            let stream = stream.get::<Stream>().raw;
            // SAFETY: the stream is alive, `address` is valid for the write.
            ("hipMallocAsync", unsafe { sys::hipMallocAsync(&mut address, bytes as usize, stream) })
        } else {
            // SAFETY: `address` is valid for the write.
            ("hipMalloc", unsafe { sys::hipMalloc(&mut address, bytes as usize) })
        };
        check(call, code, || gpu::allocation(code, label, bytes, &self.info.spec))?;
        Ok(address as usize as u64)
    }

    fn malloc_shared(&self, _: &Handle, bytes: u64, label: &dyn Display) -> Result<u64> {
        self.bind()?;
        let mut address: *mut c_void = null_mut();
        // SAFETY: `address` is valid for the write.
        let code = unsafe { sys::hipExtMallocWithFlags(&mut address, bytes as usize, sys::MALLOC_UNCACHED) };
        check("hipExtMallocWithFlags", code, || gpu::allocation(code, label, bytes, &self.info.spec))?;
        let address = address as usize as u64;
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        Ok(address)
    }

    fn export(&self, addr: u64) -> Result<[u8; RAW_BYTES]> {
        self.bind()?;
        let mut handle = sys::IpcHandle([0; RAW_BYTES]);
        // SAFETY: valid for the write.
        let code = unsafe { sys::hipIpcGetMemHandle(&mut handle, pointer(addr)) };
        self.check("hipIpcGetMemHandle", code).map(|()| handle.0)
    }

    fn import(&self, handle: &[u8; RAW_BYTES]) -> Result<u64> {
        self.bind()?;
        let mut address: *mut c_void = null_mut();
        let handle = sys::IpcHandle(*handle);
        // SAFETY: `address` is valid for the write.
        let code = unsafe { sys::hipIpcOpenMemHandle(&mut address, handle, sys::IPC_LAZY_PEER_ACCESS) };
        self.check("hipIpcOpenMemHandle", code)?;
        let address = address as usize as u64;
        self.imported.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        Ok(address)
    }

    fn free(&self, stream: &Handle, addr: u64) {
        if gpu::take(&self.imported, addr) {
            // A failure of the work before is reported elsewhere.
            let _ = self.synchronize(stream);
            // SAFETY: opened by `import`, and no work uses it any more.
            unsafe { sys::hipIpcCloseMemHandle(pointer(addr)) };
            return;
        }
        let shared = gpu::take(&self.shared, addr);
        // SAFETY: the address came from `malloc` and is freed once. `hipFree` waits for the device by itself, so both
        // come after all queued work. There is nobody to tell of a failure.
        unsafe {
            sys::hipSetDevice(self.ordinal);
            if self.pools && !shared {
                sys::hipFreeAsync(pointer(addr), stream.get::<Stream>().raw);
            } else {
                sys::hipFree(pointer(addr));
            }
        }
    }

    fn malloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.bind()?;
        // SAFETY: `host` is valid for the write.
        let alloc = |host: &mut *mut c_void| unsafe { sys::hipHostMalloc(host, bytes, HOST_PORTABLE) };
        gpu::zeroed_host(bytes, &self.info.spec, alloc, |code, context| check("hipHostMalloc", code, context))
    }

    unsafe fn free_host(&self, host: NonNull<u8>, _: usize) {
        // SAFETY: the caller's promise. There is nobody to tell of a failure.
        unsafe {
            sys::hipSetDevice(self.ordinal);
            sys::hipHostFree(host.as_ptr().cast());
        }
    }

    unsafe fn write_async(&self, stream: &Handle, dst: u64, src: NonNull<u8>, bytes: usize) -> Result<()> {
        self.bind()?;
        let stream = stream.get::<Stream>().raw;
        // SAFETY: `dst` has room for the bytes (callers copy whole allocations), for `src` the caller's promise.
        let code = unsafe { sys::hipMemcpyHtoDAsync(pointer(dst), src.as_ptr().cast(), bytes, stream) };
        self.check("hipMemcpyHtoDAsync", code)
    }

    unsafe fn read_async(&self, stream: &Handle, src: u64, dst: NonNull<u8>, bytes: usize) -> Result<()> {
        self.bind()?;
        let stream = stream.get::<Stream>().raw;
        // SAFETY: `src` holds the bytes (callers copy whole allocations), for `dst` the caller's promise.
        let code = unsafe { sys::hipMemcpyDtoHAsync(dst.as_ptr().cast(), pointer(src), bytes, stream) };
        self.check("hipMemcpyDtoHAsync", code)
    }

    fn write(&self, stream: &Handle, dst: u64, src: &[u8]) -> Result<()> {
        self.bind()?;
        // The runtime may read pageable memory after the call returns, hence the wait.
        // SAFETY: `dst` has room for the bytes (callers copy whole allocations), and `src` outlives the copy.
        let code = unsafe {
            let source = src.as_ptr().cast_mut().cast();
            sys::hipMemcpyHtoDAsync(pointer(dst), source, src.len(), stream.get::<Stream>().raw)
        };
        self.check("hipMemcpyHtoDAsync", code)?;
        self.synchronize(stream)
    }

    fn read(&self, stream: &Handle, src: u64, dst: &mut [u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: `src` holds the bytes (callers copy whole allocations), and `dst` outlives the copy.
        let code = unsafe {
            let target = dst.as_mut_ptr().cast();
            sys::hipMemcpyDtoHAsync(target, pointer(src), dst.len(), stream.get::<Stream>().raw)
        };
        self.check("hipMemcpyDtoHAsync", code)?;
        self.synchronize(stream)
    }

    fn copy(&self, stream: &Handle, dst: u64, src: u64, bytes: u64) -> Result<()> {
        self.bind()?;
        let stream = stream.get::<Stream>().raw;
        // SAFETY: both sides hold the bytes (callers copy whole allocations of one length).
        let code = unsafe { sys::hipMemcpyDtoDAsync(pointer(dst), pointer(src), bytes as usize, stream) };
        self.check("hipMemcpyDtoDAsync", code)
    }

    fn fill(&self, stream: &Handle, dst: u64, pattern: &[u8], count: u64) -> Result<()> {
        self.bind()?;
        let (raw, n) = (stream.get::<Stream>().raw, count as usize);
        // SAFETY: `dst` has room for the pattern `count` times (callers fill whole allocations).
        let (call, code) = unsafe {
            match *pattern {
                [a] => ("hipMemsetD8Async", sys::hipMemsetD8Async(pointer(dst), a, n, raw)),
                [a, b] => {
                    let value = u16::from_ne_bytes([a, b]);
                    ("hipMemsetD16Async", sys::hipMemsetD16Async(pointer(dst), value, n, raw))
                }
                [a, b, c, d] => {
                    let value = i32::from_ne_bytes([a, b, c, d]);
                    ("hipMemsetD32Async", sys::hipMemsetD32Async(pointer(dst), value, n, raw))
                }
                // There is no call for longer patterns.
                _ => return self.write(stream, dst, &pattern.repeat(n)),
            }
        };
        self.check(call, code)
    }

    fn record(&self, stream: &Handle) -> Result<Handle> {
        let event = self.create_event()?;
        // SAFETY: both are alive.
        let code = unsafe { sys::hipEventRecord(event.raw, stream.get::<Stream>().raw) };
        self.check("hipEventRecord", code)?;
        Ok(Handle::new(event))
    }

    fn wait(&self, stream: &Handle, event: &Handle, _: Dependency) -> Result<()> {
        self.bind()?;
        // SAFETY: both are alive; the event may be destroyed before the stream gets there.
        let code =
            unsafe { sys::hipStreamWaitEvent(stream.get::<Stream>().raw, event.get::<Event>().raw, 0) };
        self.check("hipStreamWaitEvent", code)
    }

    fn query(&self, event: &Handle) -> Result<bool> {
        self.bind()?;
        // SAFETY: the event is alive.
        match unsafe { sys::hipEventQuery(event.get::<Event>().raw) } {
            NOT_READY => Ok(false),
            code => self.check("hipEventQuery", code).map(|()| true),
        }
    }

    fn synchronize_event(&self, event: &Handle) -> Result<()> {
        self.bind()?;
        // SAFETY: the event is alive.
        let code = unsafe { sys::hipEventSynchronize(event.get::<Event>().raw) };
        self.check("hipEventSynchronize", code)
    }

    fn elapsed(&self, from: &Handle, to: &Handle) -> Result<Duration> {
        self.bind()?;
        let mut ms = 0.0;
        // SAFETY: both are alive and done, `ms` is valid for the write.
        let code =
            unsafe { sys::hipEventElapsedTime(&mut ms, from.get::<Event>().raw, to.get::<Event>().raw) };
        self.check("hipEventElapsedTime", code)?;
        gpu::elapsed(ms)
    }

    fn load_module(&self, name: &str, image: &'static [u8]) -> Result<Handle> {
        self.bind()?;
        let mut raw = null_mut();
        // SAFETY: the image is a code object that the parser accepted, its lifetime static.
        let code = unsafe { sys::hipModuleLoadData(&mut raw, image.as_ptr().cast()) };
        check("hipModuleLoadData", code, || format!("{name} on {}", self.info.spec))?;
        let owned = Owned { raw, ordinal: self.ordinal, release: sys::hipModuleUnload };
        Ok(Handle::new(Module::new(owned)))
    }

    fn function(&self, module: &Handle, symbol: &str) -> Result<Handle> {
        self.bind()?;
        let module = module.get::<Module>().clone();
        let name = gpu::symbol_name(symbol)?;
        let mut raw = null_mut();
        // SAFETY: the module is alive, the name is a C string, `raw` is valid for the write.
        let code = unsafe { sys::hipModuleGetFunction(&mut raw, module.raw, name.as_ptr()) };
        check("hipModuleGetFunction", code, || format!("{symbol} on {}", self.info.spec))?;
        Ok(Handle::new(Function { raw, name: symbol.into(), _module: module }))
    }

    fn launch(&self, stream: &Handle, function: &Handle, dispatch: &Dispatch) -> Result<()> {
        self.bind()?;
        let &Dispatch { grid, block, dynamic_lds, args, .. } = dispatch;
        let function = function.get::<Function>();
        let mut bytes = args.len();
        let mut extra: [*mut c_void; 5] = [
            sys::LAUNCH_PARAM_BUFFER_POINTER as *mut c_void,
            args.as_ptr().cast_mut().cast(),
            sys::LAUNCH_PARAM_BUFFER_SIZE as *mut c_void,
            (&raw mut bytes).cast(),
            sys::LAUNCH_PARAM_END as *mut c_void,
        ];
        // SAFETY: function and stream are alive; the runtime copies the arguments during the call, and their size is
        // the kernel's. What the kernel does with them is what the caller of `Launch::run` answers for.
        let code = unsafe {
            sys::hipModuleLaunchKernel(
                function.raw,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                dynamic_lds,
                stream.get::<Stream>().raw,
                null_mut(),
                extra.as_mut_ptr(),
            )
        };
        check("hipModuleLaunchKernel", code, || gpu::launch(dispatch, &function.name, dynamic_lds))
    }

    fn foreign(&self, stream: &Handle) -> Result<Option<*mut c_void>> {
        self.bind()?;
        Ok(Some(stream.get::<Stream>().raw.cast()))
    }

    fn begin_capture(&self, stream: &Handle) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream is alive.
        let code = unsafe { sys::hipStreamBeginCapture(stream.get::<Stream>().raw, CAPTURE_THREAD_LOCAL) };
        self.check("hipStreamBeginCapture", code)
    }

    fn end_capture(&self, stream: &Handle) -> Result<Handle> {
        self.bind()?;
        let mut raw = null_mut();
        // SAFETY: the stream is alive, `raw` is valid for the write.
        let code = unsafe { sys::hipStreamEndCapture(stream.get::<Stream>().raw, &mut raw) };
        self.check("hipStreamEndCapture", code)?;
        let graph = Owned { raw, ordinal: self.ordinal, release: sys::hipGraphDestroy };
        let mut raw = null_mut();
        // SAFETY: the graph is alive, `raw` is valid for the write.
        let code = unsafe { sys::hipGraphInstantiateWithFlags(&mut raw, graph.raw, 0) };
        self.check("hipGraphInstantiate", code)?;
        Ok(Handle::new(Owned { raw, ordinal: self.ordinal, release: sys::hipGraphExecDestroy }))
    }

    fn launch_graph(&self, stream: &Handle, graph: &Handle) -> Result<()> {
        self.bind()?;
        // SAFETY: both are alive. What the kernels do is what the caller of `Graph::launch` answers for.
        let code = unsafe { sys::hipGraphLaunch(graph.get::<GraphExec>().raw, stream.get::<Stream>().raw) };
        self.check("hipGraphLaunch", code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arch_name_is_found_wherever_it_lies() {
        let mut properties = vec![0u8; 4096];
        assert_eq!(find_arch_name(&properties), None);
        properties[0..19].copy_from_slice(b"AMD Instinct gfx X\0");
        assert_eq!(find_arch_name(&properties), None);
        properties[1161..1183].copy_from_slice(b"gfx942:sramecc+:xnack-");
        assert_eq!(find_arch_name(&properties).as_deref(), Some("gfx942"));
        properties[1161..1168].copy_from_slice(b"gfx90a\0");
        assert_eq!(find_arch_name(&properties).as_deref(), Some("gfx90a"));
    }

    #[test]
    fn unknown_codes_are_reported_as_they_came() {
        match check("hipInit", 123_456, || "test".into()) {
            Err(Error::Driver { call: "hipInit", code: 123_456, .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}
