//! Programs in C and HIP C++, compiled as users compile them, run on the emulator.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::common::{clang, code_object, printed, run, runtime, source};

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

/// What `clang-offload-bundler` makes of code objects: the driver's format of a program's device code. Debian has the tool
/// in a package of its own.
fn fat_binary(objects: &[(&str, Vec<u8>)]) -> Vec<u8> {
    const PAGE: usize = 4096;
    let host = ("host-x86_64-unknown-linux-gnu-".to_owned(), &[][..]);
    let objects =
        objects.iter().map(|(target, object)| (format!("hipv4-amdgcn-amd-amdhsa--{target}"), &object[..]));
    let entries: Vec<(String, &[u8])> = std::iter::once(host).chain(objects).collect();
    let mut bytes = b"__CLANG_OFFLOAD_BUNDLE__".to_vec();
    bytes.extend((entries.len() as u64).to_le_bytes());
    let mut offset = PAGE;
    for (id, object) in &entries {
        for value in [offset, object.len(), id.len()] {
            bytes.extend((value as u64).to_le_bytes());
        }
        bytes.extend(id.as_bytes());
        offset += object.len().next_multiple_of(PAGE);
    }
    for (_, object) in &entries {
        bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
        bytes.extend(*object);
    }
    bytes
}

/// Compiles a program with kernels for both targets, as the driver does, into `dir`.
fn compiled(name: &str, dir: &Path, runtime: &Path) -> PathBuf {
    let objects = ["gfx942", "gfx950"].map(|target| {
        let path = dir.join(format!("{target}.co"));
        code_object(name, target, &path);
        (target, std::fs::read(path).unwrap())
    });
    let bundle = dir.join("bundle.hipfb");
    std::fs::write(&bundle, fat_binary(&objects)).unwrap();
    let program = dir.join("program");
    // As the driver compiles the host's side, once it has the bundle.
    let mut args: Vec<&OsStr> =
        ["-x", "hip", "--offload-host-only", "-O2", "-nogpulib", "-nogpuinc", "-Xclang"]
            .map(OsStr::new)
            .into();
    args.extend(["-fcuda-include-gpubinary", "-Xclang"].map(OsStr::new));
    let source = source(name);
    args.extend([bundle.as_os_str(), source.as_os_str(), OsStr::new("-L"), runtime.as_os_str()]);
    args.extend(["-lamdhip64", "-o"].map(OsStr::new));
    args.push(program.as_os_str());
    clang(&args);
    program
}

#[test]
fn a_program_with_kernels_in_it() {
    let (runtime, dir) = (runtime(), tempfile::tempdir().unwrap());
    let program = compiled("embedded.hip", dir.path(), runtime.path());
    assert_eq!(printed(run(&program, &[], BOTH, runtime.path())), "ok on 2 devices\n");
    // Another order, more of a kind, and only one.
    assert_eq!(printed(run(&program, &[], "gfx950,gfx942,gfx950", runtime.path())), "ok on 3 devices\n");
    let none = run(&program, &[], "", runtime.path());
    assert!(String::from_utf8_lossy(&none.stdout).contains("hipGetDeviceCount(&devices) gives 100"));
    let wrong = run(&program, &[], "gfx90a", runtime.path());
    let report = String::from_utf8_lossy(&wrong.stderr);
    assert!(report.contains("`gfx90a` is neither gfx942 nor gfx950; there is no device"), "{report}");
}

#[test]
fn graphs() {
    let (runtime, dir) = (runtime(), tempfile::tempdir().unwrap());
    let program = compiled("graphs.hip", dir.path(), runtime.path());
    for device in ["gfx942", "gfx950"] {
        let output = run(&program, &[], device, runtime.path());
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{device}");
    }
}
