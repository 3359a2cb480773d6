//! The one error type of the library.

use crate::dtype::DType;
use crate::layout::Layout;
use std::fmt::{Debug, Display};

/// `Result` with the library's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, from a wrong shape to a fault on the device.
///
/// The message of each variant names the operation, the argument, what came and what was wanted:
/// `rmsnorm: w: shape [4095], expected [4096] (cols of x)`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor or slice has the wrong shape, rank or length.
    #[error("{op}: {arg}: shape {got}, expected {want}")]
    Shape {
        /// Operation that checked the argument.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// What came.
        got: String,
        /// What was wanted, and why.
        want: String,
    },
    /// A reduced axis has length zero.
    #[error("{op}: {arg}: axis {axis} has length zero in shape {shape}, nothing can be reduced over it")]
    Empty {
        /// Operation that checked the argument.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Index of the axis.
        axis: usize,
        /// Shape that came.
        shape: String,
    },
    /// A tensor has an element type that the operation does not serve.
    #[error("{op}: {arg}: dtype {got}, expected {want}")]
    DType {
        /// Operation that checked the argument.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Element type that came.
        got: DType,
        /// Element types that are served.
        want: String,
    },
    /// A tensor's strides do not fit: not unit stride, not contiguous, rows without one uniform stride, or a
    /// mutable view whose elements overlap each other.
    #[error("{op}: {arg}: strides {got}, expected {want}")]
    Stride {
        /// Operation that checked the argument.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Strides (with the shape) that came.
        got: String,
        /// What was wanted.
        want: String,
    },
    /// An address is not aligned as the operation needs.
    #[error("{op}: {arg}: address {addr:#x} is not a multiple of {want} bytes")]
    Align {
        /// Operation that checked the argument.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Device address.
        addr: u64,
        /// Alignment wanted, in bytes.
        want: u64,
    },
    /// Two arguments share memory in a way that the operation does not permit.
    #[error("{op}: {a} and {b} overlap in memory, expected {want}")]
    Overlap {
        /// Operation that checked the arguments.
        op: &'static str,
        /// First argument.
        a: &'static str,
        /// Second argument, the one that is written.
        b: &'static str,
        /// What is permitted.
        want: &'static str,
    },
    /// A scalar, an option or a string is out of its domain.
    #[error("{op}: {arg}: {got}, expected {want}")]
    Argument {
        /// Operation that checked the argument.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Value that came.
        got: String,
        /// Domain of the argument.
        want: String,
    },
    /// The operation does not exist for this device or this size.
    #[error("{op}: {what} is not supported: {reason}")]
    Unsupported {
        /// Operation.
        op: &'static str,
        /// What was asked for.
        what: String,
        /// Why it is not served, and what is.
        reason: String,
    },
    /// An argument belongs to another device than the stream.
    #[error("{op}: {arg} is on device {got}, the stream is on {want}")]
    DeviceMismatch {
        /// Operation.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// Device of the argument.
        got: String,
        /// Device of the stream.
        want: String,
    },
    /// A size exceeds what an index type or the device can hold.
    #[error("{op}: {arg}: {what} exceeds the limit of {limit}")]
    TooLarge {
        /// Operation.
        op: &'static str,
        /// Argument.
        arg: &'static str,
        /// What came, with its unit.
        what: String,
        /// Largest value that is served.
        limit: u64,
    },
    /// A launch asks for more than the device or the kernel has: LDS, threads, grid.
    #[error("{op}: kernel {kernel}: {requested} {resource} requested, the limit of {device} is {limit}")]
    Resource {
        /// Operation.
        op: &'static str,
        /// Kernel.
        kernel: String,
        /// Resource and its unit: `bytes of LDS`, `threads per block`, `blocks in x`.
        resource: &'static str,
        /// Amount requested.
        requested: u64,
        /// Amount there is.
        limit: u64,
        /// Device, or what else sets the limit.
        device: String,
    },
    /// There is no code object for the device: no compiler at build time, or the target was not selected.
    #[error("{object}: no code object for {target}: {remedy}")]
    Compiler {
        /// Name of the HIP source.
        object: String,
        /// Target that was wanted.
        target: String,
        /// What to do about it.
        remedy: String,
    },
    /// A code object is corrupt, or contradicts what the library expects of its kernels.
    #[error("code object {object}: {reason}")]
    CodeObject {
        /// Name of the HIP source, and of the kernel where one is concerned.
        object: String,
        /// What is wrong.
        reason: String,
    },
    /// The emulator stopped a kernel: out-of-bounds access, unknown instruction, divergent barrier, ...
    #[error("{device}: {report}")]
    Emulator {
        /// Device.
        device: String,
        /// The emulator's report: kernel, instruction, source line, workgroup, wave, lane, address.
        report: String,
        /// The same as data, where a kernel is at fault.
        #[cfg(feature = "emu")]
        fault: Option<Box<hk_emu::Fault>>,
    },
    /// A call of the GPU driver failed.
    #[error("{call} failed with code {code} ({name}){context}")]
    Driver {
        /// Driver function.
        call: &'static str,
        /// The driver's error code, as it came.
        code: i32,
        /// The driver's name for the code.
        name: String,
        /// What was being done: device, kernel, grid, LDS. Empty, or begins with `: `.
        context: String,
    },
    /// A rank of a communicator did not arrive in time. The communicator is aborted: every later call gives this again.
    #[error("{op}: rank {rank} waited for rank {missing} in vain; the communicator is aborted")]
    Timeout {
        /// Operation.
        op: &'static str,
        /// The rank that waited.
        rank: usize,
        /// The rank that did not arrive.
        missing: usize,
    },
    /// A communicator is aborted: every later call gives this again.
    #[error("{op}: rank {rank}: the communicator is aborted: {reason}")]
    Aborted {
        /// Operation.
        op: &'static str,
        /// The rank that called.
        rank: usize,
        /// Why it was aborted.
        reason: String,
    },
    /// The library of collectives refused a call, or failed.
    #[error("{op}: rank {rank}: {call} failed with code {code} ({name}): {reason}")]
    Collective {
        /// Operation.
        op: &'static str,
        /// The rank that called.
        rank: usize,
        /// Function of the library.
        call: &'static str,
        /// The library's error code, as it came.
        code: i32,
        /// What the code means.
        name: String,
        /// What the library says about it, and the arguments of the call.
        reason: String,
    },
    /// A library that is looked for at run time is missing, or does not fit.
    #[error("{library}: {reason}")]
    Library {
        /// The library's name.
        library: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// No device answers to a device string.
    #[error("device {spec}: {reason}")]
    NoDevice {
        /// The device string.
        spec: String,
        /// Why there is none, and what to do.
        reason: String,
    },
}

impl Error {
    /// A [`Error::Shape`]; `got` is printed with `{:?}`.
    ///
    /// ```
    /// # use hk_core::Error;
    /// let e = Error::shape("rmsnorm", "w", [4095], "[4096] (cols of x)");
    /// assert_eq!(e.to_string(), "rmsnorm: w: shape [4095], expected [4096] (cols of x)");
    /// ```
    pub fn shape(op: &'static str, arg: &'static str, got: impl Debug, want: impl Display) -> Self {
        Self::Shape { op, arg, got: format!("{got:?}"), want: want.to_string() }
    }

    /// A [`Error::Argument`].
    pub fn argument(op: &'static str, arg: &'static str, got: impl Display, want: impl Display) -> Self {
        Self::Argument { op, arg, got: got.to_string(), want: want.to_string() }
    }

    /// A [`Error::DType`].
    pub fn dtype(op: &'static str, arg: &'static str, got: DType, want: impl Display) -> Self {
        Self::DType { op, arg, got, want: want.to_string() }
    }

    /// A [`Error::Stride`].
    pub fn stride(op: &'static str, arg: &'static str, got: &Layout, want: impl Display) -> Self {
        Self::Stride {
            op,
            arg,
            got: format!("{:?} of shape {:?}", got.strides(), got.shape()),
            want: want.to_string(),
        }
    }

    /// A [`Error::Empty`].
    pub fn empty(op: &'static str, arg: &'static str, axis: usize, shape: &[usize]) -> Self {
        Self::Empty { op, arg, axis, shape: format!("{shape:?}") }
    }

    /// A [`Error::Unsupported`].
    pub fn unsupported(op: &'static str, what: impl Display, reason: impl Display) -> Self {
        Self::Unsupported { op, what: what.to_string(), reason: reason.to_string() }
    }

    /// The same error, of the argument `arg` of `op`: for an error of a [`Layout`] that an operator made from a scalar or a shape of
    /// its own.
    ///
    /// ```
    /// # use hk_core::{Error, Layout};
    /// let e = Layout::contiguous([2, usize::MAX / 2]).unwrap_err().of_argument("topk", "k");
    /// assert!(e.to_string().starts_with("topk: k: shape [2, 9223372036854775807]"));
    /// ```
    #[must_use]
    pub fn of_argument(mut self, op: &'static str, arg: &'static str) -> Self {
        match &mut self {
            Self::Shape { op: o, arg: a, .. }
            | Self::Empty { op: o, arg: a, .. }
            | Self::DType { op: o, arg: a, .. }
            | Self::Stride { op: o, arg: a, .. }
            | Self::Align { op: o, arg: a, .. }
            | Self::Argument { op: o, arg: a, .. }
            | Self::DeviceMismatch { op: o, arg: a, .. }
            | Self::TooLarge { op: o, arg: a, .. } => (*o, *a) = (op, arg),
            _ => {}
        }
        self
    }

    /// A [`Error::TooLarge`].
    pub fn too_large(op: &'static str, arg: &'static str, what: impl Display, limit: u64) -> Self {
        Self::TooLarge { op, arg, what: what.to_string(), limit }
    }
}
