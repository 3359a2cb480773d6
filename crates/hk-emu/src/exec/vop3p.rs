//! Mixed-precision fused multiply-add.

use super::float;
use super::lanes::{Arith, Modes, chunks};
use super::{Ctl, Env, Handler, Uop};
use crate::isa::{Inst, Op};
use crate::wave::{CHUNK, Wave};

/// `v_fma_mix_f32`, `v_fma_mixlo_f16`, `v_fma_mixhi_f16`. `extra`: op_sel, op_sel_hi << 4, neg << 8, abs << 12,
/// clamp << 15, destination << 16 (0 f32, 1 low half, 2 high half). A source with its op_sel_hi bit set is the half
/// that op_sel names, else an f32.
fn fma_mix(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    struct Fused;
    impl Arith for Fused {
        const N: usize = 3;
        fn native32<H: super::Host>(a: f32, b: f32, c: f32) -> f32 {
            H::fma32(a, b, c)
        }
        fn native64<H: super::Host>(a: f64, b: f64, c: f64) -> f64 {
            H::fma64(a, b, c)
        }
        fn native16<H: super::Host>(a: f32, b: f32, c: f32) -> u32 {
            float::f32_to_f16(H::fma32(a, b, c))
        }
        fn soft(a: f64, b: f64, c: f64, format: float::Format, round: float::Round) -> f64 {
            float::soft_fma(a, b, c, format, round)
        }
    }
    let (fm, m, x) = (w.f32_mode, Modes::of(w), u.extra);
    for (k, mask) in chunks(w.exec()) {
        let mut s = [w.chunk(u.a, k), w.chunk(u.b, k), w.chunk(u.c, k)];
        for (i, source) in s.iter_mut().enumerate() {
            let half = x >> (4 + i) & 1 != 0;
            let high = x >> i & 1 != 0;
            for value in source.iter_mut() {
                if half {
                    let bits = if high { *value >> 16 } else { *value & 0xFFFF };
                    *value = float::f16_to_f32(m.input16(bits)).to_bits();
                }
                if x >> (12 + i) & 1 != 0 {
                    *value &= 0x7FFF_FFFF;
                }
                if x >> (8 + i) & 1 != 0 {
                    *value ^= 0x8000_0000;
                }
            }
        }
        let old = w.chunk(u.d, k);
        let mut r = [0; CHUNK];
        let destination = x >> 16 & 3;
        if destination == 0 {
            r = super::lanes::arith32::<Fused>(fm, m, s[0], s[1], s[2]);
        }
        for l in 0..CHUNK {
            let clamp = |v: f32| if x >> 15 & 1 != 0 { clamp_unit(v, w.mode) } else { v };
            if destination == 0 {
                r[l] = clamp(f32::from_bits(r[l])).to_bits();
                continue;
            }
            let [a, b, c] = [s[0][l], s[1][l], s[2][l]];
            let half = if [a, b, c].iter().any(|x| float::is_nan32(*x)) {
                float::f32_to_f16(f32::from_bits(float::nan32(&[a, b, c])))
            } else {
                let [a, b, c] = [a, b, c].map(|x| f64::from(f32::from_bits(m.input32(x))));
                let value = float::soft_fma(a, b, c, float::F16, m.round64);
                if value.is_nan() { float::NAN16 } else { m.result16(value, (a + b + c).is_finite()) }
            };
            let half =
                if x >> 15 & 1 != 0 { float::f32_to_f16(clamp(float::f16_to_f32(half))) } else { half };
            r[l] = if destination == 1 { old[l] & 0xFFFF_0000 | half } else { old[l] & 0xFFFF | half << 16 };
        }
        w.set_chunk(u.d, k, mask, r);
    }
    Ctl::Next
}

/// CLAMP of a float: to 0..=1; a NaN becomes 0 with DX10_CLAMP.
#[inline(always)]
pub(crate) fn clamp_unit(x: f32, mode: u32) -> f32 {
    if x.is_nan() {
        if mode & crate::wave::mode::DX10_CLAMP != 0 { 0.0 } else { x }
    } else if x > 0.0 {
        if x > 1.0 { 1.0 } else { x }
    } else {
        0.0
    }
}

/// The handler, if it is one of these; sets `extra`.
pub(crate) fn handler(inst: &Inst, extra: &mut u32) -> Option<Handler> {
    let destination = match inst.op {
        Op::V_FMA_MIX_F32 => 0,
        Op::V_FMA_MIXLO_F16 => 1,
        Op::V_FMA_MIXHI_F16 => 2,
        _ => return None,
    };
    *extra = u32::from(inst.op_sel & 7)
        | u32::from(inst.op_sel_hi & 7) << 4
        | u32::from(inst.neg & 7) << 8
        | u32::from(inst.abs & 7) << 12
        | u32::from(inst.clamp) << 15
        | destination << 16;
    Some(fma_mix)
}
