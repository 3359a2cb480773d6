//! Loads, stores and atomics of every memory: the bytes in memory and the registers after.

use std::collections::{HashMap, HashSet};

use hk_emu::isa::{ALL_OPS, Encoding, Op};

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use crate::semantics::coverage::executed;
use crate::semantics::exact::{BFLOAT, DOUBLE, Format, HALF, Mode, SINGLE};
use crate::semantics::float::key;

/// Bytes that the lanes of a wave share; private memory is 16 bytes of it for each lane.
const REGION: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    /// The whole register.
    All,
    Low,
    High,
}

/// What one instruction does to memory.
#[derive(Clone, Copy, Debug)]
enum Access {
    /// One or two bytes, extended, to a register or a half of it.
    LoadPart {
        bytes: usize,
        signed: bool,
        half: Half,
    },
    StorePart {
        bytes: usize,
        half: Half,
    },
    Load(usize),
    Store(usize),
    /// Words at two places, `stride` bytes to a unit of the two offsets.
    LoadTwo {
        words: usize,
        stride: usize,
    },
    StoreTwo {
        words: usize,
        stride: usize,
    },
    SwapTwo {
        words: usize,
        stride: usize,
    },
    Atomic(Atomic),
}

#[derive(Clone, Copy, Debug)]
struct Atomic {
    what: &'static str,
    words: usize,
    returns: bool,
}

/// Memory as bits: the new value of `old` under an atomic with `data`, and a second operand.
pub fn modify(what: &str, bits: u32, old: u64, data: u64, other: u64, mode: Option<Mode>) -> u64 {
    let wide = |x: u64| i128::from(x);
    let signed = |x: u64| if bits == 32 { i128::from(x as i32) } else { i128::from(x as i64) };
    let f = if bits == 32 { SINGLE } else { DOUBLE };
    // Global memory flushes f32, LDS does as MODE says; both keep all of f64. Rounding is to nearest.
    let float_mode = match mode {
        _ if bits == 64 => Mode(0x3F0),
        Some(mode) => mode,
        None => Mode(0x3C0),
    };
    let add = |f: Format, a: u64, b: u64, mode: Mode| mode.arithmetic(f, &[a, b], |x, r| x[0].plus(&x[1], r));
    // A number wins against a NaN; the negative zero is less.
    let less = |a: u64, b: u64| !f.is_nan(a) && !f.is_nan(b) && key(f, a) < key(f, b);
    let mask = if bits == 32 { 0xFFFF_FFFF } else { u64::MAX };
    let new = match what {
        "swap" => wide(data),
        "add" => wide(old) + wide(data),
        "sub" => wide(old) - wide(data),
        "rsub" => wide(data) - wide(old),
        "smin" => signed(old).min(signed(data)),
        "smax" => signed(old).max(signed(data)),
        "umin" => wide(old.min(data)),
        "umax" => wide(old.max(data)),
        "and" => wide(old & data),
        "or" => wide(old | data),
        "xor" => wide(old ^ data),
        "inc" => {
            if old >= data {
                0
            } else {
                wide(old) + 1
            }
        }
        "dec" => {
            if old == 0 || old > data {
                wide(data)
            } else {
                wide(old) - 1
            }
        }
        // data replaces what equals other.
        "cmpswap" => wide(if old == other { data } else { old }),
        "fcmpswap" => {
            let equal = f.value(old).compare(&f.value(other)) == Some(std::cmp::Ordering::Equal);
            wide(if equal { data } else { old })
        }
        // data is the mask, other the bits.
        "mskor" => wide(old & !data | other),
        // Down by the data, or to the second operand where that would go below zero.
        "wrap" => {
            if old >= data {
                wide(old) - wide(data)
            } else {
                wide(old) + wide(other)
            }
        }
        // Each word whose top bit is set is written without it.
        "condxchg" => [0, 32]
            .map(|s| {
                let (x, keep) = (data >> s & 0xFFFF_FFFF, old >> s & 0xFFFF_FFFF);
                wide(if x >> 31 != 0 { x & 0x7FFF_FFFF } else { keep }) << s
            })
            .iter()
            .sum(),
        "fadd" => wide(add(f, old, data, float_mode)),
        "fmin" => wide(if f.is_nan(old) || less(data, old) { data } else { old }),
        "fmax" => wide(if f.is_nan(old) || less(old, data) { data } else { old }),
        "pk_f16" | "pk_bf16" => {
            let format = if what == "pk_f16" { HALF } else { BFLOAT };
            let half = |s: u32| add(format, old >> s & 0xFFFF, data >> s & 0xFFFF, Mode(0x3F0));
            wide(half(0) | half(16) << 16)
        }
        other => panic!("{other}"),
    };
    new as u64 & mask
}

fn part(name: &str) -> Option<Access> {
    let (name, half) = match (name.strip_suffix("_D16_HI"), name.strip_suffix("_D16")) {
        (Some(name), _) => (name, Half::High),
        (_, Some(name)) => (name, Half::Low),
        _ => (name, Half::All),
    };
    Some(match name {
        "LOAD_UBYTE" | "READ_U8" => Access::LoadPart { bytes: 1, signed: false, half },
        "LOAD_SBYTE" | "READ_I8" => Access::LoadPart { bytes: 1, signed: true, half },
        "LOAD_USHORT" | "LOAD_SHORT" | "READ_U16" => Access::LoadPart { bytes: 2, signed: false, half },
        "LOAD_SSHORT" | "READ_I16" => Access::LoadPart { bytes: 2, signed: true, half },
        "STORE_BYTE" | "WRITE_B8" => Access::StorePart { bytes: 1, half },
        "STORE_SHORT" | "WRITE_B16" => Access::StorePart { bytes: 2, half },
        _ => return None,
    })
}

/// What a FLAT, GLOBAL, SCRATCH or MUBUF instruction does, by its name without the first word.
fn vector_access(name: &str, returns: bool) -> Option<Access> {
    if let Some(access) = part(name) {
        return Some(access);
    }
    let words =
        |tail: &str| Some([("", 1), ("X2", 2), ("X3", 3), ("X4", 4)].iter().find(|(t, _)| *t == tail)?.1);
    if let Some(tail) = name.strip_prefix("LOAD_DWORD") {
        return words(tail).map(Access::Load);
    }
    if let Some(tail) = name.strip_prefix("STORE_DWORD") {
        return words(tail).map(Access::Store);
    }
    let name = name.strip_prefix("ATOMIC_")?;
    let (name, words) = name.strip_suffix("_X2").map_or((name, 1), |name| (name, 2));
    let (what, words) = match name {
        "SWAP" => ("swap", words),
        "CMPSWAP" => ("cmpswap", words),
        "ADD" => ("add", words),
        "SUB" => ("sub", words),
        "SMIN" => ("smin", words),
        "UMIN" => ("umin", words),
        "SMAX" => ("smax", words),
        "UMAX" => ("umax", words),
        "AND" => ("and", words),
        "OR" => ("or", words),
        "XOR" => ("xor", words),
        "INC" => ("inc", words),
        "DEC" => ("dec", words),
        "ADD_F32" => ("fadd", 1),
        "ADD_F64" => ("fadd", 2),
        "MIN_F64" => ("fmin", 2),
        "MAX_F64" => ("fmax", 2),
        "PK_ADD_F16" => ("pk_f16", 1),
        "PK_ADD_BF16" => ("pk_bf16", 1),
        _ => return None,
    };
    Some(Access::Atomic(Atomic { what, words, returns }))
}

/// What an LDS instruction does, by its name without `DS_`.
fn lds_access(name: &str) -> Option<Access> {
    if let Some(access) = part(name) {
        return Some(access);
    }
    let plain = match name {
        "READ_B32" => Access::Load(1),
        "READ_B64" => Access::Load(2),
        "READ_B96" => Access::Load(3),
        "READ_B128" => Access::Load(4),
        "WRITE_B32" => Access::Store(1),
        "WRITE_B64" => Access::Store(2),
        "WRITE_B96" => Access::Store(3),
        "WRITE_B128" => Access::Store(4),
        "READ2_B32" => Access::LoadTwo { words: 1, stride: 4 },
        "READ2_B64" => Access::LoadTwo { words: 2, stride: 8 },
        "READ2ST64_B32" => Access::LoadTwo { words: 1, stride: 256 },
        "READ2ST64_B64" => Access::LoadTwo { words: 2, stride: 512 },
        "WRITE2_B32" => Access::StoreTwo { words: 1, stride: 4 },
        "WRITE2_B64" => Access::StoreTwo { words: 2, stride: 8 },
        "WRITE2ST64_B32" => Access::StoreTwo { words: 1, stride: 256 },
        "WRITE2ST64_B64" => Access::StoreTwo { words: 2, stride: 512 },
        "WRXCHG2_RTN_B32" => Access::SwapTwo { words: 1, stride: 4 },
        "WRXCHG2_RTN_B64" => Access::SwapTwo { words: 2, stride: 8 },
        "WRXCHG2ST64_RTN_B32" => Access::SwapTwo { words: 1, stride: 256 },
        "WRXCHG2ST64_RTN_B64" => Access::SwapTwo { words: 2, stride: 512 },
        _ => {
            let returns = name.contains("_RTN");
            let base = name.replace("_RTN", "");
            let what = match base.as_str() {
                "ADD_U32" | "ADD_U64" => "add",
                "SUB_U32" | "SUB_U64" => "sub",
                "RSUB_U32" | "RSUB_U64" => "rsub",
                "INC_U32" | "INC_U64" => "inc",
                "DEC_U32" | "DEC_U64" => "dec",
                "MIN_I32" | "MIN_I64" => "smin",
                "MAX_I32" | "MAX_I64" => "smax",
                "MIN_U32" | "MIN_U64" => "umin",
                "MAX_U32" | "MAX_U64" => "umax",
                "AND_B32" | "AND_B64" => "and",
                "OR_B32" | "OR_B64" => "or",
                "XOR_B32" | "XOR_B64" => "xor",
                "MSKOR_B32" | "MSKOR_B64" => "mskor",
                "WRXCHG_B32" | "WRXCHG_B64" => "swap",
                "CMPST_B32" | "CMPST_B64" => "cmpswap",
                "CMPST_F32" | "CMPST_F64" => "fcmpswap",
                "WRAP_B32" => "wrap",
                "CONDXCHG32_B64" => "condxchg",
                "MIN_F32" | "MIN_F64" => "fmin",
                "MAX_F32" | "MAX_F64" => "fmax",
                "ADD_F32" | "ADD_F64" => "fadd",
                "PK_ADD_F16" => "pk_f16",
                "PK_ADD_BF16" => "pk_bf16",
                _ => return None,
            };
            Access::Atomic(Atomic { what, words: if base.ends_with("64") { 2 } else { 1 }, returns })
        }
    };
    Some(plain)
}

/// Where an access goes, and how its address is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Lds,
    /// A scalar base and a vector offset.
    GlobalScalar,
    GlobalVector,
    FlatGlobal,
    FlatLds,
    FlatPrivate,
    Private,
    Buffer,
}

impl Place {
    fn of(op: Op) -> &'static [Place] {
        match op.info().encoding {
            Encoding::Ds => &[Place::Lds],
            Encoding::Global => &[Place::GlobalScalar, Place::GlobalVector],
            Encoding::Flat => &[Place::FlatGlobal, Place::FlatLds, Place::FlatPrivate],
            Encoding::Scratch => &[Place::Private],
            Encoding::Mubuf => &[Place::Buffer],
            _ => &[],
        }
    }
    fn in_lds(self) -> bool {
        matches!(self, Place::Lds | Place::FlatLds)
    }
    fn is_private(self) -> bool {
        matches!(self, Place::Private | Place::FlatPrivate)
    }
}

struct Case {
    op: Op,
    access: Access,
    place: Place,
    offset: [usize; 2],
    text: String,
}

const OLD: [u32; 4] = [0x5555_AAAA, 0x1234_5678, 0x0BAD_CAFE, 0x8765_4321];

fn registers(first: usize, n: usize) -> String {
    if n == 1 { format!("v{first}") } else { format!("v[{first}:{}]", first + n - 1) }
}

/// Data come from v[4:7], addresses from v8 (a byte offset in the region) or v[10:11]; results go to v[12:15].
fn case(op: Op, place: Place, returns: bool, random: &mut Random) -> Option<Case> {
    let name = op.info().name;
    let rest = name.split_once('_')?.1;
    let access = if place == Place::Lds { lds_access(rest)? } else { vector_access(rest, returns)? };
    if returns && !matches!(access, Access::Atomic(_)) {
        return None;
    }
    let atomic = match access {
        Access::Atomic(a) => Some(a),
        _ => None,
    };
    let mut offset = [0, 0];
    // Within the 16 bytes of a lane, or for two offsets anywhere in the region.
    let (dst, data) = match access {
        Access::LoadPart { bytes, .. } => {
            offset[0] = random.next() as usize % (16 / bytes) * bytes;
            (1, vec![])
        }
        Access::StorePart { bytes, .. } => {
            offset[0] = random.next() as usize % (16 / bytes) * bytes;
            (0, vec![1])
        }
        Access::Load(n) => (n, vec![]),
        Access::Store(n) => (0, vec![n]),
        Access::LoadTwo { words, stride }
        | Access::StoreTwo { words, stride }
        | Access::SwapTwo { words, stride } => {
            let units = if stride >= 256 { 2 } else { 16 / stride };
            offset = [random.next() as usize % units, random.next() as usize % units];
            match access {
                Access::LoadTwo { .. } => (2 * words, vec![]),
                Access::StoreTwo { .. } => (0, vec![words, words]),
                _ => {
                    // Which exchange of one place comes first is not documented.
                    offset[1] = (offset[0] + 1) % units;
                    (2 * words, vec![words, words])
                }
            }
        }
        Access::Atomic(a) => {
            offset[0] = random.next() as usize % 2 * 8;
            let two = matches!(a.what, "cmpswap" | "fcmpswap" | "mskor" | "wrap");
            let data = match (two, place) {
                (true, Place::Lds) => vec![a.words, a.words],
                (true, _) => vec![2 * a.words],
                _ => vec![a.words],
            };
            (if a.returns { a.words } else { 0 }, data)
        }
    };
    if let (Access::Load(n) | Access::Store(n), true) = (access, place != Place::Lds) {
        offset[0] = 4 * (random.next() as usize % (5 - n));
    }
    let mut operands = vec![];
    // A buffer atomic returns into its data.
    if dst > 0 && !(place == Place::Buffer && atomic.is_some()) {
        operands.push(registers(12, dst));
    }
    if place == Place::Buffer {
        if !data.is_empty() {
            operands.push(registers(if atomic.is_some() { 12 } else { 4 }, data[0]));
        }
        operands.push("v8".to_owned());
        operands.push("s[36:39]".to_owned());
        operands.push("s29".to_owned());
    } else {
        operands.push(match place {
            Place::Lds | Place::GlobalScalar => "v8".to_owned(),
            Place::Private => "v16".to_owned(),
            _ => "v[10:11]".to_owned(),
        });
        let mut first = 4;
        for n in data {
            operands.push(registers(first, n));
            first += if n == 1 && place == Place::Lds { 2 } else { n };
        }
        match place {
            Place::GlobalScalar => operands.push("s[30:31]".to_owned()),
            Place::GlobalVector | Place::Private => operands.push("off".to_owned()),
            _ => {}
        }
    }
    let mut text = format!("{} {}", op.mnemonic(), operands.join(", "));
    if place == Place::Buffer {
        text += " offen";
    }
    if matches!(access, Access::LoadTwo { .. } | Access::StoreTwo { .. } | Access::SwapTwo { .. }) {
        text += &format!(" offset0:{} offset1:{}", offset[0], offset[1]);
    } else if offset[0] != 0 {
        text += &format!(" offset:{}", offset[0]);
    }
    if returns {
        text += " sc0";
    }
    Some(Case { op, access, place, offset, text })
}

/// A wave: EXEC, MODE, and for each lane four words of data and a place in the region.
struct Wave {
    exec: u64,
    mode: Mode,
    data: Vec<[u32; 4]>,
    at: Vec<u32>,
}

fn read(memory: &[u8], at: usize, bytes: usize) -> u64 {
    memory[at..at + bytes].iter().rev().fold(0, |x, b| x << 8 | u64::from(*b))
}

fn write(memory: &mut [u8], at: usize, bytes: usize, value: u64) {
    for i in 0..bytes {
        memory[at + i] = (value >> (8 * i)) as u8;
    }
}

/// Runs a case on the bytes of a region; the result registers of each lane.
fn model(case: &Case, wave: &Wave, memory: &mut [u8]) -> Vec<[u32; 4]> {
    let mut out = vec![OLD; 64];
    for lane in 0..64 {
        let data = wave.data[lane];
        let base = if case.place.is_private() { 16 * lane } else { wave.at[lane] as usize };
        if case.place == Place::Buffer && matches!(case.access, Access::Atomic(_)) {
            out[lane] = data;
        }
        if wave.exec >> lane & 1 == 0 {
            continue;
        }
        let at = base + case.offset[0];
        let r = &mut out[lane];
        match case.access {
            Access::LoadPart { bytes, signed, half } => {
                let bits = 8 * bytes as u32;
                let raw = i64::try_from(read(memory, at, bytes)).expect("small");
                let x = if signed && raw >> (bits - 1) != 0 { raw - (1 << bits) } else { raw } as u32;
                r[0] = match half {
                    Half::All => x,
                    Half::Low => r[0] & 0xFFFF_0000 | x & 0xFFFF,
                    Half::High => r[0] & 0xFFFF | x << 16,
                };
            }
            Access::StorePart { bytes, half } => {
                write(memory, at, bytes, (data[0] >> if half == Half::High { 16 } else { 0 }).into());
            }
            Access::Load(n) => (0..n).for_each(|i| r[i] = read(memory, at + 4 * i, 4) as u32),
            Access::Store(n) => (0..n).for_each(|i| write(memory, at + 4 * i, 4, data[i].into())),
            Access::LoadTwo { words, stride } => {
                for (k, unit) in case.offset.iter().enumerate() {
                    for i in 0..words {
                        r[k * words + i] = read(memory, base + unit * stride + 4 * i, 4) as u32;
                    }
                }
            }
            Access::SwapTwo { words, stride } => {
                for (k, unit) in case.offset.iter().enumerate() {
                    for i in 0..words {
                        let at = base + unit * stride + 4 * i;
                        r[k * words + i] = read(memory, at, 4) as u32;
                        write(memory, at, 4, data[2 * k + i].into());
                    }
                }
            }
            Access::StoreTwo { words, stride } => {
                for (k, unit) in case.offset.iter().enumerate() {
                    for i in 0..words {
                        write(memory, base + unit * stride + 4 * i, 4, data[2 * k + i].into());
                    }
                }
            }
            Access::Atomic(a) => {
                let bytes = 4 * a.words;
                let pair = |i: usize| u64::from(data[i]) | u64::from(data[i + 1]) << 32;
                let two = matches!(a.what, "cmpswap" | "fcmpswap" | "mskor" | "wrap");
                // The second operand: next to the first, or in LDS in a register pair of its own.
                let (x, y) = match (a.words, case.place) {
                    (2, _) => (pair(0), pair(2)),
                    (_, Place::Lds) => (data[0].into(), data[2].into()),
                    _ => (data[0].into(), data[1].into()),
                };
                // LDS has the comparand first.
                let (x, y) =
                    if two && case.place == Place::Lds && a.what.ends_with("swap") { (y, x) } else { (x, y) };
                let old = read(memory, at, bytes);
                let mode = case.place.in_lds().then_some(wave.mode);
                write(memory, at, bytes, modify(a.what, 8 * bytes as u32, old, x, y, mode));
                if a.returns {
                    (0..a.words).for_each(|i| r[i] = (old >> (32 * i)) as u32);
                }
            }
        }
    }
    out
}

/// EXEC and MODE, 16 bytes; data and place of each lane, 32 bytes; then for each case the region and the results.
const HEADER: usize = 16 + 64 * 32;

fn kernel(cases: &[Case]) -> String {
    let record = HEADER + cases.len() * 2 * REGION;
    let mut body = format!(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_mul_i32 s6, s2, {record}
  s_waitcnt lgkmcnt(0)
  s_add_u32 s8, s4, s6
  s_addc_u32 s9, s5, 0
  s_load_dwordx4 s[20:23], s[8:9], 0x0
  v_lshlrev_b32 v1, 5, v0
  global_load_dwordx4 v[4:7], v1, s[8:9] offset:16
  global_load_dword v8, v1, s[8:9] offset:32
  s_add_u32 s30, s8, {HEADER:#x}
  s_addc_u32 s31, s9, 0
  v_lshlrev_b32 v2, 4, v0
  v_mov_b32 v16, 0
  s_mov_b32 s38, {REGION:#x}
  s_mov_b32 s39, 0x27000
  s_mov_b32 s29, 0
  s_waitcnt vmcnt(0) lgkmcnt(0)
  s_setreg_b32 hwreg(HW_REG_MODE), s22\n"
    );
    for case in cases {
        for (n, old) in OLD.iter().enumerate() {
            body += &format!("  v_mov_b32 v{}, {old:#x}\n", 12 + n);
        }
        if case.place == Place::Buffer && matches!(case.access, Access::Atomic(_)) {
            (0..4).for_each(|n| body += &format!("  v_mov_b32 v{}, v{}\n", 12 + n, 4 + n));
        }
        // Addresses and, where the region is not in global memory, its bytes.
        let copy = |to: bool| {
            let (global, local) = match (case.place, to) {
                (Place::Lds | Place::FlatLds, true) => ("load", "ds_write_b128 v2, v[40:43]"),
                (Place::Lds | Place::FlatLds, false) => ("store", "ds_read_b128 v[40:43], v2"),
                (Place::Private | Place::FlatPrivate, true) => {
                    ("load", "scratch_store_dwordx4 v16, v[40:43], off")
                }
                (Place::Private | Place::FlatPrivate, false) => {
                    ("store", "scratch_load_dwordx4 v[40:43], v16, off")
                }
                _ => return String::new(),
            };
            if global == "load" {
                format!(
                    "  global_load_dwordx4 v[40:43], v2, s[30:31]\n  s_waitcnt vmcnt(0)\n  {local}\n  s_waitcnt vmcnt(0) lgkmcnt(0)\n"
                )
            } else {
                format!(
                    "  {local}\n  s_waitcnt vmcnt(0) lgkmcnt(0)\n  global_store_dwordx4 v2, v[40:43], s[30:31]\n"
                )
            }
        };
        body += &copy(true);
        body += match case.place {
            Place::GlobalVector | Place::FlatGlobal => {
                "  v_mov_b32 v11, s31\n  v_add_co_u32 v10, vcc, s30, v8\n  v_addc_co_u32 v11, vcc, 0, v11, vcc\n"
            }
            Place::FlatLds => {
                "  s_mov_b64 s[40:41], src_shared_base\n  v_mov_b32 v11, s41\n  v_mov_b32 v10, v8\n"
            }
            Place::FlatPrivate => {
                "  s_mov_b64 s[40:41], src_private_base\n  v_mov_b32 v11, s41\n  v_mov_b32 v10, 0\n"
            }
            Place::Buffer => "  s_mov_b32 s36, s30\n  s_and_b32 s37, s31, 0xffff\n",
            _ => "",
        };
        body += &format!(
            "  s_mov_b64 exec, s[20:21]\n  {}\n  s_waitcnt vmcnt(0) lgkmcnt(0)\n  s_mov_b64 exec, -1\n",
            case.text
        );
        body += &copy(false);
        body += &format!(
            "  s_add_u32 s30, s30, {REGION:#x}\n  s_addc_u32 s31, s31, 0\n  global_store_dwordx4 v2, v[12:15], s[30:31]\n  s_add_u32 s30, s30, {REGION:#x}\n  s_addc_u32 s31, s31, 0\n"
        );
    }
    body
}

/// `end` sees each expected memory before it is compared.
fn check(cpu: &str, encoding: Encoding, end: fn(&Case, &mut [u8])) {
    let mut random = Random(encoding as u64 + 5);
    let mut cases = vec![];
    for op in ALL_OPS.iter().copied().filter(|op| op.info().encoding == encoding) {
        if !executed(cpu).contains(&op) {
            continue;
        }
        for place in Place::of(op) {
            // Atomics on private memory and floats through FLAT on LDS are for the hardware to define.
            let atomic = op.info().name.contains("ATOMIC");
            if atomic && *place == Place::FlatPrivate {
                continue;
            }
            for returns in [false, true] {
                if !returns || place != &Place::Lds {
                    cases.extend(case(op, *place, returns, &mut random));
                }
            }
            if !atomic {
                cases.extend(case(op, *place, false, &mut random));
            }
        }
    }
    assert!(cases.len() > 20);
    let waves: Vec<Wave> = (0..12)
        .map(|i| {
            let mut word = || match random.next() % 8 {
                0 => [0, 1, 2, 0x8000_0000, 0xFFFF_FFFF, 0x7FFF_FFFF][random.next() as usize % 6],
                1 => random.next() % 4,
                // Floats and pairs of halves that add up.
                2 => random.next() & 0x83FF_FFFF | 0x3C00_0000,
                3 => random.next() & 0x8FFF_8FFF | 0x3000_3000,
                _ => random.next(),
            };
            let data = (0..64).map(|_| std::array::from_fn(|_| word())).collect();
            // Shared places in some waves. Two offsets reach 512 bytes further.
            let places = [32, 32, 7, 1][i % 4];
            Wave {
                exec: match i % 6 {
                    0..=2 => !0,
                    3 => 0x0F0F_F00F_FFFF_0001,
                    4 => u64::from(word()) << 32 | u64::from(word()),
                    _ => 0,
                },
                mode: Mode([0x3F0, 0x3C0, 0x1F0, 0x0][i / 3]),
                data,
                at: (0..64)
                    .map(|l| if i % 4 == 0 { (l % 32) * 16 } else { random_place(l, places) })
                    .collect(),
            }
        })
        .collect();
    let mut data: Vec<u8> = vec![];
    for wave in &waves {
        data.extend(wave.exec.to_le_bytes());
        data.extend(u64::from(wave.mode.0).to_le_bytes());
        for lane in 0..64 {
            wave.data[lane].iter().for_each(|x| data.extend(x.to_le_bytes()));
            data.extend(wave.at[lane].to_le_bytes());
            data.extend([0; 12]);
        }
        for _ in 0..cases.len() * 2 * REGION / 4 {
            let x = match random.next() % 6 {
                0 => random.next() % 3,
                1 => wave.data[random.next() as usize % 64][random.next() as usize % 4],
                2 => random.next() & 0x83FF_FFFF | 0x3C00_0000,
                _ => random.next(),
            };
            data.extend(x.to_le_bytes());
        }
    }
    let body = kernel(&cases);
    let image =
        assemble(&Assembly { cpu, body: &body, lds: REGION as u32, scratch: 64, ..Assembly::default() });
    let rig = Rig::new(options(cpu), &image);
    let buffer = rig.upload("data", &data);
    rig.launch("test", waves.len() as u32, 64, &Args::new().push(buffer)).unwrap_or_else(|f| panic!("{f}"));
    let got: Vec<u8> = rig.download(buffer, data.len());
    let mut distinct: HashMap<Op, HashSet<Vec<u8>>> = HashMap::new();
    let record = HEADER + cases.len() * 2 * REGION;
    for (w, wave) in waves.iter().enumerate() {
        for (c, case) in cases.iter().enumerate() {
            let at = w * record + HEADER + c * 2 * REGION;
            let mut memory = data[at..at + REGION].to_vec();
            let results = model(case, wave, &mut memory);
            end(case, &mut memory);
            let place = |what: &str| {
                format!(
                    "{cpu} {:?}: {}\n  {what}, wave {w}, EXEC {:#x}, MODE {:#x}",
                    case.place, case.text, wave.exec, wave.mode.0
                )
            };
            for lane in 0..64 {
                let r: [u32; 4] =
                    std::array::from_fn(|i| read(&got, at + REGION + 16 * lane + 4 * i, 4) as u32);
                assert!(
                    r == results[lane],
                    "{}: lane {lane} at {}, data {:08x?}: got {r:08x?}, want {:08x?}",
                    place("registers"),
                    wave.at[lane],
                    wave.data[lane],
                    results[lane]
                );
            }
            for i in (0..REGION).step_by(4) {
                let word = |m: &[u8], at: usize| read(m, at, 4);
                assert!(
                    word(&got, at + i) == word(&memory, i),
                    "{}: byte {i}: was {:08x}, got {:08x}, want {:08x}",
                    place("memory"),
                    word(&data, at + i),
                    word(&got, at + i),
                    word(&memory, i)
                );
            }
            let seen = distinct.entry(case.op).or_default();
            seen.insert(got[at..at + 2 * REGION].to_vec());
        }
    }
    for (op, seen) in distinct {
        assert!(seen.len() >= 10, "{}: only {} different results", op.mnemonic(), seen.len());
    }
}

/// One of `n` places of 16 bytes, not in order.
fn random_place(lane: u32, n: u32) -> u32 {
    (lane * 11 + lane / 3) % n * 16
}

/// The instructions that `check` covers.
pub fn ops() -> Vec<Op> {
    let covered = |op: &Op| {
        let rest = op.info().name.split_once('_').map_or("", |(_, rest)| rest);
        match op.info().encoding {
            Encoding::Ds => lds_access(rest).is_some(),
            Encoding::Flat | Encoding::Global | Encoding::Scratch | Encoding::Mubuf => {
                vector_access(rest, false).is_some()
            }
            _ => false,
        }
    };
    ALL_OPS.iter().copied().filter(covered).collect()
}

/// Copies from memory to LDS: bytes of each lane, whether they are signed, and how many go to its place.
fn copy_of(op: Op) -> Option<(usize, bool, usize)> {
    let name = op.info().name;
    let tail = match name.split_once("_LOAD_LDS_") {
        Some((_, tail)) => tail,
        None => name.strip_prefix("BUFFER_LOAD_")?,
    };
    Some(match tail {
        "UBYTE" => (1, false, 4),
        "SBYTE" => (1, true, 4),
        "USHORT" => (2, false, 4),
        "SSHORT" => (2, true, 4),
        "DWORD" => (4, false, 4),
        "DWORDX3" => (12, false, 16),
        "DWORDX4" => (16, false, 16),
        _ => return None,
    })
}

pub fn copies() -> Vec<Op> {
    ALL_OPS
        .iter()
        .copied()
        .filter(|op| op.info().name.contains("_LOAD_LDS_") && copy_of(*op).is_some())
        .collect()
}

/// M0 and the immediate, the latter also of the address, are where the first lane's bytes go in LDS.
#[test]
fn copies_to_lds() {
    const LDS: usize = 2048;
    for cpu in ["gfx942", "gfx950"] {
        let mut random = Random(31);
        let mut cases = vec![];
        for op in ALL_OPS.iter().copied().filter(|op| executed(cpu).contains(op)) {
            let (Some((bytes, signed, slot)), name) = (copy_of(op), op.mnemonic()) else { continue };
            let buffer = name.starts_with("buffer");
            // Copies of more than a dword are gfx950's.
            if buffer && bytes > 4 && cpu == "gfx942" {
                continue;
            }
            for i in 0..2 {
                let (m0, imm) = (random.next() as usize % 32 * 4, random.next() as usize % 4 * 4);
                let imm = if bytes > 4 { 0 } else { imm };
                let address = match (name.split('_').next(), i) {
                    (Some("global"), 0) => "v8, s[30:31]",
                    (Some("global"), _) => "v[10:11], off",
                    (Some("scratch"), 0) => "off, off",
                    (Some("scratch"), _) => "v16, off",
                    _ => "v8, s[36:39], s29 offen",
                };
                let offset = if imm == 0 { String::new() } else { format!(" offset:{imm}") };
                let lds = if buffer { " lds" } else { "" };
                let text = format!("s_movk_i32 m0, {m0:#x}\n  {name} {address}{offset}{lds}");
                cases.push((text, name.starts_with("scratch"), bytes, signed, slot, m0, imm));
            }
        }
        assert!(cases.len() > 20);
        let mut body = format!(
            "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v2, 4, v0
  s_movk_i32 s20, 0x5577
  s_mov_b32 s21, 0xf00fffff
  v_mul_u32_u24 v8, 7, v0
  v_and_b32 v8, 31, v8
  v_lshlrev_b32 v8, 4, v8
  v_mov_b32 v16, 0
  s_waitcnt lgkmcnt(0)
  s_mov_b64 s[30:31], s[4:5]
  v_mov_b32 v11, s31
  v_add_co_u32 v10, vcc, s30, v8
  v_addc_co_u32 v11, vcc, 0, v11, vcc
  s_mov_b32 s36, s30
  s_and_b32 s37, s31, 0xffff
  s_movk_i32 s38, 0x180
  s_mov_b32 s39, 0x27000
  s_mov_b32 s29, 0
  global_load_dwordx4 v[40:43], v2, s[30:31]
  s_waitcnt vmcnt(0)
  scratch_store_dwordx4 v16, v[40:43], off
  v_mov_b32 v3, {REGION:#x}
  v_add_u32 v3, v3, v2\n"
        );
        for n in 0..4 {
            body += &format!("  v_mov_b32 v{}, {:#x}\n", 44 + n, OLD[n]);
        }
        for (text, ..) in &cases {
            body += &format!(
                "  ds_write_b128 v2, v[44:47]\n  ds_write_b128 v2, v[44:47] offset:1024\n  s_waitcnt lgkmcnt(0)
  s_mov_b64 exec, s[20:21]\n  {text}\n  s_waitcnt vmcnt(0)\n  s_mov_b64 exec, -1
  ds_read_b128 v[48:51], v2\n  ds_read_b128 v[52:55], v2 offset:1024\n  s_waitcnt lgkmcnt(0)
  global_store_dwordx4 v3, v[48:51], s[4:5]\n  global_store_dwordx4 v3, v[52:55], s[4:5] offset:1024
  v_add_u32 v3, {LDS:#x}, v3\n"
            );
        }
        let assembly = Assembly { cpu, body: &body, lds: LDS as u32, scratch: 64, ..Assembly::default() };
        let rig = Rig::new(options(cpu), &assemble(&assembly));
        let mut data: Vec<u8> = (0..REGION).map(|_| random.next() as u8).collect();
        data.resize(REGION + cases.len() * LDS, 0);
        let buffer = rig.upload("data", &data);
        rig.launch("test", 1, 64, &Args::new().push(buffer)).unwrap_or_else(|f| panic!("{f}"));
        let got: Vec<u8> = rig.download(buffer, data.len());
        let exec = 0xF00F_FFFF_0000_5577u64;
        for (c, (text, private, bytes, signed, slot, m0, imm)) in cases.iter().enumerate() {
            let mut want: Vec<u8> = (0..LDS / 16).flat_map(|_| OLD).flat_map(u32::to_le_bytes).collect();
            for lane in (0..64).filter(|l| exec >> l & 1 != 0) {
                let from = if *private { 16 * lane } else { 7 * lane % 32 * 16 } + imm;
                let to = m0 + imm + lane * slot;
                let bound = if text.contains("buffer") { 0x180 } else { REGION };
                if *bytes > 4 {
                    for i in 0..*bytes {
                        // A resource ends the access; what lies beyond is zero.
                        want[to + i] = if from + bytes <= bound { data[from + i] } else { 0 };
                    }
                    continue;
                }
                let raw = if from + bytes <= bound { read(&data, from, *bytes) as i64 } else { 0 };
                let bits = 8 * bytes;
                let x = if *signed && raw >> (bits - 1) != 0 { raw - (1 << bits) } else { raw };
                write(&mut want, to, 4, x as u64);
            }
            let out = &got[REGION + c * LDS..][..LDS];
            for i in (0..LDS).step_by(4) {
                assert!(
                    read(out, i, 4) == read(&want, i, 4),
                    "{cpu}: {text}: byte {i}: got {:08x}, want {:08x}",
                    read(out, i, 4),
                    read(&want, i, 4)
                );
            }
        }
    }
}

fn both(encoding: Encoding) {
    check("gfx942", encoding, |_, _| {});
    check("gfx950", encoding, |_, _| {});
}

#[test]
fn lds() {
    both(Encoding::Ds);
}

#[test]
fn global() {
    both(Encoding::Global);
}

#[test]
fn flat() {
    both(Encoding::Flat);
}

#[test]
fn scratch() {
    both(Encoding::Scratch);
}

#[test]
fn buffers() {
    both(Encoding::Mubuf);
}

#[test]
#[should_panic(expected = "scratch_store_byte")]
fn a_wrong_byte_is_noticed() {
    check("gfx942", Encoding::Scratch, |case, memory| {
        if case.op == Op::SCRATCH_STORE_BYTE {
            memory[REGION - 1] ^= 1;
        }
    });
}
