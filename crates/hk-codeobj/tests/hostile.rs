//! Damaged code objects: an error or a sane result, never a panic, never an absurd allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::LazyLock;

use hk_codeobj::{Arch, CodeObject};
use proptest::prelude::*;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
    static TOTAL: Cell<usize> = const { Cell::new(0) };
}

/// Records what this thread allocates.
struct Recorder;

fn record(size: usize) {
    // The cells are gone while a thread ends.
    let _ = LARGEST.try_with(|c| c.set(c.get().max(size)));
    let _ = TOTAL.try_with(|c| c.set(c.get().saturating_add(size)));
}

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Recorder {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        record(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        record(size);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Recorder = Recorder;

static OBJECTS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    [("kernels.hip", Arch::Gfx942), ("kernels.hip", Arch::Gfx950), ("symbols.hip", Arch::Gfx942)]
        .map(|(file, arch)| crate::common::compile(file, arch, &[]))
        .into()
});

/// The file offsets where a change matters most: ELF and program headers, notes, symbol tables, descriptors.
fn interesting(bytes: &[u8]) -> Vec<usize> {
    let text = CodeObject::parse(bytes).unwrap();
    let code = text.segments.iter().find(|s| s.executable).unwrap().file.clone();
    (0..bytes.len()).filter(|i| !code.contains(i)).collect()
}
static INTERESTING: LazyLock<Vec<Vec<usize>>> =
    LazyLock::new(|| OBJECTS.iter().map(|o| interesting(o)).collect());

fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
    LARGEST.set(0);
    TOTAL.set(0);
    let result = CodeObject::parse(bytes);
    let (largest, total) = (LARGEST.get(), TOTAL.get());
    prop_assert!(largest <= 64 * bytes.len() + 4096, "one allocation of {largest} for {} bytes", bytes.len());
    prop_assert!(total <= 512 * bytes.len() + 65536, "{total} allocated for {} bytes", bytes.len());
    match result {
        Ok(object) => {
            for s in &object.segments {
                prop_assert!(s.file.end <= bytes.len() && s.file.start <= s.file.end);
                prop_assert!(s.mem_size <= 1 << 30 && s.vaddr <= 1 << 30);
            }
            for k in &object.kernels {
                prop_assert!(object.segments.iter().any(|s| s.executable && k.entry_vaddr >= s.vaddr));
                prop_assert!(k.explicit_arg_bytes <= k.kernarg_size);
                let _ = k.occupancy(object.arch);
            }
        }
        Err(error) => prop_assert!(!error.to_string().is_empty()),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn truncated(which in 0..3usize, cut in any::<prop::sample::Index>()) {
        let bytes = &OBJECTS[which];
        let cut = cut.index(bytes.len());
        check(&bytes[..cut])?;
        // Section headers end the file, so that every proper prefix is an error.
        prop_assert!(CodeObject::parse(&bytes[..cut]).is_err());
    }

    #[test]
    fn damaged(
        which in 0..3usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), Just(0), Just(0xFF)]), 1..8),
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
    ) {
        let mut bytes = OBJECTS[which].clone();
        for (at, value) in changes {
            bytes[*at.get(&INTERESTING[which])] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        check(&bytes)?;
    }

    #[test]
    fn damaged_words(which in 0..3usize, at in any::<prop::sample::Index>(), value in prop_oneof![
        any::<u64>(), Just(u64::MAX), Just(1 << 63), Just(u64::MAX >> 1), Just(u64::MAX - 63), (0..64u32).prop_map(|n| 1 << n),
    ]) {
        let mut bytes = OBJECTS[which].clone();
        let at = (at.get(&INTERESTING[which]) & !7).min(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        check(&bytes)?;
    }

    #[test]
    fn noise_behind_a_header(which in 0..3usize, noise in prop::collection::vec(any::<u8>(), 0..4096)) {
        let mut bytes = OBJECTS[which][..64].to_vec();
        bytes.extend(noise);
        check(&bytes)?;
    }
}
