//! All-reduce: integers and random values, both forms, all worlds, in place, graphs, and ranks that are late.

use crate::common::{Ranks, bits, integers, options, random, sum};
use hk_comm::{Algorithm, P2pOptions, all_reduce, all_reduce_in_place};
use hk_core::{Arch, Float, bf16, f16};
use proptest::prelude::*;
use std::time::Duration;

const BOTH: [Algorithm; 2] = [Algorithm::OneShot, Algorithm::TwoShot];

/// The result on each rank.
fn run<T: Float>(ranks: &mut Ranks, x: &[Vec<T>], algorithm: Algorithm, in_place: bool) -> Vec<Vec<T>> {
    ranks.each(|rank, comm, stream| {
        let n = x[rank].len();
        let mut buffer = stream.upload(&x[rank]).unwrap();
        if in_place {
            all_reduce_in_place(comm, stream, buffer.view_mut([n]).unwrap(), algorithm).unwrap();
            return stream.download(&buffer).unwrap();
        }
        let mut y = stream.upload(&vec![T::from_f32(f32::NAN); n]).unwrap();
        all_reduce(comm, stream, buffer.view([n]).unwrap(), y.view_mut([n]).unwrap(), algorithm).unwrap();
        assert_eq!(bits(&stream.download(&buffer).unwrap()), bits(&x[rank]), "x of rank {rank} is as it was");
        stream.download(&y).unwrap()
    })
}

fn integers_are_exact<T: Float>(arch: Arch, world: usize, packets: &[usize]) {
    let mut ranks = Ranks::new(arch, world);
    for (turn, &packets) in packets.iter().enumerate() {
        let n = packets * 16 / size_of::<T>();
        let x: Vec<Vec<T>> = (0..world).map(|rank| integers(rank, n)).collect();
        let want: Vec<f32> = (0..n).map(|i| x.iter().map(|x| x[i].to_f32()).sum()).collect();
        for algorithm in BOTH {
            for (rank, got) in run(&mut ranks, &x, algorithm, turn % 2 == 1).iter().enumerate() {
                let got: Vec<f32> = got.iter().map(|v| v.to_f32()).collect();
                assert_eq!(
                    got,
                    want,
                    "{arch}, {world} ranks, {n} of {}, {algorithm:?}, rank {rank}",
                    T::DTYPE
                );
            }
        }
    }
}

/// A packet, a chunk of 512, a tile of chunks and several, and one past each.
const PACKETS: [usize; 7] = [1, 511, 512, 513, 1025, 4096, 4099];

#[test]
fn integers_are_exact_in_every_form_and_world() {
    for world in [1, 2, 4, 8] {
        let few = if world == 8 { &PACKETS[..5] } else { &PACKETS[..] };
        integers_are_exact::<bf16>(Arch::Gfx942, world, few);
        integers_are_exact::<f16>(Arch::Gfx950, world, &PACKETS[..4]);
        integers_are_exact::<f32>(Arch::Gfx942, world, &PACKETS[2..5]);
    }
}

proptest! {
    #![proptest_config(hk_testkit::config())]
    /// One rounding of the sum in rank order, the same bits on all ranks and from both forms; near the sum in f64.
    #[test]
    fn sums_are_rounded_once_in_rank_order(log in 0..4usize, packets in 1..1400usize, seed in 0..1000u64) {
        let world = 1 << log;
        let n = packets * 8;
        let x: Vec<Vec<bf16>> = (0..world).map(|rank| random(seed * 8 + rank as u64, n)).collect();
        let want = sum(&x);
        for arch in Arch::AMD {
            let mut ranks = Ranks::new(arch, world);
            for algorithm in BOTH {
                for got in run(&mut ranks, &x, algorithm, seed % 2 == 0) {
                    prop_assert_eq!(bits(&got), bits(&want), "{} {:?}", arch, algorithm);
                }
            }
        }
        for (i, got) in want.iter().enumerate() {
            let exact: f64 = x.iter().map(|x| x[i].to_f64()).sum();
            let size: f64 = x.iter().map(|x| x[i].to_f64().abs()).sum();
            let error = (got.to_f64() - exact).abs();
            prop_assert!(error <= exact.abs() / 256.0 + size * world as f64 / (1 << 23) as f64, "{} {}", got, exact);
        }
    }
}

/// Infinities and NaNs of one rank reach all.
#[test]
fn special_values_reach_all_ranks() {
    let mut ranks = Ranks::new(Arch::Gfx942, 2);
    let special = [f32::INFINITY, f32::NAN, -0.0, f32::NEG_INFINITY];
    let x = [special.to_vec(), vec![1.0, 1.0, -0.0, f32::INFINITY]];
    for algorithm in BOTH {
        for got in run(&mut ranks, &x, algorithm, false) {
            assert_eq!(got[0], f32::INFINITY);
            assert!(got[1].is_nan() && got[3].is_nan(), "{got:?}");
            assert_eq!(got[2].to_bits(), (-0.0f32).to_bits());
        }
    }
}

/// Nothing but the launches' own meetings orders the ranks: some come late, many times, in both forms in turn.
#[test]
fn ranks_that_are_late() {
    let mut ranks = Ranks::new(Arch::Gfx942, 4);
    let n = 2048;
    let results = ranks.each(|rank, comm, stream| {
        let mut y = stream.upload(&integers::<f32>(rank, n)).unwrap();
        for turn in 0..12 {
            if (turn + rank) % 4 == 0 {
                std::thread::sleep(Duration::from_millis(3 * (rank as u64 + 1)));
            }
            all_reduce_in_place(comm, stream, y.view_mut([n]).unwrap(), BOTH[turn / 2 % 2]).unwrap();
        }
        comm.check().unwrap();
        stream.download(&y).unwrap()
    });
    let first: f32 = (0..4).map(|rank| integers::<f32>(rank, n)[5]).sum();
    assert_eq!(results[0][5], first * 4f32.powi(11));
    assert!(results.iter().all(|result| bits(result) == bits(&results[0])));
}

/// A graph takes nothing from the host: replays are further calls.
#[test]
fn graphs_are_replayed() {
    let mut ranks = Ranks::new(Arch::Gfx942, 2);
    let n = 1024;
    let replays = 100;
    let results = ranks.each(|rank, comm, stream| {
        let x = stream.upload(&integers::<f32>(rank, n)).unwrap();
        let [mut y, mut z] = [(), ()].map(|()| stream.alloc_zeroed::<f32>(n).unwrap());
        let graph = stream
            .capture(|| {
                all_reduce(comm, stream, x.view([n])?, y.view_mut([n])?, Algorithm::OneShot)?;
                all_reduce(comm, stream, y.view([n])?, z.view_mut([n])?, Algorithm::TwoShot)
            })
            .unwrap();
        for _ in 0..replays {
            // SAFETY: the buffers are alive, and nothing else uses them.
            unsafe { graph.launch(stream).unwrap() };
        }
        all_reduce_in_place(comm, stream, z.view_mut([n]).unwrap(), Algorithm::OneShot).unwrap();
        comm.check().unwrap();
        stream.download(&z).unwrap()
    });
    let want: Vec<f32> = sum(&[integers(0, n), integers(1, n)]).iter().map(|v: &f32| 4.0 * v).collect();
    assert!(results.iter().all(|result| *result == want));
}

/// Launches of one block and of several in turn: which block has a packet changes from one to the next.
#[test]
fn grids_of_different_sizes() {
    let many = P2pOptions { blocks: Some(5), ..options() };
    let mut ranks = Ranks::with(Arch::Gfx942, 4, "&sanitize=all", &many);
    let sizes = [1, 2600, 3, 1200, 2600, 513, 1];
    let results = ranks.each(|rank, comm, stream| {
        let n = 4 * sizes[1];
        let mut buffers: Vec<_> =
            sizes.iter().map(|_| stream.upload(&integers::<f32>(rank, n)).unwrap()).collect();
        for (turn, (y, packets)) in buffers.iter_mut().zip(sizes).enumerate() {
            if turn % 4 == rank {
                std::thread::sleep(Duration::from_millis(10));
            }
            let part = y.view_mut([n]).unwrap().slice(0, 0..4 * packets).unwrap();
            all_reduce_in_place(comm, stream, part, BOTH[turn % 2]).unwrap();
        }
        comm.check().unwrap();
        buffers.iter().map(|y| stream.download(y).unwrap()).collect::<Vec<_>>()
    });
    let want = sum::<f32>(&[0, 1, 2, 3].map(|rank| integers(rank, 4 * sizes[1])));
    for (rank, buffers) in results.iter().enumerate() {
        for (got, packets) in buffers.iter().zip(sizes) {
            assert_eq!(got[..4 * packets], want[..4 * packets], "{packets} packets, rank {rank}");
        }
    }
}

/// Two communicators on the same devices, each on its streams, at the same time.
#[test]
fn communicators_do_not_meet() {
    let streams = crate::common::streams(Arch::Gfx942, 2, "");
    let more: Vec<_> = streams.iter().map(|stream| stream.device().create_stream().unwrap()).collect();
    let mut all = Ranks { comms: hk_comm::P2pComm::new(&streams, &options()).unwrap() };
    all.comms.extend(hk_comm::P2pComm::new(&more, &options()).unwrap());
    let n = 512;
    let results = all.each(|index, comm, stream| {
        let mut y = stream.upload(&integers::<f32>(index, n)).unwrap();
        for _ in 0..4 {
            all_reduce_in_place(comm, stream, y.view_mut([n]).unwrap(), Algorithm::TwoShot).unwrap();
        }
        stream.download(&y).unwrap()
    });
    for (at, pair) in results.chunks(2).enumerate() {
        let sum: Vec<f32> = sum(&[integers(2 * at, n), integers(2 * at + 1, n)]);
        let want: Vec<f32> = sum.iter().map(|v| 8.0 * v).collect();
        assert!(pair.iter().all(|result| *result == want));
    }
}

/// Under every sanitizer: races between the ranks at system scope, waits, uninitialised memory.
#[test]
fn sanitizers_find_nothing() {
    for arch in Arch::AMD {
        let mut ranks = Ranks::with(arch, 4, "&sanitize=all", &options());
        let x: Vec<Vec<bf16>> = (0..4).map(|rank| integers(rank, 8 * 600)).collect();
        for algorithm in [BOTH[0], BOTH[1], BOTH[0], BOTH[1]] {
            for got in run(&mut ranks, &x, algorithm, true) {
                assert_eq!(bits(&got), bits(&sum(&x)));
            }
        }
    }
}
