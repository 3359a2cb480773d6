//! Time of both operators at shapes of real models, from the call until the device is done.
//!
//! On the emulator that is how fast it emulates. Only a GPU gives times and bandwidths that mean something, and there the
//! launch is in them: many calls are queued before each wait.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hk_core::registry::Tolerance;
use hk_core::{DType, Device};
use hk_norm::OPERATORS;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Calls between two waits.
const QUEUED: u64 = 20;

fn operators(c: &mut Criterion) {
    let device = Device::open_default().expect("a device, the emulator at least");
    let stream = device.create_stream().expect("a stream");
    println!("device: {} ({})", device.spec(), device.info().name);
    let queued = if device.info().driver == "emu" { 1 } else { QUEUED };
    for operator in OPERATORS {
        let mut group = c.benchmark_group(operator.name);
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(200))
            .measurement_time(Duration::from_secs(2));
        for case in operator.cases {
            let call = operator.example(case, 1).expect("the case fits the operator");
            // Right first, then fast.
            let outputs = operator.execute(&stream, &call).expect("the operator runs");
            let want = (operator.reference)(&call).expect("so does its reference");
            let (rtol, atol) = Tolerance::Reduction.bounds(DType::Bf16);
            for ((name, got), (_, want)) in outputs.iter().zip(&want) {
                let near = |(g, w): (&f64, &f64)| (g - w).abs() <= rtol * w.abs() + atol;
                assert!(got.to_f64().iter().zip(&want.values).all(near), "{}: {name} is wrong", case.label);
            }

            let traffic = (operator.traffic)(&call);
            group.throughput(Throughput::Bytes(traffic.read + traffic.written));
            let mut on_device = hk_core::registry::DeviceCall::prepare(&stream, &call).expect("memory");
            group.bench_function(BenchmarkId::from_parameter(case.label), |b| {
                b.iter_custom(|n| {
                    stream.synchronize().expect("idle");
                    let start = Instant::now();
                    for i in 0..n {
                        (operator.run)(&stream, black_box(&mut on_device)).expect("the operator runs");
                        if i % queued == queued - 1 {
                            stream.synchronize().expect("the operator runs");
                        }
                    }
                    stream.synchronize().expect("the operator runs");
                    start.elapsed()
                })
            });
        }
        group.finish();
    }
}

criterion_group!(benches, operators);
criterion_main!(benches);
