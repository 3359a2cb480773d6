//! Barriers that do not open for all, and waits without end.

use super::common::Args;
use super::{at_line, report, watched};
use hk_emu::{Check, Checks, Fault};

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
