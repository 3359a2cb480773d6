//! Commands in flight. Each runs on a thread of the runtime as soon as those are done that it is ordered behind: the last one
//! of its stream; for the null stream those of all blocking streams of its device, and for these the null stream's.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::runtime::lock;
use crate::stream::StreamRef;

/// What a command does.
type Body = Box<dyn FnOnce() + Send>;

/// A command that is not done.
struct Command {
    /// How many others it waits for, and those that wait for it.
    behind: usize,
    before: Vec<u64>,
    /// `None`: the thread that gave it runs it.
    body: Option<Body>,
    stream: Key,
}

/// Device and id of a stream.
type Key = (usize, u64);

/// The last command of a stream.
struct Last {
    ticket: u64,
    blocking: bool,
}

/// Commands by tickets, which count up. One that is not there is done.
#[derive(Default)]
struct Queue {
    tickets: u64,
    commands: HashMap<u64, Command>,
    last: HashMap<Key, Last>,
    ready: VecDeque<(u64, Body)>,
    workers: usize,
    /// Workers that wait, or have not begun.
    idle: usize,
}

static QUEUE: LazyLock<Mutex<Queue>> = LazyLock::new(|| {
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    // SAFETY: the function may be called at any time. Without a place for it, what a program has not waited for ends with it.
    unsafe { atexit(finish_all) };
    Mutex::default()
});
/// Something is ready; something is done.
static READY: Condvar = Condvar::new();
static DONE: Condvar = Condvar::new();

fn queue() -> MutexGuard<'static, Queue> {
    lock(&QUEUE)
}

fn wait_on<'q>(condition: &Condvar, queue: MutexGuard<'q, Queue>) -> MutexGuard<'q, Queue> {
    condition.wait(queue).unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn finish_all() {
    wait_while(|queue| !queue.commands.is_empty());
}

fn key(on: StreamRef) -> Key {
    (on.device.ordinal, on.id)
}

impl Queue {
    /// The commands that the next one of a stream is ordered behind.
    fn order(&self, on: StreamRef) -> impl Iterator<Item = u64> {
        let own = key(on);
        let (null, blocking) = (on.id == 0, on.is_blocking());
        let before = move |other: &Key, last: &Last| {
            *other == own || other.0 == own.0 && (null && last.blocking || blocking && other.1 == 0)
        };
        self.last.iter().filter(move |(other, last)| before(other, last)).map(|(_, last)| last.ticket)
    }

    fn add(&mut self, on: StreamRef, after: &[u64], body: Option<Body>) -> u64 {
        self.tickets += 1;
        let ticket = self.tickets;
        let after = after.iter().copied().filter(|other| self.commands.contains_key(other));
        let behind: HashSet<u64> = self.order(on).chain(after).collect();
        for other in &behind {
            if let Some(command) = self.commands.get_mut(other) {
                command.before.push(ticket);
            }
        }
        let stream = key(on);
        self.last.insert(stream, Last { ticket, blocking: on.is_blocking() });
        self.commands.insert(ticket, Command { behind: behind.len(), before: vec![], body, stream });
        if behind.is_empty() {
            self.release(ticket);
        }
        ticket
    }

    /// A command waits for nothing more.
    fn release(&mut self, ticket: u64) {
        let Some(body) = self.commands.get_mut(&ticket).and_then(|command| command.body.take()) else {
            DONE.notify_all();
            return;
        };
        self.ready.push_back((ticket, body));
        if self.idle >= self.ready.len() {
            READY.notify_one();
        } else if std::thread::Builder::new().name("hip stream".into()).spawn(work).is_ok() {
            self.workers += 1;
            self.idle += 1;
        }
    }

    fn done(&mut self, ticket: u64) {
        let Some(command) = self.commands.remove(&ticket) else { return };
        if self.last.get(&command.stream).is_some_and(|last| last.ticket == ticket) {
            self.last.remove(&command.stream);
        }
        for next in command.before {
            if let Some(other) = self.commands.get_mut(&next) {
                other.behind -= 1;
                if other.behind == 0 {
                    self.release(next);
                }
            }
        }
        DONE.notify_all();
    }
}

/// Runs the next command that is ready, if there is one.
fn step(mut queue: MutexGuard<'static, Queue>) -> (MutexGuard<'static, Queue>, bool) {
    let Some((ticket, body)) = queue.ready.pop_front() else { return (queue, false) };
    drop(queue);
    // A panic is a defect here; its message is on stderr, and streams go on.
    let _ = catch_unwind(AssertUnwindSafe(body));
    queue = self::queue();
    queue.done(ticket);
    (queue, true)
}

/// A worker. It may be blocked by a function of the program: others are started as they are needed.
fn work() {
    let mut queue = queue();
    queue.idle -= 1;
    loop {
        let ran;
        (queue, ran) = step(queue);
        if !ran {
            queue.idle += 1;
            queue = wait_on(&READY, queue);
            queue.idle -= 1;
        }
    }
}

/// Waits until `busy` no longer holds. Without workers, the caller is one.
fn wait_while(busy: impl Fn(&Queue) -> bool) {
    let mut queue = queue();
    while busy(&queue) {
        if queue.workers == 0 {
            let ran;
            (queue, ran) = step(queue);
            if ran {
                continue;
            }
        }
        queue = wait_on(&DONE, queue);
    }
}

/// Adds a command to a stream, behind `after` as well; its ticket.
pub(crate) fn add(on: StreamRef, after: &[u64], body: impl FnOnce() + Send + 'static) -> u64 {
    queue().add(on, after, Some(Box::new(body)))
}

/// Runs a command of a stream in its turn, and waits for that.
pub(crate) fn now<T>(on: StreamRef, run: impl FnOnce() -> T) -> T {
    struct Turn(u64);

    impl Drop for Turn {
        fn drop(&mut self) {
            queue().done(self.0);
        }
    }

    let ticket = {
        let mut queue = queue();
        if queue.order(on).next().is_none() {
            drop(queue);
            return run();
        }
        queue.add(on, &[], None)
    };
    let _turn = Turn(ticket);
    wait_while(|queue| queue.commands.get(&ticket).is_some_and(|command| command.behind > 0));
    run()
}

/// Whether a stream has work in flight; for the null stream, whether any blocking stream of its device has.
pub(crate) fn busy(on: StreamRef) -> bool {
    let queue = queue();
    if on.id == 0 { queue.order(on).next().is_some() } else { queue.last.contains_key(&key(on)) }
}

/// The commands that the next one of a stream is ordered behind.
pub(crate) fn before(on: StreamRef) -> Vec<u64> {
    queue().order(on).collect()
}

/// Whether there are none.
pub(crate) fn idle(on: StreamRef) -> bool {
    queue().order(on).next().is_none()
}

/// Waits until a stream is not [`busy`].
pub(crate) fn synchronize(on: StreamRef) {
    let tickets: Vec<u64> = {
        let queue = queue();
        if on.id == 0 {
            queue.order(on).collect()
        } else {
            queue.last.get(&key(on)).map(|last| last.ticket).into_iter().collect()
        }
    };
    wait_while(|queue| tickets.iter().any(|ticket| queue.commands.contains_key(ticket)));
}

/// Waits for all streams of a device; for those of all devices.
pub(crate) fn synchronize_device(device: Option<usize>) {
    let last = queue().tickets;
    let of_device = |stream: Key| device.is_none_or(|device| stream.0 == device);
    wait_while(|queue| queue.commands.iter().any(|(ticket, c)| *ticket <= last && of_device(c.stream)));
}

pub(crate) fn is_done(ticket: u64) -> bool {
    ticket == 0 || !queue().commands.contains_key(&ticket)
}

pub(crate) fn wait(ticket: u64) {
    if ticket != 0 {
        wait_while(|queue| queue.commands.contains_key(&ticket));
    }
}

/// The last command of a stream that is not done, or 0.
pub(crate) fn last(on: StreamRef) -> u64 {
    queue().last.get(&key(on)).map_or(0, |last| last.ticket)
}

/// Whether the next command of a stream is ordered behind one that is not done.
pub(crate) fn follows(on: StreamRef, ticket: u64) -> bool {
    let queue = queue();
    let last: HashSet<u64> = queue.order(on).collect();
    let mut left = vec![ticket];
    let mut seen = HashSet::new();
    while let Some(ticket) = left.pop() {
        let Some(command) = queue.commands.get(&ticket) else { continue };
        if last.contains(&ticket) {
            return true;
        }
        if seen.insert(ticket) {
            left.extend(&command.before);
        }
    }
    false
}
