//! The work of streams: what a call executes at once, or adds to the graph that its stream captures.

use std::sync::Arc;

use crate::abi::{
    Dim3, DriverMemcpy3D, KernelNodeParams, Memcpy3D, MemsetParams, PitchedPtr, Side3D, Size3, memory_type,
};
use crate::capture;
use crate::error::{HipError, Result};
use crate::memory::{self, GraphMemory, MAX_PITCH};
use crate::module::{self, Arguments, Function, Launch};
use crate::runtime::say;
use crate::stream::{self, HostFunction, StreamRef};
use crate::{queue, register, sanitize};

/// A command, with its parameters as they were when it was given.
#[derive(Clone)]
pub(crate) enum Work {
    Kernel(Kernel),
    Copy(Copy),
    Fill(Fill),
    /// A function of the program and its argument.
    Host(u64, u64),
    /// A graph of its own, by its handle.
    Graph(u64),
    Empty,
    /// Events by their handles.
    Wait(u64),
    Record(u64),
    Alloc(Arc<GraphMemory>),
    Free(u64),
}

impl Work {
    /// `hipGraphNodeType`.
    pub fn node_type(&self) -> i32 {
        match self {
            Work::Kernel(_) => 0,
            Work::Copy(_) => 1,
            Work::Fill(_) => 2,
            Work::Host(..) => 3,
            Work::Graph(_) => 4,
            Work::Empty => 5,
            Work::Wait(_) => 6,
            Work::Record(_) => 7,
            Work::Alloc(_) => 10,
            Work::Free(_) => 11,
        }
    }

    /// Runs it on a stream that captures nothing. A graph is run by its parts.
    pub fn run(&self, on: StreamRef) -> Result {
        on.device.check()?;
        match self {
            Work::Kernel(kernel) => kernel.run(on),
            Work::Copy(copy) => copy.run_on(on),
            Work::Fill(fill) => fill.run_on(on),
            Work::Host(function, data) => {
                stream::call_host(*function, *data);
                Ok(())
            }
            Work::Wait(event) => stream::wait_here(*event, on),
            Work::Record(event) => stream::record_here(*event, on),
            Work::Alloc(memory) => {
                GraphMemory::enter(memory);
                Ok(())
            }
            Work::Free(ptr) => memory::free(*ptr),
            Work::Graph(_) | Work::Empty => Ok(()),
        }
    }
}

/// Adds work to the capture of a stream, or runs it.
pub(crate) fn submit(on: u64, work: Work) -> Result {
    let on = stream::stream(on)?;
    if capture::captures(on)? {
        match &work {
            Work::Copy(copy) => copy.check()?,
            Work::Fill(fill) => fill.check()?,
            _ => {}
        }
        return capture::add(on, work).map(drop);
    }
    on.device.check()?;
    // A command runs at once if nothing is before it, and if memory that is not page-locked is part of it.
    let at_once = match &work {
        Work::Copy(copy) => return copy.submit(on),
        Work::Fill(fill) => {
            fill.check()?;
            queue::idle(on)
        }
        Work::Host(..) => false,
        _ => queue::idle(on),
    };
    if at_once {
        return queue::now(on, || work.run(on));
    }
    queue::add(on, &[], move || complain(on, work.run(on)));
    Ok(())
}

/// What fails behind the back of the program's thread is told by later calls.
pub(crate) fn complain(on: StreamRef, result: Result) {
    if let Err(error) = result {
        say!("a command of stream {} of device {} fails", on.id, on.device.ordinal);
        on.device.fail(error);
    }
}

/// Runs a copy in the order of the null stream, and waits for it.
///
/// # Errors
/// As [`now`].
pub(crate) fn copy_now(copy: Copy) -> Result {
    capture::forbid_synchronous()?;
    let (on, copy) = (stream::stream(0)?, copy.resolved()?);
    copy.others(on)?.into_iter().for_each(queue::synchronize);
    queue::now(on, || copy.run_on(on))
}

/// Runs work of the null stream, and waits for it.
///
/// # Errors
/// `hipErrorStreamCaptureImplicit`, and those of the work.
pub(crate) fn now(work: impl FnOnce() -> Result) -> Result {
    capture::forbid_synchronous()?;
    queue::now(stream::stream(0)?, work)
}

/// A launch with its arguments.
#[derive(Clone)]
pub(crate) struct Kernel {
    /// A host function, or the handle of a kernel.
    pub function: u64,
    pub grid: Dim3,
    pub block: Dim3,
    pub dynamic_lds: u64,
    pub arguments: Arc<KernelArguments>,
    pub start: u64,
    pub stop: u64,
}

/// The arguments of a node, and the pointers to them that programs ask for.
pub(crate) struct KernelArguments {
    bytes: Vec<u8>,
    pointers: Vec<u64>,
    size: Box<u64>,
    extra: Vec<u64>,
}

impl KernelArguments {
    fn new(function: &Function, given: Arguments) -> Result<KernelArguments> {
        let kernel = function.kernel()?;
        let mut arguments = KernelArguments {
            bytes: given.gather(kernel)?,
            pointers: vec![],
            size: Box::new(0),
            extra: vec![],
        };
        let first = arguments.bytes.as_ptr() as u64;
        if given.extra == 0 {
            arguments.pointers =
                kernel.args.iter().filter(|a| !a.hidden()).map(|a| first + u64::from(a.offset)).collect();
        } else {
            *arguments.size = arguments.bytes.len() as u64;
            arguments.extra = vec![1, first, 2, &raw const *arguments.size as u64, 3];
        }
        Ok(arguments)
    }
}

impl Kernel {
    /// # Errors
    /// Those of a launch on the current device.
    pub fn new(p: &KernelNodeParams) -> Result<Kernel> {
        if p.function == 0 {
            return Err(HipError::INVALID_VALUE);
        }
        let function =
            register::current_function(p.function).map_err(|_| HipError::INVALID_DEVICE_FUNCTION)?;
        Kernel::of(&function, p, (0, 0))
    }

    pub fn of(function: &Function, p: &KernelNodeParams, (start, stop): (u64, u64)) -> Result<Kernel> {
        module::check_sizes(function, p.grid.into(), p.block.into(), p.dynamic_lds.into())?;
        let arguments = KernelArguments::new(function, Arguments { params: p.params, extra: p.extra })?;
        Ok(Kernel {
            function: p.function,
            grid: p.grid,
            block: p.block,
            dynamic_lds: p.dynamic_lds.into(),
            arguments: Arc::new(arguments),
            start,
            stop,
        })
    }

    /// What was given, with pointers to the node's own copy of the arguments.
    pub fn params(&self) -> KernelNodeParams {
        let list = |list: &[u64]| if list.is_empty() { 0 } else { list.as_ptr() as u64 };
        KernelNodeParams {
            block: self.block,
            pad0: 0,
            extra: list(&self.arguments.extra),
            function: self.function,
            grid: self.grid,
            pad1: 0,
            params: list(&self.arguments.pointers),
            dynamic_lds: self.dynamic_lds as u32,
            pad2: 0,
        }
    }

    /// In a command that runs.
    fn run(&self, on: StreamRef) -> Result {
        let function = register::function_for(on.device, self.function)?;
        let launch = Launch {
            handle: self.function,
            grid: self.grid.into(),
            block: self.block.into(),
            dynamic_lds: self.dynamic_lds,
            on,
            arguments: Arguments { params: 0, extra: 0 },
            start: self.start,
            stop: self.stop,
            cooperative: false,
        };
        if self.start != 0 {
            stream::record_here(self.start, on)?;
        }
        let from = sanitize::options().launched();
        module::execute(&function, &launch, &self.arguments.bytes, from.as_ref())?;
        if self.stop != 0 { stream::record_here(self.stop, on) } else { Ok(()) }
    }
}

/// A copy, as the program has described it.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Copy {
    Linear { dst: u64, src: u64, bytes: u64, kind: i32 },
    ToSymbol { symbol: u64, offset: u64, src: u64, bytes: u64, kind: i32 },
    FromSymbol { dst: u64, symbol: u64, offset: u64, bytes: u64, kind: i32 },
    Box(Memcpy3D),
    Driver(DriverMemcpy3D),
}

/// Rows of rows of bytes.
#[derive(Clone, Copy)]
struct Region {
    addr: u64,
    pitch: u64,
    slice: u64,
}

impl Region {
    fn new(base: u64, pos: [u64; 3], pitch: u64, rows: u64) -> Result<Region> {
        let slice = pitch.checked_mul(rows);
        let offset = slice.and_then(|s| {
            s.checked_mul(pos[2])?.checked_add(pitch.checked_mul(pos[1])?)?.checked_add(pos[0])
        });
        match (slice, offset.and_then(|o| base.checked_add(o))) {
            (Some(slice), Some(addr)) if base != 0 => Ok(Region { addr, pitch, slice }),
            _ => Err(HipError::INVALID_VALUE),
        }
    }

    /// Bytes from the first to behind the last of an extent.
    fn span(&self, [width, height, depth]: [u64; 3]) -> Result<u64> {
        if width > self.pitch && (height > 1 || depth > 1) {
            return Err(HipError::INVALID_VALUE);
        }
        let rows = self.pitch.checked_mul(height - 1);
        let slices = self.slice.checked_mul(depth - 1);
        let end = rows.and_then(|r| r.checked_add(slices?)?.checked_add(width));
        end.ok_or(HipError::INVALID_VALUE)
    }
}

/// A side of `HIP_MEMCPY3D`. Without a pitch, rows follow each other.
fn region(side: &Side3D, width: u64, rows: u64) -> Result<Region> {
    let base = match side.memory_type {
        memory_type::HOST => side.host,
        memory_type::DEVICE | memory_type::UNIFIED | memory_type::MANAGED => side.device,
        _ => return Err(HipError::INVALID_VALUE),
    };
    let end = side.x_in_bytes.checked_add(width).ok_or(HipError::INVALID_VALUE)?;
    let pitch = if side.pitch == 0 { end } else { side.pitch };
    if end > pitch || pitch >= MAX_PITCH {
        return Err(HipError::INVALID_VALUE);
    }
    if side.height != 0 && side.y.checked_add(rows).is_none_or(|end| end > side.height) {
        return Err(HipError::INVALID_VALUE);
    }
    // Without a height, slices follow each other.
    let height = if side.height == 0 { rows } else { side.height };
    Region::new(base, [side.x_in_bytes, side.y, side.z], pitch, height)
}

const HOST_TO_DEVICE: i32 = 1;
const DEVICE_TO_HOST: i32 = 2;
const KINDS: [i32; 6] = [0, 1, 2, 3, 4, 1024];

impl Copy {
    /// `hipMemcpyKind`.
    pub fn kind(&self) -> i32 {
        const DEFAULT: i32 = 4;
        match self {
            Copy::Linear { kind, .. } | Copy::ToSymbol { kind, .. } | Copy::FromSymbol { kind, .. } => *kind,
            Copy::Box(p) => p.kind,
            Copy::Driver(_) => DEFAULT,
        }
    }

    /// The copy of rows that a 2-D function describes.
    pub fn rows(dst: (u64, u64), src: (u64, u64), width: u64, height: u64, kind: i32) -> Copy {
        let zero = Size3 { x: 0, y: 0, z: 0 };
        let side = |(ptr, pitch)| PitchedPtr { ptr, pitch, xsize: width, ysize: height };
        Copy::Box(Memcpy3D {
            src_array: 0,
            src_pos: zero,
            src_ptr: side(src),
            dst_array: 0,
            dst_pos: zero,
            dst_ptr: side(dst),
            extent: Size3 { x: width, y: height, z: 1 },
            kind,
            pad: 0,
        })
    }

    /// A copy without a symbol, for the current device.
    fn resolved(&self) -> Result<Copy> {
        Ok(match *self {
            Copy::ToSymbol { kind: DEVICE_TO_HOST, .. } | Copy::FromSymbol { kind: HOST_TO_DEVICE, .. } => {
                return Err(HipError::INVALID_MEMCPY_DIRECTION);
            }
            Copy::ToSymbol { symbol, offset, src, bytes, kind } => {
                Copy::Linear { dst: register::part_of(symbol, offset, bytes)?, src, bytes, kind }
            }
            Copy::FromSymbol { dst, symbol, offset, bytes, kind } => {
                Copy::Linear { dst, src: register::part_of(symbol, offset, bytes)?, bytes, kind }
            }
            other => other,
        })
    }

    /// Where both sides begin; nothing for an empty copy of rows.
    fn ends(&self) -> Result<Vec<u64>> {
        Ok(match *self {
            Copy::Linear { dst, src, .. } => vec![dst, src],
            _ => self.regions()?.map(|(dst, src, _)| vec![dst.addr, src.addr]).unwrap_or_default(),
        })
    }

    /// The null streams of other devices than the stream's whose memory it accesses.
    fn others(&self, on: StreamRef) -> Result<Vec<StreamRef>> {
        let mut devices: Vec<_> = self.ends()?.into_iter().filter_map(memory::device_of).collect();
        devices.retain(|device| device.ordinal != on.device.ordinal);
        devices.dedup_by_key(|device| device.ordinal);
        Ok(devices.into_iter().map(stream::null_of).collect())
    }

    /// Queues it on a stream. It is in the order of the null streams of other devices, too. One of memory that the runtime does not
    /// know runs at once, and so does one that nothing is before.
    fn submit(&self, on: StreamRef) -> Result {
        let copy = self.resolved()?;
        copy.check()?;
        let others = copy.others(on)?;
        let known = copy.ends()?.into_iter().all(memory::is_known);
        if !known {
            others.into_iter().for_each(queue::synchronize);
            return queue::now(on, || copy.run_on(on));
        }
        if queue::idle(on) && others.iter().all(|other| queue::idle(*other)) {
            return copy.run_on(on);
        }
        let after: Vec<u64> = others.iter().flat_map(|other| queue::before(*other)).collect();
        let ticket = queue::add(on, &after, move || complain(on, copy.run_on(on)));
        for other in others {
            queue::add(other, &[ticket], || {});
        }
        Ok(())
    }

    /// Both regions and their extent; `None` if there is nothing to copy.
    fn regions(&self) -> Result<Option<(Region, Region, [u64; 3])>> {
        let (dst, src, extent) = match self {
            Copy::Box(p) => {
                if p.src_array != 0 || p.dst_array != 0 {
                    return Err(HipError::INVALID_VALUE);
                }
                if !KINDS.contains(&p.kind) {
                    return Err(HipError::INVALID_MEMCPY_DIRECTION);
                }
                if p.src_ptr.ptr == 0 || p.dst_ptr.ptr == 0 {
                    return Err(HipError::INVALID_VALUE);
                }
                if p.src_ptr.pitch < p.src_ptr.xsize || p.dst_ptr.pitch < p.dst_ptr.xsize {
                    return Err(HipError::INVALID_PITCH_VALUE);
                }
                if p.src_ptr.pitch >= MAX_PITCH || p.dst_ptr.pitch >= MAX_PITCH {
                    return Err(HipError::INVALID_VALUE);
                }
                let inside = |pos: &Size3, ptr: &PitchedPtr| {
                    p.extent.x.checked_add(pos.x).is_some_and(|end| end <= ptr.pitch)
                };
                if !inside(&p.src_pos, &p.src_ptr) || !inside(&p.dst_pos, &p.dst_ptr) {
                    return Err(HipError::INVALID_VALUE);
                }
                let side = |pos: &Size3, ptr: &PitchedPtr| {
                    Region::new(ptr.ptr, [pos.x, pos.y, pos.z], ptr.pitch, ptr.ysize)
                };
                (
                    side(&p.dst_pos, &p.dst_ptr)?,
                    side(&p.src_pos, &p.src_ptr)?,
                    [p.extent.x, p.extent.y, p.extent.z],
                )
            }
            Copy::Driver(p) => {
                let extent = [p.width_in_bytes, p.height, p.depth];
                if extent.contains(&0) {
                    return Ok(None);
                }
                (region(&p.dst, extent[0], extent[1])?, region(&p.src, extent[0], extent[1])?, extent)
            }
            Copy::Linear { .. } | Copy::ToSymbol { .. } | Copy::FromSymbol { .. } => return Ok(None),
        };
        Ok((!extent.contains(&0)).then_some((dst, src, extent)))
    }

    /// # Errors
    /// As those of the copy itself.
    pub fn check(&self) -> Result {
        let copy = self.resolved()?;
        if let Copy::Linear { dst, src, bytes, kind } = copy {
            return memory::sides((dst, bytes), (src, bytes), kind).map(drop);
        }
        if let Some((dst, src, extent)) = copy.regions()? {
            memory::sides((dst.addr, dst.span(extent)?), (src.addr, src.span(extent)?), copy.kind())?;
        }
        Ok(())
    }

    /// Runs it in a command of a stream. One within the memory of the stream's device takes modelled time.
    fn run_on(&self, on: StreamRef) -> Result {
        if let Some(clock) = &on.device.clock {
            let copy = self.resolved()?;
            let here = |addr: &u64| memory::device_of(*addr).is_some_and(|d| d.ordinal == on.device.ordinal);
            let ends = copy.ends()?;
            if !ends.is_empty() && ends.iter().all(here) {
                clock.moved(on, 2 * copy.bytes()?);
            }
        }
        self.run()
    }

    /// Bytes that a copy without a symbol moves.
    fn bytes(&self) -> Result<u64> {
        Ok(match self {
            Copy::Linear { bytes, .. } => *bytes,
            _ => self.regions()?.map_or(0, |(_, _, [width, height, depth])| width * height * depth),
        })
    }

    fn run(&self) -> Result {
        let copy = self.resolved()?;
        if let Copy::Linear { dst, src, bytes, kind } = copy {
            return memory::copy(dst, src, bytes, kind);
        }
        let Some((dst, src, extent)) = copy.regions()? else { return Ok(()) };
        let sides = memory::sides((dst.addr, dst.span(extent)?), (src.addr, src.span(extent)?), copy.kind())?;
        let [width, height, depth] = extent;
        for z in 0..depth {
            for y in 0..height {
                let at = |region: &Region| region.addr + z * region.slice + y * region.pitch;
                memory::transfer((sides.0, at(&dst)), (sides.1, at(&src)), width)?;
            }
        }
        Ok(())
    }
}

/// A fill of `depth` slices of `slice` bytes.
#[derive(Clone, Copy)]
pub(crate) struct Fill {
    pub params: MemsetParams,
    pub slice: u64,
    pub depth: u64,
}

impl Fill {
    pub fn linear(dst: u64, value: u32, element_size: u32, count: u64) -> Fill {
        Fill::rows(dst, count.saturating_mul(element_size.into()), value, element_size, count, 1)
    }

    pub fn rows(dst: u64, pitch: u64, value: u32, element_size: u32, width: u64, height: u64) -> Fill {
        let params = MemsetParams { dst, element_size, pad0: 0, height, pitch, value, pad1: 0, width };
        Fill { params, slice: 0, depth: 1 }
    }

    /// Bytes from the first to behind the last.
    fn span(&self) -> Result<u64> {
        let p = &self.params;
        let row = p.width.checked_mul(p.element_size.into()).ok_or(HipError::INVALID_VALUE)?;
        if row > p.pitch && (p.height > 1 || self.depth > 1) {
            return Err(HipError::INVALID_VALUE);
        }
        let region = Region { addr: p.dst, pitch: p.pitch, slice: self.slice };
        region.span([row, p.height, self.depth])
    }

    fn is_empty(&self) -> bool {
        self.params.width == 0 || self.params.height == 0 || self.depth == 0
    }

    /// # Errors
    /// As those of the fill itself.
    pub fn check(&self) -> Result {
        if self.is_empty() { Ok(()) } else { memory::check_fill(self.params.dst, self.span()?) }
    }

    /// Runs it in a command of a stream. One of the device's memory takes modelled time.
    fn run_on(&self, on: StreamRef) -> Result {
        let p = &self.params;
        if let Some(clock) = &on.device.clock
            && !self.is_empty()
            && memory::device_of(p.dst).is_some_and(|device| device.ordinal == on.device.ordinal)
        {
            clock.moved(on, p.width * u64::from(p.element_size) * p.height * self.depth);
        }
        self.run()
    }

    pub fn run(&self) -> Result {
        if self.is_empty() {
            return Ok(());
        }
        self.check()?;
        let p = &self.params;
        let pattern = &p.value.to_le_bytes()[..p.element_size as usize];
        for z in 0..self.depth {
            for y in 0..p.height {
                memory::fill(p.dst + z * self.slice + y * p.pitch, pattern, p.width)?;
            }
        }
        Ok(())
    }
}

/// A function of the program with its argument.
pub(crate) fn host(function: Option<HostFunction>, data: u64) -> Result<Work> {
    let function = function.ok_or(HipError::INVALID_VALUE)?;
    Ok(Work::Host(function as usize as u64, data))
}
