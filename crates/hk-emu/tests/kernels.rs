//! Compiled kernels from end to end.

#![allow(clippy::precedence)] // bit arithmetic as the device code writes it

use crate::common::{Args, Assembly, Random, Rig, assemble, gemm, options};
use hk_emu::MatrixNumerics;

const CPUS: [&str; 2] = ["gfx942", "gfx950"];

#[test]
fn vector_add() {
    for cpu in CPUS {
        let rig = Rig::hip(
            cpu,
            r#"KERNEL void add(const float *a, const float *b, float *c, int n) {
                 int i = BID * 256 + TID;
                 if (i < n) c[i] = a[i] + b[i];
               }"#,
        );
        let n = 1000;
        let mut random = Random(1);
        let a: Vec<f32> = (0..n).map(|_| random.unit()).collect();
        let b: Vec<f32> = (0..n).map(|_| random.unit()).collect();
        let (pa, pb, pc) = (rig.upload("a", &a), rig.upload("b", &b), rig.upload("c", &vec![0f32; n]));
        let args = Args::new().push(pa).push(pb).push(pc).push(n as u32);
        let counters = rig.launch("add", 4, 256, &args).unwrap();
        let c: Vec<f32> = rig.download(pc, n);
        for i in 0..n {
            assert_eq!(c[i], a[i] + b[i], "{cpu} {i}");
        }
        assert_eq!((counters.workgroups, counters.waves), (4, 16));
        assert_eq!(counters.global_read_bytes, 8 * n as u64);
        assert_eq!(counters.global_written_bytes, 4 * n as u64);
    }
}

/// Every optimisation level of one source gives what the host computes.
#[test]
fn host_arithmetic_at_every_optimisation_level() {
    let source = r#"
      struct Out { float div, root; double ddiv, droot; i64 idiv; u64 umod; i32 sdiv; u32 urem; u64 mulhi; float fromu64; i64 tof; int sw; float fmodish; };
      __device__ int pick(int i, int x) {
        switch (i % 5) { case 0: return x + 1; case 1: return x * 3; case 2: return -x; case 3: return x >> 2; default: return x ^ 0x55; }
      }
      __device__ __attribute__((noinline)) u64 collatz(u64 n) { u64 s = 0; while (n != 1 && s < 200) { n = n & 1 ? 3 * n + 1 : n / 2; s++; } return s; }
      KERNEL void all(const float *a, const float *b, const double *c, const double *d, const u64 *e, const u64 *f, Out *out, u64 *steps) {
        int i = BID * 64 + TID;
        Out o;
        o.div = a[i] / b[i];
        o.root = __builtin_sqrtf(__builtin_fabsf(a[i]));
        o.ddiv = c[i] / d[i];
        o.droot = __builtin_sqrt(__builtin_fabs(c[i]));
        o.idiv = (i64)e[i] / (i64)(f[i] | 1);
        o.umod = e[i] % (f[i] | 1);
        o.sdiv = (i32)e[i] / (i32)(f[i] | 1);
        o.urem = (u32)e[i] % (u32)(f[i] | 1);
        o.mulhi = (u64)(((unsigned __int128)e[i] * f[i]) >> 64);
        o.fromu64 = (float)e[i];
        o.tof = (i64)c[i];
        o.sw = pick(i, (int)e[i]);
        o.fmodish = a[i] - __builtin_truncf(a[i] / 3.0f) * 3.0f;
        out[i] = o;
        steps[i] = collatz((e[i] & 1023) + 1);
      }"#;
    let n = 512;
    let mut random = Random(3);
    let float =
        |r: &mut Random| f32::from_bits(r.next() & 0x8FFF_FFFF | (90 + r.next() % 75) << 23 & 0x7F80_0000);
    let mut a: Vec<f32> = (0..n).map(|_| float(&mut random)).collect();
    let mut b: Vec<f32> = (0..n).map(|_| float(&mut random)).collect();
    // Quotients near overflow, in the subnormals, of subnormals, and special ones.
    let edges = [
        1e38f32,
        3e-39,
        1e-45,
        1.5e-38,
        3.4e38,
        1.0,
        -7.0,
        0.0,
        f32::INFINITY,
        f32::NAN,
        1.1754944e-38,
        2e38,
    ];
    for i in 0..edges.len() * edges.len() {
        a[i] = edges[i / edges.len()];
        b[i] = edges[i % edges.len()];
    }
    let double = |r: &mut Random| f64::from(r.unit()) * 2f64.powi((r.next() % 1200) as i32 - 600);
    let mut c: Vec<f64> = (0..n).map(|_| double(&mut random)).collect();
    let mut d: Vec<f64> = (0..n).map(|_| double(&mut random)).collect();
    let edges = [1e308, 1e-308, 5e-324, 1.0, -3.0, 0.0, f64::INFINITY, 4.4e-308, 1e-300, 1.7e308];
    for i in 0..edges.len() * edges.len() {
        c[i] = edges[i / edges.len()];
        d[i] = edges[i % edges.len()];
    }
    let word = |r: &mut Random| (u64::from(r.next()) << 32 | u64::from(r.next())) >> (r.next() % 60);
    let e: Vec<u64> = (0..n).map(|_| word(&mut random)).collect();
    let f: Vec<u64> = (0..n).map(|_| word(&mut random)).collect();
    for cpu in CPUS {
        for level in ["-O0", "-O1", "-O2", "-O3", "-Os"] {
            let rig = Rig::new(crate::common::options(cpu), &crate::common::hip(cpu, level, source));
            let size = 80;
            let out = rig.upload("out", &vec![0u8; n * size]);
            let steps = rig.upload("steps", &vec![0u64; n]);
            let args = Args::new()
                .push(rig.upload("a", &a))
                .push(rig.upload("b", &b))
                .push(rig.upload("c", &c))
                .push(rig.upload("d", &d))
                .push(rig.upload("e", &e))
                .push(rig.upload("f", &f))
                .push(out)
                .push(steps);
            rig.launch("all", (n / 64) as u32, 64, &args)
                .unwrap_or_else(|fault| panic!("{cpu} {level}: {fault}"));
            let bytes: Vec<u8> = rig.download(out, n * size);
            let counts: Vec<u64> = rig.download(steps, n);
            for i in 0..n {
                let at = |offset: usize| &bytes[i * size + offset..];
                let u32_at = |o: usize| u32::from_le_bytes(at(o)[..4].try_into().unwrap());
                let u64_at = |o: usize| u64::from_le_bytes(at(o)[..8].try_into().unwrap());
                let place = format!("{cpu} {level} element {i}");
                let same32 = |bits: u32, want: f32, what: &str| {
                    let got = f32::from_bits(bits);
                    assert!(
                        bits == want.to_bits() || got.is_nan() && want.is_nan(),
                        "{place}: {what}: {got:e} for {want:e} ({:e}, {:e})",
                        a[i],
                        b[i]
                    );
                };
                let same64 = |bits: u64, want: f64, what: &str| {
                    let got = f64::from_bits(bits);
                    assert!(
                        bits == want.to_bits() || got.is_nan() && want.is_nan(),
                        "{place}: {what}: {got:e} for {want:e} ({:e}, {:e})",
                        c[i],
                        d[i]
                    );
                };
                same32(u32_at(0), a[i] / b[i], "f32 division");
                same32(u32_at(4), a[i].abs().sqrt(), "f32 square root");
                same64(u64_at(8), c[i] / d[i], "f64 division");
                same64(u64_at(16), c[i].abs().sqrt(), "f64 square root");
                let divisor = f[i] | 1;
                assert_eq!(
                    u64_at(24) as i64,
                    (e[i] as i64).wrapping_div(divisor as i64),
                    "{place}: i64 division"
                );
                assert_eq!(u64_at(32), e[i] % divisor, "{place}: u64 remainder");
                assert_eq!(
                    u32_at(40) as i32,
                    (e[i] as i32).wrapping_div(divisor as i32),
                    "{place}: i32 division"
                );
                assert_eq!(u32_at(44), e[i] as u32 % divisor as u32, "{place}: u32 remainder");
                assert_eq!(
                    u64_at(48),
                    (u128::from(e[i]) * u128::from(f[i]) >> 64) as u64,
                    "{place}: high product"
                );
                same32(u32_at(56), e[i] as f32, "u64 to f32");
                if c[i].abs() < 9e18 {
                    assert_eq!(u64_at(64) as i64, c[i] as i64, "{place}: f64 to i64");
                }
                let x = e[i] as i32;
                let sw = match i % 5 {
                    0 => x.wrapping_add(1),
                    1 => x.wrapping_mul(3),
                    2 => x.wrapping_neg(),
                    3 => x >> 2,
                    _ => x ^ 0x55,
                };
                assert_eq!(u32_at(72) as i32, sw, "{place}: switch");
                let mut m = (e[i] & 1023) + 1;
                let mut count = 0;
                while m != 1 && count < 200 {
                    m = if m % 2 == 1 { 3 * m + 1 } else { m / 2 };
                    count += 1;
                }
                assert_eq!(counts[i], count, "{place}: loop");
            }
        }
    }
}

const REDUCE: &str = r#"
  KERNEL void reduce(const float *x, float *y, int n) {
    __shared__ float part[16];
    float sum = 0;
    for (int i = TID; i < n; i += 256) sum += x[BID * n + i];
    for (int step = 32; step; step >>= 1) sum += __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((TID ^ step) * 4, __builtin_bit_cast(int, sum)));
    if (TID % 64 == 0) part[TID / 64] = sum;
    BARRIER();
    float total = part[0] + part[1] + part[2] + part[3];
    BARRIER();
    y[BID * 256 + TID] = total;
  }"#;

/// The same bits with any number of threads, on every host level.
#[test]
fn results_do_not_depend_on_threads_or_host_features() {
    use hk_emu::Level;
    let image = crate::common::hip("gfx942", "-O3", REDUCE);
    let (n, rows) = (1000usize, 37usize);
    let mut random = Random(11);
    let x: Vec<f32> = (0..n * rows).map(|_| random.unit()).collect();
    let mut first: Option<(Vec<u32>, hk_emu::Counters)> = None;
    for threads in [1, 2, 3, 8] {
        for level in [Level::Portable, Level::Avx2, Level::Avx512].into_iter().filter(|l| l.available()) {
            let rig =
                Rig::new(crate::common::options("gfx942").threads(Some(threads)).level(Some(level)), &image);
            let (px, py) = (rig.upload("x", &x), rig.upload("y", &vec![0f32; rows * 256]));
            let counters = rig
                .launch("reduce", rows as u32, 256, &Args::new().push(px).push(py).push(n as u32))
                .unwrap();
            let y: Vec<u32> = rig.download(py, rows * 256);
            for row in 0..rows {
                let want: f64 = x[row * n..][..n].iter().map(|x| f64::from(*x)).sum();
                assert!((f64::from(f32::from_bits(y[row * 256])) - want).abs() < 1e-4);
            }
            match &first {
                None => first = Some((y, counters)),
                Some(first) => assert_eq!((y, counters), *first, "{threads} threads, {level:?}"),
            }
        }
    }
}

/// Float atomics of many workgroups: in order, so the same sum each time.
#[test]
fn float_atomics_are_deterministic() {
    let image = crate::common::hip(
        "gfx942",
        "-O3",
        "KERNEL void sum(const float *x, float *y) { __builtin_amdgcn_global_atomic_fadd_f32((__attribute__((address_space(1))) float *)y, x[BID * 64 + TID]); }",
    );
    let mut random = Random(5);
    let x: Vec<f32> = (0..64 * 50).map(|_| random.unit() * 2f32.powi((random.next() % 20) as i32)).collect();
    // clang adds up the lanes of a wave, one after the other, before the atomic; workgroups come in order.
    let want =
        x.chunks(64).map(|wave| wave.iter().fold(-0f32, |sum, x| sum + x)).fold(0f32, |sum, x| sum + x);
    for threads in [1, 4] {
        let rig = Rig::new(crate::common::options("gfx942").threads(Some(threads)), &image);
        let (px, py) = (rig.upload("x", &x), rig.upload("y", &[0f32]));
        rig.launch("sum", 50, 64, &Args::new().push(px).push(py)).unwrap();
        assert_eq!(rig.download::<f32>(py, 1)[0], want);
    }
}

/// Integer atomics commute and run in parallel.
#[test]
fn histogram() {
    for cpu in CPUS {
        let rig = Rig::hip(
            cpu,
            r#"KERNEL void histogram(const u32 *x, u32 *bins, u64 *wide) {
                 __shared__ u32 local[64];
                 local[TID % 64] = 0;
                 BARRIER();
                 u32 v = x[BID * 256 + TID];
                 __hip_atomic_fetch_add(&local[v % 64], 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
                 BARRIER();
                 if (TID < 64) {
                   __hip_atomic_fetch_add(&bins[TID], local[TID], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
                   __hip_atomic_fetch_max(&wide[TID], (u64)v << 20, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
                 }
               }"#,
        );
        let mut random = Random(9);
        let x: Vec<u32> = (0..256 * 40).map(|_| random.next()).collect();
        let (px, bins, wide) =
            (rig.upload("x", &x), rig.upload("bins", &[0u32; 64]), rig.upload("wide", &[0u64; 64]));
        rig.launch("histogram", 40, 256, &Args::new().push(px).push(bins).push(wide)).unwrap();
        let mut want = [0u32; 64];
        x.iter().for_each(|v| want[*v as usize % 64] += 1);
        assert_eq!(rig.download::<u32>(bins, 64), want);
        let most = |lane: usize| x.chunks(256).map(|c| u64::from(c[lane]) << 20).max().unwrap();
        assert_eq!(rig.download::<u64>(wide, 64), (0..64).map(most).collect::<Vec<_>>());
    }
}

/// Workgroups that wait for later workgroups, and waves that wait for waves: everybody gets a turn.
#[test]
fn spinning_waves_and_workgroups_make_progress() {
    let source = r#"
      KERNEL void chain(volatile u32 *flags, u32 *out, int n) {
        int me = BID;
        if (TID == 0) {
          if (me < n - 1) while (__hip_atomic_load(&flags[me + 1], __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT) == 0) __builtin_amdgcn_s_sleep(1);
          out[me] = me == n - 1 ? 1 : out[me + 1] + 1;
          __hip_atomic_store(&flags[me], 1, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
        }
      }
      KERNEL void busy(u32 *out) {
        __shared__ volatile u32 turn;
        if (TID == 0) turn = 3;
        BARRIER();
        u32 wave = TID / 64;
        while (turn != wave) {}
        if (TID % 64 == 0) { out[wave] = turn; turn = wave - 1; }
      }"#;
    for threads in [1, 2] {
        let rig = Rig::new(
            crate::common::options("gfx942").threads(Some(threads)),
            &crate::common::hip("gfx942", "-O2", source),
        );
        let n = 40usize;
        let (flags, out) = (rig.upload("flags", &vec![0u32; n]), rig.upload("out", &vec![0u32; n]));
        rig.launch("chain", n as u32, 64, &Args::new().push(flags).push(out).push(n as u32)).unwrap();
        assert_eq!(rig.download::<u32>(out, n), (1..=n as u32).rev().collect::<Vec<_>>());
        rig.launch("busy", 1, 256, &Args::new().push(out)).unwrap();
        assert_eq!(rig.download::<u32>(out, 4), [0, 1, 2, 3]);
    }
}

/// Scratch, indirect calls, recursion, stack objects, and pointers to LDS and private memory through FLAT.
#[test]
fn stacks_calls_and_generic_pointers() {
    let source = r#"
      __device__ __attribute__((noinline)) u32 fib(u32 n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
      __device__ __attribute__((noinline)) u32 twice(u32 x) { return 2 * x; }
      __device__ __attribute__((noinline)) u32 plus(u32 x) { return x + 100; }
      __device__ __attribute__((noinline)) void add(u32 *p, u32 x) { *p += x; }
      KERNEL void calls(u32 *out) {
        __shared__ u32 shared[64];
        u32 local[8];
        for (int i = 0; i < 8; i++) local[i] = TID * 10 + i;
        u32 (*f)(u32) = TID % 2 ? twice : plus;
        shared[TID] = 5;
        u32 *where = TID % 3 == 0 ? &shared[TID] : TID % 3 == 1 ? &local[TID % 8] : &out[TID];
        if (TID % 3 == 2) out[TID] = 7;
        add(where, f(TID));
        out[TID] = *where + (fib(TID % 9) << 16);
      }"#;
    for cpu in CPUS {
        for level in ["-O0", "-O2"] {
            let rig = Rig::new(
                crate::common::options(cpu).threads(Some(1)),
                &crate::common::hip(cpu, level, source),
            );
            let out = rig.upload("out", &[0u32; 64]);
            rig.launch("calls", 1, 64, &Args::new().push(out))
                .unwrap_or_else(|fault| panic!("{cpu} {level}: {fault}"));
            let fib = |n: u32| (0..n).fold((0u32, 1u32), |(a, b), _| (b, a + b)).0;
            let want = (0..64u32).map(|t| {
                let f = if t % 2 == 1 { 2 * t } else { t + 100 };
                let base = [5, t * 10 + t % 8, 7][t as usize % 3];
                base + f + (fib(t % 9) << 16)
            });
            assert_eq!(rig.download::<u32>(out, 64), want.collect::<Vec<_>>(), "{cpu} {level}");
        }
    }
}

/// Addresses of variables and functions in initialisers, and of symbols that the linker leaves to the loader (default
/// visibility: R_AMDGPU_ABS64, also in the GOT). Undefined weak ones are null.
#[test]
fn addresses_of_symbols() {
    let source = r#"
      #define SYMBOL __device__ __attribute__((visibility("default")))
      SYMBOL u32 shared[4] = {10, 20, 30, 40};
      extern SYMBOL __attribute__((weak)) u32 missing;
      __device__ __attribute__((noinline)) u32 twice(u32 x) { return 2 * x; }
      static __device__ u32 own = 7;
      __device__ u32 *where = shared + 1, **deep = &where, *hidden = &own, *nowhere = &missing, (*call)(u32) = twice;
      KERNEL void read(u64 *out) {
        out[0] = *where; out[1] = **deep + shared[3]; out[2] = *hidden; out[3] = call(21);
        out[4] = (u64)nowhere; out[5] = (u64)&missing; out[6] = (u64)shared; out[7] = (u64)where;
      }"#;
    for cpu in CPUS {
        let rig = Rig::hip(cpu, source);
        let out = rig.upload("out", &[9u64; 8]);
        rig.launch("read", 1, 1, &Args::new().push(out)).unwrap_or_else(|fault| panic!("{cpu}: {fault}"));
        let (shared, size) = rig.module.global("shared").unwrap();
        assert_eq!(size, 16);
        assert_eq!(rig.download::<u64>(out, 8), [20, 60, 7, 42, 0, 0, shared, shared + 4], "{cpu}");
    }
}

/// Grid and block shapes, hidden arguments, partial waves.
#[test]
fn launch_state() {
    let source = r#"
      KERNEL void where(u32 *out) {
        const u8 *hidden = (const u8 *)__builtin_amdgcn_implicitarg_ptr();
        u32 gx = *(const u32 *)hidden, gy = *(const u32 *)(hidden + 4);
        u16 bx = *(const u16 *)(hidden + 12), by = *(const u16 *)(hidden + 14), bz = *(const u16 *)(hidden + 16);
        u32 x = __builtin_amdgcn_workgroup_id_x() * bx + __builtin_amdgcn_workitem_id_x();
        u32 y = __builtin_amdgcn_workgroup_id_y() * by + __builtin_amdgcn_workitem_id_y();
        u32 z = __builtin_amdgcn_workgroup_id_z() * bz + __builtin_amdgcn_workitem_id_z();
        out[(z * gy * by + y) * gx * bx + x] = x | y << 8 | z << 16 | (u32)__builtin_popcountll(__builtin_amdgcn_read_exec()) << 24;
      }"#;
    for cpu in CPUS {
        let rig = Rig::hip(cpu, source);
        let (grid, block) = ([3u32, 2, 2], [5u32, 7, 3]);
        let size: Vec<u32> = (0..3).map(|i| grid[i] * block[i]).collect();
        let total = (size[0] * size[1] * size[2]) as usize;
        let out = rig.upload("out", &vec![0u32; total]);
        let args = Args::new().push(out);
        let counters = rig
            .machine
            .launch(&rig.module, "where", &hk_emu::Dispatch { grid, block, dynamic_lds: 0, args: &args.0 })
            .unwrap();
        assert_eq!((counters.workgroups, counters.waves), (12, 24));
        let got: Vec<u32> = rig.download(out, total);
        for (i, value) in got.iter().enumerate() {
            let i = i as u32;
            let (x, y, z) = (i % size[0], i / size[0] % size[1], i / size[0] / size[1]);
            let thread = (z % 3 * 7 + y % 7) * 5 + x % 5;
            // 105 threads: a whole wave and one of 41 lanes.
            let lanes = if thread < 64 { 64 } else { 41 };
            assert_eq!(*value, x | y << 8 | z << 16 | lanes << 24, "{cpu} {i}");
        }
    }
}

/// A kernel asks the host and reads the answer: the host's side runs at the interrupt.
#[test]
fn a_kernel_interrupts_the_host() {
    let source = r#"
      KERNEL void ask(u32 *out) {
        volatile u64 *mail = ((u64 **)__builtin_amdgcn_implicitarg_ptr())[10];
        u32 me = __builtin_amdgcn_workgroup_id_x();
        if (TID == 0) {
          __hip_atomic_store(&mail[1], (u64)(me + 1), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
          __hip_atomic_exchange(&mail[0], (u64)(me + 5), __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
          __builtin_amdgcn_s_sendmsg(1, 0);
          out[me] = (u32)__hip_atomic_load(&mail[1], __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
        }
      }"#;
    for cpu in CPUS {
        let rig = Rig::hip(cpu, source);
        let (out, mail) = (rig.upload("out", &[0u32; 8]), rig.upload("mail", &[0u64; 2]));
        let seen = std::sync::Mutex::new(vec![]);
        let answer = || {
            let asked = rig.machine.exchange(mail, 0).expect("the mailbox");
            seen.lock().unwrap().push(asked);
            let word = rig.download::<u64>(mail + 8, 1)[0];
            rig.machine.write(mail + 8, &(100 * word).to_le_bytes()).expect("the answer");
        };
        let args = Args::new().push(out);
        let dispatch = hk_emu::Dispatch { grid: [8, 1, 1], block: [64, 1, 1], dynamic_lds: 0, args: &args.0 };
        let host = hk_emu::Host {
            hidden: &[("hidden_hostcall_buffer", mail)],
            interrupt: Some(&answer),
            ..Default::default()
        };
        rig.machine.launch_with(&rig.module, "ask", &dispatch, &host).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(rig.download::<u32>(out, 8), [100, 200, 300, 400, 500, 600, 700, 800], "{cpu}");
        assert_eq!(seen.into_inner().unwrap(), (5..13).collect::<Vec<u64>>());
        assert!(rig.machine.exchange(mail + 4, 0).is_err() && rig.machine.exchange(mail + 16, 0).is_err());
    }
}

/// Preloaded arguments and the prologue that loads them agree.
#[test]
fn kernarg_preload() {
    let source = "KERNEL void add(float *y, float a, float b, u32 n) { if (TID < n) y[TID] += a * b; }";
    let image =
        crate::common::hip_with("gfx942", "-O2", source, &["-mllvm", "-amdgpu-kernarg-preload-count=5"]);
    let mut results = vec![];
    for preload in [true, false] {
        let rig = Rig::new(crate::common::options("gfx942").kernarg_preload(preload), &image);
        assert!(rig.module.code_object().kernels[0].descriptor.kernarg_preload_dwords > 0);
        let y = rig.upload("y", &[1f32; 64]);
        let counters =
            rig.launch("add", 1, 64, &Args::new().push(y).push(2f32).push(3f32).push(50u32)).unwrap();
        let y: Vec<f32> = rig.download(y, 64);
        assert!((0..64).all(|i| y[i] == if i < 50 { 7.0 } else { 1.0 }));
        results.push(counters.instructions);
    }
    assert!(results[0] < results[1], "the prologue is skipped: {results:?}");
}

/// Distinct bytes count once, however often they are read.
#[test]
fn footprint() {
    let source = "KERNEL void f(const float *x, float *y) { float s = 0; for (int i = 0; i < 4; i++) s += ((const volatile float *)x)[TID / 2]; y[TID] = s; }";
    let image = crate::common::hip("gfx942", "-O2", source);
    let rig = Rig::new(crate::common::options("gfx942").details(true), &image);
    let (x, y) = (rig.upload("x", &[1f32; 64]), rig.upload("y", &[0f32; 64]));
    let mut total = hk_emu::Counters::default();
    for _ in 0..2 {
        let counters = rig.launch("f", 1, 64, &Args::new().push(x).push(y)).unwrap();
        let details = counters.details.unwrap();
        assert_eq!((details.distinct_read_bytes, details.distinct_written_bytes), (128, 256));
        assert_eq!((counters.global_read_bytes, counters.global_written_bytes), (1024, 256));
        total += counters;
    }
    assert_eq!(total.details.unwrap().distinct_read_bytes, 256);
    assert_eq!(total.waves, 2);
}

#[test]
fn vector_registers_behind_the_first_agpr_are_agprs() {
    // AGPRs start at 64, so v70 is a6. A VGPR tuple may reach across the border.
    let body = "
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v1, 2, v0
  v_mov_b32 v70, 7
  v_accvgpr_read_b32 v2, a6
  v_accvgpr_write_b32 a1, v0
  v_mov_b32 v62, v65
  v_mov_b32 v63, 3
  v_lshlrev_b64 v[62:63], 1, v[62:63]
  v_lshlrev_b64 v[64:65], 1, v[62:63]
  v_add3_u32 v2, v2, v62, v65
  s_waitcnt lgkmcnt(0)
  global_store_dword v1, v2, s[4:5]";
    let rig = Rig::new(options("gfx942"), &assemble(&Assembly { body, ..Assembly::default() }));
    let out = rig.upload("out", &[0u32; 64]);
    rig.launch("test", 1, 64, &Args::new().push(out)).expect("runs");
    let want: Vec<u32> = (0..64).map(|lane| 7 + 2 * lane + 12).collect();
    assert_eq!(rig.download::<u32>(out, 64), want);
}

#[test]
fn products_of_matrices() {
    for cpu in CPUS {
        let image = gemm::image(cpu);
        for kernel in gemm::kernels(cpu) {
            let product = gemm::Gemm::new(cpu, &image, kernel, [256, 128, 192], options(cpu));
            let counters = product.run();
            product.check(1);
            // 32 x 32 results and 16 bytes of k of two lane groups each; f8f6f4 takes 64 bytes at once.
            let bytes = if kernel.contains("bf16") { 384 } else { 192 };
            let step = match (cpu, *kernel) {
                (_, "gemm_f8f6f4" | "gemm_f8f6f4_dma") => 64,
                ("gfx950", "gemm_bf16" | "gemm_bf16_dma") => 32,
                _ => 16,
            };
            assert_eq!(counters.mfma, 8 * 4 * bytes / step, "{cpu} {kernel}");
        }
        let exact = options(cpu).matrix_numerics(MatrixNumerics::Cdna3Exact);
        let product = gemm::Gemm::new(cpu, &image, "gemm_fp8", [128, 128, 64], exact);
        product.run();
        product.check(1);
    }
}
