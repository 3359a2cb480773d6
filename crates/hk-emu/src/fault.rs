//! What went wrong in a launch, and where.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::checks::Check;
use crate::isa::DecodeError;
use crate::memory::{Near, StreamRace};

pub use crate::memory::{Access, Space};

/// Why a memory access is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryProblem {
    /// The bytes are not inside one live allocation (or inside the LDS or private memory of the launch).
    OutOfBounds,
    /// The bytes were freed.
    UseAfterFree,
    /// The address is not a multiple of the element size.
    Misaligned,
    /// A store to code or constants.
    ReadOnly,
    /// The bytes belong to another device, to which peer access is not enabled.
    NoPeerAccess,
}

impl fmt::Display for MemoryProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryProblem::OutOfBounds => "out-of-bounds",
            MemoryProblem::UseAfterFree => "use-after-free",
            MemoryProblem::Misaligned => "misaligned",
            MemoryProblem::ReadOnly => "read-only",
            MemoryProblem::NoPeerAccess => "not enabled peer",
        })
    }
}

/// The instruction and wave at which a launch stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Site {
    /// Name of the kernel.
    pub kernel: String,
    /// Address of the instruction: virtual address in the code object, as in its disassembly.
    pub pc: u64,
    /// The instruction, as LLVM prints it.
    pub instruction: String,
    /// `file:line`, with line tables in the code object.
    pub source: Option<String>,
    /// Workgroup (x, y, z).
    pub workgroup: [u32; 3],
    /// Wave in the workgroup.
    pub wave: u32,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.workgroup;
        write!(f, "kernel {} at {:#x}: {}", self.kernel, self.pc, self.instruction)?;
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        write!(f, ", workgroup ({x}, {y}, {z}), wave {}", self.wave)
    }
}

/// Why a launch failed. Memory that it wrote before stays written. Serialized, `kind` names the variant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Fault {
    /// A wrong memory access.
    #[error(
        "{problem} {access} of {bytes} bytes at {address:#x} of {space}{}: {site}{}",
        lane.map_or(String::new(), |l| format!(" by lane {l}")),
        near.as_ref().map_or(String::new(), |n| format!("; {n}"))
    )]
    Memory {
        /// Where.
        site: Box<Site>,
        /// What is wrong with it.
        problem: MemoryProblem,
        /// Load, store or atomic.
        access: Access,
        /// Which memory.
        space: Space,
        /// First byte.
        address: u64,
        /// Bytes of the lane's access.
        bytes: u32,
        /// The lane; `None` for scalar accesses.
        lane: Option<u32>,
        /// The closest allocation; the size of the memory for LDS and private memory.
        near: Option<Near>,
    },
    /// A sanitizer found a mistake that need not show in the result.
    #[error(
        "{check}: {what}{}{}: {site}{}{}",
        lane.map_or(String::new(), |l| format!(", lane {l}")),
        address.map_or(String::new(), |(space, at)| format!(", at {at:#x} of {space}")),
        other.as_ref().map_or(String::new(), |o| format!("; the other side: {o}")),
        near.as_ref().map_or(String::new(), |n| format!("; {n}"))
    )]
    Sanitizer {
        /// Where.
        site: Box<Site>,
        /// Which sanitizer.
        check: Check,
        /// What is wrong, as text.
        what: String,
        /// The lane, where it is one lane's access.
        lane: Option<u32>,
        /// The memory that it concerns.
        address: Option<(Space, u64)>,
        /// The other side: of a race the earlier access, of a value its producer.
        other: Option<Box<Site>>,
        /// The closest allocation of global memory.
        near: Option<Box<Near>>,
    },
    /// A launch races with work on another stream; only with [`Check::Streams`].
    #[error("{0}")]
    Streams(Box<StreamRace>),
    /// Words that are no instruction of the target.
    #[error("unknown instruction: {error}: {site}")]
    UnknownInstruction {
        /// Where.
        site: Box<Site>,
        /// What the decoder says.
        #[serde(serialize_with = "as_text")]
        error: DecodeError,
    },
    /// An instruction (or a form of one) that is decoded but not executed.
    #[error("no semantics for {name}: {why}: {site}")]
    NoSemantics {
        /// Where.
        site: Box<Site>,
        /// The mnemonic.
        name: String,
        /// What is missing.
        why: &'static str,
    },
    /// Operands or controls that the ISA forbids.
    #[error("illegal {name}: {why}: {site}")]
    Illegal {
        /// Where.
        site: Box<Site>,
        /// The mnemonic.
        name: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A register that the kernel has not allocated, or that does not exist.
    #[error("{register} is out of range ({limit} allocated): {site}")]
    Register {
        /// Where.
        site: Box<Site>,
        /// Its name, `v40` or `a[2:5]`.
        register: String,
        /// How many the kernel has.
        limit: u32,
    },
    /// A jump to an address that holds no instruction of the kernel.
    #[error("jump to {address:#x}, where no instruction is: {site}")]
    WildJump {
        /// Where.
        site: Box<Site>,
        /// The target, as a device address.
        address: u64,
    },
    /// `s_trap`: the kernel aborted itself.
    #[error("trap {id}: {site}")]
    Trap {
        /// Where.
        site: Box<Site>,
        /// The trap number; 2 is clang's abort.
        id: u32,
    },
    /// A wave ran too long.
    #[error(
        "instruction budget of {limit} per wave exceeded (an endless loop, or a wait for what never comes): {site}"
    )]
    Budget {
        /// Where the wave was.
        site: Box<Site>,
        /// The budget.
        limit: u64,
    },
    /// The launch asks for more than the target has.
    #[error("kernel {kernel}: {what}: {requested} requested, the limit is {limit}")]
    Limits {
        /// Name of the kernel.
        kernel: String,
        /// What is exceeded, with its unit.
        what: &'static str,
        /// How much was asked.
        requested: u64,
        /// How much there is.
        limit: u64,
    },
    /// The module has no such kernel.
    #[error("no kernel {kernel:?} in the module; it has {available:?}")]
    UnknownKernel {
        /// The name asked for.
        kernel: String,
        /// The names there are.
        available: Vec<String>,
    },
    /// Arguments that do not fit the kernel.
    #[error("kernel {kernel}: {what}")]
    Arguments {
        /// Name of the kernel.
        kernel: String,
        /// What does not fit.
        what: String,
    },
}

fn as_text<S: Serializer>(value: &impl fmt::Display, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// An executed instruction that a finding refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// In the program.
    pub index: u32,
    pub workgroup: [u32; 3],
    pub wave: u32,
}

/// What a check found; the launch adds where.
#[derive(Debug, Clone)]
pub(crate) struct Finding {
    pub check: Check,
    /// What is wrong, as text that names registers and counters.
    pub what: String,
    pub lane: Option<u32>,
    pub address: Option<(Space, u64)>,
    /// The other side of a race, or the producer of a value.
    pub other: Option<Place>,
}

impl Finding {
    /// Ends a wave that nothing is wrong with: the launch does not report it.
    pub fn abandoned() -> Finding {
        let what = "abandoned".to_owned();
        Finding { check: Check::Barriers, what, lane: None, address: None, other: None }
    }
}

/// What a handler reports; the launch adds the site.
#[derive(Debug, Clone)]
pub(crate) enum Problem {
    Memory { space: Space, access: Access, address: u64, bytes: u32, lane: Option<u32> },
    Unknown(DecodeError),
    NoSemantics { name: String, why: &'static str },
    Illegal { name: String, why: &'static str },
    Unsupported { what: &'static str },
    Register { register: String, limit: u32 },
    RegisterIndex { register: &'static str, index: u32 },
    HardwareRegister { id: u32 },
    WildJump { address: u64 },
    Trap { id: u32 },
    Budget { limit: u64 },
    Finding(Box<Finding>),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Unknown(error) => write!(f, "{error}"),
            Problem::NoSemantics { name, why } => write!(f, "{name}: {why}"),
            Problem::Unsupported { what } => f.write_str(what),
            Problem::Register { register, limit } => {
                write!(f, "{register} is out of range ({limit} allocated)")
            }
            other => write!(f, "{other:?}"),
        }
    }
}

impl Problem {
    pub fn memory(access: Access, address: u64, bytes: u32, lane: Option<u32>) -> Problem {
        Problem::Memory { space: Space::Global, access, address, bytes, lane }
    }
}

/// A fault is returned by value.
const _: () = assert!(size_of::<Fault>() <= 128);
