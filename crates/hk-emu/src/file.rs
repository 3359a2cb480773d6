//! Files in memory, which other processes of the host can open.

use std::fs::File;
use std::io;

/// A file in memory. It is there as long as a process has it open.
#[derive(Debug)]
pub struct MemoryFile(File);

/// Where other processes find a [`MemoryFile`] of this one, as long as it keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilePlace {
    /// The process, and its descriptor.
    pub(crate) process: u32,
    descriptor: u32,
    /// Which file that is: processes and descriptors are used again.
    device: u64,
    inode: u64,
    pub(crate) len: u64,
}

impl FilePlace {
    /// As numbers, for [`from_numbers`](Self::from_numbers) in the other process.
    pub fn numbers(&self) -> [u64; 5] {
        [self.process.into(), self.descriptor.into(), self.device, self.inode, self.len]
    }

    /// `None` for numbers of no place.
    pub fn from_numbers([process, descriptor, device, inode, len]: [u64; 5]) -> Option<Self> {
        let narrow = |number| u32::try_from(number).ok();
        Some(Self { process: narrow(process)?, descriptor: narrow(descriptor)?, device, inode, len })
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.len
    }
}

#[cfg(target_os = "linux")]
impl MemoryFile {
    /// So many zeros.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(len: u64) -> io::Result<Self> {
        use std::os::fd::FromRawFd;
        // SAFETY: a C string.
        let descriptor = unsafe { libc::memfd_create(c"hk-emu".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: new, and nobody else's.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(len)?;
        Ok(Self(file))
    }

    /// One of another process, or of this one.
    ///
    /// # Errors
    /// It is not there any more, or the system does not let this process open it.
    pub fn open(place: &FilePlace) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", place.process, place.descriptor);
        let own = Self(File::options().read(true).write(true).open(path)?);
        let found = own.place()?;
        if (found.device, found.inode, found.len) != (place.device, place.inode, place.len) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "it has been freed"));
        }
        Ok(own)
    }

    /// Where it is.
    ///
    /// # Errors
    /// Those of the system.
    pub fn place(&self) -> io::Result<FilePlace> {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::MetadataExt;
        let metadata = self.0.metadata()?;
        Ok(FilePlace {
            process: std::process::id(),
            descriptor: self.0.as_raw_fd().unsigned_abs(),
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
        })
    }

    /// Its first bytes.
    ///
    /// # Errors
    /// Those of the system; it has fewer.
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, bytes, 0)
    }

    /// Writes bytes from `offset` on.
    ///
    /// # Errors
    /// Those of the system.
    pub fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(&self.0, bytes, offset)
    }

    /// Does something while no other opening of the file, in any process, does.
    ///
    /// # Errors
    /// Those of the system.
    pub fn exclusive<T>(&self, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.0.lock()?;
        let result = act();
        self.0.unlock()?;
        result
    }

    pub(crate) fn descriptor(&self) -> std::os::fd::RawFd {
        std::os::fd::AsRawFd::as_raw_fd(&self.0)
    }
}

#[cfg(not(target_os = "linux"))]
#[allow(missing_docs, clippy::missing_errors_doc)]
impl MemoryFile {
    fn unsupported<T>() -> io::Result<T> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "memory of several processes is for Linux"))
    }

    pub fn new(_: u64) -> io::Result<Self> {
        Self::unsupported()
    }

    pub fn open(_: &FilePlace) -> io::Result<Self> {
        Self::unsupported()
    }

    pub fn place(&self) -> io::Result<FilePlace> {
        Self::unsupported()
    }

    pub fn read(&self, _: &mut [u8]) -> io::Result<()> {
        Self::unsupported()
    }

    pub fn write(&self, _: &[u8], _: u64) -> io::Result<()> {
        Self::unsupported()
    }

    pub fn exclusive<T>(&self, _: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        Self::unsupported()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn places_are_of_one_file() {
        let file = MemoryFile::new(10_000).expect("memory");
        file.write(&[7; 3], 9_997).expect("writes");
        let place = file.place().expect("is open");
        assert_eq!(FilePlace::from_numbers(place.numbers()), Some(place));
        let mut bytes = [0; 10_000];
        let other = MemoryFile::open(&place).expect("is there");
        other.read(&mut bytes).expect("as many");
        assert_eq!((bytes[9_996], bytes[9_997]), (0, 7));
        assert!(MemoryFile::open(&FilePlace { len: 9_999, ..place }).is_err());
        assert!(MemoryFile::open(&FilePlace { inode: place.inode + 1, ..place }).is_err());
        drop((file, other));
        assert!(MemoryFile::open(&place).is_err());
    }
}
