//! `cargo xtask demo`, `status` and `mutate`: all run `hk`, which holds the operators.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use comfy_table::{Table, presets};
use hk_build::DEFAULT_TARGETS;
use serde::{Deserialize, Serialize};

use crate::{Failure, Result, build_all, isa, run, setup};

/// Options of `demo`.
#[derive(clap::Args)]
pub(crate) struct DemoArgs {
    #[command(flatten)]
    setup: setup::Args,
    /// Only operators whose name contains this.
    #[arg(long)]
    op: Option<String>,
}

/// Options of `status`.
#[derive(clap::Args)]
pub(crate) struct StatusArgs {
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// The instructions of the emulator instead of the operators: decoded, executed, tested, and how faithfully.
    #[arg(long)]
    isa: bool,
    /// With `--isa`: each instruction, with the reason for its class.
    #[arg(long, requires = "isa")]
    list: bool,
}

/// Options of `mutate`, all handed to `hk mutate`.
#[derive(clap::Args)]
pub(crate) struct MutateArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<String>,
}

/// Runs `hk mutate`, optimised: it launches thousands of kernels.
pub(crate) fn mutate(args: &MutateArgs) -> Result {
    let hk = ["run", "--release", "--package", "hk-cli", "--bin", "hk", "--", "mutate"];
    run::execute(run::cargo(&hk).args(&args.options))
}

pub(crate) fn hk(task: &str) -> Command {
    run::cargo(&["run", "--package", "hk-cli", "--bin", "hk", "--", task])
}

/// Where the last complete demo has left its results, for `status`.
fn results() -> PathBuf {
    run::workspace_root().join("target/hk-demo.json")
}

/// Sets up, builds all kernels, then has `hk demo` run every operator.
pub(crate) fn demo(args: &DemoArgs) -> Result {
    let compiler = setup::compiler(&args.setup)?;
    let built = build_all::build(&run::workspace_root(), compiler, &DEFAULT_TARGETS, false, None)?;
    built.summary();
    built.check()?;
    let mut command = hk("demo");
    // The demo runs on the default targets, whatever the caller builds otherwise.
    command.env_remove("HK_TARGETS");
    match &args.op {
        Some(op) => command.args(["--op", op]),
        None => command.arg("--json").arg(results()),
    };
    run::execute(&mut command)
}

/// An operator, as `hk status` prints it.
#[derive(Debug, Serialize, Deserialize)]
struct Operator {
    name: String,
    family: String,
    summary: String,
    sources: Vec<String>,
    targets: Vec<String>,
    cases: Vec<String>,
    /// Test files that name the operator, with their number of tests.
    #[serde(default)]
    tests: Vec<String>,
    /// Benchmark files that name the operator.
    #[serde(default)]
    benches: Vec<String>,
    /// Devices on which it was within tolerance in all cases of the last demo, and others marked as failed.
    #[serde(default)]
    demo: Vec<String>,
}

/// What `status` reads of a row of `hk demo --json`.
#[derive(Deserialize)]
struct DemoRow {
    operator: String,
    device: String,
    passed: bool,
}

/// Prints the operators of the registry and what this workspace has for each.
pub(crate) fn status(args: &StatusArgs) -> Result {
    if args.isa {
        return isa::status(args.json, args.list);
    }
    let output = hk("status").stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(Failure(format!("`hk status` failed ({})", output.status)));
    }
    let mut operators: Vec<Operator> = serde_json::from_slice(&output.stdout)?;
    let rows: Vec<DemoRow> = match fs::read(results()) {
        Ok(text) => serde_json::from_slice(&text)?,
        Err(_) => Vec::new(),
    };
    for operator in &mut operators {
        let package = run::workspace_root().join("crates").join(&operator.family);
        operator.tests = naming(&package.join("tests"), &operator.name, true);
        operator.benches = naming(&package.join("benches"), &operator.name, false);
        operator.demo = demonstrated(&rows, &operator.name);
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&operators)?);
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(["operator", "crate", "compiled for", "tests", "benchmarks", "last demo"]);
    for o in operators {
        let list = |items: &[String]| if items.is_empty() { "-".to_owned() } else { items.join(", ") };
        let (targets, tests, benches, demo) =
            (list(&o.targets), list(&o.tests), list(&o.benches), list(&o.demo));
        table.add_row([o.name, o.family, targets, tests, benches, demo]);
    }
    println!("{table}");
    Ok(())
}

/// The devices of the last demo for an operator.
fn demonstrated(rows: &[DemoRow], operator: &str) -> Vec<String> {
    let mut devices: Vec<(&str, bool)> = Vec::new();
    for row in rows.iter().filter(|r| r.operator == operator) {
        match devices.iter_mut().find(|(device, _)| *device == row.device) {
            Some((_, passed)) => *passed &= row.passed,
            None => devices.push((&row.device, row.passed)),
        }
    }
    let text = |(device, passed)| if passed { String::from(device) } else { format!("{device} FAILED") };
    devices.into_iter().map(text).collect()
}

/// The Rust files of `dir` in which `name` occurs as a word, by stem; with the number of their tests. A benchmark that
/// goes through the registry measures every operator.
fn naming(dir: &Path, name: &str, count_tests: bool) -> Vec<String> {
    let mut found = Vec::new();
    for path in fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()) {
        let text = fs::read_to_string(&path).unwrap_or_default();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        if path.extension().is_some_and(|e| e == "rs")
            && (has_word(&text, name) || !count_tests && has_word(&text, "OPERATORS"))
        {
            // `corner_tests!` makes one for each name.
            let tests = text.lines().filter(|l| l.trim() == "#[test]" || l.contains("corner_tests!")).count();
            found.push(if count_tests { format!("{stem} ({tests})") } else { stem.into_owned() });
        }
    }
    found.sort();
    found
}

fn has_word(text: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        !before.ends_with(part) && !after.starts_with(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_whole() {
        assert!(has_word("hk_norm::rmsnorm(x)", "rmsnorm"));
        assert!(has_word("rmsnorm", "rmsnorm"));
        assert!(!has_word("fused_add_rmsnorm rmsnorm2", "rmsnorm"));
        assert!(has_word("fused_add_rmsnorm rmsnorm", "rmsnorm"));
    }

    #[test]
    fn files_are_found_by_the_operators_they_name() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("laws.rs", "#[test]\nfn a() { rmsnorm() }\n    #[test]\nfn b() {}\n");
        write("other.rs", "#[test]\nfn a() { fused_add_rmsnorm() }");
        write("notes.txt", "rmsnorm");
        write("registry.rs", "for operator in OPERATORS {}");
        assert_eq!(naming(dir.path(), "rmsnorm", true), ["laws (2)"]);
        assert_eq!(naming(dir.path(), "rmsnorm", false), ["laws", "registry"]);
        assert!(naming(&dir.path().join("absent"), "rmsnorm", true).is_empty());
    }

    #[test]
    fn one_failed_case_fails_the_device() {
        let row = |operator: &str, device: &str, passed| DemoRow {
            operator: operator.into(),
            device: device.into(),
            passed,
        };
        let rows = [
            row("a", "emu:gfx942", true),
            row("a", "emu:gfx950", true),
            row("a", "emu:gfx950", false),
            row("b", "x", true),
        ];
        assert_eq!(demonstrated(&rows, "a"), ["emu:gfx942", "emu:gfx950 FAILED"]);
    }
}
