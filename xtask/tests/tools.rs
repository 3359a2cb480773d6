//! The list of programs in `doctor` against this machine and against the sources.

use std::collections::BTreeSet;
use std::process::Command;

use crate::files;

/// Rows of `doctor` on this machine: is it there, name, what it is needed for.
fn rows() -> Vec<(bool, String, String)> {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("doctor").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    let needs = ["build", "tests", "CI", "install", "optional"];
    let rows: Vec<_> = text
        .lines()
        .filter_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [state, name, need, ..] if needs.contains(&need) => {
                Some((state == "ok", name.into(), need.into()))
            }
            _ => None,
        })
        .collect();
    assert!(rows.len() > 10, "{text}");
    rows
}

#[test]
fn every_program_that_building_and_testing_needs_runs() {
    for (there, name, need) in rows() {
        assert!(
            there || !["build", "tests"].contains(&&*need),
            "{name} does not run here: cargo xtask doctor"
        );
    }
}

/// The start of names of programs, for those that a source does not run by a literal name.
const FAMILIES: [&str; 17] = [
    "clang",
    "llvm-",
    "lld",
    "ld.",
    "gcc",
    "g++",
    "hipcc",
    "nvcc",
    "ptxas",
    "cuobjdump",
    "nvdisasm",
    "objdump",
    "readelf",
    "python",
    "rustfmt",
    "cargo-",
    "apt-",
];

/// Literals of those families that are no programs that are run: options, names of packages, other compilers to find.
const NO_PROGRAMS: [&str; 3] = ["hipcc", "clang", "llvm-toolchain-noble"];

#[test]
fn every_program_that_a_source_names_is_in_doctor() {
    let known: BTreeSet<String> = rows().into_iter().map(|(_, name, _)| name).collect();
    let mut unknown = Vec::new();
    for file in files::all().iter().filter(|f| f.extension() == "rs") {
        for (n, line) in file.text.lines().enumerate() {
            let run = ["Command::new(\"", "tool(\"", "program(\""].iter();
            let run = run.filter_map(|call| line.split_once(call)?.1.split_once('"')).map(|(name, _)| name);
            let quoted = line.split('"').skip(1).step_by(2).filter(|text| {
                !text.is_empty()
                    && text.chars().all(|c| c.is_ascii_alphanumeric() || "-+._".contains(c))
                    && FAMILIES.iter().any(|family| text.starts_with(family))
            });
            // This list and the fakes of the tests are about programs.
            let listed = file.path.starts_with("xtask/tests/") || file.path == "xtask/src/tools.rs";
            for name in run.chain(quoted).filter(|_| !listed) {
                let name = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-');
                if !known.contains(name) && !NO_PROGRAMS.contains(&name) {
                    unknown.push(format!("{}:{}: {name}", file.path, n + 1));
                }
            }
        }
    }
    assert!(
        unknown.is_empty(),
        "programs that are not in TOOLS of xtask/src/tools.rs:\n{}",
        unknown.join("\n")
    );
}

#[test]
fn every_program_that_ci_runs_is_in_doctor() {
    let known: BTreeSet<String> = rows().into_iter().map(|(_, name, _)| name).collect();
    let text = std::fs::read_to_string(files::root().join(".ci/run")).unwrap();
    // The shell's own words, and functions of the script.
    let shell = [
        "set", "cd", "export", "unset", "step", "as_root", "for", "do", "done", "if", "then", "fi", "else",
        "local", "printf", "find", "test", "{", "}", "#", "|", "||", "&&", "time", "trap", "true",
    ];
    let mut continued = false;
    for line in text.lines().map(str::trim) {
        let first =
            line.split_whitespace().find(|word| !word.contains('=') || word.starts_with('-')).unwrap_or("");
        let command = !continued
            && !first.is_empty()
            && first.chars().all(|c| c.is_ascii_alphanumeric() || "-_+".contains(c));
        if command && !shell.contains(&first) && !first.ends_with("()") {
            assert!(
                known.contains(first),
                ".ci/run runs `{first}`, which is not in TOOLS of xtask/src/tools.rs: {line}"
            );
        }
        continued = line.ends_with('\\');
    }
}
