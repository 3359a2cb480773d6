//! Checks the [`RULES`] of hazards on the instructions that each wave executes.

use std::collections::VecDeque;

use super::step::Step;
use crate::checks::Check;
use crate::fault::{Finding, Place};
use crate::hazard_rules::{LONGEST, LONGEST_PLAIN, RULES, Via, accumulator, column, is, stored};
use crate::isa::Inst;
use crate::registers::{self, Reg, RegSet, SGPR, destination_width, reg, source_width};
use crate::wave::{EXEC, M0, VCC};

/// An instruction of the recent past.
#[derive(Clone, Copy)]
struct Past {
    time: u64,
    index: u32,
    is: u32,
    passes: u8,
    longest: u8,
}

/// What one wave did last.
#[derive(Default)]
struct History {
    /// Wait states so far.
    time: u64,
    /// Matrix instructions of the last [`LONGEST`] states, others of the last [`LONGEST_PLAIN`]; oldest first.
    matrix: VecDeque<Past>,
    plain: VecDeque<Past>,
}

fn vector(set: &RegSet) -> Option<Reg> {
    set.iter().next().filter(|register| *register < SGPR)
}

fn range(of: Option<(Reg, usize)>) -> RegSet {
    let mut set = RegSet::EMPTY;
    if let Some((first, count)) = of {
        set.insert(first, count);
    }
    set
}

/// The register through which the second instruction depends on the first.
fn connection(via: Via, a: &Inst, step: &Step<'_>, index: u32) -> Option<Option<Reg>> {
    let (first, second) = (step.e.program.effects(index), step.effects);
    let b = step.inst;
    let written = |code: usize| {
        let register = SGPR + code as Reg;
        (first.writes.contains(register) || first.writes.contains(register + 1)).then_some(Some(register))
    };
    let exact = || {
        let result = reg(a.dst).map(|r| (r, destination_width(a)));
        result.is_some() && result == accumulator(b)
    };
    let found = |register: Option<Reg>| register.map(Some);
    match via {
        Via::Nothing => Some(None),
        Via::Vector => found(vector(&first.writes.intersection(&second.reads))),
        Via::Overwrites => found(vector(&first.writes.intersection(&second.writes))),
        Via::Touches => found(vector(&first.writes.intersection(&second.reads.union(&second.writes)))),
        Via::TouchesOther if a.op != b.op => connection(Via::Touches, a, step, index),
        Via::TouchesOther => None,
        Via::Chained if a.op == b.op => {
            let read = second.reads.difference(&range(reg(b.src[2]).map(|r| (r, 1))));
            let read = if b.op.accumulates() { read.difference(&second.writes) } else { read };
            found(vector(&first.writes.intersection(&read)))
        }
        Via::Chained => None,
        Via::Scalar => {
            let both = first.writes.intersection(&second.reads);
            found(both.iter().find(|r| (SGPR..SGPR + EXEC as Reg).contains(r)))
        }
        Via::Permuted => found(reg(b.src[0]).filter(|r| first.writes.contains(*r))),
        Via::Lane => found(reg(b.src[1]).filter(|r| first.writes.contains(*r))),
        Via::Exec => written(EXEC),
        Via::Vcc => written(VCC),
        Via::Zero => written(VCC).or_else(|| written(EXEC)),
        Via::M0 => first.writes.contains(SGPR + M0 as Reg).then_some(Some(SGPR + M0 as Reg)),
        Via::Hardware => (a.imm & 63 == b.imm & 63).then_some(None),
        Via::Stored => found(vector(&range(stored(a)).intersection(&second.writes))),
        Via::SameAccumulator => (exact()).then(|| reg(b.dst)),
        Via::OtherAccumulator if exact() => None,
        Via::OtherAccumulator => found(vector(&first.writes.intersection(&range(accumulator(b))))),
        Via::Multiplicand => {
            let mut factors = RegSet::EMPTY;
            let sparse = b.op.info().name.starts_with("V_SMFMAC");
            for i in 0..if sparse { 3 } else { 2 } {
                factors = factors.union(&range(reg(b.src[i]).map(|r| (r, source_width(b, i)))));
            }
            for scale in b.scale.iter().flat_map(|scale| scale.src) {
                factors = factors.union(&range(reg(scale).map(|r| (r, 1))));
            }
            found(vector(&first.writes.intersection(&factors)))
        }
        Via::Accumulated => found(vector(&range(accumulator(a)).intersection(&second.writes))),
    }
}

impl History {
    fn check(&self, step: &Step<'_>, past: Past) -> Option<Box<Finding>> {
        let program = step.e.program;
        let a = program.inst(past.index)?;
        let (first, second) = (program.effects(past.index), step.effects);
        // Matrix instructions are many, and most have nothing to do with each other.
        if past.is & (is::XDL | is::SGEMM) != 0
            && !first.writes.meets(&second.reads)
            && !first.writes.meets(&second.writes)
            && !first.reads.meets(&second.writes)
        {
            return None;
        }
        let traits = first.traits;
        let has = self.time - past.time - 1;
        let (target, column) = (usize::from(!program.fnuz), column(traits.passes));
        for rule in RULES {
            let needs = rule.states[target][column];
            if past.is & rule.first == 0 || second.traits.is & rule.second == 0 || has >= u64::from(needs) {
                continue;
            }
            let Some(register) = connection(rule.via, a, step, past.index) else { continue };
            let register = register.map_or(String::new(), |r| format!(" through {}", registers::name(r)));
            return Some(Box::new(Finding {
                check: Check::Hazards,
                what: format!(
                    "needs {needs} wait states after {} at {:#x}{register}, has {has} ({}; {})",
                    program.text(past.index),
                    program.address(past.index),
                    rule.what,
                    rule.source,
                ),
                lane: None,
                address: None,
                other: Some(Place { index: past.index, ..step.place() }),
            }));
        }
        None
    }

    fn before(&mut self, step: &Step<'_>) -> Option<Box<Finding>> {
        let traits = step.effects.traits;
        let expire = |past: &mut VecDeque<Past>, now: u64, longest: u64| {
            while past.front().is_some_and(|p| now - p.time > longest) {
                past.pop_front();
            }
        };
        expire(&mut self.matrix, self.time, LONGEST);
        expire(&mut self.plain, self.time, LONGEST_PLAIN);
        // The matrix unit takes the next instruction of a wave when it is done with the passes of the last.
        if traits.is & is::MATRIX != 0
            && let Some(last) = self.matrix.back()
        {
            self.time = self.time.max(last.time + u64::from(last.passes));
        }
        if traits.is != 0 {
            for past in self.matrix.iter().chain(&self.plain).rev() {
                if past.is & traits.after != 0
                    && self.time <= past.time + u64::from(past.longest)
                    && let Some(finding) = self.check(step, *past)
                {
                    return Some(finding);
                }
            }
            let past = Past {
                time: self.time,
                index: step.u.index,
                is: traits.is,
                passes: traits.passes,
                longest: traits.longest,
            };
            if traits.is & is::MATRIX != 0 {
                self.matrix.push_back(past);
            } else {
                self.plain.push_back(past);
            }
        }
        self.time += u64::from(traits.states);
        None
    }
}

/// The recent past of a workgroup's waves.
pub(crate) struct Hazards(Vec<History>);

impl Hazards {
    pub fn new(waves: usize) -> Hazards {
        Hazards((0..waves).map(|_| History::default()).collect())
    }

    pub fn before(&mut self, step: &Step<'_>) -> Result<(), Box<Finding>> {
        match self.0[step.w.index as usize].before(step) {
            Some(finding) => Err(finding),
            None => Ok(()),
        }
    }
}
