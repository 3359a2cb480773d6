//! Programs in C and HIP C++, compiled as users compile them, run on the emulator.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{clang, code_object, code_object_with, printed, run, run_with, runtime, source};

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
    compiled_with(name, &["gfx942", "gfx950"], dir, runtime, [&[], &[]])
}

/// The same for some targets, with options of both sides, and of the device's.
fn compiled_with(
    name: &str,
    targets: &[&'static str],
    dir: &Path,
    runtime: &Path,
    [options, device]: [&[&str]; 2],
) -> PathBuf {
    let objects: Vec<_> = targets
        .iter()
        .map(|&target| {
            let path = dir.join(format!("{target}.co"));
            code_object_with(name, target, &path, &[options, device].concat());
            (target, std::fs::read(path).unwrap())
        })
        .collect();
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
    args.extend(options.iter().map(OsStr::new));
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

#[test]
fn virtual_memory() {
    let (runtime, dir) = (runtime(), tempfile::tempdir().unwrap());
    let program = compiled("virtual_memory.hip", dir.path(), runtime.path());
    for devices in ["gfx942*2?memory=64M", "gfx950*2?memory=64M"] {
        let output = run(&program, &[], devices, runtime.path());
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{devices}");
    }
}

/// What `printf.hip` prints up to its own kernels; buffered `printf` gives 0.
fn greetings(counted: bool) -> String {
    let line = |place, block, thread, half, letter| {
        format!("{place}: block {block} of thread {thread:3}: {half:.3} {letter} 10000000000\n")
    };
    let lines = [
        line("first", 0, 0, 0.0, 'a'),
        line("first", 0, 40, 20.0, 'a'),
        line("elsewhere", 1, 0, 0.0, 'b'),
        line("elsewhere", 1, 40, 20.0, 'b'),
    ];
    let counts = lines.each_ref().map(|line| if counted { line.len().to_string() } else { "0".into() });
    format!("host\n{}a line\na line\n<7 ff>\nhost again: {}\n", lines.concat(), counts.join(" "))
}

#[test]
fn printf_and_assert_of_kernels() {
    let (runtime, dir) = (runtime(), tempfile::tempdir().unwrap());
    for (kind, counted) in [("hostcall", true), ("buffered", false)] {
        let kind = format!("-mprintf-kind={kind}");
        let program =
            compiled_with("printf.hip", &["gfx942", "gfx950"], dir.path(), runtime.path(), [&[], &[&kind]]);
        for device in ["gfx942", "gfx950"] {
            for aborts in [true, false] {
                let ends = if aborts { "abort" } else { "error" };
                let output = run_with(&program, &[], device, runtime.path(), &[("HK_EMU_ASSERT", ends)]);
                let (out, report) =
                    (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
                let rest = if aborts { "" } else { "hipErrorAssert\na line\na line\n" };
                assert_eq!(out, greetings(counted) + rest, "{kind} {device}: {report}");
                assert_eq!(output.status.success(), !aborts, "{report}");
                let lines = report
                    .lines()
                    .filter(|line| line.contains("check: Device-side assertion `thread < bound' failed."));
                assert_eq!(lines.count(), 2, "{report}");
                assert!(report.contains("trap 2"), "{report}");
            }
        }
    }
    // 65,536 messages of 92 bytes: 4 MiB, as in ROCm, have 45,590 of them.
    let program = dir.path().join("program");
    let output = printed(run(&program, &[OsStr::new("flood")], "gfx942", runtime.path()));
    assert_eq!(output.lines().filter(|line| line.starts_with("1 of many")).count(), 45_590);
    assert!(output.ends_with("19946 lost\n"), "{output}");
}

/// A program that is compiled with the ROCm of `ROCM_PATH`, for gfx942.
fn by_rocm(name: &str, dir: &Path, runtime: &Path, device: &[&str]) -> PathBuf {
    let root = PathBuf::from(std::env::var_os("ROCM_PATH").expect("ROCM_PATH"));
    let (path, headers) =
        (format!("--rocm-path={}", root.display()), format!("-I{}", root.join("headers").display()));
    // What newer compilers do not define, and the headers expect.
    let options =
        ["-DROCM", "-D__HIP_PLATFORM_AMD__", "-D__AMDGCN_WAVEFRONT_SIZE=64", "-DDEPRECATED(message)="];
    let options = [&options[..], &["-std=c++17", "--offload-inc", &path, &headers]].concat();
    let device = [device, &["-mcode-object-version=5", "--offloadlib"]].concat();
    compiled_with(name, &["gfx942"], dir, runtime, [&options, &device])
}

#[test]
#[ignore = "needs ROCm's headers and device libraries: ROCM_PATH, as validation/hip_tests.py build makes one"]
fn printf_and_assert_by_rocm() {
    let (runtime, dir) = (runtime(), tempfile::tempdir().unwrap());
    for (kind, counted) in [("hostcall", true), ("buffered", false)] {
        let kind = format!("-mprintf-kind={kind}");
        let program = by_rocm("printf.hip", dir.path(), runtime.path(), &[&kind]);
        let output = run_with(&program, &[], "gfx942", runtime.path(), &[("HK_EMU_ASSERT", "error")]);
        let (out, report) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(out, greetings(counted) + "hipErrorAssert\na line\na line\n", "{kind}: {report}");
        assert!(report.contains("Device-side assertion `thread < bound' failed."), "{report}");
    }
}

#[test]
#[ignore = "needs ROCm's headers and device libraries: ROCM_PATH, as validation/hip_tests.py build makes one"]
fn malloc_by_rocm() {
    let (runtime, dir) = (runtime(), tempfile::tempdir().unwrap());
    let program = by_rocm("malloc.hip", dir.path(), runtime.path(), &[]);
    assert_eq!(printed(run(&program, &[], "gfx942", runtime.path())), "0 wrong\n");
}

#[test]
fn programs_compiled_at_run_time() {
    let (runtime, dir) = (runtime(), tempfile::tempdir().unwrap());
    let program = dir.path().join("hiprtc");
    let mut args: Vec<&OsStr> = ["-x", "c", "-std=c11", "-O1", "-Wall", "-Werror"].map(OsStr::new).into();
    let source = source("hiprtc.c");
    args.extend([source.as_os_str(), OsStr::new("-L"), runtime.path().as_os_str()]);
    args.extend(["-lhiprtc", "-lamdhip64", "-o"].map(OsStr::new));
    args.push(program.as_os_str());
    clang(&args);
    for device in ["gfx942", "gfx950"] {
        let output = run_with(&program, &[], device, runtime.path(), &[("HK_EMU_ASSERT", "error")]);
        let (out, report) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let want = "_Z3addIfLi3EEvPT_PKS0_i _Z3addIiLi4EEvPT_PKS0_i _ZN3one4lastEP6float4 count scale\n\
                    60 of many\nhipErrorAssert\n";
        assert_eq!(out, want, "{device}: {report}");
        let failed = "kernels.cu:16: Device-side assertion `threadIdx.x % 64 < n' failed.";
        assert_eq!(report.lines().filter(|line| *line == failed).count(), 4, "{report}");
    }
}

#[test]
fn reports_as_options_say() {
    let (runtime, dir) = (runtime(), tempfile::tempdir().unwrap());
    let targets = &["gfx942", "gfx950"];
    let program = compiled_with("sanitize.hip", targets, dir.path(), runtime.path(), [&["-g"], &[]]);
    let json = dir.path().join("report.jsonl");
    let go = |options: &str| {
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", runtime.path()).env("HK_EMU_ARCH", "gfx942").env("HK_SANITIZE", "lds");
        let output = command.env("HK_SANITIZE_OPTIONS", options).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, report) = go(&format!("error-exitcode=9,leak-check=full,json={}", json.display()));
    assert_eq!((code, &*out), (Some(9), "hipErrorLaunchFailure\n"), "{report}");
    for want in [
        "lds: the write of a byte of LDS races with a read by wave 0",
        "launched by hipLaunchKernel\n",
        "sanitize.hip:36:5)",
        "from main (",
        "leak of 1000 bytes at 0x",
        "device 0, hipMalloc\n  allocated by hipMalloc\n",
        "leak of 64 bytes at 0x",
        "3 errors: exit code 9",
    ] {
        assert!(report.contains(want), "{want}: {report}");
    }
    let lines = std::fs::read_to_string(&json).unwrap();
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(
        (&lines[0]["fault"]["kind"], &lines[0]["fault"]["check"]),
        (&"sanitizer".into(), &"lds".into())
    );
    assert_eq!(lines[0]["backtrace"][0], "hipLaunchKernel");
    assert!(lines.iter().any(|line| line["leak"]["bytes"] == 1000));

    let rules = dir.path().join("suppressions");
    std::fs::write(&rules, "# known\nlds: *racy*\n").unwrap();
    for clean in [
        "kernel-name=*clean*,error-exitcode=9".to_owned(),
        format!("suppressions={},error-exitcode=9", rules.display()),
    ] {
        let (code, out, report) = go(&clean);
        assert_eq!((code, &*out, &*report), (Some(0), "hipSuccess\n", ""), "{clean}");
    }
    let mut stats = Command::new(&program);
    stats.env("LD_LIBRARY_PATH", runtime.path()).env("HK_EMU_ARCH", "gfx942").env("HK_STATS", "1");
    let report = String::from_utf8_lossy(&stats.output().unwrap().stderr).into_owned();
    assert!(report.contains("\n| 0 | _Z5cleanPi | 1 | 1 | 2 | "), "{report}");
    let (_, _, report) = go("backtrace=no");
    assert!(report.contains("lds: ") && !report.contains("launched by"), "{report}");
    let (_, _, report) = go("error-exitcode=0");
    assert!(
        report.contains("HK_SANITIZE_OPTIONS: `error-exitcode=0`, expected 1 to 255; there is no device"),
        "{report}"
    );
}

/// A name and a value of each line of `time.hip`.
fn times(out: &str) -> std::collections::HashMap<&str, &str> {
    out.lines().filter_map(|line| line.rsplit_once(' ')).collect()
}

#[test]
fn events_have_modelled_time_on_a_device_with_a_part() {
    let (runtime, dir) = (runtime(), tempfile::tempdir().unwrap());
    let program = compiled("time.hip", dir.path(), runtime.path());
    for (device, cus) in [("gfx942?time=mi308x", 80), ("gfx950?time=mi355x", 256)] {
        let device = format!("{device}&budget=100000");
        let output = run(&program, &[], &device, runtime.path());
        let (out, report) = (printed(output.clone()), String::from_utf8_lossy(&output.stderr));
        if cus == 80 {
            let again = printed(run(&program, &[], &device, runtime.path()));
            assert_eq!(again, out, "threads of the host do not matter");
        }
        let all = times(&out);
        let us = |name: &str| all[name].parse::<f64>().unwrap_or_else(|_| panic!("{name}: {out}"));
        let same =
            |name: &str, want: f64| assert!((us(name) - want).abs() < 0.01, "{name} is not {want}: {out}");
        same("cus", f64::from(cus));
        let launch = us("launch");
        // 32 MiB at no more than the memory's 8 TB/s.
        assert!((4.0..100.0).contains(&launch), "{out}");
        for (name, launches) in [("again", 1.0), ("two", 2.0), ("behind blocking", 3.0), ("beside", 1.0)] {
            same(name, launches * launch);
        }
        for (name, launches) in [("waits", 2.0), ("graph", 2.0), ("not behind it", 1.0)] {
            same(name, launches * launch);
        }
        same("nothing", 0.0);
        same("upload", 0.0);
        assert!(us("quarter") < 0.6 * launch && us("fill") < us("copy"), "{out}");
        assert_eq!(all["chain"], "hipErrorNotSupported", "{report}");
        let part = device.split_once('=').unwrap().1.split('&').next().unwrap();
        let says = format!("times of events of device 0 are those of {part} (modelled, error ");
        assert_eq!(report.matches(&says).count(), 1, "{report}");
        assert!(report.contains("hipEventElapsedTime: no modelled time: _Z5chainPi: "), "{report}");
    }

    let host = run(&program, &[], "gfx942", runtime.path());
    let (out, report) = (printed(host.clone()), String::from_utf8_lossy(&host.stderr));
    assert!(times(&out)["chain"].parse::<f64>().unwrap() > 0.0, "{out}");
    assert_eq!(report.matches("times of events of device 0 are the host's").count(), 1, "{report}");
    for (device, wants) in
        [("gfx942?time=mi355x", "mi300x, mi308x, mi325x"), ("gfx950?time=", "mi350x, mi355x")]
    {
        let wrong = run(&program, &[], device, runtime.path());
        let report = String::from_utf8_lossy(&wrong.stderr);
        assert!(
            report.contains(&format!("is not time=PART with one of {wants}; there is no device")),
            "{report}"
        );
    }
}
