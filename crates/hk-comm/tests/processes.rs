//! Ranks of several processes.

use crate::common::{Ranks, bits, integers, options, random, sum};
use hk_comm::{
    Algorithm, NormOptions, NormOutputs, P2pComm, P2pOptions, QuantizedRows, RcclComm, RcclOptions,
    Rendezvous, UniqueId, all_gather, all_reduce, all_reduce_in_place, all_reduce_rmsnorm, reduce_scatter,
};
use hk_core::quant::Quantized;
use hk_core::{Arch, Device, Error, Fp8E4M3Fnuz, Layout, Result, Stream, bf16};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Where the other ranks of a test find rank 0, `ADDRESS WORLD RANK`.
const RANK: &str = "HK_COMM_TEST_RANK";
const PATIENCE: Duration = Duration::from_secs(60);

/// The other ranks of a test: processes that run the same test as their rank.
pub struct Others(Vec<Child>);

impl Others {
    /// They succeed.
    pub fn join(mut self) {
        for (rank, child) in std::mem::take(&mut self.0).into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "rank {}: {text}", rank + 1);
        }
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// This process's rank of the test `name`, which the processes of the others run as well.
pub fn meet(name: &str, world: usize) -> (Others, Rendezvous, usize) {
    if let Ok(rank) = std::env::var(RANK) {
        let [address, world, rank] = *rank.split(' ').collect::<Vec<_>>() else { panic!("{rank}") };
        let (world, rank) = (world.parse().unwrap(), rank.parse().unwrap());
        return (Others(vec![]), Rendezvous::join(address, world, rank, PATIENCE).unwrap(), rank);
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let other = |rank| {
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", name]).env(RANK, format!("{address} {world} {rank}"));
        test.stdout(Stdio::piped()).spawn().unwrap()
    };
    let others = Others((1..world).map(other).collect());
    (others, Rendezvous::host(&listener, world, PATIENCE).unwrap(), 0)
}

fn stream(rank: usize) -> Stream {
    Device::open(&format!("emu:gfx942:{rank}?node=processes")).unwrap().create_stream().unwrap()
}

fn join(mut own: Rendezvous, world: usize, rank: usize, options: &P2pOptions) -> Result<P2pComm> {
    P2pComm::join(&stream(rank), world, rank, options, move |bytes| own.all_gather(bytes))
}

const SHAPE: [usize; 2] = [6, 136];

/// What all collectives give on a rank, as bytes.
pub fn collectives<Q: Quantized>(comm: &mut P2pComm) -> Vec<Vec<u8>> {
    let (rank, world, stream) = (comm.rank(), comm.world(), comm.stream().clone());
    let n = 1000;
    let x = stream.upload(&random::<bf16>(rank as u64, world * n)).unwrap();
    let [mut one, mut two, mut gathered] = [(); 3].map(|()| stream.alloc_zeroed::<bf16>(world * n).unwrap());
    let mut part = stream.alloc_zeroed::<bf16>(n).unwrap();
    let all = [world * n];
    all_reduce(comm, &stream, x.view(all).unwrap(), one.view_mut(all).unwrap(), Algorithm::OneShot).unwrap();
    all_reduce(comm, &stream, x.view(all).unwrap(), two.view_mut(all).unwrap(), Algorithm::TwoShot).unwrap();
    reduce_scatter(comm, &stream, x.view(all).unwrap(), part.view_mut([n]).unwrap()).unwrap();
    let graph =
        stream.capture(|| all_gather(comm, &stream, part.view([n])?, gathered.view_mut(all)?)).unwrap();
    for _ in 0..3 {
        // SAFETY: the buffers are alive, and nothing else uses them.
        unsafe { graph.launch(&stream).unwrap() };
    }
    let [rows, cols] = SHAPE;
    let x = stream.upload(&random::<bf16>(50 + rank as u64, rows * cols)).unwrap();
    let weight = stream.upload(&random::<bf16>(70, cols)).unwrap();
    let mut residual = stream.upload(&random::<bf16>(71, rows * cols)).unwrap();
    let mut q = stream.alloc_zeroed::<Q>(rows * cols).unwrap();
    let mut scale = stream.alloc_zeroed::<f32>(rows).unwrap();
    let outputs = NormOutputs {
        residual: residual.view_mut(SHAPE).unwrap(),
        out: None,
        quantized: Some(QuantizedRows::PerToken {
            q: q.view_mut(SHAPE).unwrap(),
            scale: scale.view_mut([rows]).unwrap(),
        }),
    };
    let (x, weight) = (x.view(SHAPE).unwrap(), weight.view([cols]).unwrap());
    all_reduce_rmsnorm(comm, &stream, x, weight, outputs, NormOptions::default(), Algorithm::Auto).unwrap();
    comm.check().unwrap();
    let mut results: Vec<Vec<u8>> = [&one, &two, &gathered, &part, &residual]
        .map(|buffer| bits(&stream.download(buffer).unwrap()).to_vec())
        .into();
    results.push(bytemuck::cast_slice(&stream.download(&q).unwrap()).to_vec());
    results.push(bytemuck::cast_slice(&stream.download(&scale).unwrap()).to_vec());
    results
}

/// The bits of ranks that are threads; several blocks, pieces, launches without waits between them.
fn have_the_bits_of_threads(name: &str, world: usize) {
    let (others, mut own, rank) = meet(name, world);
    let options = P2pOptions { buffer_bytes: 4096, ..options() };
    let want =
        Ranks::with(Arch::Gfx942, world, "", &options).each(|_, comm, _| collectives::<Fp8E4M3Fnuz>(comm));
    // All are done with threads, which share the cores.
    own.all_gather(&[]).unwrap();
    let mut comm = join(own, world, rank, &options).unwrap();
    for _ in 0..2 {
        assert!(collectives::<Fp8E4M3Fnuz>(&mut comm) == want[rank], "rank {rank}");
    }
    comm.leave().unwrap();
    others.join();
}

#[test]
fn two_processes_have_the_bits_of_threads() {
    have_the_bits_of_threads("processes::two_processes_have_the_bits_of_threads", 2);
}

#[test]
fn four_processes_have_the_bits_of_threads() {
    have_the_bits_of_threads("processes::four_processes_have_the_bits_of_threads", 4);
}

/// A process that ends is a timeout on the others, which go on. So is one that does not call.
#[test]
fn a_process_that_ends_is_named() {
    let world = 4;
    let (others, own, rank) = meet("processes::a_process_that_ends_is_named", world);
    let mut comm =
        join(own, world, rank, &P2pOptions { timeout: Duration::from_secs(3), ..options() }).unwrap();
    let stream = comm.stream().clone();
    let mut x = stream.upload(&integers::<f32>(rank, 64)).unwrap();
    let start = Instant::now();
    let mut call = |comm: &mut P2pComm| {
        all_reduce_in_place(comm, &stream, x.view_mut([64]).unwrap(), Algorithm::OneShot).unwrap();
        comm.check()
    };
    call(&mut comm).unwrap();
    if rank != 2 {
        assert_eq!(call(&mut comm), Err(Error::Timeout { op: "P2pComm::check", rank, missing: 2 }));
        assert!(start.elapsed() >= Duration::from_secs(3));
        let left = comm.leave().unwrap_err();
        assert!(matches!(left, Error::Timeout { missing: 2, .. }), "{left}");
        others.join();
    }
}

/// Calls that differ, in checked mode; options that differ; a rank that fails.
#[test]
fn what_differs_is_an_error_on_all_ranks() {
    let world = 2;
    let (others, own, rank) = meet("processes::what_differs_is_an_error_on_all_ranks", world);
    let own = Arc::new(Mutex::new(own));
    let stream = stream(rank);
    let join = |options: &P2pOptions| {
        let own = Arc::clone(&own);
        P2pComm::join(&stream, world, rank, options, move |bytes| own.lock().unwrap().all_gather(bytes))
    };
    let checked = P2pOptions { checked: true, ..options() };
    let mut comm = join(&checked).unwrap();
    let mut x = stream.upload(&integers::<f32>(rank, 64)).unwrap();
    let mut call = |n: usize| {
        let view = x.view_mut_with(Layout::contiguous([n]).unwrap(), 0).unwrap();
        all_reduce_in_place(&mut comm, &stream, view, Algorithm::Auto)
    };
    call(64).unwrap();
    let error = call(32 - 16 * rank).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Shape { op: "all_reduce", .. }), "{text}");
    assert!(text.contains(&format!("[{}], Auto on rank {rank}", 32 - 16 * rank)), "{text}");
    assert!(text.contains(&format!("rank {} has", 1 - rank)), "{text}");
    call(16).unwrap();
    comm.leave().unwrap();

    let error = join(&P2pOptions { buffer_bytes: 4096 << rank, ..options() }).unwrap_err().to_string();
    assert!(
        error.contains("P2pComm::join: options") && error.contains(&format!("on rank {rank}")),
        "{error}"
    );
    // Nothing to a rank that has it, and news to the other.
    let error = join(&P2pOptions { blocks: Some(rank), ..options() }).unwrap_err();
    match error {
        Error::Argument { arg: "blocks", .. } if rank == 0 => {}
        Error::Aborted { ref reason, .. } if rank == 1 => {
            assert!(reason.contains("rank 0: P2pComm::join: blocks"), "{reason}");
        }
        other => panic!("{other}"),
    }
    own.lock().unwrap().all_gather(&[]).unwrap();
    others.join();
}

/// An all-gather of the library carries the handles as well.
#[test]
fn handles_travel_by_the_library() {
    let world = 2;
    let (others, mut own, rank) = meet("processes::handles_travel_by_the_library", world);
    let stream = stream(rank);
    // Rank 0 names the communicator.
    let id = if rank == 0 { UniqueId::new(stream.device()).unwrap().to_bytes().to_vec() } else { vec![] };
    let id = own.all_gather(&id).unwrap().swap_remove(0);
    let id = UniqueId::from_bytes(id.try_into().unwrap());
    let rccl = RcclComm::new(&stream, &id, world, rank, &RcclOptions::default()).unwrap();
    // Of one length, behind the length of each.
    const LEN: usize = 1024;
    let all_gather = move |bytes: &[u8]| {
        let stream = rccl.stream();
        let mut own = (bytes.len() as u64).to_le_bytes().to_vec();
        own.extend(bytes);
        own.resize(LEN, 0);
        let x = stream.upload(&own)?;
        let mut y = stream.alloc_zeroed::<u8>(world * LEN)?;
        rccl.all_gather(stream, x.view([LEN])?, y.view_mut([world * LEN])?)?;
        let part = |part: &[u8]| {
            let (len, rest) = part.split_first_chunk().unwrap();
            rest[..u64::from_le_bytes(*len) as usize].to_vec()
        };
        Ok(stream.download(&y)?.chunks(LEN).map(part).collect())
    };
    let mut comm = P2pComm::join(&stream, world, rank, &options(), all_gather).unwrap();
    let mut x = stream.upload(&integers::<f32>(rank, 64)).unwrap();
    all_reduce_in_place(&mut comm, &stream, x.view_mut([64]).unwrap(), Algorithm::Auto).unwrap();
    comm.check().unwrap();
    assert_eq!(stream.download(&x).unwrap(), sum::<f32>(&[integers(0, 64), integers(1, 64)]));
    comm.leave().unwrap();
    own.all_gather(&[]).unwrap();
    others.join();
}

/// Bad input of one process alone.
#[test]
fn joins_that_cannot_be() {
    let stream = stream(0);
    let alone = |bytes: &[u8]| Ok(vec![bytes.to_vec()]);
    let twice = |bytes: &[u8]| Ok(vec![bytes.to_vec(); 2]);
    let refused = |error: Result<P2pComm>, parts: &[&str]| {
        let text = error.unwrap_err().to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text} lacks one of {parts:?}");
    };
    refused(P2pComm::join(&stream, 3, 0, &options(), alone), &["P2pComm::join: world", "3 ranks"]);
    refused(P2pComm::join(&stream, 2, 2, &options(), alone), &["P2pComm::join: rank", "below 2"]);
    refused(P2pComm::join(&stream, 2, 0, &options(), alone), &["all_gather", "bytes of 1 ranks"]);
    refused(
        P2pComm::join(&stream, 2, 0, &options(), twice),
        &["access of rank 0 on emu:gfx942:0", "to the memory of rank 1", "of this process"],
    );
    refused(
        P2pComm::join(&stream, 1, 0, &options(), |_: &[u8]| Ok(vec![vec![0, 1]])),
        &["all_gather", "what rank 0 has given"],
    );
    let mut comm = P2pComm::join(&stream, 1, 0, &options(), alone).unwrap();
    let mut x = stream.upload(&[1.0f32; 4]).unwrap();
    all_reduce_in_place(&mut comm, &stream, x.view_mut([4]).unwrap(), Algorithm::Auto).unwrap();
    comm.leave().unwrap();
    assert_eq!(stream.download(&x).unwrap(), [1.0; 4]);
    // Threads leave as well.
    Ranks::new(Arch::Gfx942, 2).comms.into_iter().for_each(|comm| comm.leave().unwrap());
}
