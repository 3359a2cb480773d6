//! `cargo xtask test`, `cargo xtask bench`, and running cargo in general.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Failure, Result, setup};

/// Options of `test`.
#[derive(clap::Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    setup: setup::Args,
    /// Test one package instead of all.
    #[arg(long, short)]
    package: Option<String>,
    /// At the full sizes of real models: some of them take minutes.
    #[arg(long)]
    full: bool,
    /// Only tests whose name contains this.
    filter: Option<String>,
}

/// Options of `bench`.
#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    setup: setup::Args,
    /// The family to measure, such as `norm`. Default: every crate that has benchmarks.
    #[arg(long)]
    family: Option<String>,
    /// Arguments for the benchmarks, such as a filter or `--save-baseline NAME`.
    #[arg(last = true)]
    args: Vec<String>,
}

/// The directory of the workspace.
pub(crate) fn workspace_root() -> PathBuf {
    let here = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let here = PathBuf::from(here);
    here.parent().map(Path::to_owned).unwrap_or(here)
}

/// A cargo command in the workspace, as a user would type it.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root()).args(args);
    // What cargo sets for this program is not for another run of cargo.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&*name);
        }
    }
    command
}

/// Runs a command on this terminal after saying so.
pub(crate) fn execute(command: &mut Command) -> Result {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy();
    let args = command.get_args().map(|a| a.to_string_lossy());
    let line = std::iter::once(program).chain(args).collect::<Vec<_>>().join(" ");
    eprintln!("$ {line}");
    let status = command.status().map_err(|e| Failure(format!("{line}: {e}")))?;
    if status.success() { Ok(()) } else { Err(Failure(format!("`{line}` failed ({status})"))) }
}

/// The version of cargo-nextest, if it is installed.
pub(crate) fn nextest() -> Option<String> {
    let output = cargo(&["nextest", "--version"]).output().ok().filter(|o| o.status.success())?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
}

/// `cargo xtask test`
pub(crate) fn test(args: &TestArgs) -> Result {
    setup::compiler(&args.setup)?;
    let llvm = setup::llvm_tools(&args.setup)?;
    let what = args.package.as_deref().map_or(vec!["--workspace"], |p| vec!["--package", p]);
    let run = |runner: &[&str], rest: &[&str]| {
        let mut command = cargo(&[runner, &what, rest].concat());
        command.envs(llvm.iter().map(|dir| ("HK_LLVM_BIN", dir)));
        command.envs(args.full.then_some(("HK_FULL", "1")));
        execute(&mut command)
    };
    let filter: Vec<&str> = args.filter.as_deref().into_iter().collect();
    if nextest().is_none() {
        return run(&["test"], &filter);
    }
    // nextest runs no documentation examples. A failure of one kind does not hide the other's results.
    let examples = run(&["test", "--doc"], &filter);
    let profile = if args.full { "full" } else { "default" };
    let tests = run(&["nextest", "run", "--profile", profile, "--no-tests=warn"], &filter);
    examples.and(tests)
}

/// `cargo xtask bench`
pub(crate) fn bench(args: &BenchArgs) -> Result {
    let crates = workspace_root().join("crates");
    let mut packages = Vec::new();
    match &args.family {
        Some(family) => packages.push(format!("hk-{}", family.strip_prefix("hk-").unwrap_or(family))),
        None => {
            let entries =
                std::fs::read_dir(&crates).map_err(|e| Failure(format!("{}: {e}", crates.display())))?;
            let with = entries.flatten().filter(|e| e.path().join("benches").is_dir());
            packages.extend(with.map(|e| e.file_name().to_string_lossy().into_owned()));
            packages.sort();
        }
    }
    if let Some(missing) = packages.iter().find(|p| !crates.join(p).join("benches").is_dir()) {
        return Err(Failure(format!("`{missing}` has no benchmarks: no crates/{missing}/benches")));
    }
    if packages.is_empty() {
        return Err(Failure("no benchmarks: no crates/*/benches".into()));
    }
    setup::compiler(&args.setup)?;
    // `--benches` alone would have the unit tests of libraries run, too.
    for package in packages {
        for bench in bench_names(&crates.join(&package))? {
            let rest: Vec<&str> = args.args.iter().map(String::as_str).collect();
            execute(&mut cargo(
                &[&["bench", "--package", &package, "--bench", &bench, "--"], &rest[..]].concat(),
            ))?;
        }
    }
    Ok(())
}

/// The benchmarks of a crate, by file name.
fn bench_names(package: &Path) -> Result<Vec<String>> {
    let mut names: Vec<String> = std::fs::read_dir(package.join("benches"))?
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "rs"))
        .filter_map(|p| Some(p.file_stem()?.to_string_lossy().into_owned()))
        .collect();
    names.sort();
    Ok(names)
}
