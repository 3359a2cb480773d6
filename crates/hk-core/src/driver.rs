//! What a device driver provides, modelled on the HIP module API.

use crate::device::DeviceInfo;
use crate::error::Result;
use crate::launch::TensorMap;
use crate::shared::RAW_BYTES;
use hk_codeobj::Kernel as KernelInfo;
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// A driver's own object: stream, event, module or function. Dropping the last clone releases it.
#[derive(Clone)]
pub(crate) struct Handle(Arc<dyn Any + Send + Sync>);

impl Handle {
    pub fn new<T: Any + Send + Sync>(object: T) -> Self {
        Self(Arc::new(object))
    }

    /// The object behind the handle. Handles never leave the device that made them: everything public checks
    /// that first, so another type is a bug of this crate.
    pub fn get<T: Any>(&self) -> &T {
        self.0.downcast_ref().expect("a handle goes to the driver that made it")
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle")
    }
}

/// Why one stream waits for an event of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dependency {
    /// Later work uses what the event's stream computed: if that failed, the later work fails too.
    Data,
    /// Only the lifetime of memory depends on the order.
    Lifetime,
}

/// A checked launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dispatch<'a> {
    pub op: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic LDS in bytes.
    pub dynamic_lds: u32,
    /// The explicit arguments, packed.
    pub args: &'a [u8],
}

/// A device as a driver presents it.
///
/// Work on a stream runs in order; different streams are ordered by events only. Everything but `synchronize`,
/// `read`, `write`, `take_counters`, `take_profiles` and `take_launches` returns once the work is queued. A failure of queued work is reported by
/// the next synchronising call.
pub(crate) trait Driver: Any + Send + Sync {
    fn info(&self) -> &DeviceInfo;

    /// Whether kernels can be given access to the memory of `peer`, a device of the same driver; else why not.
    fn can_access_peer(&self, peer: &dyn Driver) -> Result<std::result::Result<(), String>>;
    /// Gives kernels access to what `malloc_shared` of `peer` gives; again is nothing. `can_access_peer` holds.
    fn enable_peer_access(&self, peer: &dyn Driver) -> Result<()>;

    fn create_stream(&self) -> Result<Handle>;
    fn synchronize(&self, stream: &Handle) -> Result<()>;

    /// Memory for work that is queued on `stream` from now on, aligned to 256 bytes. `bytes > 0`.
    fn malloc(&self, stream: &Handle, bytes: u64, label: &dyn fmt::Display) -> Result<u64>;
    /// The same of memory that kernels of this device and its peers access at the same time: not cached beyond the scope of an
    /// access. Blocks until it is there.
    fn malloc_shared(&self, stream: &Handle, bytes: u64, label: &dyn fmt::Display) -> Result<u64> {
        self.malloc(stream, bytes, label)
    }
    /// What another process opens memory of `malloc_shared` by.
    fn export(&self, addr: u64) -> Result<[u8; RAW_BYTES]>;
    /// Opens memory of another process. Kernels of this device can access it until `free`.
    fn import(&self, handle: &[u8; RAW_BYTES]) -> Result<u64>;
    /// Releases memory once everything queued on `stream` so far is done; closes what `import` gave.
    fn free(&self, stream: &Handle, addr: u64);
    /// Zeroed host memory that asynchronous copies can use, aligned to 64 bytes. `bytes > 0`.
    fn malloc_host(&self, bytes: usize) -> Result<NonNull<u8>>;
    /// Releases what `malloc_host` gave for as many bytes; no copy uses it any more.
    ///
    /// # Safety
    /// As it says.
    unsafe fn free_host(&self, host: NonNull<u8>, bytes: usize);
    /// Queues a copy from memory of `malloc_host`.
    ///
    /// # Safety
    /// `src` holds the bytes, and nothing writes them, until the copy is done.
    unsafe fn write_async(&self, stream: &Handle, dst: u64, src: NonNull<u8>, bytes: usize) -> Result<()>;
    /// Queues a copy to memory of `malloc_host`.
    ///
    /// # Safety
    /// `dst` has room for the bytes, and nothing uses them, until the copy is done.
    unsafe fn read_async(&self, stream: &Handle, src: u64, dst: NonNull<u8>, bytes: usize) -> Result<()>;
    /// Returns once `src` has been read, which may be before the copy is done.
    fn write(&self, stream: &Handle, dst: u64, src: &[u8]) -> Result<()>;
    /// Returns when `dst` is filled.
    fn read(&self, stream: &Handle, src: u64, dst: &mut [u8]) -> Result<()>;
    fn copy(&self, stream: &Handle, dst: u64, src: u64, bytes: u64) -> Result<()>;
    /// Repeats `pattern` (1, 2, 4 or 8 bytes) `count` times.
    fn fill(&self, stream: &Handle, dst: u64, pattern: &[u8], count: u64) -> Result<()>;

    /// An event behind everything queued on `stream` so far.
    fn record(&self, stream: &Handle) -> Result<Handle>;
    fn wait(&self, stream: &Handle, event: &Handle, why: Dependency) -> Result<()>;
    fn query(&self, event: &Handle) -> Result<bool>;
    fn synchronize_event(&self, event: &Handle) -> Result<()>;
    fn elapsed(&self, from: &Handle, to: &Handle) -> Result<Duration>;

    /// A CUtensorMap; `None` on devices without bulk tensor copies.
    fn tensor_map(&self, _op: &'static str, _tensor: &TensorMap) -> Result<Option<[u64; 16]>> {
        Ok(None)
    }

    fn load_module(&self, name: &str, image: &'static [u8]) -> Result<Handle>;
    fn function(&self, module: &Handle, symbol: &str) -> Result<Handle>;
    /// Adds to what the code object says of a kernel what only the driver knows.
    fn resources(&self, _function: &Handle, _info: &mut KernelInfo) -> Result<()> {
        Ok(())
    }
    fn launch(&self, stream: &Handle, function: &Handle, dispatch: &Dispatch) -> Result<()>;

    /// Makes the device current on this thread and gives the driver's own handle of a stream, for calls of other libraries. `None`
    /// for the emulator.
    fn foreign(&self, _stream: &Handle) -> Result<Option<*mut c_void>> {
        Ok(None)
    }
    /// Queues work of the host. Never on hardware.
    #[cfg(feature = "emu")]
    fn host_work(&self, _stream: &Handle, _work: Arc<crate::HostWork>) -> Result<()> {
        let reason = "only the emulator executes work of the host".into();
        Err(crate::Error::Unsupported { op: "Launch::run_on_host", what: self.info().spec.clone(), reason })
    }

    /// From here on work on `stream` is noted, not done: launches, copies on the device, fills.
    fn begin_capture(&self, stream: &Handle) -> Result<()>;
    /// Ends it, and gives what was noted.
    fn end_capture(&self, stream: &Handle) -> Result<Handle>;
    /// Queues all of it.
    fn launch_graph(&self, stream: &Handle, graph: &Handle) -> Result<()>;

    /// What was executed on `stream` since the last call. `None` on hardware.
    #[cfg(feature = "emu")]
    fn take_counters(&self, stream: &Handle) -> Result<Option<crate::Counters>> {
        self.synchronize(stream).map(|()| None)
    }

    /// The same by kernel and source line, where the device counts so.
    #[cfg(feature = "emu")]
    fn take_profiles(&self, stream: &Handle) -> Result<Vec<crate::Profile>> {
        self.synchronize(stream).map(|()| Vec::new())
    }

    /// Each launch with its modelled time, where the device models it.
    #[cfg(feature = "time")]
    fn take_launches(&self, stream: &Handle) -> Result<Vec<crate::Modelled>> {
        self.synchronize(stream).map(|()| Vec::new())
    }
}
