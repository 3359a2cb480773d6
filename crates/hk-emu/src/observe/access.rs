//! Which memory an instruction is about to access: by the address arithmetic of its handler, before it runs.

use crate::exec::flat::{self, NO_SADDR, NO_VADDR, PRIVATE_APERTURE, SHARED_APERTURE};
use crate::exec::{Env, Uop, mubuf};
use crate::fault::{Access, Space};
use crate::isa::{Encoding, Inst, Op, Operand};
use crate::wave::{M0, Wave};

/// Bytes of one memory space that the lanes of `mask` access, each from its own address.
#[derive(Clone)]
pub(crate) struct Part {
    pub space: Space,
    pub access: Access,
    pub mask: u64,
    pub address: [u64; 64],
    /// Of each lane.
    pub bytes: u32,
    /// The first register that is loaded or stored, by [`reg`](super::effects::reg); `None` for DMA.
    pub register: Option<u16>,
    /// A scalar access: lane 0 stands for the wave.
    pub scalar: bool,
}

impl Part {
    pub fn lanes(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let mut rest = self.mask;
        std::iter::from_fn(move || {
            (rest != 0).then(|| {
                let lane = rest.trailing_zeros() as usize;
                rest &= rest - 1;
                (lane, self.address[lane])
            })
        })
    }
}

/// The accesses of one instruction; kept between instructions to spare allocations.
#[derive(Default)]
pub(crate) struct Accesses(Vec<Part>);

impl Accesses {
    pub fn parts(&self) -> &[Part] {
        &self.0
    }

    fn push(
        &mut self,
        space: Space,
        access: Access,
        mask: u64,
        address: [u64; 64],
        bytes: u32,
        register: Option<u16>,
    ) {
        if mask != 0 && bytes != 0 {
            self.0.push(Part { space, access, mask, address, bytes, register, scalar: false });
        }
    }

    /// Finds out what the instruction will access. What faults is listed as well as what does not.
    pub fn of(&mut self, inst: &Inst, u: &Uop, w: &Wave, e: &Env<'_>) {
        self.0.clear();
        match inst.encoding {
            Encoding::Smem => self.scalar(inst, u, w, e),
            Encoding::Ds => self.lds(inst, u, w),
            Encoding::Flat | Encoding::Global | Encoding::Scratch => self.flat(inst, u, w, e),
            Encoding::Mubuf | Encoding::Mtbuf => self.buffer(inst, u, w, e),
            _ => {}
        }
    }

    fn scalar(&mut self, inst: &Inst, u: &Uop, w: &Wave, e: &Env<'_>) {
        let name = inst.op.info().name;
        let dwords = u32::from(inst.op.info().dst);
        let Some(access) = access(name) else { return };
        let register = Some(super::effects::SGPR + if access == Access::Read { u.d } else { u.c });
        let (start, inside) = crate::exec::smem::address(w, e, u);
        // A compare-and-swap carries two values and accesses one.
        let dwords = if name.contains("CMPSWAP") { dwords / 2 } else { dwords };
        let bytes = (4 * u64::from(dwords)).min(inside & !3);
        let mut address = [0; 64];
        address[0] = start;
        self.push(Space::Global, access, 1, address, bytes as u32, register);
        if let Some(part) = self.0.last_mut() {
            part.scalar = true;
        }
    }

    fn lds(&mut self, inst: &Inst, u: &Uop, w: &Wave) {
        let info = inst.op.info();
        let Some(name) = info.name.strip_prefix("DS_") else { return };
        if matches!(inst.op, Op::DS_SWIZZLE_B32 | Op::DS_PERMUTE_B32 | Op::DS_BPERMUTE_B32 | Op::DS_NOP)
            || name.starts_with("GWS")
        {
            return;
        }
        let exec = w.exec();
        if matches!(inst.op, Op::DS_APPEND | Op::DS_CONSUME) {
            // One access for the wave.
            let address = [u64::from((w.s[M0] & 0xFFFF) + u.imm as u32); 64];
            return self.push(Space::Lds, Access::Atomic, exec & exec.wrapping_neg(), address, 4, Some(u.d));
        }
        let base = w.v(u.a).flat();
        let at = |offset: u32| -> [u64; 64] {
            std::array::from_fn(|l| match inst.src[0] {
                Operand::None => u64::from((w.s[M0] & 0xFFFF) + offset) + 4 * l as u64,
                _ => u64::from(base[l].wrapping_add(offset)),
            })
        };
        let read = name.starts_with("READ");
        let write = name.starts_with("WRITE");
        let access = match (read, write) {
            (true, _) => Access::Read,
            (_, true) => Access::Write,
            _ => Access::Atomic,
        };
        let pair = inst.op.has_two_offsets();
        let dwords = if read { info.dst } else { info.src[1] };
        let bytes = narrow(name).unwrap_or(4 * u32::from(dwords) / if pair && read { 2 } else { 1 });
        let [first, second] = if read { [u.d, u.d + u16::from(dwords) / 2] } else { [u.b, u.c] };
        self.push(Space::Lds, access, exec, at(u.imm as u32), bytes, Some(first));
        if pair {
            // The top bit of an exchange's is no part of its offset.
            self.push(Space::Lds, access, exec, at(u.extra & 0xFFFF_FFFF >> 1), bytes, Some(second));
        }
    }

    fn flat(&mut self, inst: &Inst, u: &Uop, w: &Wave, e: &Env<'_>) {
        let info = inst.op.info();
        let name = info.name;
        let Some(access) = access(name) else { return };
        let exec = w.exec();
        let dma = name.contains("_LOAD_LDS_");
        let (register, dwords) = match access {
            Access::Read => (u.d, info.dst),
            _ => (u.c, info.src[1]),
        };
        let bytes = bytes(name, dwords.into(), access);
        let register = (!dma).then_some(register);
        let addr: [u64; 64] = if inst.encoding == Encoding::Scratch {
            let base = if u.b == NO_SADDR { 0 } else { e.s32(w, u.b) }.wrapping_add(u.imm as u32);
            let vaddr = if u.a == NO_VADDR { [0; 64] } else { *w.v(u.a).flat() };
            vaddr.map(|a| u64::from(base.wrapping_add(a)))
        } else {
            flat::addresses(w, e, u)
        };
        match inst.encoding {
            Encoding::Scratch => self.push(Space::Private, access, exec, addr, bytes, register),
            Encoding::Flat => {
                let in_window = |window: u32| {
                    (0..64).fold(0u64, |mask, l| mask | u64::from((addr[l] >> 32) as u32 == window) << l)
                };
                let (lds, private) = (in_window(SHARED_APERTURE), in_window(PRIVATE_APERTURE));
                let low = addr.map(|a| a & 0xFFFF_FFFF);
                self.push(Space::Global, access, exec & !lds & !private, addr, bytes, register);
                self.push(Space::Lds, access, exec & lds, low, bytes, register);
                self.push(Space::Private, access, exec & private, low, bytes, register);
            }
            _ => self.push(Space::Global, access, exec, addr, bytes, register),
        }
        if dma {
            self.dma(u, w, exec, bytes);
        }
    }

    fn buffer(&mut self, inst: &Inst, u: &Uop, w: &Wave, e: &Env<'_>) {
        let info = inst.op.info();
        let name = info.name;
        let Some(access) = access(name) else { return };
        let exec = w.exec();
        let register = match access {
            Access::Read => u.d,
            _ => u.c,
        };
        let bytes = bytes(name, info.dst.into(), access);
        let register = (!inst.flags.lds).then_some(register);
        // Registers of a formatted access hold other bytes than memory.
        let register = register.filter(|_| !name.contains("_FORMAT_"));
        for (n, (addr, valid, bytes)) in mubuf::pieces(w, e, inst, u, bytes).into_iter().enumerate() {
            self.push(Space::Global, access, exec & valid, addr, bytes, register.map(|r| r + n as u16));
        }
        if inst.flags.lds {
            self.dma(u, w, exec, bytes);
        }
    }

    /// The LDS side of a load to LDS: lane by lane from M0 and the immediate on.
    fn dma(&mut self, u: &Uop, w: &Wave, exec: u64, bytes: u32) {
        let start = u64::from(w.s[M0].wrapping_add(u.imm as u32));
        let size = if bytes <= 4 { 4 } else { 16 };
        let address = std::array::from_fn(|l| start + size * l as u64);
        self.push(Space::Lds, Access::Write, exec, address, bytes.max(4), None);
    }
}

/// What a vector or scalar memory instruction does, by its name.
fn access(name: &str) -> Option<Access> {
    if name.contains("ATOMIC") {
        Some(Access::Atomic)
    } else if name.contains("_LOAD") {
        Some(Access::Read)
    } else if name.contains("_STORE") {
        Some(Access::Write)
    } else {
        None
    }
}

/// Bytes of an access narrower than a dword, by its name.
fn narrow(name: &str) -> Option<u32> {
    if name.contains("_TR_") {
        return None;
    }
    let name = name.trim_end_matches("_HI").trim_end_matches("_D16");
    match name.rsplit('_').next()? {
        "UBYTE" | "SBYTE" | "BYTE" | "U8" | "I8" | "B8" => Some(1),
        "USHORT" | "SSHORT" | "SHORT" | "U16" | "I16" | "B16" => Some(2),
        _ => None,
    }
}

/// Bytes of an element of what a memory instruction accesses, a dword at most; `None` if it accesses nothing.
pub(crate) fn element_bytes(inst: &Inst) -> Option<u8> {
    let name = inst.op.info().name;
    let touches = match inst.encoding {
        Encoding::Ds => inst.src[0] != Operand::None && inst.op != Op::DS_SWIZZLE_B32,
        _ => access(name).is_some(),
    };
    touches.then(|| narrow(name).map_or(4, |bytes| bytes as u8))
}

/// Bytes of one lane's access.
fn bytes(name: &str, dwords: u32, access: Access) -> u32 {
    if let Some(bytes) = narrow(name) {
        return bytes;
    }
    let dwords = match name.rsplit_once("DWORD") {
        Some((_, "")) => 1,
        Some((_, tail)) => tail.strip_prefix('X').and_then(|n| n.parse().ok()).unwrap_or(dwords),
        None => dwords,
    };
    // A compare-and-swap carries two values and accesses one.
    let dwords = if access == Access::Atomic && name.contains("CMPSWAP") { dwords / 2 } else { dwords };
    4 * dwords
}
