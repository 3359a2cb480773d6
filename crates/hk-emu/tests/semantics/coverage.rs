//! What the emulator executes, and what has a model.

use std::collections::{BTreeSet, HashSet};
use std::sync::OnceLock;

use hk_emu::executes;
use hk_emu::isa::{ALL_OPS, Op};

use crate::semantics::{compare, convert, float, formatted, integer, lanes, memory, scalar, scalar_memory};

/// The instructions that the emulator executes on a target.
pub fn executed(cpu: &str) -> &'static HashSet<Op> {
    static SETS: [OnceLock<HashSet<Op>>; 2] = [OnceLock::new(), OnceLock::new()];
    SETS[usize::from(cpu == "gfx950")].get_or_init(|| {
        let arch = cpu.parse().expect("a known target");
        ALL_OPS.iter().copied().filter(|op| executes(*op, arch).is_ok()).collect()
    })
}

/// Instructions whose models are in other test files, by the beginnings of their names.
const ELSEWHERE: &[(&str, &[&str])] = &[
    ("matrix.rs", &["V_MFMA_", "V_SMFMAC_"]),
    ("conversions.rs", &["V_CVT_SCALEF32_", "V_CVT_SR_", "V_ASHR_PK_"]),
    (
        "coverage.rs",
        &[
            "DS_APPEND",
            "DS_CONSUME",
            "DS_READ_ADDTID_B32",
            "DS_WRITE_ADDTID_B32",
            "S_CBRANCH_G_FORK",
            "S_CBRANCH_I_FORK",
            "S_CBRANCH_JOIN",
            "S_SETVSKIP",
            "S_SET_GPR_IDX_",
            "V_CVT_PKACCUM_U8_F32",
        ],
    ),
    ("faults.rs", &["S_TRAP"]),
    ("kernels.rs", &["S_SENDMSG"]),
];

/// Executed without a model, and why.
const EXCEPTIONS: &[(&str, &str)] = &[("S_ENDPGM", "it ends every kernel, and leaves nothing to compare")];

fn modelled() -> BTreeSet<&'static str> {
    let mut models = integer::models32();
    models.extend(integer::models16());
    models.extend(integer::models64());
    models.extend(float::singles());
    models.extend(float::halves());
    models.extend(float::doubles());
    models.extend(float::cubes());
    models.extend(convert::all());
    models.extend(compare::models(""));
    let mut ops: Vec<Op> = models.iter().map(|m| m.op).collect();
    ops.extend(scalar::ops());
    ops.extend(memory::ops());
    ops.extend(memory::copies());
    ops.extend(formatted::ops());
    ops.extend(lanes::ops());
    ops.extend(scalar_memory::ops());
    ops.iter().map(|op| op.info().name).collect()
}

fn elsewhere(name: &str) -> bool {
    ELSEWHERE.iter().any(|(_, list)| list.iter().any(|begin| name.starts_with(begin)))
}

/// `tests/tested.txt` lists what has a model. `HK_BLESS=1` writes it.
#[test]
fn list_of_tested_instructions() {
    let executed: BTreeSet<&str> =
        ["gfx942", "gfx950"].iter().flat_map(|cpu| executed(cpu)).map(|op| op.info().name).collect();
    let modelled = modelled();
    let tested: BTreeSet<&str> =
        executed.iter().copied().filter(|name| modelled.contains(name) || elsewhere(name)).collect();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tested.txt");
    let want: String = tested.iter().map(|name| format!("{name}\n")).collect();
    if std::env::var_os("HK_BLESS").is_some() {
        std::fs::write(path, &want).expect("the list is written");
    }
    let have = std::fs::read_to_string(path).expect("tests/tested.txt");
    let listed: BTreeSet<&str> = have.lines().collect();
    let difference = |a: &BTreeSet<&str>, b: &BTreeSet<&str>| {
        a.difference(b).map(|name| name.to_string()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(difference(&listed, &tested), "", "in tests/tested.txt, but without a model");
    assert_eq!(difference(&tested, &listed), "", "tested, but not in tests/tested.txt");
    assert_eq!(have, want, "tests/tested.txt is sorted");
    // Whatever is executed has a model, or a reason.
    let missing: Vec<&str> = executed
        .iter()
        .copied()
        .filter(|name| !tested.contains(name) && !EXCEPTIONS.iter().any(|(exception, _)| exception == name))
        .collect();
    assert!(missing.is_empty(), "executed without a model: {missing:?}");
    for (name, reason) in EXCEPTIONS {
        assert!(executed.contains(name) && !modelled.contains(name) && !reason.is_empty(), "{name}");
    }
}
