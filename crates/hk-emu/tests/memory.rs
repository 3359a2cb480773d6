//! Memory instructions: buffers with range checks, narrow accesses, LDS forms, atomics, DMA to LDS.

#![allow(clippy::precedence)] // formulas are written as the ISA manual writes them

use hk_emu::Level;

use crate::common::{Args, Assembly, Body, Random, Rig, assemble, options};

/// Runs `body` in one wave on a buffer and returns the buffer; see `Body`.
fn run(cpu: &str, body: &str, lds: u32, data: &[u32]) -> Vec<u32> {
    Body { cpu, lds, ..Body::new(body) }.run(data)
}

fn words(n: usize) -> Vec<u32> {
    let mut random = Random(17);
    (0..n).map(|_| random.next()).collect()
}

/// A raw resource of `bytes` bytes in s[8:11].
fn resource(bytes: u32) -> String {
    format!("s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_mov_b32 s10, {bytes:#x}\ns_mov_b32 s11, 0x27000\n")
}

#[test]
fn buffer_range_checks() {
    let mut data = words(512);
    // Loads past the end are 0; a dword at a time.
    let body = resource(100)
        + "v_lshlrev_b32 v4, 3, v0
           buffer_load_dwordx2 v[6:7], v4, s[8:11], 0 offen offset:4
           s_waitcnt vmcnt(0)
           v_lshlrev_b32 v4, 3, v0
           v_add_u32 v4, 0x400, v4
           global_store_dwordx2 v4, v[6:7], s[4:5]";
    let out = run("gfx942", &body, 0, &data);
    for lane in 0..64 {
        for half in 0..2 {
            let at = 2 * lane + 1 + half;
            let want = if 4 * at + 4 <= 100 { data[at] } else { 0 };
            assert_eq!(out[256 + 2 * lane + half], want, "lane {lane} half {half}");
        }
    }
    // Stores past the end vanish; offsets in M0 and SGPRs count.
    let body =
        resource(0x480) + "s_movk_i32 s12, 0x400\nbuffer_store_dword v0, v1, s[8:11], s12 offen offset:8";
    let out = run("gfx942", &body, 0, &data);
    for (i, (new, old)) in out.iter().zip(&data).enumerate() {
        let lane = i as i64 - 258;
        let want = if (0..64).contains(&lane) && 4 * i + 4 <= 0x480 { lane as u32 } else { *old };
        assert_eq!(*new, want, "word {i}");
    }
    // Structured: stride 16, 40 records, index from the lane.
    let body = "s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_or_b32 s9, s9, 0x100000\ns_mov_b32 s10, 40\ns_mov_b32 s11, 0x27000
                v_mov_b32 v4, v0\nv_mov_b32 v5, 4
                buffer_load_dword v6, v[4:5], s[8:11], 0 idxen offen offset:4
                s_waitcnt vmcnt(0)
                v_add_u32 v4, 0x400, v1
                global_store_dword v4, v6, s[4:5]";
    let out = run("gfx942", body, 0, &data);
    for lane in 0..64 {
        assert_eq!(out[256 + lane], if lane < 40 { data[4 * lane + 2] } else { 0 }, "lane {lane}");
    }
    // An unbound resource reads 0 and swallows stores; narrow loads extend.
    data[0] = 0x80FF_7F01;
    let body = resource(4)
        + "buffer_load_sbyte v4, v0, s[8:11], 0 offen
           v_lshlrev_b32 v10, 1, v0
           buffer_load_ushort v5, v10, s[8:11], 0 offen
           s_mov_b64 s[12:13], 0\ns_mov_b64 s[14:15], 0
           buffer_load_dword v6, v1, s[12:15], 0 offen
           buffer_store_dword v0, v1, s[12:15], 0 offen
           s_waitcnt vmcnt(0)
           v_add_u32 v7, 0x200, v1
           global_store_dword v7, v4, s[4:5]
           global_store_dword v7, v5, s[4:5] offset:256
           global_store_dword v7, v6, s[4:5] offset:512";
    let out = run("gfx942", &body, 0, &data);
    let bytes = data[0].to_le_bytes();
    for lane in 0..64 {
        assert_eq!(out[128 + lane] as i32, if lane < 4 { i32::from(bytes[lane] as i8) } else { 0 });
        let short =
            if lane < 2 { u32::from(bytes[2 * lane]) | u32::from(bytes[2 * lane + 1]) << 8 } else { 0 };
        assert_eq!(out[192 + lane], short, "lane {lane}");
        assert_eq!(out[256 + lane], 0);
    }
}

#[test]
fn narrow_accesses() {
    let data = words(512);
    let bytes: Vec<u8> = data.iter().flat_map(|w| w.to_le_bytes()).collect();
    let body = "v_lshlrev_b32 v4, 1, v0
                v_mov_b32 v6, 0x11112222\nv_mov_b32 v7, 0x11112222\nv_mov_b32 v8, 0x11112222
                global_load_sbyte v5, v0, s[4:5] offset:3
                global_load_short_d16 v6, v4, s[4:5] offset:6
                global_load_short_d16_hi v7, v4, s[4:5]
                global_load_sbyte_d16_hi v8, v0, s[4:5]
                s_waitcnt vmcnt(0)
                v_add_u32 v9, 0x400, v1
                global_store_dword v9, v5, s[4:5]\nglobal_store_dword v9, v6, s[4:5] offset:256
                global_store_dword v9, v7, s[4:5] offset:512\nglobal_store_dword v9, v8, s[4:5] offset:768";
    let out = run("gfx942", body, 0, &data);
    let short = |at: usize| u32::from(bytes[at]) | u32::from(bytes[at + 1]) << 8;
    for lane in 0..64 {
        assert_eq!(out[256 + lane] as i32, i32::from(bytes[lane + 3] as i8));
        assert_eq!(out[320 + lane], 0x1111_0000 | short(2 * lane + 6));
        assert_eq!(out[384 + lane], 0x2222 | short(2 * lane) << 16);
        assert_eq!(out[448 + lane], 0x2222 | (i32::from(bytes[lane] as i8) as u32) << 16);
    }
    // Stores of bytes and shorts touch nothing else, also where neighbours fill a word.
    for (asm, size, high, stride) in [
        ("global_store_byte v4, v5, s[4:5] offset:1", 1, false, 1),
        ("global_store_short v4, v5, s[4:5] offset:2", 2, false, 2),
        ("global_store_short_d16_hi v4, v5, s[4:5]", 2, true, 2),
        ("global_store_short v4, v5, s[4:5]", 2, false, 6),
    ] {
        let body = format!(
            "v_mul_u32_u24 v4, {stride}, v0\nv_mul_lo_u32 v5, v0, 0x01234567\ns_mov_b32 exec_hi, 0x7fffff0f\n{asm}"
        )
        .replace("v_mul_lo_u32 v5, v0, 0x01234567", "s_mov_b32 s6, 0x01234567\nv_mul_lo_u32 v5, v0, s6");
        let out: Vec<u8> = run("gfx942", &body, 0, &data).iter().flat_map(|w| w.to_le_bytes()).collect();
        let offset = asm.split("offset:").nth(1).map_or(0, |o| o.parse().unwrap());
        let mut want = bytes.clone();
        for lane in (0..64usize).filter(|l| 0x7FFF_FF0F_FFFF_FFFFu64 >> l & 1 != 0) {
            let value = (lane as u32).wrapping_mul(0x0123_4567) >> if high { 16 } else { 0 };
            let at = lane * stride + offset;
            want[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        }
        assert!(out == want, "{asm}");
    }
}

/// Private memory at one address of all lanes, at one of each lane, in part of a dword, and with lanes off.
#[test]
fn private_memory_is_of_one_lane() {
    let body = "
        v_mov_b32 v4, 8
        v_add_u32 v6, 0x100, v0
        v_add_u32 v7, 0x200, v0
        scratch_store_dwordx2 v4, v[6:7], off
        s_mov_b32 exec_lo, 0xaaaaaaaa
        s_mov_b32 exec_hi, 0xaaaaaaaa
        v_add_u32 v6, 0x300, v0
        scratch_store_dword off, v6, off offset:8
        s_mov_b64 exec, -1
        v_and_b32 v5, 4, v1
        v_add_u32 v5, 8, v5
        scratch_load_dword v8, v5, off
        scratch_store_byte off, v0, off offset:13
        v_mov_b32 v12, 7
        s_mov_b64 exec, 0xff0
        scratch_load_dword v12, v4, off
        s_mov_b64 exec, -1
        scratch_load_dwordx2 v[10:11], off, off offset:8
        s_waitcnt vmcnt(0)
        global_store_dword v1, v8, s[4:5]
        global_store_dword v1, v10, s[4:5] offset:256
        global_store_dword v1, v11, s[4:5] offset:512
        global_store_dword v1, v12, s[4:5] offset:768";
    for level in [Level::Portable, Level::Avx2, Level::Avx512].into_iter().filter(|l| l.available()) {
        let options = options("gfx942").level(Some(level));
        let out = Body { scratch: 16, options, ..Body::new(body) }.run(&[0; 256]);
        for lane in 0..64u32 {
            let own = |row: u32| out[(64 * row + lane) as usize];
            let first = lane + if lane % 2 == 0 { 0x100 } else { 0x300 };
            let each = lane + if lane % 2 == 0 { 0x100 } else { 0x200 };
            let some = if (4..12).contains(&lane) { first } else { 7 };
            assert_eq!(
                [own(0), own(1), own(2), own(3)],
                [each, first, lane << 8 | lane, some],
                "{level:?} lane {lane}"
            );
        }
    }
}

/// Host memory that a program registers may begin at any byte: what is aligned by its address is not by its offset.
#[test]
fn an_allocation_may_begin_at_any_byte() {
    let body = "
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        v_lshlrev_b32 v2, 3, v0
        s_waitcnt lgkmcnt(0)
        global_load_dword v3, v1, s[4:5]
        global_load_dword v4, v2, s[4:5]
        s_waitcnt vmcnt(0)
        global_store_dword v1, v3, s[4:5] offset:512
        global_store_dword v2, v4, s[4:5] offset:1024";
    let options = options("gfx942").allow_misaligned(true);
    let rig = Rig::new(options, &assemble(&Assembly { body, ..Assembly::default() }));
    let before: Vec<u8> = words(384).iter().flat_map(|word| word.to_le_bytes()).collect();
    for shift in 0..4 {
        let first = 0x0900_0000_0000 + 0x10_0000 * shift + 4;
        let base = first - shift;
        let size = before.len() as u64 + shift;
        rig.machine.alloc_at(base, size, "registered").unwrap();
        rig.machine.write(first, &before).unwrap();
        rig.launch("test", 1, 64, &Args::new().push(first)).unwrap();
        let mut want = before.clone();
        for lane in 0..64 {
            want.copy_within(4 * lane..4 * lane + 4, 512 + 4 * lane);
            want.copy_within(8 * lane..8 * lane + 4, 1024 + 8 * lane);
        }
        let mut got = vec![0; before.len()];
        rig.machine.read(first, &mut got).unwrap();
        assert!(got == want, "{shift} bytes into a word");
    }
}
