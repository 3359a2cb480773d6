//! What few kernels use: modes that change how instructions run, scalar stores and atomics, formatted and swizzled
//! buffers, the rarer LDS and vector instructions.

#![allow(clippy::precedence)] // formulas are written as the ISA manual writes them

use crate::common::{Body, Random};
use hk_codeobj::Arch;
use hk_emu::isa::{self, ALL_OPS, Fidelity, Op};
use hk_emu::{Fault, MachineOptions, MemoryProblem, Space};

#[test]
fn every_instruction_runs_or_is_refused() {
    for arch in Arch::AMD {
        for &op in ALL_OPS.iter().filter(|op| op.info().exists_on(arch)) {
            let name = op.info().name;
            assert!(isa::decodes(op, arch), "{arch} {name}");
            let (fidelity, why) = op.fidelity(arch);
            assert!(!why.is_empty());
            match hk_emu::executes(op, arch) {
                Ok(()) => assert_ne!(fidelity, Fidelity::Refused, "{arch} {name}"),
                Err(reason) => {
                    assert_eq!(fidelity, Fidelity::Refused, "{arch} {name}: {reason}");
                    assert_eq!(reason, format!("{}: {why}", op.mnemonic()));
                }
            }
        }
        // What a target lacks is neither.
        let other = |op: &&Op| !op.info().exists_on(arch);
        assert!(
            ALL_OPS
                .iter()
                .filter(other)
                .all(|op| !isa::decodes(*op, arch) && hk_emu::executes(*op, arch).is_err())
        );
    }
}

fn words(n: usize) -> Vec<u32> {
    let mut random = Random(29);
    (0..n).map(|_| random.next()).collect()
}

fn run(body: &str, data: &[u32]) -> Vec<u32> {
    Body::new(body).run(data)
}

/// Stores v`n` of every lane to row `row` of the buffer.
fn out(row: u32, vgpr: u32) -> String {
    format!("v_add_u32 v63, {}, v1\nglobal_store_dword v63, v{vgpr}, s[4:5]\n", 256 * row)
}

/// Stores s`n` to the first lane's place in row `row`, through v62.
fn out_scalar(row: u32, register: &str) -> String {
    format!("v_mov_b32 v62, {register}\n") + &out(row, 62)
}

#[test]
fn vskip_drops_vector_instructions_alone() {
    let body = "s_mov_b32 s20, 4\ns_mov_b32 s21, 2\nv_mov_b32 v5, 1\nv_mov_b32 v6, 0\nds_write_b32 v1, v0
                s_setvskip s20, s21
                v_mov_b32 v5, 2\nv_cmp_eq_u32 s[24:25], v0, v0\nglobal_store_dword v1, v0, s[4:5]
                ds_read_b32 v6, v1\nbuffer_load_dword v6, v1, s[8:11], 0 offen\nflat_load_dword v6, v[2:3]
                v_readfirstlane_b32 s26, v5\ns_mov_b32 s27, 9
                s_setvskip s20, 0
                v_mov_b32 v7, 3\n"
        .to_owned();
    let body = format!("s_mov_b32 s24, 5\ns_mov_b32 s26, 6\n{body}")
        + &out(1, 5)
        + &out(2, 6)
        + &out(3, 7)
        + &out_scalar(4, "s24")
        + &out_scalar(5, "s26")
        + &out_scalar(6, "s27");
    let data = words(7 * 64);
    let got = Body { lds: 256, ..Body::new(&body) }.run(&data);
    assert_eq!(got[..64], data[..64]);
    let rows: Vec<u32> = (1..7).map(|row| got[64 * row]).collect();
    assert_eq!(rows, [1, 0, 3, 5, 6, 9]);
    // Skipped instructions are not counted as executed, and skipping starts and ends with the bit.
    let body = "s_mov_b32 s20, 1\ns_setvskip s20, 0\nv_mov_b32 v5, 2\ns_setvskip s20, 1\n";
    run(body, &data);
}

#[test]
fn gpr_index_moves_the_enabled_operands() {
    // v20..v27 = 100 + i, read v20 + index; write v40 + index.
    let mut body: String = (0..8).map(|i| format!("v_mov_b32 v{}, {}\n", 20 + i, 100 + i)).collect();
    body += "v_mov_b32 v45, 1\nv_mov_b32 v40, 1\nv_mov_b32 v50, 7\n
             s_mov_b32 s20, 5\ns_mov_b32 m0, 0x12340f00
             s_set_gpr_idx_on s20, gpr_idx(SRC0)\nv_mov_b32 v10, v20\nv_add_u32 v11, v20, v21\ns_set_gpr_idx_off
             s_mov_b32 s21, m0
             s_set_gpr_idx_on s20, gpr_idx(DST)\nv_mov_b32 v40, v20\nv_fmac_f32 v45, 1.0, v50\nv_writelane_b32 v46, s20, 63\ns_set_gpr_idx_off
             s_set_gpr_idx_on 2, gpr_idx(SRC1)\nv_sub_u32 v12, v20, v21
             s_set_gpr_idx_idx 3\nv_sub_u32 v13, v20, v21
             s_set_gpr_idx_mode gpr_idx(SRC0,SRC2)\nv_add3_u32 v14, v20, v21, v22\nv_sub_f32 v15, -v20, v21
             s_set_gpr_idx_off\nv_mov_b32 v16, v20\n";
    for (row, vgpr) in
        [(0, 10), (1, 11), (2, 40), (3, 45), (4, 12), (5, 13), (6, 14), (7, 16), (8, 50), (9, 15), (11, 51)]
    {
        body += &out(row, vgpr);
    }
    body += &out_scalar(10, "s21");
    let got = run(&body, &words(12 * 64));
    let rows: Vec<u32> = (0..12).map(|row| got[64 * row + 63]).collect();
    let minus = (-f32::from_bits(103) - f32::from_bits(101)).to_bits();
    assert_eq!(
        rows,
        [
            105,
            206,
            1,
            100,
            0u32.wrapping_sub(3),
            0u32.wrapping_sub(4),
            309,
            100,
            7 + 7,
            minus,
            0x1234_1F05,
            5
        ]
    );
    // Accumulation registers, too.
    let body = "v_mov_b32 v20, 5\nv_accvgpr_write_b32 a3, v20\nv_mov_b32 v21, 6\nv_accvgpr_write_b32 a0, v21
                s_set_gpr_idx_on 3, gpr_idx(SRC0)\nv_accvgpr_read_b32 v10, a0\ns_set_gpr_idx_off\n"
        .to_owned()
        + &out(0, 10);
    assert_eq!(run(&body, &words(64))[63], 5);
    // Beyond the kernel's registers, and lane moves.
    for (body, want) in [
        ("s_set_gpr_idx_on 50, gpr_idx(SRC0)\nv_mov_b32 v10, v20", "v70 (indexed) is out of range"),
        ("s_set_gpr_idx_on 6, gpr_idx(SRC0)\nv_readfirstlane_b32 s20, v20", "no indexed registers"),
    ] {
        let fault = Body::new(body).try_run(&[0; 64]).unwrap_err();
        assert!(fault.to_string().contains(want), "{fault}");
    }
}

#[test]
fn forks_run_both_sides_and_join() {
    // Lanes below 10 take the branch; each side adds its own constant, and the join runs once for both.
    for (below, near, relative) in
        [(10, "first", true), (50, "second", true), (10, "third", false), (50, "fourth", false)]
    {
        // The target is an offset, or an address in registers.
        let fork = if relative {
            format!("s_cbranch_i_fork s[20:21], taken_{near}")
        } else {
            format!(
                "s_getpc_b64 s[24:25]\nhere_{near}:\ns_add_u32 s24, s24, taken_{near}-here_{near}
                 s_addc_u32 s25, s25, 0\ns_cbranch_g_fork s[20:21], s[24:25]"
            )
        };
        let body = format!(
            "v_mov_b32 v5, 0\nv_cmp_gt_u32 s[20:21], {below}, v0\ns_mov_b64 s[22:23], exec
             s_getreg_b32 s26, hwreg(HW_REG_MODE, 29, 3)
             {fork}\nv_add_u32 v5, 1, v5\ns_branch joined_{near}
             taken_{near}:\nv_add_u32 v5, 2, v5
             joined_{near}:\ns_cbranch_join s26\ns_mov_b64 exec, s[22:23]\nv_add_u32 v5, 4, v5\n{}",
            out(0, 5)
        );
        let got = run(&body, &words(64));
        let want: Vec<u32> = (0..64).map(|lane| if lane < below { 6 } else { 5 }).collect();
        assert_eq!(got, want);
    }
}

#[test]
fn condition_codes_are_scalar_sources() {
    let body = "s_mov_b64 vcc, 0\ns_cmp_eq_u32 s4, s4
                s_add_u32 s20, src_vccz, 4\ns_cmp_eq_u32 s4, s4\ns_mov_b32 s21, src_scc\ns_or_b32 s22, src_execz, 8
                s_mov_b64 vcc, exec\ns_mov_b64 s[24:25], src_vccz\ns_cmp_eq_u32 s4, s4\ns_lshl_b64 s[26:27], src_scc, 33
                s_cmp_lg_u32 s4, s4\nv_mov_b32 v5, src_scc\ns_cmp_eq_u32 s4, s4\nv_lshlrev_b64 v[6:7], 4, src_scc\n";
    let mut body = body.to_owned();
    for (row, s) in ["s20", "s21", "s22", "s24", "s25", "s26", "s27"].into_iter().enumerate() {
        body += &out_scalar(row as u32, s);
    }
    body += &(out(7, 5) + &out(8, 6) + &out(9, 7));
    let got = run(&body, &words(640));
    let rows: Vec<u32> = (0..10).map(|row| got[64 * row + 5]).collect();
    assert_eq!(rows, [5, 1, 8, 0, 0, 0, 2, 0, 16, 0]);
}

#[test]
fn scalar_stores_and_atomics() {
    let mut body = "s_mov_b32 s20, 0x11\ns_mov_b32 s21, 0x22\ns_mov_b32 s22, 0x33\ns_mov_b32 s23, 0x44
                    s_store_dwordx4 s[20:23], s[4:5], 0x10\ns_movk_i32 s30, 0x40\ns_store_dword s23, s[4:5], s30
                    s_scratch_store_dword s22, s[4:5], 1\ns_mov_b32 s31, 2\ns_scratch_store_dword s21, s[4:5], s31
                    s_scratch_load_dword s40, s[4:5], s31
                    s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_mov_b32 s10, 0xa8\ns_mov_b32 s11, 0
                    s_buffer_store_dwordx4 s[20:23], s[8:11], 0xa0\n"
        .to_owned();
    // Atomics on rows of their own: glc returns the old value, a compare-and-swap takes {new, compare}.
    let ops = [
        ("add", "s_mov_b32 s24, 5", 7 + 5),
        ("sub", "s_mov_b32 s24, 9", 7u32.wrapping_sub(9)),
        ("smin", "s_mov_b32 s24, -3", -3i32 as u32),
        ("umin", "s_mov_b32 s24, -3", 7),
        ("smax", "s_mov_b32 s24, -3", 7),
        ("umax", "s_mov_b32 s24, -3", -3i32 as u32),
        ("and", "s_mov_b32 s24, 5", 5),
        ("or", "s_mov_b32 s24, 8", 15),
        ("xor", "s_mov_b32 s24, 5", 2),
        ("inc", "s_mov_b32 s24, 7", 0),
        ("dec", "s_mov_b32 s24, 3", 3),
        ("swap", "s_mov_b32 s24, 3", 3),
        ("cmpswap", "s_mov_b32 s24, 3\ns_mov_b32 s25, 7", 3),
        ("cmpswap", "s_mov_b32 s24, 3\ns_mov_b32 s25, 8", 7),
    ];
    for (i, (op, set, _)) in ops.iter().enumerate() {
        let (at, pair) = (0x100 + 4 * i, if *op == "cmpswap" { "s[24:25]" } else { "s24" });
        let text = if i % 2 == 0 {
            format!("s_atomic_{op} {pair}, s[4:5], {at:#x}")
        } else {
            format!("s_mov_b32 s10, 0x1000\ns_buffer_atomic_{op} {pair}, s[8:11], {at:#x}")
        };
        body += &format!("{set}\n{text} glc\nv_writelane_b32 v9, s24, {i}\n");
    }
    body += "s_mov_b64 s[24:25], -1\ns_atomic_add_x2 s[24:25], s[4:5], 0x180 glc
             v_writelane_b32 v9, s24, 20\nv_writelane_b32 v9, s25, 21
             s_mov_b64 s[24:25], 1\ns_mov_b64 s[26:27], 6\ns_atomic_cmpswap_x2 s[24:27], s[4:5], 0x188
             s_mov_b32 s10, 0x10\ns_buffer_atomic_add s24, s[8:11], 0x190\nv_writelane_b32 v9, s40, 22\n";
    body += &out(2, 9);
    let mut data = vec![0; 1024];
    data[0x40..0x40 + ops.len()].fill(7);
    data[0x60] = 0;
    data[0x61] = 5;
    data[0x62] = 6;
    data[0x64] = 77;
    let got = run(&body, &data);
    assert_eq!(got[4..8], [0x11, 0x22, 0x33, 0x44]);
    assert_eq!((got[16], got[32]), (0x44, 0x22));
    assert_eq!(got[40..44], [0x11, 0x22, 0, 0], "a resource ends a store");
    for (i, (op, _, want)) in ops.iter().enumerate() {
        assert_eq!(got[0x40 + i], *want, "{op}");
        assert_eq!(got[128 + i], 7, "{op} returns the old value");
    }
    assert_eq!(got[0x60..0x65], [!0, 4, 1, 0, 77]);
    assert_eq!(got[148..151], [0, 5, 0x22]);
}

/// A resource of `bytes` bytes in s[8:11] with the given third and fourth words.
fn resource(stride: u32, swizzle: bool, records: u32, control: u32) -> String {
    format!(
        "s_mov_b32 s8, s4\ns_or_b32 s9, s5, {:#x}\ns_mov_b32 s10, {records:#x}\ns_mov_b32 s11, {control:#x}\n",
        stride << 16 | u32::from(swizzle) << 31
    )
}

#[test]
fn swizzled_buffers_interleave_elements() {
    // 64 elements of 16 bytes, dwords of 16 of them side by side; the lane is the index, by idxen or by add_tid.
    let data = words(256);
    let place = |index: usize, dword: usize| index / 16 * 64 + dword * 16 + index % 16;
    for add_tid in [false, true] {
        let control = 1 << 21 | u32::from(add_tid) << 23;
        let load = if add_tid {
            "buffer_load_dwordx3 v[10:12], off, s[8:11], 0 offset:4"
        } else {
            "buffer_load_dwordx3 v[10:12], v0, s[8:11], 0 idxen offset:4"
        };
        let body = resource(16, true, 64, control) + load + "\n" + &out(0, 10) + &out(1, 11) + &out(2, 12);
        let got = run(&body, &data);
        for lane in 0..64 {
            for dword in 0..3 {
                assert_eq!(got[64 * dword + lane], data[place(lane, dword + 1)], "lane {lane} dword {dword}");
            }
        }
    }
    // Stores go to the same places; records bound the index.
    let body = resource(16, true, 40, 1 << 21)
        + "v_mov_b32 v10, v0\nv_add_u32 v11, 0x100, v0\nbuffer_store_dwordx2 v[10:11], v0, s[8:11], 0 idxen offset:8";
    let got = run(&body, &data);
    let mut want = data.clone();
    for lane in 0..40 {
        want[place(lane, 2)] = lane as u32;
        want[place(lane, 3)] = 0x100 + lane as u32;
    }
    assert_eq!(got, want);
}

#[test]
fn formatted_buffers_convert() {
    let data = words(640);
    // Untyped: format 8_8_8_8 unorm and its order of components come from the resource (here w, z, one, x).
    let control = 7 | 6 << 3 | 1 << 6 | 4 << 9 | 10 << 15;
    let body = resource(4, false, 60, control)
        + "buffer_load_format_xyzw v[10:13], v0, s[8:11], 0 idxen\n"
        + &(0..4).map(|i| out(2 + i, 10 + i)).collect::<String>();
    let got = run(&body, &data);
    for lane in 0..64 {
        let bytes = data[lane].to_le_bytes().map(|b| (f32::from(b) / 255.0).to_bits());
        let want = if lane < 60 { [bytes[3], bytes[2], 1f32.to_bits(), bytes[0]] } else { [0; 4] };
        assert_eq!([0, 1, 2, 3].map(|i| got[128 + 64 * i + lane]), want, "lane {lane}");
    }
    // Typed: 16_16 sint and 16-bit results, two to a register; stores of floats as 2_10_10_10 unorm.
    let body = "s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_mov_b32 s10, 0xa00\ns_mov_b32 s11, 0
                tbuffer_load_format_xy v[10:11], v1, s[8:11], 0 format:[BUF_DATA_FORMAT_16_16,BUF_NUM_FORMAT_SINT] offen
                tbuffer_load_format_d16_xyzw v[12:13], v1, s[8:11], 0 format:[BUF_DATA_FORMAT_8_8_8_8,BUF_NUM_FORMAT_UINT] offen
                v_mov_b32 v14, 0x5555aaaa\nbuffer_load_format_d16_hi_x v14, v1, s[12:15], 0 offen
                v_mov_b32 v20, 1.0\nv_mov_b32 v21, 0.5\nv_mov_b32 v22, -1.0\nv_mov_b32 v23, 4.0\nv_add_u32 v5, 0x800, v1
                tbuffer_store_format_xyzw v[20:23], v5, s[8:11], 0 format:[BUF_DATA_FORMAT_2_10_10_10,BUF_NUM_FORMAT_UNORM] offen
                v_mov_b32 v24, 0x3c00c000\nv_lshlrev_b32 v6, 1, v0\nv_add_u32 v6, 0x900, v6
                tbuffer_store_format_d16_x v24, v6, s[8:11], 0 format:[BUF_DATA_FORMAT_16,BUF_NUM_FORMAT_FLOAT] offen\n";
    let hi = "s_mov_b32 s12, s4\ns_mov_b32 s13, s5\ns_mov_b32 s14, 0xa00\ns_mov_b32 s15, 0x27004\n"; // 32 float, x
    let body = format!("{hi}{body}") + &(0..5).map(|i| out(2 + i, 10 + i)).collect::<String>();
    let got = run(&body, &data);
    for lane in 0..64 {
        let (word, row) = (data[lane], |i: usize| got[128 + 64 * i + lane]);
        assert_eq!([row(0) as i32, row(1) as i32], [word as u16 as i16, (word >> 16) as i16].map(i32::from));
        let bytes = word.to_le_bytes().map(u32::from);
        assert_eq!([row(2), row(3)], [bytes[0] | bytes[1] << 16, bytes[2] | bytes[3] << 16]);
        assert_eq!(row(4) & 0xFFFF, 0xAAAA);
        assert_eq!(got[512 + lane], 3 << 30 | 512 << 10 | 1023, "1, 0.5 to even, 0 and 3 of 2 bits");
        assert_eq!(got[576 + lane / 2], 0xC000_C000);
    }
    let fault = Body::new("s_mov_b64 s[8:9], s[4:5]\ns_mov_b32 s10, 64\ns_mov_b32 s11, 0\nbuffer_load_format_x v9, off, s[8:11], 0")
        .try_run(&data)
        .unwrap_err();
    assert!(fault.to_string().contains("a data format that does not exist"), "{fault}");
}

#[test]
fn rare_lds_instructions() {
    let data = words(1024);
    let body = "global_load_dword v5, v1, s[4:5]\nglobal_load_dword v6, v1, s[4:5] offset:256
                v_lshlrev_b32 v4, 3, v0\nds_write2_b32 v4, v5, v6 offset1:1
                ds_wrxchg2_rtn_b32 v[10:11], v4, v6, v0 offset1:1
                ds_read_b64 v[12:13], v4
                s_movk_i32 m0, 0x200\nds_write_addtid_b32 v0 offset:64\nds_read_addtid_b32 v14 offset:68
                v_mov_b32 v20, 100\nv_cmp_eq_u32 vcc, 0, v0\ns_mov_b64 s[20:21], exec\ns_mov_b64 exec, vcc
                v_mov_b32 v21, 0\nds_write_b32 v21, v20 offset:1020\ns_mov_b32 exec_lo, 0xff\ns_mov_b32 exec_hi, 0
                s_movk_i32 m0, 0x3fc\nds_append v15\nds_consume v16 offset:0\nds_append v17\ns_mov_b64 exec, s[20:21]
                ds_wrap_rtn_b32 v18, v1, v0, v20 offset:256\n";
    let mut body = body.to_owned();
    for (row, vgpr) in [10, 11, 12, 13, 14, 15, 16, 17, 18].into_iter().enumerate() {
        body += &out(2 + row as u32, vgpr);
    }
    body += "ds_read_b32 v19, v1 offset:256\n";
    body += &out(11, 19);
    let got = Body { lds: 1024, ..Body::new(&body) }.run(&data);
    for lane in 0..64 {
        let row = |i: usize| got[128 + 64 * i + lane];
        let (a, b) = (data[lane], data[64 + lane]);
        assert_eq!([row(0), row(1), row(2), row(3)], [a, b, b, lane as u32]);
        if lane < 63 {
            assert_eq!(row(4), lane as u32 + 1);
        }
        if lane < 8 {
            assert_eq!([row(5), row(6), row(7)], [100, 108, 100]);
        }
        // After the exchange dword 64 + i holds v6 or the lane of i's half.
        let old = if lane % 2 == 0 { data[64 + 32 + lane / 2] } else { 32 + lane as u32 / 2 };
        assert_eq!(row(8), old, "lane {lane}");
        let new = if old >= lane as u32 { old - lane as u32 } else { old + 100 };
        assert_eq!(got[128 + 64 * 9 + lane], new);
    }
    // Sixteen rows of sixteen 6-bit elements are transposed.
    let bits = |x: &[u32], row: usize, i: usize| {
        let at = 6 * i;
        (0..6).fold(0, |v, b| v | (x[3 * row + (at + b) / 32] >> ((at + b) % 32) & 1) << b)
    };
    let body = "v_mul_u32_u24 v4, 12, v0\nglobal_load_dwordx3 v[6:8], v4, s[4:5]\nds_write_b96 v4, v[6:8]
                ds_read_b96_tr_b6 v[10:12], v4\nv_add_u32 v4, 0x400, v4\nglobal_store_dwordx3 v4, v[10:12], s[4:5]";
    let got = Body { cpu: "gfx950", lds: 1024, ..Body::new(body) }.run(&data);
    for lane in 0..64 {
        for i in 0..16 {
            let base = lane & !15;
            assert_eq!(
                bits(&got[256..], lane, i),
                bits(&data, base + i, lane & 15),
                "lane {lane} element {i}"
            );
        }
    }
}

#[test]
fn private_memory_is_copied_to_lds() {
    let body = "global_load_dword v5, v1, s[4:5]\nscratch_store_dword off, v5, off offset:4
                s_movk_i32 m0, 0x100\nscratch_load_lds_dword off, off offset:4
                s_movk_i32 m0, 0x200\nscratch_load_lds_sbyte off, off offset:5
                s_waitcnt vmcnt(0)\nds_read_b32 v6, v1 offset:260\nds_read_b32 v7, v1 offset:517\n";
    let body = body.to_owned() + &out(1, 6) + &out(2, 7);
    let data = words(192);
    let options = MachineOptions::default().allow_misaligned(true);
    let got = Body { lds: 1024, scratch: 16, options, ..Body::new(&body) }.run(&data);
    for lane in 0..64 {
        assert_eq!(got[64 + lane], data[lane]);
        assert_eq!(got[128 + lane] as i32, i32::from((data[lane] >> 8) as i8));
    }
}

/// A raw buffer that begins and ends within a dword: the last dword in range begins there and ends behind.
#[test]
fn ranges_of_raw_buffers_count_first_bytes() {
    let body = "s_add_u32 s8, s4, 2\ns_addc_u32 s9, s5, 0\ns_mov_b32 s10, 249\ns_mov_b32 s11, 0x20000\n
                buffer_load_dword v10, v1, s[8:11], 0 offen\ns_waitcnt vmcnt(0)\n"
        .to_owned()
        + &out(1, 10);
    let data: Vec<u32> = (0..2 * 64).map(|i| 0x1000_0000 + 0x1_0001 * i).collect();
    let options = MachineOptions::default().allow_misaligned(true);
    let got = Body { options, ..Body::new(&body) }.run(&data);
    for lane in 0..64 {
        let want = if lane < 63 { data[lane] >> 16 | data[lane + 1] << 16 } else { 0 };
        assert_eq!(got[64 + lane], want, "{lane}");
    }
}

#[test]
fn misaligned_lds_accesses_are_reports_unless_allowed() {
    for (text, bytes) in [
        ("ds_read_b32 v5, v4", 4),
        ("ds_read_b64 v[6:7], v4", 8),
        ("ds_read_b128 v[6:9], v4", 16),
        ("ds_read_u16 v5, v4", 2),
        ("ds_write_b64 v4, v[0:1]", 8),
        ("ds_write_b16 v4, v0", 2),
        ("ds_read2_b32 v[6:7], v4 offset1:1", 4),
    ] {
        let body = format!("v_add_u32 v4, 1, v1\n{text}");
        let rig = Body { lds: 1024, ..Body::new(&body) };
        match rig.try_run(&[0; 64]).unwrap_err() {
            Fault::Memory { problem, space, address, bytes: n, lane, .. } => {
                assert_eq!((problem, space), (MemoryProblem::Misaligned, Space::Lds), "{text}");
                assert_eq!((address, n, lane), (1, bytes, Some(0)), "{text}");
            }
            fault => panic!("{text}: {fault}"),
        }
        Body { options: MachineOptions::default().allow_misaligned(true), ..rig }.run(&[0; 64]);
    }
    // Atomics need their natural alignment in every mode; four bytes suffice for wide accesses.
    let body = "v_add_u32 v4, 4, v1\nds_add_u64 v4, v[0:1]";
    let options = MachineOptions::default().allow_misaligned(true);
    assert!(Body { lds: 1024, options, ..Body::new(body) }.try_run(&[0; 64]).is_err());
    Body { lds: 1024, ..Body::new("v_add_u32 v4, 4, v1\nds_read_b128 v[4:7], v4") }.run(&[0; 64]);
}

#[test]
fn rare_vector_instructions() {
    let data = words(20 * 64);
    let load: String =
        (0..4).map(|i| format!("global_load_dword v{}, v1, s[4:5] offset:{}\n", 10 + i, 256 * i)).collect();
    let bytes = |x: u32| x.to_le_bytes().map(u32::from);
    let sad = |window: u64, y: u32, masked: bool| {
        let window = bytes(window as u32);
        bytes(y)
            .iter()
            .zip(window)
            .map(|(y, x)| if masked && *y == 0 { 0 } else { x.abs_diff(*y) })
            .sum::<u32>()
    };
    let body = load.clone()
        + "v_and_b32 v13, 0xff00ffff, v13
           v_qsad_pk_u16_u8 v[20:21], v[10:11], v13, v[12:13]\nv_mqsad_pk_u16_u8 v[22:23], v[10:11], v13, v[12:13]
           v_mov_b32 v14, v10\nv_mov_b32 v15, v11\nv_mqsad_u32_u8 v[24:27], v[10:11], v13, v[12:15]
           v_mov_b32 v28, v12\nv_cvt_f32_ubyte0 v9, v10\nv_cvt_pkaccum_u8_f32 v28, v9, 2
           v_qsad_pk_u16_u8 v[30:31], v[10:11], v13, -1 clamp\n"
        + &(0..9).map(|i| out(4 + i, 20 + i)).collect::<String>()
        + &(out(13, 30) + &out(14, 31));
    let got = run(&body, &data);
    for lane in 0..64 {
        let x = [0, 1, 2, 3].map(|i| data[64 * i + lane]);
        let (window, y) = (u64::from(x[0]) | u64::from(x[1]) << 32, x[3] & 0xFF00_FFFF);
        let add = u64::from(x[2]) | u64::from(y) << 32;
        let row = |i: usize| got[256 + 64 * i + lane];
        for i in 0..4 {
            let half = |at: usize| row(at + i / 2) >> (16 * (i % 2)) & 0xFFFF;
            let c = (add >> (16 * i)) as u32;
            assert_eq!(half(0), c.wrapping_add(sad(window >> (8 * i), y, false)) & 0xFFFF);
            assert_eq!(half(2), c.wrapping_add(sad(window >> (8 * i), y, true)) & 0xFFFF);
            let wide = [x[2], y, x[0], x[1]][i];
            assert_eq!(row(4 + i), wide.wrapping_add(sad(window >> (8 * i), y, true)));
        }
        assert_eq!(row(8), x[2] & 0xFF00_FFFF | (x[0] & 0xFF) << 16);
        assert_eq!([row(9), row(10)], [!0, !0]);
    }
    // gfx950: shifted and saturated bytes into one half, a truth table on halves, minimum and maximum of three.
    let body = load
        + "v_mov_b32 v20, v13\nv_ashr_pk_i8_i32 v20, v10, v11, 20\nv_mov_b32 v21, v13
           v_ashr_pk_u8_i32 v21, v10, v11, 25 op_sel:[0,0,0,1]\nv_mov_b32 v22, v13
           v_bitop3_b16 v22, v10, v11, v12 bitop3:0xca op_sel:[1,0,1,1]
           v_pk_minimum3_f16 v23, v10, v11, v12\nv_pk_maximum3_f16 v24, v10, v11, v12\n"
        + &(0..5).map(|i| out(4 + i, 20 + i)).collect::<String>();
    let got = Body { cpu: "gfx950", ..Body::new(&body) }.run(&data);
    let number = |h: u32| {
        let (e, f) = ((h >> 10 & 31) as i32, f64::from(h & 0x3FF));
        let x = match e {
            0 => f * 2f64.powi(-24),
            31 if f != 0.0 => f64::NAN,
            31 => f64::INFINITY,
            _ => (1024.0 + f) * 2f64.powi(e - 25),
        };
        if h & 0x8000 != 0 { -x } else { x }
    };
    for lane in 0..64 {
        let x = [0, 1, 2, 3].map(|i| data[64 * i + lane]);
        let row = |i: usize| got[256 + 64 * i + lane];
        let shifted = |x: u32, by: u32, low: i32, high: i32| (x as i32 >> by).clamp(low, high) as u32 & 0xFF;
        let pair = |by, low, high| shifted(x[0], by, low, high) | shifted(x[1], by, low, high) << 8;
        assert_eq!(row(0), x[3] & 0xFFFF_0000 | pair(20, -128, 127));
        assert_eq!(row(1), x[3] & 0xFFFF | pair(25, 0, 255) << 16);
        let select = (x[0] >> 16) & x[1] | !(x[0] >> 16) & (x[2] >> 16);
        assert_eq!(row(2), x[3] & 0xFFFF | select << 16);
        for half in [0, 16] {
            let three = [0, 1, 2].map(|i| number(x[i] >> half & 0xFFFF));
            let nan = three.iter().any(|x| x.is_nan());
            let low = three.into_iter().fold(f64::INFINITY, f64::min);
            let high = three.into_iter().fold(f64::NEG_INFINITY, f64::max);
            let (a, b) = (number(row(3) >> half & 0xFFFF), number(row(4) >> half & 0xFFFF));
            assert!(if nan { a.is_nan() && b.is_nan() } else { a == low && b == high }, "{three:?} {a} {b}");
        }
    }
}

#[test]
fn hardware_registers() {
    // The bases of the apertures are what the aperture sources say.
    let body = "s_getreg_b32 s20, hwreg(HW_REG_SH_MEM_BASES, 16, 16)\ns_lshl_b32 s20, s20, 16\ns_mov_b32 s21, src_shared_base
                s_getreg_b32 s22, hwreg(HW_REG_SH_MEM_BASES, 0, 16)\ns_lshl_b32 s22, s22, 16\ns_mov_b32 s23, src_private_base
                s_sub_u32 s20, s20, s21\ns_sub_u32 s22, s22, s23\n";
    let got = run(&(body.to_owned() + &out_scalar(0, "s20") + &out_scalar(1, "s22")), &words(128));
    assert_eq!((got[0], got[64]), (0, 0));
    for (text, name) in [
        ("s_getreg_b32 s20, hwreg(HW_REG_TBA_LO)", "hardware register 16"),
        ("s_setreg_b32 hwreg(HW_REG_STATUS), s20", "hardware register 2"),
        ("s_sendmsg sendmsg(MSG_SAVEWAVE)", "s_sendmsg"),
        ("ds_gws_barrier v0 gds", "ds_gws_barrier"),
        ("s_rfe_b64 s[4:5]", "s_rfe_b64"),
    ] {
        let fault = Body::new(text).try_run(&[0; 64]).unwrap_err();
        assert!(matches!(fault, Fault::NoSemantics { .. }) && fault.to_string().contains(name), "{fault}");
    }
}

#[test]
fn clamp_saturates_integers() {
    // Operands around every limit, against wide integers.
    let edges =
        [0u32, 1, 0x7FFF, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 0x8080_7F7F, 0x7FFF_8000];
    let data: Vec<u32> = (0..64)
        .map(|i| edges[i % 10])
        .chain((0..64).map(|i| edges[i / 10 % 10]))
        .chain((0..64).map(|i| edges[(i * 7 + 3) % 10]))
        .chain(words(64 * 13))
        .collect();
    type Model = fn(u32, u32, u32) -> i128;
    // Instruction, exact value, limits.
    let cases: [(&str, Model, i128, i128); 9] = [
        (
            "v_mad_u32_u24 v20, v10, v11, v12 clamp",
            |a, b, c| i128::from(a & 0xFF_FFFF) * i128::from(b & 0xFF_FFFF) + i128::from(c),
            0,
            0xFFFF_FFFF,
        ),
        (
            "v_mad_i32_i16 v20, v10, v11, v12 clamp",
            |a, b, c| i128::from(a as i16) * i128::from(b as i16) + i128::from(c as i32),
            i128::from(i32::MIN),
            i128::from(i32::MAX),
        ),
        (
            "v_dot2_i32_i16 v20, v10, v11, v12 clamp",
            |a, b, c| {
                i128::from(a as i16) * i128::from(b as i16)
                    + i128::from((a >> 16) as i16) * i128::from((b >> 16) as i16)
                    + i128::from(c as i32)
            },
            i128::from(i32::MIN),
            i128::from(i32::MAX),
        ),
        (
            "v_dot4_u32_u8 v20, v10, v11, v12 clamp",
            |a, b, c| {
                a.to_le_bytes()
                    .iter()
                    .zip(b.to_le_bytes())
                    .map(|(x, y)| i128::from(*x) * i128::from(y))
                    .sum::<i128>()
                    + i128::from(c)
            },
            0,
            0xFFFF_FFFF,
        ),
        (
            "v_sad_u16 v20, v10, v11, v12 clamp",
            |a, b, c| {
                i128::from((a & 0xFFFF).abs_diff(b & 0xFFFF))
                    + i128::from((a >> 16).abs_diff(b >> 16))
                    + i128::from(c)
            },
            0,
            0xFFFF_FFFF,
        ),
        (
            "v_mad_u16 v20, v10, v11, v12 clamp\nv_and_b32 v20, 0xffff, v20",
            |a, b, c| i128::from(a as u16) * i128::from(b as u16) + i128::from(c as u16),
            0,
            0xFFFF,
        ),
        (
            "v_add_co_u32_e64 v20, vcc, v10, v11 clamp",
            |a, b, _| i128::from(a) + i128::from(b),
            0,
            0xFFFF_FFFF,
        ),
        (
            "v_sub_co_u32_e64 v20, vcc, v10, v11 clamp",
            |a, b, _| i128::from(a) - i128::from(b),
            0,
            0xFFFF_FFFF,
        ),
        (
            "v_mul_i32_i24_e64 v20, v10, v11 clamp",
            |a, b, _| i128::from((a << 8) as i32 >> 8) * i128::from((b << 8) as i32 >> 8),
            i128::from(i32::MIN),
            i128::from(i32::MAX),
        ),
    ];
    let load: String =
        (0..3).map(|i| format!("global_load_dword v{}, v1, s[4:5] offset:{}\n", 10 + i, 256 * i)).collect();
    for (text, model, low, high) in cases {
        let got = run(&(load.clone() + text + "\n" + &out(4, 20)), &data);
        for lane in 0..64 {
            let want = model(data[lane], data[64 + lane], data[128 + lane]).clamp(low, high) as u32;
            assert_eq!(got[256 + lane], want, "{text} lane {lane}");
        }
    }
    // 64 bits, signed and not.
    for (text, signed) in [("v_mad_u64_u32", false), ("v_mad_i64_i32", true)] {
        let body = format!(
            "{load}v_mov_b32 v13, v12\n{text} v[20:21], vcc, v10, v11, v[12:13] clamp\n{}{}",
            out(4, 20),
            out(5, 21)
        );
        let got = run(&body, &data);
        for lane in 0..64 {
            let (a, b, c) = (data[lane], data[64 + lane], u64::from(data[128 + lane]) * 0x1_0000_0001);
            let want = if signed {
                let sum = i128::from(a as i32) * i128::from(b as i32) + i128::from(c as i64);
                sum.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as u64
            } else {
                (u128::from(a) * u128::from(b) + u128::from(c)).min(u128::from(u64::MAX)) as u64
            };
            let got = u64::from(got[256 + lane]) | u64::from(got[320 + lane]) << 32;
            assert_eq!(got, want, "{text} lane {lane}");
        }
    }
}
