//! What is said of configurations is what is launched.

use hk_core::registry::{CallSpec, Choice, Operator, TensorSpec};
use hk_core::{Arch, Device};
use hk_gemm::{OPERATORS, choices};

/// The calls of an operator's cases and corners.
fn calls(op: &'static Operator) -> impl Iterator<Item = CallSpec> {
    op.cases.iter().chain(op.corners).map(move |case| {
        let mut call = CallSpec::new(op);
        for (name, dtype, shape) in case.tensors {
            call.set(name, TensorSpec::new(*dtype, *shape)).unwrap();
        }
        for (name, value) in case.scalars {
            call.set_scalar(name, *value).unwrap();
        }
        call
    })
}

#[test]
fn every_product_has_one_choice() {
    let emulated = ["emu:gfx942", "emu:gfx950"].map(|device| Device::open(device).unwrap().info().clone());
    let mut h200 = emulated[0].clone();
    (h200.arch, h200.compute_units, h200.wave_size) = (Arch::Sm90, 132, 32);
    for info in emulated.iter().chain([&h200]) {
        // All but those of groups have the same tiles.
        let tiles = |op: &&Operator| op.scalars.iter().any(|scalar| scalar.name == "tile");
        let groups = ["gmm", "ptgmm", "nptgmm"];
        for op in OPERATORS.iter().filter(tiles).filter(|op| !groups.contains(&op.name)) {
            for call in calls(op) {
                let rows = choices(&call, info).unwrap_or_else(|e| panic!("{}: {e}", op.name));
                assert_eq!(rows.iter().filter(|row| row.chosen).count(), 1, "{}: {rows:?}", op.name);
                let names = |row: &Choice| row.values.iter().map(|v| v.0).collect::<Vec<_>>();
                assert!(rows.iter().all(|row| names(row) == names(&rows[0])), "{}", op.name);
            }
        }
    }
}
