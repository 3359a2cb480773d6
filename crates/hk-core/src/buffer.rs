//! Device memory.

use crate::device::Device;
use crate::driver::Dependency;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::shared::RAW_BYTES;
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Mutex, PoisonError};

/// An array of `T` on a device.
///
/// Made by [`Stream::upload`], [`Stream::alloc_zeroed`] and [`Stream::alloc_uninit`]; that stream is its home.
/// Other streams of the device can use it as well. Their first use waits, on the device, for the work queued on the home
/// stream by then; later ordering between streams is the caller's, with [`Stream::wait`].
///
/// Dropping a buffer never blocks and is safe at any time: its memory is released in stream order, after
/// everything that was queued with it on any stream.
///
/// The address is aligned to 256 bytes.
pub struct DeviceBuffer<T> {
    pub(crate) storage: Storage,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> DeviceBuffer<T> {
    pub(crate) fn new(storage: Storage, len: usize) -> Self {
        Self { storage, len, element: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device it lies on.
    pub fn device(&self) -> &Device {
        self.storage.device()
    }

    /// The whole buffer as a contiguous tensor.
    ///
    /// # Errors
    /// [`Error::Shape`] if `shape` has not exactly [`len`](Self::len) elements, or more than five axes.
    pub fn view(&self, shape: impl AsRef<[usize]>) -> Result<TensorView<'_, T>> {
        TensorView::new(&self.storage, self.len, self.whole("view", shape.as_ref())?, 0)
    }

    /// The whole buffer as a contiguous tensor that can be written.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn view_mut(&mut self, shape: impl AsRef<[usize]>) -> Result<TensorViewMut<'_, T>> {
        TensorViewMut::new(&self.storage, self.len, self.whole("view_mut", shape.as_ref())?, 0)
    }

    /// A tensor with any layout, its first element at `offset`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an element would lie outside of the buffer.
    pub fn view_with(&self, layout: Layout, offset: usize) -> Result<TensorView<'_, T>> {
        TensorView::new(&self.storage, self.len, layout, offset)
    }

    /// A tensor with any layout that can be written, its first element at `offset`.
    ///
    /// # Errors
    /// As [`view_with`](Self::view_with), and [`Error::Stride`] if elements of the layout overlap each other.
    pub fn view_mut_with(&mut self, layout: Layout, offset: usize) -> Result<TensorViewMut<'_, T>> {
        TensorViewMut::new(&self.storage, self.len, layout, offset)
    }

    fn whole(&self, op: &'static str, shape: &[usize]) -> Result<Layout> {
        let layout = Layout::contiguous(shape)?;
        if layout.numel() != self.len {
            let want = format!("{} elements, all of the buffer", self.len);
            return Err(Error::shape(op, "shape", shape, want));
        }
        Ok(layout)
    }
}

impl<T: Element> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer<{}>({} on {})", T::DTYPE, self.len, self.device().spec())
    }
}

/// Address of buffers without elements: aligned, not null, never mapped.
const EMPTY: u64 = 256;

/// An allocation and the streams whose work may still use it.
pub struct Storage {
    home: Stream,
    addr: u64,
    bytes: usize,
    /// Streams other than the home that have used it.
    visitors: Mutex<Vec<Stream>>,
}

impl Storage {
    /// Uninitialised memory.
    pub fn new(stream: &Stream, bytes: usize, label: &dyn fmt::Display) -> Result<Self> {
        Self::allocate(stream, bytes, || stream.driver().malloc(stream.handle(), bytes as u64, label))
    }

    /// Uninitialised memory that several devices access at the same time.
    pub fn new_shared(stream: &Stream, bytes: usize, label: &dyn fmt::Display) -> Result<Self> {
        Self::allocate(stream, bytes, || stream.driver().malloc_shared(stream.handle(), bytes as u64, label))
    }

    /// Memory of another process.
    pub fn imported(stream: &Stream, bytes: usize, handle: &[u8; RAW_BYTES]) -> Result<Self> {
        Self::allocate(stream, bytes, || stream.driver().import(handle))
    }

    fn allocate(stream: &Stream, bytes: usize, malloc: impl FnOnce() -> Result<u64>) -> Result<Self> {
        stream.expect_no_capture("alloc")?;
        let addr = if bytes == 0 { EMPTY } else { malloc()? };
        Ok(Self { home: stream.clone(), addr, bytes, visitors: Mutex::default() })
    }

    pub fn device(&self) -> &Device {
        self.home.device()
    }

    pub fn addr(&self) -> u64 {
        self.addr
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Called before work that uses the memory is queued on `stream`.
    pub fn used_on(&self, op: &'static str, arg: &'static str, stream: &Stream) -> Result<()> {
        stream.device().expect_same(op, arg, self.device())?;
        self.visited(op, arg, stream)
    }

    /// The same where kernels of other devices may use the memory, too.
    pub fn shared_on(&self, op: &'static str, arg: &'static str, stream: &Stream) -> Result<()> {
        if !stream.device().reaches(self.device()) {
            stream.device().expect_same(op, arg, self.device())?;
        }
        let visitors = self.visitors.lock().unwrap_or_else(PoisonError::into_inner);
        let known = visitors.contains(stream);
        drop(visitors);
        if known { Ok(()) } else { self.visited(op, arg, stream) }
    }

    fn visited(&self, op: &'static str, arg: &'static str, stream: &Stream) -> Result<()> {
        if *stream == self.home {
            return Ok(());
        }
        if stream.captures() || self.home.captures() {
            let what = format!("{arg}, a buffer of another stream,");
            let reason = "a capture orders no streams; use buffers of the stream that captures".into();
            return Err(Error::Unsupported { op, what, reason });
        }
        let mut visitors = self.visitors.lock().unwrap_or_else(PoisonError::into_inner);
        if !visitors.contains(stream) {
            // The memory exists for work queued after its allocation.
            let event = self.home.driver().record(self.home.handle())?;
            stream.driver().wait(stream.handle(), &event, Dependency::Data)?;
            visitors.push(stream.clone());
        }
        Ok(())
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if self.addr != EMPTY {
            let visitors = std::mem::take(self.visitors.get_mut().unwrap_or_else(PoisonError::into_inner));
            Unused { home: self.home.clone(), addr: self.addr, visitors }.release();
        }
    }
}

/// Memory that is dropped but may still be used by queued work.
pub struct Unused {
    home: Stream,
    addr: u64,
    visitors: Vec<Stream>,
}

impl Unused {
    /// Releases it in stream order; after the capture, if one of its streams captures.
    pub fn release(self) {
        let capturing = std::iter::once(&self.home).chain(&self.visitors).find(|s| s.captures()).cloned();
        if let Some(stream) = capturing {
            return stream.release_after_capture(self);
        }
        let (driver, home) = (self.home.driver(), self.home.handle());
        for visitor in &self.visitors {
            // A visitor may be a stream of another device.
            let ordered = visitor
                .driver()
                .record(visitor.handle())
                .and_then(|event| driver.wait(home, &event, Dependency::Lifetime));
            // Without an event, wait here; if that fails too, leak the memory rather than reuse it.
            if ordered.is_err() && visitor.driver().synchronize(visitor.handle()).is_err() {
                return;
            }
        }
        driver.free(home, self.addr);
    }
}
