//! A rank, and what it calls.

use crate::arithmetic::{DataType, Reduction, reduce};
use crate::hub::{self, Caller, Request};
use crate::id::{UniqueId, process};
use crate::{Failure, remote};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A collective, or one end of a transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// `recv = reduce_r(send_r)` on all ranks, `count` elements each.
    AllReduce(Reduction),
    /// The same on rank `root` alone.
    Reduce(Reduction, usize),
    /// `recv` of all ranks is `send` of this one, `count` elements.
    Broadcast(usize),
    /// `recv` has `count` elements of each rank, in the order of the ranks.
    AllGather,
    /// `send` has `count` elements for each rank; `recv` is the reduction of those for this one.
    ReduceScatter(Reduction),
    /// `send` has `count` elements for each rank, `recv` as many of each.
    AllToAll,
    /// `count` elements for a rank.
    Send(usize),
    /// `count` elements of a rank.
    Recv(usize),
}

/// A call of one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Call {
    /// What it does.
    pub kind: Kind,
    /// Address of the input, where there is one.
    pub send: u64,
    /// Address of the output, where there is one. It may overlap with the input: all inputs are read first.
    pub recv: u64,
    /// Elements, as [`Kind`] says.
    pub count: usize,
    /// Their type.
    pub data: DataType,
}

impl Call {
    /// What all ranks agree on.
    fn describe(&self) -> String {
        let &Call { kind, count, data, .. } = self;
        let what = match kind {
            Kind::AllReduce(r) => format!("all_reduce ({})", r.name()),
            Kind::Reduce(r, root) => format!("reduce ({}) to rank {root}", r.name()),
            Kind::Broadcast(root) => format!("broadcast of rank {root}"),
            Kind::AllGather => "all_gather".into(),
            Kind::ReduceScatter(r) => format!("reduce_scatter ({})", r.name()),
            Kind::AllToAll => "all_to_all".into(),
            Kind::Send(_) | Kind::Recv(_) => "a transfer".into(),
        };
        format!("{what} of {count} x {data:?}")
    }

    fn scalar(&self) -> f64 {
        match self.kind {
            Kind::AllReduce(Reduction::PreMulSum(scalar))
            | Kind::Reduce(Reduction::PreMulSum(scalar), _)
            | Kind::ReduceScatter(Reduction::PreMulSum(scalar)) => scalar,
            _ => 1.0,
        }
    }
}

/// Memory that a rank's calls name by address.
pub trait Memory {
    /// Reads bytes.
    ///
    /// # Errors
    /// Why it cannot.
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), String>;
    /// Writes bytes.
    ///
    /// # Errors
    /// Why it cannot.
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), String>;
}

/// What a rank has told.
type Bytes = Arc<[u8]>;

/// A rank of a communicator. Dropping it leaves the communicator.
#[derive(Debug)]
pub struct Communicator {
    caller: Caller,
    /// The process where the ranks meet, unless it is this one.
    elsewhere: Option<[u8; 16]>,
    world: usize,
    splits: AtomicU32,
}

impl Communicator {
    /// Joins as a rank, and waits for the others. `device` names the rank's device: no two ranks have the same. `timeout` is that of
    /// this and all later waits for other ranks.
    ///
    /// # Errors
    /// [`Failure::Invalid`] for a rank that is not below `world` or joins twice, another number of ranks than others say, two ranks
    /// of one device; [`Failure::Timeout`], [`Failure::Transport`].
    pub fn join(
        id: &UniqueId,
        world: usize,
        rank: usize,
        device: &str,
        timeout: Option<Duration>,
    ) -> Result<Self, Failure> {
        if rank >= world {
            return Err(Failure::Invalid(format!("rank {rank} of {world}")));
        }
        let elsewhere = Some(id.process()).filter(|of| process().as_ref() != Ok(of));
        let caller = Caller { key: id.number(), rank, timeout };
        let own = Self::enter(caller, elsewhere, world)?;
        let devices = own.ask(Request::Exchange(device.as_bytes().into()))?;
        let first = |device: &Bytes| devices.iter().position(|other| other == device).unwrap_or(0);
        match devices.iter().enumerate().find(|(at, device)| first(device) < *at) {
            None => Ok(own),
            Some((at, both)) => {
                let both_text = String::from_utf8_lossy(both);
                Err(Failure::Invalid(format!("ranks {} and {at} are both on {both_text}", first(both))))
            }
        }
    }

    fn enter(caller: Caller, elsewhere: Option<[u8; 16]>, world: usize) -> Result<Self, Failure> {
        let own = Self { caller, elsewhere, world, splits: AtomicU32::new(0) };
        match own.ask(Request::Join(world)) {
            Ok(_) => Ok(own),
            Err(failure) => {
                // It is no rank that could leave.
                std::mem::forget(own);
                Err(failure)
            }
        }
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.caller.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// A communicator of the ranks with the same color, ordered by `key`, then by rank; none for ranks without color. All ranks call it.
    ///
    /// # Errors
    /// [`Failure::Timeout`], [`Failure::Aborted`], [`Failure::Left`], [`Failure::Transport`].
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Self>, Failure> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let mut own = key.to_le_bytes().to_vec();
        own.extend(color.iter().flat_map(|color| color.to_le_bytes()));
        let all = self.ask(Request::Exchange(own.into()))?;
        let Some(color) = color else { return Ok(None) };
        let of = |(rank, blob): (usize, &Bytes)| {
            let (key, other) = blob.split_first_chunk()?;
            (other == color.to_le_bytes()).then_some((i32::from_le_bytes(*key), rank))
        };
        let mut members: Vec<(i32, usize)> = all.iter().enumerate().filter_map(of).collect();
        members.sort_unstable();
        let Some(rank) = members.iter().position(|(_, rank)| *rank == self.rank()) else { return Ok(None) };
        let mut path = self.caller.key.clone();
        path.extend(number.to_le_bytes());
        path.extend(color.to_le_bytes());
        let caller = Caller { key: path, rank, timeout: self.caller.timeout };
        let own = Self::enter(caller, self.elsewhere, members.len())?;
        own.ask(Request::Exchange([].into()))?;
        Ok(Some(own))
    }

    /// Executes the calls of a group, or a single one, in this order; sends and receives of it do not wait for each other.
    ///
    /// # Errors
    /// [`Failure::Mismatch`] on all ranks that call different things; [`Failure::Memory`] for memory that is not there, of which the
    /// other ranks hear by an abort; [`Failure::Invalid`] for a rank that is not there; [`Failure::Timeout`], [`Failure::Aborted`],
    /// [`Failure::Left`], [`Failure::Transport`].
    pub fn run(&self, calls: &[Call], memory: &dyn Memory) -> Result<(), Failure> {
        let result = self.run_all(calls, memory);
        if let Err(Failure::Memory(_)) = result {
            self.abort();
        }
        result
    }

    fn run_all(&self, calls: &[Call], memory: &dyn Memory) -> Result<(), Failure> {
        for call in calls {
            if let Kind::Broadcast(of) | Kind::Reduce(_, of) | Kind::Send(of) | Kind::Recv(of) = call.kind
                && of >= self.world
            {
                return Err(Failure::Invalid(format!("rank {of} of {}", self.world)));
            }
        }
        let mut posted = vec![];
        for call in calls {
            if let Kind::Send(to) = call.kind {
                let blob = message(call, &read(memory, call.send, bytes(call.count, call.data)?)?);
                let number = self.ask(Request::Post(to, blob.into()))?;
                let number = number.first().and_then(|n| n[..].try_into().ok()).map_or(0, u64::from_le_bytes);
                posted.push((to, number));
            }
        }
        for call in calls {
            match call.kind {
                Kind::Send(_) | Kind::Recv(_) => {}
                _ => self.collective(call, memory)?,
            }
        }
        for call in calls {
            if let Kind::Recv(from) = call.kind {
                let blob = self.ask(Request::Take(from))?.pop();
                let (theirs, _, data) = parts(blob.as_deref().unwrap_or_default());
                self.compare(call, from, &theirs)?;
                memory.write(call.recv, data).map_err(Failure::Memory)?;
            }
        }
        posted.into_iter().try_for_each(|(to, number)| self.ask(Request::Taken(to, number)).map(drop))
    }

    fn compare(&self, call: &Call, other: usize, theirs: &str) -> Result<(), Failure> {
        let own = call.describe();
        if own == theirs {
            return Ok(());
        }
        Err(Failure::Mismatch { rank: self.rank(), own, other, other_call: theirs.to_owned() })
    }

    fn collective(&self, call: &Call, memory: &dyn Memory) -> Result<(), Failure> {
        let (rank, world, size) = (self.rank(), self.world, bytes(call.count, call.data)?);
        let all = bytes(call.count.saturating_mul(world), call.data)?;
        let sent = match call.kind {
            Kind::Broadcast(root) if root != rank => vec![],
            Kind::ReduceScatter(_) | Kind::AllToAll => read(memory, call.send, all)?,
            _ => read(memory, call.send, size)?,
        };
        let blobs = self.ask(Request::Exchange(message(call, &sent).into()))?;
        let messages: Vec<_> = blobs.iter().map(|blob| parts(blob)).collect();
        for (other, (theirs, ..)) in messages.iter().enumerate() {
            self.compare(call, other, theirs)?;
        }
        // The elements of a rank that are for a rank.
        fn slice(data: &[u8], of: usize, size: usize) -> &[u8] {
            data.get(of * size..(of + 1) * size).unwrap_or_default()
        }
        let inputs: Vec<(&[u8], f64)> = messages.iter().map(|(_, scalar, data)| (*data, *scalar)).collect();
        let received = match call.kind {
            Kind::AllReduce(reduction) => reduce(call.data, reduction, &inputs),
            Kind::Reduce(_, root) if root != rank => return Ok(()),
            Kind::Reduce(reduction, _) => reduce(call.data, reduction, &inputs),
            Kind::Broadcast(root) => inputs[root].0.to_vec(),
            Kind::AllGather => inputs.iter().flat_map(|(data, _)| data.iter().copied()).collect(),
            Kind::ReduceScatter(reduction) => {
                let own: Vec<_> =
                    inputs.iter().map(|(data, scalar)| (slice(data, rank, size), *scalar)).collect();
                reduce(call.data, reduction, &own)
            }
            Kind::AllToAll => inputs.iter().flat_map(|(data, _)| slice(data, rank, size)).copied().collect(),
            Kind::Send(_) | Kind::Recv(_) => return Ok(()),
        };
        if received.is_empty() {
            return Ok(());
        }
        memory.write(call.recv, &received).map_err(Failure::Memory)
    }

    /// Ends the waits of all ranks; every later call fails.
    pub fn abort(&self) {
        // Where that fails, the process of the id is gone, and every wait has ended.
        let _ = self.ask(Request::Abort);
    }

    fn ask(&self, request: Request) -> Result<Vec<Bytes>, Failure> {
        match &self.elsewhere {
            None => {
                let lost = |error: std::io::Error| Failure::Transport(error.to_string());
                let blobs = hub::handle(&self.caller, request)?;
                blobs.iter().map(|blob| blob.bytes().map_err(lost)).collect()
            }
            Some(process) => remote::ask(process, &self.caller, &request),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // As for an abort.
        let _ = self.ask(Request::Leave);
    }
}

fn bytes(count: usize, data: DataType) -> Result<usize, Failure> {
    let bytes = count.checked_mul(data.size_bytes()).filter(|&bytes| bytes <= isize::MAX as usize);
    bytes.ok_or_else(|| Failure::Invalid(format!("{count} elements")))
}

fn read(memory: &dyn Memory, addr: u64, bytes: usize) -> Result<Vec<u8>, Failure> {
    let mut data = vec![0; bytes];
    if bytes > 0 {
        memory.read(addr, &mut data).map_err(Failure::Memory)?;
    }
    Ok(data)
}

/// What a rank tells the others: its call, its scalar, its data.
fn message(call: &Call, data: &[u8]) -> Vec<u8> {
    let text = call.describe();
    let mut message = (text.len() as u64).to_le_bytes().to_vec();
    message.extend(text.as_bytes());
    message.extend(call.scalar().to_le_bytes());
    message.extend(data);
    message
}

fn parts(message: &[u8]) -> (String, f64, &[u8]) {
    let split = || {
        let (len, rest) = message.split_first_chunk()?;
        let (text, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        let (scalar, data) = rest.split_first_chunk()?;
        Some((String::from_utf8_lossy(text).into_owned(), f64::from_le_bytes(*scalar), data))
    };
    split().unwrap_or_default()
}
