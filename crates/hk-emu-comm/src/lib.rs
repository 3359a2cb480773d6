#![doc = include_str!("../README.md")]

mod arithmetic;
mod blob;
mod communicator;
mod hub;
mod id;
mod remote;

pub use arithmetic::{DataType, Reduction};
pub use communicator::{Call, Communicator, Kind, Memory};
pub use id::UniqueId;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A rank did not call in time. The communicator is aborted.
    #[error("rank {missing} did not call in time")]
    Timeout {
        /// The first rank that was missing.
        missing: usize,
    },
    /// The communicator was aborted.
    #[error("the communicator is aborted")]
    Aborted,
    /// Ranks call different things.
    #[error("{own} on rank {rank}, {other_call} on rank {other}")]
    Mismatch {
        /// This rank.
        rank: usize,
        /// What it calls.
        own: String,
        /// A rank that calls something else.
        other: usize,
        /// What that one calls.
        other_call: String,
    },
    /// A rank has left the communicator that a call waits for.
    #[error("rank {rank} has left the communicator")]
    Left {
        /// The rank.
        rank: usize,
    },
    /// The call makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// Memory of the call is not accessible.
    #[error("{0}")]
    Memory(String),
    /// The process that has made the unique id does not answer.
    #[error("the process of the unique id does not answer: {0}")]
    Transport(String),
}
