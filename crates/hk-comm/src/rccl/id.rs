//! What ranks join with.

use super::library;
use hk_core::{Device, Error, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Names a communicator before it exists: one rank makes it, all ranks join with it ([`RcclComm::new`](super::RcclComm::new)). Plain
/// bytes: how they get to ranks of other processes is the caller's business; [`publish`](Self::publish) and [`fetch`](Self::fetch) are one
/// way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UniqueId([u8; Self::BYTES]);

impl UniqueId {
    /// Its size, that of `ncclUniqueId`.
    pub const BYTES: usize = 128;

    /// A new one, for ranks on devices of the same driver as this one.
    ///
    /// # Errors
    /// [`Error::Library`] if the library is missing or too old, [`Error::Collective`] if it fails.
    pub fn new(device: &Device) -> Result<Self> {
        #[cfg(feature = "emu")]
        if device.info().driver == "emu" {
            let failed = |failure: hk_emu_comm::Failure| Error::Library {
                library: "hk-emu-comm".into(),
                reason: failure.to_string(),
            };
            return Ok(Self(hk_emu_comm::UniqueId::new().map_err(failed)?.to_bytes()));
        }
        library::unique_id(device).map(Self)
    }

    /// From what [`to_bytes`](Self::to_bytes) gave.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    /// Gives it to as many processes as connect to `listener`, up to `count`; blocks until they have it.
    ///
    /// # Errors
    /// [`Error::Argument`] if the network fails.
    pub fn publish(&self, listener: &TcpListener, count: usize) -> Result<()> {
        let sent = (0..count).try_for_each(|_| listener.accept()?.0.write_all(&self.0));
        sent.map_err(|error| Error::argument("UniqueId::publish", "listener", error, "a network"))
    }

    /// Gets it from a process that publishes it at `address`; tries again until `timeout` is over.
    ///
    /// # Errors
    /// [`Error::Argument`] if nobody publishes there.
    pub fn fetch(address: impl ToSocketAddrs, timeout: Duration) -> Result<Self> {
        let start = Instant::now();
        loop {
            let attempt = || {
                let mut stream = TcpStream::connect(&address)?;
                stream.set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
                let mut bytes = [0; Self::BYTES];
                stream.read_exact(&mut bytes)?;
                Ok(bytes)
            };
            let error: std::io::Error = match attempt() {
                Ok(bytes) => return Ok(Self(bytes)),
                Err(error) => error,
            };
            if start.elapsed() >= timeout || error.kind() == ErrorKind::InvalidInput {
                let want = "the address of a rank that publishes its id";
                return Err(Error::argument("UniqueId::fetch", "address", error, want));
            }
            std::thread::sleep(Duration::from_millis(20).min(timeout));
        }
    }
}
