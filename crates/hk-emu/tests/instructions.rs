//! Single instructions against independently written formulas, over special and random operands.
//!
//! All cases of a table are assembled into one kernel. Each lane loads four words v4..v7, runs every case, and stores
//! v8 and v9. Every case runs on every host level, and must give the same bits.

// Formulas are written as the ISA manual writes them.
#![allow(clippy::precedence, clippy::neg_cmp_op_on_partial_ord)]

mod common;

use common::{Args, Assembly, Random, Rig, assemble, options};
use hk_emu::Level;

type Case = (&'static str, fn([u32; 4]) -> [u32; 2]);

/// What a case leaves in a result register that it does not write.
const OLD: u32 = 0x5555_AAAA;

const SETS: usize = 24;

fn operands() -> Vec<[u32; 4]> {
    let special = [
        0,
        1,
        2,
        31,
        32,
        33,
        63,
        0x7F,
        0x80,
        0xFF,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x1_0000,
        0x7FFF_FFFF,
        0x8000_0000,
        0xFFFF_FFFF,
        0xFFFF_FFFE,
        0x3F80_0000,
        0xBF80_0000,
        0x7F80_0000,
        0xFF80_0000,
        0x7FC0_0000,
        0x7FA0_0001,
        0x0080_0000,
        0x007F_FFFF,
        0x0000_0001,
        0x8000_0001,
        0x7F7F_FFFF,
        0x4B80_0000,
        0xCF00_0000,
        0x4F00_0000,
        0x4F80_0000,
        0x3F00_0000,
        0x3FC0_0000,
        0x4020_0000,
        0x3C00_3C00,
        0x7C00_0001,
        0x0001_83FF,
        0x7BFF_FBFF,
    ];
    let mut random = Random(7);
    let mut pick = |i: usize| match i % 4 {
        0 => special[random.next() as usize % special.len()],
        // A float of moderate size.
        1 => (random.unit() * 2f32.powi((random.next() % 24) as i32 - 12)).to_bits(),
        2 => random.next() & 0xFFFF,
        _ => random.next(),
    };
    let mut out = vec![];
    for i in 0..SETS * 64 {
        let kinds = [i, i / 4, i / 16, i / 64];
        out.push(kinds.map(|k| pick(k + i % 3)));
    }
    out
}

fn run(cpu: &str, level: Level, directives: &str, cases: &[Case], operands: &[[u32; 4]]) -> Vec<[u32; 2]> {
    let mut body = String::from(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_lshl_b32 s6, s2, 10
  v_lshl_add_u32 v1, v0, 4, s6
  s_waitcnt lgkmcnt(0)
  global_load_dwordx4 v[4:7], v1, s[4:5]\n",
    );
    let n = cases.len();
    // Results: [case][operand] pairs behind the operands.
    body += &format!(
        "  v_lshlrev_b32 v2, 1, v1
  v_lshrrev_b32 v2, 2, v2
  v_add_u32 v2, {:#x}, v2
  s_waitcnt vmcnt(0)\n",
        operands.len() * 16
    );
    for (asm, _) in cases {
        body += &format!(
            "  v_mov_b32 v8, {OLD:#x}\n  v_mov_b32 v9, {OLD:#x}\n  v_mov_b32 v10, v4\n  v_mov_b32 v11, v5\n"
        );
        for line in asm.lines() {
            body += &format!("  {}\n", line.trim());
        }
        body += &format!(
            "  s_mov_b64 exec, -1\n  s_nop 1\n  global_store_dwordx2 v2, v[8:9], s[4:5]\n  v_add_u32 v2, {:#x}, v2\n",
            operands.len() * 8
        );
    }
    let image = assemble(&Assembly { cpu, body: &body, directives, ..Assembly::default() });
    let rig = Rig::new(options(cpu).level(Some(level)), &image);
    let mut data: Vec<u32> = operands.iter().flatten().copied().collect();
    data.resize(operands.len() * 4 + n * operands.len() * 2, 0);
    let buffer = rig.upload("data", &data);
    rig.launch("test", (operands.len() / 64) as u32, 64, &Args::new().push(buffer)).unwrap();
    let out: Vec<u32> = rig.download(buffer, data.len());
    out[operands.len() * 4..].chunks(2).map(|c| [c[0], c[1]]).collect()
}

fn check(cpu: &str, directives: &str, cases: &[Case]) {
    let operands = operands();
    let mut first: Option<Vec<[u32; 2]>> = None;
    for level in [Level::Portable, Level::Avx2, Level::Avx512].into_iter().filter(|l| l.available()) {
        let results = run(cpu, level, directives, cases, &operands);
        for (i, result) in results.iter().enumerate() {
            let (case, x) = (&cases[i / operands.len()], operands[i % operands.len()]);
            let want = case.1(x);
            assert_eq!(
                *result, want,
                "{cpu} {level:?}: {}\n  of {x:08x?}: got {result:08x?}, want {want:08x?}",
                case.0
            );
        }
        match &first {
            None => first = Some(results),
            Some(first) => assert!(*first == results, "levels differ"),
        }
    }
}

fn one(x: u32) -> [u32; 2] {
    [x, OLD]
}

fn two(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

fn pair(lo: u32, hi: u32) -> u64 {
    u64::from(lo) | u64::from(hi) << 32
}

#[test]
fn integers() {
    let cases: &[Case] = &[
        ("v_mov_b32 v8, v4", |x| one(x[0])),
        ("v_add_u32 v8, v4, v5", |x| one(x[0].wrapping_add(x[1]))),
        ("v_sub_u32 v8, v4, v5", |x| one(x[0].wrapping_sub(x[1]))),
        ("v_subrev_u32 v8, v4, v5", |x| one(x[1].wrapping_sub(x[0]))),
        ("v_add_u32 v8, v4, v5 clamp", |x| one(x[0].saturating_add(x[1]))),
        ("v_sub_u32 v8, v4, v5 clamp", |x| one(x[0].saturating_sub(x[1]))),
        ("v_add_i32 v8, v4, v5 clamp", |x| one((x[0] as i32).saturating_add(x[1] as i32) as u32)),
        ("v_mul_lo_u32 v8, v4, v5", |x| one((u64::from(x[0]) * u64::from(x[1])) as u32)),
        ("v_mul_hi_u32 v8, v4, v5", |x| one((u64::from(x[0]) * u64::from(x[1]) >> 32) as u32)),
        (
            "v_mul_hi_i32 v8, v4, v5",
            |x| one((i128::from(x[0] as i32) * i128::from(x[1] as i32) >> 32) as u32),
        ),
        ("v_mul_u32_u24 v8, v4, v5", |x| {
            one((u64::from(x[0] % (1 << 24)) * u64::from(x[1] % (1 << 24))) as u32)
        }),
        ("v_mul_hi_u32_u24 v8, v4, v5", |x| {
            one((u64::from(x[0] % (1 << 24)) * u64::from(x[1] % (1 << 24)) >> 32) as u32)
        }),
        ("v_mul_i32_i24 v8, v4, v5", |x| {
            let s = |x: u32| i64::from(x % (1 << 24)) - if x & 1 << 23 != 0 { 1 << 24 } else { 0 };
            one((s(x[0]) * s(x[1])) as u32)
        }),
        ("v_mad_u32_u24 v8, v4, v5, v6", |x| {
            one((u64::from(x[0] % (1 << 24)) * u64::from(x[1] % (1 << 24)) + u64::from(x[2])) as u32)
        }),
        ("v_min_i32 v8, v4, v5", |x| one((x[0] as i32).min(x[1] as i32) as u32)),
        ("v_max_u32 v8, v4, v5", |x| one(x[0].max(x[1]))),
        ("v_lshrrev_b32 v8, v4, v5", |x| one(x[1] >> (x[0] % 32))),
        ("v_ashrrev_i32 v8, v4, v5", |x| one((x[1] as i32 >> (x[0] % 32)) as u32)),
        ("v_lshlrev_b32 v8, v4, v5", |x| one((u64::from(x[1]) << (x[0] % 32)) as u32)),
        ("v_bfe_u32 v8, v4, v5, v6", |x| {
            let (o, w) = (x[1] % 32, x[2] % 32);
            one((u64::from(x[0]) >> o) as u32 & ((1u64 << w) - 1) as u32)
        }),
        ("v_bfe_i32 v8, v4, v5, v6", |x| {
            let (o, w) = (x[1] % 32, x[2] % 32);
            let shifted = i64::from(x[0] as i32) >> o;
            one(if w == 0 { 0 } else { (shifted << (64 - w) >> (64 - w)) as u32 })
        }),
        ("v_bfi_b32 v8, v4, v5, v6", |x| one(x[2] ^ (x[0] & (x[1] ^ x[2])))),
        ("v_alignbit_b32 v8, v4, v5, v6", |x| one((pair(x[1], x[0]) >> (x[2] % 32)) as u32)),
        ("v_alignbyte_b32 v8, v4, v5, v6", |x| one((pair(x[1], x[0]) >> (x[2] % 4 * 8)) as u32)),
        ("v_lshl_add_u32 v8, v4, v5, v6", |x| one((x[0] << (x[1] % 32)).wrapping_add(x[2]))),
        ("v_add_lshl_u32 v8, v4, v5, v6", |x| one(x[0].wrapping_add(x[1]) << (x[2] % 32))),
        ("v_add3_u32 v8, v4, v5, v6", |x| one(x[0].wrapping_add(x[1]).wrapping_add(x[2]))),
        ("v_lshl_or_b32 v8, v4, v5, v6", |x| one((x[0] << (x[1] % 32)) | x[2])),
        ("v_and_or_b32 v8, v4, v5, v6", |x| one((x[0] & x[1]) | x[2])),
        ("v_or3_b32 v8, v4, v5, v6", |x| one(x[0] | x[1] | x[2])),
        ("v_xad_u32 v8, v4, v5, v6", |x| one((x[0] ^ x[1]).wrapping_add(x[2]))),
        ("v_med3_i32 v8, v4, v5, v6", |x| {
            let mut s = [x[0] as i32, x[1] as i32, x[2] as i32];
            s.sort();
            one(s[1] as u32)
        }),
        ("v_med3_u32 v8, v4, v5, v6", |x| {
            let mut s = [x[0], x[1], x[2]];
            s.sort();
            one(s[1])
        }),
        ("v_min3_u32 v8, v4, v5, v6", |x| one(*x[..3].iter().min().unwrap())),
        ("v_max3_i32 v8, v4, v5, v6", |x| one(x[..3].iter().map(|x| *x as i32).max().unwrap() as u32)),
        ("v_perm_b32 v8, v4, v5, v6", |x| {
            let bytes: Vec<u8> = x[1].to_le_bytes().into_iter().chain(x[0].to_le_bytes()).collect();
            let pick = |s: u8| match s {
                0..=7 => bytes[usize::from(s)],
                8..=11 => {
                    if bytes[2 * usize::from(s - 8) + 1] & 0x80 != 0 {
                        0xFF
                    } else {
                        0
                    }
                }
                12 => 0,
                _ => 0xFF,
            };
            one(u32::from_le_bytes(x[2].to_le_bytes().map(pick)))
        }),
        ("v_bfm_b32 v8, v4, v5", |x| one(((1u64 << (x[0] % 32)) - 1 << (x[1] % 32)) as u32)),
        ("v_bcnt_u32_b32 v8, v4, v5", |x| {
            one((0..32).map(|i| x[0] >> i & 1).sum::<u32>().wrapping_add(x[1]))
        }),
        ("v_not_b32 v8, v4", |x| one(u32::MAX - x[0])),
        ("v_bfrev_b32 v8, v4", |x| one((0..32).map(|i| (x[0] >> i & 1) << (31 - i)).sum())),
        ("v_ffbh_u32 v8, v4", |x| one((0..32).find(|i| x[0] >> (31 - i) & 1 != 0).unwrap_or(!0))),
        ("v_ffbl_b32 v8, v4", |x| one((0..32).find(|i| x[0] >> i & 1 != 0).unwrap_or(!0))),
        ("v_ffbh_i32 v8, v4", |x| one((1..32).find(|i| (x[0] >> (31 - i) & 1) != x[0] >> 31).unwrap_or(!0))),
        ("v_sad_u8 v8, v4, v5, v6", |x| {
            let d: u32 = x[0]
                .to_le_bytes()
                .iter()
                .zip(x[1].to_le_bytes())
                .map(|(a, b)| u32::from(a.abs_diff(b)))
                .sum();
            one(d.wrapping_add(x[2]))
        }),
        ("v_add_co_u32 v8, vcc, v4, v5\nv_addc_co_u32 v9, vcc, v6, v7, vcc", |x| {
            two(pair(x[0], x[2]).wrapping_add(pair(x[1], x[3])))
        }),
        ("v_sub_co_u32 v8, vcc, v4, v5\nv_subb_co_u32 v9, vcc, v6, v7, vcc", |x| {
            two(pair(x[0], x[2]).wrapping_sub(pair(x[1], x[3])))
        }),
        ("v_add_co_u32 v8, s[10:11], v4, v5\nv_cndmask_b32 v9, 0, 1, s[10:11]", |x| {
            let sum = u64::from(x[0]) + u64::from(x[1]);
            [sum as u32, (sum >> 32) as u32]
        }),
        ("v_mad_u64_u32 v[8:9], vcc, v4, v5, v[6:7]", |x| {
            two((u64::from(x[0]) * u64::from(x[1])).wrapping_add(pair(x[2], x[3])))
        }),
        ("v_mad_i64_i32 v[8:9], vcc, v4, v5, v[6:7]", |x| {
            two((i64::from(x[0] as i32) * i64::from(x[1] as i32)).wrapping_add(pair(x[2], x[3]) as i64)
                as u64)
        }),
        ("v_lshl_add_u64 v[8:9], v[4:5], 3, v[6:7]", |x| {
            two((pair(x[0], x[1]) << 3).wrapping_add(pair(x[2], x[3])))
        }),
        ("v_lshlrev_b64 v[8:9], v4, v[6:7]", |x| two(pair(x[2], x[3]) << (x[0] % 64))),
        ("v_ashrrev_i64 v[8:9], v4, v[6:7]", |x| two((pair(x[2], x[3]) as i64 >> (x[0] % 64)) as u64)),
        ("v_add_u16 v8, v4, v5", |x| one(x[0].wrapping_add(x[1]) % 65536)),
        ("v_mad_u16 v8, v4, v5, v6", |x| {
            one(OLD & 0xFFFF_0000 | (x[0] % 65536 * (x[1] % 65536)).wrapping_add(x[2]) % 65536)
        }),
        ("v_mad_u16 v8, v4, v5, v6 op_sel:[1,0,0,1]", |x| {
            one(OLD & 0xFFFF | ((x[0] >> 16) * (x[1] % 65536)).wrapping_add(x[2]) << 16)
        }),
        ("v_pk_add_u16 v8, v4, v5", |x| {
            one(x[0].wrapping_add(x[1]) & 0xFFFF | (x[0] >> 16).wrapping_add(x[1] >> 16) << 16)
        }),
        ("v_pk_add_u16 v8, v4, v5 op_sel:[1,0] op_sel_hi:[0,1]", |x| {
            one((x[0] >> 16).wrapping_add(x[1]) & 0xFFFF | x[0].wrapping_add(x[1] >> 16) << 16)
        }),
        ("v_pk_lshlrev_b16 v8, v4, v5", |x| {
            one(x[1] << (x[0] % 16) & 0xFFFF | (x[1] >> 16) << (x[0] >> 16 & 15) << 16)
        }),
        ("v_dot4_i32_i8 v8, v4, v5, v6", |x| {
            let d: i32 =
                (0..4).map(|i| i32::from((x[0] >> (8 * i)) as i8) * i32::from((x[1] >> (8 * i)) as i8)).sum();
            one((x[2] as i32).wrapping_add(d) as u32)
        }),
        // Constants, literals, scalars.
        ("v_add_u32 v8, -7, v4", |x| one(x[0].wrapping_sub(7))),
        ("v_add_u32 v8, 0x12345678, v4", |x| one(x[0].wrapping_add(0x1234_5678))),
        ("s_movk_i32 s10, 0x1234\nv_sub_u32 v8, s10, v4", |x| one(0x1234u32.wrapping_sub(x[0]))),
        ("s_mov_b64 s[10:11], 0x77\nv_lshl_add_u64 v[8:9], s[10:11], 1, v[4:5]", |x| {
            two(pair(x[0], x[1]).wrapping_add(0xEE))
        }),
        // SDWA.
        (
            "v_add_u32_sdwa v8, v4, v5 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1",
            |x| one((x[0] >> 16 & 0xFF) + (x[1] >> 16)),
        ),
        (
            "v_add_u32_sdwa v8, sext(v4), v5 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0 src1_sel:DWORD",
            |x| {
                let sum = i32::from(x[0] as i8).wrapping_add(x[1] as i32) as u32;
                one(OLD & 0xFFFF_00FF | (sum & 0xFF) << 8)
            },
        ),
        ("v_mov_b32_sdwa v8, v4 dst_sel:WORD_0 dst_unused:UNUSED_SEXT src0_sel:WORD_1", |x| {
            one(i32::from((x[0] >> 16) as i16) as u32)
        }),
        // Lanes.
        ("v_mbcnt_lo_u32_b32 v8, -1, 0\nv_mbcnt_hi_u32_b32 v8, -1, v8\nv_sub_u32 v8, v8, v0", |_| one(0)),
        ("v_swap_b32 v10, v11\nv_mov_b32 v8, v10\nv_mov_b32 v9, v11", |x| [x[1], x[0]]),
        ("v_accvgpr_write_b32 a3, v4\nv_accvgpr_read_b32 v8, a3", |x| one(x[0])),
    ];
    check("gfx942", "", cases);
    check("gfx950", "", cases);
    check(
        "gfx950",
        "",
        &[
            ("v_bitop3_b32 v8, v4, v5, v6 bitop3:0x96", |x| one(x[0] ^ x[1] ^ x[2])),
            ("v_bitop3_b32 v8, v4, v5, v6 bitop3:0x38", |x| {
                let table = 0x38u32;
                let bit = |i: u32| table >> ((x[0] >> i & 1) << 2 | (x[1] >> i & 1) << 1 | x[2] >> i & 1) & 1;
                one((0..32).map(|i| bit(i) << i).sum())
            }),
        ],
    );
}

fn f(x: u32) -> f32 {
    f32::from_bits(x)
}

/// Result bits with the emulator's NaN rule: the first NaN operand, quiet; else the default NaN.
fn nan(value: f32, operands: &[u32]) -> u32 {
    if !value.is_nan() {
        return value.to_bits();
    }
    operands.iter().find(|x| f(**x).is_nan()).map_or(0x7FC0_0000, |x| x | 0x0040_0000)
}

/// The exact f32 fma through integers wide enough for any finite operands is in the unit tests; here the host's.
fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

#[test]
fn floats() {
    let cases: &[Case] = &[
        ("v_add_f32 v8, v4, v5", |x| one(nan(f(x[0]) + f(x[1]), &x[..2]))),
        ("v_sub_f32 v8, v4, v5", |x| one(nan(f(x[0]) - f(x[1]), &x[..2]))),
        ("v_mul_f32 v8, v4, v5", |x| one(nan(f(x[0]) * f(x[1]), &x[..2]))),
        ("v_fma_f32 v8, v4, v5, v6", |x| one(nan(fma(f(x[0]), f(x[1]), f(x[2])), &x[..3]))),
        ("v_fma_f32 v8, -v4, |v5|, v6", |x| {
            let y = [x[0] ^ 1 << 31, x[1] & !(1 << 31), x[2]];
            one(nan(fma(f(y[0]), f(y[1]), f(y[2])), &y))
        }),
        ("v_mov_b32 v8, v6\nv_fmac_f32 v8, v4, v5", |x| one(nan(fma(f(x[0]), f(x[1]), f(x[2])), &x[..3]))),
        ("v_fmamk_f32 v8, v4, 0x40490fdb, v5", |x| {
            one(nan(fma(f(x[0]), f(0x40490fdb), f(x[1])), &[x[0], 0x40490fdb, x[1]]))
        }),
        ("v_fmaak_f32 v8, v4, v5, 0x40490fdb", |x| {
            one(nan(fma(f(x[0]), f(x[1]), f(0x40490fdb)), &[x[0], x[1], 0x40490fdb]))
        }),
        ("v_mul_f32 v8, 0.5, v4", |x| one(nan(0.5 * f(x[0]), &x[..1]))),
        ("v_mul_f32 v8, 0.15915494, v4", |x| one(nan(f(0x3e22f983) * f(x[0]), &x[..1]))),
        ("v_add_f32 v8, v4, v5 clamp", |x| {
            let v = f(x[0]) + f(x[1]);
            // DX10_CLAMP is set: NaN becomes 0.
            one(if v.is_nan() {
                0
            } else if v > 1.0 {
                1f32.to_bits()
            } else if v > 0.0 {
                v.to_bits()
            } else {
                0
            })
        }),
        ("v_pk_fma_f32 v[8:9], v[4:5], v[6:7], v[4:5]", |x| {
            [
                nan(fma(f(x[0]), f(x[2]), f(x[0])), &[x[0], x[2], x[0]]),
                nan(fma(f(x[1]), f(x[3]), f(x[1])), &[x[1], x[3], x[1]]),
            ]
        }),
        ("v_pk_mul_f32 v[8:9], v[4:5], v[6:7] op_sel:[1,0] op_sel_hi:[0,1]", |x| {
            [nan(f(x[1]) * f(x[2]), &[x[1], x[2]]), nan(f(x[0]) * f(x[3]), &[x[0], x[3]])]
        }),
        ("v_pk_add_f32 v[8:9], v[4:5], v[6:7] neg_lo:[1,0] neg_hi:[0,1]", |x| {
            let (a, b) = (x[0] ^ 1 << 31, x[3] ^ 1 << 31);
            [nan(f(a) + f(x[2]), &[a, x[2]]), nan(f(x[1]) + f(b), &[x[1], b])]
        }),
        ("v_pk_mov_b32 v[8:9], v[4:5], v[6:7] op_sel:[1,0]", |x| [x[1], x[2]]),
        ("v_rcp_f32 v8, v4", |x| {
            let d = if f(x[0]).is_subnormal() { x[0] & 1 << 31 } else { x[0] };
            let v = (1.0 / f64::from(f(d))) as f32;
            one(if v.is_subnormal() { v.to_bits() & 1 << 31 } else { nan(v, &[d]) })
        }),
        ("v_sqrt_f32 v8, v4", |x| {
            let d = if f(x[0]).is_subnormal() { x[0] & 1 << 31 } else { x[0] };
            one(nan(f64::from(f(d)).sqrt() as f32, &[d]))
        }),
        ("v_cvt_f32_i32 v8, v4", |x| one((f64::from(x[0] as i32) as f32).to_bits())),
        ("v_cvt_f32_u32 v8, v4", |x| one((f64::from(x[0]) as f32).to_bits())),
        ("v_cvt_i32_f32 v8, v4", |x| {
            let v = f64::from(f(x[0])).trunc();
            one(if v.is_nan() { 0 } else { v.clamp(-2147483648.0, 2147483647.0) as i64 as u32 })
        }),
        ("v_cvt_u32_f32 v8, v4", |x| {
            let v = f64::from(f(x[0])).trunc();
            one(if v.is_nan() { 0 } else { v.clamp(0.0, 4294967295.0) as i64 as u32 })
        }),
        ("v_cvt_f32_ubyte2 v8, v4", |x| one(f32::from((x[0] >> 16) as u8).to_bits())),
        ("v_floor_f32 v8, v4", |x| one(nan(f64::from(f(x[0])).floor() as f32, &x[..1]))),
        ("v_ceil_f32 v8, v4", |x| one(nan(f64::from(f(x[0])).ceil() as f32, &x[..1]))),
        ("v_trunc_f32 v8, v4", |x| one(nan(f64::from(f(x[0])).trunc() as f32, &x[..1]))),
        ("v_rndne_f32 v8, v4", |x| one(nan(f64::from(f(x[0])).round_ties_even() as f32, &x[..1]))),
        ("v_ldexp_f32 v8, v4, v5", |x| {
            // In steps, so that only the last one can round.
            let n = (x[1] as i32).clamp(-400, 400);
            let v = (0..n.abs()).fold(f64::from(f(x[0])), |v, _| if n > 0 { v * 2.0 } else { v * 0.5 });
            one(nan(v as f32, &x[..1]))
        }),
        ("v_frexp_exp_i32_f32 v8, v4\nv_frexp_mant_f32 v9, v4", |x| {
            let v = f64::from(f(x[0]));
            if v == 0.0 || !v.is_finite() {
                return [0, if v.is_nan() { x[0] | 0x40_0000 } else { x[0] }];
            }
            let mut e = 0;
            let mut m = v;
            while m.abs() >= 1.0 {
                m /= 2.0;
                e += 1;
            }
            while m.abs() < 0.5 {
                m *= 2.0;
                e -= 1;
            }
            [e as u32, (m as f32).to_bits()]
        }),
        ("v_cmp_lt_f32 vcc, v4, v5\nv_cndmask_b32 v8, v4, v5, vcc", |x| {
            one(if f(x[0]) < f(x[1]) { x[1] } else { x[0] })
        }),
        ("v_cmp_nle_f32 s[10:11], v4, v5\nv_cndmask_b32 v8, 0, 1, s[10:11]", |x| {
            one(u32::from(!(f(x[0]) <= f(x[1]))))
        }),
        ("v_cmp_u_f32 vcc, v4, v5\nv_cndmask_b32 v8, 0, 1, vcc", |x| {
            one(u32::from(f(x[0]).is_nan() || f(x[1]).is_nan()))
        }),
        ("v_cmp_lt_i32 vcc, v4, v5\nv_cndmask_b32 v8, 0, 1, vcc", |x| {
            one(u32::from((x[0] as i32) < x[1] as i32))
        }),
        ("v_cmp_ge_u32 vcc, v4, v5\nv_cndmask_b32 v8, 0, 1, vcc", |x| one(u32::from(x[0] >= x[1]))),
        ("v_cmp_lt_u64 vcc, v[4:5], v[6:7]\nv_cndmask_b32 v8, 0, 1, vcc", |x| {
            one(u32::from(pair(x[0], x[1]) < pair(x[2], x[3])))
        }),
        ("v_cmpx_gt_u32 v4, v5\nv_mov_b32 v8, v6", |x| one(if x[0] > x[1] { x[2] } else { OLD })),
        ("v_cmp_class_f32 vcc, v4, v5\nv_cndmask_b32 v8, 0, 1, vcc", |x| {
            let v = f(x[0]);
            let bit = if v.is_nan() {
                if x[0] & 0x40_0000 != 0 { 1 } else { 0 }
            } else {
                let order = [
                    v == f32::NEG_INFINITY,
                    v.is_normal() && v < 0.0,
                    v.is_subnormal() && v < 0.0,
                    v == 0.0 && x[0] != 0,
                    x[0] == 0,
                    v.is_subnormal(),
                    v.is_normal(),
                    true,
                ];
                2 + order.iter().position(|b| *b).unwrap()
            };
            one(x[1] >> bit & 1)
        }),
        ("v_cvt_f32_f16 v8, v4", |x| one(half(x[0] as u16, 1.0))),
        ("v_cvt_f16_f32 v8, v4", |x| one(u32::from(to_half(f64::from(f(x[0])), x[0])))),
        ("v_add_f16 v8, v4, v5", |x| one(half_op(x[0], x[1], |a, b| a + b))),
        ("v_mul_f16 v8, v4, v5", |x| one(half_op(x[0], x[1], |a, b| a * b))),
        ("v_pk_mul_f16 v8, v4, v5", |x| {
            one(half_op(x[0], x[1], |a, b| a * b) | half_op(x[0] >> 16, x[1] >> 16, |a, b| a * b) << 16)
        }),
        ("v_cvt_pkrtz_f16_f32 v8, v4, v5", |x| one(toward_zero(x[0]) | toward_zero(x[1]) << 16)),
        ("v_exp_f32 v8, v4", |x| {
            let d = if f(x[0]).is_subnormal() { 0.0 } else { f64::from(f(x[0])) };
            let v = d.exp2() as f32;
            one(if v.is_subnormal() { 0 } else { nan(v, &x[..1]) })
        }),
        ("v_log_f32 v8, v4", |x| {
            let d = if f(x[0]).is_subnormal() { x[0] & 1 << 31 } else { x[0] };
            one(nan(f64::from(f(d)).log2() as f32, &[d]))
        }),
    ];
    check("gfx942", "", cases);
    check("gfx950", "", cases);
}

/// The value of an f16, by the definition, as f32 bits.
fn half(h: u16, scale: f64) -> u32 {
    let (s, e, m) = (h >> 15, h >> 10 & 31, h & 1023);
    if e == 31 {
        let nan = if m != 0 { 0x40_0000 | u32::from(m) << 13 } else { 0 };
        return u32::from(s) << 31 | 0x7F80_0000 | nan;
    }
    let v = if e == 0 {
        f64::from(m) * 2f64.powi(-24)
    } else {
        f64::from(1024 + m) * 2f64.powi(i32::from(e) - 25)
    };
    ((if s != 0 { -v } else { v } * scale) as f32).to_bits()
}

/// The nearest f16: a search over all of them, the even one of a tie.
fn to_half(v: f64, nan_bits: u32) -> u16 {
    if v.is_nan() {
        return (nan_bits >> 16 & 0x8000) as u16 | 0x7E00 | (nan_bits >> 13 & 0x3FF) as u16;
    }
    let sign = if v.is_sign_negative() { 0x8000 } else { 0 };
    let a = v.abs();
    let value = |h: u16| if h == 0x7C00 { 65536.0 } else { f64::from(f(half(h, 1.0))) };
    let (mut lo, mut hi) = (0u16, 0x7C00u16);
    while hi - lo > 1 {
        let mid = (lo + hi) / 2;
        if value(mid) <= a { lo = mid } else { hi = mid }
    }
    if a >= 65536.0 {
        return sign | 0x7C00;
    }
    let (dl, dh) = (a - value(lo), value(hi) - a);
    sign | if dl < dh || dl == dh && lo % 2 == 0 { lo } else { hi }
}

fn half_op(a: u32, b: u32, op: fn(f64, f64) -> f64) -> u32 {
    let (x, y) = (a as u16, b as u16);
    let is_nan = |h: u16| h & 0x7FFF > 0x7C00;
    if is_nan(x) || is_nan(y) {
        return u32::from(if is_nan(x) { x } else { y } | 0x200);
    }
    let v = op(f64::from(f(half(x, 1.0))), f64::from(f(half(y, 1.0))));
    if v.is_nan() { 0x7E00 } else { u32::from(to_half(v, 0)) }
}

fn toward_zero(x: u32) -> u32 {
    let v = f64::from(f(x));
    if v.is_nan() || v.is_infinite() {
        return u32::from(to_half(v, x));
    }
    let near = to_half(v, x);
    let back = if near & 0x7FFF == 0x7C00 { 65536.0 } else { f64::from(f(half(near & 0x7FFF, 1.0))) };
    u32::from(if back > v.abs() { near - 1 } else { near }).min(u32::from(near & 0x8000) | 0x7BFF)
}

/// f64, whose operands are pairs.
#[test]
fn doubles() {
    fn d(lo: u32, hi: u32) -> f64 {
        f64::from_bits(pair(lo, hi))
    }
    fn out(v: f64, operands: &[u64]) -> [u32; 2] {
        if !v.is_nan() {
            return two(v.to_bits());
        }
        two(operands.iter().find(|x| f64::from_bits(**x).is_nan()).map_or(0x7FF8 << 48, |x| x | 1 << 51))
    }
    let cases: &[Case] = &[
        ("v_add_f64 v[8:9], v[4:5], v[6:7]", |x| {
            out(d(x[0], x[1]) + d(x[2], x[3]), &[pair(x[0], x[1]), pair(x[2], x[3])])
        }),
        ("v_mul_f64 v[8:9], v[4:5], -v[6:7]", |x| {
            let y = pair(x[2], x[3]) ^ 1 << 63;
            out(d(x[0], x[1]) * f64::from_bits(y), &[pair(x[0], x[1]), y])
        }),
        ("v_fma_f64 v[8:9], v[4:5], v[6:7], 1.0", |x| {
            out(d(x[0], x[1]).mul_add(d(x[2], x[3]), 1.0), &[pair(x[0], x[1]), pair(x[2], x[3])])
        }),
        ("v_cvt_f64_f32 v[8:9], v4", |x| {
            if f(x[0]).is_nan() {
                let sign = u64::from(x[0] >> 31) << 63;
                two(sign | 0x7FF8 << 48 | u64::from(x[0] & 0x3F_FFFF) << 29)
            } else {
                two(f64::from(f(x[0])).to_bits())
            }
        }),
        ("v_cvt_f64_i32 v[8:9], v4", |x| two(f64::from(x[0] as i32).to_bits())),
        ("v_cvt_i32_f64 v8, v[4:5]", |x| {
            let v = d(x[0], x[1]);
            one(if v.is_nan() { 0 } else { v.trunc().clamp(-2147483648.0, 2147483647.0) as i64 as u32 })
        }),
        ("v_floor_f64 v[8:9], v[4:5]", |x| out(d(x[0], x[1]).floor(), &[pair(x[0], x[1])])),
        ("v_cmp_lt_f64 vcc, v[4:5], v[6:7]\nv_cndmask_b32 v8, 0, 1, vcc", |x| {
            one(u32::from(d(x[0], x[1]) < d(x[2], x[3])))
        }),
        ("v_max_f64 v[8:9], v[4:5], 1.0", |x| {
            let v = d(x[0], x[1]);
            // IEEE mode: a signalling NaN comes back quiet.
            let signals = v.is_nan() && x[1] & 0x8_0000 == 0;
            if signals {
                two(pair(x[0], x[1]) | 1 << 51)
            } else {
                two(if v.is_nan() || v < 1.0 { 1.0 } else { v }.to_bits())
            }
        }),
    ];
    check("gfx942", "", cases);
}

/// The MODE register: denormals and rounding, against rational arithmetic in f64.
#[test]
fn modes() {
    fn flush(x: u32) -> u32 {
        if f(x).is_subnormal() { x & 1 << 31 } else { x }
    }
    let flushing: &[Case] = &[
        ("v_add_f32 v8, v4, v5", |x| {
            let y = [flush(x[0]), flush(x[1])];
            one(flush(nan(f(y[0]) + f(y[1]), &y)))
        }),
        ("v_mul_f32 v8, v4, v5", |x| {
            let y = [flush(x[0]), flush(x[1])];
            one(flush(nan(f(y[0]) * f(y[1]), &y)))
        }),
        ("v_fma_f32 v8, v4, v5, v6", |x| {
            let y = [flush(x[0]), flush(x[1]), flush(x[2])];
            one(flush(nan(fma(f(y[0]), f(y[1]), f(y[2])), &y)))
        }),
        ("v_mov_b32 v8, v4", |x| one(x[0])),
        ("v_cmp_lt_f32 vcc, v4, v5\nv_cndmask_b32 v8, 0, 1, vcc", |x| {
            one(u32::from(f(flush(x[0])) < f(flush(x[1]))))
        }),
    ];
    check("gfx942", ".amdhsa_float_denorm_mode_32 0", flushing);

    // Output modifiers act only where denormals are flushed and IEEE is off.
    let omod: &[Case] = &[("v_mul_f32 v8, v4, v5 mul:4", |x| {
        let y = [flush(x[0]), flush(x[1])];
        let v = flush(nan(f(y[0]) * f(y[1]), &y));
        one(if f(v).is_nan() { v } else { flush((f(v) * 4.0).to_bits()) })
    })];
    check("gfx942", ".amdhsa_float_denorm_mode_32 0\n  .amdhsa_ieee_mode 0", omod);

    /// One step of f32 towards the infinity of `up`'s sign, or nothing if `v` is exact.
    fn directed(exact: f64, error: f64, up: bool) -> u32 {
        let near = exact as f32;
        if exact.is_nan() || exact.is_infinite() {
            return near.to_bits();
        }
        // What is left of the true value beyond the rounded one.
        let left = (exact - f64::from(near)) + error;
        if near.is_infinite() {
            let toward = near.is_sign_positive() == up;
            return if toward { near.to_bits() } else { near.to_bits() - 1 };
        }
        let step = |v: f32, up: bool| if up { v.next_up() } else { v.next_down() };
        let v = if up && left > 0.0 || !up && left < 0.0 { step(near, up) } else { near };
        v.to_bits()
    }
    fn sum(x: &[u32; 4], up: bool) -> u32 {
        let (a, b) = (f64::from(f(x[0])), f64::from(f(x[1])));
        if f(x[0]).is_nan() || f(x[1]).is_nan() || (a + b).is_nan() {
            return nan(f32::NAN, &x[..2]);
        }
        let s = a + b;
        let bb = s - a;
        let error = if s.is_finite() { (a - (s - bb)) + (b - bb) } else { 0.0 };
        if s == 0.0 && error == 0.0 {
            // An exact zero of opposite terms has the sign of the mode; of equal signs it keeps theirs.
            let same = f(x[0]).is_sign_negative() == f(x[1]).is_sign_negative();
            return if same {
                x[0] & 1 << 31
            } else if up {
                0
            } else {
                1 << 31
            };
        }
        directed(s, error, up)
    }
    fn product(x: &[u32; 4], up: bool) -> u32 {
        let v = f64::from(f(x[0])) * f64::from(f(x[1]));
        if v.is_nan() { nan(f32::NAN, &x[..2]) } else { directed(v, 0.0, up) }
    }
    let up: &[Case] = &[
        ("v_add_f32 v8, v4, v5", |x| one(sum(&x, true))),
        ("v_mul_f32 v8, v4, v5", |x| one(product(&x, true))),
    ];
    let down: &[Case] = &[
        ("v_add_f32 v8, v4, v5", |x| one(sum(&x, false))),
        ("v_mul_f32 v8, v4, v5", |x| one(product(&x, false))),
    ];
    check("gfx942", ".amdhsa_float_round_mode_32 1", up);
    check("gfx942", ".amdhsa_float_round_mode_32 2", down);
    // The same through s_setreg: MODE bits 1:0.
    check(
        "gfx942",
        "",
        &[(
            "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1\nv_add_f32 v8, v4, v5\ns_nop 0\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 2\nv_add_f32 v9, v4, v5\ns_nop 0\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 0",
            |x| [sum(&x, true), sum(&x, false)],
        )],
    );
}

#[test]
fn eight_bit_floats() {
    fn e4m3(code: u32, fnuz: bool) -> f32 {
        let (s, e, m) = (code >> 7 & 1, code >> 3 & 15, code & 7);
        let bias = if fnuz { 8 } else { 7 };
        if fnuz && code & 0xFF == 0x80 || !fnuz && code & 0x7F == 0x7F {
            return f32::NAN;
        }
        let v = if e == 0 {
            m as f32 * 2f32.powi(-2 - bias)
        } else {
            (8 + m) as f32 * 2f32.powi(e as i32 - 3 - bias)
        };
        if s != 0 { -v } else { v }
    }
    fn decode(x: u32, fnuz: bool) -> u32 {
        let v = e4m3(x & 0xFF, fnuz);
        if v.is_nan() { 0x7FC0_0000 | if fnuz { 1 << 31 } else { (x & 0x80) << 24 } } else { v.to_bits() }
    }
    /// The nearest code by search; what is beyond the largest by more than half a step is NaN.
    fn encode(x: u32, fnuz: bool) -> u32 {
        let v = f(x);
        let max = if fnuz { 0x7F } else { 0x7E };
        let nan = if fnuz { 0x80 } else { 0x7F | x >> 24 & 0x80 };
        if !v.is_finite() {
            return nan;
        }
        let a = f64::from(v.abs());
        let value = |c: u32| f64::from(e4m3(c, fnuz));
        let beyond = value(max) + (value(max) - value(max - 1)) / 2.0;
        // The tie at the top goes to the code that does not exist if the largest one is odd.
        if a > beyond || a == beyond && max % 2 == 1 {
            return nan;
        }
        let best = (0..=max).min_by(|p, q| {
            let key = |c: u32| ((value(c) - a).abs(), c % 2);
            key(*p).partial_cmp(&key(*q)).unwrap()
        });
        let code = best.unwrap();
        if code == 0 && fnuz { 0 } else { code | x >> 24 & 0x80 }
    }
    let fnuz: &[Case] = &[
        ("v_cvt_f32_fp8 v8, v4", |x| one(decode(x[0], true))),
        ("v_cvt_f32_fp8_sdwa v8, v4 src0_sel:BYTE_3", |x| one(decode(x[0] >> 24, true))),
        ("v_cvt_pk_f32_fp8 v[8:9], v4", |x| [decode(x[0], true), decode(x[0] >> 8, true)]),
        ("v_cvt_pk_fp8_f32 v8, v4, v5", |x| {
            one(OLD & 0xFFFF_0000 | encode(x[0], true) | encode(x[1], true) << 8)
        }),
        ("v_cvt_pk_fp8_f32 v8, v4, v5 op_sel:[0,0,1]", |x| {
            one(OLD & 0xFFFF | encode(x[0], true) << 16 | encode(x[1], true) << 24)
        }),
    ];
    check("gfx942", "", fnuz);
    let ocp: &[Case] = &[
        ("v_cvt_f32_fp8 v8, v4", |x| one(decode(x[0], false))),
        ("v_cvt_pk_fp8_f32 v8, v4, v5", |x| {
            one(OLD & 0xFFFF_0000 | encode(x[0], false) | encode(x[1], false) << 8)
        }),
        ("v_cvt_pk_bf16_f32 v8, v4, v5", |x| {
            let bf = |x: u32| {
                if f(x).is_nan() {
                    return (x | 0x40_0000) >> 16;
                }
                // Nearest of the two neighbours, the even one of a tie.
                let (lo, rest) = (x >> 16, x & 0xFFFF);
                lo + u32::from(rest > 0x8000 || rest == 0x8000 && lo % 2 == 1)
            };
            one(bf(x[0]) | bf(x[1]) << 16)
        }),
    ];
    check("gfx950", "", ocp);
}

/// Lanes of the wave: DPP, readlane, permutes. The operand is the lane number, so results are lane maps.
#[test]
fn lane_maps() {
    let body = "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v2, 2, v0
  s_waitcnt lgkmcnt(0)\n";
    type Map = (&'static str, fn(u32) -> u32);
    let quiet = 0x999u32;
    let maps: Vec<Map> = vec![
        ("v_mov_b32_dpp v8, v0 quad_perm:[3,2,1,0] row_mask:0xf bank_mask:0xf", |l| l ^ 3),
        ("v_mov_b32_dpp v8, v0 row_shl:1 row_mask:0xf bank_mask:0xf", |l| {
            if l % 16 == 15 { 0x999 } else { l + 1 }
        }),
        ("v_mov_b32_dpp v8, v0 row_shl:1 row_mask:0xf bank_mask:0xf bound_ctrl:0", |l| {
            if l % 16 == 15 { 0 } else { l + 1 }
        }),
        (
            "v_mov_b32_dpp v8, v0 row_shr:4 row_mask:0xf bank_mask:0xf",
            |l| if l % 16 < 4 { 0x999 } else { l - 4 },
        ),
        ("v_mov_b32_dpp v8, v0 row_ror:4 row_mask:0xf bank_mask:0xf", |l| l / 16 * 16 + (l + 12) % 16),
        ("v_mov_b32_dpp v8, v0 row_mirror row_mask:0xf bank_mask:0xf", |l| l ^ 15),
        ("v_mov_b32_dpp v8, v0 row_half_mirror row_mask:0xf bank_mask:0xf", |l| l ^ 7),
        ("v_mov_b32_dpp v8, v0 row_bcast:15 row_mask:0xa bank_mask:0xf", |l| {
            if l / 16 % 2 == 1 { l / 16 * 16 - 1 } else { 0x999 }
        }),
        (
            "v_mov_b32_dpp v8, v0 row_bcast:31 row_mask:0xc bank_mask:0xf",
            |l| if l >= 32 { 31 } else { 0x999 },
        ),
        ("v_mov_b32_dpp v8, v0 row_newbcast:5 row_mask:0xf bank_mask:0xf", |l| l / 16 * 16 + 5),
        ("v_mov_b32_dpp v8, v0 quad_perm:[0,0,0,0] row_mask:0x5 bank_mask:0x3", |l| {
            if l / 16 % 2 == 0 && l / 4 % 4 < 2 { l / 4 * 4 } else { 0x999 }
        }),
        (
            "v_mov_b32_dpp v8, v0 wave_shr:1 row_mask:0xf bank_mask:0xf",
            |l| if l == 0 { 0x999 } else { l - 1 },
        ),
        ("v_add_u32_dpp v8, v0, v0 row_shr:1 row_mask:0xf bank_mask:0xf", |l| {
            if l % 16 == 0 { 0x999 } else { 2 * l - 1 }
        }),
        // A disabled source counts as missing.
        (
            "s_mov_b32 exec_lo, 0xaaaaaaaa\nv_mov_b32_dpp v8, v0 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:0",
            |l| {
                if l >= 32 {
                    l ^ 1
                } else if l % 2 == 1 {
                    0
                } else {
                    0x999
                }
            },
        ),
        ("v_readlane_b32 s10, v0, 37\nv_mov_b32 v8, s10", |_| 37),
        ("s_mov_b64 exec, 0xf0\nv_readfirstlane_b32 s10, v0\ns_mov_b64 exec, -1\nv_mov_b32 v8, s10", |_| 4),
        ("v_mov_b32 v8, v0\nv_writelane_b32 v8, 17, 3", |l| if l == 3 { 17 } else { l }),
        (
            "v_xor_b32 v9, 21, v0\nv_lshlrev_b32 v9, 2, v9\nds_bpermute_b32 v8, v9, v0\ns_waitcnt lgkmcnt(0)",
            |l| l ^ 21,
        ),
        (
            "v_xor_b32 v9, 5, v0\nv_lshlrev_b32 v9, 2, v9\nds_permute_b32 v8, v9, v0\ns_waitcnt lgkmcnt(0)",
            |l| l ^ 5,
        ),
        ("ds_swizzle_b32 v8, v0 offset:swizzle(SWAP,16)\ns_waitcnt lgkmcnt(0)", |l| l ^ 16),
        ("ds_swizzle_b32 v8, v0 offset:swizzle(REVERSE,8)\ns_waitcnt lgkmcnt(0)", |l| l ^ 7),
        ("ds_swizzle_b32 v8, v0 offset:swizzle(BROADCAST,32,5)\ns_waitcnt lgkmcnt(0)", |l| l / 32 * 32 + 5),
        ("ds_swizzle_b32 v8, v0 offset:swizzle(QUAD_PERM,0,0,3,3)\ns_waitcnt lgkmcnt(0)", |l| {
            l / 4 * 4 + l % 4 / 2 * 3
        }),
    ];
    let mut text = body.to_owned();
    for (asm, _) in &maps {
        text += &format!("  v_mov_b32 v8, {quiet:#x}\n");
        for line in asm.lines() {
            text += &format!("  {line}\n");
        }
        text += "  s_mov_b64 exec, -1\n  global_store_dword v2, v8, s[4:5]\n  v_add_u32 v2, 0x100, v2\n";
    }
    for level in [Level::Portable, Level::Avx2, Level::Avx512].into_iter().filter(|l| l.available()) {
        let rig = Rig::new(
            options("gfx942").level(Some(level)),
            &assemble(&Assembly { body: &text, ..Assembly::default() }),
        );
        let buffer = rig.upload("out", &vec![0u32; 64 * maps.len()]);
        rig.launch("test", 1, 64, &Args::new().push(buffer)).unwrap();
        let out: Vec<u32> = rig.download(buffer, 64 * maps.len());
        for (i, value) in out.iter().enumerate() {
            let lane = (i % 64) as u32;
            assert_eq!(*value, maps[i / 64].1(lane), "{}: lane {lane}", maps[i / 64].0);
        }
    }
}
