//! The tests of collectives: one program, a module per file.

mod all_reduce;
mod all_reduce_rmsnorm;
mod common;
mod faults;
mod halves;
mod layers;
#[cfg(target_os = "linux")]
mod processes;
mod quantized;
mod rccl;
#[cfg(all(target_os = "linux", any(feature = "hip", feature = "cuda")))]
mod rccl_gpu;
mod rccl_norms;
mod refusals;
mod traffic;
