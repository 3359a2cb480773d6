//! Modelled time of kernels for gfx942 and gfx950.
//!
//! The emulator executes some workgroups of a launch and records what their waves do ([`hk_emu::Trace`]). This crate
//! replays those records on a model of a compute unit ([`cu`]) that has its share of the device's memory, and places all
//! workgroups of the launch ([`model`]). What the model assumes of the machine is in one table ([`constants`]), each
//! constant with its source, and in one file for each part ([`parts`]).
//!
//! Times are modelled, never measured: `docs/timing.md` says with which error.

mod arguments;
mod arrive;
pub mod constants;
pub mod cu;
pub mod error;
pub mod figure;
pub mod fit;
pub mod launch;
pub mod model;
pub mod parts;
pub mod path;
pub mod predict;
pub mod rows;
