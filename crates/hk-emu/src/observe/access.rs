//! Which memory an instruction is about to access: by the address arithmetic of its handler, before it runs.

use std::sync::OnceLock;

use crate::exec::flat::{self, NO_SADDR, NO_VADDR, PRIVATE_APERTURE, SHARED_APERTURE};
use crate::exec::{Env, Uop, mubuf};
use crate::fault::{Access, Space};
use crate::isa::{ALL_OPS, Encoding, Inst, Op, Operand, narrow_bytes};
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
    /// The first register that is loaded or stored, by [`reg`](crate::registers::reg); `None` for DMA.
    pub register: Option<u16>,
    /// A scalar access, listed for lane 0.
    pub scalar: bool,
}

impl Part {
    /// First address and length in bytes, where all 64 lanes access neighbours in ascending order.
    pub fn span(&self) -> Option<(u64, u64)> {
        let (start, bytes) = (self.address[0], u64::from(self.bytes));
        let mut differences = u64::from(self.scalar) | !self.mask;
        for l in 0..64 {
            differences |= self.address[l] ^ start.wrapping_add(l as u64 * bytes);
        }
        (differences == 0).then_some((start, 64 * bytes))
    }

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

    /// Computes what the instruction will access, including accesses that fault.
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
        let nature = Nature::of(inst.op);
        let Some(access) = nature.access else { return };
        let register = Some(crate::registers::SGPR + if access == Access::Read { u.d } else { u.c });
        let (start, inside) = crate::exec::smem::address(w, e, u);
        let bytes = u64::from(nature.bytes).min(inside & !3);
        let mut address = [0; 64];
        address[0] = start;
        self.push(Space::Global, access, 1, address, bytes as u32, register);
        if let Some(part) = self.0.last_mut() {
            part.scalar = true;
        }
    }

    fn lds(&mut self, inst: &Inst, u: &Uop, w: &Wave) {
        let nature = Nature::of(inst.op);
        let Some(access) = nature.access else { return };
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
        let read = access == Access::Read;
        let bytes = nature.bytes;
        let [first, second] = if read { [u.d, u.d + bytes as u16 / 4] } else { [u.b, u.c] };
        self.push(Space::Lds, access, exec, at(u.imm as u32), bytes, Some(first));
        if nature.pair {
            // The top bit of an exchange's is no part of its offset.
            self.push(Space::Lds, access, exec, at(u.extra & 0xFFFF_FFFF >> 1), bytes, Some(second));
        }
    }

    fn flat(&mut self, inst: &Inst, u: &Uop, w: &Wave, e: &Env<'_>) {
        let Nature { access, bytes, dma, .. } = Nature::of(inst.op);
        let Some(access) = access else { return };
        let exec = w.exec();
        let register = if access == Access::Read { u.d } else { u.c };
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
        let Nature { access, bytes, formatted, .. } = Nature::of(inst.op);
        let Some(access) = access else { return };
        let exec = w.exec();
        let register = if access == Access::Read { u.d } else { u.c };
        let register = (!inst.flags.lds && !formatted).then_some(register);
        for piece in mubuf::pieces(w, e, inst, u, bytes) {
            let register = register.map(|r| r + piece.register);
            self.push(Space::Global, access, exec & piece.lanes, piece.address, piece.bytes, register);
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

/// What checks need of an instruction, from its name.
#[derive(Clone, Copy, Default)]
pub(crate) struct Nature {
    pub access: Option<Access>,
    /// Bytes of one lane's access, or of each of two.
    pub bytes: u32,
    /// LDS: with two offsets.
    pub pair: bool,
    /// Loads to LDS by opcode; buffer loads have a flag.
    pub dma: bool,
    /// Registers hold other bytes than memory.
    pub formatted: bool,
    /// The high half of a register is loaded or stored.
    pub high: bool,
    /// Different operands often have the same result: comparisons, minima and maxima, conversions that saturate.
    pub hides: bool,
}

impl Nature {
    pub fn of(op: Op) -> Nature {
        static ALL: OnceLock<Vec<Nature>> = OnceLock::new();
        let all = ALL.get_or_init(|| ALL_OPS.iter().map(|op| Nature::new(*op)).collect());
        all.get(op as usize).copied().unwrap_or_default()
    }

    fn new(op: Op) -> Nature {
        let info = op.info();
        let name = info.name;
        let pair = op.has_two_offsets();
        let mut nature = Nature {
            pair,
            dma: name.contains("_LOAD_LDS_"),
            formatted: name.contains("_FORMAT_"),
            high: name.contains("_D16_HI"),
            hides: hides(op),
            ..Nature::default()
        };
        if let Some(name) = name.strip_prefix("DS_") {
            let touches_nothing =
                matches!(op, Op::DS_SWIZZLE_B32 | Op::DS_PERMUTE_B32 | Op::DS_BPERMUTE_B32 | Op::DS_NOP);
            let read = name.starts_with("READ");
            nature.access = match name {
                _ if touches_nothing || name.starts_with("GWS") => None,
                _ if read => Some(Access::Read),
                _ if name.starts_with("WRITE") => Some(Access::Write),
                _ => Some(Access::Atomic),
            };
            let dwords = u32::from(if read { info.dst } else { info.src[1] });
            nature.bytes = narrow_bytes(name).unwrap_or(4 * dwords / if pair && read { 2 } else { 1 });
            return nature;
        }
        nature.access = match info.encoding {
            Encoding::Smem
            | Encoding::Flat
            | Encoding::Global
            | Encoding::Scratch
            | Encoding::Mubuf
            | Encoding::Mtbuf => access(name),
            _ => None,
        };
        if let Some(access) = nature.access {
            let dwords = match info.encoding {
                Encoding::Flat | Encoding::Global | Encoding::Scratch if access != Access::Read => {
                    info.src[1]
                }
                _ => info.dst,
            };
            nature.bytes = if info.encoding == Encoding::Smem {
                // A compare-and-swap carries two values and accesses one.
                4 * u32::from(dwords) / if name.contains("CMPSWAP") { 2 } else { 1 }
            } else {
                bytes(name, dwords.into(), access)
            };
        }
        nature
    }
}

/// Instructions that map different operands to the same result by design.
fn hides(op: Op) -> bool {
    let name = op.info().name;
    let starts = |prefix: &str| name.starts_with(prefix);
    match op.info().encoding {
        Encoding::Sopc | Encoding::Sopk => starts("S_CMP") || starts("S_BITCMP"),
        Encoding::Sop2 => starts("S_MIN") || starts("S_MAX"),
        Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc | Encoding::Vop3 | Encoding::Vop3p => {
            op.is_cmp()
                || ["V_MIN", "V_MAX", "V_MED3", "V_PK_MIN", "V_PK_MAX", "V_CVT_I", "V_CVT_U", "V_CVT_PK"]
                    .iter()
                    .any(|prefix| starts(prefix))
        }
        _ => false,
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

/// Bytes of one lane's access.
fn bytes(name: &str, dwords: u32, access: Access) -> u32 {
    if let Some(bytes) = narrow_bytes(name) {
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
