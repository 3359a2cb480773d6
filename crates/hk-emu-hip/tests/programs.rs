//! Programs in C and HIP C++, compiled as users compile them, run on the emulator.
#![cfg(target_os = "linux")]

mod common;

use std::ffi::OsStr;

use common::{clang, code_object, printed, run, runtime, source};

const BOTH: &str = "gfx942,gfx950";

#[test]
#[ignore = "needs HIP's headers: apt-get install libamdhip64-dev, or HIP_PATH"]
fn a_c_program_of_the_module_api() {
    let include = ["HIP_PATH", "ROCM_PATH"]
        .iter()
        .filter_map(|name| std::env::var_os(name).map(std::path::PathBuf::from))
        .chain(["/opt/rocm".into(), "/usr".into()])
        .map(|root: std::path::PathBuf| root.join("include"))
        .find(|dir| dir.join("hip/driver_types.h").is_file())
        .expect("HIP's headers");
    let runtime = runtime();
    let dir = tempfile::tempdir().unwrap();
    for target in ["gfx942", "gfx950"] {
        code_object("kernels.hip", target, &dir.path().join(format!("{target}.co")));
    }
    let program = dir.path().join("module");
    let mut args: Vec<&OsStr> =
        ["-x", "c", "-std=c11", "-O1", "-Wall", "-Werror", "-isystem"].map(OsStr::new).into();
    let source = source("module.c");
    args.extend([include.as_os_str(), source.as_os_str(), OsStr::new("-L"), runtime.path().as_os_str()]);
    args.extend(["-lamdhip64", "-o"].map(OsStr::new));
    args.push(program.as_os_str());
    clang(&args);
    let out = printed(run(&program, &[dir.path().as_os_str()], BOTH, runtime.path()));
    let want = "gfx942:sramecc+:xnack- wave 64 CUs 304 LDS 65536\n\
                gfx950:sramecc+:xnack- wave 64 CUs 256 LDS 163840\nok\n";
    assert_eq!(out, want);
}

#[test]
fn a_program_with_kernels_in_it() {
    let runtime = runtime();
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("embedded");
    let mut args: Vec<&OsStr> =
        ["-x", "hip", "--offload-arch=gfx942", "--offload-arch=gfx950", "-O2", "-nogpulib", "-nogpuinc"]
            .map(OsStr::new)
            .into();
    let source = source("embedded.hip");
    args.extend([source.as_os_str(), OsStr::new("-L"), runtime.path().as_os_str()]);
    args.extend(["-lamdhip64", "-o"].map(OsStr::new));
    args.push(program.as_os_str());
    clang(&args);
    assert_eq!(printed(run(&program, &[], BOTH, runtime.path())), "ok on 2 devices\n");
    // Another order, more of a kind, and only one.
    assert_eq!(printed(run(&program, &[], "gfx950,gfx942,gfx950", runtime.path())), "ok on 3 devices\n");
    let none = run(&program, &[], "", runtime.path());
    assert!(String::from_utf8_lossy(&none.stdout).contains("hipGetDeviceCount(&devices) gives 100"));
    let wrong = run(&program, &[], "gfx90a", runtime.path());
    let report = String::from_utf8_lossy(&wrong.stderr);
    assert!(report.contains("`gfx90a` is neither gfx942 nor gfx950; there is no device"), "{report}");
}
