//! Compiles the test kernels.

use std::path::Path;
use std::process::Command;

/// The code object of `tests/kernels/<file>` for `arch`.
///
/// Panics with the remedy where there is no compiler: without one these tests would prove nothing.
pub fn compile(file: &str, arch: hk_codeobj::Arch, flags: &[&str]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels").join(file);
    let out = dir.path().join("out.co");
    let compilers = [std::env::var("HK_CLANG").ok(), Some("clang++-22".into()), Some("clang++-21".into())];
    for compiler in compilers.into_iter().flatten().chain(["clang++-20".into(), "clang++".into()]) {
        let mut command = Command::new(&compiler);
        command.args([
            "-x",
            "hip",
            "--offload-device-only",
            "--no-gpu-bundle-output",
            "-nogpulib",
            "-nogpuinc",
        ]);
        command.args(["-std=c++20", "-O3", "-gline-tables-only"]).arg(format!("--offload-arch={arch}"));
        match command.args(flags).arg(&source).arg("-o").arg(&out).output() {
            Ok(output) if output.status.success() => return std::fs::read(out).unwrap(),
            Ok(output) => panic!("{compiler}: {}", String::from_utf8_lossy(&output.stderr)),
            Err(_) => continue,
        }
    }
    panic!(
        "no clang++ from version 20 to 22 was found: run `apt-get install clang-22 lld-22`, or set HK_CLANG"
    )
}
