//! Several devices of one host: peer access, flags between devices, deadlocks across them, and races at system scope.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Args, Rig, options};
use hk_emu::{Access, Check, Counters, Fault, MachineOptions, MemoryProblem, Near, Node, PeerError};

const PRELUDE: &str = r#"
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
#define LOAD(p, order) __hip_atomic_load(p, order, SYSTEM)
#define STORE(p, x, order) __hip_atomic_store(p, x, order, SYSTEM)
struct Ranks { u64 at[8]; };
"#;

/// Each rank tells all others that it has arrived in each of several rounds, and waits for all of them.
const BARRIER: &str = r#"
KERNEL void meet(Ranks flags, Ranks data, u32 rank, u32 world, u32 rounds) {
  u32 *own = (u32 *)data.at[rank];
  for (u32 round = 1; round <= rounds; round++) {
    own[256 * BID + TID] = round * (rank + 1); // write
    BARRIER();
    if (TID < world) {
      STORE((u32 *)flags.at[TID] + 8 * BID + rank, 2 * round, __ATOMIC_RELEASE); // arrive
      while (LOAD((u32 *)flags.at[rank] + 8 * BID + TID, __ATOMIC_ACQUIRE) < 2 * round) __builtin_amdgcn_s_sleep(1); // wait
    }
    BARRIER();
    u32 sum = 0;
    for (u32 r = 0; r < world; r++) sum += ((u32 *)data.at[r])[256 * BID + TID]; // read
    own[4096 + 256 * BID + TID] = sum;
    BARRIER();
    if (TID < world) {
      STORE((u32 *)flags.at[TID] + 8 * BID + rank, 2 * round + 1, __ATOMIC_RELEASE);
      while (LOAD((u32 *)flags.at[rank] + 8 * BID + TID, __ATOMIC_ACQUIRE) < 2 * round + 1) __builtin_amdgcn_s_sleep(1);
    }
    BARRIER();
  }
}
"#;

/// Ranks of one node with the same module, a page of flags and a buffer of 8192 words each.
struct Ranks {
    rigs: Vec<Rig>,
    flags: Vec<u64>,
    data: Vec<u64>,
}

impl Ranks {
    fn new(world: usize, image: &[u8], each: impl Fn(MachineOptions) -> MachineOptions) -> Ranks {
        let node = Node::new();
        let rig = |device| {
            let options = options("gfx942").patience(Duration::from_millis(300));
            Rig::new(each(options.node(&node, device as u32).expect("a device of the node")), image)
        };
        let rigs: Vec<Rig> = (0..world).map(rig).collect();
        for (i, a) in rigs.iter().enumerate() {
            for (_, b) in rigs.iter().enumerate().filter(|(j, _)| *j != i) {
                assert_eq!(a.machine.enable_peer(&b.machine), Ok(false));
                assert_eq!(a.machine.enable_peer(&b.machine), Ok(true), "for the second time");
            }
        }
        let flags = rigs.iter().map(|rig| rig.upload("flags", &[0u32; 256])).collect();
        let data = rigs.iter().map(|rig| rig.upload("data", &vec![0u32; 8192])).collect();
        Ranks { rigs, flags, data }
    }

    fn args(&self, rank: usize) -> Args {
        let push = |args: Args, of: &[u64]| {
            (0..8).fold(args, |args, i| args.push(of.get(i).copied().unwrap_or_default()))
        };
        let args = push(push(Args::new(), &self.flags), &self.data);
        args.push(rank as u32).push(self.rigs.len() as u32)
    }

    /// Launches on all ranks but some, side by side.
    fn launch(&self, kernel: &str, grid: u32, last: u32, without: &[usize]) -> Vec<Result<Counters, Fault>> {
        let run = |rank: usize| {
            (!without.contains(&rank))
                .then(|| self.rigs[rank].launch(kernel, grid, 256, &self.args(rank).push(last)))
        };
        let run = &run;
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..self.rigs.len()).map(|rank| scope.spawn(move || run(rank))).collect();
            ranks.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
        })
    }
}

fn compile(source: &str) -> Vec<u8> {
    crate::common::hip("gfx942", "-O2", &format!("{PRELUDE}{source}"))
}

static MEET: LazyLock<Vec<u8>> = LazyLock::new(|| compile(BARRIER));

#[test]
fn flags_between_devices() {
    for world in [1, 2, 4, 8] {
        for threads in [1, 2] {
            let ranks = Ranks::new(world, &MEET, |options| options.threads(Some(threads)));
            let (grid, rounds) = (2, 5);
            for outcome in ranks.launch("meet", grid, rounds, &[]) {
                outcome.unwrap_or_else(|fault| panic!("{world} ranks, {threads} threads: {fault}"));
            }
            let sum = rounds * (1..=world as u32).sum::<u32>();
            for (rig, data) in ranks.rigs.iter().zip(&ranks.data) {
                let words: Vec<u32> = rig.download(*data, 8192);
                assert!(words[4096..4096 + 256 * grid as usize].iter().all(|w| *w == sum), "{world} ranks");
            }
        }
    }
}

/// The others wait, the launches end with a report that names all of them, and the devices go on.
#[test]
fn a_rank_that_is_missing_is_a_deadlock() {
    for threads in [1, 2] {
        let ranks = Ranks::new(4, &MEET, |options| options.threads(Some(threads)));
        let outcomes = ranks.launch("meet", 1, 1, &[2]);
        assert_eq!(outcomes.len(), 3);
        for (outcome, rank) in outcomes.into_iter().zip([0, 1, 3]) {
            let fault = outcome.expect_err("rank 2 never arrives");
            let Fault::Sanitizer { check: Check::Barriers, what, site, near, .. } = &fault else {
                panic!("{fault}")
            };
            assert!(what.starts_with("deadlock"), "{what}");
            assert!(what.contains(&format!("this launch runs on device {rank}")), "{what}");
            for other in [0, 1, 3].into_iter().filter(|other| *other != rank) {
                let at = ranks.flags[other] + 8;
                let line = format!(
                    "on device {other} kernel meet waits as well: workgroup (0, 0, 0), wave 0, for {at:#x} of device {other}, at \
                     byte 8 of live allocation \"flags\""
                );
                assert!(what.contains(&line), "{what}\nlacks {line}");
            }
            assert_eq!(site.kernel, "meet");
            let Some(Near::Allocation { label, offset: 8, .. }) = near.as_deref() else { panic!("{near:?}") };
            assert_eq!(label, "flags");
        }
        for (rig, flags) in ranks.rigs.iter().zip(&ranks.flags) {
            rig.machine.fill(*flags, &[0], 1024).expect("memory lives");
        }
        assert!(ranks.launch("meet", 1, 1, &[]).iter().all(Result::is_ok));
    }
}

#[test]
fn memory_of_a_device_without_access_is_out_of_reach() {
    let image = compile("KERNEL void read(u32 *from, u32 *to) { to[TID] = from[TID]; }");
    let node = Node::new();
    let rig = |device| {
        let rig = Rig::new(options("gfx942").node(&node, device).expect("a device"), &image);
        let x = rig.upload("x", &[device; 64]);
        (rig, x)
    };
    let ((a, x), (b, y)) = (rig(0), rig(1));
    let read = || a.launch("read", 1, 64, &Args::new().push(y).push(x));
    let refused = |outcome: Result<Counters, Fault>| match outcome {
        Err(Fault::Memory {
            problem,
            access: Access::Read,
            near: Some(Near::Allocation { label, base, .. }),
            ..
        }) => {
            assert_eq!((label.as_str(), base), ("x", y));
            problem
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(read()), MemoryProblem::NoPeerAccess);
    assert_eq!(a.machine.enable_peer(&b.machine), Ok(false));
    read().expect("peer access");
    assert_eq!(a.download::<u32>(x, 64), [1; 64]);
    // One way.
    let other_way = b.launch("read", 1, 64, &Args::new().push(x).push(y)).expect_err("not enabled");
    assert!(other_way.to_string().contains("not enabled peer read"), "{other_way}");
    assert!(a.machine.disable_peer(&b.machine) && !a.machine.disable_peer(&b.machine));
    assert_eq!(refused(read()), MemoryProblem::NoPeerAccess);
    // What is freed is named, too.
    a.machine.enable_peer(&b.machine).expect("a peer");
    b.machine.free(y).expect("it lives");
    assert_eq!(refused(read()), MemoryProblem::UseAfterFree);
}

#[test]
fn peers_are_devices_of_one_node() {
    let node = Node::new();
    let machine =
        |node: &Node, device| hk_emu::Machine::new(options("gfx942").node(node, device).expect("a device"));
    let (a, b, c) = (machine(&node, 0), machine(&node, 1), machine(&Node::new(), 1));
    assert_eq!((a.device(), b.device()), (Some(0), Some(1)));
    assert_eq!(a.can_access_peer(&b), Ok(()));
    assert_eq!(a.can_access_peer(&c), Err(PeerError::OtherNode));
    assert_eq!(a.can_access_peer(&a), Err(PeerError::SameDevice(0)));
    let alone = hk_emu::Machine::new(options("gfx942"));
    assert_eq!(alone.device(), None);
    assert_eq!(a.enable_peer(&alone), Err(PeerError::OtherNode));
    assert!(options("gfx942").node(&node, Node::MAX_DEVICES).is_none());
    // A device that is closed is none, and one that is opened in its place has other memory.
    assert_eq!(a.enable_peer(&b), Ok(false));
    drop(b);
    assert_eq!(a.enable_peer(&machine(&node, 1)), Ok(false));
}

/// Message passing: rank 0 writes values and then a flag in the memory of rank 1, which waits for it.
const MESSAGE: &str = r#"
KERNEL void message(Ranks flags, Ranks data, u32 rank, u32 world, u32 rounds) {
  u32 *values = (u32 *)data.at[1], *flag = (u32 *)flags.at[1], *taken = (u32 *)flags.at[0];
  if (TID >= 64) return;
  for (u32 i = 1; i <= rounds; i++) {
    if (rank == 0) {
      values[TID] = i * TID; // send
      STORE(flag, i, __ATOMIC_RELEASE); // flag
      while (LOAD(taken, __ATOMIC_ACQUIRE) < i) __builtin_amdgcn_s_sleep(1);
    } else {
      while (LOAD(flag, __ATOMIC_ACQUIRE) < i) __builtin_amdgcn_s_sleep(1); // poll
      if (values[TID] != i * TID) values[128] = i; // receive
      STORE(taken, i, __ATOMIC_RELEASE);
    }
  }
}
"#;

fn message(image: &[u8], checks: impl Into<hk_emu::Checks> + Copy) -> (Vec<Result<Counters, Fault>>, u32) {
    let ranks = Ranks::new(2, image, |options| options.sanitize(checks.into()));
    let outcomes = ranks.launch("message", 1, 50, &[]);
    (outcomes, ranks.rigs[1].download::<u32>(ranks.data[1], 129)[128])
}

#[test]
fn messages_between_devices() {
    let image = compile(MESSAGE);
    for _ in 0..5 {
        let (outcomes, wrong) = message(&image, hk_emu::Checks::NONE);
        outcomes.into_iter().for_each(|outcome| assert!(outcome.is_ok(), "{outcome:?}"));
        assert_eq!(wrong, 0);
    }
}

/// A counter that all ranks add to.
#[test]
fn atomics_at_system_scope() {
    let image = compile(
        "KERNEL void count(Ranks flags, Ranks data, u32 rank, u32 world, u32 n) {
           for (u32 i = 0; i < n; i++) __hip_atomic_fetch_add((u32 *)data.at[0] + i % 3, 1u, __ATOMIC_RELAXED, SYSTEM);
         }",
    );
    let ranks = Ranks::new(4, &image, |options| options);
    assert!(ranks.launch("count", 3, 30, &[]).iter().all(Result::is_ok));
    assert_eq!(
        ranks.rigs[0].download::<u32>(ranks.data[0], 4),
        [4 * 3 * 256 * 10, 4 * 3 * 256 * 10, 4 * 3 * 256 * 10, 0]
    );
}

#[test]
fn accesses_of_peers_are_counted() {
    let ranks = Ranks::new(4, &MEET, |options| options.details(true));
    for outcome in ranks.launch("meet", 2, 3, &[]) {
        let details = outcome.expect("it ends").details.expect("details");
        // Data of three others; twice a flag of each.
        assert_eq!(details.peer_read_bytes, 2 * 3 * 3 * 1024);
        assert_eq!(details.peer_written_bytes, 2 * 3 * 2 * 3 * 4);
        assert_eq!(details.peer_wide_bytes, 0);
    }
}

/// The constant counter is one clock for all devices: a wait of 20 ms takes them, and another device may end it.
#[test]
fn the_constant_counter_is_the_time_of_the_host() {
    let image = compile(
        "KERNEL void expire(Ranks flags, Ranks data, u32 rank, u32 world, u32 ticks) {
           u32 *flag = (u32 *)flags.at[0];
           u64 start = __builtin_readsteadycounter();
           while (LOAD(flag, __ATOMIC_ACQUIRE) == 0 && __builtin_readsteadycounter() - start < ticks) __builtin_amdgcn_s_sleep(4);
           if (TID == 0) ((u32 *)data.at[rank])[0] = __builtin_readsteadycounter() - start >= ticks;
         }",
    );
    let ranks = Ranks::new(2, &image, |options| options);
    let start = std::time::Instant::now();
    assert!(ranks.launch("expire", 1, 2_000_000, &[]).iter().all(Result::is_ok));
    assert!(start.elapsed() >= Duration::from_millis(20));
    let expired = |rank: usize| ranks.rigs[rank].download::<u32>(ranks.data[rank], 1)[0];
    assert_eq!((expired(0), expired(1)), (1, 1));
}

#[test]
fn messages_under_the_check_of_global_memory() {
    let (outcomes, wrong) = message(&compile(MESSAGE), Check::Global);
    outcomes.into_iter().for_each(|outcome| assert!(outcome.is_ok(), "{outcome:?}"));
    assert_eq!(wrong, 0);
}
