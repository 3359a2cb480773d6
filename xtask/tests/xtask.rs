//! The commands, run as a user runs them, on machines made for the test.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

/// A machine whose `PATH` holds only what a test puts there, and a workspace with kernels.
struct Machine {
    dir: TempDir,
}

const KERNEL: &str = "extern \"C\" __attribute__((global)) void NAME(int *x) { x[0] = 1; }\n";
const STACK: &str = "extern \"C\" __attribute__((global)) void on_stack(int *x, int n) {\n\
                     volatile int a[64]; for (int i = 0; i < 64; i++) a[i] = x[i]; x[0] = a[n]; }\n";

impl Machine {
    fn new() -> Machine {
        let m = Machine { dir: tempfile::tempdir().unwrap() };
        for dir in
            ["bin", "root/crates/hk-one/hip", "root/crates/hk-two/hip", "root/crates/hk-core/hip/include"]
        {
            fs::create_dir_all(m.path(dir)).unwrap();
        }
        m.write("root/crates/hk-one/hip/first.hip", &KERNEL.replace("NAME", "first"));
        m.write("root/crates/hk-two/hip/second.hip", &KERNEL.replace("NAME", "second"));
        m
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn script(&self, name: &str, text: &str) {
        self.write(&format!("bin/{name}"), &format!("#!/bin/sh\n{text}\n"));
        fs::set_permissions(self.path(&format!("bin/{name}")), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// apt and sudo that install by making the real compiler and LLVM tools appear in `bin`.
    fn apt(&self, candidate: u32) {
        let log = self.path("apt.log").display().to_string();
        let bin = self.path("bin").display().to_string();
        let real = hk_build::Search::from_env().find().unwrap_or_else(|e| panic!("{e}"));
        self.script("sudo", "exec \"$@\"");
        self.script("env", "exec /usr/bin/env \"$@\"");
        self.script(
            "apt-cache",
            &format!(
                "case $2 in *-{candidate}) echo '  Candidate: 1:1';; *) echo '  Candidate: (none)';; esac"
            ),
        );
        self.script(
            "apt-get",
            &format!(
                "echo \"$@\" >> {log}\n[ \"$1\" = install ] || exit 0\n\
                 printf '#!/bin/sh\\nexec {} \"$@\"\\n' > {bin}/clang++-{candidate}\n\
                 for t in llvm-mc llvm-objdump; do echo > {bin}/$t-{candidate}; done\n\
                 /bin/chmod +x {bin}/clang++-{candidate}",
                real.path.display()
            ),
        );
    }

    fn apt_log(&self) -> String {
        fs::read_to_string(self.path("apt.log")).unwrap_or_default()
    }

    /// With only `bin` on the `PATH`.
    fn xtask(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        for name in ["HK_CLANG", "HK_TARGETS", "HK_LLVM_BIN", "LD_LIBRARY_PATH"] {
            command.env_remove(name);
        }
        command.args(args).env("PATH", self.path("bin")).env("ROCM_PATH", self.path("rocm")).output().unwrap()
    }

    /// `build-all` of the test's workspace with the compiler of this machine.
    fn build_all(&self, args: &[&str]) -> Output {
        let root = self.path("root");
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command
            .args(["build-all", "--cold", "--root"])
            .arg(root)
            .args(args)
            .env_remove("HK_TARGETS")
            .output()
            .unwrap()
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn setup_installs_the_newest_compiler_after_saying_so() {
    for version in [22, 20] {
        let m = Machine::new();
        m.apt(version);
        let output = m.xtask(&["setup"]);
        let text = text(&output);
        assert!(output.status.success(), "{text}");
        let wanted =
            format!("install -y --no-install-recommends clang-{version} lld-{version} llvm-{version}");
        assert_eq!(m.apt_log(), format!("update\n{wanted}\n"));
        let (said, after) = text.split_once("compiler: ").unwrap();
        assert!(said.contains("installing: ") && said.contains(&wanted), "{text}");
        assert!(after.contains(&format!("bin/clang++-{version} (clang ")), "{text}");
        // Nothing is installed twice.
        let again = m.xtask(&["setup"]);
        assert!(again.status.success());
        assert_eq!(m.apt_log().lines().count(), 2);
    }
}

#[test]
fn no_install_refuses_with_the_remedy() {
    for task in [vec!["setup"], vec!["demo"], vec!["test"]] {
        let m = Machine::new();
        m.apt(22);
        let output = m.xtask(&[task.as_slice(), &["--no-install"]].concat());
        let text = text(&output);
        assert_eq!(output.status.code(), Some(1), "{task:?}: {text}");
        assert!(
            text.contains("apt-get install clang-22 lld-22 llvm-22") && text.contains("--no-install"),
            "{text}"
        );
        assert_eq!(m.apt_log(), "");
    }
}

#[test]
fn what_cannot_be_installed_is_explained() {
    // No apt at all.
    let m = Machine::new();
    let output = m.xtask(&["setup"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("this machine has no apt"), "{}", text(&output));
    // apt without any new enough clang.
    m.apt(15);
    let output = m.xtask(&["setup"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("llvm-toolchain-"), "{}", text(&output));
    assert_eq!(m.apt_log(), "update\n");
    // apt that fails: its own words.
    m.apt(22);
    m.script("apt-get", "echo 'E: Could not get lock' >&2; exit 100");
    let output = m.xtask(&["setup"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("E: Could not get lock"), "{}", text(&output));
    // A wrong HK_CLANG is the user's to correct.
    m.apt(22);
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    let output =
        command.arg("setup").env("PATH", m.path("bin")).env("HK_CLANG", "/nonexistent").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("correct HK_CLANG"));
    assert_eq!(m.apt_log(), "update\n", "nothing but the earlier update ran");
}

#[test]
fn doctor_says_what_is_missing() {
    let m = Machine::new();
    let output = m.xtask(&["doctor"]);
    let bare = text(&output);
    assert_eq!(output.status.code(), Some(1), "{bare}");
    for part in ["missing compiler", "apt-get install clang-22", "missing llvm tools"] {
        assert!(bare.contains(part), "`{part}`: {bare}");
    }
    m.apt(22);
    assert!(m.xtask(&["setup"]).status.success());
    let output = m.xtask(&["doctor"]);
    let whole = text(&output);
    assert!(output.status.success(), "{whole}");
    assert!(whole.contains("ok      compiler") && whole.contains("ok      llvm tools"), "{whole}");
}

#[test]
fn build_all_lists_every_kernel() {
    let m = Machine::new();
    let json = m.path("manifest.json");
    let output = m.build_all(&["--json", json.to_str().unwrap()]);
    let shown = text(&output);
    assert!(output.status.success(), "{shown}");
    for row in ["hk-one/hip/first.hip", "hk-two/hip/second.hip", "gfx942", "gfx950", "waves/SIMD"] {
        assert!(shown.contains(row), "`{row}`: {shown}");
    }
    assert!(shown.contains("4 objects (0 from the cache), 4 kernels"), "{shown}");
    let manifest: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert_eq!(manifest["objects"].as_array().unwrap().len(), 4);
    assert_eq!(manifest["objects"][0]["kernels"][0]["name"], "first");
    assert_eq!(manifest["objects"][0]["kernels"][0]["resources"]["occupancy"], 8);

    let output = m.build_all(&["--targets", "sm_90", "--json"]);
    assert!(output.status.success(), "{}", text(&output));
    let manifest: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(manifest["objects"][1]["target"], "sm_90");
    assert_eq!(manifest["objects"][1]["kernels"][0]["name"], "second");

    let output = m.build_all(&["--targets", "gfx90a"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("unknown target `gfx90a`"));
}

#[test]
fn build_all_fails_if_any_kernel_does() {
    let m = Machine::new();
    m.write("root/crates/hk-one/hip/stack.hip", STACK);
    m.write("root/crates/hk-two/hip/broken.hip", "?");
    let json = m.path("manifest.json");
    let output = m.build_all(&["--json", json.to_str().unwrap(), "--jobs", "2"]);
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    assert!(shown.contains("4 of 8 objects failed"), "{shown}");
    assert!(shown.contains("hk-one/hip/stack.hip for gfx950: kernel `on_stack` uses"), "{shown}");
    assert!(shown.contains("hk-two/hip/broken.hip for gfx942: the compiler failed"), "{shown}");
    // The others are built and listed.
    assert!(shown.contains("4 objects (0 from the cache), 4 kernels"), "{shown}");
    let manifest: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert_eq!(manifest["failures"].as_array().unwrap().len(), 4);

    fs::remove_dir_all(m.path("root/crates")).unwrap();
    fs::create_dir(m.path("root/crates")).unwrap();
    let output = m.build_all(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("no kernels"));
}

#[test]
fn wrong_usage_is_status_2() {
    let m = Machine::new();
    for args in [&["frobnicate"][..], &["build-all", "--jobs", "many"], &[]] {
        assert_eq!(m.xtask(args).status.code(), Some(2), "{args:?}");
    }
    let output = m.xtask(&["bench", "--family", "nonesuch", "--no-install"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("`hk-nonesuch` has no benchmarks"), "{}", text(&output));
}
