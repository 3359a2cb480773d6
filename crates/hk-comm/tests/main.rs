//! The tests of collectives: one program, a module per file.

mod all_reduce;
mod all_reduce_rmsnorm;
mod common;
mod faults;
mod halves;
mod layers;
mod quantized;
mod refusals;
mod traffic;
