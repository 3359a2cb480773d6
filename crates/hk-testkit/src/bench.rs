//! The criterion benchmark of a family: its operators at the sizes of real models.
//!
//! `hk bench` measures the same way ([`measure`](crate::measure)), at more sizes, and prints tables.

use crate::measure::{self, Pass, Plan, unserved};
use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BenchmarkId, Criterion, Throughput};
use hk_core::registry::Operator;
use hk_core::{Device, Event, Stream};
use hk_time::parts::PARTS;
use std::time::{Duration, Instant};

/// Time between two events of a stream; on the emulator that is the time of the host, or modelled time with its option `time`.
pub struct DeviceTime {
    stream: Stream,
    wall: WallTime,
}

impl Measurement for DeviceTime {
    type Intermediate = Event;
    type Value = Duration;

    fn start(&self) -> Event {
        self.stream.record().unwrap_or_else(|e| panic!("{e}"))
    }

    fn end(&self, start: Event) -> Duration {
        let end = self.stream.record().and_then(|end| end.elapsed_since(&start));
        end.unwrap_or_else(|e| panic!("{e}"))
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        self.wall.formatter()
    }
}

/// Times each operator at each of its cases; the result is compared with the reference first. On a GPU a case has three
/// times: on the device with operands that are not cached, on the device with the same operands in every call, and on the
/// host's clock with the launch of each call. On the emulator it has one: the speed of the emulator or, on a device with the option
/// `time`, the modelled time of its launches.
///
/// # Panics
/// If an operator fails or its result is wrong.
pub fn operators(operators: &'static [Operator]) {
    let device = Device::open_default().unwrap_or_else(|e| panic!("{e}"));
    let stream = device.create_stream().unwrap_or_else(|e| panic!("{e}"));
    println!("device: {} ({})", device.spec(), device.info().name);
    let modelled = modelled(device.spec());
    if let Some(of) = &modelled {
        println!("times are {of}");
    }
    let plan = Plan::of(&device);
    let emulated = device.info().driver == "emu";
    let time = DeviceTime { stream: stream.clone(), wall: WallTime };
    let mut criterion = Criterion::default()
        .with_measurement(time)
        .sample_size(if emulated { 10 } else { 100 })
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    if modelled.is_some() {
        criterion = unplotted(criterion);
    }
    for operator in operators {
        let mut group = criterion.benchmark_group(operator.name);
        for case in operator.cases {
            let mut call = operator.example(case, 1).unwrap_or_else(|e| panic!("{}: {e}", case.label));
            // Checks the result before it is timed.
            let compared = measure::check(&stream, &mut call, &plan);
            if unserved(&compared) {
                continue; // a case for other targets
            }
            let compared = compared.unwrap_or_else(|e| panic!("{}: {e}", case.label));
            compared.iter().for_each(|c| assert!(c.passed(), "{}: {c}", case.label));

            group.throughput(Throughput::Bytes(measure::bytes(&call)));
            let rotating = || Pass::rotating(&stream, &call, &plan).unwrap_or_else(|e| panic!("{e}"));
            let mut pass = rotating();
            group.bench_function(BenchmarkId::from_parameter(case.label), |b| {
                b.iter_custom(|n| of_passes(&mut pass, n))
            });
            if emulated {
                continue;
            }
            let mut pass = Pass::cached(&stream, &call, &plan).unwrap_or_else(|e| panic!("{e}"));
            group.bench_function(BenchmarkId::new("cached", case.label), |b| {
                b.iter_custom(|n| of_passes(&mut pass, n))
            });
            let mut pass = rotating();
            group.bench_function(BenchmarkId::new("host", case.label), |b| {
                b.iter_custom(|n| {
                    let start = Instant::now();
                    pass.queue_singly(n as usize)
                        .and_then(|()| stream.synchronize())
                        .unwrap_or_else(|e| panic!("{e}"));
                    start.elapsed()
                })
            });
        }
        group.finish();
    }
    criterion.final_summary();
}

/// Samples of modelled time are equal, and the density that criterion plots of them panics.
fn unplotted(criterion: Criterion<DeviceTime>) -> Criterion<DeviceTime> {
    criterion.without_plots()
}

/// Whose time a device gives whose string has the option `time`, and its error.
fn modelled(spec: &str) -> Option<String> {
    let name = spec.split(['?', '&']).find_map(|option| option.strip_prefix("time="))?;
    let part = PARTS.into_iter().find(|part| part.name == name)?;
    Some(format!("those of {name}: {}", part.error()))
}

/// Time of `n` calls: that of the passes that have at least as many, in proportion.
fn of_passes(pass: &mut Pass, n: u64) -> Duration {
    let passes = n.div_ceil(pass.calls() as u64);
    let time = pass.time(passes as usize).unwrap_or_else(|e| panic!("{e}"));
    time.mul_f64(n as f64 / (passes * pass.calls() as u64) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_with_time_say_whose() {
        let text = |spec| modelled(spec).unwrap_or_default();
        assert!(text("emu:gfx942?threads=1&time=mi325x").starts_with("those of mi325x: modelled, error "));
        assert!(text("emu:gfx950?time=mi350x&threads=1").contains("part not validated"));
        assert_eq!(
            [modelled("emu:gfx942"), modelled("emu:gfx942?threads=1"), modelled("hip:0")],
            [None, None, None]
        );
    }

    /// criterion's plots panic without variance; its statistics do not.
    #[test]
    fn samples_of_one_time_are_benchmarked() {
        let device = Device::open("emu:gfx942").unwrap();
        let time = DeviceTime { stream: device.create_stream().unwrap(), wall: WallTime };
        let out = std::env::temp_dir().join(format!("hk-testkit-bench-{}", std::process::id()));
        let short = Duration::from_millis(1);
        let mut criterion = unplotted(Criterion::default().with_measurement(time).output_directory(&out))
            .sample_size(10)
            .warm_up_time(short)
            .measurement_time(short);
        // Twice: the second one is compared with the first.
        for _ in 0..2 {
            criterion.bench_function("constant", |b| {
                b.iter_custom(|n| {
                    std::thread::sleep(short);
                    Duration::from_micros(6).mul_f64(n as f64)
                })
            });
        }
        std::fs::remove_dir_all(&out).unwrap();
    }
}
