//! `hk demo` and `hk status`, run as a user runs them.

use crate::program::hk;
use std::process::Output;

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_demo_is_within_tolerance_and_counts() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = hk(&["demo", "--op", "fused_add_rmsnorm", "--json", file.path().to_str().unwrap()]);
    let text = stdout(&output);
    assert!(output.status.success(), "{text}");
    let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(file.path()).unwrap()).unwrap();
    let rows = rows.as_array().unwrap();
    for device in ["emu:gfx942", "emu:gfx950"] {
        assert!(rows.iter().any(|r| r["device"] == device), "{device}: {text}");
    }
    for row in rows {
        assert!(row["operator"].as_str().unwrap().starts_with("fused_add_rmsnorm"), "{row}");
        assert_eq!(row["passed"], true, "{row}");
        assert_eq!(row["kernels"].as_array().unwrap().len(), 1);
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        let counters = &row["counters"];
        assert!(number(&counters["instructions"]) > number(&counters["waves"]));
        // Each input is read and each output written, and nothing else: the distinct bytes are the floor.
        let details = &counters["details"];
        let distinct = number(&details["distinct_read_bytes"]) + number(&details["distinct_written_bytes"]);
        assert_eq!(distinct, number(&row["floor_bytes"]), "{row}");
        let moved = number(&counters["global_read_bytes"]) + number(&counters["global_written_bytes"]);
        assert!(moved >= distinct, "{row}");
    }
}

#[test]
fn what_cannot_run_fails_and_says_why() {
    let output = hk(&["demo", "--op", "rmsnorm", "--device", "emu:gfx90a"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("FAILED") && stdout(&output).contains("gfx90a"), "{}", stdout(&output));
    let output = hk(&["demo", "--op", "nonesuch"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no operator matches `nonesuch`"));
    let output = hk(&["demo", "--layer", "nonesuch"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no layer matches `nonesuch`"));
    assert_eq!(hk(&["demo", "--frobnicate"]).status.code(), Some(2));
}

#[test]
fn status_lists_the_registry() {
    let output = hk(&["status"]);
    assert!(output.status.success());
    let listed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|o| o["name"].as_str().unwrap()).collect();
    let registered: Vec<_> = hk_cli::operators().iter().map(|o| o.name).collect();
    assert_eq!(names, registered);
    assert_eq!(listed[0]["targets"], serde_json::json!(["gfx942", "gfx950"]));
}

#[test]
fn status_lists_the_instructions_of_the_emulator() {
    let output = hk(&["status", "--isa"]);
    assert!(output.status.success());
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    for target in ["gfx942", "gfx950"] {
        let of = |name: &str| rows.iter().find(|r| r["target"] == target && r["name"] == name).unwrap();
        assert_eq!(of("S_ADD_U32")["fidelity"], "exact");
        assert_eq!(of("V_EXP_F32")["fidelity"], "spec-bounded");
        assert_eq!(
            (&of("DS_GWS_INIT")["fidelity"], &of("DS_GWS_INIT")["executed"]),
            (&"refused".into(), &false.into())
        );
    }
    assert!(
        rows.iter().all(|r| r["decoded"] == true && (r["executed"] == true) == (r["fidelity"] != "refused"))
    );
}
