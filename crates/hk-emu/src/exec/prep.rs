//! Operands that a handler cannot read as they are: scalars, modifiers, half selections, DPP and SDWA. They are made
//! in temporary slots before the handler runs, and its result is finished in one after it.

use super::float;
use super::lanes::chunks;
use super::vop3p::clamp_unit;
use super::{Ctl, Env, Host, Uop, lanes1, levels};
use crate::isa::{Dpp, Sdwa};
use crate::tables::{DppTable, Fixup, Post, Prep};
use crate::wave::{CHUNK, Lanes, Wave, mode};

impl DppTable {
    pub fn new(dpp: &Dpp) -> DppTable {
        let (mut source, mut exists, mut gate) = ([0; 64], 0, 0);
        for lane in 0..64usize {
            if let Some(from) = dpp_source(lane, dpp.ctrl) {
                source[lane] = from as u8;
                exists |= 1 << lane;
            }
            let row = dpp.row_mask >> (lane / 16) & 1;
            let bank = dpp.bank_mask >> (lane / 4 % 4) & 1;
            gate |= u64::from(row & bank) << lane;
        }
        DppTable { source, exists, gate, bound_ctrl: dpp.bound_ctrl }
    }

    /// Lanes that have an enabled source.
    fn enabled(&self, exec: u64) -> u64 {
        if exec == !0 {
            return self.exists;
        }
        let mut enabled = 0;
        for (lane, from) in self.source.iter().enumerate() {
            enabled |= (exec >> (from & 63) & 1) << lane;
        }
        enabled & self.exists
    }
}

/// The lane that `lane` reads, if there is one.
pub(crate) fn dpp_source(lane: usize, ctrl: u16) -> Option<usize> {
    let (row, place) = (lane & !15, lane & 15);
    let n = usize::from(ctrl & 15);
    match ctrl {
        0..=0xFF => Some(lane & !3 | usize::from(ctrl >> (2 * (lane & 3)) & 3)),
        0x101..=0x10F => (place + n < 16).then_some(lane + n),
        0x111..=0x11F => place.checked_sub(n).map(|p| row | p),
        0x121..=0x12F => Some(row | (place + 16 - n) & 15),
        0x130 => (lane < 63).then_some(lane + 1),
        0x134 => Some((lane + 1) & 63),
        0x138 => lane.checked_sub(1),
        0x13C => Some((lane + 63) & 63),
        0x140 => Some(row | (15 - place)),
        0x141 => Some(lane & !7 | (7 - (lane & 7))),
        0x142 => (lane >= 16).then(|| row - 1),
        0x143 => (lane >= 32).then_some(31),
        0x150..=0x15F => Some(row | n),
        _ => None,
    }
}

fn part(x: u32, sel: u8, sext: bool) -> u32 {
    match (sel, sext) {
        (0..=3, false) => x >> (8 * sel) & 0xFF,
        (0..=3, true) => (x >> (8 * sel)) as u8 as i8 as i32 as u32,
        (4 | 5, false) => x >> (16 * (sel - 4)) & 0xFFFF,
        (4 | 5, true) => (x >> (16 * (sel - 4))) as u16 as i16 as i32 as u32,
        _ => x,
    }
}

#[inline(always)]
fn map(w: &mut Wave, from: u16, to: u16, f: impl Fn(u32) -> u32) {
    for k in 0..4 {
        let r = lanes1(w.chunk(from, k), &f);
        w.set_chunk(to, k, 0xFFFF, r);
    }
}

impl Prep {
    #[inline(always)]
    fn apply(&self, w: &mut Wave, e: &Env<'_>, dpp: Option<&DppTable>) {
        match *self {
            Prep::Splat { code, to } => *w.v_mut(to) = Lanes::splat(e.s32(w, code)),
            Prep::Bits { from, to, and, xor } => map(w, from, to, |x| x & and ^ xor),
            Prep::High { from, to } => map(w, from, to, |x| x >> 16),
            Prep::Halves { from, to, low_is_high, high_is_high, xor } => map(w, from, to, |x| {
                let low = if low_is_high { x >> 16 } else { x & 0xFFFF };
                let high = if high_is_high { x & 0xFFFF_0000 } else { x << 16 };
                (low | high) ^ xor
            }),
            Prep::Sub { from, to, sel, sext } => map(w, from, to, |x| part(x, sel, sext)),
            Prep::Dpp { from, to } => {
                let Some(dpp) = dpp else { return };
                let x = *w.v(from).flat();
                let enabled = dpp.enabled(w.exec());
                let mut out = Lanes::ZERO;
                if let Some(flat) = out.flat_mut() {
                    for lane in 0..64 {
                        let value = x[usize::from(dpp.source[lane] & 63)];
                        flat[lane] = if enabled >> lane & 1 != 0 { value } else { 0 };
                    }
                }
                *w.v_mut(to) = out;
            }
        }
    }
}

fn omod32(x: u32, omod: u8) -> u32 {
    let scale = [1.0, 2.0, 4.0, 0.5][usize::from(omod & 3)];
    if float::is_nan32(x) { x } else { float::flush32((f32::from_bits(x) * scale).to_bits()) }
}

impl Post {
    fn apply(&self, w: &mut Wave, exec: u64) {
        match *self {
            Post::Float { temp, bits, packed, omod, clamp } => {
                let modes = w.mode;
                // OMOD is ignored with IEEE, or where denormal results are kept.
                let omod = if modes & mode::IEEE != 0 || modes & if bits == 32 { 1 << 5 } else { 1 << 7 } != 0
                {
                    0
                } else {
                    omod
                };
                match bits {
                    32 => map(w, temp, temp, |x| {
                        let x = if omod != 0 { omod32(x, omod) } else { x };
                        if clamp { clamp_unit(f32::from_bits(x), modes).to_bits() } else { x }
                    }),
                    16 => map(w, temp, temp, |x| {
                        let one = |h: u32| {
                            if float::is_nan16(h) {
                                return if clamp && modes & mode::DX10_CLAMP != 0 { 0 } else { h };
                            }
                            let mut value = float::f16_to_f32(h);
                            if omod != 0 {
                                let scaled = float::f32_to_f16(f32::from_bits(omod32(value.to_bits(), omod)));
                                value = float::f16_to_f32(float::flush16(scaled));
                            }
                            if clamp {
                                value = clamp_unit(value, modes);
                            }
                            float::f32_to_f16(value)
                        };
                        one(x & 0xFFFF) | if packed { one(x >> 16) << 16 } else { x & 0xFFFF_0000 }
                    }),
                    _ => {
                        for lane in 0..64 {
                            let mut value = f64::from_bits(w.lane64(temp, lane));
                            if omod != 0 && !value.is_nan() {
                                value *= [1.0, 2.0, 4.0, 0.5][usize::from(omod & 3)];
                                value = f64::from_bits(float::flush64(value.to_bits()));
                            }
                            if clamp {
                                value = if value.is_nan() {
                                    if modes & mode::DX10_CLAMP != 0 { 0.0 } else { value }
                                } else if value > 0.0 {
                                    value.min(1.0)
                                } else {
                                    0.0
                                };
                            }
                            w.set_lane64(temp, lane, value.to_bits());
                        }
                    }
                }
            }
            Post::Move { temp, to } => {
                for (k, mask) in chunks(exec) {
                    let x = w.chunk(temp, k);
                    w.set_chunk(to, k, mask, x);
                }
            }
            Post::Half { temp, to, high } => {
                for (k, mask) in chunks(exec) {
                    let (x, old) = (w.chunk(temp, k), w.chunk(to, k));
                    let mut r = [0; CHUNK];
                    for l in 0..CHUNK {
                        r[l] = if high {
                            old[l] & 0xFFFF | x[l] << 16
                        } else {
                            old[l] & 0xFFFF_0000 | x[l] & 0xFFFF
                        };
                    }
                    w.set_chunk(to, k, mask, r);
                }
            }
            Post::Sdwa { temp, to, sel, unused } => {
                for (k, mask) in chunks(exec) {
                    let (x, old) = (w.chunk(temp, k), w.chunk(to, k));
                    let (shift, width) = match sel {
                        0..=3 => (8 * u32::from(sel), 8),
                        4 | 5 => (16 * (u32::from(sel) - 4), 16),
                        _ => (0, 32),
                    };
                    let field = if width == 32 { !0 } else { (1u32 << width) - 1 };
                    let mut r = [0; CHUNK];
                    for l in 0..CHUNK {
                        let value = (x[l] & field) << shift;
                        r[l] = match unused {
                            _ if width == 32 => value,
                            0 => value,
                            1 => {
                                let left = 32 - width - shift;
                                // Above the field its sign, below it zeros.
                                ((value << left) as i32 >> left) as u32
                            }
                            _ => old[l] & !(field << shift) | value,
                        };
                    }
                    w.set_chunk(to, k, mask, r);
                }
            }
        }
    }
}

/// Runs the fix-ups of an instruction around its handler.
#[inline(always)]
fn fixed_body<H: Host>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let program = e.program;
    match program.fixups.get(u.fixup as usize) {
        Some(fixup) => run_fixed(w, e, u, fixup),
        None => Ctl::Next,
    }
}

/// The same with fix-ups that are not the program's.
#[inline(always)]
pub(crate) fn run_fixed(w: &mut Wave, e: &mut Env<'_>, u: &Uop, fixup: &Fixup) -> Ctl {
    for prep in &fixup.preps {
        prep.apply(w, e, fixup.dpp.as_ref());
    }
    let exec = w.exec();
    let lanes = match &fixup.dpp {
        None => exec,
        Some(dpp) => {
            let reached = if dpp.bound_ctrl { !0 } else { dpp.enabled(exec) };
            exec & dpp.gate & reached
        }
    };
    if lanes != exec {
        w.set_exec(lanes);
    }
    // SAFETY: `inner` comes from the tables of the program's level, which the host was checked to have.
    let ctl = unsafe { (u.inner)(w, e, u) };
    for post in &fixup.posts {
        post.apply(w, lanes);
    }
    if lanes != exec {
        w.set_exec(exec);
    }
    ctl
}

levels!(fixed = fixed_body);

/// The same where `N` scalar registers are all that there is to prepare, as most often.
#[inline(always)]
fn splat_body<H: Host, const N: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    for [register, to] in &u.splats[..N] {
        *w.v_mut(*to) = Lanes::splat(w.s[usize::from(*register) & 127]);
    }
    // SAFETY: as in `run_fixed`.
    unsafe { (u.inner)(w, e, u) }
}

levels!(splat = splat_body[N: usize]);

/// The selector that takes everything.
pub(crate) const DWORD: u8 = 6;

/// Whether an SDWA word changes the source it belongs to.
pub(crate) fn selects(sdwa: &Sdwa, source: usize) -> bool {
    source < 2 && (sdwa.src_sel[source] != DWORD || sdwa.sext[source])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dpp_lane_maps() {
        let source = |lane, ctrl| dpp_source(lane, ctrl);
        // quad_perm:[1,0,3,2]
        assert_eq!([0, 1, 2, 3, 61].map(|l| source(l, 0xB1)), [Some(1), Some(0), Some(3), Some(2), Some(60)]);
        assert_eq!(source(17, 0x101), Some(18));
        assert_eq!(source(31, 0x101), None);
        assert_eq!(source(16, 0x111), None);
        assert_eq!(source(17, 0x111), Some(16));
        assert_eq!(source(16, 0x121), Some(31));
        assert_eq!(source(0, 0x140), Some(15));
        assert_eq!(source(9, 0x141), Some(14));
        assert_eq!([15, 16, 40, 63].map(|l| source(l, 0x142)), [None, Some(15), Some(31), Some(47)]);
        assert_eq!([31, 32, 63].map(|l| source(l, 0x143)), [None, Some(31), Some(31)]);
        assert_eq!(source(37, 0x153), Some(35));
    }
}
