//! Memory instructions: buffers with range checks, narrow accesses, LDS forms, atomics, DMA to LDS.

#![allow(clippy::precedence)] // formulas are written as the ISA manual writes them

mod common;

use common::{Body, Random};

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

#[test]
fn lds_forms() {
    let data = words(512);
    // Each lane writes two dwords with write2, two quadwords with write2st64, reads them back crosswise.
    let body = "global_load_dwordx4 v[4:7], v1, s[4:5]
                s_waitcnt vmcnt(0)
                v_lshlrev_b32 v8, 3, v0
                ds_write2_b32 v8, v4, v5 offset0:0 offset1:1
                ds_write2st64_b64 v8, v[4:5], v[6:7] offset0:1 offset1:2
                v_xor_b32 v9, 0x78, v8
                ds_read2_b32 v[10:11], v9 offset0:1 offset1:0
                ds_read2st64_b64 v[12:15], v9 offset0:2 offset1:1
                ds_read_u8 v16, v8 offset:3
                v_mov_b32 v17, 0xaaaabbbb
                ds_read_u16_d16_hi v17, v8 offset:2
                s_waitcnt lgkmcnt(0)
                v_lshlrev_b32 v18, 5, v0
                s_add_u32 s4, s4, 0x1000\ns_addc_u32 s5, s5, 0
                global_store_dwordx4 v18, v[10:13], s[4:5]
                global_store_dwordx4 v18, v[14:17], s[4:5] offset:16";
    let mut data = data;
    data.resize(1024 + 512, 0);
    let out = run("gfx942", body, 2048, &data);
    for lane in 0..64 {
        let other = lane ^ 15;
        let got = &out[1024 + 8 * lane..][..8];
        let x = |l: usize, i: usize| data[l + i];
        assert_eq!(
            got[..6],
            [x(other, 1), x(other, 0), x(other, 2), x(other, 3), x(other, 0), x(other, 1)],
            "{lane}"
        );
        assert_eq!(got[6], x(lane, 0) >> 24);
        assert_eq!(got[7], 0xBBBB | x(lane, 0) >> 16 << 16);
    }
}

#[test]
fn transposing_reads() {
    let data: Vec<u32> = (0..1024u32).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
    let setup = "v_lshlrev_b32 v8, 3, v0\nglobal_load_dwordx2 v[4:5], v8, s[4:5]\ns_waitcnt vmcnt(0)\nds_write_b64 v8, v[4:5]\n";
    for (name, bits) in [("ds_read_b64_tr_b16", 16), ("ds_read_b64_tr_b8", 8), ("ds_read_b64_tr_b4", 4)] {
        let body = format!(
            "{setup}{name} v[6:7], v8\ns_waitcnt lgkmcnt(0)\nv_add_u32 v8, 0x200, v8\nglobal_store_dwordx2 v8, v[6:7], s[4:5]"
        );
        let out = run("gfx950", &body, 512, &data);
        let row = |lane: usize| u64::from(data[2 * lane]) | u64::from(data[2 * lane + 1]) << 32;
        for lane in 0..64usize {
            let mut want = 0;
            for n in 0..64 / bits {
                // The element matrix of 16 lanes is read by columns.
                let (from, part) = match bits {
                    16 => ((lane & !15) + ((lane >> 2) & 3) + 4 * n, lane & 3),
                    8 => ((lane & !15) + ((lane >> 3) & 1) + 2 * n, lane & 7),
                    _ => ((lane & !15) + n, lane & 15),
                };
                want |= (row(from) >> (bits * part) & ((1 << bits) - 1)) << (bits * n);
            }
            assert_eq!(
                [out[128 + 2 * lane], out[129 + 2 * lane]],
                [want as u32, (want >> 32) as u32],
                "{name} {lane}"
            );
        }
    }
}

#[test]
fn dma_to_lds() {
    let data = words(1024);
    for (cpu, suffix, n) in [("gfx942", "dword", 1usize), ("gfx950", "dwordx4", 4)] {
        let body = format!(
            "v_mul_u32_u24 v4, {}, v0\nv_xor_b32 v4, 64, v4\ns_mov_b32 m0, 32\nglobal_load_lds_{suffix} v4, s[4:5] offset:16\ns_waitcnt vmcnt(0)\nds_read_b32 v5, v1 offset:48\ns_waitcnt lgkmcnt(0)\nv_add_u32 v6, 0x800, v1\nglobal_store_dword v6, v5, s[4:5]",
            4 * n
        );
        let out = run(cpu, &body, 2048, &data);
        for lane in 0..64 {
            // The word that lands at byte 48 + 4 * lane, from the address of the lane that moved it.
            let (mover, part) = (lane / n, lane % n);
            let from = (4 * n * mover ^ 64) + 16 + 4 * part;
            assert_eq!(out[512 + lane], data[from / 4], "{cpu} {lane}");
        }
    }
}

#[test]
fn atomics_in_memory_and_lds() {
    type Formula = fn(u32, u32) -> u32;
    let table: &[(&str, &str, Formula)] = &[
        ("swap", "wrxchg_rtn_b32", |_, d| d),
        ("add", "add_rtn_u32", u32::wrapping_add),
        ("sub", "sub_rtn_u32", u32::wrapping_sub),
        ("smin", "min_rtn_i32", |o, d| (o as i32).min(d as i32) as u32),
        ("umin", "min_rtn_u32", Ord::min),
        ("smax", "max_rtn_i32", |o, d| (o as i32).max(d as i32) as u32),
        ("umax", "max_rtn_u32", Ord::max),
        ("and", "and_rtn_b32", |o, d| o & d),
        ("or", "or_rtn_b32", |o, d| o | d),
        ("xor", "xor_rtn_b32", |o, d| o ^ d),
        ("inc", "inc_rtn_u32", |o, d| if o >= d { 0 } else { o + 1 }),
        ("dec", "dec_rtn_u32", |o, d| if o == 0 || o > d { d } else { o - 1 }),
    ];
    let mut data = words(256);
    (data[3], data[4], data[70]) = (0, u32::MAX, 5);
    for (global, lds, formula) in table {
        // Word of the lane, operand 64 words on; old values to word 128 on, LDS results to 192 on.
        let body = format!(
            "global_load_dword v4, v1, s[4:5]\nglobal_load_dword v5, v1, s[4:5] offset:256\ns_waitcnt vmcnt(0)
             ds_write_b32 v1, v4\nds_{lds} v6, v1, v5\ns_waitcnt lgkmcnt(0)\nds_read_b32 v7, v1\ns_waitcnt lgkmcnt(0)
             global_atomic_{global} v8, v1, v5, s[4:5] sc0\ns_waitcnt vmcnt(0)
             v_sub_u32 v6, v6, v8
             global_store_dword v1, v8, s[4:5] offset:512\nglobal_store_dword v1, v7, s[4:5] offset:768
             v_cmp_ne_u32 vcc, 0, v6\ns_cbranch_vccz .Lsame_{global}\ns_trap 2\n.Lsame_{global}:"
        );
        let out = run("gfx942", &body, 256, &data);
        for lane in 0..64 {
            let want = formula(data[lane], data[64 + lane]);
            assert_eq!(
                (out[lane], out[128 + lane], out[192 + lane]),
                (want, data[lane], want),
                "{global} {lane}"
            );
        }
    }
    // Compare and swap: {new, comparand} in memory, comparand first in LDS; half of the lanes match.
    let body = "global_load_dword v4, v1, s[4:5]\ns_waitcnt vmcnt(0)\nds_write_b32 v1, v4
                v_and_b32 v5, 1, v0\nv_add_u32 v7, v4, v5\nv_mov_b32 v6, 77
                global_atomic_cmpswap v8, v1, v[6:7], s[4:5] sc0
                ds_cmpst_rtn_b32 v9, v1, v7, v6\ns_waitcnt vmcnt(0) lgkmcnt(0)\nds_read_b32 v10, v1\ns_waitcnt lgkmcnt(0)
                global_store_dword v1, v8, s[4:5] offset:512\nglobal_store_dword v1, v10, s[4:5] offset:768";
    let out = run("gfx942", body, 256, &data);
    for lane in 0..64 {
        let want = if lane % 2 == 0 { 77 } else { data[lane] };
        assert_eq!((out[lane], out[128 + lane], out[192 + lane]), (want, data[lane], want), "{lane}");
    }
    // All lanes on one address: the sum, and old values in lane order; 64 bits; packed halves.
    let body = "v_mov_b32 v4, 0\nv_add_u32 v5, 1, v0\nglobal_atomic_add v6, v4, v5, s[4:5] sc0
                v_mov_b32 v7, -1\nglobal_atomic_add_x2 v4, v[4:5], s[4:5] offset:8
                s_waitcnt vmcnt(0)\nglobal_store_dword v1, v6, s[4:5] offset:512
                v_mov_b32 v9, 0x3c003c00\nv_mov_b32 v8, 0\nglobal_atomic_pk_add_f16 v8, v9, s[4:5] offset:16
                v_mov_b32 v9, 0x3f803f80\nglobal_atomic_pk_add_bf16 v8, v9, s[4:5] offset:20
                v_mov_b32 v10, 0\nv_mov_b32 v11, 0x3fe00000\nglobal_atomic_add_f64 v8, v[10:11], s[4:5] offset:24";
    data[..8].copy_from_slice(&[10, 0, 5, 6, 0, 0, 0, 0]);
    let out = run("gfx942", body, 0, &data);
    assert_eq!(out[0], 10 + 64 * 65 / 2);
    let mut old = 10;
    for lane in 0..64 {
        assert_eq!(out[128 + lane], old);
        old += lane as u32 + 1;
    }
    assert_eq!([out[2], out[3]], [5, 6 + 64 * 65 / 2]);
    assert_eq!(out[4], 0x5400_5400, "64.0 twice in f16");
    assert_eq!(out[5], 0x4280_4280, "64.0 twice in bf16");
    assert_eq!(f64::from_bits(u64::from(out[6]) | u64::from(out[7]) << 32), 32.0);
}

#[test]
fn scalar_buffer_loads() {
    let data = words(64);
    let body = resource(40)
        + "s_mov_b32 s6, 8\ns_buffer_load_dwordx4 s[12:15], s[8:11], s6 offset:16\ns_load_dwordx2 s[16:17], s[4:5], s6 offset:4\ns_waitcnt lgkmcnt(0)
           v_mov_b32 v4, s12\nv_mov_b32 v5, s13\nv_mov_b32 v6, s14\nv_mov_b32 v7, s15\nv_mov_b32 v8, s16\nv_mov_b32 v9, s17\nv_mov_b32 v1, 0\ns_mov_b64 exec, 1
           global_store_dwordx4 v1, v[4:7], s[4:5] offset:128\nglobal_store_dwordx2 v1, v[8:9], s[4:5] offset:144";
    let out = run("gfx942", &body, 0, &data);
    assert_eq!(out[32..38], [data[6], data[7], data[8], data[9], data[3], data[4]]);
    let body = resource(32)
        + "s_buffer_load_dwordx4 s[12:15], s[8:11], 0x18\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v4, s12\nv_mov_b32 v5, s13\nv_mov_b32 v6, s14\nv_mov_b32 v7, s15\nv_mov_b32 v1, 0\ns_mov_b64 exec, 1\nglobal_store_dwordx4 v1, v[4:7], s[4:5] offset:128";
    let out = run("gfx942", &body, 0, &data);
    assert_eq!(out[32..36], [data[6], data[7], 0, 0]);
}
