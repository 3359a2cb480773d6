//! Communicators, and groups of calls.

use crate::hip::{Hip, hip};
use hk_emu_comm::{Call, Communicator, DataType, Failure, Memory, UniqueId};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// `ncclResult_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub c_int);

impl Code {
    pub const SUCCESS: Self = Self(0);
    pub const HIP: Self = Self(1);
    pub const SYSTEM: Self = Self(2);
    pub const INTERNAL: Self = Self(3);
    pub const INVALID_ARGUMENT: Self = Self(4);
    pub const INVALID_USAGE: Self = Self(5);
    pub const REMOTE: Self = Self(6);
    pub const IN_PROGRESS: Self = Self(7);
}

/// An error code, and the reason for people.
#[derive(Debug, Clone)]
pub(crate) struct Fault(pub Code, pub String);

pub(crate) type Result<T = ()> = std::result::Result<T, Fault>;

pub(crate) fn argument<T>(text: impl Into<String>) -> Result<T> {
    Err(Fault(Code::INVALID_ARGUMENT, text.into()))
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        let code = match failure {
            Failure::Timeout { .. } | Failure::Aborted | Failure::Left { .. } => Code::REMOTE,
            Failure::Mismatch { .. } => Code::INVALID_USAGE,
            Failure::Invalid(_) => Code::INVALID_ARGUMENT,
            Failure::Memory(_) => Code::HIP,
            _ => Code::SYSTEM,
        };
        Self(code, failure.to_string())
    }
}

/// The runtime, or no call can work.
pub(crate) fn runtime() -> Result<&'static Hip> {
    hip().map_err(|why| Fault(Code::HIP, why))
}

/// What a handle names.
pub(crate) struct Comm {
    pub device: c_int,
    pub fnuz: bool,
    /// Of its copies.
    pub copies: usize,
    blocking: bool,
    joined: OnceLock<Communicator>,
    /// `ncclCommGetAsyncError`.
    pub state: AtomicI32,
    /// Reductions with a scalar, by their numbers.
    pub scalars: Mutex<Vec<Option<Scalar>>>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Scalar {
    Value(f64),
    /// Read when a call uses it.
    Device(u64, DataType),
}

static COMMS: Mutex<BTreeMap<usize, Arc<Comm>>> = Mutex::new(BTreeMap::new());

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long ranks are waited for.
fn timeout() -> Option<Duration> {
    let ms = std::env::var("HK_EMU_RCCL_TIMEOUT_MS").ok()?;
    ms.parse().ok().map(Duration::from_millis)
}

impl Comm {
    /// A communicator that is not joined, and its handle.
    fn new(device: c_int, blocking: bool) -> Result<(usize, Arc<Self>)> {
        // No address, and never used again.
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let hip = runtime()?;
        let comm = Arc::new(Self {
            device,
            fnuz: hip.is_gfx942(device),
            copies: on_device(device, || hip.create_stream().map_err(|why| Fault(Code::HIP, why)))?,
            blocking,
            joined: OnceLock::new(),
            state: AtomicI32::new(Code::IN_PROGRESS.0),
            scalars: Mutex::default(),
        });
        let handle = NEXT.fetch_add(1, Ordering::Relaxed) << 4;
        lock(&COMMS).insert(handle, Arc::clone(&comm));
        Ok((handle, comm))
    }

    pub fn find(handle: usize) -> Result<Arc<Self>> {
        let comm = lock(&COMMS).get(&handle).cloned();
        comm.map_or_else(|| argument("comm is no communicator, or one that is destroyed"), Ok)
    }

    pub fn remove(handle: usize) -> Result<Arc<Self>> {
        let comm = lock(&COMMS).remove(&handle);
        comm.map_or_else(|| argument("comm is no communicator, or one that is destroyed"), Ok)
    }

    pub fn joined(&self) -> Result<&Communicator> {
        let none = || Fault(Code::INVALID_USAGE, "the communicator has not been joined yet".into());
        self.joined.get().ok_or_else(none)
    }

    /// Ends waits of all its ranks.
    pub fn abort(&self) {
        if let Some(communicator) = self.joined.get() {
            communicator.abort();
        }
    }

    fn finish(&self, joined: std::result::Result<Communicator, Failure>) -> Result {
        match joined {
            Ok(communicator) => {
                let _ = self.joined.set(communicator);
                self.state.store(Code::SUCCESS.0, Ordering::Release);
                Ok(())
            }
            Err(failure) => {
                let fault = Fault::from(failure);
                self.state.store(fault.0.0, Ordering::Release);
                Err(fault)
            }
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        if let Ok(hip) = runtime() {
            hip.destroy_stream(self.copies);
        }
    }
}

/// Work of a group.
enum Pending {
    Call { comm: Arc<Comm>, stream: usize, call: Call },
    Join(Box<dyn FnOnce() -> Result + Send>, bool),
}

#[derive(Default)]
struct Group {
    depth: usize,
    pending: Vec<Pending>,
}

thread_local!(static GROUP: RefCell<Group> = RefCell::default());

pub(crate) fn start_group() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

pub(crate) fn end_group() -> Result {
    let pending = GROUP.with_borrow_mut(|group| {
        let Some(depth) = group.depth.checked_sub(1) else {
            return Err(Fault(Code::INVALID_USAGE, "no group was started".into()));
        };
        group.depth = depth;
        Ok(if depth == 0 { std::mem::take(&mut group.pending) } else { vec![] })
    })?;
    execute(pending)
}

/// Queues work in the open group, or executes it.
fn add(pending: Pending) -> Result {
    let alone = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(pending);
        }
        group.pending.push(pending);
        None
    });
    alone.map_or(Ok(()), |pending| execute(vec![pending]))
}

fn execute(pending: Vec<Pending>) -> Result {
    let mut in_progress = false;
    let mut joins = vec![];
    let mut batches: Vec<(Arc<Comm>, usize, Vec<Call>)> = vec![];
    for work in pending {
        match work {
            Pending::Join(join, true) => joins.push(join),
            Pending::Join(join, false) => {
                in_progress = true;
                // Its state has the outcome.
                let started = std::thread::Builder::new().spawn(|| join().map_err(report).is_ok());
                started.map_err(|error| Fault(Code::SYSTEM, error.to_string()))?;
            }
            Pending::Call { comm, stream, call } => {
                match batches.iter_mut().find(|(of, on, _)| Arc::ptr_eq(of, &comm) && *on == stream) {
                    Some((.., calls)) => calls.push(call),
                    None => batches.push((comm, stream, vec![call])),
                }
            }
        }
    }
    at_once(joins)?;
    // Those of captured streams are work of their graphs. It is kept: nobody says when the last graph is gone.
    let mut now: Vec<Box<dyn FnOnce() -> Result + Send>> = vec![];
    for (comm, stream, calls) in batches {
        let hip = runtime()?;
        if hip.captures(stream as *mut c_void) {
            let work: &'static Captured = Box::leak(Box::new(Captured { comm, calls }));
            // SAFETY: the work stays.
            let code = unsafe {
                let data = std::ptr::from_ref(work).cast_mut().cast();
                (hip.hipLaunchHostFunc)(stream as *mut c_void, replay, data)
            };
            if code != 0 {
                return Err(Fault(Code::HIP, format!("hipLaunchHostFunc gives {code}")));
            }
        } else {
            now.push(Box::new(move || {
                // The stream's work before is done first.
                let wait = || hip.synchronize(stream as *mut c_void).map_err(|why| Fault(Code::HIP, why));
                on_device(comm.device, wait)?;
                run(&comm, &calls)
            }));
        }
    }
    at_once(now)?;
    if in_progress { Err(Fault(Code::IN_PROGRESS, String::new())) } else { Ok(()) }
}

/// Executes work that may wait for each other: each on a thread, unless it is alone.
fn at_once(mut work: Vec<Box<dyn FnOnce() -> Result + Send>>) -> Result {
    if work.len() < 2 {
        return work.pop().map_or(Ok(()), |work| work());
    }
    let panicked = || Err(Fault(Code::INTERNAL, "a panic".into()));
    std::thread::scope(|scope| {
        let threads: Vec<_> = work.into_iter().map(|work| scope.spawn(work)).collect();
        let results: Vec<Result> =
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| panicked())).collect();
        results.into_iter().collect()
    })
}

struct Captured {
    comm: Arc<Comm>,
    calls: Vec<Call>,
}

/// What a graph calls.
unsafe extern "C" fn replay(data: *mut c_void) {
    // SAFETY: `execute` gave this address, of what stays.
    let captured = unsafe { &*data.cast::<Captured>() };
    if let Err(fault) = run(&captured.comm, &captured.calls) {
        report(fault);
    }
}

/// Memory of the runtime, through a stream.
struct Reach(&'static Hip, usize);

impl Memory for Reach {
    fn read(&self, addr: u64, out: &mut [u8]) -> std::result::Result<(), String> {
        self.0.read(self.1, addr, out)
    }

    fn write(&self, addr: u64, data: &[u8]) -> std::result::Result<(), String> {
        self.0.write(self.1, addr, data)
    }
}

/// Does something with a device as this thread's current one.
fn on_device<T>(device: c_int, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let hip = runtime()?;
    let hip_error = |why| Fault(Code::HIP, why);
    let before = hip.device().map_err(hip_error)?;
    hip.set_device(device).map_err(hip_error)?;
    let result = act();
    hip.set_device(before).map_err(hip_error)?;
    result
}

fn run(comm: &Comm, calls: &[Call]) -> Result {
    let reach = Reach(runtime()?, comm.copies);
    let result = on_device(comm.device, || Ok(comm.joined()?.run(calls, &reach)?));
    if let Err(Fault(code @ (Code::REMOTE | Code::HIP | Code::SYSTEM), _)) = &result {
        comm.state.store(code.0, Ordering::Release);
    }
    result
}

/// A call of a rank, now or in the open group.
pub(crate) fn call(comm: Arc<Comm>, stream: usize, call: Call) -> Result {
    add(Pending::Call { comm, stream, call })
}

/// A rank joins on the current device, now or in the open group; the handle is there at once.
pub(crate) fn join(id: UniqueId, world: usize, rank: usize, blocking: bool) -> Result<(usize, Result)> {
    let device = runtime()?.device().map_err(|why| Fault(Code::HIP, why))?;
    let (handle, comm) = Comm::new(device, blocking)?;
    let work = move || {
        let name = format!("device {device} of process {}", std::process::id());
        comm.finish(Communicator::join(&id, world, rank, &name, timeout()))
    };
    Ok((handle, add(Pending::Join(Box::new(work), blocking))))
}

/// A part of a communicator, if there is one for this rank. Not in a group: it waits for the other ranks.
pub(crate) fn split(comm: &Comm, color: Option<u32>, key: i32) -> Result<Option<usize>> {
    if GROUP.with_borrow(|group| group.depth > 0) {
        return Err(Fault(Code::INVALID_USAGE, "ncclCommSplit in a group".into()));
    }
    let Some(part) = comm.joined()?.split(color, key)? else { return Ok(None) };
    let (handle, made) = Comm::new(comm.device, comm.blocking)?;
    made.finish(Ok(part))?;
    Ok(Some(handle))
}

static LAST: Mutex<String> = Mutex::new(String::new());

/// Says why a call failed, and gives its code.
pub(crate) fn report(fault: Fault) -> c_int {
    let Fault(Code(code), text) = fault;
    if code != Code::IN_PROGRESS.0 {
        eprintln!("hk-emu-rccl: {text}");
        *lock(&LAST) = text;
    }
    code
}

pub(crate) fn last() -> String {
    lock(&LAST).clone()
}
