//! `cargo xtask test`, `cargo xtask bench`, and running cargo in general.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::tools::Need;
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
    /// The family to measure, such as `norm`. Default: all.
    #[arg(long)]
    family: Option<String>,
    /// The device, such as hip:0 or cuda:0. Default: HK_DEVICE, else emu:gfx942.
    #[arg(long, value_name = "SPEC")]
    device: Option<String>,
    /// Write the table as CSV.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write a plot as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Times of other implementations, as of `benches/peers/run.py`.
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// More options of `hk bench`, such as `--op rmsnorm`.
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

/// Builds targets of packages with the features that the whole workspace's tests use, so that nothing is built twice. Gives
/// the files that cargo names in its messages.
pub(crate) fn build(mut command: Command) -> Result<Vec<PathBuf>> {
    command.args(["--package", "xtask", "--message-format=json-render-diagnostics"]);
    say(&command);
    let output = command.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(Failure(format!("cargo build failed ({})", output.status)));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let artifacts = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let files = artifacts.filter_map(|a| a["filenames"].as_array().cloned()).flatten();
    Ok(files.filter_map(|f| f.as_str().map(PathBuf::from)).collect())
}

/// Builds `hk` with the caller's changes to the command; gives its path.
pub(crate) fn build_hk(change: impl FnOnce(&mut Command)) -> Result<PathBuf> {
    let mut command = cargo(&["build", "--package", "hk-cli", "--bin", "hk"]);
    change(&mut command);
    let hk = format!("hk{}", env::consts::EXE_SUFFIX);
    let files = build(command)?;
    let program = files.into_iter().find(|f| f.file_name().is_some_and(|name| *name == *hk));
    program.ok_or_else(|| Failure("cargo built no `hk`".into()))
}

/// Prints a command as a user would type it, and gives that text.
fn say(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy();
    let args = command.get_args().map(|a| a.to_string_lossy());
    let line = std::iter::once(program).chain(args).collect::<Vec<_>>().join(" ");
    eprintln!("$ {line}");
    line
}

/// Runs a command on this terminal after saying so.
pub(crate) fn execute(command: &mut Command) -> Result {
    let line = say(command);
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
    let llvm = setup::ready(&args.setup, Need::Tests)?.llvm_bin;
    let what = args.package.as_deref().map_or(vec!["--workspace"], |p| vec!["--package", p]);
    let run = |runner: &[&str], rest: &[&str]| {
        let mut command = cargo(&[runner, &what, rest].concat());
        command.envs(llvm.iter().map(|dir| ("HK_LLVM_BIN", dir)));
        command.envs(args.full.then_some(("HK_FULL", "1")));
        execute(&mut command)
    };
    let filter: Vec<&str> = args.filter.as_deref().into_iter().collect();
    if nextest().is_none() {
        return run(&["test", "--no-fail-fast"], &filter);
    }
    // nextest runs no documentation examples. A failure of one kind does not hide the other's results.
    let examples = run(&["test", "--doc"], &filter);
    let profile = if args.full { "full" } else { "default" };
    let tests = run(&["nextest", "run", "--profile", profile, "--no-tests=warn"], &filter);
    examples.and(tests)
}

/// Has `hk bench`, with the device's driver built in, measure. (`cargo bench` has criterion do so.)
pub(crate) fn bench(args: &BenchArgs) -> Result {
    let family = args.family.as_deref().map(|f| f.strip_prefix("hk-").unwrap_or(f));
    if let Some(family) = family
        && !workspace_root().join(format!("crates/hk-{family}/benches")).is_dir()
    {
        return Err(Failure(format!("`hk-{family}` has no benchmarks: no crates/hk-{family}/benches")));
    }
    setup::ready(&args.setup, Need::Build)?;
    let device = args.device.clone().or_else(|| env::var("HK_DEVICE").ok()).unwrap_or("emu:gfx942".into());
    let driver = device.split(':').next().filter(|d| ["hip", "cuda"].contains(d));
    let mut command = cargo(&["run", "--release", "--package", "hk-cli", "--bin", "hk"]);
    command.args(driver.iter().flat_map(|driver| ["--features", driver]));
    if driver == Some("cuda") && env::var_os("HK_TARGETS").is_none() {
        command.env("HK_TARGETS", "gfx942,gfx950,sm_90a");
    }
    command.args(["--", "bench", "--device", &device]);
    command.args(family.iter().flat_map(|family| ["--family", family]));
    for (option, file) in [("--csv", &args.csv), ("--plot", &args.plot), ("--peers", &args.peers)] {
        if let Some(file) = file {
            // cargo runs it in the workspace's directory.
            command.arg(option).arg(std::path::absolute(file)?);
        }
    }
    execute(command.args(&args.args))
}
