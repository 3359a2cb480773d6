//! Conversions to and from the narrow formats, scaled or not, and the instructions that go with them.

use super::lanes::{Modes, chunks};
use super::narrow::{Narrow, Rounding, e8m0, prng};
use super::{Ctl, Env, Handler, Uop, float, lanes1};
use crate::isa::{Inst, Op};
use crate::tables::{Format, Scaled};
use crate::wave::{CHUNK, Wave};

/// `Uop::extra` holds `op_sel` in its low bits, and this for bf8 or bf16.
const OTHER: u32 = 16;

/// The 8-bit formats of the target.
fn fp8(e: &Env<'_>, bf8: bool) -> Narrow {
    match (e.program.fnuz, bf8) {
        (true, false) => Narrow::E4M3_FNUZ,
        (true, true) => Narrow::E5M2_FNUZ,
        (false, false) => Narrow::E4M3,
        (false, true) => Narrow::E5M2,
    }
}

/// `v_cvt_f32_fp8`, `v_cvt_f32_bf8`: the low byte.
fn from_fp8(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let format = fp8(e, u.extra & OTHER != 0);
    for (k, mask) in chunks(w.exec()) {
        let r = lanes1(w.chunk(u.a, k), |x| format.decode(x).to_bits());
        w.set_chunk(u.d, k, mask, r);
    }
    Ctl::Next
}

/// `v_cvt_pk_f32_fp8`, `v_cvt_pk_f32_bf8`: the two low bytes.
fn from_fp8_pair(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let format = fp8(e, u.extra & OTHER != 0);
    for (k, mask) in chunks(w.exec()) {
        let x = w.chunk(u.a, k);
        w.set_chunk(u.d, k, mask, lanes1(x, |x| format.decode(x).to_bits()));
        w.set_chunk(u.d + 1, k, mask, lanes1(x, |x| format.decode(x >> 8).to_bits()));
    }
    Ctl::Next
}

/// Puts `f(a, b)` into a field of `width` bits of the destination, which keeps the rest.
#[inline(always)]
fn insert(w: &mut Wave, u: &Uop, width: u32, place: u32, f: impl Fn(u32, u32) -> u32) -> Ctl {
    let (shift, field) = (width * place, (1u32 << width) - 1);
    for (k, mask) in chunks(w.exec()) {
        let (a, b, old) = (w.chunk(u.a, k), w.chunk(u.b, k), w.chunk(u.d, k));
        let mut r = [0; CHUNK];
        for l in 0..CHUNK {
            r[l] = old[l] & !(field << shift) | (f(a[l], b[l]) & field) << shift;
        }
        w.set_chunk(u.d, k, mask, r);
    }
    Ctl::Next
}

/// The f64 of an f32 operand, which a conversion reads by MODE.
fn input(x: u32, m: Modes) -> f64 {
    f64::from(f32::from_bits(m.input32(x)))
}

/// `v_cvt_pk_fp8_f32`, `v_cvt_pk_bf8_f32`: one half of the destination, chosen by bit 3 of op_sel.
fn to_fp8_pair(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (format, m) = (fp8(e, u.extra & OTHER != 0), Modes::of(w));
    let code = |x: u32| format.encode(input(x, m), Rounding::Nearest, m.overflow_clamps);
    insert(w, u, 16, u.extra >> 3 & 1, |a, b| code(a) | code(b) << 8)
}

/// `v_cvt_sr_fp8_f32`, `v_cvt_sr_bf8_f32`: one byte of the destination, chosen by bits 3:2 of op_sel.
fn to_fp8_stochastic(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (format, m) = (fp8(e, u.extra & OTHER != 0), Modes::of(w));
    insert(w, u, 8, u.extra >> 2 & 3, |a, b| {
        format.encode(input(a, m), Rounding::Stochastic(b), m.overflow_clamps)
    })
}

/// `v_cvt_sr_f16_f32`, `v_cvt_sr_bf16_f32`: one half of the destination, chosen by bit 3 of op_sel.
fn to_half_stochastic(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let m = Modes::of(w);
    let bf16 = u.extra & OTHER != 0;
    let format = if bf16 { Narrow::BF16 } else { Narrow::F16 };
    insert(w, u, 16, u.extra >> 3 & 1, |a, b| {
        let code = format.encode(input(a, m), Rounding::Stochastic(b), m.overflow_clamps && !bf16);
        if bf16 { code } else { m.output16(code) }
    })
}

/// `v_ashr_pk_i8_i32`, `v_ashr_pk_u8_i32` (`OTHER`): two shifted and saturated bytes to one half of the destination.
fn shift_to_bytes(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let (low, high) = if u.extra & OTHER != 0 { (0, 255) } else { (-128, 127) };
    let place = u.extra >> 3 & 1;
    for (k, mask) in chunks(w.exec()) {
        let (a, b, n, old) = (w.chunk(u.a, k), w.chunk(u.b, k), w.chunk(u.c, k), w.chunk(u.d, k));
        let mut r = [0; CHUNK];
        for l in 0..CHUNK {
            let byte = |x: u32| (x as i32 >> (n[l] & 31)).clamp(low, high) as u32 & 0xFF;
            r[l] = old[l] & !(0xFFFF << (16 * place)) | (byte(a[l]) | byte(b[l]) << 8) << (16 * place);
        }
        w.set_chunk(u.d, k, mask, r);
    }
    Ctl::Next
}

/// `v_prng_b32`.
fn random(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    for (k, mask) in chunks(w.exec()) {
        let r = lanes1(w.chunk(u.a, k), prng);
        w.set_chunk(u.d, k, mask, r);
    }
    Ctl::Next
}

/// The handler of a conversion without scale; sets `extra` from `op_sel`.
pub(crate) fn handler(op: Op, op_sel: u8, extra: &mut u32) -> Option<Handler> {
    let (handler, other): (Handler, bool) = match op {
        Op::V_CVT_F32_FP8 => (from_fp8, false),
        Op::V_CVT_F32_BF8 => (from_fp8, true),
        Op::V_CVT_PK_F32_FP8 => (from_fp8_pair, false),
        Op::V_CVT_PK_F32_BF8 => (from_fp8_pair, true),
        Op::V_CVT_PK_FP8_F32 => (to_fp8_pair, false),
        Op::V_CVT_PK_BF8_F32 => (to_fp8_pair, true),
        Op::V_CVT_SR_FP8_F32 => (to_fp8_stochastic, false),
        Op::V_CVT_SR_BF8_F32 => (to_fp8_stochastic, true),
        Op::V_CVT_SR_F16_F32 => (to_half_stochastic, false),
        Op::V_CVT_SR_BF16_F32 => (to_half_stochastic, true),
        Op::V_ASHR_PK_I8_I32 => (shift_to_bytes, false),
        Op::V_ASHR_PK_U8_I32 => (shift_to_bytes, true),
        Op::V_PRNG_B32 => (random, false),
        _ => return None,
    };
    *extra = u32::from(op_sel) | if other { OTHER } else { 0 };
    Some(handler)
}

impl Format {
    fn of(name: &str) -> Option<Format> {
        Some(Format::Narrow(match name {
            "F32" => return Some(Format::F32),
            "F16" => Narrow::F16,
            "BF16" => Narrow::BF16,
            "FP8" => Narrow::E4M3,
            "BF8" => Narrow::E5M2,
            "FP6" => Narrow::E2M3,
            "BF6" => Narrow::E3M2,
            "FP4" => Narrow::E2M1,
            _ => return None,
        }))
    }

    fn bits(self) -> u32 {
        match self {
            Format::F32 => 32,
            Format::Narrow(n) => n.bits,
        }
    }

    /// Denormals of f32 and f16 follow MODE, those of the narrower formats are kept (bf16 too: unverified).
    fn decode(self, raw: u32, m: Modes) -> f64 {
        match self {
            Format::F32 => input(raw, m),
            Format::Narrow(Narrow::F16) => f64::from(Narrow::F16.decode(m.input16(raw & 0xFFFF))),
            Format::Narrow(n) => f64::from(n.decode(raw)),
        }
    }

    fn encode(self, x: f64, rounding: Rounding, m: Modes) -> u32 {
        match self {
            Format::F32 if x.is_nan() => float::NAN32,
            Format::F32 => (x as f32).to_bits(),
            // fp16_ovfl clamps every 8-bit result, and what overflows f16; bf16 does not know it.
            Format::Narrow(n) => {
                let clamps = n.bits == 8 || n == Narrow::F16 && x.is_finite();
                n.encode(x, rounding, m.overflow_clamps && clamps)
            }
        }
    }
}

impl Scaled {
    pub fn of(inst: &Inst) -> Option<Scaled> {
        let name = inst.op.info().name.strip_prefix("V_CVT_SCALEF32_")?;
        let mut parts: Vec<&str> = name.split('_').collect();
        let mut take = |part: &str| parts.first() == Some(&part) && !parts.remove(0).is_empty();
        let stochastic = take("SR");
        let interleaved = take("2XPK16");
        let count = if interleaved || take("PK32") {
            32
        } else if take("PK") {
            2
        } else {
            1
        };
        let [to, from] = parts[..] else { return None };
        let (to, from) = (Format::of(to)?, Format::of(from)?);
        let op_sel = u32::from(inst.op_sel);
        Some(Scaled { to, from, count, interleaved, stochastic, op_sel, neg: inst.neg, abs: inst.abs })
    }

    fn narrows(&self) -> bool {
        self.to.bits() < self.from.bits()
    }

    /// Two f32 come in registers of their own.
    fn separate(&self) -> bool {
        self.interleaved || self.count == 2 && self.from == Format::F32 && !self.stochastic
    }

    /// The random number of the first element, the scale: which source each is.
    fn operands(&self) -> (usize, usize) {
        (1, if self.stochastic || self.separate() { 2 } else { 1 })
    }

    /// The place of the elements in a source or destination that holds more: fields of all elements' size.
    fn source_field(&self) -> u32 {
        match self.count * self.from.bits() {
            // Widening selects its byte or word, a single f16 is the low half.
            8 if !self.narrows() => 8 * (self.op_sel & 3),
            16 if !self.narrows() => 16 * (self.op_sel & 1),
            _ => 0,
        }
    }

    /// First bit and width of the destination's field; `None` where whole registers are written.
    fn destination_field(&self) -> Option<(u32, u32)> {
        match self.count * self.to.bits() {
            8 => Some((8 * (self.op_sel >> 2 & 3), 8)),
            16 => Some((16 * (self.op_sel >> 3 & 1), 16)),
            _ => None,
        }
    }
}

/// The `bits` bits from bit `at` on of a lane's registers.
fn field(registers: &[u32], at: u32, bits: u32) -> u32 {
    let word = |i: u32| u64::from(registers.get(i as usize).copied().unwrap_or(0));
    ((word(at / 32) | word(at / 32 + 1) << 32) >> (at % 32)) as u32 & (!0 >> (32 - bits))
}

/// Every scaled conversion, lane by lane. `Uop::imm` is its index in the program.
pub(crate) fn scaled(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let Some(c) = e.program.conversions.get(u.imm as usize).copied() else { return Ctl::Next };
    let (m, exec) = (Modes::of(w), w.exec());
    let sources = [u.a, u.b, u.c];
    let (random, scale) = c.operands();
    let registers = |bits: u32| bits.div_ceil(32) as usize;
    let per_source = if c.separate() { c.count / 2 } else { c.count };
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let exponent = e8m0(w.lane(sources[scale], lane) >> 23);
        let mut seed = w.lane(sources[random], lane);
        let mut from = [[0u32; 32]; 2];
        for (i, from) in from.iter_mut().enumerate() {
            for (r, word) in from.iter_mut().enumerate().take(registers(per_source * c.from.bits())) {
                *word = w.lane(sources[i] + r as u16, lane);
            }
        }
        let mut out = [0u32; 32];
        for i in 0..c.count {
            let (source, index) = if c.separate() { (i as usize % 2, i / 2) } else { (0, i) };
            let raw = field(&from[source], c.source_field() + index * c.from.bits(), c.from.bits());
            let mut x = c.from.decode(raw, m);
            if c.abs >> source & 1 != 0 {
                x = x.abs();
            }
            if c.neg >> source & 1 != 0 {
                x = -x;
            }
            let rounding = if c.stochastic { Rounding::Stochastic(seed) } else { Rounding::Nearest };
            seed = prng(seed);
            // A NaN scale makes NaNs. Every scaled value is exact in f64.
            let factor = exponent.map_or(f64::NAN, |n| {
                let n = if c.narrows() { -n } else { n };
                f64::from_bits(((1023 + n) as u64) << 52)
            });
            let code = c.to.encode(x * factor, rounding, m);
            let at = i * c.to.bits();
            let wide = u64::from(code) << (at % 32);
            out[at as usize / 32] |= wide as u32;
            if let Some(next) = out.get_mut(at as usize / 32 + 1) {
                *next |= (wide >> 32) as u32;
            }
        }
        match c.destination_field() {
            Some((at, bits)) => {
                let mask = (!0u32 >> (32 - bits)) << at;
                let old = w.lane(u.d, lane);
                w.set_lane(u.d, lane, old & !mask | out[0] << at & mask);
            }
            None => {
                for (r, word) in out.iter().enumerate().take(registers(c.count * c.to.bits())) {
                    w.set_lane(u.d + r as u16, lane, *word);
                }
            }
        }
    }
    Ctl::Next
}
