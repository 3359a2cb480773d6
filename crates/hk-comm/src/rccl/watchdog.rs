//! Collectives that do not end are aborted.

use super::library::Inner;
use super::{Failed, Shared};
use hk_core::{Event, Stream};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Looks after the calls of a rank from a thread of its own, which it starts with the first one.
#[derive(Debug)]
pub(super) struct Watchdog {
    watch: Arc<Watch>,
}

#[derive(Debug)]
struct Watch {
    calls: Mutex<Calls>,
    /// Signalled when there is something to look after, or no more.
    work: Condvar,
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    timeout: Duration,
}

#[derive(Debug, Default)]
struct Calls {
    started: bool,
    closed: bool,
    /// Since when the library is within a call.
    inside: Option<Instant>,
    /// Behind each call that is queued, and when it was.
    queued: VecDeque<(Instant, Event)>,
    /// When the last one was seen to be done.
    progress: Option<Instant>,
}

impl Watch {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let interval = (self.timeout / 8).clamp(Duration::from_millis(1), Duration::from_millis(50));
        let mut calls = self.calls();
        loop {
            while calls.inside.is_none() && calls.queued.is_empty() {
                if calls.closed {
                    return;
                }
                calls = self.work.wait(calls).unwrap_or_else(PoisonError::into_inner);
            }
            calls = self.work.wait_timeout(calls, interval).unwrap_or_else(PoisonError::into_inner).0;
            // An event that cannot be asked is of a device that has failed: its calls are not waited for.
            while calls.queued.front().is_some_and(|(_, event)| event.query().unwrap_or(true)) {
                calls.queued.pop_front();
                calls.progress = Some(Instant::now());
            }
            let waits = calls.queued.front().map(|(at, _)| calls.progress.map_or(*at, |done| done.max(*at)));
            let since = waits.into_iter().chain(calls.inside).min();
            let late = since.is_some_and(|since| since.elapsed() > self.timeout);
            let reason = if late {
                let reason = format!("a collective did not end within {:?}: a rank is missing", self.timeout);
                Some(reason)
            } else {
                self.inner.failure()
            };
            if let Some(reason) = reason {
                calls.queued.clear();
                drop(calls);
                self.shared.fail(Failed::Aborted(reason));
                return self.inner.abort();
            }
        }
    }
}

impl Watchdog {
    pub fn new(inner: &Arc<Inner>, shared: &Arc<Shared>, timeout: Duration) -> Self {
        let (inner, shared) = (Arc::clone(inner), Arc::clone(shared));
        let (calls, work) = (Mutex::default(), Condvar::new());
        Self { watch: Arc::new(Watch { calls, work, inner, shared, timeout }) }
    }

    /// A call begins; it ends when what this returns is dropped.
    pub fn enter(&self) -> Option<Inside<'_>> {
        let mut calls = self.watch.calls();
        if !calls.started {
            let watch = Arc::clone(&self.watch);
            let thread = std::thread::Builder::new().name("hk-comm watchdog".into());
            calls.started = thread.spawn(move || watch.run()).is_ok();
        }
        calls.inside = Some(Instant::now());
        if calls.queued.is_empty() {
            self.watch.work.notify_one();
        }
        Some(Inside(&self.watch))
    }

    /// A call is queued on the stream. One that is captured is not looked after: it is not done until a graph is launched.
    pub fn queued(&self, stream: &Stream) {
        if let Ok(event) = stream.record() {
            self.watch.calls().queued.push_back((Instant::now(), event));
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.watch.calls().closed = true;
        self.watch.work.notify_one();
    }
}

/// The library is within a call.
pub(super) struct Inside<'a>(&'a Watch);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.calls().inside = None;
    }
}
