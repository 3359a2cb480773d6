//! Addresses that are no multiple of the element: what the hardware does in the mode that HSA sets, and what the strict mode
//! reports.
//!
//! Sources: LLVM compiles for that mode (`unaligned-access-mode`), where bytes of any alignment are one `global_load_dwordx4`,
//! `ds_read_b128`, `scratch_load_dwordx4` or `buffer_load_dwordx4`. CDNA4 ISA: 8.2.1 has scalar loads ignore the two low bits, 10.5
//! has misaligned scratch. 9.1.7 has buffer accesses of dwords ignore them as well, which is so in the strict mode of hardware
//! only: AITER's MX fp4 attention for gfx950 loads dwords of scales from odd addresses.

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use hk_emu::{Fault, MemoryProblem, Space};

/// What the strict mode says.
#[derive(Clone, Copy, PartialEq)]
enum Strict {
    /// Misaligned, in this space.
    Fault(Space),
    /// Nothing: private memory is not checked.
    Allows,
}
use Strict::{Allows, Fault as Faults};
const GLOBAL: Strict = Faults(Space::Global);
const LDS: Strict = Faults(Space::Lds);

/// Bytes of each lane in global memory, LDS and private memory.
const SLOT: usize = 32;
const LANES: usize = 64;

/// One instruction: its text, the bytes it moves, what the strict mode says. It finds the address of its lane's slot, plus
/// the shift, in v5 (32 bits, LDS and offsets), v[6:7] (global), v[30:31] (LDS by FLAT), v[32:33] (private memory by FLAT) and
/// v34 (private); s[4:5] and s[36:39] are the global buffer. Loads write v[20:23], stores take v[8:11].
type Case = (&'static str, usize, Strict);

const LOADS: &[Case] = &[
    ("global_load_ushort v20, v5, s[4:5]", 2, GLOBAL),
    ("global_load_dword v20, v5, s[4:5]", 4, GLOBAL),
    ("global_load_dwordx2 v[20:21], v[6:7], off", 8, GLOBAL),
    ("global_load_dwordx3 v[20:22], v5, s[4:5]", 12, GLOBAL),
    ("global_load_dwordx4 v[20:23], v[6:7], off", 16, GLOBAL),
    ("flat_load_ushort v20, v[6:7]", 2, GLOBAL),
    ("flat_load_dword v20, v[6:7]", 4, GLOBAL),
    ("flat_load_dwordx4 v[20:23], v[6:7]", 16, GLOBAL),
    ("flat_load_dwordx2 v[20:21], v[30:31]", 8, LDS),
    ("flat_load_dwordx3 v[20:22], v[32:33]", 12, Allows),
    ("scratch_load_ushort v20, v34, off", 2, Allows),
    ("scratch_load_dword v20, v34, off", 4, Allows),
    ("scratch_load_dwordx4 v[20:23], v34, off", 16, Allows),
    ("buffer_load_ushort v20, v5, s[36:39], 0 offen", 2, GLOBAL),
    ("buffer_load_dword v20, v5, s[36:39], 0 offen", 4, GLOBAL),
    ("buffer_load_dwordx4 v[20:23], v5, s[36:39], 0 offen", 16, GLOBAL),
    ("ds_read_u16 v20, v5", 2, LDS),
    ("ds_read_b32 v20, v5", 4, LDS),
    ("ds_read_b64 v[20:21], v5", 8, LDS),
    ("ds_read_b96 v[20:22], v5", 12, LDS),
    ("ds_read_b128 v[20:23], v5", 16, LDS),
    ("ds_read2_b32 v[20:21], v5 offset0:0 offset1:1", 8, LDS),
    ("ds_read2_b64 v[20:23], v5 offset0:0 offset1:1", 16, LDS),
    // To the upper half of the LDS, from where aligned reads bring it back.
    ("global_load_lds_ushort v5, s[4:5]\nREAD", 2, GLOBAL),
    ("global_load_lds_dword v[6:7], off\nREAD", 4, GLOBAL),
    ("buffer_load_dword v5, s[36:39], 0 offen lds\nREAD", 4, GLOBAL),
    ("scratch_load_lds_dword v34, off\nREAD", 4, Allows),
];
const LOADS_950: &[Case] = &[
    ("global_load_lds_dwordx3 v5, s[4:5]\nREAD3", 12, GLOBAL),
    ("global_load_lds_dwordx4 v[6:7], off\nREAD4", 16, GLOBAL),
];
const STORES: &[Case] = &[
    ("global_store_short v5, v8, s[4:5]", 2, GLOBAL),
    ("global_store_dword v5, v8, s[4:5]", 4, GLOBAL),
    ("global_store_dwordx3 v[6:7], v[8:10], off", 12, GLOBAL),
    ("global_store_dwordx4 v5, v[8:11], s[4:5]", 16, GLOBAL),
    ("flat_store_dwordx2 v[6:7], v[8:9]", 8, GLOBAL),
    ("flat_store_dwordx4 v[30:31], v[8:11]", 16, LDS),
    ("flat_store_short v[30:31], v8", 2, LDS),
    ("flat_store_dword v[32:33], v8", 4, Allows),
    ("scratch_store_short v34, v8, off", 2, Allows),
    ("scratch_store_dwordx4 v34, v[8:11], off", 16, Allows),
    ("buffer_store_short v8, v5, s[36:39], 0 offen", 2, GLOBAL),
    ("buffer_store_dwordx2 v[8:9], v5, s[36:39], 0 offen", 8, GLOBAL),
    ("ds_write_b16 v5, v8", 2, LDS),
    ("ds_write_b32 v5, v8", 4, LDS),
    ("ds_write_b64 v5, v[8:9]", 8, LDS),
    ("ds_write_b96 v5, v[8:10]", 12, LDS),
    ("ds_write_b128 v5, v[8:11]", 16, LDS),
    ("ds_write2_b32 v5, v8, v9 offset0:0 offset1:1", 8, LDS),
    ("ds_write2_b64 v5, v[8:9], v[10:11] offset0:0 offset1:1", 16, LDS),
];
/// Atomics are faults unless they are naturally aligned, in both modes.
const ATOMICS: &[Case] = &[
    ("global_atomic_add v5, v8, s[4:5]", 4, GLOBAL),
    ("global_atomic_add_x2 v5, v[8:9], s[4:5]", 8, GLOBAL),
    ("global_atomic_add_f32 v5, v8, s[4:5]", 4, GLOBAL),
    ("global_atomic_cmpswap v20, v5, v[8:9], s[4:5] sc0", 4, GLOBAL),
    ("flat_atomic_add v[6:7], v8", 4, GLOBAL),
    ("flat_atomic_add_x2 v[30:31], v[8:9]", 8, LDS),
    ("ds_add_u32 v5, v8", 4, LDS),
    ("ds_add_rtn_u64 v[20:21], v5, v[8:9]", 8, LDS),
    ("ds_pk_add_f16 v5, v8", 4, LDS),
    ("ds_wrxchg2_rtn_b32 v[20:21], v5, v8, v9 offset0:0 offset1:1", 4, LDS),
];

/// A kernel that runs the case whose number is behind the slots and the results, with the shift that follows it. The result
/// of a case is v[20:27], after the slot of the case's memory was read back where it is a store.
fn image(cpu: &str, cases: &[(Case, bool)]) -> Vec<u8> {
    let mut body = "
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        s_waitcnt lgkmcnt(0)
        s_load_dwordx2 s[10:11], s[4:5], 0x1000
        s_mov_b64 s[20:21], src_shared_base
        s_mov_b64 s[22:23], src_private_base
        s_mov_b32 s36, s4
        s_mov_b32 s37, s5
        s_movk_i32 s38, 0x1000
        s_mov_b32 s39, 0x20000
        s_waitcnt lgkmcnt(0)
        v_lshlrev_b32 v1, 2, v0
        v_lshlrev_b32 v36, 4, v0
        v_lshlrev_b32 v4, 5, v0
        v_mov_b32 v2, s4
        v_mov_b32 v3, s5
        global_load_dwordx4 v[8:11], v4, s[4:5]
        global_load_dwordx4 v[12:15], v4, s[4:5] offset:16
        s_waitcnt vmcnt(0)
        ds_write_b128 v4, v[8:11]
        ds_write_b128 v4, v[12:15] offset:16
        scratch_store_dwordx4 off, v[8:11], off
        scratch_store_dwordx4 off, v[12:15], off offset:16
        v_add_u32 v5, s11, v4
        v_add_co_u32 v6, vcc, v2, v5
        v_addc_co_u32 v7, vcc, 0, v3, vcc
        v_mov_b32 v30, v5
        v_mov_b32 v31, s21
        v_mov_b32 v32, s11
        v_mov_b32 v33, s23
        v_mov_b32 v34, s11
        s_movk_i32 m0, 0x800
        "
    .to_owned();
    for v in 20..28 {
        body += &format!("v_mov_b32 v{v}, 0\n");
    }
    body += "s_waitcnt vmcnt(0) lgkmcnt(0)\n";
    for (number, ((text, ..), store)) in cases.iter().enumerate() {
        let wait = "s_waitcnt vmcnt(0) lgkmcnt(0)\n";
        let text = text
            .replace("READ3", &format!("{wait}ds_read_b96 v[20:22], v36 offset:2048"))
            .replace("READ4", &format!("{wait}ds_read_b128 v[20:23], v36 offset:2048"))
            .replace("READ", &format!("{wait}ds_read_b32 v20, v1 offset:2048"));
        body += &format!("s_cmp_lg_u32 s10, {number}\ns_cbranch_scc1 after{number}\n{text}\n{wait}");
        if *store {
            let read = |load: &str, tail: &str| {
                let half =
                    |v: &str, o| format!("{load} {v}, {tail}{}\n", if o == 0 { "" } else { " offset:16" });
                half("v[20:23]", 0) + &half("v[24:27]", 16)
            };
            body += &match text.as_str() {
                t if t.starts_with("ds_") || t.contains("v[30:31]") => read("ds_read_b128", "v4"),
                t if t.starts_with("scratch_") || t.contains("v[32:33]") => {
                    read("scratch_load_dwordx4", "off, off")
                }
                _ => read("global_load_dwordx4", "v4, s[4:5]"),
            };
        }
        body += &format!("after{number}:\n");
    }
    body += "s_waitcnt vmcnt(0) lgkmcnt(0)
        global_store_dwordx4 v4, v[20:23], s[4:5] offset:2048
        global_store_dwordx4 v4, v[24:27], s[4:5] offset:2064";
    assemble(&Assembly { cpu, body: &body, lds: 4096, scratch: 32, ..Assembly::default() })
}

#[test]
fn misaligned_accesses_reach_the_bytes_at_their_address() {
    let slots: Vec<u8> = {
        let mut random = Random(5);
        (0..SLOT * LANES).map(|_| random.next() as u8).collect()
    };
    for cpu in ["gfx942", "gfx950"] {
        let more: &[Case] = if cpu == "gfx950" { LOADS_950 } else { &[] };
        let with = |cases: &[Case], store| cases.iter().map(|c| (*c, store)).collect::<Vec<_>>();
        let cases =
            [with(LOADS, false), with(more, false), with(STORES, true), with(ATOMICS, false)].concat();
        let first_atomic = cases.len() - ATOMICS.len();
        let image = image(cpu, &cases);
        let rigs = [true, false].map(|allowed| Rig::new(options(cpu).allow_misaligned(allowed), &image));
        for (number, ((text, bytes, strict), store)) in cases.iter().enumerate() {
            let atomic = number >= first_atomic;
            for shift in if *bytes == 2 { vec![1, 3] } else { vec![1, 2, 3] } {
                for (rig, allowed) in rigs.iter().zip([true, false]) {
                    let context = format!("{cpu}: {text}, shift {shift}, allowed: {allowed}");
                    let tail = [number as u32, shift as u32].map(u32::to_le_bytes).concat();
                    let data = rig.upload("data", &[&slots[..], &[0; SLOT * LANES], &tail].concat());
                    let result = rig.launch("test", 1, LANES as u32, &Args::new().push(data));
                    if let Faults(wanted) = *strict
                        && (atomic || !allowed)
                    {
                        match result {
                            Err(Fault::Memory { problem, space, lane, .. }) => {
                                let want = (MemoryProblem::Misaligned, wanted, Some(0));
                                assert_eq!((problem, space, lane), want, "{context}");
                            }
                            other => panic!("{context}: {other:?}"),
                        }
                        continue;
                    }
                    result.unwrap_or_else(|fault| panic!("{context}: {fault}"));
                    let got: Vec<u8> = rig.download(data + (SLOT * LANES) as u64, SLOT * LANES);
                    for (lane, (got, slot)) in got.chunks(SLOT).zip(slots.chunks(SLOT)).enumerate() {
                        let mut want = [0; SLOT];
                        if *store {
                            want.copy_from_slice(slot);
                            want[shift..shift + bytes].copy_from_slice(&slot[..*bytes]);
                        } else {
                            want[..*bytes].copy_from_slice(&slot[shift..shift + bytes]);
                        }
                        assert_eq!(got, want, "{context}, lane {lane}");
                    }
                }
            }
        }
    }
}

#[test]
fn eight_byte_atomics_need_eight_bytes() {
    for text in [
        "global_atomic_add_x2 v5, v[8:9], s[4:5]",
        "ds_add_u64 v5, v[8:9]",
        "flat_atomic_or_x2 v[6:7], v[8:9]",
    ] {
        let case: Case = (text, 8, GLOBAL);
        let rig = Rig::new(options("gfx942").allow_misaligned(true), &image("gfx942", &[(case, false)]));
        for (shift, legal) in [(4u32, false), (8, true)] {
            let tail = [0u32, shift].map(u32::to_le_bytes).concat();
            let data = rig.upload("data", &[&[0u8; 2 * SLOT * LANES][..], &tail].concat());
            let result = rig.launch("test", 1, 64, &Args::new().push(data));
            assert_eq!(result.is_ok(), legal, "{text} at {shift}");
        }
    }
}

/// Scalar loads ignore the two low bits of each part of the address.
#[test]
fn scalar_loads_round_their_address_down() {
    let data: Vec<u32> = (0..16).map(|i| 0x0101_0101 * (i + 1)).collect();
    for allowed in [true, false] {
        for (base, register, offset) in
            [(1, 0, 0), (3, 0, 0), (0, 0, 2), (1, 0, 2), (6, 0, 5), (3, 0, 1), (7, 3, 3), (5, 6, 7)]
        {
            for load in [
                format!("s_load_dwordx2 s[8:9], s[12:13], s16 offset:{offset}"),
                format!("s_buffer_load_dwordx2 s[8:9], s[12:15], s16 offset:{offset}"),
            ] {
                let body = format!(
                    "s_load_dwordx2 s[4:5], s[0:1], 0x0
                    s_waitcnt lgkmcnt(0)
                    s_add_u32 s12, s4, {base}
                    s_addc_u32 s13, s5, 0
                    s_movk_i32 s14, 64
                    s_mov_b32 s15, 0x27000
                    s_movk_i32 s16, {register}
                    {load}
                    s_waitcnt lgkmcnt(0)
                    v_mov_b32 v1, 0
                    v_mov_b32 v2, s8
                    v_mov_b32 v3, s9
                    global_store_dwordx2 v1, v[2:3], s[4:5] offset:32"
                );
                let image = assemble(&Assembly { body: &body, ..Assembly::default() });
                let rig = Rig::new(options("gfx942").allow_misaligned(allowed), &image);
                let at = rig.upload("data", &data);
                rig.launch("test", 1, 1, &Args::new().push(at)).unwrap();
                let first = base / 4 + register / 4 + offset / 4;
                assert_eq!(
                    rig.download::<u32>(at + 32, 2),
                    data[first..first + 2],
                    "{load}: {base} + {register}"
                );
            }
        }
    }
}
