//! Exact numbers, integers of any size times powers of two, and their rounding to the formats of the ISA. Nothing here
//! uses the host's floating point.

use std::cmp::Ordering;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    Nearest,
    Up,
    Down,
    Zero,
}

/// A binary format by the widths of its fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    pub exponent: u32,
    pub fraction: u32,
}

pub const HALF: Format = Format { exponent: 5, fraction: 10 };
pub const BFLOAT: Format = Format { exponent: 8, fraction: 7 };
pub const SINGLE: Format = Format { exponent: 8, fraction: 23 };
pub const DOUBLE: Format = Format { exponent: 11, fraction: 52 };

impl Format {
    pub fn bits(self) -> u32 {
        1 + self.exponent + self.fraction
    }
    pub fn mask(self) -> u64 {
        !0 >> (64 - self.bits())
    }
    pub fn sign(self) -> u64 {
        1 << (self.exponent + self.fraction)
    }
    pub fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }
    pub fn infinity(self) -> u64 {
        ((1 << self.exponent) - 1) << self.fraction
    }
    pub fn quiet(self) -> u64 {
        1 << (self.fraction - 1)
    }
    pub fn default_nan(self) -> u64 {
        self.infinity() | self.quiet()
    }
    pub fn one(self) -> u64 {
        (self.bias() as u64) << self.fraction
    }
    pub fn is_nan(self, x: u64) -> bool {
        x & (self.sign() - 1) > self.infinity()
    }
    pub fn is_signalling(self, x: u64) -> bool {
        self.is_nan(x) && x & self.quiet() == 0
    }
    pub fn is_infinite(self, x: u64) -> bool {
        x & (self.sign() - 1) == self.infinity()
    }
    pub fn is_zero(self, x: u64) -> bool {
        x & (self.sign() - 1) == 0
    }
    pub fn is_negative(self, x: u64) -> bool {
        x & self.sign() != 0
    }
    pub fn is_subnormal(self, x: u64) -> bool {
        !self.is_zero(x) && x & self.infinity() == 0
    }
    /// A subnormal becomes a zero of its sign.
    pub fn flush(self, x: u64) -> u64 {
        if self.is_subnormal(x) { x & self.sign() } else { x }
    }
    /// The exponent field.
    pub fn field(self, x: u64) -> i32 {
        ((x & self.infinity()) >> self.fraction) as i32
    }
    pub fn value(self, x: u64) -> Value {
        let negative = self.is_negative(x);
        if self.is_nan(x) {
            return Value::Nan;
        }
        if self.is_infinite(x) {
            return Value::Infinity(negative);
        }
        let fraction = x & ((1 << self.fraction) - 1);
        let (field, hidden) = (self.field(x), u64::from(self.field(x) != 0) << self.fraction);
        let exponent = field.max(1) - self.bias() - self.fraction as i32;
        Value::Finite(Exact::new(negative, u128::from(fraction | hidden), exponent))
    }
    /// The exact value of a finite number.
    pub fn exact(self, x: u64) -> Exact {
        match self.value(x) {
            Value::Finite(x) => x,
            _ => panic!("{x:#x} is not finite"),
        }
    }
}

/// A natural number, the low word first, without leading zero words.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Natural(Vec<u64>);

impl Natural {
    fn new(x: u128) -> Natural {
        Natural(vec![x as u64, (x >> 64) as u64]).trimmed()
    }
    fn trimmed(mut self) -> Natural {
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
        self
    }
    fn word(&self, i: usize) -> u64 {
        self.0.get(i).copied().unwrap_or(0)
    }
    fn length(&self) -> i32 {
        self.0.last().map_or(0, |top| 64 * self.0.len() as i32 - top.leading_zeros() as i32)
    }
    fn shifted_left(&self, n: u32) -> Natural {
        let (words, bits) = ((n / 64) as usize, n % 64);
        let mut out = vec![0; words];
        for i in 0..=self.0.len() {
            let low = if bits == 0 || i == 0 { 0 } else { self.word(i - 1) >> (64 - bits) };
            out.push(self.word(i) << bits | low);
        }
        Natural(out).trimmed()
    }
    /// The number shifted right, and how what fell out compares to a half.
    fn shifted_right(&self, n: u32) -> (Natural, Ordering, bool) {
        let (words, bits) = ((n / 64) as usize, n % 64);
        let mut out = vec![];
        for i in words..self.0.len() {
            let high = if bits == 0 { 0 } else { self.word(i + 1) << (64 - bits) };
            out.push(self.word(i) >> bits | high);
        }
        let bit = |i: u32| self.word((i / 64) as usize) >> (i % 64) & 1 != 0;
        let any_below = |i: u32| {
            (0..(i / 64) as usize).any(|w| self.word(w) != 0)
                || i % 64 != 0 && self.word((i / 64) as usize) << (64 - i % 64) != 0
        };
        let (half, below) = if n == 0 { (false, false) } else { (bit(n - 1), any_below(n - 1)) };
        let to_half = match (half, below) {
            (false, _) => Ordering::Less,
            (true, false) => Ordering::Equal,
            (true, true) => Ordering::Greater,
        };
        (Natural(out).trimmed(), to_half, half || below)
    }
    fn plus(&self, other: &Natural) -> Natural {
        let mut carry = 0u128;
        let n = self.0.len().max(other.0.len()) + 1;
        let out = (0..n).map(|i| {
            carry += u128::from(self.word(i)) + u128::from(other.word(i));
            let word = carry as u64;
            carry >>= 64;
            word
        });
        Natural(out.collect()).trimmed()
    }
    /// The difference; `other` is no larger.
    fn minus(&self, other: &Natural) -> Natural {
        let mut borrow = 0i128;
        let out = (0..self.0.len()).map(|i| {
            let d = i128::from(self.word(i)) - i128::from(other.word(i)) + borrow;
            borrow = d >> 64;
            d as u64
        });
        Natural(out.collect()).trimmed()
    }
    fn cmp(&self, other: &Natural) -> Ordering {
        let n = self.0.len().max(other.0.len());
        (0..n).rev().map(|i| self.word(i).cmp(&other.word(i))).find(|o| o.is_ne()).unwrap_or(Ordering::Equal)
    }
    fn times(&self, other: &Natural) -> Natural {
        let mut sum = Natural(vec![]);
        for (i, x) in self.0.iter().enumerate() {
            for (j, y) in other.0.iter().enumerate() {
                let product = Natural::new(u128::from(*x) * u128::from(*y));
                sum = sum.plus(&product.shifted_left(64 * (i + j) as u32));
            }
        }
        sum
    }
    fn divided(&self, by: u64) -> (Natural, u64) {
        let mut out = vec![0; self.0.len()];
        let mut rest = 0u128;
        for i in (0..self.0.len()).rev() {
            let x = rest << 64 | u128::from(self.0[i]);
            (out[i], rest) = ((x / u128::from(by)) as u64, x % u128::from(by));
        }
        (Natural(out).trimmed(), rest as u64)
    }
}

/// The arc tangent of `1 / n` in units of `2^-bits`, rounded down a little.
fn arc_cotangent(n: u64, bits: u32) -> Natural {
    let (mut plus, mut minus) = (Natural(vec![]), Natural(vec![]));
    let mut power = Natural::new(1).shifted_left(bits).divided(n).0;
    let mut k = 1;
    while !power.0.is_empty() {
        let term = power.divided(k).0;
        if k % 4 == 1 {
            plus = plus.plus(&term)
        } else {
            minus = minus.plus(&term)
        }
        power = power.divided(n * n).0;
        k += 2;
    }
    plus.minus(&minus)
}

/// `2 / pi` in units of `2^-bits`, rounded down: by Machin's formula, and division bit by bit.
fn two_over_pi(bits: u32) -> Natural {
    let more = bits + 64;
    let quarter = arc_cotangent(5, more).shifted_left(2).minus(&arc_cotangent(239, more));
    // 1 / (2 * pi / 4).
    let divisor = quarter.shifted_left(1);
    let (mut rest, mut quotient) = (Natural::new(1).shifted_left(more), Natural(vec![]));
    for _ in 0..=bits {
        quotient = quotient.shifted_left(1);
        if rest.cmp(&divisor).is_ge() {
            rest = rest.minus(&divisor);
            quotient = quotient.plus(&Natural::new(1));
        }
        rest = rest.shifted_left(1);
    }
    quotient
}

/// 53 bits of the fraction of `2 / pi` behind the first `skip` ones; it is known to 1201 bits.
pub fn two_over_pi_segment(skip: u32) -> u64 {
    const KNOWN: u32 = 1201;
    static BITS: std::sync::OnceLock<Natural> = std::sync::OnceLock::new();
    let bits = BITS.get_or_init(|| two_over_pi(KNOWN));
    let end = skip + 53;
    let whole = if end <= KNOWN { bits.shifted_right(KNOWN - end).0 } else { bits.shifted_left(end - KNOWN) };
    whole.word(0) & ((1 << 53) - 1)
}

/// `(-1)^negative * magnitude * 2^exponent`.
#[derive(Clone, Debug)]
pub struct Exact {
    pub negative: bool,
    magnitude: Natural,
    exponent: i32,
}

impl Exact {
    pub fn new(negative: bool, magnitude: u128, exponent: i32) -> Exact {
        Exact { negative, magnitude: Natural::new(magnitude), exponent }
    }
    pub fn integer(x: i128) -> Exact {
        Exact::new(x < 0, x.unsigned_abs(), 0)
    }
    pub fn is_zero(&self) -> bool {
        self.magnitude.0.is_empty()
    }
    pub fn scaled(&self, n: i32) -> Exact {
        Exact { exponent: self.exponent + n, ..self.clone() }
    }
    pub fn negated(&self) -> Exact {
        Exact { negative: !self.negative, ..self.clone() }
    }
    pub fn times(&self, other: &Exact) -> Exact {
        Exact {
            negative: self.negative != other.negative,
            magnitude: self.magnitude.times(&other.magnitude),
            exponent: self.exponent + other.exponent,
        }
    }
    /// The sum; a zero of unequal signs is negative where `round` says so.
    pub fn plus(&self, other: &Exact, round: Round) -> Exact {
        if self.is_zero() && other.is_zero() {
            let negative = if self.negative == other.negative { self.negative } else { round == Round::Down };
            return Exact::new(negative, 0, 0);
        }
        let exponent = if self.is_zero() {
            other.exponent
        } else if other.is_zero() {
            self.exponent
        } else {
            self.exponent.min(other.exponent)
        };
        let align = |x: &Exact| x.magnitude.shifted_left((x.exponent - exponent).max(0) as u32);
        let (a, b) = (align(self), align(other));
        let (negative, magnitude) = if self.negative == other.negative || other.is_zero() {
            (self.negative, a.plus(&b))
        } else if self.is_zero() {
            (other.negative, b)
        } else {
            match a.cmp(&b) {
                Ordering::Greater => (self.negative, a.minus(&b)),
                Ordering::Less => (other.negative, b.minus(&a)),
                Ordering::Equal => (round == Round::Down, Natural(vec![])),
            }
        };
        Exact { negative, magnitude, exponent }
    }
    /// The quotient to over 70 bits, and a last bit that stands for the rest.
    pub fn over(&self, other: &Exact) -> Exact {
        let by = other.magnitude.word(0);
        assert!(other.magnitude.0.len() == 1, "a divisor of at most 64 bits");
        let (quotient, rest) = self.magnitude.shifted_left(128).divided(by);
        Exact {
            negative: self.negative != other.negative,
            magnitude: quotient.shifted_left(1).plus(&Natural::new((rest != 0).into())),
            exponent: self.exponent - other.exponent - 129,
        }
    }
    /// The square root of a number of at most 64 bits, to 62 bits and one for the rest.
    pub fn root(&self) -> Exact {
        let m = u128::from(self.magnitude.word(0));
        let mut shift = m.leading_zeros() as i32 - 2;
        shift -= (self.exponent - shift) & 1;
        let wide = m << shift;
        let root = wide.isqrt();
        let rest = root * root != wide;
        Exact::new(false, root << 1 | u128::from(rest), (self.exponent - shift) / 2 - 1)
    }
    /// `[2^(n-1), 2^n)` holds the magnitude.
    pub fn top(&self) -> i32 {
        self.magnitude.length() + self.exponent
    }
    /// The nearest integer in the direction of `round`, ties to even.
    pub fn rounded(&self, round: Round) -> Exact {
        if self.exponent >= 0 {
            return self.clone();
        }
        let (kept, to_half, inexact) = self.magnitude.shifted_right(self.exponent.unsigned_abs());
        let up = increments(self.negative, kept.word(0) & 1 != 0, to_half, inexact, round);
        let magnitude = kept.plus(&Natural::new(up.into()));
        Exact { negative: self.negative, magnitude, exponent: 0 }
    }
    /// An integer that fits, else the nearest end of `low..=high`.
    pub fn saturated(&self, low: i128, high: i128) -> i128 {
        assert!(self.is_zero() || self.exponent >= 0, "an integer");
        if self.top() > 100 {
            return if self.negative { low } else { high };
        }
        let wide = self.magnitude.shifted_left(self.exponent.max(0) as u32);
        let value = i128::from(wide.word(0)) | i128::from(wide.word(1)) << 64;
        (if self.negative { -value } else { value }).clamp(low, high)
    }
    /// Rounded once to a format.
    pub fn round(&self, f: Format, round: Round) -> u64 {
        let sign = if self.negative { f.sign() } else { 0 };
        if self.is_zero() {
            return sign;
        }
        let lowest = 1 - f.bias() - f.fraction as i32;
        let ulp = (self.top() - 1 - f.fraction as i32).max(lowest);
        let kept = if ulp <= self.exponent {
            self.magnitude.shifted_left((self.exponent - ulp) as u32).word(0)
        } else {
            let (kept, to_half, inexact) = self.magnitude.shifted_right((ulp - self.exponent) as u32);
            let up = increments(self.negative, kept.word(0) & 1 != 0, to_half, inexact, round);
            kept.word(0) + u64::from(up)
        };
        // The hidden bit carries into the exponent field.
        let code = u128::from(kept) + (((ulp - lowest) as u128) << f.fraction);
        if code < u128::from(f.infinity()) {
            return sign | code as u64;
        }
        let away = match round {
            Round::Nearest => true,
            Round::Up => !self.negative,
            Round::Down => self.negative,
            Round::Zero => false,
        };
        sign | if away { f.infinity() } else { f.infinity() - 1 }
    }
    /// Which is larger.
    pub fn compare(&self, other: &Exact) -> Ordering {
        let d = self.plus(&other.negated(), Round::Nearest);
        match (d.is_zero(), d.negative) {
            (true, _) => Ordering::Equal,
            (_, true) => Ordering::Less,
            _ => Ordering::Greater,
        }
    }
}

fn increments(negative: bool, odd: bool, to_half: Ordering, inexact: bool, round: Round) -> bool {
    match round {
        Round::Nearest => to_half.is_gt() || to_half.is_eq() && odd,
        Round::Up => inexact && !negative,
        Round::Down => inexact && negative,
        Round::Zero => false,
    }
}

/// What a float stands for.
#[derive(Clone, Debug)]
pub enum Value {
    Nan,
    Infinity(bool),
    Finite(Exact),
}

impl Value {
    pub fn negative(&self) -> bool {
        match self {
            Value::Nan => false,
            Value::Infinity(negative) => *negative,
            Value::Finite(x) => x.negative,
        }
    }
    pub fn negated(&self) -> Value {
        match self {
            Value::Nan => Value::Nan,
            Value::Infinity(negative) => Value::Infinity(!negative),
            Value::Finite(x) => Value::Finite(x.negated()),
        }
    }
    pub fn times(&self, other: &Value) -> Value {
        let negative = self.negative() != other.negative();
        match (self, other) {
            (Value::Nan, _) | (_, Value::Nan) => Value::Nan,
            (Value::Finite(a), Value::Finite(b)) => Value::Finite(a.times(b)),
            (Value::Finite(zero), _) | (_, Value::Finite(zero)) if zero.is_zero() => Value::Nan,
            _ => Value::Infinity(negative),
        }
    }
    pub fn plus(&self, other: &Value, round: Round) -> Value {
        match (self, other) {
            (Value::Nan, _) | (_, Value::Nan) => Value::Nan,
            (Value::Finite(a), Value::Finite(b)) => Value::Finite(a.plus(b, round)),
            (Value::Infinity(a), Value::Infinity(b)) if a != b => Value::Nan,
            (Value::Infinity(a), _) | (_, Value::Infinity(a)) => Value::Infinity(*a),
        }
    }
    /// `None` if one of them is no number.
    pub fn compare(&self, other: &Value) -> Option<Ordering> {
        let rank = |x: &Value| match x {
            Value::Infinity(true) => -1,
            Value::Infinity(false) => 1,
            _ => 0,
        };
        match (self, other) {
            (Value::Nan, _) | (_, Value::Nan) => None,
            (Value::Finite(a), Value::Finite(b)) => Some(a.compare(b)),
            _ => Some(rank(self).cmp(&rank(other))),
        }
    }
    /// Bits in a format; a NaN is the default one.
    pub fn round(&self, f: Format, round: Round) -> u64 {
        match self {
            Value::Nan => f.default_nan(),
            Value::Infinity(negative) => f.infinity() | if *negative { f.sign() } else { 0 },
            Value::Finite(x) => x.round(f, round),
        }
    }
}

/// The MODE register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub u32);

/// Round to nearest, keep denormals, IEEE, clamp NaNs.
pub const USUAL: Mode = Mode(0x3F0);

impl Mode {
    pub fn round(self, f: Format) -> Round {
        let bits = if f == SINGLE { self.0 } else { self.0 >> 2 };
        [Round::Nearest, Round::Up, Round::Down, Round::Zero][bits as usize & 3]
    }
    fn keeps(self, f: Format, output: u32) -> bool {
        let first = if f == SINGLE { 4 } else { 6 };
        self.0 >> (first + output) & 1 != 0
    }
    pub fn keeps_outputs(self, f: Format) -> bool {
        self.keeps(f, 1)
    }
    pub fn input(self, f: Format, x: u64) -> u64 {
        if self.keeps(f, 0) { x } else { f.flush(x) }
    }
    pub fn output(self, f: Format, x: u64) -> u64 {
        if self.keeps(f, 1) { x } else { f.flush(x) }
    }
    pub fn dx10_clamp(self) -> bool {
        self.0 >> 8 & 1 != 0
    }
    pub fn ieee(self) -> bool {
        self.0 >> 9 & 1 != 0
    }
    pub fn fp16_ovfl(self) -> bool {
        self.0 >> 23 & 1 != 0
    }

    /// The first NaN of `x`, quiet, else the default one. Which NaN hardware gives is not documented; this pins ours.
    pub fn nan(self, f: Format, x: &[u64]) -> u64 {
        x.iter().find(|x| f.is_nan(**x)).map_or(f.default_nan(), |x| x | f.quiet())
    }

    /// An operation of one format: inputs and result flushed and the result rounded as MODE says.
    pub fn arithmetic(self, f: Format, x: &[u64], op: impl FnOnce(&[Value], Round) -> Value) -> u64 {
        let x: Vec<u64> = x.iter().map(|x| self.input(f, *x)).collect();
        if x.iter().any(|x| f.is_nan(*x)) {
            return self.nan(f, &x);
        }
        let values: Vec<Value> = x.iter().map(|x| f.value(*x)).collect();
        self.finish(f, &op(&values, self.round(f)))
    }

    /// Rounds a result; an f16 that overflows is the largest finite one with FP16_OVFL, but infinity stays.
    pub fn finish(self, f: Format, value: &Value) -> u64 {
        let bits = value.round(f, self.round(f));
        if f == HALF && self.fp16_ovfl() && f.is_infinite(bits) && matches!(value, Value::Finite(_)) {
            return bits - 1;
        }
        self.output(f, bits)
    }
}
