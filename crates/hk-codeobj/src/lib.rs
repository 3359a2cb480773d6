//! Reader of AMDGPU code objects (and of PTX): kernels, resources, occupancy.
//!
//! A code object is the ELF file that the compiler makes of one HIP source for one target. [`CodeObject::parse`]
//! reads what a loader and a launcher need from it: the segments to map, the relocations to apply, and for every
//! kernel its arguments, its registers and its 64-byte hardware [`Descriptor`].
//!
//! The bytes are not trusted. A malformed file is a [`ParseError`], never a panic, and no allocation is larger than
//! the input implies. Facts that the metadata note and the descriptor both state must agree.
//!
//! ```no_run
//! let bytes = std::fs::read("rmsnorm.gfx942.co").unwrap();
//! let object = hk_codeobj::CodeObject::parse(&bytes).unwrap();
//! for kernel in &object.kernels {
//!     println!("{}: {} VGPRs, {} waves per SIMD", kernel.name, kernel.total_vgprs, kernel.occupancy(object.arch));
//! }
//! ```
//!
//! Source: the LLVM project's *User Guide for AMDGPU Backend*, code object versions 4 to 6.

mod arch;
mod descriptor;
mod error;
mod metadata;
mod object;
mod ptx;

pub use arch::{Arch, UnknownArch, occupancy, workgroups_per_cu};
pub use descriptor::Descriptor;
pub use error::ParseError;
pub use object::{CodeObject, Kernel, KernelArg, Relocation, RelocationField, RelocationValue, Segment};
