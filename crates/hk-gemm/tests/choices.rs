//! The configurations that `hk inspect` shows are those that launches take.

use hk_core::registry::{CallSpec, Choice, Operator, Scalar, TensorSpec};
use hk_core::{Arch, DType, Device, Error};
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
fn every_gemm_has_one_choice() {
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

/// On sm_90a, whole K of one output of 16-bit floats is by bulk tensor copies, where no option and no layout forbids it.
#[test]
fn bulk_copies_are_shown() {
    let mut info = Device::open("emu:gfx942").unwrap().info().clone();
    (info.arch, info.compute_units, info.wave_size) = (Arch::Sm90a, 132, 32);
    let op = OPERATORS.iter().find(|op| op.name == "gemm_a16w16").unwrap();
    let chosen = |scalars: &[(&'static str, Scalar)]| {
        let mut call = CallSpec::new(op);
        for (name, rows) in [("a", 256), ("w", 6144)] {
            call.set(name, TensorSpec::new(DType::Bf16, [rows, 4096])).unwrap();
        }
        for (name, value) in scalars {
            call.set_scalar(name, *value).unwrap();
        }
        let row = choices(&call, &info).unwrap().into_iter().find(|row| row.chosen).unwrap();
        let value = |of: &str| row.values.iter().find(|v| v.0 == of).unwrap().1.clone();
        ["tile", "kernel", "waves", "stages", "splits"].map(value)
    };
    assert_eq!(chosen(&[]), ["128x96", "gemm_bf16_128x128_bulk", "9", "8", "1"]);
    for scalar in [("tile", Scalar::Choice("128x128")), ("w_shuffled", Scalar::Bool(true))] {
        let [_, kernel, ..] = chosen(&[scalar]);
        assert!(!kernel.ends_with("_bulk"), "{scalar:?}: {kernel}");
    }
}

/// The chosen row names the kernel that a launch loads, and none of the others is loaded.
#[test]
fn the_choice_is_what_is_launched() {
    let tiles = |op: &&Operator| op.scalars.iter().any(|scalar| scalar.name == "tile");
    let groups = ["gmm", "ptgmm", "nptgmm"];
    for op in OPERATORS.iter().filter(tiles).filter(|op| !groups.contains(&op.name)) {
        for case in op.corners {
            for spec in ["emu:gfx942?threads=4", "emu:gfx950?threads=4"] {
                // A device that no other test opens: only this call loads kernels.
                let device = Device::open(spec).unwrap();
                let rows = choices(&op.spec(case).unwrap(), device.info()).unwrap();
                let call = op.example(case, 1).unwrap();
                match op.execute(&device.create_stream().unwrap(), &call) {
                    Err(Error::Unsupported { .. }) => continue,
                    result => drop(result.unwrap_or_else(|e| panic!("{}, {}: {e}", op.name, case.label))),
                }
                let loaded = device.loaded_kernels();
                let kernel = |row: &Choice| row.values.iter().find(|v| v.0 == "kernel").unwrap().1.clone();
                let chosen = kernel(rows.iter().find(|row| row.chosen).unwrap());
                for row in &rows {
                    let launched = loaded.iter().any(|k| k.name() == kernel(row));
                    let at = format!("{}, {} on {spec}: {}", op.name, case.label, kernel(row));
                    assert_eq!(launched, kernel(row) == chosen, "{at}, chosen {chosen}");
                }
            }
        }
    }
}

/// What a launch refuses, `choices` refuses with the same error.
#[test]
fn wrong_configurations_are_refused() {
    let device = Device::open("emu:gfx942").unwrap();
    let op = |name: &str| OPERATORS.iter().find(|op| op.name == name).unwrap();
    let refused =
        |name: &str, tensors: &[(&str, DType, &[usize])], scalars: &[(&str, Scalar)], want: &str| {
            let mut call = CallSpec::new(op(name));
            for (name, dtype, shape) in tensors {
                call.set(name, TensorSpec::new(*dtype, *shape)).unwrap();
            }
            for (name, value) in scalars {
                call.set_scalar(name, *value).unwrap();
            }
            let error = choices(&call, device.info()).unwrap_err().to_string();
            assert!(error.contains(want), "{name}: {error}");
        };
    let halves: &[(&str, DType, &[usize])] =
        &[("a", DType::Bf16, &[16, 256]), ("w", DType::Bf16, &[64, 256])];
    let tile = |name| ("tile", Scalar::Choice(name));
    refused("gemm_a16w16", halves, &[tile("64x64"), ("splits", Scalar::Int(0))], "splits: 0");
    refused("gemm_a16w16_gated", halves, &[tile("16x16")], "tile: S16x16");
    let long: &[(&str, DType, &[usize])] = &[
        ("a", DType::I8, &[16, 200_000]),
        ("w", DType::I8, &[64, 200_000]),
        ("a_scale", DType::F32, &[16]),
        ("w_scale", DType::F32, &[64]),
    ];
    refused("gemm_a8w8", long, &[], "a: 200000 columns");
    let blocks: &[(&str, DType, &[usize])] = &[
        ("a", DType::I8, &[16, 256]),
        ("w", DType::I8, &[64, 256]),
        ("a_scale", DType::F32, &[16, 3]),
        ("w_scale", DType::F32, &[1, 3]),
    ];
    refused("gemm_a8w8_blockscale", blocks, &[("group_k", Scalar::Int(100))], "group.k: 100");
}
