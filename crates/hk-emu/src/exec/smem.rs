//! Scalar memory.

use super::{Ctl, Env, Handler, Uop};
use crate::fault::{Access, Problem};
use crate::isa::Op;
use crate::wave::Wave;

/// Whether the offset register is added as well as the immediate.
const HAS_SOFFSET: u32 = 1 << 8;

/// Loads `n` dwords into scalar registers from `d` on.
fn load(w: &mut Wave, e: &mut Env<'_>, u: &Uop, address: u64, n: usize) -> Ctl {
    let memory = e.memory;
    let address = address & !3;
    let Some((allocation, offset)) = memory.find(address, 4 * n as u64, &mut e.hints[u.index as usize])
    else {
        return e.fault(Problem::memory(Access::Read, address, 4 * n as u32, None));
    };
    for i in 0..n {
        w.s[(u.d as usize + i) & 127] = allocation.load32(offset + 4 * i);
    }
    Ctl::Next
}

pub(crate) fn offset(w: &Wave, e: &Env<'_>, u: &Uop) -> u64 {
    let register = if u.extra & HAS_SOFFSET != 0 { u64::from(e.s32(w, u.b)) } else { 0 };
    register.wrapping_add(i64::from(u.imm) as u64)
}

/// `s_load_dword*`: base, offset register, immediate.
fn s_load(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let address = e.s64(w, u.a).wrapping_add(offset(w, e, u));
    load(w, e, u, address, u.extra as usize & 31)
}

/// `s_buffer_load_dword*`: bounded by the resource; what is outside reads 0.
fn s_buffer_load(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let a = u.a as usize;
    let word = |i: usize| w.s[(a + i) & 127];
    let base = u64::from(word(0)) | u64::from(word(1) & 0xFFFF) << 32;
    let stride = u64::from(word(1) >> 16 & 0x3FFF);
    let records = u64::from(word(2));
    let bytes = if stride == 0 { records } else { records * stride };
    let start = offset(w, e, u) & !3;
    let n = u.extra as usize & 31;
    let memory = e.memory;
    for i in 0..n {
        let at = start.wrapping_add(4 * i as u64);
        let value = if at.checked_add(4).is_some_and(|end| end <= bytes) {
            let address = base.wrapping_add(at);
            let Some((allocation, offset)) = memory.find(address, 4, &mut e.hints[u.index as usize]) else {
                return e.fault(Problem::memory(Access::Read, address, 4, None));
            };
            allocation.load32(offset)
        } else {
            0
        };
        w.s[(u.d as usize + i) & 127] = value;
    }
    Ctl::Next
}

/// `s_store_dword*`: `c` is the first data register.
fn s_store(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let n = u.extra as usize & 31;
    let address = e.s64(w, u.a).wrapping_add(offset(w, e, u)) & !3;
    let memory = e.memory;
    let Some((allocation, offset)) = memory.find(address, 4 * n as u64, &mut e.hints[u.index as usize])
    else {
        return e.fault(Problem::memory(Access::Write, address, 4 * n as u32, None));
    };
    if !allocation.writable {
        return e.fault(Problem::memory(Access::Write, address, 4 * n as u32, None));
    }
    for i in 0..n {
        allocation.store32(offset + 4 * i, w.s[(u.c as usize + i) & 127]);
    }
    Ctl::Next
}

/// The simulated clock: one instruction of the wave is 4 core clocks. `extra` 1: the 100 MHz counter of a 2.1 GHz core.
fn time(w: &mut Wave, _: &mut Env<'_>, u: &Uop) -> Ctl {
    let clocks = w.executed * 4;
    w.set_s64(u.d as usize, if u.extra == 1 { clocks / 21 } else { clocks });
    Ctl::Next
}

fn nop(_: &mut Wave, _: &mut Env<'_>, _: &Uop) -> Ctl {
    Ctl::Next
}

/// The handler of a scalar memory instruction; `soffset` says that `b` is an offset register.
pub(crate) fn handler(op: Op, soffset: bool, extra: &mut u32) -> Option<Handler> {
    let name = op.info().name;
    let words = |n: u32| n | if soffset { HAS_SOFFSET } else { 0 };
    if matches!(op, Op::S_DCACHE_INV | Op::S_DCACHE_WB | Op::S_DCACHE_INV_VOL | Op::S_DCACHE_WB_VOL) {
        return Some(nop);
    }
    if matches!(op, Op::S_MEMTIME | Op::S_MEMREALTIME) {
        *extra = u32::from(op == Op::S_MEMREALTIME);
        return Some(time);
    }
    *extra = words(u32::from(op.info().dst));
    if name.starts_with("S_LOAD_") {
        Some(s_load)
    } else if name.starts_with("S_BUFFER_LOAD_") {
        Some(s_buffer_load)
    } else if name.starts_with("S_STORE_") {
        Some(s_store)
    } else {
        None
    }
}
