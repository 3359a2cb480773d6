//! Scalar instructions against independently written formulas: value and SCC, over special and random operands.

// Formulas are written as the ISA manual writes them.
#![allow(clippy::precedence)]

mod common;

use common::{Args, Assembly, Random, Rig, assemble, options};

/// Operands: a in s[8:9], b in s[10:11], SCC is bit 0 of the fifth word. Results: s[16:17] (old value 0x11111111
/// 0x22222222) and SCC.
type Case = (&'static str, fn(u64, u64, bool) -> (u64, Option<bool>));

const OLD: u64 = 0x2222_2222_1111_1111;

fn lo(x: u32) -> u64 {
    OLD & !0xFFFF_FFFF | u64::from(x)
}

/// A 32-bit result, SCC unless zero.
fn logic(x: u32) -> (u64, Option<bool>) {
    (lo(x), Some(x != 0))
}

fn wide(x: u64) -> (u64, Option<bool>) {
    (x, Some(x != 0))
}

fn test(b: bool) -> (u64, Option<bool>) {
    (OLD, Some(b))
}

#[test]
fn values_and_scc() {
    let cases: &[Case] = &[
        ("s_add_u32 s16, s8, s10", |a, b, _| {
            let sum = (a & 0xFFFF_FFFF) + (b & 0xFFFF_FFFF);
            (lo(sum as u32), Some(sum > 0xFFFF_FFFF))
        }),
        ("s_sub_u32 s16, s8, s10", |a, b, _| {
            (lo((a as u32).wrapping_sub(b as u32)), Some((a as u32) < b as u32))
        }),
        ("s_add_i32 s16, s8, s10", |a, b, _| {
            let sum = i64::from(a as i32) + i64::from(b as i32);
            (lo(sum as u32), Some(sum != i64::from(sum as i32)))
        }),
        ("s_sub_i32 s16, s8, s10", |a, b, _| {
            let d = i64::from(a as i32) - i64::from(b as i32);
            (lo(d as u32), Some(d != i64::from(d as i32)))
        }),
        ("s_addc_u32 s16, s8, s10", |a, b, c| {
            let sum = (a & 0xFFFF_FFFF) + (b & 0xFFFF_FFFF) + u64::from(c);
            (lo(sum as u32), Some(sum > 0xFFFF_FFFF))
        }),
        ("s_subb_u32 s16, s8, s10", |a, b, c| {
            let d = i64::from(a as u32) - i64::from(b as u32) - i64::from(c);
            (lo(d as u32), Some(d < 0))
        }),
        ("s_min_i32 s16, s8, s10", |a, b, _| {
            (lo((a as i32).min(b as i32) as u32), Some((a as i32) < b as i32))
        }),
        ("s_max_u32 s16, s8, s10", |a, b, _| (lo((a as u32).max(b as u32)), Some(a as u32 >= b as u32))),
        ("s_cselect_b32 s16, s8, s10", |a, b, c| (lo(if c { a } else { b } as u32), None)),
        ("s_cselect_b64 s[16:17], s[8:9], s[10:11]", |a, b, c| (if c { a } else { b }, None)),
        ("s_and_b32 s16, s8, s10", |a, b, _| logic((a & b) as u32)),
        ("s_or_b64 s[16:17], s[8:9], s[10:11]", |a, b, _| wide(a | b)),
        ("s_xor_b64 s[16:17], s[8:9], s[10:11]", |a, b, _| wide(a ^ b)),
        ("s_andn2_b64 s[16:17], s[8:9], s[10:11]", |a, b, _| wide(a & !b)),
        ("s_orn2_b32 s16, s8, s10", |a, b, _| logic((a | !b) as u32)),
        ("s_nand_b32 s16, s8, s10", |a, b, _| logic(!(a & b) as u32)),
        ("s_nor_b64 s[16:17], s[8:9], s[10:11]", |a, b, _| wide(!(a | b))),
        ("s_xnor_b32 s16, s8, s10", |a, b, _| logic(!(a ^ b) as u32)),
        ("s_lshl_b32 s16, s8, s10", |a, b, _| logic(((a & 0xFFFF_FFFF) << (b % 32)) as u32)),
        ("s_lshl_b64 s[16:17], s[8:9], s10", |a, b, _| wide((u128::from(a) << (b % 64)) as u64)),
        ("s_lshr_b32 s16, s8, s10", |a, b, _| logic(a as u32 >> (b % 32))),
        ("s_lshr_b64 s[16:17], s[8:9], s10", |a, b, _| wide(a >> (b % 64))),
        ("s_ashr_i32 s16, s8, s10", |a, b, _| logic((a as i32 >> (b % 32)) as u32)),
        ("s_ashr_i64 s[16:17], s[8:9], s10", |a, b, _| wide((a as i64 >> (b % 64)) as u64)),
        ("s_bfm_b32 s16, s8, s10", |a, b, _| (lo((((1u64 << (a % 32)) - 1) << (b % 32)) as u32), None)),
        ("s_bfm_b64 s[16:17], s8, s10", |a, b, _| ((((1u128 << (a % 64)) - 1) << (b % 64)) as u64, None)),
        ("s_mul_i32 s16, s8, s10", |a, b, _| (lo((a as u32).wrapping_mul(b as u32)), None)),
        ("s_mul_hi_u32 s16, s8, s10", |a, b, _| {
            (lo((((a & 0xFFFF_FFFF) * (b & 0xFFFF_FFFF)) >> 32) as u32), None)
        }),
        ("s_mul_hi_i32 s16, s8, s10", |a, b, _| {
            (lo(((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32), None)
        }),
        ("s_bfe_u32 s16, s8, s10", |a, b, _| {
            let (o, w) = (b % 32, (b >> 16) % 128);
            logic((u128::from(a as u32) >> o & ((1u128 << w) - 1)) as u32)
        }),
        ("s_bfe_i32 s16, s8, s10", |a, b, _| {
            let (o, w) = (b % 32, ((b >> 16) % 128).min(32 - b % 32));
            let x = i128::from(a as i32) >> o;
            logic(if w == 0 { 0 } else { (x << (128 - w) >> (128 - w)) as u32 })
        }),
        ("s_bfe_u64 s[16:17], s[8:9], s10", |a, b, _| {
            let (o, w) = (b % 64, (b >> 16) % 128);
            wide((u128::from(a) >> o & ((1u128 << w) - 1)) as u64)
        }),
        ("s_absdiff_i32 s16, s8, s10", |a, b, _| {
            // The difference wraps first.
            let d = i64::from((i64::from(a as i32) - i64::from(b as i32)) as i32);
            logic(d.unsigned_abs() as u32)
        }),
        ("s_lshl3_add_u32 s16, s8, s10", |a, b, _| {
            let sum = ((a & 0xFFFF_FFFF) << 3) + (b & 0xFFFF_FFFF);
            (lo(sum as u32), Some(sum > 0xFFFF_FFFF))
        }),
        ("s_pack_ll_b32_b16 s16, s8, s10", |a, b, _| (lo((a & 0xFFFF | (b & 0xFFFF) << 16) as u32), None)),
        ("s_pack_lh_b32_b16 s16, s8, s10", |a, b, _| (lo((a & 0xFFFF | b & 0xFFFF_0000) as u32), None)),
        ("s_pack_hh_b32_b16 s16, s8, s10", |a, b, _| (lo((a as u32 >> 16) | b as u32 & 0xFFFF_0000), None)),
        ("s_movk_i32 s16, 0x8001", |_, _, _| (lo(0xFFFF_8001), None)),
        ("s_cmovk_i32 s16, 0x7", |_, _, c| (if c { lo(7) } else { OLD }, None)),
        ("s_addk_i32 s16, 0x7fff", |_, _, _| (lo(0x1111_1111 + 0x7FFF), Some(false))),
        ("s_mulk_i32 s16, 0xfffe", |_, _, _| (lo(0x1111_1111u32.wrapping_mul(!1)), None)),
        ("s_cmpk_eq_i32 s8, 0xffff", |a, _, _| test(a as u32 == u32::MAX)),
        ("s_cmpk_gt_u32 s8, 0xffff", |a, _, _| test(a as u32 > 0xFFFF)),
        ("s_cmpk_lt_i32 s8, 0x8000", |a, _, _| test((a as i32) < -32768)),
        ("s_not_b64 s[16:17], s[8:9]", |a, _, _| wide(!a)),
        ("s_mov_b64 s[16:17], -3", |_, _, _| (-3i64 as u64, None)),
        ("s_mov_b64 s[16:17], 0x87654321", |_, _, _| (0x8765_4321, None)),
        ("s_mov_b32 s16, 4.0", |_, _, _| (lo(4f32.to_bits()), None)),
        ("s_cmov_b64 s[16:17], s[8:9]", |a, _, c| (if c { a } else { OLD }, None)),
        ("s_wqm_b64 s[16:17], s[8:9]", |a, _, _| {
            wide((0..64).map(|i| u64::from(a >> (i / 4 * 4) & 15 != 0) << i).sum())
        }),
        ("s_quadmask_b32 s16, s8", |a, _, _| {
            logic((0..8).map(|q| u32::from(a >> (4 * q) & 15 != 0) << q).sum())
        }),
        ("s_brev_b32 s16, s8", |a, _, _| (lo((0..32).map(|i| (a as u32 >> i & 1) << (31 - i)).sum()), None)),
        ("s_bcnt0_i32_b64 s16, s[8:9]", |a, _, _| logic((0..64).filter(|i| a >> i & 1 == 0).count() as u32)),
        ("s_bcnt1_i32_b32 s16, s8", |a, _, _| logic((0..32).filter(|i| a >> i & 1 == 1).count() as u32)),
        ("s_ff0_i32_b32 s16, s8", |a, _, _| (lo((0..32).find(|i| a >> i & 1 == 0).unwrap_or(!0)), None)),
        ("s_ff1_i32_b64 s16, s[8:9]", |a, _, _| (lo((0..64).find(|i| a >> i & 1 == 1).unwrap_or(!0)), None)),
        ("s_flbit_i32_b32 s16, s8", |a, _, _| {
            (lo((0..32).find(|i| a >> (31 - i) & 1 == 1).unwrap_or(!0)), None)
        }),
        ("s_flbit_i32 s16, s8", |a, _, _| {
            (lo((1..32).find(|i| (a >> (31 - i) & 1) != a >> 31 & 1).unwrap_or(!0)), None)
        }),
        ("s_flbit_i32_i64 s16, s[8:9]", |a, _, _| {
            (lo((1..64).find(|i| (a >> (63 - i) & 1) != a >> 63).unwrap_or(!0)), None)
        }),
        ("s_sext_i32_i8 s16, s8", |a, _, _| (lo(i32::from(a as i8) as u32), None)),
        ("s_sext_i32_i16 s16, s8", |a, _, _| (lo(i32::from(a as i16) as u32), None)),
        ("s_bitset0_b32 s16, s8", |a, _, _| (OLD & !(1 << (a % 32)), None)),
        ("s_bitset1_b64 s[16:17], s8", |a, _, _| (OLD | 1 << (a % 64), None)),
        ("s_abs_i32 s16, s8", |a, _, _| logic((a as i32).unsigned_abs())),
        ("s_bitreplicate_b64_b32 s[16:17], s8", |a, _, _| {
            ((0..64).map(|i| (a >> (i / 2) & 1) << i).sum(), None)
        }),
        ("s_cmp_eq_i32 s8, s10", |a, b, _| test(a as u32 == b as u32)),
        ("s_cmp_gt_i32 s8, s10", |a, b, _| test(a as i32 > b as i32)),
        ("s_cmp_le_u32 s8, s10", |a, b, _| test(a as u32 <= b as u32)),
        ("s_cmp_lg_u64 s[8:9], s[10:11]", |a, b, _| test(a != b)),
        ("s_bitcmp1_b32 s8, s10", |a, b, _| test(a >> (b % 32) & 1 == 1)),
        ("s_bitcmp0_b64 s[8:9], s10", |a, b, _| test(a >> (b % 64) & 1 == 0)),
        // Masks: EXEC is restored behind each case.
        (
            "s_mov_b64 exec, s[10:11]\ns_and_saveexec_b64 s[16:17], s[8:9]\ns_mov_b64 s[16:17], exec",
            |a, b, _| wide(a & b),
        ),
        ("s_mov_b64 exec, s[10:11]\ns_andn2_saveexec_b64 s[16:17], s[8:9]", |a, b, _| (b, Some(a & !b != 0))),
        ("s_mov_b64 exec, s[10:11]\ns_andn1_wrexec_b64 s[16:17], s[8:9]", |a, b, _| wide(!a & b)),
        (
            "s_mov_b64 exec, s[10:11]\ns_xor_saveexec_b64 s[16:17], s[8:9]\ns_mov_b64 s[16:17], exec",
            |a, b, _| wide(a ^ b),
        ),
        // Control.
        ("s_cbranch_scc1 .La%=\ns_mov_b32 s16, s8\n.La%=:", |a, _, c| {
            (if c { OLD } else { lo(a as u32) }, None)
        }),
        ("s_mov_b64 vcc, s[8:9]\ns_cbranch_vccz .Lb%=\ns_mov_b32 s16, 1\n.Lb%=:", |a, _, _| {
            (if a == 0 { OLD } else { lo(1) }, None)
        }),
        ("s_mov_b64 exec, s[8:9]\ns_cbranch_execnz .Lc%=\ns_mov_b32 s16, 1\n.Lc%=:", |a, _, _| {
            (if a != 0 { OLD } else { lo(1) }, None)
        }),
        (
            "s_call_b64 s[20:21], .Ld%=\ns_mov_b32 s17, 5\ns_branch .Le%=\n.Ld%=:\ns_mov_b32 s16, 6\ns_setpc_b64 s[20:21]\n.Le%=:",
            |_, _, _| (5 << 32 | 6, None),
        ),
        (
            "s_getpc_b64 s[20:21]\n.Lf%=:\ns_add_u32 s20, s20, .Lg%=-.Lf%=\ns_addc_u32 s21, s21, 0\ns_setpc_b64 s[20:21]\ns_mov_b32 s16, 9\n.Lg%=:\ns_cmp_eq_u32 s8, s8",
            |_, _, _| (OLD, Some(true)),
        ),
        ("s_mov_b32 m0, 1\ns_nop 0\ns_movrels_b32 s16, s8", |a, _, _| (lo((a >> 32) as u32), None)),
        ("s_mov_b32 m0, 1\ns_nop 0\ns_movreld_b32 s16, s8", |a, _, _| (OLD & 0xFFFF_FFFF | a << 32, None)),
        ("s_getreg_b32 s16, hwreg(HW_REG_MODE, 4, 4)", |_, _, _| (lo(0xF), None)),
        (
            "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0x9\ns_nop 1\ns_getreg_b32 s16, hwreg(HW_REG_MODE, 0, 8)\ns_nop 0\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0",
            |_, _, _| (lo(0xF9), None),
        ),
    ];
    let special = [
        0,
        1,
        2,
        31,
        32,
        63,
        0x7FFF_FFFF,
        0x8000_0000,
        0xFFFF_FFFF,
        0x1_0000_0000,
        u64::MAX,
        1 << 63,
        0x20_0004,
        0xFFFF_FFFF_8000_0000,
    ];
    let mut random = Random(21);
    let mut pick = || {
        let r = random.next();
        match r % 3 {
            0 => special[(r >> 4) as usize % special.len()],
            1 => u64::from(random.next()) << 32 | u64::from(random.next()),
            _ => u64::from(random.next()) >> (r >> 8 & 31),
        }
    };
    let sets: Vec<[u64; 3]> = (0..300).map(|i| [pick(), pick(), i & 1]).collect();
    let mut body = String::from(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  s_mul_i32 s6, s2, 24\n  s_waitcnt lgkmcnt(0)\n  s_add_u32 s12, s4, s6\n  s_addc_u32 s13, s5, 0\n  s_load_dwordx4 s[8:11], s[12:13], 0x0\n  s_load_dword s14, s[12:13], 0x10\n  s_waitcnt lgkmcnt(0)\n",
    );
    body += &format!(
        "  s_mul_i32 s7, s2, {}\n  v_mov_b32 v1, s7\n  v_add_u32 v1, {:#x}, v1\n",
        cases.len() * 12,
        sets.len() * 24
    );
    for (i, (asm, _)) in cases.iter().enumerate() {
        body += "  s_mov_b32 s16, 0x11111111\n  s_mov_b32 s17, 0x22222222\n  s_cmp_eq_u32 s14, 1\n";
        for line in asm.replace("%=", &i.to_string()).lines() {
            body += &format!("  {line}\n");
        }
        body += "  s_cselect_b32 s18, 1, 0\n  s_mov_b64 exec, 1\n  v_mov_b32 v4, s16\n  v_mov_b32 v5, s17\n  v_mov_b32 v6, s18\n  global_store_dwordx3 v1, v[4:6], s[4:5]\n  v_add_u32 v1, 12, v1\n";
    }
    let rig = Rig::new(options("gfx942"), &assemble(&Assembly { body: &body, ..Assembly::default() }));
    let mut data: Vec<u32> = sets.iter().flatten().flat_map(|x| [*x as u32, (*x >> 32) as u32]).collect();
    data.resize(sets.len() * 6 + sets.len() * cases.len() * 3, 0);
    let buffer = rig.upload("data", &data);
    rig.launch("test", sets.len() as u32, 64, &Args::new().push(buffer)).unwrap();
    let out: Vec<u32> = rig.download(buffer, data.len());
    for (i, got) in out[sets.len() * 6..].chunks(3).enumerate() {
        let ([a, b, c], (asm, formula)) = (sets[i / cases.len()], cases[i % cases.len()]);
        let (value, scc) = formula(a, b, c != 0);
        let scc = scc.unwrap_or(c != 0);
        let got = (u64::from(got[0]) | u64::from(got[1]) << 32, got[2] != 0);
        assert_eq!(
            got,
            (value, scc),
            "{asm}\n  of {a:#x}, {b:#x}, SCC {c}: got {:#x}, want {value:#x}",
            got.0
        );
    }
}
