//! Races on global memory: barriers within a workgroup, release and acquire between them.

use super::{Report, at_line, report, watched};
use crate::common::{Args, Assembly, Rig, assemble, options};
use hk_emu::{Check, Fault, Near, Space};

const ACQ_REL: &str = r#"
#define FENCE(order, scope) __builtin_amdgcn_fence(order, scope)
#define ADD(p, x, order, scope) __hip_atomic_fetch_add(p, x, order, __HIP_MEMORY_SCOPE_##scope)
#define LOAD(p, order, scope) __hip_atomic_load(p, order, __HIP_MEMORY_SCOPE_##scope)
#define STORE(p, x, order, scope) __hip_atomic_store(p, x, order, __HIP_MEMORY_SCOPE_##scope)
"#;

/// Each workgroup writes its part; the last one that arrives sums them up.
const LAST_BLOCK: &str = r#"
KERNEL void split(u32* parts, u32* count, u32* out) {
    __shared__ u32 last;
    parts[256 * BID + TID] = BID + TID; // part
    FENCE(__ATOMIC_RELEASE, "agent"); // release
    BARRIER(); // all
    if (TID == 0) last = ADD(count, 1u, __ATOMIC_RELAXED, AGENT) == 7; // count
    BARRIER();
    if (!last) return;
    FENCE(__ATOMIC_ACQUIRE, "agent"); // acquire
    u32 sum = 0;
    for (u32 i = 0; i < 8; i++) sum += parts[256 * i + TID]; // sum
    out[TID] = sum;
}
"#;

/// Runs a kernel of (256 words for each of 8 workgroups, a counter of 8 words, 256 words of output).
fn split(cpu: &str, kernel: &str, source: &str) -> Result<Vec<u32>, Fault> {
    let rig = watched(cpu, Check::Global, &format!("{ACQ_REL}{source}"));
    let parts = rig.upload("parts", &[0u32; 2048]);
    let (count, out) = (rig.upload("count", &[0u32; 8]), rig.upload("out", &[0u32; 256]));
    rig.launch(kernel, 8, 256, &Args::new().push(parts).push(count).push(out))?;
    Ok(rig.download(out, 256))
}

#[track_caller]
fn broken(source: &str, from: &str, to: &str) -> (Report, String) {
    assert!(source.contains(from));
    let source = source.replace(from, to);
    let kernel = source.split("void ").nth(1).and_then(|s| s.split('(').next()).expect("a kernel");
    let found = report(split("gfx942", kernel, &source));
    assert_eq!(found.check, Check::Global);
    (found, format!("{ACQ_REL}{source}"))
}

#[test]
fn last_block_reduction() {
    let want: Vec<u32> = (0..256).map(|t| 28 + 8 * t).collect();
    for cpu in ["gfx942", "gfx950"] {
        assert_eq!(split(cpu, "split", LAST_BLOCK).expect("no race"), want);
    }
    // One thread releases and acquires for its workgroup.
    let by_one = LAST_BLOCK
        .replace("FENCE(__ATOMIC_RELEASE, \"agent\");", "")
        .replace("FENCE(__ATOMIC_ACQUIRE, \"agent\");", "")
        .replace("__ATOMIC_RELAXED", "__ATOMIC_ACQ_REL");
    assert_eq!(split("gfx942", "split", &by_one).expect("no race"), want);

    let (found, source) = broken(LAST_BLOCK, "FENCE(__ATOMIC_RELEASE, \"agent\");", "");
    found.lines(&source, "// sum", "// part");
    assert!(
        found.what.contains("a plain read races with a plain write by workgroup (0, 0, 0)"),
        "{}",
        found.what
    );
    assert!(found.what.contains("acquired nothing"), "{}", found.what);
    assert_eq!((found.site.workgroup, found.lane), ([7, 0, 0], Some(0)));
    let Some(Near::Allocation { label, offset: 0, base, .. }) = found.near else { panic!() };
    assert_eq!((label.as_str(), found.address), ("parts", Some((Space::Global, base))));

    let (found, source) = broken(LAST_BLOCK, "FENCE(__ATOMIC_ACQUIRE, \"agent\");", "");
    found.lines(&source, "// sum", "// part");
    assert!(found.what.contains("no buffer_inv sc1"), "{}", found.what);

    // Scopes that do not reach other workgroups.
    for (from, part) in [
        ("FENCE(__ATOMIC_RELEASE, \"agent\")", "acquired nothing"),
        ("FENCE(__ATOMIC_ACQUIRE, \"agent\")", "no buffer_inv sc1"),
    ] {
        let (found, source) = broken(LAST_BLOCK, from, &from.replace("agent", "workgroup"));
        found.lines(&source, "// sum", "// part");
        assert!(found.what.contains(part), "{}", found.what);
    }
    // Without the barrier wave 0 counts before the others have released.
    let (found, source) = broken(LAST_BLOCK, "BARRIER(); // all", "");
    found.lines(&source, "// sum", "// part");
    let other = found.other.expect("another side");
    assert_ne!(other.wave, 0);
    assert!(found.what.contains("nothing that this wave has acquired"), "{}", found.what);
}

/// The first workgroup hands a value to each of the others, one after the other.
const HAND_OVER: &str = r#"
KERNEL void chain(u32* data, u32* flag, u32* out) {
    if (TID >= 64) return;
    if (BID != 0) while (LOAD(&flag[BID - 1], __ATOMIC_ACQUIRE, AGENT) == 0) __builtin_amdgcn_s_sleep(1); // poll
    data[TID] += BID; // add
    STORE(&flag[BID], 1u, __ATOMIC_RELEASE, AGENT); // store
    if (BID == 7) out[TID] = data[TID];
}
"#;

#[test]
fn flags() {
    for scope in ["AGENT", "SYSTEM"] {
        let out = split("gfx942", "chain", &HAND_OVER.replace("AGENT", scope)).expect("no race");
        assert_eq!(out[..64], [28; 64]);
    }
    // A store at workgroup scope, or a plain one, is none for other workgroups.
    let (found, source) = broken(HAND_OVER, "1u, __ATOMIC_RELEASE, AGENT", "1u, __ATOMIC_RELEASE, WORKGROUP");
    assert!(found.what.contains("write at workgroup scope"), "{}", found.what);
    found.lines(&source, "// poll", "// store");
    let (found, source) =
        broken(HAND_OVER, "STORE(&flag[BID], 1u, __ATOMIC_RELEASE, AGENT)", "flag[BID] = 1");
    assert!(found.what.contains("an atomic read races with a plain write"), "{}", found.what);
    found.lines(&source, "// poll", "// store");
    let Some(Near::Allocation { label, .. }) = found.near else { panic!() };
    assert_eq!(label, "count");
    // Atomic but relaxed: the flag is right, the data behind it races.
    for (from, to) in [("ACQUIRE", "RELAXED"), ("RELEASE", "RELAXED")] {
        let (found, source) = broken(HAND_OVER, from, to);
        found.lines(&source, "// add", "// add");
        assert_eq!((found.site.workgroup, found.lane), ([1, 0, 0], Some(0)));
    }
}

#[test]
fn waits_of_release_and_acquire() {
    let body = "s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_mov_b32 v1, 0\n v_mov_b32 v2, 1\n v_lshlrev_b32 v3, 2, v0
        s_waitcnt lgkmcnt(0)
        s_cmp_lg_u32 s2, 0
        s_cbranch_scc1 reader
        global_store_dword v3, v0, s[4:5] offset:256
        buffer_wbl2 sc1
        s_waitcnt vmcnt(0) // written back
        global_store_dword v1, v2, s[4:5] sc1
        s_endpgm
        reader:
        global_load_dword v4, v1, s[4:5] sc1
        s_waitcnt vmcnt(0) // loaded
        buffer_inv sc1 // invalidated
        global_load_dword v5, v3, s[4:5] offset:256
        s_waitcnt vmcnt(0)
        global_store_dword v3, v5, s[4:5] offset:512";
    let launch = |body: &str| {
        let rig = Rig::new(
            options("gfx942").sanitize(Check::Global.into()),
            &assemble(&Assembly { body, ..Assembly::default() }),
        );
        let data = rig.upload("data", &[0u32; 192]);
        rig.launch("test", 2, 64, &Args::new().push(data))
    };
    launch(body).expect("no race");
    for (from, to) in [
        ("buffer_wbl2 sc1", "buffer_wbl2 sc0"),
        ("s_waitcnt vmcnt(0) // written back", "s_nop 0"),
        ("s_waitcnt vmcnt(0) // loaded", "s_nop 0"),
        ("buffer_inv sc1 // invalidated", "buffer_inv sc0"),
        ("buffer_inv sc1 // invalidated", "s_nop 0"),
    ] {
        let found = report(launch(&body.replace(from, to)));
        assert_eq!(found.site.instruction, "global_load_dword v5, v3, s[4:5] offset:256");
        assert_eq!(
            found.other.expect("another side").instruction,
            "global_store_dword v3, v0, s[4:5] offset:256"
        );
    }
}

#[test]
fn within_a_workgroup() {
    let source = r#"
KERNEL void swap(u32* data, u32* count, u32* out) {
    data[256 * BID + TID] = TID; // store
    BARRIER();
    out[TID] = data[256 * BID + 255 - TID]; // load
}
"#;
    // All workgroups write the same output.
    let rig = watched("gfx942", Check::Global, source);
    let (data, out) = (rig.upload("data", &[0u32; 512]), rig.upload("out", &[0u32; 256]));
    let args = Args::new().push(data).push(0u64).push(out);
    rig.launch("swap", 1, 256, &args).expect("no race");
    let found = report(rig.launch("swap", 2, 256, &args));
    assert!(
        found.what.contains("a plain write races with a plain write by workgroup (0, 0, 0)"),
        "{}",
        found.what
    );
    found.lines(source, "// load", "// load");
    let (found, source) = broken(source, "BARRIER();", "");
    assert!(found.what.contains("by wave 1: no barrier orders them"), "{}", found.what);
    found.lines(&source, "// store", "// load");
}

#[test]
fn bytes_of_one_dword() {
    let source = r#"
KERNEL void bytes(u8* out, u32 step) {
    u32 at = TID / 64 + step * (TID % 64);
    out[at] = TID; // store
}
"#;
    let rig = watched("gfx950", Check::Global, source);
    let out = rig.upload("out", &[0u8; 1024]);
    rig.launch("bytes", 1, 256, &Args::new().push(out).push(4u32)).expect("no race");
    let found = report(rig.launch("bytes", 1, 256, &Args::new().push(out).push(3u32)));
    // Byte 3 is lane 1 of wave 0 and lane 0 of wave 3.
    assert_eq!((found.site.wave, found.lane, found.address), (3, Some(0), Some((Space::Global, out + 3))));
    at_line(&found.other.expect("another side"), source, "// store");
}

#[test]
fn queue_and_histogram() {
    let source = r#"
KERNEL void queue(u32* items, u32* count, u32* out) {
    __shared__ u32 next;
    __shared__ u32 bins[64];
    if (TID < 64) bins[TID] = 0;
    for (;;) {
        if (TID == 0) next = ADD(&count[0], 1u, __ATOMIC_RELAXED, AGENT); // next
        BARRIER();
        u32 item = next;
        BARRIER();
        if (item >= 32) break;
        ADD(&bins[(item + TID) % 64], 1u, __ATOMIC_RELAXED, WORKGROUP);
        items[item * 64 + TID % 64] = item; // item
    }
    if (TID < 64) ADD(&out[TID], bins[TID], __ATOMIC_RELAXED, AGENT); // bins
}
"#
    .replace("items[item * 64 + TID % 64] = item;", "if (TID < 64) items[item * 64 + TID] = item;");
    assert_eq!(split("gfx942", "queue", &source).expect("no race")[..64], [128; 64]);
    // A counter that is read and written in two steps.
    let (found, text) = broken(
        &source,
        "next = ADD(&count[0], 1u, __ATOMIC_RELAXED, AGENT);",
        "next = count[0], count[0] = next + 1;",
    );
    assert_eq!(found.site.workgroup, [1, 0, 0]);
    at_line(&found.site, &text, "// next");
    let (found, text) =
        broken(&source, "ADD(&out[TID], bins[TID], __ATOMIC_RELAXED, AGENT)", "out[TID] += bins[TID]");
    found.lines(&text, "// bins", "// bins");
    assert_eq!(found.lane, Some(0));
}
