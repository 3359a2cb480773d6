//! NVIDIA GPUs through the CUDA driver's API, for measuring the kernels on a GPU that is at hand.
//!
//! The driver's library is looked for at run time: nothing of CUDA is needed to build. Kernels are PTX, which the driver
//! assembles when it loads them. Streams, events and modules are objects that release themselves; the current context,
//! which CUDA keeps per thread, is set before every call that depends on it.

use super::gpu::{
    self, CAPTURE_THREAD_LOCAL, EVENT_DEFAULT, HOST_PORTABLE, NO_DEVICE, NOT_READY, STREAM_NON_BLOCKING,
    SUCCESS,
};
use crate::device::DeviceInfo;
use crate::driver::{Dependency, Dispatch, Driver, Handle};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::launch::TensorMap;
use crate::shared::RAW_BYTES;
use cudarc::driver::sys as cuda;
use hk_codeobj::{Arch, Kernel as KernelInfo};
use once_cell::sync::OnceCell;
use std::any::Any;
use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt::Display;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// `CUresult`, as the integer that it is in C: cudarc declares an enum, and a code that it does not list would be an
/// invalid value of it the moment a call returns.
type Code = c_int;

const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
/// Of `cuIpcOpenMemHandle`: with peer access to the device of the memory.
const IPC_LAZY_PEER_ACCESS: c_uint = 1;
/// Shared memory of a block, static and dynamic, that a kernel gets without asking.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

type Context = cuda::CUcontext;
type RawStream = cuda::CUstream;
type RawEvent = cuda::CUevent;
type RawModule = cuda::CUmodule;
type RawFunction = cuda::CUfunction;
type Address = cuda::CUdeviceptr;
type RawGraph = cuda::CUgraph;
type RawGraphExec = cuda::CUgraphExec;

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandle([u8; RAW_BYTES]);

/// `CUtensorMap`.
#[repr(C, align(64))]
struct RawTensorMap([u64; 16]);

/// Declares the calls that this driver makes, looked up by name.
macro_rules! api {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*);)*) => {
        struct Api { $($field: unsafe extern "C" fn($($arg),*) -> Code,)* }

        impl Api {
            fn load() -> Result<Api, String> {
                // SAFETY: the CUDA driver's library is found by its name and stays loaded; the symbols have these types.
                unsafe {
                    if !cuda::is_culib_present() {
                        return Err("no CUDA driver: libcuda is not found".into());
                    }
                    let library = cuda::culib();
                    Ok(Api { $($field: *library.get($symbol.as_bytes()).map_err(|e| e.to_string())?,)* })
                }
            }
        }
    };
}

api! {
    init = "cuInit": fn(c_uint);
    error_name = "cuGetErrorName": fn(Code, *mut *const c_char);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device = "cuDeviceGet": fn(*mut c_int, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    total_memory = "cuDeviceTotalMem_v2": fn(*mut usize, c_int);
    retain_context = "cuDevicePrimaryCtxRetain": fn(*mut Context, c_int);
    set_context = "cuCtxSetCurrent": fn(Context);
    can_access_peer = "cuDeviceCanAccessPeer": fn(*mut c_int, c_int, c_int);
    enable_peer_access = "cuCtxEnablePeerAccess": fn(Context, c_uint);
    release_context = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    create_stream = "cuStreamCreate": fn(*mut RawStream, c_uint);
    destroy_stream = "cuStreamDestroy_v2": fn(RawStream);
    synchronize_stream = "cuStreamSynchronize": fn(RawStream);
    stream_waits = "cuStreamWaitEvent": fn(RawStream, RawEvent, c_uint);
    create_event = "cuEventCreate": fn(*mut RawEvent, c_uint);
    destroy_event = "cuEventDestroy_v2": fn(RawEvent);
    record_event = "cuEventRecord": fn(RawEvent, RawStream);
    query_event = "cuEventQuery": fn(RawEvent);
    synchronize_event = "cuEventSynchronize": fn(RawEvent);
    elapsed = "cuEventElapsedTime": fn(*mut f32, RawEvent, RawEvent);
    malloc_shared = "cuMemAlloc_v2": fn(*mut Address, usize);
    export = "cuIpcGetMemHandle": fn(*mut IpcHandle, Address);
    import = "cuIpcOpenMemHandle_v2": fn(*mut Address, IpcHandle, c_uint);
    close = "cuIpcCloseMemHandle": fn(Address);
    malloc = "cuMemAllocAsync": fn(*mut Address, usize, RawStream);
    free = "cuMemFreeAsync": fn(Address, RawStream);
    malloc_host = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    free_host = "cuMemFreeHost": fn(*mut c_void);
    to_device = "cuMemcpyHtoDAsync_v2": fn(Address, *const c_void, usize, RawStream);
    to_host = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, Address, usize, RawStream);
    on_device = "cuMemcpyDtoDAsync_v2": fn(Address, Address, usize, RawStream);
    fill8 = "cuMemsetD8Async": fn(Address, u8, usize, RawStream);
    fill16 = "cuMemsetD16Async": fn(Address, u16, usize, RawStream);
    fill32 = "cuMemsetD32Async": fn(Address, c_uint, usize, RawStream);
    load_module = "cuModuleLoadData": fn(*mut RawModule, *const c_void);
    unload_module = "cuModuleUnload": fn(RawModule);
    function = "cuModuleGetFunction": fn(*mut RawFunction, RawModule, *const c_char);
    function_attribute = "cuFuncGetAttribute": fn(*mut c_int, c_int, RawFunction);
    set_function_attribute = "cuFuncSetAttribute": fn(RawFunction, c_int, c_int);
    launch = "cuLaunchKernel": fn(
        RawFunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, RawStream, *mut *mut c_void, *mut *mut c_void
    );
    tensor_map = "cuTensorMapEncodeTiled": fn(
        *mut RawTensorMap, c_uint, c_uint, Address, *const u64, *const u64, *const u32, *const u32, c_uint, c_uint, c_uint, c_uint
    );
    begin_capture = "cuStreamBeginCapture_v2": fn(RawStream, c_int);
    end_capture = "cuStreamEndCapture": fn(RawStream, *mut RawGraph);
    instantiate = "cuGraphInstantiateWithFlags": fn(*mut RawGraphExec, RawGraph, c_ulonglong);
    destroy_graph = "cuGraphDestroy": fn(RawGraph);
    destroy_graph_exec = "cuGraphExecDestroy": fn(RawGraphExec);
    launch_graph = "cuGraphLaunch": fn(RawGraphExec, RawStream);
}

/// The driver's API, or why there is none.
fn api() -> Result<&'static Api, String> {
    static API: OnceCell<Api> = OnceCell::new();
    API.get_or_try_init(Api::load)
}

/// `Ok` for success, else the code with its name.
fn check(api: &Api, call: &'static str, code: Code, context: impl FnOnce() -> String) -> Result<()> {
    let name = |code| {
        let mut name = std::ptr::null();
        // SAFETY: takes any integer; `name` is valid for the write.
        let code = unsafe { (api.error_name)(code, &mut name) };
        if code == SUCCESS { name } else { std::ptr::null() }
    };
    gpu::check(call, code, name, context)
}

/// Number of NVIDIA GPUs; none without a driver.
pub(super) fn device_count() -> Result<u32> {
    let Ok(api) = api() else { return Ok(0) };
    let mut count = 0;
    // SAFETY: plain calls; `count` is valid for the write.
    let code = unsafe {
        match (api.init)(0) {
            SUCCESS => (api.device_count)(&mut count),
            code => code,
        }
    };
    match code {
        NO_DEVICE => Ok(0),
        _ => check(api, "cuDeviceGetCount", code, || "looking for NVIDIA GPUs".into())
            .map(|()| count.max(0) as u32),
    }
}

pub(super) struct Cuda {
    api: &'static Api,
    context: Arc<PrimaryContext>,
    info: DeviceInfo,
    /// What `import` gave.
    imported: Mutex<Vec<u64>>,
}

/// The primary context of a device, which all users of CUDA in a process share.
struct PrimaryContext {
    api: &'static Api,
    raw: Context,
    device: c_int,
}

// SAFETY: a handle is a pointer that only the driver dereferences, and its calls may come from any thread.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above.
unsafe impl Sync for PrimaryContext {}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: retained once in `Cuda::open`.
        unsafe { (self.api.release_context)(self.device) };
    }
}

impl PrimaryContext {
    /// Makes it current on this thread.
    fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained.
        check(self.api, "cuCtxSetCurrent", unsafe { (self.api.set_context)(self.raw) }, String::new)
    }
}

/// A foreign object and how it is released.
struct Owned<T: Copy> {
    raw: T,
    release: unsafe extern "C" fn(T) -> Code,
    context: Arc<PrimaryContext>,
}

// SAFETY: as for `PrimaryContext`.
unsafe impl<T: Copy> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T: Copy> Sync for Owned<T> {}

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // A failure leaves nothing to be done.
        if self.context.bind().is_ok() {
            // SAFETY: `raw` came from the matching create call and nothing else releases it; the driver completes queued
            // work on its own.
            unsafe { (self.release)(self.raw) };
        }
    }
}

type Stream = Owned<RawStream>;
type Event = Owned<RawEvent>;
type Module = Arc<Owned<RawModule>>;
type GraphExec = Owned<RawGraphExec>;

struct Function {
    raw: RawFunction,
    name: String,
    /// Static shared memory, in bytes.
    shared: u32,
    /// Dynamic shared memory that the kernel wants for itself, in bytes.
    wanted: AtomicU32,
    /// Dynamic shared memory that the driver has been told it may have, in bytes.
    dynamic: Mutex<u32>,
    /// Keeps the code loaded.
    _module: Module,
}

// SAFETY: as for `PrimaryContext`.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Cuda {
    pub fn open(spec: &str, ordinal: u32) -> Result<Self> {
        let no_device = |reason: String| Error::NoDevice { spec: spec.into(), reason };
        let api = api().map_err(no_device)?;
        let count = device_count()?;
        if ordinal >= count {
            return Err(no_device(format!("no such NVIDIA GPU, there are {count}")));
        }
        let of_device = || spec.to_owned();
        let (mut device, mut name, mut memory) = (0, [0; 256], 0);
        // SAFETY: the pointers are valid for the writes, and the name's length is given.
        unsafe {
            // The ordinal is below a count that was a c_int.
            check(api, "cuDeviceGet", (api.device)(&mut device, ordinal as c_int), of_device)?;
            let code = (api.device_name)(name.as_mut_ptr(), name.len() as c_int - 1, device);
            check(api, "cuDeviceGetName", code, of_device)?;
            check(api, "cuDeviceTotalMem", (api.total_memory)(&mut memory, device), of_device)?;
        }
        let attribute = |which: cuda::CUdevice_attribute| {
            let mut value = 0;
            // SAFETY: `value` is valid for the write.
            let code = unsafe { (api.device_attribute)(&mut value, which as c_int, device) };
            check(api, "cuDeviceGetAttribute", code, || format!("{which:?} of {spec}"))?;
            Ok::<u32, Error>(value.max(0) as u32)
        };
        use cuda::CUdevice_attribute_enum as Attribute;
        let version = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if version < (9, 0) {
            let (major, minor) = version;
            return Err(no_device(format!(
                "the GPU is sm_{major}{minor}; there are kernels for sm_90 and later"
            )));
        }
        let info = DeviceInfo {
            spec: spec.into(),
            name: gpu::text(&name),
            arch: if version == (9, 0) { Arch::Sm90a } else { Arch::Sm90 },
            compute_units: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            wave_size: attribute(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?,
            lds_per_workgroup: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            max_threads_per_workgroup: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            max_grid: [
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
            ],
            total_memory_bytes: memory as u64,
            driver: "cuda",
        };
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for the write.
        let code = unsafe { (api.retain_context)(&mut raw, device) };
        check(api, "cuDevicePrimaryCtxRetain", code, of_device)?;
        Ok(Self {
            api,
            context: Arc::new(PrimaryContext { api, raw, device }),
            info,
            imported: Mutex::default(),
        })
    }

    /// Makes the device current on this thread.
    fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    fn check(&self, call: &'static str, code: Code) -> Result<()> {
        check(self.api, call, code, || self.info.spec.clone())
    }

    fn owned<T: Copy>(&self, raw: T, release: unsafe extern "C" fn(T) -> Code) -> Owned<T> {
        Owned { raw, release, context: Arc::clone(&self.context) }
    }
}

impl Driver for Cuda {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn can_access_peer(&self, peer: &dyn Driver) -> Result<std::result::Result<(), String>> {
        let Some(peer) = (peer as &dyn Any).downcast_ref::<Cuda>() else {
            return Ok(Err("they are devices of two drivers".into()));
        };
        let mut can = 0;
        // SAFETY: `can` is valid for the write.
        let code = unsafe { (self.api.can_access_peer)(&mut can, self.context.device, peer.context.device) };
        self.check("cuDeviceCanAccessPeer", code)?;
        Ok(if can != 0 { Ok(()) } else { Err("the GPUs have no peer access to each other".into()) })
    }

    fn enable_peer_access(&self, peer: &dyn Driver) -> Result<()> {
        let Some(peer) = (peer as &dyn Any).downcast_ref::<Cuda>() else { return Ok(()) };
        self.bind()?;
        // SAFETY: the context is retained.
        match unsafe { (self.api.enable_peer_access)(peer.context.raw, 0) } {
            PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.check("cuCtxEnablePeerAccess", code),
        }
    }

    fn create_stream(&self) -> Result<Handle> {
        self.bind()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for the write.
        self.check("cuStreamCreate", unsafe { (self.api.create_stream)(&mut raw, STREAM_NON_BLOCKING) })?;
        Ok(Handle::new(self.owned(raw, self.api.destroy_stream)))
    }

    fn synchronize(&self, stream: &Handle) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream is alive.
        let code = unsafe { (self.api.synchronize_stream)(stream.get::<Stream>().raw) };
        self.check("cuStreamSynchronize", code)
    }

    fn malloc(&self, stream: &Handle, bytes: u64, label: &dyn Display) -> Result<u64> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: the stream is alive, `address` is valid for the write.
        let code = unsafe { (self.api.malloc)(&mut address, bytes as usize, stream.get::<Stream>().raw) };
        check(self.api, "cuMemAllocAsync", code, || gpu::allocation(code, label, bytes, &self.info.spec))?;
        Ok(address)
    }

    /// Not of a pool: those take part in peer access one by one.
    fn malloc_shared(&self, _: &Handle, bytes: u64, label: &dyn Display) -> Result<u64> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: `address` is valid for the write.
        let code = unsafe { (self.api.malloc_shared)(&mut address, bytes as usize) };
        check(self.api, "cuMemAlloc", code, || gpu::allocation(code, label, bytes, &self.info.spec))?;
        Ok(address)
    }

    fn export(&self, addr: u64) -> Result<[u8; RAW_BYTES]> {
        self.bind()?;
        let mut handle = IpcHandle([0; RAW_BYTES]);
        // SAFETY: valid for the write.
        let code = unsafe { (self.api.export)(&mut handle, addr) };
        self.check("cuIpcGetMemHandle", code).map(|()| handle.0)
    }

    fn import(&self, handle: &[u8; RAW_BYTES]) -> Result<u64> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: `address` is valid for the write.
        let code = unsafe { (self.api.import)(&mut address, IpcHandle(*handle), IPC_LAZY_PEER_ACCESS) };
        self.check("cuIpcOpenMemHandle", code)?;
        self.imported.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        Ok(address)
    }

    fn free(&self, stream: &Handle, addr: u64) {
        if gpu::take(&self.imported, addr) {
            // A failure of the work before is reported elsewhere.
            let _ = self.synchronize(stream);
            // SAFETY: opened by `import`, and no work uses it any more.
            unsafe { (self.api.close)(addr) };
            return;
        }
        // There is nobody to tell of a failure.
        if self.bind().is_ok() {
            // SAFETY: the address came from `malloc` and is freed once, after all work queued so far.
            unsafe { (self.api.free)(addr, stream.get::<Stream>().raw) };
        }
    }

    fn malloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.bind()?;
        // SAFETY: `host` is valid for the write.
        let alloc = |host: &mut *mut c_void| unsafe { (self.api.malloc_host)(host, bytes, HOST_PORTABLE) };
        gpu::zeroed_host(bytes, &self.info.spec, alloc, |code, context| {
            check(self.api, "cuMemHostAlloc", code, context)
        })
    }

    unsafe fn free_host(&self, host: NonNull<u8>, _: usize) {
        // There is nobody to tell of a failure.
        if self.bind().is_ok() {
            // SAFETY: the caller's promise.
            unsafe { (self.api.free_host)(host.as_ptr().cast()) };
        }
    }

    unsafe fn write_async(&self, stream: &Handle, dst: u64, src: NonNull<u8>, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: `dst` has room for the bytes (callers copy whole allocations), for `src` the caller's promise.
        let code =
            unsafe { (self.api.to_device)(dst, src.as_ptr().cast(), bytes, stream.get::<Stream>().raw) };
        self.check("cuMemcpyHtoDAsync", code)
    }

    unsafe fn read_async(&self, stream: &Handle, src: u64, dst: NonNull<u8>, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: `src` holds the bytes (callers copy whole allocations), for `dst` the caller's promise.
        let code = unsafe { (self.api.to_host)(dst.as_ptr().cast(), src, bytes, stream.get::<Stream>().raw) };
        self.check("cuMemcpyDtoHAsync", code)
    }

    fn write(&self, stream: &Handle, dst: u64, src: &[u8]) -> Result<()> {
        self.bind()?;
        // The driver may read page-locked memory after the call returns, hence the wait.
        // SAFETY: `dst` has room for the bytes (callers copy whole allocations), and `src` outlives the copy.
        let code =
            unsafe { (self.api.to_device)(dst, src.as_ptr().cast(), src.len(), stream.get::<Stream>().raw) };
        self.check("cuMemcpyHtoDAsync", code)?;
        self.synchronize(stream)
    }

    fn read(&self, stream: &Handle, src: u64, dst: &mut [u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: `src` holds the bytes (callers copy whole allocations), and `dst` outlives the copy.
        let code = unsafe {
            (self.api.to_host)(dst.as_mut_ptr().cast(), src, dst.len(), stream.get::<Stream>().raw)
        };
        self.check("cuMemcpyDtoHAsync", code)?;
        self.synchronize(stream)
    }

    fn copy(&self, stream: &Handle, dst: u64, src: u64, bytes: u64) -> Result<()> {
        self.bind()?;
        // SAFETY: both sides hold the bytes (callers copy whole allocations of one length).
        let code = unsafe { (self.api.on_device)(dst, src, bytes as usize, stream.get::<Stream>().raw) };
        self.check("cuMemcpyDtoDAsync", code)
    }

    fn fill(&self, stream: &Handle, dst: u64, pattern: &[u8], count: u64) -> Result<()> {
        self.bind()?;
        let (raw, n, api) = (stream.get::<Stream>().raw, count as usize, self.api);
        // SAFETY: `dst` has room for the pattern `count` times (callers fill whole allocations).
        let (call, code) = unsafe {
            match *pattern {
                [a] => ("cuMemsetD8Async", (api.fill8)(dst, a, n, raw)),
                [a, b] => ("cuMemsetD16Async", (api.fill16)(dst, u16::from_ne_bytes([a, b]), n, raw)),
                [a, b, c, d] => {
                    ("cuMemsetD32Async", (api.fill32)(dst, u32::from_ne_bytes([a, b, c, d]), n, raw))
                }
                // There is no call for longer patterns.
                _ => return self.write(stream, dst, &pattern.repeat(n)),
            }
        };
        self.check(call, code)
    }

    fn record(&self, stream: &Handle) -> Result<Handle> {
        self.bind()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for the write.
        self.check("cuEventCreate", unsafe { (self.api.create_event)(&mut raw, EVENT_DEFAULT) })?;
        let event = self.owned(raw, self.api.destroy_event);
        // SAFETY: both are alive.
        let code = unsafe { (self.api.record_event)(event.raw, stream.get::<Stream>().raw) };
        self.check("cuEventRecord", code)?;
        Ok(Handle::new(event))
    }

    fn wait(&self, stream: &Handle, event: &Handle, _: Dependency) -> Result<()> {
        self.bind()?;
        // SAFETY: both are alive; the event may be destroyed before the stream gets there.
        let code =
            unsafe { (self.api.stream_waits)(stream.get::<Stream>().raw, event.get::<Event>().raw, 0) };
        self.check("cuStreamWaitEvent", code)
    }

    fn query(&self, event: &Handle) -> Result<bool> {
        self.bind()?;
        // SAFETY: the event is alive.
        match unsafe { (self.api.query_event)(event.get::<Event>().raw) } {
            NOT_READY => Ok(false),
            code => self.check("cuEventQuery", code).map(|()| true),
        }
    }

    fn synchronize_event(&self, event: &Handle) -> Result<()> {
        self.bind()?;
        // SAFETY: the event is alive.
        let code = unsafe { (self.api.synchronize_event)(event.get::<Event>().raw) };
        self.check("cuEventSynchronize", code)
    }

    fn elapsed(&self, from: &Handle, to: &Handle) -> Result<Duration> {
        self.bind()?;
        let mut ms = 0.0;
        // SAFETY: both are alive and done, `ms` is valid for the write.
        let code = unsafe { (self.api.elapsed)(&mut ms, from.get::<Event>().raw, to.get::<Event>().raw) };
        self.check("cuEventElapsedTime", code)?;
        gpu::elapsed(ms)
    }

    fn load_module(&self, name: &str, image: &'static [u8]) -> Result<Handle> {
        self.bind()?;
        let text = CString::new(image.strip_suffix(b"\0").unwrap_or(image))
            .map_err(|_| Error::CodeObject { object: name.into(), reason: "PTX with a zero byte".into() })?;
        let mut raw = null_mut();
        // SAFETY: the image is a C string of PTX that the parser accepted.
        let code = unsafe { (self.api.load_module)(&mut raw, text.as_ptr().cast()) };
        check(self.api, "cuModuleLoadData", code, || format!("{name} on {}", self.info.spec))?;
        Ok(Handle::new(Module::new(self.owned(raw, self.api.unload_module))))
    }

    fn function(&self, module: &Handle, symbol: &str) -> Result<Handle> {
        self.bind()?;
        let module = module.get::<Module>().clone();
        let name = gpu::symbol_name(symbol)?;
        let mut raw = null_mut();
        // SAFETY: the module is alive, the name is a C string, `raw` is valid for the write.
        let code = unsafe { (self.api.function)(&mut raw, module.raw, name.as_ptr()) };
        check(self.api, "cuModuleGetFunction", code, || format!("{symbol} on {}", self.info.spec))?;
        let mut shared = 0;
        let which = cuda::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as c_int;
        // SAFETY: the function is loaded, `shared` is valid for the write.
        let code = unsafe { (self.api.function_attribute)(&mut shared, which, raw) };
        check(self.api, "cuFuncGetAttribute", code, || format!("{symbol} on {}", self.info.spec))?;
        let (name, shared) = (symbol.into(), shared.max(0) as u32);
        let (wanted, dynamic) = (AtomicU32::new(0), Mutex::new(0));
        Ok(Handle::new(Function { raw, name, shared, wanted, dynamic, _module: module }))
    }

    fn resources(&self, function: &Handle, info: &mut KernelInfo) -> Result<()> {
        self.bind()?;
        use cuda::CUfunction_attribute_enum as Attribute;
        let attribute = |which: cuda::CUfunction_attribute| {
            let mut value = 0;
            // SAFETY: the function is loaded, `value` is valid for the write.
            let code = unsafe {
                (self.api.function_attribute)(&mut value, which as c_int, function.get::<Function>().raw)
            };
            check(self.api, "cuFuncGetAttribute", code, || format!("{which:?} of {}", info.name))?;
            Ok::<u32, Error>(value.max(0) as u32)
        };
        let registers = attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        // Beside the static part, what the PTX asks for: so far that alone is in `info`.
        let wanted = info.lds_bytes;
        function.get::<Function>().wanted.store(wanted, Ordering::Relaxed);
        let lds = attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?.saturating_add(wanted);
        let local = attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
        let threads = attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        (info.vgprs, info.total_vgprs) = (registers, registers);
        (info.lds_bytes, info.scratch_bytes) = (lds, local);
        info.max_threads = info.max_threads.min(threads);
        Ok(())
    }

    fn tensor_map(&self, op: &'static str, tensor: &TensorMap) -> Result<Option<[u64; 16]>> {
        use cuda::CUtensorMapDataType_enum as Type;
        if !matches!(self.info.arch, Arch::Sm90a) {
            return Ok(None);
        }
        let dtype = match tensor.dtype {
            DType::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            other => return Err(Error::unsupported(op, other, "bulk tensor copies are of 16-bit floats")),
        };
        let long = cuda::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
        let short = cuda::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
        let mut map = RawTensorMap([0; 16]);
        // SAFETY: `Launch::tensor_map` has checked that the lists are as long as there are axes; the driver writes the map, and reads no
        // memory of the device.
        let code = unsafe {
            (self.api.tensor_map)(
                &mut map,
                dtype as c_uint,
                tensor.sizes.len() as c_uint,
                tensor.data,
                tensor.sizes.as_ptr(),
                tensor.strides.as_ptr(),
                tensor.tile.as_ptr(),
                [1; 5].as_ptr(),
                cuda::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE as c_uint,
                cuda::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B as c_uint,
                if tensor.long_reads { long } else { short } as c_uint,
                cuda::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as c_uint,
            )
        };
        check(self.api, "cuTensorMapEncodeTiled", code, || format!("{op}: {tensor:?}"))?;
        Ok(Some(map.0))
    }

    fn launch(&self, stream: &Handle, function: &Handle, dispatch: &Dispatch) -> Result<()> {
        self.bind()?;
        let &Dispatch { op, grid, block, dynamic_lds, args } = dispatch;
        let function = function.get::<Function>();
        let dynamic_lds = dynamic_lds.saturating_add(function.wanted.load(Ordering::Relaxed));
        if function.shared.saturating_add(dynamic_lds) > SHARED_WITHOUT_ASKING {
            // Whoever launches the kernel meanwhile waits until the driver knows.
            let mut told = function.dynamic.lock().unwrap_or_else(PoisonError::into_inner);
            if *told < dynamic_lds {
                let most = cuda::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function is loaded. The size is within the device's limit, an `i32`.
                let code = unsafe {
                    (self.api.set_function_attribute)(function.raw, most as c_int, dynamic_lds as c_int)
                };
                check(self.api, "cuFuncSetAttribute", code, || {
                    format!("{op}: {dynamic_lds} bytes of dynamic LDS of kernel {}", function.name)
                })?;
                *told = dynamic_lds;
            }
        }
        // The one parameter, a struct.
        let mut params: [*mut c_void; 1] = [args.as_ptr().cast_mut().cast()];
        // SAFETY: function and stream are alive; the driver copies the arguments during the call, and their size is the
        // kernel's. What the kernel does with them is what the caller of `Launch::run` answers for.
        let code = unsafe {
            (self.api.launch)(
                function.raw,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                dynamic_lds,
                stream.get::<Stream>().raw,
                params.as_mut_ptr(),
                null_mut(),
            )
        };
        check(self.api, "cuLaunchKernel", code, || gpu::launch(dispatch, &function.name, dynamic_lds))
    }

    fn foreign(&self, stream: &Handle) -> Result<Option<*mut c_void>> {
        self.bind()?;
        Ok(Some(stream.get::<Stream>().raw.cast()))
    }

    fn begin_capture(&self, stream: &Handle) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream is alive.
        let code = unsafe { (self.api.begin_capture)(stream.get::<Stream>().raw, CAPTURE_THREAD_LOCAL) };
        self.check("cuStreamBeginCapture", code)
    }

    fn end_capture(&self, stream: &Handle) -> Result<Handle> {
        self.bind()?;
        let mut graph = null_mut();
        // SAFETY: the stream is alive, `graph` is valid for the write.
        let code = unsafe { (self.api.end_capture)(stream.get::<Stream>().raw, &mut graph) };
        self.check("cuStreamEndCapture", code)?;
        let graph = self.owned(graph, self.api.destroy_graph);
        let mut raw = null_mut();
        // SAFETY: the graph is alive, `raw` is valid for the write.
        let code = unsafe { (self.api.instantiate)(&mut raw, graph.raw, 0) };
        self.check("cuGraphInstantiate", code)?;
        Ok(Handle::new(self.owned(raw, self.api.destroy_graph_exec)))
    }

    fn launch_graph(&self, stream: &Handle, graph: &Handle) -> Result<()> {
        self.bind()?;
        // SAFETY: both are alive. What the kernels do is what the caller of `Graph::launch` answers for.
        let code =
            unsafe { (self.api.launch_graph)(graph.get::<GraphExec>().raw, stream.get::<Stream>().raw) };
        self.check("cuGraphLaunch", code)
    }
}
