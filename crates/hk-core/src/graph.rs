//! Work that is noted once and queued many times.

use crate::device::Device;
use crate::driver::Handle;
use crate::error::Result;
use crate::stream::Stream;

/// Launches, copies on the device and fills, noted by [`Stream::capture`] and queued again by one call.
///
/// ```
/// # fn main() -> hk_core::Result<()> {
/// let stream = hk_core::Device::open("emu:gfx942")?.create_stream()?;
/// let mut x = stream.alloc_zeroed::<f32>(3)?;
/// let graph = stream.capture(|| stream.fill(&mut x, 2.0))?;
/// assert_eq!(stream.download(&x)?, [0.0; 3]); // noted, not done
/// // SAFETY: x is alive, and nothing else uses it.
/// unsafe { graph.launch(&stream)? };
/// assert_eq!(stream.download(&x)?, [2.0; 3]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Graph {
    // Declared before the device: the driver's graph goes first.
    handle: Handle,
    device: Device,
}

impl Graph {
    pub(crate) fn new(handle: Handle, device: Device) -> Self {
        Self { handle, device }
    }

    /// Queues everything that was noted, in its order, and returns. What work it is, with which addresses and scalars, was
    /// settled by the capture.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) for a stream of another device, [`Error::Driver`](crate::Error::Driver).
    ///
    /// # Safety
    /// Every buffer of the captured calls is alive until the work is done, and until then nothing else, on the host or on
    /// another stream, uses those that it writes or writes those that it reads.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        self.device.expect_same("Graph::launch", "graph", stream.device())?;
        stream.driver().launch_graph(stream.handle(), &self.handle)
    }
}
