//! What names a communicator before it exists.

use crate::Failure;
use std::io::Read;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: [u8; 8] = *b"hk-rccl1";

/// Names a communicator; one rank makes it, all ranks join with it. Plain bytes, for any way between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UniqueId([u8; Self::BYTES]);

impl UniqueId {
    /// Its size, that of `ncclUniqueId`.
    pub const BYTES: usize = 128;

    /// A new one. From here on this process answers ranks of other processes.
    ///
    /// # Errors
    /// [`Failure::Transport`] if there is no way for them to reach this one.
    pub fn new() -> Result<Self, Failure> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let process = process()?;
        crate::remote::serve(&process)?;
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&process);
        bytes[24..32].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Ok(Self(bytes))
    }

    /// The bytes of one that [`new`](Self::new) made.
    ///
    /// # Errors
    /// [`Failure::Invalid`] for other bytes.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Result<Self, Failure> {
        if bytes[..8] != MAGIC {
            return Err(Failure::Invalid("the unique id is not one of this library".into()));
        }
        Ok(Self(bytes))
    }

    /// Its bytes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    /// The process that has made it.
    pub(crate) fn process(&self) -> [u8; 16] {
        let mut process = [0; 16];
        process.copy_from_slice(&self.0[8..24]);
        process
    }

    /// What is its own among all of a process.
    pub(crate) fn number(&self) -> Vec<u8> {
        self.0[24..32].to_vec()
    }
}

/// A random name of this process.
pub(crate) fn process() -> Result<[u8; 16], Failure> {
    static PROCESS: OnceLock<std::io::Result<[u8; 16]>> = OnceLock::new();
    let random = || {
        let mut bytes = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    match PROCESS.get_or_init(random) {
        Ok(bytes) => Ok(*bytes),
        Err(error) => Err(Failure::Transport(format!("/dev/urandom: {error}"))),
    }
}
