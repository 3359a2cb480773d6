//! The checked mode: ranks compare their calls on the host.

use hk_core::{Error, Result};
use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Where the ranks of a communicator meet, call by call.
#[derive(Debug)]
pub(crate) struct Meeting {
    rounds: Mutex<Rounds>,
    complete: Condvar,
    timeout: Duration,
}

#[derive(Debug)]
struct Rounds {
    /// Calls that each rank has made.
    made: Vec<usize>,
    /// The number of the first of `open`.
    first: usize,
    /// What each rank asks for in a call that not all have left.
    open: Vec<Round>,
}

#[derive(Debug, Clone)]
struct Round {
    calls: Vec<Option<String>>,
    left: usize,
}

impl Meeting {
    pub fn new(world: usize, timeout: Duration) -> Self {
        let rounds = Rounds { made: vec![0; world], first: 0, open: vec![] };
        Self { rounds: Mutex::new(rounds), complete: Condvar::new(), timeout }
    }

    /// Waits until all ranks are there, and compares what they call.
    pub fn agree(&self, op: &'static str, arg: &'static str, rank: usize, call: String) -> Result<()> {
        let mut rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        let world = rounds.made.len();
        let number = rounds.made[rank];
        rounds.made[rank] += 1;
        while rounds.first + rounds.open.len() <= number {
            rounds.open.push(Round { calls: vec![None; world], left: 0 });
        }
        let first = rounds.first;
        rounds.open[number - first].calls[rank] = Some(call);
        self.complete.notify_all();
        // The round stays until every rank has left it, so its place among the open ones is never negative.
        let waits = |rounds: &mut Rounds| rounds.open[number - rounds.first].calls.contains(&None);
        let (mut rounds, _) = self
            .complete
            .wait_timeout_while(rounds, self.timeout, waits)
            .unwrap_or_else(PoisonError::into_inner);
        let first = rounds.first;
        let round = &mut rounds.open[number - first];
        round.left += 1;
        if let Some(missing) = round.calls.iter().position(Option::is_none) {
            return Err(Error::Timeout { op, rank, missing });
        }
        let calls: Vec<String> = round.calls.iter().flatten().cloned().collect();
        while rounds.open.first().is_some_and(|round| round.left == world) {
            rounds.open.remove(0);
            rounds.first += 1;
        }
        expect_same(op, arg, rank, &calls)
    }
}

/// All ranks call the same.
fn expect_same(op: &'static str, arg: &'static str, rank: usize, calls: &[String]) -> Result<()> {
    let own = calls.get(rank).map_or("", String::as_str);
    match calls.iter().enumerate().find(|(_, call)| **call != own) {
        None => Ok(()),
        Some((other, call)) => {
            let got = format!("{own} on rank {rank}");
            let want = format!("the same on all ranks; rank {other} has {call}");
            Err(Error::Shape { op, arg, got, want })
        }
    }
}

/// Bytes of all ranks for all ranks.
pub(crate) type AllGather = dyn FnMut(&[u8]) -> Result<Vec<Vec<u8>>> + Send;

/// Where ranks of several processes meet.
pub(crate) struct Exchange {
    world: usize,
    all_gather: Mutex<Box<AllGather>>,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Exchange")
    }
}

impl Exchange {
    pub fn new(world: usize, all_gather: Box<AllGather>) -> Self {
        Self { world, all_gather: Mutex::new(all_gather) }
    }

    /// The bytes of ranks 0, 1, ..
    pub fn all(&self, op: &'static str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut all_gather = self.all_gather.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all_gather(bytes).map_err(|error| match error {
            Error::Timeout { rank, missing, .. } => Error::Timeout { op, rank, missing },
            other => other,
        })?;
        if all.len() != self.world {
            let got = format!("bytes of {} ranks", all.len());
            return Err(Error::argument(op, "all_gather", got, format!("those of {} ranks", self.world)));
        }
        Ok(all)
    }

    /// As [`Meeting::agree`].
    pub fn agree(&self, op: &'static str, arg: &'static str, rank: usize, call: &str) -> Result<()> {
        let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
        let calls: Vec<String> = self.all(op, call.as_bytes())?.iter().map(text).collect();
        expect_same(op, arg, rank, &calls)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meet(calls: [&'static str; 2], times: usize) -> Vec<Result<()>> {
        let meeting = &Meeting::new(2, Duration::from_secs(20));
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                scope.spawn(move || {
                    (0..times).map(|_| meeting.agree("op", "x", rank, calls[rank].into())).last()
                })
            });
            let last = ranks.map(|rank| rank.join().expect("no panic").expect("a call"));
            let rounds = meeting.rounds.lock().expect("no panic");
            assert!(rounds.open.is_empty() && rounds.first == times, "{rounds:?}");
            last.into()
        })
    }

    #[test]
    fn all_ranks_see_that_they_differ() {
        assert_eq!(meet(["f32 [4]", "f32 [4]"], 100), [Ok(()), Ok(())]);
        for (rank, result) in meet(["f32 [4]", "f32 [8]"], 1).into_iter().enumerate() {
            let text = result.expect_err("they differ").to_string();
            assert!(
                text.contains(&format!("on rank {rank}")) && text.contains(&format!("rank {} has", 1 - rank)),
                "{text}"
            );
        }
    }

    #[test]
    fn a_rank_that_does_not_call_is_named() {
        let meeting = Meeting::new(2, Duration::from_millis(10));
        let timeout = Err(Error::Timeout { op: "op", rank: 1, missing: 0 });
        assert_eq!(meeting.agree("op", "x", 1, "f32".into()), timeout);
        assert_eq!(meeting.agree("op", "x", 1, "f32".into()), timeout);
    }
}
