//! What the tests share: the runtime as programs find it, and compilers.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::ffi::OsStr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use hk_emu_hip as _; // its symbols are called
use tempfile::TempDir;

/// The shared object: cargo puts it beside the test binaries.
pub fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let path = exe.with_file_name("libhk_emu_hip.so");
    assert!(path.is_file(), "{} is not built", path.display());
    path
}

/// A directory with the names by which programs of ROCm 5 to 7, and linkers, look for the runtime.
pub fn runtime() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let names =
        ["libamdhip64.so", "libamdhip64.so.5", "libamdhip64.so.6", "libamdhip64.so.7", "libhiprtc.so"];
    for name in names {
        symlink(library(), dir.path().join(name)).unwrap();
    }
    dir
}

/// A test's source file.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name)
}

/// `HK_CLANG`, then the versioned names of Debian and Ubuntu, then the plain name.
pub fn clang(args: &[&OsStr]) {
    let mut clang = match std::env::var_os("HK_CLANG") {
        Some(path) => Command::new(path),
        None => {
            let names = ["clang++-22", "clang++-21", "clang++-20", "clang++"];
            let found = names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok());
            Command::new(
                found.expect("these tests compile: apt-get install clang-22 lld-22, or set HK_CLANG"),
            )
        }
    };
    let output = clang.args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Compiles a file of kernels to a code object.
pub fn code_object(name: &str, target: &str, to: &Path) {
    code_object_with(name, target, to, &[]);
}

/// The same with options.
pub fn code_object_with(name: &str, target: &str, to: &Path, options: &[&str]) {
    let arch = format!("--offload-arch={target}");
    let mut args: Vec<&OsStr> = ["-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-O2"]
        .into_iter()
        .chain([arch.as_str(), "-nogpulib", "-nogpuinc", "-o"])
        .map(OsStr::new)
        .collect();
    let source = source(name);
    args.extend([to.as_os_str(), source.as_os_str()]);
    args.extend(options.iter().map(OsStr::new));
    clang(&args);
}

/// Runs a program on the emulated devices.
pub fn run(program: &Path, args: &[&OsStr], devices: &str, runtime: &Path) -> Output {
    run_with(program, args, devices, runtime, &[])
}

/// As [`run`], with more variables.
pub fn run_with(
    program: &Path,
    args: &[&OsStr],
    devices: &str,
    runtime: &Path,
    variables: &[(&str, &str)],
) -> Output {
    let mut command = Command::new(program);
    command.args(args).env("LD_LIBRARY_PATH", runtime).env("HK_EMU_ARCH", devices);
    command.envs(variables.iter().copied()).output().unwrap()
}

/// What a run printed, if it was one without errors.
pub fn printed(output: Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}
