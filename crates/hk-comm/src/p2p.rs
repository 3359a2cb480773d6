//! Communicators of ranks that access each other's memory.

use crate::kernels::peers::{Addresses, Comm};
use crate::meeting::Meeting;
use hk_core::{Device, DeviceBuffer, Error, Launch, LaunchConfig, Result, Stream};
use std::sync::Arc;
use std::time::Duration;

/// Constants of `hip/peers.h`.
const MAX_RANKS: usize = 8;
const MAX_BLOCKS: usize = 128;
pub(crate) const THREADS: usize = 512;
/// Bytes of one access.
pub(crate) const PACKET: usize = 16;

/// How an all-reduce moves its data, `S` bytes for each of `w` ranks. Both give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// One-shot below 512 KiB (256 KiB for 8 ranks) and between two ranks, where both forms move as much; else two-shot.
    #[default]
    Auto,
    /// Every rank reads the data of all others: `(w - 1) S` bytes over the links of a rank, one barrier.
    OneShot,
    /// Every rank sums a part of the data, and then reads the other parts: `2 (w - 1) / w S` bytes, two barriers.
    TwoShot,
}

impl Algorithm {
    /// Whether the two-shot form runs.
    pub(crate) fn two_shot(self, world: usize, bytes: usize) -> bool {
        match self {
            Self::Auto => world > 2 && bytes >= if world == 8 { 256 << 10 } else { 512 << 10 },
            Self::OneShot => false,
            Self::TwoShot => true,
        }
    }
}

/// Options of a [`P2pComm`]; the same for all of its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct P2pOptions {
    /// Bytes of a tensor that a launch takes, at most, rounded up to 16 for each rank; larger tensors take several launches. Each rank
    /// has three times as much in staging buffers. At most 32 GiB. Default: 64 MiB.
    pub buffer_bytes: usize,
    /// Blocks of a launch, at most, 1 to 128, which must fit the GPU together with whatever else runs. Default: a block of 512 threads
    /// per compute unit, up to 80.
    pub blocks: Option<usize>,
    /// How long a kernel waits for another rank before the communicator is aborted. Default: 10 s.
    pub timeout: Duration,
    /// Each call waits, on the host, until all ranks have made it, and compares what they ask for: ranks that disagree get an error
    /// in place of unspecified results. For debugging. Default: false.
    pub checked: bool,
}

impl Default for P2pOptions {
    fn default() -> Self {
        Self { buffer_bytes: 64 << 20, blocks: None, timeout: Duration::from_secs(10), checked: false }
    }
}

/// One rank of a communicator whose ranks are GPUs of one node and threads of one process, with access to each other's memory.
///
/// All ranks call the same functions in the same order, with tensors of the same shape, each from whatever thread has the rank.
/// A call returns when its launch is queued; the launches wait for each other on the GPUs. So a rank that does not call leaves the
/// others waiting until [`P2pOptions::timeout`]; their launches then end with unspecified outputs, and
/// [`check`](Self::check) reports which rank was missing.
///
/// The launches of a rank are in order on one stream, that of [`new`](Self::new). They can be captured in a graph and replayed:
/// all state is on the GPUs. Dropping a rank is safe at any time; the memory goes when the last one has been dropped and all
/// queued work is done.
#[derive(Debug)]
pub struct P2pComm {
    rank: usize,
    stream: Stream,
    /// Of all ranks.
    shared: Arc<Vec<Shared>>,
    /// Epochs of the blocks, then the error word.
    state: DeviceBuffer<i32>,
    buffer_bytes: usize,
    blocks: usize,
    ticks: u64,
    /// Where the calls of all ranks are compared.
    meeting: Option<Arc<Meeting>>,
    missing: Option<usize>,
}

/// What the others access of a rank.
#[derive(Debug)]
struct Shared {
    flags: DeviceBuffer<i32>,
    staging: DeviceBuffer<u8>,
}

impl P2pComm {
    /// The ranks of a communicator: rank `r` launches on `streams[r]`.
    ///
    /// # Errors
    /// [`Error::Argument`]: not 1, 2, 4 or 8 streams; two streams of one device; `buffer_bytes` is 0; `blocks` is 0 or above 128.
    /// [`Error::Unsupported`]: devices of different targets, or without peer access to each other.
    /// [`Error::TooLarge`], and the errors of allocations.
    pub fn new(streams: &[Stream], options: &P2pOptions) -> Result<Vec<Self>> {
        const OP: &str = "P2pComm::new";
        let world = streams.len();
        if !matches!(world, 1 | 2 | 4 | MAX_RANKS) {
            return Err(Error::argument(OP, "streams", format!("{world} ranks"), "1, 2, 4 or 8 ranks"));
        }
        let P2pOptions { buffer_bytes, blocks, timeout, checked } = *options;
        let device = |rank: usize| streams[rank].device();
        let most = (0..world).map(|rank| device(rank).info().compute_units as usize).min().unwrap_or(1);
        let blocks = blocks.unwrap_or(most.min(80));
        if !(1..=MAX_BLOCKS).contains(&blocks) {
            return Err(Error::argument(OP, "blocks", blocks, format!("1 to {MAX_BLOCKS}")));
        }
        // Kernels count the packets of a launch in 32 bits.
        let limit = 32 << 30;
        let buffer_bytes = buffer_bytes
            .checked_next_multiple_of(PACKET * world)
            .filter(|&bytes| bytes as u64 <= limit)
            .ok_or_else(|| Error::too_large(OP, "buffer_bytes", format!("{buffer_bytes} bytes"), limit))?;
        if buffer_bytes == 0 {
            return Err(Error::argument(OP, "buffer_bytes", 0, "at least one byte"));
        }
        for (a, b) in (0..world).flat_map(|a| (0..world).map(move |b| (a, b))).filter(|(a, b)| a != b) {
            if device(a) == device(b) {
                let got = format!("ranks {} and {} are both {}", a.min(b), a.max(b), device(a).spec());
                return Err(Error::argument(OP, "streams", got, "one device for each rank"));
            }
            if device(a).arch() != device(b).arch() {
                let what = format!("ranks {a} on {} and {b} on {}", device(a).arch(), device(b).arch());
                return Err(Error::unsupported(OP, what, "all ranks have one target"));
            }
            device(a).enable_peer_access(device(b))?;
        }
        let mut shared = Vec::with_capacity(world);
        for stream in streams {
            // On a stream of its own: the memory is released there, and waits there for the work of all ranks.
            let home = stream.device().create_stream()?;
            shared.push(Shared {
                flags: home.alloc_shared(MAX_BLOCKS * MAX_RANKS)?,
                staging: home.alloc_shared(3 * buffer_bytes)?,
            });
        }
        let shared = Arc::new(shared);
        let meeting = checked.then(|| Arc::new(Meeting::new(world, timeout)));
        let rank = |(rank, stream): (usize, &Stream)| {
            let state = stream.alloc_zeroed(MAX_BLOCKS + 1)?;
            let ticks = ticks(stream.device(), timeout);
            let (stream, shared) = (stream.clone(), Arc::clone(&shared));
            let meeting = meeting.clone();
            let comm =
                Self { rank, stream, shared, state, buffer_bytes, blocks, ticks, meeting, missing: None };
            // From here on a capture may use the memory.
            comm.comm(&mut comm.stream.launch(OP))?;
            Ok(comm)
        };
        streams.iter().enumerate().map(rank).collect()
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.shared.len()
    }

    /// The stream of this rank's launches.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Bytes of a tensor that a launch takes, at most.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// Waits for the launches so far, and says whether all ranks took part in them.
    ///
    /// # Errors
    /// [`Error::Timeout`] if one was missing: the outputs since then are unspecified, and the communicator serves no more. The
    /// failure of other work on the stream.
    pub fn check(&mut self) -> Result<()> {
        const OP: &str = "P2pComm::check";
        self.expect_alive(OP)?;
        let state = self.stream.download(&self.state)?;
        self.missing = usize::try_from(state[MAX_BLOCKS]).ok().and_then(|word| word.checked_sub(1));
        self.expect_alive(OP)
    }

    pub(crate) fn expect_alive(&self, op: &'static str) -> Result<()> {
        self.missing.map_or(Ok(()), |missing| Err(Error::Timeout { op, rank: self.rank, missing }))
    }

    /// The communicator is alive, and `stream` is its own.
    pub(crate) fn expect(&self, op: &'static str, stream: &Stream) -> Result<()> {
        self.expect_alive(op)?;
        if *stream != self.stream {
            let got = format!("a stream of {}", stream.device().spec());
            return Err(Error::argument(
                op,
                "stream",
                got,
                format!("the stream of rank {}, on {}", self.rank, self.stream.device().spec()),
            ));
        }
        Ok(())
    }

    /// `total` units in order, in pieces of which each launch takes one: `(first, count)`. A piece has `bytes` bytes of staging for each
    /// unit, and at least one unit.
    pub(crate) fn pieces(&self, total: usize, bytes: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let most = (self.buffer_bytes / bytes).max(1);
        (0..total).step_by(most).map(move |first| (first, most.min(total - first)))
    }

    /// In checked mode: all ranks make the same call.
    pub(crate) fn agree(
        &self,
        op: &'static str,
        arg: &'static str,
        call: impl FnOnce() -> String,
    ) -> Result<()> {
        self.meeting.as_ref().map_or(Ok(()), |meeting| meeting.agree(op, arg, self.rank, call()))
    }

    /// The head of a kernel's parameters.
    pub(crate) fn comm<'a>(&'a self, launch: &mut Launch<'a>) -> Result<Comm> {
        let [mut flags, mut staging] = [[0; MAX_RANKS]; 2];
        for (rank, shared) in self.shared.iter().enumerate() {
            flags[rank] = launch.shared_address("flags", &shared.flags)?;
            staging[rank] = launch.shared_address("staging", &shared.staging)?;
        }
        let epochs = launch.shared_address("state", &self.state)?;
        Ok(Comm {
            flags: Addresses { rank: flags },
            staging: Addresses { rank: staging },
            epochs,
            error: epochs + size_of::<i32>() as u64 * MAX_BLOCKS as u64,
            buffer_bytes: self.buffer_bytes as u64,
            timeout: self.ticks,
            rank: self.rank as u32,
            unused: 0,
        })
    }

    /// A grid for `tiles` of work, the same on every rank: blocks meet those of the same number.
    pub(crate) fn config(&self, tiles: usize) -> LaunchConfig {
        LaunchConfig::grid_1d(tiles.clamp(1, self.blocks))
    }
}

/// Ticks of the constant counter: 100 MHz on AMD GPUs, nanoseconds on NVIDIA's.
fn ticks(device: &Device, time: Duration) -> u64 {
    let per_tick = if device.arch().is_amd() { 10 } else { 1 };
    u64::try_from(time.as_nanos() / per_tick).unwrap_or(u64::MAX)
}

/// The packets of a tensor of `bytes` bytes.
pub(crate) fn packets(op: &'static str, arg: &'static str, bytes: usize) -> Result<usize> {
    if !bytes.is_multiple_of(PACKET) {
        let what = format!("{arg} of {bytes} bytes");
        return Err(Error::unsupported(op, what, format!("tensors are whole packets of {PACKET} bytes")));
    }
    Ok(bytes / PACKET)
}

/// The axis that is split into a part for each rank: `whole` is `part` with `world` times its first axis.
pub(crate) fn expect_parts(
    op: &'static str,
    (part_arg, part): (&'static str, &[usize]),
    (whole_arg, whole): (&'static str, &[usize]),
    world: usize,
) -> Result<()> {
    let want = part.split_first().and_then(|(first, rest)| {
        let mut want = vec![first.checked_mul(world)?];
        want.extend(rest);
        Some(want)
    });
    if want.as_deref() == Some(whole) {
        return Ok(());
    }
    let want = match want {
        Some(want) => format!("{want:?} ({world} ranks, {part_arg} {part:?} of each)"),
        None => format!("an axis that is split into {world} parts"),
    };
    Err(Error::shape(op, whole_arg, whole, want))
}

/// Index of a world size in the kernel tables: 1, 2, 4, 8.
pub(crate) fn world_index(world: usize) -> usize {
    world.trailing_zeros() as usize
}
