//! What the emulator executes, and what has a model.

use std::collections::HashSet;
use std::sync::OnceLock;

use hk_emu::isa::{ALL_OPS, Op, executes};

/// The instructions that the emulator executes on a target.
pub fn executed(cpu: &str) -> &'static HashSet<Op> {
    static SETS: [OnceLock<HashSet<Op>>; 2] = [OnceLock::new(), OnceLock::new()];
    SETS[usize::from(cpu == "gfx950")].get_or_init(|| {
        let arch = cpu.parse().expect("a known target");
        ALL_OPS.iter().copied().filter(|op| executes(*op, arch).is_ok()).collect()
    })
}

#[test]
fn print_missing() {
    for cpu in ["gfx942", "gfx950"] {
        let set = executed(cpu);
        let arch = cpu.parse().unwrap();
        let missing: Vec<_> = ALL_OPS
            .iter()
            .filter(|op| op.info().exists_on(arch) && !set.contains(op))
            .map(|op| op.info().name)
            .collect();
        println!("{cpu}: {} executed, missing {missing:?}", set.len());
    }
}
