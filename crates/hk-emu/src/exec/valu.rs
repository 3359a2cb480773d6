//! Vector ALU: integers, bits, conversions between integers, masks, moves between lanes.

use super::float;
use super::lanes::{
    CarryOp, CmpOp, LaneOp, Modes, WideOp, carry_handler, cmp_handler, cmp_portable, each_light_chunk,
    lane_portable, light_handler, light_wide_handler, put_chunk, set_wide, wide_source,
};
use super::{Ctl, Env, Handler, Host, Level, Uop, levels};
use crate::isa::Op;
use crate::wave::{CHUNK, Lanes, M0, Wave};

/// Lane operations, one row each: mnemonic, number of sources, lane expression.
macro_rules! lane_ops {
    ($(#[$meta:meta])* $table:ident by $pick:ident: $($op:ident $n:literal |$a:ident, $b:ident, $c:ident, $m:ident| $e:expr;)*) => {
        $(#[$meta])*
        pub(crate) fn $table(op: Op, level: Level) -> Option<Handler> {
            #[allow(non_camel_case_types)]
            mod ops {
                $(pub struct $op;)*
            }
            $(impl LaneOp for ops::$op {
                const N: usize = $n;
                #[inline(always)]
                #[allow(unused_variables)]
                fn f<H: Host>($a: u32, $b: u32, $c: u32, $m: Modes) -> u32 {
                    $e
                }
            })*
            Some(match op {
                $(Op::$op => $pick::<ops::$op>(level),)*
                _ => return None,
            })
        }
    };
}
pub(crate) use lane_ops;

/// The same with one- or two-register operands: widths of destination and sources first.
macro_rules! wide_ops {
    ($(#[$meta:meta])* $table:ident by $pick:ident: $($op:ident [$d:literal, $s0:literal, $s1:literal, $s2:literal] |$a:ident, $b:ident, $c:ident, $m:ident| $e:expr;)*) => {
        $(#[$meta])*
        pub(crate) fn $table(op: Op, level: Level) -> Option<Handler> {
            #[allow(non_camel_case_types)]
            mod ops {
                $(pub struct $op;)*
            }
            $(impl WideOp for ops::$op {
                const DST: usize = $d;
                const SRC: [usize; 3] = [$s0, $s1, $s2];
                #[inline(always)]
                #[allow(unused_variables)]
                fn f<H: Host>($a: u64, $b: u64, $c: u64, $m: Modes) -> u64 {
                    $e
                }
            })*
            Some(match op {
                $(Op::$op => $pick::<ops::$op>(level),)*
                _ => return None,
            })
        }
    };
}
pub(crate) use wide_ops;

#[inline(always)]
fn sext24(x: u32) -> i32 {
    (x << 8) as i32 >> 8
}

#[inline(always)]
fn i16lo(x: u32) -> i32 {
    i32::from(x as u16 as i16)
}

#[inline(always)]
fn u16lo(x: u32) -> u32 {
    x & 0xFFFF
}

#[inline(always)]
fn bfe_u(x: u32, offset: u32, width: u32) -> u32 {
    let width = width & 31;
    x >> (offset & 31) & ((1u32 << width).wrapping_sub(1))
}

#[inline(always)]
fn bfe_i(x: u32, offset: u32, width: u32) -> u32 {
    let (offset, width) = (offset & 31, width & 31);
    let field = x >> offset & ((1u32 << width).wrapping_sub(1));
    // Past the top the field is what an arithmetic shift leaves.
    let whole = (x as i32 >> offset) as u32;
    let shift = (32 - width) & 31;
    if width == 0 {
        0
    } else if offset + width >= 32 {
        whole
    } else {
        ((field << shift) as i32 >> shift) as u32
    }
}

#[inline(always)]
fn perm_byte(a: u32, b: u32, selector: u32) -> u32 {
    let both = u64::from(a) << 32 | u64::from(b);
    match selector & 0xFF {
        s @ 0..=7 => (both >> (8 * s)) as u32 & 0xFF,
        s @ 8..=11 => {
            if both >> (16 * (s - 8) + 15) & 1 != 0 {
                0xFF
            } else {
                0
            }
        }
        12 => 0,
        _ => 0xFF,
    }
}

#[inline(always)]
fn sad_u8(a: u32, b: u32, c: u32, masked: bool) -> u32 {
    let mut sum = c;
    for i in 0..4 {
        let (x, y) = (a >> (8 * i) & 0xFF, b >> (8 * i) & 0xFF);
        if !masked || y != 0 {
            sum = sum.wrapping_add(x.abs_diff(y));
        }
    }
    sum
}

#[inline(always)]
fn median_i(a: i32, b: i32, c: i32) -> i32 {
    a.max(b).min(c).max(a.min(b))
}

#[inline(always)]
fn median_u(a: u32, b: u32, c: u32) -> u32 {
    a.max(b).min(c).max(a.min(b))
}

#[inline(always)]
fn pair(f: impl Fn(u32, u32, u32) -> u32, a: u32, b: u32, c: u32) -> u32 {
    f(u16lo(a), u16lo(b), u16lo(c)) & 0xFFFF | f(a >> 16, b >> 16, c >> 16) << 16
}

lane_ops! {
    /// 32-bit integer and bit operations that kernels are full of.
    int32 by light_handler:
    V_MOV_B32 1 |a, b, c, m| a;
    V_ACCVGPR_READ_B32 1 |a, b, c, m| a;
    V_ACCVGPR_WRITE_B32 1 |a, b, c, m| a;
    V_NOT_B32 1 |a, b, c, m| !a;
    V_ADD_U32 2 |a, b, c, m| a.wrapping_add(b);
    V_SUB_U32 2 |a, b, c, m| a.wrapping_sub(b);
    V_SUBREV_U32 2 |a, b, c, m| b.wrapping_sub(a);
    V_MUL_U32_U24 2 |a, b, c, m| (a & 0xFF_FFFF).wrapping_mul(b & 0xFF_FFFF);
    V_MUL_LO_U32 2 |a, b, c, m| a.wrapping_mul(b);
    V_MUL_HI_U32 2 |a, b, c, m| (u64::from(a) * u64::from(b) >> 32) as u32;
    V_MIN_I32 2 |a, b, c, m| (a as i32).min(b as i32) as u32;
    V_MAX_I32 2 |a, b, c, m| (a as i32).max(b as i32) as u32;
    V_MIN_U32 2 |a, b, c, m| a.min(b);
    V_MAX_U32 2 |a, b, c, m| a.max(b);
    V_LSHRREV_B32 2 |a, b, c, m| b >> (a & 31);
    V_ASHRREV_I32 2 |a, b, c, m| (b as i32 >> (a & 31)) as u32;
    V_LSHLREV_B32 2 |a, b, c, m| b << (a & 31);
    V_AND_B32 2 |a, b, c, m| a & b;
    V_OR_B32 2 |a, b, c, m| a | b;
    V_XOR_B32 2 |a, b, c, m| a ^ b;
    V_MAD_U32_U24 3 |a, b, c, m| (a & 0xFF_FFFF).wrapping_mul(b & 0xFF_FFFF).wrapping_add(c);
    V_BCNT_U32_B32 2 |a, b, c, m| a.count_ones().wrapping_add(b);
    V_BFE_U32 3 |a, b, c, m| bfe_u(a, b, c);
    V_BFE_I32 3 |a, b, c, m| bfe_i(a, b, c);
    V_BFI_B32 3 |a, b, c, m| a & b | !a & c;
    V_ALIGNBIT_B32 3 |a, b, c, m| ((u64::from(a) << 32 | u64::from(b)) >> (c & 31)) as u32;
    V_PERM_B32 3 |a, b, c, m| {
        perm_byte(a, b, c) | perm_byte(a, b, c >> 8) << 8 | perm_byte(a, b, c >> 16) << 16 | perm_byte(a, b, c >> 24) << 24
    };
    V_XAD_U32 3 |a, b, c, m| (a ^ b).wrapping_add(c);
    V_LSHL_ADD_U32 3 |a, b, c, m| (a << (b & 31)).wrapping_add(c);
    V_ADD_LSHL_U32 3 |a, b, c, m| a.wrapping_add(b) << (c & 31);
    V_ADD3_U32 3 |a, b, c, m| a.wrapping_add(b).wrapping_add(c);
    V_LSHL_OR_B32 3 |a, b, c, m| a << (b & 31) | c;
    V_AND_OR_B32 3 |a, b, c, m| a & b | c;
    V_OR3_B32 3 |a, b, c, m| a | b | c;
}

lane_ops! {
    /// The other 32-bit integer and bit operations.
    int32_rare by lane_portable:
    V_ACCVGPR_MOV_B32 1 |a, b, c, m| a;
    V_BFREV_B32 1 |a, b, c, m| a.reverse_bits();
    V_FFBH_U32 1 |a, b, c, m| if a == 0 { !0 } else { a.leading_zeros() };
    V_FFBL_B32 1 |a, b, c, m| if a == 0 { !0 } else { a.trailing_zeros() };
    V_FFBH_I32 1 |a, b, c, m| {
        let x = if (a as i32) < 0 { !a } else { a };
        if x == 0 { !0 } else { x.leading_zeros() }
    };
    V_ADD_I32 2 |a, b, c, m| a.wrapping_add(b);
    V_SUB_I32 2 |a, b, c, m| a.wrapping_sub(b);
    V_MUL_I32_I24 2 |a, b, c, m| sext24(a).wrapping_mul(sext24(b)) as u32;
    V_MUL_HI_I32_I24 2 |a, b, c, m| (i64::from(sext24(a)) * i64::from(sext24(b)) >> 32) as u32;
    V_MUL_HI_U32_U24 2 |a, b, c, m| (u64::from(a & 0xFF_FFFF) * u64::from(b & 0xFF_FFFF) >> 32) as u32;
    V_MUL_HI_I32 2 |a, b, c, m| (i64::from(a as i32) * i64::from(b as i32) >> 32) as u32;
    V_XNOR_B32 2 |a, b, c, m| !(a ^ b);
    V_BFM_B32 2 |a, b, c, m| ((1u32 << (a & 31)) - 1) << (b & 31);
    V_MAD_I32_I24 3 |a, b, c, m| (sext24(a).wrapping_mul(sext24(b)) as u32).wrapping_add(c);
    V_ALIGNBYTE_B32 3 |a, b, c, m| ((u64::from(a) << 32 | u64::from(b)) >> (8 * (c & 3))) as u32;
    V_MIN3_I32 3 |a, b, c, m| (a as i32).min(b as i32).min(c as i32) as u32;
    V_MIN3_U32 3 |a, b, c, m| a.min(b).min(c);
    V_MAX3_I32 3 |a, b, c, m| (a as i32).max(b as i32).max(c as i32) as u32;
    V_MAX3_U32 3 |a, b, c, m| a.max(b).max(c);
    V_MED3_I32 3 |a, b, c, m| median_i(a as i32, b as i32, c as i32) as u32;
    V_MED3_U32 3 |a, b, c, m| median_u(a, b, c);
    V_LERP_U8 3 |a, b, c, m| {
        let mut r = 0;
        for i in 0..4 {
            let s = 8 * i;
            r |= (((a >> s & 0xFF) + (b >> s & 0xFF) + (c >> s & 1)) >> 1 & 0xFF) << s;
        }
        r
    };
    V_SAD_U8 3 |a, b, c, m| sad_u8(a, b, c, false);
    V_MSAD_U8 3 |a, b, c, m| sad_u8(a, b, c, true);
    V_SAD_HI_U8 3 |a, b, c, m| (sad_u8(a, b, 0, false) << 16).wrapping_add(c);
    V_SAD_U16 3 |a, b, c, m| u16lo(a).abs_diff(u16lo(b)).wrapping_add((a >> 16).abs_diff(b >> 16)).wrapping_add(c);
    V_SAD_U32 3 |a, b, c, m| a.abs_diff(b).wrapping_add(c);
    V_MAD_U32_U16 3 |a, b, c, m| (u16lo(a) * u16lo(b)).wrapping_add(c);
    V_MAD_I32_I16 3 |a, b, c, m| (i16lo(a) * i16lo(b)).wrapping_add(c as i32) as u32;
    V_CVT_PK_U16_U32 2 |a, b, c, m| a.min(0xFFFF) | b.min(0xFFFF) << 16;
    V_CVT_PK_I16_I32 2 |a, b, c, m| {
        let clamp = |x: u32| (x as i32).clamp(-32768, 32767) as u32 & 0xFFFF;
        clamp(a) | clamp(b) << 16
    };
    V_SAT_PK_U8_I16 1 |a, b, c, m| {
        let clamp = |x: u32| i16lo(x).clamp(0, 255) as u32;
        clamp(a) | clamp(a >> 16) << 8
    };
    V_ASHR_PK_I8_I32 3 |a, b, c, m| {
        let one = |x: u32| (x as i32 >> (c & 31)).clamp(-128, 127) as u32 & 0xFF;
        one(a) | one(b) << 8
    };
    V_ASHR_PK_U8_I32 3 |a, b, c, m| {
        let one = |x: u32| (x as i32 >> (c & 31)).clamp(0, 255) as u32;
        one(a) | one(b) << 8
    };
    V_PRNG_B32 1 |a, b, c, m| (a << 1) ^ if a >> 31 != 0 { 197 } else { 0 };
}

lane_ops! {
    /// 16-bit integers in the low half, packed 16-bit integers, and dot products.
    int16 by lane_portable:
    V_ADD_U16 2 |a, b, c, m| u16lo(a.wrapping_add(b));
    V_SUB_U16 2 |a, b, c, m| u16lo(a.wrapping_sub(b));
    V_SUBREV_U16 2 |a, b, c, m| u16lo(b.wrapping_sub(a));
    V_ADD_I16 2 |a, b, c, m| u16lo(a.wrapping_add(b));
    V_SUB_I16 2 |a, b, c, m| u16lo(a.wrapping_sub(b));
    V_MUL_LO_U16 2 |a, b, c, m| u16lo(u16lo(a) * u16lo(b));
    V_LSHLREV_B16 2 |a, b, c, m| u16lo(b << (a & 15));
    V_LSHRREV_B16 2 |a, b, c, m| u16lo(b) >> (a & 15);
    V_ASHRREV_I16 2 |a, b, c, m| u16lo((i16lo(b) >> (a & 15)) as u32);
    V_MAX_U16 2 |a, b, c, m| u16lo(a).max(u16lo(b));
    V_MAX_I16 2 |a, b, c, m| u16lo(i16lo(a).max(i16lo(b)) as u32);
    V_MIN_U16 2 |a, b, c, m| u16lo(a).min(u16lo(b));
    V_MIN_I16 2 |a, b, c, m| u16lo(i16lo(a).min(i16lo(b)) as u32);
    V_MAD_LEGACY_U16 3 |a, b, c, m| u16lo((u16lo(a) * u16lo(b)).wrapping_add(c));
    V_MAD_LEGACY_I16 3 |a, b, c, m| u16lo((u16lo(a) * u16lo(b)).wrapping_add(c));
    V_MAD_U16 3 |a, b, c, m| u16lo((u16lo(a) * u16lo(b)).wrapping_add(c));
    V_MAD_I16 3 |a, b, c, m| u16lo((u16lo(a) * u16lo(b)).wrapping_add(c));
    V_MIN3_I16 3 |a, b, c, m| u16lo(i16lo(a).min(i16lo(b)).min(i16lo(c)) as u32);
    V_MIN3_U16 3 |a, b, c, m| u16lo(a).min(u16lo(b)).min(u16lo(c));
    V_MAX3_I16 3 |a, b, c, m| u16lo(i16lo(a).max(i16lo(b)).max(i16lo(c)) as u32);
    V_MAX3_U16 3 |a, b, c, m| u16lo(a).max(u16lo(b)).max(u16lo(c));
    V_MED3_I16 3 |a, b, c, m| u16lo(median_i(i16lo(a), i16lo(b), i16lo(c)) as u32);
    V_MED3_U16 3 |a, b, c, m| median_u(u16lo(a), u16lo(b), u16lo(c));
    V_PACK_B32_F16 2 |a, b, c, m| u16lo(a) | b << 16;
    V_PK_MAD_I16 3 |a, b, c, m| pair(|a, b, c| (a * b).wrapping_add(c), a, b, c);
    V_PK_MAD_U16 3 |a, b, c, m| pair(|a, b, c| (a * b).wrapping_add(c), a, b, c);
    V_PK_MUL_LO_U16 2 |a, b, c, m| pair(|a, b, _| a * b, a, b, c);
    V_PK_ADD_I16 2 |a, b, c, m| pair(|a, b, _| a.wrapping_add(b), a, b, c);
    V_PK_SUB_I16 2 |a, b, c, m| pair(|a, b, _| a.wrapping_sub(b), a, b, c);
    V_PK_ADD_U16 2 |a, b, c, m| pair(|a, b, _| a.wrapping_add(b), a, b, c);
    V_PK_SUB_U16 2 |a, b, c, m| pair(|a, b, _| a.wrapping_sub(b), a, b, c);
    V_PK_LSHLREV_B16 2 |a, b, c, m| pair(|a, b, _| b << (a & 15), a, b, c);
    V_PK_LSHRREV_B16 2 |a, b, c, m| pair(|a, b, _| b >> (a & 15), a, b, c);
    V_PK_ASHRREV_I16 2 |a, b, c, m| pair(|a, b, _| (i16lo(b) >> (a & 15)) as u32, a, b, c);
    V_PK_MAX_I16 2 |a, b, c, m| pair(|a, b, _| i16lo(a).max(i16lo(b)) as u32, a, b, c);
    V_PK_MIN_I16 2 |a, b, c, m| pair(|a, b, _| i16lo(a).min(i16lo(b)) as u32, a, b, c);
    V_PK_MAX_U16 2 |a, b, c, m| pair(|a, b, _| a.max(b), a, b, c);
    V_PK_MIN_U16 2 |a, b, c, m| pair(|a, b, _| a.min(b), a, b, c);
    V_DOT2_I32_I16 3 |a, b, c, m| dot_i(a, b, c, 16);
    V_DOT2C_I32_I16 3 |a, b, c, m| dot_i(a, b, c, 16);
    V_DOT2_U32_U16 3 |a, b, c, m| dot_u(a, b, c, 16);
    V_DOT4_I32_I8 3 |a, b, c, m| dot_i(a, b, c, 8);
    V_DOT4C_I32_I8 3 |a, b, c, m| dot_i(a, b, c, 8);
    V_DOT4_U32_U8 3 |a, b, c, m| dot_u(a, b, c, 8);
    V_DOT8_I32_I4 3 |a, b, c, m| dot_i(a, b, c, 4);
    V_DOT8C_I32_I4 3 |a, b, c, m| dot_i(a, b, c, 4);
    V_DOT8_U32_U4 3 |a, b, c, m| dot_u(a, b, c, 4);
}

#[inline(always)]
fn dot_i(a: u32, b: u32, c: u32, width: u32) -> u32 {
    let mut sum = c as i32;
    for i in 0..32 / width {
        let field = |x: u32| (x << (32 - width * (i + 1))) as i32 >> (32 - width);
        sum = sum.wrapping_add(field(a).wrapping_mul(field(b)));
    }
    sum as u32
}

#[inline(always)]
fn dot_u(a: u32, b: u32, c: u32, width: u32) -> u32 {
    let mut sum = c;
    for i in 0..32 / width {
        let field = |x: u32| x << (32 - width * (i + 1)) >> (32 - width);
        sum = sum.wrapping_add(field(a).wrapping_mul(field(b)));
    }
    sum
}

wide_ops! {
    /// 64-bit integers.
    int64 by light_wide_handler:
    V_MOV_B64 [2, 2, 0, 0] |a, b, c, m| a;
    V_LSHLREV_B64 [2, 1, 2, 0] |a, b, c, m| b << (a & 63);
    V_LSHRREV_B64 [2, 1, 2, 0] |a, b, c, m| b >> (a & 63);
    V_ASHRREV_I64 [2, 1, 2, 0] |a, b, c, m| (b as i64 >> (a & 63)) as u64;
    V_LSHL_ADD_U64 [2, 2, 1, 2] |a, b, c, m| {
        // Shifts beyond 4 give no contribution of the first source.
        (if b & 63 > 4 { 0 } else { a << (b & 7) }).wrapping_add(c)
    };
}

/// `v_mad_u64_u32`, `v_mad_i64_i32`: a wide result and a carry mask.
#[inline(always)]
fn mad64_body<H: Host, const SIGNED: bool, const SATURATES: bool>(
    w: &mut Wave,
    _: &mut Env<'_>,
    u: &Uop,
) -> Ctl {
    let mut out = 0;
    each_light_chunk!(H::MASKS, w.exec(), |k, mask| {
        let (a, b, c) = (w.chunk(u.a, k), w.chunk(u.b, k), wide_source(w, u.c, k, 2));
        let (mut r, mut carries) = ([0; CHUNK], [0; CHUNK]);
        for l in 0..CHUNK {
            let product = if SIGNED {
                (i64::from(a[l] as i32) * i64::from(b[l] as i32)) as u64
            } else {
                u64::from(a[l]) * u64::from(b[l])
            };
            let sum = product.wrapping_add(c[l]);
            let carry = if SIGNED { (((product ^ sum) & (c[l] ^ sum)) as i64) < 0 } else { sum < product };
            let limit = match (SIGNED, (c[l] as i64) < 0) {
                (false, _) => u64::MAX,
                // Only an addend of the product's sign overflows.
                (true, false) => i64::MAX as u64,
                (true, true) => i64::MIN as u64,
            };
            r[l] = if carry && SATURATES { limit } else { sum };
            carries[l] = if carry { !0 } else { 0 };
        }
        set_wide::<H>(w, u.d, k, mask, r, 2);
        out |= u64::from(H::movemask(carries) & mask) << (16 * k);
    });
    w.set_s64(u.mask_out as usize, out);
    Ctl::Next
}
levels!(mad64 = mad64_body[SIGNED: bool, SATURATES: bool]);

/// `v_qsad_pk_u16_u8`, `v_mqsad_pk_u16_u8`, `v_mqsad_u32_u8`: sums of absolute differences of four windows of the
/// first source, a byte apart, and the second one. `extra`: zero bytes of the second count nothing, sums have 32 bits,
/// sums saturate.
fn qsad(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let has = |bit: u32| u.extra & bit != 0;
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let (x, y) = (w.lane64(u.a, lane), w.lane(u.b, lane));
        let sum = |i: u32, c: u32, limit: u32| {
            let difference = sad_u8((x >> (8 * i)) as u32, y, 0, has(QSAD_MASKED));
            if has(QSAD_SATURATES) {
                c.saturating_add(difference).min(limit)
            } else {
                c.wrapping_add(difference) & limit
            }
        };
        if has(QSAD_WIDE) {
            let sums: [u32; 4] =
                std::array::from_fn(|i| sum(i as u32, w.lane(u.c + i as u16, lane), u32::MAX));
            for (i, sum) in sums.into_iter().enumerate() {
                w.set_lane(u.d + i as u16, lane, sum);
            }
        } else {
            let c = w.lane64(u.c, lane);
            let sums = (0..4).map(|i| u64::from(sum(i, (c >> (16 * i)) as u32 & 0xFFFF, 0xFFFF)) << (16 * i));
            w.set_lane64(u.d, lane, sums.sum());
        }
    }
    Ctl::Next
}

const QSAD_MASKED: u32 = 1;
const QSAD_WIDE: u32 = 2;
const QSAD_SATURATES: u32 = 4;

/// The handler of an integer instruction with CLAMP; may set `extra`.
pub(crate) fn saturating(op: Op, level: Level, extra: &mut u32) -> Option<Handler> {
    match op {
        Op::V_QSAD_PK_U16_U8 | Op::V_MQSAD_PK_U16_U8 | Op::V_MQSAD_U32_U8 => {
            let run = handler(op, level, extra);
            *extra |= QSAD_SATURATES;
            run
        }
        Op::V_MAD_U64_U32 => Some(mad64::<false, true>(level)),
        Op::V_MAD_I64_I32 => Some(mad64::<true, true>(level)),
        Op::V_ADD_CO_U32 | Op::V_ADDC_CO_U32 => {
            *extra = super::lanes::CARRY_TO_MAX;
            carries(op, level)
        }
        Op::V_SUB_CO_U32 | Op::V_SUBREV_CO_U32 | Op::V_SUBB_CO_U32 | Op::V_SUBBREV_CO_U32 => {
            *extra = super::lanes::CARRY_TO_ZERO;
            carries(op, level)
        }
        _ => saturate::table(op, level).or_else(|| cannot_overflow(op).then(|| handler(op, level, extra))?),
    }
}

/// Instructions that have CLAMP and whose results are in range whatever the operands.
fn cannot_overflow(op: Op) -> bool {
    let name = op.info().name;
    let stems = [
        "V_MIN3_",
        "V_MAX3_",
        "V_MED3_",
        "V_PK_MIN_",
        "V_PK_MAX_",
        "V_ALIGNBIT",
        "V_ALIGNBYTE",
        "V_PK_MOV_B32",
    ];
    stems.iter().any(|stem| name.starts_with(stem)) || name.starts_with("V_PK_") && name.contains("REV_")
}

/// Saturating integer arithmetic: what CLAMP makes of sums and products.
pub(crate) mod saturate {
    use super::{Handler, Host, LaneOp, Level, Modes, Op, i16lo, lane_portable, pair, sad_u8, sext24, u16lo};

    #[inline(always)]
    fn to_i32(x: i64) -> u32 {
        x.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as u32
    }

    #[inline(always)]
    fn to_u32(x: u64) -> u32 {
        x.min(u64::from(u32::MAX)) as u32
    }

    #[inline(always)]
    fn to_i16(x: i32) -> u32 {
        u16lo(x.clamp(-32768, 32767) as u32)
    }

    /// The exact sum of products of fields of `width` bits, and `c`.
    #[inline(always)]
    fn dot_i(a: u32, b: u32, c: u32, width: u32) -> u32 {
        let field = |x: u32, i: u32| i64::from((x << (32 - width * (i + 1))) as i32 >> (32 - width));
        to_i32((0..32 / width).map(|i| field(a, i) * field(b, i)).sum::<i64>() + i64::from(c as i32))
    }

    #[inline(always)]
    fn dot_u(a: u32, b: u32, c: u32, width: u32) -> u32 {
        let field = |x: u32, i: u32| u64::from(x << (32 - width * (i + 1)) >> (32 - width));
        to_u32((0..32 / width).map(|i| field(a, i) * field(b, i)).sum::<u64>() + u64::from(c))
    }

    lane_ops! {
        /// The operations that CLAMP makes saturate.
        table by lane_portable:
        V_ADD_U32 2 |a, b, c, m| a.saturating_add(b);
        V_SUB_U32 2 |a, b, c, m| a.saturating_sub(b);
        V_SUBREV_U32 2 |a, b, c, m| b.saturating_sub(a);
        V_ADD_I32 2 |a, b, c, m| (a as i32).saturating_add(b as i32) as u32;
        V_SUB_I32 2 |a, b, c, m| (a as i32).saturating_sub(b as i32) as u32;
        V_ADD_U16 2 |a, b, c, m| (u16lo(a) + u16lo(b)).min(0xFFFF);
        V_SUB_U16 2 |a, b, c, m| u16lo(a).saturating_sub(u16lo(b));
        V_SUBREV_U16 2 |a, b, c, m| u16lo(b).saturating_sub(u16lo(a));
        V_ADD_I16 2 |a, b, c, m| u16lo((i16lo(a) + i16lo(b)).clamp(-32768, 32767) as u32);
        V_SUB_I16 2 |a, b, c, m| u16lo((i16lo(a) - i16lo(b)).clamp(-32768, 32767) as u32);
        V_PK_ADD_I16 2 |a, b, c, m| pair(|a, b, _| (i16lo(a) + i16lo(b)).clamp(-32768, 32767) as u32, a, b, c);
        V_PK_SUB_I16 2 |a, b, c, m| pair(|a, b, _| (i16lo(a) - i16lo(b)).clamp(-32768, 32767) as u32, a, b, c);
        V_PK_ADD_U16 2 |a, b, c, m| pair(|a, b, _| (a + b).min(0xFFFF), a, b, c);
        V_PK_SUB_U16 2 |a, b, c, m| pair(|a, b, _| a.saturating_sub(b), a, b, c);
        V_MUL_U32_U24 2 |a, b, c, m| to_u32(u64::from(a & 0xFF_FFFF) * u64::from(b & 0xFF_FFFF));
        V_MUL_I32_I24 2 |a, b, c, m| to_i32(i64::from(sext24(a)) * i64::from(sext24(b)));
        V_MAD_U32_U24 3 |a, b, c, m| to_u32(u64::from(a & 0xFF_FFFF) * u64::from(b & 0xFF_FFFF) + u64::from(c));
        V_MAD_I32_I24 3 |a, b, c, m| to_i32(i64::from(sext24(a)) * i64::from(sext24(b)) + i64::from(c as i32));
        V_MAD_U16 3 |a, b, c, m| (u64::from(u16lo(a) * u16lo(b)) + u64::from(u16lo(c))).min(0xFFFF) as u32;
        V_MAD_LEGACY_U16 3 |a, b, c, m| (u64::from(u16lo(a) * u16lo(b)) + u64::from(u16lo(c))).min(0xFFFF) as u32;
        V_MAD_I16 3 |a, b, c, m| to_i16(i16lo(a) * i16lo(b) + i16lo(c));
        V_MAD_LEGACY_I16 3 |a, b, c, m| to_i16(i16lo(a) * i16lo(b) + i16lo(c));
        V_MAD_U32_U16 3 |a, b, c, m| to_u32(u64::from(u16lo(a) * u16lo(b)) + u64::from(c));
        V_MAD_I32_I16 3 |a, b, c, m| to_i32(i64::from(i16lo(a) * i16lo(b)) + i64::from(c as i32));
        V_PK_MAD_U16 3 |a, b, c, m| pair(|a, b, c| (u64::from(a * b) + u64::from(c)).min(0xFFFF) as u32, a, b, c);
        V_PK_MAD_I16 3 |a, b, c, m| pair(|a, b, c| to_i16(i16lo(a) * i16lo(b) + i16lo(c)), a, b, c);
        V_PK_MUL_LO_U16 2 |a, b, c, m| pair(|a, b, _| (a * b).min(0xFFFF), a, b, c);
        V_SAD_U8 3 |a, b, c, m| c.saturating_add(sad_u8(a, b, 0, false));
        V_MSAD_U8 3 |a, b, c, m| c.saturating_add(sad_u8(a, b, 0, true));
        V_SAD_HI_U8 3 |a, b, c, m| c.saturating_add(sad_u8(a, b, 0, false) << 16);
        V_SAD_U16 3 |a, b, c, m| c.saturating_add(u16lo(a).abs_diff(u16lo(b)) + (a >> 16).abs_diff(b >> 16));
        V_SAD_U32 3 |a, b, c, m| c.saturating_add(a.abs_diff(b));
        V_DOT2_I32_I16 3 |a, b, c, m| dot_i(a, b, c, 16);
        V_DOT2C_I32_I16 3 |a, b, c, m| dot_i(a, b, c, 16);
        V_DOT2_U32_U16 3 |a, b, c, m| dot_u(a, b, c, 16);
        V_DOT4_I32_I8 3 |a, b, c, m| dot_i(a, b, c, 8);
        V_DOT4C_I32_I8 3 |a, b, c, m| dot_i(a, b, c, 8);
        V_DOT4_U32_U8 3 |a, b, c, m| dot_u(a, b, c, 8);
        V_DOT8_I32_I4 3 |a, b, c, m| dot_i(a, b, c, 4);
        V_DOT8C_I32_I4 3 |a, b, c, m| dot_i(a, b, c, 4);
        V_DOT8_U32_U4 3 |a, b, c, m| dot_u(a, b, c, 4);
    }
}

macro_rules! carry_ops {
    ($($op:ident $in:literal |$a:ident, $b:ident, $c:ident| $e:expr;)*) => {
        fn carries(op: Op, level: Level) -> Option<Handler> {
            #[allow(non_camel_case_types)]
            mod ops {
                $(pub struct $op;)*
            }
            $(impl CarryOp for ops::$op {
                const IN: bool = $in;
                #[inline(always)]
                #[allow(unused_variables)]
                fn f($a: u32, $b: u32, $c: bool) -> (u32, bool) {
                    $e
                }
            })*
            Some(match op {
                $(Op::$op => carry_handler::<ops::$op>(level),)*
                _ => return None,
            })
        }
    };
}

#[inline(always)]
fn subtract(a: u32, b: u32, borrow: bool) -> (u32, bool) {
    let (x, first) = a.overflowing_sub(b);
    let (x, second) = x.overflowing_sub(u32::from(borrow));
    (x, first | second)
}

carry_ops! {
    V_ADD_CO_U32 false |a, b, c| a.overflowing_add(b);
    V_SUB_CO_U32 false |a, b, c| a.overflowing_sub(b);
    V_SUBREV_CO_U32 false |a, b, c| b.overflowing_sub(a);
    V_ADDC_CO_U32 true |a, b, c| {
        let (x, first) = a.overflowing_add(b);
        let (x, second) = x.overflowing_add(u32::from(c));
        (x, first | second)
    };
    V_SUBB_CO_U32 true |a, b, c| subtract(a, b, c);
    V_SUBBREV_CO_U32 true |a, b, c| subtract(b, a, c);
}

macro_rules! compares {
    ($(($pred:ident, $cmp:ident $cmpx:ident, [$s0:literal, $s1:literal], |$a:ident, $b:ident, $m:ident| $e:expr))*) => {
        fn compare(op: Op, level: Level, extra: &mut u32) -> Option<Handler> {
            #[allow(non_camel_case_types)]
            mod ops {
                $(pub struct $cmp;)*
            }
            $(impl CmpOp for ops::$cmp {
                const SRC: [usize; 2] = [$s0, $s1];
                #[inline(always)]
                #[allow(unused_variables)]
                fn f($a: u64, $b: u64, $m: Modes) -> bool {
                    $e
                }
            })*
            Some(match op {
                $(
                    Op::$cmp => $pred::<ops::$cmp>(level),
                    Op::$cmpx => {
                        *extra = 1;
                        $pred::<ops::$cmp>(level)
                    }
                )*
                _ => return None,
            })
        }
    };
}

#[inline(always)]
fn f32s(a: u64, b: u64, m: Modes) -> (f32, f32) {
    (f32::from_bits(m.input32(a as u32)), f32::from_bits(m.input32(b as u32)))
}

#[inline(always)]
fn f64s(a: u64, b: u64, m: Modes) -> (f64, f64) {
    (f64::from_bits(m.input64(a)), f64::from_bits(m.input64(b)))
}

#[inline(always)]
fn f16s(a: u64, b: u64, m: Modes) -> (f32, f32) {
    (float::f16_to_f32(m.input16(a as u32 & 0xFFFF)), float::f16_to_f32(m.input16(b as u32 & 0xFFFF)))
}

macro_rules! all_compares {
    ($(float $fpick:ident $get:ident $w:literal: $f:ident $lt:ident $eq:ident $le:ident $gt:ident $lg:ident $ge:ident $o:ident $u:ident $nge:ident $nlg:ident $ngt:ident $nle:ident $neq:ident $nlt:ident $tru:ident
        | $xf:ident $xlt:ident $xeq:ident $xle:ident $xgt:ident $xlg:ident $xge:ident $xo:ident $xu:ident $xnge:ident $xnlg:ident $xngt:ident $xnle:ident $xneq:ident $xnlt:ident $xtru:ident;)*
     $(int $ipick:ident $ity:ty, $iw:literal: $if:ident $ilt:ident $ieq:ident $ile:ident $igt:ident $ine:ident $ige:ident $it:ident
        | $jf:ident $jlt:ident $jeq:ident $jle:ident $jgt:ident $jne:ident $jge:ident $jt:ident;)*
     $(class $cw:literal $class:ident: $c:ident $cx:ident;)*) => {
        compares! {
            $(
            ($fpick, $f $xf, [$w, $w], |a, b, m| false)
            ($fpick, $lt $xlt, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); x < y })
            ($fpick, $eq $xeq, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); x == y })
            ($fpick, $le $xle, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); x <= y })
            ($fpick, $gt $xgt, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); x > y })
            ($fpick, $lg $xlg, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); x < y || x > y })
            ($fpick, $ge $xge, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); x >= y })
            ($fpick, $o $xo, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); !x.is_nan() && !y.is_nan() })
            ($fpick, $u $xu, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); x.is_nan() || y.is_nan() })
            ($fpick, $nge $xnge, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); !(x >= y) })
            ($fpick, $nlg $xnlg, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); !(x < y || x > y) })
            ($fpick, $ngt $xngt, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); !(x > y) })
            ($fpick, $nle $xnle, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); !(x <= y) })
            ($fpick, $neq $xneq, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); x != y })
            ($fpick, $nlt $xnlt, [$w, $w], |a, b, m| { let (x, y) = $get(a, b, m); !(x < y) })
            ($fpick, $tru $xtru, [$w, $w], |a, b, m| true)
            )*
            $(
            ($ipick, $if $jf, [$iw, $iw], |a, b, m| false)
            ($ipick, $ilt $jlt, [$iw, $iw], |a, b, m| (a as $ity) < b as $ity)
            ($ipick, $ieq $jeq, [$iw, $iw], |a, b, m| a as $ity == b as $ity)
            ($ipick, $ile $jle, [$iw, $iw], |a, b, m| a as $ity <= b as $ity)
            ($ipick, $igt $jgt, [$iw, $iw], |a, b, m| a as $ity > b as $ity)
            ($ipick, $ine $jne, [$iw, $iw], |a, b, m| a as $ity != b as $ity)
            ($ipick, $ige $jge, [$iw, $iw], |a, b, m| a as $ity >= b as $ity)
            ($ipick, $it $jt, [$iw, $iw], |a, b, m| true)
            )*
            $((cmp_portable, $c $cx, [$cw, 1], |a, b, m| float::$class(a as _) as u64 & b != 0))*
        }
    };
}

all_compares! {
    float cmp_handler f32s 1: V_CMP_F_F32 V_CMP_LT_F32 V_CMP_EQ_F32 V_CMP_LE_F32 V_CMP_GT_F32 V_CMP_LG_F32 V_CMP_GE_F32 V_CMP_O_F32 V_CMP_U_F32 V_CMP_NGE_F32 V_CMP_NLG_F32 V_CMP_NGT_F32 V_CMP_NLE_F32 V_CMP_NEQ_F32 V_CMP_NLT_F32 V_CMP_TRU_F32
        | V_CMPX_F_F32 V_CMPX_LT_F32 V_CMPX_EQ_F32 V_CMPX_LE_F32 V_CMPX_GT_F32 V_CMPX_LG_F32 V_CMPX_GE_F32 V_CMPX_O_F32 V_CMPX_U_F32 V_CMPX_NGE_F32 V_CMPX_NLG_F32 V_CMPX_NGT_F32 V_CMPX_NLE_F32 V_CMPX_NEQ_F32 V_CMPX_NLT_F32 V_CMPX_TRU_F32;
    float cmp_portable f64s 2: V_CMP_F_F64 V_CMP_LT_F64 V_CMP_EQ_F64 V_CMP_LE_F64 V_CMP_GT_F64 V_CMP_LG_F64 V_CMP_GE_F64 V_CMP_O_F64 V_CMP_U_F64 V_CMP_NGE_F64 V_CMP_NLG_F64 V_CMP_NGT_F64 V_CMP_NLE_F64 V_CMP_NEQ_F64 V_CMP_NLT_F64 V_CMP_TRU_F64
        | V_CMPX_F_F64 V_CMPX_LT_F64 V_CMPX_EQ_F64 V_CMPX_LE_F64 V_CMPX_GT_F64 V_CMPX_LG_F64 V_CMPX_GE_F64 V_CMPX_O_F64 V_CMPX_U_F64 V_CMPX_NGE_F64 V_CMPX_NLG_F64 V_CMPX_NGT_F64 V_CMPX_NLE_F64 V_CMPX_NEQ_F64 V_CMPX_NLT_F64 V_CMPX_TRU_F64;
    float cmp_portable f16s 1: V_CMP_F_F16 V_CMP_LT_F16 V_CMP_EQ_F16 V_CMP_LE_F16 V_CMP_GT_F16 V_CMP_LG_F16 V_CMP_GE_F16 V_CMP_O_F16 V_CMP_U_F16 V_CMP_NGE_F16 V_CMP_NLG_F16 V_CMP_NGT_F16 V_CMP_NLE_F16 V_CMP_NEQ_F16 V_CMP_NLT_F16 V_CMP_TRU_F16
        | V_CMPX_F_F16 V_CMPX_LT_F16 V_CMPX_EQ_F16 V_CMPX_LE_F16 V_CMPX_GT_F16 V_CMPX_LG_F16 V_CMPX_GE_F16 V_CMPX_O_F16 V_CMPX_U_F16 V_CMPX_NGE_F16 V_CMPX_NLG_F16 V_CMPX_NGT_F16 V_CMPX_NLE_F16 V_CMPX_NEQ_F16 V_CMPX_NLT_F16 V_CMPX_TRU_F16;
    int cmp_handler i32, 1: V_CMP_F_I32 V_CMP_LT_I32 V_CMP_EQ_I32 V_CMP_LE_I32 V_CMP_GT_I32 V_CMP_NE_I32 V_CMP_GE_I32 V_CMP_T_I32
        | V_CMPX_F_I32 V_CMPX_LT_I32 V_CMPX_EQ_I32 V_CMPX_LE_I32 V_CMPX_GT_I32 V_CMPX_NE_I32 V_CMPX_GE_I32 V_CMPX_T_I32;
    int cmp_handler u32, 1: V_CMP_F_U32 V_CMP_LT_U32 V_CMP_EQ_U32 V_CMP_LE_U32 V_CMP_GT_U32 V_CMP_NE_U32 V_CMP_GE_U32 V_CMP_T_U32
        | V_CMPX_F_U32 V_CMPX_LT_U32 V_CMPX_EQ_U32 V_CMPX_LE_U32 V_CMPX_GT_U32 V_CMPX_NE_U32 V_CMPX_GE_U32 V_CMPX_T_U32;
    int cmp_portable i16, 1: V_CMP_F_I16 V_CMP_LT_I16 V_CMP_EQ_I16 V_CMP_LE_I16 V_CMP_GT_I16 V_CMP_NE_I16 V_CMP_GE_I16 V_CMP_T_I16
        | V_CMPX_F_I16 V_CMPX_LT_I16 V_CMPX_EQ_I16 V_CMPX_LE_I16 V_CMPX_GT_I16 V_CMPX_NE_I16 V_CMPX_GE_I16 V_CMPX_T_I16;
    int cmp_portable u16, 1: V_CMP_F_U16 V_CMP_LT_U16 V_CMP_EQ_U16 V_CMP_LE_U16 V_CMP_GT_U16 V_CMP_NE_U16 V_CMP_GE_U16 V_CMP_T_U16
        | V_CMPX_F_U16 V_CMPX_LT_U16 V_CMPX_EQ_U16 V_CMPX_LE_U16 V_CMPX_GT_U16 V_CMPX_NE_U16 V_CMPX_GE_U16 V_CMPX_T_U16;
    int cmp_handler i64, 2: V_CMP_F_I64 V_CMP_LT_I64 V_CMP_EQ_I64 V_CMP_LE_I64 V_CMP_GT_I64 V_CMP_NE_I64 V_CMP_GE_I64 V_CMP_T_I64
        | V_CMPX_F_I64 V_CMPX_LT_I64 V_CMPX_EQ_I64 V_CMPX_LE_I64 V_CMPX_GT_I64 V_CMPX_NE_I64 V_CMPX_GE_I64 V_CMPX_T_I64;
    int cmp_handler u64, 2: V_CMP_F_U64 V_CMP_LT_U64 V_CMP_EQ_U64 V_CMP_LE_U64 V_CMP_GT_U64 V_CMP_NE_U64 V_CMP_GE_U64 V_CMP_T_U64
        | V_CMPX_F_U64 V_CMPX_LT_U64 V_CMPX_EQ_U64 V_CMPX_LE_U64 V_CMPX_GT_U64 V_CMPX_NE_U64 V_CMPX_GE_U64 V_CMPX_T_U64;
    class 1 class32: V_CMP_CLASS_F32 V_CMPX_CLASS_F32;
    class 2 class64: V_CMP_CLASS_F64 V_CMPX_CLASS_F64;
    class 1 class16: V_CMP_CLASS_F16 V_CMPX_CLASS_F16;
}

/// `v_readlane_b32`: `b` is a scalar operand.
fn readlane(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let lane = e.s32(w, u.b) & 63;
    w.s[u.d as usize & 127] = w.lane(u.a, lane as usize);
    Ctl::Next
}

fn readfirstlane(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let lane = w.exec().trailing_zeros() & 63;
    w.s[u.d as usize & 127] = w.lane(u.a, lane as usize);
    Ctl::Next
}

/// `v_writelane_b32`: both sources are scalar operands.
fn writelane(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (value, lane) = (e.s32(w, u.a), e.s32(w, u.b) & 63);
    w.set_lane(u.d, lane as usize, value);
    Ctl::Next
}

/// The lanes below each lane: the low or the high half of their mask.
const fn below(high: bool) -> Lanes {
    let mut all = Lanes::ZERO;
    let mut lane = 0;
    while lane < 64 {
        let mask = (1u64 << lane) - 1;
        all.0[lane / CHUNK][lane % CHUNK] = (if high { mask >> 32 } else { mask }) as u32;
        lane += 1;
    }
    all
}

/// `v_mbcnt_lo`, `v_mbcnt_hi`: bits of the mask below the own lane.
#[inline(always)]
fn mbcnt_body<H: Host, const HIGH: bool>(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    static BELOW: [Lanes; 2] = [below(false), below(true)];
    each_light_chunk!(H::MASKS, w.exec(), |k, mask| {
        let (a, b, below) = (w.chunk(u.a, k), w.chunk(u.b, k), &BELOW[usize::from(HIGH)].0[k]);
        let mut r = [0; CHUNK];
        for l in 0..CHUNK {
            r[l] = (a[l] & below[l]).count_ones().wrapping_add(b[l]);
        }
        put_chunk::<H>(w, u.d, k, mask, r);
    });
    Ctl::Next
}
levels!(mbcnt = mbcnt_body[HIGH: bool]);

fn swap(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    for k in 0..4 {
        let (x, y, mask) = (w.chunk(u.a, k), w.chunk(u.d, k), Wave::exec_chunk(exec, k));
        w.set_chunk(u.d, k, mask, x);
        w.set_chunk(u.a, k, mask, y);
    }
    Ctl::Next
}

/// `v_permlane16_swap`, `v_permlane32_swap`: groups of `extra` lanes of the destination that are odd exchange with
/// the even ones of the source.
fn permlane_swap(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let group = u.extra as usize;
    let (old_d, old_s) = (*w.v(u.d), *w.v(u.a));
    for lane in 0..64 {
        if exec >> lane & 1 == 0 {
            continue;
        }
        if lane & group != 0 {
            w.set_lane(u.d, lane, old_s.get(lane - group));
        } else {
            w.set_lane(u.a, lane, old_d.get(lane + group));
        }
    }
    Ctl::Next
}

/// `v_bitop3`: `extra` is the truth table.
fn bitop3(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let table = u.extra;
    for k in 0..4 {
        let (a, b, c) = (w.chunk(u.a, k), w.chunk(u.b, k), w.chunk(u.c, k));
        let mut r = [0; 16];
        for l in 0..16 {
            for row in 0..8 {
                let pick = |x: u32, bit: u32| if row & bit != 0 { x } else { !x };
                if table & 1 << row != 0 {
                    r[l] |= pick(a[l], 4) & pick(b[l], 2) & pick(c[l], 1);
                }
            }
        }
        w.set_chunk(u.d, k, Wave::exec_chunk(exec, k), r);
    }
    Ctl::Next
}

/// `v_pk_mov_b32`: two sources to two registers.
fn pk_mov(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    for k in 0..4 {
        let (x, y, mask) = (w.chunk(u.a, k), w.chunk(u.hi[0], k), Wave::exec_chunk(exec, k));
        w.set_chunk(u.d, k, mask, x);
        w.set_chunk(u.d + 1, k, mask, y);
    }
    Ctl::Next
}

fn nop(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    Ctl::Next
}

/// The handler of an integer, mask or lane instruction; some set `extra`.
pub(crate) fn handler(op: Op, level: Level, extra: &mut u32) -> Option<Handler> {
    let mut with = |value: u32, handler: Handler| {
        *extra = value;
        Some(handler)
    };
    match op {
        Op::V_NOP | Op::V_CLREXCP => Some(nop),
        Op::V_MAD_U64_U32 => Some(mad64::<false, false>(level)),
        Op::V_MAD_I64_I32 => Some(mad64::<true, false>(level)),
        Op::V_READLANE_B32 => Some(readlane),
        Op::V_READFIRSTLANE_B32 => Some(readfirstlane),
        Op::V_WRITELANE_B32 => Some(writelane),
        Op::V_MBCNT_LO_U32_B32 => Some(mbcnt::<false>(level)),
        Op::V_MBCNT_HI_U32_B32 => Some(mbcnt::<true>(level)),
        Op::V_SWAP_B32 => Some(swap),
        Op::V_PERMLANE16_SWAP_B32 => with(16, permlane_swap),
        Op::V_PERMLANE32_SWAP_B32 => with(32, permlane_swap),
        Op::V_BITOP3_B32 | Op::V_BITOP3_B16 => Some(bitop3),
        Op::V_QSAD_PK_U16_U8 => with(0, qsad),
        Op::V_MQSAD_PK_U16_U8 => with(QSAD_MASKED, qsad),
        Op::V_MQSAD_U32_U8 => with(QSAD_MASKED | QSAD_WIDE, qsad),
        Op::V_PK_MOV_B32 => Some(pk_mov),
        Op::V_CNDMASK_B32 => Some(super::lanes::select_handler(level)),
        _ => int32(op, level)
            .or_else(|| int32_rare(op, level))
            .or_else(|| int16(op, level))
            .or_else(|| int64(op, level))
            .or_else(|| carries(op, level))
            .or_else(|| compare(op, level, extra)),
    }
}

/// The M0 register.
pub(crate) fn m0(w: &Wave) -> u32 {
    w.s[M0]
}
