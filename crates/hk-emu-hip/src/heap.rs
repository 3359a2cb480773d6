//! The heap of kernels: `malloc`, `free`, `new` and `delete` of device code.
//!
//! Device libraries manage it, in a structure that begins as zeros. They ask the host for the memory that they divide, 2 MiB at a time,
//! and for each large block. A launch sees only what was allocated before it, so all of it comes from one allocation, of which the host
//! backs the pages that are used. Source of the protocol: `ockl/src/dm.cl` of ROCm's device libraries.

use std::collections::BTreeMap;

use hk_emu::{Machine, MemoryError};

/// Bytes of the libraries' structure.
const STRUCTURE: u64 = 128 << 10;
/// Alignment of what the host gives: device code finds the head of such a part by it.
const PART: u64 = 2 << 20;
/// Bytes that kernels of a device can have.
const BYTES: u64 = 1 << 30;

/// What a device's kernels have allocated.
pub(crate) struct Heap {
    base: u64,
    bytes: u64,
    /// Ends of parts by their beginnings; the first is the structure.
    parts: BTreeMap<u64, u64>,
}

impl Heap {
    /// At least as large as the program has set.
    pub fn new(machine: &Machine, limit: u64) -> Result<Heap, MemoryError> {
        let bytes = BYTES.max(limit).saturating_add(PART).next_multiple_of(PART);
        let base = machine.alloc_zeroed(bytes, PART, "heap of kernels")?;
        Ok(Heap { base, bytes, parts: BTreeMap::from([(base, base + STRUCTURE)]) })
    }

    /// Gives all of it back.
    pub fn release(self, machine: &Machine) {
        let _ = machine.free(self.base);
    }

    /// The structure's address, for kernels.
    pub fn structure(&self) -> u64 {
        self.base
    }

    /// An address, or 0.
    pub fn alloc(&mut self, bytes: u64) -> u64 {
        let end = self.base + self.bytes;
        let ends: Vec<u64> = self.parts.values().map(|end| end.next_multiple_of(PART)).collect();
        let begins = self.parts.keys().skip(1).copied().chain([end]);
        let fits = |(from, to): &(u64, u64)| bytes <= to.saturating_sub(*from);
        let Some((at, _)) = ends.into_iter().zip(begins).find(fits).filter(|_| bytes != 0) else { return 0 };
        self.parts.insert(at, at + bytes);
        at
    }

    /// Frees what `alloc` gave; false for another address.
    pub fn free(&mut self, addr: u64) -> bool {
        addr != self.base && self.parts.remove(&addr).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_used_again() {
        let machine = Machine::new(hk_emu::MachineOptions::default());
        let mut heap = Heap::new(&machine, 0).unwrap();
        let [a, b, c] = [10, PART + 1, 1].map(|bytes| heap.alloc(bytes));
        assert_eq!([a - heap.structure(), b - a, c - b], [PART, PART, 2 * PART]);
        assert_eq!(heap.alloc(0), 0);
        assert_eq!(heap.alloc(BYTES), 0, "more than there is");
        assert!(heap.free(b) && !heap.free(b) && !heap.free(heap.structure()) && !heap.free(a + 1));
        assert_eq!(heap.alloc(2 * PART + 1), c + PART, "the gap is smaller");
        assert_eq!(heap.alloc(2 * PART), b);
        machine.write(b + 2 * PART - 1, &[1]).unwrap();
    }
}
