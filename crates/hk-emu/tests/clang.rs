//! Whatever clang makes of C++: the same functions compiled for both targets at every optimisation level, and for the
//! host, give the same results.

#![allow(clippy::precedence)] // shared test code writes bits as the ISA manual does

use std::process::Command;

use crate::common::{Args, Rig, hip_with, options};

/// What the device and the host are compiled from. `RESULTS` words for each of `THREADS` threads.
const THREADS: usize = 192;
const RESULTS: usize = 48;

const FUNCTIONS: &str = r#"
typedef unsigned u32; typedef unsigned long long u64; typedef int i32; typedef long long i64;
typedef unsigned char u8; typedef unsigned short u16; typedef signed char i8; typedef short i16;
#define NOINLINE FN __attribute__((noinline))

struct Random {
  u64 state;
  FN u64 next() { state = state * 6364136223846793005ull + 1442695040888963407ull; u64 x = state; x ^= x >> 29; x *= 0xbf58476d1ce4e5b9ull; return x ^ x >> 32; }
  FN double real() { return (double)(i64)next() * 0x1p-40; }
};
union Bits { double d; u64 u; float f; u32 w; };
FN u64 bits(double x) { if (x != x) return 1; Bits b; b.d = x; return b.u; }
FN u64 bits(float x) { if (x != x) return 1; Bits b; b.u = 0; b.f = x; return b.w; }

// f64 and f32: arithmetic, division, square roots, rounding, conversions to and from every integer.
NOINLINE void floats(Random r, u64 *out) {
  double a = r.real(), b = r.real(), c = r.real();
  out[0] = bits(a + b) ^ bits(a - c) << 1; out[1] = bits(a * b); out[2] = bits(a / b);
  out[3] = bits(__builtin_sqrt(__builtin_fabs(a))); out[4] = bits(__builtin_fma(a, b, c));
  out[5] = bits(__builtin_floor(a)) ^ bits(__builtin_ceil(b)) ^ bits(__builtin_trunc(c)) ^ bits(__builtin_rint(a * 0.5));
  out[6] = (u64)(i64)a ^ (u64)(i32)(b * 0x1p-20) << 3 ^ (u64)(u32)__builtin_fabs(c * 0x1p-20); out[7] = (u64)__builtin_fabs(c);
  float x = (float)a, y = (float)b;
  out[8] = bits(x / y) | bits(x * y + 1.0f) << 32; out[9] = bits(__builtin_sqrtf(__builtin_fabsf(x))) | bits(x - y) << 32;
  out[10] = bits((float)(i64)r.state) | bits((float)r.state) << 32; out[11] = bits((double)r.state) + bits((double)(i64)r.state);
  out[12] = (a < b) + 2 * (a >= c) + 4 * (x == y) + 8 * (x != x) + 16 * (a > b && b > c);
  out[13] = bits(__builtin_fmin(a, b)) ^ bits(__builtin_fmax(b, c)) << 1 ^ bits(__builtin_copysign(a, b));
  out[14] = bits((float)(_Float16)(x * 0x1p-20f)) | (u64)(u16)(i16)(_Float16)(y * 0x1p-24f) << 32;
}

// Integers of every width: products, quotients, shifts, rotations, bit counts, 128 bits.
NOINLINE void integers(Random r, u64 *out) {
  u64 a = r.next() >> (r.state & 31), b = r.next() >> (r.state & 63) | 1; i64 p = (i64)r.next(), q = (i64)(r.next() >> 20) | 1;
  out[0] = a / b; out[1] = a % b; out[2] = (u64)(p / q); out[3] = (u64)(p % q); out[4] = (u64)(p / -q);
  out[5] = (u32)a / (u32)b + (u64)((u32)a % (u32)b) * 7; out[6] = (u64)(i64)((i32)p / (i32)(q | 1)) ^ (u64)(i64)((i32)p % (i32)(q | 1)) << 9;
  out[7] = (u64)((u16)a / (u16)b) + (u64)((u8)a % (u8)b) * 65536; out[8] = (u64)(i64)((i16)p / (i16)q) ^ (u64)(i64)((i8)p % (i8)(q | 1)) << 20;
  unsigned __int128 wide = (unsigned __int128)a * b + (u64)p; out[9] = (u64)(wide >> 64) ^ (u64)(wide >> 37);
  out[10] = a << (b & 63) ^ (u64)(p >> (b & 63)) ^ a >> (q & 63); out[11] = (a << 13 | a >> 51) + ((u32)a << 7 | (u32)a >> 25);
  out[12] = __builtin_popcountll(a) + 100 * __builtin_clzll(b) + 10000 * __builtin_ctzll(b) + 1000000 * __builtin_clz((u32)b | 1);
  out[13] = __builtin_bswap64(a) ^ __builtin_bswap32((u32)b) ^ __builtin_bitreverse64((u64)p); i64 sum;
  out[14] = __builtin_add_overflow(p, (i64)a << 1, &sum) + 2 * __builtin_mul_overflow(p, q, &sum) + (u64)sum * 4;
}

// Arrays on the stack with run-time indices, structs by value, copies.
struct Big { u64 v[6]; u8 tail[5]; };
NOINLINE Big shuffled(Big b, u32 by) { Big c = b; for (u32 i = 0; i < 6; i++) c.v[(i + by) % 6] = b.v[i] + i; c.tail[by % 5] ^= 0x5a; return c; }
NOINLINE void stack(Random r, u64 *out) {
  u64 data[24]; u8 count[16] = {0};
  for (int i = 0; i < 24; i++) { data[i] = r.next() >> 40; count[data[i] & 15]++; }
  for (int i = 1; i < 24; i++) { u64 x = data[i]; int j = i; while (j > 0 && data[j - 1] > x) { data[j] = data[j - 1]; j--; } data[j] = x; }
  u64 h = 0; for (int i = 0; i < 24; i++) h = h * 31 + data[i]; out[0] = h;
  h = 0; for (int i = 0; i < 16; i++) h = h * 31 + count[i]; out[1] = h; out[2] = data[r.state % 24];
  Big b; for (int i = 0; i < 6; i++) b.v[i] = r.next(); for (int i = 0; i < 5; i++) b.tail[i] = (u8)r.next();
  b = shuffled(b, (u32)(r.state >> 20)); h = 0; for (int i = 0; i < 6; i++) h = h * 131 + b.v[i]; for (int i = 0; i < 5; i++) h = h * 131 + b.tail[i]; out[3] = h;
  struct { u32 a : 5, b : 11; i32 c : 9; u64 d : 37; } field; field.a = (u32)r.state; field.b = (u32)(r.state >> 9); field.c = (i32)(r.state >> 30); field.d = r.state >> 3;
  out[4] = field.a + field.b * 37 + (u64)(i64)field.c * 5 + field.d;
}

// Calls: recursion, tables of functions, virtual functions, variable arguments, branches by table.
NOINLINE u64 ackermann(u64 m, u64 n) { return m == 0 ? n + 1 : n == 0 ? ackermann(m - 1, 1) : ackermann(m - 1, ackermann(m, n - 1)); }
NOINLINE u64 mutual_odd(u64 n, u64 h);
NOINLINE u64 mutual_even(u64 n, u64 h) { return n == 0 ? h : mutual_odd(n - 1, h * 3 + n); }
NOINLINE u64 mutual_odd(u64 n, u64 h) { return n == 0 ? ~h : mutual_even(n - 1, h * 5 - n); }
NOINLINE u64 op_add(u64 a, u64 b) { return a + b; }
NOINLINE u64 op_mul(u64 a, u64 b) { return a * b; }
NOINLINE u64 op_mix(u64 a, u64 b) { return (a ^ b >> 7) * 0x9e3779b97f4a7c15ull; }
NOINLINE u64 op_rec(u64 a, u64 b) { return ackermann(a & 1, b & 7) + a; }
typedef u64 (*Op)(u64, u64);
DATA const Op kTable[4] = {op_add, op_mul, op_mix, op_rec};
NOINLINE u64 sum_of(int n, ...) { __builtin_va_list list; __builtin_va_start(list, n); u64 h = 0; for (int i = 0; i < n; i++) { h = h * 7 + (i & 1 ? (u64)__builtin_va_arg(list, double) : __builtin_va_arg(list, u64)); } __builtin_va_end(list); return h; }
NOINLINE u64 machine(u64 code) {
  u64 a = 1, b = 2;
  for (int i = 0; i < 20; i++, code = code >> 3 | code << 61)
    switch (code & 7) {
      case 0: a += b; break; case 1: a ^= b << 3; break; case 2: b = a * 5; break; case 3: a = b - a; break;
      case 4: b += 17; if (a & 1) continue; a >>= 1; break; case 5: a = ~a; [[fallthrough]]; case 6: b ^= a; break; default: a += i * b; }
  return a ^ b << 1;
}
NOINLINE void calls(Random r, u64 *out) {
  out[0] = ackermann(2, r.next() & 3); out[1] = mutual_even(r.next() & 15, r.state); u64 h = r.next();
  for (int i = 0; i < 6; i++) h = kTable[(h >> 13 ^ i) & 3](h, r.state + i);
  out[2] = h; out[3] = machine(r.next()); out[4] = sum_of(5, r.next(), 3.5, r.next() >> 1, -0.0, 7ull);
}

// Pointers that may point anywhere.
NOINLINE u64 through(u64 *p, u32 n, u64 x) { u64 h = x; for (u32 i = 0; i < n; i++) { p[i] += h & 0xff; h = h * 33 ^ p[i]; } u8 *q = (u8 *)p; q[3] ^= 1; ((u16 *)p)[5] += 9; return h + *(u32 *)(q + 8); }
NOINLINE void generic(Random r, u64 *out, u64 *shared, u64 *global) {
  u64 own[8]; for (int i = 0; i < 8; i++) own[i] = shared[i] = global[i] = r.next();
  u64 *which[3] = {own, shared, global}; u64 h = 0;
  for (int i = 0; i < 9; i++) h = through(which[r.next() % 3], 8, h);
  out[0] = h; h = 0; for (int i = 0; i < 8; i++) h = h * 31 + own[i] + shared[i] * 3 + global[i] * 7; out[1] = h;
}

FN void all(u32 tid, u64 *out, u64 *shared, u64 *global) {
  Random r; r.state = tid * 0x9e3779b97f4a7c15ull + 12345; for (int i = 0; i < 48; i++) out[i] = 0;
  floats(r, out); integers(r, out + 15); stack(r, out + 30); calls(r, out + 35); generic(r, out + 40, shared, global);
}
"#;

const DEVICE: &str = r#"
#define FN __attribute__((device))
#define DATA __attribute__((device))
"#;

const KERNELS: &str = r#"
extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 64))) void run(u64 *out, u64 *scratch) {
  __attribute__((shared)) static u64 shared[64 * 8];
  u32 lane = __builtin_amdgcn_workitem_id_x(), tid = __builtin_amdgcn_workgroup_id_x() * 64 + lane;
  all(tid, out + tid * 48, shared + lane * 8, scratch + tid * 8);
}

// Atomics: every operation, type, order and scope that clang has. `cells` are shared by all threads, `own` are not.
#define FETCH(op, p, v, scope) __hip_atomic_fetch_##op(p, v, __ATOMIC_RELAXED, scope)
#define CELLS(T, base, scope) do { T *c = (T *)(base); \
    FETCH(add, c + 0, (T)(tid + 1), scope); FETCH(or, c + 1, (T)1 << (tid & 31), scope); FETCH(and, c + 2, ~((T)1 << (tid & 31)), scope); \
    FETCH(xor, c + 3, (T)(tid * 77), scope); FETCH(max, c + 4, (T)(tid * 2654435761u), scope); FETCH(min, c + 5, (T)(tid * 2654435761u), scope); } while (0)
extern "C" __attribute__((global)) void atomics(u64 *cells, u64 *own, u64 *tickets) {
  u32 tid = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
  CELLS(u32, cells, __HIP_MEMORY_SCOPE_AGENT); CELLS(i32, cells + 8, __HIP_MEMORY_SCOPE_SYSTEM);
  CELLS(u64, cells + 16, __HIP_MEMORY_SCOPE_AGENT); CELLS(i64, cells + 24, __HIP_MEMORY_SCOPE_SYSTEM);
  FETCH(add, (float *)(cells + 32), 1.0f, __HIP_MEMORY_SCOPE_AGENT); FETCH(add, (double *)(cells + 33), 0.5, __HIP_MEMORY_SCOPE_AGENT);
  FETCH(max, (float *)(cells + 34), (float)tid, __HIP_MEMORY_SCOPE_AGENT); FETCH(min, (double *)(cells + 35), -(double)tid, __HIP_MEMORY_SCOPE_SYSTEM);
  // Each ticket is given once: by add, by a loop of compare-and-swap, by 64 bits.
  tickets[__hip_atomic_fetch_add((u32 *)(cells + 36), 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT)] += 1;
  u32 old = 0; while (!__hip_atomic_compare_exchange_strong((u32 *)(cells + 37), &old, old + 1, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)) {}
  tickets[old] += 10;
  u64 wide = 0; while (!__hip_atomic_compare_exchange_weak(cells + 38, &wide, wide + 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)) {}
  tickets[wide] += 100;
  // Through pointers that no other lane uses: the returned values are known.
  u64 *p = own + tid * 4; u64 h = 0;
  h = h * 7 + __hip_atomic_exchange(p, tid + 5ull, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_WORKGROUP); h = h * 7 + __hip_atomic_fetch_add(p, 3ull, __ATOMIC_SEQ_CST, __HIP_MEMORY_SCOPE_WAVEFRONT);
  h = h * 7 + (u32)__hip_atomic_exchange((u32 *)(p + 1), tid, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SINGLETHREAD); h = h * 7 + __hip_atomic_fetch_max((i32 *)(p + 1), 50, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_WORKGROUP);
  __hip_atomic_store(p + 2, h, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT); h += __hip_atomic_load(p + 1, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
  p[3] = h;
}
"#;

const HOST: &str = r#"
#define FN
#define DATA static
"#;

const MAIN: &str = r#"
extern "C" int putchar(int);
int main() {
  static u64 out[192 * 48], shared[8], global[8];
  for (u32 tid = 0; tid < 192; tid++) all(tid, out + tid * 48, shared, global);
  for (u32 i = 0; i < sizeof(out); i++) putchar(((u8 *)out)[i]);
}
"#;

/// What the host computes.
fn expected() -> Vec<u64> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (source, program) = (dir.path().join("host.cpp"), dir.path().join("host"));
    std::fs::write(&source, format!("{HOST}{FUNCTIONS}{MAIN}")).expect("the source is written");
    // Divisions of nothing by nothing aside, the host's arithmetic is that of the target: no contraction.
    let compile = crate::common::clang()
        .args(["-std=c++20", "-O1", "-ffp-contract=off", "-w", "-x", "c++"])
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .output()
        .expect("clang runs");
    assert!(compile.status.success(), "{}", String::from_utf8_lossy(&compile.stderr));
    let output = Command::new(&program).output().expect("the program runs");
    let words = output.stdout.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect::<Vec<_>>();
    assert_eq!(words.len(), THREADS * RESULTS);
    words
}

/// The names of the results, by their first index.
fn part(i: usize) -> &'static str {
    match i {
        0..15 => "floats",
        15..30 => "integers",
        30..35 => "stack",
        35..40 => "calls",
        _ => "generic",
    }
}

#[test]
fn the_host_and_both_targets_agree_at_every_optimisation_level() {
    let want = expected();
    let source = format!("{DEVICE}{FUNCTIONS}{KERNELS}");
    for cpu in ["gfx942", "gfx950"] {
        for level in ["-O0", "-O1", "-O2", "-O3"] {
            let image = hip_with(cpu, level, &source, &["-ffp-contract=off", "-w"]);
            let rig = Rig::new(options(cpu), &image);
            let out = rig.upload("out", &vec![0u64; THREADS * RESULTS]);
            let global = rig.upload("global", &[0u64; 8 * THREADS]);
            let run = rig.launch("run", (THREADS / 64) as u32, 64, &Args::new().push(out).push(global));
            run.unwrap_or_else(|fault| panic!("{cpu} {level}: {fault}"));
            let got: Vec<u64> = rig.download(out, THREADS * RESULTS);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let (thread, n) = (i / RESULTS, i % RESULTS);
                assert_eq!(got, want, "{cpu} {level} thread {thread} result {n} ({})", part(n));
            }
            atomics(&rig, &format!("{cpu} {level}"));
        }
    }
}

fn atomics(rig: &Rig, what: &str) {
    let mut cells = vec![0u64; 64];
    for base in [0, 8] {
        cells[base + 1] = 0xFFFF_FFFF; // 32-bit words 2 and 3: the cells of `and` and `xor`
        cells[base + 2] = u64::from(u32::MAX) << 32; // the cell of `min`
    }
    cells[8 + 2] = 0x7FFF_FFFF << 32;
    for base in [16, 24] {
        cells[base + 2] = u64::MAX;
        cells[base + 5] = if base == 16 { u64::MAX } else { i64::MAX as u64 };
    }
    let (pc, own) = (rig.upload("cells", &cells), rig.upload("own", &vec![9u64; 4 * THREADS]));
    let tickets = rig.upload("tickets", &vec![0u64; THREADS]);
    let args = Args::new().push(pc).push(own).push(tickets);
    rig.launch("atomics", (THREADS / 64) as u32, 64, &args).unwrap_or_else(|fault| panic!("{what}: {fault}"));
    let n = THREADS as u64;
    let products = || (0..n as u32).map(|tid| tid.wrapping_mul(2_654_435_761));
    let xor = (0..n).fold(0, |x, tid| x ^ tid * 77);
    let got: Vec<u64> = rig.download(pc, 64);
    let word = |i: usize| got[i / 2] >> (32 * (i % 2)) & 0xFFFF_FFFF;
    let max = u64::from(products().max().unwrap_or(0));
    let signed_max = products().map(|x| x as i32).max().unwrap_or(0);
    let signed_min = products().map(|x| x as i32).min().unwrap_or(0);
    // Unsigned 32 bits, signed 32 bits, unsigned and signed 64 bits; the products are 32-bit numbers everywhere.
    assert_eq!([0, 1, 2, 3, 4, 5].map(word), [n * (n + 1) / 2, 0xFFFF_FFFF, 0, xor, max, 0], "{what}");
    let signed = [n * (n + 1) / 2, 0xFFFF_FFFF, 0, xor, signed_max as u32 as u64, signed_min as u32 as u64];
    assert_eq!([16, 17, 18, 19, 20, 21].map(word), signed, "{what}");
    for base in [16, 24] {
        let want = [n * (n + 1) / 2, 0xFFFF_FFFF, !0xFFFF_FFFF, xor, max, 0];
        assert_eq!(got[base..base + 6], want, "{what}");
    }
    assert_eq!(
        (f32::from_bits(got[32] as u32), f64::from_bits(got[33])),
        (n as f32, n as f64 / 2.0),
        "{what}"
    );
    let extremes = (f32::from_bits(got[34] as u32), f64::from_bits(got[35]));
    assert_eq!(extremes, ((n - 1) as f32, -((n - 1) as f64)), "{what}");
    assert!(rig.download::<u64>(tickets, THREADS).iter().all(|t| *t == 111), "{what}");
    let own: Vec<u64> = rig.download(own, 4 * THREADS);
    for (tid, own) in own.chunks(4).enumerate() {
        let tid = tid as u64;
        let h = ((9 * 7 + tid + 5) * 7 + 9) * 7 + tid;
        assert_eq!(own, [tid + 8, tid.max(50), h, h + tid.max(50)], "{what} thread {tid}");
    }
}
