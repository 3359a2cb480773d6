//! The driver for AMD GPUs, on a runtime that computes on the host (`hip/fake_hip.c`) in place of ROCm's. Each test is
//! a process of its own that finds that runtime first.
#![cfg(all(feature = "hip", target_os = "linux"))]

use crate::common::{self, Params};
use hk_core::{Arch, Device, Error, KernelRef, LaunchConfig};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

/// Where the runtime lies.
static RUNTIME: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-hip");
    std::fs::create_dir_all(&dir).unwrap();
    // Test processes may do this at the same time: the name appears with the finished file.
    let unfinished = dir.join(std::process::id().to_string());
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let compiler =
        cc::Build::new().cargo_metadata(false).host(&host).target(&host).opt_level(1).get_compiler();
    let status = compiler
        .to_command()
        .args(["-shared", "-fPIC", "-o"])
        .arg(&unfinished)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hip/fake_hip.c"))
        .status()
        .unwrap();
    assert!(status.success());
    // What this was linked with: Debian's package, ROCm's, or the emulator's.
    for library in ["libamdhip64.so.5", "libamdhip64.so.6", "libamdhip64.so.7"] {
        let link = dir.join(format!("{}-{library}", std::process::id()));
        std::fs::hard_link(&unfinished, &link).unwrap();
        std::fs::rename(link, dir.join(library)).unwrap();
    }
    std::fs::remove_file(unfinished).unwrap();
    dir
});

/// Runs the ignored test `name` in a process with this environment; gives what it prints to stderr.
fn run(name: &str, env: &[(&str, &str)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let name = format!("hip_driver::{name}");
    child.args(["--exact", &name, "--ignored", "--nocapture"]);
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    child.env("LD_LIBRARY_PATH", format!("{}:{path}", RUNTIME.display()));
    child.env_remove("HK_DEVICE").envs(env.iter().copied());
    let output = child.output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("1 passed"), "no test `{name}`");
    text(&output.stderr)
}

#[test]
fn everything_goes_through_and_nothing_is_left() {
    for pools in ["0", "1"] {
        let log = run("child_uses_everything", &[("FAKE_HIP_POOLS", pools)]);
        assert!(log.contains("fake hip: 0 alive"), "{log}");
    }
}

#[test]
#[ignore = "a child process"]
fn child_uses_everything() {
    let device = Device::open_default().unwrap();
    let info = device.info();
    assert_eq!((info.spec.as_str(), info.name.as_str(), info.driver), ("hip:0", "Fake Instinct 0", "hip"));
    assert_eq!((info.arch, info.compute_units, info.wave_size), (Arch::Gfx942, 304, 64));
    assert_eq!((info.lds_per_workgroup, info.max_threads_per_workgroup), (65_536, 1024));
    assert_eq!((info.max_grid, info.total_memory_bytes), ([0x7fff_ffff, 65_536, 65_536], 192 << 30));

    let (stream, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let x = stream.upload(&[1f32, 2.0, 3.0]).unwrap();
    let mut y = other.alloc_zeroed::<f32>(3).unwrap();
    let kernel = stream.kernel(KernelRef::new(common::compile("probe"), "scale")).unwrap();
    let start = stream.record().unwrap();
    let mut view = y.view_mut([3]).unwrap();
    let mut launch = stream.launch("scale");
    let x_global = launch.input("x", &x.view([3]).unwrap()).unwrap();
    let params = Params { x: x_global, y: launch.output("y", &mut view).unwrap(), a: 2.0, pad: 0 };
    // SAFETY: both tensors have the three elements that the kernel touches.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(1), &params) }.unwrap();
    let end = stream.record().unwrap();
    other.wait(&end).unwrap();
    assert_eq!(other.download(&y).unwrap(), [2.0, 4.0, 6.0]);
    assert_eq!(end.query(), Ok(true));
    assert!(end.elapsed_since(&start).unwrap() >= Duration::from_millis(1));
    assert!(matches!(start.elapsed_since(&end), Err(Error::Argument { .. })));

    stream.fill(&mut y, 1.5).unwrap();
    assert_eq!(stream.download(&y).unwrap(), [1.5; 3]);
    stream.copy(&x, &mut y).unwrap();
    assert_eq!(stream.download(&y).unwrap(), [1.0, 2.0, 3.0]);
    let mut z = stream.alloc_zeroed::<f32>(3).unwrap();
    let graph = stream.capture(|| stream.copy(&x, &mut z)).unwrap();
    assert_eq!(stream.download(&z).unwrap(), [0.0; 3]);
    // SAFETY: x and z are alive, and nothing else uses them.
    unsafe { graph.launch(&stream) }.unwrap();
    assert_eq!(stream.download(&z).unwrap(), [1.0, 2.0, 3.0]);
    let mut host = device.alloc_host::<f32>(3).unwrap();
    assert_eq!(host.elements().unwrap(), [0.0; 3]);
    host.elements().unwrap().copy_from_slice(&[4.0, 5.0, 6.0]);
    stream.write_async(&mut z, &mut host).unwrap();
    host.elements().unwrap().fill(0.0);
    stream.read_async(&z, &mut host).unwrap();
    assert_eq!(host.elements().unwrap(), [4.0, 5.0, 6.0]);

    let mut shared = stream.alloc_shared::<i32>(3).unwrap();
    assert_eq!(stream.download(&shared).unwrap(), [0; 3]);
    stream.fill(&mut shared, 7).unwrap();
    assert_eq!(stream.download(&shared).unwrap(), [7; 3]);
    let handle = stream.export_shared(&shared).unwrap();
    // SAFETY: the buffer of the handle is dropped later.
    let opened = unsafe { stream.import_shared::<i32>(&handle) }.unwrap();
    assert_eq!(stream.download(&opened).unwrap(), [7; 3]);
    drop(opened);

    let mut wide = stream.alloc_zeroed::<i64>(3).unwrap();
    stream.fill(&mut wide, -2).unwrap();
    assert_eq!(stream.download(&wide).unwrap(), [-2; 3]);
    let mut half = stream.alloc_zeroed::<i16>(3).unwrap();
    stream.fill(&mut half, -2).unwrap();
    assert_eq!(stream.download(&half).unwrap(), [-2; 3]);
    #[cfg(feature = "emu")]
    assert_eq!(stream.take_counters(), Ok(None));
    assert_eq!(stream.take_profiles(), Ok(vec![]));
}

#[test]
fn peers_have_access() {
    run("child_has_a_peer", &[("FAKE_HIP_COUNT", "2")]);
}

#[test]
#[ignore = "a child process"]
fn child_has_a_peer() {
    let [first, second] = ["hip:0", "hip:1"].map(|spec| Device::open(spec).unwrap());
    assert_eq!(first.can_access_peer(&second), Ok(true));
    // The runtime says that it was enabled before: no error.
    assert_eq!(first.enable_peer_access(&second), Ok(()));
}

#[test]
fn the_target_is_found_by_name_and_else_by_version() {
    run("child_is_gfx942", &[]);
    run("child_is_gfx950", &[("FAKE_HIP_ARCH", "gfx950:sramecc+:xnack-")]);
    run("child_is_gfx950", &[("FAKE_HIP_ARCH", "")]);
    run("child_is_unsupported", &[("FAKE_HIP_ARCH", "gfx90a:sramecc+:xnack-")]);
}

#[test]
#[ignore = "a child process"]
fn child_is_gfx942() {
    assert_eq!(Device::open("hip:0").unwrap().arch(), Arch::Gfx942);
}

#[test]
#[ignore = "a child process"]
fn child_is_gfx950() {
    assert_eq!(Device::open("hip:0").unwrap().arch(), Arch::Gfx950);
}

#[test]
#[ignore = "a child process"]
fn child_is_unsupported() {
    let error = Device::open("hip:0").unwrap_err();
    let want = "device hip:0: the GPU is gfx90a; there are kernels for gfx942 and gfx950";
    assert_eq!(error.to_string(), want);
    if cfg!(feature = "emu") {
        assert_eq!(Device::open_default().unwrap().spec(), "emu:gfx942");
    }
}

#[test]
fn devices_are_counted() {
    run("child_has_no_gpu", &[("FAKE_HIP_COUNT", "0")]);
    run("child_has_no_gpu", &[("FAKE_HIP_FAIL", "hipGetDeviceCount=101")]);
    run("child_has_one_gpu", &[]);
}

#[test]
#[ignore = "a child process"]
fn child_has_no_gpu() {
    let error = Device::open("hip:0").unwrap_err();
    assert!(error.to_string().starts_with("device hip:0: no AMD GPU: "), "{error}");
    let available = Device::available();
    let (_, info) = available.iter().find(|(spec, _)| spec == "hip:0").unwrap();
    assert_eq!(*info, Err(error));
}

#[test]
#[ignore = "a child process"]
fn child_has_one_gpu() {
    let error = Device::open("hip:1").unwrap_err();
    assert_eq!(error.to_string(), "device hip:1: no such AMD GPU, there are 1");
    let gpus: Vec<_> = Device::available().into_iter().filter(|(spec, _)| spec.starts_with("hip")).collect();
    assert!(matches!(&gpus[..], [(spec, Ok(_))] if spec == "hip:0"));
}

#[test]
fn failures_keep_their_code() {
    // 4711 is in no list of codes.
    for call in ["hipMallocAsync", "hipMemcpyHtoDAsync", "hipStreamSynchronize"] {
        run("child_cannot_upload", &[("FAKE_HIP_FAIL", &format!("{call}=4711"))]);
    }
    run("child_is_out_of_memory", &[("FAKE_HIP_FAIL", "hipMallocAsync=2")]);
    run("child_cannot_open", &[("FAKE_HIP_FAIL", "hipGetDeviceCount=4711")]);
}

#[test]
#[ignore = "a child process"]
fn child_cannot_upload() {
    let stream = Device::open("hip:0").unwrap().create_stream().unwrap();
    let error = stream.upload(&[1f32]).unwrap_err();
    let call = std::env::var("FAKE_HIP_FAIL").unwrap().replace("=4711", "");
    let Error::Driver { call: got, code: 4711, name, .. } = &error else { panic!("{error}") };
    assert_eq!((*got, name.as_str()), (call.as_str(), "hipErrorUnknown"));
}

#[test]
#[ignore = "a child process"]
fn child_is_out_of_memory() {
    let stream = Device::open("hip:0").unwrap().create_stream().unwrap();
    assert_eq!(
        stream.upload(&[1f32; 100]).unwrap_err().to_string(),
        "hipMallocAsync failed with code 2 (hipErrorOutOfMemory): not enough memory for f32 x 100, 400 bytes on hip:0"
    );
}

#[test]
#[ignore = "a child process"]
fn child_cannot_open() {
    let error = Device::open_default().unwrap_err();
    assert!(matches!(error, Error::Driver { call: "hipGetDeviceCount", code: 4711, .. }), "{error}");
}
