//! A C program, compiled as users compile it, between emulated devices.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use hk_emu_hip as _; // its shared object is linked with
use tempfile::TempDir;

/// A shared object: cargo puts it beside the test binaries.
pub fn built(name: &str) -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name(name);
    assert!(path.is_file(), "{} is not built", path.display());
    path
}

/// A directory with the program and the libraries by the names under which it looks for them.
fn program() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, of) in [
        ("libamdhip64.so", "libhk_emu_hip.so"),
        ("libamdhip64.so.6", "libhk_emu_hip.so"),
        ("librccl.so", "libhk_emu_rccl.so"),
        ("librccl.so.1", "libhk_emu_rccl.so"),
    ] {
        symlink(built(of), dir.path().join(name)).unwrap();
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/ranks.c");
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-pthread", "-o"]).arg(dir.path().join("ranks"));
    cc.arg(source).arg("-L").arg(dir.path()).args(["-lrccl", "-lamdhip64"]);
    let output = cc.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    dir
}

fn run(dir: &TempDir, mode: &str, world: usize, timeout_ms: Option<u32>) -> (Output, String, String) {
    let mut command = Command::new(dir.path().join("ranks"));
    command.args([mode, &world.to_string()]).env("LD_LIBRARY_PATH", dir.path());
    command.env("HK_EMU_ARCH", vec!["gfx942"; world].join(","));
    if let Some(ms) = timeout_ms {
        command.env("HK_EMU_RCCL_TIMEOUT_MS", ms.to_string());
    }
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output, out, err)
}

#[test]
fn ranks_are_threads_devices_of_a_thread_or_processes() {
    let dir = program();
    for world in [1, 2, 4, 8] {
        for mode in ["threads", "group", "processes"] {
            let (output, out, err) = run(&dir, mode, world, None);
            assert!(output.status.success() && out == "ok\n", "{mode} of {world}: {out}{err}");
        }
    }
}

#[test]
fn ranks_that_differ_are_missing_or_abort() {
    let dir = program();
    let (output, out, err) = run(&dir, "mismatch", 2, None);
    assert!(output.status.success() && out == "ok\n", "{out}{err}");
    assert!(
        err.contains("all_reduce (sum) of 4 x F32 on rank 0, all_reduce (sum) of 5 x F32 on rank 1"),
        "{err}"
    );
    let (output, out, err) = run(&dir, "missing", 4, Some(200));
    assert!(output.status.success() && out == "ok\n", "{out}{err}");
    assert!(err.contains("ncclAllReduce: rank 3 did not call in time"), "{err}");
    let (output, out, err) = run(&dir, "abort", 2, None);
    assert!(output.status.success() && out == "ok\n", "{out}{err}");
}
