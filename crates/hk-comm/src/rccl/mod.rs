//! Communicators of RCCL, of NCCL, or of emulated devices.

mod axes;
#[cfg(feature = "emu")]
mod emulated;
mod group;
mod id;
mod library;
mod norms;
mod progress;
mod watchdog;

pub use group::{Group, ReduceOp};
pub use id::UniqueId;

#[cfg(feature = "emu")]
use emulated::EmulatedComm;
use hk_core::{Element, Error, Result, Stream, TensorView, TensorViewMut};
use library::LibraryComm;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Options of an [`RcclComm`]; the same for all of its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RcclOptions {
    /// How long other ranks are waited for: to join, and in each collective, from when it is queued. After that the communicator is
    /// aborted. On GPUs other work counts that is queued before the collective. `None` waits for ever, and
    /// a call costs the host less: with NCCL some 10 us instead of 60 if it is not part of a graph. Default: 60 s.
    pub timeout: Option<Duration>,
    /// Each collective first compares what the ranks call, through the communicator itself, and waits for that: ranks that disagree
    /// get an error in place of unspecified results. For debugging; not while a graph is captured. Default: false.
    pub checked: bool,
}

impl Default for RcclOptions {
    fn default() -> Self {
        Self { timeout: Some(Duration::from_secs(60)), checked: false }
    }
}

/// One rank of a communicator of RCCL.
///
/// | devices  | library                                              |
/// |----------|------------------------------------------------------|
/// | `hip:N`  | `librccl.so.1`, looked for at the first use          |
/// | `cuda:N` | `libnccl.so.2`, looked for at the first use          |
/// | `emu:..` | none: the host computes, in the order of the streams |
///
/// All ranks call the same functions in the same order, with as many elements of the same dtype, each from whatever thread has the
/// rank. A call returns when its work is queued on the stream of [`new`](Self::new); it can be captured in a graph. Inputs and outputs are
/// contiguous. Several calls that belong together, or the ranks of several devices on one thread, make a [`Group`].
///
/// A rank that does not call leaves the others waiting until [`RcclOptions::timeout`]; their work then ends with unspecified outputs,
/// and this call, or [`check`](Self::check), gives an error. It names the rank if that is on the same host, and behind with its collectives:
/// the library does not know which one is missing, so the ranks tell each other how many they have called. The communicator serves no more; the process and its devices go on. Dropping a
/// rank is safe at any time, and does not block.
///
/// Rounding: the library's, whose order of summation depends on algorithm, size and number of ranks; 16-bit floats may round at every
/// hop. After an all-reduce all ranks have the same bits. On emulated devices sums are `f32` in rank order, rounded once.
///
/// ```
/// use hk_comm::{RcclComm, RcclOptions, ReduceOp};
/// # fn main() -> hk_core::Result<()> {
/// // On a node with GPUs: "hip:0", "hip:1", ..
/// let open = |rank| hk_core::Device::open(&format!("emu:gfx942:{rank}"))?.create_stream();
/// let ranks = RcclComm::all(&[open(0)?, open(1)?], &RcclOptions::default())?;
/// std::thread::scope(|scope| {
///     for comm in ranks {
///         scope.spawn(move || {
///             let stream = comm.stream();
///             let x = stream.upload(&[comm.rank() as f32 + 1.0; 8])?;
///             let mut y = stream.alloc_zeroed::<f32>(8)?;
///             comm.all_reduce(stream, x.view([8])?, y.view_mut([8])?, ReduceOp::Sum)?;
///             comm.check()?;
///             assert_eq!(stream.download(&y)?, [3.0; 8]);
///             Ok::<_, hk_core::Error>(())
///         });
///     }
/// });
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct RcclComm {
    stream: Stream,
    shared: Arc<Shared>,
    engine: Engine,
    checked: bool,
    /// Used by one thread at a time.
    unsync: PhantomData<Cell<()>>,
}

#[derive(Debug)]
enum Engine {
    #[cfg(feature = "emu")]
    Emulated(EmulatedComm),
    Library(LibraryComm),
}

/// What a rank, its queued work and its watchdog share.
#[derive(Debug)]
pub(crate) struct Shared {
    rank: usize,
    world: usize,
    timeout: Option<Duration>,
    failed: OnceLock<Failed>,
}

/// Why a communicator serves no more.
#[derive(Debug, Clone)]
enum Failed {
    Aborted(String),
    Missing(usize),
}

impl Shared {
    fn new(rank: usize, world: usize, options: &RcclOptions) -> Arc<Self> {
        Arc::new(Self { rank, world, timeout: options.timeout, failed: OnceLock::new() })
    }

    /// The first reason counts.
    fn fail(&self, why: Failed) {
        let _ = self.failed.set(why);
    }

    fn expect_alive(&self, op: &'static str) -> Result<()> {
        let rank = self.rank;
        match self.failed.get() {
            None => Ok(()),
            Some(Failed::Aborted(reason)) => Err(Error::Aborted { op, rank, reason: reason.clone() }),
            Some(&Failed::Missing(missing)) => Err(Error::Timeout { op, rank, missing }),
        }
    }
}

impl RcclComm {
    /// Joins a communicator of `world` ranks as one of them, and waits for the others. Its work goes to `stream`.
    ///
    /// # Errors
    /// [`Error::Argument`]: no ranks, a rank that is not below `world`, an id of another library. [`Error::Library`]: the library is
    /// missing or too old. [`Error::Timeout`] or [`Error::Aborted`]: a rank did not join in time. [`Error::Collective`]: the library
    /// refuses, as for two ranks of one device.
    pub fn new(
        stream: &Stream,
        id: &UniqueId,
        world: usize,
        rank: usize,
        options: &RcclOptions,
    ) -> Result<Self> {
        let mut ranks = Self::join(std::slice::from_ref(stream), id, world, rank, options)?;
        ranks.pop().ok_or_else(|| Error::argument(OP_NEW, "stream", "none", "one"))
    }

    /// All ranks of a communicator in this process: rank `r` is on `streams[r]`.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::Argument`] also for two streams of one device, and devices of different drivers.
    pub fn all(streams: &[Stream], options: &RcclOptions) -> Result<Vec<Self>> {
        const OP: &str = "RcclComm::all";
        let Some(first) = streams.first() else {
            return Err(Error::argument(OP, "streams", "none", "at least one"));
        };
        for (rank, stream) in streams.iter().enumerate() {
            let device = stream.device();
            if device.info().driver != first.device().info().driver {
                let got = format!("{} and {}", first.device().spec(), device.spec());
                return Err(Error::argument(OP, "streams", got, "devices of one driver"));
            }
            if let Some(other) = streams[..rank].iter().position(|other| other.device() == device) {
                let got = format!("ranks {other} and {rank} are both {}", device.spec());
                return Err(Error::argument(OP, "streams", got, "one device for each rank"));
            }
        }
        Self::join(streams, &UniqueId::new(first.device())?, streams.len(), 0, options)
    }

    /// Ranks from `first` on, in this process.
    fn join(
        streams: &[Stream],
        id: &UniqueId,
        world: usize,
        first: usize,
        options: &RcclOptions,
    ) -> Result<Vec<Self>> {
        if world == 0 || first >= world {
            return Err(Error::argument(
                OP_NEW,
                "rank",
                format!("rank {first} of {world}"),
                "a rank below world",
            ));
        }
        if i32::try_from(world).is_err() {
            return Err(Error::too_large(OP_NEW, "world", format!("{world} ranks"), i32::MAX as u64));
        }
        let shared: Vec<_> =
            (first..first + streams.len()).map(|rank| Shared::new(rank, world, options)).collect();
        let engines: Vec<Engine> = match streams.first().map(|s| s.device().info().driver) {
            #[cfg(feature = "emu")]
            Some("emu") => {
                EmulatedComm::join(streams, id, &shared)?.into_iter().map(Engine::Emulated).collect()
            }
            _ => LibraryComm::join(OP_NEW, streams, id, &shared)?.into_iter().map(Engine::Library).collect(),
        };
        let rank = |((stream, shared), engine): ((&Stream, _), _)| Self {
            stream: stream.clone(),
            shared,
            engine,
            checked: options.checked,
            unsync: PhantomData,
        };
        Ok(streams.iter().zip(shared).zip(engines).map(rank).collect())
    }

    /// A communicator of the ranks with the same color, ordered by `key`, then by rank; none for ranks without color. All ranks call it, each
    /// from a thread of its own; it waits for the work queued so far, and for the other ranks.
    ///
    /// # Errors
    /// [`Error::Argument`]: a color above `i32::MAX`. [`Error::Timeout`], [`Error::Aborted`], [`Error::Collective`]; the failure of
    /// earlier work on the stream.
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Self>> {
        const OP: &str = "RcclComm::split";
        if let Some(color) = color.filter(|&color| i32::try_from(color).is_err()) {
            return Err(Error::argument(OP, "color", color, format!("0 to {}", i32::MAX)));
        }
        self.shared.expect_alive(OP)?;
        self.stream.synchronize()?;
        let options = RcclOptions { timeout: self.shared.timeout, checked: self.checked };
        let made = match &self.engine {
            #[cfg(feature = "emu")]
            Engine::Emulated(comm) => {
                let made = comm.split(OP, &self.shared, color, key, &options)?;
                made.map(|(shared, comm)| (shared, Engine::Emulated(comm)))
            }
            Engine::Library(comm) => {
                let made = comm.split(OP, &self.stream, &self.shared, color, key, &options)?;
                made.map(|(shared, comm)| (shared, Engine::Library(comm)))
            }
        };
        let (stream, checked) = (self.stream.clone(), self.checked);
        Ok(made.map(|(shared, engine)| Self { stream, shared, engine, checked, unsync: PhantomData }))
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.shared.world
    }

    /// The stream of this rank's work.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits for the work so far, and says whether all ranks took part in it.
    ///
    /// # Errors
    /// [`Error::Timeout`] or [`Error::Aborted`] if one was missing, [`Error::Collective`] if the library failed: outputs since then are
    /// unspecified. The failure of other work on the stream.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "RcclComm::check";
        let done = self.stream.synchronize();
        self.shared.expect_alive(OP)?;
        if let Engine::Library(comm) = &self.engine {
            comm.check(OP, &self.shared)?;
        }
        done
    }

    /// Ends the work of this communicator that waits for other ranks. It serves no more.
    pub fn abort(&self) {
        self.shared.fail(Failed::Aborted("by RcclComm::abort".into()));
        match &self.engine {
            #[cfg(feature = "emu")]
            Engine::Emulated(comm) => comm.abort(),
            Engine::Library(comm) => comm.abort(),
        }
    }

    fn expect_stream(&self, op: &'static str, stream: &Stream) -> Result<()> {
        if *stream == self.stream {
            return Ok(());
        }
        let got = format!("a stream of {}", stream.device().spec());
        let want = format!("the stream of rank {}, on {}", self.rank(), self.stream.device().spec());
        Err(Error::argument(op, "stream", got, want))
    }
}

const OP_NEW: &str = "RcclComm::new";

/// Methods of a rank that are a [`Group`] of one call.
macro_rules! single_calls {
    ($($(#[$doc:meta])* $name:ident, $op:literal, ($($arg:ident: $type:ty),*);)*) => {
        impl RcclComm {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// Nothing is queued if there is one. [`Argument`](Error::Argument): another stream than the communicator's, a rank that is
            /// not there. [`Shape`](Error::Shape): an output of another size; in checked mode, ranks that disagree.
            /// [`Stride`](Error::Stride): not contiguous. [`DType`](Error::DType): nothing the library reduces.
            /// [`Overlap`](Error::Overlap), [`DeviceMismatch`](Error::DeviceMismatch). [`Timeout`](Error::Timeout),
            /// [`Aborted`](Error::Aborted): the communicator is aborted. [`Collective`](Error::Collective): the library refuses or fails.
            pub fn $name<T: Element>(&self, stream: &Stream, $($arg: $type),*) -> Result<()> {
                self.expect_stream($op, stream)?;
                let mut group = Group::new();
                group.$name(self, $($arg),*)?;
                group.end()
            }
        )*}
    };
}

single_calls! {
    /// `y[i] = op_r x_r[i]` on all ranks. `x` may be exactly `y` ([`TensorViewMut::alias`]).
    all_reduce, "RcclComm::all_reduce", (x: TensorView<T>, y: TensorViewMut<T>, op: ReduceOp);
    /// `y[i] = op_r x_r[i]` on rank `root`, which alone has a `y`. It may be exactly `x`.
    reduce, "RcclComm::reduce", (x: TensorView<T>, y: Option<TensorViewMut<T>>, op: ReduceOp, root: usize);
    /// `y = x` of rank `root`, on all ranks. The root alone needs `x`; without it, its `y` is the input.
    broadcast, "RcclComm::broadcast", (x: Option<TensorView<T>>, y: TensorViewMut<T>, root: usize);
    /// `y` is `x` of rank 0, of rank 1, ..: `world` times as many elements. `x` may be exactly this rank's part of `y`.
    all_gather, "RcclComm::all_gather", (x: TensorView<T>, y: TensorViewMut<T>);
    /// `y` is this rank's part of `op_r x_r`, part `rank` of `world` equal ones. `y` may be exactly this rank's part of `x`.
    reduce_scatter, "RcclComm::reduce_scatter", (x: TensorView<T>, y: TensorViewMut<T>, op: ReduceOp);
    /// Part `r` of `y` is part `rank` of `x` of rank `r`, of `world` equal parts.
    all_to_all, "RcclComm::all_to_all", (x: TensorView<T>, y: TensorViewMut<T>);
    /// Sends `x` to a rank that receives. Transfers in both directions need a [`Group`]: a send may wait for its receiver.
    send, "RcclComm::send", (x: TensorView<T>, peer: usize);
    /// Receives `y` from a rank that sends as much.
    recv, "RcclComm::recv", (y: TensorViewMut<T>, peer: usize);
}
