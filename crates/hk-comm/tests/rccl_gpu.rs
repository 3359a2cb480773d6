//! On the GPUs that `HK_TEST_DEVICES` names: `RcclComm` over the library (RCCL on `hip:..`, NCCL on `cuda:..`), `P2pComm` of threads and of processes.

use crate::common::quantized::{KINDS, Kind};
use crate::common::{Ranks, bits, integers, sum};
use crate::halves::halves_are_the_whole;
use crate::processes::{collectives, meet};
use crate::quantized::{nothing, same_as_apart, small};
use crate::rccl::{collectives_on, each};
use crate::rccl_norms::forms;
use hk_comm::{Algorithm, Group, P2pComm, P2pOptions, RcclComm, RcclOptions, ReduceOp, UniqueId};
use hk_core::quant::Quantized;
use hk_core::{Arch, Device, Error, Fp8E4M3, Fp8E4M3Fnuz, Stream, bf16, f16};
use std::time::{Duration, Instant};

/// The GPUs of each driver, with a stream each; groups of one are too few for a test of several.
fn gpus() -> Vec<Vec<Stream>> {
    let names = std::env::var("HK_TEST_DEVICES").unwrap_or_default();
    let of = |driver: &str| {
        let specs = names.split(',').filter(|spec| spec.starts_with(driver));
        specs.map(|spec| Device::open(spec).unwrap().create_stream().unwrap()).collect::<Vec<_>>()
    };
    [of("hip:"), of("cuda:")].into_iter().filter(|streams| streams.len() > 1).collect()
}

/// Of each of these, the GPUs of the first one's target: kernels that read the memory of others are of one target.
fn alike() -> Vec<Vec<Stream>> {
    let of_one = |streams: Vec<Stream>| {
        let arch = streams[0].device().arch();
        streams.into_iter().filter(|stream| stream.device().arch() == arch).collect::<Vec<_>>()
    };
    gpus().into_iter().map(of_one).filter(|streams| streams.len() > 1).collect()
}

fn options(timeout: Duration) -> RcclOptions {
    RcclOptions { timeout: Some(timeout), checked: false }
}

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn collectives_of_the_library() {
    for streams in gpus() {
        for world in 1..=streams.len() {
            let ranks = || RcclComm::all(&streams[..world], &options(PATIENCE)).unwrap();
            collectives_on::<bf16>(ranks(), 17);
            collectives_on::<f32>(ranks(), 4095);
            collectives_on::<f16>(ranks(), 2);
            let for_ever = RcclOptions { timeout: None, checked: false };
            collectives_on::<bf16>(RcclComm::all(&streams[..world], &for_ever).unwrap(), 1023);
        }
    }
}

#[test]
fn groups_splits_scalars_and_checked_mode_of_the_library() {
    for streams in gpus() {
        let world = streams.len();
        let id = UniqueId::new(streams[0].device()).unwrap();
        let checked = RcclOptions { checked: true, ..options(PATIENCE) };
        let join = |rank: usize, stream: &Stream| RcclComm::new(stream, &id, world, rank, &checked).unwrap();
        let join = &join;
        let results = std::thread::scope(|scope| {
            let rank = |(rank, stream)| {
                scope.spawn(move || {
                    let comm = join(rank, stream);
                    let x = stream.upload(&[rank as f32, 2.0]).unwrap();
                    let mut y = stream.alloc_zeroed::<f32>(2).unwrap();
                    let mut group = Group::new();
                    group.send(&comm, x.view([2]).unwrap(), (rank + 1) % world).unwrap();
                    group.recv(&comm, y.view_mut([2]).unwrap(), (rank + world - 1) % world).unwrap();
                    group.end().unwrap();
                    let ring = stream.download(&y).unwrap();
                    let op = ReduceOp::PreMulSum(0.5);
                    comm.all_reduce(stream, x.view([2]).unwrap(), y.view_mut([2]).unwrap(), op).unwrap();
                    let scaled = stream.download(&y).unwrap();
                    let part = comm.split(Some(0), -(rank as i32)).unwrap().unwrap();
                    assert_eq!((part.rank(), part.world()), (world - 1 - rank, world));
                    let wrong = comm.all_reduce(
                        stream,
                        x.view([2]).unwrap(),
                        y.view_mut([2]).unwrap(),
                        if rank == 0 { ReduceOp::Max } else { ReduceOp::Min },
                    );
                    assert!(matches!(wrong, Err(Error::Shape { .. })), "{wrong:?}");
                    comm.check().unwrap();
                    (ring, scaled)
                })
            };
            let threads: Vec<_> = streams.iter().enumerate().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let half_sum = 0.25 * (world * (world - 1)) as f32;
        for (rank, (ring, scaled)) in results.into_iter().enumerate() {
            assert_eq!(ring, [((rank + world - 1) % world) as f32, 2.0]);
            assert_eq!(scaled, [half_sum, world as f32]);
        }
    }
}

/// Captured once, launched many times; where the runtime captures.
#[test]
fn graphs_of_the_library() {
    for streams in gpus() {
        let world = streams.len();
        let results = each(RcclComm::all(&streams, &options(PATIENCE)).unwrap(), |comm, stream| {
            let x = stream.upload(&integers::<bf16>(comm.rank(), 64)).unwrap();
            let mut y = stream.alloc_zeroed::<bf16>(64).unwrap();
            let mut call = || comm.all_reduce(stream, x.view([64])?, y.view_mut([64])?, ReduceOp::Sum);
            // The first call connects the ranks.
            call().unwrap();
            comm.check().unwrap();
            let graph = match stream.capture(call) {
                Err(Error::Driver { code: 801, .. }) => return None,
                captured => captured.unwrap(),
            };
            stream.fill(&mut y, bf16::from_f32(0.0)).unwrap();
            for _ in 0..100 {
                // SAFETY: the buffers are alive, and nothing else uses them.
                unsafe { graph.launch(stream) }.unwrap();
            }
            comm.check().unwrap();
            Some(stream.download(&y).unwrap())
        });
        let inputs: Vec<Vec<bf16>> = (0..world).map(|rank| integers(rank, 64)).collect();
        for y in results.into_iter().flatten() {
            assert!(bits(&y) == bits(&sum(&inputs)));
        }
    }
}

fn peers(streams: &[Stream]) -> Ranks {
    let options = P2pOptions { buffer_bytes: 1 << 20, blocks: Some(8), timeout: PATIENCE, checked: false };
    Ranks { comms: P2pComm::new(streams, &options).unwrap() }
}

fn norms<Q: Quantized>(streams: &[Stream]) {
    let mut ranks = peers(streams);
    for shape in [[3, 1096], [33, 4096]] {
        for kind in KINDS {
            for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
                same_as_apart::<Q>(&mut ranks, shape, kind, algorithm, nothing);
            }
        }
    }
    let values = |seed: u64, n: usize| small(seed as usize, n);
    for kind in KINDS.into_iter().chain([8, 256].map(|group| Kind::Groups(group, false))) {
        let known = !matches!(kind, Kind::Groups(8 | 256, _));
        forms::<Q>(streams, [3, 1096, 1112], kind, values, known);
    }
}

/// Kernels that read the memory of other GPUs, and norms over the library: as on emulated devices.
#[test]
fn peers_and_norms() {
    for streams in alike() {
        for world in [2, 4, 8].into_iter().filter(|&world| world <= streams.len()) {
            let streams = &streams[..world];
            for packets in [1, 513, 10_000] {
                halves_are_the_whole::<bf16>(&mut peers(streams), packets, 7);
            }
            match streams[0].device().arch() {
                Arch::Gfx942 => norms::<Fp8E4M3Fnuz>(streams),
                _ => norms::<Fp8E4M3>(streams),
            }
        }
    }
}

/// Handles of GPUs' memory travel between processes.
#[test]
fn processes_have_the_bits_of_threads() {
    let Some(streams) = alike().into_iter().next() else { return };
    let world = 2;
    let (others, mut own, rank) = meet("rccl_gpu::processes_have_the_bits_of_threads", world);
    let results = |comm: &mut P2pComm| match comm.stream().device().arch() {
        Arch::Gfx942 => collectives::<Fp8E4M3Fnuz>(comm).concat(),
        _ => collectives::<Fp8E4M3>(comm).concat(),
    };
    let threads = || peers(&streams[..world]).each(|_, comm, _| results(comm)).concat();
    let want = own.all_gather(&if rank == 0 { threads() } else { vec![] }).unwrap().swap_remove(0);
    let options = P2pOptions { buffer_bytes: 4096, blocks: Some(8), timeout: PATIENCE, checked: false };
    let joined = P2pComm::join(&streams[rank], world, rank, &options, move |bytes| own.all_gather(bytes));
    let mut comm = joined.unwrap();
    for _ in 0..2 {
        let got = results(&mut comm);
        assert!(got == want[rank * got.len()..][..got.len()], "rank {rank}");
    }
    comm.leave().unwrap();
    others.join();
}

/// A rank does not call: the others are told in time, and the GPUs go on.
#[test]
fn the_watchdog_ends_what_waits_in_vain() {
    for streams in gpus() {
        let timeout = Duration::from_secs(2);
        let start = Instant::now();
        let outcomes = each(RcclComm::all(&streams, &options(timeout)).unwrap(), |comm, stream| {
            let x = stream.upload(&[1.0f32; 4]).unwrap();
            let mut y = stream.alloc_zeroed::<f32>(4).unwrap();
            let mut call = || comm.all_reduce(stream, x.view([4])?, y.view_mut([4])?, ReduceOp::Sum);
            call().unwrap();
            comm.check().unwrap();
            if comm.rank() == 0 {
                std::thread::sleep(3 * timeout);
                comm.abort();
                return None;
            }
            Some((call().and_then(|()| comm.check()), call()))
        });
        assert!(start.elapsed() >= timeout && start.elapsed() < 20 * timeout);
        for (first, later) in outcomes.into_iter().flatten() {
            let named =
                |result: &hk_core::Result<()>| matches!(result, Err(Error::Timeout { missing: 0, .. }));
            assert!(named(&first) && named(&later), "{first:?} {later:?}");
        }
        collectives_on::<f32>(RcclComm::all(&streams, &options(PATIENCE)).unwrap(), 100);
    }
}
