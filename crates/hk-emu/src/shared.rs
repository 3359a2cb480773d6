//! Memory of several processes: its names, and its mappings.

use crate::file::FilePlace;

/// Names an allocation of [`Machine::alloc_shared`](crate::Machine::alloc_shared) or [`Machine::share`](crate::Machine::share) for other
/// processes of the same host, as bytes. As long as `hipIpcMemHandle_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryHandle([u8; Self::BYTES]);

impl MemoryHandle {
    /// Its size.
    pub const BYTES: usize = 64;

    /// From what [`to_bytes`](Self::to_bytes) gave.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The process whose memory it is; `None` for bytes that are no handle.
    pub fn process(&self) -> Option<u32> {
        Origin::new(*self).map(|origin| origin.process())
    }

    /// Its bytes. The last eight are the user's: zero, and ignored.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }
}

/// What a handle says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    place: FilePlace,
    /// Bytes of the allocation.
    pub bytes: u64,
}

const MAGIC: [u8; 8] = *b"hk-emu-2";

impl Origin {
    /// The process that has the memory.
    pub fn process(&self) -> u32 {
        self.place.process
    }

    pub fn handle(self) -> MemoryHandle {
        let mut bytes = [0; MemoryHandle::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        let numbers = self.place.numbers().into_iter().chain([self.bytes]);
        for (to, number) in bytes[8..].chunks_exact_mut(8).zip(numbers) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        MemoryHandle(bytes)
    }

    /// `None` for bytes that no handle has.
    pub fn new(handle: MemoryHandle) -> Option<Origin> {
        let (numbers, _) = handle.0[8..].as_chunks::<8>();
        let mut numbers = numbers.iter().map(|bytes| u64::from_le_bytes(*bytes));
        let place = [(); 5].map(|()| numbers.next().unwrap_or_default());
        let own = Origin { place: FilePlace::from_numbers(place)?, bytes: numbers.next()? };
        (handle.0[..8] == MAGIC).then_some(own)
    }
}

pub(crate) use mapping::{Mapping, is_alive};

#[cfg(target_os = "linux")]
mod mapping {
    use super::Origin;
    use crate::file::MemoryFile;
    use std::io;
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    /// A file in memory and a mapping of it: the words of the allocation, then a word that is the lock of [`exclusive`](Self::exclusive).
    pub struct Mapping {
        file: MemoryFile,
        start: NonNull<AtomicU32>,
        bytes: u64,
        /// The process that made it, unless it is this one.
        owner: Option<u32>,
    }

    /// Where the lock is.
    fn lock_at(bytes: u64) -> Option<u64> {
        bytes.checked_next_multiple_of(64)
    }

    fn file_bytes(bytes: u64) -> io::Result<usize> {
        let bytes = lock_at(bytes).and_then(|at| at.checked_add(64)).and_then(|n| isize::try_from(n).ok());
        bytes.map(isize::unsigned_abs).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    impl Mapping {
        pub fn new(bytes: u64) -> io::Result<Mapping> {
            Mapping::map(MemoryFile::new(file_bytes(bytes)? as u64)?, bytes, None)
        }

        pub fn open(origin: &Origin) -> io::Result<Mapping> {
            if origin.place.len != file_bytes(origin.bytes)? as u64 {
                return Err(io::Error::new(io::ErrorKind::NotFound, "it has been freed"));
            }
            Mapping::map(MemoryFile::open(&origin.place)?, origin.bytes, Some(origin.process()))
        }

        fn map(file: MemoryFile, bytes: u64, owner: Option<u32>) -> io::Result<Mapping> {
            let len = file_bytes(bytes)?;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping, which overlaps with nothing of this process. The file has these bytes and keeps them.
            let start = unsafe {
                libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.descriptor(), 0)
            };
            if start == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
            Ok(Mapping { file, start, bytes, owner })
        }

        pub fn start(&self) -> NonNull<AtomicU32> {
            self.start
        }

        pub fn words(&self) -> usize {
            self.bytes.div_ceil(4) as usize
        }

        pub fn owner(&self) -> Option<u32> {
            self.owner
        }

        pub fn origin(&self) -> Option<Origin> {
            let place = self.file.place().ok().filter(|_| self.owner.is_none())?;
            Some(Origin { place, bytes: self.bytes })
        }

        pub fn exclusive<T>(&self, act: impl FnOnce() -> T) -> T {
            let at = lock_at(self.bytes).unwrap_or_default() as usize;
            // SAFETY: the word behind those of the allocation, see `file_bytes`.
            let lock = unsafe { self.start.byte_add(at).as_ref() };
            let own = std::process::id();
            for turn in 1u32.. {
                match lock.compare_exchange(0, own, SeqCst, SeqCst) {
                    Ok(_) => break,
                    // A process that ended with the lock does not need it any more.
                    Err(holder) if turn % 1024 == 0 && !is_alive(holder) => {
                        if lock.compare_exchange(holder, own, SeqCst, SeqCst).is_ok() {
                            break;
                        }
                    }
                    Err(_) => std::thread::yield_now(),
                }
            }
            let result = act();
            lock.store(0, SeqCst);
            result
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            let len = file_bytes(self.bytes).unwrap_or_default();
            // SAFETY: mapped by `map` with this length, and nothing refers to it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), len) };
        }
    }

    /// Whether a process runs. One that has ended and is not waited for has no program any more.
    pub fn is_alive(process: u32) -> bool {
        std::fs::read_link(format!("/proc/{process}/exe")).is_ok()
    }
}

#[cfg(not(target_os = "linux"))]
mod mapping {
    use super::Origin;
    use std::io;
    use std::ptr::NonNull;
    use std::sync::atomic::AtomicU32;

    /// There is none.
    pub enum Mapping {}

    fn unsupported() -> io::Error {
        io::Error::new(io::ErrorKind::Unsupported, "device memory of several processes is for Linux")
    }

    impl Mapping {
        pub fn new(_: u64) -> io::Result<Mapping> {
            Err(unsupported())
        }

        pub fn open(_: &Origin) -> io::Result<Mapping> {
            Err(unsupported())
        }

        pub fn start(&self) -> NonNull<AtomicU32> {
            match *self {}
        }

        pub fn words(&self) -> usize {
            match *self {}
        }

        pub fn owner(&self) -> Option<u32> {
            match *self {}
        }

        pub fn origin(&self) -> Option<Origin> {
            match *self {}
        }

        pub fn exclusive<T>(&self, _: impl FnOnce() -> T) -> T {
            match *self {}
        }
    }

    pub fn is_alive(_: u32) -> bool {
        false
    }
}
