//! Detailed counters: known answers, and independent models over random addresses.

use std::collections::{HashMap, HashSet};

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use hk_emu::{Checks, Counters, Details, Dispatch, MachineOptions, Profile};

const TARGETS: [&str; 2] = ["gfx942", "gfx950"];

/// Runs `instruction` once, with v2 the address of each lane, v[4:7] data, and EXEC as given; s[4:5] is a buffer of
/// 64 KiB behind the table of addresses.
struct Probe(Rig);

/// Bytes of the table: a dword for each lane, then EXEC.
const TABLE: u64 = 264;

impl Probe {
    fn new(cpu: &str, instruction: &str) -> Probe {
        let body = format!(
            "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v1, 2, v0
  s_waitcnt lgkmcnt(0)
  s_load_dwordx2 s[6:7], s[4:5], 0x100
  global_load_dword v2, v1, s[4:5]
  s_add_u32 s4, s4, 0x200
  s_addc_u32 s5, s5, 0
  s_waitcnt vmcnt(0) lgkmcnt(0)
  s_mov_b64 exec, s[6:7]
  {instruction}
  s_waitcnt vmcnt(0) lgkmcnt(0)"
        );
        let image = assemble(&Assembly { cpu, body: &body, lds: 65536, ..Assembly::default() });
        Probe(Rig::new(options(cpu).details(true), &image))
    }

    /// What the instruction counts: the totals without the load of the table.
    fn count(&self, addresses: &[u32; 64], exec: u64) -> Counters {
        let mut data = addresses.to_vec();
        data.extend([exec as u32, (exec >> 32) as u32]);
        data.resize(0x200 / 4 + 65536 / 4, 0);
        let buffer = self.0.upload("data", &data);
        let mut counters = self.0.launch("test", 1, 64, &Args::new().push(buffer)).expect("runs");
        self.0.machine.free(buffer).expect("frees");
        assert_eq!((counters.smem_bytes, counters.waits), (16, 3));
        counters.global_read_bytes -= 256;
        counters.details.as_mut().expect("details").global_read_lines -= 2;
        counters
    }

    fn details(&self, addresses: &[u32; 64], exec: u64) -> Details {
        self.count(addresses, exec).details.expect("details")
    }
}

fn lanes(f: impl Fn(u32) -> u32) -> [u32; 64] {
    std::array::from_fn(|lane| f(lane as u32))
}

/// Addresses of different kinds, each a multiple of `align` and below 65536 - 16.
fn addresses(random: &mut Random, align: u32) -> [u32; 64] {
    let (start, stride) = (random.next() % 1024, random.next() % 40);
    let kind = random.next() % 4;
    lanes(|lane| lane).map(|lane| {
        let at = match kind {
            0 => random.next() % 16320,
            1 => random.next() % 64,
            2 => start + lane * stride,
            _ => start + (lane ^ stride) + lane / 8 % 2 * 32,
        };
        at * 4 / align * align
    })
}

fn exec(random: &mut Random) -> u64 {
    let any = u64::from(random.next()) << 32 | u64::from(random.next());
    [!0, !0, any, 1 << (any % 64), 0x0000_FFFF_0000_FFFF][(any % 5) as usize]
}

#[test]
fn a_load_touches_known_lines() {
    let [dword, four] = ["global_load_dword v4, v2, s[4:5]", "global_load_dwordx4 v[4:7], v2, s[4:5]"];
    // Instruction, addresses, lanes, lines by hand.
    let cases: [(&str, [u32; 64], u64, u64); 9] = [
        (dword, lanes(|l| 4 * l), !0, 2),
        (dword, lanes(|l| 4 * l + 4), !0, 3),
        (dword, lanes(|l| 4 * (63 - l)), !0, 2),
        (dword, lanes(|l| 128 * l), !0, 64),
        (dword, lanes(|_| 64), !0, 1),
        (dword, lanes(|l| 4 * l), 0xFFFF_FFFF, 1),
        (four, lanes(|l| 16 * l), !0, 8),
        (four, lanes(|l| 16 * l + 8), !0, 9),
        // One lane that straddles two lines.
        (four, lanes(|_| 120), 1 << 17, 2),
    ];
    for cpu in TARGETS {
        let probes = HashMap::from([dword, four].map(|i| (i, Probe::new(cpu, i))));
        for (instruction, addresses, exec, want) in &cases {
            let c = probes[instruction].count(addresses, *exec);
            let d = c.details.expect("details");
            let bytes = if *instruction == dword { 4 } else { 16 };
            assert_eq!(d.global_read_lines, *want, "{instruction} at {addresses:?}");
            assert_eq!(c.global_read_bytes, bytes * u64::from(exec.count_ones()));
            assert_eq!((d.global_written_lines, c.global_written_bytes, d.lds_clocks), (0, 0, 0));
        }
    }
}

#[test]
fn lines_and_bytes_are_those_of_a_set() {
    let instructions = [
        ("global_load_ubyte v4, v2, s[4:5]", 1, false),
        ("global_load_dwordx3 v[4:6], v2, s[4:5]", 12, false),
        ("global_store_short v2, v4, s[4:5]", 2, true),
        ("global_store_dwordx4 v2, v[4:7], s[4:5]", 16, true),
        ("global_atomic_add v2, v4, s[4:5]", 4, true),
    ];
    let mut random = Random(1);
    for (instruction, bytes, writes) in instructions {
        let probe = Probe::new("gfx942", instruction);
        let atomic = instruction.contains("atomic");
        for _ in 0..20 {
            let (addresses, exec) = (addresses(&mut random, 4), exec(&mut random));
            let c = probe.count(&addresses, exec);
            let d = c.details.expect("details");
            let active = (0..64).filter(|l| exec >> l & 1 != 0).map(|l| addresses[l]);
            let touched: HashSet<u32> = active.flat_map(|a| a..a + bytes).collect();
            let lines: HashSet<u32> = touched.iter().map(|a| a / 128).collect();
            let (n, lines, all) =
                (touched.len() as u64, lines.len() as u64, u64::from(exec.count_ones() * bytes));
            let (table, table_lines) = (TABLE - 8, 2);
            if atomic {
                assert_eq!((d.global_read_lines, d.global_written_lines), (0, 0));
                assert_eq!(d.global_atomics, u64::from(exec.count_ones()));
                assert_eq!((c.global_read_bytes, c.global_written_bytes), (all, all));
                assert_eq!((d.distinct_read_bytes, d.distinct_written_bytes), (table + n, n));
            } else if writes {
                assert_eq!((d.global_written_lines, c.global_written_bytes), (lines, all));
                assert_eq!((d.distinct_written_bytes, d.distinct_written_lines), (n, lines));
                assert_eq!((d.distinct_read_bytes, d.distinct_read_lines), (table, table_lines));
            } else {
                assert_eq!((d.global_read_lines, c.global_read_bytes), (lines, all));
                // The table lies before the data, on lines of its own.
                assert_eq!((d.distinct_read_bytes, d.distinct_read_lines), (table + n, table_lines + lines));
            }
        }
    }
}

/// What a wave has outstanding at most: up to each wait, by what that leaves, whatever the kind of the instruction.
#[test]
fn loads_are_in_flight_until_they_are_waited_for() {
    // Two waves of loads of 8 lines, 2 lines, and a store; a wait leaves the newest ones.
    let cases = [
        ("", 8),
        ("global_load_dwordx4 v[8:11], v1, s[4:5]", 16),
        ("s_waitcnt vmcnt(0)\nglobal_load_dword v8, v2, s[4:5]", 8),
        (
            "global_load_dword v8, v2, s[4:5]\ns_waitcnt vmcnt(1)\nglobal_load_dwordx4 v[12:15], v1, s[4:5]",
            10,
        ),
        (
            "global_store_dword v2, v3, s[4:5] offset:2048\ns_waitcnt vmcnt(1)\nglobal_load_dword v8, v2, s[4:5]",
            8,
        ),
        ("s_waitcnt lgkmcnt(0)\nglobal_load_dword v8, v2, s[4:5]", 10),
    ];
    for (rest, lines) in cases {
        let body = format!(
            "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_and_b32 v4, 63, v0
  v_lshlrev_b32 v1, 4, v4
  v_lshlrev_b32 v2, 2, v4
  v_mov_b32 v3, 0
  s_waitcnt lgkmcnt(0)
  global_load_dwordx4 v[4:7], v1, s[4:5]
  {rest}
  s_waitcnt vmcnt(0)"
        );
        let image = assemble(&Assembly { body: &body, ..Assembly::default() });
        let rig = Rig::new(options("gfx942").details(true), &image);
        let buffer = rig.upload("data", &[0u32; 1024]);
        let counters = rig.launch("test", 1, 128, &Args::new().push(buffer)).expect("runs");
        let d = counters.details.expect("details");
        assert_eq!(d.lines_in_flight, 2 * lines, "{rest}");
        assert_eq!(d.wide_bytes % 2048, 0, "{rest}");
        assert!(d.wide_bytes >= 2048, "{rest}");
    }
}

/// A wait is a drain if it leaves no load, and if matrix instructions come before and after it.
#[test]
fn waits_between_matrix_instructions_that_leave_no_load_are_drains() {
    let load = "global_load_dwordx4 v[4:7], v1, s[4:5]";
    let store = "global_store_dword v1, v3, s[4:5] offset:2048";
    let masked = "s_mov_b64 exec, 0\n  global_load_dword v8, v2, s[4:5]\n  s_mov_b64 exec, -1";
    let mma = "v_mfma_f32_16x16x16_bf16 v[12:15], v[2:3], v[2:3], v[12:15]";
    let (all, but_one) = ("s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)");
    let cases: [(&[&str], u64); 10] = [
        (&[load, all, mma], 0),
        (&[mma, load, all], 0),
        (&[mma, load, all, mma], 1),
        (&[mma, mma, load, all, all, mma, mma], 1),
        (&[mma, load, all, mma, load, all, mma], 2),
        (&[mma, load, all, load, all, mma], 2),
        (&[mma, load, load, but_one, mma, all, mma], 1),
        (&[load, mma, load, but_one, mma, but_one, mma], 0),
        // Also a load that reads nothing, as past the end of K.
        (&[mma, load, masked, but_one, mma], 0),
        // A store leaves no load in flight, and a load before it is complete.
        (&[mma, store, all, mma, load, store, but_one, mma], 1),
    ];
    for (lines, drains) in cases {
        let body = format!(
            "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_and_b32 v4, 63, v0
  v_lshlrev_b32 v1, 4, v4
  v_mov_b32 v2, 0
  v_mov_b32 v3, 0
  v_mov_b32 v12, 0
  v_mov_b32 v13, 0
  v_mov_b32 v14, 0
  v_mov_b32 v15, 0
  s_waitcnt lgkmcnt(0)
  {}
  s_waitcnt vmcnt(0)",
            lines.join("\n  ")
        );
        let image = assemble(&Assembly { body: &body, ..Assembly::default() });
        let rig = Rig::new(options("gfx942").details(true), &image);
        let buffer = rig.upload("data", &[0u32; 1024]);
        let counters = rig.launch("test", 1, 128, &Args::new().push(buffer)).expect("runs");
        // Of two waves.
        assert_eq!(counters.details.expect("details").drains, 2 * drains, "{lines:?}");
    }
}

/// Buffer loads are range-checked dword by dword; what is cut off is neither moved nor counted.
#[test]
fn a_buffer_load_counts_what_lies_in_range() {
    let body = "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v1, 4, v0
  s_mov_b32 s6, 0x208
  s_mov_b32 s7, 0x20000
  s_waitcnt lgkmcnt(0)
  buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen
  s_waitcnt vmcnt(0)";
    let image = assemble(&Assembly { body, ..Assembly::default() });
    let rig = Rig::new(options("gfx942").details(true), &image);
    let buffer = rig.upload("data", &[0u32; 256]);
    let profile = profile(&rig, "test", 1, 64, &Args::new().push(buffer));
    let d = profile.counters.details.expect("details");
    // 32 whole lanes, and two dwords of the next one.
    assert_eq!((profile.counters.global_read_bytes, d.distinct_read_bytes), (520, 520));
    assert_eq!((d.global_read_lines, d.distinct_read_lines), (5, 5));
    assert_eq!(d.wide_bytes, 512);
    assert_eq!(profile.lines.iter().map(|l| l.counters.global_read_bytes).sum::<u64>(), 520);
}

/// Instruction, addresses, lanes, clocks and conflicts on gfx942, on gfx950.
type LdsCase = (&'static str, [u32; 64], u64, [u64; 2], [u64; 2]);

#[test]
fn lds_conflicts_are_known() {
    let [read, write] = ["ds_read_b32 v4, v2", "ds_write_b32 v2, v4"];
    let [read64, write64] = ["ds_read_b64 v[4:5], v2", "ds_write_b64 v2, v[4:5]"];
    let [read128, write128] = ["ds_read_b128 v[4:7], v2", "ds_write_b128 v2, v[4:7]"];
    let cases: [LdsCase; 16] = [
        (read, lanes(|l| 4 * l), !0, [2, 0], [2, 0]),
        (read, lanes(|l| 4 * l), 0xFFFF_FFFF, [1, 0], [1, 0]),
        (read, lanes(|_| 12), !0, [2, 0], [2, 0]),
        (read, lanes(|l| 8 * l), !0, [4, 2], [4, 2]),
        (read, lanes(|l| 128 * l), !0, [64, 62], [64, 62]),
        // A row of 33 dwords instead of 32.
        (read, lanes(|l| 132 * l), !0, [2, 0], [2, 0]),
        (write, lanes(|l| 8 * l), !0, [4, 2], [4, 2]),
        (write, lanes(|l| 128 * l), !0, [64, 62], [64, 62]),
        (read64, lanes(|l| 8 * l), !0, [4, 0], [2, 0]),
        (read64, lanes(|l| 128 * l), !0, [64, 60], [32, 30]),
        (write64, lanes(|l| 8 * l), !0, [4, 0], [4, 0]),
        (read128, lanes(|l| 16 * l), !0, [8, 0], [4, 0]),
        (read128, lanes(|l| 256 * l), !0, [64, 56], [64, 60]),
        // Lanes 0..4 and 4..8 on the same banks: not one phase of a read on gfx942, but one of a write.
        (read128, lanes(|l| 16 * (l % 4) + 128 * (l / 4)), 0xFF, [2, 0], [2, 0]),
        (write128, lanes(|l| 16 * (l % 4) + 128 * (l / 4)), 0xFF, [2, 1], [2, 1]),
        (write128, lanes(|l| 16 * l), !0, [8, 0], [8, 0]),
    ];
    for (target, cpu) in TARGETS.into_iter().enumerate() {
        let probes = [read, write, read64, write64, read128, write128]
            .map(|instruction| (instruction, Probe::new(cpu, instruction)));
        let probes = HashMap::from(probes);
        for (i, (instruction, addresses, exec, gfx942, gfx950)) in cases.iter().enumerate() {
            let d = probes[instruction].details(addresses, *exec);
            let want = [gfx942, gfx950][target];
            assert_eq!([d.lds_clocks, d.lds_conflict_clocks], *want, "case {i}: {instruction} on {cpu}");
        }
    }
}

/// The phases of an access as the specification lists them: each a list of lanes, with the number of banks.
fn phases(cpu: &str, write: bool, bytes: u32) -> (Vec<Vec<usize>>, u32) {
    let runs = |n: usize| (0..64 / n).map(|i| (n * i..n * i + n).collect()).collect();
    let groups = |low: &[&[usize]]| {
        let upper = low.iter().map(|g| g.iter().map(|l| l + 32).collect());
        low.iter().map(|g| g.to_vec()).chain(upper).collect::<Vec<Vec<usize>>>()
    };
    let eight = || {
        groups(&[
            &[0, 1, 2, 3, 20, 21, 22, 23],
            &[4, 5, 6, 7, 16, 17, 18, 19],
            &[8, 9, 10, 11, 28, 29, 30, 31],
            &[12, 13, 14, 15, 24, 25, 26, 27],
        ])
    };
    match (cpu, write, bytes) {
        (_, _, 1..=4) => (runs(32), 32),
        ("gfx950", false, 8) => (runs(32), 64),
        (_, _, 8) => (runs(16), 32),
        (_, true, _) => (runs(8), 32),
        ("gfx950", false, 16) => (
            groups(&[
                &[0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27],
                &[4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31],
            ]),
            64,
        ),
        _ => (eight(), 32),
    }
}

/// Clocks and conflicts, by the text of the rule: over the active lanes of each phase, sets of dwords by bank.
fn model(cpu: &str, write: bool, atomic: bool, bytes: u32, addresses: &[u32; 64], exec: u64) -> (u64, u64) {
    let (phases, banks) = phases(cpu, write, bytes);
    let (mut clocks, mut conflicts) = (0, 0);
    for phase in phases {
        let mut by_bank: HashMap<u32, HashSet<(u32, usize)>> = HashMap::new();
        for lane in phase.into_iter().filter(|lane| exec >> lane & 1 != 0) {
            for byte in addresses[lane]..addresses[lane] + bytes {
                let asked = (byte / 4, if atomic { lane } else { 0 });
                by_bank.entry(byte / 4 % banks).or_default().insert(asked);
            }
        }
        if let Some(cost) = by_bank.values().map(|dwords| dwords.len() as u64).max() {
            clocks += cost;
            conflicts += cost - 1;
        }
    }
    (clocks, conflicts)
}

#[test]
fn lds_clocks_follow_the_model_for_any_addresses() {
    // Instruction, writes, bytes.
    let instructions = [
        ("ds_read_u8 v4, v2", false, 1u32),
        ("ds_read_b32 v4, v2", false, 4),
        ("ds_read_b64 v[4:5], v2", false, 8),
        ("ds_read_b96 v[4:6], v2", false, 12),
        ("ds_read_b128 v[4:7], v2", false, 16),
        ("ds_write_b16 v2, v4", true, 2),
        ("ds_write_b32 v2, v4", true, 4),
        ("ds_write_b64 v2, v[4:5]", true, 8),
        ("ds_write_b96 v2, v[4:6]", true, 12),
        ("ds_write_b128 v2, v[4:7]", true, 16),
        ("ds_add_u32 v2, v4", true, 4),
        ("ds_add_u64 v2, v[4:5]", true, 8),
    ];
    let mut random = Random(2);
    for cpu in TARGETS {
        for (instruction, write, bytes) in instructions {
            let probe = Probe::new(cpu, instruction);
            let atomic = instruction.contains("add");
            for _ in 0..25 {
                let align = bytes.next_power_of_two().max(4);
                let (addresses, exec) = (addresses(&mut random, align), exec(&mut random));
                let d = probe.details(&addresses, exec);
                let want = model(cpu, write, atomic, bytes, &addresses, exec);
                let what = format!("{instruction} on {cpu} at {addresses:?}, exec {exec:#x}");
                assert_eq!((d.lds_clocks, d.lds_conflict_clocks), want, "{what}");
                let all = u64::from(exec.count_ones() * bytes);
                assert_eq!(d.lds_written_bytes, if write { all } else { 0 }, "{what}");
                assert_eq!(d.lds_read_bytes, if !write || atomic { all } else { 0 }, "{what}");
                assert_eq!(d.lds_atomics, if atomic { exec.count_ones().into() } else { 0 }, "{what}");
            }
        }
    }
}

/// Two addresses are two accesses; a load to LDS is a write of consecutive slots.
#[test]
fn other_lds_accesses() {
    let exec = !0;
    let pair = Probe::new("gfx942", "ds_read2_b32 v[4:5], v2 offset0:0 offset1:1");
    let d = pair.details(&lanes(|l| 8 * l), exec);
    assert_eq!((d.lds_clocks, d.lds_conflict_clocks, d.lds_read_bytes), (8, 4, 512));
    let dma = Probe::new("gfx942", "s_mov_b32 m0, 0\n  global_load_lds_dword v2, s[4:5]");
    let d = dma.details(&lanes(|l| 4 * l), exec);
    assert_eq!((d.lds_clocks, d.lds_conflict_clocks, d.lds_written_bytes), (2, 0, 256));
    assert_eq!(d.global_read_lines, 2);
}

fn profile(rig: &Rig, kernel: &str, grid: u32, block: u32, args: &Args) -> Profile {
    let dispatch = Dispatch { grid: [grid, 1, 1], block: [block, 1, 1], dynamic_lds: 0, args: &args.0 };
    rig.machine.profile(&rig.module, kernel, &dispatch).expect("runs")
}

#[test]
fn instructions_are_counted_by_what_they_are() {
    let body = "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_waitcnt lgkmcnt(0)
  s_load_dwordx4 s[8:11], s[4:5], 0x0
  s_waitcnt lgkmcnt(0)
  v_exp_f32 v1, v0
  v_frexp_exp_i32_f32 v1, v0
  v_rcp_iflag_f32 v2, v0
  v_sqrt_f16 v3, v0
  s_barrier
  s_mov_b32 s6, 3
.Lloop:
  v_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], v[4:5], a[0:3]
  v_mfma_f32_32x32x2_f32 a[0:15], v2, v3, a[0:15]
  s_sub_u32 s6, s6, 1
  s_cmp_lg_u32 s6, 0
  s_cbranch_scc1 .Lloop
  s_barrier
  scratch_store_dwordx2 off, v[0:1], off offset:8
  s_waitcnt vmcnt(0)
  scratch_load_dword v1, off, off offset:12
  s_waitcnt vmcnt(0)
  v_pk_mul_f32 v[6:7], v[6:7], v[6:7]
  v_pk_mul_f16 v6, v6, v6";
    let directives = "  .amdhsa_enable_private_segment 1";
    let image = assemble(&Assembly { body, directives, scratch: 16, ..Assembly::default() });
    let rig = Rig::new(options("gfx942"), &image);
    let data = rig.upload("data", &[0u32; 4]);
    let Profile { counters: c, resources, launches, kernel, lines, blocks } =
        profile(&rig, "test", 2, 128, &Args::new().push(data));
    let waves = 4;
    assert_eq!((c.workgroups, c.waves, launches, &*kernel), (2, waves, 1, "test"));
    assert_eq!((c.transcendental, c.packed_f32, c.valu, c.mfma), (3 * waves, waves, 6 * waves, 6 * waves));
    assert_eq!(c.mfma_passes, 3 * (4 + 16) * waves);
    assert_eq!(c.matrix_flops, 3 * (2 * 16 * 16 * 16 + 2 * 32 * 32 * 2) * waves);
    assert_eq!((c.barriers, c.waits, c.other), (2 * waves, 4 * waves, 7 * waves));
    assert_eq!((c.smem, c.smem_bytes, c.branches, c.salu), (2 * waves, 24 * waves, 3 * waves, 7 * waves));
    assert_eq!(c.details.expect("details").scratch_bytes, (8 + 4) * 64 * waves);
    assert_eq!(c.instructions, 33 * waves);
    assert_eq!((resources.threads, resources.scratch_bytes, resources.lds_bytes), (128, 16, 0));
    assert_eq!((resources.vgprs, resources.agprs, resources.waves_per_simd), (64, 64, 4));
    // Two waves each, sixteen on a compute unit.
    assert_eq!((resources.blocks_per_cu, blocks.len()), (8, 0));
    // No line table: all instructions are on one line without a name.
    assert_eq!((lines.len(), &lines[0].file, lines[0].line), (1, &None, 0));
    // Without details the same, but for what depends on addresses.
    let plain = rig.launch("test", 2, 128, &Args::new().push(data)).expect("runs");
    assert_eq!(plain, Counters { details: None, ..c });
}

const SOURCE: &str = "
KERNEL void f(const float *x, float *y, u32 *n) {
  __shared__ float t[64 * 33];
  float s = 0;
  for (u32 i = 0; i < 1 + BID % 3; i++)
    s += x[TID + 64 * i];
  t[TID * 33] = s;
  BARRIER();
  s = t[(TID ^ 5) * 33] + t[TID / 2 * 33];
  s = __builtin_amdgcn_exp2f(s);
  __hip_atomic_fetch_add(n, TID, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  y[64 * BID + TID] = s;
}";

/// Lines add up to the total; threads and sanitizers change nothing; a launch is counted like two halves of it.
#[test]
fn lines_add_up_whatever_the_threads() {
    for cpu in TARGETS {
        let image = crate::common::hip(cpu, "-O2", SOURCE);
        let mut first: Option<Profile> = None;
        for (threads, checks) in [(1, Checks::NONE), (2, Checks::NONE), (5, Checks::NONE), (2, Checks::all())]
        {
            let rig = Rig::new(options(cpu).threads(Some(threads)).sanitize(checks), &image);
            let (x, n) = (rig.upload("x", &[1f32; 256]), rig.upload("n", &[0u32]));
            let y = rig.upload("y", &vec![0f32; 64 * 90]);
            let got = profile(&rig, "f", 90, 64, &Args::new().push(x).push(y).push(n));
            let mut sum = Counters::default();
            got.lines.iter().for_each(|line| sum += line.counters);
            let (c, d) = (got.counters, got.counters.details.expect("details"));
            let details = Details {
                distinct_read_bytes: 0,
                distinct_written_bytes: 0,
                distinct_read_lines: 0,
                distinct_written_lines: 0,
                lines_in_flight: 0,
                ..d
            };
            assert_eq!(sum, Counters { workgroups: 0, waves: 0, details: Some(details), ..c });

            assert_eq!((d.distinct_read_bytes, d.distinct_read_lines), (3 * 256 + 4, 6 + 1));
            assert_eq!((d.distinct_written_bytes, d.distinct_written_lines), (90 * 256 + 4, 90 * 2 + 1));
            assert_eq!((d.global_read_lines, d.global_written_lines), (30 * (1 + 2 + 3) * 2, 90 * 2));
            assert_eq!((d.lds_conflict_clocks, c.barriers), (0, 90));
            let at = |line: u32| {
                let found = got.lines.iter().find(|l| l.line == line).expect("the line");
                assert!(found.file.as_ref().is_some_and(|file| file.ends_with("kernel.hip")));
                found.counters
            };
            assert_eq!(at(6).vmem_loads, 180);
            assert_eq!(at(10).transcendental, 90);
            assert_eq!(at(12).vmem_stores, 90);
            assert_eq!(at(12).details.expect("details").global_written_lines, 180);
            let first = first.get_or_insert_with(|| got.clone());
            assert_eq!(*first, got);

            let mut twice = got.clone();
            twice += got.clone();
            assert_eq!((twice.launches, twice.lines.len()), (2, got.lines.len()));
            assert_eq!(twice.counters.instructions, 2 * c.instructions);
            assert_eq!(twice.lines[0].counters.instructions, 2 * got.lines[0].counters.instructions);
        }
    }
}

/// Workgroups add up to the launch; counting them changes nothing, nor do threads and the order in which workgroups take turns.
#[test]
fn workgroups_add_up_to_the_launch() {
    for cpu in TARGETS {
        let image = crate::common::hip(cpu, "-O2", SOURCE);
        let run = |options: MachineOptions| {
            let rig = Rig::new(options, &image);
            let (x, n) = (rig.upload("x", &[1f32; 256]), rig.upload("n", &[0u32]));
            let y = rig.upload("y", &vec![0f32; 64 * 90]);
            profile(&rig, "f", 90, 64, &Args::new().push(x).push(y).push(n))
        };
        let whole = run(options(cpu));
        for (threads, checks) in [(1, Checks::NONE), (2, Checks::NONE), (5, Checks::all())] {
            let got = run(options(cpu).threads(Some(threads)).sanitize(checks).blocks(true));
            assert_eq!(Profile { blocks: vec![], ..got.clone() }, whole);
            assert_eq!(got.blocks.len(), 90);
            let mut sum = Counters::default();
            for (i, block) in got.blocks.iter().enumerate() {
                sum += *block;
                let (d, rows) = (block.details.expect("details"), 1 + i as u64 % 3);
                assert_eq!((block.workgroups, block.waves, block.transcendental), (1, 1, 1), "{i}");
                assert_eq!((block.vmem_loads, d.global_read_lines), (rows, 2 * rows), "{i}");
                assert_eq!(
                    (d.distinct_read_bytes, d.distinct_written_bytes),
                    (256 * rows + 4, 256 + 4),
                    "{i}"
                );
            }
            let (total, details) = (got.counters.details.expect("details"), sum.details.expect("details"));
            let details = Details {
                distinct_read_bytes: total.distinct_read_bytes,
                distinct_written_bytes: total.distinct_written_bytes,
                distinct_read_lines: total.distinct_read_lines,
                distinct_written_lines: total.distinct_written_lines,
                ..details
            };
            assert_eq!(Counters { details: Some(details), ..sum }, got.counters);
            let mut twice = got.clone();
            twice += got.clone();
            assert_eq!(twice.blocks, [got.blocks.clone(), got.blocks].concat());
        }
    }
}

/// A kernel that does nothing is counted, not executed: the largest grid takes no time.
#[test]
fn an_empty_kernel_has_waves_and_nothing_else() {
    let image = assemble(&Assembly { cpu: "gfx942", body: "", ..Assembly::default() });
    let rig = Rig::new(options("gfx942"), &image);
    let count = |blocks| rig.launch("test", blocks, 128, &Args::new().push(0u64)).unwrap();
    // As many threads as a dimension has.
    let n = u32::MAX / 128;
    let (few, many) = (count(3), count(n));
    assert_eq!((few.workgroups, few.waves, few.instructions), (3, 6, 6));
    let n = u64::from(n);
    assert_eq!((many.workgroups, many.waves, many.instructions), (n, 2 * n, 2 * n));
}
