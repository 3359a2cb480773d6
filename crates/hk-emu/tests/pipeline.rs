//! Sanitizers of one wave's pipeline: results that no wait has released, dependencies that need wait states.

use crate::common::{Args, Assembly, Random, Rig, assemble, hip, link, sanitized, text};
use hk_emu::{Check, Checks, Counters, Fault, Mutation, Site};

/// A report of `check`: what is wrong, where, and what it depends on.
#[track_caller]
fn report(check: Check, result: Result<Counters, Fault>) -> (String, Site, Site) {
    match result.expect_err("a report") {
        Fault::Sanitizer { site, check: found, what, other, .. } => {
            assert_eq!(found, check, "{what}");
            (what, *site, *other.expect("the earlier instruction"))
        }
        fault => panic!("another fault: {fault}"),
    }
}

/// Snippets of one wave each in one kernel: s[4:5] is a buffer of zeros but for its first word, s[8:11] its resource,
/// v1 = 16 * lane, v[10:11] = v1 + the buffer.
struct Snippets {
    cpu: &'static str,
    check: Check,
    image: Vec<u8>,
}

impl Snippets {
    fn new<'a>(cpu: &'static str, check: Check, snippets: impl IntoIterator<Item = &'a str>) -> Snippets {
        let mut body = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32 v1, 4, v0\ns_mov_b32 m0, 0\ns_waitcnt lgkmcnt(0)
            s_load_dword s20, s[4:5], 0x0\ns_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_mov_b32 s10, 0x8000\ns_mov_b32 s11, 0x27000
            v_mov_b32 v11, s5\nv_add_co_u32 v10, vcc, s4, v1\ns_waitcnt lgkmcnt(0)\n"
            .to_owned();
        let mut rest = String::new();
        for (i, snippet) in snippets.into_iter().enumerate() {
            body += &format!("s_cmp_eq_u32 s20, {i}\ns_cbranch_scc1 snippet{i}\n");
            rest += &format!("snippet{i}:\ns_nop 15\ns_nop 15\n{snippet}\ns_nop 15\ns_nop 15\ns_endpgm\n");
        }
        body += &rest;
        let image = assemble(&Assembly { cpu, body: &body, lds: 4096, ..Assembly::default() });
        Snippets { cpu, check, image }
    }

    fn run(&self, i: usize) -> Result<Counters, Fault> {
        let rig = Rig::new(sanitized(self.cpu, self.check), &self.image);
        let mut data = vec![0; 8192];
        data[0] = i as u32;
        let buffer = rig.upload("data", &data);
        rig.launch("test", 1, 64, &Args::new().push(buffer))
    }
}

#[test]
fn waits_prove_what_they_must() {
    let load = |register: u32| format!("global_load_dword v{register}, v1, s[4:5]\n");
    let stores = |n: usize| "global_store_dword v1, v0, s[4:5]\n".repeat(n);
    let clean = [
        load(2) + "s_waitcnt vmcnt(0)\nv_add_u32 v3, v2, v2",
        // In order: two may still be under way.
        load(2) + &load(3) + &load(4) + "s_waitcnt vmcnt(2)\nv_mov_b32 v5, v2",
        load(2) + &stores(1) + "s_waitcnt vmcnt(1)\nv_mov_b32 v5, v2",
        // Stored data is read at once.
        "global_store_dword v1, v0, s[4:5]\nv_mov_b32 v0, 0\nds_write_b32 v1, v3\nv_mov_b32 v3, 0".to_owned(),
        // LDS operations are in order among themselves, whatever scalar loads do.
        "ds_read_b32 v2, v1\nds_read_b32 v3, v1\ns_load_dword s6, s[4:5], 0\ns_waitcnt lgkmcnt(1)\nv_mov_b32 v5, v2".to_owned(),
        "s_load_dword s6, s[4:5], 0\ns_load_dword s7, s[4:5], 4\ns_waitcnt lgkmcnt(0)\ns_add_u32 s6, s6, s7".to_owned(),
        "flat_load_dword v2, v[10:11]\ns_waitcnt vmcnt(0) lgkmcnt(0)\nv_mov_b32 v5, v2".to_owned(),
        "flat_load_dword v2, v[10:11]\ns_waitcnt vmcnt(0)\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v5, v2".to_owned(),
        load(2) + "flat_load_dword v4, v[10:11]\n" + &load(3) + "s_waitcnt vmcnt(1)\nv_mov_b32 v5, v2",
        // The later one wins, also for halves.
        load(2) + &load(2) + "s_waitcnt vmcnt(0)\nv_mov_b32 v5, v2",
        "global_load_short_d16 v2, v1, s[4:5]\nglobal_load_short_d16_hi v2, v1, s[4:5] offset:2\ns_waitcnt vmcnt(0)\nv_mov_b32 v5, v2".to_owned(),
        // The counter is full: the first of 64 has returned.
        load(2) + &stores(63) + "v_mov_b32 v5, v2",
        "ds_read_b32 v2, v1\n".to_owned() + &"ds_write_b32 v1, v3\n".repeat(15) + "v_mov_b32 v5, v2",
        // To LDS: no register, and M0 is read at once.
        "buffer_load_dword v1, s[8:11], 0 offen lds\ns_mov_b32 m0, 64\nv_mov_b32 v1, 0".to_owned(),
        load(2) + "s_endpgm",
    ];
    let snippets = Snippets::new("gfx942", Check::Waits, clean.iter().map(String::as_str));
    for (i, body) in clean.iter().enumerate() {
        snippets.run(i).unwrap_or_else(|fault| panic!("{body}: {fault}"));
    }
    let broken = [
        (load(2) + "v_add_u32 v3, v2, v2", "v2 is read", "needs s_waitcnt vmcnt(0), none came before"),
        (load(2) + "v_mov_b32 v2, 0", "v2 is overwritten", "vmcnt(0)"),
        (load(2) + &load(3) + "s_waitcnt vmcnt(1)\nv_mov_b32 v5, v3", "v3 is read", "needs s_waitcnt vmcnt(0), the last wait left vmcnt(1)"),
        (load(2) + &load(3) + &load(4) + "s_waitcnt vmcnt(3)\nv_mov_b32 v5, v2", "v2 is read", "needs s_waitcnt vmcnt(2) or less, the last wait left vmcnt(3)"),
        (load(2) + &stores(62) + "v_mov_b32 v5, v2", "v2 is read", "vmcnt(62) or less"),
        ("s_load_dword s6, s[4:5], 0\ns_load_dword s7, s[4:5], 4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s12, s6".to_owned(), "s6 is read", "lgkmcnt(0), the last wait left lgkmcnt(1)"),
        ("s_load_dwordx2 s[6:7], s[4:5], 0\nglobal_load_dword v2, v1, s[6:7]".to_owned(), "s6 is read", "lgkmcnt(0)"),
        ("s_load_dword s6, s[4:5], 0\ns_load_dword s6, s[4:5], 4".to_owned(), "s6 is overwritten", "lgkmcnt(0)"),
        ("s_load_dwordx2 vcc, s[4:5], 0\ns_cbranch_vccz next\nnext:".to_owned(), "vcc is read", "lgkmcnt(0)"),
        ("ds_read_b32 v2, v1\nds_read_b32 v3, v1\ns_load_dword s6, s[4:5], 0\ns_waitcnt lgkmcnt(1)\nv_mov_b32 v5, v3".to_owned(), "v3 is read", "lgkmcnt(0)"),
        ("ds_read2_b32 v[2:3], v1 offset1:1\nv_mov_b32 v5, v3".to_owned(), "v3 is read", "lgkmcnt(0)"),
        ("ds_bpermute_b32 v2, v0, v0\nv_mov_b32 v5, v2".to_owned(), "v2 is read", "lgkmcnt(0)"),
        ("flat_load_dword v2, v[10:11]\ns_waitcnt vmcnt(0)\nv_mov_b32 v5, v2".to_owned(), "v2 is read", "needs s_waitcnt lgkmcnt(0)"),
        ("flat_load_dword v2, v[10:11]\nv_mov_b32 v5, v2".to_owned(), "v2 is read", "s_waitcnt vmcnt(0), none came before and s_waitcnt lgkmcnt(0)"),
        // FLAT may leave the counter before the load.
        (load(2) + "flat_load_dword v4, v[10:11]\ns_waitcnt vmcnt(1)\nv_mov_b32 v5, v2", "v2 is read", "vmcnt(0), the last wait left vmcnt(1)"),
        (load(2) + "ds_read_b32 v2, v1", "v2 is overwritten", "vmcnt(0)"),
        ("global_atomic_add v2, v1, v0, s[4:5] sc0\nglobal_store_dword v1, v2, s[4:5]".to_owned(), "v2 is read", "vmcnt(0)"),
        ("s_memtime s[6:7]\ns_add_u32 s6, s6, 1".to_owned(), "s6 is read", "lgkmcnt(0)"),
        (load(2) + "v_mfma_f32_4x4x1_16b_f32 a[0:3], v2, v0, a[0:3]", "v2 is read", "vmcnt(0)"),
        ("global_load_dword a4, v1, s[4:5]\nv_accvgpr_read_b32 v2, a4".to_owned(), "a4 is read", "vmcnt(0)"),
    ];
    let snippets = Snippets::new("gfx950", Check::Waits, broken.iter().map(|(body, ..)| body.as_str()));
    for (i, (body, how, needs)) in broken.iter().enumerate() {
        let (what, _, _) = report(Check::Waits, snippets.run(i));
        assert!(what.starts_with(how) && what.contains(needs), "{body}\n{what}");
    }
    let (what, site, other) = report(Check::Waits, snippets.run(0));
    let load = "global_load_dword v2, v1, s[4:5]";
    assert_eq!((&*site.instruction, &*other.instruction), ("v_add_u32_e32 v3, v2, v2", load));
    assert!(what.contains(&format!("while {load} at {:#x} may still write it", other.pc)), "{what}");
}

/// Vector and scalar loads, LDS reduction, and a tiled product: waits of all kinds.
const KERNELS: &str = r#"
KERNEL void reduce(const float *x, float *y, int n) {
  __shared__ float part[256];
  float sum = 0;
  for (int i = TID; i < n; i += 256) sum += x[BID * n + i];
  part[TID] = sum;
  BARRIER();
  for (int half = 128; half > 0; half /= 2) {
    if (TID < half) part[TID] += part[TID + half];
    BARRIER();
  }
  if (TID == 0) y[BID] = part[0];
}
KERNEL void product(const float *a, const float *b, float *c, int n) {
  __shared__ float ta[16][17], tb[16][17];
  int row = TID / 16, col = TID % 16, tiles = n / 16, ti = BID / tiles * 16, tj = BID % tiles * 16;
  float sum = 0;
  for (int k = 0; k < n; k += 16) {
    ta[row][col] = a[(ti + row) * n + k + col];
    tb[row][col] = b[(k + row) * n + tj + col];
    BARRIER();
    for (int i = 0; i < 16; i++) sum += ta[row][i] * tb[i][col];
    BARRIER();
  }
  c[(ti + row) * n + tj + col] = sum;
}
struct Table { float scale[8]; int count; };
KERNEL void scaled(const Table *t, const float *x, float *y, int n) {
  float s = 0;
  for (int i = 0; i < t->count; i++) s += t->scale[i] * x[i * n + TID];
  y[TID] = s;
}
"#;

/// Runs a kernel of [`KERNELS`].
fn run_kernel(rig: &Rig, kernel: &str) -> Result<Counters, Fault> {
    let mut random = Random(5);
    let data: Vec<f32> = (0..2048).map(|_| random.unit()).collect();
    let (x, y) = (rig.upload("x", &data), rig.upload("y", &data));
    let z = rig.upload("z", &data);
    match kernel {
        "reduce" => rig.launch(kernel, 2, 256, &Args::new().push(x).push(y).push(1000u32)),
        "product" => rig.launch(kernel, 4, 256, &Args::new().push(x).push(y).push(z).push(32u32)),
        _ => {
            let table: Vec<u32> = (0..8).map(|i| (i as f32).to_bits()).chain([8]).collect();
            let table = rig.upload("table", &table);
            rig.launch(kernel, 1, 64, &Args::new().push(table).push(x).push(y).push(64u32))
        }
    }
}

/// Deletes every wait of compiled kernels, one after the other.
#[test]
fn every_deleted_wait_is_found() {
    for cpu in ["gfx942", "gfx950"] {
        let image = hip(cpu, "-O3", KERNELS);
        let rig = Rig::new(sanitized(cpu, Check::Waits), &image);
        let (mut found, mut harmless) = (0, 0);
        for kernel in ["reduce", "product", "scaled"] {
            run_kernel(&rig, kernel).unwrap_or_else(|fault| panic!("{cpu} {kernel}: {fault}"));
            for candidate in rig.machine.candidates(&rig.module, kernel).expect("the kernel is there") {
                let wait = candidate.instruction.starts_with("s_waitcnt");
                if candidate.mutant.mutation != Mutation::Delete || !wait {
                    continue;
                }
                let checks = Checks::from(Check::Waits) | Check::Lds;
                let options = sanitized(cpu, checks).mutant(Some(candidate.mutant.clone()));
                match run_kernel(&Rig::new(options, &image), kernel) {
                    Err(Fault::Sanitizer { site, .. }) => {
                        assert!(site.source.is_some_and(|s| s.contains("kernel.hip:")), "{candidate:?}");
                        found += 1;
                    }
                    Err(fault) => panic!("{cpu} {candidate:?}: {fault}"),
                    Ok(_) => {
                        assert_eq!(candidate.instruction, "s_waitcnt lgkmcnt(0)", "{cpu} {candidate:?}");
                        harmless += 1;
                    }
                }
            }
        }
        // Harmless are those before the last seven barriers of the reduction, when one wave reads what it wrote
        // itself, in order, and the one before the second barrier of the product, where all reads have been waited for.
        assert_eq!(harmless, 8, "{cpu}");
        assert!(found >= 20, "{cpu}: {found}");
    }
}

/// Pairs of instructions and the wait states they need on gfx942 and on gfx950, from the ISA manual's tables.
const PAIRS: &[(&str, &str, [u32; 2])] = &[
    ("v_readfirstlane_b32 s12, v0", "buffer_load_dword v2, v1, s[8:11], s12 offen", [5, 5]),
    ("v_readfirstlane_b32 s6, v0", "v_readlane_b32 s7, v0, s6", [4, 4]),
    ("v_cmp_eq_u32 vcc, 0, v0", "v_div_fmas_f32 v2, v3, v4, v5", [4, 4]),
    // The hardware checks these, whatever compilers do.
    ("v_cmp_eq_u32 vcc, 0, v0", "v_cndmask_b32 v2, v3, v4, vcc", [0, 0]),
    ("s_mov_b32 m0, 64", "buffer_load_dword v1, s[8:11], 0 offen lds", [0, 0]),
    ("v_cmpx_eq_u32 vcc, v0, v0", "v_mov_b32_dpp v2, v3 row_shr:1", [5, 5]),
    ("v_cmpx_eq_u32 vcc, v0, v0", "v_readlane_b32 s6, v3, 0", [4, 4]),
    ("v_cmpx_eq_u32 vcc, v0, v0", "v_mfma_f32_4x4x1_16b_f32 a[0:3], v2, v3, a[0:3]", [4, 4]),
    ("v_mov_b32 v3, v0", "v_mov_b32_dpp v2, v3 row_shr:1", [2, 2]),
    ("v_mov_b32 v3, v0", "v_add_u32_dpp v2, v4, v3 row_shr:1", [0, 0]),
    ("v_mov_b32 v3, v0", "v_readfirstlane_b32 s6, v3", [1, 1]),
    ("v_exp_f32 v3, v0", "v_add_f32 v2, v3, v3", [1, 1]),
    ("v_add_u32_sdwa v3, v0, v0 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE", "v_mov_b32 v2, v3", [1, 1]),
    ("v_dot2_f32_f16 v3, v0, v0, v3", "v_mov_b32 v2, v3", [3, 3]),
    ("v_dot2_f32_f16 v3, v0, v0, v3", "v_dot2_f32_f16 v2, v3, v0, v0", [3, 3]),
    ("v_dot2_f32_f16 v3, v0, v0, v3", "v_dot2_f32_f16 v3, v0, v0, v3", [0, 0]),
    ("global_store_dwordx4 v1, v[4:7], s[4:5]", "v_mov_b32 v6, 0", [2, 2]),
    ("global_store_dwordx2 v1, v[4:5], s[4:5]", "v_mov_b32 v4, 0", [0, 0]),
    ("s_mov_b32 m0, 0", "ds_read_addtid_b32 v2", [1, 1]),
    ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 15", "s_getreg_b32 s6, hwreg(HW_REG_MODE)", [2, 2]),
    ("v_mov_b32 v3, v0", "v_mfma_f32_4x4x1_16b_f32 a[0:3], v2, v3, a[0:3]", [2, 2]),
    // Results of matrix instructions, by passes: read.
    ("v_mfma_f32_4x4x4_16b_f16 a[0:3], v[2:3], v[4:5], a[0:3]", "v_accvgpr_read_b32 v2, a3", [5, 5]),
    ("v_mfma_f32_16x16x16_f16 a[0:3], v[2:3], v[4:5], a[0:3]", "v_accvgpr_read_b32 v2, a3", [7, 8]),
    (
        "v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], a[0:15]",
        "global_store_dword v1, a15, s[4:5]",
        [11, 12],
    ),
    ("v_mfma_f32_32x32x4_2b_f16 a[0:31], v[2:3], v[4:5], a[0:31]", "ds_write_b32 v1, a31", [19, 20]),
    ("v_mfma_f32_16x16x4_f32 a[0:3], v2, v3, a[0:3]", "v_accvgpr_read_b32 v2, a3", [10, 10]),
    ("v_mfma_f64_4x4x4_4b_f64 v[20:21], v[2:3], v[4:5], v[20:21]", "v_mov_b32 v2, v21", [6, 6]),
    (
        "v_mfma_f64_4x4x4_4b_f64 v[20:21], v[2:3], v[4:5], v[20:21]",
        "global_store_dword v1, v21, s[4:5]",
        [9, 9],
    ),
    ("v_mfma_f64_16x16x4_f64 v[20:27], v[2:3], v[4:5], v[20:27]", "v_mov_b32 v2, v21", [11, 19]),
    (
        "v_mfma_f64_16x16x4_f64 v[20:27], v[2:3], v[4:5], v[20:27]",
        "global_store_dword v1, v21, s[4:5]",
        [18, 18],
    ),
    // ... overwritten, also the accumulator that was read.
    ("v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], v[30:33]", "v_mov_b32 v20, 0", [7, 8]),
    ("v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], v[30:33]", "v_mov_b32 v30, 0", [3, 3]),
    (
        "v_mfma_f32_32x32x8_f16 v[20:35], v[2:3], v[4:5], v[40:55]",
        "global_load_dword v40, v1, s[4:5]",
        [7, 7],
    ),
    ("v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], v[30:33]", "v_mov_b32 v2, 0", [0, 0]),
    // ... as a factor or accumulator of the next.
    (
        "v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], v[20:23]",
        "v_mfma_f32_16x16x16_f16 v[30:33], v[20:21], v[4:5], v[30:33]",
        [7, 8],
    ),
    (
        "v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], v[20:23]",
        "v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], v[20:23]",
        [0, 0],
    ),
    (
        "v_mfma_f32_4x4x4_16b_f16 v[20:23], v[2:3], v[4:5], v[20:23]",
        "v_mfma_f32_4x4x4_16b_f16 v[20:23], v[2:3], v[4:5], v[20:23]",
        [2, 2],
    ),
    (
        "v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], v[20:23]",
        "v_mfma_f32_16x16x16_f16 v[30:33], v[2:3], v[4:5], v[22:25]",
        [5, 6],
    ),
    (
        "v_mfma_f32_16x16x4_f32 v[20:23], v2, v3, v[20:23]",
        "v_mfma_f32_16x16x4_f32 v[30:33], v2, v3, v[22:25]",
        [8, 8],
    ),
    (
        "v_mfma_f64_4x4x4_4b_f64 v[20:21], v[2:3], v[4:5], v[20:21]",
        "v_fma_f64 v[2:3], v[4:5], v[6:7], v[8:9]",
        [2, 2],
    ),
];

/// So many wait states.
fn states(n: u32) -> String {
    match n {
        0 => String::new(),
        1..=16 => format!("s_nop {}\n", n - 1),
        _ => format!("s_nop 15\ns_nop {}\n", n - 17),
    }
}

#[test]
fn hazards_need_the_published_wait_states() {
    for (cpu, column) in [("gfx942", 0), ("gfx950", 1)] {
        let body = |n: u32, pair: &(&str, &str, [u32; 2])| format!("{}\n{}{}", pair.0, states(n), pair.1);
        let bodies: Vec<String> = PAIRS
            .iter()
            .flat_map(|pair| [body(pair.2[column], pair), body(pair.2[column].saturating_sub(1), pair)])
            .collect();
        let snippets = Snippets::new(cpu, Check::Hazards, bodies.iter().map(String::as_str));
        for (i, (first, second, needs)) in PAIRS.iter().enumerate() {
            let done = snippets.run(2 * i);
            done.unwrap_or_else(|fault| panic!("{cpu}: {first}; {second}: {fault}"));
            let needs = needs[column];
            if needs != 0 {
                let (what, site, other) = report(Check::Hazards, snippets.run(2 * i + 1));
                let states =
                    format!("needs {needs} wait states after {} at {:#x}", other.instruction, other.pc);
                assert!(
                    what.starts_with(&states) && what.contains(&format!(", has {} (", needs - 1)),
                    "{what}"
                );
                assert!(site.pc > other.pc && site.pc - other.pc <= 32, "{what}");
            }
        }
    }
    let long = "v_mfma_f32_32x32x4_2b_f16 a[0:31], v[2:3], v[4:5], a[0:31]";
    let other = "v_mfma_f32_32x32x8_f16 v[40:55], v[2:3], v[4:5], v[40:55]";
    let read = "v_accvgpr_read_b32 v2, a3";
    let bodies = [
        format!("{long}\ns_nop 3\n{read}"),
        // The next one starts after the sixteen passes of the first.
        format!("{long}\n{other}\ns_nop 2\n{read}"),
        format!("{long}\n{other}\ns_nop 1\n{read}"),
    ];
    let snippets = Snippets::new("gfx942", Check::Hazards, bodies.iter().map(String::as_str));
    let (what, ..) = report(Check::Hazards, snippets.run(0));
    assert!(what.starts_with(&format!("needs 19 wait states after {long} at 0x")), "{what}");
    assert!(what.ends_with("through a3, has 4 (MFMA result, read; manual, llvm)"), "{what}");
    snippets.run(1).unwrap_or_else(|fault| panic!("{fault}"));
    let (what, ..) = report(Check::Hazards, snippets.run(2));
    assert!(what.contains("needs 19 wait states") && what.contains(", has 18 ("), "{what}");
}

/// A product whose results and factors are needed soon.
const MATRIX: &str = r#"
typedef f16 half4 __attribute__((ext_vector_type(4)));
typedef float float4_ __attribute__((ext_vector_type(4)));
KERNEL void chain(const half4 *a, const half4 *b, float4_ *c) {
  float4_ sum = {0, 0, 0, 0};
  sum = __builtin_amdgcn_mfma_f32_16x16x16f16(a[TID], b[TID], sum, 0, 0, 0);
  half4 next = {(f16)sum[0], (f16)sum[1], (f16)sum[2], (f16)sum[3]};
  sum = __builtin_amdgcn_mfma_f32_16x16x16f16(next, b[TID], sum, 0, 0, 0);
  for (int i = 0; i < 4; i++) {
    sum = __builtin_amdgcn_mfma_f32_16x16x16f16(a[TID], b[TID], sum, 0, 0, 0);
    sum[0] *= 0.5f;
  }
  c[TID] = sum;
}
"#;

fn run_matrix(rig: &Rig) -> Result<Counters, Fault> {
    let [a, b, c] = ["a", "b", "c"].map(|name| rig.upload(name, &vec![0x3C00_3C00u32; 256]));
    rig.launch("chain", 1, 64, &Args::new().push(a).push(b).push(c))
}

/// Removes every `s_nop` that the compiler put in, one after the other.
#[test]
fn every_removed_nop_is_found() {
    for (cpu, level) in [("gfx942", "-O3"), ("gfx950", "-O3"), ("gfx942", "-O0"), ("gfx950", "-O0")] {
        let rig = Rig::new(sanitized(cpu, Check::Hazards), &hip(cpu, level, MATRIX));
        run_matrix(&rig).unwrap_or_else(|fault| panic!("{cpu} {level}: {fault}"));
        if level == "-O0" {
            continue;
        }
        let source = text(cpu, level, MATRIX);
        let lines: Vec<&str> = source.lines().collect();
        let nops: Vec<usize> = (0..lines.len()).filter(|i| lines[*i].trim().starts_with("s_nop")).collect();
        assert!(nops.len() >= 3, "{cpu}: {nops:?}");
        for nop in nops {
            let mut without = lines.clone();
            without.remove(nop);
            let rig = Rig::new(sanitized(cpu, Check::Hazards), &link(cpu, &(without.join("\n") + "\n")));
            let (what, site, _) = report(Check::Hazards, run_matrix(&rig));
            assert!(
                site.source.is_some_and(|s| s.contains("kernel.hip:")),
                "{cpu} without line {nop}: {what}"
            );
        }
    }
}
