//! Vector floating-point arithmetic: exact rationals, rounded once as MODE says.

use std::cmp::Ordering;

use hk_emu::isa::Op;

use crate::common::Random;
use crate::semantics::exact::{DOUBLE, Exact, Format, HALF, Mode, Round, SINGLE, Value, two_over_pi_segment};
use crate::semantics::vector::{Body, Lane, Model, Ty, Wave, bits, check_all, custom, model, waves};

fn fma(a: &Value, b: &Value, c: &Value, r: Round) -> Value {
    a.times(b).plus(c, r)
}

/// Product and sum rounded apart, in half precision.
fn mad(a: &Value, b: &Value, c: &Value, r: Round) -> Value {
    let product = a.times(b);
    match (HALF.value(product.round(HALF, r)), &product, c) {
        // A product that overflows stays beyond the range whatever is added.
        (Value::Infinity(negative), Value::Finite(_), Value::Finite(_)) => {
            Value::Finite(Exact::new(negative, 1, 100))
        }
        (rounded, ..) => rounded.plus(c, r),
    }
}

/// A key that orders all numbers, the negative zero below the positive one.
pub fn key(f: Format, x: u64) -> i128 {
    let magnitude = i128::from(x & (f.sign() - 1));
    if f.is_negative(x) { -magnitude - 1 } else { magnitude }
}

/// Minimum or maximum: a signalling NaN wins with IEEE, else the operand that is a number.
fn extreme(m: Mode, f: Format, x: u64, y: u64, wanted: Ordering) -> u64 {
    let (x, y) = (m.input(f, x), m.input(f, y));
    if let Some(loud) = [x, y].into_iter().find(|x| m.ieee() && f.is_signalling(*x)) {
        return loud | f.quiet();
    }
    match (f.is_nan(x), f.is_nan(y)) {
        (true, _) => m.output(f, y),
        (_, true) => m.output(f, x),
        _ => m.output(f, if key(f, x).cmp(&key(f, y)) == wanted { x } else { y }),
    }
}

fn least(l: &Lane, f: Format, n: usize) -> u128 {
    (1..n).fold(l.w(0), |x, i| extreme(l.mode, f, x, l.w(i), Ordering::Less)).into()
}

pub fn greatest(l: &Lane, f: Format, n: usize) -> u128 {
    (1..n).fold(l.w(0), |x, i| extreme(l.mode, f, x, l.w(i), Ordering::Greater)).into()
}

fn median(l: &Lane, f: Format) -> u128 {
    let mut x: Vec<u64> = (0..3).map(|i| l.mode.input(f, l.w(i))).collect();
    if x.iter().any(|x| f.is_nan(*x)) {
        return least(l, f, 3);
    }
    x.sort_by_key(|x| key(f, *x));
    l.mode.output(f, x[1]).into()
}

/// Minimum or maximum of three in which a NaN wins.
fn propagating(l: &Lane, f: Format, wanted: Ordering) -> u128 {
    let x: Vec<u64> = (0..3).map(|i| l.mode.input(f, l.w(i))).collect();
    if x.iter().any(|x| f.is_nan(*x)) {
        return l.mode.nan(f, &x).into();
    }
    let best = x.iter().copied().reduce(|x, y| if key(f, x).cmp(&key(f, y)) == wanted { x } else { y });
    l.mode.output(f, best.expect("three")).into()
}

/// A float as an integer in some direction; a zero keeps the sign.
fn integral(l: &Lane, f: Format, r: Round) -> u128 {
    let x = l.mode.input(f, l.w(0));
    if f.is_nan(x) {
        return l.mode.nan(f, &[x]).into();
    }
    if f.is_infinite(x) {
        return x.into();
    }
    f.exact(x).rounded(r).round(f, Round::Nearest).into()
}

fn fract(l: &Lane, f: Format) -> u128 {
    let below_one = f.one() - 1;
    let bits = l.mode.arithmetic(f, &[l.w(0)], |x, _| match &x[0] {
        Value::Finite(x) => Value::Finite(x.plus(&x.rounded(Round::Down).negated(), Round::Nearest)),
        // Infinity less itself.
        _ => Value::Nan,
    });
    (if f.is_nan(bits) { bits } else { bits.min(below_one) }).into()
}

fn ldexp(l: &Lane, f: Format, n: i128) -> u128 {
    l.mode
        .arithmetic(f, &[l.w(0)], |x, _| match &x[0] {
            Value::Finite(x) => Value::Finite(x.scaled(n.clamp(-5000, 5000) as i32)),
            other => other.clone(),
        })
        .into()
}

/// Significand in a half to one, and exponent; 0 of what has none.
fn frexp(l: &Lane, f: Format) -> (u64, i32) {
    let x = l.mode.input(f, l.w(0));
    if f.is_nan(x) {
        return (x | f.quiet(), 0);
    }
    if f.is_infinite(x) || f.is_zero(x) {
        return (x, 0);
    }
    let exact = f.exact(x);
    let top = exact.top();
    (exact.scaled(-top).round(f, Round::Nearest), top)
}

fn reciprocal(x: &Value) -> Value {
    match x {
        Value::Nan => Value::Nan,
        Value::Infinity(negative) => Value::Finite(Exact::new(*negative, 0, 0)),
        Value::Finite(x) if x.is_zero() => Value::Infinity(x.negative),
        Value::Finite(x) => Value::Finite(Exact::integer(1).over(x)),
    }
}

pub fn root(x: &Value) -> Value {
    match x {
        Value::Finite(zero) if zero.is_zero() => x.clone(),
        Value::Infinity(false) => x.clone(),
        Value::Finite(x) if !x.negative => Value::Finite(x.root()),
        _ => Value::Nan,
    }
}

/// Special functions of f32: subnormal operands and results are zero, and rounding is to nearest, whatever MODE says.
fn special32(l: &Lane, f: fn(&Value) -> Value) -> u128 {
    Mode(0x300).arithmetic(SINGLE, &[l.w(0)], |x, _| f(&x[0])).into()
}

/// Special functions of the others: rounding is to nearest.
fn special(l: &Lane, format: Format, f: fn(&Value) -> Value) -> u128 {
    Mode(l.mode.0 & !0xF).arithmetic(format, &[l.w(0)], |x, _| f(&x[0])).into()
}

/// The host's functions in f64 are good enough for results that may be one unit off.
fn host(x: &Value, f: fn(f64) -> f64) -> Value {
    DOUBLE.value(f(f64::from_bits(x.round(DOUBLE, Round::Nearest))).to_bits())
}

/// sin of turns; `quarter` more make it the cosine.
fn turns(x: &Value, quarter: i128, outside: i128) -> Value {
    let Value::Finite(x) = x else { return Value::Nan };
    let limit = Exact::integer(256);
    let mut magnitude = x.clone();
    magnitude.negative = false;
    if magnitude.compare(&limit).is_gt() {
        return Value::Finite(Exact::integer(outside));
    }
    // Quarters of a turn, and what is left of one.
    let quarters = magnitude.scaled(2).plus(&Exact::integer(quarter), Round::Nearest);
    let whole = quarters.rounded(Round::Down);
    let rest = quarters.plus(&whole.negated(), Round::Nearest);
    let n = whole.saturated(0, 1 << 20) % 4;
    let angle = f64::from_bits(rest.round(DOUBLE, Round::Nearest)) * std::f64::consts::FRAC_PI_2;
    let value = if rest.is_zero() {
        [0.0, 1.0, 0.0, -1.0][n as usize]
    } else {
        [angle.sin(), angle.cos(), -angle.sin(), -angle.cos()][n as usize]
    };
    // The sine is odd; its zeros have the sign of the operand.
    let flip = quarter == 0 && x.negative;
    DOUBLE.value(if flip { -value } else { value }.to_bits())
}

fn exp2(x: &Value) -> Value {
    match (x, host(x, f64::exp2)) {
        // Finite, though beyond f64 too.
        (Value::Finite(_), Value::Infinity(_)) => Value::Finite(Exact::new(false, 1, 2000)),
        (_, value) => value,
    }
}

fn log2(x: &Value) -> Value {
    match x {
        Value::Finite(x) if x.is_zero() => Value::Infinity(true),
        x if x.negative() => Value::Nan,
        x => host(x, f64::log2),
    }
}

fn sine(x: &Value) -> Value {
    turns(x, 0, 0)
}

fn cosine(x: &Value) -> Value {
    turns(x, 1, 1)
}

fn square_root_reciprocal(x: &Value) -> Value {
    match root(x) {
        // The operand to 1 / sqrt(x): the root has more bits than the format, and the result may be one unit off.
        Value::Finite(r) if !r.is_zero() => {
            let r = r.round(DOUBLE, Round::Nearest);
            Value::Finite(Exact::integer(1).over(&DOUBLE.exact(r)))
        }
        other => reciprocal(&other),
    }
}

/// Products of halves and a sum in f32, each step rounded to nearest.
fn dot2(l: &Lane, f: Format, c: u64) -> u128 {
    let half = |i: usize, high: bool| {
        let bits = l.w(i) >> if high { 16 } else { 0 } & 0xFFFF;
        f.value(bits)
    };
    let step = |c: u64, high: bool| {
        fma(&half(0, high), &half(1, high), &SINGLE.value(c), Round::Nearest).round(SINGLE, Round::Nearest)
    };
    let sum = step(step(c, false), true);
    (if SINGLE.is_nan(sum) { l.mode.nan(SINGLE, &[c]) } else { sum }).into()
}

/// One bit of the class mask.
pub fn class(f: Format, x: u64) -> u32 {
    let n = f.is_negative(x);
    let pick = |negative: u32, positive: u32| 1 << if n { negative } else { positive };
    if f.is_nan(x) {
        return if f.is_signalling(x) { 1 } else { 2 };
    }
    match f.value(x) {
        Value::Infinity(_) => pick(2, 9),
        _ if f.is_zero(x) => pick(5, 6),
        _ if f.is_subnormal(x) => pick(4, 7),
        _ => pick(3, 8),
    }
}

/// Mixed precision: each source is an f32 or a half.
fn mix(l: &Lane, f: Format) -> u128 {
    let x: [(u64, Format); 3] = std::array::from_fn(|i| {
        let from = if l.halves >> i & 1 != 0 { HALF } else { SINGLE };
        (l.mode.input(from, l.w(i)), from)
    });
    if let Some((x, from)) = x.iter().find(|(x, f)| f.is_nan(*x)) {
        return convert_nan(*x, *from, f).into();
    }
    let [a, b, c] = x.map(|(x, f)| f.value(x));
    l.mode.finish(f, &fma(&a, &b, &c, l.mode.round(f))).into()
}

/// A NaN of another format: sign and the leading bits of the payload, quiet.
pub fn convert_nan(x: u64, from: Format, to: Format) -> u64 {
    let sign = if from.is_negative(x) { to.sign() } else { 0 };
    let fraction = x & ((1 << from.fraction) - 1);
    let moved = if to.fraction > from.fraction {
        fraction << (to.fraction - from.fraction)
    } else {
        fraction >> (from.fraction - to.fraction)
    };
    sign | to.default_nan() | moved
}

/// The face of a cube that a vector hits, its coordinates, and twice the major axis.
fn cube(l: &Lane) -> [u64; 4] {
    let [x, y, z] = [0, 1, 2].map(|i| f32::from_bits(l.u(i)));
    // z wins ties, then y.
    let order = [(z, 4.0), (y, 2.0), (x, 0.0)];
    let largest = order.iter().map(|(v, _)| v.abs()).fold(0.0, f32::max);
    let (major, face) = *order.iter().find(|(v, _)| v.abs() == largest).expect("no NaN comes in");
    let negative = major < 0.0;
    let (s, t) = match (face as i32, negative) {
        (4, false) => (x, -y),
        (4, true) => (-x, -y),
        (2, false) => (x, z),
        (2, true) => (x, -z),
        (_, false) => (-z, -y),
        (_, true) => (z, -y),
    };
    let face = if negative { face + 1.0 } else { face };
    [face, s, t, 2.0 * major].map(|v: f32| v.to_bits().into())
}

pub fn singles() -> Vec<Model> {
    let mut all = bits! {
        V_ADD_F32 F32(F32, F32) |l| l.float(SINGLE, |[a, b], r| a.plus(b, r));
        V_SUB_F32 F32(F32, F32) |l| l.float(SINGLE, |[a, b], r| a.plus(&b.negated(), r));
        V_SUBREV_F32 F32(F32, F32) |l| l.float(SINGLE, |[a, b], r| b.plus(&a.negated(), r));
        V_MUL_F32 F32(F32, F32) |l| l.float(SINGLE, |[a, b], _| a.times(b));
        V_FMA_F32 F32(F32, F32, F32) |l| l.float(SINGLE, |[a, b, c], r| fma(a, b, c, r));
        V_FMAC_F32 F32(F32, F32) |l| {
            Lane { x: [l.x[0], l.x[1], l.old], ..*l }.float(SINGLE, |[a, b, c], r| fma(a, b, c, r))
        };
        V_MUL_LEGACY_F32 F32(F32, F32) |l| {
            if (0..2).any(|i| SINGLE.is_zero(l.mode.input(SINGLE, l.w(i)))) { 0 } else {
                l.float(SINGLE, |[a, b], _| a.times(b))
            }
        };
        V_PK_ADD_F32 PkF32(PkF32, PkF32) |l| l.float(SINGLE, |[a, b], r| a.plus(b, r));
        V_PK_MUL_F32 PkF32(PkF32, PkF32) |l| l.float(SINGLE, |[a, b], _| a.times(b));
        V_PK_FMA_F32 PkF32(PkF32, PkF32, PkF32) |l| l.float(SINGLE, |[a, b, c], r| fma(a, b, c, r));
        V_MIN_F32 F32(F32, F32) |l| least(l, SINGLE, 2);
        V_MAX_F32 F32(F32, F32) |l| greatest(l, SINGLE, 2);
        V_MIN3_F32 F32(F32, F32, F32) |l| least(l, SINGLE, 3);
        V_MAX3_F32 F32(F32, F32, F32) |l| greatest(l, SINGLE, 3);
        V_MED3_F32 F32(F32, F32, F32) |l| median(l, SINGLE);
        V_MINIMUM3_F32 F32(F32, F32, F32) |l| propagating(l, SINGLE, Ordering::Less);
        V_MAXIMUM3_F32 F32(F32, F32, F32) |l| propagating(l, SINGLE, Ordering::Greater);
        V_FRACT_F32 F32(F32) |l| fract(l, SINGLE);
        V_TRUNC_F32 F32(F32) |l| integral(l, SINGLE, Round::Zero);
        V_CEIL_F32 F32(F32) |l| integral(l, SINGLE, Round::Up);
        V_RNDNE_F32 F32(F32) |l| integral(l, SINGLE, Round::Nearest);
        V_FLOOR_F32 F32(F32) |l| integral(l, SINGLE, Round::Down);
        V_LDEXP_F32 F32(F32, I32) |l| ldexp(l, SINGLE, l.u(1) as i32 as i128);
        V_FREXP_MANT_F32 F32(F32) |l| frexp(l, SINGLE).0.into();
        V_FREXP_EXP_I32_F32 I32(F32) |l| frexp(l, SINGLE).1 as u128;
        V_RCP_F32 F32(F32) |l| special32(l, reciprocal);
        V_RCP_IFLAG_F32 F32(F32) |l| special32(l, reciprocal);
        V_SQRT_F32 F32(F32) |l| special32(l, root);
        V_DOT2_F32_F16 F32(F16x2, F16x2, B32) |l| dot2(l, HALF, l.w(2));
        V_DOT2C_F32_F16 F32(F16x2, F16x2) |l| dot2(l, HALF, l.old as u64);
        V_DOT2_F32_BF16 F32(Bf16x2, Bf16x2, B32) |l| dot2(l, crate::semantics::exact::BFLOAT, l.w(2));
        V_DOT2C_F32_BF16 F32(Bf16x2, Bf16x2) |l| dot2(l, crate::semantics::exact::BFLOAT, l.old as u64);
    };
    let near = |op, f: fn(&Lane) -> u128| Model { ulps: 1, ..model(op, Ty::F32, &[Ty::F32], Body::Bits(f)) };
    all.extend([
        near(Op::V_RSQ_F32, |l| special32(l, square_root_reciprocal)),
        near(Op::V_EXP_F32, |l| special32(l, exp2)),
        near(Op::V_LOG_F32, |l| special32(l, log2)),
        near(Op::V_EXP_LEGACY_F32, |l| special32(l, exp2)),
        near(Op::V_LOG_LEGACY_F32, |l| special32(l, log2)),
        near(Op::V_SIN_F32, |l| special32(l, sine)),
        near(Op::V_COS_F32, |l| special32(l, cosine)),
    ]);
    const K: u64 = 0x4049_0FDB;
    let two = [Ty::F32; 2];
    all.extend([
        custom(Op::V_FMAMK_F32, Ty::F32, &two, "v_fmamk_f32 v12, v4, 0x40490fdb, v6", |l| {
            Lane { x: [l.x[0], K.into(), l.x[1]], ..*l }.float(SINGLE, |[a, b, c], r| fma(a, b, c, r))
        }),
        custom(Op::V_FMAAK_F32, Ty::F32, &two, "v_fmaak_f32 v12, v4, v6, 0x40490fdb", |l| {
            Lane { x: [l.x[0], l.x[1], K.into()], ..*l }.float(SINGLE, |[a, b, c], r| fma(a, b, c, r))
        }),
    ]);
    all.extend(mixed());
    all
}

fn mixed() -> Vec<Model> {
    bits! {
        V_FMA_MIX_F32 F32(Mixed, Mixed, Mixed) |l| mix(l, SINGLE);
        V_FMA_MIXLO_F16 F16(Mixed, Mixed, Mixed) |l| mix(l, HALF);
        V_FMA_MIXHI_F16 F16(Mixed, Mixed, Mixed) |l| mix(l, HALF);
    }
}

pub fn halves() -> Vec<Model> {
    let mut all = bits! {
        V_ADD_F16 F16(F16, F16) |l| l.float(HALF, |[a, b], r| a.plus(b, r));
        V_SUB_F16 F16(F16, F16) |l| l.float(HALF, |[a, b], r| a.plus(&b.negated(), r));
        V_SUBREV_F16 F16(F16, F16) |l| l.float(HALF, |[a, b], r| b.plus(&a.negated(), r));
        V_MUL_F16 F16(F16, F16) |l| l.float(HALF, |[a, b], _| a.times(b));
        V_MAC_F16 F16(F16, F16) |l| {
            Lane { x: [l.x[0], l.x[1], l.old & 0xFFFF], ..*l }.float(HALF, |[a, b, c], r| mad(a, b, c, r))
        };
        V_FMA_F16 F16(F16, F16, F16) |l| l.float(HALF, |[a, b, c], r| fma(a, b, c, r));
        V_FMA_LEGACY_F16 F16(F16, F16, F16) |l| l.float(HALF, |[a, b, c], r| fma(a, b, c, r));
        V_MAD_F16 F16(F16, F16, F16) |l| l.float(HALF, |[a, b, c], r| mad(a, b, c, r));
        V_MAD_LEGACY_F16 F16(F16, F16, F16) |l| l.float(HALF, |[a, b, c], r| mad(a, b, c, r));
        V_MIN_F16 F16(F16, F16) |l| least(l, HALF, 2);
        V_MAX_F16 F16(F16, F16) |l| greatest(l, HALF, 2);
        V_MIN3_F16 F16(F16, F16, F16) |l| least(l, HALF, 3);
        V_MAX3_F16 F16(F16, F16, F16) |l| greatest(l, HALF, 3);
        V_MED3_F16 F16(F16, F16, F16) |l| median(l, HALF);
        V_FRACT_F16 F16(F16) |l| fract(l, HALF);
        V_TRUNC_F16 F16(F16) |l| integral(l, HALF, Round::Zero);
        V_CEIL_F16 F16(F16) |l| integral(l, HALF, Round::Up);
        V_RNDNE_F16 F16(F16) |l| integral(l, HALF, Round::Nearest);
        V_FLOOR_F16 F16(F16) |l| integral(l, HALF, Round::Down);
        V_LDEXP_F16 F16(F16, I16) |l| ldexp(l, HALF, l.u(1) as u16 as i16 as i128);
        V_FREXP_MANT_F16 F16(F16) |l| frexp(l, HALF).0.into();
        V_FREXP_EXP_I16_F16 I16(F16) |l| frexp(l, HALF).1 as u128;
        V_RCP_F16 F16(F16) |l| special(l, HALF, reciprocal);
        V_SQRT_F16 F16(F16) |l| special(l, HALF, root);
        V_PK_ADD_F16 PkF16(PkF16, PkF16) |l| l.float(HALF, |[a, b], r| a.plus(b, r));
        V_PK_MUL_F16 PkF16(PkF16, PkF16) |l| l.float(HALF, |[a, b], _| a.times(b));
        V_PK_FMA_F16 PkF16(PkF16, PkF16, PkF16) |l| l.float(HALF, |[a, b, c], r| fma(a, b, c, r));
        V_PK_FMAC_F16 PkF16(PkF16, PkF16) |l| {
            Lane { x: [l.x[0], l.x[1], l.old], ..*l }.float(HALF, |[a, b, c], r| fma(a, b, c, r))
        };
        V_PK_MIN_F16 PkF16(PkF16, PkF16) |l| least(l, HALF, 2);
        V_PK_MAX_F16 PkF16(PkF16, PkF16) |l| greatest(l, HALF, 2);
        V_PK_MINIMUM3_F16 PkF16(PkF16, PkF16, PkF16) |l| propagating(l, HALF, Ordering::Less);
        V_PK_MAXIMUM3_F16 PkF16(PkF16, PkF16, PkF16) |l| propagating(l, HALF, Ordering::Greater);
        V_PACK_B32_F16 U32(F16, F16) |l| l.x[0] | l.x[1] << 16;
    };
    let near = |op, f: fn(&Lane) -> u128| Model { ulps: 1, ..model(op, Ty::F16, &[Ty::F16], Body::Bits(f)) };
    all.extend([
        near(Op::V_RSQ_F16, |l| special(l, HALF, square_root_reciprocal)),
        near(Op::V_EXP_F16, |l| special(l, HALF, exp2)),
        near(Op::V_LOG_F16, |l| special(l, HALF, log2)),
        near(Op::V_SIN_F16, |l| special(l, HALF, sine)),
        near(Op::V_COS_F16, |l| special(l, HALF, cosine)),
    ]);
    const K: u128 = 0x4248;
    let two = [Ty::F16; 2];
    all.extend([
        custom(Op::V_MADMK_F16, Ty::F16, &two, "v_madmk_f16 v12, v4, 0x4248, v6", |l| {
            Lane { x: [l.x[0], K, l.x[1]], ..*l }.float(HALF, |[a, b, c], r| mad(a, b, c, r))
        }),
        custom(Op::V_MADAK_F16, Ty::F16, &two, "v_madak_f16 v12, v4, v6, 0x4248", |l| {
            Lane { x: [l.x[0], l.x[1], K], ..*l }.float(HALF, |[a, b, c], r| mad(a, b, c, r))
        }),
    ]);
    all
}

pub fn doubles() -> Vec<Model> {
    let mut all = bits! {
        V_ADD_F64 F64(F64, F64) |l| l.float(DOUBLE, |[a, b], r| a.plus(b, r));
        V_MUL_F64 F64(F64, F64) |l| l.float(DOUBLE, |[a, b], _| a.times(b));
        V_FMA_F64 F64(F64, F64, F64) |l| l.float(DOUBLE, |[a, b, c], r| fma(a, b, c, r));
        V_FMAC_F64 F64(F64, F64) |l| {
            Lane { x: [l.x[0], l.x[1], l.old], ..*l }.float(DOUBLE, |[a, b, c], r| fma(a, b, c, r))
        };
        V_MIN_F64 F64(F64, F64) |l| least(l, DOUBLE, 2);
        V_MAX_F64 F64(F64, F64) |l| greatest(l, DOUBLE, 2);
        V_FRACT_F64 F64(F64) |l| fract(l, DOUBLE);
        V_TRUNC_F64 F64(F64) |l| integral(l, DOUBLE, Round::Zero);
        V_CEIL_F64 F64(F64) |l| integral(l, DOUBLE, Round::Up);
        V_RNDNE_F64 F64(F64) |l| integral(l, DOUBLE, Round::Nearest);
        V_FLOOR_F64 F64(F64) |l| integral(l, DOUBLE, Round::Down);
        V_LDEXP_F64 F64(F64, I32) |l| ldexp(l, DOUBLE, l.u(1) as i32 as i128);
        V_FREXP_MANT_F64 F64(F64) |l| frexp(l, DOUBLE).0.into();
        V_FREXP_EXP_I32_F64 I32(F64) |l| frexp(l, DOUBLE).1 as u128;
        V_TRIG_PREOP_F64 F64(F64, U32) |l| {
            let exponent = DOUBLE.field(l.w(0));
            let skip = 53 * (l.u(1) % 32) + (exponent - 1077).max(0) as u32;
            let scale = if exponent >= 1968 { 128 } else { 0 };
            let segment = Exact::new(false, two_over_pi_segment(skip).into(), -53 - skip as i32 + scale);
            segment.round(DOUBLE, Round::Zero).into()
        };
        V_RCP_F64 F64(F64) |l| special(l, DOUBLE, reciprocal);
        V_SQRT_F64 F64(F64) |l| special(l, DOUBLE, root);
    };
    all.push(Model {
        ulps: 1,
        ..model(
            Op::V_RSQ_F64,
            Ty::F64,
            &[Ty::F64],
            Body::Bits(|l| special(l, DOUBLE, square_root_reciprocal)),
        )
    });
    all
}

/// The cube map's, for numbers.
pub fn cubes() -> Vec<Model> {
    bits! {
        V_CUBEID_F32 F32(F32, F32, F32) |l| cube(l)[0].into();
        V_CUBESC_F32 F32(F32, F32, F32) |l| cube(l)[1].into();
        V_CUBETC_F32 F32(F32, F32, F32) |l| cube(l)[2].into();
        V_CUBEMA_F32 F32(F32, F32, F32) |l| cube(l)[3].into();
    }
}

/// Numbers whose neighbours round, overflow or underflow differently.
pub fn special_values(f: Format) -> Vec<u64> {
    let one = f.one();
    let unit = 1 << f.fraction;
    let mut all = vec![
        0,
        1,
        2,
        unit - 1,
        unit,
        unit + 1,
        one,
        one + 1,
        one - 1,
        one - unit,
        one + unit / 2,
        one + unit,
        one + 5 * unit / 4,
        one + (u64::from(f.fraction)) * unit,
        one + (u64::from(f.fraction) + 1) * unit + 1,
        one - (u64::from(f.fraction) + 1) * unit,
        f.infinity() - 1,
        f.infinity() - unit,
        f.infinity(),
        f.infinity() | f.quiet(),
        f.infinity() | f.quiet() | 5,
        f.infinity() | 1,
    ];
    let negative: Vec<u64> = all.iter().map(|x| x | f.sign()).collect();
    all.extend(negative);
    all
}

/// Small integers for exponents, numbers of all sizes, and near ones that cancel.
fn pick(f: Format, random: &mut Random, i: usize) -> u64 {
    let x = (u64::from(random.next()) << 32 | u64::from(random.next())) & f.mask();
    match i % 4 {
        // Around one.
        0 => x & !f.infinity() | (f.one() + (x >> 3 & 15) * (1 << f.fraction)) & f.infinity(),
        // Subnormal or nearly.
        1 => x & !(f.infinity() ^ 1 << f.fraction),
        2 => x & !((1 << (f.fraction / 2)) - 1),
        _ => x,
    }
}

/// MODE: all roundings, all denormal modes, IEEE, DX10_CLAMP, FP16_OVFL; the usual one more often.
pub fn modes() -> Vec<u32> {
    let mut all = vec![];
    for i in 0..32u32 {
        let round = i & 3 | (i + i / 4 & 3) << 2;
        let denormals = (i / 4 & 3) << 4 | (i / 2 & 3) << 6;
        all.push(round | denormals | (i / 3 & 1) << 8 | (i / 5 & 1) << 9 | (i / 7 & 1) << 23);
        all.push([0x3F0, 0x0C0, 0x2F0, 0x1F0][i as usize % 4]);
    }
    all
}

/// Each word of a half operand holds two different halves.
fn pick_halves(random: &mut Random, i: usize) -> u64 {
    pick(HALF, random, i) | pick(HALF, random, i + 1) << 16
}

pub fn waves_of(f: Format, n: usize) -> Vec<Wave> {
    let mut special = special_values(f);
    if f == HALF {
        let high: Vec<u64> = special.iter().rev().copied().collect();
        special.iter_mut().zip(high).for_each(|(x, h)| *x |= h << 16);
    } else {
        special.extend([5, 100, 0xFFFF_FFFF, 0x7FFF_FFFF]);
    }
    let pick: crate::semantics::vector::Pick = match f {
        HALF => pick_halves,
        SINGLE => |r, i| pick(SINGLE, r, i),
        _ => |r, i| pick(DOUBLE, r, i),
    };
    waves(f.bits().into(), n, &special, pick, &modes())
}

#[test]
fn single_precision() {
    check_all(&singles(), &waves_of(SINGLE, 128), 40);
}

#[test]
fn mixed_precision() {
    check_all(&mixed(), &waves_of(HALF, 128), 40);
}

#[test]
fn half_precision() {
    check_all(&halves(), &waves_of(HALF, 128), 40);
}

#[test]
fn double_precision() {
    check_all(&doubles(), &waves_of(DOUBLE, 128), 40);
}

#[test]
fn cube_maps() {
    let numbers: Vec<u64> = special_values(SINGLE).into_iter().filter(|x| !SINGLE.is_nan(*x)).collect();
    let number = |r: &mut Random, i: usize| {
        let x = pick(SINGLE, r, i);
        if SINGLE.is_nan(x) { x & !SINGLE.infinity() } else { x }
    };
    check_all(&cubes(), &waves(3, 32, &numbers, number, &[0x3F0]), 6);
}
