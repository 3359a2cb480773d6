//! Scalar ALU, branches, waits, hardware registers.

use super::{Ctl, Env, Handler, Uop, flat};
use crate::fault::Problem;
use crate::isa::Op;
use crate::placement::XCDS;
use crate::wave::{M0, VCC, Wave, mode};

/// What SCC becomes.
enum Scc {
    Keep,
    Set(bool),
}

use Scc::{Keep, Set};

fn nonzero32(x: u32) -> (u32, Scc) {
    (x, Set(x != 0))
}

fn nonzero64(x: u64) -> (u64, Scc) {
    (x, Set(x != 0))
}

/// One handler for each scalar operation: `|a, b, d, w|` are the sources, the old destination and the wave.
macro_rules! scalar_ops {
    ($table:ident: $($op:ident $get:ident $geta:ident $getb:ident $set:ident |$a:ident, $b:ident, $d:ident, $w:ident| $e:expr;)*) => {
        fn $table(op: Op) -> Option<Handler> {
            Some(match op {
                $(Op::$op => {
                    #[allow(unused_variables)]
                    fn run(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
                        let ($a, $b, $d) = ($geta(w, e, u.a), $getb(w, e, u.b), $get(w, e, u.d));
                        let $w = &*w;
                        let (value, scc): (_, Scc) = $e;
                        $set(w, u.d, value);
                        if let Set(scc) = scc {
                            w.scc = scc;
                        }
                        Ctl::Next
                    }
                    run
                })*
                _ => return None,
            })
        }
    };
}

#[inline(always)]
fn r32(w: &Wave, e: &Env<'_>, code: u16) -> u32 {
    e.s32(w, code)
}

#[inline(always)]
fn r64(w: &Wave, e: &Env<'_>, code: u16) -> u64 {
    e.s64(w, code)
}

#[inline(always)]
fn none(_: &Wave, _: &Env<'_>, _: u16) {}

#[inline(always)]
fn w32(w: &mut Wave, code: u16, value: u32) {
    w.s[code as usize & 127] = value;
}

#[inline(always)]
fn w64(w: &mut Wave, code: u16, value: u64) {
    w.set_s64(code as usize, value);
}

#[inline(always)]
fn keep(_: &mut Wave, _: u16, (): ()) {}

fn add(a: u32, b: u32, carry: bool) -> (u32, Scc) {
    let sum = u64::from(a) + u64::from(b) + u64::from(carry);
    (sum as u32, Set(sum >> 32 != 0))
}

fn sub(a: u32, b: u32, borrow: bool) -> (u32, Scc) {
    let (x, first) = a.overflowing_sub(b);
    let (x, second) = x.overflowing_sub(u32::from(borrow));
    (x, Set(first | second))
}

fn shift_add(a: u32, shift: u32, b: u32) -> (u32, Scc) {
    let sum = (u64::from(a) << shift) + u64::from(b);
    (sum as u32, Set(sum >> 32 != 0))
}

/// `b`: offset in bits 4:0 (5:0 for 64 bits), width in bits 22:16.
fn field(b: u32, offset_mask: u32) -> (u32, u32) {
    (b & offset_mask, b >> 16 & 0x7F)
}

fn bfe_u64(a: u64, b: u32, bits: u32) -> u64 {
    let (offset, width) = field(b, bits - 1);
    let shifted = a >> offset;
    if width >= 64 { shifted } else { shifted & ((1 << width) - 1) }
}

fn bfe_i64(a: i64, b: u32, bits: u32) -> i64 {
    let (offset, width) = field(b, bits - 1);
    if width == 0 {
        return 0;
    }
    let width = width.min(bits - offset);
    let unused = 64 - width;
    (a >> offset) << unused >> unused
}

/// Sets each group of `group` bits to whether any of them is set.
fn quads(x: u64, whole: bool) -> u64 {
    let mut out = 0;
    for q in 0..16 {
        if x >> (4 * q) & 0xF != 0 {
            out |= if whole { 0xF << (4 * q) } else { 1 << q };
        }
    }
    out
}

fn flbit_i32(x: u32) -> u32 {
    let y = if (x as i32) < 0 { !x } else { x };
    if y == 0 { !0 } else { y.leading_zeros() }
}

fn flbit_i64(x: u64) -> u32 {
    let y = if (x as i64) < 0 { !x } else { x };
    if y == 0 { !0 } else { y.leading_zeros() }
}

fn found(x: u32, none: bool) -> (u32, Scc) {
    (if none { !0 } else { x }, Keep)
}

fn replicate(x: u32) -> u64 {
    let mut out = 0;
    for i in 0..32 {
        out |= u64::from(x >> i & 1) * 3 << (2 * i);
    }
    out
}

scalar_ops! {
    alu:
    S_ADD_U32 none r32 r32 w32 |a, b, d, w| add(a, b, false);
    S_SUB_U32 none r32 r32 w32 |a, b, d, w| sub(a, b, false);
    S_ADD_I32 none r32 r32 w32 |a, b, d, w| {
        let (x, overflow) = (a as i32).overflowing_add(b as i32);
        (x as u32, Set(overflow))
    };
    S_SUB_I32 none r32 r32 w32 |a, b, d, w| {
        let (x, overflow) = (a as i32).overflowing_sub(b as i32);
        (x as u32, Set(overflow))
    };
    S_ADDC_U32 none r32 r32 w32 |a, b, d, w| add(a, b, w.scc);
    S_SUBB_U32 none r32 r32 w32 |a, b, d, w| sub(a, b, w.scc);
    S_MIN_I32 none r32 r32 w32 |a, b, d, w| ((a as i32).min(b as i32) as u32, Set((a as i32) < b as i32));
    S_MIN_U32 none r32 r32 w32 |a, b, d, w| (a.min(b), Set(a < b));
    S_MAX_I32 none r32 r32 w32 |a, b, d, w| ((a as i32).max(b as i32) as u32, Set(a as i32 >= b as i32));
    S_MAX_U32 none r32 r32 w32 |a, b, d, w| (a.max(b), Set(a >= b));
    S_CSELECT_B32 none r32 r32 w32 |a, b, d, w| (if w.scc { a } else { b }, Keep);
    S_CSELECT_B64 none r64 r64 w64 |a, b, d, w| (if w.scc { a } else { b }, Keep);
    S_AND_B32 none r32 r32 w32 |a, b, d, w| nonzero32(a & b);
    S_AND_B64 none r64 r64 w64 |a, b, d, w| nonzero64(a & b);
    S_OR_B32 none r32 r32 w32 |a, b, d, w| nonzero32(a | b);
    S_OR_B64 none r64 r64 w64 |a, b, d, w| nonzero64(a | b);
    S_XOR_B32 none r32 r32 w32 |a, b, d, w| nonzero32(a ^ b);
    S_XOR_B64 none r64 r64 w64 |a, b, d, w| nonzero64(a ^ b);
    S_ANDN2_B32 none r32 r32 w32 |a, b, d, w| nonzero32(a & !b);
    S_ANDN2_B64 none r64 r64 w64 |a, b, d, w| nonzero64(a & !b);
    S_ORN2_B32 none r32 r32 w32 |a, b, d, w| nonzero32(a | !b);
    S_ORN2_B64 none r64 r64 w64 |a, b, d, w| nonzero64(a | !b);
    S_NAND_B32 none r32 r32 w32 |a, b, d, w| nonzero32(!(a & b));
    S_NAND_B64 none r64 r64 w64 |a, b, d, w| nonzero64(!(a & b));
    S_NOR_B32 none r32 r32 w32 |a, b, d, w| nonzero32(!(a | b));
    S_NOR_B64 none r64 r64 w64 |a, b, d, w| nonzero64(!(a | b));
    S_XNOR_B32 none r32 r32 w32 |a, b, d, w| nonzero32(!(a ^ b));
    S_XNOR_B64 none r64 r64 w64 |a, b, d, w| nonzero64(!(a ^ b));
    S_LSHL_B32 none r32 r32 w32 |a, b, d, w| nonzero32(a << (b & 31));
    S_LSHL_B64 none r64 r32 w64 |a, b, d, w| nonzero64(a << (b & 63));
    S_LSHR_B32 none r32 r32 w32 |a, b, d, w| nonzero32(a >> (b & 31));
    S_LSHR_B64 none r64 r32 w64 |a, b, d, w| nonzero64(a >> (b & 63));
    S_ASHR_I32 none r32 r32 w32 |a, b, d, w| nonzero32((a as i32 >> (b & 31)) as u32);
    S_ASHR_I64 none r64 r32 w64 |a, b, d, w| nonzero64((a as i64 >> (b & 63)) as u64);
    S_BFM_B32 none r32 r32 w32 |a, b, d, w| (((1u32 << (a & 31)) - 1) << (b & 31), Keep);
    S_BFM_B64 none r32 r32 w64 |a, b, d, w| (((1u64 << (a & 63)) - 1) << (b & 63), Keep);
    S_MUL_I32 none r32 r32 w32 |a, b, d, w| (a.wrapping_mul(b), Keep);
    S_MUL_HI_U32 none r32 r32 w32 |a, b, d, w| ((u64::from(a) * u64::from(b) >> 32) as u32, Keep);
    S_MUL_HI_I32 none r32 r32 w32 |a, b, d, w| ((i64::from(a as i32) * i64::from(b as i32) >> 32) as u32, Keep);
    S_BFE_U32 none r32 r32 w32 |a, b, d, w| nonzero32(bfe_u64(a.into(), b, 32) as u32);
    S_BFE_I32 none r32 r32 w32 |a, b, d, w| nonzero32(bfe_i64(i64::from(a as i32), b, 32) as u32);
    S_BFE_U64 none r64 r32 w64 |a, b, d, w| nonzero64(bfe_u64(a, b, 64));
    S_BFE_I64 none r64 r32 w64 |a, b, d, w| nonzero64(bfe_i64(a as i64, b, 64) as u64);
    S_ABSDIFF_I32 none r32 r32 w32 |a, b, d, w| nonzero32((a as i32).wrapping_sub(b as i32).wrapping_abs() as u32);
    S_LSHL1_ADD_U32 none r32 r32 w32 |a, b, d, w| shift_add(a, 1, b);
    S_LSHL2_ADD_U32 none r32 r32 w32 |a, b, d, w| shift_add(a, 2, b);
    S_LSHL3_ADD_U32 none r32 r32 w32 |a, b, d, w| shift_add(a, 3, b);
    S_LSHL4_ADD_U32 none r32 r32 w32 |a, b, d, w| shift_add(a, 4, b);
    S_PACK_LL_B32_B16 none r32 r32 w32 |a, b, d, w| (a & 0xFFFF | b << 16, Keep);
    S_PACK_LH_B32_B16 none r32 r32 w32 |a, b, d, w| (a & 0xFFFF | b & 0xFFFF_0000, Keep);
    S_PACK_HH_B32_B16 none r32 r32 w32 |a, b, d, w| (a >> 16 | b & 0xFFFF_0000, Keep);
    S_MOVK_I32 none r32 none w32 |a, b, d, w| (a, Keep);
    S_CMOVK_I32 r32 r32 none w32 |a, b, d, w| (if w.scc { a } else { d }, Keep);
    S_ADDK_I32 r32 r32 none w32 |a, b, d, w| {
        let (x, overflow) = (d as i32).overflowing_add(a as i32);
        (x as u32, Set(overflow))
    };
    S_MULK_I32 r32 r32 none w32 |a, b, d, w| (d.wrapping_mul(a), Keep);
    S_MOV_B32 none r32 none w32 |a, b, d, w| (a, Keep);
    S_MOV_B64 none r64 none w64 |a, b, d, w| (a, Keep);
    S_CMOV_B32 r32 r32 none w32 |a, b, d, w| (if w.scc { a } else { d }, Keep);
    S_CMOV_B64 r64 r64 none w64 |a, b, d, w| (if w.scc { a } else { d }, Keep);
    S_NOT_B32 none r32 none w32 |a, b, d, w| nonzero32(!a);
    S_NOT_B64 none r64 none w64 |a, b, d, w| nonzero64(!a);
    S_WQM_B32 none r32 none w32 |a, b, d, w| nonzero32(quads(a.into(), true) as u32);
    S_WQM_B64 none r64 none w64 |a, b, d, w| nonzero64(quads(a, true));
    S_BREV_B32 none r32 none w32 |a, b, d, w| (a.reverse_bits(), Keep);
    S_BREV_B64 none r64 none w64 |a, b, d, w| (a.reverse_bits(), Keep);
    S_BCNT0_I32_B32 none r32 none w32 |a, b, d, w| nonzero32(a.count_zeros());
    S_BCNT0_I32_B64 none r64 none w32 |a, b, d, w| nonzero32(a.count_zeros());
    S_BCNT1_I32_B32 none r32 none w32 |a, b, d, w| nonzero32(a.count_ones());
    S_BCNT1_I32_B64 none r64 none w32 |a, b, d, w| nonzero32(a.count_ones());
    S_FF0_I32_B32 none r32 none w32 |a, b, d, w| found(a.trailing_ones(), a == !0);
    S_FF0_I32_B64 none r64 none w32 |a, b, d, w| found(a.trailing_ones(), a == !0);
    S_FF1_I32_B32 none r32 none w32 |a, b, d, w| found(a.trailing_zeros(), a == 0);
    S_FF1_I32_B64 none r64 none w32 |a, b, d, w| found(a.trailing_zeros(), a == 0);
    S_FLBIT_I32_B32 none r32 none w32 |a, b, d, w| found(a.leading_zeros(), a == 0);
    S_FLBIT_I32_B64 none r64 none w32 |a, b, d, w| found(a.leading_zeros(), a == 0);
    S_FLBIT_I32 none r32 none w32 |a, b, d, w| (flbit_i32(a), Keep);
    S_FLBIT_I32_I64 none r64 none w32 |a, b, d, w| (flbit_i64(a), Keep);
    S_SEXT_I32_I8 none r32 none w32 |a, b, d, w| (a as u8 as i8 as i32 as u32, Keep);
    S_SEXT_I32_I16 none r32 none w32 |a, b, d, w| (a as u16 as i16 as i32 as u32, Keep);
    S_BITSET0_B32 r32 r32 none w32 |a, b, d, w| (d & !(1 << (a & 31)), Keep);
    S_BITSET0_B64 r64 r32 none w64 |a, b, d, w| (d & !(1 << (a & 63)), Keep);
    S_BITSET1_B32 r32 r32 none w32 |a, b, d, w| (d | 1 << (a & 31), Keep);
    S_BITSET1_B64 r64 r32 none w64 |a, b, d, w| (d | 1 << (a & 63), Keep);
    S_QUADMASK_B32 none r32 none w32 |a, b, d, w| nonzero32(quads(a.into(), false) as u32);
    S_QUADMASK_B64 none r64 none w64 |a, b, d, w| nonzero64(quads(a, false));
    S_ABS_I32 none r32 none w32 |a, b, d, w| nonzero32((a as i32).wrapping_abs() as u32);
    S_BITREPLICATE_B64_B32 none r32 none w64 |a, b, d, w| (replicate(a), Keep);
    S_CMP_EQ_I32 none r32 r32 keep |a, b, d, w| ((), Set(a == b));
    S_CMP_LG_I32 none r32 r32 keep |a, b, d, w| ((), Set(a != b));
    S_CMP_GT_I32 none r32 r32 keep |a, b, d, w| ((), Set(a as i32 > b as i32));
    S_CMP_GE_I32 none r32 r32 keep |a, b, d, w| ((), Set(a as i32 >= b as i32));
    S_CMP_LT_I32 none r32 r32 keep |a, b, d, w| ((), Set((a as i32) < b as i32));
    S_CMP_LE_I32 none r32 r32 keep |a, b, d, w| ((), Set(a as i32 <= b as i32));
    S_CMP_EQ_U32 none r32 r32 keep |a, b, d, w| ((), Set(a == b));
    S_CMP_LG_U32 none r32 r32 keep |a, b, d, w| ((), Set(a != b));
    S_CMP_GT_U32 none r32 r32 keep |a, b, d, w| ((), Set(a > b));
    S_CMP_GE_U32 none r32 r32 keep |a, b, d, w| ((), Set(a >= b));
    S_CMP_LT_U32 none r32 r32 keep |a, b, d, w| ((), Set(a < b));
    S_CMP_LE_U32 none r32 r32 keep |a, b, d, w| ((), Set(a <= b));
    S_CMPK_EQ_I32 none r32 r32 keep |a, b, d, w| ((), Set(a == b));
    S_CMPK_LG_I32 none r32 r32 keep |a, b, d, w| ((), Set(a != b));
    S_CMPK_GT_I32 none r32 r32 keep |a, b, d, w| ((), Set(a as i32 > b as i32));
    S_CMPK_GE_I32 none r32 r32 keep |a, b, d, w| ((), Set(a as i32 >= b as i32));
    S_CMPK_LT_I32 none r32 r32 keep |a, b, d, w| ((), Set((a as i32) < b as i32));
    S_CMPK_LE_I32 none r32 r32 keep |a, b, d, w| ((), Set(a as i32 <= b as i32));
    S_CMPK_EQ_U32 none r32 r32 keep |a, b, d, w| ((), Set(a == b));
    S_CMPK_LG_U32 none r32 r32 keep |a, b, d, w| ((), Set(a != b));
    S_CMPK_GT_U32 none r32 r32 keep |a, b, d, w| ((), Set(a > b));
    S_CMPK_GE_U32 none r32 r32 keep |a, b, d, w| ((), Set(a >= b));
    S_CMPK_LT_U32 none r32 r32 keep |a, b, d, w| ((), Set(a < b));
    S_CMPK_LE_U32 none r32 r32 keep |a, b, d, w| ((), Set(a <= b));
    S_BITCMP0_B32 none r32 r32 keep |a, b, d, w| ((), Set(a >> (b & 31) & 1 == 0));
    S_BITCMP1_B32 none r32 r32 keep |a, b, d, w| ((), Set(a >> (b & 31) & 1 != 0));
    S_BITCMP0_B64 none r64 r32 keep |a, b, d, w| ((), Set(a >> (b & 63) & 1 == 0));
    S_BITCMP1_B64 none r64 r32 keep |a, b, d, w| ((), Set(a >> (b & 63) & 1 != 0));
    S_CMP_EQ_U64 none r64 r64 keep |a, b, d, w| ((), Set(a == b));
    S_CMP_LG_U64 none r64 r64 keep |a, b, d, w| ((), Set(a != b));
}

/// `*_saveexec_b64` and `*_wrexec_b64`: `f(source, exec)` becomes EXEC.
macro_rules! exec_ops {
    ($($op:ident $wrexec:literal |$s:ident, $x:ident| $e:expr;)*) => {
        fn exec_table(op: Op) -> Option<Handler> {
            Some(match op {
                $(Op::$op => {
                    fn run(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
                        let ($s, $x) = (e.s64(w, u.a), w.exec());
                        let value: u64 = $e;
                        w.set_s64(u.d as usize, if $wrexec { value } else { $x });
                        w.set_exec(value);
                        w.scc = value != 0;
                        Ctl::Next
                    }
                    run
                })*
                _ => return None,
            })
        }
    };
}

exec_ops! {
    S_AND_SAVEEXEC_B64 false |s, x| s & x;
    S_OR_SAVEEXEC_B64 false |s, x| s | x;
    S_XOR_SAVEEXEC_B64 false |s, x| s ^ x;
    S_ANDN2_SAVEEXEC_B64 false |s, x| s & !x;
    S_ORN2_SAVEEXEC_B64 false |s, x| s | !x;
    S_NAND_SAVEEXEC_B64 false |s, x| !(s & x);
    S_NOR_SAVEEXEC_B64 false |s, x| !(s | x);
    S_XNOR_SAVEEXEC_B64 false |s, x| !(s ^ x);
    S_ANDN1_SAVEEXEC_B64 false |s, x| !s & x;
    S_ORN1_SAVEEXEC_B64 false |s, x| !s | x;
    S_ANDN1_WREXEC_B64 true |s, x| !s & x;
    S_ANDN2_WREXEC_B64 true |s, x| s & !x;
}

fn jump(w: &mut Wave, taken: bool, u: &Uop) -> Ctl {
    if taken {
        w.pc = u.imm as u32;
        Ctl::Jump
    } else {
        Ctl::Next
    }
}

macro_rules! branches {
    ($($op:ident |$w:ident| $taken:expr;)*) => {
        fn branch_table(op: Op) -> Option<Handler> {
            Some(match op {
                $(Op::$op => {
                    #[allow(unused_variables)]
                    fn run(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
                        let $w = &*w;
                        let taken = $taken;
                        jump(w, taken, u)
                    }
                    run
                })*
                _ => return None,
            })
        }
    };
}

branches! {
    S_BRANCH |w| true;
    S_CBRANCH_SCC0 |w| !w.scc;
    S_CBRANCH_SCC1 |w| w.scc;
    S_CBRANCH_VCCZ |w| w.s64(VCC) == 0;
    S_CBRANCH_VCCNZ |w| w.s64(VCC) != 0;
    S_CBRANCH_EXECZ |w| w.exec() == 0;
    S_CBRANCH_EXECNZ |w| w.exec() != 0;
    // No debugger is attached.
    S_CBRANCH_CDBGSYS |w| false;
    S_CBRANCH_CDBGUSER |w| false;
    S_CBRANCH_CDBGSYS_OR_USER |w| false;
    S_CBRANCH_CDBGSYS_AND_USER |w| false;
}

fn nop(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    Ctl::Next
}

fn end(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    Ctl::End
}

fn barrier(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    Ctl::Barrier
}

fn sleep(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    Ctl::Sleep
}

/// `s_sendmsg`: an interrupt of the host. Other messages are for graphics and trap handlers.
fn sendmsg(_: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    const INTERRUPT: u32 = 1;
    if u.imm as u32 & 0xF != INTERRUPT {
        return e.fault(Problem::Unsupported { what: "a message that is no interrupt" });
    }
    if let Some(interrupt) = e.interrupt {
        interrupt();
    }
    Ctl::Next
}

fn trap(_: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    e.fault(Problem::Trap { id: u.imm as u32 & 0xFF })
}

/// Jumps to a virtual address.
fn jump_to(w: &mut Wave, e: &mut Env<'_>, address: u64) -> Ctl {
    match e.program.index_of(address) {
        Some(index) => {
            w.pc = index;
            Ctl::Jump
        }
        None => e.fault(Problem::WildJump { address }),
    }
}

/// The address after the instruction.
fn next_address(e: &Env<'_>, u: &Uop) -> u64 {
    e.program.next_address(u.index)
}

fn getpc(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    w.set_s64(u.d as usize, next_address(e, u));
    Ctl::Next
}

fn setpc(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let target = e.s64(w, u.a);
    jump_to(w, e, target)
}

fn swappc(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let target = e.s64(w, u.a);
    w.set_s64(u.d as usize, next_address(e, u));
    jump_to(w, e, target)
}

fn call(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    w.set_s64(u.d as usize, next_address(e, u));
    jump(w, true, u)
}

/// `s_movrels`, `s_movreld`: register index plus M0. `extra`: bit 0 destination is indexed, bit 1 64 bits.
fn movrel(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let offset = w.s[M0] as usize & 127;
    let (src, dst) = if u.extra & 1 != 0 {
        (u.a, u.d as usize + offset)
    } else {
        ((u.a as usize + offset) as u16, u.d as usize)
    };
    if u.extra & 1 == 0 && src >= 102 || u.extra & 1 != 0 && dst >= 102 {
        return e.fault(Problem::RegisterIndex { register: "s", index: u32::from(src).max(dst as u32) });
    }
    if u.extra & 2 != 0 {
        let value = e.s64(w, src);
        w.set_s64(dst, value);
    } else {
        w.s[dst & 127] = e.s32(w, src);
    }
    Ctl::Next
}

/// Sets or clears mode bits that decide how instructions run.
fn alter(w: &mut Wave, bits: u32, on: bool) -> Ctl {
    w.set_mode(if on { w.mode | bits } else { w.mode & !bits });
    Ctl::Mode
}

/// `s_setvskip`: the bit of `a` that `b` names says whether vector instructions are skipped from here on.
fn setvskip(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let on = e.s32(w, u.a) >> (e.s32(w, u.b) & 31) & 1 != 0;
    alter(w, mode::VSKIP, on)
}

/// `s_set_gpr_idx_on`: the index goes to M0[7:0], which operands it is added to to M0[15:12].
fn gpr_idx_on(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    w.s[M0] = w.s[M0] & !0xF0FF | e.s32(w, u.a) & 0xFF | (u.imm as u32 & 0xF) << 12;
    alter(w, mode::GPR_IDX, true)
}

fn gpr_idx_off(w: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    alter(w, mode::GPR_IDX, false)
}

fn gpr_idx_mode(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    w.s[M0] = w.s[M0] & !0xF000 | (u.imm as u32 & 0xF) << 12;
    Ctl::Next
}

fn gpr_idx_idx(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    w.s[M0] = w.s[M0] & !0xFF | e.s32(w, u.a) & 0xFF;
    Ctl::Next
}

/// A divergent branch: the smaller part of the active lanes goes first, the other part's lanes and address go on the
/// stack in the scalar registers, for `s_cbranch_join`.
fn fork(w: &mut Wave, e: &mut Env<'_>, u: &Uop, lanes: u64, target: u64) -> Ctl {
    let exec = w.exec();
    let (taken, not) = (exec & lanes, exec & !lanes);
    if not == 0 {
        return jump_to(w, e, target);
    }
    if taken == 0 {
        return Ctl::Next;
    }
    let depth = w.mode >> mode::FORKS;
    if depth == 7 {
        return e.fault(Problem::Unsupported { what: "more than seven nested forks" });
    }
    let not_first = not.count_ones() < taken.count_ones();
    let (now, later, address) =
        if not_first { (not, taken, target) } else { (taken, not, next_address(e, u)) };
    let slot = 4 * depth as usize;
    w.set_s64(slot, later);
    w.set_s64(slot + 2, address);
    w.set_mode(w.mode + (1 << mode::FORKS));
    w.set_exec(now);
    if not_first { Ctl::Next } else { jump_to(w, e, target) }
}

fn fork_to_register(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (lanes, target) = (e.s64(w, u.a), e.s64(w, u.b));
    fork(w, e, u, lanes, target)
}

fn fork_to_immediate(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (lanes, target) = (e.s64(w, u.a), e.program.device_address(u.imm as u32));
    fork(w, e, u, lanes, target)
}

/// `s_cbranch_join`: continues with the lanes that the last fork has pushed, down to the depth in `a`.
fn join(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let depth = w.mode >> mode::FORKS;
    if depth == e.s32(w, u.a) & 7 {
        return Ctl::Next;
    }
    if depth == 0 {
        return e.fault(Problem::Unsupported { what: "a join without a fork" });
    }
    let slot = 4 * (depth as usize - 1);
    w.set_mode(w.mode - (1 << mode::FORKS));
    w.set_exec(w.s64(slot));
    let address = w.s64(slot + 2);
    jump_to(w, e, address)
}

const HW_MODE: u32 = 1;

fn hardware_register(w: &Wave, e: &Env<'_>, id: u32) -> Option<u32> {
    Some(match id {
        HW_MODE => w.mode,
        // STATUS: SCC, EXECZ, VCCZ, in a barrier-capable workgroup.
        2 => u32::from(w.scc) | u32::from(w.exec() == 0) << 9 | u32::from(w.s64(VCC) == 0) << 10 | 1 << 11,
        3 => 0,
        // HW_ID: the wave and the SIMD it would sit on.
        4 => w.index & 0xF | (w.index & 3) << 4,
        5 => e.group.gpr_alloc,
        6 => (e.lds.len() as u32).div_ceil(256) << 12,
        7 => 0,
        // SH_MEM_BASES: the upper 16 bits of the apertures' high dwords.
        15 => flat::PRIVATE_APERTURE >> 16 | flat::SHARED_APERTURE & 0xFFFF_0000,
        // XCC_ID: workgroups go round over the XCDs.
        20 => (e.group.linear % u64::from(XCDS)) as u32,
        _ => return None,
    })
}

fn getreg(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let spec = u.imm as u32;
    let (id, offset, size) = (spec & 63, spec >> 6 & 31, (spec >> 11 & 31) + 1);
    match hardware_register(w, e, id) {
        Some(value) => {
            let mask = if size == 32 { !0 } else { (1 << size) - 1 };
            w.s[u.d as usize & 127] = value >> offset & mask;
            Ctl::Next
        }
        None => e.fault(Problem::HardwareRegister { id }),
    }
}

fn setreg(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let spec = u.imm as u32;
    let (id, offset, size) = (spec & 63, spec >> 6 & 31, (spec >> 11 & 31) + 1);
    if id != HW_MODE {
        return e.fault(Problem::HardwareRegister { id });
    }
    let mask = (if size == 32 { !0 } else { (1u32 << size) - 1 }) << offset;
    let value = e.s32(w, u.a) << offset;
    w.set_mode(w.mode & !mask | value & mask);
    Ctl::Mode
}

/// The handler of a scalar ALU or program-control instruction; some set `extra`.
pub(crate) fn handler(op: Op, extra: &mut u32) -> Option<Handler> {
    let mut with = |value: u32, handler: Handler| {
        *extra = value;
        Some(handler)
    };
    match op {
        Op::S_NOP
        | Op::S_WAITCNT
        | Op::S_SETPRIO
        | Op::S_ICACHE_INV
        | Op::S_INCPERFLEVEL
        | Op::S_DECPERFLEVEL
        | Op::S_TTRACEDATA
        | Op::S_WAKEUP => Some(nop),
        Op::S_SLEEP => Some(sleep),
        Op::S_ENDPGM => Some(end),
        Op::S_BARRIER => Some(barrier),
        Op::S_TRAP => Some(trap),
        Op::S_SENDMSG => Some(sendmsg),
        Op::S_GETPC_B64 => Some(getpc),
        Op::S_SETPC_B64 => Some(setpc),
        Op::S_SWAPPC_B64 => Some(swappc),
        Op::S_CALL_B64 => Some(call),
        Op::S_MOVRELS_B32 => with(0, movrel),
        Op::S_MOVRELD_B32 => with(1, movrel),
        Op::S_MOVRELS_B64 => with(2, movrel),
        Op::S_MOVRELD_B64 => with(3, movrel),
        Op::S_GETREG_B32 => Some(getreg),
        Op::S_SETREG_B32 | Op::S_SETREG_IMM32_B32 => Some(setreg),
        Op::S_SETVSKIP => Some(setvskip),
        Op::S_SET_GPR_IDX_ON => Some(gpr_idx_on),
        Op::S_SET_GPR_IDX_OFF => Some(gpr_idx_off),
        Op::S_SET_GPR_IDX_MODE => Some(gpr_idx_mode),
        Op::S_SET_GPR_IDX_IDX => Some(gpr_idx_idx),
        Op::S_CBRANCH_G_FORK => Some(fork_to_register),
        Op::S_CBRANCH_I_FORK => Some(fork_to_immediate),
        Op::S_CBRANCH_JOIN => Some(join),
        _ => alu(op).or_else(|| exec_table(op)).or_else(|| branch_table(op)),
    }
}
