//! Watching a launch: sanitizers, instruction by instruction.
//!
//! A launch that nobody watches runs handlers and nothing else. A watched one asks, before each instruction, which
//! registers it names ([`Effects`]) and which memory it is about to access ([`Accesses`]), and shows both to every
//! check that is on. Handlers know nothing of it.

pub(crate) mod access;
mod checks;
pub(crate) mod counts;
pub(crate) mod effects;

pub use checks::{Check, Checks, UnknownCheck};

use access::{Accesses, Part};
use counts::Counts;
use effects::Effects;

use crate::exec::{Env, Uop};
use crate::fault::Space;
use crate::isa::Inst;
use crate::launch::GroupInfo;
use crate::wave::Wave;

/// Sees every instruction of a wave. What it returns ends the launch.
pub(crate) trait Watch {
    /// Before an instruction runs.
    fn before(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>>;
    /// After it ran without a fault.
    fn after(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>>;
}

/// Nobody watches.
pub(crate) struct Unwatched;

impl Watch for Unwatched {
    #[inline(always)]
    fn before(&mut self, _: &Wave, _: &Env<'_>, _: &Uop) -> Result<(), Box<Finding>> {
        Ok(())
    }
    #[inline(always)]
    fn after(&mut self, _: &Wave, _: &Env<'_>, _: &Uop) -> Result<(), Box<Finding>> {
        Ok(())
    }
}

/// An executed instruction that a finding refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// In the program.
    pub index: u32,
    pub workgroup: [u32; 3],
    pub wave: u32,
}

/// What a check found; the launch adds where.
#[derive(Debug, Clone)]
pub(crate) struct Finding {
    pub check: Check,
    /// What is wrong, in words that name registers and counters.
    pub what: String,
    pub lane: Option<u32>,
    pub address: Option<(Space, u64)>,
    /// The other side of a race, or the producer of a value.
    pub other: Option<Place>,
}

/// One instruction that is about to run, as checks see it.
pub(crate) struct Step<'a> {
    pub w: &'a Wave,
    pub e: &'a Env<'a>,
    pub u: &'a Uop,
    pub inst: &'a Inst,
    pub effects: &'a Effects,
    pub accesses: &'a [Part],
}

impl Step<'_> {
    pub fn place(&self) -> Place {
        Place { index: self.u.index, workgroup: self.e.group.id, wave: self.w.index }
    }
}

/// The checks of one workgroup in execution.
pub(crate) struct Observer {
    accesses: Accesses,
    /// Lent by the thread that runs the workgroup.
    pub counts: Option<Box<Counts>>,
}

impl Observer {
    /// For a workgroup of `waves` waves with `lds` bytes of LDS.
    pub fn new(checks: Checks, group: &GroupInfo, waves: usize, lds: usize) -> Observer {
        let _ = (checks, group, waves, lds);
        Observer { accesses: Accesses::default(), counts: None }
    }

    /// Every wave that has not ended has arrived at a barrier, which now opens.
    pub fn barrier(&mut self, waves: &[Wave]) -> Result<(), (usize, Box<Finding>)> {
        let _ = waves;
        Ok(())
    }
}

impl Watch for Observer {
    fn before(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>> {
        let Some(inst) = e.program.inst(u.index) else { return Ok(()) };
        self.accesses.of(inst, u, w, e);
        if let Some(counts) = &mut self.counts {
            counts.count(u.index, self.accesses.parts());
        }
        let effects = e.program.effects(u.index);
        let step = Step { w, e, u, inst, effects, accesses: self.accesses.parts() };
        let _ = step;
        Ok(())
    }

    fn after(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>> {
        let _ = (w, e, u);
        Ok(())
    }
}
