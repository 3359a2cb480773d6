//! Observation of a launch by sanitizers, instruction by instruction.
//!
//! Without checks a launch runs handlers and nothing else. With checks it computes, before each instruction, which
//! registers the instruction names ([`Effects`]) and which memory it accesses ([`Accesses`]), and passes both to every
//! check that is on. Handlers do not depend on checks.

pub(crate) mod access;
mod barriers;
pub(crate) mod counts;
pub(crate) mod deadlock;
mod global;
mod hazards;
mod lds;
mod progress;
#[cfg(test)]
mod proof;
pub(crate) mod step;
pub(crate) mod streams;
mod uninit;
pub(crate) mod waits;

pub(crate) use global::{GlobalMemory, Overlapping};
pub(crate) use uninit::Undefined;

use std::sync::{Arc, Mutex};

use crate::effects::Effects;
use access::Accesses;
use barriers::Barriers;
use counts::{Counts, Outstanding};
use global::GlobalRaces;
use hazards::Hazards;
use lds::LdsRaces;
use progress::Progress;
use step::{Step, Watch};
use streams::{GroupTouched, Touched};
use uninit::Uninit;
use waits::Waits;

use crate::checks::{Check, Checks};
use crate::exec::{Ctl, Env, Uop};
use crate::fault::Finding;
use crate::program::Program;
use crate::wave::{GroupInfo, Wave};

/// The checks of one workgroup in execution.
pub(crate) struct Observer {
    accesses: Accesses,
    /// Those of a shadow wave.
    shadow_accesses: Accesses,
    /// The registers of the instruction that runs, where M0 or MODE moves them.
    moved: Option<Effects>,
    /// Of each wave.
    progress: Vec<Progress>,
    uninit: Option<Uninit>,
    lds: Option<LdsRaces>,
    global: Option<GlobalRaces>,
    barriers: Option<Barriers>,
    /// Lent by the thread that runs the workgroup.
    pub counts: Option<Box<Counts>>,
    /// Of each wave, for `counts`.
    outstanding: Vec<Outstanding>,
    waits: Option<Waits>,
    hazards: Option<Hazards>,
    /// No check but waits and hazards is on: accesses are not needed.
    registers_only: bool,
    touched: Option<GroupTouched>,
}

/// The workgroup that an [`Observer`] watches.
pub(crate) struct Subject<'a> {
    pub checks: Checks,
    pub program: &'a Program,
    pub group: &'a GroupInfo,
    pub waves: usize,
    /// Bytes.
    pub lds: usize,
    /// A second state for each wave where [`Check::Uninit`] is on.
    pub shadows: Vec<Wave>,
    /// The launch's, where [`Check::Global`] is on.
    pub global: Option<&'a Overlapping>,
    /// The launch's, where [`Check::Streams`] is on.
    pub touched: Option<&'a Arc<Mutex<Touched>>>,
}

impl Observer {
    pub fn new(subject: Subject<'_>) -> Observer {
        let Subject { checks, program, group, waves, lds, shadows, global, touched } = subject;
        Observer {
            accesses: Accesses::default(),
            moved: None,
            shadow_accesses: Accesses::default(),
            progress: vec![Progress::default(); waves],
            uninit: (!shadows.is_empty()).then(|| Uninit::new(shadows, lds, program.uops.len())),
            lds: checks.has(Check::Lds).then(|| LdsRaces::new(waves, lds)),
            global: global.map(|launch| GlobalRaces::new(launch, group, waves)),
            barriers: checks.has(Check::Barriers).then(|| Barriers::new(group, waves)),
            counts: None,
            outstanding: vec![Outstanding::default(); waves],
            waits: checks.has(Check::Waits).then(|| Waits::new(waves)),
            hazards: checks.has(Check::Hazards).then(|| Hazards::new(waves)),
            registers_only: Check::ALL
                .into_iter()
                .all(|check| !checks.has(check) || matches!(check, Check::Waits | Check::Hazards)),
            touched: touched.map(GroupTouched::new),
        }
    }

    /// Its waves.
    pub fn into_waves(self) -> Vec<Wave> {
        self.uninit.map_or(vec![], Uninit::into_waves)
    }

    /// Every wave that has not ended has arrived at a barrier, which now opens.
    pub fn barrier(&mut self, waves: &[Wave]) -> Result<(), (usize, Box<Finding>)> {
        if let Some(barriers) = &mut self.barriers {
            barriers.open(waves)?;
        }
        if let Some(lds) = &mut self.lds {
            lds.barrier(&self.progress);
        }
        if let Some(global) = &mut self.global {
            global.barrier(&self.progress);
        }
        Ok(())
    }
}

impl Watch for Observer {
    fn before(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>> {
        let Some(inst) = e.program.inst(u.index) else { return Ok(()) };
        if !self.registers_only || self.counts.is_some() {
            self.accesses.of(inst, u, w, e);
        }
        let effects = e.program.effects(u.index);
        self.moved = effects.moves(w).then(|| Effects::now(inst, w));
        let effects = self.moved.as_ref().unwrap_or(effects);
        let step = Step { w, e, u, inst, effects, accesses: self.accesses.parts() };
        if let Some(counts) = &mut self.counts {
            counts.count(&step, &mut self.outstanding[w.index as usize]);
        }
        if let Some(waits) = &mut self.waits {
            waits.before(&step)?;
        }
        if let Some(hazards) = &mut self.hazards {
            hazards.before(&step)?;
        }
        if self.registers_only {
            return Ok(());
        }
        if let Some(uninit) = &mut self.uninit {
            uninit.before(&step, &mut self.shadow_accesses)?;
        }
        if let Some(barriers) = &mut self.barriers {
            barriers.step(&step)?;
        }
        let progress = &mut self.progress[w.index as usize];
        let token = progress.note(inst);
        if let (Some(token), Some(lds)) = (token, &mut self.lds) {
            lds.access(&step, progress, token)?;
        }
        if let Some(global) = &mut self.global {
            global.step(&step, progress, token)?;
        }
        if let Some(touched) = &mut self.touched {
            touched.step(step.accesses);
        }
        Ok(())
    }

    fn after(&mut self, w: &Wave, e: &Env<'_>, u: &Uop, ctl: Ctl) -> Result<(), Box<Finding>> {
        let Some(uninit) = &mut self.uninit else { return Ok(()) };
        let Some(inst) = e.program.inst(u.index) else { return Ok(()) };
        let effects = self.moved.as_ref().unwrap_or_else(|| e.program.effects(u.index));
        let step = Step { w, e, u, inst, effects, accesses: self.accesses.parts() };
        uninit.after(&step, ctl)
    }
}
