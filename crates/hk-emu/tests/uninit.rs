//! The `uninit` check: values that depend on unwritten memory or registers are found where they decide something, and only there.

use crate::common::{Args, Assembly, Rig, assemble, hip, sanitized};
use hk_emu::{Check, Fault};

const CPUS: [&str; 2] = ["gfx942", "gfx950"];

fn rig(cpu: &str, source: &str) -> Rig {
    Rig::new(sanitized(cpu, Check::Uninit), &hip(cpu, "-O3", source))
}

fn fresh(rig: &Rig, label: &str, bytes: u64) -> u64 {
    rig.machine.alloc(bytes, 256, label).expect("memory")
}

/// The finding's text, which must hold all of `parts`.
#[track_caller]
fn found(fault: Fault, parts: &[&str]) {
    let text = fault.to_string();
    assert!(matches!(fault, Fault::Sanitizer { check: Check::Uninit, .. }), "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
}

#[test]
fn global_memory_that_nobody_wrote_must_not_reach_a_result() {
    for cpu in CPUS {
        let rig = rig(
            cpu,
            "KERNEL void scale(const float *x, float *y) {\n  int i = BID * 64 + TID;\n  y[i] = x[i] * 2;\n}",
        );
        let (x, y) = (fresh(&rig, "input", 512), fresh(&rig, "output", 512));
        let args = Args::new().push(x).push(y);
        rig.machine.fill(x, &1f32.to_le_bytes(), 256).unwrap();
        rig.launch("scale", 1, 64, &args).unwrap();
        let fault = rig.launch("scale", 2, 64, &args).unwrap_err();
        found(
            fault,
            &["never written", "goes to global memory", "kernel.hip:3", "lane 0", "\"output\"", "(1, 0, 0)"],
        );
        // The last element alone.
        rig.machine.fill(x, &1f32.to_le_bytes(), 508).unwrap();
        let fault = rig.launch("scale", 2, 64, &args).unwrap_err();
        found(fault, &["lane 63", "v_add_f32"]);
        rig.machine.fill(x, &1f32.to_le_bytes(), 512).unwrap();
        rig.launch("scale", 2, 64, &args).unwrap();
        // What a kernel wrote is written; what was copied from nowhere is not.
        let z = fresh(&rig, "second output", 512);
        rig.launch("scale", 2, 64, &Args::new().push(y).push(z)).unwrap();
        let unwritten = fresh(&rig, "unwritten", 512);
        rig.machine.copy(x + 100, unwritten + 100, 4).unwrap();
        let fault = rig.launch("scale", 2, 64, &args).unwrap_err();
        found(fault, &["lane 25"]);
    }
}

#[test]
fn lds_that_nobody_wrote_must_not_decide_a_branch() {
    let source = "KERNEL void branch(float *y, int n) {
  __shared__ int flag[64];
  if ((int)TID < n) flag[TID] = 1;
  BARRIER();
  if (__builtin_amdgcn_readfirstlane(flag[63 - TID]) == 1) y[TID] = 1;
}";
    for cpu in CPUS {
        let rig = rig(cpu, source);
        let y = fresh(&rig, "y", 256);
        rig.launch("branch", 1, 64, &Args::new().push(y).push(64)).unwrap();
        let fault = rig.launch("branch", 1, 64, &Args::new().push(y).push(60)).unwrap_err();
        found(fault, &["never written", "kernel.hip:5", "branch"]);
    }
}

#[test]
fn sums_maxima_and_minima_over_unwritten_elements_are_found() {
    for (name, fold) in [("sum", "a + b"), ("max", "a > b ? a : b"), ("min", "a < b ? a : b")] {
        let source = format!(
            "KERNEL void fold(float *y, int n) {{
  __shared__ float part[128];
  for (int i = TID; i < n; i += 64) part[i] = (float)i;
  BARRIER();
  float a = part[0];
  for (int i = 1; i < 128; i++) {{ float b = part[i]; a = {fold}; }}
  y[TID] = a;
}}"
        );
        let rig = rig("gfx942", &source);
        let y = fresh(&rig, "y", 256);
        rig.launch("fold", 1, 64, &Args::new().push(y).push(128)).unwrap();
        let fault = rig.launch("fold", 1, 64, &Args::new().push(y).push(126)).unwrap_err();
        assert!(matches!(fault, Fault::Sanitizer { check: Check::Uninit, .. }), "{name}: {fault}");
    }
}

#[test]
fn an_address_from_unwritten_memory_is_found_before_it_is_used() {
    let rig =
        rig("gfx942", "KERNEL void gather(const int *at, const float *x, float *y) { y[TID] = x[at[TID]]; }");
    let (at, x, y) = (fresh(&rig, "indices", 256), rig.upload("x", &[1f32; 64]), fresh(&rig, "y", 256));
    let args = Args::new().push(at).push(x).push(y);
    let fault = rig.launch("gather", 1, 64, &args).unwrap_err();
    found(fault, &["the address depends on a value that was never written", "global_load_dword"]);
    rig.machine.fill(at, &[0], 256).unwrap();
    rig.launch("gather", 1, 64, &args).unwrap();
}

#[test]
fn atomics_need_memory_that_was_written() {
    let rig = rig(
        "gfx950",
        "KERNEL void count(int *n) { __hip_atomic_fetch_add(n, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }",
    );
    let n = fresh(&rig, "counter", 4);
    let fault = rig.launch("count", 1, 64, &Args::new().push(n)).unwrap_err();
    found(fault, &["an atomic on global memory that was never written", "\"counter\""]);
    rig.machine.fill(n, &[0], 4).unwrap();
    rig.launch("count", 1, 64, &Args::new().push(n)).unwrap();
    assert_eq!(rig.download::<u32>(n, 1), [64]);
}

/// Runs a body of assembly; `s[4:5]` is the buffer, `v1` the lane's offset of 4 bytes.
fn run(cpu: &str, body: &str) -> Result<(), Fault> {
    let body = format!(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_lshlrev_b32 v1, 2, v0\n  s_waitcnt lgkmcnt(0)\n{body}"
    );
    let image = assemble(&Assembly { cpu, body: &body, lds: 1024, scratch: 64, ..Assembly::default() });
    let rig = Rig::new(sanitized(cpu, Check::Uninit), &image);
    let data = rig.upload("data", &[0u32; 256]);
    rig.launch("test", 1, 64, &Args::new().push(data)).map(drop)
}

#[test]
fn registers_that_nobody_wrote_are_named() {
    for cpu in CPUS {
        let stored = "global_store_dword v1, v9, s[4:5]";
        found(run(cpu, stored).unwrap_err(), &["v9"]);
        found(run(cpu, &format!("v_add_u32 v9, v9, v1\n{stored}")).unwrap_err(), &["v9", "v_add_u32"]);
        found(
            run(cpu, &format!("v_accvgpr_read_b32 v9, a3\n{stored}")).unwrap_err(),
            &["v_accvgpr_read_b32"],
        );
        found(run(cpu, &format!("v_mov_b32 v9, s40\n{stored}")).unwrap_err(), &["v_mov_b32"]);
        found(
            run(cpu, &format!("s_mov_b64 exec, 15\nv_mov_b32 v9, 0\ns_mov_b64 exec, -1\n{stored}"))
                .unwrap_err(),
            &["lane 4"],
        );
        found(
            run(cpu, "s_cbranch_scc1 .Lend\ns_nop 0").unwrap_err(),
            &["the branch", "scc has no value yet"],
        );
        found(
            run(cpu, "s_cbranch_vccz .Lend\ns_nop 0\ns_and_saveexec_b64 s[6:7], vcc").unwrap_err(),
            &["vcc"],
        );
        found(run(cpu, "s_mov_b64 exec, s[40:41]").unwrap_err(), &["lanes that run", "s40 has no value yet"]);
        found(
            run(cpu, "s_load_dword s6, s[40:41], 0x0").unwrap_err(),
            &["the address", "s40 has no value yet"],
        );
        found(run(cpu, "ds_read_b32 v9, v7").unwrap_err(), &["the address", "v7 has no value yet"]);
        let scratch = "scratch_load_dword v9, off, off offset:4\ns_waitcnt vmcnt(0)";
        // An untouched copy out of private memory may be the padding of a struct; a sum is none.
        assert!(run(cpu, &format!("{scratch}\n{stored}")).is_ok());
        found(
            run(cpu, &format!("{scratch}\nv_add_u32 v9, 1, v9\n{stored}")).unwrap_err(),
            &["v9", "v_add_u32"],
        );
        found(
            run(cpu, &format!("ds_read_b32 v9, v1\ns_waitcnt lgkmcnt(0)\n{stored}")).unwrap_err(),
            &["ds_read_b32"],
        );
    }
}

#[test]
fn undefined_bits_that_decide_nothing_are_no_finding() {
    for cpu in CPUS {
        for harmless in [
            "v_and_b32 v9, 0, v9",
            "v_mul_u32_u24 v9, 0, v9",
            "s_mov_b32 s6, 0x07060706\nv_lshlrev_b32 v9, 16, v1\nv_perm_b32 v9, v9, v20, s6",
            "v_cmp_eq_u32 vcc, v1, v1\nv_cndmask_b32 v9, v20, v1, vcc",
            "ds_write_b32 v1, v20\nds_write_b32 v1, v1\nds_read_b32 v9, v1\ns_waitcnt lgkmcnt(0)",
            "s_mov_b32 s6, s40\ns_and_b32 s6, s6, 0\nv_mov_b32 v9, s6",
            "v_mov_b32 v9, v1\nv_mov_b32 v20, v21\nv_add_f32 v22, v20, v20",
        ] {
            let body = format!("{harmless}\nglobal_store_dword v1, v9, s[4:5]");
            assert!(run(cpu, &body).is_ok(), "{harmless}: {}", run(cpu, &body).unwrap_err());
        }
    }
}
