//! Times of the collectives by message size, fused against separate, and what a call takes of the host.
//!
//! `HK_TEST_DEVICES` names the devices, rank by rank: `HK_TEST_DEVICES=hip:0,hip:1,hip:2,hip:3`, with the feature of their driver. Without
//! it two emulated ones run small messages; their times are the emulator's, not a GPU's.

use criterion::{BenchmarkId, Criterion, Throughput};
use hk_comm::{
    Algorithm, NormOptions, NormOutputs, P2pComm, P2pOptions, QuantizedRows, all_gather, all_reduce,
    all_reduce_in_place, all_reduce_rmsnorm, reduce_scatter,
};
use hk_core::quant::GroupSize;
use hk_core::{Arch, Device, DeviceBuffer, Fp8E4M3, Fp8E4M3Fnuz, Result, Stream, bf16};
use hk_norm::{FusedAddRmsNormOutputs, RmsNormOptions, fused_add_rmsnorm};
use hk_quant::{Fp8Scale, GroupScaleRule, NormRounding, NormRows, fused_rmsnorm_fp8_quant};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Calls between two looks at the clock of the host, at most: few enough for the queue of a stream.
const QUEUED: u64 = 64;
/// Calls of a graph on a GPU: the host queues a small message slower than GPUs exchange it.
const CAPTURED: u64 = 20;

/// The ranks, and the sizes that they can do with.
struct Ranks {
    comms: Vec<P2pComm>,
    emulated: bool,
}

impl Ranks {
    fn open() -> Result<Self> {
        let emulated = ["emu:gfx942:0".to_owned(), "emu:gfx942:1".to_owned()];
        let named = std::env::var("HK_TEST_DEVICES").ok();
        let specs = named.map_or(emulated.to_vec(), |list| list.split(',').map(str::to_owned).collect());
        let streams =
            specs.iter().map(|spec| Device::open(spec)?.create_stream()).collect::<Result<Vec<_>>>()?;
        let emulated = streams[0].device().info().driver == "emu";
        let small = P2pOptions { buffer_bytes: 1 << 20, blocks: Some(2), ..Default::default() };
        let options = if emulated { small } else { P2pOptions::default() };
        println!("devices: {}", specs.join(", "));
        Ok(Self { comms: P2pComm::new(&streams, &options)?, emulated })
    }

    fn world(&self) -> usize {
        self.comms.len()
    }

    /// Runs `prepare` and then `n` calls of what it gives on every rank at once. The time of the slowest rank: on its device, of graphs of
    /// calls, or if `host`, until the calls are queued one by one.
    fn time<C: FnMut(&mut P2pComm) -> Result<()>>(
        &mut self,
        n: u64,
        host: bool,
        prepare: impl Fn(&Stream) -> Result<C> + Sync,
    ) -> Duration {
        let start = &Barrier::new(self.comms.len());
        let prepare = &prepare;
        let captured = if self.emulated { 1 } else { CAPTURED };
        let on_host = |comm: &mut P2pComm, call: &mut C| -> Result<Duration> {
            let mut queued = Duration::ZERO;
            for from in (0..n).step_by(QUEUED as usize) {
                let clock = Instant::now();
                for _ in from..n.min(from + QUEUED) {
                    call(comm)?;
                }
                queued += clock.elapsed();
                comm.check()?;
            }
            Ok(queued)
        };
        let on_device = |comm: &mut P2pComm, call: &mut C| -> Result<Duration> {
            let stream = comm.stream().clone();
            let graph = stream.capture(|| (0..captured).try_for_each(|_| call(comm)))?;
            let replays = n.div_ceil(captured);
            start.wait();
            let first = stream.record()?;
            for _ in 0..replays {
                // SAFETY: `call` has the buffers, and is called again when the stream is done.
                unsafe { graph.launch(&stream)? };
            }
            let time = stream.record()?.elapsed_since(&first)?;
            comm.check()?;
            Ok(time.mul_f64(n as f64 / (replays * captured) as f64))
        };
        let run = |comm: &mut P2pComm| -> Result<Duration> {
            let mut call = prepare(&comm.stream().clone())?;
            // The first call loads the kernels.
            call(comm)?;
            comm.check()?;
            if host { on_host(comm, &mut call) } else { on_device(comm, &mut call) }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = self.comms.iter_mut().map(|comm| scope.spawn(move || run(comm))).collect();
            let times = threads.into_iter().map(|thread| thread.join().expect("no panic"));
            times.map(|time| time.unwrap_or_else(|e| panic!("{e}"))).max().unwrap_or_default()
        })
    }
}

fn zeros(stream: &Stream, n: usize) -> Result<DeviceBuffer<bf16>> {
    stream.alloc_zeroed(n)
}

fn label(bytes: usize) -> String {
    match bytes {
        0..0x10_0000 => format!("{}KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{}MiB", bytes >> 20),
        _ => format!("{}GiB", bytes >> 30),
    }
}

/// Every collective by the bytes of the whole message.
fn messages(c: &mut Criterion, ranks: &mut Ranks) {
    let last = if ranks.emulated { 16 } else { 30 };
    let world = ranks.world();
    for shift in (10..=last).step_by(2) {
        let bytes = 1usize << shift;
        let n = bytes / size_of::<bf16>();
        let mut group = c.benchmark_group("message");
        group.throughput(Throughput::Bytes(bytes as u64));
        for (name, algorithm) in [("one_shot", Algorithm::OneShot), ("two_shot", Algorithm::TwoShot)] {
            group.bench_function(BenchmarkId::new(name, label(bytes)), |b| {
                b.iter_custom(|times| {
                    ranks.time(times, false, |stream| {
                        let (x, mut y) = (zeros(stream, n)?, zeros(stream, n)?);
                        Ok(move |comm: &mut P2pComm| {
                            let stream = comm.stream().clone();
                            all_reduce(comm, &stream, x.view([n])?, y.view_mut([n])?, algorithm)
                        })
                    })
                });
            });
        }
        for (name, gather) in [("reduce_scatter", false), ("all_gather", true)] {
            group.bench_function(BenchmarkId::new(name, label(bytes)), |b| {
                b.iter_custom(|times| {
                    ranks.time(times, false, |stream| {
                        let (mut part, mut whole) = (zeros(stream, n / world)?, zeros(stream, n)?);
                        Ok(move |comm: &mut P2pComm| {
                            let stream = comm.stream().clone();
                            if gather {
                                let part = part.view([n / world])?;
                                return all_gather(comm, &stream, part, whole.view_mut([n])?);
                            }
                            reduce_scatter(comm, &stream, whole.view([n])?, part.view_mut([n / world])?)
                        })
                    })
                });
            });
        }
        group.finish();
    }
}

/// All-reduce and norm, without and with fp8 of 128 columns: in one launch, and one after the other.
fn fused<Q: hk_core::quant::Quantized>(c: &mut Criterion, ranks: &mut Ranks) {
    let shapes: &[[usize; 2]] =
        if ranks.emulated { &[[2, 1024]] } else { &[[1, 8192], [16, 8192], [128, 8192], [2048, 8192]] };
    for &[rows, cols] in shapes {
        let n = rows * cols;
        let mut group = c.benchmark_group("norm");
        group.throughput(Throughput::Bytes((n * size_of::<bf16>()) as u64));
        for (name, one_launch, fp8) in [
            ("fused", true, false),
            ("separate", false, false),
            ("fused_fp8", true, true),
            ("separate_fp8", false, true),
        ] {
            group.bench_function(BenchmarkId::new(name, format!("{rows}x{cols}")), |b| {
                b.iter_custom(|times| {
                    ranks.time(times, false, |stream| {
                        let (mut x, mut out) = (zeros(stream, n)?, zeros(stream, n)?);
                        let (mut residual, weight) = (zeros(stream, n)?, zeros(stream, cols)?);
                        let mut q = stream.alloc_zeroed::<Q>(n)?;
                        let mut scale = stream.alloc_zeroed::<f32>(rows * cols / 128)?;
                        Ok(move |comm: &mut P2pComm| {
                            let (stream, auto, eps) = (comm.stream().clone(), Algorithm::Auto, 1e-6);
                            let (weight, rows_of) = (weight.view([cols])?, [rows, cols]);
                            let residual = residual.view_mut(rows_of)?;
                            let (q, scale) = (q.view_mut(rows_of)?, scale.view_mut([rows, cols / 128])?);
                            if one_launch {
                                let groups = QuantizedRows::Groups { q, scale, group: 128 };
                                let (out, quantized) = if fp8 {
                                    (None, Some(groups))
                                } else {
                                    (Some(out.view_mut(rows_of)?), None)
                                };
                                let outputs = NormOutputs { residual, out, quantized };
                                let (x, options) = (x.view(rows_of)?, NormOptions::default());
                                return all_reduce_rmsnorm(comm, &stream, x, weight, outputs, options, auto);
                            }
                            all_reduce_in_place(comm, &stream, x.view_mut(rows_of)?, auto)?;
                            let x = x.view(rows_of)?;
                            if fp8 {
                                let residual = Some((residual.alias(), residual));
                                let norm = NormRows { x, weight, eps, residual, out: None };
                                let (size, rule) = (GroupSize::G128, GroupScaleRule::Exact);
                                let scale = Fp8Scale::Group { size, scale, rule };
                                return fused_rmsnorm_fp8_quant(
                                    &stream,
                                    norm,
                                    None,
                                    q,
                                    scale,
                                    NormRounding::F32,
                                );
                            }
                            let (sum, y) = (residual.alias(), out.view_mut(rows_of)?);
                            let outputs = FusedAddRmsNormOutputs { y, residual_out: residual, rstd: None };
                            fused_add_rmsnorm(&stream, x, sum, weight, outputs, RmsNormOptions::default())
                        })
                    })
                });
            });
        }
        group.finish();
    }
}

/// Until a call has returned.
fn host(c: &mut Criterion, ranks: &mut Ranks) {
    let n = 512;
    c.benchmark_group("host").bench_function("all_reduce", |b| {
        b.iter_custom(|times| {
            ranks.time(times, true, |stream| {
                let mut y = zeros(stream, n)?;
                Ok(move |comm: &mut P2pComm| {
                    let stream = comm.stream().clone();
                    all_reduce_in_place(comm, &stream, black_box(y.view_mut([n])?), Algorithm::Auto)
                })
            })
        });
    });
}

fn main() {
    let mut ranks = Ranks::open().unwrap_or_else(|e| panic!("{e}"));
    let mut criterion = Criterion::default()
        .sample_size(if ranks.emulated { 10 } else { 50 })
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    messages(&mut criterion, &mut ranks);
    match ranks.comms[0].stream().device().arch() {
        Arch::Gfx942 => fused::<Fp8E4M3Fnuz>(&mut criterion, &mut ranks),
        _ => fused::<Fp8E4M3>(&mut criterion, &mut ranks),
    }
    host(&mut criterion, &mut ranks);
    criterion.final_summary();
}
