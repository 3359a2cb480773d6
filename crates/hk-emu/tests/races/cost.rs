//! What the checks cost. Meant for a build with optimisation, on an idle host:
//! `cargo test --release -p hk-emu --test races cost -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use super::common::{Args, Rig, hip, options};
use hk_emu::{Check, Checks};

/// Transposes tiles in LDS, over and over.
const LDS: &str = "
KERNEL void work(u32* in, u32* out, u32 n) {
    __shared__ u32 tile[32 * 33];
    u32 row = TID / 32, column = TID % 32;
    u32 x[4];
    for (u32 i = 0; i < 4; i++) x[i] = in[1024 * BID + TID + 256 * i];
    for (u32 k = 0; k < n; k++) {
        for (u32 i = 0; i < 4; i++) tile[(row + 8 * i) * 33 + column] = x[i];
        BARRIER();
        for (u32 i = 0; i < 4; i++) x[i] = tile[column * 33 + row + 8 * i] * 3 + k;
        BARRIER();
    }
    for (u32 i = 0; i < 4; i++) out[1024 * BID + TID + 256 * i] = x[i];
}
";

/// Adds rows, 16 bytes a lane.
const GLOBAL: &str = "
typedef u32 u32x4 __attribute__((ext_vector_type(4)));
KERNEL void work(u32* in, u32* out, u32 n) {
    u32x4* x = (u32x4*)in + 256 * BID + TID;
    u32x4* y = (u32x4*)out + 256 * BID + TID;
    for (u32 k = 0; k < n; k++) y[k % 4 * 16384] = x[k % 4 * 16384] + y[k % 4 * 16384] * k;
}
";

#[test]
#[ignore = "a measurement"]
fn cost() {
    for (name, source, n) in [("LDS", LDS, 200), ("global memory", GLOBAL, 64)] {
        let image = hip("gfx942", "-O3", source);
        let time = |checks: Checks| {
            let rig = Rig::new(options("gfx942").threads(Some(1)).sanitize(checks), &image);
            let (x, y) = (rig.upload("x", &vec![1u32; 1 << 18]), rig.upload("y", &vec![2u32; 1 << 18]));
            let args = Args::new().push(x).push(y).push(n);
            let run = || {
                let start = Instant::now();
                rig.launch("work", 64, 256, &args).expect("no race");
                start.elapsed()
            };
            (0..5).map(|_| run()).min().unwrap_or(Duration::ZERO)
        };
        let plain = time(Checks::NONE);
        println!("{name}: plain {plain:.1?}");
        for checks in [
            Check::Lds.into(),
            Check::Global.into(),
            Check::Barriers.into(),
            Check::Streams.into(),
            Checks::from(Check::Lds) | Check::Global | Check::Barriers | Check::Streams,
        ] {
            let watched = time(checks);
            let ratio = watched.as_secs_f64() / plain.as_secs_f64();
            println!("{name}: {checks}: {watched:.1?}, {ratio:.1} times");
        }
    }
}
