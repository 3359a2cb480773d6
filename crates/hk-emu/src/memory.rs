//! Device memory: an exact allocation table in a 64-bit virtual address space.
//!
//! Every allocation has its own storage of relaxed atomics, so a kernel (or a host thread) that races on it gets
//! some interleaving of its values and never undefined behaviour of the host. Addresses are handed out once:
//! what is freed leaves a tombstone, so that a late access is named. Unmapped space around each allocation is the
//! redzone.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::shared::{MemoryHandle, Origin};
use crate::words::Words;

/// Where allocations lie unless the machine's options say otherwise.
pub(crate) const ADDRESSES: Range<u64> = 0x1000_0000_0000..0x7FFF_0000_0000;
const MIN_REDZONE: u64 = 1 << 20;
const MAX_REDZONE: u64 = 1 << 30;
const MIN_ALIGN: u64 = 256;
const MAX_TOMBSTONES: usize = 1 << 16;

/// What a memory access wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// A read-modify-write.
    Atomic,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Read => "read",
            Access::Write => "write",
            Access::Atomic => "atomic",
        })
    }
}

/// Which memory an access went to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// Device memory.
    Global,
    /// The workgroup's LDS; the address is a byte offset.
    Lds,
    /// A lane's private memory; the address is a byte offset.
    Private,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Global => "global memory",
            Space::Lds => "LDS",
            Space::Private => "private memory",
        })
    }
}

/// Two unordered launches or copies on different streams that access the same bytes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct StreamRace {
    /// The work that was found to race: `launch of scale on stream 2`.
    pub work: String,
    /// Whether it writes or reads.
    pub access: Access,
    /// The work that came first here.
    pub other: String,
    /// Whether that writes or reads.
    pub other_access: Access,
    /// The first byte.
    pub address: u64,
    /// Bytes in a row from there.
    pub bytes: u64,
    /// The allocation.
    pub near: Near,
}

impl fmt::Display for StreamRace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StreamRace { work, access, other, other_access, address, bytes, near } = self;
        write!(
            f,
            "streams: the {work} {} {bytes} bytes at {address:#x} that the {other} {}, and nothing orders the two: no \
             event that one records and the other waits for, no synchronisation by the host between them; {near}",
            verb(*access),
            verb(*other_access)
        )
    }
}

fn verb(access: Access) -> &'static str {
    if access == Access::Read { "reads" } else { "writes" }
}

/// Why a memory call of the host failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The bytes are not inside one live allocation.
    #[error("{action} of {bytes} bytes at {addr:#x} is outside every allocation; {near}")]
    Unmapped {
        /// `read`, `write`, `copy`, `fill` or `exchange`.
        action: &'static str,
        /// First byte of the access.
        addr: u64,
        /// Length of the access in bytes.
        bytes: u64,
        /// What lies closest.
        near: Near,
    },
    /// `free` of an address that no live allocation starts at.
    #[error("free of {addr:#x}, which is not the start of a live allocation; {near}")]
    NotAnAllocation {
        /// The address.
        addr: u64,
        /// What lies closest.
        near: Near,
    },
    /// Something lies there already, or no address is so large.
    #[error("no room for {bytes} bytes at {addr:#x}; {near}")]
    Occupied {
        /// First byte.
        addr: u64,
        /// Length in bytes.
        bytes: u64,
        /// What lies closest.
        near: Near,
    },
    /// `export` of an address that no live allocation for several processes starts at.
    #[error(
        "export of {addr:#x}, which is not the start of a live shared allocation of this process; {near}"
    )]
    NotShared {
        /// The address.
        addr: u64,
        /// What lies closest.
        near: Near,
    },
    /// Memory of another process cannot be opened.
    #[error("import: {0}")]
    Import(String),
    /// The alignment is zero or not a power of two.
    #[error("alignment {align} is not a power of two")]
    Alignment {
        /// The alignment asked for, in bytes.
        align: u64,
    },
    /// An exchange by the host at an address that is no multiple of 8.
    #[error("exchange of 8 bytes at {addr:#x}, which is not a multiple of 8")]
    Misaligned {
        /// The address.
        addr: u64,
    },
    /// A copy or release on one stream races with other work; only with [`Check::Streams`](crate::Check::Streams).
    #[error("{0}")]
    Race(Box<StreamRace>),
    /// The host or the device address space has no room for the allocation.
    #[error("out of memory: {bytes} bytes for {label:?}")]
    OutOfMemory {
        /// The size asked for, in bytes.
        bytes: u64,
        /// The label of the allocation.
        label: String,
    },
}

/// The allocation closest to an address, for reports.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Near {
    /// Nothing was ever allocated.
    Nothing,
    /// An allocation, and where the address lies relative to it.
    Allocation {
        /// The label given when it was allocated.
        label: String,
        /// Its first address.
        base: u64,
        /// Its size in bytes.
        size: u64,
        /// The address minus `base`; negative before the allocation, at least `size` behind it.
        offset: i64,
        /// Whether it has been freed.
        freed: bool,
    },
}

impl fmt::Display for Near {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Near::Allocation { label, base, size, offset, freed } = self else {
            return f.write_str("nothing has been allocated");
        };
        let state = if *freed { "freed" } else { "live" };
        let name = format!("{state} allocation {label:?} ({size} bytes at {base:#x})");
        if *offset < 0 {
            write!(f, "{} bytes before {name}", offset.unsigned_abs())
        } else if *offset as u64 >= *size {
            write!(f, "{} bytes past the end of {name}", *offset as u64 - size)
        } else {
            write!(f, "at byte {offset} of {name}")
        }
    }
}

/// One allocation. The size is exact in bytes; the storage is whole words.
pub(crate) struct Allocation {
    pub base: u64,
    pub size: u64,
    pub label: String,
    pub writable: bool,
    words: Words,
    unwritten: Option<Unwritten>,
}

/// One bit for each byte that neither the host nor a kernel has written.
struct Unwritten(Box<[AtomicU64]>);

impl Unwritten {
    fn new(size: u64) -> Option<Unwritten> {
        let count = usize::try_from(size.div_ceil(64)).ok()?;
        let mut words = Vec::new();
        words.try_reserve_exact(count).ok()?;
        words.resize_with(count, || AtomicU64::new(!0));
        Some(Unwritten(words.into_boxed_slice()))
    }

    fn clear(&self, offset: usize, bytes: usize) {
        let end = offset + bytes;
        let mut at = offset;
        while at < end {
            let n = (64 - at % 64).min(end - at);
            let mask = if n == 64 { !0 } else { ((1 << n) - 1) << (at % 64) };
            if let Some(word) = self.0.get(at / 64) {
                word.fetch_and(!mask, Relaxed);
            }
            at += n;
        }
    }

    /// The bits of up to 64 bytes, the byte at `offset` in bit 0.
    fn bits(&self, offset: usize, bytes: usize) -> u64 {
        let word = |i: usize| self.0.get(i).map_or(0, |w| w.load(Relaxed));
        let (i, shift) = (offset / 64, offset % 64);
        let both = word(i) >> shift | if shift == 0 { 0 } else { word(i + 1) << (64 - shift) };
        if bytes >= 64 { both } else { both & ((1 << bytes) - 1) }
    }
}

impl Allocation {
    fn new(base: u64, size: u64, label: &str, writable: bool) -> Option<Allocation> {
        let words = Words::poison(size.div_ceil(4))?;
        Some(Allocation { base, size, label: label.to_owned(), writable, words, unwritten: None })
    }

    /// The process whose memory it is, if that is another one.
    pub fn process(&self) -> Option<u32> {
        self.words.owner()
    }

    /// The offset of `addr` if `bytes` from there lie inside.
    #[inline(always)]
    pub fn offset(&self, addr: u64, bytes: u64) -> Option<usize> {
        let offset = addr.wrapping_sub(self.base);
        (offset <= self.size && bytes <= self.size - offset).then_some(offset as usize)
    }

    /// Notes that `bytes` bytes from `offset` on are written.
    #[inline]
    pub fn mark_written(&self, offset: usize, bytes: usize) {
        if let Some(unwritten) = &self.unwritten {
            unwritten.clear(offset, bytes);
        }
    }

    /// Whether all of `bytes` bytes from `offset` on are written, as far as that is tracked.
    pub fn is_written(&self, offset: usize, bytes: usize) -> bool {
        let Some(unwritten) = &self.unwritten else { return true };
        (0..bytes).step_by(64).all(|i| unwritten.bits(offset + i, (bytes - i).min(64)) == 0)
    }

    /// Which of up to 64 bytes were never written, the byte at `offset` in bit 0. 0 where that is not tracked.
    #[inline]
    pub fn unwritten(&self, offset: usize, bytes: usize) -> u64 {
        self.unwritten.as_ref().map_or(0, |unwritten| unwritten.bits(offset, bytes))
    }

    /// `count` words from a byte offset that is a multiple of 4.
    #[inline(always)]
    pub fn words(&self, offset: usize, count: usize) -> Option<&[AtomicU32]> {
        self.words.get(offset / 4..offset / 4 + count)
    }

    #[inline(always)]
    pub fn load32(&self, offset: usize) -> u32 {
        let (i, shift) = (offset / 4, offset % 4 * 8);
        let low = self.words[i].load(Relaxed);
        if shift == 0 { low } else { low >> shift | self.word_or_zero(i + 1) << (32 - shift) }
    }

    #[inline(always)]
    pub fn load16(&self, offset: usize) -> u32 {
        if offset % 4 == 3 {
            self.load8(offset) | self.load8(offset + 1) << 8
        } else {
            self.words[offset / 4].load(Relaxed) >> (offset % 4 * 8) & 0xFFFF
        }
    }

    #[inline(always)]
    pub fn load8(&self, offset: usize) -> u32 {
        self.words[offset / 4].load(Relaxed) >> (offset % 4 * 8) & 0xFF
    }

    #[inline(always)]
    pub fn store32(&self, offset: usize, value: u32) {
        if offset.is_multiple_of(4) {
            self.words[offset / 4].store(value, Relaxed);
        } else {
            for i in 0..4 {
                self.store8(offset + i, value >> (8 * i));
            }
        }
    }

    #[inline(always)]
    pub fn store16(&self, offset: usize, value: u32) {
        if offset % 4 == 3 {
            self.store8(offset, value);
            self.store8(offset + 1, value >> 8);
        } else {
            self.merge(offset / 4, 0xFFFF << (offset % 4 * 8), value << (offset % 4 * 8));
        }
    }

    #[inline(always)]
    pub fn store8(&self, offset: usize, value: u32) {
        self.merge(offset / 4, 0xFF << (offset % 4 * 8), value << (offset % 4 * 8));
    }

    /// Replaces the bits of `mask`; neighbours in the word may be written by others at the same time.
    #[inline(always)]
    pub fn merge(&self, word: usize, mask: u32, value: u32) {
        if mask == !0 {
            return self.words[word].store(value, Relaxed);
        }
        let _ = self.words[word].fetch_update(Relaxed, Relaxed, |old| Some(old & !mask | value & mask));
    }

    fn word_or_zero(&self, i: usize) -> u32 {
        self.words.get(i).map_or(0, |w| w.load(Relaxed))
    }

    /// An atomic read-modify-write of the word at `offset`, a multiple of 4. Returns the old value.
    #[inline]
    pub fn update32(&self, offset: usize, f: impl Fn(u32) -> u32) -> u32 {
        let word = &self.words[offset / 4];
        let mut old = word.load(Relaxed);
        loop {
            // Behind a ticket lies what the other workgroups wrote before theirs.
            match word.compare_exchange_weak(old, f(old), AcqRel, Acquire) {
                Ok(value) => return value,
                Err(value) => old = value,
            }
        }
    }

    /// A read-modify-write of the 8 bytes at `offset`, a multiple of 4; atomic against every other `update64`. Where the host has an
    /// instruction for that, also against its own numbers of 8 bytes.
    pub fn update64(&self, offset: usize, f: impl Fn(u64) -> u64) -> u64 {
        static WIDE: Mutex<()> = Mutex::new(());
        let (lo, hi) = (&self.words[offset / 4], &self.words[offset / 4 + 1]);
        let both = || u64::from(lo.load(Relaxed)) | u64::from(hi.load(Relaxed)) << 32;
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if let Some(pair) = self.words.pair(offset / 4) {
            let mut old = both();
            loop {
                match pair.compare_exchange(old, f(old)) {
                    Ok(value) => return value,
                    Err(value) => old = value,
                }
            }
        }
        let _guard = WIDE.lock().unwrap_or_else(|e| e.into_inner());
        self.words.exclusive(|| {
            let old = both();
            let new = f(old);
            lo.store(new as u32, Relaxed);
            hi.store((new >> 32) as u32, Relaxed);
            old
        })
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        let (head, body) = out.split_at_mut(out.len().min((4 - offset % 4) % 4));
        for (i, byte) in head.iter_mut().enumerate() {
            *byte = self.load8(offset + i) as u8;
        }
        let start = (offset + head.len()) / 4;
        let (chunks, tail) = body.as_chunks_mut::<4>();
        for (chunk, word) in chunks.iter_mut().zip(&self.words[start..]) {
            *chunk = word.load(Relaxed).to_le_bytes();
        }
        for (i, byte) in tail.iter_mut().enumerate() {
            *byte = self.load8(4 * (start + chunks.len()) + i) as u8;
        }
    }

    fn write(&self, offset: usize, data: &[u8]) {
        self.mark_written(offset, data.len());
        let (head, body) = data.split_at(data.len().min((4 - offset % 4) % 4));
        for (i, byte) in head.iter().enumerate() {
            self.store8(offset + i, u32::from(*byte));
        }
        let (chunks, tail) = body.as_chunks::<4>();
        let start = (offset + head.len()) / 4;
        for (chunk, word) in chunks.iter().zip(&self.words[start..]) {
            word.store(u32::from_le_bytes(*chunk), Relaxed);
        }
        for (i, byte) in tail.iter().enumerate() {
            self.store8(4 * (start + chunks.len()) + i, u32::from(*byte));
        }
    }
}

#[derive(Clone)]
struct Tombstone {
    size: u64,
    label: String,
}

#[derive(Default)]
struct State {
    live: BTreeMap<u64, Arc<Allocation>>,
    dead: BTreeMap<u64, Tombstone>,
    /// Built at the first launch after a change.
    snapshot: Option<Snapshot>,
}

/// The live allocations at one moment, by ascending base.
pub(crate) type Snapshot = Arc<[Arc<Allocation>]>;

/// The allocation table of one device.
pub(crate) struct Memory {
    state: Mutex<State>,
    next: AtomicU64,
    /// The addresses that are handed out.
    addresses: Range<u64>,
    /// Allocations keep track of the bytes that were written.
    track: bool,
}

impl Memory {
    pub fn new(addresses: Range<u64>, track: bool) -> Memory {
        Memory { state: Mutex::default(), next: AtomicU64::new(addresses.start), addresses, track }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes address space that nothing else will ever use.
    fn reserve(&self, bytes: u64, align: u64) -> Option<u64> {
        let redzone = bytes.clamp(MIN_REDZONE, MAX_REDZONE);
        let align = align.max(MIN_ALIGN);
        let mut base = 0;
        self.next
            .fetch_update(Relaxed, Relaxed, |next| {
                base = next.checked_add(redzone)?.checked_next_multiple_of(align)?;
                base.checked_add(bytes).filter(|end| *end < self.addresses.end)
            })
            .ok()
            .map(|_| base)
    }

    /// An allocation that is not in the table: only what holds it can reach it.
    pub fn detached(
        &self,
        bytes: u64,
        align: u64,
        label: &str,
        writable: bool,
    ) -> Result<Arc<Allocation>, MemoryError> {
        if !align.is_power_of_two() {
            return Err(MemoryError::Alignment { align });
        }
        self.reserve(bytes, align)
            .and_then(|base| Allocation::new(base, bytes, label, writable))
            .map(Arc::new)
            .ok_or_else(|| MemoryError::OutOfMemory { bytes, label: label.to_owned() })
    }

    /// Address space for several allocations at fixed distances.
    pub fn reserve_span(&self, bytes: u64, align: u64) -> Result<u64, MemoryError> {
        self.reserve(bytes, align)
            .ok_or_else(|| MemoryError::OutOfMemory { bytes, label: "address space".to_owned() })
    }

    /// An allocation at an address that `reserve_span` gave; not yet in the table.
    pub fn place(
        &self,
        base: u64,
        bytes: u64,
        label: &str,
        writable: bool,
    ) -> Result<Arc<Allocation>, MemoryError> {
        Allocation::new(base, bytes, label, writable)
            .map(Arc::new)
            .ok_or_else(|| MemoryError::OutOfMemory { bytes, label: label.to_owned() })
    }

    pub fn insert(&self, allocation: Arc<Allocation>) {
        let mut state = self.lock();
        state.snapshot = None;
        state.live.insert(allocation.base, allocation);
    }

    /// Zeros, which the host backs page by page as they are accessed.
    pub fn alloc_zeroed(&self, bytes: u64, align: u64, label: &str) -> Result<u64, MemoryError> {
        let none = || MemoryError::OutOfMemory { bytes, label: label.to_owned() };
        if !align.is_power_of_two() {
            return Err(MemoryError::Alignment { align });
        }
        let base = self.reserve(bytes, align).ok_or_else(none)?;
        let words = Words::zeros(bytes.div_ceil(4)).ok_or_else(none)?;
        let (label, writable) = (label.to_owned(), true);
        self.insert(Arc::new(Allocation { base, size: bytes, label, writable, words, unwritten: None }));
        Ok(base)
    }

    /// Zeros that other processes can open.
    pub fn alloc_shared(&self, bytes: u64, align: u64, label: &str) -> Result<u64, MemoryError> {
        if !align.is_power_of_two() {
            return Err(MemoryError::Alignment { align });
        }
        let none = || MemoryError::OutOfMemory { bytes, label: label.to_owned() };
        let words = Words::shared(bytes).map_err(|_| none())?;
        let base = self.reserve(bytes, align).ok_or_else(none)?;
        let (label, writable) = (label.to_owned(), true);
        self.insert(Arc::new(Allocation { base, size: bytes, label, writable, words, unwritten: None }));
        Ok(base)
    }

    /// Moves an allocation to memory that other processes can open.
    pub fn share(&self, addr: u64) -> Result<(), MemoryError> {
        let mut state = self.lock();
        let Some(old) = state.live.get(&addr).cloned().filter(|a| a.writable && a.words.can_move()) else {
            return Err(MemoryError::NotShared { addr, near: near(&state, addr) });
        };
        if old.words.origin().is_some() {
            return Ok(());
        }
        let (size, label) = (old.size, old.label.clone());
        let words = Words::shared(size)
            .map_err(|_| MemoryError::OutOfMemory { bytes: size, label: label.clone() })?;
        for (to, from) in words.iter().zip(&*old.words) {
            to.store(from.load(Relaxed), Relaxed);
        }
        state.snapshot = None;
        let new = Allocation { base: addr, size, label, writable: true, words, unwritten: None };
        state.live.insert(addr, Arc::new(new));
        Ok(())
    }

    /// What other processes open an allocation by.
    pub fn export(&self, addr: u64) -> Result<MemoryHandle, MemoryError> {
        let state = self.lock();
        let origin = state.live.get(&addr).and_then(|allocation| allocation.words.origin());
        let origin = origin.ok_or_else(|| MemoryError::NotShared { addr, near: near(&state, addr) })?;
        Ok(origin.handle())
    }

    /// Maps the memory of another process.
    pub fn import(&self, handle: MemoryHandle) -> Result<u64, MemoryError> {
        let origin = Origin::new(handle)
            .ok_or_else(|| MemoryError::Import("these bytes are no handle of the emulator".into()))?;
        let (process, bytes) = (origin.process(), origin.bytes);
        if process == std::process::id() {
            return Err(MemoryError::Import("the memory is of this process".into()));
        }
        let label = format!("memory of process {process}");
        let words = Words::open(&origin)
            .map_err(|error| MemoryError::Import(format!("{bytes} bytes of process {process}: {error}")))?;
        let base = self
            .reserve(bytes, MIN_ALIGN)
            .ok_or_else(|| MemoryError::OutOfMemory { bytes, label: label.clone() })?;
        self.insert(Arc::new(Allocation {
            base,
            size: bytes,
            label,
            writable: true,
            words,
            unwritten: None,
        }));
        Ok(base)
    }

    pub fn alloc(&self, bytes: u64, align: u64, label: &str) -> Result<u64, MemoryError> {
        let mut allocation = self.detached(bytes, align, label, true)?;
        if self.track
            && let Some(allocation) = Arc::get_mut(&mut allocation)
        {
            allocation.unwritten = Unwritten::new(bytes);
        }
        let base = allocation.base;
        self.insert(allocation);
        Ok(base)
    }

    pub fn alloc_at(&self, addr: u64, bytes: u64, label: &str, writable: bool) -> Result<(), MemoryError> {
        self.insert_at(self.place(addr, bytes, label, writable)?)
    }

    /// Host memory at its own address.
    ///
    /// # Safety
    /// As [`Words::host`], for `bytes` rounded up to words.
    pub unsafe fn map_host(
        &self,
        start: NonNull<AtomicU32>,
        bytes: u64,
        label: &str,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), MemoryError> {
        let count = usize::try_from(bytes.div_ceil(4))
            .map_err(|_| MemoryError::OutOfMemory { bytes, label: label.to_owned() })?;
        // SAFETY: as the caller promises.
        let words = unsafe { Words::host(start, count, owner) };
        let (base, label) = (start.as_ptr() as u64, label.to_owned());
        self.insert_at(Arc::new(Allocation {
            base,
            size: bytes,
            label,
            writable: true,
            words,
            unwritten: None,
        }))
    }

    /// Adds an allocation whose address is its own choice.
    fn insert_at(&self, allocation: Arc<Allocation>) -> Result<(), MemoryError> {
        let (addr, bytes) = (allocation.base, allocation.size);
        let mut state = self.lock();
        let last = addr.checked_add(bytes.saturating_sub(1));
        let below = last.and_then(|last| state.live.range(..=last).next_back());
        if last.is_none() || below.is_some_and(|(base, a)| base + a.size.max(1) > addr) {
            return Err(MemoryError::Occupied { addr, bytes, near: near(&state, addr) });
        }
        state.snapshot = None;
        state.live.insert(addr, allocation);
        Ok(())
    }

    pub fn free(&self, addr: u64) -> Result<(), MemoryError> {
        let mut state = self.lock();
        let Some(gone) = state.live.remove(&addr) else {
            return Err(MemoryError::NotAnAllocation { addr, near: near(&state, addr) });
        };
        state.snapshot = None;
        if state.dead.len() == MAX_TOMBSTONES {
            state.dead.pop_first();
        }
        state.dead.insert(addr, Tombstone { size: gone.size, label: gone.label.clone() });
        Ok(())
    }

    pub fn snapshot(&self) -> Snapshot {
        let mut state = self.lock();
        if state.snapshot.is_none() {
            state.snapshot = Some(state.live.values().cloned().collect());
        }
        state.snapshot.clone().unwrap_or_default()
    }

    /// Whether an address is among those that are handed out.
    pub fn holds(&self, addr: u64) -> bool {
        self.addresses.contains(&addr)
    }

    pub fn near(&self, addr: u64) -> Near {
        near(&self.lock(), addr)
    }

    fn find(
        &self,
        action: &'static str,
        addr: u64,
        bytes: u64,
    ) -> Result<(Arc<Allocation>, usize), MemoryError> {
        let state = self.lock();
        state
            .live
            .range(..=addr)
            .next_back()
            .and_then(|(_, a)| Some((a.clone(), a.offset(addr, bytes)?)))
            .ok_or_else(|| MemoryError::Unmapped { action, addr, bytes, near: near(&state, addr) })
    }

    pub fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        let (allocation, offset) = self.find("read", addr, out.len() as u64)?;
        allocation.read(offset, out);
        Ok(())
    }

    pub fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError> {
        let (allocation, offset) = self.find("write", addr, data.len() as u64)?;
        allocation.write(offset, data);
        Ok(())
    }

    pub fn copy(&self, dst: u64, src: u64, bytes: u64) -> Result<(), MemoryError> {
        let (from, from_offset) = self.find("copy", src, bytes)?;
        let (to, to_offset) = self.find("copy", dst, bytes)?;
        let bytes = bytes as usize;
        let mut buffer = vec![0; bytes.min(1 << 16)];
        let forward = !(Arc::ptr_eq(&from, &to) && to_offset > from_offset);
        let mut done = 0;
        while done < bytes {
            let n = buffer.len().min(bytes - done);
            let at = if forward { done } else { bytes - done - n };
            from.read(from_offset + at, &mut buffer[..n]);
            let unwritten: Vec<u64> = match from.unwritten {
                Some(_) => (0..n).step_by(64).map(|i| from.unwritten(from_offset + at + i, 64)).collect(),
                None => vec![],
            };
            to.write(to_offset + at, &buffer[..n]);
            to.copy_unwritten(to_offset + at, n, &unwritten);
            done += n;
        }
        Ok(())
    }

    pub fn exchange(&self, addr: u64, value: u64) -> Result<u64, MemoryError> {
        if !addr.is_multiple_of(8) {
            return Err(MemoryError::Misaligned { addr });
        }
        let (allocation, offset) = self.find("exchange", addr, 8)?;
        allocation.mark_written(offset, 8);
        Ok(allocation.update64(offset, |_| value))
    }

    pub fn fill(&self, addr: u64, pattern: &[u8], bytes: u64) -> Result<(), MemoryError> {
        let (allocation, offset) = self.find("fill", addr, bytes)?;
        if pattern.is_empty() {
            return Ok(());
        }
        // A block of whole patterns, so that large fills move whole words.
        let block = pattern.repeat((4096 / pattern.len()).max(1));
        let bytes = bytes as usize;
        let mut done = 0;
        while done < bytes {
            let n = block.len().min(bytes - done);
            allocation.write(offset + done, &block[..n]);
            done += n;
        }
        Ok(())
    }
}

impl Allocation {
    /// Writes from the host, inside the allocation.
    pub fn write_bytes(&self, offset: usize, data: &[u8]) -> bool {
        let fits = offset.checked_add(data.len()).is_some_and(|end| end as u64 <= self.size);
        if fits {
            self.write(offset, data);
        }
        fits
    }

    /// Takes over, after a copy, which bytes its source never had.
    fn copy_unwritten(&self, offset: usize, bytes: usize, bits: &[u64]) {
        let Some(unwritten) = &self.unwritten else { return };
        for i in (0..bytes).filter(|i| bits.get(i / 64).is_some_and(|b| b >> (i % 64) & 1 != 0)) {
            let at = offset + i;
            if let Some(word) = unwritten.0.get(at / 64) {
                word.fetch_or(1 << (at % 64), Relaxed);
            }
        }
    }

    /// All bytes become 0.
    pub fn zero(&self) {
        for word in &*self.words {
            word.store(0, Relaxed);
        }
    }

    /// Reads from the host, inside the allocation.
    pub fn read_bytes(&self, offset: usize, out: &mut [u8]) -> bool {
        let fits = offset.checked_add(out.len()).is_some_and(|end| end as u64 <= self.size);
        if fits {
            self.read(offset, out);
        }
        fits
    }
}

/// The memory of one launch: what was allocated when it began, and the launch's own segments.
pub(crate) struct View<'a> {
    /// By ascending base.
    allocations: Vec<&'a Allocation>,
    /// Misaligned accesses are errors.
    pub strict: bool,
    /// Addresses of other devices and processes.
    peers: Vec<Range<u64>>,
}

impl<'a> View<'a> {
    pub fn new(mut allocations: Vec<&'a Allocation>, strict: bool) -> View<'a> {
        allocations.sort_unstable_by_key(|a| a.base);
        let foreign = allocations.iter().filter(|a| a.process().is_some());
        let peers = foreign.map(|a| a.base..a.base + a.size).collect();
        View { allocations, strict, peers }
    }

    /// The same with the addresses of these other devices.
    pub fn with_peers<'m>(mut self, peers: impl Iterator<Item = &'m Arc<Memory>>) -> View<'a> {
        self.peers.extend(peers.map(|memory| memory.addresses.clone()));
        self
    }

    /// Whether another device or process has the address.
    pub fn is_peer(&self, address: u64) -> bool {
        self.peers.iter().any(|range| range.contains(&address))
    }

    /// Whether there may be such addresses.
    pub fn has_peers(&self) -> bool {
        !self.peers.is_empty()
    }

    /// Whether misaligned accesses are errors.
    #[inline(always)]
    pub fn strict(&self) -> bool {
        self.strict
    }

    /// The allocation that holds `bytes` bytes from `address` on, and the offset in it. `hint` is the index of the
    /// last one found by the same instruction.
    #[inline(always)]
    pub fn find(&self, address: u64, bytes: u64, hint: &mut u32) -> Option<(&'a Allocation, usize)> {
        if let Some(allocation) = self.allocations.get(*hint as usize)
            && let Some(offset) = allocation.offset(address, bytes)
        {
            return Some((allocation, offset));
        }
        self.search(address, bytes, hint)
    }

    #[inline(never)]
    fn search(&self, address: u64, bytes: u64, hint: &mut u32) -> Option<(&'a Allocation, usize)> {
        let index = self.allocations.partition_point(|a| a.base <= address).checked_sub(1)?;
        let allocation = self.allocations[index];
        let offset = allocation.offset(address, bytes)?;
        *hint = index as u32;
        Some((allocation, offset))
    }
}

fn near(state: &State, addr: u64) -> Near {
    let live = |(base, a): (&u64, &Arc<Allocation>)| (*base, a.size, a.label.clone(), false);
    let dead = |(base, t): (&u64, &Tombstone)| (*base, t.size, t.label.clone(), true);
    let candidates = [
        state.live.range(..=addr).next_back().map(live),
        state.live.range(addr..).next().map(live),
        state.dead.range(..=addr).next_back().map(dead),
        state.dead.range(addr..).next().map(dead),
    ];
    let distance = |base: u64, size: u64| {
        if addr < base { base - addr } else { addr.saturating_sub(base + size.saturating_sub(1)) }
    };
    candidates
        .into_iter()
        .flatten()
        .min_by_key(|(base, size, _, freed)| (distance(*base, *size), *freed))
        .map_or(Near::Nothing, |(base, size, label, freed)| Near::Allocation {
            label,
            base,
            size,
            offset: addr.wrapping_sub(base) as i64,
            freed,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unaligned_host_access_round_trips() {
        let memory = Memory::new(ADDRESSES, false);
        let base = memory.alloc(23, 1, "odd").unwrap();
        for start in 0..8u64 {
            for len in 0..(23 - start) {
                let data: Vec<u8> = (0..len).map(|i| (i * 7 + start) as u8).collect();
                memory.fill(base, &[0xEE], 23).unwrap();
                memory.write(base + start, &data).unwrap();
                let mut all = [0; 23];
                memory.read(base, &mut all).unwrap();
                let end = (start + len) as usize;
                assert_eq!(all[start as usize..end], data);
                assert!(all[..start as usize].iter().chain(&all[end..]).all(|b| *b == 0xEE));
            }
        }
    }

    #[test]
    fn fresh_memory_is_poison_and_bounds_are_exact() {
        let memory = Memory::new(ADDRESSES, false);
        let base = memory.alloc(6, 4096, "six").unwrap();
        assert_eq!(base % 4096, 0);
        let mut out = [0; 6];
        memory.read(base, &mut out).unwrap();
        assert_eq!(out, [0xFA, 0xFF, 0xFA, 0xFF, 0xFA, 0xFF]);
        let error = memory.read(base + 1, &mut out).unwrap_err();
        assert!(error.to_string().contains("at byte 1 of live allocation \"six\""), "{error}");
        assert!(memory.read(base - 1, &mut out).is_err());
    }

    #[test]
    fn freed_memory_is_named_and_never_reused() {
        let memory = Memory::new(ADDRESSES, false);
        let a = memory.alloc(64, 256, "first").unwrap();
        memory.free(a).unwrap();
        let b = memory.alloc(64, 256, "second").unwrap();
        assert!(b > a + 64);
        let error = memory.write(a + 8, &[1]).unwrap_err();
        assert!(error.to_string().contains("at byte 8 of freed allocation \"first\""), "{error}");
        assert!(memory.free(a).is_err());
        assert!(memory.free(b + 1).is_err());
    }

    #[test]
    fn a_fixed_place_is_taken_once() {
        let memory = Memory::new(ADDRESSES, false);
        let at = 0x7F12_3456_7001;
        memory.alloc_at(at, 16, "host", true).unwrap();
        memory.write(at + 15, &[7]).unwrap();
        for (addr, bytes) in [(at, 16), (at + 15, 1), (at - 1, 2), (at - 8, 32), (u64::MAX, 2)] {
            let error = memory.alloc_at(addr, bytes, "again", true).unwrap_err();
            assert!(matches!(error, MemoryError::Occupied { .. }), "{error}");
        }
        memory.alloc_at(at + 16, 1, "behind", true).unwrap();
        memory.alloc_at(at - 1, 1, "before", true).unwrap();
        memory.free(at).unwrap();
        memory.alloc_at(at, 16, "again", true).unwrap();
    }

    #[test]
    fn host_memory_is_seen_at_once() {
        let memory = Memory::new(ADDRESSES, false);
        let host: Arc<Vec<AtomicU32>> = Arc::new((0..4).map(AtomicU32::new).collect());
        let start = NonNull::from(&host[0]);
        let addr = start.as_ptr() as u64;
        // SAFETY: four words that `host` keeps.
        unsafe { memory.map_host(start, 14, "host", host.clone()) }.unwrap();
        memory.write(addr + 4, &7u32.to_le_bytes()).unwrap();
        assert_eq!(host[1].load(Relaxed), 7);
        host[2].store(9, Relaxed);
        let mut out = [0; 4];
        memory.read(addr + 8, &mut out).unwrap();
        assert_eq!(u32::from_le_bytes(out), 9);
        assert!(memory.read(addr + 12, &mut out).is_err(), "14 bytes");
        assert!(matches!(memory.share(addr), Err(MemoryError::NotShared { .. })));
        assert_eq!(Arc::strong_count(&host), 2);
        memory.free(addr).unwrap();
        assert_eq!(Arc::strong_count(&host), 1);
    }

    #[test]
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn numbers_of_eight_bytes_are_one_order_with_the_host() {
        let memory = Memory::new(ADDRESSES, false);
        let host: Arc<Vec<AtomicU64>> = Arc::new((0..3).map(|_| AtomicU64::new(0)).collect());
        // From the middle of the first number on.
        let start = NonNull::from(&host[0]).cast::<AtomicU32>();
        // SAFETY: five words that `host` keeps.
        unsafe { memory.map_host(start.add(1), 20, "host", host.clone()) }.unwrap();
        let addr = NonNull::from(&host[1]).as_ptr() as u64;
        let (allocation, offset) = memory.find("update", addr, 8).unwrap();
        assert_eq!(offset, 4);
        const N: u64 = 100_000;
        // Carries from one word to the other.
        const STEP: u64 = 0x4000_0001;
        std::thread::scope(|scope| {
            scope.spawn(|| (0..N).for_each(|_| _ = allocation.update64(offset, |x| x.wrapping_add(STEP))));
            scope.spawn(|| (0..N).for_each(|_| _ = host[1].fetch_add(STEP, Relaxed)));
        });
        assert_eq!(host[1].load(Relaxed), 2 * N * STEP);
        assert_eq!((host[0].load(Relaxed), host[2].load(Relaxed)), (0, 0));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn shared_memory_keeps_its_address_and_contents() {
        let memory = Memory::new(ADDRESSES, true);
        let addr = memory.alloc(10, 256, "ten").unwrap();
        memory.write(addr + 2, &[1, 2, 3]).unwrap();
        assert!(matches!(memory.export(addr), Err(MemoryError::NotShared { .. })));
        assert!(matches!(memory.share(addr + 1), Err(MemoryError::NotShared { .. })));
        memory.share(addr).unwrap();
        let handle = memory.export(addr).unwrap();
        assert_eq!(handle.process(), Some(std::process::id()));
        memory.share(addr).unwrap();
        assert_eq!(memory.export(addr), Ok(handle));
        let mut out = [0; 10];
        memory.read(addr, &mut out).unwrap();
        assert_eq!(out, [0xFA, 0xFF, 1, 2, 3, 0xFF, 0xFA, 0xFF, 0xFA, 0xFF]);
        memory.free(addr).unwrap();
    }

    #[test]
    fn addresses_stay_in_their_range() {
        let range = 0x2000_0000_0000..0x2000_0100_0000;
        let memory = Memory::new(range.clone(), false);
        let base = memory.alloc(1 << 20, 4, "first").unwrap();
        assert!(range.contains(&base));
        assert!(matches!(memory.alloc(16 << 20, 4, "large"), Err(MemoryError::OutOfMemory { .. })));
    }

    #[test]
    fn overlapping_copies_move_the_original_bytes() {
        let memory = Memory::new(ADDRESSES, false);
        let size = 200_000;
        let base = memory.alloc(size, 4, "buffer").unwrap();
        let data: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
        for (dst, src) in [(0u64, 1000u64), (1000, 0)] {
            memory.write(base, &data).unwrap();
            memory.copy(base + dst, base + src, 150_000).unwrap();
            let mut out = vec![0; 150_000];
            memory.read(base + dst, &mut out).unwrap();
            assert_eq!(out, data[src as usize..src as usize + 150_000]);
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        let memory = Memory::new(ADDRESSES, false);
        assert!(matches!(memory.alloc(u64::MAX, 4, "all"), Err(MemoryError::OutOfMemory { .. })));
        assert!(matches!(memory.alloc(1 << 60, 4, "most"), Err(MemoryError::OutOfMemory { .. })));
        assert!(matches!(memory.alloc(16, 3, "odd"), Err(MemoryError::Alignment { align: 3 })));
    }
}
