//! Barriers that not every lane or not every wave of a workgroup reaches.

use super::step::Step;
use crate::checks::Check;
use crate::fault::{Finding, Place};
use crate::isa::Op;
use crate::wave::GroupInfo;
use crate::wave::{Status, Wave};

/// The barriers of one workgroup. Waves may wait at different instructions: only lanes and numbers count.
pub(crate) struct Barriers {
    workgroup: [u32; 3],
    /// Of each wave: the lanes that it began with.
    lanes: Vec<u64>,
    opened: u32,
}

impl Barriers {
    pub fn new(group: &GroupInfo, waves: usize) -> Barriers {
        Barriers { workgroup: group.id, lanes: vec![0; waves], opened: 0 }
    }

    pub fn step(&mut self, step: &Step<'_>) -> Result<(), Box<Finding>> {
        let lanes = &mut self.lanes[step.w.index as usize];
        if step.w.executed == 0 {
            *lanes = step.w.exec();
        }
        let missing = *lanes & !step.w.exec();
        if step.inst.op != Op::S_BARRIER || missing == 0 {
            return Ok(());
        }
        let what = format!(
            "divergent barrier: {} of the wave's {} lanes do not take part, the first is lane {}",
            missing.count_ones(),
            lanes.count_ones(),
            missing.trailing_zeros()
        );
        let lane = Some(missing.trailing_zeros());
        Err(Box::new(Finding { check: Check::Barriers, what, lane, address: None, other: None }))
    }

    /// Every wave waits or has ended.
    pub fn open(&mut self, waves: &[Wave]) -> Result<(), (usize, Box<Finding>)> {
        let find = |status| waves.iter().position(|w| w.status == status);
        if let (Some(waiting), Some(ended)) = (find(Status::AtBarrier), find(Status::Ended)) {
            let what = format!(
                "waits at barrier {} of the workgroup, which wave {} never reaches: it has ended after {}",
                self.opened + 1,
                waves[ended].index,
                self.opened
            );
            let place = Place {
                index: waves[ended].pc.saturating_sub(1),
                workgroup: self.workgroup,
                wave: waves[ended].index,
            };
            let other = Some(place);
            let finding = Finding { check: Check::Barriers, what, lane: None, address: None, other };
            return Err((waiting, Box::new(finding)));
        }
        self.opened += 1;
        Ok(())
    }
}
