//! Barriers that do not open for all, and waits without end.

use super::{at_line, report, watched};
use crate::common::{Args, Rig, hip, options};
use hk_emu::{Check, Checks, Fault, Near};

/// Two waves half a step apart: each computes while the other loads. The barriers of a step are at different
/// instructions.
const PING_PONG: &str = r#"
KERNEL void pingpong(u32* out) {
    __shared__ u32 a[128];
    u32 wave = __builtin_amdgcn_readfirstlane(TID / 64), sum = 0;
    if (wave == 1) BARRIER();
    for (u32 i = 0; i < 4; i++) {
        a[TID] = i * TID;
        BARRIER();
        sum += a[TID ^ 1];
        BARRIER();
    }
    if (wave == 0) BARRIER(); // last
    a[TID] = sum;
    BARRIER(); // end
    out[TID] = a[127 - TID];
}
"#;

fn ping_pong(checks: impl Into<Checks>, source: &str) -> Result<Vec<u32>, Fault> {
    let rig = watched("gfx942", checks, source);
    let out = rig.upload("out", &[0u32; 128]);
    rig.launch("pingpong", 1, 128, &Args::new().push(out))?;
    Ok(rig.download(out, 128))
}

#[test]
fn waves_may_wait_at_different_barriers() {
    let want: Vec<u32> = (0..128).map(|t| 6 * ((127 - t) ^ 1)).collect();
    assert_eq!(ping_pong(Checks::from(Check::Lds) | Check::Barriers, PING_PONG).expect("clean"), want);
}

#[test]
fn a_wave_that_ends_before_a_barrier() {
    let source = PING_PONG.replace("if (wave == 0) BARRIER(); // last", "");
    let found = report(ping_pong(Check::Barriers, &source));
    assert_eq!(found.check, Check::Barriers);
    assert!(found.what.contains("barrier 10 of the workgroup, which wave 0 never reaches"), "{}", found.what);
    assert_eq!((found.site.wave, found.site.instruction.as_str()), (1, "s_barrier"));
    at_line(&found.site, &source, "// end");
    let other = found.other.expect("another side");
    assert_eq!((other.wave, other.instruction.as_str()), (0, "s_endpgm"));
}

#[test]
fn a_barrier_in_divergent_code() {
    let source = "
KERNEL void diverge(u32* out, u32 n) {
    if (TID < n) {
        __builtin_amdgcn_s_barrier(); // barrier
        out[TID] = n;
    }
}
";
    let launch = |n: u32| {
        let rig = watched("gfx950", Check::Barriers, source);
        let out = rig.upload("out", &[0u32; 128]);
        rig.launch("diverge", 1, 100, &Args::new().push(out).push(n))
    };
    // The last wave has 36 lanes.
    launch(100).expect("clean");
    let found = report(launch(90));
    assert_eq!((found.check, found.lane, found.site.wave), (Check::Barriers, Some(26), 1));
    assert!(found.what.contains("10 of the wave's 36 lanes"), "{}", found.what);
    at_line(&found.site, source, "// barrier");
}

/// Runs a kernel of (flags, their number) on machines with one host thread and with several, unwatched.
fn waits(source: &str, kernel: &str, grid: u32) -> Vec<Result<(), Fault>> {
    let run = |threads| {
        let options = options("gfx942").threads(Some(threads));
        let rig = Rig::new(options, &hip("gfx942", "-O3", source));
        let flags = rig.upload("flags", &vec![0u32; grid as usize + 1]);
        rig.launch(kernel, grid, 64, &Args::new().push(flags).push(grid)).map(drop)
    };
    [1, 2].map(run).into()
}

const NEIGHBOURS: &str = "
KERNEL void neighbours(u32* flag, u32 n) {
    u32 next = BID + 1;
    if (next < n) while (__hip_atomic_load(&flag[next], __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT) == 0) {} // wait
    if (TID == 0) __hip_atomic_store(&flag[BID], 1u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
";

#[test]
fn a_wait_for_a_flag_that_nobody_sets() {
    for outcome in waits(NEIGHBOURS, "neighbours", 3) {
        outcome.expect("the last workgroup starts a chain");
    }
    let source = NEIGHBOURS.replace("next < n", "next <= n");
    for outcome in waits(&source, "neighbours", 3) {
        let found = report(outcome);
        assert_eq!((found.check, found.site.workgroup), (Check::Barriers, [0, 0, 0]));
        assert!(found.what.contains("deadlock"), "{}", found.what);
        at_line(&found.site, &source, "// wait");
        assert!(found.site.instruction.starts_with("global_load_dword"), "{}", found.site.instruction);
        let Some(Near::Allocation { label, offset: 4, .. }) = found.near else { panic!() };
        assert_eq!(label, "flags");
    }
}

#[test]
fn a_lock_that_is_never_released() {
    let source = "
KERNEL void lock(u32* flag, u32 n) {
    if (TID != 0) return;
    u32 free;
    do {
        free = 0;
    } while (!__hip_atomic_compare_exchange_strong(flag, &free, 1u, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)); // take
    flag[1] += n;
    __hip_atomic_store(flag, 0u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT); // give
}
";
    for outcome in waits(source, "lock", 3) {
        outcome.expect("each takes it in turn");
    }
    let source = source.replace("flag, 0u, __ATOMIC_RELEASE", "flag, 1u, __ATOMIC_RELEASE");
    for outcome in waits(&source, "lock", 3) {
        let found = report(outcome);
        at_line(&found.site, &source, "// take");
        assert!(found.site.instruction.starts_with("global_atomic_cmpswap"), "{}", found.site.instruction);
        assert_eq!(found.lane, Some(0));
    }
}

/// Every workgroup waits for all, with so much LDS that a compute unit holds one.
#[test]
fn more_workgroups_than_the_gpu_holds() {
    let source = "
KERNEL void grid(u32* count, u32 n) {
    __shared__ u32 much[16000];
    much[TID] = n;
    if (TID == 0) __hip_atomic_fetch_add(count, 1u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
    while (__hip_atomic_load(count, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT) != n) __builtin_amdgcn_s_sleep(1); // all
    count[1 + BID] = much[63 - TID];
}
";
    for outcome in waits(source, "grid", 304) {
        outcome.expect("all fit");
    }
    for outcome in waits(source, "grid", 305) {
        let found = report(outcome);
        at_line(&found.site, source, "// all");
        assert!(found.what.contains("305 workgroups, and the GPU holds 304"), "{}", found.what);
        assert!(found.what.contains("1 on each of 304"), "{}", found.what);
    }
}

#[test]
fn a_fault_is_not_hidden_by_who_waits_for_it() {
    let source = NEIGHBOURS.replace("if (TID == 0)", "if (BID == 2) flag += 1 << 20;\n    if (TID == 0)");
    for outcome in waits(&source, "neighbours", 3) {
        let fault = outcome.expect_err("a wild store");
        assert!(matches!(&fault, Fault::Memory { site, .. } if site.workgroup == [2, 0, 0]), "{fault}");
    }
}
