//! Damaged code objects and wild arguments: an error, a report or a result; never a panic, a hang, or memory without
//! bound.

#![allow(clippy::precedence)] // shared test code writes bits as the ISA manual does

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::LazyLock;

use hk_codeobj::CodeObject;
use hk_emu::{Dispatch, LoadError, Machine, MachineOptions};
use proptest::prelude::*;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Records what this thread holds.
struct Recorder;

fn record(change: isize) {
    // The cells are gone while a thread ends.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Recorder {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        record(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        record(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Recorder = Recorder;

/// Kernels with relocated data, LDS, a stack and calls.
static OBJECT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let source = r#"
        #define SYMBOL __device__ __attribute__((visibility("default")))
        SYMBOL int counter = 3; extern SYMBOL __attribute__((weak)) int missing;
        __device__ int *volatile where = &counter, *volatile nowhere = &missing;
        __device__ __attribute__((noinline)) int twice(int x) { return 2 * x; }
        __device__ __attribute__((noinline)) int square(int x) { return x * x; }
        __device__ int (*const table[2])(int) = {twice, square};
        KERNEL void calls(int *y, int n) { y[TID] = table[(TID + n) & 1](TID) + *where; if (nowhere) *nowhere = 1; }
        KERNEL void tile(const float *x, float *y, int n) {
          __shared__ float t[256]; float own[8];
          t[TID & 255] = x[TID]; BARRIER();
          for (int i = 0; i < 8; i++) own[i] = t[(TID + i * n) & 255];
          y[TID] = own[n & 7];
        }
        KERNEL void add(u64 *sum, const u64 *x) { __atomic_fetch_add(sum, x[BID * 64 + TID], 0); }"#;
    crate::common::hip("gfx942", "-O1", source)
});

/// File offsets outside of debug information, where a change matters.
static INTERESTING: LazyLock<Vec<usize>> = LazyLock::new(|| {
    let object = CodeObject::parse(&OBJECT).expect("the undamaged object");
    let loaded = object.segments.iter().map(|s| s.file.end).max().unwrap_or(0);
    (0..loaded).chain(OBJECT.len() - 64 * 20..OBJECT.len()).collect()
});

/// What any damage may take: the file some times over, the zeros that a file may ask for, and a few waves.
const MOST: isize = 600 << 20;

/// Loads an image and launches whatever kernels it has, with `fill` as every byte of the arguments.
fn exercise(image: &[u8], fill: u8) -> Result<(), TestCaseError> {
    let start = LIVE.get();
    PEAK.set(start);
    let options = MachineOptions::default().threads(Some(1)).instruction_budget(Some(5_000));
    let machine = Machine::new(options);
    let loaded = machine.load(image);
    match &loaded {
        Err(error) => prop_assert!(!error.to_string().is_empty()),
        Ok(module) => {
            let names: Vec<_> = module.code_object().kernels.iter().map(|k| k.name.clone()).collect();
            for name in names.iter().take(8) {
                let size = module.code_object().kernel(name).map_or(0, |k| k.explicit_arg_bytes);
                let args = vec![fill; size.min(1 << 20) as usize];
                let dispatch = Dispatch { grid: [2, 1, 1], block: [128, 1, 1], dynamic_lds: 0, args: &args };
                if let Err(fault) = machine.launch(module, name, &dispatch) {
                    prop_assert!(!fault.to_string().is_empty());
                }
            }
        }
    }
    drop(loaded);
    drop(machine);
    prop_assert!(PEAK.get() - start < MOST, "{} bytes at once", PEAK.get() - start);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn damaged_bytes(
        changes in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), Just(0), Just(0xFF)]), 1..6),
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
        fill in prop_oneof![Just(0), Just(0xFF), any::<u8>()],
    ) {
        let mut image = OBJECT.clone();
        for (at, value) in changes {
            image[*at.get(&INTERESTING)] = value;
        }
        if let Some(cut) = cut {
            image.truncate(cut.index(image.len()));
        }
        exercise(&image, fill)?;
    }

    #[test]
    fn damaged_words(
        at in any::<prop::sample::Index>(),
        value in prop_oneof![
            any::<u64>(), Just(u64::MAX), Just(1 << 63), Just(u64::MAX - 255), Just(1 << 30), Just(1 << 29),
            (0..64u32).prop_map(|n| 1 << n), (0..4096u64),
        ],
        fill in any::<u8>(),
    ) {
        let mut image = OBJECT.clone();
        let at = (at.get(&INTERESTING) & !7).min(image.len() - 8);
        image[at..at + 8].copy_from_slice(&value.to_le_bytes());
        exercise(&image, fill)?;
    }

    #[test]
    fn damaged_descriptors(which in 0..3usize, at in 0..64usize, values in prop::collection::vec(any::<u8>(), 1..9), fill in any::<u8>()) {
        let mut image = OBJECT.clone();
        let object = CodeObject::parse(&image).expect("the undamaged object");
        let vaddr = object.kernels[which].descriptor_vaddr;
        let segment = object.segments.iter().find(|s| (s.vaddr..s.vaddr + s.mem_size).contains(&vaddr)).expect("in a segment");
        let start = segment.file.start + (vaddr - segment.vaddr) as usize;
        for (i, value) in values.iter().enumerate().take(64 - at) {
            image[start + at + i] = *value;
        }
        exercise(&image, fill)?;
    }
}

#[test]
fn segments_that_take_too_much_are_refused() {
    // The last load segment's size in memory, in the program headers.
    let object = CodeObject::parse(&OBJECT).unwrap();
    let last = object.segments.last().unwrap();
    let header = (64..).step_by(56).find(|at| OBJECT[at + 16..at + 24] == last.vaddr.to_le_bytes()).unwrap();
    let load = |size: u64| {
        let mut image = OBJECT.clone();
        image[header + 40..header + 48].copy_from_slice(&size.to_le_bytes());
        Machine::new(MachineOptions::default()).load(&image).map(drop)
    };
    assert!(load(last.mem_size + (1 << 20)).is_ok());
    assert!(matches!(load(300 << 20), Err(LoadError::Map(what)) if what.contains("256 MiB")));
    assert!(matches!(load(1 << 40), Err(LoadError::Parse(_))));
}
