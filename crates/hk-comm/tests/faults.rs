//! Ranks that do not arrive.

use crate::common::{Ranks, integers, options, sum};
use hk_comm::{Algorithm, P2pOptions, all_reduce_in_place};
use hk_core::{Arch, Error};
use std::time::{Duration, Instant};

/// The others time out and say who is missing; the process goes on, with other communicators.
#[test]
fn a_rank_that_never_arrives_is_a_timeout_on_the_others() {
    let timeout = Duration::from_millis(300);
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        let mut ranks = Ranks::with(Arch::Gfx942, 4, "", &P2pOptions { timeout, ..options() });
        let n = 4096;
        let start = Instant::now();
        let outcomes = ranks.each(|rank, comm, stream| {
            let mut y = stream.upload(&integers::<f32>(rank, n)).unwrap();
            let mut call = || all_reduce_in_place(comm, stream, y.view_mut([n]).unwrap(), algorithm);
            if rank != 2 {
                call().unwrap();
                // A second one is not waited for again.
                call().unwrap();
            }
            let checked = comm.check();
            let mut z = stream.upload(&integers::<f32>(rank, n)).unwrap();
            (checked, all_reduce_in_place(comm, stream, z.view_mut([n]).unwrap(), algorithm))
        });
        assert!(start.elapsed() >= timeout);
        for (rank, (checked, later)) in outcomes.into_iter().enumerate().filter(|(rank, _)| *rank != 2) {
            assert_eq!(checked, Err(Error::Timeout { op: "P2pComm::check", rank, missing: 2 }));
            assert_eq!(later, Err(Error::Timeout { op: "all_reduce", rank, missing: 2 }));
        }
    }
    let mut ranks = Ranks::new(Arch::Gfx942, 2);
    let results = ranks.each(|rank, comm, stream| {
        let mut y = stream.upload(&integers::<f32>(rank, 64)).unwrap();
        all_reduce_in_place(comm, stream, y.view_mut([64]).unwrap(), Algorithm::Auto).unwrap();
        stream.download(&y).unwrap()
    });
    assert_eq!(results[0], sum::<f32>(&[integers(0, 64), integers(1, 64)]));
}

/// In checked mode, ranks that ask for different sums are told before anything is queued, and may go on.
#[test]
fn ranks_that_disagree_are_told_in_checked_mode() {
    let mut ranks = Ranks::with(Arch::Gfx942, 2, "", &P2pOptions { checked: true, ..options() });
    let outcomes = ranks.each(|rank, comm, stream| {
        let mut y = stream.upload(&integers::<f32>(rank, 64)).unwrap();
        let n = 32 * (rank + 1);
        let part = y.view_mut_with(hk_core::Layout::contiguous([n]).unwrap(), 0).unwrap();
        let wrong = all_reduce_in_place(comm, stream, part, Algorithm::Auto).unwrap_err();
        all_reduce_in_place(comm, stream, y.view_mut([64]).unwrap(), Algorithm::Auto).unwrap();
        comm.check().unwrap();
        (wrong, stream.download(&y).unwrap())
    });
    for (rank, (wrong, sums)) in outcomes.into_iter().enumerate() {
        assert!(matches!(wrong, Error::Shape { op: "all_reduce", arg: "y", .. }), "{wrong}");
        let parts =
            [format!("f32 [{}], Auto on rank {rank}", 32 * (rank + 1)), format!("rank {} has", 1 - rank)];
        assert!(parts.iter().all(|part| wrong.to_string().contains(part)), "{wrong}");
        assert_eq!(sums, sum::<f32>(&[integers(0, 64), integers(1, 64)]));
    }
}

/// Communicators are dropped while their work is queued.
#[test]
fn ranks_may_be_dropped_at_once() {
    let mut ranks = Ranks::with(Arch::Gfx942, 2, "&delay_ms=5", &options());
    let n = 4096;
    let buffers = ranks.each(|rank, comm, stream| {
        let mut y = stream.upload(&integers::<f32>(rank, n)).unwrap();
        for _ in 0..3 {
            all_reduce_in_place(comm, stream, y.view_mut([n]).unwrap(), Algorithm::TwoShot).unwrap();
        }
        (stream.clone(), y)
    });
    drop(ranks);
    let want: Vec<f32> = sum(&[integers(0, n), integers(1, n)]).iter().map(|v: &f32| 4.0 * v).collect();
    for (stream, y) in buffers {
        assert_eq!(stream.download(&y).unwrap(), want);
    }
}
