//! Ranks on emulated devices: the host computes, on the threads of their streams.

use super::group::{Call, Data, Kind, Queued};
use super::{Failed, OP_NEW, RcclOptions, ReduceOp, Shared, UniqueId};
use hk_core::{Arch, Error, HostAccess, Result, Stream};
use hk_emu_comm::{Communicator, DataType, Failure, Memory, Reduction};
use std::cell::RefCell;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct EmulatedComm {
    comm: Arc<Communicator>,
    /// fp8 of gfx942.
    fnuz: bool,
}

impl EmulatedComm {
    pub fn join(streams: &[Stream], id: &UniqueId, shared: &[Arc<Shared>]) -> Result<Vec<Self>> {
        let wrong = |_| Error::argument(OP_NEW, "id", "an id of another library", "one of emulated devices");
        let id = hk_emu_comm::UniqueId::from_bytes(id.to_bytes()).map_err(wrong)?;
        let join = |stream: &Stream, shared: &Shared| {
            let device = format!("{} of process {}", stream.device().spec(), std::process::id());
            let comm = Communicator::join(&id, shared.world, shared.rank, &device, shared.timeout)
                .map_err(|failure| error(OP_NEW, shared, failure))?;
            Ok(Self { comm: Arc::new(comm), fnuz: stream.device().arch() == Arch::Gfx942 })
        };
        let join = &join;
        // Each waits for the others.
        std::thread::scope(|scope| {
            let ranks = streams.iter().zip(shared);
            let ranks: Vec<_> =
                ranks.map(|(stream, shared)| scope.spawn(move || join(stream, shared))).collect();
            let joined = |rank: std::thread::ScopedJoinHandle<'_, Result<Self>>| {
                rank.join().unwrap_or_else(|_| Err(Error::argument(OP_NEW, "id", "a panic", "none")))
            };
            ranks.into_iter().map(joined).collect()
        })
    }

    pub fn split(
        &self,
        op: &'static str,
        shared: &Shared,
        color: Option<u32>,
        key: i32,
        options: &RcclOptions,
    ) -> Result<Option<(Arc<Shared>, Self)>> {
        let part = self.comm.split(color, key).map_err(|failure| error(op, shared, failure))?;
        Ok(part.map(|comm| {
            let shared = Shared::new(comm.rank(), comm.world(), options);
            (shared, Self { comm: Arc::new(comm), fnuz: self.fnuz })
        }))
    }

    pub fn abort(&self) {
        self.comm.abort();
    }

    /// Queues the calls of this rank, which are not empty.
    pub fn queue(&self, shared: &Arc<Shared>, calls: Vec<Queued>) -> Result<()> {
        let own: Vec<_> = calls.iter().map(|queued| self.call(&queued.call)).collect::<Result<_>>()?;
        let (comm, shared) = (Arc::clone(&self.comm), Arc::clone(shared));
        let Some(Queued { op, launch, .. }) = calls.into_iter().next() else { return Ok(()) };
        let work = move |access: &dyn HostAccess| {
            let reach = Reach { access, error: RefCell::default() };
            match comm.run(&own, &reach) {
                Ok(()) => Ok(()),
                Err(Failure::Memory(text)) => {
                    let error = reach.error.into_inner();
                    Err(error.unwrap_or_else(|| Error::argument(op, "x", text, "memory of the device")))
                }
                Err(failure) => Err(error(op, &shared, failure)),
            }
        };
        // SAFETY: a call reads and writes what its tensors have been checked to hold; it ends when all ranks have called, or with
        // the timeout.
        unsafe { launch.run_on_host(Arc::new(work)) }
    }

    fn call(&self, call: &Call) -> Result<hk_emu_comm::Call> {
        let &Call { kind, send, recv, count, data } = call;
        let kind = match kind {
            Kind::AllReduce(op) => hk_emu_comm::Kind::AllReduce(reduction(op, data)),
            Kind::Reduce(op, root) => hk_emu_comm::Kind::Reduce(reduction(op, data), root),
            Kind::Broadcast(root) => hk_emu_comm::Kind::Broadcast(root),
            Kind::AllGather => hk_emu_comm::Kind::AllGather,
            Kind::ReduceScatter(op) => hk_emu_comm::Kind::ReduceScatter(reduction(op, data)),
            Kind::AllToAll => hk_emu_comm::Kind::AllToAll,
            Kind::Send(peer) => hk_emu_comm::Kind::Send(peer),
            Kind::Recv(peer) => hk_emu_comm::Kind::Recv(peer),
        };
        let wrong = || Error::dtype("RcclComm", "x", data.dtype, "a type of the library");
        let data = DataType::from_code(data.code, self.fnuz).ok_or_else(wrong)?;
        Ok(hk_emu_comm::Call { kind, send, recv, count, data })
    }
}

fn reduction(op: ReduceOp, data: Data) -> Reduction {
    match op {
        ReduceOp::Sum => Reduction::Sum,
        ReduceOp::Prod => Reduction::Prod,
        ReduceOp::Max => Reduction::Max,
        ReduceOp::Min => Reduction::Min,
        ReduceOp::Avg => Reduction::Avg,
        ReduceOp::PreMulSum(scalar) => {
            let value = DataType::from_code(data.code, data.dtype.name().ends_with("fnuz"))
                .and_then(|of| of.scalar(&super::library::scalar(scalar, data)[..data.bytes]));
            Reduction::PreMulSum(value.unwrap_or(scalar.into()))
        }
    }
}

/// The memory of a rank. Keeps the error as it came.
struct Reach<'a> {
    access: &'a dyn HostAccess,
    error: RefCell<Option<Error>>,
}

impl Reach<'_> {
    fn keep(&self, result: Result<()>) -> std::result::Result<(), String> {
        result.map_err(|error| {
            let text = error.to_string();
            *self.error.borrow_mut() = Some(error);
            text
        })
    }
}

impl Memory for Reach<'_> {
    fn read(&self, addr: u64, out: &mut [u8]) -> std::result::Result<(), String> {
        self.keep(self.access.read(addr, out))
    }

    fn write(&self, addr: u64, data: &[u8]) -> std::result::Result<(), String> {
        self.keep(self.access.write(addr, data))
    }
}

fn error(op: &'static str, shared: &Shared, failure: Failure) -> Error {
    let rank = shared.rank;
    let code = match failure {
        Failure::Timeout { missing } => {
            shared.fail(Failed::Missing(missing));
            return Error::Timeout { op, rank, missing };
        }
        Failure::Aborted => {
            shared.fail(Failed::Aborted("by another rank".into()));
            return shared.expect_alive(op).err().unwrap_or(Error::Aborted {
                op,
                rank,
                reason: "by another rank".into(),
            });
        }
        Failure::Mismatch { own, other, other_call, .. } => {
            let want = format!("the same on all ranks; rank {other} has {other_call}");
            return Error::Shape { op, arg: "x", got: format!("{own} on rank {rank}"), want };
        }
        Failure::Left { .. } => 6,
        Failure::Invalid(_) => 4,
        _ => 2,
    };
    super::library::error(op, rank, "hk-emu-comm", code, failure.to_string())
}
