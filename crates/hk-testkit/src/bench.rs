//! The benchmark that every family has: its operators at the sizes of real models.

use criterion::{BenchmarkId, Criterion, Throughput};
use hk_core::registry::{DeviceCall, Operator};
use hk_core::{Device, Error};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Calls between two waits.
const QUEUED: u64 = 20;

/// Times each operator at each of its cases, from the call until the device is done; the result is compared with the
/// reference first. On the emulator that is how fast it emulates. Only a GPU gives times and bandwidths that mean
/// something, and there the launch is in them: many calls are queued before each wait.
///
/// # Panics
/// If an operator fails or its result is wrong.
pub fn operators(c: &mut Criterion, operators: &'static [Operator]) {
    let device = Device::open_default().unwrap_or_else(|e| panic!("{e}"));
    let stream = device.create_stream().unwrap_or_else(|e| panic!("{e}"));
    println!("device: {} ({})", device.spec(), device.info().name);
    let queued = if device.info().driver == "emu" { 1 } else { QUEUED };
    for operator in operators {
        let mut group = c.benchmark_group(operator.name);
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(200))
            .measurement_time(Duration::from_secs(2));
        for case in operator.cases {
            let call = operator.example(case, 1).unwrap_or_else(|e| panic!("{}: {e}", case.label));
            // Right first, then fast.
            let outputs = match operator.execute(&stream, &call) {
                // A case for other targets.
                Err(Error::Unsupported { .. }) => continue,
                outputs => outputs.unwrap_or_else(|e| panic!("{}: {e}", case.label)),
            };
            let compared = crate::compare::compare_outputs(operator, &call, &outputs);
            let compared = compared.unwrap_or_else(|e| panic!("{}: {e}", case.label));
            compared.iter().for_each(|c| assert!(c.passed(), "{}: {c}", case.label));

            let traffic = (operator.traffic)(&call);
            group.throughput(Throughput::Bytes(traffic.read + traffic.written));
            let mut on_device = DeviceCall::prepare(&stream, &call).unwrap_or_else(|e| panic!("{e}"));
            let mut run =
                || (operator.run)(&stream, black_box(&mut on_device)).unwrap_or_else(|e| panic!("{e}"));
            let wait = || stream.synchronize().unwrap_or_else(|e| panic!("{e}"));
            group.bench_function(BenchmarkId::from_parameter(case.label), |b| {
                b.iter_custom(|n| {
                    wait();
                    let start = Instant::now();
                    for i in 0..n {
                        run();
                        if i % queued == queued - 1 {
                            wait();
                        }
                    }
                    wait();
                    start.elapsed()
                })
            });
        }
        group.finish();
    }
}
