//! Traces of waves: known paths and addresses, and sums that equal the counters.

use crate::common::{Args, Assembly, Rig, assemble, hip, options};
use hk_emu::{Dispatch, Fault, Operation, Sample, Unit};

/// A loop of three iterations, each with a load of 16 bytes a lane, a wait and LDS; s2 is the workgroup.
const LOOP: &str = "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v1, 4, v0
  v_lshlrev_b32 v6, 2, v0
  s_mov_b32 s6, 0
  s_waitcnt lgkmcnt(0)
.Lagain:
  global_load_dwordx4 v[2:5], v1, s[4:5]
  s_waitcnt vmcnt(0)
  ds_write_b32 v6, v2
  s_barrier
  s_add_u32 s6, s6, 1
  s_cmp_lt_u32 s6, 3
  s_cbranch_scc1 .Lagain
  v_mov_b32 v7, s2
  global_store_dword v6, v7, s[4:5]";

fn rig(cpu: &str) -> Rig {
    let image = assemble(&Assembly { cpu, body: LOOP, lds: 1024, ..Assembly::default() });
    Rig::new(options(cpu), &image)
}

#[test]
fn a_loop_is_traced_with_its_lines() {
    for cpu in ["gfx942", "gfx950"] {
        let rig = rig(cpu);
        let buffer = rig.upload("data", &[0u32; 1024]);
        let args = Args::new().push(buffer);
        let dispatch = Dispatch { grid: [4, 1, 1], block: [128, 1, 1], dynamic_lds: 0, args: &args.0 };
        let sample = Sample { blocks: &[3, 1], loads: None };
        let trace = rig.machine.trace(&rig.module, "test", &dispatch, sample).expect("traces");
        let linear: Vec<u64> = trace.blocks.iter().map(|block| block.linear).collect();
        assert_eq!(linear, [3, 1]);
        // Both wrote their numbers, and both writes are undone.
        assert_eq!(rig.download::<u32>(buffer, 1), [0]);
        for block in &trace.blocks {
            for (index, wave) in block.waves.iter().enumerate() {
                assert_eq!(wave.steps.len(), 5 + 3 * 7 + 3, "{cpu}");
                let facts = |i: &u32| &trace.instructions[*i as usize];
                let loads: Vec<_> = wave
                    .steps
                    .iter()
                    .map(facts)
                    .filter(|f| f.unit.is_memory())
                    .zip(&wave.traffic)
                    .filter(|(f, _)| f.unit == Unit::VectorMemory && f.operation == Some(Operation::Load))
                    .collect();
                assert_eq!(loads.len(), 3);
                for (facts, traffic) in loads {
                    assert_eq!((facts.counted, facts.ordered, facts.lane_bytes), ([true, false], true, 16));
                    assert_eq!((traffic.lanes, traffic.bytes, traffic.lds_bytes), (64, 1024, 0));
                    let first = buffer / 128 + 8 * index as u64;
                    let want: Vec<u64> = (first..first + 8).collect();
                    assert_eq!(wave.lines_of(traffic), want);
                }
                let lds = wave.traffic.iter().filter(|t| t.lds_bytes != 0);
                let lds: Vec<_> = lds.map(|t| (t.lds_bytes, t.lds_clocks)).collect();
                assert_eq!(lds, [(256, 2); 3]);
                let waits: Vec<_> =
                    wave.steps.iter().map(facts).filter(|f| f.unit == Unit::Wait).map(|f| f.wait).collect();
                assert_eq!(waits, [[63, 0], [0, 15], [0, 15], [0, 15]]);
            }
        }
    }
}

#[test]
fn the_first_loads_of_a_wave_can_be_enough() {
    let rig = rig("gfx942");
    let buffer = rig.upload("data", &[7u32; 1024]);
    let args = Args::new().push(buffer);
    let dispatch = Dispatch { grid: [4, 1, 1], block: [128, 1, 1], dynamic_lds: 0, args: &args.0 };
    let sample = Sample { blocks: &[0, 1, 2, 3], loads: Some(2) };
    let trace = rig.machine.trace(&rig.module, "test", &dispatch, sample).expect("traces");
    for wave in trace.blocks.iter().flat_map(|block| &block.waves) {
        assert_eq!(wave.steps.len(), 5 + 2 * 7, "it is left before its third load");
    }
    assert_eq!(rig.download::<u32>(buffer, 1), [7], "nothing was stored");
}

#[test]
fn a_workgroup_outside_of_the_grid_is_refused() {
    let rig = rig("gfx942");
    let args = Args::new().push(rig.upload("data", &[0u32; 1024]));
    let dispatch = Dispatch { grid: [4, 1, 1], block: [64, 1, 1], dynamic_lds: 0, args: &args.0 };
    let sample = Sample { blocks: &[4], loads: None };
    let fault = rig.machine.trace(&rig.module, "test", &dispatch, sample).map(|_| ()).expect_err("refused");
    assert!(matches!(&fault, Fault::Arguments { what, .. } if what.contains("workgroup 4 of 4")), "{fault}");
}

#[test]
fn traces_of_all_workgroups_add_up_to_the_counters() {
    let source = r#"
        KERNEL void add(const float *x, float *y, u32 n) {
          __shared__ float tile[256];
          float sum = 0;
          for (u32 i = BID * 256 + TID; i < n; i += 1024) {
            tile[TID] = x[i * 3 % n];
            BARRIER();
            sum += tile[(TID * 5) % 256];
            BARRIER();
          }
          y[BID * 256 + TID] = sum;
        }"#;
    for cpu in ["gfx942", "gfx950"] {
        let rig = Rig::new(options(cpu).details(true), &hip(cpu, "-O3", source));
        let n = 4096u32;
        let (x, y) = (rig.upload("x", &vec![1.0f32; n as usize]), rig.upload("y", &[0.0f32; 1024]));
        let args = Args::new().push(x).push(y).push(n);
        let dispatch = Dispatch { grid: [4, 1, 1], block: [256, 1, 1], dynamic_lds: 0, args: &args.0 };
        let counters = rig.machine.launch(&rig.module, "add", &dispatch).expect("runs");
        let details = counters.details.expect("details");
        let sample = Sample { blocks: &[0, 1, 2, 3], loads: None };
        rig.machine.fill(y, &[7], 4096).expect("memory");
        let trace = rig.machine.trace(&rig.module, "add", &dispatch, sample).expect("traces");
        let mut left = [0; 4096];
        rig.machine.read(y, &mut left).expect("memory");
        assert_eq!(left, [7; 4096], "a trace leaves memory as it was");
        let waves = || trace.blocks.iter().flat_map(|block| &block.waves);
        assert_eq!(waves().map(|w| w.steps.len() as u64).sum::<u64>(), counters.instructions);
        let vector = |w: &hk_emu::WaveTrace| -> Vec<hk_emu::Traffic> {
            let units =
                w.steps.iter().map(|i| trace.instructions[*i as usize].unit).filter(|u| u.is_memory());
            units.zip(&w.traffic).filter(|(u, _)| *u == Unit::VectorMemory).map(|(_, t)| t.clone()).collect()
        };
        let lines: u64 = waves().flat_map(vector).map(|t| u64::from(t.lines.end - t.lines.start)).sum();
        assert_eq!(lines, details.global_read_lines + details.global_written_lines);
        let clocks: u64 = waves().flat_map(|w| &w.traffic).map(|t| u64::from(t.lds_clocks)).sum();
        assert_eq!(clocks, details.lds_clocks);
        let conflicts: u64 = waves().flat_map(|w| &w.traffic).map(|t| u64::from(t.lds_conflicts)).sum();
        assert_eq!(conflicts, details.lds_conflict_clocks);
        let bytes: u64 = waves().flat_map(|w| &w.traffic).map(|t| u64::from(t.lds_bytes)).sum();
        assert_eq!(bytes, details.lds_read_bytes + details.lds_written_bytes);
        let passes = |w: &hk_emu::WaveTrace| {
            w.steps.iter().filter(|i| trace.instructions[**i as usize].unit == Unit::Barrier).count() as u64
        };
        assert_eq!(waves().map(passes).sum::<u64>(), counters.barriers);
    }
}

#[test]
fn zeroed_memory_reads_as_zeros_and_can_be_larger_than_what_is_touched() {
    let rig = rig("gfx942");
    let base =
        rig.machine.alloc_zeroed(4 << 30, 256, "large").expect("only pages that are accessed are backed");
    let mut bytes = [1; 8];
    rig.machine.read(base + (3 << 30), &mut bytes).expect("reads");
    assert_eq!(bytes, [0; 8]);
    rig.machine.write(base + 4096, &[5]).expect("writes");
    rig.machine.free(base).expect("frees");
    assert!(rig.machine.alloc_zeroed(8, 3, "odd").is_err());
    assert!(rig.machine.alloc_zeroed(0, 256, "empty").is_ok());
}

#[test]
fn an_atomic_of_one_lane_is_traced_with_what_it_changes() {
    let body = "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_mov_b32 v1, 8
  v_mov_b32 v2, 5
  s_waitcnt lgkmcnt(0)
  global_atomic_add v1, v2, s[4:5]
  s_mov_b64 exec, 1
  global_atomic_add v1, v2, s[4:5]
  buffer_wbl2 sc1
  s_waitcnt vmcnt(0)
  buffer_inv sc1";
    let rig =
        Rig::new(options("gfx942"), &assemble(&Assembly { cpu: "gfx942", body, ..Assembly::default() }));
    let buffer = rig.upload("data", &[7u32; 4]);
    let args = Args::new().push(buffer);
    let dispatch = Dispatch { grid: [1; 3], block: [64, 1, 1], dynamic_lds: 0, args: &args.0 };
    let sample = Sample { blocks: &[0], loads: None };
    let trace = rig.machine.trace(&rig.module, "test", &dispatch, sample).expect("traces");
    let [wave] = &trace.blocks[0].waves[..] else { panic!("one wave") };
    let [atomic] = wave.atomics[..] else { panic!("{:?}", wave.atomics) };
    assert_eq!((atomic.step, atomic.address, atomic.bytes), (6, buffer + 8, 4));
    assert_eq!((atomic.old, atomic.new), (7 + 64 * 5, 7 + 65 * 5));
    let units: Vec<Unit> = wave.steps.iter().map(|i| trace.instructions[*i as usize].unit).collect();
    assert_eq!(units[7..10], [Unit::WriteBack, Unit::Wait, Unit::Invalidate]);
}
