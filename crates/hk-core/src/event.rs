//! Points in a stream's work.

use crate::device::Device;
use crate::driver::Handle;
use crate::error::Result;
use std::time::Duration;

/// A point in the work of a [`Stream`](crate::Stream), made by [`Stream::record`](crate::Stream::record).
#[derive(Debug, Clone)]
pub struct Event {
    pub(crate) device: Device,
    pub(crate) handle: Handle,
}

impl Event {
    /// True once everything queued before the event is done.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if the driver fails.
    pub fn query(&self) -> Result<bool> {
        self.device.driver().query(&self.handle)
    }

    /// Blocks until everything queued before the event is done.
    ///
    /// # Errors
    /// The failure of that work, if there was one: [`Error::Emulator`](crate::Error::Emulator), [`Error::Driver`](crate::Error::Driver). It is still reported by
    /// the stream's own next synchronising call too.
    pub fn synchronize(&self) -> Result<()> {
        self.device.driver().synchronize_event(&self.handle)
    }

    /// Time from `earlier` to this event on the device; blocks until both are done. On an emulated device with the
    /// option `time` this is modelled time, of launches, fills and copies on the device; without it, the time the emulator
    /// took, which says nothing about a GPU.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) for events of two devices, [`Error::Argument`](crate::Error::Argument) if `earlier` is the later one,
    /// [`Error::Unsupported`](crate::Error::Unsupported) if a launch before one of them has no modelled time, otherwise as
    /// [`Event::synchronize`].
    pub fn elapsed_since(&self, earlier: &Event) -> Result<Duration> {
        const OP: &str = "Event::elapsed_since";
        self.device.expect_same(OP, "earlier", &earlier.device)?;
        earlier.synchronize()?;
        self.synchronize()?;
        self.device.driver().elapsed(&earlier.handle, &self.handle)
    }
}
