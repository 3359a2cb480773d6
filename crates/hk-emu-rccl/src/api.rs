//! The exported functions.

use crate::comm::{self, Code, Comm, Fault, Result, Scalar, argument, lock, report, runtime};
use hk_emu_comm::{Call, DataType, Kind, Reduction, UniqueId};
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// 2.22.3.
const VERSION: c_int = 22_203;
/// Reductions without a scalar.
const PLAIN: c_int = 5;
const MAGIC: u32 = 0xcafe_beef;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; UniqueId::BYTES]);

/// The first fields of `ncclConfig_t`, which all versions have.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// Defines exported functions that return `ncclResult_t`, and the list of their names.
macro_rules! api {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $type),*) -> c_int {
                let panicked = || Fault(Code::INTERNAL, "a panic".into());
                let result: Result = catch_unwind(AssertUnwindSafe(|| $body)).unwrap_or_else(|_| Err(panicked()));
                match result {
                    Ok(()) => Code::SUCCESS.0,
                    Err(Fault(code, text)) => report(Fault(code, format!("{}: {text}", stringify!($name)))),
                }
            }
        )*

        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

/// Writes through a pointer of the program.
fn put<T>(to: *mut T, name: &str, value: T) -> Result {
    if to.is_null() {
        return argument(format!("{name} is null"));
    }
    // SAFETY: the program promises that it is valid.
    unsafe { to.write(value) };
    Ok(())
}

fn data_type(comm: &Comm, code: c_int) -> Result<DataType> {
    DataType::from_code(code, comm.fnuz).map_or_else(|| argument(format!("datatype {code}")), Ok)
}

fn reduction(comm: &Comm, op: c_int) -> Result<Reduction> {
    Ok(match op {
        0 => Reduction::Sum,
        1 => Reduction::Prod,
        2 => Reduction::Max,
        3 => Reduction::Min,
        4 => Reduction::Avg,
        _ => {
            let at = usize::try_from(op - PLAIN).ok();
            match at.and_then(|at| lock(&comm.scalars).get(at).copied().flatten()) {
                Some(Scalar::Value(value)) => Reduction::PreMulSum(value),
                Some(Scalar::Device(addr, data)) => {
                    let mut bytes = vec![0; data.size_bytes()];
                    runtime()?.read(comm.copies, addr, &mut bytes).map_err(|why| Fault(Code::HIP, why))?;
                    Reduction::PreMulSum(data.scalar(&bytes).unwrap_or(1.0))
                }
                None => return argument(format!("op {op}")),
            }
        }
    })
}

fn rank_of(comm: &Comm, rank: c_int, name: &str) -> Result<usize> {
    let world = comm.joined()?.world();
    let known = usize::try_from(rank).ok().filter(|&rank| rank < world);
    known.map_or_else(|| argument(format!("{name} {rank} of {world} ranks")), Ok)
}

/// A call on a stream. `kind` may look at the communicator.
fn call(
    handle: usize,
    (send, recv): (u64, u64),
    count: usize,
    data: c_int,
    stream: usize,
    kind: impl FnOnce(&Comm) -> Result<Kind>,
) -> Result {
    let comm: Arc<Comm> = Comm::find(handle)?;
    let rank = comm.joined()?.rank();
    let (kind, data) = (kind(&comm)?, data_type(&comm, data)?);
    let (reads, writes) = match kind {
        Kind::Send(_) => (true, false),
        Kind::Recv(_) => (false, true),
        Kind::Reduce(_, root) => (true, root == rank),
        Kind::Broadcast(root) => (root == rank, true),
        _ => (true, true),
    };
    if count > 0 && (reads && send == 0 || writes && recv == 0) {
        return argument("a buffer is null");
    }
    comm::call(comm, stream, Call { kind, send, recv, count, data })
}

fn color(color: c_int) -> Result<Option<u32>> {
    match color {
        -1 => Ok(None),
        color => u32::try_from(color).map_or_else(|_| argument(format!("color {color}")), |c| Ok(Some(c))),
    }
}

/// Whether calls wait: `config` may be null.
fn blocking(config: *const Config) -> Result<bool> {
    if config.is_null() {
        return Ok(true);
    }
    // SAFETY: the program promises that it is a configuration.
    let config = unsafe { &*config };
    if config.magic != MAGIC || config.size < size_of::<Config>() {
        return argument("config has not been initialized");
    }
    Ok(config.blocking != 0)
}

fn join(to: *mut usize, world: c_int, id: Id, rank: c_int, blocking: bool) -> Result {
    put(to, "comm", 0)?;
    let (Ok(world), Ok(rank)) = (usize::try_from(world), usize::try_from(rank)) else {
        return argument(format!("rank {rank} of {world}"));
    };
    if rank >= world {
        return argument(format!("rank {rank} of {world}"));
    }
    let (handle, joined) = comm::join(UniqueId::from_bytes(id.0)?, world, rank, blocking)?;
    put(to, "comm", handle)?;
    joined.inspect_err(|fault| {
        if fault.0 != Code::IN_PROGRESS {
            // A handle that is not joined would be of no use.
            let _ = Comm::remove(handle);
        }
    })
}

api! {
    fn ncclGetVersion(version: *mut c_int) { put(version, "version", VERSION) }
    fn ncclGetUniqueId(id: *mut Id) { put(id, "uniqueId", Id(UniqueId::new()?.to_bytes())) }

    fn ncclCommInitRank(comm: *mut usize, world: c_int, id: Id, rank: c_int) {
        join(comm, world, id, rank, true)
    }

    fn ncclCommInitRankConfig(comm: *mut usize, world: c_int, id: Id, rank: c_int, config: *const Config) {
        join(comm, world, id, rank, blocking(config)?)
    }

    fn ncclCommInitAll(comms: *mut usize, count: c_int, devices: *const c_int) {
        if comms.is_null() || count < 1 {
            return argument("comm is null, or ndev below 1");
        }
        let (hip, id) = (runtime()?, Id(UniqueId::new()?.to_bytes()));
        let hip_error = |why| Fault(Code::HIP, why);
        let before = hip.device().map_err(hip_error)?;
        comm::start_group();
        let each = |rank: c_int| {
            // SAFETY: the program promises as many devices and handles.
            let (device, to) = unsafe {
                let device = if devices.is_null() { rank } else { *devices.add(rank as usize) };
                (device, comms.add(rank as usize))
            };
            hip.set_device(device).map_err(hip_error)?;
            join(to, count, id, rank, true)
        };
        let made = (0..count).try_for_each(each);
        let ended = comm::end_group();
        hip.set_device(before).map_err(hip_error)?;
        made.and(ended)
    }

    fn ncclCommSplit(comm: usize, of: c_int, key: c_int, new: *mut usize, config: *const Config) {
        blocking(config)?;
        put(new, "newcomm", 0)?;
        put(new, "newcomm", comm::split(&*Comm::find(comm)?, color(of)?, key)?.unwrap_or(0))
    }

    fn ncclCommFinalize(comm: usize) { Comm::find(comm).map(drop) }
    fn ncclCommDestroy(comm: usize) { Comm::remove(comm).map(drop) }

    fn ncclCommAbort(comm: usize) {
        Comm::remove(comm)?.abort();
        Ok(())
    }

    fn ncclCommGetAsyncError(comm: usize, error: *mut c_int) {
        put(error, "asyncError", Comm::find(comm)?.state.load(Ordering::Acquire))
    }

    fn ncclCommCount(comm: usize, count: *mut c_int) {
        put(count, "count", Comm::find(comm)?.joined()?.world() as c_int)
    }

    fn ncclCommUserRank(comm: usize, rank: *mut c_int) {
        put(rank, "rank", Comm::find(comm)?.joined()?.rank() as c_int)
    }

    fn ncclCommCuDevice(comm: usize, device: *mut c_int) { put(device, "device", Comm::find(comm)?.device) }

    fn ncclGroupStart() {
        comm::start_group();
        Ok(())
    }

    fn ncclGroupEnd() { comm::end_group() }

    fn ncclRedOpCreatePreMulSum(op: *mut c_int, scalar: *const u8, data: c_int, residence: c_int, comm: usize) {
        let comm = Comm::find(comm)?;
        let data = data_type(&comm, data)?;
        if scalar.is_null() {
            return argument("scalar is null");
        }
        let scalar = match residence {
            0 => Scalar::Device(scalar as usize as u64, data),
            1 => {
                // SAFETY: the program promises an element on the host.
                let bytes = unsafe { std::slice::from_raw_parts(scalar, data.size_bytes()) };
                Scalar::Value(data.scalar(bytes).unwrap_or(1.0))
            }
            other => return argument(format!("residence {other}")),
        };
        let mut scalars = lock(&comm.scalars);
        let free = scalars.iter().position(Option::is_none);
        let at = free.unwrap_or(scalars.len());
        put(op, "op", PLAIN + at as c_int)?;
        match scalars.get_mut(at) {
            Some(place) => *place = Some(scalar),
            None => scalars.push(Some(scalar)),
        }
        Ok(())
    }

    fn ncclRedOpDestroy(op: c_int, comm: usize) {
        let comm = Comm::find(comm)?;
        let mut scalars = lock(&comm.scalars);
        let made = usize::try_from(op - PLAIN).ok().and_then(|at| scalars.get_mut(at)?.take());
        made.map_or_else(|| argument(format!("op {op}")), |_| Ok(()))
    }

    fn ncclAllReduce(x: u64, y: u64, count: usize, data: c_int, op: c_int, comm: usize, stream: usize) {
        call(comm, (x, y), count, data, stream, |comm| Ok(Kind::AllReduce(reduction(comm, op)?)))
    }

    fn ncclReduce(x: u64, y: u64, count: usize, data: c_int, op: c_int, root: c_int, comm: usize, stream: usize) {
        call(comm, (x, y), count, data, stream, |comm| {
            Ok(Kind::Reduce(reduction(comm, op)?, rank_of(comm, root, "root")?))
        })
    }

    fn ncclBroadcast(x: u64, y: u64, count: usize, data: c_int, root: c_int, comm: usize, stream: usize) {
        call(comm, (x, y), count, data, stream, |comm| Ok(Kind::Broadcast(rank_of(comm, root, "root")?)))
    }

    fn ncclBcast(buffer: u64, count: usize, data: c_int, root: c_int, comm: usize, stream: usize) {
        let both = (buffer, buffer);
        call(comm, both, count, data, stream, |comm| Ok(Kind::Broadcast(rank_of(comm, root, "root")?)))
    }

    fn ncclAllGather(x: u64, y: u64, count: usize, data: c_int, comm: usize, stream: usize) {
        call(comm, (x, y), count, data, stream, |_| Ok(Kind::AllGather))
    }

    fn ncclReduceScatter(x: u64, y: u64, count: usize, data: c_int, op: c_int, comm: usize, stream: usize) {
        call(comm, (x, y), count, data, stream, |comm| Ok(Kind::ReduceScatter(reduction(comm, op)?)))
    }

    fn ncclAllToAll(x: u64, y: u64, count: usize, data: c_int, comm: usize, stream: usize) {
        call(comm, (x, y), count, data, stream, |_| Ok(Kind::AllToAll))
    }

    fn ncclSend(x: u64, count: usize, data: c_int, peer: c_int, comm: usize, stream: usize) {
        call(comm, (x, 0), count, data, stream, |comm| Ok(Kind::Send(rank_of(comm, peer, "peer")?)))
    }

    fn ncclRecv(y: u64, count: usize, data: c_int, peer: c_int, comm: usize, stream: usize) {
        call(comm, (0, y), count, data, stream, |comm| Ok(Kind::Recv(rank_of(comm, peer, "peer")?)))
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"no error",
        1 => c"unhandled HIP error",
        2 => c"unhandled system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited, left or aborted",
        7 => c"in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// Why the last call failed, of any communicator. The text stays until the next call of this thread.
#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_comm: *mut c_void) -> *const c_char {
    thread_local!(static TEXT: RefCell<CString> = RefCell::default());
    let text = CString::new(comm::last().replace('\0', " ")).unwrap_or_default();
    TEXT.with_borrow_mut(|kept| {
        *kept = text;
        kept.as_ptr()
    })
}

/// Exported functions that return something else than a code.
pub(crate) const MORE_NAMES: &[&str] = &["ncclGetErrorString", "ncclGetLastError"];
