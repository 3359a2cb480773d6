//! Collectives that do not end are aborted.

use super::library::Inner;
use super::{Failed, Shared};
use hk_core::{Event, Stream};
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
    stream: Stream,
    timeout: Duration,
}

#[derive(Debug, Default)]
struct Calls {
    started: bool,
    closed: bool,
    /// The thread waits for work, without a time.
    idle: bool,
    /// Since when the library is within a call.
    inside: Option<Instant>,
    /// Calls that are queued, with no event behind them yet: the thread records it, so that callers need not.
    queued: bool,
    /// Behind calls that are queued, and when it was recorded.
    event: Option<(Instant, Event)>,
}

impl Watch {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let interval = (self.timeout / 8).clamp(Duration::from_millis(1), Duration::from_millis(50));
        let mut calls = self.calls();
        loop {
            self.inner.publish();
            while !calls.closed && calls.inside.is_none() && !calls.queued && calls.event.is_none() {
                calls.idle = true;
                calls = self.work.wait(calls).unwrap_or_else(PoisonError::into_inner);
            }
            if calls.closed {
                return;
            }
            calls.idle = false;
            // An event that cannot be asked is of a device that has failed: its calls are not waited for.
            if calls.event.as_ref().is_some_and(|(_, event)| event.query().unwrap_or(true)) {
                calls.event = None;
            }
            if calls.queued && calls.event.is_none() {
                // Not while the stream captures: then it is tried again.
                calls.event = self.stream.record().ok().map(|event| (Instant::now(), event));
                calls.queued = calls.event.is_none();
            }
            let since = calls.event.as_ref().map(|(at, _)| *at).into_iter().chain(calls.inside).min();
            let late = since.is_some_and(|since| since.elapsed() > self.timeout);
            let failed = if late {
                let text = format!("a collective did not end within {:?}: a rank is missing", self.timeout);
                Some(self.inner.missing().map_or(Failed::Aborted(text), Failed::Missing))
            } else {
                self.inner.failure().map(Failed::Aborted)
            };
            if let Some(failed) = failed {
                drop(calls);
                self.shared.fail(failed);
                return self.inner.abort();
            }
            calls = self.work.wait_timeout(calls, interval).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Watchdog {
    pub fn new(inner: &Arc<Inner>, shared: &Arc<Shared>, stream: &Stream, timeout: Duration) -> Self {
        let (inner, shared, stream) = (Arc::clone(inner), Arc::clone(shared), stream.clone());
        let (calls, work) = (Mutex::default(), Condvar::new());
        Self { watch: Arc::new(Watch { calls, work, inner, shared, stream, timeout }) }
    }

    /// A call begins; it ends when what this returns is dropped.
    pub fn enter(&self) -> Inside<'_> {
        let mut calls = self.watch.calls();
        if !calls.started {
            let watch = Arc::clone(&self.watch);
            let thread = std::thread::Builder::new().name("hk-comm watchdog".into());
            calls.started = thread.spawn(move || watch.run()).is_ok();
        }
        calls.inside = Some(Instant::now());
        if calls.idle {
            calls.idle = false;
            self.watch.work.notify_one();
        }
        Inside(&self.watch)
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

impl Inside<'_> {
    /// The call is queued on the stream.
    pub fn queued(&self) {
        self.0.calls().queued = true;
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.calls().inside = None;
    }
}
