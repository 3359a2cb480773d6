//! `RcclComm` on emulated devices.

use crate::common::{bits, integers, random, streams, sum};
use hk_comm::{Group, RcclComm, RcclOptions, ReduceOp, UniqueId};
use hk_core::{Arch, DType, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, Layout, Stream, bf16, f16};
use proptest::prelude::*;
use std::time::{Duration, Instant};

fn options() -> RcclOptions {
    RcclOptions { timeout: Some(Duration::from_secs(60)), checked: false }
}

fn ranks(arch: Arch, world: usize) -> Vec<RcclComm> {
    RcclComm::all(&streams(arch, world, ""), &options()).unwrap()
}

/// What `call` gives on each rank, on a thread of its own.
pub fn each<R: Send>(comms: Vec<RcclComm>, call: impl Fn(RcclComm, &Stream) -> R + Sync) -> Vec<R> {
    let call = &call;
    std::thread::scope(|scope| {
        let rank = |comm: RcclComm| {
            scope.spawn(move || {
                let stream = comm.stream().clone();
                call(comm, &stream)
            })
        };
        let threads: Vec<_> = comms.into_iter().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All collectives of integers: equal to plain loops.
fn collectives<T: Float>(arch: Arch, world: usize, n: usize) {
    collectives_on::<T>(ranks(arch, world), n);
}

pub fn collectives_on<T: Float>(comms: Vec<RcclComm>, n: usize) {
    let world = comms.len();
    let inputs: Vec<Vec<T>> = (0..world).map(|rank| integers(rank, n * world)).collect();
    let total = sum(&inputs);
    let root = world - 1;
    let results = each(comms, |comm, stream| {
        let rank = comm.rank();
        let all = stream.upload(&inputs[rank]).unwrap();
        let part = stream.upload(&inputs[rank][..n]).unwrap();
        let mut outs: Vec<_> = [n * world, n, n, n * world, n, n * world, n]
            .iter()
            .map(|&len| stream.upload(&vec![T::from_f32(f32::NAN); len]).unwrap())
            .collect();
        let [sums, reduced, sent, gathered, scattered, exchanged, largest] = &mut outs[..] else {
            unreachable!()
        };
        let (x, whole) = (part.view([n]).unwrap(), all.view([world, n]).unwrap());
        comm.all_reduce(stream, whole, sums.view_mut([world, n]).unwrap(), ReduceOp::Sum).unwrap();
        let y = (rank == root).then(|| reduced.view_mut([n]).unwrap());
        comm.reduce(stream, x, y, ReduceOp::Sum, root).unwrap();
        let source = (rank == root).then_some(x);
        comm.broadcast(stream, source, sent.view_mut([n]).unwrap(), root).unwrap();
        comm.all_gather(stream, x, gathered.view_mut([world * n]).unwrap()).unwrap();
        comm.reduce_scatter(stream, whole, scattered.view_mut([n]).unwrap(), ReduceOp::Sum).unwrap();
        comm.all_to_all(stream, whole, exchanged.view_mut([world, n]).unwrap()).unwrap();
        comm.all_reduce(stream, x, largest.view_mut([n]).unwrap(), ReduceOp::Max).unwrap();
        comm.check().unwrap();
        outs.iter().map(|out| stream.download(out).unwrap()).collect::<Vec<_>>()
    });
    let equal = |got: &[T], want: &[T], what: &str| {
        assert!(bits(got) == bits(want), "{what} of {world} x {n} {}", T::DTYPE);
    };
    for (rank, outs) in results.iter().enumerate() {
        equal(&outs[0], &total, "all_reduce");
        if rank == root {
            equal(&outs[1], &total[..n], "reduce");
        }
        equal(&outs[2], &inputs[root][..n], "broadcast");
        let gathered: Vec<T> = inputs.iter().flat_map(|input| input[..n].to_vec()).collect();
        equal(&outs[3], &gathered, "all_gather");
        equal(&outs[4], &total[rank * n..][..n], "reduce_scatter");
        let exchanged: Vec<T> = inputs.iter().flat_map(|input| input[rank * n..][..n].to_vec()).collect();
        equal(&outs[5], &exchanged, "all_to_all");
        let largest = |i: usize| inputs.iter().map(|input| input[i].to_f32()).fold(f32::MIN, f32::max);
        let largest: Vec<T> = (0..n).map(|i| T::from_f32(largest(i))).collect();
        equal(&outs[6], &largest, "maximum");
    }
}

#[test]
fn collectives_of_all_worlds() {
    for arch in Arch::AMD {
        for world in [1, 2, 4, 8] {
            collectives::<bf16>(arch, world, 17);
            collectives::<f32>(arch, world, 4096);
        }
        collectives::<f16>(arch, 3, 4095);
        collectives::<f32>(arch, 2, 1);
    }
}

proptest! {
    #![proptest_config(hk_testkit::config())]

    /// Sums are f32 in rank order, rounded once, on all ranks; an all-reduce is a reduce-scatter and an all-gather.
    #[test]
    fn sums_are_rounded_once(world in 1usize..=8, n in 1usize..=300, seed: u64) {
        let inputs: Vec<Vec<bf16>> = (0..world).map(|rank| random(seed ^ rank as u64, n * world)).collect();
        let total = sum(&inputs);
        let results = each(ranks(Arch::Gfx950, world), |comm, stream| {
            let mut y = stream.upload(&inputs[comm.rank()]).unwrap();
            let x = stream.upload(&inputs[comm.rank()]).unwrap();
            let mut z = stream.alloc_zeroed::<bf16>(n * world).unwrap();
            let mut part = stream.alloc_zeroed::<bf16>(n).unwrap();
            let view = y.view_mut([n, world]).unwrap();
            comm.all_reduce(stream, view.alias(), view, ReduceOp::Sum).unwrap();
            let scattered = part.view_mut([n]).unwrap();
            comm.reduce_scatter(stream, x.view([world, n]).unwrap(), scattered, ReduceOp::Sum).unwrap();
            comm.all_gather(stream, part.view([n]).unwrap(), z.view_mut([world, n]).unwrap()).unwrap();
            (stream.download(&y).unwrap(), stream.download(&z).unwrap())
        });
        for (y, z) in results {
            prop_assert_eq!(bits(&y), bits(&total));
            prop_assert_eq!(bits(&z), bits(&total));
        }
    }
}

#[test]
fn forms_in_place() {
    let results = each(ranks(Arch::Gfx942, 4), |comm, stream| {
        let (rank, world) = (comm.rank(), comm.world());
        let own: Vec<f32> = (0..8).map(|i| (10 * rank + i) as f32).collect();
        let mut gathered = stream.upload(&own).unwrap();
        let whole = gathered.view_mut([8]).unwrap();
        let part = whole.alias().slice(0, 2 * rank..2 * rank + 2).unwrap();
        comm.all_gather(stream, part, whole).unwrap();
        let mut scattered = stream.upload(&own).unwrap();
        let whole = scattered.view_mut([8]).unwrap();
        let input = whole.alias();
        let (_, rest) = whole.split_at(0, 2 * rank).unwrap();
        let (part, _) = rest.split_at(0, 2).unwrap();
        comm.reduce_scatter(stream, input, part, ReduceOp::Sum).unwrap();
        let mut sent = stream.upload(&own).unwrap();
        comm.broadcast(stream, None, sent.view_mut([8]).unwrap(), 3).unwrap();
        let mut reduced = stream.upload(&own).unwrap();
        let view = reduced.view_mut([8]).unwrap();
        let y = view.alias();
        comm.reduce(stream, y, (rank == 1).then_some(view), ReduceOp::Prod, 1).unwrap();
        comm.check().unwrap();
        assert_eq!(world, 4);
        let own_part = stream.download(&scattered).unwrap()[2 * rank..2 * rank + 2].to_vec();
        [
            stream.download(&gathered).unwrap(),
            own_part,
            stream.download(&sent).unwrap(),
            stream.download(&reduced).unwrap(),
        ]
    });
    for (rank, [gathered, scattered, sent, reduced]) in results.into_iter().enumerate() {
        assert_eq!(gathered, [0.0, 1.0, 12.0, 13.0, 24.0, 25.0, 36.0, 37.0]);
        assert_eq!(scattered, [60.0 + 8.0 * rank as f32, 64.0 + 8.0 * rank as f32]);
        assert_eq!(sent[..2], [30.0, 31.0]);
        let want = if rank == 1 {
            [0.0, 1.0 * 11.0 * 21.0 * 31.0]
        } else {
            [10.0 * rank as f32, 10.0 * rank as f32 + 1.0]
        };
        assert_eq!(reduced[..2], want);
    }
}

#[test]
fn every_reduction_and_fp8() {
    let results = each(ranks(Arch::Gfx942, 2), |comm, stream| {
        let rank = comm.rank();
        let x = stream.upload(&[[6i32, -3], [2, 8]][rank]).unwrap();
        let scaled = ReduceOp::PreMulSum([3.0, 2.0][rank]);
        let integers = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg, scaled]
            .map(|op| {
                let mut y = stream.alloc_zeroed::<i32>(2).unwrap();
                comm.all_reduce(stream, x.view([2]).unwrap(), y.view_mut([2]).unwrap(), op).unwrap();
                stream.download(&y).unwrap()
            });
        let x = stream.upload(&[Fp8E4M3Fnuz::from_f32(1.5), Fp8E4M3Fnuz::MAX]).unwrap();
        let mut y = stream.alloc_zeroed::<Fp8E4M3Fnuz>(2).unwrap();
        comm.all_reduce(stream, x.view([2]).unwrap(), y.view_mut([2]).unwrap(), ReduceOp::Sum).unwrap();
        // Not the fp8 of gfx942: it can be moved, and not be reduced.
        let x = stream.upload(&[Fp8E4M3::from_f32(1.0); 2]).unwrap();
        let mut z = stream.alloc_zeroed::<Fp8E4M3>(4).unwrap();
        comm.all_gather(stream, x.view([2]).unwrap(), z.view_mut([4]).unwrap()).unwrap();
        let error = comm.all_reduce(
            stream,
            x.view([2]).unwrap(),
            z.view_mut([4]).unwrap().split_at(0, 2).unwrap().0,
            ReduceOp::Sum,
        );
        assert!(matches!(
            error,
            Err(Error::DType { op: "RcclComm::all_reduce", arg: "x", got: DType::Fp8E4M3, .. })
        ));
        assert_eq!(stream.download(&z).unwrap(), [Fp8E4M3::from_f32(1.0); 4]);
        (integers, stream.download(&y).unwrap())
    });
    for (integers, fp8) in results {
        assert_eq!(integers, [[8, 5], [12, -24], [6, 8], [2, -3], [4, 2], [22, 7]].map(Vec::from));
        assert_eq!(fp8, [Fp8E4M3Fnuz::from_f32(3.0), Fp8E4M3Fnuz::MAX]);
    }
}

#[test]
fn a_group_has_transfers_of_both_directions_and_all_ranks_of_a_thread() {
    let results = each(ranks(Arch::Gfx942, 4), |comm, stream| {
        let (rank, world) = (comm.rank(), comm.world());
        let x = stream.upload(&[(rank as i64) << 40, -1]).unwrap();
        let mut y = stream.alloc_zeroed::<i64>(2).unwrap();
        let mut group = Group::new();
        group.send(&comm, x.view([2]).unwrap(), (rank + 1) % world).unwrap();
        group.recv(&comm, y.view_mut([2]).unwrap(), (rank + world - 1) % world).unwrap();
        group.end().unwrap();
        comm.check().unwrap();
        stream.download(&y).unwrap()
    });
    assert_eq!(results, [3i64, 0, 1, 2].map(|from| vec![from << 40, -1]));

    let comms = ranks(Arch::Gfx950, 4);
    let mut buffers: Vec<_> =
        comms.iter().map(|comm| comm.stream().upload(&[1i16 + comm.rank() as i16; 3]).unwrap()).collect();
    let mut gathered: Vec<_> =
        comms.iter().map(|comm| comm.stream().alloc_zeroed::<i16>(12).unwrap()).collect();
    let mut group = Group::new();
    for ((comm, buffer), all) in comms.iter().zip(&mut buffers).zip(&mut gathered) {
        group.all_gather(comm, buffer.view([3]).unwrap(), all.view_mut([12]).unwrap()).unwrap();
    }
    drop(group); // nothing is queued
    let mut group = Group::new();
    for ((comm, buffer), all) in comms.iter().zip(&mut buffers).zip(&mut gathered) {
        group.all_gather(comm, buffer.view([3]).unwrap(), all.view_mut([12]).unwrap()).unwrap();
    }
    group.end().unwrap();
    for (comm, all) in comms.iter().zip(&gathered) {
        assert_eq!(comm.stream().download(all).unwrap(), [1i16, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]);
    }
}

/// A graph of a collective between copies, launched many times; streams that are not in step.
#[test]
fn graphs_replay_collectives() {
    let comms = RcclComm::all(&streams(Arch::Gfx942, 2, ""), &options()).unwrap();
    let results = each(comms, |comm, stream| {
        let x = stream.upload(&[1.0f32 + comm.rank() as f32; 4]).unwrap();
        let mut y = stream.alloc_zeroed::<f32>(4).unwrap();
        let mut z = stream.upload(&[1.0f32; 4]).unwrap();
        let graph = stream
            .capture(|| {
                let view = z.view_mut([4])?;
                comm.all_reduce(stream, view.alias(), view, ReduceOp::Max)?;
                comm.all_reduce(stream, x.view([4])?, y.view_mut([4])?, ReduceOp::Sum)?;
                stream.copy(&y, &mut z)
            })
            .unwrap();
        assert_eq!(stream.download(&y).unwrap(), [0.0; 4]);
        for replay in 0..100 {
            if replay % 10 == comm.rank() {
                std::thread::sleep(Duration::from_millis(1));
            }
            // SAFETY: all buffers are alive, and nothing else uses them.
            unsafe { graph.launch(stream) }.unwrap();
        }
        comm.check().unwrap();
        stream.download(&z).unwrap()
    });
    assert_eq!(results, [[3.0; 4]; 2]);
}

#[test]
fn parts_of_a_communicator_and_two_at_once() {
    let results = each(ranks(Arch::Gfx942, 4), |comm, stream| {
        let rank = comm.rank();
        let part = comm.split(Some(rank as u32 % 2), -(rank as i32)).unwrap().unwrap();
        assert!(comm.split((rank == 0).then_some(5), 0).unwrap().is_some() == (rank == 0));
        let mut own = stream.upload(&[1i32 << rank]).unwrap();
        let mut all = stream.upload(&[1i32 << rank]).unwrap();
        for _ in 0..3 {
            let view = own.view_mut([1]).unwrap();
            part.all_reduce(stream, view.alias(), view, ReduceOp::Sum).unwrap();
            let view = all.view_mut([1]).unwrap();
            comm.all_reduce(stream, view.alias(), view, ReduceOp::Max).unwrap();
        }
        assert_eq!((part.world(), part.rank()), (2, 1 - rank / 2));
        part.check().unwrap();
        (stream.download(&own).unwrap()[0], stream.download(&all).unwrap()[0])
    });
    assert_eq!(results, [(20, 8), (40, 8), (20, 8), (40, 8)]);
}

/// The others are told who is missing; the process goes on, with other communicators.
#[test]
fn a_rank_that_never_calls_is_a_timeout_on_the_others() {
    let timeout = Duration::from_secs(1);
    let start = Instant::now();
    let options = RcclOptions { timeout: Some(timeout), ..options() };
    let comms = RcclComm::all(&streams(Arch::Gfx942, 4, ""), &options).unwrap();
    let outcomes = each(comms, |comm, stream| {
        let mut y = stream.upload(&[1.0f32; 4]).unwrap();
        let mut call = || {
            let view = y.view_mut([4]).unwrap();
            comm.all_reduce(stream, view.alias(), view, ReduceOp::Sum)
        };
        let first = if comm.rank() == 2 { Ok(()) } else { call() };
        if comm.rank() == 2 {
            // It does not call, and does not leave either.
            std::thread::sleep(2 * timeout);
        }
        (first, comm.check(), call())
    });
    assert!(start.elapsed() >= timeout);
    for (rank, (first, checked, later)) in outcomes.into_iter().enumerate().filter(|(rank, _)| *rank != 2) {
        assert_eq!(first, Ok(()));
        assert_eq!(checked, Err(Error::Timeout { op: "RcclComm::check", rank, missing: 2 }));
        assert_eq!(later, Err(Error::Timeout { op: "RcclComm::all_reduce", rank, missing: 2 }));
    }
    collectives::<f32>(Arch::Gfx942, 2, 4);
    // One that leaves is not waited for.
    let outcomes = each(ranks(Arch::Gfx942, 2), |comm, stream| {
        let mut y = stream.upload(&[1.0f32; 4]).unwrap();
        (comm.rank() == 0).then(|| {
            let view = y.view_mut([4]).unwrap();
            comm.all_reduce(stream, view.alias(), view, ReduceOp::Sum).unwrap();
            comm.check().unwrap_err()
        })
    });
    let left = outcomes[0].as_ref().unwrap();
    assert!(matches!(left, Error::Collective { rank: 0, code: 6, .. }), "{left}");
    assert!(left.to_string().contains("rank 1 has left"), "{left}");
}

#[test]
fn an_abort_ends_the_work_of_all_ranks() {
    let outcomes = each(ranks(Arch::Gfx942, 2), |comm, stream| {
        let mut y = stream.upload(&[1.0f32; 4]).unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            comm.abort();
        }
        let mut call = || {
            let view = y.view_mut([4]).unwrap();
            comm.all_reduce(stream, view.alias(), view, ReduceOp::Sum)
        };
        let first = call();
        (first, comm.check().unwrap_err(), call().unwrap_err())
    });
    let aborted = |op, rank, reason: &str| Error::Aborted { op, rank, reason: reason.into() };
    assert_eq!(outcomes[0].0, Ok(()));
    assert_eq!(outcomes[0].1, aborted("RcclComm::check", 0, "by another rank"));
    assert_eq!(outcomes[0].2, aborted("RcclComm::all_reduce", 0, "by another rank"));
    assert_eq!(outcomes[1].0, Err(aborted("RcclComm::all_reduce", 1, "by RcclComm::abort")));
    assert_eq!(outcomes[1].2, aborted("RcclComm::all_reduce", 1, "by RcclComm::abort"));
}

/// Without checked mode the emulator tells afterwards; in checked mode nothing is queued, and the ranks go on.
#[test]
fn ranks_that_disagree_are_told() {
    for checked in [false, true] {
        let options = RcclOptions { checked, ..options() };
        let comms = RcclComm::all(&streams(Arch::Gfx942, 2, ""), &options).unwrap();
        let outcomes = each(comms, |comm, stream| {
            let mut y = stream.upload(&[1.0f32; 8]).unwrap();
            let n = 4 * (comm.rank() + 1);
            let part = y.view_mut_with(Layout::contiguous([n]).unwrap(), 0).unwrap();
            let called = comm.all_reduce(stream, part.alias(), part, ReduceOp::Sum);
            assert_eq!(called.is_err(), checked);
            let wrong = called.and_then(|()| comm.check()).unwrap_err();
            let view = y.view_mut([8]).unwrap();
            comm.all_reduce(stream, view.alias(), view, ReduceOp::Sum).unwrap();
            comm.check().unwrap();
            (wrong, stream.download(&y).unwrap())
        });
        for (rank, (wrong, sums)) in outcomes.into_iter().enumerate() {
            assert!(matches!(wrong, Error::Shape { op: "RcclComm::all_reduce", arg: "x", .. }), "{wrong}");
            let parts = [format!("on rank {rank}"), format!("rank {} ", 1 - rank)];
            assert!(parts.iter().all(|part| wrong.to_string().contains(part)), "{wrong}");
            assert_eq!(sums, [2.0; 8]);
        }
    }
}

#[test]
fn refusals() {
    let two = streams(Arch::Gfx942, 2, "");
    let name = |error: Error| error.to_string();
    let all = |streams: &[Stream]| name(RcclComm::all(streams, &options()).unwrap_err());
    assert!(all(&[]).starts_with("RcclComm::all: streams: none"));
    assert!(all(&[two[0].clone(), two[0].clone()]).contains("ranks 0 and 1 are both emu:gfx942:0"));
    let id = UniqueId::new(two[0].device()).unwrap();
    let new = |world, rank| name(RcclComm::new(&two[0], &id, world, rank, &options()).unwrap_err());
    assert!(new(2, 2).contains("rank: rank 2 of 2") && new(0, 0).contains("rank: rank 0 of 0"));
    let other = UniqueId::from_bytes([1; UniqueId::BYTES]);
    let error = RcclComm::new(&two[0], &other, 1, 0, &options()).unwrap_err();
    assert!(matches!(error, Error::Argument { arg: "id", .. }), "{error}");
    let brief = RcclOptions { timeout: Some(Duration::from_millis(20)), ..options() };
    let error = RcclComm::new(&two[0], &id, 2, 0, &brief).unwrap_err();
    assert_eq!(error, Error::Timeout { op: "RcclComm::new", rank: 0, missing: 1 });

    let comms = RcclComm::all(&two, &options()).unwrap();
    let (comm, stream) = (&comms[0], comms[0].stream());
    let x = stream.upload(&[1.0f32; 8]).unwrap();
    let mut y = stream.upload(&[0.0f32; 8]).unwrap();
    let elsewhere = two[1].upload(&[1.0f32; 8]).unwrap();
    let view = |n: usize| x.view([8]).unwrap().slice(0, 0..n).unwrap();
    let sum = ReduceOp::Sum;
    macro_rules! refused {
        ($call:expr, $variant:pat, $text:literal) => {
            let error = $call.unwrap_err();
            assert!(matches!(error, $variant) && error.to_string().contains($text), "{error}");
        };
    }
    macro_rules! out {
        () => {
            y.view_mut([8]).unwrap()
        };
    }
    refused!(
        comm.all_reduce(&two[1], view(8), out!(), sum),
        Error::Argument { arg: "stream", .. },
        "the stream of rank 0"
    );
    let third = two[0].device().create_stream().unwrap();
    refused!(comm.all_reduce(&third, view(8), out!(), sum), Error::Argument { arg: "stream", .. }, "rank 0");
    refused!(comm.all_reduce(stream, view(4), out!(), sum), Error::Shape { arg: "y", .. }, "[8]");
    refused!(
        comm.all_reduce(stream, elsewhere.view([8]).unwrap(), out!(), sum),
        Error::DeviceMismatch { arg: "x", .. },
        ":1"
    );
    let strided = x.view([4, 2]).unwrap().slice(1, 0..1).unwrap();
    refused!(comm.send(stream, strided, 1), Error::Stride { arg: "x", .. }, "send");
    refused!(comm.send(stream, view(8), 2), Error::Argument { arg: "peer", .. }, "below 2 (on rank 0)");
    refused!(comm.recv(stream, out!(), 2), Error::Argument { arg: "peer", .. }, "recv");
    refused!(comm.broadcast(stream, None, out!(), 3), Error::Argument { arg: "root", .. }, "broadcast");
    refused!(comm.broadcast(stream, Some(view(4)), out!(), 0), Error::Shape { arg: "x", .. }, "broadcast");
    refused!(comm.reduce(stream, view(8), None, sum, 0), Error::Argument { arg: "y", .. }, "on rank 0 alone");
    refused!(
        comm.reduce(stream, view(8), Some(out!()), sum, 1),
        Error::Argument { arg: "y", .. },
        "this is rank 0"
    );
    refused!(comm.reduce(stream, view(8), None, sum, 2), Error::Argument { arg: "root", .. }, "reduce");
    refused!(
        comm.all_gather(stream, view(3), out!()),
        Error::Shape { arg: "y", .. },
        "2 times the 3 elements of x"
    );
    refused!(
        comm.reduce_scatter(stream, view(8), out!(), sum),
        Error::Shape { arg: "x", .. },
        "8 elements of y"
    );
    let odd = out!().split_at(0, 7).unwrap().0;
    refused!(comm.all_to_all(stream, view(7), odd), Error::Shape { arg: "x", .. }, "2 times the 3 elements");
    let wide = out!();
    let inside = wide.alias().slice(0, 2..6).unwrap();
    refused!(comm.all_gather(stream, inside, wide), Error::Overlap { a: "x", b: "y", .. }, "all_gather");
    let wide = out!();
    let shifted = wide.alias().slice(0, 2..8).unwrap();
    let (front, _) = wide.split_at(0, 6).unwrap();
    refused!(comm.all_reduce(stream, shifted, front, sum), Error::Overlap { .. }, "all_reduce");
    let i16s = stream.upload(&[1i16; 2]).unwrap();
    let mut out16 = stream.upload(&[1i16; 2]).unwrap();
    refused!(
        comm.all_reduce(stream, i16s.view([2]).unwrap(), out16.view_mut([2]).unwrap(), sum),
        Error::DType { got: DType::I16, .. },
        "bf16"
    );
    let mut scratch = stream.upload(&[0.0f32; 8]).unwrap();
    macro_rules! workspace {
        ($shape:expr) => {
            scratch.view_mut_with(Layout::contiguous($shape).unwrap(), 0).unwrap()
        };
    }
    let [wide, narrow] = [[2, 4], [2, 2]].map(|shape| Layout::contiguous(shape).unwrap());
    macro_rules! gathered {
        ($workspace:expr, $dim:expr) => {
            comm.all_gather_dim(
                stream,
                x.view_with(narrow, 0).unwrap(),
                $workspace,
                y.view_mut_with(wide, 0).unwrap(),
                $dim,
            )
        };
    }
    refused!(gathered!(workspace!([2, 4]), 2), Error::Argument { arg: "dim", .. }, "axis of x [2, 2]");
    refused!(gathered!(workspace!([2, 4]), 0), Error::Shape { arg: "y", .. }, "[4, 2]");
    refused!(gathered!(workspace!([8]), 1), Error::Shape { arg: "workspace", .. }, "[2, 4]");
    refused!(
        comm.reduce_scatter_dim(
            stream,
            x.view_with(wide, 0).unwrap(),
            workspace!([4, 2]),
            y.view_mut_with(narrow, 0).unwrap(),
            sum,
            1
        ),
        Error::Shape { arg: "workspace", .. },
        "reduce_scatter_dim"
    );
    refused!(comm.split(Some(u32::MAX), 0), Error::Argument { arg: "color", .. }, "split");
    // Nothing was queued; no elements are no call.
    comm.all_reduce(stream, view(0), y.view_mut([8]).unwrap().split_at(0, 0).unwrap().0, sum).unwrap();
    comm.check().unwrap();
}

#[test]
fn an_id_travels_over_tcp() {
    let id = UniqueId::new(streams(Arch::Gfx942, 1, "")[0].device()).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let fetch = || UniqueId::fetch(address, Duration::from_secs(20)).unwrap();
        let fetched = [scope.spawn(fetch), scope.spawn(fetch)];
        id.publish(&listener, 2).unwrap();
        assert!(fetched.into_iter().all(|got| got.join().unwrap() == id));
    });
    drop(listener);
    let error = UniqueId::fetch(address, Duration::from_millis(30)).unwrap_err();
    assert!(matches!(error, Error::Argument { arg: "address", .. }), "{error}");
}

/// Along any axis, by packets and by bytes: reduce-scatter gives the part, all-gather of the parts the whole.
#[test]
fn halves_along_every_axis() {
    fn check<T: Float>(world: usize, part: [usize; 3], dim: usize) {
        let mut whole = part;
        whole[dim] *= world;
        let (n, all) = (part.iter().product::<usize>(), whole.iter().product::<usize>());
        let inputs: Vec<Vec<T>> = (0..world).map(|rank| random(rank as u64, all)).collect();
        let total = sum(&inputs);
        let results = each(ranks(Arch::Gfx942, world), |comm, stream| {
            let x = stream.upload(&inputs[comm.rank()]).unwrap();
            let mut y = stream.alloc_zeroed::<T>(n).unwrap();
            let [mut workspace, mut z] = [(), ()].map(|()| stream.alloc_zeroed::<T>(all).unwrap());
            let view = workspace.view_mut(whole).unwrap();
            let (x, out) = (x.view(whole).unwrap(), y.view_mut(part).unwrap());
            comm.reduce_scatter_dim(stream, x, view, out, ReduceOp::Sum, dim).unwrap();
            let (view, out) = (workspace.view_mut(whole).unwrap(), z.view_mut(whole).unwrap());
            comm.all_gather_dim(stream, y.view(part).unwrap(), view, out, dim).unwrap();
            comm.check().unwrap();
            (stream.download(&y).unwrap(), stream.download(&z).unwrap())
        });
        let cols: usize = part[dim..].iter().product();
        for (rank, (y, z)) in results.iter().enumerate() {
            let rows = total.chunks(world * cols).flat_map(|row| &row[rank * cols..(rank + 1) * cols]);
            let want: Vec<T> = rows.copied().collect();
            let name = format!("{part:?} of {} along axis {dim}, rank {rank} of {world}", T::DTYPE);
            assert!(bits(y) == bits(&want), "part: {name}");
            assert!(bits(z) == bits(&total), "whole: {name}");
        }
    }
    for dim in 0..3 {
        check::<f32>(3, [3, 5, 8], dim);
        check::<bf16>(2, [7, 9, 3], dim);
        check::<bf16>(1, [2, 3, 4], dim);
        check::<f16>(4, [2, 40, 64], dim);
    }
}
