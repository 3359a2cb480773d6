//! Every operator has everything that is asked of it, and the documents are those of the registry.

use std::fs;
use std::path::PathBuf;

fn root() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../..").into()
}

#[test]
fn every_operator_has_demo_cases_and_corner_cases() {
    let operators = hk_cli::operators();
    let without = |missing: fn(&hk_core::registry::Operator) -> bool| -> Vec<_> {
        operators.iter().filter(|op| missing(op)).map(|op| op.name).collect()
    };
    assert_eq!(
        without(|op| op.cases.is_empty()),
        [""; 0],
        "no case of a real model in the operator's `cases`"
    );
    assert_eq!(without(|op| op.corners.is_empty()), [""; 0], "no corner case in the operator's `corners`");
    assert_eq!(without(|op| op.kernels.is_empty()), [""; 0], "no source in the operator's `kernels`");
}

/// By the `hip/kernels.json` of the families. Those of hk-comm are launched on several devices: no operator does.
#[test]
fn every_source_is_launched_by_an_operator() {
    let families = fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap());
    for family in families {
        let Ok(interface) = fs::read_to_string(family.path().join("hip/kernels.json")) else { continue };
        let interface: serde_json::Value = serde_json::from_str(&interface).unwrap();
        let family = family.file_name().into_string().unwrap();
        if family == "hk-comm" {
            continue;
        }
        let operators = || hk_cli::operators().into_iter().filter(|op| op.family == family);
        for source in interface["entries"].as_object().unwrap().keys() {
            let launched = operators().any(|op| op.kernels.iter().any(|kernels| kernels.name() == source));
            assert!(launched, "{family}/hip/{source}.hip is in the `kernels` of no operator");
        }
    }
}

/// A case in `validation/operators.py`, or a reason why there is none.
#[test]
fn every_operator_is_compared_with_jax_or_says_why_not() {
    let script = fs::read_to_string(root().join("crates/hk-cli/validation/operators.py")).unwrap();
    let (_, reasons) = script.split_once("\nNOT_COMPARED = {\n").unwrap();
    let (reasons, _) = reasons.split_once("\n}\n").unwrap();
    let reasons: Vec<(&str, &str)> = reasons
        .lines()
        .map(|line| line.trim().trim_end_matches(',').split_once("\": \"").expect(line))
        .map(|(name, why)| (&name[1..], why))
        .collect();
    for (name, why) in &reasons {
        assert!(hk_cli::operator(name).is_ok(), "NOT_COMPARED: no operator {name}");
        assert!(why.split(' ').count() > 3, "NOT_COMPARED: {name}: no reason");
    }
    for op in hk_cli::operators() {
        let name = op.name;
        let case = script.contains(&format!("\n@case\ndef {name}(d):\n"))
            || script.contains(&format!("\nCASES[\"{name}\"] = "));
        let reason = reasons.iter().any(|(n, _)| *n == name);
        assert!(case || reason, "{name}: no case in crates/hk-cli/validation/operators.py");
        assert!(!(case && reason), "{name}: a case, and a reason to have none");
    }
}

#[test]
fn the_document_of_operators_is_generated() {
    let path = root().join("docs/operators.md");
    let there = fs::read_to_string(path).unwrap_or_default();
    assert!(
        there == hk_cli::document(),
        "docs/operators.md is stale: cargo run -p hk-cli -- list --markdown > docs/operators.md"
    );
}
