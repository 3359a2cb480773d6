//! The reproducible schedule of a launch whose workgroups communicate through atomics.
//!
//! Workgroups take turns, in the order in which a single thread runs them. Only the workgroup that has the turn executes
//! instructions that communicate: atomics of global memory, and loads and stores at agent scope. The other threads run
//! later workgroups ahead, each up to its first such instruction, where it waits for its turn. Results and counters of a
//! launch without data races are those of a single thread.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Workgroups that run ahead of their first turn, at most.
const AHEAD: usize = 64;

/// A workgroup that is to run until its turn ends.
pub(crate) struct Task<G> {
    pub linear: u64,
    /// `None` if it has not begun.
    pub group: Option<G>,
}

/// How a workgroup's turn ended.
pub(crate) enum Turn<G, F> {
    Finished,
    /// It continues at its next turn.
    Suspended(G),
    /// As `Suspended`; it has only waited.
    Waiting(G),
    Faulted(F),
}

/// What a thread does after a turn.
pub(crate) enum Next<G, F> {
    Continue,
    /// Report the fault of this workgroup.
    Report(u64, F),
    /// All workgroups wait, and none is left to begin: wait for the host and other launches.
    Stuck,
    /// As `Stuck`, for ever.
    Deadlock(VecDeque<G>),
}

/// Where a workgroup is.
enum Slot<G, F> {
    /// It has not begun.
    Fresh,
    Idle(G),
    /// On a thread.
    Running,
    /// It has ended ahead of its turn.
    Ended(Turn<G, F>),
}

struct State<G, F> {
    /// The first workgroup that has not had a turn.
    next: u64,
    /// Workgroups that have begun ahead of their first turn, from `next` on.
    ahead: VecDeque<Slot<G, F>>,
    /// Workgroups between two turns, in the order of their turns.
    suspended: VecDeque<(u64, Slot<G, F>)>,
    turn: Option<(u64, Slot<G, F>)>,
    /// Workgroups that have had a turn and have not ended.
    resident: u64,
    room: usize,
    /// Consecutive turns that only waited.
    waited: usize,
    /// The lowest workgroup with a fault: later ones are abandoned.
    fault: u64,
    over: bool,
}

/// The schedule of one launch. `G` is the state of a workgroup, `F` its fault.
pub(crate) struct Schedule<G, F> {
    state: Mutex<State<G, F>>,
    changed: Condvar,
    total: u64,
    limit: u64,
}

impl<G, F> Schedule<G, F> {
    /// Of `total` workgroups, of which the GPU holds `limit` at a time and the host's memory `room` suspended ones.
    pub fn new(total: u64, limit: u64, room: usize) -> Schedule<G, F> {
        let state = State {
            next: 0,
            ahead: VecDeque::new(),
            suspended: VecDeque::new(),
            turn: None,
            resident: 0,
            room,
            waited: 0,
            fault: u64::MAX,
            over: false,
        };
        Schedule { state: Mutex::new(state), changed: Condvar::new(), total, limit }
    }

    fn lock(&self) -> MutexGuard<'_, State<G, F>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&'s self, state: MutexGuard<'s, State<G, F>>) -> MutexGuard<'s, State<G, F>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Workgroups that have had a turn.
    pub fn begun(&self) -> u64 {
        self.lock().next
    }

    /// The workgroup that the calling thread is to run; `None` at the end of the launch. The caller then
    /// calls [`end`](Self::end).
    pub fn take(&self) -> Option<Task<G>> {
        let mut state = self.lock();
        loop {
            if state.over {
                return None;
            }
            if state.turn.is_none() {
                self.grant(&mut state);
            }
            let Some((linear, slot)) = &mut state.turn else {
                state.over = true;
                self.changed.notify_all();
                return None;
            };
            if let Some(group) = slot.start() {
                return Some(Task { linear: *linear, group });
            }
            if let Some(task) = self.run_ahead(&mut state) {
                return Some(task);
            }
            state = self.wait(state);
        }
    }

    /// A workgroup whose turn has not come.
    fn run_ahead(&self, state: &mut State<G, F>) -> Option<Task<G>> {
        let ahead = state.ahead.len() as u64;
        let linear = state.next + ahead;
        let fits = state.resident + ahead < self.limit && state.ahead.len() < state.room.min(AHEAD);
        if linear < self.total && linear <= state.fault && fits {
            state.ahead.push_back(Slot::Running);
            return Some(Task { linear, group: None });
        }
        // A workgroup that only waits would wait for its turn as well.
        if state.waited != 0 {
            return None;
        }
        let (linear, slot) = state.suspended.iter_mut().find(|(_, slot)| matches!(slot, Slot::Idle(_)))?;
        Some(Task { linear: *linear, group: slot.start()? })
    }

    /// Whether a workgroup is left to begin and fits on the GPU.
    fn can_begin(&self, state: &State<G, F>) -> bool {
        state.next < self.total && state.next <= state.fault && state.resident < self.limit
    }

    /// Gives the turn to the next workgroup: a fresh one before suspended ones, which wait for something.
    fn grant(&self, state: &mut State<G, F>) {
        while state.turn.is_none() {
            let (linear, slot) = if state.suspended.len() < state.room && self.can_begin(state) {
                state.resident += 1;
                state.next += 1;
                (state.next - 1, state.ahead.pop_front().unwrap_or(Slot::Fresh))
            } else {
                let Some(next) = state.suspended.pop_front() else { return };
                next
            };
            if linear <= state.fault {
                state.turn = Some((linear, slot));
            }
        }
    }

    /// Waits until it is the workgroup's turn. False if the workgroup is abandoned.
    pub fn turn(&self, linear: u64) -> bool {
        let mut state = self.lock();
        loop {
            if state.over || linear > state.fault {
                return false;
            }
            if state.turn.as_ref().is_some_and(|(turn, _)| *turn == linear) {
                return true;
            }
            state = self.wait(state);
        }
    }

    /// Records how the workgroup that a thread took has ended its turn.
    pub fn end(&self, linear: u64, turn: Turn<G, F>) {
        let mut state = self.lock();
        let ended = Slot::Ended(turn);
        if let Some((at, slot)) = &mut state.turn
            && *at == linear
        {
            *slot = ended;
        } else if linear >= state.next {
            let at = (linear - state.next) as usize;
            if let Some(slot) = state.ahead.get_mut(at) {
                *slot = ended;
            }
        } else if let Some((_, slot)) = state.suspended.iter_mut().find(|(at, _)| *at == linear) {
            *slot = ended;
        }
    }

    /// Ends the turn that is over, if it is, and grants the next one. `for_ever` is asked when all workgroups wait.
    pub fn settle(&self, for_ever: impl FnOnce() -> bool) -> Option<Next<G, F>> {
        let mut state = self.lock();
        if state.turn.is_none() {
            self.grant(&mut state);
        }
        let (linear, turn) = match state.turn.take() {
            Some((linear, Slot::Ended(turn))) => (linear, turn),
            other => {
                state.turn = other;
                return None;
            }
        };
        let waits = matches!(turn, Turn::Waiting(_));
        state.waited = if waits { state.waited + 1 } else { 0 };
        let mut next = Next::Continue;
        match turn {
            Turn::Finished => state.resident -= 1,
            Turn::Suspended(group) | Turn::Waiting(group) => {
                state.suspended.push_back((linear, Slot::Idle(group)));
            }
            Turn::Faulted(fault) => {
                state.fault = linear;
                next = Next::Report(linear, fault);
            }
        }
        if waits && state.waited >= state.suspended.len() {
            if self.can_begin(&state) {
                // They may wait for a workgroup that has not begun for lack of host memory.
                state.room = state.room.saturating_mul(2);
            } else if for_ever() {
                state.over = true;
                let groups = std::mem::take(&mut state.suspended).into_iter();
                let groups = groups.filter_map(|(_, mut slot)| slot.start().flatten()).collect();
                next = Next::Deadlock(groups);
            } else {
                next = Next::Stuck;
            }
        }
        if !state.over {
            self.grant(&mut state);
        }
        self.changed.notify_all();
        Some(next)
    }
}

impl<G, F> Slot<G, F> {
    /// Takes the workgroup, if a thread can run it.
    fn start(&mut self) -> Option<Option<G>> {
        match std::mem::replace(self, Slot::Running) {
            Slot::Fresh => Some(None),
            Slot::Idle(group) => Some(Some(group)),
            other => {
                *self = other;
                None
            }
        }
    }
}
