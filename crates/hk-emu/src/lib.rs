//! Functional emulator of CDNA3 and CDNA4 compute: executes gfx942 and gfx950 code objects on the CPU.
//!
//! A [`Machine`] is a device: memory, and launches of the kernels of loaded code objects. It runs the very instructions
//! that a GPU would run, in waves of 64 lanes, with real barriers and LDS. An access that is out of bounds, misaligned
//! or late ends the launch with a [`Fault`] that names the kernel, the instruction, its source line, workgroup, wave,
//! lane, address and the nearest allocation. What is not emulated is an error by name, never a silent no-op.
//!
//! A launch whose waves all wait for memory that no wave is left to write ends with a report as well.
//!
//! Results depend on the code object and its inputs alone: not on the host's instruction set, and not on the number of
//! threads. Where they could depend on the order of workgroups (atomics that return a value or round, loads at agent
//! scope), workgroups communicate in the order of a single thread, and run in parallel up to there; see [`BlockOrder`].
//!
//! Several devices of one host, a [`Node`], reach each other's memory, and their launches advance side by side.
//!
//! ```no_run
//! use hk_emu::{Dispatch, Machine, MachineOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let machine = Machine::new(MachineOptions::default());
//! let module = machine.load(&std::fs::read("kernels.co")?)?;
//! let x = machine.alloc(4096, 256, "x")?;
//! machine.fill(x, &1.0f32.to_le_bytes(), 4096)?;
//! let args = x.to_le_bytes();
//! let dispatch = Dispatch { grid: [16, 1, 1], block: [64, 1, 1], dynamic_lds: 0, args: &args };
//! let counters = machine.launch(&module, "scale", &dispatch)?;
//! println!("{} wave instructions", counters.instructions);
//! # Ok(())
//! # }
//! ```

// For test code that unit tests share with integration tests.
#[cfg(test)]
extern crate self as hk_emu;

mod checks;
mod costs;
mod counters;
mod effects;
mod exec;
mod fault;
mod file;
mod hazard_rules;
pub mod isa;
mod launch;
mod loader;
mod lower;
mod machine;
mod memory;
mod mutate;
mod node;
mod observe;
mod placement;
mod program;
mod registers;
mod schedule;
mod shared;
mod tables;
mod trace;
mod wave;
mod words;

pub use checks::{Check, Checks, UnknownCheck};
pub use costs::{Clocks, Costs};
pub use counters::{Counters, Details, LineCounters, Profile, Resources};
pub use exec::Level;
pub use fault::{Access, Fault, MemoryProblem, Site, Space};
pub use file::{FilePlace, MemoryFile};
pub use launch::{BlockOrder, Dispatch, Host, UnknownOrder};
pub use loader::{LoadError, Module};
pub use lower::executes;
pub use machine::{Machine, MachineOptions, PeerError};
pub use memory::StreamRace;
pub use memory::{MemoryError, Near};
pub use mutate::{Candidate, Mutant, MutantError, Mutation};
pub use node::Node;
pub use observe::streams::Mark;
pub use placement::Placement;
pub use shared::MemoryHandle;
pub use tables::{MatrixNumerics, UnknownNumerics};
pub use trace::{BlockTrace, Instruction, LaneAtomic, Operation, Sample, Trace, Traffic, Unit, WaveTrace};
pub use words::POISON;
