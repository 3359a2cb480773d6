//! Races on LDS.

use super::{Report, report, watched};
use crate::common::{Args, Assembly, Rig, assemble, gemm, options};
use hk_emu::{Check, Checks, Fault, Space};

const REDUCTION: &str = r#"
KERNEL void reduce(u32* data, u32* out) {
    __shared__ u32 part[256];
    part[TID] = data[256 * BID + TID]; // store
    BARRIER(); // first
    for (u32 n = 128; n != 0; n /= 2) {
        if (TID < n) part[TID] += part[TID + n]; // add
        BARRIER(); // next
    }
    if (TID == 0) out[BID] = part[0];
}
"#;

fn reduce(cpu: &str, source: &str) -> Result<Vec<u32>, Fault> {
    let rig = watched(cpu, Checks::from(Check::Lds) | Check::Barriers, source);
    let data: Vec<u32> = (0..1024).collect();
    let (data, out) = (rig.upload("data", &data), rig.upload("out", &[0u32; 4]));
    rig.launch("reduce", 4, 256, &Args::new().push(data).push(out))?;
    Ok(rig.download(out, 4))
}

#[test]
fn reduction() {
    for cpu in ["gfx942", "gfx950"] {
        let sums = reduce(cpu, REDUCTION).expect("no race");
        assert_eq!(sums, [32640, 98176, 163_712, 229_248]);
    }
    // Without the first barrier wave 0 reads what wave 2 stores; here it does so too early.
    let source = REDUCTION.replace("BARRIER(); // first", "");
    let found = report(reduce("gfx942", &source));
    assert_eq!(found.check, Check::Lds);
    assert_eq!(found.site.kernel, "reduce");
    found.lines(&source, "// store", "// add");
    let other = found.other.expect("another side");
    let (Some((Space::Lds, address)), Some(lane)) = (found.address, found.lane) else { panic!() };
    assert_eq!((found.site.wave, other.wave), (2, 0));
    assert_eq!((address, lane), (512, 0));
    assert!(other.instruction.starts_with("ds_read"));
}

#[test]
fn reduction_without_the_barriers_of_its_loop() {
    let source = REDUCTION.replace("BARRIER(); // next", "");
    let found = report(reduce("gfx942", &source));
    assert_eq!(found.check, Check::Lds);
    found.lines(&source, "// add", "// add");
}

/// 16-bit elements: neighbours in a dword belong to different waves.
const TRANSPOSITION: &str = r#"
KERNEL void transpose(u16* x, u16* y) {
    __shared__ u16 tile[32 * 34];
    u32 row = TID / 32, column = TID % 32;
    for (u32 i = 0; i < 32; i += 8) tile[column * 34 + row + i] = x[(row + i) * 32 + column]; // store
    BARRIER();
    for (u32 i = 0; i < 32; i += 8) y[(row + i) * 32 + column] = tile[(row + i) * 34 + column]; // load
}
"#;

#[test]
fn transposition() {
    let launch = |source: &str| {
        let rig = watched("gfx942", Check::Lds, source);
        let words: Vec<u16> = (0..1024).collect();
        let (x, y) = (rig.upload("x", &words), rig.upload("y", &[0u16; 1024]));
        rig.launch("transpose", 1, 256, &Args::new().push(x).push(y))?;
        Ok(rig.download::<u16>(y, 1024))
    };
    let y = launch(TRANSPOSITION).expect("no race");
    assert!((0..1024).all(|i| usize::from(y[i]) == i % 32 * 32 + i / 32));
    let source = TRANSPOSITION.replace("BARRIER();", "");
    let found = report(launch(&source));
    found.lines(&source, "// store", "// load");
    // Rows 0 and 1 are wave 0's own.
    assert_eq!((found.site.wave, found.lane), (1, Some(0)));
    assert_eq!(found.address, Some((Space::Lds, 4)));
}

/// A double-buffered pipeline of loads to LDS, four waves: each step loads the next buffer while the waves read the
/// one before it, each what its neighbour has loaded. Marked lines can be left out.
fn pipeline(cpu: &str, without: Option<&str>) -> Result<(Vec<u32>, Vec<u32>), Fault> {
    let (load, read, bytes) = if cpu == "gfx950" {
        ("global_load_lds_dwordx4", "ds_read_b128 v[8:11],", 16)
    } else {
        ("global_load_lds_dword", "ds_read_b32 v8,", 4)
    };
    let steps = 8;
    let dma = |step: usize| {
        format!(
            "s_add_u32 m0, s8, {}\n v_add_u32 v3, {:#x}, v1\n {load} v3, s[4:5]\n",
            step % 2 * 256 * bytes,
            step * 256 * bytes,
        )
    };
    let mut body = format!(
        "s_load_dwordx2 s[4:5], s[0:1], 0x0
         v_mul_u32_u24 v1, {bytes}, v0
         v_readfirstlane_b32 s8, v1
         v_add_u32 v2, 64, v0
         v_and_b32 v2, 0xff, v2
         v_mul_u32_u24 v2, {bytes}, v2
         v_mov_b32 v4, 0
         s_waitcnt lgkmcnt(0)\n"
    );
    body += &dma(0);
    for step in 0..steps {
        body += &format!("s_waitcnt vmcnt(0) // loaded {step}\n s_barrier // barrier {step}\n");
        if step + 1 < steps {
            body += &dma(step + 1);
        }
        body += &format!(
            "v_add_u32 v5, {}, v2\n {read} v5\n s_waitcnt lgkmcnt(0) // read {step}\n v_add_u32 v4, v4, v8\n",
            step % 2 * 256 * bytes
        );
    }
    let end = steps * 256 * bytes;
    body += &format!(
        "v_lshlrev_b32 v6, 2, v0\n v_add_u32 v6, {end:#x}, v6\n global_store_dword v6, v4, s[4:5]\n"
    );
    if let Some(mark) = without {
        let (before, _) = body.split_once(&format!(" // {mark}\n")).expect("the mark is there");
        let start = before.rfind('\n').map_or(0, |n| n + 1);
        body.replace_range(start..before.len(), "s_nop 0");
    }
    let image = assemble(&Assembly { cpu, body: &body, lds: 2 * 256 * bytes as u32, ..Assembly::default() });
    let rig = Rig::new(options(cpu).sanitize(Checks::from(Check::Lds) | Check::Barriers), &image);
    let lane = bytes / 4;
    let data: Vec<u32> =
        (0..(steps * 256 * lane + 256) as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let buffer = rig.upload("data", &data);
    rig.launch("test", 1, 256, &Args::new().push(buffer))?;
    let want = (0..256)
        .map(|t| (0..steps).fold(0u32, |sum, s| sum.wrapping_add(data[(s * 256 + (t + 64) % 256) * lane])));
    Ok((rig.download::<u32>(buffer, data.len())[steps * 256 * lane..].to_vec(), want.collect()))
}

#[test]
fn pipeline_of_loads_to_lds() {
    for cpu in ["gfx942", "gfx950"] {
        let (sums, want) = pipeline(cpu, None).expect("no race");
        assert_eq!(sums, want);
        for step in 0..8 {
            let of = |mark: &str| report(pipeline(cpu, Some(&format!("{mark} {step}"))));
            let barrier = of("barrier");
            assert_eq!(barrier.check, Check::Lds, "barrier {step}");
            assert!(barrier.what.contains("no barrier"), "{}", barrier.what);
            let loaded = of("loaded");
            assert!(
                loaded.what.contains("load to LDS by wave") && loaded.what.contains("vmcnt"),
                "{}",
                loaded.what
            );
            assert!(loaded.other.expect("another side").instruction.contains("load_lds"));
        }
        // The last two buffers are not loaded again.
        for step in 0..6 {
            let Report { what, site, other, .. } = report(pipeline(cpu, Some(&format!("read {step}"))));
            assert!(what.contains("that read was not waited for (s_waitcnt lgkmcnt)"), "{what}");
            assert!(site.instruction.contains("load_lds"));
            assert!(other.expect("another side").instruction.starts_with("ds_read"));
        }
    }
}

/// One wave with 256 bytes to load to LDS.
fn single(body: &str) -> Result<Vec<u32>, Fault> {
    let body = format!(
        "s_load_dwordx2 s[4:5], s[0:1], 0x0
         v_lshlrev_b32 v1, 2, v0
         s_mov_b32 m0, 0
         s_waitcnt lgkmcnt(0)
         {body}
         global_store_dword v1, v2, s[4:5]"
    );
    let rig = Rig::new(
        options("gfx942").sanitize(Check::Lds.into()),
        &assemble(&Assembly { body: &body, lds: 1024, ..Assembly::default() }),
    );
    let data = rig.upload("data", &(1..=128).collect::<Vec<u32>>());
    rig.launch("test", 1, 64, &Args::new().push(data))?;
    Ok(rig.download(data, 64))
}

#[test]
fn a_wave_and_its_own_loads_to_lds() {
    let load = "global_load_lds_dword v1, s[4:5]";
    let other = "global_load_dword v9, v1, s[4:5]";
    // In order with other vector memory, so one may stay outstanding.
    let right =
        format!("{load}\n{other}\ns_waitcnt vmcnt(1)\nds_read_b32 v2, v1\ns_waitcnt vmcnt(0) lgkmcnt(0)");
    assert_eq!(single(&right).expect("no race"), (1..=64).collect::<Vec<u32>>());
    let found = report(single(&right.replace("vmcnt(1)", "vmcnt(2)")));
    assert_eq!((found.check, found.lane, found.address), (Check::Lds, Some(0), Some((Space::Lds, 0))));
    assert!(found.what.contains("before an s_waitcnt vmcnt"), "{}", found.what);
    assert!(found.site.instruction.starts_with("ds_read_b32"));
    assert!(found.other.expect("another side").instruction.starts_with("global_load_lds_dword"));
    // Lanes that were off have loaded nothing; other bytes are free.
    for (offset, clean) in [(128, true), (124, false), (256, true)] {
        let body = format!(
            "s_mov_b64 exec, 0xffffffff\n{load}\ns_mov_b64 exec, -1\nds_write_b32 v1, v0 offset:{offset}
             s_waitcnt vmcnt(0) lgkmcnt(0)\nv_mov_b32 v2, 0"
        );
        let result = single(&body);
        assert_eq!(result.is_ok(), clean, "offset {offset}: {result:?}");
    }
    // Reuse: the reads of a buffer are behind it before it is loaded again.
    let right = format!(
        "{load}\ns_waitcnt vmcnt(0)\nds_read_b32 v2, v1\nds_read_b32 v3, v1 offset:512
         s_waitcnt lgkmcnt(1)\n{load}\ns_waitcnt vmcnt(0) lgkmcnt(0)"
    );
    single(&right).expect("no race");
    let found = report(single(&right.replace("lgkmcnt(1)", "lgkmcnt(2)")));
    assert!(found.what.contains("own LDS read"), "{}", found.what);
    assert!(found.site.instruction.starts_with("global_load_lds_dword"));
}

#[test]
fn atomics_race_with_plain_accesses_only() {
    let source = r#"
KERNEL void count(u32* out) {
    __shared__ u32 n[64];
    if (TID < 64) n[TID] = 0;
    BARRIER();
    __hip_atomic_fetch_add(&n[TID % 64], 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); // add
    BARRIER(); // wait
    if (TID < 64) out[TID] = n[63 - TID]; // load
}
"#;
    let launch = |source: &str| {
        let rig = watched("gfx942", Check::Lds, source);
        let out = rig.upload("out", &[0u32; 64]);
        rig.launch("count", 1, 256, &Args::new().push(out))?;
        Ok(rig.download::<u32>(out, 64))
    };
    assert_eq!(launch(source).expect("no race"), [4; 64]);
    let source = source.replace("BARRIER(); // wait", "");
    let found = report(launch(&source));
    found.lines(&source, "// add", "// load");
    assert_eq!((found.site.wave, found.other.expect("another side").wave), (1, 0));
}

/// Matrix products through registers, and straight to LDS with two buffers: without any one of their barriers.
#[test]
fn products_without_a_barrier() {
    for cpu in ["gfx942", "gfx950"] {
        let image = gemm::image(cpu);
        for kernel in ["gemm_bf16", "gemm_bf16_dma"] {
            let watched = options(cpu).sanitize(Checks::from(Check::Lds) | Check::Barriers);
            let product = gemm::Gemm::new(cpu, &image, kernel, [128, 128, 128], watched.clone());
            product.launch().expect("no race");
            product.check(97);
            let (machine, module) = product.device();
            let mut candidates = machine.candidates(module, kernel).expect("the kernel is there");
            candidates.retain(|c| c.instruction == "s_barrier");
            assert!(candidates.len() >= 2, "{cpu} {kernel}");
            for candidate in candidates {
                let mutant = watched.clone().mutant(Some(candidate.mutant.clone()));
                let product = gemm::Gemm::new(cpu, &image, kernel, [128, 128, 128], mutant);
                let found = report(product.launch());
                assert_eq!(found.check, Check::Lds, "{} ({:?})", candidate.mutant, candidate.source);
            }
        }
    }
}
