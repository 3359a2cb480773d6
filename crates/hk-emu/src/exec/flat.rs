//! GLOBAL, FLAT and SCRATCH.

use super::lanes::each_chunk;
use super::mem::{self, Atomic, Narrow};
use super::{Ctl, Env, Handler, Host, Level, Portable, Uop, ds, levels};
use crate::fault::{Access, Problem, Space};
use crate::isa::{Encoding, Op};
use crate::wave::{CHUNK, ROW, Wave};

/// Upper 32 bits of the addresses at which LDS and private memory appear to FLAT.
pub(crate) const SHARED_APERTURE: u32 = 0x0001_0000;
pub(crate) const PRIVATE_APERTURE: u32 = 0x0002_0000;

/// `u.b` when there is no scalar address.
pub(crate) const NO_SADDR: u16 = u16::MAX;
/// `u.a` when there is no vector address.
pub(crate) const NO_VADDR: u16 = u16::MAX;

#[inline(always)]
pub(crate) fn addresses(w: &Wave, e: &Env<'_>, u: &Uop) -> [u64; 64] {
    let imm = i64::from(u.imm) as u64;
    let mut addr = [0; 64];
    let lo = w.v(u.a).flat();
    if u.b == NO_SADDR {
        let hi = w.v(u.a + 1).flat();
        for l in 0..64 {
            addr[l] = (u64::from(lo[l]) | u64::from(hi[l]) << 32).wrapping_add(imm);
        }
    } else {
        let base = e.s64(w, u.b).wrapping_add(imm);
        for l in 0..64 {
            addr[l] = base.wrapping_add(u64::from(lo[l]));
        }
    }
    addr
}

#[inline(always)]
fn global_load_body<H: Host, const N: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let addr = addresses(w, e, u);
    mem::load_dwords::<H, N>(w, e, u, &addr, w.exec(), u.d)
}
levels!(global_load = global_load_body[N: usize]);

#[inline(always)]
fn global_store_body<H: Host, const N: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let addr = addresses(w, e, u);
    mem::store_dwords::<H, N>(w, e, u, &addr, w.exec(), u.c)
}
levels!(global_store = global_store_body[N: usize]);

#[inline(always)]
fn global_load_narrow_body<H: Host>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let addr = addresses(w, e, u);
    mem::load_narrow(w, e, u, &addr, w.exec(), u.d, Narrow::unpack(u.extra))
}
levels!(global_load_narrow = global_load_narrow_body);

#[inline(always)]
fn global_store_narrow_body<H: Host>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let addr = addresses(w, e, u);
    mem::store_narrow(w, e, u, &addr, w.exec(), u.c, Narrow::unpack(u.extra))
}
levels!(global_store_narrow = global_store_narrow_body);

fn global_atomic(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let addr = addresses(w, e, u);
    mem::atomic(w, e, u, &addr, w.exec(), [u.d, u.c], Atomic::unpack(u.extra))
}

/// Set in `u.extra` of a copy to LDS whose lanes move less than a dword; else it is the number of dwords.
const NARROW: u32 = 1 << 31;

/// What a copy to LDS moves for each lane.
#[derive(Clone, Copy)]
enum Piece {
    Dwords(usize),
    Narrow(Narrow),
}

impl Piece {
    fn of(u: &Uop) -> Piece {
        if u.extra & NARROW != 0 {
            Piece::Narrow(Narrow::unpack(u.extra & !NARROW))
        } else {
            Piece::Dwords((u.extra & 7) as usize)
        }
    }

    /// Bytes that are read.
    fn bytes(self) -> usize {
        match self {
            Piece::Dwords(n) => 4 * n,
            Piece::Narrow(n) => n.bytes.into(),
        }
    }

    /// Dwords that are written.
    fn words(self) -> usize {
        match self {
            Piece::Dwords(n) => n,
            Piece::Narrow(_) => 1,
        }
    }
}

/// `global_load_lds_*`: to the workgroup's LDS at M0 + offset + lane * size.
fn global_load_lds(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let addr = addresses(w, e, u);
    lds_dma(w, e, u, &addr, w.exec(), w.exec())
}

/// Copies from global memory to LDS. Lanes of `exec` outside `valid` write zeros.
pub(crate) fn lds_dma(
    w: &mut Wave,
    e: &mut Env<'_>,
    u: &Uop,
    addr: &[u64; 64],
    exec: u64,
    valid: u64,
) -> Ctl {
    let piece = Piece::of(u);
    let bytes = piece.bytes();
    e.read_bytes += u64::from((exec & valid).count_ones()) * bytes as u64;
    to_lds(w, e, u, exec, piece.words(), |_, e, lane| {
        let mut data = [0; 4];
        if valid >> lane & 1 == 0 {
            return Ok(data);
        }
        let memory = e.memory;
        let found = memory.find(addr[lane], bytes as u64, &mut e.hints[u.index as usize]);
        let found = found.filter(|(_, offset)| !memory.strict() || offset % bytes.min(4) == 0);
        let Some((allocation, offset)) = found else {
            return Err(Problem::memory(Access::Read, addr[lane], bytes as u32, Some(lane as u32)));
        };
        match piece {
            Piece::Dwords(n) => {
                for (i, word) in data.iter_mut().enumerate().take(n) {
                    *word = allocation.load32(offset + 4 * i);
                }
            }
            Piece::Narrow(n) if n.bytes == 1 => data[0] = n.merge(0, allocation.load8(offset)),
            Piece::Narrow(n) => data[0] = n.merge(0, allocation.load16(offset)),
        }
        Ok(data)
    })
}

/// `scratch_load_lds_*`: from private memory.
fn scratch_load_lds(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let piece = Piece::of(u);
    let (exec, address) = (w.exec(), private_addresses(w, e, u));
    to_lds(w, e, u, exec, piece.words(), |w, _, lane| {
        let at = u64::from(address[lane]);
        let mut source = [0; 16];
        if !read_private(w, lane, at, &mut source[..piece.bytes()]) {
            return Err(Problem::Memory {
                space: Space::Private,
                access: Access::Read,
                address: at,
                bytes: piece.bytes() as u32,
                lane: Some(lane as u32),
            });
        }
        let mut data = words_of(&source);
        if let Piece::Narrow(n) = piece {
            data[0] = n.merge(0, data[0]);
        }
        Ok(data)
    })
}

/// Writes the `words` dwords that `fetch` gives for each lane of `exec` to LDS, at M0 + offset + lane * size, where
/// the size is a dword or four.
#[inline(always)]
pub(crate) fn to_lds(
    w: &mut Wave,
    e: &mut Env<'_>,
    u: &Uop,
    exec: u64,
    words: usize,
    mut fetch: impl FnMut(&mut Wave, &mut Env<'_>, usize) -> Result<[u32; 4], Problem>,
) -> Ctl {
    let start = super::valu::m0(w).wrapping_add(u.imm as u32) as usize;
    let size = if words == 1 { 4 } else { 16 };
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let to = start + lane * size;
        let data = match fetch(w, e, lane) {
            Ok(data) => data,
            Err(problem) => return e.fault(problem),
        };
        for (n, word) in data.iter().enumerate().take(words) {
            if !ds::put32(e.lds, to + 4 * n, *word) {
                return e.fault(Problem::Memory {
                    space: Space::Lds,
                    access: Access::Write,
                    address: to as u64,
                    bytes: 4 * words as u32,
                    lane: Some(lane as u32),
                });
            }
        }
    }
    Ctl::Next
}

/// The offset of an access of `bytes` bytes to private memory, if all of them are inside.
#[inline(always)]
fn private(w: &Wave, offset: u64, bytes: usize) -> Option<usize> {
    let end = offset.checked_add(bytes as u64)?;
    (end <= w.scratch_stride.into()).then_some(offset as usize)
}

/// Copies private memory of `lane` from `offset` on to `out`; false outside of it.
fn read_private(w: &Wave, lane: usize, offset: u64, out: &mut [u8]) -> bool {
    let Some(offset) = private(w, offset, out.len()) else { return false };
    for (byte, at) in out.iter_mut().zip(offset..) {
        *byte = w.scratch[Wave::scratch_index(lane, at)];
    }
    true
}

/// Copies `data` to private memory of `lane` from `offset` on; false outside of it.
fn write_private(w: &mut Wave, lane: usize, offset: u64, data: &[u8]) -> bool {
    let Some(offset) = private(w, offset, data.len()) else { return false };
    for (byte, at) in data.iter().zip(offset..) {
        w.scratch[Wave::scratch_index(lane, at)] = *byte;
    }
    true
}

fn words_of(bytes: &[u8; 16]) -> [u32; 4] {
    let (words, _) = bytes.as_chunks::<4>();
    std::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

/// Where an access of one lane goes.
#[derive(Clone, Copy)]
enum Place {
    Private(u64),
    Lds(u64),
}

/// What an access does, from `u.extra`.
#[derive(Clone, Copy)]
enum Kind {
    Load(usize),
    Store(usize),
    LoadNarrow(Narrow),
    StoreNarrow(Narrow),
    Atomic(Atomic),
}

const LOAD: u32 = 0;
const STORE: u32 = 1 << 28;
const LOAD_NARROW: u32 = 2 << 28;
const STORE_NARROW: u32 = 3 << 28;
const ATOMIC: u32 = 4 << 28;

impl Kind {
    fn unpack(x: u32) -> Kind {
        let low = x & 0x0FFF_FFFF;
        match x & 0x7000_0000 {
            LOAD => Kind::Load(low as usize),
            STORE => Kind::Store(low as usize),
            LOAD_NARROW => Kind::LoadNarrow(Narrow::unpack(low)),
            STORE_NARROW => Kind::StoreNarrow(Narrow::unpack(low)),
            _ => Kind::Atomic(Atomic::unpack(low)),
        }
    }

    fn bytes(self) -> usize {
        match self {
            Kind::Load(n) | Kind::Store(n) => 4 * n,
            Kind::LoadNarrow(n) | Kind::StoreNarrow(n) => n.bytes.into(),
            Kind::Atomic(a) => a.bytes(),
        }
    }

    fn access(self) -> Access {
        match self {
            Kind::Load(_) | Kind::LoadNarrow(_) => Access::Read,
            Kind::Store(_) | Kind::StoreNarrow(_) => Access::Write,
            Kind::Atomic(_) => Access::Atomic,
        }
    }
}

/// One lane of a SCRATCH or FLAT access that does not go to global memory.
fn local_access(w: &mut Wave, e: &mut Env<'_>, u: &Uop, lane: usize, place: Place, kind: Kind) -> Ctl {
    let bytes = kind.bytes();
    let m = super::lanes::Modes::of(w);
    let mut buffer = [0u8; 16];
    let outside = |e: &mut Env<'_>| {
        let (space, address) = match place {
            Place::Private(a) => (Space::Private, a),
            Place::Lds(a) => (Space::Lds, a),
        };
        e.fault(Problem::Memory {
            space,
            access: kind.access(),
            address,
            bytes: bytes as u32,
            lane: Some(lane as u32),
        })
    };
    // Atomics need natural alignment in every mode.
    let misaligned = match kind {
        Kind::Atomic(_) => bytes as u64 - 1,
        _ => ds::misaligned(e, bytes as u32).into(),
    };
    let lds = |a: u64| usize::try_from(a).ok().and_then(|a| Some(a..a.checked_add(bytes)?));
    let inside = match place {
        Place::Private(a) => read_private(w, lane, a, &mut buffer[..bytes]),
        Place::Lds(a) if a & misaligned != 0 => false,
        Place::Lds(a) => match lds(a).and_then(|range| e.lds.get(range)) {
            Some(source) => {
                buffer[..bytes].copy_from_slice(source);
                true
            }
            None => false,
        },
    };
    if !inside {
        return outside(e);
    }
    let mut data = words_of(&buffer);
    let mut store = true;
    match kind {
        Kind::Load(n) => {
            for (i, word) in data.iter().enumerate().take(n) {
                w.set_lane(u.d + i as u16, lane, *word);
            }
            store = false;
        }
        Kind::LoadNarrow(n) => {
            let raw = data[0] & if n.bytes == 1 { 0xFF } else { 0xFFFF };
            let value = n.merge(w.lane(u.d, lane), raw);
            w.set_lane(u.d, lane, value);
            store = false;
        }
        Kind::Store(n) => {
            for (i, word) in data.iter_mut().enumerate().take(n) {
                *word = w.lane(u.c + i as u16, lane);
            }
        }
        Kind::StoreNarrow(n) => data[0] = n.take(w.lane(u.c, lane)),
        Kind::Atomic(a) if a.wide => {
            let old = u64::from(data[0]) | u64::from(data[1]) << 32;
            let new = a.rmw.apply64(old, w.lane64(u.c, lane), w.lane64(u.c + 2, lane));
            (data[0], data[1]) = (new as u32, (new >> 32) as u32);
            if a.returns {
                w.set_lane64(u.d, lane, old);
            }
        }
        Kind::Atomic(a) => {
            let old = data[0];
            data[0] = a.rmw.apply32(old, w.lane(u.c, lane), w.lane(u.c + 1, lane), m);
            if a.returns {
                w.set_lane(u.d, lane, old);
            }
        }
    }
    if store {
        for (chunk, word) in buffer.chunks_mut(4).zip(data) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        match place {
            Place::Private(a) => {
                write_private(w, lane, a, &buffer[..bytes]);
            }
            Place::Lds(a) => {
                if let Some(target) = lds(a).and_then(|range| e.lds.get_mut(range)) {
                    target.copy_from_slice(&buffer[..bytes]);
                }
            }
        }
    }
    Ctl::Next
}

fn flat(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let addr = addresses(w, e, u);
    let exec = w.exec();
    let kind = Kind::unpack(u.extra);
    let mut local = 0u64;
    for (lane, a) in addr.iter().enumerate() {
        let high = (a >> 32) as u32;
        local |= u64::from(high == SHARED_APERTURE || high == PRIVATE_APERTURE) << lane;
    }
    let global = exec & !local;
    if global != 0 {
        let ctl = match kind {
            Kind::Load(1) => mem::load_dwords::<Portable, 1>(w, e, u, &addr, global, u.d),
            Kind::Load(2) => mem::load_dwords::<Portable, 2>(w, e, u, &addr, global, u.d),
            Kind::Load(3) => mem::load_dwords::<Portable, 3>(w, e, u, &addr, global, u.d),
            Kind::Load(_) => mem::load_dwords::<Portable, 4>(w, e, u, &addr, global, u.d),
            Kind::Store(1) => mem::store_dwords::<Portable, 1>(w, e, u, &addr, global, u.c),
            Kind::Store(2) => mem::store_dwords::<Portable, 2>(w, e, u, &addr, global, u.c),
            Kind::Store(3) => mem::store_dwords::<Portable, 3>(w, e, u, &addr, global, u.c),
            Kind::Store(_) => mem::store_dwords::<Portable, 4>(w, e, u, &addr, global, u.c),
            Kind::LoadNarrow(n) => mem::load_narrow(w, e, u, &addr, global, u.d, n),
            Kind::StoreNarrow(n) => mem::store_narrow(w, e, u, &addr, global, u.c, n),
            Kind::Atomic(a) => mem::atomic(w, e, u, &addr, global, [u.d, u.c], a),
        };
        if ctl != Ctl::Next {
            return ctl;
        }
    }
    for lane in (0..64).filter(|lane| exec & local & 1 << lane != 0) {
        let offset = addr[lane] & 0xFFFF_FFFF;
        let place = if (addr[lane] >> 32) as u32 == SHARED_APERTURE {
            Place::Lds(offset)
        } else {
            Place::Private(offset)
        };
        let ctl = local_access(w, e, u, lane, place, kind);
        if ctl != Ctl::Next {
            return ctl;
        }
    }
    Ctl::Next
}

/// The private addresses of a SCRATCH instruction.
fn private_addresses(w: &Wave, e: &Env<'_>, u: &Uop) -> [u32; 64] {
    let base = if u.b == NO_SADDR { 0 } else { e.s32(w, u.b) }.wrapping_add(u.imm as u32);
    if u.a == NO_VADDR { [base; 64] } else { w.v(u.a).flat().map(|a| a.wrapping_add(base)) }
}

fn scratch(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let kind = Kind::unpack(u.extra);
    // All of them first: the address register may be overwritten by the load.
    let address = private_addresses(w, e, u);
    for lane in (0..64).filter(|lane| exec >> lane & 1 != 0) {
        let ctl = local_access(w, e, u, lane, Place::Private(address[lane].into()), kind);
        if ctl != Ctl::Next {
            return ctl;
        }
    }
    Ctl::Next
}

/// The first of `N` rows of private memory, if all lanes of `exec` access them: at one address, a multiple of 4.
#[inline(always)]
fn row<const N: usize>(w: &Wave, exec: u64, address: &[u32; 64]) -> Option<usize> {
    let at = address[exec.trailing_zeros() as usize % 64];
    let mut differ = 0;
    for (lane, address) in address.iter().enumerate() {
        let active = 0u32.wrapping_sub((exec >> lane & 1) as u32);
        differ |= (address ^ at) & active;
    }
    (differ == 0 && exec != 0 && at.is_multiple_of(4)).then_some(())?;
    private(w, at.into(), 4 * N).map(|at| at / 4)
}

/// Loads `N` dwords per lane from private memory.
#[inline(always)]
fn scratch_load_body<H: Host, const N: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let address = private_addresses(w, e, u);
    let Some(first) = row::<N>(w, exec, &address) else { return scratch(w, e, u) };
    for n in 0..N {
        let slot = u.d + n as u16;
        let at = ROW * (first + n);
        let Some(row) = w.scratch.get(at..).and_then(|tail| tail.first_chunk::<ROW>()) else { break };
        let (words, _) = row.as_chunks::<4>();
        let mut values = [[0; CHUNK]; 4];
        for (l, value) in values.as_flattened_mut().iter_mut().enumerate() {
            *value = u32::from_le_bytes(words[l]);
        }
        each_chunk!(exec, |k, mask| {
            w.set_chunk(slot, k, mask, values[k]);
        });
    }
    Ctl::Next
}
levels!(scratch_load = scratch_load_body[N: usize]);

/// Stores `N` dwords per lane to private memory.
#[inline(always)]
fn scratch_store_body<H: Host, const N: usize>(w: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let exec = w.exec();
    let address = private_addresses(w, e, u);
    let Some(first) = row::<N>(w, exec, &address) else { return scratch(w, e, u) };
    for n in 0..N {
        let values = *w.v(u.c + n as u16).flat();
        let at = ROW * (first + n);
        let Some(row) = w.scratch.get_mut(at..).and_then(|tail| tail.first_chunk_mut::<ROW>()) else { break };
        let (words, _) = row.as_chunks_mut::<4>();
        for l in 0..64 {
            let old = u32::from_le_bytes(words[l]);
            let new = if exec >> l & 1 != 0 { values[l] } else { old };
            words[l] = new.to_le_bytes();
        }
    }
    Ctl::Next
}
levels!(scratch_store = scratch_store_body[N: usize]);

/// The atomic that an instruction is, if any.
pub(crate) fn atomic_of(op: Op, returns: bool) -> Option<Atomic> {
    let (_, rest) = op.info().name.split_once("_ATOMIC_")?;
    Atomic::of(rest, returns)
}

/// The handler of a FLAT, GLOBAL or SCRATCH instruction; sets `extra`.
pub(crate) fn handler(
    op: Op,
    encoding: Encoding,
    returns: bool,
    level: Level,
    extra: &mut u32,
) -> Option<Handler> {
    let info = op.info();
    let name = info.name;
    let dwords = |name: &str| match name.rsplit_once("DWORD")?.1 {
        "" => Some(1),
        "X2" => Some(2),
        "X3" => Some(3),
        "X4" => Some(4),
        _ => None,
    };
    if name.contains("_LOAD_LDS_") {
        *extra = match dwords(name) {
            Some(n) => n,
            None => Narrow::of(name)?.pack() | NARROW,
        };
        return Some(if encoding == Encoding::Global { global_load_lds } else { scratch_load_lds });
    }
    let global = encoding == Encoding::Global;
    let other: Handler = if encoding == Encoding::Flat { flat } else { scratch };
    if let Some(atomic) = atomic_of(op, returns) {
        *extra = atomic.pack() | if global { 0 } else { ATOMIC };
        return match encoding {
            Encoding::Global => Some(global_atomic),
            Encoding::Flat => Some(flat),
            _ => None,
        };
    }
    let load = name.contains("_LOAD_");
    if let Some(n) = dwords(name) {
        *extra = n | if load { LOAD } else { STORE };
        if encoding == Encoding::Scratch {
            return Some(match (load, n) {
                (true, 1) => scratch_load::<1>(level),
                (true, 2) => scratch_load::<2>(level),
                (true, 3) => scratch_load::<3>(level),
                (true, _) => scratch_load::<4>(level),
                (false, 1) => scratch_store::<1>(level),
                (false, 2) => scratch_store::<2>(level),
                (false, 3) => scratch_store::<3>(level),
                (false, _) => scratch_store::<4>(level),
            });
        }
        return Some(match (global, load, n) {
            (false, ..) => other,
            (_, true, 1) => global_load::<1>(level),
            (_, true, 2) => global_load::<2>(level),
            (_, true, 3) => global_load::<3>(level),
            (_, true, _) => global_load::<4>(level),
            (_, false, 1) => global_store::<1>(level),
            (_, false, 2) => global_store::<2>(level),
            (_, false, 3) => global_store::<3>(level),
            (_, false, _) => global_store::<4>(level),
        });
    }
    let narrow = Narrow::of(name)?;
    *extra = narrow.pack();
    if !global {
        *extra |= if load { LOAD_NARROW } else { STORE_NARROW };
    }
    Some(match (global, load) {
        (false, _) => other,
        (true, true) => global_load_narrow(level),
        (true, false) => global_store_narrow(level),
    })
}
