//! The tests of the mixture-of-experts kernels: one program, a module per file.

mod align;
mod common;
mod corners;
mod experts;
mod fused;
mod routing;
mod sum;
mod top1;
mod topk;
mod weights;
