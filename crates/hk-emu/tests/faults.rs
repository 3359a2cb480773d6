//! What kernels and hosts do wrong, and how it is reported. Nothing here may panic, hang or reach host memory.

use crate::common::{Args, Assembly, Random, Rig, assemble, hip, options, sanitized};
use hk_emu::{Access, Check, Dispatch, Fault, LoadError, Machine, MachineOptions, MemoryProblem, Space};
use proptest::prelude::*;

#[test]
fn one_element_past_the_buffer_is_named() {
    let rig = Rig::hip(
        "gfx942",
        "KERNEL void past(const float *x, float *y) {\n  int i = BID * 64 + TID;\n  y[i] = x[i + 1];\n}",
    );
    let (x, y) = (rig.upload("input x", &[1f32; 128]), rig.upload("output y", &[0f32; 128]));
    let fault = rig.launch("past", 2, 64, &Args::new().push(x).push(y)).unwrap_err();
    let Fault::Memory { site, problem, access, space, address, bytes, lane, .. } = &fault else {
        panic!("{fault}")
    };
    assert_eq!((*problem, *access, *space), (MemoryProblem::OutOfBounds, Access::Read, Space::Global));
    assert_eq!((*address, *bytes, *lane), (x + 512, 4, Some(63)));
    assert_eq!((site.workgroup, site.wave), ([1, 0, 0], 0));
    assert!(site.source.as_ref().is_some_and(|s| s.ends_with("kernel.hip:3")), "{site}");
    let text = fault.to_string();
    for part in [
        "out-of-bounds read of 4 bytes",
        "kernel past",
        "global_load_dword",
        "lane 63",
        "0 bytes past the end",
        "input x",
        "512 bytes",
    ] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
}

#[test]
fn freed_null_and_wild_pointers_are_reports() {
    let rig = Rig::hip("gfx942", "KERNEL void write(float *y) { y[TID] = 1; }");
    let y = rig.upload("late", &[0f32; 64]);
    rig.machine.free(y).unwrap();
    let fault = rig.launch("write", 1, 64, &Args::new().push(y)).unwrap_err();
    assert!(
        matches!(&fault, Fault::Memory { problem: MemoryProblem::UseAfterFree, access: Access::Write, .. }),
        "{fault}"
    );
    assert!(fault.to_string().contains("freed allocation \"late\""), "{fault}");
    for wild in [0u64, 4, 0xDEAD_BEEF_0000, u64::MAX - 3, 1 << 63, 0x0001_0000_0000_0000] {
        let fault = rig.launch("write", 1, 64, &Args::new().push(wild)).unwrap_err();
        assert!(
            matches!(fault, Fault::Memory { problem: MemoryProblem::OutOfBounds, .. }),
            "{wild:#x}: {fault}"
        );
    }
}

/// Stores the dwords `stored` of an aligned scalar load from a buffer of 12 bytes.
fn load_beyond_12_bytes(
    options: MachineOptions,
    load: &str,
    stored: std::ops::RangeInclusive<u32>,
) -> Result<Vec<u32>, Fault> {
    let mut body = format!(
        "  s_load_dwordx2 s[8:9], s[0:1], 0x0\n  v_mov_b32 v0, 0\n  s_waitcnt lgkmcnt(0)\n  s_load_dwordx4 s[4:7], s[8:9], 0x0\n  s_waitcnt lgkmcnt(0)\n  {load}\n  s_waitcnt lgkmcnt(0)\n"
    );
    for i in stored {
        body +=
            &format!("  v_mov_b32 v1, s{}\n  global_store_dword v0, v1, s[6:7] offset:{}\n", 16 + i, 4 * i);
    }
    let image = assemble(&Assembly { body: &body, ..Assembly::default() });
    let rig = Rig::new(options, &image);
    let (from, to) = (rig.upload("from", &[1u32, 2, 3]), rig.upload("to", &[9u32; 8]));
    assert_eq!(from % 32, 0);
    let pointers = rig.upload("pointers", &[from, to]);
    rig.launch("test", 1, 1, &Args::new().push(pointers))?;
    Ok(rig.download(to, 8))
}

#[test]
fn widened_scalar_loads_may_end_beyond_the_buffer() {
    let usual = || options("gfx942");
    let x4 = "s_load_dwordx4 s[16:19], s[4:5], 0x0";
    let x8 = "s_load_dwordx8 s[16:23], s[4:5], 0x0";
    assert_eq!(load_beyond_12_bytes(usual(), x4, 0..=3).unwrap(), [1, 2, 3, 0, 9, 9, 9, 9]);
    assert_eq!(load_beyond_12_bytes(usual(), x8, 0..=7).unwrap(), [1, 2, 3, 0, 0, 0, 0, 0]);
    for beyond in [
        "s_load_dwordx4 s[16:19], s[4:5], 0x4",
        "s_load_dwordx4 s[16:19], s[4:5], 0x10",
        "s_load_dwordx2 s[16:17], s[4:5], 0x8",
        "s_load_dwordx16 s[16:31], s[4:5], 0x0",
        "s_load_dword s16, s[4:5], 0xc",
    ] {
        let fault = load_beyond_12_bytes(usual(), beyond, 0..=0).unwrap_err();
        assert!(fault.to_string().contains("\"from\""), "{beyond}: {fault}");
    }
    // What lies beyond has no value.
    let strict = || sanitized("gfx942", Check::Uninit);
    for load in [x4, x8] {
        assert!(load_beyond_12_bytes(strict(), load, 0..=2).is_ok());
        let fault = load_beyond_12_bytes(strict(), load, 3..=3).unwrap_err();
        assert!(fault.to_string().contains("depends on what was never written"), "{fault}");
    }
}

#[test]
fn arguments_that_a_widened_load_reads_past_are_no_fault() {
    let source =
        "KERNEL void k(unsigned *v, unsigned x, unsigned y, unsigned z) { v[0] = x; v[1] = y; v[2] = z; }";
    for cpu in ["gfx942", "gfx950"] {
        let rig = Rig::hip(cpu, source);
        let out = rig.upload("out", &[0u32; 3]);
        rig.launch("k", 1, 1, &Args::new().push(out).push(1u32).push(2u32).push(3u32)).unwrap();
        assert_eq!(rig.download::<u32>(out, 3), [1, 2, 3]);
    }
}

#[test]
fn misaligned_accesses_are_faults_unless_allowed() {
    let source = "KERNEL void read(const int *x, int *y) { y[TID] = x[TID]; }";
    let image = hip("gfx942", "-O3", source);
    for allowed in [false, true] {
        let rig = Rig::new(options("gfx942").allow_misaligned(allowed), &image);
        let bytes: Vec<u8> = (0..=255).chain(0..=15).collect();
        let (x, y) = (rig.upload("x", &bytes), rig.upload("y", &[0u32; 64]));
        let result = rig.launch("read", 1, 64, &Args::new().push(x + 1).push(y));
        if allowed {
            result.unwrap();
            let out: Vec<u32> = rig.download(y, 64);
            assert_eq!(out[1], u32::from_le_bytes([5, 6, 7, 8]));
        } else {
            let fault = result.unwrap_err();
            assert!(
                matches!(fault, Fault::Memory { problem: MemoryProblem::Misaligned, lane: Some(0), .. }),
                "{fault}"
            );
        }
    }
}

#[test]
fn code_and_constants_cannot_be_written() {
    let body = "  s_getpc_b64 s[4:5]\n  v_mov_b32 v1, 0\n  global_store_dword v1, v1, s[4:5]";
    let rig = Rig::new(options("gfx942"), &assemble(&Assembly { body, ..Assembly::default() }));
    let fault = rig.launch("test", 1, 64, &Args::new().push(0u64)).unwrap_err();
    assert!(matches!(fault, Fault::Memory { problem: MemoryProblem::ReadOnly, .. }), "{fault}");
}

#[test]
fn lds_and_private_memory_have_bounds() {
    let lds = "  v_mov_b32 v1, 0x7c\n  ds_read_b64 v[2:3], v1";
    let rig =
        Rig::new(options("gfx942"), &assemble(&Assembly { body: lds, lds: 128, ..Assembly::default() }));
    let fault = rig.launch("test", 1, 64, &Args::new().push(0u64)).unwrap_err();
    assert!(
        matches!(fault, Fault::Memory { space: Space::Lds, address: 0x7C, bytes: 8, lane: Some(0), .. }),
        "{fault}"
    );

    let scratch = "  s_mov_b32 s8, 60\n  scratch_store_dwordx2 off, v[2:3], s8";
    let asm = Assembly {
        body: scratch,
        scratch: 64,
        directives: ".amdhsa_enable_private_segment 1",
        ..Assembly::default()
    };
    let rig = Rig::new(options("gfx942"), &assemble(&asm));
    let fault = rig.launch("test", 1, 64, &Args::new().push(0u64)).unwrap_err();
    assert!(matches!(fault, Fault::Memory { space: Space::Private, address: 60, .. }), "{fault}");
}

#[test]
fn endless_loops_end() {
    let rig = Rig::new(
        options("gfx942").instruction_budget(Some(100_000)),
        &assemble(&Assembly { body: ".Lx:\n  s_branch .Lx", ..Assembly::default() }),
    );
    let fault = rig.launch("test", 8, 256, &Args::new().push(0u64)).unwrap_err();
    assert!(matches!(fault, Fault::Budget { limit: 100_000, .. }), "{fault}");
    // A wait for a flag that is never set, with sleeps in between.
    let body = "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  s_waitcnt lgkmcnt(0)\n.Lw:\n  s_sleep 1\n  s_load_dword s6, s[4:5], 0x0\n  s_waitcnt lgkmcnt(0)\n  s_cmp_eq_u32 s6, 0\n  s_cbranch_scc1 .Lw";
    let rig = Rig::new(
        options("gfx942").instruction_budget(Some(20_000)),
        &assemble(&Assembly { body, ..Assembly::default() }),
    );
    let flag = rig.upload("flag", &[0u32]);
    let fault = rig.launch("test", 4, 64, &Args::new().push(flag)).unwrap_err();
    assert!(matches!(fault, Fault::Sanitizer { check: Check::Barriers, .. }), "{fault}");
}

#[test]
fn traps_unknown_words_and_missing_semantics_are_named() {
    let run = |body: &str| {
        let rig = Rig::new(options("gfx942"), &assemble(&Assembly { body, ..Assembly::default() }));
        rig.launch("test", 1, 64, &Args::new().push(0u64)).unwrap_err()
    };
    assert!(matches!(run("  s_trap 2"), Fault::Trap { id: 2, .. }));
    let fault = run("  .long 0xffffffff");
    assert!(
        matches!(&fault, Fault::UnknownInstruction { site, .. } if site.pc % 4 == 0 && site.kernel == "test"),
        "{fault}"
    );
    let fault = run("  s_sendmsghalt sendmsg(MSG_INTERRUPT)");
    assert!(matches!(&fault, Fault::NoSemantics { name, .. } if name == "s_sendmsghalt"), "{fault}");
    let fault = run("  v_mov_b32 v1, v130");
    assert!(matches!(&fault, Fault::Register { register, limit: 128, .. } if register == "v130"), "{fault}");
    let fault = run("  v_accvgpr_read_b32 v1, a64");
    assert!(matches!(&fault, Fault::Register { register, .. } if register == "a64"), "{fault}");
    let fault = run("  s_mov_b64 s[4:5], 0\n  s_setpc_b64 s[4:5]");
    assert!(matches!(fault, Fault::WildJump { address: 0, .. }), "{fault}");
    // A path that is not taken does no harm.
    let rig = Rig::new(
        options("gfx942"),
        &assemble(&Assembly { body: "  s_branch .Lok\n  .long 0xffffffff\n.Lok:", ..Assembly::default() }),
    );
    rig.launch("test", 1, 64, &Args::new().push(0u64)).unwrap();
}

#[test]
fn launch_limits() {
    let image = assemble(&Assembly { lds: 1024, ..Assembly::default() });
    let rig = Rig::new(options("gfx942"), &image);
    let launch = |grid: [u32; 3], block: [u32; 3], dynamic_lds: u32, args: &[u8]| {
        rig.machine.launch(&rig.module, "test", &Dispatch { grid, block, dynamic_lds, args })
    };
    let args = [0; 8];
    launch([1, 1, 1], [64, 1, 1], 65_536 - 1024, &args).unwrap();
    let fault = launch([1, 1, 1], [64, 1, 1], 65_537 - 1024, &args).unwrap_err();
    assert!(matches!(fault, Fault::Limits { requested: 65_537, limit: 65_536, .. }), "{fault}");
    assert!(matches!(launch([1, 1, 1], [64, 1, 1], u32::MAX, &args), Err(Fault::Limits { .. })));
    assert!(matches!(launch([1, 1, 1], [1025, 1, 1], 0, &args), Err(Fault::Limits { requested: 1025, .. })));
    assert!(matches!(launch([1, 1, 1], [u32::MAX, u32::MAX, 2], 0, &args), Err(Fault::Limits { .. })));
    assert!(matches!(launch([u32::MAX, 1, 1], [1024, 1, 1], 0, &args), Err(Fault::Limits { .. })));
    assert!(matches!(launch([0, 1, 1], [64, 1, 1], 0, &args), Err(Fault::Arguments { .. })));
    assert!(matches!(launch([1, 1, 1], [64, 1, 0], 0, &args), Err(Fault::Arguments { .. })));
    assert!(matches!(launch([1, 1, 1], [64, 1, 1], 0, &args[..4]), Err(Fault::Arguments { .. })));
    let unknown = rig.machine.launch(
        &rig.module,
        "nothing",
        &Dispatch { grid: [1; 3], block: [64, 1, 1], dynamic_lds: 0, args: &args },
    );
    assert!(matches!(unknown, Err(Fault::UnknownKernel { .. })));
    // gfx950 has room for what gfx942 refuses.
    let big = assemble(&Assembly { cpu: "gfx950", lds: 163_840, ..Assembly::default() });
    let rig = Rig::new(options("gfx950"), &big);
    rig.launch("test", 1, 64, &Args::new().push(0u64)).unwrap();
}

#[test]
fn objects_of_another_target_are_refused() {
    let image = assemble(&Assembly { cpu: "gfx950", ..Assembly::default() });
    let error = Machine::new(MachineOptions::default()).load(&image).err();
    assert!(matches!(error, Some(LoadError::Arch { .. })));
}

#[test]
fn the_first_workgroup_with_a_fault_is_reported_whatever_the_threads() {
    let image = hip("gfx942", "-O3", "KERNEL void f(float *y) { if (BID >= 37) y[1000000 + BID] = 1; }");
    for threads in [1, 2, 5] {
        let rig = Rig::new(options("gfx942").threads(Some(threads)), &image);
        let y = rig.upload("y", &[0f32]);
        let fault = rig.launch("f", 400, 64, &Args::new().push(y)).unwrap_err();
        assert!(
            matches!(&fault, Fault::Memory { site, .. } if site.workgroup == [37, 0, 0]),
            "{threads}: {fault}"
        );
    }
}

#[test]
fn truncated_objects_are_errors() {
    let image = assemble(&Assembly::default());
    let machine = Machine::new(MachineOptions::default());
    for len in (0..image.len()).step_by(7) {
        if let Ok(module) = machine.load(&image[..len]) {
            let dispatch = Dispatch { grid: [1; 3], block: [64, 1, 1], dynamic_lds: 0, args: &[0; 8] };
            let _ = machine.launch(&module, "test", &dispatch);
        }
    }
}

/// Runs whatever the words say, for a short while.
fn run_words(words: &[u32], random: &mut Random) {
    let lines: String = words.iter().map(|w| format!("  .long {w:#x}\n")).collect();
    let setup = "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  s_mov_b32 s8, s4\n  s_mov_b32 s9, s5\n  s_mov_b32 s10, 0x400\n  s_mov_b32 s11, 0x27000\n  v_lshlrev_b32 v1, 2, v0\n";
    let body = format!("{setup}{lines}");
    let asm = Assembly {
        body: &body,
        lds: 256,
        scratch: 64,
        directives: ".amdhsa_enable_private_segment 1",
        ..Assembly::default()
    };
    let rig = Rig::new(options("gfx942").threads(Some(1)).instruction_budget(Some(2000)), &assemble(&asm));
    let data: Vec<u32> = (0..256).map(|_| random.next()).collect();
    let buffer = rig.upload("data", &data);
    let _ = rig.launch("test", 2, 128, &Args::new().push(buffer));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_words_never_do_harm(seed in any::<u64>()) {
        let mut random = Random(seed);
        let heads = [0x7E00_0000, 0xD100_0000, 0xD380_0000, 0xD800_0000, 0xDC00_0000, 0xE000_0000, 0xC000_0000, 0xBE80_0000, 0x8000_0000, 0x0200_0000, 0xDC50_8000];
        let words: Vec<u32> = (0..40).map(|i| {
            let r = random.next();
            if i % 2 == 0 { heads[(r >> 8) as usize % heads.len()] | r & 0x00FF_FFFF } else { r }
        }).collect();
        run_words(&words, &mut random);
    }

    #[test]
    fn corrupt_objects_never_do_harm(seed in any::<u64>()) {
        let mut random = Random(seed);
        let mut image = assemble(&Assembly { body: "  v_mov_b32 v1, 1", ..Assembly::default() });
        for _ in 0..1 + random.next() % 8 {
            let at = random.next() as usize % image.len();
            image[at] = random.next() as u8;
        }
        let machine = Machine::new(MachineOptions::default().threads(Some(1)).instruction_budget(Some(1000)));
        if let Ok(module) = machine.load(&image) {
            let dispatch = Dispatch { grid: [1; 3], block: [64, 1, 1], dynamic_lds: 0, args: &[0; 8] };
            let _ = machine.launch(&module, "test", &dispatch);
        }
    }
}
