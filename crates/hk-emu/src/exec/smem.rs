//! Scalar memory.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::mem::{self, Atomic};
use super::{Ctl, Env, Handler, Uop, flat};
use crate::costs::Costs;
use crate::fault::{Access, Problem};
use crate::isa::Op;
use crate::memory::{Allocation, View};
use crate::wave::{Poll, Wave};

/// Bits of `Uop::extra` beside the number of words or the packed [`Atomic`]: an offset register is added to the
/// immediate.
const HAS_SOFFSET: u32 = 1 << 16;
/// That register counts units of 64 bytes.
const BY_64: u32 = 1 << 17;
/// The base is a buffer resource.
const BUFFER: u32 = 1 << 18;

fn words(u: &Uop) -> usize {
    u.extra as usize & 31
}

/// The low two bits of each part of an address count as 0.
const DWORDS: u64 = !3;

fn offset(w: &Wave, e: &Env<'_>, u: &Uop) -> u64 {
    let unit = if u.extra & BY_64 != 0 { 64 } else { 1 };
    let register = if u.extra & HAS_SOFFSET != 0 { unit * u64::from(e.s32(w, u.b)) } else { 0 };
    (register & DWORDS).wrapping_add(i64::from(u.imm) as u64 & DWORDS)
}

/// Address of the first dword, and how many bytes from there the resource lets through.
pub(crate) fn address(w: &Wave, e: &Env<'_>, u: &Uop) -> (u64, u64) {
    let offset = offset(w, e, u);
    if u.extra & BUFFER == 0 {
        return ((e.s64(w, u.a) & DWORDS).wrapping_add(offset), u64::MAX);
    }
    let word = |i: usize| w.s[(u.a as usize + i) & 127];
    let base = u64::from(word(0)) & DWORDS | u64::from(word(1) & 0xFFFF) << 32;
    let stride = u64::from(word(1) >> 16 & 0x3FFF);
    let records = u64::from(word(2));
    let bytes = if stride == 0 { records } else { records * stride };
    (base.wrapping_add(offset), bytes.saturating_sub(offset))
}

/// The bytes of an access, if they are there and may be written where that is wanted.
fn find<'a>(
    e: &mut Env<'a>,
    u: &Uop,
    access: Access,
    address: u64,
    bytes: usize,
) -> Result<(&'a Allocation, usize), Problem> {
    let memory = e.memory;
    memory
        .find(address, bytes as u64, &mut e.hints[u.index as usize])
        .filter(|(allocation, _)| access == Access::Read || allocation.writable)
        .ok_or_else(|| Problem::memory(access, address, bytes as u32, None))
}

/// The bytes from `address` to the end of the allocation, where an aligned block of `bytes` begins in it. Compilers widen
/// loads of 3 dwords to 4 and of 5 to 7 to 8 when they are so aligned: a block of 16 or 32 bytes lies in one page.
pub(crate) fn tail<'a>(
    memory: &View<'a>,
    address: u64,
    bytes: usize,
) -> Option<(&'a Allocation, usize, usize)> {
    if !matches!(bytes, 16 | 32) || address % bytes as u64 != 0 {
        return None;
    }
    let (allocation, offset) = memory.find(address, 1, &mut 0)?;
    Some((allocation, offset, bytes.min((allocation.size - offset as u64) as usize)))
}

/// Loads dwords into scalar registers; those beyond a resource are 0, and so is what a widened load reads beyond an
/// allocation.
fn load(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (address, inside) = address(w, e, u);
    let present = words(u).min((inside / 4) as usize);
    let mut data = [0; 16];
    if present != 0 {
        match find(e, u, Access::Read, address, 4 * present) {
            Ok((allocation, offset)) => match allocation.words(offset, present).filter(|_| offset % 4 == 0) {
                Some(from) if present == words(u) => {
                    for (i, from) in from.iter().enumerate() {
                        w.s[(u.d as usize + i) & 127] = from.load(Relaxed);
                    }
                    return Ctl::Next;
                }
                _ => {
                    for (i, word) in data.iter_mut().enumerate().take(present) {
                        *word = allocation.load32(offset + 4 * i);
                    }
                }
            },
            Err(problem) => {
                let Some((allocation, offset, inside)) = tail(e.memory, address, 4 * present) else {
                    return e.fault(problem);
                };
                for i in 0..inside {
                    data[i / 4] |= allocation.load8(offset + i) << (8 * (i % 4));
                }
            }
        }
    }
    for (i, word) in data.iter().enumerate().take(words(u)) {
        w.s[(u.d as usize + i) & 127] = *word;
    }
    Ctl::Next
}

/// Stores the registers from `c` on; those beyond a resource are dropped.
fn store(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let (address, inside) = address(w, e, u);
    let present = words(u).min((inside / 4) as usize);
    if present == 0 {
        return Ctl::Next;
    }
    match find(e, u, Access::Write, address, 4 * present) {
        Ok((allocation, offset)) => {
            for i in 0..present {
                allocation.store32(offset + 4 * i, w.s[(u.c as usize + i) & 127]);
            }
            Ctl::Next
        }
        Err(problem) => e.fault(problem),
    }
}

/// A read-modify-write of one dword or two, with the data from `c` on.
fn atomic(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let atomic = Atomic::unpack(u.extra & 0x3FF);
    let (address, inside) = address(w, e, u);
    let (bytes, c) = (atomic.bytes(), u.c as usize);
    let mut old = 0;
    if inside >= bytes as u64 {
        let (allocation, offset) = match find(e, u, Access::Atomic, address, bytes) {
            Ok((allocation, offset)) if address % bytes as u64 == 0 && offset % 4 == 0 => {
                (allocation, offset)
            }
            Ok(_) => return e.fault(Problem::memory(Access::Atomic, address, bytes as u32, None)),
            Err(problem) => return e.fault(problem),
        };
        let (data, compare) = if atomic.wide {
            (w.s64(c), w.s64(c + 2))
        } else {
            (w.s[c & 127].into(), w.s[(c + 1) & 127].into())
        };
        old = mem::update(allocation, offset, atomic, data, compare, super::lanes::Modes::of(w));
    }
    if atomic.returns {
        w.s[u.d as usize & 127] = old as u32;
        if atomic.wide {
            w.s[(u.d as usize + 1) & 127] = (old >> 32) as u32;
        }
    }
    Ctl::Next
}

/// MHz of the counter of `s_memrealtime`.
const REALTIME_MHZ: u64 = 100;

/// `extra` of clock reads: the constant counter, and a loop around it that does nothing but wait.
const CONSTANT_RATE: u32 = 1;
pub(crate) const WAITS: u32 = 2;
/// Instructions between two reads in such a loop.
pub(crate) const POLL_INSTRUCTIONS: u64 = 512;
/// Clocks that a wave waits instruction by instruction; after them each read advances the clock by a part of the time waited.
const PATIENCE: u64 = 1 << 14;
const POLL_STEP: u64 = 128;

/// The modelled engine clock, or the constant counter at the same time; on devices of a node that counts the host's time, which
/// all of them share. A wave that only waits need not do so instruction by instruction: its clock advances ever faster.
fn time(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let constant = u.extra & CONSTANT_RATE != 0;
    let epoch = e.group.epoch.filter(|_| constant);
    if u.extra & WAITS != 0 && epoch.is_none() {
        let again = w.poll.index == u.index && w.executed - w.poll.executed <= POLL_INSTRUCTIONS;
        let since = if again { w.poll.since } else { w.clock };
        let skip = (w.clock - since).saturating_sub(PATIENCE) / POLL_STEP;
        w.clock += skip;
        if let Some((began, start)) = e.group.pace.filter(|_| skip > 0) {
            let mhz = Costs::of(e.program.arch).engine_mhz;
            let modelled = Duration::from_nanos((w.clock - start).saturating_mul(1000) / mhz);
            std::thread::sleep(modelled.saturating_sub(began.elapsed()));
        }
        w.poll = Poll { index: u.index, executed: w.executed, since };
    }
    let modelled = w.clock * REALTIME_MHZ / Costs::of(e.program.arch).engine_mhz;
    let realtime = epoch.map_or(modelled, |epoch| epoch.elapsed().as_nanos() as u64 * REALTIME_MHZ / 1000);
    w.set_s64(u.d as usize, if constant { realtime } else { w.clock });
    Ctl::Next
}

fn nop(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    Ctl::Next
}

/// The handler of a scalar memory instruction; `soffset` says that `b` is an offset register.
pub(crate) fn handler(op: Op, soffset: bool, returns: bool, extra: &mut u32) -> Option<Handler> {
    let name = op.info().name;
    if name.starts_with("S_DCACHE_") || name.starts_with("S_ATC_PROBE") {
        return Some(nop);
    }
    if matches!(op, Op::S_MEMTIME | Op::S_MEMREALTIME) {
        *extra = if op == Op::S_MEMREALTIME { CONSTANT_RATE } else { 0 };
        return Some(time);
    }
    if soffset {
        *extra |= HAS_SOFFSET;
    }
    if name.starts_with("S_BUFFER_") {
        *extra |= BUFFER;
    }
    if name.starts_with("S_SCRATCH_") {
        *extra |= BY_64;
    }
    if let Some(kind) = flat::atomic_of(op, returns) {
        *extra |= kind.pack();
        return Some(atomic);
    }
    *extra |= u32::from(op.info().dst);
    if name.contains("_LOAD_") {
        Some(load)
    } else if name.contains("_STORE_") {
        Some(store)
    } else {
        None
    }
}
