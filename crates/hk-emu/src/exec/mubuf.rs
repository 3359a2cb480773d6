//! MUBUF: buffer resources with range checks.

use super::mem::{self, Atomic, Narrow};
use super::{Ctl, Env, Handler, Host, Level, Uop, flat, levels};
use crate::fault::Problem;
use crate::isa::Op;
use crate::wave::Wave;

/// Bits of `Uop::mask_in`.
const OFFEN: u16 = 1;
const IDXEN: u16 = 2;

/// Addresses, and the lanes whose access passes the range check. `bytes`: size of the access.
#[inline(always)]
pub(crate) fn addresses(
    w: &Wave,
    e: &Env<'_>,
    u: &Uop,
    bytes: u64,
    force_align: bool,
) -> Result<([u64; 64], u64), Problem> {
    let word = |i: usize| w.s[(u.b as usize + i) & 127];
    let base = u64::from(word(0)) | u64::from(word(1) & 0xFFFF) << 32;
    let stride = u64::from(word(1) >> 16 & 0x3FFF);
    let (records, control) = (u64::from(word(2)), word(3));
    let add_tid = control >> 23 & 1 != 0;
    if word(1) >> 31 != 0 {
        return Err(Problem::Unsupported { what: "a swizzled buffer resource" });
    }
    let soffset = u64::from(e.s32(w, u.hi[0]));
    let (offen, idxen) = (u.mask_in & OFFEN != 0, u.mask_in & IDXEN != 0);
    let index = *w.v(u.a).flat();
    let voffset = *w.v(if idxen { u.a + 1 } else { u.a }).flat();
    let imm = u.imm as u32;
    let mut addr = [0; 64];
    let mut valid = 0u64;
    // All-zero: unbound.
    let bound = word(0) | word(1) | word(2) | control != 0;
    for l in 0..64 {
        let mut index = if idxen { u64::from(index[l]) } else { 0 };
        if add_tid {
            index += l as u64;
        }
        // The vector offset and the immediate wrap at 32 bits; nothing else does.
        let offset = u64::from(if offen { voffset[l].wrapping_add(imm) } else { imm });
        let inside = if add_tid && !idxen {
            true
        } else if idxen && stride != 0 {
            index < records
        } else {
            offset + soffset + bytes <= records
        };
        let address = base.wrapping_add(soffset).wrapping_add(index * stride).wrapping_add(offset);
        addr[l] = if force_align { address & !3 } else { address };
        valid |= u64::from(inside && bound) << l;
    }
    Ok((addr, valid))
}

/// The lanes for which only the first `n` dwords pass, when the check is per dword.
#[inline(always)]
fn zero_lanes(w: &mut Wave, dst: u16, n: usize, lanes: u64) {
    for k in 0..4 {
        for i in 0..n {
            w.set_chunk(dst + i as u16, k, Wave::exec_chunk(lanes, k), [0; 16]);
        }
    }
}

#[inline(always)]
fn load_body<H: Host, const N: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    match addresses(w, e, u, 4 * N as u64, true) {
        Err(problem) => e.fault(problem),
        Ok((addr, valid)) if exec & !valid == 0 => mem::load_dwords::<N>(w, e, u, &addr, exec, u.d),
        Ok((addr, valid)) => {
            // Addresses were taken before the destination, which may hold them, is cleared.
            let partial = partial::<N>(w, e, u, exec & !valid);
            zero_lanes(w, u.d, N, exec & !valid);
            let mut ctl = mem::load_dwords::<N>(w, e, u, &addr, exec & valid, u.d);
            for (n, lanes) in partial.iter().enumerate() {
                if ctl == Ctl::Next && *lanes != 0 {
                    let dword = addr.map(|a| a + 4 * n as u64);
                    ctl = mem::load_dwords::<1>(w, e, u, &dword, *lanes, u.d + n as u16);
                }
            }
            ctl
        }
    }
}
levels!(buffer_load = load_body[N: usize]);

/// For each dword of an access, the lanes of `candidates` whose dword is still inside.
fn partial<const N: usize>(w: &Wave, e: &Env<'_>, u: &Uop, candidates: u64) -> [u64; N] {
    let mut lanes = [0; N];
    if N > 1 && candidates != 0 {
        for (n, lanes) in lanes.iter_mut().enumerate().take(N - 1) {
            if let Ok((_, valid)) = addresses(w, e, u, 4 * (n as u64 + 1), true) {
                *lanes = candidates & valid;
            }
        }
    }
    lanes
}

#[inline(always)]
fn store_body<H: Host, const N: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    match addresses(w, e, u, 4 * N as u64, true) {
        Err(problem) => e.fault(problem),
        Ok((addr, valid)) => {
            let mut ctl = mem::store_dwords::<N>(w, e, u, &addr, exec & valid, u.c);
            for (n, lanes) in partial::<N>(w, e, u, exec & !valid).iter().enumerate() {
                if ctl == Ctl::Next && *lanes != 0 {
                    let dword = addr.map(|a| a + 4 * n as u64);
                    ctl = mem::store_dwords::<1>(w, e, u, &dword, *lanes, u.c + n as u16);
                }
            }
            ctl
        }
    }
}
levels!(buffer_store = store_body[N: usize]);

fn load_narrow(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, n) = (w.exec(), Narrow::unpack(u.extra));
    match addresses(w, e, u, n.bytes.into(), false) {
        Err(problem) => e.fault(problem),
        Ok((addr, valid)) => {
            for lane in (0..64).filter(|lane| exec & !valid & 1 << lane != 0) {
                let value = n.merge(w.lane(u.d, lane), 0);
                w.set_lane(u.d, lane, value);
            }
            mem::load_narrow(w, e, u, &addr, exec & valid, u.d, n)
        }
    }
}

fn store_narrow(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, n) = (w.exec(), Narrow::unpack(u.extra));
    match addresses(w, e, u, n.bytes.into(), false) {
        Err(problem) => e.fault(problem),
        Ok((addr, valid)) => mem::store_narrow(w, e, u, &addr, exec & valid, u.c, n),
    }
}

fn atomic(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, atomic) = (w.exec(), Atomic::unpack(u.extra));
    let bytes = if atomic.wide { 8 } else { 4 };
    match addresses(w, e, u, bytes, true) {
        Err(problem) => e.fault(problem),
        Ok((addr, valid)) => {
            let ctl = mem::atomic(w, e, u, &addr, exec & valid, [u.d, u.c], atomic);
            if atomic.returns && ctl == Ctl::Next {
                zero_lanes(w, u.d, if atomic.wide { 2 } else { 1 }, exec & !valid);
            }
            ctl
        }
    }
}

fn load_lds(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let dwords = u.extra >> 31 == 0;
    let bytes = if dwords { 4 * u64::from(u.extra & 7) } else { Narrow::unpack(u.extra).bytes.into() };
    match addresses(w, e, u, bytes, dwords) {
        Err(problem) => e.fault(problem),
        Ok((addr, valid)) => flat::lds_dma(w, e, u, &addr, exec, valid),
    }
}

fn nop(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    Ctl::Next
}

/// The operand bits that go into `Uop::mask_in`.
pub(crate) fn operand_bits(offen: bool, idxen: bool) -> u16 {
    (if offen { OFFEN } else { 0 }) | (if idxen { IDXEN } else { 0 })
}

/// The handler of a MUBUF instruction; sets `extra`.
pub(crate) fn handler(op: Op, lds: bool, returns: bool, level: Level, extra: &mut u32) -> Option<Handler> {
    let name = op.info().name;
    if matches!(op, Op::BUFFER_WBL2 | Op::BUFFER_INV) {
        return Some(nop);
    }
    if name.contains("_FORMAT_") {
        return None;
    }
    if let Some(kind) = flat::atomic_of(op, returns) {
        *extra = kind.pack();
        return Some(atomic);
    }
    let load = name.contains("_LOAD_");
    let dwords = match name.rsplit_once("DWORD") {
        Some((_, "")) => Some(1),
        Some((_, "X2")) => Some(2),
        Some((_, "X3")) => Some(3),
        Some((_, "X4")) => Some(4),
        _ => None,
    };
    let Some(n) = dwords else {
        let narrow = Narrow::of(name)?;
        *extra = narrow.pack();
        if lds {
            *extra |= 1 << 31;
            return Some(load_lds);
        }
        return Some(if load { load_narrow } else { store_narrow });
    };
    *extra = n;
    Some(match (lds, load, n) {
        (true, ..) => load_lds,
        (_, true, 1) => buffer_load::<1>(level),
        (_, true, 2) => buffer_load::<2>(level),
        (_, true, 3) => buffer_load::<3>(level),
        (_, true, _) => buffer_load::<4>(level),
        (_, false, 1) => buffer_store::<1>(level),
        (_, false, 2) => buffer_store::<2>(level),
        (_, false, 3) => buffer_store::<3>(level),
        (_, false, _) => buffer_store::<4>(level),
    })
}
