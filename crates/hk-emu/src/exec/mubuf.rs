//! MUBUF and MTBUF: buffer resources with range checks and formats.

use super::buffer_format::Format;
use super::mem::{self, Atomic, Narrow};
use super::{Ctl, Env, Handler, Host, Level, Uop, flat, levels};
use crate::fault::{Access, Problem};
use crate::isa::{Flags, Inst, Op};
use crate::wave::{Lanes, Wave};

/// Bits of `Uop::mask_in`.
const OFFEN: u16 = 1;
const IDXEN: u16 = 2;

/// Whether the resource at hand lays out its elements in an interleaved order.
#[inline(always)]
fn swizzled(w: &Wave, u: &Uop) -> bool {
    w.s[(u.b as usize + 1) & 127] >> 31 != 0
}

/// Addresses, and the lanes whose access passes the range check. `bytes`: size of the access, `skip`: how far behind
/// the instruction's address it begins.
#[inline(always)]
fn addresses(w: &Wave, e: &Env<'_>, u: &Uop, bytes: u64, skip: u32) -> ([u64; 64], u64) {
    let word = |i: usize| w.s[(u.b as usize + i) & 127];
    let base = u64::from(word(0)) | u64::from(word(1) & 0xFFFF) << 32;
    let (records, control) = (u64::from(word(2)), word(3));
    let add_tid = control >> 23 & 1 != 0;
    // With the lane in the index, the bits of the data format extend the stride.
    let more_stride = if add_tid { control >> 15 & 0xF } else { 0 };
    let stride = u64::from(word(1) >> 16 & 0x3FFF | more_stride << 14);
    let interleaved = 8u64 << (control >> 21 & 3);
    let swizzled = swizzled(w, u);
    let soffset = u64::from(e.s32(w, u.hi[0]));
    let (offen, idxen) = (u.mask_in & OFFEN != 0, u.mask_in & IDXEN != 0);
    let index = *w.v(u.a).flat();
    let voffset = *w.v(if idxen { u.a + 1 } else { u.a }).flat();
    let imm = (u.imm as u32).wrapping_add(skip);
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
            // Of each dword, the first byte.
            offset + soffset + bytes - bytes.min(4) < records
        };
        let place = if swizzled {
            // Dwords of as many elements as the index stride says lie side by side.
            let row = index / interleaved * stride + (offset & !3);
            row.wrapping_mul(interleaved) + index % interleaved * 4 + offset % 4
        } else {
            (index * stride).wrapping_add(offset)
        };
        addr[l] = base.wrapping_add(soffset).wrapping_add(place);
        valid |= u64::from(inside && bound) << l;
    }
    (addr, valid)
}

/// Bytes next to each other that lanes of an instruction access.
pub(crate) struct Piece {
    pub address: [u64; 64],
    /// The lanes that pass the range check.
    pub lanes: u64,
    /// Of each lane.
    pub bytes: u32,
    /// Place of the first one's register among those of the instruction.
    pub register: u16,
}

/// What an instruction accesses. Formatted elements are one piece; of others, lanes that lie in range altogether are one, and
/// those that do not go dword by dword, as all do where a swizzle takes dwords apart. `bytes`: size of the access by its name.
pub(crate) fn pieces(w: &Wave, e: &Env<'_>, inst: &Inst, u: &Uop, bytes: u32) -> Vec<Piece> {
    let name = inst.op.info().name;
    if name.contains("_FORMAT_") {
        let format = Formatted::unpack(u.extra).format(w, u);
        let bytes = format.map_or(0, |(format, _)| format.bytes() as u32);
        let (address, lanes) = addresses(w, e, u, bytes.into(), 0);
        return vec![Piece { address, lanes, bytes, register: 0 }];
    }
    let (address, lanes) = addresses(w, e, u, bytes.into(), 0);
    let whole = Piece { address, lanes, bytes, register: 0 };
    if bytes <= 4 || name.contains("ATOMIC") || inst.flags.lds {
        return vec![whole];
    }
    let apart = if swizzled(w, u) { !0 } else { !lanes };
    let dwords = (0..bytes / 4).map(|n| {
        let (address, lanes) = addresses(w, e, u, 4, 4 * n);
        Piece { address, lanes: lanes & apart, bytes: 4, register: n as u16 }
    });
    if w.exec() & apart == 0 {
        return vec![whole];
    }
    std::iter::once(Piece { lanes: lanes & !apart, ..whole }).chain(dwords).collect()
}

/// Clears `n` registers in the lanes given.
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
    let (addr, valid) = addresses(w, e, u, 4 * N as u64, 0);
    if N == 1 || exec & !valid == 0 && !swizzled(w, u) {
        if exec & !valid != 0 {
            zero_lanes(w, u.d, N, exec & !valid);
        }
        return mem::load_dwords::<H, N>(w, e, u, &addr, exec & valid, u.d);
    }
    // All addresses before the destination, which may hold them, is written.
    for (n, (addr, valid)) in each_dword::<N>(w, e, u).iter().enumerate() {
        let d = u.d + n as u16;
        zero_lanes(w, d, 1, exec & !valid);
        let ctl = mem::load_dwords::<H, 1>(w, e, u, addr, exec & valid, d);
        if ctl != Ctl::Next {
            return ctl;
        }
    }
    Ctl::Next
}
levels!(buffer_load = load_body[N: usize]);

/// The dwords of an access as accesses of their own: each is checked alone, and a swizzle separates them.
#[cold]
#[inline(never)]
fn each_dword<const N: usize>(w: &Wave, e: &Env<'_>, u: &Uop) -> [([u64; 64], u64); N] {
    std::array::from_fn(|n| addresses(w, e, u, 4, 4 * n as u32))
}

#[inline(always)]
fn store_body<H: Host, const N: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let (addr, valid) = addresses(w, e, u, 4 * N as u64, 0);
    if N == 1 || exec & !valid == 0 && !swizzled(w, u) {
        return mem::store_dwords::<H, N>(w, e, u, &addr, exec & valid, u.c);
    }
    for (n, (addr, valid)) in each_dword::<N>(w, e, u).iter().enumerate() {
        let ctl = mem::store_dwords::<H, 1>(w, e, u, addr, exec & valid, u.c + n as u16);
        if ctl != Ctl::Next {
            return ctl;
        }
    }
    Ctl::Next
}
levels!(buffer_store = store_body[N: usize]);

#[inline(always)]
fn load_narrow_body<H: Host>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, n) = (w.exec(), Narrow::unpack(u.extra));
    let (addr, valid) = addresses(w, e, u, n.bytes.into(), 0);
    mem::merge_narrow(w, u.d, exec & !valid, n, &Lanes::ZERO);
    mem::load_narrow(w, e, u, &addr, exec & valid, u.d, n)
}
levels!(load_narrow = load_narrow_body);

#[inline(always)]
fn store_narrow_body<H: Host>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, n) = (w.exec(), Narrow::unpack(u.extra));
    let (addr, valid) = addresses(w, e, u, n.bytes.into(), 0);
    mem::store_narrow(w, e, u, &addr, exec & valid, u.c, n)
}
levels!(store_narrow = store_narrow_body);

fn atomic(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, atomic) = (w.exec(), Atomic::unpack(u.extra));
    let (addr, valid) = addresses(w, e, u, atomic.bytes() as u64, 0);
    let ctl = mem::atomic(w, e, u, &addr, exec & valid, [u.d, u.c], atomic);
    if atomic.returns && ctl == Ctl::Next {
        zero_lanes(w, u.d, if atomic.wide { 2 } else { 1 }, exec & !valid);
    }
    ctl
}

fn load_lds(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let dwords = u.extra >> 31 == 0;
    let bytes = if dwords { 4 * (u.extra & 7) } else { Narrow::unpack(u.extra).bytes.into() };
    let (addr, valid) = addresses(w, e, u, bytes.into(), 0);
    flat::lds_dma(w, e, u, &addr, exec, valid)
}

/// What a formatted access moves, packed into `u.extra`.
#[derive(Clone, Copy)]
struct Formatted {
    /// Components in registers.
    components: usize,
    /// 16 bits each.
    half: bool,
    /// In the upper half of the register.
    high: bool,
    /// Data and number format of the instruction; else they are the resource's.
    typed: Option<u8>,
}

impl Formatted {
    fn of(name: &str, format: u8) -> Option<Formatted> {
        let (_, rest) = name.split_once("_FORMAT_")?;
        let (half, rest) = rest.strip_prefix("D16_").map_or((false, rest), |rest| (true, rest));
        let (high, rest) = rest.strip_prefix("HI_").map_or((false, rest), |rest| (true, rest));
        let typed = name.starts_with('T').then_some(format & 0x7F);
        Some(Formatted { components: rest.len(), half, high, typed })
    }

    fn pack(self) -> u32 {
        let typed = self.typed.map_or(0, |format| 1 << 16 | u32::from(format) << 8);
        self.components as u32 | u32::from(self.half) << 4 | u32::from(self.high) << 5 | typed
    }

    fn unpack(x: u32) -> Formatted {
        Formatted {
            components: (x & 7) as usize,
            half: x >> 4 & 1 != 0,
            high: x >> 5 & 1 != 0,
            typed: (x >> 16 & 1 != 0).then_some((x >> 8 & 0x7F) as u8),
        }
    }

    /// The format, and for each register component which of the element's it is: 4 to 7, or the constants 0 and 1.
    fn format(self, w: &Wave, u: &Uop) -> Option<(Format, [u32; 4])> {
        let control = w.s[(u.b as usize + 3) & 127];
        match self.typed {
            Some(format) => {
                Some((Format::new(u32::from(format) & 0xF, u32::from(format) >> 4)?, [4, 5, 6, 7]))
            }
            None => {
                let format = Format::new(control >> 15 & 0xF, control >> 12 & 7)?;
                Some((format, [0, 3, 6, 9].map(|shift| control >> shift & 7)))
            }
        }
    }
}

const ILLEGAL_FORMAT: Problem = Problem::Unsupported { what: "a data format that does not exist" };

/// The element of one lane as register components.
fn load_element(
    e: &mut Env<'_>,
    u: &Uop,
    (format, select): (Format, [u32; 4]),
    address: u64,
    lane: usize,
) -> Result<[u32; 4], Problem> {
    let bytes = format.bytes();
    let memory = e.memory;
    e.read_bytes += bytes as u64;
    let found = memory.find(address, bytes as u64, &mut e.hints[u.index as usize]);
    let found = found.filter(|_| !memory.strict() || address % bytes.min(4) as u64 == 0);
    let Some((allocation, offset)) = found else {
        return Err(Problem::memory(Access::Read, address, bytes as u32, Some(lane as u32)));
    };
    let mut element = [0; 16];
    allocation.read_bytes(offset, &mut element[..bytes]);
    let components = format.unpack(u128::from_le_bytes(element));
    Ok(select.map(|which| match which {
        4..=7 => components[which as usize - 4],
        1 => format.one(),
        _ => 0,
    }))
}

fn load_format(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, f) = (w.exec(), Formatted::unpack(u.extra));
    let Some(format) = f.format(w, u) else { return e.fault(ILLEGAL_FORMAT) };
    let (addr, valid) = addresses(w, e, u, format.0.bytes() as u64, 0);
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let mut x = [0; 4];
        if valid >> lane & 1 != 0 {
            x = match load_element(e, u, format, addr[lane], lane) {
                Ok(x) => x,
                Err(problem) => return e.fault(problem),
            };
        }
        for (n, x) in x.into_iter().enumerate().take(f.components) {
            if !f.half {
                w.set_lane(u.d + n as u16, lane, x);
                continue;
            }
            let (d, high) = (u.d + n as u16 / 2, f.high || n % 2 == 1);
            let (old, half) = (w.lane(d, lane), format.0.narrow(x));
            w.set_lane(d, lane, if high { old & 0xFFFF | half << 16 } else { old & 0xFFFF_0000 | half });
        }
    }
    Ctl::Next
}

fn load_format_lds(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, f) = (w.exec(), Formatted::unpack(u.extra));
    let Some(format) = f.format(w, u) else { return e.fault(ILLEGAL_FORMAT) };
    let (addr, valid) = addresses(w, e, u, format.0.bytes() as u64, 0);
    flat::to_lds(w, e, u, exec, 1, |_, e, lane| {
        if valid >> lane & 1 != 0 { load_element(e, u, format, addr[lane], lane) } else { Ok([0; 4]) }
    })
}

fn store_format(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (exec, f) = (w.exec(), Formatted::unpack(u.extra));
    let Some((format, _)) = f.format(w, u) else { return e.fault(ILLEGAL_FORMAT) };
    let bytes = format.bytes();
    let (addr, valid) = addresses(w, e, u, bytes as u64, 0);
    let memory = e.memory;
    for lane in (0..64).filter(|lane| exec & valid & 1 << lane != 0) {
        let mut x = [0; 4];
        for (n, x) in x.iter_mut().enumerate().take(f.components) {
            *x = if f.half {
                let word = w.lane(u.c + n as u16 / 2, lane);
                format.widen(if f.high || n % 2 == 1 { word >> 16 } else { word })
            } else {
                w.lane(u.c + n as u16, lane)
            };
        }
        let found = memory.find(addr[lane], bytes as u64, &mut e.hints[u.index as usize]);
        let found = found.filter(|(allocation, _)| {
            allocation.writable && (!memory.strict() || addr[lane] % bytes.min(4) as u64 == 0)
        });
        let Some((allocation, offset)) = found else {
            return e.fault(Problem::memory(Access::Write, addr[lane], bytes as u32, Some(lane as u32)));
        };
        e.written_bytes += bytes as u64;
        allocation.write_bytes(offset, &format.pack(x).to_le_bytes()[..bytes]);
    }
    Ctl::Next
}

/// A cache write-back or invalidation: device memory has no caches, but the host may have its accesses in another order.
fn fence(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    std::sync::atomic::fence(std::sync::atomic::Ordering::AcqRel);
    Ctl::Next
}

/// The operand bits that go into `Uop::mask_in`.
pub(crate) fn operand_bits(offen: bool, idxen: bool) -> u16 {
    (if offen { OFFEN } else { 0 }) | (if idxen { IDXEN } else { 0 })
}

/// The handler of a MUBUF or MTBUF instruction; sets `extra`.
pub(crate) fn handler(op: Op, flags: Flags, returns: bool, level: Level, extra: &mut u32) -> Option<Handler> {
    let (name, lds) = (op.info().name, flags.lds);
    if matches!(op, Op::BUFFER_WBL2 | Op::BUFFER_INV) {
        return Some(fence);
    }
    if let Some(formatted) = Formatted::of(name, flags.format) {
        *extra = formatted.pack();
        return Some(match (name.contains("_LOAD_"), lds) {
            (true, false) => load_format,
            (true, true) => load_format_lds,
            (false, _) => store_format,
        });
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
        return Some(if load { load_narrow(level) } else { store_narrow(level) });
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
