//! Runs `hk` as a user does.

use std::process::{Command, Output};

pub fn hk(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hk")).args(args).output().unwrap()
}

/// What it prints where it succeeds.
#[track_caller]
pub fn text(args: &[&str]) -> String {
    let output = hk(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// It ends with `status`, and says `part`.
#[track_caller]
pub fn fails(args: &[&str], status: i32, part: &str) {
    let output = hk(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{error}");
    assert!(error.contains(part), "{error}");
}
