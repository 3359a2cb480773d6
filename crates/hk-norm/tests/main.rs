//! The tests of the norms: one program, a module per file.

mod common;
mod corners;
mod fused_add_rmsnorm;
mod layernorm;
mod references;
mod refusals;
mod rmsnorm;
mod rmsnorm_pad;
