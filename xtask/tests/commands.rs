//! The commands, run as a user runs them, on machines made for the test.
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
        for package in ["hk-one", "hk-two", "hk-core"] {
            m.write(&format!("root/crates/{package}/Cargo.toml"), "[dependencies]\n");
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
                 for t in llvm-mc llvm-objdump; do printf '#!/bin/sh\\necho 22\\n' > {bin}/$t-{candidate}; done\n\
                 /bin/chmod +x {bin}/*-{candidate}",
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
        let packages = ["clang", "lld", "llvm", "clang-tools"].map(|name| format!("{name}-{version}"));
        let wanted = format!("install -y --no-install-recommends {}", packages.join(" "));
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
fn tests_install_what_a_machine_with_a_compiler_lacks() {
    let m = Machine::new();
    m.apt(22);
    assert!(m.xtask(&["setup"]).status.success());
    fs::remove_file(m.path("apt.log")).unwrap();
    // A clang without clang-tools-22: it names the program that it would run, and finds none.
    let real = hk_build::Search::from_env().find().unwrap_or_else(|e| panic!("{e}"));
    let bare = "clang-offload-bundler";
    m.script(
        "clang++-22",
        &format!("case $1 in *={bare}) echo {bare};; *) exec {} \"$@\";; esac", real.path.display()),
    );
    let refused = m.xtask(&["setup", "--no-install"]);
    let said = text(&refused);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(
        said.contains("clang-offload-bundler is missing, needed by clang++ in hk-emu-hip's tests"),
        "{said}"
    );
    assert!(said.contains("apt-get install clang-tools-22"), "{said}");
    let output = m.xtask(&["setup"]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(m.apt_log(), "update\ninstall -y --no-install-recommends clang-tools-22\n");
}

#[test]
fn doctor_says_what_is_missing() {
    let m = Machine::new();
    let output = m.xtask(&["doctor"]);
    let bare = text(&output);
    assert_eq!(output.status.code(), Some(1), "{bare}");
    for part in
        ["missing compiler", "apt-get install clang-22", "missing llvm-mc", "missing clang-offload-bundler"]
    {
        assert!(bare.contains(part), "`{part}`: {bare}");
    }
    m.apt(22);
    assert!(m.xtask(&["setup"]).status.success());
    let output = m.xtask(&["doctor"]);
    let whole = text(&output);
    assert!(output.status.success(), "{whole}");
    for part in ["compiler", "clang++", "lld", "llvm-mc", "llvm-objdump", "clang-offload-bundler"] {
        assert!(whole.contains(&format!("ok      {part} ")), "`{part}`: {whole}");
    }
    // A program that is there and does not run is missing.
    m.script("llvm-mc-22", "echo 'cannot open shared object file' >&2; exit 127");
    let output = m.xtask(&["doctor"]);
    let broken = text(&output);
    assert!(
        broken.contains("missing llvm-mc") && broken.contains("cannot open shared object file"),
        "{broken}"
    );
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

/// Errors in templates are found where kernels make instances of them.
#[test]
fn build_all_checks_sources_without_objects() {
    let m = Machine::new();
    let output = m.build_all(&["--targets", "sm_90a,gfx950", "--check"]);
    assert!(
        output.status.success() && text(&output).contains("4 sources by targets are right"),
        "{}",
        text(&output)
    );
    let bad = "template <typename T> struct Of { static __attribute__((device)) void run(T *p) { p->none = 1; } };\n\
               extern \"C\" __attribute__((global)) void bad(float *p) { Of<float>::run(p); }\n";
    m.write("root/crates/hk-two/hip/bad.hip", bad);
    let output = m.build_all(&["--targets", "sm_90a", "--check"]);
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    for part in ["1 of 3 sources failed", "hk-two/hip/bad.hip", "member reference base type 'float'"] {
        assert!(shown.contains(part), "`{part}`: {shown}");
    }
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

/// A source with a typed entry point, as `HK_ENTRY` declares it.
const TYPED: &str = "struct Params { float *x; float scale; unsigned n; };\n\
                     #if defined(HK_DESCRIBE)\n\
                     struct hk_entry_NAME { Params params; }; static_assert(sizeof(hk_entry_NAME) == 16);\n\
                     #else\nextern \"C\" __attribute__((global)) void NAME(Params p) { p.x[0] = p.scale; }\n#endif\n";

#[test]
fn a_stale_interface_file_is_named() {
    let m = Machine::new();
    m.write("root/crates/hk-one/hip/first.hip", &TYPED.replace("NAME", "first"));
    let interface = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.args(["interface", "--root"]).arg(m.path("root")).args(args).output().unwrap()
    };
    // hk-two has no typed entry point, so it needs no file.
    let missing = interface(&[]);
    assert_eq!(missing.status.code(), Some(1));
    let said = text(&missing);
    assert!(said.contains("hk-one: crates/hk-one/hip/kernels.json is stale in 2 places: first, "), "{said}");
    assert!(said.contains("cargo xtask interface --update") && !said.contains("hk-two"), "{said}");
    assert_eq!(text(&interface(&["--update"])), "wrote crates/hk-one/hip/kernels.json\n");
    assert!(!m.path("root/crates/hk-two/hip/kernels.json").exists());
    let current = interface(&[]);
    assert!(current.status.success(), "{}", text(&current));

    // Two fields of one size change places: nothing but the file tells.
    let swapped = TYPED.replace("float scale; unsigned n;", "unsigned n; float scale;");
    m.write("root/crates/hk-one/hip/first.hip", &swapped.replace("NAME", "first"));
    let stale = text(&interface(&[]));
    assert!(stale.contains("is stale in 1 places: first::Params"), "{stale}");
    m.write("root/crates/hk-one/hip/kernels.json", "?");
    assert!(text(&interface(&[])).contains("kernels.json: expected value"), "{}", text(&interface(&[])));
}

#[test]
fn interface_files_of_this_workspace_are_current() {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("interface").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
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

#[test]
fn fit_timing_hands_its_files_on_by_absolute_paths() {
    let m = Machine::new();
    fs::create_dir(m.path("objects")).unwrap();
    m.script("cargo", "echo \"$@\"");
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.arg("fit-timing").args(args).env("CARGO", m.path("bin/cargo"));
        command.current_dir(m.dir.path()).output().unwrap()
    };
    let output = run(&["--objects", "objects", "--cases", "cases.csv", "--folds", "3", "--update"]);
    let dir = fs::canonicalize(m.dir.path()).unwrap();
    let want = format!(
        "run --package hk-time --bin fit-timing -- --objects {0}/objects --cases {0}/cases.csv --folds 3 --update\n",
        dir.display()
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout), want, "{}", text(&output));
    let missing = run(&["--objects", "none"]);
    assert!(!missing.status.success() && text(&missing).contains("--objects: no directory none"));
    assert!(
        !run(&["--objects", "objects", "--folds", "1"]).status.success(),
        "one fold holds out everything"
    );
}
