//! Queues of work.

use crate::buffer::{DeviceBuffer, Storage, Unused};
use crate::device::Device;
use crate::driver::{Dependency, Driver, Handle};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::graph::Graph;
use crate::host::HostBuffer;
use crate::launch::Launch;
use crate::module::{self, Kernel};
use crate::params::KernelRef;
use bytemuck::Pod;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A queue of work on a device. Cheap to clone; clones are the same queue.
///
/// Work of one stream runs in the order in which it was queued. Kernels and device-side copies return once queued;
/// [`read`](Self::read), [`download`](Self::download) and [`synchronize`](Self::synchronize) block, and report
/// what went wrong in the work before them. Once reported, a failure is forgotten; until then the stream skips
/// kernels and copies behind it.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    // Declared before the device: the driver's stream goes first.
    handle: Handle,
    device: Device,
    captures: AtomicBool,
    /// To be released after the capture.
    unused: Mutex<Vec<Unused>>,
}

/// Ends a capture, whatever happens within.
struct Capture<'a>(&'a Stream);

impl Capture<'_> {
    fn end(self) -> Result<Handle> {
        let stream = self.0;
        std::mem::forget(self);
        Self::end_on(stream)
    }

    fn end_on(stream: &Stream) -> Result<Handle> {
        let graph = stream.driver().end_capture(stream.handle());
        stream.0.captures.store(false, Ordering::Release);
        let unused = std::mem::take(&mut *stream.unused());
        unused.into_iter().for_each(Unused::release);
        graph
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // The work has panicked: the graph is dropped.
        let _ = Self::end_on(self.0);
    }
}

impl Stream {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let handle = device.driver().create_stream()?;
        let (captures, unused) = (AtomicBool::new(false), Mutex::default());
        Ok(Self(Arc::new(Inner { handle, device: device.clone(), captures, unused })))
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        self.0.device.driver()
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.0.handle
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Blocks until all queued work is done.
    ///
    /// # Errors
    /// The first failure of that work: [`Error::Emulator`], [`Error::Driver`].
    pub fn synchronize(&self) -> Result<()> {
        self.expect_no_capture("Stream::synchronize")?;
        self.driver().synchronize(self.handle())
    }

    /// An event after everything queued so far.
    ///
    /// # Errors
    /// [`Error::Driver`] if the driver fails.
    pub fn record(&self) -> Result<Event> {
        self.expect_no_capture("Stream::record")?;
        let handle = self.driver().record(self.handle())?;
        Ok(Event { device: self.device().clone(), handle })
    }

    /// Makes work that is queued from now on wait, on the device, for `event`. If what the event stands behind
    /// fails, so does this stream.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`] for an event of another device, [`Error::Driver`] if the driver fails.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device().expect_same("Stream::wait", "event", &event.device)?;
        self.expect_no_capture("Stream::wait")?;
        self.driver().wait(self.handle(), &event.handle, Dependency::Data)
    }

    /// A new buffer with the contents of `data`. Returns once `data` has been read.
    ///
    /// # Errors
    /// [`Error::Driver`] or [`Error::Emulator`] if there is not enough memory or the driver fails.
    pub fn upload<T: Element>(&self, data: &[T]) -> Result<DeviceBuffer<T>> {
        let buffer = self.alloc(data.len())?;
        self.write_bytes(&buffer.storage, bytemuck::cast_slice(data))?;
        Ok(buffer)
    }

    /// A new buffer of `len` zeros.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the size does not fit an `i64`, otherwise as [`upload`](Self::upload).
    pub fn alloc_zeroed<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let buffer = self.alloc(len)?;
        self.fill_bytes(&buffer.storage, 0)?;
        Ok(buffer)
    }

    /// A new buffer of `len` zeros that kernels of this device and of its peers can access at the same time
    /// ([`Launch::shared_address`], [`Device::enable_peer_access`]): fine-grained memory, in which accesses at system scope are
    /// seen by all. Returns when it is there.
    ///
    /// # Errors
    /// As [`alloc_zeroed`](Self::alloc_zeroed).
    pub fn alloc_shared<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let bytes = byte_size::<T>(len)?;
        let label = format_args!("shared {} x {len}", T::DTYPE);
        let buffer = DeviceBuffer::new(Storage::new_shared(self, bytes, &label)?, len);
        self.fill_bytes(&buffer.storage, 0)?;
        self.synchronize()?;
        Ok(buffer)
    }

    /// A new buffer of `len` elements with arbitrary contents.
    ///
    /// # Errors
    /// As [`alloc_zeroed`](Self::alloc_zeroed).
    ///
    /// # Safety
    /// Every element is written before it is read, whether by a kernel or by a copy to the host. (What the memory
    /// held before may come from another program.)
    pub unsafe fn alloc_uninit<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        self.alloc(len)
    }

    fn alloc<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let bytes = byte_size::<T>(len)?;
        let label = format_args!("{} x {len}", T::DTYPE);
        Ok(DeviceBuffer::new(Storage::new(self, bytes, &label)?, len))
    }

    /// Copies `data` to the whole of `buffer`. Returns once `data` has been read.
    ///
    /// # Errors
    /// [`Error::Shape`] if the lengths differ, [`Error::DeviceMismatch`], [`Error::Driver`].
    pub fn write<T: Element>(&self, buffer: &mut DeviceBuffer<T>, data: &[T]) -> Result<()> {
        expect_len("Stream::write", "data", data.len(), buffer.len())?;
        buffer.storage.used_on("Stream::write", "buffer", self)?;
        self.write_bytes(&buffer.storage, bytemuck::cast_slice(data))
    }

    /// Copies the whole of `buffer` to `data`, after everything queued on this stream; blocks until it is there.
    ///
    /// # Errors
    /// [`Error::Shape`] if the lengths differ, [`Error::DeviceMismatch`], and the first failure of the work queued
    /// before: [`Error::Emulator`], [`Error::Driver`].
    pub fn read<T: Element>(&self, buffer: &DeviceBuffer<T>, data: &mut [T]) -> Result<()> {
        expect_len("Stream::read", "data", data.len(), buffer.len())?;
        buffer.storage.used_on("Stream::read", "buffer", self)?;
        self.read_bytes(&buffer.storage, bytemuck::cast_slice_mut(data))
    }

    /// The contents of `buffer`, after everything queued on this stream; blocks until they are there.
    ///
    /// # Errors
    /// As [`read`](Self::read), and [`Error::Argument`] if the host cannot allocate that much.
    pub fn download<T: Element>(&self, buffer: &DeviceBuffer<T>) -> Result<Vec<T>> {
        let mut data = zeroed_on_host("Stream::download", "buffer", buffer.len())?;
        self.read(buffer, &mut data)?;
        Ok(data)
    }

    /// Queues a copy of `host` to the whole of `buffer` and returns.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_async<T: Element>(
        &self,
        buffer: &mut DeviceBuffer<T>,
        host: &mut HostBuffer<T>,
    ) -> Result<()> {
        const OP: &str = "Stream::write_async";
        self.copy_async(OP, buffer, host, |addr, bytes| {
            // SAFETY: as long as each other, and the host memory is not used before the event behind the copy.
            unsafe { self.driver().write_async(self.handle(), addr, bytes, buffer.storage.bytes()) }
        })
    }

    /// Queues a copy of the whole of `buffer` to `host` and returns; [`HostBuffer::elements`] waits for it. (On the
    /// emulator it is done when the call returns.)
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_async<T: Element>(&self, buffer: &DeviceBuffer<T>, host: &mut HostBuffer<T>) -> Result<()> {
        const OP: &str = "Stream::read_async";
        self.copy_async(OP, buffer, host, |addr, bytes| {
            // SAFETY: as above.
            unsafe { self.driver().read_async(self.handle(), addr, bytes, buffer.storage.bytes()) }
        })
    }

    /// Queues a copy between the two, behind the last one of the host memory.
    fn copy_async<T: Element>(
        &self,
        op: &'static str,
        buffer: &DeviceBuffer<T>,
        host: &mut HostBuffer<T>,
        copy: impl FnOnce(u64, std::ptr::NonNull<u8>) -> Result<()>,
    ) -> Result<()> {
        expect_len(op, "host", host.len(), buffer.len())?;
        self.device().expect_same(op, "host", host.device())?;
        self.expect_no_capture(op)?;
        if host.is_empty() {
            return Ok(());
        }
        buffer.storage.used_on(op, "buffer", self)?;
        if let Some(last) = host.last() {
            self.driver().wait(self.handle(), &last.handle, Dependency::Data)?;
        }
        let queued = copy(buffer.storage.addr(), host.bytes());
        match self.record() {
            Ok(event) => host.used_before(event),
            // Nothing would wait for the copy later on.
            Err(_) => self.synchronize()?,
        }
        queued
    }

    /// Sets every element of `buffer`.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`], [`Error::Driver`].
    pub fn fill<T: Element>(&self, buffer: &mut DeviceBuffer<T>, value: T) -> Result<()> {
        if buffer.is_empty() {
            return Ok(());
        }
        buffer.storage.used_on("Stream::fill", "buffer", self)?;
        let count = buffer.len() as u64;
        self.driver().fill(self.handle(), buffer.storage.addr(), bytemuck::bytes_of(&value), count)
    }

    /// Copies the whole of `src` to `dst` on the device.
    ///
    /// # Errors
    /// [`Error::Shape`] if the lengths differ, [`Error::DeviceMismatch`], [`Error::Driver`].
    pub fn copy<T: Element>(&self, src: &DeviceBuffer<T>, dst: &mut DeviceBuffer<T>) -> Result<()> {
        expect_len("Stream::copy", "dst", dst.len(), src.len())?;
        if src.is_empty() {
            return Ok(());
        }
        src.storage.used_on("Stream::copy", "src", self)?;
        dst.storage.used_on("Stream::copy", "dst", self)?;
        let bytes = src.storage.bytes() as u64;
        self.driver().copy(self.handle(), dst.storage.addr(), src.storage.addr(), bytes)
    }

    /// Captures what `work` queues on this stream, without executing it: launches, copies on the device, fills.
    /// [`Graph::launch`] then queues all of it at once, at a lower cost than the single calls.
    ///
    /// The functions of the family crates can be captured: they do not wait, allocate or copy. Within `work` the stream
    /// refuses what a graph cannot hold (waits, allocations, copies from and to the host, events, the first use of a buffer
    /// of another stream). A kernel is loaded by its first use: call each function once before, so that the capture does not.
    ///
    /// # Errors
    /// Errors of `work`; [`Error::Unsupported`] if the stream captures already; [`Error::Driver`].
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.expect_no_capture("Stream::capture")?;
        self.driver().begin_capture(self.handle())?;
        self.0.captures.store(true, Ordering::Release);
        let capture = Capture(self);
        let done = work();
        let graph = capture.end();
        done?;
        Ok(Graph::new(graph?, self.device().clone()))
    }

    /// True within [`capture`](Self::capture).
    pub(crate) fn captures(&self) -> bool {
        self.0.captures.load(Ordering::Acquire)
    }

    pub(crate) fn release_after_capture(&self, unused: Unused) {
        self.unused().push(unused);
    }

    fn unused(&self) -> std::sync::MutexGuard<'_, Vec<Unused>> {
        self.0.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn expect_no_capture(&self, op: &'static str) -> Result<()> {
        if !self.captures() {
            return Ok(());
        }
        let reason = "a graph holds launches, copies on the device and fills".into();
        Err(Error::Unsupported { op, what: "this call during a capture".into(), reason })
    }

    /// A kernel on this device, loaded on the first call and kept from then on.
    ///
    /// # Errors
    /// [`Error::Compiler`] if the source is not compiled for this device, [`Error::CodeObject`] if the code object is
    /// corrupt, has no such kernel or breaks the contract ([`LoadedKernel`](crate::LoadedKernel)), [`Error::Driver`].
    pub fn kernel<P: Pod>(&self, kernel: KernelRef<P>) -> Result<Kernel<P>> {
        module::kernel(self.device(), kernel)
    }

    /// Begins a launch for the operation `op`: see [`Launch`].
    pub fn launch<'a>(&'a self, op: &'static str) -> Launch<'a> {
        Launch::new(self, op)
    }

    /// What was executed on this stream since the last call, from the emulator; `None` on hardware. Blocks until all
    /// queued work is done.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    #[cfg(feature = "emu")]
    pub fn take_counters(&self) -> Result<Option<crate::Counters>> {
        self.driver().take_counters(self.handle())
    }

    /// What each kernel executed on this stream since the last call, by source line; kernels in the order of their
    /// first launches. Empty but for an emulated device with the option `details`. Blocks until all queued work is done.
    ///
    /// ```
    /// # fn main() -> hk_core::Result<()> {
    /// let stream = hk_core::Device::open("emu:gfx942?details=true")?.create_stream()?;
    /// // ... launches ...
    /// for profile in stream.take_profiles()? {
    ///     let details = profile.counters.details.expect("the device counts them");
    ///     assert_eq!(details.lds_conflict_clocks, 0, "{}", profile.kernel);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    #[cfg(feature = "emu")]
    pub fn take_profiles(&self) -> Result<Vec<crate::Profile>> {
        self.driver().take_profiles(self.handle())
    }

    /// Each launch on this stream since the last call with its modelled time, or why it has none, in order. Empty but for an emulated device with
    /// the options `time` and `details`. Blocks until all queued work is done.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    #[cfg(feature = "time")]
    pub fn take_launches(&self) -> Result<Vec<crate::Modelled>> {
        self.driver().take_launches(self.handle())
    }

    /// Sets every byte. The storage is known to be used on this stream.
    pub(crate) fn fill_bytes(&self, storage: &Storage, value: u8) -> Result<()> {
        match storage.bytes() as u64 {
            0 => Ok(()),
            bytes => self.driver().fill(self.handle(), storage.addr(), &[value], bytes),
        }
    }

    /// Copies `data`, as long as the storage. The storage is known to be used on this stream.
    pub(crate) fn write_bytes(&self, storage: &Storage, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        self.expect_no_capture("Stream::write")?;
        self.driver().write(self.handle(), storage.addr(), data)
    }

    /// Copies to `data`, as long as the storage. The storage is known to be used on this stream.
    pub(crate) fn read_bytes(&self, storage: &Storage, data: &mut [u8]) -> Result<()> {
        if data.is_empty() {
            return self.synchronize();
        }
        self.expect_no_capture("Stream::read")?;
        self.driver().read(self.handle(), storage.addr(), data)
    }
}

fn byte_size<T: Element>(len: usize) -> Result<usize> {
    len.checked_mul(size_of::<T>()).filter(|&b| b <= i64::MAX as usize).ok_or_else(|| {
        Error::too_large("alloc", "len", format!("{len} elements of {}", T::DTYPE), i64::MAX as u64)
    })
}

/// `len` zeros on the host for what is in `arg`. Devices of the emulator hold more than the host: their pages are there once written.
pub(crate) fn zeroed_on_host<T: Pod>(op: &'static str, arg: &'static str, len: usize) -> Result<Vec<T>> {
    if Vec::<T>::new().try_reserve_exact(len).is_err() {
        let got = format!("{len} elements of {} bytes", size_of::<T>());
        return Err(Error::argument(op, arg, got, "what the host can allocate"));
    }
    Ok(vec![T::zeroed(); len])
}

fn expect_len(op: &'static str, arg: &'static str, got: usize, want: usize) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::shape(op, arg, [got], format!("[{want}], as the buffer")))
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream(on {})", self.device().spec())
    }
}
