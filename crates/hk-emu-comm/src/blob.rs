//! Bytes of a rank for others: in memory of the process, or, for other processes, in a file in memory.

use hk_emu::{FilePlace, MemoryFile};
use std::io;
use std::sync::{Arc, OnceLock};

/// Bytes of a rank for others. Clones are the same bytes.
#[derive(Debug, Clone)]
pub(crate) struct Blob(Arc<Payload>);

/// One of the two is there from the start.
#[derive(Debug)]
struct Payload {
    bytes: OnceLock<Arc<[u8]>>,
    file: OnceLock<MemoryFile>,
    len: usize,
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
            file.read(&mut bytes)?;
        }
        Ok(Arc::clone(self.0.bytes.get_or_init(|| bytes.into())))
    }

    /// Where another process finds them as long as this one keeps the blob.
    pub fn place(&self) -> io::Result<FilePlace> {
        if let Some(file) = self.0.file.get() {
            return file.place();
        }
        let file = MemoryFile::new(self.0.len as u64)?;
        file.write(&self.bytes()?, 0)?;
        self.0.file.get_or_init(|| file).place()
    }

    /// What another process has.
    pub fn open(place: &FilePlace) -> io::Result<Self> {
        let file = MemoryFile::open(place)?;
        let len = usize::try_from(place.bytes()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Self(Arc::new(Payload { bytes: OnceLock::new(), file: file.into(), len })))
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
        let inode = |place: &FilePlace| place.numbers()[3];
        assert_eq!((other.len(), inode(&other.place().unwrap())), (10_000, inode(&place)));
        assert_eq!(other, blob);
        for (at, wrong) in [(4, 9_999), (3, inode(&place) + 1)] {
            let mut numbers = place.numbers();
            numbers[at] = wrong;
            assert!(Blob::open(&FilePlace::from_numbers(numbers).unwrap()).is_err());
        }
        drop((blob, other));
        assert!(Blob::open(&place).is_err());
    }
}
