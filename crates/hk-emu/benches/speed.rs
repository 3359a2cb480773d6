//! Speed of the emulator on one thread: wave instructions (x 64 lanes), loads, matrix flops, time to a first result.

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::time::Duration;

use common::gemm::{self, Gemm};
use common::{Args, Assembly, Rig, assemble, options};
use criterion::measurement::{Measurement, ValueFormatter};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hk_emu::{BlockOrder, Check, Checks, Level, MachineOptions};

const LOOPS: u32 = 2000;

/// Time that this thread spent on a core: what others run on a shared machine does not count.
struct CpuTime;

impl CpuTime {
    fn now() -> Duration {
        // The first field is nanoseconds on the CPU. Elsewhere than on Linux, wall-clock time has to do.
        let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        match stat.split_whitespace().next().and_then(|ns| ns.parse().ok()) {
            Some(ns) => Duration::from_nanos(ns),
            None => std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default(),
        }
    }
}

impl Measurement for CpuTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        Self::now()
    }

    fn end(&self, start: Duration) -> Duration {
        Self::now().saturating_sub(start)
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
        &CpuFormat
    }
}

struct CpuFormat;

impl ValueFormatter for CpuFormat {
    fn scale_values(&self, _: f64, values: &mut [f64]) -> &'static str {
        values.iter_mut().for_each(|v| *v /= 1e6);
        "ms"
    }

    fn scale_throughputs(&self, _: f64, throughput: &Throughput, values: &mut [f64]) -> &'static str {
        if let Throughput::Elements(n) = throughput {
            values.iter_mut().for_each(|v| *v = *n as f64 / *v * 1e3);
        }
        "M/s of CPU time"
    }

    fn scale_for_machines(&self, _: &mut [f64]) -> &'static str {
        "ns"
    }
}

/// A kernel that repeats `body` in a loop; s[4:5] is the buffer, v1 the lane's offset of 16 bytes.
fn looped(name: &str, setup: &str, body: &[&str], repeat: usize) -> Vec<u8> {
    let lines: String = (0..repeat).flat_map(|_| body).map(|l| format!("  {l}\n")).collect();
    let text = format!(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v1, 4, v0
  s_mov_b32 s6, {LOOPS}
  s_mov_b32 s7, 0x3f800000
  s_waitcnt lgkmcnt(0)
{setup}
.Lloop_{name}:
{lines}
  s_sub_u32 s6, s6, 1
  s_cmp_lg_u32 s6, 0
  s_cbranch_scc1 .Lloop_{name}"
    );
    assemble(&Assembly { body: &text, ..Assembly::default() })
}

/// One host thread: unwatched, counting, under each check, under all.
fn modes() -> Vec<(&'static str, MachineOptions)> {
    let plain = || options("gfx942").threads(Some(1));
    let mut modes = vec![("plain", plain()), ("details", plain().details(true))];
    modes.extend(Check::ALL.map(|check| (check.name(), plain().sanitize(check.into()))));
    modes.push(("all", plain().sanitize(Checks::all())));
    modes
}

fn speed(c: &mut Criterion<CpuTime>) {
    let init: String = (2..48).map(|n| format!("  v_mov_b32 v{n}, 0x3f800000\n")).collect();
    let partial = format!("{init}  s_mov_b64 exec, 0x7fffffff\n  s_mov_b32 exec_hi, 0x00fffff1");
    let valu: &[&str] = &[
        "v_add_f32 v2, v3, v4",
        "v_mul_f32 v5, v6, v7",
        "v_fma_f32 v8, v9, v10, v11",
        "v_add_u32 v12, v13, v14",
        "v_max_f32 v15, v16, v17",
        "v_lshlrev_b32 v18, 3, v19",
        "v_and_b32 v20, v21, v22",
        "v_mul_f32 v23, s7, v24",
    ];
    let cases: Vec<(&str, &str, &[&str], usize, u64)> = vec![
        ("valu_full_exec", &init, valu, 16, 1),
        ("valu_partial_exec", &partial, valu, 16, 1),
        ("fma_f32", &init, &["v_fma_f32 v8, v9, v10, v11"], 128, 1),
        ("fma_f32_modifiers", &init, &["v_fma_f32 v8, -v9, |v10|, v11"], 128, 1),
        ("mad_u64_u32", &init, &["v_mad_u64_u32 v[8:9], s[10:11], v10, v11, v[12:13]"], 128, 1),
        ("scalar_operand", &init, &["v_mul_f32 v23, s7, v24"], 128, 1),
        ("exp_f32", &init, &["v_exp_f32 v8, v9"], 32, 1),
        ("cndmask_cmp", &init, &["v_cmp_lt_f32 vcc, v9, v10", "v_cndmask_b32 v8, v9, v10, vcc"], 64, 1),
        ("dpp_row_shr", &init, &["v_add_f32_dpp v8, v9, v10 row_shr:1 row_mask:0xf bank_mask:0xf"], 64, 1),
        ("salu", &init, &["s_add_u32 s10, s11, s12", "s_and_b64 s[14:15], s[16:17], s[18:19]"], 64, 1),
        ("load_dword", &init, &["global_load_dword v8, v1, s[4:5]"], 64, 1),
        ("load_ubyte", &init, &["global_load_ubyte v8, v1, s[4:5]"], 64, 1),
        ("store_dword", &init, &["global_store_dword v1, v8, s[4:5]"], 64, 1),
        ("load_dwordx4", &init, &["global_load_dwordx4 v[8:11], v1, s[4:5]"], 64, 1),
        ("store_dwordx4", &init, &["global_store_dwordx4 v1, v[8:11], s[4:5]"], 64, 1),
        ("lds_read_u8", &init, &["ds_read_u8 v8, v1"], 64, 1),
        ("lds_read_b128", &init, &["ds_read_b128 v[8:11], v1"], 64, 1),
        ("lds_write_b128", &init, &["ds_write_b128 v1, v[8:11]"], 64, 1),
    ];
    let levels = [Level::Portable, Level::Avx2, Level::Avx512];
    let mut group = c.benchmark_group("wave instructions");
    for (name, setup, body, repeat, each) in cases {
        let mut setup = setup.to_owned();
        if name.starts_with("lds") {
            setup += "\n  s_mov_b32 m0, -1";
        }
        let mut image = looped(name, &setup, body, repeat);
        if name.starts_with("lds") {
            let lines: String = (0..repeat).flat_map(|_| body).map(|l| format!("  {l}\n")).collect();
            let text = format!(
                "  v_lshlrev_b32 v1, 4, v0\n  s_mov_b32 s6, {LOOPS}\n.Lloop:\n{lines}\n  s_sub_u32 s6, s6, 1\n  s_cmp_lg_u32 s6, 0\n  s_cbranch_scc1 .Lloop"
            );
            image = assemble(&Assembly { body: &text, lds: 4096, ..Assembly::default() });
        }
        for level in levels.into_iter().filter(|l| l.available()) {
            let rig = Rig::new(options("gfx942").threads(Some(1)).level(Some(level)), &image);
            let data = rig.upload("data", &vec![1f32; 4096]);
            let args = Args::new().push(data);
            group.throughput(Throughput::Elements(u64::from(LOOPS) * (repeat * body.len()) as u64 * each));
            group.bench_function(BenchmarkId::new(name, format!("{level:?}")), |b| {
                b.iter(|| black_box(rig.launch("test", 1, 64, &args).expect("runs")));
            });
        }
    }
    group.finish();

    // What watching costs: the same loops plain, counted in detail, and under every sanitizer.
    let mut group = c.benchmark_group("watched wave instructions");
    let load: &[&str] = &["global_load_dwordx4 v[8:11], v1, s[4:5]", "s_waitcnt vmcnt(0)"];
    for (name, body, repeat) in [("valu_full_exec", valu, 16), ("load_dwordx4", load, 32)] {
        let image = looped(name, &init, body, repeat);
        for (mode, options) in modes() {
            let rig = Rig::new(options, &image);
            let data = rig.upload("data", &vec![1f32; 4096]);
            let args = Args::new().push(data);
            group.throughput(Throughput::Elements(u64::from(LOOPS) * (repeat * body.len()) as u64));
            group.bench_function(BenchmarkId::new(name, mode), |b| {
                b.iter(|| black_box(rig.launch("test", 1, 64, &args).expect("runs")));
            });
        }
    }
    group.sample_size(10);
    let image = gemm::image("gfx942");
    for (mode, options) in modes() {
        let problem = Gemm::new("gfx942", &image, "gemm_bf16", [256, 256, 256], options);
        group.throughput(Throughput::Elements(problem.run().instructions));
        group.bench_function(BenchmarkId::new("gemm_bf16", mode), |b| b.iter(|| black_box(problem.run())));
    }
    group.finish();

    let mut group = c.benchmark_group("matrix flops");
    for (name, instruction, flops) in [
        ("32x32x8_bf16", "v_mfma_f32_32x32x8_bf16 a[0:15], v[2:3], v[4:5], a[0:15]", 2 * 32 * 32 * 8),
        ("16x16x16_bf16", "v_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], v[4:5], a[0:3]", 2 * 16 * 16 * 16),
        ("32x32x16_fp8", "v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[2:3], v[4:5], a[0:15]", 2 * 32 * 32 * 16),
        ("32x32x16_i8", "v_mfma_i32_32x32x16_i8 a[0:15], v[2:3], v[4:5], a[0:15]", 2 * 32 * 32 * 16),
    ] {
        let zero: String = (0..16).map(|n| format!("  v_accvgpr_write_b32 a{n}, 0\n")).collect();
        let image = looped("mfma", &format!("{init}{zero}"), &[instruction], 4);
        for level in levels.into_iter().filter(|l| l.available()) {
            let rig = Rig::new(options("gfx942").threads(Some(1)).level(Some(level)), &image);
            let data = rig.upload("data", &vec![1f32; 4096]);
            let args = Args::new().push(data);
            group.throughput(Throughput::Elements(u64::from(LOOPS) * 4 * flops));
            group.bench_function(BenchmarkId::new(name, format!("{level:?}")), |b| {
                b.iter(|| black_box(rig.launch("test", 1, 64, &args).expect("runs")));
            });
        }
    }
    group.finish();

    let mut group = c.benchmark_group("GEMM 1024^3");
    for cpu in ["gfx942", "gfx950"] {
        let image = gemm::image(cpu);
        for kernel in gemm::kernels(cpu) {
            let problem = Gemm::new(cpu, &image, kernel, [1024; 3], options(cpu).threads(Some(1)));
            problem.run();
            problem.check(4099);
            group.throughput(Throughput::Elements(2 << 30));
            group.bench_function(BenchmarkId::new(*kernel, cpu), |b| b.iter(|| black_box(problem.run())));
        }
    }
    group.finish();

    // From nothing to a first result: machine, load, lower, launch.
    let image = looped("first", &init, &["v_add_f32 v2, v3, v4"], 16);
    c.bench_function("first result", |b| {
        b.iter(|| {
            let rig = Rig::new(options("gfx942"), &image);
            let data = rig.upload("data", &vec![1f32; 4096]);
            rig.launch("test", 1, 64, &Args::new().push(data)).expect("runs")
        });
    });
}

/// In wall-clock time: more threads make one launch faster.
fn scaling(c: &mut Criterion) {
    let image = gemm::image("gfx942");
    let mut group = c.benchmark_group("scaling of gemm_bf16");
    for threads in [1, 2] {
        let options = options("gfx942").threads(Some(threads));
        let problem = Gemm::new("gfx942", &image, "gemm_bf16", [1024; 3], options);
        group.bench_function(BenchmarkId::new("threads", threads), |b| b.iter(|| black_box(problem.run())));
    }
    group.finish();
}

/// Split-K with tickets: wall-clock time by host threads and order of blocks.
fn tickets(c: &mut Criterion) {
    let (n, slices, tiles) = (4000u32, 8u32, 8u32);
    let image = common::hip("gfx942", "-O2", include_str!("../tests/kernels/split_k.hip"));
    let mut group = c.benchmark_group("split-K with tickets");
    let orders = [BlockOrder::Reproducible, BlockOrder::Arrival];
    for (threads, order) in [(1, orders[0]), (2, orders[0]), (2, orders[1])] {
        let rig = Rig::new(options("gfx942").threads(Some(threads)).block_order(order), &image);
        let tickets = rig.upload("tickets", &vec![0u32; tiles as usize]);
        let args = Args::new()
            .push(rig.upload("x", &vec![1f32; (64 * n * slices * tiles) as usize]))
            .push(rig.upload("partial", &vec![0f32; (64 * slices * tiles) as usize]))
            .push(tickets)
            .push(rig.upload("y", &vec![0f32; (64 * tiles) as usize]))
            .push(rig.upload("winner", &vec![0u32; tiles as usize]))
            .push(n)
            .push(slices);
        group.bench_function(BenchmarkId::new(order.to_string(), format!("{threads} threads")), |b| {
            b.iter(|| {
                rig.machine.fill(tickets, &[0], 4 * u64::from(tiles)).unwrap();
                rig.launch("split", slices * tiles, 64, &args).unwrap()
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = scales;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(800));
    targets = scaling, tickets
}
criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(CpuTime).sample_size(10).warm_up_time(std::time::Duration::from_millis(200)).measurement_time(std::time::Duration::from_millis(800));
    targets = speed
}
criterion_main!(benches, scales);
