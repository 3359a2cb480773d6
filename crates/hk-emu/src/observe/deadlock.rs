//! Deadlocks: waves that wait for a write that no wave is left to make.
//!
//! A wave spins if it returns to the same instruction with the same registers, and has neither changed memory nor read the
//! clock in between: it spins until another wave changes memory. When every wave of every running workgroup spins, and no
//! workgroup is left to start, the launch cannot end.

use super::access::Accesses;
use super::step::Watch;
use crate::checks::Check;
use crate::exec::{Ctl, Env, Uop};
use crate::fault::{Access, Finding, Space};
use crate::isa::Op;
use crate::program::Registers;
use crate::wave::{Lanes, Wave};

/// Runs a wave for a short while to see whether it spins. Checks see its instructions as well.
pub(crate) struct Probe<W> {
    observer: Option<W>,
    accesses: Accesses,
    /// The first instruction, and how often the wave was there.
    first: u32,
    visits: u32,
    /// At one of these visits.
    state: Option<Box<State>>,
    /// Memory has changed, or the wave has read the clock.
    changed: bool,
    /// What a write overwrites.
    old: Vec<u8>,
    /// The last load: instruction, memory, first address, its lane.
    load: Option<(u32, Space, u64, Option<u32>)>,
    found: Option<Circle>,
}

/// A wave that spins.
pub(crate) struct Circle {
    pub finding: Box<Finding>,
    /// The instruction that loads what the wave waits for.
    pub index: u32,
}

/// Everything that a wave's future depends on, besides memory.
struct State {
    s: [u32; 128],
    scc: bool,
    mode: u32,
    registers: Vec<Lanes>,
    scratch: Vec<u8>,
}

impl State {
    fn of(w: &Wave, registers: Registers) -> Box<State> {
        let registers = registers.slots().map(|slot| *w.v(slot)).collect();
        let scratch = w.scratch.clone();
        Box::new(State { s: w.s, scc: w.scc, mode: w.mode, registers, scratch })
    }

    fn holds(&self, w: &Wave, registers: Registers) -> bool {
        (self.scc, self.mode, &self.s) == (w.scc, w.mode, &w.s)
            && registers.slots().zip(&self.registers).all(|(slot, lanes)| lanes == w.v(slot))
            && self.scratch == w.scratch
    }
}

impl<W: Watch> Probe<W> {
    pub fn new(observer: Option<W>) -> Probe<W> {
        Probe {
            observer,
            accesses: Accesses::default(),
            first: u32::MAX,
            visits: 0,
            state: None,
            changed: false,
            old: vec![],
            load: None,
            found: None,
        }
    }

    /// Whether more instructions of the wave could still show that it spins.
    pub fn open(&self) -> bool {
        !self.changed && self.found.is_none()
    }

    pub fn into_circle(self) -> Option<Circle> {
        self.found
    }

    /// The bytes that the instruction of `accesses` writes.
    fn memory(&self, e: &Env<'_>, out: &mut Vec<u8>) {
        out.clear();
        let mut hint = 0;
        for part in self.accesses.parts().iter().filter(|part| part.access != Access::Read) {
            for (_, address) in part.lanes() {
                let bytes = part.bytes as usize;
                let start = out.len();
                out.resize(start + bytes, 0);
                match part.space {
                    Space::Global => {
                        if let Some((allocation, offset)) = e.memory.find(address, bytes as u64, &mut hint) {
                            allocation.read_bytes(offset, &mut out[start..]);
                        }
                    }
                    Space::Lds => {
                        let at = address as usize;
                        if let Some(lds) = e.lds.get(at..at.saturating_add(bytes)) {
                            out[start..].copy_from_slice(lds);
                        }
                    }
                    Space::Private => {}
                }
            }
        }
    }

    fn circle(&self) -> Circle {
        let (index, space, address, lane) = self.load.unwrap_or((self.first, Space::Global, 0, None));
        let what = match self.load {
            Some(_) => {
                "deadlock: this wave loads a value again and again that no wave of the launch is left to change"
            }
            None => "deadlock: this wave repeats the same instructions for ever",
        };
        let address = self.load.map(|_| (space, address));
        let finding = Finding { check: Check::Barriers, what: what.to_owned(), lane, address, other: None };
        Circle { finding: Box::new(finding), index }
    }
}

impl<W: Watch> Watch for Probe<W> {
    /// Ends the run when the wave is known to spin, with a finding that only the caller sees.
    fn before(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>> {
        if self.open() {
            if self.visits == 0 {
                self.first = w.pc;
            }
            if self.first == w.pc {
                if self.state.as_ref().is_some_and(|state| state.holds(w, e.program.registers)) {
                    let circle = self.circle();
                    let finding = circle.finding.clone();
                    self.found = Some(circle);
                    return Err(finding);
                }
                // A state is large: none before the wave is back. Loops of several iterations, and code that leads to a loop.
                if self.visits.is_power_of_two() {
                    self.state = Some(State::of(w, e.program.registers));
                }
                self.visits += 1;
            }
            if let Some(inst) = e.program.inst(u.index) {
                self.changed |= matches!(inst.op, Op::S_MEMTIME | Op::S_MEMREALTIME);
                self.accesses.of(inst, u, w, e);
            }
            let part = self.accesses.parts().iter().find(|part| part.access != Access::Write);
            if let Some((part, (lane, address))) = part.and_then(|part| Some((part, part.lanes().next()?))) {
                let lane = (!part.scalar).then_some(lane as u32);
                self.load = Some((u.index, part.space, address, lane));
            }
            let mut old = std::mem::take(&mut self.old);
            self.memory(e, &mut old);
            self.old = old;
        }
        self.observer.as_mut().map_or(Ok(()), |observer| observer.before(w, e, u))
    }

    fn after(&mut self, w: &Wave, e: &Env<'_>, u: &Uop, ctl: Ctl) -> Result<(), Box<Finding>> {
        if self.open() && !self.old.is_empty() {
            let mut new = vec![];
            self.memory(e, &mut new);
            self.changed |= self.old != new;
        }
        self.observer.as_mut().map_or(Ok(()), |observer| observer.after(w, e, u, ctl))
    }
}
