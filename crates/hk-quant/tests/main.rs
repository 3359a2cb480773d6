//! The tests of the quantizers: one program, a module per file.

mod common;
mod corners;
mod fused_rmsnorm;
mod memory;
mod mx;
mod per_token;
mod references;
mod tensors_and_groups;
