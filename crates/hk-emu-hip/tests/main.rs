//! The runtime's tests: its functions, its symbols, and programs that use it.
#![cfg(target_os = "linux")]

mod api;
mod common;
mod errors;
mod fuzz;
mod programs;
mod symbols;
