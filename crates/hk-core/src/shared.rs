//! Device memory of several processes.

use crate::buffer::{DeviceBuffer, Storage};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Names a buffer of [`Stream::alloc_shared`] for other processes of the host, as bytes: `hipIpcMemHandle_t` or `CUipcMemHandle`, its driver and
/// its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SharedHandle([u8; Self::BYTES]);

/// Bytes of a driver's own handle.
pub(crate) const RAW_BYTES: usize = 64;

impl SharedHandle {
    /// Its size.
    pub const BYTES: usize = 16 + RAW_BYTES;

    /// From what [`to_bytes`](Self::to_bytes) gave.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    fn new(driver: &str, bytes: u64, raw: &[u8; RAW_BYTES]) -> Self {
        let mut own = [0; Self::BYTES];
        own[..driver.len().min(8)].copy_from_slice(&driver.as_bytes()[..driver.len().min(8)]);
        own[8..16].copy_from_slice(&bytes.to_le_bytes());
        own[16..].copy_from_slice(raw);
        Self(own)
    }

    /// Driver, size in bytes, and the driver's own handle.
    fn parts(&self) -> ([u8; 8], u64, [u8; RAW_BYTES]) {
        let (mut driver, mut bytes, mut raw) = ([0; 8], [0; 8], [0; RAW_BYTES]);
        driver.copy_from_slice(&self.0[..8]);
        bytes.copy_from_slice(&self.0[8..16]);
        raw.copy_from_slice(&self.0[16..]);
        (driver, u64::from_le_bytes(bytes), raw)
    }
}

impl Stream {
    /// A name of a buffer of [`alloc_shared`](Self::alloc_shared), by which other processes open it ([`import_shared`](Self::import_shared))
    /// as long as it is not dropped.
    ///
    /// # Errors
    /// [`Error::Empty`]: no elements. [`Error::DeviceMismatch`]. [`Error::Driver`], [`Error::Emulator`]: not memory of `alloc_shared`, or the
    /// driver has no such handles.
    pub fn export_shared<T: Element>(&self, buffer: &DeviceBuffer<T>) -> Result<SharedHandle> {
        const OP: &str = "Stream::export_shared";
        self.device().expect_same(OP, "buffer", buffer.device())?;
        if buffer.is_empty() {
            return Err(Error::empty(OP, "buffer", 0, &[0]));
        }
        let raw = self.driver().export(buffer.storage.addr())?;
        Ok(SharedHandle::new(self.device().info().driver, buffer.storage.bytes() as u64, &raw))
    }

    /// Opens a buffer of another process, for kernels of this device: [`Launch::shared_address`](crate::Launch::shared_address). This stream is
    /// its home. Dropping it closes it in stream order, and may wait for the stream. The emulator shares memory between devices with a
    /// number (`emu:gfx942:0`).
    ///
    /// # Errors
    /// [`Error::Argument`]: a handle of another driver, or whose size is not whole elements. [`Error::Driver`], [`Error::Emulator`]: the memory
    /// is of this process, is not there any more, or this device has no access to it.
    ///
    /// # Safety
    /// The handle came from [`export_shared`](Self::export_shared) of a process of this host, and that process keeps the buffer until this one
    /// has been closed. Both may be written at any time, by kernels of either process.
    pub unsafe fn import_shared<T: Element>(&self, handle: &SharedHandle) -> Result<DeviceBuffer<T>> {
        const OP: &str = "Stream::import_shared";
        let (driver, bytes, raw) = handle.parts();
        let own = self.device().info().driver;
        if driver != SharedHandle::new(own, 0, &raw).parts().0 {
            let name = String::from_utf8_lossy(&driver);
            let got = format!("memory of the driver `{}`", name.trim_end_matches('\0'));
            return Err(Error::argument(OP, "handle", got, format!("memory of the driver `{own}`")));
        }
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        if size == 0 || size == usize::MAX || !size.is_multiple_of(size_of::<T>()) {
            let want = format!("whole elements of {} bytes", size_of::<T>());
            return Err(Error::argument(OP, "handle", format!("{bytes} bytes"), want));
        }
        let storage = Storage::imported(self, size, &raw)?;
        Ok(DeviceBuffer::new(storage, size / size_of::<T>()))
    }
}
