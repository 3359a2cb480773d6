//! Registers that a memory instruction may still write, because no `s_waitcnt` has proven it complete.
//!
//! | operations | counter | order |
//! |---|---|---|
//! | BUFFER, GLOBAL, SCRATCH, loads to LDS | vmcnt | as issued |
//! | LDS, lane exchanges of the LDS unit | lgkmcnt | as issued |
//! | SMEM, messages | lgkmcnt | any |
//! | FLAT | both | any |
//!
//! A counter that is at most `n` proves an ordered operation complete if at least `n` ordered ones of its kind were
//! issued after it: were it not complete, they and itself would be counted. Others are proven by 0 alone, FLAT by both
//! counters. A full counter (63, 15) stalls the next operation until one has left, which proves as much as a wait.
//!
//! Stored data is read when the store is issued, so its registers may be overwritten at once (the exception, wide
//! stores, is a hazard). Of two ordered loads of one kind into one register the later one wins, also where each
//! writes half of it. `buffer_inv` enters no counter. Sources: the CDNA3 ISA manual's chapter on dependencies, and
//! when LLVM inserts waits for these targets.

use super::step::Step;
use crate::checks::Check;
use crate::effects::Kind;
use crate::fault::{Finding, Place};
use crate::registers::{self, Reg, RegSet, destination_width, reg, source_width};

/// A counter: its bit, its name, its highest value.
const COUNTERS: [(u8, &str, usize); 2] = [(1, "vmcnt", 63), (2, "lgkmcnt", 15)];

/// The counts in an `s_waitcnt`.
pub(crate) fn counts(imm: i32) -> [usize; 2] {
    let imm = imm as usize;
    [imm & 15 | imm >> 10 & 0x30, imm >> 8 & 15]
}

/// An operation that has been issued.
struct Operation {
    /// The instruction.
    index: u32,
    kind: Kind,
    /// Counters that have not yet proven it complete.
    left: u8,
    /// The registers that it writes.
    first: Reg,
    registers: u8,
}

/// What one wave waits for.
#[derive(Default)]
struct Queue {
    /// In the order of issue.
    operations: Vec<Operation>,
    /// Every register that one of them writes.
    pending: RegSet,
    busy: bool,
    /// What the last wait that named a counter left in it.
    last: [Option<usize>; 2],
}

impl Queue {
    /// `counter` is known to be at most `n`.
    fn wait(&mut self, counter: u8, n: usize) {
        let mut after = [0; 2];
        let mut released = false;
        for operation in self.operations.iter_mut().rev().filter(|o| o.left & counter != 0) {
            let later = &mut after[usize::from(operation.kind == Kind::Lds)];
            if n == 0 || operation.kind.ordered() && n <= *later {
                operation.left &= !counter;
                released |= operation.left == 0;
            }
            *later += usize::from(operation.kind.ordered());
        }
        if released {
            self.operations.retain(|operation| operation.left != 0);
            self.pending = RegSet::EMPTY;
            for operation in &self.operations {
                self.pending.insert(operation.first, operation.registers.into());
            }
            self.busy = !self.pending.is_empty();
        }
    }

    fn issue(&mut self, step: &Step<'_>, kind: Kind) {
        for (counter, _, full) in COUNTERS {
            if kind.counters() & counter != 0
                && self.operations.iter().filter(|o| o.left & counter != 0).count() >= full
            {
                self.wait(counter, full - 1);
            }
        }
        let (first, registers) = match reg(step.inst.dst) {
            Some(first) => (first, destination_width(step.inst).max(1)),
            None => (0, 0),
        };
        // What is in no order and writes no register neither waits nor tells anything.
        if !kind.ordered() && registers == 0 {
            return;
        }
        self.pending.insert(first, registers);
        self.busy |= registers != 0;
        let (index, registers) = (step.u.index, registers as u8);
        self.operations.push(Operation { index, kind, left: kind.counters(), first, registers });
    }

    /// The first register that the instruction must not touch yet, if any.
    #[cold]
    fn conflict(&self, step: &Step<'_>) -> Option<Box<Finding>> {
        let (inst, effects) = (step.inst, step.effects);
        let mut named = RegSet::EMPTY;
        for (i, operand) in inst.src.iter().enumerate() {
            if let Some(first) = reg(*operand) {
                named.insert(first, source_width(inst, i));
            }
        }
        for register in effects.reads.union(&effects.writes).intersection(&self.pending).iter() {
            let writers = || {
                self.operations
                    .iter()
                    .enumerate()
                    .rev()
                    .filter(move |(_, o)| (o.first..o.first + Reg::from(o.registers)).contains(&register))
            };
            let lands_later = effects.kind.ordered()
                && effects.writes.contains(register)
                && !named.contains(register)
                && writers().all(|(_, o)| o.kind == effects.kind);
            if let Some((at, writer)) = writers().next()
                && !lands_later
            {
                return Some(Box::new(self.finding(step, register, at, writer)));
            }
        }
        None
    }

    fn finding(&self, step: &Step<'_>, register: Reg, at: usize, writer: &Operation) -> Finding {
        let read = step.effects.reads.contains(register);
        let later = self.operations[at + 1..].iter().filter(|o| o.kind == writer.kind).count();
        let enough = if writer.kind.ordered() { later } else { 0 };
        let needs: Vec<String> = COUNTERS
            .iter()
            .zip(self.last)
            .filter(|((counter, ..), _)| writer.left & counter != 0)
            .map(|((_, name, _), last)| {
                let most = if enough == 0 { String::new() } else { " or less".to_owned() };
                let last = last
                    .map_or(", none came before".to_owned(), |n| format!(", the last wait left {name}({n})"));
                format!("s_waitcnt {name}({enough}){most}{last}")
            })
            .collect();
        let program = step.e.program;
        Finding {
            check: Check::Waits,
            what: format!(
                "{} is {} while {} at {:#x} may still write it: needs {}",
                registers::name(register),
                if read { "read" } else { "overwritten" },
                program.text(writer.index),
                program.address(writer.index),
                needs.join(" and "),
            ),
            lane: None,
            address: None,
            other: Some(Place { index: writer.index, ..step.place() }),
        }
    }
}

/// The waits of a workgroup.
pub(crate) struct Waits(Vec<Queue>);

impl Waits {
    pub fn new(waves: usize) -> Waits {
        Waits((0..waves).map(|_| Queue::default()).collect())
    }

    pub fn before(&mut self, step: &Step<'_>) -> Result<(), Box<Finding>> {
        let queue = &mut self.0[step.w.index as usize];
        let effects = step.effects;
        if queue.busy
            && (queue.pending.meets(&effects.reads) || queue.pending.meets(&effects.writes))
            && let Some(finding) = queue.conflict(step)
        {
            return Err(finding);
        }
        match effects.kind {
            Kind::None => {}
            Kind::Wait => {
                for (i, n) in counts(step.inst.imm).into_iter().enumerate() {
                    let (counter, _, full) = COUNTERS[i];
                    // The highest count asks for nothing.
                    if n < full {
                        queue.last[i] = Some(n);
                        queue.wait(counter, n);
                    }
                }
            }
            kind => queue.issue(step, kind),
        }
        Ok(())
    }
}
