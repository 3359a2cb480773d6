//! `hk time`.

use crate::program;

#[track_caller]
fn text(args: &[&str]) -> String {
    program::text(&[&["time"], args].concat())
}

#[track_caller]
fn fails(args: &[&str], status: i32, part: &str) {
    program::fails(&[&["time"], args].concat(), status, part);
}

#[test]
fn every_figure_says_that_it_is_modelled_and_how_well() {
    for (part, about) in [
        ("mi325x", "mi325x: modelled, error "),
        ("mi300x", "mi300x: modelled, part not validated; error "),
        ("mi355x", "mi355x: modelled, error "),
        ("mi350x", "mi350x: modelled, part not validated; error "),
    ] {
        let table = text(&["rmsnorm", "--part", part, "--stalls=3"]);
        assert!(table.contains(about) && table.contains(" launches"), "{table}");
        assert!(table.contains("| rmsnorm_bf16_4096 ") && table.contains("| bound by "), "{table}");
        assert!(table.contains("hip/include/hk/"), "source lines: {table}");
    }
}

/// Modelled time of a GEMM of square matrices.
fn gemm(n: usize, part: &str) -> f64 {
    let [a, w] = ["a", "w"].map(|name| format!("{name}=bf16[{n},{n}]"));
    let table = text(&["gemm_a16w16", "--tensor", &a, "--tensor", &w, "--part", part]);
    let row = table.lines().find(|line| line.starts_with("| gemm_")).unwrap();
    row.split('|').nth(3).unwrap().trim().parse().unwrap()
}

#[test]
fn larger_calls_take_longer() {
    let us = [256, 1024, 2048].map(|n| gemm(n, "mi355x"));
    assert!(us.is_sorted() && us[2] > 2.0 * us[0], "{us:?}");
}

#[test]
fn parameters_take_the_place_of_those_of_a_case() {
    for tile in ["64x64", "64x128"] {
        let table = text(&["gemm_a16w16", "--part", "mi355x", "--param", &format!("tile={tile}")]);
        assert!(table.contains(&format!("| gemm_bf16_{tile} ")), "{table}");
    }
}

#[test]
fn counters_are_those_of_an_execution() {
    let rows = text(&["rmsnorm", "--counters"]);
    let mut lines = rows.lines();
    assert_eq!(lines.next(), Some("Dispatch_Id,Kernel_Name,Counter_Name,Counter_Value"));
    let value = |name: &str| -> f64 {
        let line = rows.lines().find(|line| line.split(',').nth(2) == Some(name)).unwrap();
        line.rsplit(',').next().unwrap().parse().unwrap()
    };
    // 128 rows, a block of one or more waves each.
    let waves = value("SQ_WAVES");
    assert!(waves >= 128.0 && waves % 128.0 == 0.0, "{rows}");
    assert!(value("SQ_INSTS_VALU") >= 8.0 * waves && value("SQ_INSTS_MFMA") == 0.0, "{rows}");
    assert_eq!(value("TCC_REQ"), value("TCC_HIT") + value("TCC_MISS"), "{rows}");
    assert!(value("SQ_WAVE_CYCLES") >= value("SQ_WAIT_INST_ANY"), "{rows}");
}

#[test]
fn traces_have_waves_and_graphs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    text(&["rmsnorm", "--trace", path.to_str().unwrap()]);
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let of = |phase: &str| events.iter().filter(|e| e["ph"] == phase).collect::<Vec<_>>();
    assert!(of("M")[0]["args"]["name"].as_str().unwrap().contains("modelled, error"));
    assert!(!of("X").is_empty() && !of("C").is_empty());
    // Slices of a wave follow each other.
    let mut at = std::collections::BTreeMap::new();
    for slice in of("X") {
        let number = |key: &str| slice[key].as_f64().unwrap();
        let end = at.entry(slice["tid"].as_u64().unwrap()).or_insert(0.0);
        assert!(number("ts") >= *end - 1e-6, "{slice}");
        *end = number("ts") + number("dur");
    }
}

#[test]
fn launches_that_depend_on_data_are_executed() {
    let table = text(&["fused_moe", "--execute"]);
    assert!(table.contains("4 launches: ") && table.contains("| experts_bf16_"), "{table}");
}

#[test]
fn wrong_command_lines_say_what_is_wrong() {
    fails(&["rmsnorm", "--part", "h100"], 1, "no part `h100`, expected one of mi300x, mi308x");
    fails(&["rmsnorm", "--case", "none"], 1, "no case `none`, expected a part of `");
    fails(&["rmsnarm"], 1, "no operator `rmsnarm`");
    fails(&["rmsnorm", "--tensor", "x=bf16[2,4]"], 1, "weight");
    fails(&["rmsnorm", "--param", "tile=64x64"], 1, "tile");
    fails(&[], 2, "OP");
    fails(&["rmsnorm", "--rows", "rows.csv"], 2, "--rows");
    fails(&["--rows", "rows.csv"], 2, "--objects");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    std::fs::write(&path, "id,gpu\n").unwrap();
    let folder = folder.path().to_str().unwrap();
    fails(
        &["--rows", path.to_str().unwrap(), "--objects", folder, "--out", "out.csv"],
        1,
        "missing columns: co_path",
    );
}
