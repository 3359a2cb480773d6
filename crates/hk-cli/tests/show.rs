//! `hk devices`, `hk list`, `hk inspect`, and what the README says of them.

use crate::program::{fails, text};
use hk_core::Arch;

#[track_caller]
fn json(args: &[&str]) -> Vec<serde_json::Value> {
    serde_json::from_str(&text(args)).unwrap()
}

#[test]
fn both_emulated_devices_are_there() {
    let rows = json(&["devices", "--json"]);
    for (device, target, lds) in [("emu:gfx942", "gfx942", 64 << 10), ("emu:gfx950", "gfx950", 160 << 10)] {
        let row = rows.iter().find(|r| r["device"] == device).unwrap();
        assert_eq!((&row["target"], &row["lds_bytes"]), (&target.into(), &lds.into()));
        assert_eq!(row["error"], serde_json::Value::Null);
    }
    let table = text(&["devices"]);
    assert!(table.contains("| emu:gfx942 | ") && table.contains(" 160 KiB "), "{table}");
    // An AMD GPU is in the table, or there is a reason why not.
    let hip = rows.iter().find(|r| r["device"] == "hip:0").unwrap();
    let shown = hip["error"].as_str().map_or("| hip:0 ".to_owned(), str::to_owned);
    assert!(table.contains(&shown), "{table}");
}

#[test]
fn every_operator_is_listed_with_all_that_the_registry_says() {
    let rows = json(&["list", "--json"]);
    let table = text(&["list"]);
    assert_eq!(rows.len(), hk_cli::operators().len());
    let column = table.find("formula").unwrap();
    for (row, op) in rows.iter().zip(hk_cli::operators()) {
        assert_eq!((row["name"].as_str(), row["family"].as_str()), (Some(op.name), Some(op.family)));
        assert_eq!(row["tensors"].as_array().unwrap().len(), op.args.len());
        assert_eq!(row["parameters"].as_array().unwrap().len(), op.scalars.len());
        assert_eq!(row["targets"], serde_json::json!(["gfx942", "gfx950"]));
        assert!(table.contains(&format!("| {} ", op.name)), "{table}");
        // Wrapped, but complete.
        let all = |text: &str| text.split_whitespace().collect::<Vec<_>>().concat();
        let start = table.find(&format!("| {} ", op.name)).unwrap();
        let lines = table[start..].lines().take(4);
        let formula: String = lines.filter_map(|line| line.get(column..)?.strip_suffix('|')).collect();
        assert!(all(&formula).starts_with(&all(op.summary)), "{}: {formula}", op.name);
    }
    let longest = table.lines().map(|line| line.chars().count()).max().unwrap();
    assert!(longest <= 120, "{longest} columns:\n{table}");
    let x = &rows[0]["tensors"][0];
    assert_eq!((&x["name"], &x["dtypes"]), (&"x".into(), &serde_json::json!(["bf16", "f16", "f32"])));
}

#[test]
fn families_are_filtered() {
    assert_eq!(text(&["list", "--family", "norm"]), text(&["list", "--family", "hk-norm"]));
    fails(&["list", "--family", "nrom"], 1, "no family `nrom`, expected one of hk-norm");
    fails(&["list", "--family"], 2, "--family");
}

#[test]
fn resources_are_those_of_the_code_objects() {
    for op in hk_cli::operators() {
        let table = text(&["inspect", op.name]);
        for objects in op.kernels {
            for arch in Arch::AMD {
                let object = hk_codeobj::CodeObject::parse(objects.image(arch).unwrap()).unwrap();
                for kernel in &object.kernels {
                    let row = |l: &&str| {
                        let cells: Vec<_> = l.split('|').map(str::trim).collect();
                        cells.len() == 12 && cells[1] == kernel.name && cells[2] == arch.name()
                    };
                    let row = table.lines().find(row).unwrap_or_else(|| panic!("{} for {arch}", kernel.name));
                    let cells: Vec<_> = row.split('|').map(str::trim).collect();
                    let numbers =
                        [kernel.max_threads, kernel.vgprs, kernel.agprs, kernel.sgprs, kernel.lds_bytes];
                    assert_eq!(cells[3..8], numbers.map(|n| n.to_string()), "{row}");
                    assert_eq!(cells[10], kernel.occupancy(arch).to_string(), "{row}");
                }
            }
        }
        for arg in op.args {
            assert!(table.contains(&format!("| {} ", arg.name)), "{table}");
        }
    }
}

#[test]
fn disassembly_is_complete_and_has_source_lines_and_branch_targets() {
    let asm = text(&["inspect", "rmsnorm", "--asm", "--target", "gfx950", "--kernel", "rmsnorm_bf16_128"]);
    let mut lines = asm.lines();
    let head = lines.next().unwrap();
    let bytes: usize = head
        .strip_prefix("rmsnorm_bf16_128 for gfx950, ")
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let (mut dwords, mut addresses, mut branches) = (0, Vec::new(), Vec::new());
    let mut sources = 0;
    for line in lines {
        if let Some(source) = line.strip_prefix("  ; ") {
            assert!(source.contains(".hip:") || source.contains(".h:"), "{line}");
            sources += 1;
            continue;
        }
        let (instruction, rest) = line.split_once(" // ").unwrap();
        assert!(!instruction.contains(".long"), "{line}");
        let (address, rest) = rest.split_once(": ").unwrap();
        addresses.push(address.to_owned());
        let (code, target) = rest.split_once(" -> ").map_or((rest, None), |(c, t)| (c, Some(t.to_owned())));
        assert_eq!(instruction.contains("branch"), target.is_some(), "{line}");
        branches.extend(target);
        dwords += code.split(' ').count();
    }
    assert_eq!(4 * dwords, bytes);
    assert!(sources > 10, "{sources} source lines");
    assert!(!branches.is_empty() && branches.iter().all(|b| addresses.contains(b)), "{branches:?}");
    assert!(asm.lines().any(|l| l.trim_start().starts_with("s_endpgm ")), "{asm}");
}

#[test]
fn configurations_are_those_for_the_sizes() {
    let rows = |args: &[&str]| -> Vec<Vec<String>> {
        let table = text(&[&["inspect"], args].concat());
        let rows = table.lines().filter(|l| l.starts_with('|') && !l.starts_with("|-"));
        rows.map(|l| l.split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
    };
    let chosen = |m: &str, n: &str, more: &[&str]| {
        let (a, w) = (format!("a=bf16[{m},4096]"), format!("w=bf16[{n},4096]"));
        let args = ["gemm_a16w16", "--tensor", &a, "--tensor", &w, "--device", "emu:gfx942"];
        let rows = rows(&[&args, more].concat());
        let names = &rows[0];
        let of: Vec<_> = rows[1..].iter().filter(|row| row[1] == "chosen").collect();
        assert_eq!(of.len(), 1, "{rows:?}");
        let value = |name: &str| of[0][names.iter().position(|n| n == name).unwrap()].clone();
        ["tile", "kernel", "waves", "stages", "splits", "workspace, bytes"].map(value)
    };
    let large = chosen("16384", "16384", &[]);
    assert_eq!(large, ["128x128", "gemm_bf16_128x128", "4", "2", "1", "0"]);
    // Decode; and several slices of K where there are few outputs.
    assert_eq!(chosen("16", "4096", &[])[..5], ["16x16", "gemm_bf16_16x16", "8", "2", "1"]);
    let [tile, _, _, _, splits, bytes] = chosen("64", "64", &[]);
    let splits: u64 = splits.parse().unwrap();
    // Partial sums, and a flag of 8 bytes for each of 16 tiles.
    let room = splits * (64 * 64 * 4 + 16 * 8);
    assert!(tile == "16x16" && splits > 1 && bytes == room.to_string(), "{tile} {splits} {bytes}");
    assert_eq!(chosen("16", "4096", &["--param", "tile=128x128"])[0], "128x128");
    // Of two GEMMs in one launch, the tile of each.
    let fp8 = "fp8e4m3fnuz";
    let two = |m: &str, more: &[&str]| {
        let tensors = [
            format!("x_fp8={fp8}[{m},7168]"),
            format!("w_fp8={fp8}[512,7168]"),
            format!("x_bf16=bf16[{m},7168]"),
            "w_bf16=bf16[256,7168]".to_owned(),
        ];
        let mut args = vec!["fused_gemm_a8w8_blockscale_a16w16", "--device", "emu:gfx942"];
        tensors.iter().for_each(|tensor| args.extend(["--tensor", tensor]));
        let rows = rows(&[&args, more].concat());
        let of = rows[1..].iter().find(|row| row[1] == "chosen").unwrap().clone();
        ["tile", "splits", "K at a time", "blocks", "workspace, bytes"]
            .map(|name| of[rows[0].iter().position(|n| n == name).unwrap()].clone())
    };
    let large = two("512", &["--param", "tile=256x128"]);
    assert_eq!(large, ["256x128, 256x256", "1", "128, 64", "10", "0"]);
    // Slices of K are whole steps of each.
    let small = two("16", &["--param", "tile=16x32", "--param", "splits=3"]);
    // Partial sums, and a flag of 8 bytes for each of 16 and 8 tiles.
    let bytes = (3 * 4 * 16 * 768 + 3 * 8 * (16 + 8)).to_string();
    assert_eq!(small, ["16x32", "2, 3", "2048, 1024", "56", &bytes]);
    // All emulated GPUs, if no device is named.
    let both = text(&["inspect", "gemm_a8w8", "--tensor", "a=i8[64,64]", "--tensor", "w=i8[64,64]"]);
    assert!(both.contains("on emu:gfx942, 304 CUs") && both.contains("on emu:gfx950, 256 CUs"), "{both}");
    let a = ["inspect", "gemm_a16w16", "--tensor", "a=bf16[16,64]"];
    fails(&a, 1, "w: no tensor");
    fails(&[&a[..], &["--tensor", "w=bf16[16,65]"]].concat(), 1, "w: shape [16, 65]");
    fails(&["inspect", "gemm_a16w16", "--tensor", "a=bf16"], 2, "NAME=TYPE[SIZES]");
    fails(&["inspect", "gemm_a16w16", "--tensor", "a=bf17[1,2]"], 2, "bf17");
    fails(&["inspect", "rmsnorm", "--tensor", "x=bf16[1,2]"], 1, "no configurations to choose from");
    fails(&["inspect", "rmsnorm", "--device", "emu:gfx942"], 2, "--tensor");
}

#[test]
fn what_cannot_be_inspected_is_refused() {
    fails(&["inspect", "hardmax"], 1, "no operator `hardmax`");
    fails(&["inspect", "rmsnorm", "--kernel", "rmsnorm_f64"], 1, "no kernel's name contains `rmsnorm_f64`");
    fails(&["inspect", "rmsnorm", "--target", "sm_90"], 1, "no code object for sm_90");
    fails(&["inspect", "rmsnorm", "--target", "gfx90a"], 2, "unknown target `gfx90a`");
    fails(&["inspect"], 2, "<OP>");
}

/// Names of commands, variables and files that the README tells a reader to use.
#[test]
fn the_readme_names_what_exists() {
    let readme = include_str!("../../../README.md");
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    for name in std::fs::read_dir(format!("{root}/crates")).unwrap() {
        let name = name.unwrap().file_name().into_string().unwrap();
        assert!(readme.contains(&format!("| `{name}` |")), "{name} is not in the list of crates");
    }
    for file in ["crates/hk-core/hip/include/hk", "docs/operators.md", "docs/adding-an-operator.md"] {
        assert!(readme.contains(file) && std::path::Path::new(&format!("{root}/{file}")).exists(), "{file}");
    }
    for file in ["hip", "src/reference.rs", "src/operators.rs", "tests"] {
        assert!(std::path::Path::new(&format!("{root}/crates/hk-norm/{file}")).exists(), "{file}");
    }
}

#[test]
fn hot_lines_are_sorted_and_add_up() {
    let args = ["inspect", "rmsnorm", "--target", "gfx942", "--hot=valu", "--case", "DeepSeek", "--top", "3"];
    let table = text(&args);
    assert!(table.starts_with("rmsnorm, DeepSeek-V3, 64 tokens, on gfx942:\n"), "{table}");
    let cell = |row: &str, i: usize| row.split('|').nth(i).unwrap().trim().to_owned();
    let rows: Vec<&str> = table.lines().filter(|l| l.starts_with("| ")).collect();
    assert_eq!(rows.len(), 1 + 3 + 2, "{table}");
    let valu: Vec<u64> = rows[1..].iter().map(|row| cell(row, 4).parse().unwrap()).collect();
    assert!(valu[0] >= valu[1] && valu[1] >= valu[2] && valu[2] > 0, "{table}");
    assert_eq!(valu[..4].iter().sum::<u64>(), valu[4], "{table}");
    assert!(cell(rows[4], 1).ends_with("more lines") && cell(rows[5], 2) == "100.0 %", "{table}");
    fails(
        &["inspect", "rmsnorm", "--hot", "--case", "GPT"],
        1,
        "no case `GPT`, expected a part of `Llama-3 8B",
    );
    fails(&["inspect", "rmsnorm", "--top", "3"], 2, "--hot");
}
