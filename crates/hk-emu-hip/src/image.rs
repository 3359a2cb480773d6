//! Code objects as programs hand them over: ELF files, and clang's offload bundles of them.

use std::fs::File;
use std::io::Read;

use hk_codeobj::Arch;

use crate::error::{HipError, Result};
use crate::host;
use crate::runtime::say;

/// Largest image that is read.
const MAX_BYTES: u64 = 1 << 30;
const ELF: &[u8] = b"\x7fELF";
const BUNDLE: &[u8] = b"__CLANG_OFFLOAD_BUNDLE__";
const COMPRESSED_BUNDLE: &[u8] = b"CCOB";
/// Entries of a bundle, and bytes of one's name.
const MAX_ENTRIES: u64 = 1024;
const MAX_NAME: u64 = 256;

/// Bytes at a position of an image.
trait Source {
    /// # Errors
    /// `hipErrorInvalidImage` if they are not there.
    fn bytes(&self, at: u64, len: u64) -> Result<Vec<u8>>;

    fn number<const N: usize>(&self, at: u64) -> Result<u64> {
        let bytes = self.bytes(at, N as u64)?;
        Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }
}

impl Source for &[u8] {
    fn bytes(&self, at: u64, len: u64) -> Result<Vec<u8>> {
        let end = at.checked_add(len).ok_or(HipError::INVALID_IMAGE)?;
        let range = usize::try_from(at).ok().zip(usize::try_from(end).ok());
        let part = range.and_then(|(at, end)| self.get(at..end)).ok_or(HipError::INVALID_IMAGE)?;
        Ok(part.to_vec())
    }
}

/// The program's memory from an address on: an image of unknown size.
struct InMemory(u64);

impl Source for InMemory {
    fn bytes(&self, at: u64, len: u64) -> Result<Vec<u8>> {
        let start = self.0.checked_add(at).filter(|_| len <= MAX_BYTES).ok_or(HipError::INVALID_IMAGE)?;
        let mut bytes = vec![0; len as usize];
        host::read(start, &mut bytes).map_err(|_| HipError::INVALID_IMAGE)?;
        Ok(bytes)
    }
}

/// The code object for a target in the file of that name.
///
/// # Errors
/// `hipErrorFileNotFound`, and as [`in_bytes`].
pub(crate) fn in_file(path: &str, arch: Arch) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    let read = File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|error| {
        say!("{path}: {error}");
        HipError::FILE_NOT_FOUND
    })?;
    if bytes.len() as u64 > MAX_BYTES { Err(HipError::INVALID_IMAGE) } else { in_bytes(&bytes, arch) }
}

/// The code object for a target in the bytes of a file.
///
/// # Errors
/// `hipErrorInvalidImage`, `hipErrorNoBinaryForGpu`.
pub(crate) fn in_bytes(file: &[u8], arch: Arch) -> Result<Vec<u8>> {
    // A single code object is the whole file. The loader validates its headers.
    if file.starts_with(ELF) { Ok(file.to_vec()) } else { select(&file, arch) }
}

/// The code object for a target in the program's memory.
///
/// # Errors
/// As [`in_bytes`].
pub(crate) fn in_memory(addr: u64, arch: Arch) -> Result<Vec<u8>> {
    let source = InMemory(addr);
    if source.bytes(0, ELF.len() as u64)? == ELF {
        let size = elf_size(&source)?;
        return source.bytes(0, size);
    }
    select(&source, arch)
}

/// Where the last part of a 64-bit ELF file ends.
fn elf_size(source: &impl Source) -> Result<u64> {
    let (segments, sections) = (source.number::<8>(32)?, source.number::<8>(40)?);
    let (segment_size, segment_count) = (source.number::<2>(54)?, source.number::<2>(56)?);
    let (section_size, section_count) = (source.number::<2>(58)?, source.number::<2>(60)?);
    // No image ends behind this, so that sums of such numbers do not overflow.
    let table = |at: u64, size: u64, count: u64| {
        let end = size.checked_mul(count).and_then(|bytes| at.checked_add(bytes));
        end.filter(|end| *end <= MAX_BYTES).ok_or(HipError::INVALID_IMAGE)
    };
    let mut end = 64;
    if segment_count > 0 {
        end = end.max(table(segments, segment_size, segment_count)?);
    }
    if section_count > 0 {
        end = end.max(table(sections, section_size, section_count)?);
    }
    for i in 0..segment_count {
        let header = table(segments, segment_size, i)?;
        let (offset, size) = (source.number::<8>(header + 8)?, source.number::<8>(header + 32)?);
        end = end.max(table(offset, size, 1)?);
    }
    for i in 0..section_count {
        const NO_BITS: u64 = 8;
        let header = table(sections, section_size, i)?;
        if source.number::<4>(header + 4)? != NO_BITS {
            let (offset, size) = (source.number::<8>(header + 24)?, source.number::<8>(header + 32)?);
            end = end.max(table(offset, size, 1)?);
        }
    }
    Ok(end)
}

/// The entry of an offload bundle for a target: a count, then offset, size and name of each entry.
fn select(source: &impl Source, arch: Arch) -> Result<Vec<u8>> {
    if source.bytes(0, COMPRESSED_BUNDLE.len() as u64)? == COMPRESSED_BUNDLE {
        say!("a compressed offload bundle: compile with --no-offload-compress");
        return Err(HipError::INVALID_IMAGE);
    }
    let magic = BUNDLE.len() as u64;
    if source.bytes(0, magic)? != BUNDLE {
        return Err(HipError::INVALID_IMAGE);
    }
    let count = source.number::<8>(magic)?;
    if count > MAX_ENTRIES {
        return Err(HipError::INVALID_IMAGE);
    }
    let mut at = magic + 8;
    let mut names = vec![];
    for _ in 0..count {
        let [offset, size, name_bytes] =
            [source.number::<8>(at)?, source.number::<8>(at + 8)?, source.number::<8>(at + 16)?];
        if name_bytes > MAX_NAME {
            return Err(HipError::INVALID_IMAGE);
        }
        let name = String::from_utf8_lossy(&source.bytes(at + 24, name_bytes)?).into_owned();
        if size > 0 && runs_on(&name, arch) {
            return source.bytes(offset, size);
        }
        names.push(name);
        at += 24 + name_bytes;
    }
    say!("no code object for {arch} among {names:?}");
    Err(HipError::NO_BINARY_FOR_GPU)
}

/// Whether an entry such as `hipv4-amdgcn-amd-amdhsa--gfx942:sramecc+` is for a target. The devices have ECC and
/// no XNACK.
fn runs_on(name: &str, arch: Arch) -> bool {
    let target = name.rfind("gfx").map_or("", |at| &name[at..]);
    let mut parts = target.split(':');
    let processor = parts.next() == Some(arch.name());
    let kind = name.split('-').next().unwrap_or_default();
    matches!(kind, "hip" | "hipv4") && processor && parts.all(|f| f != "xnack+" && f != "sramecc-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundle(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let header: usize = 32 + entries.iter().map(|(name, _)| 24 + name.len()).sum::<usize>();
        let mut bytes = BUNDLE.to_vec();
        bytes.extend((entries.len() as u64).to_le_bytes());
        let mut offset = header;
        for (name, data) in entries {
            for n in [offset, data.len(), name.len()] {
                bytes.extend((n as u64).to_le_bytes());
            }
            bytes.extend(name.as_bytes());
            offset += data.len();
        }
        entries.iter().for_each(|(_, data)| bytes.extend(*data));
        bytes
    }

    #[test]
    fn the_entry_of_the_target_is_found() {
        let bytes = bundle(&[
            ("host-x86_64-unknown-linux-gnu-", b""),
            ("hipv4-amdgcn-amd-amdhsa--gfx950", b"four"),
            ("hipv4-amdgcn-amd-amdhsa--gfx942:sramecc+:xnack+", b"xnack"),
            ("hip-amdgcn-amd-amdhsa-unknown-gfx942:sramecc+:xnack-", b"three"),
        ]);
        assert_eq!(in_bytes(&bytes, Arch::Gfx942).unwrap(), b"three");
        assert_eq!(in_memory(bytes.as_ptr() as u64, Arch::Gfx950).unwrap(), b"four");
        let other = bundle(&[("hipv4-amdgcn-amd-amdhsa--gfx90a", b"x")]);
        assert_eq!(in_bytes(&other, Arch::Gfx942), Err(HipError::NO_BINARY_FOR_GPU));
    }

    #[test]
    fn features_decide() {
        let on =
            |features: &str| runs_on(&format!("hipv4-amdgcn-amd-amdhsa--gfx942{features}"), Arch::Gfx942);
        assert!(on("") && on(":sramecc+") && on(":xnack-") && on(":sramecc+:xnack-"));
        assert!(!on(":xnack+") && !on(":sramecc-") && !on(":sramecc-:xnack-") && !on(":sramecc+:xnack+"));
        assert!(!runs_on("host-x86_64-unknown-linux--", Arch::Gfx942));
    }

    #[test]
    fn broken_images_are_errors() {
        let bytes = bundle(&[("hipv4-amdgcn-amd-amdhsa--gfx942", b"three")]);
        for len in 0..bytes.len() {
            assert!(in_bytes(&bytes[..len], Arch::Gfx942).is_err(), "{len}");
        }
        for at in BUNDLE.len()..bytes.len() - 5 {
            let mut broken = bytes.clone();
            broken[at] ^= 0x80;
            // Any bytes give a result, not a panic.
            let _ = in_bytes(&broken, Arch::Gfx942);
            let _ = in_memory(broken.as_ptr() as u64, Arch::Gfx942);
        }
        assert_eq!(in_memory(0, Arch::Gfx942), Err(HipError::INVALID_IMAGE));
        let mut elf = [0; 4096];
        elf[..4].copy_from_slice(ELF);
        elf[54..62].copy_from_slice(&[56, 0, 2, 0, 64, 0, 2, 0]); // two segments, two sections
        assert_eq!(in_memory(elf.as_ptr() as u64, Arch::Gfx942).map(|image| image.len()), Ok(128));
        for at in 32..256 {
            let mut broken = elf;
            broken[at..at + 8].fill(0xff);
            let _ = in_memory(broken.as_ptr() as u64, Arch::Gfx942);
        }
        assert_eq!(in_bytes(b"CCOB    ", Arch::Gfx942), Err(HipError::INVALID_IMAGE));
    }
}
