//! RCCL and NCCL: one C API, opened when it is first used.
//!
//! Communicators with a timeout are non-blocking, as the API calls it: whatever waits for other ranks is polled here. NCCL starts a
//! thread for each of their calls, so those without a timeout are blocking.

use super::group::{Call, Data, Kind, Queued, signature};
use super::progress::Progress;
use super::watchdog::{Inside, Watchdog};
use super::{Engine, Failed, RcclOptions, ReduceOp, Shared, UniqueId};
use hk_core::{
    DType, Device, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Fp8E5M2Fnuz, Result, Stream, bf16, f16,
};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// `ncclComm_t`.
type Raw = *mut c_void;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const IN_PROGRESS: c_int = 7;
/// Of a scalar: read when the call is made.
const HOST_IMMEDIATE: c_int = 1;
const NO_COLOR: c_int = -1;
/// With non-blocking communicators and splits, 2.18.
const OLDEST: c_int = 21_800;
/// The first NCCL with fp8, 2.24. RCCL has it since 2.18.
const NCCL_WITH_FP8: c_int = 22_400;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; UniqueId::BYTES]);

/// `ncclConfig_t` as of 2.18; its first fields say so.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    fn new(timeout: Option<Duration>) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: OLDEST as u32,
            blocking: timeout.is_none().into(),
            // Not said.
            cga_cluster_size: c_int::MIN,
            min_ctas: c_int::MIN,
            max_ctas: c_int::MIN,
            net_name: std::ptr::null(),
            split_share: c_int::MIN,
        }
    }
}

/// Declares the calls that are made, looked up by name.
macro_rules! api {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*) -> $result:ty;)*) => {
        struct Api {
            /// `librccl.so.1`, `libnccl.so.2`.
            name: &'static str,
            version: c_int,
            $($field: unsafe extern "C" fn($($arg),*) -> $result,)*
            _library: Library,
        }

        impl Api {
            /// # Safety
            /// The library has these functions with these types.
            unsafe fn bind(name: &'static str, library: Library) -> Result<Self, libloading::Error> {
                // SAFETY: the caller's promise.
                unsafe { Ok(Self { name, version: 0, $($field: *library.get($symbol)?,)* _library: library }) }
            }
        }
    };
}

api! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> c_int;
    error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
    last_error = "ncclGetLastError": fn(Raw) -> *const c_char;
    get_unique_id = "ncclGetUniqueId": fn(*mut Id) -> c_int;
    init_rank = "ncclCommInitRankConfig": fn(*mut Raw, c_int, Id, c_int, *const Config) -> c_int;
    split = "ncclCommSplit": fn(Raw, c_int, c_int, *mut Raw, *const Config) -> c_int;
    count = "ncclCommCount": fn(Raw, *mut c_int) -> c_int;
    user_rank = "ncclCommUserRank": fn(Raw, *mut c_int) -> c_int;
    finalize = "ncclCommFinalize": fn(Raw) -> c_int;
    destroy = "ncclCommDestroy": fn(Raw) -> c_int;
    abort = "ncclCommAbort": fn(Raw) -> c_int;
    async_error = "ncclCommGetAsyncError": fn(Raw, *mut c_int) -> c_int;
    group_start = "ncclGroupStart": fn() -> c_int;
    group_end = "ncclGroupEnd": fn() -> c_int;
    all_reduce = "ncclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
    reduce = "ncclReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Raw, *mut c_void) -> c_int;
    broadcast = "ncclBroadcast": fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, Raw, *mut c_void) -> c_int;
    reduce_scatter = "ncclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
    recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
    create_scaled_sum = "ncclRedOpCreatePreMulSum": fn(*mut c_int, *const c_void, c_int, c_int, Raw) -> c_int;
    destroy_op = "ncclRedOpDestroy": fn(c_int, Raw) -> c_int;
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}

/// The library for devices of a driver.
fn api(driver: &str) -> Result<&'static Api> {
    static RCCL: Mutex<Option<&'static Api>> = Mutex::new(None);
    static NCCL: Mutex<Option<&'static Api>> = Mutex::new(None);
    let (kept, names, remedy) = match driver {
        "cuda" => (
            &NCCL,
            ["libnccl.so.2", "libnccl.so"],
            "install NCCL 2.18 or later (Debian, Ubuntu: libnccl2 of NVIDIA's repository)",
        ),
        _ => (&RCCL, ["librccl.so.1", "librccl.so"], "install RCCL 2.18 or later (ROCm's package rccl)"),
    };
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(api) = *kept {
        return Ok(api);
    }
    let api: &'static Api = Box::leak(Box::new(open(names, remedy)?));
    *kept = Some(api);
    Ok(api)
}

fn open(names: [&'static str; 2], remedy: &str) -> Result<Api> {
    let missing = |reason: String| Error::Library { library: names[0].into(), reason };
    let mut first = None;
    for name in names {
        // SAFETY: a library of that name is RCCL, or NCCL, whose initialisers may run at any time.
        match unsafe { Library::new(name) } {
            Ok(library) => {
                // SAFETY: the published API of 2.18.
                let api = unsafe { Api::bind(name, library) };
                let mut api = api.map_err(|error| {
                    missing(format!("{name} lacks a function: {}; {remedy}", cause(&error)))
                })?;
                // SAFETY: the version is valid for the write.
                let code = unsafe { (api.get_version)(&mut api.version) };
                if code != SUCCESS || api.version < OLDEST {
                    let version = api.version;
                    return Err(missing(format!("{name} is of version {version}, too old; {remedy}")));
                }
                return Ok(api);
            }
            Err(error) => first = first.or(Some(cause(&error))),
        }
    }
    Err(missing(format!("not found ({}); {remedy}", first.unwrap_or_default())))
}

/// What the loader says.
fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// An error code as an error.
pub(super) fn error(op: &'static str, rank: usize, call: &'static str, code: i32, reason: String) -> Error {
    let name = match code {
        1 => "unhandled error of the GPU's runtime",
        2 => "system error",
        3 => "internal error",
        INVALID_ARGUMENT => "invalid argument",
        INVALID_USAGE => "invalid usage",
        6 => "remote error: a process has left, or the network failed",
        IN_PROGRESS => "in progress",
        _ => "unknown",
    };
    Error::Collective { op, rank, call, code, name: name.into(), reason }
}

impl Api {
    /// What the library says about an error; `raw` may be null.
    fn says(&self, raw: Raw, code: c_int) -> String {
        let text = |text: *const c_char| {
            if text.is_null() {
                return String::new();
            }
            // SAFETY: a string of the library, which stays until the next error.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        // SAFETY: takes any integer, and null or a communicator that is alive.
        let (of_code, last) = unsafe { (text((self.error_string)(code)), text((self.last_error)(raw))) };
        format!("{of_code}: {last}").trim_matches([':', ' ', '\n']).to_owned()
    }
}

/// A new `ncclUniqueId`.
pub(super) fn unique_id(device: &Device) -> Result<[u8; UniqueId::BYTES]> {
    let api = api(device.info().driver)?;
    let mut id = Id([0; UniqueId::BYTES]);
    // SAFETY: valid for the write.
    match unsafe { (api.get_unique_id)(&mut id) } {
        SUCCESS => Ok(id.0),
        code => Err(error("UniqueId::new", 0, "ncclGetUniqueId", code, api.says(null_mut(), code))),
    }
}

/// A rank.
#[derive(Debug)]
pub(super) struct LibraryComm {
    inner: Arc<Inner>,
    watchdog: Option<Watchdog>,
    /// For what happens after the last call.
    stream: Stream,
    /// Of the communicator, the same on all ranks.
    name: String,
    splits: AtomicU32,
}

#[derive(Debug)]
pub(super) struct Inner {
    api: &'static Api,
    /// Null after the abort.
    raw: AtomicPtr<c_void>,
    /// Held during calls: the abort comes between them, unless one is stuck.
    calls: Mutex<()>,
    /// Of the ranks, once this one has its number.
    progress: OnceLock<Progress>,
}

// SAFETY: the library may be called from any thread, one at a time but for the abort.
unsafe impl Send for Inner {}
// SAFETY: as above; `calls` serialises.
unsafe impl Sync for Inner {}

impl Inner {
    fn new(api: &'static Api, raw: Raw) -> Arc<Self> {
        let (raw, calls) = (AtomicPtr::new(raw), Mutex::new(()));
        Arc::new(Self { api, raw, calls, progress: OnceLock::new() })
    }

    /// Tells the other ranks how many collectives this one has called.
    pub fn publish(&self) {
        if let Some(progress) = self.progress.get() {
            progress.publish();
        }
    }

    /// The rank that collectives wait for, where that is known.
    pub fn missing(&self) -> Option<usize> {
        self.progress.get().and_then(Progress::missing)
    }

    fn raw(&self) -> Raw {
        self.raw.load(Ordering::Acquire)
    }

    /// Whatever waits in the library ends. Another thread may be stuck in a call: it gets a second to leave it, and is then
    /// pulled out, for which the library provides.
    pub fn abort(&self) {
        let start = Instant::now();
        let _between = loop {
            match self.calls.try_lock() {
                Ok(guard) => break Some(guard),
                Err(TryLockError::Poisoned(guard)) => break Some(guard.into_inner()),
                Err(TryLockError::WouldBlock) if start.elapsed() > Duration::from_secs(1) => break None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        self.abort_now();
    }

    /// The same, whoever is in a call.
    fn abort_now(&self) {
        let raw = self.raw.swap(null_mut(), Ordering::AcqRel);
        if !raw.is_null() {
            // SAFETY: alive until now, and nobody finds it from here on.
            unsafe { (self.api.abort)(raw) };
        }
    }

    /// The state of the communicator: a code, [`IN_PROGRESS`] while the library still works on a call. The caller holds `calls`.
    fn state(&self) -> c_int {
        let (raw, mut state) = (self.raw(), SUCCESS);
        if raw.is_null() {
            return SUCCESS;
        }
        // SAFETY: alive, as `calls` is held; valid for the write.
        match unsafe { (self.api.async_error)(raw, &mut state) } {
            SUCCESS => state,
            code => code,
        }
    }

    /// What has failed since, if no call is under way.
    pub fn failure(&self) -> Option<String> {
        let _held = self.calls.try_lock().ok()?;
        let state = self.state();
        let failed = !matches!(state, SUCCESS | IN_PROGRESS);
        failed.then(|| format!("code {state}: {}", self.api.says(self.raw(), state)))
    }

    /// Waits until the library has done what a call began. The caller holds `calls`.
    fn settle(&self, op: &'static str, shared: &Shared, call: &'static str, code: c_int) -> Result<()> {
        self.settle_until(op, shared, call, code, || true)
    }

    /// As `settle`, and until the call's result is there: the library may report success before it writes it.
    fn settle_until(
        &self,
        op: &'static str,
        shared: &Shared,
        call: &'static str,
        code: c_int,
        written: impl Fn() -> bool,
    ) -> Result<()> {
        let start = Instant::now();
        let mut code = code;
        while code == IN_PROGRESS || code == SUCCESS && !written() {
            if shared.timeout.is_some_and(|timeout| start.elapsed() > timeout) {
                let text = format!("{call} waited for other ranks in vain");
                shared.fail(self.missing().map_or(Failed::Aborted(text), Failed::Missing));
                self.abort_now();
                break;
            }
            if start.elapsed() > Duration::from_micros(100) {
                std::thread::sleep(Duration::from_micros(50));
            }
            code = self.state();
        }
        shared.expect_alive(op)?;
        match code {
            SUCCESS => Ok(()),
            code => Err(self.error(op, shared, call, code, "")),
        }
    }

    /// An error of a call. But for those of its arguments, the communicator serves no more.
    fn error(&self, op: &'static str, shared: &Shared, call: &'static str, code: c_int, what: &str) -> Error {
        let says = self.api.says(self.raw(), code);
        if !matches!(code, INVALID_ARGUMENT | INVALID_USAGE) {
            shared.fail(Failed::Aborted(format!("{call} failed with code {code}: {says}")));
        }
        let reason = if what.is_empty() { says } else { format!("{says}; {what}") };
        error(op, shared.rank, call, code, reason)
    }
}

impl LibraryComm {
    fn new(inner: Arc<Inner>, name: String, stream: &Stream, shared: &Arc<Shared>) -> Self {
        let watchdog = shared.timeout.map(|timeout| Watchdog::new(&inner, shared, stream, timeout));
        Self { inner, watchdog, stream: stream.clone(), name, splits: AtomicU32::new(0) }
    }

    /// The ranks of `shared`, which are in this process.
    pub fn join(
        op: &'static str,
        streams: &[Stream],
        id: &UniqueId,
        shared: &[Arc<Shared>],
    ) -> Result<Vec<Self>> {
        let Some(first) = streams.first() else { return Ok(vec![]) };
        let api = api(first.device().info().driver)?;
        // A group of the library is begun and ended on one thread, whatever happens between.
        let started = GroupOfCalls::start(op, api)?;
        let name: String = format!("{:016x}", signature(&id.to_bytes()));
        let mut ranks = vec![];
        let mut result = Ok(());
        for (stream, shared) in streams.iter().zip(shared) {
            let mut raw = null_mut();
            let progress = Progress::new(&name, shared.rank, shared.world);
            let join = |_| {
                let (world, rank) = (shared.world as c_int, shared.rank as c_int);
                // SAFETY: the pointers are valid during the call; the device is current.
                Ok(unsafe {
                    (api.init_rank)(&mut raw, world, Id(id.to_bytes()), rank, &Config::new(shared.timeout))
                })
            };
            // SAFETY: nothing is queued.
            let code = unsafe { stream.launch(op).run_foreign(join) };
            if !raw.is_null() {
                let inner = Inner::new(api, raw);
                let _ = inner.progress.set(progress);
                ranks.push(Self::new(inner, name.clone(), stream, shared));
            }
            result = match code {
                Ok(SUCCESS | IN_PROGRESS) => continue,
                Ok(code) => {
                    let says = api.says(null_mut(), code);
                    Err(error(op, shared.rank, "ncclCommInitRankConfig", code, says))
                }
                Err(error) => Err(error),
            };
            break;
        }
        let ended = started.end();
        result?;
        for (rank, shared) in ranks.iter().zip(shared) {
            let _held = rank.inner.calls.lock().unwrap_or_else(PoisonError::into_inner);
            let code = if ended == SUCCESS { rank.inner.state() } else { ended };
            rank.inner.settle(op, shared, "ncclCommInitRankConfig", code)?;
        }
        if ranks.len() != streams.len() {
            let rank = shared.first().map_or(0, |shared| shared.rank);
            return Err(error(op, rank, "ncclCommInitRankConfig", ended, "no communicator".into()));
        }
        ranks.iter().filter_map(|rank| rank.inner.progress.get()).for_each(Progress::joined);
        Ok(ranks)
    }

    pub fn split(
        &self,
        op: &'static str,
        stream: &Stream,
        shared: &Shared,
        color: Option<u32>,
        key: i32,
        options: &RcclOptions,
    ) -> Result<Option<(Arc<Shared>, Self)>> {
        let _held = self.inner.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let api = self.inner.api;
        let color = color.map_or(NO_COLOR, |color| color as c_int);
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        // The library writes it when the ranks have met, from a thread of its own, in its own time: its 8 bytes have to stay.
        let slot = Box::leak(Box::new(AtomicPtr::new(null_mut())));
        let split = |_| {
            // SAFETY: alive, as `calls` is held and `expect_alive` says; the configuration is valid during the call.
            Ok(unsafe {
                (api.split)(self.inner.raw(), color, key, slot.as_ptr(), &Config::new(shared.timeout))
            })
        };
        // SAFETY: nothing is queued.
        let code = unsafe { stream.launch(op).run_foreign(split) }?;
        let written = || color == NO_COLOR || !slot.load(Ordering::Acquire).is_null();
        self.inner.settle_until(op, shared, "ncclCommSplit", code, written)?;
        if color == NO_COLOR {
            return Ok(None);
        }
        let raw = slot.load(Ordering::Acquire);
        let part = Inner::new(api, raw);
        part.settle(op, shared, "ncclCommSplit", IN_PROGRESS)?;
        let (mut world, mut rank) = (0, 0);
        // SAFETY: alive; valid for the writes.
        let code = unsafe {
            match (api.count)(raw, &mut world) {
                SUCCESS => (api.user_rank)(raw, &mut rank),
                code => code,
            }
        };
        if code != SUCCESS {
            return Err(self.inner.error(op, shared, "ncclCommCount", code, ""));
        }
        let shared = Shared::new(rank as usize, world as usize, options);
        let name = format!("{}-{number}-{color}", self.name);
        let _ = part.progress.set(Progress::new(&name, shared.rank, shared.world));
        let comm = Self::new(part, name, stream, &shared);
        Ok(Some((shared, comm)))
    }

    pub fn reduces_fp8(&self) -> bool {
        !self.inner.api.name.contains("nccl.so") || self.inner.api.version >= NCCL_WITH_FP8
    }

    pub fn abort(&self) {
        self.inner.abort();
    }

    /// What has failed in the library.
    pub fn check(&self, op: &'static str, shared: &Shared) -> Result<()> {
        let _held = self.inner.calls.lock().unwrap_or_else(PoisonError::into_inner);
        match self.inner.state() {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.inner.error(op, shared, "ncclCommGetAsyncError", code, "")),
        }
    }

    /// Makes a call, within a group or alone.
    fn issue(&self, queued: Queued) -> Result<()> {
        let Queued { comm, op, launch, call } = queued;
        // SAFETY: a call reads and writes what its tensors have been checked to hold; it ends when all ranks have called, or when
        // the watchdog aborts it.
        let issued = unsafe { launch.run_foreign(|stream| Ok(self.call(&call, comm.world(), stream))) }?;
        let (name, code) = issued;
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => {
                let what = format!("{:?} of {} x {}", call.kind, call.count, call.data.dtype);
                Err(self.inner.error(op, &comm.shared, name, code, &what))
            }
        }
    }

    /// The library's function and what it returned.
    fn call(&self, call: &Call, world: usize, stream: *mut c_void) -> (&'static str, c_int) {
        let (api, raw) = (self.inner.api, self.inner.raw());
        if raw.is_null() {
            return ("ncclCommAbort", INVALID_USAGE);
        }
        let &Call { kind, send, recv, count, data } = call;
        let (x, y) = (send as usize as *const c_void, recv as usize as *mut c_void);
        let code = data.code;
        // SAFETY: the communicator is alive, as `calls` is held; the buffers hold what the call says.
        unsafe {
            match kind {
                Kind::AllReduce(op) => self.reduce(op, data, "ncclAllReduce", |op| {
                    (api.all_reduce)(x, y, count, code, op, raw, stream)
                }),
                Kind::Reduce(op, root) => self.reduce(op, data, "ncclReduce", |op| {
                    (api.reduce)(x, y, count, code, op, root as c_int, raw, stream)
                }),
                Kind::ReduceScatter(op) => self.reduce(op, data, "ncclReduceScatter", |op| {
                    (api.reduce_scatter)(x, y, count, code, op, raw, stream)
                }),
                Kind::Broadcast(root) => {
                    ("ncclBroadcast", (api.broadcast)(x, y, count, code, root as c_int, raw, stream))
                }
                Kind::AllGather => ("ncclAllGather", (api.all_gather)(x, y, count, code, raw, stream)),
                Kind::Send(peer) => ("ncclSend", (api.send)(x, count, code, peer as c_int, raw, stream)),
                Kind::Recv(peer) => ("ncclRecv", (api.recv)(y, count, code, peer as c_int, raw, stream)),
                Kind::AllToAll => {
                    let started = (api.group_start)();
                    if started != SUCCESS {
                        return ("ncclGroupStart", started);
                    }
                    let bytes = count * data.bytes;
                    let mut result = ("ncclSend", SUCCESS);
                    for peer in 0..world {
                        let (x, y) = (x.byte_add(peer * bytes), y.byte_add(peer * bytes));
                        let codes = [
                            ("ncclSend", (api.send)(x, count, code, peer as c_int, raw, stream)),
                            ("ncclRecv", (api.recv)(y, count, code, peer as c_int, raw, stream)),
                        ];
                        let failed = codes.into_iter().find(|(_, c)| !matches!(*c, SUCCESS | IN_PROGRESS));
                        if let Some(failed) = failed {
                            result = failed;
                            break;
                        }
                    }
                    match (api.group_end)() {
                        ended if result.1 == SUCCESS => ("ncclGroupEnd", ended),
                        _ => result,
                    }
                }
            }
        }
    }

    /// A call with a reduction, which may have to be made.
    fn reduce(
        &self,
        op: ReduceOp,
        data: Data,
        name: &'static str,
        call: impl FnOnce(c_int) -> c_int,
    ) -> (&'static str, c_int) {
        let known = match op {
            ReduceOp::Sum => 0,
            ReduceOp::Prod => 1,
            ReduceOp::Max => 2,
            ReduceOp::Min => 3,
            ReduceOp::Avg => 4,
            ReduceOp::PreMulSum(scalar) => {
                let (api, raw) = (self.inner.api, self.inner.raw());
                let (scalar, mut made) = (self::scalar(scalar, data), 0);
                // SAFETY: alive; the pointers are valid during the call, which reads the scalar.
                let code = unsafe {
                    (api.create_scaled_sum)(&mut made, scalar.as_ptr().cast(), data.code, HOST_IMMEDIATE, raw)
                };
                if code != SUCCESS {
                    return ("ncclRedOpCreatePreMulSum", code);
                }
                let code = call(made);
                // SAFETY: made above; calls that use it keep it. There is nobody to tell of a failure.
                unsafe { (api.destroy_op)(made, raw) };
                return (name, code);
            }
        };
        (name, call(known))
    }
}

/// A scalar as an element of that type.
pub(super) fn scalar(value: f32, data: Data) -> [u8; 8] {
    let mut bytes = [0; 8];
    let mut put = |of: &[u8]| bytes[..of.len()].copy_from_slice(of);
    match data.dtype {
        DType::F32 => put(&value.to_ne_bytes()),
        DType::F16 => put(&f16::from_f32(value).to_ne_bytes()),
        DType::Bf16 => put(&<bf16 as Float>::from_f32(value).to_ne_bytes()),
        DType::I8 => put(&(value as i8).to_ne_bytes()),
        DType::I32 => put(&(value as i32).to_ne_bytes()),
        DType::U32 => put(&(value as u32).to_ne_bytes()),
        DType::I64 => put(&(value as i64).to_ne_bytes()),
        DType::Fp8E4M3 => put(&[Fp8E4M3::from_f32_saturating(value).0]),
        DType::Fp8E5M2 => put(&[Fp8E5M2::from_f32_saturating(value).0]),
        DType::Fp8E4M3Fnuz => put(&[Fp8E4M3Fnuz::from_f32_saturating(value).0]),
        DType::Fp8E5M2Fnuz => put(&[Fp8E5M2Fnuz::from_f32_saturating(value).0]),
        _ => put(&[value as u8]),
    }
    bytes
}

/// A group of the library on this thread, which is ended in any case.
struct GroupOfCalls(Option<&'static Api>);

impl GroupOfCalls {
    fn start(op: &'static str, api: &'static Api) -> Result<Self> {
        // SAFETY: a plain call.
        match unsafe { (api.group_start)() } {
            SUCCESS => Ok(Self(Some(api))),
            code => Err(error(op, 0, "ncclGroupStart", code, api.says(null_mut(), code))),
        }
    }

    fn end(mut self) -> c_int {
        // SAFETY: started on this thread.
        self.0.take().map_or(SUCCESS, |api| unsafe { (api.group_end)() })
    }
}

impl Drop for GroupOfCalls {
    fn drop(&mut self) {
        if let Some(api) = self.0.take() {
            // SAFETY: started on this thread.
            unsafe { (api.group_end)() };
        }
    }
}

/// Queues calls of ranks on devices of one driver.
pub(super) fn queue(calls: Vec<Queued>) -> Result<()> {
    // The communicators, once each, with an operation to name.
    let mut comms: Vec<(&LibraryComm, &Shared, &'static str)> = vec![];
    for queued in &calls {
        if let Engine::Library(comm) = &queued.comm.engine
            && !comms.iter().any(|(other, ..)| std::ptr::eq(*other, comm))
        {
            comms.push((comm, &queued.comm.shared, queued.op));
        }
    }
    let Some(&(first, _, op)) = comms.first() else { return Ok(()) };
    let api = first.inner.api;
    let watched: Vec<_> =
        comms.iter().filter_map(|(comm, ..)| Some(comm.watchdog.as_ref()?.enter())).collect();
    let _held: Vec<_> = comms
        .iter()
        .map(|(comm, ..)| comm.inner.calls.lock().unwrap_or_else(PoisonError::into_inner))
        .collect();
    for (comm, ..) in &comms {
        let own =
            |q: &&Queued| matches!(&q.comm.engine, Engine::Library(other) if std::ptr::eq(*comm, other));
        let collectives = calls.iter().filter(own).filter(|q| q.call.kind.is_collective()).count();
        if let Some(progress) = comm.inner.progress.get() {
            progress.call(collectives);
        }
    }
    let group = if calls.len() > 1 { Some(GroupOfCalls::start(op, api)?) } else { None };
    let mut result = Ok(());
    for queued in calls {
        if let Engine::Library(comm) = &queued.comm.engine {
            result = comm.issue(queued);
            if result.is_err() {
                break;
            }
        }
    }
    let ended = group.map_or(SUCCESS, GroupOfCalls::end);
    for (comm, shared, op) in &comms {
        shared.expect_alive(op)?;
        if result.is_ok() {
            let code = if matches!(ended, SUCCESS | IN_PROGRESS) { comm.inner.state() } else { ended };
            result = comm.inner.settle(op, shared, "ncclGroupEnd", code);
        }
    }
    result?;
    watched.iter().for_each(Inside::queued);
    Ok(())
}

impl Drop for LibraryComm {
    /// The end of a communicator waits for its other ranks: on a thread of its own, and not for ever.
    fn drop(&mut self) {
        let inner = Arc::clone(&self.inner);
        let stream = self.stream.clone();
        let end = move || {
            let _held = inner.calls.lock().unwrap_or_else(PoisonError::into_inner);
            let raw = inner.raw.swap(null_mut(), Ordering::AcqRel);
            if raw.is_null() {
                return;
            }
            let (api, start) = (inner.api, Instant::now());
            // SAFETY: alive until here, and nobody else finds it.
            unsafe {
                let mut state = (api.finalize)(raw);
                while state == IN_PROGRESS && start.elapsed() < GRACE {
                    std::thread::sleep(Duration::from_millis(1));
                    if (api.async_error)(raw, &mut state) != SUCCESS {
                        break;
                    }
                }
                if state == SUCCESS {
                    (api.destroy)(raw)
                } else {
                    (api.abort)(raw)
                };
            }
            drop(stream);
        };
        // Without a thread it is leaked: an end that waits here could wait for ever.
        let _ = std::thread::Builder::new().name("hk-comm end".into()).spawn(end);
    }
}

/// For the other ranks to end a communicator, too.
const GRACE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_or_another_says_what_to_do() {
        let error = open(["libhk-absent.so.1", "libhk-absent.so"], "install it").unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Library { .. }), "{text}");
        assert!(text.starts_with("libhk-absent.so.1: not found") && text.ends_with("install it"), "{text}");
        let other = open(["libc.so.6", "libm.so.6"], "install it").unwrap_err().to_string();
        assert!(other.contains("libc.so.6 lacks a function") && other.contains("ncclGetVersion"), "{other}");
    }

    #[test]
    fn every_code_has_a_name() {
        let name = |code| match error("op", 3, "ncclSend", code, "why".into()) {
            Error::Collective { op: "op", rank: 3, call: "ncclSend", code: of, name, .. } if of == code => {
                name
            }
            other => panic!("{other}"),
        };
        let names: std::collections::BTreeSet<_> = (1..=8).map(name).collect();
        assert_eq!(names.len(), 8);
        assert_eq!(name(8), "unknown");
    }

    #[test]
    fn scalars_are_elements() {
        let data = |dtype, code, bytes| Data { dtype, code, bytes };
        assert_eq!(scalar(1.5, data(DType::F32, 7, 4))[..4], 1.5f32.to_ne_bytes());
        assert_eq!(scalar(1.5, data(DType::Bf16, 9, 2))[..2], [0xc0, 0x3f]);
        assert_eq!(scalar(-2.0, data(DType::I64, 4, 8)), (-2i64).to_ne_bytes());
        assert_eq!(scalar(3.0, data(DType::U8, 1, 1))[0], 3);
    }
}
