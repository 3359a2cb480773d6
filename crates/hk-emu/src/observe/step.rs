//! What checks see of a launch: each instruction before and after it runs.

use super::access::Part;
use crate::effects::Effects;
use crate::exec::{Ctl, Env, Uop};
use crate::fault::{Finding, Place};
use crate::isa::Inst;
use crate::wave::Wave;

/// Sees every instruction of a wave. What it returns ends the launch.
pub(crate) trait Watch {
    /// Sees each instruction; else, of a run of instructions that others cannot see, the first before and the last after it.
    const EACH: bool = true;

    /// Before an instruction runs.
    fn before(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>>;
    /// After it ran without a fault.
    fn after(&mut self, w: &Wave, e: &Env<'_>, u: &Uop, ctl: Ctl) -> Result<(), Box<Finding>>;
}

impl<W: Watch> Watch for &mut W {
    const EACH: bool = W::EACH;

    #[inline(always)]
    fn before(&mut self, w: &Wave, e: &Env<'_>, u: &Uop) -> Result<(), Box<Finding>> {
        (**self).before(w, e, u)
    }
    #[inline(always)]
    fn after(&mut self, w: &Wave, e: &Env<'_>, u: &Uop, ctl: Ctl) -> Result<(), Box<Finding>> {
        (**self).after(w, e, u, ctl)
    }
}

/// No checks: a launch runs handlers alone.
pub(crate) struct Unwatched;

impl Watch for Unwatched {
    const EACH: bool = false;

    #[inline(always)]
    fn before(&mut self, _: &Wave, _: &Env<'_>, _: &Uop) -> Result<(), Box<Finding>> {
        Ok(())
    }
    #[inline(always)]
    fn after(&mut self, _: &Wave, _: &Env<'_>, _: &Uop, _: Ctl) -> Result<(), Box<Finding>> {
        Ok(())
    }
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
