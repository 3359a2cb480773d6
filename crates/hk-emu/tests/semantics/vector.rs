//! Vector ALU instructions in bulk: models, the forms in which each is tried, one kernel for many, and the comparison.

use std::collections::{HashMap, HashSet};

use hk_emu::Level;
use hk_emu::isa::{Encoding, Op};

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use crate::semantics::coverage::executed;
use crate::semantics::exact::{BFLOAT, DOUBLE, Format, HALF, Mode, Round, SINGLE, Value};

/// The type of an operand: how many registers, where its sign is, how an integer is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ty {
    /// No operand.
    Void,
    U16,
    I16,
    U24,
    I24,
    U32,
    I32,
    U64,
    I64,
    B128,
    F16,
    Bf16,
    F32,
    F64,
    PkU16,
    PkI16,
    PkF16,
    PkF32,
    /// Two bf16; a vector to reduce, not two operations.
    Bf16x2,
    F16x2,
    /// Bits of 32 that no modifier touches.
    B32,
    /// Mixed precision: an f32, or the half that op_sel names where op_sel_hi is set.
    Mixed,
}

use Ty::*;

impl Ty {
    pub fn words(self) -> usize {
        match self {
            Void => 0,
            U64 | I64 | F64 | PkF32 => 2,
            B128 => 4,
            _ => 1,
        }
    }
    pub fn format(self) -> Option<Format> {
        match self {
            F16 | PkF16 => Some(HALF),
            F32 | PkF32 => Some(SINGLE),
            F64 => Some(DOUBLE),
            Bf16 => Some(BFLOAT),
            _ => None,
        }
    }
    fn bits(self) -> u32 {
        match self {
            U16 | I16 | F16 | Bf16 => 16,
            U24 | I24 => 24,
            other => 32 * other.words() as u32,
        }
    }
    fn mask(self) -> u128 {
        if self.bits() == 128 { !0 } else { (1 << self.bits()) - 1 }
    }
    fn signed(self) -> bool {
        matches!(self, I16 | I24 | I32 | I64 | PkI16)
    }
    /// The element of a packed type.
    fn element(self) -> Ty {
        match self {
            PkU16 => U16,
            PkI16 => I16,
            PkF16 => F16,
            PkF32 => F32,
            other => other,
        }
    }
    fn packed(self) -> bool {
        self.element() != self
    }
    pub fn integer(self, x: u128) -> i128 {
        let x = (x & self.mask()) as i128;
        if self.signed() && x >> (self.bits() - 1) & 1 != 0 { x - (1 << self.bits()) } else { x }
    }
    /// The ends of an integer type.
    fn range(self) -> (i128, i128) {
        let n = self.bits().min(126);
        if self.signed() { (-(1 << (n - 1)), (1 << (n - 1)) - 1) } else { (0, (1 << n) - 1) }
    }
}

/// What a model sees of one lane: sources with their modifiers applied.
pub struct Lane {
    pub mode: Mode,
    pub x: [u128; 3],
    /// The destination before.
    pub old: u128,
    /// The lane's bit of the mask that is read.
    pub mask: bool,
    pub lane: usize,
    pub gfx950: bool,
    /// s[22:23].
    pub scalar: u64,
    /// The `op_sel_hi` bits: which sources of mixed precision are halves.
    pub halves: u8,
}

impl Lane {
    pub fn w(&self, i: usize) -> u64 {
        self.x[i] as u64
    }
    pub fn u(&self, i: usize) -> u32 {
        self.x[i] as u32
    }
    /// Arithmetic on the sources in one format.
    pub fn float<const N: usize>(&self, f: Format, op: fn(&[Value; N], Round) -> Value) -> u128 {
        let x: [u64; N] = std::array::from_fn(|i| self.w(i));
        let run = |v: &[Value], r: Round| op(v.try_into().expect("as many values"), r);
        self.mode.arithmetic(f, &x, run).into()
    }
}

#[derive(Clone, Copy)]
pub enum Body {
    /// The exact integer result of the sources as integers.
    Int(fn([i128; 3]) -> i128),
    /// The bits of the result.
    Bits(fn(&Lane) -> u128),
    /// A comparison.
    Compare(fn(&Lane) -> bool),
    /// The exact integer result; what does not fit the type is the carry. The last argument is the carry in.
    Carry(fn([i128; 3], i128) -> i128),
    /// Bits and a mask bit.
    Flag(fn(&Lane) -> (u128, bool)),
}

/// What one instruction does.
pub struct Model {
    pub op: Op,
    pub dst: Ty,
    pub src: [Ty; 3],
    pub body: Body,
    /// How far a result may be from the model's, in units of the last place.
    pub ulps: u64,
    /// The whole text, for what has operands of its own.
    pub text: Option<&'static str>,
}

impl Model {
    fn sources(&self) -> usize {
        self.src.iter().filter(|t| **t != Void).count()
    }
    fn carries_in(&self) -> bool {
        self.op.reads_mask()
    }
    fn writes_mask(&self) -> bool {
        matches!(self.body, Body::Compare(_) | Body::Carry(_) | Body::Flag(_))
    }
    fn name(&self) -> &'static str {
        self.op.info().name
    }
    fn is_mixed(&self) -> bool {
        self.src[0] == Mixed
    }
    /// 16-bit instructions whose VOP3 form keeps the other half of the destination.
    fn keeps_half(&self) -> bool {
        let info = self.op.info();
        (info.op_sel_order().contains('3') || self.is_mixed()) && matches!(self.dst, U16 | I16 | F16)
    }
}

/// `NAME dst(src, ...) |a, b, c| exact integer;`
macro_rules! ints {
    ($($op:ident $dst:ident($($src:ident),*) |$a:pat_param, $b:pat_param, $c:pat_param| $e:expr;)*) => {
        vec![$($crate::semantics::vector::model(Op::$op, Ty::$dst, &[$(Ty::$src),*], Body::Int(|[$a, $b, $c]: [i128; 3]| $e))),*]
    };
}
/// `NAME dst(src, ...) |lane| bits;`
macro_rules! bits {
    ($($op:ident $dst:ident($($src:ident),*) |$l:ident| $e:expr;)*) => {
        vec![$($crate::semantics::vector::model(Op::$op, Ty::$dst, &[$(Ty::$src),*], Body::Bits(|$l| $e))),*]
    };
}
pub(crate) use {bits, ints};

pub fn model(op: Op, dst: Ty, src: &[Ty], body: Body) -> Model {
    let mut all = [Void; 3];
    all[..src.len()].copy_from_slice(src);
    Model { op, dst, src: all, body, ulps: 0, text: None }
}

/// A model of instructions that are written in full.
pub fn custom(op: Op, dst: Ty, src: &[Ty], text: &'static str, f: fn(&Lane) -> u128) -> Model {
    Model { text: Some(text), ..model(op, dst, src, Body::Bits(f)) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Src {
    Vgpr,
    Sgpr,
    /// An inline constant by its code.
    Constant(u8),
    Literal(u32),
}

#[derive(Clone, Copy, Debug)]
pub struct Dpp {
    ctrl: u16,
    row_mask: u8,
    bank_mask: u8,
    bound_ctrl: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Sdwa {
    dst_sel: u8,
    dst_unused: u8,
    src_sel: [u8; 2],
    sext: [bool; 2],
}

/// How an instruction is written.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    pub src: [Src; 3],
    pub neg: u8,
    /// Of a packed instruction: negation of the high halves.
    pub abs: u8,
    pub op_sel: u8,
    pub op_sel_hi: u8,
    pub clamp: bool,
    pub omod: u8,
    pub e64: bool,
    pub dpp: Option<Dpp>,
    pub sdwa: Option<Sdwa>,
}

pub const PLAIN: Form = Form {
    src: [Src::Vgpr; 3],
    neg: 0,
    abs: 0,
    op_sel: 0,
    op_sel_hi: 7,
    clamp: false,
    omod: 0,
    e64: false,
    dpp: None,
    sdwa: None,
};

const SELECTORS: [&str; 7] = ["BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"];

/// The text of an inline constant.
fn constant_text(code: u8) -> String {
    match code {
        128..=192 => (i32::from(code) - 128).to_string(),
        193..=208 => (192 - i32::from(code)).to_string(),
        248 => "0.15915494309189532".to_owned(),
        _ => ["0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0"][usize::from(code) - 240].to_owned(),
    }
}

/// The value of an inline constant as an operand of a type.
fn constant_value(code: u8, ty: Ty) -> u128 {
    let integer = match code {
        128..=192 => i128::from(code) - 128,
        193..=208 => 192 - i128::from(code),
        _ => {
            let f = match ty {
                U16 | I16 | F16 | PkF16 | F16x2 => HALF,
                Bf16 | Bf16x2 => BFLOAT,
                U64 | I64 | F64 => DOUBLE,
                _ => SINGLE,
            };
            if code == 248 {
                return match f {
                    HALF => 0x3118,
                    BFLOAT => 0x3E22,
                    SINGLE => 0x3E22_F983,
                    _ => 0x3FC4_5F30_6DC9_C882,
                };
            }
            let sign = if code & 1 != 0 { f.sign() } else { 0 };
            // One half, one, two, four.
            let field = f.bias() as u64 + u64::from(code - 240) / 2 - 1;
            return (sign | field << f.fraction).into();
        }
    };
    integer as u128 & if ty.words() == 1 { 0xFFFF_FFFF } else { !0 }
}

/// Assembly of one case: operands at v[4:11], destination v[12:15], mask in VCC and s[20:21], mask out as said.
pub struct Text {
    pub body: String,
    mask_register: &'static str,
}

fn registers(letter: char, first: usize, n: usize) -> String {
    if n < 2 { format!("{letter}{first}") } else { format!("{letter}[{first}:{}]", first + n - 1) }
}

const FIRST: [usize; 3] = [4, 6, 8];

pub fn text(model: &Model, form: &Form) -> Text {
    let info = model.op.info();
    let vopc = info.encoding == Encoding::Vopc;
    let promoted = form.e64 && matches!(info.encoding, Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc);
    let suffix = match (form.dpp.is_some(), form.sdwa.is_some(), promoted, info.encoding) {
        (true, ..) => "_dpp",
        (_, true, ..) => "_sdwa",
        (_, _, true, _) => "_e64",
        (_, _, _, Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc) if has_suffix(model.op) => "_e32",
        _ => "",
    };
    let vop3 = promoted || matches!(info.encoding, Encoding::Vop3 | Encoding::Vop3p);
    let mask_register = if vop3 { "s[24:25]" } else { "vcc" };
    if let Some(text) = model.text {
        return Text { body: text.to_owned(), mask_register };
    }
    let mut operands = vec![];
    if vopc {
        operands.push(mask_register.to_owned());
    } else {
        operands.push(registers('v', 12, model.dst.words()));
        if model.writes_mask() {
            operands.push(mask_register.to_owned());
        }
    }
    let mixed = model.is_mixed();
    let packed = info.encoding == Encoding::Vop3p;
    for i in 0..model.sources() {
        let n = model.src[i].words();
        let plain = match form.src[i] {
            Src::Vgpr => registers('v', FIRST[i], n),
            Src::Sgpr => registers('s', 22, n),
            Src::Constant(code) => constant_text(code),
            Src::Literal(value) => format!("{value:#x}"),
        };
        let (neg, abs) = (form.neg >> i & 1 != 0, form.abs >> i & 1 != 0);
        let sext = form.sdwa.is_some_and(|s| i < 2 && s.sext[i]);
        operands.push(match (packed && !mixed, neg, abs, sext) {
            (false, _, _, true) => format!("sext({plain})"),
            (false, true, true, _) => format!("-|{plain}|"),
            (false, false, true, _) => format!("|{plain}|"),
            (false, true, false, _) => format!("neg({plain})"),
            _ => plain,
        });
    }
    if model.carries_in() {
        operands.push(if vop3 { "s[20:21]" } else { "vcc" }.to_owned());
    }
    let mut line = format!("{}{suffix} {}", model.op.mnemonic(), operands.join(", "));
    let list = |bits: u8, n: usize| (0..n).map(|i| (bits >> i & 1).to_string()).collect::<Vec<_>>().join(",");
    let n = model.sources();
    if packed {
        if form.op_sel != 0 {
            line += &format!(" op_sel:[{}]", list(form.op_sel, n));
        }
        // Without op_sel_hi a packed instruction has all of them, a mixed one none.
        if form.op_sel_hi != if mixed { 0 } else { 7 } {
            line += &format!(" op_sel_hi:[{}]", list(form.op_sel_hi, n));
        }
        if form.neg != 0 && !mixed {
            line += &format!(" neg_lo:[{}]", list(form.neg, n));
        }
        if form.abs != 0 && !mixed {
            line += &format!(" neg_hi:[{}]", list(form.abs, n));
        }
    } else if form.op_sel != 0 {
        // Bit 3 is the destination, and comes last.
        let bits: Vec<String> = model
            .op
            .info()
            .op_sel_order()
            .bytes()
            .map(|b| (form.op_sel >> (b - b'0') & 1).to_string())
            .collect();
        line += &format!(" op_sel:[{}]", bits.join(","));
    }
    if form.clamp {
        line += " clamp";
    }
    line += ["", " mul:2", " mul:4", " div:2"][usize::from(form.omod)];
    if let Some(d) = form.dpp {
        line += &format!(" {} row_mask:{:#x} bank_mask:{:#x}", dpp_text(d.ctrl), d.row_mask, d.bank_mask);
        line += if d.bound_ctrl { " bound_ctrl:0" } else { "" };
    }
    if let Some(s) = form.sdwa {
        if !vopc {
            let unused = ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"][usize::from(s.dst_unused)];
            line += &format!(" dst_sel:{} dst_unused:{unused}", SELECTORS[usize::from(s.dst_sel)]);
        }
        line += &format!(" src0_sel:{}", SELECTORS[usize::from(s.src_sel[0])]);
        if n > 1 {
            line += &format!(" src1_sel:{}", SELECTORS[usize::from(s.src_sel[1])]);
        }
    }
    Text { body: line, mask_register }
}

/// These have one encoding, or an encoding that the assembler chooses alone.
fn has_suffix(op: Op) -> bool {
    !matches!(op, Op::V_FMAMK_F32 | Op::V_FMAAK_F32 | Op::V_MADMK_F16 | Op::V_MADAK_F16)
}

pub fn dpp_text(ctrl: u16) -> String {
    match ctrl {
        0..=0xFF => {
            let q: Vec<String> = (0..4).map(|i| (ctrl >> (2 * i) & 3).to_string()).collect();
            format!("quad_perm:[{}]", q.join(","))
        }
        0x101..=0x10F => format!("row_shl:{}", ctrl & 15),
        0x111..=0x11F => format!("row_shr:{}", ctrl & 15),
        0x121..=0x12F => format!("row_ror:{}", ctrl & 15),
        0x130 => "wave_shl:1".to_owned(),
        0x134 => "wave_rol:1".to_owned(),
        0x138 => "wave_shr:1".to_owned(),
        0x13C => "wave_ror:1".to_owned(),
        0x140 => "row_mirror".to_owned(),
        0x141 => "row_half_mirror".to_owned(),
        0x142 => "row_bcast:15".to_owned(),
        0x143 => "row_bcast:31".to_owned(),
        _ => format!("row_newbcast:{}", ctrl & 15),
    }
}

/// The lane whose register `lane` reads.
pub fn dpp_lane(ctrl: u16, lane: usize) -> Option<usize> {
    let (row, column) = (lane / 16, lane % 16);
    let n = usize::from(ctrl & 15);
    // (row, column) of the source, where there is one.
    let place = |row: usize, column: i64| (0..16).contains(&column).then(|| 16 * row + column as usize);
    match ctrl {
        0..=0xFF => Some(lane / 4 * 4 + usize::from(ctrl >> (2 * (lane % 4)) & 3)),
        0x100..=0x10F => place(row, (column + n) as i64),
        0x110..=0x11F => place(row, column as i64 - n as i64),
        0x120..=0x12F => place(row, (16 + column - n) as i64 % 16),
        0x130 => (lane != 63).then_some(lane + 1),
        0x134 => Some((lane + 1) % 64),
        0x138 => (lane != 0).then(|| lane - 1),
        0x13C => Some((lane + 63) % 64),
        0x140 => place(row, 15 - column as i64),
        0x141 => Some(lane / 8 * 8 + 7 - lane % 8),
        0x142 => (row != 0).then(|| 16 * row - 1),
        0x143 => (row >= 2).then_some(31),
        _ => place(row, n as i64),
    }
}

/// A byte, word or all of a register, extended.
fn part(x: u32, sel: u8, sext: bool) -> u32 {
    let (bits, at) = match sel {
        0..=3 => (8, 8 * u32::from(sel)),
        4 | 5 => (16, 16 * (u32::from(sel) - 4)),
        _ => return x,
    };
    let field = i64::from(x >> at) % (1 << bits);
    (if sext && field >= 1 << (bits - 1) { field - (1 << bits) } else { field }) as u32
}

/// What a wave starts with.
#[derive(Clone)]
pub struct Wave {
    pub exec: u64,
    pub mode: Mode,
    pub mask: u64,
    pub scalar: u64,
    /// Words 0 and 1 are the first source, 2 and 3 the second, 4 to 7 the third.
    pub lanes: Vec<[u32; 8]>,
}

pub const OLD: [u32; 4] = [0x5555_AAAA, 0x1234_5678, 0x0BAD_CAFE, 0x8765_4321];

impl Wave {
    /// The sources of one lane, from the registers of another one for the first under DPP.
    fn sources(&self, model: &Model, form: &Form, lane: usize, first: Option<usize>) -> [u128; 3] {
        let mut out = [0u128; 3];
        for i in 0..model.sources() {
            let ty = model.src[i];
            let words = ty.words();
            let raw = match form.src[i] {
                Src::Vgpr => {
                    let at = FIRST[i] - 4;
                    let from = if i == 0 && form.dpp.is_some() { first } else { Some(lane) };
                    // A missing source reads zero.
                    from.map_or(0, |from| {
                        (0..words).map(|n| u128::from(self.lanes[from][at + n]) << (32 * n)).sum()
                    })
                }
                Src::Sgpr => u128::from(self.scalar) & if words == 1 { 0xFFFF_FFFF } else { !0 },
                Src::Constant(code) if ty == Mixed && form.op_sel_hi >> i & 1 != 0 => {
                    constant_value(code, F16)
                }
                Src::Constant(code) => constant_value(code, ty),
                Src::Literal(value) => match ty {
                    F64 => u128::from(value) << 32,
                    _ => value.into(),
                },
            };
            let raw = match form.sdwa {
                Some(s) if i < 2 => part(raw as u32, s.src_sel[i], s.sext[i]).into(),
                _ => raw,
            };
            out[i] = raw;
        }
        out
    }
}

/// Applies a model with modifiers to whole registers; the result and the mask bit.
fn evaluate(model: &Model, form: &Form, lane: &Lane) -> (u128, bool) {
    let packed = model.op.info().encoding == Encoding::Vop3p;
    if model.dst.packed() {
        // One half at a time.
        let element = model.dst.element();
        let bits = element.bits();
        let mut out = 0;
        for high in [false, true] {
            let (sel, neg) = if high { (form.op_sel_hi, form.abs) } else { (form.op_sel, form.neg) };
            // Only VOP3P has half selections; the others take halves in order.
            let sel = match (packed, high) {
                (true, _) => sel,
                (_, true) => 7,
                _ => 0,
            };
            let mut half = Lane { x: [0; 3], ..*lane };
            half.old = lane.old >> if high { bits } else { 0 } & element.mask();
            for i in 0..model.sources() {
                let x = lane.x[i] >> if sel >> i & 1 != 0 { bits } else { 0 } & element.mask();
                half.x[i] = x ^ if neg >> i & 1 != 0 { 1 << (bits - 1) } else { 0 };
            }
            let value = scalar(model, element, &[element; 3], form, &half).0;
            out |= (value & element.mask()) << if high { bits } else { 0 };
        }
        return (out, false);
    }
    let mut x = lane.x;
    for i in 0..model.sources() {
        let ty = model.src[i];
        let bit = 1u8 << i;
        if ty == Mixed {
            let half = form.op_sel_hi & bit != 0;
            if half {
                x[i] = x[i] >> if form.op_sel & bit != 0 { 16 } else { 0 } & 0xFFFF;
            }
            let sign = u128::from(if half { HALF.sign() } else { SINGLE.sign() });
            // Of these instructions the field of neg_hi is the absolute value.
            if form.abs & bit != 0 {
                x[i] &= !sign;
            }
            if form.neg & bit != 0 {
                x[i] ^= sign;
            }
            continue;
        }
        if packed {
            if matches!(ty, Bf16x2 | F16x2) {
                let half = |sel: bool, neg: bool| {
                    (x[i] >> if sel { 16 } else { 0 } & 0xFFFF) ^ if neg { 0x8000 } else { 0 }
                };
                let low = half(form.op_sel & bit != 0, form.neg & bit != 0);
                x[i] = low | half(form.op_sel_hi & bit != 0, form.abs & bit != 0) << 16;
            }
            continue;
        }
        if form.e64 && form.op_sel & bit != 0 && ty.bits() == 16 {
            x[i] >>= 16;
        }
        if let Some(f) = ty.format() {
            if form.abs & bit != 0 {
                x[i] &= !u128::from(f.sign());
            }
            if form.neg & bit != 0 {
                x[i] ^= u128::from(f.sign());
            }
        }
        x[i] &= ty.mask();
    }
    scalar(model, model.dst, &model.src, form, &Lane { x, ..*lane })
}

fn scalar(model: &Model, dst: Ty, src: &[Ty; 3], form: &Form, lane: &Lane) -> (u128, bool) {
    let x = || {
        let mut out = [0; 3];
        for i in 0..model.sources() {
            out[i] = src[i].integer(lane.x[i]);
        }
        out
    };
    let (low, high) = if dst == Void { (0, 0) } else { dst.range() };
    let fit = |value: i128| if form.clamp { value.clamp(low, high) } else { value };
    let (value, mask) = match model.body {
        Body::Int(f) => (fit(f(x())) as u128, false),
        Body::Bits(f) => (f(lane), false),
        Body::Compare(f) => (0, f(lane)),
        Body::Carry(f) => {
            let value = f(x(), lane.mask.into());
            (fit(value) as u128, value < low || value > high)
        }
        Body::Flag(f) => f(lane),
    };
    let value = match dst.format() {
        Some(f) => output(f, value as u64, form, lane.mode).into(),
        None => value,
    };
    (value & dst.mask(), mask)
}

/// OMOD and CLAMP of a float.
fn output(f: Format, x: u64, form: &Form, mode: Mode) -> u64 {
    let mut x = x & f.mask();
    if form.omod != 0 && !mode.ieee() && !mode.keeps_outputs(f) && !f.is_nan(x) && !f.is_infinite(x) {
        let scaled = f.exact(x).scaled([0, 1, 2, -1][usize::from(form.omod)]);
        x = f.flush(scaled.round(f, Round::Nearest));
    }
    if form.clamp {
        if f.is_nan(x) {
            return if mode.dx10_clamp() { 0 } else { x };
        }
        return if f.is_negative(x) { 0 } else { x.min(f.one()) };
    }
    x
}

/// One instruction in one form.
pub struct Case<'a> {
    pub model: &'a Model,
    pub form: Form,
}

/// What the four result words of each lane of a wave must be.
fn expected(case: &Case<'_>, wave: &Wave, gfx950: bool) -> Vec<[u32; 4]> {
    let Case { model, form } = case;
    let mut out = vec![OLD; 64];
    let mut mask = 0u64;
    let cmpx = model.name().starts_with("V_CMPX");
    for lane in 0..64 {
        if wave.exec >> lane & 1 == 0 {
            continue;
        }
        let mut first = None;
        if let Some(d) = form.dpp {
            first = dpp_lane(d.ctrl, lane).filter(|from| wave.exec >> from & 1 != 0);
            let gated = d.row_mask >> (lane / 16) & 1 == 0 || d.bank_mask >> (lane % 16 / 4) & 1 == 0;
            if gated || first.is_none() && !d.bound_ctrl {
                continue;
            }
        }
        let words = model.dst.words();
        let old: u128 = (0..words).map(|n| u128::from(OLD[n]) << (32 * n)).sum();
        let view = Lane {
            mode: wave.mode,
            x: wave.sources(model, form, lane, first),
            old,
            mask: wave.mask >> lane & 1 != 0,
            lane,
            gfx950,
            scalar: wave.scalar,
            halves: form.op_sel_hi,
        };
        let (mut value, bit) = evaluate(model, form, &view);
        if form.e64 && model.keeps_half() {
            value = if form.op_sel & 8 != 0 || model.op == Op::V_FMA_MIXHI_F16 {
                u128::from(OLD[0]) & 0xFFFF | (value & 0xFFFF) << 16
            } else {
                u128::from(OLD[0]) & 0xFFFF_0000 | value & 0xFFFF
            };
        }
        if let Some(s) = form.sdwa {
            value = sdwa_result(value as u32, OLD[0], s).into();
        }
        for n in 0..words {
            out[lane][n] = (value >> (32 * n)) as u32;
        }
        mask |= u64::from(bit) << lane;
    }
    if model.writes_mask() {
        for words in &mut out {
            (words[2], words[3]) = (mask as u32, (mask >> 32) as u32);
            if cmpx {
                (words[0], words[1]) = (mask as u32, (mask >> 32) as u32);
            }
        }
    }
    out
}

fn sdwa_result(value: u32, old: u32, s: Sdwa) -> u32 {
    let (first, size) = match s.dst_sel {
        0..=3 => (usize::from(s.dst_sel), 1),
        4 | 5 => (usize::from(s.dst_sel - 4) * 2, 2),
        _ => (0, 4),
    };
    // Byte by byte: below the part zero, above it zero or its sign, or all as it was.
    let (value, old) = (value.to_le_bytes(), old.to_le_bytes());
    let sign = if value[size - 1] & 0x80 != 0 { 0xFF } else { 0 };
    u32::from_le_bytes(std::array::from_fn(|i| {
        if (first..first + size).contains(&i) {
            value[i - first]
        } else {
            match s.dst_unused {
                1 if i >= first => sign,
                2 => old[i],
                _ => 0,
            }
        }
    }))
}

const RECORD: usize = 32 + 64 * 32;

/// Runs all cases on all waves; results by wave, case, lane.
fn run(cpu: &str, level: Option<Level>, cases: &[Case<'_>], waves: &[Wave]) -> Vec<[u32; 4]> {
    let results = waves.len() * RECORD;
    let mut body = format!(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_mul_i32 s6, s2, {RECORD}
  s_waitcnt lgkmcnt(0)
  s_add_u32 s8, s4, s6
  s_addc_u32 s9, s5, 0
  s_load_dwordx8 s[16:23], s[8:9], 0x0
  v_lshlrev_b32 v1, 5, v0
  global_load_dwordx4 v[4:7], v1, s[8:9] offset:32
  global_load_dwordx4 v[8:11], v1, s[8:9] offset:48
  v_lshlrev_b32 v2, 4, v0
  s_mul_i32 s6, s2, {}
  v_add_u32 v2, s6, v2
  v_add_u32 v2, {results:#x}, v2
  s_mov_b64 s[28:29], -1
  s_waitcnt vmcnt(0) lgkmcnt(0)
  s_setreg_b32 hwreg(HW_REG_MODE), s18\n",
        cases.len() * 1024
    );
    for case in cases {
        let text = text(case.model, &case.form);
        for (n, old) in OLD.iter().enumerate() {
            body += &format!("  v_mov_b32 v{}, {old:#x}\n", 12 + n);
        }
        body += &format!(
            "  s_mov_b64 vcc, s[20:21]\n  s_mov_b64 exec, s[16:17]\n  {}\n  s_mov_b64 s[26:27], exec\n  s_mov_b64 exec, -1\n",
            text.body
        );
        if case.model.writes_mask() {
            if case.model.name().starts_with("V_CMPX") {
                body += "  v_mov_b32 v12, s26\n  v_mov_b32 v13, s27\n";
            }
            body += &format!("  s_mov_b64 s[26:27], {}\n", text.mask_register);
            body += "  v_mov_b32 v14, s26\n  v_mov_b32 v15, s27\n";
        }
        body += "  global_store_dwordx4 v2, v[12:15], s[4:5]\n  v_add_u32 v2, 0x400, v2\n";
    }
    let image = assemble(&Assembly { cpu, body: &body, ..Assembly::default() });
    let rig = Rig::new(options(cpu).level(level), &image);
    let mut data: Vec<u32> = vec![];
    for wave in waves {
        let low_high = |x: u64| [x as u32, (x >> 32) as u32];
        data.extend(low_high(wave.exec));
        data.extend([wave.mode.0, 0]);
        data.extend(low_high(wave.mask));
        data.extend(low_high(wave.scalar));
        data.extend(wave.lanes.iter().flatten());
    }
    data.resize(results / 4 + waves.len() * cases.len() * 256, 0);
    let buffer = rig.upload("data", &data);
    rig.launch("test", waves.len() as u32, 64, &Args::new().push(buffer)).unwrap_or_else(|f| panic!("{f}"));
    let out: Vec<u32> = rig.download(buffer, data.len());
    out[results / 4..].chunks(4).map(|c| [c[0], c[1], c[2], c[3]]).collect()
}

/// Compares every case on every wave; `Err` tells the first differences. Also the number of distinct results of each
/// instruction.
pub fn compare(
    cpu: &str,
    level: Option<Level>,
    cases: &[Case<'_>],
    waves: &[Wave],
) -> Result<HashMap<Op, usize>, String> {
    let results = run(cpu, level, cases, waves);
    let gfx950 = cpu == "gfx950";
    let mut distinct: HashMap<Op, HashSet<[u32; 4]>> = HashMap::new();
    let mut failures = vec![];
    for (c, case) in cases.iter().enumerate() {
        let mut failed = 0;
        for (w, wave) in waves.iter().enumerate() {
            let want = expected(case, wave, gfx950);
            let got = &results[64 * (w * cases.len() + c)..][..64];
            let seen = distinct.entry(case.model.op).or_default();
            for lane in 0..64 {
                if seen.len() < 1000 {
                    seen.insert(got[lane]);
                }
                if !close(case, got[lane], want[lane]) {
                    failed += 1;
                    if failed > 3 || failures.len() > 60 {
                        continue;
                    }
                    let exec = if wave.exec >> lane & 1 != 0 { "" } else { " (inactive)" };
                    failures.push(format!(
                        "{cpu}: {}\n  lane {lane}{exec} of {:08x?}, scalar {:#x}, mask {}, MODE {:#x}:\n  got  {:08x?}\n  want {:08x?}",
                        text(case.model, &case.form).body,
                        wave.lanes[lane],
                        wave.scalar,
                        wave.mask >> lane & 1,
                        wave.mode.0,
                        got[lane],
                        want[lane]
                    ));
                }
            }
        }
        if failed > 3 {
            failures.push(format!("{cpu}: {}: {failed} differences", text(case.model, &case.form).body));
        }
    }
    if failures.is_empty() {
        Ok(distinct.into_iter().map(|(op, set)| (op, set.len())).collect())
    } else {
        Err(failures.join("\n"))
    }
}

/// Equal, or as near as the model allows.
fn close(case: &Case<'_>, got: [u32; 4], want: [u32; 4]) -> bool {
    if got == want {
        return true;
    }
    let Some(f) = case.model.dst.format().filter(|_| case.model.ulps > 0) else { return false };
    let join = |x: [u32; 4]| u64::from(x[0]) | u64::from(x[1]) << 32;
    let (g, w) = (join(got) & f.mask(), join(want) & f.mask());
    let rest = |x: [u32; 4]| if f.bits() == 64 { u64::from(x[2]) } else { join(x) & !f.mask() };
    rest(got) == rest(want)
        && !f.is_nan(g)
        && !f.is_nan(w)
        && (g & f.sign()) == (w & f.sign())
        && g.abs_diff(w) <= case.model.ulps
}

/// The forms in which an instruction is tried.
pub fn forms(model: &Model, random: &mut Random) -> Vec<Form> {
    let info = model.op.info();
    let native = matches!(info.encoding, Encoding::Vop3 | Encoding::Vop3p);
    let packed = info.encoding == Encoding::Vop3p;
    let mixed = model.is_mixed();
    let n = model.sources();
    let mut list = vec![Form { e64: native, ..PLAIN }];
    if model.text.is_some() {
        return list;
    }
    let float = model.dst.format().is_some();
    let mut pick = |k: usize| (random.next() as usize) % k;
    // VOP3.
    if has_suffix(model.op) && !only_native(model.op) {
        for _ in 0..if mixed { 40 } else { 5 } {
            let mut form = Form { e64: true, ..PLAIN };
            // A mask that is read takes the one scalar operand.
            let scalar = if model.carries_in() || model.name().starts_with("V_DIV_FMAS") {
                n
            } else {
                pick(2 * n.max(1))
            };
            for i in 0..n {
                if model.src[i].words() > 2 {
                    continue;
                }
                form.src[i] = match pick(6) {
                    _ if i == scalar => Src::Sgpr,
                    // Negative integers are no floats, which the cube map's models want.
                    0 | 1 if model.name().starts_with("V_CUBE") => Src::Vgpr,
                    0 => Src::Constant([128, 129, 133, 192, 193, 208][pick(6)]),
                    1 => Src::Constant(240 + pick(9) as u8),
                    _ => Src::Vgpr,
                };
                let bit = 1 << i;
                if model.src[i].format().is_some() && info.negatable() & bit != 0
                    || packed && matches!(model.src[i], Bf16x2 | F16x2 | Mixed)
                {
                    form.neg |= if pick(2) == 0 { bit } else { 0 };
                    form.abs |= if pick(2) == 0 && !matches!(model.body, Body::Flag(_)) { bit } else { 0 };
                }
                let halves = model.src[i].packed() || matches!(model.src[i], Bf16x2 | F16x2 | Mixed);
                // Dot products always take halves in order.
                let dot = model.name().starts_with("V_DOT");
                if packed && halves && !dot && info.op_sel_mask() & bit != 0 {
                    form.op_sel |= if pick(2) == 0 { bit } else { 0 };
                    form.op_sel_hi &= if pick(2) == 0 { !bit } else { !0 };
                }
                // What a constant gives as the high one of two f32 is not documented.
                if model.src[i] == PkF32 && matches!(form.src[i], Src::Constant(_)) {
                    form.op_sel &= !bit;
                    form.op_sel_hi &= !bit;
                }
                if !packed && info.op_sel_mask() & bit != 0 && model.src[i].bits() == 16 {
                    form.op_sel |= if pick(2) == 0 { bit } else { 0 };
                }
            }
            if !packed && model.keeps_half() {
                form.op_sel |= if pick(2) == 0 { 8 } else { 0 };
            }
            if float && model.ulps == 0 && takes_omod(model.op) && pick(2) == 0 {
                form.omod = if packed { 0 } else { pick(4) as u8 };
            }
            form.clamp = pick(2) == 0 && (float && takes_omod(model.op) || saturates(model.op));
            list.push(form);
        }
    }
    // A literal as the first source.
    if !native && n > 0 && !model.carries_in() && has_suffix(model.op) && !only_native(model.op) {
        let value = 0x8123_4567u32.rotate_left(pick(32) as u32);
        let value = if model.src[0].bits() == 16 { value & 0xFFFF } else { value };
        list.push(Form { src: [Src::Literal(value), Src::Vgpr, Src::Vgpr], ..PLAIN });
    }
    // Sub-dword and lane selections.
    let narrow = model.dst.words() <= 1 && model.src.iter().all(|t| t.words() <= 1);
    if narrow && !native && !no_modifier(model.op) {
        let no_sdwa =
            matches!(model.op, Op::V_FMAC_F32 | Op::V_MAC_F16 | Op::V_CVT_F32_FP8 | Op::V_CVT_F32_BF8)
                || model.name().starts_with("V_DOT");
        for _ in 0..if no_sdwa { 0 } else { 3 } {
            let mut sdwa = Sdwa {
                dst_sel: if info.encoding == Encoding::Vopc { 6 } else { pick(7) as u8 },
                dst_unused: pick(3) as u8,
                src_sel: [pick(7) as u8, pick(7) as u8],
                sext: [false; 2],
            };
            let mut form = PLAIN;
            for i in 0..n.min(2) {
                let float = model.src[i].format().is_some();
                if float && info.negatable() >> i & 1 != 0 {
                    form.neg |= (pick(2) << i) as u8;
                    form.abs |= (pick(2) << i) as u8;
                } else {
                    sdwa.sext[i] = !float && takes_sext(model.op) && pick(2) == 0;
                }
            }
            form.sdwa = Some(sdwa);
            list.push(form);
        }
        if info.encoding != Encoding::Vopc {
            for _ in 0..3 {
                let ctrl = match pick(5) {
                    0 => pick(256) as u16,
                    1 => 0x101 + 0x10 * pick(3) as u16 + pick(15) as u16,
                    2 => [0x130, 0x134, 0x138, 0x13C, 0x140, 0x141, 0x142, 0x143][pick(8)],
                    3 => 0x150 + pick(16) as u16,
                    _ => [0x111, 0x121, 0x10F, 0x142][pick(4)],
                };
                let mut form = PLAIN;
                for i in 0..n.min(2) {
                    if model.src[i].format().is_some() && info.negatable() >> i & 1 != 0 {
                        form.neg |= (pick(2) << i) as u8;
                        form.abs |= (pick(2) << i) as u8;
                    }
                }
                let masks = [(15, 15), (5, 15), (15, 6), (10, 3)][pick(4)];
                form.dpp =
                    Some(Dpp { ctrl, row_mask: masks.0, bank_mask: masks.1, bound_ctrl: pick(2) == 0 });
                list.push(form);
            }
        }
    }
    list
}

/// VOP1 and VOP2 instructions without a VOP3 form that the assembler takes, or whose modifiers it leaves open.
fn only_native(op: Op) -> bool {
    use Op::*;
    matches!(op, V_PK_FMAC_F16 | V_SWAP_B32 | V_ACCVGPR_READ_B32 | V_ACCVGPR_WRITE_B32 | V_READFIRSTLANE_B32)
}

fn no_modifier(op: Op) -> bool {
    use Op::*;
    matches!(op, V_FMAMK_F32 | V_FMAAK_F32 | V_MADMK_F16 | V_MADAK_F16 | V_PK_FMAC_F16)
}

/// Integer instructions whose CLAMP saturates.
fn saturates(op: Op) -> bool {
    use Op::*;
    matches!(
        op,
        V_ADD_U32
            | V_SUB_U32
            | V_SUBREV_U32
            | V_ADD_I32
            | V_SUB_I32
            | V_ADD_U16
            | V_SUB_U16
            | V_SUBREV_U16
            | V_ADD_I16
            | V_SUB_I16
            | V_PK_ADD_I16
            | V_PK_SUB_I16
            | V_PK_ADD_U16
            | V_PK_SUB_U16
            | V_MUL_U32_U24
            | V_MUL_I32_I24
            | V_MAD_U32_U24
            | V_MAD_I32_I24
            | V_MAD_U16
            | V_MAD_LEGACY_U16
            | V_MAD_I16
            | V_MAD_LEGACY_I16
            | V_MAD_U32_U16
            | V_MAD_I32_I16
            | V_PK_MAD_U16
            | V_PK_MAD_I16
            | V_PK_MUL_LO_U16
            | V_SAD_U8
            | V_MSAD_U8
            | V_SAD_HI_U8
            | V_SAD_U16
            | V_SAD_U32
            | V_DOT2_I32_I16
            | V_DOT2_U32_U16
            | V_DOT4_I32_I8
            | V_DOT4_U32_U8
            | V_DOT8_I32_I4
            | V_DOT8_U32_U4
    )
}

/// Float results that OMOD and CLAMP change.
fn takes_omod(op: Op) -> bool {
    use Op::*;
    let name = op.info().name;
    !matches!(op, V_CNDMASK_B32 | V_FMAMK_F32 | V_FMAAK_F32) && !name.contains("DIV_SCALE")
}

fn takes_sext(op: Op) -> bool {
    let name = op.info().name;
    !name.contains("_F16") && !name.contains("_F32")
}

/// A generator of operand words.
pub type Pick = fn(&mut Random, usize) -> u64;

/// Waves whose sources are pairs and triples of `special`, then random ones, with all MODEs of `modes` and several EXEC
/// masks.
pub fn waves(seed: u64, n: usize, special: &[u64], pick: Pick, modes: &[u32]) -> Vec<Wave> {
    let mut random = Random(seed);
    let mut sets: Vec<[u64; 4]> = vec![];
    for (i, a) in special.iter().enumerate() {
        for (j, b) in special.iter().enumerate() {
            let c = special[(i * 7 + j * 3 + 1) % special.len()];
            sets.push([*a, *b, c, random.next().into()]);
        }
    }
    while sets.len() < n * 64 {
        let i = sets.len();
        let one = |random: &mut Random, k: usize| {
            if random.next().is_multiple_of(4) {
                special[random.next() as usize % special.len()]
            } else {
                pick(random, i + k)
            }
        };
        sets.push([one(&mut random, 0), one(&mut random, 1), one(&mut random, 2), one(&mut random, 3)]);
    }
    // A walk through all sets that puts different ones side by side.
    let total = sets.len();
    let order = (0..n * 64).map(|i| (i * 769 + i / total) % total);
    let lanes: Vec<[u32; 8]> = order
        .map(|i| {
            let s = sets[i];
            let w = |x: u64| [x as u32, (x >> 32) as u32];
            let ([a, b], [c, d], [e, f], [g, h]) = (w(s[0]), w(s[1]), w(s[2]), w(s[3]));
            [a, b, c, d, e, f, g, h]
        })
        .collect();
    lanes
        .chunks(64)
        .enumerate()
        .map(|(i, lanes)| Wave {
            exec: match i % 8 {
                0..=3 => !0,
                4 => 0x0000_FFFF_FFFF_0000,
                5 => u64::from(random.next()) << 32 | u64::from(random.next()),
                6 => 1 << (random.next() % 64),
                _ => {
                    if i % 16 == 7 {
                        0
                    } else {
                        0xAAAA_AAAA_5555_5555
                    }
                }
            },
            mode: Mode(modes[i % modes.len()]),
            mask: u64::from(random.next()) << 32 | u64::from(random.next()),
            scalar: special[random.next() as usize % special.len()],
            lanes: lanes.to_vec(),
        })
        .collect()
}

/// Tries every model in all its forms on a target that has the instruction; fails with the differences.
pub fn check(cpu: &str, level: Option<Level>, models: &[Model], waves: &[Wave]) -> HashMap<Op, usize> {
    let mut random = Random(models.len() as u64);
    let cases: Vec<Case<'_>> = models
        .iter()
        .filter(|m| executed(cpu).contains(&m.op))
        .flat_map(|model| forms(model, &mut random).into_iter().map(move |form| Case { model, form }))
        .collect();
    compare(cpu, level, &cases, waves).unwrap_or_else(|report| panic!("{report}"))
}

/// The bits of the inline constant 0.5 as LLVM reads it in an operand of a type; none where it reads integers only.
fn assembler_half(ty: Ty) -> Option<&'static str> {
    match ty {
        F16 | PkF16 | F16x2 => Some("0x3800"),
        Bf16 | Bf16x2 => Some("0x3f00"),
        U32 | I32 | U24 | I24 | F32 | B32 | PkU16 | PkI16 => Some("0x3f000000"),
        U64 | I64 | F64 => Some("0x3fe0000000000000"),
        Void | U16 | I16 | B128 | PkF32 | Mixed => None,
    }
}

/// The types of the models' operands are those of the assembler, which has no part in the models: it writes the bits of
/// 0.5 as an inline constant where an operand has that type, and nowhere else since VOP3 has no literals on these targets.
fn types_are_the_assemblers(cpu: &str, models: &[Model]) {
    let mut pairs = vec![];
    for model in models.iter().filter(|m| m.text.is_none() && executed(cpu).contains(&m.op)) {
        for i in 0..model.sources() {
            let Some(bits) = assembler_half(model.src[i]) else { continue };
            let mut form = Form { e64: true, ..PLAIN };
            form.src[i] = Src::Constant(240);
            let constant = text(model, &form).body;
            let value = constant.replacen("0.5", bits, 1);
            pairs.push([constant, value]);
        }
    }
    let bytes =
        |lines: &[String]| assemble(&Assembly { cpu, body: &lines.join("\n"), ..Assembly::default() });
    let [constants, values] = [0, 1].map(|i| pairs.iter().map(|pair| pair[i].clone()).collect::<Vec<_>>());
    if bytes(&constants) != bytes(&values) {
        let wrong: Vec<_> = pairs
            .iter()
            .filter(|[a, b]| bytes(std::slice::from_ref(a)) != bytes(std::slice::from_ref(b)))
            .collect();
        panic!("other types in the assembler: {wrong:#?}");
    }
}

/// On both targets at the best level, and a part of the waves at the others; each instruction must give several results.
pub fn check_all(models: &[Model], waves: &[Wave], at_least: usize) {
    for cpu in ["gfx942", "gfx950"] {
        types_are_the_assemblers(cpu, models);
    }
    for cpu in ["gfx942", "gfx950"] {
        for (op, n) in check(cpu, None, models, waves) {
            assert!(n >= at_least, "{}: only {n} different results", op.mnemonic());
        }
    }
    for level in [Level::Portable, Level::Avx2, Level::Avx512] {
        if level.available() && level != Level::detect() {
            check("gfx950", Some(level), models, &waves[..waves.len().min(32)]);
        }
    }
}

/// The comparison notices models that are wrong in a few cases.
#[test]
fn wrong_models_are_noticed() {
    use crate::semantics::exact::{Exact, USUAL};
    use crate::semantics::float::waves_of;
    let (singles, words) = (waves_of(SINGLE, 64), crate::semantics::integer::waves32(32));
    let f32s = |op, n: usize, f| model(op, F32, &[F32; 3][..n], Body::Bits(f));
    let wrong = [
        // A carry lost.
        (model(Op::V_ADDC_CO_U32, U32, &[U32; 2], Body::Carry(|[a, b, _], _| a + b)), &words),
        // A shift count of 32.
        (
            model(
                Op::V_LSHLREV_B32,
                U32,
                &[U32; 2],
                Body::Int(|[a, b, _]| if a % 64 > 31 { 0 } else { b << (a % 32) }),
            ),
            &words,
        ),
        // Equal numbers.
        (model(Op::V_CMP_LT_I32, Void, &[I32; 2], Body::Compare(|l| l.u(0) as i32 <= l.u(1) as i32)), &words),
        // Zeros of unequal signs.
        (
            f32s(Op::V_MAX_F32, 2, |l| {
                let x = crate::semantics::float::greatest(l, SINGLE, 2);
                if SINGLE.is_zero(x as u64) { 0 } else { x }
            }),
            &singles,
        ),
        // Two roundings.
        (
            f32s(Op::V_FMA_F32, 3, |l| {
                l.float(SINGLE, |[a, b, c], r| SINGLE.value(a.times(b).round(SINGLE, r)).plus(c, r))
            }),
            &singles,
        ),
        // MODE ignored.
        (
            f32s(Op::V_ADD_F32, 2, |l| Lane { mode: USUAL, ..*l }.float(SINGLE, |[a, b], r| a.plus(b, r))),
            &singles,
        ),
        // A quotient that is one unit off, where nothing may be.
        (
            f32s(Op::V_RCP_F32, 1, |l| {
                let scaled = |x: &Value| match x {
                    Value::Finite(x) if !x.is_zero() => {
                        Value::Finite(Exact::new(false, (1 << 30) + 1, -30).over(x))
                    }
                    _ => Value::Infinity(x.negative()),
                };
                USUAL.arithmetic(SINGLE, &[l.w(0)], |x, _| scaled(&x[0])).into()
            }),
            &singles,
        ),
    ];
    for (model, waves) in &wrong {
        let case = Case { model, form: Form { e64: true, ..PLAIN } };
        assert!(compare("gfx942", None, &[case], waves).is_err(), "{}", model.name());
    }
}
