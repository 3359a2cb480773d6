//! The operators again, in f64 and plain loops: what the kernels are measured against.
//!
//! Inputs are the values that the kernels read, already rounded to their types; results are not rounded unless the
//! operator says so.

pub mod qk_concat;
