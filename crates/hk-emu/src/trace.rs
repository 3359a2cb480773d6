//! Traces: what the waves of chosen workgroups execute, in order, for models of time.
//!
//! A trace holds the path and the addresses of each wave, and no time. Nothing in it is inferred from source: branches
//! are those that the instructions took, lines those that the lanes accessed.

use std::ops::Range;
use std::sync::Arc;

use crate::counters::{Counters, Resources};
use crate::effects::Kind;
use crate::fault::{Access, Finding, Space};
use crate::isa::{Encoding, Inst, Op};
use crate::memory::View;
use crate::observe::access::{Accesses, Nature, Part};
use crate::observe::counts::{distinct_lines, lds_clocks};
use crate::observe::step::Watch;
use crate::observe::waits;
use crate::program::{Ctl, Env, Program, Uop};
use crate::registers::RegSet;
use crate::wave::Wave;

/// What an instruction runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Vector ALU.
    Vector,
    /// The slower part of the vector ALU: exponentials, logarithms, reciprocals, roots, sine and cosine.
    Transcendental,
    /// Matrix unit.
    Matrix,
    /// Scalar ALU.
    Scalar,
    /// Scalar memory.
    ScalarMemory,
    /// Vector memory: buffer, global, flat, scratch.
    VectorMemory,
    /// LDS.
    Lds,
    /// A branch, taken or not.
    Branch,
    /// `s_waitcnt`.
    Wait,
    /// `s_barrier`.
    Barrier,
    /// `s_sleep`.
    Sleep,
    /// `s_nop`.
    Nop,
    /// `s_setprio`.
    Priority,
    /// `s_endpgm`.
    End,
    /// `buffer_wbl2`: L2 writes back what memory does not have yet.
    WriteBack,
    /// `buffer_inv`: caches forget what others may have written since.
    Invalidate,
    /// Anything else that only the instruction fetch sees.
    Internal,
}

/// What a memory instruction does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Reads.
    Load,
    /// Writes.
    Store,
    /// Reads and writes.
    Atomic,
}

/// The facts of one instruction of a program, whatever its operands hold.
#[derive(Debug, Clone)]
pub struct Instruction {
    /// What it runs on.
    pub unit: Unit,
    /// Its virtual address in the code object.
    pub address: u64,
    /// Clocks from it to the wave's next instruction where nothing else is in the way: those of the matrix unit for its
    /// passes, of the vector ALU for its lanes, of `s_nop` and `s_sleep` for what they ask.
    pub clocks: u32,
    /// A matrix instruction of f32 or f64, beside which no vector instruction runs; or a transcendental or packed f32
    /// instruction, beside which no matrix instruction does.
    pub alone: bool,
    /// Registers that it reads: VGPRs from 0, AGPRs from 256, scalar registers by code from 512, then SCC.
    pub reads: Box<[Range<u16>]>,
    /// Registers that it writes.
    pub writes: Box<[Range<u16>]>,
    /// Of memory instructions.
    pub operation: Option<Operation>,
    /// Bytes of a lane, of memory instructions.
    pub lane_bytes: u32,
    /// Whether vmcnt and lgkmcnt count it.
    pub counted: [bool; 2],
    /// Whether it completes in the order of issue among its kind.
    pub ordered: bool,
    /// What `s_waitcnt` lets be outstanding: vmcnt, lgkmcnt. The priority of `s_setprio` is the first.
    pub wait: [u32; 2],
}

/// What one execution of a memory instruction touches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Active lanes.
    pub lanes: u32,
    /// Clocks of LDS: of each phase, the most different dwords on one bank.
    pub lds_clocks: u32,
    /// Of these, those of bank conflicts.
    pub lds_conflicts: u32,
    /// Bytes of LDS that the lanes access.
    pub lds_bytes: u32,
    /// Bytes of global memory that the lanes access, each lane's by itself.
    pub bytes: u32,
    /// The different 128-byte lines of global memory, in ascending order, in [`WaveTrace::lines`].
    pub lines: Range<u32>,
}

/// What a wave executed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WaveTrace {
    /// Indices of instructions, in [`Trace::instructions`], in order.
    pub steps: Vec<u32>,
    /// Of each memory instruction among them, in order.
    pub traffic: Vec<Traffic>,
    /// Addresses over 128.
    pub lines: Vec<u64>,
    /// Atomics on global memory by one lane: how workgroups tell each other that they have arrived.
    pub atomics: Vec<LaneAtomic>,
}

/// An atomic by one lane, of up to 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneAtomic {
    /// Its place in [`WaveTrace::steps`].
    pub step: usize,
    /// Its address.
    pub address: u64,
    /// Its bytes.
    pub bytes: u32,
    /// What memory held before.
    pub old: u64,
    /// What it holds after.
    pub new: u64,
}

impl WaveTrace {
    /// The lines of an access of this wave.
    pub fn lines_of(&self, traffic: &Traffic) -> &[u64] {
        self.lines.get(traffic.lines.start as usize..traffic.lines.end as usize).unwrap_or(&[])
    }
}

/// What a workgroup executed.
#[derive(Debug, Clone)]
pub struct BlockTrace {
    /// Its place in the order of dispatch.
    pub linear: u64,
    /// Of each wave.
    pub waves: Vec<WaveTrace>,
}

/// What [`Machine::trace`](crate::Machine::trace) saw.
pub struct Trace {
    /// The program of the kernel.
    pub instructions: Vec<Instruction>,
    /// What the kernel has allocated.
    pub resources: Resources,
    /// The workgroups that were asked for, in that order.
    pub blocks: Vec<BlockTrace>,
    program: Arc<Program>,
}

impl Trace {
    pub(crate) fn new(program: Arc<Program>, resources: Resources, blocks: Vec<BlockTrace>) -> Trace {
        let facts = |i| Instruction::of(&program, i);
        let instructions = (0..program.uops.len() as u32).map(facts).collect();
        Trace { instructions, resources, blocks, program }
    }

    /// An instruction of the program as LLVM prints it.
    pub fn text(&self, index: u32) -> String {
        self.program.text(index)
    }
}

/// Which workgroups a trace is of, and how much of each.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// Their places in the order of dispatch. They run in this order; one that waits for another lets the next ones run.
    pub blocks: &'a [u64],
    /// Vector loads after which a wave is left; `None` runs all of it.
    pub loads: Option<usize>,
}

fn ranges(set: &RegSet) -> Box<[Range<u16>]> {
    let mut ranges: Vec<Range<u16>> = vec![];
    for register in set.iter() {
        match ranges.last_mut() {
            Some(last) if last.end == register => last.end += 1,
            _ => ranges.push(register..register + 1),
        }
    }
    ranges.into_boxed_slice()
}

impl Unit {
    fn of(inst: &Inst, c: &Counters) -> Unit {
        match inst.op {
            Op::S_WAITCNT => Unit::Wait,
            Op::S_BARRIER => Unit::Barrier,
            Op::S_SLEEP => Unit::Sleep,
            Op::S_NOP => Unit::Nop,
            Op::S_SETPRIO => Unit::Priority,
            Op::S_ENDPGM => Unit::End,
            Op::BUFFER_WBL2 => Unit::WriteBack,
            Op::BUFFER_INV => Unit::Invalidate,
            _ if c.branches != 0 => Unit::Branch,
            _ if c.mfma != 0 => Unit::Matrix,
            _ if c.transcendental != 0 => Unit::Transcendental,
            _ if c.valu != 0 => Unit::Vector,
            _ if c.smem != 0 => Unit::ScalarMemory,
            _ if c.lds != 0 => Unit::Lds,
            _ if c.vmem_loads + c.vmem_stores != 0 => Unit::VectorMemory,
            _ if c.salu != 0 => Unit::Scalar,
            _ => Unit::Internal,
        }
    }

    /// Whether executions of it have an entry in [`WaveTrace::traffic`].
    pub fn is_memory(self) -> bool {
        matches!(self, Unit::ScalarMemory | Unit::VectorMemory | Unit::Lds)
    }
}

impl Instruction {
    fn of(program: &Program, index: u32) -> Instruction {
        let address = program.address(index);
        let mut facts = Instruction {
            unit: Unit::Internal,
            address,
            clocks: 4,
            alone: false,
            reads: Box::default(),
            writes: Box::default(),
            operation: None,
            lane_bytes: 0,
            counted: [false; 2],
            ordered: true,
            wait: [0; 2],
        };
        let Some(inst) = program.inst(index) else { return facts };
        let c = program.unit(index);
        let effects = program.effects(index);
        let nature = Nature::of(inst.op);
        let name = inst.op.info().name;
        facts.unit = Unit::of(inst, c);
        facts.clocks = c.wave_clocks(inst, program.arch) as u32;
        let wide = name.ends_with("_F32") || name.ends_with("_F64") || name.contains("XF32");
        facts.alone = c.transcendental + c.packed_f32 != 0
            || c.mfma != 0 && wide && matches!(name.rsplit('_').next(), Some("F32" | "F64"));
        (facts.reads, facts.writes) = (ranges(&effects.reads), ranges(&effects.writes));
        facts.operation = nature.access.map(|access| match access {
            Access::Read => Operation::Load,
            Access::Write => Operation::Store,
            Access::Atomic => Operation::Atomic,
        });
        facts.lane_bytes = nature.bytes;
        let counters = effects.kind.counters();
        facts.counted = [counters & 1 != 0, counters & 2 != 0];
        facts.ordered = effects.kind.ordered();
        facts.wait = match (facts.unit, effects.kind) {
            (_, Kind::Wait) => waits::counts(inst.imm).map(|n| n as u32),
            (Unit::Priority, _) => [inst.imm as u32 & 3, 0],
            _ => [0; 2],
        };
        facts
    }
}

/// What traced workgroups wrote over, in order.
#[derive(Default)]
pub(crate) struct Undo(Vec<Replaced>);

/// Bytes of memory before a lane's store or atomic.
struct Replaced {
    address: u64,
    bytes: u8,
    value: [u8; 16],
}

impl Undo {
    /// Brings all of it back, last write first.
    pub fn restore(self, memory: &View<'_>) {
        let mut hint = 0;
        for old in self.0.into_iter().rev() {
            if let Some((allocation, offset)) = memory.find(old.address, old.bytes.into(), &mut hint) {
                allocation.write_bytes(offset, &old.value[..usize::from(old.bytes)]);
            }
        }
    }
}

/// Records the waves of one workgroup.
pub(crate) struct Tracer {
    pub waves: Vec<WaveTrace>,
    accesses: Accesses,
    lines: Vec<u64>,
    /// Vector loads that each wave may still issue.
    left: Vec<usize>,
    /// The wave that ran last has used up its loads.
    pub stopped: bool,
    /// What stores and atomics have replaced.
    pub undo: Undo,
    /// The wave whose last atomic has not run yet.
    atomic: Option<usize>,
}

impl Tracer {
    pub fn new(waves: usize, loads: Option<usize>) -> Tracer {
        Tracer {
            waves: vec![WaveTrace::default(); waves],
            accesses: Accesses::default(),
            lines: vec![],
            left: vec![loads.unwrap_or(usize::MAX); waves],
            stopped: false,
            undo: Undo::default(),
            atomic: None,
        }
    }

    fn memory(&mut self, inst: &Inst, w: &Wave, e: &Env<'_>, u: &Uop) {
        self.accesses.of(inst, u, w, e);
        let parts = self.accesses.parts();
        let wave = &mut self.waves[w.index as usize];
        let mut traffic = Traffic { lanes: w.exec().count_ones(), ..Traffic::default() };
        let global = |part: &&Part| part.space == Space::Global;
        let bytes = |part: &Part| part.bytes * part.mask.count_ones();
        for part in parts.iter().filter(|part| part.space == Space::Lds) {
            let (clocks, phases) = lds_clocks(e.program.arch, part);
            traffic.lds_clocks += clocks as u32;
            traffic.lds_conflicts += (clocks - phases) as u32;
            traffic.lds_bytes += bytes(part);
        }
        traffic.bytes = parts.iter().filter(global).map(bytes).sum();
        let start = wave.lines.len() as u32;
        distinct_lines(&mut self.lines, parts.iter().filter(global));
        wave.lines.extend_from_slice(&self.lines);
        traffic.lines = start..wave.lines.len() as u32;
        wave.traffic.push(traffic);
        if let [part] = parts
            && part.space == Space::Global
            && part.access == Access::Atomic
            && let Some((_, address)) = part.lanes().next().filter(|_| part.mask.count_ones() == 1)
            && let Some(old) = value(e.memory, address, part.bytes)
        {
            let step = wave.steps.len();
            wave.atomics.push(LaneAtomic { step, address, bytes: part.bytes, old, new: old });
            self.atomic = Some(w.index as usize);
        }
        for part in parts.iter().filter(global).filter(|part| part.access != Access::Read) {
            let mut hint = 0;
            for (_, address) in part.lanes() {
                let mut old = Replaced { address, bytes: part.bytes.min(16) as u8, value: [0; 16] };
                if let Some((allocation, offset)) = e.memory.find(address, old.bytes.into(), &mut hint)
                    && allocation.read_bytes(offset, &mut old.value[..usize::from(old.bytes)])
                {
                    self.undo.0.push(old);
                }
            }
        }
    }
}

impl Watch for Tracer {
    fn before(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>> {
        let index = w.index as usize;
        if let Some(inst) = e.program.inst(u.index)
            && matches!(
                inst.encoding,
                Encoding::Smem
                    | Encoding::Ds
                    | Encoding::Flat
                    | Encoding::Global
                    | Encoding::Scratch
                    | Encoding::Mubuf
                    | Encoding::Mtbuf
            )
        {
            let c = e.program.unit(u.index);
            if c.vmem_loads != 0 {
                if self.left[index] == 0 {
                    self.stopped = true;
                    return Err(Box::new(Finding::abandoned()));
                }
                self.left[index] -= 1;
            }
            if Unit::of(inst, c).is_memory() {
                self.memory(inst, w, e, u);
            }
        }
        self.waves[index].steps.push(u.index);
        Ok(())
    }

    fn after(&mut self, _: &Wave, e: &Env<'_>, _: &Uop, _: Ctl) -> Result<(), Box<Finding>> {
        if let Some(wave) = self.atomic.take()
            && let Some(atomic) = self.waves[wave].atomics.last_mut()
        {
            atomic.new = value(e.memory, atomic.address, atomic.bytes).unwrap_or(atomic.old);
        }
        Ok(())
    }
}

/// Up to 8 bytes of memory.
fn value(memory: &View<'_>, address: u64, bytes: u32) -> Option<u64> {
    let mut value = [0; 8];
    let out = value.get_mut(..bytes as usize)?;
    let (allocation, offset) = memory.find(address, bytes.into(), &mut 0)?;
    allocation.read_bytes(offset, out).then(|| u64::from_le_bytes(value))
}
