//! Memory of devices of other processes: handles, flags and atomics between processes, processes that end.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Args, Rig, hip, options};
use hk_emu::{Fault, Machine, MachineOptions, MemoryError, MemoryHandle, Node};

const SOURCE: &str = r#"
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
KERNEL void meet(u32 *mine, u32 *theirs, u64 *sums, u32 rounds, u32 rank) {
  for (u32 round = 1; round <= rounds; round++) {
    theirs[64 + 64 * rank + TID] = 1000 * rank + round;
    BARRIER();
    if (TID == 0) {
      __hip_atomic_store(theirs + rank, 2 * round, __ATOMIC_RELEASE, SYSTEM);
      while (__hip_atomic_load(mine + (1 - rank), __ATOMIC_ACQUIRE, SYSTEM) < 2 * round) {}
    }
    BARRIER();
    if (mine[64 + 64 * (1 - rank) + TID] == 1000 * (1 - rank) + round)
      __hip_atomic_fetch_add(sums, (1ull << 33) + 1, __ATOMIC_RELAXED, SYSTEM);
    BARRIER();
    if (TID == 0) {
      __hip_atomic_store(theirs + rank, 2 * round + 1, __ATOMIC_RELEASE, SYSTEM);
      while (__hip_atomic_load(mine + (1 - rank), __ATOMIC_ACQUIRE, SYSTEM) < 2 * round + 1) {}
    }
    BARRIER();
  }
}
"#;

const ROUNDS: u32 = 20;
/// Tells a process of the test that it is the other one.
const OTHER: &str = "HK_EMU_TEST_OTHER";

fn device(number: u32) -> MachineOptions {
    let options = options("gfx942").patience(Duration::from_millis(300));
    options.node(&Node::new(), number).expect("a device of the node")
}

fn hex(handle: MemoryHandle) -> String {
    handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn handle(text: &str) -> MemoryHandle {
    let bytes =
        (0..MemoryHandle::BYTES).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hex"));
    MemoryHandle::from_bytes(bytes.collect::<Vec<_>>().try_into().expect("64 bytes"))
}

/// A process of the same test, and lines to and from it.
struct Other(Child, BufReader<std::process::ChildStdout>);

impl Other {
    fn start(test: &str) -> Other {
        let mut command = Command::new(std::env::current_exe().expect("a program"));
        command.args(["--exact", test, "--nocapture"]).env(OTHER, "1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("its output"));
        Other(child, lines)
    }

    fn say(&mut self, line: &str) {
        writeln!(self.0.stdin.as_mut().expect("its input"), "{line}").expect("it reads");
    }

    /// The next handle that it says.
    fn handle(&mut self) -> MemoryHandle {
        loop {
            let mut line = String::new();
            assert!(self.1.read_line(&mut line).expect("a line") > 0, "it has ended");
            if let Some((_, text)) = line.trim().split_once("handle ") {
                return handle(text);
            }
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_other() -> bool {
    std::env::var_os(OTHER).is_some()
}

fn heard() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    line.trim().to_owned()
}

fn args(mine: u64, theirs: u64, sums: u64, rank: u32) -> Args {
    Args::new().push(mine).push(theirs).push(sums).push(ROUNDS).push(rank)
}

#[test]
fn flags_and_atomics_between_processes() {
    let rank = u32::from(is_other());
    let rig = Rig::new(device(rank).details(true), &hip("gfx942", "-O2", SOURCE));
    let mine = rig.machine.alloc_shared(4 * 64 * 3, 256, "mine").expect("memory");
    let sums = rig.machine.alloc_shared(8, 256, "sums").expect("memory");
    assert_eq!(rig.download::<u32>(mine, 192), [0; 192]);
    let [own, own_sums] = [mine, sums].map(|addr| rig.machine.export(addr).expect("a handle"));
    if rank == 1 {
        println!("handle {}", hex(own));
        let theirs = rig.machine.import(handle(&heard())).expect("their memory");
        let sums = rig.machine.import(handle(&heard())).expect("their memory");
        let counters = rig.launch("meet", 1, 64, &args(mine, theirs, sums, rank)).expect("no fault");
        let peer = counters.details.expect("details");
        assert!(peer.peer_written_bytes >= u64::from(ROUNDS) * 4 * 66, "{peer:?}");
        rig.machine.free(theirs).expect("it is open");
        return;
    }
    let mut other = Other::start("processes::flags_and_atomics_between_processes");
    let theirs = rig.machine.import(other.handle()).expect("their memory");
    [own, own_sums].into_iter().for_each(|handle| other.say(&hex(handle)));
    rig.launch("meet", 1, 64, &args(mine, theirs, sums, rank)).expect("no fault");
    assert!(other.0.wait().expect("it ends").success());
    let each = u64::from(ROUNDS) * 64 * 2;
    assert_eq!(rig.download::<u64>(sums, 1), [each << 33 | each]);
    // What is mapped stays when its process has ended.
    assert_eq!(rig.download::<u32>(theirs, 2), [2 * ROUNDS + 1, 0]);
}

/// While the other process runs a launch may wait; when it has ended, that is a deadlock.
#[test]
fn a_process_that_ends_leaves_a_deadlock() {
    if is_other() {
        let machine = Machine::new(device(1));
        let theirs = machine.alloc_shared(4 * 192, 256, "theirs").expect("memory");
        println!("handle {}", hex(machine.export(theirs).expect("a handle")));
        heard();
        std::thread::sleep(Duration::from_millis(900));
        std::process::exit(0);
    }
    let rig = Rig::new(device(0), &hip("gfx942", "-O2", SOURCE));
    let mine = rig.machine.alloc_shared(4 * 192, 256, "mine").expect("memory");
    let mut other = Other::start("processes::a_process_that_ends_leaves_a_deadlock");
    let theirs = rig.machine.import(other.handle()).expect("their memory");
    other.say("go");
    let start = Instant::now();
    let fault = rig.launch("meet", 1, 64, &args(mine, theirs, mine + 8, 0)).expect_err("nobody comes");
    assert!(start.elapsed() >= Duration::from_millis(900), "{:?}", start.elapsed());
    let Fault::Sanitizer { what, .. } = &fault else { panic!("{fault}") };
    assert!(what.starts_with("deadlock"), "{what}");
    let ended = format!("process {}, whose memory it has, has ended", other.0.id());
    assert!(what.contains(&ended), "{what}");
}

#[test]
fn handles_that_are_none() {
    if is_other() {
        let machine = Machine::new(device(1));
        let addr = machine.alloc_shared(100, 256, "short").expect("memory");
        println!("handle {}", hex(machine.export(addr).expect("a handle")));
        heard();
        machine.free(addr).expect("it is there");
        println!("handle {}", hex(MemoryHandle::from_bytes([0; 64])));
        heard();
        return;
    }
    let machine = Machine::new(device(0));
    let plain = machine.alloc(64, 256, "plain").expect("memory");
    let error = machine.export(plain).expect_err("not shared");
    assert!(
        matches!(&error, MemoryError::NotShared { .. }) && error.to_string().contains("plain"),
        "{error}"
    );
    let shared = machine.alloc_shared(64, 256, "shared").expect("memory");
    let own = machine.export(shared).expect("a handle");
    assert!(machine.export(shared + 4).is_err());
    let refused = |machine: &Machine, handle, part: &str| {
        let text = machine.import(handle).expect_err("no such memory").to_string();
        assert!(text.starts_with("import: ") && text.contains(part), "{text}");
    };
    refused(&machine, own, "of this process");
    refused(&machine, MemoryHandle::from_bytes([7; 64]), "no handle");

    let mut other = Other::start("processes::handles_that_are_none");
    let theirs = other.handle();
    // Of a larger allocation, another descriptor, another file: bytes that nobody gave out.
    for at in [9, 16, 32, 40] {
        let mut bytes = theirs.to_bytes();
        bytes[at] ^= 0x40;
        refused(&machine, MemoryHandle::from_bytes(bytes), "of process");
    }
    let addr = machine.import(theirs).expect("it is there");
    let mut bytes = [1; 100];
    machine.read(addr, &mut bytes).expect("memory");
    assert_eq!(bytes, [0; 100]);
    let error = machine.read(addr + 1, &mut bytes).expect_err("too long").to_string();
    assert!(error.contains(&format!("memory of process {}", other.0.id())), "{error}");
    let error = machine.export(addr).expect_err("not of this process");
    assert!(matches!(error, MemoryError::NotShared { .. }), "{error}");
    other.say("free");
    other.handle();
    refused(&machine, theirs, "of process");
    machine.write(addr, &[3; 100]).expect("it stays while it is open");
    machine.free(addr).expect("it is open");
    assert!(machine.read(addr, &mut bytes).is_err());
    other.say("end");
}
