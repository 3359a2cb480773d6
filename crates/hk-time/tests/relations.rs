//! What holds whatever the constants are: more work takes longer, units that are shared are shared.

use hk_emu::Dispatch;
use hk_time::constants::{C, Values};
use hk_time::cu::UNITS;
use hk_time::model::{Buffer, Options, Prediction, Traced, trace};
use hk_time::parts::Part;

use crate::common::{Args, Assembly, Rig, assemble, options};

/// A kernel: s[4:5] is a buffer, v1 is 16 times the lane, v6 4 times; s2 the workgroup.
#[derive(Clone)]
struct Kernel {
    part: &'static str,
    body: String,
    grid: u32,
    block: u32,
    bytes: u64,
    warm: bool,
    uneven: bool,
}

impl Kernel {
    fn new(body: impl Into<String>) -> Kernel {
        Kernel {
            part: "mi325x",
            body: body.into(),
            grid: 1,
            block: 64,
            bytes: 1 << 20,
            warm: true,
            uneven: false,
        }
    }

    fn traced(&self, exact: bool) -> Traced {
        let part = Part::named(self.part).expect("a part");
        let body = format!(
            "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v1, 4, v0
  v_lshlrev_b32 v6, 2, v0
  s_mov_b32 s6, 0
  s_waitcnt lgkmcnt(0)
{}
  s_waitcnt vmcnt(0) lgkmcnt(0)",
            self.body
        );
        let cpu = part.arch.to_string();
        let image = assemble(&Assembly { cpu: &cpu, body: &body, lds: 32768, ..Assembly::default() });
        let rig = Rig::new(options(&cpu), &image);
        let base = rig.machine.alloc_zeroed(self.bytes, 4096, "data").expect("memory");
        let args = Args::new().push(base);
        let dispatch =
            Dispatch { grid: [self.grid, 1, 1], block: [self.block, 1, 1], dynamic_lds: 0, args: &args.0 };
        let buffers = [Buffer { base, bytes: self.bytes }];
        let options = Options { warm: self.warm, exact, uneven: self.uneven, ..Options::default() };
        trace(part, &rig.machine, &rig.module, "test", &dispatch, &buffers, options).expect("traces")
    }

    fn time(&self) -> Prediction {
        self.traced(false).time(Values::fitted())
    }

    /// Clocks of the run, without the launch.
    fn clocks(&self) -> f64 {
        let p = self.time();
        (p.us - Values::fitted().get(C::Launch)) * p.mhz
    }
}

/// Clocks of each of `body`, from two numbers of repetitions.
fn each(prologue: &str, body: &str) -> f64 {
    let clocks = |n: usize| Kernel::new(format!("{prologue}\n{}", format!("  {body}\n").repeat(n))).clocks();
    (clocks(192) - clocks(64)) / 128.0
}

/// The end of a loop is outside of the shadow of its last instruction.
const LOOP_CLOCKS: f64 = 32.0;

fn near(got: f64, want: f64, within: f64) {
    assert!((got - want).abs() <= within, "{got} clocks, expected {want}");
}

/// Time without that of the instruction fetch, which a straight line of code pays for each line.
fn fetch(instruction_bytes: f64) -> f64 {
    let values = Values::fitted();
    let mhz = Part::named("mi325x").expect("a part").clock_mhz(values);
    instruction_bytes / 64.0 * values.get(C::FetchMiss) * mhz / 1000.0
}

/// A loop of `n` iterations.
fn repeat(n: usize, body: &str) -> String {
    format!(".Lagain:\n{body}\n  s_add_u32 s6, s6, 1\n  s_cmp_lt_u32 s6, {n}\n  s_cbranch_scc1 .Lagain")
}

/// Clocks of an iteration of a loop.
fn iteration(body: &str) -> f64 {
    (Kernel::new(repeat(40, body)).clocks() - Kernel::new(repeat(20, body)).clocks()) / 20.0
}

#[test]
fn matrix_instructions_take_their_passes_and_chains_their_latency() {
    let chain = "  v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], v[8:11]\n".repeat(32);
    let independent: String = (0..32)
        .map(|i| {
            format!(
                "  v_mfma_f32_16x16x16_f16 v[{0}:{1}], v[2:3], v[4:5], v[{0}:{1}]\n",
                8 + 4 * (i % 8),
                11 + 4 * (i % 8)
            )
        })
        .collect();
    // The result is an operand of the next product, not its sum.
    let dependent: String = (0..32)
        .map(|i| {
            let (d, s) = if i % 2 == 0 { (8, 12) } else { (12, 8) };
            format!(
                "  v_mfma_f32_16x16x16_f16 v[{d}:{}], v[{s}:{}], v[4:5], v[{d}:{}]\n",
                d + 3,
                s + 1,
                d + 3
            )
        })
        .collect();
    let (chain, independent, dependent) = (iteration(&chain), iteration(&independent), iteration(&dependent));
    near(chain, 32.0 * 16.0, LOOP_CLOCKS);
    near(independent, 32.0 * 16.0, LOOP_CLOCKS);
    near(dependent, 32.0 * (16.0 + Values::fitted().get(C::MatrixLatency)), LOOP_CLOCKS);
}

#[test]
fn vector_instructions_hide_behind_matrix_instructions_and_slow_ones_do_not() {
    let matrix = "  v_mfma_f32_32x32x8_f16 v[32:47], v[2:3], v[4:5], v[32:47]\n";
    let plain = format!("{matrix}  v_add_f32 v20, v21, v22\n  v_add_f32 v23, v24, v25\n").repeat(16);
    let slow = format!("{matrix}  v_exp_f32 v20, v21\n  v_exp_f32 v23, v24\n").repeat(16);
    let matrix = matrix.repeat(16);
    let (matrix, plain, slow) = (iteration(&matrix), iteration(&plain), iteration(&slow));
    near(plain, matrix, LOOP_CLOCKS);
    near(slow, matrix + 16.0 * 32.0, LOOP_CLOCKS);
}

#[test]
fn bank_conflicts_cost_their_phases() {
    let free = "  ds_read_b32 v8, v6\n".repeat(16);
    let conflict = format!("  v_lshlrev_b32 v7, 7, v0\n{}", "  ds_read_b32 v8, v7\n".repeat(16));
    let (free, conflict) = (iteration(&free), iteration(&conflict));
    // All lanes on one bank: 64 dwords against 2 phases.
    near(conflict, 16.0 * 64.0, 200.0);
    assert!(free < 16.0 * 8.0 + 200.0 && free * 4.0 < conflict, "{free} {conflict}");
}

#[test]
fn strided_loads_are_not_faster_than_contiguous_ones() {
    let load = |shift: u32, step: u32| {
        let body = "  v_add_u32 v7, v7, v9\n  global_load_dword v8, v7, s[4:5]\n  s_waitcnt vmcnt(8)";
        format!("  v_lshlrev_b32 v7, {shift}, v0\n  v_mov_b32 v9, {step}\n{}", repeat(32, body))
    };
    let clocks = |shift, step| Kernel { warm: false, ..Kernel::new(load(shift, step)) }.clocks();
    let (contiguous, strided) = (clocks(2, 256), clocks(7, 8192));
    assert!(strided > 1.5 * contiguous, "{strided} {contiguous}");
}

/// Clocks for which HBM is busy.
fn hbm(kernel: &Kernel) -> f64 {
    let at = UNITS.iter().position(|unit| *unit == "HBM").expect("a unit");
    kernel.time().busy[at] * kernel.clocks()
}

#[test]
fn stores_that_fill_lines_together_write_them_once() {
    let whole = "  global_store_dwordx4 v1, v[8:11], s[4:5]\n".repeat(16);
    let halves =
        "  global_store_dwordx2 v1, v[8:9], s[4:5]\n  global_store_dwordx2 v1, v[10:11], s[4:5] offset:8\n";
    let (whole, halves) = (Kernel::new(whole), Kernel::new(halves.repeat(16)));
    near(hbm(&halves), hbm(&whole), 0.01 * hbm(&whole));
}

#[test]
fn lines_that_l1_has_evicted_come_from_l2() {
    // 64 KiB, twice what L1 holds, once and four times.
    let pass = |n: usize| {
        let loads: String =
            (0..64).map(|_| "  global_load_dwordx4 v[8:11], v7, s[4:5]\n  v_add_u32 v7, v7, v9\n").collect();
        Kernel {
            warm: false,
            ..Kernel::new(format!(
                "  v_mov_b32 v9, 1024\n{}",
                format!("  v_mov_b32 v7, v1\n{loads}").repeat(n)
            ))
        }
    };
    let (once, often) = (pass(1), pass(4));
    near(hbm(&often), hbm(&once), 0.01 * hbm(&once));
    assert!(often.clocks() > 1.5 * once.clocks(), "{} {}", often.clocks(), once.clocks());
}

#[test]
fn more_work_is_never_faster() {
    let body = "  v_add_u32 v7, v7, v9\n  global_load_dwordx4 v[16:19], v7, s[4:5]\n  s_waitcnt vmcnt(2)\n  ds_write_b128 v1, v[16:19]";
    let mut last = 0.0;
    for n in [1, 4, 9, 17, 33, 65, 129] {
        let us =
            Kernel::new(format!("  v_mov_b32 v7, v1\n  v_mov_b32 v9, 1024\n{}", repeat(n, body))).time().us;
        assert!(us >= last, "{n} iterations: {us} after {last}");
        last = us;
    }
    last = 0.0;
    for grid in [1, 8, 100, 304, 305, 608, 2000] {
        let us = Kernel {
            grid,
            ..Kernel::new(repeat(20, "  global_load_dwordx4 v[8:11], v1, s[4:5]\n  s_waitcnt vmcnt(0)"))
        }
        .time()
        .us;
        assert!(us >= last * 0.999, "{grid} workgroups: {us} after {last}");
        last = us;
    }
}

#[test]
fn loops_that_are_cut_take_what_all_of_their_iterations_take() {
    let body = "  v_add_u32 v7, v7, v9\n  global_load_dwordx4 v[16:19], v7, s[4:5]\n  s_waitcnt vmcnt(1)\n  ds_write_b128 v1, v[16:19]\n  s_barrier";
    let kernel = Kernel {
        block: 256,
        warm: false,
        ..Kernel::new(format!("  v_mov_b32 v7, v1\n  v_mov_b32 v9, 4096\n{}", repeat(150, body)))
    };
    let (cut, exact) =
        (kernel.traced(false).time(Values::fitted()), kernel.traced(true).time(Values::fitted()));
    assert!((cut.us / exact.us - 1.0).abs() < 0.02, "{} {}", cut.us, exact.us);
    for (unit, (a, b)) in UNITS.iter().zip(cut.busy.iter().zip(exact.busy)) {
        assert!((a - b).abs() < 0.03, "{unit}: {a} {b}");
    }
}

#[test]
fn more_waves_hide_latency() {
    let body = "  v_add_u32 v7, v7, v9\n  global_load_dwordx4 v[16:19], v7, s[4:5]\n  s_waitcnt vmcnt(0)";
    let clocks = |block| {
        Kernel {
            block,
            ..Kernel::new(format!("  v_mov_b32 v7, v1\n  v_mov_b32 v9, 0\n{}", repeat(40, body)))
        }
        .clocks()
    };
    let (one, four) = (clocks(64), clocks(256));
    assert!(
        four < 1.5 * one,
        "four waves do four times the work in {four} clocks, one does its part in {one}"
    );
}

#[test]
fn waves_wait_for_scalars_that_another_has_asked_for() {
    let lines = (0..8).map(|i| format!("  s_load_dword s8, s[4:5], {}\n  s_waitcnt lgkmcnt(0)\n", 128 * i));
    let kernel = Kernel::new(lines.collect::<String>());
    let (one, two) = (kernel.clocks(), Kernel { block: 128, ..kernel }.clocks());
    assert!(two >= one, "the same lines take two waves {two} clocks, one {one}");
}

#[test]
fn a_prefetch_that_is_deleted_makes_a_loop_slower() {
    let work = "  v_mfma_f32_32x32x8_f16 v[32:47], v[2:3], v[4:5], v[32:47]\n".repeat(24);
    let prefetched = format!(
        "  v_add_u32 v7, v7, v9\n  s_waitcnt vmcnt(0)\n  global_load_dwordx4 v[16:19], v7, s[4:5]\n{work}"
    );
    let late = format!(
        "  v_add_u32 v7, v7, v9\n  global_load_dwordx4 v[16:19], v7, s[4:5]\n  s_waitcnt vmcnt(0)\n{work}"
    );
    let clocks = |body: &str| {
        Kernel {
            warm: false,
            ..Kernel::new(format!("  v_mov_b32 v7, v1\n  v_mov_b32 v9, 4096\n{}", repeat(40, body)))
        }
        .clocks()
    };
    let (prefetched, late) = (clocks(&prefetched), clocks(&late));
    assert!(late > 1.3 * prefetched, "{late} {prefetched}");
}

/// Workgroups that each read 32 KiB of their own.
fn stream() -> Kernel {
    let loads: String = (0..8).map(|i| format!("  global_load_dwordx4 v[{}:{}], v[12:13], off offset:0\n  v_add_co_u32 v12, vcc, v12, v9\n  v_addc_co_u32 v13, vcc, 0, v13, vcc\n", 16 + 4 * i, 19 + 4 * i)).collect();
    let body = format!(
        "  s_lshl_b32 s8, s2, 15
  s_add_u32 s4, s4, s8
  s_addc_u32 s5, s5, 0
  v_mov_b32 v9, 0x1000
  v_mov_b32 v13, s5
  v_add_co_u32 v12, vcc, s4, v1
  v_addc_co_u32 v13, vcc, 0, v13, vcc
{loads}"
    );
    Kernel { grid: 304 * 16, block: 256, bytes: 304 * 16 * 32768, warm: false, ..Kernel::new(body) }
}

#[test]
fn streams_approach_the_memory_rate_and_matrix_clocks_do_not_matter_to_them() {
    let kernel = stream();
    let traced = kernel.traced(false);
    let values = Values::fitted();
    let p = traced.time(values);
    let part = Part::named("mi325x").expect("a part");
    let rate = kernel.bytes as f64 / (p.us * 1e3) / (part.hbm.value * values.get(C::HbmGfx942));
    assert!(rate <= 1.0 && rate > 0.6, "{rate} of what HBM gives, bound by {}", p.bound);
    let index = C::DutyMi325x as usize;
    assert_eq!(traced.time(&values.with(index, 2000.0)).us, p.us);
}

#[test]
fn matrix_peaks_are_reached() {
    let mfma = |shape: &str, accumulator: &str, a: &str, b: &str, modes: &str| {
        format!("  v_mfma_{shape} v[{accumulator}], v[{a}], v[{b}], v[{accumulator}]{modes}\n")
    };
    let fp4 = " cbsz:4 blgp:4";
    for (part, body, flop, peak) in [
        ("mi325x", mfma("f32_32x32x8_f16", "32:47", "8:9", "10:11", ""), 32 * 32 * 8, 2048.0),
        ("mi325x", mfma("f32_32x32x16_fp8_fp8", "32:47", "8:9", "10:11", ""), 32 * 32 * 16, 4096.0),
        ("mi325x", mfma("i32_32x32x16_i8", "32:47", "8:9", "10:11", ""), 32 * 32 * 16, 4096.0),
        ("mi325x", mfma("f32_32x32x4_xf32", "32:47", "8:9", "10:11", ""), 32 * 32 * 4, 1024.0),
        ("mi325x", mfma("f64_16x16x4_f64", "32:39", "8:9", "10:11", ""), 16 * 16 * 4, 256.0),
        ("mi355x", mfma("f32_32x32x16_f16", "32:47", "8:11", "12:15", ""), 32 * 32 * 16, 4096.0),
        ("mi355x", mfma("f32_32x32x64_f8f6f4", "32:47", "8:15", "16:23", ""), 32 * 32 * 64, 8192.0),
        ("mi355x", mfma("f32_32x32x64_f8f6f4", "32:47", "8:11", "12:15", fp4), 32 * 32 * 64, 16384.0),
    ] {
        let clocks = |n| Kernel { part, block: 256, ..Kernel::new(repeat(n, &body.repeat(32))) }.clocks();
        let rate = f64::from(20 * 32 * 4 * 2 * flop) / (clocks(40) - clocks(20));
        // The end of the loop is in the shadow of its last instruction but for its own clocks.
        assert!(rate <= 1.001 * peak && rate > 0.97 * peak, "{part}, {body}: {rate} of {peak}");
    }
}

#[test]
fn a_swizzled_layout_beats_a_plain_one_by_its_phases() {
    for part in ["mi325x", "mi355x"] {
        // Rows of 256 bytes, a lane each; with the swizzle, the vector of a row moves with the row.
        let read = |swizzle: &str| {
            let body = format!(
                "  v_and_b32 v7, 63, v0\n  v_lshlrev_b32 v8, 8, v7\n{swizzle}  v_and_b32 v8, 0x3fff, v8\n{}",
                repeat(40, &"  ds_read_b128 v[16:19], v8\n".repeat(16))
            );
            Kernel { part, ..Kernel::new(body) }.clocks()
        };
        let plain = read("");
        let swizzled = read("  v_and_b32 v7, 15, v7\n  v_lshlrev_b32 v7, 4, v7\n  v_or_b32 v8, v8, v7\n");
        // 8 lanes of a phase on gfx942 and 16 on gfx950 are on the same banks, or each on its own.
        let phases = if part == "mi325x" { 8.0 } else { 16.0 };
        assert!(plain / swizzled > 0.3 * phases && plain / swizzled <= phases, "{part}: {plain} {swizzled}");
    }
}

#[test]
fn waves_hide_the_pauses_of_others() {
    let body = "  v_exp_f32 v20, v21\n  s_nop 15\n  s_nop 15\n".repeat(8);
    let clocks = |waves: u32| Kernel { block: 64 * waves, ..Kernel::new(repeat(40, &body)) }.clocks();
    let [one, four, eight, sixteen] = [1, 4, 8, 16].map(clocks);
    // Each SIMD has one wave, then two that fit between the pauses, then four.
    assert!(four < 1.1 * one && eight < 1.3 * one, "{one} {four} {eight}");
    assert!(sixteen >= eight, "{eight} {sixteen}");
}

#[test]
fn the_same_launch_takes_the_same_time() {
    let kernel = stream();
    let [a, b] = [0, 1].map(|_| kernel.traced(false).time(Values::fitted()));
    assert_eq!(a, b);
}

#[test]
fn straight_code_pays_for_its_fetch() {
    let got = each("", "v_add_f32 v20, v21, v22");
    near(got, 4.0 + fetch(4.0), 0.1);
}

#[test]
fn a_kernel_for_another_target_is_refused() {
    let image = assemble(&Assembly { cpu: "gfx950", body: "", ..Assembly::default() });
    let rig = Rig::new(options("gfx950"), &image);
    let args = Args::new().push(0u64);
    let dispatch = Dispatch { grid: [1; 3], block: [64, 1, 1], dynamic_lds: 0, args: &args.0 };
    let part = Part::named("mi325x").expect("a part");
    let error = trace(part, &rig.machine, &rig.module, "test", &dispatch, &[], Options::default())
        .map(|_| ())
        .expect_err("refused");
    assert_eq!(error.to_string(), "the part mi325x runs gfx942, the code object is for gfx950");
}

/// How workgroups learn that all have arrived.
#[derive(Clone, Copy)]
enum Arrival {
    Counter,
    Flags,
}

/// Workgroups that store 4 KiB each; the last of `n` to arrive reads what all have stored, if it `merges`.
fn meeting(arrival: Arrival, n: u32, merges: bool) -> Kernel {
    let one_lane = "  s_mov_b64 s[10:11], exec\n  s_mov_b64 exec, 1\n";
    let counted = format!(
        "{one_lane}  v_mov_b32 v12, 0
  v_mov_b32 v13, 1
  global_atomic_add v14, v12, v13, s[4:5] sc0 sc1
  s_waitcnt vmcnt(0)
  v_readfirstlane_b32 s9, v14
  s_mov_b64 exec, s[10:11]
  s_cmp_lg_u32 s9, {}",
        n - 1
    );
    let flagged = format!(
        "{one_lane}  v_mov_b32 v12, s2
  v_lshlrev_b32 v12, 3, v12
  v_mov_b32 v14, 0x12345678
  v_mov_b32 v15, 0x9abcdef0
  global_atomic_swap_x2 v12, v[14:15], s[4:5] sc1
  s_waitcnt vmcnt(0)
  s_mov_b64 exec, {}
  v_mov_b32 v14, 0x12345678
  v_lshlrev_b32 v12, 3, v0
  global_load_dwordx2 v[16:17], v12, s[4:5] sc1
  s_waitcnt vmcnt(0)
  v_cmp_ne_u32 vcc, v16, v14
  s_mov_b64 exec, s[10:11]
  s_cmp_lg_u64 vcc, 0",
        (1_u64 << n) - 1
    );
    let arrived = if matches!(arrival, Arrival::Counter) { counted } else { flagged };
    let read = "  global_load_dwordx4 v[16:19], v7, s[4:5]
  global_load_dwordx4 v[20:23], v7, s[4:5] offset:1024
  global_load_dwordx4 v[24:27], v7, s[4:5] offset:2048
  global_load_dwordx4 v[28:31], v7, s[4:5] offset:3072
  v_add_u32 v7, 0x1000, v7
";
    let merge = if merges { read.repeat(n as usize) } else { "  s_nop 0\n".into() };
    let body = format!(
        "  s_lshl_b32 s8, s2, 12
  s_add_u32 s8, s8, 0x1000
  v_add_u32 v7, s8, v1
  global_store_dwordx4 v7, v[8:11], s[4:5]
  global_store_dwordx4 v7, v[8:11], s[4:5] offset:1024
  global_store_dwordx4 v7, v[8:11], s[4:5] offset:2048
  global_store_dwordx4 v7, v[8:11], s[4:5] offset:3072
  buffer_wbl2 sc1
  s_waitcnt vmcnt(0)
{arrived}
  s_cbranch_scc1 .Lmerged
  buffer_inv sc1
  v_add_u32 v7, 0x1000, v1
{merge}.Lmerged:"
    );
    Kernel { grid: n, uneven: true, ..Kernel::new(body) }
}

#[test]
fn the_last_workgroup_to_arrive_takes_the_time_of_its_merge() {
    for arrival in [Arrival::Counter, Arrival::Flags] {
        let mut last = 0.0;
        for n in [2, 3, 8, 20] {
            let (merges, ends) = (meeting(arrival, n, true), meeting(arrival, n, false));
            let sampled = merges.traced(false).sampled;
            assert_eq!(sampled, meeting(arrival, n, false).traced(false).sampled, "both meet");
            let (merged, ended) = (merges.clocks(), ends.clocks());
            // A round trip to memory, at least.
            assert!(merged > ended + 500.0, "{n}: {merged} and {ended} clocks");
            assert!(merged > last, "{n}: {merged} clocks after {last}");
            last = merged;
        }
    }
}

#[test]
fn counters_of_work_meet_nobody() {
    // Each value of the counter is as much work.
    let body = "  s_mov_b64 s[10:11], exec
  s_mov_b64 exec, 1
  v_mov_b32 v12, 0
  v_mov_b32 v13, 1
  global_atomic_add v14, v12, v13, s[4:5] sc0
  s_waitcnt vmcnt(0)
  v_readfirstlane_b32 s9, v14
  s_mov_b64 exec, s[10:11]
.Lagain:
  s_add_u32 s6, s6, 1
  s_cmp_le_u32 s6, s9
  s_cbranch_scc1 .Lagain";
    let kernel = Kernel { grid: 16, uneven: true, ..Kernel::new(body) };
    let alone = Kernel { grid: 16, uneven: true, ..Kernel::new("  s_nop 0") };
    assert_eq!(kernel.traced(false).sampled, alone.traced(false).sampled);
}
