//! The storage of allocations: the allocator's; pages of one pattern, which the host copies when they are written, so that memory that a
//! program allocates and does not use costs nothing; a mapping that other processes can open; or host memory.

use std::alloc::Layout;
use std::any::Any;
use std::io;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use crate::shared::{Mapping, Origin};

/// The pattern of fresh memory: a NaN as f32, and as each packed bf16 or f16; negative as an integer.
pub const POISON: u32 = 0xFFFA_FFFA;

/// Words that live until it is dropped, by the host's pointer. Derefs to them.
pub(crate) struct Words {
    words: NonNull<[AtomicU32]>,
    owner: Owner,
}

enum Owner {
    Box,
    Pages,
    Shared(Mapping),
    Host(#[expect(dead_code, reason = "keeps the memory")] Arc<dyn Any + Send + Sync>),
}

// SAFETY: atomics, and what owns them, may be used and released on any thread.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Deref for Words {
    type Target = [AtomicU32];

    #[inline(always)]
    fn deref(&self) -> &[AtomicU32] {
        // SAFETY: the owner keeps them as long as `self` lives, and they are initialized.
        unsafe { self.words.as_ref() }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        match self.owner {
            // SAFETY: from a box that was leaked, and nothing refers to it any more.
            Owner::Box => drop(unsafe { Box::from_raw(self.words.as_ptr()) }),
            Owner::Pages => pages::unmap(self.words.cast(), self.words.len()),
            Owner::Shared(_) | Owner::Host(_) => (),
        }
    }
}

impl From<Box<[AtomicU32]>> for Words {
    fn from(words: Box<[AtomicU32]>) -> Words {
        Words { words: NonNull::from(Box::leak(words)), owner: Owner::Box }
    }
}

impl Words {
    /// `count` times [`POISON`]; `None` if the host has no room for them.
    pub fn poison(count: u64) -> Option<Words> {
        let count = usize::try_from(count).ok()?;
        if count >= pages::LARGE
            && let Some(start) = pages::map(count)
        {
            return Some(Words { words: NonNull::slice_from_raw_parts(start, count), owner: Owner::Pages });
        }
        let mut words = Vec::new();
        words.try_reserve_exact(count).ok()?;
        words.resize_with(count, || AtomicU32::new(POISON));
        Some(words.into_boxed_slice().into())
    }

    /// Words that the host's allocator knows to be zero.
    pub fn zeros(count: u64) -> Option<Words> {
        let count = usize::try_from(count).ok()?;
        if count == 0 {
            return Some(Box::<[AtomicU32]>::default().into());
        }
        let layout = Layout::array::<AtomicU32>(count).ok()?;
        // SAFETY: the layout has a size; the memory is that of a boxed slice of `count` words, and zero is a value of each.
        let words = unsafe {
            let words = std::alloc::alloc_zeroed(layout).cast::<AtomicU32>();
            (!words.is_null()).then(|| Box::from_raw(std::ptr::slice_from_raw_parts_mut(words, count)))
        };
        words.map(Words::from)
    }

    /// Host memory that others access as well.
    ///
    /// # Safety
    /// From `start` on there are `count` words, aligned, for reads and writes as long as `owner` lives. Of this process, only what is
    /// not Rust accesses them other than by atomics.
    pub unsafe fn host(start: NonNull<AtomicU32>, count: usize, owner: Arc<dyn Any + Send + Sync>) -> Words {
        Words { words: NonNull::slice_from_raw_parts(start, count), owner: Owner::Host(owner) }
    }

    /// Zeros in a mapping that other processes can open.
    pub fn shared(bytes: u64) -> io::Result<Words> {
        Ok(Words::of(Mapping::new(bytes)?))
    }

    /// Those of another process.
    pub fn open(origin: &Origin) -> io::Result<Words> {
        Ok(Words::of(Mapping::open(origin)?))
    }

    fn of(mapping: Mapping) -> Words {
        let words = NonNull::slice_from_raw_parts(mapping.start(), mapping.words());
        Words { words, owner: Owner::Shared(mapping) }
    }

    fn mapping(&self) -> Option<&Mapping> {
        match &self.owner {
            Owner::Shared(mapping) => Some(mapping),
            Owner::Box | Owner::Pages | Owner::Host(_) => None,
        }
    }

    /// The words `i` and `i + 1` as one number, if they lie so that the host can change them as one.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    pub fn pair(&self, i: usize) -> Option<Pair<'_>> {
        let words = self.get(i..)?.first_chunk()?;
        words.as_ptr().addr().is_multiple_of(8).then_some(Pair(words))
    }

    /// Whether they may lie elsewhere: nobody but the device knows where they are.
    pub fn can_move(&self) -> bool {
        !matches!(self.owner, Owner::Host(_)) && self.owner().is_none()
    }

    /// What other processes open the words by; `None` unless this process has made them for that.
    pub fn origin(&self) -> Option<Origin> {
        self.mapping().and_then(Mapping::origin)
    }

    /// The process whose memory it is, if that is another one.
    pub fn owner(&self) -> Option<u32> {
        self.mapping().and_then(Mapping::owner)
    }

    /// Keeps other processes from what `act` does, where there are others.
    pub fn exclusive<T>(&self, act: impl FnOnce() -> T) -> T {
        match self.mapping() {
            Some(mapping) => mapping.exclusive(act),
            None => act(),
        }
    }
}

/// Two words on a multiple of 8 bytes: [`Words::pair`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) struct Pair<'a>(&'a [AtomicU32; 2]);

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Pair<'_> {
    /// Replaces `old`, the first word in the low half; the value that was there, as an error if it was another one.
    pub fn compare_exchange(&self, old: u64, new: u64) -> Result<u64, u64> {
        let seen: u64;
        // Rust's atomics do not mix sizes; the host's instructions do.
        // SAFETY: reads and writes the 8 bytes of the words, which are atomics.
        unsafe {
            std::arch::asm!(
                "lock cmpxchg qword ptr [{}], {}", in(reg) self.0, in(reg) new, inout("rax") old => seen, options(nostack)
            );
        }
        if seen == old { Ok(seen) } else { Err(seen) }
    }
}

/// Private pages of a file in memory that holds the pattern.
#[cfg(target_os = "linux")]
mod pages {
    use std::ptr::{NonNull, null_mut};
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicU32;

    use super::POISON;
    use crate::file::MemoryFile;

    /// Words of the file. Each of an allocation's mappings is of all of it, and the system allows some 65,000.
    const BLOCK: usize = 8 << 20;
    /// Words of an allocation from which on it is made of pages.
    pub const LARGE: usize = 2 * BLOCK;

    fn pattern() -> Option<&'static MemoryFile> {
        static PATTERN: OnceLock<Option<MemoryFile>> = OnceLock::new();
        let make = || {
            let file = MemoryFile::new(4 * BLOCK as u64).ok()?;
            let part = POISON.to_le_bytes().repeat(1 << 18);
            (0..4 * BLOCK).step_by(part.len()).try_for_each(|at| file.write(&part, at as u64)).ok()?;
            Some(file)
        };
        PATTERN.get_or_init(make).as_ref()
    }

    pub fn map(count: usize) -> Option<NonNull<AtomicU32>> {
        let file = pattern()?.descriptor();
        let bytes = count.checked_mul(4)?;
        let private = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        // SAFETY: new address space, wherever the system has some.
        let start =
            unsafe { libc::mmap(null_mut(), bytes, libc::PROT_NONE, private | libc::MAP_ANONYMOUS, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let words = NonNull::new(start.cast::<AtomicU32>())?;
        for at in (0..count).step_by(BLOCK) {
            let bytes = 4 * BLOCK.min(count - at);
            // SAFETY: inside of that address space, which nothing else uses. Nothing writes to the file any more.
            let block = unsafe {
                let block = words.as_ptr().add(at).cast();
                libc::mmap(
                    block,
                    bytes,
                    libc::PROT_READ | libc::PROT_WRITE,
                    private | libc::MAP_FIXED,
                    file,
                    0,
                )
            };
            if block == libc::MAP_FAILED {
                unmap(words, count);
                return None;
            }
        }
        Some(words)
    }

    pub fn unmap(start: NonNull<AtomicU32>, count: usize) {
        // SAFETY: it is what `map` has made, and used no more.
        unsafe { libc::munmap(start.as_ptr().cast(), 4 * count) };
    }
}

#[cfg(not(target_os = "linux"))]
mod pages {
    use std::ptr::NonNull;
    use std::sync::atomic::AtomicU32;

    pub const LARGE: usize = usize::MAX;

    pub fn map(_count: usize) -> Option<NonNull<AtomicU32>> {
        None
    }

    pub fn unmap(_start: NonNull<AtomicU32>, _count: usize) {}
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn words_have_their_pattern_however_many() {
        for count in [0, 1, 1000, pages::LARGE as u64 - 1, pages::LARGE as u64, pages::LARGE as u64 + 3] {
            let words = Words::poison(count).unwrap();
            assert_eq!(words.len() as u64, count);
            let step = (count as usize / 1000).max(1);
            assert!(words.iter().step_by(step).all(|word| word.load(Relaxed) == POISON));
            if let (Some(first), Some(last)) = (words.first(), words.last()) {
                first.store(1, Relaxed);
                last.store(2, Relaxed);
                assert_eq!((first.load(Relaxed), last.load(Relaxed)), (if count == 1 { 2 } else { 1 }, 2));
            }
            // A write is of one allocation.
            assert!(Words::poison(count).unwrap().iter().step_by(step).all(|w| w.load(Relaxed) == POISON));
        }
        assert!(Words::zeros(1000).unwrap().iter().all(|word| word.load(Relaxed) == 0));
    }

    /// More than any host has: only what is touched is backed.
    #[test]
    #[cfg(target_os = "linux")]
    fn untouched_words_cost_nothing() {
        let words = Words::poison(1 << 36).unwrap();
        for at in [0, 1 << 20, 1 << 35, (1 << 36) - 1] {
            assert_eq!(words[at].swap(7, Relaxed), POISON);
            assert_eq!(words[at].load(Relaxed), 7);
        }
    }
}
