//! Modelled time: the clocks that kernels read, and the order of waves that follows from them.

use hk_emu::{Check, MachineOptions};

use crate::common::{Args, Assembly, Rig, assemble, hip, options};

const TARGETS: [&str; 2] = ["gfx942", "gfx950"];

/// `s_sleep n` takes 64 n clocks and its issue; the constant counter runs at 100 MHz of the same time.
#[test]
fn sleeps_take_the_clocks_that_the_manual_says() {
    for (cpu, mhz) in [("gfx942", 2100), ("gfx950", 2200)] {
        let body = "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_memtime s[8:9]
  s_memrealtime s[12:13]
  s_mov_b32 s6, 100
.Lsleep:
  s_sleep 10
  s_sub_u32 s6, s6, 1
  s_cmp_lg_u32 s6, 0
  s_cbranch_scc1 .Lsleep
  s_memtime s[10:11]
  s_memrealtime s[14:15]
  s_waitcnt lgkmcnt(0)
  s_store_dwordx4 s[8:11], s[4:5], 0x0
  s_store_dwordx4 s[12:15], s[4:5], 0x10";
        let rig = Rig::new(options(cpu), &assemble(&Assembly { cpu, body, ..Assembly::default() }));
        let out = rig.upload("out", &[0u64; 4]);
        let mut before = 0;
        for _ in 0..3 {
            rig.launch("test", 1, 64, &Args::new().push(out)).unwrap();
            let [clock, later, real, later_real] = rig.download::<u64>(out, 4).try_into().unwrap();
            // Four instructions of four clocks an iteration, one of which sleeps; three outside of the loop.
            assert_eq!(later - clock, 3 * 4 + 100 * (640 + 16), "{cpu}");
            assert!((later_real - real).abs_diff((later - clock) * 100 / mhz) <= 1, "{cpu}");
            assert!(clock > before, "{cpu}: a launch begins after the end of the last one");
            before = later;
        }
    }
}

/// A loop that polls the constant counter ends, however slowly its value changes, and is no deadlock.
#[test]
fn polling_the_clock_is_not_a_deadlock() {
    let source = r#"
      __device__ u64 ms() { return __builtin_readsteadycounter() / 100000; }
      KERNEL void delay(u64 *out, u64 t) { u64 start = ms(); while (ms() - start < t) {} out[BID] = ms() - start; }
      KERNEL void sleep(u64 *out, u64 t) {
        u64 start = ms();
        while (ms() - start < t) __builtin_amdgcn_s_sleep(10);
        out[BID] = ms() - start;
      }"#;
    for cpu in TARGETS {
        let rig = Rig::new(options(cpu), &hip(cpu, "-O3", source));
        let out = rig.upload("out", &[0u64; 3]);
        // Minutes of modelled time would take days: a wave that only waits skips ahead.
        for (kernel, t) in [("delay", 5u64), ("sleep", 50), ("delay", 1 << 20), ("sleep", 1 << 20)] {
            rig.launch(kernel, 3, 1, &Args::new().push(out).push(t)).unwrap();
            let waited = rig.download::<u64>(out, 3);
            assert!(waited.iter().all(|ms| (t..=t + t / 64).contains(ms)), "{cpu} {kernel}: {waited:?}");
        }
    }
}

/// Waves that leave a barrier leave it at the same time.
#[test]
fn a_barrier_ends_when_the_last_wave_arrives() {
    let source = r#"
      KERNEL void meet(u64 *out) {
        u64 start = __builtin_readcyclecounter();
        for (u32 i = 0; i < TID / 64; i++) __builtin_amdgcn_s_sleep(100);
        BARRIER();
        out[TID / 64] = __builtin_readcyclecounter() - start;
      }"#;
    let rig = Rig::new(options("gfx942"), &hip("gfx942", "-O3", source));
    let out = rig.upload("out", &[0u64; 4]);
    rig.launch("meet", 1, 256, &Args::new().push(out)).unwrap();
    let clocks = rig.download::<u64>(out, 4);
    assert!(clocks.iter().all(|c| (3 * 6400..3 * 6400 + 500).contains(c)), "{clocks:?}");
    assert!(clocks.iter().max().unwrap() - clocks.iter().min().unwrap() < 64, "{clocks:?}");
}

/// Draws LDS tickets: four for each of four waves, 32 clocks apart.
fn tickets(options: MachineOptions) -> Vec<u32> {
    let source = r#"
      KERNEL void draw(u32 *out) {
        __shared__ u32 next;
        if (TID == 0) next = 0;
        BARRIER();
        if (TID % 64 == 0)
          for (u32 i = 0; i < 4; i++) {
            asm volatile("s_nop 7");
            out[TID / 64 * 4 + i] = __hip_atomic_fetch_add(&next, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
          }
      }"#;
    let rig = Rig::new(options, &hip("gfx942", "-O3", source));
    let out = rig.upload("out", &[0u32; 16]);
    rig.launch("draw", 1, 256, &Args::new().push(out)).unwrap();
    rig.download(out, 16)
}

#[test]
fn waves_advance_in_step_unless_races_are_looked_for() {
    // Of a wave's four tickets, the round in which each was drawn.
    let rounds =
        |options| tickets(options).chunks(4).map(|wave| wave.iter().map(|n| n / 4).collect()).collect();
    let (in_step, one_by_one) = ([0, 1, 2, 3], |wave| [wave; 4]);
    let strict: Vec<Vec<u32>> = rounds(options("gfx942").skew(Some(0)));
    assert_eq!(strict, [in_step; 4]);
    let default: Vec<Vec<u32>> = rounds(options("gfx942"));
    assert_eq!(default, strict);
    let racing: Vec<Vec<u32>> = rounds(options("gfx942").sanitize(Check::Lds.into()));
    assert_eq!(racing, [0, 1, 2, 3].map(one_by_one));
    let both: Vec<Vec<u32>> = rounds(options("gfx942").sanitize(Check::Lds.into()).skew(Some(0)));
    assert_eq!(both, strict);
    assert_eq!(rounds(options("gfx942").sanitize(Check::Uninit.into())), default);
}

/// The order of waves is that of the cost table: 16 exponentials take longer than 40 additions on gfx942, not on gfx950.
#[test]
fn waves_arrive_by_the_costs_of_their_instructions() {
    for (cpu, first) in [("gfx942", 1), ("gfx950", 0)] {
        let body = format!(
            "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshrrev_b32 v1, 6, v0
  v_readfirstlane_b32 s6, v1
  v_mov_b32 v2, 0
  v_mov_b32 v3, 1
  s_mov_b32 m0, -1
  s_cmp_eq_u32 s6, 0
  s_cbranch_scc1 .Lfirst
{adds}
  s_branch .Ldraw
.Lfirst:
{exps}
.Ldraw:
  s_mov_b64 exec, 1
  ds_add_rtn_u32 v4, v2, v3
  v_lshlrev_b32 v1, 2, v1
  s_waitcnt lgkmcnt(0)
  global_store_dword v1, v4, s[4:5]",
            adds = "  v_add_f32 v5, v6, v7\n".repeat(40),
            exps = "  v_exp_f32 v5, v6\n".repeat(16),
        );
        let image = assemble(&Assembly { cpu, body: &body, lds: 4, ..Assembly::default() });
        let rig = Rig::new(options(cpu).skew(Some(0)), &image);
        let out = rig.upload("out", &[0u32; 2]);
        rig.launch("test", 1, 128, &Args::new().push(out)).unwrap();
        let drawn = rig.download::<u32>(out, 2);
        assert_eq!(drawn.iter().position(|n| *n == drawn[0].min(drawn[1])), Some(first), "{cpu}: {drawn:?}");
    }
}
