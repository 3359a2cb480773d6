//! Instructions to [`Uop`]s: what is reachable from a kernel's entry is decoded and resolved once.

use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hk_codeobj::Arch;

use crate::counters::Counters;
use crate::exec::prep::{DWORD, fixed, selects, splat};
use crate::exec::smem::{POLL_INSTRUCTIONS, WAITS};
use crate::exec::{
    Ctl, Env, Handler, Level, SPECIAL, Uop, convert, ds, flat, mfma, mubuf, salu, smem, valu, vfloat, vop3p,
};
use crate::fault::Problem;
use crate::isa::{self, DecodeError, Encoding, Inst, Op, Operand};
use crate::mutate::Mutation;
use crate::program::{Program, Registers, TO_GROUPS, TO_WAVES};
use crate::tables::{DppTable, Fixup, MatrixNumerics, Post, Prep};
use crate::wave::{AGPR, CONSTANTS, SLOTS, TEMP, TEMP_DST, Wave};

/// Where code is: a run of words at a virtual address of the object, loaded at `base + vaddr`.
pub(crate) struct Code {
    pub vaddr: u64,
    pub words: Vec<u32>,
}

/// The code of a module.
pub(crate) struct Text {
    pub base: u64,
    pub segments: Vec<Code>,
}

impl Text {
    /// The words from `vaddr` to the end of its segment.
    fn at(&self, vaddr: u64) -> Option<&[u32]> {
        self.segments.iter().find_map(|code| {
            let offset = vaddr.checked_sub(code.vaddr)?;
            (offset % 4 == 0).then_some(())?;
            code.words.get(usize::try_from(offset / 4).ok()?..).filter(|words| !words.is_empty())
        })
    }
}

/// How instructions become handlers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub level: Level,
    pub numerics: MatrixNumerics,
    /// What is broken on purpose: a virtual address and the change.
    pub mutation: Option<(u64, Mutation)>,
}

/// Reports the problem noted for an instruction.
fn report(_: &mut Wave, e: &mut Env<'_>, u: &Uop) -> Ctl {
    let problem = e.program.problems.get(&u.index).cloned();
    e.fault(problem.unwrap_or(Problem::WildJump { address: 0 }))
}

fn branch_target(inst: &Inst, vaddr: u64) -> Option<u64> {
    use Op::*;
    matches!(
        inst.op,
        S_BRANCH
            | S_CBRANCH_SCC0
            | S_CBRANCH_SCC1
            | S_CBRANCH_VCCZ
            | S_CBRANCH_VCCNZ
            | S_CBRANCH_EXECZ
            | S_CBRANCH_EXECNZ
            | S_CBRANCH_CDBGSYS
            | S_CBRANCH_CDBGUSER
            | S_CBRANCH_CDBGSYS_OR_USER
            | S_CBRANCH_CDBGSYS_AND_USER
            | S_CALL_B64
            | S_CBRANCH_I_FORK
    )
    .then(|| vaddr.wrapping_add(4).wrapping_add_signed(i64::from(inst.imm as u16 as i16) * 4))
}

fn ends_flow(op: Op) -> bool {
    use Op::*;
    matches!(
        op,
        S_BRANCH
            | S_ENDPGM
            | S_SETPC_B64
            | S_SWAPPC_B64
            | S_RFE_B64
            | S_ENDPGM_SAVED
            | S_ENDPGM_ORDERED_PS_DONE
    )
}

/// Decodes from `vaddr` on; anything wrong becomes an instruction that reports it.
fn decode_at(text: &Text, arch: Arch, vaddr: u64) -> Result<Inst, DecodeError> {
    isa::decode(arch, text.at(vaddr).unwrap_or(&[]))
}

/// Every instruction reachable from the entry; with indirect jumps, everything that decodes in the code.
fn reach(text: &Text, arch: Arch, entry: u64) -> BTreeMap<u64, Result<Inst, DecodeError>> {
    let mut found = BTreeMap::new();
    let mut work = vec![entry];
    let mut indirect = false;
    while let Some(mut at) = work.pop() {
        while !found.contains_key(&at) {
            let inst = decode_at(text, arch, at);
            found.insert(at, inst);
            let Ok(inst) = inst else { break };
            indirect |= matches!(inst.op, Op::S_SETPC_B64 | Op::S_SWAPPC_B64 | Op::S_CBRANCH_G_FORK);
            work.extend(branch_target(&inst, at));
            if inst.op == Op::S_SWAPPC_B64 {
                work.push(at.wrapping_add(inst.size.into()));
            }
            if ends_flow(inst.op) {
                break;
            }
            at = at.wrapping_add(inst.size.into());
        }
    }
    if indirect {
        for code in &text.segments {
            let end = code.vaddr + 4 * code.words.len() as u64;
            let mut at = code.vaddr;
            while at < end {
                let inst = *found.entry(at).or_insert_with(|| decode_at(text, arch, at));
                at += inst.map_or(4, |inst| u64::from(inst.size));
            }
        }
    }
    found
}

/// Whether the emulator executes `op` on `arch`, and why not.
///
/// # Errors
/// What a launch that reaches the instruction reports.
pub fn executes(op: Op, arch: Arch) -> Result<(), String> {
    let text = Text { base: 0, segments: vec![Code { vaddr: 0, words: isa::instance(op).to_vec() }] };
    let registers = Registers { vgprs: 256, agprs: 256, first_agpr: AGPR.into() };
    let way = Way { level: Level::Portable, numerics: MatrixNumerics::Fma, mutation: None };
    let program = lower(&text, arch, &way, 0, registers);
    program.problems.get(&program.entry).map_or(Ok(()), |problem| Err(problem.to_string()))
}

/// Lowers the kernel at `entry`.
pub(crate) fn lower(text: &Text, arch: Arch, way: &Way, entry: u64, registers: Registers) -> Program {
    let program = lower_with(text, arch, way, entry, registers);
    // Compilers keep VGPRs and AGPRs apart. Hand-written kernels may not: they use v200 with AGPRs from 160 on.
    let beyond = |p: &Problem| matches!(p, Problem::Register { register, .. } if register.starts_with('v'));
    if program.problems.values().any(beyond) {
        lower_with(text, arch, way, entry, registers.one_file())
    } else {
        program
    }
}

fn lower_with(text: &Text, arch: Arch, way: &Way, entry: u64, registers: Registers) -> Program {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut found = reach(text, arch, entry);
    if let Some((address, mutation)) = way.mutation
        && let Some(Ok(inst)) = found.get_mut(&address)
    {
        *inst = mutation.apply(inst);
    }
    let mut program = Program {
        id: NEXT.fetch_add(1, Relaxed),
        uops: Vec::with_capacity(found.len()),
        run_ends: vec![],
        arch,
        fixups: vec![],
        matrices: vec![],
        conversions: vec![],
        fnuz: arch == Arch::Gfx942,
        communicates: false,
        registers,
        entry: 0,
        insts: vec![],
        addresses: vec![],
        index: HashMap::with_capacity(found.len()),
        base: text.base,
        scalars: vec![],
        vectors: vec![],
        problems: HashMap::new(),
        effects: OnceLock::new(),
        units: vec![],
        unit_of: Vec::with_capacity(found.len()),
    };
    // Addresses first: branches need the indices. Where the next instruction is missing, a guard reports it.
    let mut order = vec![];
    let mut iter = found.iter().peekable();
    while let Some((&at, &inst)) = iter.next() {
        program.index.insert(at, order.len() as u32);
        order.push((at, inst));
        let next = at.wrapping_add(inst.map_or(4, |inst| inst.size.into()));
        let stops = inst.map_or(true, |inst| ends_flow(inst.op));
        if !stops && iter.peek().is_none_or(|(following, _)| **following != next) {
            order.push((next, Err(DecodeError::Truncated)));
        }
    }
    program.insts = order.iter().map(|(_, inst)| *inst).collect();
    program.addresses = order.iter().map(|(at, _)| *at).collect();
    program.entry = program.index.get(&entry).copied().unwrap_or(0);
    let mut lowering = Lowering {
        program,
        level: way.level,
        numerics: way.numerics,
        registers,
        scalar_index: HashMap::new(),
        vector_index: HashMap::new(),
    };
    for (i, (at, inst)) in order.iter().enumerate() {
        let index = i as u32;
        let (unit, uop) = match inst {
            Err(error) => (Counters::default(), Err(Problem::Unknown(*error))),
            Ok(inst) => (Counters::of(inst, arch), lowering.instruction(inst, *at, index)),
        };
        let clocks = inst.map_or(0, |inst| unit.wave_clocks(&inst, arch) as u16);
        let units = &mut lowering.program.units;
        let known = units.iter().position(|known| *known == unit).unwrap_or_else(|| {
            units.push(unit);
            units.len() - 1
        });
        lowering.program.unit_of.push(known as u32);
        let uop = uop.unwrap_or_else(|problem| {
            lowering.program.problems.insert(index, problem);
            Uop { run: report, index, ..blank() }
        });
        lowering.program.uops.push(Uop { clocks, ..uop });
    }
    mark_waits(&mut lowering.program);
    lowering.program.run_ends = run_ends(&lowering.program.uops);
    lowering.program
}

/// For each instruction the next one that others may see, or the end.
fn run_ends(uops: &[Uop]) -> Vec<u32> {
    let mut end = uops.len() as u32;
    let mut ends: Vec<_> = uops
        .iter()
        .rev()
        .map(|u| if u.visible != 0 { std::mem::replace(&mut end, u.index) } else { end })
        .collect();
    ends.reverse();
    ends
}

/// Marks the clock reads in loops that end at a time and do nothing else: no memory, no barrier, no call.
fn mark_waits(program: &mut Program) {
    let reads_clock = |op| matches!(op, Op::S_MEMTIME | Op::S_MEMREALTIME);
    let local = |inst: &Inst| {
        use Encoding::{Sop1, Sop2, Sopc, Sopk, Sopp, Vop1, Vop2, Vop3, Vop3p, Vopc};
        let encoding = inst.op.info().encoding;
        let computes =
            matches!(encoding, Sop1 | Sop2 | Sopc | Sopk | Sopp | Vop1 | Vop2 | Vop3 | Vop3p | Vopc);
        let leaves = matches!(inst.op, Op::S_BARRIER | Op::S_CALL_B64 | Op::S_SETPC_B64 | Op::S_SWAPPC_B64);
        reads_clock(inst.op) || computes && !leaves
    };
    for at in 0..program.insts.len() {
        if !program.insts[at].is_ok_and(|inst| reads_clock(inst.op)) {
            continue;
        }
        let reach = program.uops.len().min(at + POLL_INSTRUCTIONS as usize);
        // The innermost loop around it.
        let body = (at..reach).find_map(|last| {
            let inst = program.insts[last].ok()?;
            branch_target(&inst, program.addresses[last])?;
            let first = usize::try_from(program.uops[last].imm).ok().filter(|first| *first <= at)?;
            Some(first..=last)
        });
        let waits = body.is_some_and(|body| {
            let body = &program.insts[body];
            let reads = body.iter().flatten().filter(|inst| reads_clock(inst.op)).count();
            reads == 1 && body.iter().all(|inst| inst.as_ref().is_ok_and(local))
        });
        if waits {
            program.uops[at].extra |= WAITS;
        }
    }
}

fn blank() -> Uop {
    Uop {
        run: report,
        inner: report,
        d: 0,
        a: 0,
        b: 0,
        c: 0,
        mask_out: 0,
        mask_in: 0,
        hi: [0; 3],
        imm: 0,
        index: 0,
        extra: 0,
        visible: 0,
        clocks: 0,
        fixup: u32::MAX,
        splats: [[0; 2]; 2],
    }
}

/// The type of an instruction's modifiers, from the end of its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Word,
    Half,
    Bfloat,
    Double,
}

fn kind(op: Op) -> Kind {
    let name = op.info().name;
    if name.starts_with("V_CVT_SCALEF32") {
        Kind::Word
    } else if name.ends_with("_F16") || name.ends_with("16") && !name.ends_with("BF16") {
        Kind::Half
    } else if name.ends_with("_F64") {
        Kind::Double
    } else {
        Kind::Word
    }
}

/// Mixed precision: each source is an f32 or an f16.
fn is_mixed(op: Op) -> bool {
    matches!(op, Op::V_FMA_MIX_F32 | Op::V_FMA_MIXLO_F16 | Op::V_FMA_MIXHI_F16)
}

/// The type of constants in source `i`. The addend of a sum of products is as wide as the result; 16-bit integers that
/// are summed come in pairs, for which float constants are those of f32. In a mixed-precision sum `op_sel_hi` says which
/// sources are f16, and their constants with them. Of a scaled conversion the data have the type that is named last.
fn source_kind(inst: &Inst, i: usize) -> Kind {
    use Op::*;
    let op = inst.op;
    if is_mixed(op) {
        return if inst.op_sel_hi >> i & 1 != 0 { Kind::Half } else { Kind::Word };
    }
    let name = op.info().name;
    let scaled = i == 0 && name.starts_with("V_CVT_SCALEF32");
    if scaled && name.ends_with("_F16") {
        return Kind::Half;
    }
    if scaled && name.ends_with("_BF16") || i < 2 && name.ends_with("F32_BF16") {
        return Kind::Bfloat;
    }
    let wide_addend =
        matches!(op, V_MAD_U32_U16 | V_MAD_I32_I16 | V_DOT2_F32_F16 | V_DOT2_I32_I16 | V_DOT2_U32_U16);
    let words = matches!(op, V_SAD_U16 | V_DOT2C_I32_I16);
    if words || i == 2 && wide_addend { Kind::Word } else { kind(op) }
}

/// The result's type decides how CLAMP and OMOD work: 16, 32 or 64 bits of float, or 0 for an integer.
fn result_bits(op: Op) -> u8 {
    let name = op.info().name;
    let ty = |t: &str| match t {
        "F16" => 16,
        "F32" => 32,
        "F64" => 64,
        _ => 0,
    };
    // The result of a conversion or a dot product is named first.
    for prefix in ["V_CVT_", "V_DOT2_", "V_DOT2C_"] {
        if let Some(rest) = name.strip_prefix(prefix) {
            return rest.split('_').find(|t| !matches!(*t, "PK" | "SR" | "PKRTZ" | "OFF")).map_or(0, ty);
        }
    }
    name.rsplit('_').next().map_or(0, ty)
}

/// 16-bit instructions that can select halves and that keep the other half of the destination.
fn selects_halves(op: Op) -> bool {
    use Op::*;
    matches!(
        op,
        V_MAD_F16
            | V_MAD_U16
            | V_MAD_I16
            | V_FMA_F16
            | V_DIV_FIXUP_F16
            | V_MIN3_F16
            | V_MIN3_I16
            | V_MIN3_U16
            | V_MAX3_F16
            | V_MAX3_I16
            | V_MAX3_U16
            | V_MED3_F16
            | V_MED3_I16
            | V_MED3_U16
            | V_ADD_I16
            | V_SUB_I16
            | V_BITOP3_B16
    )
}

/// Instructions whose sources may have halves selected, the destination being whole.
fn selects_source_halves(op: Op) -> bool {
    use Op::*;
    matches!(op, V_PACK_B32_F16 | V_MAD_U32_U16 | V_MAD_I32_I16 | V_CVT_PKNORM_I16_F16 | V_CVT_PKNORM_U16_F16)
}

struct Lowering {
    program: Program,
    level: Level,
    numerics: MatrixNumerics,
    registers: Registers,
    scalar_index: HashMap<[u32; 2], u16>,
    vector_index: HashMap<[u32; 2], u16>,
}

/// The value of an inline constant as a 32-bit operand.
fn inline32(code: u8) -> u32 {
    match code {
        128 => 0,
        129..=192 => u32::from(code) - 128,
        193..=208 => 192u32.wrapping_sub(code.into()),
        240 => 0.5f32.to_bits(),
        241 => (-0.5f32).to_bits(),
        242 => 1f32.to_bits(),
        243 => (-1f32).to_bits(),
        244 => 2f32.to_bits(),
        245 => (-2f32).to_bits(),
        246 => 4f32.to_bits(),
        247 => (-4f32).to_bits(),
        _ => 0x3E22_F983,
    }
}

fn inline64(code: u8) -> u64 {
    match code {
        0..=192 => inline32(code).into(),
        193..=208 => i64::from(inline32(code) as i32) as u64,
        248.. => 0x3FC4_5F30_6DC9_C882,
        _ => f64::from(f32::from_bits(inline32(code))).to_bits(),
    }
}

fn inline16(code: u8) -> u32 {
    match code {
        0..=208 => inline32(code) & 0xFFFF,
        248.. => 0x3118,
        _ => {
            let x = f32::from_bits(inline32(code));
            crate::exec::float::f32_to_f16(x)
        }
    }
}

impl Lowering {
    /// The operand code of a scalar constant; 64-bit constants take two.
    fn scalar_constant(&mut self, value: [u32; 2]) -> Result<u16, Problem> {
        if let Some(code) = self.scalar_index.get(&value) {
            return Ok(*code);
        }
        let code = u16::try_from(128 + self.program.scalars.len())
            .ok()
            .filter(|code| *code < SPECIAL - 1)
            .ok_or(Problem::Unsupported { what: "more than 32000 different scalar constants" })?;
        self.program.scalars.extend(value);
        self.scalar_index.insert(value, code);
        Ok(code)
    }

    /// The slots of a vector constant, if there is room.
    fn vector_constant(&mut self, value: [u32; 2]) -> Option<u16> {
        if let Some(slot) = self.vector_index.get(&value) {
            return Some(*slot);
        }
        let slot = usize::from(CONSTANTS) + self.program.vectors.len();
        if slot + 2 > SLOTS {
            return None;
        }
        self.program.vectors.extend(value);
        self.vector_index.insert(value, slot as u16);
        Some(slot as u16)
    }

    /// A scalar operand as a code for `Env::s32` and `Env::s64`.
    fn scalar(&mut self, operand: Operand, wide: bool, op: Op) -> Result<u16, Problem> {
        match operand {
            Operand::None => Ok(0),
            Operand::Sgpr(code) => Ok(code.into()),
            Operand::Inline(code) => {
                let value = if wide { inline64(code) } else { inline32(code).into() };
                self.scalar_constant([value as u32, (value >> 32) as u32])
            }
            Operand::Literal(value) => {
                let signed = matches!(op, Op::S_ASHR_I64 | Op::S_BFE_I64) || op.info().name.ends_with("_I64");
                let high = if wide && signed && value >> 31 != 0 { !0 } else { 0 };
                self.scalar_constant([value, high])
            }
            Operand::Special(code @ 235..=238) => {
                let value = match code {
                    235 => u64::from(flat::SHARED_APERTURE) << 32,
                    236 => u64::from(flat::SHARED_APERTURE) << 32 | 0xFFFF_FFFF,
                    237 => u64::from(flat::PRIVATE_APERTURE) << 32,
                    _ => u64::from(flat::PRIVATE_APERTURE) << 32 | 0xFFFF_FFFF,
                };
                // As a 32-bit operand an aperture reads its high half.
                let value = if wide { value } else { value >> 32 };
                self.scalar_constant([value as u32, (value >> 32) as u32])
            }
            Operand::Special(code @ 251..=253) => Ok(SPECIAL + 2 * u16::from(code - 251)),
            Operand::Special(_) => Err(Problem::NoSemantics {
                name: op.mnemonic(),
                why: "a source that the target does not have",
            }),
            Operand::Imm(value) => self.scalar_constant([value as u32, (value >> 31) as u32]),
            Operand::Vgpr(_) | Operand::Agpr(_) => Err(Problem::NoSemantics {
                name: op.mnemonic(),
                why: "a vector register as a scalar operand",
            }),
        }
    }

    /// A vector register operand of `width` registers as a slot; checked against what the kernel has.
    fn register(&self, operand: Operand, width: u32) -> Result<u16, Problem> {
        let (letter, first, limit, base) = match operand {
            Operand::Vgpr(n) => ('v', u32::from(n), self.registers.vgprs, 0),
            Operand::Agpr(n) => ('a', u32::from(n), self.registers.agprs, self.registers.first_agpr),
            _ => return Ok(0),
        };
        let last = first + width.max(1);
        if last > limit {
            let register = if width > 1 {
                format!("{letter}[{first}:{}]", last - 1)
            } else {
                format!("{letter}{first}")
            };
            return Err(Problem::Register { register, limit });
        }
        Ok((base + first) as u16)
    }

    /// Lowers one instruction, or says what to report when it is reached.
    fn instruction(&mut self, inst: &Inst, at: u64, index: u32) -> Result<Uop, Problem> {
        if let Some(why) = inst.op.refusal() {
            return Err(Problem::NoSemantics { name: inst.op.mnemonic(), why });
        }
        let mut u = Uop { index, ..blank() };
        let none = |inst: &Inst| Problem::NoSemantics { name: inst.op.mnemonic(), why: "not implemented" };
        match inst.encoding {
            Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopk | Encoding::Sopc | Encoding::Sopp => {
                self.salu(inst, at, &mut u)?;
            }
            Encoding::Smem => {
                let returns = inst.dst != Operand::None;
                u.run =
                    smem::handler(inst.op, matches!(inst.src[1], Operand::Sgpr(_)), returns, &mut u.extra)
                        .ok_or_else(|| none(inst))?;
                u.a = self.scalar(inst.src[0], true, inst.op)?;
                u.imm = match inst.src[1] {
                    Operand::Imm(value) => value,
                    Operand::Sgpr(code) => {
                        u.b = code.into();
                        if inst.flags.soffset { inst.imm } else { 0 }
                    }
                    _ => 0,
                };
                u.d = self.scalar(inst.dst, false, inst.op)?;
                u.c = self.scalar(inst.src[2], false, inst.op)?;
            }
            Encoding::Ds => {
                if inst.flags.gds {
                    return Err(Problem::NoSemantics { name: inst.op.mnemonic(), why: "global data share" });
                }
                u.imm = inst.imm;
                u.run =
                    ds::handler(inst.op, self.level, &mut u.imm, &mut u.extra).ok_or_else(|| none(inst))?;
                let info = inst.op.info();
                u.d = self.register(inst.dst, info.dst.into())?;
                u.a = self.register(inst.src[0], info.src[0].into())?;
                u.b = self.register(inst.src[1], info.src[1].into())?;
                u.c = self.register(inst.src[2], info.src[2].into())?;
            }
            Encoding::Flat | Encoding::Global | Encoding::Scratch => {
                let info = inst.op.info();
                let returns = inst.dst != Operand::None;
                u.run = flat::handler(inst.op, inst.encoding, returns, self.level, &mut u.extra)
                    .ok_or_else(|| none(inst))?;
                u.imm = inst.imm;
                let has_saddr = inst.src[1] != Operand::None;
                let scratch = inst.encoding == Encoding::Scratch;
                let width = if has_saddr || scratch { 1 } else { 2 };
                u.a = if inst.src[0] == Operand::None {
                    flat::NO_VADDR
                } else {
                    self.register(inst.src[0], width)?
                };
                u.b = if has_saddr { self.scalar(inst.src[1], !scratch, inst.op)? } else { flat::NO_SADDR };
                u.c = self.register(inst.src[2], info.src[1].into())?;
                let width = if info.dst != 0 { info.dst.into() } else { self.returned(inst, info.src[1]) };
                u.d = self.register(inst.dst, width)?;
            }
            Encoding::Mubuf | Encoding::Mtbuf => {
                let info = inst.op.info();
                if inst.flags.lds && info.name.contains("_FORMAT_") && inst.op != Op::BUFFER_LOAD_FORMAT_X {
                    let why = "a formatted load of several components to LDS";
                    return Err(Problem::NoSemantics { name: inst.op.mnemonic(), why });
                }
                let returns = info.name.contains("ATOMIC") && inst.dst != Operand::None;
                u.run = mubuf::handler(inst.op, inst.flags, returns, self.level, &mut u.extra)
                    .ok_or_else(|| none(inst))?;
                u.imm = inst.imm;
                u.mask_in = mubuf::operand_bits(inst.flags.offen, inst.flags.idxen);
                let width = u32::from(inst.flags.offen) + u32::from(inst.flags.idxen);
                u.a = self.register(inst.src[0], width)?;
                u.b = self.scalar(inst.src[1], false, inst.op)?;
                u.hi[0] = self.scalar(inst.src[2], false, inst.op)?;
                u.c = self.register(inst.src[3], info.dst.into())?;
                let width = if returns { self.returned(inst, info.dst) } else { info.dst.into() };
                u.d = self.register(inst.dst, width)?;
            }
            Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc | Encoding::Vop3 | Encoding::Vop3p => {
                self.valu(inst, &mut u)?;
            }
        }
        self.note_sharing(inst, &mut u);
        Ok(u)
    }

    /// Registers of the value that an atomic returns: half the data of a compare-and-swap.
    fn returned(&self, inst: &Inst, data: u8) -> u32 {
        let swap = inst.op.info().name.contains("CMPSWAP");
        if swap { u32::from(data) / 2 } else { data.into() }
    }

    /// Takes note of an access that other waves or workgroups may see, or that may see theirs.
    fn note_sharing(&mut self, inst: &Inst, u: &mut Uop) {
        let name = inst.op.info().name;
        let dma = inst.flags.lds || name.contains("_LOAD_LDS_");
        if dma || matches!(inst.encoding, Encoding::Ds | Encoding::Flat) {
            u.visible = TO_WAVES;
        }
        if let Some(atomic) = flat::atomic_of(inst.op, inst.dst != Operand::None) {
            u.visible = TO_WAVES | TO_GROUPS;
            self.program.communicates |= !atomic.commutes();
            return;
        }
        let cache = matches!(inst.op, Op::BUFFER_WBL2 | Op::BUFFER_INV);
        let vector =
            matches!(inst.encoding, Encoding::Flat | Encoding::Global | Encoding::Mubuf | Encoding::Mtbuf);
        // sc1 is agent or system scope.
        if vector && inst.flags.sc1 && !cache {
            u.visible = TO_WAVES | TO_GROUPS;
            self.program.communicates |= name.contains("_LOAD_");
        }
    }

    fn salu(&mut self, inst: &Inst, at: u64, u: &mut Uop) -> Result<(), Problem> {
        let op = inst.op;
        let info = op.info();
        u.run = salu::handler(op, &mut u.extra)
            .ok_or_else(|| Problem::NoSemantics { name: op.mnemonic(), why: "not implemented" })?;
        u.imm = inst.imm;
        if let Some(target) = branch_target(inst, at) {
            u.imm = self.program.index.get(&target).map_or(-1, |i| *i as i32);
        }
        u.d = self.scalar(inst.dst, false, op)?;
        if u.d >= 128 {
            return Err(Problem::NoSemantics {
                name: op.mnemonic(),
                why: "a destination that is no register",
            });
        }
        if inst.encoding == Encoding::Sopk {
            // The immediate is the second source of compares, the first of the others.
            let unsigned = info.name.ends_with("_U32");
            let value =
                if unsigned { u32::from(inst.imm as u16) } else { i32::from(inst.imm as u16 as i16) as u32 };
            if info.name.starts_with("S_CMPK") {
                u.a = self.scalar(inst.src[0], false, op)?;
                u.b = self.scalar_constant([value, 0])?;
            } else if matches!(op, Op::S_SETREG_B32 | Op::S_SETREG_IMM32_B32) {
                u.a = self.scalar(inst.src[0], false, op)?;
            } else if op == Op::S_CBRANCH_I_FORK {
                u.a = self.scalar(inst.src[0], true, op)?;
            } else {
                u.a = self.scalar_constant([value, 0])?;
            }
            return Ok(());
        }
        u.a = self.scalar(inst.src[0], info.src[0] == 2, op)?;
        u.b = self.scalar(inst.src[1], info.src[1] == 2, op)?;
        Ok(())
    }

    fn valu(&mut self, inst: &Inst, u: &mut Uop) -> Result<(), Problem> {
        let op = inst.op;
        let info = op.info();
        let none = |why| Problem::NoSemantics { name: op.mnemonic(), why };
        if op.is_mfma() {
            return self.mfma(inst, u);
        }
        if let Some(conversion) = crate::tables::Scaled::of(inst) {
            return self.scaled(inst, u, conversion);
        }
        let mut fix = Fixup::default();
        let bits = result_bits(op);
        let packed = inst.encoding == Encoding::Vop3p
            && !matches!(op, Op::V_ACCVGPR_READ_B32 | Op::V_ACCVGPR_WRITE_B32);
        let packed32 =
            matches!(op, Op::V_PK_FMA_F32 | Op::V_PK_MUL_F32 | Op::V_PK_ADD_F32 | Op::V_PK_MOV_B32);
        // The handler.
        let saturating = inst.clamp && bits == 0 && !op.is_cmp();
        let handler = if let Some(handler) = vop3p::handler(inst, &mut u.extra) {
            handler
        } else if saturating && !matches!(op, Op::V_CVT_PK_FP8_F32 | Op::V_CVT_PK_BF8_F32) {
            valu::saturating(op, self.level, &mut u.extra).ok_or_else(|| none("CLAMP"))?
        } else {
            valu::handler(op, self.level, &mut u.extra)
                .or_else(|| vfloat::handler(op, self.level))
                .or_else(|| convert::handler(op, inst.op_sel, &mut u.extra))
                .ok_or_else(|| none("not implemented"))?
        };
        if matches!(op, Op::V_BITOP3_B32 | Op::V_BITOP3_B16) {
            u.extra = u32::from(bitop3_table(inst));
        }
        if packed32 {
            return self.packed32(inst, u, handler, fix);
        }
        // Lane moves take scalar operands as they are.
        match op {
            Op::V_READLANE_B32 if !matches!(inst.src[0], Operand::Vgpr(_) | Operand::Agpr(_)) => {
                return Err(none("a source that is no vector register"));
            }
            Op::V_READLANE_B32 => {
                u.a = self.register(inst.src[0], 1)?;
                u.b = self.scalar(inst.src[1], false, op)?;
                u.d = self.scalar(inst.dst, false, op)?;
                u.run = handler;
                return Ok(());
            }
            Op::V_WRITELANE_B32 => {
                u.a = self.scalar(inst.src[0], false, op)?;
                u.b = self.scalar(inst.src[1], false, op)?;
                u.d = self.register(inst.dst, 1)?;
                u.run = handler;
                return Ok(());
            }
            Op::V_SWAP_B32 | Op::V_PERMLANE16_SWAP_B32 | Op::V_PERMLANE32_SWAP_B32
                if inst.sdwa.is_some() || inst.dpp.is_some() =>
            {
                return Err(none("a modifier"));
            }
            _ => {}
        }
        if inst.sdwa.is_some() && info.name.contains("F64") {
            return Err(none("SDWA of 64 bits"));
        }
        // Sources.
        if let Some(dpp) = &inst.dpp {
            fix.dpp = Some(DppTable::new(dpp));
        }
        // These read their modifier fields themselves.
        let mix = is_mixed(op) || matches!(op, Op::V_BITOP3_B32 | Op::V_BITOP3_B16);
        let mut slots = [0u16; 3];
        for (i, slot) in slots.iter_mut().enumerate() {
            let mask = i == 2 && op.reads_mask();
            if mask {
                u.mask_in = self.scalar(inst.src[2], true, op)?;
                continue;
            }
            if inst.src[i] == Operand::None {
                continue;
            }
            *slot = self.source(inst, i, &mut fix, packed && !mix, mix)?;
        }
        [u.a, u.b, u.c] = slots;
        // Destinations.
        if op.is_cmp() {
            u.d = self.scalar(inst.dst, true, op)?;
            return self.finish(u, handler, fix);
        }
        if let Operand::Sgpr(code) = inst.dst {
            u.d = code.into();
            return self.finish(u, handler, fix);
        }
        if let Operand::Sgpr(code) = inst.sdst {
            u.mask_out = code.into();
        }
        let d = self.register(inst.dst, info.dst.into())?;
        if op.accumulates() {
            u.c = d;
        }
        u.d = d;
        let float_post = (inst.clamp && bits != 0 || inst.omod != 0) && !mix;
        // Conversions to two registers ignore the destination's selector.
        let sdwa = inst.sdwa.filter(|s| s.dst_sel != DWORD && info.dst == 1);
        let keeps_half = selects_halves(op) || matches!(op, Op::V_ASHR_PK_I8_I32 | Op::V_ASHR_PK_U8_I32);
        let half = (keeps_half && inst.encoding == Encoding::Vop3).then_some(inst.op_sel & 8 != 0);
        if float_post || sdwa.is_some() || half.is_some() {
            u.d = TEMP_DST;
            if float_post {
                let registers = if bits == 64 { 1 } else { u16::from(info.dst) };
                for temp in (0..registers).map(|i| TEMP_DST + i) {
                    let (omod, clamp) = (inst.omod, inst.clamp);
                    fix.posts.push(Post::Float { temp, bits, packed, omod, clamp });
                }
            }
            match (sdwa, half) {
                (Some(s), _) => {
                    fix.posts.push(Post::Sdwa { temp: TEMP_DST, to: d, sel: s.dst_sel, unused: s.dst_unused })
                }
                (None, Some(high)) => fix.posts.push(Post::Half { temp: TEMP_DST, to: d, high }),
                (None, None) => {
                    for i in 0..u16::from(info.dst) {
                        fix.posts.push(Post::Move { temp: TEMP_DST + i, to: d + i });
                    }
                }
            }
        }
        self.finish(u, handler, fix)
    }

    fn finish(&mut self, u: &mut Uop, handler: Handler, fix: Fixup) -> Result<(), Problem> {
        if fix.preps.is_empty() && fix.posts.is_empty() && fix.dpp.is_none() {
            u.run = handler;
        } else {
            u.run = match fix.splats() {
                Some((splats, 1)) => {
                    u.splats = splats;
                    splat::<1>(self.level)
                }
                Some((splats, _)) => {
                    u.splats = splats;
                    splat::<2>(self.level)
                }
                None => fixed(self.level),
            };
            u.inner = handler;
            u.fixup = self.program.fixups.len() as u32;
            self.program.fixups.push(fix);
        }
        Ok(())
    }

    /// The slot of a vector source, with the steps that make it what the handler wants.
    fn source(
        &mut self,
        inst: &Inst,
        i: usize,
        fix: &mut Fixup,
        packed: bool,
        plain: bool,
    ) -> Result<u16, Problem> {
        let op = inst.op;
        let info = op.info();
        // The third operand of fmamk and fmaak forms is not in the table.
        let width = u32::from(info.src[i]).max(1);
        let kind = kind(op);
        let bit = 1u8 << i;
        let mut temp = TEMP + 8 * i as u16;
        let mut slot = match inst.src[i] {
            Operand::Vgpr(_) | Operand::Agpr(_) => self.register(inst.src[i], width)?,
            operand => self.constant_or_splat(inst, (operand, i), width, temp, fix, packed)?,
        };
        let next = |temp: &mut u16| {
            let t = *temp + 2;
            *temp = t;
            t
        };
        if inst.dpp.is_some() && i == 0 {
            let to = next(&mut temp);
            for n in 0..width as u16 {
                fix.preps.push(Prep::Dpp { from: slot + n, to: to + n });
            }
            slot = to;
        }
        if let Some(sdwa) = &inst.sdwa
            && selects(sdwa, i)
        {
            let to = next(&mut temp);
            fix.preps.push(Prep::Sub { from: slot, to, sel: sdwa.src_sel[i], sext: sdwa.sext[i] });
            slot = to;
        }
        if plain && op != Op::V_BITOP3_B16 {
            return Ok(slot);
        }
        if packed {
            let (low, high) = (inst.op_sel & bit != 0, inst.op_sel_hi & bit != 0);
            let xor = (if inst.neg & bit != 0 { 0x8000 } else { 0 })
                | (if inst.abs & bit != 0 { 0x8000_0000 } else { 0 });
            // Dot products and integers have no halves to negate; constants were made for the defaults.
            if low || !high || xor != 0 {
                let to = next(&mut temp);
                fix.preps.push(Prep::Halves { from: slot, to, low_is_high: low, high_is_high: high, xor });
                slot = to;
            }
            return Ok(slot);
        }
        let halves = (selects_halves(op) || selects_source_halves(op)) && inst.encoding == Encoding::Vop3;
        if halves && inst.op_sel & bit != 0 {
            let to = next(&mut temp);
            fix.preps.push(Prep::High { from: slot, to });
            slot = to;
        }
        let (neg, abs) = (inst.neg & bit != 0, inst.abs & bit != 0);
        if !plain && (neg || abs) {
            let to = next(&mut temp);
            let half = kind == Kind::Half || op == Op::V_CVT_F32_BF16;
            let sign = if half { 0x8000 } else { 0x8000_0000 };
            let (and, xor) = (if abs { !sign } else { !0 }, if neg { sign } else { 0 });
            if width == 2 {
                fix.preps.push(Prep::Bits { from: slot, to, and: !0, xor: 0 });
                fix.preps.push(Prep::Bits { from: slot + 1, to: to + 1, and, xor });
            } else {
                fix.preps.push(Prep::Bits { from: slot, to, and, xor });
            }
            slot = to;
        }
        Ok(slot)
    }

    /// A scalar source of a vector instruction: a constant slot, or a splat into `temp`.
    fn constant_or_splat(
        &mut self,
        inst: &Inst,
        (operand, i): (Operand, usize),
        width: u32,
        temp: u16,
        fix: &mut Fixup,
        packed: bool,
    ) -> Result<u16, Problem> {
        let op = inst.op;
        if width > 2 {
            return Err(Problem::NoSemantics { name: op.mnemonic(), why: "a constant of 128 bits" });
        }
        let wide = width >= 2;
        let kind = source_kind(inst, i);
        let float64 = kind == Kind::Double || op.info().name.contains("F64");
        let value = match operand {
            // A bf16 is the high half of the f32.
            Operand::Inline(code @ 240..) if kind == Kind::Bfloat => Some(u64::from(inline32(code) >> 16)),
            Operand::Inline(code) if wide => Some(inline64(code)),
            Operand::Inline(code) if packed => {
                // A float constant is an f16 in the low half for floats, an f32 for integers; an integer is the whole
                // word.
                let float = op.info().name.contains("F16");
                Some(u64::from(if kind == Kind::Half && code >= 240 && float {
                    inline16(code)
                } else {
                    inline32(code)
                }))
            }
            Operand::Inline(code) if kind == Kind::Half && code >= 240 => Some(inline16(code).into()),
            Operand::Inline(code) => Some(inline32(code).into()),
            Operand::Literal(value) if wide && float64 => Some(u64::from(value) << 32),
            Operand::Literal(value) => Some(value.into()),
            _ => None,
        };
        if let Some(value) = value {
            let words = [value as u32, (value >> 32) as u32];
            if let Some(slot) = self.vector_constant(words) {
                return Ok(slot);
            }
            for (n, word) in words.iter().enumerate().take(width as usize) {
                let code = self.scalar_constant([*word, 0])?;
                fix.preps.push(Prep::Splat { code, to: temp + n as u16 });
            }
            return Ok(temp);
        }
        match operand {
            Operand::Sgpr(code) => {
                for n in 0..width as u16 {
                    fix.preps.push(Prep::Splat { code: u16::from(code) + n, to: temp + n });
                }
                Ok(temp)
            }
            _ => {
                let code = self.scalar(operand, wide, op)?;
                for n in 0..width as u16 {
                    fix.preps.push(Prep::Splat { code: code + n, to: temp + n });
                }
                Ok(temp)
            }
        }
    }

    /// Packed f32: each result takes either register of each source.
    fn packed32(
        &mut self,
        inst: &Inst,
        u: &mut Uop,
        handler: Handler,
        mut fix: Fixup,
    ) -> Result<(), Problem> {
        let op = inst.op;
        let (mut low, mut high) = ([0u16; 3], [0u16; 3]);
        for i in 0..3 {
            if inst.src[i] == Operand::None {
                continue;
            }
            let temp = TEMP + 8 * i as u16;
            let base = match inst.src[i] {
                Operand::Vgpr(_) | Operand::Agpr(_) => self.register(inst.src[i], 2)?,
                Operand::Inline(code) => {
                    let word = inline32(code);
                    match self.vector_constant([word, word]) {
                        Some(slot) => slot,
                        None => {
                            let code = self.scalar_constant([word, word])?;
                            fix.preps.push(Prep::Splat { code, to: temp });
                            fix.preps.push(Prep::Splat { code, to: temp + 1 });
                            temp
                        }
                    }
                }
                operand => self.constant_or_splat(inst, (operand, i), 2, temp, &mut fix, false)?,
            };
            let bit = 1u8 << i;
            let pick = |sel: u8| base + u16::from(sel & bit != 0);
            (low[i], high[i]) = (pick(inst.op_sel), pick(inst.op_sel_hi));
            if inst.neg & bit != 0 {
                fix.preps.push(Prep::Bits { from: low[i], to: temp + 2, and: !0, xor: 0x8000_0000 });
                low[i] = temp + 2;
            }
            if inst.abs & bit != 0 {
                fix.preps.push(Prep::Bits { from: high[i], to: temp + 3, and: !0, xor: 0x8000_0000 });
                high[i] = temp + 3;
            }
        }
        [u.a, u.b, u.c] = low;
        u.hi = high;
        if op == Op::V_PK_MOV_B32 {
            // The low result is of source 0, the high one of source 1, both chosen by op_sel.
            u.hi[0] = low[1];
        }
        let d = self.register(inst.dst, 2)?;
        u.d = d;
        if inst.clamp {
            u.d = TEMP_DST;
            for n in 0..2 {
                let temp = TEMP_DST + n;
                fix.posts.push(Post::Float { temp, bits: 32, packed: false, omod: 0, clamp: true });
                fix.posts.push(Post::Move { temp, to: d + n });
            }
        }
        self.finish(u, handler, fix)
    }

    fn scaled(&mut self, inst: &Inst, u: &mut Uop, conversion: crate::tables::Scaled) -> Result<(), Problem> {
        if inst.clamp || inst.omod != 0 {
            return Err(Problem::NoSemantics { name: inst.op.mnemonic(), why: "CLAMP or OMOD" });
        }
        let mut fix = Fixup::default();
        let mut slots = [0u16; 3];
        for (i, slot) in slots.iter_mut().enumerate() {
            if inst.src[i] != Operand::None {
                // The handler knows what signs belong to.
                *slot = self.source(inst, i, &mut fix, false, true)?;
            }
        }
        [u.a, u.b, u.c] = slots;
        u.d = self.register(inst.dst, inst.op.info().dst.into())?;
        u.imm = self.program.conversions.len() as i32;
        self.program.conversions.push(conversion);
        self.finish(u, convert::scaled, fix)
    }

    fn mfma(&mut self, inst: &Inst, u: &mut Uop) -> Result<(), Problem> {
        let op = inst.op;
        let info = op.info();
        let illegal = |why| Problem::Illegal { name: op.mnemonic(), why };
        let mut matrix =
            crate::tables::Matrix::of(inst, self.program.fnuz, self.numerics).map_err(illegal)?;
        let [a, b] = matrix.operand_registers();
        u.a = self.register(inst.src[0], a)?;
        u.b = self.register(inst.src[1], b)?;
        let result = u32::from(info.dst);
        let mut fix = Fixup::default();
        u.c = match inst.src[2] {
            Operand::Inline(code) => {
                let value = if info.name.contains("F64") { inline64(code) } else { inline32(code).into() };
                let words = [value as u32, (value >> 32) as u32];
                match self.vector_constant(words) {
                    Some(slot) => slot,
                    None => {
                        for (n, word) in words.iter().enumerate() {
                            let code = self.scalar_constant([*word, 0])?;
                            fix.preps.push(Prep::Splat { code, to: TEMP + n as u16 });
                        }
                        TEMP
                    }
                }
            }
            operand => self.register(operand, if matrix.sparse() { 1 } else { result })?,
        };
        u.d = self.register(inst.dst, result)?;
        // More than four registers are written while C and the index are still read: C may be the destination, and neither may
        // lie partly in it. A and B may: LLVM gives kernels without C a destination that overlaps them.
        let meets = |slot: u16, n: u32| {
            let (slot, d) = (u32::from(slot), u32::from(u.d));
            result > 4 && slot < d + result && d < slot + n
        };
        if matrix.sparse() && meets(u.c, 1) {
            return Err(illegal("the destination overlaps the index"));
        }
        if !matrix.sparse() && u.c != u.d && meets(u.c, result) && !matches!(inst.src[2], Operand::Inline(_))
        {
            return Err(illegal("the destination overlaps a part of C"));
        }
        if let Some(scale) = &inst.scale {
            for (i, operand) in scale.src.into_iter().enumerate() {
                let to = TEMP + 2 + i as u16;
                let slot = match operand {
                    Operand::Vgpr(_) | Operand::Agpr(_) => self.register(operand, 1)?,
                    Operand::Inline(code) => {
                        let value = mfma::scale_constant(inline32(code), code >= 240);
                        let code = self.scalar_constant([value, 0])?;
                        fix.preps.push(Prep::Splat { code, to });
                        to
                    }
                    operand => {
                        let code = self.scalar(operand, false, op)?;
                        fix.preps.push(Prep::Splat { code, to });
                        to
                    }
                };
                matrix.set_scale(i, slot);
            }
        }
        u.imm = self.program.matrices.len() as i32;
        let handler = matrix.handler(self.level);
        self.program.matrices.push(matrix);
        self.finish(u, handler, fix)
    }
}

/// The truth table of `v_bitop3`, spread over the modifier fields.
fn bitop3_table(inst: &Inst) -> u8 {
    inst.neg | inst.abs << 3 | inst.omod << 6
}
