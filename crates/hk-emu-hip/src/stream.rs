//! Streams and events.

use std::ffi::{c_float, c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use crate::capture::{self, Mark};
use crate::error::{HipError, Result};
use crate::host::{get, put};
use crate::ipc::SharedEvent;
use crate::runtime::{Device, api, lock, runtime};
use crate::time::Stamp;
use crate::work::{self, Work, submit};
use crate::{pool, queue};

/// A stream that the program made.
pub(crate) struct Stream {
    pub device: usize,
    id: u64,
    flags: c_uint,
    priority: c_int,
    /// Compute units that it may use, a bit each; what was asked for, not what is done. Empty: all.
    mask: Vec<u32>,
}

/// When an event was recorded.
type Record = Arc<OnceLock<Stamp>>;

pub(crate) struct Event {
    pub device: usize,
    flags: c_uint,
    /// Its last record, which a command may still have to fill.
    recorded: Mutex<Option<Record>>,
    /// The command that records it, or 0.
    ticket: AtomicU64,
    /// Its place in a capture, if it was recorded on a captured stream.
    mark: Mutex<Option<Mark>>,
    /// The stream that it was recorded on last.
    stream: AtomicU64,
    /// Its records, if other processes can have it.
    pub shared: Option<Arc<SharedEvent>>,
}

/// The stream that a command goes to.
#[derive(Clone, Copy)]
pub(crate) struct StreamRef {
    pub device: &'static Device,
    /// Unique among all streams; 0 is the null stream of its device.
    pub id: u64,
    flags: c_uint,
    priority: c_int,
}

impl StreamRef {
    /// Whether its work is in order with that of the null stream.
    pub fn is_blocking(self) -> bool {
        self.flags & NON_BLOCKING == 0
    }
}

/// `hipStreamLegacy` and `hipStreamPerThread`.
pub(crate) const LEGACY: u64 = 1;
pub(crate) const PER_THREAD: u64 = 2;
const NON_BLOCKING: c_uint = 1;
const LOWEST_PRIORITY: c_int = 1;
const HIGHEST_PRIORITY: c_int = -1;
/// Words of a mask of compute units.
const MAX_MASK: c_uint = 1024;

/// Finds a stream: a handle, 0 for the null stream, or one of the two special values.
///
/// # Errors
/// `hipErrorContextIsDestroyed`, which is HIP's code for a handle that is no stream.
pub(crate) fn stream(handle: u64) -> Result<StreamRef> {
    let runtime = runtime();
    if let 0 | LEGACY | PER_THREAD = handle {
        let id = if handle == PER_THREAD { per_thread_id() } else { 0 };
        return Ok(StreamRef { device: runtime.current()?, id, flags: 0, priority: 0 });
    }
    let stream = runtime.streams.get(handle).ok_or(HipError::CONTEXT_IS_DESTROYED)?;
    let device = runtime.devices.get(stream.device).ok_or(HipError::CONTEXT_IS_DESTROYED)?;
    Ok(StreamRef { device, id: stream.id, flags: stream.flags, priority: stream.priority })
}

/// The null stream of a device.
pub(crate) fn null_of(device: &'static Device) -> StreamRef {
    StreamRef { device, id: 0, flags: 0, priority: 0 }
}

/// Numbers of the threads' own streams: above all that handles have.
fn per_thread_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 55);
    thread_local!(static ID: u64 = NEXT.fetch_add(1, Relaxed));
    ID.with(|id| *id)
}

fn create(handle: *mut u64, flags: c_uint, priority: c_int, mask: Vec<u32>) -> Result {
    let runtime = runtime();
    let device = runtime.current()?;
    device.check()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(HipError::INVALID_VALUE);
    }
    put(handle, 0)?;
    let priority = priority.clamp(HIGHEST_PRIORITY, LOWEST_PRIORITY);
    put(handle, runtime.streams.insert(|id| Stream { device: device.ordinal, id, flags, priority, mask }))
}

fn synchronize(handle: u64) -> Result {
    let stream = stream(handle)?;
    capture::forbid_waiting(stream)?;
    queue::synchronize(stream);
    pool::settle();
    stream.device.check()
}

fn query(handle: u64) -> Result {
    let stream = stream(handle)?;
    capture::forbid_waiting(stream)?;
    if queue::busy(stream) {
        return Err(HipError::NOT_READY);
    }
    stream.device.check()
}

pub(crate) fn event(handle: u64) -> Result<Arc<Event>> {
    runtime().events.get(handle).ok_or(HipError::INVALID_HANDLE)
}

/// Flags of events: blocking, no timing, interprocess, no fence, release to device or system.
const NO_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;
const RELEASE: c_uint = 0x2000_0000 | 0x4000_0000 | 0x8000_0000;

fn create_event(handle: *mut u64, flags: c_uint) -> Result {
    let runtime = runtime();
    let device = runtime.current()?;
    device.check()?;
    // One that other processes may open must have no time.
    let timed = flags & NO_TIMING == 0;
    if flags & !(1 | NO_TIMING | INTERPROCESS | RELEASE) != 0
        || (flags & RELEASE).count_ones() > 1
        || timed && flags & INTERPROCESS != 0
    {
        return Err(HipError::INVALID_VALUE);
    }
    let shared = if flags & INTERPROCESS != 0 { Some(SharedEvent::new()?) } else { None };
    insert_event(handle, device, flags, shared)
}

fn insert_event(handle: *mut u64, device: &Device, flags: c_uint, shared: Option<SharedEvent>) -> Result {
    put(handle, 0)?;
    let event = Event {
        device: device.ordinal,
        flags,
        recorded: Mutex::default(),
        ticket: AtomicU64::new(0),
        mark: Mutex::default(),
        stream: AtomicU64::new(0),
        shared: shared.map(Arc::new),
    };
    put(handle, runtime().events.insert(|_| event))
}

/// An event of another process.
pub(crate) fn open_event(handle: *mut u64, shared: SharedEvent) -> Result {
    insert_event(handle, runtime().current()?, NO_TIMING | INTERPROCESS, Some(shared))
}

/// Records an event after the commands queued on its stream so far.
pub(crate) fn record(handle: u64, on: StreamRef) -> Result {
    let event = event(handle)?;
    if event.device != on.device.ordinal {
        return Err(HipError::INVALID_HANDLE);
    }
    on.device.check()?;
    event.stream.store(on.id, Relaxed);
    let mark = capture::mark(on);
    if mark.is_none() {
        if queue::idle(on) {
            event.pass(on);
        } else {
            let (recorded, record) = (event.clone(), Record::default());
            *lock(&event.recorded) = Some(record.clone());
            let number = event.shared.as_ref().map(|shared| shared.begin());
            let ticket = queue::add(on, &[], move || {
                record.get_or_init(|| Stamp::on(on));
                if let (Some(shared), Some(number)) = (&recorded.shared, number) {
                    shared.end(number);
                }
            });
            event.ticket.store(ticket, Relaxed);
        }
    }
    *lock(&event.mark) = mark;
    Ok(())
}

/// Records an event in a command of a stream that runs.
pub(crate) fn record_here(handle: u64, on: StreamRef) -> Result {
    event(handle)?.pass(on);
    Ok(())
}

/// Records an event on a stream, or adds a node that does.
fn record_with(handle: u64, on: u64, flags: c_uint) -> Result {
    const EXTERNAL: c_uint = 1;
    let on = stream(on)?;
    match flags {
        EXTERNAL if capture::captures(on)? => {
            event(handle)?;
            capture::add(on, Work::Record(handle)).map(drop)
        }
        0 | EXTERNAL => record(handle, on),
        _ => Err(HipError::INVALID_VALUE),
    }
}

impl Event {
    /// It is recorded now.
    fn pass(&self, on: StreamRef) {
        *lock(&self.recorded) = Some(Arc::new(OnceLock::from(Stamp::on(on))));
        self.ticket.store(0, Relaxed);
        if let Some(shared) = &self.shared {
            shared.end(shared.begin());
        }
    }

    fn ticket(&self) -> u64 {
        self.ticket.load(Relaxed)
    }

    fn stamp(&self) -> Option<Stamp> {
        lock(&self.recorded).as_ref()?.get().cloned()
    }

    /// Whether it was recorded, or a command is to do so.
    fn was_recorded(&self) -> bool {
        self.ticket() != 0 || lock(&self.recorded).is_some()
    }

    /// Whether the work before it is done, in any process.
    fn is_done(&self) -> bool {
        queue::is_done(self.ticket()) && self.shared.as_ref().is_none_or(|shared| shared.last().1)
    }

    fn wait(&self) {
        queue::wait(self.ticket());
        if let Some(shared) = &self.shared {
            shared.wait(shared.last().0);
        }
    }

    /// The work before it may have failed.
    fn check(&self) -> Result {
        runtime().device(self.device as c_int)?.check()
    }
}

/// Waits for the work before an event; an event that was never recorded has none.
fn wait_for(handle: u64) -> Result {
    let event = event(handle)?;
    event.wait();
    event.check()
}

/// The same in a command of a stream that runs.
pub(crate) fn wait_here(handle: u64, on: StreamRef) -> Result {
    wait_for(handle)?;
    if let Some(stamp) = event(handle)?.stamp() {
        stamp.wait(on);
    }
    Ok(())
}

fn synchronize_event(handle: u64) -> Result {
    capture::forbid_captured(lock(&event(handle)?.mark).as_ref())?;
    wait_for(handle)?;
    pool::settle();
    Ok(())
}

fn query_event(handle: u64) -> Result {
    let event = event(handle)?;
    capture::forbid_captured(lock(&event.mark).as_ref())?;
    if event.is_done() { event.check() } else { Err(HipError::NOT_READY) }
}

fn wait_event(on: u64, handle: u64, flags: c_uint) -> Result {
    const EXTERNAL: c_uint = 1;
    if handle == 0 {
        return Err(HipError::INVALID_HANDLE);
    }
    let on = stream(on).map_err(|_| HipError::INVALID_HANDLE)?;
    let event = event(handle)?;
    if flags & !EXTERNAL != 0 {
        return Err(HipError::INVALID_VALUE);
    }
    on.device.check()?;
    if flags == EXTERNAL && capture::captures(on)? {
        return capture::add(on, Work::Wait(handle)).map(drop);
    }
    if let Some(mark) = &*lock(&event.mark)
        && capture::join(on, mark)?
    {
        return Ok(());
    }
    // It was recorded before its stream was captured.
    if capture::is_captured(event.stream.load(Relaxed)) {
        return Err(HipError::STREAM_CAPTURE_ISOLATION);
    }
    event.check()?;
    let record = lock(&event.recorded).clone();
    let goes_on = move || {
        if let Some(stamp) = record.as_ref().and_then(|record| record.get()) {
            stamp.wait(on);
        }
    };
    if !queue::is_done(event.ticket()) {
        queue::add(on, &[event.ticket()], goes_on);
    } else if on.device.clock.is_some() {
        if queue::idle(on) {
            goes_on()
        } else {
            queue::add(on, &[], goes_on);
        }
    }
    if let Some(shared) = event.shared.clone()
        && let (record, false) = shared.last()
    {
        queue::add(on, &[], move || shared.wait(record));
    }
    Ok(())
}

/// Calls a function of the program that takes its data.
pub(crate) fn call_host(function: u64, data: u64) {
    // SAFETY: the program has given it as such a function; zero is refused before.
    let function = unsafe { std::mem::transmute::<u64, Option<HostFunction>>(function) };
    if let Some(function) = function {
        // SAFETY: as above.
        unsafe { function(data) };
    }
}

pub(crate) type Callback = unsafe extern "C" fn(stream: u64, status: c_int, data: u64);
pub(crate) type HostFunction = unsafe extern "C" fn(data: u64);

api! {
    fn hipStreamCreate(handle: *mut u64) { create(handle, 0, 0, vec![]) }
    fn hipStreamCreateWithFlags(handle: *mut u64, flags: c_uint) { create(handle, flags, 0, vec![]) }

    fn hipStreamCreateWithPriority(handle: *mut u64, flags: c_uint, priority: c_int) {
        create(handle, flags, priority, vec![])
    }

    fn hipExtStreamCreateWithCUMask(handle: *mut u64, words: c_uint, mask: u64) {
        if words == 0 || mask == 0 || words > MAX_MASK {
            return Err(HipError::INVALID_VALUE);
        }
        let words = (0..words as usize).map(|i| get((mask as *const u32).wrapping_add(i)));
        let mut mask = words.collect::<Result<Vec<u32>>>()?;
        if mask.iter().all(|word| *word == 0) {
            mask.clear();
        }
        create(handle, 0, 0, mask)
    }

    fn hipExtStreamGetCUMask(handle: u64, words: c_uint, mask: *mut u32) {
        let units = stream(handle)?.device.compute_units() as u32;
        if mask.is_null() || words < units.div_ceil(32) {
            return Err(HipError::INVALID_VALUE);
        }
        let own = runtime().streams.get(handle).map(|s| s.mask.clone()).unwrap_or_default();
        for i in 0..units.div_ceil(32) {
            let all = u32::MAX >> 32u32.saturating_sub(units - 32 * i);
            let word = if own.is_empty() { all } else { own.get(i as usize).map_or(0, |word| word & all) };
            put(mask.wrapping_add(i as usize), word)?;
        }
        Ok(())
    }

    fn hipStreamDestroy(handle: u64) {
        if let 0 | LEGACY | PER_THREAD = handle {
            return Err(HipError::INVALID_HANDLE);
        }
        capture::forget_stream(stream(handle)?);
        runtime().streams.remove(handle).map(drop).ok_or(HipError::CONTEXT_IS_DESTROYED)
    }

    fn hipStreamSynchronize(handle: u64) { synchronize(handle) }
    fn hipStreamQuery(handle: u64) { query(handle) }
    fn hipStreamWaitEvent(handle: u64, event: u64, flags: c_uint) { wait_event(handle, event, flags) }

    fn hipStreamGetFlags(handle: u64, flags: *mut c_uint) {
        if handle == 0 {
            return Err(HipError::INVALID_VALUE);
        }
        put(flags, stream(handle)?.flags)
    }

    fn hipStreamGetPriority(handle: u64, priority: *mut c_int) { put(priority, stream(handle)?.priority) }

    fn hipStreamGetDevice(handle: u64, device: *mut c_int) {
        put(device, stream(handle)?.device.ordinal as c_int)
    }

    fn hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        crate::host::put_if(least, LOWEST_PRIORITY)?;
        crate::host::put_if(greatest, HIGHEST_PRIORITY)
    }

    fn hipStreamAddCallback(handle: u64, function: Option<Callback>, data: u64, flags: c_uint) {
        if flags != 0 {
            return Err(HipError::INVALID_VALUE);
        }
        let on = stream(handle)?;
        let function = function.ok_or(HipError::INVALID_VALUE)?;
        on.device.check()?;
        if capture::captures(on)? {
            return Err(HipError::STREAM_CAPTURE_UNSUPPORTED);
        }
        queue::add(on, &[], move || {
            // SAFETY: the program promises that this is such a function.
            unsafe { function(handle, 0, data) };
        });
        Ok(())
    }

    fn hipLaunchHostFunc(handle: u64, function: Option<HostFunction>, data: u64) {
        if handle == 0 {
            capture::forbid_synchronous()?;
        }
        submit(handle, work::host(function, data)?)
    }

    fn hipEventCreate(handle: *mut u64) { create_event(handle, 0) }
    fn hipEventCreateWithFlags(handle: *mut u64, flags: c_uint) { create_event(handle, flags) }
    fn hipEventRecord(handle: u64, on: u64) { record(handle, stream(on)?) }
    fn hipEventRecordWithFlags(handle: u64, on: u64, flags: c_uint) { record_with(handle, on, flags) }
    fn hipEventSynchronize(handle: u64) { synchronize_event(handle) }
    fn hipEventQuery(handle: u64) { query_event(handle) }

    fn hipEventDestroy(handle: u64) {
        if handle == 0 {
            return Err(HipError::INVALID_HANDLE);
        }
        runtime().events.remove(handle).map(drop).ok_or(HipError::CONTEXT_IS_DESTROYED)
    }

    fn hipEventElapsedTime(ms: *mut c_float, start: u64, stop: u64) {
        if ms.is_null() {
            return Err(HipError::INVALID_VALUE);
        }
        let (start, stop) = (event(start)?, event(stop)?);
        if start.device != stop.device || (start.flags | stop.flags) & NO_TIMING != 0 {
            return Err(HipError::INVALID_HANDLE);
        }
        let events = [&start, &stop];
        if events.iter().any(|event| !event.was_recorded()) {
            return Err(HipError::INVALID_HANDLE);
        }
        if !events.iter().all(|event| queue::is_done(event.ticket())) {
            return Err(HipError::NOT_READY);
        }
        let time = |event: &Event| event.stamp().ok_or(HipError::NOT_READY);
        let (from, to) = (time(&start)?, time(&stop)?);
        let device = runtime().device(start.device as c_int)?;
        put(ms, to.ms_since(&from, device)? as c_float)
    }
}

#[unsafe(no_mangle)]
extern "C" fn hipGetStreamDeviceId(handle: u64) -> c_int {
    stream(handle).map_or(-1, |s| s.device.ordinal as c_int)
}

/// Exported functions whose result is no `hipError_t`.
pub(crate) const MORE_NAMES: &[&str] = &["hipGetStreamDeviceId"];
