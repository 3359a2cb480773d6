//! Collectives of `RcclComm`: what a call costs the host, and bus bandwidth.
//!
//! `HK_TEST_DEVICES=hip:0,hip:1` (or `cuda:0,..`) names the ranks; emulated ones by default, whose bandwidth says nothing of hardware.
//! `benches/stub.c` in place of the library leaves the cost of the wrapper alone.

use criterion::{BenchmarkId, Criterion, Throughput};
use hk_comm::{Group, RcclComm, RcclOptions, ReduceOp};
use hk_core::{Device, DeviceBuffer, Result, Stream};
use std::time::{Duration, Instant};

/// Calls between waits: no more than a GPU's queue takes.
const BATCH: u64 = 200;

fn main() -> Result<()> {
    let devices = std::env::var("HK_TEST_DEVICES").unwrap_or_else(|_| "emu:gfx942:0,emu:gfx942:1".into());
    let open = |spec: &str| Device::open(spec)?.create_stream();
    let streams: Vec<Stream> = devices.split(',').map(open).collect::<Result<_>>()?;
    let mut criterion = Criterion::default().configure_from_args();
    host_cost(&mut criterion, &streams[..1], RcclOptions::default(), "all_reduce")?;
    host_cost(
        &mut criterion,
        &streams[..1],
        RcclOptions { timeout: None, ..Default::default() },
        "unwatched",
    )?;
    bandwidth(&mut criterion, &streams)?;
    criterion.final_summary();
    Ok(())
}

/// A call of a single rank, on the host: the work itself is next to none.
fn host_cost(criterion: &mut Criterion, streams: &[Stream], options: RcclOptions, name: &str) -> Result<()> {
    let comms = RcclComm::all(streams, &options)?;
    let (comm, stream) = (&comms[0], &streams[0]);
    let x = stream.upload(&[1.0f32; 4])?;
    let mut y = stream.alloc_zeroed::<f32>(4)?;
    let mut time = |calls: u64| -> Result<Duration> {
        let mut spent = Duration::ZERO;
        let mut left = calls;
        while left > 0 {
            let batch = left.min(BATCH);
            let start = Instant::now();
            for _ in 0..batch {
                comm.all_reduce(stream, x.view([4])?, y.view_mut([4])?, ReduceOp::Sum)?;
            }
            spent += start.elapsed();
            stream.synchronize()?;
            left -= batch;
        }
        Ok(spent)
    };
    time(1)?;
    let mut group = criterion.benchmark_group("host cost");
    group.bench_function(name, |b| b.iter_custom(|calls| time(calls).expect("the collective works")));
    group.finish();
    Ok(())
}

/// All-reduces of all ranks, from one thread.
fn bandwidth(criterion: &mut Criterion, streams: &[Stream]) -> Result<()> {
    let (world, emulated) = (streams.len(), streams[0].device().info().driver == "emu");
    let comms = RcclComm::all(streams, &RcclOptions::default())?;
    let mut group = criterion.benchmark_group(format!("all_reduce of {world} ranks, bus bandwidth"));
    group.sample_size(10);
    let largest = if emulated { 16 } else { 30 };
    for bytes in (10..=largest).step_by(2).map(|log| 1usize << log) {
        let n = bytes / size_of::<f32>();
        group.throughput(Throughput::Bytes((2 * (world - 1) * bytes / world) as u64));
        group.bench_function(BenchmarkId::from_parameter(bytes), |b| {
            let mut run = || -> Result<()> {
                let buffers = |stream: &Stream| Ok((stream.alloc_zeroed(n)?, stream.alloc_zeroed(n)?));
                let mut buffers: Vec<(DeviceBuffer<f32>, _)> =
                    streams.iter().map(buffers).collect::<Result<_>>()?;
                let mut time = |calls: u64| -> Result<Duration> {
                    streams.iter().try_for_each(Stream::synchronize)?;
                    let start = Instant::now();
                    for _ in 0..calls {
                        let mut group = Group::new();
                        for (comm, (x, y)) in comms.iter().zip(&mut buffers) {
                            group.all_reduce(comm, x.view([n])?, y.view_mut([n])?, ReduceOp::Sum)?;
                        }
                        group.end()?;
                    }
                    streams.iter().try_for_each(Stream::synchronize)?;
                    Ok(start.elapsed())
                };
                time(1)?;
                b.iter_custom(|calls| time(calls).expect("the collective works"));
                Ok(())
            };
            run().expect("the collective works");
        });
    }
    group.finish();
    Ok(())
}
