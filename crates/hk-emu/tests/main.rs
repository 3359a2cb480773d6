//! The emulator's tests.

mod alignment;
mod clang;
mod clocks;
mod common;
mod conversions;
mod counts;
mod coverage;
mod faults;
mod hostile;
mod isa;
mod kernels;
mod matrix;
mod memory;
mod modules;
mod nodes;
mod pipeline;
#[cfg(target_os = "linux")]
mod processes;
mod races;
mod semantics;
mod tickets;
mod traces;
mod uninit;
