//! Proof of [`Effects`] and [`Accesses`]: every instruction that the emulator executes, in every form, on random
//! state, and once more on a state that agrees with the first one only in what the instruction is said to read.
//! MODE is no register here: it is the same in both.

#[path = "../../tests/isa/generator.rs"]
mod generator;

use std::collections::BTreeSet;

use generator::Generator;
use hk_codeobj::Arch;
use proptest::prelude::{Rng, RngExt};

use super::access::Accesses;
use crate::effects::Effects;
use crate::exec::flat::{PRIVATE_APERTURE, SHARED_APERTURE};
use crate::exec::{Ctl, Env, Level, indexed};
use crate::fault::{Access, Space};
use crate::isa::{ALL_OPS, Encoding, Inst, Op, Operand, decode, display};
use crate::lower::{Code, Text, Way, lower};
use crate::memory::View;
use crate::memory::{ADDRESSES, Allocation, Memory};
use crate::program::{Program, Registers};
use crate::registers::{Reg, RegSet, SCC, SGPR, name, reg, source_width};
use crate::tables::MatrixNumerics;
use crate::wave::GroupInfo;
use crate::wave::{AGPR, M0, Wave, mode};

const LDS: usize = 256 << 10;
const GLOBAL: usize = 64 << 10;
const STRIDE: u32 = 1 << 10;

/// Everything that an instruction can change.
struct State {
    w: Wave,
    lds: Vec<u8>,
    global: Vec<u8>,
}

impl State {
    fn random(g: &mut Generator) -> State {
        let mut bytes = |n: usize| (0..n / 8).flat_map(|_| g.0.next_u64().to_le_bytes()).collect::<Vec<u8>>();
        let mut w = Wave::new();
        w.scratch = bytes(Wave::scratch_bytes(STRIDE));
        w.scratch_stride = STRIDE;
        let (lds, global) = (bytes(LDS), bytes(GLOBAL));
        for register in (0..SCC).chain([SCC]) {
            randomise(&mut w, register, g);
        }
        State { w, lds, global }
    }

    /// A state of its own for a run.
    fn copy(&self, into: &mut State, spaces: &[Space]) {
        for slot in 0..crate::wave::TEMP {
            *into.w.v_mut(slot) = *self.w.v(slot);
        }
        (into.w.s, into.w.scc, into.w.mode) = (self.w.s, self.w.scc, self.w.mode);
        (into.w.f32_mode, into.w.f64_mode) = (self.w.f32_mode, self.w.f64_mode);
        for space in spaces {
            match space {
                Space::Lds => into.lds.copy_from_slice(&self.lds),
                Space::Private => into.w.scratch.copy_from_slice(&self.w.scratch),
                _ => into.global.copy_from_slice(&self.global),
            }
        }
        (into.w.pc, into.w.executed, into.w.clock, into.w.scratch_stride) = (0, 0, 0, STRIDE);
    }

    fn bytes(&mut self, space: Space) -> &mut [u8] {
        match space {
            Space::Lds => &mut self.lds,
            Space::Private => &mut self.w.scratch,
            _ => &mut self.global,
        }
    }
}

/// Values of a register, one for every lane.
fn get(w: &Wave, register: Reg) -> [u32; 64] {
    match register {
        0..SGPR => *w.v(register).flat(),
        SCC => [w.scc.into(); 64],
        _ => [w.s[usize::from(register - SGPR)]; 64],
    }
}

fn set(w: &mut Wave, register: Reg, values: [u32; 64]) {
    match register {
        0..SGPR => (0..64).for_each(|lane| w.set_lane(register, lane, values[lane])),
        SCC => w.scc = values[0] & 1 != 0,
        _ => w.s[usize::from(register - SGPR)] = values[0],
    }
}

/// Random bits, small numbers, floats and packed f16: one kind for the whole register.
fn randomise(w: &mut Wave, register: Reg, g: &mut Generator) {
    let kind = g.0.next_u32() % 5;
    let values = std::array::from_fn(|_| {
        let x = g.0.next_u32();
        match kind {
            0 => x % 64,
            1 => (x as f32 / 2f32.powi(30) - 2.0).to_bits(),
            2 => 0x3C00_3800 ^ x & 0x83FF_83FF,
            3 => x & 0x800F_FFFF | 0x3FF0_0000,
            _ => x,
        }
    });
    set(w, register, values);
}

struct Case<'a> {
    program: &'a Program,
    inst: &'a Inst,
    global: &'a Allocation,
}

impl Case<'_> {
    /// Makes the memory addresses of an instruction valid. Later attempts try less.
    fn aim(&self, w: &mut Wave, g: &mut Generator, attempt: u32) {
        let inst = self.inst;
        let align = if attempt == 0 { [1, 2, 4, 4][g.0.next_u32() as usize % 4] } else { 16 };
        // A slot of its own for each lane, in any order, all moved by some bytes.
        let turn = g.0.next_u32() % 64;
        let shift = g.0.next_u32() % 16 / align * align;
        let slot = |lane: usize| 4096 + 64 * (lane as u32 ^ turn) + shift;
        let imm = inst.imm as u32;
        let base = self.global.base;
        let low = |operand: Operand| match operand {
            Operand::Sgpr(code) => Some(usize::from(code)),
            _ => None,
        };
        let scalar = |w: &mut Wave, operand: Operand, value: u64| {
            if let Some(code) = low(operand) {
                w.set_s64(code, value);
            }
        };
        let vector = |w: &mut Wave, operand: Operand, i: u16, f: &dyn Fn(usize) -> u32| {
            if let Some(first) = reg(operand) {
                set(w, first + i, std::array::from_fn(f));
            }
        };
        match inst.encoding {
            Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopk | Encoding::Sopp | Encoding::Sopc => {
                match inst.op {
                    Op::S_SETPC_B64 | Op::S_SWAPPC_B64 => scalar(w, inst.src[0], 0),
                    Op::S_CBRANCH_G_FORK => scalar(w, inst.src[1], 0),
                    Op::S_CBRANCH_JOIN => {
                        let depth = 1 + turn % 4;
                        w.set_mode(w.mode & !0 >> 3 | depth << mode::FORKS);
                        w.set_s64(4 * depth as usize - 2, 0);
                    }
                    _ if inst.op.info().name.contains("MOVREL") => w.s[M0] = turn % 4,
                    _ => {}
                }
            }
            Encoding::Smem => {
                let start = base + 4096 + u64::from(shift);
                if inst.op.info().name.contains("BUFFER") {
                    scalar(w, inst.src[0], start);
                    if let Some(code) = low(inst.src[0]) {
                        w.s[code + 2] = 64 + turn;
                    }
                } else {
                    let imm = if let Operand::Imm(value) = inst.src[1] { value } else { inst.imm };
                    scalar(w, inst.src[0], start.wrapping_add_signed(-i64::from(imm)));
                }
                if let Some(code) = low(inst.src[1]) {
                    w.s[code] = turn;
                }
            }
            Encoding::Ds => {
                if inst.src[0] == Operand::None || attempt > 1 {
                    w.s[M0] = 4096 + shift;
                }
                let name = inst.op.info().name;
                let pair = ["READ2", "WRITE2", "WRXCHG2"].iter().any(|pair| name.contains(pair));
                let odd = if attempt > 0 && !pair { imm % 16 } else { 0 };
                vector(w, inst.src[0], 0, &|lane| slot(lane) - odd);
            }
            Encoding::Flat | Encoding::Global => {
                let dma = inst.op.info().name.contains("_LDS_");
                if dma {
                    w.s[M0] = 8192 + 4 * turn;
                }
                if inst.src[1] == Operand::None {
                    let windows = g.0.next_u32();
                    let high = |lane: usize| match (windows >> (lane % 16 * 2)) & 3 {
                        2 if inst.encoding == Encoding::Flat && attempt < 2 => SHARED_APERTURE,
                        3 if inst.encoding == Encoding::Flat && attempt < 2 => PRIVATE_APERTURE,
                        _ => (base >> 32) as u32,
                    };
                    vector(w, inst.src[0], 0, &|lane| {
                        let at = match high(lane) {
                            SHARED_APERTURE => slot(lane),
                            PRIVATE_APERTURE => 256 + 4 * (lane as u32 ^ turn) + shift,
                            _ => (base as u32).wrapping_add(slot(lane)),
                        };
                        at.wrapping_sub(imm)
                    });
                    vector(w, inst.src[0], 1, &high);
                } else {
                    scalar(w, inst.src[1], base.wrapping_add_signed(-i64::from(inst.imm)));
                    vector(w, inst.src[0], 0, &slot);
                }
            }
            Encoding::Scratch => {
                // Every lane has bytes of its own.
                let (part, rest) = if low(inst.src[1]).is_some() { (imm, 0) } else { (0, imm) };
                if let Some(code) = low(inst.src[1]) {
                    w.s[code] = (256 + shift).wrapping_sub(part);
                }
                vector(w, inst.src[0], 0, &|lane| {
                    (256 + 4 * (lane as u32 ^ turn) + shift).wrapping_sub(rest)
                });
            }
            Encoding::Mubuf | Encoding::Mtbuf => {
                let stride = if inst.flags.idxen && !turn.is_multiple_of(4) { 64 } else { 0 };
                if let Some(code) = low(inst.src[1]) {
                    w.set_s64(code, base.wrapping_sub(imm.into()) & 0xFFFF_FFFF_FFFF | stride << 48);
                    w.s[code + 2] = if stride == 0 { 4096 + 16 * turn + imm } else { turn };
                    let add_thread = u32::from(attempt == 0 && turn % 8 == 7) << 23;
                    let (number, data) =
                        ([0, 1, 4, 5, 7][turn as usize % 5], [1, 2, 3, 4, 5, 10, 11, 12, 13, 14]);
                    let format = number << 12 | data[g.0.random_range(0..data.len())] << 15;
                    w.s[code + 3] = add_thread | format | if turn.is_multiple_of(3) { 0xFAC } else { 0x32D };
                }
                if let Some(code) = low(inst.src[2]) {
                    w.s[code] = shift;
                }
                if inst.flags.lds {
                    w.s[M0] = 8192 + 4 * turn;
                }
                let (index, offset) = (u16::from(inst.flags.idxen), u16::from(inst.flags.offen));
                if index != 0 {
                    vector(w, inst.src[0], 0, &|lane| lane as u32 ^ turn);
                }
                if offset != 0 {
                    let small = index != 0 && stride != 0;
                    vector(w, inst.src[0], index, &|lane| {
                        if small { shift } else { 64 * (lane as u32 ^ turn) + shift }
                    });
                }
            }
            _ => {}
        }
    }

    /// Runs the instruction; what it said it would access, and how it ended.
    fn run(&self, state: &mut State) -> (Accesses, Ctl) {
        let global = matches!(
            self.inst.encoding,
            Encoding::Smem | Encoding::Flat | Encoding::Global | Encoding::Mubuf | Encoding::Mtbuf
        );
        if global {
            self.global.write_bytes(0, &state.global);
        }
        let view = View::new(vec![self.global], false);
        let group = GroupInfo { id: [1, 2, 3], linear: 5, gpr_alloc: 0, epoch: None, pace: None };
        let n = self.program.uops.len();
        let mut env = Env {
            program: self.program,
            memory: &view,
            lds: &mut state.lds,
            group: &group,
            interrupt: None,
            rises: &mut vec![0; n + 1],
            hints: &mut vec![0; n],
            read_bytes: 0,
            written_bytes: 0,
            problem: None,
        };
        let u = &self.program.uops[self.program.entry() as usize];
        state.w.pc = u.index;
        let mut accesses = Accesses::default();
        accesses.of(self.inst, u, &state.w, &env);
        let ctl = match state.w.mode & mode::GPR_IDX {
            // SAFETY: the portable level is everywhere.
            0 => unsafe { (u.run)(&mut state.w, &mut env, u) },
            _ => indexed::run(&mut state.w, &mut env, u),
        };
        if global {
            self.global.read_bytes(0, &mut state.global);
        }
        (accesses, ctl)
    }
}

/// Bytes of one space that are said to be read, written, or both.
fn marks(accesses: &Accesses, space: Space, base: u64, len: usize) -> Vec<u8> {
    let mut marks = vec![0; len];
    for part in accesses.parts().iter().filter(|part| part.space == space) {
        for (lane, address) in part.lanes() {
            for i in 0..u64::from(part.bytes) {
                let at = (address + i).wrapping_sub(base) as usize;
                let at = if space == Space::Private { Wave::scratch_index(lane, at) } else { at };
                if let Some(mark) = marks.get_mut(at) {
                    *mark |= match part.access {
                        Access::Read => 1,
                        Access::Write => 2,
                        _ => 3,
                    };
                }
            }
        }
    }
    marks
}

fn base_of(space: Space, global: &Allocation) -> u64 {
    if space == Space::Global { global.base } else { 0 }
}

/// The outcome of one instance.
enum Outcome {
    /// Not an instruction that the emulator executes.
    Unknown,
    /// It faults whatever was tried.
    Faults,
    Proven,
    Wrong(String),
}

fn check(
    arch: Arch,
    words: &[u32],
    states: &mut [State; 4],
    global: &Allocation,
    g: &mut Generator,
) -> Outcome {
    let Ok(inst) = &decode(arch, words) else { return Outcome::Unknown };
    let mut code = words[..usize::from(inst.size) / 4].to_vec();
    code.push(0xBF81_0000);
    let text = Text { base: 0, segments: vec![Code { vaddr: 0, words: code }] };
    let way = Way { level: Level::Portable, numerics: MatrixNumerics::Fma, mutation: None };
    let program = &lower(&text, arch, &way, 0, Registers { vgprs: 256, agprs: 256, first_agpr: AGPR.into() });
    if program.unsupported().iter().any(|(at, ..)| *at == 0) {
        return Outcome::Unknown;
    }
    // Pairs of registers that start at the high half of EXEC do not exist.
    if (0..3).any(|i| inst.src[i] == Operand::Sgpr(127) && source_width(inst, i) > 1) {
        return Outcome::Unknown;
    }
    let mut effects = Effects::of(inst);
    let case = Case { program, inst, global };
    let [a, b, first, second] = states;
    let touched = effects.reads.union(&effects.writes);
    let dma = inst.flags.lds || inst.op.info().name.contains("_LOAD_LDS_");
    let spaces: &[Space] = match inst.encoding {
        Encoding::Ds => &[Space::Lds],
        Encoding::Scratch => &[Space::Private],
        Encoding::Flat => &[Space::Global, Space::Lds, Space::Private],
        Encoding::Global | Encoding::Mubuf if dma => &[Space::Global, Space::Lds],
        Encoding::Global | Encoding::Mubuf | Encoding::Mtbuf | Encoding::Smem => &[Space::Global],
        _ => &[],
    };
    let mut accesses = None;
    for attempt in 0..4 {
        for register in touched.iter() {
            randomise(&mut a.w, register, g);
        }
        let random = g.0.next_u64();
        a.w.set_exec(match random % 4 {
            0 | 1 => !0,
            2 => random,
            _ => 1 << (random >> 58),
        });
        a.w.set_mode([0x2F0, 0xC0, 0x0, 0x1F5][g.0.random_range(0..4)]);
        // Now and then with vector registers that M0 moves.
        if random >> 32 & 7 == 0 && attempt == 0 {
            a.w.set_mode(a.w.mode | mode::GPR_IDX);
            a.w.s[M0] = (random >> 36) as u32 & 0xF003;
        }
        case.aim(&mut a.w, g, attempt);
        effects = if effects.moves(&a.w) { Effects::now(inst, &a.w) } else { Effects::of(inst) };
        a.copy(first, spaces);
        program.place_constants(&mut first.w);
        let (found, ctl) = case.run(first);
        if ctl != Ctl::Fault {
            accesses = Some((found, ctl));
            break;
        }
    }
    let Some((accesses, ctl)) = accesses else { return Outcome::Faults };
    let fail = |what: String| Outcome::Wrong(format!("{}: {what}", display(inst)));

    // What changes is what is said to be written.
    let exec = a.w.exec();
    for register in (0..SCC).chain([SCC]) {
        if !effects.writes.contains(register) && get(&a.w, register) != get(&first.w, register) {
            return fail(format!("{} changes", name(register)));
        }
    }

    // Everything else is other: the result is the same.
    b.copy(second, &[]);
    for register in effects.reads.iter() {
        set(&mut second.w, register, get(&a.w, register));
    }
    second.w.set_mode(a.w.mode);
    program.place_constants(&mut second.w);
    let mut listed = vec![];
    for &space in spaces {
        let len = a.bytes(space).len();
        let marks = marks(&accesses, space, base_of(space, global), len);
        for ((to, from), mark) in second.bytes(space).iter_mut().zip(a.bytes(space)).zip(&marks) {
            *to = if mark & 1 != 0 { *from } else { !*from };
        }
        listed.push(marks);
    }
    let (_, again) = case.run(second);
    if (again, second.w.pc) != (ctl, first.w.pc) {
        return fail(format!("{ctl:?} to {} becomes {again:?} to {}", first.w.pc, second.w.pc));
    }
    for register in effects.writes.iter() {
        let (one, two) = (get(&first.w, register), get(&second.w, register));
        let (old, other) = (get(&a.w, register), get(&b.w, register));
        for lane in 0..64 {
            let kept = register < SGPR
                && exec >> lane & 1 == 0
                && one[lane] == old[lane]
                && two[lane] == if effects.reads.contains(register) { old[lane] } else { other[lane] };
            if one[lane] != two[lane] && !kept {
                return fail(format!(
                    "lane {lane} of {} depends on more than {}",
                    name(register),
                    list(&effects.reads)
                ));
            }
        }
    }
    if spaces.is_empty() {
        return Outcome::Proven;
    }

    // Bytes that are not said to be written keep their values, those that are do not.
    for (&space, marks) in spaces.iter().zip(&listed) {
        let (before, first, second) = (a.bytes(space), first.bytes(space), second.bytes(space));
        for (i, mark) in marks.iter().enumerate() {
            let (one, two, old) = (first[i], second[i], before[i]);
            let fine = match mark {
                0 => one == old && two == !old,
                1 => one == old && two == old,
                _ => one == two,
            };
            if !fine {
                return fail(format!(
                    "{space:?} byte {i:#x}, marked {mark}: {old:#x} became {one:#x}, {two:#x}"
                ));
            }
        }
    }

    // Every byte that is said to be read counts: loads deliver all of them.
    let loads: Vec<_> = accesses.parts().iter().filter(|part| part.access != Access::Write).collect();
    let atomic = loads.iter().any(|part| part.access == Access::Atomic);
    // Atomics that meet at one address see each other's values.
    let mut addresses: Vec<_> =
        loads.iter().flat_map(|part| part.lanes()).map(|(_, address)| address).collect();
    addresses.sort_unstable();
    let meet = addresses.windows(2).any(|pair| pair[0] == pair[1]);
    let silent = atomic && (inst.dst == Operand::None || meet);
    let transposes = inst.op.info().name.contains("_TR_") && exec != !0;
    let converts = inst.op.info().name.contains("_FORMAT_");
    if !loads.is_empty() && !silent && !transposes && !converts {
        a.copy(second, spaces);
        program.place_constants(&mut second.w);
        for (&space, marks) in spaces.iter().zip(&listed) {
            for (byte, mark) in second.bytes(space).iter_mut().zip(marks) {
                *byte ^= if mark & 1 != 0 { 0xFF } else { 0 };
            }
        }
        case.run(second);
        let scalar = loads.iter().any(|part| part.scalar);
        let lanes = |register: Reg| if register < SGPR && !scalar { 64 } else { 1 };
        let mut bits: u32 = effects
            .writes
            .iter()
            .map(|register| {
                let (one, two) = (get(&first.w, register), get(&second.w, register));
                (0..lanes(register)).map(|lane| (one[lane] ^ two[lane]).count_ones()).sum::<u32>()
            })
            .sum();
        if dma {
            bits = first.lds.iter().zip(&second.lds).map(|(one, two)| (one ^ two).count_ones()).sum();
        }
        let said: u32 = loads.iter().map(|part| 8 * part.bytes * part.mask.count_ones()).sum();
        if bits < said {
            return fail(format!("{} bytes are said to be read, {bits} bits of the result change", said / 8));
        }
    }
    Outcome::Proven
}

fn list(set: &RegSet) -> String {
    set.iter().map(name).collect::<Vec<_>>().join(" ")
}

#[test]
fn effects_and_accesses_say_what_instructions_do() {
    let per_form: usize = std::env::var("HK_ISA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    let memory = Memory::new(ADDRESSES, false);
    let global = memory.detached(GLOBAL as u64, 256, "test", true).expect("memory");
    for arch in Arch::AMD {
        let mut g = Generator::new(11);
        let mut states: [State; 4] = std::array::from_fn(|_| State::random(&mut g));
        let (mut ran, mut faults) = (BTreeSet::new(), BTreeSet::new());
        let mut wrong = vec![];
        for &op in ALL_OPS.iter().filter(|op| op.info().exists_on(arch)) {
            let forms = if matches!(op.info().encoding, Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc) {
                2
            } else {
                1
            };
            // More where random operands are out of range nearly always.
            for case in 0..20 * per_form {
                if case >= per_form * forms && !faults.difference(&ran).any(|name| *name == op.info().name) {
                    break;
                }
                let words = g.instance(op, case % forms != 0);
                match check(arch, &words, &mut states, &global, &mut g) {
                    Outcome::Unknown => {}
                    Outcome::Faults => drop(faults.insert(op.info().name)),
                    Outcome::Proven => drop(ran.insert(op.info().name)),
                    Outcome::Wrong(what) => wrong.push(what),
                }
            }
        }
        let never: Vec<_> = faults.difference(&ran).collect();
        // Messages, traps, hardware registers, and operands that M0 moves out of range.
        assert!(
            never.iter().all(|name| name.starts_with("S_") || name.contains("_FORMAT_")),
            "{arch}: {never:?} are never executed"
        );
        assert!(ran.len() > 950, "{arch}: only {} opcodes were executed", ran.len());
        let show =
            wrong.len().min(std::env::var("HK_ISA_SHOW").ok().and_then(|n| n.parse().ok()).unwrap_or(20));
        assert!(wrong.is_empty(), "{arch}: {} instances:\n{}", wrong.len(), wrong[..show].join("\n"));
    }
}
