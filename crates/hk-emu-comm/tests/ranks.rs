//! Calls of several ranks, threads of one process and processes.

use hk_emu_comm::{Call, Communicator, DataType, Failure, Kind, Memory, Reduction, UniqueId};
use std::cell::RefCell;
use std::process::Command;
use std::time::{Duration, Instant};

/// Memory from address 0.
struct Plain(RefCell<Vec<u8>>);

impl Memory for Plain {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), String> {
        let (memory, at) = (self.0.borrow(), addr as usize);
        out.copy_from_slice(memory.get(at..at + out.len()).ok_or("no such address")?);
        Ok(())
    }

    fn write(&self, addr: u64, data: &[u8]) -> Result<(), String> {
        let (mut memory, at) = (self.0.borrow_mut(), addr as usize);
        memory.get_mut(at..at + data.len()).ok_or("no such address")?.copy_from_slice(data);
        Ok(())
    }
}

impl Plain {
    fn new(values: &[i32]) -> Self {
        Self(RefCell::new(values.iter().flat_map(|v| v.to_ne_bytes()).collect()))
    }

    fn values(&self) -> Vec<i32> {
        self.0.borrow().as_chunks().0.iter().map(|&bytes| i32::from_ne_bytes(bytes)).collect()
    }
}

const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// What `call` gives on each rank.
fn each<R: Send>(world: usize, timeout: Option<Duration>, call: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let id = UniqueId::new().unwrap();
    let (id, call) = (&id, &call);
    std::thread::scope(|scope| {
        let rank = |rank| {
            scope.spawn(move || {
                call(Communicator::join(id, world, rank, &format!("device {rank}"), timeout).unwrap())
            })
        };
        let ranks: Vec<_> = (0..world).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn call(kind: Kind, count: usize, send: u64, recv: u64) -> Call {
    Call { kind, send: 4 * send, recv: 4 * recv, count, data: DataType::I32 }
}

#[test]
fn every_collective_in_worlds_of_1_to_8() {
    for world in [1, 2, 3, 4, 8] {
        let w = world as i32;
        // Input: world x 2 values, `100 rank + index`; output behind it.
        let results = each(world, PATIENCE, |comm| {
            let r = comm.rank() as i32;
            let run = |kind, count| {
                let input: Vec<i32> = (0..2 * w).map(|i| 100 * r + i).chain(vec![-1; 2 * world]).collect();
                let memory = Plain::new(&input);
                comm.run(&[call(kind, count, 0, 2 * world as u64)], &memory).unwrap();
                memory.values()[2 * world..].to_vec()
            };
            let root = world - 1;
            [
                run(Kind::AllReduce(Reduction::Sum), 2 * world),
                run(Kind::Reduce(Reduction::Max, root), 2),
                run(Kind::Broadcast(root), 2),
                run(Kind::AllGather, 2),
                run(Kind::ReduceScatter(Reduction::Sum), 2),
                run(Kind::AllToAll, 2),
            ]
        });
        let ranks = 100 * w * (w - 1) / 2;
        for (r, [sum, largest, broadcast, gathered, scattered, exchanged]) in results.into_iter().enumerate()
        {
            let r = r as i32;
            assert_eq!(sum, (0..2 * w).map(|i| ranks + w * i).collect::<Vec<_>>());
            let top = 100 * (w - 1);
            assert_eq!(largest[..2], if r == w - 1 { [top, top + 1] } else { [-1, -1] });
            assert_eq!(broadcast[..2], [top, top + 1]);
            assert_eq!(gathered, (0..w).flat_map(|o| [100 * o, 100 * o + 1]).collect::<Vec<_>>());
            assert_eq!(scattered[..2], [ranks + w * 2 * r, ranks + w * (2 * r + 1)]);
            let of = |o: i32| [100 * o + 2 * r, 100 * o + 2 * r + 1];
            assert_eq!(exchanged, (0..w).flat_map(of).collect::<Vec<_>>());
        }
    }
}

#[test]
fn transfers_of_a_group_do_not_wait_for_each_other() {
    let results = each(4, PATIENCE, |comm| {
        let (rank, world) = (comm.rank(), comm.world());
        let memory = Plain::new(&[rank as i32, -1]);
        let ring = [
            call(Kind::Send((rank + 1) % world), 1, 0, 0),
            call(Kind::Recv((rank + world - 1) % world), 1, 0, 1),
        ];
        comm.run(&ring, &memory).unwrap();
        memory.values()[1]
    });
    assert_eq!(results, [3, 0, 1, 2]);
    // Two sends, then two receives, outside of a group: hardware need not buffer them.
    let timeout = Some(Duration::from_millis(500));
    let results =
        each(2, timeout, |comm| comm.run(&[call(Kind::Send(1 - comm.rank()), 1, 0, 0)], &Plain::new(&[0])));
    assert!(results.iter().all(|r| matches!(r, Err(Failure::Timeout { .. }))), "{results:?}");
}

#[test]
fn a_split_has_its_own_ranks() {
    let results = each(4, PATIENCE, |comm| {
        // Ranks 0 and 2, in reverse; rank 1 alone; rank 3 not at all.
        let color = [Some(7), Some(8), Some(7), None][comm.rank()];
        let part = comm.split(color, -(comm.rank() as i32)).unwrap()?;
        let memory = Plain::new(&[comm.rank() as i32, -1, -1]);
        part.run(&[call(Kind::AllGather, 1, 0, 1)], &memory).unwrap();
        Some((part.rank(), part.world(), memory.values()[1..].to_vec()))
    });
    let pair = |rank| Some((rank, 2, vec![2, 0]));
    assert_eq!(results, [pair(1), Some((0, 1, vec![1, -1])), pair(0), None]);
}

#[test]
fn ranks_that_differ_are_told_and_go_on() {
    let results = each(2, PATIENCE, |comm| {
        let wrong = comm.run(&[call(Kind::AllGather, 1 + comm.rank(), 0, 2)], &Plain::new(&[0; 8]));
        let memory = Plain::new(&[1, 0]);
        comm.run(&[call(Kind::AllReduce(Reduction::Sum), 1, 0, 1)], &memory).unwrap();
        assert_eq!(memory.values()[1], 2);
        wrong.unwrap_err().to_string()
    });
    let [a, b] = ["all_gather of 1 x I32 on rank 0", "all_gather of 2 x I32 on rank 1"];
    assert_eq!(results, [format!("{a}, {b}"), format!("{b}, {a}")]);
    // A transfer: the receiver is told.
    let results = each(2, PATIENCE, |comm| {
        let kind = if comm.rank() == 0 { Kind::Send(1) } else { Kind::Recv(0) };
        comm.run(&[call(kind, 1 + comm.rank(), 0, 2)], &Plain::new(&[0; 8]))
    });
    assert!(
        results[0].is_ok() && matches!(results[1], Err(Failure::Mismatch { other: 0, .. })),
        "{results:?}"
    );
}

#[test]
fn faults() {
    // Aborted by the rank that does not call.
    let start = Instant::now();
    let results = each(3, PATIENCE, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            comm.abort();
        }
        comm.run(&[call(Kind::AllGather, 1, 0, 1)], &Plain::new(&[0; 4]))
    });
    assert_eq!(results, vec![Err(Failure::Aborted); 3]);
    // Left.
    let results = each(2, PATIENCE, |comm| {
        (comm.rank() == 0).then(|| comm.run(&[call(Kind::AllGather, 1, 0, 1)], &Plain::new(&[0; 3])))
    });
    assert_eq!(results, [Some(Err(Failure::Left { rank: 1 })), None]);
    // Memory that is not there.
    let results = each(2, PATIENCE, |comm| {
        comm.run(
            &[call(Kind::AllReduce(Reduction::Sum), 1, 99 * comm.rank() as u64, 1)],
            &Plain::new(&[0; 3]),
        )
    });
    assert_eq!(results, [Err(Failure::Aborted), Err(Failure::Memory("no such address".into()))]);
    assert!(start.elapsed() < Duration::from_secs(30));
    // Ranks that are not there, and devices that are there twice.
    let results = each(1, PATIENCE, |comm| comm.run(&[call(Kind::Send(1), 1, 0, 0)], &Plain::new(&[0])));
    assert_eq!(results, [Err(Failure::Invalid("rank 1 of 1".into()))]);
    let id = UniqueId::new().unwrap();
    let both = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || Communicator::join(&id, 2, rank, "gpu", PATIENCE)));
        ranks.map(|rank| rank.join().unwrap().unwrap_err())
    });
    assert!(both.iter().all(|e| e.to_string() == "ranks 0 and 1 are both on gpu"), "{both:?}");
    assert!(matches!(Communicator::join(&id, 2, 2, "gpu", None), Err(Failure::Invalid(_))));
    assert!(matches!(UniqueId::from_bytes([0; 128]), Err(Failure::Invalid(_))));
}

const ID: &str = "HK_TEST_UNIQUE_ID";

/// The other process of the next test.
#[test]
#[ignore = "started by another test"]
fn rank_1_in_a_process() {
    let text = std::env::var(ID).unwrap();
    let bytes: Vec<u8> = text.split(' ').map(|byte| byte.parse().unwrap()).collect();
    let id = UniqueId::from_bytes(bytes.try_into().unwrap()).unwrap();
    let comm = Communicator::join(&id, 2, 1, "device 1", PATIENCE).unwrap();
    calls_of_two(&comm);
}

fn calls_of_two(comm: &Communicator) {
    let rank = comm.rank();
    let memory = Plain::new(&[10 + rank as i32, -1, -1, -1]);
    let group = [
        call(Kind::AllGather, 1, 0, 1),
        call(Kind::Send(1 - rank), 1, 0, 0),
        call(Kind::Recv(1 - rank), 1, 0, 3),
    ];
    comm.run(&group, &memory).unwrap();
    let own = 10 + rank as i32;
    assert_eq!(memory.values(), [own, 10, 11, 21 - own]);
    // Far more than goes through a socket at once, of each rank other values, twice.
    let n = 100_000;
    for round in 0..2 {
        let value = |rank: usize, i: usize| (i * (3 + rank) + round) as i32;
        let input: Vec<i32> = (0..4 * n).map(|i| value(rank, i)).collect();
        let memory = Plain::new(&input);
        let group = [
            call(Kind::AllGather, n, 0, n as u64),
            call(Kind::Send(1 - rank), n, 0, 0),
            call(Kind::Recv(1 - rank), n, 0, 3 * n as u64),
        ];
        comm.run(&group, &memory).unwrap();
        let parts = [rank, 0, 1, 1 - rank].into_iter();
        let want: Vec<i32> = parts.flat_map(|rank| (0..n).map(move |i| value(rank, i))).collect();
        assert!(memory.values() == want);
    }
    let swapped = comm.split(Some(0), -(rank as i32)).unwrap().unwrap();
    assert_eq!(swapped.rank(), 1 - rank);
    let wrong = comm.run(&[call(Kind::Broadcast(rank), 1, 0, 1)], &memory);
    assert!(matches!(wrong, Err(Failure::Mismatch { .. })), "{wrong:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_of_two_processes() {
    let id = UniqueId::new().unwrap();
    let text: Vec<String> = id.to_bytes().iter().map(u8::to_string).collect();
    let mut other = Command::new(std::env::current_exe().unwrap());
    let mut other =
        other.args(["--ignored", "--exact", "rank_1_in_a_process"]).env(ID, text.join(" ")).spawn().unwrap();
    let comm = Communicator::join(&id, 2, 0, "device 0", PATIENCE).unwrap();
    calls_of_two(&comm);
    assert!(other.wait().unwrap().success());
    let gone = comm.run(&[call(Kind::AllGather, 1, 0, 1)], &Plain::new(&[0; 3]));
    assert_eq!(gone, Err(Failure::Left { rank: 1 }));
}
