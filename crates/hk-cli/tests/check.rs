//! `hk check` runs a program with what its options say.

use std::fs;

use tempfile::TempDir;

use crate::program::{fails, hk};

/// A directory with a file that stands for the library: the programs here do not use it.
fn library() -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("libamdhip64.so"), "").unwrap();
    let path = dir.path().to_str().unwrap().to_owned();
    (dir, path)
}

/// The variables of a program that exits with 5.
fn variables(options: &[&str]) -> Vec<String> {
    let (_dir, path) = library();
    let script =
        "echo \"$HK_SANITIZE|$HK_SANITIZE_OPTIONS|$HK_EMU_ARCH|$HK_STATS|$LD_LIBRARY_PATH|$1\"; exit 5";
    let args = [&["check", "--library", &path], options, &["sh", "-c", script, "sh", "--tool"]].concat();
    let output = hk(&args);
    assert_eq!(output.status.code(), Some(5), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let fields: Vec<String> = text.trim_end().split('|').map(str::to_owned).collect();
    assert!(fields[4].starts_with(&path), "{fields:?}");
    assert_eq!(fields[5], "--tool", "an argument of the program");
    fields
}

#[test]
fn options_become_variables() {
    let fields = variables(&[]);
    assert_eq!((&*fields[0], &*fields[1]), ("all", ""));
    for (tool, checks) in [
        ("all", "all"),
        ("memcheck", "none"),
        ("racecheck", "lds,global,streams"),
        ("initcheck", "uninit"),
        ("synccheck", "barriers,waits,hazards"),
    ] {
        assert_eq!(variables(&["--tool", tool])[0], checks);
    }
    let fields = variables(&[
        "--checks=lds,uninit",
        "--kernel-name=add*",
        "--kernel-name=mul",
        "--suppressions=/tmp/known",
        "--error-exitcode=7",
        "--leak-check=full",
        "--show-backtrace=no",
        "--json=/tmp/reports",
        "--device=gfx950*2",
        "--stats",
    ]);
    assert_eq!(fields[0], "uninit,lds");
    let options = "kernel-name=add*,kernel-name=mul,suppressions=/tmp/known,error-exitcode=7,leak-check=full,\
                   backtrace=no,json=/tmp/reports";
    assert_eq!((&*fields[1], &*fields[2], &*fields[3]), (options, "gfx950*2", "1"));
    // Of the directory where it was started.
    let here = std::env::current_dir().unwrap().join("reports");
    assert_eq!(variables(&["--json=reports"])[1], format!("json={}", here.display()));
}

#[test]
fn wrong_options_are_refused() {
    let (dir, path) = library();
    let empty = dir.path().join("none");
    fails(&["check", "--library", empty.to_str().unwrap(), "true"], 1, "no libamdhip64.so");
    fails(&["check", "--library", &path, "--kernel-name=a,b", "true"], 1, "`a,b` has a comma");
    fails(&["check", "--library", &path, "/none/program"], 1, "/none/program");
    fails(&["check", "--library", &path], 2, "PROGRAM");
    fails(&["check", "--checks=races", "true"], 2, "races");
    fails(&["check", "--tool=memcheck", "--checks=lds", "true"], 2, "cannot be used with");
    fails(&["check", "--error-exitcode=0", "true"], 2, "--error-exitcode");
}
