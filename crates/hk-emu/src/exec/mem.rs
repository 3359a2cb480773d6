//! Global memory as a wave sees it: a snapshot of the allocations, and vector accesses to it.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use super::float;
use super::lanes::{Modes, each_chunk, each_lane};
use super::{Ctl, Env, Host, Uop};
use crate::fault::{Access, Problem};
use crate::memory::{Allocation, View};
use crate::wave::{CHUNK, Lanes, Wave};

/// What an access says when it fails.
#[cold]
#[inline(never)]
fn fail(e: &mut Env<'_>, access: Access, address: u64, bytes: usize, lane: usize) -> Ctl {
    e.fault(Problem::memory(access, address, bytes as u32, Some(lane as u32)))
}

#[inline(always)]
fn contiguous(addr: &[u64; 64], step: u64) -> bool {
    let mut differences = 0;
    for l in 0..64 {
        differences |= addr[l] ^ addr[0].wrapping_add(l as u64 * step);
    }
    differences == 0
}

/// The lowest and the highest address of the lanes of `mask`, and the bits in which any of them differ.
#[inline(always)]
fn reach(addr: &[u64; 64], mask: u64) -> (u64, u64, u64) {
    let first = addr[mask.trailing_zeros() as usize % 64];
    if mask == !0 {
        reach_from(addr, first, |_| 0)
    } else {
        reach_from(addr, first, |lane| (mask >> lane & 1).wrapping_sub(1))
    }
}

/// The same from one of the addresses; `idle` has all bits set for lanes that do not count.
#[inline(always)]
fn reach_from(addr: &[u64; 64], first: u64, idle: impl Fn(usize) -> u64) -> (u64, u64, u64) {
    let mut bits = 0;
    for (lane, address) in addr.iter().enumerate() {
        bits |= (address ^ first) & !idle(lane);
    }
    if bits >> 32 == 0 {
        // Hosts have instructions for the lower of two words, but not of two pairs of them.
        let (mut low, mut high) = (u32::MAX, 0);
        for (lane, address) in addr.iter().enumerate() {
            low = low.min(*address as u32 | idle(lane) as u32);
            high = high.max(*address as u32 & !idle(lane) as u32);
        }
        let base = first >> 32 << 32;
        return (base | u64::from(low), base | u64::from(high), bits);
    }
    let (mut low, mut high) = (u64::MAX, 0);
    for (lane, address) in addr.iter().enumerate() {
        low = low.min(address | idle(lane));
        high = high.max(address & !idle(lane));
    }
    (low, high, bits)
}

/// The words in which the lanes of `mask` access `bytes` bytes each, 1 or 2, if all are aligned and in one allocation: from that
/// of the lowest address to that of the highest, and the address of the first word. Its index in the allocation comes second.
#[inline(always)]
fn narrow_span<'a>(
    memory: &View<'a>,
    hint: &mut u32,
    addr: &[u64; 64],
    mask: u64,
    bytes: u64,
) -> Option<(&'a Allocation, usize, &'a [AtomicU32], u64)> {
    let (low, high, bits) = reach(addr, mask);
    if mask == 0 || bits % bytes != 0 {
        return None;
    }
    let (allocation, offset) = memory.find(low, (high - low).checked_add(bytes)?, hint)?;
    if offset as u64 % bytes != 0 {
        return None;
    }
    let (word, start) = (offset / 4, low.wrapping_sub(offset as u64 % 4));
    let words = allocation.words(4 * word, ((high - start) / 4) as usize + 1)?;
    Some((allocation, word, words, start))
}

/// The words that the lanes of `mask` access, if all are aligned and in one allocation: those from the lowest to the highest address,
/// which is returned as well.
#[inline(always)]
fn span<'a, const N: usize>(
    memory: &View<'a>,
    hint: &mut u32,
    addr: &[u64; 64],
    mask: u64,
) -> Option<(&'a Allocation, &'a [AtomicU32], u64)> {
    let (low, high, bits) = reach(addr, mask);
    if mask == 0 || bits % 4 != 0 {
        return None;
    }
    let bytes = (high - low).checked_add(4 * N as u64)?;
    let (allocation, offset) = memory.find(low, bytes, hint)?;
    if offset % 4 != 0 {
        return None;
    }
    Some((allocation, allocation.words(offset, (bytes / 4) as usize)?, low))
}

/// Loads `N` dwords per lane of `mask` into the registers from `dst` on.
#[inline(always)]
pub(crate) fn load_dwords<H: Host, const N: usize>(
    w: &mut Wave,
    e: &mut Env<'_>,
    u: &Uop,
    addr: &[u64; 64],
    mask: u64,
    dst: u16,
) -> Ctl {
    let memory = e.memory;
    let hint = &mut e.hints[u.index as usize];
    e.read_bytes += u64::from(mask.count_ones()) * 4 * N as u64;
    if mask == !0
        && contiguous(addr, 4 * N as u64)
        && let Some((allocation, offset)) = memory.find(addr[0], 256 * N as u64, hint)
        && offset % 4 == 0
        && let Some(words) = allocation.words(offset, 64 * N)
        && let Some(registers) = w.tuple_mut::<N>(dst)
    {
        if let ([register], (chunks, _)) = (registers.as_mut_slice(), words.as_chunks()) {
            for (register, words) in register.0.iter_mut().zip(chunks) {
                *register = H::load_words(words);
            }
            return Ctl::Next;
        }
        // Word by word: the loads are atomic, so the compiler leaves them scalar.
        for (lane, words) in words.chunks_exact(N).enumerate() {
            for n in 0..N {
                registers[n].set(lane, words[n].load(Relaxed));
            }
        }
        return Ctl::Next;
    }
    if let Some((_, words, low)) = span::<N>(memory, hint, addr, mask) {
        if let Some(words) = words.first_chunk::<N>().filter(|_| words.len() == N) {
            // One address.
            for n in 0..N {
                let value = [words[n].load(Relaxed); CHUNK];
                each_chunk!(mask, |k, mask| {
                    w.set_chunk(dst + n as u16, k, mask, value);
                });
            }
            return Ctl::Next;
        }
        each_lane!(mask, |lane| {
            let first = ((addr[lane] - low) / 4) as usize;
            for n in 0..N {
                w.set_lane(dst + n as u16, lane, words[first + n].load(Relaxed));
            }
        });
        return Ctl::Next;
    }
    for lane in 0..64 {
        if mask >> lane & 1 == 0 {
            continue;
        }
        let address = addr[lane];
        let Some((allocation, offset)) = memory.find(address, 4 * N as u64, hint) else {
            return fail(e, Access::Read, address, 4 * N, lane);
        };
        if offset % 4 != 0 && memory.strict {
            return fail(e, Access::Read, address, 4 * N, lane);
        }
        for n in 0..N {
            w.set_lane(dst + n as u16, lane, allocation.load32(offset + 4 * n));
        }
    }
    Ctl::Next
}

/// Stores `N` dwords per lane of `mask` from the registers from `src` on.
#[inline(always)]
pub(crate) fn store_dwords<H: Host, const N: usize>(
    w: &mut Wave,
    e: &mut Env<'_>,
    u: &Uop,
    addr: &[u64; 64],
    mask: u64,
    src: u16,
) -> Ctl {
    let memory = e.memory;
    let hint = &mut e.hints[u.index as usize];
    e.written_bytes += u64::from(mask.count_ones()) * 4 * N as u64;
    if mask == !0
        && contiguous(addr, 4 * N as u64)
        && let Some((allocation, offset)) = memory.find(addr[0], 256 * N as u64, hint)
        && allocation.writable
        && offset % 4 == 0
        && let Some(words) = allocation.words(offset, 64 * N)
        && let Some(registers) = w.tuple::<N>(src)
    {
        if let ([register], (chunks, _)) = (registers.as_slice(), words.as_chunks()) {
            for (register, words) in register.0.iter().zip(chunks) {
                H::store_words(words, *register);
            }
            return Ctl::Next;
        }
        for (lane, words) in words.chunks_exact(N).enumerate() {
            for n in 0..N {
                words[n].store(registers[n].get(lane), Relaxed);
            }
        }
        return Ctl::Next;
    }
    if let Some((allocation, words, low)) = span::<N>(memory, hint, addr, mask)
        && allocation.writable
    {
        // Of lanes at one address the last one counts.
        let mask = if words.len() == N { 1 << (63 - mask.leading_zeros()) } else { mask };
        each_lane!(mask, |lane| {
            let first = ((addr[lane] - low) / 4) as usize;
            for n in 0..N {
                words[first + n].store(w.lane(src + n as u16, lane), Relaxed);
            }
        });
        return Ctl::Next;
    }
    for lane in 0..64 {
        if mask >> lane & 1 == 0 {
            continue;
        }
        let address = addr[lane];
        let Some((allocation, offset)) = memory.find(address, 4 * N as u64, hint) else {
            return fail(e, Access::Write, address, 4 * N, lane);
        };
        if !allocation.writable || offset % 4 != 0 && memory.strict {
            return fail(e, Access::Write, address, 4 * N, lane);
        }
        for n in 0..N {
            allocation.store32(offset + 4 * n, w.lane(src + n as u16, lane));
        }
    }
    Ctl::Next
}

/// A load or store narrower than a dword.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Narrow {
    /// 1 or 2.
    pub bytes: u8,
    pub signed: bool,
    /// Loads: writes one half and keeps the other. Stores: takes the high half.
    pub half: Option<Half>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    Low,
    High,
}

impl Narrow {
    /// From a mnemonic that ends like `UBYTE_D16_HI`, `SHORT`, `U8`, `B16_D16_HI`.
    pub fn of(name: &str) -> Option<Narrow> {
        let (name, half) = if let Some(name) = name.strip_suffix("_D16_HI") {
            (name, Some(Half::High))
        } else if let Some(name) = name.strip_suffix("_D16") {
            (name, Some(Half::Low))
        } else {
            (name, None)
        };
        let kind = name.rsplit('_').next()?;
        let (bytes, signed) = match kind {
            "UBYTE" | "BYTE" | "U8" | "B8" => (1, false),
            "SBYTE" | "I8" => (1, true),
            "USHORT" | "SHORT" | "U16" | "B16" => (2, false),
            "SSHORT" | "I16" => (2, true),
            _ => return None,
        };
        Some(Narrow { bytes, signed, half })
    }

    /// Packed into a number for a [`Uop`].
    pub fn pack(self) -> u32 {
        let half = match self.half {
            None => 0,
            Some(Half::Low) => 1,
            Some(Half::High) => 2,
        };
        u32::from(self.bytes) | u32::from(self.signed) << 4 | half << 8
    }

    pub fn unpack(x: u32) -> Narrow {
        let half = match x >> 8 & 3 {
            0 => None,
            1 => Some(Half::Low),
            _ => Some(Half::High),
        };
        Narrow { bytes: (x & 0xF) as u8, signed: x >> 4 & 1 != 0, half }
    }

    /// The register after `x` was loaded over `old`. What `x` has above the loaded bytes does not count.
    #[inline(always)]
    pub fn merge(self, old: u32, x: u32) -> u32 {
        // Without branches: all lanes do the same.
        let above = 32 - 8 * u32::from(self.bytes);
        let x = if self.signed { ((x << above) as i32 >> above) as u32 } else { x << above >> above };
        let (kept, up) = match self.half {
            None => (0, 0),
            Some(Half::Low) => (0xFFFF_0000, 0),
            Some(Half::High) => (0xFFFF, 16),
        };
        old & kept | x << up & !kept
    }

    /// The value to store from a register.
    #[inline(always)]
    pub fn take(self, register: u32) -> u32 {
        if self.half == Some(Half::High) { register >> 16 } else { register }
    }
}

/// Puts what was loaded into the lanes of `mask`.
#[inline(always)]
pub(crate) fn merge_narrow(w: &mut Wave, dst: u16, mask: u64, n: Narrow, raw: &Lanes) {
    each_chunk!(mask, |k, mask| {
        let (mut r, old) = ([0; CHUNK], w.chunk(dst, k));
        for l in 0..CHUNK {
            r[l] = n.merge(old[l], raw.0[k][l]);
        }
        w.set_chunk(dst, k, mask, r);
    });
}

/// Loads a byte or two per lane of `mask`.
#[inline(always)]
pub(crate) fn load_narrow(
    w: &mut Wave,
    e: &mut Env<'_>,
    u: &Uop,
    addr: &[u64; 64],
    mask: u64,
    dst: u16,
    n: Narrow,
) -> Ctl {
    let memory = e.memory;
    let hint = &mut e.hints[u.index as usize];
    e.read_bytes += u64::from(mask.count_ones()) * u64::from(n.bytes);
    if let Some((_, _, words, start)) = narrow_span(memory, hint, addr, mask, n.bytes.into()) {
        let mut raw = Lanes::ZERO;
        if let [word] = words {
            // One word, as of a field of the kernel's arguments, is read once.
            let word = word.load(Relaxed);
            for lane in 0..64 {
                raw.set(lane, word >> (addr[lane].wrapping_sub(start) % 4 * 8));
            }
        } else {
            each_lane!(mask, |lane| {
                let at = addr[lane] - start;
                raw.set(lane, words[(at / 4) as usize].load(Relaxed) >> (at % 4 * 8));
            });
        }
        merge_narrow(w, dst, mask, n, &raw);
        return Ctl::Next;
    }
    each_lane!(mask, |lane| {
        let address = addr[lane];
        let Some((allocation, offset)) = memory.find(address, n.bytes.into(), hint) else {
            return fail(e, Access::Read, address, n.bytes.into(), lane);
        };
        if n.bytes == 2 && offset % 2 != 0 && memory.strict {
            return fail(e, Access::Read, address, n.bytes.into(), lane);
        }
        let raw = if n.bytes == 1 { allocation.load8(offset) } else { allocation.load16(offset) };
        let value = n.merge(w.lane(dst, lane), raw);
        w.set_lane(dst, lane, value);
    });
    Ctl::Next
}

/// Stores a byte or two per lane of `mask`.
#[inline(always)]
pub(crate) fn store_narrow(
    w: &mut Wave,
    e: &mut Env<'_>,
    u: &Uop,
    addr: &[u64; 64],
    mask: u64,
    src: u16,
    n: Narrow,
) -> Ctl {
    let memory = e.memory;
    let hint = &mut e.hints[u.index as usize];
    e.written_bytes += u64::from(mask.count_ones()) * u64::from(n.bytes);
    if let Some((allocation, first, _, start)) = narrow_span(memory, hint, addr, mask, n.bytes.into())
        && allocation.writable
    {
        let data = w.v(src);
        let whole = if n.bytes == 1 { 0xFF } else { 0xFFFF };
        // What neighbouring lanes write to one word is one store.
        let (mut word, mut bits, mut value) = (first, 0, 0);
        each_lane!(mask, |lane| {
            let at = (addr[lane] - start) as usize;
            if first + at / 4 != word {
                allocation.merge(word, bits, value);
                (word, bits) = (first + at / 4, 0);
            }
            let shift = at % 4 * 8;
            let field = whole << shift;
            value = value & !field | n.take(data.get(lane)) << shift & field;
            bits |= field;
        });
        allocation.merge(word, bits, value);
        return Ctl::Next;
    }
    each_lane!(mask, |lane| {
        let address = addr[lane];
        let Some((allocation, offset)) = memory.find(address, n.bytes.into(), hint) else {
            return fail(e, Access::Write, address, n.bytes.into(), lane);
        };
        if !allocation.writable || n.bytes == 2 && offset % 2 != 0 && memory.strict {
            return fail(e, Access::Write, address, n.bytes.into(), lane);
        }
        let value = n.take(w.lane(src, lane));
        if n.bytes == 1 {
            allocation.store8(offset, value);
        } else {
            allocation.store16(offset, value);
        }
    });
    Ctl::Next
}

/// Read-modify-write operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Rmw {
    Swap,
    CmpSwap,
    Add,
    Sub,
    RSub,
    SMin,
    UMin,
    SMax,
    UMax,
    And,
    Or,
    Xor,
    Inc,
    Dec,
    FAdd,
    FMin,
    FMax,
    FCmpSwap,
    MaskOr,
    Wrap,
    /// Each dword whose data has bit 31 set gets the other bits of its data.
    CondSwap,
    PkAddF16,
    PkAddBf16,
}

const RMW: [Rmw; 23] = [
    Rmw::Swap,
    Rmw::CmpSwap,
    Rmw::Add,
    Rmw::Sub,
    Rmw::RSub,
    Rmw::SMin,
    Rmw::UMin,
    Rmw::SMax,
    Rmw::UMax,
    Rmw::And,
    Rmw::Or,
    Rmw::Xor,
    Rmw::Inc,
    Rmw::Dec,
    Rmw::FAdd,
    Rmw::FMin,
    Rmw::FMax,
    Rmw::FCmpSwap,
    Rmw::MaskOr,
    Rmw::Wrap,
    Rmw::CondSwap,
    Rmw::PkAddF16,
    Rmw::PkAddBf16,
];

/// An atomic: the operation and its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Atomic {
    pub rmw: Rmw,
    pub wide: bool,
    pub returns: bool,
}

impl Atomic {
    pub fn pack(self) -> u32 {
        self.rmw as u32 | u32::from(self.wide) << 8 | u32::from(self.returns) << 9
    }

    pub fn unpack(x: u32) -> Atomic {
        let rmw = RMW.get((x & 0xFF) as usize).copied().unwrap_or(Rmw::Swap);
        Atomic { rmw, wide: x >> 8 & 1 != 0, returns: x >> 9 & 1 != 0 }
    }

    /// From the part of a mnemonic after `ATOMIC_`.
    pub fn of(name: &str, returns: bool) -> Option<Atomic> {
        let (base, wide) = match name.strip_suffix("_X2") {
            Some(base) => (base, true),
            None => (name, name.ends_with("F64")),
        };
        let rmw = match base {
            "SWAP" => Rmw::Swap,
            "CMPSWAP" => Rmw::CmpSwap,
            "ADD" => Rmw::Add,
            "SUB" => Rmw::Sub,
            "SMIN" => Rmw::SMin,
            "UMIN" => Rmw::UMin,
            "SMAX" => Rmw::SMax,
            "UMAX" => Rmw::UMax,
            "AND" => Rmw::And,
            "OR" => Rmw::Or,
            "XOR" => Rmw::Xor,
            "INC" => Rmw::Inc,
            "DEC" => Rmw::Dec,
            "ADD_F32" | "ADD_F64" => Rmw::FAdd,
            "MIN_F64" => Rmw::FMin,
            "MAX_F64" => Rmw::FMax,
            "PK_ADD_F16" => Rmw::PkAddF16,
            "PK_ADD_BF16" => Rmw::PkAddBf16,
            _ => return None,
        };
        Some(Atomic { rmw, wide, returns })
    }

    pub fn bytes(self) -> usize {
        if self.wide { 8 } else { 4 }
    }

    /// Whether the final memory does not depend on the order of several, and nothing else sees the order. Those of 64
    /// bits are only atomic among themselves, so they run in order, too.
    pub fn commutes(self) -> bool {
        !self.returns
            && !self.wide
            && matches!(
                self.rmw,
                Rmw::Add
                    | Rmw::Sub
                    | Rmw::SMin
                    | Rmw::UMin
                    | Rmw::SMax
                    | Rmw::UMax
                    | Rmw::And
                    | Rmw::Or
                    | Rmw::Xor
            )
    }
}

fn pk(old: u32, data: u32, add: impl Fn(u32, u32) -> u32) -> u32 {
    add(old & 0xFFFF, data & 0xFFFF) | add(old >> 16, data >> 16) << 16
}

fn add_f16(a: u32, b: u32) -> u32 {
    let sum = float::f16_to_f32(a) + float::f16_to_f32(b);
    if sum.is_nan() { float::nan16(&[a, b]) } else { float::f32_to_f16(sum) }
}

fn add_bf16(a: u32, b: u32) -> u32 {
    let sum = float::bf16_to_f32(a) + float::bf16_to_f32(b);
    if sum.is_nan() { float::nan32(&[a << 16, b << 16]) >> 16 } else { float::f32_to_bf16(sum) }
}

/// The new value: the integer operations, which are the same at both widths, then the given arms.
macro_rules! updated {
    ($rmw:expr, ($old:ident, $data:ident, $compare:ident): $unsigned:ty as $signed:ty, $($float:tt)*) => {
        match $rmw {
            Rmw::Swap => $data,
            Rmw::CmpSwap => if $old == $compare { $data } else { $old },
            Rmw::Add => $old.wrapping_add($data),
            Rmw::Sub => $old.wrapping_sub($data),
            Rmw::RSub => $data.wrapping_sub($old),
            Rmw::SMin => ($old as $signed).min($data as $signed) as $unsigned,
            Rmw::UMin => $old.min($data),
            Rmw::SMax => ($old as $signed).max($data as $signed) as $unsigned,
            Rmw::UMax => $old.max($data),
            Rmw::And => $old & $data,
            Rmw::Or => $old | $data,
            Rmw::Xor => $old ^ $data,
            Rmw::Inc => if $old >= $data { 0 } else { $old + 1 },
            Rmw::Dec => if $old == 0 || $old > $data { $data } else { $old - 1 },
            Rmw::MaskOr => $old & !$data | $compare,
            Rmw::Wrap => if $old >= $data { $old - $data } else { $old.wrapping_add($compare) },
            $($float)*
        }
    };
}

impl Rmw {
    /// The new value of a dword. `m` is MODE for LDS; global memory always rounds to nearest and flushes denormals.
    pub fn apply32(self, old: u32, data: u32, compare: u32, m: Modes) -> u32 {
        updated!(self, (old, data, compare): u32 as i32,
            Rmw::FAdd => {
                let (a, b) = (m.input32(old), m.input32(data));
                let sum = f32::from_bits(a) + f32::from_bits(b);
                if sum.is_nan() { float::nan32(&[a, b]) } else { m.output32(sum.to_bits()) }
            }
            Rmw::FMin | Rmw::FMax => {
                let pick = if self == Rmw::FMin {
                    float::order32(data) < float::order32(old)
                } else {
                    float::order32(data) > float::order32(old)
                };
                if float::is_nan32(old) || pick && !float::is_nan32(data) { data } else { old }
            }
            Rmw::FCmpSwap => if f32::from_bits(old) == f32::from_bits(compare) { data } else { old },
            Rmw::CondSwap => if data >> 31 != 0 { data & 0x7FFF_FFFF } else { old },
            Rmw::PkAddF16 => pk(old, data, add_f16),
            Rmw::PkAddBf16 => pk(old, data, add_bf16),
        )
    }

    /// The new value of a 64-bit word.
    pub fn apply64(self, old: u64, data: u64, compare: u64) -> u64 {
        updated!(self, (old, data, compare): u64 as i64,
            Rmw::FAdd => {
                let sum = f64::from_bits(old) + f64::from_bits(data);
                if sum.is_nan() { float::nan64(&[old, data]) } else { sum.to_bits() }
            }
            Rmw::FMin | Rmw::FMax => {
                let pick = if self == Rmw::FMin {
                    float::order64(data) < float::order64(old)
                } else {
                    float::order64(data) > float::order64(old)
                };
                if float::is_nan64(old) || pick && !float::is_nan64(data) { data } else { old }
            }
            Rmw::FCmpSwap => if f64::from_bits(old) == f64::from_bits(compare) { data } else { old },
            Rmw::CondSwap => {
                let half = |shift: u32| {
                    let (old, data) = ((old >> shift) as u32, (data >> shift) as u32);
                    u64::from(if data >> 31 != 0 { data & 0x7FFF_FFFF } else { old }) << shift
                };
                half(0) | half(32)
            }
            // The instruction set has no packed operation of this width.
            Rmw::PkAddF16 | Rmw::PkAddBf16 => data,
        )
    }
}

/// The atomic at `offset`, a multiple of 4. Returns the old value.
pub(crate) fn update(
    allocation: &Allocation,
    offset: usize,
    atomic: Atomic,
    data: u64,
    compare: u64,
    m: Modes,
) -> u64 {
    if atomic.wide {
        allocation.update64(offset, |old| atomic.rmw.apply64(old, data, compare))
    } else {
        let new = |old| atomic.rmw.apply32(old, data as u32, compare as u32, m);
        allocation.update32(offset, new).into()
    }
}

/// Global atomics on the lanes of `mask`; data from `src` on, old values to `dst` where wanted.
pub(crate) fn atomic(
    w: &mut Wave,
    e: &mut Env<'_>,
    u: &Uop,
    addr: &[u64; 64],
    mask: u64,
    [dst, src]: [u16; 2],
    atomic: Atomic,
) -> Ctl {
    let memory = e.memory;
    let hint = &mut e.hints[u.index as usize];
    let bytes = atomic.bytes();
    e.read_bytes += u64::from(mask.count_ones()) * bytes as u64;
    e.written_bytes += u64::from(mask.count_ones()) * bytes as u64;
    let m = Modes { in32: true, out32: true, ..Modes::of(w) };
    for lane in 0..64 {
        if mask >> lane & 1 == 0 {
            continue;
        }
        let address = addr[lane];
        let Some((allocation, offset)) = memory.find(address, bytes as u64, hint) else {
            return fail(e, Access::Atomic, address, bytes, lane);
        };
        // The hardware needs natural alignment here, whatever the mode.
        if !allocation.writable || address % bytes as u64 != 0 || offset % 4 != 0 {
            return fail(e, Access::Atomic, address, bytes, lane);
        }
        let (data, compare) = if atomic.wide {
            (w.lane64(src, lane), w.lane64(src + 2, lane))
        } else {
            (w.lane(src, lane).into(), w.lane(src + 1, lane).into())
        };
        let old = update(allocation, offset, atomic, data, compare, m);
        if atomic.returns && atomic.wide {
            w.set_lane64(dst, lane, old);
        } else if atomic.returns {
            w.set_lane(dst, lane, old as u32);
        }
    }
    Ctl::Next
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lanes near each other, on both sides of a border of 4 GiB, and far apart; all of them, some and one.
    #[test]
    fn reach_is_that_of_the_active_lanes() {
        for (base, step) in
            [(0x1000_0000_0040, 4), (0x1000_FFFF_FFF0, 1), (0x1000_FFFF_FF80, 2), (64, 0x1_2345_6788)]
        {
            let addr: [u64; 64] = std::array::from_fn(|lane| base + (lane as u64 * 37 % 64) * step);
            for mask in [!0, 1, 1 << 63, 0xF0F0_0000_1234_0008, 0x8000_0000_0000_0001] {
                let active = || (0..64).filter(|lane| mask >> lane & 1 != 0).map(|lane| addr[lane]);
                let (low, high, bits) = reach(&addr, mask);
                assert_eq!(Some(low), active().min());
                assert_eq!(Some(high), active().max());
                let all = active().fold(0, |bits, a| bits | a ^ low);
                assert_eq!(bits, all);
            }
        }
    }

    #[test]
    fn narrow_values_in_registers() {
        let merged = |name: &str, x: u32| Narrow::of(name).map(|n| n.merge(0x1122_3344, x));
        // Bytes behind the loaded ones come along.
        assert_eq!(merged("GLOBAL_LOAD_UBYTE", 0x5566_77F8), Some(0xF8));
        assert_eq!(merged("GLOBAL_LOAD_SBYTE", 0x5566_77F8), Some(0xFFFF_FFF8));
        assert_eq!(merged("GLOBAL_LOAD_USHORT", 0x5566_F788), Some(0xF788));
        assert_eq!(merged("GLOBAL_LOAD_SSHORT", 0x5566_F788), Some(0xFFFF_F788));
        assert_eq!(merged("GLOBAL_LOAD_SBYTE_D16", 0x5566_77F8), Some(0x1122_FFF8));
        assert_eq!(merged("GLOBAL_LOAD_UBYTE_D16_HI", 0x5566_77F8), Some(0x00F8_3344));
        assert_eq!(merged("GLOBAL_LOAD_SHORT_D16_HI", 0x5566_F788), Some(0xF788_3344));
    }
}
