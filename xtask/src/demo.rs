//! `cargo xtask demo`, `status` and `mutate`: all run `hk`, which holds the operators.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use comfy_table::{Table, presets};
use hk_build::{Arch, Builder, DEFAULT_TARGETS, Unit};
use serde::{Deserialize, Serialize};

use crate::kernels::Server;
use crate::tools::Need;
use crate::{Failure, Result, build_all, isa, run, setup};

/// Options of `demo`.
#[derive(clap::Args)]
pub(crate) struct DemoArgs {
    #[command(flatten)]
    setup: setup::Args,
    /// Only operators whose name contains this.
    #[arg(long)]
    op: Option<String>,
    /// Every case of every operator.
    #[arg(long)]
    all: bool,
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

/// `hk TASK`, built.
pub(crate) fn hk(task: &str) -> Result<Command> {
    let mut command = Command::new(run::build_hk(|_| ())?);
    command.current_dir(run::workspace_root()).arg(task);
    Ok(command)
}

/// The results of the last complete demo, for `status`.
fn results() -> PathBuf {
    run::workspace_root().join("target/hk-demo.json")
}

/// The sources of the kernels that the layers of the demo run, and their targets: compiled while `hk` is built. What is not listed is
/// compiled when the demo comes to it.
const FIRST: [(&str, &[Arch]); 21] = [
    ("hk-norm/hip/fused_add_rmsnorm_bf16.hip", &[Arch::Gfx942]),
    ("hk-gemm/hip/a16w16.hip", &[Arch::Gfx942]),
    ("hk-gemm/hip/reduce.hip", &[Arch::Gfx942]),
    ("hk-activation/hip/rope.hip", &[Arch::Gfx942]),
    ("hk-attention/hip/kv_cache_rows.hip", &[Arch::Gfx942]),
    ("hk-attention/hip/prefill_bf16.hip", &[Arch::Gfx942]),
    ("hk-attention/hip/mla_bmm.hip", &Arch::AMD),
    ("hk-attention/hip/mla_bf16.hip", &Arch::AMD),
    ("hk-quant/hip/per_token_quant.hip", &[Arch::Gfx942]),
    ("hk-gemm/hip/a8w8.hip", &[Arch::Gfx942]),
    ("hk-activation/hip/gated.hip", &[Arch::Gfx942]),
    ("hk-gemm/hip/a16w16_decode.hip", &Arch::AMD),
    ("hk-gdr/hip/split.hip", &Arch::AMD),
    ("hk-gdr/hip/conv_split.hip", &Arch::AMD),
    ("hk-gdr/hip/gating.hip", &Arch::AMD),
    ("hk-gdr/hip/prepare_bf16.hip", &Arch::AMD),
    ("hk-attention/hip/decode_bf16.hip", &[Arch::Gfx942]),
    ("hk-gdr/hip/states_bf16.hip", &Arch::AMD),
    ("hk-gdr/hip/outputs.hip", &Arch::AMD),
    ("hk-activation/hip/softmax.hip", &[Arch::Gfx942]),
    ("hk-gdr/hip/recurrent.hip", &Arch::AMD),
];

/// What a demo without compiled kernels runs beside the layers.
const PER_FAMILY: [&str; 2] = ["--per-family", "5"];

/// Sets up, then has `hk demo` run the operators. Where the kernels are not compiled yet, `hk` is built without them, and
/// they are compiled meanwhile, those that it asks for first.
pub(crate) fn demo(args: &DemoArgs) -> Result {
    let compiler = setup::ready(&args.setup, Need::Build)?.compiler;
    let units = build_all::discover(&run::workspace_root(), &DEFAULT_TARGETS)?;
    let cache = hk_build::cache_dir(&std::env::current_exe()?);
    let embed = cached(&cache, &units);
    let build = || {
        run::build_hk(|cargo| {
            // The demo runs on the default targets, whatever the caller builds otherwise.
            cargo.env_remove("HK_TARGETS").envs((!embed).then_some(("HK_EMBED", "0")));
        })
    };
    // Half of the objects, and of the time to compile them.
    let brief = !embed && !args.all && args.op.is_none();
    let demo = |hk: PathBuf| {
        let mut command = Command::new(hk);
        command.current_dir(run::workspace_root()).arg("demo").args(args.all.then_some("--all"));
        command.args(brief.then_some(PER_FAMILY).into_iter().flatten());
        match &args.op {
            Some(op) => command.args(["--op", op]),
            None => command.arg("--json").arg(results()),
        };
        command
    };
    if embed {
        return run::execute(&mut demo(build()?));
    }
    let builder = Builder::new(compiler, cache);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let folder = run::workspace_root().join("target/hk-kernels");
    // Half of the cores compile kernels ahead; all of them do while `hk` waits for some.
    let ahead = if args.op.is_none() { threads.div_ceil(2) } else { 0 };
    let server = Server::new(&builder, &folder, ordered(units), ahead)?;
    println!("kernels are compiled while `hk` is built and runs");
    let result = thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| server.work());
        }
        let result = build().and_then(|hk| run::execute(demo(hk).env("HK_KERNELS", &folder)));
        server.stop();
        result
    });
    let (compiled, left) = server.counts();
    println!(
        "{compiled} of {} objects compiled for this; all, so that the demo has every operator: cargo xtask build-all",
        compiled + left
    );
    result
}

/// Whether the cache has an object of every unit. An old one is compiled again when it is embedded.
fn cached(cache: &Path, units: &[Unit]) -> bool {
    let files = fs::read_dir(cache).into_iter().flatten().flatten();
    let objects: HashSet<String> =
        files.filter_map(|file| Some(file.file_name().to_str()?.split_once('.')?.1.to_owned())).collect();
    units.iter().all(|unit| objects.contains(&unit.object_name()))
}

/// The units of [`FIRST`] in the order of that list, then the others.
fn ordered(mut units: Vec<Unit>) -> Vec<Unit> {
    units.sort_by_key(|unit| {
        let at = FIRST.iter().position(|(label, archs)| *label == unit.label() && archs.contains(&unit.arch));
        at.unwrap_or(FIRST.len())
    });
    units
}

/// An operator, as `hk status` prints it.
#[derive(Debug, Serialize, Deserialize)]
struct Operator {
    name: String,
    family: String,
    summary: String,
    /// The module of AITER's Triton kernels, if it has another name.
    module: Option<String>,
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
    let output = hk("status")?.stderr(Stdio::inherit()).output()?;
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
    table.set_header(["operator", "module", "crate", "compiled for", "tests", "benchmarks", "last demo"]);
    for o in operators {
        let list = |items: &[String]| if items.is_empty() { "-".to_owned() } else { items.join(", ") };
        let (targets, tests, benches, demo) =
            (list(&o.targets), list(&o.tests), list(&o.benches), list(&o.demo));
        let module = o.module.unwrap_or_else(|| o.name.clone());
        table.add_row([o.name, module, o.family, targets, tests, benches, demo]);
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
    fn the_kernels_of_the_layers_are_compiled_first() {
        let units = build_all::discover(&run::workspace_root(), &DEFAULT_TARGETS).unwrap();
        let n = units.len();
        let units = ordered(units);
        assert_eq!(units.len(), n);
        // Every source of the list exists.
        let labels: Vec<_> = units.iter().map(|u| (u.label(), u.arch)).collect();
        let want: Vec<_> = FIRST
            .iter()
            .flat_map(|(label, archs)| archs.iter().map(|arch| (label.to_string(), *arch)))
            .collect();
        assert_eq!(labels[..want.len()], want);
    }

    #[test]
    fn a_cache_is_complete_with_an_object_of_every_unit() {
        let dir = tempfile::tempdir().unwrap();
        let units = build_all::discover(&run::workspace_root(), &DEFAULT_TARGETS).unwrap();
        for unit in &units[1..] {
            fs::write(dir.path().join(format!("0123.{}", unit.object_name())), "").unwrap();
        }
        assert!(!cached(dir.path(), &units));
        fs::write(dir.path().join(format!("4567.{}", units[0].object_name())), "").unwrap();
        assert!(cached(dir.path(), &units));
    }

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
