//! Kernels: loading, the checks of a launch, execution, faults.
#![cfg(feature = "emu")]

use crate::common::{self, Params};
use hk_core::{
    Arch, CodeObjects, Device, Error, GlobalLayout, Kernel, KernelRef, LaunchConfig, Layout, Result, Stream,
    TensorView, TensorViewMut,
};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

static PROBE: LazyLock<&'static CodeObjects> = LazyLock::new(|| common::compile("probe"));

fn streams() -> impl Iterator<Item = Stream> {
    Arch::AMD.iter().map(|a| Device::open(&format!("emu:{a}")).unwrap().create_stream().unwrap())
}

fn stream() -> Stream {
    streams().next().unwrap()
}

fn slow() -> Stream {
    Device::open("emu:gfx942?delay_ms=5").unwrap().create_stream().unwrap()
}

/// Queues `symbol`, whose parameters are those of `scale`.
fn launch(
    stream: &Stream,
    symbol: &'static str,
    x: TensorView<f32>,
    mut y: TensorViewMut<f32>,
    a: f32,
    config: LaunchConfig,
) -> Result<()> {
    let kernel = stream.kernel(KernelRef::new(*PROBE, symbol))?;
    let mut launch = stream.launch("probe");
    let params = Params { x: launch.input("x", &x)?, y: launch.output("y", &mut y)?, a, pad: 0 };
    // SAFETY: the parameters are the kernel's. `overrun` leaves its tensors, which only the emulator sees.
    unsafe { launch.run(&kernel, config, &params) }
}

fn scale(stream: &Stream, x: TensorView<f32>, y: TensorViewMut<f32>, a: f32) -> Result<()> {
    let blocks = x.numel().div_ceil(64);
    launch(stream, "scale", x, y, a, LaunchConfig::grid_1d(blocks))
}

/// Queues a kernel that reads one element past its input.
fn fail(stream: &Stream) -> Result<()> {
    let x = stream.alloc_zeroed::<f32>(100)?;
    let mut y = stream.alloc_zeroed::<f32>(100)?;
    launch(stream, "overrun", x.view([100])?, y.view_mut([100])?, 1.0, LaunchConfig::grid_1d(2))
}

#[test]
fn a_kernel_computes() {
    for stream in streams() {
        let data: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let x = stream.upload(&data).unwrap();
        let mut y = stream.alloc_zeroed::<f32>(1000).unwrap();
        scale(&stream, x.view([1000]).unwrap(), y.view_mut([1000]).unwrap(), 3.0).unwrap();
        let want: Vec<f32> = data.iter().map(|x| 3.0 * x).collect();
        assert_eq!(stream.download(&y).unwrap(), want);

        // Every other element to every fourth, and in place.
        let mut y = stream.upload(&[-1f32; 2000]).unwrap();
        let every_other = x.view_with(Layout::with_strides([500], [2]).unwrap(), 1).unwrap();
        let every_fourth = y.view_mut_with(Layout::with_strides([500], [4]).unwrap(), 2).unwrap();
        scale(&stream, every_other, every_fourth, 2.0).unwrap();
        let out = y.view_mut([2000]).unwrap();
        scale(&stream, out.alias(), out, 2.0).unwrap();
        let want = |i: usize| if i % 4 == 2 { 4.0 * (2 * (i / 4) + 1) as f32 } else { -2.0 };
        assert_eq!(stream.download(&y).unwrap(), (0..2000).map(want).collect::<Vec<_>>());
    }
}

#[test]
fn a_graph_launches_kernels() {
    for stream in streams() {
        let x = stream.upload(&[3f32; 100]).unwrap();
        let mut y = stream.alloc_zeroed::<f32>(100).unwrap();
        let mut run = || {
            let out = y.view_mut([100])?;
            scale(&stream, x.view([100])?, out, 2.0)?;
            let out = y.view_mut([100])?;
            scale(&stream, out.alias(), out, 5.0)
        };
        // Loads the kernel.
        run().unwrap();
        let graph = stream.capture(run).unwrap();
        stream.fill(&mut y, 0.0).unwrap();
        stream.take_counters().unwrap();
        for _ in 0..3 {
            // SAFETY: x and y are alive, and nothing else uses them.
            unsafe { graph.launch(&stream).unwrap() };
        }
        assert_eq!(stream.download(&y).unwrap(), [30.0; 100]);
        assert_eq!(stream.take_counters().unwrap().unwrap().waves, 3 * 2 * 2);
    }
}

#[test]
fn counters_count_what_ran_on_the_stream_and_start_again() {
    let stream = stream();
    let x = stream.upload(&[1f32; 640]).unwrap();
    let mut y = stream.alloc_zeroed::<f32>(640).unwrap();
    for _ in 0..3 {
        scale(&stream, x.view([640]).unwrap(), y.view_mut([640]).unwrap(), 3.0).unwrap();
    }
    let counters = stream.take_counters().unwrap().unwrap();
    assert_eq!((counters.workgroups, counters.waves), (30, 30));
    assert_eq!((counters.global_read_bytes, counters.global_written_bytes), (3 * 2560, 3 * 2560));
    assert!(counters.instructions > 30 * 5);
    assert_eq!(stream.take_counters().unwrap().unwrap().instructions, 0);
}

#[test]
fn details_are_counted_by_kernel_and_line_where_asked_for() {
    let stream = Device::open("emu:gfx950?details=true").unwrap().create_stream().unwrap();
    let x = stream.upload(&[1f32; 640]).unwrap();
    let mut y = stream.alloc_zeroed::<f32>(640).unwrap();
    for _ in 0..2 {
        scale(&stream, x.view([640]).unwrap(), y.view_mut([640]).unwrap(), 3.0).unwrap();
    }
    let profiles = stream.take_profiles().unwrap();
    let [profile] = &profiles[..] else { panic!("{profiles:?}") };
    assert_eq!((&*profile.kernel, profile.launches, profile.resources.threads), ("scale", 2, 64));
    assert!(profile.lines.iter().any(|l| l.file.as_ref().is_some_and(|f| f.ends_with("probe.hip"))));
    let counters = stream.take_counters().unwrap().unwrap();
    assert_eq!(counters, profile.counters);
    let details = counters.details.unwrap();
    // Both buffers, of 20 lines each, in each launch.
    assert_eq!((details.global_read_lines, details.distinct_read_lines), (40, 40));
    assert_eq!((details.global_written_lines, details.distinct_written_bytes), (40, 2 * 2560));
    assert!(stream.take_profiles().unwrap().is_empty());
    assert_eq!(self::stream().take_counters().unwrap().unwrap().details, None);
    assert!(self::stream().take_profiles().unwrap().is_empty());
}

#[test]
fn a_kernel_is_loaded_once_per_device() {
    let [a, b] = [0, 1].map(|i| streams().nth(i).unwrap());
    let scale = KernelRef::<Params>::new(*PROBE, "scale");
    let kernel = a.kernel(scale).unwrap();
    assert!(std::ptr::eq(&*kernel, &*a.kernel(scale).unwrap()));
    assert!(std::ptr::eq(&*kernel, &*a.device().create_stream().unwrap().kernel(scale).unwrap()));
    assert!(!std::ptr::eq(&*kernel, &*b.kernel(scale).unwrap()));
    assert_eq!((kernel.name(), kernel.block()), ("scale", [64, 1, 1]));
    assert_eq!(kernel.info().explicit_arg_bytes as usize, size_of::<Params>());
}

#[test]
fn the_launch_gives_grid_block_and_dynamic_lds() {
    for stream in streams() {
        let x = stream.alloc_zeroed::<f32>(1).unwrap();
        let mut y = stream.alloc_zeroed::<f32>(3).unwrap();
        let config = LaunchConfig::grid_1d(5).with_dynamic_lds(256);
        launch(&stream, "sizes", x.view([1]).unwrap(), y.view_mut([3]).unwrap(), 0.0, config).unwrap();
        assert_eq!(stream.download(&y).unwrap(), [5.0, 64.0, 70.0]);
    }
}

#[test]
fn tensors_dropped_after_the_launch_live_until_it_is_done() {
    let home = slow();
    let other = home.device().create_stream().unwrap();
    let mut z = other.alloc_zeroed::<f32>(100).unwrap();
    for stream in [&home, &other] {
        let x = home.upload(&[2f32; 100]).unwrap();
        let mut y = home.alloc_zeroed::<f32>(100).unwrap();
        for _ in 0..5 {
            stream.fill(&mut z, 0.0).unwrap(); // so that the kernel comes late
        }
        scale(stream, x.view([100]).unwrap(), y.view_mut([100]).unwrap(), 2.0).unwrap();
        scale(stream, y.view([100]).unwrap(), z.view_mut([100]).unwrap(), 2.0).unwrap();
        drop((x, y));
        assert_eq!(stream.download(&z).unwrap(), [8f32; 100]);
    }
    home.synchronize().unwrap();
}

#[test]
fn launches_are_queued_and_not_awaited() {
    let stream = Device::open("emu:gfx942?delay_ms=50").unwrap().create_stream().unwrap();
    let mut y = stream.upload(&[1f32; 64]).unwrap();
    stream.kernel(KernelRef::<Params>::new(*PROBE, "scale")).unwrap();
    let start = Instant::now();
    for _ in 0..7 {
        let y = y.view_mut([64]).unwrap();
        scale(&stream, y.alias(), y, 2.0).unwrap();
    }
    let queued = start.elapsed();
    assert_eq!(stream.download(&y).unwrap(), [128f32; 64]);
    assert!(start.elapsed() >= Duration::from_millis(7 * 50));
    assert!(queued < Duration::from_millis(4 * 50), "queueing took {queued:?}");
}

#[test]
fn one_element_too_many_is_named() {
    for stream in streams() {
        let x = stream.upload(&[1f32; 100]).unwrap();
        let mut y = stream.alloc_zeroed::<f32>(100).unwrap();
        let (view, config) = (x.view([100]).unwrap(), LaunchConfig::grid_1d(2));
        launch(&stream, "overrun", view, y.view_mut([100]).unwrap(), 1.0, config).unwrap();
        let Err(Error::Emulator { device, report, fault }) = stream.synchronize() else { panic!("no fault") };
        assert_eq!(device, stream.device().spec());
        let fault = fault.expect("a kernel is at fault");
        assert!(matches!(&*fault, hk_core::Fault::Memory { lane: Some(36), .. }), "{fault:?}");
        let source = include_str!("hip/probe.hip");
        let line = 1 + source.lines().position(|l| l.contains("one past the end")).unwrap();
        let address = format!("{:#x}", view.addr() + 400);
        // Element 100 is that of lane 36 of the second workgroup.
        for want in ["overrun", &format!("probe.hip:{line}"), "lane 36", &address, "f32 x 100"] {
            assert!(report.contains(want), "no `{want}` in: {report}");
        }
    }
}

#[test]
fn a_fault_is_reported_once_and_nothing_runs_in_between() {
    let stream = slow();
    let mut y = stream.upload(&[1f32; 64]).unwrap();
    fail(&stream).unwrap();
    stream.fill(&mut y, 2.0).unwrap();
    {
        let y = y.view_mut([64]).unwrap();
        scale(&stream, y.alias(), y, 2.0).unwrap();
    }
    assert!(matches!(stream.download(&y), Err(Error::Emulator { .. })));
    // Reported and forgotten; what was queued behind it did not happen.
    assert_eq!(stream.download(&y).unwrap(), [1f32; 64]);
    stream.fill(&mut y, 3.0).unwrap();
    assert_eq!(stream.download(&y).unwrap(), [3f32; 64]);

    fail(&stream).unwrap();
    assert!(matches!(stream.take_counters(), Err(Error::Emulator { .. })));
    fail(&stream).unwrap();
    assert!(matches!(stream.synchronize(), Err(Error::Emulator { .. })));
    assert_eq!(stream.synchronize(), Ok(()));
}

#[test]
fn a_fault_reaches_whoever_waits_for_it() {
    let (a, b) = (slow(), slow());
    let before = a.record().unwrap();
    fail(&a).unwrap();
    let after = a.record().unwrap();
    b.wait(&after).unwrap();
    assert_eq!(before.synchronize(), Ok(()));
    let fault = after.synchronize().unwrap_err();
    assert!(matches!(fault, Error::Emulator { .. }));
    assert_eq!(b.synchronize(), Err(fault.clone()));
    assert_eq!(a.synchronize(), Err(fault));
    assert_eq!((a.synchronize(), b.synchronize()), (Ok(()), Ok(())));

    // Memory that a failed stream has used is released, and its home is not at fault.
    let x = a.upload(&[1f32; 100]).unwrap();
    let mut y = b.alloc_zeroed::<f32>(100).unwrap();
    launch(&b, "overrun", x.view([100]).unwrap(), y.view_mut([100]).unwrap(), 1.0, LaunchConfig::grid_1d(2))
        .unwrap();
    drop(x);
    assert_eq!(a.synchronize(), Ok(()));
    assert!(b.synchronize().is_err());
}

#[test]
fn a_launch_beyond_its_budget_is_stopped() {
    let stream = Device::open("emu:gfx942?budget=3").unwrap().create_stream().unwrap();
    let mut y = stream.alloc_zeroed::<f32>(64).unwrap();
    let out = y.view_mut([64]).unwrap();
    scale(&stream, out.alias(), out, 2.0).unwrap();
    assert!(matches!(stream.synchronize(), Err(Error::Emulator { .. })));
}

fn refused(stream: &Stream, symbol: &'static str, config: LaunchConfig) -> Error {
    let mut y = stream.alloc_zeroed::<f32>(64).unwrap();
    let out = y.view_mut([64]).unwrap();
    let error = launch(stream, symbol, out.alias(), out, 1.0, config).unwrap_err();
    assert_eq!(stream.synchronize(), Ok(()));
    error
}

#[test]
fn too_much_lds_is_a_resource_error() {
    // More than gfx942 has, within what gfx950 has.
    let config = LaunchConfig::grid_1d(1).with_dynamic_lds(69_632);
    let error = refused(&stream(), "sizes", config);
    assert_eq!(
        error.to_string(),
        "probe: kernel sizes: 69632 bytes of LDS requested, the limit of emu:gfx942 is 65536"
    );
    assert!(matches!(error, Error::Resource { requested: 69_632, limit: 65_536, .. }));

    let stream = streams().nth(1).unwrap();
    let x = stream.alloc_zeroed::<f32>(1).unwrap();
    let mut y = stream.alloc_zeroed::<f32>(3).unwrap();
    launch(&stream, "sizes", x.view([1]).unwrap(), y.view_mut([3]).unwrap(), 0.0, config).unwrap();
    assert_eq!(stream.download(&y).unwrap(), [1.0, 64.0, 70.0]);
    let error = refused(&stream, "sizes", config.with_dynamic_lds(usize::MAX));
    assert!(matches!(error, Error::Resource { limit: 163_840, .. }), "{error}");
}

#[test]
fn grids_and_blocks_out_of_bounds() {
    let stream = stream();
    let message = |config| refused(&stream, "scale", config).to_string();
    assert_eq!(message(LaunchConfig::grid_1d(0)), "probe: grid: [0, 1, 1], expected at least one block");
    assert_eq!(
        message(LaunchConfig::grid_3d(1, 1, 0)),
        "probe: grid: [1, 1, 0], expected at least one block"
    );
    // 2^26 blocks of 64 threads are 2^32 threads.
    assert_eq!(
        message(LaunchConfig::grid_1d(1 << 26)),
        "probe: kernel scale: 67108864 blocks in x requested, the limit of emu:gfx942 is 67108863"
    );
    assert!(message(LaunchConfig::grid_1d(usize::MAX)).contains("blocks in x"));
    assert_eq!(
        message(LaunchConfig::grid_2d(1, 65_536)),
        "probe: kernel scale: 65536 blocks in y requested, the limit of emu:gfx942 is 65535"
    );
    assert_eq!(
        message(LaunchConfig::grid_1d(1).with_block([65, 1, 1])),
        "probe: kernel scale: 65 threads per block requested, the limit of the kernel is 64"
    );
    assert!(message(LaunchConfig::grid_1d(1).with_block([u32::MAX; 3])).contains("threads per block"));
    assert_eq!(
        message(LaunchConfig::grid_1d(1).with_block([64, 0, 1])),
        "probe: block: [64, 0, 1], expected at least one thread"
    );
}

#[test]
fn parameters_of_another_size_break_the_contract() {
    let stream = stream();
    let kernel = stream.kernel(KernelRef::new(*PROBE, "scale")).unwrap();
    let launch = stream.launch("probe");
    // SAFETY: refused before anything runs.
    let error =
        unsafe { launch.run(&kernel, LaunchConfig::grid_1d(1), &[GlobalLayout::ABSENT; 2]) }.unwrap_err();
    assert_eq!(
        error.to_string(),
        "code object scale: the kernel takes 120 bytes of parameters, probe passes 112"
    );
}

#[test]
fn tensors_that_a_launch_refuses() {
    let [a, b] = [0, 1].map(|i| streams().nth(i).unwrap());
    let kernel = a.kernel(KernelRef::new(*PROBE, "scale")).unwrap();
    let x = b.alloc_zeroed::<f32>(64).unwrap();
    let mut launch = a.launch("probe");
    let error = launch.input("x", &x.view([64]).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "probe: x is on device emu:gfx950, the stream is on emu:gfx942");

    let x = a.alloc_zeroed::<f32>(64).unwrap();
    let error = launch.input("x", &x.view([2, 2, 2, 2, 4]).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "probe: x: shape [2, 2, 2, 2, 4], expected at most 4 axes");
    let repeated = x.view_with(Layout::with_strides([1 << 32, 1], [0, 1]).unwrap(), 0).unwrap();
    let error = launch.input("x", &repeated).unwrap_err();
    assert!(matches!(error, Error::TooLarge { limit: 0xffff_ffff, .. }), "{error}");

    let launch = b.launch("probe");
    let params = Params { x: GlobalLayout::ABSENT, y: GlobalLayout::ABSENT, a: 0.0, pad: 0 };
    // SAFETY: refused before anything runs.
    let error = unsafe { launch.run(&kernel, LaunchConfig::grid_1d(1), &params) }.unwrap_err();
    assert_eq!(error.to_string(), "probe: kernel is on device emu:gfx942, the stream is on emu:gfx950");
}

#[test]
fn tensors_reach_the_device_with_four_axes() {
    let stream = stream();
    let mut x = stream.alloc_zeroed::<f32>(120).unwrap();
    let addr = x.view([120]).unwrap().addr();
    let mut launch = stream.launch("probe");
    let mut view = x.view_mut([2, 3, 20]).unwrap().slice(2, 4..8).unwrap().transpose(0, 1).unwrap();
    let global = launch.output("x", &mut view).unwrap();
    assert_eq!(global.data(), addr + 16);
    assert_eq!((global.shape(), global.strides()), ([1, 3, 2, 4], [0, 20, 60, 1]));
    assert_eq!(launch.optional_input::<f32>("w", None).unwrap(), GlobalLayout::ABSENT);
    assert_eq!(launch.optional_output("x", Some(&mut view)).unwrap(), global);
    assert_eq!(GlobalLayout::ABSENT.data(), 0);
}

#[test]
fn kernels_that_are_not_there() {
    let stream = stream();
    let error = stream.kernel(KernelRef::<Params>::new(*PROBE, "nothing")).unwrap_err();
    assert!(matches!(error, Error::CodeObject { .. }));
    assert!(
        error.to_string().starts_with("code object probe: nothing: no such kernel; it has scale, overrun")
    );

    let missing = common::leak(CodeObjects::missing("rmsnorm", "no compiler; apt install clang-22"));
    let error = stream.kernel(KernelRef::<Params>::new(missing, "rmsnorm")).unwrap_err();
    assert_eq!(error.to_string(), "rmsnorm: no code object for gfx942: no compiler; apt install clang-22");
    let images: &[(Arch, &[u8])] = common::leak([(Arch::Gfx950, &[][..])]);
    let error = stream
        .kernel(KernelRef::<Params>::new(common::leak(CodeObjects::embedded("rmsnorm", images)), "rmsnorm"))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "rmsnorm: no code object for gfx942: it was built for gfx950 only; build with HK_TARGETS=gfx942"
    );
}

#[test]
fn kernels_that_break_the_contract() {
    let stream = stream();
    for (symbol, kinds) in [("two_arguments", "by_value, by_value"), ("pointer", "global_buffer")] {
        let error = stream.kernel(KernelRef::<Params>::new(*PROBE, symbol)).unwrap_err();
        let want = format!(
            "code object probe: {symbol}: a kernel takes one parameter struct by value, this one takes [{kinds}]"
        );
        assert_eq!(error.to_string(), want);
    }
}

/// Loading this image for gfx942.
fn load(image: Vec<u8>) -> Result<Kernel<Params>> {
    let images: &[(Arch, &[u8])] = common::leak([(Arch::Gfx942, &*image.leak())]);
    stream().kernel(KernelRef::new(common::leak(CodeObjects::embedded("broken", images)), "scale"))
}

#[test]
fn corrupt_code_objects_are_refused() {
    let good = common::image("probe", Arch::Gfx942);
    assert!(load(good.to_vec()).is_ok());
    let refused = |what: &str, image: Vec<u8>| match load(image) {
        Err(Error::CodeObject { object, reason }) => {
            assert!(object.starts_with("broken") && !reason.is_empty(), "{what}: {object}: {reason}");
            reason
        }
        other => panic!("{what}: {other:?}"),
    };
    // Up to the last segment's end everything is needed, headers at the end included.
    for len in (0..good.len()).step_by(61) {
        refused(&format!("{len} bytes"), good[..len].to_vec());
    }
    let replaced = |from: &[u8], to: &[u8]| {
        let mut image = good.to_vec();
        let mut found = 0;
        for i in 0..image.len() - from.len() {
            if &image[i..i + from.len()] == from {
                image[i..i + to.len()].copy_from_slice(to);
                found += 1;
            }
        }
        assert!(found > 0);
        image
    };
    refused("note without kernels", replaced(b"amdhsa.kernels", b"amdhsa.colonel"));
    refused("note that is no MessagePack", replaced(b"\xaeamdhsa.kernels", b"\xc1"));
    // Wherever the descriptor's address is stated.
    let parsed = hk_codeobj::CodeObject::parse(good).unwrap();
    let descriptor = parsed.kernel("scale").unwrap().descriptor_vaddr.to_le_bytes();
    refused("descriptor beyond the file", replaced(&descriptor, &0x7fff_0000u64.to_le_bytes()));
    let mut machine = good.to_vec();
    machine[18] = 62; // x86-64
    refused("another machine", machine);
    let reason = refused("another target", common::image("probe", Arch::Gfx950).to_vec());
    assert_eq!(reason, "compiled for gfx950, the device is gfx942");
}
