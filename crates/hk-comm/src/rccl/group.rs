//! Calls, checked and queued together.

use super::{Engine, RcclComm};
use hk_core::{
    Aliasing, Arch, DType, Element, Error, Launch, Result, Stream, TensorView, TensorViewMut, check_overlap,
};

/// How values of all ranks become one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// The sum, divided by the number of ranks.
    Avg,
    /// The sum of values that are multiplied by a scalar before, this rank's own, rounded to the dtype.
    PreMulSum(f32),
}

/// A call: what the engines execute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Call {
    pub kind: Kind,
    /// Addresses; null if there is none.
    pub send: u64,
    pub recv: u64,
    /// Elements of the type: of `send`, or those for or of one rank where there is a part for each.
    pub count: usize,
    pub data: Data,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, usize),
    Broadcast(usize),
    AllGather,
    ReduceScatter(ReduceOp),
    AllToAll,
    Send(usize),
    Recv(usize),
}

impl Kind {
    /// All ranks take part.
    pub(super) fn is_collective(self) -> bool {
        !matches!(self, Self::Send(_) | Self::Recv(_))
    }
}

/// An element type of the library: its code in `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Data {
    pub code: i32,
    /// Bytes of an element.
    pub bytes: usize,
    /// What it is here.
    pub dtype: DType,
}

impl Data {
    fn code(dtype: DType) -> Option<i32> {
        Some(match dtype {
            DType::I8 => 0,
            DType::U8 => 1,
            DType::I32 => 2,
            DType::U32 => 3,
            DType::I64 => 4,
            DType::F16 => 6,
            DType::F32 => 7,
            DType::Bf16 => 9,
            DType::Fp8E4M3 | DType::Fp8E4M3Fnuz => 10,
            DType::Fp8E5M2 | DType::Fp8E5M2Fnuz => 11,
            _ => return None,
        })
    }

    /// For calls that only move data: any type, as bytes where the library has none.
    fn moved(dtype: DType) -> Self {
        let bytes = dtype.size_bytes();
        match Self::code(dtype) {
            Some(code) if bytes > 1 => Self { code, bytes, dtype },
            _ => Self { code: 1, bytes: 1, dtype },
        }
    }

    /// For reductions: fp8 is that of the target.
    fn reduced(op: &'static str, comm: &RcclComm, dtype: DType) -> Result<Self> {
        let arch = comm.stream.device().arch();
        let fnuz = matches!(dtype, DType::Fp8E4M3Fnuz | DType::Fp8E5M2Fnuz);
        let fp8 = fnuz || matches!(dtype, DType::Fp8E4M3 | DType::Fp8E5M2);
        let served = match &comm.engine {
            Engine::Library(library) if fp8 => library.reduces_fp8(),
            _ => true,
        };
        match Self::code(dtype) {
            Some(code) if served && (!fp8 || fnuz == (arch == Arch::Gfx942)) => {
                Ok(Self { code, bytes: dtype.size_bytes(), dtype })
            }
            _ => {
                let fp8 = if served { ", or fp8 of the target" } else { "; the library is too old for fp8" };
                let want = format!("i8, u8, i32, u32, i64, f16, f32, bf16{fp8}");
                Err(Error::dtype(op, "x", dtype, want))
            }
        }
    }
}

/// Calls that are queued at once: transfers of it do not wait for each other, and one thread can make the calls of several ranks.
/// Nothing is queued until [`end`](Self::end).
///
/// ```
/// # use hk_comm::{Group, RcclComm, RcclOptions, ReduceOp};
/// # fn main() -> hk_core::Result<()> {
/// # let open = |rank| hk_core::Device::open(&format!("emu:gfx942:{rank}"))?.create_stream();
/// # let ranks = RcclComm::all(&[open(0)?, open(1)?], &RcclOptions::default())?;
/// # let mut buffers = ranks.iter().map(|comm| comm.stream().upload(&[comm.rank() as i32])).collect::<Result<Vec<_>, _>>()?;
/// // One thread, a buffer for each rank.
/// let mut group = Group::new();
/// for (comm, buffer) in ranks.iter().zip(&mut buffers) {
///     let y = buffer.view_mut([1])?;
///     group.all_reduce(comm, y.alias(), y, ReduceOp::Sum)?;
/// }
/// group.end()?;
/// # for (comm, buffer) in ranks.iter().zip(&buffers) { assert_eq!(comm.stream().download(buffer)?, [1]) }
/// # Ok(()) }
/// ```
#[must_use = "nothing happens until `end`"]
#[derive(Default)]
pub struct Group<'a> {
    calls: Vec<Queued<'a>>,
}

/// A call of a rank. Its tensors are borrowed as long as the launch lives.
pub(super) struct Queued<'a> {
    pub comm: &'a RcclComm,
    pub op: &'static str,
    pub launch: Launch<'a>,
    pub call: Call,
}

impl<'a> Group<'a> {
    /// A group without calls.
    pub fn new() -> Self {
        Self { calls: Vec::new() }
    }

    /// See [`RcclComm::all_reduce`].
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce<T: Element>(
        &mut self,
        comm: &'a RcclComm,
        x: TensorView<'a, T>,
        y: TensorViewMut<'a, T>,
        op: ReduceOp,
    ) -> Result<()> {
        const OP: &str = "RcclComm::all_reduce";
        let data = Data::reduced(OP, comm, T::DTYPE)?;
        y.expect_shape(OP, "y", x.shape())?;
        check_overlap(OP, ("x", &x), ("y", &y), Aliasing::ExactAliasAllowed)?;
        let count = x.numel();
        self.add(OP, comm, Kind::AllReduce(op), Some(x), Some(y), count, data)
    }

    /// See [`RcclComm::reduce`].
    ///
    /// # Errors
    /// As there.
    pub fn reduce<T: Element>(
        &mut self,
        comm: &'a RcclComm,
        x: TensorView<'a, T>,
        y: Option<TensorViewMut<'a, T>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        const OP: &str = "RcclComm::reduce";
        expect_rank(OP, "root", comm, root)?;
        let data = Data::reduced(OP, comm, T::DTYPE)?;
        if y.is_some() != (comm.rank() == root) {
            let got = if y.is_some() { "an output" } else { "none" };
            let want = format!("an output on rank {root} alone; this is rank {}", comm.rank());
            return Err(Error::argument(OP, "y", got, want));
        }
        if let Some(y) = &y {
            y.expect_shape(OP, "y", x.shape())?;
            check_overlap(OP, ("x", &x), ("y", y), Aliasing::ExactAliasAllowed)?;
        }
        let count = x.numel();
        self.add(OP, comm, Kind::Reduce(op, root), Some(x), y, count, data)
    }

    /// See [`RcclComm::broadcast`].
    ///
    /// # Errors
    /// As there.
    pub fn broadcast<T: Element>(
        &mut self,
        comm: &'a RcclComm,
        x: Option<TensorView<'a, T>>,
        y: TensorViewMut<'a, T>,
        root: usize,
    ) -> Result<()> {
        const OP: &str = "RcclComm::broadcast";
        expect_rank(OP, "root", comm, root)?;
        if let Some(x) = &x {
            x.expect_shape(OP, "x", y.shape())?;
            check_overlap(OP, ("x", x), ("y", &y), Aliasing::ExactAliasAllowed)?;
        }
        let (x, count) = (x.unwrap_or(y.alias()), y.numel());
        self.add(OP, comm, Kind::Broadcast(root), Some(x), Some(y), count, Data::moved(T::DTYPE))
    }

    /// See [`RcclComm::all_gather`].
    ///
    /// # Errors
    /// As there.
    pub fn all_gather<T: Element>(
        &mut self,
        comm: &'a RcclComm,
        x: TensorView<'a, T>,
        y: TensorViewMut<'a, T>,
    ) -> Result<()> {
        const OP: &str = "RcclComm::all_gather";
        expect_parts(OP, "y", comm, y.shape(), y.numel(), "x", x.numel())?;
        let part = (comm.rank() * x.numel() * size_of::<T>()) as u64;
        if x.addr() != y.addr() + part {
            check_overlap(OP, ("x", &x), ("y", &y), Aliasing::Disjoint)?;
        }
        let count = x.numel();
        self.add(OP, comm, Kind::AllGather, Some(x), Some(y), count, Data::moved(T::DTYPE))
    }

    /// See [`RcclComm::reduce_scatter`].
    ///
    /// # Errors
    /// As there.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        comm: &'a RcclComm,
        x: TensorView<'a, T>,
        y: TensorViewMut<'a, T>,
        op: ReduceOp,
    ) -> Result<()> {
        const OP: &str = "RcclComm::reduce_scatter";
        let data = Data::reduced(OP, comm, T::DTYPE)?;
        expect_parts(OP, "x", comm, x.shape(), x.numel(), "y", y.numel())?;
        let part = (comm.rank() * y.numel() * size_of::<T>()) as u64;
        if y.addr() != x.addr() + part {
            check_overlap(OP, ("x", &x), ("y", &y), Aliasing::Disjoint)?;
        }
        let count = y.numel();
        self.add(OP, comm, Kind::ReduceScatter(op), Some(x), Some(y), count, data)
    }

    /// See [`RcclComm::all_to_all`].
    ///
    /// # Errors
    /// As there.
    pub fn all_to_all<T: Element>(
        &mut self,
        comm: &'a RcclComm,
        x: TensorView<'a, T>,
        y: TensorViewMut<'a, T>,
    ) -> Result<()> {
        const OP: &str = "RcclComm::all_to_all";
        y.expect_shape(OP, "y", x.shape())?;
        let count = x.numel() / comm.world();
        expect_parts(OP, "x", comm, x.shape(), x.numel(), "a part", count)?;
        check_overlap(OP, ("x", &x), ("y", &y), Aliasing::Disjoint)?;
        self.add(OP, comm, Kind::AllToAll, Some(x), Some(y), count, Data::moved(T::DTYPE))
    }

    /// See [`RcclComm::send`].
    ///
    /// # Errors
    /// As there.
    pub fn send<T: Element>(&mut self, comm: &'a RcclComm, x: TensorView<'a, T>, peer: usize) -> Result<()> {
        const OP: &str = "RcclComm::send";
        expect_rank(OP, "peer", comm, peer)?;
        let count = x.numel();
        self.add(OP, comm, Kind::Send(peer), Some(x), None, count, Data::moved(T::DTYPE))
    }

    /// See [`RcclComm::recv`].
    ///
    /// # Errors
    /// As there.
    pub fn recv<T: Element>(
        &mut self,
        comm: &'a RcclComm,
        y: TensorViewMut<'a, T>,
        peer: usize,
    ) -> Result<()> {
        const OP: &str = "RcclComm::recv";
        expect_rank(OP, "peer", comm, peer)?;
        let count = y.numel();
        self.add(OP, comm, Kind::Recv(peer), None::<TensorView<T>>, Some(y), count, Data::moved(T::DTYPE))
    }

    #[allow(clippy::too_many_arguments, reason = "one place for all calls")]
    fn add<T: Element>(
        &mut self,
        op: &'static str,
        comm: &'a RcclComm,
        kind: Kind,
        x: Option<TensorView<'a, T>>,
        y: Option<TensorViewMut<'a, T>>,
        count: usize,
        data: Data,
    ) -> Result<()> {
        comm.shared.expect_alive(op)?;
        let mut launch = comm.stream.launch(op);
        let (mut send, mut recv) = (0, 0);
        if let Some(x) = &x {
            x.expect_contiguous(op, "x")?;
            send = launch.input_address("x", x)?;
        }
        if let Some(mut y) = y {
            y.expect_contiguous(op, "y")?;
            recv = launch.output_address("y", &mut y)?;
        }
        // Where bytes stand in for a type, they are counted.
        let count = count * (size_of::<T>() / data.bytes);
        // A rank without elements calls too where others do: all have none.
        if count > 0 {
            self.calls.push(Queued { comm, op, launch, call: Call { kind, send, recv, count, data } });
        }
        Ok(())
    }

    /// Queues the calls.
    ///
    /// # Errors
    /// [`Error::Argument`]: devices of several drivers. In checked mode [`Error::Shape`]: ranks that disagree. [`Error::Timeout`],
    /// [`Error::Aborted`]: a communicator is aborted. [`Error::Collective`]: the library refuses or fails. [`Error::Driver`].
    pub fn end(self) -> Result<()> {
        self.agree()?;
        self.queue()
    }

    fn queue(self) -> Result<()> {
        let mut calls = self.calls;
        for queued in &calls {
            queued.comm.shared.expect_alive(queued.op)?;
        }
        let Some(first) = calls.first() else { return Ok(()) };
        let (op, driver) = (first.op, first.comm.stream.device().info().driver);
        if let Some(other) = calls.iter().find(|q| q.comm.stream.device().info().driver != driver) {
            let got =
                format!("{} and {}", first.comm.stream.device().spec(), other.comm.stream.device().spec());
            return Err(Error::argument(op, "group", got, "devices of one driver"));
        }
        #[cfg(feature = "emu")]
        while let Some(Engine::Emulated(engine)) = calls.first().map(|queued| &queued.comm.engine) {
            // The calls of a rank are one piece of work on its stream.
            let comm = calls[0].comm;
            let (own, others): (Vec<_>, Vec<_>) =
                calls.into_iter().partition(|queued| std::ptr::eq(queued.comm, comm));
            engine.queue(&comm.shared, own)?;
            calls = others;
        }
        super::library::queue(calls)
    }

    /// In checked mode: all ranks call the same collectives.
    fn agree(&self) -> Result<()> {
        let mut checks: Vec<Check> = vec![];
        for Queued { comm, op, call, .. } in &self.calls {
            if !comm.checked || !call.kind.is_collective() {
                continue;
            }
            let own = format!("{:?} of {} x {}", call.kind.common(), call.count, call.data.dtype);
            match checks.iter_mut().find(|check| std::ptr::eq(check.comm, *comm)) {
                Some(check) => check.own += &format!(", {own}"),
                None => checks.push(Check { comm, op, own }),
            }
        }
        if checks.is_empty() {
            return Ok(());
        }
        let buffers = |check: &Check| {
            let stream: &Stream = &check.comm.stream;
            Ok((
                stream.upload(&[signature(check.own.as_bytes())])?,
                stream.alloc_zeroed::<i64>(check.comm.world())?,
            ))
        };
        let mut buffers = checks.iter().map(buffers).collect::<Result<Vec<_>>>()?;
        let mut group = Group::new();
        for (check, (own, all)) in checks.iter().zip(&mut buffers) {
            group.all_gather(check.comm, own.view([1])?, all.view_mut([check.comm.world()])?)?;
        }
        group.queue()?;
        for (Check { comm, op, own }, (_, all)) in checks.iter().zip(&buffers) {
            let all = comm.stream.download(all);
            comm.shared.expect_alive(op)?;
            if let Some(other) = all?.iter().position(|other| *other != signature(own.as_bytes())) {
                let got = format!("{own} on rank {}", comm.rank());
                let want = format!("the same on all ranks; rank {other} calls something else");
                return Err(Error::Shape { op, arg: "x", got, want });
            }
        }
        Ok(())
    }
}

struct Check<'a> {
    comm: &'a RcclComm,
    op: &'static str,
    own: String,
}

impl Kind {
    /// Without what is each rank's own.
    fn common(self) -> Self {
        let common = |op| if let ReduceOp::PreMulSum(_) = op { ReduceOp::PreMulSum(0.0) } else { op };
        match self {
            Self::AllReduce(op) => Self::AllReduce(common(op)),
            Self::Reduce(op, root) => Self::Reduce(common(op), root),
            Self::ReduceScatter(op) => Self::ReduceScatter(common(op)),
            other => other,
        }
    }
}

/// FNV-1a.
pub(super) fn signature(bytes: &[u8]) -> i64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step) as i64
}

fn expect_rank(op: &'static str, arg: &'static str, comm: &RcclComm, rank: usize) -> Result<()> {
    if rank < comm.world() {
        return Ok(());
    }
    let want = format!("a rank below {} (on rank {})", comm.world(), comm.rank());
    Err(Error::argument(op, arg, rank, want))
}

/// `whole` is as many parts as there are ranks.
fn expect_parts(
    op: &'static str,
    arg: &'static str,
    comm: &RcclComm,
    shape: &[usize],
    whole: usize,
    part_arg: &'static str,
    part: usize,
) -> Result<()> {
    if part.checked_mul(comm.world()) == Some(whole) {
        return Ok(());
    }
    let want = format!("{} times the {part} elements of {part_arg} (on rank {})", comm.world(), comm.rank());
    Err(Error::shape(op, arg, shape, want))
}
