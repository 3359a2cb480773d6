//! Vector ALU: f32, f16 and f64 arithmetic, conversions, division helpers, transcendental functions.

use super::float::{self, F16, F32, F64, Format, Round};
use super::lanes::{
    Arith, Arith16, Arith64, LaneOp, Modes, Packed16, WideOp, arith32_handler, lane_handler, lane_portable,
    packed32_handler, wide_handler, wide_portable,
};
use super::valu::{lane_ops, wide_ops};
use super::{Ctl, Env, Handler, Host, Level, Uop};
use crate::isa::Op;
use crate::wave::{VCC, Wave};

struct Add;
struct Sub;
struct SubRev;
struct Mul;
struct Fma;
/// Multiply, round, add, round.
struct Mad;

macro_rules! arith {
    ($name:ident $n:literal |$a:ident, $b:ident, $c:ident, $fma32:ident, $fma64:ident| $e32:expr, $e64:expr, $e16:expr, |$f:ident, $r:ident| $soft:expr) => {
        impl Arith for $name {
            const N: usize = $n;
            #[inline(always)]
            #[allow(unused_variables)]
            fn native32<H: Host>($a: f32, $b: f32, $c: f32) -> f32 {
                let $fma32 = H::fma32;
                $e32
            }
            #[inline(always)]
            #[allow(unused_variables)]
            fn native64<H: Host>($a: f64, $b: f64, $c: f64) -> f64 {
                let $fma64 = H::fma64;
                $e64
            }
            #[inline(always)]
            #[allow(unused_variables)]
            fn native16<H: Host>($a: f32, $b: f32, $c: f32) -> u32 {
                $e16
            }
            #[allow(unused_variables)]
            fn soft($a: f64, $b: f64, $c: f64, $f: Format, $r: Round) -> f64 {
                $soft
            }
        }
    };
}

// An f16 sum or product rounded to f32 first rounds to f16 as the exact one does: 24 >= 2 * 11 + 2.
arith!(Add 2 |a, b, c, fma32, fma64| a + b, a + b, float::f32_to_f16(a + b), |f, r| float::soft_add(a, b, f, r));
arith!(Sub 2 |a, b, c, fma32, fma64| a - b, a - b, float::f32_to_f16(a - b), |f, r| float::soft_add(a, -b, f, r));
arith!(SubRev 2 |a, b, c, fma32, fma64| b - a, b - a, float::f32_to_f16(b - a), |f, r| float::soft_add(b, -a, f, r));
arith!(Mul 2 |a, b, c, fma32, fma64| a * b, a * b, float::f32_to_f16(a * b), |f, r| float::soft_mul(a, b, f, r));
arith!(Fma 3 |a, b, c, fma32, fma64|
    fma32(a, b, c),
    fma64(a, b, c),
    float::f64_to_f16(float::add_odd(f64::from(a) * f64::from(b), f64::from(c))),
    |f, r| float::soft_fma(a, b, c, f, r));
arith!(Mad 3 |a, b, c, fma32, fma64|
    a * b + c,
    a * b + c,
    float::f32_to_f16(float::f16_to_f32(float::f32_to_f16(a * b)) + c),
    |f, r| float::soft_add(float::soft_mul(a, b, f, r), c, f, r));

fn basic(op: Op, level: Level) -> Option<Handler> {
    Some(match op {
        Op::V_ADD_F32 => arith32_handler::<Add>(level),
        Op::V_SUB_F32 => arith32_handler::<Sub>(level),
        Op::V_SUBREV_F32 => arith32_handler::<SubRev>(level),
        Op::V_MUL_F32 => arith32_handler::<Mul>(level),
        Op::V_FMA_F32 | Op::V_FMAC_F32 | Op::V_FMAMK_F32 | Op::V_FMAAK_F32 => arith32_handler::<Fma>(level),
        Op::V_PK_ADD_F32 => packed32_handler::<Add>(level),
        Op::V_PK_MUL_F32 => packed32_handler::<Mul>(level),
        Op::V_PK_FMA_F32 => packed32_handler::<Fma>(level),
        Op::V_ADD_F64 => wide_handler::<Arith64<Add>>(level),
        Op::V_MUL_F64 => wide_handler::<Arith64<Mul>>(level),
        Op::V_FMA_F64 | Op::V_FMAC_F64 => wide_handler::<Arith64<Fma>>(level),
        Op::V_ADD_F16 => lane_portable::<Arith16<Add>>(level),
        Op::V_SUB_F16 => lane_portable::<Arith16<Sub>>(level),
        Op::V_SUBREV_F16 => lane_portable::<Arith16<SubRev>>(level),
        Op::V_MUL_F16 => lane_portable::<Arith16<Mul>>(level),
        Op::V_FMA_F16 | Op::V_FMA_LEGACY_F16 => lane_portable::<Arith16<Fma>>(level),
        Op::V_MAC_F16 | Op::V_MADMK_F16 | Op::V_MADAK_F16 | Op::V_MAD_F16 | Op::V_MAD_LEGACY_F16 => {
            lane_portable::<Arith16<Mad>>(level)
        }
        Op::V_PK_ADD_F16 => lane_handler::<Packed16<Add>>(level),
        Op::V_PK_MUL_F16 => lane_handler::<Packed16<Mul>>(level),
        Op::V_PK_FMA_F16 | Op::V_PK_FMAC_F16 => lane_handler::<Packed16<Fma>>(level),
        _ => return None,
    })
}

/// Minimum or maximum by the hardware's rules; `less(x, y)` says that x is the wanted one.
#[inline(always)]
fn extreme32(a: u32, b: u32, m: Modes, less: impl Fn(i32, i32) -> bool) -> u32 {
    let (a, b) = (m.input32(a), m.input32(b));
    let (nan_a, nan_b) = (float::is_nan32(a), float::is_nan32(b));
    let picked = if less(float::order32(a), float::order32(b)) { a } else { b };
    let plain = if nan_a {
        b
    } else if nan_b {
        a
    } else {
        picked
    };
    if m.ieee && float::is_snan32(a) {
        a | float::QUIET32
    } else if m.ieee && float::is_snan32(b) {
        b | float::QUIET32
    } else {
        m.output32(plain)
    }
}

#[inline(always)]
fn min32(a: u32, b: u32, m: Modes) -> u32 {
    extreme32(a, b, m, |x, y| x < y)
}

#[inline(always)]
fn max32(a: u32, b: u32, m: Modes) -> u32 {
    extreme32(a, b, m, |x, y| x > y)
}

#[inline(always)]
fn extreme16(a: u32, b: u32, m: Modes, less: impl Fn(i32, i32) -> bool) -> u32 {
    let (a, b) = (m.input16(a & 0xFFFF), m.input16(b & 0xFFFF));
    let (nan_a, nan_b) = (float::is_nan16(a), float::is_nan16(b));
    let signal = |x: u32| float::is_nan16(x) && x & float::QUIET16 == 0;
    let picked = if less(float::order16(a), float::order16(b)) { a } else { b };
    if m.ieee && signal(a) {
        a | float::QUIET16
    } else if m.ieee && signal(b) {
        b | float::QUIET16
    } else {
        m.output16(match (nan_a, nan_b) {
            (true, _) => b,
            (_, true) => a,
            _ => picked,
        })
    }
}

#[inline(always)]
fn min16(a: u32, b: u32, m: Modes) -> u32 {
    extreme16(a, b, m, |x, y| x < y)
}

#[inline(always)]
fn max16(a: u32, b: u32, m: Modes) -> u32 {
    extreme16(a, b, m, |x, y| x > y)
}

fn extreme64(a: u64, b: u64, m: Modes, less: impl Fn(i64, i64) -> bool) -> u64 {
    let (a, b) = (m.input64(a), m.input64(b));
    if m.ieee && float::is_snan64(a) {
        a | float::QUIET64
    } else if m.ieee && float::is_snan64(b) {
        b | float::QUIET64
    } else {
        m.output64(match (float::is_nan64(a), float::is_nan64(b)) {
            (true, _) => b,
            (_, true) => a,
            _ if less(float::order64(a), float::order64(b)) => a,
            _ => b,
        })
    }
}

/// IEEE 754-2019 minimum or maximum of three: a NaN wins.
fn propagating3(x: [u32; 3], m: Modes, pick: impl Fn(i32, i32) -> bool) -> u32 {
    let x = x.map(|x| m.input32(x));
    if x.iter().any(|x| float::is_nan32(*x)) {
        return float::nan32(&x);
    }
    let two = |a: u32, b: u32| if pick(float::order32(a), float::order32(b)) { a } else { b };
    m.output32(two(two(x[0], x[1]), x[2]))
}

fn propagating16(x: [u32; 3], m: Modes, pick: impl Fn(i32, i32) -> bool) -> u32 {
    let x = x.map(|x| m.input16(x & 0xFFFF));
    if x.iter().any(|x| float::is_nan16(*x)) {
        return float::nan16(&x);
    }
    let two = |a: u32, b: u32| if pick(float::order16(a), float::order16(b)) { a } else { b };
    m.output16(two(two(x[0], x[1]), x[2]))
}

/// The bits of an f32 result: our NaN for the host's, flushed where MODE says so.
#[inline(always)]
fn out32(value: f32, input: u32, m: Modes) -> u32 {
    if value.is_nan() { float::nan32(&[input]) } else { m.output32(value.to_bits()) }
}

/// A result in f64 that is to be rounded to f32 by MODE.
#[inline(always)]
fn round32(value: f64, m: Modes) -> f32 {
    if m.round32 == Round::Nearest { value as f32 } else { float::soft_round(value, F32, m.round32) as f32 }
}

/// An f32 rounded to f16 by MODE.
#[inline(always)]
fn to_f16(x: u32, m: Modes) -> u32 {
    let x = m.input32(x);
    let value = f32::from_bits(x);
    if value.is_nan() {
        return float::f32_to_f16(value);
    }
    let r = if m.round64 == Round::Nearest {
        float::f32_to_f16(value)
    } else {
        float::exact_f16(float::soft_round(value.into(), F16, m.round64))
    };
    if m.overflow_clamps && r & 0x7FFF == 0x7C00 && value.is_finite() {
        r & 0x8000 | 0x7BFF
    } else {
        m.output16(r)
    }
}

/// A special function of f32: computed in f64 and rounded; denormals in and out are zero.
#[inline(always)]
fn special32(x: u32, f: impl Fn(f64) -> f64) -> u32 {
    let x = float::flush32(x);
    let value = f(f64::from(f32::from_bits(x))) as f32;
    if value.is_nan() { float::nan32(&[x]) } else { float::flush32(value.to_bits()) }
}

/// A special function of f16.
#[inline(always)]
fn special16(x: u32, m: Modes, f: impl Fn(f64) -> f64) -> u32 {
    let x = m.input16(x & 0xFFFF);
    let value = f(f64::from(float::f16_to_f32(x)));
    if value.is_nan() {
        float::nan16(&[x])
    } else {
        // A finite operand may give infinity as it is, or overflow to it.
        let rounded = float::f16_to_f32(float::f64_to_f16(value));
        m.result16(rounded.into(), value.is_finite() && x & 0x7FFF != 0x7C00)
    }
}

/// A rounding function of f16: exact in f32.
#[inline(always)]
fn unary16(x: u32, m: Modes, f: impl Fn(f32) -> f32) -> u32 {
    let x = m.input16(x & 0xFFFF);
    let value = f(float::f16_to_f32(x));
    if value.is_nan() { float::nan16(&[x]) } else { m.output16(float::f32_to_f16(value)) }
}

#[inline(always)]
fn unary32(x: u32, m: Modes, f: impl Fn(f32) -> f32) -> u32 {
    let x = m.input32(x);
    out32(f(f32::from_bits(x)), x, m)
}

#[inline(always)]
fn unary64(x: u64, m: Modes, f: impl Fn(f64) -> f64) -> u64 {
    let x = m.input64(x);
    let value = f(f64::from_bits(x));
    if value.is_nan() { float::nan64(&[x]) } else { m.output64(value.to_bits()) }
}

/// `x - floor(x)`, rounded once, but below one.
fn fract(x: f64, format: Format, round: Round) -> f64 {
    let below_one = 1.0 - 0.5f64.powi(format.precision);
    let value = float::soft_add(x, -x.floor(), format, round);
    // An exact zero is positive in every rounding mode; a NaN stays.
    if value > below_one {
        below_one
    } else if value == 0.0 {
        0.0
    } else {
        value
    }
}

#[inline(always)]
fn frexp_exp32(x: u32) -> u32 {
    let exponent = (x >> 23 & 0xFF) as i32;
    let fraction = x & 0x7F_FFFF;
    match (exponent, fraction) {
        (255, _) | (0, 0) => 0,
        (0, _) => (-117 - fraction.leading_zeros() as i32) as u32,
        _ => (exponent - 126) as u32,
    }
}

#[inline(always)]
fn frexp_mant32(x: u32) -> u32 {
    let exponent = x >> 23 & 0xFF;
    let fraction = x & 0x7F_FFFF;
    match (exponent, fraction) {
        (255, 0) | (0, 0) => x,
        (255, _) => x | float::QUIET32,
        (0, _) => x & 0x8000_0000 | 0x3F00_0000 | fraction << (fraction.leading_zeros() - 8) & 0x7F_FFFF,
        _ => x & 0x807F_FFFF | 0x3F00_0000,
    }
}

fn frexp64(x: u64) -> (u64, i32) {
    let value = f64::from_bits(x);
    if value.is_nan() {
        (x | float::QUIET64, 0)
    } else if value == 0.0 || value.is_infinite() {
        (x, 0)
    } else {
        let (mantissa, exponent) = libm::frexp(value);
        (mantissa.to_bits(), exponent)
    }
}

fn frexp16(x: u32) -> (u32, i32) {
    let x = x & 0xFFFF;
    if x & 0x7C00 == 0x7C00 || x & 0x7FFF == 0 {
        return (if float::is_nan16(x) { x | float::QUIET16 } else { x }, 0);
    }
    let (mantissa, exponent) = libm::frexp(float::f16_to_f32(x).into());
    (float::exact_f16(mantissa), exponent)
}

#[inline(always)]
fn ldexp32(x: u32, n: i32, m: Modes) -> u32 {
    let x = m.input32(x);
    let value = f32::from_bits(x);
    if value.is_nan() {
        return float::nan32(&[x]);
    }
    // In f64 every scaled result is exact, or far beyond the range of f32 on the same side.
    let n = n.clamp(-400, 400);
    let scaled = f64::from(value) * f64::from_bits(((n + 1023) as u64) << 52);
    m.output32(round32(scaled, m).to_bits())
}

/// A number of `low..=1` times `scale`, exact before it is rounded; a NaN is 0.
#[inline(always)]
fn norm16(x: f32, low: f64, scale: f64) -> u32 {
    let x = if x.is_nan() { 0.0 } else { f64::from(x) };
    (x.clamp(low, 1.0) * scale).round_ties_even() as i32 as u32 & 0xFFFF
}

lane_ops! {
    /// f32 operations other than the basic ones.
    misc32 by lane_handler:
    V_MIN_F32 2 |a, b, c, m| min32(a, b, m);
    V_MAX_F32 2 |a, b, c, m| max32(a, b, m);
    V_MAX3_F32 3 |a, b, c, m| max32(max32(a, b, m), c, m);
    V_MED3_F32 3 |a, b, c, m| {
        if float::is_nan32(a) || float::is_nan32(b) || float::is_nan32(c) {
            min32(min32(a, b, m), c, m)
        } else {
            let (low, high) = (min32(a, b, m), max32(a, b, m));
            max32(low, min32(high, c, m), m)
        }
    };
    V_CVT_F32_I32 1 |a, b, c, m| {
        if m.round32 == Round::Nearest {
            (a as i32 as f32).to_bits()
        } else {
            (float::soft_from_int(i64::from(a as i32), F32, m.round32) as f32).to_bits()
        }
    };
    V_CVT_F32_U32 1 |a, b, c, m| {
        if m.round32 == Round::Nearest {
            (a as f32).to_bits()
        } else {
            (float::soft_from_int(i64::from(a), F32, m.round32) as f32).to_bits()
        }
    };
    V_CVT_U32_F32 1 |a, b, c, m| f32::from_bits(a) as u32;
    V_CVT_I32_F32 1 |a, b, c, m| f32::from_bits(a) as i32 as u32;
    V_CVT_F32_F16 1 |a, b, c, m| float::f16_to_f32(m.input16(a & 0xFFFF)).to_bits();
    V_CVT_F16_F32 1 |a, b, c, m| to_f16(a, m);
    V_CVT_PKRTZ_F16_F32 2 |a, b, c, m| {
        let toward_zero = Modes { round64: Round::Zero, ..m };
        to_f16(a, toward_zero) | to_f16(b, toward_zero) << 16
    };
    V_CVT_PK_F16_F32 2 |a, b, c, m| {
        let nearest = Modes { round64: Round::Nearest, ..m };
        to_f16(a, nearest) | to_f16(b, nearest) << 16
    };
    V_CVT_PK_BF16_F32 2 |a, b, c, m| {
        float::f32_to_bf16(f32::from_bits(m.input32(a))) | float::f32_to_bf16(f32::from_bits(m.input32(b))) << 16
    };
    V_RNDNE_F32 1 |a, b, c, m| unary32(a, m, f32::round_ties_even);
    V_FLOOR_F32 1 |a, b, c, m| unary32(a, m, f32::floor);
    V_LDEXP_F32 2 |a, b, c, m| ldexp32(a, b as i32, m);
    V_RCP_F32 1 |a, b, c, m| {
        let x = float::flush32(a);
        let value = 1.0 / f32::from_bits(x);
        if value.is_nan() { float::nan32(&[x]) } else { float::flush32(value.to_bits()) }
    };
    V_SQRT_F32 1 |a, b, c, m| {
        let x = float::flush32(a);
        let value = f32::from_bits(x).sqrt();
        if value.is_nan() { float::nan32(&[x]) } else { value.to_bits() }
    };
    V_RSQ_F32 1 |a, b, c, m| special32(a, |x| 1.0 / x.sqrt());
    V_EXP_F32 1 |a, b, c, m| special32(a, super::special::exp2);
    V_LOG_F32 1 |a, b, c, m| special32(a, super::special::log2);
}

lane_ops! {
    /// Rarer ones.
    rare32 by lane_portable:
    V_MIN3_F32 3 |a, b, c, m| min32(min32(a, b, m), c, m);
    V_MINIMUM3_F32 3 |a, b, c, m| propagating3([a, b, c], m, |x, y| x < y);
    V_MAXIMUM3_F32 3 |a, b, c, m| propagating3([a, b, c], m, |x, y| x > y);
    V_MUL_LEGACY_F32 2 |a, b, c, m| {
        let (x, y) = (m.input32(a), m.input32(b));
        if x & 0x7FFF_FFFF == 0 || y & 0x7FFF_FFFF == 0 {
            0
        } else {
            super::lanes::soft32::<Mul>(x, y, 0, m)
        }
    };
    V_CVT_RPI_I32_F32 1 |a, b, c, m| (f64::from(f32::from_bits(a)) + 0.5).floor() as i32 as u32;
    V_CVT_FLR_I32_F32 1 |a, b, c, m| f32::from_bits(a).floor() as i32 as u32;
    V_CVT_OFF_F32_I4 1 |a, b, c, m| (((a << 28) as i32 >> 28) as f32 / 16.0).to_bits();
    V_CVT_F32_UBYTE0 1 |a, b, c, m| ((a & 0xFF) as f32).to_bits();
    V_CVT_F32_UBYTE1 1 |a, b, c, m| ((a >> 8 & 0xFF) as f32).to_bits();
    V_CVT_F32_UBYTE2 1 |a, b, c, m| ((a >> 16 & 0xFF) as f32).to_bits();
    V_CVT_F32_UBYTE3 1 |a, b, c, m| ((a >> 24) as f32).to_bits();
    V_CVT_F32_BF16 1 |a, b, c, m| {
        let x = a << 16;
        if float::is_nan32(x) { x | float::QUIET32 } else { m.input32(x) }
    };
    V_CVT_PKNORM_I16_F32 2 |a, b, c, m| {
        norm16(f32::from_bits(a), -1.0, 32767.0) | norm16(f32::from_bits(b), -1.0, 32767.0) << 16
    };
    V_CVT_PKNORM_U16_F32 2 |a, b, c, m| {
        norm16(f32::from_bits(a), 0.0, 65535.0) | norm16(f32::from_bits(b), 0.0, 65535.0) << 16
    };
    V_CVT_PK_U8_F32 3 |a, b, c, m| {
        let byte = f32::from_bits(a).round_ties_even() as u8;
        let shift = 8 * (b & 3);
        c & !(0xFF << shift) | u32::from(byte) << shift
    };
    V_CVT_PKACCUM_U8_F32 3 |a, b, c, m| {
        let byte = f32::from_bits(a).round_ties_even() as u8;
        let shift = 8 * (b & 3);
        c & !(0xFF << shift) | u32::from(byte) << shift
    };
    V_TRUNC_F32 1 |a, b, c, m| unary32(a, m, f32::trunc);
    V_CEIL_F32 1 |a, b, c, m| unary32(a, m, f32::ceil);
    V_FRACT_F32 1 |a, b, c, m| unary32(a, m, |x| fract(x.into(), F32, m.round32) as f32);
    V_FREXP_EXP_I32_F32 1 |a, b, c, m| frexp_exp32(m.input32(a));
    V_FREXP_MANT_F32 1 |a, b, c, m| frexp_mant32(m.input32(a));
    V_RCP_IFLAG_F32 1 |a, b, c, m| {
        let x = float::flush32(a);
        let value = 1.0 / f32::from_bits(x);
        if value.is_nan() { float::nan32(&[x]) } else { float::flush32(value.to_bits()) }
    };
    V_EXP_LEGACY_F32 1 |a, b, c, m| special32(a, super::special::exp2);
    V_LOG_LEGACY_F32 1 |a, b, c, m| special32(a, super::special::log2);
    V_SIN_F32 1 |a, b, c, m| special32(a, super::special::sin_turns);
    V_COS_F32 1 |a, b, c, m| special32(a, super::special::cos_turns);
    V_DIV_FIXUP_F32 3 |a, b, c, m| div_fixup32(a, b, c);
    V_CUBEID_F32 3 |a, b, c, m| cube(a, b, c).0.to_bits();
    V_CUBESC_F32 3 |a, b, c, m| cube(a, b, c).1.to_bits();
    V_CUBETC_F32 3 |a, b, c, m| cube(a, b, c).2.to_bits();
    V_CUBEMA_F32 3 |a, b, c, m| (2.0 * cube(a, b, c).3).to_bits();
    V_DOT2_F32_F16 3 |a, b, c, m| dot2(a, b, c, float::f16_to_f32, H::fma32);
    V_DOT2C_F32_F16 3 |a, b, c, m| dot2(a, b, c, float::f16_to_f32, H::fma32);
    V_DOT2_F32_BF16 3 |a, b, c, m| dot2(a, b, c, float::bf16_to_f32, H::fma32);
    V_DOT2C_F32_BF16 3 |a, b, c, m| dot2(a, b, c, float::bf16_to_f32, H::fma32);
}

/// Two fused multiply-adds, low half first.
#[inline(always)]
fn dot2(a: u32, b: u32, c: u32, widen: impl Fn(u32) -> f32, fma: impl Fn(f32, f32, f32) -> f32) -> u32 {
    let low = fma(widen(a & 0xFFFF), widen(b & 0xFFFF), f32::from_bits(c));
    let sum = fma(widen(a >> 16), widen(b >> 16), low);
    if sum.is_nan() { float::nan32(&[c]) } else { sum.to_bits() }
}

/// Cube-map face, s, t and major axis.
fn cube(a: u32, b: u32, c: u32) -> (f32, f32, f32, f32) {
    let [x, y, z] = [a, b, c].map(f32::from_bits);
    if z.abs() >= x.abs() && z.abs() >= y.abs() {
        if z < 0.0 { (5.0, -x, -y, z) } else { (4.0, x, -y, z) }
    } else if y.abs() >= x.abs() {
        if y < 0.0 { (3.0, x, -z, y) } else { (2.0, x, z, y) }
    } else if x < 0.0 {
        (1.0, z, -y, x)
    } else {
        (0.0, -z, -y, x)
    }
}

lane_ops! {
    /// f16 operations other than the basic ones.
    misc16 by lane_portable:
    V_MIN_F16 2 |a, b, c, m| min16(a, b, m);
    V_MAX_F16 2 |a, b, c, m| max16(a, b, m);
    V_MIN3_F16 3 |a, b, c, m| min16(min16(a, b, m), c, m);
    V_MAX3_F16 3 |a, b, c, m| max16(max16(a, b, m), c, m);
    V_MED3_F16 3 |a, b, c, m| {
        if float::is_nan16(a) || float::is_nan16(b) || float::is_nan16(c) {
            min16(min16(a, b, m), c, m)
        } else {
            max16(min16(a, b, m), min16(max16(a, b, m), c, m), m)
        }
    };
    V_PK_MIN_F16 2 |a, b, c, m| min16(a, b, m) | min16(a >> 16, b >> 16, m) << 16;
    V_PK_MAX_F16 2 |a, b, c, m| max16(a, b, m) | max16(a >> 16, b >> 16, m) << 16;
    V_PK_MINIMUM3_F16 3 |a, b, c, m| {
        let half = |s: u32| propagating16([a >> s, b >> s, c >> s], m, |x, y| x < y);
        half(0) | half(16) << 16
    };
    V_PK_MAXIMUM3_F16 3 |a, b, c, m| {
        let half = |s: u32| propagating16([a >> s, b >> s, c >> s], m, |x, y| x > y);
        half(0) | half(16) << 16
    };
    V_CVT_F16_U16 1 |a, b, c, m| m.result16(float::soft_from_int(i64::from(a & 0xFFFF), F16, m.round64), true);
    V_CVT_F16_I16 1 |a, b, c, m| m.result16(float::soft_from_int(i64::from(a as u16 as i16), F16, m.round64), true);
    V_CVT_U16_F16 1 |a, b, c, m| u32::from(float::f16_to_f32(a & 0xFFFF) as u16);
    V_CVT_I16_F16 1 |a, b, c, m| u32::from(float::f16_to_f32(a & 0xFFFF) as i16 as u16);
    V_CVT_NORM_I16_F16 1 |a, b, c, m| norm16(float::f16_to_f32(a & 0xFFFF), -1.0, 32767.0);
    V_CVT_NORM_U16_F16 1 |a, b, c, m| norm16(float::f16_to_f32(a & 0xFFFF), 0.0, 65535.0);
    V_CVT_PKNORM_I16_F16 2 |a, b, c, m| {
        norm16(float::f16_to_f32(a & 0xFFFF), -1.0, 32767.0) | norm16(float::f16_to_f32(b & 0xFFFF), -1.0, 32767.0) << 16
    };
    V_CVT_PKNORM_U16_F16 2 |a, b, c, m| {
        norm16(float::f16_to_f32(a & 0xFFFF), 0.0, 65535.0) | norm16(float::f16_to_f32(b & 0xFFFF), 0.0, 65535.0) << 16
    };
    V_RCP_F16 1 |a, b, c, m| special16(a, m, |x| 1.0 / x);
    V_SQRT_F16 1 |a, b, c, m| special16(a, m, f64::sqrt);
    V_RSQ_F16 1 |a, b, c, m| special16(a, m, |x| 1.0 / x.sqrt());
    V_LOG_F16 1 |a, b, c, m| special16(a, m, super::special::log2);
    V_EXP_F16 1 |a, b, c, m| special16(a, m, super::special::exp2);
    V_SIN_F16 1 |a, b, c, m| special16(a, m, super::special::sin_turns);
    V_COS_F16 1 |a, b, c, m| special16(a, m, super::special::cos_turns);
    V_FREXP_MANT_F16 1 |a, b, c, m| frexp16(m.input16(a & 0xFFFF)).0;
    V_FREXP_EXP_I16_F16 1 |a, b, c, m| frexp16(m.input16(a & 0xFFFF)).1 as u32 & 0xFFFF;
    V_FLOOR_F16 1 |a, b, c, m| unary16(a, m, f32::floor);
    V_CEIL_F16 1 |a, b, c, m| unary16(a, m, f32::ceil);
    V_TRUNC_F16 1 |a, b, c, m| unary16(a, m, f32::trunc);
    V_RNDNE_F16 1 |a, b, c, m| unary16(a, m, f32::round_ties_even);
    V_FRACT_F16 1 |a, b, c, m| unary16(a, m, |x| fract(x.into(), F16, m.round64) as f32);
    V_LDEXP_F16 2 |a, b, c, m| {
        let x = m.input16(a & 0xFFFF);
        if float::is_nan16(x) {
            float::nan16(&[x])
        } else {
            let (value, n) = (f64::from(float::f16_to_f32(x)), i32::from(b as u16 as i16));
            m.result16(float::soft_ldexp(value, n, F16, m.round64), value.is_finite())
        }
    };
    V_DIV_FIXUP_F16 3 |a, b, c, m| div_fixup16(a, b, c);
    V_DIV_FIXUP_LEGACY_F16 3 |a, b, c, m| div_fixup16(a, b, c);
}

wide_ops! {
    /// f64 operations other than the basic ones, and conversions that involve f64.
    misc64 by wide_portable:
    V_MIN_F64 [2, 2, 2, 0] |a, b, c, m| extreme64(a, b, m, |x, y| x < y);
    V_MAX_F64 [2, 2, 2, 0] |a, b, c, m| extreme64(a, b, m, |x, y| x > y);
    V_CVT_I32_F64 [1, 2, 0, 0] |a, b, c, m| u64::from(f64::from_bits(a) as i32 as u32);
    V_CVT_U32_F64 [1, 2, 0, 0] |a, b, c, m| u64::from(f64::from_bits(a) as u32);
    V_CVT_F64_I32 [2, 1, 0, 0] |a, b, c, m| f64::from(a as u32 as i32).to_bits();
    V_CVT_F64_U32 [2, 1, 0, 0] |a, b, c, m| f64::from(a as u32).to_bits();
    V_CVT_F32_F64 [1, 2, 0, 0] |a, b, c, m| {
        let x = f64::from_bits(m.input64(a));
        u64::from(if x.is_nan() {
            // Sign and the leading payload bits survive.
            (a >> 32) as u32 & 0x8000_0000 | float::NAN32 | (a >> 29) as u32 & 0x3F_FFFF
        } else {
            m.output32(round32(x, m).to_bits())
        })
    };
    V_CVT_F64_F32 [2, 1, 0, 0] |a, b, c, m| {
        let x = m.input32(a as u32);
        if float::is_nan32(x) {
            u64::from(x & 0x8000_0000) << 32 | float::NAN64 | u64::from(x & 0x3F_FFFF) << 29
        } else {
            f64::from(f32::from_bits(x)).to_bits()
        }
    };
    V_TRUNC_F64 [2, 2, 0, 0] |a, b, c, m| unary64(a, m, f64::trunc);
    V_CEIL_F64 [2, 2, 0, 0] |a, b, c, m| unary64(a, m, f64::ceil);
    V_RNDNE_F64 [2, 2, 0, 0] |a, b, c, m| unary64(a, m, f64::round_ties_even);
    V_FLOOR_F64 [2, 2, 0, 0] |a, b, c, m| unary64(a, m, f64::floor);
    V_FRACT_F64 [2, 2, 0, 0] |a, b, c, m| unary64(a, m, |x| fract(x, F64, m.round64));
    V_RCP_F64 [2, 2, 0, 0] |a, b, c, m| unary64(a, m, |x| 1.0 / x);
    V_RSQ_F64 [2, 2, 0, 0] |a, b, c, m| unary64(a, m, |x| 1.0 / x.sqrt());
    V_SQRT_F64 [2, 2, 0, 0] |a, b, c, m| unary64(a, m, f64::sqrt);
    V_FREXP_EXP_I32_F64 [1, 2, 0, 0] |a, b, c, m| u64::from(frexp64(m.input64(a)).1 as u32);
    V_FREXP_MANT_F64 [2, 2, 0, 0] |a, b, c, m| frexp64(m.input64(a)).0;
    V_LDEXP_F64 [2, 2, 1, 0] |a, b, c, m| {
        let x = m.input64(a);
        if float::is_nan64(x) {
            float::nan64(&[x])
        } else {
            m.output64(float::soft_ldexp(f64::from_bits(x), b as u32 as i32, F64, m.round64).to_bits())
        }
    };
    V_TRIG_PREOP_F64 [2, 2, 1, 0] |a, b, c, m| super::special::two_over_pi(a, b as u32 & 31);
    V_DIV_FIXUP_F64 [2, 2, 2, 2] |a, b, c, m| div_fixup64(a, b, c);
}

/// The rule shared by the three `v_div_fixup`: which special result a quotient has. `None`: the quotient itself.
enum Fixup {
    Nan,
    Invalid,
    Infinity,
    Zero,
    Quotient,
}

fn fixup(denominator: f64, numerator: f64, underflow: bool) -> Fixup {
    if numerator.is_nan() || denominator.is_nan() {
        Fixup::Nan
    } else if denominator == 0.0 && numerator == 0.0 || denominator.is_infinite() && numerator.is_infinite() {
        Fixup::Invalid
    } else if denominator == 0.0 || numerator.is_infinite() {
        Fixup::Infinity
    } else if denominator.is_infinite() || numerator == 0.0 || underflow {
        Fixup::Zero
    } else {
        Fixup::Quotient
    }
}

/// `a` quotient, `b` denominator, `c` numerator.
fn div_fixup32(a: u32, b: u32, c: u32) -> u32 {
    let sign = (b ^ c) & 0x8000_0000;
    let (d, n) = (f32::from_bits(b), f32::from_bits(c));
    let exponent = |x: u32| (x >> 23 & 0xFF) as i32;
    match fixup(d.into(), n.into(), exponent(c) - exponent(b) < -150) {
        Fixup::Nan => float::nan32(&[c, b]),
        Fixup::Invalid => 0xFFC0_0000,
        Fixup::Infinity => sign | 0x7F80_0000,
        Fixup::Zero => sign,
        // The steps before made infinities of opposite signs: the true quotient is far out of range.
        Fixup::Quotient if float::is_nan32(a) => {
            sign | if exponent(c) > exponent(b) { 0x7F80_0000 } else { 0 }
        }
        Fixup::Quotient => sign | a & 0x7FFF_FFFF,
    }
}

fn div_fixup64(a: u64, b: u64, c: u64) -> u64 {
    let sign = (b ^ c) & 1 << 63;
    let (d, n) = (f64::from_bits(b), f64::from_bits(c));
    let exponent = |x: u64| (x >> 52 & 0x7FF) as i32;
    match fixup(d, n, exponent(c) - exponent(b) < -1075) {
        Fixup::Nan => float::nan64(&[c, b]),
        Fixup::Invalid => 0xFFF8 << 48,
        Fixup::Infinity => sign | 0x7FF0 << 48,
        Fixup::Zero => sign,
        Fixup::Quotient if float::is_nan64(a) => {
            sign | if exponent(c) > exponent(b) { 0x7FF0 << 48 } else { 0 }
        }
        Fixup::Quotient => sign | a & !(1 << 63),
    }
}

fn div_fixup16(a: u32, b: u32, c: u32) -> u32 {
    let sign = (b ^ c) & 0x8000;
    match fixup(float::f16_to_f32(b & 0xFFFF).into(), float::f16_to_f32(c & 0xFFFF).into(), false) {
        Fixup::Nan => float::nan16(&[c & 0xFFFF, b & 0xFFFF]),
        Fixup::Invalid => 0xFE00,
        Fixup::Infinity => sign | 0x7C00,
        Fixup::Zero => sign,
        Fixup::Quotient if float::is_nan16(a) => a & 0xFFFF | float::QUIET16,
        Fixup::Quotient => sign | a & 0x7FFF,
    }
}

/// What `v_div_scale` does to a division whose plain quotient would lose bits: scales of `(value, flag)`.
/// `s0` is the operand to scale, `s1` the denominator, `s2` the numerator. The exponents are those of the manual.
fn div_scale(s0: f64, s1: f64, s2: f64, format: Format) -> (i32, bool, bool) {
    let half = if format == F32 { 64 } else { 128 };
    let exponent = |x: f64| if x == 0.0 { 0 } else { (libm::frexp(x).1 - 1 + format.emax).max(0) };
    let subnormal = |x: f64| x != 0.0 && x.abs() < f64::from_bits(((format.emin + 1023).max(1) as u64) << 52);
    // Reciprocal and quotient to the precision of the format, which decides whether they are subnormal.
    let reciprocal =
        |x: f64| if format == F32 { subnormal(1.0 / x) } else { x.abs() > 4.494_232_837_155_79e307 };
    let quotient = |n: f64, d: f64| {
        if format == F32 {
            subnormal(n / d)
        } else {
            // n / d itself may be rounded to zero: compare exponents.
            let q = n / d;
            q == 0.0 || subnormal(q)
        }
    };
    if !s1.is_finite() || !s2.is_finite() {
        return (0, false, false);
    }
    if s1 == 0.0 || s2 == 0.0 {
        return (0, false, true);
    }
    if exponent(s2) - exponent(s1) >= if format == F32 { 96 } else { 768 } {
        return (if s0 == s1 { half } else { 0 }, true, false);
    }
    if subnormal(s1) {
        return (half, false, false);
    }
    match (reciprocal(s1), quotient(s2, s1)) {
        (true, true) => (if s0 == s1 { -half } else { 0 }, true, false),
        (true, false) => (-half, false, false),
        (false, true) => (if s0 == s2 { half } else { 0 }, true, false),
        (false, false) => {
            let tiny = exponent(s2) <= if format == F32 { 23 } else { 53 };
            (if tiny { half } else { 0 }, false, false)
        }
    }
}

fn div_scale32(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let mut flags = 0;
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let [a, b, c] = [u.a, u.b, u.c].map(|slot| w.lane(slot, lane));
        let [x, y, z] = [a, b, c].map(|x| f64::from(f32::from_bits(x)));
        let (scale, flag, nan) = div_scale(x, y, z, F32);
        let value = if nan || x.is_nan() {
            if x.is_nan() { float::nan32(&[a]) } else { float::NAN32 }
        } else {
            (float::soft_ldexp(x, scale, F32, Round::Nearest) as f32).to_bits()
        };
        w.set_lane(u.d, lane, value);
        flags |= u64::from(flag) << lane;
    }
    w.set_s64(u.mask_out as usize, flags);
    Ctl::Next
}

fn div_scale64(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let mut flags = 0;
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let [a, b, c] = [u.a, u.b, u.c].map(|slot| w.lane64(slot, lane));
        let [x, y, z] = [a, b, c].map(f64::from_bits);
        let (scale, flag, nan) = div_scale(x, y, z, F64);
        let value = if nan || x.is_nan() {
            if x.is_nan() { float::nan64(&[a]) } else { float::NAN64 }
        } else {
            float::soft_ldexp(x, scale, F64, Round::Nearest).to_bits()
        };
        w.set_lane64(u.d, lane, value);
        flags |= u64::from(flag) << lane;
    }
    w.set_s64(u.mask_out as usize, flags);
    Ctl::Next
}

/// `v_div_fmas`: a fused multiply-add that undoes the scaling where VCC is set. Which way follows from the size of
/// the addend, the approximate quotient.
fn div_fmas32(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, vcc, m) = (w.exec(), w.s64(VCC), Modes::of(w));
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let bits = [u.a, u.b, u.c].map(|slot| m.input32(w.lane(slot, lane)));
        let value = if bits.iter().any(|x| float::is_nan32(*x)) {
            float::nan32(&bits)
        } else {
            let [x, y, z] = bits.map(|x| f64::from(f32::from_bits(x)));
            let scale = match (vcc >> lane & 1 != 0, z.abs() >= 2.0) {
                (false, _) => 0,
                (true, true) => 64,
                (true, false) => -64,
            };
            let sum = float::soft_scaled_fma(x, y, z, scale, F32, m.round32);
            if sum.is_nan() { float::NAN32 } else { m.output32((sum as f32).to_bits()) }
        };
        w.set_lane(u.d, lane, value);
    }
    Ctl::Next
}

fn div_fmas64(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, vcc, m) = (w.exec(), w.s64(VCC), Modes::of(w));
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let bits = [u.a, u.b, u.c].map(|slot| m.input64(w.lane64(slot, lane)));
        let value = if bits.iter().any(|x| float::is_nan64(*x)) {
            float::nan64(&bits)
        } else {
            let [x, y, z] = bits.map(f64::from_bits);
            let scale = match (vcc >> lane & 1 != 0, z.abs() >= 2.0) {
                (false, _) => 0,
                (true, true) => 128,
                (true, false) => -128,
            };
            let sum = float::soft_scaled_fma(x, y, z, scale, F64, m.round64);
            if sum.is_nan() { float::NAN64 } else { m.output64(sum.to_bits()) }
        };
        w.set_lane64(u.d, lane, value);
    }
    Ctl::Next
}

/// The handler of a float instruction.
pub(crate) fn handler(op: Op, level: Level) -> Option<Handler> {
    match op {
        Op::V_DIV_SCALE_F32 => Some(div_scale32),
        Op::V_DIV_SCALE_F64 => Some(div_scale64),
        Op::V_DIV_FMAS_F32 => Some(div_fmas32),
        Op::V_DIV_FMAS_F64 => Some(div_fmas64),
        _ => basic(op, level)
            .or_else(|| misc32(op, level))
            .or_else(|| rare32(op, level))
            .or_else(|| misc16(op, level))
            .or_else(|| misc64(op, level)),
    }
}
