//! The HIP runtime on the emulator: a directory to link and run HIP programs with, and the kernels' tests through it.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::run::{self, cargo, execute, workspace_root};
use crate::tools::Need;
use crate::{Failure, Result, setup};

/// Options of `hip-runtime`.
#[derive(clap::Args)]
pub(crate) struct RuntimeArgs {
    /// Where to put it. Default: `target/hip`.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Build it optimised.
    #[arg(long)]
    release: bool,
}

/// Options of `test-hip`.
#[derive(clap::Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    setup: setup::Args,
    /// Random cases of each property.
    #[arg(long, default_value_t = 3)]
    cases: u32,
    /// Only tests whose name contains this.
    filter: Option<String>,
}

/// The libraries, each with the names by which linkers and programs of ROCm 5, 6 and 7 look for it.
const LIBRARIES: [(&str, &[&str]); 2] = [
    (
        "libhk_emu_hip.so",
        &[
            "libamdhip64.so",
            "libamdhip64.so.5",
            "libamdhip64.so.6",
            "libamdhip64.so.7",
            "libhiprtc.so",
            "libhiprtc.so.5",
            "libhiprtc.so.6",
            "libhiprtc.so.7",
        ],
    ),
    ("libhk_emu_rccl.so", &["librccl.so", "librccl.so.1"]),
];

/// Build scripts look for this file to know that a directory has HIP.
const HEADER: &str = "#error \"this directory has the HIP runtime of hk-emu and no headers: those are ROCm's, or in \
                      Debian's package libamdhip64-dev\"\n";

/// `cargo xtask hip-runtime`
pub(crate) fn runtime(args: &RuntimeArgs) -> Result {
    let dir = install(args, &[])?;
    println!("the HIP runtime and RCCL on the emulator are in {0}\n", dir.display());
    println!("to run a HIP program on emulated GPUs:\n  export LD_LIBRARY_PATH={}/lib", dir.display());
    println!("  export HK_EMU_ARCH=gfx942,gfx950   # one device each; gfx942 alone if it is not set");
    println!("to link one, or crates that use HIP:\n  export HIP_PATH={}", dir.display());
    Ok(())
}

/// Builds the libraries and lays out the directory; gives its absolute path. `others` are packages to build along.
fn install(args: &RuntimeArgs, others: &[&str]) -> Result<PathBuf> {
    let libraries = build(args.release, others)?;
    let dir = args.dir.clone().unwrap_or_else(|| workspace_root().join("target/hip"));
    fs::create_dir_all(dir.join("lib"))?;
    fs::create_dir_all(dir.join("include/hip"))?;
    let dir = dir.canonicalize()?;
    for (library, names) in libraries {
        for name in names {
            link(&library, &dir.join("lib").join(name))?;
        }
    }
    let header = dir.join("include/hip/hip_runtime_api.h");
    // An unchanged file keeps its time, by which cargo decides what to build again.
    if fs::read(&header).ok().as_deref() != Some(HEADER.as_bytes()) {
        fs::write(header, HEADER)?;
    }
    Ok(dir)
}

/// Builds the shared objects, and gives each with its names; cargo says where they are.
fn build(release: bool, others: &[&str]) -> Result<Vec<(PathBuf, &'static [&'static str])>> {
    let mut command = cargo(&["build", "--package", "hk-emu-hip", "--package", "hk-emu-rccl"]);
    for package in others {
        command.args(["--package", package]);
    }
    command.args(release.then_some("--release"));
    let files = run::build(command)?;
    let built = |&(object, names): &(&str, &'static [&'static str])| {
        let library = files.iter().find(|f| f.file_name().is_some_and(|name| name == object)).cloned();
        let library = library.ok_or_else(|| Failure(format!("cargo built no {object}: this is for Linux")));
        library.map(|library| (library, names))
    };
    LIBRARIES.iter().map(built).collect()
}

#[cfg(unix)]
fn link(library: &Path, name: &Path) -> Result {
    match fs::remove_file(name) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => Ok(std::os::unix::fs::symlink(library, name)?),
    }
}

#[cfg(not(unix))]
fn link(_: &Path, _: &Path) -> Result {
    Err(Failure("the HIP runtime on the emulator is for Linux".into()))
}

/// `cargo xtask test-hip`
pub(crate) fn test(args: &TestArgs) -> Result {
    setup::ready(&args.setup, Need::Build)?;
    // Together with `hk`, the emulator is built with the features that it has there, and not once more.
    let dir = install(&RuntimeArgs { dir: None, release: false }, &["hk-cli"])?;
    // The features and packages of the drivers' tests in `.ci/run`: built once.
    let packages =
        ["--package", "hk-norm", "--package", "hk-core", "--package", "hk-comm", "--package", "xtask"];
    let features = "hk-core/hip,hk-core/cuda,hk-comm/hip,hk-comm/cuda";
    let mut command = cargo(&["test", "--features", features, "--test", "tests"]);
    command.args(packages).args(["--", "rmsnorm::", "rccl_gpu::", "--skip", "all_reduce_rmsnorm::"]);
    command.args(args.filter.as_deref());
    command.env("HIP_PATH", &dir).env("LD_LIBRARY_PATH", search_path(&dir.join("lib"))?);
    command.env("HK_EMU_ARCH", "gfx942,gfx950").env("HK_TEST_DEVICES", "emu:gfx942,emu:gfx950,hip:0,hip:1");
    command.env("HK_CASES", args.cases.to_string());
    execute(&mut command)
}

/// `LD_LIBRARY_PATH` with a directory in front.
fn search_path(first: &Path) -> Result<std::ffi::OsString> {
    let rest = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    Ok(env::join_paths(std::iter::once(first.to_owned()).chain(env::split_paths(&rest)))?)
}
