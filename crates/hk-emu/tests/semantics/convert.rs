//! Conversions, and the helpers of division.

use hk_emu::isa::Op;

use crate::common::{Args, Random, Rig, hip, options};
use crate::semantics::exact::{BFLOAT, DOUBLE, Exact, Format, HALF, Mode, Round, SINGLE, Value};
use crate::semantics::float::{convert_nan, special_values, waves_of};
use crate::semantics::vector::{Body, Lane, Model, Ty, bits, check_all, custom, model};

/// A float as an integer of a range, rounded in some direction; a NaN is zero.
fn to_integer(f: Format, x: u64, add: &Exact, round: Round, (low, high): (i128, i128)) -> u128 {
    let n = match f.value(x) {
        Value::Nan => 0,
        Value::Infinity(true) => low,
        Value::Infinity(false) => high,
        Value::Finite(x) => x.plus(add, Round::Nearest).rounded(round).saturated(low, high),
    };
    n as u128
}

const I32: (i128, i128) = (i32::MIN as i128, i32::MAX as i128);
const U32: (i128, i128) = (0, u32::MAX as i128);

fn truncate(f: Format, x: u64, range: (i128, i128)) -> u128 {
    to_integer(f, x, &Exact::integer(0), Round::Zero, range)
}

fn from_integer(l: &Lane, x: i128, f: Format) -> u128 {
    l.mode.finish(f, &Value::Finite(Exact::integer(x))).into()
}

/// One float as another, with a rounding of its own.
pub fn convert(mode: Mode, x: u64, from: Format, to: Format) -> u64 {
    let x = mode.input(from, x);
    if from.is_nan(x) { convert_nan(x, from, to) } else { mode.finish(to, &from.value(x)) }
}

fn rounding(mode: Mode, round: u32) -> Mode {
    Mode(mode.0 & !0xF | round | round << 2)
}

/// A number in -1..=1 or 0..=1 as a fraction of the largest 16-bit integer.
fn normalized(f: Format, x: u64, signed: bool) -> u128 {
    let (low, scale) = if signed { (-32767, 32767) } else { (0, 65535) };
    let scaled = match f.value(x) {
        Value::Finite(x) => x.times(&Exact::integer(scale)).rounded(Round::Nearest).saturated(low, scale),
        Value::Infinity(true) => low,
        Value::Infinity(false) => scale,
        Value::Nan => 0,
    };
    scaled as u128 & 0xFFFF
}

/// An 8-bit float: fraction bits, bias, and whether it is FNUZ.
#[derive(Clone, Copy)]
struct Eight {
    fraction: u32,
    bias: i32,
    fnuz: bool,
}

fn eight(l: &Lane, bf8: bool) -> Eight {
    match (l.gfx950, bf8) {
        (false, false) => Eight { fraction: 3, bias: 8, fnuz: true },
        (false, true) => Eight { fraction: 2, bias: 16, fnuz: true },
        (true, false) => Eight { fraction: 3, bias: 7, fnuz: false },
        (true, true) => Eight { fraction: 2, bias: 15, fnuz: false },
    }
}

impl Eight {
    fn value(self, code: u64) -> Value {
        let magnitude = code & 0x7F;
        let (field, fraction) = (magnitude >> self.fraction, magnitude & ((1 << self.fraction) - 1));
        match (self.fnuz, self.fraction) {
            (true, _) if code & 0xFF == 0x80 => return Value::Nan,
            (false, 3) if magnitude == 0x7F => return Value::Nan,
            (false, 2) if magnitude == 0x7C => return Value::Infinity(code & 0x80 != 0),
            (false, 2) if magnitude > 0x7C => return Value::Nan,
            _ => {}
        }
        let m = if field == 0 { fraction } else { fraction | 1 << self.fraction };
        let exponent = field.max(1) as i32 - self.bias - self.fraction as i32;
        Value::Finite(Exact::new(code & 0x80 != 0, m.into(), exponent))
    }

    fn decode(self, code: u64) -> u64 {
        match self.value(code) {
            // FNUZ has one NaN, the negative one.
            Value::Nan => SINGLE.default_nan() | if code & 0x80 != 0 { SINGLE.sign() } else { 0 },
            value => value.round(SINGLE, Round::Nearest),
        }
    }

    fn largest(self) -> u64 {
        if self.fnuz {
            0x7F
        } else if self.fraction == 3 {
            0x7E
        } else {
            0x7B
        }
    }

    /// What is beyond the largest number.
    fn overflow(self, sign: u64, clamps: bool) -> u64 {
        match (clamps, self.fnuz, self.fraction) {
            (true, ..) => sign | self.largest(),
            (_, true, _) => 0x80,
            (_, _, 3) => sign | 0x7F,
            _ => sign | 0x7C,
        }
    }

    /// The nearest code by comparing with all of them; ties go to the even one.
    fn encode(self, x: u64, clamps: bool) -> u64 {
        let sign = if SINGLE.is_negative(x) { 0x80 } else { 0 };
        let magnitude = match SINGLE.value(x & !SINGLE.sign()) {
            Value::Nan => return if self.fnuz { 0x80 } else { sign | 0x7F },
            Value::Infinity(_) => return self.overflow(sign, clamps),
            Value::Finite(x) => x,
        };
        // The code after the largest one continues the ladder, so that what rounds to it overflows.
        let step = |code: u64| match (Eight { fnuz: true, ..self }).value(code & 0x7F) {
            Value::Finite(x) => x,
            _ => unreachable!("all magnitudes of FNUZ are finite"),
        };
        let beyond = Exact::new(false, 1, if self.fraction == 3 { 8 } else { 16 });
        let ladder = |code: u64| if code == 0x80 { beyond.clone() } else { step(code) };
        let top = self.largest();
        let mut code = 0;
        while code <= top && ladder(code + 1).compare(&magnitude).is_le() {
            code += 1;
        }
        if code <= top {
            let middle = ladder(code).plus(&ladder(code + 1), Round::Nearest).scaled(-1);
            let to_middle = magnitude.compare(&middle);
            code += u64::from(to_middle.is_gt() || to_middle.is_eq() && code % 2 == 1);
        }
        if code > top {
            return self.overflow(sign, clamps);
        }
        if code == 0 && self.fnuz { 0 } else { sign | code }
    }
}

fn pack8(l: &Lane, bf8: bool) -> u128 {
    let one = |i: usize| eight(l, bf8).encode(l.mode.input(SINGLE, l.w(i)), l.mode.fp16_ovfl());
    (one(0) | one(1) << 8).into()
}

fn models() -> Vec<Model> {
    let mut all = bits! {
        V_CVT_I32_F64 I32(F64) |l| truncate(DOUBLE, l.w(0), I32);
        V_CVT_U32_F64 U32(F64) |l| truncate(DOUBLE, l.w(0), U32);
        V_CVT_I32_F32 I32(F32) |l| truncate(SINGLE, l.w(0), I32);
        V_CVT_U32_F32 U32(F32) |l| truncate(SINGLE, l.w(0), U32);
        V_CVT_I16_F16 I16(F16) |l| truncate(HALF, l.w(0), (-32768, 32767));
        V_CVT_U16_F16 U16(F16) |l| truncate(HALF, l.w(0), (0, 65535));
        V_CVT_RPI_I32_F32 I32(F32) |l| to_integer(SINGLE, l.w(0), &Exact::new(false, 1, -1), Round::Down, I32);
        V_CVT_FLR_I32_F32 I32(F32) |l| to_integer(SINGLE, l.w(0), &Exact::integer(0), Round::Down, I32);
        V_CVT_F64_I32 F64(I32) |l| from_integer(l, l.u(0) as i32 as i128, DOUBLE);
        V_CVT_F64_U32 F64(U32) |l| from_integer(l, l.u(0).into(), DOUBLE);
        V_CVT_F32_I32 F32(I32) |l| from_integer(l, l.u(0) as i32 as i128, SINGLE);
        V_CVT_F32_U32 F32(U32) |l| from_integer(l, l.u(0).into(), SINGLE);
        V_CVT_F16_I16 F16(I16) |l| from_integer(l, l.u(0) as u16 as i16 as i128, HALF);
        V_CVT_F16_U16 F16(U16) |l| from_integer(l, (l.u(0) & 0xFFFF).into(), HALF);
        V_CVT_F32_UBYTE0 F32(U32) |l| from_integer(l, l.u(0).to_le_bytes()[0].into(), SINGLE);
        V_CVT_F32_UBYTE1 F32(U32) |l| from_integer(l, l.u(0).to_le_bytes()[1].into(), SINGLE);
        V_CVT_F32_UBYTE2 F32(U32) |l| from_integer(l, l.u(0).to_le_bytes()[2].into(), SINGLE);
        V_CVT_F32_UBYTE3 F32(U32) |l| from_integer(l, l.u(0).to_le_bytes()[3].into(), SINGLE);
        V_CVT_OFF_F32_I4 F32(U32) |l| {
            let n = i128::from(l.u(0) & 7) - i128::from(l.u(0) & 8);
            Exact::integer(n).scaled(-4).round(SINGLE, Round::Nearest).into()
        };
        V_CVT_F16_F32 F16(F32) |l| convert(l.mode, l.w(0), SINGLE, HALF).into();
        V_CVT_F32_F16 F32(F16) |l| convert(l.mode, l.w(0), HALF, SINGLE).into();
        V_CVT_F32_F64 F32(F64) |l| convert(l.mode, l.w(0), DOUBLE, SINGLE).into();
        V_CVT_F64_F32 F64(F32) |l| convert(l.mode, l.w(0), SINGLE, DOUBLE).into();
        V_CVT_F32_BF16 F32(Bf16) |l| {
            let x = l.w(0) << 16;
            (if SINGLE.is_nan(x) { x | SINGLE.quiet() } else { l.mode.input(SINGLE, x) }).into()
        };
        V_CVT_PKRTZ_F16_F32 U32(F32, F32) |l| {
            let m = rounding(l.mode, 3);
            (convert(m, l.w(0), SINGLE, HALF) | convert(m, l.w(1), SINGLE, HALF) << 16).into()
        };
        V_CVT_PK_F16_F32 U32(F32, F32) |l| {
            let m = rounding(l.mode, 0);
            (convert(m, l.w(0), SINGLE, HALF) | convert(m, l.w(1), SINGLE, HALF) << 16).into()
        };
        V_CVT_PK_BF16_F32 U32(F32, F32) |l| {
            // Subnormal results stay.
            let m = Mode(rounding(l.mode, 0).0 | 0x80);
            (convert(m, l.w(0), SINGLE, BFLOAT) | convert(m, l.w(1), SINGLE, BFLOAT) << 16).into()
        };
        V_CVT_NORM_I16_F16 I16(F16) |l| normalized(HALF, l.w(0), true);
        V_CVT_NORM_U16_F16 U16(F16) |l| normalized(HALF, l.w(0), false);
        V_CVT_PKNORM_I16_F16 U32(F16, F16) |l| normalized(HALF, l.w(0), true) | normalized(HALF, l.w(1), true) << 16;
        V_CVT_PKNORM_U16_F16 U32(F16, F16) |l| normalized(HALF, l.w(0), false) | normalized(HALF, l.w(1), false) << 16;
        V_CVT_PKNORM_I16_F32 U32(F32, F32) |l| normalized(SINGLE, l.w(0), true) | normalized(SINGLE, l.w(1), true) << 16;
        V_CVT_PKNORM_U16_F32 U32(F32, F32) |l| normalized(SINGLE, l.w(0), false) | normalized(SINGLE, l.w(1), false) << 16;
        V_CVT_PK_U8_F32 U32(F32, U32, U32) |l| {
            let byte = to_integer(SINGLE, l.w(0), &Exact::integer(0), Round::Nearest, (0, 255)) as u8;
            let mut bytes = l.u(2).to_le_bytes();
            bytes[l.u(1) as usize % 4] = byte;
            u32::from_le_bytes(bytes).into()
        };
        V_CVT_F32_FP8 U32(B32) |l| eight(l, false).decode(l.w(0)).into();
        V_CVT_F32_BF8 U32(B32) |l| eight(l, true).decode(l.w(0)).into();
        V_CVT_PK_F32_FP8 U64(B32) |l| {
            u128::from(eight(l, false).decode(l.w(0))) | u128::from(eight(l, false).decode(l.w(0) >> 8)) << 32
        };
        V_CVT_PK_F32_BF8 U64(B32) |l| {
            u128::from(eight(l, true).decode(l.w(0))) | u128::from(eight(l, true).decode(l.w(0) >> 8)) << 32
        };
    };
    let (one, two) = ([Ty::B32], [Ty::F32; 2]);
    all.extend([
        custom(Op::V_CVT_PK_FP8_F32, Ty::U32, &two, "v_cvt_pk_fp8_f32 v12, v4, v6", |l| {
            l.old & 0xFFFF_0000 | pack8(l, false)
        }),
        custom(Op::V_CVT_PK_BF8_F32, Ty::U32, &two, "v_cvt_pk_bf8_f32 v12, v4, v6 op_sel:[0,0,1]", |l| {
            l.old & 0xFFFF | pack8(l, true) << 16
        }),
        custom(Op::V_CVT_PK_FP8_F32, Ty::U32, &two, "v_cvt_pk_fp8_f32 v12, -v4, |v6| op_sel:[0,0,1]", |l| {
            let x = [l.x[0] ^ 1 << 31, l.x[1] & !(1 << 31), 0];
            l.old & 0xFFFF | pack8(&Lane { x, ..*l }, false) << 16
        }),
        custom(Op::V_CVT_F32_FP8, Ty::U32, &one, "v_cvt_f32_fp8_sdwa v12, v4 src0_sel:BYTE_3", |l| {
            eight(l, false).decode(l.w(0) >> 24).into()
        }),
        custom(Op::V_CVT_F32_BF8, Ty::U32, &one, "v_cvt_f32_bf8_sdwa v12, v4 src0_sel:BYTE_1", |l| {
            eight(l, true).decode(l.w(0) >> 8).into()
        }),
        custom(
            Op::V_CVT_PK_F32_BF8,
            Ty::U64,
            &one,
            "v_cvt_pk_f32_bf8_sdwa v[12:13], v4 src0_sel:WORD_1",
            |l| {
                let f = eight(l, true);
                u128::from(f.decode(l.w(0) >> 16)) | u128::from(f.decode(l.w(0) >> 24)) << 32
            },
        ),
    ]);
    all
}

/// What the manual makes of an operand of a division that would lose bits, and whether the quotient is to be unscaled.
fn div_scale(l: &Lane, f: Format) -> (u128, bool) {
    let [s0, s1, s2] = [l.w(0), l.w(1), l.w(2)];
    let (half, far, tiny) = if f == SINGLE { (64, 96, 23) } else { (128, 768, 53) };
    let scaled = |n: i32| {
        if f.is_nan(s0) {
            return l.mode.nan(f, &[s0]).into();
        }
        match f.value(s0) {
            Value::Finite(x) => x.scaled(n).round(f, Round::Nearest).into(),
            value => u128::from(value.round(f, Round::Nearest)),
        }
    };
    let finite = |x: u64| !f.is_nan(x) && !f.is_infinite(x);
    if !finite(s1) || !finite(s2) {
        return (scaled(0), false);
    }
    if f.is_zero(s1) || f.is_zero(s2) {
        return (if f.is_nan(s0) { scaled(0) } else { f.default_nan().into() }, false);
    }
    let equal = |x: u64, y: u64| f.value(x).compare(&f.value(y)).is_some_and(|o| o.is_eq());
    let smallest = Exact::new(false, 1, 1 - f.bias());
    let magnitude = |x: u64| f.exact(x & !f.sign());
    // Exactly: 1 / s1 and s2 / s1 are subnormal.
    let reciprocal = smallest.times(&magnitude(s1)).compare(&Exact::integer(1)).is_gt();
    let quotient = smallest.times(&magnitude(s1)).compare(&magnitude(s2)).is_gt();
    let only = |x: u64, n: i32| scaled(if equal(s0, x) { n } else { 0 });
    if f.field(s2) - f.field(s1) >= far {
        (only(s1, half), true)
    } else if f.is_subnormal(s1) {
        (scaled(half), false)
    } else if reciprocal && quotient {
        (only(s1, -half), true)
    } else if reciprocal {
        (scaled(-half), false)
    } else if quotient {
        (only(s2, half), true)
    } else if f.field(s2) <= tiny {
        (scaled(half), false)
    } else {
        (scaled(0), false)
    }
}

/// A fused multiply-add, scaled up or down by the size of the addend where the mask says so; rounded once.
fn div_fmas(l: &Lane, f: Format) -> u128 {
    let x: Vec<u64> = (0..3).map(|i| l.w(i)).collect();
    let half = if f == SINGLE { 64 } else { 128 };
    let large = f.field(x[2]) > f.bias();
    let scale = match (l.mask, large) {
        (false, _) => 0,
        (_, true) => half,
        (_, false) => -half,
    };
    l.mode
        .arithmetic(f, &x, |v, r| match v[0].times(&v[1]).plus(&v[2], r) {
            Value::Finite(sum) => Value::Finite(sum.scaled(scale)),
            other => other,
        })
        .into()
}

/// The special cases of a quotient.
fn div_fixup(l: &Lane, f: Format) -> u128 {
    let [q, d, n] = [l.w(0), l.w(1), l.w(2)];
    let sign = (d ^ n) & f.sign();
    let out = if f.is_nan(n) {
        n | f.quiet()
    } else if f.is_nan(d) {
        d | f.quiet()
    } else if f.is_zero(d) && f.is_zero(n) || f.is_infinite(d) && f.is_infinite(n) {
        f.default_nan() | f.sign()
    } else if f.is_zero(d) || f.is_infinite(n) {
        sign | f.infinity()
    } else if f.is_infinite(d) || f.is_zero(n) {
        sign
    } else {
        let difference = f.field(n) - f.field(d);
        // Far below the smallest number, or never a number.
        let underflow = if f == SINGLE { -150 } else { -1075 };
        if f != HALF && difference < underflow {
            sign
        } else if f.is_nan(q) {
            if f == HALF {
                q | f.quiet()
            } else if difference > 0 {
                sign | f.infinity()
            } else {
                sign
            }
        } else {
            sign | q & !f.sign()
        }
    };
    out.into()
}

fn division(f: Format) -> Vec<Model> {
    match f {
        HALF => bits! {
            V_DIV_FIXUP_F16 F16(F16, F16, F16) |l| div_fixup(l, HALF);
            V_DIV_FIXUP_LEGACY_F16 F16(F16, F16, F16) |l| div_fixup(l, HALF);
        },
        SINGLE => {
            let mut all = bits! {
                V_DIV_FMAS_F32 F32(F32, F32, F32) |l| div_fmas(l, SINGLE);
                V_DIV_FIXUP_F32 F32(F32, F32, F32) |l| div_fixup(l, SINGLE);
            };
            let f = Body::Flag(|l| div_scale(l, SINGLE));
            all.push(model(Op::V_DIV_SCALE_F32, Ty::F32, &[Ty::F32; 3], f));
            all.extend(scaled_operands(SINGLE));
            all
        }
        _ => {
            let mut all = bits! {
                V_DIV_FMAS_F64 F64(F64, F64, F64) |l| div_fmas(l, DOUBLE);
                V_DIV_FIXUP_F64 F64(F64, F64, F64) |l| div_fixup(l, DOUBLE);
            };
            let f = Body::Flag(|l| div_scale(l, DOUBLE));
            all.push(model(Op::V_DIV_SCALE_F64, Ty::F64, &[Ty::F64; 3], f));
            all.extend(scaled_operands(DOUBLE));
            all
        }
    }
}

/// `v_div_scale` as divisions use it: the first operand is the denominator or the numerator.
fn scaled_operands(f: Format) -> Vec<Model> {
    let flag = |op, ty, text, f| Model { text: Some(text), ..model(op, ty, &[ty; 2], Body::Flag(f)) };
    if f == SINGLE {
        vec![
            flag(Op::V_DIV_SCALE_F32, Ty::F32, "v_div_scale_f32 v12, s[24:25], v4, v4, v6", |l| {
                div_scale(&Lane { x: [l.x[0], l.x[0], l.x[1]], ..*l }, SINGLE)
            }),
            flag(Op::V_DIV_SCALE_F32, Ty::F32, "v_div_scale_f32 v12, s[24:25], v6, v4, v6", |l| {
                div_scale(&Lane { x: [l.x[1], l.x[0], l.x[1]], ..*l }, SINGLE)
            }),
        ]
    } else {
        vec![
            flag(
                Op::V_DIV_SCALE_F64,
                Ty::F64,
                "v_div_scale_f64 v[12:13], s[24:25], v[4:5], v[4:5], v[6:7]",
                |l| div_scale(&Lane { x: [l.x[0], l.x[0], l.x[1]], ..*l }, DOUBLE),
            ),
            flag(
                Op::V_DIV_SCALE_F64,
                Ty::F64,
                "v_div_scale_f64 v[12:13], s[24:25], v[6:7], v[4:5], v[6:7]",
                |l| div_scale(&Lane { x: [l.x[1], l.x[0], l.x[1]], ..*l }, DOUBLE),
            ),
        ]
    }
}

pub fn all() -> Vec<Model> {
    let mut list = models();
    for f in [HALF, SINGLE, DOUBLE] {
        list.extend(division(f));
    }
    list
}

#[test]
fn conversions() {
    for f in [HALF, SINGLE, DOUBLE] {
        check_all(&models(), &waves_of(f, 64), 2);
    }
}

#[test]
fn division_helpers() {
    for f in [HALF, SINGLE, DOUBLE] {
        check_all(&division(f), &waves_of(f, 96), 30);
    }
}

/// Quotients and roots as the compiler makes them are rounded correctly, subnormal ones included.
#[test]
fn quotients_and_roots() {
    let source = r#"
KERNEL void singles(const float *a, const float *b, float *q, float *r) {
  int i = BID * 64 + TID; q[i] = a[i] / b[i]; r[i] = __builtin_sqrtf(a[i]);
}
KERNEL void doubles(const double *a, const double *b, double *q, double *r) {
  int i = BID * 64 + TID; q[i] = a[i] / b[i]; r[i] = __builtin_sqrt(a[i]);
}"#;
    let mut random = Random(11);
    for cpu in ["gfx942", "gfx950"] {
        let rig = Rig::new(options(cpu), &hip(cpu, "-O3", source));
        for f in [SINGLE, DOUBLE] {
            let special = special_values(f);
            let mut pairs: Vec<(u64, u64)> =
                special.iter().flat_map(|a| special.iter().map(move |b| (*a, *b))).collect();
            while pairs.len() % 64 != 0 || pairs.len() < 8192 {
                let mut word = || (u64::from(random.next()) << 32 | u64::from(random.next())) & f.mask();
                pairs.push((word(), word()));
            }
            let n = pairs.len();
            let (quotients, roots) = if f == SINGLE {
                let word = |x: &u64| *x as u32;
                let a = rig.upload("a", &pairs.iter().map(|(a, _)| word(a)).collect::<Vec<_>>());
                let b = rig.upload("b", &pairs.iter().map(|(_, b)| word(b)).collect::<Vec<_>>());
                let (q, r) = (rig.upload("q", &vec![0u32; n]), rig.upload("r", &vec![0u32; n]));
                rig.launch("singles", n as u32 / 64, 64, &Args::new().push(a).push(b).push(q).push(r))
                    .unwrap();
                let wide = |addr| rig.download::<u32>(addr, n).into_iter().map(u64::from).collect::<Vec<_>>();
                (wide(q), wide(r))
            } else {
                let a = rig.upload("a", &pairs.iter().map(|(a, _)| *a).collect::<Vec<_>>());
                let b = rig.upload("b", &pairs.iter().map(|(_, b)| *b).collect::<Vec<_>>());
                let (q, r) = (rig.upload("q", &vec![0u64; n]), rig.upload("r", &vec![0u64; n]));
                rig.launch("doubles", n as u32 / 64, 64, &Args::new().push(a).push(b).push(q).push(r))
                    .unwrap();
                (rig.download(q, n), rig.download(r, n))
            };
            for (i, (a, b)) in pairs.iter().enumerate() {
                let same = |got: u64, want: u64, what: &str| {
                    let nan = f.is_nan(got) && f.is_nan(want);
                    assert!(
                        nan || got == want,
                        "{cpu} {what} of {a:#x}, {b:#x}: got {got:#x}, want {want:#x}"
                    );
                };
                let quotient = match (f.value(*a), f.value(*b)) {
                    (Value::Finite(x), Value::Finite(y)) if !y.is_zero() => Value::Finite(x.over(&y)),
                    (x, Value::Finite(zero))
                        if zero.is_zero() && !matches!(&x, Value::Finite(x) if x.is_zero()) =>
                    {
                        match x {
                            Value::Nan => Value::Nan,
                            x => Value::Infinity(x.negative() != zero.negative),
                        }
                    }
                    (Value::Infinity(x), Value::Finite(y)) => Value::Infinity(x != y.negative),
                    (Value::Finite(x), Value::Infinity(y)) => {
                        Value::Finite(Exact::new(x.negative != y, 0, 0))
                    }
                    _ => Value::Nan,
                };
                same(quotients[i], quotient.round(f, Round::Nearest), "quotient");
                same(roots[i], crate::semantics::float::root(&f.value(*a)).round(f, Round::Nearest), "root");
            }
        }
    }
}
