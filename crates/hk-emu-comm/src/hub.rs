//! Where the ranks of a communicator meet, in the process of its unique id.

use crate::Failure;
use crate::blob::Blob;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a rank asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    /// To be a rank of a communicator of so many.
    Join(usize),
    /// The bytes of all ranks, for its own.
    Exchange(Blob),
    /// To queue bytes for a rank; the answer is their number.
    Post(usize, Blob),
    /// The next bytes of a rank.
    Take(usize),
    /// To wait until a rank has taken the bytes of a number.
    Taken(usize, u64),
    /// An end for all.
    Abort,
    /// To leave.
    Leave,
}

/// Whose request it is, and how long it may wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// The communicator.
    pub key: Vec<u8>,
    pub rank: usize,
    pub timeout: Option<Duration>,
}

struct Hub {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    joined: Vec<bool>,
    left: Vec<bool>,
    /// Exchanges that each rank has made.
    made: Vec<u64>,
    /// The number of the first of `open`.
    first: u64,
    open: VecDeque<Round>,
    /// By sender and receiver.
    lanes: BTreeMap<(usize, usize), Lane>,
    failure: Option<Failure>,
}

/// An exchange that not all ranks have left.
struct Round {
    blobs: Vec<Option<Blob>>,
    left: usize,
}

#[derive(Default)]
struct Lane {
    queued: VecDeque<Blob>,
    posted: u64,
    taken: u64,
}

/// The communicators with ranks, by their keys.
static HUBS: Mutex<BTreeMap<Vec<u8>, Arc<Hub>>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does what a rank asks for. The answer to an exchange is a blob of each rank, to [`Request::Take`] and [`Request::Post`] one blob.
pub(crate) fn handle(caller: &Caller, request: Request) -> Result<Vec<Blob>, Failure> {
    if let Request::Join(world) = request {
        return join(caller, world).map(|()| vec![]);
    }
    let hub = lock(&HUBS).get(&caller.key).cloned();
    let Some(hub) = hub else { return Err(Failure::Aborted) };
    match request {
        Request::Join(_) => {}
        Request::Exchange(blob) => return hub.exchange(caller, blob),
        Request::Post(to, blob) => return hub.post(caller, to, blob).map(|number| vec![number]),
        Request::Take(from) => return hub.take(caller, from).map(|blob| vec![blob]),
        Request::Taken(to, number) => hub.taken(caller, to, number)?,
        Request::Abort => hub.fail(&mut lock(&hub.state), Failure::Aborted),
        Request::Leave => hub.leave(caller),
    }
    Ok(vec![])
}

fn join(caller: &Caller, world: usize) -> Result<(), Failure> {
    let hub = Arc::clone(lock(&HUBS).entry(caller.key.clone()).or_insert_with(|| Arc::new(Hub::new(world))));
    let mut state = lock(&hub.state);
    state.alive()?;
    let there = state.joined.len();
    if there != world {
        return Err(Failure::Invalid(format!("a world of {world} ranks, another rank says {there}")));
    }
    match state.joined.get_mut(caller.rank) {
        Some(joined) if !*joined => {
            *joined = true;
            Ok(())
        }
        Some(_) => Err(Failure::Invalid(format!("rank {} joins twice", caller.rank))),
        None => Err(Failure::Invalid(format!("rank {} of {world}", caller.rank))),
    }
}

impl State {
    fn alive(&self) -> Result<(), Failure> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn round(&mut self, number: u64) -> Option<&mut Round> {
        self.open.get_mut(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }
}

impl Hub {
    fn new(world: usize) -> Self {
        let (joined, left, made) = (vec![false; world], vec![false; world], vec![0; world]);
        let (open, lanes) = (VecDeque::new(), BTreeMap::new());
        let state = Mutex::new(State { joined, left, made, first: 0, open, lanes, failure: None });
        Self { state, changed: Condvar::new() }
    }

    /// Ends the waits of all ranks.
    fn fail(&self, state: &mut State, failure: Failure) {
        state.failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// Waits until `missing` knows of no rank that has yet to call.
    fn wait<'s>(
        &self,
        mut state: MutexGuard<'s, State>,
        caller: &Caller,
        missing: impl Fn(&mut State) -> Option<usize>,
    ) -> Result<MutexGuard<'s, State>, Failure> {
        let start = Instant::now();
        loop {
            let Some(rank) = missing(&mut state) else { return Ok(state) };
            state.alive()?;
            if state.left.get(rank) == Some(&true) {
                return Err(Failure::Left { rank });
            }
            let rest = caller.timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            state = match rest {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    let failure = Failure::Timeout { missing: rank };
                    self.fail(&mut state, failure.clone());
                    return Err(failure);
                }
                Some(rest) => {
                    self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn exchange(&self, caller: &Caller, blob: Blob) -> Result<Vec<Blob>, Failure> {
        let mut state = lock(&self.state);
        state.alive()?;
        let (world, rank) = (state.made.len(), caller.rank);
        let Some(made) = state.made.get_mut(rank) else { return Err(Failure::Aborted) };
        let number = *made;
        *made += 1;
        while state.first + state.open.len() as u64 <= number {
            state.open.push_back(Round { blobs: vec![None; world], left: 0 });
        }
        if let Some(round) = state.round(number) {
            round.blobs[rank] = Some(blob);
        }
        self.changed.notify_all();
        // The round stays until every rank has left it.
        let missing = |state: &mut State| state.round(number)?.blobs.iter().position(Option::is_none);
        let mut state = self.wait(state, caller, missing)?;
        let Some(round) = state.round(number) else { return Err(Failure::Aborted) };
        round.left += 1;
        let blobs = round.blobs.iter().flatten().cloned().collect();
        while state.open.front().is_some_and(|round| round.left == world) {
            state.open.pop_front();
            state.first += 1;
        }
        Ok(blobs)
    }

    fn post(&self, caller: &Caller, to: usize, blob: Blob) -> Result<Blob, Failure> {
        let mut state = lock(&self.state);
        state.alive()?;
        let lane = state.lanes.entry((caller.rank, to)).or_default();
        lane.queued.push_back(blob);
        lane.posted += 1;
        let number = lane.posted.to_le_bytes();
        self.changed.notify_all();
        Ok(Blob::from(number))
    }

    fn take(&self, caller: &Caller, from: usize) -> Result<Blob, Failure> {
        let lane = (from, caller.rank);
        let missing = |state: &mut State| {
            state.lanes.get(&lane).is_none_or(|lane| lane.queued.is_empty()).then_some(from)
        };
        let mut state = self.wait(lock(&self.state), caller, missing)?;
        let lane = state.lanes.entry(lane).or_default();
        let Some(blob) = lane.queued.pop_front() else { return Err(Failure::Aborted) };
        lane.taken += 1;
        self.changed.notify_all();
        Ok(blob)
    }

    fn taken(&self, caller: &Caller, to: usize, number: u64) -> Result<(), Failure> {
        let lane = (caller.rank, to);
        let missing =
            |state: &mut State| state.lanes.get(&lane).is_some_and(|lane| lane.taken < number).then_some(to);
        self.wait(lock(&self.state), caller, missing).map(drop)
    }

    fn leave(&self, caller: &Caller) {
        let mut state = lock(&self.state);
        if let Some(left) = state.left.get_mut(caller.rank) {
            *left = true;
        }
        let empty = state.joined.iter().zip(&state.left).all(|(joined, left)| !joined || *left);
        self.changed.notify_all();
        drop(state);
        if empty {
            lock(&HUBS).remove(&caller.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(key: &str, rank: usize, timeout_ms: u64) -> Caller {
        let timeout = Some(Duration::from_millis(timeout_ms));
        Caller { key: key.as_bytes().into(), rank, timeout }
    }

    #[test]
    fn a_rank_joins_once() {
        let of = |rank| caller("joins", rank, 1);
        assert_eq!(handle(&of(0), Request::Join(2)), Ok(vec![]));
        assert!(matches!(handle(&of(0), Request::Join(2)), Err(Failure::Invalid(_))));
        assert!(matches!(handle(&of(2), Request::Join(2)), Err(Failure::Invalid(_))));
        assert!(matches!(handle(&of(1), Request::Join(3)), Err(Failure::Invalid(_))));
        assert_eq!(handle(&of(0), Request::Leave), Ok(vec![]));
        assert_eq!(handle(&of(0), Request::Leave), Err(Failure::Aborted));
    }

    #[test]
    fn who_is_missing_is_named_and_ends_all() {
        let of = |rank| caller("missing", rank, 20);
        for rank in 0..3 {
            handle(&of(rank), Request::Join(3)).unwrap();
        }
        let blob = Blob::from([1u8]);
        let outcomes = std::thread::scope(|scope| {
            let ranks =
                [0, 2].map(|rank| scope.spawn(move || handle(&of(rank), Request::Exchange([1u8].into()))));
            ranks.map(|rank| rank.join().unwrap())
        });
        assert_eq!(outcomes, [Err(Failure::Timeout { missing: 1 }), Err(Failure::Timeout { missing: 1 })]);
        assert_eq!(handle(&of(1), Request::Exchange(blob)), Err(Failure::Timeout { missing: 1 }));
    }

    #[test]
    fn a_send_waits_for_its_receiver() {
        let of = |rank| caller("sends", rank, 20);
        for rank in 0..2 {
            handle(&of(rank), Request::Join(2)).unwrap();
        }
        let posted = handle(&of(0), Request::Post(1, [7u8].into())).unwrap();
        assert_eq!(posted, [Blob::from(1u64.to_le_bytes())]);
        assert_eq!(handle(&of(1), Request::Take(0)).unwrap(), [Blob::from([7u8])]);
        assert_eq!(handle(&of(0), Request::Taken(1, 1)), Ok(vec![]));
        handle(&of(0), Request::Post(1, [8u8].into())).unwrap();
        handle(&of(1), Request::Leave).unwrap();
        assert_eq!(handle(&of(0), Request::Taken(1, 2)), Err(Failure::Left { rank: 1 }));
        assert_eq!(handle(&of(0), Request::Take(1)), Err(Failure::Left { rank: 1 }));
    }
}
