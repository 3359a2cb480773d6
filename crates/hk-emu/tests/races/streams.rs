//! Races between launches and copies on different streams.

use super::watched;
use crate::common::{Args, Rig};
use hk_emu::{Access, Check, Dispatch, Fault, Machine, MemoryError, Near, StreamRace};

const SOURCE: &str = "
KERNEL void scale(const u32* x, u32* y) { y[64 * BID + TID] = 2 * x[64 * BID + TID]; }
KERNEL void add(const u32* x, u32* y) { y[64 * BID + TID] += x[64 * BID + TID]; }
";

fn launch(on: &Machine, rig: &Rig, kernel: &str, x: u64, y: u64) -> Result<(), Fault> {
    let args = Args::new().push(x).push(y);
    let groups = if kernel == "scale" { 4 } else { 2 };
    let dispatch = Dispatch { grid: [groups, 1, 1], block: [64, 1, 1], dynamic_lds: 0, args: &args.0 };
    on.launch(&rig.module, kernel, &dispatch).map(drop)
}

#[track_caller]
fn race(outcome: Result<(), Fault>) -> StreamRace {
    let fault = outcome.expect_err("a race");
    println!("{fault}");
    let Fault::Streams(race) = fault else { panic!("{fault}") };
    *race
}

#[test]
fn launches() {
    let rig = watched("gfx942", Check::Streams, SOURCE);
    let machine = &rig.machine;
    let words: Vec<u32> = (0..256).collect();
    let (x, y, z) = (rig.upload("x", &words), rig.upload("y", &words), rig.upload("z", &words));
    // Work of the host before the streams begin is behind them only when they are told.
    let (a, b) = (machine.stream(), machine.stream());
    for stream in [&a, &b] {
        stream.wait(&machine.mark());
    }
    launch(&a, &rig, "scale", x, y).expect("the first");
    launch(&b, &rig, "scale", x, z).expect("both read x");
    let found = race(launch(&b, &rig, "add", y + 512, z));
    assert_eq!((found.work.as_str(), found.access), ("launch of add on stream 2", Access::Read));
    assert_eq!((found.other.as_str(), found.other_access), ("launch of scale on stream 1", Access::Write));
    assert_eq!((found.address, found.bytes), (y + 512, 512));
    let Near::Allocation { label, offset: 512, .. } = &found.near else { panic!() };
    assert_eq!(label, "y");
    for part in [
        "the launch of add on stream 2 reads 512 bytes",
        "that the launch of scale on stream 1 writes",
        "no event",
    ] {
        assert!(found.to_string().contains(part), "{found}");
    }
    // With an event between them the same launches are in order, and what follows on either stream is too.
    a.wait(&b.mark());
    launch(&a, &rig, "scale", x, y).expect("its own");
    b.wait(&a.mark());
    launch(&b, &rig, "add", y, z).expect("behind the event");
    let found = race(launch(&a, &rig, "scale", x, y));
    assert_eq!(
        (found.access, found.other_access),
        (Access::Write, Access::Read),
        "the event is behind a, not b"
    );
    // The host waits for b, and queues on a.
    machine.wait(&b.mark());
    a.wait(&machine.mark());
    launch(&a, &rig, "scale", z, y).expect("behind the host's wait");
}

#[test]
fn copies() {
    let rig = watched("gfx950", Check::Streams, SOURCE);
    let machine = &rig.machine;
    let (x, y) = (rig.upload("x", &[1u32; 256]), rig.upload("y", &[1u32; 256]));
    let (a, b) = (machine.stream(), machine.stream());
    for stream in [&a, &b] {
        stream.wait(&machine.mark());
    }
    launch(&a, &rig, "scale", x, y).expect("the first");
    let race = |outcome: Result<(), MemoryError>, want: &str| {
        let error = outcome.expect_err("a race");
        assert!(matches!(error, MemoryError::Race(_)) && error.to_string().contains(want), "{error}");
    };
    race(b.read(y + 16, &mut [0; 4]), "the copy to the host on stream 2 reads 4 bytes");
    race(b.write(x, &[0; 4]), "that the launch of scale on stream 1 reads");
    race(b.copy(x, y, 4), "the copy on stream 2 reads 4 bytes");
    race(machine.read(y, &mut [0; 1024]), "the copy to the host by the host reads 1024 bytes");
    for mark in [a.mark(), machine.mark()] {
        b.wait(&mark);
    }
    b.fill(y, &[0], 1024).expect("in order");
    race(a.free(y), "the release on stream 1 writes 1024 bytes");
    assert!(machine.read(y, &mut [0]).is_err(), "it is freed nevertheless");
}

#[test]
fn without_the_check_marks_are_empty() {
    let rig = Rig::hip("gfx942", SOURCE);
    let (x, y) = (rig.upload("x", &[1u32; 256]), rig.upload("y", &[1u32; 256]));
    let (a, b) = (rig.machine.stream(), rig.machine.stream());
    launch(&a, &rig, "scale", x, y).expect("no check");
    launch(&b, &rig, "add", y, x).expect("no check");
    assert_eq!(rig.download::<u32>(x, 256)[127..129], [3, 1]);
}
