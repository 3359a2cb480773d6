//! Compiled kernels from end to end.

mod common;

use common::{Args, Random, Rig};

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
