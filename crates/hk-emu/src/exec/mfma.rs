//! Matrix instructions: one algorithm, driven by the layout formulas of the register tiles.
//!
//! Numerics: every product is added by a fused multiply-add in ascending k, in the precision of the accumulator.
//! Denormals of C and D are kept; f32 inputs follow MODE. A NaN result is the default NaN.

use super::float;
use super::lanes::Modes;
use super::{Ctl, Env, Handler, Host, Level, Uop, levels_to_avx2};
use crate::isa::{Inst, Op};
use crate::wave::{CHUNK, Lanes, Wave};

/// The type of an input element.
pub(crate) trait Elem {
    const BITS: usize;
    /// The f32 of the low bits of `raw`; what is above them is garbage.
    fn widen(raw: u32, flush: bool) -> f32;
}

struct F32;
impl Elem for F32 {
    const BITS: usize = 32;
    #[inline(always)]
    fn widen(raw: u32, flush: bool) -> f32 {
        f32::from_bits(if flush { float::flush32(raw) } else { raw })
    }
}

/// f32 cut to 10 bits of fraction.
struct Xf32;
impl Elem for Xf32 {
    const BITS: usize = 32;
    #[inline(always)]
    fn widen(raw: u32, _: bool) -> f32 {
        f32::from_bits(if float::is_nan32(raw) { float::NAN32 } else { raw & 0xFFFF_E000 })
    }
}

struct F16;
impl Elem for F16 {
    const BITS: usize = 16;
    #[inline(always)]
    fn widen(raw: u32, _: bool) -> f32 {
        float::f16_to_f32(raw & 0xFFFF)
    }
}

struct Bf16;
impl Elem for Bf16 {
    const BITS: usize = 16;
    #[inline(always)]
    fn widen(raw: u32, _: bool) -> f32 {
        f32::from_bits(raw << 16)
    }
}

/// 8-bit floats: the magnitude is shifted to an f32's place, and one exact multiplication corrects the bias.
#[inline(always)]
fn widen8(
    raw: u32,
    fraction: u32,
    bias: u32,
    nan: impl Fn(u32) -> bool,
    infinity: impl Fn(u32) -> bool,
) -> f32 {
    let magnitude = raw & 0x7F;
    let scale = f32::from_bits((254 - bias) << 23);
    let value = f32::from_bits(magnitude << (23 - fraction)) * scale;
    let bits = value.to_bits() | (raw & 0x80) << 24;
    let bits = if infinity(magnitude) { 0x7F80_0000 | (raw & 0x80) << 24 } else { bits };
    f32::from_bits(if nan(raw & 0xFF) { float::NAN32 } else { bits })
}

struct E4m3Fnuz;
impl Elem for E4m3Fnuz {
    const BITS: usize = 8;
    #[inline(always)]
    fn widen(raw: u32, _: bool) -> f32 {
        widen8(raw, 3, 8, |x| x == 0x80, |_| false)
    }
}

struct E5m2Fnuz;
impl Elem for E5m2Fnuz {
    const BITS: usize = 8;
    #[inline(always)]
    fn widen(raw: u32, _: bool) -> f32 {
        widen8(raw, 2, 16, |x| x == 0x80, |_| false)
    }
}

struct E4m3;
impl Elem for E4m3 {
    const BITS: usize = 8;
    #[inline(always)]
    fn widen(raw: u32, _: bool) -> f32 {
        widen8(raw, 3, 7, |x| x & 0x7F == 0x7F, |_| false)
    }
}

struct E5m2;
impl Elem for E5m2 {
    const BITS: usize = 8;
    #[inline(always)]
    fn widen(raw: u32, _: bool) -> f32 {
        widen8(raw, 2, 15, |x| x & 0x7F > 0x7C, |m| m == 0x7C)
    }
}

/// An instruction: D (M x N) += A (M x K) B (K x N), in B independent blocks.
pub(crate) trait Shape {
    const M: usize;
    const N: usize;
    const K: usize;
    const BLOCKS: usize;
    type A: Elem;
    type B: Elem;
}

/// Elements of an operand: rows of `dim * blocks`, one for each k.
const MAX: usize = 2048;

/// The source lane of each lane under the broadcast controls of A (`cbsz`, `abid`) or B (`blgp`).
fn a_lane(lane: usize, cbsz: u8, abid: u8) -> usize {
    let size = 64 >> (cbsz & 7).min(4);
    (lane % size + size * usize::from(abid)) % 64
}

fn b_lane(lane: usize, blgp: u8) -> usize {
    match blgp {
        1 => lane % 32,
        2 => lane % 32 + 32,
        3 => (lane + 16) % 64,
        4..=7 => lane % 16 + 16 * (usize::from(blgp) - 4),
        _ => lane,
    }
}

fn permuted(w: &Wave, slot: u16, from: impl Fn(usize) -> usize) -> Lanes {
    let source = w.v(slot);
    let mut out = Lanes::ZERO;
    for lane in 0..64 {
        out.set(lane, source.get(from(lane)));
    }
    out
}

/// Unpacks an operand to f32, `out[k * width + column]` with `width = dim * blocks`.
#[inline(always)]
fn unpack<E: Elem>(
    w: &Wave,
    slot: u16,
    [width, k]: [usize; 2],
    flush: bool,
    permute: Option<&dyn Fn(usize) -> usize>,
    out: &mut [f32; MAX],
) {
    let per_register = 32 / E::BITS;
    // Elements per lane: lanes beyond `width` hold the next ks.
    let elements = k * width / 64;
    for r in 0..elements / per_register {
        let lanes = match permute {
            None => *w.v(slot + r as u16),
            Some(from) => permuted(w, slot + r as u16, from),
        };
        for c in 0..4 {
            let group = 16 * c / width;
            let column = 16 * c % width;
            for j in 0..per_register {
                let row = group * elements + r * per_register + j;
                let start = row * width + column;
                let target = &mut out[start..start + CHUNK];
                for l in 0..CHUNK {
                    target[l] = E::widen(lanes.0[c][l] >> (E::BITS * j), flush);
                }
            }
        }
    }
}

/// Controls in `Uop::extra`: cbsz, abid, blgp, and whether C is one constant for all registers.
pub(crate) fn controls(inst: &Inst, constant_c: bool) -> u32 {
    u32::from(inst.cbsz) | u32::from(inst.abid) << 4 | u32::from(inst.blgp) << 8 | u32::from(constant_c) << 12
}

#[inline(always)]
fn operands<S: Shape>(w: &Wave, u: &Uop, a: &mut [f32; MAX], b: &mut [f32; MAX]) {
    let flush = Modes::of(w).in32;
    let (cbsz, abid, blgp) = ((u.extra & 7) as u8, (u.extra >> 4 & 15) as u8, (u.extra >> 8 & 7) as u8);
    let from_a = move |lane| a_lane(lane, cbsz, abid);
    let from_b = move |lane| b_lane(lane, blgp);
    let permute_a: Option<&dyn Fn(usize) -> usize> = if cbsz != 0 { Some(&from_a) } else { None };
    let permute_b: Option<&dyn Fn(usize) -> usize> = if blgp != 0 { Some(&from_b) } else { None };
    unpack::<S::A>(w, u.a, [S::M * S::BLOCKS, S::K], flush, permute_a, a);
    unpack::<S::B>(w, u.b, [S::N * S::BLOCKS, S::K], flush, permute_b, b);
}

#[inline(always)]
fn mfma_body<H: Host, S: Shape>(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let (mut a, mut b) = ([0f32; MAX], [0f32; MAX]);
    operands::<S>(w, u, &mut a, &mut b);
    let c_step = if u.extra >> 12 & 1 != 0 { 0 } else { 1 };
    let (wa, wb) = (S::M * S::BLOCKS, S::N * S::BLOCKS);
    if S::N < 16 {
        // 4x4, 16 blocks: the lane is the column of B, the register the row of A within the lane's block.
        for r in 0..4u16 {
            for c in 0..4 {
                let mut acc = w.chunk(u.c + c_step * r, c).map(f32::from_bits);
                for k in 0..S::K {
                    for l in 0..CHUNK {
                        let lane = 16 * c + l;
                        acc[l] =
                            H::fma32(a[k * wa + lane / 4 * 4 + usize::from(r)], b[k * wb + lane], acc[l]);
                    }
                }
                w.set_chunk(u.d + r, c, 0xFFFF, finish(acc));
            }
        }
        return Ctl::Next;
    }
    let rows = 64 / S::N;
    let p = 64usize.div_ceil(S::M * S::N / 4);
    for block in 0..S::BLOCKS {
        for quad in 0..S::M / 4 {
            // Rows 4 quad .. 4 quad + 4 are four registers over the same lanes.
            let register = (block * (S::M * S::N / 64) + quad / rows * 4) as u16;
            let lane = (block % p) * S::N + quad % rows * p * S::N;
            for part in 0..S::N / 16 {
                let chunk = lane / 16 + part;
                let mut acc = [[0f32; CHUNK]; 4];
                for (i, acc) in acc.iter_mut().enumerate() {
                    *acc = w.chunk(u.c + c_step * (register + i as u16), chunk).map(f32::from_bits);
                }
                for k in 0..S::K {
                    let start = k * wb + block * S::N + part * 16;
                    let Some(row) = b[start..].first_chunk::<CHUNK>() else { continue };
                    let start = k * wa + block * S::M + quad * 4;
                    let Some(column) = a[start..].first_chunk::<4>() else { continue };
                    for i in 0..4 {
                        for l in 0..CHUNK {
                            acc[i][l] = H::fma32(column[i], row[l], acc[i][l]);
                        }
                    }
                }
                for (i, acc) in acc.iter().enumerate() {
                    w.set_chunk(u.d + register + i as u16, chunk, 0xFFFF, finish(*acc));
                }
            }
        }
    }
    Ctl::Next
}
levels_to_avx2!(mfma_handler = mfma_body<S: Shape>);

/// For shapes too rare to be compiled for each level.
fn mfma_portable<S: Shape>(_: Level) -> Handler {
    mfma_body::<super::Portable, S>
}

/// The bits of a result: the default NaN for every NaN.
#[inline(always)]
fn finish(acc: [f32; CHUNK]) -> [u32; CHUNK] {
    let mut out = [0; CHUNK];
    for l in 0..CHUNK {
        out[l] = if acc[l].is_nan() { float::NAN32 } else { acc[l].to_bits() };
    }
    out
}

/// i8 products in wrapping i32.
fn mfma_i8<S: Shape>(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let (cbsz, abid, blgp) = ((u.extra & 7) as u8, (u.extra >> 4 & 15) as u8, (u.extra >> 8 & 7) as u8);
    let (mut a, mut b) = ([0i32; MAX], [0i32; MAX]);
    let (wa, wb) = (S::M * S::BLOCKS, S::N * S::BLOCKS);
    let load = |w: &Wave, slot: u16, width: usize, from: &dyn Fn(usize) -> usize, out: &mut [i32; MAX]| {
        let elements = S::K * width / 64;
        for e in 0..elements {
            let lanes = w.v(slot + (e / 4) as u16);
            for lane in 0..64 {
                let value = (lanes.get(from(lane)) >> (8 * (e % 4))) as u8 as i8;
                out[(lane / width * elements + e) * width + lane % width] = value.into();
            }
        }
    };
    load(w, u.a, wa, &|lane| if cbsz == 0 { lane } else { a_lane(lane, cbsz, abid) }, &mut a);
    load(w, u.b, wb, &|lane| b_lane(lane, blgp), &mut b);
    let c_step = if u.extra >> 12 & 1 != 0 { 0 } else { 1 };
    let mut out = [Lanes::ZERO; 32];
    let registers = S::M * S::N * S::BLOCKS / 64;
    for (r, out) in out.iter_mut().enumerate().take(registers) {
        *out = *w.v(u.c + c_step * r as u16);
    }
    for block in 0..S::BLOCKS {
        for i in 0..S::M {
            let (register, lane) = output::<S>(i, block);
            let mut acc = [0i32; 32];
            for k in 0..S::K {
                let x = a[k * wa + block * S::M + i];
                let row = &b[k * wb + block * S::N..][..S::N];
                for j in 0..S::N {
                    acc[j] = acc[j].wrapping_add(x.wrapping_mul(row[j]));
                }
            }
            for (j, acc) in acc.iter().enumerate().take(S::N) {
                let old = out[register].get(lane + j);
                out[register].set(lane + j, old.wrapping_add(*acc as u32));
            }
        }
    }
    for (r, out) in out.iter().enumerate().take(registers) {
        *w.v_mut(u.d + r as u16) = *out;
    }
    Ctl::Next
}

/// Register and first lane of row `i` of a block of 32-bit results.
fn output<S: Shape>(i: usize, block: usize) -> (usize, usize) {
    let rows = 64 / S::N;
    let p = 64usize.div_ceil(S::M * S::N / 4);
    let register = block * (S::M * S::N / 64) + i / (4 * rows) * 4 + i % 4;
    (register, (block % p) * S::N + i / 4 % rows * p * S::N)
}

/// f64: `extra` has the negations of A, B and C in blgp's place, the size in bit 13 (set: 16x16, else 4x4 in 4 blocks).
fn mfma_f64(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let negate = u.extra >> 8 & 7;
    let big = u.extra >> 13 & 1 != 0;
    let (dim, blocks) = if big { (16, 1) } else { (4, 4) };
    let sign = |bit: u32| if negate >> bit & 1 != 0 { -1.0 } else { 1.0 };
    let width = dim * blocks;
    let get = |w: &Wave, slot: u16, lane: usize| f64::from_bits(w.lane64(slot, lane));
    let (mut a, mut b) = ([0f64; 64], [0f64; 64]);
    for lane in 0..64 {
        // K = 4: one element per lane, k = lane / width.
        a[lane] = get(w, u.a, lane) * sign(0);
        b[lane] = get(w, u.b, lane) * sign(1);
    }
    let rows = 64 / dim;
    let p = 64usize.div_ceil(dim * dim);
    let c_step = if u.extra >> 12 & 1 != 0 { 0 } else { 2 };
    let mut out = [[0u64; 64]; 4];
    for block in 0..blocks {
        for i in 0..dim {
            let register = block * (dim * dim / 64) + i / rows;
            for j in 0..dim {
                let lane = (block % p) * dim + i % rows * p * dim + j;
                let mut acc = get(w, u.c + c_step * register as u16, lane) * sign(2);
                for k in 0..4 {
                    acc = libm::fma(a[k * width + block * dim + i], b[k * width + block * dim + j], acc);
                }
                out[register % 4][lane] = if acc.is_nan() { float::NAN64 } else { acc.to_bits() };
            }
        }
    }
    for (register, out) in out.iter().enumerate().take(if big { 4 } else { 1 }) {
        for (lane, value) in out.iter().enumerate() {
            w.set_lane64(u.d + 2 * register as u16, lane, *value);
        }
    }
    Ctl::Next
}

/// A shape with element types.
struct Dims<const M: usize, const N: usize, const K: usize, const BLOCKS: usize, A, B>(
    std::marker::PhantomData<(A, B)>,
);
impl<const M: usize, const N: usize, const K: usize, const BLOCKS: usize, A: Elem, B: Elem> Shape
    for Dims<M, N, K, BLOCKS, A, B>
{
    const M: usize = M;
    const N: usize = N;
    const K: usize = K;
    const BLOCKS: usize = BLOCKS;
    type A = A;
    type B = B;
}

/// The handler of a dense matrix instruction; `fnuz` chooses the 8-bit formats. Adds to `extra`.
pub(crate) fn handler(op: Op, level: Level, fnuz: bool, extra: &mut u32) -> Option<Handler> {
    macro_rules! pick {
        ($m:literal $n:literal $k:literal 1 $a:ty, $b:ty) => {
            Some(mfma_handler::<Dims<$m, $n, $k, 1, $a, $b>>(level))
        };
        ($m:literal $n:literal $k:literal $blocks:literal $a:ty, $b:ty) => {
            Some(mfma_portable::<Dims<$m, $n, $k, $blocks, $a, $b>>(level))
        };
    }
    macro_rules! integer {
        ($m:literal $n:literal $k:literal $blocks:literal) => {
            Some(mfma_i8::<Dims<$m, $n, $k, $blocks, F32, F32>> as Handler)
        };
    }
    macro_rules! eight {
        ($m:literal $n:literal $k:literal $fnuz_a:ty, $fnuz_b:ty, $a:ty, $b:ty) => {
            if fnuz { pick!($m $n $k 1 $fnuz_a, $fnuz_b) } else { pick!($m $n $k 1 $a, $b) }
        };
    }
    match op {
        Op::V_MFMA_F64_16X16X4_F64 => {
            *extra |= 1 << 13;
            Some(mfma_f64)
        }
        Op::V_MFMA_F64_4X4X4_4B_F64 => Some(mfma_f64),
        Op::V_MFMA_F32_32X32X1_2B_F32 => pick!(32 32 1 2 F32, F32),
        Op::V_MFMA_F32_16X16X1_4B_F32 => pick!(16 16 1 4 F32, F32),
        Op::V_MFMA_F32_4X4X1_16B_F32 => pick!(4 4 1 16 F32, F32),
        Op::V_MFMA_F32_32X32X2_F32 => pick!(32 32 2 1 F32, F32),
        Op::V_MFMA_F32_16X16X4_F32 => pick!(16 16 4 1 F32, F32),
        Op::V_MFMA_F32_32X32X4_2B_F16 => pick!(32 32 4 2 F16, F16),
        Op::V_MFMA_F32_16X16X4_4B_F16 => pick!(16 16 4 4 F16, F16),
        Op::V_MFMA_F32_4X4X4_16B_F16 => pick!(4 4 4 16 F16, F16),
        Op::V_MFMA_F32_32X32X8_F16 => pick!(32 32 8 1 F16, F16),
        Op::V_MFMA_F32_16X16X16_F16 => pick!(16 16 16 1 F16, F16),
        Op::V_MFMA_F32_32X32X16_F16 => pick!(32 32 16 1 F16, F16),
        Op::V_MFMA_F32_16X16X32_F16 => pick!(16 16 32 1 F16, F16),
        Op::V_MFMA_F32_32X32X4_2B_BF16 => pick!(32 32 4 2 Bf16, Bf16),
        Op::V_MFMA_F32_16X16X4_4B_BF16 => pick!(16 16 4 4 Bf16, Bf16),
        Op::V_MFMA_F32_4X4X4_16B_BF16 => pick!(4 4 4 16 Bf16, Bf16),
        Op::V_MFMA_F32_32X32X8_BF16 => pick!(32 32 8 1 Bf16, Bf16),
        Op::V_MFMA_F32_16X16X16_BF16 => pick!(16 16 16 1 Bf16, Bf16),
        Op::V_MFMA_F32_32X32X16_BF16 => pick!(32 32 16 1 Bf16, Bf16),
        Op::V_MFMA_F32_16X16X32_BF16 => pick!(16 16 32 1 Bf16, Bf16),
        Op::V_MFMA_F32_16X16X8_XF32 => pick!(16 16 8 1 Xf32, Xf32),
        Op::V_MFMA_F32_32X32X4_XF32 => pick!(32 32 4 1 Xf32, Xf32),
        Op::V_MFMA_I32_32X32X4_2B_I8 => integer!(32 32 4 2),
        Op::V_MFMA_I32_16X16X4_4B_I8 => integer!(16 16 4 4),
        Op::V_MFMA_I32_4X4X4_16B_I8 => integer!(4 4 4 16),
        Op::V_MFMA_I32_32X32X16_I8 => integer!(32 32 16 1),
        Op::V_MFMA_I32_16X16X32_I8 => integer!(16 16 32 1),
        Op::V_MFMA_I32_32X32X32_I8 => integer!(32 32 32 1),
        Op::V_MFMA_I32_16X16X64_I8 => integer!(16 16 64 1),
        Op::V_MFMA_F32_16X16X32_BF8_BF8 => eight!(16 16 32 E5m2Fnuz, E5m2Fnuz, E5m2, E5m2),
        Op::V_MFMA_F32_16X16X32_BF8_FP8 => eight!(16 16 32 E5m2Fnuz, E4m3Fnuz, E5m2, E4m3),
        Op::V_MFMA_F32_16X16X32_FP8_BF8 => eight!(16 16 32 E4m3Fnuz, E5m2Fnuz, E4m3, E5m2),
        Op::V_MFMA_F32_16X16X32_FP8_FP8 => eight!(16 16 32 E4m3Fnuz, E4m3Fnuz, E4m3, E4m3),
        Op::V_MFMA_F32_32X32X16_BF8_BF8 => eight!(32 32 16 E5m2Fnuz, E5m2Fnuz, E5m2, E5m2),
        Op::V_MFMA_F32_32X32X16_BF8_FP8 => eight!(32 32 16 E5m2Fnuz, E4m3Fnuz, E5m2, E4m3),
        Op::V_MFMA_F32_32X32X16_FP8_BF8 => eight!(32 32 16 E4m3Fnuz, E5m2Fnuz, E4m3, E5m2),
        Op::V_MFMA_F32_32X32X16_FP8_FP8 => eight!(32 32 16 E4m3Fnuz, E4m3Fnuz, E4m3, E4m3),
        _ => None,
    }
}
