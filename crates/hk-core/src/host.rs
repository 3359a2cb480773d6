//! Host memory that devices copy from and to on their own.

use crate::device::Device;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::event::Event;
use std::fmt;
use std::ptr::NonNull;

/// An array of `T` in page-locked host memory, made by [`Device::alloc_host`].
///
/// Copies from and to other host memory block. Those of this kind are queued, and run while the host goes on:
/// [`Stream::write_async`](crate::Stream::write_async), [`Stream::read_async`](crate::Stream::read_async). Looking at the
/// elements, and dropping them, waits for the copies that were queued.
///
/// ```
/// # fn main() -> hk_core::Result<()> {
/// let device = hk_core::Device::open("emu:gfx942")?;
/// let stream = device.create_stream()?;
/// let mut host = device.alloc_host::<f32>(3)?;
/// host.elements()?.copy_from_slice(&[1.0, 2.0, 3.0]);
/// let mut x = stream.alloc_zeroed::<f32>(3)?;
/// stream.write_async(&mut x, &mut host)?;
/// assert_eq!(stream.download(&x)?, [1.0, 2.0, 3.0]);
/// # Ok(()) }
/// ```
pub struct HostBuffer<T: Element> {
    device: Device,
    data: NonNull<T>,
    len: usize,
    /// Behind the last copy.
    last: Option<Event>,
}

// SAFETY: it owns its elements, which are plain data, and what may run beside is waited for.
unsafe impl<T: Element> Send for HostBuffer<T> {}
// SAFETY: a shared reference gives no elements.
unsafe impl<T: Element> Sync for HostBuffer<T> {}

impl<T: Element> HostBuffer<T> {
    pub(crate) fn new(device: &Device, len: usize) -> Result<Self> {
        let bytes =
            len.checked_mul(size_of::<T>()).filter(|&b| b <= isize::MAX as usize).ok_or_else(|| {
                Error::too_large(
                    "alloc_host",
                    "len",
                    format!("{len} elements of {}", T::DTYPE),
                    i64::MAX as u64,
                )
            })?;
        let data = match bytes {
            0 => NonNull::dangling(),
            _ => device.driver().malloc_host(bytes)?.cast(),
        };
        Ok(Self { device: device.clone(), data, len, last: None })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, once the copies queued with them are done.
    ///
    /// # Errors
    /// The failure of the work up to the last of those copies: [`Error::Emulator`], [`Error::Driver`].
    pub fn elements(&mut self) -> Result<&mut [T]> {
        if let Some(last) = self.last.take() {
            last.synchronize()?;
        }
        // SAFETY: that many elements, zeroed when they were made; no copy is under way, and the borrow is exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn bytes(&self) -> NonNull<u8> {
        self.data.cast()
    }

    pub(crate) fn last(&self) -> Option<&Event> {
        self.last.as_ref()
    }

    /// Notes that a copy is queued before `event`.
    pub(crate) fn used_before(&mut self, event: Event) {
        self.last = Some(event);
    }
}

impl<T: Element> Drop for HostBuffer<T> {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        if let Some(last) = self.last.take() {
            // If it has failed, it is over, too.
            let _ = last.synchronize();
        }
        // SAFETY: of `malloc_host`, with this size; no copy is under way.
        unsafe { self.device.driver().free_host(self.data.cast(), self.len * size_of::<T>()) };
    }
}

impl<T: Element> fmt::Debug for HostBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer<{}>({} for {})", T::DTYPE, self.len, self.device.spec())
    }
}
