//! Bytes of a rank for others: in memory of the process, or, for other processes, in a file in memory.

use std::fs::File;
use std::io;
use std::sync::{Arc, OnceLock};

/// Bytes of a rank for others. Clones are the same bytes.
#[derive(Debug, Clone)]
pub(crate) struct Blob(Arc<Payload>);

/// One of the two is there from the start.
#[derive(Debug)]
struct Payload {
    bytes: OnceLock<Arc<[u8]>>,
    file: OnceLock<File>,
    len: usize,
}

/// Where another process finds a blob: its descriptor of the file, and which file that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub process: u64,
    pub descriptor: u64,
    pub device: u64,
    pub inode: u64,
    pub len: u64,
}

impl From<Vec<u8>> for Blob {
    fn from(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self(Arc::new(Payload { bytes: OnceLock::from(Arc::from(bytes)), file: OnceLock::new(), len }))
    }
}

impl From<&[u8]> for Blob {
    fn from(bytes: &[u8]) -> Self {
        bytes.to_vec().into()
    }
}

impl<const N: usize> From<[u8; N]> for Blob {
    fn from(bytes: [u8; N]) -> Self {
        bytes.to_vec().into()
    }
}

impl PartialEq for Blob {
    fn eq(&self, other: &Self) -> bool {
        matches!((self.bytes(), other.bytes()), (Ok(own), Ok(theirs)) if own == theirs)
    }
}

impl Eq for Blob {}

impl Blob {
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// The bytes, which are read once.
    pub fn bytes(&self) -> io::Result<Arc<[u8]>> {
        if let Some(bytes) = self.0.bytes.get() {
            return Ok(Arc::clone(bytes));
        }
        let mut bytes = vec![0; self.0.len];
        if let Some(file) = self.0.file.get() {
            memory::read(file, &mut bytes)?;
        }
        Ok(Arc::clone(self.0.bytes.get_or_init(|| bytes.into())))
    }

    /// Where another process finds them as long as this one keeps the blob.
    pub fn place(&self) -> io::Result<Place> {
        let file = match self.0.file.get() {
            Some(file) => file,
            None => {
                let file = memory::file(&self.bytes()?)?;
                self.0.file.get_or_init(|| file)
            }
        };
        memory::place(file, self.0.len as u64)
    }

    /// What another process has.
    pub fn open(place: &Place) -> io::Result<Self> {
        let file = memory::open(place)?;
        let len = usize::try_from(place.len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Self(Arc::new(Payload { bytes: OnceLock::new(), file: file.into(), len })))
    }
}

#[cfg(target_os = "linux")]
mod memory {
    use super::Place;
    use std::fs::File;
    use std::io;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::os::unix::fs::{FileExt, MetadataExt};

    pub fn file(bytes: &[u8]) -> io::Result<File> {
        // SAFETY: a C string.
        let descriptor = unsafe { libc::memfd_create(c"hk-emu-comm".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: new, and nobody else's.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.write_all_at(bytes, 0)?;
        Ok(file)
    }

    pub fn read(file: &File, bytes: &mut [u8]) -> io::Result<()> {
        file.read_exact_at(bytes, 0)
    }

    pub fn place(file: &File, len: u64) -> io::Result<Place> {
        let metadata = file.metadata()?;
        Ok(Place {
            process: std::process::id().into(),
            descriptor: file.as_raw_fd().unsigned_abs().into(),
            device: metadata.dev(),
            inode: metadata.ino(),
            len,
        })
    }

    pub fn open(place: &Place) -> io::Result<File> {
        let &Place { process, descriptor, device, inode, len } = place;
        let file = File::open(format!("/proc/{process}/fd/{descriptor}"))?;
        let metadata = file.metadata()?;
        if (metadata.dev(), metadata.ino(), metadata.len()) != (device, inode, len) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "another file is there"));
        }
        Ok(file)
    }
}

#[cfg(not(target_os = "linux"))]
mod memory {
    use super::Place;
    use std::fs::File;
    use std::io;

    pub fn file(_: &[u8]) -> io::Result<File> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn read(_: &File, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn place(_: &File, _: u64) -> io::Result<Place> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn open(_: &Place) -> io::Result<File> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_bytes() {
        let blob = Blob::from(vec![7u8; 10_000]);
        let place = blob.place().unwrap();
        let other = Blob::open(&place).unwrap();
        assert_eq!((other.len(), other.place().unwrap().inode), (10_000, place.inode));
        assert_eq!(other, blob);
        assert!(Blob::open(&Place { len: 9_999, ..place }).is_err());
        assert!(Blob::open(&Place { inode: place.inode + 1, ..place }).is_err());
        drop((blob, other));
        assert!(Blob::open(&place).is_err());
    }
}
