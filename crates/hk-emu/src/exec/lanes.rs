//! The shapes of vector handlers: which registers go in and out, around an operation on one lane.

use super::float::{Round, flush32, flush64, is_nan32, nan32, nan64};
use super::{Ctl, Env, Handler, Host, Level, Portable, Uop, levels};
use crate::wave::{CHUNK, FloatMode, Wave, mode};

/// MODE as lane operations see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Modes {
    /// f32: denormal inputs, outputs become zero.
    pub in32: bool,
    pub out32: bool,
    pub round32: Round,
    /// f16 and f64.
    pub in64: bool,
    pub out64: bool,
    pub round64: Round,
    pub ieee: bool,
    pub overflow_clamps: bool,
}

impl Modes {
    #[inline(always)]
    pub fn of(w: &Wave) -> Modes {
        Modes {
            in32: w.mode & 1 << 4 == 0,
            out32: w.mode & 1 << 5 == 0,
            round32: Round::from_bits(w.mode),
            in64: w.mode & 1 << 6 == 0,
            out64: w.mode & 1 << 7 == 0,
            round64: Round::from_bits(w.mode >> 2),
            ieee: w.mode & mode::IEEE != 0,
            overflow_clamps: w.mode & mode::FP16_OVFL != 0,
        }
    }

    #[inline(always)]
    pub fn input32(self, x: u32) -> u32 {
        if self.in32 { flush32(x) } else { x }
    }

    #[inline(always)]
    pub fn output32(self, x: u32) -> u32 {
        if self.out32 { flush32(x) } else { x }
    }

    #[inline(always)]
    pub fn input64(self, x: u64) -> u64 {
        if self.in64 { flush64(x) } else { x }
    }

    #[inline(always)]
    pub fn output64(self, x: u64) -> u64 {
        if self.out64 { flush64(x) } else { x }
    }

    #[inline(always)]
    pub fn input16(self, x: u32) -> u32 {
        if self.in64 { super::float::flush16(x) } else { x & 0xFFFF }
    }

    /// The bits of a value of f16. One that overflowed is the largest finite one with FP16_OVFL.
    #[inline(always)]
    pub fn result16(self, value: f64, finite: bool) -> u32 {
        let bits = super::float::exact_f16(value);
        if self.overflow_clamps && finite && value.is_infinite() { bits - 1 } else { self.output16(bits) }
    }

    #[inline(always)]
    pub fn output16(self, x: u32) -> u32 {
        if self.out64 { super::float::flush16(x) } else { x }
    }
}

/// An operation on one lane of 32-bit registers.
pub(crate) trait LaneOp {
    /// Sources read.
    const N: usize;
    fn f<H: Host>(a: u32, b: u32, c: u32, m: Modes) -> u32;
}

#[inline(always)]
pub(crate) fn source(w: &Wave, slot: u16, k: usize, used: bool) -> [u32; CHUNK] {
    if used { w.chunk(slot, k) } else { [0; CHUNK] }
}

/// The chunks with active lanes, and which. An iterator, because the body of a large closure would be compiled apart,
/// without the features of the level.
#[inline(always)]
pub(crate) fn chunks(exec: u64) -> impl Iterator<Item = (usize, u32)> {
    (0..4).map(move |k| (k, Wave::exec_chunk(exec, k))).filter(|(_, mask)| *mask != 0)
}

/// Runs a block for each chunk with active lanes; compiled a second time for a full EXEC, without masks and branches. Not by [`chunks`],
/// whose search for the next chunk the compiler makes a loop of vector instructions.
macro_rules! each_chunk {
    ($exec:expr, |$k:ident, $mask:ident| $body:block) => {{
        let exec: u64 = $exec;
        if exec == !0 {
            for $k in 0..4 {
                let $mask = 0xFFFF;
                $body
            }
        } else {
            for $k in 0..4 {
                let $mask = $crate::wave::Wave::exec_chunk(exec, $k);
                if $mask != 0 {
                    $body
                }
            }
        }
    }};
}
pub(crate) use each_chunk;

/// Runs a block for each lane of a mask, in ascending order; compiled a second time for all lanes, without the search for the next one.
macro_rules! each_lane {
    ($mask:expr, |$lane:ident| $body:block) => {{
        let mask: u64 = $mask;
        if mask == !0 {
            for $lane in 0..64 {
                $body
            }
        } else {
            let mut rest = mask;
            while rest != 0 {
                let $lane = rest.trailing_zeros() as usize;
                rest &= rest - 1;
                $body
            }
        }
    }};
}
pub(crate) use each_lane;

/// The same for a block of few host instructions that does the same for any values; it writes by [`put_chunk`]. With `all`, which the host's
/// masks allow, it also runs for chunks without active lanes.
macro_rules! each_light_chunk {
    ($all:expr, $exec:expr, |$k:ident, $mask:ident| $body:block) => {
        if $exec != !0 && $all {
            for $k in 0..4 {
                let $mask = $crate::wave::Wave::exec_chunk($exec, $k);
                $body
            }
        } else {
            $crate::exec::lanes::each_chunk!($exec, |$k, $mask| $body)
        }
    };
}
pub(crate) use each_light_chunk;

/// Writes the lanes of chunk `k` whose bit in `mask` is set, as the host does best.
#[inline(always)]
pub(crate) fn put_chunk<H: Host>(w: &mut Wave, slot: u16, k: usize, mask: u32, value: [u32; CHUNK]) {
    if H::MASKS {
        w.blend_chunk(slot, k, mask, value);
    } else {
        w.set_chunk(slot, k, mask, value);
    }
}

#[inline(always)]
fn lane_chunk<H: Host, O: LaneOp>(w: &Wave, u: &Uop, k: usize, m: Modes) -> [u32; CHUNK] {
    let (a, b, c) = (source(w, u.a, k, O::N > 0), source(w, u.b, k, O::N > 1), source(w, u.c, k, O::N > 2));
    let mut r = [0; CHUNK];
    for l in 0..CHUNK {
        r[l] = O::f::<H>(a[l], b[l], c[l], m);
    }
    r
}

#[inline(always)]
fn lane_body<H: Host, O: LaneOp, const LIGHT: bool>(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let m = Modes::of(w);
    each_light_chunk!(LIGHT && H::MASKS, w.exec(), |k, mask| {
        let r = lane_chunk::<H, O>(w, u, k, m);
        put_chunk::<H>(w, u.d, k, mask, r);
    });
    Ctl::Next
}
levels!(any_lane_handler = lane_body<O: LaneOp> [LIGHT: bool]);

pub(crate) fn lane_handler<O: LaneOp>(level: Level) -> Handler {
    any_lane_handler::<O, false>(level)
}

/// For operations of few host instructions.
pub(crate) fn light_handler<O: LaneOp>(level: Level) -> Handler {
    any_lane_handler::<O, true>(level)
}

/// For instructions too rare to be compiled for each level.
pub(crate) fn lane_portable<O: LaneOp>(_: Level) -> Handler {
    lane_body::<Portable, O, false>
}

/// An operation on one lane whose operands are one or two registers wide.
pub(crate) trait WideOp {
    /// Registers of the destination.
    const DST: usize;
    /// Registers of each source; 0 where unused.
    const SRC: [usize; 3];
    fn f<H: Host>(a: u64, b: u64, c: u64, m: Modes) -> u64;
}

#[inline(always)]
pub(crate) fn wide_source(w: &Wave, slot: u16, k: usize, width: usize) -> [u64; CHUNK] {
    let lo = source(w, slot, k, width > 0);
    let hi = source(w, slot + 1, k, width > 1);
    let mut r = [0; CHUNK];
    for l in 0..CHUNK {
        r[l] = u64::from(lo[l]) | u64::from(hi[l]) << 32;
    }
    r
}

#[inline(always)]
pub(crate) fn set_wide<H: Host>(
    w: &mut Wave,
    slot: u16,
    k: usize,
    mask: u32,
    value: [u64; CHUNK],
    width: usize,
) {
    let (mut lo, mut hi) = ([0; CHUNK], [0; CHUNK]);
    for l in 0..CHUNK {
        lo[l] = value[l] as u32;
        hi[l] = (value[l] >> 32) as u32;
    }
    put_chunk::<H>(w, slot, k, mask, lo);
    if width > 1 {
        put_chunk::<H>(w, slot + 1, k, mask, hi);
    }
}

#[inline(always)]
fn wide_chunk<H: Host, O: WideOp>(w: &Wave, u: &Uop, k: usize, m: Modes) -> [u64; CHUNK] {
    let a = wide_source(w, u.a, k, O::SRC[0]);
    let b = wide_source(w, u.b, k, O::SRC[1]);
    let c = wide_source(w, u.c, k, O::SRC[2]);
    let mut r = [0; CHUNK];
    for l in 0..CHUNK {
        r[l] = O::f::<H>(a[l], b[l], c[l], m);
    }
    r
}

#[inline(always)]
fn wide_body<H: Host, O: WideOp, const LIGHT: bool>(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let m = Modes::of(w);
    each_light_chunk!(LIGHT && H::MASKS, w.exec(), |k, mask| {
        let r = wide_chunk::<H, O>(w, u, k, m);
        set_wide::<H>(w, u.d, k, mask, r, O::DST);
    });
    Ctl::Next
}
levels!(any_wide_handler = wide_body<O: WideOp> [LIGHT: bool]);

pub(crate) fn wide_handler<O: WideOp>(level: Level) -> Handler {
    any_wide_handler::<O, false>(level)
}

/// For operations of few host instructions.
pub(crate) fn light_wide_handler<O: WideOp>(level: Level) -> Handler {
    any_wide_handler::<O, true>(level)
}

/// For instructions too rare to be compiled for each level.
pub(crate) fn wide_portable<O: WideOp>(_: Level) -> Handler {
    wide_body::<Portable, O, false>
}

/// A comparison of one lane.
pub(crate) trait CmpOp {
    /// Registers of each source.
    const SRC: [usize; 2];
    fn f(a: u64, b: u64, m: Modes) -> bool;
}

/// `v_cmp`, and with `extra` `v_cmpx`: a mask with zeros for inactive lanes.
#[inline(always)]
fn cmp_body<H: Host, O: CmpOp>(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let m = Modes::of(w);
    let exec = w.exec();
    let mut out = 0;
    each_light_chunk!(H::MASKS, exec, |k, mask| {
        let mut r = [0; CHUNK];
        if O::SRC[0] == 1 && O::SRC[1] == 1 {
            let (a, b) = (w.chunk(u.a, k), w.chunk(u.b, k));
            for l in 0..CHUNK {
                r[l] = if O::f(u64::from(a[l]), u64::from(b[l]), m) { !0 } else { 0 };
            }
        } else {
            let (a, b) = (wide_source(w, u.a, k, O::SRC[0]), wide_source(w, u.b, k, O::SRC[1]));
            for l in 0..CHUNK {
                r[l] = if O::f(a[l], b[l], m) { !0 } else { 0 };
            }
        }
        out |= u64::from(H::movemask(r) & mask) << (16 * k);
    });
    w.set_s64(u.d as usize, out);
    if u.extra != 0 {
        w.set_exec(out);
    }
    Ctl::Next
}
levels!(cmp_handler = cmp_body<O: CmpOp>);

/// For comparisons too rare to be compiled for each level.
pub(crate) fn cmp_portable<O: CmpOp>(_: Level) -> Handler {
    cmp_body::<Portable, O>
}

/// The basic arithmetic of every float format.
pub(crate) trait Arith {
    /// Sources read.
    const N: usize;
    fn native32<H: Host>(a: f32, b: f32, c: f32) -> f32;
    fn native64<H: Host>(a: f64, b: f64, c: f64) -> f64;
    /// The f16 result of f16 operands.
    fn native16<H: Host>(a: f32, b: f32, c: f32) -> u32;
    /// Any format and rounding mode; no NaN comes in.
    fn soft(a: f64, b: f64, c: f64, format: super::float::Format, round: Round) -> f64;
}

/// One lane in any mode, for the modes that the host does not have.
#[cold]
#[inline(never)]
pub(crate) fn soft32<O: Arith>(a: u32, b: u32, c: u32, m: Modes) -> u32 {
    let x = [a, b, c].map(|x| m.input32(x));
    if x[..O::N].iter().any(|x| is_nan32(*x)) {
        return nan32(&x[..O::N]);
    }
    let [p, q, r] = x.map(|x| f64::from(f32::from_bits(x)));
    let value = O::soft(p, q, r, super::float::F32, m.round32) as f32;
    if value.is_nan() { super::float::NAN32 } else { m.output32(value.to_bits()) }
}

/// One lane in any mode.
#[inline(always)]
fn lane32<O: Arith>(fm: FloatMode, m: Modes, a: u32, b: u32, c: u32) -> u32 {
    let flush = |x: u32| if fm == FloatMode::Flush { flush32(x) } else { x };
    if fm == FloatMode::Other {
        return soft32::<O>(a, b, c, m);
    }
    let x = [flush(a), flush(b), flush(c)];
    let [p, q, r] = x.map(f32::from_bits);
    let value = O::native32::<Portable>(p, q, r);
    if value.is_nan() { nan32(&x[..O::N]) } else { flush(value.to_bits()) }
}

/// One chunk in any mode and with any NaNs, lane by lane.
#[inline(never)]
pub(crate) fn arith32<O: Arith>(
    fm: FloatMode,
    m: Modes,
    a: [u32; CHUNK],
    b: [u32; CHUNK],
    c: [u32; CHUNK],
) -> [u32; CHUNK] {
    let mut r = [0; CHUNK];
    for l in 0..CHUNK {
        r[l] = lane32::<O>(fm, m, a[l], b[l], c[l]);
    }
    r
}

/// The same from and to registers. Takes no arrays, so that the fast path keeps its own in vector registers.
#[cold]
#[inline(never)]
fn slow32<O: Arith>(w: &mut Wave, [d, a, b, c]: [u16; 4], k: usize, mask: u32) {
    let (a, b, c) = (source(w, a, k, O::N > 0), source(w, b, k, O::N > 1), source(w, c, k, O::N > 2));
    let r = arith32::<O>(w.f32_mode, Modes::of(w), a, b, c);
    w.set_chunk(d, k, mask, r);
}

/// A chunk as the host computes it, and whether that can stand: the host's choice of a NaN is its own.
#[inline(always)]
fn native32<H: Host, O: Arith, const FLUSH: bool>(
    w: &Wave,
    [a, b, c]: [u16; 3],
    k: usize,
) -> ([u32; CHUNK], bool) {
    let (mut a, mut b, mut c) =
        (source(w, a, k, O::N > 0), source(w, b, k, O::N > 1), source(w, c, k, O::N > 2));
    if FLUSH {
        (a, b, c) = (super::lanes1(a, flush32), super::lanes1(b, flush32), super::lanes1(c, flush32));
    }
    let mut r = [0; CHUNK];
    let mut nan = 0;
    for l in 0..CHUNK {
        let v = O::native32::<H>(f32::from_bits(a[l]), f32::from_bits(b[l]), f32::from_bits(c[l]));
        r[l] = v.to_bits();
        nan |= if v.is_nan() { 1u32 << l } else { 0 };
    }
    (if FLUSH { super::lanes1(r, flush32) } else { r }, nan == 0)
}

#[inline(always)]
fn arith32_body<H: Host, O: Arith>(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    match w.f32_mode {
        FloatMode::Native => each_chunk!(w.exec(), |k, mask| {
            match native32::<H, O, false>(w, [u.a, u.b, u.c], k) {
                (r, true) => w.set_chunk(u.d, k, mask, r),
                _ => slow32::<O>(w, [u.d, u.a, u.b, u.c], k, mask),
            }
        }),
        FloatMode::Flush => {
            for (k, mask) in chunks(w.exec()) {
                match native32::<H, O, true>(w, [u.a, u.b, u.c], k) {
                    (r, true) => w.set_chunk(u.d, k, mask, r),
                    _ => slow32::<O>(w, [u.d, u.a, u.b, u.c], k, mask),
                }
            }
        }
        FloatMode::Other => {
            for (k, mask) in chunks(w.exec()) {
                slow32::<O>(w, [u.d, u.a, u.b, u.c], k, mask);
            }
        }
    }
    Ctl::Next
}
levels!(arith32_handler = arith32_body<O: Arith>);

/// Packed f32: two registers each; `hi` names the sources of the high result.
#[inline(always)]
fn packed32_body<H: Host, O: Arith>(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let (fm, m) = (w.f32_mode, Modes::of(w));
    let (lo, hi) = ([u.a, u.b, u.c], u.hi);
    each_chunk!(w.exec(), |k, mask| {
        let ((mut r, r_stands), (mut s, s_stands)) = match fm {
            FloatMode::Native => (native32::<H, O, false>(w, lo, k), native32::<H, O, false>(w, hi, k)),
            FloatMode::Flush => (native32::<H, O, true>(w, lo, k), native32::<H, O, true>(w, hi, k)),
            FloatMode::Other => (([0; CHUNK], false), ([0; CHUNK], false)),
        };
        if !(r_stands && s_stands) {
            // Both before either is written: sources may be destinations.
            let all = |x: [u16; 3]| {
                let used = |i: usize| source(w, x[i], k, O::N > i);
                arith32::<O>(fm, m, used(0), used(1), used(2))
            };
            (r, s) = (all(lo), all(hi));
        }
        w.set_chunk(u.d, k, mask, r);
        w.set_chunk(u.d + 1, k, mask, s);
    });
    Ctl::Next
}
levels!(packed32_handler = packed32_body<O: Arith>);

/// f64 arithmetic.
pub(crate) struct Arith64<O>(std::marker::PhantomData<O>);
impl<O: Arith> WideOp for Arith64<O> {
    const DST: usize = 2;
    const SRC: [usize; 3] = [2, if O::N > 1 { 2 } else { 0 }, if O::N > 2 { 2 } else { 0 }];
    #[inline(always)]
    fn f<H: Host>(a: u64, b: u64, c: u64, m: Modes) -> u64 {
        let x = [a, b, c].map(|x| m.input64(x));
        let [p, q, r] = x.map(f64::from_bits);
        let value = if m.round64 == Round::Nearest {
            O::native64::<H>(p, q, r)
        } else if p.is_nan() || q.is_nan() || r.is_nan() {
            f64::NAN
        } else {
            soft64::<O>(p, q, r, m.round64)
        };
        if value.is_nan() { nan64(&x[..O::N]) } else { m.output64(value.to_bits()) }
    }
}

#[cold]
#[inline(never)]
fn soft64<O: Arith>(a: f64, b: f64, c: f64, round: Round) -> f64 {
    O::soft(a, b, c, super::float::F64, round)
}

#[cold]
#[inline(never)]
fn soft16<O: Arith>(a: f32, b: f32, c: f32, round: Round) -> u32 {
    super::float::exact_f16(O::soft(a.into(), b.into(), c.into(), super::float::F16, round))
}

/// One f16 operation on the low halves; the high half of the result is 0.
#[inline(always)]
pub(crate) fn arith16<H: Host, O: Arith>(a: u32, b: u32, c: u32, m: Modes) -> u32 {
    use super::float::{f16_to_f32, is_nan16, nan16};
    let x = [a, b, c].map(|x| m.input16(x & 0xFFFF));
    let [p, q, r] = x.map(f16_to_f32);
    if x[..O::N].iter().any(|x| is_nan16(*x)) {
        return nan16(&x[..O::N]);
    }
    let value =
        if m.round64 == Round::Nearest { O::native16::<H>(p, q, r) } else { soft16::<O>(p, q, r, m.round64) };
    if is_nan16(value) {
        super::float::NAN16
    } else if m.overflow_clamps && value & 0x7FFF == 0x7C00 && x[..O::N].iter().all(|x| x & 0x7FFF != 0x7C00)
    {
        value & 0x8000 | 0x7BFF
    } else {
        m.output16(value)
    }
}

pub(crate) struct Arith16<O>(std::marker::PhantomData<O>);
impl<O: Arith> LaneOp for Arith16<O> {
    const N: usize = O::N;
    #[inline(always)]
    fn f<H: Host>(a: u32, b: u32, c: u32, m: Modes) -> u32 {
        arith16::<H, O>(a, b, c, m)
    }
}

/// Packed f16.
pub(crate) struct Packed16<O>(std::marker::PhantomData<O>);
impl<O: Arith> LaneOp for Packed16<O> {
    const N: usize = O::N;
    #[inline(always)]
    fn f<H: Host>(a: u32, b: u32, c: u32, m: Modes) -> u32 {
        arith16::<H, O>(a, b, c, m) | arith16::<H, O>(a >> 16, b >> 16, c >> 16, m) << 16
    }
}

/// Add and subtract with carry: `f(a, b, carry in) = (result, carry out)`.
pub(crate) trait CarryOp {
    /// Reads a carry.
    const IN: bool;
    fn f(a: u32, b: u32, carry: bool) -> (u32, bool);
}

/// `Uop::extra` of additions and subtractions that saturate where they carry or borrow.
pub(crate) const CARRY_TO_MAX: u32 = 1;
pub(crate) const CARRY_TO_ZERO: u32 = 2;

#[inline(always)]
fn carry_body<H: Host, O: CarryOp>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let carries = if O::IN { e.s64(w, u.mask_in) } else { 0 };
    let mut out = 0;
    each_light_chunk!(H::MASKS, exec, |k, mask| {
        let (a, b) = (w.chunk(u.a, k), w.chunk(u.b, k));
        let carry = Wave::exec_chunk(carries, k);
        let (mut r, mut o) = ([0; CHUNK], [0; CHUNK]);
        for l in 0..CHUNK {
            let (value, carry) = O::f(a[l], b[l], carry & 1 << l != 0);
            r[l] = value;
            o[l] = if carry { !0 } else { 0 };
        }
        out |= u64::from(H::movemask(o) & mask) << (16 * k);
        if u.extra != 0 {
            for l in 0..CHUNK {
                r[l] = if u.extra == CARRY_TO_MAX { r[l] | o[l] } else { r[l] & !o[l] };
            }
        }
        put_chunk::<H>(w, u.d, k, mask, r);
    });
    w.set_s64(u.mask_out as usize, out);
    Ctl::Next
}
levels!(carry_handler = carry_body<O: CarryOp>);

/// `v_cndmask_b32`: source 1 where the mask is set.
#[inline(always)]
fn select_body<H: Host>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let select = e.s64(w, u.mask_in);
    each_light_chunk!(H::MASKS, w.exec(), |k, mask| {
        let (a, b) = (w.chunk(u.a, k), w.chunk(u.b, k));
        let pick = Wave::exec_chunk(select, k);
        let mut r = [0; CHUNK];
        for l in 0..CHUNK {
            r[l] = if pick & 1 << l != 0 { b[l] } else { a[l] };
        }
        put_chunk::<H>(w, u.d, k, mask, r);
    });
    Ctl::Next
}
levels!(select_handler = select_body);
