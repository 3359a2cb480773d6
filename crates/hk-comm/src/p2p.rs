//! Communicators of ranks that access each other's memory.

use crate::kernels::peers::{Addresses, Comm, Split};
use crate::meeting::{Exchange, Meeting};
use hk_core::{Device, DeviceBuffer, Error, Launch, LaunchConfig, Result, SharedHandle, Stream};
use std::mem::ManuallyDrop;
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

impl P2pOptions {
    /// Bytes of a staging buffer, and blocks of a launch, for ranks of which these devices are known here.
    fn resolve<'d>(
        &self,
        op: &'static str,
        world: usize,
        devices: impl Iterator<Item = &'d Device>,
    ) -> Result<(usize, usize)> {
        let most = devices.map(|device| device.info().compute_units as usize).min().unwrap_or(1);
        let blocks = self.blocks.unwrap_or(most.min(80));
        if !(1..=MAX_BLOCKS).contains(&blocks) {
            return Err(Error::argument(op, "blocks", blocks, format!("1 to {MAX_BLOCKS}")));
        }
        // Kernels count the packets of a launch in 32 bits.
        let limit = 32 << 30;
        let buffer_bytes = self
            .buffer_bytes
            .checked_next_multiple_of(PACKET * world)
            .filter(|&bytes| bytes as u64 <= limit)
            .ok_or_else(|| {
                Error::too_large(op, "buffer_bytes", format!("{} bytes", self.buffer_bytes), limit)
            })?;
        if buffer_bytes == 0 {
            return Err(Error::argument(op, "buffer_bytes", 0, "at least one byte"));
        }
        Ok((buffer_bytes, blocks))
    }
}

fn expect_world(op: &'static str, arg: &'static str, world: usize) -> Result<()> {
    if matches!(world, 1 | 2 | 4 | MAX_RANKS) {
        return Ok(());
    }
    Err(Error::argument(op, arg, format!("{world} ranks"), "1, 2, 4 or 8 ranks"))
}

/// What a rank of a process tells the others.
struct Offer {
    /// What is the same on all ranks, as text.
    terms: Vec<u8>,
    blocks: usize,
    /// Of flags and staging.
    handles: [SharedHandle; 2],
}

impl Offer {
    fn terms(device: &Device, options: &P2pOptions) -> Vec<u8> {
        format!("{}, {options:?}", device.arch()).into_bytes()
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.blocks as u64).to_le_bytes().to_vec();
        self.handles.iter().for_each(|handle| bytes.extend(handle.to_bytes()));
        bytes.extend(&self.terms);
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (blocks, rest) = bytes.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (staging, terms) = rest.split_first_chunk()?;
        let handles = [flags, staging].map(|bytes| SharedHandle::from_bytes(*bytes));
        Some(Self { terms: terms.to_vec(), blocks: u64::from_le_bytes(*blocks).try_into().ok()?, handles })
    }
}

/// The bytes of all ranks, none of which has failed. This one tells why if it has.
fn expect_all(
    op: &'static str,
    rank: usize,
    exchange: &Exchange,
    own: std::result::Result<Vec<u8>, String>,
) -> Result<Vec<Vec<u8>>> {
    let message = match own {
        Ok(bytes) => [vec![0], bytes].concat(),
        Err(text) => [vec![1], text.into_bytes()].concat(),
    };
    let theirs = |(other, mut bytes): (usize, Vec<u8>)| {
        if bytes.first() == Some(&0) {
            return Ok(bytes.split_off(1));
        }
        let text = String::from_utf8_lossy(bytes.get(1..).unwrap_or_default()).into_owned();
        Err(Error::Aborted { op, rank, reason: format!("rank {other}: {text}") })
    };
    exchange.all(op, &message)?.into_iter().enumerate().map(theirs).collect()
}

/// One rank of a communicator whose ranks are GPUs of one node, with access to each other's memory: of threads of one process
/// ([`new`](Self::new)), or of a process each ([`join`](Self::join)).
///
/// All ranks call the same functions in the same order, with tensors of the same shape, each from whatever thread has the rank.
/// A call returns when its launch is queued; the launches wait for each other on the GPUs. So a rank that does not call leaves the
/// others waiting until [`P2pOptions::timeout`]; their launches then end with unspecified outputs, and
/// [`check`](Self::check) reports which rank was missing.
///
/// The launches of a rank are in order on one stream, that of [`new`](Self::new). They can be captured in a graph and replayed:
/// all state is on the GPUs. Dropping a rank is safe at any time. The memory goes when the last one has been dropped and all
/// queued work is done; that of a process when it has called [`leave`](Self::leave), or ends.
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
    link: Link,
    checked: bool,
    missing: Option<usize>,
}

/// What the others access of a rank.
#[derive(Debug)]
struct Shared {
    flags: DeviceBuffer<i32>,
    staging: DeviceBuffer<u8>,
}

/// What connects the ranks beside their GPUs.
#[derive(Debug)]
enum Link {
    /// Of threads, where their calls are compared.
    Threads(Arc<Meeting>),
    /// Of processes; the stream is the home of the shared memory.
    Processes(Exchange, Stream),
}

impl Shared {
    fn new(home: &Stream, buffer_bytes: usize) -> Result<Self> {
        Ok(Self {
            flags: home.alloc_shared(MAX_BLOCKS * MAX_RANKS)?,
            staging: home.alloc_shared(3 * buffer_bytes)?,
        })
    }
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
        expect_world(OP, "streams", world)?;
        let device = |rank: usize| streams[rank].device();
        let (buffer_bytes, blocks) = options.resolve(OP, world, streams.iter().map(Stream::device))?;
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
            shared.push(Shared::new(&home, buffer_bytes)?);
        }
        let shared = Arc::new(shared);
        let meeting = Arc::new(Meeting::new(world, options.timeout));
        let rank = |(rank, stream): (usize, &Stream)| {
            let state = stream.alloc_zeroed(MAX_BLOCKS + 1)?;
            let ticks = ticks(stream.device(), options.timeout);
            let (stream, shared) = (stream.clone(), Arc::clone(&shared));
            let (link, checked) = (Link::Threads(Arc::clone(&meeting)), options.checked);
            Self { rank, stream, shared, state, buffer_bytes, blocks, ticks, link, checked, missing: None }
                .ready(OP)
        };
        streams.iter().enumerate().map(rank).collect()
    }

    /// Rank `rank` of `world`, each in a process of its own with a GPU of its own. Waits for the others. `all_gather` gives the bytes of ranks
    /// 0, 1, .. on every rank, as [`Rendezvous::all_gather`](crate::Rendezvous::all_gather) does: the ranks exchange the handles of their memory
    /// through it, in checked mode what they call, and at the end that they [`leave`](Self::leave).
    ///
    /// # Errors
    /// As [`new`](Self::new). [`Error::Argument`] also for a rank that is not below `world`, and options that are not those of another rank.
    /// [`Error::Unsupported`] also if the memory of another rank cannot be opened: GPUs without access to each other, or two ranks of one
    /// process. [`Error::Aborted`]: another rank failed. The errors of `all_gather`.
    pub fn join(
        stream: &Stream,
        world: usize,
        rank: usize,
        options: &P2pOptions,
        all_gather: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>> + Send + 'static,
    ) -> Result<Self> {
        const OP: &str = "P2pComm::join";
        expect_world(OP, "world", world)?;
        if rank >= world {
            return Err(Error::argument(OP, "rank", rank, format!("a rank below {world}")));
        }
        let exchange = Exchange::new(world, Box::new(all_gather));
        let device = stream.device();
        let offer = || {
            let (buffer_bytes, blocks) = options.resolve(OP, world, std::iter::once(device))?;
            // On a stream of its own, as for threads.
            let home = device.create_stream()?;
            let own = Shared::new(&home, buffer_bytes)?;
            let handles = [home.export_shared(&own.flags)?, home.export_shared(&own.staging)?];
            let offer = Offer { terms: Offer::terms(device, options), blocks, handles };
            // From here on another rank may access it, whatever happens on this one.
            Ok((home, ManuallyDrop::new(own), stream.alloc_zeroed(MAX_BLOCKS + 1)?, buffer_bytes, offer))
        };
        let offered: Result<(Stream, _, _, usize, Offer)> = offer();
        let bytes = offered.as_ref().map(|(.., offer)| offer.to_bytes()).map_err(ToString::to_string);
        let all = expect_all(OP, rank, &exchange, bytes);
        let (home, own, state, buffer_bytes, offer) = offered?;
        let offers = all?.into_iter().enumerate().map(|(other, bytes)| {
            let theirs = Offer::from_bytes(&bytes).ok_or_else(|| {
                Error::argument(OP, "all_gather", "other bytes", format!("what rank {other} has given"))
            })?;
            let text = |terms: &[u8]| String::from_utf8_lossy(terms).into_owned();
            if theirs.terms != offer.terms {
                let got = format!("{} on rank {rank}", text(&offer.terms));
                let want = format!("the same on all ranks; rank {other} has {}", text(&theirs.terms));
                return Err(Error::argument(OP, "options", got, want));
            }
            Ok(theirs)
        });
        let offers = offers.collect::<Result<Vec<Offer>>>()?;
        let open = |other: usize, [flags, staging]: &[SharedHandle; 2]| {
            // SAFETY: rank `other` keeps its memory until all have left, or its process ends; a driver keeps what is open.
            let flags = unsafe { home.import_shared(flags) };
            // SAFETY: as above.
            let staging = flags.and_then(|flags| Ok((flags, unsafe { home.import_shared(staging) }?)));
            staging.map(|(flags, staging)| Shared { flags, staging }).map_err(|error| {
                let what =
                    format!("access of rank {rank} on {} to the memory of rank {other}", device.spec());
                Error::unsupported(OP, what, error)
            })
        };
        let others = offers.iter().enumerate().filter(|(other, _)| *other != rank);
        let opened: Result<Vec<Shared>> = others.map(|(other, offer)| open(other, &offer.handles)).collect();
        let met =
            expect_all(OP, rank, &exchange, opened.as_ref().map(|_| vec![]).map_err(ToString::to_string));
        let mut shared = opened?;
        met?;
        shared.insert(rank, ManuallyDrop::into_inner(own));
        let blocks = offers.iter().map(|offer| offer.blocks).min().unwrap_or(offer.blocks);
        let link = Link::Processes(exchange, home);
        let (stream, ticks, checked) = (stream.clone(), ticks(device, options.timeout), options.checked);
        Self {
            rank,
            stream,
            shared: Arc::new(shared),
            state,
            buffer_bytes,
            blocks,
            ticks,
            link,
            checked,
            missing: None,
        }
        .ready(OP)
    }

    /// From here on a capture may use the memory.
    fn ready(self, op: &'static str) -> Result<Self> {
        self.comm(&mut self.stream.launch(op))?;
        Ok(self)
    }

    /// Ends a communicator of processes: waits for the launches so far, and for all ranks to leave, and releases the memory. Without it the memory
    /// of a rank that is dropped stays until its process ends, for the others may still access it. Of threads, as [`check`](Self::check).
    ///
    /// # Errors
    /// As [`check`](Self::check), and those of the `all_gather` of [`join`](Self::join).
    pub fn leave(mut self) -> Result<()> {
        const OP: &str = "P2pComm::leave";
        let checked = self.check();
        let Link::Processes(exchange, home) = &self.link else { return checked };
        let mut shared = Arc::into_inner(std::mem::take(&mut self.shared)).unwrap_or_default();
        let own = (self.rank < shared.len()).then(|| shared.remove(self.rank));
        drop(shared);
        // The memory of the others is closed before they hear of it.
        let left = home.synchronize().and_then(|()| exchange.all(OP, &[]));
        if left.is_err() {
            std::mem::forget(own);
        }
        checked.and(left.map(drop))
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
        if !self.checked {
            return Ok(());
        }
        match &self.link {
            Link::Threads(meeting) => meeting.agree(op, arg, self.rank, call()),
            Link::Processes(exchange, _) => exchange.agree(op, arg, self.rank, &call()),
        }
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

impl Drop for P2pComm {
    /// Processes that have not left may still access this rank's memory.
    fn drop(&mut self) {
        if let Link::Processes(..) = self.link
            && let Some(shared) = Arc::into_inner(std::mem::take(&mut self.shared))
        {
            let own = shared.into_iter().nth(self.rank);
            std::mem::forget(own);
        }
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

/// A tensor that is split into a part for each rank along an axis: `[rows, world, cols]`, in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    pub rows: usize,
    pub cols: usize,
}

/// The axis `dim` is split into a part for each rank: `whole` is `part` with `world` times that axis.
pub(crate) fn expect_parts(
    op: &'static str,
    (part_arg, part): (&'static str, &[usize]),
    (whole_arg, whole): (&'static str, &[usize]),
    dim: usize,
    world: usize,
) -> Result<Parts> {
    let Some(&len) = part.get(dim) else {
        let want = format!("an axis of {part_arg} {part:?}, which is split into {world} parts");
        return Err(Error::argument(op, "dim", dim, want));
    };
    let mut want = part.to_vec();
    let split = len.checked_mul(world);
    want[dim] = split.unwrap_or(usize::MAX);
    if split.is_none() || want != whole {
        let want = format!("{want:?} ({world} ranks, {part_arg} {part:?} of each)");
        return Err(Error::shape(op, whole_arg, whole, want));
    }
    Ok(Parts { rows: part[..dim].iter().product(), cols: part[dim..].iter().product() })
}

impl Parts {
    /// Kernels count the units of a row, and of a launch behind its first one, in 32 bits.
    pub fn expect_narrow<T>(self, op: &'static str, arg: &'static str) -> Result<()> {
        let limit = 1 << 31;
        let bytes = self.cols * size_of::<T>();
        let unit = if bytes.is_multiple_of(PACKET) { PACKET } else { 1 };
        if self.rows > 1 && (bytes / unit) as u64 >= limit {
            return Err(Error::too_large(op, arg, format!("rows of {bytes} bytes"), limit * unit as u64));
        }
        Ok(())
    }

    /// The rows of units of `unit` bytes, from unit `first` of each part on; and the byte at which those rows begin in a tensor with
    /// `between_rows` units between its rows.
    pub fn split<T>(
        self,
        world: usize,
        unit: usize,
        first: usize,
    ) -> (Split, impl Fn(usize) -> u64 + use<T>) {
        let Self { rows, cols } = self;
        let units = cols * size_of::<T>() / unit;
        // A single row of any length is a row of the units that are left.
        let (row, column) = if rows > 1 { (first / units, first % units) } else { (0, 0) };
        let narrow = u32::try_from(units).unwrap_or(u32::MAX);
        let split = Split {
            first: column as u32,
            cols: narrow,
            inverse: u32::MAX / narrow.max(1),
            unused: 0,
            part: units as u64,
            row: (world * units) as u64,
        };
        let skipped = if rows > 1 { 0 } else { first };
        (split, move |between_rows| ((row * between_rows + skipped) * unit) as u64)
    }
}

/// Index of a world size in the kernel tables: 1, 2, 4, 8.
pub(crate) fn world_index(world: usize) -> usize {
    world.trailing_zeros() as usize
}
