//! Scalar ALU and program control: value, SCC, EXEC.

use std::collections::{HashMap, HashSet};

use hk_emu::isa::Op;

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use crate::semantics::coverage::executed;

/// What a model sees: sources as 64 bits, the old destination, SCC, EXEC, VCC.
pub struct Scalar {
    a: u64,
    b: u64,
    old: u64,
    scc: bool,
    exec: u64,
}

impl Scalar {
    fn ua(&self) -> i128 {
        (self.a as u32).into()
    }
    fn ub(&self) -> i128 {
        (self.b as u32).into()
    }
    fn sa(&self) -> i128 {
        (self.a as i32).into()
    }
    fn sb(&self) -> i128 {
        (self.b as i32).into()
    }
}

/// What an instruction leaves: destination, SCC, EXEC.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Out {
    value: u64,
    scc: bool,
    exec: u64,
}

type Formula = fn(&Scalar) -> Out;

/// Text of an instruction, or of several, on s[8:9] and s[10:11], with the destination s[16:17].
struct Model {
    op: Op,
    text: String,
    formula: Box<dyn Fn(&Scalar) -> Out>,
}

/// Only the low word of the destination.
fn low(s: &Scalar, x: i128) -> u64 {
    s.old & !0xFFFF_FFFF | u64::from(x as u32)
}

fn out(s: &Scalar, value: u64, scc: bool) -> Out {
    Out { value, scc, exec: s.exec }
}

/// A 32-bit result, with SCC as it was.
fn plain(s: &Scalar, x: i128) -> Out {
    out(s, low(s, x), s.scc)
}

/// With SCC for a result other than zero.
fn nonzero(s: &Scalar, x: i128) -> Out {
    out(s, low(s, x), x as u32 != 0)
}

/// With a carry or borrow as SCC.
fn carry(s: &Scalar, x: i128) -> Out {
    out(s, low(s, x), !(0..1 << 32).contains(&x))
}

/// With a signed overflow as SCC.
fn overflow(s: &Scalar, x: i128) -> Out {
    out(s, low(s, x), i32::try_from(x).is_err())
}

fn plain64(s: &Scalar, x: i128) -> Out {
    out(s, x as u64, s.scc)
}

fn nonzero64(s: &Scalar, x: i128) -> Out {
    out(s, x as u64, x as u64 != 0)
}

fn compare(s: &Scalar, scc: bool) -> Out {
    out(s, s.old, scc)
}

/// EXEC becomes `x`; the destination gets the old or the new one.
fn saveexec(s: &Scalar, x: u64) -> Out {
    Out { value: s.exec, scc: x != 0, exec: x }
}

fn wrexec(x: u64) -> Out {
    Out { value: x, scc: x != 0, exec: x }
}

fn ones(n: u64) -> i128 {
    (1i128 << n) - 1
}

fn bit(x: u64, i: u32) -> bool {
    x >> i & 1 != 0
}

/// The first of `n` bits, from the top, for which `f` holds; minus one if none does.
fn from_top(n: u32, f: impl Fn(u32) -> bool) -> i128 {
    (0..n).find(|i| f(n - 1 - i)).map_or(-1, i128::from)
}

fn from_bottom(n: u32, f: impl Fn(u32) -> bool) -> i128 {
    (0..n).find(|i| f(*i)).map_or(-1, i128::from)
}

fn count(n: u32, f: impl Fn(u32) -> bool) -> i128 {
    (0..n).filter(|i| f(*i)).count() as i128
}

/// Bits made one at a time.
fn build(n: u32, f: impl Fn(u32) -> bool) -> i128 {
    (0..n).map(|i| i128::from(f(i)) << i).sum()
}

/// A field of `n` bits that starts at `o`; what lies beyond the source is its sign or zero.
fn field(x: i128, o: u64, n: u64) -> i128 {
    x >> o & ones(n.min(100))
}

fn signed_field(x: i128, bits: u64, o: u64, n: u64) -> i128 {
    let n = n.min(bits - o);
    let x = field(x, o, n);
    if n != 0 && x >> (n - 1) & 1 != 0 { x - (1 << n) } else { x }
}

/// `NAME operands |s| result;`: the text follows from the operand kinds. d and D are the destination, a, b, A, B the
/// sources of one and two words.
macro_rules! scalars {
    ($($op:ident $operands:literal |$s:ident| $e:expr;)*) => {
        vec![$((Op::$op, $operands, (|$s: &Scalar| $e) as Formula)),*]
    };
}

fn models() -> Vec<Model> {
    let list = scalars! {
        S_ADD_U32 "d,a,b" |s| carry(s, s.ua() + s.ub());
        S_SUB_U32 "d,a,b" |s| carry(s, s.ua() - s.ub());
        S_ADD_I32 "d,a,b" |s| overflow(s, s.sa() + s.sb());
        S_SUB_I32 "d,a,b" |s| overflow(s, s.sa() - s.sb());
        S_ADDC_U32 "d,a,b" |s| carry(s, s.ua() + s.ub() + i128::from(s.scc));
        S_SUBB_U32 "d,a,b" |s| carry(s, s.ua() - s.ub() - i128::from(s.scc));
        S_MIN_I32 "d,a,b" |s| out(s, low(s, s.sa().min(s.sb())), s.sa() < s.sb());
        S_MIN_U32 "d,a,b" |s| out(s, low(s, s.ua().min(s.ub())), s.ua() < s.ub());
        S_MAX_I32 "d,a,b" |s| out(s, low(s, s.sa().max(s.sb())), s.sa() >= s.sb());
        S_MAX_U32 "d,a,b" |s| out(s, low(s, s.ua().max(s.ub())), s.ua() >= s.ub());
        S_CSELECT_B32 "d,a,b" |s| plain(s, if s.scc { s.ua() } else { s.ub() });
        S_CSELECT_B64 "D,A,B" |s| plain64(s, (if s.scc { s.a } else { s.b }).into());
        S_AND_B32 "d,a,b" |s| nonzero(s, build(32, |i| bit(s.a, i) && bit(s.b, i)));
        S_AND_B64 "D,A,B" |s| nonzero64(s, build(64, |i| bit(s.a, i) && bit(s.b, i)));
        S_OR_B32 "d,a,b" |s| nonzero(s, build(32, |i| bit(s.a, i) || bit(s.b, i)));
        S_OR_B64 "D,A,B" |s| nonzero64(s, build(64, |i| bit(s.a, i) || bit(s.b, i)));
        S_XOR_B32 "d,a,b" |s| nonzero(s, build(32, |i| bit(s.a, i) != bit(s.b, i)));
        S_XOR_B64 "D,A,B" |s| nonzero64(s, build(64, |i| bit(s.a, i) != bit(s.b, i)));
        S_ANDN2_B32 "d,a,b" |s| nonzero(s, build(32, |i| bit(s.a, i) && !bit(s.b, i)));
        S_ANDN2_B64 "D,A,B" |s| nonzero64(s, build(64, |i| bit(s.a, i) && !bit(s.b, i)));
        S_ORN2_B32 "d,a,b" |s| nonzero(s, build(32, |i| bit(s.a, i) || !bit(s.b, i)));
        S_ORN2_B64 "D,A,B" |s| nonzero64(s, build(64, |i| bit(s.a, i) || !bit(s.b, i)));
        S_NAND_B32 "d,a,b" |s| nonzero(s, build(32, |i| !(bit(s.a, i) && bit(s.b, i))));
        S_NAND_B64 "D,A,B" |s| nonzero64(s, build(64, |i| !(bit(s.a, i) && bit(s.b, i))));
        S_NOR_B32 "d,a,b" |s| nonzero(s, build(32, |i| !(bit(s.a, i) || bit(s.b, i))));
        S_NOR_B64 "D,A,B" |s| nonzero64(s, build(64, |i| !(bit(s.a, i) || bit(s.b, i))));
        S_XNOR_B32 "d,a,b" |s| nonzero(s, build(32, |i| bit(s.a, i) == bit(s.b, i)));
        S_XNOR_B64 "D,A,B" |s| nonzero64(s, build(64, |i| bit(s.a, i) == bit(s.b, i)));
        S_LSHL_B32 "d,a,b" |s| nonzero(s, s.ua() << (s.b % 32));
        S_LSHL_B64 "D,A,b" |s| nonzero64(s, i128::from(s.a) << (s.b % 64));
        S_LSHR_B32 "d,a,b" |s| nonzero(s, s.ua() >> (s.b % 32));
        S_LSHR_B64 "D,A,b" |s| nonzero64(s, i128::from(s.a) >> (s.b % 64));
        S_ASHR_I32 "d,a,b" |s| nonzero(s, s.sa() >> (s.b % 32));
        S_ASHR_I64 "D,A,b" |s| nonzero64(s, i128::from(s.a as i64) >> (s.b % 64));
        S_BFM_B32 "d,a,b" |s| plain(s, ones(s.a % 32) << (s.b % 32));
        S_BFM_B64 "D,a,b" |s| plain64(s, ones(s.a % 64) << (s.b % 64));
        S_MUL_I32 "d,a,b" |s| plain(s, s.ua() * s.ub());
        S_MUL_HI_U32 "d,a,b" |s| plain(s, s.ua() * s.ub() >> 32);
        S_MUL_HI_I32 "d,a,b" |s| plain(s, s.sa() * s.sb() >> 32);
        S_BFE_U32 "d,a,b" |s| nonzero(s, field(s.ua(), s.b % 32, s.b >> 16 & 127));
        S_BFE_I32 "d,a,b" |s| nonzero(s, signed_field(s.sa(), 32, s.b % 32, s.b >> 16 & 127));
        S_BFE_U64 "D,A,b" |s| nonzero64(s, field(s.a.into(), s.b % 64, s.b >> 16 & 127));
        S_BFE_I64 "D,A,b" |s| nonzero64(s, signed_field((s.a as i64).into(), 64, s.b % 64, s.b >> 16 & 127));
        // The difference wraps before its sign is dropped.
        S_ABSDIFF_I32 "d,a,b" |s| nonzero(s, i128::from((s.sa() - s.sb()) as i32).abs());
        S_LSHL1_ADD_U32 "d,a,b" |s| carry(s, (s.ua() << 1) + s.ub());
        S_LSHL2_ADD_U32 "d,a,b" |s| carry(s, (s.ua() << 2) + s.ub());
        S_LSHL3_ADD_U32 "d,a,b" |s| carry(s, (s.ua() << 3) + s.ub());
        S_LSHL4_ADD_U32 "d,a,b" |s| carry(s, (s.ua() << 4) + s.ub());
        S_PACK_LL_B32_B16 "d,a,b" |s| plain(s, s.ua() % 65536 + s.ub() % 65536 * 65536);
        S_PACK_LH_B32_B16 "d,a,b" |s| plain(s, s.ua() % 65536 + s.ub() / 65536 * 65536);
        S_PACK_HH_B32_B16 "d,a,b" |s| plain(s, s.ua() / 65536 + s.ub() / 65536 * 65536);
        S_MOV_B32 "d,a" |s| plain(s, s.ua());
        S_MOV_B64 "D,A" |s| plain64(s, s.a.into());
        S_CMOV_B32 "d,a" |s| if s.scc { plain(s, s.ua()) } else { compare(s, false) };
        S_CMOV_B64 "D,A" |s| if s.scc { plain64(s, s.a.into()) } else { compare(s, false) };
        S_NOT_B32 "d,a" |s| nonzero(s, -1 - s.sa());
        S_NOT_B64 "D,A" |s| nonzero64(s, -1 - i128::from(s.a as i64));
        S_WQM_B32 "d,a" |s| nonzero(s, build(32, |i| (0..4).any(|k| bit(s.a, i / 4 * 4 + k))));
        S_WQM_B64 "D,A" |s| nonzero64(s, build(64, |i| (0..4).any(|k| bit(s.a, i / 4 * 4 + k))));
        S_QUADMASK_B32 "d,a" |s| nonzero(s, build(8, |i| (0..4).any(|k| bit(s.a, i * 4 + k))));
        S_QUADMASK_B64 "D,A" |s| nonzero64(s, build(16, |i| (0..4).any(|k| bit(s.a, i * 4 + k))));
        S_BREV_B32 "d,a" |s| plain(s, build(32, |i| bit(s.a, 31 - i)));
        S_BREV_B64 "D,A" |s| plain64(s, build(64, |i| bit(s.a, 63 - i)));
        S_BCNT0_I32_B32 "d,a" |s| nonzero(s, count(32, |i| !bit(s.a, i)));
        S_BCNT0_I32_B64 "d,A" |s| nonzero(s, count(64, |i| !bit(s.a, i)));
        S_BCNT1_I32_B32 "d,a" |s| nonzero(s, count(32, |i| bit(s.a, i)));
        S_BCNT1_I32_B64 "d,A" |s| nonzero(s, count(64, |i| bit(s.a, i)));
        S_FF0_I32_B32 "d,a" |s| plain(s, from_bottom(32, |i| !bit(s.a, i)));
        S_FF0_I32_B64 "d,A" |s| plain(s, from_bottom(64, |i| !bit(s.a, i)));
        S_FF1_I32_B32 "d,a" |s| plain(s, from_bottom(32, |i| bit(s.a, i)));
        S_FF1_I32_B64 "d,A" |s| plain(s, from_bottom(64, |i| bit(s.a, i)));
        S_FLBIT_I32_B32 "d,a" |s| plain(s, from_top(32, |i| bit(s.a, i)));
        S_FLBIT_I32_B64 "d,A" |s| plain(s, from_top(64, |i| bit(s.a, i)));
        S_FLBIT_I32 "d,a" |s| plain(s, from_top(32, |i| bit(s.a, i) != bit(s.a, 31)));
        S_FLBIT_I32_I64 "d,A" |s| plain(s, from_top(64, |i| bit(s.a, i) != bit(s.a, 63)));
        S_SEXT_I32_I8 "d,a" |s| plain(s, signed_field(s.ua(), 32, 0, 8));
        S_SEXT_I32_I16 "d,a" |s| plain(s, signed_field(s.ua(), 32, 0, 16));
        S_BITSET0_B32 "d,a" |s| plain(s, build(32, |i| bit(s.old, i) && u64::from(i) != s.a % 32));
        S_BITSET0_B64 "D,a" |s| plain64(s, build(64, |i| bit(s.old, i) && u64::from(i) != s.a % 64));
        S_BITSET1_B32 "d,a" |s| plain(s, build(32, |i| bit(s.old, i) || u64::from(i) == s.a % 32));
        S_BITSET1_B64 "D,a" |s| plain64(s, build(64, |i| bit(s.old, i) || u64::from(i) == s.a % 64));
        S_ABS_I32 "d,a" |s| nonzero(s, s.sa().abs());
        S_BITREPLICATE_B64_B32 "D,a" |s| plain64(s, build(64, |i| bit(s.a, i / 2)));
        S_CMP_EQ_I32 "a,b" |s| compare(s, s.sa() == s.sb());
        S_CMP_LG_I32 "a,b" |s| compare(s, s.sa() != s.sb());
        S_CMP_GT_I32 "a,b" |s| compare(s, s.sa() > s.sb());
        S_CMP_GE_I32 "a,b" |s| compare(s, s.sa() >= s.sb());
        S_CMP_LT_I32 "a,b" |s| compare(s, s.sa() < s.sb());
        S_CMP_LE_I32 "a,b" |s| compare(s, s.sa() <= s.sb());
        S_CMP_EQ_U32 "a,b" |s| compare(s, s.ua() == s.ub());
        S_CMP_LG_U32 "a,b" |s| compare(s, s.ua() != s.ub());
        S_CMP_GT_U32 "a,b" |s| compare(s, s.ua() > s.ub());
        S_CMP_GE_U32 "a,b" |s| compare(s, s.ua() >= s.ub());
        S_CMP_LT_U32 "a,b" |s| compare(s, s.ua() < s.ub());
        S_CMP_LE_U32 "a,b" |s| compare(s, s.ua() <= s.ub());
        S_CMP_EQ_U64 "A,B" |s| compare(s, s.a == s.b);
        S_CMP_LG_U64 "A,B" |s| compare(s, s.a != s.b);
        S_BITCMP0_B32 "a,b" |s| compare(s, !bit(s.a, (s.b % 32) as u32));
        S_BITCMP1_B32 "a,b" |s| compare(s, bit(s.a, (s.b % 32) as u32));
        S_BITCMP0_B64 "A,b" |s| compare(s, !bit(s.a, (s.b % 64) as u32));
        S_BITCMP1_B64 "A,b" |s| compare(s, bit(s.a, (s.b % 64) as u32));
        S_AND_SAVEEXEC_B64 "D,A" |s| saveexec(s, s.a & s.exec);
        S_OR_SAVEEXEC_B64 "D,A" |s| saveexec(s, s.a | s.exec);
        S_XOR_SAVEEXEC_B64 "D,A" |s| saveexec(s, s.a ^ s.exec);
        S_ANDN2_SAVEEXEC_B64 "D,A" |s| saveexec(s, s.a & !s.exec);
        S_ORN2_SAVEEXEC_B64 "D,A" |s| saveexec(s, s.a | !s.exec);
        S_NAND_SAVEEXEC_B64 "D,A" |s| saveexec(s, !(s.a & s.exec));
        S_NOR_SAVEEXEC_B64 "D,A" |s| saveexec(s, !(s.a | s.exec));
        S_XNOR_SAVEEXEC_B64 "D,A" |s| saveexec(s, !(s.a ^ s.exec));
        S_ANDN1_SAVEEXEC_B64 "D,A" |s| saveexec(s, !s.a & s.exec);
        S_ORN1_SAVEEXEC_B64 "D,A" |s| saveexec(s, !s.a | s.exec);
        S_ANDN1_WREXEC_B64 "D,A" |s| wrexec(!s.a & s.exec);
        S_ANDN2_WREXEC_B64 "D,A" |s| wrexec(s.a & !s.exec);
    };
    let mut all = vec![];
    for (op, operands, formula) in list {
        let register = |kind: &str| match kind {
            "d" => "s16",
            "D" => "s[16:17]",
            "a" => "s8",
            "A" => "s[8:9]",
            "b" => "s10",
            _ => "s[10:11]",
        };
        let list: Vec<&str> = operands.split(',').map(register).collect();
        let text = format!("{} {}", op.mnemonic(), list.join(", "));
        all.push(Model { op, text, formula: Box::new(formula) });
        // A constant, 64 bits wide where the operand is; a literal; and SCC.
        let kinds: Vec<&str> = operands.split(',').collect();
        let Some(at) = kinds.iter().position(|k| matches!(*k, "b" | "B")) else { continue };
        for (constant, value) in [("-5", -5i64 as u64), ("37", 37), ("0x30007", 0x30007)] {
            let mut list = list.clone();
            list[at] = constant;
            let text = format!("{} {}", op.mnemonic(), list.join(", "));
            let with = move |s: &Scalar| formula(&Scalar { b: value, ..*s });
            all.push(Model { op, text, formula: Box::new(with) });
        }
    }
    // Immediates of 16 bits, signed or not as the instruction is.
    for k in [0u16, 1, 0x7FFF, 0x8000, 0xFFFB] {
        let signed = i128::from(k as i16);
        let unsigned = i128::from(k);
        let mut add = |op: Op, operand: &str, formula: Box<dyn Fn(&Scalar) -> Out>| {
            all.push(Model { op, text: format!("{} {operand}, {k:#x}", op.mnemonic()), formula });
        };
        add(Op::S_MOVK_I32, "s16", Box::new(move |s| plain(s, signed)));
        add(
            Op::S_CMOVK_I32,
            "s16",
            Box::new(move |s| if s.scc { plain(s, signed) } else { compare(s, false) }),
        );
        add(Op::S_ADDK_I32, "s16", Box::new(move |s| overflow(s, i128::from(s.old as i32) + signed)));
        add(Op::S_MULK_I32, "s16", Box::new(move |s| plain(s, i128::from(s.old as i32) * signed)));
        add(Op::S_CMPK_EQ_I32, "s8", Box::new(move |s| compare(s, s.sa() == signed)));
        add(Op::S_CMPK_LG_I32, "s8", Box::new(move |s| compare(s, s.sa() != signed)));
        add(Op::S_CMPK_GT_I32, "s8", Box::new(move |s| compare(s, s.sa() > signed)));
        add(Op::S_CMPK_GE_I32, "s8", Box::new(move |s| compare(s, s.sa() >= signed)));
        add(Op::S_CMPK_LT_I32, "s8", Box::new(move |s| compare(s, s.sa() < signed)));
        add(Op::S_CMPK_LE_I32, "s8", Box::new(move |s| compare(s, s.sa() <= signed)));
        add(Op::S_CMPK_EQ_U32, "s8", Box::new(move |s| compare(s, s.ua() == unsigned)));
        add(Op::S_CMPK_LG_U32, "s8", Box::new(move |s| compare(s, s.ua() != unsigned)));
        add(Op::S_CMPK_GT_U32, "s8", Box::new(move |s| compare(s, s.ua() > unsigned)));
        add(Op::S_CMPK_GE_U32, "s8", Box::new(move |s| compare(s, s.ua() >= unsigned)));
        add(Op::S_CMPK_LT_U32, "s8", Box::new(move |s| compare(s, s.ua() < unsigned)));
        add(Op::S_CMPK_LE_U32, "s8", Box::new(move |s| compare(s, s.ua() <= unsigned)));
    }
    let mut several = |op: Op, text: &str, formula: Formula| {
        all.push(Model { op, text: text.to_owned(), formula: Box::new(formula) });
    };
    // 64-bit constants: literals are extended by the type, floats are doubles.
    several(Op::S_MOV_B64, "s_mov_b64 s[16:17], -3", |s| plain64(s, -3));
    several(Op::S_MOV_B64, "s_mov_b64 s[16:17], 0x87654321", |s| plain64(s, 0x8765_4321));
    several(Op::S_MOV_B32, "s_mov_b32 s16, 4.0", |s| plain(s, 0x4080_0000));
    several(Op::S_MOV_B32, "s_mov_b32 vcc_hi, s8\ns_mov_b32 s16, vcc_hi", |s| plain(s, s.ua()));
    // Jumps leave a mark where they should not come by.
    several(Op::S_BRANCH, "s_branch .L0%\ns_mov_b32 s16, s8\n.L0%:", |s| compare(s, s.scc));
    several(Op::S_CBRANCH_SCC0, "s_cbranch_scc0 .L1%\ns_mov_b32 s16, s8\n.L1%:", |s| mark(s, !s.scc));
    several(Op::S_CBRANCH_SCC1, "s_cbranch_scc1 .L2%\ns_mov_b32 s16, s8\n.L2%:", |s| mark(s, s.scc));
    several(
        Op::S_CBRANCH_VCCZ,
        "s_mov_b64 vcc, s[10:11]\ns_cbranch_vccz .L3%\ns_mov_b32 s16, s8\n.L3%:",
        |s| mark(s, s.b == 0),
    );
    several(
        Op::S_CBRANCH_VCCNZ,
        "s_mov_b64 vcc, s[10:11]\ns_cbranch_vccnz .L4%\ns_mov_b32 s16, s8\n.L4%:",
        |s| mark(s, s.b != 0),
    );
    several(Op::S_CBRANCH_EXECZ, "s_cbranch_execz .L5%\ns_mov_b32 s16, s8\n.L5%:", |s| mark(s, s.exec == 0));
    several(Op::S_CBRANCH_EXECNZ, "s_cbranch_execnz .L6%\ns_mov_b32 s16, s8\n.L6%:", |s| {
        mark(s, s.exec != 0)
    });
    // No debugger is attached.
    several(Op::S_CBRANCH_CDBGSYS, "s_cbranch_cdbgsys .L7%\ns_mov_b32 s16, s8\n.L7%:", |s| mark(s, false));
    several(Op::S_CBRANCH_CDBGUSER, "s_cbranch_cdbguser .L8%\ns_mov_b32 s16, s8\n.L8%:", |s| mark(s, false));
    several(Op::S_CBRANCH_CDBGSYS_OR_USER, "s_cbranch_cdbgsys_or_user .L9%\ns_mov_b32 s16, s8\n.L9%:", |s| {
        mark(s, false)
    });
    several(
        Op::S_CBRANCH_CDBGSYS_AND_USER,
        "s_cbranch_cdbgsys_and_user .La%\ns_mov_b32 s16, s8\n.La%:",
        |s| mark(s, false),
    );
    several(
        Op::S_CALL_B64,
        "s_call_b64 s[20:21], .Lb%\ns_mov_b32 s17, 5\ns_branch .Lc%\n.Lb%:\ns_mov_b32 s16, 6\ns_setpc_b64 s[20:21]\n.Lc%:",
        |s| plain64(s, 5 << 32 | 6),
    );
    several(
        Op::S_SETPC_B64,
        "s_call_b64 s[20:21], .Ld%\ns_branch .Le%\n.Ld%:\ns_mov_b32 s16, s8\ns_setpc_b64 s[20:21]\ns_mov_b32 s16, 1\n.Le%:",
        |s| plain(s, s.ua()),
    );
    // The address after s_getpc, plus the way to a label.
    let to_label = "s_getpc_b64 s[20:21]\n.Lf%:\ns_mov_b32 s19, .Lg%-.Lf%\ns_add_u32 s20, s20, s19\ns_addc_u32 s21, s21, 0\n";
    several(
        Op::S_GETPC_B64,
        &format!("{to_label}s_setpc_b64 s[20:21]\ns_mov_b32 s16, 9\n.Lg%:\ns_cmp_eq_u32 s8, s8"),
        |s| compare(s, true),
    );
    several(
        Op::S_SWAPPC_B64,
        &format!(
            "{}s_swappc_b64 s[22:23], s[20:21]\ns_mov_b32 s17, 7\ns_branch .Li%\n.Lg%:\ns_mov_b32 s16, s8\ns_setpc_b64 s[22:23]\n.Li%:\ns_cmp_eq_u32 s8, s8",
            to_label.replace(".Lf", ".Lh").replace(".Lg", ".Lj")
        )
        .replace(".Lg%:", ".Lj%:"),
        |s| Out { value: 7 << 32 | u64::from(s.a as u32), ..compare(s, true) },
    );
    several(Op::S_MOVRELS_B32, "s_mov_b32 m0, 1\ns_movrels_b32 s16, s8", |s| plain(s, i128::from(s.a >> 32)));
    several(Op::S_MOVRELS_B64, "s_mov_b32 m0, 2\ns_movrels_b64 s[16:17], s[8:9]", |s| plain64(s, s.b.into()));
    several(Op::S_MOVRELD_B32, "s_mov_b32 m0, 1\ns_movreld_b32 s16, s8", |s| {
        out(s, s.old & 0xFFFF_FFFF | s.a << 32, s.scc)
    });
    several(Op::S_MOVRELD_B64, "s_mov_b32 m0, 2\ns_movreld_b64 s[14:15], s[8:9]", |s| plain64(s, s.a.into()));
    several(Op::S_GETREG_B32, "s_getreg_b32 s16, hwreg(HW_REG_MODE, 4, 4)", |s| plain(s, 0xF));
    several(
        Op::S_SETREG_IMM32_B32,
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0x9\ns_getreg_b32 s16, hwreg(HW_REG_MODE, 0, 8)\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0",
        |s| plain(s, 0xF9),
    );
    several(
        Op::S_SETREG_B32,
        "s_setreg_b32 hwreg(HW_REG_MODE, 2, 3), s8\ns_getreg_b32 s16, hwreg(HW_REG_MODE, 0, 6)\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 8), 0xf0",
        |s| plain(s, s.ua() % 8 * 4 + 32),
    );
    // Things without effect on results.
    for op in [Op::S_NOP, Op::S_SETPRIO, Op::S_SLEEP, Op::S_INCPERFLEVEL, Op::S_DECPERFLEVEL] {
        several(op, &format!("{} 3", op.mnemonic()), |s| compare(s, s.scc));
    }
    for op in [Op::S_ICACHE_INV, Op::S_TTRACEDATA, Op::S_WAKEUP, Op::S_BARRIER] {
        several(op, &op.mnemonic(), |s| compare(s, s.scc));
    }
    several(Op::S_WAITCNT, "s_waitcnt vmcnt(0) lgkmcnt(0)", |s| compare(s, s.scc));
    for op in [Op::S_DCACHE_INV, Op::S_DCACHE_WB, Op::S_DCACHE_INV_VOL, Op::S_DCACHE_WB_VOL] {
        several(op, &op.mnemonic(), |s| compare(s, s.scc));
    }
    for (op, operands) in [
        (Op::S_DCACHE_DISCARD, "s[12:13], 0"),
        (Op::S_DCACHE_DISCARD_X2, "s[12:13], 0"),
        (Op::S_ATC_PROBE, "3, s[12:13], 0"),
        (Op::S_ATC_PROBE_BUFFER, "3, s[8:11], 0"),
    ] {
        several(op, &format!("{} {operands}", op.mnemonic()), |s| compare(s, s.scc));
    }
    // Time goes on.
    for op in [Op::S_MEMTIME, Op::S_MEMREALTIME] {
        let name = op.mnemonic();
        let text = format!(
            "{name} s[20:21]\ns_sleep 1\ns_sleep 1\ns_sleep 1\ns_sleep 1\ns_sleep 1\ns_sleep 1\n{name} s[22:23]\ns_waitcnt lgkmcnt(0)\ns_sub_u32 s22, s22, s20\ns_subb_u32 s23, s23, s21\ns_cmp_gt_i32 s22, 0"
        );
        several(op, &text, |s| compare(s, true));
    }
    all
}

/// A jump that is not taken comes by a move of the first source.
fn mark(s: &Scalar, taken: bool) -> Out {
    if taken { compare(s, s.scc) } else { plain(s, s.ua()) }
}

pub fn ops() -> Vec<Op> {
    models().into_iter().map(|m| m.op).collect()
}

const WORDS: usize = 10;

fn check(cpu: &str, models: Vec<Model>) -> HashMap<Op, usize> {
    let models: Vec<Model> = models.into_iter().filter(|m| executed(cpu).contains(&m.op)).collect();
    let special = [
        0,
        1,
        2,
        4,
        31,
        32,
        33,
        63,
        64,
        0x7FFF_FFFF,
        0x8000_0000,
        0xFFFF_FFFF,
        0x1_0000_0000,
        u64::MAX,
        1 << 63,
        i64::MAX as u64,
        0x20_0004,
        0x1F_0001,
        0x40_0000,
        0xFFFF_FFFF_8000_0000,
    ];
    let mut random = Random(21);
    let mut pick = |i: usize| {
        let r = random.next();
        match r % 3 {
            0 => special[(i + (r >> 4) as usize) % special.len()],
            1 => u64::from(random.next()) << 32 | u64::from(random.next()),
            _ => u64::from(random.next()) >> (r >> 8 & 31),
        }
    };
    let mut sets: Vec<[u64; 5]> = vec![];
    for a in special {
        for b in special {
            sets.push([a, b, pick(sets.len()), pick(sets.len()) & 1, pick(sets.len())]);
        }
    }
    for i in 0..300 {
        sets.push([pick(i), pick(i + 1), pick(i + 2), pick(i) & 1, if i % 9 == 0 { 0 } else { pick(i + 3) }]);
    }
    // Records: a, b, old, SCC, EXEC. s[2] is the workgroup.
    let mut body = format!(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_mul_i32 s6, s2, {record}
  s_waitcnt lgkmcnt(0)
  s_add_u32 s12, s4, s6
  s_addc_u32 s13, s5, 0
  s_mul_i32 s7, s2, {results}
  v_mov_b32 v1, s7
  v_add_u32 v1, {first:#x}, v1\n",
        record = 4 * WORDS,
        results = models.len() * 20,
        first = sets.len() * 4 * WORDS,
    );
    for (i, model) in models.iter().enumerate() {
        body += "  s_load_dwordx4 s[8:11], s[12:13], 0x0
  s_load_dwordx2 s[16:17], s[12:13], 0x10
  s_load_dword s14, s[12:13], 0x18
  s_load_dwordx2 s[24:25], s[12:13], 0x20
  s_waitcnt lgkmcnt(0)
  s_mov_b64 exec, s[24:25]
  s_cmp_eq_u32 s14, 1\n";
        for line in model.text.replace('%', &i.to_string()).lines() {
            body += &format!("  {line}\n");
        }
        body += "  s_mov_b64 s[26:27], exec
  s_cselect_b32 s28, 1, 0
  s_mov_b64 exec, 1
  v_mov_b32 v4, s16
  v_mov_b32 v5, s17
  v_mov_b32 v6, s26
  v_mov_b32 v7, s27
  v_mov_b32 v8, s28
  global_store_dwordx4 v1, v[4:7], s[4:5]
  global_store_dword v1, v8, s[4:5] offset:16
  v_add_u32 v1, 20, v1\n";
    }
    let rig = Rig::new(options(cpu), &assemble(&Assembly { cpu, body: &body, ..Assembly::default() }));
    let mut data: Vec<u32> = sets.iter().flatten().flat_map(|x| [*x as u32, (*x >> 32) as u32]).collect();
    let results = data.len();
    data.resize(results + sets.len() * models.len() * 5, 0);
    let buffer = rig.upload("data", &data);
    rig.launch("test", sets.len() as u32, 64, &Args::new().push(buffer)).unwrap_or_else(|f| panic!("{f}"));
    let got: Vec<u32> = rig.download(buffer, data.len());
    let mut distinct: HashMap<Op, HashSet<Out>> = HashMap::new();
    for (i, got) in got[results..].chunks(5).enumerate() {
        let ([a, b, old, scc, exec], model) = (sets[i / models.len()], &models[i % models.len()]);
        let want = (model.formula)(&Scalar { a, b, old, scc: scc != 0, exec });
        let pair = |i: usize| u64::from(got[i]) | u64::from(got[i + 1]) << 32;
        let got = Out { value: pair(0), exec: pair(2), scc: got[4] != 0 };
        assert_eq!(
            got, want,
            "{cpu}: {}\n  of {a:#x}, {b:#x}, SCC {scc}, EXEC {exec:#x}, old {old:#x}",
            model.text
        );
        distinct.entry(model.op).or_default().insert(got);
    }
    distinct.into_iter().map(|(op, set)| (op, set.len())).collect()
}

#[test]
fn values_scc_and_exec() {
    for cpu in ["gfx942", "gfx950"] {
        for (op, n) in check(cpu, models()) {
            assert!(n >= 2, "{}: only {n} different results", op.mnemonic());
        }
    }
}

#[test]
#[should_panic(expected = "s_addc_u32 s16, s8, s10")]
fn a_wrong_model_is_noticed() {
    let mut models = models();
    let wrong = models.iter_mut().find(|m| m.op == Op::S_ADDC_U32).expect("it has a model");
    wrong.formula = Box::new(|s| carry(s, s.ua() + s.ub()));
    check("gfx942", models);
}
