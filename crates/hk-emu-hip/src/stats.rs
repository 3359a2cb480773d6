//! What the program's kernels executed, printed at its end: `HK_STATS=1`.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

use hk_emu::Counters;

use crate::runtime::{lock, say};

/// Launches of a kernel, and their sum.
type Kernels = BTreeMap<(usize, String), (u64, Counters)>;

static KERNELS: OnceLock<Option<Mutex<Kernels>>> = OnceLock::new();

/// Adds a launch, if the variable asks for it.
pub(crate) fn add(device: usize, kernel: &str, counters: Counters) {
    let kernels = KERNELS.get_or_init(|| {
        let on = std::env::var_os("HK_STATS").is_some_and(|value| value != "0" && !value.is_empty());
        on.then(Mutex::default)
    });
    let Some(kernels) = kernels else { return };
    let mut kernels = lock(kernels);
    let (launches, sum) = kernels.entry((device, kernel.to_owned())).or_default();
    *launches += 1;
    *sum += counters;
}

/// At the end of the program.
pub(crate) fn end() {
    let Some(Some(kernels)) = KERNELS.get() else { return };
    say!("executed by the emulator: counts, not times");
    eprintln!(
        "| device | kernel | launches | workgroups | waves | instructions | MFMA | bytes read | written |"
    );
    eprintln!("|---:|---|---:|---:|---:|---:|---:|---:|---:|");
    for ((device, kernel), (launches, c)) in &*lock(kernels) {
        eprintln!(
            "| {device} | {kernel} | {launches} | {} | {} | {} | {} | {} | {} |",
            c.workgroups, c.waves, c.instructions, c.mfma, c.global_read_bytes, c.global_written_bytes
        );
    }
}
