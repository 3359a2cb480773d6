//! LDS, and the lane exchanges that share its encoding.

use super::lanes::{Modes, each_lane};
use super::mem::{Atomic, Narrow, Rmw, merge_narrow};
use super::{Ctl, Env, Handler, Host, Level, Uop, levels};
use crate::fault::{Access, Problem, Space};
use crate::isa::Op;
use crate::wave::{Lanes, Wave};

#[inline(always)]
pub(crate) fn get32(lds: &[u8], at: usize) -> Option<u32> {
    lds.get(at..)?.first_chunk::<4>().map(|b| u32::from_le_bytes(*b))
}

#[inline(always)]
pub(crate) fn put32(lds: &mut [u8], at: usize, value: u32) -> bool {
    match lds.get_mut(at..).and_then(|tail| tail.first_chunk_mut::<4>()) {
        Some(bytes) => {
            *bytes = value.to_le_bytes();
            true
        }
        None => false,
    }
}

#[cold]
#[inline(never)]
fn fail(e: &mut Env<'_>, access: Access, at: u32, bytes: u32, lane: usize) -> Ctl {
    e.fault(Problem::Memory { space: Space::Lds, access, address: at.into(), bytes, lane: Some(lane as u32) })
}

/// The address bits that must be 0 in an access of `bytes` bytes. The hardware runs in its unaligned mode, in which
/// any address works; by default what is not aligned to its element, at most a dword, is an error as in global memory.
#[inline(always)]
pub(crate) fn misaligned(e: &Env<'_>, bytes: u32) -> u32 {
    if e.memory.strict() { bytes.min(4) - 1 } else { 0 }
}

/// Reads `N` dwords per lane; with `P` two groups of `N / 2` at two offsets (`imm`, `extra`).
#[inline(always)]
fn read_body<H: Host, const N: usize, const P: bool>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    // A copy: the destination may be the address.
    let address = *w.v(u.a).flat();
    let half = if P { N / 2 } else { N };
    let misaligned = misaligned(e, 4);
    let Some(registers) = w.tuple_mut::<N>(u.d) else { return Ctl::Next };
    for (part, offset) in [u.imm as u32, u.extra].into_iter().enumerate().take(if P { 2 } else { 1 }) {
        for (lane, address) in address.iter().enumerate() {
            if exec != !0 && exec >> lane & 1 == 0 {
                continue;
            }
            let at = address.wrapping_add(offset);
            let bytes = e.lds.get(at as usize..at as usize + 4 * half);
            let Some(bytes) = bytes.filter(|_| at & misaligned == 0) else {
                return fail(e, Access::Read, at, 4 * half as u32, lane);
            };
            for n in 0..half {
                let b = [bytes[4 * n], bytes[4 * n + 1], bytes[4 * n + 2], bytes[4 * n + 3]];
                registers[part * half + n].set(lane, u32::from_le_bytes(b));
            }
        }
    }
    Ctl::Next
}
levels!(read = read_body[N: usize, P: bool]);

/// Writes `N` dwords per lane; with `P` the data of `b` and `c` at two offsets.
#[inline(always)]
fn write_body<H: Host, const N: usize, const P: bool>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let address = w.v(u.a).flat();
    let misaligned = misaligned(e, 4);
    for lane in 0..64 {
        if exec != !0 && exec >> lane & 1 == 0 {
            continue;
        }
        for (data, offset) in [(u.b, u.imm as u32), (u.c, u.extra)].into_iter().take(if P { 2 } else { 1 }) {
            let at = address[lane].wrapping_add(offset);
            let (Some(bytes), Some(data)) = (
                e.lds.get_mut(at as usize..at as usize + 4 * N).filter(|_| at & misaligned == 0),
                w.tuple::<N>(data),
            ) else {
                return fail(e, Access::Write, at, 4 * N as u32, lane);
            };
            for n in 0..N {
                bytes[4 * n..4 * n + 4].copy_from_slice(&data[n].get(lane).to_le_bytes());
            }
        }
    }
    Ctl::Next
}
levels!(write = write_body[N: usize, P: bool]);

/// Reads `BYTES` bytes per lane, 1 or 2.
#[inline(always)]
fn read_narrow_body<H: Host, const BYTES: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, misaligned) = (w.exec(), misaligned(e, BYTES as u32));
    let (address, mut raw) = (w.v(u.a), Lanes::ZERO);
    each_lane!(exec, |lane| {
        let at = address.get(lane).wrapping_add(u.imm as u32);
        let bytes = e.lds.get(at as usize..).and_then(|tail| tail.first_chunk::<BYTES>());
        let Some(bytes) = bytes.filter(|_| at & misaligned == 0) else {
            return fail(e, Access::Read, at, BYTES as u32, lane);
        };
        let mut word = [0; 4];
        word[..BYTES].copy_from_slice(bytes);
        raw.set(lane, u32::from_le_bytes(word));
    });
    merge_narrow(w, u.d, exec, Narrow::unpack(u.extra), &raw);
    Ctl::Next
}
levels!(read_narrow = read_narrow_body[BYTES: usize]);

/// Writes `BYTES` bytes per lane, 1 or 2.
#[inline(always)]
fn write_narrow_body<H: Host, const BYTES: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let n = Narrow::unpack(u.extra);
    let (exec, misaligned) = (w.exec(), misaligned(e, BYTES as u32));
    let (address, data) = (w.v(u.a), w.v(u.b));
    each_lane!(exec, |lane| {
        let at = address.get(lane).wrapping_add(u.imm as u32);
        let bytes = e.lds.get_mut(at as usize..).and_then(|tail| tail.first_chunk_mut::<BYTES>());
        let Some(bytes) = bytes.filter(|_| at & misaligned == 0) else {
            return fail(e, Access::Write, at, BYTES as u32, lane);
        };
        let value = n.take(data.get(lane)).to_le_bytes();
        bytes.copy_from_slice(&value[..BYTES]);
    });
    Ctl::Next
}
levels!(write_narrow = write_narrow_body[BYTES: usize]);

/// LDS atomics: lanes in ascending order.
fn atomic(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let atomic = Atomic::unpack(u.extra);
    let (exec, m) = (w.exec(), Modes::of(w));
    let address = *w.v(u.a).flat();
    let bytes = atomic.bytes() as u32;
    // `ds_cmpst` has the comparand first, `ds_mskor` the mask.
    let swapped = matches!(atomic.rmw, Rmw::CmpSwap | Rmw::FCmpSwap);
    let (data, other) = if swapped { (u.c, u.b) } else { (u.b, u.c) };
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let at = address[lane].wrapping_add(u.imm as u32);
        let index = at as usize;
        let (low, high) = (get32(e.lds, index), get32(e.lds, index.saturating_add(4)));
        let (Some(low), true) = (low, !atomic.wide || high.is_some()) else {
            return fail(e, Access::Atomic, at, bytes, lane);
        };
        if at % bytes != 0 {
            return fail(e, Access::Atomic, at, bytes, lane);
        }
        if atomic.wide {
            let old = u64::from(low) | u64::from(high.unwrap_or(0)) << 32;
            let new = atomic.rmw.apply64(old, w.lane64(data, lane), w.lane64(other, lane));
            put32(e.lds, index, new as u32);
            put32(e.lds, index + 4, (new >> 32) as u32);
            if atomic.returns {
                w.set_lane64(u.d, lane, old);
            }
        } else {
            put32(e.lds, index, atomic.rmw.apply32(low, w.lane(data, lane), w.lane(other, lane), m));
            if atomic.returns {
                w.set_lane(u.d, lane, low);
            }
        }
    }
    Ctl::Next
}

/// `ds_wrxchg2`: exchanges at two offsets; 2 words each with `extra` bit 31.
fn exchange2(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let address = *w.v(u.a).flat();
    let words = if u.extra & WIDE != 0 { 2 } else { 1 };
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let at = [u.imm as u32, u.extra & !WIDE].map(|offset| address[lane].wrapping_add(offset));
        let mut old = [0; 4];
        for (half, at) in at.into_iter().enumerate() {
            for n in 0..words {
                let word = get32(e.lds, at as usize + 4 * n).filter(|_| at % (4 * words as u32) == 0);
                let Some(word) = word else {
                    return fail(e, Access::Atomic, at, 4 * words as u32, lane);
                };
                old[half * words + n] = word;
            }
        }
        for (data, at) in [u.b, u.c].into_iter().zip(at) {
            for n in 0..words {
                put32(e.lds, at as usize + 4 * n, w.lane(data + n as u16, lane));
            }
        }
        for (n, word) in old.iter().enumerate().take(2 * words) {
            w.set_lane(u.d + n as u16, lane, *word);
        }
    }
    Ctl::Next
}

const WIDE: u32 = 1 << 31;

/// The byte address that M0 and the offset make.
fn from_m0(w: &Wave, u: &Uop) -> u32 {
    (super::valu::m0(w) & 0xFFFF).wrapping_add(u.imm as u32)
}

/// `ds_read_addtid_b32`, `ds_write_addtid_b32` (`extra` 1): a dword per lane from M0 on.
fn add_tid(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let (start, misaligned) = (from_m0(w, u), misaligned(e, 4));
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let at = start + 4 * lane as u32;
        let found = get32(e.lds, at as usize).filter(|_| at & misaligned == 0);
        match (found, u.extra) {
            (None, 0) => return fail(e, Access::Read, at, 4, lane),
            (None, _) => return fail(e, Access::Write, at, 4, lane),
            (Some(value), 0) => w.set_lane(u.d, lane, value),
            (Some(_), _) => {
                put32(e.lds, at as usize, w.lane(u.b, lane));
            }
        }
    }
    Ctl::Next
}

/// `ds_append`, `ds_consume` (`extra` 1): counts the active lanes up or down; all of them get the old count.
fn append(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, at) = (w.exec(), from_m0(w, u));
    let Some(old) = get32(e.lds, at as usize).filter(|_| at % 4 == 0) else {
        return fail(e, Access::Atomic, at, 4, exec.trailing_zeros() as usize & 63);
    };
    let lanes = exec.count_ones();
    put32(e.lds, at as usize, if u.extra == 0 { old.wrapping_add(lanes) } else { old.wrapping_sub(lanes) });
    for k in 0..4 {
        w.set_chunk(u.d, k, Wave::exec_chunk(exec, k), [old; 16]);
    }
    Ctl::Next
}

/// `ds_bpermute_b32`: each lane reads the one its address names; a disabled one gives 0.
fn bpermute(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let (address, data) = (*w.v(u.a).flat(), *w.v(u.b).flat());
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let from = (address[lane].wrapping_add(u.imm as u32) / 4 % 64) as usize;
        w.set_lane(u.d, lane, if exec >> from & 1 != 0 { data[from] } else { 0 });
    }
    Ctl::Next
}

/// `ds_permute_b32`: each lane writes to the one its address names; the highest wins, the rest get 0.
fn permute(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let mut out = [0; 64];
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let to = (w.lane(u.a, lane).wrapping_add(u.imm as u32) / 4 % 64) as usize;
        out[to] = w.lane(u.b, lane);
    }
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        w.set_lane(u.d, lane, out[lane]);
    }
    Ctl::Next
}

/// The source lane of `ds_swizzle_b32`.
pub(crate) fn swizzle_source(lane: usize, pattern: u32) -> usize {
    if pattern >= 0xE000 {
        // FFT: the lane reversed, but for the upper bits that the pattern keeps.
        let mask = (pattern & 0x1F) as usize;
        let reversed = (lane as u32 & 31).reverse_bits() >> 27;
        lane & !31 | reversed as usize >> mask.count_ones() | lane & mask
    } else if pattern >= 0xC000 {
        // Rotate within 32 lanes; bit 10 is the direction, bits 9:5 the amount, bits 4:0 keep source bits.
        let (amount, mask) = ((pattern >> 5 & 31) as usize, (pattern & 31) as usize);
        let moved = if pattern >> 10 & 1 != 0 { lane.wrapping_sub(amount) } else { lane + amount };
        lane & !31 | (lane & mask | moved & !mask) & 31
    } else if pattern & 0x8000 != 0 {
        lane & !3 | (pattern >> (2 * (lane & 3)) & 3) as usize
    } else {
        let (and, or, xor) = (pattern & 31, pattern >> 5 & 31, pattern >> 10 & 31);
        lane & !31 | (((lane as u32 & 31) & and | or) ^ xor) as usize
    }
}

fn swizzle(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let data = *w.v(u.a).flat();
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let from = swizzle_source(lane, u.imm as u32) & 63;
        w.set_lane(u.d, lane, if exec >> from & 1 != 0 { data[from] } else { 0 });
    }
    Ctl::Next
}

/// `ds_read_b64_tr_*`, `ds_read_b96_tr_b6` (gfx950): a transposition within 16 lanes, element width in bits in `extra`.
fn read_transposed(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, misaligned) = (w.exec(), misaligned(e, 4));
    let bytes = if u.extra == 6 { 12 } else { 8 };
    let mut rows = [0u128; 64];
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let at = w.lane(u.a, lane).wrapping_add(u.imm as u32);
        let row = e.lds.get(at as usize..).and_then(|tail| tail.get(..bytes));
        let Some(row) = row.filter(|_| at & misaligned == 0) else {
            return fail(e, Access::Read, at, bytes as u32, lane);
        };
        let mut wide = [0; 16];
        wide[..bytes].copy_from_slice(row);
        rows[lane] = u128::from_le_bytes(wide);
    }
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let base = lane & !15;
        let mut out = 0u128;
        match u.extra {
            16 => {
                for n in 0..4 {
                    let from = base + (lane >> 2 & 3) + 4 * n;
                    out |= (rows[from] >> (16 * (lane & 3)) & 0xFFFF) << (16 * n);
                }
            }
            8 => {
                for n in 0..8 {
                    let from = base + (lane >> 3 & 1) + 2 * n;
                    out |= (rows[from] >> (8 * (lane & 7)) & 0xFF) << (8 * n);
                }
            }
            width => {
                for n in 0..16 {
                    let element = rows[base + n] >> (width as usize * (lane & 15)) & ((1 << width) - 1);
                    out |= element << (width as usize * n);
                }
            }
        }
        for n in 0..bytes / 4 {
            w.set_lane(u.d + n as u16, lane, (out >> (32 * n)) as u32);
        }
    }
    Ctl::Next
}

fn nop(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    Ctl::Next
}

/// The atomic that an LDS instruction is, from its name without `DS_`.
fn atomic_of(name: &str) -> Option<Atomic> {
    let (base, returns) = match name.split_once("_RTN") {
        Some((base, tail)) => (format!("{base}{tail}"), true),
        None => (name.to_owned(), false),
    };
    let (op, ty) = base.split_once('_').map(|(op, ty)| (op.to_owned(), ty.to_owned()))?;
    let (op, ty) = match (op.as_str(), ty.as_str()) {
        ("PK", "ADD_F16") => ("PK_ADD_F16".to_owned(), "32".to_owned()),
        ("PK", "ADD_BF16") => ("PK_ADD_BF16".to_owned(), "32".to_owned()),
        _ => (op, ty),
    };
    let float = ty.starts_with('F');
    let signed = ty.starts_with('I');
    let rmw = match (op.as_str(), float) {
        ("ADD", true) => Rmw::FAdd,
        ("MIN", true) => Rmw::FMin,
        ("MAX", true) => Rmw::FMax,
        ("CMPST", true) => Rmw::FCmpSwap,
        ("ADD", _) => Rmw::Add,
        ("SUB", _) => Rmw::Sub,
        ("RSUB", _) => Rmw::RSub,
        ("INC", _) => Rmw::Inc,
        ("DEC", _) => Rmw::Dec,
        ("MIN", _) if signed => Rmw::SMin,
        ("MIN", _) => Rmw::UMin,
        ("MAX", _) if signed => Rmw::SMax,
        ("MAX", _) => Rmw::UMax,
        ("AND", _) => Rmw::And,
        ("OR", _) => Rmw::Or,
        ("XOR", _) => Rmw::Xor,
        ("MSKOR", _) => Rmw::MaskOr,
        ("WRAP", _) => Rmw::Wrap,
        ("CONDXCHG32", _) => Rmw::CondSwap,
        ("WRXCHG", _) => Rmw::Swap,
        ("CMPST", _) => Rmw::CmpSwap,
        ("PK_ADD_F16", _) => Rmw::PkAddF16,
        ("PK_ADD_BF16", _) => Rmw::PkAddBf16,
        _ => return None,
    };
    Some(Atomic { rmw, wide: ty.ends_with("64"), returns })
}

/// The handler of an LDS instruction; sets `imm` to the byte offset and `extra`.
pub(crate) fn handler(op: Op, level: Level, imm: &mut i32, extra: &mut u32) -> Option<Handler> {
    let info = op.info();
    let name = info.name.strip_prefix("DS_")?;
    let pair = ["READ2", "WRITE2", "WRXCHG2"].iter().any(|stem| name.starts_with(stem));
    if pair {
        let unit = if name.ends_with("B64") { 8 } else { 4 } * if name.contains("ST64") { 64 } else { 1 };
        let both = *imm as u32;
        *extra = (both >> 8 & 0xFF) * unit;
        *imm = ((both & 0xFF) * unit) as i32;
    }
    match op {
        Op::DS_NOP => return Some(nop),
        Op::DS_SWIZZLE_B32 => return Some(swizzle),
        Op::DS_PERMUTE_B32 => return Some(permute),
        Op::DS_BPERMUTE_B32 => return Some(bpermute),
        Op::DS_READ_B64_TR_B16 => *extra = 16,
        Op::DS_READ_B64_TR_B8 => *extra = 8,
        Op::DS_READ_B64_TR_B4 => *extra = 4,
        Op::DS_READ_B96_TR_B6 => *extra = 6,
        Op::DS_READ_ADDTID_B32 | Op::DS_WRITE_ADDTID_B32 => {
            *extra = u32::from(op == Op::DS_WRITE_ADDTID_B32);
            return Some(add_tid);
        }
        Op::DS_APPEND | Op::DS_CONSUME => {
            *extra = u32::from(op == Op::DS_CONSUME);
            return Some(append);
        }
        _ => {}
    }
    if name.contains("_TR_B") {
        return Some(read_transposed);
    }
    if name.starts_with("WRXCHG2") {
        *extra |= if name.ends_with("B64") { WIDE } else { 0 };
        return Some(exchange2);
    }
    Some(match name {
        "READ_B32" => read::<1, false>(level),
        "READ_B64" => read::<2, false>(level),
        "READ_B96" => read::<3, false>(level),
        "READ_B128" => read::<4, false>(level),
        "READ2_B32" | "READ2ST64_B32" => read::<2, true>(level),
        "READ2_B64" | "READ2ST64_B64" => read::<4, true>(level),
        "WRITE_B32" => write::<1, false>(level),
        "WRITE_B64" => write::<2, false>(level),
        "WRITE_B96" => write::<3, false>(level),
        "WRITE_B128" => write::<4, false>(level),
        "WRITE2_B32" | "WRITE2ST64_B32" => write::<1, true>(level),
        "WRITE2_B64" | "WRITE2ST64_B64" => write::<2, true>(level),
        _ => {
            if let Some(narrow) = Narrow::of(name) {
                *extra = narrow.pack();
                return Some(match (name.starts_with("READ"), narrow.bytes) {
                    (true, 1) => read_narrow::<1>(level),
                    (true, _) => read_narrow::<2>(level),
                    (false, 1) => write_narrow::<1>(level),
                    (false, _) => write_narrow::<2>(level),
                });
            }
            *extra = atomic_of(name)?.pack();
            atomic
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_atomics() {
        let all = |n: &str| atomic_of(n).map(|a| (a.rmw, a.wide, a.returns));
        assert_eq!(all("ADD_RTN_U32"), Some((Rmw::Add, false, true)));
        assert_eq!(all("MAX_I64"), Some((Rmw::SMax, true, false)));
        assert_eq!(all("CMPST_RTN_F64"), Some((Rmw::FCmpSwap, true, true)));
        assert_eq!(all("PK_ADD_RTN_BF16"), Some((Rmw::PkAddBf16, false, true)));
        assert_eq!(all("WRXCHG_RTN_B32"), Some((Rmw::Swap, false, true)));
        assert_eq!(all("WRXCHG2_RTN_B32"), None);
        assert_eq!(all("CONSUME"), None);
    }

    #[test]
    fn swizzle_patterns() {
        // Broadcast lane 3 of each quad, reverse within 32, xor 16, rotate by 1.
        assert_eq!(swizzle_source(37, 0x80FF), 39);
        assert_eq!(swizzle_source(5, 0x7C1F), 26);
        assert_eq!(swizzle_source(33, 0x401F), 49);
        assert_eq!(swizzle_source(63, 0xC020), 32);
        assert_eq!(swizzle_source(32, 0xC420), 63);
    }
}
