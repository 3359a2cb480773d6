//! Several emulated devices: their strings, access to each other's memory, and launches that wait for each other.
#![cfg(feature = "emu")]

use crate::common;
use bytemuck::{Pod, Zeroable};
use hk_core::{CodeObjects, Device, DeviceBuffer, Error, KernelRef, LaunchConfig, Result, Stream};
use std::sync::LazyLock;

static PEERS: LazyLock<&'static CodeObjects> = LazyLock::new(|| common::compile("peers"));

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    mine: u64,
    theirs: u64,
    wait: u64,
}

fn stream(spec: &str) -> Stream {
    Device::open(spec).unwrap().create_stream().unwrap()
}

/// Sets `theirs`, then waits for `mine`.
fn meet(stream: &Stream, mine: &DeviceBuffer<i32>, theirs: &DeviceBuffer<i32>, wait: bool) -> Result<()> {
    let kernel = stream.kernel(KernelRef::new(*PEERS, "meet"))?;
    let mut launch = stream.launch("meet");
    let params = Params {
        mine: launch.shared_address("mine", mine)?,
        theirs: launch.shared_address("theirs", theirs)?,
        wait: wait.into(),
    };
    // SAFETY: the kernel accesses one element of each.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(1), &params) }
}

#[test]
fn devices_have_numbers() {
    let device = |spec: &str| Device::open(spec).unwrap();
    let (a, b) = (device("emu:gfx942:0?node=strings"), device("emu:gfx942:1?node=strings"));
    assert!(a != b && a == device("emu:gfx942:0?node=strings"));
    assert_eq!(a.spec(), "emu:gfx942:0?node=strings");
    assert!(a.can_access_peer(&b).unwrap() && a.can_access_peer(&a).unwrap());
    for other in
        ["emu:gfx942", "emu:gfx942:1", "emu:gfx950:1?node=strings", "emu:gfx942:0?node=strings&threads=2"]
    {
        let other = device(other);
        assert!(!a.can_access_peer(&other).unwrap(), "{}", other.spec());
        let error = a.enable_peer_access(&other).unwrap_err();
        assert!(matches!(error, Error::Unsupported { op: "Device::enable_peer_access", .. }), "{error}");
        assert!(error.to_string().contains(other.spec()), "{error}");
    }
    for wrong in [
        "emu:gfx942:16",
        "emu:gfx942:01",
        "emu:gfx942:",
        "emu:gfx942:-1",
        "emu:gfx942?node=x",
        "emu:gfx942:0?patience_ms=x",
    ] {
        let error = Device::open(wrong).unwrap_err();
        assert!(
            matches!(error, Error::Argument { arg: "spec", .. }) && error.to_string().contains(wrong),
            "{error}"
        );
    }
}

#[test]
fn shared_memory_needs_access() {
    let [a, b] = [0, 1].map(|n| stream(&format!("emu:gfx942:{n}?node=shared")));
    let [mine, theirs] = [&a, &b].map(|stream| stream.alloc_shared::<i32>(4).unwrap());
    assert_eq!(a.download(&mine).unwrap(), [0; 4]);
    let refused = meet(&a, &mine, &theirs, false).unwrap_err();
    assert!(matches!(&refused, Error::DeviceMismatch { op: "meet", arg: "theirs", .. }), "{refused}");
    a.device().enable_peer_access(b.device()).unwrap();
    a.device().enable_peer_access(b.device()).unwrap();
    meet(&a, &mine, &theirs, false).unwrap();
    a.synchronize().unwrap();
    assert_eq!(b.download(&theirs).unwrap(), [1, 0, 0, 0]);
    // Not the other way, and not for tensors.
    assert!(matches!(meet(&b, &theirs, &mine, false), Err(Error::DeviceMismatch { arg: "theirs", .. })));
    let view = theirs.view([4]).unwrap();
    assert!(matches!(a.launch("meet").input("x", &view), Err(Error::DeviceMismatch { arg: "x", .. })));
}

/// Two launches that each wait for the other end, whichever comes first; memory outlives its owner's last use.
#[test]
fn launches_of_two_devices_wait_for_each_other() {
    for first in 0..2 {
        let streams = [0, 1].map(|n| stream(&format!("emu:gfx942:{n}?node=meet{first}&sanitize=all")));
        streams[0].device().enable_peer_access(streams[1].device()).unwrap();
        streams[1].device().enable_peer_access(streams[0].device()).unwrap();
        let homes = streams.each_ref().map(|stream| stream.device().create_stream().unwrap());
        let flags = homes.each_ref().map(|home| home.alloc_shared::<i32>(1).unwrap());
        for rank in [first, 1 - first] {
            meet(&streams[rank], &flags[rank], &flags[1 - rank], true).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        drop(flags);
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        homes.iter().for_each(|home| home.synchronize().unwrap());
    }
}

#[test]
fn a_launch_that_waits_for_ever_is_reported() {
    let [a, b] = [0, 1].map(|n| stream(&format!("emu:gfx942:{n}?node=deadlock&patience_ms=200")));
    a.device().enable_peer_access(b.device()).unwrap();
    let [mine, theirs] = [&a, &b].map(|stream| stream.alloc_shared::<i32>(1).unwrap());
    meet(&a, &mine, &theirs, true).unwrap();
    let error = a.synchronize().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Emulator { .. }), "{text}");
    for part in ["emu:gfx942:0", "meet", "deadlock", "this launch runs on device 0", "shared i32 x 1"] {
        assert!(text.contains(part), "`{text}` lacks {part}");
    }
    // The device lives.
    meet(&a, &mine, &theirs, false).unwrap();
    a.synchronize().unwrap();
}
