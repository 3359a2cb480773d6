//! Vector integer and bit instructions: exact results in 128 bits, cut or saturated to the type of the destination.

use hk_emu::isa::Op;

use crate::common::Random;
use crate::semantics::vector::{Body, Lane, Model, Ty, Wave, bits, check_all, custom, ints, model, waves};

fn byte(x: i128, i: u32) -> i128 {
    x >> (8 * i) & 0xFF
}

/// Field `i` of `width` bits, signed.
fn signed(x: i128, i: u32, width: u32) -> i128 {
    let field = x >> (width * i) & ((1 << width) - 1);
    if field >> (width - 1) != 0 { field - (1 << width) } else { field }
}

fn field(x: i128, i: u32, width: u32) -> i128 {
    x >> (width * i) & ((1 << width) - 1)
}

fn dot(n: u32, a: i128, b: i128, f: fn(i128, u32, u32) -> i128) -> i128 {
    (0..n).map(|i| f(a, i, 32 / n) * f(b, i, 32 / n)).sum()
}

fn sad(a: i128, b: i128, masked: bool) -> i128 {
    let used = |i: &u32| !masked || byte(b, *i) != 0;
    (0..4).filter(used).map(|i| (byte(a, i) - byte(b, i)).abs()).sum()
}

/// The four sums of a quad of byte windows, each in a field of `width` bits beside its addend.
fn quad_sad(l: &Lane, width: u32, masked: bool) -> u128 {
    let (a, b, c) = (l.x[0], l.x[1] as i128, l.x[2]);
    let ones = (1u128 << width) - 1;
    let sum = |i: u32| {
        let window = (a >> (8 * i) & 0xFFFF_FFFF) as i128;
        (sad(window, b, masked) as u128 + (c >> (width * i) & ones)) & ones
    };
    (0..4).map(|i| sum(i) << (width * i)).sum()
}

fn median(mut x: [i128; 3]) -> i128 {
    x.sort_unstable();
    x[1]
}

fn extract(x: i128, offset: i128, width: i128) -> i128 {
    x >> (offset % 32) & ((1 << (width % 32)) - 1)
}

fn table(t: u32, l: &Lane, bits: u32) -> u128 {
    let bit = |i: usize, n: u32| l.u(i) >> n & 1;
    (0..bits).map(|n| u128::from(t >> (bit(0, n) << 2 | bit(1, n) << 1 | bit(2, n)) & 1) << n).sum()
}

pub fn models32() -> Vec<Model> {
    let mut all = ints! {
        V_MOV_B32 U32(U32) |a, _, _| a;
        V_NOT_B32 U32(U32) |a, _, _| -1 - a;
        V_BFREV_B32 U32(U32) |a, _, _| (0..32).map(|i| (a >> i & 1) << (31 - i)).sum();
        V_FFBH_U32 U32(U32) |a, _, _| (0..32).find(|i| a >> (31 - i) & 1 != 0).unwrap_or(-1);
        V_FFBL_B32 U32(U32) |a, _, _| (0..32).find(|i| a >> i & 1 != 0).unwrap_or(-1);
        V_FFBH_I32 U32(U32) |a, _, _| (1..32).find(|i| a >> (31 - i) & 1 != a >> 31).unwrap_or(-1);
        V_SAT_PK_U8_I16 U32(U32) |a, _, _| {
            signed(a, 0, 16).clamp(0, 255) | signed(a, 1, 16).clamp(0, 255) << 8
        };
        V_PRNG_B32 U32(U32) |a, _, _| (2 * a) ^ if a >> 31 != 0 { 197 } else { 0 };
        V_ADD_U32 U32(U32, U32) |a, b, _| a + b;
        V_SUB_U32 U32(U32, U32) |a, b, _| a - b;
        V_SUBREV_U32 U32(U32, U32) |a, b, _| b - a;
        V_ADD_I32 I32(I32, I32) |a, b, _| a + b;
        V_SUB_I32 I32(I32, I32) |a, b, _| a - b;
        V_MUL_I32_I24 I32(I24, I24) |a, b, _| a * b;
        V_MUL_HI_I32_I24 I32(I24, I24) |a, b, _| a * b >> 32;
        V_MUL_U32_U24 U32(U24, U24) |a, b, _| a * b;
        V_MUL_HI_U32_U24 U32(U24, U24) |a, b, _| a * b >> 32;
        V_MUL_LO_U32 U32(U32, U32) |a, b, _| a * b;
        V_MUL_HI_U32 U32(U32, U32) |a, b, _| a * b >> 32;
        V_MUL_HI_I32 I32(I32, I32) |a, b, _| a * b >> 32;
        V_MIN_I32 I32(I32, I32) |a, b, _| a.min(b);
        V_MAX_I32 I32(I32, I32) |a, b, _| a.max(b);
        V_MIN_U32 U32(U32, U32) |a, b, _| a.min(b);
        V_MAX_U32 U32(U32, U32) |a, b, _| a.max(b);
        V_LSHRREV_B32 U32(U32, U32) |a, b, _| b >> (a % 32);
        V_ASHRREV_I32 I32(U32, I32) |a, b, _| b >> (a % 32);
        V_LSHLREV_B32 U32(U32, U32) |a, b, _| b << (a % 32);
        V_AND_B32 U32(U32, U32) |a, b, _| a & b;
        V_OR_B32 U32(U32, U32) |a, b, _| a + b - (a & b);
        V_XOR_B32 U32(U32, U32) |a, b, _| a + b - 2 * (a & b);
        V_XNOR_B32 U32(U32, U32) |a, b, _| 2 * (a & b) - a - b - 1;
        V_BFM_B32 U32(U32, U32) |a, b, _| ((1 << (a % 32)) - 1) << (b % 32);
        V_BCNT_U32_B32 U32(U32, U32) |a, b, _| (0..32).map(|i| a >> i & 1).sum::<i128>() + b;
        V_CVT_PK_U16_U32 U32(U32, U32) |a, b, _| a.min(65535) | b.min(65535) << 16;
        V_CVT_PK_I16_I32 U32(I32, I32) |a, b, _| {
            a.clamp(-32768, 32767) & 0xFFFF | (b.clamp(-32768, 32767) & 0xFFFF) << 16
        };
        V_MAD_I32_I24 I32(I24, I24, I32) |a, b, c| a * b + c;
        V_MAD_U32_U24 U32(U24, U24, U32) |a, b, c| a * b + c;
        V_BFE_U32 U32(U32, U32, U32) |a, b, c| extract(a, b, c);
        V_BFE_I32 I32(I32, U32, U32) |a, b, c| {
            let x = extract(a, b, c);
            if x >> (c % 32 - 1).max(0) & 1 != 0 && c % 32 != 0 { x - (1 << (c % 32)) } else { x }
        };
        V_BFI_B32 U32(U32, U32, U32) |a, b, c| c ^ a & (b ^ c);
        V_LERP_U8 U32(U32, U32, U32) |a, b, c| {
            (0..4).map(|i| ((byte(a, i) + byte(b, i) + byte(c, i) % 2) / 2) << (8 * i)).sum()
        };
        V_ALIGNBIT_B32 U32(U32, U32, U32) |a, b, c| (a << 32 | b) >> (c % 32);
        V_ALIGNBYTE_B32 U32(U32, U32, U32) |a, b, c| (a << 32 | b) >> (8 * (c % 4));
        V_MIN3_I32 I32(I32, I32, I32) |a, b, c| *[a, b, c].iter().min().unwrap();
        V_MIN3_U32 U32(U32, U32, U32) |a, b, c| *[a, b, c].iter().min().unwrap();
        V_MAX3_I32 I32(I32, I32, I32) |a, b, c| *[a, b, c].iter().max().unwrap();
        V_MAX3_U32 U32(U32, U32, U32) |a, b, c| *[a, b, c].iter().max().unwrap();
        V_MED3_I32 I32(I32, I32, I32) |a, b, c| median([a, b, c]);
        V_MED3_U32 U32(U32, U32, U32) |a, b, c| median([a, b, c]);
        V_SAD_U8 U32(U32, U32, U32) |a, b, c| sad(a, b, false) + c;
        V_SAD_HI_U8 U32(U32, U32, U32) |a, b, c| (sad(a, b, false) << 16) + c;
        V_MSAD_U8 U32(U32, U32, U32) |a, b, c| sad(a, b, true) + c;
        V_SAD_U16 U32(U32, U32, U32) |a, b, c| {
            (0..2).map(|i| (field(a, i, 16) - field(b, i, 16)).abs()).sum::<i128>() + c
        };
        V_SAD_U32 U32(U32, U32, U32) |a, b, c| (a - b).abs() + c;
        V_XAD_U32 U32(U32, U32, U32) |a, b, c| (a ^ b) + c;
        V_LSHL_ADD_U32 U32(U32, U32, U32) |a, b, c| (a << (b % 32)) + c;
        V_ADD_LSHL_U32 U32(U32, U32, U32) |a, b, c| (a + b) << (c % 32);
        V_ADD3_U32 U32(U32, U32, U32) |a, b, c| a + b + c;
        V_LSHL_OR_B32 U32(U32, U32, U32) |a, b, c| a << (b % 32) | c;
        V_AND_OR_B32 U32(U32, U32, U32) |a, b, c| a & b | c;
        V_OR3_B32 U32(U32, U32, U32) |a, b, c| a | b | c;
        V_PERM_B32 U32(U32, U32, U32) |a, b, c| {
            let both = a << 32 | b;
            let pick = |s: i128| match s {
                0..=7 => byte(both, s as u32),
                8..=11 => 255 * (byte(both, 2 * s as u32 - 15) >> 7),
                12 => 0,
                _ => 255,
            };
            (0..4).map(|i| pick(byte(c, i)) << (8 * i)).sum()
        };
        V_DOT4_I32_I8 I32(U32, U32, I32) |a, b, c| dot(4, a, b, signed) + c;
        V_DOT4_U32_U8 U32(U32, U32, U32) |a, b, c| dot(4, a, b, field) + c;
        V_DOT8_I32_I4 I32(U32, U32, I32) |a, b, c| dot(8, a, b, signed) + c;
        V_DOT8_U32_U4 U32(U32, U32, U32) |a, b, c| dot(8, a, b, field) + c;
        V_DOT2_I32_I16 I32(U32, U32, I32) |a, b, c| dot(2, a, b, signed) + c;
        V_DOT2_U32_U16 U32(U32, U32, U32) |a, b, c| dot(2, a, b, field) + c;
    };
    all.extend(bits! {
        V_CNDMASK_B32 U32(F32, F32) |l| l.x[usize::from(l.mask)];
        V_MBCNT_LO_U32_B32 U32(U32, U32) |l| {
            (0..l.lane.min(32)).map(|i| l.x[0] >> i & 1).sum::<u128>() + l.x[1]
        };
        V_MBCNT_HI_U32_B32 U32(U32, U32) |l| {
            (32..l.lane.max(32)).map(|i| l.x[0] >> (i - 32) & 1).sum::<u128>() + l.x[1]
        };
        V_DOT2C_I32_I16 U32(U32, U32) |l| (dot(2, l.x[0] as i128, l.x[1] as i128, signed) + l.old as i128) as u128;
        V_DOT4C_I32_I8 U32(U32, U32) |l| (dot(4, l.x[0] as i128, l.x[1] as i128, signed) + l.old as i128) as u128;
        V_DOT8C_I32_I4 U32(U32, U32) |l| (dot(8, l.x[0] as i128, l.x[1] as i128, signed) + l.old as i128) as u128;
    });
    let carry = |op, f| model(op, Ty::U32, &[Ty::U32, Ty::U32], Body::Carry(f));
    all.extend([
        carry(Op::V_ADD_CO_U32, |[a, b, _], _| a + b),
        carry(Op::V_SUB_CO_U32, |[a, b, _], _| a - b),
        carry(Op::V_SUBREV_CO_U32, |[a, b, _], _| b - a),
        carry(Op::V_ADDC_CO_U32, |[a, b, _], c| a + b + c),
        carry(Op::V_SUBB_CO_U32, |[a, b, _], c| a - b - c),
        carry(Op::V_SUBBREV_CO_U32, |[a, b, _], c| b - a - c),
        model(
            Op::V_MAD_U64_U32,
            Ty::U64,
            &[Ty::U32, Ty::U32, Ty::U64],
            Body::Carry(|[a, b, c], _| a * b + c),
        ),
        model(
            Op::V_MAD_I64_I32,
            Ty::I64,
            &[Ty::I32, Ty::I32, Ty::I64],
            Body::Carry(|[a, b, c], _| a * b + c),
        ),
    ]);
    all.extend(bits! {
        V_QSAD_PK_U16_U8 U64(U64, U32, U64) |l| quad_sad(l, 16, false);
        V_MQSAD_PK_U16_U8 U64(U64, U32, U64) |l| quad_sad(l, 16, true);
        V_MQSAD_U32_U8 B128(U64, U32, B128) |l| quad_sad(l, 32, true);
    });
    // Truth tables, and what needs more than one instruction to show.
    let three = [Ty::U32; 3];
    all.extend([
        custom(Op::V_BITOP3_B32, Ty::U32, &three, "v_bitop3_b32 v12, v4, v6, v8 bitop3:0x96", |l| table(0x96, l, 32)),
        custom(Op::V_BITOP3_B32, Ty::U32, &three, "v_bitop3_b32 v12, v4, s22, v8 bitop3:0x1b", |l| {
            table(0x1B, &Lane { x: [l.x[0], l.scalar.into(), l.x[2]], ..*l }, 32)
        }),
        custom(Op::V_BITOP3_B32, Ty::U32, &three, "v_bitop3_b32 v12, v4, v6, v8 bitop3:0xe4", |l| table(0xE4, l, 32)),
        custom(
            Op::V_SWAP_B32,
            Ty::U64,
            &[Ty::U32; 2],
            "v_mov_b32 v12, v4\n  v_mov_b32 v13, v6\n  v_swap_b32 v12, v13",
            |l| l.x[1] | l.x[0] << 32,
        ),
        custom(
            Op::V_ACCVGPR_WRITE_B32,
            Ty::U32,
            &[Ty::U32],
            "v_accvgpr_write_b32 a3, v4\n  v_accvgpr_read_b32 v12, a3",
            |l| l.x[0],
        ),
        custom(
            Op::V_ACCVGPR_READ_B32,
            Ty::U64,
            &[Ty::U32, Ty::U32],
            "v_accvgpr_write_b32 a3, v4\n  v_accvgpr_write_b32 a9, v6\n  v_accvgpr_read_b32 v12, a9\n  v_accvgpr_read_b32 v13, a3",
            |l| l.x[1] | l.x[0] << 32,
        ),
        custom(
            Op::V_ACCVGPR_MOV_B32,
            Ty::U32,
            &[Ty::U32],
            "v_accvgpr_write_b32 a3, v4\n  v_accvgpr_mov_b32 a7, a3\n  v_accvgpr_read_b32 v12, a7",
            |l| l.x[0],
        ),
        custom(
            Op::V_PK_MOV_B32,
            Ty::U64,
            &[Ty::U64, Ty::U64],
            "v_pk_mov_b32 v[12:13], v[4:5], v[6:7] op_sel:[1,0]",
            |l| l.x[0] >> 32 | (l.x[1] & 0xFFFF_FFFF) << 32,
        ),
        custom(
            Op::V_PK_MOV_B32,
            Ty::U64,
            &[Ty::U64, Ty::U64],
            "v_pk_mov_b32 v[12:13], v[4:5], v[6:7] op_sel:[0,1]",
            |l| l.x[0] & 0xFFFF_FFFF | l.x[1] >> 32 << 32,
        ),
    ]);
    all
}

pub fn models16() -> Vec<Model> {
    let mut all = ints! {
        V_ADD_U16 U16(U16, U16) |a, b, _| a + b;
        V_SUB_U16 U16(U16, U16) |a, b, _| a - b;
        V_SUBREV_U16 U16(U16, U16) |a, b, _| b - a;
        V_ADD_I16 I16(I16, I16) |a, b, _| a + b;
        V_SUB_I16 I16(I16, I16) |a, b, _| a - b;
        V_MUL_LO_U16 U16(U16, U16) |a, b, _| a * b;
        V_LSHLREV_B16 U16(U16, U16) |a, b, _| b << (a % 16);
        V_LSHRREV_B16 U16(U16, U16) |a, b, _| b >> (a % 16);
        V_ASHRREV_I16 I16(U16, I16) |a, b, _| b >> (a % 16);
        V_MAX_U16 U16(U16, U16) |a, b, _| a.max(b);
        V_MAX_I16 I16(I16, I16) |a, b, _| a.max(b);
        V_MIN_U16 U16(U16, U16) |a, b, _| a.min(b);
        V_MIN_I16 I16(I16, I16) |a, b, _| a.min(b);
        V_MAD_LEGACY_U16 U16(U16, U16, U16) |a, b, c| a * b + c;
        V_MAD_LEGACY_I16 I16(I16, I16, I16) |a, b, c| a * b + c;
        V_MAD_U16 U16(U16, U16, U16) |a, b, c| a * b + c;
        V_MAD_I16 I16(I16, I16, I16) |a, b, c| a * b + c;
        V_MAD_U32_U16 U32(U16, U16, U32) |a, b, c| a * b + c;
        V_MAD_I32_I16 I32(I16, I16, I32) |a, b, c| a * b + c;
        V_MIN3_I16 I16(I16, I16, I16) |a, b, c| *[a, b, c].iter().min().unwrap();
        V_MIN3_U16 U16(U16, U16, U16) |a, b, c| *[a, b, c].iter().min().unwrap();
        V_MAX3_I16 I16(I16, I16, I16) |a, b, c| *[a, b, c].iter().max().unwrap();
        V_MAX3_U16 U16(U16, U16, U16) |a, b, c| *[a, b, c].iter().max().unwrap();
        V_MED3_I16 I16(I16, I16, I16) |a, b, c| median([a, b, c]);
        V_MED3_U16 U16(U16, U16, U16) |a, b, c| median([a, b, c]);
        V_PK_MAD_I16 PkI16(PkI16, PkI16, PkI16) |a, b, c| a * b + c;
        V_PK_MAD_U16 PkU16(PkU16, PkU16, PkU16) |a, b, c| a * b + c;
        V_PK_MUL_LO_U16 PkU16(PkU16, PkU16) |a, b, _| a * b;
        V_PK_ADD_I16 PkI16(PkI16, PkI16) |a, b, _| a + b;
        V_PK_SUB_I16 PkI16(PkI16, PkI16) |a, b, _| a - b;
        V_PK_ADD_U16 PkU16(PkU16, PkU16) |a, b, _| a + b;
        V_PK_SUB_U16 PkU16(PkU16, PkU16) |a, b, _| a - b;
        V_PK_LSHLREV_B16 PkU16(PkU16, PkU16) |a, b, _| b << (a % 16);
        V_PK_LSHRREV_B16 PkU16(PkU16, PkU16) |a, b, _| b >> (a % 16);
        V_PK_ASHRREV_I16 PkI16(PkI16, PkI16) |a, b, _| b >> (a & 15);
        V_PK_MAX_I16 PkI16(PkI16, PkI16) |a, b, _| a.max(b);
        V_PK_MIN_I16 PkI16(PkI16, PkI16) |a, b, _| a.min(b);
        V_PK_MAX_U16 PkU16(PkU16, PkU16) |a, b, _| a.max(b);
        V_PK_MIN_U16 PkU16(PkU16, PkU16) |a, b, _| a.min(b);
    };
    let three = [Ty::U16; 3];
    all.extend([custom(
        Op::V_BITOP3_B16,
        Ty::U32,
        &three,
        "v_bitop3_b16 v12, v4, v6, v8 bitop3:0x96",
        |l| l.old & 0xFFFF_0000 | table(0x96, l, 16),
    )]);
    all
}

pub fn models64() -> Vec<Model> {
    ints! {
        V_MOV_B64 U64(U64) |a, _, _| a;
        V_LSHLREV_B64 U64(U32, U64) |a, b, _| b << (a % 64);
        V_LSHRREV_B64 U64(U32, U64) |a, b, _| b >> (a % 64);
        V_ASHRREV_I64 I64(U32, I64) |a, b, _| b >> (a % 64);
        // Shift counts beyond 4 leave the addend alone.
        V_LSHL_ADD_U64 U64(U64, U32, U64) |a, b, c| if b % 64 > 4 { c } else { (a << (b % 64)) + c };
    }
}

const SPECIAL32: [u64; 27] = [
    0,
    1,
    2,
    3,
    4,
    5,
    15,
    16,
    31,
    32,
    33,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x1_0000,
    0x80_0000,
    0xFF_FFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0x8000_0001,
    0xFFFF_FFFF,
    0xFFFF_FFFE,
    0x0001_8000,
    0x8000_7FFF,
];

/// Words; the high ones are those of 64-bit operands.
pub fn pick32(random: &mut Random, i: usize) -> u64 {
    let x = u64::from(random.next()) | u64::from(random.next()) << 32;
    match i % 4 {
        0 => x & 0xFF,
        1 => x & 0xFFFF_FFFF_0000_FFFF,
        // Selectors of v_perm.
        2 => x & 0xFFFF_FFFF_0F0F_0F0F,
        _ => x,
    }
}

pub fn waves32(n: usize) -> Vec<Wave> {
    let mut special = SPECIAL32.to_vec();
    special.extend([1 << 63, u64::MAX, i64::MAX as u64, 0xFFFF_FFFF_0000_0000, 1 << 32]);
    waves(1, n, &special, pick32, &[0x3F0])
}

#[test]
fn words() {
    check_all(&models32(), &waves32(48), 12);
}

#[test]
fn halves() {
    check_all(&models16(), &waves32(48), 12);
}

#[test]
fn double_words() {
    check_all(&models64(), &waves32(48), 12);
}
