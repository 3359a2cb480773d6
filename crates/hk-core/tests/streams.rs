//! Order, ownership and device strings, without kernels. Delayed devices complete each piece of work a while after it
//! was queued, so that what is queued in the wrong order, or freed too early, shows.
#![cfg(feature = "emu")]

use hk_core::{Arch, Device, DeviceBuffer, Error, HostAccess, Stream, bf16};
use proptest::prelude::*;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const DELAY: Duration = Duration::from_millis(5);

fn slow() -> Stream {
    Device::open("emu:gfx942?delay_ms=5").unwrap().create_stream().unwrap()
}

/// Slow enough that a loaded machine does not pass for a wait.
fn sluggish() -> Stream {
    Device::open("emu:gfx942?delay_ms=50").unwrap().create_stream().unwrap()
}

fn fast() -> Stream {
    Device::open("emu:gfx942").unwrap().create_stream().unwrap()
}

#[test]
fn contents_round_trip() {
    let stream = fast();
    let data: Vec<bf16> = (0..1000).map(|i| bf16::from_f32(i as f32)).collect();
    let mut x = stream.upload(&data).unwrap();
    assert_eq!((x.len(), x.device()), (1000, stream.device()));
    assert_eq!(stream.download(&x).unwrap(), data);
    stream.fill(&mut x, bf16::PI).unwrap();
    assert_eq!(stream.download(&x).unwrap(), vec![bf16::PI; 1000]);
    let reversed: Vec<bf16> = data.iter().rev().copied().collect();
    stream.write(&mut x, &reversed).unwrap();
    let mut y = stream.alloc_zeroed::<bf16>(1000).unwrap();
    assert_eq!(stream.download(&y).unwrap(), vec![bf16::ZERO; 1000]);
    stream.copy(&x, &mut y).unwrap();
    let mut back = vec![bf16::ONE; 1000];
    stream.read(&y, &mut back).unwrap();
    assert_eq!(back, reversed);
}

#[test]
fn patterns_of_every_size() {
    let stream = fast();
    let mut b = stream.alloc_zeroed::<u8>(7).unwrap();
    let mut h = stream.alloc_zeroed::<i16>(7).unwrap();
    let mut w = stream.alloc_zeroed::<i32>(7).unwrap();
    let mut q = stream.alloc_zeroed::<i64>(7).unwrap();
    stream.fill(&mut b, 0xab).unwrap();
    stream.fill(&mut h, -0x1234).unwrap();
    stream.fill(&mut w, 0x1234_5678).unwrap();
    stream.fill(&mut q, -0x1234_5678_9abc_def0).unwrap();
    assert_eq!(stream.download(&b).unwrap(), [0xab; 7]);
    assert_eq!(stream.download(&h).unwrap(), [-0x1234; 7]);
    assert_eq!(stream.download(&w).unwrap(), [0x1234_5678; 7]);
    assert_eq!(stream.download(&q).unwrap(), [-0x1234_5678_9abc_def0; 7]);
}

#[test]
fn empty_buffers_are_buffers() {
    let stream = fast();
    let mut x = stream.upload::<f32>(&[]).unwrap();
    let mut y = stream.alloc_zeroed::<f32>(0).unwrap();
    stream.fill(&mut x, 1.0).unwrap();
    stream.write(&mut x, &[]).unwrap();
    stream.copy(&x, &mut y).unwrap();
    assert_eq!(stream.download(&y).unwrap(), [0f32; 0]);
    let view = x.view([0, 4096]).unwrap();
    assert!(view.numel() == 0 && view.is_aligned(16) && view.addr() != 0);
}

#[test]
fn lengths_must_agree() {
    let stream = fast();
    let mut x = stream.upload(&[1f32; 4]).unwrap();
    let y = stream.upload(&[1f32; 5]).unwrap();
    let message = |r: hk_core::Result<()>| r.unwrap_err().to_string();
    assert_eq!(
        message(stream.write(&mut x, &[0.0; 3])),
        "Stream::write: data: shape [3], expected [4], as the buffer"
    );
    assert_eq!(
        message(stream.read(&x, &mut [0.0; 9])),
        "Stream::read: data: shape [9], expected [4], as the buffer"
    );
    assert_eq!(message(stream.copy(&y, &mut x)), "Stream::copy: dst: shape [4], expected [5], as the buffer");
    let huge = stream.alloc_zeroed::<f32>(usize::MAX).unwrap_err();
    assert!(matches!(huge, Error::TooLarge { .. }), "{huge}");
}

#[test]
fn neither_queueing_nor_dropping_waits() {
    let home = sluggish();
    let other = home.device().create_stream().unwrap();
    let start = Instant::now();
    let mut x = home.alloc_zeroed::<f32>(1000).unwrap();
    for i in 0..4 {
        home.fill(&mut x, i as f32).unwrap();
        other.fill(&mut x, i as f32).unwrap();
    }
    drop(x);
    let queued = start.elapsed();
    home.synchronize().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(8 * 50));
    assert!(queued < Duration::from_millis(4 * 50), "queueing took {queued:?}");
}

#[test]
fn a_buffer_dropped_early_lives_until_its_work_is_done() {
    let stream = slow();
    let x = stream.upload(&[7f32; 100]).unwrap();
    let mut y = stream.alloc_zeroed::<f32>(100).unwrap();
    stream.copy(&x, &mut y).unwrap();
    drop(x);
    assert_eq!(stream.download(&y).unwrap(), [7f32; 100]);
}

#[test]
fn a_buffer_dropped_early_lives_until_other_streams_are_done_with_it() {
    let home = slow();
    let other = home.device().create_stream().unwrap();
    let x = home.upload(&[7f32; 100]).unwrap();
    let mut y = other.alloc_zeroed::<f32>(100).unwrap();
    // The other stream gets to the copy long after the home stream could have freed the memory.
    for _ in 0..10 {
        other.fill(&mut y, 1.0).unwrap();
    }
    other.copy(&x, &mut y).unwrap();
    drop(x);
    assert_eq!(other.download(&y).unwrap(), [7f32; 100]);
    home.synchronize().unwrap();
}

#[test]
fn a_stream_dropped_early_completes_its_work() {
    let home = slow();
    let other = home.device().create_stream().unwrap();
    let mut x = home.alloc_zeroed::<f32>(100).unwrap();
    other.fill(&mut x, 3.0).unwrap();
    let filled = other.record().unwrap();
    drop(other);
    home.wait(&filled).unwrap();
    assert_eq!(home.download(&x).unwrap(), [3f32; 100]);

    // Nothing but a buffer is left of its home.
    let x = slow().upload(&[5f32; 10]).unwrap();
    let stream = x.device().create_stream().unwrap();
    assert_eq!(stream.download(&x).unwrap(), [5f32; 10]);
}

#[test]
fn first_use_on_another_stream_comes_after_the_work_of_the_home_stream() {
    let home = slow();
    let other = home.device().create_stream().unwrap();
    let mut x = home.alloc_zeroed::<f32>(100).unwrap();
    for i in 1..=10 {
        home.fill(&mut x, i as f32).unwrap();
    }
    assert_eq!(other.download(&x).unwrap(), [10f32; 100]);
}

#[test]
fn events_order_streams() {
    let (a, b) = (slow(), slow());
    let mut x = a.alloc_zeroed::<f32>(100).unwrap();
    let mut y = b.alloc_zeroed::<f32>(100).unwrap();
    // Past the first use, so that only the event orders what follows.
    b.copy(&x, &mut y).unwrap();
    b.synchronize().unwrap();
    for i in 1..=10 {
        a.fill(&mut x, i as f32).unwrap();
    }
    let filled = a.record().unwrap();
    assert!(!filled.query().unwrap());
    b.wait(&filled).unwrap();
    b.copy(&x, &mut y).unwrap();
    assert_eq!(b.download(&y).unwrap(), [10f32; 100]);
    assert!(filled.query().unwrap());
}

#[test]
fn events_measure_time_between_them() {
    let stream = slow();
    let mut x = stream.alloc_zeroed::<f32>(1).unwrap();
    let start = stream.record().unwrap();
    for _ in 0..4 {
        stream.fill(&mut x, 1.0).unwrap();
    }
    let end = stream.record().unwrap();
    let elapsed = end.elapsed_since(&start).unwrap();
    assert!(elapsed >= 5 * DELAY && elapsed < Duration::from_secs(10), "{elapsed:?}");
    assert_eq!(start.elapsed_since(&start).unwrap(), Duration::ZERO);
    assert!(matches!(start.elapsed_since(&end), Err(Error::Argument { .. })));
}

#[test]
fn events_measure_modelled_time_where_it_is_asked_for() {
    let open = |spec: &str| Device::open(spec).map(|device| device.create_stream().unwrap());
    let stream = open("emu:gfx942?time=mi325x&delay_ms=5").unwrap();
    let other = stream.device().create_stream().unwrap();
    let mut x = stream.alloc_zeroed::<f32>(1 << 20).unwrap();
    stream.synchronize().unwrap();
    let fills = |n: usize, x: &mut DeviceBuffer<f32>| {
        let start = stream.record().unwrap();
        (0..n).for_each(|_| stream.fill(x, 1.0).unwrap());
        let end = stream.record().unwrap();
        (end.elapsed_since(&start).unwrap(), end)
    };
    let (one, _) = fills(1, &mut x);
    // 4 MiB at the rate of HBM, and a launch.
    assert!(one > Duration::from_nanos(700) && one < Duration::from_micros(20), "{one:?}");
    let (three, end) = fills(3, &mut x);
    assert!(three.abs_diff(3 * one) < Duration::from_nanos(10), "{three:?} {one:?}");
    // A stream that waits for an event goes on when the event is.
    let begun = other.record().unwrap();
    other.wait(&end).unwrap();
    let reached = other.record().unwrap();
    assert!(reached.elapsed_since(&begun).unwrap() >= three);
    for (spec, part) in [
        ("emu:gfx942?time=mi355x", "one of mi300x, mi308x, mi325x"),
        ("emu:gfx950?time=h100", "one of mi350x, mi355x"),
        ("emu:gfx950?sampled=true", "with time=PART"),
    ] {
        let error = open(spec).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn streams_without_an_event_between_them_are_reported() {
    let a = Device::open("emu:gfx942?sanitize=streams").unwrap().create_stream().unwrap();
    let b = a.device().create_stream().unwrap();
    let mut x = a.upload(&[1f32; 100]).unwrap();
    let mut y = b.upload(&[2f32; 100]).unwrap();
    // First uses are ordered, and so is what a synchronising call has waited for.
    b.copy(&x, &mut y).unwrap();
    assert_eq!(b.download(&y).unwrap(), [1f32; 100]);
    a.fill(&mut x, 3.0).unwrap();
    let filled = a.record().unwrap();
    b.wait(&filled).unwrap();
    b.copy(&x, &mut y).unwrap();
    assert_eq!(b.download(&y).unwrap(), [3f32; 100]);
    a.fill(&mut x, 4.0).unwrap();
    // One event: recording another each time could keep ahead of the stream.
    let filled = a.record().unwrap();
    while !filled.query().unwrap() {
        std::thread::yield_now();
    }
    assert_eq!(b.download(&x).unwrap(), [4f32; 100]);
    // The host has waited for neither.
    a.fill(&mut x, 5.0).unwrap();
    b.copy(&x, &mut y).unwrap();
    let errors = [a.synchronize(), b.synchronize()];
    let error = errors.into_iter().find_map(|e| e.err()).expect("one of them is the second").to_string();
    for part in ["fill on stream", "copy on stream", "400 bytes", "f32 x 100", "no event"] {
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
}

#[test]
fn work_of_the_host_is_in_the_order_of_its_stream() {
    let stream = slow();
    let mut x = stream.upload(&[1u32]).unwrap();
    let addr = x.view([1]).unwrap().addr();
    let double = move |memory: &dyn HostAccess| {
        let mut bytes = [0; 4];
        memory.read(addr, &mut bytes)?;
        memory.write(addr, &(2 * u32::from_ne_bytes(bytes)).to_ne_bytes())
    };
    // SAFETY: the work accesses x alone, which is alive until it is done.
    let queue = || unsafe { stream.launch("double").run_on_host(Arc::new(double)) };
    queue().unwrap();
    let graph = stream.capture(queue).unwrap();
    // SAFETY: as above.
    unsafe { graph.launch(&stream) }.unwrap();
    assert_eq!(stream.download(&x).unwrap(), [4]);
    stream.fill(&mut x, 3).unwrap();
    queue().unwrap();
    assert_eq!(stream.download(&x).unwrap(), [6]);
    // What is not there, and a failure of its own.
    let absent = |memory: &dyn HostAccess| memory.write(16, &[0]);
    // SAFETY: nothing is accessed.
    unsafe { stream.launch("absent").run_on_host(Arc::new(absent)) }.unwrap();
    assert!(matches!(stream.synchronize(), Err(Error::Emulator { .. })));
    // There is no library to call on the emulator.
    // SAFETY: nothing is queued.
    let error = unsafe { stream.launch("foreign").run_foreign(|_| Ok(())) }.unwrap_err();
    assert!(matches!(error, Error::Unsupported { op: "foreign", .. }), "{error}");
}

#[test]
fn devices_do_not_mix() {
    let a = fast();
    let b = Device::open("emu:gfx950").unwrap().create_stream().unwrap();
    let x = a.upload(&[1f32; 4]).unwrap();
    let mut y = b.upload(&[1f32; 4]).unwrap();
    let mismatch = |r: hk_core::Result<()>| matches!(r, Err(Error::DeviceMismatch { .. }));
    assert!(mismatch(a.copy(&x, &mut y)) && mismatch(b.copy(&x, &mut y)));
    assert!(mismatch(a.fill(&mut y, 0.0)) && mismatch(a.write(&mut y, &[0.0; 4])));
    assert!(mismatch(b.read(&x, &mut [0.0; 4])));
    assert!(mismatch(b.wait(&a.record().unwrap())));
    assert!(mismatch(b.record().unwrap().elapsed_since(&a.record().unwrap()).map(drop)));
    assert_eq!(
        b.download(&x).unwrap_err().to_string(),
        "Stream::read: buffer is on device emu:gfx942, the stream is on emu:gfx950"
    );
}

#[test]
fn one_string_is_one_device() {
    let a = Device::open("emu:gfx950").unwrap();
    assert_eq!(a, Device::open("emu:gfx950").unwrap());
    assert_ne!(a, Device::open("emu:gfx950?threads=1").unwrap());
    assert_ne!(a, Device::open("emu:gfx942").unwrap());
}

#[test]
fn devices_say_what_they_are() {
    for (arch, lds) in [(Arch::Gfx942, 65_536), (Arch::Gfx950, 163_840)] {
        let device = Device::open(&format!("emu:{arch}")).unwrap();
        let info = device.info();
        assert_eq!((device.arch(), info.arch, info.wave_size, info.driver), (arch, arch, 64, "emu"));
        assert_eq!((info.lds_per_workgroup, info.max_threads_per_workgroup), (lds, 1024));
        assert_eq!(device.spec(), format!("emu:{arch}"));
    }
    let available = Device::available();
    for spec in ["emu:gfx942", "emu:gfx950"] {
        let (_, info) = available.iter().find(|(s, _)| s == spec).unwrap();
        assert_eq!(info.as_ref().unwrap().spec, spec);
    }
    assert!(available.iter().any(|(s, _)| s == "hip:0"));
}

#[test]
fn unknown_device_strings() {
    for spec in [
        "",
        "emu",
        "emu:",
        "emu:gfx90a",
        "emu:sm_90",
        "gfx942",
        "hip",
        "hip:",
        "hip:-1",
        "hip:+1",
        "hip:01",
        "hip:x",
        "cuda",
        "cuda:01",
        "cpu:0",
        "EMU:gfx942",
        "emu:gfx942?speed=9",
        "emu:gfx942?threads=0",
        "emu:gfx942?threads=many",
        "emu:gfx942?cus=0",
        "emu:gfx942?budget=-1",
        "emu:gfx942?details=1",
        "emu:gfx942?misaligned=",
        "emu:gfx942?skew=16clocks",
        "emu:gfx942?delay_ms=",
        "emu:gfx942?sanitize=race",
        "emu:gfx942?mfma=exact",
    ] {
        let error = Device::open(spec).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{spec}: {error}");
        assert!(error.to_string().contains(&format!("`{spec}`, expected")), "{error}");
    }
    let error = Device::open("cpu:0").unwrap_err();
    assert_eq!(
        error.to_string(),
        "Device::open: spec: `cpu:0`, expected emu:gfx942, emu:gfx950, hip:N or cuda:N"
    );
    assert!(
        Device::open(
            "emu:gfx942?threads=2&cus=1&budget=1000&details=true&misaligned=false&skew=0&mfma=cdna3-exact&delay_ms=0"
        )
        .is_ok()
    );
    assert!(Device::open("emu:gfx942?sanitize=lds+waits,uninit").is_ok());
    // Without its driver, built in or installed, there is no such device: number 4096 is on no host.
    let error = Device::open("cuda:4096").unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }) && error.to_string().contains("cuda:4096"), "{error}");
}

#[test]
#[ignore = "the child process of `hk_device_selects_and_is_never_replaced`"]
fn print_default_device() {
    match Device::open_default() {
        Ok(device) => println!("default: {}", device.spec()),
        Err(error) => println!("default: error: {error}"),
    }
}

fn default_device(hk_device: Option<&str>) -> String {
    default_device_under(hk_device, None)
}

fn default_device_under(hk_device: Option<&str>, variable: Option<(&str, &str)>) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "streams::print_default_device", "--ignored", "--nocapture"]);
    match hk_device {
        Some(spec) => child.env("HK_DEVICE", spec),
        None => child.env_remove("HK_DEVICE"),
    };
    child.env_remove("HK_SANITIZE").env_remove("HK_MFMA").envs(variable);
    let output = String::from_utf8(child.output().unwrap().stdout).unwrap();
    let line = output.lines().find_map(|l| l.split_once("default: ")).expect("the line of the child");
    line.1.to_owned()
}

#[test]
fn hk_device_selects_and_is_never_replaced() {
    assert_eq!(default_device(Some("emu:gfx950")), "emu:gfx950");
    assert_eq!(default_device(Some("emu:gfx942?threads=1")), "emu:gfx942?threads=1");
    assert!(default_device(Some("nothing")).starts_with("error: Device::open: spec: `nothing`, expected"));
    assert!(default_device(Some("hip:4711")).starts_with("error: device hip:4711: "));
    // The first AMD GPU where there is one.
    let want = if Device::open("hip:0").is_ok() { "hip:0" } else { "emu:gfx942" };
    assert_eq!(default_device(None), want);
}

#[test]
fn hk_sanitize_names_checks() {
    let open = |names| default_device_under(Some("emu:gfx950"), Some(("HK_SANITIZE", names)));
    for names in ["", "all", "none", "lds,waits"] {
        assert_eq!(open(names), "emu:gfx950", "{names}");
    }
    let error = open("lds,race");
    assert!(
        error.starts_with("error: Device::open: HK_SANITIZE: `lds,race`, expected all, none,"),
        "{error}"
    );
    // What the string says goes first.
    let spec = "emu:gfx950?sanitize=none";
    assert_eq!(default_device_under(Some(spec), Some(("HK_SANITIZE", "race"))), spec);
}

#[test]
fn hk_mfma_names_how_matrix_instructions_round() {
    let open = |name| default_device_under(Some("emu:gfx942"), Some(("HK_MFMA", name)));
    assert_eq!([open("fma"), open("cdna3-exact")], ["emu:gfx942"; 2]);
    let error = open("exact");
    assert_eq!(error, "error: Device::open: HK_MFMA: `exact`, expected fma or cdna3-exact");
    // The device's name says it.
    let name = |spec| Device::open(spec).unwrap().info().name.clone();
    assert_eq!(name("emu:gfx950?mfma=cdna3-exact"), "hk-emu, gfx950, mfma cdna3-exact");
    assert_eq!(name("emu:gfx950?mfma=fma"), "hk-emu, gfx950, mfma fma");
}

#[test]
fn without_an_amd_gpu_hip_says_so() {
    match Device::open("hip:0") {
        Ok(device) => assert_eq!(device.info().driver, "hip"),
        Err(Error::NoDevice { spec, reason }) => {
            assert_eq!(spec, "hip:0");
            let want = if cfg!(feature = "hip") { "no AMD GPU" } else { "enable the feature `hip`" };
            assert!(reason.contains(want), "{reason}");
        }
        Err(other) => panic!("{other}"),
    }
}

/// A step of a program on several streams and buffers.
#[derive(Debug, Clone)]
enum Step {
    New { buffer: usize, value: i32 },
    Fill { buffer: usize, value: i32 },
    Copy { from: usize, to: usize },
    Drop { buffer: usize },
}

const BUFFERS: usize = 3;
const STREAMS: usize = 3;

fn step() -> impl Strategy<Value = Step> {
    let buffer = 0..BUFFERS;
    prop_oneof![
        (buffer.clone(), any::<i32>()).prop_map(|(buffer, value)| Step::New { buffer, value }),
        (buffer.clone(), any::<i32>()).prop_map(|(buffer, value)| Step::Fill { buffer, value }),
        (buffer.clone(), buffer.clone()).prop_map(|(from, to)| Step::Copy { from, to }),
        buffer.prop_map(|buffer| Step::Drop { buffer }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Steps on any streams, ordered by events, buffers dropped at any time: as if each step were awaited.
    #[test]
    fn programs_on_several_streams_behave_as_written(
        steps in prop::collection::vec((0..STREAMS, step()), 1..40)
    ) {
        let device = Device::open("emu:gfx942?delay_ms=1").unwrap();
        let streams: Vec<_> = (0..STREAMS).map(|_| device.create_stream().unwrap()).collect();
        let mut buffers: [Option<(DeviceBuffer<i32>, i32)>; BUFFERS] = Default::default();
        let mut last = streams[0].record().unwrap();
        for (stream, step) in steps {
            let stream = &streams[stream];
            stream.wait(&last).unwrap();
            match step {
                Step::New { buffer, value } => buffers[buffer] = Some((stream.upload(&[value; 9]).unwrap(), value)),
                Step::Drop { buffer } => buffers[buffer] = None,
                Step::Fill { buffer, value } => {
                    if let Some((buffer, now)) = &mut buffers[buffer] {
                        stream.fill(buffer, value).unwrap();
                        *now = value;
                    }
                }
                Step::Copy { from, to } => {
                    if let Ok([Some((from, value)), Some((to, now))]) = buffers.get_disjoint_mut([from, to]) {
                        stream.copy(from, to).unwrap();
                        *now = *value;
                    }
                }
            }
            last = stream.record().unwrap();
        }
        streams[0].wait(&last).unwrap();
        for (buffer, value) in buffers.iter().flatten() {
            prop_assert_eq!(streams[0].download(buffer).unwrap(), vec![*value; 9]);
        }
        drop(buffers);
        for stream in &streams {
            prop_assert_eq!(stream.synchronize(), Ok(()));
        }
    }
}
