//! The compiler search, with compilers made for the test.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use hk_build::{CompilerKind, Search, Verdict};

/// A program that prints `version` for `--version`, and `lld` for the linker's path.
fn fake(dir: &Path, name: &str, version: &str, lld: &str) -> PathBuf {
    let path = dir.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let script = format!(
        "#!/bin/sh\ncase \"$1\" in\n--version) cat <<'END'\n{version}\nEND\n;;\n-print-prog-name=lld) echo '{lld}' ;;\n\
         *) exit 1 ;;\nesac\n"
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

struct Machine {
    dir: tempfile::TempDir,
    search: Search,
    lld: String,
}

impl Machine {
    fn new() -> Machine {
        let dir = tempfile::tempdir().unwrap();
        let lld = dir.path().join("lld");
        fs::write(&lld, "").unwrap();
        let search = Search {
            hk_clang: None,
            rocm: Some(dir.path().join("rocm")),
            path: vec![dir.path().join("bin")],
        };
        Machine { lld: lld.display().to_string(), dir, search }
    }

    fn add(&self, name: &str, version: &str) -> PathBuf {
        fake(self.dir.path(), name, version, &self.lld)
    }
}

fn clang(version: &str) -> String {
    format!("Debian clang version {version}\nTarget: x86_64-pc-linux-gnu\nInstalledDir: /usr/lib/llvm/bin")
}

#[test]
fn the_order_is_rocm_then_hipcc_then_newest_clang() {
    let m = Machine::new();
    let mut order = vec![m.add("bin/clang++", &clang("23.0.0"))];
    for name in ["bin/clang++-20", "bin/clang++-21", "bin/clang++-22"] {
        order.push(m.add(name, &clang("22.0.0")));
    }
    let hip = format!("HIP version: 7.1.0\nAMD {}", clang("20.0.0git"));
    for name in ["bin/hipcc", "rocm/bin/hipcc", "rocm/llvm/bin/clang++"] {
        order.push(m.add(name, &hip));
    }
    // Each new best one is taken away again, down to none.
    while let Some(best) = order.pop() {
        let found = m.search.find().unwrap();
        assert_eq!(found.path, best);
        let hipcc = best.ends_with("bin/hipcc");
        assert_eq!(found.kind == CompilerKind::Hipcc, hipcc || best.ends_with("llvm/bin/clang++"));
        assert!(!found.version_text.contains("InstalledDir"));
        fs::remove_file(best).unwrap();
    }
    let error = m.search.find().unwrap_err();
    assert!(error.found.is_empty() && !error.explicit);
    let text = error.to_string();
    assert!(
        text.contains("none found") && text.contains("apt-get install clang-22 lld-22 llvm-22"),
        "{text}"
    );
}

#[test]
fn what_is_too_old_or_unknown_is_passed_over_and_listed() {
    let m = Machine::new();
    let old = m.add("bin/hipcc", &format!("HIP version: 5.2.3\n{}", clang("15.0.6")));
    let gcc = m.add("bin/clang++-22", "g++ (Debian 12.2.0-14) 12.2.0\nCopyright");
    let apple = m.add("bin/clang++-21", "Apple clang version 21.0.0 (clang-2100.1.1)");
    let old_clang = m.add("bin/clang++", &clang("19.1.7"));
    let text = m.search.find().unwrap_err().to_string();
    for line in [
        format!("found {}: clang 15.0.6 is too old, 20 or newer is needed", old.display()),
        format!("found {}: unknown compiler: `g++ (Debian 12.2.0-14) 12.2.0`", gcc.display()),
        format!("found {}: unknown compiler: `Apple clang version 21.0.0 (clang-2100.1.1)`", apple.display()),
        format!("found {}: clang 19.1.7 is too old, 20 or newer is needed", old_clang.display()),
        "install one: apt-get install clang-22 lld-22 llvm-22, or set HK_CLANG to a clang++".into(),
    ] {
        assert!(text.contains(&line), "{line}\nis not in\n{text}");
    }
    let good = m.add("bin/clang++-20", &clang("20.1.0"));
    assert_eq!(m.search.find().unwrap().path, good);
    assert_eq!(m.search.candidates().len(), 5);
}

#[test]
fn a_compiler_without_lld_or_that_does_not_run_is_no_use() {
    let m = Machine::new();
    fake(m.dir.path(), "bin/clang++-22", &clang("22.1.8"), "lld");
    let text = m.search.find().unwrap_err().to_string();
    assert!(text.contains("clang 22.1.8 finds no lld: apt-get install lld-22"), "{text}");
    let path = m.dir.path().join("bin/clang++-22");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let text = m.search.find().unwrap_err().to_string();
    assert!(text.contains("cannot be run"), "{text}");
    assert!(matches!(m.search.candidates()[0].verdict, Verdict::Broken(_)));
}

#[test]
fn hk_clang_is_the_only_one_tried() {
    let mut m = Machine::new();
    m.add("bin/clang++-22", &clang("22.1.8"));
    let mine = m.add("mine/my-clang", &clang("21.0.0"));
    m.search.hk_clang = Some(mine.clone().into());
    assert_eq!(m.search.find().unwrap().path, mine);
    // A bare name is looked up on PATH.
    m.search.hk_clang = Some("clang++-22".into());
    assert_eq!(m.search.find().unwrap().path, m.dir.path().join("bin/clang++-22"));
    m.search.hk_clang = Some("/nonexistent/clang++".into());
    let error = m.search.find().unwrap_err();
    assert!(error.explicit);
    let text = error.to_string();
    assert!(text.contains("HK_CLANG=/nonexistent/clang++: cannot be run"), "{text}");
    assert!(text.ends_with("or correct HK_CLANG"), "{text}");
}
