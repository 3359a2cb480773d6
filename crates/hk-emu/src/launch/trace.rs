//! Runs chosen workgroups of a launch and records what their waves execute.

use super::*;
use crate::trace::{BlockTrace, Sample, Tracer, Undo};

/// Instructions of a workgroup before another one gets its turn: few, so that the trace of a wave that waits for another
/// workgroup stays short.
const TURN: u64 = 1 << 12;

impl Launch<'_> {
    /// Traces of workgroups, in the order in which they are given.
    pub fn trace(self, sample: Sample<'_>) -> Result<Vec<BlockTrace>, Fault> {
        let mut worker = Worker::new(&self);
        let mut done: Vec<Option<BlockTrace>> = sample.blocks.iter().map(|_| None).collect();
        let mut suspended: VecDeque<(usize, Group, Tracer)> = VecDeque::new();
        let mut next = 0;
        // One log: workgroups take turns.
        let mut undo = Undo::default();
        loop {
            let fresh = next < sample.blocks.len();
            let (at, mut group, mut tracer) = if fresh {
                let linear = sample.blocks[next];
                if linear >= self.total {
                    return Err(Fault::Arguments {
                        kernel: self.kernel.name.clone(),
                        what: format!("workgroup {linear} of {} is to be traced", self.total),
                    });
                }
                next += 1;
                (next - 1, worker.start(linear), Tracer::new(self.waves as usize, sample.loads))
            } else {
                let Some(taken) = suspended.pop_front() else { break };
                taken
            };
            // One that waits for nothing runs to its end.
            std::mem::swap(&mut tracer.undo, &mut undo);
            let outcome = worker.follow(&mut group, &mut tracer, if fresh { SLICE } else { TURN });
            std::mem::swap(&mut tracer.undo, &mut undo);
            match outcome {
                Outcome::Finished => {
                    done[at] = Some(BlockTrace { linear: group.info.linear, waves: tracer.waves });
                    worker.retire(group);
                }
                Outcome::Faulted(wave, problem) => {
                    if let Some(wave) = group.waves.get(wave) {
                        self.report(group.info.linear, group.info.id, wave, problem);
                    }
                    break;
                }
                Outcome::Suspended | Outcome::Waiting => suspended.push_back((at, group, tracer)),
            }
        }
        undo.restore(&self.memory);
        let fault = self.fault.lock().unwrap_or_else(|e| e.into_inner()).take();
        match fault {
            Some((_, fault)) => Err(fault),
            None => Ok(done.into_iter().flatten().collect()),
        }
    }
}

impl Worker<'_, '_> {
    /// Runs the waves of a workgroup until all have ended or been left, or one has executed its share of `turn`
    /// instructions.
    fn follow(&mut self, group: &mut Group, tracer: &mut Tracer, turn: u64) -> Outcome {
        let launch = self.launch;
        let mut env = Env {
            program: &launch.program,
            memory: &launch.memory,
            lds: &mut group.lds,
            group: &group.info,
            interrupt: launch.interrupt,
            rises: &mut self.tally.rises,
            hints: &mut self.hints,
            read_bytes: 0,
            written_bytes: 0,
            problem: None,
        };
        let start: u64 = group.waves.iter().map(|w| w.executed).sum();
        loop {
            let Some((next, clock)) = next_turn(&group.waves, launch.skew) else {
                let waiting: Vec<_> =
                    group.waves.iter_mut().filter(|w| w.status == Status::AtBarrier).collect();
                let Some(last) = waiting.iter().map(|w| w.clock).max() else { return Outcome::Finished };
                for wave in waiting {
                    (wave.status, wave.clock) = (Status::Ready, last);
                }
                continue;
            };
            let wave = &mut group.waves[next];
            let until = Until { budget: launch.budget, instructions: UNSEEN.min(turn), clock };
            let ctl = run_wave(wave, &mut env, &mut Ordered { order: &Free, watch: &mut *tracer }, until);
            if std::mem::take(&mut tracer.stopped) {
                env.problem = None;
                wave.status = Status::Ended;
            } else if let Some(problem) = stop(wave, ctl, &mut env) {
                return Outcome::Faulted(next, problem);
            }
            if group.waves.iter().map(|w| w.executed).sum::<u64>() - start > turn {
                return Outcome::Suspended;
            }
        }
    }
}
